/*
 * ripen: chunks whose merging waits for more answers
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What a remote store says of a chunk comes piece by piece, while the others of
 * the group look at their memory.  Isolating the chunk for each piece would
 * move all of a huge page several times, and copy back what comes next.
 * So a chunk waits for a while (KsmStore.ripen_ns); between passes, a moment.
 */
#ifndef KSM_RIPEN_H
#define KSM_RIPEN_H

#include "engine/state.h"

void ripen_add(KsmEngine *e, KsmRegion *r, size_t chunk);
/* The next chunk that has waited long enough; false: there is none. */
bool ripen_take(KsmEngine *e, uint32_t *id);
/* ns until there is one; UINT64_MAX: never. */
uint64_t ripen_wait(const KsmEngine *e);
void ripen_free(KsmEngine *e);

#endif
