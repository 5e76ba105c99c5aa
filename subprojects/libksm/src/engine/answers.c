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

/* Is there a slot already for the content, which more pages can map? */
static bool has_slot(KsmEngine *e, uint32_t tag)
{
    uint32_t place = index_lookup(&e->content.index, tag);
    unsigned one = 1;

    return place != PLACE_NONE && (place & PLACE_SLOT) &&
           store_run(e->content.store, place & ~PLACE_SLOT,
                     &one) != SLOT_NONE;
}

static void slot_found(KsmEngine *e, const StoreAnswer *a)
{
    uint32_t met = PLACE_NONE;
    KsmRegion *r;
    size_t page;

    asks_hold(&e->asks, a->slot, e->scan.pass);
    asks_answered(&e->asks, a->tag);
    if (!has_slot(e, a->tag)) {
        met = content_publish(&e->content, a->slot);
    }
    if (met != PLACE_NONE) {
        page_equal(e, met);
    }
    if (met != a->id && is_as_asked(e, a, &r, &page)) {
        page_equal(e, a->id);
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
           is_as_asked(e, &a[n], &r, &page) &&
           !asks_is_offered(&e->asks, a[n].tag) &&
           !(r->state[page] & PAGE_WRITTEN)) {
        n++;
    }
    return n;
}

static void pages_offer(KsmEngine *e, uint32_t id, unsigned n)
{
    KsmStore *s = e->content.store;
    size_t page;
    KsmRegion *r = directory_page(&e->dir, id, &page);

    s->node = r->node;
    while (n) {
        StoreOffer o = {
            .pages = page_addr(r, page),
            .tag = r->tag + page,
            .id = page_id(r, page),
            .n = n,
        };

        if (memcg_is_tight(&e->memcg) ||
            store_offer(s, &o) == OFFER_REFUSED) {
            return;
        }
        page += o.n;
        n -= o.n;
    }
}

bool answers_take(KsmEngine *e)
{
    KsmStore *s = e->content.store;
    StoreAnswer a[ANSWERS_BATCH];
    unsigned n, run;

    if (!store_is_remote(s)) {
        return false;
    }
    n = s->ops->answers(s, a, G_N_ELEMENTS(a));
    KSM_TSAN_IGNORE_BEGIN();    /* what is offered may be written */
    for (unsigned i = 0; i < n; i += MAX(run, 1)) {
        run = wanted_run(e, a + i, n - i);
        if (run) {
            pages_offer(e, a[i].id, run);
        } else if (a[i].what == ANSWER_SLOT) {
            slot_found(e, &a[i]);
        } else if (a[i].what == ANSWER_REFUSED) {
            asks_answered(&e->asks, a[i].tag);
        }
    }
    KSM_TSAN_IGNORE_END();
    return n == G_N_ELEMENTS(a);
}

bool answers_awaited(KsmEngine *e)
{
    KsmStore *s = e->content.store;

    return store_is_remote(s) && s->ops->awaited(s) > 0;
}

void answers_pass(KsmEngine *e)
{
    asks_send(&e->asks);
    asks_drop(&e->asks, e->scan.pass);
}
