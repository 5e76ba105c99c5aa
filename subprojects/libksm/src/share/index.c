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

#include "base/prim.h"
#include "share/index.h"

G_STATIC_ASSERT(sizeof(IndexLine) == 64);

/*
 * Entries a line is meant to hold: two choices of 12 overflow rarely at
 * 10.2 (85 %).
 */
#define LINE_LOAD_X10 102

/* Lines of the old table that are moved at once: about 0.2 ms. */
#define STEP_LINES 64u
/* ... and given back, or populated, at once: a huge page. */
#define MEMORY_LINES 32768u

/* The two lines of @t where a hash may stand. */
static size_t line_number(const IndexTable *t, uint32_t hash, unsigned which)
{
    uint32_t h = hash;

    if (which) {
        h *= UINT32_C(0x9e3779b1);
        h = (h ^ (h >> 15)) * UINT32_C(0x85ebca6b);
    }
    return ((uint64_t)h * t->n_lines) >> 32;
}

/* That line of the old table; NULL: it was moved, or there is no old table. */
static IndexLine *old_line(const KsmIndex *x, uint32_t hash, unsigned which)
{
    size_t i = line_number(&x->old, hash, which);

    return i < x->moved || !x->old.n_lines ? NULL : &x->old.line[i];
}

void index_init(KsmIndex *x, IndexHash hash_of, void *opaque)
{
    memset(x, 0, sizeof(*x));
    x->hash_of = hash_of;
    x->opaque = opaque;
}

static void table_free(IndexTable *t)
{
    if (t->line) {
        prim.unmap(t->line, t->n_lines * sizeof(*t->line));
    }
    *t = (IndexTable) { NULL, 0 };
}

void index_free(KsmIndex *x)
{
    table_free(&x->now);
    table_free(&x->old);
    x->moved = x->released = x->wanted = 0;
    x->count = 0;
}

/* A new table; the present one becomes the old one. */
static int index_grow(KsmIndex *x, size_t n_lines)
{
    IndexTable new = {
        .line = prim.map(NULL, n_lines * sizeof(IndexLine),
                         PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                         -1, 0),
        .n_lines = n_lines,
    };

    if (!new.line) {
        return -ENOMEM;
    }
    if (x->count) {
        x->old = x->now;
    } else {
        table_free(&x->now);
    }
    x->now = new;
    x->moved = x->released = x->populated = 0;
    return 0;
}

int index_reserve(KsmIndex *x, size_t n)
{
    size_t n_lines = n * 10 / LINE_LOAD_X10 + 4;

    if (n_lines <= x->now.n_lines) {
        return 0;
    }
    if (x->old.line) {
        x->wanted = MAX(x->wanted, n_lines);
        return 0;
    }
    return index_grow(x, n_lines);
}

static bool line_put(IndexLine *l, uint32_t hash, uint32_t place)
{
    for (unsigned k = 0; k < LINE_ENTRIES; k++) {
        if (!l->entry[k]) {
            l->entry[k] = ~place;
            l->print[k] = hash;
            l->used++;
            return true;
        }
    }
    return false;
}

static bool table_put(const IndexTable *t, uint32_t hash, uint32_t place)
{
    IndexLine *a = &t->line[line_number(t, hash, 0)];
    IndexLine *b = &t->line[line_number(t, hash, 1)];

    return line_put(b->used < a->used ? b : a, hash, place);
}

/* What was moved is not needed any more: the old table shrinks. */
static void old_release(KsmIndex *x)
{
    if (x->moved - x->released >= MEMORY_LINES) {
        prim.advise(x->old.line + x->released,
                    MEMORY_LINES * sizeof(IndexLine), MADV_DONTNEED);
        x->released += MEMORY_LINES;
    }
}

/*
 * Entries go anywhere in the new table: moving the first few of them would
 * have the kernel clear all of its huge pages.  True: some were cleared.
 */
static bool now_populate(KsmIndex *x)
{
    size_t left = x->now.n_lines - x->populated;
    size_t n = MIN(left, MEMORY_LINES);

    if (n) {
        prim.advise(x->now.line + x->populated, n * sizeof(IndexLine),
                    MADV_POPULATE_WRITE);
        x->populated += n;
    }
    return n;
}

/*
 * The hashes are asked for in another loop than the lines, so that waiting
 * for memory overlaps.
 */
