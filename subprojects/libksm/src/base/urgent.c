/*
 * urgent: a thread for which others wait is not preempted
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <glib.h>

#include "base/urgent.h"

static int class_of(const PrimSched *s)
{
    return s->policy & ~SCHED_RESET_ON_FORK;
}

/* Of those that share CPUs by weight: Linux, kernel/sched/fair.c. */
static bool is_fair(const PrimSched *s)
{
    int class = class_of(s);

    return class == SCHED_OTHER || class == SCHED_BATCH || class == SCHED_IDLE;
}

/*
 * Not where realtime is limited: the kernel counts it until the thread sleeps
 * as a realtime one, and ours would come to its end, a signal, bit by bit.
 */
static bool raise_priority(const PrimSched *was)
{
    PrimSched fifo = *was;

    fifo.policy = SCHED_FIFO | (was->policy & SCHED_RESET_ON_FORK);
    return !was->rt_limited && prim.sched_set(&fifo) == 0;
}

void urgent_begin(KsmUrgent *u)
{
    g_assert(!u->raised);
    if (!u->denied && prim.sched_get(&u->was) == 0 && is_fair(&u->was)) {
        u->raised = raise_priority(&u->was);
        u->denied = !u->raised;
    }
}

void urgent_end(KsmUrgent *u)
{
    PrimSched now;
    int ret = 0;

    if (!u->raised) {
        return;
    }
    u->raised = false;
    if (prim.sched_get(&now) < 0 || class_of(&now) == SCHED_FIFO) {
        ret = prim.sched_set(&u->was);
    }
    if (ret < 0) {
        /* Linux permits it to everybody, but a filter may be new */
        u->denied = true;
        g_warning("libksm: the merging thread keeps a realtime priority, "
                  "since it may not give it up: %s; use \"chrt -o -p 0 %ld\"",
                  g_strerror(-ret), (long)syscall(SYS_gettid));
    }
}
