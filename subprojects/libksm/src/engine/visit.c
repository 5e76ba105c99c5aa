/*
 * visit: what the pages of a chunk are
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <sys/mman.h>

#include "base/prim.h"
#include "base/tsan.h"
#include "engine/ages.h"
#include "engine/broken.h"
#include "engine/classify.h"
#include "engine/loose.h"
#include "engine/tail.h"
#include "engine/visit.h"

#define HASH_PIECE  16u     /* pages that a thread takes at once */
#define HASH_MIN    64u     /* for each helper: some 20 us */
#define PREFETCH    16u     /* pages whose place in the index is looked up */
#define AWAY_MAX    7u      /* log2 of passes between looks for swapped pages */

static bool page_skip(KsmEngine *e, KsmRegion *r, size_t page)
{
    if (!e->cfg.smart_scan || !age_passes(r, page)) {
        return false;
    }
    e->total.pages_skipped++;
    e->scan.again = true;
    return true;
}

/* A merged page was written. */
static void page_broke(KsmEngine *e, KsmRegion *r, size_t page)
{
    content_leave(&e->content, r, page, PAGE_BROKEN);
    broken_count(e, page_chunk(r, page));
    r->cow_broken++;
    e->total.cow_broken++;
}

void visit_page(KsmEngine *e, KsmRegion *r, size_t page, uint8_t kind)
{
    bool there = (kind & PM_PRESENT) && !(kind & PM_ZEROPFN);

    switch (page_state(r, page)) {
    case PAGE_OUTSIDE:
    case PAGE_BROKEN:
        break;
    case PAGE_MERGED:
        if (kind_is_anonymous(kind)) {
            page_broke(e, r, page);
        }
        break;
    case PAGE_HOLE:
    case PAGE_GIVEN:
        if (there) {
            page_set(r, page, PAGE_NEW);
            page_mark(r, page, true);
        } else if (kind & PM_SWAPPED) {
            page_set(r, page, PAGE_SWAPPED);
        }
        break;
    case PAGE_SWAPPED:
        if (there) {
            page_set(r, page, PAGE_NEW);
            page_mark(r, page, true);
        } else if (!(kind & PM_SWAPPED)) {
            page_set(r, page, PAGE_HOLE);
        }
        break;
    case PAGE_BARRED:
        /* is something mapped there by its owner? */
        if (there) {
            page_set(r, page, PAGE_NEW);
            page_mark(r, page, true);
        }
        break;
    case PAGE_FREED:
        chunk_set_lazy(r, page_chunk(r, page),
                       page_chunk(r, page)->lazy + there);
        if (there && !(r->state[page] & PAGE_BLIND) &&
            (r->dirty == KSM_DIRTY_CHECKSUM ||
             (page_chunk(r, page)->flags & CHUNK_LOOSE))) {
            page_set(r, page, PAGE_NEW);
            page_mark(r, page, true);
        }
        break;
    case PAGE_PINNED:
    case PAGE_BUSY:
        if (page_chunk(r, page)->wait == 0) {
            content_leave(&e->content, r, page, PAGE_NEW);
            page_mark(r, page, r->dirty == KSM_DIRTY_CHECKSUM);
        }
        /* fall through */
    default:
        if (!there) {
            content_leave(&e->content, r, page, kind & PM_SWAPPED ? PAGE_SWAPPED
                                                    : PAGE_HOLE);
        }
        break;
    }
}

/*
 * Pages that could not be isolated are tried again.  A forked child may look
 * like a pin: the kernel moves only pages known to be ours alone, and finds
 * that out at the next write.  A write fault without a write does it, but only
 * once the child is gone: before, it would copy.  (A page table entry that says
 * so too soon costs that copy.)  Nor while a device writes by a plain
 * reference: the fault would copy, and leave the device the old page.  A later
 * device finds the page by its own write fault.
 *
 * Of a huge page that is mapped in part the kernel asks the first page, which
 * may be gone with the child, and then never moves the others (Linux 6.18).
 * MADV_COLD for a part of it splits it: then each answers for itself.  (Not
 * where memory is locked.)
 */
static void chunk_unshare(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    size_t page = chunk * CHUNK_PAGES;
    uint64_t entry[CHUNK_PAGES];
    unsigned n;

    if (r->chunk[chunk].wait || !r->count[PAGE_PINNED] ||
        kinds_read(&e->kinds, page_addr(r, page), CHUNK_PAGES, entry) < 0) {
        return;
    }
    for (unsigned i = 0; i < CHUNK_PAGES; i += MAX(n, 1)) {
        n = 0;
        while (i + n < CHUNK_PAGES && (entry[i + n] >> ENTRY_EXCLUSIVE & 1) &&
               page_state(r, page + i + n) == PAGE_PINNED) {
            n++;
        }
        if (n && !region_busy(r, page_addr(r, page + i), n * PAGE_BYTES)) {
            prim.advise(page_addr(r, page + i), n * PAGE_BYTES,
                        MADV_POPULATE_WRITE);
            prim.advise(page_addr(r, page + i), n * PAGE_BYTES, MADV_COLD);
        }
    }
}

