/*
 * libksm tests: what may befall pages while they are staged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The staging area holds the only copy of them.  Calls fail again and again, in
 * any combination; the page tables cannot be asked; the memory itself fails;
 * the owner maps something else.  All other pages must soon be back in place.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/prim.h"
#include "rooms.h"
#include "still.h"

#define PAGES   1024u
#define SEEDS   60u

/* Failures; chances are in percent. */
static struct {
    Rooms *f;
    Mem *m;                 /* from whose pages on */
    GRand *rand;
    unsigned scan_fails, copy_fails, back_fails;
    bool change;            /* some pages are written just before */
    unsigned scans_left;    /* while staged; then the tables are silent */
    bool staged;
    void (*once)(char *stage, char *home);  /* when a span is staged */
    void (*at_back)(void);  /* before the first page goes back */
    unsigned copied;        /* pages put back so */
    unsigned moves_out, moves_back;     /* calls */
    uint64_t paused_us;     /* as long as who needs the pages waits */
    size_t stubborn;        /* this page is not moved back ... */
    unsigned refuse;        /* ... so many times */
    unsigned busy_for;      /* of these the device is busy */
    bool whole;             /* what was refused goes back with the others */
} h;

static bool in_stage(const void *p)
{
    const char *stage = h.f->stage.small;

    return (const char *)p >= stage &&
           (const char *)p < stage + 2 * CHUNK_BYTES;
}

static bool in_mem(const void *p)
{
    return (const char *)p >= h.m->addr &&
           (const char *)p < h.m->addr + h.m->pages * PAGE;
}

static bool chance(unsigned percent)
{
    return percent && (unsigned)g_rand_int_range(h.rand, 0, 100) < percent;
}

/* Is the page in memory, swapped out, or a marker of failed memory? */
static bool is_there(const void *page)
{
    uint64_t entry;
    off_t at = (uintptr_t)page / PAGE * sizeof(entry);

    g_assert(prim_real.read_at(h.f->kinds.pagemap, &entry, sizeof(entry), at) ==
             sizeof(entry));
    return entry >> 62;
}

/*
 * Pages 3 to 12 of each 20 have changed: they are put back.  Not those that an
 * earlier call has moved, though it did not say so: their home is empty.
 */
static void change_some(const char *from, size_t len)
{
    size_t page = (from - h.m->addr) / PAGE;

    for (size_t i = page; i < page + len / PAGE; i++) {
        if (i % 20 >= 3 && i % 20 < 13 && is_there(h.m->addr + i * PAGE)) {
            mem_write(h.m, i, i % 4096, i + 1);
        }
    }
}

static bool is_refused(const char *to, size_t len)
{
    const char *page = h.m->addr + h.stubborn * PAGE;

    if (!h.refuse || page < to || page >= to + len) {
        return false;
    }
    h.refuse--;
    if (h.busy_for && --h.busy_for == 0) {
        h.m->busy = false;
    }
    return true;
}

static void back_begins(void)
{
    if (h.at_back) {
        void (*fn)(void) = h.at_back;

        h.at_back = NULL;
        fn();
    }
}

static int move_back(int fd, void *to, void *from, size_t len, size_t *done)
{
    static const int codes[] = { -EAGAIN, -EBUSY, -ENOMEM };

    *done = 0;
    g_assert(len && len % PAGE == 0);
    h.moves_back++;
    back_begins();
    if (is_refused(to, len)) {
        return -EBUSY;
    }
    if (chance(h.back_fails)) {
        return codes[g_rand_int_range(h.rand, 0, G_N_ELEMENTS(codes))];
    }
    return prim_real.uffd_move(fd, to, from, len, done);
}

static int h_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    int ret;

    if (!in_mem(from)) {
        return in_mem(to) ? move_back(fd, to, from, len, done)
                          : prim_real.uffd_move(fd, to, from, len, done);
    }
    if (h.change) {
        change_some(from, len);
    }
    h.moves_out++;
    ret = prim_real.uffd_move(fd, to, from, len, done);
    h.staged = true;
    /* not in the middle: a move that met a page busy for a moment goes on */
    if (h.once && ret == 0) {
        void (*fn)(char *, char *) = h.once;

        h.once = NULL;
        fn(to, from);
    }
    return ret;
}

static bool tables_speak(void)
{
    return !h.whole && !h.scan_fails && h.scans_left == G_MAXUINT;
}

static int h_copy(int fd, void *to, const void *from, size_t len, size_t *done)
{
    int ret;

    *done = 0;
    g_assert(len && len % PAGE == 0);
    if (in_mem(to) && in_stage(from)) {
        /* only what is there is copied, if that can be known */
        g_assert(!tables_speak() || is_there(from));
        back_begins();
        if (chance(h.copy_fails)) {
            return chance(50) ? -ENOMEM : -EAGAIN;
        }
    }
    ret = prim_real.uffd_copy(fd, to, from, len, done);
    /* not the other area's: a page that was on its way there is put back so */
    h.copied += in_mem(to) ? *done / PAGE : 0;
    return ret;
}

