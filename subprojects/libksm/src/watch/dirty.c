/*
 * dirty: what was written since last asked
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * pagemap: PAGEMAP_SCAN reports pages that are not write-protected and protects
 * them again in the same walk.  The kernel lets a write to a protected page
 * through at once (async): no guest ever waits for us.  Only populated pages
 * are asked for (PM_PRESENT): protecting others would leave markers in the page
 * tables, which cost memory and make UFFDIO_MOVE fail.  A newly populated page
 * is not protected and thus counts as written.
 *
 * Where nothing is known (bare chunks), whatever the source, the page tables
 * are asked what is populated: a look at their upper levels, where they are
 * empty.  They are asked about many groups at once, as many as take a
 * millisecond: the tables of memory that was given back are still there, and
 * long to walk.
 *
 * The first write to a protected huge page splits it: those are left alone as
 * long as they are huge (CHUNK_LOOSE, see loose.h).  One that is new where
 * small pages were protected looks written, and is protected by asking.  The
 * protection is taken off again; what writes meanwhile splits it.
 *
 * Each first write to a protected page costs the guest a fault.  So chunks that
 * are written again and again are asked about less and less often, up to every
 * eighth pass.  Small pages that were freed lazily are not protected at all
 * (PAGE_BLIND, see discard.h).
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "watch/dirty.h"

/* Chunks unregistered at a time, a ms or two: populated ones, and all. */
#define PAUSE_CHUNKS    32u
#define PAUSE_SPAN      2048u
#define HOT_MAX 3   /* log2 of the passes a hot chunk is left alone */
#define HOT_NS  UINT64_C(128000000000)      /* ... and how long */
#define CALM_SHARE  16u
#define REACH_MAX   8192u                   /* groups */
#define REACH_NS    UINT64_C(1000000)       /* longer: fewer at once ... */
#define REACH_MORE_NS (REACH_NS / 4)        /* less: more */

/* Of passes @ns apart: log2 of those that take @most. */
static unsigned passes_in(uint64_t most, uint64_t ns)
{
    unsigned n = HOT_MAX;

    while (n && ns << n > most) {
        n--;
    }
    return n;
}

void dirty_pass(KsmDirty *d, uint64_t ns)
{
    d->hot_max = passes_in(HOT_NS, ns);
    d->calm_max = passes_in(CALM_NS, ns);
}

void dirty_init(KsmDirty *d)
{
    d->bitmap = g_malloc0(PIECE_PAGES / 8);
    d->reach = 1;
}

void dirty_fini(KsmDirty *d)
{
    g_free(d->bitmap);
}

int dirty_choose(KsmDirty *d, KsmRegion *r)
{
    bool log = r->ops && r->ops->dirty_sync;

    r->dirty = d->source;
    if (r->dirty == KSM_DIRTY_AUTO) {
        r->dirty = log ? KSM_DIRTY_LOG
                 : d->wp_async ? KSM_DIRTY_PAGEMAP : KSM_DIRTY_CHECKSUM;
    }
    if (r->dirty == KSM_DIRTY_LOG && !log) {
        return -EINVAL;
    }
    if (r->dirty == KSM_DIRTY_PAGEMAP) {
        if (!d->wp_async) {
            return -ENOTSUP;
        }
        dirty_resume(d, r);
        if (!r->tracking) {
            if (d->source == KSM_DIRTY_PAGEMAP) {
                return -EBUSY;
            }
            r->dirty = KSM_DIRTY_CHECKSUM;
        }
    }
    return 0;
}

void dirty_track(KsmDirty *d, KsmRegion *r, char *addr, size_t len)
{
    if (r->tracking) {
        UffdRange range = { d->uffd, addr, len };

        /* else all of it is registered anew, before the next pass */
        r->tracking = prim.uffd_register(&range, UFFD_PROTECT) == 0;
        r->registered |= !r->tracking;
    }
}

