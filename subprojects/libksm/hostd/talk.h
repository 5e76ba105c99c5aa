/*
 * talk: each message of the protocol, checked and answered
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef HOSTD_TALK_H
#define HOSTD_TALK_H

#include "client.h"

/* The client may be freed by this. */
void talk_packet(Client *c, Packet *p);

#endif
