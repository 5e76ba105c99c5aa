/*
 * Bench shuffle: guests that have aged, by ksmd alone and with us before it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The RAM images image=FILE are read with their blocks of block=N pages in a
 * random order, another one for each: the runs that files left are gone.  What
 * is equal is merged by a member of the group at socket=PATH, which leaves to
 * ksmd what stands alone, or by ksmd alone; until nothing more is gained for
 * still=S seconds.  Then all pages are held against the images.  CPU counts
 * until 98 % of goal=PAGES is saved (default: of what is in the end).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"

#define MAX_IMAGES  8
#define LIMIT_NS    UINT64_C(400000000000)
#define SAMPLE_NS   UINT64_C(50000000)

typedef struct Image {
    const char *path;
    int fd;
    size_t len, block;      /* bytes */
    uint32_t *order;        /* of its blocks */
    char *mem;
} Image;

typedef struct Sample {
    uint64_t saved, ns, cpu_ns;
} Sample;

typedef struct Run {
    KsmEngine *engine;      /* NULL: ksmd alone */
    KsmRegion *region[MAX_IMAGES];
    uint64_t began, cpu, others;
    uint64_t counted;       /* ksmd's pages_sharing before */
    GArray *samples;
} Run;

static void image_open(Image *image, const char *path, unsigned block)
{
    off_t len;

    image->path = path;
    image->fd = open(path, O_RDONLY | O_CLOEXEC);
    len = image->fd < 0 ? -1 : lseek(image->fd, 0, SEEK_END);
    if (len <= 0) {
        bench_die("%s: %s", path, len ? strerror(errno) : "empty");
    }
    image->block = (size_t)block * KSM_PAGE_SIZE;
    image->len = len / image->block * image->block;
}

static void image_shuffle(Image *image, uint64_t seed)
{
    size_t n = image->len / image->block;

    image->order = g_new(uint32_t, n);
    for (size_t i = 0; i < n; i++) {
        image->order[i] = i;
    }
    for (size_t i = n - 1; i > 0; i--) {
        size_t k = bench_random(&seed) % (i + 1);
        uint32_t was = image->order[i];

        image->order[i] = image->order[k];
        image->order[k] = was;
    }
}

static void block_read(const Image *image, size_t i, char *to)
{
    if (pread(image->fd, to, image->block,
              (off_t)image->order[i] * image->block) != (ssize_t)image->block) {
        bench_die("%s cannot be read: %s", image->path, strerror(errno));
    }
}

static void image_load(Image *image)
{
    image->mem = bench_map(image->len, BENCH_SMALL_PAGES);
    for (size_t i = 0; i < image->len / image->block; i++) {
        block_read(image, i, image->mem + i * image->block);
    }
    if (madvise(image->mem, image->len, MADV_DONTFORK)) {
        bench_die("MADV_DONTFORK: %s", strerror(errno));
    }
}

static void image_check(const Image *image)
{
    g_autofree char *block = g_malloc(image->block);

    for (size_t i = 0; i < image->len / image->block; i++) {
        block_read(image, i, block);
        if (memcmp(block, image->mem + i * image->block, image->block)) {
            bench_die("%s: block %zu has changed", image->path, i);
        }
    }
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

static Sample sample(const Run *r)
{
    Sample s = { .ns = bench_now_ns() - r->began };

    /* what is ksmd's the engine only estimates */
    s.saved = bench_ksmd_counter("pages_sharing") - r->counted;
    if (r->engine) {
        KsmStats stats;

        ksm_engine_get_stats(r->engine, &stats);
        s.saved += stats.pages_sharing + stats.zero_pages;
        s.cpu_ns = bench_thread_cpu_ns() - r->cpu +
                   bench_ask("driven cpu") - r->others;
    } else {
        s.cpu_ns = bench_ask("ksmd cpu") - r->others;
    }
    return s;
}

static void merge(Run *r, uint64_t still_ns)
{
    Sample best = { 0 }, s = { 0 };
    uint64_t next = 0, now;

    while (s.ns < LIMIT_NS && s.ns - best.ns < still_ns) {
        int64_t wait = r->engine ? ksm_step(r->engine, 0) : 5000000;

        if (wait) {
            g_usleep(wait < 0 ? 1000 : MIN(wait / 1000, 5000));
        }
        now = bench_now_ns();
        if (now < next) {
            continue;
        }
        next = now + SAMPLE_NS;
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
    if (r->engine) {
        KsmStats stats;

        ksm_engine_get_stats(r->engine, &stats);
        bench_metric("own_mib",
                     (stats.pages_sharing + stats.zero_pages) / 256.0);
        bench_metric("own_cpu", (bench_thread_cpu_ns() - r->cpu) / 1e9);
        bench_metric("left_mib", stats.kernel_left / 1048576.0);
        bench_metric("passes", stats.full_scans);
        for (int i = 0; i < KSM_REASON_MAX; i++) {
            if (stats.reasons[i]) {
                bench_progress("%s: %" G_GUINT64_FORMAT " pages",
                               ksm_reason_name(i), stats.reasons[i]);
            }
        }
    }
}

int main(int argc, char **argv)
{
    Bench b = { argc, argv };
    unsigned block = bench_arg(&b, "block", 1), n = 0;
    const char *socket = bench_arg_str(&b, "socket", NULL);
    Image images[MAX_IMAGES] = { 0 };
    Run run = { .samples = g_array_new(false, false, sizeof(Sample)) };

    for (int i = 1; i < argc && n < MAX_IMAGES; i++) {
        if (g_str_has_prefix(argv[i], "image=")) {
            image_open(&images[n], argv[i] + strlen("image="), block);
            image_shuffle(&images[n], n + 1);
            image_load(&images[n++]);
        }
    }
    if (!n) {
        bench_die("no image=FILE");
    }
    run.counted = bench_ksmd_counter("pages_sharing");
    run.began = bench_now_ns();
    run.cpu = bench_thread_cpu_ns();
    if (socket) {
        run.engine = member_new(socket);
        run.others = bench_ask("driven cpu");
    }
    for (unsigned i = 0; i < n; i++) {
        if (socket) {
            run.region[i] = bench_add(run.engine, images[i].mem, images[i].len,
                                      NULL, NULL);
        } else {
            bench_ksmd_offer(images[i].mem, images[i].len);
        }
    }
    if (!socket) {
        run.others = bench_ask("ksmd start");
    }
    merge(&run, bench_arg(&b, "still", 15) * 1000000000);
    report(&run, bench_arg(&b, "goal", 0));
    for (unsigned i = 0; i < n; i++) {
        image_check(&images[i]);
    }
    return 0;
}
