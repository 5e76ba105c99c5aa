/*
 * libksm tests: what is left to the kernel's KSM
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Those of /tail/ksmd need ksmd to run, fast: scripts/lib/host/with_ksmd.py
 * does, and says so by KSM_TEST_KSMD.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/prim.h"
#include "engine/state.h"
#include "engine/tail.h"
#include "house.h"
#include "merge/parts.h"

#ifndef PR_SET_MEMORY_MERGE
#define PR_SET_MEMORY_MERGE 67
#endif

#define EACH    8u      /* one page in so many is equal to another: no run */
#define ALONE   (PAIR_PAGES / EACH)
#define WAIT_S  60
#define TICK    UINT64_C(120000000000)  /* ns: when rests may end */

typedef struct Left {
    KsmEngine *e;
    Mem *m;
    KsmRegion *r;
} Left;

/* What is to be ahead of the real clock, so that it begins just after a tick. */
static uint64_t ahead;

static uint64_t now_ahead(void)
{
    return prim_real.now_ns() + ahead;
}

/*
 * There are mappings for long runs, and for what is left to ksmd, but no others.
 * They are not counted any more: as many on any machine.
 */
static void starve(KsmEngine *e)
{
    prim.close(e->vmas.maps);
    e->vmas.maps = -ENOENT;
    vmas_recount(&e->vmas);
    vmas_left(&e->vmas);
    e->vmas.used = e->vmas.limit - e->vmas.limit / 16 - e->vmas.limit / 64;
    e->vmas.since = 0;
}

/*
 * Two chunks; one page in EACH of the first is equal to one of the second, and
 * has no mapping.
 */
static bool left_start(Left *l, bool home, KsmDirtySource dirty)
{
    KsmConfig config;

    ahead = TICK - prim_real.now_ns() % TICK;
    prim.now_ns = now_ahead;
    ksm_config_init(&config);
    config.max_cpu = 100;
    config.dirty = dirty;
    config.tail = true;
    config.free_policy = KSM_FREE_LAZY;
    l->e = util_engine_of(&config);
    if (!l->e) {
        prim.now_ns = prim_real.now_ns;
        return false;
    }
    l->m = mem_new(PAIR_PAGES, 0, MEM_SMALL);
    for (size_t i = 0; i < PAIR_PAGES; i++) {
        bool equal = i % EACH == 0;

        mem_fill(l->m, i, equal ? 1 + i % CHUNK_PAGES : 100000 + i);
    }
    if (home) {
        g_assert(madvise(l->m->addr, PAIR_PAGES * PAGE, MADV_DONTFORK) == 0);
    }
    l->r = util_add(l->e, l->m, &mem_ops);
    starve(l->e);
    return true;
}

static void left_end(Left *l)
{
    mem_check(l->m);
    region_check(l->r);
    util_remove(l->r);
    mem_check(l->m);
    ksm_engine_free(l->e);
    mem_free(l->m);
    prim.now_ns = prim_real.now_ns;
}

typedef struct Seen {
    unsigned marked;    /* chunks that ksmd is told to look at */
    size_t merged;      /* pages that it has merged */
} Seen;

/* What the kernel says of the memory. */
static Seen left_seen(const Left *l)
{
    g_autofree char *text = NULL;
    g_auto(GStrv) lines = NULL;
    unsigned long from = 0, to = 0, start = (uintptr_t)l->m->addr;
    size_t bytes = 0, kib = 0;

    g_assert(g_file_get_contents("/proc/self/smaps", &text, NULL, NULL));
    lines = g_strsplit(text, "\n", -1);
    for (char **line = lines; *line; line++) {
        unsigned long a, b;

        if (sscanf(*line, "%lx-%lx ", &a, &b) == 2) {
            from = MAX(a, start);
            to = MIN(b, start + PAIR_PAGES * PAGE);
        } else if (from < to && g_str_has_prefix(*line, "VmFlags:")) {
            bytes += strstr(*line, " mg") ? to - from : 0;
        } else if (from < to && sscanf(*line, "KSM: %lu kB", &a) == 1) {
            kib += a;
        }
    }
    g_assert(bytes % CHUNK == 0);
    return (Seen) { bytes / CHUNK, kib / (PAGE / 1024) };
}

static unsigned left_marked(const Left *l)
{
    return left_seen(l).marked;
}

static void passes(Left *l, unsigned n)
{
    util_passes(l->e, n);
}

static void test_given(void)
{
    KsmStats s;
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    passes(&l, 8);
    g_assert(util_stats(l.e).kernel_left == 2 * CHUNK);
    g_assert(left_marked(&l) == 2);
    s = util_stats(l.e);
    g_assert(s.reasons[KSM_REASON_VMA_LIMIT] > 0);
    /* and what is equal to those alone */
    g_assert(s.reasons[KSM_REASON_VMA_LIMIT] +
             s.reasons[KSM_REASON_NOT_WORTH] == ALONE);
    left_end(&l);
}

