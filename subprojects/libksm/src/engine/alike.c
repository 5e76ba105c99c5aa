/*
 * alike: pages of which only their tags say that they are equal
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/tsan.h"
#include "engine/alike.h"

/* Neither given back, nor swapped out, nor with an owner who forbids it. */
static bool can_be_read(KsmEngine *e, KsmRegion *r, size_t page)
{
    uint8_t kind;

    return !r->rests && !r->leaving && !region_inhibited(r) &&
           kinds_ask(&e->kinds, page_addr(r, page), 1, KINDS_FAST,
                     &kind) == 0 &&
           (kind & (PM_PRESENT | PM_ZEROPFN)) == PM_PRESENT;
}

bool alike_is_equal(KsmEngine *e, KsmRegion *r, size_t page, uint64_t hash,
                    uint32_t place)
{
    KsmRegion *o;
    uint64_t met;
    size_t other;

    if (e->content.index.count < e->scan.crowd || (place & PLACE_SLOT)) {
        return true;
    }
    o = directory_page(&e->dir, place, &other);
    if (!can_be_read(e, o, other)) {
        return true;
    }
    KSM_TSAN_IGNORE_BEGIN();    /* it may be written */
    met = hash_page(&e->hasher, page_addr(o, other));
    KSM_TSAN_IGNORE_END();
    /* one that has changed meanwhile is found out when it is merged */
    return met == hash || !content_tag_fits(o, o->tag[other], met);
}
