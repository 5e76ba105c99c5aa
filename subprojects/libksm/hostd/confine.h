/*
 * confine: the daemon gives up what it needs no more
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * It reads what enemies send.  After the pool is made it needs no capability,
 * no new process, no mount and no network.  Calls that are not on the list fail
 * with EPERM; the list has what the successor needs to start, too (reload.h).
 */
#ifndef HOSTD_CONFINE_H
#define HOSTD_CONFINE_H

typedef enum Confine {
    CONFINE_FIRST,
    CONFINE_AGAIN,          /* a successor: the filter of calls is there */
} Confine;

/* First of all: nobody else of the daemon's user looks at its files. */
void confine_hide(void);
/* Prints what could not be given up, and goes on. */
void confine(Confine how);

#endif
