/*
 * plan: what is to become of each page of a chunk
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Which copy goes to the pool.  When a page equals one that only stands in the
 * index (unstable), the page at hand is copied, being in the cache.  Its slot
 * takes the other's place in the index; the other's chunk is queued and merges
 * against it.  A page that stands in the index itself is never copied: its
 * partner's chunk begins.
 */
#include <string.h>

#include "base/tsan.h"
#include "merge/parts.h"
#include "merge/quiet.h"

#define OFFER_WAIT      4u      /* passes until it is offered again */
#define PARKED_MAX      16u     /* times in a pass that it waits for answers */
#define LEAKED_MIN      (64 * CHUNK_PAGES)  /* what may always be kept */
#define PREFETCH        8u      /* pages ahead */
#define TAIL_SHARE      16u     /* part of all mappings */

bool plan_ripe(const KsmPlan *p, const KsmRegion *r, size_t chunk)
{
    const KsmChunk *c = &r->chunk[chunk];

    return c->gain - c->left >= (int)parts_gain(p, c) &&
           (c->wait == 0 || c->gain > c->tried + c->tried / 4 + 8);
}

/* For runs: what is left to the kernel takes some, too. */
static size_t but_tail(const KsmPlan *p, size_t left)
{
    return left - MIN(left, p->tail ? p->vmas->limit / TAIL_SHARE : 0);
}

static size_t mappings_left(const KsmPlan *p)
{
    return but_tail(p, vmas_left(p->vmas));
}

size_t plan_room(const KsmPlan *p)
{
    return cut_room(but_tail(p, vmas_known(p->vmas)), p->vmas->limit);
}

/* @paid: the costs are all that is against it, and they may be less by then. */
static bool refuse(KsmPlan *p, KsmChunk *c, KsmReason reason, bool paid)
{
    bool late = reason == KSM_REASON_NOT_WORTH && !paid &&
                !(c->flags & CHUNK_HUGE);
    /* others were to have the mappings first, and have not taken them all */
    bool soon = reason == KSM_REASON_VMA_LIMIT &&
                cut_has_left(mappings_left(p), p->vmas->limit);

    if (!late) {
        c->late = 0;
    } else if (!c->wait && !(c->flags & CHUNK_WOKEN)) {
        c->late = MIN(c->late + 1, LATE_MIN + 1);
    }
    c->flags &= ~CHUNK_WOKEN;
    costs_doubt(p->costs);
    chunk_set_reason(p->region, c, reason);
    c->tried = c->gain;
    if (paid || (late && c->late <= LATE_MIN)) {
        c->wait = 1;    /* by then it may cost more: parts_late() */
    } else {
        c->backoff = MIN(c->backoff + 1, soon ? CUT_BACKOFF : 6);
        c->wait = 1u << c->backoff;
    }
    p->doubtful = paid;
    return false;
}

/* Would the other copy's chunk be merged too? */
static bool partner_worth(KsmPlan *p, uint32_t place)
{
    size_t page;
    KsmRegion *r = directory_page(p->content->dir, place, &page);
    KsmChunk *c = page_chunk(r, page);
    /* it will not be left any more */
    bool left = page_is_left(r, page);

    if (r->leaving) {
        return false;
    }
    if (page_state(r, page) == PAGE_BROKEN) {
        return !r->rests && r->ops && r->ops->busy &&
               quiet_pays(p->costs, r, page,
                          content_tag(r, p->hasher->zero));
    }
    if (p->late && !(c->flags & CHUNK_HUGE) && !parts_late(c)) {
        return false;       /* for now; it would be too dear there */
    }
    return c->gain - c->left + left >= (int)parts_gain(p, c) &&
           sample_chunk(&p->sampler, r, page / CHUNK_PAGES) &&
           c->gain - c->left + left >= (int)parts_gain(p, c);
}

