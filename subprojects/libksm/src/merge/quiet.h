/*
 * quiet: merged pages that were written, and are quiet again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Restoring a run of such pages to anonymous memory and merging it again costs
 * so many ns, mapping the pool over a shorter one fewer, and each page saved is
 * worth PAGE_WORTH_NS: does that pay?  A mapping of which nothing is shared any
 * more is worth MAPPING_WORTH_NS, and as much again for each of the next four
 * looks that find it quiet: on a busy host, where restoring costs more than that,
 * it ends later.  Leaves to others when to look (engine/broken.h) and
 * how it is done (restore.h, rejoin.h).
 */
#ifndef KSM_QUIET_H
#define KSM_QUIET_H

#include "memory/region.h"
#include "merge/cost.h"

#define QUIET_LOOKS     2u      /* with the same hash */
#define RESTORE_PAGE_NS UINT64_C(2000)      /* copied, protected, hashed */
#define REJOIN_PAGE_NS  UINT64_C(1500)      /* read, compared, freed */

/* Looks at a BROKEN page that found the same hash: high bits of its history. */
static inline unsigned quiet_looks(const KsmRegion *r, size_t page)
{
    return r->history[page] >> 4;
}

typedef struct QuietRun {
    unsigned n;         /* pages to restore; 0: it does not pay */
    unsigned seen;      /* pages looked at: none of them begins a better run */
} QuietRun;

/*
 * The best run that begins at @page, which is equal to something, and ends
 * before @end.  @zero: the tag of zeroes in this region.
 */
QuietRun quiet_run(const KsmCosts *costs, const KsmRegion *r, size_t page,
                   size_t end, uint32_t zero);

/*
 * Pages from @page on, before @end, that may map the pool as they are, if there
 * are slots; 0: that does not pay, even with one mapping.
 */
unsigned quiet_rejoins(const KsmCosts *costs, const KsmRegion *r, size_t page,
                       size_t end, uint32_t zero);

/*
 * Mappings of the pool from @page on, before @end, of which nothing is shared any
 * more: all of their pages were written and are quiet, though not worth either.
 * Pages to restore for there being fewer mappings then (kin.h); 0: that does not
 * pay.
 */
unsigned quiet_mappings(const KsmCosts *costs, const KsmRegion *r, size_t page,
                        size_t end, uint32_t zero);

/* Is the page broken, and would it be merged, were it restored? */
bool quiet_is_again(const KsmRegion *r, size_t page);

/* Will the broken page be merged, going by what is known? */
bool quiet_pays(const KsmCosts *costs, const KsmRegion *r, size_t page,
                uint32_t zero);

#endif
