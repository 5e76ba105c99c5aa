/*
 * libksm tests: huge pages, which are not watched
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What is written again and again keeps its huge pages; what is quiet is merged
 * all the same; and in the end nothing that is known is old.
 */
#include <glib.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "engine/state.h"
#include "house.h"
#include "memory/region.h"
#include "merge/parts.h"
#include "merge/sample.h"
#include "still.h"

#define N       512u    /* pages of a chunk */
#define CHUNKS  4u
#define ROUNDS  24u
#define CALM    260u    /* passes: then what is quiet is watched */

typedef struct Scene {
    KsmEngine *e;
    KsmRegion *r;
    Mem *m;
    uint64_t fresh;         /* contents that are nowhere else, from here */
} Scene;

/* Is the chunk one huge page? */
static bool is_huge(Scene *s, unsigned chunk)
{
    uint8_t kinds[N];

    g_assert(kinds_ask(&s->e->kinds, s->m->addr + chunk * CHUNK, N, KINDS_FAST,
                       kinds) == 0);
    return kinds[0] & PM_HUGE;
}

static bool is_loose(const Scene *s, unsigned chunk)
{
    return s->r->chunk[chunk].flags & CHUNK_LOOSE;
}

/* Content of its own for each page. */
static void stir(Scene *s, unsigned chunk, unsigned first, unsigned n)
{
    mem_fill_run(s->m, chunk * N + first, n, s->fresh, 1);
    s->fresh += n;
}

static void scene_end(Scene *s)
{
    util_end(s->e, s->r, s->m);
}

/* Memory of huge pages, each with content of its own.  False: skipped. */
static bool scene_start(Scene *s, KsmScope scope)
{
    s->e = util_engine(scope, KSM_DIRTY_PAGEMAP);
    if (!s->e) {
        return false;
    }
    s->fresh = 1000000;
    s->m = mem_new(CHUNKS * N, 0, MEM_HUGE);
    for (unsigned i = 0; i < CHUNKS; i++) {
        stir(s, i, 0, N);
    }
    s->r = util_add(s->e, s->m, &mem_ops);
    for (unsigned i = 0; i < CHUNKS; i++) {
        if (!is_huge(s, i)) {
            g_test_skip("huge pages cannot be had at present");
            scene_end(s);
            return false;
        }
    }
    return true;
}

/* Pages from 100 on are the same in the first chunk and in the last. */
static void fill_equal(Scene *s, unsigned n)
{
    mem_fill_run(s->m, 100, n, 1, 1);
    mem_fill_run(s->m, 3 * N + 100, n, 1, 1);
}

static bool any_loose(Scene *s)
{
    bool any = false;

    for (unsigned i = 0; i < CHUNKS; i++) {
        any |= is_loose(s, i);
    }
    return any;
}

/* Does the slot go by the hash of that page? */
static bool slot_is(Scene *s, uint32_t slot, const char *page)
{
    return content_tag_fits(s->r, store_tag(s->e->content.store, slot),
                            hash_page(&s->e->hasher, page));
}

/*
 * Nothing has been written for long: what is known of each page is so, and all
 * that is huge is watched.
 */
static void all_is_known(Scene *s)
{
    util_passes(s->e, CALM);
    /* where passes take long, khugepaged makes huge pages anew meanwhile */
    for (unsigned tries = 0; tries < 8 && any_loose(s); tries++) {
        util_passes(s->e, CALM);
    }
    for (size_t i = 0; i < s->r->n_pages; i++) {
        PageState state = page_state(s->r, i);

        if (page_is_known(s->r, i)) {
            g_assert(!(s->r->state[i] & PAGE_WRITTEN));
            g_assert(sample_page(&s->e->hasher, s->r, i));
        } else if (state == PAGE_MERGED) {
            /* others find it by what it holds */
            g_assert(slot_is(s, s->r->tag[i], page_addr(s->r, i)));
        } else {
            g_assert(state == PAGE_GIVEN || state == PAGE_BROKEN);
        }
        g_assert(!is_loose(s, i / N));
    }
}

/*
 * Huge pages that come while all rests, and are equal: the pass that may merge
 * them comes at once after the one that has hashed them.
 */
