/*
 * region: the states of registered memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "memory/region.h"

static bool state_maps(PageState s)
{
    return s == PAGE_MERGED || s == PAGE_BROKEN;
}

static bool state_holds(PageState s)
{
    return s != PAGE_HOLE && s != PAGE_OUTSIDE;
}

void chunk_know(KsmRegion *r, size_t chunk)
{
    KsmGroup *g = &r->group[chunk / GROUP_CHUNKS];

    if (!g->known) {
        r->meta_bytes += GROUP_CHUNKS * sizeof(*r->chunk);
    }
    g->known |= UINT64_C(1) << (chunk % GROUP_CHUNKS);
}

void chunk_want(KsmRegion *r, size_t chunk)
{
    chunk_know(r, chunk);
    r->chunk[chunk].flags |= CHUNK_VISIT;
}

/* What is kept of pages: pages of such memory are shared by some chunks. */
typedef struct Kept {
    char *at;               /* a page of it: what is kept of @chunk is there */
    uint64_t mask;          /* chunks of the group that have theirs there */
} Kept;

#define KEPT_MAX 3u

static Kept kept_page(void *array, size_t bytes, size_t chunk)
{
    size_t at = chunk * CHUNK_PAGES * bytes / PAGE_BYTES;
    unsigned n = PAGE_BYTES / (CHUNK_PAGES * bytes);
    unsigned first = chunk % GROUP_CHUNKS / n * n;

    return (Kept) {
        (char *)array + at * PAGE_BYTES,
        ((UINT64_C(1) << n) - 1) << first,
    };
}

G_STATIC_ASSERT(PAGE_BYTES % (CHUNK_PAGES * sizeof(uint32_t)) == 0);
G_STATIC_ASSERT(GROUP_CHUNKS * CHUNK_PAGES % PAGE_BYTES == 0);

static unsigned chunk_kept(const KsmRegion *r, size_t chunk, Kept *kept)
{
    kept[0] = kept_page(r->state, sizeof(*r->state), chunk);
    kept[1] = kept_page(r->history, sizeof(*r->history), chunk);
    kept[2] = kept_page(r->tag, sizeof(*r->tag), chunk);
    return r->tagged ? KEPT_MAX : KEPT_MAX - 1;
}

/*
 * Before anything is kept of its pages.  The memory for it is asked for: read
 * first, each page would cost another fault and a TLB shootdown.
 */
static void chunk_enliven(KsmRegion *r, size_t chunk)
{
    KsmGroup *g = &r->group[chunk / GROUP_CHUNKS];
    Kept kept[KEPT_MAX];
    unsigned n = chunk_kept(r, chunk, kept);

    chunk_know(r, chunk);
    for (unsigned i = 0; i < n; i++) {
        if (!(g->live & kept[i].mask)) {
            prim.advise(kept[i].at, PAGE_BYTES, MADV_POPULATE_WRITE);
            r->meta_bytes += PAGE_BYTES;
        }
    }
    r->chunk[chunk].flags |= CHUNK_LIVE;
    g->live |= UINT64_C(1) << (chunk % GROUP_CHUNKS);
}

/* All that is kept of its pages is zeroes, and has no memory if it need not. */
static void chunk_deaden(KsmRegion *r, size_t chunk)
{
    KsmGroup *g = &r->group[chunk / GROUP_CHUNKS];
    size_t page = chunk * CHUNK_PAGES;
    Kept kept[KEPT_MAX];
    unsigned n = chunk_kept(r, chunk, kept);

    /* as states are, of holes; calls below may fail */
    memset(r->history + page, 0, CHUNK_PAGES * sizeof(*r->history));
    if (r->tagged) {
        memset(r->tag + page, 0, CHUNK_PAGES * sizeof(*r->tag));
    }
    g->live &= ~(UINT64_C(1) << (chunk % GROUP_CHUNKS));
    for (unsigned i = 0; i < n; i++) {
        if (!(g->live & kept[i].mask)) {
            prim.advise(kept[i].at, PAGE_BYTES, MADV_DONTNEED);
            r->meta_bytes -= PAGE_BYTES;
        }
    }
}

void chunk_forget(KsmRegion *r, size_t chunk)
{
    const uint16_t idle = CHUNK_ARMED | CHUNK_HUGE | CHUNK_SEEN | CHUNK_LIVE |
                          CHUNK_LOOSE | CHUNK_STIRRED | CHUNK_STILL |
                          CHUNK_WOKEN;
    KsmGroup *g = &r->group[chunk / GROUP_CHUNKS];
    KsmChunk *c = &r->chunk[chunk];
    size_t page = chunk * CHUNK_PAGES;

    if (c->held || c->runs || (c->flags & ~idle) ||
        page < region_first(r) || page + CHUNK_PAGES > region_end(r)) {
        return;
    }
    if (c->flags & CHUNK_LIVE) {
        chunk_deaden(r, chunk);
    }
    chunk_set_lazy(r, c, 0);
    *c = (KsmChunk) { 0 };
    g->known &= ~(UINT64_C(1) << (chunk % GROUP_CHUNKS));
    if (!g->known) {
        r->meta_bytes -= GROUP_CHUNKS * sizeof(*c);
    }
}

