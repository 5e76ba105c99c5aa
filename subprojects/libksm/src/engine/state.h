/*
 * state: an engine, and the parts it is made of
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Only the rooms of this floor know struct KsmEngine.  ksm_step() holds its one
 * lock for a chunk at a time, or a part of one (turn.h).
 */
#ifndef KSM_STATE_H
#define KSM_STATE_H

#include <stdatomic.h>

#include "base/crew.h"
#include "base/hash.h"
#include "base/kinds.h"
#include "base/lock.h"
#include "engine/pace.h"
#include "engine/promise.h"
#include "engine/rhythm.h"
#include "memory/directory.h"
#include "memory/turn.h"
#include "merge/gather.h"
#include "merge/merge.h"
#include "merge/restore.h"
#include "share/asks.h"
#include "share/content.h"
#include "watch/dirty.h"
#include "watch/free.h"
#include "watch/memcg.h"

typedef enum ScanPhase {
    PHASE_START,        /* of a pass */
    PHASE_SYNC,         /* ask what was written */
    PHASE_GOOD,         /* visit chunks where merging paid, and new ones */
    PHASE_REST,         /* visit the others */
} ScanPhase;

/* A chunk that is looked at: visit.h. */
typedef struct KsmVisit {
    uint8_t kinds[CHUNK_PAGES];     /* PM_* */
    bool empty;             /* nothing is populated */
    bool hash_all;          /* all is to be hashed: loose.h */
    unsigned n;             /* pages that are hashed */
    uint16_t which[CHUNK_PAGES];
    uint64_t hash[CHUNK_PAGES];
    const KsmHasher *hasher;
    bool zero_only;         /* of pages that are not zeroes nothing is told */
    const char *first;      /* where the chunk begins */
    atomic_uint taken;      /* of those pages, to be hashed by who took them */
    uint64_t helped_ns;     /* of CPU that helpers used */
} KsmVisit;

#define RIPE_MAX 256

typedef struct KsmScan {
    ScanPhase phase;
    KsmRegion *region;      /* cursor */
    size_t chunk;
    uint64_t pass;          /* passes begun */
    uint64_t started;       /* ns; of this pass */
    uint64_t due;           /* ns; when the next one may begin */
    uint64_t idle_ns;       /* pause between passes, grows while idle */
    bool active;            /* something was hashed in this pass */
    uint64_t scan_time;     /* totals when this pass began */
    uint64_t merged;
    uint64_t hash_time;     /* of this pass, part of scan_time */
    uint64_t cost;          /* ns; of the passes that a rest is for */
    uint64_t took;          /* ... of the last, if it was done; not hashing */
    bool restored;          /* something was, for the next pass to merge */
    bool stirred;           /* merged pages had been written */
    KsmPromise promise;     /* of the next one */
    KsmRhythm rhythm;
    uint64_t visited;       /* chunks of this pass behind us */
    uint32_t ripe[RIPE_MAX];    /* ids of first pages: chunks to merge */
    unsigned n_ripe;
    uint64_t starved;       /* ns; since when nothing could be asked; 0 */
    bool again;             /* something was left for a pass soon */
    bool skipped;           /* ... for the store took no more questions */
    bool in_vain;           /* ... and, too slow a one, was hashed for nothing */
    unsigned settle;        /* passes until the engine may count as idle */
    size_t crowd;           /* entries of the index: alike.h */
    KsmVisit visit;
} KsmScan;

typedef enum FollowPhase {
    FOLLOW_NEXT,        /* no chunk is in hand */
    FOLLOW_OFFER,       /* its content is offered, and answers are awaited */
    FOLLOW_MERGE,       /* it is restored, and queued */
} FollowPhase;

/* A chunk on its way to another pool: follow.h. */
typedef struct KsmFollow {
    FollowPhase phase;
    uint32_t at;            /* chunks of the directory below were looked at */
    uint32_t id;            /* of the chunk in hand, there */
    unsigned losses;        /* of the store's peer, when it was taken */
    uint64_t until;         /* ns: it waits no longer */
    uint64_t due;           /* ns: until then nothing is done */
    size_t moved;           /* pages, since the directory's beginning */
    size_t left;            /* ... that were not merged at once */
    uint32_t slot[CHUNK_PAGES]; /* that are to move; SLOT_NONE */
    uint32_t tag[CHUNK_PAGES];  /* of their content, there */
    bool offered[CHUNK_PAGES];
} KsmFollow;

