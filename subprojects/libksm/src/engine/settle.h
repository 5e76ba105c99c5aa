/*
 * settle: pages that merging put back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * They look written to the page tables.  They would be NEW, and nothing found
 * equal to them, until a pass has seen them quiet and the next one has hashed
 * them.  So they are protected again, and then looked at for what was written
 * before that.
 */
#ifndef KSM_SETTLE_H
#define KSM_SETTLE_H

#include "engine/state.h"

/* After merge_plan(). */
void settle_kept(KsmEngine *e, KsmRegion *r, size_t chunk);

#endif
