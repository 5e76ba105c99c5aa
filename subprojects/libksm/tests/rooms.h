/*
 * libksm tests: the rooms below the engine, built from their parts
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * For tests of src/merge: a directory with regions, content, plan, stage, merge,
 * restore, rejoin and gather, connected as in the engine.  A pass is scan without
 * its policy: it hashes every page that the dirty source calls quiet, and merges
 * every chunk that can be merged.
 */
#ifndef KSM_TEST_ROOMS_H
#define KSM_TEST_ROOMS_H

#include "base/lock.h"
#include "memory/turn.h"
#include "merge/gather.h"
#include "merge/merge.h"
#include "merge/restore.h"
#include "util.h"

typedef struct Rooms {
    int uffd;               /* MISSING, MOVE and async write-protect */
    int uffd_wp;            /* blocking write-protect; negative: none */
    bool wp_async;
    KsmUrgent urgent;
    KsmLock lock;
    KsmTurn turn;
    KsmKinds kinds;
    KsmHasher hasher;
    KsmDirectory dir;
    KsmContent content;     /* for rooms.c alone, as is its store */
    KsmAsks asks;
    KsmMemcg memcg;
    KsmDirty dirty;
    KsmVmas vmas;
    KsmCut cut;
    KsmCosts costs;
    KsmPlan plan;
    KsmStage stage;
    KsmMerge merge;
    KsmRestore restore;
    KsmRejoin rejoin;
    KsmGather gather;
    KsmRegion *region[4];
    GPtrArray *regions;     /* the same */
    unsigned n_regions;
    uint64_t passes, broken, merged;
} Rooms;

#define ROOMS_SHARING 256u      /* users of a slot, if it does not matter */
#define PAIR_PAGES  1024u

/* Rooms, and two regions with the same content. */
typedef struct Pair {
    Rooms f;
    Mem *a, *b;
    KsmRegion *ra, *rb;
} Pair;

/*
 * Over the local store or, with KSM_TEST_STORE=fake in the environment, the
 * fake remote one, for whose answers passes wait.  CPU time then goes by the
 * call (util_cpu_by_call).  False: the kernel lacks UFFDIO_MOVE or the source;
 * the test is skipped.
 */
bool rooms_open(Rooms *f, KsmDirtySource dirty, unsigned max_sharing);
void rooms_close(Rooms *f);

/* Nothing is merged yet.  False, as rooms_open(): there is nothing to close. */
bool pair_open(Pair *p, KsmDirtySource dirty, unsigned max_sharing,
               const KsmRegionOps *ops, MemPages kind);
/* Both are what they were, and restored, and closed. */
void pair_close(Pair *p);

KsmRegion *rooms_add(Rooms *f, Mem *m, const KsmRegionOps *ops);
/* Restores all of it, or just forgets it. */
void rooms_remove(Rooms *f, KsmRegion *r);
void rooms_forget(Rooms *f, KsmRegion *r);

/* Looks at and merges each region.  Pages merged or given back. */
unsigned rooms_pass(Rooms *f);
void rooms_passes(Rooms *f, unsigned n);

/* As for the owner; the second as scan does. */
int rooms_unmerge(Rooms *f, KsmRegion *r, size_t page, size_t n);
int rooms_restore(Rooms *f, KsmRegion *r, size_t page, size_t n);
/* As scan does with those of rooms_quiet(); returns how many were merged. */
unsigned rooms_rejoin(Rooms *f, KsmRegion *r, size_t page, unsigned n);
/* scatter_pages() */
void rooms_scatter(Rooms *f, KsmRegion *r, size_t page, unsigned pieces,
                   unsigned len, unsigned gap);
/* All merged pages of the region are as old as they get. */
void rooms_age(Rooms *f, KsmRegion *r);
/* Mappings left to the program. */
void rooms_vma_reserve(Rooms *f, size_t mappings);
/* The range's merged pages go: nothing is there. */
void rooms_discard(Rooms *f, KsmRegion *r, size_t page, size_t n);

/*
 * Takes a span of the region out; puts back what is staged, by moving, or
 * copying unless a device is busy; and lets nobody wait any more.  Signals are
 * blocked in between.  False: nothing is staged.
 */
typedef struct RoomsSpan {
    Isolation s;
    KsmRegion *region;
    sigset_t signals;
} RoomsSpan;

bool rooms_isolate(Rooms *f, RoomsSpan *span, KsmRegion *r, size_t page,
                   unsigned n);
void rooms_put_back(Rooms *f, RoomsSpan *span);
void rooms_release(Rooms *f, RoomsSpan *span);
/* The same, but what was staged is left there. */
void rooms_let_go(Rooms *f, RoomsSpan *span);

/* Over the fake store, which fills slots before pages are isolated? */
bool rooms_remote(const Rooms *f);
/* Slots with users, and users besides the first of each. */
uint64_t rooms_shared(const Rooms *f);
uint64_t rooms_sharing(const Rooms *f);
unsigned rooms_users(const Rooms *f, uint32_t slot);
unsigned rooms_patterns(const Rooms *f);
/* The first slot of @slot's pattern. */
uint32_t rooms_pattern(Rooms *f, uint32_t slot);
char *rooms_slot(Rooms *f, uint32_t slot);
/* It holds that from its beginning on, for all who have it. */
void rooms_slot_write(Rooms *f, uint32_t slot, const char *text);
/* Is the slot what is found by @tag? */
bool rooms_finds_slot(const Rooms *f, uint32_t tag, uint32_t slot);
bool rooms_finds(const Rooms *f, uint32_t tag);
/* As when scan finds a merged page written. */
void rooms_break(Rooms *f, KsmRegion *r, size_t page);
/* The same for @n of them, that were looked at until they counted as quiet. */
void rooms_quiet(Rooms *f, KsmRegion *r, size_t page, size_t n);
/* The page goes by that tag, as if it were equal to what has it. */
void rooms_mistake(Rooms *f, KsmRegion *r, size_t page, uint32_t tag);
/* Pages given up for failed memory. */
uint64_t rooms_poisoned(const Rooms *f);
/* Populated pages of the staging areas. */
unsigned rooms_staged(const Rooms *f);
/* The books agree. */
void rooms_check(const Rooms *f, KsmRegion *r);

#endif
