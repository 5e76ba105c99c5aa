/*
 * engine: what implements libksm.h
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Here rooms are made and connected (engine_connect() gives each the fields of
 * the configuration that it needs), calls take the lock, and ksm_step() deals
 * out the time.  A store other than ours is put in here.
 */
#ifndef KSM_ENGINE_H
#define KSM_ENGINE_H

#include "libksm.h"
#include "share/store.h"

/* As ksm_engine_new(), over @store, which is the engine's from now on. */
KsmEngine *engine_new_over(const KsmConfig *config, KsmStore *store,
                           GError **error);

#endif
