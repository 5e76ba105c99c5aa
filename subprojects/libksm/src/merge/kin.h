/*
 * kin: memory that becomes part of the mapping around it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The idea: anonymous memory that is moved between other anonymous memory stays
 * a mapping of its own, for its pages are found by another anon_vma, and by
 * their number from where they were first (vm_pgoff): mremap(2) keeps both, and
 * the kernel joins mappings where both go on.  So what is restored is copied to
 * memory that has both from the region: a page of address space, its kin, that
 * was split off it while its place was isolated (MREMAP_DONTUNMAP, Linux 5.7),
 * grown until it reaches the page's number, and cut down to what is wanted.
 *
 * The danger: what is split off takes a page with it.  Why it is safe: it is
 * done where the page is staged (stage.h), so there is none, and nobody can put
 * one there meanwhile.
 *
 * No more than a page of it is there for long: what locks all of the process's
 * memory, or reads it, finds no copy of the region.  But while it is grown it
 * counts: kin_allowed().
 */
#ifndef KSM_KIN_H
#define KSM_KIN_H

#include "memory/region.h"

/*
 * May address space be taken for a moment, as much as a region has, without
 * harm to others?  Not where it is limited, or committed strictly, nor on Linux
 * 6.15 to 6.17, which loses count of it (fixed by 0e59f47c15ce).
 */
bool kin_allowed(void);

/*
 * Would kin of that page serve more pages than what there is?  Not once some of
 * the region was restored without it: the page may be of that.
 */
bool kin_wanted(const KsmRegion *r, size_t page);

/*
 * Is what is moved there to become part of the mappings around it?  If there is
 * memory for it, and they are of the region as it was added.
 */
bool kin_serves(const KsmRegion *r, size_t page);

/*
 * Splits kin off @page, a page that is isolated and staged, and not all of its
 * mapping: that would lose its anon_vma, and need memory for another before the
 * page can be moved back.  If it fails the old kin stays.
 */
void kin_take(KsmRegion *r, size_t page);

/*
 * New private memory of @n pages that, moved to @page, becomes part of the
 * region's mappings there; of a whole chunk, where it may be a huge page.  NULL:
 * none can be had; any other will do.
 */
void *kin_map(KsmRegion *r, size_t page, size_t n);

#endif
