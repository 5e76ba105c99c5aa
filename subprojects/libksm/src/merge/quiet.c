/*
 * quiet: merged pages that were written, and are quiet again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "merge/kin.h"
#include "merge/quiet.h"

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

/*
 * Pages of the mapping that begins at @page; 0: it is shared, or not quiet, or
 * has pages that are equal to something, which pays by itself, or goes on in the
 * next chunk.  *@looks: fewer, if fewer have found one of them quiet.
 */
static unsigned mapping_quiet(const KsmCosts *costs, const KsmRegion *r,
                              size_t page, size_t end, uint32_t zero,
                              unsigned *looks)
{
    unsigned n = 0;

    do {
        if (!is_quiet(r, page + n) ||
            (quiet_is_again(r, page + n) &&
             quiet_pays(costs, r, page + n, zero))) {
            return 0;
        }
        *looks = MIN(*looks, quiet_looks(r, page + n));
        n++;
    } while (page + n < end && region_joined(r, page + n));
    return page + n < r->n_pages && region_joined(r, page + n) ? 0 : n;
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
    return (looks - QUIET_LOOKS + 1) * MAPPING_WORTH_NS;
}

unsigned quiet_mappings(const KsmCosts *costs, const KsmRegion *r, size_t page,
                        size_t end, uint32_t zero)
{
    unsigned n = 0, mappings = 0, looks = UINT8_MAX;

    if (!kin_serves(r, page) || region_joined(r, page)) {
        return 0;
    }
    while (page + n < end) {
        unsigned least = looks;
        unsigned k = mapping_quiet(costs, r, page + n, end, zero, &least);

        if (!k || k * RESTORE_PAGE_NS > mapping_worth(least)) {
            break;
        }
        looks = least;
        n += k;
        mappings++;
    }
    /* they become one, and part of those beside it */
    mappings += is_anonymous(r, page - 1) + is_anonymous(r, page + n);
    return n && (mappings - 1) * mapping_worth(looks) >=
                costs->restore_ns + n * RESTORE_PAGE_NS ? n : 0;
}
