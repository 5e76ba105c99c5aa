/*
 * follow: merged pages move to the pool of the daemon that is there now
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <string.h>

#include "base/prim.h"
#include "engine/follow.h"
#include "engine/scan.h"

#define SKIP_STEP   4096u                       /* chunks looked at ... */
#define TAKE_STEP   8u                          /* ... page by page */
#define ANSWER_NS   UINT64_C(2000000000)        /* for all that was offered */
/* Restored, and not merged at once: so many, and one in so many. */
#define LEFT_MIN    CHUNK_PAGES
#define LEFT_SHARE  8u
#define AGAIN_NS    UINT64_C(60000000000)       /* if it could not be done */

/* Is the page what it was when its chunk was taken? */
static bool is_to_move(const KsmEngine *e, const KsmRegion *r, size_t page)
{
    const KsmFollow *f = &e->follow;

    return page_state(r, page) == PAGE_MERGED &&
           f->slot[page % CHUNK_PAGES] == r->tag[page];
}

/* The slot of the present pool with that content, if it is known. */
static bool has_place(const KsmEngine *e, uint32_t tag)
{
    uint32_t place = index_lookup(&e->content.index, tag);

    return place != PLACE_NONE && (place & PLACE_SLOT) &&
           !store_stale(e->content.store, place & ~PLACE_SLOT);
}

/*
 * What of the chunk is to move, and by what it will be found; pages.  By its
 * present tag nothing will be: the next daemon has another seed.  So that goes,
 * and makes room.
 */
static unsigned chunk_take(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmFollow *f = &e->follow;
    KsmStore *s = e->content.store;
    unsigned n = 0;

    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        size_t page = chunk * CHUNK_PAGES + i;
        uint32_t slot = r->tag[page];

        f->slot[i] = SLOT_NONE;
        f->offered[i] = false;
        if (page_state(r, page) == PAGE_MERGED && store_stale(s, slot) &&
            store_readable(s, slot, 1) == 0) {
            uint64_t hash = hash_page(&e->hasher, store_page(s, slot));

            content_withdraw_slot(&e->content, slot);
            f->slot[i] = slot;
            f->tag[i] = content_tag(r, hash);
            n++;
        }
    }
    return n;
}

/* Takes the next chunk; false: there is none, or not in this step. */
static bool chunk_next(KsmEngine *e)
{
    KsmFollow *f = &e->follow;
    unsigned taken = 0;

    for (unsigned i = 0; i < SKIP_STEP && taken < TAKE_STEP; i++) {
        KsmRegion *r;
        size_t chunk;

        if (!directory_next(&e->dir, &f->at)) {
            f->at = 0;
            f->due = prim.now_ns() + (f->moved ? 0 : AGAIN_NS);
            f->left = f->moved = 0;
            return false;
        }
        r = directory_chunk(&e->dir, f->at++, &chunk);
        if (r->leaving || r->rests || r->unmerging ||
            !r->chunk[chunk].mapped) {
            continue;
        }
        taken++;
        if (chunk_take(e, r, chunk)) {
            f->phase = FOLLOW_OFFER;
            f->id = f->at - 1;
            f->until = prim.now_ns() + ANSWER_NS;
            return true;
        }
    }
    return true;
}

/* Pages from @i on that lie one behind the other there, to be offered. */
static unsigned offer_run(const KsmEngine *e, const KsmRegion *r, size_t first,
                          unsigned i)
{
    const KsmFollow *f = &e->follow;
    unsigned n = 0;

    while (i + n < CHUNK_PAGES && is_to_move(e, r, first + i + n) &&
           f->slot[i + n] == f->slot[i] + n &&
           (!n || f->tag[i + n] != f->tag[i + n - 1]) &&
           !f->offered[i + n] && !has_place(e, f->tag[i + n]) &&
           !asks_is_offered(&e->asks, f->tag[i + n])) {
        n++;
    }
    return n;
}

/* False: the store takes none, for long. */
static bool chunk_offer(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmFollow *f = &e->follow;
    KsmStore *s = e->content.store;
    size_t first = chunk * CHUNK_PAGES;
    unsigned n;

    s->node = r->node;
    for (unsigned i = 0; i < CHUNK_PAGES; i += MAX(n, 1)) {
        OfferFate fate;
        StoreOffer o;

        n = offer_run(e, r, first, i);
        if (!n) {
            continue;
        }
        o = (StoreOffer) {
            .pages = store_page(s, f->slot[i]),
            .tag = f->tag + i,
            .id = page_id(r, first + i),
            .n = n,
            .before = SLOT_NONE,
            .after = SLOT_NONE,
        };
        fate = asks_offer(&e->asks, &o);
        if (fate == OFFER_REFUSED || fate == OFFER_FULL) {
            return false;
        }
        if (fate == OFFER_BUSY) {
            return true;
        }
        n = o.n;
        memset(f->offered + i, true, n);
    }
    return true;
}

