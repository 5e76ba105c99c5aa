/*
 * hash: the hash of a page, one instruction set
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Compiled once per instruction set; HASH_NAME is the function to define.
 */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/hash.h"

/* All AArch64 have NEON, as all x86-64 have SSE2: in hash_base. */
#if defined(__aarch64__) && !defined(__AARCH64EB__) && XXH_VECTOR != XXH_NEON
#error "xxhash.h does not use NEON"
#endif

uint64_t HASH_NAME(const void *page, uint64_t seed)
{
    return XXH3_64bits_withSeed(page, 4096, seed);
}
