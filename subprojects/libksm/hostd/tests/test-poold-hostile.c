/*
 * ksm-poold: members that mean harm
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What breaks the protocol ends that connection and nothing else: each case has
 * a bystander whose slots, answers and time must not suffer.  What a member can
 * do to the pool's descriptor must fail, for root too.
 */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "wire-member.h"

#define A_WHILE_MS 300
#define N_SILENT 2000
#define N_HASTY 300
#define N_GONE 100
#define DELAY_MAX_MS 500        /* a bystander's: machines are busy */
#define DELAY_USUAL_MS 20       /* half of its questions at least */
#define GROWTH_MAX_KIB (64 * 1024ul)

#define NOT_HELD 12345678u      /* a slot that nobody has */

/* A group with somebody who must not notice. */
typedef struct Scene {
    Poold *d;
    Peer *by;
    uint32_t slot, first;
    unsigned length, fds;
} Scene;

static void scene_begin(Scene *s)
{
    /* this process is many of them, more than of so few it might be */
    static const PooldConfig config = { .members = 1000 };

    s->d = poold_new(&config);
    s->by = peer_new(s->d, NULL);
    s->slot = peer_offer_one(s->by, 1);
    s->first = peer_repeat(s->by, 2, 8, &s->length);
    s->fds = poold_fds(s->d);
}

static void scene_check(const Scene *s)
{
    g_assert(peer_ask_one(s->by, peer_hash_of(s->by, 1)) == s->slot);
    peer_drop(s->by, s->slot, 1);
    peer_sync(s->by);
    g_assert(peer_slot_has(s->by, s->slot, 1));
    for (unsigned i = 0; i < s->length; i++) {
        g_assert(peer_slot_has(s->by, s->first + i, 2));
    }
}

static void scene_end(Scene *s)
{
    scene_check(s);
    peer_drop(s->by, s->slot, 1);
    peer_drop(s->by, s->first, 1);
    g_assert(peer_slot_punched(s->by, s->slot));
    g_assert(peer_slot_punched(s->by, s->first));
    peer_free(s->by);
    poold_free(s->d);
}

/* Descriptors come and go with their members; those of the dead go, too. */
static void scene_fds_return(const Scene *s)
{
    for (unsigned i = 0; i < 1000 && poold_fds(s->d) > s->fds; i++) {
        g_usleep(10000);
    }
    g_assert(poold_fds(s->d) <= s->fds);
}

typedef struct Wrong {
    const char *name;
    WireType type;
    uint32_t count;
    size_t len;             /* after the head */
    uint32_t word[8];       /* what follows the head, as far as it goes */
    WireRefusal code;
} Wrong;

static const Wrong wrongs[] = {
    { "type 0", 0, 0, 0, {}, WIRE_REFUSED_PROTOCOL },
    { "type 17", 17, 0, 0, {}, WIRE_REFUSED_PROTOCOL },
    { "type 2^32-1", UINT32_MAX, 0, 0, {}, WIRE_REFUSED_PROTOCOL },
    { "WELCOME", WIRE_WELCOME, 0, 72, {}, WIRE_REFUSED_PROTOCOL },
    { "REFUSED", WIRE_REFUSED, 0, 128, {}, WIRE_REFUSED_PROTOCOL },
    { "ANSWER", WIRE_ANSWER, 1, 4, {}, WIRE_REFUSED_PROTOCOL },
    { "TAKEN", WIRE_TAKEN, 1, 4, {}, WIRE_REFUSED_PROTOCOL },
    { "BLOCK", WIRE_BLOCK, 0, 8, { 0, 1 }, WIRE_REFUSED_PROTOCOL },
    { "NEWS", WIRE_NEWS, 1, 16, {}, WIRE_REFUSED_PROTOCOL },
    { "STATE", WIRE_STATE, 0, 160, {}, WIRE_REFUSED_PROTOCOL },
    { "two HELLOs", WIRE_HELLO, 0, 104, { WIRE_MAGIC, WIRE_VERSION },
      WIRE_REFUSED_PROTOCOL },
    { "HELD, nothing resumed", WIRE_HELD, 0, 0, {}, WIRE_REFUSED_PROTOCOL },
    { "ASK count 0", WIRE_ASK, 0, 0, {}, WIRE_REFUSED_PROTOCOL },
    { "ASK count 2^32-1", WIRE_ASK, UINT32_MAX, 8, {}, WIRE_REFUSED_PROTOCOL },
    /* times 8 that is 0, or 8, in 32 bits */
    { "ASK count 2^29", WIRE_ASK, 1u << 29, 0, {}, WIRE_REFUSED_PROTOCOL },
    { "ASK count 2^29+1", WIRE_ASK, (1u << 29) + 1, 8, {},
      WIRE_REFUSED_PROTOCOL },
    { "ASK too short", WIRE_ASK, 2, 8, {}, WIRE_REFUSED_PROTOCOL },
    { "ASK too long", WIRE_ASK, 1, 16, {}, WIRE_REFUSED_PROTOCOL },
    { "ASK not whole", WIRE_ASK, 1, 7, {}, WIRE_REFUSED_PROTOCOL },
    { "ASK 8193", WIRE_ASK, 8193, 8193 * 8, {}, WIRE_REFUSED_PROTOCOL },
    { "OFFER count 0", WIRE_OFFER, 0, 16, {}, WIRE_REFUSED_PROTOCOL },
    { "OFFER count 2^32-1", WIRE_OFFER, UINT32_MAX, 16, {},
      WIRE_REFUSED_PROTOCOL },
    { "OFFER count 513", WIRE_OFFER, 513, 16, {}, WIRE_REFUSED_PROTOCOL },
    { "OFFER wraps", WIRE_OFFER, 2, 16, { UINT32_MAX },
      WIRE_REFUSED_PROTOCOL },
    { "OFFER outside", WIRE_OFFER, 1, 16, { 1u << 30 },
      WIRE_REFUSED_PROTOCOL },
    { "OFFER outside in bytes", WIRE_OFFER, 1, 16, { 1u << 20 },
      WIRE_REFUSED_PROTOCOL },
    { "OFFER too short", WIRE_OFFER, 1, 12, {}, WIRE_REFUSED_PROTOCOL },
    { "OFFER too long", WIRE_OFFER, 1, 20, {}, WIRE_REFUSED_PROTOCOL },
    { "REPEAT count 2", WIRE_REPEAT, 2, 16, { 0, 0, UINT32_MAX, 8 },
      WIRE_REFUSED_PROTOCOL },
    { "REPEAT count 0", WIRE_REPEAT, 0, 16, { 0, 0, UINT32_MAX, 8 },
      WIRE_REFUSED_PROTOCOL },
    { "REPEAT want 0", WIRE_REPEAT, 1, 16, { 0, 0, UINT32_MAX, 0 },
      WIRE_REFUSED_PROTOCOL },
    { "REPEAT want 513", WIRE_REPEAT, 1, 16, { 0, 0, UINT32_MAX, 513 },
      WIRE_REFUSED_PROTOCOL },
    { "REPEAT want 2^32-1", WIRE_REPEAT, 1, 16,
      { 0, 0, UINT32_MAX, UINT32_MAX }, WIRE_REFUSED_PROTOCOL },
    { "REPEAT outside", WIRE_REPEAT, 1, 16, { UINT32_MAX, 0, UINT32_MAX, 1 },
      WIRE_REFUSED_PROTOCOL },
    { "GROW of what is not held", WIRE_GROW, 0, 8, { 512, 8 },
      WIRE_REFUSED_PROTOCOL },
    { "GROW outside", WIRE_GROW, 0, 8, { 0xfffffe00, 8 },
      WIRE_REFUSED_PROTOCOL },
    { "GROW count", WIRE_GROW, 1, 8, { 512, 8 }, WIRE_REFUSED_PROTOCOL },
    { "GROW too short", WIRE_GROW, 0, 4, {}, WIRE_REFUSED_PROTOCOL },
    { "DROP count 0", WIRE_DROP, 0, 0, {}, WIRE_REFUSED_PROTOCOL },
    { "DROP count 2^32-1", WIRE_DROP, UINT32_MAX, 8, { 1, 1 },
      WIRE_REFUSED_PROTOCOL },
    { "DROP 4097", WIRE_DROP, 4097, 4097 * 8, {}, WIRE_REFUSED_PROTOCOL },
    { "DROP too short", WIRE_DROP, 2, 8, { 1, 1 }, WIRE_REFUSED_PROTOCOL },
    { "DROP of what is not held", WIRE_DROP, 1, 8, { 1, 1 },
      WIRE_REFUSED_PROTOCOL },
    { "DROP outside", WIRE_DROP, 1, 8, { NOT_HELD, 1 },
      WIRE_REFUSED_PROTOCOL },
    { "DROP far outside", WIRE_DROP, 1, 8, { UINT32_MAX, 1 },
      WIRE_REFUSED_PROTOCOL },
    { "STATUS with count", WIRE_STATUS, 2, 0, {}, WIRE_REFUSED_PROTOCOL },
    { "TAIL with count", WIRE_TAIL, 1, 24, {}, WIRE_REFUSED_PROTOCOL },
    { "TAIL too short", WIRE_TAIL, 0, 16, {}, WIRE_REFUSED_PROTOCOL },
    { "TAIL too much", WIRE_TAIL, 0, 24, { 0, 0x10001 },
      WIRE_REFUSED_PROTOCOL },
    { "ROOM with count", WIRE_ROOM, 1, 16, {}, WIRE_REFUSED_PROTOCOL },
    { "ROOM too short", WIRE_ROOM, 0, 8, {}, WIRE_REFUSED_PROTOCOL },
    { "STATUS too long", WIRE_STATUS, 0, 4, {}, WIRE_REFUSED_PROTOCOL },
};

