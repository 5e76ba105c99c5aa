/*
 * libksm tests: which parts of a chunk are isolated
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <string.h>

#include "merge/parts.h"
#include "rooms.h"

#define ROUNDS  2000u

typedef struct Scene {
    Rooms f;
    Mem *m;
    KsmRegion *r;
    KsmPlan *p;
} Scene;

/* A chunk that nothing moves: the plan is made by hand.  False: skipped. */
static bool scene_start(Scene *s)
{
    if (!rooms_open(&s->f, KSM_DIRTY_PAGEMAP, ROOMS_SHARING)) {
        return false;
    }
    s->m = mem_new(CHUNK_PAGES, 0, MEM_SMALL);
    mem_fill_run(s->m, 0, CHUNK_PAGES, 1, 1);
    s->r = rooms_add(&s->f, s->m, NULL);
    rooms_passes(&s->f, 2);
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        content_leave(&s->f.content, s->r, i, PAGE_NEW);
    }
    s->p = &s->f.plan;
    s->p->region = s->r;
    s->p->chunk = 0;
    s->f.costs = costs_guess;
    s->r->chunk[0].flags |= CHUNK_HUGE;
    memset(s->p->act, ACT_KEEP, sizeof(s->p->act));
    return true;
}

static void scene_end(Scene *s)
{
    mem_check(s->m);
    rooms_remove(&s->f, s->r);
    rooms_close(&s->f);
    mem_free(s->m);
}

/* Pages [i, i + n) are to map slots from @slot on. */
static void want(KsmPlan *p, unsigned i, unsigned n, uint32_t slot)
{
    for (unsigned k = 0; k < n; k++) {
        p->act[i + k] = ACT_MAP;
        p->slot[i + k] = slot + k;
    }
}

/* Counts what the acts come to, as plan.c does, and makes the parts. */
static void make(KsmPlan *p)
{
    p->zero = p->map = p->fresh = p->runs = 0;
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        bool has = p->act[i] != ACT_KEEP && p->act[i] != ACT_ZERO;

        p->zero += p->act[i] == ACT_ZERO;
        p->map += p->act[i] == ACT_MAP;
        p->fresh += has && p->act[i] != ACT_MAP;
        p->runs += has && !(i && plan_joined(p, i - 1));
    }
    parts_make(p);
}

static bool is_whole(const KsmPlan *p)
{
    return !p->breaks && p->n_spans == 1 && p->span[0].first == 0 &&
           p->span[0].n == CHUNK_PAGES;
}

/* Whole where that is cheaper: little is kept, or it lies in between. */
static void test_whole(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    want(s.p, 0, CHUNK_PAGES, 7);
    make(s.p);
    g_assert(is_whole(s.p) && s.p->kept == 0);
    /* 64 pages stay: less than breaking it */
    memset(s.p->act + 100, ACT_KEEP, 64);
    make(s.p);
    g_assert(is_whole(s.p) && s.p->kept == 64);
    memset(s.p->act, ACT_KEEP, CHUNK_PAGES);
    for (unsigned i = 0; i < CHUNK_PAGES; i += 8) {
        want(s.p, i, 1, 10 * i);
    }
    make(s.p);
    g_assert(is_whole(s.p) && s.p->kept == CHUNK_PAGES * 7 / 8);
    scene_end(&s);
}

/* A run of it goes, and the rest need not be moved. */
static void test_run(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    want(s.p, 200, 100, 7);
    make(s.p);
    g_assert(s.p->breaks && s.p->n_spans == 1 && s.p->kept == 0);
    g_assert(s.p->span[0].first == 200 && s.p->span[0].n == 100);
    /* a gap that costs less than another isolation */
    want(s.p, 320, 10, 700);
    make(s.p);
    g_assert(s.p->breaks && s.p->n_spans == 1 && s.p->kept == 20);
    /* after all it cannot be broken */
    parts_whole(s.p);
    g_assert(is_whole(s.p) && s.p->kept == CHUNK_PAGES - 110);
    /* where small pages are nothing is broken */
    s.r->chunk[0].flags &= ~CHUNK_HUGE;
    make(s.p);
    g_assert(!s.p->breaks && s.p->n_spans == 1 && s.p->span[0].first == 200);
    /* nor where a page stays */
    s.r->chunk[0].flags |= CHUNK_HUGE;
    page_set(s.r, 250, PAGE_SWAPPED);
    make(s.p);
    g_assert(!s.p->breaks && s.p->n_spans == 2);
    g_assert(s.p->span[0].n == 50 && s.p->span[1].first == 251);
    scene_end(&s);
}

