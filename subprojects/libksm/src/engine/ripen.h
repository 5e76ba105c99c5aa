/*
 * ripen: chunks whose merging waits for more answers
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What a remote store says of a chunk comes piece by piece, while the others of
 * the group look at their memory.  Isolating the chunk for each piece would
 * move all of a huge page several times, and copy back what comes next.
 * So a chunk waits for a while (KsmStore.ripen_ns); between passes, a moment.
 * One whose equal pages are scattered, as in a guest that has aged, has its
 * answers scattered, too: it waits until no more have come for that while, five
 * times as long at most; if it then waits for answers to offers, it does so
 * once more.  Each page merged early would be in the way of others.
 */
#ifndef KSM_RIPEN_H
#define KSM_RIPEN_H

#include "engine/state.h"

void ripen_add(KsmEngine *e, KsmRegion *r, size_t chunk);
/* It was ripe and could not be merged: a moment, and no more answers. */
void ripen_again(KsmEngine *e, KsmRegion *r, size_t chunk);
/* What may be merged of the chunk stands in short runs. */
bool ripen_is_sparse(const KsmRegion *r, size_t chunk);
/*
 * Looks at some that have waited.  *@r: the region of one that is ripe, or
 * NULL.  False: all were looked at.
 */
bool ripen_take(KsmEngine *e, KsmRegion **r, size_t *chunk);
/* ns until one is to be looked at; UINT64_MAX: there is none. */
uint64_t ripen_wait(const KsmEngine *e);
void ripen_free(KsmEngine *e);

#endif
