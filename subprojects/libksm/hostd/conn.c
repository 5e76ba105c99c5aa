/*
 * conn: a connection, as packets in and out
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>

#include "base/prim.h"
#include "conn.h"
#include "share/wire.h"
#include "sys.h"

#ifndef SO_PASSPIDFD
#define SO_PASSPIDFD    76
#endif
#ifndef SCM_PIDFD
#define SCM_PIDFD       0x04
#endif

/* One byte more than any message, so that a longer one is noticed. */
#define PACKET_MAX      (sizeof(WireHead) + WIRE_ASKS * sizeof(uint64_t))

typedef struct Waiting {
    GBytes *bytes;
    int fds[CONN_FDS_MAX];
    unsigned n_fds;
} Waiting;

struct Conn {
    GSource source;
    gpointer tag;
    int fd;
    const ConnOps *ops;
    void *opaque;
    GQueue out;             /* Waiting */
    size_t queued;          /* bytes of it */
    bool paused;
};

/* One for all: a packet is done with before the next one is received. */
static uint64_t packet_buffer[PACKET_MAX / 8 + 1];

static int send_now(Conn *c, const void *data, size_t len, const int *fds,
                    unsigned n_fds)
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(CONN_FDS_MAX * sizeof(int))];
    } control;
    struct iovec iov = { (void *)data, len };
    struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
    ssize_t ret;

    if (n_fds) {
        memset(&control, 0, sizeof(control));
        m.msg_control = control.bytes;
        m.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(&control.head), fds, n_fds * sizeof(int));
    }
    do {
        ret = sys.send(c->fd, &m);
    } while (ret == -EINTR);
    return ret < 0 ? ret : 0;
}

/*
 * False: sent, or it never will be.  A peer that is gone is noticed by reading;
 * to any other the connection ends: a message that it does not get is not to be
 * followed by others.  It resumes, and says what it has.
 */
static bool wait_for_room(Conn *c, int error)
{
    if (error == -EAGAIN || error == -ENOBUFS || error == -ENOMEM) {
        return true;
    }
    if (error < 0) {
        sys.shutdown(c->fd);
    }
    return false;
}

static void watch_for(Conn *c)
{
    g_source_modify_unix_fd(&c->source, c->tag,
                            c->out.length ? G_IO_OUT
                                          : c->paused ? 0 : G_IO_IN);
}

void conn_pause(Conn *c)
{
    c->paused = true;
    watch_for(c);
}

void conn_go_on(Conn *c)
{
    c->paused = false;
    watch_for(c);
}

void conn_send_fds(Conn *c, const void *data, size_t len, const int *fds,
                   unsigned n_fds)
{
    Waiting *w;

    g_assert(n_fds <= CONN_FDS_MAX);
    if (!c->out.length && !wait_for_room(c, send_now(c, data, len, fds,
                                                    n_fds))) {
        return;
    }
    w = g_new0(Waiting, 1);
    w->bytes = g_bytes_new(data, len);
    w->n_fds = n_fds;
    memcpy(w->fds, fds, n_fds * sizeof(int));
    g_queue_push_tail(&c->out, w);
    c->queued += len;
    watch_for(c);
}

void conn_send(Conn *c, const void *data, size_t len)
{
    static const int none[1];

    conn_send_fds(c, data, len, none, 0);
}

static void waiting_free(gpointer data)
{
    Waiting *w = data;

    g_bytes_unref(w->bytes);
    g_free(w);
}

static void flush(Conn *c)
{
    while (c->out.length) {
        Waiting *w = g_queue_peek_head(&c->out);
        size_t len;
        const void *data = g_bytes_get_data(w->bytes, &len);

        if (wait_for_room(c, send_now(c, data, len, w->fds, w->n_fds))) {
            return;
        }
        c->queued -= len;
        waiting_free(g_queue_pop_head(&c->out));
    }
    watch_for(c);
    c->ops->room(c);
}

size_t conn_queued(const Conn *c)
{
    return c->queued;
}

void conn_each_waiting(const Conn *c, ConnWaiting f, void *opaque)
{
    for (GList *l = c->out.head; l; l = l->next) {
        Waiting *w = l->data;
        size_t len;
        const void *data = g_bytes_get_data(w->bytes, &len);

        f(opaque, data, len, w->fds, w->n_fds);
    }
}