static void *wrong_message(const Wrong *w, size_t *len)
{
    WireHead *h;

    *len = sizeof(*h) + w->len;
    h = g_malloc0(*len);
    *h = (WireHead) { .type = w->type, .count = w->count, .seq = 7 };
    memcpy(h + 1, w->word, MIN(w->len, sizeof(w->word)));
    return h;
}

static void test_wrong(void)
{
    Scene s;
    size_t len;

    scene_begin(&s);
    for (unsigned i = 0; i < G_N_ELEMENTS(wrongs); i++) {
        Peer *p = peer_new(s.d, NULL);
        void *m = wrong_message(&wrongs[i], &len);

        g_test_message("%s", wrongs[i].name);
        g_assert(peer_send(p, m, len) == 0);
        peer_ends(p, wrongs[i].code);
        g_free(m);
        peer_free(p);
        scene_check(&s);
    }
    scene_end(&s);
}

/* Of those that are wrong before HELLO, too: all. */
static void test_before_hello(void)
{
    Scene s;
    size_t len;

    scene_begin(&s);
    for (unsigned i = 0; i < G_N_ELEMENTS(wrongs); i++) {
        Peer *p = peer_connect(s.d);
        void *m = wrong_message(&wrongs[i], &len);

        if (wrongs[i].type != WIRE_HELLO) {
            g_test_message("%s", wrongs[i].name);
            g_assert(peer_send(p, m, len) == 0);
            peer_ends(p, WIRE_REFUSED_PROTOCOL);
        }
        g_free(m);
        peer_free(p);
    }
    scene_check(&s);
    scene_fds_return(&s);
    scene_end(&s);
}

/* Shorter than a head; as long as a packet can be. */
static void test_lengths(void)
{
    static char buf[160 * 1024];
    const size_t lens[] = { 1, 4, 15, 17, 119, 121, 65552, 65553, 100 * 1024,
                            160 * 1024 };
    Scene s;

    scene_begin(&s);
    for (unsigned i = 0; i < 2 * G_N_ELEMENTS(lens); i++) {
        Peer *p = i % 2 ? peer_new(s.d, NULL) : peer_connect(s.d);

        *(uint32_t *)buf = i % 2 ? WIRE_ASK : WIRE_HELLO;
        if (peer_send(p, buf, lens[i / 2]) == 0) {
            peer_ends(p, WIRE_REFUSED_PROTOCOL);
        }
        peer_free(p);
    }
    scene_end(&s);
}

/* Nothing at all, as a packet. */
static void test_empty_packet(void)
{
    Scene s;
    Peer *p, *q;

    scene_begin(&s);
    p = peer_new(s.d, NULL);
    q = peer_connect(s.d);
    peer_send(p, "", 0);
    peer_send(q, "", 0);
    peer_ends(p, 0);
    peer_ends(q, 0);
    peer_free(p);
    peer_free(q);
    scene_end(&s);
}

static void refused_hello(const Scene *s, const WireHello *hello, size_t len,
                          WireRefusal code)
{
    Peer *p = peer_connect(s->d);

    g_assert(peer_send(p, hello, len) == 0);
    peer_ends(p, code);
    peer_free(p);
}

static void test_hello(void)
{
    WireHello ok, h;
    Scene s;
    Peer *p;

    scene_begin(&s);
    peer_hello_fill(&ok);
    h = ok;
    h.magic ^= 1;
    refused_hello(&s, &h, sizeof(h), WIRE_REFUSED_PROTOCOL);
    h = ok;
    h.version = 2;
    refused_hello(&s, &h, sizeof(h), WIRE_REFUSED_VERSION);
    h.version = 0;
    refused_hello(&s, &h, sizeof(h), WIRE_REFUSED_VERSION);
    h = ok;
    h.head.count = 1;
    refused_hello(&s, &h, sizeof(h), WIRE_REFUSED_PROTOCOL);
    h.head.count = UINT32_MAX;
    refused_hello(&s, &h, sizeof(h), WIRE_REFUSED_PROTOCOL);
    h = ok;
    memset(h.name, 'x', sizeof(h.name));
    refused_hello(&s, &h, sizeof(h), WIRE_REFUSED_PROTOCOL);
    refused_hello(&s, &ok, sizeof(ok) - 1, WIRE_REFUSED_PROTOCOL);
    refused_hello(&s, &ok, 16, WIRE_REFUSED_PROTOCOL);

    /* says much, but may */
    p = peer_connect(s.d);
    h = ok;
    h.pages = UINT64_MAX;
    memset(h.name, 0xff, sizeof(h.name) - 1);
    g_assert(peer_send(p, &h, sizeof(h)) == 0);
    /* "sizes the daemon's tables": not at the member's will */
    g_free(peer_recv(p, PATIENCE_MS));
    scene_check(&s);
    g_assert(poold_rss(s.d) < 2 * GROWTH_MAX_KIB);
    peer_free(p);

    /* a member that says hello to say no more */
    p = peer_connect(s.d);
    g_assert(peer_send(p, &ok, sizeof(ok)) == 0);
    peer_free(p);
    scene_end(&s);
}

