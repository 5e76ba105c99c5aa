/*
 * talk: each message of the protocol, checked and answered
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Checks what packets say, has group.h and offer.h do it, and answers; it is what
 * docs/interop/ksm-pool.rst tells.  All packets are as if from an enemy.
 */
#ifndef HOSTD_TALK_H
#define HOSTD_TALK_H

#include "client.h"

/* The client may be freed by this. */
void talk_packet(Client *c, Packet *p);

#endif
