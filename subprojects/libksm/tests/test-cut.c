/*
 * libksm tests: which runs get mappings
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A guest of 64 GiB is played: its chunks hold runs of equal pages whose
 * lengths follow a distribution, and are planned in some order, pass by pass,
 * with so many mappings.  What is saved is compared with the best that these
 * mappings can save.
 */
#include <glib.h>

#include "merge/cut.h"

#define CHUNKS  32768u      /* 64 GiB */
#define LIMIT   49147u      /* three quarters of Debian's vm.max_map_count */

typedef unsigned Length(GRand *rand);

/* --- distributions --- */

/* As in Debian guests: most pages are in runs of 8 and more, 24 on average. */
static unsigned debian(GRand *rand)
{
    unsigned n = 8;

    if (g_rand_int_range(rand, 0, 4) == 0) {
        return g_rand_int_range(rand, 1, 8);
    }
    while (n < CHUNK_PAGES && g_rand_int_range(rand, 0, 17)) {
        n++;
    }
    return n;
}

/* Half as many for twice the length. */
static unsigned halves(GRand *rand)
{
    unsigned n = 1;

    while (n < CHUNK_PAGES && g_rand_boolean(rand)) {
        n *= 2;
    }
    return n == CHUNK_PAGES ? n : g_rand_int_range(rand, n, 2 * n);
}

/* What has aged. */
static unsigned one_to_four(GRand *rand)
{
    return g_rand_int_range(rand, 1, 5);
}

static unsigned always_one(GRand *rand)
{
    return 1;
}

static unsigned whole_or_one(GRand *rand)
{
    return g_rand_int_range(rand, 0, 500) ? 1 : CHUNK_PAGES;
}

/* --- the guest --- */

typedef struct Guest {
    uint16_t **runs;        /* of each chunk, ended by 0; those still there */
    uint8_t *wait, *backoff;
    uint64_t todo;          /* pages */
    size_t left;
    uint64_t saved;
    KsmCut cut;
} Guest;

static int longer(gconstpointer a, gconstpointer b)
{
    unsigned x = GPOINTER_TO_UINT(*(gconstpointer *)a);
    unsigned y = GPOINTER_TO_UINT(*(gconstpointer *)b);

    return (x < y) - (x > y);
}

/* Returns the most that the mappings can save: two for each run. */
static uint64_t guest_init(Guest *g, Length *length)
{
    g_autoptr(GRand) rand = g_rand_new_with_seed(7);
    g_autoptr(GPtrArray) all = g_ptr_array_new();
    uint64_t best = 0;

    *g = (Guest) { .left = LIMIT };
    g->runs = g_new(uint16_t *, CHUNKS);
    g->wait = g_new0(uint8_t, CHUNKS);
    g->backoff = g_new0(uint8_t, CHUNKS);
    for (unsigned i = 0; i < CHUNKS; i++) {
        unsigned used = 0, n = 0;

        g->runs[i] = g_new0(uint16_t, CHUNK_PAGES);
        /* a third of it, with gaps between them */
        while (used < CHUNK_PAGES / 3) {
            unsigned pages = MIN(length(rand), CHUNK_PAGES - used);

            g->runs[i][n++] = pages;
            used += pages + 1;
            g->todo += pages;
            g_ptr_array_add(all, GUINT_TO_POINTER(pages));
        }
    }
    g_ptr_array_sort(all, longer);
    for (unsigned i = 0; i < all->len && i < LIMIT / 2; i++) {
        best += GPOINTER_TO_UINT(g_ptr_array_index(all, i));
    }
    return best;
}

static void guest_free(Guest *g)
{
    for (unsigned i = 0; i < CHUNKS; i++) {
        g_free(g->runs[i]);
    }
    g_free(g->runs);
    g_free(g->wait);
    g_free(g->backoff);
}

/* As merge/plan.c and its refusals have it. */
static void chunk_plan(Guest *g, unsigned chunk)
{
    uint16_t *runs = g->runs[chunk];
    unsigned kept = 0, n;

    for (n = 0; runs[n]; n++) {
        cut_see(&g->cut, runs[n], 2);
    }
    cut_decide(&g->cut, g->left, LIMIT, g->todo);
    for (unsigned i = 0; i < n; i++) {
        if (g->left >= 2 && cut_takes(&g->cut, runs[i])) {
            g->left -= 2;
            g->saved += runs[i];
            g->todo -= runs[i];
        } else {
            runs[kept++] = runs[i];
        }
    }
    runs[kept] = 0;
    g->backoff[chunk] = kept < n ? 0 : MIN(g->backoff[chunk] + 1u,
                                           cut_has_left(g->left, LIMIT)
                                           ? CUT_BACKOFF : 6);
    g->wait[chunk] = 1 << g->backoff[chunk];
}