static void line_move(KsmIndex *x, const IndexLine *l)
{
    uint32_t hash[LINE_ENTRIES];

    for (unsigned k = 0; k < LINE_ENTRIES; k++) {
        if (l->entry[k]) {
            hash[k] = x->hash_of(x->opaque, ~l->entry[k]);
            __builtin_prefetch(&x->now.line[line_number(&x->now, hash[k], 0)]);
            __builtin_prefetch(&x->now.line[line_number(&x->now, hash[k], 1)]);
        }
    }
    for (unsigned k = 0; k < LINE_ENTRIES; k++) {
        if (l->entry[k] && !table_put(&x->now, hash[k], ~l->entry[k])) {
            x->count--;
        }
    }
}

IndexWork index_step(KsmIndex *x)
{
    if (!x->old.line && !x->wanted) {
        return INDEX_DONE;
    }
    if (x->old.line && now_populate(x)) {
        return x->wanted ? INDEX_CROWDED : INDEX_GROWS;
    }
    for (unsigned i = 0; i < STEP_LINES && x->moved < x->old.n_lines; i++) {
        line_move(x, &x->old.line[x->moved++]);
    }
    old_release(x);
    if (x->moved >= x->old.n_lines) {
        table_free(&x->old);
        x->moved = x->released = 0;
        if (!x->wanted) {
            return INDEX_DONE;
        }
        if (index_grow(x, x->wanted) < 0) {
            return INDEX_DONE;      /* tried again in the next step */
        }
        x->wanted = 0;
    }
    return x->wanted ? INDEX_CROWDED : INDEX_GROWS;
}

static uint32_t line_find(const KsmIndex *x, const IndexLine *l,
                          uint32_t hash)
{
    uint8_t print = hash;

    for (unsigned k = 0; k < LINE_ENTRIES; k++) {
        if (l->print[k] == print && l->entry[k] &&
            x->hash_of(x->opaque, ~l->entry[k]) == hash) {
            return ~l->entry[k];
        }
    }
    return PLACE_NONE;
}

uint32_t index_lookup(const KsmIndex *x, uint32_t hash)
{
    uint32_t place = PLACE_NONE;

    if (!x->now.n_lines) {
        return PLACE_NONE;
    }
    for (unsigned i = 0; i < 2 && place == PLACE_NONE; i++) {
        place = line_find(x, &x->now.line[line_number(&x->now, hash, i)],
                          hash);
    }
    for (unsigned i = 0; x->old.line && i < 2 && place == PLACE_NONE; i++) {
        const IndexLine *l = old_line(x, hash, i);

        place = l ? line_find(x, l, hash) : PLACE_NONE;
    }
    return place;
}

void index_prefetch(const KsmIndex *x, uint32_t hash)
{
    for (unsigned i = 0; x->now.n_lines && i < 2; i++) {
        __builtin_prefetch(&x->now.line[line_number(&x->now, hash, i)]);
    }
    for (unsigned i = 0; x->old.line && i < 2; i++) {
        const IndexLine *l = old_line(x, hash, i);

        if (l) {
            __builtin_prefetch(l);
        }
    }
}

bool index_insert(KsmIndex *x, uint32_t hash, uint32_t place)
{
    if (!x->now.n_lines || !table_put(&x->now, hash, place)) {
        return false;
    }
    x->count++;
    return true;
}

static bool line_has(const IndexLine *l, uint32_t place, unsigned *at)
{
    for (unsigned k = 0; k < LINE_ENTRIES; k++) {
        if (l->entry[k] == ~place) {
            *at = k;
            return true;
        }
    }
    return false;
}

/* Where the entry is; NULL if it is not there. */
static IndexLine *entry_find(KsmIndex *x, uint32_t hash, uint32_t place,
                             unsigned *at)
{
    for (unsigned i = 0; x->now.n_lines && i < 2; i++) {
        IndexLine *l = &x->now.line[line_number(&x->now, hash, i)];

        if (line_has(l, place, at)) {
            return l;
        }
    }
    for (unsigned i = 0; x->old.line && i < 2; i++) {
        IndexLine *l = old_line(x, hash, i);

        if (l && line_has(l, place, at)) {
            return l;
        }
    }
    return NULL;
}

void index_remove(KsmIndex *x, uint32_t hash, uint32_t place)
{
    unsigned k;
    IndexLine *l = entry_find(x, hash, place, &k);

    if (l) {
        l->entry[k] = 0;
        l->used--;
        x->count--;
    }
}

void index_replace(KsmIndex *x, uint32_t hash, uint32_t from, uint32_t to)
{
    unsigned k;
    IndexLine *l = entry_find(x, hash, from, &k);

    if (l) {
        l->entry[k] = ~to;
    } else {
        index_insert(x, hash, to);
    }
}

size_t index_bytes(const KsmIndex *x)
{
    return (x->now.n_lines + x->old.n_lines - x->released) *
           sizeof(IndexLine);
}
