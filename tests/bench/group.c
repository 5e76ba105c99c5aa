/*
 * Bench group: processes with the same memory, merged by a group's members
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * processes=N processes of mib=M; shared=P percent of the pages are the same in
 * all of them, in runs as files leave them, the others are in none.  Merged by
 * members of the group at socket=PATH, or by ksmd.  Time and CPU count from
 * when all have their memory until 95 % of what can be saved is, and until the
 * end: all of it is, or nothing more for six seconds; then each process holds
 * all its pages against what it wrote.  With rest=S the daemon's memory counts,
 * so many seconds after the end: it keeps what it needed a moment ago.
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

#include "bench.h"

#define PROCESSES_MAX   64u
#define RUN_PAGES       48u     /* of a file, say */
#define TIMEOUT_NS      UINT64_C(120000000000)
#define STILL_NS        UINT64_C(6000000000)    /* more than between passes */

typedef struct Child {
    pid_t pid;
    uint32_t ready, bad;
    uint64_t merged;        /* pages that are the pool's */
    uint64_t cpu_ns;
} Child;

typedef struct Shared {
    uint32_t go, stop;
    Child child[PROCESSES_MAX];
} Shared;

typedef struct Setup {
    unsigned processes, percent, max_cpu;
    size_t pages;
    const char *socket;     /* NULL: ksmd */
    unsigned rest;          /* s; 0: the daemon's memory is not asked for */
} Setup;

static uint64_t load(const uint64_t *p)
{
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

/* Is the page the same in all? */
static bool is_shared(const Setup *s, size_t page)
{
    uint64_t state = page / RUN_PAGES * UINT64_C(0x9e3779b97f4a7c15) + 1;

    bench_random(&state);
    return bench_random(&state) % 100 < s->percent;
}

static uint64_t seed_of(const Setup *s, unsigned number, size_t page)
{
    uint64_t owner = is_shared(s, page) ? 0 : number + 1;

    return (page + 1) * UINT64_C(0x9e3779b97f4a7c15) ^ (owner << 56);
}

static void page_fill(uint64_t *to, uint64_t seed)
{
    for (unsigned i = 0; i < KSM_PAGE_SIZE / 8; i++) {
        to[i] = bench_random(&seed);
    }
}

static bool page_is(const uint64_t *page, uint64_t seed)
{
    uint64_t expected[KSM_PAGE_SIZE / 8];

    page_fill(expected, seed);
    return !memcmp(page, expected, KSM_PAGE_SIZE);
}

static KsmEngine *member_new(const Setup *s)
{
    g_autoptr(GError) error = NULL;
    KsmConfig config;
    KsmEngine *engine;

    ksm_config_init(&config);
    config.scope = KSM_SCOPE_GROUP;
    config.group = "bench";
    config.group_socket = s->socket;
    config.max_cpu = s->max_cpu;
    engine = ksm_engine_new(&config, &error);
    if (!engine) {
        fprintf(stderr, "no engine: %s\n", error->message);
        _exit(BENCH_EXIT_LACKING);
    }
    return engine;
}

static void member_run(const Setup *s, Shared *shared, Child *c, char *mem)
{
    uint64_t cpu = bench_thread_cpu_ns();
    KsmEngine *engine = member_new(s);

    if (madvise(mem, s->pages * KSM_PAGE_SIZE, MADV_DONTFORK)) {
        bench_die("MADV_DONTFORK: %s", strerror(errno));
    }
    bench_add(engine, mem, s->pages * KSM_PAGE_SIZE, NULL, NULL);
    while (!__atomic_load_n(&shared->stop, __ATOMIC_RELAXED)) {
        int64_t wait = ksm_step(engine, 0);
        KsmStats stats;

        ksm_engine_get_stats(engine, &stats);
        __atomic_store_n(&c->merged, stats.pages_sharing + stats.pages_shared,
                         __ATOMIC_RELAXED);
        __atomic_store_n(&c->cpu_ns, bench_thread_cpu_ns() - cpu,
                         __ATOMIC_RELAXED);
        if (wait) {
            g_usleep(wait < 0 ? 1000 : MIN(wait / 1000, 20000));
        }
    }
}

static void ksmd_run(const Setup *s, Shared *shared, char *mem)
{
    bench_ksmd_offer(mem, s->pages * KSM_PAGE_SIZE);
    while (!__atomic_load_n(&shared->stop, __ATOMIC_RELAXED)) {
        g_usleep(5000);
    }
}

static void child_main(const Setup *s, Shared *shared, unsigned number)
{
    Child *c = &shared->child[number];
    char *mem = bench_map(s->pages * KSM_PAGE_SIZE, BENCH_SMALL_PAGES);

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (size_t i = 0; i < s->pages; i++) {
        page_fill((uint64_t *)(mem + i * KSM_PAGE_SIZE), seed_of(s, number, i));
    }
    __atomic_store_n(&c->ready, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&shared->go, __ATOMIC_ACQUIRE)) {
        g_usleep(1000);
    }
    if (s->socket) {
        member_run(s, shared, c, mem);
    } else {
        ksmd_run(s, shared, mem);
    }
    for (size_t i = 0; i < s->pages; i++) {
        c->bad += !page_is((uint64_t *)(mem + i * KSM_PAGE_SIZE),
                           seed_of(s, number, i));
    }
    _exit(0);
}

