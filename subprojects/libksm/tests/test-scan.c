/*
 * libksm tests: what scan, run, dirty and discard decide
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What is merged to what, how often memory is looked at, and when it is left
 * alone.  That memory keeps its bytes is for others (test-engine, test-merge,
 * test-fault, test-prop).
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/huge.h"
#include "base/prim.h"
#include "engine/alike.h"
#include "engine/broken.h"
#include "engine/scan.h"
#include "engine/state.h"
#include "merge/quiet.h"
#include "house.h"
#include "still.h"
#include "stores.h"
#include "twins.h"

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
    g_assert(s->e->content.index.count == 0);
    ksm_engine_free(s->e);
    mem_free(s->m);
}

/* --- mappings --- */

/* Mappings are left to the program, and the reason is told. */
static void test_vma_reserve(void)
{
    size_t room = 1500;
    KsmStats stats, all;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    /* every other page is equal: no runs */
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
    ksm_engine_set_vma_reserve(s.e, util_mappings_allowed() - room);
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

/* Too few mappings are left even for the longest runs. */
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
            .maps = s.e->vmas.maps, .percent = s.e->vmas.percent,
            .limit = 1000, .used = 1000 - left, .counted = prim.now_ns(),
        };
        util_passes(s.e, 3);
        g_assert(s.e->vmas.limit == 1000);
        g_assert((util_stats(s.e).pages_shared > 0) == (left >= 64));
        scene_end(&s);
    }
}

#define SECOND  UINT64_C(1000000000)

/* --- which chunks are visited --- */

/* Populated memory that was quiet: any part of a chunk, any start. */
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

/* Fills the queue of ripe chunks while a quiet one is looked at. */
static ssize_t crowd_pagemap(PmScan *scan)
{
    KsmScan *s = &crowded->e->scan;
    KsmRegion *r = crowded->r;

    if (scan->start == (uintptr_t)page_addr(r, 2 * CHUNK_PAGES) &&
        r->chunk[2].fresh && !r->chunk[2].written && s->phase != PHASE_SYNC) {
        prim.pagemap = still_pagemap;
        r->chunk[3].flags |= CHUNK_QUEUED;
        for (; s->n_ripe < RIPE_MAX; s->n_ripe++) {
            s->ripe[s->n_ripe] = page_id(r, 3 * CHUNK_PAGES);
        }
    }
    return still_pagemap(scan);
}

/* A chunk without room in the queue is visited in the next pass. */
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
    g_assert(prim.pagemap == still_pagemap);
    util_passes(s.e, 3);
    g_assert(util_stats(s.e).pages_sharing == 512);
    scene_end(&s);
}

/* --- runs --- */

/* Content of any period keeps one copy, or a few where slots are full. */
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

/* Each run costs a mapping: copies go where free slots keep it whole. */
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
    maps += fd == engine_pool(mapped->e)->map_fd;
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

/* For others with page tables: what is told is mapped and readable. */
static void count_prefaults(void *opaque, void *addr, size_t len)
{
    const Mem *m = opaque;
    size_t page = ((char *)addr - m->addr) / PAGE, n = len / PAGE;

    prefaults += n;
    g_assert(page % 512 % 40 == 0 && n == 24);
    g_assert(mem_present(m, page, n) == n);
    g_assert(mem_anonymous(m, page, n) == 0);
}

/* One call maps a run and one tells of it, whatever its length. */
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

/*
 * New content between what is merged goes to slots next to those around it, and
 * needs no mapping of its own, though others are free.
 */
static void test_runs_near(gconstpointer data)
{
    const unsigned page = GPOINTER_TO_UINT(data), n = 128;
    size_t mappings;
    Scene s;

    if (huge_shmem(HUGE_MEMFD)) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 512, 512, 1, 1);
    util_passes(s.e, 6);
    g_assert(util_stats(s.e).pages_sharing == 512);
    mappings = util_mappings();
    for (unsigned i = 0; i < 1024; i += 512) {
        g_assert(ksm_discard(s.r, i * PAGE, n * PAGE) == 0);
        mem_gone(s.m, i, n);
        g_assert(ksm_discard(s.r, (i + page) * PAGE, n * PAGE) == 0);
        mem_gone(s.m, i + page, n);
    }
    util_passes(s.e, 2);
    mem_fill_run(s.m, page, n, 5000, 1);
    mem_fill_run(s.m, 512 + page, n, 5000, 1);
    util_passes(s.e, 6);
    g_assert(util_stats(s.e).pages_sharing == 512 - n);
    for (unsigned i = page; i <= page + n; i++) {
        g_assert(i == 512 || i == n || s.r->tag[i] == s.r->tag[i - 1] + 1);
    }
    g_assert(util_mappings() <= mappings + 2);
    scene_end(&s);
}

/* Page costs are measured where many are isolated at once. */
static void test_measured(void)
{
    for (unsigned n = 2 * SPAN_MIN - 1; n <= 2 * SPAN_MIN; n++) {
        uint64_t move;
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
            return;
        }
        move = s.e->costs.move_ns;
        mem_fill_run(s.m, 0, n, 1, 1);
        mem_fill_run(s.m, 512, n, 1, 1);
        util_passes(s.e, 6);
        g_assert(util_stats(s.e).isolations == 2);
        g_assert((s.e->costs.page_ns > 0) == (n >= 2 * SPAN_MIN));
        g_assert((s.e->costs.move_ns != move) == (n >= 2 * SPAN_MIN));
        scene_end(&s);
    }
}

/* A page cost once too high makes spans short: these lower it. */
static void test_page_cost(void)
{
    KsmSpent spent = { .n = SPAN_MIN, .cpu_ns = SPAN_MIN * 2000 };
    KsmCosts c;

    costs_init(&c);
    c.page_ns = 100000;
    costs_span(&c, &spent);
    g_assert(c.page_ns < 100000);
    for (unsigned i = 0; i < 100; i++) {
        costs_span(&c, &spent);
    }
    g_assert(c.page_ns >= 2000 && c.page_ns < 2100);
    /* their overhead is none of it */
    spent.cpu_ns = SPAN_MIN * 3000;
    costs_span(&c, &spent);
    g_assert(c.page_ns < 2100);
}

/* Costs that were too high once keep nothing from merging for long. */
static void test_estimate_ends(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 256, 1, 1);
    mem_fill_run(s.m, 512, 256, 1, 1);
    s.e->costs.isolate_ns = 100000000;
    util_passes(s.e, 4);
    g_assert(util_stats(s.e).pages_sharing == 0);
    g_assert(util_stats(s.e).reasons[KSM_REASON_NOT_WORTH] > 0);
    util_passes(s.e, 60);
    g_assert(util_stats(s.e).pages_sharing == 256);
    scene_end(&s);
}

/* Two chunks with a run merged, and a page of each that is equal since then. */
static bool scene_late(Scene *s)
{
    if (!scene_start(s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return false;
    }
    mem_fill_run(s->m, 0, 256, 1, 1);
    mem_fill_run(s->m, 512, 256, 1, 1);
    util_passes(s->e, 4);
    g_assert(util_stats(s->e).pages_sharing == 256);
    s->e->costs = costs_guess;
    mem_fill(s->m, 300, 90000);
    mem_fill(s->m, 900, 90000);
    util_passes(s->e, 4);
    g_assert(util_stats(s->e).pages_sharing == 256);
    g_assert(util_stats(s->e).reasons[KSM_REASON_NOT_WORTH] == 2);
    return true;
}

/* A page that stands alone is merged where it stays so for some passes ... */
static void test_late(void)
{
    Scene s;

    if (!scene_late(&s)) {
        return;
    }
    util_passes(s.e, 3);
    g_assert(util_stats(s.e).pages_sharing == 257);
    scene_end(&s);
}

/* If the store takes no more it is left, as not worth what others may cost. */
static void test_late_full(void)
{
    Scene s;

    if (!scene_late(&s)) {
        return;
    }
    while (util_stats(s.e).full_scans < 40) {
        s.e->memcg.tight = true;
        s.e->memcg.asked = prim.now_ns();
        ksm_step(s.e, 1);
    }
    for (unsigned i = 0; i < 2; i++) {
        g_assert(s.r->chunk[i].late == 3);  /* at that price, too */
        g_assert(s.r->chunk[i].why_not == KSM_REASON_NOT_WORTH);
    }
    g_assert(util_stats(s.e).pages_sharing == 256);
    scene_end(&s);
}

static const struct {
    const char *name;
    size_t first, second;   /* pages that are written beside it; 0: none */
} beside[] = {
    { "both", 310, 910 }, { "first", 310, 0 }, { "second", 0, 910 },
};

/*
 * ... and nothing is written around it.  If that is so on one side of it only,
 * no slot is made that nobody else would map.
 */
static void test_late_beside(gconstpointer data)
{
    size_t i = GPOINTER_TO_SIZE(data);
    KsmStats stats;
    Scene s;

    if (!scene_late(&s)) {
        return;
    }
    stats = util_stats(s.e);
    for (unsigned k = 0; k < 30; k++) {
        if (beside[i].first) {
            mem_fill(s.m, beside[i].first, 91000 + k);
        }
        if (beside[i].second) {
            mem_fill(s.m, beside[i].second, 92000 + k);
        }
        util_passes(s.e, 1);
    }
    g_assert(util_stats(s.e).pages_shared == stats.pages_shared);
    g_assert(util_stats(s.e).pages_sharing == 256);
    scene_end(&s);
}

/* What pays like any other page does so beside late ones, whatever is written. */
static void test_late_more(gconstpointer data)
{
    size_t page = GPOINTER_TO_SIZE(data);
    Scene s;

    if (!scene_late(&s)) {
        return;
    }
    for (unsigned k = 0; k < 40; k++) {
        mem_fill(s.m, page, 92000 + k);
        if (k == 20) {
            g_assert(MAX(s.r->chunk[0].late, s.r->chunk[1].late) >= 2);
            mem_fill_run(s.m, 320, 100, 95000, 1);
            mem_fill_run(s.m, 920, 100, 95000, 1);
        }
        util_passes(s.e, 1);
    }
    g_assert(util_stats(s.e).pages_sharing >= 256 + 100);
    scene_end(&s);
}

/* Who is woken by what comes to be equal elsewhere has not waited. */
static void test_late_woken(void)
{
    Scene s;

    if (!scene_late(&s)) {
        return;
    }
    s.r->chunk[0].late = s.r->chunk[1].late = 0;
    for (unsigned i = 0; i < 20; i++) {
        scan_wake(s.e, &s.r->chunk[0]);
        scan_wake(s.e, &s.r->chunk[1]);
        util_passes(s.e, 1);
        g_assert(s.r->chunk[0].late == 0 && s.r->chunk[1].late == 0);
    }
    g_assert(util_stats(s.e).pages_sharing == 256);
    g_assert(util_stats(s.e).pages_shared == 256);
    util_passes(s.e, 200);
    g_assert(util_stats(s.e).pages_sharing == 257);
    scene_end(&s);
}

/* --- pages put back --- */

/* Pages put back: one, for which copying is cheaper, and many. */
#define BACK_ONE    32u
#define BACK_MANY   64u
#define BACK_MERGED 163u

static Scene *backed;

/* Writes to a page that is at home again, and not protected yet. */
static ssize_t back_pagemap(PmScan *scan)
{
    Mem *m = backed->m;

    if (scan->protect &&
        scan->start == (uintptr_t)(m->addr + BACK_ONE * PAGE_BYTES)) {
        prim.pagemap = still_pagemap;
        mem_fill(m, BACK_ONE, 7777);
        mem_fill(m, BACK_MANY + 3, 7778);
    }
    return still_pagemap(scan);
}

static bool back_start(Scene *s)
{
    if (!scene_start(s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return false;
    }
    for (unsigned at = 0; at < 1024; at += 512) {
        mem_fill_run(s->m, at, 512, 5000 + at, 1);
        mem_fill_run(s->m, at, 32, 1, 1);
        mem_fill_run(s->m, at + BACK_ONE + 1, 31, 33, 1);
        mem_fill_run(s->m, at + BACK_MANY + 20, 100, 84, 1);
    }
    return true;
}

static void back_end(Scene *s, unsigned scanned)
{
    KsmStats stats;

    util_passes(s->e, 8);
    stats = util_stats(s->e);
    g_assert(s->r->count[PAGE_MERGED] == 2 * BACK_MERGED);
    g_assert(s->r->count[PAGE_UNIQUE] == 1024 - 2 * BACK_MERGED);
    g_assert(stats.isolations > 0);
    g_assert(stats.pages_scanned == scanned);
    scene_end(s);
}

/* What is put back is known, and not hashed again. */
static void test_back(void)
{
    Scene s;

    if (back_start(&s)) {
        back_end(&s, 1024);
    }
}

/* ... unless it was written meanwhile. */
static void test_back_written(void)
{
    Scene s;

    if (back_start(&s)) {
        backed = &s;
        prim.pagemap = back_pagemap;
        back_end(&s, 1024 + 2);
        g_assert(prim.pagemap == still_pagemap);
    }
}

/* --- resting --- */

typedef enum Rest { REST_INHIBITED, REST_OFF } Rest;

static unsigned touched;
static const Mem *touch_mem;

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
    /* the engine's own memory does not count */
    touched += (char *)addr >= touch_mem->map &&
               (char *)addr < touch_mem->map + touch_mem->map_len;
    return prim_real.advise(addr, len, advice);
}

static ssize_t touch_pagemap(PmScan *scan)
{
    touched += scan->protect;
    return still_pagemap(scan);
}

/* Counts calls that remap memory or would cost the guest faults. */
static void touches_count(const Mem *on)
{
    touched = 0;
    touch_mem = on;
    prim.uffd_move = on ? touch_move : prim_real.uffd_move;
    prim.uffd_register = on ? touch_register : prim_real.uffd_register;
    prim.uffd_protect = on ? touch_protect : prim_real.uffd_protect;
    prim.advise = on ? touch_advise : prim_real.advise;
    prim.pagemap = on ? touch_pagemap : still_pagemap;
}

static size_t pool_memory(const KsmEngine *e)
{
    struct stat st;

    g_assert(fstat(engine_pool(e)->fd, &st) == 0);
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
 * A resting region gives unused pages back to the kernel, does not claim them
 * as saved, and does nothing else.
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
    touches_count(s.m);
    mem_fill_run(s.m, 0, 512, 5000, 1);
    util_passes(s.e, 2 * CHECK_PASSES);
    g_assert(ksm_step(s.e, 0) > 0);
    after = util_stats(s.e);
    g_assert(after.pages_sharing == 1536 - 512 - 768);
    g_assert(after.cow_broken == 512);
    /* all equal to each other: still nothing is merged */
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
    touches_count(NULL);
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

/* Switched off anywhere in a pass: nothing is touched from then on. */
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
            continue;   /* a pass skips what rests */
        }
        ripe |= s.e->scan.n_ripe;
        merged = util_stats(s.e).merged;
        ksm_engine_set_run(s.e, false);
        touches_count(s.m);
        for (unsigned k = 0; k < 3; k++) {
            g_assert(ksm_step(s.e, 1) >= 0);
        }
        g_assert(touched == 0 && util_stats(s.e).merged == merged);
        touches_count(NULL);
        ksm_engine_set_run(s.e, true);
    }
    g_assert(ripe);
    util_passes(s.e, 6);
    g_assert(util_stats(s.e).pages_sharing == 1024);
    scene_end(&s);
}

