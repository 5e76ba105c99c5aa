/*
 * Tests of hw/mem/ksm-vmas.c, and of the pool of coroutines under its limit
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/coroutine.h"
#include "../../hw/mem/ksm-vmas.h"

static void test_share(void)
{
    static const struct {
        uint64_t max_map_count;
        unsigned wanted;
        uint64_t runs;
        KsmVmas expected;
    } cases[] = {
        /* a few disks: a quarter is left, as before */
        { 65530, 128, 0, { 16382, 5691 } },
        { 65530, 2845, 20000, { 16382, 5691 } },
        /* 64 queues of 256 requests: what they may take */
        { 65530, 128 + 8192, 0, { 5000 + 30265, 15132 } },
        { 65530, 5000, 0, { 25000, 10000 } },
        /* the same, plugged in when three quarters are merged */
        { 65530, 128 + 8192, 24574, { 5000 + 30265, 5691 } },
        { 65530, 128 + 8192, 40000, { 5000 + 30265, 0 } },
        /* hosts with more, and with hardly any */
        { 1000000, 128, 0, { 250000, 122500 } },
        { UINT64_MAX, UINT_MAX, 0, { 5000 + 4 * (uint64_t)UINT_MAX,
                                     UINT_MAX } },
        { 8000, 128, 0, { 5512, 256 } },
        { 5000, 128, 0, { 5000, 0 } },
        { 0, 128, 10, { 0, 0 } },
    };

    for (int i = 0; i < ARRAY_SIZE(cases); i++) {
        KsmVmas vmas = ksm_vmas_share(cases[i].max_map_count, cases[i].wanted,
                                      cases[i].runs);

        if (cases[i].max_map_count == UINT64_MAX) {
            g_assert_cmpuint(vmas.reserve, >=, cases[i].expected.reserve);
            continue;
        }
        g_assert_cmpuint(vmas.reserve, ==, cases[i].expected.reserve);
        g_assert_cmpuint(vmas.pool, ==, cases[i].expected.pool);
    }
}

/* Whatever both take, in either order: it fits, with the rest. */
static void test_fits(void)
{
    for (int i = 0; i < 100000; i++) {
        uint64_t max = g_test_rand_int_range(0, 300000);
        unsigned wanted = g_test_rand_int_range(0, 100000);
        KsmVmas vmas = ksm_vmas_share(max, wanted, 0);
        uint64_t runs = (max - vmas.reserve) / 2;
        KsmVmas later = ksm_vmas_share(max, wanted * 2, runs);

        g_assert_cmpuint(vmas.reserve, <=, max);
        if (max > KSM_VMAS_FIXED) {
            g_assert_cmpuint(KSM_VMAS_FIXED + 2 * (vmas.pool + runs), <=, max);
            g_assert_cmpuint(KSM_VMAS_FIXED + 2 * (later.pool + runs), <=,
                             max);
        }
        g_assert_cmpuint(later.reserve, >=, vmas.reserve);
    }
}

static void coroutine_fn wait_once(void *opaque)
{
    qemu_coroutine_yield();
}

static unsigned mappings(void)
{
    g_autofree char *text = NULL;
    unsigned lines = 0;

    g_assert_true(g_file_get_contents("/proc/self/maps", &text, NULL, NULL));
    for (const char *at = text; (at = strchr(at, '\n')); at++) {
        lines++;
    }
    return lines;
}

#define N_COROUTINES 4000

static void coroutines_run(void)
{
    g_autofree Coroutine **co = g_new(Coroutine *, N_COROUTINES);

    for (int i = 0; i < N_COROUTINES; i++) {
        co[i] = qemu_coroutine_create(wait_once, NULL);
        qemu_coroutine_enter(co[i]);
    }
    for (int i = 0; i < N_COROUTINES; i++) {
        qemu_coroutine_enter(co[i]);
    }
}

/* The pool keeps all the stacks that it may, and no more. */
static void test_pool(void)
{
    unsigned before = mappings(), wanted = qemu_coroutine_pool_wanted();
    /* of this thread: two batches; the pool may have one too many */
    unsigned more = 3 * 128;

    if (!IS_ENABLED(CONFIG_COROUTINE_POOL)) {
        g_test_skip("coroutines are not pooled");
        return;
    }
    qemu_coroutine_inc_pool_size(N_COROUTINES);
    g_assert_cmpuint(qemu_coroutine_pool_wanted(), ==, wanted + N_COROUTINES);
    qemu_coroutine_limit_pool(500);
    coroutines_run();
    g_assert_cmpuint(mappings(), <=, before + 2 * (500 + more) + 100);
    qemu_coroutine_limit_pool(UINT_MAX);
    coroutines_run();
    g_assert_cmpuint(mappings(), >=, before + 2 * (N_COROUTINES - more));
    qemu_coroutine_dec_pool_size(N_COROUTINES);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/ksm-vmas/share", test_share);
    g_test_add_func("/ksm-vmas/fits", test_fits);
    g_test_add_func("/ksm-vmas/pool", test_pool);
    return g_test_run();
}
