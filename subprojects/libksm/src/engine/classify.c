/*
 * classify: what a page is, going by its hash
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "engine/ages.h"
#include "engine/alike.h"
#include "engine/classify.h"

/* Without a source.  False: this is the first look with that hash. */
static bool checksum_quiet(KsmEngine *e, KsmRegion *r, size_t page,
                           uint32_t hash)
{
    bool same = r->tag[page] == hash;
    uint32_t place;

    if (same && page_state(r, page) != PAGE_NEW) {
        return false;       /* known already */
    }
    if (same) {
        page_mark(r, page, false);
        return true;
    }
    content_leave(&e->content, r, page, PAGE_NEW);
    r->tag[page] = hash;
    page_mark(r, page, true);
    /* what is in the pool stays equal: no need to see it twice */
    place = index_lookup(&e->content.index, hash);
    if (place != PLACE_NONE && (place & PLACE_SLOT)) {
        page_mark(r, page, false);
        return true;
    }
    return false;
}

/* The index knows something equal to @page. */
static void page_equal(KsmEngine *e, KsmRegion *r, size_t page,
                       uint32_t place)
{
    page_set(r, page, PAGE_EQUAL);
    r->history[page] = 0;
    content_met(&e->content, place);
}

/* Nothing is equal to the page.  @taken: its tags are, by others. */
static void page_alone(KsmEngine *e, KsmRegion *r, size_t page, bool taken)
{
    page_set(r, page, PAGE_UNIQUE);
    if (!taken) {
        content_enter(&e->content, r, page);
    }
    age_miss(r, page);
}

/*
 * Makes the page known to the index.  A remote store is asked if nothing here
 * is equal; while that takes no more questions, the page stays new.  What has
 * no tag of its own is not asked about: the answer would be taken for that of
 * others.
 */
static void page_tag(KsmEngine *e, KsmRegion *r, size_t page, uint32_t tag,
                     uint64_t hash64)
{
    Alike found = alike_find(e, r, hash64, tag);
    bool asks = store_is_remote(e->content.store) && !found.taken;

    if (found.place == PLACE_NONE && asks && !asks_have_room(&e->asks, 1)) {
        e->scan.again = e->scan.in_vain = true;
        return;
    }
    r->tag[page] = found.tag;
    if (found.place != PLACE_NONE) {
        page_equal(e, r, page, found.place);
        return;
    }
    page_alone(e, r, page, found.taken);
    if (asks) {
        asks_add(&e->asks, r, page, hash64);
    }
}

/* Without tags. */
static void zero_or_unique(KsmEngine *e, KsmRegion *r, size_t page, bool zero)
{
    if (!zero) {
        content_leave(&e->content, r, page, PAGE_UNIQUE);
        age_miss(r, page);
    } else if (page_state(r, page) != PAGE_ZEROES) {
        content_leave(&e->content, r, page, PAGE_ZEROES);
    }
}

void classify_page(KsmEngine *e, KsmRegion *r, size_t page, uint64_t hash64)
{
    uint32_t again = content_tag_again(r, hash64), hash;

    if (engine_zero_only(e)) {
        zero_or_unique(e, r, page, hash64 == e->hasher.zero);
        return;
    }
    /* as before: it may have been moved, and not written */
    hash = r->tag[page] == again ? again : content_tag(r, hash64);
    if (hash64 == e->hasher.zero) {
        if (page_state(r, page) != PAGE_ZEROES) {
            content_leave(&e->content, r, page, PAGE_ZEROES);
            r->tag[page] = hash;
        }
        return;
    }
    if (r->dirty == KSM_DIRTY_CHECKSUM && !checksum_quiet(e, r, page, hash)) {
        if (page_state(r, page) == PAGE_UNIQUE) {
            age_miss(r, page);
        }
        return;
    }
    if (page_state(r, page) != PAGE_NEW) {
        /* of a loose chunk */
        if (r->tag[page] == hash) {
            return;
        }
        content_leave(&e->content, r, page, PAGE_NEW);
    }
    page_tag(e, r, page, hash, hash64);
}

void classify_collided(KsmEngine *e, KsmRegion *r, size_t page, uint32_t tag)
{
    uint32_t place = index_lookup(&e->content.index, tag);
    bool taken = r->tag[page] == tag && place != PLACE_NONE;

    content_leave(&e->content, r, page, PAGE_NEW);
    r->tag[page] = tag;
    if (place != PLACE_NONE && !taken) {
        page_equal(e, r, page, place);
    } else {
        page_alone(e, r, page, taken);
    }
    page_chunk(r, page)->flags |= CHUNK_VISIT;
}