/* Where the pages end, from @page on, that map the pool, or do not, as it. */
static size_t alike_until(const KsmRegion *r, size_t page, size_t end)
{
    bool mapped = r->chunk[page / CHUNK_PAGES].mapped &&
                  page_is_mapped(r, page);

    while (page < end) {
        size_t chunk = page / CHUNK_PAGES;

        if (r->chunk[chunk].mapped) {
            if (page_is_mapped(r, page) != mapped) {
                break;
            }
            page++;
        } else if (mapped) {
            break;
        } else {
            /* nor has a bare one any */
            chunk = region_known(r, chunk + 1, r->n_chunks);
            page = chunk * CHUNK_PAGES;
        }
    }
    return MIN(page, end);
}

/*
 * Calls for each run of pages from @page up to *@until that is not in a mapping
 * of the pool; where that fails is left there.
 */
static int for_own_pages(const KsmDirty *d, KsmRegion *r,
                         int (*fn)(const UffdRange *range), size_t page,
                         size_t *until)
{
    size_t end = *until, next;

    for (size_t i = page; i < end; i = next) {
        UffdRange range = { d->uffd, page_addr(r, i), 0 };
        int ret;

        next = alike_until(r, i, end);
        if (r->chunk[i / CHUNK_PAGES].mapped && page_is_mapped(r, i)) {
            continue;
        }
        range.len = (next - i) * PAGE_BYTES;
        ret = fn(&range);
        if (ret < 0) {
            *until = i;
            return ret;
        }
    }
    return 0;
}

static int register_protect(const UffdRange *range)
{
    return prim.uffd_register(range, UFFD_PROTECT);
}

static int unregister(KsmDirty *d, KsmRegion *r, size_t page, size_t end)
{
    int ret = -EAGAIN;

    for (unsigned tries = 0; ret < 0 && tries < 3; tries++) {
        size_t until = end;

        ret = for_own_pages(d, r, prim.uffd_unregister, page, &until);
    }
    return ret;
}

static int unregister_until(KsmDirty *d, KsmRegion *r, size_t page)
{
    int ret = unregister(d, r, region_first(r), page);

    r->registered = ret < 0;
    return ret;
}

/* The page behind so many populated chunks; what is not costs little. */
static size_t pause_end(const KsmRegion *r, size_t page)
{
    size_t chunk = page / CHUNK_PAGES;
    size_t end = MIN(chunk + PAUSE_SPAN, r->n_chunks);

    for (unsigned n = 0; n < PAUSE_CHUNKS && chunk < end; n++) {
        chunk = region_known(r, chunk, end) + 1;
    }
    return MIN(MIN(chunk, end) * CHUNK_PAGES, region_end(r));
}

int dirty_pause(KsmDirty *d, KsmRegion *r, size_t *page)
{
    size_t end = pause_end(r, *page);
    int ret;

    if (!r->tracking && !r->registered) {
        *page = region_end(r);
        return 0;
    }
    /* all of it is registered anew, or nothing */
    r->tracking = false;
    r->registered = true;
    ret = unregister(d, r, *page, end);
    if (ret < 0) {
        /* a piece needs mappings more, all of it does not */
        end = region_end(r);
        ret = unregister(d, r, *page, end);
    }
    *page = ret < 0 ? *page : end;
    r->registered = *page < region_end(r);
    return ret;
}

/* Registers all of it, or nothing. */
static void register_all(KsmDirty *d, KsmRegion *r)
{
    size_t until = region_end(r);
    int ret = for_own_pages(d, r, register_protect, region_first(r), &until);

    r->tracking = ret == 0;
    if (ret == -EBUSY || ret == -EINVAL || ret == -EPERM) {
        /* the rest is another's, who wants to keep it */
        unregister_until(d, r, until);
    } else if (ret < 0) {
        unregister_until(d, r, region_end(r));
    }
}

void dirty_resume(KsmDirty *d, KsmRegion *r)
{
    if (r->dirty != KSM_DIRTY_PAGEMAP || r->tracking || r->unmerging) {
        return;
    }
    register_all(d, r);
    REGION_FOREACH_KNOWN(r, c, 0, r->n_chunks) {
        r->chunk[c].flags |= CHUNK_VISIT | CHUNK_CHECK;
    }
}

