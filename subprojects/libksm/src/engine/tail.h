/*
 * tail: what is left to the kernel's KSM
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A page that stands alone costs a mapping of the pool, and an isolation; ksmd
 * merges it without.  But what it is given it scans for ever, page by page, and
 * it does not see the pool.  So it is given chunks in which equal pages were left
 * (for which there are no mappings, or which are dear here even where they are
 * cold: parts.h), by MADV_MERGEABLE, once they are quiet; and they are taken away
 * again, and rest, if they are written, or if it found nothing there in two whole
 * scans; then longer each time, and until other guests leave theirs, too.  A chunk
 * where it has merged pages is not taken away: that would cost them.
 *
 * Which pages it has merged their page tables tell: present, anonymous, and
 * mapped by others, too.  In memory that no child inherits nothing else is;
 * other memory is not left to it.  UFFDIO_MOVE refuses such pages: they are
 * PAGE_KERNEL, and not isolated.  A write ends that as any other.
 *
 * A huge page would be broken for the first page in it: left only if enough is
 * equal, as for merging.
 *
 * Leaves to others: when ksmd runs, and how fast.
 */
#ifndef KSM_TAIL_H
#define KSM_TAIL_H

#include "engine/state.h"

/* Chunks from @chunk to @end, once a pass: given to the kernel, or taken. */
void tail_pass(KsmEngine *e, KsmRegion *r, size_t chunk, size_t end);

/*
 * At the end of a pass: is the next one to come soon, because chunks wait to be
 * given?  Not for ever: there may always be one.
 */
bool tail_waits(const KsmEngine *e);

/* The rest after it is short because of that, or it is not. */
void tail_rests(KsmEngine *e, bool hurry);

/* The same for one whose region rests: nothing is given. */
void tail_rest(KsmEngine *e, KsmRegion *r, size_t chunk);

/* Finds what the kernel merged in the chunk, if it was given any of it. */
void tail_look(KsmEngine *e, KsmRegion *r, size_t chunk);

/* Tells the store for how many mappings there is room; not each step. */
void tail_room(KsmEngine *e);

/* Tells the store how much is left; once a pass. */
void tail_tell(KsmEngine *e);

/*
 * Takes all of the range away, and its pages are its own again.  Called and
 * left with the lock held, which is given up between chunks.  0 or -ENOMEM:
 * some of it stays, and the call can be repeated.
 */
int tail_unmerge(KsmEngine *e, KsmRegion *r, size_t page, size_t n);

/* The region goes, as it is. */
void tail_forget(KsmEngine *e, KsmRegion *r);

#endif
