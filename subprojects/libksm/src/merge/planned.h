/*
 * planned: what is to become of each page of a chunk, and in which parts
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Made by plan.h and parts.h, carried out by merge.h.
 */
#ifndef KSM_PLANNED_H
#define KSM_PLANNED_H

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
    bool tail;                      /* the kernel has what is left */
    uint64_t stall_limit_ns;
    /* the plan */
    KsmRegion *region;
    size_t chunk;
    uint8_t act[CHUNK_PAGES];
    uint32_t slot[CHUNK_PAGES];     /* MAP, FILL: a user of it is taken */
    PlanSpan span[CHUNK_PAGES / 2];
    unsigned n_spans;
    unsigned kept;                  /* pages of spans that are put back */
    bool breaks;                    /* a huge page, moved in part */
    unsigned zero, map, fresh;      /* pages by act; fresh: NEW, FILL */
    unsigned offered;               /* pages that wait for an answer */
    unsigned busy;                  /* of them: could not even be offered */
    KsmReason why;                  /* pages are left */
    bool late;                      /* made at the price of parts_late() */
    bool doubtful;                  /* refused by estimates alone */
    unsigned runs;                  /* mappings it will need */
    uint32_t partner[CHUNK_PAGES];  /* ids of chunks that can be merged now */
    unsigned n_partners;
} KsmPlan;

static inline bool act_has_slot(PlanAct act)
{
    return act == ACT_MAP || act == ACT_FILL;
}

/* Is page @i + 1 of the plan in the same mapping as page @i? */
static inline bool plan_joined(const KsmPlan *p, unsigned i)
{
    if (i + 1 >= CHUNK_PAGES) {
        return false;
    }
    if (act_has_slot(p->act[i]) && act_has_slot(p->act[i + 1])) {
        return p->slot[i] + 1 == p->slot[i + 1];
    }
    return p->act[i] == ACT_NEW && p->act[i + 1] == ACT_NEW;
}

#endif
