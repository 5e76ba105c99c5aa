/*
 * restore: merged memory back to anonymous memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * For each run that maps the pool: block its writers (synchronous
 * write-protection), copy it aside, move the copy over it, wake.
 *
 * The danger: a write in between is lost, and so is one by a device, past the
 * page tables.  Why it is safe:
 * 1. Who writes later waits, or fails: block.h, 1.  The busy op, asked after
 *    protecting, reports who had pinned it before.
 * 2. While a device may be writing, a page that was copied on write stays: it
 *    may be what the device writes to.  One that was not cannot be.
 * 3. One call, mremap(), replaces the run: all or nothing.
 * 4. Failed memory is not read: its copy is poisoned.
 * 5. ksmd merges nothing there: block.h, 2.
 * 6. Pinning for reading and for long waits for nothing: the kernel gives the
 *    page a copy of its own (FAULT_FLAG_UNSHARE, which passes over the
 *    protection), pins that, and a device would go on reading it when it has
 *    been replaced.  So the inhibited op, asked after protecting, too, reports
 *    it, and who is about to pin waits for what began before: ksm_settle().
 *
 * Leaves to others: when (engine/broken.h), and what the owner wants.
 */
#ifndef KSM_RESTORE_H
#define KSM_RESTORE_H

#include "base/kinds.h"
#include "base/lock.h"
#include "base/urgent.h"
#include "merge/vmas.h"
#include "share/content.h"
#include "watch/dirty.h"

typedef struct KsmRestore {
    int uffd;               /* for copies that are poisoned */
    int uffd_wp;            /* blocking write-protect; negative: none */
    KsmUrgent *urgent;
    KsmKinds *kinds;
    KsmVmas *vmas;
    KsmContent *content;
    KsmDirty *dirty;
    uint8_t kind[CHUNK_PAGES];      /* PM_* of the run at hand */
    void *room;             /* for the copy of all of it, of the region's kin */
    unsigned settles;       /* calls of ksm_settle() */
    uint64_t poisoned;      /* pages found to be lost */
} KsmRestore;

/*
 * Pages [page, page + n) back to anonymous memory, for scan, where merging may
 * go on.  0 or -errno; what was done stays done.  -EBUSY: a device may be
 * writing to a page that was copied on write: in a later pass.
 */
int restore_pages(KsmRestore *s, KsmRegion *r, size_t page, size_t n);

/*
 * The same, as if a device were at all of it: what was copied on write stays,
 * with -EBUSY.
 */
int restore_clean(KsmRestore *s, KsmRegion *r, size_t page, size_t n);

/*
 * The same for the owner, whatever inhibits merging; a busy device is waited
 * for a while.  Called and left with the lock held, which is given up between
 * chunks and while it waits: nothing of the region is merged before this
 * returns (KsmRegion.unmerging).  -EBUSY, too, if somebody settles meanwhile.
 */
int restore_unmerge(KsmRestore *s, KsmLock *lock, KsmRegion *r, size_t page,
                    size_t n);

#endif