/* A page was written: what was known of it is void. */
static void page_written(KsmDirty *d, KsmRegion *r, size_t page)
{
    KsmChunk *c = page_chunk(r, page);

    switch (page_state(r, page)) {
    case PAGE_FREED:
        if (r->history[page]) {
            /* the log of before the hint, or of after it */
            r->history[page] = 0;
            r->state[page] |= PAGE_BLIND;
            break;
        }
        if ((r->state[page] & PAGE_BLIND) && r->dirty != KSM_DIRTY_LOG) {
            break;
        }
        /* fall through */
    case PAGE_UNIQUE:
    case PAGE_EQUAL:
    case PAGE_ZEROES:
    case PAGE_SWAPPED:
    case PAGE_KERNEL:
        content_leave(d->content, r, page, PAGE_NEW);
        /* fall through */
    case PAGE_NEW:
    case PAGE_PINNED:
    case PAGE_BUSY:
        page_mark(r, page, true);
        break;
    case PAGE_MERGED:
        c->flags |= CHUNK_VISIT | CHUNK_CHECK;
        break;
    case PAGE_BROKEN:
        content_leave(d->content, r, page, PAGE_BROKEN);
        break;
    case PAGE_HOLE:
    case PAGE_GIVEN:
    case PAGE_BARRED:
        c->flags |= CHUNK_VISIT;
        break;
    default:
        break;
    }
}

static void chunk_apply(KsmDirty *d, KsmRegion *r, size_t chunk,
                        const unsigned long *bits)
{
    KsmChunk *c = &r->chunk[chunk];
    unsigned was = c->written, quiet = 0;
    unsigned long any = 0;

    for (unsigned w = 0; w < CHUNK_PAGES / 64; w++) {
        any |= bits[w];
    }
    if (!any && !c->written) {
        c->hot = 0;
        return;
    }
    if (!(c->flags & CHUNK_LIVE)) {
        c->flags |= CHUNK_VISIT;
        return;
    }
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        size_t page = chunk * CHUNK_PAGES + i;

        if (bits[i / 64] >> (i % 64) & 1) {
            page_written(d, r, page);
        } else if (r->state[page] & PAGE_WRITTEN) {
            page_mark(r, page, false);
            c->flags |= CHUNK_VISIT;
            quiet++;
        }
    }
    c->hot = c->written ? MIN(c->hot + 1, quiet * CALM_SHARE < was
                                          ? d->hot_max : d->calm_max) : 0;
}

static void bits_set(unsigned long *bits, size_t from, size_t to)
{
    for (; from < to && from % 64; from++) {
        bits[from / 64] |= 1ul << (from % 64);
    }
    for (; from + 64 <= to; from += 64) {
        bits[from / 64] = ~0ul;
    }
    for (; from < to; from++) {
        bits[from / 64] |= 1ul << (from % 64);
    }
}

static void huge_note(KsmDirty *d, const PmRange *range, const char *origin)
{
    uintptr_t end = range->end - (uintptr_t)origin;

    for (uintptr_t at = range->start - (uintptr_t)origin; at < end;
         at += CHUNK_BYTES) {
        d->huge |= UINT64_C(1) << (at / CHUNK_BYTES);
    }
}

/*
 * Write-protects what was written in a range and sets its bits, which begin
 * with the page at @origin.
 */
