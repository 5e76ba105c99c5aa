/*
 * alike: pages of which only their tags say that they are equal
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A tag has 32 bits.  Of 2 TiB of unique pages one in eight has the tag of
 * another: 64 in a chunk seem to be equal to something, enough to break a huge
 * page and to copy them to the pool.  So where that many are known, what the
 * index has is hashed again before a page is taken for equal to it; with a few,
 * none of a chunk is like that, and hashing would be most of what finding equal
 * pages costs.  A page that is not equal goes by its other tag
 * (content_tag_again()), and if that is taken as well it is alone.
 */
#ifndef KSM_ALIKE_H
#define KSM_ALIKE_H

#include "engine/state.h"

/*
 * Entries of the index from which on that is so: a chunk has one page with the
 * tag of another, by chance.  32 GiB of unique pages.
 */
#define ALIKE_CROWD ((size_t)1 << 23)

typedef struct Alike {
    uint32_t tag;       /* by which a page of that content goes */
    uint32_t place;     /* of its equal; PLACE_NONE: it has none */
    bool taken;         /* NONE, and it cannot stand there itself */
} Alike;

/*
 * What the index has that is equal to a page of that hash, which goes by @tag,
 * one of its two, so far.  A candidate found to have changed is NEW.
 */
Alike alike_find(KsmEngine *e, const KsmRegion *r, uint64_t hash, uint32_t tag);

/*
 * False: what the index has at @place, by a tag of that hash, is another
 * content.  True if nothing tells, or there are few.
 */
bool alike_is_equal(KsmEngine *e, uint64_t hash, uint32_t place);

#endif
