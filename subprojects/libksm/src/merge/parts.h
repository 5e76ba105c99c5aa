/*
 * parts: which parts of a chunk are isolated, and whether that pays
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The unit of isolation.  Moving memory out costs a TLB shootdown per call, and
 * faulting threads wait until all of a span is done.  Small pages are moved in
 * spans: runs whose gaps are cheaper to put back than another isolation, and
 * that are done within the limit of a stall.
 *
 * Moving a part of a huge page breaks it.  Moved whole it comes out in one go,
 * but all that is kept of it has to be copied back.  So it is moved whole where
 * that is cheaper, and short enough; and only if enough of it goes.  One that a
 * later look found as it was (cold) may go for less: that is saved for long.
 *
 * Of small pages what came to be equal late stands alone between what is merged
 * already, each page an isolation of its own.  Where it was refused for that, and
 * waited, twice, and nothing around it is written, or was since it was merged
 * (cold), it may cost more, too, a few milliseconds in all: ksmd, to find it,
 * would look at all of the chunk twice, and it does not see the pool.
 */
#ifndef KSM_PARTS_H
#define KSM_PARTS_H

#include "merge/planned.h"

/* Small pages are not cold before their chunk was refused so often. */
#define LATE_MIN        2u

/* Pages that merging must save here. */
unsigned parts_gain(const KsmPlan *p, const KsmChunk *c);

/* Small pages that are cold: if they do not pay, they may cost more. */
bool parts_late(const KsmChunk *c);

/* Acts are made and counted: sets @span, @n_spans, @kept and @breaks. */
void parts_make(KsmPlan *p);

/* The chunk is moved whole after all. */
void parts_whole(KsmPlan *p);

/* By these costs, is what is saved worth it? */
bool parts_pay(const KsmPlan *p, const KsmCosts *c);

#endif
