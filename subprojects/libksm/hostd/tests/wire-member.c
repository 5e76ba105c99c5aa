/*
 * A member for tests of the daemon: messages as they are
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <glib/gstdio.h>

/* The test's own hash: the daemon's may err. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "wire-member.h"

#define MAX_FDS 253         /* the kernel allows no more in a packet */

static int64_t now_ms(void)
{
    return g_get_monotonic_time() / 1000;
}

/* 0: it has passed. */
static int ms_until(int64_t end)
{
    int64_t now = now_ms();

    return end > now ? end - now : 0;
}

static int connect_to(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    g_assert(fd >= 0);
    g_assert(strlen(path) < sizeof(a.sun_path));
    strcpy(a.sun_path, path);
    if (connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0) {
        int err = errno;

        close(fd);
        return -err;
    }
    return fd;
}

static int become(int uid)
{
    return setgroups(0, NULL) || setresgid(uid, uid, uid) ||
           setresuid(uid, uid, uid) ? -errno : 0;
}

void poold_start(Poold *d)
{
    int64_t end = now_ms() + PATIENCE_MS;
    pid_t parent = getpid();
    int fd;

    g_assert(d->pid == 0);
    d->pid = fork();
    if (!d->pid) {
        if (d->files) {
            struct rlimit few = { d->files, d->files };

            setrlimit(RLIMIT_NOFILE, &few);
        }
        if (d->uid && become(d->uid) < 0) {
            _exit(1);
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) {
            _exit(1);
        }
        /* TAP is the test's */
        dup2(STDERR_FILENO, STDOUT_FILENO);
        execv(d->options[0], d->options);
        fprintf(stderr, "# %s: %s\n", d->options[0], strerror(errno));
        _exit(127);
    }
    while ((fd = connect_to(d->socket)) < 0) {
        g_assert(waitpid(d->pid, NULL, WNOHANG) == 0);
        g_assert(now_ms() < end);
        g_usleep(2000);
    }
    close(fd);
    g_free(poold_state(d));
}

static void add_number(GStrvBuilder *b, const char *option, unsigned long n)
{
    char *s = g_strdup_printf("%lu", n);

    g_strv_builder_add_many(b, option, s, NULL);
    g_free(s);
}

Poold *poold_new(const PooldConfig *config)
{
    Poold *d = g_new0(Poold, 1);
    GStrvBuilder *b = g_strv_builder_new();
    const char *program = g_getenv("KSM_POOLD");

    g_assert(program);
    d->dir = g_dir_make_tmp("ksm-poold-XXXXXX", NULL);
    g_assert(d->dir);
    d->socket = g_build_filename(d->dir, "socket", NULL);
    g_strv_builder_add(b, program);
    g_strv_builder_add(b, "--socket");
    g_strv_builder_add(b, d->socket);
    d->files = config ? config->files : 0;
    if (config && config->uid) {
        d->uid = config->uid;
        g_assert(chown(d->dir, d->uid, d->uid) == 0);
    }
    if (config && config->slots) {
        add_number(b, "--size", config->slots * PAGE);
    }
    if (config && config->share) {
        add_number(b, "--share", config->share);
    }
    if (config && config->members) {
        add_number(b, "--members", config->members);
    }
    d->options = g_strv_builder_end(b);
    g_strv_builder_unref(b);
    poold_start(d);
    return d;
}

static int poold_reap(Poold *d)
{
    int64_t end = now_ms() + PATIENCE_MS;
    int status;

    while (!waitpid(d->pid, &status, WNOHANG)) {
        g_assert(now_ms() < end);
        g_usleep(1000);
    }
    d->pid = 0;
    return status;
}

void poold_kill(Poold *d)
{
    kill(d->pid, SIGKILL);
    poold_reap(d);
}

void poold_free(Poold *d)
{
    if (d->pid) {
        int status;

        /* it must have lived till now */
        g_assert(kill(d->pid, SIGTERM) == 0);
        status = poold_reap(d);
        g_assert((WIFEXITED(status) && WEXITSTATUS(status) == 0) ||
                 (WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM));
    }
    g_unlink(d->socket);
    g_rmdir(d->dir);
    g_free(d->dir);
    g_free(d->socket);
    g_strfreev(d->options);
    g_free(d);
}

