/*
 * wire: messages between a member of a group and the daemon that has its pool
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The layout only; what the messages mean: docs/interop/ksm-pool.rst.  Numbers
 * are little-endian, as on all machines that merge; nothing is padded.
 */
#ifndef KSM_WIRE_H
#define KSM_WIRE_H

#include <glib.h>
#include <stdint.h>

G_STATIC_ASSERT(G_BYTE_ORDER == G_LITTLE_ENDIAN);

#define WIRE_MAGIC      UINT32_C(0x504d534b)
#define WIRE_VERSION    1u

/* Most elements of a message; WELCOME may allow fewer. */
#define WIRE_ASKS       8192u
#define WIRE_OFFERS     512u
#define WIRE_PAIRS      4096u
#define WIRE_BLOCK_MAX  512u    /* slots; a block begins at a multiple */

typedef enum WireType {
    WIRE_HELLO = 1,
    WIRE_WELCOME,
    WIRE_REFUSED,
    WIRE_HELD,
    WIRE_ASK,
    WIRE_ANSWER,
    WIRE_OFFER,
    WIRE_REPEAT,
    WIRE_TAKEN,
    WIRE_GROW,
    WIRE_BLOCK,
    WIRE_DROP,
    WIRE_NEWS,
    WIRE_STATUS,
    WIRE_STATE,
    WIRE_TAIL,
    WIRE_ROOM,
} WireType;

#define WIRE_FEATURE_TAIL   UINT64_C(1)
#define WIRE_FEATURE_ROOM   UINT64_C(2)

/* Instead of a slot. */
#define WIRE_NONE           UINT32_C(0xffffffff)
#define WIRE_WANTED         UINT32_C(0xfffffffe)
#define WIRE_FULL           UINT32_C(0xfffffffd)    /* the pool is */
#define WIRE_SHARE          UINT32_C(0xfffffffc)    /* the member's is */
#define WIRE_NO_MEMORY      UINT32_C(0xfffffffb)
#define WIRE_LEFT           UINT32_C(0xfffffffa)    /* to the kernel */
#define WIRE_SLOTS_MAX      (UINT32_C(1) << 30)     /* all slots are below */

typedef enum WireRefusal {
    WIRE_REFUSED_PROTOCOL = 1,
    WIRE_REFUSED_VERSION,
    WIRE_REFUSED_FULL,
    WIRE_REFUSED_RIGHT,
    WIRE_REFUSED_LACK,
} WireRefusal;

typedef struct WireHead {
    uint32_t type;
    uint32_t count;
    uint64_t seq;
} WireHead;

typedef struct WireHello {
    WireHead head;
    uint32_t magic, version;
    uint64_t features;
    uint64_t cookie[2];
    uint64_t pages;
    char name[64];
} WireHello;

typedef struct WireWelcome {
    WireHead head;
    uint32_t version, resumed;
    uint64_t features;
    uint64_t cookie[2];
    uint64_t generation;
    uint64_t key;
    uint32_t slots;
    uint32_t hold_users;
    uint32_t ring_pages;
    uint32_t asks, offers, in_flight;
} WireWelcome;

typedef struct WireRefused {
    WireHead head;
    uint32_t code;
    char text[124];
} WireRefused;

/* HELD, DROP */
typedef struct WirePair {
    uint32_t slot, holds;
} WirePair;

typedef struct WirePairs {
    WireHead head;
    WirePair pair[];
} WirePairs;

typedef struct WireAsk {
    WireHead head;
    uint64_t hash[];
} WireAsk;

/* ANSWER, TAKEN */
typedef struct WireSlots {
    WireHead head;
    uint32_t slot[];
} WireSlots;

/* OFFER, REPEAT */
typedef struct WireOffer {
    WireHead head;
    uint32_t first;         /* page of the ring */
    uint32_t domain;
    int32_t node;
    uint32_t want;          /* REPEAT: slots; OFFER: 0 */
} WireOffer;

/* GROW, BLOCK */
typedef struct WireBlock {
    WireHead head;
    uint32_t first, length;
} WireBlock;

/* TAIL; and in STATE */
#define WIRE_LEFT_MAX       (UINT64_C(1) << 48)
typedef struct WireLeft {
    uint64_t bytes;         /* that the kernel's KSM may look at now */
    uint64_t given;         /* times that a part was given to it, ever */
    uint64_t merged;        /* pages that it has merged */
} WireLeft;

typedef struct WireTail {
    WireHead head;
    WireLeft left;
} WireTail;

typedef struct WireRoom {
    WireHead head;
    uint64_t mappings;      /* that may be made */
    uint64_t waiting;       /* pages that are to be mapped, as is known */
} WireRoom;

typedef struct WireFound {
    uint64_t hash;
    uint32_t slot, zero;
} WireFound;

typedef struct WireNews {
    WireHead head;
    WireFound found[];
} WireNews;

typedef struct WireMember {
    char name[64];
    uint32_t pid, connected;
    uint64_t pages;
    uint64_t holds;         /* slots and blocks, each once */
    uint64_t held;          /* slots, each once: all of a block's */
    uint64_t share;         /* 1/1000 of those */
    uint64_t published;
    WireLeft left;
} WireMember;

typedef struct WireState {
    WireHead head;
    uint64_t generation;
    uint64_t uptime;        /* s */
    uint64_t slots, used, holds;
    uint64_t metadata;      /* bytes */
    uint64_t asked, offered, published, found;
    uint64_t refused_full, refused_share, refused_memory;
    uint64_t news, news_lost;
    uint64_t cpu_ns;
    WireLeft left;          /* of all members */
    uint32_t members, zero;
    WireMember member[];
} WireState;

G_STATIC_ASSERT(sizeof(WireHead) == 16);
G_STATIC_ASSERT(sizeof(WireHello) == 120);
G_STATIC_ASSERT(sizeof(WireWelcome) == 88);
G_STATIC_ASSERT(sizeof(WireRefused) == 144);
G_STATIC_ASSERT(sizeof(WireOffer) == 32);
G_STATIC_ASSERT(sizeof(WireTail) == 40);
G_STATIC_ASSERT(sizeof(WireRoom) == 32);
G_STATIC_ASSERT(sizeof(WireMember) == 136);
G_STATIC_ASSERT(sizeof(WireState) == 176);

/* What a message of its type has at most, in bytes: STATE of 1,024 members. */
#define WIRE_MESSAGE_MAX (sizeof(WireState) + 1024 * sizeof(WireMember))

#endif
