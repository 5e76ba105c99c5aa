/*
 * serve: the daemon, from its socket on
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <glib-unix.h>

#include "base/prim.h"
#include "client.h"
#include "sys.h"
#include "talk.h"
#include "work.h"

#define BACKLOG         64
#define ACCEPT_MS       100     /* until it is tried again */
/* Connections that are nobody's yet, or ask for STATUS. */
#define STRANGERS_MAX   64u

static void on_end(Conn *conn)
{
    client_close(conn_opaque(conn));
}

static void on_bad(Conn *conn, const char *why)
{
    client_refuse(conn_opaque(conn), WIRE_REFUSED_PROTOCOL, "%s", why);
}

static void on_room(Conn *conn)
{
    Client *c = conn_opaque(conn);

    if (c->member && c->member->conn == conn) {
        client_tell_missed(c->member);
    }
}

static void on_packet(Conn *conn, Packet *p)
{
    Client *c = conn_opaque(conn);
    Server *s = c->server;

    talk_packet(c, p);
    client_send_news(s);
    work_begin(s);
    work_rest(s);
}

static const ConnOps client_ops = {
    .packet = on_packet,
    .end = on_end,
    .bad = on_bad,
    .room = on_room,
};

Client *server_connect(Server *s, int fd)
{
    Client *c = g_new0(Client, 1);

    c->server = s;
    c->number = s->clients_ever++;
    c->conn = conn_new(fd, &client_ops, c);
    g_ptr_array_add(s->clients, c);
    return c;
}

/* There are more clients than members. */
static Client *oldest_stranger(const Server *s)
{
    Client *oldest = NULL;

    for (unsigned i = 0; i < s->clients->len; i++) {
        Client *c = s->clients->pdata[i];

        if (!c->member && (!oldest || c->number < oldest->number)) {
            oldest = c;
        }
    }
    return oldest;
}

static void stranger_new(Server *s, int fd)
{
    Client *c = server_connect(s, fd);

    if (s->clients->len > s->group.config.max_members + STRANGERS_MAX) {
        /* who has something to say has said it soon */
        Client *oldest = oldest_stranger(s);

        client_refuse(oldest, WIRE_REFUSED_FULL, "too many connections");
        if (oldest == c) {
            return;
        }
    }
    if (conn_identify(fd, 1) < 0) {
        client_refuse(c, WIRE_REFUSED_LACK, "the daemon's kernel cannot tell "
                      "who sends (SO_PASSPIDFD, Linux 6.5)");
    }
}

static gboolean server_accept(gint fd, GIOCondition what, gpointer data);

static gboolean listen_again(gpointer data)
{
    Server *s = data;

    s->listen_watch = g_unix_fd_add(s->listener, G_IO_IN, server_accept, s);
    return G_SOURCE_REMOVE;
}

static gboolean server_accept(gint fd, GIOCondition what, gpointer data)
{
    Server *s = data;
    int peer = sys.accept(fd);

    if (peer >= 0) {
        stranger_new(s, peer);
    } else if (peer == -EMFILE || peer == -ENFILE) {
        if (!s->warned) {
            fprintf(stderr, "ksm-poold: no descriptors are left for another "
                    "connection: allow more (LimitNOFILE=), or fewer "
                    "members\n");
            s->warned = true;
        }
        /* the connection waits, and members do not */
        s->listen_watch = g_timeout_add(ACCEPT_MS, listen_again, s);
        return G_SOURCE_REMOVE;
    }
    return G_SOURCE_CONTINUE;
}

int server_prepare(Server *s, const GroupConfig *config, const PoolFile *file,
                   int listener)
{
    int ret;

    memset(s, 0, sizeof(*s));
    s->listener = listener;
    s->file = *file;
    s->began = prim.now_ns();
    s->clients = g_ptr_array_new();
    s->leaving = g_ptr_array_new();
    s->to_tell = g_ptr_array_new();
    s->reconciling = g_ptr_array_new();
    s->blocks = g_array_new(FALSE, FALSE, sizeof(uint32_t));
    ret = group_init(&s->group, config, file->fd, file->map_fd);
    /* before anything is given up, as what a reload finds unused is */
    s->group.pool.mount = poolfile_mount(file);
    s->group.pool.keep_all = file->keeps_all;
    return ret;
}

void server_start(Server *s)
{
    s->group.tell = client_tell;
    s->group.opaque = s;
    s->uncounted = ASKED_MEMBERS;
    s->listen_watch = g_unix_fd_add(s->listener, G_IO_IN, server_accept, s);
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        Member *m = (Member *)s->group.member[i];

        if (m && m->conn) {
            client_tell_missed(m);     /* of before it was reloaded */
        }
    }
    work_begin(s);
}

int server_init(Server *s, const GroupConfig *config, const PoolFile *file,
                int listener)
{
    int ret = server_prepare(s, config, file, listener);

    if (ret == 0) {
        ret = sys.random(&s->generation, sizeof(s->generation));
        /* small enough for all that read numbers as floating point: JSON */
        s->generation >>= 16;
    }
    if (ret == 0) {
        ret = conn_identify(listener, 1);
    }
    if (ret == 0) {
        ret = sys.listen(listener, BACKLOG);
    }
    if (ret == 0) {
        server_start(s);
    }
    return ret;
}

void server_free(Server *s)
{
    while (s->clients->len) {
        client_close(s->clients->pdata[0]);
    }
    if (s->listen_watch) {
        g_source_remove(s->listen_watch);
    }
    if (s->work) {
        g_source_remove(s->work);
    }
    if (s->rest) {
        g_source_remove(s->rest);
    }
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        if (s->group.member[i]) {
            holds_free(&s->group.member[i]->holds);
            member_end((Member *)s->group.member[i]);
        }
    }
    prim.close(s->listener);
    g_ptr_array_unref(s->clients);
    g_ptr_array_unref(s->leaving);
    g_ptr_array_unref(s->to_tell);
    g_ptr_array_unref(s->reconciling);
    g_array_unref(s->blocks);
    group_free(&s->group);
}
