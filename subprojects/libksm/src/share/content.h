/*
 * content: who holds which content
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The index and the store behind it, and the pages that stand in them.  A page
 * is known by its tag, 32 bits of its hash.  While it is a candidate its tag
 * may stand in the index (PAGE_INDEXED); while it is MERGED its tag is the
 * slot, of which it is a user.  Both end together with the state: so a page
 * that may be in either leaves through content_leave() only.
 *
 * 1. A tag only finds candidates: before a page is replaced its bytes are
 *    compared.
 * 2. A slot stands in the index by its own tag, or it does not; a tag stands
 *    there once.
 * 3. Tags of regions of different NUMA nodes differ (KsmRegion.salt).
 */
#ifndef KSM_CONTENT_H
#define KSM_CONTENT_H

#include "base/hash.h"
#include "memory/directory.h"
#include "share/index.h"
#include "share/store.h"

typedef struct KsmContent {
    KsmIndex index;
    KsmStore *store;
    const KsmDirectory *dir;    /* whose pages stand in the index */
} KsmContent;

/* @store is ours from now on. */
void content_init(KsmContent *c, const KsmDirectory *dir, KsmStore *store);
void content_free(KsmContent *c);

/*
 * Room for @pages of guest memory in the store, whatever slots are kept for
 * forked children.  0 or -ENOMEM.
 */
int content_reserve_store(KsmContent *c, size_t pages);

/* 64 bits of hash to the 32 that are kept. */
static inline uint32_t content_tag(const KsmRegion *r, uint64_t hash)
{
    return (uint32_t)(hash ^ (hash >> 32)) ^ r->salt;
}

/*
 * Other 32 bits of it, for a page whose first ones belong to another content,
 * as comparing has told: the index knows one page by a tag.
 */
static inline uint32_t content_tag_again(const KsmRegion *r, uint64_t hash)
{
    return (uint32_t)(hash * UINT64_C(0x9e3779b97f4a7c15) >> 32) ^ r->salt;
}

/* Can a page of that hash go by the tag? */
static inline bool content_tag_fits(const KsmRegion *r, uint32_t tag,
                                    uint64_t hash)
{
    return tag == content_tag(r, hash) || tag == content_tag_again(r, hash);
}

/*
 * As page_set(), but takes the page out of the index and drops its slot.
 * BROKEN: its tag is free for a hash, nothing of which is known.
 */
void content_leave(KsmContent *c, KsmRegion *r, size_t page, PageState state);
/* ... as region_set_run(). */
void content_leave_run(KsmContent *c, KsmRegion *r, const PageRun *run,
                       uint8_t to);

/* The page, whose tag is set, becomes a candidate; false: no room. */
bool content_enter(KsmContent *c, KsmRegion *r, size_t page);

/* Something is equal to what the index has at @place. */
void content_met(KsmContent *c, uint32_t place);

/* The page, which is equal to the one at @place, is the candidate instead. */
void content_take(KsmContent *c, uint32_t place, KsmRegion *r, size_t page);

/*
 * From now on the slot is what its hash finds.  Returns the page (id) that
 * stood there, or PLACE_NONE.
 */
uint32_t content_publish(KsmContent *c, uint32_t slot);

/* The tag no longer finds the slot. */
void content_withdraw(KsmContent *c, uint32_t slot, uint32_t tag);
/*
 * Nobody finds it any more, nor the block that it is of, which is found by its
 * first slot; its users keep it.
 */
void content_withdraw_slot(KsmContent *c, uint32_t slot);

/*
 * Withdraws the slot unless it can be read and holds what its hash says: it may
 * have been filled by a page that was written since it was hashed, or its memory
 * has failed.  @r: a region of its node.  True: it is sound.
 */
bool content_doubt(KsmContent *c, const KsmHasher *hasher,
                   const KsmRegion *r, uint32_t slot);

size_t content_bytes(const KsmContent *c);

/* Tests: the region's MERGED pages have slots with users. */
void content_check(const KsmContent *c, const KsmRegion *r);

#endif
