/*
 * libksm: what was written since last asked
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Three sources: the region's own log, the kernel's page tables, or nothing
 * (then scan compares hashes).  What they say is a hint.  A missed write
 * costs a failed verify; one too many costs a hash.
 *
 * Asking marks pages: PAGE_WRITTEN was written in the last interval, and is
 * not worth looking at; a NEW page without the mark is quiet, and is.
 */
#ifndef KSM_DIRTY_H
#define KSM_DIRTY_H

#include "region.h"

/*
 * Chooses the region's source, as configured. 0, or -errno if the chosen
 * one does not work.
 */
int dirty_init(KsmRegion *r);

/*
 * Registers what the source needs: for a range that was mapped anew, or for
 * the region. Failing to only loses knowledge.
 */
void dirty_track(KsmRegion *r, size_t page, size_t n);
void dirty_resume(KsmRegion *r);

/*
 * Unregisters the region, which nobody else could register otherwise.  0, or
 * -errno: part of it is registered still; calling again may help.
 */
int dirty_pause(KsmRegion *r);

/*
 * Asks about a piece of at most PIECE_PAGES that begins at @chunk; returns
 * the chunk after it.
 */
size_t dirty_sync(KsmRegion *r, size_t chunk);

/* Starts tracking a chunk that was found populated. */
void dirty_arm(KsmRegion *r, size_t chunk);

/* Makes sure that a write to the pages from now on is noticed. */
void dirty_protect(KsmRegion *r, size_t page, size_t n);

#endif
