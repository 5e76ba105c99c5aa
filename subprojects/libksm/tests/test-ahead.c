/*
 * libksm tests: memory for slots, before anybody asks for it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include <glib.h>

#include "base/page.h"
#include "base/prim.h"
#include "share/pool.h"
#include "share/store-local.h"
#include "util.h"

typedef struct Fixture {
    KsmCrew crew;
    KsmPool pool;
    char *pages;
} Fixture;

/* What was asked for since the last look: slots from the first one on. */
static pthread_mutex_t asked_lock = PTHREAD_MUTEX_INITIALIZER;
static size_t asked_at, asked_n;
static unsigned punched;
static int allocate_ret;

static int count_allocate(int fd, off_t offset, off_t len)
{
    size_t slot = offset / PAGE_BYTES;

    pthread_mutex_lock(&asked_lock);
    asked_at = asked_n ? MIN(asked_at, slot) : slot;
    asked_n += len / PAGE_BYTES;
    pthread_mutex_unlock(&asked_lock);
    return allocate_ret ? allocate_ret : prim_real.allocate(fd, offset, len);
}

static bool asked(size_t slot, size_t n)
{
    bool right = asked_n == n && (!n || asked_at == slot);

    asked_n = 0;
    return right;
}

#define NOT_ASKED   asked(0, 0)

static int count_punch(int fd, off_t offset, off_t len)
{
    punched++;
    return prim_real.punch(fd, offset, len);
}

static void set_up(Fixture *f, gconstpointer data)
{
    g_assert(crew_set(&f->crew, 1) == 0);
    g_assert(pool_init(&f->pool, 4) == 0);
    g_assert(pool_reserve(&f->pool, 16 * CHUNK_PAGES) == 0);
    f->pool.ahead.crew = &f->crew;
    f->pages = g_malloc(CHUNK_BYTES);
    memset(f->pages, 'p', CHUNK_BYTES);
    asked_n = punched = 0;
    allocate_ret = 0;
    prim.allocate = count_allocate;
    prim.punch = count_punch;
}

static void tear_down(Fixture *f, gconstpointer data)
{
    pool_free(&f->pool);
    crew_end(&f->crew);
    g_free(f->pages);
    prim.allocate = prim_real.allocate;
    prim.punch = prim_real.punch;
}

static bool is_huge(const Fixture *f)
{
    if (f->pool.keep_all) {
        g_test_skip("files have huge pages here: all of one is allocated");
    }
    return f->pool.keep_all;
}

/* Pages of the file that there are. */
static size_t file_pages(const Fixture *f)
{
    struct stat st;

    g_assert(fstat(f->pool.fd, &st) == 0);
    return st.st_blocks * 512 / PAGE_BYTES;
}

/* As a plan does: slots at the end of the file, with memory. */
static uint32_t take(Fixture *f, unsigned n)
{
    unsigned got = n;
    uint32_t slot = pool_take(&f->pool, &got);

    g_assert(slot != SLOT_NONE && got == n);
    g_assert(pool_allocate(&f->pool, slot, n) == 0);
    return slot;
}

static void settle(Fixture *f)
{
    util_helped(&f->crew);
}

/* As many are taken, and had for the next.  False: the test is skipped. */
static bool had_ahead(Fixture *f, unsigned n)
{
    if (is_huge(f)) {
        return false;
    }
    take(f, n);
    pool_ahead(&f->pool);
    settle(f);
    asked_n = 0;
    return true;
}

/* As many as were taken, and taken from then on without a call. */
static void test_next(Fixture *f, gconstpointer data)
{
    uint32_t slot;

    if (is_huge(f)) {
        return;
    }
    take(f, 200);
    g_assert(asked(0, 200));
    pool_ahead(&f->pool);
    settle(f);
    g_assert(asked(200, 200));
    g_assert(file_pages(f) == 400);
    g_assert(ahead_bytes(&f->pool.ahead) == 200 * PAGE_BYTES);
    g_assert(pool_bytes(&f->pool) > 200 * PAGE_BYTES);
    /* in pieces */
    take(f, 50);
    take(f, 70);
    g_assert(NOT_ASKED && ahead_bytes(&f->pool.ahead) == 80 * PAGE_BYTES);
    /* what is behind its end is asked for alone */
    slot = take(f, 100);
    g_assert(asked(slot + 80, 20));
    g_assert(file_pages(f) == 420 && ahead_bytes(&f->pool.ahead) == 0);
    /* 220 since; a plan's at most */
    pool_ahead(&f->pool);
    settle(f);
    g_assert(asked(420, 220));
    take(f, 220);
    take(f, 512);
    g_assert(asked(640, 512));
    pool_ahead(&f->pool);
    settle(f);
    g_assert(asked(1152, AHEAD_MAX) && punched == 0);
}

