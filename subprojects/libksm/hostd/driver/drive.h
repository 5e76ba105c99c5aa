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
 * more seldom.
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
    uint64_t cpu_ns;        /* ksmd's */
    bool pressed;           /* the host is short of memory */
} DriveSeen;

typedef struct Drive {
    unsigned share;         /* percent of a core */
    bool runs;
    uint64_t given, saved;  /* as seen last */
    uint64_t scans;         /* when something new came, or was gained */
    uint64_t need;          /* scans begun since then that are enough */
    uint64_t retry_ns;      /* when to try again; 0: there is nothing to try */
    uint64_t wait_ns;
    uint64_t cpu_ns, at_ns; /* when the speed was set */
    uint64_t pages;         /* of a batch */
} Drive;

void drive_init(Drive *d, unsigned share);
/* What is to be now. */
Want drive_next(Drive *d, const DriveSeen *seen);

#endif
