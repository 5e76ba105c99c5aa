/*
 * stage: taking pages out of a guest's reach, and putting them back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The idea: UFFDIO_MOVE takes a span of pages into a staging area.  Threads
 * that touch them wait in a fault, while pages are compared and replaced;
 * UFFDIO_MOVE or UFFDIO_COPY puts the others back, and all are woken.
 *
 * The danger: between isolation and wake the staging area may hold the only
 * copy of a guest's page.  This is the only room where that is so.
 *
 * Why it is safe:
 * 1. Nothing of the staging area is dropped before every page of it is back, or
 *    replaced by an established mapping, or known to be zeroes.
 * 2. A call that fails in that time is tried again, in another way if there is
 *    one, until it works.  Moving back needs no memory, so that ends.
 * 3. Page tables say where each page is, whatever calls said.  UFFDIO_MOVE may
 *    stop midway, and may have moved more than it counts: Linux 6.18 remembers
 *    that it had to look at a page again (EAGAIN: somebody wrote to it), moves
 *    that page with up to a page table of others, tries it once more, and finds
 *    the target taken (EEXIST).  What is at home was not moved, or is back, for
 *    nobody else can put anything there.  The staging area may hold zeroes
 *    besides, if an outsider (a debugger) read it.
 * 4. A hole stays a hole, neither read nor put back.  Where the staging area
 *    could only be registered for missing pages, reading it would wait for
 *    ever.
 * 5. While pages are staged the calling thread touches no region: it blocks
 *    signals, whose handlers might.
 *
 * How one page is put back, with its own invariants: stage-back.c.  Leaves to
 * others: which pages, what replaces them, and the books.
 */
#ifndef KSM_STAGE_H
#define KSM_STAGE_H

#include "base/crew.h"
#include "base/kinds.h"
#include "base/urgent.h"
#include "libksm.h"
#include "merge/cost.h"
#include "merge/vmas.h"

#define MOVE_TRIES      8u      /* of a page that is busy for a moment */

/* Pages that could not be put back. */
typedef struct KsmLost {
    uint64_t pages;
    void *addr;             /* of the first */
    bool told;
} KsmLost;

#define EMPTYING_PIECES 2u

/* Half of what was staged, or all: the thread that waits may do it. */
typedef struct EmptyingPiece {
    KsmChore chore;
    struct KsmStage *stage;
    char *at;
    size_t len;
} EmptyingPiece;

/* What was staged, and is nowhere needed any more. */
typedef struct StageEmptying {
    char *at;
    size_t len;
    bool tables;            /* they go, too */
    bool due;               /* and nobody was told so far */
    EmptyingPiece piece[EMPTYING_PIECES];
    unsigned n;             /* that were given */
} StageEmptying;

typedef struct KsmStage {
    int uffd;               /* MISSING, MOVE and async write-protect ... */
    bool wp_async;          /* ... if the kernel has that */
    KsmUrgent *urgent;
    KsmKinds *kinds;
    const KsmCosts *costs;
    const KsmVmas *vmas;
    KsmCrew *crew;
    StageEmptying emptying; /* what a helper may be at, between isolations */
    char *map;              /* both staging areas with room to align */
    size_t map_len;
    char *small;            /* 2 MiB: for small pages */
    char *huge;             /* 2 MiB: for a huge page as a whole */
    char *unreadable;       /* a page that nobody can read */
    KsmLost poisoned;       /* their memory failed */
    KsmLost displaced;      /* the owner mapped something else there */
    uint64_t huge_split;    /* huge pages that were taken out, or broken */
    bool swap_stays;        /* the kernel may lose what is moved from swap */
} KsmStage;

/* What isolation made of a page. */
typedef enum Fate {
    FATE_STAGED,            /* may be compared and replaced, or put back */
    FATE_BACK,              /* staged, but must be put back unread */
    FATE_STAY,              /* at home: was not moved */
    FATE_PINNED,            /* at home: the kernel says it is pinned */
    FATE_HOLE,              /* nothing is staged, and nothing is at home */
    FATE_POISONED,          /* given up, as is its home: its memory failed */
    FATE_BARRED,            /* the same, but nobody has access to its home */
    FATE_DISPLACED,         /* given up: the owner mapped over its home */
} Fate;

/* One isolation: a span of pages of a chunk. */
typedef struct Isolation {
    char *home;             /* where its first page belongs */
    unsigned n;
    bool huge;              /* a huge page as a whole */
    bool tracked;           /* by asynchronous write-protect */
    const KsmRegionOps *ops;        /* its owner's, or NULL */
    void *opaque;
    bool hole[CHUNK_PAGES]; /* nothing is at home; a guess until home_known */
    /* what came of it */
    char *staged;           /* where its first page is staged */
    uint8_t fate[CHUNK_PAGES];
    KsmReason why;          /* where pages were refused */
    bool failed;            /* a move has: ask where each page is */
    bool home_known;        /* what was populated there then */
    bool any;               /* is staged, or may be */
    bool kinds_known;       /* of staged pages; else any may be staged */
    bool whole;             /* a huge page is staged */
    bool gaps;              /* what is not put back becomes a hole */
    bool busy;              /* a device may be writing to it */
    bool registered;
    bool untracked;         /* ... or was in part: tracking has ended */
    unsigned waited_us;     /* for pages that could not be put back */
    uint64_t began_ns, began_cpu;
    uint64_t cpu;           /* when something of it was last measured */
    KsmSpent spent;
} Isolation;

/* The fields above @map are set.  0 or -errno; stage_close() in any case. */
int stage_init(KsmStage *g);
void stage_close(KsmStage *g);

/*
 * Registers the span, moves it out, decides each page's fate by what is staged,
 * and asks the owner whether it is busy.  False: nothing is staged.  If it is
 * busy, or without kinds_known, all that is staged must be put back.  Ends with
 * stage_release() in any case; until then the thread is urgent.
 */
bool stage_isolate(KsmStage *g, Isolation *s);

/*
 * Puts staged pages [i, i + n) of the span back, except holes and pages that
 * were not moved.  Returns when each is at home, or given up.
 */
void stage_put_back(KsmStage *g, Isolation *s, unsigned i, unsigned n);

/* ns of this thread's CPU since it was last called, or the isolation began. */
uint64_t isolation_lap(Isolation *s);

/* Of a page that is staged: is its home still what was registered? */
bool stage_is_home(KsmStage *g, const Isolation *s, unsigned i);

/* Pages of a span, by their numbers in it. */
typedef struct StageRun {
    uint16_t first, n;
} StageRun;

/*
 * As stage_put_back(), for @n runs of kept pages, in any order: their cost is
 * measured.
 */
void stage_keep(KsmStage *g, Isolation *s, const StageRun *run, unsigned n);

/*
 * Nobody waits for the span any more.  Empties the staging area, or leaves that to
 * stage_empty() where there are helpers; tells the user, once, of pages that were
 * given up.
 */
void stage_release(KsmStage *g, Isolation *s);

/*
 * Has helpers empty the staging area, which then have the lock of the address space
 * (for reading, but where emptying fails): so not before all spans of a chunk are
 * released, and tracked again.  (Until then they have other places in it.)
 */
void stage_empty(KsmStage *g);

#endif
