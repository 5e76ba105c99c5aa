/*
 * hostd tests: a fuzzer of all that the daemon reads
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Bytes are deeds of four clients: what they say, over real sockets, true or
 * not; that they hang up, exit, or do not read.  After each deed holds and
 * slots agree, and what is answered is of the content that was asked for; in
 * the end nothing is left.  libFuzzer (-Dfuzzer=true, clang) finds bytes that
 * get further; without it the program makes up its own, or reads files.
 * fuzz-poold does the same to the program as a whole, without a guide.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <glib.h>

#include "base/page.h"
#include "base/prim.h"
#include "client.h"
#include "sys.h"
#include "talk.h"
#include "work.h"

#define SLOTS       4096u
#define CLIENTS     4u
#define CONTENTS    64u
#define QUESTIONS   256u    /* remembered of a client, by seq */
#define PAGES_MAX   32u
#define BYTES_MAX   4096u

typedef struct Question {
    unsigned n;             /* 0: none */
    uint8_t content[PAGES_MAX];
} Question;

typedef struct Peer {
    int fd;                 /* -1: none */
    uint64_t cookie[2];
    int ring;
    uint64_t seq;
    Question question[QUESTIONS];
} Peer;

typedef struct World {
    Server s;
    PoolFile file;
    Peer peer[CLIENTS];
    uint64_t hash[CONTENTS];
    /* what is left of the input */
    const uint8_t *at, *end;
} World;

static World w;

static uint8_t byte(void)
{
    return w.at < w.end ? *w.at++ : 0;
}

static uint16_t two_bytes(void)
{
    uint16_t low = byte();

    return low | byte() << 8;
}

/* Mostly small numbers, and the edges. */
static uint32_t number(void)
{
    uint8_t b = byte();

    switch (b >> 6) {
    case 0:
        return b;
    case 1:
        return two_bytes();
    case 2:
        return SLOTS - 8 + (b & 15);
    default:
        return UINT32_MAX - (b & 15);
    }
}

static void page_make(char *page, unsigned content)
{
    /* some are all of one word: blocks */
    for (unsigned i = 0; i < PAGE_BYTES / 4; i++) {
        ((uint32_t *)page)[i] = content * 0x9e3779b1 + (content % 4 ? i : 0);
    }
}

static Member *member_of(const Peer *p)
{
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        Member *m = (Member *)w.s.group.member[i];

        if (m && m->exit_watch && (m->cookie[0] || m->cookie[1]) &&
            !memcmp(m->cookie, p->cookie, sizeof(p->cookie))) {
            return m;
        }
    }
    return NULL;
}

/* What it was told, and holds still: it may have said things meanwhile. */
static void check_slot(const Peer *p, uint32_t slot, unsigned content)
{
    char have[PAGE_BYTES], page[PAGE_BYTES];
    const Member *m = member_of(p);

    g_assert(slot < w.s.group.config.slots);
    if (!m || !holds_of(&m->held.holds, slot)) {
        return;
    }
    g_assert(pread(w.file.fd, have, PAGE_BYTES, (off_t)slot * PAGE_BYTES) ==
             PAGE_BYTES);
    page_make(page, content);
    g_assert(memcmp(have, page, PAGE_BYTES) == 0);
}

static void check_slots(Peer *p, const WireSlots *slots)
{
    Question *q = &p->question[slots->head.seq % QUESTIONS];

    if (q->n != slots->head.count) {
        return;     /* of bytes that we made no sense of ourselves */
    }
    for (unsigned i = 0; i < q->n; i++) {
        if (slots->slot[i] < WIRE_SLOTS_MAX) {
            check_slot(p, slots->slot[i], q->content[i]);
        }
    }
    q->n = 0;
}

static void check_news(const Peer *p, const WireNews *news)
{
    for (unsigned i = 0; i < news->head.count; i++) {
        for (unsigned c = 0; c < CONTENTS; c++) {
            if (news->found[i].hash == w.hash[c] &&
                news->found[i].slot != WIRE_LEFT) {
                check_slot(p, news->found[i].slot, c);
            }
        }
    }
}

static void peer_close(Peer *p)
{
    if (p->fd >= 0) {
        close(p->fd);
        p->fd = -1;
    }
}

static void welcomed(Peer *p, const WireWelcome *welcome, int ring)
{
    if (!welcome->resumed) {
        memset(p->question, 0, sizeof(p->question));
    }
    memcpy(p->cookie, welcome->cookie, sizeof(p->cookie));
    if (p->ring >= 0) {
        close(p->ring);
    }
    p->ring = ring;
}

