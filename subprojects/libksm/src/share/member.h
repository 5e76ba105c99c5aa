/*
 * member: what a member and the daemon say to each other
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The messages of docs/interop/ksm-pool.rst, from the member's side: the
 * connection, the questions without an answer, and the generations of the pool.
 * Whatever the daemon says that cannot be ends the connection; see
 * remote.h for why slots stay.
 */
#ifndef KSM_MEMBER_H
#define KSM_MEMBER_H

#include "share/foreign.h"
#include "share/link.h"
#include "share/ring.h"
#include "share/store.h"
#include "share/wire.h"

typedef enum MemberState {
    MEMBER_DOWN,            /* no connection */
    MEMBER_GREETED,         /* HELLO was said */
    MEMBER_RESUMES,         /* what is held is being listed */
    MEMBER_UP,
} MemberState;

/* Pages that are collected for an OFFER. */
typedef struct MemberBatch {
    unsigned n;
    unsigned first;         /* page of the ring */
    unsigned used;          /* of the ring */
    int node;
    uint32_t id[WIRE_OFFERS];
    uint32_t tag[WIRE_OFFERS];
} MemberBatch;

/* A page that somebody else has, too. */
typedef struct MemberWanted {
    uint32_t id, tag;
} MemberWanted;

typedef struct KsmMember {
    KsmStore *store;        /* whose forget() is told */
    KsmLink link;
    MemberState state;
    unsigned breaks;        /* of the link, as seen */
    unsigned losses;        /* as KsmStoreOps.losses */
    uint64_t up_ns;         /* since when the daemon is there for us */
    bool missed;            /* news were lost */
    uint64_t missed_ns;     /* ... the last time that all was asked again */
    uint64_t waits_ns;      /* for an answer, or something else, since */
    char name[64];
    uint64_t pages;         /* of memory: for HELLO */
    uint64_t cookie[2];     /* zeroes: none yet */
    uint64_t generation;    /* ... of the daemon that gave it */
    uint64_t key;           /* one of our own, until the group's is known */
    unsigned max_sharing;
    bool keep_all;
    unsigned in_flight;     /* as in WELCOME */
    GPtrArray *pools;       /* KsmForeign: all generations */
    KsmForeign *now;        /* that of the daemon; or NULL */
    uint32_t held;          /* RESUMES: slots below were listed */
    unsigned held_left;     /* ... messages that are to follow */
    /* questions */
    uint64_t seq;
    GQueue *questions;      /* without an answer, in order */
    unsigned awaited;       /* answers to those */
    MemberBatch batch;
    KsmRing ring;
    GArray *wanted;         /* MemberWanted, from wanted_at on */
    unsigned wanted_at;
    GArray *drops;          /* WirePair: to be sent */
    GArray *blocks;         /* first slots: told, but not held yet */
    /* what is left to the kernel: as it is, and as was told */
    StoreTail tail, tail_told;
    bool tells_tail;        /* the daemon wants to know */
    StoreRoom room, room_told;  /* how much can be mapped, in the same way */
    uint64_t room_ns;       /* when it was told */
    bool tells_room;
    /* refusals */
    bool refused;           /* the daemon ended the connection, last time */
    KsmReason why;
    uint64_t full_until;    /* ns; 0: it is not */
    uint64_t full_wait;
    uint64_t full_ended;    /* ns; the last time that it was */
    uint64_t no_block_until;        /* ns; a REPEAT was refused */
    /* the message being read, and where in it */
    char *in;
    size_t in_len;
    unsigned in_at;
    char *out;
    /* the group, as told last */
    WireState *group;       /* NULL: nothing that we understand */
    uint64_t group_ns;      /* when; 0: never */
    uint64_t group_shared;  /* slots that we had then */
    bool group_asked;
    bool group_awaited;     /* ... and not told */
} KsmMember;

/* The link is set up by the caller. */
void member_init(KsmMember *m, KsmStore *store, const char *name,
                 unsigned max_sharing);
void member_free(KsmMember *m);

/* What can be done now: connects, and sends what was put off. */
void member_run(KsmMember *m);

bool member_ask(KsmMember *m, const StoreAsk *asks, unsigned n);
OfferFate member_offer(KsmMember *m, StoreOffer *o);
OfferFate member_repeat(KsmMember *m, StoreOffer *o);
/* Asks for a longer block, if its use is worth it. */
void member_grow(KsmMember *m, KsmForeign *f, ForeignBlock *b);
unsigned member_answers(KsmMember *m, StoreAnswer *answers, unsigned max);

/* The generation of a local slot, and its number there. */
KsmForeign *member_pool(const KsmMember *m, uint32_t *slot);

/* What is left to the kernel; told when it can be. */
void member_tail(KsmMember *m, const StoreTail *tail);

/* How much more can be mapped; the same. */
void member_room(KsmMember *m, const StoreRoom *room);

/* Generations that nobody uses go; and memory for what is not needed now. */
void member_rest(KsmMember *m);
/* Asks how the group is; member.group is set later. */
void member_ask_group(KsmMember *m);
size_t member_bytes(const KsmMember *m);

#endif
