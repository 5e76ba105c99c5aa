/*
 * promise: a pass that is made without a rest, for what waits for it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A huge page that was first hashed in one pass is merged in the next
 * (loose.h), and a rest is taken from what passes have cost, not from what
 * waits.  So if what only the next pass may merge pays for that pass, it is
 * promised that there is no rest.  The pass may merge little all the same:
 * guests write to their memory, and devices are at it.  So each promise that
 * was not kept makes the next one count a quarter as much.
 *
 * What others of a group have to answer first is merged later than in that
 * pass: so a promise is judged when there was time for it, or after some more
 * passes.
 */
#ifndef KSM_PROMISE_H
#define KSM_PROMISE_H

#include <stdbool.h>
#include <stdint.h>

#define PROMISE_PASSES  16u

typedef struct KsmPromise {
    uint64_t waits;         /* pages that only the next pass may merge */
    uint64_t made;          /* ... for which there was no rest; 0: there was */
    uint64_t merged;        /* pages, in all, by then ... */
    unsigned passes;        /* since */
    uint64_t began;         /* ns; when the first one had ended */
    uint64_t cost;          /* ns of CPU of the last pass, but for hashing */
    unsigned vain;          /* promises that came to little; log4 */
} KsmPromise;

/* @pages more were found that only the next pass may merge. */
void promise_waits(KsmPromise *p, unsigned pages);

/*
 * Makes one, if that pays; false: it does not.  @merged: pages, in all.  While
 * one is to be judged, another belongs to it.
 */
bool promise_make(KsmPromise *p, uint64_t merged);

/*
 * A pass has ended, and has cost so many ns of CPU, but for hashing: was a
 * promise kept, if the pass that it was made for ended @ns ago or earlier (0: if
 * this is that one), or was the first of PROMISE_PASSES?
 */
void promise_judge(KsmPromise *p, uint64_t merged, uint64_t cost, uint64_t now,
                   uint64_t ns);

/* The next pass begins: what waits is found anew. */
void promise_begin(KsmPromise *p);

#endif
