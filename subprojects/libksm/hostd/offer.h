/*
 * offer: what members offer, and what becomes of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What the pool has, byte for byte, is answered by a slot with that content; what
 * it has not is written to new slots, as far as memory and the member's share go,
 * and becomes known then, also to whoever has asked about it.
 *
 * The danger: a member writes to what it has offered, and others get what nobody
 * has looked at.  Why it is safe: its pages are copied first, to memory that no
 * member can write, and all that follows is about the copy.
 *
 * A page that is there very often is offered as a block: as many slots in a row
 * as will be mapped together (KsmPattern, share/pool.h).
 *
 * Leaves to others: members, what they hold, and how a slot is found (group.h);
 * messages (talk.h).
 */
#ifndef HOSTD_OFFER_H
#define HOSTD_OFFER_H

#include "group.h"

typedef struct Offer {
    int ring;               /* file with the pages */
    uint32_t first, count;
    uint32_t domain;
    int node;
} Offer;

/*
 * Each page's slot, with a hold, or WIRE_*: where the ring cannot be read,
 * WIRE_NO_MEMORY.  @blocks: group_ask().
 */
void offer_pages(Group *g, GroupMember *m, const Offer *o, uint32_t *slot,
                 GArray *blocks);

/* One page, to be a block of @want slots.  0, or -errno: it cannot be read. */
int offer_block(Group *g, GroupMember *m, const Offer *o, unsigned want,
                uint32_t *slot);

/* Slots of the block @first now; 0: it is none that @m holds. */
unsigned offer_grow(Group *g, GroupMember *m, uint32_t first, unsigned want);

#endif