/* What the page was equal to is gone. */
static PlanAct match_gone(KsmPlan *p, KsmRegion *r, size_t page)
{
    if (store_is_remote(p->content->store)) {
        /* here, that is; elsewhere it may be: ask again */
        content_leave(p->content, r, page, PAGE_NEW);
        page_chunk(r, page)->flags |= CHUNK_VISIT;
        return ACT_KEEP;
    }
    /* now it is the candidate */
    page_set(r, page, PAGE_UNIQUE);
    if (!content_enter(p->content, r, page)) {
        page_set(r, page, PAGE_EQUAL);
    }
    return ACT_KEEP;
}

static PlanAct page_match(KsmPlan *p, KsmRegion *r, size_t page,
                          uint32_t *slot)
{
    KsmStore *store = p->content->store;
    uint32_t place = index_lookup(&p->content->index, r->tag[page]);
    unsigned one = 1;

    if (place == PLACE_NONE) {
        return match_gone(p, r, page);
    }
    if (place & PLACE_SLOT) {
        *slot = store_run(store, place & ~PLACE_SLOT, &one);
        if (*slot != SLOT_NONE) {
            return ACT_MAP;
        }
        return store_repeated(store, place & ~PLACE_SLOT) == SLOT_NONE
               ? ACT_NEW : ACT_KEEP;
    }
    if (place == page_id(r, page)) {
        return ACT_KEEP;
    }
    /* it may have become the candidate when it was thought to be alone */
    content_met(p->content, place);
    if (partner_worth(p, place)) {
        return ACT_NEW;
    }
    if (index_lookup(&p->content->index, r->tag[page]) != place) {
        return match_gone(p, r, page);      /* it was seen to have changed */
    }
    /* what is not merged itself is not in the way of others that are equal */
    content_take(p->content, place, r, page);
    return ACT_KEEP;
}

static unsigned equal_run(const KsmRegion *r, size_t first, unsigned i)
{
    unsigned n = 1;

    while (i + n < CHUNK_PAGES &&
           page_state(r, first + i + n) == PAGE_EQUAL &&
           r->tag[first + i + n] == r->tag[first + i]) {
        n++;
    }
    return n;
}

/*
 * From now on the slot is found.  The page found before is to be merged with
 * it: its chunk is a partner, or, if it is this one, waits for its next turn.
 */
static void publish(KsmPlan *p, uint32_t slot)
{
    uint32_t met = content_publish(p->content, slot);
    uint32_t id = met / CHUNK_PAGES;

    if (met == PLACE_NONE || id == chunk_id(p->region, p->chunk) ||
        (p->n_partners && p->partner[p->n_partners - 1] == id)) {
        return;
    }
    g_assert(p->n_partners < G_N_ELEMENTS(p->partner));
    p->partner[p->n_partners++] = id;
}

/*
 * No more copies: memory is short, or too much of the pool is kept, for forked
 * children or for good.
 */
static bool is_tight(const KsmPlan *p)
{
    size_t pages = directory_pages(p->content->dir);
    KsmStore *s = p->content->store;

    return memcg_is_tight(p->memcg) ||
           store_stats(s).leaked > MAX(pages / 8, LEAKED_MIN);
}

static StoreOffer offer_of(KsmRegion *r, size_t page, unsigned n)
{
    return (StoreOffer) {
        .pages = page_addr(r, page),
        .tag = r->tag + page,
        .id = page_id(r, page),
        .n = n,
        .before = SLOT_NONE,
        .after = SLOT_NONE,
    };
}

/*
 * Is what was copied what the tag says?  The page may have been written since
 * it was hashed, and by its tag the slot is found for as long as it is used.
 */
static bool slot_is_sound(const KsmPlan *p, const KsmRegion *r, uint32_t slot)
{
    KsmStore *s = p->content->store;

    return content_tag_fits(r, store_tag(s, slot),
                            hash_page(p->hasher, store_page(s, slot)));
}

