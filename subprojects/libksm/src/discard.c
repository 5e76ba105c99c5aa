/*
 * libksm: what the owner gives back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * See discard.h for the idea.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "dirty.h"
#include "engine.h"
#include "discard.h"
#include "prim.h"

#define VMAS_MIN        256u    /* left: below, discard maps no more */
#define DECAY_NS        UINT64_C(10000000000)
#define LOOK_NS         UINT64_C(50000000)      /* between looks */
#define PRESSURE_NS     UINT64_C(2000000000)    /* a sign counts so long */

/* Pages from @page on that are alike: all mapping the pool, or none. */
static size_t uniform_run(const KsmRegion *r, size_t page, size_t end)
{
    bool mapped = page_is_mapped(r, page);
    size_t n = 1;

    while (page + n < end && (page + n) % CHUNK_PAGES &&
           page_is_mapped(r, page + n) == mapped) {
        n++;
    }
    return n;
}

/* Zeroes where a mapping cannot be had. */
static int zero_in_place(KsmRegion *r, size_t page, size_t n)
{
    int ret = prim.advise(page_addr(r, page), n * PAGE_BYTES,
                          MADV_POPULATE_WRITE);

    if (ret == 0) {
        memset(page_addr(r, page), 0, n * PAGE_BYTES);
    }
    return ret;
}

static int discard_run(KsmRegion *r, size_t page, size_t n)
{
    bool mapped = page_is_mapped(r, page);
    PageState to = PAGE_HOLE;
    int ret;

    if (mapped) {
        bool room = run_vmas_left(r->engine) > VMAS_MIN;

        ret = room ? region_map_anonymous(r, page, n) : -ENOMEM;
        r->engine->vmas.since += 2;
        if (ret < 0) {
            ret = zero_in_place(r, page, n);
            to = PAGE_BROKEN;
        }
    } else {
        ret = prim.advise(page_addr(r, page), n * PAGE_BYTES, MADV_DONTNEED);
    }
    if (ret < 0) {
        return ret;
    }
    for (size_t i = page; i < page + n; i++) {
        uint32_t tag = r->tag[i];

        region_leave(r, i, to);
        r->tag[i] = tag;
    }
    if (mapped && to == PAGE_HOLE) {
        dirty_track(r, page, n);
    }
    return 0;
}

int discard_range(KsmRegion *r, size_t page, size_t n)
{
    size_t end = page + n, k;
    int ret = 0;

    for (size_t i = page; i < end && ret == 0; i += k) {
        size_t chunk = i / CHUNK_PAGES;

        k = uniform_run(r, i, end);
        ret = discard_run(r, i, k);
        region_count_runs(r, chunk);
        r->chunk[chunk].flags |= CHUNK_VISIT;
    }
    if (end / CHUNK_PAGES < r->n_chunks) {
        region_count_runs(r, end / CHUNK_PAGES);
    }
    return ret;
}

/* Anonymous pages: lazily. */
static int hint_run(KsmRegion *r, size_t page, size_t n)
{
    KsmChunk *c = page_chunk(r, page);
    int ret = prim.advise(page_addr(r, page), n * PAGE_BYTES, MADV_FREE);

    if (ret < 0) {
        return ret;
    }
    for (size_t i = page; i < page + n; i++) {
        PageState s = page_state(r, i);

        if (s != PAGE_HOLE && s != PAGE_GIVEN && s != PAGE_FREED) {
            region_leave(r, i, PAGE_FREED);
            c->lazy++;
            /* a log may still tell of a write from before the hint */
            r->history[i] = r->dirty == KSM_DIRTY_LOG;
        }
    }
    dirty_protect(r, page, n);
    return 0;
}

/*
 * Is the host, or our control group, short of memory?  A sign of that counts
 * for a while; where there is no pressure information: no.
 */
static bool pressure(KsmEngine *e)
{
    uint64_t now = prim.now_ns();
    uint64_t elapsed = now - e->pressure_looked;

    if (e->pressure && elapsed >= LOOK_NS) {
        e->pressure_looked = now;
        if (ksm_pressure_sign(e->pressure, (int64_t)elapsed)) {
            e->pressure_until = now + PRESSURE_NS;
        }
    }
    return now < e->pressure_until;
}

int discard_hint(KsmRegion *r, size_t page, size_t n)
{
    KsmEngine *e = r->engine;
    KsmFreePolicy policy = e->cfg.free_policy;
    bool eager = policy == KSM_FREE_EAGER ||
                 (policy == KSM_FREE_AUTO && pressure(e));
    size_t end = page + n, k;
    int ret = 0;

    for (size_t i = page; i < end && ret == 0; i += k) {
        k = uniform_run(r, i, end);
        if (eager || page_is_mapped(r, i)) {
            ret = discard_range(r, i, k);
        } else {
            ret = hint_run(r, i, k);
        }
    }
    if (ret == 0) {
        r->free_hinted += n;
        e->total.free_hinted += n;
        r->hinted_at = r->hinted_at ? r->hinted_at : prim.now_ns();
    }
    return ret;
}

/* Asks the kernel for the freed pages of a chunk. */
static void chunk_reclaim(KsmRegion *r, size_t chunk)
{
    size_t page = chunk * CHUNK_PAGES, end = page + CHUNK_PAGES, n;

    for (; page < end; page += MAX(n, 1)) {
        n = 0;
        while (page + n < end && page_state(r, page + n) == PAGE_FREED &&
               !(r->state[page + n] & PAGE_WRITTEN)) {
            n++;
        }
        if (n) {
            prim.advise(page_addr(r, page), n * PAGE_BYTES, MADV_PAGEOUT);
        }
    }
    r->chunk[chunk].flags |= CHUNK_VISIT;
}

void discard_settle(KsmRegion *r)
{
    KsmEngine *e = r->engine;

    if (e->cfg.free_policy != KSM_FREE_AUTO || !r->hinted_at ||
        (prim.now_ns() - r->hinted_at < DECAY_NS && !pressure(e))) {
        return;
    }
    r->hinted_at = 0;
    for (size_t c = 0; c < r->n_chunks; c++) {
        if (r->chunk[c].lazy) {
            chunk_reclaim(r, c);
        }
    }
}
