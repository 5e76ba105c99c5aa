/*
 * libksm: tests against the system
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What only a real kernel can show: pages that a device has pinned or refers
 * to, physical pages, pages that move, limits of memory and of mappings,
 * attributes, leaks.  Each skip names what is missing.  Rooms one by one
 * (test-*.c), failing calls (fault injection) and races (test-prop.c) are not
 * tested here.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef HAVE_LIBURING
#include <liburing.h>
#endif

#include "base/prim.h"
#include "libksm.h"
#include "slow-file.h"
#include "slower.h"

#define PAGE KSM_PAGE_SIZE
#define CHUNK KSM_CHUNK_SIZE

static char *map_memory(size_t len)
{
    char *p = mmap(NULL, len + CHUNK, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    size_t skip = -(uintptr_t)p % CHUNK;

    g_assert(p != MAP_FAILED);
    /* munmap() of @len leaves nothing behind */
    if (skip) {
        munmap(p, skip);
    }
    munmap(p + skip + len, CHUNK - skip);
    madvise(p + skip, len, MADV_NOHUGEPAGE);
    return p + skip;
}

/* The same content for the same number only. */
static void fill_page(char *page, uint64_t number)
{
    memset(page, 0x40 + number % 16, PAGE);
    ((uint64_t *)page)[PAGE / 8 - 1] = number;
}

static bool page_is(const char *page, uint64_t number)
{
    char expected[PAGE];

    fill_page(expected, number);
    return !memcmp(page, expected, PAGE);
}

static void fill(char *mem, size_t pages)
{
    for (size_t i = 0; i < pages; i++) {
        fill_page(mem + i * PAGE, i);
    }
}

static void check(const char *mem, size_t pages)
{
    for (size_t i = 0; i < pages; i++) {
        if (!page_is(mem + i * PAGE, i)) {
            g_error("page %zu of %p has changed", i, mem);
        }
    }
}

/* No two contents of a test may collide in the 32 bits of the index. */
static uint64_t seed_fixed(void)
{
    return UINT64_C(0x6b736d);
}

static KsmEngine *new_engine(void)
{
    g_autoptr(GError) error = NULL;
    KsmConfig config;
    KsmEngine *engine;

    ksm_config_init(&config);
    config.max_cpu = 100;
    prim.random = seed_fixed;
    engine = ksm_engine_new(&config, &error);
    g_assert(engine);
    return engine;
}

static KsmRegion *add(KsmEngine *engine, char *mem, size_t len,
                      const KsmRegionOps *ops, void *opaque)
{
    g_autoptr(GError) error = NULL;
    KsmRegion *region = ksm_region_add(engine, mem, len, -1, ops, opaque,
                                       &error);

    g_assert(region);
    return region;
}

/* Until @sharing pages are saved, for 60 s at most. */
static uint64_t step_until(KsmEngine *engine, uint64_t sharing)
{
    gint64 end = g_get_monotonic_time() + 60 * G_USEC_PER_SEC;
    KsmStats stats;

    do {
        int64_t wait = ksm_step(engine, 0);

        ksm_engine_get_stats(engine, &stats);
        if (wait) {
            g_usleep(wait < 0 ? 1000 : MIN(wait / 1000, 20000));
        }
    } while (stats.pages_sharing < sharing && g_get_monotonic_time() < end);
    for (int i = 0; stats.pages_sharing < sharing && i < KSM_REASON_MAX; i++) {
        if (stats.reasons[i]) {
            g_test_message("%" PRIu64 " pages: %s", stats.reasons[i],
                           ksm_reason_name(i));
        }
    }
    return stats.pages_sharing;
}

/* For @passes whole passes or 60 s. */
static KsmStats step_passes(KsmEngine *engine, int passes)
{
    gint64 end = g_get_monotonic_time() + 60 * G_USEC_PER_SEC;
    KsmStats stats;
    uint64_t target;

    ksm_engine_get_stats(engine, &stats);
    target = stats.full_scans + passes;
    do {
        int64_t wait = ksm_step(engine, 0);

        ksm_engine_get_stats(engine, &stats);
        if (wait) {
            g_usleep(wait < 0 ? 1000 : MIN(wait / 1000, 20000));
        }
    } while (stats.full_scans < target && g_get_monotonic_time() < end);
    return stats;
}

/* The same, without the rests (seconds) after passes that gained nothing. */
static KsmStats step_wakeful(KsmEngine *engine, int passes)
{
    KsmStats stats;

    for (int i = 0; i < passes; i++) {
        ksm_rescan(engine);
        stats = step_passes(engine, 1);
    }
    return stats;
}

