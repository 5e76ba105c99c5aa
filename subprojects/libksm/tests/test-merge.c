/*
 * libksm tests: region, dirty, scan, run, merge, discard through an engine
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/prim.h"
#include "engine/discard.h"
#include "engine/state.h"
#include "memory/admit.h"
#include "memory/attr.h"
#include "watch/free.h"
#include "stores.h"
#include "util.h"

/* Two areas with equal content, merged. */
typedef struct Pair {
    KsmEngine *e;
    Mem *a, *b;
    KsmRegion *ra, *rb;
} Pair;

static bool pair_start(Pair *p, KsmScope scope, KsmDirtySource dirty,
                       const KsmRegionOps *ops, MemPages kind)
{
    p->e = util_engine(scope, dirty);
    if (!p->e) {
        return false;
    }
    p->a = mem_new(1024, 0, kind);
    p->b = mem_new(1024, 0, kind);
    mem_fill_run(p->a, 0, 1024, 1, 1);
    mem_fill_run(p->b, 0, 1024, 1, 1);
    p->ra = util_add(p->e, p->a, ops);
    p->rb = util_add(p->e, p->b, ops);
    return true;
}

static void pair_end(Pair *p)
{
    region_check(p->ra);
    region_check(p->rb);
    mem_check(p->a);
    mem_check(p->b);
    util_remove(p->ra);
    util_remove(p->rb);
    mem_check(p->a);
    mem_check(p->b);
    g_assert(util_stats(p->e).pages_shared == 0);
    ksm_engine_free(p->e);
    mem_free(p->a);
    mem_free(p->b);
}

static void test_merge(gconstpointer data)
{
    KsmDirtySource dirty = GPOINTER_TO_INT(data);
    const KsmRegionOps *ops = dirty == KSM_DIRTY_LOG ? &mem_ops_log : NULL;
    Pair p;
    KsmStats s;

    if (!pair_start(&p, KSM_SCOPE_VM, dirty, ops, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    s = util_stats(p.e);
    g_assert(s.dirty == dirty);
    g_assert(s.pages_shared == 1024 && s.pages_sharing == 1024);
    g_assert(s.merged == 2048);
    g_assert(s.merged_runs <= 4);
    g_assert(mem_anonymous(p.a, 0, 1024) == 0);
    /* mapped again, for whoever touches it next */
    g_assert(mem_present(p.a, 0, 1024) == 1024);
    g_assert(mem_present(p.b, 0, 1024) == 1024);
    g_assert(s.profit > 1000 * 4096 - (int64_t)s.metadata - 65536);
    /* written pages are noticed, and nothing but them changes */
    for (unsigned i = 0; i < 100; i++) {
        mem_write(p.b, i * 3, i, 1);
    }
    mem_check(p.a);
    util_passes(p.e, 6);
    s = util_stats(p.e);
    g_assert(s.cow_broken == 100);
    g_assert(s.pages_sharing == 1024 - 100);
    pair_end(&p);
}

/* Whose pages are written when all is decided, just before they are taken. */
static Mem *late;
static unsigned late_step;      /* each of them, or every so many */

static int late_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    Mem *m = late;

    if (m && (char *)from >= m->addr &&
        (char *)from < m->addr + m->pages * PAGE_BYTES) {
        size_t page = ((char *)from - m->addr) / PAGE_BYTES;

        late = NULL;
        for (size_t i = 0; i < len / PAGE_BYTES; i += late_step) {
            mem_write(m, page + i, i, 0x5a);
        }
    }
    return prim_real.uffd_move(fd, to, from, len, done);
}

/*
 * A hash decides nothing: what has changed since is kept as it is, whether it
 * was to map a slot (@first: of the area that is copied last) or to fill it.
 */
static void verify_late(KsmDirtySource dirty, bool first, unsigned step)
{
    uint64_t failed;
    KsmRegion *rc;
    Mem *c;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, dirty, NULL, MEM_SMALL)) {
        return;
    }
    for (unsigned i = 100; i < 200; i++) {
        mem_fill(p.b, i, 0);
    }
    late = first ? p.a : p.b;
    late_step = step;
    prim.uffd_move = late_move;
    util_passes(p.e, 4);
    prim.uffd_move = prim_real.uffd_move;
    g_assert(!late);
    mem_check(p.a);
    mem_check(p.b);
    g_assert(util_stats(p.e).verify_failed > 0);
    util_passes(p.e, 8);
    g_assert(util_stats(p.e).pages_sharing >= 1024 - 100 - 512 / step - 1);
    /* a slot that is not what its hash says is not taken for it again */
    failed = util_stats(p.e).verify_failed;
    util_passes(p.e, 8);
    g_assert(util_stats(p.e).verify_failed == failed);
    /* nor are those it was compared with hidden from who is equal to them */
    c = mem_new(1024, 0, MEM_SMALL);
    mem_fill_run(c, 0, 1024, 1, 1);
    rc = util_add(p.e, c, NULL);
    util_passes(p.e, 8);
    g_assert(rc->count[PAGE_MERGED] == 1024);
    mem_check(c);
    util_remove(rc);
    mem_free(c);
    pair_end(&p);
}

static void test_verify(gconstpointer data)
{
    for (unsigned step = 1; step <= 5; step += 4) {
        verify_late(GPOINTER_TO_INT(data), false, step);
        verify_late(GPOINTER_TO_INT(data), true, step);
    }
}

/* Somebody reads the staging areas, who should not: once in so many moves. */
static KsmEngine *read_from;
static unsigned read_moves, read_every;

static void read_stages(const char *stage)
{
    for (size_t i = 0; i < 2 * CHUNK_BYTES; i += PAGE_BYTES) {
        /* volatile: so that the kernel puts zeroes where there is nothing */
        (void)*(const volatile char *)(stage + i);
    }
}

static int read_and_move(int fd, void *to, void *from, size_t len,
                         size_t *done)
{
    bool now = read_moves < 40 && read_moves++ % read_every == 0;
    int ret;

    if (now) {
        read_stages(read_from->stage.small);
    }
    ret = prim_real.uffd_move(fd, to, from, len, done);
    if (now) {
        read_stages(read_from->stage.small);
    }
    return ret;
}

/*
 * A debugger, process_vm_readv() or mlockall() populates the staging areas:
 * those zeroes are nobody's memory.
 */
static void test_stage_read(gconstpointer data)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL,
                    GPOINTER_TO_INT(data))) {
        return;
    }
    if (!p.e->dirty.wp_async) {
        g_test_skip("the staging area is registered for missing pages: who "
                    "reads it waits (UFFD_FEATURE_WP_ASYNC is Linux 6.7)");
        pair_end(&p);
        return;
    }
    read_from = p.e;
    for (read_every = 1; read_every < 4; read_every++) {
        read_moves = 0;
        prim.uffd_move = read_and_move;
        for (unsigned i = 0; i < 8; i++) {
            /* some to keep, some that are gone */
            mem_write(p.a, 100 + i, 7, 1);
            mem_fill(p.b, 700 + 2 * i, 0);
            g_assert(ksm_discard(p.rb, (300 + 2 * i) * PAGE, PAGE) == 0);
            mem_gone(p.b, 300 + 2 * i, 1);
            util_passes(p.e, 2);
            mem_check(p.a);
            mem_check(p.b);
        }
        g_assert(read_moves);
        prim.uffd_move = prim_real.uffd_move;
        ksm_rescan(p.e);    /* whatever failed to be isolated until now */
        util_passes(p.e, 12);
        mem_check(p.a);
        mem_check(p.b);
        g_assert(util_stats(p.e).pages_sharing > 900);
        g_assert(ksm_unmerge(p.ra, 0, 1024 * PAGE) == 0);
        g_assert(ksm_unmerge(p.rb, 0, 1024 * PAGE) == 0);
    }
    pair_end(&p);
}

#define PINNED 205

static Mem *pinned;
static unsigned pinned_met;

