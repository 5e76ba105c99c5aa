/*
 * ahead: memory for slots, before anybody asks for it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Finding memory for a chunk's new slots is among the dearest calls that merge
 * it, and must be done before its pages are isolated (merge.c).  While a pool
 * grows the next slots are known: so where there are helpers they ask for those
 * in advance, as many as the last plan took.  What nobody has taken by the end
 * of a pass goes back.
 *
 * It is waited for before a plan's slots get memory, so nobody has the file's
 * lock when isolated pages are written to it; mapping it over them needs none.
 * (Where the kernel has to reclaim memory first it takes locks that mapping
 * needs, for whomever it does that.)
 */
#ifndef KSM_AHEAD_H
#define KSM_AHEAD_H

#include "base/crew.h"

#define AHEAD_PIECE 64u     /* slots for a helper: some 70 us, and no fewer */
#define AHEAD_PIECES 8u
#define AHEAD_MAX   (AHEAD_PIECES * AHEAD_PIECE)

typedef struct AheadPiece {
    KsmChore chore;
    int fd;
    uint32_t slot;
    unsigned n;
    int ret;                /* 0 or -errno, when it is done */
} AheadPiece;

/* All zeroes, but for @crew. */
typedef struct KsmAhead {
    KsmCrew *crew;
    uint64_t asked_ns;      /* when it was last asked */
    AheadPiece piece[AHEAD_PIECES];
    unsigned n_pieces;      /* that were given, and not waited for */
    uint32_t from, to;      /* slots that have memory, when they are done */
    bool refused;           /* some were, in this pass: who knows which have */
    uint32_t top;           /* the next slot, when it was last asked */
} KsmAhead;

/*
 * How many of the @n slots from @slot on have memory: the first ones.  Nobody
 * asks for those again.  What was had for long does not count: by now it may be
 * in swap, from where only asking again brings it back.
 */
unsigned ahead_take(KsmAhead *a, uint32_t slot, unsigned n);

/* Some of these slots have lost theirs. */
void ahead_forget(KsmAhead *a, uint32_t slot, unsigned n);

/*
 * Asks for as many slots of the file as were taken since the last call: from
 * @top on, the next one that will be, and below @end.
 */
void ahead_ask(KsmAhead *a, int fd, uint32_t top, uint32_t end);

/* Memory that nobody has asked for. */
size_t ahead_bytes(const KsmAhead *a);

/* Gives back to the file what is left from @top on. */
void ahead_end(KsmAhead *a, int fd, uint32_t top);

#endif