/* Two equal areas of a page's number of pages in one engine. */
typedef struct Pair {
    KsmEngine *engine;
    KsmRegion *regions[2];
    char *mem[2];
    size_t n;
} Pair;

static void pair_init(Pair *p, size_t pages, const KsmRegionOps *ops,
                      void *opaque)
{
    p->n = pages;
    p->engine = new_engine();
    for (int i = 0; i < 2; i++) {
        p->mem[i] = map_memory(pages * PAGE);
        fill(p->mem[i], pages);
        p->regions[i] = add(p->engine, p->mem[i], pages * PAGE, ops, opaque);
    }
}

static void pair_clear(Pair *p)
{
    for (int i = 0; i < 2; i++) {
        g_assert(ksm_region_remove(p->regions[i], KSM_REMOVE_UNMERGE) == 0);
    }
    ksm_engine_free(p->engine);
    for (int i = 0; i < 2; i++) {
        munmap(p->mem[i], p->n * PAGE);
    }
}

/* The page frame at an address; 0: not told to us. */
static uint64_t pfn_of(const char *addr)
{
    uint64_t entry = 0;
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);

    /* present, or there is nothing to read */
    (void)__atomic_load_n(addr, __ATOMIC_RELAXED);
    if (fd >= 0) {
        if (pread(fd, &entry, 8, (uintptr_t)addr / PAGE * 8) != 8) {
            entry = 0;
        }
        close(fd);
    }
    return entry >> 63 ? entry & ((UINT64_C(1) << 55) - 1) : 0;
}

static void test_same_page(void)
{
    Pair p;

    pair_init(&p, 1024, NULL, NULL);
    if (!pfn_of(p.mem[0])) {
        pair_clear(&p);
        g_test_skip("/proc/self/pagemap hides page numbers "
                    "(CAP_SYS_ADMIN is missing)");
        return;
    }
    for (size_t i = 0; i < p.n; i++) {
        g_assert(pfn_of(p.mem[0] + i * PAGE) != pfn_of(p.mem[1] + i * PAGE));
    }
    g_assert(step_until(p.engine, p.n) >= p.n);
    for (size_t i = 0; i < p.n; i++) {
        uint64_t pfn = pfn_of(p.mem[0] + i * PAGE);

        g_assert(pfn && pfn == pfn_of(p.mem[1] + i * PAGE));
    }
    for (size_t i = 0; i < p.n; i += 7) {
        p.mem[1][i * PAGE] = 1;
        g_assert(pfn_of(p.mem[0] + i * PAGE) != pfn_of(p.mem[1] + i * PAGE));
        g_assert(p.mem[0][i * PAGE] == 0x40 + (char)(i % 16));
        p.mem[1][i * PAGE] = 0x40 + i % 16;
    }
    check(p.mem[0], p.n);
    check(p.mem[1], p.n);
    pair_clear(&p);
}

#ifdef HAVE_LIBURING
/* A read into a pinned buffer is in flight while memory is merged. */
static void test_pinned(void)
{
    enum { FIRST = 600, COUNT = 16 };
    struct io_uring ring;
    struct io_uring_sqe *sqe;
    struct io_uring_cqe *cqe;
    struct iovec iov;
    char data[COUNT * PAGE];
    uint64_t pfns[COUNT];
    int fds[2], result;
    KsmStats stats;
    Pair p;

    result = io_uring_queue_init(4, &ring, 0);
    if (result) {
        g_test_skip("io_uring cannot be used (kernel.io_uring_disabled?)");
        return;
    }
    pair_init(&p, 1024, NULL, NULL);
    iov.iov_base = p.mem[1] + FIRST * PAGE;
    iov.iov_len = COUNT * PAGE;
    g_assert(io_uring_register_buffers(&ring, &iov, 1) == 0);
    g_assert(pipe2(fds, O_CLOEXEC) == 0);
    sqe = io_uring_get_sqe(&ring);
    io_uring_prep_read_fixed(sqe, fds[0], iov.iov_base, PAGE, 0, 0);
    g_assert(io_uring_submit(&ring) == 1);
    for (int i = 0; i < COUNT; i++) {
        pfns[i] = pfn_of(p.mem[1] + (FIRST + i) * PAGE);
    }

    /* all but what is pinned may be merged */
    step_until(p.engine, p.n - 512);
    stats = step_passes(p.engine, 3);
    g_assert(stats.pinned > 0);
    g_assert(stats.pages_sharing >= 512 && stats.pages_sharing < p.n);
    for (int i = 0; i < COUNT; i++) {
        g_assert(pfns[i] == pfn_of(p.mem[1] + (FIRST + i) * PAGE));
    }
    check(p.mem[0], p.n);
    check(p.mem[1], p.n);

    memset(data, 0x99, PAGE);
    g_assert(write(fds[1], data, PAGE) == PAGE);
    g_assert(io_uring_wait_cqe(&ring, &cqe) == 0);
    g_assert(cqe->res == PAGE);
    io_uring_cqe_seen(&ring, cqe);
    g_assert(!memcmp(p.mem[1] + FIRST * PAGE, data, PAGE));
    g_assert(page_is(p.mem[0] + FIRST * PAGE, FIRST));

    /* released pages are merged like any */
    io_uring_queue_exit(&ring);
    fill_page(p.mem[1] + FIRST * PAGE, FIRST);
    ksm_rescan(p.engine);
    g_assert(step_until(p.engine, p.n) >= p.n);
    check(p.mem[1], p.n);
    close(fds[0]);
    close(fds[1]);
    pair_clear(&p);
}
#else
static void test_pinned(void)
{
    g_test_skip("built without liburing (package liburing-dev)");
}
#endif

