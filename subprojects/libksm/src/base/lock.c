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

/* With the mutex held. */
static void await(KsmLock *l, uint64_t ticket)
{
    while (l->serving != ticket) {
        pthread_cond_wait(&l->turn[ticket % LOCK_TURNS], &l->mutex);
    }
}

static void serve_next(KsmLock *l)
{
    l->serving++;
    pthread_cond_broadcast(&l->turn[l->serving % LOCK_TURNS]);
}

void lock_take(KsmLock *l)
{
    pthread_mutex_lock(&l->mutex);
    await(l, l->next++);
    pthread_mutex_unlock(&l->mutex);
}

void lock_release(KsmLock *l)
{
    pthread_mutex_lock(&l->mutex);
    serve_next(l);
    pthread_mutex_unlock(&l->mutex);
}

void lock_pass(KsmLock *l)
{
    uint64_t ticket;

    pthread_mutex_lock(&l->mutex);
    ticket = l->next++;
    serve_next(l);
    await(l, ticket);
    pthread_mutex_unlock(&l->mutex);
}
