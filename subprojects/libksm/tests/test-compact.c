/*
 * libksm tests: few mappings, also after hours
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * When contents are gathered, how much at once, and that it ends.  How it is
 * done: test-gather.c.
 */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/prim.h"
#include "engine/compact.h"
#include "engine/state.h"
#include "house.h"
#include "scatter.h"
#include "share/store-local.h"

#define PAGES   1024u
#define AT      100u    /* pages that map scattered slots: so many ... */
#define PIECES  6u
#define LEN     8u      /* ... of that length */
#define ALL     (PIECES * LEN)
#define SECOND  UINT64_C(1000000000)

/* Two regions with the same content. */
typedef struct Scene {
    KsmEngine *e;
    Mem *a, *b;
    KsmRegion *ra, *rb;
} Scene;

static uint64_t clock_ns;

static uint64_t now_as_told(void)
{
    return clock_ns;
}

/* So much later, until there is nothing to do. */
static void later(Scene *s, unsigned seconds)
{
    int64_t wait = 0;

    clock_ns += seconds * SECOND;
    for (unsigned i = 0; wait == 0; i++) {
        g_assert(i < 1000);
        wait = ksm_step(s->e, 0);
        clock_ns += wait == 0;
    }
}

static bool scene_start(Scene *s, const KsmRegionOps *ops)
{
    clock_ns = 1000 * SECOND;
    prim.now_ns = now_as_told;
    prim.cpu_ns = util_cpu_by_call;
    s->e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    if (!s->e) {
        return false;
    }
    if (s->e->uffd_wp < 0) {
        g_test_skip("no write-protection of shared memory by userfaultfd "
                    "(Linux 5.19): nothing is replaced in place");
        ksm_engine_free(s->e);
        return false;
    }
    s->a = mem_new(PAGES, 0, MEM_SMALL);
    s->b = mem_new(PAGES, 0, MEM_SMALL);
    mem_fill_run(s->a, 0, PAGES, 1, 1);
    mem_fill_run(s->b, 0, PAGES, 1, 1);
    s->ra = util_add(s->e, s->a, &mem_ops);
    s->rb = util_add(s->e, s->b, ops);
    for (unsigned i = 0; util_stats(s->e).pages_sharing < PAGES; i++) {
        g_assert(i < 20);
        util_passes(s->e, 1);
    }
    later(s, 1);
    s->e->costs = costs_guess;
    return true;
}

static void scene_end(Scene *s)
{
    mem_check(s->a);
    mem_check(s->b);
    mem_fill_run(s->a, 0, PAGES, 50000, 1);
    mem_fill_run(s->b, 0, PAGES, 60000, 1);
    util_remove(s->ra);
    util_remove(s->rb);
    mem_check(s->a);
    mem_check(s->b);
    prim.now_ns = prim_real.now_ns;
    ksm_engine_free(s->e);
    mem_free(s->a);
    mem_free(s->b);
}

static void scatter(Scene *s, size_t page)
{
    scatter_pages(&s->e->rejoin, s->ra, page, PIECES, LEN, 2);
}

static unsigned pieces_of(const KsmRegion *r, size_t page)
{
    unsigned pieces = 1;

    for (size_t i = page + 1; i < page + ALL; i++) {
        pieces += !region_joined(r, i);
    }
    return pieces;
}

static uint64_t shared(Scene *s)
{
    return util_stats(s->e).pages_shared;
}

/* Credit as if so many were merged now. */
static void credit_give(Scene *s, uint64_t merged)
{
    s->e->total.merged += merged;
}

/* Two sweeps for what was merged to be old, and others follow at once. */
static void test_sweep(void)
{
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    /* what was merged first has earned enough */
    scatter(&s, AT);
    g_assert(shared(&s) == PAGES + ALL);
    later(&s, 29);
    g_assert(pieces_of(s.ra, AT) == PIECES);
    later(&s, 30);
    later(&s, 30);
    g_assert(pieces_of(s.ra, AT) == 1 && pieces_of(s.rb, AT) == 1);
    g_assert(shared(&s) == PAGES);
    g_assert(s.e->compact.behind == 0);
    mem_check(s.a);
    mem_check(s.b);
    scene_end(&s);
}

