/*
 * libksm tests: region, dirty, scan, run, merge, discard through an engine
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engine.h"
#include "prim.h"
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
        read_stages(read_from->merge.small);
    }
    ret = prim_real.uffd_move(fd, to, from, len, done);
    if (now) {
        read_stages(read_from->merge.small);
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
    if (!p.e->wp_async) {
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
    g_assert(index_lookup(&e->index, r[0]->tag[0]) == PLACE_NONE);
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
    e->pool.max_sharing = users;
    m = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 512, 7, 0);
    r = util_add(e, m, NULL);
    for (unsigned i = 0; i < 8 && !r->count[PAGE_MERGED]; i++) {
        util_passes(e, 1);
    }
    g_assert(r->count[PAGE_MERGED] == 2 * each);
    g_assert(g_hash_table_size(e->pool.patterns) == 2);
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
    cost[0] = &e->merge.isolate_ns;
    cost[1] = &e->merge.map_ns;
    cost[2] = &e->merge.copy_ns;
    cost[3] = &e->merge.back_ns;
    g_assert(e->merge.move_ns > 0);
    for (unsigned i = 0; i < G_N_ELEMENTS(cost); i++) {
        first[i] = *cost[i];
        g_assert(first[i] > 0);
        *cost[i] *= 1001;
    }
    merge_doubt_costs(e);
    for (unsigned i = 0; i < G_N_ELEMENTS(cost); i++) {
        g_assert(*cost[i] < 950 * first[i] && *cost[i] > 900 * first[i]);
    }
    for (unsigned i = 0; i < 500; i++) {
        merge_doubt_costs(e);
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
        .fd = e->pagemap,
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

static void test_hint(void)
{
    Pair p;
    KsmStats s;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
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
    int got = wp_scan(wp_engine->pagemap, from, len, false, found, n);
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
                   wp_scan(wp_engine->pagemap, (char *)to + i * PAGE, PAGE,
                           true, found, 1) >= 0;
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
    if (!p.e->wp_async) {
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
    g_test_add_func("/region/refuse", test_refuse);
    g_test_add_func("/region/forget", test_forget);
    g_test_add_func("/stats/reasons", test_reasons);
    return g_test_run();
}
