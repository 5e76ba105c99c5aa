/*
 * A member for tests of the daemon: messages as they are
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Written from docs/interop/ksm-pool.rst alone, with a hash of its own.  It
 * checks what every message must be (length, count, seq, slots in bounds) and
 * nothing that depends on what a test did.
 *
 * The daemon knows members by the process that sent HELLO.  So a test has all
 * connections itself, and lets others (Proc) send that one message: it decides
 * in which order things happen, and can kill a member whose connection stays.
 */
#ifndef KSM_WIRE_MEMBER_H
#define KSM_WIRE_MEMBER_H

#include <stdbool.h>
#include <sys/types.h>

#include "share/wire.h"

#define PAGE ((size_t)4096)
#define PATIENCE_MS 20000   /* then the daemon hangs; it may be sanitized */

/* A daemon of the test's own. */
typedef struct Poold {
    char *dir, *socket;
    char **options;
    pid_t pid;              /* 0: it is dead */
    int uid;                /* 0: the test's */
    unsigned files;         /* 0: as many as the test */
} Poold;

/* How a test wants its daemon; 0: as it is by default. */
typedef struct PooldConfig {
    unsigned slots;
    unsigned share;         /* percent of them that a member may publish */
    unsigned members;
    int uid;                /* whose; the test must be root */
    unsigned files;         /* descriptors that it may have */
} PooldConfig;

/* The program: $KSM_POOLD. Returns when it answers. */
Poold *poold_new(const PooldConfig *config);
/* Asked to end, it must do so without a complaint (of sanitizers, too). */
void poold_free(Poold *d);
void poold_kill(Poold *d);
void poold_start(Poold *d);
/* Of its memory, in KiB; open descriptors. */
unsigned long poold_rss(const Poold *d);
unsigned poold_fds(const Poold *d);

/* A process that sends messages for others. */
typedef struct Proc {
    pid_t pid;
    int fd;
} Proc;

/* @uid: whose it is to be, if the test is root; -1: the test's. */
Proc *proc_new(int uid);
/* One packet over @socket; 0 or -errno. */
int proc_send(Proc *p, int socket, const void *msg, size_t len);
void proc_kill(Proc *p);    /* with SIGKILL; waits */
void proc_free(Proc *p);    /* kills it, if it lives */

typedef struct Peer {
    int fd;                 /* -1: closed */
    Proc *proc;             /* not owned; NULL: this process */
    WireWelcome welcome;
    WireRefused refused;    /* code 0: it was not */
    int pool_fd, ring_fd;
    char *ring;
    uint64_t seq;           /* of the last question */
    bool says_room;         /* so it may be told to leave something */
    GQueue early;           /* messages that came while others were awaited */
} Peer;

/* A connection on which nothing was said. */
Peer *peer_connect(const Poold *d);
/* HELLO and WELCOME; false: refused. @cookie NULL: a new member. */
bool peer_hello(Peer *p, const uint64_t *cookie);
/* Both; the test fails if it is refused. */
Peer *peer_new(const Poold *d, Proc *proc);
/* Another connection with p's cookie, from p's process; HELD is not sent. */
Peer *peer_resume(const Poold *d, const Peer *p);
void peer_close(Peer *p);   /* the connection only; the struct stays */
void peer_free(Peer *p);

void peer_hello_fill(WireHello *hello);
/* 0 or -errno */
int peer_send(Peer *p, const void *msg, size_t len);
int peer_send_fds(Peer *p, const void *msg, size_t len, int fd, unsigned n);
void peer_send_held(Peer *p, const WirePair *pairs, unsigned n, uint64_t left);

/*
 * The next message, checked; NULL: none came, or the connection ended (then
 * p->fd is -1, and p->refused may say why).  To be freed.
 */
WireHead *peer_recv(Peer *p, int timeout_ms);
/* The next of @type; others are kept for later.  NULL as above. */
WireHead *peer_wait(Peer *p, WireType type, int timeout_ms);
/* The connection must end now, with @code; 0: however. */
void peer_ends(Peer *p, WireRefusal code);
/* The daemon has read and done all that was sent before. */
void peer_sync(Peer *p);

void peer_ask(Peer *p, const uint64_t *hash, unsigned n, uint32_t *slot);
uint32_t peer_ask_one(Peer *p, uint64_t hash);
void peer_offer(Peer *p, unsigned first, unsigned n, uint32_t domain,
                uint32_t *slot);
/* Of a page with @content. */
uint32_t peer_offer_one(Peer *p, uint64_t content);
/* Returns TAKEN; *length from the BLOCK before it, 0 if none came. */
uint32_t peer_repeat(Peer *p, uint64_t content, unsigned want,
                     unsigned *length);
unsigned peer_grow(Peer *p, uint32_t first, unsigned want);
/* How much it can map, it says. */
void peer_room(Peer *p, uint64_t mappings, uint64_t waiting);
void peer_drop(Peer *p, uint32_t slot, uint32_t holds);
WireState *peer_state(Peer *p);

void page_fill(void *page, uint64_t content);
uint64_t peer_hash(const Peer *p, const void *page, uint32_t domain);
/* Of a page with @content, domain 0. */
uint64_t peer_hash_of(const Peer *p, uint64_t content);
char *peer_page(Peer *p, unsigned page);    /* of the ring */

/* These read the pool, but leave a hole a hole. */
void peer_read_slot(const Peer *p, uint32_t slot, void *page);
bool peer_slot_has(const Peer *p, uint32_t slot, uint64_t content);
bool peer_slot_is_hole(const Peer *p, uint32_t slot);
/* Waits up to PATIENCE_MS. */
bool peer_slot_punched(const Peer *p, uint32_t slot);

/* What the group's state is, told to somebody who is no member. */
WireState *poold_state(const Poold *d);
/* Until nothing is used nor held; false: it did not become so. */
bool poold_empties(const Poold *d);

#endif
