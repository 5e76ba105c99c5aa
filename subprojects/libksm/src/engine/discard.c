/*
 * discard: what the owner gives back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "engine/discard.h"
#include "memory/attr.h"

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

static int discard_run(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    bool mapped = page_is_mapped(r, page);
    PageState to = PAGE_HOLE;
    int ret;

    if (mapped) {
        bool room = vmas_free(&e->vmas) > VMAS_MIN;

        ret = room ? attr_map_anonymous(r, page, n) : -ENOMEM;
        vmas_made(&e->vmas, 2);
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
        content_leave(&e->content, r, i, to);
    }
    if (mapped && to == PAGE_HOLE) {
        dirty_track(&e->dirty, r, page, n);
    }
    return 0;
}

int discard_range(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    size_t end = page + n, k;
    int ret = 0;

    for (size_t i = page; i < end && ret == 0; i += k) {
        size_t chunk = i / CHUNK_PAGES;

        k = uniform_run(r, i, end);
        ret = discard_run(e, r, i, k);
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
static int hint_run(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    KsmChunk *c = page_chunk(r, page);
    bool protect = worth_protecting(r, page, n);
    bool blind = !protect && r->dirty != KSM_DIRTY_LOG;
    int ret = freer_release_lazily(e->freer, page_addr(r, page),
                                   n * PAGE_BYTES);

    if (ret < 0) {
        return ret;
    }
    for (size_t i = page; i < page + n; i++) {
        PageState s = page_state(r, i);

        if (s == PAGE_GIVEN) {
            continue;
        }
        content_leave(&e->content, r, i, PAGE_FREED);
        chunk_set_lazy(r, c, c->lazy + (s != PAGE_HOLE));
        r->state[i] |= blind ? PAGE_BLIND : 0;
        /* a log may still tell of a write from before the hint */
        r->history[i] = r->dirty == KSM_DIRTY_LOG;
    }
    c->flags |= blind ? CHUNK_BLIND : 0;
    if (protect) {
        dirty_protect(&e->dirty, r, page, n);
    }
    return 0;
}

int discard_hint(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    bool lazy = freer_is_lazy(e->freer);
    size_t end = page + n, k;
    int ret = 0;

    for (size_t i = page; i < end && ret == 0; i += k) {
        k = uniform_run(r, i, end);
        if (!lazy || page_is_mapped(r, i)) {
            ret = discard_range(e, r, i, k);
        } else {
            ret = hint_run(e, r, i, k);
        }
    }
    if (ret == 0) {
        r->free_hinted += n;
        e->total.free_hinted += n;
    }
    return ret;
}

/*
 * The kernel was asked to take what is lazily free in a part of a chunk: what
 * is there all the same is in use, as far as it was not known.
 */
static int settle_pages(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    uint8_t kinds[CHUNK_PAGES];
    int ret = kinds_ask(&e->kinds, page_addr(r, page), n, KINDS_FAST, kinds);

    for (size_t i = 0; i < n && ret == 0; i++) {
        if (page_state(r, page + i) != PAGE_FREED) {
            continue;
        }
        if ((r->state[page + i] & PAGE_BLIND) && (kinds[i] & PM_PRESENT)) {
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
static void give_back(KsmEngine *e, KsmRegion *r, size_t page, size_t end)
{
    size_t n;

    for (; page < end; page += MAX(n, 1)) {
        n = 0;
        while (page + n < end && page_state(r, page + n) == PAGE_FREED) {
            n++;
        }
        if (n) {
            freer_give_back(e->freer, page_addr(r, page),
                            n * PAGE_BYTES);
        }
    }
}

static bool settle_range(KsmEngine *e, KsmRegion *r, char *addr, size_t len)
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
    give_back(e, r, page, page + (end - start) / PAGE_BYTES);
    return settle_pages(e, r, page, (end - start) / PAGE_BYTES) == 0;
}

bool discard_settle(KsmEngine *e)
{
    void *addr;
    size_t len;

    if (freer_due(e->freer, &addr, &len) != 0) {
        return false;
    }
    for (guint i = 0; i < e->regions->len; i++) {
        if (!settle_range(e, g_ptr_array_index(e->regions, i), addr, len)) {
            freer_remember(e->freer, addr, len);
        }
    }
    return true;
}