/* The mappings that what is left may need are not for runs, however long. */
static void test_share(void)
{
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    l.e->vmas.used = l.e->vmas.limit - l.e->vmas.limit / 16;
    mem_fill_run(l.m, 100, 128, 500000, 1);
    mem_fill_run(l.m, CHUNK_PAGES + 100, 128, 500000, 1);
    passes(&l, 12);
    g_assert(util_stats(l.e).pages_sharing == 0);
    g_assert(util_stats(l.e).kernel_left == 2 * CHUNK);
    /* with less, all is kept for those who cannot wait */
    g_assert(ksm_unmerge(l.r, 0, 2 * CHUNK) == 0);
    l.e->vmas.used = l.e->vmas.limit - MIN(1024, l.e->vmas.limit / 32) / 2;
    passes(&l, 40);
    g_assert(util_stats(l.e).kernel_left == 0);
    /* least of all where there are none at all */
    l.e->vmas.reserve = SIZE_MAX;
    vmas_recount(&l.e->vmas);
    passes(&l, 10);
    g_assert(l.e->vmas.limit == 0 && util_stats(l.e).kernel_left == 0);
    left_end(&l);
}

/*
 * Where only the tail's share is left those that were refused for it are not
 * tried soon; it says nothing of what they cost.
 */
static void test_refused(void)
{
    unsigned n = 0;
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    l.r->chunk[0].late = l.r->chunk[1].late = 1;
    passes(&l, 60);
    for (unsigned i = 0; i < 2; i++) {
        const KsmChunk *c = &l.r->chunk[i];

        if (c->why_not == KSM_REASON_VMA_LIMIT) {
            g_assert(c->backoff > 3 && c->late == 0);
            n++;
        }
    }
    g_assert(n > 0);
    left_end(&l);
}

/* What is looked at is to be calm when it is given, but not for ever. */
static void test_tried(void)
{
    unsigned n = 0;
    KsmChunk *c;
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    passes(&l, 8);
    g_assert(ksm_unmerge(l.r, 0, 2 * CHUNK) == 0);
    passes(&l, 1);
    c = l.r->chunk;
    c[0].tail_wait = c[1].tail_wait = 12;
    while (c[0].tail_wait > 3) {
        g_assert(++n < 20);
        c[1].flags |= CHUNK_VISIT;
        passes(&l, 1);
        g_assert(c[0].tail_wait == c[1].tail_wait);
        g_assert(l.e->tail.waiting == 0);
    }
    for (unsigned i = 0; i < 4; i++) {
        c[0].flags |= CHUNK_VISIT;
        c[1].flags |= CHUNK_VISIT;
        passes(&l, 1);
        g_assert(c[0].tail_wait == 2 && c[1].tail_wait == 2);
        g_assert(l.e->tail.waiting == 2);
    }
    for (n = 0; util_stats(l.e).kernel_left < 2 * CHUNK; n++) {
        g_assert(n < 40);
        c[0].flags |= CHUNK_VISIT;
        c[1].flags |= CHUNK_VISIT;
        passes(&l, 1);
    }
    g_assert(n > 20);
    left_end(&l);
}

static uint64_t rest_ns(Left *l)
{
    passes(l, 1);
    return l->e->scan.idle_ns;
}

#define SOON_NS     UINT64_C(1000000000)

/* What is to be left is not kept waiting by long rests ... */
static void test_soon(void)
{
    unsigned n = 0;
    Left l;

    prim.cpu_ns = util_cpu_by_call;
    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        prim.cpu_ns = prim_real.cpu_ns;
        return;
    }
    while (util_stats(l.e).kernel_left < 2 * CHUNK) {
        uint64_t rest;

        /* passes that cost 5 ms: 15 s of rest */
        l.e->scan.rhythm.owed += 5000000;
        rest = rest_ns(&l);
        g_assert(!l.e->tail.waiting || rest <= SOON_NS);
        g_assert(++n < 16);
    }
    /* nobody waits any more */
    l.e->scan.rhythm.owed += 5000000;
    g_assert(rest_ns(&l) >= 10 * SOON_NS);
    prim.cpu_ns = prim_real.cpu_ns;
    left_end(&l);
}

static unsigned short_rests(KsmEngine *e, unsigned passes)
{
    unsigned n = 0;

    for (unsigned i = 0; i < passes; i++) {
        bool hurry = tail_waits(e);

        tail_rests(e, hurry);
        n += hurry;
    }
    return n;
}