bool visit_ask(KsmEngine *e, KsmVisit *v, KsmRegion *r, size_t chunk)
{
    size_t first = chunk * CHUNK_PAGES;
    unsigned lo = 0, n = CHUNK_PAGES;

    while (lo < CHUNK_PAGES && page_state(r, first + lo) == PAGE_OUTSIDE) {
        lo++;
    }
    while (n > lo && page_state(r, first + n - 1) == PAGE_OUTSIDE) {
        n--;
    }
    memset(v->kinds, 0, CHUNK_PAGES);
    return kinds_ask(&e->kinds, page_addr(r, first + lo), n - lo,
                     r->chunk[chunk].mapped ? KINDS_ALL : KINDS_FAST,
                     v->kinds + lo) == 0;
}

/*
 * A page that migrates (compaction, NUMA balancing) looks swapped out for a
 * moment, and one that a read has swapped in is in no log: these are looked for
 * again, ever less often.
 */
static void chunk_away(KsmEngine *e, KsmChunk *c, bool some, bool changed)
{
    G_STATIC_ASSERT(1u << AWAY_MAX <= UINT8_MAX);

    e->scan.again |= changed;
    if (!some) {
        c->away = c->away_wait = 0;
        return;
    }
    c->away = changed ? 0 : MIN(c->away + 1, AWAY_MAX);
    c->away_wait = 1u << c->away;
}

/* False: the chunk's page tables cannot be had. */
static bool chunk_look(KsmEngine *e, KsmVisit *v, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    size_t first = chunk * CHUNK_PAGES;
    uint64_t swapped = r->count[PAGE_SWAPPED];
    uint8_t all = 0;

    chunk_unshare(e, r, chunk);
    if (!visit_ask(e, v, r, chunk)) {
        return false;
    }
    chunk_set_lazy(r, c, 0);
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        all |= v->kinds[i];
        if (v->kinds[i] || (c->flags & CHUNK_LIVE)) {
            visit_page(e, r, first + i, v->kinds[i]);
        }
    }
    chunk_away(e, c, all & PM_SWAPPED, r->count[PAGE_SWAPPED] != swapped);
    tail_look(e, r, chunk);
    c->flags &= ~(CHUNK_HUGE | CHUNK_CHECK);
    if ((all & PM_HUGE) && !(all & PM_ZEROPFN)) {
        c->flags |= CHUNK_HUGE;
    }
    if ((c->flags & (CHUNK_LOOSE | CHUNK_HUGE)) == CHUNK_LOOSE) {
        loose_split(e, r, chunk);
    }
    if ((all & (PM_PRESENT | PM_SWAPPED)) && !(c->flags & CHUNK_ARMED)) {
        dirty_arm(&e->dirty, r, chunk);
    }
    v->empty = !all;
    v->hash_all = loose_begin(e, r, chunk);
    return true;
}

/* Is the page to be hashed now? */
static bool page_wanted(KsmEngine *e, const KsmVisit *v, KsmRegion *r,
                        size_t page)
{
    PageState s = page_state(r, page);
    bool known = page_is_known(r, page);

    if (v->hash_all || (page_chunk(r, page)->flags & CHUNK_LOOSE)) {
        return s == PAGE_NEW || (v->hash_all && known);
    }
    if (r->dirty != KSM_DIRTY_CHECKSUM) {
        return s == PAGE_NEW && !(r->state[page] & PAGE_WRITTEN) &&
               !page_skip(e, r, page);
    }
    return (s == PAGE_NEW || known) && !page_skip(e, r, page);
}

static uint64_t zero_or_not(const KsmHasher *h, const char *page)
{
    return bytes_are_zero(page, PAGE_BYTES) ? h->zero : ~h->zero;
}

static void pages_want(KsmEngine *e, KsmVisit *v, KsmRegion *r, size_t first)
{
    v->n = 0;
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        if ((v->kinds[i] & PM_PRESENT) && !(v->kinds[i] & PM_ZEROPFN) &&
            page_wanted(e, v, r, first + i)) {
            v->which[v->n++] = i;
        }
    }
}

static void page_hash(KsmVisit *v, unsigned k)
{
    const char *page = v->first + v->which[k] * PAGE_BYTES;

    if (k + 1 < v->n) {
        page_prefetch(v->first + v->which[k + 1] * PAGE_BYTES);
    }
    v->hash[k] = v->zero_only ? zero_or_not(v->hasher, page)
                              : hash_page(v->hasher, page);
}

