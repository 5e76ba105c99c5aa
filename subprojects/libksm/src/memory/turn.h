/*
 * turn: others have the engine's lock amid work on a chunk
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Merging a chunk takes some milliseconds, and whoever discards memory waits for
 * the lock: it is given up where nothing is staged or half done.  Only one thread
 * does so, the one that steps.
 *
 * The danger: what others do then is not what the rest of the work relies on.
 * Why it is safe:
 * 1. The region stays: who removes it waits until that thread has seen so, and
 *    has left it (turn_wait()).
 * 2. Pages that others discarded, freed or unmerged end the work on that chunk
 *    (turn_note()), and so do other orders to merge no more (turn_end(),
 *    KsmRegion.unmerging), and the inhibited op: it is asked after the lock was
 *    taken again.
 * 3. Whoever goes on reads the states of pages anew.
 *
 * Leaves to others: where nothing is half done.
 */
#ifndef KSM_TURN_H
#define KSM_TURN_H

#include "base/lock.h"
#include "memory/region.h"

typedef struct KsmTurn {
    KsmLock *lock;
    /* while others have it: */
    const KsmRegion *amid;  /* the chunk that is worked on; else NULL */
    size_t chunk;
    bool changed;           /* by others */
} KsmTurn;

/*
 * Called and left with the lock held; others may have it in between.  False:
 * there is to be no more work on the chunk, for now.
 */
bool turn_give(KsmTurn *t, KsmRegion *r, size_t chunk);

/* With the lock held: pages [page, page + n) are changed by their owner. */
void turn_note(KsmTurn *t, const KsmRegion *r, size_t page, size_t n);

/* With the lock held: whoever works on a chunk is to end that. */
void turn_end(KsmTurn *t);

/*
 * Called and left with the lock held, which is given up meanwhile: nobody works
 * on the region, which is leaving, any more.
 */
void turn_wait(KsmTurn *t, const KsmRegion *r);

#endif
