/*
 * libksm: planning a chunk
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * See run.h for the idea.
 *
 * Which copy goes to the pool.  When a page is found equal to one that only
 * stands in the index (unstable), the page at hand is copied, being in the
 * cache, and its slot takes the other's place in the index; the chunk of the
 * other one is queued and merges against the slot.  A page that stands in
 * the index itself is never copied: its partner's chunk begins.
 */
#include <stdlib.h>
#include <string.h>

#include "broken.h"
#include "engine.h"
#include "prim.h"
#include "run.h"
#include "scan.h"
#include "tsan.h"

#define RECOUNT_MIN_NS      UINT64_C(500000000)
#define RECOUNT_NS          (UINT64_C(10) * 1000000000)
#define VMAS_GUESS          65530u  /* vm.max_map_count where not readable */
#define FILL_SPAN_MIN   128u    /* pages */
#define LEAKED_MIN      (64 * CHUNK_PAGES)  /* what may always be kept */
#define FILL_GAIN_NS    128u    /* a page, for what is still in the cache */

static unsigned gain_needed(const KsmRegion *r, const KsmChunk *c)
{
    return c->flags & CHUNK_HUGE ? r->engine->cfg.split_min_pages : 1;
}

bool run_ripe(const KsmRegion *r, size_t chunk)
{
    const KsmChunk *c = &r->chunk[chunk];

    return c->gain >= gain_needed(r, c) &&
           (c->wait == 0 || c->gain > c->tried + c->tried / 4 + 8);
}

static bool refuse(KsmEngine *e, KsmChunk *c, KsmReason reason)
{
    merge_doubt_costs(e);
    chunk_set_reason(e->plan.region, c, reason);
    c->tried = c->gain;
    c->backoff = MIN(c->backoff + 1, 6);
    c->wait = 1u << c->backoff;
    return false;
}

/* Would the chunk that holds the other copy be merged too? */
static bool partner_worth(KsmEngine *e, uint32_t place)
{
    size_t page;
    KsmRegion *r = engine_page(e, place, &page);
    KsmChunk *c = page_chunk(r, page);

    if (r->leaving) {
        return false;
    }
    if (page_state(r, page) == PAGE_BROKEN) {
        return broken_pays(e, r, page);
    }
    return c->gain >= gain_needed(r, c);
}

/* What could be done with an EQUAL page. */
static PlanAct page_match(KsmEngine *e, KsmRegion *r, size_t page,
                          uint32_t *slot)
{
    uint32_t place = index_lookup(&e->index, r->tag[page]);

    if (place == PLACE_NONE) {
        /* what it was equal to is gone: now it is the candidate */
        if (index_insert(&e->index, r->tag[page], page_id(r, page))) {
            page_set(r, page, PAGE_UNIQUE);
            r->state[page] |= PAGE_INDEXED;
        }
        return ACT_KEEP;
    }
    if (place & PLACE_SLOT) {
        KsmPattern *t = pool_pattern(&e->pool, place & ~PLACE_SLOT);
        unsigned one = 1;

        if (t) {
            *slot = pool_pattern_run(&e->pool, t, &one);
            return *slot == SLOT_NONE ? ACT_KEEP : ACT_MAP;
        }
        *slot = place & ~PLACE_SLOT;
        return pool_full(&e->pool, *slot) ? ACT_NEW : ACT_MAP;
    }
    if (place == page_id(r, page)) {
        return ACT_KEEP;
    }
    /* it may have become the candidate when it was thought to be alone */
    scan_met(e, place);
    return partner_worth(e, place) ? ACT_NEW : ACT_KEEP;
}

/* Neighbours with the same content, from @i on. */
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