/* ... but for so many passes only, if it never comes to be left. */
static void test_soon_not(void)
{
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    l.e->tail.waiting = 1;
    /* then every second one */
    g_assert(short_rests(l.e, 32) == 32);
    g_assert(short_rests(l.e, 100) == 50);
    /* not more, because at times nobody waits */
    for (unsigned i = 0; i < 10; i++) {
        l.e->tail.waiting = 0;
        g_assert(short_rests(l.e, 3) == 0);
        l.e->tail.waiting = 1;
        g_assert(short_rests(l.e, 3) <= 3);
    }
    g_assert(l.e->tail.hurried >= 30);
    l.e->tail.waiting = 0;
    short_rests(l.e, 100);
    g_assert(l.e->tail.hurried == 0);
    left_end(&l);
}

/* What is dear even late is not tried for ever, and left. */
static void test_dear(void)
{
    unsigned n = 0;
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    l.e->vmas.used = 0;
    /* so few that they do not pay by the first guesses either */
    for (size_t i = 0; i < PAIR_PAGES; i += 2 * EACH) {
        mem_fill(l.m, i, 600000 + i);
    }
    while (util_stats(l.e).kernel_left < 2 * CHUNK) {
        l.e->costs = costs_guess;
        l.e->costs.isolate_ns = 10000000;
        passes(&l, 1);
        g_assert(++n < 24);
    }
    /* the other may be what it found, not tried itself */
    g_assert(l.r->chunk[0].late > 2 || l.r->chunk[1].late > 2);
    g_assert(util_stats(l.e).pages_sharing == 0);
    left_end(&l);
}

/* What tail_pass() says of the first chunk, were it as @as. */
static size_t unworthy_as(Left *l, const KsmChunk *as)
{
    KsmChunk keep = l->r->chunk[0];
    size_t n;

    l->r->chunk[0] = *as;
    l->r->chunk[0].tail_wait = 12;      /* nothing is given yet */
    l->e->tail.unworthy_now = 0;
    tail_pass(l->e, l->r, 0, 1);
    n = l->e->tail.unworthy_now;
    g_assert(l->r->chunk[0].tail_wait < 12);
    l->r->chunk[0] = keep;
    return n;
}

/* What is not worth a mapping, and will not be, wants none. */
static void test_unworthy(void)
{
    KsmChunk as;
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    passes(&l, 1);
    as = l.r->chunk[0];
    as.flags &= ~(CHUNK_TAIL | CHUNK_HUGE | CHUNK_LOOSE | CHUNK_VISIT);
    as.gain = 20;
    as.left = 6;
    as.written = as.fresh = 0;
    as.why_not = KSM_REASON_NOT_WORTH;
    as.late = LATE_MIN;
    g_assert(unworthy_as(&l, &as) == 0);
    as.late = LATE_MIN + 1;
    g_assert(unworthy_as(&l, &as) == 14);
    as.why_not = KSM_REASON_VMA_LIMIT;
    g_assert(unworthy_as(&l, &as) == 0);
    /* a huge page would be split for less than that is worth */
    as.late = 0;
    as.flags |= CHUNK_HUGE;
    as.gain = as.left = parts_gain(&l.e->plan, &as);
    as.gain += as.left - 1;
    g_assert(unworthy_as(&l, &as) == as.left - 1u);
    as.gain++;
    g_assert(unworthy_as(&l, &as) == 0);
    left_end(&l);
}

/* Does the first chunk, with so much left of what is equal, wait for a look? */
static bool waits_for_look(Left *l, unsigned gain, unsigned left,
                           uint16_t flags)
{
    KsmChunk *c = &l->r->chunk[0], keep = *c;
    bool waits;

    c->flags = (c->flags & ~(CHUNK_TAIL | CHUNK_HUGE)) | flags;
    c->gain = gain;
    c->left = left;
    c->written = c->fresh = 0;
    c->why_not = KSM_REASON_NOT_WORTH;
    c->tail_wait = 2;
    c->tail_until = c->tail_vain = 0;
    tail_pass(l->e, l->r, 0, 1);
    waits = c->tail_wait == 2;
    *c = keep;
    return waits;
}

/*
 * Where a quarter is left already others wait for the rest of it, whatever comes
 * of that here.
 */
static void test_mostly_left(void)
{
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    passes(&l, 1);
    l.e->scan.rhythm.check = false;
    g_assert(waits_for_look(&l, 16, 0, CHUNK_VISIT));
    g_assert(!waits_for_look(&l, 16, 4, CHUNK_VISIT));
    g_assert(waits_for_look(&l, 17, 4, CHUNK_VISIT));
    g_assert(waits_for_look(&l, 8, 3, CHUNK_VISIT));
    g_assert(!waits_for_look(&l, 16, 4, CHUNK_RIPENING));
    g_assert(waits_for_look(&l, 16, 4, CHUNK_QUEUED));
    g_assert(waits_for_look(&l, 16, 4, CHUNK_PARKED));
    left_end(&l);
}

