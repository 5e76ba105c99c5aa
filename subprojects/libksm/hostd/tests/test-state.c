/*
 * hostd tests: what the daemon tells of its members, and does with what they say
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * In this process.  Counting what one member holds takes here as long as a turn
 * may.
 */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/page.h"
#include "base/prim.h"
#include "offer.h"
#include "reload.h"
#include "state.h"
#include "sys.h"
#include "talk.h"
#include "../../tests/fake-root.h"

#define MEMBERS 3u
#define SECOND  UINT64_C(1000000000)

typedef struct Scene {
    Server s;
    Member *member[MEMBERS];
    Client *client;
    int peer;
    struct {
        WireState s;
        WireMember member[MEMBERS + 1];
    } told;
} Scene;

static uint64_t now;
static const char *config_root = "/";

static uint64_t now_late(void)
{
    return now += SECOND / 250;
}

/* Each member has @n slots more, of its own. */
static void scene_offer(Scene *s, unsigned n)
{
    static uint32_t content;
    Offer o = { .ring = sys.memfd("ring", 0), .count = 1, .node = -1 };
    uint32_t page[PAGE_BYTES / 4] = { 0 }, slot;

    for (unsigned i = 0; i < n * MEMBERS; i++) {
        page[0] = ++content;
        g_assert(prim.write(o.ring, page, PAGE_BYTES, 0) == PAGE_BYTES);
        offer_pages(&s->s.group, &s->member[i % MEMBERS]->held, &o, &slot,
                    s->s.blocks);
        g_assert(slot < WIRE_SLOTS_MAX);
    }
    prim.close(o.ring);
}

static Scene *scene_new(void)
{
    GroupConfig config = { .slots = 4096, .max_holds = 64, .share = 100,
                           .max_members = MEMBERS, .root = config_root };
    g_autofree char *note = NULL;
    Scene *s = g_new0(Scene, 1);
    PoolFile file;
    int pair[2];

    now = SECOND;
    prim.now_ns = now_late;
    g_assert(poolfile_make(&file, 4096 * PAGE_BYTES, &note) == 0);
    g_assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, pair) == 0);
    g_assert(server_prepare(&s->s, &config, &file, dup(pair[0])) == 0);
    s->client = server_connect(&s->s, pair[0]);
    s->peer = pair[1];
    for (unsigned i = 0; i < MEMBERS; i++) {
        s->member[i] = g_new0(Member, 1);
        s->member[i]->pidfd = s->member[i]->ring = -1;
        g_assert(group_join(&s->s.group, &s->member[i]->held, 100) == 0);
    }
    return s;
}

static void scene_end(Scene *s)
{
    s->client->member = NULL;
    server_free(&s->s);
    close(s->peer);
    g_free(s);
    prim.now_ns = prim_real.now_ns;
}

/* Members that STATE tells of. */
static unsigned ask(Scene *s)
{
    ssize_t len;

    state_send(s->client, 1, false);
    len = recv(s->peer, &s->told, sizeof(s->told), 0);
    g_assert(len == sizeof(WireState) +
                    s->told.s.head.count * sizeof(WireMember));
    return s->told.s.head.count;
}

static void check(Scene *s, unsigned i, unsigned held)
{
    g_assert(s->told.member[i].held == held);
    g_assert(s->told.member[i].share == held * 1000);
}

/* The first answer tells of all; later ones count one more each. */
static void test_first(void)
{
    Scene *s = scene_new();

    scene_offer(s, 2);
    g_assert(ask(s) == MEMBERS);
    for (unsigned i = 0; i < MEMBERS; i++) {
        check(s, i, 2);
    }
    scene_offer(s, 3);
    for (unsigned i = 0; i < MEMBERS; i++) {
        /* who asks about itself often takes no turn of others */
        s->s.share_next = i;
        s->client->member = s->member[2];
        now += SECOND;
        g_assert(ask(s) == 1);
        check(s, 0, 5);
        s->client->member = NULL;
        g_assert(ask(s) == MEMBERS);
        for (unsigned k = 0; k < 2; k++) {
            check(s, k, k <= i ? 5 : 2);
        }
    }
    scene_end(s);
}

