/*
 * libksm: content -> place
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * See index.h for the idea.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include <glib.h>

#include "index.h"
#include "prim.h"

G_STATIC_ASSERT(sizeof(IndexLine) == 64);

/*
 * Entries a line is meant to hold: two choices of 12 overflow rarely at
 * 10.2 (85 %).
 */
#define LINE_LOAD_X10 102

static size_t line_first(const KsmIndex *x, uint32_t hash)
{
    return ((uint64_t)hash * x->n_lines) >> 32;
}

static size_t line_second(const KsmIndex *x, uint32_t hash)
{
    uint32_t h = hash * UINT32_C(0x9e3779b1);

    h = (h ^ (h >> 15)) * UINT32_C(0x85ebca6b);
    return ((uint64_t)h * x->n_lines) >> 32;
}

void index_init(KsmIndex *x, IndexHash hash_of, void *opaque)
{
    memset(x, 0, sizeof(*x));
    x->hash_of = hash_of;
    x->opaque = opaque;
}

static IndexLine *lines_new(size_t n)
{
    IndexLine *line = prim.map(NULL, n * sizeof(*line),
                               PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    for (size_t i = 0; line && i < n; i++) {
        memset(line[i].place, 0xff, sizeof(line[i].place));
    }
    return line;
}

void index_free(KsmIndex *x)
{
    if (x->line) {
        prim.unmap(x->line, x->n_lines * sizeof(*x->line));
    }
    x->line = NULL;
    x->n_lines = 0;
    x->count = 0;
}

int index_reserve(KsmIndex *x, size_t n)
{
    size_t n_lines = n * 10 / LINE_LOAD_X10 + 4;
    KsmIndex bigger = *x;

    if (n_lines <= x->n_lines) {
        return 0;
    }
    bigger.line = lines_new(n_lines);
    if (!bigger.line) {
        return -ENOMEM;
    }
    bigger.n_lines = n_lines;
    bigger.count = 0;
    for (size_t i = 0; i < x->n_lines; i++) {
        for (unsigned k = 0; k < LINE_ENTRIES; k++) {
            uint32_t place = x->line[i].place[k];

            if (place != PLACE_NONE) {
                index_insert(&bigger, x->hash_of(x->opaque, place), place);
            }
        }
    }
    index_free(x);
    *x = bigger;
    return 0;
}

static uint32_t line_find(const KsmIndex *x, const IndexLine *l,
                          uint32_t hash)
{
    uint8_t print = hash;

    for (unsigned k = 0; k < LINE_ENTRIES; k++) {
        if (l->print[k] == print && l->place[k] != PLACE_NONE &&
            x->hash_of(x->opaque, l->place[k]) == hash) {
            return l->place[k];
        }
    }
    return PLACE_NONE;
}

uint32_t index_lookup(const KsmIndex *x, uint32_t hash)
{
    uint32_t place;

    if (!x->n_lines) {
        return PLACE_NONE;
    }
    place = line_find(x, &x->line[line_first(x, hash)], hash);
    if (place == PLACE_NONE) {
        place = line_find(x, &x->line[line_second(x, hash)], hash);
    }
    return place;
}

void index_prefetch(const KsmIndex *x, uint32_t hash)
{
    if (x->n_lines) {
        __builtin_prefetch(&x->line[line_first(x, hash)]);
        __builtin_prefetch(&x->line[line_second(x, hash)]);
    }
}

bool index_insert(KsmIndex *x, uint32_t hash, uint32_t place)
{
    IndexLine *a, *b;

    if (!x->n_lines) {
        return false;
    }
    a = &x->line[line_first(x, hash)];
    b = &x->line[line_second(x, hash)];
    if (b->used < a->used) {
        a = b;
    }
    for (unsigned k = 0; k < LINE_ENTRIES; k++) {
        if (a->place[k] == PLACE_NONE) {
            a->place[k] = place;
            a->print[k] = hash;
            a->used++;
            x->count++;
            return true;
        }
    }
    return false;
}

/* Where the entry is; NULL if it is not there. */
static IndexLine *entry_find(KsmIndex *x, uint32_t hash, uint32_t place,
                             unsigned *at)
{
    size_t line[2];

    if (!x->n_lines) {
        return NULL;
    }
    line[0] = line_first(x, hash);
    line[1] = line_second(x, hash);
    for (unsigned i = 0; i < 2; i++) {
        for (unsigned k = 0; k < LINE_ENTRIES; k++) {
            if (x->line[line[i]].place[k] == place) {
                *at = k;
                return &x->line[line[i]];
            }
        }
    }
    return NULL;
}

void index_remove(KsmIndex *x, uint32_t hash, uint32_t place)
{
    unsigned k;
    IndexLine *l = entry_find(x, hash, place, &k);

    if (l) {
        l->place[k] = PLACE_NONE;
        l->used--;
        x->count--;
    }
}

void index_replace(KsmIndex *x, uint32_t hash, uint32_t from, uint32_t to)
{
    unsigned k;
    IndexLine *l = entry_find(x, hash, from, &k);

    if (l) {
        l->place[k] = to;
    } else {
        index_insert(x, hash, to);
    }
}

size_t index_bytes(const KsmIndex *x)
{
    return x->n_lines * sizeof(*x->line);
}
