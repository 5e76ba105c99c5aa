/*
 * compact: few mappings, also after hours
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Every half a minute a sweep over what is merged: contents in scattered slots
 * move to slots that follow each other, and then, in another sweep, whoever maps
 * the old ones follows (merge/gather.h).
 *
 * It ends, though two runs may take pages from each other for ever: merging
 * earns credit, so that there is at most a page gathered for every CREDIT_SHARE
 * merged; after some sweeps that found nothing what is left of it is void, and
 * the next ones come ever less often.
 * What others gain or lose was only expected: so what came of a sweep is counted,
 * and where mappings that went were not worth its CPU time the next one does a
 * quarter of that, or nothing before there is new credit.
 *
 * Until all have followed a content takes two pages.  So a sweep gathers a small
 * part of what is merged, and none does while too many are behind, as where a
 * device is busy, or merging is inhibited; they are looked for again, ever less
 * often.  Nothing is gathered where some can never follow: in a store that others
 * use, while a forked child may map what is left, or with a region that has no
 * busy op.
 */
#ifndef KSM_COMPACT_H
#define KSM_COMPACT_H

#include "engine/state.h"

void compact_init(KsmEngine *e);

/* A piece of it; false: there is no more to do now. */
bool compact_step(KsmEngine *e);

#endif