/* False: there is nothing to be read. */
static bool peer_read_one(Peer *p)
{
    static union {
        WireHead head;
        WireSlots slots;
        WireNews news;
        WireWelcome welcome;
        char bytes[WIRE_MESSAGE_MAX];
    } in;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec iov = { &in, sizeof(in) };
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1,
        .msg_control = &control, .msg_controllen = sizeof(control),
    };
    ssize_t n = recvmsg(p->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    if (n <= 0) {
        if (n == 0) {
            peer_close(p);
        }
        return false;
    }
    g_assert(n >= (ssize_t)sizeof(in.head));
    switch (in.head.type) {
    case WIRE_WELCOME: {
        int fds[2];

        g_assert(control.head.cmsg_type == SCM_RIGHTS);
        memcpy(fds, CMSG_DATA(&control.head), sizeof(fds));
        close(fds[0]);
        welcomed(p, &in.welcome, fds[1]);
        break;
    }
    case WIRE_ANSWER:
    case WIRE_TAKEN:
        check_slots(p, &in.slots);
        break;
    case WIRE_NEWS:
        check_news(p, &in.news);
        break;
    }
    return true;
}

static void peer_read(Peer *p)
{
    while (p->fd >= 0 && peer_read_one(p)) {
        continue;
    }
}

static void peer_connect(Peer *p)
{
    int pair[2];
    Client *c;

    peer_close(p);
    g_assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK,
                        0, pair) == 0);
    p->fd = pair[0];
    c = server_connect(&w.s, pair[1]);
    g_assert(conn_identify(conn_fd(c->conn), 1) == 0);
}

