/*
 * Bench balloon: memory that is taken, given back and taken again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The question of the MADV_FREE table of 2014 (ebizzy), asked of libksm's free
 * hint: processes x threads, each thread fills a block of its share and gives
 * it back; blocks per second by policy=lazy|eager|auto, or plain: by
 * madvise(MADV_DONTNEED) without an engine, as QEMU does.  Memory pressure is a
 * memcg limit, which the script sets after "ask cgroup".  mode=reclaim: all is
 * filled and given back, then the script has the kernel reclaim it.
 *
 * Checks that free memory reads as before or as zeroes, and that writes stay.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#include "bench.h"

#define BLOCK (64 * KSM_PAGE_SIZE)
#define MAX_THREADS 64

typedef struct Shared {
    int ready;              /* threads that touched all their memory */
    int start;
    int stop;
    uint64_t blocks;
    uint64_t cpu_ns;        /* for them, the engine's included */
} Shared;

typedef struct Process {
    Shared *shared;
    KsmEngine *engine;      /* NULL: plain */
    KsmRegion *region;
    char *mem;
    size_t share;           /* bytes of each thread */
    int threads;
    bool uniform;           /* any block is as likely to be taken */
} Process;

typedef struct Thread {
    Process *process;
    pthread_t thread;
    int number;
    uint8_t *last;          /* per block: what it was filled with */
} Thread;

static KsmFreePolicy policy(const Bench *b)
{
    const char *name = bench_arg_str(b, "policy", "auto");

    return !strcmp(name, "lazy") ? KSM_FREE_LAZY
         : !strcmp(name, "eager") ? KSM_FREE_EAGER : KSM_FREE_AUTO;
}

static int give_block(Process *p, size_t offset)
{
    if (p->engine) {
        return ksm_free_hint(p->region, offset, BLOCK);
    }
    return madvise(p->mem + offset, BLOCK, MADV_DONTNEED) ? -errno : 0;
}

static void fill_block(Thread *t, size_t block, uint8_t value)
{
    Process *p = t->process;
    size_t offset = t->number * p->share + block * BLOCK;
    char *at = p->mem + offset;
    int error;

    memset(at, value, BLOCK);
    for (size_t i = KSM_PAGE_SIZE - 1; i < BLOCK; i += KSM_PAGE_SIZE) {
        if (__atomic_load_n((uint8_t *)at + i, __ATOMIC_RELAXED) != value) {
            bench_die("a written page was lost");
        }
    }
    t->last[block] = value;
    error = give_block(p, offset);
    if (error) {
        bench_die("a block cannot be given back: %s", strerror(-error));
    }
}

/* Each page holds the old bytes or zeroes, nothing between. */
static void check(const Thread *t)
{
    Process *p = t->process;

    for (size_t block = 0; block < p->share / BLOCK; block++) {
        const char *at = p->mem + t->number * p->share + block * BLOCK;

        for (size_t i = 0; i < BLOCK; i += KSM_PAGE_SIZE) {
            const char *page = at + i;

            if ((*page && (uint8_t)*page != t->last[block]) ||
                memcmp(page, page + 1, KSM_PAGE_SIZE - 1)) {
                bench_die("block %zu is neither old nor zero", block);
            }
        }
    }
}

/*
 * Which block is taken next.  Allocators prefer what came back last, still
 * cached, and seldom need all: half of the time it is in the first sixteenth.
 * reuse=uniform: any.
 */
static size_t choose_block(const Process *p, uint64_t *seed)
{
    double at = (double)(bench_random(seed) >> 11) / (UINT64_C(1) << 53);

    if (!p->uniform) {
        at *= at;
        at *= at;
    }
    return at * (p->share / BLOCK);
}

static void *work(void *opaque)
{
    Thread *t = opaque;
    Process *p = t->process;
    uint64_t seed = 88172645463325252 + t->number * 7919 + getpid();
    uint64_t blocks = 0, cpu;

    /* the very first touch does not count */
    for (size_t block = 0; block < p->share / BLOCK; block++) {
        fill_block(t, block, 1);
    }
    __atomic_fetch_add(&p->shared->ready, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&p->shared->start, __ATOMIC_ACQUIRE)) {
        g_usleep(1000);
    }
    cpu = bench_thread_cpu_ns();
    while (!__atomic_load_n(&p->shared->stop, __ATOMIC_RELAXED)) {
        size_t block = choose_block(p, &seed);

        fill_block(t, block, 1 + blocks % 255);
        blocks++;
    }
    cpu = bench_thread_cpu_ns() - cpu;
    __atomic_fetch_add(&p->shared->blocks, blocks, __ATOMIC_RELAXED);
    __atomic_fetch_add(&p->shared->cpu_ns, cpu, __ATOMIC_RELAXED);
    check(t);
    return NULL;
}