/* The wanted pages that nobody else has taken; also by helpers. */
static void pages_hash_rest(void *opaque)
{
    KsmVisit *v = opaque;
    unsigned k;

    KSM_TSAN_IGNORE_BEGIN();
    while ((k = atomic_fetch_add(&v->taken, HASH_PIECE)) < v->n) {
        for (unsigned end = MIN(k + HASH_PIECE, v->n); k < end; k++) {
            page_hash(v, k);
        }
    }
    KSM_TSAN_IGNORE_END();
}

/* Hashes the wanted pages. */
static void pages_hash(KsmEngine *e, KsmVisit *v, KsmRegion *r, size_t first)
{
    KsmChore chore[CREW_MAX];
    unsigned helpers;

    pages_want(e, v, r, first);
    helpers = MIN(e->crew.n, v->n / HASH_MIN);
    v->hasher = &e->hasher;
    v->zero_only = engine_zero_only(e);
    v->first = page_addr(r, first);
    v->taken = 0;
    v->helped_ns = 0;
    for (unsigned i = 0; i < helpers; i++) {
        chore[i] = (KsmChore) { .work = pages_hash_rest, .opaque = v };
        crew_give(&e->crew, &chore[i]);
    }
    pages_hash_rest(v);
    for (unsigned i = 0; i < helpers; i++) {
        crew_wait(&e->crew, &chore[i]);
        v->helped_ns += chore[i].cpu_ns;
    }
    e->helped_ns += v->helped_ns;
}

static void tag_prefetch(const KsmEngine *e, const KsmVisit *v,
                         const KsmRegion *r, unsigned k)
{
    if (k < v->n) {
        index_prefetch(&e->content.index, content_tag(r, v->hash[k]));
    }
}

/* ... and what follows from it.  Returns how many changed that were known. */
static unsigned pages_classify(KsmEngine *e, const KsmVisit *v, KsmRegion *r,
                               size_t first)
{
    unsigned changed = 0;

    for (unsigned i = 0; i < PREFETCH; i++) {
        tag_prefetch(e, v, r, i);
    }
    for (unsigned i = 0; i < v->n; i++) {
        changed += loose_changed(e, r, first + v->which[i], v->hash[i]);
    }
    for (unsigned i = 0; i < v->n; i++) {
        tag_prefetch(e, v, r, i + PREFETCH);
        classify_page(e, r, first + v->which[i], v->hash[i]);
    }
    e->total.pages_scanned += v->n;
    return changed;
}

/*
 * @again: not for the first time.  Returns when it ended, by this thread's CPU
 * clock.
 */
static uint64_t chunk_hash(KsmEngine *e, KsmVisit *v, KsmRegion *r,
                           size_t chunk, bool again)
{
    KsmChunk *c = &r->chunk[chunk];
    uint64_t cpu = prim.cpu_ns(), end;
    unsigned fresh = c->fresh, changed;

    pages_hash(e, v, r, chunk * CHUNK_PAGES);
    changed = pages_classify(e, v, r, chunk * CHUNK_PAGES);
    if (c->fresh < fresh) {
        loose_hashed(r, chunk);
    }
    end = prim.cpu_ns();
    e->scan.hash_time += again ? 0 : end - cpu + v->helped_ns;
    e->scan.active |= v->n && !again && r->dirty != KSM_DIRTY_CHECKSUM;
    if (v->hash_all) {
        loose_end(e, r, chunk, changed);
        end = prim.cpu_ns();
    }
    return end;
}

bool visit_chunk(KsmEngine *e, KsmVisit *v, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    uint64_t cpu = prim.cpu_ns(), end;
    /* the first looks are done once; others may go on for ever */
    bool again = loose_goes_on(c);

    c->flags &= ~CHUNK_VISIT;
    if (!chunk_look(e, v, r, chunk)) {
        c->flags |= CHUNK_VISIT;
        e->scan.again = true;
        r->looked = false;
        return false;
    }
    end = chunk_hash(e, v, r, chunk, again && v->hash_all);
    if (r->dirty != KSM_DIRTY_CHECKSUM &&
        (c->fresh > c->written || (c->fresh && (c->flags & CHUNK_LOOSE)))) {
        c->flags |= CHUNK_VISIT;    /* some were skipped */
    }
    c->flags |= CHUNK_SEEN;
    e->total.scan_time += end - cpu + v->helped_ns;
    return true;
}

void visit_mark(const KsmVisit *v, bool *pages, bool value)
{
    for (unsigned i = 0; i < v->n; i++) {
        pages[v->which[i]] = value;
    }
}