unsigned long poold_rss(const Poold *d)
{
    char *path = g_strdup_printf("/proc/%d/status", d->pid), *text;
    unsigned long kib = 0;

    g_assert(g_file_get_contents(path, &text, NULL, NULL));
    /* not RssShmem: the pool is mapped there, perhaps */
    g_assert(sscanf(strstr(text, "RssAnon:"), "RssAnon: %lu", &kib) == 1);
    g_free(text);
    g_free(path);
    return kib;
}

unsigned poold_fds(const Poold *d)
{
    char *path = g_strdup_printf("/proc/%d/fd", d->pid);
    GDir *dir = g_dir_open(path, 0, NULL);
    unsigned n = 0;

    g_assert(dir);
    while (g_dir_read_name(dir)) {
        n++;
    }
    g_dir_close(dir);
    g_free(path);
    return n;
}

/* A packet with @n times the descriptor @fd; 0 or -errno. */
static int send_packet(int socket, const void *msg, size_t len, int fd,
                       unsigned n)
{
    union {
        char buf[CMSG_SPACE(sizeof(int) * MAX_FDS)];
        struct cmsghdr align;
    } u = { };
    struct iovec iov = { .iov_base = (void *)msg, .iov_len = len };
    struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };

    g_assert(n <= MAX_FDS);
    if (n) {
        struct cmsghdr *c;

        m.msg_control = u.buf;
        m.msg_controllen = CMSG_SPACE(sizeof(int) * n);
        c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * n);
        for (unsigned i = 0; i < n; i++) {
            memcpy(CMSG_DATA(c) + i * sizeof(int), &fd, sizeof(int));
        }
    }
    while (sendmsg(socket, &m, MSG_NOSIGNAL) < 0) {
        if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

/* Up to two descriptors.  Bytes, 0 at the end, -errno. */
static ssize_t recv_packet(int socket, void *buf, size_t len, int fd[2])
{
    union {
        char buf[CMSG_SPACE(sizeof(int) * 2)];
        struct cmsghdr align;
    } u;
    struct iovec iov = { .iov_base = buf, .iov_len = len };
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1,
        .msg_control = u.buf, .msg_controllen = sizeof(u.buf),
    };
    ssize_t n;

    fd[0] = fd[1] = -1;
    do {
        n = recvmsg(socket, &m, MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        return -errno;
    }
    g_assert(!(m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)));
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        g_assert(c->cmsg_level == SOL_SOCKET);
        g_assert(c->cmsg_type == SCM_RIGHTS);
        memcpy(fd, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
    }
    return n;
}

static void G_GNUC_NORETURN proc_main(int control, int uid)
{
    static char buf[1 << 16];
    int fd[2], err;
    ssize_t n;

    if (uid >= 0 && become(uid) < 0) {
        _exit(1);
    }
    /* it went with the uid */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while ((n = recv_packet(control, buf, sizeof(buf), fd)) > 0) {
        err = send_packet(fd[0], buf, n, -1, 0);
        close(fd[0]);
        if (send_packet(control, &err, sizeof(err), -1, 0)) {
            break;
        }
    }
    _exit(0);
}

Proc *proc_new(int uid)
{
    Proc *p = g_new0(Proc, 1);
    int fd[2];

    g_assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fd) == 0);
    p->pid = fork();
    g_assert(p->pid >= 0);
    if (!p->pid) {
        /* connections of the test must end when the test closes them */
        dup2(fd[1], 3);
        close_range(4, ~0u, 0);
        proc_main(3, uid);
    }
    close(fd[1]);
    p->fd = fd[0];
    return p;
}

int proc_send(Proc *p, int socket, const void *msg, size_t len)
{
    int ret, none[2];

    g_assert(send_packet(p->fd, msg, len, socket, 1) == 0);
    g_assert(recv_packet(p->fd, &ret, sizeof(ret), none) == sizeof(ret));
    return ret;
}

void proc_kill(Proc *p)
{
    if (p->pid) {
        kill(p->pid, SIGKILL);
        g_assert(waitpid(p->pid, NULL, 0) == p->pid);
        p->pid = 0;
    }
}

