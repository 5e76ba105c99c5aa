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
#define TURN_NS     UINT64_C(1000000000)
#define RUN_TAKES   2.0     /* mappings, at most: one that it splits, too */

static size_t samples_bytes(void)
{
    return ROUND_UP_TO(SAMPLES * sizeof(RoomSample), PAGE_BYTES);
}

int room_tell(Rooms *rooms, Room *r, uint64_t mappings, uint64_t waiting)
{
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

static void sample_meet(Rooms *rooms, RoomSample *s, const RoomSample *new)
{
    if (s->hash == new->hash && s->member != new->member) {
        if (rooms->met >= MET_MAX) {
            rooms->met /= 2;
            rooms->apart /= 2;
        }
        rooms->met++;
        rooms->apart += s->next != new->next;
    }
    *s = *new;
}

void rooms_note(Rooms *rooms, unsigned member, const uint64_t *hash,
                unsigned n)
{
    if (!rooms->sample) {
        return;
    }
    for (unsigned i = 0; i + 1 < n; i++) {
        if (hash[i] % SAMPLE_ONE == 0) {
            RoomSample new = { hash[i], hash[i + 1], member };

            sample_meet(rooms,
                        &rooms->sample[hash[i] / SAMPLE_ONE % SAMPLES], &new);
        }
    }
}

double rooms_each(const Rooms *rooms)
{
    return RUN_TAKES * (rooms->apart + APART_GUESS) /
           (rooms->met + MET_GUESS);
}

static double charged(const Room *r, unsigned i, uint64_t turn)
{
    return turn - r->turn <= 1 - i ? r->charged[i] : 0;
}

void room_charge(Room *r, double each, uint64_t now)
{
    uint64_t turn = now / TURN_NS;

    if (turn != r->turn) {
        r->charged[1] = charged(r, 0, turn);
        r->charged[0] = 0;
        r->turn = turn;
    }
    r->charged[0] += each;
}

bool room_is_used(const Room *r, double each, uint64_t now)
{
    uint64_t turn = now / TURN_NS;
    double lately = charged(r, 0, turn) + charged(r, 1, turn);

    return r->told && MAX(r->waiting * each, lately) + each > r->mappings;
}

size_t rooms_bytes(const Rooms *rooms)
{
    return rooms->sample ? samples_bytes() : 0;
}
