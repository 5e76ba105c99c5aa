/*
 * compact: few mappings, also after hours
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/prim.h"
#include "engine/compact.h"

#define SWEEP_NS        UINT64_C(30000000000)
#define CREDIT_SHARE    2u      /* merged pages for one that is gathered */
#define CREDIT_MOST     4u      /* ... of all merged ones: part, at once */
#define SWEEP_MOST      16u     /* ... of all that are merged: part */
#define BEHIND_MOST     64u     /* ... that may stay behind */
#define VAIN_MOST       (GATHER_AGE + 1)
#define SKIP_STEP       64u     /* chunks passed over in one go */

static size_t pages_merged(const KsmEngine *e)
{
    size_t n = 0;

    for (guint i = 0; i < e->regions->len; i++) {
        const KsmRegion *r = g_ptr_array_index(e->regions, i);

        n += r->count[PAGE_MERGED];
    }
    return n;
}

static void credit_earn(KsmEngine *e)
{
    KsmCompact *c = &e->compact;
    size_t earned = (e->total.merged - c->merged) / CREDIT_SHARE;

    if (earned) {
        c->merged = e->total.merged;
        c->credit += earned;
        c->vain = 0;
    }
    c->credit = MIN(c->credit, pages_merged(e) / CREDIT_MOST);
}

/* Pages that this sweep may still gather. */
static size_t pages_left(KsmEngine *e)
{
    const KsmCompact *c = &e->compact;
    size_t most = MAX(pages_merged(e) / SWEEP_MOST, CHUNK_PAGES);

    return memcg_is_tight(&e->memcg)
           ? 0 : MIN(c->credit, most - MIN(most, c->gathered));
}

static void sweep_begin(KsmCompact *c, CompactPhase phase)
{
    c->phase = phase;
    c->at = 0;
    c->behind = 0;
}

/* False: there is no reason for one. */
static bool sweep_start(KsmEngine *e)
{
    KsmCompact *c = &e->compact;

    c->due = prim.now_ns() + SWEEP_NS;
    credit_earn(e);
    if (c->behind > pages_merged(e) / BEHIND_MOST) {
        sweep_begin(c, COMPACT_FOLLOW);
        return true;
    }
    c->gathered = 0;
    if (c->credit) {
        sweep_begin(c, COMPACT_GATHER);
    }
    return c->credit;
}

static void sweep_end(KsmCompact *c)
{
    if (c->phase == COMPACT_GATHER && c->gathered) {
        c->vain = 0;
        sweep_begin(c, COMPACT_FOLLOW);
        return;
    }
    if (c->phase == COMPACT_GATHER && ++c->vain == VAIN_MOST) {
        c->credit = 0;
    }
    c->phase = COMPACT_REST;
}

static bool may_be_moved(KsmRegion *r)
{
    return r->ops && r->ops->busy && !r->leaving && !r->rests &&
           !r->unmerging && !region_inhibited(r);
}

static void chunk_step(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmCompact *c = &e->compact;
    bool may = may_be_moved(r);
    size_t left, n;

    if (c->phase == COMPACT_FOLLOW) {
        c->behind += gather_follow(&e->gather, r, chunk, may);
        return;
    }
    if (!may) {
        return;
    }
    gather_age(r, chunk);
    left = pages_left(e);
    if (left) {
        n = gather_chunk(&e->gather, r, chunk, left);
        c->gathered += n;
        c->credit -= MIN(c->credit, n);
    }
}

/* The next chunk; at the end of the directory the sweep's end. */
static void sweep_step(KsmEngine *e)
{
    KsmCompact *c = &e->compact;

    for (unsigned i = 0; i < SKIP_STEP; i++) {
        KsmRegion *r;
        size_t chunk;

        if (!directory_next(&e->dir, &c->at)) {
            sweep_end(c);
            return;
        }
        r = directory_chunk(&e->dir, c->at++, &chunk);
        if (r->chunk[chunk].mapped) {
            chunk_step(e, r, chunk);
            return;
        }
    }
}

bool compact_step(KsmEngine *e)
{
    bool rests = e->compact.phase == COMPACT_REST;
    uint64_t cpu;

    if (!e->run || e->uffd_wp < 0 ||
        (rests && prim.now_ns() < e->compact.due) ||
        !store_gives_up(e->content.store) || (rests && !sweep_start(e))) {
        return false;
    }
    cpu = prim.cpu_ns();
    sweep_step(e);
    e->total.merge_time += prim.cpu_ns() - cpu;
    return e->compact.phase != COMPACT_REST;
}
