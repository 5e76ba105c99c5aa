/*
 * Bench shuffle: guests that have aged, by ksmd alone and with us before it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The RAM images image=FILE, each in a process of its own, are read with their
 * blocks of block=N pages in a random order, another one for each: the runs that
 * files left are gone.  What is equal is merged by members of the group at
 * socket=PATH, which leave to ksmd what stands alone, or by ksmd alone; until
 * nothing more is gained for still=S seconds.  Then all pages are held against
 * the images.  CPU counts until 98 % of goal=PAGES is saved (default: of what is
 * in the end).
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "image.h"

#define MAX_IMAGES  8
#define LIMIT_NS    UINT64_C(400000000000)
#define SAMPLE_NS   UINT64_C(50000000)

typedef struct Sample {
    uint64_t saved, own, ns, cpu_ns;    /* pages, of them not by ksmd */
} Sample;

/* What a process tells the one that measures. */
typedef struct Guest {
    pid_t pid;
    uint32_t ready;
    uint64_t pooled;        /* pages that are the pool's */
    uint64_t zero;          /* pages */
    uint64_t cpu_ns;
    uint64_t left;          /* bytes */
    uint64_t passes, runs;
    uint64_t scan_ns, merge_ns, isolations;
    uint64_t reasons[KSM_REASON_MAX];
} Guest;

typedef struct Shared {
    uint32_t go, stop;
    Guest guest[MAX_IMAGES];
} Shared;

typedef struct Run {
    const char *socket;     /* NULL: ksmd alone */
    unsigned n;
    BenchImage image[MAX_IMAGES];
    Shared *shared;
    uint64_t began, others;
    uint64_t counted;       /* ksmd's pages_sharing before */
    GArray *samples;
} Run;

static uint64_t load(const uint64_t *p)
{
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

static void store(uint64_t *p, uint64_t value)
{
    __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

static KsmEngine *member_new(const char *socket)
{
    g_autoptr(GError) error = NULL;
    KsmConfig config;
    KsmEngine *engine;

    ksm_config_init(&config);
    config.scope = KSM_SCOPE_GROUP;
    config.group = "bench";
    config.group_socket = socket;
    config.max_cpu = 100;
    config.tail = true;
    engine = ksm_engine_new(&config, &error);
    if (!engine) {
        fprintf(stderr, "no engine: %s\n", error->message);
        _exit(BENCH_EXIT_LACKING);
    }
    return engine;
}

/* @cpu: what is not the engine's; what asking takes is not. */
static void guest_tell(Guest *g, KsmEngine *engine, uint64_t *cpu)
{
    uint64_t asked = bench_thread_cpu_ns();
    KsmStats stats;

    ksm_engine_get_stats(engine, &stats);
    *cpu += bench_thread_cpu_ns() - asked;
    store(&g->pooled, stats.pages_shared + stats.pages_sharing);
    store(&g->zero, stats.zero_pages);
    store(&g->cpu_ns, bench_thread_cpu_ns() - *cpu);
    store(&g->left, stats.kernel_left);
    store(&g->passes, stats.full_scans);
    store(&g->runs, stats.merged_runs);
    store(&g->scan_ns, stats.scan_time);
    store(&g->merge_ns, stats.merge_time);
    store(&g->isolations, stats.isolations);
    for (int i = 0; i < KSM_REASON_MAX; i++) {
        store(&g->reasons[i], stats.reasons[i]);
    }
}

static bool is_over(const Shared *shared)
{
    return __atomic_load_n(&shared->stop, __ATOMIC_RELAXED);
}

static void member_run(const Run *r, const BenchImage *image, Guest *g)
{
    uint64_t cpu = bench_thread_cpu_ns(), told = 0;
    KsmEngine *engine = member_new(r->socket);

    bench_add(engine, image->mem, image->len, NULL, NULL);
    while (!is_over(r->shared)) {
        int64_t wait = ksm_step(engine, 0);
        uint64_t now = bench_now_ns();

        if (now - told >= 2 * SAMPLE_NS) {
            guest_tell(g, engine, &cpu);
            told = now;
        }
        if (wait) {
            g_usleep(wait < 0 ? 1000 : MIN(wait / 1000, 5000));
        }
    }
}

static void guest_main(const Run *r, unsigned i)
{
    BenchImage image = r->image[i];
    Guest *g = &r->shared->guest[i];

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    image_shuffle(&image, i + 1);
    image_load(&image, BENCH_SMALL_PAGES);
    if (madvise(image.mem, image.len, MADV_DONTFORK)) {
        bench_die("MADV_DONTFORK: %s", strerror(errno));
    }
    __atomic_store_n(&g->ready, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&r->shared->go, __ATOMIC_ACQUIRE)) {
        g_usleep(1000);
    }
    if (r->socket) {
        member_run(r, &image, g);
    } else {
        bench_ksmd_offer(image.mem, image.len);
        while (!is_over(r->shared)) {
            g_usleep(5000);
        }
    }
    image_check(&image);
    _exit(0);
}

/*
 * Where the host is a guest itself what it touches first costs more: neither the
 * pool nor the images are to be that.
 */
static void memory_warm(const Run *r)
{
    size_t len = r->image[0].len;
    char *mem;

    for (unsigned i = 0; i < r->n; i++) {
        len += r->image[i].len;
    }
    mem = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
               -1, 0);
    if (mem == MAP_FAILED) {
        bench_die("mmap: %s", strerror(errno));
    }
    memset(mem, 1, len);
    munmap(mem, len);
}

