/*
 * libksm: property test
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Whatever the engine does, a program sees its memory as it wrote it.  Writer
 * threads read, write, copy, discard, free, unmerge and fork on random pages
 * and keep a shadow copy; regions are removed, unmapped and added; two engines
 * merge as fast as they can.  Every read is held against the shadow, and all
 * of it at the end.  prop-watch.c watches the engines' calls.
 *
 * A page and its shadow are changed under the page's lock, unknown to the
 * engine, which may do anything to the page at any time.  Writers keep to a
 * moving window, so that the rest is quiet for a while, and mostly copy what is
 * elsewhere, so that there is much to merge.  A seed repeats the choices, not
 * the run: the scheduler orders events.
 *
 * test-prop [--seconds N] [--seed N] [--threads N] [--dictionary SEED]
 *           [--tail 0|1]
 *
 * With --tail what is left may be merged by ksmd at the same time: run it by
 * scripts/lib/host/with_ksmd.py.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/prim.h"
#include "base/tsan.h"
#include "engine/state.h"
#include "prop-watch.h"
#include "slower.h"
#include "stores.h"

#define PAGE KSM_PAGE_SIZE
#define CHUNK KSM_CHUNK_SIZE
#define N_REGIONS 4
#define N_ENGINES 2
#define MAX_THREADS 64
#define DICTIONARY 96       /* contents that occur again and again */
#define MAX_RANGE 600       /* pages of one operation: over a chunk */
#define WINDOW 1024         /* where a writer stays for a while */
#define DECAY_NS UINT64_C(200000000)

typedef enum Op {
    OP_READ, OP_WRITE, OP_FILL, OP_COPY, OP_DISCARD, OP_FREE, OP_UNMERGE,
    OP_FORK, OP_MAX
} Op;

static const char *const op_names[OP_MAX] = {
    "reads", "writes", "fills", "copies", "discards", "free hints",
    "unmerges", "forks",
};

/* Relative frequencies. */
static const unsigned op_weights[OP_MAX] = {
    400, 300, 120, 120, 20, 20, 10, 1,
};

typedef struct Area {
    char *map;              /* what was mapped, whole chunks */
    char *mem;              /* what the engine has of it */
    size_t first;           /* number of its first page among all */
    size_t n;               /* pages */
    KsmEngine *engine;
    KsmRegion *region;      /* under @lock; NULL: not the engine's now */
    pthread_rwlock_t lock;  /* read: @region stays */
    bool huge;              /* MADV_HUGEPAGE */
    bool log;               /* has a dirty log */
    unsigned long *dirty;   /* that log, by page; atomic */
} Area;

typedef struct Test {
    uint64_t seed, dictionary_seed;
    double seconds;
    int threads;
    bool tail;              /* some of it is left to the kernel's KSM */
    Area areas[N_REGIONS];
    KsmEngine *engines[N_ENGINES];
    size_t n;               /* pages of all areas */
    char *shadow;
    uint8_t *locks;         /* per page; atomic */
    uint8_t *freed;         /* per page: may be zero instead of the shadow */
    char *dictionary;
    uint64_t done[OP_MAX];  /* atomic */
    uint64_t removed;       /* atomic */
    uint64_t remapped;      /* atomic */
    int stop;               /* atomic */
    int inhibit;            /* atomic: regions say so */
} Test;

static Test T;

/* A group's members leave nothing to children, nor to the kernel's KSM. */
static bool stays_home(void)
{
    return stores_group() || T.tail;
}

