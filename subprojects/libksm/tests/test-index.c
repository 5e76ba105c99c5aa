/*
 * libksm tests: the index against a plain array
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <glib.h>

#include "base/prim.h"
#include "share/index.h"

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

static void all_found(const KsmIndex *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        g_assert(index_lookup(x, hash_of[i]) == i);
    }
}

/* It begins with nothing, and has room for as much as comes. */
static void test_room(void)
{
    size_t bytes = 0;
    unsigned grown = 0;
    KsmIndex x;

    index_init(&x, ask, hash_of);
    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = (i + 1) * UINT32_C(0x9e3779b1);
        index_room(&x);
        if (index_bytes(&x) > bytes) {
            bytes = index_bytes(&x);
            grown++;
        }
        index_step(&x);
        g_assert(index_insert(&x, hash_of[i], i));
    }
    g_assert(x.count == PLACES && grown > 3);
    while (index_step(&x) != INDEX_DONE) {
        ;
    }
    all_found(&x, PLACES);
    /* between that and twice as much */
    g_assert(index_bytes(&x) > PLACES * 6 && index_bytes(&x) < PLACES * 16);
    index_free(&x);
}

/* What it will need is had at once, and what it does not need goes. */
static void test_fit(void)
{
    size_t bytes;
    KsmIndex x;

    index_init(&x, ask, hash_of);
    index_fit(&x, PLACES);
    bytes = index_bytes(&x);
    g_assert(bytes > PLACES * 6 && bytes < PLACES * 8);
    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = (i + 1) * UINT32_C(0x9e3779b1);
        index_room(&x);
        g_assert(index_insert(&x, hash_of[i], i));
    }
    g_assert(index_bytes(&x) == bytes && !x.old.line);
    /* some of it, and much too little, of what there is: it stays */
    index_fit(&x, PLACES / 4);
    index_fit(&x, 0);
    g_assert(index_bytes(&x) == bytes && !x.old.line);
    for (uint32_t i = PLACES / 100; i < PLACES; i++) {
        index_remove(&x, hash_of[i], i);
    }
    index_fit(&x, PLACES / 2);
    g_assert(!x.old.line);
    index_fit(&x, PLACES / 100);
    g_assert(x.old.line);
    while (index_step(&x) != INDEX_DONE) {
        ;
    }
    g_assert(index_bytes(&x) < bytes / 4);
    all_found(&x, PLACES / 100);
    g_assert(x.count == PLACES / 100);
    index_fit(&x, PLACES);
    g_assert(index_bytes(&x) > bytes);
    all_found(&x, PLACES / 100);
    index_free(&x);
}

/* Every page taken in is found, and nothing else is. */
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

/* At the intended load almost all find a place. */
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

/* Equal hashes, by a guest that knew the seed: still bounded. */
static void test_same_hash(void)
{
    KsmIndex *x = index_new(PLACES);
    size_t in = 0;

    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = 7;
        in += index_insert(x, 7, i);
    }
    /* two full lines */
    g_assert(in == 2 * LINE_ENTRIES);
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

static void step_all(KsmIndex *x)
{
    IndexWork work;

    do {
        work = index_step(x);
    } while (work != INDEX_DONE);
}

static void test_grow(void)
{
    KsmIndex *x = index_new(10);
    size_t lines = x->now.n_lines;

    for (uint32_t i = 0; i < 10; i++) {
        hash_of[i] = i * 77777777;
        g_assert(index_insert(x, hash_of[i], i));
    }
    g_assert(index_reserve(x, PLACES) == 0);
    g_assert(x->now.n_lines > lines);
    for (uint32_t i = 0; i < 10; i++) {
        g_assert(index_lookup(x, hash_of[i]) == i);
    }
    g_assert(x->count == 10);
    step_all(x);
    for (uint32_t i = 0; i < 10; i++) {
        g_assert(index_lookup(x, hash_of[i]) == i);
    }
    index_done(x);
}

/*
 * While it grows, again and again, each entry is found in its table, or is gone
 * for want of a place.
 */
