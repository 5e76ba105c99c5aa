/*
 * dirty: what was written since last asked
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Three sources: the region's own log, the kernel's page tables, or nothing
 * (then scan compares hashes).  What they say is a hint.  A missed write
 * costs a failed verify; one too many costs a hash.
 *
 * Asking marks pages: PAGE_WRITTEN was written in the last interval, and is
 * not worth looking at; a NEW page without the mark is quiet, and is.  (Not in
 * a LOOSE chunk, about which nobody is asked.)
 */
#ifndef KSM_DIRTY_H
#define KSM_DIRTY_H

#include "base/kinds.h"
#include "share/content.h"

#define PIECE_PAGES GROUP_PAGES     /* it is asked by 128 MiB */
/* Passes, or so, between looks at merged pages: no source tells of them. */
#define CHECK_PASSES 4u
/*
 * Passes that are as far apart, or further, are rare: what is quiet for one of
 * them is quiet, and to wait for several is to wait for long.  So it is with
 * looks at merged pages (rhythm.h).
 */
#define CALM_NS UINT64_C(9000000000)

typedef struct KsmDirty {
    int uffd;               /* async write-protect, if the kernel has it: */
    bool wp_async;
    KsmDirtySource source;  /* as configured */
    KsmKinds *kinds;
    KsmContent *content;    /* which written pages leave */
    unsigned long *bitmap;  /* of a piece */
    size_t reach;           /* groups without anything known: asked at once */
    bool again;             /* set: some chunks were put off to a later pass */
    unsigned hot_max;       /* log2 of passes that a hot chunk is left alone */
    unsigned calm_max;      /* ... if a part of what was written is quiet */
    uint64_t huge;          /* chunks of a piece that are new huge pages */
} KsmDirty;

/* The fields above are set, but for the bitmap and the reach. */
void dirty_init(KsmDirty *d);
void dirty_fini(KsmDirty *d);

/*
 * Chooses the region's source, as configured. 0, or -errno if it does not work.
 */
int dirty_choose(KsmDirty *d, KsmRegion *r);

/*
 * Registers what the source needs, for a newly mapped range or for the region.
 * Failure only loses knowledge.
 */
void dirty_track(KsmDirty *d, KsmRegion *r, char *addr, size_t len);
void dirty_resume(KsmDirty *d, KsmRegion *r);

/*
 * Unregisters the region, so that others can register it: a piece of it, some
 * 25 ms a GiB, from *@page on (at first region_first()), which is then where to
 * go on; done at region_end().  0, or -errno: the rest is registered still;
 * calling again may help.  Meanwhile nothing is registered anew.
 */
int dirty_pause(KsmDirty *d, KsmRegion *r, size_t *page);

/* A pass begins, @ns after the last one did. */
void dirty_pass(KsmDirty *d, uint64_t ns);

/*
 * Asks about a group of chunks that begins at @chunk, or about many of which
 * nothing is known, once in a pass; returns the chunk after them.  @look: at
 * merged pages, too, where the source does not tell.
 */
size_t dirty_sync(KsmDirty *d, KsmRegion *r, size_t chunk, bool look);

/* Asking about so many chunks took @ns: decides how many are asked about. */
void dirty_took(KsmDirty *d, size_t chunks, uint64_t ns);

/* What is populated in chunks [@from, @to), which are bare, is NEW now. */
void dirty_find(KsmDirty *d, KsmRegion *r, size_t from, size_t to);

/* Starts tracking a chunk that was found populated; a huge page is LOOSE. */
void dirty_arm(KsmDirty *d, KsmRegion *r, size_t chunk);

/*
 * A LOOSE chunk is protected, and not LOOSE, from now on.  What was written
 * before is the caller's business.
 */
void dirty_fasten(KsmDirty *d, KsmRegion *r, size_t chunk);

/*
 * A chunk that is a huge page is LOOSE, and not protected, from now on.  Where
 * that fails it stays as it was, and its next write splits it.
 */
void dirty_loosen(KsmDirty *d, KsmRegion *r, size_t chunk);

/*
 * What was moved looks written to the page tables: from now on it does not.
 * False: it does, or it never did.  The caller looks at what was written
 * before.
 */
bool dirty_settle(KsmDirty *d, const KsmRegion *r, size_t page, size_t n);

/*
 * Has a write to a freed huge page noticed at once, and the page split by it;
 * false: not worth it.
 */
bool dirty_protect(KsmDirty *d, KsmRegion *r, const PageRun *run);

#endif