static bool is_silent(void)
{
    if (h.staged && h.scans_left != G_MAXUINT) {
        if (!h.scans_left) {
            return true;
        }
        h.scans_left--;
    }
    return chance(h.scan_fails);
}

static ssize_t h_pagemap(PmScan *scan)
{
    return is_silent() ? -ENOMEM : still_pagemap(scan);
}

static ssize_t h_read_at(int fd, void *buf, size_t len, off_t offset)
{
    return fd == h.f->kinds.pagemap && is_silent()
           ? -ENOMEM : prim_real.read_at(fd, buf, len, offset);
}

static int h_wake(const UffdRange *range)
{
    h.staged = false;
    return prim_real.uffd_wake(range);
}

static void h_pause(unsigned us)
{
    h.paused_us += us;
}

static const char *expected;
static unsigned warnings;

static void warning_seen(const char *domain, GLogLevelFlags level,
                         const char *message, gpointer data)
{
    g_assert(expected && strstr(message, expected));
    warnings++;
}

static void expect_warning(const char *text)
{
    expected = text;
    warnings = 0;
}

typedef struct Scene {
    Rooms f;
    Mem *a, *b;
    KsmRegion *ra, *rb;
} Scene;

/*
 * Two areas with equal content, b in many mappings, as after unmerging parts of
 * it; from here on calls for b fail.
 */
static bool scene_start_with(Scene *s, MemPages kind, KsmDirtySource dirty)
{
    if (!rooms_open(&s->f, dirty, ROOMS_SHARING)) {
        return false;
    }
    s->a = mem_new(PAGES, 0, MEM_SMALL);
    s->b = mem_new(PAGES, 0, kind);
    mem_fill_run(s->a, 0, PAGES, 1, 1);
    mem_fill_run(s->b, 0, PAGES, 1, 1);
    /* what is added last fills the pool, the other is compared with it */
    s->rb = rooms_add(&s->f, s->b, &mem_ops);
    s->ra = rooms_add(&s->f, s->a, &mem_ops);
    memset(&h, 0, sizeof(h));
    expect_warning(NULL);
    h.f = &s->f;
    h.m = s->b;
    h.scans_left = G_MAXUINT;
    h.rand = g_rand_new_with_seed(1);
    prim.uffd_move = h_move;
    prim.uffd_copy = h_copy;
    prim.uffd_wake = h_wake;
    prim.pagemap = h_pagemap;
    prim.read_at = h_read_at;
    prim.pause = h_pause;
    return true;
}

static bool scene_start(Scene *s, MemPages kind)
{
    return scene_start_with(s, kind, KSM_DIRTY_PAGEMAP);
}

static void split_mappings(Mem *m)
{
    for (size_t i = 0; i < m->pages; i += 7) {
        g_assert(madvise(m->addr + i * PAGE, 3 * PAGE, MADV_DONTDUMP) == 0);
    }
}

static void scene_end(Scene *s)
{
    still_calls();
    g_assert(rooms_staged(&s->f) == 0);
    rooms_check(&s->f, s->ra);
    rooms_check(&s->f, s->rb);
    mem_check(s->a);
    mem_check(s->b);
    rooms_remove(&s->f, s->ra);
    rooms_remove(&s->f, s->rb);
    mem_check(s->a);
    mem_check(s->b);
    rooms_close(&s->f);
    g_rand_free(h.rand);
    mem_free(s->a);
    mem_free(s->b);
}

/*
 * Copies fail because their target is several mappings; scans, moves and copies
 * fail at random, many at a time.
 */
static void test_random(void)
{
    unsigned moves = 0;
    Scene s;

    for (unsigned seed = 0; seed < SEEDS; seed++) {
        if (!scene_start(&s, MEM_SMALL)) {
            return;
        }
        split_mappings(s.b);
        g_rand_set_seed(h.rand, seed);
        h.change = true;
        h.scan_fails = seed % 4 ? 20 + seed % 3 * 30 : 0;
        h.copy_fails = seed % 5 * 20;
        h.back_fails = seed % 4 * 25;
        for (unsigned i = 0; i < 3; i++) {
            rooms_passes(&s.f, 2);
            mem_check(s.b);
        }
        moves += h.moves_out;
        scene_end(&s);
    }
    g_assert(moves > 2 * SEEDS);
}

/*
 * All of it.  A page that the kernel is moving elsewhere just then, for others'
 * huge pages, is refused, and tried again.
 */
static void isolate_all(Scene *s, RoomsSpan *span, size_t page, unsigned n)
{
    for (unsigned tries = 0; ; tries++) {
        g_assert(rooms_isolate(&s->f, span, s->rb, page, n));
        if (mem_present(s->b, page, n) == 0) {
            return;
        }
        g_assert(tries < 100);
        h.whole = true;
        rooms_put_back(&s->f, span);
        rooms_release(&s->f, span);
        h.whole = false;
        g_usleep(10000);
    }
}

/* What calls cost, by a clock that only they advance. */
static uint64_t paid_ns, moves_ns;     /* @moves_ns: of this isolation */