/* One page cannot be moved, the first time. */
static int pinned_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    char *pin = pinned->addr + PINNED * PAGE_BYTES;
    int ret;

    if (pinned_met < 2 && pin >= (char *)from && pin < (char *)from + len) {
        pinned_met++;
        if (pin == from) {
            *done = 0;
            return -EBUSY;
        }
        ret = prim_real.uffd_move(fd, to, from, pin - (char *)from, done);
        return ret < 0 ? ret : -EBUSY;
    }
    return prim_real.uffd_move(fd, to, from, len, done);
}

/*
 * Three times the same 100 pages in one chunk: those at 400 are to map slots
 * that those at 200 are to fill.  Where one of them is pinned its slot stays
 * empty, and what was to map it is kept.
 */
static void test_pinned_fill(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = pinned = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 512, 1000, 1);
    for (unsigned i = 0; i < 512; i += 200) {
        mem_fill_run(m, i, 100, 1, 1);
    }
    pinned_met = 0;
    prim.uffd_move = pinned_move;
    r = util_add(e, m, NULL);
    for (unsigned i = 0; i < 8 && pinned_met < 2; i++) {
        util_passes(e, 1);
    }
    g_assert(pinned_met == 2);
    mem_check(m);
    /* of a content one page stays; the pinned one is not part of it */
    g_assert(mem_anonymous(m, PINNED, 1) == 1);
    g_assert(mem_anonymous(m, 400 + PINNED - 200, 1) == 1);
    g_assert(mem_anonymous(m, 401 + PINNED - 200, 1) == 0);
    g_assert(util_stats(e).verify_failed == 1);
    util_passes(e, 12);
    prim.uffd_move = prim_real.uffd_move;
    mem_check(m);
    g_assert(util_stats(e).pages_sharing >= 2 * 99);
    region_check(r);
    util_remove(r);
    mem_check(m);
    ksm_engine_free(e);
    mem_free(m);
}

static void test_huge(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_HUGE)) {
        return;
    }
    util_passes(p.e, 4);
    g_assert(util_stats(p.e).pages_sharing == 1024);
    pair_end(&p);
}

/* A huge page is not broken for less than split_min_pages. */
static void test_split_min(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    Mem *a, *b;
    KsmRegion *ra, *rb;
    KsmStats s;

    if (!e) {
        return;
    }
    a = mem_new(512, 0, MEM_HUGE);
    b = mem_new(512, 0, MEM_HUGE);
    mem_fill_run(a, 0, 512, 1, 1);
    mem_fill_run(b, 0, 512, 10001, 1);
    mem_fill_run(b, 0, 60, 1, 1);
    ra = util_add(e, a, NULL);
    rb = util_add(e, b, NULL);
    util_passes(e, 8);
    s = util_stats(e);
    g_assert(s.huge_split == 0 && s.pages_sharing == 0);
    g_assert(s.reasons[KSM_REASON_NOT_WORTH] == 120);
    mem_fill_run(b, 60, 60, 61, 1);
    util_passes(e, 12);
    s = util_stats(e);
    /* ... if huge pages could be had at all */
    g_assert(s.pages_sharing == 120 || s.huge_split == 0);
    mem_check(a);
    mem_check(b);
    util_remove(ra);
    util_remove(rb);
    ksm_engine_free(e);
    mem_free(a);
    mem_free(b);
}

static void test_zero(gconstpointer data)
{
    KsmScope scope = GPOINTER_TO_INT(data);
    KsmEngine *e = util_engine(scope, KSM_DIRTY_PAGEMAP);
    KsmStats s, own;
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(1000, 100, MEM_SMALL);
    mem_fill_run(m, 0, 400, 0, 0);
    mem_fill_run(m, 500, 100, 1, 0);
    r = util_add(e, m, NULL);
    util_passes(e, 4);
    s = util_stats(e);
    g_assert(s.zero_pages == 400);
    g_assert(s.merged == 400 + s.pages_shared + s.pages_sharing);
    ksm_region_get_stats(r, &own);
    g_assert(own.merged == s.merged);
    g_assert(mem_present(m, 0, 500) == 0);
    g_assert(scope == KSM_SCOPE_VM ? s.pages_sharing > 0
                                   : s.pages_sharing == 0);
    mem_write(m, 5, 5, 5);
    util_passes(e, 4);
    g_assert(util_stats(e).zero_pages == 399);
    mem_check(m);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

static void test_pattern(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    KsmRegion *r;
    KsmStats s;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(8192, 0, MEM_SMALL);
    mem_fill_run(m, 0, 8192, 7, 0);
    r = util_add(e, m, NULL);
    util_passes(e, 6);
    s = util_stats(e);
    g_assert(s.pages_sharing + s.pages_shared == 8192);
    g_assert(s.pages_shared <= 512);
    g_assert(s.merged_runs < 100);
    mem_check(m);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

/* Who discards pages just before they are taken, behind the engine's back. */
static Mem *emptied;
static unsigned n_emptied;

static int empty_and_move(int fd, void *to, void *from, size_t len,
                          size_t *done)
{
    Mem *m = emptied;
    size_t page = ((char *)from - m->addr) / PAGE_BYTES;

    for (size_t i = 0; (char *)from >= m->addr && page + i < m->pages &&
                       i < len / PAGE_BYTES; i += 8) {
        g_assert(madvise(m->addr + (page + i) * PAGE, PAGE,
                         MADV_DONTNEED) == 0);
        mem_gone(m, page + i, 1);
        n_emptied++;
    }
    return prim_real.uffd_move(fd, to, from, len, done);
}

/* What turns out to be a hole is one in the books, too, and stays one. */
static void test_hole(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    emptied = p.a;
    n_emptied = 0;
    prim.uffd_move = empty_and_move;
    for (unsigned i = 0; i < 4 && !n_emptied; i++) {
        util_passes(p.e, 1);
    }
    prim.uffd_move = prim_real.uffd_move;
    g_assert(n_emptied > 0);
    g_assert(p.ra->count[PAGE_HOLE] == n_emptied);
    g_assert(p.ra->count[PAGE_HOLE] + p.ra->count[PAGE_MERGED] == 1024);
    g_assert(mem_present(p.a, 0, 1024) == 1024 - n_emptied);
    util_passes(p.e, 6);
    g_assert(p.ra->count[PAGE_HOLE] == n_emptied);
    pair_end(&p);
}

/* Zeroes that were given back count as such whatever is merged around them. */
static void test_given_among(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    for (unsigned i = 0; i < 1024; i += 8) {
        mem_fill_run(p.a, i, 4, 0, 0);
        mem_fill_run(p.a, i + 4, 4, 70000 + i, 1);
    }
    util_passes(p.e, 6);
    g_assert(util_stats(p.e).zero_pages == 512);
    for (unsigned i = 0; i < 1024; i += 8) {
        mem_fill_run(p.a, i + 4, 4, 1 + i + 4, 1);
    }
    util_passes(p.e, 8);
    g_assert(util_stats(p.e).pages_sharing == 512);
    g_assert(util_stats(p.e).zero_pages == 512);
    g_assert(mem_present(p.a, 0, 1024) == 512);
    pair_end(&p);
}

/*
 * What was isolated with pages that were merged, and put back, is tracked as
 * before, wherever it is between them: a write to it is noticed.
 */
static void test_tracked(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    for (unsigned i = 0; i < 1024; i += 16) {
        mem_fill_run(p.b, i + 12, 4, 50000 + i, 1);
    }
    util_passes(p.e, 6);
    g_assert(util_stats(p.e).pages_sharing == 1024 - 256);
    mem_fill_run(p.b, 0, 1024, 1, 1);
    util_passes(p.e, 12);
    g_assert(mem_anonymous(p.b, 0, 1024) < 1024);
    for (unsigned i = 0; i < 1024; i += 16) {
        g_assert(mem_anonymous(p.b, i + 12, 4) == 0);
    }
    pair_end(&p);
}

/*
 * A pattern made when the index knows nothing of its content, for whoever
 * stood there was part of a plan that came to nothing: others find it.
 */
static void test_pattern_found(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    KsmRegion *r[2];
    Mem *m[2];

    if (!e) {
        return;
    }
    for (unsigned i = 0; i < 2; i++) {
        m[i] = mem_new(512, 0, MEM_SMALL);
    }
    mem_fill_run(m[0], 0, 512, 7, 0);
    r[0] = util_add(e, m[0], NULL);
    ksm_engine_set_vma_reserve(e, SIZE_MAX);
    util_passes(e, 4);
    g_assert(r[0]->count[PAGE_EQUAL] == 512);
    g_assert(index_lookup(&e->content.index, r[0]->tag[0]) == PLACE_NONE);
    ksm_engine_set_vma_reserve(e, 0);
    ksm_rescan(e);
    util_passes(e, 12);
    g_assert(r[0]->count[PAGE_MERGED] == 512);
    /* one page at a time, each of which has to be looked up */
    mem_fill_run(m[1], 0, 512, 1000, 1);
    for (unsigned i = 0; i < 512; i += 2) {
        mem_fill(m[1], i, 7);
    }
    r[1] = util_add(e, m[1], NULL);
    util_passes(e, 6);
    g_assert(r[1]->count[PAGE_MERGED] == 256);
    for (unsigned i = 0; i < 2; i++) {
        mem_check(m[i]);
        region_check(r[i]);
        util_remove(r[i]);
        mem_free(m[i]);
    }
    ksm_engine_free(e);
}

/*
 * Where every slot has all the users it may have, a plan makes one replica more
 * and no others: what is left is for another time.
 */
static void test_pattern_full(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    const unsigned users = 2, each = users * PATTERN_START;
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    engine_pool(e)->max_sharing = users;
    m = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 512, 7, 0);
    r = util_add(e, m, NULL);
    for (unsigned i = 0; i < 8 && !r->count[PAGE_MERGED]; i++) {
        util_passes(e, 1);
    }
    g_assert(r->count[PAGE_MERGED] == 2 * each);
    g_assert(g_hash_table_size(engine_pool(e)->patterns) == 2);
    g_assert(util_stats(e).pages_sharing == 2 * each - 2 * PATTERN_START);
    ksm_rescan(e);
    util_passes(e, 12);
    g_assert(r->count[PAGE_MERGED] >= 3 * each);
    mem_check(m);
    region_check(r);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

/*
 * Before anything was measured nothing is for free; costs that were measured
 * too high come back to what is usual.
 */
static void test_doubt(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    uint64_t *cost[4], first[4];

    if (!e) {
        return;
    }
    cost[0] = &e->costs.isolate_ns;
    cost[1] = &e->costs.map_ns;
    cost[2] = &e->costs.copy_ns;
    cost[3] = &e->costs.back_ns;
    g_assert(e->costs.move_ns > 0);
    for (unsigned i = 0; i < G_N_ELEMENTS(cost); i++) {
        first[i] = *cost[i];
        g_assert(first[i] > 0);
        *cost[i] *= 1001;
    }
    costs_doubt(&e->costs);
    for (unsigned i = 0; i < G_N_ELEMENTS(cost); i++) {
        g_assert(*cost[i] < 950 * first[i] && *cost[i] > 900 * first[i]);
    }
    for (unsigned i = 0; i < 500; i++) {
        costs_doubt(&e->costs);
    }
    for (unsigned i = 0; i < G_N_ELEMENTS(cost); i++) {
        g_assert(*cost[i] == first[i]);
    }
    ksm_engine_free(e);
}

/* The busy op: everything goes back, and later it is merged. */
static void test_busy(void)
{
    KsmStats s;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops,
                    MEM_SMALL)) {
        return;
    }
    p.a->busy = p.b->busy = true;
    util_passes(p.e, 6);
    s = util_stats(p.e);
    g_assert(s.pages_sharing == 0 && s.busy > 0);
    g_assert(s.reasons[KSM_REASON_BUSY] > 0);
    mem_check(p.a);
    p.a->busy = p.b->busy = false;
    ksm_rescan(p.e);
    util_passes(p.e, 8);
    g_assert(util_stats(p.e).pages_sharing == 1024);
    /* written pages under a busy device cannot be given back */
    mem_write(p.a, 3, 3, 3);
    p.a->busy = true;
    g_assert(ksm_unmerge(p.ra, 0, 1024 * PAGE) == -EBUSY);
    mem_check(p.a);
    p.a->busy = false;
    pair_end(&p);
}

