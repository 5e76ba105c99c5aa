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
 * Without it memory costs up to three mappings for each time that it is merged,
 * written and restored; with it none.
 *
 * The danger: what is split off takes a page with it.  Why it is safe: it is
 * done where the page is staged (stage.h), so there is none, and nobody can put
 * one there meanwhile.
 *
 * No more than a page of it is there for long: what locks all of the process's
 * memory, or reads it, finds no copy of the region.
 */
#ifndef KSM_KIN_H
#define KSM_KIN_H

#include "memory/region.h"

/* Would kin of that page serve more pages than what there is? */
bool kin_wanted(const KsmRegion *r, size_t page);

/* Would what is moved there become part of the mappings around it? */
bool kin_serves(const KsmRegion *r, size_t page);

/*
 * Splits kin off @page, a page that is isolated and staged.  If that fails
 * there is none, or what there was.
 */
void kin_take(KsmRegion *r, size_t page);

/*
 * New private memory of @n pages that, moved to @page, becomes part of the
 * region's mappings there.  NULL: none can be had; any other will do.
 */
void *kin_map(KsmRegion *r, size_t page, size_t n);

#endif
