/*
 * gather: contents move to slots that follow each other
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <string.h>

#include "base/prim.h"
#include "merge/gather.h"

#define USER_NS     UINT64_C(3000)  /* copied, or compared; mapped, read */
#define PIECE_LONG  64u     /* pages: a mapping worth having as it is */
#define AT_ONCE     128u    /* whose writers wait while they are compared */
#define RUNS_ONCE   16u     /* ... and mapped */
#define PREFETCH    8u      /* pages ahead */
#define USERS_FEW   16u     /* more are not asked to follow */
/* Of the users that a slot may have, those of two are not to be more. */
#define ROOM(max)   ((max) - (max) / 4)

/* Pages that are to map slots which follow each other. */
typedef struct Stretch {
    KsmRegion *r;
    size_t page;
    unsigned n;
    int64_t halves;             /* of mappings that are expected to go */
    uint64_t users;             /* of all old slots */
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

/* Where the slot's content is found. */
static uint32_t place_found(const KsmGather *g, uint32_t slot)
{
    return index_lookup(&g->rejoin->content->index,
                        store_tag(store_of(g), slot));
}

static bool is_found(const KsmGather *g, uint32_t slot)
{
    return place_found(g, slot) == (slot | PLACE_SLOT);
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

/* How many others may map @other and @mine in one mapping. */
static unsigned others(const KsmGather *g, uint32_t other, uint32_t mine)
{
    return MIN(store_users(store_of(g), other),
               store_users(store_of(g), mine) - 1);
}

/* Page @i is the first of a piece. */
static void piece_begins(const KsmGather *g, Stretch *t, unsigned i)
{
    uint32_t slot = t->old[i];

    if (i) {
        /* one mapping less here, and perhaps elsewhere */
        t->halves += 1 + MIN(store_users(store_of(g), slot),
                             store_users(store_of(g), t->old[i - 1]));
    } else if (region_joined(t->r, t->page)) {
        t->halves -= 2;
        return;
    }
    t->halves -= slot ? others(g, slot - 1, slot) : 0;
}

/* ... the last one. */
static void piece_ends(const KsmGather *g, Stretch *t, unsigned i)
{
    size_t next = t->page + i + 1;

    if (i + 1 == t->n && next < t->r->n_pages && region_joined(t->r, next)) {
        t->halves -= 2;
    } else {
        t->halves -= others(g, t->old[i] + 1, t->old[i]);
    }
}

/* What comes of the first @n pages. */
static void stretch_count(const KsmGather *g, Stretch *t, unsigned n)
{
    t->n = n;
    t->halves = t->users = 0;
    for (unsigned i = 0; i < n; i++) {
        t->users += store_users(store_of(g), t->old[i]);
        if (!i || t->old[i] != t->old[i - 1] + 1) {
            piece_begins(g, t, i);
        }
        if (i + 1 == n || t->old[i + 1] != t->old[i] + 1) {
            piece_ends(g, t, i);
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
            (n && slot != r->tag[page] + n) || !is_found(g, slot) ||
            store_users(store_of(g), slot) >
            MIN(USERS_FEW, ROOM(g->max_sharing)) ||
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

    return t->halves > 0 &&
           t->users * USER_NS + c->rejoin_ns + c->map_ns <=
           t->halves * MAPPING_WORTH_NS / 2;
}

/* --- and is --- */

/*
 * Pages from @page on, up to @n, in memory, that may be replaced for all we know;
 * and *@away that are not, right behind those.
 */
static unsigned at_hand(const KsmGather *g, KsmRegion *r, size_t page,
                        unsigned n, unsigned *away)
{
    uint8_t kinds[CHUNK_PAGES];
    unsigned i = 0, k;

    *away = n;
    if (region_busy(r, page_addr(r, page), n * PAGE_BYTES) ||
        kinds_ask(g->kinds, page_addr(r, page), n, KINDS_FAST, kinds) < 0) {
        return 0;
    }
    while (i < n && (kinds[i] & PM_PRESENT)) {
        i++;
    }
    k = i;
    while (k < n && !(kinds[k] & PM_PRESENT)) {
        k++;
    }
    *away = k - i;
    return i;
}

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

/* Slots from @i on that follow each other, of @n. */
static unsigned slots_run(const uint32_t *slot, unsigned i, unsigned n)
{
    unsigned run = 1;

    while (i + run < n && slot[i + run] == slot[i] + run) {
        run++;
    }
    return run;
}

static int slots_fill(KsmGather *g, const Stretch *t)
{
    KsmStore *s = store_of(g);
    int ret = store_allocate(s, t->slot[0], t->n);
    unsigned n;

    for (unsigned i = 0; i < t->n && ret == 0; i += n) {
        n = slots_run(t->old, i, t->n);
        ret = store_readable(s, t->old[i], n);
        ret = ret < 0 ? ret
              : store_fill(s, t->slot[i], store_page(s, t->old[i]), n);
    }
    /* now, and not while somebody may wait */
    return ret < 0 ? ret : store_readable(s, t->slot[0], t->n);
}

/* They map their new slots, by which they are found from now on. */
static void stretch_move(KsmGather *g, Stretch *t)
{
    KsmContent *c = g->rejoin->content;

    for (unsigned i = 0; i < t->n; i++) {
        store_hold(c->store, t->slot[i]);
    }
    for (unsigned i = 0; i < t->n; i += AT_ONCE) {
        g->moved += rejoin_slots(g->rejoin, t->r, t->page + i,
                                 MIN(AT_ONCE, t->n - i), t->slot + i,
                                 vmas_free(g->rejoin->vmas));
    }
    for (unsigned i = 0; i < t->n; i++) {
        if (page_state(t->r, t->page + i) == PAGE_MERGED &&
            t->r->tag[t->page + i] == t->slot[i]) {
            content_publish(c, t->slot[i]);
        }
    }
}

static void stretch_gather(KsmGather *g, Stretch *t)
{
    unsigned away;

    if (vmas_free(g->rejoin->vmas) < 2 * VMAS_FEW ||
        at_hand(g, t->r, t->page, t->n, &away) < t->n || !slots_take(g, t)) {
        return;
    }
    /* again, as they may be fewer */
    if (stretch_pays(g, t) && slots_fill(g, t) == 0) {
        stretch_move(g, t);
    } else {
        slots_settle(g, t);
    }
}

size_t gather_next(KsmGather *g, KsmRegion *r, size_t page, size_t end,
                   unsigned *tried)
{
    Stretch t;
    unsigned n = stretch_see(g, &t, r, page, end);

    *tried = 0;
    if (stretch_pays(g, &t)) {
        unsigned all = t.n;

        stretch_gather(g, &t);
        /* what could not be is as if it was merged now, as what was is */
        memset(r->history + page, 0, t.n);
        *tried = t.n;
        n = t.n < all ? t.n : n;    /* there were not as many slots */
    }
    return page + MAX(n, 1);
}

/* --- others follow --- */

/* Would all who use either have room in @to? */
static bool has_room(const KsmGather *g, uint32_t slot, uint32_t to)
{
    KsmStore *s = store_of(g);

    return !store_full(s, to) && store_repeated(s, to) == SLOT_NONE &&
           store_users(s, slot) <= USERS_FEW &&
           store_users(s, slot) + store_users(s, to) <= ROOM(g->max_sharing);
}

/*
 * What others have left, and then written or given up where they went.  Its tag
 * is only what it is found by: what that does not fit is not to be found.
 */
static void slot_find(const KsmGather *g, const KsmRegion *r, uint32_t slot)
{
    KsmStore *s = store_of(g);

    if (!store_full(s, slot) && store_readable(s, slot, 1) == 0 &&
        content_tag_fits(r, store_tag(s, slot),
                         hash_page(g->hasher, store_page(s, slot)))) {
        content_publish(g->rejoin->content, slot);
    }
}

/* Where a page is to follow; SLOT_NONE: it stays. */
static uint32_t slot_next(const KsmGather *g, const KsmRegion *r, size_t page)
{
    uint32_t slot = slot_plain(g, r, page), place, to;

    if (slot == SLOT_NONE) {
        return SLOT_NONE;
    }
    place = place_found(g, slot);
    if (place == PLACE_NONE) {
        slot_find(g, r, slot);
    }
    if (place == PLACE_NONE || !(place & PLACE_SLOT)) {
        return SLOT_NONE;
    }
    to = place & ~PLACE_SLOT;
    return to != slot && has_room(g, slot, to) ? to : SLOT_NONE;
}

static bool can_read(const KsmGather *g, const uint32_t *slot, unsigned n)
{
    unsigned run;

    for (unsigned i = 0; i < n; i += run) {
        run = slots_run(slot, i, n);
        if (store_readable(store_of(g), slot[i], run) < 0) {
            return false;
        }
    }
    return true;
}

/* How many of the first pages are what their slots are. */
static unsigned count_equal(const KsmGather *g, const uint32_t *old,
                            const uint32_t *slot, unsigned n)
{
    KsmStore *s = store_of(g);
    unsigned i = 0;

    if (!can_read(g, old, n) || !can_read(g, slot, n)) {
        unsigned all = n;

        /* up to the one that cannot be */
        n = 0;
        while (n < all && can_read(g, old + n, 1) &&
               can_read(g, slot + n, 1)) {
            n++;
        }
    }
    while (i < n && !memcmp(store_page(s, old[i]), store_page(s, slot[i]),
                            PAGE_BYTES)) {
        i++;
    }
    return i;
}

static void slots_drop(const KsmGather *g, const uint32_t *slot, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        store_drop(store_of(g), slot[i]);
    }
}

/* Users of the slots that pages from @page on are to follow to; pages. */
static unsigned next_take(const KsmGather *g, const KsmRegion *r, size_t page,
                          size_t end, uint32_t *slot)
{
    unsigned n = 0, runs = 0;

    while (n < AT_ONCE && page + n < end) {
        slot_prefetch(g, r, page + n + PREFETCH);
        slot[n] = slot_next(g, r, page + n);
        runs += !n || slot[n] != slot[n - 1] + 1;
        if (slot[n] == SLOT_NONE || runs > RUNS_ONCE) {
            break;
        }
        store_hold(store_of(g), slot[n++]);
    }
    return n;
}

/*
 * The first of @n pages that may, and are what their slots are; then come some
 * that are not in memory, and are behind, or one that is not equal to its slot, and
 * has nothing to follow.  Returns how many are done with.
 */
static unsigned pages_follow(KsmGather *g, KsmRegion *r, size_t page,
                             const uint32_t *slot, unsigned n, size_t *behind)
{
    unsigned away, hand = at_hand(g, r, page, n, &away), moved = 0;
    unsigned equal = hand ? count_equal(g, r->tag + page, slot, hand) : 0;

    slots_drop(g, slot + equal, n - equal);
    if (equal) {
        moved = rejoin_slots(g->rejoin, r, page, equal, slot,
                             vmas_left(g->rejoin->vmas));
    }
    g->moved += moved;
    *behind += equal - moved;
    if (equal < hand) {
        return equal + 1;
    }
    *behind += away;
    return equal + away;
}

size_t gather_follow(KsmGather *g, KsmRegion *r, size_t page, size_t end,
                     bool may, size_t *behind)
{
    uint32_t slot[AT_ONCE];
    unsigned n = next_take(g, r, page, end, slot);

    while (!n && ++page < end) {
        n = next_take(g, r, page, end, slot);
    }
    if (n && may) {
        return page + pages_follow(g, r, page, slot, n, behind);
    }
    slots_drop(g, slot, n);
    *behind += n;
    return page + n;
}
