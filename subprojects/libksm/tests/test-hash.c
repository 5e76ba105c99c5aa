/*
 * libksm tests: the hash of a page is the same by all instruction sets
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A group's members and its daemon may run different sets, so they have to
 * agree.  The reference is xxHash's portable code, which no set of ours uses.
 */
#include <glib.h>
#include <string.h>

#include "base/hash.h"
#include "base/page.h"

#define XXH_INLINE_ALL
#define XXH_VECTOR 0    /* XXH_SCALAR */
#include <xxhash.h>

typedef struct Set {
    const char *name;
    KsmHash fn;
} Set;

static Set sets[4];
static unsigned n_sets;

static void set_add(const char *name, KsmHash fn)
{
    sets[n_sets++] = (Set) { name, fn };
}

/* Those that this processor has. */
static void sets_find(void)
{
    set_add("base", hash_base);
#ifdef KSM_HASH_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        set_add("avx2", hash_avx2);
    }
    if (__builtin_cpu_supports("avx512f")) {
        set_add("avx512", hash_avx512);
    }
#endif
    set_add("best", hash_best());
}

static const uint64_t seeds[] = {
    0, 1, 0x9e3779b97f4a7c15, 1ull << 63, UINT64_MAX,
};

static void check_page(const uint8_t *page)
{
    for (unsigned i = 0; i < G_N_ELEMENTS(seeds); i++) {
        uint64_t want = XXH3_64bits_withSeed(page, PAGE_BYTES, seeds[i]);

        for (unsigned s = 0; s < n_sets; s++) {
            uint64_t is = sets[s].fn(page, seeds[i]);

            if (is != want) {
                g_error("%s: 0x%" G_GINT64_MODIFIER "x, not 0x%"
                        G_GINT64_MODIFIER "x", sets[s].name, is, want);
            }
        }
    }
}

static void test_uniform(void)
{
    static const uint8_t bytes[] = { 0, 1, 0x55, 0xcc, 0xff };
    uint8_t page[PAGE_BYTES];

    for (unsigned i = 0; i < G_N_ELEMENTS(bytes); i++) {
        memset(page, bytes[i], sizeof(page));
        check_page(page);
    }
}

/* Also where a vector's load crosses lines, and pages. */
static void test_random(void)
{
    g_autoptr(GRand) rand = g_rand_new_with_seed(1);
    g_autofree uint8_t *memory = g_malloc(3 * PAGE_BYTES);

    for (unsigned i = 0; i < 3 * PAGE_BYTES; i++) {
        memory[i] = g_rand_int(rand);
    }
    for (unsigned offset = 0; offset < 2 * PAGE_BYTES; offset += 61) {
        check_page(memory + offset);
    }
}

/* No byte is left out, wherever it is in a vector. */
static void test_each_byte(void)
{
    uint8_t page[PAGE_BYTES] = { };

    for (unsigned s = 0; s < n_sets; s++) {
        uint64_t zero = sets[s].fn(page, seeds[2]);

        for (unsigned i = 0; i < PAGE_BYTES; i++) {
            page[i] = 1 << i % 8;
            g_assert(sets[s].fn(page, seeds[2]) != zero);
            page[i] = 0;
        }
    }
}

static void test_zero(void)
{
    static const uint8_t page[PAGE_BYTES];

    for (unsigned i = 0; i < G_N_ELEMENTS(seeds); i++) {
        KsmHasher hasher;

        hasher_init(&hasher, seeds[i]);
        g_assert(hasher.zero == hash_page(&hasher, page));
        g_assert(hasher.zero ==
                 XXH3_64bits_withSeed(page, PAGE_BYTES, seeds[i]));
    }
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    sets_find();
    for (unsigned i = 0; i < n_sets; i++) {
        g_test_message("set: %s", sets[i].name);
    }
    g_test_add_func("/hash/uniform", test_uniform);
    g_test_add_func("/hash/random", test_random);
    g_test_add_func("/hash/each-byte", test_each_byte);
    g_test_add_func("/hash/zero", test_zero);
    return g_test_run();
}