static void offer_ends(Peer *p, WireType type, uint32_t count, uint32_t first,
                       uint32_t want)
{
    WireOffer o = {
        .head = { .type = type, .count = count }, .first = first,
        .node = -1, .want = want,
    };

    g_assert(peer_send(p, &o, sizeof(o)) == 0);
    peer_ends(p, WIRE_REFUSED_PROTOCOL);
    peer_free(p);
}

/* Just outside of what WELCOME said. */
static void test_edges(void)
{
    Scene s;
    Peer *p;
    uint32_t ring;
    size_t len;
    WireAsk *ask;

    scene_begin(&s);
    ring = s.by->welcome.ring_pages;
    offer_ends(peer_new(s.d, NULL), WIRE_OFFER, 1, ring, 0);
    offer_ends(peer_new(s.d, NULL), WIRE_OFFER, 2, ring - 1, 0);
    offer_ends(peer_new(s.d, NULL), WIRE_REPEAT, 1, ring, 8);
    offer_ends(peer_new(s.d, NULL), WIRE_OFFER, s.by->welcome.offers + 1, 0, 0);
    p = peer_new(s.d, NULL);
    len = sizeof(*ask) + (p->welcome.asks + 1) * 8;
    ask = g_malloc0(len);
    ask->head = (WireHead) { WIRE_ASK, p->welcome.asks + 1, 0 };
    g_assert(peer_send(p, ask, len) == 0);
    peer_ends(p, WIRE_REFUSED_PROTOCOL);
    g_free(ask);
    peer_free(p);
    p = peer_new(s.d, NULL);
    peer_drop(p, p->welcome.slots, 1);
    peer_ends(p, WIRE_REFUSED_PROTOCOL);
    peer_free(p);
    scene_end(&s);
}

/* What others hold, and counts that overflow. */
static void test_drops(void)
{
    Scene s;
    Peer *p;
    uint32_t slot, holds[] = { 2, 3, 1u << 16, (1u << 16) + 1, 1u << 31,
                               UINT32_MAX };
    WirePair twice[2];
    WirePairs *m = g_malloc0(sizeof(*m) + sizeof(twice));

    scene_begin(&s);
    p = peer_new(s.d, NULL);
    peer_drop(p, s.slot, 1);
    peer_ends(p, WIRE_REFUSED_PROTOCOL);
    peer_free(p);
    for (unsigned i = 0; i < G_N_ELEMENTS(holds); i++) {
        p = peer_new(s.d, NULL);
        slot = peer_ask_one(p, peer_hash_of(p, 1));
        g_assert(slot == s.slot);
        peer_drop(p, slot, holds[i]);
        peer_ends(p, WIRE_REFUSED_PROTOCOL);
        peer_free(p);
        scene_check(&s);
    }
    /* one hold, dropped twice in one message */
    p = peer_new(s.d, NULL);
    slot = peer_ask_one(p, peer_hash_of(p, 1));
    m->head = (WireHead) { WIRE_DROP, 2, 0 };
    m->pair[0] = m->pair[1] = (WirePair) { slot, 1 };
    g_assert(peer_send(p, m, sizeof(*m) + sizeof(twice)) == 0);
    peer_ends(p, WIRE_REFUSED_PROTOCOL);
    peer_free(p);
    scene_check(&s);
    /* a block, by a slot in its midst; by its first, but not held */
    p = peer_new(s.d, NULL);
    g_assert(peer_ask_one(p, peer_hash_of(p, 2)) == s.first);
    peer_drop(p, s.first + 1, 1);
    peer_ends(p, WIRE_REFUSED_PROTOCOL);
    peer_free(p);
    p = peer_new(s.d, NULL);
    peer_drop(p, s.first, 1);
    peer_ends(p, WIRE_REFUSED_PROTOCOL);
    peer_free(p);
    g_free(m);

    /* their holds go with this process only: that is after the test */
    scene_check(&s);
    peer_free(s.by);
    poold_free(s.d);
}

/* A member that broke the protocol keeps what it maps until it exits. */
static void test_refused_holds(void)
{
    Scene s;
    Proc *proc = proc_new(-1);
    Peer *p, *q;
    uint32_t slot;

    scene_begin(&s);
    p = peer_new(s.d, proc);
    slot = peer_offer_one(p, 3);
    peer_drop(p, slot + 1000, 1);
    peer_ends(p, WIRE_REFUSED_PROTOCOL);
    g_usleep(A_WHILE_MS * 1000);
    g_assert(peer_slot_has(p, slot, 3));
    /* and may come back */
    q = peer_resume(s.d, p);
    peer_send_held(q, &(WirePair) { slot, 1 }, 1, 0);
    peer_sync(q);
    g_assert(peer_slot_has(q, slot, 3));
    proc_kill(proc);
    g_assert(peer_slot_punched(p, slot));
    peer_free(p);
    peer_free(q);
    proc_free(proc);
    scene_end(&s);
}

/* Resumes, and says anything but HELD. */
static void test_not_held(void)
{
    Scene s;
    Peer *p, *q;
    uint32_t slot;
    uint64_t hash;
    WireAsk *ask = g_malloc0(sizeof(*ask) + sizeof(hash));

    scene_begin(&s);
    p = peer_new(s.d, NULL);
    slot = peer_offer_one(p, 3);
    peer_close(p);
    ask->head = (WireHead) { WIRE_ASK, 1, 0 };
    q = peer_resume(s.d, p);
    g_assert(peer_send(q, ask, sizeof(*ask) + sizeof(hash)) == 0);
    peer_ends(q, WIRE_REFUSED_PROTOCOL);
    peer_free(q);
    q = peer_resume(s.d, p);
    peer_drop(q, slot, 1);
    peer_ends(q, WIRE_REFUSED_PROTOCOL);
    peer_free(q);
    /* HELD for ever: as many to follow as before */
    q = peer_resume(s.d, p);
    peer_send_held(q, &(WirePair) { slot, 1 }, 1, 5);
    peer_send_held(q, &(WirePair) { slot, 1 }, 1, UINT64_MAX);
    peer_ends(q, WIRE_REFUSED_PROTOCOL);
    peer_free(q);
    g_assert(peer_slot_has(p, slot, 3));
    /* once more when all was said */
    q = peer_resume(s.d, p);
    peer_send_held(q, &(WirePair) { slot, 1 }, 1, 0);
    peer_send_held(q, NULL, 0, 0);
    peer_ends(q, WIRE_REFUSED_PROTOCOL);
    g_usleep(A_WHILE_MS * 1000);
    g_assert(peer_slot_has(p, slot, 3));
    peer_free(q);
    peer_free(p);
    g_free(ask);
    scene_end(&s);
}

