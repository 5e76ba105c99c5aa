/*
 * alike: pages of which only their tags say that they are equal
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A tag has 32 bits.  Of 2 TiB of unique pages one in eight has the tag of
 * another: 64 in a chunk seem to be equal to something, enough to break a huge
 * page and to copy them to the pool.  So where that many are known, a page is
 * compared with the candidate that it seems to be equal to before either is
 * taken for equal; with a few, none of a chunk is like that, and comparing
 * would be most of what finding equal pages costs.  A page that is not equal
 * goes by another tag (content_tag_again()).
 *
 * A slot is not compared: only a few in a chunk can be like one, as long as the
 * pool is much smaller than memory.
 */
#ifndef KSM_ALIKE_H
#define KSM_ALIKE_H

#include "engine/state.h"

/*
 * Entries of the index from which on pages are compared: a chunk has one page
 * with the tag of another, by chance.  32 GiB of unique pages.
 */
#define ALIKE_CROWD ((size_t)1 << 23)

/*
 * False: the page, of that hash, is not what the index has at @place by the
 * same tag.  True if nothing tells.
 */
bool alike_is_equal(KsmEngine *e, KsmRegion *r, size_t page, uint64_t hash,
                    uint32_t place);

#endif