static int pagemap_ask(KsmDirty *d, const char *from, const char *to,
                       unsigned long *bits, const char *origin)
{
    PmScan scan = {
        .fd = d->kinds->pagemap,
        .start = (uintptr_t)from,
        .end = (uintptr_t)to,
        .all = PM_WRITTEN | PM_PRESENT,
        .tell = PM_WRITTEN | (bits ? PM_HUGE | PM_ZEROPFN : 0),
        .protect = true,
        .vec = d->kinds->ranges,
        .vec_len = N_RANGES,
    };

    while (scan.start < scan.end) {
        ssize_t n = prim.pagemap(&scan);

        if (n < 0) {
            return n;
        }
        for (ssize_t i = 0; bits && i < n; i++) {
            bits_set(bits,
                     (scan.vec[i].start - (uintptr_t)origin) / PAGE_BYTES,
                     (scan.vec[i].end - (uintptr_t)origin) / PAGE_BYTES);
            if ((scan.vec[i].kinds & (PM_HUGE | PM_ZEROPFN)) == PM_HUGE) {
                huge_note(d, &scan.vec[i], origin);
            }
        }
        if (scan.walk_end <= scan.start) {
            break;
        }
        scan.start = scan.walk_end;
    }
    return 0;
}

/* The bit says something else of pages in other states. */
static bool page_is_blind(const KsmRegion *r, size_t page)
{
    return page_state(r, page) == PAGE_FREED && (r->state[page] & PAGE_BLIND);
}

/* As pagemap_ask() for [@from, @to), but the bits of blind pages stay clear. */
static int pagemap_ask_but_blind(KsmDirty *d, KsmRegion *r, size_t from,
                                 size_t to, size_t origin,
                                 unsigned long *bits)
{
    int ret = 0;
    size_t n;

    for (size_t i = from; i < to && ret == 0; i += n) {
        bool blind = page_is_blind(r, i);

        n = 1;
        while (i + n < to && page_is_blind(r, i + n) == blind) {
            n++;
        }
        if (!blind) {
            ret = pagemap_ask(d, page_addr(r, i), page_addr(r, i + n), bits,
                              page_addr(r, origin));
        }
    }
    return ret;
}

static void chunk_protect(KsmDirty *d, KsmRegion *r, size_t chunk)
{
    size_t first = chunk * CHUNK_PAGES;
    size_t from = MAX(first, region_first(r));
    size_t to = MIN(first + CHUNK_PAGES, region_end(r));

    if (r->tracking) {
        pagemap_ask_but_blind(d, r, from, to, from, NULL);
    }
}

static void chunk_loose(KsmChunk *c)
{
    c->flags |= CHUNK_LOOSE;
    c->hot = c->hot_wait = c->same = 0;
}

static void chunk_unloose(KsmChunk *c)
{
    if (c->flags & CHUNK_LOOSE) {
        c->flags &= ~(CHUNK_LOOSE | CHUNK_STIRRED | CHUNK_STILL);
        c->hot = c->hot_wait = c->same = 0;
    }
}

void dirty_arm(KsmDirty *d, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];

    c->flags |= CHUNK_ARMED;
    if (r->dirty == KSM_DIRTY_PAGEMAP && (c->flags & CHUNK_HUGE) &&
        !c->mapped && chunk_is_whole(r, chunk)) {
        chunk_loose(c);
    } else {
        chunk_protect(d, r, chunk);
    }
}

void dirty_fasten(KsmDirty *d, KsmRegion *r, size_t chunk)
{
    chunk_unloose(&r->chunk[chunk]);
    chunk_protect(d, r, chunk);
}

void dirty_loosen(KsmDirty *d, KsmRegion *r, size_t chunk)
{
    UffdRange range = {
        d->uffd, page_addr(r, chunk * CHUNK_PAGES), CHUNK_BYTES
    };

    /* where this fails it is protected, and may be split */
    if (!r->chunk[chunk].mapped && chunk_is_whole(r, chunk) &&
        (!r->tracking || prim.uffd_protect(&range, false) == 0)) {
        chunk_loose(&r->chunk[chunk]);
        r->chunk[chunk].flags |= CHUNK_HUGE | CHUNK_VISIT;
    }
}

bool dirty_settle(KsmDirty *d, const KsmRegion *r, size_t page, size_t n)
{
    if (r->dirty != KSM_DIRTY_PAGEMAP || !r->tracking) {
        return false;
    }
    /* where this fails pages look written later */
    pagemap_ask(d, page_addr(r, page), page_addr(r, page + n), NULL,
                page_addr(r, page));
    return true;
}