static uint32_t repeat_new(KsmPlan *p, KsmRegion *r, size_t page)
{
    StoreOffer o = offer_of(r, page, 1);

    if (!sample_run(&p->sampler, r, page, 1)) {
        return SLOT_NONE;
    }
    if (asks_is_offered(p->asks, o.tag[0])) {
        p->offered++;
        return SLOT_NONE;
    }
    switch (asks_repeat(p->asks, &o)) {
    case OFFER_TAKEN:
        if (slot_is_sound(p, r, o.slot)) {
            publish(p, o.slot);
            return o.slot;
        }
        store_settle(p->content->store, o.slot);
        content_leave(p->content, r, page, PAGE_NEW);
        page_mark(r, page, true);
        page_chunk(r, page)->flags |= CHUNK_VISIT;
        break;
    case OFFER_BUSY:
        p->busy++;
        /* fall through */
    case OFFER_LATER:
        p->offered++;
        break;
    case OFFER_REFUSED:
    case OFFER_FULL:
        p->why = store_why(p->content->store);
        break;
    }
    return SLOT_NONE;
}

/* Repeated slots for a run of equal pages to map; made if need be. */
static uint32_t repeat_for(KsmPlan *p, KsmRegion *r, size_t page)
{
    uint32_t place = index_lookup(&p->content->index, r->tag[page]);
    uint32_t first = SLOT_NONE;

    if (place != PLACE_NONE && (place & PLACE_SLOT)) {
        first = store_repeated(p->content->store, place & ~PLACE_SLOT);
    }
    if (first != SLOT_NONE) {
        return first;
    }
    if (is_tight(p)) {
        p->why = KSM_REASON_NO_MEMORY;
        return SLOT_NONE;
    }
    return repeat_new(p, r, page);
}

/* Plans a run of @n equal pages; slots are taken. */
static void plan_pattern(KsmPlan *p, KsmRegion *r, unsigned i, unsigned n)
{
    KsmStore *s = p->content->store;
    size_t page = p->chunk * CHUNK_PAGES + i;
    uint32_t first = repeat_for(p, r, page);
    bool renewed = false;

    while (first != SLOT_NONE && n) {
        unsigned got = n;
        uint32_t slot = store_run(s, first, &got);

        if (slot == SLOT_NONE) {
            /* every slot has all the users it may have: another replica */
            if (renewed) {
                break;
            }
            renewed = true;
            first = repeat_new(p, r, page);
            continue;
        }
        for (unsigned k = 0; k < got; k++, i++, n--) {
            p->act[i] = ACT_MAP;
            p->slot[i] = slot + k;
            store_hold(s, slot + k);
        }
    }
    if (first != SLOT_NONE) {
        store_settle(s, first);
    }
}

/* First look: acts, without taking anything but pattern slots. */
static void plan_acts(KsmPlan *p, KsmRegion *r, size_t chunk)
{
    size_t first = chunk * CHUNK_PAGES;
    unsigned n;

    memset(p->act, ACT_KEEP, sizeof(p->act));
    for (unsigned i = 0; i < CHUNK_PAGES; i += n) {
        n = 1;
        if (i + PREFETCH < CHUNK_PAGES &&
            page_state(r, first + i + PREFETCH) == PAGE_EQUAL) {
            index_prefetch(&p->content->index, r->tag[first + i + PREFETCH]);
        }
        if (r->state[first + i] & PAGE_WRITTEN) {
            continue;
        }
        switch (page_state(r, first + i)) {
        case PAGE_ZEROES:
            p->act[i] = ACT_ZERO;
            break;
        case PAGE_EQUAL:
            n = equal_run(r, first, i);
            if (n >= RUN_PATTERN_MIN) {
                plan_pattern(p, r, i, n);
                break;
            }
            n = 1;
            p->slot[i] = SLOT_NONE;
            p->act[i] = page_match(p, r, first + i, &p->slot[i]);
            if (p->act[i] == ACT_MAP) {
                store_hold(p->content->store, p->slot[i]);
            }
            break;
        default:
            break;
        }
    }
}

