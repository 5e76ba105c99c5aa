/*
 * lock: a mutex that is taken in order
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A ticket lock: the thread in ksm_step() takes it again and again, and others
 * must get their turn in between.  Of pthread parts, which
 * ThreadSanitizer knows.
 */
#ifndef KSM_LOCK_H
#define KSM_LOCK_H

#include <pthread.h>
#include <stdint.h>

#define LOCK_TURNS 16   /* so that one release does not wake all who wait */

typedef struct KsmLock {
    pthread_mutex_t mutex;
    pthread_cond_t turn[LOCK_TURNS];    /* by ticket */
    uint64_t next;
    uint64_t serving;
} KsmLock;

void lock_init(KsmLock *l);
void lock_destroy(KsmLock *l);
void lock_take(KsmLock *l);
void lock_release(KsmLock *l);

/*
 * Called and left with it taken: who waits has it before, who asks for it later
 * comes after.
 */
void lock_pass(KsmLock *l);

#endif
