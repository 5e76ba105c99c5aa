/*
 * hostd tests: how much room members have for mappings
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include <glib.h>

#include "base/prim.h"
#include "room.h"

#define PAGES   65536u
#define SECOND  UINT64_C(1000000000)

static uint64_t hash_of(uint64_t i)
{
    uint64_t h = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);

    h = (h ^ (h >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    h = (h ^ (h >> 27)) * UINT64_C(0x94d049bb133111eb);
    return h ^ (h >> 31);
}

/* All pages, with blocks of so many in an order of this member's own. */
static uint64_t *pages_of(unsigned member, unsigned block)
{
    g_autoptr(GRand) rand = g_rand_new_with_seed(member + 1);
    uint64_t *hash = g_new(uint64_t, PAGES);
    g_autofree unsigned *at = g_new(unsigned, PAGES / block);

    for (unsigned i = 0; i < PAGES / block; i++) {
        unsigned other = g_rand_int_range(rand, 0, i + 1);

        at[i] = at[other];
        at[other] = i;
    }
    for (unsigned i = 0; i < PAGES; i++) {
        hash[i] = hash_of(at[i / block] * block + i % block);
    }
    return hash;
}

typedef struct World {
    Rooms rooms;
    Room room[16];
} World;

static Room *find(void *opaque, unsigned member)
{
    World *w = opaque;

    return member == 15 ? NULL : &w->room[member];
}

static void world_init(World *w)
{
    *w = (World) { .rooms = { .find = find, .opaque = w } };
}

static void note(World *w, unsigned member, unsigned block)
{
    g_autofree uint64_t *hash = pages_of(member, block);

    for (unsigned i = 0; i < PAGES; i += 8192) {
        rooms_note(&w->rooms, member, hash + i, 8192);
    }
}

/* Two have the same pages, in blocks: one run for each, and a split. */
static void test_each(void)
{
    for (unsigned block = 1; block <= 512; block *= 2) {
        double guess, want = 2.0 / block;
        World w;

        world_init(&w);
        guess = room_each(&w.room[0]);
        /* nobody wants to know: nothing is kept */
        note(&w, 0, block);
        g_assert(rooms_bytes(&w.rooms) == 0);
        g_assert(room_tell(&w.rooms, &w.room[0], 1, 0, SECOND) == 0);
        g_assert(w.rooms.told == 1 && rooms_bytes(&w.rooms) > 0);
        note(&w, 0, block);
        g_assert(room_each(&w.room[0]) == guess);
        note(&w, 1, block);
        g_test_message("blocks of %u: %.3f mappings", block,
                       room_each(&w.room[0]));
        for (unsigned i = 0; i < 2; i++) {
            g_assert(fabs(room_each(&w.room[i]) - want) < want / 4 + 0.03);
        }
        g_assert(room_each(&w.room[2]) == guess);
        room_leave(&w.rooms, &w.room[0]);
        room_leave(&w.rooms, &w.room[0]);
        g_assert(w.rooms.told == 0);
        rooms_free(&w.rooms);
        g_assert(rooms_bytes(&w.rooms) == 0);
    }
}

/* Who asks again about the same learns nothing; and what is new counts more. */
static void test_again(void)
{
    double guess;
    World w;

    world_init(&w);
    guess = room_each(&w.room[0]);
    g_assert(room_tell(&w.rooms, &w.room[0], 1, 0, SECOND) == 0);
    note(&w, 0, 64);
    note(&w, 0, 1);
    g_assert(room_each(&w.room[0]) == guess);
    for (unsigned i = 0; i < 8; i++) {
        note(&w, 2 + i % 2, 1);
    }
    g_assert(room_each(&w.room[2]) > 1.9);
    for (unsigned i = 0; i < 32; i++) {
        note(&w, 2, 64);
        note(&w, 3, 64);
    }
    g_assert(room_each(&w.room[2]) < 0.3);
    /* what another one was like is not what these are */
    g_assert(room_each(&w.room[0]) > 1);
    /* one that has gone */
    note(&w, 15, 64);
    note(&w, 3, 64);
    rooms_free(&w.rooms);
}