/* In vain a few times, and then not at all, before more is merged. */
static void test_ends(void)
{
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    for (unsigned i = 0; i < 8; i++) {
        later(&s, 31);
    }
    g_assert(s.e->compact.credit == 0);
    scatter(&s, AT);
    for (unsigned i = 0; i < 8; i++) {
        later(&s, 31);
        g_assert(s.e->compact.spent == 0);
    }
    g_assert(pieces_of(s.ra, AT) == PIECES);
    /* too few pages are not worth a sweep */
    credit_give(&s, 30);
    for (unsigned i = 0; i < 4; i++) {
        later(&s, 31);
        g_assert(s.e->compact.spent == 0);
    }
    g_assert(pieces_of(s.ra, AT) == PIECES);
    credit_give(&s, 4);
    for (unsigned i = 0; i < 4; i++) {
        later(&s, 300);     /* rarer by now */
    }
    g_assert(pieces_of(s.ra, AT) == 1);
    scene_end(&s);
}

/* A page for each two that were merged, and one stretch too many at most. */
static void test_credit(void)
{
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    for (unsigned i = 0; i < 8; i++) {
        later(&s, 31);
    }
    scatter(&s, AT);
    scatter(&s, AT + 200);
    scatter(&s, AT + 512);
    credit_give(&s, 2 * (ALL + 1));
    for (unsigned i = 0; i < 8; i++) {
        later(&s, 31);
    }
    g_assert(pieces_of(s.ra, AT) == 1);
    g_assert(pieces_of(s.ra, AT + 200) == 1);
    g_assert(pieces_of(s.ra, AT + 512) == PIECES);
    g_assert(s.e->compact.credit == 0);
    /* nor does it grow for ever */
    credit_give(&s, 100000);
    later(&s, 31);
    g_assert(s.e->compact.credit <= PAGES / 2);
    scene_end(&s);
}

static uint64_t cpu_cheap(void)
{
    static uint64_t ns;

    return ++ns;
}

/* A small part in each sweep; more in the next, if that has paid. */
static void test_share(void)
{
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    for (unsigned i = 0; i < 4; i++) {
        /* what is between is a long piece */
        scatter(&s, 20 + i * 120);
        scatter(&s, 532 + i * 120);
    }
    for (size_t page = 0, behind = 0; page < PAGES; ) {
        size_t end = (page / CHUNK_PAGES + 1) * CHUNK_PAGES;

        page = gather_follow(&s.e->gather, s.rb, page, end, true, &behind);
    }
    later(&s, 31);
    g_assert(s.e->compact.doubt == 2);
    prim.cpu_ns = cpu_cheap;
    later(&s, 31);
    /* 128 pages, and what was begun; some in free slots, as far as those go */
    g_assert(pieces_of(s.ra, 20) <= 2 && pieces_of(s.ra, 260) == 1);
    g_assert(pieces_of(s.ra, 380) == PIECES);
    g_assert(s.e->compact.doubt == 1);
    s.e->compact.credit = 1000;
    later(&s, 31);
    g_assert(pieces_of(s.ra, 380) == 1);
    g_assert(s.e->compact.doubt == 0);
    scene_end(&s);
}

static uint64_t cpu_dear(void)
{
    static uint64_t ns;

    return ns += 10000000;
}

/* What took longer than mappings are worth ends it, until more is merged. */
static void test_doubt(void)
{
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    scatter(&s, AT);
    scatter(&s, AT + 512);
    later(&s, 31);
    prim.cpu_ns = cpu_dear;
    /* more than is gathered in a sweep that is in doubt */
    later(&s, 31);
    prim.cpu_ns = util_cpu_by_call;
    g_assert(pieces_of(s.ra, AT) == 1);
    g_assert(s.e->compact.credit == 0 && s.e->compact.doubt == 2);
    g_assert(shared(&s) == PAGES);
    scene_end(&s);
}