static uint64_t cpu_paid(void)
{
    return paid_ns;
}

static int register_paid(const UffdRange *range, unsigned mode)
{
    paid_ns += 1000;
    moves_ns = 0;
    return prim_real.uffd_register(range, mode);
}

static int move_paid(int fd, void *to, void *from, size_t len, size_t *done)
{
    /* not always one: a page may be busy for a moment */
    paid_ns += 20000;
    moves_ns += 20000;
    return prim_real.uffd_move(fd, to, from, len, done);
}

static int unregister_paid(const UffdRange *range)
{
    paid_ns += 300000;
    return prim_real.uffd_unregister(range);
}

/* Each kind of cost is told by itself, and what is between them in the sum. */
static void test_spent(gconstpointer data)
{
    const unsigned n = GPOINTER_TO_UINT(data);
    const StageRun run = { 0, 16 };
    const KsmSpent *spent;
    uint64_t out, back, all;
    RoomsSpan span;
    Scene s;

    if (!scene_start(&s, MEM_SMALL)) {
        return;
    }
    still_calls();
    prim.cpu_ns = cpu_paid;
    prim.uffd_register = register_paid;
    prim.uffd_move = move_paid;
    prim.uffd_unregister = unregister_paid;
    spent = &span.s.spent;
    isolate_all(&s, &span, 0, n);
    out = moves_ns;
    g_assert(spent->n == n && spent->isolate_ns == 1000 + out);
    g_assert(spent->move_ns == (n < 2 * SPAN_MIN ? 0 : out));
    paid_ns += 4000000;
    g_assert(isolation_lap(&span.s) == 4000000);
    s.f.costs.copy_ns = 1000000;    /* so that they are moved back */
    stage_keep(&s.f.stage, &span.s, &run, 1);
    g_assert(spent->backs == 1 && spent->back_pages == 16 && !spent->copies);
    back = moves_ns - out;
    g_assert(back && spent->back_ns == back);
    stage_keep(&s.f.stage, &span.s, NULL, 0);
    g_assert(spent->back_ns == back);
    stage_put_back(&s.f.stage, &span.s, 16, n - 16);
    isolation_lap(&span.s);
    all = moves_ns;
    rooms_release(&s.f, &span);
    g_assert(spent->isolate_ns == 301000 + out);
    g_assert(spent->cpu_ns == 4301000 + all);
    scene_end(&s);
}

static int move_busy(int fd, void *to, void *from, size_t len, size_t *done)
{
    paid_ns += 20000;
    moves_ns += 20000;
    *done = 0;
    return -EBUSY;
}

static ssize_t pagemap_paid(PmScan *scan)
{
    paid_ns += 5000000;
    return prim_real.pagemap(scan);
}

/* Where nothing could be moved, to see that is not what isolating costs. */
static void test_spent_refused(void)
{
    const KsmSpent *spent;
    RoomsSpan span;
    Scene s;

    if (!scene_start(&s, MEM_SMALL)) {
        return;
    }
    s.f.stage.swap_stays = false;   /* nor before */
    still_calls();
    prim.cpu_ns = cpu_paid;
    prim.uffd_register = register_paid;
    prim.uffd_move = move_busy;
    prim.uffd_unregister = unregister_paid;
    prim.pagemap = pagemap_paid;
    g_assert(!rooms_isolate(&s.f, &span, s.rb, 0, 100));
    spent = &span.s.spent;
    g_assert(moves_ns >= 100 * 20000 && spent->isolate_ns == 1000 + moves_ns);
    moves_ns = spent->isolate_ns;
    prim.uffd_register = prim_real.uffd_register;
    rooms_release(&s.f, &span);
    g_assert(spent->isolate_ns == 300000 + moves_ns);
    g_assert(spent->cpu_ns >= spent->isolate_ns + 5000000);
    scene_end(&s);
}

/*
 * A span comes back by itself if calls work at times.  Nothing is copied while
 * a device may be writing to it.
 */
static void test_back(gconstpointer data)
{
    const bool busy = GPOINTER_TO_INT(data);
    Scene s;

    for (unsigned seed = 0; seed < SEEDS; seed++) {
        size_t page;
        unsigned n;
        RoomsSpan span;

        if (!scene_start(&s, seed % 3 ? MEM_SMALL : MEM_HUGE)) {
            return;
        }
        if (seed % 3 == 2) {
            split_mappings(s.b);
        }
        g_rand_set_seed(h.rand, seed);
        page = seed % 6 ? g_rand_int_range(h.rand, 0, CHUNK_PAGES) : 0;
        n = seed % 6 ? g_rand_int_range(h.rand, 0, CHUNK_PAGES - page) + 1
                     : CHUNK_PAGES;
        h.copy_fails = seed % 5 * 20;
        h.back_fails = seed % 4 * 25;
        s.b->busy = busy;
        isolate_all(&s, &span, page, n);
        g_assert(rooms_staged(&s.f) == n);
        rooms_put_back(&s.f, &span);
        g_assert(mem_anonymous(s.b, page, n) == n);
        g_assert(!busy || !h.copied);
        rooms_release(&s.f, &span);
        s.b->busy = false;
        scene_end(&s);
    }
}

