/*
 * broken: merged pages that were written
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A page that was copied on write stays in its mapping of the pool, where it
 * can be neither moved nor given back.  Once it is quiet and equal to something
 * again, or zeroes, its part of the mapping is restored to anonymous memory,
 * and merged as any other; or the pool is mapped over it as it is, if it is
 * small.  When it is looked at: rhythm.h.  No source tracks writes to mappings
 * of the pool: a page is quiet if two looks find the same hash (a log, where
 * there is one, makes them begin anew).  After that, looks become rare.
 *
 * What pays: merge/quiet.h.  So does restoring all pages of a mapping, equal
 * to something or not: it becomes part of what is around it.
 *
 * If pages that were restored or merged again are written, their chunk waits,
 * twice as long each time: up to four looks, or half a minute; and if half of what
 * is merged there is written again as soon as that, up to 32, or four minutes.
 * Others have the lock between two runs (turn.h).  A look at a chunk ends when it
 * took 5 ms of CPU, and the next one goes on.
 */
#ifndef KSM_BROKEN_H
#define KSM_BROKEN_H

#include "engine/state.h"

/* What is merged should stay so for so many looks. */
#define LIFE_LOOKS  4u

/* A merged page of the chunk was written; when is known by looks only. */
static inline void broken_count(const KsmEngine *e, KsmChunk *c)
{
    const KsmRhythm *m = &e->scan.rhythm;
    uint16_t looks = m->all_looks - c->restored_at;
    uint16_t *n = looks < MAX(LIFE_LOOKS, m->soonest) ? &c->soon : &c->later;

    *n = MIN(*n + 1, UINT16_MAX);
}

/*
 * Looks at the chunk's broken pages, if it is time.  @kinds: what their page
 * tables say.  *@restored: some were, for the next pass to merge.  Called and left
 * with the lock held, others have it in between.  False: they changed the chunk.
 */
bool broken_look(KsmEngine *e, KsmRegion *r, size_t chunk,
                 const uint8_t *kinds, bool *restored);

#endif
