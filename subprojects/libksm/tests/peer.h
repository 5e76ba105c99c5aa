/*
 * libksm tests: the daemon's end of a connection, played by the test
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Says what a test wants said, true or not, when it wants it.  The real daemon
 * is ksm-poold, with tests of its own.
 */
#ifndef KSM_TEST_PEER_H
#define KSM_TEST_PEER_H

#include "share/remote.h"
#include "share/wire.h"

#define PEER_SLOTS      16384u
#define PEER_RING       1024u
#define PEER_HOLD_USERS 4u

typedef struct Peer {
    int fd;                 /* of the connection; -1: none */
    int pool, pool_ro, ring;
    uint64_t generation, key, cookie[2];
    uint64_t features;      /* as in WELCOME */
    bool absent;            /* connecting is refused */
    unsigned connects;
    union {                 /* the message received last */
        WireHead head;
        char bytes[sizeof(WireAsk) + WIRE_ASKS * sizeof(uint64_t)];
    } in;
} Peer;

/* Stores find it by prim.connect, until it is freed. */
Peer *peer_new(void);
void peer_free(Peer *p);
/* Another daemon in its place: all it knew is gone. */
void peer_anew(Peer *p);
void peer_hang_up(Peer *p);

#define PEER_PAGES      4096u   /* of memory, of its members */

/* A store that has said HELLO. */
KsmStore *peer_member(const RemoteConfig *config);
/* ... and is welcome. */
KsmStore *peer_store(Peer *p);

/* The next message, which is of that type; its length. */
size_t peer_expect(Peer *p, WireType type);
/* There is none. */
void peer_expect_none(Peer *p);

void peer_send(Peer *p, const void *message, size_t len, const int *fds,
               unsigned n_fds);
/* @resumed: as in WELCOME. */
void peer_welcome(Peer *p, bool resumed);
/* ... of which the descriptors are lost. */
void peer_welcome_none(Peer *p, bool resumed);
/* ANSWER or TAKEN to the message received last. */
void peer_answer(Peer *p, const uint32_t *slot, unsigned n);
void peer_news(Peer *p, uint64_t hash, uint32_t slot);
void peer_block(Peer *p, uint32_t first, uint32_t length);

#endif
