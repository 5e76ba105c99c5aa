/*
 * block: nobody writes to mapped memory for a moment
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "memory/attr.h"
#include "merge/block.h"

#define TRIES   1000u   /* of a call that should not fail, 100 us apart */

int block_begin(Block *b, KsmUrgent *urgent, int uffd_wp, void *addr,
                size_t len)
{
    int ret;

    b->range = (UffdRange) { uffd_wp, addr, len };
    b->urgent = urgent;
    /* nor do we wait for a lock that a helper has, and guests for us */
    crew_pause(urgent->crew);
    /* ksmd would take the protection away; who knows who has marked it since */
    ret = attr_unmergeable(addr, len);
    ret = ret < 0 ? ret : prim.uffd_register(&b->range, UFFD_PROTECT);
    if (ret < 0) {
        crew_go_on(urgent->crew);
        return ret;
    }
    urgent_begin(urgent);
    prim.signals_block(&b->signals);
    ret = prim.uffd_protect(&b->range, true);
    if (ret < 0) {
        block_lift(b, addr, len);
        block_end(b);
    }
    return ret;
}

void block_lift(const Block *b, void *addr, size_t len)
{
    UffdRange range = { b->range.fd, addr, len };
    unsigned tries = 0;

    while (prim.uffd_protect(&range, false) < 0 && ++tries < TRIES) {
        prim.pause(100);
    }
    tries = 0;
    while (prim.uffd_unregister(&range) < 0 && ++tries < TRIES) {
        prim.pause(100);
    }
}

void block_end(Block *b)
{
    for (unsigned i = 0; prim.uffd_wake(&b->range) < 0 && i < TRIES; i++) {
        prim.pause(100);
    }
    prim.signals_restore(&b->signals);
    urgent_end(b->urgent);
}
