/*
 * block: nobody writes to mapped memory for a moment
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Synchronous write-protection: who writes to the range waits in a fault until
 * it is lifted, or the range is replaced, and is woken.  Reading goes on.
 *
 * 1. Writing to a page, or pinning it for writing, after it was protected waits
 *    for us, or fails.  What a device holds already writes on: the owner is
 *    asked (the busy op) when the range is blocked, not before.
 * 2. ksmd, which takes the protection of what it merges away, merges nothing
 *    there: attr_unmergeable().
 * 3. While a range is blocked the calling thread writes to no region: it blocks
 *    signals, whose handlers might.
 */
#ifndef KSM_BLOCK_H
#define KSM_BLOCK_H

#include <signal.h>

#include "base/prim.h"
#include "base/urgent.h"

typedef struct Block {
    UffdRange range;
    KsmUrgent *urgent;
    sigset_t signals;       /* as they were */
} Block;

/*
 * Blocks @len bytes.  0, and block_end() is to follow, until when the thread is
 * @urgent; or -errno, and nothing is blocked.
 */
int block_begin(Block *b, KsmUrgent *urgent, int uffd_wp, void *addr,
                size_t len);

/* Part of it, which is still what it was, is not protected any more. */
void block_lift(const Block *b, void *addr, size_t len);

/* All of it was replaced, or lifted: who waits goes on. */
void block_end(Block *b);

#endif
