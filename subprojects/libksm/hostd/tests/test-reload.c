/*
 * hostd tests: a daemon that is replaced in the middle of conversations
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The real program, over its socket: told to reload again and again, while a
 * member offers, looks at what it got, and drops.  And one whose image is not
 * good: it must not go on.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <glib.h>

#include "base/page.h"
#include "share/wire.h"
#include "socket.h"

#define PAGES   64u
#define RELOADS 12u
#define BLOCK   0x40000000u     /* content that nothing else has */

static const char *program;
static char *directory, *path, *notify_path;
static int notified;        /* what the daemon tells systemd */

typedef struct Peer {
    int fd, pool, ring;
    char *pages;
    WireWelcome welcome;
    uint32_t slot[PAGES];
} Peer;

static pid_t start(const char *file)
{
    pid_t pid = fork();

    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);   /* no test, no daemon */
        execl(file, file, "--socket", path, "--size", "32M", NULL);
        _exit(127);
    }
    g_assert(pid > 0);
    return pid;
}

static pid_t daemon_start(void)
{
    return start(program);
}

static int peer_connect(void)
{
    struct timeval patience = { .tv_sec = 10 };
    int fd = -1;

    for (unsigned i = 0; i < 500 && fd < 0; i++) {
        fd = socket_connect(path);
        g_usleep(fd < 0 ? 10000 : 0);
    }
    g_assert(fd >= 0);
    g_assert(fcntl(fd, F_SETFL, 0) == 0);
    g_assert(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience,
                        sizeof(patience)) == 0);
    return fd;
}

static void welcome_receive(Peer *p)
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec iov = { &p->welcome, sizeof(p->welcome) };
    struct msghdr m = {
        .msg_iov = &iov,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof(control.bytes),
    };
    int fds[2];

    g_assert(recvmsg(p->fd, &m, 0) == sizeof(p->welcome));
    g_assert(p->welcome.head.type == WIRE_WELCOME);
    g_assert(control.head.cmsg_type == SCM_RIGHTS);
    memcpy(fds, CMSG_DATA(&control.head), sizeof(fds));
    p->pool = fds[0];
    p->ring = fds[1];
    p->pages = mmap(NULL, p->welcome.ring_pages * PAGE_BYTES,
                    PROT_READ | PROT_WRITE, MAP_SHARED, p->ring, 0);
    g_assert(p->pages != MAP_FAILED);
}

static void peer_join(Peer *p, const char *name)
{
    WireHello h = {
        .head = { .type = WIRE_HELLO },
        .magic = WIRE_MAGIC,
        .version = WIRE_VERSION,
        .pages = 100000,
    };

    g_strlcpy(h.name, name, sizeof(h.name));
    p->fd = peer_connect();
    g_assert(send(p->fd, &h, sizeof(h), 0) == sizeof(h));
    welcome_receive(p);
}

static void peer_leave(Peer *p)
{
    munmap(p->pages, p->welcome.ring_pages * PAGE_BYTES);
    close(p->pool);
    close(p->ring);
    close(p->fd);
}

static void page_make(char *page, uint32_t content)
{
    for (unsigned i = 0; i < PAGE_BYTES / 4; i++) {
        memcpy(page + 4 * i, &(uint32_t) { content + i * 7 }, 4);
    }
}

static void offer_send(Peer *p, uint32_t content)
{
    WireOffer o = {
        .head = { .type = WIRE_OFFER, .count = PAGES, .seq = content },
        .node = -1,
    };

    for (unsigned i = 0; i < PAGES; i++) {
        page_make(p->pages + i * PAGE_BYTES, content + i);
    }
    g_assert(send(p->fd, &o, sizeof(o), 0) == sizeof(o));
}

static void taken_receive(Peer *p, uint32_t content)
{
    struct {
        WireHead head;
        uint32_t slot[PAGES];
    } taken;

    g_assert(recv(p->fd, &taken, sizeof(taken), 0) == sizeof(taken));
    g_assert(taken.head.type == WIRE_TAKEN);
    g_assert(taken.head.seq == content);
    memcpy(p->slot, taken.slot, sizeof(p->slot));
}

static void offer(Peer *p, uint32_t content)
{
    offer_send(p, content);
    taken_receive(p, content);
}

