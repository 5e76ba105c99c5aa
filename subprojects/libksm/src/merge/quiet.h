/*
 * quiet: merged pages that were written, and are quiet again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Restoring a run of such pages to anonymous memory and merging it again costs
 * so many ns, and each page saved is worth PAGE_WORTH_NS: does that pay?
 * Leaves to others when to look (engine/broken.h) and how to restore
 * (restore.h).
 */
#ifndef KSM_QUIET_H
#define KSM_QUIET_H

#include "memory/region.h"
#include "merge/cost.h"

#define QUIET_LOOKS     2u      /* with the same hash */
#define RESTORE_PAGE_NS UINT64_C(2000)      /* copied, protected, hashed */

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

/* Is the page broken, and would it be merged, were it restored? */
bool quiet_is_again(const KsmRegion *r, size_t page);

/* Will the broken page be restored, going by what is known? */
bool quiet_pays(const KsmCosts *costs, const KsmRegion *r, size_t page,
                uint32_t zero);

#endif
