/*
 * gather: contents move to slots that follow each other
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <string.h>

#include "base/prim.h"
#include "merge/gather.h"

#define GATHER_PAGE_NS  UINT64_C(10000)     /* copied; and others follow */
#define PIECE_LONG      64u     /* pages: a mapping worth having as it is */
#define AT_ONCE         128u    /* whose writers wait while they are compared */
#define PREFETCH        8u      /* pages ahead */

/* Pages that are to map slots which follow each other. */
typedef struct Stretch {
    KsmRegion *r;
    size_t page;
    unsigned n;
    unsigned pieces;            /* mappings that it takes now */
    unsigned torn;              /* ends of those that others may go on from */
    uint32_t old[CHUNK_PAGES];
    uint32_t slot[CHUNK_PAGES];
} Stretch;

static KsmStore *store_of(const KsmGather *g)
{
    return g->rejoin->content->store;
}

/* The slot of a merged page, if it is one page's, in the pool in use. */
static uint32_t slot_plain(const KsmGather *g, const KsmRegion *r, size_t page)
{
    uint32_t slot = page_state(r, page) == PAGE_MERGED ? r->tag[page]
                                                       : SLOT_NONE;

    return slot == SLOT_NONE || store_stale(store_of(g), slot) ||
           store_repeated(store_of(g), slot) != SLOT_NONE ? SLOT_NONE : slot;
}

/* Where the slot's content is found; SLOT_NONE: in no slot. */
static uint32_t slot_found(const KsmGather *g, uint32_t slot)
{
    uint32_t place = index_lookup(&g->rejoin->content->index,
                                  store_tag(store_of(g), slot));

    return place != PLACE_NONE && (place & PLACE_SLOT) ? place & ~PLACE_SLOT
                                                       : SLOT_NONE;
}

/* Of a page that will be asked about. */
static void slot_prefetch(const KsmGather *g, const KsmRegion *r, size_t page)
{
    if (page < r->n_pages && page_state(r, page) == PAGE_MERGED) {
        index_prefetch(&g->rejoin->content->index,
                       store_tag(store_of(g), r->tag[page]));
    }
}

void gather_age(KsmRegion *r, size_t chunk)
{
    size_t page = chunk * CHUNK_PAGES;

    for (unsigned i = 0; i < CHUNK_PAGES; i++, page++) {
        if (page_state(r, page) == PAGE_MERGED) {
            r->history[page] = MIN(r->history[page] + 1u, GATHER_AGE);
        }
    }
}

/* --- what is to be gathered --- */

static bool has_slot(const Stretch *t, uint32_t slot)
{
    for (unsigned i = 0; i < t->n; i++) {
        if (t->old[i] == slot) {
            return true;
        }
    }
    return false;
}

/* Does somebody map the slot, perhaps in one mapping with another? */
static bool is_used(const KsmGather *g, uint32_t slot)
{
    return store_users(store_of(g), slot) > 0;
}

/* What the first @n pages map now. */
static void stretch_count(const KsmGather *g, Stretch *t, unsigned n)
{
    t->n = n;
    t->pieces = t->torn = 0;
    for (unsigned i = 0; i < n; i++) {
        if (!i || t->old[i] != t->old[i - 1] + 1) {
            t->pieces++;
            t->torn += t->old[i] && is_used(g, t->old[i] - 1);
        }
        if (i + 1 == n || t->old[i + 1] != t->old[i] + 1) {
            t->torn += is_used(g, t->old[i] + 1);
        }
    }
}

/* Pages from @page on, before @end, that map slots one behind the other. */
static unsigned piece_at(const KsmGather *g, const Stretch *t, size_t page,
                         size_t end)
{
    const KsmRegion *r = t->r;
    unsigned n = 0;

    while (page + n < end) {
        uint32_t slot = slot_plain(g, r, page + n);

        slot_prefetch(g, r, page + n + PREFETCH);
        if (slot == SLOT_NONE || r->history[page + n] < GATHER_AGE ||
            (n && slot != r->tag[page] + n) || slot_found(g, slot) != slot ||
            has_slot(t, slot)) {
            break;
        }
        n++;
    }
    return n;
}

/* The pieces from @page on that are short; how many pages were looked at. */
static unsigned stretch_see(const KsmGather *g, Stretch *t, KsmRegion *r,
                            size_t page, size_t end)
{
    unsigned n;

    t->r = r;
    t->page = page;
    t->n = 0;
    while ((n = piece_at(g, t, page + t->n, end)) && n < PIECE_LONG) {
        memcpy(t->old + t->n, r->tag + page + t->n, n * sizeof(*t->old));
        t->n += n;
    }
    stretch_count(g, t, t->n);
    return t->n + n;
}

static bool stretch_pays(const KsmGather *g, const Stretch *t)
{
    const KsmCosts *c = g->rejoin->costs;

    return t->n && t->n * GATHER_PAGE_NS + c->rejoin_ns + c->map_ns +
                   t->torn * MAPPING_WORTH_NS / 2 <=
                   (t->pieces - 1) * MAPPING_WORTH_NS;
}

/* --- and is --- */

