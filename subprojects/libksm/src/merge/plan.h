/*
 * plan: what is to become of each page of a chunk
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Nothing is changed yet, but slots are taken.  Where the store lets us fill
 * them, they get their memory before a span is isolated and their content after
 * it: faulting threads wait for that copy, but it replaces the page without a
 * comparison.
 *
 * Leaves to others: which parts of the chunk are isolated for it (parts.h).
 */
#ifndef KSM_PLAN_H
#define KSM_PLAN_H

#include "merge/planned.h"

/* Mappings that single pages may take, as far as is known without counting. */
size_t plan_room(const KsmPlan *p);

/* Could merging this chunk pay?  Cheap. */
bool plan_ripe(const KsmPlan *p, const KsmRegion *r, size_t chunk);

/*
 * Plans the chunk; false: nothing is to be done (the reason is left in the
 * chunk).  There may be partners in any case.
 */
bool plan_make(KsmPlan *p, KsmRegion *r, size_t chunk);

/* Another act for a page, which gives up the user of its slot. */
void plan_drop(KsmPlan *p, unsigned i, PlanAct act);

/* @done to @n pages: slots that they do not map lose their users. */
void plan_done(KsmPlan *p, unsigned first, unsigned n, const uint8_t *done);

#endif
