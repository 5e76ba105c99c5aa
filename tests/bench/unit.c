/*
 * Bench unit: chunk by chunk or run by run, in a process with busy threads
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * CPU per page saved, by libksm (mode=engine), which chooses the unit of
 * isolation by cost, and by the obvious way (mode=runwise): every run of equal
 * pages is registered, moved out, verified and replaced on its own.  Both find
 * equal pages by one pass of hashing.  Threads write to memory of their own all
 * the while, so that whatever unmaps has to interrupt them.
 *
 * The memory is that of a guest (image=FILE; chunks of zeroes were never
 * touched, and are left out), or two equal halves with runs of run=24 pages in
 * every period=32, as guests have on average.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xxhash.h>

#include "bench.h"

#define MAX_THREADS 16
#define HOT_PAGES   8192u
#define MAX_RUN     64u     /* pages isolated at once, run by run */
#define NONE        SIZE_MAX
#define TIMEOUT_S   120.0

/* Debian 12's headers are older than UFFDIO_MOVE (Linux 6.8) */
#ifndef UFFDIO_MOVE
struct uffdio_move {
    uint64_t dst;
    uint64_t src;
    uint64_t len;
    uint64_t mode;
    int64_t move;
};
#define UFFDIO_MOVE _IOWR(UFFDIO, 0x05, struct uffdio_move)
#define UFFD_FEATURE_MOVE (1 << 16)
#endif

typedef struct Load {
    char *mem;
    size_t n;               /* pages */
    const char *image;      /* what it was filled from; NULL: made here */
    int fd;
    size_t run, period;
    char *hot;
    int threads;
    pthread_t thread[MAX_THREADS];
    int stop;               /* atomic */
} Load;

/* The reference: what became of each page. */
typedef struct Runwise {
    Load *l;
    int uffd;
    int fd;
    char *pool;
    char *staging;
    bool *present;
    bool *zero;
    size_t *first;          /* the page it is equal to, or NONE */
    size_t *slot;           /* in the pool, or NONE */
    size_t slots;
    uint64_t saved, runs;
} Runwise;

static void *writer(void *opaque)
{
    Load *l = opaque;
    uint64_t seed = 88172645463325252;

    while (!__atomic_load_n(&l->stop, __ATOMIC_RELAXED)) {
        size_t page = bench_random(&seed) % HOT_PAGES;

        __atomic_add_fetch((uint64_t *)(l->hot + page * KSM_PAGE_SIZE), 1,
                           __ATOMIC_RELAXED);
    }
    return NULL;
}

static void start_writers(Load *l)
{
    l->hot = bench_map(HOT_PAGES * KSM_PAGE_SIZE, BENCH_SMALL_PAGES);
    memset(l->hot, 0x22, HOT_PAGES * KSM_PAGE_SIZE);
    for (int t = 0; t < l->threads; t++) {
        if (pthread_create(&l->thread[t], NULL, writer, l)) {
            bench_die("cannot start a thread");
        }
    }
}

static void stop_writers(Load *l)
{
    __atomic_store_n(&l->stop, 1, __ATOMIC_RELAXED);
    for (int t = 0; t < l->threads; t++) {
        pthread_join(l->thread[t], NULL);
    }
}

/* A page as it was before anything was merged. */
static void page_content(const Load *l, size_t page, char *to)
{
    size_t half = l->n / 2;
    uint64_t number = page % l->period < l->run ? page % half + 1
                                                : page + l->n;

    if (!l->image) {
        memset(to, 0x11, KSM_PAGE_SIZE);
        memcpy(to, &number, sizeof(number));
    } else if (pread(l->fd, to, KSM_PAGE_SIZE, page * KSM_PAGE_SIZE) !=
               KSM_PAGE_SIZE) {
        bench_die("%s: %s", l->image, strerror(errno));
    }
}

static bool is_zero(const char *mem, size_t len)
{
    return !mem[0] && !memcmp(mem, mem + 1, len - 1);
}

