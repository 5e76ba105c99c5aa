/*
 * libksm tests: what scan, run, dirty and discard decide
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What is merged to what, how often memory is looked at, and when it is left
 * alone.  Leaves to others: that memory keeps its bytes whatever happens
 * (test-engine, test-merge, test-fault, test-prop).
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "broken.h"
#include "engine.h"
#include "prim.h"
#include "scan.h"
#include "util.h"

#define PAGES   (4 * 512u)

typedef struct Scene {
    KsmEngine *e;
    KsmRegion *r;
    Mem *m;
} Scene;

static const struct {
    const char *name;
    KsmDirtySource dirty;
} sources[] = {
    { "pagemap", KSM_DIRTY_PAGEMAP },
    { "log", KSM_DIRTY_LOG },
    { "checksum", KSM_DIRTY_CHECKSUM },
};

/*
 * CPU time by the call: what pays is measured, and must not depend on how
 * busy the machine is, nor on a sanitizer.
 */
static uint64_t cpu_by_call(void)
{
    static uint64_t ns;

    return ns += 10000;
}

/* False: skipped. */
static bool scene_start(Scene *s, KsmScope scope, KsmDirtySource dirty,
                        MemPages kind)
{
    s->e = util_engine(scope, dirty);
    if (!s->e) {
        return false;
    }
    s->m = mem_new(PAGES, 0, kind);
    s->r = util_add(s->e, s->m,
                    dirty == KSM_DIRTY_LOG ? &mem_ops_log : &mem_ops);
    return true;
}

static void scene_end(Scene *s)
{
    region_check(s->r);
    mem_check(s->m);
    util_remove(s->r);
    mem_check(s->m);
    g_assert(util_stats(s->e).pages_shared == 0);
    ksm_engine_free(s->e);
    mem_free(s->m);
}

/* --- mappings --- */

static size_t mappings_allowed(void)
{
    g_autofree char *text = NULL;

    g_assert(g_file_get_contents("/proc/sys/vm/max_map_count", &text, NULL,
                                 NULL));
    return g_ascii_strtoull(text, NULL, 10);
}

/* What the program may come to need is left to it, and the reason is told. */
static void test_vma_reserve(void)
{
    size_t room = 3000;
    KsmStats stats, all;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    /* every other page is equal, none of them in a run */
    for (unsigned i = 0; i < PAGES; i++) {
        mem_fill(s.m, i, i % 2 ? 10000 + i : 1 + i % 512);
    }
    mem_fill_run(s.m, 512, 8, 0, 0);
    ksm_engine_set_vma_reserve(s.e, SIZE_MAX);
    util_passes(s.e, 6);
    stats = util_stats(s.e);
    g_assert(stats.pages_sharing == 0 && stats.zero_pages == 8);
    g_assert(stats.reasons[KSM_REASON_VMA_LIMIT] > 0);
    mem_check(s.m);

    room += util_mappings();
    ksm_engine_set_vma_reserve(s.e, mappings_allowed() - room);
    ksm_rescan(s.e);
    util_passes(s.e, 6);
    stats = util_stats(s.e);
    g_assert(stats.pages_sharing > 0);
    g_assert(stats.reasons[KSM_REASON_VMA_LIMIT] > 0);
    g_assert(util_mappings() <= room);
    mem_check(s.m);

    ksm_engine_set_vma_reserve(s.e, 0);
    ksm_rescan(s.e);
    util_passes(s.e, 6);
    all = util_stats(s.e);
    g_assert(all.reasons[KSM_REASON_VMA_LIMIT] == 0);
    g_assert(all.pages_sharing > stats.pages_sharing);
    scene_end(&s);
}

/* So few mappings are left that even the longest runs are not mapped. */
static void test_vma_few(void)
{
    for (unsigned left = 63; left <= 64; left++) {
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
            return;
        }
        mem_fill_run(s.m, 0, 512, 1, 1);
        mem_fill_run(s.m, 512, 512, 1, 1);
        /* as if just counted */
        s.e->vmas = (KsmVmas) {
            .limit = 1000, .used = 1000 - left, .counted = prim.now_ns(),
        };
        util_passes(s.e, 3);
        g_assert(s.e->vmas.limit == 1000);
        g_assert((util_stats(s.e).pages_shared > 0) == (left >= 64));
        scene_end(&s);
    }
}

static uint64_t clock_ns;

static uint64_t clock_set(void)
{
    return clock_ns;
}

#define SECOND  UINT64_C(1000000000)

/*
 * Mappings are counted again when the count may be far from the truth, and no
 * more often: half of @left may be gone after half a second, or a few in ten.
 */
static void test_vma_recount(void)
{
    static const struct {
        size_t used, since;
        uint64_t age;
        bool counted;
    } cases[] = {
        { 0, 0, 100 * SECOND, false },
        { 0, 1, 10 * SECOND, false },
        { 0, 1, 10 * SECOND + 1, true },
        { 500, 0, 100 * SECOND, false },
        { 501, 0, 10 * SECOND, false },
        { 501, 0, 10 * SECOND + 1, true },
        { 200, 200, SECOND, false },
        { 200, 201, SECOND, true },
        { 200, 201, SECOND / 2, false },
        { 200, 201, SECOND / 2 + 1, true },
        { 1001, 1, SECOND, true },
    };
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    prim.now_ns = clock_set;
    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        KsmVmas *v = &s.e->vmas;

        for (unsigned k = 0; k < 2; k++) {
            clock_ns = 100 * SECOND;
            *v = (KsmVmas) {
                .max = 1000, .limit = 1000, .used = cases[i].used,
                .since = cases[i].since, .counted = clock_ns,
            };
            clock_ns += cases[i].age;
            if (k) {
                run_vmas_free(s.e);
            } else {
                run_vmas_left(s.e);
            }
            if (cases[i].counted) {
                g_assert(v->counted == clock_ns && v->since == 0);
                g_assert(v->max == mappings_allowed());
            } else {
                g_assert(v->counted == 100 * SECOND && v->max == 1000);
                g_assert(v->since == cases[i].since);
            }
        }
    }
    prim.now_ns = prim_real.now_ns;
    scene_end(&s);
}

static int maps_fd;

static ssize_t maps_silent(int fd, void *buf, size_t len, off_t offset)
{
    return fd == maps_fd ? -EIO : prim_real.read_at(fd, buf, len, offset);
}

