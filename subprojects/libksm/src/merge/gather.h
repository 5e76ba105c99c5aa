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
 * That takes CPU for each page, and where others map slots that followed one
 * that has moved, they have a mapping more.  So it is done where the mappings
 * that this run saves are worth both (MAPPING_WORTH_NS).  What was merged lately
 * may be written again soon, and waits.
 *
 * The danger is that of rejoin.h, by which all pages are replaced.  A copy is
 * compared with the page as any slot is; what it was copied from has users, so
 * nobody writes it meanwhile.
 *
 * Leaves to others: when, and how much at once (engine/compact.h).
 */
#ifndef KSM_GATHER_H
#define KSM_GATHER_H

#include "merge/rejoin.h"

/* Times that a merged page was found merged: its history. */
#define GATHER_AGE  2u

typedef struct KsmGather {
    KsmRejoin *rejoin;
    unsigned max_sharing;   /* users of a slot */
} KsmGather;

/* The chunk's merged pages are older, by one time. */
void gather_age(KsmRegion *r, size_t chunk);

/*
 * Gathers what pays and is old enough, of a region that has a busy op.  Returns
 * how many pages; about @most.
 */
size_t gather_chunk(KsmGather *g, KsmRegion *r, size_t chunk, size_t most);

/*
 * Pages whose content is found in another slot follow there, but where not all
 * users of both would have room.  Returns how many do not, now: all of them, if
 * they may not (@may).
 */
size_t gather_follow(KsmGather *g, KsmRegion *r, size_t chunk, bool may);

#endif
