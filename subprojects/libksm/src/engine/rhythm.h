/*
 * rhythm: how long to rest between passes, and what is looked at when
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * After a pass that did not pay for itself the engine rests a multiple of the
 * CPU time that passes took since the last rest, or the last one that did,
 * excluding hashing, which is done once: passes over idle memory take 0.033 %
 * of a core, as long as one takes 10 ms or less: no rest is longer than 30 s.
 * Where memory is written all the time, what has gone quiet is written again if
 * it is not found soon: the more was gained lately, compared with what that
 * took, the shorter is the rest.  So more is spent only where something comes
 * of it.  Where the next passes are waited for they take up to 1 % of a core.
 * What is merged during a rest, and pays for the passes before it, ends that
 * rest (scan.c).
 *
 * Merged pages that were written are looked at each CHECK_PASSES or so; by the
 * clock, too, as long as passes that look take no more than the others, or
 * pay: what is written all the time is found quiet only by looks that come
 * soon.  Where they may not, two come in a row, if something was written before
 * the first, and then none for twice as long.  A look counts as several, if it
 * is so long after the last one.
 *
 * So a guest that goes on writing may cost more than an idle one, and does if
 * merging earns it: 0.1 % of a core where it earns a quarter of what passes
 * take, 0.5 % where it earns half.
 */
#ifndef KSM_RHYTHM_H
#define KSM_RHYTHM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct KsmRhythm {
    bool check;             /* merged pages are looked at in this pass ... */
    bool alone;             /* ... long after the last look: the next is soon */
    bool second;            /* ... this one, of such a pair */
    bool calm;              /* the last look found nothing written */
    uint8_t looks;          /* it counts as so many looks */
    uint8_t before[2];      /* ... those before it did */
    uint8_t soonest;        /* looks from a write to when it is found quiet */
    uint16_t all_looks;     /* low bits of their number, ever */
    uint64_t check_pass;    /* number of the pass ... */
    uint64_t checked;       /* ... and ns, when they were looked at */
    uint64_t check_rest;    /* ns for which that is enough */
    uint64_t check_cost;    /* ns of that pass, or both of a pair */
    uint64_t check_spent;   /* ... of all that looked, lately ... */
    uint64_t check_gained;  /* ... and what each and the next merged is worth */
    unsigned judged;        /* passes since that were judged */
    uint64_t owed;          /* ns of passes that did not pay */
    uint64_t spent;         /* ns of all passes, lately ... */
    uint64_t gained;        /* ... and what was merged is worth */
} KsmRhythm;

/* What a pass took, and what came of it; ns of CPU. */
typedef struct PassYield {
    uint64_t cost;
    uint64_t hash;          /* part of the cost: hashing that is done once */
    uint64_t worth;         /* what was merged may have cost so much */
    bool go_on;             /* there is to be no rest, whether it paid or not */
    bool hurry;             /* ... or a short one */
    bool late;              /* others are asked first: merged a pass later */
    bool stirred;           /* merged pages had been written when it looked */
} PassYield;

/* Number @pass begins, @now. */
void rhythm_begin(KsmRhythm *m, uint64_t pass, uint64_t now);

/* ... and ends: ns to rest, as far as its cost goes; 0: no rest. */
uint64_t rhythm_end(KsmRhythm *m, const PassYield *yield);

/* What was merged in a rest is worth so much. */
void rhythm_gains(KsmRhythm *m, uint64_t worth);

#endif
