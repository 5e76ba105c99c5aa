/*
 * hash: the hash of a page
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * XXH3 with a secret seed per engine, because a guest chooses what its pages
 * hold.  It is built for several instruction sets; the processor's best one is
 * taken.  All have the same result.
 */
#ifndef KSM_HASH_H
#define KSM_HASH_H

#include <stdint.h>

typedef uint64_t (*KsmHash)(const void *page, uint64_t seed);

KsmHash hash_best(void);

typedef struct KsmHasher {
    KsmHash fn;
    uint64_t seed;          /* secret */
    uint64_t zero;          /* of a page of zeroes */
} KsmHasher;

void hasher_init(KsmHasher *h, uint64_t seed);

static inline uint64_t hash_page(const KsmHasher *h, const void *page)
{
    return h->fn(page, h->seed);
}

/* what every processor has: SSE2 or NEON */
uint64_t hash_base(const void *page, uint64_t seed);
uint64_t hash_avx2(const void *page, uint64_t seed);
uint64_t hash_avx512(const void *page, uint64_t seed);

#endif
