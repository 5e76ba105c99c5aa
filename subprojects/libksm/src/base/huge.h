/*
 * huge: is shared memory made of huge pages?
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A hole punched into part of one is zeroes written in place, visible to all
 * that still refer to the page: then nothing of a pool may be given up at all.
 */
#ifndef KSM_HUGE_H
#define KSM_HUGE_H

#include <stdbool.h>

typedef enum HugeMount {
    HUGE_MEMFD,             /* the kernel's own */
    HUGE_NEVER,             /* mounted with huge=never */
} HugeMount;

/* As sysfs says now; of all sizes that there are (mTHP, Linux 6.11). */
bool huge_shmem(HugeMount mount);

#endif
