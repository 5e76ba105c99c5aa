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
        bool room = run_vmas_free(r->engine) > VMAS_MIN;

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
        region_leave(r, i, to);
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

/*
 * Is a write to freed pages to be noticed at once?  Cheap for a huge page:
 * one fault.  For small pages it would cost as many faults as freeing lazily
 * saves.
 */
static bool worth_protecting(const KsmRegion *r, size_t page, size_t n)
{
    return r->dirty == KSM_DIRTY_PAGEMAP && n == CHUNK_PAGES &&
           page % CHUNK_PAGES == 0 &&
           (r->chunk[page / CHUNK_PAGES].flags & CHUNK_HUGE);
}

/* Anonymous pages of one chunk: lazily. */
static int hint_run(KsmRegion *r, size_t page, size_t n)
{
    KsmChunk *c = page_chunk(r, page);
    bool protect = worth_protecting(r, page, n);
    bool blind = !protect && r->dirty != KSM_DIRTY_LOG;
    int ret = freer_release_lazily(r->engine->freer, page_addr(r, page),
                                   n * PAGE_BYTES);

    if (ret < 0) {
        return ret;
    }
    for (size_t i = page; i < page + n; i++) {
        PageState s = page_state(r, i);

        if (s == PAGE_GIVEN) {
            continue;
        }
        region_leave(r, i, PAGE_FREED);
        chunk_set_lazy(r, c, c->lazy + (s != PAGE_HOLE));
        r->state[i] |= blind ? PAGE_BLIND : 0;
        /* a log may still tell of a write from before the hint */
        r->history[i] = r->dirty == KSM_DIRTY_LOG;
    }
    c->flags |= blind ? CHUNK_BLIND : 0;
    if (protect) {
        dirty_protect(r, page, n);
    }
    return 0;
}

int discard_hint(KsmRegion *r, size_t page, size_t n)
{
    bool lazy = freer_is_lazy(r->engine->freer);
    size_t end = page + n, k;
    int ret = 0;

    for (size_t i = page; i < end && ret == 0; i += k) {
        k = uniform_run(r, i, end);
        if (!lazy || page_is_mapped(r, i)) {
            ret = discard_range(r, i, k);
        } else {
            ret = hint_run(r, i, k);
        }
    }
    if (ret == 0) {
        r->free_hinted += n;
        r->engine->total.free_hinted += n;
    }
    return ret;
}

/*
 * The kernel was asked to take what is lazily free in a part of a chunk: what
 * is there all the same is in use, as far as it was not known.
 */
static int settle_pages(KsmRegion *r, size_t page, size_t n)
{
    KsmEngine *e = r->engine;
    int ret = engine_kinds(e, page_addr(r, page), n, KINDS_FAST, e->kinds);

    for (size_t i = 0; i < n && ret == 0; i++) {
        if (page_state(r, page + i) != PAGE_FREED) {
            continue;
        }
        if ((r->state[page + i] & PAGE_BLIND) && (e->kinds[i] & PM_PRESENT)) {
            page_set(r, page + i, PAGE_NEW);
            page_mark(r, page + i, true);
        }
        r->state[page + i] &= ~PAGE_BLIND;
        r->history[page + i] = 0;
    }
    page_chunk(r, page)->flags &= ~CHUNK_BLIND;
    page_chunk(r, page)->flags |= CHUNK_VISIT;
    return ret;
}

/* The range has what was freed of a chunk, and what is in between. */
static void give_back(KsmRegion *r, size_t page, size_t end)
{
    size_t n;

    for (; page < end; page += MAX(n, 1)) {
        n = 0;
        while (page + n < end && page_state(r, page + n) == PAGE_FREED) {
            n++;
        }
        if (n) {
            freer_give_back(r->engine->freer, page_addr(r, page),
                            n * PAGE_BYTES);
        }
    }
}

static bool settle_range(KsmRegion *r, char *addr, size_t len)
{
    char *start = MAX(addr, r->addr);
    char *end = MIN(addr + len, r->addr + r->len);
    size_t page = (start - r->base) / PAGE_BYTES;

    if (start >= end) {
        return true;
    }
    if (region_inhibited(r)) {
        return false;
    }
    give_back(r, page, page + (end - start) / PAGE_BYTES);
    return settle_pages(r, page, (end - start) / PAGE_BYTES) == 0;
}

bool discard_settle(KsmEngine *e)
{
    void *addr;
    size_t len;

    if (freer_due(e->freer, &addr, &len) != 0) {
        return false;
    }
    for (guint i = 0; i < e->regions->len; i++) {
        if (!settle_range(g_ptr_array_index(e->regions, i), addr, len)) {
            freer_remember(e->freer, addr, len);
        }
    }
    return true;
}
