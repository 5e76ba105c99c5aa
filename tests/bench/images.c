/*
 * Bench images: what libksm finds in the RAM of real guests
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The files named by image=FILE are read into the regions of one engine, and
 * its savings are held against an exhaustive count of equal pages.  What is not
 * saved is printed by the engine's reasons.  Zero pages count as saved when
 * they are given back to the kernel.  With block=N blocks of N pages are in a
 * random order, another one for each image, as in guests that have aged.
 */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "image.h"

#define MAX_IMAGES 8
#define TIMEOUT_S 120.0

static int compare_hashes(const void *a, const void *b)
{
    return XXH128_cmp(a, b);
}

/* All pages but one of each content, and all zeroes. */
static uint64_t achievable(const BenchImage *images, int n, uint64_t *zeroes)
{
    static const char zero[KSM_PAGE_SIZE];
    g_autoptr(GArray) hashes = g_array_new(false, false, sizeof(XXH128_hash_t));
    uint64_t distinct = 0;

    *zeroes = 0;
    for (int i = 0; i < n; i++) {
        for (size_t at = 0; at < images[i].len; at += KSM_PAGE_SIZE) {
            const char *page = images[i].mem + at;
            XXH128_hash_t hash;

            if (!memcmp(page, zero, KSM_PAGE_SIZE)) {
                ++*zeroes;
                continue;
            }
            hash = XXH3_128bits(page, KSM_PAGE_SIZE);
            g_array_append_val(hashes, hash);
        }
    }
    g_array_sort(hashes, compare_hashes);
    for (guint i = 0; i < hashes->len; i++) {
        XXH128_hash_t *h = &g_array_index(hashes, XXH128_hash_t, i);

        distinct += !i || !XXH128_isEqual(h[-1], h[0]);
    }
    return *zeroes + hashes->len - distinct;
}

static void report(const KsmStats *stats, uint64_t all, uint64_t zeroes)
{
    uint64_t saved = stats->pages_sharing + stats->zero_pages;

    bench_metric("achievable_mib", all / 256.0);
    bench_metric("achievable_zero_mib", zeroes / 256.0);
    bench_metric("saved_mib", saved / 256.0);
    bench_metric("saved_zero_mib", stats->zero_pages / 256.0);
    bench_metric("saved_fraction", (double)saved / all);
    bench_metric("saved_fraction_nonzero",
                 (double)stats->pages_sharing / MAX(all - zeroes, 1));
    bench_metric("runs", stats->merged_runs);
    bench_metric("huge_split", stats->huge_split);
    bench_metric("profit_mib", stats->profit / 1048576.0);
    for (int i = 0; i < KSM_REASON_MAX; i++) {
        if (stats->reasons[i]) {
            g_autofree char *name = g_strdup_printf("reason_%s",
                                                    ksm_reason_name(i));

            bench_metric(name, stats->reasons[i]);
        }
    }
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    BenchPages pages = bench_arg(&b, "huge", 0) ? BENCH_HUGE_PAGES
                                                : BENCH_SMALL_PAGES;
    unsigned block = bench_arg(&b, "block", 0);
    BenchImage images[MAX_IMAGES] = { 0 };
    uint64_t all, zeroes, start, cpu, previous = 0;
    KsmEngine *engine;
    KsmStats stats = { 0 };
    int n = 0;

    for (int i = 1; i < argc && n < MAX_IMAGES; i++) {
        if (g_str_has_prefix(argv[i], "image=")) {
            image_open(&images[n], argv[i] + strlen("image="),
                       block ? block : KSM_CHUNK_SIZE / KSM_PAGE_SIZE);
            if (block) {
                image_shuffle(&images[n], n + 1);
            }
            image_load(&images[n++], pages);
        }
    }
    if (!n) {
        bench_die("no image=FILE");
    }
    all = achievable(images, n, &zeroes);
    engine = bench_engine(KSM_FREE_AUTO, true);
    bench_threads(engine, bench_arg(&b, "threads", 1));
    start = bench_now_ns();
    cpu = bench_process_cpu_ns();
    for (int i = 0; i < n; i++) {
        bench_add(engine, images[i].mem, images[i].len, NULL, NULL);
    }
    /* until idle, or until a few passes bring nothing */
    for (int still = 0; still < 4 && stats.state != KSM_STATE_IDLE; ) {
        uint64_t target;

        ksm_engine_get_stats(engine, &stats);
        target = stats.full_scans + 1;
        if (!bench_rush_until(engine, bench_scanned, &target, TIMEOUT_S)) {
            bench_die("no pass in %.0f s", TIMEOUT_S);
        }
        ksm_engine_get_stats(engine, &stats);
        if (stats.pages_sharing + stats.zero_pages > previous) {
            still = 0;
            bench_metric("seconds", (bench_now_ns() - start) / 1e9);
            bench_metric("cpu_s", (bench_process_cpu_ns() - cpu) / 1e9);
        } else {
            still++;
        }
        previous = stats.pages_sharing + stats.zero_pages;
    }
    for (int i = 0; i < n; i++) {
        image_check(&images[i]);
    }
    report(&stats, all, zeroes);
    return 0;
}
