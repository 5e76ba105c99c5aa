/*
 * serve: the daemon, from its socket on
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <glib-unix.h>

#include "base/prim.h"
#include "client.h"
#include "state.h"
#include "sys.h"
#include "talk.h"

#define BACKLOG         64
#define REST_MS         2000    /* memory that was needed lately stays */
#define ACCEPT_MS       100     /* until it is tried again */
/* Connections that are nobody's yet, or ask for STATUS. */
#define STRANGERS_MAX   64u

static void listed_forget(Server *s, Member *m)
{
    holds_free(m->listed);
    g_clear_pointer(&m->listed, g_free);
    g_ptr_array_remove_fast(s->reconciling, m);
}

void server_reconcile(Server *s, Member *m)
{
    m->reconciled = 0;
    conn_pause(m->conn);
    g_ptr_array_add(s->reconciling, m);
}

bool server_reconcile_step(Server *s)
{
    for (unsigned i = s->reconciling->len; i-- > 0; ) {
        Member *m = s->reconciling->pdata[i];

        if (!group_keep_step(&s->group, &m->held, m->listed,
                             &m->reconciled)) {
            listed_forget(s, m);
            conn_go_on(m->conn);
        }
    }
    return s->reconciling->len;
}

/* The connection ends; the member does not. */
void client_close(Client *c)
{
    Server *s = c->server;

    if (c->member) {
        Member *m = c->member;

        m->conn = NULL;
        m->missed = false;      /* it asks about all again */
        group_unheard(&s->group, &m->held);
        if (m->listed) {
            /* what it holds is as it is now, until it resumes again */
            listed_forget(s, m);
        }
    }
    g_ptr_array_remove_fast(s->clients, c);
    conn_close(c->conn);
    g_free(c);
}

void client_refuse(Client *c, WireRefusal code, const char *format, ...)
{
    WireRefused r = { .head = { .type = WIRE_REFUSED }, .code = code };
    va_list args;

    va_start(args, format);
    g_vsnprintf(r.text, sizeof(r.text), format, args);
    va_end(args);
    conn_send(c->conn, &r, sizeof(r));
    client_close(c);
}

static void client_end(Conn *conn)
{
    client_close(conn_opaque(conn));
}

static void client_bad(Conn *conn, const char *why)
{
    client_refuse(conn_opaque(conn), WIRE_REFUSED_PROTOCOL, "%s", why);
}

/* A block's length, before the member hears of the block. */
static void send_block(Client *c, uint64_t seq, uint32_t first)
{
    WireBlock b = {
        .head = { .type = WIRE_BLOCK, .seq = seq },
        .first = first,
        .length = group_length(&c->server->group, first),
    };

    conn_send(c->conn, &b, sizeof(b));
}

void client_send_blocks(Client *c)
{
    GArray *blocks = c->server->blocks;

    for (unsigned i = 0; i < blocks->len; i++) {
        send_block(c, 0, g_array_index(blocks, uint32_t, i));
    }
    g_array_set_size(blocks, 0);
}

/* A member that did not read for a while is to ask again. */
static void tell_missed(Member *m)
{
    WireHead none = { .type = WIRE_NEWS };

    if (m->missed && !conn_queued(m->conn)) {
        m->missed = false;
        conn_send(m->conn, &none, sizeof(none));
    }
}

static void send_news(Server *s, Member *m)
{
    struct {
        WireHead head;
        WireFound found[WIRE_PAIRS];
    } *news = g_malloc(sizeof(*news));
    unsigned n = m->news->len;

    if (m->conn && n) {
        Client *c = conn_opaque(m->conn);

        news->head = (WireHead) { .type = WIRE_NEWS, .count = n };
        memcpy(news->found, m->news->data, n * sizeof(WireFound));
        for (unsigned i = 0; i < n; i++) {
            uint32_t slot = news->found[i].slot;

            if (slot != WIRE_LEFT && pool_pattern(&s->group.pool, slot) &&
                holds_of(&m->held.holds, slot) == 1) {
                send_block(c, 0, slot);
            }
        }
        conn_send(m->conn, news, sizeof(WireHead) + n * sizeof(WireFound));
        tell_missed(m);
    }
    /* else its holds are dropped when it resumes, or exits */
    g_free(news);
    g_array_set_size(m->news, 0);
}

