/*
 * crew: threads that help the one that steps
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The engine's decisions are one thread's.  Chores that decide nothing it may
 * give to helpers: it goes on, and waits where it needs what comes of them.  A
 * chore that nobody has begun by then the waiting thread does itself, so a host
 * without a free CPU costs little; and without helpers a chore is done where it
 * is given.
 *
 * A helper may lose its CPU in the middle, and hold a lock of the kernel's then.
 * So helpers pause while guests wait, for pages that are isolated or as writers
 * (urgent.h), but for what is known not to be in the way.  Before, the thread that
 * steps waits until they have done what they are at: chores should be short.
 */
#ifndef KSM_CREW_H
#define KSM_CREW_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define CREW_MAX    15u     /* helpers */

typedef enum ChoreState {
    CHORE_DONE,
    CHORE_GIVEN,
    CHORE_BEGUN,
} ChoreState;

/* Its memory is the giver's, until crew_wait() of it has returned. */
typedef struct KsmChore {
    void (*work)(void *opaque);     /* may use what nobody else does then */
    void *opaque;
    uint64_t cpu_ns;        /* out: that a helper used for it; 0: none did */
    ChoreState state;
    struct KsmChore *next;
} KsmChore;

/*
 * All zeroes: no helpers, as NULL where chores are given.  Of one thread at a
 * time, but for the helpers themselves.
 */
typedef struct KsmCrew {
    unsigned n;             /* helpers */
    pthread_t thread[CREW_MAX];
    pthread_mutex_t mutex;  /* of what follows */
    pthread_cond_t given, done;
    unsigned idle;          /* helpers that wait for something to do */
    unsigned busy;          /* ... that are at something */
    KsmChore *first, **last;
    bool pauses;            /* nothing is begun now */
    bool ends;
    uint64_t cpu_ns;        /* that helpers used for chores, ever */
} KsmCrew;

static inline bool crew_helps(const KsmCrew *c)
{
    return c && c->n;
}

/*
 * From now on there are as many @helpers, of the calling thread's priority and
 * CPUs.  0, or -errno: there are none.
 */
int crew_set(KsmCrew *c, unsigned helpers);

/* All that was given is done, and there are no helpers. */
void crew_end(KsmCrew *c);

/* In a forked child, where there are none, nor what they were at. */
void crew_forked(KsmCrew *c);

/* @work and @opaque are set.  Each chore once, until it was waited for. */
void crew_give(KsmCrew *c, KsmChore *chore);

/* Returns when it is done; at once for one that is all zeroes. */
void crew_wait(KsmCrew *c, KsmChore *chore);

/*
 * Returns when helpers are at nothing; they begin nothing until crew_go_on().  Not
 * counted: one of those ends any number of these.
 */
void crew_pause(KsmCrew *c);
void crew_go_on(KsmCrew *c);

/* ns of CPU that helpers used for what they have done. */
uint64_t crew_cpu_ns(KsmCrew *c);

#endif