/* An owner counts mappings in use past the page tables. */
static bool busy_flag(void *opaque, void *addr, size_t len)
{
    return __atomic_load_n((int *)opaque, __ATOMIC_ACQUIRE);
}

static const KsmRegionOps busy_ops = { .busy = busy_flag };

#ifdef HAVE_LIBURING
/* A device comes while a range is unmerged. */
static struct {
    struct io_uring ring;
    struct iovec iov;
    int counted;
    bool pinned;
} late;

/* The last moment to pin a page: writers are not blocked yet. */
static int late_protect(const UffdRange *range, bool on)
{
    char *from = range->addr, *at = late.iov.iov_base;

    if (on && !late.pinned && at >= from && at < from + range->len) {
        late.pinned = true;
        __atomic_store_n(&late.counted, 1, __ATOMIC_SEQ_CST);
        g_assert(io_uring_register_buffers(&late.ring, &late.iov, 1) == 0);
    }
    return prim_real.uffd_protect(range, on);
}

/* A merged page was written; it is pinned after unmerging has begun. */
static void test_pinned_late(void)
{
    enum { AT = 300 };
    struct io_uring_sqe *sqe;
    struct io_uring_cqe *cqe;
    char data[PAGE];
    int fds[2];
    char *page;
    Pair p;

    if (io_uring_queue_init(4, &late.ring, 0)) {
        g_test_skip("io_uring cannot be used (kernel.io_uring_disabled?)");
        return;
    }
    pair_init(&p, 1024, &busy_ops, &late.counted);
    g_assert(step_until(p.engine, p.n) >= p.n);
    page = p.mem[1] + AT * PAGE;
    page[7] = 1;
    late.iov = (struct iovec) { page, PAGE };
    prim.uffd_protect = late_protect;
    g_assert(ksm_unmerge(p.regions[1], 0, p.n * PAGE) == -EBUSY);
    prim.uffd_protect = prim_real.uffd_protect;
    g_assert(late.pinned && page[7] == 1);

    /* the program sees what the device writes */
    memset(data, 0x99, PAGE);
    g_assert(pipe2(fds, O_CLOEXEC) == 0);
    sqe = io_uring_get_sqe(&late.ring);
    io_uring_prep_read_fixed(sqe, fds[0], page, PAGE, 0, 0);
    g_assert(io_uring_submit(&late.ring) == 1);
    g_assert(write(fds[1], data, PAGE) == PAGE);
    g_assert(io_uring_wait_cqe(&late.ring, &cqe) == 0);
    g_assert(cqe->res == PAGE);
    io_uring_cqe_seen(&late.ring, cqe);
    g_assert(!memcmp(page, data, PAGE));

    io_uring_queue_exit(&late.ring);
    __atomic_store_n(&late.counted, 0, __ATOMIC_SEQ_CST);
    fill_page(page, AT);
    g_assert(ksm_unmerge(p.regions[1], 0, p.n * PAGE) == 0);
    check(p.mem[0], p.n);
    check(p.mem[1], p.n);
    close(fds[0]);
    close(fds[1]);
    pair_clear(&p);
}
#else
static void test_pinned_late(void)
{
    g_test_skip("built without liburing (package liburing-dev)");
}
#endif

