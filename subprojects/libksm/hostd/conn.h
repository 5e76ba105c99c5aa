/*
 * conn: a connection, as packets in and out
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Knows nothing of what packets say.  One packet is handed on at a time, so
 * that the event loop goes round among all connections; none while something
 * waits to be sent.  A peer that does not read costs CONN_QUEUE_MAX bytes and
 * what one of its questions is answered by.
 *
 * Descriptors that a peer sends are closed and end the connection.
 */
#ifndef HOSTD_CONN_H
#define HOSTD_CONN_H

#include <glib.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define CONN_QUEUE_MAX  (256u << 10)
#define CONN_FDS_MAX    2u      /* that go with a packet */

typedef struct Conn Conn;

typedef struct Packet {
    const void *data;       /* aligned for numbers */
    size_t len;
    /* of the sender, while conn_identify() is on */
    int pidfd;              /* -1: not told; conn.c closes it */
    uid_t uid;
    pid_t pid;
} Packet;

typedef struct ConnOps {
    void (*packet)(Conn *c, Packet *p);
    /* It ended, and not by conn_close(); what came last was not understood. */
    void (*end)(Conn *c);
    /* A packet that breaks the protocol below what it says. */
    void (*bad)(Conn *c, const char *why);
    /* Nothing waits to be sent any more. */
    void (*room)(Conn *c);
} ConnOps;

/* Takes the descriptor. */
Conn *conn_new(int fd, const ConnOps *ops, void *opaque);
void *conn_opaque(const Conn *c);
int conn_fd(const Conn *c);
/*
 * Who sends is to be told with each packet, or not.  Connections have that from
 * their listener: what is sent before they are accepted says it, too.
 */
int conn_identify(int fd, int on);

/*
 * Sends, or queues.  Descriptors stay the caller's, and open as long as the
 * connection.
 */
void conn_send(Conn *c, const void *data, size_t len);
void conn_send_fds(Conn *c, const void *data, size_t len, const int *fds,
                   unsigned n_fds);
/* Nothing is received meanwhile. */
void conn_pause(Conn *c);
void conn_go_on(Conn *c);
/* Bytes that wait to be sent. */
size_t conn_queued(const Conn *c);
/* For each packet that waits, the first one first. */
typedef void (*ConnWaiting)(void *opaque, const void *data, size_t len,
                            const int *fds, unsigned n_fds);
void conn_each_waiting(const Conn *c, ConnWaiting f, void *opaque);
unsigned conn_n_waiting(const Conn *c);
/* Tries once to send what waits, closes and frees. */
void conn_close(Conn *c);

#endif