static void test_soon(void)
{
    Scene s;

    s.e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    if (!s.e) {
        return;
    }
    s.fresh = 1000000;
    s.m = mem_new((CHUNKS + 2) * N, 0, MEM_HUGE);
    for (unsigned i = 0; i < CHUNKS; i++) {
        stir(&s, i, 0, N);
    }
    s.r = util_add(s.e, s.m, &mem_ops);
    prim.cpu_ns = util_cpu_by_call;
    util_passes(s.e, 20);
    g_assert(s.e->scan.idle_ns > 0);
    for (unsigned i = 0; i < 2; i++) {
        mem_fill_run(s.m, (CHUNKS + i) * N, N, 1, 1);
    }
    if (!is_huge(&s, CHUNKS) || !is_huge(&s, CHUNKS + 1)) {
        g_test_skip("huge pages cannot be had at present");
    } else {
        util_passes(s.e, 1);
        g_assert(util_stats(s.e).merged == 0);
        g_assert(s.e->scan.idle_ns == 0);
        util_passes(s.e, 1);
        g_assert(util_stats(s.e).pages_sharing == N);
    }
    prim.cpu_ns = prim_real.cpu_ns;
    scene_end(&s);
}

/* A device is at all that comes, and nothing is merged: that is seen through. */
static void test_soon_vain(void)
{
    unsigned at_once = 0;
    Scene s;

    s.e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    if (!s.e) {
        return;
    }
    s.fresh = 1000000;
    s.m = mem_new((CHUNKS + 2 * ROUNDS) * N, 0, MEM_HUGE);
    for (unsigned i = 0; i < CHUNKS; i++) {
        stir(&s, i, 0, N);
    }
    s.r = util_add(s.e, s.m, &mem_ops);
    prim.cpu_ns = util_cpu_by_call;
    util_passes(s.e, 20);
    s.m->busy = true;
    for (unsigned k = 0; k < ROUNDS; k++) {
        for (unsigned i = CHUNKS + 2 * k; i < CHUNKS + 2 * k + 2; i++) {
            mem_fill_run(s.m, i * N, N, 1 + k * N, 1);
        }
        util_passes(s.e, 1);
        at_once += s.e->scan.idle_ns == 0;
    }
    prim.cpu_ns = prim_real.cpu_ns;
    g_assert(util_stats(s.e).merged == 0);
    g_assert(at_once <= ROUNDS * 2 / 3);
    s.m->busy = false;
    scene_end(&s);
}

/* Chunks that are written before each pass, and the others, which are not. */
static void test_hot(void)
{
    uint64_t hashed;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    for (unsigned i = 0; i < CALM; i++) {
        stir(&s, 1, 0, N);
        stir(&s, 2, i % N, 1);
        util_passes(s.e, 1);
    }
    for (unsigned i = 0; i < CHUNKS; i++) {
        g_assert(is_huge(&s, i));
        g_assert(is_loose(&s, i) == (i == 1 || i == 2));
    }
    /* at its first look, after 4, 20, 84, and then twice */
    hashed = util_stats(s.e).pages_scanned;
    g_assert(hashed <= CHUNKS * N + 2 * 5 * N + 2 * 3 * N);
    /* the quiet ones are watched: a write is noticed, and splits */
    stir(&s, 0, 7, 1);
    g_assert(!is_huge(&s, 0) && is_huge(&s, 3));
    util_passes(s.e, 3);
    g_assert(page_state(s.r, 7) == PAGE_UNIQUE);
    g_assert(sample_page(&s.e->hasher, s.r, 7));
    all_is_known(&s);
    scene_end(&s);
}

/* What a hot chunk held when it was looked at is elsewhere, too: no matter. */
static void test_hot_equal(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    mem_fill_run(s.m, 0, N, 1, 1);
    mem_fill_run(s.m, N, N, 1, 1);
    for (unsigned i = 0; i < 60; i++) {
        util_passes(s.e, 1);
        stir(&s, 1, 0, N);
    }
    g_assert(util_stats(s.e).merged == 0);
    g_assert(is_huge(&s, 0) && is_huge(&s, 1));
    /* now it stays */
    mem_fill_run(s.m, N, N, 1, 1);
    all_is_known(&s);
    g_assert(s.r->count[PAGE_MERGED] >= 2 * N - STILL_FEW);
    scene_end(&s);
}

/* Written between looks, and equal to another since. */
static void test_changed(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    mem_fill_run(s.m, 0, N, 1, 1);
    mem_fill_run(s.m, N, N, 1, 1);
    mem_fill_run(s.m, 2 * N, N, 5001, 1);
    util_passes(s.e, 1);
    g_assert(s.r->count[PAGE_MERGED] == 0);
    mem_fill_run(s.m, N, N, 5001, 1);
    all_is_known(&s);
    g_assert(s.r->chunk[0].mapped == 0 && is_huge(&s, 0));
    g_assert(s.r->chunk[1].mapped >= N - STILL_FEW);
    g_assert(s.r->chunk[2].mapped >= N - STILL_FEW);
    scene_end(&s);
}