static void test_model_grows(void)
{
    KsmIndex *x = index_new(PLACES / 2);
    bool in[PLACES] = { false };
    size_t want = PLACES / 2, found = 0, taken = 0;

    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = i * UINT32_C(2654435761) + 54321;
    }
    for (unsigned round = 0; round < 20 * PLACES; round++) {
        uint32_t place = g_test_rand_int_range(0, PLACES);

        if (in[place]) {
            g_assert(index_lookup(x, hash_of[place]) == place ||
                     want < PLACES);
            index_remove(x, hash_of[place], place);
            g_assert(index_lookup(x, hash_of[place]) == PLACE_NONE);
            in[place] = false;
        } else {
            in[place] = index_insert(x, hash_of[place], place);
        }
        if (round % 1000 == 0 && want < 4 * PLACES) {
            want += 3000;
            g_assert(index_reserve(x, want) == 0);
        }
        if (round % 64 == 0) {
            index_step(x);
        }
    }
    step_all(x);
    g_assert(!x->old.line && !x->wanted);
    for (uint32_t i = 0; i < PLACES; i++) {
        bool there = index_lookup(x, hash_of[i]) == i;

        g_assert(in[i] || !there);
        found += there;
        taken += in[i];
    }
    g_assert(x->count == found);
    g_assert(found * 100 > taken * 99);
    index_done(x);
}

static unsigned asked;

static uint32_t ask_counted(void *opaque, uint32_t place)
{
    asked++;
    return hash_of[place];
}

/* Growing moves little at once. */
static void test_grow_bounded(void)
{
    KsmIndex *x = index_new(PLACES);
    unsigned steps = 0;
    IndexWork work;

    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = g_test_rand_int();
        index_insert(x, hash_of[i], i);
    }
    x->hash_of = ask_counted;
    asked = 0;
    g_assert(index_reserve(x, 2 * PLACES) == 0);
    g_assert(asked == 0);
    /* again, before that is done: it comes to that */
    g_assert(index_reserve(x, 4 * PLACES) == 0);
    g_assert(asked == 0);
    do {
        asked = 0;
        work = index_step(x);
        g_assert(asked <= 64 * LINE_ENTRIES);
        g_assert(work != INDEX_DONE || x->now.n_lines >= 4 * PLACES / 11);
        steps++;
    } while (work != INDEX_DONE);
    g_assert(steps > 2 * PLACES / (64 * LINE_ENTRIES));
    g_assert(index_bytes(x) < 4 * PLACES * 7);
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
    /* the second of two may fail later: it is tried again */
    g_assert(index_reserve(x, 100) == 0);
    g_assert(index_reserve(x, PLACES) == 0);
    prim.map = map_fails;
    g_assert(index_step(x) == INDEX_CROWDED);   /* prepares the new table */
    for (unsigned i = 0; i < 3; i++) {
        g_assert(index_step(x) == INDEX_DONE);
        g_assert(x->wanted);
    }
    prim.map = prim_real.map;
    g_assert(index_step(x) == INDEX_GROWS);
    step_all(x);
    g_assert(index_lookup(x, 5) == 0);
    g_assert(index_bytes(x) > PLACES * 6);
    index_done(x);
}

/* Nearly full for long: lines with more room stay known. */
static void test_churn(void)
{
    enum { IN = PLACES / 100 * 95 };
    KsmIndex *x = index_new(PLACES);
    size_t refused = 0;
    bool in[PLACES] = { false };

    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = i * UINT32_C(2654435761) + 777;
    }
    /* the window moves by one, many times around */
    for (uint32_t i = 0; i < 30 * PLACES; i++) {
        uint32_t come = i % PLACES, go = (i + PLACES - IN) % PLACES;

        if (i >= IN && in[go]) {
            index_remove(x, hash_of[go], go);
        }
        in[come] = index_insert(x, hash_of[come], come);
        refused += !in[come];
    }
    g_assert(refused < 30 * PLACES / 200);
    index_done(x);
}

/* Absent entries are not found, growing or not. */
static void test_absent(void)
{
    const uint32_t place = ~UINT32_C(0xabababab);
    KsmIndex *x = index_new(PLACES);
    size_t count;

    /* the bytes kept of the hashes look like an entry */
    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = (i * UINT32_C(2654435761)) << 8 | 0xab;
        index_insert(x, hash_of[i], i);
    }
    count = x->count;
    for (unsigned grows = 0; grows < 2; grows++) {
        for (uint32_t i = 0; i < PLACES; i++) {
            index_remove(x, hash_of[i], place);
        }
        g_assert(x->count == count);
        g_assert(index_reserve(x, 4 * PLACES) == 0);
    }
    g_assert(x->old.line);
    step_all(x);
    g_assert(x->count == count);
    index_done(x);
}

