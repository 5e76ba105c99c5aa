/*
 * Bench ksmpages: how fast equal memory is merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The workload published with KSM in 2009: copies of N MiB.  case=worst: each
 * page is zero but for its number in the last 8 bytes, so that two pages
 * differ at their end only; case=best: the number is 1 everywhere.  After two
 * copies are merged, the last words are read (a loop of the paper) and, for
 * case=worst, a third copy joins.  engine=ksm is libksm, engine=ksmd the
 * kernel; threads=N of them merge.  One run per process, so that engines can
 * take turns.
 */
#include <string.h>
#include <sys/resource.h>

#include "bench.h"

#define TIMEOUT_S 300.0

typedef struct Pages {
    size_t n;               /* pages per copy */
    bool best;
    KsmEngine *engine;      /* NULL: ksmd */
    KsmRegion *regions[3];
    char *copies[3];
} Pages;

/* The paper's engine: MB merged per second, of the clock and of CPU. */
typedef struct Rate {
    double wall;
    double cpu;
} Rate;

static uint64_t *last_word(const Pages *p, int copy, size_t page)
{
    return (uint64_t *)(p->copies[copy] + (page + 1) * KSM_PAGE_SIZE) - 1;
}

static uint64_t content(const Pages *p, size_t page)
{
    return p->best ? 1 : page + 1;
}

static void fill(Pages *p, int copy)
{
    p->copies[copy] = bench_map(p->n * KSM_PAGE_SIZE, BENCH_SMALL_PAGES);
    memset(p->copies[copy], 0, p->n * KSM_PAGE_SIZE);
    for (size_t i = 0; i < p->n; i++) {
        *last_word(p, copy, i) = content(p, i);
    }
}

static void check(const Pages *p, int copies)
{
    static const char zero[KSM_PAGE_SIZE];

    for (int c = 0; c < copies; c++) {
        for (size_t i = 0; i < p->n; i++) {
            if (memcmp(p->copies[c] + i * KSM_PAGE_SIZE, zero,
                       KSM_PAGE_SIZE - 8) ||
                *last_word(p, c, i) != content(p, i)) {
                bench_die("page %zu of copy %d has changed", i, c);
            }
        }
    }
}

/* ksmd's target: one page in 256 stays for others to share. */
static uint64_t ksmd_target(const Pages *p, int copies)
{
    return copies * p->n;
}

/* libksm's target, in pages saved. */
static uint64_t ksm_target(const Pages *p, int copies)
{
    uint64_t all = copies * p->n;

    /*
     * best: a pattern keeps up to a chunk of equal pages for its run, and users
     * of a page are bounded: 1 in 128 is left to the engine; worst: two
     * contents may have the same 32 bits of hash, and a page left over may not
     * be worth an isolation
     */
    return p->best ? all - all / 128 - 512 : all - p->n - all / 4096;
}

static Rate merge(Pages *p, int copies, uint64_t before)
{
    uint64_t start, cpu, saved;
    Rate r;

    if (p->engine) {
        uint64_t target = ksm_target(p, copies);

        /* before the clock starts, as for ksmd */
        for (int c = 0; c < copies; c++) {
            if (!p->regions[c]) {
                p->regions[c] = bench_add(p->engine, p->copies[c],
                                          p->n * KSM_PAGE_SIZE, NULL, NULL);
            }
        }
        start = bench_now_ns();
        cpu = bench_process_cpu_ns();
        if (!bench_rush_until(p->engine, bench_saved, &target, TIMEOUT_S)) {
            bench_die("libksm did not merge %d copies in %.0f s", copies,
                      TIMEOUT_S);
        }
        cpu = bench_process_cpu_ns() - cpu;
    } else {
        for (int c = 0; c < copies; c++) {
            bench_ksmd_offer(p->copies[c], p->n * KSM_PAGE_SIZE);
        }
        start = bench_now_ns();
        cpu = bench_ask("ksmd start");
        if (!bench_ksmd_wait(ksmd_target(p, copies), TIMEOUT_S)) {
            bench_die("ksmd did not merge %d copies in %.0f s", copies,
                      TIMEOUT_S);
        }
        cpu = bench_ask("ksmd cpu") - cpu;
    }
    start = bench_now_ns() - start;
    if (!p->engine) {
        bench_ask("ksmd stop");
    }
    saved = ksm_target(p, copies) - before;
    r.wall = saved * KSM_PAGE_SIZE / 1048576.0 / (start / 1e9);
    r.cpu = saved * KSM_PAGE_SIZE / 1048576.0 / (cpu / 1e9);
    return r;
}

/* us to read the last word of every page, the best of some passes. */
static double read_loop(const Pages *p, int copies)
{
    uint64_t best = UINT64_MAX;

    for (int pass = 0; pass < 9; pass++) {
        uint64_t start = bench_now_ns();
        uint64_t sum = 0;

        for (int c = 0; c < copies; c++) {
            for (size_t i = 0; i < p->n; i++) {
                sum += __atomic_load_n(last_word(p, c, i), __ATOMIC_RELAXED);
            }
        }
        if (!sum) {
            bench_die("memory was lost");
        }
        best = MIN(best, bench_now_ns() - start);
    }
    return best / 1e3;
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    Pages p = {
        .n = bench_arg(&b, "mib", 256) << 8,
        .best = !strcmp(bench_arg_str(&b, "case", "worst"), "best"),
    };
    KsmStats stats;
    Rate rate;

    /* ksmd's priority: on a busy machine neither is favoured */
    setpriority(PRIO_PROCESS, 0, 5);
    if (!strcmp(bench_arg_str(&b, "engine", "ksm"), "ksm")) {
        unsigned threads = bench_arg(&b, "threads", 1);

        p.engine = bench_engine(KSM_FREE_AUTO, true);
        bench_threads(p.engine, threads);
    }
    fill(&p, 0);
    fill(&p, 1);
    bench_metric("read_before_us", read_loop(&p, 2));
    rate = merge(&p, 2, 0);
    bench_metric("mbps", rate.wall);
    bench_metric("cpu_mbps", rate.cpu);
    bench_metric("read_after_us", read_loop(&p, 2));
    check(&p, 2);
    if (!p.best) {
        fill(&p, 2);
        rate = merge(&p, 3, ksm_target(&p, 2));
        bench_metric("third_mbps", rate.wall);
        bench_metric("third_cpu_mbps", rate.cpu);
        check(&p, 3);
    }
    if (p.engine) {
        ksm_engine_get_stats(p.engine, &stats);
        bench_metric("metadata_bytes_per_page",
                     (double)stats.metadata / stats.pages_total);
        bench_metric("page_table_bytes_per_page",
                     (double)stats.page_tables / stats.pages_total);
        bench_metric("runs", stats.merged_runs);
    }
    return 0;
}