static void start(const Setup *s, Shared *shared)
{
    for (unsigned i = 0; i < s->processes; i++) {
        pid_t pid = fork();

        if (pid < 0) {
            bench_die("fork: %s", strerror(errno));
        }
        if (!pid) {
            child_main(s, shared, i);
        }
        /* by the parent alone: the child shares this memory */
        shared->child[i].pid = pid;
    }
    for (unsigned i = 0; i < s->processes; i++) {
        while (!__atomic_load_n(&shared->child[i].ready, __ATOMIC_ACQUIRE)) {
            g_usleep(1000);
        }
    }
}

/* What the pages that are shared no longer take, in pages. */
static uint64_t saved(const Setup *s, Shared *shared, uint64_t slots)
{
    uint64_t merged = 0;

    if (!s->socket) {
        return bench_ksmd_counter("pages_sharing");
    }
    for (unsigned i = 0; i < s->processes; i++) {
        merged += load(&shared->child[i].merged);
    }
    /* until all have mapped them some are only the pool's */
    return merged > slots ? merged - slots : 0;
}

static double members_cpu(const Setup *s, Shared *shared)
{
    uint64_t ns = 0;

    for (unsigned i = 0; i < s->processes; i++) {
        ns += load(&shared->child[i].cpu_ns);
    }
    return ns / 1e9;
}

typedef struct Cpu {
    double members, daemon;
} Cpu;

static Cpu cpu_now(const Setup *s, Shared *shared, uint64_t before)
{
    return (Cpu) {
        .members = s->socket ? members_cpu(s, shared) : 0,
        .daemon = (bench_ask(s->socket ? "daemon cpu" : "ksmd cpu") -
                   before) / 1e9,
    };
}

static void cpu_report(const char *when, Cpu cpu)
{
    g_autofree char *all = g_strdup_printf("cpu_%s", when);
    g_autofree char *daemon = g_strdup_printf("daemon_cpu_%s", when);

    bench_metric(all, cpu.members + cpu.daemon);
    bench_metric(daemon, cpu.daemon);
}

static void measure(const Setup *s, Shared *shared, uint64_t all,
                    uint64_t slots)
{
    uint64_t empty = s->socket ? bench_ask("daemon tables") : 0;
    uint64_t before = bench_ask(s->socket ? "daemon cpu" : "ksmd start");
    uint64_t began = bench_now_ns(), now = began, changed = began;
    uint64_t have = 0, was = 0;
    bool most = false;

    __atomic_store_n(&shared->go, 1, __ATOMIC_RELEASE);
    while ((!all || have < all) && now - began < TIMEOUT_NS &&
           now - changed < STILL_NS) {
        g_usleep(5000);
        now = bench_now_ns();
        have = saved(s, shared, slots);
        if (have > was) {
            was = have;
            changed = now;
        }
        if (!have) {
            changed = now - began < 2 * STILL_NS ? now : changed;
        }
        if (!most && all && have >= all * 95 / 100) {
            most = true;
            bench_metric("seconds_95", (now - began) / 1e9);
            cpu_report("95", cpu_now(s, shared, before));
        }
    }
    bench_metric("saved_mib", have / 256.0);
    bench_metric("achievable_mib", all / 256.0);
    if (all) {
        bench_metric("saved_fraction", (double)have / all);
    }
    cpu_report("end", cpu_now(s, shared, before));
    if (s->socket && slots && s->rest) {
        uint64_t tables;

        g_usleep(s->rest * G_USEC_PER_SEC);
        tables = bench_ask("daemon tables");

        bench_metric("daemon_empty_kib", empty / 1024.0);
        tables -= MIN(tables, empty);
        bench_metric("daemon_bytes_per_page", (double)tables / slots);
        /* what nobody else has was asked about, too, and is remembered */
        bench_metric("daemon_bytes_per_content", (double)tables /
                     (slots + (s->pages - slots) * s->processes));
    }
}

static void finish(const Setup *s, Shared *shared)
{
    __atomic_store_n(&shared->stop, 1, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < s->processes; i++) {
        Child *c = &shared->child[i];
        int status;

        if (waitpid(c->pid, &status, 0) < 0) {
            bench_die("process %u cannot be waited for: %s", i,
                      strerror(errno));
        }
        if (status) {
            if (WEXITSTATUS(status) == BENCH_EXIT_LACKING) {
                exit(BENCH_EXIT_LACKING);
            }
            bench_die("process %u ended with status 0x%x", i, status);
        }
        if (c->bad) {
            bench_die("process %u: %u pages have changed", i, c->bad);
        }
    }
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    Setup s = {
        .processes = bench_arg(&b, "processes", 2),
        .percent = bench_arg(&b, "shared", 50),
        .max_cpu = bench_arg(&b, "max_cpu", 10),
        .pages = bench_arg(&b, "mib", 64) << 8,
        .rest = bench_arg(&b, "rest", 0),
        .socket = bench_arg_str(&b, "socket", NULL),
    };
    uint64_t slots = 0;
    Shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (!s.processes || s.processes > PROCESSES_MAX || shared == MAP_FAILED) {
        bench_die("processes=1 to %u", PROCESSES_MAX);
    }
    for (size_t i = 0; i < s.pages; i++) {
        slots += is_shared(&s, i);
    }
    slots = s.processes > 1 ? slots : 0;
    start(&s, shared);
    measure(&s, shared, slots * (s.processes - 1), slots);
    finish(&s, shared);
    return 0;
}
