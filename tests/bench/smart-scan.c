/*
 * Bench smart-scan: how many pages are looked at in vain
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Three parts: copies (merge at once), unique pages that never change, and
 * unique pages that are rewritten between passes with new contents.  Smart scan
 * should skip the latter two more and more.  Afterwards pages scanned and
 * merged are printed, so that on and off can be compared.  engine=ksm
 * smart=0|1, or engine=ksmd (the script sets the kernel's knob).
 */
#include <string.h>

#include "bench.h"

#define TIMEOUT_S 120.0

typedef struct Load {
    char *mem;
    /*
     * Pages in all; a quarter each: first copy, second copy, unique and
     * still, unique and rewritten.
     */
    size_t n;
    uint64_t round;
} Load;

static uint64_t content(const Load *l, size_t page)
{
    size_t quarter = l->n / 4;

    if (page < 2 * quarter) {
        return page % quarter + 1;
    }
    if (page < 3 * quarter) {
        return page + l->n;
    }
    return page + l->n + l->round * UINT64_C(0x100000000);
}

static uint64_t *word(const Load *l, size_t page)
{
    /* in the middle: compared neither first nor last */
    return (uint64_t *)(l->mem + page * KSM_PAGE_SIZE + KSM_PAGE_SIZE / 2);
}

static void rewrite(Load *l)
{
    l->round++;
    for (size_t i = 3 * (l->n / 4); i < l->n; i++) {
        *word(l, i) = content(l, i);
    }
}

static void check(const Load *l)
{
    for (size_t i = 0; i < l->n; i++) {
        if (*word(l, i) != content(l, i)) {
            bench_die("page %zu has changed", i);
        }
    }
}

static void run_ksm(Load *l, bool smart, uint64_t rounds, uint64_t passes)
{
    KsmEngine *engine = bench_engine(KSM_FREE_AUTO, smart);
    KsmStats stats;

    bench_add(engine, l->mem, l->n * KSM_PAGE_SIZE, NULL, NULL);
    for (uint64_t r = 0; r < rounds; r++) {
        uint64_t target;

        ksm_engine_get_stats(engine, &stats);
        target = stats.full_scans + passes;
        if (!bench_rush_until(engine, bench_scanned, &target, TIMEOUT_S)) {
            bench_die("too few passes in %.0f s", TIMEOUT_S);
        }
        rewrite(l);
    }
    ksm_engine_get_stats(engine, &stats);
    bench_metric("pages_scanned", stats.pages_scanned);
    bench_metric("pages_skipped", stats.pages_skipped);
    bench_metric("pages_sharing", stats.pages_sharing);
    bench_metric("cpu_ms", (stats.scan_time + stats.merge_time) / 1e6);
}

static void run_ksmd(Load *l, uint64_t rounds, uint64_t passes)
{
    uint64_t scanned, skipped, cpu;

    bench_ksmd_offer(l->mem, l->n * KSM_PAGE_SIZE);
    scanned = bench_ksmd_counter("pages_scanned");
    skipped = bench_ksmd_counter("pages_skipped");
    cpu = bench_ask("ksmd start");
    for (uint64_t r = 0; r < rounds; r++) {
        uint64_t first = bench_ksmd_counter("full_scans");
        uint64_t end = bench_now_ns() + TIMEOUT_S * 1e9;

        while (bench_ksmd_counter("full_scans") < first + passes) {
            if (bench_now_ns() > end) {
                bench_die("ksmd: too few passes in %.0f s", TIMEOUT_S);
            }
            g_usleep(500);
        }
        rewrite(l);
    }
    cpu = bench_ask("ksmd cpu") - cpu;
    bench_ask("ksmd stop");
    bench_metric("pages_scanned",
                 bench_ksmd_counter("pages_scanned") - scanned);
    bench_metric("pages_skipped",
                 bench_ksmd_counter("pages_skipped") - skipped);
    /* as libksm counts: the first copy is shared, the others are saved */
    bench_metric("pages_sharing",
                 bench_ksmd_merged() - MIN(bench_ksmd_merged(), l->n / 4));
    bench_metric("cpu_ms", cpu / 1e6);
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    Load l = { .n = bench_arg(&b, "mib", 256) << 8 };
    uint64_t rounds = bench_arg(&b, "rounds", 16);
    /* enough for writes to become quiet */
    uint64_t passes = bench_arg(&b, "passes", 6);

    l.mem = bench_map(l.n * KSM_PAGE_SIZE, BENCH_SMALL_PAGES);
    for (size_t i = 0; i < l.n; i++) {
        memset(l.mem + i * KSM_PAGE_SIZE, 0x5a, KSM_PAGE_SIZE);
        *word(&l, i) = content(&l, i);
    }
    if (!strcmp(bench_arg_str(&b, "engine", "ksm"), "ksm")) {
        run_ksm(&l, bench_arg(&b, "smart", 1), rounds, passes);
    } else {
        run_ksmd(&l, rounds, passes);
    }
    check(&l);
    return 0;
}
