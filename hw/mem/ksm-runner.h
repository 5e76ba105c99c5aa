/*
 * The iothread that steps libksm's engine
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Callers hold the BQL.  Leaves to others: the engine's memory and its ops
 * (ksm-guest.c).
 */
#ifndef HW_MEM_KSM_RUNNER_H
#define HW_MEM_KSM_RUNNER_H

#include "libksm.h"
#include "system/iothread.h"

typedef struct KsmRunner KsmRunner;

/*
 * The fixed properties of an engine.  All backends share one, so that their
 * memory merges, and must agree on these.
 */
typedef struct KsmRunnerKey {
    KsmScope scope;
    const char *group, *group_socket;   /* scope=group; or NULL */
    KsmDirtySource dirty;
    KsmFreePolicy free_policy;
    bool tail;                  /* what stands alone is the kernel's */
    IOThread *iothread;         /* NULL: the internal one */
} KsmRunnerKey;

/* False with @errp set if there is an engine with another key. */
bool ksm_runner_check(const KsmRunnerKey *key, Error **errp);

/*
 * Takes a user of the engine with that key, made if there is none.  NULL with
 * @errp set if there can be none.  @group_fd: a connection to the group's
 * daemon that an engine to be made takes over, or -1; if there is one it is
 * closed, but for the one taken over: each object may be given its number.
 */
KsmRunner *ksm_runner_get(const KsmRunnerKey *key, int group_fd,
                          Error **errp);
void ksm_runner_put(KsmRunner *runner);

KsmEngine *ksm_runner_engine(KsmRunner *runner);

/*
 * Divides vm.max_map_count between the engine and QEMU's coroutines.  Call it
 * when devices come or go, and as merging goes on.
 */
void ksm_runner_share_vmas(KsmRunner *runner);

/* Steps the engine soon, after a change that it cannot see. */
void ksm_runner_kick(KsmRunner *runner);

#endif
