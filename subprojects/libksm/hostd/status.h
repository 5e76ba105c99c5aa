/*
 * status: ksm-poold --status, which asks a running daemon
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef HOSTD_STATUS_H
#define HOSTD_STATUS_H

#include <stddef.h>

#include "options.h"

/* Asks and prints; an exit code. */
int status_run(const Options *o);
/* The packet as text or JSON; NULL: it is no STATE.  g_free() it. */
char *status_text(const void *packet, size_t len);
char *status_json(const void *packet, size_t len);

#endif
