/*
 * kin: memory that becomes part of the mapping around it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <sys/mman.h>

#include "base/prim.h"
#include "merge/kin.h"

#define TRIES   8u

bool kin_allowed(void)
{
    g_autofree char *text = prim_read_file("/proc/sys/vm/overcommit_memory",
                                           NULL);
    unsigned kernel = prim_kernel();

    return text && *text != '2' && prim.memory_limit() == SIZE_MAX &&
           kernel && !(kernel >= 6015 && kernel <= 6017);
}

/*
 * What is locked would be given memory as it grows, all of it; and what it was
 * split off would not be locked any more.  The advice does nothing to an empty
 * page, and is refused for locked memory (madvise(2)).
 */
static bool is_locked(char *addr)
{
    return prim.advise(addr, PAGE_BYTES, MADV_PAGEOUT) < 0;
}

bool kin_wanted(const KsmRegion *r, size_t page)
{
    /* where ksmd has some and not others, mappings differ anyway */
    if (r->kinless || r->apart || r->kin_tries == TRIES || r->merge_any || r->mergeable ||
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
    r->kin_tries++;
    if (kin) {
        kin_drop(r);
        r->kin = kin;
        r->kin_page = page;
        r->kin_new = true;
        r->kin_tries = 0;
    }
}

/*
 * What its owner has made of the region since it was added (attr.h), and may
 * unmake again, is not kin's; but that huge pages were wanted, or not, is.
 */
static void plain_make(KsmRegion *r)
{
    bool fork = true, dump = true;
    unsigned long mask[16];
    int mode = 0;

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
    if (r->policy <= 0 && prim.policy_get(r->kin, &mode, mask,
                                          sizeof(mask) * 8) == 0 && mode) {
        prim.policy_set(r->kin, PAGE_BYTES, 0, NULL, 0);
    }
    r->kin_new = false;
}

/*
 * Address space for @len bytes, @before of which are before a huge page's
 * boundary; mapped, so that nobody else takes it.
 */
static char *room_make(size_t before, size_t len)
{
    char *room = prim.map(NULL, len + CHUNK_BYTES, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t skip = room ? -(uintptr_t)(room + before) % CHUNK_BYTES : 0;

    if (!room) {
        return NULL;
    }
    if (skip) {
        prim.unmap(room, skip);
    }
    prim.unmap(room + skip + len, CHUNK_BYTES - skip);
    return room + skip;
}

/* Makes kin @len bytes long, all but @before of which are wanted. */
static char *kin_grow(KsmRegion *r, size_t before, size_t len)
{
    bool whole = len - before == CHUNK_BYTES;
    char *room = whole ? room_make(before, len) : NULL;
    char *kin = prim.lengthen(r->kin, PAGE_BYTES, len, room);

    if (room && !kin) {
        /* whether the room is still there is not known: it may be another's */
        kin_drop(r);
        r->kinless = true;
    }
    return kin;
}

void *kin_map(KsmRegion *r, size_t page, size_t n)
{
    size_t before = (page - r->kin_page) * PAGE_BYTES;
    size_t len = before + n * PAGE_BYTES;
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
    kin = kin_grow(r, before, len);
    if (!kin) {
        return NULL;
    }
    r->kin = kin;
    if (before > PAGE_BYTES &&
        prim.unmap(kin + PAGE_BYTES, before - PAGE_BYTES) < 0) {
        /* that would have been a mapping more; all of it is none */
        prim.unmap(kin, len);
        r->kin = NULL;
        return NULL;
    }
    return kin + before;
}