/* Not for few, nor where nobody helps, nor for a node's memory. */
static void test_not(Fixture *f, gconstpointer data)
{
    take(f, AHEAD_PIECE - 1);
    g_assert(asked(0, AHEAD_PIECE - 1));
    pool_ahead(&f->pool);
    settle(f);
    g_assert(NOT_ASKED);
    take(f, AHEAD_PIECE);
    asked_n = 0;
    f->pool.node = 0;
    pool_ahead(&f->pool);
    settle(f);
    g_assert(NOT_ASKED);
    f->pool.node = -1;
    g_assert(crew_set(&f->crew, 0) == 0);
    pool_ahead(&f->pool);
    g_assert(NOT_ASKED);
    f->pool.ahead.crew = NULL;
    take(f, AHEAD_PIECE);
    asked_n = 0;
    pool_ahead(&f->pool);
    pool_ahead_end(&f->pool);
    g_assert(NOT_ASKED && punched == 0);
}

static uint64_t late_ns;

static uint64_t clock_late(void)
{
    return prim_real.now_ns() + late_ns;
}

/* What was had for long may be in swap: it is asked for again. */
static void test_old(Fixture *f, gconstpointer data)
{
    uint32_t slot;

    late_ns = 0;
    prim.now_ns = clock_late;
    if (!had_ahead(f, 200)) {
        return;
    }
    late_ns = 1000000000;
    slot = take(f, 100);
    g_assert(asked(slot, 100));
    g_assert(ahead_bytes(&f->pool.ahead) == 100 * PAGE_BYTES);
    /* and is had anew when more is asked for */
    take(f, 10);
    asked_n = 0;
    pool_ahead(&f->pool);
    settle(f);
    g_assert(asked(310, 110) && file_pages(f) == 420);
    take(f, 110);
    g_assert(NOT_ASKED);
    prim.now_ns = prim_real.now_ns;
}

/* What is there already is of any node. */
static void test_node(Fixture *f, gconstpointer data)
{
    uint32_t slot;

    if (!had_ahead(f, 200)) {
        return;
    }
    f->pool.node = 0;
    slot = take(f, 80);
    g_assert(punched == 1 && asked(slot, 80) && file_pages(f) == 400);
    f->pool.node = -1;
    take(f, 120);
    g_assert(NOT_ASKED);
}

/* Those that nobody has taken go back; what was taken stays. */
static void test_back(Fixture *f, gconstpointer data)
{
    uint32_t slot;
    unsigned n = 40;

    if (!had_ahead(f, 200)) {
        return;
    }
    take(f, 50);
    /* taken, but not asked for: filled all the same, as a pattern is */
    slot = pool_take(&f->pool, &n);
    g_assert(pool_fill(&f->pool, slot, f->pages, n) == 0);
    pool_ahead_end(&f->pool);
    g_assert(punched == 1 && file_pages(f) == 290);
    g_assert(!memcmp(pool_page(&f->pool, slot), f->pages, n * PAGE_BYTES));
    g_assert(ahead_bytes(&f->pool.ahead) == 0);
    /* and are asked for like any others then */
    asked_n = 0;
    slot = take(f, 10);
    g_assert(asked(slot, 10));
    pool_ahead_end(&f->pool);
    g_assert(punched == 1);
}

/* Plans of less: what is there stays to be had, unless it was given back. */
static void test_fewer(Fixture *f, gconstpointer data)
{
    bool ended = data;

    if (!had_ahead(f, 400)) {
        return;
    }
    if (ended) {
        pool_ahead_end(&f->pool);
    }
    take(f, 70);
    asked_n = 0;
    pool_ahead(&f->pool);
    settle(f);
    g_assert(asked(470, 70));
    take(f, 100);
    g_assert(ended ? asked(540, 30) : NOT_ASKED);
    take(f, 230);
    g_assert(ended ? asked(570, 230) : NOT_ASKED);
    g_assert(file_pages(f) == 800);
}

/* A store that is told to flush has nothing to spare. */
static void test_flush(Fixture *f, gconstpointer data)
{
    int err;
    KsmStore *s = store_local_new(4, &err);
    KsmPool *p = store_local_pool(s);
    unsigned n = 200;
    uint32_t slot;

    g_assert(s && store_reserve(s, 4 * CHUNK_PAGES) == 0);
    s->crew = &f->crew;
    slot = pool_take(p, &n);
    g_assert(store_allocate(s, slot, n) == 0);
    store_ahead(s);
    g_assert(ahead_bytes(&p->ahead) == 200 * PAGE_BYTES);
    store_flush(s);
    g_assert(ahead_bytes(&p->ahead) == 0);
    store_ahead(s);
    g_assert(ahead_bytes(&p->ahead) == 0);
    /* who asks for memory of a node now gets none of what is anywhere */
    s->node = 0;
    n = 200;
    pool_take(p, &n);
    store_ahead(s);
    g_assert(ahead_bytes(&p->ahead) == 0);
    store_free(s);
}

static int no_punch(int fd, off_t offset, off_t len)
{
    return -EPERM;
}