static void prepare(Load *l, BenchPages pages)
{
    g_autofree char *chunk = g_malloc(KSM_CHUNK_SIZE);
    size_t chunk_pages = KSM_CHUNK_SIZE / KSM_PAGE_SIZE;

    if (l->image) {
        l->fd = open(l->image, O_RDONLY | O_CLOEXEC);
        l->n = l->fd < 0 ? 0 : lseek(l->fd, 0, SEEK_END) / KSM_PAGE_SIZE;
    }
    l->n = l->n / chunk_pages * chunk_pages;
    if (!l->n) {
        bench_die("%s: no memory to merge", l->image ?: "mib=0");
    }
    l->mem = bench_map(l->n * KSM_PAGE_SIZE, pages);
    for (size_t at = 0; at < l->n; at += chunk_pages) {
        for (size_t i = 0; i < chunk_pages; i++) {
            page_content(l, at + i, chunk + i * KSM_PAGE_SIZE);
        }
        if (!is_zero(chunk, KSM_CHUNK_SIZE)) {
            memcpy(l->mem + at * KSM_PAGE_SIZE, chunk, KSM_CHUNK_SIZE);
        }
    }
}

static void check(const Load *l)
{
    char page[KSM_PAGE_SIZE];

    for (size_t i = 0; i < l->n; i++) {
        page_content(l, i, page);
        if (memcmp(page, l->mem + i * KSM_PAGE_SIZE, KSM_PAGE_SIZE)) {
            bench_die("page %zu has changed", i);
        }
    }
}

/* @merge_ns: of the CPU, what did not go into finding equals. */
static void report(uint64_t saved, uint64_t isolations, uint64_t cpu_ns,
                   uint64_t merge_ns)
{
    bench_metric("saved_pages", saved);
    bench_metric("isolations", isolations);
    bench_metric("us_per_saved_page", cpu_ns / 1e3 / MAX(saved, 1));
    bench_metric("merge_us_per_saved_page", merge_ns / 1e3 / MAX(saved, 1));
}

/* A dirty log without writes: neither way pays for it. */
static bool nothing_written(void *opaque, size_t page, size_t n,
                            unsigned long *bitmap)
{
    return true;
}

/* Until a few passes bring nothing. */
static void run_engine(Load *l)
{
    static const KsmRegionOps ops = { .dirty_sync = nothing_written };
    KsmEngine *engine = bench_engine(KSM_FREE_AUTO, true);
    uint64_t saved = 0, cpu = 0, begin = bench_thread_cpu_ns();
    KsmStats stats = { 0 };

    bench_add(engine, l->mem, l->n * KSM_PAGE_SIZE, &ops, NULL);
    for (int still = 0; still < 3; still++) {
        uint64_t target = stats.full_scans + 1;

        if (!bench_rush_until(engine, bench_scanned, &target, TIMEOUT_S)) {
            bench_die("no pass in %.0f s", TIMEOUT_S);
        }
        ksm_engine_get_stats(engine, &stats);
        if (stats.pages_sharing + stats.zero_pages > saved) {
            saved = stats.pages_sharing + stats.zero_pages;
            cpu = bench_thread_cpu_ns() - begin;
            still = -1;
        }
    }
    stop_writers(l);
    report(saved, stats.stall_count, cpu, stats.merge_time);
}

static void watch(Runwise *w, char *addr, size_t len)
{
    struct uffdio_register reg = {
        .range = { (uintptr_t)addr, len },
        .mode = UFFDIO_REGISTER_MODE_MISSING,
    };

    if (ioctl(w->uffd, UFFDIO_REGISTER, &reg)) {
        bench_die("userfaultfd: %s", strerror(errno));
    }
}