/* What is left: of what there was when counted, less what was made since. */
static void test_vma_left(void)
{
    size_t max = mappings_allowed(), used;
    KsmVmas *v;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    v = &s.e->vmas;
    run_vmas_full(s.e);
    used = max / 100 * 75 - run_vmas_left(s.e);
    /* the allocator may map something, and the share is rounded */
    g_assert(used + 100 > util_mappings() && used < util_mappings() + 100);
    g_assert(v->max == max && v->used <= util_mappings() + 2);
    g_assert(v->used + 2 >= util_mappings());
    g_assert(run_vmas_free(s.e) == max - v->used);
    v->since = 10;
    g_assert(run_vmas_left(s.e) == v->limit - v->used - 10);
    g_assert(run_vmas_free(s.e) == max - v->used - 10);
    /* not to be counted now: then it is what it was, and what was made */
    used = v->used + 10;
    maps_fd = s.e->maps;
    prim.read_at = maps_silent;
    run_vmas_full(s.e);
    g_assert(run_vmas_free(s.e) == max - used);
    g_assert(v->since == 0);
    prim.read_at = prim_real.read_at;
    /* more than there may be: none is left, not very many */
    v->used = max + 1;
    v->counted = prim.now_ns();
    g_assert(run_vmas_left(s.e) == 0 && run_vmas_free(s.e) == 0);
    scene_end(&s);
}

/* --- which chunks are visited --- */

/*
 * Memory that is populated after all was quiet: whatever part of a chunk it
 * is, and wherever the region begins.
 */
static void test_populated(gconstpointer data)
{
    static const struct {
        size_t skip, from, n;
    } parts[] = {
        { 0, 0, 64 }, { 0, 448, 64 }, { 0, 480, 64 }, { 0, 1984, 64 },
        { 100, 0, 64 }, { 480, 0, 64 }, { 100, 924, 512 },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(parts); i++) {
        KsmDirtySource dirty = GPOINTER_TO_INT(data);
        KsmEngine *e = util_engine(KSM_SCOPE_VM, dirty);
        KsmStats stats;
        KsmRegion *r;
        Mem *m;

        if (!e) {
            return;
        }
        m = mem_new(PAGES, parts[i].skip, MEM_SMALL);
        r = util_add(e, m, dirty == KSM_DIRTY_LOG ? &mem_ops_log : &mem_ops);
        util_passes(e, 6);
        g_assert(util_stats(e).pages_scanned == 0);
        mem_fill_run(m, parts[i].from, parts[i].n, 0, 0);
        util_passes(e, 6);
        stats = util_stats(e);
        g_assert(stats.zero_pages == parts[i].n);
        g_assert(mem_present(m, 0, PAGES) == 0);
        mem_check(m);
        util_remove(r);
        ksm_engine_free(e);
        mem_free(m);
    }
}

static Scene *crowded;

/* As a quiet chunk is looked at, the queue of ripe ones becomes full. */
static ssize_t crowd_pagemap(PmScan *scan)
{
    KsmScan *s = &crowded->e->scan;
    KsmRegion *r = crowded->r;

    if (scan->start == (uintptr_t)page_addr(r, 2 * CHUNK_PAGES) &&
        r->chunk[2].fresh && !r->chunk[2].written && s->phase != PHASE_SYNC) {
        prim.pagemap = prim_real.pagemap;
        r->chunk[3].flags |= CHUNK_QUEUED;
        for (; s->n_ripe < RIPE_MAX; s->n_ripe++) {
            s->ripe[s->n_ripe] = page_id(r, 3 * CHUNK_PAGES);
        }
    }
    return prim_real.pagemap(scan);
}

/* A chunk that found no room in the queue is visited in the next pass. */
static void test_queue_full(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 1536, 1, 9999, 1);
    util_passes(s.e, 6);
    mem_fill_run(s.m, 1024, 512, 1, 1);
    crowded = &s;
    prim.pagemap = crowd_pagemap;
    util_passes(s.e, 3);
    g_assert(prim.pagemap == prim_real.pagemap);
    util_passes(s.e, 3);
    g_assert(util_stats(s.e).pages_sharing == 512);
    scene_end(&s);
}

/* --- runs --- */

/*
 * Content that repeats, whatever its period: one copy of it is kept, or a few
 * where a slot may not have more users.
 */
static void test_periods(void)
{
    static const unsigned period[] = { 2, 3, 16, 100, 511, 512, 700 };

    for (unsigned k = 0; k < G_N_ELEMENTS(period); k++) {
        unsigned copies = PAGES / period[k] / 256 + 1;
        KsmStats stats;
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
            return;
        }
        for (unsigned i = 0; i < PAGES; i++) {
            mem_fill(s.m, i, 1 + i % period[k]);
        }
        util_passes(s.e, 6);
        stats = util_stats(s.e);
        g_test_message("period %u: %" PRIu64 " of %u saved, %" PRIu64 " runs",
                       period[k], stats.pages_sharing, PAGES,
                       stats.merged_runs);
        g_assert(stats.pages_shared <= copies * period[k]);
        /* but a few that are alone in their chunk */
        g_assert(stats.pages_sharing + stats.pages_shared >= PAGES - 16);
        g_assert(stats.merged_runs <= PAGES / period[k] + 16);
        scene_end(&s);
    }
}

/*
 * Free slots lie about, a few at a time.  What is copied as one run goes where
 * it stays one, for each costs a mapping.
 */
static void test_runs_whole(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 512, 512, 1, 1);
    util_passes(s.e, 6);
    g_assert(util_stats(s.e).merged_runs == 2);
    for (unsigned i = 0; i < 1024; i += 32) {
        mem_fill_run(s.m, i, 16, 40000 + i, 1);
    }
    util_passes(s.e, 2 * CHECK_PASSES);
    g_assert(util_stats(s.e).pages_shared == 256);
    g_assert(util_stats(s.e).merged_runs == 2);
    mem_fill_run(s.m, 1024, 512, 7000, 1);
    mem_fill_run(s.m, 1536, 512, 7000, 1);
    util_passes(s.e, 8);
    g_assert(util_stats(s.e).pages_shared == 256 + 512);
    g_assert(util_stats(s.e).merged_runs <= 2 + 2);
    scene_end(&s);
}

static Scene *mapped;
static unsigned maps, prefaults;

static void *count_maps(void *addr, size_t len, int prot, int flags, int fd,
                        off_t offset)
{
    maps += fd == mapped->e->pool.map_fd;
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

/* For whoever else has page tables: what is told is mapped, and readable. */
static void count_prefaults(void *opaque, void *addr, size_t len)
{
    const Mem *m = opaque;
    size_t page = ((char *)addr - m->addr) / PAGE, n = len / PAGE;

    prefaults += n;
    g_assert(page % 512 % 40 == 0 && n == 24);
    g_assert(mem_present(m, page, 1) == 1);
    g_assert(mem_anonymous(m, page, n) == 0);
}

/* A run is mapped by one call, and told of by one, whatever its length. */
static void test_runs_calls(void)
{
    const KsmRegionOps ops = { .prefault = count_prefaults };
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    util_remove(s.r);
    s.r = util_add(s.e, s.m, &ops);
    for (unsigned i = 0; i < 480; i += 40) {
        mem_fill_run(s.m, i, 24, 1 + i, 1);
        mem_fill_run(s.m, 512 + i, 24, 1 + i, 1);
        mem_fill_run(s.m, i + 24, 16, 50000 + i, 1);
        mem_fill_run(s.m, 512 + i + 24, 16, 60000 + i, 1);
    }
    mapped = &s;
    maps = prefaults = 0;
    prim.map = count_maps;
    util_passes(s.e, 6);
    prim.map = prim_real.map;
    g_assert(util_stats(s.e).pages_sharing == 12 * 24);
    g_assert(maps == 2 * 12 && prefaults == 2 * 12 * 24);
    scene_end(&s);
}

/* What a page costs is measured where many are isolated at once. */
static void test_measured(void)
{
    for (unsigned n = 2 * SPAN_MIN - 1; n <= 2 * SPAN_MIN; n++) {
        uint64_t move;
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
            return;
        }
        move = s.e->merge.move_ns;
        mem_fill_run(s.m, 0, n, 1, 1);
        mem_fill_run(s.m, 512, n, 1, 1);
        util_passes(s.e, 6);
        g_assert(util_stats(s.e).isolations == 2);
        g_assert((s.e->merge.page_ns > 0) == (n >= 2 * SPAN_MIN));
        g_assert((s.e->merge.move_ns != move) == (n >= 2 * SPAN_MIN));
        scene_end(&s);
    }
}