/* What the kernel does not take is there for the next ones. */
static void test_kept(Fixture *f, gconstpointer data)
{
    if (!had_ahead(f, 200)) {
        return;
    }
    prim.punch = no_punch;
    pool_ahead_end(&f->pool);
    g_assert(ahead_bytes(&f->pool.ahead) == 200 * PAGE_BYTES);
    asked_n = 0;
    take(f, 150);
    g_assert(NOT_ASKED && file_pages(f) == 400);
    prim.punch = count_punch;
    pool_ahead_end(&f->pool);
    g_assert(ahead_bytes(&f->pool.ahead) == 0 && file_pages(f) == 350);
}

/*
 * What a helper was refused is asked for by who needs it, and no more is tried
 * in this pass.
 */
static void test_refused(Fixture *f, gconstpointer data)
{
    unsigned n = 50;
    uint32_t slot;

    if (is_huge(f)) {
        return;
    }
    take(f, 200);
    allocate_ret = -ENOMEM;
    pool_ahead(&f->pool);
    settle(f);
    slot = pool_take(&f->pool, &n);
    g_assert(pool_allocate(&f->pool, slot, n) == -ENOMEM);
    allocate_ret = 0;
    asked_n = 0;
    g_assert(pool_allocate(&f->pool, slot, n) == 0);
    g_assert(asked(slot, 50) && file_pages(f) == 250);
    take(f, 100);
    asked_n = 0;
    pool_ahead(&f->pool);
    settle(f);
    g_assert(NOT_ASKED);
    /* nobody knows what there is */
    pool_ahead_end(&f->pool);
    g_assert(punched == 1 && ahead_bytes(&f->pool.ahead) == 0);
    slot = take(f, 100);
    asked_n = 0;
    pool_ahead(&f->pool);
    settle(f);
    g_assert(asked(slot + 100, 100));
}

/* A slot that was given up, and is taken again, has lost its memory. */
static void test_punched(Fixture *f, gconstpointer data)
{
    unsigned n = 100;
    uint32_t slot;

    if (!had_ahead(f, 200)) {
        return;
    }
    /* of a plan that came to nothing */
    slot = pool_take(&f->pool, &n);
    pool_untake(&f->pool, slot, n);
    pool_flush(&f->pool);
    g_assert(file_pages(f) == 300);
    asked_n = 0;
    g_assert(take(f, 100) == slot);
    g_assert(asked(slot, 100));
    /* those behind it still have theirs */
    take(f, 100);
    g_assert(NOT_ASKED && file_pages(f) == 400);
}

/* A pattern's slots are not among those that have memory, or lose it. */
static void test_pattern(Fixture *f, gconstpointer data)
{
    KsmPattern *t;

    if (!had_ahead(f, 200)) {
        return;
    }
    t = pool_pattern_new(&f->pool, f->pages, 1);
    g_assert(t && t->first == CHUNK_PAGES);
    g_assert(pool_pattern_grow(&f->pool, t, CHUNK_PAGES) == 0);
    g_assert(file_pages(f) == 200 + CHUNK_PAGES);
    pool_ahead_end(&f->pool);
    g_assert(file_pages(f) == 200 + CHUNK_PAGES);
    g_assert(!memcmp(pool_page(&f->pool, t->first), f->pages, CHUNK_BYTES));
}

/* Not beyond the end of the file. */
static void test_file(Fixture *f, gconstpointer data)
{
    unsigned n = f->pool.capacity - 100;
    uint32_t slot = pool_take(&f->pool, &n);

    g_assert(slot == 0 && f->pool.file_slots == f->pool.capacity);
    pool_ahead(&f->pool);
    settle(f);
    g_assert(asked(n, 100));
    take(f, 100);
    g_assert(NOT_ASKED);
    pool_ahead(&f->pool);
    settle(f);
    g_assert(NOT_ASKED);
}

/* A pool that ends has nothing of its files in the hands of a helper. */
static void test_ends(Fixture *f, gconstpointer data)
{
    take(f, 200);
    pool_ahead(&f->pool);
    pool_free(&f->pool);
    g_assert(f->pool.ahead.n_pieces == 0);
    pool_closed(&f->pool);
}

static void add(const char *name, void (*test)(Fixture *, gconstpointer))
{
    g_test_add(name, Fixture, NULL, set_up, test, tear_down);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    add("/ahead/next", test_next);
    add("/ahead/not", test_not);
    add("/ahead/old", test_old);
    add("/ahead/node", test_node);
    add("/ahead/back", test_back);
    add("/ahead/fewer", test_fewer);
    g_test_add("/ahead/fewer/ended", Fixture, GINT_TO_POINTER(true), set_up,
               test_fewer, tear_down);
    add("/ahead/flush", test_flush);
    add("/ahead/kept", test_kept);
    add("/ahead/refused", test_refused);
    add("/ahead/punched", test_punched);
    add("/ahead/pattern", test_pattern);
    add("/ahead/file", test_file);
    add("/ahead/ends", test_ends);
    return g_test_run();
}
