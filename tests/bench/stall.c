/*
 * Bench stall: what merging does to threads that write the memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The memory holds two equal halves: runs of run=24 equal pages in every
 * period=32, the others differ; guests have 24 pages a run on average.  Beside
 * them is a hot set that the writers hammer.  At times each writer writes a
 * random page of the halves and times that write.  Every writer has its own
 * word in each page and a shadow of it, so a lost write is found.  First
 * without merging, then with libksm at max-cpu, in the same process.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

#define MAX_THREADS 16
#define HOT_PER_COLD 64
#define BUCKETS 4096        /* of 1/16 of a power of two, ns */

typedef struct Histogram {
    uint64_t count[BUCKETS];
    uint64_t max;
} Histogram;

typedef struct Load Load;

typedef struct Writer {
    Load *load;
    pthread_t thread;
    int number;
    uint32_t *shadow;       /* per page: what this writer wrote last */
    uint64_t writes[2];     /* without and with merging */
    Histogram *times[2];
} Writer;

struct Load {
    char *mem;
    size_t n;               /* pages in all */
    size_t equal;           /* pages of one half; the rest is hot */
    size_t run;             /* equal pages in a row ... */
    size_t period;          /* ... of so many; divides a chunk */
    int threads;
    uint64_t pause_ns;      /* between timed writes of a writer */
    Writer writers[MAX_THREADS];
    int phase;              /* 0: without, 1: with merging; atomic */
    int stop;               /* atomic */
};

static unsigned bucket(uint64_t ns)
{
    int top = ns < 16 ? 0 : 63 - __builtin_clzll(ns) - 4;

    return MIN(top * 16 + (ns >> top), BUCKETS - 1);
}

static uint64_t bucket_ns(unsigned i)
{
    return i < 32 ? i : (UINT64_C(16) + i % 16) << (i / 16 - 1);
}

static void record(Histogram *h, uint64_t ns)
{
    h->count[bucket(ns)]++;
    h->max = MAX(h->max, ns);
}

static uint64_t percentile(const Histogram *h, double share)
{
    uint64_t all = 0, sum = 0;

    for (int i = 0; i < BUCKETS; i++) {
        all += h->count[i];
    }
    for (int i = 0; i < BUCKETS; i++) {
        sum += h->count[i];
        if (sum && sum >= all * share) {
            return MIN(bucket_ns(i + 1), h->max);
        }
    }
    return h->max;
}

/* The first word of a page: never written after the start. */
static uint64_t content(const Load *l, size_t page)
{
    if (page >= 2 * l->equal || page % l->period >= l->run) {
        return page + l->n;
    }
    return page % l->equal + 1;
}

static void prepare(Load *l, BenchPages pages)
{
    l->mem = bench_map(l->n * KSM_PAGE_SIZE, pages);
    /* whole periods and chunks */
    l->equal = l->n * 7 / 16 / 512 * 512;
    for (size_t i = 0; i < l->n; i++) {
        uint64_t *page = (uint64_t *)(l->mem + i * KSM_PAGE_SIZE);

        memset(page, 0x11, KSM_PAGE_SIZE);
        memset(page, 0, 8 * (MAX_THREADS + 1));
        page[0] = content(l, i);
    }
}

static void check(const Load *l)
{
    for (size_t i = 0; i < l->n; i++) {
        const uint64_t *page = (uint64_t *)(l->mem + i * KSM_PAGE_SIZE);

        if (page[0] != content(l, i) || page[511] != 0x1111111111111111) {
            bench_die("page %zu has changed", i);
        }
        for (int t = 0; t < l->threads; t++) {
            if (page[1 + t] != l->writers[t].shadow[i]) {
                bench_die("a write of thread %d to page %zu is lost", t, i);
            }
        }
    }
}

static void write_page(Writer *w, size_t page)
{
    uint64_t *p = (uint64_t *)(w->load->mem + page * KSM_PAGE_SIZE);

    __atomic_store_n(&p[1 + w->number], ++w->shadow[page], __ATOMIC_RELAXED);
}

static void *writer(void *opaque)
{
    Writer *w = opaque;
    Load *l = w->load;
    uint64_t seed = 88172645463325252 + w->number * 7919;
    uint64_t next = 0;
    size_t hot = 2 * l->equal;

    while (!__atomic_load_n(&l->stop, __ATOMIC_RELAXED)) {
        int phase = __atomic_load_n(&l->phase, __ATOMIC_RELAXED);
        uint64_t start, end;

        for (int i = 0; i < HOT_PER_COLD; i++) {
            write_page(w, hot + bench_random(&seed) % (l->n - hot));
        }
        w->writes[phase] += HOT_PER_COLD;
        start = bench_now_ns();
        if (start < next) {
            continue;
        }
        write_page(w, bench_random(&seed) % hot);
        end = bench_now_ns();
        record(w->times[phase], end - start);
        w->writes[phase]++;
        next = end + w->load->pause_ns;
    }
    return NULL;
}

