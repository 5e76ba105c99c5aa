/*
 * ring: pages on their way to the daemon
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "base/prim.h"
#include "share/ring.h"

#define REST_PASSES 2u

void ring_close(KsmRing *r)
{
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

bool ring_put(KsmRing *r, const void *pages, unsigned n, unsigned *first,
              unsigned *used)
{
    KsmRing was = *r;
    size_t len = n * PAGE_BYTES, at;

    *first = ring_take(r, n, used);
    at = *first * PAGE_BYTES;
    /* past the limit the kernel would send a signal */
    if (at + len > prim.file_limit() ||
        prim.write(r->fd, pages, len, at) != (ssize_t)len) {
        *r = was;
        return false;
    }
    return true;
}

void ring_give(KsmRing *r, unsigned used)
{
    g_assert(used <= r->used);
    r->used -= used;
}

void ring_rest(KsmRing *r)
{
    if (r->fd < 0 || r->used || r->idle > REST_PASSES) {
        return;
    }
    if (++r->idle > REST_PASSES) {
        prim.punch(r->fd, 0, r->pages * PAGE_BYTES);
        r->head = 0;
    }
}