static void look(Peer *p, uint32_t content)
{
    char have[PAGE_BYTES], want[PAGE_BYTES];

    for (unsigned i = 0; i < PAGES; i++) {
        g_assert(p->slot[i] < p->welcome.slots);
        page_make(want, content + i);
        g_assert(pread(p->pool, have, PAGE_BYTES,
                       (off_t)p->slot[i] * PAGE_BYTES) == PAGE_BYTES);
        g_assert(memcmp(have, want, PAGE_BYTES) == 0);
    }
}

static void drop(Peer *p)
{
    struct {
        WireHead head;
        WirePair pair[PAGES];
    } d = { .head = { .type = WIRE_DROP, .count = PAGES } };

    for (unsigned i = 0; i < PAGES; i++) {
        d.pair[i] = (WirePair) { p->slot[i], 1 };
    }
    g_assert(send(p->fd, &d, sizeof(d), 0) == sizeof(d));
}

/* A block of @want slots, by a REPEAT; or longer, by a GROW. */
static uint32_t block(Peer *p, uint32_t first, unsigned want, uint32_t content)
{
    WireOffer repeat = {
        .head = { .type = WIRE_REPEAT, .count = 1 }, .node = -1, .want = want,
    };
    WireBlock grow = { { .type = WIRE_GROW }, first, want }, b;
    char have[PAGE_BYTES];
    struct {
        WireHead head;
        uint32_t slot;
    } taken;

    page_make(p->pages, content);
    if (first == WIRE_NONE) {
        g_assert(send(p->fd, &repeat, sizeof(repeat), 0) == sizeof(repeat));
    } else {
        g_assert(send(p->fd, &grow, sizeof(grow), 0) == sizeof(grow));
    }
    g_assert(recv(p->fd, &b, sizeof(b), 0) == sizeof(b));
    g_assert(b.head.type == WIRE_BLOCK && b.length >= want);
    if (first == WIRE_NONE) {
        g_assert(recv(p->fd, &taken, sizeof(taken), 0) == 20);
        g_assert(taken.slot == b.first);
    }
    for (unsigned i = 0; i < want; i++) {
        g_assert(pread(p->pool, have, PAGE_BYTES,
                       (off_t)(b.first + i) * PAGE_BYTES) == PAGE_BYTES);
        g_assert(memcmp(have, p->pages, PAGE_BYTES) == 0);
    }
    return b.first;
}

/* What the daemon says of the group, and of the member that asks. */
static WireState status_of(Peer *p, WireMember *m)
{
    WireHead question = { .type = WIRE_STATUS };
    struct {
        WireState s;
        WireMember m;
    } state;

    g_assert(send(p->fd, &question, sizeof(question), 0) == sizeof(question));
    g_assert(recv(p->fd, &state, sizeof(state), 0) == sizeof(state));
    g_assert(state.s.head.type == WIRE_STATE);
    *m = state.m;
    return state.s;
}

static WireState status(Peer *p)
{
    WireMember m;

    return status_of(p, &m);
}

static void daemon_end(pid_t pid)
{
    int state;

    g_assert(kill(pid, SIGTERM) == 0);
    g_assert(waitpid(pid, &state, 0) == pid);
    g_assert(WIFEXITED(state) && WEXITSTATUS(state) == 0);
    g_assert(!g_file_test(path, G_FILE_TEST_EXISTS));
}

static int notify_open(void)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    g_strlcpy(a.sun_path, notify_path, sizeof(a.sun_path));
    g_assert(bind(fd, (struct sockaddr *)&a, sizeof(a)) == 0);
    return fd;
}

/* The next thing the daemon says. */
static void notify_expect(const char *what)
{
    char text[256] = "";

    for (unsigned i = 0; i < 1000 && !text[0]; i++) {
        if (recv(notified, text, sizeof(text) - 1, 0) < 0) {
            g_usleep(10000);
        }
    }
    g_assert(g_str_has_prefix(text, what));
}

static void notify_forget(void)
{
    char byte;

    while (recv(notified, &byte, 1, 0) >= 0) {
        continue;
    }
}

