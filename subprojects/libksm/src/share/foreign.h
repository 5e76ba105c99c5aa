/*
 * foreign: a pool that another process writes
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Its file, read-only, and what this process has of it: the slots it holds
 * (told by messages, docs/interop/ksm-pool.rst), and their users here.  A
 * daemon that begins anew has another file, a new generation; the old one stays
 * as long as pages here map it.  So slots have numbers of this process's own:
 * each generation a range of them.
 *
 * The danger: a slot that is not held is punched.  Why it is safe: a slot has
 * users only while it is held.  All its holds go back together, when the last
 * user has gone (foreign.gone).
 */
#ifndef KSM_FOREIGN_H
#define KSM_FOREIGN_H

#include <glib.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/page.h"
#include "share/slot.h"

#define FOREIGN_SLOTS   (UINT32_C(1) << 31)     /* local numbers are below */

/* Consecutive slots with the same content, held as a whole by the first. */
typedef struct ForeignBlock {
    uint32_t first;
    uint32_t length;
    uint32_t next;          /* where the next run begins, to spread users */
    uint32_t wanted;        /* length that was asked for */
    uint64_t asked;         /* pages that mapped it, ever */
    uint64_t users;
} ForeignBlock;

typedef struct KsmForeign {
    uint64_t generation;
    uint32_t base;          /* local number of its slot 0 */
    uint32_t slots;
    unsigned hold_users;    /* a hold is good for so many users */
    unsigned max_users;
    int fd;
    char *view;             /* all of it, read-only */
    /* by slot; of what is seen memory is used */
    void *tables;
    uint32_t *tag;
    uint16_t *users;
    uint16_t *holds;        /* told to us, and not given back */
    uint32_t top;           /* slots seen so far are below */
    GHashTable *blocks;     /* first slot -> ForeignBlock */
    uint64_t shared;        /* slots with users */
    uint64_t sharing;       /* users of all slots */
    /*
     * Asked when nobody here uses a slot any more (of a block: the first): may
     * its holds be given back?
     */
    bool (*gone)(void *opaque, struct KsmForeign *f, uint32_t slot,
                 unsigned holds);
    void *opaque;
} KsmForeign;

/* The descriptor is its own, also if it fails: then NULL and *@err. */
KsmForeign *foreign_new(int fd, uint64_t generation, uint32_t base,
                        uint32_t slots, int *err);
void foreign_free(KsmForeign *f);
/* It has no descriptor any more. */
void foreign_close(KsmForeign *f);

/* In what follows slots are the generation's own numbers. */

/*
 * We were told a slot, the first of a block or of none: a hold, and a user.
 * Its tag is @tag if it had no users.  False: that is more than can be counted,
 * and it is not taken.
 */
bool foreign_told(KsmForeign *f, uint32_t slot, uint32_t tag);
/* ... that a block has @length slots now; false: that cannot be. */
bool foreign_told_block(KsmForeign *f, uint32_t first, uint32_t length);
/* That is forgotten, unless the block is held. */
void foreign_untold_block(KsmForeign *f, uint32_t first);

/* The block of a slot, or NULL. */
ForeignBlock *foreign_block(const KsmForeign *f, uint32_t slot);
/* Up to *@n slots of it with room for a user each; SLOT_NONE. */
uint32_t foreign_block_run(KsmForeign *f, ForeignBlock *b, unsigned *n);

static inline uint32_t foreign_unit(const KsmForeign *f, uint32_t slot)
{
    const ForeignBlock *b = foreign_block(f, slot);

    return b ? b->first : slot;
}

bool foreign_full(const KsmForeign *f, uint32_t slot);
void foreign_hold(KsmForeign *f, uint32_t slot);
void foreign_drop(KsmForeign *f, uint32_t slot);
/* It goes if it has no users. */
void foreign_settle(KsmForeign *f, uint32_t slot);

static inline const char *foreign_page(const KsmForeign *f, uint32_t slot)
{
    return f->view + slot * PAGE_BYTES;
}

/* As store_readable(). */
int foreign_readable(const KsmForeign *f, uint32_t slot, unsigned n);

size_t foreign_bytes(const KsmForeign *f);

#endif