/* What a plain reference shows of a write after @n pages were to be merged. */
static char plain_reference(bool with_op, size_t n)
{
    size_t at = n / 5;
    int busy = 1, fds[2];
    char seen[PAGE];
    struct iovec iov;
    KsmStats stats;
    Pair p;

    pair_init(&p, n, with_op ? &busy_ops : NULL, &busy);
    g_assert(pipe2(fds, O_CLOEXEC) == 0);
    iov.iov_base = p.mem[1] + at * PAGE;
    iov.iov_len = PAGE;
    /* get_user_pages(): a reference that is no pin */
    g_assert(vmsplice(fds[1], &iov, 1, 0) == PAGE);
    if (with_op) {
        stats = step_passes(p.engine, 3);
        g_assert(stats.pages_sharing == 0 && stats.busy > 0);
    } else {
        g_assert(step_until(p.engine, p.n) >= p.n);
    }
    p.mem[1][at * PAGE] = 0x77;
    g_assert(read(fds[0], seen, PAGE) == PAGE);
    fill_page(p.mem[1] + at * PAGE, at);
    busy = 0;
    /* merged once nobody is busy; a page written since may stay out */
    ksm_rescan(p.engine);
    g_assert(step_until(p.engine, p.n - 1) >= p.n - 1);
    check(p.mem[0], p.n);
    check(p.mem[1], p.n);
    close(fds[0]);
    close(fds[1]);
    pair_clear(&p);
    return seen[0];
}

static void test_plain_reference(void)
{
    /* without the op the holder keeps a page of its own ... */
    g_assert(plain_reference(false, 512) == 0x40 + 102 % 16);
    /* ... with it both see the same page, however few were isolated */
    g_assert(plain_reference(true, 512) == 0x77);
    g_assert(plain_reference(true, 4) == 0x77);
}

typedef struct Reader {
    pthread_t thread;
    int file;
    char *to;
    ssize_t got;
} Reader;

static void *read_slowly(void *opaque)
{
    Reader *r = opaque;

    r->got = pread(r->file, r->to, PAGE, 0);
    return NULL;
}

/*
 * Direct I/O on FUSE is in flight while the engine merges.  Kernels before 6.12
 * or so hold plain references there, later ones pin: without the op, plain
 * references lose the data; with it, it arrives.
 */
static bool direct_io_arrives(bool with_op)
{
    SlowFile f = { 0 };
    int busy = 0;
    Reader r = { 0 };
    KsmStats stats;
    bool arrived;
    Pair p;

    g_assert(!slow_file_open(&f, PAGE));
    slow_file_hold(&f);
    pair_init(&p, 512, with_op ? &busy_ops : NULL, &busy);
    r.file = f.file;
    r.to = p.mem[1] + 100 * PAGE;
    __atomic_store_n(&busy, 1, __ATOMIC_RELEASE);
    g_assert(!pthread_create(&r.thread, NULL, read_slowly, &r));
    slow_file_wait(&f);
    stats = step_passes(p.engine, 6);
    if (with_op) {
        g_assert(stats.pages_sharing == 0);
    }
    slow_file_release(&f);
    pthread_join(r.thread, NULL);
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
    g_assert(r.got == PAGE);
    arrived = r.to[0] == (char)SLOW_FILE_BYTE &&
              !memcmp(r.to, r.to + 1, PAGE - 1);
    if (!arrived) {
        /* either the old data or the new */
        g_assert(page_is(r.to, 100));
    }
    g_test_message("direct I/O on FUSE %s the op: %s, %s; %" G_GUINT64_FORMAT
                   " of %zu pages merged", with_op ? "with" : "without",
                   stats.pinned ? "pinned" : "not pinned", arrived ?
                   "data arrived" : "data lost", stats.pages_sharing, p.n);
    g_assert(arrived || !stats.pinned);
    fill_page(r.to, 100);
    check(p.mem[0], p.n);
    check(p.mem[1], p.n);
    pair_clear(&p);
    slow_file_close(&f);
    return arrived;
}

static void test_direct_io(void)
{
    SlowFile f = { 0 };
    const char *why = slow_file_open(&f, PAGE);

    if (why) {
        g_test_skip(why);
        return;
    }
    slow_file_close(&f);
    direct_io_arrives(false);
    g_assert(direct_io_arrives(true));
}

static size_t count_lines(const char *file)
{
    FILE *f = fopen(file, "r");
    size_t n = 0;
    int c;

    g_assert(f);
    while ((c = getc(f)) != EOF) {
        n += c == '\n';
    }
    fclose(f);
    return n;
}

static size_t max_map_count(void)
{
    g_autofree char *text = NULL;

    if (!g_file_get_contents("/proc/sys/vm/max_map_count", &text, NULL,
                             NULL)) {
        return 65530;
    }
    return g_ascii_strtoull(text, NULL, 10);
}

/* Runs of single pages: each needs a mapping. */
static void fill_scattered(char *mem, size_t pages, size_t stride)
{
    for (size_t i = 0; i < pages; i++) {
        fill_page(mem + i * PAGE, i * stride % pages);
    }
}

static void check_scattered(const char *mem, size_t pages, size_t stride)
{
    for (size_t i = 0; i < pages; i++) {
        g_assert(page_is(mem + i * PAGE, i * stride % pages));
    }
}

