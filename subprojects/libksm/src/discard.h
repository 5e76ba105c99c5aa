/*
 * libksm: what the owner gives back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Discard: the range reads as zeroes at once.  Where it maps the pool,
 * MADV_DONTNEED would bring back the pool's content, so anonymous memory is
 * mapped over it.
 *
 * Free hint: the owner does not need the content any more.  Lazily, the
 * kernel may take the pages when it needs them and whoever writes to one
 * keeps it (MADV_FREE).  Freed pages leave the index and are not hashed
 * until they are written.  "auto" takes them away for good after a while, or
 * when the host is short of memory.  At that time a page may have been
 * written again without our knowing: so nothing is dropped here, but the
 * kernel is asked to reclaim (MADV_PAGEOUT), which takes only pages that are
 * still clean.
 */
#ifndef KSM_DISCARD_H
#define KSM_DISCARD_H

#include "region.h"

int discard_range(KsmRegion *r, size_t page, size_t n);
int discard_hint(KsmRegion *r, size_t page, size_t n);

/* Once a pass: what policy auto does about hints given earlier. */
void discard_settle(KsmRegion *r);

#endif
