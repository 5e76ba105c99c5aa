/*
 * libksm tests: contents that have a tag in common
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * As chance has it with 2 TiB of memory.  Included by one source of a program.
 */
#ifndef KSM_TEST_TWINS_H
#define KSM_TEST_TWINS_H

#include "base/hash.h"
#include "engine/state.h"
#include "house.h"

#define CONTENT_X   900001u
#define CONTENT_A   900002u     /* has the first tag of X */
#define CONTENT_Y   900003u     /* has the second tag of X as its first */

/* What some contents hash to, and what they are to hash to. */
static struct {
    uint64_t from, to;
} twins[2];

static uint64_t hash_twins(const void *page, uint64_t seed)
{
    uint64_t hash = hash_base(page, seed);

    for (unsigned i = 0; i < G_N_ELEMENTS(twins); i++) {
        if (hash == twins[i].from) {
            return twins[i].to;
        }
    }
    return hash;
}

/* From now on that is so.  Page 0 is written. */
static void twins_make(KsmEngine *e, KsmRegion *r, Mem *m)
{
    static const uint64_t id[] = { CONTENT_A, CONTENT_Y };
    uint64_t x;

    e->hasher.fn = hash_base;
    mem_fill(m, 0, CONTENT_X);
    x = hash_page(&e->hasher, page_addr(r, 0));
    for (unsigned i = 0; i < G_N_ELEMENTS(twins); i++) {
        uint32_t tag = i ? content_tag_again(r, x) : content_tag(r, x);

        mem_fill(m, 0, id[i]);
        twins[i].from = hash_page(&e->hasher, page_addr(r, 0));
        twins[i].to = (7 + i) | (uint64_t)((7 + i) ^ tag ^ r->salt) << 32;
    }
    e->hasher.fn = hash_twins;
}

#endif
