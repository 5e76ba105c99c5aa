/*
 * stalls: for how long pages were away
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * From isolation to wake, or while a huge page is broken, by the clock: how long
 * threads that touch them may wait.  Buckets as in KsmStats, each in four parts of
 * the same length: a percentile is not too long by more than a quarter.
 */
#ifndef KSM_STALLS_H
#define KSM_STALLS_H

#include "libksm.h"

#define STALL_PARTS 4u

typedef struct KsmStalls {
    uint64_t count;
    uint64_t max;           /* ns */
    uint64_t part[KSM_STALL_BUCKETS][STALL_PARTS];
} KsmStalls;

/* Where a bucket begins, and how long it is: ns. */
static inline uint64_t stalls_from(unsigned bucket)
{
    return bucket ? UINT64_C(500) << bucket : 0;
}

static inline uint64_t stalls_length(unsigned bucket)
{
    return bucket ? UINT64_C(500) << bucket : 1000;
}

static inline void stalls_add(KsmStalls *s, uint64_t ns)
{
    unsigned i = 0;
    uint64_t part;

    while (i < KSM_STALL_BUCKETS - 1 && ns >= UINT64_C(1000) << i) {
        i++;
    }
    part = (ns - stalls_from(i)) / (stalls_length(i) / STALL_PARTS);
    s->part[i][MIN(part, STALL_PARTS - 1)]++;
    s->count++;
    s->max = MAX(s->max, ns);
}

static inline uint64_t stalls_bucket(const KsmStalls *s, unsigned bucket)
{
    uint64_t n = 0;

    for (unsigned k = 0; k < STALL_PARTS; k++) {
        n += s->part[bucket][k];
    }
    return n;
}

/* Upper end of the part in which the @percent-th percentile falls. */
static inline uint64_t stalls_percentile(const KsmStalls *s, unsigned percent)
{
    uint64_t below = 0;

    for (unsigned i = 0; i < KSM_STALL_BUCKETS * STALL_PARTS; i++) {
        unsigned bucket = i / STALL_PARTS, part = i % STALL_PARTS;

        below += s->part[bucket][part];
        if (below * 100 >= s->count * percent) {
            return MIN(stalls_from(bucket) +
                       stalls_length(bucket) / STALL_PARTS * (part + 1),
                       s->max);
        }
    }
    return s->max;
}

#endif
