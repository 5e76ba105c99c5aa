/*
 * libksm tests: an engine with two areas of equal content
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "memory/region.h"
#include "pair.h"

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
