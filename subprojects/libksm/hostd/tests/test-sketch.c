/*
 * hostd tests: what two guests have in common, by their sketches
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * An engine with a daemon of its own stands for a guest on a host of its own.
 */
#include <errno.h>
#include <glib/gstdio.h>
#include <inttypes.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <glib.h>

#include "base/page.h"
#include "key.h"
#include "libksm.h"

#define PAGES       8192u
#define NOT_THERE   UINT64_MAX
/* How long an answer's slot is held, and some more: asks.c. */
#define HELD_US     22000000
#define HELD_SCANS  12
#define WAIT_US     60000000

static char *directory;

static char *file_new(const char *name, const char *text, size_t len)
{
    char *path = g_build_filename(directory, name, NULL);

    g_assert(g_file_set_contents(path, text, len, NULL));
    g_assert(g_chmod(path, 0600) == 0);
    return path;
}

typedef struct Host {
    char *socket;
    pid_t daemon;
    KsmEngine *engine;
    KsmRegion *region;
    char *addr;
} Host;

static pid_t daemon_start(const char *socket, const char *key)
{
    const char *program = g_getenv("KSM_POOLD");
    pid_t pid = fork();

    g_assert(program && pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl(program, program, "--socket", socket, "--size", "256M",
              key ? "--key" : NULL, key, NULL);
        _exit(127);
    }
    for (unsigned i = 0; i < 5000 && access(socket, F_OK); i++) {
        g_usleep(1000);
    }
    return pid;
}

