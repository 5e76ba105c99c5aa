/*
 * compact: few mappings, also after hours
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/prim.h"
#include "engine/compact.h"

#define SWEEP_NS        UINT64_C(30000000000)
#define REST_SHARE      64u     /* times what a sweep has cost, at least */
#define CREDIT_SHARE    2u      /* merged pages for one that is gathered */
/* Of all that are merged, one in so many: */
#define CREDIT_MOST     4u      /* what there is of credit, at most */
#define SWEEP_MOST      16u     /* gathered in a sweep */
#define BEHIND_MOST     64u     /* behind when another one begins */
#define CREDIT_LEAST    128u    /* ... for which one is made */
#define VAIN_MOST       (GATHER_AGE + 1)    /* sweeps until credit is void */
#define BACKOFF_MAX     6u      /* log2, of rests after sweeps in vain */
#define DOUBT_FIRST     2u      /* log2, of what sweeps gather less ... */
#define DOUBT_MORE      2u      /* ... after one that has not paid ... */
#define DOUBT_MAX       4u      /* ... and then credit is void */
#define SKIP_STEP       64u     /* chunks passed over in one go */

/* Pages of all regions; *@all: all of them could move. */
static size_t pages_merged(const KsmEngine *e, bool *all)
{
    size_t n = 0;

    *all = true;
    for (guint i = 0; i < e->regions->len; i++) {
        const KsmRegion *r = g_ptr_array_index(e->regions, i);

        n += r->count[PAGE_MERGED];
        *all &= !r->count[PAGE_MERGED] || (r->ops && r->ops->busy);
    }
    return n;
}

static uint64_t runs_merged(const KsmEngine *e)
{
    uint64_t runs = 0;

    for (guint i = 0; i < e->regions->len; i++) {
        runs += ((const KsmRegion *)g_ptr_array_index(e->regions, i))->runs;
    }
    return runs;
}

static void credit_earn(KsmEngine *e, size_t merged)
{
    KsmCompact *c = &e->compact;
    uint64_t earned = e->total.merged - c->merged;

    if (earned / CREDIT_SHARE > merged / CREDIT_LEAST) {
        c->merged = e->total.merged;
        c->credit += earned / CREDIT_SHARE;
        c->tries = 0;
    }
    c->credit = MIN(c->credit, merged / CREDIT_MOST);
}

static void sweep_begin(KsmCompact *c, CompactPhase phase)
{
    c->phase = phase;
    c->id = c->page = 0;
    c->missed = 0;
}

/* False: there is no reason for one. */
static bool sweep_start(KsmEngine *e)
{
    KsmCompact *c = &e->compact;
    bool all, tight = memcg_is_tight(&e->memcg);
    size_t merged = pages_merged(e, &all);

    c->due = prim.now_ns() + SWEEP_NS;
    c->spent = c->moving = c->gathered = 0;
    c->gone = 0;
    c->skipped = false;
    credit_earn(e, merged);
    if (tight) {
        return false;       /* what is read may have been swapped out */
    }
    if (c->credit > merged / CREDIT_LEAST && all &&
        c->behind <= merged / BEHIND_MOST) {
        sweep_begin(c, COMPACT_GATHER);
        return true;
    }
    if (c->behind) {
        sweep_begin(c, COMPACT_FOLLOW);
    }
    return c->behind;
}

static void gather_end(KsmCompact *c)
{
    c->vain = c->moving ? 0 : c->vain + 1;
    c->tries = c->moving ? 0 : c->tries + !c->skipped;
    if (c->tries >= VAIN_MOST) {
        c->credit = 0;
    }
    if (c->moving || c->behind) {
        sweep_begin(c, COMPACT_FOLLOW);
    } else {
        c->phase = COMPACT_REST;
    }
}

/* Were the mappings that went worth it? */
static void sweep_judge(KsmCompact *c)
{
    if (c->gone > 0 && c->gone * MAPPING_WORTH_NS >= c->moving) {
        c->doubt -= c->doubt > 0;
        return;
    }
    c->doubt += DOUBT_MORE;
    if (c->doubt >= DOUBT_MAX) {
        c->doubt = DOUBT_FIRST;
        c->credit = 0;
    }
}

