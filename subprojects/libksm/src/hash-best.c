/*
 * libksm: which hash function this processor runs best
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "hash.h"

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
