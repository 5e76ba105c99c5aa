/*
 * asks: questions to a remote store
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "share/asks.h"

#define HELD_PASSES 2u      /* for which an answer is a user */

typedef struct AskHeld {
    uint64_t pass;
    uint32_t slot;
} AskHeld;

void asks_init(KsmAsks *a, KsmStore *store)
{
    *a = (KsmAsks) { .store = store };
    if (store_is_remote(store)) {
        a->ask = g_new(StoreAsk, ASKS_MAX);
        a->offered = g_hash_table_new(NULL, NULL);
        a->held = g_array_new(FALSE, FALSE, sizeof(AskHeld));
    }
}

/* Where the store goes too its slots need not be dropped. */
void asks_free(KsmAsks *a)
{
    if (a->ask) {
        g_free(a->ask);
        g_hash_table_unref(a->offered);
        g_array_unref(a->held);
    }
    *a = (KsmAsks) { 0 };
}

void asks_send(KsmAsks *a)
{
    /* a peer that is gone will not answer, and knows nothing when it is back */
    if (a->ask && store_is_gone(a->store)) {
        g_hash_table_remove_all(a->offered);
        a->n = 0;
    }
    if (a->n && a->store->ops->ask(a->store, a->ask, a->n)) {
        a->n = 0;
    }
}

bool asks_have_room(KsmAsks *a)
{
    if (a->n == ASKS_MAX) {
        asks_send(a);
    }
    return a->n < ASKS_MAX;
}

void asks_add(KsmAsks *a, const KsmRegion *r, size_t page, uint64_t hash)
{
    g_assert(a->n < ASKS_MAX);
    a->ask[a->n++] = (StoreAsk) {
        /* memory of another node is another content, as for tags */
        .hash = hash ^ r->salt * UINT64_C(0x9e3779b97f4a7c15),
        .id = page_id(r, page),
        .tag = r->tag[page],
    };
}

static OfferFate note(KsmAsks *a, const StoreOffer *o, OfferFate fate)
{
    for (unsigned i = 0; fate == OFFER_LATER && i < o->n; i++) {
        g_hash_table_add(a->offered, GUINT_TO_POINTER(o->tag[i]));
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

void asks_hold(KsmAsks *a, uint32_t slot, uint64_t pass)
{
    AskHeld held = { pass, slot };

    g_array_append_val(a->held, held);
}

void asks_drop(KsmAsks *a, uint64_t pass)
{
    unsigned n = 0;

    while (a->held && n < a->held->len &&
           g_array_index(a->held, AskHeld, n).pass + HELD_PASSES <= pass) {
        store_drop(a->store, g_array_index(a->held, AskHeld, n).slot);
        n++;
    }
    if (n) {
        g_array_remove_range(a->held, 0, n);
    }
}

void asks_count(const KsmAsks *a, uint64_t *slots, uint64_t *users)
{
    *slots = 0;
    *users = a->held ? a->held->len : 0;
    for (unsigned i = 0; i < *users; i++) {
        uint32_t slot = g_array_index(a->held, AskHeld, i).slot;

        *slots += store_users(a->store, slot) == 1;
    }
}

void asks_users(const KsmAsks *a, uint32_t *users)
{
    for (unsigned i = 0; a->held && i < a->held->len; i++) {
        users[g_array_index(a->held, AskHeld, i).slot]++;
    }
}