static uint64_t later_ns;

static uint64_t now_later(void)
{
    return now_ahead() + later_ns;
}

/*
 * Beside merged pages, too, though all passes look at those where they are
 * rare: that a chunk is to be looked at does not tell that it is not quiet.
 */
static void test_given_rare(gconstpointer data)
{
    Left l;

    /* passes take as long on any machine */
    prim.cpu_ns = util_cpu_by_call;
    if (!left_start(&l, true, GPOINTER_TO_INT(data))) {
        prim.cpu_ns = prim_real.cpu_ns;
        return;
    }
    for (size_t i = 0; i < PAIR_PAGES; i++) {
        size_t at = i % CHUNK_PAGES;

        mem_fill(l.m, i, at >= 64 && at < 192 ? 1 + at : 300000 + i);
    }
    passes(&l, 6);
    g_assert(util_stats(l.e).pages_sharing == 128);
    /*
     * Where isolations take long they are many, and what they cost by this
     * clock makes a page that stands alone worth one.
     */
    costs_init(&l.e->costs);
    for (size_t i = 0; i < PAIR_PAGES; i += EACH) {
        mem_fill(l.m, i, 1 + i % CHUNK_PAGES);
    }
    later_ns = 0;
    prim.now_ns = now_later;
    for (unsigned i = 0; i < 16; i++) {
        later_ns += UINT64_C(30000000000);
        passes(&l, 1);
        g_assert(l.e->scan.rhythm.check || !i);
        /* a write, so that the source tells of one */
        mem_fill(l.m, 300, 200000 + i);
    }
    prim.now_ns = now_ahead;
    prim.cpu_ns = prim_real.cpu_ns;
    g_assert(util_stats(l.e).pages_sharing < 128 + ALONE / 2);
    g_assert(util_stats(l.e).kernel_left == 2 * CHUNK);
    left_end(&l);
}

/* Memory that children inherit: one could not tell whose a page is. */
static void test_inherited(void)
{
    Left l;

    if (!left_start(&l, false, KSM_DIRTY_AUTO)) {
        return;
    }
    passes(&l, 8);
    g_assert(util_stats(l.e).kernel_left == 0);
    g_assert(left_marked(&l) == 0);
    left_end(&l);
}

/* A chunk that is written is taken away, and not given again soon. */
static void test_written(void)
{
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    passes(&l, 8);
    g_assert(left_marked(&l) == 2);
    for (unsigned k = 0; k < 8; k++) {
        for (size_t i = 0; i < CHUNK_PAGES; i++) {
            mem_write(l.m, i, 8, k + i);
        }
        passes(&l, 1);
    }
    g_assert(left_marked(&l) == 1);
    g_assert(util_stats(l.e).kernel_left == CHUNK);
    for (size_t i = 0; i < CHUNK_PAGES; i += EACH) {
        mem_fill(l.m, i, 1 + i);
    }
    passes(&l, 20);
    g_assert(left_marked(&l) == 1);
    left_end(&l);
}

/* ksmd's scans, as the kernel would tell them. */
static unsigned scans;

static int open_scans(const char *path)
{
    int fd;

    if (!g_str_has_suffix(path, "/full_scans")) {
        return prim_real.open_read(path);
    }
    fd = prim_real.memfd("scans");
    g_assert(dprintf(fd, "%u\n", scans) > 0 && lseek(fd, 0, SEEK_SET) == 0);
    return fd;
}

/* Passes, a scan each, until ksmd has so many chunks. */
static unsigned until_left(Left *l, unsigned chunks)
{
    unsigned n = 0;

    while (util_stats(l->e).kernel_left != chunks * CHUNK) {
        scans++;
        ahead += TICK / 32;
        l->e->tail.looked_ns = 0;
        passes(l, 1);
        g_assert(++n < 1000);
    }
    return n;
}

/* Until both are given again, both at once; returns the tick by then. */
static uint64_t rest_end(Left *l)
{
    passes(l, 4);
    for (unsigned k = 0; util_stats(l->e).kernel_left < 2 * CHUNK; k++) {
        g_assert(util_stats(l->e).kernel_left == 0);
        g_assert(l->e->tail.waiting == 0);
        g_assert(k < 2000);
        ahead += TICK;
        passes(l, 2);
    }
    return prim.now_ns() / TICK;
}