static void test_inhibited(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops,
                    MEM_SMALL)) {
        return;
    }
    p.a->inhibited = p.b->inhibited = "for the test";
    util_passes(p.e, 4);
    g_assert(util_stats(p.e).state == KSM_STATE_INHIBITED);
    g_assert(!strcmp(util_stats(p.e).inhibited, "for the test"));
    g_assert(util_stats(p.e).merged == 0);
    p.a->inhibited = p.b->inhibited = NULL;
    util_passes(p.e, 6);
    g_assert(util_stats(p.e).pages_sharing == 1024);
    ksm_engine_set_run(p.e, false);
    /* what is merged is still looked after */
    g_assert(ksm_step(p.e, 0) > 0);
    g_assert(util_stats(p.e).state == KSM_STATE_OFF);
    g_assert(ksm_unmerge(p.ra, 0, 1024 * PAGE) == 0);
    g_assert(ksm_unmerge(p.rb, 0, 1024 * PAGE) == 0);
    g_assert(ksm_step(p.e, 0) == -1);
    ksm_engine_set_run(p.e, true);
    pair_end(&p);
}

static void test_discard(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    g_assert(ksm_discard(p.ra, 100 * PAGE, 50 * PAGE) == 0);
    mem_gone(p.a, 100, 50);
    mem_check(p.a);
    g_assert(mem_present(p.a, 100, 50) == 0 || true);
    /* from now on it is the kernel's own zeroes that a discard gives */
    g_assert(madvise(p.a->addr + 100 * PAGE, 50 * PAGE, MADV_DONTNEED) == 0);
    mem_check(p.a);
    g_assert(ksm_discard(p.ra, 1, PAGE) == -EINVAL);
    g_assert(ksm_discard(p.ra, 1024 * PAGE, PAGE) == -EINVAL);
    g_assert(ksm_discard(p.ra, 0, 1025 * PAGE) == -EINVAL);
    pair_end(&p);
}

/* Pages of the range that cost a fault when they are written. */
static size_t protected_pages(KsmEngine *e, const Mem *m, size_t n)
{
    PmRange found[64];
    PmScan scan = {
        .fd = e->kinds.pagemap,
        .start = (uintptr_t)m->addr,
        .end = (uintptr_t)m->addr + n * PAGE,
        .all = PM_PRESENT | PM_WRITTEN,
        .vec = found,
        .vec_len = G_N_ELEMENTS(found),
    };
    ssize_t got = prim.pagemap(&scan);

    for (ssize_t i = 0; i < got; i++) {
        n -= (found[i].end - found[i].start) / PAGE;
    }
    return n;
}

/*
 * A host without swap, where what is free long is given back, and memory is
 * never short: then it would be at once.
 */
static int open_calm(const char *path)
{
    return strstr(path, "pressure") || strstr(path, "memory.") ? -ENOENT
           : strcmp(path, "/proc/swaps") ? prim_real.open_read(path)
                                         : prim_real.memfd("swaps");
}

static KsmEngine *calm_engine(void)
{
    KsmEngine *e;

    prim.open_read = open_calm;
    e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    prim.open_read = prim_real.open_read;
    return e;
}