/* A resting region does not give back what was freed lazily. */
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
    touches_count(s.m);
    for (unsigned i = 0; i < 100; i++) {
        ksm_step(s.e, 0);
    }
    touches_count(NULL);
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

/* False: @n pages are never saved. */
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

/* Short runs rewritten with what they held are merged again. */
static void test_broken_equal(gconstpointer data)
{
    Scene s;

    if (!scene_merged(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    for (unsigned i = 16; i < 1024; i += 128) {
        mem_fill_run(s.m, i, 8, 1 + i, 1);
    }
    util_passes(s.e, CHECK_PASSES);
    g_assert(util_stats(s.e).pages_sharing == 1024 - 64);
    g_assert(util_stats(s.e).reasons[KSM_REASON_COW_BROKEN] == 64);
    g_assert(passes_until(&s, 1024));
    g_assert(util_stats(s.e).reasons[KSM_REASON_COW_BROKEN] == 0);
    g_assert(mem_anonymous(s.m, 0, PAGES) == 0);
    scene_end(&s);
}

/*
 * Nor does it last that restoring, or mapping the pool again, cost more once, in
 * busier times.
 */
static void test_broken_dear(gconstpointer data)
{
    bool rejoin = GPOINTER_TO_INT(data);
    unsigned n = rejoin ? 4 : 8, lost = 0;
    Scene s;

    if (!scene_merged(&s, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    s.e->costs.restore_ns = costs_guess.restore_ns * 4;
    s.e->costs.rejoin_ns = costs_guess.rejoin_ns * 8;
    for (unsigned i = 16; i < 1024; i += 128, lost += n) {
        if (rejoin) {
            mem_fill_run(s.m, i, n, 1 + i, 1);
        } else {
            /* no slot is equal to these */
            mem_fill_run(s.m, i, n, 30000 + i, 1);
            mem_fill_run(s.m, 1024 + i, n, 30000 + i, 1);
        }
    }
    util_passes(s.e, CHECK_PASSES);
    g_assert(util_stats(s.e).pages_sharing == 1024 - lost);
    for (unsigned i = 0; i < 1000 && util_stats(s.e).pages_sharing < 1024;
         i++) {
        util_passes(s.e, 1);
    }
    g_assert(util_stats(s.e).pages_sharing == 1024);
    scene_end(&s);
}

/* What was restored was quiet before: it is merged in the next pass. */
static void test_broken_soon(gconstpointer data)
{
    Scene s;

    if (!scene_merged(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    /* zeroes are saved already */
    mem_fill_run(s.m, 300, 16, 0, 0);
    for (unsigned i = 0; s.r->count[PAGE_GIVEN] == 0; i++) {
        g_assert(i < 12 * CHECK_PASSES);
        util_passes(s.e, 1);
    }
    g_assert(!s.e->scan.restored);
    mem_fill_run(s.m, 64, 16, 65, 1);
    /* something was refused here */
    s.r->chunk[0].wait = 255;
    s.r->chunk[0].tried = 500;
    for (unsigned i = 0; s.r->count[PAGE_NEW] == 0; i++) {
        g_assert(i < 12 * CHECK_PASSES);
        /* hot: not asked about for some passes */
        s.r->chunk[0].hot_wait = 7;
        util_passes(s.e, 1);
    }
    g_assert(s.e->scan.restored);
    g_assert(util_stats(s.e).pages_sharing == 1024 - 32);
    /* one of them is written */
    mem_fill(s.m, 64, 99999);
    util_passes(s.e, 1);
    g_assert(!s.e->scan.restored);
    g_assert(util_stats(s.e).pages_sharing == 1024 - 32 + 15);
    g_assert(s.r->count[PAGE_NEW] == 1);
    g_assert(util_stats(s.e).zero_pages == 16);
    mem_check(s.m);
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
    /* one part is anonymous now, and knows nothing of the other's */
    g_assert(ksm_discard(s.r, 512 * PAGE, 512 * PAGE) == 0);
    mem_gone(s.m, 512, 512);
    mem_fill_run(s.m, 100, 16, 7000, 1);
    util_passes(s.e, 4 * CHECK_PASSES);
    mem_fill_run(s.m, 600, 16, 7000, 1);
    g_assert(passes_until(&s, 1024 - 512 - 16 + 16));
    scene_end(&s);
}

/* Zeroes, and the mappings they were in, go back to the kernel. */
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
    /* three mappings now; without the one behind it is one again */
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

/* Runs too short to be restored map the pool again as they are. */
static void test_broken_short(gconstpointer data)
{
    Scene s;

    if (!scene_merged(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    s.e->costs = costs_guess;
    remaps = 0;
    prim.remap = count_remap;
    for (unsigned i = 16; i < 1024; i += 128) {
        mem_fill_run(s.m, i, 4, 1 + i, 1);
    }
    util_passes(s.e, CHECK_PASSES);
    g_assert(util_stats(s.e).pages_sharing == 1024 - 32);
    g_assert(passes_until(&s, 1024));
    g_assert(remaps == 0 && s.r->count[PAGE_BROKEN] == 0);
    g_assert(mem_anonymous(s.m, 0, PAGES) == 0);
    prim.remap = prim_real.remap;
    mem_check(s.m);
    scene_end(&s);
}

static unsigned refusals;

/* The kernel has no mapping of the pool. */
static void *refuse_pool(void *addr, size_t len, int prot, int flags, int fd,
                         off_t offset)
{
    if (fd >= 0) {
        refusals++;
        errno = ENOMEM;
        return NULL;
    }
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

/* What is tried in vain is tried ever less often. */
static void test_broken_vain(void)
{
    Scene s;

    if (!scene_merged(&s, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    refusals = 0;
    prim.map = refuse_pool;
    mem_fill_run(s.m, 16, 4, 17, 1);
    for (unsigned i = 0; i < 64 * CHECK_PASSES; i++) {
        s.e->costs = costs_guess;
        util_passes(s.e, 1);
    }
    g_test_message("tried %u times in 64 looks", refusals);
    g_assert(refusals >= 3 && refusals <= 8);
    g_assert(s.r->count[PAGE_BROKEN] == 4);
    prim.map = prim_real.map;
    mem_check(s.m);
    scene_end(&s);
}

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
        mem_fill_run(s.m, 64, 400, 65, 1);
        util_passes(s.e, 5 * CHECK_PASSES);
        early = i == 9 ? remaps : early;
    }
    g_test_message("restored %u times in %u rounds, %u in the first 10",
                   remaps, rounds, early);
    g_assert(early > 0 && remaps < rounds / 2);
    /* but soon each time, if it stays merged for some looks */
    for (unsigned i = 0; i < 16; i++) {
        remaps = i == 6 ? 0 : remaps;
        mem_fill_run(s.m, 64, 400, 65, 1);
        util_passes(s.e, (i < 6 ? 40 : 9) * CHECK_PASSES);
    }
    g_assert(remaps >= 10);
    /* never while it is written all the time */
    remaps = 0;
    for (unsigned i = 0; i < 20 * CHECK_PASSES; i++) {
        mem_fill_run(s.m, 64, 16, 80000 + i, 1);
        util_passes(s.e, 1);
    }
    g_assert(remaps == 0);
    prim.remap = prim_real.remap;
    /* once it rests it is merged after all */
    mem_fill_run(s.m, 64, 16, 65, 1);
    for (unsigned i = 0; i < 6 && !passes_until(&s, 1024); i++) {
        g_assert(i < 5);
    }
    scene_end(&s);
}

/* Owners refuse, discard and free broken pages as any others. */
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

/* A log reports a write even of what the page holds already. */
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

/* Without a busy op nothing is restored. */
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

/* Ends of mappings stay known after their pages were written. */
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
    /* without a page in its middle the mapping falls into two */
    g_assert(ksm_discard(s.r, 40 * PAGE, PAGE) == 0);
    mem_gone(s.m, 40, 1);
    g_assert(runs_counted(&s) == runs);
    g_assert(ksm_discard(s.r, 20 * PAGE, PAGE) == 0);
    mem_gone(s.m, 20, 1);
    g_assert(runs_counted(&s) == runs + 1);
    s.m->busy = false;
    scene_end(&s);
}

/* 40 broken pages that stay, and 512 pages of nothing. */
static bool scene_scattered(Scene *s)
{
    if (!scene_merged(s, KSM_DIRTY_PAGEMAP)) {
        return false;
    }
    g_assert(ksm_discard(s->r, 512 * PAGE, 512 * PAGE) == 0);
    mem_gone(s->m, 512, 512);
    for (unsigned i = 0; i < 40; i++) {
        mem_fill(s->m, 4 + 10 * i, 33000 + i);
    }
    util_passes(s->e, 4 * CHECK_PASSES);
    return true;
}

/* No copy is made of pages equal only to broken ones that stay. */
static void test_broken_lonely(void)
{
    KsmStats stats;
    Scene s;

    if (!scene_scattered(&s)) {
        return;
    }
    stats = util_stats(s.e);
    mem_fill_run(s.m, 600, 40, 33000, 1);
    util_passes(s.e, 8 * CHECK_PASSES);
    g_assert(util_stats(s.e).pages_shared == stats.pages_shared);
    g_assert(util_stats(s.e).reasons[KSM_REASON_COW_BROKEN] == 40);
    g_assert(util_stats(s.e).reasons[KSM_REASON_NOT_WORTH] == 40);
    scene_end(&s);
}

/*
 * Those that are equal to one another, too, are merged: what the index has may
 * be a broken page that stays, but is not in their way.
 */
static void test_broken_crowd(void)
{
    KsmStats stats;
    Scene s;

    if (!scene_scattered(&s)) {
        return;
    }
    stats = util_stats(s.e);
    mem_fill_run(s.m, 600, 40, 33000, 1);
    mem_fill_run(s.m, 700, 40, 33000, 1);
    util_passes(s.e, 8 * CHECK_PASSES);
    g_assert(util_stats(s.e).pages_shared == stats.pages_shared + 40);
    g_assert(util_stats(s.e).pages_sharing == stats.pages_sharing + 40);
    mem_check(s.m);
    scene_end(&s);
}

/* Pages equal to nothing are looked at less and less often. */
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

/*
 * CPU time of passes that looked at broken pages which no rest is taken for, in
 * calls: the least and the most of any pass.  The kernel moves pages, and what
 * is visited for that costs some calls more.
 */
static void calm_time(Scene *s, bool written, uint64_t *least, uint64_t *most)
{
    *least = UINT64_MAX;
    *most = 0;
    for (unsigned i = 0; i < 4 * CHECK_PASSES; i++) {
        uint64_t scanned = util_stats(s->e).pages_scanned;

        if (written) {
            mem_fill_run(s->m, 64, 16, 50000 + 16 * i, 1);
        }
        util_passes(s->e, 1);
        if (util_stats(s->e).pages_scanned > scanned) {
            *least = MIN(*least, s->e->scan.hash_time);
            *most = MAX(*most, s->e->scan.hash_time);
        }
    }
}

/*
 * To look at pages that are quiet is no reason to rest for long, or what a
 * guest has stopped writing is merged minutes later.
 */
static void test_broken_rest(void)
{
    uint64_t written, quiet, least, most;
    Scene s;

    if (!scene_merged(&s, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    s.m->busy = true;
    calm_time(&s, true, &written, &most);
    calm_time(&s, false, &least, &quiet);
    g_assert(quiet > written);
    s.m->busy = false;
    scene_end(&s);
}

/* Broken, quiet and equal to the pool's; nothing is restored. */
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

static bool pays(Scene *s, size_t page)
{
    return quiet_pays(&s->e->costs, s->r, page,
                      content_tag(s->r, s->e->hasher.zero));
}

/*
 * A saved page is worth PAGE_WORTH_NS and costs 2 us of that; a run costs the
 * same at any length.
 */
static void test_broken_pays(void)
{
    const size_t at = 600, n = 6;
    uint64_t worth = n * (PAGE_WORTH_NS - 2000);
    uint64_t *cost[3];
    Scene s;

    if (!scene_quiet(&s, at, n)) {
        return;
    }
    /* they might map the pool as they are, but for that */
    s.e->costs.rejoin_ns = UINT32_MAX;
    cost[0] = &s.e->costs.restore_ns;
    cost[1] = &s.e->costs.isolate_ns;
    cost[2] = &s.e->costs.map_ns;
    *cost[0] = 20000;
    *cost[1] = 15000;
    *cost[2] = worth - DROP_NS - 35000;
    /* at any page of the run, for all of it is restored */
    for (size_t i = at; i < at + n; i++) {
        g_assert(pays(&s, i));
    }
    g_assert(!pays(&s, at - 1));
    for (unsigned i = 0; i < G_N_ELEMENTS(cost); i++) {
        (*cost[i])++;
        g_assert(!pays(&s, at + n - 1));
        (*cost[i])--;
        g_assert(pays(&s, at + n - 1));
    }
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
 * A run is restored from its first equal page to its last one, if they are
 * worth more than what is between; zeroes apart from other content.
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
    /* those 10 are a mapping then: not to be ended */
    kin_drop(s.r);
    s.r->kinless = true;
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
    /* 10 are anonymous now, 10 still broken */
    util_passes(s.e, CHECK_PASSES);
    g_assert(s.r->count[PAGE_BROKEN] == 10);
    g_assert(util_stats(s.e).zero_pages == 8);
    g_assert(util_stats(s.e).pages_sharing == 1024 - 28);
    /* those 10 are tracked again: a write is noticed */
    mem_fill_run(s.m, 532, 10, 533, 1);
    g_assert(passes_until(&s, 1024 - 28 + 8 + 10));
    scene_end(&s);
}

typedef struct ShortRun {
    size_t page;
    unsigned n, like;       /* merged with that content ... */
    unsigned written;       /* ... until so many were, with what is unlike all */
    unsigned ends;          /* with so many looks; 0: never */
} ShortRun;

static void short_runs_check(const Scene *s, const ShortRun *runs, unsigned n,
                             unsigned looks)
{
    for (unsigned i = 0; i < n; i++) {
        bool ends = runs[i].ends && looks >= runs[i].ends;

        for (unsigned k = 0; k < runs[i].n; k++) {
            g_assert(page_state(s->r, runs[i].page + k) ==
                     (k >= runs[i].written ? PAGE_MERGED
                      : ends ? PAGE_UNIQUE : PAGE_BROKEN));
        }
    }
}

/* Broken pages are as quiet as after so many looks. */
static void looked_at(Scene *s, unsigned looks)
{
    for (size_t i = 0; i < s->r->n_pages; i++) {
        if (page_state(s->r, i) == PAGE_BROKEN) {
            s->r->history[i] = looks << 4;
        }
    }
}

/*
 * A mapping of nothing that is shared ends, if one of those beside it is
 * anonymous, or ends, too.  The longer it is, the longer it is to be quiet first.
 */
static void test_broken_mappings(gconstpointer data)
{
    static const ShortRun runs[] = {
        { 100, 8, 1, 8, 0 },            /* where kin is split off */
        { 712, 8, 10, 8, 2 }, { 720, 8, 1, 8, 2 },
        { 812, 8, 50, 0, 0 }, { 820, 8, 10, 8, 0 }, { 828, 8, 1, 0, 0 },
        { 912, 8, 90, 7, 0 },
        { 1112, 100, 100, 100, 2 },
        { 1222, 101, 300, 101, 3 },
        { 1333, 8, 10, 8, 2 }, { 1341, 8, 1, 0, 0 },
    };
    const unsigned n_runs = G_N_ELEMENTS(runs);
    const bool kin = GPOINTER_TO_INT(data);
    size_t mappings;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 1536, 50000, 1);
    mem_fill_run(s.m, 1536, 512, 1, 1);
    for (unsigned i = 0; i < n_runs; i++) {
        mem_fill_run(s.m, runs[i].page, runs[i].n, runs[i].like, 1);
    }
    util_passes(s.e, 6);
    g_assert(s.r->chunk[0].runs + s.r->chunk[1].runs + s.r->chunk[2].runs ==
             n_runs);
    g_assert(s.r->kin && s.r->kin_page == 100);
    if (!kin) {
        kin_drop(s.r);
        s.r->kinless = true;
    }
    s.m->busy = true;
    for (unsigned i = 0; i < n_runs; i++) {
        mem_fill_run(s.m, runs[i].page, runs[i].written, 90000 + 200 * i, 1);
    }
    util_passes(s.e, 6 * CHECK_PASSES);
    looked_at(&s, 1);
    mappings = mem_mappings(s.m);
    s.m->busy = false;
    util_passes(s.e, CHECK_PASSES);
    short_runs_check(&s, runs, n_runs, kin ? 2 : 0);
    /* two, and what is before and behind them, are one; three; two */
    g_assert(mappings - mem_mappings(s.m) == (kin ? 3 + 2 + 1 : 0));
    util_passes(s.e, 4 * CHECK_PASSES);
    short_runs_check(&s, runs, n_runs, kin ? 3 : 0);
    g_assert(mappings - mem_mappings(s.m) == (kin ? 3 + 2 + 1 + 2 : 0));
    mem_check(s.m);
    region_check(s.r);
    scene_end(&s);
}

/*
 * A mapping of @n pages, and one of @more, now written, in pages unlike all; a
 * device is busy.
 */
static bool scene_mappings(Scene *s, size_t at, unsigned n, unsigned more)
{
    if (!scene_start(s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return false;
    }
    mem_fill_run(s->m, 0, 1536, 50000, 1);
    mem_fill_run(s->m, 1536, 256, 1, 1);
    mem_fill_run(s->m, 100, 8, 1, 1);
    mem_fill_run(s->m, at, n, 10, 1);
    mem_fill_run(s->m, at + n, more, 1, 1);
    util_passes(s->e, 6);
    g_assert(s->r->kin && s->r->kin_page == 100);
    s->m->busy = true;
    mem_fill_run(s->m, at, n + more, 90000, 1);
    return true;
}

static bool scene_mapping(Scene *s, size_t at, unsigned n)
{
    return scene_mappings(s, at, n, 0);
}

static unsigned mapped_of(const Scene *s, size_t at, unsigned n)
{
    unsigned mapped = 0;

    for (size_t i = at; i < at + n; i++) {
        mapped += page_is_mapped(s->r, i);
    }
    return mapped;
}

static unsigned blocked;

static int block_note(const UffdRange *range, bool on)
{
    blocked += on;
    return prim_real.uffd_protect(range, on);
}

/* While a device is at it nobody is held up for it. */
static void test_broken_mapping_busy(void)
{
    Scene s;

    if (!scene_mapping(&s, 712, 8)) {
        return;
    }
    blocked = 0;
    prim.uffd_protect = block_note;
    util_passes(s.e, 6 * CHECK_PASSES);
    g_assert(blocked == 0 && mapped_of(&s, 712, 8) == 8);
    s.m->busy = false;
    util_passes(s.e, 4 * CHECK_PASSES);
    prim.uffd_protect = prim_real.uffd_protect;
    g_assert(blocked == 1 && mapped_of(&s, 712, 8) == 0);
    scene_end(&s);
}

/* One that goes on in the next chunk stays. */
static void test_broken_mapping_crosses(void)
{
    Scene s;

    if (!scene_mapping(&s, 1020, 8)) {
        return;
    }
    s.m->busy = false;
    util_passes(s.e, 12 * CHECK_PASSES);
    g_assert(mapped_of(&s, 1020, 8) == 8);
    scene_end(&s);
}

/* Two mappings, at 712 and 720, that were looked at while a device was busy. */
static bool scene_quiet_pair(Scene *s)
{
    if (!scene_mappings(s, 712, 8, 8)) {
        return false;
    }
    util_passes(s->e, 6 * CHECK_PASSES);
    s->m->busy = false;
    return true;
}

/* Where restoring is dear mappings are quiet for longer before they end. */
static void test_broken_mapping_dear(void)
{
    Scene s;

    if (!scene_quiet_pair(&s)) {
        return;
    }
    for (unsigned looks = 2; looks <= 7; looks++) {
        looked_at(&s, looks - 1);
        if (looks == 6) {
            /* ... but for one page */
            s.r->history[715] = 2 << 4;
        }
        /* three mappings less are worth three times as much */
        s.e->costs.restore_ns = 14 * MAPPING_WORTH_NS;
        util_passes(s.e, CHECK_PASSES);
        g_assert(mapped_of(&s, 712, 16) == (looks < 7 ? 16 : 0));
    }
    scene_end(&s);
}

/* What is quiet for long ends without what is beside it, if both would not pay. */
static void test_broken_mapping_alone(void)
{
    Scene s;

    if (!scene_quiet_pair(&s)) {
        return;
    }
    /* for ever is not worth more than five times as much */
    for (unsigned times = 5; times >= 4; times--) {
        looked_at(&s, 1);
        for (size_t page = 712; page < 720; page++) {
            s.r->history[page] = 14 << 4;
        }
        s.e->costs.restore_ns = times * MAPPING_WORTH_NS;
        util_passes(s.e, CHECK_PASSES);
        g_assert(mapped_of(&s, 712, 8) == (times == 4 ? 0 : 8));
        g_assert(mapped_of(&s, 720, 8) == 8);
    }
    scene_end(&s);
}

/* As the CPU's clock and the lock stood when that was restored. */
static uint64_t had_at[12];
static const KsmLock *lock_of;

static int remap_dear(void *from, size_t len, void *to)
{
    g_assert(remaps < G_N_ELEMENTS(had_at));
    had_at[remaps++] = lock_of->serving;
    return prim_real.remap(from, len, to);
}

static uint64_t cpu_dear(void)
{
    return util_cpu_by_call() + remaps * UINT64_C(3000000);
}

/*
 * What waits for the lock does not wait for a second mapping; nor does a step
 * take the time to restore all of a chunk.
 */
static void test_broken_mapping_many(void)
{
    enum { LENGTH = 4, EVERY = 8, N = G_N_ELEMENTS(had_at) };
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 1536, 50000, 1);
    mem_fill_run(s.m, 1536, 256, 1, 1);
    mem_fill_run(s.m, 100, 8, 1, 1);
    for (size_t i = 0; i < N; i++) {
        mem_fill_run(s.m, 600 + i * EVERY, LENGTH, 1 + i * LENGTH, 1);
    }
    util_passes(s.e, 6);
    g_assert(mapped_of(&s, 600, N * EVERY) == N * LENGTH);
    s.m->busy = true;
    for (size_t i = 0; i < N; i++) {
        mem_fill_run(s.m, 600 + i * EVERY, LENGTH, 90000 + i * LENGTH, 1);
    }
    util_passes(s.e, 6 * CHECK_PASSES);
    s.m->busy = false;
    remaps = 0;
    lock_of = &s.e->lock;
    prim.remap = remap_dear;
    prim.cpu_ns = cpu_dear;
    for (size_t looks = 1; looks <= N / 2; looks++) {
        looked_at(&s, 14);
        s.e->costs.restore_ns = costs_guess.restore_ns;
        util_passes(s.e, CHECK_PASSES);
        g_assert(remaps == 2 * looks);
        g_assert(had_at[remaps - 1] > had_at[remaps - 2]);
    }
    prim.cpu_ns = util_cpu_by_call;
    prim.remap = prim_real.remap;
    g_assert(mapped_of(&s, 600, N * EVERY) == 0);
    mem_check(s.m);
    region_check(s.r);
    scene_end(&s);
}

static bool swapped;    /* a page looks swapped out */

static ssize_t swapped_pagemap(PmScan *scan)
{
    const uintptr_t at = (uintptr_t)restored.s->m->addr + 715 * PAGE;
    ssize_t n = still_pagemap(scan);

    for (ssize_t i = 0; i < n && swapped; i++) {
        if (scan->vec[i].start <= at && at < scan->vec[i].end) {
            scan->vec[i].kinds &= ~(uint64_t)PM_PRESENT;
            scan->vec[i].kinds |= PM_SWAPPED;
        }
    }
    return n;
}

/* Nobody waits for what is swapped out. */
static void test_broken_mapping_away(void)
{
    Scene s;

    if (!scene_mapping(&s, 712, 8)) {
        return;
    }
    util_passes(s.e, 6 * CHECK_PASSES);
    s.m->busy = false;
    restored.s = &s;
    swapped = true;
    prim.pagemap = swapped_pagemap;
    util_passes(s.e, 4 * CHECK_PASSES);
    g_assert(mapped_of(&s, 712, 8) == 8);
    swapped = false;
    util_passes(s.e, 4 * CHECK_PASSES);
    prim.pagemap = still_pagemap;
    g_assert(mapped_of(&s, 712, 8) == 0);
    scene_end(&s);
}

/* What is equal to something is merged first, if that pays. */
static void test_broken_mapping_equal(void)
{
    uint64_t sharing;
    Scene s;

    if (!scene_mapping(&s, 712, 24)) {
        return;
    }
    sharing = util_stats(s.e).pages_sharing;
    mem_fill_run(s.m, 720, 16, 200, 1);
    util_passes(s.e, 6 * CHECK_PASSES);
    restored.s = &s;
    restored.n = 0;
    prim.remap = note_remap;
    s.m->busy = false;
    util_passes(s.e, 4 * CHECK_PASSES);
    prim.remap = prim_real.remap;
    g_assert(restored.at[restored.n - 1].page == 712);
    g_assert(restored.at[restored.n - 1].pages == 8);
    g_assert(mapped_of(&s, 720, 16) == 16 && mapped_of(&s, 712, 8) == 0);
    g_assert(util_stats(s.e).pages_sharing == sharing + 16 - 24);
    scene_end(&s);
}

/* What is behind a run, too far to be part of it, is restored in the same look. */
static void test_broken_behind(void)
{
    static const size_t at[] = { 10, 90, 1034, 1114 };
    Scene s;

    if (!scene_merged(&s, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    s.m->busy = true;
    for (unsigned side = 0; side <= 1024; side += 1024) {
        mem_fill_run(s.m, side + 10, 20, 8000, 1);
        mem_fill_run(s.m, side + 30, 60, 9000 + side, 1);
        mem_fill_run(s.m, side + 90, 11, 8100, 1);
    }
    util_passes(s.e, 6 * CHECK_PASSES);
    restored.s = &s;
    restored.n = 0;
    prim.remap = note_remap;
    s.m->busy = false;
    for (unsigned i = 0; i < 4 * CHECK_PASSES && !restored.n; i++) {
        s.e->costs = costs_guess;
        util_passes(s.e, 1);
    }
    prim.remap = prim_real.remap;
    g_assert(restored.n == G_N_ELEMENTS(at));
    for (unsigned i = 0; i < restored.n; i++) {
        g_assert(restored.at[i].page == at[i]);
        g_assert(restored.at[i].pages == (i % 2 ? 11 : 20));
    }
    scene_end(&s);
}

static void look(Scene *s, const uint8_t *kinds)
{
    bool restored;

    lock_take(&s->e->lock);
    broken_look(s->e, s->r, 0, kinds, &restored);
    lock_release(&s->e->lock);
}

/* Looking is scan time, restoring is merge time. */
static void test_broken_time(void)
{
    uint8_t kinds[CHUNK_PAGES];
    uint64_t scan, merge;
    Scene s;

    if (!scene_quiet(&s, 64, 16)) {
        return;
    }
    memset(kinds, PM_PRESENT, sizeof(kinds));
    s.e->scan.rhythm.check = true;
    s.e->scan.rhythm.looks = 1;
    s.r->chunk[0].calm = 2;
    s.r->chunk[0].restored = 2;
    scan = s.e->total.scan_time;
    merge = s.e->total.merge_time;
    look(&s, kinds);
    g_assert(s.e->total.scan_time > scan);
    g_assert(s.e->total.merge_time == merge);
    /* time to restore, were the device not busy */
    scan = s.e->total.scan_time;
    look(&s, kinds);
    g_assert(s.e->total.scan_time > scan);
    g_assert(s.e->total.merge_time > merge);
    g_assert(s.r->chunk[0].restored == 2 && s.r->chunk[0].calm == 4);
    /* and nothing in other passes */
    scan = s.e->total.scan_time;
    merge = s.e->total.merge_time;
    s.e->scan.rhythm.check = false;
    look(&s, kinds);
    g_assert(s.e->total.scan_time == scan && s.e->total.merge_time == merge);
    g_assert(s.r->chunk[0].calm == 4);
    /* restored: the soonest that it could be, or was it longer ago? */
    s.m->busy = false;
    s.e->scan.rhythm.check = true;
    s.e->scan.rhythm.soonest = 6;
    s.r->chunk[0].restored = 0;
    look(&s, kinds);
    g_assert(s.r->chunk[0].restored == 1 && s.r->chunk[0].calm == 0);
    scene_end(&s);
}

/* A look, long after the last one.  Is there to be a second one soon? */
static bool look_is_first(Scene *s)
{
    KsmRhythm *m = &s->e->scan.rhythm;

    m->second = m->alone = false;
    m->check_rest = 0;
    m->checked -= UINT64_C(100000000000);
    util_passes(s->e, 1);
    g_assert(m->check && m->looks > 8 && !m->second);
    return m->alone;
}

/* A second look is for what was written since the last, or before. */
static void test_broken_pairs(void)
{
    Scene s;

    if (!scene_merged(&s, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    s.m->busy = true;
    util_passes(s.e, 2 * CHECK_PASSES);
    g_assert(!look_is_first(&s));
    /* it breaks */
    mem_fill_run(s.m, 64, 16, 65, 1);
    g_assert(look_is_first(&s));
    g_assert(s.r->count[PAGE_BROKEN] == 16);
    g_assert(!look_is_first(&s));
    /* it was broken already */
    mem_fill_run(s.m, 79, 1, 66, 1);
    g_assert(look_is_first(&s));
    g_assert(!look_is_first(&s));
    s.m->busy = false;
    scene_end(&s);
}

/* Looks at @n pages written now until they are restored; 0: they are not. */
static unsigned looks_needed(Scene *s, unsigned n)
{
    uint64_t written;

    g_assert(passes_until(s, 1024));
    written = s->e->scan.pass;
    restored.n = 0;
    mem_fill_run(s->m, 64, n, 65, 1);
    for (unsigned i = 0; i < 40 * CHECK_PASSES && !restored.n; i++) {
        util_passes(s->e, 1);
    }
    g_assert(s->r->count[PAGE_BROKEN] == (restored.n ? 0 : n));
    return restored.n ? restored.at[0].pass / CHECK_PASSES -
                        written / CHECK_PASSES : 0;
}

/*
 * Looks double, up to 32, if half of a chunk was soon written again after it was
 * restored; up to four if some of it was; and halve if not.
 */
static void test_broken_backoff(void)
{
    /* two say that it is quiet */
    static const unsigned looks[] = { 2, 2, 4, 8, 16, 32, 32 };
    static const unsigned some[] = { 16, 8, 4, 4, 4 };
    KsmChunk *c;
    Scene s;

    if (!scene_merged(&s, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    restored.s = &s;
    prim.remap = note_remap;
    c = &s.r->chunk[0];
    for (unsigned i = 0; i < G_N_ELEMENTS(looks); i++) {
        g_assert(looks_needed(&s, 400) == looks[i]);
    }
    /* as if broken for long: looks are counted up to 255 */
    for (unsigned i = 0; i < 2; i++) {
        c->calm = 255;
        g_assert(looks_needed(&s, 400) == 2);
        g_assert(looks_needed(&s, 400) == (16 >> i));
        c->restored -= 1;
    }
    c->restored = 5;
    c->calm = 32;
    looks_needed(&s, 16);
    for (unsigned i = 0; i < G_N_ELEMENTS(some); i++) {
        g_assert(looks_needed(&s, 16) == some[i]);
    }
    prim.remap = prim_real.remap;
    scene_end(&s);
}

/* --- a device --- */

static struct {
    Mem *m;
    const char *inhibited;  /* from the next write-protection on */
    bool busy;
} plugged;

static int plug_protect(const UffdRange *range, bool on)
{
    int ret = prim_real.uffd_protect(range, on);

    if (on) {
        plugged.m->inhibited = plugged.inhibited;
        plugged.m->busy |= plugged.busy;
    }
    return ret;
}

/* Until pages are restored, or could have been many times. */
static void passes_restore(Pair *p)
{
    for (unsigned i = 0; i < 40 && !remaps; i++) {
        util_passes(p->e, 1);
    }
}

/* A device comes just as scan is about to restore: copied pages stay. */
static void test_broken_device(gconstpointer data)
{
    const unsigned n = 128;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops,
                    MEM_SMALL)) {
        return;
    }
    if (p.e->uffd_wp < 0) {
        g_test_skip("no write-protection of shared memory by userfaultfd "
                    "(Linux 5.19): memory is not restored");
        pair_end(&p);
        return;
    }
    util_passes(p.e, 4);
    g_assert(util_stats(p.e).pages_sharing == PAIR_PAGES);
    mem_fill_run(p.a, 100, n, 300, 1);
    plugged.m = p.a;
    plugged.busy = GPOINTER_TO_INT(data);
    plugged.inhibited = plugged.busy ? NULL : "a device";
    remaps = 0;
    prim.uffd_protect = plug_protect;
    prim.remap = count_remap;
    passes_restore(&p);
    g_assert(p.a->busy == plugged.busy);
    g_assert(p.a->inhibited == plugged.inhibited);
    g_assert(remaps == 0);
    g_assert(mem_anonymous(p.a, 100, n) == n);
    mem_check(p.a);
    plugged.busy = p.a->busy = false;
    plugged.inhibited = p.a->inhibited = NULL;
    passes_restore(&p);
    g_assert(remaps > 0);
    mem_check(p.a);
    prim.uffd_protect = prim_real.uffd_protect;
    prim.remap = prim_real.remap;
    pair_end(&p);
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

/* Copies without room in the pool still know each other. */
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

/* Only what was to be copied is kept: the pool's contents are merged. */
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
 * memory; beyond, copies have to wait.
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
        engine_pool(s.e)->leaked = most + over;
        util_passes(s.e, 6);
        stats = util_stats(s.e);
        g_assert(stats.pages_sharing == (over ? 0 : 64));
        g_assert((stats.reasons[KSM_REASON_NO_MEMORY] > 0) == over);
        engine_pool(s.e)->leaked = 0;
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
 * A write fault makes what cannot be moved ours alone; not while a device is
 * busy, which would be left with the old page.
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

/* Whoever takes a chunk's wait away has it looked at: what was refused waits. */
static void test_woken(void)
{
    KsmChunk *c;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 64, 1, 1);
    mem_fill_run(s.m, 512, 64, 1, 1);
    prim.uffd_move = move_refused;
    util_passes(s.e, 4);
    prim.uffd_move = prim_real.uffd_move;
    c = &s.r->chunk[s.r->count[PAGE_PINNED] && s.r->chunk[0].wait ? 0 : 1];
    g_assert(c->wait && !(c->flags & CHUNK_VISIT));
    c->failed_in = 0;
    scan_wake(s.e, c);
    g_assert(!c->wait && c->flags & CHUNK_VISIT);
    scene_end(&s);
}

/*
 * No pass has the number that chunks which never failed have failed in, or the
 * one in which those were visited that were not; and none has that of a pass
 * long ago, in which one failed.
 */
static void test_pass_numbers(void)
{
    KsmChunk *c;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 64, 1, 1);
    util_passes(s.e, 2);
    c = &s.r->chunk[0];
    c->failed_in = s.e->scan.pass % 255 + 1;
    for (unsigned i = 0; i < 260; i++) {
        util_passes(s.e, 1);
        c->wait = 1;
        scan_wake(s.e, c);
        g_assert(c->wait == 0);
        /* as one that is populated now */
        g_assert(i == 0 || c->flags & CHUNK_SEEN);
        c->flags = (c->flags | CHUNK_VISIT) & ~CHUNK_SEEN;
        c->visited_in = 0;
    }
    scene_end(&s);
}

static const char *untracked;   /* a part that could not be registered */

static int register_fails_once(const UffdRange *range, unsigned mode)
{
    const char *from = range->addr;

    if (mode == UFFD_PROTECT && !untracked) {
        untracked = from;
        return -ENOMEM;
    }
    if (mode == UFFD_PROTECT && from <= untracked &&
        untracked < from + range->len) {
        prim.uffd_register = prim_real.uffd_register;
    }
    return prim_real.uffd_register(range, mode);
}

/* A part that cannot be tracked again is, with all others, before long. */
static void test_untracked(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    /* pages between those that are merged go back, and are tracked again */
    mem_fill_run(s.m, 0, 64, 1, 1);
    mem_fill_run(s.m, 512, 64, 1, 1);
    for (unsigned i = 0; i < 64; i += 2) {
        mem_fill_run(s.m, i, 1, 9000 + i, 1);
    }
    untracked = NULL;
    prim.uffd_register = register_fails_once;
    util_passes(s.e, 12);
    g_assert(untracked);
    g_assert(prim.uffd_register == prim_real.uffd_register);
    g_assert(s.r->tracking);
    scene_end(&s);
}

/* A call that fails, and what it was called for. */
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
    prim.pagemap = still_pagemap;
    prim.read_at = prim_real.read_at;
    prim.map = prim_real.map;
}

/*
 * The user is told what was lacking.  Another's memory is not released: the
 * kernel would take it from him.
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

/* All pages that are briefly busy are tried equally often. */
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

/* Chunks that cannot be isolated do not make each other retry for ever. */
static void test_refused(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    prim.uffd_move = move_invalid;
    /* each is in the index for half of its pages */
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

/* --- what is asked of the kernel, and where --- */

static Scene *asked;
static unsigned armed;      /* pages protected when a chunk was first seen */
static size_t asked_page, asked_len;

/* Nothing outside of the region; of a chunk first seen, that chunk. */
static ssize_t arm_pagemap(PmScan *scan)
{
    const Mem *m = asked->m;
    uintptr_t start = (uintptr_t)m->addr, end = start + m->pages * PAGE;

    g_assert(scan->start >= start && scan->start < scan->end);
    g_assert(scan->end <= end);
    if (scan->protect && asked->e->scan.phase != PHASE_SYNC) {
        g_assert(scan->start / CHUNK == (scan->end - 1) / CHUNK);
        armed += (scan->end - scan->start) / PAGE;
    }
    return still_pagemap(scan);
}

static bool array_written;  /* memory for what is kept of @asked_page */

static int arm_advise(void *addr, size_t len, int advice)
{
    const char *tag = (char *)(asked->r->tag + asked_page);
    size_t tags = asked_len * sizeof(*asked->r->tag);

    g_assert((uintptr_t)addr % PAGE == 0 && len % PAGE == 0);
    if (advice == MADV_POPULATE_WRITE && (char *)addr < tag + tags &&
        (char *)addr + len > tag) {
        array_written = true;
        g_assert((char *)addr <= tag && (char *)addr + len >= tag + tags);
        g_assert(len <= tags + 2 * PAGE);
    }
    return prim_real.advise(addr, len, advice);
}

/*
 * A page protected unasked loses a write: only what is about to be looked at is
 * protected, wherever the region begins and ends.
 */
static void test_arm(gconstpointer data)
{
    bool vm = GPOINTER_TO_INT(data);
    Scene s;

    s.e = util_engine(vm ? KSM_SCOPE_VM : KSM_SCOPE_ZERO, KSM_DIRTY_PAGEMAP);
    if (!s.e) {
        return;
    }
    s.m = mem_new(PAGES, 100, MEM_SMALL);
    s.r = util_add(s.e, s.m, &mem_ops);
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    asked = &s;
    asked_page = 2 * CHUNK_PAGES;
    asked_len = CHUNK_PAGES;
    armed = 0;
    array_written = false;
    prim.pagemap = arm_pagemap;
    prim.advise = arm_advise;
    util_passes(s.e, 4);
    prim.advise = prim_real.advise;
    g_assert(armed == PAGES);
    /* without hashes no room is needed for them */
    g_assert(array_written == vm);
    /* a page is written as another chunk is seen for the first time */
    ksm_discard(s.r, 0, 412 * PAGE);
    mem_gone(s.m, 0, 412);
    util_passes(s.e, 4);
    prim.pagemap = still_pagemap;
    scene_end(&s);
}

static bool is_ours(size_t page)
{
    return page % 7 < 3;
}

static bool wrote[PAGES];
static void *busy_addr;     /* what was asked about last */
static size_t busy_len;

static bool note_busy(void *opaque, void *addr, size_t len)
{
    busy_addr = addr;
    busy_len = len;
    return false;
}

/* A child has all pages but those that are ours. */
static ssize_t read_ours(int fd, void *buf, size_t len, off_t offset)
{
    ssize_t ret = prim_real.read_at(fd, buf, len, offset);
    uint64_t *entry = buf;
    size_t first = offset / sizeof(*entry) -
                   (uintptr_t)faulted->m->addr / PAGE;

    for (size_t i = 0; i < len / sizeof(*entry) && ret > 0; i++) {
        bool ours = first + i < PAGES && is_ours(first + i);

        entry[i] &= ~(UINT64_C(1) << 56);
        entry[i] |= (uint64_t)ours << 56;
    }
    return ret;
}

static int write_ours(void *addr, size_t len, int advice)
{
    size_t page = ((char *)addr - faulted->m->addr) / PAGE;

    if (advice == MADV_POPULATE_WRITE && (char *)addr >= faulted->m->addr &&
        page < PAGES) {
        g_assert(page + len / PAGE <= PAGES);
        g_assert(addr == busy_addr && len == busy_len);
        for (size_t i = page; i < page + len / PAGE; i++) {
            g_assert(is_ours(i) && page_state(faulted->r, i) == PAGE_PINNED);
            wrote[i] = true;
        }
    }
    return prim_real.advise(addr, len, advice);
}

/* A write fault would copy what a child has: those pages are left. */
static void test_unshare_ours(void)
{
    static const KsmRegionOps ops = { .busy = note_busy };
    unsigned pinned = 0;
    Scene s;

    s.e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    if (!s.e) {
        return;
    }
    s.m = mem_new(PAGES, 0, MEM_SMALL);
    s.r = util_add(s.e, s.m, &ops);
    faulted = &s;
    memset(wrote, 0, sizeof(wrote));
    mem_fill_run(s.m, 512, 64, 1, 1);
    mem_fill_run(s.m, 1024 + 100, 64, 1, 1);
    mem_fill_run(s.m, 1536 + 448, 64, 1, 1);
    prim.uffd_move = move_refused;
    prim.read_at = read_ours;
    prim.advise = write_ours;
    util_passes(s.e, 20);
    for (unsigned i = 0; i < PAGES; i++) {
        bool is = page_state(s.r, i) == PAGE_PINNED;

        pinned += is;
        g_assert(!is || wrote[i] == is_ours(i));
    }
    g_assert(pinned >= 64);
    prim.advise = prim_real.advise;
    prim.read_at = prim_real.read_at;
    prim.uffd_move = prim_real.uffd_move;
    scene_end(&s);
}

static unsigned looks[PAGES / CHUNK_PAGES];

/* The chunk asked about; beyond the last: the engine's memory. */
static size_t asked_chunk(const PmScan *scan)
{
    return (scan->start - (uintptr_t)asked->m->addr) / CHUNK;
}

static ssize_t count_looks(PmScan *scan)
{
    g_assert(asked_chunk(scan) < G_N_ELEMENTS(looks));
    looks[asked_chunk(scan)]++;
    g_assert(!scan->protect);
    return still_pagemap(scan);
}

/*
 * While a region rests, each pass looks at another part of what is merged;
 * never at anything else.
 */
static void test_rest_turns(gconstpointer data)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, GPOINTER_TO_INT(data), MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 512, 512, 1, 1);
    mem_fill_run(s.m, 1024, 512, 0, 0);
    mem_fill_run(s.m, 1536, 512, 7000, 1);
    util_passes(s.e, 6);
    g_assert(passes_until(&s, 1024));
    ksm_engine_set_run(s.e, false);
    util_passes(s.e, 1);    /* one that was under way */
    asked = &s;
    memset(looks, 0, sizeof(looks));
    prim.pagemap = count_looks;
    for (unsigned i = 1; i <= CHECK_PASSES; i++) {
        util_passes(s.e, 1);
        g_assert(looks[0] + looks[1] + looks[2] <= i);
    }
    g_assert(looks[0] == 1 && looks[1] == 1 && looks[2] == 1);
    g_assert(looks[3] == 0);
    /* what is all written, or in use again, is not looked at */
    mem_fill_run(s.m, 512, 1024, 9000, 1);
    util_passes(s.e, CHECK_PASSES);
    g_assert(util_stats(s.e).zero_pages == 0);
    util_passes(s.e, CHECK_PASSES);
    g_assert(looks[0] == 3 && looks[1] == 2 && looks[2] == 2);
    prim.pagemap = still_pagemap;
    ksm_engine_set_run(s.e, true);
    scene_end(&s);
}

static unsigned turn, turns[PAGES / CHUNK_PAGES];

/* The order in which chunks are first looked at. */
static ssize_t order_looks(PmScan *scan)
{
    size_t chunk = asked_chunk(scan);

    if (asked->e->scan.phase != PHASE_SYNC && chunk < G_N_ELEMENTS(turns) &&
        !turns[chunk]) {
        turns[chunk] = ++turn;
    }
    return still_pagemap(scan);
}

/* A pass in which there is something new in chunks 0 and 3. */
static void pass_order(Scene *s, size_t page)
{
    turn = 0;
    memset(turns, 0, sizeof(turns));
    g_assert(ksm_discard(s->r, page * PAGE, PAGE) == 0);
    g_assert(ksm_discard(s->r, (1700 + page) * PAGE, PAGE) == 0);
    mem_gone(s->m, page, 1);
    util_passes(s->e, 1);
    g_assert(turns[0] && turns[3]);
}

/* Chunks where merging paid, however little, come first for a while. */
static void test_order(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 1024, 1000, 1);
    mem_fill_run(s.m, 1024, 16, 1, 1);
    mem_fill_run(s.m, 2000, 16, 5000, 1);
    util_passes(s.e, 3);
    asked = &s;
    prim.pagemap = order_looks;
    pass_order(&s, 100);
    g_assert(turns[0] < turns[3]);
    mem_fill_run(s.m, 1536, 16, 1, 1);
    for (unsigned i = 0; !util_stats(s.e).pages_sharing; i++) {
        g_assert(i < 8);
        util_passes(s.e, 1);
    }
    pass_order(&s, 101);
    g_assert(turns[3] < turns[0]);
    util_passes(s.e, 4);
    pass_order(&s, 102);
    g_assert(turns[0] < turns[3]);
    prim.pagemap = still_pagemap;
    scene_end(&s);
}

/* --- pages that are away --- */

static bool away;
static const Mem *away_mem;

/* All of chunk 1 is swapped out, or being moved elsewhere. */
static ssize_t away_pagemap(PmScan *scan)
{
    ssize_t got = still_pagemap(scan);

    if (scan->protect || scan->start < (uintptr_t)away_mem->addr + CHUNK ||
        scan->end > (uintptr_t)away_mem->addr + 2 * CHUNK) {
        return got;
    }
    looks[1] += scan->start == (uintptr_t)away_mem->addr + CHUNK;
    for (ssize_t i = 0; away && i < got; i++) {
        scan->vec[i].kinds &= ~PM_PRESENT;
        scan->vec[i].kinds |= PM_SWAPPED;
    }
    return got;
}

/* Nothing is merged of chunk 1, which is equal to chunk 0 since it went. */
static bool scene_away(Scene *s, KsmDirtySource dirty)
{
    if (!scene_start(s, KSM_SCOPE_VM, dirty, MEM_SMALL)) {
        return false;
    }
    mem_fill_run(s->m, 0, 512, 1, 1);
    mem_fill_run(s->m, 512, 512, 7000, 1);
    util_passes(s->e, 4);
    mem_fill_run(s->m, 512, 512, 1, 1);
    away_mem = s->m;
    away = true;
    prim.pagemap = away_pagemap;
    return true;
}

static bool swap_looked;
static uintptr_t swap_end;

/* While a span is isolated: chunk 1 has just been swapped out, up to there. */
static ssize_t late_pagemap(PmScan *scan)
{
    ssize_t got = still_pagemap(scan);

    if (!away || scan->protect || got != 1 || scan->vec[0].start >= swap_end ||
        scan->vec[0].start < (uintptr_t)away_mem->addr + CHUNK) {
        return got;
    }
    if (scan->vec[0].end > swap_end) {
        g_assert(scan->vec_len > 1);
        scan->vec[1] = scan->vec[0];
        scan->vec[0].end = scan->vec[1].start = swap_end;
        got++;
    }
    scan->vec[0].kinds &= ~PM_PRESENT;
    scan->vec[0].kinds |= PM_SWAPPED;
    swap_looked = true;
    return got;
}

static int late_register(const UffdRange *range, unsigned mode)
{
    away = mode & UFFD_MISSING;
    return prim_real.uffd_register(range, mode);
}

static int late_unregister(const UffdRange *range)
{
    away = false;
    return prim_real.uffd_unregister(range);
}

static int late_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    /* nothing of what is swapped out */
    g_assert(!away || (uintptr_t)from >= swap_end ||
             (char *)from + len <= away_mem->addr + CHUNK);
    return prim_real.uffd_move(fd, to, from, len, done);
}

/* Where the kernel may lose what it swaps in then, that is left alone. */
static void test_away_late(gconstpointer data)
{
    unsigned swapped = GPOINTER_TO_UINT(data);      /* pages */
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    s.e->stage.swap_stays = true;
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 512, 512, 1, 1);
    away_mem = s.m;
    swap_looked = false;
    swap_end = (uintptr_t)s.m->addr + CHUNK + swapped * PAGE;
    prim.pagemap = late_pagemap;
    prim.uffd_register = late_register;
    prim.uffd_unregister = late_unregister;
    prim.uffd_move = late_move;
    util_passes(s.e, 6);
    g_assert(swap_looked);
    g_assert(util_stats(s.e).pages_sharing == 512 - swapped);
    g_assert(s.r->count[PAGE_HOLE] == PAGES - 1024);
    mem_check(s.m);
    prim.pagemap = still_pagemap;
    prim.uffd_register = prim_real.uffd_register;
    prim.uffd_unregister = prim_real.uffd_unregister;
    prim.uffd_move = prim_real.uffd_move;
    away = false;
    for (unsigned i = 0; util_stats(s.e).pages_sharing < 512; i++) {
        g_assert(i < 300);
        util_passes(s.e, 1);
    }
    scene_end(&s);
}

static void scene_away_end(Scene *s)
{
    prim.pagemap = still_pagemap;
    scene_end(s);
}

/* What migrates while it is looked at is looked at again, if not written. */
static void test_away_moment(gconstpointer data)
{
    Scene s;

    if (!scene_away(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    util_passes(s.e, 3);
    g_assert(s.r->count[PAGE_SWAPPED] == 512);
    away = false;
    util_passes(s.e, 6);
    g_assert(util_stats(s.e).pages_sharing == 512);
    /* merged, written in part, and gone when that is looked at */
    mem_fill_run(s.m, 512 + 64, 64, 7000, 1);
    away = true;
    util_passes(s.e, 2);
    away = false;
    g_assert(passes_until(&s, 512 - 64));
    mem_fill_run(s.m, 512 + 64, 64, 1 + 64, 1);
    g_assert(passes_until(&s, 512));
    scene_away_end(&s);
}

/* Swapped out for long: looked at ever less, and merged when it is read. */
static void test_away_long(gconstpointer data)
{
    Scene s;

    if (!scene_away(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    util_passes(s.e, 6);
    looks[1] = 0;
    util_passes(s.e, 120);
    g_assert(looks[1] >= 3 && looks[1] <= 6);
    g_assert(s.r->count[PAGE_SWAPPED] == 512);
    away = false;
    util_passes(s.e, 128);
    g_assert(util_stats(s.e).pages_sharing == 512);
    scene_away_end(&s);
}

/* The same, swapped out when it was first seen. */
static void test_away_first(gconstpointer data)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, GPOINTER_TO_INT(data), MEM_SMALL)) {
        return;
    }
    away_mem = s.m;
    away = true;
    prim.pagemap = away_pagemap;
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 512, 512, 1, 1);
    util_passes(s.e, 6);
    looks[1] = 0;
    util_passes(s.e, 120);
    g_assert(looks[1] >= 3 && looks[1] <= 6);
    mem_fill_run(s.m, 512, 512, 1, 1);
    away = false;
    util_passes(s.e, 128);
    g_assert(util_stats(s.e).pages_sharing == 512);
    scene_away_end(&s);
}

/* Freed, written before the log is read, and gone when that is settled. */
static void test_away_freed(void)
{
    Scene s;

    if (!scene_away(&s, KSM_DIRTY_LOG)) {
        return;
    }
    away = false;
    mem_fill_run(s.m, 512, 512, 9000, 1);
    util_passes(s.e, 6);
    g_assert(ksm_free_hint(s.r, (512 + 100) * PAGE, 20 * PAGE) == 0);
    mem_fill_run(s.m, 512 + 100, 20, 5000, 1);
    util_passes(s.e, 1);
    g_assert(s.r->count[PAGE_FREED] == 20);
    g_assert(s.r->state[512 + 100] & PAGE_BLIND);
    ksm_freer_set_decay(s.e->freer, 0);
    away = true;
    util_passes(s.e, 4);
    away = false;
    util_passes(s.e, 8);
    g_assert(util_stats(s.e).reasons[KSM_REASON_FREED] == 0);
    scene_away_end(&s);
}

/* --- smart scan --- */

/* Writes unique content until the page is left alone. */
static void make_old(Scene *s, size_t page)
{
    for (unsigned i = 0; i < 7; i++) {
        mem_fill(s->m, page, 20000 + 10 * page + i);
        util_passes(s->e, 12);
    }
}

/* Passes over the page after it was written. */
static uint64_t skips(Scene *s, size_t page, uint64_t content)
{
    uint64_t skipped = util_stats(s->e).pages_skipped;

    mem_fill(s->m, page, content);
    util_passes(s->e, 16);
    return util_stats(s->e).pages_skipped - skipped;
}

/* A single page with equals is too few to be merged. */
static void test_smart_equal(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 100, 1);
    util_passes(s.e, 4);
    g_assert(util_stats(s.e).pages_skipped == 0);
    make_old(&s, 5);
    make_old(&s, 700);
    make_old(&s, 1100);
    g_assert(skips(&s, 1100, 30000) == 8);
    g_assert(skips(&s, 1100, 30001) == 8);
    /* both met something equal: forgiven as if they were new */
    mem_fill(s.m, 5, 40000);
    util_passes(s.e, 16);
    g_assert(skips(&s, 700, 40000) == 8);
    g_assert(util_stats(s.e).pages_sharing == 0);
    g_assert(util_stats(s.e).reasons[KSM_REASON_NOT_WORTH] == 2);
    for (unsigned i = 0; i < 5; i++) {
        static const unsigned want[] = { 0, 0, 1, 2, 4 };

        g_assert(skips(&s, 5, 50000 + i) == want[i]);
        g_assert(skips(&s, 700, 60000 + i) == want[i]);
    }
    scene_end(&s);
}

/* All ages are forgotten, from the first page's to the last's. */
static void test_rescan(void)
{
    static const size_t old[] = { 0, 511, 512, 1300, PAGES - 1 };
    unsigned n = G_N_ELEMENTS(old);
    KsmStats before, after;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 100, 1);
    for (unsigned i = 0; i < n; i++) {
        make_old(&s, old[i]);
    }
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < n; i++) {
            mem_fill(s.m, old[i], 90000 + 100 * round + i);
        }
        before = util_stats(s.e);
        if (round) {
            ksm_rescan(s.e);
        }
        util_passes(s.e, 4);
        after = util_stats(s.e);
        g_assert(after.pages_scanned - before.pages_scanned ==
                 (round ? n : 0));
        g_assert((after.pages_skipped > before.pages_skipped) == !round);
        util_passes(s.e, 12);
    }
    scene_end(&s);
}

static int isolations_refused(int fd, void *to, void *from, size_t len,
                              size_t *done)
{
    touched++;
    *done = 0;
    return -EINVAL;
}

/* What was tried in vain and is left alone is tried again. */
static void test_rescan_tried(void)
{
    unsigned tries;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 512, 64, 1, 1);
    mem_fill_run(s.m, 1536, 64, 1, 1);
    touched = 0;
    prim.uffd_move = isolations_refused;
    util_passes(s.e, 140);
    tries = touched;
    util_passes(s.e, 20);
    g_assert(touched <= tries + 2);
    for (unsigned i = 0; i < 3; i++) {
        tries = touched;
        ksm_rescan(s.e);
        util_passes(s.e, 3);
        g_assert(touched > tries);
        util_passes(s.e, 5);
    }
    prim.uffd_move = prim_real.uffd_move;
    ksm_rescan(s.e);
    g_assert(passes_until(&s, 64));
    scene_end(&s);
}

/* --- collisions --- */

/* The 32 bits that are kept first are the same for every content. */
static uint64_t hash_alike(const void *page, uint64_t seed)
{
    uint32_t low = hash_base(page, seed);

    return low | (uint64_t)(low ^ 0x12345678) << 32;
}

/* Ten of them differ: as if there were 8 TiB of memory. */
static uint64_t hash_short(const void *page, uint64_t seed)
{
    uint32_t low = hash_base(page, seed);

    return low | (uint64_t)(low ^ (low * UINT32_C(0x9e3779b1) >> 22)) << 32;
}

/*
 * Where many pages are known, those that only seem to be equal are told apart
 * before anything is isolated for them: @crowd as for so many.
 */
static void collide(bool crowd, unsigned kind, KsmStats *stats)
{
    static const char zeroes[PAGE];
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, kind)) {
        return;
    }
    s.e->hasher.fn = hash_short;
    s.e->hasher.zero = hash_short(zeroes, s.e->hasher.seed);
    s.e->scan.crowd = crowd ? 0 : SIZE_MAX;
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    util_passes(s.e, 30);
    *stats = util_stats(s.e);
    if (crowd) {
        g_assert(s.r->count[PAGE_EQUAL] < PAGES / 50);
        /* what is equal is found, by whichever tag */
        mem_fill_run(s.m, 0, 512, 500000, 1);
        mem_fill_run(s.m, 1024, 512, 500000, 1);
        /* huge pages are looked at ever more rarely */
        util_passes(s.e, 120);
        g_assert(util_stats(s.e).pages_sharing >= 400);
    }
    scene_end(&s);
}

