/*
 * discard: what the owner gives back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Discard: the range reads as zeroes at once.  MADV_DONTNEED would bring back
 * the pool's content: anonymous memory is mapped over its mappings.  And over
 * what nobody has access to since its memory failed (PAGE_BARRED); a hint does
 * that too, for who uses the page again says nothing before.
 *
 * Free hint: the owner no longer needs the content.  Lazily (MADV_FREE), the
 * kernel takes pages when it needs them, except written ones.  Freed pages
 * leave the index and are not hashed until they are written.  free.h decides
 * when, and whether at all.
 *
 * Noticing that write costs a fault per small page, about what freeing lazily
 * saves.  So nobody looks for it (PAGE_BLIND): after 10 s, or when memory is
 * short, the kernel is asked for what is still free, and what it leaves is in
 * use (discard_settle).  A log costs nothing more, but at first may tell of
 * writes from before the hint: the same.  Where nothing is asked for (policy
 * lazy, swap, huge pages) PAGE_BLIND pages count as in use then, and are hashed
 * once.
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

/* Settles the oldest hint that is due; false: there is none, or it waits. */
bool discard_settle(KsmEngine *e);

#endif
