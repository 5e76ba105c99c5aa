/*
 * Benches of libksm: what the workers share
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A worker prepares memory, has it merged by libksm or by the kernel's ksmd,
 * measures, checks the contents and prints figures.  It speaks lines with
 * scripts/lib/bench/harness.py: "progress TEXT", "metric NAME NUMBER", and
 * "ask WORDS", upon which it waits for "ok NUMBER".  That script does what
 * needs rights on the machine (KSM's knobs, cgroups), and combines runs.
 */
#ifndef KSM_BENCH_H
#define KSM_BENCH_H

#include "libksm.h"

/* Of a worker, as of all scripts: the machine lacks something. */
#define BENCH_EXIT_LACKING 3

/* NAME=VALUE arguments of the command line. */
typedef struct Bench {
    int argc;
    char **argv;
} Bench;

/* Prints the error and exits: a bench has nothing to clean up. */
void bench_die(const char *fmt, ...) G_GNUC_PRINTF(1, 2) G_GNUC_NORETURN;

/* The argument's value, or @fallback. */
uint64_t bench_arg(const Bench *b, const char *name, uint64_t fallback);
const char *bench_arg_str(const Bench *b, const char *name,
                          const char *fallback);

void bench_progress(const char *fmt, ...) G_GNUC_PRINTF(1, 2);
void bench_metric(const char *name, double value);

/* Asks the script for something, as "ksmd start"; its number. */
int64_t bench_ask(const char *what);

uint64_t bench_now_ns(void);
uint64_t bench_thread_cpu_ns(void);
uint64_t bench_process_cpu_ns(void);

/* Cheap, good enough random numbers; @state not 0. */
static inline uint64_t bench_random(uint64_t *state)
{
    uint64_t x = *state;

    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    *state = x;
    return x;
}

typedef enum BenchPages {
    BENCH_SMALL_PAGES,
    BENCH_HUGE_PAGES,
} BenchPages;

/* Private anonymous memory, aligned to a chunk, not yet touched. */
char *bench_map(size_t len, BenchPages pages);

/* An engine with a whole core; dies where there can be none. */
KsmEngine *bench_engine(KsmFreePolicy free_policy, bool smart_scan);
/* It has so many threads, and a core for each. */
void bench_threads(KsmEngine *engine, unsigned threads);
KsmRegion *bench_add(KsmEngine *engine, void *addr, size_t len,
                     const KsmRegionOps *ops, void *opaque);

typedef bool BenchDone(const KsmStats *stats, void *opaque);

/*
 * Steps the engine until @done; false after @seconds.  The first steps as it
 * asks to be called, with budget and pauses; the second at full speed, as ksmd
 * without sleep.
 */
bool bench_step_until(KsmEngine *engine, BenchDone *done, void *opaque,
                      double seconds);
bool bench_rush_until(KsmEngine *engine, BenchDone *done, void *opaque,
                      double seconds);

/*
 * A BenchDone: *(uint64_t *)opaque pages are saved (zero pages count, shared
 * ones do not).
 */
bool bench_saved(const KsmStats *stats, void *opaque);
/* A BenchDone: *(uint64_t *)opaque full_scans. */
bool bench_scanned(const KsmStats *stats, void *opaque);
/* ... that hashed so many pages. */
bool bench_hashed(const KsmStats *stats, void *opaque);

/*
 * Pages of this process merged by ksmd, with first copies; dies where the
 * kernel does not tell.
 */
uint64_t bench_ksmd_merged(void);
/* Waits until that is @pages, false after @seconds. */
bool bench_ksmd_wait(uint64_t pages, double seconds);
void bench_ksmd_offer(void *addr, size_t len);
/* The kernel's counter /sys/kernel/mm/ksm/NAME. */
uint64_t bench_ksmd_counter(const char *name);

/* Resident bytes of this process, less what is freed lazily. */
typedef struct BenchMemory {
    uint64_t rss;
    uint64_t lazy;
} BenchMemory;

BenchMemory bench_memory(void);

#endif