static void test_hint(void)
{
    bool started;
    Pair p;
    KsmStats s;

    prim.open_read = open_calm;
    started = pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL);
    prim.open_read = prim_real.open_read;
    if (!started) {
        return;
    }
    mem_fill_run(p.a, 0, 512, 90001, 1);
    util_passes(p.e, 4);
    mem_fill_run(p.a, 0, 512, 90001, 1);
    g_assert(ksm_free_hint(p.ra, 0, 512 * PAGE) == 0);
    s = util_stats(p.e);
    g_assert(s.free_hinted == 512);
    g_assert(s.reasons[KSM_REASON_FREED] == 512);
    util_passes(p.e, 5);
    /* freed pages are not hashed again until they are written */
    g_assert(util_stats(p.e).pages_scanned == s.pages_scanned);
    /* nor does the writer pay for our noticing that: small pages */
    g_assert(protected_pages(p.e, p.a, 512) == 0);
    mem_fill_run(p.a, 0, 100, 1, 1);
    util_passes(p.e, 6);
    g_assert(util_stats(p.e).pages_scanned == s.pages_scanned);
    ksm_freer_set_decay(p.e->freer, 0);
    util_passes(p.e, 6);
    g_assert(util_stats(p.e).pages_scanned >= s.pages_scanned + 100);
    g_assert(util_stats(p.e).pages_sharing >= 512 + 100);
    /* reading them now would find the old content or zeroes */
    mem_fill_run(p.a, 100, 412, 0, 0);
    pair_end(&p);
}

static const Mem *whole;        /* its memory cannot be mapped anew */
static unsigned whole_maps, whole_fills;
static int fill_ret;

static uint64_t stopped;

static uint64_t stopped_now_ns(void)
{
    return stopped;
}

static bool is_whole(const void *addr)
{
    return (const char *)addr >= whole->addr &&
           (const char *)addr < whole->addr + whole->pages * PAGE;
}

static void *whole_map(void *addr, size_t len, int prot, int flags, int fd,
                       off_t offset)
{
    if (is_whole(addr)) {
        whole_maps++;
        return NULL;
    }
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

static int whole_advise(void *addr, size_t len, int advice)
{
    if (advice == MADV_POPULATE_WRITE && is_whole(addr)) {
        whole_fills++;
        if (fill_ret < 0) {
            return fill_ret;
        }
    }
    return prim_real.advise(addr, len, advice);
}

/*
 * Merged memory that cannot be mapped anew, or shall not be since mappings run
 * out: zeroes are written.  Where that fails, too, all is as it was.
 */
static void test_discard_in_place(gconstpointer data)
{
    bool no_vmas = GPOINTER_TO_INT(data);
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    g_assert(util_stats(p.e).pages_sharing == 1024);
    whole = p.a;
    whole_maps = whole_fills = 0;
    prim.map = whole_map;
    prim.advise = whole_advise;
    if (no_vmas) {
        g_assert(vmas_free(&p.e->vmas) > 256);
        p.e->vmas.max = p.e->vmas.used + p.e->vmas.since + 256;
        g_assert(p.e->vmas.max >= 256);
        /* they are not counted again meanwhile */
        p.e->vmas.counted = stopped = prim_real.now_ns();
        prim.now_ns = stopped_now_ns;
    }
    fill_ret = -ENOMEM;
    g_assert(ksm_discard(p.ra, 10 * PAGE, 20 * PAGE) == -ENOMEM);
    mem_check(p.a);
    fill_ret = 0;
    g_assert(ksm_discard(p.ra, 10 * PAGE, 20 * PAGE) == 0);
    mem_gone(p.a, 10, 20);
    mem_check(p.a);
    mem_check(p.b);
    g_assert(whole_fills == 2 && !whole_maps == no_vmas);
    g_assert(p.ra->count[PAGE_BROKEN] == 20);
    g_assert(util_stats(p.e).pages_sharing == 1024 - 20);
    /* what is not merged needs neither */
    g_assert(ksm_unmerge(p.rb, 0, 1024 * PAGE) == 0);
    whole = p.b;
    whole_maps = whole_fills = 0;
    g_assert(ksm_discard(p.rb, 10 * PAGE, 20 * PAGE) == 0);
    g_assert(whole_fills == 0 && whole_maps == 0);
    g_assert(p.rb->count[PAGE_HOLE] == 20);
    g_assert(mem_present(p.b, 10, 20) == 0);
    mem_gone(p.b, 10, 20);
    mem_check(p.b);
    prim = prim_real;
    pair_end(&p);
}

/* Mappings of the pool that a region has; its books are to agree. */
static unsigned runs_of(const KsmRegion *r)
{
    unsigned runs = 0;

    for (size_t i = 0; i < r->n_pages; i++) {
        runs += page_is_mapped(r, i) && !region_joined(r, i);
    }
    g_assert(r->runs == runs);
    return runs;
}

/* Merged pages that are discarded are mappings no more. */
static void test_discard_runs(void)
{
    static const unsigned ranges[][2] = {
        { 10, 30 }, { 500, 512 }, { 600, 601 }, { 400, 520 }, { 512, 1024 },
        { 0, 1024 },
    };
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    g_assert(runs_of(p.ra) + runs_of(p.rb) == util_stats(p.e).merged_runs);
    for (unsigned i = 0; i < G_N_ELEMENTS(ranges); i++) {
        unsigned first = ranges[i][0], n = ranges[i][1] - first;

        /* one is in the midst of a mapping, whatever it was before */
        p.ra->chunk[0].flags = p.ra->chunk[1].flags = 0;
        g_assert(ksm_discard(p.ra, first * PAGE, n * PAGE) == 0);
        mem_gone(p.a, first, n);
        g_assert(i == 5 || runs_of(p.ra) >= 1 + (i < 4));
        /* somebody looks at what comes */
        for (unsigned k = 0; k < 2; k++) {
            g_assert(!(p.ra->chunk[k].flags & CHUNK_VISIT) ==
                     !(first < (k + 1) * 512 && first + n > k * 512));
        }
    }
    g_assert(runs_of(p.ra) == 0 && p.ra->count[PAGE_HOLE] == 1024);
    mem_check(p.a);
    g_assert(runs_of(p.rb) == util_stats(p.e).merged_runs);
    pair_end(&p);
}

/* A page that is written, as the engine finds it. */
static void write_found(Pair *p, size_t page)
{
    mem_write(p->a, page, 5, 0x77);
    p->ra->history[page] = 0x35;
    content_leave(&p->e->content, p->ra, page, PAGE_BROKEN);
    g_assert(p->ra->history[page] == 0);
}

/* Where mappings begin and end is known whatever is written in them. */
static void test_joined(void)
{
    static const unsigned broken[] = { 100, 101, 300, 302, 301, 0, 511, 512 };
    KsmRegion *r;
    unsigned runs;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    r = p.ra;
    g_assert(ksm_discard(r, 200 * PAGE, PAGE) == 0);
    mem_gone(p.a, 200, 1);
    runs = runs_of(r);
    for (unsigned i = 0; i < G_N_ELEMENTS(broken); i++) {
        write_found(&p, broken[i]);
        g_assert(r->count[PAGE_BROKEN] == i + 1);
        g_assert(r->chunk[broken[i] / 512].broken > 0);
        region_count_runs(r, 0);
        region_count_runs(r, 1);
        g_assert(runs_of(r) == runs);
        region_check(r);
    }
    /* next to a gap, on either side of it */
    for (unsigned page = 199; page <= 201; page += 2) {
        write_found(&p, page);
        region_count_runs(r, 0);
        g_assert(runs_of(r) == runs);
    }
    g_assert(!region_joined(r, 0) && !region_joined(r, 201));
    g_assert(region_joined(r, 199) && region_joined(r, 202));
    g_assert(region_joined(r, 300) && region_joined(r, 303));
    /* one that is gone takes part in nothing */
    page_again(r, 301, true);
    page_again(r, 301, true);
    page_again(r, 302, true);
    page_again(r, 302, false);
    g_assert(r->chunk[0].again == 1);
    region_check(r);
    r->history[301] = 0x35;
    g_assert(ksm_discard(r, 301 * PAGE, PAGE) == 0);
    mem_gone(p.a, 301, 1);
    g_assert(r->chunk[0].again == 0 && r->history[301] == 0);
    g_assert(runs_of(r) == runs + 1);
    g_assert(!region_joined(r, 301) && !region_joined(r, 302));
    g_assert(region_joined(r, 300));
    pair_end(&p);
}

static char paged_out[512];

static int note_pageout(void *addr, size_t len, int advice)
{
    if (advice == MADV_PAGEOUT) {
        size_t page = ((char *)addr - whole->addr) / PAGE;

        g_assert(page + len / PAGE <= sizeof(paged_out));
        memset(paged_out + page, 1, len / PAGE);
    }
    return prim_real.advise(addr, len, advice);
}

/*
 * Of a chunk in which more is freed than not, only what is freed goes; and
 * what is known of the other pages stays.
 */
static void test_settle(void)
{
    KsmEngine *e = calm_engine();
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 512, 1, 1);
    r = util_add(e, m, &mem_ops);
    util_passes(e, 4);
    g_assert(ksm_free_hint(r, 100 * PAGE, 10 * PAGE) == 0);
    g_assert(ksm_free_hint(r, 120 * PAGE, 1 * PAGE) == 0);
    g_assert(ksm_free_hint(r, 130 * PAGE, 2 * PAGE) == 0);
    /* the owner has it again */
    mem_fill_run(m, 100, 3, 7000, 1);
    g_assert(page_state(r, 115) == PAGE_UNIQUE);
    r->history[115] = 0x35;
    whole = m;
    memset(paged_out, 0, sizeof(paged_out));
    prim.advise = note_pageout;
    ksm_freer_set_decay(e->freer, 0);
    /* not while nothing may be done there; it is not forgotten either */
    m->inhibited = "for the test";
    discard_settle(e);
    g_assert(freer_wait(e->freer) == 0 && r->chunk[0].flags & CHUNK_BLIND);
    m->inhibited = NULL;
    g_assert(discard_settle(e) && !discard_settle(e));
    prim.advise = prim_real.advise;
    for (unsigned i = 0; i < 512; i++) {
        bool freed = (i >= 100 && i < 110) || i == 120 ||
                     (i >= 130 && i < 132);

        g_assert(freed || !paged_out[i]);
        g_assert(freed || page_state(r, i) == PAGE_UNIQUE);
        g_assert(!freed || !(r->state[i] & PAGE_BLIND));
    }
    g_assert(paged_out[101] && paged_out[120] && paged_out[131]);
    /* it is there: that is how one knows that it was written */
    for (unsigned i = 100; i < 103; i++) {
        g_assert(page_state(r, i) == PAGE_NEW && r->state[i] & PAGE_WRITTEN);
    }
    g_assert(r->history[115] == 0x35);
    g_assert(!(r->chunk[0].flags & CHUNK_BLIND));
    g_assert(r->chunk[0].flags & CHUNK_VISIT);
    /* reading the others now would find the old content or zeroes */
    mem_fill_run(m, 103, 7, 1, 0);
    mem_fill_run(m, 120, 1, 1, 0);
    mem_fill_run(m, 130, 2, 1, 0);
    region_check(r);
    mem_check(m);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

/* What a hint is about: how much of it is still there, and what is not. */
static void test_hint_counts(void)
{
    KsmEngine *e = calm_engine();
    KsmRegion *r;
    KsmStats s;
    Mem *m;

    if (!e) {
        return;
    }
    /* zeroes, nothing, something */
    m = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 100, 0, 0);
    mem_fill_run(m, 200, 312, 1, 1);
    r = util_add(e, m, NULL);
    util_passes(e, 4);
    g_assert(util_stats(e).zero_pages == 100);
    g_assert(ksm_free_hint(r, 0, 512 * PAGE) == 0);
    s = util_stats(e);
    g_assert(s.free_hinted == 512 && r->free_hinted == 512);
    g_assert(s.zero_pages == 100);
    g_assert(s.reasons[KSM_REASON_FREED] == 412);
    g_assert(s.lazy_free == 312 * PAGE);
    region_check(r);
    g_assert(ksm_free_hint(r, 0, 513 * PAGE) == -EINVAL);
    g_assert(util_stats(e).free_hinted == 512);
    mem_fill_run(m, 200, 312, 1, 1);
    util_remove(r);
    mem_check(m);
    ksm_engine_free(e);
    mem_free(m);
}