static uint64_t next_random(uint64_t *state)
{
    /* splitmix64: any state will do */
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static size_t below(uint64_t *state, size_t n)
{
    return next_random(state) % n;
}

static Area *area_of(size_t page)
{
    Area *a = T.areas;

    while (page >= a->first + a->n) {
        a++;
    }
    return a;
}

static char *mem_of(size_t page)
{
    Area *a = area_of(page);

    return a->mem + (page - a->first) * PAGE;
}

static char *shadow_of(size_t page)
{
    return T.shadow + page * PAGE;
}

/* The page at an address; T.n: none. */
static size_t page_of(const void *addr)
{
    for (int i = 0; i < N_REGIONS; i++) {
        const Area *a = &T.areas[i];

        if ((char *)addr >= a->mem && (char *)addr < a->mem + a->n * PAGE) {
            return a->first + ((char *)addr - a->mem) / PAGE;
        }
    }
    return T.n;
}

static bool is_memory(const void *addr)
{
    return page_of(addr) < T.n;
}

static bool may_vanish(const void *addr)
{
    size_t page = page_of(addr);
    bool freed;

    KSM_TSAN_IGNORE_BEGIN();
    freed = page < T.n && T.freed[page];
    KSM_TSAN_IGNORE_END();
    return freed;
}

static const WatchOwner watch_owner = {
    .is_memory = is_memory,
    .may_vanish = may_vanish,
};

static bool all_zero(const char *page)
{
    return !page[0] && !memcmp(page, page + 1, PAGE - 1);
}

/* Is the content of @page somewhere else instead? */
static void print_elsewhere(size_t page)
{
    for (size_t i = 0; i < T.n; i++) {
        if (i != page && !memcmp(mem_of(i), shadow_of(page), PAGE) &&
            memcmp(shadow_of(i), shadow_of(page), PAGE)) {
            printf("# that is what page %zu has, and should not\n", i);
        }
    }
}

static void G_GNUC_NORETURN fail(size_t page, const char *when)
{
    Area *a = area_of(page);
    const char *mem = mem_of(page);
    const char *shadow = shadow_of(page);
    size_t at = 0;

    while (at < PAGE - 1 && mem[at] == shadow[at]) {
        at++;
    }
    printf("Bail out! %s: page %zu (area %d, %p, page %zu of a chunk%s) "
           "differs from offset %zu on: is %02x, should be %02x%s%s; "
           "seed %" PRIu64 "\n", when, page, (int)(a - T.areas), mem,
           (uintptr_t)mem / PAGE % 512, T.freed[page] ? ", freed" : "", at,
           (uint8_t)mem[at], (uint8_t)shadow[at],
           all_zero(mem) ? ", is all zero" : "",
           all_zero(shadow) ? ", should be all zero" : "", T.seed);
    print_elsewhere(page);
    watch_print(mem, shadow);
    fflush(stdout);
    _exit(1);
}

static void check_page(size_t page, const char *when)
{
    const char *mem = mem_of(page);

    if (T.freed[page] && all_zero(mem)) {
        return;
    }
    if (memcmp(mem, shadow_of(page), PAGE)) {
        /* a freed page may have become zeroes just now */
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        if (!T.freed[page] || !all_zero(mem)) {
            fail(page, when);
        }
    }
}

static void lock_range(size_t page, size_t n)
{
    for (size_t i = page; i < page + n; i++) {
        while (__atomic_exchange_n(&T.locks[i], 1, __ATOMIC_ACQUIRE)) {
            sched_yield();
        }
    }
}

static void unlock_range(size_t page, size_t n)
{
    for (size_t i = page; i < page + n; i++) {
        __atomic_store_n(&T.locks[i], 0, __ATOMIC_RELEASE);
    }
}

/* A log is told after the write: the engine may look in between. */
static void mark_dirty(size_t page)
{
    Area *a = area_of(page);
    size_t i = page - a->first;

    if (a->log) {
        __atomic_fetch_or(&a->dirty[i / 64], 1UL << i % 64, __ATOMIC_RELEASE);
    }
}

/* Page contents; @i shifts what a run is made of. */
static void make_content(uint64_t *seed, char *page, unsigned kind, size_t i)
{
    switch (kind) {
    case 0:
        memset(page, 0, PAGE);
        break;
    case 1:
        memset(page, 0xcc, PAGE);
        break;
    case 2:
        memset(page, 0x11 + (kind + i / 64) % 4, PAGE);
        break;
    case 3:
        /* unique */
        for (size_t w = 0; w < PAGE / 8; w++) {
            ((uint64_t *)page)[w] = next_random(seed);
        }
        break;
    case 4:
        /* nearly equal: differs at the very end */
        memcpy(page, T.dictionary + i % DICTIONARY * PAGE, PAGE);
        ((uint64_t *)page)[PAGE / 8 - 1] = below(seed, 3);
        break;
    case 5:
        /* nearly zero */
        memset(page, 0, PAGE);
        page[below(seed, PAGE)] = below(seed, 2);
        break;
    default:
        memcpy(page, T.dictionary + i % DICTIONARY * PAGE, PAGE);
        break;
    }
}

static void op_read(uint64_t *seed, size_t page, size_t n)
{
    n = MIN(n, 4);
    lock_range(page, n);
    for (size_t i = page; i < page + n; i++) {
        check_page(i, "read");
    }
    unlock_range(page, n);
}

static void op_write(uint64_t *seed, size_t page, size_t n)
{
    size_t word = below(seed, PAGE / 8);
    uint64_t value = below(seed, 4);
    uint64_t *mem, *shadow;

    lock_range(page, 1);
    mem = (uint64_t *)mem_of(page);
    shadow = (uint64_t *)shadow_of(page);
    if (T.freed[page]) {
        /* from now on it is one or the other for good */
        __atomic_store_n(&mem[word], value, __ATOMIC_SEQ_CST);
        shadow[word] = value;
        if (memcmp(mem, shadow, PAGE)) {
            memset(shadow, 0, PAGE);
            shadow[word] = value;
        }
        T.freed[page] = 0;
    } else {
        if (mem[word] != shadow[word]) {
            fail(page, "before a write");
        }
        mem[word] = value;
        shadow[word] = value;
    }
    mark_dirty(page);
    check_page(page, "after a write");
    unlock_range(page, 1);
}

/*
 * Looks at what it wrote, sometimes for longer than merging a chunk takes: a
 * write to a page being replaced is lost soon or never.
 */
static void linger(uint64_t *seed, size_t page, size_t n, const char *when)
{
    switch (below(seed, 32)) {
    case 0:
        usleep(below(seed, 3000));
        break;
    case 1:
        sched_yield();
        break;
    }
    for (size_t i = page; i < page + n; i++) {
        check_page(i, when);
    }
}

static void op_fill(uint64_t *seed, size_t page, size_t n)
{
    unsigned kind = below(seed, 10);
    size_t shift = below(seed, DICTIONARY);
    char *buffer = g_malloc(PAGE);

    lock_range(page, n);
    for (size_t i = 0; i < n; i++) {
        make_content(seed, buffer, kind, shift + i);
        watch_note("fill", prim_real.now_ns(), mem_of(page + i), PAGE, kind,
                   T.freed[page + i]);
        memcpy(mem_of(page + i), buffer, PAGE);
        memcpy(shadow_of(page + i), buffer, PAGE);
        T.freed[page + i] = 0;
        mark_dirty(page + i);
    }
    watch_note_entries(mem_of(page), n);
    linger(seed, page, n, "after a fill");
    unlock_range(page, n);
    g_free(buffer);
}

static void op_copy(uint64_t *seed, size_t page, size_t n)
{
    size_t from = below(seed, T.n - n);

    if (from < page + n && page < from + n) {
        return;
    }
    /* the lower range first: no deadlock */
    lock_range(MIN(from, page), n);
    lock_range(MAX(from, page), n);
    for (size_t i = 0; i < n; i++) {
        if (T.freed[from + i]) {
            continue;
        }
        check_page(from + i, "before a copy");
        watch_note("copy", prim_real.now_ns(), mem_of(page + i), PAGE, 0,
                   T.freed[page + i]);
        memcpy(mem_of(page + i), mem_of(from + i), PAGE);
        memcpy(shadow_of(page + i), shadow_of(from + i), PAGE);
        T.freed[page + i] = 0;
        mark_dirty(page + i);
    }
    watch_note_entries(mem_of(page), n);
    linger(seed, page, n, "after a copy");
    unlock_range(page, n);
    unlock_range(from, n);
}

static void check_result(int result, const char *what)
{
    /* a busy device: called again */
    if (result && result != -ENOMEM && result != -EBUSY) {
        printf("Bail out! %s: %s; seed %" PRIu64 "\n", what,
               strerror(-result), T.seed);
        fflush(stdout);
        _exit(1);
    }
}

static void op_engine(Op op, size_t page, size_t n)
{
    Area *a = area_of(page);
    size_t offset = (page - a->first) * PAGE;
    int result;

    pthread_rwlock_rdlock(&a->lock);
    if (!a->region) {
        pthread_rwlock_unlock(&a->lock);
        return;
    }
    lock_range(page, n);
    watch_note(op_names[op], prim_real.now_ns(), mem_of(page), n * PAGE, 0,
               0);
    switch (op) {
    case OP_DISCARD:
        memset(T.freed + page, 1, n);
        do {
            result = ksm_discard(a->region, offset, n * PAGE);
            check_result(result, "ksm_discard");
        } while (result);
        for (size_t i = page; i < page + n; i++) {
            memset(shadow_of(i), 0, PAGE);
            T.freed[i] = 0;
            check_page(i, "after a discard");
        }
        break;
    case OP_FREE:
        memset(T.freed + page, 1, n);
        check_result(ksm_free_hint(a->region, offset, n * PAGE),
                     "ksm_free_hint");
        break;
    default:
        check_result(ksm_unmerge(a->region, offset, n * PAGE), "ksm_unmerge");
        break;
    }
    for (size_t i = page; i < page + n; i++) {
        check_page(i, op_names[op]);
    }
    unlock_range(page, n);
    pthread_rwlock_unlock(&a->lock);
}

/* In the child: only what may be called there. */
static int check_child(uint64_t *seed, size_t page, size_t n)
{
    for (int round = 0; round < 3; round++) {
        for (size_t i = page; i < page + n; i++) {
            const char *mem = mem_of(i);

            if (memcmp(mem, shadow_of(i), PAGE) &&
                !(T.freed[i] && all_zero(mem))) {
                fail(i, round ? "in a child, later" : "in a child");
            }
            if (round == 1 && i % 3 == 0) {
                /* must not be seen in the parent */
                memset(mem_of(i), 0x77, PAGE);
                memset(shadow_of(i), 0x77, PAGE);
                T.freed[i] = 0;
            }
        }
        usleep(below(seed, 60000));
    }
    return 0;
}

static void op_fork(uint64_t *seed, size_t page, size_t n)
{
    int status;
    pid_t pid;

    lock_range(page, n);
    watch_note("fork", prim_real.now_ns(), mem_of(page), n * PAGE, 0, 0);
    pid = fork();
    if (pid == 0) {
        _exit(check_child(seed, page, n));
    }
    /* the parent's pages change meanwhile */
    for (size_t i = page; i < page + n; i++) {
        check_page(i, "after a fork");
    }
    unlock_range(page, n);
    if (pid > 0 && (waitpid(pid, &status, 0) != pid || status)) {
        printf("Bail out! a child ended with status 0x%x; seed %" PRIu64 "\n",
               status, T.seed);
        fflush(stdout);
        _exit(1);
    }
}

static Op choose_op(uint64_t *seed)
{
    unsigned sum = 0, choice;
    Op op = 0;

    for (int i = 0; i < OP_MAX; i++) {
        sum += op_weights[i];
    }
    choice = below(seed, sum);
    while (choice >= op_weights[op]) {
        choice -= op_weights[op++];
    }
    return op;
}

static void do_op(uint64_t *seed, Op op, size_t page)
{
    Area *a = area_of(page);
    /* short ranges are common */
    size_t n = below(seed, 4) ? 1 + below(seed, 24)
                              : 1 + below(seed, MAX_RANGE);

    n = MIN(n, a->first + a->n - page);
    switch (op) {
    case OP_READ:
        op_read(seed, page, n);
        break;
    case OP_WRITE:
        op_write(seed, page, n);
        break;
    case OP_FILL:
        op_fill(seed, page, n);
        break;
    case OP_COPY:
        op_copy(seed, page, n);
        break;
    case OP_FORK:
        /* a group's members leave nothing to children */
        if (!stays_home()) {
            op_fork(seed, page, n);
        }
        break;
    default:
        op_engine(op, page, n);
        break;
    }
    __atomic_fetch_add(&T.done[op], 1, __ATOMIC_RELAXED);
}

static void *writer(void *opaque)
{
    uint64_t seed = T.seed * 1000 + (uintptr_t)opaque;
    size_t window = 0;

    for (unsigned i = 0; !__atomic_load_n(&T.stop, __ATOMIC_RELAXED); i++) {
        size_t page;

        if (i % 512 == 0) {
            window = below(&seed, T.n - WINDOW);
            usleep(below(&seed, 20000));
        }
        /* mostly in the window */
        page = below(&seed, 64) ? window + below(&seed, WINDOW)
                                : below(&seed, T.n);
        do_op(&seed, choose_op(&seed), page);
    }
    return NULL;
}

static bool op_dirty_sync(void *opaque, size_t first_page, size_t n_pages,
                       unsigned long *bitmap)
{
    Area *a = opaque;

    for (size_t i = 0; i < n_pages; i++) {
        size_t page = first_page + i;
        unsigned long bit = 1UL << page % 64;

        if (__atomic_load_n(&a->dirty[page / 64], __ATOMIC_ACQUIRE) & bit) {
            __atomic_fetch_and(&a->dirty[page / 64], ~bit, __ATOMIC_ACQ_REL);
            bitmap[i / 64] |= 1UL << i % 64;
        }
    }
    return true;
}

static bool busy(void *opaque, void *addr, size_t len)
{
    static uint64_t count;

    return __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED) % 16 == 0;
}