/* Somebody else has offered what the member asked for: kept for this turn. */
static bool tell_member(void *opaque, unsigned number, uint64_t hash,
                        uint32_t slot)
{
    Server *s = opaque;
    Member *m = (Member *)s->group.member[number];
    WireFound found = { .hash = hash, .slot = slot };

    if (!m || !m->conn || m->listed) {
        return false;
    }
    if (m->news->len == WIRE_PAIRS) {
        send_news(s, m);        /* an ASK can leave more than a message takes */
    }
    if (conn_queued(m->conn) >= CONN_QUEUE_MAX) {
        m->missed |= slot != WIRE_LEFT;     /* it need not ask for that */
        return false;
    }
    if (slot != WIRE_LEFT && !group_hold(&s->group, &m->held, slot)) {
        return false;
    }
    if (!m->news->len) {
        g_ptr_array_add(s->to_tell, m);
    }
    g_array_append_val(m->news, found);
    return true;
}

static void client_room(Conn *conn)
{
    Client *c = conn_opaque(conn);

    if (c->member && c->member->conn == conn) {
        tell_missed(c->member);
    }
}

static void send_all_news(Server *s)
{
    while (s->to_tell->len) {
        send_news(s, g_ptr_array_steal_index_fast(s->to_tell, 0));
    }
}

static gboolean work_step(gpointer data)
{
    Server *s = data;
    bool more = false;

    for (unsigned i = s->leaving->len; i-- > 0; ) {
        Member *m = s->leaving->pdata[i];

        more = true;
        if (!group_leave_step(&s->group, &m->held)) {
            g_ptr_array_remove_index_fast(s->leaving, i);
            member_end(m);
        }
    }
    more |= server_reconcile_step(s) | group_step(&s->group) | state_step(s);
    if (!more) {
        s->work = 0;
    }
    return more;
}

/* As important as packets: one piece for each round of those. */
void server_work(Server *s)
{
    if (!s->work) {
        s->work = g_idle_add_full(G_PRIORITY_DEFAULT, work_step, s, NULL);
    }
}

void server_leave(Server *s, Member *m)
{
    if (m->conn) {
        client_close(conn_opaque(m->conn));
    }
    g_ptr_array_add(s->leaving, m);
    server_work(s);
}

static gboolean member_exited(gint fd, GIOCondition what, gpointer data)
{
    Member *m = data;

    m->exit_watch = 0;
    server_leave(m->server, m);
    return G_SOURCE_REMOVE;
}

void server_watch(Server *s, Member *m)
{
    m->server = s;
    m->exit_watch = g_unix_fd_add(m->pidfd, G_IO_IN, member_exited, m);
}

static gboolean server_rest(gpointer data)
{
    Server *s = data;
    bool more = group_rest(&s->group);

    s->rest = more ? s->rest : 0;
    server_work(s);
    return more;
}

static void client_packet(Conn *conn, Packet *p)
{
    Client *c = conn_opaque(conn);
    Server *s = c->server;

    talk_packet(c, p);
    send_all_news(s);
    server_work(s);
    if (s->group.active && !s->rest) {
        s->rest = g_timeout_add(REST_MS, server_rest, s);
    }
}

static const ConnOps client_ops = {
    .packet = client_packet,
    .end = client_end,
    .bad = client_bad,
    .room = client_room,
};

Client *client_add(Server *s, int fd)
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

static void client_new(Server *s, int fd)
{
    Client *c = client_add(s, fd);

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
        client_new(s, peer);
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
    s->group.tell = tell_member;
    s->group.opaque = s;
    s->uncounted = ASKED_MEMBERS;
    s->listen_watch = g_unix_fd_add(s->listener, G_IO_IN, server_accept, s);
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        Member *m = (Member *)s->group.member[i];

        if (m && m->conn) {
            tell_missed(m);     /* of before it was reloaded */
        }
    }
    server_work(s);
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
