/*
 * libksm tests: pages that the kernel moves elsewhere meanwhile
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Compaction and others' huge pages move memory at any time, and what is being
 * moved looks swapped out.  The engine looks again in a later pass; a test that
 * counts what a few passes do would fail now and then.  To try one out:
 *   while :; do echo 1 > /proc/sys/vm/compact_memory; done
 */
#ifndef KSM_TEST_STILL_H
#define KSM_TEST_STILL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/prim.h"

/*
 * Pages that may have been on their way while those around them were merged: a
 * page alone is not worth it afterwards.  Or, while they were mapped: what the
 * kernel maps around a fault leaves out pages that are locked.
 */
#define STILL_FEW   8u

/* Is the page of this entry of pagemap (bits: pagemap.rst) on its way? */
bool still_not(uint64_t entry);

/* As prim_real.pagemap, but waits until no page that it tells of is. */
ssize_t still_pagemap(PmScan *scan);

/* From now on system calls are the real ones, but for that. */
void still_calls(void);

#endif
