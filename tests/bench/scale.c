/*
 * Bench scale: what much memory costs of which little is populated
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * One region of SIZE, with PARTS of it populated, evenly spread; every second
 * part is equal to the one before it.  Measured: adding and removing it, the
 * first pass, what is kept of it, what passes take when there is nothing to do,
 * how soon a write amid nothing is noticed, and how long another thread waits
 * for the engine, which asks for statistics and discards a page once a
 * millisecond all the time.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "bench.h"

#define TIMEOUT_S   300.0
#define NOTICE_NS    UINT64_C(60000000000)
#define SEED        UINT64_C(0x9e3779b97f4a7c15)
#define WAIT_US     1000u       /* between two calls of the other thread */

typedef struct Scale {
    char *mem;
    size_t len;
    unsigned parts;
    size_t part_len;
    unsigned long *log;     /* or NULL: bits that the dirty_sync op gives */
    KsmEngine *engine;
    KsmRegion *region;
    size_t write_at;        /* offset of a page amid nothing */
    size_t quiet_at;        /* ... that nobody ever writes */
} Scale;

/* The other thread. */
static struct {
    pthread_t thread;
    atomic_bool ends;
    uint64_t stats_ns, discard_ns;  /* longest */
    uint64_t calls;
} other;

static uint64_t part_seed(unsigned part)
{
    return SEED + part / 2;
}

static char *part_at(const Scale *s, unsigned part)
{
    return s->mem + s->len / s->parts * part;
}

static void parts_fill(const Scale *s)
{
    for (unsigned i = 0; i < s->parts; i++) {
        uint64_t *word = (uint64_t *)part_at(s, i), seed = part_seed(i);

        for (size_t k = 0; k < s->part_len / sizeof(*word); k++) {
            word[k] = bench_random(&seed);
        }
    }
}

static void parts_check(const Scale *s)
{
    for (unsigned i = 0; i < s->parts; i++) {
        uint64_t *word = (uint64_t *)part_at(s, i), seed = part_seed(i);

        for (size_t k = 0; k < s->part_len / sizeof(*word); k++) {
            if (word[k] != bench_random(&seed)) {
                bench_die("part %u has changed at word %zu", i, k);
            }
        }
    }
}

/* As an owner's: it walks its own bitmap for the range. */
static bool log_sync(void *opaque, size_t first_page, size_t n_pages,
                     unsigned long *bitmap)
{
    unsigned long *log = ((Scale *)opaque)->log;

    for (size_t i = first_page; i < first_page + n_pages; i += 64) {
        if (log[i / 64]) {
            bitmap[(i - first_page) / 64] |= log[i / 64];
            log[i / 64] = 0;
        }
    }
    return true;
}

static void *other_main(void *opaque)
{
    Scale *s = opaque;

    while (!atomic_load(&other.ends)) {
        uint64_t t = bench_now_ns();
        KsmStats stats;

        ksm_engine_get_stats(s->engine, &stats);
        other.stats_ns = MAX(other.stats_ns, bench_now_ns() - t);
        t = bench_now_ns();
        if (ksm_discard(s->region, s->quiet_at, KSM_PAGE_SIZE) < 0) {
            bench_die("a page could not be discarded");
        }
        other.discard_ns = MAX(other.discard_ns, bench_now_ns() - t);
        other.calls++;
        g_usleep(WAIT_US);
    }
    return NULL;
}

static void other_start(Scale *s)
{
    atomic_store(&other.ends, false);
    other.stats_ns = other.discard_ns = other.calls = 0;
    if (pthread_create(&other.thread, NULL, other_main, s)) {
        bench_die("no thread: %s", strerror(errno));
    }
}

static void other_end(const char *when)
{
    g_autofree char *stats = g_strdup_printf("%s_stats_wait_us", when);
    g_autofree char *discard = g_strdup_printf("%s_discard_wait_us", when);

    atomic_store(&other.ends, true);
    pthread_join(other.thread, NULL);
    if (!other.calls) {
        bench_die("the other thread had no turn");
    }
    bench_metric(stats, other.stats_ns / 1e3);
    bench_metric(discard, other.discard_ns / 1e3);
}

/* Steps it as it asks to be called; CPU of that. */
static uint64_t idle_for(Scale *s, uint64_t ns)
{
    uint64_t end = bench_now_ns() + ns, cpu = bench_thread_cpu_ns();

    while (bench_now_ns() < end) {
        int64_t wait = ksm_step(s->engine, 0);
        uint64_t now = bench_now_ns();
        uint64_t left = end > now ? end - now : 0;

        if (wait) {
            g_usleep((wait < 0 ? left : MIN((uint64_t)wait, left)) / 1000);
        }
    }
    return bench_thread_cpu_ns() - cpu;
}

static KsmStats stats_of(Scale *s)
{
    KsmStats stats;

    ksm_engine_get_stats(s->engine, &stats);
    return stats;
}

static uint64_t resident(void)
{
    return bench_memory().rss;
}

