/*
 * parts: which parts of a chunk are isolated, and whether that pays
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "merge/parts.h"

#define FILL_SPAN_MIN   128u    /* pages */
#define FILL_GAIN_NS    128u    /* a page, for what is still in the cache */
#define COLD_SHARE      8u      /* of what others must save is enough ... */
#define COLD_WORTH      4u      /* ... and each page may cost so much more ... */
#define COLD_FEW        2u      /* ... if it is broken twice that ... */
#define LATE_NS         UINT64_C(3000000)   /* ... but not all, nor if late */

static bool is_cold(const KsmChunk *c)
{
    return (c->flags & CHUNK_HUGE) && c->same;
}

/* What is written after such a merge keeps its mapping until it is quiet. */
bool parts_late(const KsmChunk *c)
{
    return !(c->flags & CHUNK_HUGE) && c->late >= LATE_MIN &&
           !(c->written + c->fresh + c->broken);
}

unsigned parts_gain(const KsmPlan *p, const KsmChunk *c)
{
    unsigned least = c->flags & CHUNK_HUGE ? p->split_min_pages : 1;

    return is_cold(c) ? MAX(least / COLD_SHARE, 1) : least;
}

/*
 * Swapped-out pages stay: before Linux 6.16 moving one while it is swapped in
 * could lose it.
 */
static bool page_is_movable(const KsmRegion *r, size_t page)
{
    PageState s = page_state(r, page);

    return s != PAGE_OUTSIDE && s != PAGE_SWAPPED && s != PAGE_BARRED &&
           s != PAGE_KERNEL && !page_is_mapped(r, page);
}

/* It was a huge page when it was looked at, and may not be any more. */
static bool is_huge(const KsmRegion *r, size_t chunk)
{
    const KsmChunk *c = &r->chunk[chunk];

    if (!(c->flags & CHUNK_HUGE) || c->mapped || !chunk_is_whole(r, chunk)) {
        return false;
    }
    for (size_t i = chunk * CHUNK_PAGES; i < (chunk + 1) * CHUNK_PAGES; i++) {
        if (!page_is_movable(r, i)) {
            return false;
        }
    }
    return true;
}

/* CPU time that a page takes while its span is isolated. */
static uint64_t page_cost(const KsmPlan *p, const KsmCosts *c, unsigned i)
{
    bool joined = i > 0 && plan_joined(p, i - 1);

    switch ((PlanAct)p->act[i]) {
    case ACT_KEEP:
        return c->copy_ns;
    case ACT_ZERO:
        return PAGE_DONE_NS;
    default:
        return PAGE_DONE_NS + (joined ? 0 : c->map_ns);
    }
}

/* ... for all pages, but isolating them. */
static uint64_t chunk_cost(const KsmPlan *p)
{
    uint64_t ns = 0;

    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        ns += page_cost(p, p->costs, i);
    }
    return ns;
}

void parts_whole(KsmPlan *p)
{
    p->breaks = false;
    p->span[0] = (PlanSpan) { 0, CHUNK_PAGES };
    p->n_spans = 1;
    p->kept = CHUNK_PAGES - p->zero - p->map - p->fresh;
}

/*
 * Most pages of a span.  Where slots are to be filled, the pages that a short
 * span has just given back are written next, still in the cache: that is worth
 * another isolation where isolating is cheap.
 */
static unsigned span_most(const KsmPlan *p)
{
    unsigned most = p->stall_limit_ns / MAX(p->costs->page_ns, 1);

    if (p->fresh) {
        most = MIN(most, MAX(p->costs->isolate_ns / FILL_GAIN_NS,
                             FILL_SPAN_MIN));
    }
    return MAX(most, SPAN_MIN);
}

/* For what is done while a span is isolated; at least what isolating takes. */
static uint64_t span_budget(const KsmPlan *p)
{
    uint64_t isolate = p->costs->isolate_ns;

    return MAX(p->stall_limit_ns, 2 * isolate) - isolate;
}

static void spans_make(KsmPlan *p)
{
    const KsmCosts *c = p->costs;
    /* pages not moved at all against another isolation */
    unsigned gap = (c->isolate_ns + DROP_NS) / MAX(c->copy_ns, 100);
    unsigned most = span_most(p);
    uint64_t budget = span_budget(p), spent = 0;
    PlanSpan *s = NULL;

    p->n_spans = p->kept = 0;
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        uint64_t cost = page_cost(p, c, i);
        unsigned between = s ? i - (s->first + s->n) : 0;
        bool few = s && i - s->first < SPAN_MIN;

        if (!page_is_movable(p->region, p->chunk * CHUNK_PAGES + i)) {
            s = NULL;
        } else if (p->act[i] == ACT_KEEP) {
            continue;
        } else if (s && between <= gap && i - s->first < most &&
                   (few || spent + between * c->copy_ns + cost <= budget)) {
            spent += between * c->copy_ns + cost;
            p->kept += between;
            s->n = i + 1 - s->first;
        } else {
            s = &p->span[p->n_spans++];
            *s = (PlanSpan) { i, 1 };
            spent = cost;
        }
    }
}

/* What the spans cost beyond their runs. */
static uint64_t parts_cost(const KsmPlan *p, const KsmCosts *c)
{
    unsigned moved = p->kept + p->zero + p->map + p->fresh;

    return p->n_spans * (c->isolate_ns + DROP_NS) + p->kept * c->copy_ns +
           (p->breaks ? BREAK_NS + moved * c->move_ns : 0);
}

void parts_make(KsmPlan *p)
{
    uint64_t cost;

    p->breaks = is_huge(p->region, p->chunk);
    spans_make(p);
    if (!p->breaks || chunk_cost(p) > span_budget(p)) {
        return;
    }
    cost = parts_cost(p, p->costs);
    parts_whole(p);
    if (cost < parts_cost(p, p->costs)) {
        p->breaks = true;
        spans_make(p);
    }
}

/* What so many pages of the chunk may cost; ns. */
static uint64_t pages_worth(const KsmPlan *p, unsigned pages)
{
    uint64_t worth = pages * PAGE_WORTH_NS;

    if (is_cold(&p->region->chunk[p->chunk])) {
        worth *= COLD_WORTH;
        return p->breaks ? MAX(worth, MIN(worth * COLD_FEW, LATE_NS)) : worth;
    }
    /* many spans: the CPU of one step has a limit, too */
    return p->late ? MAX(worth, MIN(worth * COLD_WORTH, LATE_NS)) : worth;
}

bool parts_pay(const KsmPlan *p, const KsmCosts *c)
{
    const KsmChunk *chunk = &p->region->chunk[p->chunk];
    unsigned gain = p->zero + p->map + p->fresh;

    return gain && gain >= parts_gain(p, chunk) &&
           parts_cost(p, c) + p->runs * c->map_ns <= pages_worth(p, gain);
}