/*
 * Of a chunk several spans are isolated before what they were copied from goes.
 * What comes to where such a page is, is not taken for it.
 */
static void test_again(void)
{
    KsmCrew crew = { 0 };
    RoomsSpan span;
    Scene s;

    if (!scene_start(&s, MEM_SMALL)) {
        return;
    }
    /* alone, what is staged goes at once */
    g_assert(crew_set(&crew, 1) == 0);
    s.f.stage.crew = &crew;
    /* pages go back as copies */
    s.f.costs.back_ns = 1000000000;
    isolate_all(&s, &span, 10, 50);
    rooms_put_back(&s.f, &span);
    rooms_let_go(&s.f, &span);
    g_assert(h.copied == 50 && rooms_staged(&s.f) == 50);
    /* beside it, on both sides */
    isolate_all(&s, &span, 100, 20);
    g_assert(rooms_staged(&s.f) == 70);
    rooms_put_back(&s.f, &span);
    rooms_let_go(&s.f, &span);
    isolate_all(&s, &span, 2, 8);
    g_assert(rooms_staged(&s.f) == 78);
    rooms_put_back(&s.f, &span);
    rooms_let_go(&s.f, &span);
    mem_fill_run(s.b, 15, 40, 1 << 20, 1);
    isolate_all(&s, &span, 58, 43);
    g_assert(rooms_staged(&s.f) == 43);
    rooms_put_back(&s.f, &span);
    rooms_release(&s.f, &span);
    util_helped(&crew);
    g_assert(rooms_staged(&s.f) == 0);
    crew_end(&crew);
    scene_end(&s);
}

/* Waiting for the lock of the address space: not CPU time. */
static struct {
    uint64_t late;          /* ns */
    bool woken;
} lock;

#define LOCK_NS UINT64_C(10000000000)

static uint64_t now_late(void)
{
    return prim_real.now_ns() + lock.late;
}

static int register_late(const UffdRange *range, unsigned mode)
{
    lock.late += LOCK_NS;
    lock.woken = false;
    return prim_real.uffd_register(range, mode);
}

static int wake_first(const UffdRange *range)
{
    lock.woken = true;
    return h_wake(range);
}

static int unregister_late(const UffdRange *range)
{
    g_assert(lock.woken);
    lock.late += LOCK_NS;
    return prim_real.uffd_unregister(range);
}

/*
 * Who waits for a page is woken before the span is unregistered, and that is
 * when the stall ends; but for those who wait at a hole.
 */
static void test_wake(void)
{
    for (unsigned i = 0; i < 3; i++) {
        RoomsSpan span;
        Scene s;

        if (!scene_start(&s, MEM_SMALL)) {
            return;
        }
        prim.now_ns = now_late;
        prim.uffd_register = register_late;
        prim.uffd_wake = wake_first;
        prim.uffd_unregister = unregister_late;
        isolate_all(&s, &span, 8, 64);
        rooms_put_back(&s.f, &span);
        span.s.gaps = i == 1;
        span.s.fate[63] = i == 2 ? FATE_HOLE : FATE_STAGED;
        rooms_release(&s.f, &span);
        if (i == 0) {
            g_assert(span.s.spent.stall_ns < LOCK_NS);
        } else {
            g_assert(span.s.spent.stall_ns >= LOCK_NS);
            g_assert(span.s.spent.stall_ns < 2 * LOCK_NS);
        }
        prim.now_ns = prim_real.now_ns;
        prim.uffd_register = prim_real.uffd_register;
        prim.uffd_unregister = prim_real.uffd_unregister;
        prim.uffd_wake = h_wake;
        scene_end(&s);
    }
}

/* Only memory in several mappings takes many calls, a move for each. */
static void test_few_calls(void)
{
    Scene s;

    if (!scene_start(&s, MEM_SMALL)) {
        return;
    }
    g_assert(madvise(s.b->addr + 3 * PAGE, PAGE, MADV_DONTDUMP) == 0);
    g_assert(madvise(s.b->addr + 515 * PAGE, PAGE, MADV_DONTDUMP) == 0);
    s.b->busy = true;
    for (unsigned i = 0; i < 20 && !s.f.merge.busy; i++) {
        rooms_passes(&s.f, 1);
    }
    g_assert(s.f.merge.busy);
    g_test_message("%u out, %u back", h.moves_out, h.moves_back);
    g_assert(h.moves_out > 6 && h.moves_out < 100);
    g_assert(h.moves_back > 6 && h.moves_back < 100);
    mem_check(s.b);
    s.b->busy = false;
    scene_end(&s);
}