/* Where it finds nothing ksmd is asked more and more seldom, until writes. */
static void test_vain(void)
{
    uint64_t was, now;
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    prim.open_read = open_scans;
    until_left(&l, 2);
    for (unsigned k = 0; k < 11; k++) {
        unsigned ticks = 1u << MIN(k, 8);

        until_left(&l, 0);
        was = prim.now_ns() / TICK;
        now = rest_end(&l);
        g_assert(now % ticks == 0);
        g_assert(now > was && now - was <= ticks);
    }
    /* the last of four passes sees only that they had been written before */
    for (unsigned k = 0; util_stats(l.e).kernel_left; k++) {
        for (size_t i = 0; i < PAIR_PAGES && k < 3; i++) {
            mem_write(l.m, i, 8, k + i % CHUNK_PAGES);
        }
        g_assert(k < 8);
        passes(&l, 1);
    }
    /* it was loud: not sooner than after one of them */
    was = prim.now_ns() / TICK;
    g_assert(rest_end(&l) == was + 2);
    prim.open_read = prim_real.open_read;
    left_end(&l);
}

/* Others may give what is equal to it a while later: it is not taken at once. */
static void test_held(void)
{
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    prim.open_read = open_scans;
    until_left(&l, 2);
    for (unsigned k = 0; k < 20; k++) {
        scans++;
        l.e->tail.looked_ns = 0;
        passes(&l, 1);
        g_assert(util_stats(l.e).kernel_left == 2 * CHUNK);
    }
    ahead += TICK / 2;
    passes(&l, 2);
    g_assert(util_stats(l.e).kernel_left == 0);
    prim.open_read = prim_real.open_read;
    left_end(&l);
}

/* A long rest is not for what was written since. */
static void test_rest_cut(void)
{
    KsmChunk *c;
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    c = l.r->chunk;
    passes(&l, 2);
    g_assert(util_stats(l.e).kernel_left == 0);
    c[0].tail_until = c[1].tail_until = l.e->tail.tick + 1000;
    passes(&l, 1);
    g_assert(c[0].tail_until == l.e->tail.tick + 1000);
    for (unsigned k = 0; k < 3; k++) {
        for (size_t i = 0; i < CHUNK_PAGES; i++) {
            mem_write(l.m, i, 8, k + i);
        }
        passes(&l, 1);
    }
    for (size_t i = 0; i < CHUNK_PAGES; i += EACH) {
        mem_fill(l.m, i, 1 + i);
    }
    ahead += TICK;
    passes(&l, 8);
    g_assert(util_stats(l.e).kernel_left == 0);
    ahead += TICK;
    passes(&l, 8);
    g_assert(left_marked(&l) == 1 && (c[0].flags & CHUNK_TAIL));
    left_end(&l);
}

/* What was given at different times, once or often in vain, is given together. */
static void test_vain_together(void)
{
    KsmChunk *c;
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    prim.open_read = open_scans;
    c = l.r->chunk;
    c[1].tail_wait = 22;
    until_left(&l, 1);
    g_assert(c[0].flags & CHUNK_TAIL);
    c[1].tail_tries = 2;
    until_left(&l, 0);
    until_left(&l, 1);
    g_assert(c[1].flags & CHUNK_TAIL);
    until_left(&l, 0);
    /* one may be given alone before that, as often as it wants */
    for (unsigned k = 0; util_stats(l.e).kernel_left < 2 * CHUNK; k++) {
        g_assert(k < 40);
        ahead += TICK / 8;
        scans++;
        passes(&l, 4);
    }
    g_assert(prim.now_ns() / TICK % 4 == 0);
    prim.open_read = prim_real.open_read;
    left_end(&l);
}

static void test_unmerged(void)
{
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    passes(&l, 8);
    g_assert(ksm_unmerge(l.r, 0, CHUNK) == 0);
    g_assert(left_marked(&l) == 1);
    ksm_engine_set_run(l.e, false);
    g_assert(ksm_unmerge(l.r, 0, 2 * CHUNK) == 0);
    g_assert(left_marked(&l) == 0);
    g_assert(util_stats(l.e).kernel_left == 0);
    left_end(&l);
}

/* Left to the kernel, but for a run from page 100 on of each: that is mapped. */
static bool left_start_mapped(Left *l, size_t run)
{
    if (!left_start(l, true, KSM_DIRTY_AUTO)) {
        return false;
    }
    passes(l, 8);
    mem_fill_run(l->m, 100, run, 500000, 1);
    mem_fill_run(l->m, CHUNK_PAGES + 100, run, 500000, 1);
    passes(l, 12);
    g_assert(util_stats(l->e).pages_sharing >= run);
    g_assert(util_stats(l->e).kernel_left == 2 * CHUNK);
    return true;
}

static int advise_keeps_chunks(void *addr, size_t len, int advice)
{
    return advice == MADV_UNMERGEABLE && len > 64 * PAGE
           ? -EAGAIN : prim_real.advise(addr, len, advice);
}

