/*
 * state: what the daemon tells of a group
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef HOSTD_STATE_H
#define HOSTD_STATE_H

#include "client.h"

/* STATE: to a member of itself, else of all; or, @brief, of none. */
void state_send(Client *c, uint64_t seq, bool brief);
/* Counts what one member holds, after a reload; false: all were counted. */
bool state_step(Server *s);

#endif