static void index_to_slot(KsmEngine *e, uint32_t hash, uint32_t slot)
{
    uint32_t place = index_lookup(&e->index, hash);

    if (place == PLACE_NONE) {
        if (!index_insert(&e->index, hash, slot | PLACE_SLOT)) {
            return;
        }
    } else {
        index_replace(&e->index, hash, place, slot | PLACE_SLOT);
        if (place & PLACE_SLOT) {
            e->pool.users[place & ~PLACE_SLOT] &= ~SLOT_INDEXED;
        } else {
            size_t page;
            KsmRegion *r = engine_page(e, place, &page);

            r->state[page] &= ~PAGE_INDEXED;
            scan_queue(e, r, page / CHUNK_PAGES);
        }
    }
    e->pool.users[slot] |= SLOT_INDEXED;
}

/*
 * No more copies: memory is short, or too much of the pool is kept for forked
 * children, or for good, and nobody knows when it can be given back.
 */
static bool is_tight(KsmEngine *e)
{
    return memcg_is_tight(&e->memcg) ||
           e->pool.leaked > MAX(e->n_pages / 8, LEAKED_MIN);
}

/* The pattern a run of equal pages is to map; made if need be. */
static KsmPattern *pattern_for(KsmEngine *e, KsmRegion *r, size_t page)
{
    uint32_t hash = r->tag[page];
    uint32_t place = index_lookup(&e->index, hash);
    KsmPattern *t = NULL;

    if (place != PLACE_NONE && (place & PLACE_SLOT)) {
        t = pool_pattern(&e->pool, place & ~PLACE_SLOT);
    }
    if (!t && !is_tight(e)) {
        t = pool_pattern_new(&e->pool, page_addr(r, page), hash);
        if (t) {
            index_to_slot(e, hash, t->first);
        }
    }
    return t;
}

/* Plans a run of @n equal pages; slots are taken. */
static void plan_pattern(KsmEngine *e, KsmRegion *r, unsigned i, unsigned n)
{
    KsmPlan *p = &e->plan;
    size_t page = p->chunk * CHUNK_PAGES + i;
    KsmPattern *t = pattern_for(e, r, page);
    bool renewed = false;

    while (t && n) {
        unsigned got = n;
        uint32_t slot = pool_pattern_run(&e->pool, t, &got);

        if (slot == SLOT_NONE) {
            /* every slot has all the users it may have: another replica */
            if (renewed) {
                break;
            }
            renewed = true;
            t = pool_pattern_new(&e->pool, page_addr(r, page), r->tag[page]);
            if (t) {
                index_to_slot(e, r->tag[page], t->first);
            }
            continue;
        }
        for (unsigned k = 0; k < got; k++, i++, n--) {
            p->act[i] = ACT_MAP;
            p->slot[i] = slot + k;
            pool_user_add(&e->pool, slot + k);
        }
    }
    if (t) {
        pool_settle(&e->pool, t->first);
    }
}

/* First look: acts, without taking anything but pattern slots. */
static void plan_acts(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmPlan *p = &e->plan;
    size_t first = chunk * CHUNK_PAGES;
    unsigned n;

    memset(p->act, ACT_KEEP, sizeof(p->act));
    for (unsigned i = 0; i < CHUNK_PAGES; i += n) {
        n = 1;
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
                plan_pattern(e, r, i, n);
                break;
            }
            n = 1;
            p->slot[i] = SLOT_NONE;
            p->act[i] = page_match(e, r, first + i, &p->slot[i]);
            if (p->act[i] == ACT_MAP) {
                pool_user_add(&e->pool, p->slot[i]);
            }
            break;
        default:
            break;
        }
    }
}

void run_drop(KsmEngine *e, unsigned page)
{
    KsmPlan *p = &e->plan;

    if (act_has_slot(p->act[page])) {
        pool_user_drop(&e->pool, p->slot[page]);
    }
}

/* Is page i + 1 of the plan in the same mapping as page i? */
static bool plan_joined(const KsmPlan *p, unsigned i)
{
    if (i + 1 >= CHUNK_PAGES) {
        return false;
    }
    if (act_has_slot(p->act[i]) && act_has_slot(p->act[i + 1])) {
        return p->slot[i] + 1 == p->slot[i + 1];
    }
    return p->act[i] == ACT_NEW && p->act[i + 1] == ACT_NEW;
}

