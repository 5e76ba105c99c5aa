/*
 * libksm tests: how much is done, and how long is rested
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "base/prim.h"
#include "engine/pace.h"

static uint64_t cpu;

static uint64_t fake_cpu(void)
{
    return cpu;
}

static void test_share(void)
{
    KsmBudget b;

    cpu = 12345;
    budget_begin(&b, 10, 0);
    g_assert(budget_used(&b) == 0);
    g_assert(b.limit > 0);
    cpu += 1000000;
    g_assert(budget_used(&b) == 1000000);
    /* worked 1 of 10, rests 9 of 10 */
    g_assert(budget_rest(&b, 10) == 9000000);
    g_assert(budget_rest(&b, 50) == 1000000);
    g_assert(budget_rest(&b, 100) == 0);
    g_assert(budget_rest(&b, 1) == 99000000);
}

static void test_limit(void)
{
    KsmBudget b;

    budget_begin(&b, 100, 12345);
    g_assert(b.limit == 12345);
}

static void test_spread(void)
{
    const uint64_t s = 1000000000;

    /* half of it done after a tenth of the time: rest, but not for long */
    g_assert(budget_spread(10 * s, s, 50, 100) == s);
    g_assert(budget_spread(s, s / 10, 50, 100) == s * 4 / 10);
    /* behind, or no target, or nothing to do: no rest */
    g_assert(budget_spread(10 * s, 6 * s, 50, 100) == 0);
    g_assert(budget_spread(0, 0, 50, 100) == 0);
    g_assert(budget_spread(s, 2 * s, 0, 0) == 0);
    g_assert(budget_spread(s, s, 1, 1) == 0);
    /* there are no chunks: the pass takes as long, too */
    g_assert(budget_spread(s, s / 4, 0, 0) == s * 3 / 4);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    prim.cpu_ns = fake_cpu;
    g_test_add_func("/budget/share", test_share);
    g_test_add_func("/budget/limit", test_limit);
    g_test_add_func("/budget/spread", test_spread);
    return g_test_run();
}