/*
 * Resumes, and has lost all that it held: that goes in pieces, and what it says
 * meanwhile waits.
 */
static void test_held_none(void)
{
    enum { OFFERS = 16, N = 512 };
    WireHead status = { .type = WIRE_STATUS };
    uint32_t slot[N];
    WireState *state;
    Peer *p, *q, *other;
    Scene s;

    scene_begin(&s);
    p = peer_new(s.d, NULL);
    for (unsigned i = 0; i < OFFERS; i++) {
        for (unsigned k = 0; k < N; k++) {
            page_fill(peer_page(p, k), 1000 + i * N + k);
        }
        peer_offer(p, 0, N, 0, slot);
    }
    peer_close(p);
    q = peer_resume(s.d, p);
    other = peer_new(s.d, NULL);
    /* both are to be read in one round */
    g_assert(kill(s.d->pid, SIGSTOP) == 0);
    peer_send_held(q, NULL, 0, 0);
    status.seq = ++other->seq;
    g_assert(peer_send(other, &status, sizeof(status)) == 0);
    g_assert(kill(s.d->pid, SIGCONT) == 0);
    state = (WireState *)peer_wait(other, WIRE_STATE, PATIENCE_MS);
    g_assert(state && state->used > OFFERS * N / 2);
    g_free(state);
    state = peer_state(q);
    g_assert(state->used == 1 + s.length && state->member[0].holds == 0);
    g_free(state);
    peer_free(other);
    peer_free(q);
    peer_free(p);
    scene_end(&s);
}

/* True once nobody else has the pipe's other end. */
static bool pipe_is_ours(int fd)
{
    char c;

    for (unsigned i = 0; i < 500; i++) {
        if (read(fd, &c, 1) == 0) {
            return true;
        }
        g_usleep(10000);
    }
    return false;
}

static void test_descriptors(void)
{
    struct {
        const char *name;
        WireType type;
        uint32_t count;
        size_t len;
        bool hello;         /* sent before */
    } m[] = {
        { "HELLO", WIRE_HELLO, 0, 120, false },
        { "STATUS", WIRE_STATUS, 0, 16, false },
        { "ASK", WIRE_ASK, 1, 24, true },
        { "OFFER", WIRE_OFFER, 1, 32, true },
        { "REPEAT", WIRE_REPEAT, 1, 32, true },
        { "GROW", WIRE_GROW, 0, 24, true },
        { "DROP", WIRE_DROP, 1, 24, true },
        { "STATUS", WIRE_STATUS, 0, 16, true },
        { "nothing", 0, 0, 16, true },
    };
    const unsigned ns[] = { 1, 2, 3, 100, 253 };
    Scene s;

    scene_begin(&s);
    for (unsigned i = 0; i < G_N_ELEMENTS(m) * G_N_ELEMENTS(ns); i++) {
        unsigned k = i / G_N_ELEMENTS(ns), n = ns[i % G_N_ELEMENTS(ns)];
        Peer *p = m[k].hello ? peer_new(s.d, NULL) : peer_connect(s.d);
        char buf[120] = { };
        WireHello *h = (WireHello *)buf;
        int fd[2];

        g_test_message("%u descriptors with %s", n, m[k].name);
        if (m[k].type == WIRE_HELLO) {
            peer_hello_fill(h);
        }
        h->head = (WireHead) { m[k].type, m[k].count, 1 };
        g_assert(pipe2(fd, O_CLOEXEC | O_NONBLOCK) == 0);
        g_assert(peer_send_fds(p, buf, m[k].len, fd[1], n) == 0);
        close(fd[1]);
        peer_ends(p, WIRE_REFUSED_PROTOCOL);
        g_assert(pipe_is_ours(fd[0]));
        close(fd[0]);
        peer_free(p);
    }
    scene_end(&s);
}

/* Of one question of the bystander, in us. */
static int64_t round_trip(const Scene *s)
{
    int64_t t = g_get_monotonic_time();

    peer_ask_one(s->by, 1);
    return g_get_monotonic_time() - t;
}

static int by_time(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return x < y ? -1 : x > y;
}

static void check_delays(const char *what, int64_t *us, unsigned n)
{
    qsort(us, n, sizeof(*us), by_time);
    g_test_message("%s: %u round trips, median %" G_GINT64_FORMAT
                   " us, longest %" G_GINT64_FORMAT " us", what, n,
                   us[n / 2], us[n - 1]);
    g_assert(us[n / 2] < DELAY_USUAL_MS * 1000);
    g_assert(us[n - 1] < DELAY_MAX_MS * 1000);
}

/* Asks as long as there is room, and reads nothing. */
static unsigned ask_deaf(Peer *p, const void *msg, size_t len)
{
    unsigned n = 0;

    while (peer_send(p, msg, len) == 0) {
        n++;
    }
    return n;
}

static void deaf(const char *what, const WireHead *msg, size_t len,
                 const void *content)
{
    enum { N = 8, ROUNDS = 200 };
    Peer *p[N];
    Proc *proc[N];
    int64_t us[ROUNDS];
    unsigned long before;
    unsigned sent = 0;
    Scene s;

    scene_begin(&s);
    for (unsigned i = 0; i < N; i++) {
        proc[i] = proc_new(-1);
        p[i] = peer_new(s.d, proc[i]);
        fcntl(p[i]->fd, F_SETFL, O_NONBLOCK);
        if (content) {
            memcpy(peer_page(p[i], 0), content, PAGE);
        }
    }
    before = poold_rss(s.d);
    for (unsigned i = 0; i < ROUNDS; i++) {
        for (unsigned k = 0; k < N; k++) {
            sent += ask_deaf(p[k], msg, len);
        }
        us[i] = round_trip(&s);
        g_usleep(1000);
    }
    check_delays(what, us, ROUNDS);
    g_test_message("%u were sent; the daemon grew from %lu to %lu KiB", sent,
                   before, poold_rss(s.d));
    g_assert(poold_rss(s.d) < before + GROWTH_MAX_KIB);
    /* they hold what they were never told */
    for (unsigned i = 0; i < N; i++) {
        proc_free(proc[i]);
        peer_free(p[i]);
    }
    scene_fds_return(&s);
    scene_end(&s);
    g_assert(sent > N * 2);
}

static void test_deaf_ask(void)
{
    size_t len = sizeof(WireAsk) + WIRE_ASKS * 8;
    WireAsk *m = g_malloc0(len);

    m->head = (WireHead) { WIRE_ASK, WIRE_ASKS, 1 };
    for (unsigned i = 0; i < WIRE_ASKS; i++) {
        m->hash[i] = (i + 1) * 0x9e3779b97f4a7c15ull;
    }
    deaf("ASK", &m->head, len, NULL);
    g_free(m);
}

static void test_deaf_offer(void)
{
    WireOffer m = { .head = { WIRE_OFFER, 64, 1 }, .node = -1 };
    char page[PAGE];

    page_fill(page, 77);
    deaf("OFFER", &m.head, sizeof(m), page);
}