size_t region_known(const KsmRegion *r, size_t chunk, size_t end)
{
    while (chunk < end) {
        uint64_t known = r->group[chunk / GROUP_CHUNKS].known >>
                         (chunk % GROUP_CHUNKS);

        if (known) {
            return MIN(chunk + __builtin_ctzll(known), end);
        }
        chunk = (chunk / GROUP_CHUNKS + 1) * GROUP_CHUNKS;
    }
    return end;
}

size_t region_expected(const KsmRegion *r)
{
    size_t chunks = 0;

    for (size_t i = 0; i < r->n_groups; i++) {
        const KsmGroup *g = &r->group[i];

        chunks += __builtin_popcountll(g->known & ~g->live);
    }
    return region_held(r) + chunks * CHUNK_PAGES;
}

/* Writes nothing if it is so: the page may be of a bare chunk. */
static void joined_set(KsmRegion *r, size_t page, bool joined)
{
    if (!!(r->state[page] & PAGE_JOINED) != joined) {
        r->state[page] ^= PAGE_JOINED;
    }
}

void page_set(KsmRegion *r, size_t page, PageState state)
{
    size_t chunk = page / CHUNK_PAGES;
    KsmChunk *c = &r->chunk[chunk];
    PageState was;
    uint8_t old;
    bool left;
    int gain;

    if (!(c->flags & CHUNK_LIVE)) {
        if (state == PAGE_HOLE) {
            return;
        }
        chunk_enliven(r, chunk);
    }
    old = r->state[page];
    was = old & PAGE_STATE_MASK;
    gain = state_gains(state) - state_gains(was);
    if (old & PAGE_WRITTEN) {
        c->written--;
        r->n_written -= was == PAGE_NEW;
    }
    if (was == PAGE_FREED && c->lazy) {
        chunk_set_lazy(r, c, c->lazy - 1);
    }
    r->count[was]--;
    r->count[state]++;
    c->held += state_holds(state) - state_holds(was);
    c->fresh += (state == PAGE_NEW) - (was == PAGE_NEW);
    c->gain += gain;
    r->gain[c->why_not] += gain;
    c->mapped += state_maps(state) - state_maps(was);
    c->broken += (state == PAGE_BROKEN) - (was == PAGE_BROKEN);
    c->given += (state == PAGE_GIVEN) - (was == PAGE_GIVEN);
    c->again -= was == PAGE_BROKEN && (old & PAGE_AGAIN);
    left = was == PAGE_EQUAL && (old & PAGE_LEFT);
    c->left -= left;
    r->n_left -= left;
    c->kernel += (state == PAGE_KERNEL) - (was == PAGE_KERNEL);
    r->state[page] = state;
    if (state_maps(was) && state != PAGE_BROKEN && page + 1 < r->n_pages) {
        joined_set(r, page + 1, false);
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

void page_leave(KsmRegion *r, size_t page, bool leave)
{
    uint8_t old = r->state[page];

    if ((old & PAGE_STATE_MASK) == PAGE_EQUAL &&
        !!(old & PAGE_LEFT) != leave) {
        r->state[page] = old ^ PAGE_LEFT;
        page_chunk(r, page)->left += leave ? 1 : -1;
        r->n_left += leave ? 1 : -1;
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
    r->n_groups = (r->n_chunks + GROUP_CHUNKS - 1) / GROUP_CHUNKS;
    r->forget_from = r->ask_from = r->n_chunks;
    r->pause_at = region_end(r);
    r->node = node;
    r->salt = (uint32_t)(node + 1) * UINT32_C(0x9e3779b1);
    r->ops = ops;
    r->opaque = opaque;
    r->policy = -1;
}

/*
 * In small pages: a huge one would stand for what is kept of gigabytes, of
 * which little may be populated.
 */
static void *meta_map(size_t len)
{
    void *p;

    len = ROUND_UP_TO(len, PAGE_BYTES);
    p = prim.map(NULL, len, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p) {
        prim.advise(p, len, MADV_NOHUGEPAGE);
    }
    return p;
}

static void meta_unmap(void *p, size_t len)
{
    if (p) {
        prim.unmap(p, ROUND_UP_TO(len, PAGE_BYTES));
    }
}

/* Groups, and the chunks behind them. */
static size_t groups_len(const KsmRegion *r)
{
    return r->n_groups * sizeof(*r->group) + r->n_chunks * sizeof(*r->chunk);
}

/* What is not of the region, in its first chunk or its last. */
static void outside_set(KsmRegion *r, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) {
        page_set(r, i, PAGE_OUTSIDE);
    }
}

int region_alloc(KsmRegion *r)
{
    r->tag = meta_map(r->n_pages * sizeof(*r->tag));
    r->state = meta_map(r->n_pages);
    r->history = meta_map(r->n_pages);
    r->group = meta_map(groups_len(r));
    if (!r->tag || !r->state || !r->history || !r->group) {
        return -ENOMEM;
    }
    r->chunk = (KsmChunk *)(r->group + r->n_groups);
    r->meta_bytes = r->n_groups * sizeof(*r->group);
    r->count[PAGE_HOLE] = r->n_pages;
    outside_set(r, 0, region_first(r));
    outside_set(r, region_end(r), r->n_pages);
    return 0;
}

void kin_drop(KsmRegion *r)
{
    if (r->kin) {
        prim.unmap(r->kin, PAGE_BYTES);
        r->kin = NULL;
    }
}

void region_fini(KsmRegion *r)
{
    kin_drop(r);
    meta_unmap(r->tag, r->n_pages * sizeof(*r->tag));
    meta_unmap(r->state, r->n_pages);
    meta_unmap(r->history, r->n_pages);
    meta_unmap(r->group, groups_len(r));
}

static bool chunk_is_zeroes(const KsmRegion *r, size_t chunk)
{
    size_t page = chunk * CHUNK_PAGES;
    const KsmChunk *c = &r->chunk[chunk];

    return bytes_are_zero((const char *)(r->state + page), CHUNK_PAGES) &&
           bytes_are_zero((const char *)(r->history + page), CHUNK_PAGES) &&
           bytes_are_zero((const char *)(r->tag + page),
                          CHUNK_PAGES * sizeof(*r->tag)) &&
           (!chunk_is_bare(r, chunk) ||
            bytes_are_zero((const char *)c, sizeof(*c)));
}

/* What has no memory, or need not have, is zeroes. */
static void groups_check(const KsmRegion *r)
{
    for (size_t i = 0; i < r->n_chunks; i++) {
        uint64_t bit = UINT64_C(1) << (i % GROUP_CHUNKS);
        const KsmGroup *g = &r->group[i / GROUP_CHUNKS];

        g_assert(!(g->live & ~g->known));
        g_assert(!!(g->live & bit) == chunk_is_live(r, i));
        g_assert((g->live & bit) || chunk_is_zeroes(r, i));
    }
}

void region_check(KsmRegion *r)
{
    uint64_t count[PAGE_STATES] = { 0 };
    uint64_t sum[KSM_REASON_MAX] = { 0 };
    uint64_t written = 0, lazy = 0, left = 0;

    groups_check(r);
    for (size_t i = 0; i < r->n_chunks; i++) {
        unsigned fresh = 0, marked = 0, gain = 0, mapped = 0, broken = 0;
        unsigned given = 0, again = 0, kernel = 0, held = 0, own_left = 0;

        for (size_t p = i * CHUNK_PAGES; p < (i + 1) * CHUNK_PAGES; p++) {
            PageState s = page_state(r, p);

            count[s]++;
            held += state_holds(s);
            fresh += s == PAGE_NEW;
            gain += state_gains(s);
            mapped += state_maps(s);
            broken += s == PAGE_BROKEN;
            given += s == PAGE_GIVEN;
            kernel += s == PAGE_KERNEL;
            own_left += s == PAGE_EQUAL && (r->state[p] & PAGE_LEFT);
            again += s == PAGE_BROKEN && (r->state[p] & PAGE_AGAIN);
            g_assert(page_is_mapped(r, p) || !(r->state[p] & PAGE_JOINED));
            marked += !!(r->state[p] & PAGE_WRITTEN);
            written += s == PAGE_NEW && (r->state[p] & PAGE_WRITTEN);
        }
        g_assert(!(r->chunk[i].flags & CHUNK_LOOSE) ||
                 (r->dirty == KSM_DIRTY_PAGEMAP && !mapped &&
                  (r->chunk[i].flags & CHUNK_ARMED)));
        sum[r->chunk[i].why_not] += gain;
        lazy += r->chunk[i].lazy;
        g_assert(r->chunk[i].held == held);
        g_assert(r->chunk[i].fresh == fresh);
        g_assert(r->chunk[i].written == marked);
        g_assert(r->chunk[i].gain == gain);
        g_assert(r->chunk[i].mapped == mapped);
        g_assert(r->chunk[i].broken == broken);
        g_assert(r->chunk[i].given == given);
        g_assert(r->chunk[i].again == again);
        g_assert(r->chunk[i].kernel == kernel);
        g_assert(r->chunk[i].left == own_left);
        left += own_left;
    }
    for (unsigned s = 0; s < PAGE_STATES; s++) {
        g_assert(r->count[s] == count[s]);
    }
    g_assert(r->n_written == written);
    g_assert(r->n_left == left);
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