/* A huge page that is freed costs one fault: its next write is noticed. */
static void test_hint_huge(void)
{
    KsmEngine *e = calm_engine();
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(1024, 0, MEM_HUGE);
    mem_fill_run(m, 0, 1024, 1, 1);
    r = util_add(e, m, NULL);
    util_passes(e, 4);
    if (!(r->chunk[0].flags & r->chunk[1].flags & CHUNK_HUGE)) {
        g_test_skip("huge pages cannot be had at present");
    } else {
        g_assert(ksm_free_hint(r, 0, 512 * PAGE) == 0);
        g_assert(!(r->chunk[0].flags & CHUNK_BLIND));
        g_assert(!(r->state[5] & PAGE_BLIND));
        g_assert(ksm_free_hint(r, 512 * PAGE, 511 * PAGE) == 0);
        g_assert(r->chunk[1].flags & CHUNK_BLIND);
        g_assert(r->state[517] & PAGE_BLIND);
        g_assert(r->count[PAGE_FREED] == 1023);
    }
    mem_fill_run(m, 0, 1024, 1, 1);
    util_remove(r);
    mem_check(m);
    ksm_engine_free(e);
    mem_free(m);
}

static void test_unmerge(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    mem_write(p.a, 17, 3, 9);
    g_assert(ksm_unmerge(p.ra, 0, 1024 * PAGE) == 0);
    g_assert(mem_anonymous(p.a, 0, 1024) == 1024);
    mem_check(p.a);
    g_assert(util_stats(p.e).pages_sharing == 0);
    /* and it merges again */
    util_passes(p.e, 8);
    g_assert(util_stats(p.e).pages_sharing >= 1022);
    pair_end(&p);
}

/* Of which pages does the kernel have to note the next write? */
static int wp_scan(int pagemap, char *addr, size_t len, bool protect,
                   PmRange *found, size_t n)
{
    PmScan scan = {
        .fd = pagemap,
        .start = (uintptr_t)addr,
        .end = (uintptr_t)addr + len,
        .all = protect ? 0 : PM_WRITTEN | PM_PRESENT,
        .any = PM_PRESENT,
        .tell = PM_PRESENT,
        .protect = protect,
        .vec = found,
        .vec_len = n,
    };

    return prim_real.pagemap(&scan);
}

static KsmEngine *wp_engine;
static unsigned wp_kept;

/* As kernels will do it that keep write-protection when pages move. */
static int wp_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    size_t n = len / PAGE_BYTES;
    g_autofree PmRange *found = g_new0(PmRange, n);
    g_autofree bool *written = g_new0(bool, n);
    int got = wp_scan(wp_engine->kinds.pagemap, from, len, false, found, n);
    int ret;

    for (int i = 0; i < got; i++) {
        for (uint64_t at = found[i].start; at < found[i].end; at += PAGE) {
            written[(at - (uintptr_t)from) / PAGE] = true;
        }
    }
    ret = prim_real.uffd_move(fd, to, from, len, done);
    for (size_t i = 0; got >= 0 && i < *done / PAGE; i++) {
        /* where nobody asked for it, the kernel does not either */
        wp_kept += !written[i] &&
                   wp_scan(wp_engine->kinds.pagemap, (char *)to + i * PAGE,
                           PAGE, true, found, 1) >= 0;
    }
    return ret;
}

/*
 * Today a page that was moved is not write-protected any more, and
 * thus counts as written; later it will stay so.  Either way no write is
 * missed: what was written last is what is merged.
 */
