/*
 * broken: merged pages that were written
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * In the history of a BROKEN page the high 4 bits count quiet looks (quiet.h),
 * the low 4 bits those to be skipped.
 */
#include "base/prim.h"
#include "base/tsan.h"
#include "engine/ages.h"
#include "engine/alike.h"
#include "engine/broken.h"
#include "merge/quiet.h"

#define BACKOFF_MAX     5u      /* log2 of looks ... */
#define BACKOFF_SOME    2u      /* ... if only some pages are written again */
#define LOOK_MAX_NS     UINT64_C(5000000)   /* of CPU; then no more is tried */

/* The content of a page is known: what is it equal to? */
static void page_match(KsmEngine *e, KsmRegion *r, size_t page,
                       uint64_t hash64)
{
    uint32_t place;
    bool equal;

    if (hash64 == e->hasher.zero) {
        page_again(r, page, true);
        return;
    }
    place = index_lookup(&e->content.index, r->tag[page]);
    if (place == page_id(r, page)) {
        return;     /* an equal page finds it there */
    }
    equal = place != PLACE_NONE && alike_is_equal(e, hash64, place);
    page_again(r, page, equal);
    if (equal) {
        content_met(&e->content, place);
    } else if (index_lookup(&e->content.index, r->tag[page]) == PLACE_NONE) {
        content_enter(&e->content, r, page);
    }
}

/* False: it has changed since the last look. */
static bool page_look(KsmEngine *e, KsmRegion *r, size_t page, uint64_t hash64)
{
    uint32_t hash = content_tag(r, hash64);
    unsigned age = quiet_looks(r, page);

    if (!age || r->tag[page] != hash) {
        content_leave(&e->content, r, page, PAGE_BROKEN);
        r->tag[page] = hash;
        r->history[page] = 1 << 4;
        e->scan.stirred = true;
        return !age;
    }
    page_match(e, r, page, hash64);
    age = MIN(age + 1, 15);
    r->history[page] = age << 4 | age_skip(age - 1);
    return true;
}

/*
 * Hashes the pages due for a look.  Those that are as they were are looked at
 * ever less, so that a pass rests only for those that are not.
 */
static void pages_look(KsmEngine *e, KsmRegion *r, size_t chunk,
                       const uint8_t *kinds)
{
    uint64_t hash[CHUNK_PAGES], cpu = prim.cpu_ns();
    uint16_t which[CHUNK_PAGES];
    size_t first = chunk * CHUNK_PAGES;
    unsigned n = 0, calm = 0;

    KSM_TSAN_IGNORE_BEGIN();
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        if (page_state(r, first + i) != PAGE_BROKEN ||
            !(kinds[i] & PM_PRESENT)) {
            continue;
        }
        if (r->history[first + i] & 0x0f) {
            r->history[first + i]--;
            continue;
        }
        hash[n] = hash_page(&e->hasher, page_addr(r, first + i));
        which[n++] = i;
    }
    KSM_TSAN_IGNORE_END();
    for (unsigned i = 0; i < n; i++) {
        calm += page_look(e, r, first + which[i], hash[i]);
    }
    e->total.pages_scanned += n;
    e->scan.hash_time += (prim.cpu_ns() - cpu) * calm / MAX(n, 1);
}

/*
 * False: not this time, as a device is at it, or there is no memory.  @merged:
 * it will be.
 */
static bool restore(KsmEngine *e, KsmRegion *r, size_t page, unsigned n,
                    bool merged)
{
    uint64_t t = prim.cpu_ns();

    if (restore_pages(&e->restore, r, page, n) < 0) {
        return false;
    }
    t = prim.cpu_ns() - t;
    cost_average(&e->costs.restore_ns, t - MIN(t, n * RESTORE_PAGE_NS));
    /*
     * Quiet for two looks, and still, as far as is known: the next pass asks
     * about it, and merges it.  (A whole chunk may be a huge page, and is not
     * to be protected.)
     */
    page_chunk(r, page)->hot_wait = 0;
    if (n < CHUNK_PAGES) {
        dirty_settle(&e->dirty, r, page, n);
    }
    e->scan.restored |= merged && page_state(r, page) == PAGE_NEW;
    return true;
}

/* What came of a chunk. */
typedef struct Done {
    bool restored;              /* some pages were */
    bool tried, rejoined;       /* ... or were to be merged as they are; and are */
    bool doubtful;              /* others were not, for busier times' costs */
    bool cut;                   /* others had the lock, and changed it */
} Done;

/* False: nobody was held up for it. */
static bool rejoin(KsmEngine *e, KsmRegion *r, size_t page, unsigned n,
                   Done *done)
{
    bool tried = false;
    unsigned merged = rejoin_pages(&e->rejoin, r, page, n, &tried);

    e->total.merged += merged;
    r->merged += merged;
    done->tried |= tried;
    done->rejoined |= merged > 0;
    return tried;
}

/*
 * The run of a page that is quiet, and equal to something: restored, as @run
 * has it, or merged as it is.  Returns how many pages were tried.
 */
