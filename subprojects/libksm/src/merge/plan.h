/*
 * plan: what is to become of each page of a chunk
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The plan also says which parts of the chunk have to be isolated for that, and
 * whether it pays.  Nothing is changed yet, but slots are taken.  Where the
 * store lets us fill them, they get their memory before a span is isolated and
 * their content after it: faulting threads wait for that copy, but it replaces
 * the page without a comparison.
 *
 * The unit of isolation.  Moving memory out costs a TLB shootdown per call and
 * breaks a huge page if it takes part of one.  So a huge page is moved whole,
 * and only if enough of it goes.  Small pages are moved in spans: runs whose
 * gaps are cheaper to put back than another isolation.
 */
#ifndef KSM_PLAN_H
#define KSM_PLAN_H

#include "base/hash.h"
#include "merge/cost.h"
#include "merge/cut.h"
#include "merge/vmas.h"
#include "share/asks.h"
#include "merge/sample.h"
#include "share/content.h"
#include "watch/memcg.h"

#define RUN_PATTERN_MIN 16u     /* equal neighbours that make a pattern */

typedef enum PlanAct {
    ACT_KEEP,       /* goes back as it is */
    ACT_ZERO,       /* zeroes: given back to the kernel */
    ACT_MAP,        /* maps slot[] */
    ACT_NEW,        /* to be offered; becomes ACT_FILL, or ACT_KEEP for now */
    ACT_FILL,       /* fills slot[] and maps it; merge: becomes ACT_MAP */
    ACT_STAY,       /* merge: was not isolated */
    ACT_HOLE,       /* merge: was not populated */
    ACT_PINNED,     /* merge: STAY, because it is pinned */
    ACT_CHANGED,    /* merge: KEEP, because it differs */
    ACT_COLLIDED,   /* merge: KEEP, equal only by hash */
    ACT_POISONED,   /* merge: lost, its memory failed */
    ACT_BARRED,     /* merge: the same, but nobody has access */
    ACT_DISPLACED,  /* merge: lost, its owner mapped over it */
    PLAN_ACTS
} PlanAct;

typedef struct PlanSpan {
    uint16_t first, n;
} PlanSpan;

typedef struct KsmPlan {
    /* what planning needs */
    KsmContent *content;
    KsmAsks *asks;
    const KsmHasher *hasher;
    const GPtrArray *regions;
    KsmVmas *vmas;
    KsmCut *cut;
    KsmCosts *costs;
    KsmMemcg *memcg;
    Sampler sampler;
    unsigned split_min_pages;       /* a huge page must save so many */
    uint64_t stall_limit_ns;
    /* the plan */
    KsmRegion *region;
    size_t chunk;
    uint8_t act[CHUNK_PAGES];
    uint32_t slot[CHUNK_PAGES];     /* MAP, FILL: a user of it is taken */
    PlanSpan span[CHUNK_PAGES / 2];
    unsigned n_spans;
    unsigned zero, map, fresh;      /* pages by act; fresh: NEW, FILL */
    unsigned offered;               /* pages that wait for an answer */
    unsigned busy;                  /* of them: could not even be offered */
    KsmReason why;                  /* pages are left */
    bool doubtful;                  /* refused by estimates alone */
    unsigned runs;                  /* mappings it will need */
    uint32_t partner[CHUNK_PAGES];  /* ids of chunks that can be merged now */
    unsigned n_partners;
} KsmPlan;

/* Could merging this chunk pay?  Cheap. */
bool plan_ripe(const KsmPlan *p, const KsmRegion *r, size_t chunk);

/*
 * Plans the chunk; false: nothing is to be done (the reason is left in the
 * chunk).  There may be partners in any case.
 */
bool plan_make(KsmPlan *p, KsmRegion *r, size_t chunk);

/* Another act for a page, which gives up the user of its slot. */
void plan_drop(KsmPlan *p, unsigned i, PlanAct act);

/* @done to @n pages: slots that they do not map lose their users. */
void plan_done(KsmPlan *p, unsigned first, unsigned n, const uint8_t *done);

#endif
