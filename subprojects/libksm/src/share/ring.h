/*
 * ring: pages on their way to the daemon
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Memory shared with the daemon.  Pages are taken at its head, side by side,
 * and given back in the same order, when the answer has come.
 */
#ifndef KSM_RING_H
#define KSM_RING_H

#include "base/page.h"

typedef struct KsmRing {
    char *memory;           /* NULL: there is none */
    int fd;
    unsigned pages;
    unsigned head;          /* where the next pages are taken */
    unsigned used;          /* behind it: not given back */
    unsigned idle;          /* passes without a page taken */
} KsmRing;

/* The descriptor is the ring's, also if it fails: 0 or -errno. */
int ring_open(KsmRing *r, int fd, unsigned pages);
/* Of zeroes, too, with fd -1. */
void ring_close(KsmRing *r);

/* So many can be taken in one piece; ... that follows what was taken last. */
unsigned ring_room(const KsmRing *r);
unsigned ring_room_here(const KsmRing *r);

/*
 * @n pages, 1 or more, as many as ring_room() says at most; returns the first.
 * *@used: what is to be given back for them.
 */
unsigned ring_take(KsmRing *r, unsigned n, unsigned *used);
void ring_give(KsmRing *r, unsigned used);

static inline char *ring_page(const KsmRing *r, unsigned page)
{
    return r->memory + page * PAGE_BYTES;
}

/* Once a pass: memory that is not needed now goes back to the kernel. */
void ring_rest(KsmRing *r);

#endif
