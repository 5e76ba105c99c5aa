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

static void note(Rooms *rooms, unsigned member, unsigned block)
{
    g_autofree uint64_t *hash = pages_of(member, block);

    for (unsigned i = 0; i < PAGES; i += 8192) {
        rooms_note(rooms, member, hash + i, 8192);
    }
}

/* Two have the same pages, in blocks: one run for each, and a split. */
static void test_each(void)
{
    for (unsigned block = 1; block <= 512; block *= 2) {
        Rooms rooms = { 0 };
        Room r = { 0 };
        double guess = rooms_each(&rooms), want = 2.0 / block;

        /* nobody wants to know: nothing is kept */
        note(&rooms, 0, block);
        g_assert(rooms_bytes(&rooms) == 0);
        g_assert(room_tell(&rooms, &r, 1, 0) == 0 && rooms.told == 1);
        g_assert(rooms_bytes(&rooms) > 0);
        note(&rooms, 0, block);
        g_assert(rooms_each(&rooms) == guess);
        note(&rooms, 1, block);
        g_test_message("blocks of %u: %.3f mappings", block,
                       rooms_each(&rooms));
        g_assert(fabs(rooms_each(&rooms) - want) < want / 4 + 0.03);
        room_leave(&rooms, &r);
        room_leave(&rooms, &r);
        g_assert(rooms.told == 0);
        rooms_free(&rooms);
        g_assert(rooms_bytes(&rooms) == 0);
    }
}

/* Who asks again about the same learns nothing; and what is new counts more. */
static void test_again(void)
{
    Rooms rooms = { 0 };
    Room r = { 0 };
    double guess = rooms_each(&rooms);

    g_assert(room_tell(&rooms, &r, 1, 0) == 0);
    note(&rooms, 0, 64);
    note(&rooms, 0, 1);
    g_assert(rooms_each(&rooms) == guess);
    for (unsigned i = 0; i < 8; i++) {
        note(&rooms, 2 + i, 1);
    }
    g_assert(rooms_each(&rooms) > 1.9);
    for (unsigned i = 0; i < 32; i++) {
        note(&rooms, 10, 64);
        note(&rooms, 11, 64);
    }
    g_assert(rooms_each(&rooms) < 0.3);
    rooms_free(&rooms);
}

/* What is waiting, or was told lately, whichever is more. */
static void test_used(void)
{
    Rooms rooms = { 0 };
    Room r = { 0 };
    uint64_t now = 7 * SECOND;

    for (unsigned i = 0; i < 1000; i++) {
        room_charge(&r, 1, now);
    }
    g_assert(!room_is_used(&r, 1, now));    /* it has not said */
    r = (Room) { 0 };
    g_assert(room_tell(&rooms, &r, 100, 0) == 0);
    for (unsigned i = 0; i < 100; i++) {
        g_assert(!room_is_used(&r, 1, now));
        room_charge(&r, 1, now + i * SECOND / 100);
    }
    g_assert(room_is_used(&r, 1, now + SECOND - 1));
    g_assert(room_is_used(&r, 1, now + 2 * SECOND - 1));
    g_assert(!room_is_used(&r, 1, now + 2 * SECOND));
    /* it says that it has made so many of them */
    g_assert(room_tell(&rooms, &r, 100, 99) == 0 && rooms.told == 1);
    g_assert(!room_is_used(&r, 1, now + 3 * SECOND));
    g_assert(room_is_used(&r, 1.1, now + 3 * SECOND));
    g_assert(room_tell(&rooms, &r, 100, 100) == 0);
    g_assert(room_is_used(&r, 1, now + 3 * SECOND));
    g_assert(!room_is_used(&r, 0.5, now + 3 * SECOND));
    /* what was charged in the turn before counts, too */
    g_assert(room_tell(&rooms, &r, 3, 0) == 0);
    now = 20 * SECOND;
    room_charge(&r, 1, now);
    room_charge(&r, 1, now + SECOND);
    g_assert(!room_is_used(&r, 1, now + SECOND));
    room_charge(&r, 1, now + SECOND);
    g_assert(room_is_used(&r, 1, now + SECOND));
    g_assert(!room_is_used(&r, 1, now + 2 * SECOND));
    /* whatever a member says */
    g_assert(room_tell(&rooms, &r, 0, 0) == 0);
    g_assert(room_is_used(&r, 0.01, 100 * SECOND));
    g_assert(room_tell(&rooms, &r, UINT64_MAX, 0) == 0);
    g_assert(!room_is_used(&r, 2, 100 * SECOND));
    g_assert(room_tell(&rooms, &r, UINT64_MAX, UINT64_MAX) == 0);
    g_assert(room_is_used(&r, 2, 100 * SECOND));
    rooms_free(&rooms);
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
    g_assert(room_tell(&rooms, &r, 0, 0) == -ENOMEM);
    prim.map = prim_real.map;
    g_assert(!rooms.told && !room_is_used(&r, 1, SECOND));
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
