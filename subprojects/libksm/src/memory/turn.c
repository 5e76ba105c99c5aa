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
    lock_pass(t->lock);
    t->amid = NULL;
    return !t->changed && !r->leaving && !region_inhibited(r);
}

void turn_note(KsmTurn *t, const KsmRegion *r, size_t page, size_t n)
{
    size_t first = t->chunk * CHUNK_PAGES;

    t->changed |= t->amid == r && page < first + CHUNK_PAGES &&
                  first < page + n;
}

void turn_end(KsmTurn *t)
{
    t->changed = true;
}

void turn_wait(KsmTurn *t, const KsmRegion *r)
{
    /* that thread waits for the lock already, and has it before this one */
    if (t->amid == r) {
        lock_pass(t->lock);
    }
}