bool dirty_protect(KsmDirty *d, KsmRegion *r, const PageRun *run)
{
    size_t chunk = run->page / CHUNK_PAGES;

    if (r->dirty != KSM_DIRTY_PAGEMAP || run->n < CHUNK_PAGES ||
        !(r->chunk[chunk].flags & CHUNK_HUGE)) {
        return false;
    }
    if (r->tracking) {
        pagemap_ask(d, run->addr, run->addr + run->len, NULL, run->addr);
    }
    chunk_unloose(&r->chunk[chunk]);
    return true;
}

static bool is_watched(const KsmChunk *c)
{
    return (c->flags & (CHUNK_ARMED | CHUNK_LOOSE)) == CHUNK_ARMED;
}

/* Should this chunk be asked about in this pass?  Counts the pass. */
static bool chunk_due(KsmDirty *d, KsmChunk *c)
{
    if (!is_watched(c)) {
        return false;
    }
    /* passes may be rarer than they were */
    c->hot_wait = MIN(c->hot_wait, (1u << d->hot_max) - 1);
    if (c->hot_wait) {
        c->hot_wait--;
        d->again = true;
        return false;
    }
    return true;
}

static void pagemap_sync(KsmDirty *d, KsmRegion *r, size_t chunk, size_t end)
{
    size_t lo = region_first(r), hi = region_end(r), n;

    for (size_t c = chunk; c < end; c += n) {
        size_t from = MAX(c * CHUNK_PAGES, lo), to;
        uint8_t blind = r->chunk[c].flags & CHUNK_BLIND;
        int ret;

        n = 1;
        if (!chunk_due(d, &r->chunk[c])) {
            continue;
        }
        while (c + n < end && is_watched(&r->chunk[c + n]) &&
               (r->chunk[c + n].flags & CHUNK_BLIND) == blind &&
               !r->chunk[c + n].hot_wait) {
            n++;
        }
        to = MIN((c + n) * CHUNK_PAGES, hi);
        memset(d->bitmap, 0, n * CHUNK_PAGES / 8);
        d->huge = 0;
        ret = blind ? pagemap_ask_but_blind(d, r, from, to, c * CHUNK_PAGES,
                                            d->bitmap)
                    : pagemap_ask(d, page_addr(r, from), page_addr(r, to),
                                  d->bitmap, page_addr(r, c * CHUNK_PAGES));
        if (ret < 0) {
            memset(d->bitmap, 0xff, n * CHUNK_PAGES / 8);
        }
        for (size_t i = 0; i < n; i++) {
            chunk_apply(d, r, c + i, d->bitmap + i * CHUNK_PAGES / 64);
            r->chunk[c + i].hot_wait = (1u << r->chunk[c + i].hot) - 1;
            /* is it quiet by now? */
            d->again |= r->chunk[c + i].written && !r->chunk[c + i].hot_wait;
            if (d->huge >> i & 1) {
                dirty_loosen(d, r, c + i);
            }
        }
    }
}

/* Holes and merged pages that the source says nothing about. */
static void unasked(KsmRegion *r, size_t chunk, size_t end, bool look)
{
    for (size_t c = chunk; c < end; c++) {
        if (r->chunk[c].mapped && look) {
            r->chunk[c].flags |= CHUNK_VISIT | CHUNK_CHECK;
        }
        if ((r->chunk[c].lazy || (r->chunk[c].flags & CHUNK_TAIL)) && look) {
            r->chunk[c].flags |= CHUNK_VISIT;
        }
    }
}

static void found_new(KsmRegion *r, const PmRange *found)
{
    size_t page = (found->start - (uintptr_t)r->base) / PAGE_BYTES;
    size_t end = (found->end - (uintptr_t)r->base) / PAGE_BYTES;

    if (!(found->kinds & PM_PRESENT) || (found->kinds & PM_ZEROPFN)) {
        return;
    }
    for (; page < end; page++) {
        if (page_state(r, page) == PAGE_HOLE) {
            page_set(r, page, PAGE_NEW);
            page_mark(r, page, true);
        }
    }
}