void plan_drop(KsmPlan *p, unsigned i, PlanAct act)
{
    if (act_has_slot(p->act[i])) {
        store_drop(p->content->store, p->slot[i]);
    }
    p->act[i] = act;
}

void plan_done(KsmPlan *p, unsigned first, unsigned n, const uint8_t *done)
{
    for (unsigned i = 0; i < n; i++) {
        if (done[i] != ACT_MAP) {
            plan_drop(p, first + i, ACT_KEEP);
        }
        p->act[first + i] = ACT_KEEP;
    }
}

/* Pages of the run that page i begins; 0: it is to have no mapping. */
static unsigned run_pages(const KsmPlan *p, unsigned i)
{
    unsigned n = 1;

    if (!act_has_slot(p->act[i]) && p->act[i] != ACT_NEW) {
        return 0;
    }
    while (plan_joined(p, i + n - 1)) {
        n++;
    }
    return n;
}

/*
 * Pages that want mappings, here and elsewhere, as far as is known: not those
 * that are not worth it, which have what is left, late, nor those left to the
 * kernel.
 */
static uint64_t pages_todo(const KsmPlan *p)
{
    uint64_t count[PAGE_STATES] = { 0 }, unworthy = 0, left = 0, equal, known;

    for (unsigned i = 0; i < p->regions->len; i++) {
        const KsmRegion *r = g_ptr_array_index(p->regions, i);

        count[PAGE_NEW] += r->count[PAGE_NEW];
        count[PAGE_UNIQUE] += r->count[PAGE_UNIQUE];
        count[PAGE_EQUAL] += r->count[PAGE_EQUAL];
        count[PAGE_MERGED] += r->count[PAGE_MERGED];
        unworthy += r->gain[KSM_REASON_NOT_WORTH];
        left += r->n_left;
    }
    equal = count[PAGE_EQUAL] - left + count[PAGE_MERGED];
    known = equal + count[PAGE_UNIQUE];
    return count[PAGE_EQUAL] - MIN(count[PAGE_EQUAL], MAX(unworthy, left)) +
           count[PAGE_NEW] * equal / MAX(known, 1);
}

/* Drops the runs that are to have no mappings. */
static void plan_cut(KsmPlan *p)
{
    unsigned n;

    for (unsigned i = 0; i < CHUNK_PAGES; i += MAX(n, 1)) {
        n = run_pages(p, i);
        if (n) {
            bool joined = i + n < CHUNK_PAGES && run_pages(p, i + n);

            cut_see(p->cut, n, joined ? 1 : 2);
        }
    }
    cut_decide(p->cut, mappings_left(p), p->vmas->limit, pages_todo(p));
    for (unsigned i = 0; i < CHUNK_PAGES; i += MAX(n, 1)) {
        n = run_pages(p, i);
        if (n && !cut_takes(p->cut, n)) {
            for (unsigned k = i; k < i + n; k++) {
                plan_drop(p, k, ACT_KEEP);
            }
            p->why = p->why == KSM_REASON_NOT_WORTH ? KSM_REASON_VMA_LIMIT
                                                    : p->why;
        }
    }
}

/* Counts what is to be done. */
static void plan_count(KsmPlan *p)
{
    unsigned n;

    p->zero = p->map = p->fresh = p->runs = 0;
    for (unsigned i = 0; i < CHUNK_PAGES; i += MAX(n, 1)) {
        n = run_pages(p, i);
        p->zero += p->act[i] == ACT_ZERO;
        p->runs += n > 0;
        for (unsigned k = i; k < i + n; k++) {
            p->map += p->act[k] == ACT_MAP;
            p->fresh += p->act[k] != ACT_MAP;
        }
    }
}

