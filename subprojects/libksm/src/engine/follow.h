/*
 * follow: merged pages move to the pool of the daemon that is there now
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * When a daemon dies its pool stays, as long as somebody maps it, but nobody
 * gives any of it up, and who joins the next daemon shares none of it.  So what
 * is merged there is offered to the next one, a chunk at a time: from the pool,
 * not from the guest, and whoever else has it, for all were shared once.  When
 * there are slots for a chunk, it is restored to anonymous memory and merged
 * as any other.  So there are two pools for a while, and never more than a
 * chunk of each member beside them.
 *
 * Pages that were copied on write stay where they are (engine/broken.h).
 */
#ifndef KSM_FOLLOW_H
#define KSM_FOLLOW_H

#include "engine/state.h"

/* A piece of it; false: there is no more to do now. */
bool follow_step(KsmEngine *e);

#endif