typedef enum FoundAs {
    FOUND_WANTED,       /* scan looks at the chunk */
    FOUND_NEW,          /* ... and its pages are NEW already */
} FoundAs;

/* The first chunk of the group behind the one that the address is in. */
static size_t group_end(const KsmRegion *r, uintptr_t at)
{
    size_t g = (at - (uintptr_t)r->base) / CHUNK_BYTES / GROUP_CHUNKS;

    return MIN((g + 1) * GROUP_CHUNKS, r->n_chunks);
}

/*
 * Chunks [@from, @to) are not armed: which have something in them?  Goes on to
 * the end of a group once something was found: what is found takes time, unlike
 * nothing.  Returns up to where it came.
 */
static size_t unarmed_ask(KsmDirty *d, KsmRegion *r, size_t from, size_t to,
                          FoundAs as)
{
    PmScan scan = {
        .fd = d->kinds->pagemap,
        .start = (uintptr_t)page_addr(r, MAX(from * CHUNK_PAGES,
                                             region_first(r))),
        .end = (uintptr_t)page_addr(r, MIN(to * CHUNK_PAGES, region_end(r))),
        .any = PM_PRESENT | PM_SWAPPED,
        .tell = PM_PRESENT | (as == FOUND_NEW ? PM_ZEROPFN : 0),
        .vec = d->kinds->ranges,
        .vec_len = N_RANGES,
        .max_pages = GROUP_PAGES,
    };

    while (scan.start < scan.end) {
        ssize_t got = prim.pagemap(&scan);

        for (ssize_t i = 0; i < got; i++) {
            size_t c = (scan.vec[i].start - (uintptr_t)r->base) / CHUNK_BYTES;
            size_t last = (scan.vec[i].end - 1 - (uintptr_t)r->base) /
                          CHUNK_BYTES;

            for (; c <= last; c++) {
                chunk_want(r, c);
            }
            if (as == FOUND_NEW) {
                found_new(r, &scan.vec[i]);
            }
        }
        if (got < 0 || scan.walk_end <= scan.start) {
            d->again = true;
            r->looked = false;
            break;
        }
        scan.start = scan.walk_end;
        if (got) {
            to = MIN(to, group_end(r, scan.walk_end - 1));
            scan.end = MIN(scan.end,
                           (uintptr_t)page_addr(r, to * CHUNK_PAGES));
        }
    }
    return to;
}

/* Chunks that were empty and are not any more; up to where it came. */
static size_t populated(KsmDirty *d, KsmRegion *r, size_t chunk, size_t end)
{
    /* a log is about to name those written: others are quiet, from the start */
    FoundAs as = r->seen || r->dirty != KSM_DIRTY_LOG ? FOUND_WANTED
                                                      : FOUND_NEW;
    size_t n;

    for (size_t c = chunk; c < end; c += MAX(n, 1)) {
        n = 0;
        if (!r->group[c / GROUP_CHUNKS].known) {
            n = end - c;        /* nor do the groups behind it: reach() */
        }
        while (c + n < end && !(r->chunk[c + n].flags & CHUNK_ARMED)) {
            n++;
        }
        if (n) {
            size_t came = unarmed_ask(d, r, c, c + n, as);

            if (came < c + n) {
                d->reach = 1;
                return came;
            }
        }
    }
    return end;
}

void dirty_find(KsmDirty *d, KsmRegion *r, size_t from, size_t to)
{
    while (from < to) {
        from = unarmed_ask(d, r, from, to, FOUND_NEW);
    }
}