unsigned conn_n_waiting(const Conn *c)
{
    return c->out.length;
}

/* False: it carried what it must not. */
static bool control_read(struct msghdr *m, Packet *p)
{
    bool good = !(m->msg_flags & MSG_CTRUNC);

    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
        const int *fds = (const int *)CMSG_DATA(c);

        if (c->cmsg_level != SOL_SOCKET) {
            good = false;
        } else if (c->cmsg_type == SCM_PIDFD) {
            p->pidfd = fds[0];
        } else if (c->cmsg_type == SCM_CREDENTIALS) {
            const struct ucred *cred = (const struct ucred *)CMSG_DATA(c);

            p->uid = cred->uid;
            p->pid = cred->pid;
        } else if (c->cmsg_type == SCM_RIGHTS) {
            for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= c->cmsg_len;
                 i++) {
                prim.close(fds[i]);
            }
            good = false;
        }
    }
    return good;
}

static void receive(Conn *c)
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(12) +
                   CMSG_SPACE(8 * sizeof(int))];
    } control;
    struct iovec iov = { packet_buffer, sizeof(packet_buffer) };
    struct msghdr m = {
        .msg_iov = &iov,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof(control.bytes),
    };
    Packet p = { .pidfd = -1, .uid = (uid_t)-1, .data = packet_buffer };
    ssize_t got = sys.receive(c->fd, &m);

    if (got == -EAGAIN || got == -EINTR || got == -ENOMEM ||
        got == -ENOBUFS) {
        return;
    }
    if (got <= 0) {
        c->ops->end(c);
        return;
    }
    p.len = got;
    if (!control_read(&m, &p)) {
        c->ops->bad(c, "a descriptor that was not expected");
    } else if (m.msg_flags & MSG_TRUNC) {
        c->ops->bad(c, "the message is too long");
    } else {
        c->ops->packet(c, &p);
    }
    if (p.pidfd >= 0) {
        prim.close(p.pidfd);
    }
}

static gboolean conn_dispatch(GSource *source, GSourceFunc func, gpointer data)
{
    Conn *c = (Conn *)source;
    GIOCondition what = g_source_query_unix_fd(source, c->tag);

    g_source_ref(source);
    if (c->out.length) {
        flush(c);
        if (c->out.length && what & (G_IO_HUP | G_IO_ERR)) {
            c->ops->end(c);
        }
    } else if (what && !c->paused) {
        receive(c);
    }
    g_source_unref(source);
    return G_SOURCE_CONTINUE;
}

static gboolean conn_check(GSource *source)
{
    return g_source_query_unix_fd(source, ((Conn *)source)->tag) != 0;
}

static void conn_finalize(GSource *source)
{
    Conn *c = (Conn *)source;

    g_queue_clear_full(&c->out, waiting_free);
}

static GSourceFuncs conn_funcs = {
    .check = conn_check,
    .dispatch = conn_dispatch,
    .finalize = conn_finalize,
};

Conn *conn_new(int fd, const ConnOps *ops, void *opaque)
{
    Conn *c = (Conn *)g_source_new(&conn_funcs, sizeof(*c));

    c->fd = fd;
    c->ops = ops;
    c->opaque = opaque;
    g_queue_init(&c->out);
    c->tag = g_source_add_unix_fd(&c->source, fd, G_IO_IN);
    /* nor does it: but GLib would wake the loop twice for each message */
    g_source_set_can_recurse(&c->source, TRUE);
    g_source_attach(&c->source, NULL);
    return c;
}

void *conn_opaque(const Conn *c)
{
    return c->opaque;
}

int conn_fd(const Conn *c)
{
    return c->fd;
}

int conn_identify(int fd, int on)
{
    int ret = sys.socket_option(fd, SO_PASSCRED, on);

    return ret < 0 ? ret : sys.socket_option(fd, SO_PASSPIDFD, on);
}

void conn_close(Conn *c)
{
    if (c->out.length) {
        flush(c);
    }
    g_source_destroy(&c->source);
    prim.close(c->fd);
    g_source_unref(&c->source);
}
