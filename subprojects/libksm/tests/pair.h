/*
 * libksm tests: an engine with two areas of equal content
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef KSM_TEST_PAIR_H
#define KSM_TEST_PAIR_H

#include "util.h"

#define PAIR_PAGES  1024u

typedef struct Pair {
    KsmEngine *e;
    Mem *a, *b;
    KsmRegion *ra, *rb;
} Pair;

/* Nothing is merged so far.  False: skipped. */
bool pair_start(Pair *p, KsmScope scope, KsmDirtySource dirty,
                const KsmRegionOps *ops, MemPages kind);
/* Memory and books are as they should be. */
void pair_end(Pair *p);

#endif
