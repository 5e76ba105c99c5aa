/*
 * pace: how much to do
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "base/prim.h"
#include "engine/pace.h"

#define SLICE_NS    UINT64_C(2000000)   /* of CPU at a share of 100 % */
#define REST_MAX_NS UINT64_C(1000000000)

void budget_begin(KsmBudget *b, uint64_t max_ns)
{
    b->step_cpu = prim.cpu_ns();
    b->limit = max_ns ? max_ns : SLICE_NS;
}

static uint64_t own_used(const KsmBudget *b)
{
    return prim.cpu_ns() - b->step_cpu;
}

uint64_t budget_used(const KsmBudget *b)
{
    return own_used(b) + crew_cpu_ns(b->crew) - b->helped;
}

uint64_t budget_rest(KsmBudget *b, unsigned percent)
{
    uint64_t own = own_used(b), helped = crew_cpu_ns(b->crew);
    uint64_t want = (own + helped - b->helped) * 100 / percent;

    b->helped = helped;
    return want > own ? want - own : 0;
}

uint64_t budget_spread(uint64_t target_ns, uint64_t elapsed, uint64_t done,
                       uint64_t all)
{
    double share = all ? (double)done / all : 1;
    uint64_t want = target_ns * share;

    return want > elapsed ? MIN(want - elapsed, REST_MAX_NS) : 0;
}
