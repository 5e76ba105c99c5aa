/*
 * store-local: a store of this process alone
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The pool behind the seam.  It is never asked: the index in front knows all
 * that was published.  It fills slots from staged pages, without a comparison
 * (merge.h, 1).
 */
#ifndef KSM_STORE_LOCAL_H
#define KSM_STORE_LOCAL_H

#include "share/pool.h"
#include "share/store.h"

/* A slot has @max_sharing users at most.  NULL with *@err: -errno. */
KsmStore *store_local_new(unsigned max_sharing, int *err);

/* Tests: what is behind it. */
KsmPool *store_local_pool(KsmStore *s);

#endif
