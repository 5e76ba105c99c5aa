/*
 * turn: others have the engine's lock amid work on a chunk
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "memory/turn.h"

bool turn_give(KsmTurn *t, KsmRegion *r, size_t chunk)
{
    t->amid = r;
    t->chunk = chunk;
    t->changed = false;
    lock_release(t->lock);
    lock_take(t->lock);
    t->amid = NULL;
    return !t->changed && !r->leaving && !region_inhibited(r);
}

void turn_note(KsmTurn *t, const KsmRegion *r, size_t page, size_t n)
{
    size_t first = t->chunk * CHUNK_PAGES;

    t->changed |= t->amid == r && page < first + CHUNK_PAGES &&
                  first < page + n;
}

void turn_wait(KsmTurn *t, const KsmRegion *r)
{
    /* it is in order: each time that thread has it before this one */
    while (t->amid == r) {
        lock_release(t->lock);
        lock_take(t->lock);
    }
}