static void test_deaf_status(void)
{
    WireHead m = { WIRE_STATUS, 0, 1 };

    deaf("STATUS", &m, sizeof(m), NULL);
}

/* Thousands of news for somebody who does not listen: they are lost. */
static void test_deaf_news(void)
{
    unsigned n = 20000, asks = 4000;
    Scene s;
    Peer *p, *q;
    uint64_t *hash = g_new(uint64_t, n);
    uint32_t *slot = g_new(uint32_t, n), taken[64];
    unsigned long before;
    unsigned missed = 0;
    WireState *state;

    scene_begin(&s);
    p = peer_new(s.d, NULL);
    q = peer_new(s.d, NULL);
    for (unsigned i = 0; i < n; i++) {
        hash[i] = peer_hash_of(p, 100 + i);
    }
    for (unsigned i = 0; i < n; i += asks) {
        peer_ask(p, hash + i, asks, slot + i);
    }
    before = poold_rss(s.d);
    for (unsigned i = 0; i < n; i += 4) {
        for (unsigned k = 0; k < 4; k++) {
            page_fill(peer_page(q, k), 100 + i + k);
        }
        peer_offer(q, 0, 4, 0, taken);
    }
    state = peer_state(q);
    g_test_message("news %" G_GUINT64_FORMAT ", lost %" G_GUINT64_FORMAT,
                   state->news, state->news_lost);
    /* a few may have been forgotten, see asked.h */
    g_assert(state->news + state->news_lost >= n - n / 1000);
    g_assert(state->news_lost > 0);
    g_free(state);
    g_assert(poold_rss(s.d) < before + GROWTH_MAX_KIB);
    /*
     * Those that came are holds, the lost ones are none, and in the end it is
     * told that there were some.  It must read them all before it says much: it
     * is not heard as long as it does not listen.
     */
    peer_sync(p);
    while (!g_queue_is_empty(&p->early)) {
        WireNews *m = (WireNews *)peer_wait(p, WIRE_NEWS, 0);

        g_assert(!missed);
        missed += !m->head.count;
        for (unsigned i = 0; i < m->head.count; i++) {
            peer_drop(p, m->found[i].slot, 1);
        }
        g_free(m);
    }
    g_assert(missed);
    state = peer_state(p);
    g_assert(state->member[0].holds == 0);
    g_free(state);

    g_free(hash);
    g_free(slot);
    peer_free(p);
    peer_free(q);
    scene_check(&s);
    peer_free(s.by);
    poold_free(s.d);
}

typedef struct Changer {
    uint64_t *word;
    size_t n;
    int stop;               /* atomic */
} Changer;

static void *changer_run(void *opaque)
{
    Changer *c = opaque;

    for (uint64_t x = 1; !g_atomic_int_get(&c->stop); x++) {
        for (size_t i = 0; i < c->n; i += 8) {
            __atomic_store_n(&c->word[i], x, __ATOMIC_RELAXED);
        }
    }
    return NULL;
}

/* As another process sees it. */
static uint64_t hash_in_child(const Peer *p, uint32_t slot)
{
    uint64_t hash = 0;
    char page[PAGE];
    int fd[2];
    pid_t pid;

    g_assert(pipe(fd) == 0);
    pid = fork();
    if (!pid) {
        char *map = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, p->pool_fd,
                         slot * PAGE);

        memcpy(page, map, PAGE);
        hash = peer_hash(p, page, 0);
        _exit(write(fd[1], &hash, sizeof(hash)) != sizeof(hash));
    }
    g_assert(read(fd[0], &hash, sizeof(hash)) == sizeof(hash));
    g_assert(waitpid(pid, NULL, 0) == pid);
    close(fd[0]);
    close(fd[1]);
    return hash;
}

static void test_ring_changes(void)
{
    enum { N = 16, ROUNDS = 40 };
    Scene s;
    Peer *p;
    Changer c = { .n = N * PAGE / 8 };
    pthread_t thread;
    uint32_t slot[ROUNDS * N], found;
    uint64_t hash[ROUNDS * N];
    char page[PAGE];

    scene_begin(&s);
    p = peer_new(s.d, NULL);
    for (unsigned i = 0; i < N; i++) {
        page_fill(peer_page(p, i), 50 + i);
    }
    c.word = (uint64_t *)p->ring;
    g_assert(pthread_create(&thread, NULL, changer_run, &c) == 0);
    for (unsigned i = 0; i < ROUNDS; i++) {
        peer_offer(p, 0, N, 0, &slot[i * N]);
        for (unsigned k = i * N; k < (i + 1) * N; k++) {
            g_assert(slot[k] < p->welcome.slots);
            peer_read_slot(p, slot[k], page);
            hash[k] = peer_hash(p, page, 0);
        }
    }
    for (unsigned k = 0; k < ROUNDS * N; k++) {
        peer_read_slot(s.by, slot[k], page);
        g_assert(peer_hash(p, page, 0) == hash[k]);
        /*
         * The index judged the copy, not the ring.  (A content that was offered
         * more often than a member may hold it has another slot by now.)
         */
        found = peer_ask_one(s.by, hash[k]);
        g_assert(found < p->welcome.slots);
        peer_read_slot(s.by, found, page);
        g_assert(peer_hash(p, page, 0) == hash[k]);
        peer_drop(s.by, found, 1);
    }
    for (unsigned k = 0; k < ROUNDS * N; k += 37) {
        g_assert(hash_in_child(p, slot[k]) == hash[k]);
    }
    g_atomic_int_set(&c.stop, 1);
    pthread_join(thread, NULL);
    peer_free(p);
    scene_check(&s);
    peer_free(s.by);
    poold_free(s.d);
}

/* All of a block is one content. */
static void test_ring_changes_repeat(void)
{
    Scene s;
    Peer *p;
    Changer c = { .n = PAGE / 8 };
    pthread_t thread;
    char page[PAGE], other[PAGE];

    scene_begin(&s);
    p = peer_new(s.d, NULL);
    page_fill(peer_page(p, 0), 50);
    c.word = (uint64_t *)p->ring;
    g_assert(pthread_create(&thread, NULL, changer_run, &c) == 0);
    for (unsigned i = 0; i < 10; i++) {
        WireOffer o = { .head = { WIRE_REPEAT, 1, ++p->seq }, .node = -1,
                        .want = 64 };
        WireSlots *t;
        WireBlock *b;
        uint32_t first;

        g_assert(peer_send(p, &o, sizeof(o)) == 0);
        t = (WireSlots *)peer_wait(p, WIRE_TAKEN, PATIENCE_MS);
        g_assert(t);
        first = t->slot[0];
        g_free(t);
        b = (WireBlock *)peer_wait(p, WIRE_BLOCK, 0);
        g_assert(b);
        g_assert(b->first == first);
        peer_read_slot(p, first, page);
        for (unsigned k = 1; k < b->length; k++) {
            peer_read_slot(p, first + k, other);
            g_assert(memcmp(page, other, PAGE) == 0);
        }
        g_free(b);
        /* what it grows by is the block's content, not the ring's */
        g_assert(peer_grow(p, first, 70) == 70);
        peer_read_slot(p, first + 69, other);
        g_assert(memcmp(page, other, PAGE) == 0);
    }
    g_atomic_int_set(&c.stop, 1);
    pthread_join(thread, NULL);
    peer_free(p);
    scene_check(&s);
    peer_free(s.by);
    poold_free(s.d);
}