/* Some pages of both have changed, and no sample says so. */
static void test_old(gconstpointer data)
{
    bool pattern = GPOINTER_TO_INT(data);
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    for (unsigned i = 0; i < 2; i++) {
        mem_fill_run(s.m, i * N, N, 1, !pattern);
    }
    util_passes(s.e, 1);
    for (unsigned i = 0; i < 2; i++) {
        mem_fill_run(s.m, i * N + 1, 20, 9001, 1);
        /* the first page that is copied to be repeated */
        mem_fill(s.m, i * N, pattern ? 8001 : 1);
    }
    mem_fill_run(s.m, 2 * N + 1, 20, 9001, 1);
    all_is_known(&s);
    g_assert(s.r->count[PAGE_MERGED] >= 2 * N - 21 * 2 - STILL_FEW);
    scene_end(&s);
}

/* The page that is to be copied has changed: another does as well. */
static void test_old_first(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    for (unsigned i = 0; i < 2 * N; i++) {
        mem_fill(s.m, i, 1 + i % 2);
    }
    util_passes(s.e, 1);
    mem_fill(s.m, 1, 9001);
    mem_fill(s.m, N + 1, 9001);
    util_passes(s.e, 3);
    g_assert(s.r->count[PAGE_MERGED] >= 2 * N - 2 - STILL_FEW);
    g_assert(util_stats(s.e).verify_failed <= 2 + STILL_FEW);
    all_is_known(&s);
    scene_end(&s);
}

/* Memory that was only read is one huge page of zeroes, which is nobody's. */
static void test_read(void)
{
    uint8_t kinds[N];
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    g_assert(ksm_discard(s.r, 0, CHUNK) == 0);
    mem_gone(s.m, 0, N);
    mem_check(s.m);
    g_assert(kinds_ask(&s.e->kinds, s.m->addr, N, KINDS_FAST, kinds) == 0);
    if (!(kinds[0] & PM_HUGE) || !(kinds[0] & PM_ZEROPFN)) {
        g_test_skip("huge pages of zeroes are off (use_zero_page)");
    } else {
        util_passes(s.e, 3);
        g_assert(!is_loose(&s, 0));
        stir(&s, 0, 0, N);
        util_passes(s.e, 4);
        g_assert(page_state(s.r, 0) == PAGE_UNIQUE);
        stir(&s, 0, 0, N);
        all_is_known(&s);
    }
    scene_end(&s);
}

/* Two passes are enough for what is quiet, as they are for small pages. */
static void test_quiet(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    mem_fill_run(s.m, 0, N, 1, 1);
    mem_fill_run(s.m, 3 * N, N, 1, 1);
    util_passes(s.e, 2);
    g_assert(s.r->count[PAGE_MERGED] >= 2 * N - STILL_FEW);
    g_assert(is_huge(&s, 1) && is_huge(&s, 2));
    all_is_known(&s);
    scene_end(&s);
}

/* A huge page is zeroes first, and then its owner writes to it. */
static void test_zeroes(gconstpointer data)
{
    KsmScope scope = GPOINTER_TO_INT(data);
    Scene s;

    if (!scene_start(&s, scope)) {
        return;
    }
    mem_fill_run(s.m, 0, 2 * N, 0, 0);
    util_passes(s.e, 1);
    stir(&s, 0, 0, N);
    util_passes(s.e, 2);
    g_assert(is_huge(&s, 0));
    g_assert(s.r->chunk[1].given >= N - STILL_FEW);
    g_assert(mem_present(s.m, N, N) <= STILL_FEW);
    /* where only zeroes are looked for others look alike, whatever they are */
    for (unsigned i = 0; i < CALM; i++) {
        stir(&s, 0, 0, N);
        util_passes(s.e, 1);
    }
    g_assert(is_huge(&s, 0) && s.r->chunk[0].given == 0);
    if (scope == KSM_SCOPE_VM) {
        all_is_known(&s);
    }
    scene_end(&s);
}

/* Part of a chunk is quiet: merged if that saves enough to split it for. */
static void test_part(void)
{
    const unsigned least = 64;      /* split_min_pages */

    for (unsigned quiet = least - 1; quiet <= least; quiet++) {
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM)) {
            return;
        }
        fill_equal(&s, quiet);
        for (unsigned i = 0; i < 60; i++) {
            util_passes(s.e, 1);
            stir(&s, 0, 200, N - 200);
        }
        g_assert(is_huge(&s, 0) == (quiet < least));
        g_assert((s.r->chunk[0].mapped >= quiet - STILL_FEW) ==
                 (quiet == least));
        all_is_known(&s);
        scene_end(&s);
    }
}

