/*
 * chance: contents that have a tag in common
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <string.h>

#include "base/prim.h"
#include "base/tsan.h"
#include "engine/chance.h"

/* What is there; NULL: it cannot be read now. */
static const char *slot_content(KsmEngine *e, uint32_t slot)
{
    KsmStore *s = e->content.store;

    return store_readable(s, slot, 1) == 0 ? store_page(s, slot) : NULL;
}

/*
 * The same.  A page that is not there would be waited for, perhaps for ever,
 * as by whoever migrates its guest.
 */
static const char *page_content(KsmEngine *e, uint32_t id)
{
    size_t page;
    KsmRegion *r = directory_page(&e->dir, id, &page);
    const char *addr = page_addr(r, page);
    uint8_t kind;

    if (r->leaving || r->rests || region_inhibited(r) ||
        kinds_ask(&e->kinds, addr, 1, KINDS_FAST, &kind) < 0) {
        return NULL;
    }
    return (kind & (PM_PRESENT | PM_ZEROPFN)) == PM_PRESENT ? addr : NULL;
}

/* Has something else that tag? */
static bool is_taken(KsmEngine *e, KsmRegion *r, size_t page, uint32_t tag)
{
    uint32_t place = index_lookup(&e->content.index, tag);
    const char *known;
    bool differs;

    if (place == PLACE_NONE || place == page_id(r, page)) {
        return false;
    }
    known = place & PLACE_SLOT ? slot_content(e, place & ~PLACE_SLOT)
                               : page_content(e, place);
    KSM_TSAN_IGNORE_BEGIN();    /* both may be written */
    differs = known && memcmp(known, page_addr(r, page), PAGE_BYTES);
    KSM_TSAN_IGNORE_END();
    return differs;
}

uint32_t chance_tag(KsmEngine *e, KsmRegion *r, size_t page, uint64_t hash)
{
    uint32_t tag = content_tag(r, hash), again = content_tag_again(r, hash);

    /* as before: it may have been moved, and not written */
    if (r->tag[page] == again) {
        return again;
    }
    return e->content.index.count >= e->scan.many && is_taken(e, r, page, tag)
           ? again : tag;
}