static unsigned run_restore(KsmEngine *e, KsmRegion *r, size_t page,
                            QuietRun run, Done *done)
{
    size_t end = (page / CHUNK_PAGES + 1) * CHUNK_PAGES;
    uint32_t zero = content_tag(r, e->hasher.zero);
    unsigned n = run.n ? 0 : quiet_rejoins(&e->costs, r, page, end, zero);

    if (run.n) {
        done->restored |= restore(e, r, page, run.n, true);
    } else if ((!n || !rejoin(e, r, page, n, done)) && !done->doubtful) {
        /* if it could be rejoined but for its slots, that costs little enough */
        done->doubtful = quiet_run(&costs_guess, r, page, end, zero).n ||
                         (!n && quiet_rejoins(&costs_guess, r, page, end,
                                              zero));
    }
    return MAX(run.n, n);
}

/*
 * Is it to be had at once?  Nobody shall wait for a device, nor for swap; asked
 * now, so that nobody is held up for nothing.
 */
static bool is_at_hand(KsmRegion *r, size_t page, unsigned n,
                       const uint8_t *kinds)
{
    if (region_inhibited(r) ||
        region_busy(r, page_addr(r, page), n * PAGE_BYTES)) {
        return false;
    }
    for (unsigned i = 0; i < n; i++) {
        if (!(kinds[page % CHUNK_PAGES + i] & PM_PRESENT)) {
            return false;
        }
    }
    return true;
}

/*
 * Mappings from @page on of which nothing is shared any more.  Returns how many
 * pages were tried.
 */
static unsigned mappings_end(KsmEngine *e, KsmRegion *r, size_t page,
                             const uint8_t *kinds, Done *done)
{
    size_t end = (page / CHUNK_PAGES + 1) * CHUNK_PAGES;
    uint32_t zero = content_tag(r, e->hasher.zero);
    unsigned n = quiet_mappings(&e->costs, r, page, end, zero);
    bool merged = false;

    for (unsigned i = 0; i < n; i++) {
        merged |= quiet_is_again(r, page + i);
    }
    if (n && is_at_hand(r, page, n, kinds)) {
        if (!restore(e, r, page, n, merged) &&
            page_state(r, page) == PAGE_BROKEN) {
            /* it is not quiet before it was looked at once more, later */
            r->history[page] = 1 << 4 | age_skip(UINT_MAX);
        }
    } else if (!n && !done->doubtful) {
        done->doubtful = quiet_mappings(&costs_guess, r, page, end, zero);
    }
    return n;
}

static Done chunk_restore(KsmEngine *e, KsmRegion *r, size_t chunk,
                          const uint8_t *kinds)
{
    size_t page = chunk * CHUNK_PAGES, end = page + CHUNK_PAGES, seen = page;
    uint32_t zero = content_tag(r, e->hasher.zero);
    uint64_t until = prim.cpu_ns() + LOOK_MAX_NS;
    Done done = { false };

    while (page < end) {
        QuietRun run = { 0 };
        unsigned n = 0;

        if (quiet_is_again(r, page)) {
            if (page >= seen) {
                run = quiet_run(&e->costs, r, page, end, zero);
                seen = page + (run.n ? run.n : run.seen);
            }
            n = run_restore(e, r, page, run, &done);
        }
        if (!n && page_state(r, page) == PAGE_BROKEN) {
            n = mappings_end(e, r, page, kinds, &done);
        }
        if (n && prim.cpu_ns() >= until) {
            break;
        }
        done.cut = n && !turn_give(&e->turn, r, chunk);
        if (done.cut) {
            break;
        }
        page += MAX(n, 1);
    }
    if (done.doubtful) {
        costs_doubt_restore(&e->costs);
    }
    return done;
}

/* Was half of what was merged there written soon?  Before more of it is. */
static bool chunk_is_hot(const KsmChunk *c)
{
    unsigned merged = c->mapped - c->broken + c->soon + c->later;

    return 2 * c->soon > merged;
}

/*
 * Some of it was restored or rejoined, or it was tried: how long is it until
 * more may be?  If the last time was long ago it may be sooner the next.
 */
static void chunk_wait(KsmEngine *e, KsmChunk *c, bool long_wait)
{
    unsigned max = long_wait ? BACKOFF_MAX : BACKOFF_SOME;

    if (c->calm >= MAX(4u << c->restored, e->scan.rhythm.soonest)) {
        c->restored -= c->restored > 0;
    } else if (c->restored < max) {
        c->restored++;
    } else {
        c->restored -= c->restored > max;
    }
    c->calm = 0;
    c->soon = c->later = 0;
    c->restored_at = e->scan.rhythm.all_looks;
}

bool broken_look(KsmEngine *e, KsmRegion *r, size_t chunk,
                 const uint8_t *kinds, bool *restored)
{
    KsmChunk *c = &r->chunk[chunk];
    uint64_t cpu;
    bool hot;
    Done done;

    *restored = false;
    if (!c->broken || !e->scan.rhythm.check) {
        return true;
    }
    cpu = prim.cpu_ns();
    pages_look(e, r, chunk, kinds);
    c->calm = MIN(c->calm + e->scan.rhythm.looks, 255);
    e->total.scan_time += prim.cpu_ns() - cpu;
    if (!r->ops || !r->ops->busy || e->uffd_wp < 0 ||
        c->calm < 1u << c->restored) {
        return true;
    }
    cpu = prim.cpu_ns();
    hot = chunk_is_hot(c);
    done = chunk_restore(e, r, chunk, kinds);
    if (done.restored || done.tried) {
        chunk_wait(e, c, hot || (!done.restored && !done.rejoined));
        e->scan.again = true;
    }
    e->total.merge_time += prim.cpu_ns() - cpu;
    *restored = done.restored;
    return !done.cut;
}