void proc_free(Proc *p)
{
    proc_kill(p);
    close(p->fd);
    g_free(p);
}

Peer *peer_connect(const Poold *d)
{
    Peer *p = g_new0(Peer, 1);

    p->fd = connect_to(d->socket);
    g_assert(p->fd >= 0);
    p->pool_fd = p->ring_fd = -1;
    g_queue_init(&p->early);
    return p;
}

void peer_close(Peer *p)
{
    if (p->fd >= 0) {
        close(p->fd);
        p->fd = -1;
    }
}

void peer_free(Peer *p)
{
    peer_close(p);
    if (p->ring) {
        munmap(p->ring, p->welcome.ring_pages * PAGE);
    }
    if (p->pool_fd >= 0) {
        close(p->pool_fd);
    }
    if (p->ring_fd >= 0) {
        close(p->ring_fd);
    }
    g_queue_clear_full(&p->early, g_free);
    g_free(p);
}

int peer_send_fds(Peer *p, const void *msg, size_t len, int fd, unsigned n)
{
    return send_packet(p->fd, msg, len, fd, n);
}

int peer_send(Peer *p, const void *msg, size_t len)
{
    return send_packet(p->fd, msg, len, -1, 0);
}

static void must_send(Peer *p, const void *msg, size_t len)
{
    g_assert(peer_send(p, msg, len) == 0);
}

/* The length of a message with such a head; 0: none comes from a daemon. */
static size_t length_of(const WireHead *h)
{
    switch (h->type) {
    case WIRE_WELCOME:
        return h->count ? 0 : sizeof(WireWelcome);
    case WIRE_REFUSED:
        return h->count ? 0 : sizeof(WireRefused);
    case WIRE_ANSWER:
        return h->count - 1 < WIRE_ASKS ? sizeof(*h) + h->count * 4 : 0;
    case WIRE_TAKEN:
        return h->count - 1 < WIRE_OFFERS ? sizeof(*h) + h->count * 4 : 0;
    case WIRE_BLOCK:
        return h->count ? 0 : sizeof(WireBlock);
    case WIRE_NEWS:
        return h->count <= WIRE_PAIRS ?
               sizeof(*h) + h->count * sizeof(WireFound) : 0;
    case WIRE_STATE:
        return h->count <= 1024 ?
               sizeof(WireState) + h->count * sizeof(WireMember) : 0;
    default:
        return 0;
    }
}

static void check_slots(const Peer *p, const WireSlots *m, bool taken)
{
    for (uint32_t i = 0; i < m->head.count; i++) {
        uint32_t s = m->slot[i];

        if (s < p->welcome.slots) {
            continue;
        }
        if (taken) {
            g_assert(s == WIRE_FULL || s == WIRE_SHARE ||
                     s == WIRE_NO_MEMORY);
        } else {
            g_assert(s == WIRE_NONE || s == WIRE_WANTED ||
                     (s == WIRE_LEFT && p->says_room));
        }
    }
}

static void check_state(const WireState *m)
{
    g_assert(m->zero == 0);
    g_assert(m->used <= m->slots);
    for (uint32_t i = 0; i < m->head.count; i++) {
        g_assert(memchr(m->member[i].name, 0, 64));
        g_assert(m->member[i].connected <= 1);
    }
}

static void check_message(const Peer *p, const WireHead *h)
{
    const WireBlock *b = (const WireBlock *)h;
    const WireNews *news = (const WireNews *)h;

    switch (h->type) {
    case WIRE_REFUSED:
        g_assert(((const WireRefused *)h)->code - 1 < 5);
        g_assert(memchr(((const WireRefused *)h)->text, 0, 124));
        break;
    case WIRE_ANSWER:
    case WIRE_TAKEN:
        check_slots(p, (const WireSlots *)h, h->type == WIRE_TAKEN);
        break;
    case WIRE_BLOCK:
        g_assert(b->first % WIRE_BLOCK_MAX == 0);
        g_assert(b->length - 1 < WIRE_BLOCK_MAX);
        g_assert(b->first + b->length <= p->welcome.slots);
        break;
    case WIRE_NEWS:
        for (uint32_t i = 0; i < h->count; i++) {
            g_assert(news->found[i].slot < p->welcome.slots ||
                     (news->found[i].slot == WIRE_LEFT && p->says_room));
            g_assert(news->found[i].zero == 0);
        }
        break;
    case WIRE_STATE:
        check_state((const WireState *)h);
        break;
    default:
        break;
    }
}

