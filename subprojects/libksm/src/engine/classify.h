/*
 * classify: what a page is, going by its hash
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Zeroes; equal to what the index has; or unique, and then it stands there
 * itself, and a remote store is asked about it.  Without a source a page has to
 * hash to the same twice before it is any of these.  Where only zeroes count
 * there are no tags.
 *
 * Leaves to others: which pages are hashed (visit.h), and when (scan.h); what
 * becomes of what is equal (merge/plan.h).
 */
#ifndef KSM_CLASSIFY_H
#define KSM_CLASSIFY_H

#include "engine/state.h"

/*
 * The page, NEW or known, has that hash.  It stays NEW while a remote store
 * takes no questions.
 */
void classify_page(KsmEngine *e, KsmRegion *r, size_t page, uint64_t hash64);

/*
 * It is not what it was taken for.  From now on it goes by @tag, its second
 * one, see MergeCollided; if it did already, and another content stands there,
 * it is alone.
 */
void classify_collided(KsmEngine *e, KsmRegion *r, size_t page, uint32_t tag);

#endif
