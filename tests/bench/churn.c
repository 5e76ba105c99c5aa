/*
 * Bench churn: memory that is written, freed and merged for hours
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A thread goes on writing runs of pages: of files, of which there are copies
 * elsewhere, what nothing is equal to, single words, zeroes given back.  The
 * engine merges meanwhile.  Each MOMENT what it saves, and what for, is told.
 * In the end, when all is quiet, that is compared with what a new engine makes
 * of the same memory.  Each page is checked before it is written again, and
 * all of them last.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "bench.h"

#define SEED        UINT64_C(0x9e3779b97f4a7c15)
#define WORDS       (KSM_PAGE_SIZE / sizeof(uint64_t))
#define RUN_MAX     256u        /* pages; short ones are more often */
#define FILE_SHARE  4u          /* part of memory that the files would take */
#define QUIET_S     300u        /* nothing more is saved for so long: settled */
#define SETTLE_S    2400u       /* ... at most */

/* A page is its words, made from @id; the first is @stamp.  0, 0: zeroes. */
typedef struct Page {
    uint64_t id, stamp;
} Page;

typedef struct Churn {
    char *mem;
    size_t pages;
    Page *page;
    KsmEngine *engine;
    KsmRegion *region;
    uint64_t random, next_id;
    uint64_t files;         /* pages of all files */
    uint64_t per_second;    /* pages written, or given back */
    atomic_bool ends;
    uint64_t written;
} Churn;

static uint64_t word_of(uint64_t id, size_t k)
{
    uint64_t x = id * SEED + k * UINT64_C(0xd1342543de82ef95);

    return bench_random(&x);
}

static uint64_t *words_of(const Churn *c, size_t page)
{
    return (uint64_t *)(c->mem + page * KSM_PAGE_SIZE);
}

static void page_check(const Churn *c, size_t page)
{
    const uint64_t *word = words_of(c, page);
    const Page *p = &c->page[page];

    for (size_t k = 0; k < WORDS; k++) {
        uint64_t want = k ? p->id ? word_of(p->id, k) : 0 : p->stamp;

        if (word[k] != want) {
            bench_die("page %zu has changed at word %zu", page, k);
        }
    }
}

static void page_write(Churn *c, size_t page, uint64_t id)
{
    uint64_t *word = words_of(c, page);

    c->page[page] = (Page) { id, word_of(id, 0) };
    for (size_t k = 0; k < WORDS; k++) {
        word[k] = word_of(id, k);
    }
}

/* What a program does with some pages. */
static void run_churn(Churn *c, size_t first, size_t n)
{
    uint64_t at = bench_random(&c->random) % (c->files - RUN_MAX);
    unsigned what = bench_random(&c->random) % 100;

    for (size_t i = first; i < first + n; i++) {
        page_check(c, i);
    }
    if (what < 15) {
        if (ksm_discard(c->region, first * KSM_PAGE_SIZE,
                        n * KSM_PAGE_SIZE) < 0) {
            bench_die("pages could not be discarded");
        }
        memset(c->page + first, 0, n * sizeof(Page));
        return;
    }
    for (size_t i = first; i < first + n; i++) {
        if (what < 60) {
            page_write(c, i, 1 + at++);
        } else if (what < 85) {
            page_write(c, i, c->next_id++);
        } else {
            words_of(c, i)[0] = c->page[i].stamp = c->next_id++;
        }
    }
}

static void *churn_main(void *opaque)
{
    Churn *c = opaque;
    uint64_t start = bench_now_ns();

    while (!atomic_load(&c->ends)) {
        size_t n = 1 + bench_random(&c->random) % RUN_MAX;
        size_t first;

        n = 1 + bench_random(&c->random) % n;
        first = bench_random(&c->random) % (c->pages - n);
        run_churn(c, first, n);
        c->written += n;
        while (!atomic_load(&c->ends) &&
               c->written * 1e9 / c->per_second > bench_now_ns() - start) {
            g_usleep(1000);
        }
    }
    return NULL;
}

static void fill(Churn *c)
{
    for (size_t page = 0; page < c->pages;) {
        size_t n = MIN(RUN_MAX, c->pages - page);

        run_churn(c, page, n);
        page += n;
    }
}

static void check_all(const Churn *c)
{
    for (size_t i = 0; i < c->pages; i++) {
        page_check(c, i);
    }
}

/* --- what it is like --- */

/* Mappings of this process, and what its memory takes, pages counted once. */
static void process_ask(uint64_t *maps, uint64_t *pss)
{
    g_autofree char *text = NULL, *rollup = NULL;
    const char *at;

    if (!g_file_get_contents("/proc/self/maps", &text, NULL, NULL) ||
        !g_file_get_contents("/proc/self/smaps_rollup", &rollup, NULL, NULL)) {
        bench_die("/proc/self cannot be read");
    }
    *maps = 0;
    for (at = text; (at = strchr(at, '\n')); at++) {
        ++*maps;
    }
    at = strstr(rollup, "\nPss:");
    *pss = at ? g_ascii_strtoull(at + strlen("\nPss:"), NULL, 10) << 10 : 0;
}

static uint64_t saved_now(Churn *c)
{
    KsmStats stats;

    ksm_engine_get_stats(c->engine, &stats);
    return stats.pages_sharing + stats.zero_pages;
}