static void start_writers(Load *l)
{
    for (int t = 0; t < l->threads; t++) {
        Writer *w = &l->writers[t];

        w->load = l;
        w->number = t;
        w->shadow = g_new0(uint32_t, l->n);
        w->times[0] = g_new0(Histogram, 1);
        w->times[1] = g_new0(Histogram, 1);
        if (pthread_create(&w->thread, NULL, writer, w)) {
            bench_die("cannot start a thread");
        }
    }
}

static void stop_writers(Load *l)
{
    __atomic_store_n(&l->stop, 1, __ATOMIC_RELAXED);
    for (int t = 0; t < l->threads; t++) {
        pthread_join(l->writers[t].thread, NULL);
    }
}

static void report_writers(const Load *l, const double *seconds)
{
    Histogram sum[2] = { 0 };
    double writes[2] = { 0 };

    for (int phase = 0; phase < 2; phase++) {
        for (int t = 0; t < l->threads; t++) {
            const Histogram *h = l->writers[t].times[phase];

            for (int i = 0; i < BUCKETS; i++) {
                sum[phase].count[i] += h->count[i];
            }
            sum[phase].max = MAX(sum[phase].max, h->max);
            writes[phase] += l->writers[t].writes[phase];
        }
    }
    bench_metric("write_throughput_ratio", writes[1] / seconds[1] /
                                           (writes[0] / seconds[0]));
    bench_metric("stall_off_p50_ns", percentile(&sum[0], 0.5));
    bench_metric("stall_off_p99_ns", percentile(&sum[0], 0.99));
    bench_metric("stall_off_max_ns", sum[0].max);
    bench_metric("stall_p50_ns", percentile(&sum[1], 0.5));
    bench_metric("stall_p99_ns", percentile(&sum[1], 0.99));
    bench_metric("stall_max_ns", sum[1].max);
}

/* Pages that merging can save without writers. */
static uint64_t achievable(const Load *l)
{
    return l->equal / l->period * l->run;
}

static void run_engine(Load *l, const Bench *b)
{
    KsmEngine *engine = bench_engine(KSM_FREE_AUTO, true);
    uint64_t target = achievable(l) * 85 / 100;
    double seconds[2], off = bench_arg(b, "off_seconds", 3);
    uint64_t start = bench_now_ns();
    bool reached;
    KsmStats stats;

    ksm_engine_set_max_cpu(engine, bench_arg(b, "max_cpu", 10));
    g_usleep(off * 1e6);
    seconds[0] = (bench_now_ns() - start) / 1e9;
    __atomic_store_n(&l->phase, 1, __ATOMIC_RELAXED);
    start = bench_now_ns();
    bench_add(engine, l->mem, l->n * KSM_PAGE_SIZE, NULL, NULL);
    reached = bench_step_until(engine, bench_saved, &target,
                               bench_arg(b, "seconds", 30));
    seconds[1] = (bench_now_ns() - start) / 1e9;
    stop_writers(l);
    ksm_engine_get_stats(engine, &stats);
    report_writers(l, seconds);
    bench_metric("seconds", seconds[1]);
    bench_metric("reached", reached);
    bench_metric("saved_share",
                 (double)stats.pages_sharing / achievable(l));
    bench_metric("isolation_count", stats.stall_count);
    bench_metric("isolation_p50_ns", stats.stall_p50);
    bench_metric("isolation_p99_ns", stats.stall_p99);
    bench_metric("isolation_max_ns", stats.stall_max);
    bench_metric("huge_split", stats.huge_split);
    for (int i = 0; !reached && i < KSM_REASON_MAX; i++) {
        if (stats.reasons[i]) {
            bench_progress("%s: %" G_GUINT64_FORMAT " pages",
                           ksm_reason_name(i), stats.reasons[i]);
        }
    }
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    Load l = {
        .n = bench_arg(&b, "mib", 512) << 8,
        .threads = MIN(bench_arg(&b, "threads", 1), MAX_THREADS),
        .run = bench_arg(&b, "run", 24),
        .period = bench_arg(&b, "period", 32),
        /* by default some percent of a run's pages are written */
        .pause_ns = 1000000000 / bench_arg(&b, "timed_per_s", 500),
    };

    prepare(&l, bench_arg(&b, "huge", 0) ? BENCH_HUGE_PAGES
                                         : BENCH_SMALL_PAGES);
    start_writers(&l);
    run_engine(&l, &b);
    check(&l);
    return 0;
}