/* --- resting --- */

typedef enum Rest { REST_INHIBITED, REST_OFF } Rest;

static unsigned touched;

static int touch_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    touched++;
    return prim_real.uffd_move(fd, to, from, len, done);
}

static int touch_register(const UffdRange *range, unsigned mode)
{
    touched++;
    return prim_real.uffd_register(range, mode);
}

static int touch_protect(const UffdRange *range, bool on)
{
    touched++;
    return prim_real.uffd_protect(range, on);
}

static int touch_advise(void *addr, size_t len, int advice)
{
    touched++;
    return prim_real.advise(addr, len, advice);
}

static ssize_t touch_pagemap(PmScan *scan)
{
    touched += scan->protect;
    return prim_real.pagemap(scan);
}

/* Counts what would change how memory is mapped, or cost the guest faults. */
static void touches_count(bool on)
{
    touched = 0;
    prim.uffd_move = on ? touch_move : prim_real.uffd_move;
    prim.uffd_register = on ? touch_register : prim_real.uffd_register;
    prim.uffd_protect = on ? touch_protect : prim_real.uffd_protect;
    prim.advise = on ? touch_advise : prim_real.advise;
    prim.pagemap = on ? touch_pagemap : prim_real.pagemap;
}

static size_t pool_memory(const KsmEngine *e)
{
    struct stat st;

    g_assert(fstat(e->pool.fd, &st) == 0);
    return st.st_blocks * 512;
}

static void scene_rest(Scene *s, Rest rest, bool on)
{
    if (rest == REST_OFF) {
        ksm_engine_set_run(s->e, !on);
    } else {
        s->m->inhibited = on ? "a test says so" : NULL;
    }
}

/*
 * While a region rests what its pages no longer use goes back to the kernel,
 * and is not claimed to be saved; nothing else happens.
 */
static void rest_accounts(KsmDirtySource dirty, Rest rest)
{
    KsmStats before, after;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, dirty, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 768, 1, 1);
    mem_fill_run(s.m, 768, 768, 1, 1);
    mem_fill_run(s.m, 1536, 512, 0, 0);
    util_passes(s.e, 6);
    before = util_stats(s.e);
    g_assert(before.pages_sharing == 768 && before.zero_pages == 512);
    g_assert(before.profit > 0 && pool_memory(s.e) == 768 * PAGE);
    scene_rest(&s, rest, true);
    util_passes(s.e, 1);    /* which may end tracking */
    touches_count(true);
    mem_fill_run(s.m, 0, 512, 5000, 1);
    util_passes(s.e, 2 * CHECK_PASSES);
    g_assert(ksm_step(s.e, 0) > 0);
    after = util_stats(s.e);
    g_assert(after.pages_sharing == 1536 - 512 - 768);
    g_assert(after.cow_broken == 512);
    /* all of it, equal to each other: still nothing is merged */
    mem_fill_run(s.m, 0, PAGES, 7, 0);
    for (unsigned i = 0; i < 100; i++) {
        ksm_step(s.e, 1000000000);
    }
    after = util_stats(s.e);
    g_assert(after.pages_sharing == 0 && after.pages_shared == 0);
    g_assert(pool_memory(s.e) == 0);
    g_assert(after.profit <= 0);
    g_assert(after.merged == before.merged);
    g_assert(after.pages_scanned == before.pages_scanned);
    g_assert(touched == 0);
    touches_count(false);
    /* nothing merged and nobody to merge it: nothing to do */
    g_assert((ksm_step(s.e, 0) == -1) == (rest == REST_OFF));
    region_check(s.r);
    mem_check(s.m);
    scene_rest(&s, rest, false);
    ksm_rescan(s.e);
    util_passes(s.e, 12);
    g_assert(util_stats(s.e).merged > before.merged);
    scene_end(&s);
}

static void test_rest(gconstpointer data)
{
    rest_accounts(GPOINTER_TO_INT(data), REST_INHIBITED);
    rest_accounts(GPOINTER_TO_INT(data), REST_OFF);
}

/* Switched off at any point of a pass: nothing is touched from then on. */
static void test_rest_midway(gconstpointer data)
{
    unsigned ripe = 0;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, GPOINTER_TO_INT(data), MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 512, 512, 1, 1);
    util_passes(s.e, 6);
    g_assert(util_stats(s.e).pages_sharing == 512);
    mem_fill_run(s.m, 1024, 512, 2000, 1);
    mem_fill_run(s.m, 1536, 512, 2000, 1);
    for (unsigned i = 0; i < 300; i++) {
        uint64_t merged;

        ksm_step(s.e, 1);
        if (!s.e->scan.n_ripe && i % 5) {
            continue;   /* what rests is passed over: let a pass be made */
        }
        ripe |= s.e->scan.n_ripe;
        merged = util_stats(s.e).merged;
        ksm_engine_set_run(s.e, false);
        touches_count(true);
        for (unsigned k = 0; k < 3; k++) {
            g_assert(ksm_step(s.e, 1) >= 0);
        }
        g_assert(touched == 0 && util_stats(s.e).merged == merged);
        touches_count(false);
        ksm_engine_set_run(s.e, true);
    }
    g_assert(ripe);
    util_passes(s.e, 6);
    g_assert(util_stats(s.e).pages_sharing == 1024);
    scene_end(&s);
}

/* What was freed lazily is not given back while the region rests. */
static void test_rest_settle(void)
{
    KsmStats stats;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    util_passes(s.e, 4);
    s.m->inhibited = "a test says so";
    g_assert(ksm_free_hint(s.r, 0, PAGES * PAGE) == 0);
    ksm_freer_set_decay(s.e->freer, 0);
    touches_count(true);
    for (unsigned i = 0; i < 100; i++) {
        ksm_step(s.e, 0);
    }
    touches_count(false);
    for (unsigned i = 0; i < PAGES; i++) {
        g_assert(s.r->state[i] == (PAGE_FREED | PAGE_BLIND));
    }
    /* put off, not forgotten */
    s.m->inhibited = NULL;
    util_passes(s.e, 4);
    for (unsigned i = 0; i < PAGES; i++) {
        g_assert(!(s.r->state[i] & PAGE_BLIND));
    }
    stats = util_stats(s.e);
    g_assert(stats.free_hinted == PAGES);
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    scene_end(&s);
}

