/*
 * answers: what a remote store has to say
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/prim.h"
#include "base/tsan.h"
#include "engine/answers.h"
#include "engine/renew.h"
#include "engine/ripen.h"
#include "engine/scan.h"
#include "engine/tail.h"

#define ANSWERS_BATCH   CHUNK_PAGES
#define PREFETCH        8u

/* Is a page with that id still what it was?  Then *@r and *@page are set. */
static bool is_as_asked(KsmEngine *e, const StoreAnswer *a, KsmRegion **r,
                        size_t *page)
{
    PageState s;

    if (a->id / GROUP_PAGES >= e->dir.len) {
        return false;
    }
    *r = directory_page(&e->dir, a->id, page);
    if (!*r || (*r)->leaving || *page >= (*r)->n_pages) {
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
    scan_wake(e, page_chunk(r, page));
    ripen_add(e, r, page / CHUNK_PAGES);
}

/* Is @place a slot that more pages can map, as well as @slot? */
static bool has_slot(KsmEngine *e, uint32_t place, uint32_t slot)
{
    KsmStore *s = e->content.store;
    uint32_t old = place & ~PLACE_SLOT;

    return place != PLACE_NONE && (place & PLACE_SLOT) && !store_full(s, old) &&
           !store_stale(s, old) &&
           (store_repeated(s, slot) == SLOT_NONE ||
            store_repeated(s, old) != SLOT_NONE);
}

/*
 * A slot is known here by one of the two tags that its content can have, the
 * page that was asked about by the other: from now on by that one, too.  False:
 * it is another content, or memory of another node.
 */
static bool tag_follow(KsmEngine *e, StoreAnswer *a)
{
    uint32_t tag = store_tag(e->content.store, a->slot);
    KsmRegion *r;
    uint64_t hash;
    size_t page;

    if (tag == a->tag) {
        return true;
    }
    if (!is_as_asked(e, a, &r, &page) ||
        store_readable(e->content.store, a->slot, 1) < 0) {
        return false;
    }
    hash = hash_page(&e->hasher, store_page(e->content.store, a->slot));
    if (!content_tag_fits(r, tag, hash) ||
        !content_tag_fits(r, a->tag, hash)) {
        return false;
    }
    content_leave(&e->content, r, page, PAGE_UNIQUE);
    a->tag = r->tag[page] = tag;
    return true;
}

static void slot_found(KsmEngine *e, StoreAnswer a, uint64_t now)
{
    uint32_t met = PLACE_NONE, place;
    KsmRegion *r;
    size_t page;

    asks_answered(&e->asks, a.tag);
    if (!tag_follow(e, &a)) {
        store_drop(e->content.store, a.slot);
        return;
    }
    asks_hold(&e->asks, a.slot, e->scan.pass, now);
    place = index_lookup(&e->content.index, a.tag);
    if (!has_slot(e, place, a.slot)) {
        met = content_publish(&e->content, a.slot);
    }
    if (place == PLACE_NONE &&
        index_lookup(&e->content.index, a.tag) == PLACE_NONE) {
        return;     /* no room there: its page would be asked about for ever */
    }
    if (met != PLACE_NONE) {
        page_equal(e, met);
    }
    if (met != a.id && is_as_asked(e, &a, &r, &page)) {
        page_equal(e, a.id);
    }
}

/*
 * Others have it, too, and there are no mappings for it, here or there: all leave
 * it to the kernel, and it is equal for that.  What the pool has is mapped.
 */
static void page_left(KsmEngine *e, uint32_t tag)
{
    uint32_t place = index_lookup(&e->content.index, tag);
    KsmRegion *r;
    size_t page;

    if (place == PLACE_NONE || (place & PLACE_SLOT)) {
        return;
    }
    content_met(&e->content, place);
    r = directory_page(&e->dir, place, &page);
    page_leave(r, page, true);
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
        .before = SLOT_NONE,
        .after = SLOT_NONE,
    };
    OfferFate fate = OFFER_REFUSED;

    n = o.n = sample_run(&e->plan.sampler, r, page, n);
    if (!n) {
        return 1;       /* it is not what it was, and will be asked about */
    }
    if (memcg_is_tight(&e->memcg)) {
        /* to ask in each pass would be to hash in each pass */
        page_chunk(r, page)->flags |= CHUNK_UNOFFERED;
        return n;
    }
    s->node = r->node;
    if (e->run && !region_inhibited(r)) {
        KSM_TSAN_IGNORE_BEGIN();    /* it may be written */
        fate = asks_offer(&e->asks, &o);
        KSM_TSAN_IGNORE_END();
    }
    g_assert(fate != OFFER_TAKEN);
    for (unsigned i = 0;
         i < n && (fate == OFFER_REFUSED || fate == OFFER_BUSY); i++) {
        ask_again(e, a + i);
    }
    return fate == OFFER_LATER ? o.n : n;
}