/* That memory stays with the kernel does not hide behind a busy device. */
static void test_unmerged_busy(void)
{
    size_t run = 30;
    Left l;

    if (!left_start_mapped(&l, run)) {
        return;
    }
    mem_write(l.m, 105, 0, 0xee);
    l.m->busy = true;
    prim.advise = advise_keeps_chunks;
    g_assert(ksm_unmerge(l.r, 0, PAIR_PAGES * PAGE) == -ENOMEM);
    g_assert(util_stats(l.e).kernel_left == 2 * CHUNK);
    prim.advise = prim_real.advise;
    g_assert(ksm_unmerge(l.r, 0, PAIR_PAGES * PAGE) == -EBUSY);
    g_assert(util_stats(l.e).kernel_left == 0);
    l.m->busy = false;
    left_end(&l);
}

/* While merging is off ksmd is not to merge on. */
static void test_off(void)
{
    gint64 end = g_get_monotonic_time() + WAIT_S * G_USEC_PER_SEC;
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    passes(&l, 8);
    g_assert(left_marked(&l) == 2);
    ksm_engine_set_run(l.e, false);
    while (ksm_step(l.e, 0) >= 0 && g_get_monotonic_time() < end) {
        g_usleep(1000);
    }
    g_assert(left_marked(&l) == 0);
    left_end(&l);
}

/* A discard maps anew what was merged: that is part of its chunk, too. */
static void test_discarded(void)
{
    size_t run = 30, was;
    Left l;

    if (!left_start_mapped(&l, run)) {
        return;
    }
    was = mem_mappings(l.m);
    g_assert(ksm_discard(l.r, 100 * PAGE, run * PAGE) == 0);
    mem_gone(l.m, 100, run);
    g_assert(mem_mappings(l.m) < was);
    left_end(&l);
}

/* What the kernel may have merged is not released lazily. */
static void test_hinted(void)
{
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    passes(&l, 8);
    g_assert(left_marked(&l) == 2);
    g_assert(ksm_free_hint(l.r, 0, CHUNK) == 0);
    g_assert(mem_present(l.m, 0, CHUNK_PAGES) == 0);
    mem_gone(l.m, 0, CHUNK_PAGES);
    mem_check(l.m);
    /* taken away it is like other memory */
    g_assert(ksm_unmerge(l.r, CHUNK, CHUNK) == 0);
    g_assert(ksm_free_hint(l.r, CHUNK, CHUNK) == 0);
    g_assert(mem_present(l.m, CHUNK_PAGES, CHUNK_PAGES) == CHUNK_PAGES);
    for (size_t i = 0; i < CHUNK_PAGES; i++) {
        mem_fill(l.m, CHUNK_PAGES + i, 3);
    }
    left_end(&l);
}

/* Nor is memory that its owner marked. */
static void test_hinted_marked(void)
{
    Left l;

    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        return;
    }
    util_remove(l.r);
    g_assert(madvise(l.m->addr, PAIR_PAGES * PAGE, MADV_MERGEABLE) == 0);
    l.r = util_add(l.e, l.m, &mem_ops);
    g_assert(ksm_free_hint(l.r, 0, CHUNK) == 0);
    g_assert(mem_present(l.m, 0, CHUNK_PAGES) == 0);
    mem_gone(l.m, 0, CHUNK_PAGES);
    left_end(&l);
}

static bool process_mark(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    g_test_skip("a sanitizer maps terabytes, and the kernel unmerges them all");
    return false;
#else
    if (prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) < 0) {
        g_test_skip("needs PR_SET_MEMORY_MERGE (Linux 6.4, CAP_SYS_RESOURCE)");
        return false;
    }
    return true;
#endif
}

static int advise_keeps_ksmd(void *addr, size_t len, int advice)
{
    return advice == MADV_UNMERGEABLE ? -EAGAIN
                                      : prim_real.advise(addr, len, advice);
}

/* Merged within itself; its owner has taken it away from ksmd, as QEMU does. */
static bool marked_start(Left *l)
{
    KsmConfig config;

    ksm_config_init(&config);
    config.max_cpu = 100;
    config.free_policy = KSM_FREE_LAZY;
    l->e = util_engine_of(&config);
    if (!l->e) {
        return false;
    }
    l->m = mem_new(PAIR_PAGES, 0, MEM_SMALL);
    for (size_t i = 0; i < PAIR_PAGES; i++) {
        mem_fill(l->m, i, 1 + i % CHUNK_PAGES);
    }
    g_assert(madvise(l->m->addr, PAIR_PAGES * PAGE, MADV_UNMERGEABLE) == 0);
    l->r = util_add(l->e, l->m, &mem_ops);
    passes(l, 8);
    g_assert(util_stats(l->e).merged >= CHUNK_PAGES);
    return true;
}

