/*
 * broken: merged pages that were written
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A page that was copied on write stays in its mapping of the pool, where it
 * can be neither moved nor given back.  Once it is quiet it may be equal to
 * something again, or zeroes; then its part of the mapping is restored to
 * anonymous memory, and merged as any other.  So it is looked at every
 * CHECK_PASSES: no source tracks writes to mappings of the pool, so quiet is
 * what has the same hash in two looks (a log, where there is one, makes them
 * begin anew).  After that, looks become rare.
 *
 * What pays: restoring and merging a run of pages costs so many ns, and a
 * saved page is worth PAGE_WORTH_NS.  A mapping all of whose pages were
 * written is not restored for the sake of its VMA: what mremap() put there
 * would be a VMA of its own, too, and one that a discard does not end.
 *
 * A chunk where what was restored is written again must wait for the next
 * time, twice as long each time.
 */
#ifndef KSM_BROKEN_H
#define KSM_BROKEN_H

#include "engine/state.h"

/* Looks at the chunk's broken pages, if it is time; e->scan.kinds is known. */
void broken_look(KsmEngine *e, KsmRegion *r, size_t chunk);

#endif
