/*
 * ring: pages on their way to the daemon
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <glib.h>

#include "base/prim.h"
#include "share/ring.h"

#define REST_PASSES 2u

int ring_open(KsmRing *r, int fd, unsigned pages)
{
    *r = (KsmRing) { .fd = fd, .pages = pages };
    r->memory = prim.map(NULL, pages * PAGE_BYTES, PROT_READ | PROT_WRITE,
                         MAP_SHARED, fd, 0);
    if (!r->memory) {
        int ret = -errno;

        ring_close(r);
        return ret;
    }
    prim.advise(r->memory, pages * PAGE_BYTES, MADV_DONTFORK);
    prim.advise(r->memory, pages * PAGE_BYTES, MADV_DONTDUMP);
    return 0;
}

void ring_close(KsmRing *r)
{
    if (r->memory) {
        prim.unmap(r->memory, r->pages * PAGE_BYTES);
    }
    if (r->fd >= 0) {
        prim.close(r->fd);
    }
    *r = (KsmRing) { .fd = -1 };
}

/* From the head to the end, and then from the start. */
static void room(const KsmRing *r, unsigned *here, unsigned *wrapped)
{
    unsigned left = r->pages - r->used;
    unsigned end = r->pages - r->head;

    *here = MIN(left, end);
    *wrapped = left > end ? left - end : 0;
}

unsigned ring_room(const KsmRing *r)
{
    unsigned here, wrapped;

    room(r, &here, &wrapped);
    return MAX(here, wrapped);
}

unsigned ring_room_here(const KsmRing *r)
{
    unsigned here, wrapped;

    room(r, &here, &wrapped);
    return r->head ? here : 0;      /* 0: behind the end */
}

unsigned ring_take(KsmRing *r, unsigned n, unsigned *used)
{
    unsigned here, wrapped, first;

    room(r, &here, &wrapped);
    g_assert(n <= MAX(here, wrapped));
    *used = n;
    if (n > here) {
        *used += here;
        r->head = 0;
    }
    first = r->head;
    r->head = (first + n) % r->pages;
    r->used += *used;
    r->idle = 0;
    return first;
}

void ring_give(KsmRing *r, unsigned used)
{
    g_assert(used <= r->used);
    r->used -= used;
}

void ring_rest(KsmRing *r)
{
    if (!r->memory || r->used || r->idle > REST_PASSES) {
        return;
    }
    if (++r->idle > REST_PASSES) {
        prim.punch(r->fd, 0, r->pages * PAGE_BYTES);
        r->head = 0;
    }
}