/* What finds no place in the bigger table is gone, and not counted. */
static void test_grow_crowded(void)
{
    KsmIndex *x = index_new(10);
    uint32_t n = 2 * LINE_ENTRIES;

    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = 7;
    }
    for (uint32_t i = 0; i < n; i++) {
        index_insert(x, 7, i);
    }
    g_assert(x->count >= LINE_ENTRIES);
    g_assert(index_reserve(x, PLACES) == 0);
    for (uint32_t i = 0; i < n; i++) {
        g_assert(index_insert(x, 7, 1000 + i));
    }
    step_all(x);
    g_assert(x->count == n);
    for (uint32_t i = 0; i < n; i++) {
        g_assert(index_lookup(x, 7) >= 1000);
        index_remove(x, 7, 1000 + i);
    }
    g_assert(x->count == 0 && index_lookup(x, 7) == PLACE_NONE);
    index_done(x);
}

/* Bytes of lines had; how many are populated, and not. */
static struct {
    int64_t bytes;
    unsigned maps;
    const char *old, *now;
    size_t released, populated, most;
} held;

static void *held_map(void *addr, size_t len, int prot, int flags, int fd,
                      off_t offset)
{
    void *map = prim_real.map(addr, len, prot, flags, fd, offset);

    held.bytes += len;
    held.maps++;
    held.old = held.now;
    held.now = map;
    held.released = held.populated = 0;
    return map;
}

static int held_unmap(void *addr, size_t len)
{
    held.bytes -= len;
    return prim_real.unmap(addr, len);
}

static int held_advise(void *addr, size_t len, int advice)
{
    if (advice == MADV_DONTNEED) {
        g_assert((char *)addr == held.old + held.released);
        held.released += len;
    } else {
        g_assert(advice == MADV_POPULATE_WRITE);
        g_assert((char *)addr == held.now + held.populated);
        held.populated += len;
    }
    held.most = MAX(held.most, len);
    return prim_real.advise(addr, len, advice);
}

static uint32_t ask_same(void *opaque, uint32_t place)
{
    return place * UINT32_C(2654435761);
}

static void held_start(void)
{
    memset(&held, 0, sizeof(held));
    prim.map = held_map;
    prim.unmap = held_unmap;
    prim.advise = held_advise;
}

/* Steps until it has grown; memory comes before its use, and goes. */
static void grow_all(KsmIndex *x, size_t was, size_t now)
{
    size_t moved = 0;

    g_assert(index_bytes(x) == was + now);
    while (index_step(x) != INDEX_DONE) {
        g_assert(x->moved == 0 || held.populated == now);
        g_assert(x->moved <= moved + 64);
        moved = x->moved;
        g_assert(held.released <= moved * sizeof(IndexLine));
        g_assert(index_bytes(x) == was + now - held.released);
    }
    g_assert(held.populated == now);
    g_assert(held.released == was / (2 << 20) * (2 << 20));
    g_assert(held.most <= 2 << 20);
    g_assert(index_bytes(x) == now && held.bytes == now);
}

static void test_memory(void)
{
    const size_t line = sizeof(IndexLine);
    KsmIndex x;

    held_start();
    index_init(&x, ask_same, NULL);
    /* 10.2 entries a line, and a few lines in reserve */
    g_assert(index_reserve(&x, 102000) == 0);
    g_assert(index_bytes(&x) == 10004 * line);
    g_assert(index_step(&x) == INDEX_DONE);
    /* empty: nothing is to be moved */
    g_assert(index_reserve(&x, 1020000) == 0);
    g_assert(index_bytes(&x) == 100004 * line && held.bytes == 100004 * line);
    g_assert(index_step(&x) == INDEX_DONE && held.maps == 2);
    g_assert(index_reserve(&x, 1020000) == 0 && held.maps == 2);
    g_assert(index_reserve(&x, 102) == 0 && held.maps == 2);
    for (uint32_t i = 0; i < 1000; i++) {
        g_assert(index_insert(&x, ask_same(NULL, i), i));
    }
    for (size_t n = 200004; n <= 400004; n += 200000) {
        g_assert(index_reserve(&x, (n - 4) * 102 / 10) == 0);
        grow_all(&x, n > 300000 ? 200004 * line : 100004 * line, n * line);
    }
    for (uint32_t i = 0; i < 1000; i++) {
        g_assert(index_lookup(&x, ask_same(NULL, i)) == i);
    }
    /* freed twice while it grows: nothing is left */
    g_assert(index_reserve(&x, 5000000) == 0);
    index_step(&x);
    g_assert(index_reserve(&x, 6000000) == 0);
    index_free(&x);
    g_assert(held.bytes == 0 && x.count == 0 && index_bytes(&x) == 0);
    g_assert(index_lookup(&x, 0) == PLACE_NONE);
    g_assert(index_step(&x) == INDEX_DONE && held.bytes == 0);
    index_free(&x);
    prim = prim_real;
}

