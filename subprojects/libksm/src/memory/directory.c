/*
 * directory: numbers for pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>

#include "memory/directory.h"

void directory_init(KsmDirectory *d)
{
    *d = (KsmDirectory) { .free = DIR_END };
}

void directory_free(KsmDirectory *d)
{
    g_free(d->entry);
}

int directory_enter(KsmDirectory *d, KsmRegion *r)
{
    size_t used = d->chunks + r->n_chunks;
    size_t at = d->len;

    if (used > DIR_MAX) {
        return -EFBIG;
    }
    if (used > d->len) {
        KsmDirEntry *entry = g_try_renew(KsmDirEntry, d->entry, used);

        if (!entry) {
            return -ENOMEM;
        }
        d->entry = entry;
        d->len = used;
    }
    for (size_t i = 0; i < r->n_chunks; i++) {
        uint32_t id = d->free != DIR_END ? d->free : at++;

        if (id == d->free) {
            d->free = d->entry[id].chunk;
        }
        d->entry[id] = (KsmDirEntry) { r, i };
        r->chunk[i].id = id;
    }
    d->chunks = used;
    return 0;
}

void directory_leave(KsmDirectory *d, KsmRegion *r)
{
    for (size_t i = r->n_chunks; i-- > 0;) {
        uint32_t id = r->chunk[i].id;

        d->entry[id] = (KsmDirEntry) { NULL, d->free };
        d->free = id;
    }
    d->chunks -= r->n_chunks;
}

void directory_check(const KsmDirectory *d, const KsmRegion *r)
{
    for (size_t i = 0; i < r->n_chunks; i++) {
        g_assert(d->entry[r->chunk[i].id].region == r);
        g_assert(d->entry[r->chunk[i].id].chunk == i);
    }
}
