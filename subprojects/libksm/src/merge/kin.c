/*
 * kin: memory that becomes part of the mapping around it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <sys/mman.h>

#include "base/prim.h"
#include "merge/kin.h"

/*
 * What is locked would be given memory as it grows, all of it; and what it was
 * split off would not be locked any more.  The advice does nothing to an empty
 * page, and is refused for locked memory (madvise(2)).
 */
static bool is_locked(char *addr)
{
    return prim.advise(addr, PAGE_BYTES, MADV_COLD) < 0;
}

bool kin_wanted(const KsmRegion *r, size_t page)
{
    /* where ksmd has some and not others, mappings differ anyway */
    if (r->kinless || r->merge_any || r->mergeable ||
        page_chunk(r, page)->flags & CHUNK_TAIL) {
        return false;
    }
    return !r->kin || page / CHUNK_PAGES < r->kin_page / CHUNK_PAGES;
}

bool kin_serves(const KsmRegion *r, size_t page)
{
    return r->kin && page > r->kin_page;
}

void kin_take(KsmRegion *r, size_t page)
{
    char *kin = NULL;

    if (!is_locked(page_addr(r, page))) {
        kin = prim.split(page_addr(r, page), PAGE_BYTES);
    }
    if (kin) {
        kin_drop(r);
        r->kin = kin;
        r->kin_page = page;
        r->kin_new = true;
    }
}

/*
 * What its owner has made of the region since it was added (attr.h), and may
 * unmake again, is not kin's.
 */
static void plain_make(KsmRegion *r)
{
    bool fork = true, dump = true;

    for (unsigned i = 0; i < r->n_advice; i++) {
        fork &= r->advice[i] != MADV_DONTFORK;
        dump &= r->advice[i] != MADV_DONTDUMP;
    }
    if (fork) {
        prim.advise(r->kin, PAGE_BYTES, MADV_DOFORK);
    }
    if (dump) {
        prim.advise(r->kin, PAGE_BYTES, MADV_DODUMP);
    }
    if (r->policy <= 0) {
        prim.policy_set(r->kin, PAGE_BYTES, 0, NULL, 0);
    }
    r->kin_new = false;
}

void *kin_map(KsmRegion *r, size_t page, size_t n)
{
    size_t before = page - r->kin_page;
    char *kin;

    if (!kin_serves(r, page)) {
        return NULL;
    }
    if (is_locked(r->kin)) {
        kin_drop(r);
        return NULL;
    }
    if (r->kin_new) {
        plain_make(r);
    }
    kin = prim.lengthen(r->kin, PAGE_BYTES, (before + n) * PAGE_BYTES, NULL);
    if (!kin) {
        return NULL;
    }
    r->kin = kin;
    if (before > 1 &&
        prim.unmap(kin + PAGE_BYTES, (before - 1) * PAGE_BYTES) < 0) {
        /* that would have been a mapping more; all of it is none */
        prim.unmap(kin, (before + n) * PAGE_BYTES);
        r->kin = NULL;
        return NULL;
    }
    return kin + before * PAGE_BYTES;
}