static void runwise_open(Runwise *w, Load *l)
{
    struct uffdio_api api = {
        .api = UFFD_API,
        .features = UFFD_FEATURE_MOVE,
    };
    size_t len = l->n * KSM_PAGE_SIZE;

    w->l = l;
    w->fd = memfd_create("bench-runwise", MFD_CLOEXEC);
    if (w->fd < 0 || ftruncate(w->fd, len)) {
        bench_die("memfd: %s", strerror(errno));
    }
    w->pool = mmap(NULL, len, PROT_READ, MAP_SHARED, w->fd, 0);
    w->uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (w->uffd < 0 || ioctl(w->uffd, UFFDIO_API, &api)) {
        bench_die("userfaultfd: %s", strerror(errno));
    }
    w->staging = bench_map(MAX_RUN * KSM_PAGE_SIZE, BENCH_SMALL_PAGES);
    watch(w, w->staging, MAX_RUN * KSM_PAGE_SIZE);
    w->present = g_new0(bool, l->n);
    w->zero = g_new0(bool, l->n);
    w->first = g_new(size_t, l->n);
    w->slot = g_new(size_t, l->n);
    memset(w->slot, 0xff, l->n * sizeof(*w->slot));
}

static void find_present(Runwise *w)
{
    size_t n = w->l->n;
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    g_autofree uint64_t *entries = g_new(uint64_t, n);
    off_t at = (uintptr_t)w->l->mem / KSM_PAGE_SIZE * sizeof(*entries);

    if (pread(fd, entries, n * sizeof(*entries), at) !=
        (ssize_t)(n * sizeof(*entries))) {
        bench_die("pagemap: %s", strerror(errno));
    }
    for (size_t i = 0; i < n; i++) {
        w->present[i] = entries[i] >> 63;
    }
    close(fd);
}

/* Finds what is equal to what: one pass of hashing. */
static void find_equal(Runwise *w)
{
    static const char zeroes[KSM_PAGE_SIZE];
    uint64_t zero = XXH3_64bits(zeroes, KSM_PAGE_SIZE);
    g_autoptr(GHashTable) seen = g_hash_table_new(NULL, NULL);

    find_present(w);
    for (size_t i = 0; i < w->l->n; i++) {
        gpointer found;
        uint64_t h;

        w->first[i] = NONE;
        if (!w->present[i]) {
            continue;
        }
        h = XXH3_64bits(w->l->mem + i * KSM_PAGE_SIZE, KSM_PAGE_SIZE);
        if (h == zero) {
            w->zero[i] = true;
        } else if (g_hash_table_lookup_extended(seen, (gpointer)h, NULL,
                                                &found)) {
            w->first[i] = GPOINTER_TO_SIZE(found);
        } else {
            g_hash_table_insert(seen, (gpointer)h, GSIZE_TO_POINTER(i));
        }
    }
}

static size_t move(Runwise *w, char *dst, char *src, size_t len)
{
    size_t done = 0;

    while (done < len) {
        struct uffdio_move m = {
            .dst = (uintptr_t)dst + done,
            .src = (uintptr_t)src + done,
            .len = len - done,
        };

        if (!ioctl(w->uffd, UFFDIO_MOVE, &m)) {
            return len;
        }
        done += MAX(m.move, 0);
        if (errno != EAGAIN) {
            break;
        }
    }
    return done;
}

static void release(Runwise *w, char *addr, size_t len)
{
    struct uffdio_range range = { (uintptr_t)addr, len };

    ioctl(w->uffd, UFFDIO_UNREGISTER, &range);
    ioctl(w->uffd, UFFDIO_WAKE, &range);
}

/* Moves a run out; false: it could not be, and is as it was. */
static bool isolate(Runwise *w, char *addr, size_t len)
{
    size_t moved;

    watch(w, addr, len);
    moved = move(w, w->staging, addr, len);
    if (moved == len) {
        return true;
    }
    if (moved && move(w, addr, w->staging, moved) != moved) {
        bench_die("pages could not be put back: %s", strerror(errno));
    }
    release(w, addr, len);
    return false;
}

