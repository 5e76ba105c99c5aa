/*
 * Bench threads: what merging by more than one thread brings
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * engines=N, each with a thread, a region and a pool of its own: they share
 * nothing but the address space, so threads of one engine can hardly do better;
 * threads=N: each engine has so many.
 * case=merge: a region has two copies of the same pages, that differ in their
 * last words only; case=scan: no page is equal to another.  Rates are those of
 * all engines together.
 */
#include <pthread.h>
#include <string.h>

#include "bench.h"

#define ENGINES_MAX 16u
#define TIMEOUT_S   300.0

typedef struct Worker {
    KsmEngine *engine;
    KsmRegion *region;
    char *mem;
    size_t n;               /* pages */
    bool merges;
    pthread_barrier_t *start;
    pthread_t thread;
} Worker;

static uint64_t *last_word(const Worker *w, size_t page)
{
    return (uint64_t *)(w->mem + (page + 1) * KSM_PAGE_SIZE) - 1;
}

static uint64_t content(const Worker *w, size_t page)
{
    return 1 + (w->merges ? page % (w->n / 2) : page);
}

static void fill(Worker *w)
{
    w->mem = bench_map(w->n * KSM_PAGE_SIZE, BENCH_SMALL_PAGES);
    memset(w->mem, 0, w->n * KSM_PAGE_SIZE);
    for (size_t i = 0; i < w->n; i++) {
        *last_word(w, i) = content(w, i);
    }
}

static void check(const Worker *w)
{
    for (size_t i = 0; i < w->n; i++) {
        if (*last_word(w, i) != content(w, i)) {
            bench_die("page %zu has changed", i);
        }
    }
}

static void *work(void *opaque)
{
    Worker *w = opaque;
    /* some may have the same hash, or not be worth an isolation */
    uint64_t saved = w->n / 2 - w->n / 4096, scanned = w->n;
    bool done;

    pthread_barrier_wait(w->start);
    done = w->merges
           ? bench_rush_until(w->engine, bench_saved, &saved, TIMEOUT_S)
           : bench_rush_until(w->engine, bench_hashed, &scanned, TIMEOUT_S);
    if (!done) {
        bench_die("not done in %.0f s", TIMEOUT_S);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    unsigned n = MIN(bench_arg(&b, "engines", 1), ENGINES_MAX);
    size_t pages = bench_arg(&b, "mib", 512) << 8;
    pthread_barrier_t start;
    Worker w[ENGINES_MAX];
    uint64_t t;

    pthread_barrier_init(&start, NULL, n + 1);
    for (unsigned i = 0; i < n; i++) {
        w[i] = (Worker) {
            .n = pages,
            .merges = !strcmp(bench_arg_str(&b, "case", "merge"), "merge"),
            .start = &start,
            .engine = bench_engine(KSM_FREE_AUTO, true),
        };
        bench_threads(w[i].engine, bench_arg(&b, "threads", 1));
        fill(&w[i]);
        w[i].region = bench_add(w[i].engine, w[i].mem, pages * KSM_PAGE_SIZE,
                                NULL, NULL);
        pthread_create(&w[i].thread, NULL, work, &w[i]);
    }
    pthread_barrier_wait(&start);
    t = bench_now_ns();
    for (unsigned i = 0; i < n; i++) {
        pthread_join(w[i].thread, NULL);
    }
    t = bench_now_ns() - t;
    bench_metric("mbps", n * (pages >> 8) / (t / 1e9));
    for (unsigned i = 0; i < n; i++) {
        check(&w[i]);
        if (ksm_region_remove(w[i].region, KSM_REMOVE_UNMERGE) < 0) {
            bench_die("a region could not be removed");
        }
        check(&w[i]);
        ksm_engine_free(w[i].engine);
    }
    return 0;
}
