/*
 * attr: what else a mapping is besides its content
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Newly mapped memory gets the attributes that the region had when it was
 * added: advice, overcommit, NUMA policy.  Its owner is told, and adds what it
 * changed since.
 */
#ifndef KSM_ATTR_H
#define KSM_ATTR_H

#include "memory/region.h"

typedef enum AttrKind {
    ATTR_OWN,           /* anonymous memory */
    ATTR_SHARED,        /* the pool, see mapping.h: advice, but of huge pages */
} AttrKind;

/*
 * Where all that the process maps is for the kernel's KSM (PR_SET_MEMORY_MERGE:
 * systemd's MemoryKSM=), this is not; its pages are its own again.  ksmd knows
 * neither the pool nor write-protection: a page that it merges is writable for
 * its owner afterwards (restore.h), and of those that were merged and freed
 * lazily it may lose one (libksm-free.h).  0 or -errno: some may be left to it.
 */
int attr_unmergeable(void *addr, size_t len);

/* Hints: the kernel may refuse them. */
void attr_give(KsmRegion *r, void *addr, size_t len, AttrKind kind);
void attr_give_policy(const KsmRegion *r, void *addr, size_t len);

/*
 * Maps anonymous memory over the range; its content is gone.  Never leaves a
 * hole in the address space.  0, or -errno with the range as it was.
 */
int attr_map_anonymous(KsmRegion *r, void *addr, size_t len);

/* Private anonymous memory; @flags besides.  As prim.map(). */
void *anonymous_map(void *addr, size_t len, int flags);

/* Is there no mapping at part of the range? */
bool range_has_gap(void *addr, size_t len);

#endif