static void guest_pass(Guest *g, const unsigned *order)
{
    cut_pass(&g->cut);
    for (unsigned i = 0; i < CHUNKS; i++) {
        unsigned chunk = order[i];

        if (g->wait[chunk] && --g->wait[chunk]) {
            continue;
        }
        if (g->runs[chunk][0]) {
            chunk_plan(g, chunk);
        }
    }
}

/* --- orders --- */

static Guest *sorted;

static unsigned chunk_longest(unsigned chunk)
{
    unsigned most = 0;

    for (unsigned i = 0; sorted->runs[chunk][i]; i++) {
        most = MAX(most, sorted->runs[chunk][i]);
    }
    return most;
}

static int by_longest(gconstpointer a, gconstpointer b, gpointer up)
{
    unsigned x = chunk_longest(*(const unsigned *)a);
    unsigned y = chunk_longest(*(const unsigned *)b);
    int sign = (x > y) - (x < y);

    return up ? sign : -sign;
}

typedef enum Order { IN_ORDER, SHORT_FIRST, LONG_FIRST } Order;

static double saves(Length *length, Order how)
{
    g_autofree unsigned *order = g_new(unsigned, CHUNKS);
    Guest g;
    uint64_t best = guest_init(&g, length), first;
    double part;

    for (unsigned i = 0; i < CHUNKS; i++) {
        order[i] = i;
    }
    if (how != IN_ORDER) {
        sorted = &g;
        g_qsort_with_data(order, CHUNKS, sizeof(*order), by_longest,
                          GUINT_TO_POINTER(how == SHORT_FIRST));
    }
    guest_pass(&g, order);
    first = g.saved;
    for (unsigned i = 0; i < 100; i++) {
        guest_pass(&g, order);
    }
    part = (double)g.saved / best;
    g_test_message("%.1f %% of the best (%.1f %% after a pass), %zu left",
                   100 * part, 100.0 * first / best, g.left);
    guest_free(&g);
    return part;
}

static const struct {
    const char *name;
    Length *length;
} lengths[] = {
    { "debian", debian },
    { "halves", halves },
    { "one-to-four", one_to_four },
    { "one", always_one },
    { "whole-or-one", whole_or_one },
};

/*
 * The worst order is the shortest first: mappings are not given up again when
 * it turns out that longer runs were to come.
 */
static void test_played(gconstpointer data)
{
    static const double least[] = {
        [IN_ORDER] = 0.95, [SHORT_FIRST] = 0.2, [LONG_FIRST] = 0.9,
    };
    Length *length = lengths[GPOINTER_TO_UINT(data) / 3].length;
    Order how = GPOINTER_TO_UINT(data) % 3;

    g_assert(saves(length, how) >= least[how]);
}

/* Where there is enough for all, all get them. */
static void test_enough(void)
{
    KsmCut cut = { 0 };

    for (unsigned i = 0; i < 100; i++) {
        cut_see(&cut, 1 + i % 8, 2);
    }
    cut_decide(&cut, 1000, 1000, 450);
    for (unsigned i = 1; i <= 8; i++) {
        g_assert(cut_takes(&cut, i));
    }
    /* some are kept for discards */
    cut_decide(&cut, 63, 1000, 450);
    g_assert(!cut_takes(&cut, CHUNK_PAGES));
}

/* Runs of the shortest length, in as many chunks as there are mappings for. */
static void test_part(void)
{
    unsigned taken = 0;
    KsmCut cut = { 0 };

    for (unsigned i = 0; i < 100; i++) {
        cut_see(&cut, 20, 2);
    }
    /* 1000 runs to come, which take 2000 */
    for (unsigned i = 0; i < 100; i++) {
        cut_decide(&cut, 500, 500, 20000);
        taken += cut_takes(&cut, 20);
        g_assert(cut_takes(&cut, 21));
        cut_pass(&cut);
    }
    g_assert(taken == 25);
}

int main(int argc, char **argv)
{
    static const char *orders[] = { "", "/short-first", "/long-first" };

    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/cut/enough", test_enough);
    g_test_add_func("/cut/part", test_part);
    for (unsigned i = 0; i < G_N_ELEMENTS(lengths) * 3; i++) {
        g_autofree char *path = g_strdup_printf("/cut/played/%s%s",
                                                lengths[i / 3].name,
                                                orders[i % 3]);

        g_test_add_data_func(path, GUINT_TO_POINTER(i), test_played);
    }
    return g_test_run();
}