static void tell_one(const char *when, const char *name, double value)
{
    g_autofree char *full = g_strdup_printf("%s_%s", when, name);

    bench_metric(g_strdelimit(full, "-", '_'), value);
}

static void tell(Churn *c, const char *when)
{
    KsmStats stats;
    uint64_t maps, pss;

    process_ask(&maps, &pss);
    ksm_engine_get_stats(c->engine, &stats);
    tell_one(when, "saved_mib", saved_now(c) / 256.0);
    tell_one(when, "maps", maps);
    tell_one(when, "pss_mib", pss / 1048576.0);
    tell_one(when, "metadata_mib", stats.metadata / 1048576.0);
    tell_one(when, "pool_mib", stats.pages_shared / 256.0);
    tell_one(when, "cpu_s", (stats.scan_time + stats.merge_time) / 1e9);
    tell_one(when, "passes", stats.full_scans);
    tell_one(when, "broken_mib", stats.reasons[KSM_REASON_COW_BROKEN] / 256.0);
}

/* Pages that are not merged, by reason. */
static void tell_reasons(Churn *c, const char *when)
{
    KsmStats stats;

    ksm_engine_get_stats(c->engine, &stats);
    for (unsigned i = 0; i < KSM_REASON_MAX; i++) {
        g_autofree char *name = g_strconcat(ksm_reason_name(i), "_mib", NULL);

        if (stats.reasons[i]) {
            tell_one(when, name, stats.reasons[i] / 256.0);
        }
    }
}

/* --- the engine --- */

/* Memory that was written after a merge is restored only where one tells. */
static bool never_busy(void *opaque, void *addr, size_t len)
{
    return false;
}

static void engine_start(Churn *c, unsigned max_cpu)
{
    static const KsmRegionOps ops = { .busy = never_busy };

    c->engine = bench_engine(KSM_FREE_AUTO, true);
    ksm_engine_set_max_cpu(c->engine, max_cpu);
    c->region = bench_add(c->engine, c->mem, c->pages * KSM_PAGE_SIZE, &ops,
                          NULL);
}

static void engine_end(Churn *c)
{
    if (ksm_region_remove(c->region, KSM_REMOVE_UNMERGE) < 0) {
        bench_die("the region could not be removed");
    }
    ksm_engine_free(c->engine);
}

static void step_for(Churn *c, uint64_t ns)
{
    uint64_t end = bench_now_ns() + ns, now;

    while ((now = bench_now_ns()) < end) {
        int64_t wait = ksm_step(c->engine, 0);

        if (wait) {
            g_usleep((wait < 0 ? end - now : MIN((uint64_t)wait, end - now)) /
                     1000);
        }
    }
}

/* Until nothing more is saved. */
static void settle(Churn *c)
{
    uint64_t best = 0, quiet = 0;

    for (unsigned i = 0; i < SETTLE_S && quiet < QUIET_S; i++) {
        uint64_t saved;

        step_for(c, 1000000000);
        saved = saved_now(c);
        quiet = saved > best + best / 1000 ? 0 : quiet + 1;
        best = MAX(best, saved);
        bench_progress("settling: %" PRIu64 " MiB saved", saved / 256);
    }
    if (quiet < QUIET_S) {
        bench_die("it does not settle in %u s", SETTLE_S);
    }
}

static void churn(Churn *c, uint64_t minutes, uint64_t moments)
{
    pthread_t thread;
    int err = pthread_create(&thread, NULL, churn_main, c);

    if (err) {
        bench_die("no thread: %s", strerror(err));
    }
    for (uint64_t i = 1; i <= moments; i++) {
        g_autofree char *when = g_strdup_printf("at%03" PRIu64, i);

        bench_progress("%" PRIu64 " of %" PRIu64 " minutes: %" PRIu64
                       " MiB saved", minutes * (i - 1) / moments, minutes,
                       saved_now(c) / 256);
        step_for(c, minutes * UINT64_C(60000000000) / moments);
        tell(c, when);
    }
    atomic_store(&c->ends, true);
    pthread_join(thread, NULL);
    bench_metric("churned_mib", c->written / 256.0);
}

/* What comes of it when all is quiet, and whether all is as it was written. */
static void finish(Churn *c, const char *when)
{
    settle(c);
    tell(c, when);
    tell_reasons(c, when);
    check_all(c);
    engine_end(c);
    check_all(c);
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    size_t mib = bench_arg(&b, "mib", 512);
    unsigned max_cpu = bench_arg(&b, "max_cpu", 20);
    Churn c = {
        .pages = mib << 20 >> 12,
        .random = bench_arg(&b, "seed", 1) * SEED,
        .per_second = bench_arg(&b, "per_second", 2000),
    };

    c.files = c.pages / FILE_SHARE;
    c.next_id = UINT64_C(1) << 40;
    c.page = g_new0(Page, c.pages);
    c.mem = bench_map(c.pages * KSM_PAGE_SIZE, bench_arg(&b, "huge", 0)
                      ? BENCH_HUGE_PAGES : BENCH_SMALL_PAGES);
    engine_start(&c, max_cpu);
    fill(&c);
    churn(&c, bench_arg(&b, "minutes", 120), bench_arg(&b, "moments", 60));
    finish(&c, "old");
    engine_start(&c, max_cpu);
    finish(&c, "new");
    return 0;
}
