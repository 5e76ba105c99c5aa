/*
 * quiet: merged pages that were written, and are quiet again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "merge/kin.h"
#include "merge/quiet.h"

#define LOOKS_COUNT 6u      /* further ones are far apart (engine/ages.h) */

static bool is_quiet(const KsmRegion *r, size_t page)
{
    return page_state(r, page) == PAGE_BROKEN &&
           quiet_looks(r, page) >= QUIET_LOOKS;
}

bool quiet_is_again(const KsmRegion *r, size_t page)
{
    return page_state(r, page) == PAGE_BROKEN &&
           (r->state[page] & PAGE_AGAIN);
}

/* What restoring and merging a run costs, whatever its length. */
static int64_t run_costs(const KsmCosts *c)
{
    return c->restore_ns + c->isolate_ns + DROP_NS + c->map_ns;
}

/* Zeroes are apart: where there is nothing else, no memory is needed. */
QuietRun quiet_run(const KsmCosts *costs, const KsmRegion *r, size_t page,
                   size_t end, uint32_t zero)
{
    bool zeroes = r->tag[page] == zero;
    QuietRun run = { 0 };
    int64_t worth = 0, best = 0;

    while (page + run.seen < end && worth >= 0 &&
           is_quiet(r, page + run.seen) &&
           (r->tag[page + run.seen] == zero) == zeroes) {
        worth += quiet_is_again(r, page + run.seen) ? PAGE_WORTH_NS : 0;
        worth -= RESTORE_PAGE_NS;
        run.seen++;
        if (worth > best) {
            best = worth;
            run.n = run.seen;
        }
    }
    run.n = best >= run_costs(costs) ? run.n : 0;
    return run;
}

unsigned quiet_rejoins(const KsmCosts *costs, const KsmRegion *r, size_t page,
                       size_t end, uint32_t zero)
{
    unsigned n = 0;

    while (page + n < end && quiet_is_again(r, page + n) &&
           is_quiet(r, page + n) && r->tag[page + n] != zero) {
        n++;
    }
    return n * (PAGE_WORTH_NS - REJOIN_PAGE_NS) >=
           costs->rejoin_ns + costs->map_ns ? n : 0;
}

bool quiet_pays(const KsmCosts *costs, const KsmRegion *r, size_t page,
                uint32_t zero)
{
    size_t start = page / CHUNK_PAGES * CHUNK_PAGES;
    size_t end = start + CHUNK_PAGES;

    while (page > start && quiet_is_again(r, page - 1) &&
           is_quiet(r, page - 1) &&
           (r->tag[page - 1] == zero) == (r->tag[page] == zero)) {
        page--;
    }
    return quiet_run(costs, r, page, end, zero).n ||
           quiet_rejoins(costs, r, page, end, zero);
}

typedef struct QuietMapping {
    unsigned n;         /* pages */
    unsigned looks;     /* or more found each of them quiet */
} QuietMapping;

/*
 * The mapping that begins at @page.  No pages: it is shared, or not quiet, or has
 * pages that are equal to something, which pays by itself, or goes on in the next
 * chunk.
 */
static QuietMapping mapping_quiet(const KsmCosts *costs, const KsmRegion *r,
                                  size_t page, size_t end, uint32_t zero)
{
    QuietMapping m = { 0, UINT_MAX };

    do {
        if (!is_quiet(r, page + m.n) ||
            (quiet_is_again(r, page + m.n) &&
             quiet_pays(costs, r, page + m.n, zero))) {
            return (QuietMapping) { 0 };
        }
        m.looks = MIN(m.looks, quiet_looks(r, page + m.n));
        m.n++;
    } while (page + m.n < end && region_joined(r, page + m.n));
    if (page + m.n < r->n_pages && region_joined(r, page + m.n)) {
        m.n = 0;
    }
    return m;
}

/* Is there anonymous memory, populated or not? */
static bool is_anonymous(const KsmRegion *r, size_t page)
{
    return page < r->n_pages && page_state(r, page) != PAGE_OUTSIDE &&
           page_state(r, page) != PAGE_BARRED && !page_is_mapped(r, page);
}

/* What has been quiet for longer will be so for longer. */
static uint64_t mapping_worth(unsigned looks)
{
    return (MIN(looks, LOOKS_COUNT) - QUIET_LOOKS + 1) * MAPPING_WORTH_NS;
}

unsigned quiet_mappings(const KsmCosts *costs, const KsmRegion *r, size_t page,
                        size_t end, uint32_t zero)
{
    unsigned mappings = is_anonymous(r, page - 1);
    unsigned n = 0, best = 0, looks = UINT_MAX;

    if (!kin_serves(r, page) || region_joined(r, page)) {
        return 0;
    }
    while (page + n < end) {
        QuietMapping m = mapping_quiet(costs, r, page + n, end, zero);

        if (!m.n || m.n * RESTORE_PAGE_NS > mapping_worth(m.looks)) {
            break;
        }
        looks = MIN(looks, m.looks);
        n += m.n;
        /* they become one, and part of those beside it */
        if ((mappings + is_anonymous(r, page + n)) * mapping_worth(looks) >=
            costs->restore_ns + n * RESTORE_PAGE_NS) {
            best = n;
        }
        mappings++;
    }
    return best;
}
