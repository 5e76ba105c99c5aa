/*
 * libksm tests: engines over the local store, a fake remote one, or a group's
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Tests of the whole engine run again with KSM_TEST_STORE=fake in the
 * environment; and some with KSM_TEST_STORE=group and KSM_TEST_GROUP, the path
 * of a socket of ksm-poold.
 */
#ifndef KSM_TEST_STORES_H
#define KSM_TEST_STORES_H

#include "engine/state.h"
#include "fake-store.h"

/* As ksm_engine_new(), over the store that is asked for. */
KsmEngine *stores_engine_new(const KsmConfig *config, GError **error);

/* Memory given to such engines must have MADV_DONTFORK. */
bool stores_group(void);

/* The fake's peer is late from now on, and nothing worse. */
void stores_heal(KsmEngine *e);

/* util_engine_of() makes such engines, and util_passes() waits for answers. */
void stores_choose(void);

static inline KsmPool *engine_pool(const KsmEngine *e)
{
    return fake_store_pool(e->content.store);
}

#endif
