/*
 * vacant: slots that are free
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A bitmap, and how long a run each word of it has, so that one is found without
 * a look at all that are in use.  Leaves to others: memory for both, and what a
 * slot is (pool.h).
 */
#ifndef KSM_VACANT_H
#define KSM_VACANT_H

#include <glib.h>
#include <stdint.h>

#include "base/page.h"
#include "share/slot.h"

#define VACANT_LINE     4096u   /* slots that a VacantLine tells of */
#define VACANT_CLASSES  7u

/*
 * What is free in 64 words of the bitmap: bit w of has[k] if the longest run in
 * word w has 2^k to 2^(k + 1) - 1 slots.
 */
typedef struct VacantLine {
    uint64_t has[VACANT_CLASSES];
    uint64_t pad;
} VacantLine;

typedef struct KsmVacant {
    uint64_t *free;         /* bitmap */
    VacantLine *lines;      /* of the words of that */
    uint32_t n_words[VACANT_CLASSES];   /* of each class */
    uint32_t n;             /* slots */
    uint32_t cursor;        /* where to look for some */
} KsmVacant;

/* @n slots, none of which was, are free from now on; or all were, and are not. */
void vacant_add(KsmVacant *v, uint32_t slot, unsigned n);
void vacant_take(KsmVacant *v, uint32_t slot, unsigned n);

/*
 * A run of @least at least and of up to *@n, below @top: its length is *@n then.
 * SLOT_NONE: none was seen; not all is looked at, and the next call goes on from
 * there.  It is not taken yet.
 */
uint32_t vacant_find(KsmVacant *v, uint32_t top, unsigned *n, unsigned least);
/* 512 that begin at a multiple of 512, likewise. */
uint32_t vacant_block(KsmVacant *v, uint32_t top);

/* How many are free from @slot on, or right before it, up to @n. */
unsigned vacant_after(const KsmVacant *v, uint32_t top, uint32_t slot,
                      unsigned n);
unsigned vacant_before(const KsmVacant *v, uint32_t slot, unsigned n);

#endif
