/*
 * libksm tests: the rooms below the engine, built from their parts
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * For tests of src/merge: a directory with regions, content, plan, stage, merge
 * and restore, connected as the engine connects them.  A pass is what scan does
 * without its policy: every page that the dirty source calls quiet is hashed,
 * and every chunk that can be merged is.
 */
#ifndef KSM_TEST_ROOMS_H
#define KSM_TEST_ROOMS_H

#include "base/lock.h"
#include "merge/merge.h"
#include "merge/restore.h"
#include "util.h"

typedef struct Rooms {
    int uffd;               /* MISSING, MOVE and async write-protect */
    int uffd_wp;            /* blocking write-protect; negative: none */
    bool wp_async;
    KsmLock lock;
    KsmKinds kinds;
    KsmHasher hasher;
    KsmDirectory dir;
    KsmContent content;     /* for rooms.c alone, as is the store behind it */
    KsmAsks asks;
    KsmMemcg memcg;
    KsmDirty dirty;
    KsmVmas vmas;
    KsmCosts costs;
    KsmPlan plan;
    KsmStage stage;
    KsmMerge merge;
    KsmRestore restore;
    KsmRegion *region[4];
    unsigned n_regions;
    uint64_t passes, broken, merged;
} Rooms;

#define ROOMS_SHARING 256u      /* users of a slot, if it does not matter */

/*
 * Over the local store, or with KSM_TEST_STORE=fake in the environment over the
 * fake remote one, for whose answers passes wait.  From then on CPU time goes
 * by the call (util_cpu_by_call).  False: the kernel lacks UFFDIO_MOVE or the
 * source, and the test is skipped.
 */
bool rooms_open(Rooms *f, KsmDirtySource dirty, unsigned max_sharing);
void rooms_close(Rooms *f);

KsmRegion *rooms_add(Rooms *f, Mem *m, const KsmRegionOps *ops);
/* All of it is restored, or it is just forgotten. */
void rooms_remove(Rooms *f, KsmRegion *r);
void rooms_forget(Rooms *f, KsmRegion *r);

/* Each of the regions is looked at and merged.  Pages merged or given back. */
unsigned rooms_pass(Rooms *f);
void rooms_passes(Rooms *f, unsigned n);

/* As the owner asks for it; the second as scan does. */
int rooms_unmerge(Rooms *f, KsmRegion *r, size_t page, size_t n);
int rooms_restore(Rooms *f, KsmRegion *r, size_t page, size_t n);
/* So many mappings are left to the program. */
void rooms_vma_reserve(Rooms *f, size_t mappings);
/* The merged pages of the range are gone: nothing is there. */
void rooms_discard(Rooms *f, KsmRegion *r, size_t page, size_t n);

/*
 * A span of the region is taken out; what is staged of it is put back, unless a
 * device is busy by moving or copying; and nobody waits for it any more.
 * Signals are blocked in between.  False: nothing is staged.
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

/* Is it the fake one, which fills slots before pages are isolated? */
bool rooms_remote(const Rooms *f);
/* Slots with users, and users besides the first of each. */
uint64_t rooms_shared(const Rooms *f);
uint64_t rooms_sharing(const Rooms *f);
unsigned rooms_users(const Rooms *f, uint32_t slot);
unsigned rooms_patterns(const Rooms *f);
/* The first slot of the pattern that @slot is of. */
uint32_t rooms_pattern(Rooms *f, uint32_t slot);
/* Where the slot is read. */
char *rooms_slot(Rooms *f, uint32_t slot);
/* Does anybody find the content? */
bool rooms_finds(const Rooms *f, uint32_t tag);
/* As scan does when it finds a merged page written. */
void rooms_break(Rooms *f, KsmRegion *r, size_t page);
/* Pages given up, for their memory failed. */
uint64_t rooms_poisoned(const Rooms *f);
/* How many pages of the staging areas are populated. */
unsigned rooms_staged(const Rooms *f);
/* The books agree. */
void rooms_check(const Rooms *f, KsmRegion *r);

#endif
