/*
 * libksm: carrying a plan out
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * For each span: isolate (UFFDIO_MOVE into a staging area; whoever touches
 * the pages now waits), ask the owner whether a device is at it, verify byte
 * for byte, map the pool over the runs that are equal, put back the rest,
 * wake.
 *
 * The danger: between isolation and wake the staged pages are the only copy
 * of a guest's memory.  So: nothing of the staging area is dropped before
 * every page of it is either back, or replaced by a mapping that was
 * established, or known to be zeroes.  A call that fails in that time is
 * tried again, in another way if there is one, until it works; putting back
 * by UFFDIO_MOVE needs no memory, which is why that ends.
 * UFFDIO_MOVE may stop in the middle, and a move that fails may have moved
 * more than it counts: Linux 6.18 keeps in mind that it had to look at a page
 * again (EAGAIN: somebody wrote to it), moves that page with up to a page
 * table of others, and then goes at it once more, to find the target taken
 * (EEXIST).  So whenever a call has failed the page tables are asked where each
 * page is.  What is at home was not moved, or is back, for nobody else can put
 * anything there; in the staging area there may be zeroes besides, if somebody
 * read it from outside.
 * A hole that was there before must be there after: staged pages that are
 * not populated are not put back.  Nor read: where the staging area could
 * only be registered for missing pages, that would wait for ever.
 * While pages are staged the engine's thread must not touch the region: so
 * signals, whose handlers might, are blocked.
 */
#ifndef KSM_MERGE_H
#define KSM_MERGE_H

#include "region.h"

/* Pages that could not be put back, see merge.c. */
typedef struct KsmLost {
    uint64_t pages;
    void *addr;             /* of the first */
    bool told;
} KsmLost;

typedef struct KsmMerge {
    char *map;              /* both staging areas with room to align */
    size_t map_len;
    char *small;            /* 2 MiB: for small pages */
    char *huge;             /* 2 MiB: for a huge page as a whole */
    char *unreadable;       /* a page that nobody can read */
    KsmLost poisoned, displaced;
    uint8_t kinds[CHUNK_PAGES];     /* PM_* of the staged pages */
    uint8_t home[CHUNK_PAGES];      /* ... and of where they belong */
    /* averages of CPU time */
    uint64_t isolate_ns;    /* a span; but for its pages, as back_ns */
    uint64_t move_ns;       /* a page moved out or back */
    uint64_t map_ns;        /* a run */
    uint64_t copy_ns;       /* a page put back by copying */
    uint64_t back_ns;       /* a stretch of pages moved back */
    uint64_t page_ns;       /* CPU per page while it is staged */
} KsmMerge;

int merge_init(KsmEngine *e);

/* Costs were measured too high, perhaps: what is refused is not measured. */
void merge_doubt_costs(KsmEngine *e);

void merge_free(KsmEngine *e);

/* Carries e->plan out.  Returns the number of pages merged or given back. */
unsigned merge_plan(KsmEngine *e);

/*
 * Back to anonymous memory with its content: pages [page, page + n), for scan,
 * where merging may go on.  0 or -errno; what was done stays done.  -EBUSY: a
 * device may be writing to a page that was copied on write: in a later pass.
 */
int merge_restore(KsmEngine *e, KsmRegion *r, size_t page, size_t n);

/*
 * The same for the owner, whatever inhibits merging; a busy device is waited
 * for a while.  The lock is held by the caller and given up between chunks,
 * and while it waits.  Nothing of the region is merged before this returns
 * (KsmRegion.unmerging), the lock held.
 */
int merge_unmerge(KsmEngine *e, KsmRegion *r, size_t page, size_t n);

#endif
