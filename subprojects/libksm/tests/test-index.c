/*
 * libksm tests: the index against a plain array
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <sys/mman.h>

#include <glib.h>

#include "index.h"
#include "prim.h"

#define PLACES 20000u

/* What the owners of places know: place -> hash. */
static uint32_t hash_of[PLACES];

static uint32_t ask(void *opaque, uint32_t place)
{
    g_assert(opaque == hash_of);
    g_assert(place < PLACES);
    return hash_of[place];
}

static KsmIndex *index_new(size_t entries)
{
    KsmIndex *x = g_new(KsmIndex, 1);

    index_init(x, ask, hash_of);
    g_assert(index_reserve(x, entries) == 0);
    return x;
}

static void index_done(KsmIndex *x)
{
    index_free(x);
    g_free(x);
}

static void test_empty(void)
{
    KsmIndex x;

    index_init(&x, ask, hash_of);
    g_assert(index_lookup(&x, 1) == PLACE_NONE);
    g_assert(!index_insert(&x, 1, 1));
    index_remove(&x, 1, 1);
    index_prefetch(&x, 1);
    index_free(&x);
}

/* Every page that was taken in is found, and nothing else is. */
static void test_model(void)
{
    KsmIndex *x = index_new(PLACES);
    bool in[PLACES] = { false };
    size_t inserted = 0, refused = 0;

    for (uint32_t i = 0; i < PLACES; i++) {
        /* odd multiplier: hashes differ */
        hash_of[i] = i * UINT32_C(2654435761) + 12345;
    }
    for (unsigned round = 0; round < 10 * PLACES; round++) {
        uint32_t place = g_test_rand_int_range(0, PLACES);

        if (in[place]) {
            index_remove(x, hash_of[place], place);
            in[place] = false;
            inserted--;
        } else if (index_insert(x, hash_of[place], place)) {
            in[place] = true;
            inserted++;
        } else {
            refused++;
        }
    }
    g_assert(x->count == inserted);
    /* two choices: hardly any page finds both of its lines full */
    g_assert(refused < PLACES / 100);
    for (uint32_t i = 0; i < PLACES; i++) {
        g_assert(index_lookup(x, hash_of[i]) == (in[i] ? i : PLACE_NONE));
    }
    index_done(x);
}

/* At the load it was made for, almost all find a place. */
static void test_load(void)
{
    KsmIndex *x = index_new(PLACES);
    size_t refused = 0;

    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = g_test_rand_int();
        refused += !index_insert(x, hash_of[i], i);
    }
    g_assert(refused < PLACES / 100);
    g_assert(index_bytes(x) < PLACES * 7);
    index_done(x);
}

/* A guest that knew the seed could make all hashes equal: still bounded. */
static void test_same_hash(void)
{
    KsmIndex *x = index_new(PLACES);
    size_t in = 0;

    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = 7;
        in += index_insert(x, 7, i);
    }
    g_assert(in <= 2 * LINE_ENTRIES);
    g_assert(in >= LINE_ENTRIES);
    g_assert(index_lookup(x, 7) < PLACES);
    for (uint32_t i = 0; i < PLACES; i++) {
        index_remove(x, 7, i);
    }
    g_assert(x->count == 0);
    g_assert(index_lookup(x, 7) == PLACE_NONE);
    index_done(x);
}

/* The eight bits kept of a hash are not the hash. */
static void test_print_collides(void)
{
    KsmIndex *x = index_new(100);

    hash_of[1] = 0x00000042;
    hash_of[2] = 0x00000142;
    g_assert(index_insert(x, hash_of[1], 1));
    g_assert(index_lookup(x, hash_of[2]) == PLACE_NONE);
    g_assert(index_insert(x, hash_of[2], 2));
    g_assert(index_lookup(x, hash_of[1]) == 1);
    g_assert(index_lookup(x, hash_of[2]) == 2);
    index_done(x);
}

static void test_replace(void)
{
    KsmIndex *x = index_new(100);

    hash_of[3] = hash_of[4] = hash_of[5] = 99;
    g_assert(index_insert(x, 99, 3));
    index_replace(x, 99, 3, 4);
    g_assert(index_lookup(x, 99) == 4);
    g_assert(x->count == 1);
    index_replace(x, 99, 5, 3);     /* was not there: put in */
    g_assert(x->count == 2);
    index_done(x);
}

static void test_grow(void)
{
    KsmIndex *x = index_new(10);
    size_t lines = x->n_lines;

    for (uint32_t i = 0; i < 10; i++) {
        hash_of[i] = i * 77777777;
        g_assert(index_insert(x, hash_of[i], i));
    }
    g_assert(index_reserve(x, PLACES) == 0);
    g_assert(x->n_lines > lines);
    for (uint32_t i = 0; i < 10; i++) {
        g_assert(index_lookup(x, hash_of[i]) == i);
    }
    g_assert(x->count == 10);
    index_done(x);
}

static void *map_fails(void *addr, size_t len, int prot, int flags, int fd,
                       off_t offset)
{
    errno = ENOMEM;
    return NULL;
}

static void test_grow_fails(void)
{
    KsmIndex *x = index_new(10);

    hash_of[0] = 5;
    g_assert(index_insert(x, 5, 0));
    prim.map = map_fails;
    g_assert(index_reserve(x, PLACES) == -ENOMEM);
    prim.map = prim_real.map;
    g_assert(index_lookup(x, 5) == 0);
    index_done(x);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/index/empty", test_empty);
    g_test_add_func("/index/model", test_model);
    g_test_add_func("/index/load", test_load);
    g_test_add_func("/index/same-hash", test_same_hash);
    g_test_add_func("/index/print-collides", test_print_collides);
    g_test_add_func("/index/replace", test_replace);
    g_test_add_func("/index/grow", test_grow);
    g_test_add_func("/index/grow-fails", test_grow_fails);
    return g_test_run();
}