/* What is cold is broken for an eighth of that. */
static void test_cold(void)
{
    const unsigned least = 64 / 8;

    for (unsigned equal = least - 1; equal <= least; equal++) {
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM)) {
            return;
        }
        fill_equal(&s, equal);
        /* found, and not seen again yet */
        util_passes(s.e, 3);
        g_assert(is_huge(&s, 0) && is_huge(&s, 3));
        all_is_known(&s);
        g_assert(is_huge(&s, 0) == (equal < least));
        g_assert((s.r->chunk[0].mapped >= equal - STILL_FEW) ==
                 (equal == least));
        scene_end(&s);
    }
}

/* --- broken, so that parts of it can be moved --- */

static struct {
    Scene *s;
    bool stays;         /* the kernel does not break it */
    size_t page;        /* written when it is broken; 0: none ... */
    unsigned n;         /* ... and as many behind it */
    unsigned calls;
    unsigned whole;     /* moved as a whole */
    bool zeroes;        /* a page of ZEROES was moved */
} breaks;

#define ZEROES      300u        /* of the first chunk ... */
#define ZEROES_N    50u         /* ... every second page */

/* Does a page of ours that is moved lie there? */
static bool is_moved(const char *from, size_t len, size_t page, size_t n)
{
    const char *at = breaks.s->m->addr + page * PAGE_BYTES;

    return from < at + n * PAGE_BYTES && from + len > at;
}

static int breaks_move(int fd, void *to, void *from, size_t len,
                       size_t *done)
{
    bool ours = is_moved(from, len, 0, breaks.s->m->pages);

    breaks.whole += ours && len == CHUNK;
    breaks.zeroes |= is_moved(from, len, ZEROES, 2 * ZEROES_N);
    return prim_real.uffd_move(fd, to, from, len, done);
}

static int breaks_advise(void *addr, size_t len, int advice)
{
    int ret = 0;

    if (advice != MADV_COLD) {
        return prim_real.advise(addr, len, advice);
    }
    breaks.calls++;
    g_assert(breaks.s->e->urgent.raised || breaks.s->e->urgent.denied);
    if (!breaks.stays) {
        ret = prim_real.advise(addr, len, advice);
    }
    if (breaks.page) {
        stir(breaks.s, ((char *)addr - breaks.s->m->addr) / CHUNK, breaks.page,
             breaks.n);
    }
    return ret;
}

/* From here on @n pages from @page on are written when a chunk is broken. */
static void breaks_begin(Scene *s, bool stays, size_t page, unsigned n)
{
    memset(&breaks, 0, sizeof(breaks));
    breaks.s = s;
    breaks.stays = stays;
    breaks.page = page;
    breaks.n = n;
    prim.advise = breaks_advise;
    prim.uffd_move = breaks_move;
    prim.cpu_ns = util_cpu_by_call;
}

static void breaks_end(void)
{
    prim.advise = prim_real.advise;
    prim.uffd_move = prim_real.uffd_move;
    prim.cpu_ns = prim_real.cpu_ns;
}

/*
 * A run of two huge pages is equal, and somebody writes to them just when they
 * are broken: in the run, outside of it, nowhere.  What is not moved is
 * known as before, and what was written is not.
 */
static void test_breaks(gconstpointer data)
{
    static const size_t written[] = { 0, 150, 400 };

    for (unsigned i = 0; i < G_N_ELEMENTS(written); i++) {
        uint64_t hashed;
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM)) {
            return;
        }
        fill_equal(&s, 100);
        breaks_begin(&s, GPOINTER_TO_INT(data), written[i], 1);
        for (unsigned k = 0; k < 8 && breaks.calls < 2; k++) {
            s.e->costs = costs_guess;
            util_passes(s.e, 1);
        }
        breaks_end();
        g_assert(breaks.calls >= 2 && breaks.whole == (breaks.stays ? 2 : 0));
        g_assert(util_stats(s.e).huge_split == 2);
        /* who touches it waits for that, too */
        g_assert(util_stats(s.e).stall_count - util_stats(s.e).isolations ==
                 (breaks.stays ? 0 : 2));
        g_assert(!is_huge(&s, 0) && !is_huge(&s, 3) && is_huge(&s, 1));
        g_assert(s.r->chunk[0].mapped + s.r->chunk[3].mapped >= 198);
        hashed = util_stats(s.e).pages_scanned;
        all_is_known(&s);
        /* the two that are not broken have three more looks */
        g_assert(util_stats(s.e).pages_scanned - hashed <= 2 * 3 * N + 64);
        scene_end(&s);
    }
}

