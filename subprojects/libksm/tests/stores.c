/*
 * libksm tests: engines over the local store, a fake remote one, or a group's
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <string.h>

#include "engine/engine.h"
#include "house.h"
#include "stores.h"

typedef enum Stores { STORES_LOCAL, STORES_FAKE, STORES_GROUP } Stores;

static Stores stores(void)
{
    const char *store = g_getenv("KSM_TEST_STORE");

    if (!store) {
        return STORES_LOCAL;
    }
    g_assert(!strcmp(store, "fake") || !strcmp(store, "group"));
    return *store == 'f' ? STORES_FAKE : STORES_GROUP;
}

bool stores_group(void)
{
    return stores() == STORES_GROUP;
}

static KsmEngine *group_engine_new(const KsmConfig *config, GError **error)
{
    KsmConfig cfg = *config;

    cfg.scope = KSM_SCOPE_GROUP;
    cfg.group_socket = g_getenv("KSM_TEST_GROUP");
    g_assert(cfg.group_socket);
    return ksm_engine_new(&cfg, error);
}

KsmEngine *stores_engine_new(const KsmConfig *config, GError **error)
{
    KsmStore *store;
    int err = 0;

    if (stores() == STORES_LOCAL || config->scope == KSM_SCOPE_ZERO) {
        return ksm_engine_new(config, error);
    }
    if (stores_group()) {
        return group_engine_new(config, error);
    }
    store = fake_store_new(MAX(config->max_page_sharing, 2), &err);
    if (!store) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "cannot make the fake store: %s", g_strerror(-err));
        return NULL;
    }
    return engine_new_over(config, store, error);
}

void stores_heal(KsmEngine *e)
{
    FakeStoreHabits *habits;

    if (stores() == STORES_FAKE && store_is_remote(e->content.store)) {
        habits = fake_store_habits(e->content.store);
        habits->refuse = habits->silent = habits->lie = habits->lose = 0;
        fake_store_return(e->content.store);
    }
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
    util_busy = stores() != STORES_LOCAL ? stores_busy : NULL;
}
