/*
 * libksm tests: pages that the kernel moves elsewhere meanwhile
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>
#include <unistd.h>

#include "base/kinds.h"
#include "still.h"

/*
 * The type of what is swapped out, in the low 5 bits, by include/linux/swap.h:
 * migration is 24 to 26 where device memory is built in (then that is 27 to
 * 30), else 28 to 30.
 */
#define TYPES_MIGRATION     0x77000000u
#define TRIES               1000u

bool still_not(uint64_t entry)
{
    return (entry >> ENTRY_SWAPPED & 1) && !(entry >> ENTRY_PRESENT & 1) &&
           (TYPES_MIGRATION >> (entry & 0x1f) & 1);
}

static bool range_is_still(int fd, const PmRange *range)
{
    uint64_t entry;

    for (uintptr_t at = range->start; at < range->end; at += PAGE_BYTES) {
        off_t offset = at / PAGE_BYTES * sizeof(entry);

        /* or it was, and has arrived */
        if (pread(fd, &entry, sizeof(entry), offset) == sizeof(entry) &&
            (still_not(entry) || entry >> ENTRY_PRESENT & 1)) {
            return false;
        }
    }
    return true;
}

static bool scan_is_still(const PmScan *scan, ssize_t got)
{
    for (ssize_t i = 0; i < got; i++) {
        if (!(scan->vec[i].kinds & PM_PRESENT) &&
            !range_is_still(scan->fd, &scan->vec[i])) {
            return false;
        }
    }
    return true;
}

ssize_t still_pagemap(PmScan *scan)
{
    /* asking about writes forgets them: once only */
    bool once = scan->protect || !(scan->tell & PM_PRESENT);
    PmScan ask;
    ssize_t got;

    for (unsigned i = 0; i < TRIES; i++) {
        ask = *scan;
        got = prim_real.pagemap(&ask);
        if (once || scan_is_still(&ask, got)) {
            break;
        }
        g_usleep(200);
    }
    *scan = ask;
    return got;
}

void still_calls(void)
{
    prim = prim_real;
    prim.pagemap = still_pagemap;
}