/* Shortest run worth a mapping, by how many mappings are left. */
static unsigned run_shortest(KsmEngine *e)
{
    size_t left = run_vmas_left(e);
    size_t all = e->vmas.limit;

    return left < 64 ? CHUNK_PAGES + 1
         : left > all / 4 * 3 ? 1
         : left > all / 2 ? 2
         : left > all / 4 ? 4
         : left > all / 10 ? 8 : 16;
}

/* Drops runs that are too short; counts what is left. */
static void plan_prune(KsmEngine *e)
{
    KsmPlan *p = &e->plan;
    unsigned shortest = run_shortest(e), n;

    p->zero = p->map = p->fresh = p->runs = 0;
    for (unsigned i = 0; i < CHUNK_PAGES; i += n) {
        n = 1;
        if (p->act[i] == ACT_ZERO) {
            p->zero++;
        }
        if (!act_has_slot(p->act[i]) && p->act[i] != ACT_NEW) {
            continue;
        }
        while (plan_joined(p, i + n - 1)) {
            n++;
        }
        if (n < shortest) {
            for (unsigned k = i; k < i + n; k++) {
                run_drop(e, k);
                p->act[k] = ACT_KEEP;
            }
            continue;
        }
        p->runs++;
        for (unsigned k = i; k < i + n; k++) {
            p->map += p->act[k] == ACT_MAP;
            p->fresh += p->act[k] != ACT_MAP;
        }
    }
}

/* The whole chunk at once; returns pages that will be put back. */
static unsigned plan_whole(KsmPlan *p)
{
    unsigned kept = 0;

    p->span[0] = (PlanSpan) { 0, CHUNK_PAGES };
    p->n_spans = 1;
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        kept += p->act[i] == ACT_KEEP;
    }
    return kept;
}

/* Is all of the chunk in the region? */
static bool region_has(const KsmRegion *r, size_t chunk)
{
    const char *from = page_addr(r, chunk * CHUNK_PAGES);

    return from >= r->addr && from + CHUNK_BYTES <= r->addr + r->len;
}

/*
 * Swapped-out pages are left where they are: before Linux 6.16 moving one
 * while it is swapped in could lose it.
 */
static bool page_is_movable(const KsmRegion *r, size_t page)
{
    PageState s = page_state(r, page);

    return s != PAGE_OUTSIDE && s != PAGE_SWAPPED && !page_is_mapped(r, page);
}

/*
 * Most pages of a span.  Where slots are to be filled, the pages that a short
 * span has just given back are the ones to be written, still in the cache;
 * that is worth another isolation where isolating is cheap.
 */
static unsigned span_most(const KsmEngine *e)
{
    unsigned most = e->cfg.stall_limit_ns / MAX(e->merge.page_ns, 1);

    if (e->plan.fresh) {
        most = MIN(most, MAX(e->merge.isolate_ns / FILL_GAIN_NS,
                             FILL_SPAN_MIN));
    }
    return MAX(most, SPAN_MIN);
}

/* Parts of the chunk to isolate; returns pages that will be put back. */
static unsigned plan_spans(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmPlan *p = &e->plan;
    /* pages not moved at all against another isolation */
    unsigned gap = (e->merge.isolate_ns + DROP_NS) / MAX(e->merge.copy_ns, 100);
    const KsmChunk *c = &r->chunk[chunk];
    unsigned kept = 0;
    unsigned most = span_most(e);
    PlanSpan *s = NULL;

    if ((c->flags & CHUNK_HUGE) && !c->mapped && region_has(r, chunk)) {
        return plan_whole(p);
    }
    p->n_spans = 0;
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        size_t page = chunk * CHUNK_PAGES + i;

        if (!page_is_movable(r, page)) {
            s = NULL;
        } else if (p->act[i] == ACT_KEEP) {
            continue;
        } else if (s && i - (s->first + s->n) <= gap &&
                   i - s->first < most) {
            kept += i - (s->first + s->n);
            s->n = i + 1 - s->first;
        } else {
            s = &p->span[p->n_spans++];
            *s = (PlanSpan) { i, 1 };
        }
    }
    return kept;
}