static void test_crowd(gconstpointer data)
{
    const unsigned kind = GPOINTER_TO_UINT(data);
    KsmStats few = { 0 }, crowd = { 0 };

    collide(false, kind, &few);
    collide(true, kind, &crowd);
    if (few.full_scans) {
        g_assert(few.isolations > 0 && few.verify_failed > 0);
        g_assert(crowd.isolations == 0 && crowd.verify_failed == 0);
        g_assert(crowd.huge_split == 0);
    }
}

/* Is page 1 thought to be equal to what the index has at @place? */
static bool thought_equal(Scene *s, uint32_t place)
{
    return alike_is_equal(s->e, hash_page(&s->e->hasher, page_addr(s->r, 1)),
                          place);
}

/* Only what is seen to differ is not equal. */
static void test_alike(void)
{
    uint32_t place;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 600, 1000, 1);
    util_passes(s.e, 4);
    place = page_id(s.r, 512);
    g_assert(page_state(s.r, 512) == PAGE_UNIQUE);
    g_assert(thought_equal(&s, place));
    s.e->scan.crowd = s.e->content.index.count + 1;
    g_assert(thought_equal(&s, place));
    s.e->scan.crowd--;
    g_assert(!thought_equal(&s, place));
    s.m->inhibited = "a test says so";
    g_assert(thought_equal(&s, place));
    s.m->inhibited = NULL;
    s.r->leaving = true;
    g_assert(thought_equal(&s, place));
    s.r->leaving = false;
    g_assert(!thought_equal(&s, place));
    mem_fill(s.m, 1, 1512);
    g_assert(thought_equal(&s, place));
    mem_fill(s.m, 1, 1001);
    /* what is at @place is given back, and nobody knows: nor comes it back */
    g_assert(madvise(s.m->addr + 512 * PAGE, PAGE, MADV_DONTNEED) == 0);
    mem_gone(s.m, 512, 1);
    g_assert(thought_equal(&s, place));
    g_assert(mem_present(s.m, 512, 1) == 0);
    g_assert(page_state(s.r, 512) == PAGE_UNIQUE);
    /* or it is written: it is looked at */
    mem_fill(s.m, 512, 99999);
    g_assert(!thought_equal(&s, place));
    g_assert(page_state(s.r, 512) == PAGE_NEW);
    g_assert(index_lookup(&s.e->content.index, s.r->tag[512]) == PLACE_NONE);
    scene_end(&s);
}

