/*
 * holds: which slots a member holds, and how often
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A bit for each slot of the pool, as most are held once; a small table for
 * those that are held more often.  The bitmap costs memory where bits were
 * set: at most slots / 8 bytes.
 */
#ifndef HOSTD_HOLDS_H
#define HOSTD_HOLDS_H

#include <glib.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct Holds {
    uint64_t *bits;
    size_t bytes;           /* of them */
    uint32_t slots;
    GHashTable *more;       /* slot -> holds, if more than one */
    uint64_t held;          /* slots */
} Holds;

/* 0 or -ENOMEM: the kernel gave no memory. */
int holds_init(Holds *h, uint32_t slots);
void holds_free(Holds *h);

uint32_t holds_of(const Holds *h, uint32_t slot);
void holds_add(Holds *h, uint32_t slot);
/* Makes it @n more; no more than 2^32 - 1. */
void holds_add_many(Holds *h, uint32_t slot, uint32_t n);
/* Takes back @n, which it has. */
void holds_take(Holds *h, uint32_t slot, uint32_t n);
/* The first slot that is held from @slot on and before @end, else @end. */
uint32_t holds_next(const Holds *h, uint32_t slot, uint32_t end);
/* Bytes, if slots up to @top were used. */
size_t holds_bytes(const Holds *h, uint32_t top);

#endif
