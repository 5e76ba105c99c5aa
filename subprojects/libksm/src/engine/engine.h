/*
 * engine: what implements libksm.h
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef KSM_ENGINE_H
#define KSM_ENGINE_H

#include "libksm.h"
#include "share/store.h"

/* As ksm_engine_new(), over @store, which is the engine's from now on. */
KsmEngine *engine_new_over(const KsmConfig *config, KsmStore *store,
                           GError **error);

#endif