static bool readable(int fd, int timeout_ms)
{
    struct pollfd f = { .fd = fd, .events = POLLIN };
    int64_t end = now_ms() + timeout_ms;
    int n;

    do {
        n = poll(&f, 1, ms_until(end));
    } while (n < 0 && errno == EINTR);
    return n > 0;
}

WireHead *peer_recv(Peer *p, int timeout_ms)
{
    static char buf[WIRE_MESSAGE_MAX + 1];
    const WireHead *h = (const WireHead *)buf;
    int fd[2];
    ssize_t n;

    if (p->fd < 0 || !readable(p->fd, timeout_ms)) {
        return NULL;
    }
    n = recv_packet(p->fd, buf, sizeof(buf), fd);
    if (n == -ECONNRESET) {
        /* the daemon left something unread; what it said is still there */
        n = recv_packet(p->fd, buf, sizeof(buf), fd);
    }
    if (n <= 0) {
        g_assert(n == 0 || n == -ECONNRESET);
        peer_close(p);
        return NULL;
    }
    g_assert(n >= sizeof(*h));
    g_assert(n == length_of(h));
    check_message(p, h);
    if (h->type == WIRE_WELCOME) {
        g_assert(p->pool_fd == -1);
        p->pool_fd = fd[0];
        p->ring_fd = fd[1];
    } else {
        g_assert(fd[0] == -1);
    }
    if (h->type == WIRE_REFUSED) {
        memcpy(&p->refused, buf, sizeof(p->refused));
    }
    return g_memdup2(buf, n);
}

WireHead *peer_wait(Peer *p, WireType type, int timeout_ms)
{
    int64_t end = now_ms() + timeout_ms;
    WireHead *h;

    for (GList *l = p->early.head; l; l = l->next) {
        h = l->data;
        if (h->type == type) {
            g_queue_delete_link(&p->early, l);
            return h;
        }
    }
    while ((h = peer_recv(p, ms_until(end)))) {
        if (h->type == type) {
            return h;
        }
        g_queue_push_tail(&p->early, h);
    }
    return NULL;
}

/* To the last question. */
static void *must_wait(Peer *p, WireType type)
{
    WireHead *h = peer_wait(p, type, PATIENCE_MS);

    if (!h) {
        g_error("no message of type %u; %s; refused: %u %s", type,
                p->fd < 0 ? "closed" : "silence", p->refused.code,
                p->refused.text);
    }
    g_assert(h->seq == p->seq);
    return h;
}

void peer_ends(Peer *p, WireRefusal code)
{
    int64_t end = now_ms() + PATIENCE_MS;

    while (p->fd >= 0) {
        g_assert(now_ms() < end);
        g_free(peer_recv(p, PATIENCE_MS));
    }
    if (code) {
        g_assert(p->refused.code == code);
    }
}

void peer_hello_fill(WireHello *hello)
{
    memset(hello, 0, sizeof(*hello));
    hello->head.type = WIRE_HELLO;
    hello->magic = WIRE_MAGIC;
    hello->version = WIRE_VERSION;
    hello->pages = 65536;
    strcpy(hello->name, "test");
}

bool peer_hello(Peer *p, const uint64_t *cookie)
{
    WireHello hello;
    WireHead *h;
    int ret;

    peer_hello_fill(&hello);
    hello.head.seq = ++p->seq;
    if (cookie) {
        memcpy(hello.cookie, cookie, sizeof(hello.cookie));
    }
    ret = p->proc ? proc_send(p->proc, p->fd, &hello, sizeof(hello)) :
          peer_send(p, &hello, sizeof(hello));
    if (ret) {
        /* too many: it was refused at once */
        g_assert(ret == -EPIPE);
    }
    h = peer_recv(p, PATIENCE_MS);
    if (!h || h->type == WIRE_REFUSED) {
        g_free(h);
        peer_ends(p, 0);
        return false;
    }
    g_assert(h->type == WIRE_WELCOME);
    g_assert(h->seq == p->seq);
    memcpy(&p->welcome, h, sizeof(p->welcome));
    g_free(h);
    g_assert(p->pool_fd >= 0);
    g_assert(p->ring_fd >= 0);
    p->ring = mmap(NULL, p->welcome.ring_pages * PAGE, PROT_READ | PROT_WRITE,
                   MAP_SHARED, p->ring_fd, 0);
    g_assert(p->ring != MAP_FAILED);
    return true;
}

