/*
 * crew: threads that help the one that steps
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/crew.h"
#include "base/prim.h"

/* Takes it out of what is given; with the mutex held. */
static void chore_take(KsmCrew *c, KsmChore *chore)
{
    KsmChore **at = &c->first;

    while (*at != chore) {
        at = &(*at)->next;
    }
    *at = chore->next;
    if (c->last == &chore->next) {
        c->last = at;
    }
}

/*
 * Called and left with the mutex held.  @cpu: of this thread, when it ended the
 * chore before: sleeping and waking are paid for, too.
 */
static void chore_help(KsmCrew *c, KsmChore *chore, uint64_t *cpu)
{
    uint64_t now;

    chore_take(c, chore);
    chore->state = CHORE_BEGUN;
    c->busy++;
    pthread_mutex_unlock(&c->mutex);
    chore->work(chore->opaque);
    now = prim.cpu_ns();
    pthread_mutex_lock(&c->mutex);
    chore->cpu_ns = now - *cpu;
    c->cpu_ns += chore->cpu_ns;
    *cpu = now;
    c->busy--;
    chore->state = CHORE_DONE;
    pthread_cond_signal(&c->done);
}

static void *helper_main(void *opaque)
{
    uint64_t cpu = prim.cpu_ns();
    KsmCrew *c = opaque;

    pthread_mutex_lock(&c->mutex);
    while (c->first || !c->ends) {
        if (c->first && !c->pauses) {
            chore_help(c, c->first, &cpu);
        } else {
            c->idle++;
            pthread_cond_wait(&c->given, &c->mutex);
            c->idle--;
        }
    }
    pthread_mutex_unlock(&c->mutex);
    return NULL;
}

static void crew_begin(KsmCrew *c)
{
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->given, NULL);
    pthread_cond_init(&c->done, NULL);
    c->idle = c->busy = 0;
    c->pauses = false;
    c->first = NULL;
    c->last = &c->first;
    c->ends = false;
}

static void crew_disband(KsmCrew *c)
{
    pthread_mutex_lock(&c->mutex);
    c->ends = true;
    c->pauses = false;
    pthread_cond_broadcast(&c->given);
    pthread_mutex_unlock(&c->mutex);
    while (c->n) {
        pthread_join(c->thread[--c->n], NULL);
    }
    pthread_cond_destroy(&c->given);
    pthread_cond_destroy(&c->done);
    pthread_mutex_destroy(&c->mutex);
}

int crew_set(KsmCrew *c, unsigned helpers)
{
    if (helpers == c->n) {
        return 0;
    }
    crew_end(c);
    if (!helpers) {
        return 0;
    }
    crew_begin(c);
    while (c->n < helpers) {
        int ret = prim.thread(&c->thread[c->n], helper_main, c);

        if (ret < 0) {
            crew_disband(c);
            return ret;
        }
        c->n++;
    }
    return 0;
}

void crew_end(KsmCrew *c)
{
    if (c->n) {
        crew_disband(c);
    }
}

void crew_forked(KsmCrew *c)
{
    c->n = 0;
}

void crew_give(KsmCrew *c, KsmChore *chore)
{
    chore->cpu_ns = 0;
    if (!crew_helps(c)) {
        chore->work(chore->opaque);
        return;
    }
    pthread_mutex_lock(&c->mutex);
    chore->state = CHORE_GIVEN;
    chore->next = NULL;
    *c->last = chore;
    c->last = &chore->next;
    if (c->idle) {
        pthread_cond_signal(&c->given);
    }
    pthread_mutex_unlock(&c->mutex);
}

void crew_wait(KsmCrew *c, KsmChore *chore)
{
    bool mine;

    if (!crew_helps(c)) {
        return;
    }
    pthread_mutex_lock(&c->mutex);
    mine = chore->state == CHORE_GIVEN;
    if (mine) {
        chore_take(c, chore);
        chore->state = CHORE_DONE;
    }
    while (chore->state != CHORE_DONE) {
        pthread_cond_wait(&c->done, &c->mutex);
    }
    pthread_mutex_unlock(&c->mutex);
    if (mine) {
        chore->work(chore->opaque);
    }
}

void crew_pause(KsmCrew *c)
{
    if (!crew_helps(c)) {
        return;
    }
    pthread_mutex_lock(&c->mutex);
    c->pauses = true;
    while (c->busy) {
        pthread_cond_wait(&c->done, &c->mutex);
    }
    pthread_mutex_unlock(&c->mutex);
}

void crew_go_on(KsmCrew *c)
{
    if (!crew_helps(c)) {
        return;
    }
    pthread_mutex_lock(&c->mutex);
    c->pauses = false;
    if (c->first) {
        pthread_cond_broadcast(&c->given);
    }
    pthread_mutex_unlock(&c->mutex);
}

uint64_t crew_cpu_ns(KsmCrew *c)
{
    uint64_t cpu;

    if (!crew_helps(c)) {
        return c ? c->cpu_ns : 0;
    }
    pthread_mutex_lock(&c->mutex);
    cpu = c->cpu_ns;
    pthread_mutex_unlock(&c->mutex);
    return cpu;
}