/* Page i has content @content(i); 0: zeroes. */
static void member_start(Host *h, uint64_t (*content)(unsigned i))
{
    size_t len = PAGES * PAGE_BYTES;
    g_autoptr(GError) error = NULL;
    KsmConfig config;

    ksm_config_init(&config);
    config.scope = KSM_SCOPE_GROUP;
    config.group = "sketch";
    config.max_cpu = 100;
    config.smart_scan = false;
    config.group_socket = h->socket;
    h->engine = ksm_engine_new(&config, &error);
    g_assert(!error);
    h->addr = mmap(NULL, len, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    g_assert(h->addr != MAP_FAILED);
    g_assert(madvise(h->addr, len, MADV_DONTFORK) == 0);
    g_assert(madvise(h->addr, len, MADV_NOHUGEPAGE) == 0);
    for (unsigned i = 0; i < PAGES; i++) {
        uint64_t *at = (uint64_t *)(h->addr + i * PAGE_BYTES);
        uint64_t c = content(i);

        for (unsigned k = 0; c != NOT_THERE && k < PAGE_BYTES / 8; k++) {
            at[k] = c * UINT64_C(0x9e3779b97f4a7c15) + (c ? k : 0);
        }
    }
    h->region = ksm_region_add(h->engine, h->addr, len, -1, NULL, NULL, &error);
    g_assert(!error);
}

static void host_start(Host *h, const char *name, const char *key,
                       uint64_t (*content)(unsigned i))
{
    h->socket = g_build_filename(directory, name, NULL);
    h->daemon = daemon_start(h->socket, key);
    member_start(h, content);
}

static void member_end(Host *h)
{
    g_assert(ksm_region_remove(h->region, KSM_REMOVE_FORGET) == 0);
    ksm_engine_free(h->engine);
    munmap(h->addr, PAGES * PAGE_BYTES);
}

static void host_end(Host *h)
{
    member_end(h);
    kill(h->daemon, SIGTERM);
    g_assert(waitpid(h->daemon, NULL, 0) == h->daemon);
    g_free(h->socket);
}

/* When all of so many pages is known. */
static KsmSketch host_sketch(Host *h, uint64_t pages)
{
    gint64 end = g_get_monotonic_time() + WAIT_US;
    KsmSketch s;

    do {
        g_assert(ksm_step(h->engine, 0) >= 0);
        g_usleep(1000);
        g_assert(g_get_monotonic_time() < end);
    } while (!ksm_engine_get_sketch(h->engine, &s) || s.pages < pages);
    g_assert(s.pages == pages);
    for (unsigned i = 1; i < s.n; i++) {
        g_assert(s.least[i - 1] < s.least[i]);
    }
    return s;
}

static void host_merge(Host *h, uint64_t pages)
{
    gint64 end = g_get_monotonic_time() + WAIT_US;
    KsmStats stats;

    do {
        g_assert(ksm_step(h->engine, 0) >= 0);
        g_usleep(1000);
        g_assert(g_get_monotonic_time() < end);
        ksm_engine_get_stats(h->engine, &stats);
    } while (stats.pages_sharing < pages);
}

/* As ksm-top --similar has it, of two whole ones: contents that are in both. */
static double shared(const KsmSketch *a, const KsmSketch *b)
{
    uint32_t end = MIN(a->least[a->n - 1], b->least[b->n - 1]);
    unsigned both = 0;

    g_assert(a->key == b->key);
    g_assert(a->n == KSM_SKETCH_SIZE && b->n == KSM_SKETCH_SIZE);
    for (unsigned i = 0, k = 0; a->least[i] < end; i++) {
        while (b->least[k] < a->least[i]) {
            k++;
        }
        both += a->least[i] == b->least[k];
    }
    return both * 4294967296.0 / end;
}

/* The key is no chance: what is right within 4 sigma once is so always. */
static void assert_contents(const KsmSketch *s, uint64_t contents)
{
    g_assert(s->n == KSM_SKETCH_SIZE);
    g_assert(ABS((double)s->contents - contents) < contents / 8.0);
}

/* Two thirds are alone, a third twice; a zero now and then. */
static uint64_t first_half(unsigned i)
{
    return i % 16 == 0 ? 0 : 1 + i % (PAGES * 3 / 4);
}

static uint64_t second_half(unsigned i)
{
    return i % 16 == 0 ? 0 : 1 + PAGES / 2 + i % (PAGES * 3 / 4);
}

/* With it 32 bits tell all contents apart: with one in 200 they do not. */
static const char secret[] = "third key of two hosts, also of more than 16 b";

/* Of the seed, by a way that leads nowhere back: not a hash by that seed. */
static void assert_key(const KsmSketch *s, const char *path)
{
    g_autofree char *sum = NULL, *key = NULL;
    uint64_t seed;
    bool open;

    g_assert(key_read(path, &seed, &open) == 0);
    seed = GUINT64_TO_LE(seed);
    sum = g_compute_checksum_for_data(G_CHECKSUM_SHA256, (guchar *)&seed,
                                      sizeof(seed));
    key = g_strdup_printf("%016" PRIx64, GUINT64_SWAP_LE_BE(s->key));
    g_assert(g_str_has_prefix(sum, key));
}

static void test_shared(void)
{
    g_autofree char *key = file_new("key", secret, sizeof(secret));
    uint64_t contents = PAGES * 3 / 4 / 16 * 15, both = 0;
    Host a, b;
    KsmSketch sa, sb;

    host_start(&a, "a", key, first_half);
    host_start(&b, "b", key, second_half);
    sa = host_sketch(&a, PAGES / 16 * 15);
    sb = host_sketch(&b, PAGES / 16 * 15);
    assert_key(&sa, key);
    assert_contents(&sa, contents);
    assert_contents(&sb, contents);
    for (unsigned i = PAGES / 2; i < PAGES * 3 / 4; i++) {
        both += first_half(i) != 0;
    }
    g_assert(ABS(shared(&sa, &sb) - both) < both / 6.0);
    g_assert(ABS(shared(&sa, &sa) - sa.contents) < 1);
    host_end(&b);
    host_end(&a);
}

static uint64_t few(unsigned i)
{
    return i < PAGES / 2 ? 0 : 1 + i % 300;
}

static uint64_t fewer(unsigned i)
{
    return i < PAGES / 2 ? 0 : 101 + i % 200;
}

/* Fewer contents than numbers: exact. */
static void test_few(void)
{
    g_autofree char *key = file_new("key", secret, sizeof(secret));
    Host a, b;
    KsmSketch sa, sb;

    host_start(&a, "a", key, few);
    host_start(&b, "b", key, fewer);
    sa = host_sketch(&a, PAGES / 2);
    sb = host_sketch(&b, PAGES / 2);
    g_assert(sa.contents == 300 && sa.n == 300);
    g_assert(sb.contents == 200 && sb.n == 200);
    for (unsigned i = 0, k = 0; i < 200; i++, k++) {
        while (sa.least[k] != sb.least[i]) {
            g_assert(++k < 300);
        }
    }
    host_end(&b);
    host_end(&a);
}

/* A pattern, of which there are many slots, and few others. */
static uint64_t repeated(unsigned i)
{
    return i < PAGES / 2 ? 1 : 2 + i % 300;
}

static void test_repeated(void)
{
    Host a;
    KsmSketch s;

    host_start(&a, "a", NULL, repeated);
    host_merge(&a, PAGES * 3 / 4);
    s = host_sketch(&a, PAGES);
    g_assert(s.contents == 301 && s.n == 301);
    host_end(&a);
}

/* Pages that stand alone, half of them in both. */
static uint64_t lonely(unsigned i)
{
    return i % 64 == 0 ? 1 + i : NOT_THERE;
}

static uint64_t lonely_too(unsigned i)
{
    return i % 64 == 32 ? 1 + i : lonely(i);
}

/* Its slot has been let go, then, and no state tells that it is the first. */
static void test_left(void)
{
    gint64 begin = g_get_monotonic_time(), now;
    Host a = { 0 }, b = { 0 };
    KsmStats stats;
    KsmSketch s;

    host_start(&a, "a", NULL, lonely);
    b.socket = a.socket;
    member_start(&b, lonely_too);
    ksm_engine_set_vma_reserve(a.engine, SIZE_MAX);
    ksm_engine_set_vma_reserve(b.engine, SIZE_MAX);
    do {
        g_assert(ksm_step(a.engine, 0) >= 0 && ksm_step(b.engine, 0) >= 0);
        g_usleep(1000);
        now = g_get_monotonic_time();
        g_assert(now < begin + WAIT_US);
        ksm_engine_get_stats(b.engine, &stats);
        /* less while there is no group yet, or all of it is asked about again */
        ksm_engine_get_sketch(b.engine, &s);
        g_assert(s.n <= PAGES / 32);
    } while (now < begin + HELD_US || stats.full_scans < HELD_SCANS ||
             stats.reasons[KSM_REASON_VMA_LIMIT] != PAGES / 64 ||
             s.n != PAGES / 32);
    g_assert(s.contents == s.n);
    member_end(&b);
    host_end(&a);
}

/*
 * Another daemon, with another seed: what is merged in the old pool is counted
 * when it has moved.
 */
static void test_new_seed(void)
{
    gint64 end = g_get_monotonic_time() + WAIT_US;
    Host a;
    KsmSketch s;
    uint64_t key;

    host_start(&a, "a", NULL, few);
    host_merge(&a, PAGES / 4);
    s = host_sketch(&a, PAGES / 2);
    key = s.key;
    kill(a.daemon, SIGKILL);
    g_assert(waitpid(a.daemon, NULL, 0) == a.daemon);
    g_unlink(a.socket);
    a.daemon = daemon_start(a.socket, NULL);
    do {
        g_assert(ksm_step(a.engine, 0) >= 0);
        g_usleep(1000);
        g_assert(g_get_monotonic_time() < end);
        g_assert(ksm_engine_get_sketch(a.engine, &s));
        g_assert(s.n <= 300 && s.contents == s.n);
    } while (s.key == key || s.pages < PAGES / 2);
    g_assert(s.n == 300);
    host_end(&a);
}

/* By chance: nothing can be compared. */
static void test_other_key(void)
{
    Host a, b;
    KsmSketch sa, sb;

    host_start(&a, "a", NULL, few);
    host_start(&b, "b", NULL, few);
    sa = host_sketch(&a, PAGES / 2);
    sb = host_sketch(&b, PAGES / 2);
    g_assert(sa.key != sb.key);
    host_end(&b);
    host_end(&a);
}

static void test_no_group(void)
{
    KsmConfig config;
    KsmEngine *e;
    KsmSketch s;

    ksm_config_init(&config);
    e = ksm_engine_new(&config, NULL);
    g_assert(e);
    g_assert(!ksm_engine_get_sketch(e, &s));
    ksm_engine_free(e);
    config.scope = KSM_SCOPE_GROUP;
    config.group = "nobody";
    config.group_socket = "/nonexistent/socket";
    e = ksm_engine_new(&config, NULL);
    g_assert(e);
    g_assert(!ksm_engine_get_sketch(e, &s));
    ksm_engine_free(e);
}

static void key_is(int want, const char *text, size_t len)
{
    g_autofree char *path = file_new("key", text, len);
    uint64_t key;
    bool open;

    g_assert(key_read(path, &key, &open) == want);
}

static void test_key(void)
{
    g_autofree char *many = g_strnfill(KEY_MAX + 1, 'k');
    g_autofree char *path = file_new("key", secret, sizeof(secret));
    uint64_t key, other;
    bool open;

    key_is(-ERANGE, many, 0);
    key_is(-ERANGE, many, KEY_MIN - 1);
    key_is(0, many, KEY_MIN);
    key_is(0, many, KEY_MAX);
    key_is(-ERANGE, many, KEY_MAX + 1);
    g_assert(key_read("/nonexistent", &key, &open) == -ENOENT);
    g_assert(key_read(directory, &key, &open) == -EISDIR);

    g_assert(g_file_set_contents(path, secret, sizeof(secret), NULL));
    g_assert(g_chmod(path, 0600) == 0);
    g_assert(key_read(path, &key, &open) == 0 && !open);
    g_assert(g_chmod(path, 0640) == 0);
    g_assert(key_read(path, &other, &open) == 0 && open && other == key);
    /* each byte counts, and how many there are */
    g_assert(g_file_set_contents(path, secret, sizeof(secret) - 1, NULL));
    g_assert(key_read(path, &other, &open) == 0 && other != key);
}

static void test_option(void)
{
    g_autofree char *path = file_new("key", "short", 5);
    g_autofree char *socket = g_build_filename(directory, "s", NULL);
    const char *argv[] = {
        g_getenv("KSM_POOLD"), "--socket", socket, "--key", path, NULL
    };
    g_autofree char *err = NULL;
    int status;

    g_assert(g_spawn_sync(NULL, (char **)argv, NULL, G_SPAWN_DEFAULT, NULL,
                          NULL, NULL, &err, &status, NULL));
    g_assert(status && strstr(err, "16 to 4096 bytes"));
    g_assert(access(socket, F_OK) < 0);
}

int main(int argc, char **argv)
{
    g_autoptr(GError) error = NULL;
    char *key;
    int ret;

    g_test_init(&argc, &argv, NULL);
    if (!ksm_supported(&error)) {
        g_print("1..0 # SKIP %s\n", error->message);
        return 0;
    }
    directory = g_dir_make_tmp("ksm-sketch-XXXXXX", NULL);
    g_assert(directory);
    g_test_add_func("/sketch/key", test_key);
    g_test_add_func("/sketch/option", test_option);
    g_test_add_func("/sketch/none", test_no_group);
    g_test_add_func("/sketch/shared", test_shared);
    g_test_add_func("/sketch/few", test_few);
    g_test_add_func("/sketch/repeated", test_repeated);
    g_test_add_func("/sketch/left", test_left);
    g_test_add_func("/sketch/seed", test_new_seed);
    g_test_add_func("/sketch/key/other", test_other_key);
    ret = g_test_run();
    key = g_build_filename(directory, "key", NULL);
    g_unlink(key);
    g_rmdir(directory);
    g_free(key);
    g_free(directory);
    return ret;
}
