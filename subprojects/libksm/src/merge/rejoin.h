/*
 * rejoin: pages in mappings of the pool map it elsewhere
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A page that was written, and is equal to what a slot holds, need not become
 * anonymous memory before it is merged: its writers are blocked (block.h), it
 * is compared, and the slot is mapped over it.  That takes less than half of
 * what restoring a run and merging it takes, so it pays for runs of a few
 * pages.  Longer ones are restored (restore.h): what is between their pages,
 * and equal to nothing, is whole memory again then; and so are those that are
 * only equal to pages, for which merging makes slots.  Merged pages whose content
 * has another slot, too, may map that in the same way.
 *
 * The danger: a page is replaced by what it is not, or a write is lost.  Why it
 * is safe:
 * 1. What block.h says of writing.  These pages were copied on write, or may have
 *    been, so where a device may be writing nothing is replaced; the busy and
 *    inhibited ops are asked while the pages are blocked (restore.h, 2 and 6).
 * 2. A page, written or not, is compared with the slot that it will map while it
 *    is blocked, and a slot with users is not written (merge.h, 1 and 3).
 * 3. Failed memory is not read: the kernel looks first, and says so.  What fails
 *    between that and the comparison is not helped (store.h).
 * 4. Only an established mapping takes a page's place: mapping_make().
 *
 * Leaves to others: which pages (quiet.h, gather.h), and when (engine/broken.h,
 * engine/compact.h).
 */
#ifndef KSM_REJOIN_H
#define KSM_REJOIN_H

#include "base/urgent.h"
#include "merge/cost.h"
#include "merge/cut.h"
#include "merge/vmas.h"
#include "share/content.h"

typedef struct KsmRejoin {
    int uffd_wp;            /* blocking write-protect; not negative */
    KsmUrgent *urgent;
    KsmContent *content;
    const KsmHasher *hasher;
    KsmVmas *vmas;
    const KsmCut *cut;      /* where mappings are short, none are taken */
    KsmCosts *costs;
} KsmRejoin;

/*
 * Pages [page, page + n) of a chunk, BROKEN and quiet, of a region that has a
 * busy op: those that a slot is equal to go back to the pool, if that pays.
 * Returns how many; the others stay.  *@tried is set if writers were held up.
 */
unsigned rejoin_pages(KsmRejoin *j, KsmRegion *r, size_t page, unsigned n,
                      bool *tried);

/*
 * Pages [page, page + n) of a chunk, MERGED, of a region that has a busy op, map
 * @slot[], of each of which a user was taken for its page: what is equal, and
 * may be replaced now, with @left mappings.  Users of the others are dropped.
 * Returns how many do.
 */
unsigned rejoin_slots(KsmRejoin *j, KsmRegion *r, size_t page, unsigned n,
                      const uint32_t *slot, size_t left);

#endif