/* Others have their turn while the thread's priority changes. */
static uint64_t turns_ns;

static int sched_set_late(int policy)
{
    turns_ns += 1000000000;
    return prim_real.sched_set(policy);
}

static uint64_t now_late(void)
{
    return prim_real.now_ns() + turns_ns;
}

/* Breaking takes as long as the call; whose turn comes then waits for nothing. */
static void test_breaks_time(void)
{
    uint64_t turns;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    fill_equal(&s, 100);
    breaks_begin(&s, false, 0, 0);
    turns = turns_ns;
    prim.sched_set = sched_set_late;
    prim.now_ns = now_late;
    for (unsigned k = 0; k < 8 && breaks.calls < 2; k++) {
        s.e->costs = costs_guess;
        util_passes(s.e, 1);
    }
    breaks_end();
    prim.sched_set = prim_real.sched_set;
    g_assert(breaks.calls >= 2 && turns_ns > turns);
    g_assert(util_stats(s.e).stall_count > util_stats(s.e).isolations);
    g_assert(util_stats(s.e).stall_max < 500000000);
    scene_end(&s);
    prim.now_ns = prim_real.now_ns;
}

/* It cannot be broken, and whole it would cost too much. */
static void test_breaks_refused(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    fill_equal(&s, 16);
    breaks_begin(&s, true, 0, 0);
    for (unsigned k = 0; k < CALM; k++) {
        s.e->costs = costs_guess;
        s.e->costs.copy_ns = 3000;
        util_passes(s.e, 1);
    }
    breaks_end();
    g_assert(breaks.calls > 0 && breaks.calls < CALM / 4);
    g_assert(breaks.whole == 0 && util_stats(s.e).isolations == 0);
    g_assert(is_huge(&s, 0) && is_huge(&s, 3));
    all_is_known(&s);
    scene_end(&s);
}

/* A device is at it: it is not broken for that. */
static void test_breaks_busy(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    fill_equal(&s, 100);
    s.m->busy = true;
    breaks_begin(&s, false, 0, 0);
    util_passes(s.e, 8);
    breaks_end();
    g_assert(breaks.calls == 0 && breaks.whole > 0);
    g_assert(is_huge(&s, 0) && is_huge(&s, 3));
    s.m->busy = false;
    util_passes(s.e, 130);
    g_assert(s.r->chunk[0].mapped >= 100 - STILL_FEW);
    all_is_known(&s);
    scene_end(&s);
}

static int busy_wake(const UffdRange *range)
{
    int ret = prim_real.uffd_wake(range);

    breaks.s->m->busy |= is_moved(range->addr, range->len, 0,
                                  breaks.s->m->pages);
    return ret;
}

/* A device comes when a part has been merged: nothing else is known then. */
static void test_breaks_device(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    fill_equal(&s, 100);
    breaks_begin(&s, false, 0, 0);
    prim.uffd_wake = busy_wake;
    for (unsigned k = 0; k < 8 && !s.r->merged; k++) {
        util_passes(s.e, 1);
    }
    prim.uffd_wake = prim_real.uffd_wake;
    breaks_end();
    g_assert(breaks.calls == 1 && s.r->merged > 0);
    for (unsigned i = 0; i < CHUNKS; i++) {
        g_assert(s.r->chunk[i].mapped == 0 || !page_is_known(s.r, i * N + 400));
    }
    s.m->busy = false;
    all_is_known(&s);
    scene_end(&s);
}

/* Its sample has changed: it is not cold any more. */
static void test_cold_changed(void)
{
    KsmChunk *c;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    s.e->plan.split_min_pages = N;
    fill_equal(&s, 60);
    c = &s.r->chunk[0];
    for (unsigned k = 0; k < CALM && !c->same; k++) {
        util_passes(s.e, 1);
    }
    g_assert(is_loose(&s, 0) && parts_gain(&s.e->plan, c) == N / 8);
    c->flags &= ~CHUNK_STILL;
    stir(&s, 0, 100, 1);
    g_assert(sample_chunk(&s.e->plan.sampler, s.r, 0));
    g_assert(parts_gain(&s.e->plan, c) == N);
    all_is_known(&s);
    scene_end(&s);
}

