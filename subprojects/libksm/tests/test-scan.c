/*
 * libksm tests: what scan, run, dirty and discard decide
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What is merged to what, how often memory is looked at, and when it is left
 * alone.  Leaves to others: that memory keeps its bytes whatever happens
 * (test-engine, test-merge, test-fault, test-prop).
 */
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

static size_t process_mappings(void)
{
    g_autofree char *text = NULL;
    size_t lines = 0;

    g_assert(g_file_get_contents("/proc/self/maps", &text, NULL, NULL));
    for (const char *c = text; *c; c++) {
        lines += *c == '\n';
    }
    return lines;
}

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

    room += process_mappings();
    ksm_engine_set_vma_reserve(s.e, mappings_allowed() - room);
    ksm_rescan(s.e);
    util_passes(s.e, 6);
    stats = util_stats(s.e);
    g_assert(stats.pages_sharing > 0);
    g_assert(stats.reasons[KSM_REASON_VMA_LIMIT] > 0);
    g_assert(process_mappings() <= room);
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
        g_assert(stats.pages_sharing + stats.pages_shared == PAGES);
        g_assert(stats.merged_runs <= PAGES / period[k] + 16);
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

static void add_sources(const char *path, GTestDataFunc fn)
{
    for (unsigned i = 0; i < G_N_ELEMENTS(sources); i++) {
        g_autofree char *one = g_strconcat(path, "/", sources[i].name, NULL);

        g_test_add_data_func(one, GINT_TO_POINTER(sources[i].dirty), fn);
    }
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/scan/vmas/reserve", test_vma_reserve);
    g_test_add_func("/scan/vmas/few", test_vma_few);
    g_test_add_func("/scan/runs/periods", test_periods);
    add_sources("/scan/rest", test_rest);
    add_sources("/scan/rest-midway", test_rest_midway);
    g_test_add_func("/scan/rest/settle", test_rest_settle);
    return g_test_run();
}
