/*
 * hostd tests: who asked about what
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "asked.h"
#include "base/prim.h"

/* Spread as hashes are; another for each @i. */
static uint64_t hash_of(uint64_t i)
{
    uint64_t h = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);

    h = (h ^ (h >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    h = (h ^ (h >> 27)) * UINT64_C(0x94d049bb133111eb);
    return h ^ (h >> 31);
}

static void finish(Asked *a)
{
    while (asked_step(a)) {
        continue;
    }
}

#define SECOND  UINT64_C(1000000000)

static void test_note(void)
{
    Asked a;

    g_assert(asked_init(&a) == 0);
    g_assert(asked_take(&a, 1) == ASKED_NOBODY);
    g_assert(!asked_note(&a, 1, 0, 0));
    g_assert(!asked_note(&a, 1, 0, 0));
    g_assert(asked_note(&a, 1, 1023, 0));
    g_assert(!asked_note(&a, 1, 0, 0));
    /* equal but for the highest, or the lowest bit */
    g_assert(!asked_note(&a, 1 | UINT64_C(1) << 63, 5, 0));
    g_assert(!asked_note(&a, 1 | UINT64_C(1) << 47, 6, 0));
    g_assert(!asked_note(&a, 0, 7, 0));
    g_assert(asked_take(&a, 1) == 1023);
    g_assert(asked_take(&a, 1) == 0);
    g_assert(asked_take(&a, 1) == ASKED_NOBODY);
    g_assert(asked_take(&a, 1 | UINT64_C(1) << 63) == 5);
    g_assert(asked_take(&a, 1 | UINT64_C(1) << 47) == 6);
    g_assert(asked_take(&a, 0) == 7);
    asked_free(&a);
}

/* One is to offer it; who asks meanwhile is noted; later it is another one. */
static void test_coming(void)
{
    for (unsigned at = 0; at < 64; at++) {
        uint64_t now = at * SECOND;
        Asked a;

        g_assert(asked_init(&a) == 0);
        g_assert(!asked_note(&a, 1, 0, now));
        g_assert(asked_note(&a, 1, 1, now));
        g_assert(!asked_note(&a, 1, 2, now + 3 * SECOND));
        g_assert(!asked_note(&a, 1, 2, now + 7 * SECOND));
        g_assert(!asked_note(&a, 1, 0, now + 7 * SECOND));
        /* it could not yet */
        g_assert(asked_note(&a, 1, 1, now + 7 * SECOND));
        g_assert(!asked_note(&a, 1, 0, now + 14 * SECOND));
        /* it did not come; nor then */
        g_assert(asked_note(&a, 1, 0, now + 19 * SECOND));
        g_assert(!asked_note(&a, 1, 1, now + 20 * SECOND));
        g_assert(!asked_note(&a, 1, 2, now + 20 * SECOND));
        g_assert(asked_note(&a, 1, 2, now + 31 * SECOND));
        /* that was long ago, however marks are counted */
        g_assert(asked_note(&a, 1, 1, now + 60 * SECOND));
        g_assert(asked_note(&a, 1, 0, now + 124 * SECOND));
        for (unsigned all = 7; all; ) {
            uint32_t member = asked_take(&a, 1);

            g_assert(member < 3 && (all & 1u << member));
            all &= ~(1u << member);
        }
        g_assert(asked_take(&a, 1) == ASKED_NOBODY);
        asked_free(&a);
    }
}

/* Those of one hash do not push out all others. */
static void test_same(void)
{
    unsigned noted = 0;
    Asked a;

    g_assert(asked_init(&a) == 0);
    g_assert(!asked_note(&a, 2, 3, 0));
    for (unsigned i = 0; i < 100; i++) {
        noted += !asked_note(&a, 1, i, 0);
    }
    /* besides the one that is to offer it */
    g_assert(noted == 5);
    g_assert(asked_take(&a, 2) == 3);
    while (asked_take(&a, 1) != ASKED_NOBODY) {
        noted--;
    }
    g_assert(noted == UINT_MAX);
    asked_free(&a);
}

/* A full bucket loses its oldest; two askers of a hash need no more room. */
static void test_oldest(void)
{
    Asked a;

    g_assert(asked_init(&a) == 0);
    for (uint64_t i = 0; i < ASKED_WAYS; i++) {
        g_assert(!asked_note(&a, i, i, 0));
    }
    for (uint64_t i = 0; i < ASKED_WAYS; i++) {
        g_assert(asked_note(&a, i, 100 + i, 0));
    }
    g_assert(!asked_note(&a, ASKED_WAYS, 0, 0));
    g_assert(asked_take(&a, 0) == ASKED_NOBODY);
    for (uint64_t i = 1; i < ASKED_WAYS; i++) {
        g_assert(asked_take(&a, i) == 100 + i);
        g_assert(asked_take(&a, i) == i);
        g_assert(asked_take(&a, i) == ASKED_NOBODY);
    }
    asked_free(&a);
}

/* Who has asked, without asking. */
static void test_others(void)
{
    uint16_t other[ASKED_SAME];
    bool here;
    Asked a;

    g_assert(asked_init(&a) == 0);
    g_assert(asked_others(&a, 1, 0, other, &here) == 0 && !here);
    g_assert(!asked_note(&a, 1, 5, SECOND));
    g_assert(asked_others(&a, 1, 5, other, &here) == 0 && here);
    g_assert(asked_others(&a, 1, 6, other, &here) == 1 && !here);
    g_assert(other[0] == 5);
    for (unsigned i = 6; i < 20; i++) {
        asked_note(&a, 1, i, SECOND);
    }
    g_assert(asked_others(&a, 1, 30, other, &here) == ASKED_SAME && !here);
    /* who has left is none of them */
    asked_leave(&a, 5);
    asked_leave(&a, 7);
    g_assert(asked_others(&a, 1, 6, other, &here) == ASKED_SAME - 3 && here);
    for (unsigned i = 0; i < ASKED_SAME - 3; i++) {
        g_assert(other[i] > 7);
    }
    asked_free(&a);
}

/* What nobody is to offer: the others hear of it once, whoever asks. */
static void test_left(void)
{
    uint16_t other[ASKED_SAME];
    bool here;
    Asked a;

    g_assert(asked_init(&a) == 0);
    g_assert(!asked_note(&a, 1, 5, SECOND));
    g_assert(asked_left(&a, 1, 6, SECOND));
    g_assert(!asked_left(&a, 1, 6, SECOND));
    g_assert(!asked_left(&a, 1, 5, 1000 * SECOND));
    g_assert(!asked_left(&a, 1, 7, SECOND));
    g_assert(asked_others(&a, 1, 7, other, &here) == 2 && here);
    /* when there is room it is offered; then they have to hear of it again */
    g_assert(asked_note(&a, 1, 6, 2 * SECOND));
    g_assert(!asked_note(&a, 1, 5, 2 * SECOND));
    g_assert(asked_left(&a, 1, 5, 30 * SECOND));
    g_assert(!asked_left(&a, 1, 6, 30 * SECOND));
    /* all are told when it comes */
    for (unsigned i = 0; i < 3; i++) {
        uint32_t member = asked_take(&a, 1);

        g_assert(member >= 5 && member <= 7);
    }
    g_assert(asked_take(&a, 1) == ASKED_NOBODY);
    /* one was to offer it, and cannot: the other does not know yet */
    g_assert(!asked_note(&a, 2, 5, SECOND));
    g_assert(asked_note(&a, 2, 6, SECOND));
    g_assert(asked_left(&a, 2, 6, 2 * SECOND));
    g_assert(!asked_left(&a, 2, 5, 2 * SECOND));
    /* more than are noted: once, too */
    for (unsigned i = 0; i < 20; i++) {
        asked_note(&a, 3, i, SECOND);
    }
    g_assert(asked_left(&a, 3, 30, SECOND));
    for (unsigned i = 0; i < 40; i++) {
        g_assert(!asked_left(&a, 3, i, SECOND));
    }
    g_assert(asked_others(&a, 3, 50, other, &here) == ASKED_SAME);
    /* whoever hears otherwise may hear of it again */
    g_assert(!asked_note(&a, 4, 5, SECOND));
    g_assert(asked_left(&a, 4, 6, SECOND));
    asked_leave(&a, 5);
    g_assert(!asked_note(&a, 4, 6, SECOND));
    g_assert(asked_left(&a, 4, 7, SECOND));
    /* those who left do not keep it from the others */
    for (unsigned i = 0; i < 40; i++) {
        asked_leave(&a, i);
    }
    g_assert(!asked_note(&a, 3, 50, SECOND));
    g_assert(asked_left(&a, 3, 51, SECOND));
    asked_free(&a);
}

/* One of two leaves: the other stays, with what it was told. */
static void test_leave_pair(void)
{
    for (unsigned who = 0; who < 2; who++) {
        Asked a;

        g_assert(asked_init(&a) == 0);
        g_assert(!asked_note(&a, 1, 0, 0));
        g_assert(asked_note(&a, 1, 1, 0));
        asked_leave(&a, who);
        if (who == 1) {
            /* nobody is to offer it any more */
            g_assert(asked_note(&a, 1, 2, SECOND));
            g_assert(asked_take(&a, 1) == 2);
            g_assert(asked_take(&a, 1) == 0);
        } else {
            g_assert(!asked_note(&a, 1, 2, SECOND));
            finish(&a);
            g_assert(!asked_note(&a, 1, 2, SECOND));
            g_assert(asked_take(&a, 1) == 1);
            g_assert(asked_take(&a, 1) == 2);
        }
        g_assert(asked_take(&a, 1) == ASKED_NOBODY);
        asked_free(&a);
    }
}

typedef struct Asker {
    bool here;
    bool told;
    uint64_t when;
} Asker;

/* Against a list of who asked when: what is told, and who is there then. */
static void test_model(void)
{
    GRand *rand = g_rand_new_with_seed(7);

    for (unsigned round = 0; round < 200; round++) {
        Asker asker[8] = { 0 };
        unsigned here = 0, left = 0;
        uint64_t now = g_rand_int(rand) * SECOND;
        Asked a;

        g_assert(asked_init(&a) == 0);
        for (unsigned i = 0; i < 100; i++) {
            unsigned m = g_rand_int_range(rand, 0, 8);
            bool coming = false, told;

            if (left >> m & 1) {
                continue;
            }
            if (g_rand_int_range(rand, 0, 40) == 0) {
                here -= asker[m].here;
                asker[m].here = asker[m].told = false;
                left |= 1u << m;
                asked_leave(&a, m);
                continue;
            }
            /* whole units: when a mark ends is known then */
            now += g_rand_int_range(rand, 0, 3) * 4 * SECOND;
            for (unsigned k = 0; k < 8; k++) {
                asker[k].told &= now - asker[k].when < 12 * SECOND;
                coming |= k != m && asker[k].told;
            }
            told = here > asker[m].here && (asker[m].told || !coming);
            if (!told && !asker[m].here && here >= 6) {
                g_assert(asked_note(&a, 99, m, now));
                continue;
            }
            g_assert(asked_note(&a, 99, m, now) == told);
            here += !asker[m].here;
            asker[m].here = true;
            asker[m].told |= told;
            asker[m].when = told ? now : asker[m].when;
        }
        for (uint32_t m = asked_take(&a, 99); m != ASKED_NOBODY;
             m = asked_take(&a, 99)) {
            g_assert(asker[m].here);
            asker[m].here = false;
            here--;
        }
        g_assert(here == 0);
        asked_free(&a);
    }
    g_rand_free(rand);
}

/* In 2^14 buckets so few that none is ever full. */
#define MANY    50000u

/* How many are there that were noted; each by its member, or by nobody. */
static unsigned present(Asked *a, unsigned n)
{
    unsigned have = 0;

    for (unsigned i = 0; i < n; i++) {
        uint32_t member = asked_take(a, hash_of(i));

        if (member == 1000) {
            member = asked_take(a, hash_of(i));
        }
        g_assert(member == ASKED_NOBODY || member == i % 3);
        have += member != ASKED_NOBODY;
    }
    return have;
}

static void moved(Asked *a)
{
    while (a->was) {
        g_assert(asked_step(a));
    }
}

static void roomy(Asked *a)
{
    g_assert(asked_init(a) == 0);
    asked_limit(a, UINT64_C(7) << 19);
    asked_room(a, UINT64_C(7) << 16, ASKED_DOUBLE);
    moved(a);
}

/* Nothing is lost by growing, and it is used meanwhile. */
static void test_grow(void)
{
    Asked a;
    unsigned i = 0;

    roomy(&a);
    g_assert(a.n == (1 << 16) + 1 && a.count == 0);
    for (; i < MANY / 2; i++) {
        asked_note(&a, hash_of(i), i % 3, 0);
    }
    g_assert(a.count == i);
    /* for half of it there is room */
    asked_room(&a, UINT64_C(7) << 17, ASKED_DOUBLE);
    g_assert(a.n > 1 << 17 && a.n < 1 << 18);
    moved(&a);
    g_assert(a.count == i);
    asked_room(&a, UINT64_C(7) << 20, ASKED_DOUBLE);
    g_assert(a.n == (1 << 19) + 1);     /* and no further */
    while (asked_step(&a)) {
        for (unsigned k = 0; k < 1000 && i < MANY; k++, i++) {
            /* each time so late that it is not thought to come */
            g_assert(asked_note(&a, hash_of(i / 2), 1000, i * 16 * SECOND));
            asked_note(&a, hash_of(i), i % 3, 0);
        }
    }
    g_assert(a.n == 1 << 14);     /* it was too large */
    asked_rest(&a);
    while (asked_step(&a)) {
        ;
    }
    g_assert(a.count * 4 >= a.n * 7 * 3 && a.count <= a.n * 7);
    g_assert(a.count == i);
    g_assert(present(&a, i) == i);
    g_assert(a.count == 0);
    asked_free(&a);
}

/* It is as large as what stands in it, and loses little. */
static void test_grow_by_need(void)
{
    Asked a;
    unsigned had = 0;

    g_assert(asked_init(&a) == 0);
    g_assert(asked_bytes(&a) <= 64 << 10);
    asked_limit(&a, UINT64_C(7) << 22);
    for (unsigned i = 0; i < 1 << 20; i++) {
        if (i % 8192 == 0) {
            asked_room(&a, 8192, ASKED_DOUBLE);
            asked_step(&a);
        }
        asked_note(&a, hash_of(i), 0, 0);
    }
    asked_rest(&a);
    finish(&a);
    g_assert(asked_bytes(&a) <= 24 << 20);
    for (unsigned i = 0; i < 1 << 20; i++) {
        had += asked_take(&a, hash_of(i)) == 0;
    }
    g_test_message("%u of %u are there", had, 1 << 20);
    g_assert(had > (1 << 20) / 1000 * 999 && a.count == 0);
    finish(&a);
    g_assert(asked_bytes(&a) <= 512 << 10);
    asked_free(&a);
}

/*
 * Twofold, or by a quarter where that is all there is room for; what it has not
 * written yet is known.  At rest it has little more than it needs, or than what
 * one member asks about at once, and stays so.
 */
static void grow_and_rest(AskedGrowth how, unsigned hashes, unsigned times)
{
    unsigned percent = how == ASKED_DOUBLE ? 200 : 125, grew = 0;
    size_t n;
    Asked a;

    g_assert(asked_init(&a) == 0);
    asked_limit(&a, UINT64_C(7) << 22);
    for (unsigned i = 0; i < hashes; i++) {
        if (i % 512 == 0) {
            size_t bytes = asked_bytes(&a), more = asked_growth(&a, 512, how);

            n = a.n;
            asked_room(&a, 512, how);
            g_assert(a.n <= n * percent / 100 + 1);
            g_assert(asked_owed(&a) <= more);
            g_assert(bytes + more >= asked_bytes(&a));
            grew += more > 0;
            finish(&a);
            g_assert(asked_owed(&a) == 0);
        }
        asked_note(&a, hash_of(i), 0, 0);
    }
    g_test_message("grew %u times", grew);
    g_assert(grew == times);
    /* for what is asked by the way it grows once, and keeps that */
    asked_room(&a, 2560, how);
    asked_rest(&a);
    finish(&a);
    n = a.n;
    g_assert(n * 7 <= a.count + MAX(a.count / 10 * 3, 3000) + 14);
    for (unsigned i = 0; i < 100; i++) {
        g_assert(asked_growth(&a, 2560, ASKED_DOUBLE) == 0);
        asked_room(&a, 2560, how);
        /* nor is it moved for every hash that comes or goes */
        asked_take(&a, hash_of(i));
        asked_rest(&a);
        finish(&a);
        g_assert(a.n == n);
    }
    asked_free(&a);
}

static void test_grow_rest(void)
{
    grow_and_rest(ASKED_DOUBLE, 200000, 6);
    grow_and_rest(ASKED_FRUGAL, 200000, 19);
    grow_and_rest(ASKED_DOUBLE, 6000, 1);
    grow_and_rest(ASKED_FRUGAL, 6000, 3);
}

/*
 * Where a hash stands tells what its entry does not have: also where buckets
 * begin and end, and whatever their number.
 */
static void test_grow_edges(void)
{
    for (uint64_t n = 512; n < 4096; n += 1 + n / 7) {
        Asked a;

        g_assert(asked_init(&a) == 0);
        g_assert(asked_resize(&a, n) == 0);
        for (uint64_t b = 0; b < n; b++) {
            uint64_t first = ((b << 32) + n - 1) / n;
            uint64_t last = (((b + 1) << 32) + n - 1) / n - 1;

            asked_note(&a, first << 32, b % 1000, 0);
            asked_note(&a, last << 32 | UINT32_MAX, b % 1000, 0);
        }
        g_assert(a.count == 2 * n);
        asked_limit(&a, 1 << 20);
        asked_room(&a, 1 << 18, ASKED_DOUBLE);
        moved(&a);
        for (uint64_t b = 0; b < n; b++) {
            uint64_t first = ((b << 32) + n - 1) / n;
            uint64_t last = (((b + 1) << 32) + n - 1) / n - 1;

            g_assert(asked_take(&a, first << 32) == b % 1000);
            g_assert(asked_take(&a, last << 32 | UINT32_MAX) == b % 1000);
        }
        g_assert(a.count == 0);
        asked_free(&a);
    }
}

/* A member that left is forgotten, at once for asks, later for its number. */
static void test_leave(void)
{
    Asked a;

    roomy(&a);
    for (unsigned i = 0; i < 3000; i++) {
        asked_note(&a, hash_of(i), i % 3, 0);
    }
    asked_leave(&a, 1);
    g_assert(!asked_is_forgotten(&a, 1));
    g_assert(!asked_note(&a, hash_of(1), 0, 0));
    g_assert(asked_take(&a, hash_of(4)) == ASKED_NOBODY);
    g_assert(asked_step(&a));
    asked_leave(&a, 2);     /* while a pass is under way */
    finish(&a);
    g_assert(asked_is_forgotten(&a, 1));
    g_assert(asked_is_forgotten(&a, 2));
    g_assert(a.count == 1001);      /* one of them was noted for 0, too */
    g_assert(asked_take(&a, hash_of(1)) == 0);
    g_assert(present(&a, 3000) == 1000);
    asked_free(&a);
}

/* Of an entry nothing is left when its members go: those behind it stay. */
static void test_leave_nothing(void)
{
    Asked a;

    g_assert(asked_init(&a) == 0);
    /* of one bucket: their highest bits are alike */
    asked_note(&a, 4, 0, 0);
    asked_note(&a, 0, 1, 0);
    asked_note(&a, 2, 1, 0);
    asked_note(&a, 3, 0, 0);
    asked_leave(&a, 1);
    finish(&a);
    g_assert(a.count == 2);
    asked_leave(&a, 0);
    finish(&a);
    g_assert(a.count == 0);
    g_assert(asked_take(&a, 3) == ASKED_NOBODY);
    g_assert(asked_take(&a, 4) == ASKED_NOBODY);
    asked_free(&a);
}

static void *no_lengthen(void *from, size_t len, size_t want, void *at)
{
    return NULL;
}

/* No memory to grow: it stays as it is, and forgets members none the less. */
static void test_no_memory(void)
{
    Asked a;

    g_assert(asked_init(&a) == 0);
    asked_note(&a, hash_of(1), 1, 0);
    asked_leave(&a, 2);
    prim.lengthen = no_lengthen;
    asked_limit(&a, UINT64_C(7) << 20);
    asked_room(&a, UINT64_C(7) << 20, ASKED_DOUBLE);
    finish(&a);
    prim.lengthen = prim_real.lengthen;
    asked_room(&a, UINT64_C(7) << 20, ASKED_STAY);
    finish(&a);
    g_assert(a.n == 512);
    g_assert(asked_is_forgotten(&a, 2));
    g_assert(asked_take(&a, hash_of(1)) == 1);
    asked_free(&a);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/asked/others", test_others);
    g_test_add_func("/asked/left", test_left);
    g_test_add_func("/asked/note", test_note);
    g_test_add_func("/asked/coming", test_coming);
    g_test_add_func("/asked/same", test_same);
    g_test_add_func("/asked/oldest", test_oldest);
    g_test_add_func("/asked/grow", test_grow);
    g_test_add_func("/asked/grow/need", test_grow_by_need);
    g_test_add_func("/asked/grow/rest", test_grow_rest);
    g_test_add_func("/asked/grow/edges", test_grow_edges);
    g_test_add_func("/asked/leave", test_leave);
    g_test_add_func("/asked/leave/pair", test_leave_pair);
    g_test_add_func("/asked/leave/nothing", test_leave_nothing);
    g_test_add_func("/asked/model", test_model);
    g_test_add_func("/asked/no-memory", test_no_memory);
    return g_test_run();
}