/* It is watched, and a write elsewhere makes part of it equal. */
static void test_breaks_watched(void)
{
    uint64_t first, hashed;
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    first = s.fresh - CHUNKS * N;
    all_is_known(&s);
    g_assert(is_huge(&s, 0) && !is_loose(&s, 0));
    g_assert(parts_gain(&s.e->plan, &s.r->chunk[0]) == 64 / 8);
    hashed = util_stats(s.e).pages_scanned;
    mem_fill_run(s.m, 3 * N + 100, 100, first + 100, 1);
    for (unsigned k = 0; k < CALM && !s.r->chunk[0].mapped; k++) {
        util_passes(s.e, 1);
    }
    g_assert(!is_huge(&s, 0) && s.r->chunk[0].mapped >= 100 - STILL_FEW);
    util_passes(s.e, 8);
    /* nothing else of it had to be looked at again */
    g_assert(util_stats(s.e).pages_scanned - hashed < 2 * N);
    stir(&s, 0, 400, 3);
    all_is_known(&s);
    scene_end(&s);
}

/* All that was to be merged is written then: they are broken, and watched. */
static void test_breaks_changed(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    fill_equal(&s, 100);
    breaks_begin(&s, false, 100, 100);
    for (unsigned k = 0; k < 8 && !breaks.calls; k++) {
        util_passes(s.e, 1);
    }
    breaks_end();
    g_assert(breaks.calls > 0 && s.r->merged == 0);
    for (unsigned i = 0; i < CHUNKS; i++) {
        g_assert(is_huge(&s, i) || (!is_loose(&s, i) &&
                 !(s.r->chunk[i].flags & CHUNK_HUGE)));
    }
    all_is_known(&s);
    scene_end(&s);
}

/* Are zeroes given back when a huge page is broken?  (Linux 6.12 and later.) */
static bool kernel_gives_zeroes(Scene *s, unsigned chunk)
{
    uint8_t kinds[N];

    mem_fill(s->m, chunk * N + 5, 0);
    g_assert(is_huge(s, chunk));
    prim_real.advise(s->m->addr + chunk * CHUNK, PAGE_BYTES, MADV_COLD);
    g_assert(kinds_ask(&s->e->kinds, s->m->addr + chunk * CHUNK, N, KINDS_FAST,
                       kinds) == 0);
    stir(s, chunk, 5, 1);
    return kinds[5] & PM_ZEROPFN;
}

/* Zeroes are given back when it is broken, and count as merged. */
static void test_breaks_zeroes(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    fill_equal(&s, 100);
    /* with gaps of one page */
    for (unsigned i = 0; i < 2 * ZEROES_N; i += 2) {
        mem_fill(s.m, ZEROES + i, 0);
    }
    breaks_begin(&s, false, 0, 0);
    for (unsigned k = 0; k < 8 && !s.r->chunk[0].mapped; k++) {
        util_passes(s.e, 1);
    }
    breaks_end();
    /* what was not moved is known */
    g_assert(breaks.zeroes || page_is_known(s.r, ZEROES + 1));
    util_passes(s.e, 2);
    g_assert(breaks.zeroes == !kernel_gives_zeroes(&s, 1));
    g_assert(!is_huge(&s, 0));
    g_assert(s.r->chunk[0].mapped >= 100 - STILL_FEW);
    g_assert(s.r->chunk[0].given == ZEROES_N);
    g_assert(util_stats(s.e).merged >= 250 - 2 * STILL_FEW);
    /* whoever writes there is noticed */
    stir(&s, 0, ZEROES + 10, 10);
    all_is_known(&s);
    g_assert(s.r->chunk[0].given == ZEROES_N - 5);
    scene_end(&s);
}

/* Quiet for two looks, and written before the third, which would protect it. */
static void test_late(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    util_passes(s.e, 60);
    g_assert(s.r->chunk[0].same == 2);
    stir(&s, 0, 7, 1);
    util_passes(s.e, 30);
    g_assert(is_huge(&s, 0) && is_loose(&s, 0));
    stir(&s, 0, 7, 1);
    g_assert(is_huge(&s, 0));
    all_is_known(&s);
    scene_end(&s);
}

/* Written since it was looked at, and then split by its owner. */
static void test_split(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    util_passes(s.e, 1);
    stir(&s, 0, 7, 1);
    g_assert(ksm_discard(s.r, 100 * PAGE, PAGE) == 0);
    mem_gone(s.m, 100, 1);
    g_assert(!is_huge(&s, 0));
    util_passes(s.e, 1);
    g_assert(!is_loose(&s, 0));
    util_passes(s.e, 3);
    g_assert(page_state(s.r, 7) == PAGE_UNIQUE);
    g_assert(sample_page(&s.e->hasher, s.r, 7));
    mem_fill(s.m, 100, 1);
    all_is_known(&s);
    scene_end(&s);
}