static void drop_zeroes(Runwise *w, size_t page, size_t n)
{
    char *addr = w->l->mem + page * KSM_PAGE_SIZE;
    size_t len = n * KSM_PAGE_SIZE;

    if (isolate(w, addr, len)) {
        if (!is_zero(w->staging, len)) {
            bench_die("a page of zeroes has changed");
        }
        release(w, addr, len);
        madvise(w->staging, len, MADV_DONTNEED);
        w->saved += n;
        w->runs++;
    }
}

/* Replaces a run by slots, which it fills or equals. */
static void map_slots(Runwise *w, size_t page, size_t n, size_t slot,
                      bool fills)
{
    char *addr = w->l->mem + page * KSM_PAGE_SIZE;
    size_t len = n * KSM_PAGE_SIZE;
    off_t offset = slot * KSM_PAGE_SIZE;

    if (!isolate(w, addr, len)) {
        return;
    }
    if (fills ? pwrite(w->fd, w->staging, len, offset) != (ssize_t)len
              : memcmp(w->staging, w->pool + offset, len)) {
        bench_die("a run of equal pages has changed");
    }
    if (mmap(addr, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
             w->fd, offset) == MAP_FAILED) {
        bench_die("mmap: %s", strerror(errno));
    }
    release(w, addr, len);
    madvise(addr, len, MADV_POPULATE_READ);
    madvise(w->staging, len, MADV_DONTNEED);
    for (size_t i = 0; i < n; i++) {
        w->slot[page + i] = slot + i;
    }
    w->saved += fills ? 0 : n;
    w->runs++;
}

/* Is page + n in the run that begins with page? */
static bool in_run(const Runwise *w, size_t page, size_t n)
{
    size_t next = page + n, first = w->first[page];

    if (n >= MAX_RUN || next >= w->l->n) {
        return false;
    }
    if (w->zero[page] || first == NONE) {
        return w->zero[page] && w->zero[next];
    }
    if (w->first[next] != first + n || first + n >= page) {
        return false;
    }
    return w->slot[first] == NONE ? w->slot[first + n] == NONE
                                  : w->slot[first + n] == w->slot[first] + n;
}

static void run_runwise(Load *l)
{
    Runwise w = { 0 };
    uint64_t cpu, hashed;
    size_t n;

    runwise_open(&w, l);
    cpu = bench_thread_cpu_ns();
    find_equal(&w);
    hashed = bench_thread_cpu_ns() - cpu;
    for (size_t page = 0; page < l->n; page += n) {
        size_t first = w.first[page];

        n = 1;
        while (in_run(&w, page, n)) {
            n++;
        }
        if (w.zero[page]) {
            drop_zeroes(&w, page, n);
        } else if (first != NONE) {
            if (w.slot[first] == NONE) {
                map_slots(&w, first, n, w.slots, true);
                w.slots += n;
            }
            if (w.slot[first] != NONE) {
                map_slots(&w, page, n, w.slot[first], false);
            }
        }
    }
    cpu = bench_thread_cpu_ns() - cpu;
    stop_writers(l);
    report(w.saved, w.runs, cpu, cpu - hashed);
    close(w.uffd);
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    Load l = {
        .n = bench_arg(&b, "mib", 512) << 8,
        .image = bench_arg_str(&b, "image", NULL),
        .threads = MIN(bench_arg(&b, "threads", 1), MAX_THREADS),
        .run = bench_arg(&b, "run", 24),
        .period = bench_arg(&b, "period", 32),
    };

    prepare(&l, bench_arg(&b, "huge", 0) ? BENCH_HUGE_PAGES
                                         : BENCH_SMALL_PAGES);
    start_writers(&l);
    if (!strcmp(bench_arg_str(&b, "mode", "engine"), "engine")) {
        run_engine(&l);
    } else {
        run_runwise(&l);
    }
    check(&l);
    return 0;
}
