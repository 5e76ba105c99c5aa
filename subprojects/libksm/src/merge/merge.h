/*
 * merge: carrying a plan out
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * For each span: allocate slots, see that those to map can be read, isolate it
 * (stage.h), verify byte for byte, map the pool over equal runs, put back the
 * rest, release it, and account for its pages.  In between others have the
 * lock.
 *
 * The danger: a page is replaced by what it is not.  Why it is safe:
 * 1. A page is compared after isolation, when nobody can write to it, with the
 *    slot that it will map; or it is copied to that slot then.
 * 2. The busy op is asked after isolation, for writes past the page tables.
 * 3. A slot is not written while it has users, and a planned page is one.
 * 4. Only an established mapping takes a page's place.  Where the kernel
 *    refuses one, the page goes back.
 *
 * Leaves to others: which pages (plan.h), and what follows from the result.
 */
#ifndef KSM_MERGE_H
#define KSM_MERGE_H

#include "memory/turn.h"
#include "merge/plan.h"
#include "merge/stage.h"
#include "merge/stalls.h"
#include "watch/dirty.h"

/* Not equal to what has its tag, though it did not change. */
typedef struct MergeCollided {
    size_t page;
    uint32_t tag;           /* that it should go by */
} MergeCollided;

typedef struct KsmMerge {
    KsmPlan *plan;
    KsmStage *stage;
    KsmTurn *turn;
    KsmContent *content;
    const KsmHasher *hasher;
    KsmDirty *dirty;
    KsmVmas *vmas;
    KsmCosts *costs;
    bool fresh[CHUNK_PAGES];    /* hashed in this step */
    /* of the last plan */
    MergeCollided collided[CHUNK_PAGES];
    unsigned n_collided;
    uint32_t unsound;           /* a slot that was found so */
    bool broke;                 /* a huge page, to move parts of it */
    bool cut_short;             /* others had the lock; the rest was dropped */
    bool kept[CHUNK_PAGES];     /* not replaced; not in a whole huge page */
    /* since the engine was made; as in KsmStats */
    KsmStalls stalls;
    uint64_t isolations, busy, pinned, verify_failed;
} KsmMerge;

/*
 * Carries the plan out, called and left with the lock held; others have it in
 * between.  Returns the number of pages merged or given back; the caller takes
 * note of those that collided, and of those kept.
 */
unsigned merge_plan(KsmMerge *m);

#endif
