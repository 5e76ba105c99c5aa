/*
 * gather: contents move to slots that follow each other
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A run of merged pages is one mapping if its slots follow each other.  Those of
 * a file do when it is merged for the first time; but as memory is written and
 * merged for hours, parts of it come and go at different times, until a run of
 * forty pages maps six stretches of slots.  Then its content is copied to new
 * slots, one behind the other, which it maps, and by which the content is found
 * from then on.  Whoever else maps one of the old slots follows, mostly with as
 * many mappings less; the last one to leave frees it.
 *
 * That takes CPU for each page and user.  Who else has pages one behind the other
 * as this run does has fewer mappings, too; who maps what lay one behind the other
 * in the pool, and is torn apart, has more.  How many users have both is not
 * known, only how many may: half of them are expected to.  It is done where fewer
 * mappings in all are worth the CPU time (MAPPING_WORTH_NS).  What was merged
 * lately may be written again soon, and waits; so does what is not in memory.
 *
 * The danger is that of rejoin.h, by which all pages are replaced.  A copy is
 * compared with the page as any slot is; what it was copied from has users, so
 * nobody writes it meanwhile.
 *
 * Leaves to others: when, and how much at once (engine/compact.h).
 */
#ifndef KSM_GATHER_H
#define KSM_GATHER_H

#include "base/hash.h"
#include "base/kinds.h"
#include "merge/rejoin.h"

/* Times that a merged page was found merged: its history. */
#define GATHER_AGE  2u

typedef struct KsmGather {
    KsmRejoin *rejoin;
    KsmHasher *hasher;
    KsmKinds *kinds;
    unsigned max_sharing;   /* users of a slot */
    uint64_t moved;         /* pages that map another slot now, ever */
} KsmGather;

/* The chunk's merged pages are older, by one time. */
void gather_age(KsmRegion *r, size_t chunk);

/*
 * Gathers what begins at @page, before @end, of a chunk of a region that has a
 * busy op, if that pays and all of it is old enough.  *@tried: so many pages, if
 * not all of them are gathered then; 0: none.  Returns the page to go on with.
 */
size_t gather_next(KsmGather *g, KsmRegion *r, size_t page, size_t end,
                   unsigned *tried);

/*
 * Pages from @page on, before @end, whose content is found in another slot
 * follow there, but where its users, or those of both, are too many; if it is
 * found nowhere it is found in theirs, from now on.  *@behind counts those that do
 * not follow now: all of them, if they may not (@may).  Returns the page to go on
 * with: some pages at once, as somebody may wait for them.
 */
size_t gather_follow(KsmGather *g, KsmRegion *r, size_t page, size_t end,
                     bool may, size_t *behind);

#endif
