/*
 * libksm tests: merged pages that map scattered slots
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "scatter.h"

/* The piece gets slots of its own. */
static void scatter_piece(KsmRejoin *j, KsmRegion *r, size_t page,
                          unsigned len, unsigned gap)
{
    KsmStore *s = j->content->store;
    uint32_t tag[CHUNK_PAGES] = { 0 }, slot[CHUNK_PAGES];
    StoreOffer o = {
        .tag = tag, .n = len + 2 * gap,
        .before = SLOT_NONE, .after = SLOT_NONE,
    };

    for (unsigned i = 0; i < len; i++) {
        g_assert(page_state(r, page + i) == PAGE_MERGED);
        tag[gap + i] = store_tag(s, r->tag[page + i]);
    }
    g_assert(store_offer(s, &o) == OFFER_TAKEN && o.n == len + 2 * gap);
    g_assert(store_allocate(s, o.slot + gap, len) == 0);
    for (unsigned i = 0; i < len; i++) {
        slot[i] = o.slot + gap + i;
        g_assert(store_fill(s, slot[i], store_page(s, r->tag[page + i]), 1) ==
                 0);
        store_hold(s, slot[i]);
    }
    g_assert(rejoin_slots(j, r, page, len, slot, SIZE_MAX) == len);
    for (unsigned i = 0; i < len; i++) {
        content_publish(j->content, slot[i]);
    }
    for (unsigned i = 0; i < gap; i++) {
        store_settle(s, o.slot + i);
        store_settle(s, o.slot + gap + len + i);
    }
}

void scatter_pages(KsmRejoin *j, KsmRegion *r, size_t page, unsigned pieces,
                   unsigned len, unsigned gap)
{
    for (unsigned i = pieces; i-- > 0; ) {
        store_flush(j->content->store);
        scatter_piece(j, r, page + i * len, len, gap);
    }
    store_flush(j->content->store);
}
