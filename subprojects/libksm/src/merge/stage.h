/*
 * stage: taking pages out of a guest's reach, and putting them back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The idea: UFFDIO_MOVE takes a span of pages out of the region into a staging
 * area.  Threads that touch one of them wait in a fault, so that the pages can
 * be compared and replaced; UFFDIO_MOVE or UFFDIO_COPY puts the others back,
 * and all are woken.
 *
 * The danger: between isolation and wake the staging area may hold the only
 * copy of a guest's page.  This is the only room where that is so.
 *
 * Why it is safe:
 * 1. Nothing of the staging area is dropped before every page of it is back, or
 *    replaced by a mapping that was established, or known to be zeroes.
 * 2. A call that fails in that time is tried again, in another way if there is
 *    one, until it works.  Moving back needs no memory, so that ends.
 * 3. Page tables say where each page is, whatever calls said.  UFFDIO_MOVE may
 *    stop in the middle, and may have moved more than it counts: Linux 6.18
 *    keeps in mind that it had to look at a page again (EAGAIN: somebody wrote
 *    to it), moves that page with up to a page table of others, and then goes
 *    at it once more, to find the target taken (EEXIST).  What is at home was
 *    not moved, or is back, for nobody else can put anything there.  In the
 *    staging area there may be zeroes besides, if somebody read it from outside
 *    (a debugger).
 * 4. A hole stays a hole: what is not populated is neither read nor put back.
 *    Where the staging area could only be registered for missing pages, reading
 *    it would wait for ever.
 * 5. While pages are staged the calling thread touches no region: so it blocks
 *    signals, whose handlers might.
 *
 * How one page is put back, with its own invariants: stage-back.c.  Leaves to
 * others: which pages, what replaces them, and the books.
 */
#ifndef KSM_STAGE_H
#define KSM_STAGE_H

#include "base/kinds.h"
#include "merge/cost.h"
#include "merge/vmas.h"
#include "share/content.h"

#define MOVE_TRIES      8u      /* of a page that is busy for a moment */

/* Pages that could not be put back. */
typedef struct KsmLost {
    uint64_t pages;
    void *addr;             /* of the first */
    bool told;
} KsmLost;

typedef struct KsmStage {
    int uffd;               /* MISSING, MOVE and async write-protect ... */
    bool wp_async;          /* ... if the kernel has that */
    KsmKinds *kinds;
    KsmCosts *costs;
    const KsmVmas *vmas;
    KsmContent *content;    /* which lost pages leave */
    char *map;              /* both staging areas with room to align */
    size_t map_len;
    char *small;            /* 2 MiB: for small pages */
    char *huge;             /* 2 MiB: for a huge page as a whole */
    char *unreadable;       /* a page that nobody can read */
    uint8_t staged[CHUNK_PAGES];    /* PM_* of the staged pages */
    uint8_t home[CHUNK_PAGES];      /* ... and of where they belong */
    KsmLost poisoned;       /* their memory failed */
    KsmLost displaced;      /* the owner mapped something else there */
    uint64_t huge_split;    /* huge pages that were taken out */
} KsmStage;

/* What isolation made of a page. */
typedef enum Fate {
    FATE_STAGED,            /* may be compared and replaced, or put back */
    FATE_BACK,              /* staged, but must be put back unread */
    FATE_STAY,              /* at home: was not moved, or was given up */
    FATE_PINNED,            /* at home: the kernel says it is pinned */
    FATE_HOLE,              /* nothing is staged, and nothing is at home */
} Fate;

/* One isolation: a span of pages of a chunk. */
typedef struct Isolation {
    KsmRegion *r;
    size_t page;            /* first page of the span */
    unsigned n;
    bool huge;              /* a huge page as a whole */
    char *at;               /* where its first page is staged */
    uint8_t fate[CHUNK_PAGES];
    bool failed;            /* a move has: ask where each page is */
    bool home_known;        /* what was populated there then */
    bool kinds_known;       /* of the staged pages; if not, any may be staged */
    bool registered;
    bool untracked;         /* that failed: it is not tracked any more */
    unsigned waited_us;     /* for pages that could not be put back */
} Isolation;

typedef enum PutBack {
    BACK_ANY,       /* by moving or copying */
    BACK_SAME,      /* the very pages: a device may be writing to them */
} PutBack;

/* The fields above @map are set.  0 or -errno; stage_close() in any case. */
int stage_init(KsmStage *g);
void stage_close(KsmStage *g);

/*
 * Registers the span (r, page, n, huge) and moves it out.  False: nothing is
 * staged, all is as before.
 */
bool stage_isolate(KsmStage *g, Isolation *s);

/*
 * Finds out what is staged, and decides each page's fate; false: nothing.
 * Without kinds_known all that is staged must be put back.
 */
bool stage_take_stock(KsmStage *g, Isolation *s);

static inline char *stage_page(const Isolation *s, unsigned i)
{
    return s->at + i * PAGE_BYTES;
}

/*
 * Puts staged pages [i, i + n) of the span back, except holes and pages that
 * were not moved.  Returns when it is done; a page that was given up has
 * FATE_STAY then.
 */
void stage_put_back(KsmStage *g, Isolation *s, unsigned i, unsigned n,
                    PutBack how);

/* The same for a stretch of pages that are kept: its cost is measured. */
void stage_keep(KsmStage *g, Isolation *s, unsigned i, unsigned n);

/* If it is registered: nothing of the span waits any more. */
void stage_release(KsmStage *g, Isolation *s);

/* Empties the staging area, after stage_release(). */
void stage_clean(KsmStage *g, const Isolation *s, bool staged);

/* Tells the user of pages that were given up, once; nobody waits now. */
void stage_tell(KsmStage *g);

#endif
