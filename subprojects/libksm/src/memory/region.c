/*
 * region: the states of registered memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "memory/region.h"

static bool state_gains(PageState s)
{
    return s == PAGE_EQUAL || s == PAGE_ZEROES;
}

static bool state_maps(PageState s)
{
    return s == PAGE_MERGED || s == PAGE_BROKEN;
}

void page_set(KsmRegion *r, size_t page, PageState state)
{
    KsmChunk *c = &r->chunk[page / CHUNK_PAGES];
    uint8_t old = r->state[page];
    PageState was = old & PAGE_STATE_MASK;
    int gain = state_gains(state) - state_gains(was);

    if (old & PAGE_WRITTEN) {
        c->written--;
        r->n_written -= was == PAGE_NEW;
    }
    if (was == PAGE_FREED && c->lazy) {
        chunk_set_lazy(r, c, c->lazy - 1);
    }
    r->count[was]--;
    r->count[state]++;
    c->fresh += (state == PAGE_NEW) - (was == PAGE_NEW);
    c->gain += gain;
    r->gain[c->why_not] += gain;
    c->mapped += state_maps(state) - state_maps(was);
    c->broken += (state == PAGE_BROKEN) - (was == PAGE_BROKEN);
    c->given += (state == PAGE_GIVEN) - (was == PAGE_GIVEN);
    c->again -= was == PAGE_BROKEN && (old & PAGE_AGAIN);
    c->kernel += (state == PAGE_KERNEL) - (was == PAGE_KERNEL);
    r->state[page] = state;
    if (state_maps(was) && !state_maps(state) && page + 1 < r->n_pages) {
        r->state[page + 1] &= ~PAGE_JOINED;
    }
}

void chunk_set_reason(KsmRegion *r, KsmChunk *c, KsmReason reason)
{
    r->gain[c->why_not] -= c->gain;
    r->gain[reason] += c->gain;
    c->why_not = reason;
}

void chunk_set_lazy(KsmRegion *r, KsmChunk *c, unsigned lazy)
{
    r->lazy += lazy;
    r->lazy -= c->lazy;
    c->lazy = lazy;
}

void page_mark(KsmRegion *r, size_t page, bool written)
{
    uint8_t old = r->state[page];

    if (!!(old & PAGE_WRITTEN) == written) {
        return;
    }
    r->state[page] = old ^ PAGE_WRITTEN;
    r->chunk[page / CHUNK_PAGES].written += written ? 1 : -1;
    if ((old & PAGE_STATE_MASK) == PAGE_NEW) {
        r->n_written += written ? 1 : -1;
    }
}

void page_again(KsmRegion *r, size_t page, bool again)
{
    uint8_t old = r->state[page];

    if (!!(old & PAGE_AGAIN) != again) {
        r->state[page] = old ^ PAGE_AGAIN;
        page_chunk(r, page)->again += again ? 1 : -1;
    }
}

/*
 * Slots tell, as long as both pages have theirs; the one that loses its own
 * leaves a bit.
 */
bool region_joined(const KsmRegion *r, size_t page)
{
    PageState s = r->state[page] & PAGE_STATE_MASK;
    PageState before = page ? r->state[page - 1] & PAGE_STATE_MASK
                            : PAGE_OUTSIDE;

    if (s == PAGE_MERGED && before == PAGE_MERGED) {
        return r->tag[page - 1] + 1 == r->tag[page];
    }
    return state_maps(s) && state_maps(before) &&
           (r->state[page] & PAGE_JOINED);
}

static void joined_set(KsmRegion *r, size_t page, bool joined)
{
    r->state[page] &= ~PAGE_JOINED;
    r->state[page] |= joined ? PAGE_JOINED : 0;
}

void page_break(KsmRegion *r, size_t page)
{
    bool next = page + 1 < r->n_pages;
    bool before = region_joined(r, page);
    bool behind = next && region_joined(r, page + 1);

    page_set(r, page, PAGE_BROKEN);
    r->history[page] = 0;
    joined_set(r, page, before);
    if (next) {
        joined_set(r, page + 1, behind);
    }
}