Peer *peer_new(const Poold *d, Proc *proc)
{
    Peer *p = peer_connect(d);

    p->proc = proc;
    if (!peer_hello(p, NULL)) {
        g_error("refused: %u %s", p->refused.code, p->refused.text);
    }
    g_assert(p->welcome.resumed == 0);
    return p;
}

Peer *peer_resume(const Poold *d, const Peer *p)
{
    Peer *q = peer_connect(d);

    q->proc = p->proc;
    if (!peer_hello(q, p->welcome.cookie)) {
        g_error("refused: %u %s", q->refused.code, q->refused.text);
    }
    g_assert(q->welcome.resumed == 1);
    return q;
}

static WireHead *message_new(Peer *p, WireType type, uint32_t count,
                             size_t len)
{
    WireHead *h = g_malloc0(len);

    h->type = type;
    h->count = count;
    h->seq = ++p->seq;
    return h;
}

static void send_pairs(Peer *p, WireType type, const WirePair *pairs,
                       unsigned n, uint64_t seq)
{
    size_t len = sizeof(WirePairs) + n * sizeof(*pairs);
    WirePairs *m = g_malloc0(len);

    m->head = (WireHead) { .type = type, .count = n, .seq = seq };
    if (n) {
        memcpy(m->pair, pairs, n * sizeof(*pairs));
    }
    must_send(p, m, len);
    g_free(m);
}

void peer_send_held(Peer *p, const WirePair *pairs, unsigned n, uint64_t left)
{
    send_pairs(p, WIRE_HELD, pairs, n, left);
}

void peer_drop(Peer *p, uint32_t slot, uint32_t holds)
{
    WirePair pair = { .slot = slot, .holds = holds };

    send_pairs(p, WIRE_DROP, &pair, 1, 0);
}

void peer_room(Peer *p, uint64_t mappings, uint64_t waiting)
{
    WireRoom room = {
        .head = { .type = WIRE_ROOM },
        .mappings = mappings,
        .waiting = waiting,
    };

    must_send(p, &room, sizeof(room));
    p->says_room = true;
}

void peer_ask(Peer *p, const uint64_t *hash, unsigned n, uint32_t *slot)
{
    size_t len = sizeof(WireAsk) + n * sizeof(*hash);
    WireAsk *m = (WireAsk *)message_new(p, WIRE_ASK, n, len);
    WireSlots *a;

    memcpy(m->hash, hash, n * sizeof(*hash));
    must_send(p, m, len);
    a = must_wait(p, WIRE_ANSWER);
    g_assert(a->head.count == n);
    memcpy(slot, a->slot, n * sizeof(*slot));
    g_free(a);
    g_free(m);
}

uint32_t peer_ask_one(Peer *p, uint64_t hash)
{
    uint32_t slot;

    peer_ask(p, &hash, 1, &slot);
    return slot;
}

static void offer(Peer *p, const WireOffer *o, uint32_t *slot)
{
    WireSlots *a;

    must_send(p, o, sizeof(*o));
    a = must_wait(p, WIRE_TAKEN);
    g_assert(a->head.count == o->head.count);
    memcpy(slot, a->slot, a->head.count * sizeof(*slot));
    g_free(a);
}

void peer_offer(Peer *p, unsigned first, unsigned n, uint32_t domain,
                uint32_t *slot)
{
    WireOffer o = {
        .head = { .type = WIRE_OFFER, .count = n, .seq = ++p->seq },
        .first = first, .domain = domain, .node = -1,
    };

    offer(p, &o, slot);
}