/*
 * Who knows the key can make pages of one hash: XXH3 multiplies halves of
 * words, and a half that is zero hides the other.  A lane's words are summed.
 */
static void make_collision(uint64_t key, char *a, char *b)
{
    /*
     * Of XXH3's secret, bytes 0 to 15; words 0 and 8 of a page are of one lane,
     * whose secrets are 8 bytes apart.
     */
    static const uint64_t secret[2] = {
        0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull,
    };
    uint64_t k0 = secret[0] + key, k1 = secret[1] - key;
    uint64_t wa[2], wb[2];

    page_fill(a, 99);
    /* low halves that the secret cancels */
    wa[0] = (uint32_t)k0 | 5ull << 32;
    wa[1] = (uint32_t)k1 | 9ull << 32;
    wb[0] = (uint32_t)k0 | 6ull << 32;
    wb[1] = (uint32_t)k1 | 8ull << 32;
    memcpy(a, &wa[0], 8);
    memcpy(a + 64, &wa[1], 8);
    memcpy(b, a, PAGE);
    memcpy(b, &wb[0], 8);
    memcpy(b + 64, &wb[1], 8);
}

static void test_collision(void)
{
    Scene s;
    Peer *p, *q;
    char a[PAGE], b[PAGE], page[PAGE];
    uint32_t slot_a, slot_b, answer;
    WireHead *h;

    scene_begin(&s);
    p = peer_new(s.d, NULL);
    q = peer_new(s.d, NULL);
    make_collision(p->welcome.key, a, b);
    g_assert(peer_hash(p, a, 0) == peer_hash(p, b, 0));
    g_assert(memcmp(a, b, PAGE) != 0);

    g_assert(peer_ask_one(q, peer_hash(q, a, 0)) == WIRE_NONE);
    memcpy(peer_page(p, 0), a, PAGE);
    peer_offer(p, 0, 1, 0, &slot_a);
    h = peer_wait(q, WIRE_NEWS, PATIENCE_MS);
    g_assert(h);
    g_free(h);
    peer_drop(q, slot_a, 1);
    memcpy(peer_page(p, 0), b, PAGE);
    peer_offer(p, 0, 1, 0, &slot_b);
    g_assert(slot_a < p->welcome.slots);
    peer_read_slot(p, slot_a, page);
    g_assert(memcmp(page, a, PAGE) == 0);
    if (slot_b < p->welcome.slots) {
        peer_read_slot(p, slot_b, page);
        g_assert(memcmp(page, b, PAGE) == 0);
    }
    answer = peer_ask_one(q, peer_hash(q, a, 0));
    g_assert(answer == slot_a || answer == slot_b);
    /* the one goes, the other stays */
    peer_drop(p, slot_a, 1);
    if (answer != slot_a) {
        g_assert(peer_slot_punched(p, slot_a));
    }
    if (slot_b < p->welcome.slots) {
        peer_read_slot(p, slot_b, page);
        g_assert(memcmp(page, b, PAGE) == 0);
    }
    peer_free(p);
    peer_free(q);
    scene_check(&s);
    peer_free(s.by);
    poold_free(s.d);
}

static int connect_soon(const Poold *d)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    g_assert(fd >= 0);
    strcpy(a.sun_path, d->socket);
    for (unsigned i = 0; i < 1000; i++) {
        if (connect(fd, (struct sockaddr *)&a, sizeof(a)) == 0) {
            return fd;
        }
        g_assert(errno == EAGAIN);
        g_usleep(1000);
    }
    close(fd);
    return -1;
}

static void test_silent(void)
{
    int fd[N_SILENT];
    int64_t us[N_SILENT / 10];
    unsigned n = 0;
    Scene s;
    Peer *p, *q;
    Proc *proc = proc_new(-1);

    scene_begin(&s);
    for (unsigned i = 0; i < N_SILENT; i++) {
        /* if it lets no more in, that is all right */
        fd[i] = connect_soon(s.d);
        n += fd[i] >= 0;
        if (i % 10 == 0) {
            us[i / 10] = round_trip(&s);
        }
        if (fd[i] < 0) {
            for (unsigned k = i / 10 + 1; k < N_SILENT / 10; k++) {
                us[k] = round_trip(&s);
            }
            for (unsigned k = i + 1; k < N_SILENT; k++) {
                fd[k] = -1;
            }
            break;
        }
    }
    g_test_message("%u connections", n);
    check_delays("silent connections", us, N_SILENT / 10);
    /* whoever has something to say is heard */
    p = peer_new(s.d, proc);
    peer_sync(p);
    q = peer_resume(s.d, p);
    peer_send_held(q, NULL, 0, 0);
    peer_sync(q);
    peer_free(p);
    peer_free(q);
    g_free(poold_state(s.d));
    proc_free(proc);
    for (unsigned i = 0; i < N_SILENT; i++) {
        if (fd[i] >= 0) {
            close(fd[i]);
        }
    }
    scene_fds_return(&s);
    p = peer_new(s.d, NULL);
    peer_sync(p);
    peer_free(p);
    scene_end(&s);
}

/* The daemon has no descriptors left. */
static void test_few_files(void)
{
    enum { N = 200, TRIPS = 20 };
    const PooldConfig config = { .slots = 4096, .files = 48 };
    Scene s = { .d = poold_new(&config) };
    Peer *p[N], *late;
    int64_t us[TRIPS];
    unsigned n = 0;

    s.by = peer_new(s.d, NULL);
    s.slot = peer_offer_one(s.by, 1);
    s.first = peer_repeat(s.by, 2, 8, &s.length);
    s.fds = poold_fds(s.d);
    /* those that are not accepted wait for their turn; then none can wait */
    for (int fd; n < N && (fd = connect_soon(s.d)) >= 0; n++) {
        p[n] = g_new0(Peer, 1);
        p[n]->fd = fd;
        p[n]->pool_fd = p[n]->ring_fd = -1;
        if (n % 2) {
            WireHello hello;

            peer_hello_fill(&hello);
            peer_send(p[n], &hello, sizeof(hello));
        }
    }
    for (unsigned i = 0; i < TRIPS; i++) {
        us[i] = round_trip(&s);
    }
    check_delays("no descriptors", us, TRIPS);
    scene_check(&s);
    g_test_message("%u connections, %u descriptors", n, poold_fds(s.d));
    while (n--) {
        peer_free(p[n]);
    }
    /* members of this process stay; whatever was not one is gone */
    late = peer_connect(s.d);
    for (unsigned i = 0; i < TRIPS && !peer_hello(late, NULL); i++) {
        g_assert(late->refused.code == WIRE_REFUSED_LACK ||
                 late->refused.code == WIRE_REFUSED_FULL);
        peer_free(late);
        late = peer_connect(s.d);
    }
    scene_check(&s);
    peer_free(late);
    scene_end(&s);
}