/* What is waiting, or was told lately, whichever is more. */
static void test_used(void)
{
    World w;
    Room *r = &w.room[0];
    uint64_t now = 200 * SECOND;

    world_init(&w);
    /* each page takes one */
    r->met = 1000 - 8;
    r->apart = 500 - 0.5;
    g_assert(room_each(r) == 1);
    for (unsigned i = 0; i < 1000; i++) {
        room_charge(r, now);
    }
    g_assert(!room_is_used(r, now));    /* it has not said */
    g_assert(room_tell(&w.rooms, r, 1100, 0, now) == 0);
    for (unsigned i = 0; i < 100; i++) {
        g_assert(!room_is_used(r, now));
        room_charge(r, now);
    }
    g_assert(room_is_used(r, now + 10));
    /* soon after it cannot know more; then what was before the last is old */
    g_assert(room_tell(&w.rooms, r, 1100, 0, now + SECOND / 2) == 0);
    g_assert(room_is_used(r, now + SECOND));
    g_assert(room_tell(&w.rooms, r, 1100, 0, now + SECOND) == 0);
    g_assert(room_is_used(r, now + SECOND));
    g_assert(room_tell(&w.rooms, r, 1100, 0, now + 2 * SECOND) == 0);
    g_assert(!room_is_used(r, now + 2 * SECOND));
    /* it says that it has so many to map */
    g_assert(room_tell(&w.rooms, r, 100, 99, now + 2 * SECOND) == 0);
    g_assert(!room_is_used(r, now + 3 * SECOND) && w.rooms.told == 1);
    g_assert(room_tell(&w.rooms, r, 100, 100, now + 2 * SECOND) == 0);
    g_assert(room_is_used(r, now + 3 * SECOND));
    /* what came to nothing does not count for ever */
    g_assert(room_tell(&w.rooms, r, 3, 0, now + 4 * SECOND) == 0);
    for (unsigned i = 0; i < 3; i++) {
        room_charge(r, now + 4 * SECOND);
    }
    g_assert(room_is_used(r, now + 60 * SECOND));
    g_assert(!room_is_used(r, now + 200 * SECOND));
    room_charge(r, now + 200 * SECOND);
    g_assert(r->charged[0] == 1 && r->charged[1] == 0);
    /* long runs find mappings, whoever has them, as long as there are some */
    g_assert(room_tell(&w.rooms, r, 100, 100000, now) == 0);
    r->apart = 100;
    g_assert(!room_is_used(r, now));
    r->apart = 125;
    g_assert(room_is_used(r, now));
    r->apart = 10;
    g_assert(room_tell(&w.rooms, r, 0, 0, now) == 0);
    g_assert(room_is_used(r, now));
    r->apart = 500 - 0.5;
    /* whatever a member says */
    g_assert(room_tell(&w.rooms, r, 0, 0, now) == 0);
    g_assert(room_is_used(r, 1000 * SECOND));
    g_assert(room_tell(&w.rooms, r, UINT64_MAX - 1, 0, now) == 0);
    g_assert(!room_is_used(r, 1000 * SECOND));
    g_assert(room_tell(&w.rooms, r, UINT64_MAX / 4, UINT64_MAX, now) == 0);
    g_assert(room_is_used(r, 1000 * SECOND));
    g_assert(room_tell(&w.rooms, r, ROOM_NO_TAIL, 0, now) == 0);
    g_assert(!room_is_used(r, 1000 * SECOND) && w.rooms.told == 0);
    rooms_free(&w.rooms);
}

static void *map_fails(void *addr, size_t len, int prot, int flags, int fd,
                       off_t offset)
{
    return NULL;
}

static void test_no_memory(void)
{
    Rooms rooms = { 0 };
    Room r = { 0 };
    uint64_t hash[2] = { 0, 1 };

    prim.map = map_fails;
    g_assert(room_tell(&rooms, &r, 0, 0, SECOND) == -ENOMEM);
    prim.map = prim_real.map;
    g_assert(!rooms.told && !room_is_used(&r, SECOND));
    rooms_note(&rooms, 0, hash, 2);
    room_leave(&rooms, &r);
    g_assert(!rooms.told);
    rooms_free(&rooms);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/room/each", test_each);
    g_test_add_func("/room/again", test_again);
    g_test_add_func("/room/used", test_used);
    g_test_add_func("/room/no-memory", test_no_memory);
    return g_test_run();
}
