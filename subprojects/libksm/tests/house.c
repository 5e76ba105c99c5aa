/*
 * libksm tests: an engine, the whole house
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <inttypes.h>

#include "base/prim.h"
#include "engine/state.h"
#include "house.h"
#include "memory/region.h"
#include "slower.h"

static uint64_t seed_fixed(void)
{
    return UINT64_C(0x6b736d);
}

KsmEngine *(*util_engine_new)(const KsmConfig *, GError **) = ksm_engine_new;

KsmEngine *util_engine(KsmScope scope, KsmDirtySource dirty)
{
    KsmConfig config;

    ksm_config_init(&config);
    config.scope = scope;
    config.dirty = dirty;
    config.max_cpu = 100;
    return util_engine_of(&config);
}

KsmEngine *util_engine_of(const KsmConfig *config)
{
    g_autoptr(GError) err = NULL;
    KsmEngine *e;

    if (!ksm_supported(&err)) {
        g_test_skip(err->message);
        return NULL;
    }
    /*
     * The index has 32 bits of a hash: with a random seed two of 2048 contents
     * collide, and stay unmerged, in one run of 2000.
     */
    prim.random = seed_fixed;
    slower_init();
    e = util_engine_new(config, &err);
    g_assert(!err);
    return e;
}

KsmRegion *util_add(KsmEngine *e, Mem *m, const KsmRegionOps *ops)
{
    g_autoptr(GError) err = NULL;
    KsmRegion *r = ksm_region_add(e, m->addr, m->pages * PAGE, -1, ops, m,
                                  &err);

    g_assert(!err);
    g_assert(r);
    return r;
}

bool (*util_busy)(KsmEngine *);

void util_passes(KsmEngine *e, unsigned n)
{
    KsmStats s = util_stats(e);
    uint64_t until = s.full_scans + n;

    while (s.full_scans < until) {
        g_assert(ksm_step(e, 1000000000) >= 0);
        s = util_stats(e);
        if (util_busy && util_busy(e)) {
            /* pages put back meanwhile look written for a while */
            until = MAX(until, s.full_scans + 4);
        }
    }
}

KsmStats util_stats(KsmEngine *e)
{
    KsmStats s;

    ksm_engine_get_stats(e, &s);
    return s;
}

void util_remove(KsmRegion *r)
{
    g_assert(ksm_region_remove(r, KSM_REMOVE_UNMERGE) == 0);
}

void util_end(KsmEngine *e, KsmRegion *r, Mem *m)
{
    mem_check(m);
    region_check(r);
    util_remove(r);
    mem_check(m);
    ksm_engine_free(e);
    mem_free(m);
}

void util_print(KsmEngine *e)
{
    KsmStats s = util_stats(e);

    g_test_message("shared %" PRIu64 " sharing %" PRIu64 " zero %" PRIu64
                   " merged %" PRIu64 " scanned %" PRIu64 " passes %" PRIu64
                   " verify-failed %" PRIu64 " runs %" PRIu64,
                   s.pages_shared, s.pages_sharing, s.zero_pages, s.merged,
                   s.pages_scanned, s.full_scans, s.verify_failed,
                   s.merged_runs);
    for (unsigned i = 0; i < KSM_REASON_MAX; i++) {
        if (s.reasons[i]) {
            g_test_message("  %s %" PRIu64, ksm_reason_name(i),
                           s.reasons[i]);
        }
    }
    g_test_message("  costs: isolate %" PRIu64 " map %" PRIu64 " copy %" PRIu64
                   " back %" PRIu64 " restore %" PRIu64 " ns",
                   e->costs.isolate_ns, e->costs.map_ns, e->costs.copy_ns,
                   e->costs.back_ns, e->costs.restore_ns);
}

bool pair_start(Pair *p, KsmScope scope, KsmDirtySource dirty,
                const KsmRegionOps *ops, MemPages kind)
{
    p->e = util_engine(scope, dirty);
    if (!p->e) {
        return false;
    }
    p->a = mem_new(PAIR_PAGES, 0, kind);
    p->b = mem_new(PAIR_PAGES, 0, kind);
    mem_fill_run(p->a, 0, PAIR_PAGES, 1, 1);
    mem_fill_run(p->b, 0, PAIR_PAGES, 1, 1);
    p->ra = util_add(p->e, p->a, ops);
    p->rb = util_add(p->e, p->b, ops);
    return true;
}

void pair_end(Pair *p)
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
