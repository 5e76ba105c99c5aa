/*
 * libksm: merged pages that were written
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * See broken.h for the idea.  In the history of a BROKEN page the high 4 bits
 * count looks that found the same hash, the low 4 bits those to be skipped.
 */
#include <string.h>

#include "broken.h"
#include "engine.h"
#include "prim.h"
#include "scan.h"
#include "tsan.h"

#define QUIET_LOOKS     2u      /* with the same hash */
#define RESTORE_NS      UINT64_C(30000)     /* first guess: a run */
#define RESTORE_PAGE_NS UINT64_C(2000)      /* copied, protected, hashed */
#define BACKOFF_MAX     5u      /* log2 of looks */

static unsigned page_age(const KsmRegion *r, size_t page)
{
    return r->history[page] >> 4;
}

static bool is_quiet(const KsmRegion *r, size_t page)
{
    return page_state(r, page) == PAGE_BROKEN &&
           page_age(r, page) >= QUIET_LOOKS;
}

static bool is_again(const KsmRegion *r, size_t page)
{
    return page_state(r, page) == PAGE_BROKEN &&
           (r->state[page] & PAGE_AGAIN);
}

/* What restoring and merging a run costs, whatever its length. */
static int64_t run_costs(const KsmEngine *e)
{
    uint64_t restoring = e->scan.restore_ns ? e->scan.restore_ns : RESTORE_NS;

    return restoring + e->merge.isolate_ns + DROP_NS + e->merge.map_ns;
}

/* The content of a page is known: what is it equal to? */
static void page_match(KsmEngine *e, KsmRegion *r, size_t page, bool zero)
{
    uint32_t place;

    if (zero) {
        page_again(r, page, true);
        return;
    }
    place = index_lookup(&e->index, r->tag[page]);
    if (place == page_id(r, page)) {
        return;     /* whoever is equal finds it there */
    }
    page_again(r, page, place != PLACE_NONE);
    if (place != PLACE_NONE) {
        scan_met(e, place);
    } else if (index_insert(&e->index, r->tag[page], page_id(r, page))) {
        r->state[page] |= PAGE_INDEXED;
    }
}

static void page_look(KsmEngine *e, KsmRegion *r, size_t page, uint64_t hash64)
{
    uint32_t hash = scan_fold(r, hash64);
    unsigned age = page_age(r, page);

    if (!age || r->tag[page] != hash) {
        region_leave(r, page, PAGE_BROKEN);
        r->tag[page] = hash;
        r->history[page] = 1 << 4;
        return;
    }
    page_match(e, r, page, hash64 == e->zero_hash);
    age = MIN(age + 1, 15);
    r->history[page] = age << 4 | scan_skip(age - 1);
}

/* Hashes what is to be looked at this time. */
static void pages_look(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    uint64_t hash[CHUNK_PAGES];
    uint16_t which[CHUNK_PAGES];
    size_t first = chunk * CHUNK_PAGES;
    unsigned n = 0;

    KSM_TSAN_IGNORE_BEGIN();
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        if (page_state(r, first + i) != PAGE_BROKEN ||
            !(e->kinds[i] & PM_PRESENT)) {
            continue;
        }
        if (r->history[first + i] & 0x0f) {
            r->history[first + i]--;
            continue;
        }
        hash[n] = e->hash(page_addr(r, first + i), e->seed);
        which[n++] = i;
    }
    KSM_TSAN_IGNORE_END();
    for (unsigned i = 0; i < n; i++) {
        page_look(e, r, first + which[i], hash[i]);
    }
    e->total.pages_scanned += n;
}

typedef struct QuietRun {
    unsigned n;         /* pages to restore; 0: it does not pay */
    unsigned seen;      /* pages looked at: none of them begins a better run */
} QuietRun;

/*
 * The best run that begins at @page, which is equal to something.  Zeroes are
 * apart: where there is nothing else, no memory is needed.
 */
static QuietRun quiet_run(const KsmEngine *e, const KsmRegion *r, size_t page,
                          size_t end)
{
    uint32_t zero = scan_fold(r, e->zero_hash);
    bool zeroes = r->tag[page] == zero;
    QuietRun run = { 0 };
    int64_t worth = 0, best = 0;

    while (page + run.seen < end && worth >= 0 &&
           is_quiet(r, page + run.seen) &&
           (r->tag[page + run.seen] == zero) == zeroes) {
        worth += is_again(r, page + run.seen) ? RUN_PAGE_WORTH_NS : 0;
        worth -= RESTORE_PAGE_NS;
        run.seen++;
        if (worth > best) {
            best = worth;
            run.n = run.seen;
        }
    }
    run.n = best >= run_costs(e) ? run.n : 0;
    return run;
}

/* False: not this time, as a device is at it, or there is no memory. */
static bool restore(KsmEngine *e, KsmRegion *r, size_t page, unsigned n)
{
    KsmScan *s = &e->scan;
    uint64_t t = prim.cpu_ns();

    if (merge_restore(e, r, page, n) < 0) {
        return false;
    }
    t = prim.cpu_ns() - t;
    t -= MIN(t, n * RESTORE_PAGE_NS);
    s->restore_ns = s->restore_ns ? s->restore_ns : RESTORE_NS;
    /* one that was interrupted counts little */
    s->restore_ns = (s->restore_ns * 7 + MIN(t, 3 * s->restore_ns)) / 8;
    return true;
}

/* True: something was restored. */
static bool chunk_restore(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    size_t page = chunk * CHUNK_PAGES, end = page + CHUNK_PAGES;
    bool any = false;

    while (page < end) {
        QuietRun run = { 0 };

        if (is_again(r, page)) {
            run = quiet_run(e, r, page, end);
        }
        if (run.n) {
            any |= restore(e, r, page, run.n);
        }
        page += run.n ? run.n : MAX(run.seen, 1);
    }
    return any;
}

void broken_look(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    uint64_t cpu = prim.cpu_ns();

    if (!c->broken || e->scan.pass % CHECK_PASSES) {
        return;
    }
    pages_look(e, r, chunk);
    c->calm = MIN(c->calm + 1, 255);
    e->total.scan_time += prim.cpu_ns() - cpu;
    if (!r->ops || !r->ops->busy || e->uffd_wp < 0 ||
        c->calm < 1u << c->restored) {
        return;
    }
    cpu = prim.cpu_ns();
    if (chunk_restore(e, r, chunk)) {
        c->restored = c->calm < 4u << c->restored
                      ? MIN(c->restored + 1, BACKOFF_MAX)
                      : c->restored - (c->restored > 0);
        c->calm = 0;
    }
    e->total.merge_time += prim.cpu_ns() - cpu;
}

bool broken_pays(KsmEngine *e, const KsmRegion *r, size_t page)
{
    size_t start = page / CHUNK_PAGES * CHUNK_PAGES;
    size_t end = start + CHUNK_PAGES;

    while (page > start && is_again(r, page - 1) &&
           is_quiet(r, page - 1)) {
        page--;
    }
    return quiet_run(e, r, page, end).n > 0;
}