static void add(Scale *s)
{
    static const KsmRegionOps with_log = { .dirty_sync = log_sync };
    static const KsmRegionOps without = { NULL };
    uint64_t rss = resident(), t = bench_now_ns(), cpu = bench_thread_cpu_ns();

    s->region = bench_add(s->engine, s->mem, s->len,
                          s->log ? &with_log : &without, s);
    bench_metric("add_ms", (bench_now_ns() - t) / 1e6);
    bench_metric("add_cpu_ms", (bench_thread_cpu_ns() - cpu) / 1e6);
    bench_metric("added_kib", (resident() - rss) / 1024.0);
}

static void merge(Scale *s)
{
    uint64_t passes = 1, cpu = bench_thread_cpu_ns(), rss = resident();
    uint64_t saved = s->parts / 2 * s->part_len / KSM_PAGE_SIZE / 10 * 9;

    if (!bench_rush_until(s->engine, bench_scanned, &passes, TIMEOUT_S)) {
        bench_die("no pass in %.0f s", TIMEOUT_S);
    }
    bench_metric("first_pass_cpu_ms", (bench_thread_cpu_ns() - cpu) / 1e6);
    bench_metric("first_pass_kib", (double)(int64_t)(resident() - rss) / 1024);
    if (!bench_rush_until(s->engine, bench_saved, &saved, TIMEOUT_S)) {
        bench_die("%" PRIu64 " pages are not saved in %.0f s", saved,
                  TIMEOUT_S);
    }
    bench_metric("merged_cpu_ms", (bench_thread_cpu_ns() - cpu) / 1e6);
}

static void idle(Scale *s, uint64_t settle_s, uint64_t seconds)
{
    KsmStats before, after;
    uint64_t cpu;

    ksm_engine_set_max_cpu(s->engine, 10);
    bench_progress("%" PRIu64 " s until all is quiet", settle_s);
    idle_for(s, settle_s * 1000000000);
    other_end("busy");
    bench_progress("%" PRIu64 " s of nothing", seconds);
    other_start(s);
    before = stats_of(s);
    cpu = idle_for(s, seconds * 1000000000);
    after = stats_of(s);
    other_end("idle");
    bench_metric("idle_percent", cpu / 1e7 / seconds);
    bench_metric("passes_per_minute",
                 (after.full_scans - before.full_scans) * 60.0 / seconds);
    if (after.full_scans == before.full_scans) {
        bench_die("no pass in %" PRIu64 " s", seconds);
    }
    bench_metric("us_per_pass",
                 cpu / 1e3 / (after.full_scans - before.full_scans));
    bench_metric("metadata_mib", after.metadata / 1048576.0);
    bench_metric("saved_mib", (after.pages_sharing + after.zero_pages) / 256.0);
}

/* A page amid nothing, unlike all others. */
static void notice(Scale *s)
{
    uint64_t before = stats_of(s).pages_unshared, t = bench_now_ns();
    char *page = s->mem + s->write_at;

    memset(page, 0x5a, KSM_PAGE_SIZE / 2);
    if (s->log) {
        s->log[s->write_at / KSM_PAGE_SIZE / 64] |=
            1ul << (s->write_at / KSM_PAGE_SIZE % 64);
    }
    for (;;) {
        KsmStats now = stats_of(s);

        if (now.pages_volatile || now.pages_unshared > before) {
            break;
        }
        if (bench_now_ns() - t > NOTICE_NS) {
            bench_die("a write was not noticed");
        }
        idle_for(s, 20000000);
    }
    bench_metric("noticed_s", (bench_now_ns() - t) / 1e9);
}

static void finish(Scale *s)
{
    uint64_t t = bench_now_ns();

    if (ksm_unmerge(s->region, 0, s->len) < 0) {
        bench_die("it could not be unmerged");
    }
    bench_metric("unmerge_ms", (bench_now_ns() - t) / 1e6);
    t = bench_now_ns();
    if (ksm_region_remove(s->region, KSM_REMOVE_UNMERGE) < 0) {
        bench_die("it could not be removed");
    }
    bench_metric("remove_ms", (bench_now_ns() - t) / 1e6);
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    size_t mib = bench_arg(&b, "populated", 512);
    Scale s = {
        .len = bench_arg(&b, "gib", 1) << 30,
        .parts = bench_arg(&b, "parts", 64),
    };

    s.part_len = (mib << 20) / s.parts;
    if (s.len / s.parts < s.part_len + 2 * KSM_CHUNK_SIZE) {
        bench_die("there is no room for %u parts", s.parts);
    }
    /* in a chunk behind the part in the middle, and before the last one */
    s.write_at = s.len / s.parts * (s.parts / 2) + s.part_len + KSM_CHUNK_SIZE;
    s.quiet_at = s.len / s.parts * (s.parts - 1) - KSM_PAGE_SIZE;
    s.mem = bench_map(s.len, BENCH_SMALL_PAGES);
    if (!strcmp(bench_arg_str(&b, "dirty", "pagemap"), "log")) {
        s.log = g_new0(unsigned long, s.len / KSM_PAGE_SIZE / 64);
    }
    parts_fill(&s);
    s.engine = bench_engine(KSM_FREE_AUTO, true);
    add(&s);
    other_start(&s);
    merge(&s);
    idle(&s, bench_arg(&b, "settle", 45), bench_arg(&b, "seconds", 60));
    notice(&s);
    parts_check(&s);
    finish(&s);
    parts_check(&s);
    ksm_engine_free(s.engine);
    return 0;
}