static const char *inhibited(void *opaque)
{
    return __atomic_load_n(&T.inhibit, __ATOMIC_RELAXED) ? "the test" : NULL;
}

static const KsmRegionOps log_ops = {
    .dirty_sync = op_dirty_sync,
    .busy = busy,
    .inhibited = inhibited,
};

static const KsmRegionOps plain_ops = {
    .busy = busy,
};

static void area_add(Area *a)
{
    g_autoptr(GError) error = NULL;

    a->region = ksm_region_add(a->engine, a->mem, a->n * PAGE, -1,
                               a->log ? &log_ops : &plain_ops, a, &error);
    if (!a->region) {
        printf("Bail out! ksm_region_add: %s; seed %" PRIu64 "\n",
               error->message, T.seed);
        fflush(stdout);
        _exit(1);
    }
}

static void area_remove(Area *a, KsmRemove how)
{
    int result = -ENOMEM;

    for (int i = 0; result && i < 1000; i++) {
        result = ksm_region_remove(a->region, how);
        check_result(result, "ksm_region_remove");
        if (result) {
            usleep(1000);
        }
    }
    g_assert(!result);
    a->region = NULL;
}

static void area_map(Area *a)
{
    size_t len = (a->n + 1024) * PAGE;
    char *p = mmap(a->map, len, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | (a->map ? MAP_FIXED : 0),
                   -1, 0);

    g_assert(p != MAP_FAILED);
    a->map = p;
    madvise(p, len, a->huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    if (stays_home()) {
        madvise(p, len, MADV_DONTFORK);
    }
}

/* Takes a region away and gives it back, sometimes with new memory. */
static void area_cycle(uint64_t *seed, Area *a)
{
    bool remap = below(seed, 3) == 0;

    pthread_rwlock_wrlock(&a->lock);
    if (remap) {
        lock_range(a->first, a->n);
        area_remove(a, KSM_REMOVE_FORGET);
        /* not unmapped first: other threads might map there */
        area_map(a);
        memset(shadow_of(a->first), 0, a->n * PAGE);
        memset(T.freed + a->first, 0, a->n);
        for (size_t i = a->first; i < a->first + a->n; i++) {
            check_page(i, "new memory");
        }
        unlock_range(a->first, a->n);
        __atomic_fetch_add(&T.remapped, 1, __ATOMIC_RELAXED);
    } else {
        area_remove(a, KSM_REMOVE_UNMERGE);
        __atomic_fetch_add(&T.removed, 1, __ATOMIC_RELAXED);
    }
    pthread_rwlock_unlock(&a->lock);
    usleep(below(seed, 50000));
    pthread_rwlock_wrlock(&a->lock);
    area_add(a);
    pthread_rwlock_unlock(&a->lock);
}

static void check_stats(KsmEngine *engine)
{
    KsmStats stats;

    ksm_engine_get_stats(engine, &stats);
    g_assert(stats.pages_sharing + stats.zero_pages <= stats.pages_total);
    g_assert(stats.pages_shared <= stats.pages_total);
}

static void *manager(void *opaque)
{
    uint64_t seed = T.seed * 1000 + 999;

    while (!__atomic_load_n(&T.stop, __ATOMIC_RELAXED)) {
        KsmEngine *engine = T.engines[below(&seed, N_ENGINES)];

        usleep(below(&seed, 200000));
        switch (below(&seed, 8)) {
        case 0:
            area_cycle(&seed, &T.areas[below(&seed, N_REGIONS)]);
            break;
        case 1:
            ksm_rescan(engine);
            break;
        case 2:
            ksm_engine_set_run(engine, false);
            usleep(below(&seed, 30000));
            ksm_engine_set_run(engine, true);
            break;
        case 3:
            __atomic_store_n(&T.inhibit, 1, __ATOMIC_RELAXED);
            usleep(below(&seed, 30000));
            __atomic_store_n(&T.inhibit, 0, __ATOMIC_RELAXED);
            break;
        case 4:
            ksm_engine_set_smart_scan(engine, below(&seed, 2));
            break;
        default:
            check_stats(engine);
            break;
        }
    }
    return NULL;
}

static void *stepper(void *opaque)
{
    KsmEngine *engine = opaque;
    uint64_t seed = T.seed * 1000 + 998;

    while (!__atomic_load_n(&T.stop, __ATOMIC_RELAXED)) {
        int64_t wait = ksm_step(engine, below(&seed, 20000000));

        if (wait) {
            /* sooner than asked: as much merging as possible */
            usleep(below(&seed, 2000));
        }
    }
    return NULL;
}

static void make_areas(void)
{
    /* whole chunks; huge pages; odd ends; a few pages */
    static const size_t pages[N_REGIONS] = { 4096, 4096, 3011, 77 };
    static const size_t skip[N_REGIONS] = { 0, 0, 5, 300 };

    for (int i = 0; i < N_REGIONS; i++) {
        Area *a = &T.areas[i];

        a->n = pages[i];
        a->first = T.n;
        T.n += a->n;
        a->huge = i == 1;
        a->log = i == 1 || i == 2;
        a->dirty = g_new0(unsigned long, a->n / 64 + 1);
        a->engine = T.engines[i == 3];
        pthread_rwlock_init(&a->lock, NULL);
        area_map(a);
        /* to a chunk's start, and off it by @skip pages */
        a->mem = (char *)(((uintptr_t)a->map + CHUNK - 1) &
                          ~(uintptr_t)(CHUNK - 1)) + skip[i] * PAGE;
    }
    T.shadow = mmap(NULL, T.n * PAGE, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    g_assert(T.shadow != MAP_FAILED);
    T.locks = g_malloc0(T.n);
    T.freed = g_malloc0(T.n);
    for (int i = 0; i < N_REGIONS; i++) {
        area_add(&T.areas[i]);
    }
}

static void make_engines(void)
{
    for (int i = 0; i < N_ENGINES; i++) {
        g_autoptr(GError) error = NULL;
        KsmConfig config;

        ksm_config_init(&config);
        config.max_cpu = 100;
        config.threads = 1 + i;
        config.split_min_pages = 8;
        config.max_page_sharing = i ? 4 : 256;
        config.dirty = i ? KSM_DIRTY_CHECKSUM : KSM_DIRTY_AUTO;
        config.tail = T.tail;
        config.free_policy = i ? KSM_FREE_LAZY : KSM_FREE_AUTO;
        fake_habits = fake_habits_bad;
        fake_habits.seed = T.seed + i;
        T.engines[i] = stores_engine_new(&config, &error);
        if (!T.engines[i]) {
            printf("1..0 # SKIP %s\n", error->message);
            exit(77);
        }
        T.engines[i]->tail.eager = true;
        /* freed memory is given back while it is written again */
        ksm_freer_set_decay(T.engines[i]->freer, DECAY_NS);
    }
}

static void make_dictionary(void)
{
    uint64_t seed = T.dictionary_seed;

    T.dictionary = g_malloc(DICTIONARY * PAGE);
    for (size_t i = 0; i < DICTIONARY * PAGE / 8; i++) {
        ((uint64_t *)T.dictionary)[i] = next_random(&seed);
    }
}

static void run_threads(void)
{
    pthread_t writers[MAX_THREADS], steppers[N_ENGINES], manages;

    for (intptr_t i = 0; i < T.threads; i++) {
        g_assert(!pthread_create(&writers[i], NULL, writer, (void *)i));
    }
    for (int i = 0; i < N_ENGINES; i++) {
        g_assert(!pthread_create(&steppers[i], NULL, stepper, T.engines[i]));
    }
    g_assert(!pthread_create(&manages, NULL, manager, NULL));
    usleep(T.seconds * 1e6);
    __atomic_store_n(&T.stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < T.threads; i++) {
        pthread_join(writers[i], NULL);
    }
    for (int i = 0; i < N_ENGINES; i++) {
        pthread_join(steppers[i], NULL);
    }
    pthread_join(manages, NULL);
}

static void check_all(const char *when)
{
    for (size_t i = 0; i < T.n; i++) {
        check_page(i, when);
    }
}

static void print_group(KsmEngine *engine)
{
    const KsmCosts *c = &engine->costs;
    KsmGroupStats g;

    printf("# isolate %" PRIu64 " ns, map %" PRIu64 " ns, copy %" PRIu64
           " ns, page %" PRIu64 " ns\n", c->isolate_ns, c->map_ns, c->copy_ns,
           c->page_ns);
    if (ksm_engine_get_group(engine, &g)) {
        printf("# group: %sconnected, %s, generation %" PRIu64 ", %" PRIu64
               " of %" PRIu64 " bytes, %" PRIu64 " held\n",
               g.connected ? "" : "not ", ksm_reason_name(g.why), g.generation,
               g.pool_bytes, g.pool_limit, g.held);
    }
}

/* Without writers, what can be merged must be. */
static void check_merges(void)
{
    KsmEngine *engine = T.engines[0];
    KsmStats stats;
    int i;

    for (size_t page = 0; page < 2048; page++) {
        memset(mem_of(page), 0x21, PAGE);
        memset(shadow_of(page), 0x21, PAGE);
        T.freed[page] = 0;
    }
    ksm_rescan(engine);
    for (i = 0; i < 20000; i++) {
        ksm_step(engine, 0);
        ksm_engine_get_stats(engine, &stats);
        if (stats.pages_sharing + stats.kernel_pages > 1024) {
            break;
        }
        usleep(1000);
    }
    for (i = 0; i < KSM_REASON_MAX; i++) {
        if (stats.reasons[i]) {
            printf("# %s %" PRIu64 "\n", ksm_reason_name(i),
                   stats.reasons[i]);
        }
    }
    check_all("after the threads");
    if (stats.pages_sharing + stats.kernel_pages <= 1024) {
        for (i = 0; i < KSM_REASON_MAX; i++) {
            printf("# %" PRIu64 " pages: %s\n", stats.reasons[i],
                   ksm_reason_name(i));
        }
        print_group(engine);
        printf("Bail out! only %" PRIu64 " pages are merged in the end\n",
               stats.pages_sharing);
        exit(1);
    }
}

static void print_stats(int number)
{
    KsmStats s;

    ksm_engine_get_stats(T.engines[number], &s);
    printf("# engine %d: %" PRIu64 " pages merged in %" PRIu64
           " isolations, %" PRIu64 " verify failed, %" PRIu64 " busy, %" PRIu64
           " written later, %" PRIu64 " pinned, %" PRIu64 " huge split, %"
           PRIu64 " passes, stall p99 %" PRIu64 " ns, max %" PRIu64 " ns\n",
           number, s.merged, s.isolations, s.verify_failed, s.busy,
           s.cow_broken, s.pinned, s.huge_split, s.full_scans, s.stall_p99,
           s.stall_max);
    if (T.tail) {
        printf("# engine %d: %" PRIu64 " pages are the kernel's, in %" PRIu64
               " MiB left to it\n", number, s.kernel_pages,
               s.kernel_left >> 20);
    }
}

static void parse(int argc, char **argv)
{
    const char *seconds = getenv("KSM_PROP_SECONDS"), *dictionary = NULL;

    T.seconds = seconds ? atof(seconds) : 60;
    T.threads = 4;
    T.seed = g_get_real_time() % 1000000;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--seconds")) {
            T.seconds = atof(argv[i + 1]);
        } else if (!strcmp(argv[i], "--seed")) {
            T.seed = g_ascii_strtoull(argv[i + 1], NULL, 0);
        } else if (!strcmp(argv[i], "--threads")) {
            T.threads = CLAMP(atoi(argv[i + 1]), 1, MAX_THREADS);
        } else if (!strcmp(argv[i], "--tail")) {
            T.tail = atoi(argv[i + 1]);
        } else if (!strcmp(argv[i], "--dictionary")) {
            dictionary = argv[i + 1];
        } else {
            argc = 0;
        }
    }
    if (argc % 2 == 0) {
        fprintf(stderr, "usage: test-prop [--seconds N] [--seed N] "
                "[--threads N] [--dictionary SEED] [--tail 0|1]\n");
        exit(2);
    }
    /* what several processes have in common */
    T.dictionary_seed = dictionary ? g_ascii_strtoull(dictionary, NULL, 0)
                                   : T.seed;
}

int main(int argc, char **argv)
{
    parse(argc, argv);
    slower_init();
    make_engines();
    printf("TAP version 13\n1..1\n# seed %" PRIu64 ", %g s, %d threads\n",
           T.seed, T.seconds, T.threads);
    fflush(stdout);
    make_dictionary();
    watch_start(T.engines, N_ENGINES, &watch_owner);
    make_areas();
    run_threads();
    for (int i = 0; i < N_ENGINES; i++) {
        print_stats(i);
    }
    check_merges();
    for (int i = 0; i < N_REGIONS; i++) {
        area_remove(&T.areas[i], KSM_REMOVE_UNMERGE);
    }
    check_all("after the regions");
    for (int i = 0; i < N_ENGINES; i++) {
        ksm_engine_free(T.engines[i]);
    }
    check_all("after the engines");
    printf("#");
    for (int i = 0; i < OP_MAX; i++) {
        printf(" %" PRIu64 " %s,", T.done[i], op_names[i]);
    }
    printf(" %" PRIu64 " removals, %" PRIu64 " remaps\n", T.removed,
           T.remapped);
    watch_report();
    printf("ok 1 memory is as it was written\n");
    return 0;
}
