/*
 * libksm: planning a chunk
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The plan says for each page of a chunk what is to become of it, which
 * parts of the chunk have to be isolated for that, and whether it pays.
 * Nothing is changed yet, but slots of the pool are taken.  They get their
 * memory before a span is isolated and are filled from what was: that costs
 * whoever waits for it a copy, and saves everybody a comparison, for the copy
 * is what the page is replaced by.
 *
 * The unit of isolation.  Moving memory out costs a TLB shootdown per call
 * and breaks a huge page if it takes part of one.  So a huge page is moved
 * whole, and only if enough of it goes.  Small pages are moved in spans:
 * runs with gaps so short that putting the gap's pages back is cheaper than
 * another isolation.
 */
#ifndef KSM_RUN_H
#define KSM_RUN_H

#include "region.h"

#define RUN_PATTERN_MIN 16u     /* equal neighbours that make a pattern */
#define RUN_PAGE_WORTH_NS UINT64_C(12000)   /* of CPU a saved page may cost */
#define DROP_NS         UINT64_C(7500)  /* dropping a staged span */
#define SPAN_MIN        32u     /* pages: no span is cut shorter */

typedef enum PlanAct {
    ACT_KEEP,       /* goes back as it is */
    ACT_ZERO,       /* zeroes: given back to the kernel */
    ACT_MAP,        /* maps slot[] */
    ACT_NEW,        /* to be copied to the pool; becomes ACT_FILL */
    ACT_FILL,       /* fills slot[] and maps it; merge: becomes ACT_MAP */
    ACT_STAY,       /* merge: was not isolated */
    ACT_HOLE,       /* merge: was not populated */
    ACT_PINNED,     /* merge: STAY, because it is pinned */
    ACT_CHANGED,    /* merge: KEEP, because it differs */
    ACT_COLLIDED,   /* merge: KEEP, equal only by hash; slot[]: new tag */
} PlanAct;

typedef struct PlanSpan {
    uint16_t first, n;
} PlanSpan;

typedef struct KsmPlan {
    KsmRegion *region;
    size_t chunk;
    uint8_t act[CHUNK_PAGES];
    uint32_t slot[CHUNK_PAGES];     /* MAP, FILL: a user of it is taken */
    PlanSpan span[CHUNK_PAGES / 2];
    unsigned n_spans;
    unsigned zero, map, fresh;      /* pages by act; fresh: NEW, FILL */
    unsigned runs;                  /* mappings it will need */
} KsmPlan;

/* Could merging this chunk pay?  Cheap. */
bool run_ripe(const KsmRegion *r, size_t chunk);

/*
 * Plans the chunk into e->plan; false: nothing is to be done (the reason is
 * left in the chunk).
 */
bool run_plan(KsmEngine *e, KsmRegion *r, size_t chunk);

static inline bool act_has_slot(PlanAct act)
{
    return act == ACT_MAP || act == ACT_FILL;
}

/* Gives up the users of a run of pages that will not map their slots. */
void run_drop(KsmEngine *e, unsigned page);

/* The vma budget: mappings that may still be made. */
size_t run_vmas_left(KsmEngine *e);
/* ... by anybody, whatever is to be left to the program. */
size_t run_vmas_free(KsmEngine *e);
/* The mapping that @addr is in; false: that cannot be had. */
bool run_vma_at(KsmEngine *e, const void *addr, char **start, char **end);
/* The kernel refused a mapping: look again how many there are. */
void run_vmas_full(KsmEngine *e);

#endif