/* The slot that a page of the chunk maps, or will map; SLOT_NONE: none. */
static uint32_t slot_of(const KsmPlan *p, const KsmRegion *r, size_t page)
{
    unsigned i = page % CHUNK_PAGES;

    if (page >= r->n_pages) {
        return SLOT_NONE;
    }
    if (page / CHUNK_PAGES == p->chunk && act_has_slot(p->act[i])) {
        return p->slot[i];
    }
    return page_state(r, page) == PAGE_MERGED ? r->tag[page] : SLOT_NONE;
}

/*
 * Offers the ACT_NEW pages, in order.  Their slots are to be filled; or they
 * were copied, and are kept until the answer has come; or until there is room.
 */
static unsigned promote_run(KsmPlan *p, KsmRegion *r, unsigned i, unsigned n)
{
    KsmStore *s = p->content->store;
    size_t page = p->chunk * CHUNK_PAGES + i;
    StoreOffer o = offer_of(r, page, sample_run(&p->sampler, r, page, n));
    bool tight = is_tight(p);
    OfferFate fate;

    if (!o.n) {
        return 0;
    }
    o.before = page ? slot_of(p, r, page - 1) : SLOT_NONE;
    o.after = o.n == n ? slot_of(p, r, page + n) : SLOT_NONE;
    fate = tight ? OFFER_REFUSED : asks_offer(p->asks, &o);
    if (fate == OFFER_REFUSED || fate == OFFER_FULL) {
        p->why = tight ? KSM_REASON_NO_MEMORY : store_why(s);
        return 0;
    }
    for (unsigned k = 0; k < o.n; k++) {
        if (fate != OFFER_TAKEN) {
            p->act[i + k] = ACT_KEEP;
            p->offered++;
            p->busy += fate == OFFER_BUSY;
            continue;
        }
        store_hold(s, o.slot + k);
        publish(p, o.slot + k);
        p->act[i + k] = ACT_FILL;
        p->slot[i + k] = o.slot + k;
    }
    return o.n;
}

/* A page equal to one promoted in this chunk maps its slot, or waits for it. */
static bool promoted_already(KsmPlan *p, KsmRegion *r, unsigned i)
{
    KsmStore *s = p->content->store;
    uint32_t tag = r->tag[p->chunk * CHUNK_PAGES + i];
    uint32_t place = index_lookup(&p->content->index, tag);

    if (asks_is_offered(p->asks, tag)) {
        p->act[i] = ACT_KEEP;
        p->offered++;
        return true;
    }
    if (place == PLACE_NONE || !(place & PLACE_SLOT) ||
        store_full(s, place & ~PLACE_SLOT)) {
        return false;
    }
    p->act[i] = ACT_MAP;
    p->slot[i] = place & ~PLACE_SLOT;
    store_hold(s, p->slot[i]);
    return true;
}

/* Pages by their hash: numbers in a chunk, plus one. */
typedef struct PageSet {
    uint16_t at[2 * CHUNK_PAGES];
} PageSet;

#define SET_PROBES 16u  /* whatever a guest writes */

/* Adds the page; false: one with the same hash is there, or may be. */
static bool set_add(PageSet *set, const uint32_t *tag, unsigned i)
{
    uint32_t from = tag[i] * UINT32_C(0x9e3779b1) >> 22;

    for (unsigned k = 0; k < SET_PROBES; k++) {
        uint16_t *at = &set->at[(from + k) % G_N_ELEMENTS(set->at)];

        if (!*at) {
            *at = i + 1;
            return true;
        }
        if (tag[*at - 1] == tag[i]) {
            return false;
        }
    }
    return false;
}

/*
 * Where runs of pages to be copied end: a page equal to an earlier one to be
 * copied maps that one's slot instead.
 */