static void say(Peer *p, const void *message, size_t len)
{
    if (p->fd >= 0) {
        send(p->fd, message, len, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

static void say_hello(Peer *p)
{
    uint8_t how = byte();
    const Peer *other = &w.peer[how >> 4 & 3];
    WireHello h = {
        .head = { WIRE_HELLO, 0, p->seq },
        .magic = WIRE_MAGIC + (how == 255),
        .version = WIRE_VERSION + (how == 254),
        .pages = how == 253 ? UINT64_MAX : 1000,
        .name = "fuzz",
    };

    if (how & 1) {
        memcpy(h.cookie, other->cookie, sizeof(h.cookie));
    }
    say(p, &h, sizeof(h));
}

static Question *question(Peer *p)
{
    Question *q = &p->question[++p->seq % QUESTIONS];

    q->n = 1 + byte() % PAGES_MAX;
    for (unsigned i = 0; i < q->n; i++) {
        q->content[i] = byte() % CONTENTS;
    }
    return q;
}

static void say_ask(Peer *p)
{
    const Question *q = question(p);
    struct {
        WireHead head;
        uint64_t hash[PAGES_MAX];
    } ask = { { WIRE_ASK, q->n, p->seq }, { 0 } };

    for (unsigned i = 0; i < q->n; i++) {
        ask.hash[i] = w.hash[q->content[i]];
    }
    say(p, &ask, sizeof(ask.head) + q->n * sizeof(ask.hash[0]));
}

static void daemon_runs(unsigned turns)
{
    while (turns-- && g_main_context_iteration(NULL, FALSE)) {
        continue;
    }
}

/* Not before what was offered there was read. */
static void ring_fill(Peer *p, unsigned first, const Question *q)
{
    char page[PAGE_BYTES];

    for (unsigned i = 0; i < 4; i++) {
        daemon_runs(1000);
        peer_read(p);
    }
    for (unsigned i = 0; i < q->n && p->ring >= 0; i++) {
        page_make(page, q->content[i]);
        if (pwrite(p->ring, page, PAGE_BYTES,
                   (off_t)((first + i) % RING_PAGES) * PAGE_BYTES) < 0) {
            break;
        }
    }
}

static void say_offer(Peer *p, WireType type)
{
    Question *q = question(p);
    WireOffer o = { { type, 0, p->seq }, .node = -1 };
    uint8_t how = byte();

    q->n = type == WIRE_REPEAT ? 1 : q->n;
    o.head.count = q->n;
    o.first = how & 1 ? RING_PAGES - 8 + (how >> 4) : how >> 4;
    o.want = type == WIRE_REPEAT ? 1 + two_bytes() % 600 : how == 254;
    o.node = how == 252 ? 0 : -1;
    ring_fill(p, o.first, q);
    say(p, &o, sizeof(o));
}

static void say_grow(Peer *p)
{
    WireBlock b = { { WIRE_GROW, 0, ++p->seq }, 0, 0 };

    b.first = number();
    b.length = number();
    say(p, &b, sizeof(b));
}

static void say_pairs(Peer *p, WireType type)
{
    struct {
        WireHead head;
        WirePair pair[PAGES_MAX];
    } pairs = { { type, 1 + byte() % PAGES_MAX, 0 }, { { 0 } } };

    if (type == WIRE_HELD) {
        uint8_t seq = byte();

        pairs.head.count -= seq & 1;
        pairs.head.seq = seq >> 6;
    }
    for (unsigned i = 0; i < pairs.head.count; i++) {
        pairs.pair[i].slot = number();
        pairs.pair[i].holds = 1 + byte() % 4;
    }
    say(p, &pairs, sizeof(pairs.head) +
                   pairs.head.count * sizeof(pairs.pair[0]));
}

/* What its member holds in truth, or what is left of it. */
static void say_held(Peer *p)
{
    static struct {
        WireHead head;
        WirePair pair[WIRE_PAIRS];
    } held;
    const Member *m = member_of(p);
    unsigned some = byte() % 4;

    held.head = (WireHead) { WIRE_HELD, 0, 0 };
    for (uint32_t s = 0; m && s < SLOTS && held.head.count < WIRE_PAIRS; s++) {
        uint32_t n = holds_of(&m->held.holds, s);

        if (n && (!some || s % 4 < some)) {
            held.pair[held.head.count++] = (WirePair) { s, n };
        }
    }
    say(p, &held, sizeof(held.head) + held.head.count * sizeof(WirePair));
}

static void say_raw(Peer *p)
{
    union {
        WireHead head;
        uint8_t bytes[256];
    } raw = { .bytes = { 0 } };
    unsigned n = byte();

    for (unsigned i = 0; i < n; i++) {
        raw.bytes[i] = byte();
    }
    if (n >= sizeof(raw.head)) {
        raw.head.type %= WIRE_ROOM + 2;
    }
    say(p, &raw, n);
}

static void say_status(Peer *p)
{
    WireHead status = { WIRE_STATUS, 0, 0 };

    say(p, &status, sizeof(status));
}

static void say_room(Peer *p)
{
    WireRoom room = { { WIRE_ROOM, 0, 0 }, number(), byte() };

    say(p, &room, sizeof(room));
}

/* Its process exits. */
static void member_exits(Member *m)
{
    if (m) {
        g_source_remove(m->exit_watch);
        m->exit_watch = 0;
        work_leave(&w.s, m);
    }
}

static void deed(void)
{
    uint8_t what = byte();
    Peer *p = &w.peer[what >> 4 & (CLIENTS - 1)];

    switch (what & 15) {
    case 0:
        peer_connect(p);
        break;
    case 1:
        say_hello(p);
        break;
    case 2:
    case 3:
        say_ask(p);
        break;
    case 4:
    case 5:
        say_offer(p, WIRE_OFFER);
        break;
    case 6:
        say_offer(p, WIRE_REPEAT);
        break;
    case 7:
        say_grow(p);
        break;
    case 8:
        say_pairs(p, WIRE_DROP);
        break;
    case 9:
        say_pairs(p, WIRE_HELD);
        break;
    case 10:
        say_held(p);
        break;
    case 11:
        (byte() & 1 ? say_status : say_room)(p);
        break;
    case 12:
        say_raw(p);
        break;
    case 13:
        member_exits(member_of(p));
        break;
    case 14:
        peer_close(p);
        break;
    case 15:
        peer_connect(p);
        say_hello(p);
        break;
    }
    if (!(what & 0x80)) {
        daemon_runs(1 + (what & 0x40));
        for (unsigned i = 0; i < CLIENTS; i++) {
            peer_read(&w.peer[i]);
        }
    }
}

/* Nobody connects to it. */
static int listener(void)
{
    struct sockaddr name = { .sa_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    /* the kernel chooses a name */
    g_assert(fd >= 0 && bind(fd, &name, sizeof(name.sa_family)) == 0);
    g_assert(sys.listen(fd, 1) == 0);
    return fd;
}

static void world_begin(const uint8_t *data, size_t size)
{
    GroupConfig config = { .slots = SLOTS, .max_holds = 8, .max_members = 64,
                           .share = 60, .key = 42, .root = "/" };
    char path[64], page[PAGE_BYTES];

    w = (World) { .at = data, .end = data + size };
    w.file = (PoolFile) { .kind = POOLFILE_TMPFS };
    w.file.fd = memfd_create("fuzz-pool", MFD_CLOEXEC);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", w.file.fd);
    w.file.map_fd = open(path, O_RDONLY | O_CLOEXEC);
    g_assert(w.file.fd >= 0 && w.file.map_fd >= 0);
    g_assert(server_prepare(&w.s, &config, &w.file, listener()) == 0);
    w.s.generation = 7;
    server_start(&w.s);
    for (unsigned i = 0; i < CONTENTS; i++) {
        page_make(page, i);
        w.hash[i] = hash_page(&w.s.group.hasher, page);
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        w.peer[i].fd = w.peer[i].ring = -1;
    }
}

static void world_end(void)
{
    struct stat st;

    for (unsigned i = 0; i < CLIENTS; i++) {
        peer_close(&w.peer[i]);
        if (w.peer[i].ring >= 0) {
            close(w.peer[i].ring);
        }
    }
    daemon_runs(100000);    /* who has said HELLO is a member all the same */
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        Member *m = (Member *)w.s.group.member[i];

        if (m && m->exit_watch) {
            member_exits(m);
        }
    }
    daemon_runs(100000);
    g_assert(w.s.group.members == 0 && w.s.group.used == 0);
    g_assert(w.s.group.pool.sharing == 0 && w.s.group.index.count == 0);
    pool_flush(&w.s.group.pool);
    g_assert(fstat(w.file.fd, &st) == 0 && st.st_blocks == 0);
    server_free(&w.s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > BYTES_MAX) {
        return 0;
    }
    world_begin(data, size);
    while (w.at < w.end) {
        deed();
        g_assert(group_check(&w.s.group, w.s.group.pool.top) == 0);
    }
    world_end();
    return 0;
}

#ifndef KSM_LIBFUZZER
static void run_file(const char *path)
{
    g_autoptr(GError) error = NULL;
    g_autofree char *data = NULL;
    gsize size;

    if (!g_file_get_contents(path, &data, &size, &error)) {
        g_error("%s", error->message);
    }
    LLVMFuzzerTestOneInput((uint8_t *)data, size);
}

static volatile sig_atomic_t seed_now;

static void tell_seed(int number)
{
    char text[] = "# of --seed 0000000000\n";
    unsigned seed = seed_now;

    for (char *c = text + sizeof(text) - 3; seed; c--, seed /= 10) {
        *c = '0' + seed % 10;
    }
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0) {
        _exit(2);
    }
}

/* Deeds at random: most of them make sense. */
static void run_seed(uint32_t seed)
{
    g_autoptr(GRand) rand = g_rand_new_with_seed(seed);
    size_t size = g_rand_int_range(rand, 1, BYTES_MAX);
    g_autofree uint8_t *data = g_malloc(size);

    for (size_t i = 0; i < size; i++) {
        data[i] = g_rand_int(rand);
    }
    for (unsigned i = 0; i < CLIENTS && 2 * i + 1 < size; i++) {
        data[2 * i] = i << 4 | 15;
        data[2 * i + 1] = 0;
    }
    LLVMFuzzerTestOneInput(data, size);
}

int main(int argc, char **argv)
{
    const struct sigaction tell = { .sa_handler = tell_seed };
    int seconds = 10, seed = 1;
    const GOptionEntry entries[] = {
        { "seconds", 0, 0, G_OPTION_ARG_INT, &seconds, "how long", "N" },
        { "seed", 0, 0, G_OPTION_ARG_INT, &seed, "the first one", "N" },
        { NULL, 0, 0, 0, NULL, NULL, NULL },
    };
    g_autoptr(GOptionContext) context = g_option_context_new("[FILE...]");
    g_autoptr(GError) error = NULL;
    gint64 end;
    int first = seed;

    g_option_context_add_main_entries(context, entries, NULL);
    if (!g_option_context_parse(context, &argc, &argv, &error)) {
        g_printerr("%s\n", error->message);
        return 2;
    }
    for (int i = 1; i < argc; i++) {
        run_file(argv[i]);
    }
    sigaction(SIGABRT, &tell, NULL);
    end = g_get_monotonic_time() + (argc > 1 ? 0 : seconds) * G_USEC_PER_SEC;
    while (g_get_monotonic_time() < end) {
        seed_now = seed;
        run_seed(seed++);
    }
    printf("ok 1 %d files, seeds %d to %d\n1..1\n", argc - 1, first, seed - 1);
    return 0;
}
#endif