/* Maps @n pages, each a mapping of its own. */
static char *eat_mappings(size_t n)
{
    char *p = mmap(NULL, n * PAGE, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    g_assert(p != MAP_FAILED);
    for (size_t i = 0; i < n; i += 2) {
        if (mprotect(p + i * PAGE, PAGE, PROT_READ)) {
            g_assert(errno == ENOMEM);
            break;
        }
    }
    return p;
}

/* The thread sanitizer dies without memory of its own. */
static bool skip_for_tsan(void)
{
#ifdef __SANITIZE_THREAD__
    g_test_skip("the thread sanitizer cannot run out of memory or mappings");
    return true;
#else
    return false;
#endif
}

static void test_mapping_limit(void)
{
    enum { PAGES = 4096, STRIDE = 1567 };
    size_t limit = max_map_count();
    size_t used = count_lines("/proc/self/maps");
    size_t eaten;
    KsmStats stats;
    char *eat;
    Pair p;

    if (skip_for_tsan()) {
        return;
    }
    if (limit > 1000000) {
        g_test_skip("vm.max_map_count is too high to be reached");
        return;
    }
    pair_init(&p, PAGES, NULL, NULL);
    fill_scattered(p.mem[1], PAGES, STRIDE);
    /* 1000 are left, far less than must be left to the program */
    eaten = limit - used - 1000;
    eat = eat_mappings(eaten);
    stats = step_passes(p.engine, 6);
    g_assert(stats.pages_sharing < PAGES);
    g_assert(stats.reasons[KSM_REASON_VMA_LIMIT] > 0);
    /* the program still gets its own */
    g_assert(count_lines("/proc/self/maps") < limit - 500);
    check(p.mem[0], PAGES);
    check_scattered(p.mem[1], PAGES, STRIDE);
    /* merged memory can be unmerged all the same */
    g_assert(ksm_unmerge(p.regions[1], 0, PAGES * PAGE) == 0);
    check_scattered(p.mem[1], PAGES, STRIDE);

    /* with room again, merging goes on */
    munmap(eat, eaten * PAGE);
    ksm_rescan(p.engine);
    stats = step_passes(p.engine, 6);
    for (int i = 0; i < KSM_REASON_MAX; i++) {
        g_test_message("%s: %" G_GUINT64_FORMAT, ksm_reason_name(i),
                       stats.reasons[i]);
    }
    g_assert(stats.reasons[KSM_REASON_VMA_LIMIT] == 0);
    check(p.mem[0], PAGES);
    check_scattered(p.mem[1], PAGES, STRIDE);
    pair_clear(&p);
}

static uint64_t paused_us;

static void pause_counted(unsigned us)
{
    paused_us += us;
    prim_real.pause(us);
}

/*
 * The limit is reached during a merge: nothing is lost, and nobody waits for
 * mappings.
 */
static void test_mapping_limit_hit(void)
{
    enum { PAGES = 2048, STRIDE = 789 };
    size_t limit = max_map_count();
    g_autoptr(GError) error = NULL;
    KsmConfig config;
    size_t eaten;
    char *eat;
    Pair p;

    if (skip_for_tsan()) {
        return;
    }
    if (limit > 1000000) {
        g_test_skip("vm.max_map_count is too high to be reached");
        return;
    }
    pair_init(&p, PAGES, NULL, NULL);
    fill_scattered(p.mem[1], PAGES, STRIDE);
    prim.pause = pause_counted;
    /* in each step, as if the program took them behind our back */
    ksm_config_init(&config);
    for (int left = 40; left < 400; left += 60) {
        eaten = limit - count_lines("/proc/self/maps") - left;
        eat = eat_mappings(eaten);
        for (int i = 0; i < 50; i++) {
            ksm_step(p.engine, 0);
        }
        check(p.mem[0], PAGES);
        check_scattered(p.mem[1], PAGES, STRIDE);
        munmap(eat, eaten * PAGE);
        for (int i = 0; i < 3; i++) {
            ksm_step(p.engine, 2000000);
        }
    }
    check(p.mem[0], PAGES);
    check_scattered(p.mem[1], PAGES, STRIDE);
    prim.pause = prim_real.pause;
    g_assert(paused_us < 1000000);
    pair_clear(&p);
}

/* A memory cgroup of our own, version 1 or 2; NULL: none can be made. */
static char *make_cgroup(const char **limit_file)
{
    g_autofree char *own = NULL;
    g_autofree char *root = NULL;
    char *dir;

    if (!access("/sys/fs/cgroup/memory/memory.limit_in_bytes", F_OK)) {
        root = g_strdup("/sys/fs/cgroup/memory");
        *limit_file = "memory.limit_in_bytes";
    } else {
        root = g_strdup("/sys/fs/cgroup");
        *limit_file = "memory.max";
    }
    if (g_file_get_contents("/proc/self/cgroup", &own, NULL, NULL)) {
        const char *at = strstr(own, ":memory:/");
        const char *end;

        at = at ? at + strlen(":memory:/") : strstr(own, "0::/");
        at = at && g_str_has_prefix(at, "0::/") ? at + 4 : at;
        end = at ? strchrnul(at, '\n') : NULL;
        if (at && end > at && strstr(own, ":memory:/")) {
            char *deeper = g_strdup_printf("%s/%.*s", root, (int)(end - at),
                                           at);

            g_free(root);
            root = deeper;
        }
    }
    dir = g_strdup_printf("%s/libksm-test-%d", root, getpid());
    if (!mkdir(dir, 0755)) {
        g_autofree char *file = g_build_filename(dir, *limit_file, NULL);

        if (!access(file, W_OK)) {
            return dir;
        }
        rmdir(dir);
    }
    g_free(dir);
    return NULL;
}

static void write_file(const char *dir, const char *name, size_t value)
{
    g_autofree char *path = g_build_filename(dir, name, NULL);
    FILE *f = fopen(path, "w");

    g_assert(f && fprintf(f, "%zu", value) > 0 && !fclose(f));
}

static size_t usage(const char *dir, const char *limit_file)
{
    bool v1 = !strcmp(limit_file, "memory.limit_in_bytes");
    g_autofree char *path = g_build_filename(dir, v1 ? "memory.usage_in_bytes"
                                                     : "memory.current", NULL);
    g_autofree char *text = NULL;

    g_assert(g_file_get_contents(path, &text, NULL, NULL));
    return g_ascii_strtoull(text, NULL, 10);
}

/*
 * In the limited process: without room for copies nothing is merged, with a
 * little all is.
 */
static void merge_limited(const char *cgroup, const char *group,
                          const char *limit_file)
{
    enum { PAGES = 8192, MIB = 1024 * 1024 };
    KsmStats stats;
    Pair p;

    write_file(group, "cgroup.procs", getpid());
    pair_init(&p, PAGES, NULL, NULL);
    write_file(cgroup, limit_file, usage(cgroup, limit_file) + 2 * MIB);
    stats = step_wakeful(p.engine, 6);
    g_assert(stats.pages_sharing == 0);
    g_assert(stats.reasons[KSM_REASON_NO_MEMORY] >= PAGES);

    /* two areas of 32 MiB, with the pool inside, and 24 MiB for the rest */
    write_file(cgroup, limit_file, (64 + 24) * MIB);
    stats = step_wakeful(p.engine, 12);
    g_assert(stats.pages_sharing >= PAGES / 2);
    check(p.mem[0], PAGES);
    check(p.mem[1], PAGES);
    /* unmerging one area needs what merging gave back */
    g_assert(ksm_unmerge(p.regions[1], 0, PAGES * PAGE) == 0);
    check(p.mem[1], PAGES);
    _exit(0);
}

/* The kernel is slow to notice that the group is empty. */
static void remove_cgroup(const char *dir)
{
    for (int i = 0; i < 100 && rmdir(dir); i++) {
        g_usleep(20000);
    }
}

static void test_memory_limit(gconstpointer data)
{
    const char *limit_file, *below = data;
    g_autofree char *cgroup = make_cgroup(&limit_file);
    g_autofree char *group = NULL;
    int status = -1;
    pid_t pid;

    if (skip_for_tsan()) {
        return;
    }
    if (!cgroup) {
        g_test_skip("no memory cgroup can be made (needs root and the memory "
                    "controller)");
        return;
    }
    group = g_build_filename(cgroup, below, NULL);
    g_assert(!below || !mkdir(group, 0755));
    pid = fork();
    if (pid == 0) {
        merge_limited(cgroup, group, limit_file);
    }
    g_assert(pid > 0 && waitpid(pid, &status, 0) == pid);
    if (below) {
        remove_cgroup(group);
    }
    remove_cgroup(cgroup);
    g_assert(status == 0);
}

/* All mappings of the range have the flag (as in smaps). */
static void check_flag(const char *mem, size_t len, const char *flag)
{
    FILE *f = fopen("/proc/self/smaps", "r");
    unsigned long start, end;
    bool inside = false;
    char line[512];
    size_t seen = 0;

    g_assert(f);
    while (fgets(line, sizeof(line), f)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) {
            inside = start < (uintptr_t)mem + len && end > (uintptr_t)mem;
        } else if (inside && g_str_has_prefix(line, "VmFlags:")) {
            g_assert(strstr(line, flag));
            seen++;
        }
    }
    fclose(f);
    g_assert(seen > 1);
}