/* What would take too long at once is done in parts. */
static void test_stall(void)
{
    const uint64_t limit = 1000000;
    unsigned pages = 0;
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    for (unsigned i = 0; i < CHUNK_PAGES; i += 2) {
        want(s.p, i, 1, 10 * i);
    }
    s.p->stall_limit_ns = limit;
    make(s.p);
    g_assert(s.p->breaks && s.p->n_spans == 2);
    for (unsigned i = 0; i < s.p->n_spans; i++) {
        unsigned n = s.p->span[i].n, maps = (n + 1) / 2;

        g_assert(s.f.costs.isolate_ns +
                 maps * (s.f.costs.map_ns + PAGE_DONE_NS) +
                 (n - maps) * s.f.costs.copy_ns <= limit);
        pages += maps;
    }
    g_assert(pages == CHUNK_PAGES / 2);
    s.p->stall_limit_ns = 10 * limit;
    make(s.p);
    g_assert(is_whole(s.p));
    scene_end(&s);
}

/* Found as it was: it may go for less, and cost more. */
static void test_cold(void)
{
    KsmChunk *c;
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    c = &s.r->chunk[0];
    s.p->split_min_pages = 64;
    g_assert(parts_gain(s.p, c) == 64);
    want(s.p, 200, 8, 7);
    make(s.p);
    g_assert(s.p->breaks && !parts_pay(s.p, &s.f.costs));
    c->same = 1;
    g_assert(parts_gain(s.p, c) == 8 && parts_pay(s.p, &s.f.costs));
    /* but not whatever it costs: a few pages twice what many may ... */
    s.f.costs.isolate_ns = 8 * 8 * PAGE_WORTH_NS - BREAK_NS - DROP_NS -
                           s.f.costs.map_ns - 8 * s.f.costs.move_ns;
    g_assert(parts_pay(s.p, &s.f.costs));
    s.f.costs.isolate_ns++;
    g_assert(!parts_pay(s.p, &s.f.costs));
    /* ... but 3 ms, all of them */
    want(s.p, 200, 48, 7);
    make(s.p);
    s.f.costs.isolate_ns = 3000000 - BREAK_NS - DROP_NS - s.f.costs.map_ns -
                           48 * s.f.costs.move_ns;
    g_assert(s.p->breaks && s.p->n_spans == 1);
    g_assert(parts_pay(s.p, &s.f.costs));
    s.f.costs.isolate_ns++;
    g_assert(!parts_pay(s.p, &s.f.costs));
    want(s.p, 200, 80, 7);
    make(s.p);
    s.f.costs.isolate_ns = 80 * 4 * PAGE_WORTH_NS - BREAK_NS - DROP_NS -
                           s.f.costs.map_ns - 80 * s.f.costs.move_ns;
    g_assert(s.p->breaks && s.p->n_spans == 1);
    g_assert(parts_pay(s.p, &s.f.costs));
    s.f.costs.isolate_ns++;
    g_assert(!parts_pay(s.p, &s.f.costs));
    s.f.costs = costs_guess;
    memset(s.p->act + 207, ACT_KEEP, 73);
    make(s.p);
    g_assert(!parts_pay(s.p, &s.f.costs));
    /* least of all may it be nothing */
    s.p->split_min_pages = 2;
    g_assert(parts_gain(s.p, c) == 1);
    c->flags &= ~CHUNK_HUGE;
    g_assert(parts_gain(s.p, c) == 1);
    scene_end(&s);
}

/* Would it pay, with so many pages written, new, or broken? */
static bool pays_with(Scene *s, unsigned written, unsigned fresh,
                      unsigned broken)
{
    KsmChunk *c = &s->r->chunk[0], found = *c;
    bool pays;

    c->written = written;
    c->fresh = fresh;
    c->broken = broken;
    s->p->late = parts_late(c);
    pays = parts_pay(s->p, &s->f.costs);
    *c = found;
    return pays;
}

static bool pays_late(Scene *s, unsigned refusals)
{
    s->r->chunk[0].late = refusals;
    return pays_with(s, 0, 0, 0);
}