/*
 * One that maps the pool still does when it is seen to have changed: taken for
 * anonymous, discarding it would bring the slot's content back.
 */
static void test_alike_broken(void)
{
    const size_t page = 70;
    Scene s;

    if (!scene_merged(&s, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    s.m->busy = true;
    mem_fill(s.m, page, 50000);
    for (unsigned i = 0; !(s.r->state[page] & PAGE_INDEXED); i++) {
        g_assert(i < 12 * CHECK_PASSES);
        util_passes(s.e, 1);
    }
    g_assert(page_state(s.r, page) == PAGE_BROKEN);
    s.e->scan.crowd = 0;
    mem_fill(s.m, page, 50001);
    g_assert(!thought_equal(&s, page_id(s.r, page)));
    g_assert(page_state(s.r, page) == PAGE_BROKEN);
    g_assert(!(s.r->state[page] & PAGE_INDEXED));
    s.m->busy = false;
    scene_end(&s);
}

static bool twins_start(Scene *s)
{
    if (!scene_start(s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return false;
    }
    twins_make(s->e, s->r, s->m);
    return true;
}

/* Both tags of a page belong to others: it is alone. */
static void test_taken(void)
{
    Scene s;

    if (!twins_start(&s)) {
        return;
    }
    /* none is merged, however late */
    ksm_engine_set_vma_reserve(s.e, SIZE_MAX);
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    mem_fill(s.m, 5, CONTENT_A);
    mem_fill(s.m, 6, CONTENT_Y);
    s.e->scan.crowd = 0;
    util_passes(s.e, 4);
    g_assert(s.r->count[PAGE_UNIQUE] == PAGES);
    mem_fill(s.m, 600, CONTENT_X);
    util_passes(s.e, 4);
    g_assert(s.r->count[PAGE_UNIQUE] == PAGES);
    g_assert(!(s.r->state[600] & PAGE_INDEXED));
    /* one becomes free: those that come are found, by whichever tag */
    mem_fill(s.m, 5, 77777);
    util_passes(s.e, 4);
    for (unsigned page = 700; page <= 701; page++) {
        mem_fill(s.m, page, CONTENT_X);
        util_passes(s.e, 4);
    }
    g_assert(s.r->count[PAGE_UNIQUE] == PAGES - 2);
    g_assert(page_state(s.r, 700) == PAGE_EQUAL);
    g_assert(page_state(s.r, 701) == PAGE_EQUAL);
    /* ... and written when the other one is free */
    mem_fill(s.m, 6, 77778);
    mem_fill(s.m, 700, CONTENT_X);
    mem_fill(s.m, 702, CONTENT_X);
    util_passes(s.e, 4);
    g_assert(page_state(s.r, 702) == PAGE_EQUAL);
    g_assert(s.r->count[PAGE_UNIQUE] == PAGES - 3);
    scene_end(&s);
}

/* So cheap that it is done for a page. */
static void passes_cheap(Scene *s, unsigned n)
{
    while (n--) {
        s->e->costs = (KsmCosts) { 100, 100, 100, 100, 100, 100, 100,
                                      100 };
        util_passes(s->e, 1);
    }
}

/* ... and where nobody has told them apart, comparing does, once. */
static void test_taken_late(void)
{
    uint64_t failed;
    Scene s;

    if (!twins_start(&s)) {
        return;
    }
    mem_fill_run(s.m, 1024, 1024, 1000, 1);
    for (unsigned chunk = 2; chunk < 4; chunk++) {
        mem_fill_run(s.m, chunk * 512, 64, 200, 1);
        mem_fill(s.m, chunk * 512 + 30, CONTENT_Y);
    }
    for (unsigned i = 0; i < 6; i++) {
        s.e->costs = costs_guess;
        util_passes(s.e, 1);
    }
    /* and one that stood alone */
    g_assert(util_stats(s.e).pages_sharing == 65);
    for (unsigned chunk = 0; chunk < 2; chunk++) {
        mem_fill_run(s.m, chunk * 512, 512, 5000, 1);
        mem_fill(s.m, chunk * 512 + 100, chunk ? CONTENT_X : CONTENT_A);
    }
    passes_cheap(&s, 12);
    g_assert(util_stats(s.e).pages_sharing >= 64 + 511);
    failed = util_stats(s.e).verify_failed;
    g_assert(failed > 0);
    passes_cheap(&s, 20);
    g_assert(util_stats(s.e).verify_failed == failed);
    scene_end(&s);
}

/* Pages that are written between their hash and the first move. */
static Mem *late;
static unsigned n_late;

static int move_late(int fd, void *to, void *from, size_t len, size_t *done)
{
    Mem *m = late;

    if (m) {
        size_t page = ((char *)from - m->addr) / PAGE_BYTES;

        late = NULL;
        for (size_t i = 0; i < len / PAGE_BYTES; i += 8, n_late++) {
            mem_write(m, page + i, i, 0x5a);
        }
    }
    return prim_real.uffd_move(fd, to, from, len, done);
}

/*
 * Pages hashed in the same step fill slots unasked, so those fill the slots of
 * what they were.  Who is compared with such a slot keeps its page, and ends it:
 * what comes later finds that page.
 */
static void test_fill_late(gconstpointer data)
{
    KsmDirtySource dirty = GPOINTER_TO_INT(data);
    uint64_t failed;
    KsmStats s;
    Scene f;

    if (!scene_start(&f, KSM_SCOPE_VM, dirty, MEM_SMALL)) {
        return;
    }
    mem_fill_run(f.m, 0, 512, 1, 1);
    mem_fill_run(f.m, 512, 512, 1, 1);
    mem_fill_run(f.m, 1024, 1024, 10000, 1);
    late = f.m;
    n_late = 0;
    prim.uffd_move = move_late;
    util_passes(f.e, 6);
    prim.uffd_move = prim_real.uffd_move;
    g_assert(!late && n_late);
    mem_check(f.m);
    s = util_stats(f.e);
    /* the chunk looked at last filled them, the other one was compared */
    g_assert(s.verify_failed >= n_late - MIN(n_late, STILL_FEW));
    g_assert(mem_anonymous(f.m, 512, 512) <= STILL_FEW);
    g_assert(mem_anonymous(f.m, 0, 512) >= n_late - MIN(n_late, STILL_FEW));
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        g_assert(!f.e->merge.fresh[i]);
    }
    mem_fill_run(f.m, 1024, 512, 1, 1);
    failed = s.verify_failed;
    passes_cheap(&f, 40);
    s = util_stats(f.e);
    /* each ends with the first page that is compared with it */
    g_assert(s.verify_failed <= MAX(failed, n_late));
    g_assert(s.pages_sharing >= 1024 - n_late - STILL_FEW);
    scene_end(&f);
}

/* A collision makes nobody forget which neighbours are written. */
static void test_collided(gconstpointer data)
{
    static const char zeroes[PAGE];
    KsmStats stats = { 0 };
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, GPOINTER_TO_INT(data), MEM_SMALL)) {
        return;
    }
    ksm_engine_set_smart_scan(s.e, false);
    s.e->hasher.fn = hash_alike;
    s.e->hasher.zero = hash_alike(zeroes, s.e->hasher.seed);
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 512, 512, 1000, 1);
    for (unsigned i = 0; i < 1000 && !stats.verify_failed; i++) {
        ksm_step(s.e, 1);
        stats = util_stats(s.e);
    }
    g_assert(stats.verify_failed > 0 && stats.pages_sharing == 0);
    mem_fill_run(s.m, 0, 512, 5000, 1);
    mem_fill_run(s.m, 512, 512, 5000, 1);
    for (unsigned i = 0; i < 40; i++) {
        util_passes(s.e, 1);
        stats = util_stats(s.e);
    }
    /* but for what was in the pool by then */
    g_assert(stats.pages_sharing >= 510);
    scene_end(&s);
}

