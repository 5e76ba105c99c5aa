/*
 * content: who holds which content
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>

#include "share/content.h"

G_STATIC_ASSERT(PAGE_IDS == PLACE_SLOT);

/* Slots kept for children make room in steps of this many. */
#define KEPT_STEP (64 * CHUNK_PAGES)

static uint32_t place_hash(void *opaque, uint32_t place)
{
    KsmContent *c = opaque;
    KsmRegion *r;
    size_t page;

    if (place & PLACE_SLOT) {
        return store_tag(c->store, place & ~PLACE_SLOT);
    }
    r = directory_page(c->dir, place, &page);
    return r->tag[page];
}

static void slot_goes(void *opaque, uint32_t slot)
{
    KsmContent *c = opaque;

    content_withdraw(c, slot, store_tag(c->store, slot));
}

void content_init(KsmContent *c, const KsmDirectory *dir, KsmStore *store)
{
    c->dir = dir;
    index_init(&c->index, place_hash, c);
    c->store = store;
    store->forget = slot_goes;
    store->opaque = c;
}

void content_free(KsmContent *c)
{
    store_free(c->store);
    index_free(&c->index);
}

int content_reserve_store(KsmContent *c, size_t pages)
{
    StoreStats stats = store_stats(c->store);
    size_t kept = ROUND_UP_TO(stats.leaked * 8 / 5, KEPT_STEP);

    return store_reserve(c->store, pages + kept);
}

static inline void page_drop(KsmContent *c, KsmRegion *r, size_t page)
{
    PageState was = page_state(r, page);
    uint32_t id = page_id(r, page);

    if (r->state[page] & PAGE_INDEXED) {
        index_remove(&c->index, r->tag[page], id);
    }
    if (was == PAGE_MERGED) {
        store_drop(c->store, r->tag[page]);
    }
    if (was == PAGE_BROKEN || was == PAGE_MERGED) {
        r->history[page] = 0;
    }
}

void content_leave_run(KsmContent *c, KsmRegion *r, const PageRun *run,
                       uint8_t to)
{
    for (size_t i = 0; i < run->n; i++) {
        page_drop(c, r, run->page + i);
    }
    region_set_run(r, run, to);
}

void content_leave(KsmContent *c, KsmRegion *r, size_t page, PageState state)
{
    page_drop(c, r, page);
    if (state == PAGE_BROKEN) {
        page_break(r, page);
    } else {
        page_set(r, page, state);
    }
}

bool content_enter(KsmContent *c, KsmRegion *r, size_t page)
{
    if (!index_insert(&c->index, r->tag[page], page_id(r, page))) {
        return false;
    }
    r->state[page] |= PAGE_INDEXED;
    return true;
}

void content_met(KsmContent *c, uint32_t place)
{
    size_t other;
    KsmRegion *o;

    if (place & PLACE_SLOT) {
        return;
    }
    o = directory_page(c->dir, place, &other);
    if (page_state(o, other) == PAGE_BROKEN) {
        page_again(o, other, true);
    } else if (page_state(o, other) == PAGE_UNIQUE) {
        uint8_t indexed = o->state[other] & PAGE_INDEXED;

        page_set(o, other, PAGE_EQUAL);
        o->state[other] |= indexed;
        o->history[other] = 0;
    }
}

/* The page at @place, of a tag, gives its place in the index to another. */
static void place_pass(KsmContent *c, uint32_t tag, uint32_t place,
                       uint32_t to)
{
    size_t page;
    KsmRegion *r = directory_page(c->dir, place, &page);

    index_replace(&c->index, tag, place, to);
    r->state[page] &= ~PAGE_INDEXED;
    page_leave(r, page, false);     /* there is a slot, or another candidate */
}

void content_take(KsmContent *c, uint32_t place, KsmRegion *r, size_t page)
{
    place_pass(c, r->tag[page], place, page_id(r, page));
    r->state[page] |= PAGE_INDEXED;
}

uint32_t content_publish(KsmContent *c, uint32_t slot)
{
    uint32_t tag = store_tag(c->store, slot);
    uint32_t place = index_lookup(&c->index, tag);

    if (place == PLACE_NONE) {
        index_insert(&c->index, tag, slot | PLACE_SLOT);
        return PLACE_NONE;
    }
    if (place & PLACE_SLOT) {
        index_replace(&c->index, tag, place, slot | PLACE_SLOT);
        return PLACE_NONE;
    }
    place_pass(c, tag, place, slot | PLACE_SLOT);
    return place;
}

void content_withdraw(KsmContent *c, uint32_t slot, uint32_t tag)
{
    index_remove(&c->index, tag, slot | PLACE_SLOT);
}

void content_withdraw_slot(KsmContent *c, uint32_t slot)
{
    uint32_t first = store_repeated(c->store, slot);

    content_withdraw(c, first == SLOT_NONE ? slot : first,
                     store_tag(c->store, slot));
}

bool content_doubt(KsmContent *c, const KsmHasher *hasher,
                   const KsmRegion *r, uint32_t slot)
{
    int ret = store_readable(c->store, slot, 1);

    if (ret == 0 &&
        content_tag_fits(r, store_tag(c->store, slot),
                         hash_page(hasher, store_page(c->store, slot)))) {
        return true;
    }
    if (ret == 0 || ret == -EFAULT) {
        content_withdraw_slot(c, slot);
    }
    return false;
}

size_t content_bytes(const KsmContent *c)
{
    return index_bytes(&c->index) + store_stats(c->store).bytes;
}

void content_check(const KsmContent *c, const KsmRegion *r)
{
    for (size_t i = 0; i < r->n_pages; i++) {
        g_assert(page_state(r, i) != PAGE_MERGED ||
                 store_users(c->store, r->tag[i]) > 0);
    }
}
