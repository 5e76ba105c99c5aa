/*
 * answers: what a remote store has to say
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/tsan.h"
#include "engine/answers.h"
#include "engine/scan.h"

#define ANSWERS_BATCH   CHUNK_PAGES

/* Is a page with that id still what it was?  Then *@r and *@page are set. */
static bool is_as_asked(KsmEngine *e, const StoreAnswer *a, KsmRegion **r,
                        size_t *page)
{
    PageState s;

    if (a->id / CHUNK_PAGES >= e->dir.len) {
        return false;
    }
    *r = directory_page(&e->dir, a->id, page);
    if (!*r || (*r)->leaving) {
        return false;
    }
    s = page_state(*r, *page);
    return (s == PAGE_UNIQUE || s == PAGE_EQUAL) &&
           (*r)->tag[*page] == a->tag;
}

/* The page is equal to something: its chunk is to be planned. */
static void page_equal(KsmEngine *e, uint32_t id)
{
    size_t page;
    KsmRegion *r = directory_page(&e->dir, id, &page);

    content_met(&e->content, id);
    scan_queue(e, r, page / CHUNK_PAGES);
}

/* Is there a slot for the content that more pages can map, as well as @slot? */
static bool has_slot(KsmEngine *e, uint32_t slot, uint32_t tag)
{
    KsmStore *s = e->content.store;
    uint32_t place = index_lookup(&e->content.index, tag);
    uint32_t old = place & ~PLACE_SLOT;

    return place != PLACE_NONE && (place & PLACE_SLOT) && !store_full(s, old) &&
           (store_repeated(s, slot) == SLOT_NONE ||
            store_repeated(s, old) != SLOT_NONE);
}

static void slot_found(KsmEngine *e, const StoreAnswer *a)
{
    uint32_t met = PLACE_NONE;
    KsmRegion *r;
    size_t page;

    asks_answered(&e->asks, a->tag);
    if (store_tag(e->content.store, a->slot) != a->tag) {
        store_drop(e->content.store, a->slot);
        return;
    }
    asks_hold(&e->asks, a->slot, e->scan.pass);
    if (!has_slot(e, a->slot, a->tag)) {
        met = content_publish(&e->content, a->slot);
    }
    if (met != PLACE_NONE) {
        page_equal(e, met);
    }
    if (met != a->id && is_as_asked(e, a, &r, &page)) {
        page_equal(e, a->id);
    }
}

/* What nothing here is equal to is asked about again, some time. */
static void ask_again(KsmEngine *e, const StoreAnswer *a)
{
    KsmRegion *r;
    size_t page;

    if (is_as_asked(e, a, &r, &page) && page_state(r, page) == PAGE_UNIQUE) {
        content_leave(&e->content, r, page, PAGE_NEW);
        page_chunk(r, page)->flags |= CHUNK_VISIT;
        e->scan.again = true;
    }
}

/* Answers from @a on that want consecutive pages of a chunk, up to @max. */
static unsigned wanted_run(KsmEngine *e, const StoreAnswer *a, unsigned max)
{
    KsmRegion *r;
    size_t page;
    unsigned n = 0;

    while (n < max && a[n].what == ANSWER_WANTED && a[n].id == a->id + n &&
           a[n].id / CHUNK_PAGES == a->id / CHUNK_PAGES &&
           is_as_asked(e, &a[n], &r, &page) && !r->rests &&
           !asks_is_offered(&e->asks, a[n].tag) &&
           !(r->state[page] & PAGE_WRITTEN)) {
        n++;
    }
    return n;
}

/* Offers @n pages, or the first of them; returns how many that were. */
static unsigned pages_offer(KsmEngine *e, const StoreAnswer *a, unsigned n)
{
    KsmStore *s = e->content.store;
    size_t page;
    KsmRegion *r = directory_page(&e->dir, a->id, &page);
    StoreOffer o = {
        .pages = page_addr(r, page),
        .tag = r->tag + page,
        .id = a->id,
        .n = n,
    };
    OfferFate fate = OFFER_REFUSED;

    s->node = r->node;
    if (e->run && !memcg_is_tight(&e->memcg) && !region_inhibited(r)) {
        KSM_TSAN_IGNORE_BEGIN();    /* it may be written */
        fate = asks_offer(&e->asks, &o);
        KSM_TSAN_IGNORE_END();
    }
    g_assert(fate != OFFER_TAKEN);
    for (unsigned i = 0; i < n && fate == OFFER_REFUSED; i++) {
        ask_again(e, a + i);
    }
    return fate == OFFER_LATER ? o.n : n;
}

static void answer_take(KsmEngine *e, const StoreAnswer *a)
{
    switch (a->what) {
    case ANSWER_NONE:
    case ANSWER_WANTED:     /* it is not what it was, or offered already */
        break;
    case ANSWER_REFUSED:
        asks_answered(&e->asks, a->tag);
        ask_again(e, a);
        break;
    case ANSWER_SLOT:
        slot_found(e, a);
        break;
    }
}

/* A piece of asking again about all that is alone; false: it is done. */
static bool ask_all_again(KsmEngine *e)
{
    for (guint i = 0; i < e->regions->len; i++) {
        KsmRegion *r = g_ptr_array_index(e->regions, i);
        size_t page;

        if (!r->ask_left) {
            continue;
        }
        page = --r->ask_left * CHUNK_PAGES;
        for (unsigned k = 0; k < CHUNK_PAGES; k++, page++) {
            if (page_state(r, page) == PAGE_UNIQUE) {
                content_leave(&e->content, r, page, PAGE_NEW);
                page_chunk(r, page)->flags |= CHUNK_VISIT;
                e->scan.again = true;
            }
        }
        return true;
    }
    return false;
}

static void note_loss(KsmEngine *e)
{
    if (!asks_lost(&e->asks)) {
        return;
    }
    for (guint i = 0; i < e->regions->len; i++) {
        KsmRegion *r = g_ptr_array_index(e->regions, i);

        r->ask_left = r->n_chunks;
    }
}

/* True: there may be more. */
static bool batch_take(KsmEngine *e)
{
    KsmStore *s = e->content.store;
    StoreAnswer a[ANSWERS_BATCH];
    unsigned n = s->ops->answers(s, a, G_N_ELEMENTS(a)), run;

    for (unsigned i = 0; i < n; i += run) {
        run = wanted_run(e, a + i, n - i);
        if (run) {
            run = pages_offer(e, a + i, run);
        } else {
            answer_take(e, a + i);
            run = 1;
        }
    }
    return n == G_N_ELEMENTS(a);
}

bool answers_take(KsmEngine *e)
{
    KsmStore *s = e->content.store;
    bool more;

    if (!store_is_remote(s)) {
        return false;
    }
    more = batch_take(e);
    note_loss(e);
    return more || (!store_is_gone(s) && ask_all_again(e));
}
