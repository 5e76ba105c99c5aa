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
#include <unistd.h>

#include "engine.h"
#include "prim.h"
#include "util.h"

#define PAGES   (4 * 512u)

typedef struct Scene {
    KsmEngine *e;
    KsmRegion *r;
    Mem *m;
} Scene;

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

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/scan/vmas/reserve", test_vma_reserve);
    g_test_add_func("/scan/vmas/few", test_vma_few);
    g_test_add_func("/scan/runs/periods", test_periods);
    return g_test_run();
}
