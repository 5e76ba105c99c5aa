/*
 * directory: numbers for pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A page of a region has an id of 31 bits, that of its chunk times 512 plus its
 * number there; the index keeps it instead of an address.  Ids of chunks that
 * left are used again: the directory is no longer than the most chunks at once.
 */
#ifndef KSM_DIRECTORY_H
#define KSM_DIRECTORY_H

#include "memory/region.h"

#define PAGE_IDS    (UINT32_C(1) << 31)     /* ids are less */
#define DIR_MAX     ((size_t)PAGE_IDS / CHUNK_PAGES)
#define DIR_END     UINT32_MAX

typedef struct KsmDirEntry {
    KsmRegion *region;      /* NULL: the entry is free */
    uint32_t chunk;         /* of it; free: the next free entry */
} KsmDirEntry;

typedef struct KsmDirectory {
    KsmDirEntry *entry;
    size_t len;
    size_t chunks;          /* entries in use */
    uint32_t free;          /* DIR_END: none */
} KsmDirectory;

void directory_init(KsmDirectory *d);
void directory_free(KsmDirectory *d);

/*
 * Ids for the region's chunks.  0, or -EFBIG (no ids left) or -ENOMEM: then
 * nothing has changed.
 */
int directory_enter(KsmDirectory *d, KsmRegion *r);
void directory_leave(KsmDirectory *d, KsmRegion *r);

static inline KsmRegion *directory_page(const KsmDirectory *d, uint32_t id,
                                        size_t *page)
{
    const KsmDirEntry *e = &d->entry[id / CHUNK_PAGES];

    *page = (size_t)e->chunk * CHUNK_PAGES + id % CHUNK_PAGES;
    return e->region;
}

/* Pages of all regions, whole chunks. */
static inline size_t directory_pages(const KsmDirectory *d)
{
    return d->chunks * CHUNK_PAGES;
}

/* Tests: the region's chunks are where their ids say. */
void directory_check(const KsmDirectory *d, const KsmRegion *r);

#endif