/* The tables are silent while anything is staged, or soon after. */
static void test_silent(gconstpointer data)
{
    unsigned scans = GPOINTER_TO_UINT(data);
    Scene s;

    for (unsigned seed = 0; seed < 12; seed++) {
        if (!scene_start(&s, seed % 2 ? MEM_HUGE : MEM_SMALL)) {
            return;
        }
        if (seed % 4 < 2) {
            split_mappings(s.b);
        }
        g_rand_set_seed(h.rand, seed);
        h.change = true;
        h.back_fails = seed % 3 * 40;
        h.copy_fails = seed % 3 * 40;
        s.b->busy = seed % 5 == 4;
        for (unsigned i = 0; i < 4; i++) {
            h.scans_left = scans;
            rooms_passes(&s.f, 2);
            mem_check(s.b);
        }
        h.scans_left = G_MAXUINT;
        g_assert(h.moves_out > 0);
        scene_end(&s);
    }
}

/* The stubborn page's place in the staging area. */
static char *bad_stage;

static void stage_fails(void)
{
    /* as when memory fails: the entry is a marker */
    g_assert(madvise(bad_stage, PAGE, MADV_DONTNEED) == 0);
    g_assert(prim_real.uffd_poison(h.f->uffd, bad_stage, PAGE) == 0);
}

static void note_stage(char *stage, char *home)
{
    bad_stage = stage + (h.m->addr + h.stubborn * PAGE - home);
}

static void fails_at_once(char *stage, char *home)
{
    note_stage(stage, home);
    stage_fails();
}

static void fails_when_back(char *stage, char *home)
{
    note_stage(stage, home);
    h.at_back = stage_fails;
}

static bool is_readable(const char *page)
{
    int fd[2];
    bool readable;

    g_assert(pipe(fd) == 0);
    readable = write(fd[1], page, 1) == 1;
    g_assert(readable || errno == EFAULT);
    close(fd[0]);
    close(fd[1]);
    return readable;
}

typedef struct Poison {
    size_t page;
    bool busy;      /* everything goes back */
    bool late;      /* it fails when putting back begins */
    bool no_marker; /* and UFFDIO_POISON does not work */
    bool unmovable; /* only copying tells that it has failed */
} Poison;

static int h_no_poison(int fd, void *addr, size_t len)
{
    return -EINVAL;
}