/* Has all of it a place there, but for what was refused, or cannot be found? */
static bool chunk_is_placed(const KsmEngine *e, const KsmRegion *r,
                            size_t chunk)
{
    const KsmFollow *f = &e->follow;
    size_t first = chunk * CHUNK_PAGES;

    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        if (is_to_move(e, r, first + i) && !has_place(e, f->tag[i]) &&
            (!f->offered[i] || asks_is_offered(&e->asks, f->tag[i]))) {
            return false;
        }
    }
    return true;
}

/* What is there now is what was in the slot: it is equal to the new one. */
static unsigned run_settle(KsmEngine *e, KsmRegion *r, size_t page, unsigned n)
{
    unsigned back = 0;

    dirty_settle(&e->dirty, r, page, n);
    for (size_t i = page; i < page + n; i++) {
        if (page_state(r, i) == PAGE_NEW) {
            r->tag[i] = e->follow.tag[i % CHUNK_PAGES];
            r->history[i] = 0;
            page_set(r, i, PAGE_EQUAL);
            back++;
        }
    }
    return back;
}

/* Back to anonymous memory, all that has a place; pages. */
static unsigned chunk_restore(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    size_t end = (chunk + 1) * CHUNK_PAGES;
    unsigned back = 0, n;

    for (size_t i = chunk * CHUNK_PAGES; i < end; i += MAX(n, 1)) {
        n = 0;
        while (i + n < end && is_to_move(e, r, i + n) &&
               has_place(e, e->follow.tag[(i + n) % CHUNK_PAGES])) {
            n++;
        }
        if (n) {
            restore_clean(&e->restore, r, i, n);
            back += run_settle(e, r, i, n);
        }
    }
    if (back) {
        r->chunk[chunk].wait = 0;
        scan_queue(e, r, chunk);
    }
    return back;
}

/* Pages that were restored, and are not merged again. */
static unsigned chunk_left(const KsmEngine *e, const KsmRegion *r,
                           size_t chunk)
{
    size_t first = chunk * CHUNK_PAGES;
    unsigned left = 0;

    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        left += e->follow.slot[i] != SLOT_NONE &&
                page_state(r, first + i) == PAGE_EQUAL;
    }
    return left;
}

static void chunk_step(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmFollow *f = &e->follow;
    bool late = prim.now_ns() >= f->until;

    switch (f->phase) {
    case FOLLOW_OFFER:
        if (region_inhibited(r) || memcg_is_tight(&e->memcg) ||
            !chunk_offer(e, r, chunk)) {
            f->phase = FOLLOW_NEXT;
            f->due = prim.now_ns() + AGAIN_NS;
        } else if (late || chunk_is_placed(e, r, chunk)) {
            unsigned n = chunk_restore(e, r, chunk);

            f->phase = n ? FOLLOW_MERGE : FOLLOW_NEXT;
            f->moved += n;
        }
        break;
    case FOLLOW_MERGE:
        f->phase = FOLLOW_NEXT;
        f->left += chunk_left(e, r, chunk);
        if (f->left >= LEFT_MIN + f->moved / LEFT_SHARE) {
            /* memory is not to fill with what cannot be merged */
            f->left = f->moved = 0;
            f->due = prim.now_ns() + AGAIN_NS;
        }
        break;
    case FOLLOW_NEXT:
        break;
    }
}

bool follow_step(KsmEngine *e)
{
    KsmFollow *f = &e->follow;
    KsmRegion *r;
    size_t chunk;
    uint64_t cpu;
    bool more = true;

    if (!store_stale(e->content.store, SLOT_NONE) || !e->run ||
        e->uffd_wp < 0 || e->scan.n_ripe || prim.now_ns() < f->due) {
        return false;
    }
    cpu = prim.cpu_ns();
    if (f->losses != e->asks.losses) {
        /* perhaps with another seed: tags would not be found by others */
        f->losses = e->asks.losses;
        f->phase = FOLLOW_NEXT;
    }
    if (f->phase == FOLLOW_NEXT) {
        more = chunk_next(e);
    } else {
        r = directory_chunk(&e->dir, f->id, &chunk);
        if (r && !r->leaving) {
            chunk_step(e, r, chunk);
        } else {
            f->phase = FOLLOW_NEXT;
        }
        /* for an answer the engine need not be called at once */
        more = f->phase != FOLLOW_OFFER;
    }
    e->total.merge_time += prim.cpu_ns() - cpu;
    return more;
}
