/*
 * directory: numbers for pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A page of a region has an id of 31 bits, that of its group of chunks times
 * the pages of a group, plus its number there; the index keeps it instead of an
 * address.  Ids of groups that left are used again: the directory is no longer
 * than the most groups at once.  A terabyte has 8192 of them, so nobody waits
 * long for a region to enter or leave.
 */
#ifndef KSM_DIRECTORY_H
#define KSM_DIRECTORY_H

#include "memory/region.h"

#define PAGE_IDS    (UINT32_C(1) << 31)     /* ids are less */
#define DIR_MAX     ((size_t)PAGE_IDS / GROUP_PAGES)   /* groups */
#define DIR_END     UINT32_MAX

typedef struct KsmDirEntry {
    KsmRegion *region;      /* NULL: the entry is free */
    uint32_t group;         /* of it; free: the next free entry */
} KsmDirEntry;

typedef struct KsmDirectory {
    KsmDirEntry *entry;
    size_t len;
    size_t used;            /* entries in use */
    size_t chunks;          /* of all regions */
    uint32_t free;          /* DIR_END: none */
} KsmDirectory;

void directory_init(KsmDirectory *d);
void directory_free(KsmDirectory *d);

/*
 * Ids for the region's groups.  0, or -EFBIG (no ids left) or -ENOMEM: then
 * nothing has changed.
 */
int directory_enter(KsmDirectory *d, KsmRegion *r);
void directory_leave(KsmDirectory *d, KsmRegion *r);

static inline KsmRegion *directory_page(const KsmDirectory *d, uint32_t id,
                                        size_t *page)
{
    const KsmDirEntry *e = &d->entry[id / GROUP_PAGES];

    *page = (size_t)e->group * GROUP_PAGES + id % GROUP_PAGES;
    return e->region;
}

/* The region of a chunk with that chunk_id(); NULL: there is none (now). */
static inline KsmRegion *directory_chunk(const KsmDirectory *d, uint32_t id,
                                         size_t *chunk)
{
    const KsmDirEntry *e;

    if (id / GROUP_CHUNKS >= d->len) {
        return NULL;
    }
    e = &d->entry[id / GROUP_CHUNKS];
    *chunk = (size_t)e->group * GROUP_CHUNKS + id % GROUP_CHUNKS;
    return e->region && *chunk < e->region->n_chunks ? e->region : NULL;
}

/*
 * *@id becomes the first id from it on of a chunk that is not bare; false:
 * there is none.
 */
bool directory_next(const KsmDirectory *d, uint32_t *id);

/* Pages of all regions, whole chunks. */
static inline size_t directory_pages(const KsmDirectory *d)
{
    return d->chunks * CHUNK_PAGES;
}

/* Tests: the region's groups are where their ids say. */
void directory_check(const KsmDirectory *d, const KsmRegion *r);

#endif