static void test_attributes(void)
{
    enum { PAGES = 1024 };
    KsmEngine *engine = new_engine();
    char *mem = map_memory(2 * PAGES * PAGE);
    KsmRegion *region;

    fill(mem, PAGES);
    fill(mem + PAGES * PAGE, PAGES);
    g_assert(!madvise(mem, 2 * PAGES * PAGE, MADV_DONTDUMP));
    g_assert(!madvise(mem, 2 * PAGES * PAGE, MADV_DONTFORK));
    region = add(engine, mem, 2 * PAGES * PAGE, NULL, NULL);
    g_assert(step_until(engine, PAGES) >= PAGES);
    check_flag(mem, 2 * PAGES * PAGE, " dd");
    check_flag(mem, 2 * PAGES * PAGE, " dc");
    g_assert(ksm_discard(region, 10 * PAGE, 20 * PAGE) == 0);
    g_assert(ksm_unmerge(region, 100 * PAGE, 300 * PAGE) == 0);
    check_flag(mem, 2 * PAGES * PAGE, " dd");
    check_flag(mem, 2 * PAGES * PAGE, " dc");
    g_assert(ksm_region_remove(region, KSM_REMOVE_UNMERGE) == 0);
    ksm_engine_free(engine);
    munmap(mem, 2 * PAGES * PAGE);
}