/* Entries are found anywhere in their two lines. */
static void test_every_entry(void)
{
    KsmIndex *x = index_new(1000);
    bool found[2 * LINE_ENTRIES] = { false };

    for (uint32_t i = 0; i < 2 * LINE_ENTRIES; i++) {
        hash_of[i] = 0x12345678;
        g_assert(index_insert(x, hash_of[i], i));
    }
    for (unsigned n = 0; n < 2 * LINE_ENTRIES; n++) {
        uint32_t place = index_lookup(x, 0x12345678);

        g_assert(place < 2 * LINE_ENTRIES && !found[place]);
        found[place] = true;
        index_remove(x, 0x12345678, place);
    }
    g_assert(index_lookup(x, 0x12345678) == PLACE_NONE && x->count == 0);
    index_done(x);
}

static size_t present_pages(const KsmIndex *x)
{
    size_t n = x->now.n_lines * sizeof(IndexLine) / 4096, present = 0;
    int fd = prim_real.open_read("/proc/self/pagemap");
    uint64_t entry;

    g_assert(fd >= 0);
    for (size_t i = 0; i < n; i++) {
        off_t at = ((uintptr_t)x->now.line / 4096 + i) * sizeof(entry);

        g_assert(prim_real.read_at(fd, &entry, sizeof(entry), at) ==
                 sizeof(entry));
        present += entry >> 63;
    }
    prim_real.close(fd);
    return present;
}

static long faults(void)
{
    struct rusage usage;

    g_assert(getrusage(RUSAGE_SELF, &usage) == 0);
    return usage.ru_minflt;
}

/* Unwritten pages are not read: each would cost a fault. */
static void test_untouched(void)
{
    KsmIndex *x = index_new(1000000);
    long before;

    for (uint32_t i = 0; i < PLACES; i++) {
        hash_of[i] = i * UINT32_C(2654435761);
        g_assert(index_lookup(x, hash_of[i]) == PLACE_NONE);
        index_prefetch(x, hash_of[i]);
        index_remove(x, hash_of[i], i);
    }
    g_assert(present_pages(x) == 0);
    before = faults();
    for (uint32_t i = 0; i < 1000; i++) {
        g_assert(index_insert(x, hash_of[i], i));
    }
    before = faults() - before;
    g_test_message("%ld faults, %zu pages", before, present_pages(x));
    g_assert(present_pages(x) > 500);
    g_assert(before < present_pages(x) * 3 / 2);
    for (uint32_t i = 0; i < PLACES; i++) {
        g_assert(index_lookup(x, hash_of[i]) == (i < 1000 ? i : PLACE_NONE));
    }
    index_done(x);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/index/empty", test_empty);
    g_test_add_func("/index/room", test_room);
    g_test_add_func("/index/fit", test_fit);
    g_test_add_func("/index/model", test_model);
    g_test_add_func("/index/load", test_load);
    g_test_add_func("/index/same-hash", test_same_hash);
    g_test_add_func("/index/print-collides", test_print_collides);
    g_test_add_func("/index/replace", test_replace);
    g_test_add_func("/index/grow", test_grow);
    g_test_add_func("/index/model-grows", test_model_grows);
    g_test_add_func("/index/grow-bounded", test_grow_bounded);
    g_test_add_func("/index/grow-fails", test_grow_fails);
    g_test_add_func("/index/churn", test_churn);
    g_test_add_func("/index/absent", test_absent);
    g_test_add_func("/index/grow-crowded", test_grow_crowded);
    g_test_add_func("/index/memory", test_memory);
    g_test_add_func("/index/untouched", test_untouched);
    g_test_add_func("/index/every-entry", test_every_entry);
    return g_test_run();
}