static void test_conversation(void)
{
    pid_t daemon = daemon_start();
    Peer still, busy;
    WireState before, after;
    WireMember of_still;
    unsigned turns = 0;
    uint32_t first;

    notify_forget();
    peer_join(&still, "still");
    notify_expect("READY=1");
    peer_join(&busy, "busy");
    offer(&still, 1000000);
    first = block(&still, WIRE_NONE, 40, BLOCK);
    before = status(&still);
    for (unsigned i = 0; i < RELOADS; i++) {
        gint64 until = g_get_monotonic_time() + 20000;

        g_assert(kill(daemon, SIGHUP) == 0);
        offer_send(&busy, 100 * turns);
        notify_expect("RELOADING=1\nMONOTONIC_USEC=");
        notify_expect("READY=1\nSTATUS=reloaded");
        taken_receive(&busy, 100 * turns);
        look(&busy, 100 * turns++);
        drop(&busy);
        while (g_get_monotonic_time() < until) {
            offer(&busy, 100 * turns);
            look(&busy, 100 * turns++);
            drop(&busy);
        }
    }
    /* nobody but the daemon knew of it */
    look(&still, 1000000);
    status(&busy);
    after = status_of(&still, &of_still);
    g_assert(of_still.holds == PAGES + 1);
    g_assert(of_still.held == PAGES + 40);
    g_assert(of_still.share == 1000 * (PAGES + 40));
    g_assert(after.generation == before.generation);
    g_assert(after.members == 2);
    g_assert(after.holds == PAGES + 1);
    g_assert(after.used == PAGES + 40);
    g_assert(after.offered == (turns + 1) * PAGES + 1);
    g_assert(block(&still, first, 100, BLOCK) == first);
    /* what was found before is found again */
    offer(&busy, 1000000);
    g_assert(memcmp(busy.slot, still.slot, sizeof(still.slot)) == 0);
    drop(&still);
    look(&busy, 1000000);
    peer_leave(&still);
    peer_leave(&busy);
    daemon_end(daemon);
}

/* A member that exits while the daemon is replaced is gone after it. */
static void test_exit(void)
{
    pid_t daemon = daemon_start(), child;
    int told[2];
    char byte;
    Peer still;
    WireState state;

    peer_join(&still, "still");
    g_assert(pipe(told) == 0);
    child = fork();
    if (child == 0) {
        Peer p;

        peer_join(&p, "short");
        offer(&p, 5);
        (void)!write(told[1], "x", 1);
        pause();
    }
    g_assert(read(told[0], &byte, 1) == 1);
    g_assert(status(&still).holds == PAGES);
    g_assert(kill(daemon, SIGHUP) == 0);
    g_assert(kill(child, SIGKILL) == 0);
    g_assert(waitpid(child, NULL, 0) == child);
    for (unsigned i = 0; i < 500; i++) {
        state = status(&still);
        if (state.members == 1) {
            break;
        }
        g_usleep(10000);
    }
    g_assert(state.members == 1);
    g_assert(state.holds == 0);
    g_assert(state.used == 0);
    peer_leave(&still);
    close(told[0]);
    close(told[1]);
    daemon_end(daemon);
}

static struct {
    WireHead head;
    uint64_t hash[WIRE_ASKS];
} ask;

static struct {
    WireHead head;
    uint32_t slot[WIRE_ASKS];
} answer;

/* How many of as many hashes as are in two messages are wanted. */
static unsigned wanted(Peer *p)
{
    unsigned n = 0;

    for (uint64_t i = 0; i < 2 * WIRE_ASKS; i++) {
        /* the highest bits choose where each is noted */
        ask.hash[i % WIRE_ASKS] = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
        if (i % WIRE_ASKS == WIRE_ASKS - 1) {
            ask.head = (WireHead) { WIRE_ASK, WIRE_ASKS, i };
            g_assert(send(p->fd, &ask, sizeof(ask), 0) == sizeof(ask));
            g_assert(recv(p->fd, &answer, sizeof(answer), 0) ==
                     sizeof(answer));
            for (unsigned k = 0; k < WIRE_ASKS; k++) {
                n += answer.slot[k] == WIRE_WANTED;
            }
        }
    }
    return n;
}

/* Who was there before may ask as much as before. */
static void test_asks(void)
{
    pid_t daemon;
    Peer a, b;

    notify_forget();
    daemon = daemon_start();
    peer_join(&a, "a");
    notify_expect("READY=1");
    peer_join(&b, "b");
    g_assert(kill(daemon, SIGHUP) == 0);
    notify_expect("RELOADING=1");
    notify_expect("READY=1\nSTATUS=reloaded");
    g_assert(wanted(&a) == 0);
    g_assert(wanted(&b) > 2 * WIRE_ASKS * 99 / 100);
    peer_leave(&a);
    peer_leave(&b);
    daemon_end(daemon);
}