/* One process does not take the others' room. */
static void test_greedy_process(void)
{
    static const PooldConfig config = { .members = 20 };
    Poold *d = poold_new(&config);
    Peer *p[21], *other;
    Proc *proc = proc_new(-1);
    unsigned n = 0;

    while (n < G_N_ELEMENTS(p)) {
        p[n] = peer_connect(d);
        if (!peer_hello(p[n++], NULL)) {
            break;
        }
    }
    g_assert(n == 9 && p[8]->refused.code == WIRE_REFUSED_FULL);
    other = peer_new(d, proc);
    /* what it was it may be again */
    peer_close(p[0]);
    peer_free(peer_resume(d, p[0]));
    peer_free(other);
    proc_free(proc);
    while (n) {
        peer_free(p[--n]);
    }
    poold_free(d);
}

/* A process whose engines come and go, one after the other, for years. */
static void test_many_engines(void)
{
    static const PooldConfig config = { .members = 20 };
    Poold *d = poold_new(&config);
    Peer *p[8], *late;

    for (unsigned i = 0; i < 50; i++) {
        Peer *one = peer_connect(d);

        /* one at a time: until the last that went is forgotten */
        for (unsigned tries = 0; !peer_hello(one, NULL); tries++) {
            g_assert(tries < 500);
            g_assert(one->refused.code == WIRE_REFUSED_FULL);
            peer_free(one);
            g_usleep(10000);
            one = peer_connect(d);
        }
        peer_free(one);
    }
    /* what holds something has something to come back for */
    for (unsigned i = 0; i < G_N_ELEMENTS(p); i++) {
        p[i] = peer_connect(d);
        for (unsigned tries = 0; !peer_hello(p[i], NULL); tries++) {
            g_assert(tries < 500);
            peer_free(p[i]);
            g_usleep(10000);
            p[i] = peer_connect(d);
        }
        g_assert(peer_offer_one(p[i], 100 + i) < p[i]->welcome.slots);
    }
    for (unsigned i = 0; i < G_N_ELEMENTS(p); i++) {
        peer_close(p[i]);
    }
    late = peer_connect(d);
    g_assert(!peer_hello(late, NULL));
    g_assert(late->refused.code == WIRE_REFUSED_FULL);
    peer_free(late);
    for (unsigned i = 0; i < G_N_ELEMENTS(p); i++) {
        peer_free(peer_resume(d, p[i]));
        peer_free(p[i]);
    }
    poold_free(d);
}

static void test_hasty(void)
{
    Proc *proc[N_HASTY];
    Peer *p[N_HASTY];
    unsigned n = 0;
    WireHello hello;
    Scene s;

    scene_begin(&s);
    peer_hello_fill(&hello);
    while (n < N_HASTY) {
        p[n] = peer_connect(s.d);
        p[n]->proc = proc[n] = proc_new(-1);
        if (!peer_hello(p[n], NULL)) {
            /* so many and no more */
            g_assert(p[n]->refused.code == WIRE_REFUSED_FULL);
            peer_free(p[n]);
            proc_free(proc[n]);
            break;
        }
        g_assert(peer_offer_one(p[n], 3) < s.by->welcome.slots);
        g_assert(peer_offer_one(p[n], 100 + n) < s.by->welcome.slots);
        n++;
    }
    g_test_message("%u members", n);
    g_assert(n >= 100);
    /* and some that are gone before they are welcome */
    for (unsigned i = 0; i < N_GONE; i++) {
        Peer *gone = peer_connect(s.d);
        Proc *first = proc_new(-1);

        g_assert(proc_send(first, gone->fd, &hello, sizeof(hello)) == 0);
        proc_free(first);
        peer_free(gone);
    }
    for (unsigned i = 0; i < n; i++) {
        kill(proc[i]->pid, SIGKILL);
        if (i % 2) {
            peer_close(p[i]);
        }
    }
    for (unsigned i = 0; i < 20; i++) {
        g_assert(round_trip(&s) < DELAY_MAX_MS * 1000);
    }
    for (unsigned i = 0; i < n; i++) {
        proc_free(proc[i]);
        peer_free(p[i]);
    }
    for (unsigned i = 0; i < 1000; i++) {
        WireState *state = poold_state(s.d);
        bool done = state->members == 1 && state->used == 1 + s.length;

        g_free(state);
        if (done) {
            break;
        }
        g_assert(i < 999);
        g_usleep(10000);
    }
    scene_fds_return(&s);
    scene_end(&s);
}

static int no_more(const char *what, long ret)
{
    if (ret >= 0) {
        fprintf(stderr, "# %s as uid %d: it was allowed\n", what, geteuid());
        return 1;
    }
    return 0;
}

static long try_map(int fd, off_t at)
{
    void *m = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, at);

    return m == MAP_FAILED ? -1 : 0;
}

static long try_remount(const char *path, int fd)
{
    struct mount_attr writable = { .attr_clr = MOUNT_ATTR_RDONLY };
    long ret = mount_setattr(fd, "", AT_EMPTY_PATH, &writable,
                             sizeof(writable));
    int tree, again;

    if (ret == 0) {
        again = open(path, O_RDWR);
        return again < 0 ? -1 : 0;
    }
    ret = mount("", path, "", MS_REMOUNT | MS_BIND, 0);
    if (ret == 0) {
        return 0;
    }
    tree = open_tree(fd, "", AT_EMPTY_PATH | OPEN_TREE_CLONE);
    if (tree < 0) {
        return -1;
    }
    /* a clone of the file's mount: is the clone writable? */
    mount_setattr(tree, "", AT_EMPTY_PATH, &writable, sizeof(writable));
    again = openat(tree, "", O_RDWR | AT_EMPTY_PATH);
    if (again < 0) {
        char *p = g_strdup_printf("/proc/self/fd/%d", tree);

        again = open(p, O_RDWR);
        g_free(p);
    }
    return again;
}

