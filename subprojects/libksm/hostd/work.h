/*
 * work: what can wait, and members whose process has exited
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A piece of it for each round of packets, so that nobody waits for all of it:
 * members leave, what was listed is compared with what is held, tables grow, what
 * nobody holds is punched.  What was needed only to answer goes soon after that.
 */
#ifndef HOSTD_WORK_H
#define HOSTD_WORK_H

#include "serve.h"

/* There may be something to do. */
void work_begin(Server *s);
/* A while after the group was active. */
void work_rest(Server *s);

/* Until the process of a new member exits. */
void work_watch(Server *s, Member *m);
/* Its process has exited. */
void work_leave(Server *s, Member *m);

#endif