static void test_wp_kept(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_AUTO, &mem_ops, MEM_SMALL)) {
        return;
    }
    wp_engine = p.e;
    wp_kept = 0;
    if (!p.e->dirty.wp_async) {
        g_test_skip("UFFD_FEATURE_WP_ASYNC is Linux 6.7");
        pair_end(&p);
        return;
    }
    prim.uffd_move = wp_move;
    p.a->busy = p.b->busy = true;
    util_passes(p.e, 6);
    g_assert(wp_kept > 0);
    mem_check(p.a);
    mem_check(p.b);
    mem_fill_run(p.b, 300, 100, 90000, 1);
    p.a->busy = p.b->busy = false;
    ksm_rescan(p.e);
    util_passes(p.e, 10);
    g_assert(util_stats(p.e).pages_sharing == 1024 - 100);
    mem_check(p.b);
    mem_fill_run(p.b, 300, 100, 301, 1);
    for (unsigned i = 0; i < 40; i++) {
        util_passes(p.e, 1);
    }
    mem_check(p.b);
    g_assert(util_stats(p.e).pages_sharing == 1024);
    prim.uffd_move = prim_real.uffd_move;
    pair_end(&p);
}

/* Pages of another node are not merged with ours. */
static void test_nodes(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    KsmRegion *r[2];
    Mem *m[2];

    if (!e) {
        return;
    }
    for (int i = 0; i < 2; i++) {
        m[i] = mem_new(512, 0, MEM_SMALL);
        mem_fill_run(m[i], 0, 512, 1, 1);
        r[i] = ksm_region_add(e, m[i]->addr, 512 * PAGE, i, NULL, NULL, NULL);
        g_assert(r[i]);
    }
    util_passes(e, 6);
    g_assert(util_stats(e).pages_sharing == 0);
    for (int i = 0; i < 2; i++) {
        util_remove(r[i]);
        mem_free(m[i]);
    }
    ksm_engine_free(e);
}

/* Unchanged memory is not hashed again; changing memory is passed over. */
static void test_smart(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    KsmRegion *r;
    KsmStats s;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 512, 1, 1);
    r = util_add(e, m, NULL);
    util_passes(e, 10);
    s = util_stats(e);
    g_assert(s.pages_scanned == 512 && s.pages_unshared == 512);
    g_assert(s.state == KSM_STATE_IDLE);
    for (unsigned i = 0; i < 12; i++) {
        mem_fill_run(m, 0, 512, 1000000 * (i + 2), 1);
        util_passes(e, 4);
    }
    g_assert(util_stats(e).pages_skipped > 512);
    mem_check(m);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

static void refuse(KsmEngine *e, void *addr, size_t len, const char *why)
{
    g_autoptr(GError) err = NULL;

    g_assert(!ksm_region_add(e, addr, len, -1, NULL, NULL, &err));
    g_assert(g_error_matches(err, KSM_ERROR, KSM_ERROR_INVALID));
    g_assert(strstr(err->message, why));
}