/* Looks at its memory until the pipe ends. */
static void child_watches(const char *mem, size_t pages, const int go[2])
{
    ssize_t n;
    char c;

    close(go[1]);
    g_assert(!fcntl(go[0], F_SETFL, O_NONBLOCK));
    do {
        for (size_t i = 0; i < pages; i++) {
            if (!page_is(mem + i * PAGE, i % (pages / 2))) {
                _exit(1);
            }
        }
        n = read(go[0], &c, 1);
    } while (n < 0);
    _exit(0);
}

static void *compact(void *opaque)
{
    int *stop = opaque;
    int fd = open("/proc/sys/vm/compact_memory", O_WRONLY);

    while (fd >= 0 && !g_atomic_int_get(stop)) {
        if (write(fd, "1", 1) != 1) {
            break;
        }
    }
    if (fd >= 0) {
        close(fd);
    }
    return NULL;
}

/*
 * A child sees what it had at the fork, though slots are reused and the kernel
 * moves pages about; then they are given back.
 */
static void test_fork(void)
{
    enum { PAGES = 1024 };
    KsmEngine *engine = new_engine();
    char *mem = map_memory(2 * PAGES * PAGE);
    KsmRegion *region;
    int go[2], status, stop = 0;
    pthread_t thread;
    pid_t pid;

    fill(mem, PAGES);
    fill(mem + PAGES * PAGE, PAGES);
    region = add(engine, mem, 2 * PAGES * PAGE, NULL, NULL);
    g_assert(step_until(engine, PAGES) >= PAGES);
    g_assert(!pipe(go));
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        child_watches(mem, 2 * PAGES, go);
    }
    g_assert(pid > 0);
    close(go[0]);
    g_assert(!pthread_create(&thread, NULL, compact, &stop));
    for (unsigned round = 1; round < 6; round++) {
        for (size_t i = 0; i < 2 * PAGES; i++) {
            fill_page(mem + i * PAGE, i % PAGES + round * 10000);
        }
        ksm_rescan(engine);
        step_passes(engine, 3);
        g_assert(waitpid(pid, &status, WNOHANG) == 0);
    }
    g_atomic_int_set(&stop, 1);
    pthread_join(thread, NULL);
    close(go[1]);
    g_assert(waitpid(pid, &status, 0) == pid && status == 0);
    for (size_t i = 0; i < 2 * PAGES; i++) {
        g_assert(page_is(mem + i * PAGE, i % PAGES + 5 * 10000));
    }
    g_assert(ksm_region_remove(region, KSM_REMOVE_UNMERGE) == 0);
    ksm_engine_free(engine);
    munmap(mem, 2 * PAGES * PAGE);
}

/*
 * A huge page of which a child's end leaves us a part: the kernel looks at its
 * first page, which is gone, and does not move the others.
 */