static void runs_cut(const KsmPlan *p, const KsmRegion *r, bool *cut)
{
    const uint32_t *tag = r->tag + p->chunk * CHUNK_PAGES;
    PageSet set = { 0 };

    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        cut[i] = p->act[i] == ACT_NEW && !set_add(&set, tag, i);
    }
}

static void plan_promote(KsmPlan *p, KsmRegion *r)
{
    bool cut[CHUNK_PAGES];
    unsigned n;

    runs_cut(p, r, cut);
    for (unsigned i = 0; i < CHUNK_PAGES; i += n) {
        n = 1;
        if (p->act[i] != ACT_NEW || promoted_already(p, r, i)) {
            continue;
        }
        while (plan_joined(p, i + n - 1) && !cut[i + n]) {
            n++;
        }
        n = promote_run(p, r, i, n);
        if (!n) {
            p->act[i] = ACT_KEEP;
            n = 1;
        }
    }
}

static void plan_release(KsmPlan *p)
{
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        plan_drop(p, i, ACT_KEEP);
    }
}

/*
 * The chunk is planned again when the answers have come, or some passes later:
 * they may always come, and never help, as for a page that changes.
 */
static bool put_off(KsmPlan *p, KsmChunk *c)
{
    uint32_t id = chunk_id(p->region, p->chunk);

    plan_release(p);
    if (!(c->flags & CHUNK_PARKED) && c->parked < PARKED_MAX) {
        c->flags |= CHUNK_PARKED;
        c->parked++;
        (p->busy == p->offered ? asks_park_busy : asks_park)(p->asks, id);
    }
    chunk_set_reason(p->region, c, KSM_REASON_NOT_SCANNED);
    c->tried = c->gain;
    c->wait = OFFER_WAIT;
    return false;
}

/*
 * A chunk is put off once: pages offered again and again do not keep the others
 * from being merged.  @first: nothing of it was cut yet.
 */
static bool plan_settle(KsmPlan *p, KsmChunk *c, bool first)
{
    if (p->offered && c->why_not != KSM_REASON_NOT_SCANNED) {
        return put_off(p, c);
    }
    if (first) {
        plan_cut(p);
    }
    plan_count(p);
    parts_make(p);
    if (parts_pay(p, p->costs)) {
        return true;
    }
    if (p->offered) {
        return put_off(p, c);
    }
    plan_release(p);
    if (!p->late && parts_late(c) && !p->n_partners) {
        p->late = true;     /* it is to be made once more, at that price */
        return false;
    }
    if (p->late && p->why != KSM_REASON_VMA_LIMIT) {
        /* it had all the time there is; what others may cost it is not worth */
        return refuse(p, c, KSM_REASON_NOT_WORTH, false);
    }
    return refuse(p, c, p->why, !p->late && parts_pay(p, &costs_guess));
}

/* False, and p->late set meanwhile: another try, at that price, may pay. */
static bool plan_once(KsmPlan *p, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];

    p->region = r;
    p->chunk = chunk;
    p->n_partners = 0;
    p->offered = p->busy = 0;
    p->why = KSM_REASON_NOT_WORTH;
    p->doubtful = false;
    p->content->store->node = r->node;
    KSM_TSAN_IGNORE_BEGIN();    /* what is copied may be written */
    plan_acts(p, r, chunk);
    KSM_TSAN_IGNORE_END();
    if (!plan_settle(p, c, true)) {
        return false;
    }
    if (p->fresh) {
        KSM_TSAN_IGNORE_BEGIN();
        plan_promote(p, r);
        KSM_TSAN_IGNORE_END();
        if (!plan_settle(p, c, false)) {
            return false;
        }
    }
    chunk_set_reason(r, c, p->why == KSM_REASON_VMA_LIMIT
                           ? p->why : KSM_REASON_NOT_WORTH);
    return true;
}

bool plan_make(KsmPlan *p, KsmRegion *r, size_t chunk)
{
    p->late = false;
    return plan_once(p, r, chunk) || (p->late && plan_once(p, r, chunk));
}
