/*
 * Benches of libksm: what the workers share, see bench.h
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

void bench_die(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    _exit(1);
}

const char *bench_arg_str(const Bench *b, const char *name,
                          const char *fallback)
{
    size_t len = strlen(name);

    for (int i = 1; i < b->argc; i++) {
        if (!strncmp(b->argv[i], name, len) && b->argv[i][len] == '=') {
            return b->argv[i] + len + 1;
        }
    }
    return fallback;
}

uint64_t bench_arg(const Bench *b, const char *name, uint64_t fallback)
{
    const char *text = bench_arg_str(b, name, NULL);

    return text ? g_ascii_strtoull(text, NULL, 0) : fallback;
}

void bench_progress(const char *fmt, ...)
{
    va_list ap;

    fputs("progress ", stdout);
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    putchar('\n');
    fflush(stdout);
}

void bench_metric(const char *name, double value)
{
    printf("metric %s %.9g\n", name, value);
    fflush(stdout);
}

int64_t bench_ask(const char *what)
{
    char line[128];
    int64_t number;

    printf("ask %s\n", what);
    fflush(stdout);
    if (!fgets(line, sizeof(line), stdin) ||
        sscanf(line, "ok %" SCNd64, &number) != 1) {
        bench_die("no answer to '%s'", what);
    }
    return number;
}

static uint64_t clock_ns(clockid_t id)
{
    struct timespec ts;

    clock_gettime(id, &ts);
    return ts.tv_sec * UINT64_C(1000000000) + ts.tv_nsec;
}

uint64_t bench_now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

uint64_t bench_thread_cpu_ns(void)
{
    return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

uint64_t bench_process_cpu_ns(void)
{
    return clock_ns(CLOCK_PROCESS_CPUTIME_ID);
}

char *bench_map(size_t len, BenchPages pages)
{
    size_t room = len + KSM_CHUNK_SIZE;
    char *p = mmap(NULL, room, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *start = (char *)(((uintptr_t)p + KSM_CHUNK_SIZE - 1) &
                           ~(uintptr_t)(KSM_CHUNK_SIZE - 1));

    if (p == MAP_FAILED) {
        bench_die("cannot map %zu bytes: %s", room, strerror(errno));
    }
    if (madvise(start, len, pages == BENCH_HUGE_PAGES ? MADV_HUGEPAGE
                                                      : MADV_NOHUGEPAGE) &&
        pages == BENCH_HUGE_PAGES) {
        bench_die("no transparent huge pages: %s", strerror(errno));
    }
    return start;
}

KsmEngine *bench_engine(KsmFreePolicy free_policy, bool smart_scan)
{
    g_autoptr(GError) error = NULL;
    KsmConfig config;
    KsmEngine *engine;

    ksm_config_init(&config);
    config.max_cpu = 100;
    config.free_policy = free_policy;
    config.smart_scan = smart_scan;
    engine = ksm_engine_new(&config, &error);
    if (!engine) {
        fprintf(stderr, "no engine: %s\n", error->message);
        _exit(BENCH_EXIT_LACKING);
    }
    return engine;
}

void bench_threads(KsmEngine *engine, unsigned threads)
{
    ksm_engine_set_threads(engine, threads);
    ksm_engine_set_max_cpu(engine, 100 * threads);
}

KsmRegion *bench_add(KsmEngine *engine, void *addr, size_t len,
                     const KsmRegionOps *ops, void *opaque)
{
    g_autoptr(GError) error = NULL;
    KsmRegion *region = ksm_region_add(engine, addr, len, -1, ops, opaque,
                                       &error);

    if (!region) {
        bench_die("region refused: %s", error->message);
    }
    return region;
}

static bool step_until(KsmEngine *engine, uint64_t max_ns, BenchDone *done,
                       void *opaque, double seconds)
{
    uint64_t end = bench_now_ns() + seconds * 1e9;

    for (;;) {
        int64_t wait = ksm_step(engine, max_ns);
        KsmStats stats;

        ksm_engine_get_stats(engine, &stats);
        if (done(&stats, opaque)) {
            return true;
        }
        if (bench_now_ns() > end) {
            return false;
        }
        /* -1 is "nothing until something is called": look at the clock */
        if (wait && !max_ns) {
            g_usleep(wait < 0 ? 1000 : MIN(wait / 1000, 100000));
        }
    }
}

bool bench_step_until(KsmEngine *engine, BenchDone *done, void *opaque,
                      double seconds)
{
    return step_until(engine, 0, done, opaque, seconds);
}

bool bench_rush_until(KsmEngine *engine, BenchDone *done, void *opaque,
                      double seconds)
{
    return step_until(engine, 2000000, done, opaque, seconds);
}

bool bench_saved(const KsmStats *stats, void *opaque)
{
    return stats->pages_sharing + stats->zero_pages >= *(uint64_t *)opaque;
}

bool bench_scanned(const KsmStats *stats, void *opaque)
{
    return stats->full_scans >= *(uint64_t *)opaque;
}

bool bench_hashed(const KsmStats *stats, void *opaque)
{
    return stats->pages_scanned >= *(uint64_t *)opaque;
}

/* The number after "@name " in a file of "name number" lines. */
static bool read_named(const char *file, const char *name, uint64_t *value)
{
    FILE *f = fopen(file, "r");
    size_t len = strlen(name);
    char line[256];
    bool found = false;

    while (f && !found && fgets(line, sizeof(line), f)) {
        if (!strncmp(line, name, len)) {
            *value = g_ascii_strtoull(line + len + strspn(line + len, ": \t"),
                                      NULL, 10);
            found = true;
        }
    }
    if (f) {
        fclose(f);
    }
    return found;
}

uint64_t bench_ksmd_merged(void)
{
    uint64_t pages;

    if (!read_named("/proc/self/ksm_stat", "ksm_merging_pages", &pages)) {
        bench_die("/proc/self/ksm_stat has no ksm_merging_pages: "
                  "the kernel is older than 6.1 or has no KSM");
    }
    return pages;
}

bool bench_ksmd_wait(uint64_t pages, double seconds)
{
    uint64_t end = bench_now_ns() + seconds * 1e9;

    while (bench_ksmd_merged() < pages) {
        if (bench_now_ns() > end) {
            return false;
        }
        g_usleep(2000);
    }
    return true;
}

void bench_ksmd_offer(void *addr, size_t len)
{
    if (madvise(addr, len, MADV_MERGEABLE)) {
        bench_die("MADV_MERGEABLE: %s", strerror(errno));
    }
}

uint64_t bench_ksmd_counter(const char *name)
{
    g_autofree char *path = g_strdup_printf("/sys/kernel/mm/ksm/%s", name);
    g_autofree char *text = NULL;

    if (!g_file_get_contents(path, &text, NULL, NULL)) {
        bench_die("cannot read %s", path);
    }
    return g_ascii_strtoull(text, NULL, 10);
}

BenchMemory bench_memory(void)
{
    BenchMemory m = { 0 };

    if (!read_named("/proc/self/smaps_rollup", "Rss", &m.rss) ||
        !read_named("/proc/self/smaps_rollup", "LazyFree", &m.lazy)) {
        bench_die("cannot read /proc/self/smaps_rollup");
    }
    m.rss *= 1024;
    m.lazy *= 1024;
    return m;
}
