/*
 * libksm tests: an engine, the whole house
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef KSM_TEST_HOUSE_H
#define KSM_TEST_HOUSE_H

#include "util.h"

/* util_engine_of() calls this: ksm_engine_new(). */
extern KsmEngine *(*util_engine_new)(const KsmConfig *config, GError **error);

/*
 * An engine at 100 % with the source; NULL if the kernel lacks something, and
 * the test is skipped.
 */
KsmEngine *util_engine(KsmScope scope, KsmDirtySource dirty);
/*
 * One of that configuration.  As the other it has a fixed seed, and sees of its
 * CPU time what an emulated one leaves: slower.h.
 */
KsmEngine *util_engine_of(const KsmConfig *config);
KsmRegion *util_add(KsmEngine *e, Mem *m, const KsmRegionOps *ops);
/* Passes; where util_busy is set at least so many, until it says no. */
extern bool (*util_busy)(KsmEngine *e);
void util_passes(KsmEngine *e, unsigned n);
KsmStats util_stats(KsmEngine *e);
void util_remove(KsmRegion *r);
void util_print(KsmEngine *e);
/* Memory and books are as they should be; all three go. */
void util_end(KsmEngine *e, KsmRegion *r, Mem *m);

/* An engine with two areas of equal content. */
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
