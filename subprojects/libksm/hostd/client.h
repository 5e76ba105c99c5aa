/*
 * client: a connection to the daemon, and who is at its other end
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What it is told, how it ends, and how a member that is back lists what it holds.
 * Leaves to others: what its packets say (talk.h).
 */
#ifndef HOSTD_CLIENT_H
#define HOSTD_CLIENT_H

#include "serve.h"

typedef struct Client {
    Server *server;
    Conn *conn;
    Member *member;         /* NULL: none yet, or it asks for STATUS only */
    bool asks_status;
    uint64_t number;        /* the older, the lower */
} Client;

/* REFUSED; the client is freed. */
void client_refuse(Client *c, WireRefusal code, const char *format, ...)
    G_GNUC_PRINTF(3, 4);
/* A block's length, before the member hears of the block. */
void client_send_block(Client *c, uint64_t seq, uint32_t first);
/* ... and of the blocks in server->blocks, which is emptied. */
void client_send_blocks(Client *c);
/* The connection ends; the member does not. */
void client_close(Client *c);

/* GroupTell, of a Server; kept until client_send_news(). */
bool client_tell(void *opaque, unsigned number, uint64_t hash, uint32_t slot);
/* Whoever was told something gets it now. */
void client_send_news(Server *s);
/* A member that did not read for a while is to ask again, if it does now. */
void client_tell_missed(Member *m);

/*
 * The member has listed what it holds: the rest goes in pieces, and nothing of
 * it is read meanwhile.
 */
void client_reconcile(Server *s, Member *m);
/* A piece of it for each; false: there is none. */
bool client_reconcile_step(Server *s);

#endif