static void test_refuse(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_AUTO);
    size_t len = 16 * PAGE;
    void *shared, *locked;
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(64, 0, MEM_SMALL);
    shared = mmap(NULL, len, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    locked = mmap(NULL, len, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    refuse(e, shared, len, "shared");
    /* a sanitizer makes mlock() do nothing */
    if (syscall(SYS_mlock, locked, len) == 0) {
        refuse(e, locked, len, "locked");
    }
    refuse(e, (char *)shared + 1, len, "multiples");
    munmap(shared, len);
    /* not where something was: a sanitizer may map memory of its own there */
    refuse(e, (void *)(uintptr_t)0x10000000, len, "not mapped");
    r = util_add(e, m, NULL);
    refuse(e, m->addr + 32 * PAGE, PAGE, "already");
    g_assert(ksm_region_remove(r, KSM_REMOVE_FORGET) == 0);
    munmap(locked, len);
    ksm_engine_free(e);
    mem_free(m);
}

/*
 * Regions of memory that is made up: /proc/self/smaps says what it is, and
 * all that is done to it is noted.
 */
#define MADE ((char *)(CHUNK * 1000 + 100 * PAGE))
#define MADE_PAGES 1000u

static struct {
    GString *smaps;         /* NULL: it cannot be opened */
    size_t piece;           /* read at once */
    int read_ret;           /* when all is read */
    int files;
    int64_t bytes;          /* had for the region's own state */
    unsigned maps, fails;   /* this one fails, from 1 */
    int policy, policy_ret;
    char log[512];          /* what is done to the memory */
    unsigned map_fails;     /* so often */
    int hole;               /* what the kernel says then */
} made;

/* @first, @end: pages from the region's start. */
static void made_mapping(int first, int end, const char *perms_to_name,
                         const char *flags)
{
    g_string_append_printf(made.smaps, "%lx-%lx %s\nRss: 4 kB\n"
                           "VmFlags: %s%s\n",
                           (unsigned long)(MADE + first * (ssize_t)PAGE),
                           (unsigned long)(MADE + end * (ssize_t)PAGE),
                           perms_to_name, flags, " ");
}

static int made_open(const char *path)
{
    g_assert(!strcmp(path, "/proc/self/smaps"));
    made.files += made.smaps != NULL;
    return made.smaps ? 4711 : -EACCES;
}

static int made_close(int fd)
{
    g_assert(fd == 4711);
    made.files--;
    return 0;
}

static ssize_t made_read(int fd, void *buf, size_t len)
{
    size_t n = MIN(MIN(len, made.piece), made.smaps->len);

    memcpy(buf, made.smaps->str, n);
    g_string_erase(made.smaps, 0, n);
    return n ? n : made.read_ret;
}

static void made_note(const char *format, ...) G_GNUC_PRINTF(1, 2);

static void made_note(const char *format, ...)
{
    size_t len = strlen(made.log);
    va_list args;

    va_start(args, format);
    g_vsnprintf(made.log + len, sizeof(made.log) - len, format, args);
    va_end(args);
}

static bool is_made(const void *addr)
{
    return (char *)addr >= MADE && (char *)addr < MADE + MADE_PAGES * PAGE;
}

static void *made_map(void *addr, size_t len, int prot, int flags, int fd,
                      off_t offset)
{
    void *map = NULL;

    if (!is_made(addr)) {
        if (++made.maps != made.fails) {
            map = prim_real.map(addr, len, prot, flags, fd, offset);
            made.bytes += len;
        }
        return map;
    }
    g_assert(prot == (PROT_READ | PROT_WRITE));
    g_assert((flags & ~MAP_NORESERVE) ==
             (MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED));
    made_note(flags & MAP_NORESERVE ? "map-nr " : "map ");
    if (made.map_fails) {
        made.map_fails--;
        return NULL;
    }
    return addr;
}

static int made_unmap(void *addr, size_t len)
{
    g_assert(len % PAGE == 0);
    made.bytes -= len;
    return prim_real.unmap(addr, len);
}

static int made_advise(void *addr, size_t len, int advice)
{
    if (!is_made(addr)) {
        return prim_real.advise(addr, len, advice);
    }
    if (advice == MADV_NORMAL) {
        made_note("look ");
        return made.hole;
    }
    g_assert(addr == MADE + 7 * PAGE && len == 3 * PAGE);
    made_note("%s ", advice == MADV_DONTFORK ? "dc"
                     : advice == MADV_DONTDUMP ? "dd"
                     : advice == MADV_HUGEPAGE ? "hg"
                     : advice == MADV_NOHUGEPAGE ? "nh" : "?");
    return 0;
}

static int made_policy_get(void *addr, int *mode, unsigned long *mask,
                           size_t bits)
{
    g_assert(addr == MADE && bits == 1024);
    *mode = made.policy;
    mask[0] = 5;
    mask[15] = 6;
    return made.policy_ret;
}

static int made_policy_set(void *addr, size_t len, int mode,
                           const unsigned long *mask, size_t bits)
{
    g_assert(addr == MADE + 7 * PAGE && len == 3 * PAGE && bits == 1024);
    g_assert(mask[0] == 5 && mask[1] == 0 && mask[15] == 6);
    made_note("policy-%d ", mode);
    return 0;
}

static void made_pause(unsigned us)
{
    made_note("pause ");
}

static void made_owner(void *opaque, void *addr, size_t len)
{
    g_assert(opaque == &made);
    g_assert(addr == MADE + 7 * PAGE && len == 3 * PAGE);
    made_note("owner ");
}

static void made_start(void)
{
    memset(&made, 0, sizeof(made));
    made.smaps = g_string_new(NULL);
    made.piece = SIZE_MAX;
    prim.open_read = made_open;
    prim.close = made_close;
    prim.read = made_read;
    prim.map = made_map;
    prim.unmap = made_unmap;
    prim.advise = made_advise;
    prim.policy_get = made_policy_get;
    prim.policy_set = made_policy_set;
    prim.pause = made_pause;
}

static void made_end(KsmRegion *r)
{
    if (r) {
        region_fini(r);
        g_free(r);
    }
    if (made.smaps) {
        g_string_free(made.smaps, true);
    }
    g_assert(made.files == 0 && made.bytes == 0);
    prim = prim_real;
}

/* Of @n pages; NULL if it is not admitted, and that because of @why. */
static KsmRegion *made_region(size_t n, const char *why)
{
    static const KsmRegionOps ops = { .mapped = made_owner };
    KsmRegion *r = g_new0(KsmRegion, 1);
    const char *refused;

    region_init(r, MADE, n * PAGE, -1, &ops, &made);
    refused = admit(r);
    if (!refused && region_alloc(r) < 0) {
        refused = "no memory";
    }
    g_assert(!refused == !why);
    g_assert(!why || strstr(refused, why));
    if (!refused) {
        return r;
    }
    region_fini(r);
    g_free(r);
    return NULL;
}

#define ANON "rw-p 00000000 00:00 0 "
#define USUAL "rd wr mr mw me ac"

/* One mapping of the region, of pages 0 to 15; what is next to it. */
static void test_mapping(void)
{
    static const struct {
        const char *perms_to_name, *flags, *why;
    } cases[] = {
        { ANON, USUAL, NULL },
        { ANON, USUAL " sd dc dd hg nr", NULL },
        { ANON " [anon:ram]", USUAL, NULL },
        { "rw-p 00001000 00:00 0", USUAL, NULL },
        { "rw-s 00000000 00:01 9   /dev/zero (deleted)", USUAL, "is shared" },
        { "rw-s 00000000 00:00 0", USUAL, "is shared" },
        { "rw-p 00000000 08:01 77  /a/file", USUAL, "file-backed" },
        { "r--p 00000000 00:00 0", USUAL, "reading and writing" },
        { "rwxp 00000000 00:00 0", USUAL, "reading and writing" },
        { "---p 00000000 00:00 0", USUAL, "reading and writing" },
        { ANON " [heap]", USUAL, "heap or a stack" },
        { ANON " [stack]", USUAL, "heap or a stack" },
        { ANON " [stack:17]", USUAL, "heap or a stack" },
        { ANON " [vvar]", USUAL, "heap or a stack" },
        { ANON, USUAL " sh", "is shared" },
        { ANON, "ht " USUAL, "hugetlb" },
        { ANON, USUAL " lo sd", "locked" },
        { ANON, USUAL " io", "device" },
        { ANON, USUAL " pf", "device" },
        { ANON, USUAL " wf", "wiped" },
        { ANON, USUAL " um", "userfaultfd" },
        { ANON, USUAL " uw", "userfaultfd" },
        { ANON, USUAL " ui", "userfaultfd" },
    };

    for (unsigned i = 0; i < 2 * G_N_ELEMENTS(cases); i++) {
        unsigned k = i / 2;

        made_start();
        /* a byte at a time, or all at once */
        made.piece = i % 2 ? 1 : SIZE_MAX;
        made_mapping(-9, -8, "rw-s 00000000 00:01 9  /x", USUAL " sh");
        made_mapping(-8, 0, "r--s 00000000 00:01 9  /x", USUAL " lo");
        made_mapping(0, 16, cases[k].perms_to_name, cases[k].flags);
        made_mapping(16, 20, "r--s 00000000 00:01 9  /x", USUAL " lo");
        made_end(made_region(16, cases[k].why));
    }
}

/* What the mappings cover, of pages 0 to 15, and that they are alike. */
static void test_mappings(void)
{
    static const struct {
        int from[2], to[2];
        const char *flags[2], *why;
    } cases[] = {
        { { 0, 8 }, { 8, 16 }, { "", "" }, NULL },
        { { -3, 8 }, { 8, 20 }, { "", "" }, NULL },
        { { -3, 20 }, { 20, 30 }, { "", "sh" }, NULL },
        { { 0, 9 }, { 8, 16 }, { "", "" }, "not mapped" },
        { { 1, 8 }, { 8, 16 }, { "", "" }, "not mapped" },
        { { 0, 8 }, { 8, 15 }, { "", "" }, "not mapped" },
        { { -9, 16 }, { 0, 20 }, { "", "" }, "not mapped" },
        { { -9, -8 }, { -8, -7 }, { "", "" }, "not mapped" },
        { { 16, 20 }, { 20, 21 }, { "", "" }, "not mapped" },
        { { 0, 8 }, { 8, 16 }, { "", "lo" }, "locked" },
        { { 0, 8 }, { 8, 16 }, { "lo", "" }, "locked" },
        { { 0, 8 }, { 8, 16 }, { "dc", "" }, "differ" },
        { { 0, 8 }, { 8, 16 }, { "", "dc" }, "differ" },
        { { 0, 8 }, { 8, 16 }, { "", "dd" }, "differ" },
        { { 0, 8 }, { 8, 16 }, { "dd", "" }, "differ" },
        { { 0, 8 }, { 8, 16 }, { "dc dd", "dd dc hg" }, NULL },
        { { 0, 8 }, { 8, 16 }, { "nh", "" }, NULL },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        made_start();
        for (unsigned k = 0; k < 2; k++) {
            made_mapping(cases[i].from[k], cases[i].to[k], ANON,
                         cases[i].flags[k]);
        }
        made_end(made_region(16, cases[i].why));
    }
}

/* The file cannot be opened, or read, or it ends too early. */
static void test_smaps_fails(void)
{
    made_start();
    g_string_free(made.smaps, true);
    made.smaps = NULL;
    made_end(made_region(16, "cannot be read"));
    made_start();
    made.read_ret = -EIO;
    made_end(made_region(16, "cannot be read"));
    made_start();
    made_end(made_region(16, "not mapped"));
    made_start();
    made_mapping(0, 16, ANON, USUAL);
    made.read_ret = -EIO;
    made_end(made_region(16, "cannot be read"));
    /* it is not read beyond the region */
    made_start();
    made.piece = 1;
    made_mapping(0, 16, ANON, USUAL);
    made_mapping(16, 17, ANON, USUAL);
    g_string_append(made.smaps, "garbage");
    made.read_ret = -EIO;
    made_end(made_region(16, NULL));
}

/* What is mapped anew is as what was there before. */
static void test_attributes(void)
{
    static const struct {
        const char *flags, *behind;
        int policy, policy_ret;
        const char *own, *shared;
    } cases[] = {
        { USUAL, USUAL " nr hg", 0, 0, "map owner ", "owner " },
        { "nr " USUAL, USUAL, 0, 0, "map-nr owner ", "owner " },
        { "dc", "dc nh nr", 0, -ENOSYS, "map dc owner ", "dc owner " },
        { "hg dd nr", "dd", 3, -ENOSYS, "map-nr dd hg owner ",
          "dd owner " },
        { "nh dd dc", "hg dc dd", 1, 0, "map dc dd nh policy-1 owner ",
          "dc dd policy-1 owner " },
        { USUAL, USUAL, 3, 0, "map policy-3 owner ", "policy-3 owner " },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        KsmRegion *r;

        made_start();
        made.policy = cases[i].policy;
        made.policy_ret = cases[i].policy_ret;
        made_mapping(0, 16, ANON, cases[i].flags);
        /* the first mapping's: those of others are not asked for */
        made_mapping(16, 32, ANON, cases[i].behind);
        r = made_region(32, NULL);
        g_assert(attr_map_anonymous(r, page_addr(r, r->n_pages - 512 + 107),
                                    3 * PAGE) == 0);
        g_assert(!strcmp(made.log, cases[i].own));
        made.log[0] = 0;
        attr_give(r, MADE + 7 * PAGE, 3 * PAGE, ATTR_SHARED);
        g_assert(!strcmp(made.log, cases[i].shared));
        made_end(r);
    }
}

/* Mapping fails: tried again, for as long as there is a hole otherwise. */
static void test_map_fails(void)
{
    static const struct {
        unsigned fails;
        int hole, ret;
        const char *log;
    } cases[] = {
        { 1, -ENOMEM, 0, "map map owner " },
        { 4, 0, 0, "map map map map map owner " },
        { 5, 0, -ENOMEM, "map map map map map look " },
        { 6, -EINVAL, -ENOMEM, "map map map map map look " },
        { 5, -ENOMEM, 0, "map map map map map look pause map owner " },
        { 7, -ENOMEM, 0, "map map map map map look pause map look pause "
                         "map look pause map owner " },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        KsmRegion *r;

        made_start();
        made_mapping(0, 16, ANON, USUAL);
        r = made_region(16, NULL);
        made.map_fails = cases[i].fails;
        made.hole = cases[i].hole;
        g_assert(attr_map_anonymous(r, page_addr(r, 107), 3 * PAGE) ==
                 cases[i].ret);
        g_assert(!strcmp(made.log, cases[i].log));
        made_end(r);
    }
}

/* All pages are new, but for those outside; where there is no memory, none. */
static void test_state(void)
{
    unsigned maps = 1;

    for (unsigned fails = 0; fails <= maps; fails++) {
        KsmRegion *r;

        made_start();
        made.fails = fails;
        made_mapping(0, MADE_PAGES, ANON, USUAL);
        r = made_region(MADE_PAGES, fails ? "no memory" : NULL);
        if (r) {
            maps = made.maps;
            g_assert(maps == 4);
            g_assert(r->n_chunks == 3 && r->base == MADE - 100 * PAGE);
            g_assert(r->count[PAGE_NEW] == MADE_PAGES);
            g_assert(r->count[PAGE_OUTSIDE] == 3 * 512 - MADE_PAGES);
            g_assert(page_state(r, 99) == PAGE_OUTSIDE);
            g_assert(page_state(r, 100) == PAGE_NEW);
            g_assert(page_state(r, 1099) == PAGE_NEW);
            g_assert(page_state(r, 1100) == PAGE_OUTSIDE);
            /* nothing is known of when it was written */
            g_assert(r->n_written == MADE_PAGES);
            g_assert(r->chunk[0].written == 412 && r->chunk[0].fresh == 412);
            g_assert(r->chunk[2].written == 76);
            g_assert(r->chunk[1].flags == CHUNK_VISIT);
            /* tags, states and history of pages; what chunks have */
            g_assert(r->meta_bytes == made.bytes);
            g_assert(made.bytes == 5 * 4096);
        }
        made_end(r);
    }
}

static void made_and_refused(void *opaque)
{
    made_start();
    made_mapping(0, 16, ANON, USUAL);
    made_end(made_region(16, NULL));
    made_start();
    made_mapping(0, 16, ANON, "lo");
    made_end(made_region(16, "locked"));
}

/* Neither what was refused nor what was had is left on the heap. */
static void test_leaks(void)
{
    g_assert(!util_leaks(made_and_refused, NULL, 100));
}

/* A counter that drifts is found. */
static void test_check(void)
{
    Pair p;

    if (g_test_subprocess()) {
        if (pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM, NULL,
                       MEM_SMALL)) {
            region_check(p.ra);
            p.ra->lazy++;
            region_check(p.ra);
        } else {
            abort();
        }
        return;
    }
    g_test_trap_subprocess(NULL, 0, 0);
    g_test_trap_assert_failed();
}

