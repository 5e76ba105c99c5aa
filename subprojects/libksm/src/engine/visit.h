/*
 * visit: what the pages of a chunk are
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A look at the page tables, which says what is populated, written, swapped out;
 * then quiet pages that are not known are hashed.
 *
 * Leaves to others: which chunks, and when (scan.h); what a page is by its hash
 * (classify.h); what becomes of the chunk.
 */
#ifndef KSM_VISIT_H
#define KSM_VISIT_H

#include "engine/state.h"

/* Page tables alone, into @v->kinds; false: they cannot be had. */
bool visit_ask(KsmEngine *e, KsmVisit *v, KsmRegion *r, size_t chunk);

/* The state of a page, corrected by what its page table says. */
void visit_page(KsmEngine *e, KsmRegion *r, size_t page, uint8_t kind);

/* All of it; false: there are no page tables, and it is to be visited again. */
bool visit_chunk(KsmEngine *e, KsmVisit *v, KsmRegion *r, size_t chunk);

/* @value for each page of the chunk that was hashed. */
void visit_mark(const KsmVisit *v, bool *pages, bool value);

#endif
