/*
 * restore: merged memory back to anonymous memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "base/tsan.h"
#include "memory/attr.h"
#include "merge/block.h"
#include "merge/kin.h"
#include "merge/restore.h"

#define BUSY_TRIES      20u     /* ms to wait for a device */
#define COPY_TRIES      16u     /* of a page whose memory may have failed */
#define SKIP_CHUNKS     4096u   /* without a mapping: passed over in one go */

static int copy_in_place(KsmRestore *s, KsmRegion *r, size_t page, size_t n)
{
    int ret = prim.advise(page_addr(r, page), n * PAGE_BYTES,
                          MADV_POPULATE_WRITE);

    if (ret < 0) {
        return ret == -EFAULT || ret == -EHWPOISON ? ret : -ENOMEM;
    }
    for (size_t i = page; i < page + n; i++) {
        uint32_t slot = r->tag[i];

        if (page_state(r, i) == PAGE_MERGED) {
            content_leave(s->content, r, i, PAGE_BROKEN);
            r->tag[i] = slot;
        }
    }
    return 0;
}

/* One page; where it cannot be read, the copy is poisoned like it. */
static int copy_careful_page(KsmRestore *s, char *to, const char *from)
{
    size_t done = 0;
    int ret = -EAGAIN;

    for (unsigned tries = 0; tries < COPY_TRIES && ret < 0; tries++) {
        ret = prim.uffd_copy(s->uffd, to, from, PAGE_BYTES, &done);
    }
    if (ret != -EFAULT) {
        return ret;
    }
    s->poisoned++;
    return prim.uffd_poison(s->uffd, to, PAGE_BYTES);
}

/*
 * Where memory has failed: reading it here would raise SIGBUS; the kernel's
 * copy returns an error.
 */
static int copy_careful(KsmRestore *s, char *copy, const char *from,
                        size_t len)
{
    UffdRange range = { s->uffd, copy, len };
    int ret = prim.uffd_register(&range, UFFD_MISSING);

    for (size_t i = 0; i < len && ret == 0; i += PAGE_BYTES) {
        ret = copy_careful_page(s, copy + i, from + i);
    }
    return ret < 0 ? ret : prim.uffd_unregister(&range);
}

static int copy_plainly(char *copy, const char *from, size_t len)
{
    int ret = prim.advise(copy, len, MADV_POPULATE_WRITE);

    if (ret == 0) {
        KSM_TSAN_IGNORE_BEGIN();
        memcpy(copy, from, len);
        KSM_TSAN_IGNORE_END();
    }
    return ret;
}

/* The room for a copy of so many pages was not needed. */
static void room_leave(KsmRestore *s, size_t n)
{
    if (s->room) {
        prim.unmap(s->room, n * PAGE_BYTES);
        s->room = NULL;
    }
}

/* A private copy of a range whose writers are blocked; *@zero: of zeroes. */
static void *copy_aside(KsmRestore *s, KsmRegion *r, size_t page, size_t len,
                        bool *zero)
{
    char *copy = s->room, *from = page_addr(r, page);
    bool readable;
    int ret;

    s->room = NULL;
    copy = copy ? copy : anonymous_map(NULL, len, 0);
    if (!copy) {
        return NULL;
    }
    /* the memory is to be where the owner wants it */
    attr_give_policy(r, copy, len);
    readable = prim.advise(from, len, MADV_POPULATE_READ) == 0;
    ret = readable ? copy_plainly(copy, from, len)
                   : copy_careful(s, copy, from, len);
    if (ret < 0) {
        prim.unmap(copy, len);
        return NULL;
    }
    /* what was copied carefully may not be readable either */
    *zero = readable && bytes_are_zero(copy, len);
    return copy;
}

/* Moves the copy over the range, whose writers are blocked. */
static int copy_over(void *copy, void *addr, size_t len)
{
    for (unsigned tries = 0; ; tries++) {
        int ret = prim.remap(copy, len, addr);

        if (ret == 0) {
            return 0;
        }
        if (tries > 3 && !range_has_gap(addr, len)) {
            prim.unmap(copy, len);
            return ret;
        }
        prim.pause(tries > 8 ? 1000 : 0);
    }
}

/* Part of what is blocked stays as it is. */
static void lift(const Block *b, KsmRegion *r, size_t page, size_t n)
{
    block_lift(b, page_addr(r, page), n * PAGE_BYTES);
}

/*
 * A mapping that neither was populated nor is part of one that was: made
 * between two others.
 */
