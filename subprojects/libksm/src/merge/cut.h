/*
 * cut: which runs get mappings
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A process may have so many mappings (vmas.h), and a run of merged pages takes
 * one or two of them whatever its length.  Where there are not enough for all
 * runs, the longest are to have them.  What there is of each length is known
 * from what was planned lately, and how much is to come from the pages that are
 * equal to something or were not looked at.  Both together give the shortest
 * length that gets mappings; those of just that length do in a part of the
 * chunks, not here and there in each: what is left between mappings has to be
 * isolated page by page.  What was refused is remembered: it comes again in
 * later passes, when more is known.
 *
 * Leaves to others: how many mappings there are.  Nobody gives up those of a
 * short run for a longer one.
 */
#ifndef KSM_CUT_H
#define KSM_CUT_H

#include <stdint.h>

#include "base/page.h"

#define CUT_BACKOFF 3u      /* log2 of passes, where mappings are left */

typedef struct KsmCut {
    /* lately */
    uint32_t runs[CHUNK_PAGES + 1];     /* by their length */
    uint64_t n, pages;                  /* all runs, and their pages */
    uint64_t needed;                    /* mappings that they would take */
    uint64_t seen;                      /* pages, in this pass */
    uint32_t refused[CHUNK_PAGES + 1];  /* ... of them: as runs */
    uint64_t refused_pages;
    /* what comes of it */
    unsigned shortest;                  /* length; 0: all get mappings */
    double part;                        /* of chunks that map those, too */
    double turn;
    bool too;                           /* this one does */
    size_t left;                        /* for this one: mappings */
} KsmCut;

/* A pass begins: what was refused is planned anew, and sightings are older. */
void cut_pass(KsmCut *c);

/* There is a run of so many pages, which would take @mappings. */
void cut_see(KsmCut *c, unsigned pages, unsigned mappings);

/*
 * For a chunk all of whose runs were seen.  @left: mappings that may still be
 * made, @limit: of how many.  @todo: pages not merged that are equal to
 * something, as far as is known.
 */
void cut_decide(KsmCut *c, size_t left, size_t limit, uint64_t todo);

/* Is it worth while to plan soon again what was refused? */
static inline bool cut_has_left(size_t left, size_t limit)
{
    return left > limit / 16;
}

/* What single pages may have of it. */
size_t cut_room(size_t left, size_t limit);

/* Does this run of so many pages get its mappings? */
bool cut_takes(KsmCut *c, unsigned pages);

#endif
