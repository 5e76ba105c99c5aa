/*
 * libksm: the engine, as its rooms see it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef KSM_ENGINE_H
#define KSM_ENGINE_H

#include <pthread.h>

#include "budget.h"
#include "free.h"
#include "hash.h"
#include "index.h"
#include "libksm.h"
#include "memcg.h"
#include "merge.h"
#include "pool.h"
#include "prim.h"
#include "region.h"
#include "run.h"

/*
 * A ticket lock: the thread in ksm_step() takes it chunk after chunk, and
 * whoever else wants it must get its turn in between.  Of pthread parts, for
 * ThreadSanitizer knows those.
 */
#define LOCK_TURNS 16   /* so that not all who wait wake up for one's turn */

typedef struct KsmLock {
    pthread_mutex_t mutex;
    pthread_cond_t turn[LOCK_TURNS];    /* by ticket */
    uint64_t next;
    uint64_t serving;
} KsmLock;

void lock_take(KsmLock *l);
void lock_release(KsmLock *l);

typedef enum ScanPhase {
    PHASE_START,        /* of a pass */
    PHASE_SYNC,         /* ask what was written */
    PHASE_GOOD,         /* visit chunks where merging paid, and new ones */
    PHASE_REST,         /* visit the others */
} ScanPhase;

#define RIPE_MAX 256

typedef struct KsmVmas {
    size_t max;             /* mappings the kernel lets the process have */
    size_t limit;           /* ... and that it may come to have by us */
    size_t used;            /* it had when they were counted */
    size_t since;           /* made by us since then, at most */
    uint64_t counted;       /* ns; 0: never */
} KsmVmas;

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
    uint64_t visited;       /* chunks of this pass behind us */
    uint32_t ripe[RIPE_MAX];    /* ids of first pages: chunks to merge */
    unsigned n_ripe;
    bool again;             /* something was left for a pass soon */
    unsigned settle;        /* passes until the engine may count as idle */
    uint64_t restore_ns;    /* average: restoring a run, but for its pages */
} KsmScan;

#define DIR_END UINT32_MAX
/* Ids of pages are less than PLACE_SLOT. */
#define DIR_MAX ((size_t)PLACE_SLOT / CHUNK_PAGES)

typedef struct KsmDirEntry {
    KsmRegion *region;
    uint32_t chunk;         /* of it; free: the next free entry */
} KsmDirEntry;

struct KsmEngine {
    KsmConfig cfg;
    bool run;
    bool dead;              /* in a forked child */
    KsmLock lock;
    int uffd;               /* MISSING, MOVE and async write-protect */
    int uffd_wp;            /* blocking write-protect: restore */
    int pagemap;
    int maps;               /* /proc/self/maps, kept open */
    bool wp_async;
    bool wp_shmem;
    GPtrArray *regions;
    /*
     * Chunks by id.  A free entry has no region; the free ones are linked,
     * so that the directory is never longer than there were chunks at once.
     */
    KsmDirEntry *dir;
    size_t dir_len;
    size_t dir_chunks;      /* entries in use */
    uint32_t dir_free;      /* DIR_END: none */
    size_t n_leaving;       /* regions being removed */
    bool forget;            /* some region's ages are to be forgotten */
    size_t n_pages;         /* of all regions */
    KsmIndex index;
    KsmPool pool;
    KsmHash hash;
    uint64_t seed;
    uint64_t zero_hash;
    KsmFreer *freer;        /* how and when to give memory back */
    KsmMerge merge;
    KsmPlan plan;
    KsmVmas vmas;
    KsmMemcg memcg;
    KsmScan scan;
    KsmBudget budget;
    KsmStats total;         /* counts only */
    unsigned long *bitmap;  /* for dirty: a piece of a region */
    PmRange *ranges;        /* for PAGEMAP_SCAN */
    uint8_t kinds[CHUNK_PAGES]; /* PM_* of the chunk being visited */
};

#define N_RANGES    1024u
#define PIECE_PAGES (64u * CHUNK_PAGES)     /* dirty is asked by 128 MiB */

/* Equal pages merge only where the scope says so. */
static inline bool engine_zero_only(const KsmEngine *e)
{
    return e->cfg.scope == KSM_SCOPE_ZERO;
}

/* The region of a page id, and the number of the page there. */
static inline KsmRegion *engine_page(const KsmEngine *e, uint32_t id,
                                     size_t *page)
{
    const KsmDirEntry *d = &e->dir[id / CHUNK_PAGES];

    *page = (size_t)d->chunk * CHUNK_PAGES + id % CHUNK_PAGES;
    return d->region;
}

/*
 * Kinds (PM_*) of each page of a range of up to a chunk: those of @tell, of
 * which PM_FILE is what costs. 0 or -errno.
 */
#define KINDS_FAST (PM_PRESENT | PM_SWAPPED | PM_ZEROPFN | PM_HUGE)
#define KINDS_ALL  (KINDS_FAST | PM_FILE)
int engine_kinds(KsmEngine *e, const void *addr, unsigned n, unsigned tell,
                 uint8_t *kinds);

/*
 * Room in the pool for @pages of guest memory, whatever slots are kept for
 * forked children.  0 or -ENOMEM.
 */
int engine_pool_room(KsmEngine *e, size_t pages);

void engine_stall(KsmEngine *e, uint64_t ns);

#endif
