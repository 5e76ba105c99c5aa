/*
 * drive: when ksmd is to run, and how fast
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * ksmd scans all that it was given, for ever.  Members of the host's group give
 * it little, and say so (TAIL in docs/interop/ksm-pool.rst): it runs when there
 * is something new, at a speed that costs so much of a core, or, when the host
 * is short of memory, up to all of one; and it stops when two whole scans have
 * brought nothing.  What becomes equal later is found by trying again, more and
 * more seldom, as long as that is vain.  Something new is tried sooner, but not
 * at once: members can always have something new.  What one gives is the copy of
 * what another is about to give, with its next pass: so the more there was in vain,
 * the longer they have to be still, or to have gone on.
 *
 * Leaves to others: where the figures come from, and the knobs.
 */
#ifndef DRIVER_DRIVE_H
#define DRIVER_DRIVE_H

#include <stdbool.h>
#include <stdint.h>

#include "hand.h"

typedef struct DriveSeen {
    uint64_t now_ns;
    uint64_t left;          /* bytes that members have given to ksmd now ... */
    uint64_t given;         /* ... and how often they have given some */
    uint64_t scans;         /* ksmd's, of all that it has */
    uint64_t saved;         /* pages */
    uint64_t cpu_ns;        /* ksmd's; 0: not known */
    bool pressed;           /* the host is short of memory */
} DriveSeen;

typedef struct Drive {
    unsigned share;         /* percent of a core */
    bool runs;
    uint64_t given;         /* when it began to run */
    uint64_t told;          /* given, when last seen ... */
    uint64_t told_ns;       /* ... when that last changed ... */
    uint64_t first_ns;      /* ... and first, since it ran; 0: it has not */
    uint64_t saved;         /* most, since then */
    uint64_t until;         /* scans that are enough */
    uint64_t retry_ns;      /* when to try again; 0: there is nothing to try */
    uint64_t new_ns;        /* ... if there is something new */
    uint64_t wait_ns;       /* from the last end to retry_ns */
    uint64_t cpu_ns, at_ns; /* when the speed was set */
    uint64_t pages;         /* in SLEEP_MS */
} Drive;

void drive_init(Drive *d, unsigned share);
/* What is to be now. */
Want drive_next(Drive *d, const DriveSeen *seen);

#endif
