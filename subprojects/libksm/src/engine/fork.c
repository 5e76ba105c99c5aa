/*
 * fork: the engines of this process
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <sys/mman.h>

#include "engine/fork.h"

static pthread_mutex_t engines_lock = PTHREAD_MUTEX_INITIALIZER;
/* Taken before engines_lock, and that before an engine's. */
static pthread_mutex_t adding_lock = PTHREAD_MUTEX_INITIALIZER;
static GPtrArray *engines;

/* Are all regions kept out of children (MADV_DONTFORK)? */
static bool engine_stays_home(const KsmEngine *e)
{
    if (e->n_leaving) {
        return false;
    }
    for (guint i = 0; i < e->regions->len; i++) {
        if (!region_stays_home(g_ptr_array_index(e->regions, i))) {
            return false;
        }
    }
    return true;
}

static void fork_prepare(void)
{
    pthread_mutex_lock(&adding_lock);
    pthread_mutex_lock(&engines_lock);
    for (guint i = 0; engines && i < engines->len; i++) {
        KsmEngine *e = g_ptr_array_index(engines, i);

        lock_take(&e->lock);
        if (!e->dead && !engine_stays_home(e)) {
            store_fork(e->content.store, FORK_BEFORE);
        }
    }
}

static void fork_done(void)
{
    for (guint i = 0; engines && i < engines->len; i++) {
        KsmEngine *e = g_ptr_array_index(engines, i);

        store_fork(e->content.store, FORK_PARENT);
        lock_release(&e->lock);
    }
    pthread_mutex_unlock(&engines_lock);
    pthread_mutex_unlock(&adding_lock);
}

static void fork_child(void)
{
    for (guint i = 0; engines && i < engines->len; i++) {
        KsmEngine *e = g_ptr_array_index(engines, i);

        /* the lock's waiters do not exist here */
        e->dead = true;
        crew_forked(&e->crew);
        store_fork(e->content.store, FORK_CHILD);
        lock_init(&e->lock);
    }
    pthread_mutex_unlock(&engines_lock);
    pthread_mutex_unlock(&adding_lock);
}

void engines_add(KsmEngine *e)
{
    static bool watching;

    pthread_mutex_lock(&engines_lock);
    if (!engines) {
        engines = g_ptr_array_new();
    }
    if (!watching) {
        watching = true;
        pthread_atfork(fork_prepare, fork_done, fork_child);
    }
    g_ptr_array_add(engines, e);
    pthread_mutex_unlock(&engines_lock);
}

void engines_drop(KsmEngine *e)
{
    pthread_mutex_lock(&engines_lock);
    if (engines) {
        g_ptr_array_remove(engines, e);
        if (engines->len == 0) {
            g_clear_pointer(&engines, g_ptr_array_unref);
        }
    }
    pthread_mutex_unlock(&engines_lock);
}

void engines_adding(void)
{
    pthread_mutex_lock(&adding_lock);
}

void engines_added(void)
{
    pthread_mutex_unlock(&adding_lock);
}

void ksm_settle(void)
{
    pthread_mutex_lock(&engines_lock);
    for (guint i = 0; engines && i < engines->len; i++) {
        KsmEngine *e = g_ptr_array_index(engines, i);

        lock_take(&e->lock);
        e->restore.settles++;   /* what gave the lock up goes no further */
        lock_release(&e->lock);
    }
    pthread_mutex_unlock(&engines_lock);
}

bool engine_has(const KsmEngine *e, const char *addr, size_t len)
{
    for (guint i = 0; i < e->regions->len; i++) {
        const KsmRegion *r = g_ptr_array_index(e->regions, i);

        if (addr < r->addr + r->len && r->addr < addr + len) {
            return true;
        }
    }
    return false;
}

bool engines_have(const char *addr, size_t len)
{
    bool found = false;

    pthread_mutex_lock(&engines_lock);
    for (guint i = 0; i < engines->len && !found; i++) {
        KsmEngine *e = g_ptr_array_index(engines, i);

        lock_take(&e->lock);
        found = engine_has(e, addr, len);
        lock_release(&e->lock);
    }
    pthread_mutex_unlock(&engines_lock);
    return found;
}
