/*
 * alike: pages of which only their tags say that they are equal
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/tsan.h"
#include "engine/alike.h"

static bool is_crowded(const KsmEngine *e)
{
    return e->content.index.count >= e->scan.crowd;
}

/* Neither given back, nor swapped out, nor with an owner who forbids it. */
static bool can_be_read(KsmEngine *e, KsmRegion *r, size_t page)
{
    uint8_t kind;

    return !r->rests && !r->leaving && !region_inhibited(r) &&
           kinds_ask(&e->kinds, page_addr(r, page), 1, KINDS_FAST,
                     &kind) == 0 &&
           (kind & (PM_PRESENT | PM_ZEROPFN)) == PM_PRESENT;
}

/* Written since it was hashed, and nobody has noticed. */
static void page_changed(KsmEngine *e, KsmRegion *r, size_t page)
{
    if (page_state(r, page) == PAGE_BROKEN) {
        content_leave(&e->content, r, page, PAGE_BROKEN);
        return;
    }
    content_leave(&e->content, r, page, PAGE_NEW);
    page_mark(r, page, true);
    page_chunk(r, page)->flags |= CHUNK_VISIT;
}

/* It may be that it stands in the index no more afterwards. */
static bool page_is_equal(KsmEngine *e, uint64_t hash, uint32_t place)
{
    size_t page;
    KsmRegion *r = directory_page(&e->dir, place, &page);
    uint64_t met;

    if (!can_be_read(e, r, page)) {
        return true;
    }
    KSM_TSAN_IGNORE_BEGIN();    /* it may be written */
    met = hash_page(&e->hasher, page_addr(r, page));
    KSM_TSAN_IGNORE_END();
    if (met != hash && !content_tag_fits(r, r->tag[page], met)) {
        page_changed(e, r, page);
    }
    return met == hash;
}

/* Which nobody writes, unless its memory has failed. */
static bool slot_is_equal(KsmEngine *e, uint64_t hash, uint32_t slot)
{
    KsmStore *s = e->content.store;

    return store_readable(s, slot, 1) < 0 ||
           hash_page(&e->hasher, store_page(s, slot)) == hash;
}

bool alike_is_equal(KsmEngine *e, uint64_t hash, uint32_t place)
{
    if (!is_crowded(e)) {
        return true;
    }
    return place & PLACE_SLOT ? slot_is_equal(e, hash, place & ~PLACE_SLOT)
                              : page_is_equal(e, hash, place);
}

Alike alike_find(KsmEngine *e, const KsmRegion *r, uint64_t hash, uint32_t tag)
{
    uint32_t first = content_tag(r, hash), second = content_tag_again(r, hash);
    Alike found = { .tag = tag, .place = index_lookup(&e->content.index, tag) };
    uint32_t other = tag == first ? second : first, place;

    if (!is_crowded(e)) {
        return found;
    }
    if (found.place != PLACE_NONE) {
        if (alike_is_equal(e, hash, found.place)) {
            return found;
        }
        found.taken = index_lookup(&e->content.index, tag) != PLACE_NONE;
        found.place = PLACE_NONE;
    }
    /* what is equal to it may have come when that was taken */
    place = index_lookup(&e->content.index, other);
    if (place != PLACE_NONE && alike_is_equal(e, hash, place)) {
        return (Alike) { .tag = other, .place = place };
    }
    if (found.taken && index_lookup(&e->content.index, other) == PLACE_NONE) {
        found.tag = other;
        found.taken = false;
    }
    return found;
}
