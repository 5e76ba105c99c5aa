/*
 * index: content -> place
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
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

#define ROOM_MIN    1024u   /* entries: more than are made between two looks */
#define FIT_SHARE   8u      /* of the lines are needed: it is too big */

/* Lines of the old table that are moved at once: about 0.2 ms. */
#define STEP_LINES 64u
/* ... and given back, or populated, at once: a huge page. */
#define MEMORY_LINES 32768u

/* The two lines of @t where a hash may stand. */
static inline size_t line_number(const IndexTable *t, uint32_t hash,
                                 unsigned which)
{
    uint32_t h = hash;

    if (which) {
        h *= UINT32_C(0x9e3779b1);
        h = (h ^ (h >> 15)) * UINT32_C(0x85ebca6b);
    }
    return ((uint64_t)h * t->n_lines) >> 32;
}

#define TOUCH_LINES 64u     /* that a bit stands for: a page */

/* NULL: nothing was ever put there. */
static inline IndexLine *line_at(const IndexTable *t, size_t i)
{
    size_t bit = i / TOUCH_LINES;

    return t->touched[bit / 64] >> (bit % 64) & 1 ? &t->line[i] : NULL;
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
    g_free(t->touched);
    *t = (IndexTable) { NULL };
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
    new.touched = g_new0(uint64_t, n_lines / TOUCH_LINES / 64 + 1);
    if (x->count) {
        x->old = x->now;
    } else {
        table_free(&x->now);
    }
    x->now = new;
    x->moved = x->released = x->populated = 0;
    return 0;
}

static size_t lines_for(size_t n)
{
    return n * 10 / LINE_LOAD_X10 + 4;
}

size_t index_table_bytes(size_t n)
{
    return lines_for(n) * sizeof(IndexLine);
}

int index_reserve(KsmIndex *x, size_t n)
{
    size_t n_lines = lines_for(n);

    if (n_lines <= x->now.n_lines) {
        return 0;
    }
    if (x->old.line) {
        x->wanted = MAX(x->wanted, n_lines);
        return 0;
    }
    return index_grow(x, n_lines);
}

/* Growing moves all entries: not for a few.  Nor is much to be left unused. */
static size_t lines_more(const KsmIndex *x)
{
    return x->now.n_lines + x->now.n_lines / 4;
}

void index_room(KsmIndex *x)
{
    if (!x->old.line &&
        lines_for(x->count + ROOM_MIN) > x->now.n_lines) {
        /* if it fails, pages find no place, and it is tried again */
        index_grow(x, MAX(lines_more(x), lines_for(2 * ROOM_MIN)));
    }
}

