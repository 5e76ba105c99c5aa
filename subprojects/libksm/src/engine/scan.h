/*
 * scan: what to look at, and in which order
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A pass asks the dirty source about everything, then visits the chunks where
 * something is to be done: first those where merging paid before and those
 * never seen, then the rest.  In a visited chunk, quiet unknown pages are
 * hashed and looked up.  A chunk where enough equal pages have come together is
 * ripe: it is merged at once, and so are the chunks with the other copies.
 *
 * Why one visit is enough: the kernel's KSM needs two passes to know a quiet
 * page.  Here the dirty source tells.  Only without one (checksum) a page has
 * to be seen twice with the same hash.
 *
 * A region rests while merging is inhibited or off.  Nothing is touched, but
 * the books are kept: page tables tell which merged pages were written, so that
 * unused slots go back to the kernel.
 */
#ifndef KSM_SCAN_H
#define KSM_SCAN_H

#include "engine/state.h"

/*
 * Is there work while merging is off?  Merged pages may be written, and slots
 * of the pool, or answers that are users of some, wait to be given back; what
 * is left to the kernel is taken away.
 */
bool scan_has_books(const KsmEngine *e);

/* Merges a chunk that is queued, or looks for one; false: there is none. */
bool scan_ripe(KsmEngine *e);

/* One piece of work; false: the pass is complete. */
bool scan_step(KsmEngine *e);

/* The chunk is ripe, or may be: merge it soon, unless it waits for a pass. */
void scan_queue(KsmEngine *e, KsmRegion *r, size_t chunk);
/* There is more to gain: it does not wait, unless it failed in this pass. */
void scan_wake(KsmEngine *e, KsmChunk *c);

void scan_forget(KsmEngine *e, KsmRegion *r);

/* Something changed: a pass is due at once. */
void scan_kick(KsmEngine *e);

#endif
