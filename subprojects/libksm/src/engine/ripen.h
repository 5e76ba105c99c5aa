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
 * times as long at most.  Each page merged early would be in the way of others.
 */
#ifndef KSM_RIPEN_H
#define KSM_RIPEN_H

#include "engine/state.h"

void ripen_add(KsmEngine *e, KsmRegion *r, size_t chunk);
/* What may be merged of the chunk stands in short runs. */
bool ripen_is_sparse(const KsmRegion *r, size_t chunk);
/*
 * False: none has waited long enough.  *@r: the next one's region; NULL: it is
 * gone, or waits on.
 */
bool ripen_take(KsmEngine *e, KsmRegion **r, size_t *chunk);
/* ns until there is one; UINT64_MAX: never. */
uint64_t ripen_wait(const KsmEngine *e);
void ripen_free(KsmEngine *e);

#endif