static void *map_apart(size_t len, int flags)
{
    char *room = prim.map(NULL, len + 2 * PAGE_BYTES, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *apart = room ? room + PAGE_BYTES : NULL;

    if (!room) {
        return NULL;
    }
    if (!anonymous_map(apart, len, MAP_FIXED | flags)) {
        prim.unmap(room, len + 2 * PAGE_BYTES);
        return NULL;
    }
    prim.unmap(room, PAGE_BYTES);
    prim.unmap(apart + len, PAGE_BYTES);
    return apart;
}

/*
 * Zeroes need no memory.  When moved, a mapping that was never populated
 * becomes part of the one next to it, kin or not.
 */
static void *zeroes_aside(const KsmRegion *r, void *copy, size_t len)
{
    prim.unmap(copy, len);
    return map_apart(len, r->map_flags);
}

/* A range whose writers are blocked: back to anonymous memory. */
static int replace_blocked(KsmRestore *s, const Block *b, KsmRegion *r,
                           size_t page, size_t n)
{
    size_t len = n * PAGE_BYTES;
    UffdRange range = { s->uffd_wp, page_addr(r, page), len };
    bool zero = false, kin = s->room;
    void *copy = copy_aside(s, r, page, len, &zero);
    int ret;

    r->apart |= copy && !zero && !kin;
    copy = zero ? zeroes_aside(r, copy, len) : copy;
    ret = copy ? copy_over(copy, page_addr(r, page), len) : -ENOMEM;
    if (ret < 0) {
        lift(b, r, page, n);
        return ret;
    }
    /* nobody waits for the books; who is not woken now is by restore_run() */
    prim.uffd_wake(&range);
    vmas_made(s->vmas, 2);
    for (size_t i = page; i < page + n; i++) {
        content_leave(s->content, r, i, zero ? PAGE_GIVEN : PAGE_NEW);
        page_mark(r, i, !zero);
    }
    attr_give(r, page_addr(r, page), len, ATTR_OWN);
    dirty_track(s->dirty, r, page_addr(r, page), len);
    return 0;
}

/*
 * While a device may be writing (restore.h, 2): it would have had clean pages
 * copied, and from now on waits for us as any writer does.  Each such part
 * becomes a mapping of its own, until @mappings are used up.
 */
static int replace_clean(KsmRestore *s, const Block *b, KsmRegion *r,
                         size_t page, size_t n, size_t mappings)
{
    int ret = 0, failed = 0;
    unsigned k;

    if (kinds_ask(s->kinds, page_addr(r, page), n, KINDS_ALL, s->kind) < 0) {
        lift(b, r, page, n);
        return -EBUSY;
    }
    for (unsigned i = 0; i < n; i += k) {
        bool copied = kind_is_copied(s->kind[i]);

        k = 1;
        while (i + k < n && kind_is_copied(s->kind[i + k]) == copied) {
            k++;
        }
        if (copied) {
            lift(b, r, page + i, k);
            ret = -EBUSY;
        } else if (mappings < VMAS_FEW) {
            lift(b, r, page + i, k);
            failed = -ENOMEM;
        } else {
            int err = replace_blocked(s, b, r, page + i, k);

            failed = err < 0 ? err : failed;
            mappings -= 2;
        }
    }
    return failed < 0 ? failed : ret;
}

typedef enum RestoreFor {
    FOR_OWNER,      /* who asks for it, perhaps while merging is inhibited */
    FOR_SCAN,       /* only where merging may go on */
    FOR_MOVE,       /* the same, and only what was not copied on write */
} RestoreFor;

/*
 * A range that is write-protected.  Whether it may be replaced, and whether a
 * device may hold pages of it, is asked now, not before: restore.h, 1 and 6.
 */
static int replace_run(KsmRestore *s, const Block *b, KsmRegion *r,
                       size_t page, size_t n, RestoreFor whom,
                       size_t mappings)
{
    if (whom != FOR_OWNER && region_inhibited(r)) {
        lift(b, r, page, n);
        return -EBUSY;
    }
    if (whom == FOR_MOVE ||
        region_busy(r, page_addr(r, page), n * PAGE_BYTES)) {
        room_leave(s, n);
        return replace_clean(s, b, r, page, n, mappings);
    }
    return replace_blocked(s, b, r, page, n);
}

/* A run that maps the pool, within a chunk. */
static int restore_run(KsmRestore *s, KsmRegion *r, size_t page, size_t n,
                       RestoreFor whom)
{
    /* counted now, while nobody waits */
    size_t mappings = vmas_left(s->vmas);
    Block b;
    int ret;

    if (whom != FOR_OWNER && mappings < VMAS_FEW) {
        return -ENOMEM;
    }
    if (s->uffd_wp < 0) {
        /* the content gets its own copy; the mapping stays */
        return copy_in_place(s, r, page, n);
    }
    s->room = whom == FOR_MOVE ? NULL : kin_map(r, page, n);
    ret = block_begin(&b, s->urgent, s->uffd_wp, page_addr(r, page),
                      n * PAGE_BYTES);
    if (ret == 0) {
        ret = replace_run(s, &b, r, page, n, whom, mappings);
        block_end(&b);
    }
    room_leave(s, n);
    return ret;
}

static int restore_once(KsmRestore *s, KsmRegion *r, size_t page, size_t n,
                        RestoreFor whom)
{
    size_t end = page + n, k;
    int ret = 0, busy = 0;

    for (size_t i = page; i < end && ret == 0; i += k) {
        size_t stop = MIN(end, (i / CHUNK_PAGES + 1) * CHUNK_PAGES);
        bool mapped = page_is_mapped(r, i);

        k = 1;
        while (i + k < stop && page_is_mapped(r, i + k) == mapped) {
            k++;
        }
        if (mapped) {
            ret = restore_run(s, r, i, k, whom);
            busy = ret == -EBUSY ? ret : busy;
            ret = ret == -EBUSY ? 0 : ret;
            region_count_runs(r, i / CHUNK_PAGES);
            r->chunk[i / CHUNK_PAGES].flags |= CHUNK_VISIT;
        }
    }
    if (end < r->n_pages) {
        region_count_runs(r, end / CHUNK_PAGES);
    }
    return ret < 0 ? ret : busy;
}

int restore_pages(KsmRestore *s, KsmRegion *r, size_t page, size_t n)
{
    return restore_once(s, r, page, n, FOR_SCAN);
}

int restore_clean(KsmRestore *s, KsmRegion *r, size_t page, size_t n)
{
    return s->uffd_wp < 0 ? -ENOTSUP : restore_once(s, r, page, n, FOR_MOVE);
}

/* Passes over chunks that map nothing, not too many.  The next page to do. */
static size_t skip_unmapped(const KsmRegion *r, size_t page)
{
    size_t chunk = page / CHUNK_PAGES;

    for (unsigned n = 0; n < SKIP_CHUNKS; n++, chunk++) {
        chunk = region_known(r, chunk, r->n_chunks);
        if (chunk == r->n_chunks || r->chunk[chunk].mapped) {
            break;
        }
    }
    return MAX(page, chunk * CHUNK_PAGES);
}

/* Others may have the lock.  True: one of them is about to pin. */
static bool lock_away(const KsmRestore *s, KsmLock *lock, unsigned us)
{
    unsigned settles = s->settles;

    lock_release(lock);
    if (us) {
        prim.pause(us);
    }
    lock_take(lock);
    return s->settles != settles;
}

/*
 * One try, chunk by chunk; in between others may have the lock.  *@pinned: it
 * ended there, since somebody is about to pin.
 */
static int unmerge_once(KsmRestore *s, KsmLock *lock, KsmRegion *r,
                        size_t page, size_t n, bool *pinned)
{
    size_t end = page + n, stop;
    int ret = 0, busy = 0;

    for (size_t i = page; i < end && ret == 0 && !*pinned; i = stop) {
        i = MIN(skip_unmapped(r, i), end);
        stop = MIN((i / CHUNK_PAGES + 1) * CHUNK_PAGES, end);
        if (i < end && r->chunk[i / CHUNK_PAGES].mapped) {
            ret = restore_once(s, r, i, stop - i, FOR_OWNER);
        } else {
            stop = i;   /* there was much to pass over */
        }
        busy = ret == -EBUSY ? ret : busy;
        ret = ret == -EBUSY ? 0 : ret;
        *pinned = stop < end && lock_away(s, lock, 0);
    }
    return ret < 0 ? ret : *pinned ? -EBUSY : busy;
}

int restore_unmerge(KsmRestore *s, KsmLock *lock, KsmRegion *r, size_t page,
                    size_t n)
{
    bool pinned = false;
    int ret;

    r->unmerging++;
    ret = unmerge_once(s, lock, r, page, n, &pinned);
    /* a device is mostly done with a page soon */
    for (unsigned tries = 0; ret == -EBUSY && !pinned && tries < BUSY_TRIES;
         tries++) {
        pinned = lock_away(s, lock, 1000);
        if (!pinned) {
            ret = unmerge_once(s, lock, r, page, n, &pinned);
        }
    }
    r->unmerging--;
    return ret;
}
