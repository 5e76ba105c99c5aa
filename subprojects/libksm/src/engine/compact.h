/*
 * compact: few mappings, also after hours
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Every half a minute a sweep over what is merged: contents in scattered slots
 * move to slots that follow each other, and then whoever maps the old ones
 * follows (merge/gather.h).
 *
 * It ends, though two runs may take pages from each other for ever: merging
 * earns credit, so that there is at most a page gathered for every CREDIT_SHARE
 * merged, and after some sweeps that found nothing what is left of it is void.
 * Until all have followed a content takes two pages, so a sweep gathers a small
 * part of what is merged; and none while too many pages stay behind, as where
 * a device is busy.  A store that others use, too, keeps its contents where they
 * are.
 */
#ifndef KSM_COMPACT_H
#define KSM_COMPACT_H

#include "engine/state.h"

/* A piece of it; false: there is no more to do now. */
bool compact_step(KsmEngine *e);

#endif