uint32_t peer_offer_one(Peer *p, uint64_t content)
{
    uint32_t slot;

    page_fill(peer_page(p, 0), content);
    peer_offer(p, 0, 1, 0, &slot);
    return slot;
}

uint32_t peer_repeat(Peer *p, uint64_t content, unsigned want,
                     unsigned *length)
{
    WireOffer o = {
        .head = { .type = WIRE_REPEAT, .count = 1, .seq = ++p->seq },
        .node = -1, .want = want,
    };
    WireBlock *b;
    uint32_t slot;

    page_fill(peer_page(p, 0), content);
    offer(p, &o, &slot);
    /* it was before TAKEN, or it is too late */
    b = (WireBlock *)g_queue_peek_tail(&p->early);
    *length = 0;
    if (b && b->head.type == WIRE_BLOCK && b->first == slot) {
        *length = b->length;
        g_free(g_queue_pop_tail(&p->early));
    }
    return slot;
}

unsigned peer_grow(Peer *p, uint32_t first, unsigned want)
{
    WireBlock m = {
        .head = { .type = WIRE_GROW, .seq = ++p->seq },
        .first = first, .length = want,
    };
    WireBlock *b;
    unsigned length;

    must_send(p, &m, sizeof(m));
    b = must_wait(p, WIRE_BLOCK);
    g_assert(b->first == first);
    length = b->length;
    g_free(b);
    return length;
}

WireState *peer_state(Peer *p)
{
    WireHead m = { .type = WIRE_STATUS, .seq = ++p->seq };

    must_send(p, &m, sizeof(m));
    return must_wait(p, WIRE_STATE);
}

void peer_sync(Peer *p)
{
    g_free(peer_state(p));
}

void page_fill(void *page, uint64_t content)
{
    uint64_t *word = page, x = content * 0x9e3779b97f4a7c15ull + 1;

    for (unsigned i = 0; i < PAGE / sizeof(*word); i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word[i] = x;
    }
}

uint64_t peer_hash(const Peer *p, const void *page, uint32_t domain)
{
    return XXH3_64bits_withSeed(page, PAGE, p->welcome.key) ^ domain;
}

uint64_t peer_hash_of(const Peer *p, uint64_t content)
{
    char page[PAGE];

    page_fill(page, content);
    return peer_hash(p, page, 0);
}

char *peer_page(Peer *p, unsigned page)
{
    g_assert(page < p->welcome.ring_pages);
    return p->ring + page * PAGE;
}

void peer_read_slot(const Peer *p, uint32_t slot, void *page)
{
    g_assert(pread(p->pool_fd, page, PAGE, slot * PAGE) == PAGE);
}

bool peer_slot_has(const Peer *p, uint32_t slot, uint64_t content)
{
    char want[PAGE], have[PAGE];

    page_fill(want, content);
    peer_read_slot(p, slot, have);
    return memcmp(want, have, PAGE) == 0;
}

bool peer_slot_is_hole(const Peer *p, uint32_t slot)
{
    off_t at = lseek(p->pool_fd, slot * PAGE, SEEK_DATA);

    g_assert(at >= 0 || errno == ENXIO);
    return at != (off_t)(slot * PAGE);
}

bool peer_slot_punched(const Peer *p, uint32_t slot)
{
    int64_t end = now_ms() + PATIENCE_MS;

    while (!peer_slot_is_hole(p, slot)) {
        if (now_ms() > end) {
            return false;
        }
        g_usleep(1000);
    }
    return true;
}

WireState *poold_state(const Poold *d)
{
    Peer *p = peer_connect(d);
    WireState *s = peer_state(p);

    peer_free(p);
    return s;
}

bool poold_empties(const Poold *d)
{
    int64_t end = now_ms() + PATIENCE_MS;
    bool empty;

    do {
        WireState *s = poold_state(d);

        empty = s->used == 0 && s->holds == 0;
        if (!empty && now_ms() > end) {
            g_test_message("used %" G_GUINT64_FORMAT ", holds %"
                           G_GUINT64_FORMAT ", members %u", s->used, s->holds,
                           s->members);
            g_free(s);
            return false;
        }
        g_free(s);
        g_usleep(2000);
    } while (!empty);
    return true;
}
