/*
 * libksm tests: engines over the local store, or over a fake remote one
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <string.h>

#include "engine/engine.h"
#include "house.h"
#include "stores.h"

static bool stores_fake(void)
{
    const char *store = g_getenv("KSM_TEST_STORE");

    g_assert(!store || !strcmp(store, "fake"));
    return store;
}

KsmEngine *stores_engine_new(const KsmConfig *config, GError **error)
{
    KsmStore *store;
    int err = 0;

    if (!stores_fake()) {
        return ksm_engine_new(config, error);
    }
    store = fake_store_new(MAX(config->max_page_sharing, 2), &err);
    if (!store) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "cannot make the fake store: %s", g_strerror(-err));
        return NULL;
    }
    return engine_new_over(config, store, error);
}

/* Is something on its way that was asked or offered, or follows from that? */
static bool stores_busy(KsmEngine *e)
{
    return asks_awaited(&e->asks) || (store_is_remote(e->content.store) &&
                                  (e->asks.n || e->scan.n_ripe));
}

void stores_choose(void)
{
    util_engine_new = stores_engine_new;
    util_busy = stores_fake() ? stores_busy : NULL;
}
