/*
 * asks: questions to a remote store
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A page that is like no other here may be like one elsewhere.  What is to be
 * asked is collected, and goes out in batches: a message costs a wake-up, of
 * whatever length it is.  While the store takes no more, scanning goes on with
 * what needs no question.
 *
 * What was offered is not offered again before the answer has come, whichever
 * page holds it: else equal pages would end in different slots.  An answer that
 * names a slot is a user of it, for a while: long enough to plan the page, and
 * the others that hold the same.
 *
 * A chunk whose pages wait for answers is parked, and called when those that
 * were under way have come; if nothing could be offered, the store being busy,
 * two such chunks are called for each batch of answers, and all when no answer
 * is to come.
 */
#ifndef KSM_ASKS_H
#define KSM_ASKS_H

#include "memory/region.h"
#include "share/store.h"

#define ASKS_MAX    8192u       /* of a batch */

typedef struct KsmAsks {
    KsmStore *store;
    StoreAsk *ask;          /* ASKS_MAX; NULL: it is not to be asked */
    unsigned n;
    GHashTable *offered;    /* tags: an answer will come; their numbers */
    GQueue *order;          /* tags in the order they were offered ... */
    uint64_t first, next;   /* ... with these numbers */
    GQueue *parked;         /* AskParked: chunks, for answers */
    GQueue *busy;           /* ids of chunks that could offer nothing */
    unsigned calls;         /* of those, due */
    GQueue *held;           /* AskBlock, by pass: users that answers are */
    GHashTable *held_slots; /* those slots */
    unsigned losses;        /* of the store's peer, as seen */
} KsmAsks;

void asks_init(KsmAsks *a, KsmStore *store);
void asks_free(KsmAsks *a);

/* May @n pages more be asked about? */
bool asks_have_room(KsmAsks *a, unsigned n);
void asks_add(KsmAsks *a, const KsmRegion *r, size_t page, uint64_t hash);
/* Will there be answers to what was asked or offered? */
bool asks_awaited(const KsmAsks *a);
/* Sends what there is. */
void asks_send(KsmAsks *a);
/*
 * True, once, when the peer was lost: what was asked and offered is forgotten,
 * and is to be asked again.
 */
bool asks_lost(KsmAsks *a);

/* As store_offer() and store_repeat(); that an answer will come is noted. */
OfferFate asks_offer(KsmAsks *a, StoreOffer *o);
OfferFate asks_repeat(KsmAsks *a, StoreOffer *o);
/* Will an answer come to an offer of that content? */
bool asks_is_offered(const KsmAsks *a, uint32_t tag);
/* It has come. */
void asks_answered(KsmAsks *a, uint32_t tag);

/* Chunk @id waits for answers to what was offered. */
void asks_park(KsmAsks *a, uint32_t id);
/* ... for room to offer. */
void asks_park_busy(KsmAsks *a, uint32_t id);
/* A batch of answers was read. */
void asks_heard(KsmAsks *a);
/* A chunk that waits no more; false: there is none. */
bool asks_call(KsmAsks *a, uint32_t *id);

/* The user of @slot that an answer of this pass, @now, is; one is enough. */
void asks_hold(KsmAsks *a, uint32_t slot, uint64_t pass, uint64_t now);
/* Some that have been held for long go; true: there are more of those. */
bool asks_drop(KsmAsks *a, uint64_t pass);
static inline bool asks_hold_any(const KsmAsks *a)
{
    return a->held && a->held->length;
}

/* Users that are answers, and their slots that have no others. */
typedef struct AskCount {
    uint64_t users, slots;
    size_t bytes;           /* of memory, for the books */
} AskCount;

AskCount asks_count(const KsmAsks *a);
/* Tests: those of the i-th slot are added to the i-th element. */
void asks_users(const KsmAsks *a, uint32_t *users);

#endif
