/*
 * client: a connection to the daemon, and who is at its other end
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
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

/* A connection that was accepted. */
Client *client_add(Server *s, int fd);
/* REFUSED; the client is freed. */
void client_refuse(Client *c, WireRefusal code, const char *format, ...)
    G_GNUC_PRINTF(3, 4);
/* The lengths of blocks in server->blocks, which is emptied. */
void client_send_blocks(Client *c);
/* The connection ends; the member does not. */
void client_close(Client *c);

/*
 * The member has listed what it holds: the rest goes in pieces, and nothing of
 * it is read meanwhile.
 */
void server_reconcile(Server *s, Member *m);
/* A piece of it for each; false: there is none. */
bool server_reconcile_step(Server *s);
/* There may be something to do that can wait. */
void server_work(Server *s);
/* Until the process of a new member exits. */
void server_watch(Server *s, Member *m);
/* Its process has exited. */
void server_leave(Server *s, Member *m);

#endif
