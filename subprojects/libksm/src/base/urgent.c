/*
 * urgent: a thread for which others wait is not preempted
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <sched.h>
#include <stdint.h>

#include <glib.h>

#include "base/urgent.h"

static int class_of(int policy)
{
    return policy & ~SCHED_RESET_ON_FORK;
}

/* Of those that share CPUs by weight: Linux, kernel/sched/fair.c. */
static bool is_fair(int policy)
{
    int class = class_of(policy);

    return policy >= 0 && (class == SCHED_OTHER || class == SCHED_BATCH ||
                           class == SCHED_IDLE);
}

/*
 * Not where realtime is limited: the kernel counts it until the thread sleeps
 * as a realtime one, and ours would come to its end, a signal, bit by bit.
 */
static bool may_be_raised(void)
{
    return prim.realtime_limit() == SIZE_MAX;
}

void urgent_begin(KsmUrgent *u)
{
    crew_pause(u->crew);
    urgent_begin_beside(u);
}

void urgent_begin_beside(KsmUrgent *u)
{
    g_assert(!u->raised);
    if (u->denied) {
        return;
    }
    u->policy = prim.sched_get();
    if (!is_fair(u->policy)) {
        return;
    }
    u->slack_ns = prim.slack_get();
    u->raised = may_be_raised() &&
                prim.sched_set(SCHED_FIFO |
                               (u->policy & SCHED_RESET_ON_FORK)) == 0;
    u->denied = !u->raised;
}

/* To what it was, unless somebody has changed it meanwhile; 0 or -errno. */
static int lower(const KsmUrgent *u)
{
    int now = prim.sched_get();
    int ret = now >= 0 && class_of(now) != SCHED_FIFO
              ? 0 : prim.sched_set(u->policy);

    if (ret == 0 && u->slack_ns > 0) {
        /* the kernel has set the default, as of Linux 6.12 */
        prim.slack_set(u->slack_ns);
    }
    return ret;
}

void urgent_end(KsmUrgent *u)
{
    int ret = u->raised ? lower(u) : 0;

    crew_go_on(u->crew);
    u->raised = false;
    if (ret < 0) {
        /* Linux permits it to everybody, but a filter may be new */
        u->denied = true;
        g_warning("libksm: the merging thread keeps a realtime priority, "
                  "since it may not give it up: %s; use \"chrt -o -p 0 %d\"",
                  g_strerror(-ret), prim.thread_id());
    }
}