void region_count_runs(KsmRegion *r, size_t chunk)
{
    size_t first = chunk * CHUNK_PAGES;
    KsmChunk *c = &r->chunk[chunk];
    unsigned runs = 0;

    if (!c->mapped && !c->runs) {
        return;
    }
    for (size_t i = first; i < first + CHUNK_PAGES; i++) {
        runs += state_maps(r->state[i] & PAGE_STATE_MASK) &&
                !region_joined(r, i);
    }
    r->runs += runs - (uint64_t)c->runs;
    c->runs = runs;
}

static void page_free(KsmRegion *r, KsmChunk *c, size_t page, uint8_t blind)
{
    PageState was = r->state[page] & PAGE_STATE_MASK;

    if (was == PAGE_GIVEN) {
        return;
    }
    page_set(r, page, PAGE_FREED);
    chunk_set_lazy(r, c, c->lazy + (was != PAGE_HOLE));
    r->state[page] |= blind;
    /* a log may still tell of a write from before the hint */
    r->history[page] = r->dirty == KSM_DIRTY_LOG;
}

void region_set_run(KsmRegion *r, const PageRun *run, uint8_t to)
{
    size_t chunk = run->page / CHUNK_PAGES, end = run->page + run->n;

    r->chunk[chunk].flags |= to & PAGE_BLIND ? CHUNK_BLIND : 0;
    for (size_t i = run->page; i < end; i++) {
        if ((to & PAGE_STATE_MASK) == PAGE_FREED) {
            page_free(r, &r->chunk[chunk], i, to & PAGE_BLIND);
        } else if (to == PAGE_BROKEN) {
            page_break(r, i);
        } else {
            page_set(r, i, to);
        }
    }
    if (run->mapped) {
        region_count_runs(r, chunk);
        /* a mapping that went on there begins there now */
        if (end % CHUNK_PAGES == 0 && end < r->n_pages) {
            region_count_runs(r, chunk + 1);
        }
    }
}

PageRun region_run(const KsmRegion *r, size_t page, size_t end)
{
    size_t stop = MIN(end, (page / CHUNK_PAGES + 1) * CHUNK_PAGES);
    bool mapped = page_is_mapped(r, page);
    bool barred = page_state(r, page) == PAGE_BARRED;
    size_t n = 1;

    while (page + n < stop && page_is_mapped(r, page + n) == mapped &&
           (page_state(r, page + n) == PAGE_BARRED) == barred) {
        n++;
    }
    return (PageRun) {
        .page = page,
        .n = n,
        .addr = r->base + page * PAGE_BYTES,
        .len = n * PAGE_BYTES,
        .mapped = mapped,
        .barred = barred,
    };
}

bool region_pages(const KsmRegion *r, size_t offset, size_t len, size_t *page,
                  size_t *n)
{
    if ((offset | len) % PAGE_BYTES || offset > r->len ||
        len > r->len - offset) {
        return false;
    }
    *page = (r->addr - r->base + offset) / PAGE_BYTES;
    *n = len / PAGE_BYTES;
    return true;
}

bool region_busy(KsmRegion *r, void *addr, size_t len)
{
    const KsmRegionOps *ops = r->ops;

    return ops && ops->busy && ops->busy(r->opaque, addr, len);
}

const char *region_inhibited(KsmRegion *r)
{
    r->inhibited = r->unmerging ? "its memory is being unmerged"
                 : r->ops && r->ops->inhibited ? r->ops->inhibited(r->opaque)
                                               : NULL;
    return r->inhibited;
}

void region_init(KsmRegion *r, void *addr, size_t len, int node,
                 const KsmRegionOps *ops, void *opaque)
{
    uintptr_t base = (uintptr_t)addr / CHUNK_BYTES * CHUNK_BYTES;
    uintptr_t end = ROUND_UP_TO((uintptr_t)addr + len, CHUNK_BYTES);

    r->addr = addr;
    r->len = len;
    r->base = (char *)base;
    r->n_chunks = (end - base) / CHUNK_BYTES;
    r->n_pages = r->n_chunks * CHUNK_PAGES;
    r->node = node;
    r->salt = (uint32_t)(node + 1) * UINT32_C(0x9e3779b1);
    r->ops = ops;
    r->opaque = opaque;
    r->policy = -1;
}