/* --- broken pages --- */

/* Merged: pages 0 to 1023 with those from 1024 on. */
static bool scene_merged(Scene *s, KsmDirtySource dirty)
{
    if (!scene_start(s, KSM_SCOPE_VM, dirty, MEM_SMALL)) {
        return false;
    }
    mem_fill_run(s->m, 0, 1024, 1, 1);
    mem_fill_run(s->m, 1024, 1024, 1, 1);
    util_passes(s->e, 6);
    g_assert(util_stats(s->e).pages_sharing == 1024);
    return true;
}

/* Passes until @n pages are saved; false: that does not come. */
static bool passes_until(Scene *s, uint64_t n)
{
    for (unsigned i = 0; i < 12 * CHECK_PASSES; i++) {
        KsmStats stats = util_stats(s->e);

        if (stats.pages_sharing + stats.zero_pages == n) {
            return true;
        }
        util_passes(s->e, 1);
        region_check(s->r);
    }
    util_print(s->e);
    return false;
}

/* Short runs that are rewritten with what they held are merged again. */
static void test_broken_equal(gconstpointer data)
{
    Scene s;

    if (!scene_merged(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    for (unsigned i = 16; i < 1024; i += 128) {
        mem_fill_run(s.m, i, 8, 1 + i, 1);
    }
    /* noticed, and counted as what it is */
    util_passes(s.e, CHECK_PASSES);
    g_assert(util_stats(s.e).pages_sharing == 1024 - 64);
    g_assert(util_stats(s.e).reasons[KSM_REASON_COW_BROKEN] == 64);
    g_assert(passes_until(&s, 1024));
    g_assert(util_stats(s.e).reasons[KSM_REASON_COW_BROKEN] == 0);
    g_assert(mem_anonymous(s.m, 0, PAGES) == 0);
    scene_end(&s);
}

/* Equal to nothing but each other, or to a page that was never merged. */
static void test_broken_among(gconstpointer data)
{
    Scene s;

    if (!scene_merged(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    mem_fill_run(s.m, 100, 16, 7000, 1);
    mem_fill_run(s.m, 1700, 16, 7000, 1);
    g_assert(passes_until(&s, 1024 - 32 + 16));
    mem_check(s.m);
    scene_end(&s);
    if (!scene_merged(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    /* now the one part is anonymous, and knows nothing of the other's */
    g_assert(ksm_discard(s.r, 512 * PAGE, 512 * PAGE) == 0);
    mem_gone(s.m, 512, 512);
    mem_fill_run(s.m, 100, 16, 7000, 1);
    util_passes(s.e, 4 * CHECK_PASSES);
    mem_fill_run(s.m, 600, 16, 7000, 1);
    g_assert(passes_until(&s, 1024 - 512 - 16 + 16));
    scene_end(&s);
}

/* Zeroes go back to the kernel, and so do the mappings they were in. */
static void test_broken_zeroes(gconstpointer data)
{
    size_t mappings;
    Scene s;

    if (!scene_merged(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    mem_fill_run(s.m, 300, 12, 0, 0);
    util_passes(s.e, CHECK_PASSES);
    g_assert(passes_until(&s, 1024 - 12 + 12));
    g_assert(util_stats(s.e).zero_pages == 12);
    g_assert(mem_present(s.m, 300, 12) == 0);
    mem_check(s.m);
    /* three mappings now; the one behind goes, too, and it is one again */
    mappings = mem_mappings(s.m);
    g_assert(mappings >= 4);
    mem_fill_run(s.m, 312, 712, 0, 0);
    util_passes(s.e, CHECK_PASSES);
    g_assert(passes_until(&s, 1024));
    g_assert(util_stats(s.e).zero_pages == 724);
    g_assert(mem_present(s.m, 312, 712) == 0);
    g_test_message("%zu mappings, then %zu", mappings, mem_mappings(s.m));
    g_assert(mem_mappings(s.m) < mappings);
    scene_end(&s);
}

static unsigned remaps;

static int count_remap(void *from, size_t len, void *to)
{
    remaps++;
    return prim_real.remap(from, len, to);
}

/* What is written again and again is not restored again and again. */
static void test_broken_churn(gconstpointer data)
{
    unsigned rounds = 100, early = 0;
    Scene s;

    if (!scene_merged(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    remaps = 0;
    prim.remap = count_remap;
    for (unsigned i = 0; i < rounds; i++) {
        mem_fill_run(s.m, 64, 16, 65, 1);   /* what it held before */
        util_passes(s.e, 5 * CHECK_PASSES);
        early = i == 9 ? remaps : early;
    }
    g_test_message("restored %u times in %u rounds, %u in the first 10",
                   remaps, rounds, early);
    g_assert(early > 0 && remaps < rounds / 4);
    /* while it is written all the time, not at all */
    remaps = 0;
    for (unsigned i = 0; i < 20 * CHECK_PASSES; i++) {
        mem_fill_run(s.m, 64, 16, 80000 + i, 1);
        util_passes(s.e, 1);
    }
    g_assert(remaps == 0);
    prim.remap = prim_real.remap;
    /* and when it has come to rest, it is merged after all */
    mem_fill_run(s.m, 64, 16, 65, 1);
    for (unsigned i = 0; i < 6 && !passes_until(&s, 1024); i++) {
        g_assert(i < 5);
    }
    scene_end(&s);
}

/* Owners say no, discard and free: broken pages are as others. */
static void test_broken_owner(gconstpointer data)
{
    Scene s;

    if (!scene_merged(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    s.m->busy = true;
    mem_fill_run(s.m, 64, 16, 65, 1);
    mem_fill_run(s.m, 200, 16, 0, 0);
    mem_fill_run(s.m, 300, 16, 90000, 1);
    util_passes(s.e, 12 * CHECK_PASSES);
    g_assert(util_stats(s.e).pages_sharing == 1024 - 48);
    region_check(s.r);
    mem_check(s.m);
    g_assert(ksm_free_hint(s.r, 64 * PAGE, 4 * PAGE) == 0);
    g_assert(ksm_discard(s.r, 201 * PAGE, 7 * PAGE) == 0);
    g_assert(ksm_discard(s.r, 304 * PAGE, 4 * PAGE) == 0);
    mem_gone(s.m, 64, 4);
    mem_gone(s.m, 304, 4);
    region_check(s.r);
    mem_check(s.m);
    s.m->busy = false;
    /* 12, and 8 zeroes; 7 are holes, 1 is too few, 12 equal to nothing */
    util_passes(s.e, 12 * CHECK_PASSES);
    util_print(s.e);
    g_assert(passes_until(&s, 1024 - 48 + 12 + 8));
    scene_end(&s);
}

/* A log tells that a page is written, though with what it holds already. */
static void test_broken_log(void)
{
    Scene s;

    if (!scene_merged(&s, KSM_DIRTY_LOG)) {
        return;
    }
    remaps = 0;
    prim.remap = count_remap;
    for (unsigned i = 0; i < 16 * CHECK_PASSES; i++) {
        mem_fill_run(s.m, 64, 16, 65, 1);
        util_passes(s.e, 1);
    }
    prim.remap = prim_real.remap;
    g_assert(remaps == 0);
    scene_end(&s);
}

/* Who has no busy op was not asked: nothing is restored. */
static void test_broken_unasked(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(PAGES, 0, MEM_SMALL);
    r = util_add(e, m, NULL);
    mem_fill_run(m, 0, 1024, 1, 1);
    mem_fill_run(m, 1024, 1024, 1, 1);
    util_passes(e, 6);
    mem_fill_run(m, 64, 128, 65, 1);
    mem_fill_run(m, 512, 128, 0, 0);
    remaps = 0;
    prim.remap = count_remap;
    util_passes(e, 12 * CHECK_PASSES);
    prim.remap = prim_real.remap;
    g_assert(remaps == 0);
    g_assert(util_stats(e).reasons[KSM_REASON_COW_BROKEN] == 256);
    mem_check(m);
    util_remove(r);
    mem_check(m);
    ksm_engine_free(e);
    mem_free(m);
}

static uint64_t runs_counted(Scene *s)
{
    for (size_t i = 0; i < s->r->n_chunks; i++) {
        region_count_runs(s->r, i);
    }
    return s->r->runs;
}

/* Where mappings begin and end is known after their pages were written. */
static void test_broken_runs(void)
{
    /* one mapping each, for the slots are not neighbours */
    static const unsigned first[] = { 0, 40, 80, 120, 160, 200, 240, 280 };
    static const unsigned order[] = { 5, 0, 3, 1, 7, 2, 6, 4 };
    static const unsigned written[] = {
        40, 39, 80, 81, 119, 120, 121, 159, 41, 160, 161, 162, 200, 199, 198,
        279, 280, 319, 0, 1, 318, 240, 239,
    };
    unsigned n = G_N_ELEMENTS(first);
    uint64_t runs;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 512, 320, 1, 1);
    mem_fill_run(s.m, 1024, 320, 1, 1);
    util_passes(s.e, 6);
    for (unsigned i = 0; i < n; i++) {
        mem_fill_run(s.m, first[i], 40, 1 + first[order[i]], 1);
    }
    util_passes(s.e, 6);
    runs = util_stats(s.e).merged_runs;
    g_assert(runs == 2 + n);
    s.m->busy = true;
    for (unsigned i = 0; i < G_N_ELEMENTS(written); i++) {
        mem_fill(s.m, written[i], 77000 + i);
        util_passes(s.e, CHECK_PASSES);
        g_assert(runs_counted(&s) == runs);
        region_check(s.r);
    }
    g_assert(util_stats(s.e).reasons[KSM_REASON_COW_BROKEN] ==
             G_N_ELEMENTS(written));
    /* a page in the middle goes: the mapping falls into two */
    g_assert(ksm_discard(s.r, 40 * PAGE, PAGE) == 0);
    mem_gone(s.m, 40, 1);
    g_assert(runs_counted(&s) == runs);
    g_assert(ksm_discard(s.r, 20 * PAGE, PAGE) == 0);
    mem_gone(s.m, 20, 1);
    g_assert(runs_counted(&s) == runs + 1);
    s.m->busy = false;
    scene_end(&s);
}

/* Pages equal to broken ones that will not be restored: no copy is made. */
static void test_broken_lonely(void)
{
    KsmStats stats;
    Scene s;

    if (!scene_merged(&s, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    g_assert(ksm_discard(s.r, 512 * PAGE, 512 * PAGE) == 0);
    mem_gone(s.m, 512, 512);
    for (unsigned i = 0; i < 40; i++) {
        mem_fill(s.m, 4 + 10 * i, 33000 + i);
    }
    util_passes(s.e, 4 * CHECK_PASSES);
    stats = util_stats(s.e);
    mem_fill_run(s.m, 600, 40, 33000, 1);
    util_passes(s.e, 8 * CHECK_PASSES);
    g_assert(util_stats(s.e).pages_shared == stats.pages_shared);
    g_assert(util_stats(s.e).reasons[KSM_REASON_COW_BROKEN] == 40);
    g_assert(util_stats(s.e).reasons[KSM_REASON_NOT_WORTH] == 40);
    scene_end(&s);
}

/* Looked at less and less often while it is equal to nothing; but looked at. */
static void test_broken_late(gconstpointer data)
{
    uint64_t scanned;
    Scene s;

    if (!scene_merged(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    mem_fill_run(s.m, 64, 16, 44000, 1);
    util_passes(s.e, 40 * CHECK_PASSES);
    scanned = util_stats(s.e).pages_scanned;
    util_passes(s.e, 36 * CHECK_PASSES);
    if (GPOINTER_TO_INT(data) != KSM_DIRTY_CHECKSUM) {
        g_assert(util_stats(s.e).pages_scanned <= scanned + 16 * 4);
    }
    mem_fill_run(s.m, 64, 16, 65, 1);
    util_passes(s.e, 12 * CHECK_PASSES);
    g_assert(passes_until(&s, 1024));
    scene_end(&s);
}

/* Broken, quiet and equal to what is in the pool; and nothing is restored. */
static bool scene_quiet(Scene *s, size_t page, size_t n)
{
    if (!scene_merged(s, KSM_DIRTY_PAGEMAP)) {
        return false;
    }
    s->m->busy = true;
    mem_fill_run(s->m, page, n, 1 + page, 1);
    util_passes(s->e, 4 * CHECK_PASSES);
    g_assert(s->r->count[PAGE_BROKEN] == n);
    return true;
}

/*
 * What restoring pays: a page saved is worth RUN_PAGE_WORTH_NS, of which 2 us
 * are what it costs; the run has its costs whatever its length.
 */
static void test_broken_pays(void)
{
    const size_t at = 600, n = 6;
    uint64_t worth = n * (RUN_PAGE_WORTH_NS - 2000);
    uint64_t *cost[3];
    Scene s;

    if (!scene_quiet(&s, at, n)) {
        return;
    }
    cost[0] = &s.e->scan.restore_ns;
    cost[1] = &s.e->merge.isolate_ns;
    cost[2] = &s.e->merge.map_ns;
    *cost[0] = 20000;
    *cost[1] = 15000;
    *cost[2] = worth - DROP_NS - 35000;
    /* wherever in the run the page is, for all of it is restored */
    for (size_t i = at; i < at + n; i++) {
        g_assert(broken_pays(s.e, s.r, i));
    }
    g_assert(!broken_pays(s.e, s.r, at - 1));
    for (unsigned i = 0; i < G_N_ELEMENTS(cost); i++) {
        (*cost[i])++;
        g_assert(!broken_pays(s.e, s.r, at + n - 1));
        (*cost[i])--;
        g_assert(broken_pays(s.e, s.r, at + n - 1));
    }
    /* nothing was restored so far: a guess */
    *cost[0] = 0;
    *cost[1] -= 10000;
    g_assert(broken_pays(s.e, s.r, at));
    ++*cost[1];
    g_assert(!broken_pays(s.e, s.r, at));
    s.m->busy = false;
    scene_end(&s);
}

static struct {
    Scene *s;
    unsigned n;
    struct {
        size_t page, pages;
        uint64_t pass;
    } at[16];
} restored;

static int note_remap(void *from, size_t len, void *to)
{
    Scene *s = restored.s;

    g_assert(restored.n < G_N_ELEMENTS(restored.at));
    restored.at[restored.n].page = ((char *)to - s->m->addr) / PAGE;
    restored.at[restored.n].pages = len / PAGE;
    restored.at[restored.n++].pass = s->e->scan.pass;
    return prim_real.remap(from, len, to);
}

/*
 * A run is restored from its first page that is equal to something to its last
 * one, if what is between them is less than what they are worth; zeroes apart
 * from other content.
 */
static void test_broken_run(void)
{
    Scene s;

    if (!scene_quiet(&s, 500, 80)) {
        return;
    }
    /* 20 + 20 pages with 10 between that are like no other, and 10 behind */
    mem_fill_run(s.m, 532, 10, 660000, 1);
    mem_fill_run(s.m, 562, 10, 670000, 1);
    mem_fill_run(s.m, 572, 8, 0, 0);
    util_passes(s.e, 6 * CHECK_PASSES);
    restored.s = &s;
    restored.n = 0;
    prim.remap = note_remap;
    s.m->busy = false;
    util_passes(s.e, CHECK_PASSES);
    prim.remap = prim_real.remap;
    g_assert(restored.n == 3);
    g_assert(restored.at[0].page == 500 && restored.at[0].pages == 12);
    g_assert(restored.at[1].page == 512 && restored.at[1].pages == 50);
    g_assert(restored.at[2].page == 572 && restored.at[2].pages == 8);
    /* 10 in anonymous memory now, 10 still broken */
    util_passes(s.e, CHECK_PASSES);
    g_assert(s.r->count[PAGE_BROKEN] == 10);
    g_assert(util_stats(s.e).zero_pages == 8);
    g_assert(util_stats(s.e).pages_sharing == 1024 - 28);
    /* those 10 are tracked again as any others: a write is noticed */
    mem_fill_run(s.m, 532, 10, 533, 1);
    g_assert(passes_until(&s, 1024 - 28 + 8 + 10));
    scene_end(&s);
}

/* Time goes where it belongs: looking is scanning, restoring is merging. */
static void test_broken_time(void)
{
    uint64_t scan, merge;
    Scene s;

    if (!scene_quiet(&s, 64, 16)) {
        return;
    }
    memset(s.e->kinds, PM_PRESENT, sizeof(s.e->kinds));
    s.e->scan.pass = 4 * CHECK_PASSES;
    s.r->chunk[0].calm = 2;
    s.r->chunk[0].restored = 2;
    scan = s.e->total.scan_time;
    merge = s.e->total.merge_time;
    broken_look(s.e, s.r, 0);
    g_assert(s.e->total.scan_time > scan);
    g_assert(s.e->total.merge_time == merge);
    /* it is time for restoring, were the device not at it */
    scan = s.e->total.scan_time;
    broken_look(s.e, s.r, 0);
    g_assert(s.e->total.scan_time > scan);
    g_assert(s.e->total.merge_time > merge);
    g_assert(s.r->chunk[0].restored == 2 && s.r->chunk[0].calm == 4);
    /* and nothing at all in other passes */
    scan = s.e->total.scan_time;
    merge = s.e->total.merge_time;
    s.e->scan.pass++;
    broken_look(s.e, s.r, 0);
    g_assert(s.e->total.scan_time == scan && s.e->total.merge_time == merge);
    g_assert(s.r->chunk[0].calm == 4);
    s.m->busy = false;
    scene_end(&s);
}

/* Written now: looks at what is broken until it is restored; 0: it is not. */
static unsigned looks_needed(Scene *s)
{
    uint64_t written;

    g_assert(passes_until(s, 1024));
    written = s->e->scan.pass;
    restored.n = 0;
    mem_fill_run(s->m, 64, 16, 65, 1);  /* what it held before */
    for (unsigned i = 0; i < 40 * CHECK_PASSES && !restored.n; i++) {
        util_passes(s->e, 1);
    }
    g_assert(s->r->count[PAGE_BROKEN] == (restored.n ? 0 : 16));
    return restored.n ? restored.at[0].pass / CHECK_PASSES -
                        written / CHECK_PASSES : 0;
}

/*
 * Twice as many looks each time, up to 32, if what was restored was written
 * again soon; half as many if it was not.
 */
static void test_broken_backoff(void)
{
    /* two say that it is quiet */
    static const unsigned looks[] = { 2, 2, 4, 8, 16, 32, 32 };
    KsmChunk *c;
    Scene s;

    if (!scene_merged(&s, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    restored.s = &s;
    prim.remap = note_remap;
    c = &s.r->chunk[0];
    for (unsigned i = 0; i < G_N_ELEMENTS(looks); i++) {
        g_assert(looks_needed(&s) == looks[i]);
    }
    /* as if it had been broken for long: looks are counted up to 255 */
    for (unsigned i = 0; i < 2; i++) {
        c->calm = 255;
        g_assert(looks_needed(&s) == 2);
        g_assert(looks_needed(&s) == (16 >> i));
        c->restored -= 1;
    }
    prim.remap = prim_real.remap;
    scene_end(&s);
}

static void add_sources(const char *path, GTestDataFunc fn)
{
    for (unsigned i = 0; i < G_N_ELEMENTS(sources); i++) {
        g_autofree char *one = g_strconcat(path, "/", sources[i].name, NULL);

        g_test_add_data_func(one, GINT_TO_POINTER(sources[i].dirty), fn);
    }
}

/* --- what fails for a time --- */

static int no_room(int fd, off_t offset, off_t len)
{
    return -ENOSPC;
}

/* Copies that found no room in the pool still know each other. */
static void test_no_room(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 64, 1, 1);
    mem_fill_run(s.m, 512, 64, 1, 1);
    prim.allocate = no_room;
    util_passes(s.e, 10);
    g_assert(util_stats(s.e).pages_sharing == 0);
    g_assert(util_stats(s.e).merged == 0);
    g_assert(util_stats(s.e).reasons[KSM_REASON_NO_MEMORY] >= 64);
    prim.allocate = prim_real.allocate;
    ksm_rescan(s.e);
    util_passes(s.e, 10);
    g_assert(util_stats(s.e).pages_sharing == 64);
    g_assert(util_stats(s.e).merged == 128);
    scene_end(&s);
}

static ssize_t no_write(int fd, const void *buf, size_t len, off_t offset)
{
    return -ENOSPC;
}

/*
 * Only what was to be copied is kept: what stands beside it is merged with what
 * is in the pool already.
 */
static void test_no_room_among(gconstpointer data)
{
    const bool late = GPOINTER_TO_INT(data);
    KsmStats stats;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 1024, 128, 1, 1);
    mem_fill_run(s.m, 1536, 128, 1, 1);
    util_passes(s.e, 6);
    g_assert(util_stats(s.e).pages_sharing == 128);
    mem_fill_run(s.m, 0, 64, 5000, 1);
    mem_fill_run(s.m, 512, 64, 5000, 1);
    for (unsigned i = 0; i < 2; i++) {
        mem_fill_run(s.m, 512 * i + 64, 64, 1 + 64 * i, 1);
    }
    if (late) {
        prim.write = no_write;
    } else {
        prim.allocate = no_room;
    }
    util_passes(s.e, 10);
    prim.write = prim_real.write;
    prim.allocate = prim_real.allocate;
    stats = util_stats(s.e);
    g_assert(stats.pages_shared == 128 && stats.pages_sharing == 128 + 128);
    g_assert(stats.merged == 2 * 128 + 128);
    for (unsigned i = 0; i < 128; i++) {
        g_assert(page_state(s.r, i / 64 * 512 + 64 + i % 64) == PAGE_MERGED);
    }
    mem_check(s.m);
    ksm_rescan(s.e);
    util_passes(s.e, 20);
    g_assert(util_stats(s.e).pages_sharing == 128 + 128 + 64);
    scene_end(&s);
}

/*
 * What a forked child may still map is kept, up to 128 MiB or an eighth of all
 * memory; beyond, no copies are made until it is given back.
 */
static void test_leaked(void)
{
    const size_t most = 64 * CHUNK_PAGES;

    for (unsigned over = 0; over < 2; over++) {
        KsmStats stats;
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
            return;
        }
        mem_fill_run(s.m, 0, 64, 1, 1);
        mem_fill_run(s.m, 512, 64, 1, 1);
        s.e->pool.leaked = most + over;
        util_passes(s.e, 6);
        stats = util_stats(s.e);
        g_assert(stats.pages_sharing == (over ? 0 : 64));
        g_assert((stats.reasons[KSM_REASON_NO_MEMORY] > 0) == over);
        s.e->pool.leaked = 0;
        ksm_rescan(s.e);
        util_passes(s.e, 12);
        g_assert(util_stats(s.e).pages_sharing == 64);
        scene_end(&s);
    }
}

static unsigned faults;     /* write faults asked for in the region */
static Scene *faulted;

static int move_refused(int fd, void *to, void *from, size_t len, size_t *done)
{
    *done = 0;
    return -EBUSY;
}

static int count_faults(void *addr, size_t len, int advice)
{
    faults += advice == MADV_POPULATE_WRITE &&
              (char *)addr >= faulted->m->addr &&
              (char *)addr < faulted->m->addr + PAGES * PAGE;
    return prim_real.advise(addr, len, advice);
}

/*
 * What could not be moved is made ours alone by a write fault; not while a
 * device is at it, which would be left with the old page.
 */
static void test_unshare(gconstpointer data)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    faulted = &s;
    mem_fill_run(s.m, 0, 64, 1, 1);
    mem_fill_run(s.m, 512, 64, 1, 1);
    prim.uffd_move = move_refused;
    util_passes(s.e, 4);
    g_assert(s.r->count[PAGE_PINNED] > 0);
    faults = 0;
    s.m->busy = GPOINTER_TO_INT(data);
    prim.advise = count_faults;
    util_passes(s.e, 20);
    g_assert(s.m->busy == !faults);
    prim.advise = prim_real.advise;
    prim.uffd_move = prim_real.uffd_move;
    s.m->busy = false;
    scene_end(&s);
}

/* A call that fails, for the region's memory, and what it was called for. */
static struct {
    Scene *s;
    int code;
    unsigned failed, released, moved;
} fails;

static bool is_region(const void *addr)
{
    const Mem *m = fails.s->m;

    return (const char *)addr >= m->addr &&
           (const char *)addr < m->addr + m->pages * PAGE;
}

static int fails_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    *done = 0;
    fails.failed++;
    return fails.code;
}

static ssize_t fails_pagemap(PmScan *scan)
{
    return -ENOMEM;
}

static ssize_t fails_read_at(int fd, void *buf, size_t len, off_t offset)
{
    return -ENOMEM;
}

/* From then on the page tables are silent, too. */
static int fails_register(const UffdRange *range, unsigned mode)
{
    if (!is_region(range->addr) || !(mode & UFFD_MISSING)) {
        return prim_real.uffd_register(range, mode);
    }
    fails.failed++;
    prim.pagemap = fails_pagemap;
    prim.read_at = fails_read_at;
    return fails.code;
}

static int counts_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    fails.moved++;
    return prim_real.uffd_move(fd, to, from, len, done);
}

static int fails_unregister(const UffdRange *range)
{
    fails.released += is_region(range->addr);
    return prim_real.uffd_unregister(range);
}

static void *fails_map(void *addr, size_t len, int prot, int flags, int fd,
                       off_t offset)
{
    if (!is_region(addr)) {
        return prim_real.map(addr, len, prot, flags, fd, offset);
    }
    fails.failed++;
    errno = -fails.code;
    return NULL;
}

typedef enum Call { CALL_MOVE, CALL_REGISTER, CALL_MAP } Call;

static void fails_begin(Scene *s, Call call, int code)
{
    memset(&fails, 0, sizeof(fails));
    fails.s = s;
    fails.code = code;
    prim.uffd_unregister = fails_unregister;
    switch (call) {
    case CALL_MOVE:
        prim.uffd_move = fails_move;
        break;
    case CALL_REGISTER:
        prim.uffd_register = fails_register;
        prim.uffd_move = counts_move;
        break;
    default:
        prim.map = fails_map;
        break;
    }
}

static void fails_end(void)
{
    prim.uffd_move = prim_real.uffd_move;
    prim.uffd_register = prim_real.uffd_register;
    prim.uffd_unregister = prim_real.uffd_unregister;
    prim.pagemap = prim_real.pagemap;
    prim.read_at = prim_real.read_at;
    prim.map = prim_real.map;
}

/*
 * The user is told what was lacking.  What is another's is not released: the
 * kernel would take it from whoever has it.
 */
static void test_refused_why(void)
{
    static const struct {
        Call call;
        int code;
        KsmReason why;
        bool release;
    } cases[] = {
        { CALL_MOVE, -ENOMEM, KSM_REASON_NO_MEMORY, true },
        { CALL_MOVE, -EBUSY, KSM_REASON_PINNED, true },
        { CALL_MOVE, -EAGAIN, KSM_REASON_PINNED, true },
        { CALL_REGISTER, -ENOMEM, KSM_REASON_VMA_LIMIT, true },
        { CALL_REGISTER, -EFAULT, KSM_REASON_NO_MEMORY, true },
        { CALL_REGISTER, -EBUSY, KSM_REASON_NO_MEMORY, false },
        { CALL_REGISTER, -EINVAL, KSM_REASON_NO_MEMORY, false },
        { CALL_REGISTER, -EPERM, KSM_REASON_NO_MEMORY, false },
        { CALL_MAP, -ENOMEM, KSM_REASON_VMA_LIMIT, true },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        KsmStats stats;
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
            return;
        }
        mem_fill_run(s.m, 0, 64, 1, 1);
        mem_fill_run(s.m, 512, 64, 1, 1);
        fails_begin(&s, cases[i].call, cases[i].code);
        for (unsigned k = 0; k < 8 && !fails.failed; k++) {
            util_passes(s.e, 1);
        }
        fails_end();
        stats = util_stats(s.e);
        g_assert(stats.merged == 0 && stats.isolations > 0);
        /* what was not isolated is not put back */
        g_assert(fails.moved == 0);
        g_assert(stats.reasons[cases[i].why] >= 64);
        g_assert(!fails.released == !cases[i].release);
        g_assert((stats.pinned > 0) == (cases[i].why == KSM_REASON_PINNED));
        mem_check(s.m);
        ksm_rescan(s.e);
        util_passes(s.e, 24);
        g_assert(util_stats(s.e).pages_sharing == 64);
        scene_end(&s);
    }
}

#define TRIED_GONE      10u     /* moved, and not counted: once */
#define TRIED_BRIEF     30u     /* busy three times */
static const unsigned tried_page[] = { 11, 12, 20, 21, 31, 40 };
static unsigned tried[64];

static int move_tried(int fd, void *to, void *from, size_t len, size_t *done)
{
    size_t page = ((char *)from - fails.s->m->addr) / PAGE, n;

    *done = 0;
    if (!is_region(from) || page >= G_N_ELEMENTS(tried)) {
        return prim_real.uffd_move(fd, to, from, len, done);
    }
    tried[page]++;
    if (page == TRIED_GONE) {
        return -EEXIST;
    }
    if (page == TRIED_BRIEF && tried[page] <= 3) {
        return -EAGAIN;
    }
    n = page < TRIED_GONE ? MIN(len, (TRIED_GONE - page) * PAGE) : len;
    n = page < TRIED_BRIEF ? MIN(n, (TRIED_BRIEF - page) * PAGE) : n;
    for (unsigned i = 0; i < G_N_ELEMENTS(tried_page); i++) {
        if (page == tried_page[i]) {
            return -EAGAIN;
        } else if (page < tried_page[i]) {
            n = MIN(n, (tried_page[i] - page) * PAGE);
        }
    }
    prim_real.uffd_move(fd, to, from, n, done);
    return n < len ? -EAGAIN : 0;
}

/* Each page that is busy for a moment is tried as often as any other. */
static void test_tries(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 64, 1, 1);
    mem_fill_run(s.m, 512, 64, 1, 1);
    fails.s = &s;
    memset(tried, 0, sizeof(tried));
    prim.uffd_move = move_tried;
    for (unsigned i = 0; i < 8 && !tried[0]; i++) {
        util_passes(s.e, 1);
    }
    prim.uffd_move = prim_real.uffd_move;
    g_assert(tried[0] == 1 && tried[TRIED_GONE] == 1);
    g_assert(tried[TRIED_BRIEF] == 4);
    for (unsigned i = 0; i < G_N_ELEMENTS(tried_page); i++) {
        g_assert(tried[tried_page[i]] == 8);
        g_assert(page_state(s.r, tried_page[i]) == PAGE_PINNED);
    }
    g_assert(s.r->count[PAGE_PINNED] == G_N_ELEMENTS(tried_page));
    g_assert(util_stats(s.e).pinned == 1);
    mem_check(s.m);
    scene_end(&s);
}

static int move_invalid(int fd, void *to, void *from, size_t len,
                        size_t *done)
{
    *done = 0;
    return -EINVAL;
}

/* Chunks that cannot be isolated do not send each other round for ever. */
static void test_refused(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    prim.uffd_move = move_invalid;
    /* each of them stands in the index for half of what they have */
    mem_fill_run(s.m, 0, 32, 1, 1);
    mem_fill_run(s.m, 512, 32, 33, 1);
    util_passes(s.e, 4);
    mem_fill_run(s.m, 32, 32, 33, 1);
    mem_fill_run(s.m, 544, 32, 1, 1);
    util_passes(s.e, 6);
    prim.uffd_move = prim_real.uffd_move;
    g_assert(util_stats(s.e).isolations > 0);
    g_assert(util_stats(s.e).isolations <= 6 * 4);
    scene_end(&s);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    prim.cpu_ns = cpu_by_call;
    g_test_add_func("/scan/vmas/reserve", test_vma_reserve);
    g_test_add_func("/scan/vmas/few", test_vma_few);
    g_test_add_func("/scan/vmas/recount", test_vma_recount);
    g_test_add_func("/scan/vmas/left", test_vma_left);
    add_sources("/scan/visit/populated", test_populated);
    g_test_add_func("/scan/visit/queue-full", test_queue_full);
    g_test_add_func("/scan/runs/periods", test_periods);
    g_test_add_func("/scan/runs/whole", test_runs_whole);
    g_test_add_func("/scan/runs/calls", test_runs_calls);
    g_test_add_func("/scan/runs/measured", test_measured);
    add_sources("/scan/broken/equal", test_broken_equal);
    add_sources("/scan/broken/among", test_broken_among);
    add_sources("/scan/broken/zeroes", test_broken_zeroes);
    add_sources("/scan/broken/churn", test_broken_churn);
    add_sources("/scan/broken/owner", test_broken_owner);
    g_test_add_func("/scan/broken/log", test_broken_log);
    g_test_add_func("/scan/broken/unasked", test_broken_unasked);
    g_test_add_func("/scan/broken/runs", test_broken_runs);
    g_test_add_func("/scan/broken/lonely", test_broken_lonely);
    add_sources("/scan/broken/late", test_broken_late);
    g_test_add_func("/scan/broken/pays", test_broken_pays);
    g_test_add_func("/scan/broken/run", test_broken_run);
    g_test_add_func("/scan/broken/backoff", test_broken_backoff);
    g_test_add_func("/scan/broken/time", test_broken_time);
    add_sources("/scan/rest", test_rest);
    add_sources("/scan/rest-midway", test_rest_midway);
    g_test_add_func("/scan/rest/settle", test_rest_settle);
    g_test_add_func("/scan/no-room/known", test_no_room);
    g_test_add_data_func("/scan/no-room/allocate", GINT_TO_POINTER(false),
                         test_no_room_among);
    g_test_add_data_func("/scan/no-room/fill", GINT_TO_POINTER(true),
                         test_no_room_among);
    g_test_add_func("/scan/leaked", test_leaked);
    g_test_add_func("/scan/refused", test_refused);
    g_test_add_func("/scan/tries", test_tries);
    g_test_add_func("/scan/refused-why", test_refused_why);
    g_test_add_data_func("/scan/unshare/idle", GINT_TO_POINTER(false),
                         test_unshare);
    g_test_add_data_func("/scan/unshare/busy", GINT_TO_POINTER(true),
                         test_unshare);
    return g_test_run();
}
