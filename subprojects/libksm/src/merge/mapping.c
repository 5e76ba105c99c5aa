/*
 * mapping: a run of pages becomes a mapping of the pool
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <sys/mman.h>

#include "base/prim.h"
#include "base/tsan.h"
#include "memory/attr.h"
#include "merge/mapping.h"

#define FAULT_AROUND    (16 * PAGE_BYTES)   /* the kernel's default */

bool mapping_make(KsmStore *store, KsmVmas *vmas, KsmRegion *r, char *addr,
                  uint32_t slot, unsigned n)
{
    size_t len = n * PAGE_BYTES;
    off_t offset;
    int fd = store_map(store, slot, &offset);
    unsigned tries = 0;

    while (!prim.map(addr, len, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_FIXED | r->map_flags,
                     fd, offset)) {
        if (!range_has_gap(addr, len)) {
            return false;
        }
        prim.pause(tries++ > 8 ? 1000 : 0);
    }
    /* who writes to it has a copy there */
    attr_give_policy(r, addr, len);
    if (r->merge_any) {
        attr_unmergeable(addr, len);
    }
    vmas_made(vmas, 2);
    return true;
}

/* Is some of it to be changed by the owner, who has changed his mind? */
static bool owner_changes(const KsmRegion *r)
{
    for (unsigned i = 0; i < r->n_advice; i++) {
        if (r->advice[i] == MADV_DONTDUMP) {
            return true;
        }
    }
    return false;
}

void mapping_attributes(KsmRegion *r, char *addr, const bool *mapped,
                        const bool *kept, unsigned n)
{
    bool apart = !kept || owner_changes(r);
    unsigned end;

    for (unsigned i = 0; i < n; i++) {
        if (!mapped[i]) {
            continue;
        }
        end = i + 1;
        for (unsigned k = end; k < n && (mapped[k] || (!apart && kept[k]));
             k++) {
            end = mapped[k] ? k + 1 : end;
        }
        attr_give(r, addr + i * PAGE_BYTES, (end - i) * PAGE_BYTES,
                  ATTR_SHARED);
        i = end;        /* that one is not mapped */
    }
}

/*
 * Reads a run once, for its page tables: a fault maps the aligned 16 pages
 * around it (fault-around), at less than half the price of MADV_POPULATE_READ,
 * which looks up every page.  Where the mapping begins it maps the first 16
 * pages instead: so the second read comes 16 pages later, aligned or not.
 */
void mapping_touch(const char *addr, size_t len)
{
    const char *end = addr + len, *at = addr;

    KSM_TSAN_IGNORE_BEGIN();
    while (at < end) {
        /* volatile: only the read matters */
        (void)*(const volatile char *)at;
        at = at == addr ? addr + FAULT_AROUND
           : (const char *)ROUND_UP_TO((uintptr_t)at + 1, FAULT_AROUND);
    }
    KSM_TSAN_IGNORE_END();
}

void mapping_prefault(const KsmRegionOps *ops, void *opaque, char *addr,
                      size_t len)
{
    if (ops && ops->prefault) {
        ops->prefault(opaque, addr, len);
    }
}

void mapping_warm(const KsmRegionOps *ops, void *opaque, char *addr,
                  size_t len)
{
    mapping_touch(addr, len);
    mapping_prefault(ops, opaque, addr, len);
}
