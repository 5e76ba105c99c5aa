/*
 * urgent: a thread for which others wait is not preempted
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Pages are away, or writers held up, for as long as the clock says, and on a
 * busy host most of that is not ours: a thread whose slice ends meanwhile waits
 * until others have had theirs, some milliseconds.  Other slices do not help
 * where more threads want to run than there are CPUs.  So for that time the
 * thread is of the lowest realtime priority (SCHED_FIFO, 1), where that is
 * permitted: by CAP_SYS_NICE or RLIMIT_RTPRIO.  Mostly it takes less than a
 * millisecond of CPU; max-cpu bounds all of them together, as before.
 *
 * A thread that has a realtime priority, or another class that is not the fair
 * one, keeps it; and so does one whose class somebody changes meanwhile.  Where
 * it is refused, nothing is lost but time.
 */
#ifndef KSM_URGENT_H
#define KSM_URGENT_H

#include "base/crew.h"
#include "base/prim.h"

/*
 * All zeroes but for @crew: not begun.  Of one thread at a time: under the
 * engine's lock.
 */
typedef struct KsmUrgent {
    bool denied;            /* and not asked again: refusals may be logged */
    bool raised;
    KsmCrew *crew;          /* or NULL: who helps that thread at other times */
    /* where it is raised: as it was before */
    int policy;
    int slack_ns;           /* of timers; negative: not known */
} KsmUrgent;

/*
 * Not twice: urgent_end() of the same thread comes first.  In between helpers
 * pause.
 */
void urgent_begin(KsmUrgent *u);
/* The same, for who has seen to it that what helpers are at is not in the way. */
void urgent_begin_beside(KsmUrgent *u);
void urgent_end(KsmUrgent *u);

#endif
