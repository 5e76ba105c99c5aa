/*
 * libksm tests: mappings, counted and looked up
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <sys/mman.h>

#include <glib.h>

#include "base/prim.h"
#include "merge/vmas.h"
#include "util.h"

static uint64_t clock_ns;

static uint64_t clock_set(void)
{
    return clock_ns;
}

#define SECOND  UINT64_C(1000000000)

/*
 * Mappings are counted again when the count may be wrong, not more often: half
 * of @left may be gone after half a second, or a few in ten.  Where counting
 * takes long that is longer.
 */
static void test_recount(void)
{
    static const struct {
        size_t used, since;
        uint64_t age;
        bool counted;
        uint64_t took;
    } cases[] = {
        { 0, 0, 100 * SECOND, false, 0 },
        { 0, 1, 10 * SECOND, false, 0 },
        { 0, 1, 10 * SECOND + 1, true, 0 },
        { 500, 0, 100 * SECOND, false, 0 },
        { 501, 0, 10 * SECOND, false, 0 },
        { 501, 0, 10 * SECOND + 1, true, 0 },
        { 200, 200, SECOND, false, 0 },
        { 200, 201, SECOND, true, 0 },
        { 200, 201, SECOND / 2, false, 0 },
        { 200, 201, SECOND / 2 + 1, true, 0 },
        { 1001, 1, SECOND, true, 0 },
        { 0, 1, 20 * SECOND, false, SECOND / 20 },
        { 0, 1, 20 * SECOND + 1, true, SECOND / 20 },
        { 0, 1, 10 * SECOND + 1, true, SECOND / 50 },
        { 0, 1, 60 * SECOND, false, SECOND },
        { 0, 1, 60 * SECOND + 1, true, SECOND },
        { 200, 201, SECOND, false, SECOND / 4 },
        { 200, 201, SECOND + 1, true, SECOND / 4 },
        { 200, 201, SECOND / 2 + 1, true, SECOND / 20 },
    };
    KsmVmas made, *v = &made;

    vmas_init(v, 25, 0);
    prim.now_ns = clock_set;
    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        for (unsigned k = 0; k < 2; k++) {
            clock_ns = 100 * SECOND;
            *v = (KsmVmas) {
                .maps = v->maps, .percent = v->percent,
                .max = 1000, .limit = 1000, .used = cases[i].used,
                .since = cases[i].since, .counted = clock_ns,
                .took = cases[i].took,
            };
            clock_ns += cases[i].age;
            if (k) {
                vmas_free(v);
            } else {
                vmas_left(v);
            }
            if (cases[i].counted) {
                g_assert(v->counted == clock_ns && v->since == 0);
                g_assert(v->took > 0 && v->took < SECOND);
                g_assert(v->max == util_mappings_allowed());
            } else {
                g_assert(v->counted == 100 * SECOND && v->max == 1000);
                g_assert(v->since == cases[i].since);
            }
        }
    }
    prim.now_ns = prim_real.now_ns;
    vmas_close(v);
}

static int maps_fd;

static ssize_t maps_silent(int fd, void *buf, size_t len, off_t offset)
{
    return fd == maps_fd ? -EIO : prim_real.read_at(fd, buf, len, offset);
}

/* Left: as counted, less what was made since. */
static void test_left(void)
{
    size_t max = util_mappings_allowed(), used;
    KsmVmas made, *v = &made;

    /* looking makes the allocator map what it keeps, a sanitizer's above all */
    util_mappings();
    vmas_init(v, 25, 0);
    used = max / 100 * 75 - vmas_left(v);
    /* the allocator may map something, and the share is rounded */
    g_assert(used + 100 > util_mappings() && used < util_mappings() + 100);
    g_assert(v->max == max && v->used <= util_mappings() + 2);
    g_assert(v->used + 2 >= util_mappings());
    g_assert(vmas_free(v) == max - v->used);
    v->since = 10;
    g_assert(vmas_left(v) == v->limit - v->used - 10);
    g_assert(vmas_free(v) == max - v->used - 10);
    /* without a new count: the old one, and what was made */
    used = v->used + 10;
    maps_fd = v->maps;
    prim.read_at = maps_silent;
    vmas_recount(v);
    g_assert(vmas_free(v) == max - used);
    g_assert(v->since == 0);
    prim.read_at = prim_real.read_at;
    /* more than allowed: none is left, not very many */
    v->used = max + 1;
    v->counted = prim.now_ns();
    g_assert(vmas_left(v) == 0 && vmas_free(v) == 0);
    vmas_close(v);
}

/* A share of what the kernel allows, or a number, is for the program. */
static void test_reserve(void)
{
    size_t max = util_mappings_allowed();
    KsmVmas v;

    vmas_init(&v, 40, 0);
    vmas_left(&v);
    g_assert(v.limit == max * 60 / 100);
    v.reserve = max - 5000;
    vmas_recount(&v);
    vmas_left(&v);
    g_assert(v.limit == 5000);
    v.reserve = max + 1;
    vmas_recount(&v);
    g_assert(vmas_left(&v) == 0 && vmas_free(&v) > 0);
    vmas_close(&v);
}

/* Finds each mapping, even if a buffer's end cuts it. */
static void test_at(void)
{
    enum { N = 300 };
    char *mem = mmap(NULL, 2 * N * PAGE, PROT_READ,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *start, *end;
    KsmVmas v;

    g_assert(mem != MAP_FAILED);
    vmas_init(&v, 25, 0);
    for (unsigned i = 0; i < N; i++) {
        g_assert(mprotect(mem + 2 * i * PAGE, PAGE, PROT_NONE) == 0);
    }
    for (unsigned i = 0; i < 2 * N; i++) {
        for (unsigned at = 0; at < PAGE; at += PAGE - 1) {
            g_assert(vmas_at(&v, mem + i * PAGE + at, &start, &end));
            g_assert(start == mem + i * PAGE);
            g_assert(end == start + PAGE || i == 2 * N - 1);
        }
    }
    g_assert(munmap(mem, PAGE) == 0);
    g_assert(!vmas_at(&v, mem, &start, &end));
    maps_fd = v.maps;
    prim.read_at = maps_silent;
    g_assert(!vmas_at(&v, mem + PAGE, &start, &end));
    prim.read_at = prim_real.read_at;
    g_assert(munmap(mem, 2 * N * PAGE) == 0);
    vmas_close(&v);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/vmas/recount", test_recount);
    g_test_add_func("/vmas/left", test_left);
    g_test_add_func("/vmas/reserve", test_reserve);
    g_test_add_func("/vmas/at", test_at);
    return g_test_run();
}
