/*
 * room: for how many mappings more members have room
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <sys/mman.h>

#include <glib.h>

#include "base/page.h"
#include "base/prim.h"
#include "room.h"

#define SAMPLES     4096u   /* entries ... */
#define SAMPLE_ONE  256u    /* ... for one hash in so many: of 4 GiB asked */
#define MET_MAX     1024.0  /* older ones count less than these */
#define MET_GUESS   8.0     /* before any were: so many, ... */
#define APART_GUESS 0.5     /* ... of which these are apart */
#define TURN_NS     UINT64_C(1000000000)    /* it is known there by then */
#define OLD_NS      UINT64_C(120000000000)  /* ... or came to nothing */
#define RUN_TAKES   2.0     /* mappings, at most: one that it splits, too */
#define SHORT_EACH  0.25    /* mappings a page: runs are shorter than 8 */

static size_t samples_bytes(void)
{
    return ROUND_UP_TO(SAMPLES * sizeof(RoomSample), PAGE_BYTES);
}

static void turn(Room *r, uint64_t before, uint64_t now)
{
    r->charged[1] = before;
    r->charged[0] = 0;
    r->turned = now;
}

int room_tell(Rooms *rooms, Room *r, uint64_t mappings, uint64_t waiting,
              uint64_t now)
{
    if (mappings == ROOM_NO_TAIL) {
        room_leave(rooms, r);
        return 0;
    }
    if (!rooms->sample) {
        rooms->sample = prim.map(NULL, samples_bytes(), PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                 -1, 0);
        if (!rooms->sample) {
            return -ENOMEM;
        }
    }
    rooms->told += !r->told;
    r->told = true;
    r->mappings = mappings;
    r->waiting = waiting;
    if (now - r->turned >= TURN_NS) {
        turn(r, r->charged[0], now);
    }
    return 0;
}

void room_leave(Rooms *rooms, Room *r)
{
    rooms->told -= r->told;
    r->told = false;
}

void rooms_free(Rooms *rooms)
{
    if (rooms->sample) {
        prim.unmap(rooms->sample, samples_bytes());
        rooms->sample = NULL;
    }
}

static void room_meet(Room *r, bool apart)
{
    if (r && r->met >= MET_MAX) {
        r->met /= 2;
        r->apart /= 2;
    }
    if (r) {
        r->met++;
        r->apart += apart;
    }
}

void rooms_note(Rooms *rooms, unsigned member, const uint64_t *hash,
                unsigned n)
{
    if (!rooms->sample) {
        return;
    }
    for (unsigned i = 0; i + 1 < n; i++) {
        RoomSample *s = &rooms->sample[hash[i] / SAMPLE_ONE % SAMPLES];

        if (hash[i] % SAMPLE_ONE) {
            continue;
        }
        if (s->hash == hash[i] && s->member != member) {
            bool apart = s->next != hash[i + 1];

            room_meet(rooms->find(rooms->opaque, member), apart);
            room_meet(rooms->find(rooms->opaque, s->member), apart);
        }
        *s = (RoomSample) { hash[i], hash[i + 1], member };
    }
}

double room_each(const Room *r)
{
    return RUN_TAKES * (r->apart + APART_GUESS) / (r->met + MET_GUESS);
}

void room_charge(Room *r, uint64_t now)
{
    if (now - r->turned >= OLD_NS) {
        turn(r, 0, now);
    }
    r->charged[0]++;
}

bool room_is_used(const Room *r, uint64_t now)
{
    uint64_t lately = r->charged[0] + r->charged[1];
    double each = room_each(r);

    if (now - r->turned >= OLD_NS) {
        lately = 0;
    }
    if (!r->told || (each < SHORT_EACH && r->mappings)) {
        return false;
    }
    return (MAX(r->waiting, lately) + 1.0) * each > r->mappings;
}

size_t rooms_bytes(const Rooms *rooms)
{
    return rooms->sample ? samples_bytes() : 0;
}
