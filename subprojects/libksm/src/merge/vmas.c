/*
 * vmas: how many mappings the process may still make
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "base/prim.h"
#include "merge/vmas.h"

/*
 * Counted again no sooner than this, nor than so many times what the last count
 * took (60,000 mappings: some 40 ms), ...
 */
#define RECOUNT_NS          (UINT64_C(10) * 1000000000)
#define RECOUNT_TOOK        400u
/* ... or, where little may be left, than this. */
#define RECOUNT_MIN_NS      UINT64_C(500000000)
#define RECOUNT_MIN_TOOK    4u
/* Whatever it takes: others make mappings, too, and limits change. */
#define REGUESS_NS          (UINT64_C(60) * 1000000000)
#define VMAS_GUESS      65530u  /* vm.max_map_count where not readable */
#define USED_GUESS      1000u   /* mappings, where they cannot be counted */

void vmas_init(KsmVmas *v, unsigned percent, size_t reserve)
{
    *v = (KsmVmas) {
        .maps = prim.open_read("/proc/self/maps"),
        .percent = percent,
        .reserve = reserve,
        .used = USED_GUESS,
    };
}

void vmas_close(KsmVmas *v)
{
    if (v->maps >= 0) {
        prim.close(v->maps);
    }
}

/* Lines of /proc/self/maps; negative: cannot be read. */
static ssize_t maps_lines(const KsmVmas *v)
{
    char buf[4096];
    ssize_t n, lines = 0;
    off_t at = 0;

    while ((n = prim.read_at(v->maps, buf, sizeof(buf), at)) > 0) {
        for (ssize_t i = 0; i < n; i++) {
            lines += buf[i] == '\n';
        }
        at += n;
    }
    return n < 0 ? n : lines;
}

typedef struct MapsLine {
    uintptr_t number[2];
    unsigned field;         /* 0, 1: in a number; 2: behind them */
} MapsLine;

/* Reads a line "START-END ..." character by character; true: it has ended. */
static bool line_char(MapsLine *l, char c)
{
    if (l->field < 2 && g_ascii_isxdigit(c)) {
        l->number[l->field] = l->number[l->field] << 4 |
                              g_ascii_xdigit_value(c);
    } else {
        l->field++;
    }
    return c == '\n';
}

bool vmas_at(const KsmVmas *v, const void *addr, char **start, char **end)
{
    MapsLine line = { .field = 0 };
    char buf[4096];
    ssize_t n;
    off_t at = 0;

    while ((n = prim.read_at(v->maps, buf, sizeof(buf), at)) > 0) {
        for (ssize_t i = 0; i < n; i++) {
            if (!line_char(&line, buf[i])) {
                continue;
            }
            if (line.number[0] <= (uintptr_t)addr &&
                line.number[1] > (uintptr_t)addr) {
                *start = (char *)line.number[0];
                *end = (char *)line.number[1];
                return true;
            }
            line = (MapsLine) { .field = 0 };
        }
        at += n;
    }
    return false;
}

static void vmas_count(KsmVmas *v)
{
    uint64_t cpu = prim.cpu_ns();
    g_autofree char *max = prim_read_file("/proc/sys/vm/max_map_count", NULL);
    ssize_t lines = maps_lines(v);

    v->max = max ? g_ascii_strtoull(max, NULL, 10) : VMAS_GUESS;
    v->limit = v->reserve ? v->max - MIN(v->max, v->reserve)
                          : v->max * (100 - v->percent) / 100;
    v->used = lines < 0 ? v->used + v->since : lines;
    v->since = 0;
    v->counted = prim.now_ns();
    v->took = prim.cpu_ns() - cpu;
}

static size_t vmas_below(const KsmVmas *v, size_t limit)
{
    size_t left = limit - MIN(limit, v->used);

    return left - MIN(left, v->since);
}

/* Counts again if the last count may be far off. */
static void vmas_look(KsmVmas *v)
{
    size_t left = v->limit - MIN(v->limit, v->used);
    uint64_t age = prim.now_ns() - v->counted;
    uint64_t rest = MIN(RECOUNT_TOOK * v->took, REGUESS_NS);

    if (!v->counted ||
        (v->since > left / 4 &&
         age > MAX(RECOUNT_MIN_NS, RECOUNT_MIN_TOOK * v->took)) ||
        ((v->since || left < v->limit / 2) &&
         age > MAX(RECOUNT_NS, rest))) {
        vmas_count(v);
    }
}

size_t vmas_left(KsmVmas *v)
{
    vmas_look(v);
    return vmas_below(v, v->limit);
}

size_t vmas_known(KsmVmas *v)
{
    bool guessed = v->since && prim.now_ns() - v->counted > REGUESS_NS;

    if (!v->counted || guessed) {
        vmas_count(v);
    }
    return vmas_below(v, v->limit);
}

size_t vmas_free(KsmVmas *v)
{
    vmas_look(v);
    return vmas_below(v, v->max);
}

void vmas_made(KsmVmas *v, size_t n)
{
    v->since += n;
}

void vmas_recount(KsmVmas *v)
{
    v->counted = 0;
}
