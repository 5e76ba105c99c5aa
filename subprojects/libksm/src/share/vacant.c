/*
 * vacant: slots that are free
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <sys/types.h>

#include "share/vacant.h"

#define SEARCH_LINES    256u    /* looked at for a free run */

/* The longest run of a word is 2^class slots at least; 0 has no class. */
static unsigned word_class(uint64_t word)
{
    unsigned class = 0;

    while (class < VACANT_CLASSES - 1) {
        word &= word >> (1u << class);
        if (!word) {
            break;
        }
        class++;
    }
    return class;
}

static void word_set(KsmVacant *v, size_t w, uint64_t word)
{
    VacantLine *l = &v->lines[w / 64];
    uint64_t bit = UINT64_C(1) << (w % 64), was = v->free[w];
    unsigned old = word_class(was), new = word_class(word);

    v->free[w] = word;
    if (was && word && old == new) {
        return;
    }
    if (was) {
        l->has[old] &= ~bit;
        v->n_words[old]--;
    }
    if (word) {
        l->has[new] |= bit;
        v->n_words[new]++;
    }
}

static uint64_t mask_of(unsigned first, unsigned n)
{
    return (n == 64 ? UINT64_MAX : (UINT64_C(1) << n) - 1) << first;
}

static void slots_mark(KsmVacant *v, uint32_t slot, unsigned n, bool free)
{
    while (n) {
        unsigned first = slot % 64, here = MIN(n, 64 - first);
        uint64_t word = v->free[slot / 64], mask = mask_of(first, here);

        word_set(v, slot / 64, free ? word | mask : word & ~mask);
        v->n += free ? here : -here;
        slot += here;
        n -= here;
    }
}

void vacant_add(KsmVacant *v, uint32_t slot, unsigned n)
{
    slots_mark(v, slot, n, true);
}

void vacant_take(KsmVacant *v, uint32_t slot, unsigned n)
{
    slots_mark(v, slot, n, false);
}

/* Where a word has the first run of @n, which it has. */
static unsigned word_run(uint64_t word, unsigned n)
{
    for (unsigned have = 1; have < n; ) {
        unsigned step = MIN(have, n - have);

        word &= word >> step;
        have += step;
    }
    return __builtin_ctzll(word);
}

/*
 * A word of that class, near the cursor; -1: none was seen.  Looks at
 * SEARCH_LINES lines at most, and goes on from there the next time.
 */
static ssize_t word_find(KsmVacant *v, uint32_t top, unsigned class)
{
    size_t n_lines = ROUND_UP_TO(top, VACANT_LINE) / VACANT_LINE;
    size_t l = v->cursor / VACANT_LINE;

    if (!v->n_words[class]) {
        return -1;
    }
    for (size_t i = 0; i < MIN(n_lines, SEARCH_LINES); i++, l++) {
        l = l < n_lines ? l : 0;
        if (v->lines[l].has[class]) {
            return l * 64 + __builtin_ctzll(v->lines[l].has[class]);
        }
    }
    v->cursor = l * VACANT_LINE;
    return -1;
}

unsigned vacant_after(const KsmVacant *v, uint32_t top, uint32_t slot,
                      unsigned n)
{
    unsigned got = 0;

    while (got < n) {
        uint64_t taken = ~v->free[(slot + got) / 64] >> ((slot + got) % 64);
        unsigned here = taken ? __builtin_ctzll(taken)
                              : 64 - (slot + got) % 64;

        got += here;
        if ((slot + got) % 64 || !here || slot + got >= top) {
            break;
        }
    }
    return MIN(got, n);
}

unsigned vacant_before(const KsmVacant *v, uint32_t slot, unsigned n)
{
    unsigned got = 0;

    while (got < n && slot > got) {
        unsigned in = (slot - got - 1) % 64 + 1;    /* of that word */
        uint64_t taken = ~(v->free[(slot - got - 1) / 64] << (64 - in));
        unsigned here = taken ? __builtin_clzll(taken) : 64;

        got += here;
        if (here < in) {
            break;
        }
    }
    return MIN(got, n);
}

uint32_t vacant_find(KsmVacant *v, uint32_t top, unsigned *n, unsigned least)
{
    unsigned min = MIN(least, 64), class = 0, got, before;
    ssize_t word = -1;
    uint32_t slot;

    while (1u << class < min) {
        class++;
    }
    for (; class < VACANT_CLASSES && word < 0; class++) {
        word = word_find(v, top, class);
    }
    if (word < 0) {
        return SLOT_NONE;
    }
    slot = word * 64 + word_run(v->free[word], MIN(*n, 1u << (class - 1)));
    got = vacant_after(v, top, slot, *n);
    before = vacant_before(v, slot, *n - got);
    *n = got + before;
    v->cursor = slot;
    return slot - before;
}

/* Looked for as by word_find(). */
uint32_t vacant_block(KsmVacant *v, uint32_t top)
{
    size_t n_lines = ROUND_UP_TO(top, VACANT_LINE) / VACANT_LINE;
    size_t l = v->cursor / VACANT_LINE;

    for (size_t i = 0; i < MIN(n_lines, SEARCH_LINES); i++, l++) {
        uint64_t whole;     /* words that are free */

        l = l < n_lines ? l : 0;
        whole = v->lines[l].has[VACANT_CLASSES - 1];
        for (unsigned w = 0; w < 64; w += CHUNK_PAGES / 64) {
            if ((uint8_t)(whole >> w) == UINT8_MAX) {
                return l * VACANT_LINE + w * 64;
            }
        }
    }
    v->cursor = l * VACANT_LINE;
    return SLOT_NONE;
}