/*
 * All that the process maps is for ksmd (MemoryKSM=yes), but not what we map: it
 * would take away write-protection, and merge what is lazily free.
 */
static void test_process_marked(void)
{
    Left l;

    if (!process_mark() || !marked_start(&l)) {
        return;
    }
    g_assert(left_marked(&l) == 0);
    /* a page of its own in a mapping of the pool */
    mem_write(l.m, 3, 0, 0xee);
    g_assert(ksm_discard(l.r, CHUNK / 2, CHUNK / 2) == 0);
    mem_gone(l.m, CHUNK_PAGES / 2, CHUNK_PAGES / 2);
    g_assert(left_marked(&l) == 0);
    prim.advise = advise_keeps_ksmd;
    g_assert(ksm_unmerge(l.r, 0, PAIR_PAGES * PAGE) == -ENOMEM);
    mem_check(l.m);
    prim.advise = prim_real.advise;
    g_assert(ksm_unmerge(l.r, 0, PAIR_PAGES * PAGE) == 0);
    g_assert(left_marked(&l) == 0);
    left_end(&l);
    g_assert(prctl(PR_SET_MEMORY_MERGE, 0, 0, 0, 0) == 0);
}

/* Where that is refused nothing is released lazily. */
static void test_process_marked_refused(void)
{
    Left l;

    if (!process_mark() || !marked_start(&l)) {
        return;
    }
    prim.advise = advise_keeps_ksmd;
    g_assert(ksm_discard(l.r, 0, CHUNK) == 0);
    prim.advise = prim_real.advise;
    mem_gone(l.m, 0, CHUNK_PAGES);
    for (size_t i = 0; i < CHUNK_PAGES; i++) {
        mem_write(l.m, i, 0, 1);
    }
    g_assert(ksm_free_hint(l.r, 0, CHUNK) == 0);
    g_assert(mem_present(l.m, 0, CHUNK_PAGES) == 0);
    mem_gone(l.m, 0, CHUNK_PAGES);
    left_end(&l);
    g_assert(prctl(PR_SET_MEMORY_MERGE, 0, 0, 0, 0) == 0);
}

static uintptr_t taken_from, taken_to;     /* away from ksmd, last */
static unsigned protects;

static int advise_taken(void *addr, size_t len, int advice)
{
    if (advice == MADV_UNMERGEABLE) {
        taken_from = (uintptr_t)addr;
        taken_to = taken_from + len;
    }
    return prim_real.advise(addr, len, advice);
}

static int protect_taken(const UffdRange *range, bool on)
{
    uintptr_t at = (uintptr_t)range->addr;

    if (on) {
        g_assert(at >= taken_from && at + range->len <= taken_to);
        protects++;
    }
    return prim_real.uffd_protect(range, on);
}

/* Its owner gives all of it to ksmd, long after it was given to the engine. */
static void test_marked_late(void)
{
    Left l;

    if (!marked_start(&l)) {
        return;
    }
    g_assert(madvise(l.m->addr, PAIR_PAGES * PAGE, MADV_MERGEABLE) == 0);
    protects = 0;
    prim.advise = advise_taken;
    prim.uffd_protect = protect_taken;
    g_assert(ksm_unmerge(l.r, 0, PAIR_PAGES * PAGE) == 0);
    g_assert(protects > 0);
    prim.advise = prim_real.advise;
    prim.uffd_protect = prim_real.uffd_protect;
    left_end(&l);
}

static bool has_ksmd(void)
{
    if (!g_getenv("KSM_TEST_KSMD")) {
        g_test_skip("needs ksmd to run: scripts/lib/host/with_ksmd.py");
        return false;
    }
    return true;
}

/* Steps until as many pages are known to be the kernel's. */
static void wait_kernel(Left *l, uint64_t least, uint64_t most)
{
    gint64 end = g_get_monotonic_time() + WAIT_S * G_USEC_PER_SEC;
    uint64_t n;

    do {
        passes(l, 1);
        g_usleep(10000);
        n = util_stats(l->e).kernel_pages;
    } while ((n < least || n > most) && g_get_monotonic_time() < end);
    g_assert(n >= least);
    g_assert(n <= most);
}

/* ksmd locks the page it looks at, and may be put to sleep with it: later. */
static void pinned_passes(Left *l)
{
    for (unsigned i = 0;
         i < 100 && util_stats(l->e).reasons[KSM_REASON_PINNED]; i++) {
        passes(l, 1);
    }
    g_assert(util_stats(l->e).reasons[KSM_REASON_PINNED] == 0);
}

