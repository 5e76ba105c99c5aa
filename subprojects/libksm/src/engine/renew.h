/*
 * renew: what is alone is asked about again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A page that a remote store knows of nobody else is asked about once.  News
 * of it may have been lost, whoever was to offer the same may have gone, or it
 * is we who had no memory for the offer.
 */
#ifndef KSM_RENEW_H
#define KSM_RENEW_H

#include "engine/state.h"

/* Some chunks, as time has passed. */
void renew_by_time(KsmEngine *e);
/* Once a pass for chunks up to @end: what could not be offered and now can. */
void renew_pass(KsmEngine *e, KsmRegion *r, size_t chunk, size_t end);

#endif
