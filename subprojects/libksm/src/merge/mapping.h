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
 * Of @n pages from @addr on those that were @mapped get the region's attributes,
 * but for its NUMA policy, which they have.  For that nobody has to wait, and each
 * call takes the lock of the address space from all that fault: so there is one
 * for as many as possible, those between that were @kept (NULL: none) included,
 * which have them already.  Not where the owner may have changed them since, or
 * what is there may not be the region's any more.
 */
void mapping_attributes(KsmRegion *r, char *addr, const bool *mapped,
                        const bool *kept, unsigned n);

/* The page tables of such a run: ours; of any thread. */
void mapping_touch(const char *addr, size_t len);

/* ... then others', by the prefault op. */
void mapping_prefault(const KsmRegionOps *ops, void *opaque, char *addr,
                      size_t len);

/* Both. */
void mapping_warm(const KsmRegionOps *ops, void *opaque, char *addr,
                  size_t len);

#endif