static bool plan_pays(KsmEngine *e, KsmRegion *r, unsigned kept)
{
    KsmPlan *p = &e->plan;
    unsigned gain = p->zero + p->map + p->fresh;
    uint64_t cost;

    if (!gain) {
        return false;
    }
    cost = p->n_spans * (e->merge.isolate_ns + DROP_NS) +
           p->runs * e->merge.map_ns + kept * e->merge.copy_ns;
    return gain >= gain_needed(r, &r->chunk[p->chunk]) &&
           cost / gain <= RUN_PAGE_WORTH_NS;
}

/* Takes slots for the ACT_NEW pages, in order. */
static unsigned promote_run(KsmEngine *e, KsmRegion *r, unsigned i,
                            unsigned n, KsmReason *why)
{
    KsmPlan *p = &e->plan;
    size_t page = p->chunk * CHUNK_PAGES + i;
    uint32_t slot = is_tight(e) ? SLOT_NONE : pool_take(&e->pool, &n);

    if (slot == SLOT_NONE) {
        *why = KSM_REASON_NO_MEMORY;
        return 0;
    }
    for (unsigned k = 0; k < n; k++) {
        e->pool.hash[slot + k] = r->tag[page + k];
        pool_user_add(&e->pool, slot + k);
        index_to_slot(e, r->tag[page + k], slot + k);
        p->act[i + k] = ACT_FILL;
        p->slot[i + k] = slot + k;
    }
    return n;
}

/* A page equal to one that was promoted in this very chunk maps its slot. */
static bool promoted_already(KsmEngine *e, KsmRegion *r, unsigned i)
{
    KsmPlan *p = &e->plan;
    uint32_t hash = r->tag[p->chunk * CHUNK_PAGES + i];
    uint32_t place = index_lookup(&e->index, hash);

    if (place == PLACE_NONE || !(place & PLACE_SLOT) ||
        pool_full(&e->pool, place & ~PLACE_SLOT)) {
        return false;
    }
    p->act[i] = ACT_MAP;
    p->slot[i] = place & ~PLACE_SLOT;
    pool_user_add(&e->pool, p->slot[i]);
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
 * Where runs of pages to be copied end: a page whose content another one to
 * be copied had before it maps that one's slot, and is not copied again.
 */
static void runs_cut(const KsmPlan *p, const KsmRegion *r, bool *cut)
{
    const uint32_t *tag = r->tag + p->chunk * CHUNK_PAGES;
    PageSet set = { 0 };

    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        cut[i] = p->act[i] == ACT_NEW && !set_add(&set, tag, i);
    }
}

static void plan_promote(KsmEngine *e, KsmRegion *r, KsmReason *why)
{
    KsmPlan *p = &e->plan;
    bool cut[CHUNK_PAGES];
    unsigned n;

    runs_cut(p, r, cut);
    for (unsigned i = 0; i < CHUNK_PAGES; i += n) {
        n = 1;
        if (p->act[i] != ACT_NEW || promoted_already(e, r, i)) {
            continue;
        }
        while (plan_joined(p, i + n - 1) && !cut[i + n]) {
            n++;
        }
        n = promote_run(e, r, i, n, why);
        if (!n) {
            p->act[i] = ACT_KEEP;
            n = 1;
        }
    }
}

static void plan_release(KsmEngine *e)
{
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        run_drop(e, i);
        e->plan.act[i] = ACT_KEEP;
    }
}

bool run_plan(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmPlan *p = &e->plan;
    KsmChunk *c = &r->chunk[chunk];
    KsmReason why = KSM_REASON_NOT_WORTH;

    p->region = r;
    p->chunk = chunk;
    e->pool.node = r->node;
    KSM_TSAN_IGNORE_BEGIN();    /* what is copied may be written */
    plan_acts(e, r, chunk);
    KSM_TSAN_IGNORE_END();
    plan_prune(e);
    if (!plan_pays(e, r, plan_spans(e, r, chunk))) {
        plan_release(e);
        return refuse(e, c, run_shortest(e) > 1 ? KSM_REASON_VMA_LIMIT : why);
    }
    if (p->fresh) {
        plan_promote(e, r, &why);
        plan_prune(e);
        if (!plan_pays(e, r, plan_spans(e, r, chunk))) {
            plan_release(e);
            return refuse(e, c, why);
        }
    }
    chunk_set_reason(r, c, KSM_REASON_NOT_WORTH);
    return true;
}

