/*
 * reload: the daemon goes on as another program
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The process stays, and with it all descriptors: it writes down what they
 * are and what its tables say (image.h), and executes its successor, which
 * reads that.  Members notice nothing: what they send meanwhile waits in their
 * connections.
 *
 * The successor believes nothing that does not fit: unless each slot has as
 * many users as members have holds of it, it gives up, before it has punched
 * or sent anything; members run on then, and join the next daemon.
 */
#ifndef HOSTD_RELOAD_H
#define HOSTD_RELOAD_H

#include <stdbool.h>

#include "serve.h"

/* Remembers the program's path: at the beginning, before it is replaced. */
void reload_prepare(char **argv);
/* Returns only if it failed: then all is as before.  -errno. */
int reload_exec(Server *s);
/* Is this a successor? */
bool reload_is(void);
/* What server_init() is for another; 0, or -errno: it cannot go on. */
int reload_resume(Server *s, const GroupConfig *config);

#endif