typedef enum CompactPhase {
    COMPACT_REST,
    COMPACT_GATHER,     /* chunk by chunk */
    COMPACT_FOLLOW,     /* ... what maps slots that others have left */
} CompactPhase;

/* Contents that move to slots which follow each other: compact.h. */
typedef struct KsmCompact {
    CompactPhase phase;
    uint32_t id;            /* of the chunk it is at ... */
    unsigned page;          /* ... and the page there */
    uint64_t due;           /* ns: until then it rests */
    uint64_t spent;         /* ns of CPU, in this sweep ... */
    uint64_t moving;        /* ... in steps that moved pages */
    int64_t gone;           /* mappings that those took */
    unsigned doubt;         /* log2: by that less is gathered in one */
    uint64_t merged;        /* the engine's total that credit is for */
    size_t credit;          /* pages that may be gathered */
    size_t gathered;        /* in this sweep */
    size_t behind;          /* pages that did not follow in the last one */
    size_t missed;          /* ... so far in this one */
    unsigned tries;         /* sweeps for this credit that gathered nothing */
    unsigned vain;          /* ... in a row, for whatever credit */
    unsigned stuck;         /* ... nor anybody followed who is behind */
    bool skipped;           /* some chunks were not asked, in this one */
} KsmCompact;

/* What is left to the kernel's KSM: tail.h. */
typedef struct KsmTail {
    bool refused;           /* the kernel has none */
    bool eager;             /* tests: all is left to it, quiet or not */
    size_t chunks;          /* that are marked */
    size_t waiting;         /* that will be, as far as this pass knows */
    size_t unworthy_now;    /* pages not worth a mapping, in this pass so far */
    size_t unworthy;        /* ... and in the last one */
    uint64_t room_ns;       /* when the store was told how much room there is */
    unsigned hurried;       /* short rests for those, less long ones */
    uint64_t given;         /* times that one was, ever */
    uint64_t looked_ns;     /* when its figures were read */
    uint8_t scans;          /* low bits of its full scans, then */
    uint32_t tick;          /* what rests are counted in, now */
    double saves;           /* share of its merged pages that is saved */
} KsmTail;

struct KsmEngine {
    KsmConfig cfg;
    bool run;
    bool dead;              /* in a forked child */
    KsmLock lock;
    KsmTurn turn;
    GPtrArray *regions;
    size_t n_leaving;       /* regions being removed */
    bool forget;            /* some region's ages are to be forgotten */
    /* userfaultfds */
    int uffd;               /* MISSING, MOVE and async write-protect */
    int uffd_wp;            /* blocking write-protect: restore */
    KsmUrgent urgent;
    KsmCrew crew;
    uint64_t helped_ns;     /* of CPU that helpers used for hashing, ever */
    /* the rooms, from the ground up */
    KsmKinds kinds;
    KsmHasher hasher;
    KsmDirectory dir;
    KsmContent content;
    KsmAsks asks;
    GQueue ripening;        /* chunks: ripen.h */
    uint64_t renewed_ns;    /* when what is alone was asked about again ... */
    uint32_t renewed;       /* ... up to that chunk */
    KsmFollow follow;
    KsmCompact compact;
    KsmTail tail;
    KsmFreer *freer;        /* how and when to give memory back */
    KsmMemcg memcg;
    KsmDirty dirty;
    KsmVmas vmas;
    KsmCut cut;
    KsmCosts costs;
    KsmPlan plan;
    KsmStage stage;
    KsmMerge merge;
    KsmRestore restore;
    KsmRejoin rejoin;
    KsmGather gather;
    KsmScan scan;
    KsmBudget budget;
    KsmStats total;         /* counts only: those of this floor */
};

/* What the owner knows as KsmRegion. */
typedef struct EngineRegion {
    KsmRegion region;       /* first */
    KsmEngine *engine;
} EngineRegion;

static inline KsmEngine *region_engine(KsmRegion *r)
{
    return ((EngineRegion *)r)->engine;
}

/* Percent of a CPU that it may use. */
static inline unsigned engine_max_cpu(const KsmEngine *e)
{
    return MIN(e->cfg.max_cpu, 100 * e->cfg.threads);
}

static inline bool engine_zero_only(const KsmEngine *e)
{
    return e->cfg.scope == KSM_SCOPE_ZERO;
}

#endif
