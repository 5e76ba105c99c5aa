/*
 * asks: questions to a remote store
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/prim.h"
#include "share/asks.h"

/* For so many passes, and times of ripening, an answer is a user. */
#define HELD_PASSES 6u
#define HELD_TIMES  20u
#define DROP_STEP   32u     /* dropped at once */
#define HELD_BLOCK  168u    /* some 4 KiB */
#define CALLS       2u      /* of chunks for room, when there may be some */

typedef struct AskHeld {
    uint64_t pass, ns;
    uint32_t slot;
} AskHeld;

typedef struct AskBlock {
    unsigned first, n;      /* those before the first were dropped */
    AskHeld held[HELD_BLOCK];
} AskBlock;

typedef struct AskParked {
    uint64_t after;         /* offers up to that number */
    uint32_t id;            /* of the chunk */
} AskParked;

void asks_init(KsmAsks *a, KsmStore *store)
{
    *a = (KsmAsks) { .store = store };
    if (store_is_remote(store)) {
        a->ask = g_new(StoreAsk, ASKS_MAX);
        a->offered = g_hash_table_new(NULL, NULL);
        a->order = g_queue_new();
        a->parked = g_queue_new();
        a->busy = g_queue_new();
        a->held = g_queue_new();
        a->held_slots = g_hash_table_new(NULL, NULL);
    }
}

/* Where the store goes too its slots need not be dropped. */
void asks_free(KsmAsks *a)
{
    g_free(a->ask);
    g_clear_pointer(&a->offered, g_hash_table_unref);
    g_clear_pointer(&a->held_slots, g_hash_table_unref);
    if (a->held) {
        g_queue_free_full(a->held, g_free);
        g_queue_free(a->order);
        g_queue_free_full(a->parked, g_free);
        g_queue_free(a->busy);
    }
    *a = (KsmAsks) { 0 };
}

bool asks_lost(KsmAsks *a)
{
    unsigned losses = a->ask ? a->store->ops->losses(a->store) : 0;

    if (losses == a->losses) {
        return false;
    }
    a->losses = losses;
    g_hash_table_remove_all(a->offered);
    g_queue_clear(a->order);
    a->first = a->next;
    a->calls = a->busy->length;
    a->n = 0;
    return true;
}

bool asks_awaited(const KsmAsks *a)
{
    return a->ask && a->store->ops->awaited(a->store) > 0;
}

void asks_send(KsmAsks *a)
{
    /* who is gone will know nothing when they are back */
    if (a->n && (store_is_gone(a->store) ||
                 a->store->ops->ask(a->store, a->ask, a->n))) {
        a->n = 0;
    }
}

bool asks_have_room(KsmAsks *a, unsigned n)
{
    if (a->n + n > ASKS_MAX) {
        asks_send(a);
    }
    return a->n + n <= ASKS_MAX;
}

void asks_add(KsmAsks *a, const KsmRegion *r, size_t page, uint64_t hash)
{
    g_assert(a->n < ASKS_MAX);
    a->ask[a->n++] = (StoreAsk) {
        /* memory of another node is another content, as for tags */
        .hash = hash ^ r->salt,
        .id = page_id(r, page),
        .tag = r->tag[page],
    };
}

static OfferFate note(KsmAsks *a, const StoreOffer *o, OfferFate fate)
{
    for (unsigned i = 0; fate == OFFER_LATER && i < o->n; i++) {
        gpointer tag = GUINT_TO_POINTER(o->tag[i]);

        g_hash_table_insert(a->offered, tag, GSIZE_TO_POINTER(a->next++));
        g_queue_push_tail(a->order, tag);
    }
    return fate;
}

OfferFate asks_offer(KsmAsks *a, StoreOffer *o)
{
    return note(a, o, store_offer(a->store, o));
}

OfferFate asks_repeat(KsmAsks *a, StoreOffer *o)
{
    return note(a, o, store_repeat(a->store, o));
}

bool asks_is_offered(const KsmAsks *a, uint32_t tag)
{
    return a->offered &&
           g_hash_table_contains(a->offered, GUINT_TO_POINTER(tag));
}

void asks_answered(KsmAsks *a, uint32_t tag)
{
    g_hash_table_remove(a->offered, GUINT_TO_POINTER(tag));
}

