/*
 * room: for how many mappings more members have room
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A process may have so many mappings (vm.max_map_count), and pages of the pool
 * take one, or two, for each run.  Who offers pages has runs of them, whatever
 * order others have them in; a member that has them one by one can map few.  What
 * it cannot map is alone in the pool then, where the kernel's KSM does not find
 * it.  So members that leave their tail to that say how much room they have; and
 * what would take more is not offered: who has it is told to leave it.
 *
 * How long runs will be, before any is mapped: some pages are remembered with
 * the one that their member asked about next.  If another asks about the same
 * page, does it go on with the same one, too?
 *
 * A member says what it has yet to map, some time after it was told; so what it
 * was told lately counts, if that is more.
 *
 * Leaves to others: who has what (asked.h), what is said to whom.
 */
#ifndef HOSTD_ROOM_H
#define HOSTD_ROOM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct RoomSample {
    uint64_t hash, next;
    uint32_t member;
} RoomSample;

typedef struct Rooms {
    RoomSample *sample;     /* by hash; NULL: no member has said anything */
    unsigned told;          /* members that have */
    double met, apart;      /* pages that two asked for; ... and went on apart */
} Rooms;

/* A member's. */
typedef struct Room {
    bool told;
    uint64_t mappings;      /* that it may make, it says */
    uint64_t waiting;       /* pages that it has yet to map */
    uint64_t turn;          /* in which the last was charged */
    double charged[2];      /* mappings, in that turn and in the one before */
} Room;

/* 0 or -ENOMEM: it has said nothing, then. */
int room_tell(Rooms *rooms, Room *r, uint64_t mappings, uint64_t waiting);
/* The member goes. */
void room_leave(Rooms *rooms, Room *r);
void rooms_free(Rooms *rooms);

/* A member asks about @n pages, in the order in which it has them. */
void rooms_note(Rooms *rooms, unsigned member, const uint64_t *hash,
                unsigned n);
/* Mappings that a page takes, on average. */
double rooms_each(const Rooms *rooms);

/* A page more is to be mapped, at that time (ns; see asked_note()). */
void room_charge(Room *r, double each, uint64_t now);
/* Is there none for a page more?  Not if nothing was said. */
bool room_is_used(const Room *r, double each, uint64_t now);

size_t rooms_bytes(const Rooms *rooms);

#endif
