/*
 * mapping: a run of pages becomes a mapping of the pool
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The caller has made sure that what is there may go: nothing, as it was moved
 * out (stage.h), or pages that were compared while nobody writes (block.h).
 */
#ifndef KSM_MAPPING_H
#define KSM_MAPPING_H

#include "memory/region.h"
#include "merge/vmas.h"
#include "share/store.h"

/*
 * Maps @n slots from @slot on over as many pages from @addr on.  False: the
 * range is still as it was.  mapping_attributes() follows.
 */
bool mapping_make(KsmStore *store, KsmVmas *vmas, KsmRegion *r, char *addr,
                  uint32_t slot, unsigned n);

/*
 * Of @n pages from @addr on those that were @mapped get the region's attributes.
 * For that nobody has to wait, and each call takes the lock of the address space
 * from all that fault: so it is one for all of them, and for those between, which
 * have them already.  @apart: not for those; nor where all that is mapped anew is
 * for the kernel's KSM, which they may be for, too, by our doing (tail.h).
 */
void mapping_attributes(KsmRegion *r, char *addr, const bool *mapped,
                        unsigned n, bool apart);

/* The page tables of such a run: ours, then others', by the prefault op. */
void mapping_warm(const KsmRegionOps *ops, void *opaque, char *addr,
                  size_t len);

#endif
