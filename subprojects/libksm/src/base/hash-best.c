/*
 * hash-best: which hash function this processor runs best
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/hash.h"
#include "base/page.h"

KsmHash hash_best(void)
{
#ifdef KSM_HASH_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) {
        return hash_avx512;
    }
    if (__builtin_cpu_supports("avx2")) {
        return hash_avx2;
    }
#endif
    return hash_base;
}

void hasher_init(KsmHasher *h, uint64_t seed)
{
    static const char zeroes[PAGE_BYTES];

    h->fn = hash_best();
    h->seed = seed;
    h->zero = hash_page(h, zeroes);
}
