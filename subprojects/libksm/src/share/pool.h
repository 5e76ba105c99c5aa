/*
 * pool: the memfd of shared pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A slot is a page of the file, which regions map privately, through a
 * descriptor opened read-only.  A user is a page in state MERGED, or a plan.
 *
 * The danger: a slot is written anew while somebody reads it.  Why it is safe:
 * 1. It is written once, before anything maps it, and given up when its last
 *    user goes.  A page copied on write is a user no more.
 * 2. It is taken again only after a hole was punched there.
 * 3. What a forked child may map is kept until no child lives (pool.c); all is,
 *    where a hole would be zeroes written in place (keep_all).
 *
 * A pattern is content that repeats over consecutive pages.  Were all of
 * them to map one slot, each would cost a mapping of its own; so the slot is
 * replicated into a run of up to 512, and a run of pages maps a run of
 * slots.  Patterns grow with their use (PATTERN_USES): what they take of what
 * they save stays small, and a guest with runs of 512 still needs few mappings.
 */
#ifndef KSM_POOL_H
#define KSM_POOL_H

#include <glib.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/huge.h"
#include "base/page.h"
#include "share/ahead.h"
#include "share/slot.h"
#include "share/vacant.h"

#define SLOT_PATTERN    0x8000u     /* in users[]: part of a pattern */
#define PATTERN_START   16u         /* slots of a new pattern */

typedef struct KsmPattern {
    uint32_t first;         /* slot; 512 are set aside */
    uint32_t filled;        /* of them written */
    uint32_t next;          /* where the next run starts, to spread users */
    uint64_t asked;         /* pages that mapped it, ever */
    uint64_t users;         /* pages that map it */
} KsmPattern;

typedef struct SlotList {
    uint32_t first, last;   /* SLOT_NONE: empty */
} SlotList;

typedef struct KsmPool {
    int fd;                 /* for writing */
    int map_fd;             /* read-only, for mapping */
    int pagemap;            /* /proc/self/pagemap; negative: do without */
    char *view;             /* all of it, read-only */
    size_t capacity;        /* slots the view and the arrays can hold */
    size_t mapped[5];       /* bytes of view, hash, users, free, lines */
    bool anywhere;          /* do not look for a good address for the view */
    size_t file_slots;      /* size of the file */
    uint32_t top;           /* slots ever taken: [0, top) */
    KsmVacant vacant;       /* slots below top, and to be had */
    uint32_t *hash;         /* per slot */
    uint16_t *users;        /* per slot, with SLOT_PATTERN */
    uint64_t *kept;         /* bitmap: a forked child may map it; or NULL */
    size_t kept_len;        /* bytes of it */
    bool keep_all;          /* give up nothing */
    HugeMount mount;        /* what decides of huge pages in the file */
    uint64_t huge_ns;       /* when that was asked last */
    int node;               /* where slots get memory now; -1: anywhere */
    KsmAhead ahead;         /* .crew: who helps, or NULL */
    uint64_t leaked;        /* slots without users not to be had (yet) */
    int watch_fd;           /* tells whether children live; -1: none */
    void *watch;            /* its mapping, while the process forks */
    uint64_t forks_blind;   /* forks whose children cannot be told */
    /* lists of what is leaked, linked by hash[]: slots, blocks of patterns */
    SlotList kept_slots, kept_blocks;   /* a child may map it */
    SlotList gone_slots, gone_blocks;   /* to be punched, in time */
    char *piece;            /* buffer: part of a pattern */
    unsigned max_sharing;
    uint64_t shared;        /* slots with users */
    uint64_t sharing;       /* users of all slots */
    /* first slot, a multiple of 512 -> KsmPattern */
    GHashTable *patterns;
    KsmPattern *last_pattern;       /* the one looked up last */
    GArray *blocks;         /* first slots of 512 left by patterns */
    /* slots given up, holes to be punched */
    uint32_t punch[64];
    unsigned n_punch;
    /* or NULL; told when a slot goes that somebody may find by its hash */
    void (*goes)(void *opaque, uint32_t slot);
    void *opaque;
} KsmPool;

/* Nothing is open: pool_free() may be called. */
void pool_closed(KsmPool *p);
int pool_init(KsmPool *p, unsigned max_sharing);
/*
 * Over a file that somebody else has made, empty and never of huge pages; the
 * pool closes both descriptors, even if this fails.
 */
int pool_init_over(KsmPool *p, unsigned max_sharing, int fd, int map_fd);
/*
 * Goes on with the file of another process, which ended: after
 * pool_init_over() and pool_reserve_slots(), when hash[] and users[] of the
 * slots below @top are as they were.  Each pattern is adopted; then the rest:
 * what has no users is punched and free.
 */