/* After a reload they are counted one by one. */
static void test_steps(void)
{
    Scene *s = scene_new();

    scene_offer(s, 2);
    s->s.uncounted = ASKED_MEMBERS;
    for (unsigned i = 0; i < MEMBERS; i++) {
        g_assert(state_step(&s->s));
    }
    g_assert(!state_step(&s->s));
    scene_offer(s, 1);
    g_assert(ask(s) == MEMBERS);
    for (unsigned i = 0; i < MEMBERS; i++) {
        check(s, i, 2);
    }
    scene_end(s);
}

/* Where nobody's holds have changed nothing is counted. */
static void test_unchanged(void)
{
    Scene *s = scene_new();
    uint64_t counted;

    s->client->member = s->member[1];
    scene_offer(s, 2);
    g_assert(ask(s) == 1);
    counted = s->member[1]->share_at;
    now += SECOND;
    g_assert(ask(s) == 1);
    g_assert(s->member[1]->share_at == counted);
    check(s, 0, 2);
    /* another's */
    g_assert(group_hold(&s->s.group, &s->member[0]->held, 1));
    now += SECOND;
    g_assert(ask(s) == 1);
    g_assert(s->told.member[0].share == 1500);
    scene_end(s);
}

/* A block that grows changes what its members hold. */
static void test_grown(void)
{
    Scene *s = scene_new();
    Offer o = { .ring = sys.memfd("ring", 0), .count = 1, .node = -1 };
    GroupMember *m = &s->member[0]->held;
    uint32_t page[PAGE_BYTES / 4] = { 4711 }, slot;

    s->client->member = s->member[0];
    g_assert(prim.write(o.ring, page, PAGE_BYTES, 0) == PAGE_BYTES);
    g_assert(offer_block(&s->s.group, m, &o, 16, &slot) == 0);
    prim.close(o.ring);
    ask(s);
    check(s, 0, 16);
    g_assert(offer_grow(&s->s.group, m, slot, 32) == 32);
    now += SECOND;
    ask(s);
    check(s, 0, 32);
    scene_end(s);
}

/* However many have said how much they gave, it does not overflow. */
static void test_given(void)
{
    Scene *s = scene_new();
    WireTail tail = { { .type = WIRE_TAIL }, { .given = 5 } };
    Packet p = { .data = &tail, .len = sizeof(tail) };

    s->s.group.stats.given = UINT64_MAX - 6;
    for (unsigned i = 0; i < MEMBERS; i++) {
        s->client->member = s->member[i];
        talk_packet(s->client, &p);
        g_assert(s->s.group.stats.given == UINT64_MAX - (i ? 0 : 1));
    }
    scene_end(s);
}

static int no_program(const char *path, char **argv)
{
    return -ENOENT;
}

/* A daemon that has no room for its image goes on as it is. */
static void test_reload_room(void)
{
    FakeRoot root;
    Scene *s;

    fake_make(&root, NULL);
    fake_write(&root, "proc/self/mountinfo",
               "32 20 0:27 / /cg rw - cgroup2 none rw\n");
    fake_write(&root, "proc/self/cgroup", "0::/\n");
    fake_write(&root, "cg/memory.max", "1073741824\n");
    fake_write(&root, "cg/memory.current", "0\n");
    config_root = root.dir;
    s = scene_new();
    config_root = "/";
    sys.execute = no_program;
    g_assert(reload_exec(&s->s) == -ENOENT);
    fake_write(&root, "cg/memory.current", "1065349120\n");  /* 4 KiB more */
    g_assert(reload_exec(&s->s) == -ENOMEM);
    sys = sys_real;
    scene_end(s);
    fake_remove(&root, NULL);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/state/first", test_first);
    g_test_add_func("/state/steps", test_steps);
    g_test_add_func("/state/unchanged", test_unchanged);
    g_test_add_func("/state/grown", test_grown);
    g_test_add_func("/state/given", test_given);
    g_test_add_func("/state/reload-room", test_reload_room);
    return g_test_run();
}