/* Small pages that stand alone, refused before, and nothing is written. */
static void test_late(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    s.r->chunk[0].flags &= ~CHUNK_HUGE;
    s.p->split_min_pages = 1;
    want(s.p, 100, 1, 7);
    want(s.p, 300, 1, 70);
    make(s.p);
    g_assert(s.p->n_spans == 2);
    g_assert(!pays_late(&s, LATE_MIN - 1));
    g_assert(pays_late(&s, LATE_MIN));
    g_assert(!pays_with(&s, 1, 0, 0));
    g_assert(!pays_with(&s, 0, 1, 0));
    g_assert(!pays_with(&s, 0, 0, 1));
    /* not whatever it costs */
    s.f.costs.isolate_ns = 4 * PAGE_WORTH_NS;
    g_assert(!pays_late(&s, LATE_MIN));
    s.f.costs = costs_guess;
    /* nor all at once: 41.5 us each, 3 ms at most */
    memset(s.p->act, ACT_KEEP, sizeof(s.p->act));
    for (unsigned i = 0; i < 160; i += 2) {
        page_set(s.r, i + 1, PAGE_SWAPPED);
        want(s.p, i, 1, 10 * i);
        make(s.p);
        g_assert(s.p->n_spans == i / 2 + 1);
        g_assert(pays_late(&s, LATE_MIN) == (i / 2 + 1 <= 72));
    }
    for (unsigned i = 0; i < 160; i += 2) {
        page_set(s.r, i + 1, PAGE_NEW);
    }
    scene_end(&s);
}

/* A huge page is not broken for less because it was refused. */
static void test_late_huge(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    s.p->split_min_pages = 1;
    /* some 24 us a page */
    want(s.p, 100, 10, 7);
    make(s.p);
    g_assert(s.p->breaks && !pays_late(&s, LATE_MIN));
    s.r->chunk[0].same = 1;
    g_assert(pays_late(&s, LATE_MIN));
    scene_end(&s);
}

/* Whatever is planned, whatever it costs: all of it, once, and nothing else. */
static void test_any(void)
{
    GRand *rand = g_rand_new_with_seed(g_test_rand_int());
    Scene s;

    if (!scene_start(&s)) {
        g_rand_free(rand);
        return;
    }
    for (unsigned round = 0; round < ROUNDS; round++) {
        bool isolated[CHUNK_PAGES] = { false };
        unsigned kept = 0, few = g_rand_int_range(rand, 1, 20);
        unsigned stays = g_rand_int_range(rand, 0, 4) ? CHUNK_PAGES : few * 9;
        uint64_t most = UINT64_C(1) << g_rand_int_range(rand, 0, 24);

        memset(s.p->act, ACT_KEEP, sizeof(s.p->act));
        for (unsigned i = 0; i < CHUNK_PAGES; i++) {
            if (g_rand_int_range(rand, 0, few) == 0) {
                want(s.p, i, 1, g_rand_int_range(rand, 0, 2) ? i : 10 * i);
            }
        }
        if (stays < CHUNK_PAGES) {
            page_set(s.r, stays, PAGE_SWAPPED);
            s.p->act[stays] = ACT_KEEP;
        }
        s.f.costs.isolate_ns = g_rand_int_range(rand, 0, most);
        s.f.costs.copy_ns = g_rand_int_range(rand, 0, most);
        s.f.costs.map_ns = g_rand_int_range(rand, 0, most);
        s.f.costs.page_ns = g_rand_int_range(rand, 0, most);
        s.p->stall_limit_ns = g_rand_int_range(rand, 0, 2000000);
        make(s.p);
        g_assert(s.p->n_spans <= G_N_ELEMENTS(s.p->span));
        for (unsigned i = 0; i < s.p->n_spans; i++) {
            const PlanSpan *span = &s.p->span[i];

            for (unsigned k = span->first; k < span->first + span->n; k++) {
                g_assert(k < CHUNK_PAGES && !isolated[k] && k != stays);
                isolated[k] = true;
                kept += s.p->act[k] == ACT_KEEP;
            }
        }
        g_assert(kept == s.p->kept);
        for (unsigned i = 0; i < CHUNK_PAGES; i++) {
            g_assert(s.p->act[i] == ACT_KEEP || isolated[i]);
        }
        if (stays < CHUNK_PAGES) {
            g_assert(!s.p->breaks && !is_whole(s.p));
            page_set(s.r, stays, PAGE_NEW);
        }
    }
    g_rand_free(rand);
    scene_end(&s);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/parts/whole", test_whole);
    g_test_add_func("/parts/run", test_run);
    g_test_add_func("/parts/stall", test_stall);
    g_test_add_func("/parts/cold", test_cold);
    g_test_add_func("/parts/late", test_late);
    g_test_add_func("/parts/late/huge", test_late_huge);
    g_test_add_func("/parts/any", test_any);
    return g_test_run();
}