static void guests_start(Run *r)
{
    for (unsigned i = 0; i < r->n; i++) {
        pid_t pid = fork();

        if (pid < 0) {
            bench_die("fork: %s", strerror(errno));
        }
        if (!pid) {
            guest_main(r, i);
        }
        /* by the parent alone: the child shares this memory */
        r->shared->guest[i].pid = pid;
    }
    for (unsigned i = 0; i < r->n; i++) {
        Guest *g = &r->shared->guest[i];

        while (!__atomic_load_n(&g->ready, __ATOMIC_ACQUIRE)) {
            if (waitpid(g->pid, NULL, WNOHANG)) {
                bench_die("process %u ended", i);
            }
            g_usleep(1000);
        }
    }
}

static void guests_end(Run *r)
{
    __atomic_store_n(&r->shared->stop, 1, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < r->n; i++) {
        int status;

        if (waitpid(r->shared->guest[i].pid, &status, 0) < 0) {
            bench_die("process %u cannot be waited for: %s", i,
                      strerror(errno));
        }
        if (WIFEXITED(status) && WEXITSTATUS(status) == BENCH_EXIT_LACKING) {
            exit(BENCH_EXIT_LACKING);
        }
        if (status) {
            bench_die("process %u ended with status 0x%x", i, status);
        }
    }
}

static uint64_t guests_sum(const Run *r, size_t offset)
{
    uint64_t sum = 0;

    for (unsigned i = 0; i < r->n; i++) {
        sum += load((void *)((char *)&r->shared->guest[i] + offset));
    }
    return sum;
}

#define GUESTS_SUM(r, field) guests_sum(r, G_STRUCT_OFFSET(Guest, field))

static Sample sample(const Run *r)
{
    Sample s = { .ns = bench_now_ns() - r->began };

    /* what is ksmd's the engine only estimates */
    s.saved = bench_ksmd_counter("pages_sharing") - r->counted;
    if (r->socket) {
        /* before the pages: what is made meanwhile is not counted twice */
        uint64_t slots = bench_ask("driven slots");
        uint64_t pooled = GUESTS_SUM(r, pooled);

        s.own = pooled - MIN(pooled, slots) + GUESTS_SUM(r, zero);
        s.saved += s.own;
        s.cpu_ns = GUESTS_SUM(r, cpu_ns) + bench_ask("driven cpu") - r->others;
    } else {
        s.cpu_ns = bench_ask("ksmd cpu") - r->others;
    }
    return s;
}

static void measure(Run *r, uint64_t still_ns)
{
    Sample best = { 0 }, s = { 0 };

    while (s.ns < LIMIT_NS && s.ns - best.ns < still_ns) {
        g_usleep(SAMPLE_NS / 1000);
        s = sample(r);
        g_array_append_val(r->samples, s);
        /* it creeps for long: a thousandth counts */
        if (s.saved > best.saved + best.saved / 1000) {
            best = s;
            bench_progress("%.0f s, %.0f MiB", s.ns / 1e9, s.saved / 256.0);
        }
        if (!best.saved && s.ns < 60000000000) {
            best.ns = s.ns;
        }
    }
}

static void report(const Run *r, uint64_t goal)
{
    const Sample *last =
        &g_array_index(r->samples, Sample, r->samples->len - 1);

    goal = goal ? goal : last->saved;
    bench_metric("saved_pages", last->saved);
    bench_metric("saved_mib", last->saved / 256.0);
    bench_metric("cpu_end", last->cpu_ns / 1e9);
    for (guint i = 0; i < r->samples->len; i++) {
        const Sample *s = &g_array_index(r->samples, Sample, i);

        if (s->saved >= goal * 98 / 100) {
            bench_metric("cpu_98", s->cpu_ns / 1e9);
            bench_metric("seconds_98", s->ns / 1e9);
            break;
        }
    }
    if (!r->socket) {
        return;
    }
    bench_metric("own_mib", last->own / 256.0);
    bench_metric("own_cpu", GUESTS_SUM(r, cpu_ns) / 1e9);
    bench_metric("left_mib", GUESTS_SUM(r, left) / 1048576.0);
    bench_metric("passes", GUESTS_SUM(r, passes) / r->n);
    bench_metric("runs", GUESTS_SUM(r, runs));
    bench_metric("scan_cpu", GUESTS_SUM(r, scan_ns) / 1e9);
    bench_metric("merge_cpu", GUESTS_SUM(r, merge_ns) / 1e9);
    bench_metric("isolations", GUESTS_SUM(r, isolations));
    for (int i = 0; i < KSM_REASON_MAX; i++) {
        uint64_t pages = GUESTS_SUM(r, reasons[i]);

        if (pages) {
            bench_progress("%s: %" G_GUINT64_FORMAT " pages",
                           ksm_reason_name(i), pages);
        }
    }
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    unsigned block = bench_arg(&b, "block", 1);
    Run run = {
        .socket = bench_arg_str(&b, "socket", NULL),
        .samples = g_array_new(false, false, sizeof(Sample)),
    };

    run.shared = mmap(NULL, sizeof(*run.shared), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (run.shared == MAP_FAILED) {
        bench_die("mmap: %s", strerror(errno));
    }
    for (int i = 1; i < argc && run.n < MAX_IMAGES; i++) {
        if (g_str_has_prefix(argv[i], "image=")) {
            image_open(&run.image[run.n++], argv[i] + strlen("image="), block);
        }
    }
    if (!run.n) {
        bench_die("no image=FILE");
    }
    memory_warm(&run);
    guests_start(&run);
    run.counted = bench_ksmd_counter("pages_sharing");
    run.others = bench_ask(run.socket ? "driven cpu" : "ksmd start");
    run.began = bench_now_ns();
    __atomic_store_n(&run.shared->go, 1, __ATOMIC_RELEASE);
    measure(&run, bench_arg(&b, "still", 15) * 1000000000);
    report(&run, bench_arg(&b, "goal", 0));
    guests_end(&run);
    return 0;
}