/* --- time --- */

#define SECOND UINT64_C(1000000000)
static uint64_t clock_ns;

static uint64_t now_as_told(void)
{
    return clock_ns;
}

/* A pass is spread over the target time, in short waits. */
static void test_target(void)
{
    enum { CHUNKS = 16, TARGET = 8 };
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    uint64_t start, scanned, half = 0, scans;
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    clock_ns = 1000 * SECOND;
    prim.now_ns = now_as_told;
    m = mem_new(CHUNKS * 512, 0, MEM_SMALL);
    r = util_add(e, m, &mem_ops);
    for (unsigned i = 0; i < CHUNKS; i++) {
        mem_fill(m, i * 512, 1 + i);
    }
    util_passes(e, 6);
    for (unsigned i = 0; i < CHUNKS; i++) {
        mem_fill(m, i * 512, 1000 + i);
    }
    /* found written: not asked about in the pass after that */
    util_passes(e, 2);
    ksm_engine_set_target_scan(e, TARGET);
    scanned = util_stats(e).pages_scanned;
    scans = util_stats(e).full_scans;
    start = clock_ns;
    while (util_stats(e).full_scans == scans) {
        int64_t wait = ksm_step(e, 1);

        /* what comes after the pass is not spread, and longer if it was dear */
        g_assert(wait >= 0 && (wait <= (int64_t)SECOND ||
                               util_stats(e).full_scans != scans));
        if (!half &&
            util_stats(e).pages_scanned >= scanned + CHUNKS / 2) {
            half = clock_ns - start;
        }
        clock_ns += wait;
    }
    g_test_message("half after %" PRIu64 " ms, all after %" PRIu64 " ms",
                   half / 1000000, (clock_ns - start) / 1000000);
    g_assert(util_stats(e).pages_scanned == scanned + CHUNKS);
    g_assert(half >= TARGET * SECOND / 4 && half <= TARGET * SECOND * 3 / 4);
    g_assert(clock_ns - start >= TARGET * SECOND * 3 / 4);
    g_assert(clock_ns - start <= TARGET * SECOND * 5 / 4);
    util_remove(r);
    mem_check(m);
    prim.now_ns = prim_real.now_ns;
    ksm_engine_free(e);
    mem_free(m);
}

