/*
 * pace: how much to do
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Work is measured in CPU time of the stepping thread and its helpers.  After a
 * slice the engine rests to keep the share that the user allows; a target scan
 * time only slows it, by spreading a pass.
 */
#ifndef KSM_PACE_H
#define KSM_PACE_H

#include "base/crew.h"

typedef struct KsmBudget {
    KsmCrew *crew;
    uint64_t step_cpu;      /* thread CPU time when the step began */
    uint64_t helped;        /* ... and what helpers had used before that */
    uint64_t limit;         /* ns of CPU for this step */
} KsmBudget;

void budget_begin(KsmBudget *b, uint64_t max_ns);
/* Helpers' CPU included, and that of what they ended between steps. */
uint64_t budget_used(const KsmBudget *b);
/* ns to rest after this step, which ends, by the share of a CPU. */
uint64_t budget_rest(KsmBudget *b, unsigned percent);
/*
 * ns to rest so that a pass takes @target_ns: @done of @all chunks are done
 * after @elapsed.
 */
uint64_t budget_spread(uint64_t target_ns, uint64_t elapsed, uint64_t done,
                       uint64_t all);

#endif