static void *step(void *opaque)
{
    Process *p = opaque;
    uint64_t cpu = 0;
    bool started = false;

    while (!__atomic_load_n(&p->shared->stop, __ATOMIC_RELAXED)) {
        int64_t wait = ksm_step(p->engine, 0);

        if (!started && __atomic_load_n(&p->shared->start, __ATOMIC_ACQUIRE)) {
            started = true;
            cpu = bench_thread_cpu_ns();
        }
        g_usleep(wait < 0 ? 10000 : CLAMP(wait / 1000, 100, 100000));
    }
    cpu = started ? bench_thread_cpu_ns() - cpu : 0;
    __atomic_fetch_add(&p->shared->cpu_ns, cpu, __ATOMIC_RELAXED);
    return NULL;
}

static void process(const Bench *b, Shared *shared)
{
    Process p = {
        .shared = shared,
        .threads = MIN(bench_arg(b, "threads", 1), MAX_THREADS),
        .share = bench_arg(b, "mib", 32) << 20,
        .uniform = !strcmp(bench_arg_str(b, "reuse", "recent"), "uniform"),
    };
    Thread threads[MAX_THREADS] = { 0 };
    size_t len = p.threads * p.share;
    pthread_t stepper;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    p.mem = bench_map(len, bench_arg(b, "huge", 0) ? BENCH_HUGE_PAGES
                                                   : BENCH_SMALL_PAGES);
    if (strcmp(bench_arg_str(b, "policy", "auto"), "plain")) {
        p.engine = bench_engine(policy(b), true);
        ksm_engine_set_max_cpu(p.engine, 10);
        p.region = bench_add(p.engine, p.mem, len, NULL, NULL);
    }
    for (int i = 0; i < p.threads; i++) {
        threads[i].process = &p;
        threads[i].number = i;
        threads[i].last = g_malloc0(p.share / BLOCK);
        if (pthread_create(&threads[i].thread, NULL, work, &threads[i])) {
            bench_die("cannot start a thread");
        }
    }
    if (p.engine && pthread_create(&stepper, NULL, step, &p)) {
        bench_die("cannot start a thread");
    }
    for (int i = 0; i < p.threads; i++) {
        pthread_join(threads[i].thread, NULL);
    }
    if (p.engine) {
        pthread_join(stepper, NULL);
    }
    exit(0);
}

static void run_rate(const Bench *b)
{
    int n = bench_arg(b, "processes", 1);
    int threads = MIN(bench_arg(b, "threads", 1), MAX_THREADS);
    double seconds = bench_arg(b, "ms", 2000) / 1e3;
    Shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t start;

    if (shared == MAP_FAILED) {
        bench_die("mmap: %s", strerror(errno));
    }
    for (int i = 0; i < n; i++) {
        pid_t pid = fork();

        if (pid == 0) {
            process(b, shared);
        } else if (pid < 0) {
            bench_die("fork: %s", strerror(errno));
        }
    }
    while (__atomic_load_n(&shared->ready, __ATOMIC_ACQUIRE) < n * threads) {
        g_usleep(1000);
        if (waitpid(-1, NULL, WNOHANG) > 0) {
            bench_die("a process has failed");
        }
    }
    __atomic_store_n(&shared->start, 1, __ATOMIC_RELEASE);
    start = bench_now_ns();
    g_usleep(seconds * 1e6);
    __atomic_store_n(&shared->stop, 1, __ATOMIC_RELAXED);
    seconds = (bench_now_ns() - start) / 1e9;
    for (int i = 0; i < n; i++) {
        int status;

        if (wait(&status) < 0 || status) {
            bench_die("a process has failed (status 0x%x)", status);
        }
    }
    bench_metric("blocks_per_s", shared->blocks / seconds);
    bench_metric("cpu_us_per_block", shared->cpu_ns / 1e3 / shared->blocks);
}

static void run_reclaim(const Bench *b)
{
    Shared shared = { 0 };
    Process p = { .shared = &shared, .threads = 1 };
    Thread t = { .process = &p };
    BenchMemory full, freed, after;

    p.share = bench_arg(b, "mib", 256) << 20;
    p.mem = bench_map(p.share, BENCH_SMALL_PAGES);
    p.engine = bench_engine(policy(b), true);
    p.region = bench_add(p.engine, p.mem, p.share, NULL, NULL);
    t.last = g_malloc0(p.share / BLOCK);
    memset(p.mem, 0xff, p.share);
    full = bench_memory();
    for (size_t block = 0; block < p.share / BLOCK; block++) {
        fill_block(&t, block, 1 + block % 255);
    }
    freed = bench_memory();
    bench_ask("cgroup reclaim");
    after = bench_memory();
    check(&t);
    bench_metric("resident_mib", full.rss / 1048576.0);
    bench_metric("lazy_mib", freed.lazy / 1048576.0);
    bench_metric("attributed_drop_mib",
                 ((double)full.rss - (freed.rss - freed.lazy)) / 1048576.0);
    bench_metric("reclaimed_mib",
                 ((double)freed.rss - after.rss) / 1048576.0);
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };

    if (bench_arg(&b, "cgroup", 0)) {
        /* the script moves this process, children follow */
        bench_ask("cgroup join");
    }
    if (!strcmp(bench_arg_str(&b, "mode", "rate"), "rate")) {
        run_rate(&b);
    } else {
        run_reclaim(&b);
    }
    return 0;
}