static void log_sync(KsmDirty *d, KsmRegion *r, size_t chunk, size_t end)
{
    bool known = r->group[chunk / GROUP_CHUNKS].known;
    size_t lo = MAX(chunk * CHUNK_PAGES, region_first(r));
    size_t hi = MIN(end * CHUNK_PAGES, region_end(r));
    size_t shift = lo - chunk * CHUNK_PAGES;
    unsigned long *bits = d->bitmap;
    size_t words = (end - chunk) * CHUNK_PAGES / 64;

    if (!known) {
        /* what was written there was found populated, or is gone again */
        r->ops->dirty_sync(r->opaque, lo - region_first(r), hi - lo, bits);
        return;
    }
    memset(bits, 0, words * sizeof(*bits));
    if (!r->ops->dirty_sync(r->opaque, lo - region_first(r), hi - lo, bits)) {
        memset(bits, 0xff, words * sizeof(*bits));
    } else if (shift) {
        /* the op counts from the region's first page, we from its chunk */
        for (size_t i = hi - lo; i-- > 0;) {
            size_t to = i + shift;
            bool on = bits[i / 64] >> (i % 64) & 1;

            bits[to / 64] &= ~(1ul << (to % 64));
            bits[to / 64] |= (unsigned long)on << (to % 64);
        }
        for (size_t i = 0; i < shift; i++) {
            bits[i / 64] &= ~(1ul << (i % 64));
        }
    }
    REGION_FOREACH_KNOWN(r, c, chunk, end) {
        chunk_apply(d, r, c, bits + (c - chunk) * CHUNK_PAGES / 64);
    }
}

/*
 * Even a log does not tell whether freed and broken pages are at rest, nor what
 * the kernel merged.
 */
static void lazy_look(KsmRegion *r, size_t chunk, size_t end, bool look)
{
    for (size_t c = chunk; c < end; c++) {
        if (look && (r->chunk[c].lazy || r->chunk[c].broken ||
                     (r->chunk[c].flags & CHUNK_TAIL))) {
            r->chunk[c].flags |= CHUNK_VISIT;
        }
    }
}

/* Without a source: everything not merged is looked at, every pass. */
static void checksum_sync(KsmRegion *r, size_t chunk, size_t end)
{
    REGION_FOREACH_KNOWN(r, c, chunk, end) {
        r->chunk[c].flags |= CHUNK_VISIT;
    }
}

/* At most a group. */
static void group_sync(KsmDirty *d, KsmRegion *r, size_t chunk, size_t end,
                       bool look)
{
    switch (r->dirty) {
    case KSM_DIRTY_LOG:
        /* asked also where nothing is known: it is to forget what was there */
        log_sync(d, r, chunk, end);
        lazy_look(r, chunk, end, look);
        break;
    case KSM_DIRTY_PAGEMAP:
        pagemap_sync(d, r, chunk, end);
        unasked(r, chunk, end, look);
        break;
    default:
        checksum_sync(r, chunk, end);
        unasked(r, chunk, end, look);
        break;
    }
}

/* The end of the group, or of as many bare ones as may be asked at once. */
static size_t reach(const KsmDirty *d, const KsmRegion *r, size_t chunk)
{
    size_t g = chunk / GROUP_CHUNKS, n = 0;

    while (n < d->reach && g + n < r->n_groups && !r->group[g + n].known) {
        n++;
    }
    return MIN((g + MAX(n, 1)) * GROUP_CHUNKS, r->n_chunks);
}

size_t dirty_sync(KsmDirty *d, KsmRegion *r, size_t chunk, bool look)
{
    size_t end = populated(d, r, chunk, reach(d, r, chunk));

    for (size_t c = chunk; c < end; c += GROUP_CHUNKS) {
        if (r->group[c / GROUP_CHUNKS].known || r->dirty == KSM_DIRTY_LOG) {
            group_sync(d, r, c, MIN(c + GROUP_CHUNKS, end), look);
        }
    }
    return end;
}

void dirty_took(KsmDirty *d, size_t chunks, uint64_t ns)
{
    if (ns > REACH_NS) {
        d->reach = MAX(d->reach / 2, 1);
    } else if (ns < REACH_MORE_NS && chunks >= d->reach * GROUP_CHUNKS) {
        d->reach = MIN(d->reach * 2, REACH_MAX);
    }
}