void asks_park(KsmAsks *a, uint32_t id)
{
    AskParked *p = g_new(AskParked, 1);

    *p = (AskParked) { a->next, id };
    g_queue_push_tail(a->parked, p);
}

void asks_park_busy(KsmAsks *a, uint32_t id)
{
    g_queue_push_tail(a->busy, GUINT_TO_POINTER(id));
}

/* Is the oldest offer there is still waited for? */
static bool oldest_awaited(const KsmAsks *a)
{
    gpointer number;

    return g_hash_table_lookup_extended(a->offered,
                                        g_queue_peek_head(a->order), NULL,
                                        &number) &&
           GPOINTER_TO_SIZE(number) == a->first;
}

void asks_heard(KsmAsks *a)
{
    a->calls = MIN(CALLS, a->busy->length);
    for (; a->first < a->next && !oldest_awaited(a); a->first++) {
        g_queue_pop_head(a->order);
    }
}

bool asks_call(KsmAsks *a, uint32_t *id)
{
    AskParked *p;

    if (!a->ask) {
        return false;
    }
    p = g_queue_peek_head(a->parked);
    if (p && p->after <= a->first) {
        *id = p->id;
        g_free(g_queue_pop_head(a->parked));
        return true;
    }
    if ((a->calls || !asks_awaited(a)) && !g_queue_is_empty(a->busy)) {
        a->calls -= a->calls > 0;
        *id = GPOINTER_TO_UINT(g_queue_pop_head(a->busy));
        return true;
    }
    return false;
}

void asks_hold(KsmAsks *a, uint32_t slot, uint64_t pass, uint64_t now)
{
    AskBlock *b = g_queue_peek_tail(a->held);

    if (!g_hash_table_add(a->held_slots, GUINT_TO_POINTER(slot))) {
        store_drop(a->store, slot);
        return;
    }
    if (!b || b->n == HELD_BLOCK) {
        b = g_new(AskBlock, 1);
        b->first = b->n = 0;
        g_queue_push_tail(a->held, b);
    }
    b->held[b->n++] = (AskHeld) { pass, now, slot };
}

/* The oldest; false: it is too young to go. */
static bool oldest_drop(KsmAsks *a, uint64_t pass, uint64_t now)
{
    AskBlock *b = g_queue_peek_head(a->held);
    const AskHeld *held = &b->held[b->first];

    if (held->pass + HELD_PASSES > pass ||
        held->ns + HELD_TIMES * a->store->ripen_ns > now) {
        return false;
    }
    g_hash_table_remove(a->held_slots, GUINT_TO_POINTER(held->slot));
    store_drop(a->store, held->slot);
    if (++b->first == b->n) {
        g_free(g_queue_pop_head(a->held));
    }
    return true;
}

bool asks_drop(KsmAsks *a, uint64_t pass)
{
    uint64_t now;

    if (!asks_hold_any(a)) {
        return false;
    }
    now = prim.now_ns();
    for (unsigned n = 0; n < DROP_STEP; n++) {
        if (!asks_hold_any(a) || !oldest_drop(a, pass, now)) {
            return false;
        }
    }
    return true;
}

AskCount asks_count(const KsmAsks *a)
{
    AskCount count = { 0 };

    if (!a->ask) {
        return count;
    }
    for (GList *l = a->held->head; l; l = l->next) {
        const AskBlock *b = l->data;

        count.users += b->n - b->first;
        for (unsigned i = b->first; i < b->n; i++) {
            count.slots += store_users(a->store, b->held[i].slot) == 1;
        }
    }
    count.bytes = ASKS_MAX * sizeof(*a->ask) +
                  a->held->length * sizeof(AskBlock) +
                  count.users * 2 * sizeof(void *) +
                  g_hash_table_size(a->offered) * 2 * sizeof(void *);
    return count;
}

void asks_users(const KsmAsks *a, uint32_t *users)
{
    for (GList *l = a->held ? a->held->head : NULL; l; l = l->next) {
        const AskBlock *b = l->data;

        for (unsigned i = b->first; i < b->n; i++) {
            users[b->held[i].slot]++;
        }
    }
}