static uint64_t cpu_still(void)
{
    return 1;
}

/* Time passes as the engine asks until a pass is due; the wait after. */
static uint64_t pass_wait(KsmEngine *e)
{
    uint64_t scans = util_stats(e).full_scans;
    int64_t wait = 0;

    for (unsigned i = 0; util_stats(e).full_scans == scans; i++) {
        /* at once, while CPU time stands still */
        g_assert(wait == 0 && i < (prim.cpu_ns == cpu_still ? 1 : 1000));
        wait = ksm_step(e, 0);
        g_assert(wait >= 0);
    }
    clock_ns += wait;
    return wait;
}

/* Each page has content of its own, and time stands still but for waits. */
static bool timeless_start(Scene *s)
{
    prim.now_ns = now_as_told;
    prim.cpu_ns = cpu_still;
    clock_ns = 1000 * SECOND;
    if (!scene_start(s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return false;
    }
    mem_fill_run(s->m, 0, PAGES, 1, 1);
    return true;
}

static void timeless_end(Scene *s)
{
    prim.now_ns = prim_real.now_ns;
    prim.cpu_ns = util_cpu_by_call;
    scene_end(s);
}

/* Without changes passes become rarer; with some, one a second at least. */
static void test_idle(void)
{
    uint64_t wait, scanned, before = 0;
    Scene s;

    if (!timeless_start(&s)) {
        return;
    }
    for (unsigned i = 0; i < 20; i++) {
        wait = pass_wait(s.e);
        g_assert(wait >= SECOND / 50);
        g_assert(wait <= 10 * SECOND);
        g_assert(before < SECOND / 10 || wait == MIN(2 * before, 10 * SECOND));
        before = wait;
    }
    g_assert(wait == 10 * SECOND);
    g_assert(util_stats(s.e).state == KSM_STATE_IDLE);
    /* one page is written: soon asked about, and hashed */
    mem_fill(s.m, 700, 5000);
    scanned = util_stats(s.e).pages_scanned;
    g_assert(pass_wait(s.e) <= SECOND);
    g_assert(pass_wait(s.e) <= SECOND);
    g_assert(util_stats(s.e).pages_scanned == scanned + 1);
    /* merging pays: the next pass is due at once */
    mem_fill_run(s.m, 0, 1024, 7000, 1);
    mem_fill_run(s.m, 1024, 1024, 7000, 1);
    for (unsigned i = 0; !util_stats(s.e).pages_sharing; i++) {
        g_assert(i < 20);
        wait = pass_wait(s.e);
    }
    g_assert(wait == SECOND / 50);
    g_assert(util_stats(s.e).state == KSM_STATE_ACTIVE);
    /* what was merged once does not pay for ever */
    for (unsigned i = 0; i < 20; i++) {
        wait = pass_wait(s.e);
    }
    g_assert(wait == 10 * SECOND);
    timeless_end(&s);
}

/*
 * Passes of @seconds each, in which 40 pages of each chunk are written: the
 * same, or others each time.
 */
static void rare_passes(Scene *s, unsigned n, unsigned seconds, bool same)
{
    static uint64_t unique = 1 << 20, turn;

    while (n--) {
        unsigned at = same ? 0 : turn++ % 12 * 40;

        for (size_t chunk = 0; chunk < PAGES / 512; chunk++) {
            mem_fill_run(s->m, chunk * 512 + at, 40, unique, 1);
            unique += 40;
        }
        clock_ns += seconds * SECOND;
        pass_wait(s->e);
    }
}

static void all_hot(const Scene *s, unsigned hot)
{
    for (size_t chunk = 0; chunk < PAGES / 512; chunk++) {
        g_assert(s->r->chunk[chunk].hot == hot);
    }
}

/*
 * A chunk that is hot is left alone for some passes; not for long, where passes
 * are rare and what is written is quiet in between: that is merged soon.
 */
static void test_calm(void)
{
    Scene s;

    if (!timeless_start(&s)) {
        return;
    }
    ksm_engine_set_smart_scan(s.e, false);
    /* and what the engine waits: up to a second */
    rare_passes(&s, 24, 0, false);
    all_hot(&s, 3);
    /* passes have become rare meanwhile */
    s.r->chunk[1].hot_wait = 7;
    rare_passes(&s, 1, 200, true);
    g_assert(s.r->chunk[1].hot_wait == 0);
    rare_passes(&s, 24, 20, true);
    all_hot(&s, 2);
    rare_passes(&s, 12, 20, false);
    all_hot(&s, 0);
    g_assert(!util_stats(s.e).pages_sharing);
    for (size_t chunk = 0; chunk < PAGES / 512; chunk++) {
        mem_fill_run(s.m, chunk * 512, 512, 7000, 1);
    }
    rare_passes(&s, 5, 20, false);
    g_assert(util_stats(s.e).pages_sharing > 600);
    timeless_end(&s);
}

/*
 * Where passes are rare, merged pages are looked at in each of them, and looks
 * count by the time between them: what is written again as soon as it is merged
 * is let wait as long as if they came often.
 */
static void test_broken_rare(void)
{
    unsigned rounds = 0, most = 0;
    Scene s;

    if (!timeless_start(&s)) {
        return;
    }
    mem_fill_run(s.m, 1024, 1024, 1, 1);
    for (unsigned i = 0; i < 20; i++) {
        pass_wait(s.e);
    }
    g_assert(util_stats(s.e).pages_sharing == 1024);
    remaps = 0;
    prim.remap = count_remap;
    for (unsigned i = 0; i < 200; i++) {
        if (util_stats(s.e).pages_sharing == 1024) {
            mem_fill_run(s.m, 64, 400, 65, 1);
            rounds++;
        }
        clock_ns += 30 * SECOND;
        pass_wait(s.e);
        most = MAX(most, s.r->chunk[0].restored);
        /* found, found quiet and restored, merged: three passes */
        g_assert(i != 2 || util_stats(s.e).pages_sharing == 1024);
    }
    prim.remap = prim_real.remap;
    g_test_message("%u rounds, restored %u times", rounds, remaps);
    g_assert(most == 5);
    /* 256 s apart in the end: 32 looks of 8 s */
    g_assert(remaps >= 15 && remaps <= 35);
    timeless_end(&s);
}

/* Fruitless CPU time is paid for by waiting, up to 30 s. */
static uint64_t cpu_step, cpu_sum;

static uint64_t cpu_costly(void)
{
    return cpu_sum += cpu_step;
}

static uint64_t wait_of_cost(uint64_t step)
{
    uint64_t wait = 0;
    Scene s;

    prim.now_ns = now_as_told;
    prim.cpu_ns = cpu_costly;
    cpu_step = step;
    clock_ns = 1000 * SECOND;
    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return 0;
    }
    /* once more: see slower.h */
    prim.cpu_ns = cpu_costly;
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    for (unsigned i = 0; i < 20; i++) {
        wait = pass_wait(s.e);
    }
    prim.now_ns = prim_real.now_ns;
    prim.cpu_ns = util_cpu_by_call;
    scene_end(&s);
    return wait;
}

