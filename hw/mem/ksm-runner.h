/*
 * The threads in which libksm's engines run
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * An engine merges the memory of all guests (KsmGuest) that want the same of
 * it; it has no thread of its own and is stepped from an iothread.  All
 * functions are called with the BQL held.  Leaves to others: which memory
 * that is and what must not be done to it (ksm-guest.c).
 */
#ifndef HW_MEM_KSM_RUNNER_H
#define HW_MEM_KSM_RUNNER_H

#include "hw/mem/ksm.h"
#include "libksm.h"
#include "system/iothread.h"

typedef struct KsmRunner KsmRunner;

/*
 * What the engine is made for.  All backends of a process share one engine,
 * so that their memory is merged with each other's, and must agree on it.
 */
typedef struct KsmRunnerKey {
    KsmScope scope;
    KsmDirtySource dirty;
    KsmFreePolicy free_policy;
    IOThread *iothread;         /* NULL: the internal one */
} KsmRunnerKey;

/* False with @errp set if there is an engine that was made for another key. */
bool ksm_runner_check(const KsmRunnerKey *key, Error **errp);

/*
 * Takes a user of the engine with that key, which is made if there is none.
 * NULL with @errp set if there can be none.
 */
KsmRunner *ksm_runner_get(const KsmRunnerKey *key, Error **errp);
void ksm_runner_put(KsmRunner *runner);

KsmEngine *ksm_runner_engine(KsmRunner *runner);

/* Applies the tuning to the whole engine, except for "run". */
void ksm_runner_tune(KsmRunner *runner, const KsmGuestTuning *tuning);

/*
 * Divides vm.max_map_count between the engine and QEMU's coroutines, by the
 * devices there are and what is merged: to be called when that has changed.
 */
void ksm_runner_share_vmas(KsmRunner *runner);

/* Something has changed that the engine cannot see: step it soon. */
void ksm_runner_kick(KsmRunner *runner);

#endif /* HW_MEM_KSM_RUNNER_H */