/* Forget: the memory is gone, and nothing of it is touched. */
static void test_forget(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    munmap(p.a->addr, 1024 * PAGE);
    g_assert(ksm_region_remove(p.ra, KSM_REMOVE_FORGET) == 0);
    util_passes(p.e, 2);
    mem_check(p.b);
    util_remove(p.rb);
    g_assert(util_stats(p.e).pages_shared == 0);
    ksm_engine_free(p.e);
    mem_free(p.b);
    mem_free(p.a);
}

static void test_reasons(void)
{
    for (unsigned i = 0; i < KSM_REASON_MAX; i++) {
        g_assert(ksm_reason_name(i)[0] && ksm_reason_text(i)[0]);
    }
    g_assert(!strcmp(ksm_reason_name(KSM_REASON_VMA_LIMIT), "vma-limit"));
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    stores_choose();
    g_test_add_data_func("/merge/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_merge);
    g_test_add_data_func("/merge/log", GINT_TO_POINTER(KSM_DIRTY_LOG),
                         test_merge);
    g_test_add_data_func("/merge/checksum",
                         GINT_TO_POINTER(KSM_DIRTY_CHECKSUM), test_merge);
    g_test_add_data_func("/merge/verify/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_verify);
    g_test_add_data_func("/merge/verify/checksum",
                         GINT_TO_POINTER(KSM_DIRTY_CHECKSUM), test_verify);
    g_test_add_data_func("/merge/stage-read/small",
                         GINT_TO_POINTER(MEM_SMALL), test_stage_read);
    g_test_add_data_func("/merge/stage-read/huge",
                         GINT_TO_POINTER(MEM_HUGE), test_stage_read);
    g_test_add_func("/merge/pinned-fill", test_pinned_fill);
    g_test_add_func("/merge/huge", test_huge);
    g_test_add_func("/merge/tracked", test_tracked);
    g_test_add_func("/merge/hole", test_hole);
    g_test_add_func("/merge/given-among", test_given_among);
    g_test_add_func("/merge/doubt", test_doubt);
    g_test_add_func("/merge/busy", test_busy);
    g_test_add_func("/merge/unmerge", test_unmerge);
    g_test_add_func("/merge/wp-kept", test_wp_kept);
    g_test_add_data_func("/run/zero-vm", GINT_TO_POINTER(KSM_SCOPE_VM),
                         test_zero);
    g_test_add_data_func("/run/zero-only", GINT_TO_POINTER(KSM_SCOPE_ZERO),
                         test_zero);
    g_test_add_func("/run/pattern", test_pattern);
    g_test_add_func("/run/pattern-found", test_pattern_found);
    g_test_add_func("/run/pattern-full", test_pattern_full);
    g_test_add_func("/run/split-min", test_split_min);
    g_test_add_func("/scan/inhibited", test_inhibited);
    g_test_add_func("/scan/nodes", test_nodes);
    g_test_add_func("/scan/smart", test_smart);
    g_test_add_func("/discard/range", test_discard);
    g_test_add_func("/discard/hint", test_hint);
    g_test_add_data_func("/discard/in-place/no-map", GINT_TO_POINTER(false),
                         test_discard_in_place);
    g_test_add_data_func("/discard/in-place/no-vmas", GINT_TO_POINTER(true),
                         test_discard_in_place);
    g_test_add_func("/discard/runs", test_discard_runs);
    g_test_add_func("/region/joined", test_joined);
    g_test_add_func("/discard/settle", test_settle);
    g_test_add_func("/discard/hint-counts", test_hint_counts);
    g_test_add_func("/discard/hint-huge", test_hint_huge);
    g_test_add_func("/region/refuse", test_refuse);
    g_test_add_func("/region/forget", test_forget);
    g_test_add_func("/region/mapping", test_mapping);
    g_test_add_func("/region/mappings", test_mappings);
    g_test_add_func("/region/smaps-fails", test_smaps_fails);
    g_test_add_func("/region/attributes", test_attributes);
    g_test_add_func("/region/map-fails", test_map_fails);
    g_test_add_func("/region/state", test_state);
    g_test_add_func("/region/leaks", test_leaks);
    g_test_add_func("/region/check", test_check);
    g_test_add_func("/stats/reasons", test_reasons);
    return g_test_run();
}
