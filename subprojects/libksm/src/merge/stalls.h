/*
 * stalls: for how long pages were away
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * From isolation to wake, or while a huge page is broken, by the clock: how long
 * threads that touch them may wait.  Buckets as in KsmStats.
 */
#ifndef KSM_STALLS_H
#define KSM_STALLS_H

#include "libksm.h"

typedef struct KsmStalls {
    uint64_t count;
    uint64_t max;           /* ns */
    uint64_t bucket[KSM_STALL_BUCKETS];
} KsmStalls;

static inline void stalls_add(KsmStalls *s, uint64_t ns)
{
    unsigned i = 0;

    while (i < KSM_STALL_BUCKETS - 1 && ns >= UINT64_C(1000) << i) {
        i++;
    }
    s->bucket[i]++;
    s->count++;
    s->max = MAX(s->max, ns);
}

/* Upper end of the bucket in which the @percent-th percentile falls. */
static inline uint64_t stalls_percentile(const KsmStalls *s, unsigned percent)
{
    uint64_t below = 0;

    for (unsigned i = 0; i < KSM_STALL_BUCKETS; i++) {
        below += s->bucket[i];
        if (below * 100 >= s->count * percent) {
            return MIN(UINT64_C(1000) << i, s->max);
        }
    }
    return s->max;
}

#endif
