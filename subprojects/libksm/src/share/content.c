/*
 * content: who holds which content
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
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
        return c->pool.hash[place & ~PLACE_SLOT];
    }
    r = directory_page(c->dir, place, &page);
    return r->tag[page];
}

static void slot_goes(void *opaque, uint32_t slot)
{
    content_withdraw(opaque, slot);
}

int content_init(KsmContent *c, const KsmDirectory *dir, unsigned max_sharing)
{
    int ret = pool_init(&c->pool, max_sharing);

    c->dir = dir;
    index_init(&c->index, place_hash, c);
    c->pool.unindex = slot_goes;
    c->pool.opaque = c;
    return ret;
}

void content_free(KsmContent *c)
{
    pool_free(&c->pool);
    index_free(&c->index);
}

int content_reserve_pool(KsmContent *c, size_t pages)
{
    size_t kept = ROUND_UP_TO(c->pool.leaked * 8 / 5, KEPT_STEP);

    return pool_reserve(&c->pool, pages + kept);
}

int content_reserve(KsmContent *c, size_t pages)
{
    int ret = index_reserve(&c->index, pages);

    return ret < 0 ? ret : content_reserve_pool(c, pages);
}

static inline void page_drop(KsmContent *c, KsmRegion *r, size_t page)
{
    PageState was = page_state(r, page);
    uint32_t id = page_id(r, page);

    if (r->state[page] & PAGE_INDEXED) {
        index_remove(&c->index, r->tag[page], id);
    }
    if (was == PAGE_MERGED) {
        pool_user_drop(&c->pool, r->tag[page]);
    }
    if (was == PAGE_BROKEN) {
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

uint32_t content_publish(KsmContent *c, uint32_t slot)
{
    uint32_t hash = c->pool.hash[slot];
    uint32_t place = index_lookup(&c->index, hash), met = PLACE_NONE;

    if (place == PLACE_NONE) {
        if (!index_insert(&c->index, hash, slot | PLACE_SLOT)) {
            return PLACE_NONE;
        }
    } else {
        index_replace(&c->index, hash, place, slot | PLACE_SLOT);
        if (place & PLACE_SLOT) {
            c->pool.users[place & ~PLACE_SLOT] &= ~SLOT_INDEXED;
        } else {
            size_t page;
            KsmRegion *r = directory_page(c->dir, place, &page);

            r->state[page] &= ~PAGE_INDEXED;
            met = place;
        }
    }
    c->pool.users[slot] |= SLOT_INDEXED;
    return met;
}

void content_withdraw(KsmContent *c, uint32_t slot)
{
    if (c->pool.users[slot] & SLOT_INDEXED) {
        index_remove(&c->index, c->pool.hash[slot], slot | PLACE_SLOT);
        c->pool.users[slot] &= ~SLOT_INDEXED;
    }
}

size_t content_bytes(const KsmContent *c)
{
    return index_bytes(&c->index) + pool_bytes(&c->pool);
}

void content_check(const KsmContent *c, const KsmRegion *r)
{
    for (size_t i = 0; i < r->n_pages; i++) {
        g_assert(page_state(r, i) != PAGE_MERGED ||
                 pool_users(&c->pool, r->tag[i]) > 0);
    }
}
