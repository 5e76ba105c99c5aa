/*
 * discard: what the owner gives back
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
 * until they are written.  When, and whether at all, is up to free.h.
 *
 * To notice that write costs a fault for each small page, which is about what
 * freeing lazily saves.  So it is not looked for (PAGE_BLIND): after 10 s, or
 * when memory is short, the kernel is asked for what is still free, and what
 * it leaves is in use (discard_settle).  A log costs nothing more, but what
 * it tells at first may be from before the hint: the same.  Where nothing is
 * asked for (policy lazy, swap, huge pages) what was not looked for counts
 * as in use then, and is hashed once.
 */
#ifndef KSM_DISCARD_H
#define KSM_DISCARD_H

#include "engine/state.h"

typedef enum DiscardKind {
    DISCARD_ZEROES,
    DISCARD_HINT,
} DiscardKind;

int discard_range(KsmEngine *e, KsmRegion *r, size_t page, size_t n,
                  DiscardKind kind);

/* Settles the oldest hint that is due; false: there is none. */
bool discard_settle(KsmEngine *e);

#endif
