/*
 * kinds: what the page tables say of each page
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A kind is a byte of PM_* flags for each page of up to a chunk.
 * PAGEMAP_SCAN tells them; leaves to others what they mean.
 */
#ifndef KSM_KINDS_H
#define KSM_KINDS_H

#include "base/page.h"
#include "base/prim.h"

#define N_RANGES    1024u

#define KINDS_FAST (PM_PRESENT | PM_SWAPPED | PM_ZEROPFN | PM_HUGE)
#define KINDS_ALL  (KINDS_FAST | PM_FILE)       /* PM_FILE is what costs */

typedef struct KsmKinds {
    int pagemap;            /* /proc/self/pagemap */
    PmRange *ranges;        /* for PAGEMAP_SCAN: N_RANGES */
} KsmKinds;

/* 0 or -errno of opening /proc/self/pagemap; kinds_close() in any case. */
int kinds_open(KsmKinds *k);
void kinds_close(KsmKinds *k);

/*
 * Kinds of @n pages, up to a chunk: of the flags in @tell.  0 or -errno.
 */
int kinds_ask(KsmKinds *k, const void *addr, unsigned n, unsigned tell,
              uint8_t *kinds);

/* As kinds_ask() for KINDS_FAST; if that fails, populated or not. */
int kinds_look(KsmKinds *k, const void *addr, unsigned n, uint8_t *kinds);

/* Entries of /proc/self/pagemap, as they are.  0 or -errno. */
int kinds_read(KsmKinds *k, const void *addr, unsigned n, uint64_t *entry);

#define ENTRY_PRESENT   63u     /* bits of such an entry */
#define ENTRY_SWAPPED   62u
#define ENTRY_FILE      61u     /* of a file, or shared memory */
#define ENTRY_EXCLUSIVE 56u     /* nobody else maps the page */

static inline bool kind_is_populated(uint8_t kind)
{
    return kind & (PM_PRESENT | PM_SWAPPED);
}

/* In a mapping of the pool: has the page a copy of its own? */
static inline bool kind_is_copied(uint8_t kind)
{
    return kind_is_populated(kind) && !(kind & PM_FILE);
}

/*
 * As kind_is_copied(), if present: a marker in the page table passes for
 * swapped out, and a slot must not lose a user that still maps it.
 */
static inline bool kind_is_anonymous(uint8_t kind)
{
    return (kind & PM_PRESENT) && !(kind & PM_FILE);
}

#endif
