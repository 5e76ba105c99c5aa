/*
 * loose: huge pages, which are not watched
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The first write to a write-protected huge page splits it (Linux, mm/huge_
 * memory.c, wp_huge_pmd(): what userfaultfd protects has small pages), so that
 * watching memory would cost the hot part of it its huge pages.  With pagemap
 * as the source a huge page is therefore *loose*: nothing protects it, and what
 * is known of its pages may be old.
 *
 * It is hashed when it is found, and after 4, 16, 64 passes, then every 64 or
 * more, whether it changes or not.  It is merged in a later pass than it was
 * hashed in, if a sample of what this would save is what it was
 * (merge/sample.h).  A guess: what is replaced is compared first, as always; a
 * wrong guess costs the huge page.
 *
 * It is protected, and not loose any more, once merging has split it; or if
 * three looks in a row found all of it as it was.  So memory that is quiet and
 * never merged is hashed four times, and then costs nothing.
 */
#ifndef KSM_LOOSE_H
#define KSM_LOOSE_H

#include "engine/state.h"

/* Once a pass, before chunks are visited. */
void loose_pass(KsmEngine *e, KsmRegion *r, size_t chunk);

/* The chunk has been looked at: is all of it to be hashed? */
bool loose_begin(KsmEngine *e, KsmRegion *r, size_t chunk);

/* Pages that were NEW are known now: it is not merged in this pass. */
void loose_hashed(KsmRegion *r, size_t chunk);

/* Did a page that was known change, now that it has that hash? */
bool loose_changed(const KsmEngine *e, const KsmRegion *r, size_t page,
                   uint64_t hash64);

/* After loose_begin() said so, and hashing: so many had changed. */
void loose_end(KsmEngine *e, KsmRegion *r, size_t chunk, unsigned changed);

/* Has it been hashed once? */
bool loose_is_new(const KsmChunk *c);

/* Has it been looked at so often that there may be no end to it? */
bool loose_goes_on(const KsmChunk *c);

/* May the chunk, which is ripe, be merged?  Not loose: always. */
bool loose_ready(KsmEngine *e, KsmRegion *r, size_t chunk);

/* It is not a huge page any more. */
void loose_split(KsmEngine *e, KsmRegion *r, size_t chunk);

/* Merging has split it: after merge_plan(), instead of settle_kept(). */
void loose_merged(KsmEngine *e, KsmRegion *r, size_t chunk);

#endif
