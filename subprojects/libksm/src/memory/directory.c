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
    size_t used = d->used + r->n_groups;
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
    for (size_t i = 0; i < r->n_groups; i++) {
        uint32_t id = d->free != DIR_END ? d->free : at++;

        if (id == d->free) {
            d->free = d->entry[id].group;
        }
        d->entry[id] = (KsmDirEntry) { r, i };
        r->group[i].id = id;
    }
    d->used = used;
    d->chunks += r->n_chunks;
    return 0;
}

void directory_leave(KsmDirectory *d, KsmRegion *r)
{
    for (size_t i = r->n_groups; i-- > 0;) {
        uint32_t id = r->group[i].id;

        d->entry[id] = (KsmDirEntry) { NULL, d->free };
        d->free = id;
    }
    d->used -= r->n_groups;
    d->chunks -= r->n_chunks;
}

bool directory_next(const KsmDirectory *d, uint32_t *id)
{
    for (size_t g = *id / GROUP_CHUNKS; g < d->len; g++) {
        const KsmDirEntry *e = &d->entry[g];
        uint64_t known = e->region ? e->region->group[e->group].known : 0;

        known >>= *id % GROUP_CHUNKS;
        if (known) {
            *id += __builtin_ctzll(known);
            return true;
        }
        *id = (g + 1) * GROUP_CHUNKS;
    }
    return false;
}

void directory_check(const KsmDirectory *d, const KsmRegion *r)
{
    for (size_t i = 0; i < r->n_groups; i++) {
        g_assert(d->entry[r->group[i].id].region == r);
        g_assert(d->entry[r->group[i].id].group == i);
    }
}
