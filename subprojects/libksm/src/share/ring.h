/*
 * ring: pages on their way to the daemon
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A file shared with the daemon.  Pages are taken at its head, side by side,
 * and given back in the same order, when the answer has come.
 *
 * The danger: who reads failed memory gets a signal.  Why it is safe: the
 * kernel reads what goes to the ring, and says so; the ring is not mapped.
 */
#ifndef KSM_RING_H
#define KSM_RING_H

#include <stdbool.h>

#include "base/page.h"

typedef struct KsmRing {
    int fd;                 /* -1: there is none */
    unsigned pages;
    unsigned head;          /* where the next pages are taken */
    unsigned used;          /* behind it: not given back */
    unsigned idle;          /* passes without a page taken */
} KsmRing;

void ring_close(KsmRing *r);

/* So many can be taken in one piece; ... that follows what was taken last. */
unsigned ring_room(const KsmRing *r);
unsigned ring_room_here(const KsmRing *r);

/*
 * @n pages, 1 or more, as many as ring_room() says at most; returns the first.
 * *@used: what is to be given back for them.
 */
unsigned ring_take(KsmRing *r, unsigned n, unsigned *used);
/* ... and copies @pages there.  False: it cannot, and nothing is taken. */
bool ring_put(KsmRing *r, const void *pages, unsigned n, unsigned *first,
              unsigned *used);
void ring_give(KsmRing *r, unsigned used);

/* Once a pass: memory that is not needed now goes back to the kernel. */
void ring_rest(KsmRing *r);

#endif
