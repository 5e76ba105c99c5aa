/*
 * room: for how many mappings more members have room
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A process may have so many mappings (vm.max_map_count), and pages of the pool
 * take one, or two, for each run.  Who offers pages has runs of them, whatever
 * order others have them in; a member that has them one by one can map few.
 * What it cannot map is alone in the pool then, where the kernel's KSM does not
 * find it.  So members that leave their tail to that say how much room they
 * have; what half of those who want it have no room for they are told to leave.
 *
 * How long runs will be, before any is mapped: some pages are remembered with
 * the one that their member asked about next.  If another asks about the same
 * page, does it go on with the same one, too?
 *
 * Where runs are long, those that have the longest are mapped (cut.h), by all who
 * have them alike: nothing is left while there are mappings.
 *
 * A member says what it has yet to map, some time after it was told; so what it
 * was told since it spoke before counts, if that is more.
 *
 * Leaves to others: who has what (asked.h), what is said to whom.
 */
#ifndef HOSTD_ROOM_H
#define HOSTD_ROOM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A member's. */
typedef struct Room {
    bool told;
    uint64_t mappings;      /* that it may make, it says */
    uint64_t waiting;       /* pages that it has yet to map */
    uint64_t turned;        /* when it spoke, but for a moment before (ns) */
    uint64_t charged[2];    /* pages that came since, and before that */
    double met, apart;      /* pages others have, too; ... and go on apart */
} Room;

typedef struct RoomSample {
    uint64_t hash, next;
    uint32_t member;
} RoomSample;

typedef struct Rooms {
    RoomSample *sample;     /* by hash; NULL: no member has said anything */
    unsigned told;          /* members that have */
    Room *(*find)(void *opaque, unsigned member);   /* NULL: it has gone */
    void *opaque;
} Rooms;

#define ROOM_NO_TAIL    UINT64_MAX      /* mappings: it leaves nothing */

/* At that time (ns).  0 or -ENOMEM: it has said nothing, then. */
int room_tell(Rooms *rooms, Room *r, uint64_t mappings, uint64_t waiting,
              uint64_t now);
/* The member goes, or is not heard: as if it had said nothing. */
void room_leave(Rooms *rooms, Room *r);
void rooms_free(Rooms *rooms);

/* A member asks about @n pages, in the order in which it has them. */
void rooms_note(Rooms *rooms, unsigned member, const uint64_t *hash,
                unsigned n);
/* Mappings that a page takes there, on average. */
double room_each(const Room *r);

/* A page more is to be mapped. */
void room_charge(Room *r, uint64_t now);
/* Is there none for a page more?  Not if nothing was said. */
bool room_is_used(const Room *r, uint64_t now);

size_t rooms_bytes(const Rooms *rooms);

#endif