static int attack(int fd, uint32_t slot)
{
    char path[64];
    off_t at = slot * PAGE;
    void *m = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, at);
    void *own = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, at);
    int bad = 0, pipes[2];
    loff_t out = at;

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    bad += no_more("pwrite", pwrite(fd, "x", 1, at));
    bad += no_more("ftruncate", ftruncate(fd, 0));
    bad += no_more("fallocate", fallocate(fd, 0, at, PAGE));
    bad += no_more("punch", fallocate(fd, FALLOC_FL_PUNCH_HOLE |
                                      FALLOC_FL_KEEP_SIZE, at, PAGE));
    bad += no_more("zero", fallocate(fd, FALLOC_FL_ZERO_RANGE, at, PAGE));
    bad += no_more("mmap shared", try_map(fd, at));
    if (m != MAP_FAILED) {
        bad += no_more("mprotect", mprotect(m, PAGE, PROT_READ | PROT_WRITE));
        bad += no_more("MADV_REMOVE", madvise(m, PAGE, MADV_REMOVE));
    }
    if (own != MAP_FAILED) {
        bad += no_more("MADV_REMOVE (private)",
                       madvise(own, PAGE, MADV_REMOVE));
        memset(own, 0, PAGE);
        madvise(own, PAGE, MADV_DONTNEED);
    }
    bad += no_more("open O_RDWR", open(path, O_RDWR));
    bad += no_more("open O_WRONLY", open(path, O_WRONLY));
    bad += no_more("open O_TRUNC", open(path, O_RDONLY | O_TRUNC));
    bad += no_more("truncate", truncate(path, 0));
    bad += no_more("fchmod", fchmod(fd, 0666));
    bad += no_more("fchown", fchown(fd, geteuid(), -1));
    bad += no_more("fsetxattr", fsetxattr(fd, "user.x", "x", 1, 0));
    bad += no_more("seal", fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE));
    if (pipe(pipes) == 0 && write(pipes[1], "x", 1) == 1) {
        bad += no_more("splice", splice(pipes[0], NULL, fd, &out, 1, 0));
    }
    out = at;
    bad += no_more("copy_file_range",
                   copy_file_range(fd, &(loff_t) { at }, fd, &out, 1, 0));
    bad += no_more("link", linkat(fd, "", AT_FDCWD, "/tmp/ksm-poold-link",
                                  AT_EMPTY_PATH));
    bad += no_more("remount", try_remount(path, fd));
    /* and after all that */
    bad += no_more("open O_RDWR at last", open(path, O_RDWR));
    return bad;
}

static void attack_as(int uid, const Peer *p, uint32_t slot)
{
    pid_t pid = fork();
    int status;

    if (!pid) {
        if (uid >= 0 && (setgroups(0, NULL) || setresgid(uid, uid, uid) ||
                         setresuid(uid, uid, uid))) {
            _exit(127);
        }
        status = attack(p->pool_fd, slot);
        /* as master of a namespace of its own */
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0) {
            status += attack(p->pool_fd, slot);
        }
        _exit(status);
    }
    g_assert(waitpid(pid, &status, 0) == pid);
    g_assert(WIFEXITED(status));
    g_assert(WEXITSTATUS(status) == 0);
    g_assert(peer_slot_has(p, slot, 1));
}

static void test_pool(void)
{
    Scene s;

    scene_begin(&s);
    /* the daemon's own uid; that is root, if the test is root */
    attack_as(-1, s.by, s.slot);
    scene_check(&s);
    if (geteuid() == 0) {
        attack_as(65534, s.by, s.slot);
        scene_check(&s);
    }
    /* still the daemon's to write */
    g_assert(peer_slot_has(s.by, peer_offer_one(s.by, 1000), 1000));
    scene_end(&s);
}

/* What its own user may do to a daemon that is not root. */
static int attack_process(pid_t pid)
{
    char *fds = g_strdup_printf("/proc/%d/fd/3", pid);
    char *mem = g_strdup_printf("/proc/%d/mem", pid);
    int bad = no_more("its descriptors", open(fds, O_RDWR)) +
              no_more("its memory", open(mem, O_RDWR)) +
              no_more("ptrace", ptrace(PTRACE_SEIZE, pid, NULL, NULL));

    g_free(fds);
    g_free(mem);
    return bad;
}

static void test_unprivileged(void)
{
    const PooldConfig config = { .slots = 4096, .uid = 65534 };
    Proc *proc;
    Poold *d;
    Peer *p;
    uint32_t slot;
    int status;
    pid_t pid;

    if (geteuid()) {
        g_test_skip("only root can make others of itself");
        return;
    }
    d = poold_new(&config);
    proc = proc_new(65534);
    p = peer_connect(d);
    p->proc = proc;
    if (peer_hello(p, NULL)) {
        slot = peer_offer_one(p, 1);
        attack_as(65534, p, slot);
        attack_as(65533, p, slot);
        attack_as(-1, p, slot);
    } else {
        /* a pool that they could write is not given to them */
        g_assert(p->refused.code == WIRE_REFUSED_RIGHT);
    }
    pid = fork();
    if (!pid) {
        if (setgroups(0, NULL) || setresgid(65534, 65534, 65534) ||
            setresuid(65534, 65534, 65534)) {
            _exit(127);
        }
        _exit(attack_process(d->pid));
    }
    g_assert(waitpid(pid, &status, 0) == pid);
    g_assert(status == 0);
    proc_free(proc);
    peer_free(p);
    poold_free(d);
}

/* The ring is its owner's; the daemon must not trip over it. */
static void test_ring(void)
{
    Scene s;
    Peer *p;
    uint32_t slot;

    scene_begin(&s);
    p = peer_new(s.d, NULL);
    g_assert(ftruncate(p->ring_fd, 0) == -1);
    /* a hole is a page of zeroes */
    if (fallocate(p->ring_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  p->welcome.ring_pages * PAGE) == 0) {
        char page[PAGE], zero[PAGE] = { };

        peer_offer(p, 0, 1, 0, &slot);
        if (slot < p->welcome.slots) {
            peer_read_slot(p, slot, page);
            g_assert(memcmp(page, zero, PAGE) == 0);
        }
    }
    fcntl(p->ring_fd, F_ADD_SEALS, F_SEAL_SEAL);
    g_assert(peer_offer_one(p, 5) < p->welcome.slots);
    peer_free(p);
    scene_check(&s);
    peer_free(s.by);
    poold_free(s.d);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *path;
        void (*fn)(void);
    } tests[] = {
        { "/hostile/wrong", test_wrong },
        { "/hostile/before-hello", test_before_hello },
        { "/hostile/lengths", test_lengths },
        { "/hostile/empty-packet", test_empty_packet },
        { "/hostile/hello", test_hello },
        { "/hostile/edges", test_edges },
        { "/hostile/drops", test_drops },
        { "/hostile/refused-holds", test_refused_holds },
        { "/hostile/not-held", test_not_held },
        { "/hostile/held-none", test_held_none },
        { "/hostile/descriptors", test_descriptors },
        { "/hostile/deaf-ask", test_deaf_ask },
        { "/hostile/deaf-offer", test_deaf_offer },
        { "/hostile/deaf-status", test_deaf_status },
        { "/hostile/deaf-news", test_deaf_news },
        { "/hostile/ring-changes", test_ring_changes },
        { "/hostile/ring-changes-repeat", test_ring_changes_repeat },
        { "/hostile/collision", test_collision },
        { "/hostile/silent", test_silent },
        { "/hostile/few-files", test_few_files },
        { "/hostile/greedy-process", test_greedy_process },
        { "/hostile/many-engines", test_many_engines },
        { "/hostile/hasty", test_hasty },
        { "/hostile/pool", test_pool },
        { "/hostile/unprivileged", test_unprivileged },
        { "/hostile/ring", test_ring },
    };
    struct rlimit files;

    g_test_init(&argc, &argv, NULL);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = MIN(files.rlim_max, 65536);
    setrlimit(RLIMIT_NOFILE, &files);
    for (unsigned i = 0; i < G_N_ELEMENTS(tests); i++) {
        g_test_add_func(tests[i].path, tests[i].fn);
    }
    return g_test_run();
}
