/*
 * chance: contents that have a tag in common
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A tag has 32 bits.  Of 512 GiB of different pages one in 32 has the tag of
 * another one, of 2 TiB one in 8: enough in each huge page to have it split and
 * copied to the pool, alone.  So from a certain size on, what has the tag of
 * something known is compared with that when it is hashed, and goes by its
 * other tag if it differs.  Below it is cheaper to find out while merging.
 *
 * A guess: whoever is compared may be written meanwhile.  Replacing compares
 * again.
 */
#ifndef KSM_CHANCE_H
#define KSM_CHANCE_H

#include "engine/state.h"

/* Contents in the index, from which on tags are not taken for what they say. */
#define CHANCE_MANY     ((size_t)1 << 26)

/* The tag by which the page is to go, which was hashed just now. */
uint32_t chance_tag(KsmEngine *e, KsmRegion *r, size_t page, uint64_t hash);

#endif