static void *meta_map(KsmRegion *r, size_t len)
{
    len = ROUND_UP_TO(len, PAGE_BYTES);
    r->meta_bytes += len;
    return prim.map(NULL, len, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void meta_unmap(void *p, size_t len)
{
    if (p) {
        prim.unmap(p, ROUND_UP_TO(len, PAGE_BYTES));
    }
}

int region_alloc(KsmRegion *r)
{
    size_t first = region_first(r), last = region_end(r);

    r->tag = meta_map(r, r->n_pages * sizeof(*r->tag));
    r->state = meta_map(r, r->n_pages);
    r->history = meta_map(r, r->n_pages);
    r->chunk = meta_map(r, r->n_chunks * sizeof(*r->chunk));
    if (!r->tag || !r->state || !r->history || !r->chunk) {
        return -ENOMEM;
    }
    /* read first, each page would cost two faults */
    prim.advise(r->state, ROUND_UP_TO(r->n_pages, PAGE_BYTES),
                MADV_POPULATE_WRITE);
    r->count[PAGE_NEW] = r->n_pages;
    for (size_t i = 0; i < r->n_chunks; i++) {
        r->chunk[i].fresh = CHUNK_PAGES;
        r->chunk[i].flags = CHUNK_VISIT;
    }
    for (size_t i = 0; i < r->n_pages; i++) {
        if (i < first || i >= last) {
            page_set(r, i, PAGE_OUTSIDE);
        } else {
            page_mark(r, i, true);
        }
    }
    return 0;
}

void region_fini(KsmRegion *r)
{
    meta_unmap(r->tag, r->n_pages * sizeof(*r->tag));
    meta_unmap(r->state, r->n_pages);
    meta_unmap(r->history, r->n_pages);
    meta_unmap(r->chunk, r->n_chunks * sizeof(*r->chunk));
}

void region_check(KsmRegion *r)
{
    uint64_t count[PAGE_STATES] = { 0 };
    uint64_t sum[KSM_REASON_MAX] = { 0 };
    uint64_t written = 0, lazy = 0;

    for (size_t i = 0; i < r->n_chunks; i++) {
        unsigned fresh = 0, marked = 0, gain = 0, mapped = 0, broken = 0;
        unsigned given = 0, again = 0, kernel = 0;

        for (size_t p = i * CHUNK_PAGES; p < (i + 1) * CHUNK_PAGES; p++) {
            PageState s = page_state(r, p);

            count[s]++;
            fresh += s == PAGE_NEW;
            gain += state_gains(s);
            mapped += state_maps(s);
            broken += s == PAGE_BROKEN;
            given += s == PAGE_GIVEN;
            kernel += s == PAGE_KERNEL;
            again += s == PAGE_BROKEN && (r->state[p] & PAGE_AGAIN);
            g_assert(page_is_mapped(r, p) || !(r->state[p] & PAGE_JOINED));
            marked += !!(r->state[p] & PAGE_WRITTEN);
            written += s == PAGE_NEW && (r->state[p] & PAGE_WRITTEN);
        }
        sum[r->chunk[i].why_not] += gain;
        lazy += r->chunk[i].lazy;
        g_assert(r->chunk[i].fresh == fresh);
        g_assert(r->chunk[i].written == marked);
        g_assert(r->chunk[i].gain == gain);
        g_assert(r->chunk[i].mapped == mapped);
        g_assert(r->chunk[i].broken == broken);
        g_assert(r->chunk[i].given == given);
        g_assert(r->chunk[i].again == again);
        g_assert(r->chunk[i].kernel == kernel);
    }
    for (unsigned s = 0; s < PAGE_STATES; s++) {
        g_assert(r->count[s] == count[s]);
    }
    g_assert(r->n_written == written);
    g_assert(r->lazy == lazy);
    g_assert(!memcmp(r->gain, sum, sizeof(sum)));
}

bool region_stays_home(const KsmRegion *r)
{
    for (unsigned i = 0; i < r->n_advice; i++) {
        if (r->advice[i] == MADV_DONTFORK) {
            return true;
        }
    }
    return false;
}