static void test_idle_cost(void)
{
    uint64_t little = wait_of_cost(1000);
    uint64_t more = wait_of_cost(9 * 1000000);

    if (little) {
        g_assert(little == 10 * SECOND);
        /* 0.033 % of a core */
        g_assert(more >= 24 * SECOND && more <= 27 * SECOND);
        g_assert(wait_of_cost(40 * 1000000) == 30 * SECOND);
    }
}

/* A chunk that is put off is not put off for long. */
static void test_idle_queue_full(void)
{
    KsmScan *scan;
    Scene s;

    prim.now_ns = now_as_told;
    prim.cpu_ns = cpu_still;
    clock_ns = 1000 * SECOND;
    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    scan = &s.e->scan;
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    for (unsigned i = 0; i < 20; i++) {
        pass_wait(s.e);
    }
    g_assert(pass_wait(s.e) == 10 * SECOND);
    while (scan->phase != PHASE_REST) {
        lock_take(&s.e->lock);
        scan_step(s.e);
        lock_release(&s.e->lock);
    }
    s.r->chunk[3].flags |= CHUNK_QUEUED;
    for (; scan->n_ripe < RIPE_MAX; scan->n_ripe++) {
        scan->ripe[scan->n_ripe] = page_id(s.r, 3 * CHUNK_PAGES);
    }
    scan_queue(s.e, s.r, 2);
    asked = &s;
    memset(turns, 0, sizeof(turns));
    turn = 0;
    prim.pagemap = order_looks;
    g_assert(pass_wait(s.e) <= SECOND);
    pass_wait(s.e);
    g_assert(turns[2]);
    prim.pagemap = still_pagemap;
    prim.now_ns = prim_real.now_ns;
    prim.cpu_ns = util_cpu_by_call;
    scene_end(&s);
}

/* The time told is no more than there was, nor nothing. */
static void test_time_told(void)
{
    uint64_t start = UINT64_C(1) << 50, spent;
    KsmStats stats;
    Scene s;

    cpu_sum = start;
    cpu_step = 1000;
    prim.cpu_ns = cpu_costly;
    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    prim.cpu_ns = cpu_costly;   /* once more: see slower.h */
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 512, 512, 1, 1);
    util_passes(s.e, 6);
    stats = util_stats(s.e);
    spent = cpu_sum - start;
    g_assert(stats.scan_time > 0 && stats.scan_time < spent);
    g_assert(stats.merge_time > 0 && stats.merge_time < spent);
    g_assert(stats.scan_time + stats.merge_time <= spent);
    /* books kept while off and broken pages are scan time */
    ksm_engine_set_run(s.e, false);
    mem_fill_run(s.m, 0, 200, 5000, 1);
    util_passes(s.e, CHECK_PASSES);
    g_assert(util_stats(s.e).scan_time > stats.scan_time);
    g_assert(util_stats(s.e).merge_time == stats.merge_time);
    ksm_engine_set_run(s.e, true);
    util_passes(s.e, 8 * CHECK_PASSES);
    stats = util_stats(s.e);
    g_assert(stats.scan_time + stats.merge_time <= cpu_sum - start);
    prim.cpu_ns = util_cpu_by_call;
    scene_end(&s);
}

/* --- passes --- */

static ssize_t kinds_refused(PmScan *scan)
{
    /* what is populated at all may be known */
    if (scan->protect || asked_chunk(scan) >= G_N_ELEMENTS(looks) ||
        scan->end - scan->start > CHUNK) {
        return still_pagemap(scan);
    }
    looks[asked_chunk(scan)]++;
    return -ENOMEM;
}

/* A look that fails is tried again in the next pass, not before. */
static void test_look_fails(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 1024, 512, 1, 1);
    for (unsigned c = 1; c < G_N_ELEMENTS(looks); c += 2) {
        mem_fill_run(s.m, c * CHUNK_PAGES, 16, 1000 * c, 1);
    }
    asked = &s;
    memset(looks, 0, sizeof(looks));
    prim.pagemap = kinds_refused;
    for (unsigned i = 1; i < 5; i++) {
        util_passes(s.e, 1);
        for (unsigned c = 0; c < G_N_ELEMENTS(looks); c++) {
            g_assert(looks[c] == i);
        }
    }
    g_assert(util_stats(s.e).pages_scanned == 0);
    prim.pagemap = still_pagemap;
    g_assert(passes_until(&s, 512));
    scene_end(&s);
}

static unsigned syncs;

static bool count_sync(void *opaque, size_t first, size_t n,
                       unsigned long *bitmap)
{
    syncs++;
    return mem_ops_log.dirty_sync(opaque, first, n, bitmap);
}

/*
 * A pass counts if it asked about and looked at everything: not if a region
 * went in the middle.
 */
static void test_remove_midway(void)
{
    static const ScanPhase phases[] = { PHASE_SYNC, PHASE_GOOD, PHASE_REST };
    KsmRegionOps ops = mem_ops_log;

    ops.dirty_sync = count_sync;
    for (unsigned i = 0; i < G_N_ELEMENTS(phases); i++) {
        KsmRegion *r;
        Scene s;
        Mem *m;

        if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_LOG, MEM_SMALL)) {
            return;
        }
        m = mem_new(PAGES, 0, MEM_SMALL);
        r = util_add(s.e, m, &ops);
        mem_fill_run(s.m, 0, PAGES, 1, 1);
        util_passes(s.e, 3);
        while (s.e->scan.phase != phases[i] || s.e->scan.region != s.r ||
               !s.e->scan.chunk) {
            ksm_step(s.e, 1);
        }
        util_remove(s.r);
        syncs = 0;
        util_passes(s.e, 1);
        g_assert(syncs > 0);
        mem_free(s.m);
        s.m = m;
        s.r = r;
        scene_end(&s);
    }
}

/* Chunks of a removed region wait for nothing; those of others do. */
static void test_remove_ripe(void)
{
    KsmRegion *r;
    Scene s;
    Mem *m;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    m = mem_new(PAGES, 0, MEM_SMALL);
    r = util_add(s.e, m, &mem_ops);
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    mem_fill_run(m, 0, PAGES, 10000, 1);
    util_passes(s.e, 3);
    for (unsigned i = 0; i < 4; i++) {
        scan_queue(s.e, i % 2 ? r : s.r, i);
    }
    g_assert(s.e->scan.n_ripe == 4);
    util_remove(s.r);
    g_assert(s.e->scan.n_ripe == 2);
    util_passes(s.e, 3);
    g_assert(s.e->scan.n_ripe == 0);
    for (unsigned i = 0; i < 4; i++) {
        g_assert(!(r->chunk[i].flags & CHUNK_QUEUED));
    }
    mem_check(s.m);
    mem_free(s.m);
    s.m = m;
    s.r = r;
    scene_end(&s);
}

/* --- sources --- */

static unsigned asks, asks_protect;

static ssize_t count_asks(PmScan *scan)
{
    asks++;
    asks_protect += scan->protect;
    return still_pagemap(scan);
}

/*
 * A pass over quiet memory asks once, however many chunks there are.  Where the
 * owner tells what was written, or nobody does, it asks only whether what is
 * not populated still is not.
 */
static void test_asks(gconstpointer data)
{
    KsmDirtySource dirty = GPOINTER_TO_INT(data);
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, dirty, MEM_SMALL)) {
        return;
    }
    util_passes(s.e, 5);
    prim.pagemap = count_asks;
    asks = asks_protect = 0;
    util_passes(s.e, 1);
    g_assert(asks == 1 && asks_protect == 0);
    prim.pagemap = still_pagemap;
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    util_passes(s.e, 9);
    prim.pagemap = count_asks;
    asks = asks_protect = 0;
    util_passes(s.e, 1);
    g_assert(asks_protect == (dirty == KSM_DIRTY_PAGEMAP));
    if (dirty != KSM_DIRTY_CHECKSUM) {
        g_assert(asks == asks_protect);
    }
    prim.pagemap = still_pagemap;
    scene_end(&s);
}

/* Writes behind free pages, which are not asked about, are noticed. */
static void test_behind_freed(void)
{
    uint64_t scanned;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    util_passes(s.e, 6);
    for (unsigned i = 20; i < 500; i += 100) {
        g_assert(ksm_free_hint(s.r, i * PAGE, 10 * PAGE) == 0);
    }
    util_passes(s.e, 2);
    scanned = util_stats(s.e).pages_scanned;
    for (unsigned i = 5; i < 500; i += 100) {
        mem_fill(s.m, i, 50000 + i);
    }
    mem_fill(s.m, 511, 60000);
    util_passes(s.e, 6);
    g_assert(util_stats(s.e).pages_scanned == scanned + 6);
    for (unsigned i = 20; i < 500; i += 100) {
        mem_fill_run(s.m, i, 10, 70000 + i, 1);
    }
    scene_end(&s);
}

/* Freed, given back and used again: merged as any other. */
static void test_freed_again(gconstpointer data)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, GPOINTER_TO_INT(data), MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1, 1);
    mem_fill_run(s.m, 512, 512, 1000, 1);
    util_passes(s.e, 4);
    g_assert(ksm_free_hint(s.r, 512 * PAGE, 512 * PAGE) == 0);
    mem_gone(s.m, 512, 512);
    ksm_freer_set_decay(s.e->freer, 0);
    util_passes(s.e, 4);
    mem_fill_run(s.m, 512, 512, 1, 1);
    util_passes(s.e, 4);
    /* noticed with any source */
    ksm_freer_set_decay(s.e->freer, 0);
    g_assert(passes_until(&s, 512));
    g_assert(util_stats(s.e).reasons[KSM_REASON_FREED] == 0);
    scene_end(&s);
}

static bool unknown;

static bool sync_or_not(void *opaque, size_t first, size_t n,
                        unsigned long *bitmap)
{
    return !unknown && mem_ops_log.dirty_sync(opaque, first, n, bitmap);
}

/* A log that cannot tell: anything may have been written. */
static void test_log_unknown(void)
{
    KsmRegionOps ops = mem_ops_log;
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_LOG);
    uint64_t scanned;
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(PAGES, 100, MEM_SMALL);
    ops.dirty_sync = sync_or_not;
    r = util_add(e, m, &ops);
    mem_fill_run(m, 0, PAGES, 1, 1);
    util_passes(e, 6);
    scanned = util_stats(e).pages_scanned;
    unknown = true;
    util_passes(e, 1);
    unknown = false;
    g_assert(util_stats(e).pages_volatile == PAGES);
    util_passes(e, 4);
    g_assert(util_stats(e).pages_scanned == scanned + PAGES);
    region_check(r);
    mem_check(m);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

static ssize_t protect_refused(PmScan *scan)
{
    return scan->protect ? -ENOMEM : still_pagemap(scan);
}

/* The same where the kernel does not tell; but free is not used. */
static void test_pagemap_unknown(void)
{
    KsmStats stats;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    util_passes(s.e, 6);
    g_assert(ksm_free_hint(s.r, 100 * PAGE, 20 * PAGE) == 0);
    prim.pagemap = protect_refused;
    util_passes(s.e, 1);
    prim.pagemap = still_pagemap;
    stats = util_stats(s.e);
    g_assert(stats.pages_volatile == PAGES - 20);
    g_assert(stats.reasons[KSM_REASON_FREED] == 20);
    util_passes(s.e, 6);
    g_assert(util_stats(s.e).pages_scanned == stats.pages_scanned +
                                              PAGES - 20);
    g_assert(util_stats(s.e).reasons[KSM_REASON_FREED] == 20);
    mem_fill_run(s.m, 100, 20, 5000, 1);
    scene_end(&s);
}

/*
 * A log may report a write from before the hint: that is no use of the page,
 * the next one is.
 */
static void test_freed_log(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_LOG, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    util_passes(s.e, 4);
    mem_fill_run(s.m, 100, 20, 5000, 1);
    g_assert(ksm_free_hint(s.r, 100 * PAGE, 20 * PAGE) == 0);
    util_passes(s.e, 3);
    g_assert(util_stats(s.e).reasons[KSM_REASON_FREED] == 20);
    mem_fill_run(s.m, 100, 20, 6000, 1);
    util_passes(s.e, 3);
    g_assert(util_stats(s.e).reasons[KSM_REASON_FREED] == 0);
    scene_end(&s);
}

static bool registered[PAGES];

static void note_range(const UffdRange *range, bool on)
{
    size_t page = ((char *)range->addr - asked->m->addr) / PAGE;

    for (size_t i = page; i < page + range->len / PAGE && i < PAGES; i++) {
        registered[i] = on;
    }
}