/* Slots for the first pages, if not for all; false: there are none. */
static bool slots_take(KsmGather *g, Stretch *t)
{
    KsmStore *s = store_of(g);
    uint32_t tag[CHUNK_PAGES];
    StoreOffer o = {
        .tag = tag,
        .id = page_id(t->r, t->page),
        .n = t->n,
        .before = SLOT_NONE,
        .after = SLOT_NONE,
    };

    for (unsigned i = 0; i < t->n; i++) {
        tag[i] = store_tag(s, t->old[i]);
    }
    s->node = t->r->node;
    if (store_offer(s, &o) != OFFER_TAKEN) {
        return false;
    }
    stretch_count(g, t, o.n);
    for (unsigned i = 0; i < t->n; i++) {
        t->slot[i] = o.slot + i;
    }
    return true;
}

static void slots_settle(KsmGather *g, const Stretch *t)
{
    for (unsigned i = 0; i < t->n; i++) {
        store_settle(store_of(g), t->slot[i]);
    }
}

/* Pages from @i on whose old slots follow each other. */
static unsigned old_run(const Stretch *t, unsigned i)
{
    unsigned n = 1;

    while (i + n < t->n && t->old[i + n] == t->old[i] + n) {
        n++;
    }
    return n;
}

static int slots_fill(KsmGather *g, const Stretch *t)
{
    KsmStore *s = store_of(g);
    int ret = store_allocate(s, t->slot[0], t->n);
    unsigned n;

    for (unsigned i = 0; i < t->n && ret == 0; i += n) {
        n = old_run(t, i);
        ret = store_readable(s, t->old[i], n);
        ret = ret < 0 ? ret
              : store_fill(s, t->slot[i], store_page(s, t->old[i]), n);
    }
    /* now, and not while somebody may wait */
    return ret < 0 ? ret : store_readable(s, t->slot[0], t->n);
}

/* How many pages map their new slots, by which they are found from now on. */
static unsigned stretch_move(KsmGather *g, Stretch *t)
{
    KsmContent *c = g->rejoin->content;
    unsigned moved = 0;

    for (unsigned i = 0; i < t->n; i++) {
        store_hold(c->store, t->slot[i]);
    }
    for (unsigned i = 0; i < t->n; i += AT_ONCE) {
        moved += rejoin_slots(g->rejoin, t->r, t->page + i,
                              MIN(AT_ONCE, t->n - i), t->slot + i);
    }
    for (unsigned i = 0; i < t->n; i++) {
        if (t->r->tag[t->page + i] == t->slot[i] &&
            page_state(t->r, t->page + i) == PAGE_MERGED) {
            content_publish(c, t->slot[i]);
        }
    }
    return moved;
}

static unsigned stretch_gather(KsmGather *g, Stretch *t)
{
    if (!stretch_pays(g, t) || !slots_take(g, t)) {
        return 0;
    }
    /* again, as they may be fewer */
    if (!stretch_pays(g, t) || slots_fill(g, t) < 0) {
        slots_settle(g, t);
        return 0;
    }
    return stretch_move(g, t);
}

size_t gather_chunk(KsmGather *g, KsmRegion *r, size_t chunk, size_t most)
{
    size_t page = chunk * CHUNK_PAGES, end = page + CHUNK_PAGES, moved = 0;
    Stretch t;
    unsigned n;

    for (; page < end && moved < most; page += MAX(n, 1)) {
        n = stretch_see(g, &t, r, page, end);
        moved += stretch_gather(g, &t);
    }
    return moved;
}

/* --- others follow --- */

/* May all who use either use @to, and is it the same? */
static bool may_follow(const KsmGather *g, uint32_t slot, uint32_t to)
{
    KsmStore *s = store_of(g);

    return !store_full(s, to) && store_repeated(s, to) == SLOT_NONE &&
           store_users(s, slot) + store_users(s, to) <= g->max_sharing &&
           store_readable(s, slot, 1) == 0 && store_readable(s, to, 1) == 0 &&
           !memcmp(store_page(s, slot), store_page(s, to), PAGE_BYTES);
}

/* Where a page is to follow; SLOT_NONE: it stays. */
static uint32_t slot_next(const KsmGather *g, const KsmRegion *r, size_t page)
{
    uint32_t slot = slot_plain(g, r, page);
    uint32_t to = slot == SLOT_NONE ? slot : slot_found(g, slot);

    return to != SLOT_NONE && to != slot && may_follow(g, slot, to)
           ? to : SLOT_NONE;
}

/* Users of the slots that pages from @page on are to follow to; pages. */
static unsigned next_take(const KsmGather *g, const KsmRegion *r, size_t page,
                          size_t end, uint32_t *slot)
{
    unsigned n = 0;

    while (n < AT_ONCE && page + n < end) {
        slot_prefetch(g, r, page + n + PREFETCH);
        slot[n] = slot_next(g, r, page + n);
        if (slot[n] == SLOT_NONE) {
            break;
        }
        store_hold(store_of(g), slot[n++]);
    }
    return n;
}

size_t gather_follow(KsmGather *g, KsmRegion *r, size_t chunk, bool may)
{
    size_t page = chunk * CHUNK_PAGES, end = page + CHUNK_PAGES, behind = 0;
    uint32_t slot[AT_ONCE];
    unsigned n;

    for (; page < end; page += MAX(n, 1)) {
        n = next_take(g, r, page, end, slot);
        behind += n;
        if (n && may) {
            behind -= rejoin_slots(g->rejoin, r, page, n, slot);
        }
        for (unsigned i = 0; i < n && !may; i++) {
            store_drop(store_of(g), slot[i]);
        }
    }
    return behind;
}
