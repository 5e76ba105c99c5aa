/*
 * libksm: what to look at, and in which order
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A pass asks the dirty source about everything, then visits the chunks
 * where something is to be done: first those where merging paid before and
 * those never seen, then the rest.  In a visited chunk the quiet pages that
 * are not known are hashed and looked up.  A chunk where enough equal pages
 * have come together is ripe: it is merged at once, and so are the chunks
 * that hold the other copies.
 *
 * Why one visit is enough: the kernel's KSM needs two passes to know that a
 * page is quiet.  Here the dirty source says so.  Only without one (checksum)
 * a page has to be seen twice with the same hash.
 *
 * A region rests while merging is inhibited or off.  The books are kept all
 * the same: which merged pages were written is read from the page tables, so
 * that slots nobody uses any more go back to the kernel.  Nothing is touched.
 *
 * smart scan: a page that was hashed and matched nothing, and is written
 * again, is passed over for 1, 2, 4, then 8 passes.
 */
#ifndef KSM_SCAN_H
#define KSM_SCAN_H

#include "engine.h"
#include "region.h"

/* Passes between looks at merged pages where the source does not tell. */
#define CHECK_PASSES 4u

/*
 * 64 bits of hash to the 32 that are kept; memory of different NUMA nodes
 * never has the same.
 */
static inline uint32_t scan_fold(const KsmRegion *r, uint64_t hash)
{
    return (uint32_t)(hash ^ (hash >> 32)) ^ r->salt;
}

/*
 * Other 32 bits of it, for a page whose first ones belong to another content
 * as well: the index knows one page by a hash, and comparing has told.
 */
static inline uint32_t scan_fold_again(const KsmRegion *r, uint64_t hash)
{
    return (uint32_t)(hash * UINT64_C(0x9e3779b97f4a7c15) >> 32) ^ r->salt;
}

/*
 * Is there anything to do while merging is off?  Merged pages may be written,
 * and slots of the pool wait for being given back.
 */
bool scan_has_books(const KsmEngine *e);

/* One piece of work; false: the pass is complete. */
bool scan_step(KsmEngine *e);

/* The chunk is ripe, or may be: merge it soon. */
void scan_queue(KsmEngine *e, KsmRegion *r, size_t chunk);

/*
 * The page is not equal to what the index knows by its hash, though it did
 * not change: from now on it goes by @tag.
 */
void scan_collided(KsmEngine *e, KsmRegion *r, size_t page, uint32_t tag);

/* Passes to skip after the n-th time without a match. */
unsigned scan_skip(unsigned age);

/* Something is equal to what the index has at @place. */
void scan_met(KsmEngine *e, uint32_t place);

/* The region goes. */
void scan_forget(KsmEngine *e, KsmRegion *r);

/* Something changed: a pass is due at once. */
void scan_kick(KsmEngine *e);

#endif
