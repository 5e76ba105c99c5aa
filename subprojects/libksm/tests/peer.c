/*
 * libksm tests: the daemon's end of a connection, played by the test
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/page.h"
#include "base/prim.h"
#include "peer.h"

static Peer *the_peer;

static int peer_connect(const char *path)
{
    int pair[2];

    if (!the_peer || the_peer->absent) {
        return -ECONNREFUSED;
    }
    the_peer->connects++;
    g_assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    peer_hang_up(the_peer);
    the_peer->fd = pair[0];
    return pair[1];
}

static void files_new(Peer *p)
{
    char path[64];

    p->pool = memfd_create("peer-pool", MFD_CLOEXEC);
    p->ring = memfd_create("peer-ring", MFD_CLOEXEC);
    g_assert(ftruncate(p->pool, PEER_SLOTS * PAGE_BYTES) == 0);
    g_assert(ftruncate(p->ring, PEER_RING * PAGE_BYTES) == 0);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", p->pool);
    p->pool_ro = prim_real.open_read(path);
    g_assert(p->pool_ro >= 0);
    p->generation++;
    p->key = p->generation * 0x1234567;
    p->cookie[0] = p->generation;
    p->cookie[1] = ~p->generation;
}

static void files_close(Peer *p)
{
    close(p->pool);
    close(p->pool_ro);
    close(p->ring);
}

Peer *peer_new(void)
{
    Peer *p = g_new0(Peer, 1);

    p->fd = -1;
    files_new(p);
    the_peer = p;
    prim.connect = peer_connect;
    return p;
}

void peer_free(Peer *p)
{
    prim.connect = prim_real.connect;
    the_peer = NULL;
    peer_hang_up(p);
    files_close(p);
    g_free(p);
}

void peer_hang_up(Peer *p)
{
    if (p->fd >= 0) {
        close(p->fd);
        p->fd = -1;
    }
}

void peer_anew(Peer *p)
{
    peer_hang_up(p);
    files_close(p);
    files_new(p);
}

KsmStore *peer_member(const RemoteConfig *config)
{
    KsmStore *s = remote_new(config);

    g_assert(store_reserve(s, PEER_PAGES) == 0);
    store_flush(s);
    return s;
}

KsmStore *peer_store(Peer *p)
{
    RemoteConfig config = {
        .socket = "peer", .fd = -1, .name = "test", .max_sharing = 256,
    };
    KsmStore *s = peer_member(&config);
    StoreAnswer a;

    peer_expect(p, WIRE_HELLO);
    peer_welcome(p, false);
    g_assert(s->ops->answers(s, &a, 1) == 0);
    g_assert(!store_is_gone(s));
    return s;
}

size_t peer_expect(Peer *p, WireType type)
{
    ssize_t n = recv(p->fd, &p->in, sizeof(p->in), MSG_DONTWAIT);

    g_assert(n >= (ssize_t)sizeof(p->in.head));
    g_assert(p->in.head.type == type);
    return n;
}

void peer_expect_none(Peer *p)
{
    g_assert(recv(p->fd, &p->in, sizeof(p->in), MSG_DONTWAIT) < 0);
    g_assert(errno == EAGAIN);
}

void peer_send(Peer *p, const void *message, size_t len, const int *fds,
               unsigned n_fds)
{
    char control[CMSG_SPACE(8 * sizeof(int))] = { 0 };
    struct iovec iov = { (void *)message, len };
    struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };

    g_assert(n_fds <= 8);
    if (n_fds) {
        struct cmsghdr *c;

        msg.msg_control = control;
        msg.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    }
    g_assert(sendmsg(p->fd, &msg, MSG_NOSIGNAL) == (ssize_t)len);
}

static void welcome(Peer *p, bool resumed, unsigned n_fds)
{
    int fds[] = { p->pool_ro, p->ring };
    WireWelcome w = {
        .head.type = WIRE_WELCOME,
        .version = WIRE_VERSION,
        .resumed = resumed,
        .features = p->features,
        .cookie = { p->cookie[0], p->cookie[1] },
        .generation = p->generation,
        .key = p->key,
        .slots = PEER_SLOTS,
        .hold_users = PEER_HOLD_USERS,
        .ring_pages = PEER_RING,
        .asks = WIRE_ASKS,
        .offers = WIRE_OFFERS,
        .in_flight = 4,
    };

    peer_send(p, &w, sizeof(w), fds, n_fds);
}

void peer_welcome(Peer *p, bool resumed)
{
    welcome(p, resumed, 2);
}

void peer_welcome_none(Peer *p, bool resumed)
{
    welcome(p, resumed, 0);
}

void peer_answer(Peer *p, const uint32_t *slot, unsigned n)
{
    g_autofree WireSlots *answer =
        g_malloc(sizeof(WireSlots) + n * sizeof(*slot));

    answer->head = (WireHead) {
        p->in.head.type == WIRE_ASK ? WIRE_ANSWER : WIRE_TAKEN, n,
        p->in.head.seq,
    };
    memcpy(answer->slot, slot, n * sizeof(*slot));
    peer_send(p, answer, sizeof(*answer) + n * sizeof(*slot), NULL, 0);
}

void peer_news(Peer *p, uint64_t hash, uint32_t slot)
{
    struct {
        WireHead head;
        WireFound found;
    } news = { { WIRE_NEWS, 1, 0 }, { hash, slot, 0 } };

    peer_send(p, &news, sizeof(news), NULL, 0);
}

void peer_block(Peer *p, uint32_t first, uint32_t length)
{
    WireBlock block = { { WIRE_BLOCK, 0, 0 }, first, length };

    peer_send(p, &block, sizeof(block), NULL, 0);
}