void index_fit(KsmIndex *x, size_t n)
{
    size_t n_lines = lines_for(MAX(n, x->count) + ROOM_MIN);

    if (x->old.line) {
        x->wanted = n_lines > x->now.n_lines ? MAX(x->wanted, n_lines)
                                             : x->wanted;
        return;
    }
    if (n_lines > x->now.n_lines) {
        index_grow(x, x->count ? MAX(n_lines, lines_more(x)) : n_lines);
    } else if (n_lines * FIT_SHARE < x->now.n_lines) {
        index_grow(x, 2 * n_lines);
    }
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

/* As line_at(), for writing. */
static IndexLine *line_touch(const IndexTable *t, size_t i)
{
    size_t bit = i / TOUCH_LINES;

    if (!line_at(t, i)) {
        /* volatile: before anything of the page is read */
        *(volatile uint8_t *)&t->line[i].used = 0;
        t->touched[bit / 64] |= UINT64_C(1) << (bit % 64);
    }
    return &t->line[i];
}

static bool table_put(const IndexTable *t, uint32_t hash, uint32_t place)
{
    size_t i = line_number(t, hash, 0), k = line_number(t, hash, 1);
    const IndexLine *a = line_at(t, i), *b = line_at(t, k);
    bool second = (b ? b->used : 0) < (a ? a->used : 0);

    return line_put(line_touch(t, second ? k : i), hash, place);
}

/* The old table shrinks by what was moved. */
static void old_release(KsmIndex *x)
{
    if (x->moved - x->released >= MEMORY_LINES) {
        prim.advise(x->old.line + x->released,
                    MEMORY_LINES * sizeof(IndexLine), MADV_DONTNEED);
        x->released += MEMORY_LINES;
    }
}

/*
 * Entries go anywhere in the new table: moving the first few would have the
 * kernel clear all its huge pages.  True: some were cleared.
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

/* Two loops, for hashes and for lines: waiting for memory overlaps. */
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

/* A bit of each byte that is @print; others may be set, if one is. */
static inline uint64_t bytes_like(const uint8_t *bytes, uint8_t print)
{
    const uint64_t ones = UINT64_C(0x0101010101010101);
    uint64_t word;

    memcpy(&word, bytes, sizeof(word));
    word ^= print * ones;
    return (word - ones) & ~word & (ones << 7);
}

G_STATIC_ASSERT(LINE_ENTRIES > 8 && LINE_ENTRIES < 16 &&
                G_BYTE_ORDER == G_LITTLE_ENDIAN);

typedef struct Sought {
    uint32_t hash;
    IndexIs is;             /* or NULL */
    const void *meant;
} Sought;

/* Eight prints are compared at once: a loop of them is hard to predict. */
static inline uint32_t line_find(const KsmIndex *x, const IndexLine *l,
                                 Sought s)
{
    for (unsigned from = 0; from < LINE_ENTRIES; from += 8) {
        uint64_t like = bytes_like(l->print + from, s.hash);

        for (; like; like &= like - 1) {
            unsigned k = from + __builtin_ctzll(like) / 8;

            if (k < LINE_ENTRIES && l->entry[k] &&
                x->hash_of(x->opaque, ~l->entry[k]) == s.hash &&
                (!s.is || s.is(s.meant, ~l->entry[k]))) {
                return ~l->entry[k];
            }
        }
    }
    return PLACE_NONE;
}

/* In the lines of @t from @from on. */
static inline uint32_t table_find(const KsmIndex *x, const IndexTable *t,
                                  size_t from, Sought s)
{
    uint32_t place = PLACE_NONE;

    for (unsigned which = 0; which < 2 && place == PLACE_NONE; which++) {
        size_t i = line_number(t, s.hash, which);
        const IndexLine *l = i < from ? NULL : line_at(t, i);

        place = l ? line_find(x, l, s) : PLACE_NONE;
    }
    return place;
}

static inline uint32_t both_find(const KsmIndex *x, Sought s)
{
    uint32_t place;

    if (!x->now.n_lines) {
        return PLACE_NONE;
    }
    place = table_find(x, &x->now, 0, s);
    return place != PLACE_NONE || !x->old.line ? place
           : table_find(x, &x->old, x->moved, s);
}

uint32_t index_lookup(const KsmIndex *x, uint32_t hash)
{
    return both_find(x, (Sought) { hash, NULL, NULL });
}

uint32_t index_find(const KsmIndex *x, uint32_t hash, IndexIs is,
                    const void *meant)
{
    return both_find(x, (Sought) { hash, is, meant });
}

/*
 * One function: GCC 12 drops calls to one that only prefetches, as if without
 * effects.
 */
void index_prefetch(const KsmIndex *x, uint32_t hash)
{
    for (unsigned which = 0; which < (x->old.line ? 4 : 2); which++) {
        const IndexTable *t = which < 2 ? &x->now : &x->old;
        const IndexLine *l = !t->n_lines ? NULL
                             : line_at(t, line_number(t, hash, which % 2));

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

/* Where the entry is in the lines of @t from @from on; NULL: it is not. */
static inline IndexLine *table_entry(const IndexTable *t, size_t from,
                                     uint32_t hash, uint32_t place,
                                     unsigned *at)
{
    for (unsigned which = 0; which < 2; which++) {
        size_t i = line_number(t, hash, which);
        IndexLine *l = i < from ? NULL : line_at(t, i);

        if (l && line_has(l, place, at)) {
            return l;
        }
    }
    return NULL;
}

static IndexLine *entry_find(const KsmIndex *x, uint32_t hash, uint32_t place,
                             unsigned *at)
{
    IndexLine *l = x->now.n_lines ? table_entry(&x->now, 0, hash, place, at)
                                  : NULL;

    return l || !x->old.line ? l
           : table_entry(&x->old, x->moved, hash, place, at);
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
