/*
 * lock: a mutex that is taken in order
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/lock.h"

void lock_init(KsmLock *l)
{
    pthread_mutex_init(&l->mutex, NULL);
    for (unsigned i = 0; i < LOCK_TURNS; i++) {
        pthread_cond_init(&l->turn[i], NULL);
    }
    l->next = l->serving = 0;
}

void lock_destroy(KsmLock *l)
{
    pthread_mutex_destroy(&l->mutex);
    for (unsigned i = 0; i < LOCK_TURNS; i++) {
        pthread_cond_destroy(&l->turn[i]);
    }
}

void lock_take(KsmLock *l)
{
    uint64_t ticket;

    pthread_mutex_lock(&l->mutex);
    ticket = l->next++;
    while (l->serving != ticket) {
        pthread_cond_wait(&l->turn[ticket % LOCK_TURNS], &l->mutex);
    }
    pthread_mutex_unlock(&l->mutex);
}

void lock_release(KsmLock *l)
{
    pthread_mutex_lock(&l->mutex);
    l->serving++;
    pthread_cond_broadcast(&l->turn[l->serving % LOCK_TURNS]);
    pthread_mutex_unlock(&l->mutex);
}
