/*
 * libksm tests: on a machine that is slower than any the engine is made for
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The engine measures what isolating pages costs and leaves alone what does not
 * pay: next to all, on an emulated CPU, which is some hundred times as slow.
 * KSM_TEST_SLOWER=n has the engine see an n-th of its time, unless the test has
 * a clock of its own: on a busy host an n-th may still be too much.
 */
#ifndef KSM_SLOWER_H
#define KSM_SLOWER_H

#include <stdlib.h>

#include "base/prim.h"

static uint64_t slower_factor = 1;

static uint64_t slower_cpu_ns(void)
{
    return prim_real.cpu_ns() / slower_factor;
}

static inline void slower_init(void)
{
    const char *text = getenv("KSM_TEST_SLOWER");

    if (text && atoi(text) > 1 && prim.cpu_ns == prim_real.cpu_ns) {
        slower_factor = atoi(text);
        prim.cpu_ns = slower_cpu_ns;
    }
}

#endif