void pool_adopt_pattern(KsmPool *p, uint32_t first, uint32_t filled);
void pool_adopt(KsmPool *p, uint32_t top, size_t file_slots);
void pool_free(KsmPool *p);
/* Room for the slots that @pages of guest memory can need. */
int pool_reserve(KsmPool *p, size_t pages);
int pool_reserve_slots(KsmPool *p, size_t slots);

/*
 * @n consecutive slots without content; fewer may be had: *@n is set.
 * SLOT_NONE if there are none.  Goes with pool_untake, or with the last user.
 *
 * A hole in the file costs next to nothing, but every run costs whoever maps
 * it a mapping.  So free slots are used again where the run is long enough, or
 * TAKE_WORTH at least; else the file grows, to where it may, and only then
 * shorter runs are taken, and what patterns left.  (A pattern, too, takes what
 * slots left when the file can grow no more.)
 */
#define TAKE_WORTH      32u
uint32_t pool_take(KsmPool *p, unsigned *n);
/*
 * The same, next to a slot that is mapped: behind @before, or, for the last of
 * @n pages, in front of @after, where these are no SLOT_NONE.  Of what only the
 * last pages have slots for there, the first pages get others, and *@n is their
 * number.
 */
uint32_t pool_take_near(KsmPool *p, uint32_t before, uint32_t after,
                        unsigned *n);
void pool_untake(KsmPool *p, uint32_t slot, unsigned n);
/* Memory for the slots, so that filling them needs none. 0 or -errno. */
int pool_allocate(KsmPool *p, uint32_t slot, unsigned n);
/* For the next slots, too, where there are helpers. */
void pool_ahead(KsmPool *p);
/* What of that was not used. */
void pool_ahead_end(KsmPool *p);
/* Writes content; only we have the slots mapped yet, to read. 0 or -errno. */
int pool_fill(KsmPool *p, uint32_t slot, const void *pages, unsigned n);

static inline const char *pool_page(const KsmPool *p, uint32_t slot)
{
    return p->view + slot * PAGE_BYTES;
}

/*
 * May the slots be read?  0, -EFAULT if memory of theirs has failed, another
 * -errno if they cannot be read just now.  Who reads failed memory gets a
 * SIGBUS, and with signals blocked that is the end of the process; what fails
 * between this and the reading is not helped.  Maps them, too, so that reading
 * takes no faults.
 */
int pool_readable(const KsmPool *p, uint32_t slot, unsigned n);

static inline unsigned pool_users(const KsmPool *p, uint32_t slot)
{
    return p->users[slot] & SLOT_USERS;
}

static inline bool pool_full(const KsmPool *p, uint32_t slot)
{
    return pool_users(p, slot) >= p->max_sharing;
}

void pool_user_add(KsmPool *p, uint32_t slot);
void pool_user_drop(KsmPool *p, uint32_t slot);
/* Is what nobody uses free at once?  Not where children may map it. */
bool pool_gives_up(KsmPool *p);
/* Frees the slot if nobody uses it. */
void pool_settle(KsmPool *p, uint32_t slot);

/* A pattern whose first page is @slot, or NULL. */
KsmPattern *pool_pattern(KsmPool *p, uint32_t slot);
/* A new one with the content of @page; NULL and errno; ENOSPC: no room. */
KsmPattern *pool_pattern_new(KsmPool *p, const void *page, uint32_t hash);
/* Up to @want slots of it (512 at most) have the content.  0 or -errno. */
int pool_pattern_grow(KsmPool *p, KsmPattern *t, unsigned want);
/*
 * Up to *@n consecutive slots of it with room for a user each; SLOT_NONE:
 * it is used up.
 */
uint32_t pool_pattern_run(KsmPool *p, KsmPattern *t, unsigned *n);

/*
 * The process forks: what is in use now may be mapped by the child for as
 * long as it lives, so it is not given up, nor written anew.  Called before
 * the fork; pool_forked() after it, in the parent; pool_forked_child() in the
 * child, whose pool is not used any more.
 */
void pool_fork(KsmPool *p);
void pool_forked(KsmPool *p);
void pool_forked_child(KsmPool *p);

/*
 * What was kept for forked children may go, if none of them lives on, nor a
 * child of theirs; pool_release() then gives it up, a piece in each call.
 * False: there is no more to do now.
 */
void pool_unkeep(KsmPool *p);
bool pool_release(KsmPool *p);

void pool_flush(KsmPool *p);
size_t pool_bytes(const KsmPool *p);

#endif
