/*
 * attr: what else a mapping is besides its content
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "memory/attr.h"

void attr_give_policy(const KsmRegion *r, void *addr, size_t len)
{
    if (r->policy > 0) {
        prim.policy_set(addr, len, r->policy, r->policy_mask,
                        sizeof(r->policy_mask) * 8);
    }
}

/* A child must not have it: the pool does not wait for that child to end. */
static void keep_home(void *addr, size_t len)
{
    for (unsigned tries = 0; tries < 16; tries++) {
        if (prim.advise(addr, len, MADV_DONTFORK) == 0) {
            return;
        }
        prim.pause(tries > 3 ? 1000 : 0);
    }
}

int attr_unmergeable(void *addr, size_t len)
{
    int ret;

    do {
        ret = prim.advise(addr, len, MADV_UNMERGEABLE);
    } while (ret == -EINTR);
    /* EAGAIN: for want of memory, or of mappings; EINVAL: there is no ksmd */
    return ret == -EAGAIN ? -ENOMEM : ret == -EINVAL ? 0 : ret;
}

static void own_give(KsmRegion *r, void *addr, size_t len)
{
    size_t page = ((char *)addr - r->base) / PAGE_BYTES;

    if (page_chunk(r, page)->flags & CHUNK_TAIL) {
        /* else it is a mapping apart from those around it */
        prim.advise(addr, len, MADV_MERGEABLE);
    } else if (r->merge_any && attr_unmergeable(addr, len) < 0) {
        /* what this says is that ksmd may have merged pages there */
        r->mergeable = true;
    }
    attr_give_policy(r, addr, len);
}

void attr_give(KsmRegion *r, void *addr, size_t len, AttrKind kind)
{
    for (unsigned i = 0; i < r->n_advice; i++) {
        bool huge = r->advice[i] == MADV_HUGEPAGE ||
                    r->advice[i] == MADV_NOHUGEPAGE;

        if (r->advice[i] == MADV_DONTFORK) {
            keep_home(addr, len);
        } else if (kind == ATTR_OWN || !huge) {
            prim.advise(addr, len, r->advice[i]);
        }
    }
    if (kind == ATTR_OWN) {
        own_give(r, addr, len);
    }
    if (r->ops && r->ops->mapped) {
        r->ops->mapped(r->opaque, addr, len);
    }
}

void *anonymous_map(void *addr, size_t len, int flags)
{
    return prim.map(addr, len, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

bool range_has_gap(void *addr, size_t len)
{
    return prim.advise(addr, len, MADV_NORMAL) == -ENOMEM;
}

int attr_map_anonymous(KsmRegion *r, void *addr, size_t len)
{
    for (unsigned tries = 0; ; tries++) {
        if (anonymous_map(addr, len, MAP_FIXED | r->map_flags)) {
            break;
        }
        /* a hole in the address space must not stay */
        if (tries > 3 && !range_has_gap(addr, len)) {
            return -ENOMEM;
        }
        if (tries > 3) {
            prim.pause(1000);
        }
    }
    attr_give(r, addr, len, ATTR_OWN);
    return 0;
}
