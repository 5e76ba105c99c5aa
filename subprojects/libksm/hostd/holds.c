/*
 * holds: which slots a member holds, and how often
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>

#include "base/page.h"
#include "base/prim.h"
#include "holds.h"

int holds_init(Holds *h, uint32_t slots)
{
    memset(h, 0, sizeof(*h));
    h->slots = slots;
    h->bytes = ROUND_UP_TO((size_t)slots / 8 + 8, PAGE_BYTES);
    h->bits = prim.map(NULL, h->bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!h->bits) {
        return -ENOMEM;
    }
    h->more = g_hash_table_new(NULL, NULL);
    return 0;
}

void holds_free(Holds *h)
{
    if (h->bits) {
        prim.unmap(h->bits, h->bytes);
        g_hash_table_unref(h->more);
    }
    memset(h, 0, sizeof(*h));
}

static uint32_t more_of(const Holds *h, uint32_t slot)
{
    return GPOINTER_TO_UINT(g_hash_table_lookup(h->more,
                                                GUINT_TO_POINTER(slot)));
}

static void more_set(Holds *h, uint32_t slot, uint32_t n)
{
    if (n > 1) {
        g_hash_table_insert(h->more, GUINT_TO_POINTER(slot),
                            GUINT_TO_POINTER(n));
    } else {
        g_hash_table_remove(h->more, GUINT_TO_POINTER(slot));
    }
}

uint32_t holds_of(const Holds *h, uint32_t slot)
{
    if (!(h->bits[slot / 64] >> (slot % 64) & 1)) {
        return 0;
    }
    return g_hash_table_size(h->more) ? MAX(more_of(h, slot), 1) : 1;
}

void holds_add_many(Holds *h, uint32_t slot, uint32_t n)
{
    uint32_t had = holds_of(h, slot);

    if (!had && n) {
        h->bits[slot / 64] |= UINT64_C(1) << (slot % 64);
        h->held++;
    }
    if (had + (uint64_t)n > 1) {
        more_set(h, slot, MIN(had + (uint64_t)n, UINT32_MAX));
    }
}

void holds_add(Holds *h, uint32_t slot)
{
    holds_add_many(h, slot, 1);
}

void holds_take(Holds *h, uint32_t slot, uint32_t n)
{
    uint32_t had = holds_of(h, slot);

    g_assert(n <= had);
    if (had > 1) {
        more_set(h, slot, had - n);
    }
    if (had && had == n) {
        h->bits[slot / 64] &= ~(UINT64_C(1) << (slot % 64));
        h->held--;
    }
}

uint32_t holds_next(const Holds *h, uint32_t slot, uint32_t end)
{
    while (slot < end) {
        uint64_t word = h->bits[slot / 64] >> (slot % 64);

        if (word) {
            return MIN(slot + __builtin_ctzll(word), end);
        }
        slot = (slot / 64 + 1) * 64;
    }
    return end;
}

size_t holds_bytes(const Holds *h, uint32_t top)
{
    /* what GLib's table has for each: key, value, hash, and room */
    return top / 8 + g_hash_table_size(h->more) * 24;
}