/* What waits for a member that does not read is not lost either. */
static void test_deaf(void)
{
    pid_t daemon;
    unsigned sent = 0;
    Peer p;

    notify_forget();
    daemon = daemon_start();
    peer_join(&p, "deaf");
    notify_expect("READY=1");
    for (unsigned idle = 0; idle < 20; ) {
        ask.head = (WireHead) { WIRE_ASK, WIRE_ASKS, sent };
        if (send(p.fd, &ask, sizeof(ask), MSG_DONTWAIT) == sizeof(ask)) {
            sent++;
            idle = 0;
        } else {
            g_usleep(5000);
            idle++;
        }
    }
    g_assert(sent > 4);
    for (unsigned i = 0; i < 3; i++) {
        g_assert(kill(daemon, SIGHUP) == 0);
        notify_expect("RELOADING=1");
        notify_expect("READY=1\nSTATUS=reloaded");
    }
    for (unsigned i = 0; i < sent; i++) {
        g_assert(recv(p.fd, &answer, sizeof(answer), 0) == sizeof(answer));
        g_assert(answer.head.type == WIRE_ANSWER && answer.head.seq == i);
    }
    peer_leave(&p);
    daemon_end(daemon);
}

/* The file at its path is not there any more: it goes on as it is. */
static void test_no_program(void)
{
    g_autofree char *copy = g_build_filename(directory, "copy", NULL);
    g_autofree char *bytes = NULL;
    gsize len;
    pid_t daemon;
    Peer p;

    g_assert(g_file_get_contents(program, &bytes, &len, NULL));
    g_assert(g_file_set_contents_full(copy, bytes, len, 0, 0700, NULL));
    notify_forget();
    daemon = start(copy);
    peer_join(&p, "still");
    notify_expect("READY=1");
    offer(&p, 5);
    unlink(copy);
    g_assert(kill(daemon, SIGHUP) == 0);
    notify_expect("RELOADING=1");
    notify_expect("READY=1\nSTATUS=the reload failed");
    look(&p, 5);
    offer(&p, 500);
    g_assert(status(&p).holds == 2 * PAGES);
    /* its package was updated */
    g_assert(g_file_set_contents_full(copy, bytes, len, 0, 0700, NULL));
    g_assert(kill(daemon, SIGHUP) == 0);
    notify_expect("RELOADING=1");
    notify_expect("READY=1\nSTATUS=reloaded");
    g_assert(status(&p).holds == 2 * PAGES);
    unlink(copy);
    peer_leave(&p);
    daemon_end(daemon);
}

/* Nothing is done with an image that is not good. */
static void test_bad_image(void)
{
    int fd = memfd_create("image", 0), state;
    g_autofree char *number = g_strdup_printf("%d", fd);
    pid_t pid;

    g_assert(write(fd, "not an image, but long enough for its head", 42) == 42);
    pid = fork();
    if (pid == 0) {
        g_setenv("KSM_POOLD_IMAGE", number, TRUE);
        execl(program, program, "--socket", path, NULL);
        _exit(127);
    }
    g_assert(waitpid(pid, &state, 0) == pid);
    g_assert(WIFEXITED(state));
    g_assert(WEXITSTATUS(state) == EXIT_FAILURE);
    close(fd);
}

int main(int argc, char **argv)
{
    int ret;

    g_test_init(&argc, &argv, NULL);
    program = g_getenv("KSM_POOLD");
    g_assert(program);
    signal(SIGPIPE, SIG_IGN);
    directory = g_dir_make_tmp("poold-XXXXXX", NULL);
    path = g_build_filename(directory, "socket", NULL);
    notify_path = g_build_filename(directory, "notify", NULL);
    notified = notify_open();
    g_setenv("NOTIFY_SOCKET", notify_path, TRUE);
    g_test_add_func("/reload/conversation", test_conversation);
    g_test_add_func("/reload/exit", test_exit);
    g_test_add_func("/reload/asks", test_asks);
    g_test_add_func("/reload/deaf", test_deaf);
    g_test_add_func("/reload/no-program", test_no_program);
    g_test_add_func("/reload/bad-image", test_bad_image);
    ret = g_test_run();
    unlink(notify_path);
    rmdir(directory);
    g_free(notify_path);
    g_free(directory);
    g_free(path);
    return ret;
}