static int note_register(const UffdRange *range, unsigned mode)
{
    if (mode == UFFD_PROTECT && (char *)range->addr >= asked->m->addr) {
        note_range(range, true);
    }
    return prim_real.uffd_register(range, mode);
}

static int note_unregister(const UffdRange *range)
{
    if ((char *)range->addr >= asked->m->addr) {
        note_range(range, false);
    }
    return prim_real.uffd_unregister(range);
}

/*
 * While merging is inhibited none of the region's memory is with our
 * userfaultfd; after that all of it is.
 */
static void test_paused(void)
{
    unsigned left = 0, again = 0;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 10000, 1);
    mem_fill_run(s.m, 100, 64, 1, 1);
    mem_fill_run(s.m, 300, 64, 1, 1);
    mem_fill_run(s.m, 1300, 64, 1, 1);
    g_assert(passes_until(&s, 128));
    asked = &s;
    memset(registered, true, sizeof(registered));
    prim.uffd_register = note_register;
    prim.uffd_unregister = note_unregister;
    s.m->inhibited = "a test says so";
    util_passes(s.e, 1);
    for (unsigned i = 0; i < PAGES; i++) {
        left += registered[i] && !page_is_mapped(s.r, i);
        registered[i] = false;
    }
    g_assert(left == 0);
    s.m->inhibited = NULL;
    util_passes(s.e, 1);
    for (unsigned i = 0; i < PAGES; i++) {
        again += registered[i];
        g_assert(registered[i] != page_is_mapped(s.r, i));
    }
    g_assert(again == PAGES - 192);
    prim.uffd_register = prim_real.uffd_register;
    prim.uffd_unregister = prim_real.uffd_unregister;
    scene_end(&s);
}

/* A chunk that ends with the region is not huge because another is. */
static void test_edge_huge(void)
{
    Scene s;

    s.e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    if (!s.e) {
        return;
    }
    s.m = mem_new(3 * 512 + 100, 0, MEM_HUGE);
    g_assert(madvise(s.m->addr + 3 * CHUNK, CHUNK, MADV_NOHUGEPAGE) == 0);
    s.r = util_add(s.e, s.m, &mem_ops);
    mem_fill_run(s.m, 0, 3 * 512, 1000, 1);
    mem_fill_run(s.m, 3 * 512, 32, 1, 1);
    mem_fill_run(s.m, 3 * 512 + 50, 32, 1, 1);
    g_assert(passes_until(&s, 32));
    scene_end(&s);
}

/* Where only zeroes count, pages that never are zero are left alone. */
static void test_smart_zero(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_ZERO, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 100, 1);
    make_old(&s, 5);
    g_assert(skips(&s, 5, 30000) == 8);
    g_assert(skips(&s, 6, 30000) == 0);
    scene_end(&s);
}

/* Without a source, what stays as it is is hashed in every ninth pass. */
static void test_smart_checksum(void)
{
    KsmStats before, after;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 100, 1);
    util_passes(s.e, 40);
    before = util_stats(s.e);
    util_passes(s.e, 90);
    after = util_stats(s.e);
    g_assert(after.pages_scanned - before.pages_scanned == 10 * PAGES);
    g_assert(after.pages_skipped - before.pages_skipped == 80 * PAGES);
    scene_end(&s);
}

/* Does the next step make a pass, though time stands still? */
static bool pass_due(KsmEngine *e)
{
    uint64_t scans = util_stats(e).full_scans;

    for (unsigned i = 0; i < 100 && util_stats(e).full_scans == scans; i++) {
        ksm_step(e, 0);
    }
    return util_stats(e).full_scans > scans;
}

/* A region with something new does not wait for the next pass. */
static void test_kick(void)
{
    KsmRegion *r;
    Scene s;
    Mem *m;

    prim.now_ns = now_as_told;
    clock_ns = 1000 * SECOND;
    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1, 1);
    util_passes(s.e, 12);
    g_assert(util_stats(s.e).state == KSM_STATE_IDLE);
    g_assert(!pass_due(s.e));
    ksm_rescan(s.e);
    g_assert(util_stats(s.e).state == KSM_STATE_ACTIVE);
    g_assert(pass_due(s.e));
    util_passes(s.e, 12);
    g_assert(!pass_due(s.e));
    ksm_engine_set_run(s.e, false);
    g_assert(util_stats(s.e).state == KSM_STATE_OFF);
    g_assert(!pass_due(s.e));
    ksm_engine_set_run(s.e, true);
    g_assert(pass_due(s.e));
    util_passes(s.e, 12);
    g_assert(!pass_due(s.e));
    m = mem_new(512, 0, MEM_SMALL);
    r = util_add(s.e, m, &mem_ops);
    g_assert(pass_due(s.e));
    /* a new one is not taken for idle before it was looked at */
    g_assert(util_stats(s.e).state == KSM_STATE_ACTIVE);
    util_passes(s.e, 12);
    g_assert(util_stats(s.e).state == KSM_STATE_IDLE);
    util_remove(r);
    mem_free(m);
    prim.now_ns = prim_real.now_ns;
    scene_end(&s);
}

static void test_smart_off(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 100, 1);
    make_old(&s, 5);
    g_assert(skips(&s, 5, 30000) == 8);
    ksm_engine_set_smart_scan(s.e, false);
    g_assert(skips(&s, 5, 30001) == 0);
    ksm_engine_set_smart_scan(s.e, true);
    g_assert(skips(&s, 5, 30002) == 8);
    scene_end(&s);
}

/* --- what is merged at all --- */

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
    mem_fill_run(b, 0, 7, 1, 1);
    ra = util_add(e, a, NULL);
    rb = util_add(e, b, NULL);
    util_passes(e, 8);
    s = util_stats(e);
    /* nor one that is cold, for less than an eighth */
    g_assert(s.huge_split == 0 && s.pages_sharing == 0);
    g_assert(s.reasons[KSM_REASON_NOT_WORTH] == 14);
    mem_fill_run(b, 7, 113, 8, 1);
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

/* Unchanged memory is not hashed again; changing memory is skipped. */
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

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    stores_choose();
    prim.cpu_ns = util_cpu_by_call;
    g_test_add_func("/scan/vmas/reserve", test_vma_reserve);
    g_test_add_func("/scan/vmas/few", test_vma_few);
    add_sources("/scan/visit/populated", test_populated);
    g_test_add_func("/scan/visit/queue-full", test_queue_full);
    g_test_add_func("/scan/runs/periods", test_periods);
    g_test_add_func("/scan/runs/whole", test_runs_whole);
    g_test_add_func("/scan/runs/calls", test_runs_calls);
    g_test_add_data_func("/scan/runs/near/behind", GUINT_TO_POINTER(384),
                         test_runs_near);
    g_test_add_data_func("/scan/runs/near/before", GUINT_TO_POINTER(128),
                         test_runs_near);
    g_test_add_func("/scan/runs/measured", test_measured);
    g_test_add_func("/scan/page-cost", test_page_cost);
    g_test_add_func("/scan/estimate-ends", test_estimate_ends);
    g_test_add_func("/scan/late", test_late);
    g_test_add_func("/scan/late/full", test_late_full);
    for (size_t i = 0; i < G_N_ELEMENTS(beside); i++) {
        g_autofree char *path = g_strdup_printf("/scan/late/beside/%s",
                                                beside[i].name);

        g_test_add_data_func(path, GSIZE_TO_POINTER(i), test_late_beside);
    }
    g_test_add_data_func("/scan/late/more/first", GSIZE_TO_POINTER(310),
                         test_late_more);
    g_test_add_data_func("/scan/late/more/second", GSIZE_TO_POINTER(910),
                         test_late_more);
    g_test_add_func("/scan/late/woken", test_late_woken);
    g_test_add_func("/scan/back", test_back);
    g_test_add_func("/scan/back/written", test_back_written);
    add_sources("/scan/broken/equal", test_broken_equal);
    add_sources("/scan/broken/short", test_broken_short);
    g_test_add_func("/scan/broken/vain", test_broken_vain);
    g_test_add_data_func("/scan/broken/dear/restore", GINT_TO_POINTER(false),
                         test_broken_dear);
    g_test_add_data_func("/scan/broken/dear/rejoin", GINT_TO_POINTER(true),
                         test_broken_dear);
    g_test_add_data_func("/scan/broken/soon/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_broken_soon);
    g_test_add_data_func("/scan/broken/soon/log",
                         GINT_TO_POINTER(KSM_DIRTY_LOG), test_broken_soon);
    add_sources("/scan/broken/among", test_broken_among);
    add_sources("/scan/broken/zeroes", test_broken_zeroes);
    add_sources("/scan/broken/churn", test_broken_churn);
    add_sources("/scan/broken/owner", test_broken_owner);
    g_test_add_data_func("/scan/broken/inhibited", GINT_TO_POINTER(false),
                         test_broken_device);
    g_test_add_data_func("/scan/broken/busy", GINT_TO_POINTER(true),
                         test_broken_device);
    g_test_add_func("/scan/broken/log", test_broken_log);
    g_test_add_func("/scan/broken/unasked", test_broken_unasked);
    g_test_add_func("/scan/broken/runs", test_broken_runs);
    g_test_add_func("/scan/broken/lonely", test_broken_lonely);
    g_test_add_func("/scan/broken/crowd", test_broken_crowd);
    g_test_add_func("/scan/broken/rest", test_broken_rest);
    add_sources("/scan/broken/late", test_broken_late);
    g_test_add_func("/scan/broken/pays", test_broken_pays);
    g_test_add_func("/scan/broken/run", test_broken_run);
    g_test_add_data_func("/scan/broken/mappings/kin", GINT_TO_POINTER(true),
                         test_broken_mappings);
    g_test_add_data_func("/scan/broken/mappings/kinless",
                         GINT_TO_POINTER(false), test_broken_mappings);
    g_test_add_func("/scan/broken/mappings/busy", test_broken_mapping_busy);
    g_test_add_func("/scan/broken/mappings/crosses",
                    test_broken_mapping_crosses);
    g_test_add_func("/scan/broken/mappings/dear", test_broken_mapping_dear);
    g_test_add_func("/scan/broken/mappings/alone", test_broken_mapping_alone);
    g_test_add_func("/scan/broken/mappings/many", test_broken_mapping_many);
    g_test_add_func("/scan/broken/mappings/away", test_broken_mapping_away);
    g_test_add_func("/scan/broken/mappings/equal", test_broken_mapping_equal);
    g_test_add_func("/scan/broken/behind", test_broken_behind);
    g_test_add_func("/scan/broken/backoff", test_broken_backoff);
    g_test_add_func("/scan/broken/rare", test_broken_rare);
    g_test_add_func("/scan/broken/time", test_broken_time);
    g_test_add_func("/scan/broken/pairs", test_broken_pairs);
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
    g_test_add_func("/scan/unshare/ours", test_unshare_ours);
    g_test_add_func("/scan/woken", test_woken);
    g_test_add_func("/scan/pass-numbers", test_pass_numbers);
    g_test_add_func("/scan/untracked", test_untracked);
    g_test_add_data_func("/scan/arm/vm", GINT_TO_POINTER(true), test_arm);
    g_test_add_data_func("/scan/arm/zero", GINT_TO_POINTER(false), test_arm);
    add_sources("/scan/rest-turns", test_rest_turns);
    g_test_add_func("/scan/order", test_order);
    g_test_add_func("/scan/away/freed", test_away_freed);
    g_test_add_data_func("/scan/away/late/half", GUINT_TO_POINTER(256),
                         test_away_late);
    g_test_add_data_func("/scan/away/late/all", GUINT_TO_POINTER(512),
                         test_away_late);
    add_sources("/scan/away/moment", test_away_moment);
    /* without a source all is looked at in each pass */
    g_test_add_data_func("/scan/away/long/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_away_long);
    g_test_add_data_func("/scan/away/long/log",
                         GINT_TO_POINTER(KSM_DIRTY_LOG), test_away_long);
    g_test_add_data_func("/scan/away/first/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_away_first);
    g_test_add_data_func("/scan/away/first/log",
                         GINT_TO_POINTER(KSM_DIRTY_LOG), test_away_first);
    g_test_add_func("/scan/smart/equal", test_smart_equal);
    g_test_add_func("/scan/rescan/ages", test_rescan);
    g_test_add_func("/scan/rescan/tried", test_rescan_tried);
    g_test_add_data_func("/scan/collided/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_collided);
    g_test_add_data_func("/scan/collided/log",
                         GINT_TO_POINTER(KSM_DIRTY_LOG), test_collided);
    g_test_add_func("/scan/alike", test_alike);
    g_test_add_func("/scan/alike/broken", test_alike_broken);
    g_test_add_func("/scan/taken", test_taken);
    g_test_add_func("/scan/taken/late", test_taken_late);
    g_test_add_data_func("/scan/fill/late/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_fill_late);
    g_test_add_data_func("/scan/fill/late/log",
                         GINT_TO_POINTER(KSM_DIRTY_LOG), test_fill_late);
    g_test_add_data_func("/scan/crowd/small", GUINT_TO_POINTER(MEM_SMALL),
                         test_crowd);
    g_test_add_data_func("/scan/crowd/huge", GUINT_TO_POINTER(MEM_HUGE),
                         test_crowd);
    g_test_add_func("/scan/target", test_target);
    g_test_add_func("/scan/idle", test_idle);
    g_test_add_func("/scan/calm", test_calm);
    g_test_add_func("/scan/idle-cost", test_idle_cost);
    g_test_add_func("/scan/idle-queue-full", test_idle_queue_full);
    g_test_add_func("/scan/kick", test_kick);
    g_test_add_func("/scan/time-told", test_time_told);
    g_test_add_func("/scan/look-fails", test_look_fails);
    g_test_add_func("/scan/remove-midway", test_remove_midway);
    g_test_add_func("/scan/remove-ripe", test_remove_ripe);
    add_sources("/scan/asks", test_asks);
    g_test_add_func("/scan/behind-freed", test_behind_freed);
    add_sources("/scan/freed-again", test_freed_again);
    g_test_add_func("/scan/freed-log", test_freed_log);
    g_test_add_func("/scan/log-unknown", test_log_unknown);
    g_test_add_func("/scan/paused", test_paused);
    g_test_add_func("/scan/pagemap-unknown", test_pagemap_unknown);
    g_test_add_func("/scan/edge-huge", test_edge_huge);
    g_test_add_func("/scan/smart/zero", test_smart_zero);
    g_test_add_func("/scan/smart/checksum", test_smart_checksum);
    g_test_add_func("/scan/smart/off", test_smart_off);
    g_test_add_data_func("/scan/merged/zero-vm", GINT_TO_POINTER(KSM_SCOPE_VM),
                         test_zero);
    g_test_add_data_func("/scan/merged/zero-only",
                         GINT_TO_POINTER(KSM_SCOPE_ZERO), test_zero);
    g_test_add_func("/scan/merged/split-min", test_split_min);
    g_test_add_func("/scan/merged/nodes", test_nodes);
    g_test_add_func("/scan/merged/smart", test_smart);
    return g_test_run();
}