/* Lines of /proc/self/maps; negative: cannot be read. */
static ssize_t maps_lines(KsmEngine *e)
{
    char buf[4096];
    ssize_t n, lines = 0;
    off_t at = 0;

    while ((n = prim.read_at(e->maps, buf, sizeof(buf), at)) > 0) {
        for (ssize_t i = 0; i < n; i++) {
            lines += buf[i] == '\n';
        }
        at += n;
    }
    return n < 0 ? n : lines;
}

typedef struct MapsLine {
    uintptr_t number[2];
    unsigned field;         /* 0, 1: in a number; 2: behind them */
} MapsLine;

/* Reads a line "START-END ..." character by character; true: it has ended. */
static bool line_char(MapsLine *l, char c)
{
    if (l->field < 2 && g_ascii_isxdigit(c)) {
        l->number[l->field] = l->number[l->field] << 4 |
                              g_ascii_xdigit_value(c);
    } else {
        l->field++;
    }
    return c == '\n';
}

/* No memory is allocated: that may need a mapping. */
bool run_vma_at(KsmEngine *e, const void *addr, char **start, char **end)
{
    MapsLine line = { .field = 0 };
    char buf[4096];
    ssize_t n;
    off_t at = 0;

    while ((n = prim.read_at(e->maps, buf, sizeof(buf), at)) > 0) {
        for (ssize_t i = 0; i < n; i++) {
            if (!line_char(&line, buf[i])) {
                continue;
            }
            if (line.number[0] <= (uintptr_t)addr &&
                line.number[1] > (uintptr_t)addr) {
                *start = (char *)line.number[0];
                *end = (char *)line.number[1];
                return true;
            }
            line = (MapsLine) { .field = 0 };
        }
        at += n;
    }
    return false;
}

static void vmas_count(KsmEngine *e)
{
    g_autofree char *max = prim_read_file("/proc/sys/vm/max_map_count", NULL);
    size_t limit = max ? g_ascii_strtoull(max, NULL, 10) : VMAS_GUESS;
    ssize_t lines = maps_lines(e);

    e->vmas.limit = e->cfg.vma_reserve
                    ? limit - MIN(limit, e->cfg.vma_reserve)
                    : limit * (100 - e->cfg.vma_reserve_percent) / 100;
    e->vmas.max = limit;
    e->vmas.used = lines < 0 ? e->vmas.used + e->vmas.since : lines;
    e->vmas.since = 0;
    e->vmas.counted = prim.now_ns();
}

static size_t vmas_below(const KsmEngine *e, size_t limit)
{
    size_t left = limit - MIN(limit, e->vmas.used);

    return left - MIN(left, e->vmas.since);
}

/* Counts them again if the last count may be far from the truth. */
static void vmas_look(KsmEngine *e)
{
    size_t left = e->vmas.limit - MIN(e->vmas.limit, e->vmas.used);
    uint64_t age = prim.now_ns() - e->vmas.counted;

    if (!e->vmas.counted ||
        (e->vmas.since > left / 4 && age > RECOUNT_MIN_NS) ||
        ((e->vmas.since || left < e->vmas.limit / 2) && age > RECOUNT_NS)) {
        vmas_count(e);
    }
}

size_t run_vmas_left(KsmEngine *e)
{
    vmas_look(e);
    return vmas_below(e, e->vmas.limit);
}

size_t run_vmas_free(KsmEngine *e)
{
    vmas_look(e);
    return vmas_below(e, e->vmas.max);
}

void run_vmas_full(KsmEngine *e)
{
    e->vmas.counted = 0;
}