/* Given back, and populated anew, between looks or in one's sight. */
static void test_refilled(void)
{
    for (unsigned passes = 0; passes <= 1; passes++) {
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM)) {
            return;
        }
        mem_fill_run(s.m, 3 * N, N, 1, 1);
        util_passes(s.e, 1);
        g_assert(is_loose(&s, 0));
        g_assert(ksm_discard(s.r, 0, CHUNK) == 0);
        mem_gone(s.m, 0, N);
        util_passes(s.e, passes);
        mem_fill_run(s.m, 0, N, 1, 1);
        util_passes(s.e, 8);
        g_assert(s.r->count[PAGE_MERGED] >= 2 * N - STILL_FEW);
        all_is_known(&s);
        scene_end(&s);
    }
}

/* Where small pages were watched a huge page appears: it is not split. */
static void test_new(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    util_passes(s.e, CALM);
    stir(&s, 0, 5, 1);
    util_passes(s.e, 1);
    g_assert(!is_huge(&s, 0) && !is_loose(&s, 0));
    g_assert(ksm_discard(s.r, 0, CHUNK) == 0);
    mem_gone(s.m, 0, N);
    s.r->chunk[0].flags &= ~CHUNK_VISIT;    /* as if it were not found empty */
    stir(&s, 0, 0, N);
    if (!is_huge(&s, 0)) {
        g_test_skip("huge pages cannot be had at present");
    } else {
        /* written chunks are passed over once */
        util_passes(s.e, 2);
        g_assert(is_huge(&s, 0) && is_loose(&s, 0));
        for (unsigned i = 0; i < 20; i++) {
            stir(&s, 0, i, 1);
            util_passes(s.e, 1);
        }
        g_assert(is_huge(&s, 0));
        all_is_known(&s);
    }
    scene_end(&s);
}

/* Meanwhile nobody looks, and all of it changes. */
static void test_inhibited(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    mem_fill_run(s.m, 0, N, 1, 1);
    mem_fill_run(s.m, N, N, 1, 1);
    util_passes(s.e, 1);
    s.m->inhibited = "a test says so";
    util_passes(s.e, 3);
    stir(&s, 0, 0, N);
    mem_fill_run(s.m, 2 * N, N, 1, 1);
    s.m->inhibited = NULL;
    util_passes(s.e, 3);
    g_assert(is_huge(&s, 0));
    all_is_known(&s);
    g_assert(s.r->count[PAGE_MERGED] >= 2 * N - STILL_FEW);
    g_assert(s.r->chunk[0].mapped == 0);
    scene_end(&s);
}

/* A device holds the pages for long. */
static void test_busy(void)
{
    Scene s;

    if (!scene_start(&s, KSM_SCOPE_VM)) {
        return;
    }
    mem_fill_run(s.m, 0, N, 1, 1);
    mem_fill_run(s.m, N, N, 1, 1);
    s.m->busy = true;
    util_passes(s.e, 200);
    g_assert(util_stats(s.e).merged == 0 && util_stats(s.e).busy > 0);
    g_assert(util_stats(s.e).busy < 50);
    s.m->busy = false;
    util_passes(s.e, 130);
    g_assert(s.r->count[PAGE_MERGED] >= 2 * N - STILL_FEW);
    all_is_known(&s);
    scene_end(&s);
}

/* --- somebody writes, at any time --- */

typedef struct Writer {
    Scene *s;
    int stop;
} Writer;

static void *writer_run(void *opaque)
{
    Writer *w = opaque;
    GRand *rand = g_rand_new_with_seed(1);

    while (!g_atomic_int_get(&w->stop)) {
        size_t page = g_rand_int_range(rand, 0, CHUNKS * N);

        /* few contents: much of it is equal, for a while */
        mem_write(w->s->m, page, g_rand_int_range(rand, 0, PAGE),
                  g_rand_int_range(rand, 0, 2));
        if (g_rand_int_range(rand, 0, 100) == 0) {
            g_usleep(g_rand_int_range(rand, 0, 3000));
        }
    }
    g_rand_free(rand);
    return NULL;
}