static void ksmd_merges(KsmDirtySource dirty)
{
    Left l;
    KsmStats s;

    if (!has_ksmd() || !left_start(&l, true, dirty)) {
        return;
    }
    wait_kernel(&l, ALONE, ALONE);
    g_assert(left_seen(&l).merged == ALONE);
    /* the kernel's own figures are read once a second */
    g_usleep(1100000);
    passes(&l, 2);
    pinned_passes(&l);
    s = util_stats(l.e);
    g_assert(s.reasons[KSM_REASON_NOT_WORTH] == 0);
    g_assert(s.kernel_saved > 0);
    g_assert(s.kernel_saved < ALONE);
    /* written: ours again */
    for (size_t i = 0; i < CHUNK_PAGES; i += EACH) {
        mem_write(l.m, i, 100, 7);
    }
    wait_kernel(&l, 0, ALONE / 2);
    mem_check(l.m);
    /* given back: nothing of the kernel's is left */
    ksm_engine_set_run(l.e, false);
    g_assert(ksm_unmerge(l.r, 0, 2 * CHUNK) == 0);
    g_assert(left_seen(&l).merged == 0);
    g_assert(util_stats(l.e).kernel_pages == 0);
    left_end(&l);
}

static void test_ksmd(void)
{
    ksmd_merges(KSM_DIRTY_AUTO);
}

static void test_ksmd_checksum(void)
{
    ksmd_merges(KSM_DIRTY_CHECKSUM);
}

/* Runs that come to be equal around the kernel's pages are merged by us. */
static void test_ksmd_beside(void)
{
    Left l;

    if (!has_ksmd()) {
        return;
    }
    /*
     * By the call: measured on a busy machine isolating is dear, and seven
     * pages between two of the kernel's are left alone.
     */
    prim.cpu_ns = util_cpu_by_call;
    if (!left_start(&l, true, KSM_DIRTY_AUTO)) {
        prim.cpu_ns = prim_real.cpu_ns;
        return;
    }
    wait_kernel(&l, ALONE, ALONE);
    l.e->vmas.used = 0;     /* there are mappings for short runs, too */
    for (size_t i = 0; i < CHUNK_PAGES; i++) {
        if (i % EACH) {
            mem_fill(l.m, i, 700000 + i);
            mem_fill(l.m, CHUNK_PAGES + i, 700000 + i);
        }
    }
    /*
     * What ksmd merges looks written: on a busy machine the chunks are hot by
     * now, and asked about every few passes.
     */
    for (unsigned i = 0; i < 100 && util_stats(l.e).pages_sharing == 0; i++) {
        passes(&l, 1);
    }
    mem_check(l.m);
    pinned_passes(&l);
    g_assert(util_stats(l.e).pages_sharing +
                     util_stats(l.e).kernel_pages >= CHUNK_PAGES / 2);
    left_end(&l);
    prim.cpu_ns = prim_real.cpu_ns;
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/tail/given", test_given);
    g_test_add_data_func("/tail/given/rare", GINT_TO_POINTER(KSM_DIRTY_AUTO),
                         test_given_rare);
    g_test_add_data_func("/tail/given/rare/checksum",
                         GINT_TO_POINTER(KSM_DIRTY_CHECKSUM), test_given_rare);
    g_test_add_func("/tail/share", test_share);
    g_test_add_func("/tail/refused", test_refused);
    g_test_add_func("/tail/tried", test_tried);
    g_test_add_func("/tail/soon", test_soon);
    g_test_add_func("/tail/soon/not", test_soon_not);
    g_test_add_func("/tail/dear", test_dear);
    g_test_add_func("/tail/unworthy", test_unworthy);
    g_test_add_func("/tail/mostly-left", test_mostly_left);
    g_test_add_func("/tail/inherited", test_inherited);
    g_test_add_func("/tail/written", test_written);
    g_test_add_func("/tail/vain", test_vain);
    g_test_add_func("/tail/held", test_held);
    g_test_add_func("/tail/rest/cut", test_rest_cut);
    g_test_add_func("/tail/vain/together", test_vain_together);
    g_test_add_func("/tail/unmerged", test_unmerged);
    g_test_add_func("/tail/unmerged/busy", test_unmerged_busy);
    g_test_add_func("/tail/off", test_off);
    g_test_add_func("/tail/discarded", test_discarded);
    g_test_add_func("/tail/hinted", test_hinted);
    g_test_add_func("/tail/hinted/marked", test_hinted_marked);
    g_test_add_func("/tail/marked-late", test_marked_late);
    g_test_add_func("/tail/process", test_process_marked);
    g_test_add_func("/tail/process/refused", test_process_marked_refused);
    g_test_add_func("/tail/ksmd/merges", test_ksmd);
    g_test_add_func("/tail/ksmd/checksum", test_ksmd_checksum);
    g_test_add_func("/tail/ksmd/beside", test_ksmd_beside);
    return g_test_run();
}
