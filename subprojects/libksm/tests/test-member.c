/*
 * libksm tests: a daemon that hangs, floods, or comes and goes
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What a member lets it do, in time and in memory.  Lies: test-remote.
 */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "base/page.h"
#include "base/prim.h"
#include "peer.h"
#include "share/member.h"

#define SECOND      UINT64_C(1000000000)
#define PATIENCE    31u     /* seconds */

static uint64_t now;

static uint64_t now_as_told(void)
{
    return now;
}

static unsigned hear(KsmStore *s)
{
    StoreAnswer a[16];

    return s->ops->answers(s, a, G_N_ELEMENTS(a));
}

static void ask_one(KsmStore *s)
{
    StoreAsk q = { 1, 2, 3 };

    g_assert(s->ops->ask(s, &q, 1));
}

static Peer *begin(void)
{
    now = SECOND;
    prim.now_ns = now_as_told;
    return peer_new();
}

static void end(Peer *p, KsmStore *s)
{
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

/* Who was asked has 30 seconds; who was not has all the time there is. */
static void run_asked(void)
{
    Peer *p = begin();
    KsmStore *s = peer_store(p);

    now += 3600 * SECOND;
    g_assert(!hear(s) && !store_is_gone(s));
    ask_one(s);
    for (unsigned i = 1; i < PATIENCE; i++) {
        now += SECOND;
        g_assert(!hear(s) && !store_is_gone(s));
    }
    now += SECOND;
    g_assert(!hear(s) && store_is_gone(s));
    g_assert(store_why(s) == KSM_REASON_NO_DAEMON);
    end(p, s);
}

/* It is we who were stopped: the answer has come long ago, or comes by bits. */
static void run_stopped(void)
{
    Peer *p = begin();
    KsmStore *s = peer_store(p);
    uint32_t none = WIRE_NONE;

    for (unsigned i = 0; i < 3; i++) {
        ask_one(s);
    }
    for (unsigned i = 0; i < 3; i++) {
        peer_expect(p, WIRE_ASK);
        peer_answer(p, &none, 1);
        now += PATIENCE * SECOND;
        g_assert(!hear(s) && !store_is_gone(s));
    }
    now += PATIENCE * SECOND;
    g_assert(!hear(s) && !store_is_gone(s));
    end(p, s);
}

/* Neither HELLO nor HELD is answered by silence for ever. */
static void run_greeted(void)
{
    Peer *p = begin();
    RemoteConfig config = { .socket = "x", .fd = -1, .name = "me" };
    KsmStore *s = peer_member(&config);

    peer_expect(p, WIRE_HELLO);
    g_assert(p->connects == 1);
    for (unsigned i = 0; i < PATIENCE; i++) {
        now += SECOND;
        g_assert(!hear(s));
    }
    now += SECOND;
    hear(s);
    g_assert(p->connects == 2);
    peer_expect(p, WIRE_HELLO);
    peer_welcome(p, false);
    g_assert(!hear(s) && !store_is_gone(s));
    end(p, s);
}

static ssize_t flood(int fd, void *message, size_t len, int *fds,
                     unsigned n_fds)
{
    const WireBlock block = { { WIRE_BLOCK, 0, 0 }, 0, 4 };

    for (unsigned i = 0; i < n_fds; i++) {
        fds[i] = -1;
    }
    memcpy(message, &block, sizeof(block));
    return sizeof(block);
}

/* A call ends, whatever comes meanwhile. */
static void run_flood(void)
{
    Peer *p = begin();
    KsmStore *s = peer_store(p);

    prim.receive = flood;
    for (unsigned i = 0; i < 100; i++) {
        g_assert(!hear(s) && !store_is_gone(s));
    }
    prim.receive = prim_real.receive;
    end(p, s);
}

static int send_later(int fd, const void *message, size_t len)
{
    return -EAGAIN;
}

/* Slots that it does not take back do not fill our memory. */
static void run_swamp(void)
{
    struct {
        WireHead head;
        WireFound found[WIRE_PAIRS];
    } news = { { WIRE_NEWS, WIRE_PAIRS, 0 }, { { 0 } } };
    Peer *p = begin();
    KsmStore *s = peer_store(p);
    unsigned n = 0;

    for (unsigned i = 0; i < WIRE_PAIRS; i++) {
        news.found[i] = (WireFound) { 5, 60, 0 };
    }
    prim.send = send_later;
    while (!store_is_gone(s)) {
        g_assert(++n < 2000);
        peer_send(p, &news, sizeof(news), NULL, 0);
        while (hear(s)) {
            /* as many as there are */
        }
    }
    g_assert(n > 100 && store_stats(s).bytes < 4 << 20);
    prim.send = prim_real.send;
    end(p, s);
}

/* It did not read for a while: all is asked again, and not too often. */
static void run_missed(void)
{
    WireHead none = { .type = WIRE_NEWS };
    Peer *p = begin();
    KsmStore *s = peer_store(p);
    unsigned losses;

    hear(s);
    losses = s->ops->losses(s);
    for (unsigned i = 0; i < 3; i++) {
        peer_send(p, &none, sizeof(none), NULL, 0);
        peer_send(p, &none, sizeof(none), NULL, 0);
        hear(s);
        hear(s);
        g_assert(s->ops->losses(s) == ++losses);
        peer_send(p, &none, sizeof(none), NULL, 0);
        hear(s);
        now += 20 * SECOND;
        hear(s);
        g_assert(s->ops->losses(s) == losses);
        now += 11 * SECOND;
        hear(s);
        g_assert(s->ops->losses(s) == ++losses);
        now += 31 * SECOND;
    }
    g_assert(!store_is_gone(s));
    end(p, s);
}

/* Hangs up as soon as it has said WELCOME; connections in ten minutes. */
static unsigned flaps(bool answers)
{
    Peer *p = begin();
    RemoteConfig config = { .socket = "x", .fd = -1, .name = "me" };
    KsmStore *s = peer_member(&config);
    uint32_t none = WIRE_NONE;
    bool resumed = false;
    unsigned connects;

    for (unsigned i = 0; i < 6000; i++) {
        now += SECOND / 10;
        hear(s);
        if (p->fd >= 0 && recv(p->fd, &p->in, sizeof(p->in),
                               MSG_DONTWAIT) > 0 &&
            p->in.head.type == WIRE_HELLO) {
            peer_welcome(p, resumed);
            resumed = true;
            hear(s);
            store_flush(s);
            if (answers) {
                ask_one(s);
                while (recv(p->fd, &p->in, sizeof(p->in), MSG_DONTWAIT) > 0 &&
                       p->in.head.type != WIRE_ASK) {
                    /* HELD */
                }
                peer_answer(p, &none, 1);
                hear(s);
            }
            peer_hang_up(p);
        }
    }
    connects = p->connects;
    end(p, s);
    return connects;
}

static void run_flap(void)
{
    unsigned useless = flaps(false), useful = flaps(true);

    g_assert(useless > 10 && useless < 80);
    g_assert(useful > 1000);
}

/* Refused in the midst of things; then there is nobody any more. */
static void run_refused(void)
{
    static const WireRefused refused = {
        { WIRE_REFUSED, 0, 0 }, WIRE_REFUSED_RIGHT, "no"
    };
    Peer *p = begin();
    KsmStore *s = peer_store(p);

    peer_send(p, &refused, sizeof(refused), NULL, 0);
    g_assert(!hear(s) && store_is_gone(s));
    g_assert(store_why(s) == KSM_REASON_REFUSED_BY_DAEMON);
    p->absent = true;
    now += 60 * SECOND;
    hear(s);
    g_assert(store_why(s) == KSM_REASON_NO_DAEMON);
    end(p, s);
}

/*
 * We could not be given the descriptors (EMFILE, or a security module): the
 * next time we are the same member, not one more.
 */
static void run_no_fds(void)
{
    Peer *p = begin();
    RemoteConfig config = { .socket = "x", .fd = -1, .name = "me" };
    const WireHello *hello = (WireHello *)&p->in;
    KsmStore *s = peer_member(&config);
    unsigned connects;

    peer_expect(p, WIRE_HELLO);
    g_assert(!hello->cookie[0]);
    for (unsigned i = 0; i < 2; i++) {
        peer_welcome_none(p, i > 0);
        g_assert(!hear(s) && store_is_gone(s));
        connects = p->connects;
        for (unsigned k = 0; k < 100 && p->connects == connects; k++) {
            now += SECOND;
            hear(s);
        }
        peer_expect(p, WIRE_HELLO);
        g_assert(hello->cookie[0] == p->cookie[0]);
    }
    peer_welcome(p, true);
    hear(s);
    store_flush(s);
    peer_expect(p, WIRE_HELD);
    g_assert(!store_is_gone(s));
    end(p, s);
}

/* There is no block: slots may be had all the same. */
static void run_no_block(void)
{
    Peer *p = begin();
    KsmStore *s = peer_store(p);
    static char page[PAGE_BYTES] = { 1 };
    const uint32_t full = WIRE_FULL, tag = 7;
    StoreOffer o = { .pages = page, .tag = &tag, .id = 3, .n = 1 };
    unsigned losses = s->ops->losses(s);

    g_assert(store_repeat(s, &o) == OFFER_LATER);
    peer_expect(p, WIRE_REPEAT);
    peer_answer(p, &full, 1);
    g_assert(hear(s) == 1);
    g_assert(store_repeat(s, &o) == OFFER_FULL);
    g_assert(store_offer(s, &o) == OFFER_LATER);
    now += 15 * SECOND;
    g_assert(store_repeat(s, &o) == OFFER_LATER);
    g_assert(s->ops->losses(s) == losses);
    end(p, s);
}

/* A daemon that tells more, or less, of a group is no enemy. */
static void run_state_length(void)
{
    Peer *p = begin();
    KsmStore *s = peer_store(p);
    struct {
        WireState state;
        WireMember member;
        uint64_t more;
    } state = { .state = { .head = { WIRE_STATE, 1, 0 }, .members = 3 } };
    KsmGroupStats g;

    for (int more = -8; more <= 8; more += 8) {
        now += 61 * SECOND;
        g_assert(store_group(s, &g));
        store_flush(s);
        peer_expect(p, WIRE_STATUS);
        peer_send(p, &state, offsetof(typeof(state), more) + more, NULL, 0);
        g_assert(!hear(s) && !store_is_gone(s));
        g_assert(store_group(s, &g) && g.members == (more ? 0 : 3));
        store_flush(s);
        peer_expect_none(p);
    }
    end(p, s);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/member/asked", run_asked);
    g_test_add_func("/member/stopped", run_stopped);
    g_test_add_func("/member/greeted", run_greeted);
    g_test_add_func("/member/flood", run_flood);
    g_test_add_func("/member/swamp", run_swamp);
    g_test_add_func("/member/missed", run_missed);
    g_test_add_func("/member/no-block", run_no_block);
    g_test_add_func("/member/state-length", run_state_length);
    g_test_add_func("/member/flap", run_flap);
    g_test_add_func("/member/refused", run_refused);
    g_test_add_func("/member/no-fds", run_no_fds);
    return g_test_run();
}
