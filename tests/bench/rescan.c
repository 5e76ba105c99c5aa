/*
 * Bench rescan: what a pass over memory that did not change costs
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Unique pages that nobody writes.  ksmd reads each to compare checksums;
 * libksm asks its dirty source.  engine=ksm dirty=log (an owner's bitmap, as
 * QEMU's dirty log is) or dirty=pagemap, or engine=ksmd.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define TIMEOUT_S 300.0

/* A dirty log without writes. */
static bool clean_log(void *opaque, size_t first_page, size_t n_pages,
                      unsigned long *bitmap)
{
    /* an owner, too, walks its own bitmap for the range */
    const unsigned long *log = opaque;

    for (size_t i = first_page / 64; i * 64 < first_page + n_pages; i++) {
        if (log[i]) {
            return false;
        }
    }
    return true;
}

static void measure_ksm(const Bench *b, char *mem, size_t len,
                        uint64_t passes)
{
    bool log = !strcmp(bench_arg_str(b, "dirty", "log"), "log");
    KsmRegionOps ops = { .dirty_sync = log ? clean_log : NULL };
    unsigned long *bitmap = g_new0(unsigned long, len / KSM_PAGE_SIZE / 64 + 1);
    KsmEngine *engine = bench_engine(KSM_FREE_AUTO, false);
    KsmStats stats;
    uint64_t target, cpu, scanned;

    bench_add(engine, mem, len, &ops, bitmap);
    /* the first passes hash everything */
    target = 4;
    if (!bench_rush_until(engine, bench_scanned, &target, TIMEOUT_S)) {
        bench_die("no 4 passes in %.0f s", TIMEOUT_S);
    }
    ksm_engine_get_stats(engine, &stats);
    if (stats.reasons[KSM_REASON_NOT_SCANNED]) {
        bench_die("%" G_GUINT64_FORMAT " pages were never looked at",
                  stats.reasons[KSM_REASON_NOT_SCANNED]);
    }
    scanned = stats.pages_scanned;
    target = stats.full_scans + passes;
    cpu = bench_thread_cpu_ns();
    if (!bench_rush_until(engine, bench_scanned, &target, TIMEOUT_S)) {
        bench_die("no %" G_GUINT64_FORMAT " passes in %.0f s", passes,
                  TIMEOUT_S);
    }
    cpu = bench_thread_cpu_ns() - cpu;
    target -= passes;
    ksm_engine_get_stats(engine, &stats);
    bench_metric("cpu_us_per_pass", cpu / 1e3 / (stats.full_scans - target));
    bench_metric("pages_hashed", stats.pages_scanned - scanned);
}

static void measure_ksmd(char *mem, size_t len, uint64_t passes)
{
    uint64_t first, cpu, seen, end = bench_now_ns() + TIMEOUT_S * 1e9;

    bench_ksmd_offer(mem, len);
    bench_ask("ksmd start");
    /* two passes until every page is in the unstable tree */
    first = bench_ksmd_counter("full_scans");
    while (bench_ksmd_counter("full_scans") < first + 4) {
        g_usleep(1000);
    }
    first = bench_ksmd_counter("full_scans");
    seen = bench_ksmd_counter("pages_scanned") +
           bench_ksmd_counter("pages_skipped");
    cpu = bench_ask("ksmd cpu");
    while (bench_ksmd_counter("full_scans") < first + passes) {
        if (bench_now_ns() > end) {
            bench_die("ksmd made no %" G_GUINT64_FORMAT " passes in %.0f s",
                      passes, TIMEOUT_S);
        }
        g_usleep(1000);
    }
    cpu = bench_ask("ksmd cpu") - cpu;
    passes = bench_ksmd_counter("full_scans") - first;
    bench_ask("ksmd stop");
    seen = bench_ksmd_counter("pages_scanned") +
           bench_ksmd_counter("pages_skipped") - seen;
    bench_metric("cpu_us_per_pass", cpu / 1e3 / passes);
    bench_metric("cpu_us_per_page", cpu / 1e3 / seen);
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    size_t len = bench_arg(&b, "mib", 512) << 20;
    uint64_t passes = bench_arg(&b, "passes", 4);
    char *mem = bench_map(len, BENCH_SMALL_PAGES);
    uint64_t seed = 0x9e3779b97f4a7c15;

    for (size_t i = 0; i < len / 8; i++) {
        ((uint64_t *)mem)[i] = bench_random(&seed);
    }
    if (!strcmp(bench_arg_str(&b, "engine", "ksm"), "ksm")) {
        measure_ksm(&b, mem, len, passes);
    } else {
        measure_ksmd(mem, len, passes);
    }
    seed = 0x9e3779b97f4a7c15;
    for (size_t i = 0; i < len / 8; i++) {
        if (((uint64_t *)mem)[i] != bench_random(&seed)) {
            bench_die("word %zu has changed", i);
        }
    }
    return 0;
}