static void test_fork_part(void)
{
    enum { PAGES = 512, COPIED = 100 };
    KsmEngine *engine = new_engine();
    char *mem = map_memory(2 * PAGES * PAGE);
    KsmRegion *region;
    int go[2], status;
    char c = 0;
    pid_t pid;

    g_assert(!madvise(mem, 2 * PAGES * PAGE, MADV_HUGEPAGE));
    fill(mem, PAGES);
    fill(mem + PAGES * PAGE, PAGES);
    g_assert(!pipe(go));
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        close(go[1]);
        _exit(read(go[0], &c, 1));
    }
    g_assert(pid > 0);
    close(go[0]);
    fill(mem, COPIED);
    close(go[1]);
    g_assert(waitpid(pid, &status, 0) == pid && status == 0);
    fill(mem, PAGES);
    fill(mem + PAGES * PAGE, PAGES);
    region = add(engine, mem, 2 * PAGES * PAGE, NULL, NULL);
    g_assert(step_until(engine, PAGES) == PAGES);
    check(mem, PAGES);
    check(mem + PAGES * PAGE, PAGES);
    g_assert(ksm_region_remove(region, KSM_REMOVE_UNMERGE) == 0);
    ksm_engine_free(engine);
    munmap(mem, 2 * PAGES * PAGE);
}

static size_t count_fds(void)
{
    g_autoptr(GDir) dir = g_dir_open("/proc/self/fd", 0, NULL);
    size_t n = 0;

    while (dir && g_dir_read_name(dir)) {
        n++;
    }
    return n;
}

/* Bytes of this process alone, and of shared memory it maps. */
static size_t resident(void)
{
    FILE *f = fopen("/proc/self/statm", "r");
    size_t size, pages;

    g_assert(f && fscanf(f, "%zu %zu", &size, &pages) == 2);
    fclose(f);
    return pages * PAGE;
}

/* The address sanitizer, in quarantine; it sees leaks by itself. */
static bool keeps_freed_memory(void)
{
#ifdef __SANITIZE_ADDRESS__
    return true;
#else
    return false;
#endif
}

static void one_life(KsmRemove how)
{
    Pair p;

    pair_init(&p, 2048, NULL, NULL);
    g_assert(step_until(p.engine, p.n) >= p.n);
    ksm_discard(p.regions[0], 0, 100 * PAGE);
    ksm_free_hint(p.regions[0], 200 * PAGE, 100 * PAGE);
    ksm_unmerge(p.regions[1], 300 * PAGE, 100 * PAGE);
    step_passes(p.engine, 1);
    for (int i = 0; i < 2; i++) {
        g_assert(ksm_region_remove(p.regions[i], how) == 0);
        munmap(p.mem[i], p.n * PAGE);
    }
    ksm_engine_free(p.engine);
}

/*
 * What a life leaves behind is there 15 times, at least; an allocator, and a
 * sanitizer more so, may map some more of its own.
 */
static void test_leaks(void)
{
    const unsigned lives = 15;
    size_t fds, maps, bytes;

    /* allocators take what they take first */
    for (int i = 0; i < 3; i++) {
        one_life(KSM_REMOVE_UNMERGE);
        one_life(KSM_REMOVE_FORGET);
    }
    fds = count_fds();
    maps = count_lines("/proc/self/maps");
    bytes = resident();
    for (unsigned i = 0; i < lives; i++) {
        one_life(KSM_REMOVE_UNMERGE);
        one_life(KSM_REMOVE_FORGET);
    }
    g_assert(count_fds() == fds);
    g_test_message("%zd mappings more",
                   (ssize_t)(count_lines("/proc/self/maps") - maps));
    g_assert(count_lines("/proc/self/maps") < maps + lives);
    g_test_message("%zd bytes more", (ssize_t)(resident() - bytes));
    g_assert(keeps_freed_memory() || resident() < bytes + (4 << 20));
}

int main(int argc, char **argv)
{
    g_autoptr(GError) error = NULL;

    g_test_init(&argc, &argv, NULL);
    slower_init();
    if (!ksm_supported(&error)) {
        printf("1..0 # SKIP %s\n", error->message);
        return 77;
    }
    g_test_add_func("/libksm/system/same-page", test_same_page);
    g_test_add_func("/libksm/system/pinned", test_pinned);
    g_test_add_func("/libksm/system/pinned-late", test_pinned_late);
    g_test_add_func("/libksm/system/plain-reference", test_plain_reference);
    g_test_add_func("/libksm/system/direct-io", test_direct_io);
    g_test_add_func("/libksm/system/mapping-limit", test_mapping_limit);
    g_test_add_func("/libksm/system/mapping-limit-hit", test_mapping_limit_hit);
    g_test_add_data_func("/libksm/limits/memory", NULL,
                         test_memory_limit);
    g_test_add_data_func("/libksm/limits/memory-above", "below",
                         test_memory_limit);
    g_test_add_func("/libksm/system/attributes", test_attributes);
    g_test_add_func("/libksm/system/fork", test_fork);
    g_test_add_func("/libksm/system/fork-part", test_fork_part);
    g_test_add_func("/libksm/system/leaks", test_leaks);
    return g_test_run();
}