/* The failed page is poisoned at home, the others are back. */
static void test_poison(gconstpointer data)
{
    const Poison *how = data;
    PageState state;
    Scene s;

    if (!scene_start(&s, MEM_SMALL)) {
        return;
    }
    h.change = true;
    h.stubborn = how->page;
    h.once = how->late ? fails_when_back : fails_at_once;
    s.b->busy = how->busy;
    prim.uffd_poison = how->no_marker ? h_no_poison : prim_real.uffd_poison;
    h.refuse = how->unmovable ? G_MAXUINT : 0;
    expect_warning("memory they were in failed");
    for (unsigned i = 0; i < 9 && !rooms_poisoned(&s.f); i++) {
        rooms_passes(&s.f, 1);
    }
    g_assert(warnings == 1);
    g_assert(rooms_poisoned(&s.f) == 1);
    /* given up at once if certain, else after 100 ms */
    g_assert(how->unmovable ? h.paused_us > 90000 && h.paused_us < 200000
                            : h.paused_us < 10000);
    h.refuse = 0;
    /* nothing is known of it, nor what it equals; but what it takes to mend */
    state = how->no_marker ? PAGE_BARRED : PAGE_SWAPPED;
    g_assert(page_state(s.rb, how->page) == state);
    /* never zeroes */
    g_assert(!is_readable(s.b->addr + how->page * PAGE));
    h.change = s.b->busy = false;
    rooms_passes(&s.f, 6);
    g_assert(page_state(s.rb, how->page) == state);
    g_assert(!is_readable(s.b->addr + how->page * PAGE));
    /* the owner may do something about it */
    g_assert(mmap(s.b->addr + how->page * PAGE, PAGE, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
             MAP_FAILED);
    mem_gone(s.b, how->page, 1);
    mem_check(s.b);
    g_assert(rooms_poisoned(&s.f) == 1);
    scene_end(&s);
}

#define GONE_AT 43u     /* within what is to be put back */
#define GONE_N  5u

static void owner_maps_over(char *stage, char *home)
{
    char *at = h.m->addr + GONE_AT * PAGE;

    g_assert(mmap(at, GONE_N * PAGE, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
    at[0] = 'x';
    h.m->shadow[GONE_AT * PAGE] = 'x';
}

/* A mapping that userfaultfd refuses. */
static void owner_maps_file(char *stage, char *home)
{
    char *at = h.m->addr + GONE_AT * PAGE;
    int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);

    g_assert(fd >= 0);
    g_assert(mmap(at, GONE_N * PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd,
                  0) == at);
    close(fd);
}

/*
 * The kernel puts what may be anywhere at the highest address where there is
 * room: that may be the hole, for good, since a region's kin (kin.h) is one page
 * that is split off after that.  This leaves room above.
 */
#define DECOY_LEN (64 * PAGE)

static void *decoy;

static void owner_unmaps(char *stage, char *home)
{
    munmap(decoy, DECOY_LEN);
    g_assert(munmap(h.m->addr + GONE_AT * PAGE, GONE_N * PAGE) == 0);
}

/*
 * What is unmapped is free for anybody: a sanitizer maps pages of its own now
 * and then, for a moment, and would unmap ours.
 */
static void owner_maps_again(void)
{
    char *at = h.m->addr + GONE_AT * PAGE;

    for (unsigned tries = 0;
         mmap(at, GONE_N * PAGE, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != at;
         tries++) {
        if (errno != EEXIST || tries == 1000) {
            g_autofree char *maps = prim_read_file("/proc/self/maps", NULL);

            g_error("%p: %s\n%s", at, g_strerror(errno), maps);
        }
        g_usleep(1000);
    }
}

static void owner_protects(char *stage, char *home)
{
    g_assert(mprotect(h.m->addr + GONE_AT * PAGE, GONE_N * PAGE,
                      PROT_READ) == 0);
}

static bool knows_nothing(const KsmRegion *r, size_t page, size_t n)
{
    for (size_t i = page; i < page + n; i++) {
        PageState state = page_state(r, i);

        if (state != PAGE_NEW && state != PAGE_HOLE && state != PAGE_BUSY) {
            return false;
        }
    }
    return true;
}

/*
 * The owner's mapping wins, and the pages behind it are put back; also where
 * all moves back fail and only copying can tell.
 */
static void displaced(void (*how)(char *, char *), bool busy,
                      unsigned back_fails)
{
    bool forgot;
    Scene s;

    if (how == owner_unmaps) {
        decoy = mmap(NULL, DECOY_LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS,
                     -1, 0);
        g_assert(decoy != MAP_FAILED);
    }
    if (!scene_start(&s, MEM_SMALL)) {
        return;
    }
    h.change = true;
    h.once = how;
    h.back_fails = back_fails;
    s.b->busy = busy;
    if (how != owner_protects) {
        expect_warning("dropped: their owner");
    }
    for (unsigned i = 0; i < 20 && h.once; i++) {
        rooms_passes(&s.f, 1);
    }
    g_assert(!h.once);
    h.change = false;
    h.back_fails = 0;
    forgot = knows_nothing(s.rb, GONE_AT, GONE_N);
    if (how == owner_unmaps) {
        owner_maps_again();
    } else if (how == owner_protects) {
        g_assert(mprotect(h.m->addr + GONE_AT * PAGE, GONE_N * PAGE,
                          PROT_READ | PROT_WRITE) == 0);
    }
    if (how != owner_protects) {
        char first = s.b->shadow[GONE_AT * PAGE];

        g_assert(warnings == 1);
        g_assert(forgot);
        mem_gone(s.b, GONE_AT, GONE_N);
        s.b->shadow[GONE_AT * PAGE] = how == owner_maps_over ? first : 0;
    }
    g_assert(rooms_poisoned(&s.f) == 0);
    mem_check(s.b);
    s.b->busy = false;
    rooms_passes(&s.f, 4);
    scene_end(&s);
}

/*
 * The kernel unregisters nothing of such a span at once; but who touches a
 * hole in it must not wait for ever.
 */
static void test_displaced_file(void)
{
    UffdRange rest;
    Scene s;

    if (!scene_start_with(&s, MEM_SMALL, KSM_DIRTY_CHECKSUM)) {
        return;
    }
    h.change = true;
    h.once = owner_maps_file;
    expect_warning("dropped: their owner");
    for (unsigned i = 0; i < 20 && h.once; i++) {
        rooms_passes(&s.f, 1);
    }
    g_assert(!h.once);
    h.change = false;
    g_assert(warnings == 1);
    /* nothing of it is registered: another may have it */
    rest = (UffdRange) {
        prim_real.uffd(), s.b->addr + (GONE_AT + GONE_N) * PAGE, PAGE,
    };
    g_assert(prim_real.uffd_api(rest.fd, 0) == 0);
    g_assert(prim_real.uffd_register(&rest, UFFD_MISSING) == 0);
    close(rest.fd);
    g_assert(mmap(s.b->addr + GONE_AT * PAGE, GONE_N * PAGE,
                  PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
             MAP_FAILED);
    mem_gone(s.b, GONE_AT, GONE_N);
    mem_check(s.b);
    rooms_passes(&s.f, 4);
    scene_end(&s);
}

static void test_displaced(gconstpointer data)
{
    void (*const how[])(char *, char *) = {
        owner_maps_over, owner_unmaps, owner_protects,
    };
    unsigned i = GPOINTER_TO_UINT(data);

    displaced(how[i], false, 0);
    displaced(how[i], true, 0);
    displaced(how[i], false, 100);
}

/*
 * Nothing is copied while a device may write to what is staged; once it has
 * stopped, what cannot be moved is, one page alone.
 */
static void test_same(gconstpointer data)
{
    unsigned busy_for = GPOINTER_TO_UINT(data);
    Scene s;

    if (!scene_start(&s, MEM_SMALL)) {
        return;
    }
    s.b->busy = true;
    h.stubborn = 100;
    /* fewer than the stage has patience for, on any machine */
    h.refuse = busy_for ? G_MAXUINT : 1000;
    h.busy_for = busy_for;
    rooms_passes(&s.f, 3);
    g_assert(s.f.merge.busy > 0);
    g_assert(h.copied == (busy_for > 0));
    mem_check(s.b);
    h.refuse = 0;
    s.b->busy = false;
    scene_end(&s);
}

/*
 * At its limit of mappings the process cannot split any, be it to register a
 * part or to unregister it.
 */
static int no_register(const UffdRange *range, unsigned mode)
{
    return in_mem(range->addr) && (mode & UFFD_MISSING)
           ? -ENOMEM : prim_real.uffd_register(range, mode);
}

static int no_unregister(const UffdRange *range)
{
    return in_mem(range->addr) ? -ENOMEM : prim_real.uffd_unregister(range);
}

static unsigned renewed;

static void *map_counted(void *addr, size_t len, int prot, int flags, int fd,
                         off_t offset)
{
    renewed += in_stage(addr);
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

/*
 * Nothing is merged, nobody waits for that, and the staging area, which was
 * empty, is not mapped anew.
 */
static void test_limit(gconstpointer data)
{
    Scene s;

    if (!scene_start(&s, GPOINTER_TO_UINT(data))) {
        return;
    }
    renewed = 0;
    prim.uffd_register = no_register;
    prim.uffd_unregister = no_unregister;
    prim.map = map_counted;
    rooms_passes(&s.f, 4);
    g_assert(mem_anonymous(s.b, 0, PAGES) == PAGES);
    g_assert(h.paused_us == 0 && renewed == 0);
    prim.map = prim_real.map;
    prim.uffd_register = prim_real.uffd_register;
    prim.uffd_unregister = prim_real.uffd_unregister;
    rooms_passes(&s.f, 6);
    g_assert(mem_anonymous(s.b, 0, PAGES) == 0);
    mem_check(s.b);
    scene_end(&s);
}

/* Registers half, up to a mapping that it cannot split. */
static const char *half_end;

static int half_register(const UffdRange *range, unsigned mode)
{
    UffdRange half = *range;

    if (!in_mem(range->addr) || !(mode & UFFD_MISSING)) {
        return prim_real.uffd_register(range, mode);
    }
    half.len = range->len / PAGE / 2 * PAGE;
    half_end = (char *)half.addr + half.len;
    g_assert(half.len && prim_real.uffd_register(&half, mode) == 0);
    return -ENOMEM;
}

static int half_unregister(const UffdRange *range)
{
    return in_mem(range->addr) && (char *)range->addr + range->len > half_end
           ? -ENOMEM : prim_real.uffd_unregister(range);
}

/* Must users of a part of the memory wait? */
static bool someone_waits(const Mem *m)
{
    g_autofree char *text = prim_read_file("/proc/self/smaps", NULL);
    g_auto(GStrv) lines = g_strsplit(text, "\n", -1);
    unsigned long start, end;
    bool inside = false, found = false;

    for (unsigned i = 0; lines[i]; i++) {
        if (sscanf(lines[i], "%lx-%lx ", &start, &end) == 2) {
            inside = in_mem((void *)start);
        }
        found |= inside && g_str_has_prefix(lines[i], "VmFlags:") &&
                 strstr(lines[i], " um");
    }
    return found;
}

/* A half registration is undone without splitting anything. */
static void test_limit_half(void)
{
    Scene s;

    if (!scene_start(&s, MEM_SMALL)) {
        return;
    }
    half_end = NULL;
    /* so that the isolated span ends before its mapping */
    mem_fill_run(s.b, PAGES - 64, 64, 99999, 1);
    prim.uffd_register = half_register;
    prim.uffd_unregister = half_unregister;
    rooms_passes(&s.f, 4);
    g_assert(half_end && h.paused_us == 0);
    g_assert(!someone_waits(s.b));
    prim.uffd_register = prim_real.uffd_register;
    prim.uffd_unregister = prim_real.uffd_unregister;
    scene_end(&s);
}

/* Neither ever ends: the guest's own data counts. */
static void test_patience(void)
{
    Scene s;

    if (!scene_start(&s, MEM_SMALL)) {
        return;
    }
    s.b->busy = true;
    h.stubborn = 100;
    h.refuse = G_MAXUINT;
    rooms_passes(&s.f, 3);
    g_assert(h.copied > 0 && h.copied <= s.f.merge.busy);
    mem_check(s.b);
    h.refuse = 0;
    s.b->busy = false;
    scene_end(&s);
}

static char *flags_of(const char *page)
{
    g_autofree char *text = prim_read_file("/proc/self/smaps", NULL);
    g_auto(GStrv) lines = g_strsplit(text, "\n", -1);
    unsigned long start, end;
    bool inside = false;

    for (unsigned i = 0; lines[i]; i++) {
        if (sscanf(lines[i], "%lx-%lx ", &start, &end) == 2) {
            inside = start <= (uintptr_t)page && (uintptr_t)page < end;
        } else if (inside && g_str_has_prefix(lines[i], "VmFlags:")) {
            return g_strdup(lines[i]);
        }
    }
    return NULL;
}

/*
 * A child forked while pages are staged shall not have them: they could not be
 * moved any more.  Core dumps need none of them.
 */
static void check_area(const char *stage, const char *pages)
{
    bool huge = !access("/sys/kernel/mm/transparent_hugepage", F_OK);

    for (unsigned i = 0; i < CHUNK_PAGES; i += CHUNK_PAGES - 1) {
        g_autofree char *flags = flags_of(stage + i * PAGE);

        g_assert(flags && strstr(flags, " dc") && strstr(flags, " dd"));
        g_assert(!huge || strstr(flags, pages));
    }
}

static void check_areas(const Rooms *f)
{
    check_area(f->stage.small, " nh");
    check_area(f->stage.huge, " hg");
}

static unsigned drops_fail, prepares_fail;

static int d_advise(void *addr, size_t len, int advice)
{
    if (advice == MADV_DONTNEED && in_stage(addr) && drops_fail) {
        drops_fail--;
        return -ENOMEM;
    }
    return prim_real.advise(addr, len, advice);
}

static int d_register(const UffdRange *range, unsigned mode)
{
    if (in_stage(range->addr) && prepares_fail) {
        prepares_fail--;
        return -ENOMEM;
    }
    return prim_real.uffd_register(range, mode);
}

/* Pages can be moved to a staging area that was made anew. */
static void test_drop(gconstpointer data)
{
    Scene s;

    if (!scene_start(&s, GPOINTER_TO_INT(data))) {
        return;
    }
    check_areas(&s.f);
    drops_fail = 4;
    prepares_fail = 2;
    prim.advise = d_advise;
    prim.uffd_register = d_register;
    rooms_passes(&s.f, 8);
    g_assert(drops_fail == 0 && prepares_fail == 0);
    g_assert(rooms_sharing(&s.f) == PAGES);
    check_areas(&s.f);
    scene_end(&s);
}

static const Poison poisons[] = {
    { .page = 45 },                 /* to be put back */
    { .page = 45, .late = true },
    { .page = 38 },                 /* to be merged */
    { .page = 45, .busy = true },
    { .page = 45, .busy = true, .late = true },
    { .page = 45, .no_marker = true },
    { .page = 45, .unmovable = true },
    { .page = 45, .unmovable = true, .late = true },
};

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_log_set_always_fatal(G_LOG_LEVEL_ERROR | G_LOG_LEVEL_CRITICAL);
    g_log_set_handler(NULL, G_LOG_LEVEL_WARNING, warning_seen, NULL);
    g_test_add_func("/stage/random", test_random);
    g_test_add_data_func("/stage/spent", GUINT_TO_POINTER(2 * SPAN_MIN),
                         test_spent);
    g_test_add_func("/stage/spent/refused", test_spent_refused);
    g_test_add_data_func("/stage/spent/short", GUINT_TO_POINTER(SPAN_MIN),
                         test_spent);
    g_test_add_data_func("/stage/back/any", GINT_TO_POINTER(false),
                         test_back);
    g_test_add_data_func("/stage/back/busy", GINT_TO_POINTER(true),
                         test_back);
    g_test_add_func("/stage/wake", test_wake);
    g_test_add_func("/stage/few-calls", test_few_calls);
    g_test_add_func("/stage/again", test_again);
    g_test_add_data_func("/stage/drop/small", GINT_TO_POINTER(MEM_SMALL),
                         test_drop);
    g_test_add_data_func("/stage/drop/huge", GINT_TO_POINTER(MEM_HUGE),
                         test_drop);
    g_test_add_data_func("/stage/silent/never", GUINT_TO_POINTER(0),
                         test_silent);
    g_test_add_data_func("/stage/silent/soon", GUINT_TO_POINTER(2),
                         test_silent);
    for (unsigned i = 0; i < G_N_ELEMENTS(poisons); i++) {
        g_autofree char *name = g_strdup_printf("/stage/poison/%u", i);

        g_test_add_data_func(name, &poisons[i], test_poison);
    }
    g_test_add_data_func("/stage/displaced/mapped", GUINT_TO_POINTER(0),
                         test_displaced);
    g_test_add_data_func("/stage/displaced/unmapped", GUINT_TO_POINTER(1),
                         test_displaced);
    g_test_add_data_func("/stage/displaced/protected", GUINT_TO_POINTER(2),
                         test_displaced);
    g_test_add_func("/stage/displaced/file", test_displaced_file);
    g_test_add_data_func("/stage/same/moved", GUINT_TO_POINTER(0), test_same);
    g_test_add_data_func("/stage/same/copied", GUINT_TO_POINTER(3000),
                         test_same);
    g_test_add_func("/stage/same/patience", test_patience);
    g_test_add_data_func("/stage/limit/small", GUINT_TO_POINTER(MEM_SMALL),
                         test_limit);
    g_test_add_data_func("/stage/limit/huge", GUINT_TO_POINTER(MEM_HUGE),
                         test_limit);
    g_test_add_func("/stage/limit/half", test_limit_half);
    return g_test_run();
}