static void answer_take(KsmEngine *e, const StoreAnswer *a, uint64_t now)
{
    switch (a->what) {
    case ANSWER_NONE:
        break;
    case ANSWER_WANTED:
        /* it is not what it was, or offered already, or its region rests */
        if (!asks_is_offered(&e->asks, a->tag)) {
            ask_again(e, a);
        }
        break;
    case ANSWER_LEFT:
        page_left(e, a->tag);
        break;
    case ANSWER_REFUSED:
        asks_answered(&e->asks, a->tag);
        ask_again(e, a);
        break;
    case ANSWER_FULL:       /* when there is room, all is asked again */
        asks_answered(&e->asks, a->tag);
        break;
    case ANSWER_SLOT:
        slot_found(e, *a, now);
        break;
    }
}

/* A piece of asking again about all that is alone; false: it is done. */
static bool ask_all_again(KsmEngine *e)
{
    for (guint i = 0; i < e->regions->len; i++) {
        KsmRegion *r = g_ptr_array_index(e->regions, i);
        size_t chunk = region_known(r, r->ask_from, r->n_chunks);
        size_t page = chunk * CHUNK_PAGES;

        if (r->ask_from == r->n_chunks) {
            continue;
        }
        r->ask_from = MIN(chunk + 1, r->n_chunks);
        if (r->ask_from == r->n_chunks) {
            scan_kick(e);       /* it may rest for long */
        }
        for (unsigned k = 0; k < CHUNK_PAGES && page < r->n_pages;
             k++, page++) {
            PageState s = page_state(r, page);

            if (s == PAGE_UNIQUE || s == PAGE_EQUAL) {
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
    uint64_t seed;

    if (!asks_lost(&e->asks)) {
        return;
    }
    seed = e->content.store->ops->seed(e->content.store);
    if (seed != e->hasher.seed) {
        hasher_init(&e->hasher, seed);
    }
    for (guint i = 0; i < e->regions->len; i++) {
        KsmRegion *r = g_ptr_array_index(e->regions, i);

        r->ask_from = 0;
    }
}

/* True: there may be more. */
static bool batch_take(KsmEngine *e)
{
    KsmStore *s = e->content.store;
    StoreAnswer a[ANSWERS_BATCH];
    unsigned awaited = s->ops->awaited(s);
    unsigned n = s->ops->answers(s, a, G_N_ELEMENTS(a)), run;
    uint64_t now = prim.now_ns();

    for (unsigned i = 0; i < n; i += run) {
        if (i + PREFETCH < n) {
            index_prefetch(&e->content.index, a[i + PREFETCH].tag);
        }
        run = wanted_run(e, a + i, n - i);
        if (run) {
            run = pages_offer(e, a + i, run);
        } else {
            answer_take(e, a + i, now);
            run = 1;
        }
    }
    if (n || s->ops->awaited(s) < awaited) {
        asks_heard(&e->asks);
    }
    return n == G_N_ELEMENTS(a);
}

/* Chunks that waited for what is known now. */
static void call_parked(KsmEngine *e)
{
    uint32_t id;

    /* the others keep their place: a chunk without one waits for a pass */
    while (e->scan.n_ripe < RIPE_MAX && asks_call(&e->asks, &id)) {
        size_t chunk;
        KsmRegion *r = directory_chunk(&e->dir, id, &chunk);

        /* the id may be of another region by now */
        if (r && (r->chunk[chunk].flags & CHUNK_PARKED)) {
            r->chunk[chunk].flags &= ~CHUNK_PARKED;
            scan_wake(e, &r->chunk[chunk]);
            if (!(r->chunk[chunk].flags & CHUNK_RIPENING) ||
                !ripen_is_sparse(r, chunk)) {
                scan_queue(e, r, chunk);
            }
        }
    }
}

bool answers_take(KsmEngine *e)
{
    KsmStore *s = e->content.store;
    uint64_t cpu;
    bool more;

    if (!store_is_remote(s)) {
        return false;
    }
    cpu = prim.cpu_ns();
    more = batch_take(e);
    note_loss(e);
    if (e->scan.phase == PHASE_START) {
        /* what the store had no time for when the pass ended */
        asks_send(&e->asks);
    }
    call_parked(e);
    renew_by_time(e);
    tail_room(e);
    more |= !store_is_gone(s) && ask_all_again(e);
    e->total.scan_time += prim.cpu_ns() - cpu;
    return more;
}