/*
 * Two map the same contents in different orders: whoever gathers them tears the
 * other's apart.  That is noticed, and comes to an end.
 */
static void test_orders(void)
{
    unsigned moves = 0;
    uint32_t tag;
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    for (unsigned i = 0; i < 32; i++) {
        mem_fill_run(s.b, AT + i * LEN, LEN, 1 + AT + (31 - i) * LEN, 1);
    }
    for (unsigned i = 0; util_stats(s.e).pages_sharing < PAGES; i++) {
        g_assert(i < 100);
        later(&s, 5);
    }
    s.e->costs = costs_guess;
    tag = s.ra->tag[AT];
    for (unsigned i = 0; i < 100; i++) {
        credit_give(&s, i < 5 ? 200 : 0);
        later(&s, 31);
        moves += s.ra->tag[AT] != tag;
        tag = s.ra->tag[AT];
    }
    g_test_message("its pages have moved %u times", moves);
    g_assert(moves <= 5);
    g_assert(s.e->compact.credit == 0);
    g_assert(shared(&s) == PAGES);
    scene_end(&s);
}

/* Those who may not follow now do later; until then nothing else is gathered. */
static void test_behind(void)
{
    uint64_t due;
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    scatter(&s, AT);
    later(&s, 31);
    s.b->inhibited = "a device";
    later(&s, 31);
    g_assert(pieces_of(s.ra, AT) == 1 && s.ra->tag[AT] != s.rb->tag[AT]);
    g_assert(shared(&s) == PAGES + ALL);
    g_assert(s.e->compact.behind == ALL);
    /* more than a sixtyfourth: no more than that */
    scatter(&s, AT + 512);
    for (unsigned i = 0; i < 20; i++) {
        credit_give(&s, 100);
        later(&s, 31);
    }
    g_assert(pieces_of(s.ra, AT + 512) == PIECES);
    g_assert(s.e->compact.behind == 2 * ALL);
    /* they are asked ever less often, while there is no credit */
    due = 0;
    s.e->compact.credit = 0;
    for (unsigned i = 0; i < 20; i++) {
        uint64_t was = s.e->compact.due;

        s.e->compact.merged = s.e->total.merged;
        later(&s, 31);
        due = MAX(due, s.e->compact.due - MIN(was, s.e->compact.due));
    }
    g_assert(due > 400 * SECOND);
    s.b->inhibited = NULL;
    later(&s, 2000);
    later(&s, 2000);
    g_assert(s.e->compact.behind == 0);
    g_assert(shared(&s) == PAGES);
    scene_end(&s);
}

/* Where some can never follow nothing is gathered. */
static void test_never(gconstpointer data)
{
    static const KsmRegionOps blind = { 0 };
    unsigned which = GPOINTER_TO_UINT(data);
    pid_t child = 0;
    Scene s;

    if (!scene_start(&s, which ? &mem_ops : &blind)) {
        return;
    }
    scatter(&s, AT);
    if (which == 1) {
        store_local_pool(s.e->content.store)->keep_all = true;
    } else if (which == 2) {
        child = fork();
        while (child == 0) {
            pause();
        }
        g_assert(child > 0);
    }
    for (unsigned i = 0; i < 8; i++) {
        credit_give(&s, 200);
        later(&s, 31);
    }
    g_assert(pieces_of(s.ra, AT) == PIECES);
    if (child) {
        g_assert(kill(child, SIGKILL) == 0);
        g_assert(waitpid(child, NULL, 0) == child);
        for (unsigned i = 0; i < 4; i++) {
            later(&s, 31);
        }
        g_assert(pieces_of(s.ra, AT) == 1);
    }
    scene_end(&s);
}