/* Whenever it was written, nothing that is known is old in the end. */
static void test_race(void)
{
    for (unsigned round = 0; round < 6; round++) {
        Writer w = { 0 };
        pthread_t thread;
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM)) {
            return;
        }
        for (unsigned i = 0; i < CHUNKS; i++) {
            mem_fill_run(s.m, i * N, N, i % 2 * 1000 + 1, 1);
        }
        w.s = &s;
        g_assert(pthread_create(&thread, NULL, writer_run, &w) == 0);
        util_passes(s.e, 3 + round * 20);
        g_atomic_int_set(&w.stop, 1);
        g_assert(pthread_join(thread, NULL) == 0);
        all_is_known(&s);
        scene_end(&s);
    }
}

/* --- written just when it is protected --- */

static Scene *struck;
static unsigned strike_in;      /* half calls until then */

static void strike(void)
{
    if (strike_in && --strike_in == 0) {
        stir(struck, 0, 3, 1);
    }
}

/* Writes to a page of the first chunk before, or after, it is protected. */
static ssize_t strike_pagemap(PmScan *scan)
{
    bool ours = scan->protect &&
                scan->start >= (uintptr_t)struck->m->addr &&
                scan->start < (uintptr_t)struck->m->addr + CHUNK;
    ssize_t ret;

    if (ours) {
        strike();
    }
    ret = still_pagemap(scan);
    if (ours) {
        strike();
    }
    return ret;
}

/* Be it protected because it was merged, or because it is quiet. */
static void test_struck(gconstpointer data)
{
    bool merged = GPOINTER_TO_INT(data);

    for (unsigned when = 1; when <= 8; when++) {
        Scene s;

        if (!scene_start(&s, KSM_SCOPE_VM)) {
            return;
        }
        if (merged) {
            mem_fill_run(s.m, 100, 200, 1, 1);
            mem_fill_run(s.m, N + 100, 200, 1, 1);
        }
        struck = &s;
        strike_in = when;
        prim.pagemap = strike_pagemap;
        for (unsigned i = 0; i < CALM && strike_in; i++) {
            util_passes(s.e, 1);
        }
        prim.pagemap = still_pagemap;
        g_assert(strike_in == 0);
        all_is_known(&s);
        g_assert((s.r->chunk[0].mapped > 0) == merged);
        scene_end(&s);
    }
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/loose/soon", test_soon);
    g_test_add_func("/loose/soon/vain", test_soon_vain);
    g_test_add_func("/loose/hot/alone", test_hot);
    g_test_add_func("/loose/hot/equal", test_hot_equal);
    g_test_add_func("/loose/changed", test_changed);
    g_test_add_func("/loose/quiet", test_quiet);
    g_test_add_data_func("/loose/old/each", GINT_TO_POINTER(false), test_old);
    g_test_add_data_func("/loose/old/pattern", GINT_TO_POINTER(true),
                         test_old);
    g_test_add_func("/loose/old/first", test_old_first);
    g_test_add_func("/loose/read", test_read);
    g_test_add_data_func("/loose/zeroes/vm", GINT_TO_POINTER(KSM_SCOPE_VM),
                         test_zeroes);
    g_test_add_data_func("/loose/zeroes/zero", GINT_TO_POINTER(KSM_SCOPE_ZERO),
                         test_zeroes);
    g_test_add_func("/loose/part", test_part);
    g_test_add_func("/loose/cold", test_cold);
    g_test_add_data_func("/loose/breaks/parts", GINT_TO_POINTER(false),
                         test_breaks);
    g_test_add_data_func("/loose/breaks/whole", GINT_TO_POINTER(true),
                         test_breaks);
    g_test_add_func("/loose/breaks/time", test_breaks_time);
    g_test_add_func("/loose/breaks/refused", test_breaks_refused);
    g_test_add_func("/loose/breaks/busy", test_breaks_busy);
    g_test_add_func("/loose/breaks/device", test_breaks_device);
    g_test_add_func("/loose/cold/changed", test_cold_changed);
    g_test_add_func("/loose/breaks/watched", test_breaks_watched);
    g_test_add_func("/loose/breaks/changed", test_breaks_changed);
    g_test_add_func("/loose/breaks/zeroes", test_breaks_zeroes);
    g_test_add_func("/loose/late", test_late);
    g_test_add_func("/loose/split", test_split);
    g_test_add_func("/loose/refilled", test_refilled);
    g_test_add_func("/loose/new", test_new);
    g_test_add_func("/loose/inhibited", test_inhibited);
    g_test_add_func("/loose/busy", test_busy);
    g_test_add_func("/loose/race", test_race);
    g_test_add_data_func("/loose/struck/merged", GINT_TO_POINTER(true),
                         test_struck);
    g_test_add_data_func("/loose/struck/quiet", GINT_TO_POINTER(false),
                         test_struck);
    return g_test_run();
}
