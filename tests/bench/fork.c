/*
 * Bench fork: what a process costs by the pages it maps
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The table of the shared page tables of 2002: time to create and reap a
 * process with so many extra pages, beyond the fixed cost.  Anonymous pages are
 * copied entry by entry (kind=small) or as huge pages (kind=huge); a range that
 * maps the pool and was never written needs no page table in the child
 * (kind=merged).  DONTFORK keeps the equal copy that merging needs out of the
 * child, so that both sides map the same number of pages.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

static void fill(char *mem, size_t pages)
{
    memset(mem, 0, pages * KSM_PAGE_SIZE);
    for (size_t i = 0; i < pages; i++) {
        *(uint64_t *)(mem + i * KSM_PAGE_SIZE) = i + 1;
    }
}

static void check(const char *mem, size_t pages)
{
    for (size_t i = 0; i < pages; i++) {
        if (*(uint64_t *)(mem + i * KSM_PAGE_SIZE) != i + 1) {
            bench_die("page %zu has changed", i);
        }
    }
}

/* us of CPU of this process and of those it has reaped. */
static uint64_t cpu_us(void)
{
    uint64_t sum = 0;

    for (int i = 0; i < 2; i++) {
        struct rusage u;

        getrusage(i ? RUSAGE_CHILDREN : RUSAGE_SELF, &u);
        sum += (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * UINT64_C(1000000) +
               u.ru_utime.tv_usec + u.ru_stime.tv_usec;
    }
    return sum;
}

/*
 * us of CPU for one process, the best of some rounds: others use the machine,
 * too.
 */
static double one_process(unsigned n)
{
    uint64_t best = UINT64_MAX;

    for (int round = 0; round < 5; round++) {
        uint64_t start = cpu_us();

        for (unsigned i = 0; i < n; i++) {
            pid_t pid = fork();

            if (pid == 0) {
                _exit(0);
            }
            if (pid < 0 || waitpid(pid, NULL, 0) != pid) {
                bench_die("fork: %s", strerror(errno));
            }
        }
        best = MIN(best, cpu_us() - start);
    }
    return (double)best / n;
}

static double merged_pages(char *mem, size_t pages)
{
    size_t len = pages * KSM_PAGE_SIZE;
    char *copy = bench_map(len, BENCH_SMALL_PAGES);
    KsmEngine *engine = bench_engine(KSM_FREE_AUTO, true);
    uint64_t target = pages;
    KsmStats stats;

    if (madvise(copy, len, MADV_DONTFORK)) {
        bench_die("MADV_DONTFORK: %s", strerror(errno));
    }
    fill(copy, pages);
    bench_add(engine, copy, len, NULL, NULL);
    bench_add(engine, mem, len, NULL, NULL);
    /* a few pages may not be worth it */
    bench_rush_until(engine, bench_saved, &target, 10);
    ksm_engine_get_stats(engine, &stats);
    return stats.pages_sharing;
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    size_t pages = bench_arg(&b, "pages", 32768);
    unsigned n = bench_arg(&b, "processes", 1000);
    const char *kind = bench_arg_str(&b, "kind", "small");
    double fixed, merged;
    char *mem;

    fixed = one_process(n);
    mem = bench_map(pages * KSM_PAGE_SIZE, strcmp(kind, "huge") ?
                    BENCH_SMALL_PAGES : BENCH_HUGE_PAGES);
    fill(mem, pages);
    if (!strcmp(kind, "merged")) {
        merged = merged_pages(mem, pages);
        bench_metric("merged", merged);
    }
    bench_metric("us", one_process(n) - fixed);
    bench_metric("fixed_us", fixed);
    check(mem, pages);
    return 0;
}