/* Nor where memory is short: what is read may be in swap. */
static void test_tight(void)
{
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    scatter(&s, AT);
    for (unsigned i = 0; i < 8; i++) {
        credit_give(&s, 200);
        s.e->memcg.tight = true;
        s.e->memcg.asked = clock_ns + 31 * SECOND;
        later(&s, 31);
    }
    g_assert(pieces_of(s.ra, AT) == PIECES);
    /* that was not in vain: it was not tried */
    later(&s, 31);
    s.b->inhibited = "a device";
    later(&s, 31);
    later(&s, 31);
    g_assert(pieces_of(s.ra, AT) == 1);
    g_assert(s.e->compact.behind == ALL);
    /* who is behind does not follow then, either */
    s.b->inhibited = NULL;
    for (unsigned i = 0; i < 8; i++) {
        s.e->memcg.tight = true;
        s.e->memcg.asked = clock_ns + 31 * SECOND;
        later(&s, 31);
        g_assert(s.e->compact.behind == ALL);
    }
    later(&s, 31);
    later(&s, 31);
    g_assert(s.e->compact.behind == 0);
    scene_end(&s);
}

/* Nor where it is inhibited: it is, later. */
static void test_inhibited(void)
{
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    scatter(&s, AT);
    s.a->inhibited = s.b->inhibited = "a device";
    for (unsigned i = 0; i < 8; i++) {
        later(&s, 31);
    }
    g_assert(pieces_of(s.ra, AT) == PIECES);
    s.a->inhibited = s.b->inhibited = NULL;
    for (unsigned i = 0; i < 4; i++) {
        later(&s, 2000);
    }
    g_assert(pieces_of(s.ra, AT) == 1);
    scene_end(&s);
}

/* What a device keeps from moving says nothing of what it would be worth. */
static void test_refused(void)
{
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    scatter(&s, AT);
    s.a->busy = s.b->busy = true;
    later(&s, 31);
    later(&s, 31);
    g_assert(s.e->compact.gathered == ALL);
    g_assert(pieces_of(s.ra, AT) == PIECES);
    g_assert(s.e->compact.moving == 0);
    g_assert(s.e->compact.doubt == 2 && s.e->compact.credit > 0);
    s.a->busy = s.b->busy = false;
    scene_end(&s);
}

/* A region goes in the middle of it. */
static void test_removed(void)
{
    Scene s;

    if (!scene_start(&s, &mem_ops)) {
        return;
    }
    scatter(&s, AT);
    later(&s, 31);
    clock_ns += 31 * SECOND;
    for (unsigned i = 0; s.e->compact.phase != COMPACT_FOLLOW; i++) {
        g_assert(i < 100);
        compact_step(s.e);
    }
    util_remove(s.rb);
    mem_check(s.b);
    for (unsigned i = 0; compact_step(s.e); i++) {
        g_assert(i < 100);
    }
    g_assert(s.e->compact.phase == COMPACT_REST);
    s.rb = util_add(s.e, s.b, &mem_ops);
    scene_end(&s);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/compact/sweep", test_sweep);
    g_test_add_func("/compact/ends", test_ends);
    g_test_add_func("/compact/credit", test_credit);
    g_test_add_func("/compact/share", test_share);
    g_test_add_func("/compact/doubt", test_doubt);
    g_test_add_func("/compact/orders", test_orders);
    g_test_add_func("/compact/behind", test_behind);
    g_test_add_data_func("/compact/never/blind", GUINT_TO_POINTER(0),
                         test_never);
    g_test_add_data_func("/compact/never/kept", GUINT_TO_POINTER(1),
                         test_never);
    g_test_add_data_func("/compact/never/forked", GUINT_TO_POINTER(2),
                         test_never);
    g_test_add_func("/compact/tight", test_tight);
    g_test_add_func("/compact/inhibited", test_inhibited);
    g_test_add_func("/compact/refused", test_refused);
    g_test_add_func("/compact/removed", test_removed);
    return g_test_run();
}
