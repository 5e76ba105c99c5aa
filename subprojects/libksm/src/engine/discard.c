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

/*
 * Zeroes for a run that maps the pool, or that is barred: then only a mapping
 * gives access again, and it takes another's place.  Returns as run_empty().
 */
static int run_replace(KsmEngine *e, KsmRegion *r, const PageRun *run)
{
    bool room = run->barred || vmas_free(&e->vmas) > VMAS_MIN;
    int ret;

    vmas_made(&e->vmas, run->barred ? 0 : 2);
    ret = room ? attr_map_anonymous(r, run->addr, run->len) : -ENOMEM;
    if (ret == 0) {
        dirty_track(&e->dirty, r, run->addr, run->len);
        return PAGE_HOLE;
    }
    if (run->barred) {
        return ret;
    }
    /* where a mapping cannot be had */
    ret = prim.advise(run->addr, run->len, MADV_POPULATE_WRITE);
    if (ret < 0) {
        return ret;
    }
    memset(run->addr, 0, run->len);
    return PAGE_BROKEN;
}

/*
 * May the kernel have merged pages of the run?  MADV_FREE lets reclaim drop
 * such a page if nobody else maps it: merged with others after that, it is
 * dropped from under them (libksm-free.h).
 */
static bool run_is_kernels(KsmRegion *r, size_t page)
{
    return r->mergeable || (page_chunk(r, page)->flags & CHUNK_TAIL);
}

/* Returns the state of the run's pages from now on, or -errno. */
static int run_empty(KsmEngine *e, KsmRegion *r, const PageRun *run,
                     bool lazy)
{
    int ret;

    if (run->mapped || run->barred) {
        return run_replace(e, r, run);
    }
    if (!lazy) {
        ret = prim.advise(run->addr, run->len, MADV_DONTNEED);
        return ret < 0 ? ret : PAGE_HOLE;
    }
    ret = freer_release_lazily(e->freer, run->addr, run->len);
    if (ret < 0) {
        return ret;
    }
    return dirty_protect(&e->dirty, r, run) || r->dirty == KSM_DIRTY_LOG
           ? PAGE_FREED : PAGE_FREED | PAGE_BLIND;
}

/* Where the bare chunks end, from @page on; @page: it is not in one. */
static size_t bare_until(const KsmRegion *r, size_t page, size_t end)
{
    size_t known = region_known(r, page / CHUNK_PAGES,
                                (end - 1) / CHUNK_PAGES + 1);

    return CLAMP(known * CHUNK_PAGES, page, end);
}

/* A run of a chunk that is not bare.  0 or -errno. */
static int known_empty(KsmEngine *e, KsmRegion *r, const PageRun *run,
                       bool lazy)
{
    bool later = lazy && !run_is_kernels(r, run->page);
    int state = run_empty(e, r, run, later);

    if (run->mapped || run->barred || !later) {
        page_chunk(r, run->page)->flags |= CHUNK_VISIT;
    }
    if (state < 0) {
        return state;
    }
    content_leave_run(&e->content, r, run, state);
    return 0;
}

int discard_range(KsmEngine *e, KsmRegion *r, size_t page, size_t n,
                  DiscardKind kind)
{
    /* without it what vanishes from the staging area is waited for: stage.c */
    bool lazy = kind == DISCARD_HINT && e->dirty.wp_async &&
                freer_is_lazy(e->freer);
    size_t end = page + n;

    while (page < end) {
        size_t next = bare_until(r, page, end);
        int ret;

        if (lazy && next > page) {
            /* what was populated since the last look is to be freed lazily */
            dirty_find(&e->dirty, r, page / CHUNK_PAGES,
                       (next - 1) / CHUNK_PAGES + 1);
            next = bare_until(r, page, end);
        }
        if (next > page) {
            ret = prim.advise(page_addr(r, page), (next - page) * PAGE_BYTES,
                              MADV_DONTNEED);
        } else {
            PageRun run = region_run(r, page, end);

            ret = known_empty(e, r, &run, lazy);
            next = page + run.n;
        }
        if (ret < 0) {
            return ret;
        }
        page = next;
    }
    if (kind == DISCARD_HINT) {
        r->free_hinted += n;
        e->total.free_hinted += n;
    }
    return 0;
}

/* The kernel has taken what was still free: a page that is there is in use. */
static int settle_pages(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    uint8_t kinds[CHUNK_PAGES];
    int ret = kinds_ask(&e->kinds, page_addr(r, page), n, KINDS_FAST, kinds);

    for (size_t i = 0; i < n && ret == 0; i++) {
        if (page_state(r, page + i) != PAGE_FREED) {
            continue;
        }
        /* also one that migrates: no log will name it again */
        if ((r->state[page + i] & PAGE_BLIND) && kind_is_populated(kinds[i])) {
            page_set(r, page + i, PAGE_NEW);
            page_mark(r, page + i, true);
        }
        r->state[page + i] &= ~PAGE_BLIND;
        r->history[page + i] = 0;
    }
    if (!chunk_is_bare(r, page / CHUNK_PAGES)) {
        page_chunk(r, page)->flags &= ~CHUNK_BLIND;
        page_chunk(r, page)->flags |= CHUNK_VISIT;
    }
    return ret;
}

/* The range: a chunk's freed pages, and those in between. */
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
    bool done = true;
    void *addr;
    size_t len;

    if (freer_due(e->freer, &addr, &len) != 0) {
        return false;
    }
    for (guint i = 0; i < e->regions->len; i++) {
        if (!settle_range(e, g_ptr_array_index(e->regions, i), addr, len)) {
            freer_remember(e->freer, addr, len);
            done = false;
        }
    }
    /* what has to wait may be due again at once */
    return done;
}