static void follow_end(KsmCompact *c)
{
    if (c->gathered && c->moving) {
        sweep_judge(c);
    }
    c->stuck = c->missed >= c->behind && !c->moving ? c->stuck + 1 : 0;
    c->behind = c->missed;
    c->phase = COMPACT_REST;
}

/* Rests are longer where nothing comes of sweeps. */
static void sweep_end(KsmCompact *c)
{
    unsigned vain;

    if (c->phase == COMPACT_GATHER) {
        gather_end(c);
    } else {
        follow_end(c);
    }
    if (c->phase == COMPACT_REST) {
        vain = MAX(c->vain - MIN(c->vain, VAIN_MOST), c->stuck);
        c->due = prim.now_ns() + (MAX(SWEEP_NS, c->spent * REST_SHARE)
                                  << MIN(vain, BACKOFF_MAX));
    }
}

static bool may_be_moved(KsmRegion *r)
{
    return r->ops && r->ops->busy && !r->leaving && !r->rests &&
           !r->unmerging && !region_inhibited(r);
}

/* Pages that this sweep may still gather. */
static size_t pages_left(KsmEngine *e)
{
    const KsmCompact *c = &e->compact;
    bool all;
    size_t most = MAX(pages_merged(e, &all) / SWEEP_MOST, CHUNK_PAGES) >>
                  c->doubt;

    return memcg_is_tight(&e->memcg)
           ? 0 : MIN(c->credit, most - MIN(most, c->gathered));
}

/* What is at hand of it.  Returns the page to go on with, CHUNK_PAGES: none. */
static unsigned chunk_gather(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmCompact *c = &e->compact;
    size_t first = chunk * CHUNK_PAGES, next;
    unsigned tried;

    if (!may_be_moved(r)) {
        c->skipped = true;
        return CHUNK_PAGES;
    }
    if (!c->page) {
        gather_age(r, chunk);
    }
    if (r->chunk[chunk].runs < 2 || !pages_left(e)) {
        c->skipped |= r->chunk[chunk].runs >= 2;
        return CHUNK_PAGES;
    }
    next = gather_next(&e->gather, r, first + c->page, first + CHUNK_PAGES,
                       &tried);
    c->gathered += tried;
    c->credit -= MIN(c->credit, tried);
    return next - first;
}

static unsigned chunk_follow(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmCompact *c = &e->compact;
    size_t first = chunk * CHUNK_PAGES;

    return gather_follow(&e->gather, r, first + c->page, first + CHUNK_PAGES,
                         may_be_moved(r), &c->missed) - first;
}

/* Some pages of the chunk at hand; at the end of the directory the sweep's. */
static void sweep_step(KsmEngine *e)
{
    KsmCompact *c = &e->compact;

    for (unsigned i = 0; i < SKIP_STEP; i++) {
        uint32_t id = c->id;
        KsmRegion *r;
        size_t chunk;

        if (!directory_next(&e->dir, &c->id)) {
            sweep_end(c);
            return;
        }
        c->page = c->id == id ? c->page : 0;
        r = directory_chunk(&e->dir, c->id, &chunk);
        if (r->chunk[chunk].mapped) {
            c->page = c->phase == COMPACT_GATHER ? chunk_gather(e, r, chunk)
                                                 : chunk_follow(e, r, chunk);
            if (c->page < CHUNK_PAGES) {
                return;
            }
            i = SKIP_STEP;
        }
        c->page = 0;
        c->id++;
    }
}

void compact_init(KsmEngine *e)
{
    e->compact = (KsmCompact) { .doubt = DOUBT_FIRST };
}

bool compact_step(KsmEngine *e)
{
    KsmCompact *c = &e->compact;
    bool rests = c->phase == COMPACT_REST;
    uint64_t cpu, moved = e->gather.moved, runs;

    if (!e->run || e->uffd_wp < 0 || (rests && prim.now_ns() < c->due) ||
        !store_gives_up(e->content.store) || (rests && !sweep_start(e))) {
        return false;
    }
    runs = runs_merged(e);
    cpu = prim.cpu_ns();
    sweep_step(e);
    cpu = prim.cpu_ns() - cpu;
    if (e->gather.moved > moved) {
        c->gone += (int64_t)(runs - runs_merged(e));
        c->moving += cpu;
    }
    c->spent += cpu;
    e->total.merge_time += cpu;
    return c->phase != COMPACT_REST;
}
