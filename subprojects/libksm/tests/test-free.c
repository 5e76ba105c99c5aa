/*
 * Tests of the rooms `free` and `pressure`, on the real kernel.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake-root.h"
#include "free.h"
#include "pressure.h"
#include "prim.h"

#define PAGES 1024
/*
 * A CPU marks pages as lazily free in batches (folio_mark_lazyfree), so that
 * so many of them may not count yet.
 */
#define BATCHES 128
#define LEN ((size_t)PAGES * KSM_PAGE_SIZE)

static char *make_memory(void)
{
    char *memory = mmap(NULL, LEN, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    g_assert(memory != MAP_FAILED);
    g_assert(madvise(memory, LEN, MADV_NOHUGEPAGE) == 0);
    memset(memory, 'x', LEN);
    return memory;
}

/* A field of the smaps entry that begins at @memory, in pages. */
static size_t smaps_pages(const char *memory, const char *field)
{
    g_autofree char *text = prim_read_file("/proc/self/smaps", NULL);
    g_autofree char *head = g_strdup_printf("%lx-", (unsigned long)memory);
    const char *at = strstr(text, head);

    g_assert(at);
    at = strstr(at, field);
    g_assert(at);
    return g_ascii_strtoull(at + strlen(field), NULL, 10) * 1024 /
           KSM_PAGE_SIZE;
}

static size_t count_pages(const char *memory, char content)
{
    size_t n = 0;

    for (size_t i = 0; i < PAGES; i++) {
        n += memory[i * KSM_PAGE_SIZE] == content;
    }
    return n;
}

static void test_lazy(void)
{
    KsmFreer *freer = ksm_freer_new(KSM_FREE_LAZY);
    char *memory = make_memory();
    KsmFreerStats stats;

    g_assert(ksm_freer_release(freer, memory, LEN) == 0);
    g_assert(smaps_pages(memory, "LazyFree:") >= PAGES - BATCHES);
    /* the content is the old one or zero, and a write makes it stay */
    g_assert(count_pages(memory, 'x') + count_pages(memory, 0) == PAGES);
    memory[0] = 'y';
    g_assert(madvise(memory, LEN, MADV_PAGEOUT) == 0);
    g_assert(memory[0] == 'y');
    ksm_freer_get_stats(freer, &stats);
    g_assert(stats.lazy == PAGES);
    g_assert(stats.eager == 0);
    munmap(memory, LEN);
    ksm_freer_free(freer);
}

static void test_eager(void)
{
    KsmFreer *freer = ksm_freer_new(KSM_FREE_EAGER);
    char *memory = make_memory();
    KsmFreerStats stats;

    g_assert(ksm_freer_release(freer, memory, LEN) == 0);
    g_assert(smaps_pages(memory, "Rss:") == 0);
    g_assert(count_pages(memory, 0) == PAGES);
    ksm_freer_get_stats(freer, &stats);
    g_assert(stats.lazy == 0);
    g_assert(stats.eager == PAGES);
    munmap(memory, LEN);
    ksm_freer_free(freer);
}

/* Huge pages are to be told from small ones; Linux 6.7. */
static bool have_pagemap_scan(void)
{
    int fd = prim.open_read("/proc/self/pagemap");
    PmScan nothing = { .fd = fd };
    ssize_t n = prim.pagemap(&nothing);

    prim.close(fd);
    return n >= 0;
}

/* What stays free is given back; what was written in the meantime is kept. */
static void test_decay(void)
{
    KsmFreer *freer = ksm_freer_new(KSM_FREE_AUTO);
    char *memory = make_memory();
    KsmFreerStats stats;

    g_assert(ksm_freer_step(freer) == -1);
    g_assert(ksm_freer_release(freer, memory, LEN) == 0);
    ksm_freer_get_stats(freer, &stats);
    if (stats.lazy != PAGES) {
        g_test_skip("the host is short of memory at present");
    } else if (ksm_freer_step(freer) < 0) {
        g_test_skip("the host has swap: what is free is left to reclaim");
    } else if (!have_pagemap_scan()) {
        g_test_skip("the kernel lacks PAGEMAP_SCAN (Linux 6.7): what is free "
                    "is left to reclaim");
    } else {
        for (size_t i = 0; i < PAGES; i += 2) {
            memory[i * KSM_PAGE_SIZE] = 'y';
        }
        g_assert(smaps_pages(memory, "Rss:") == PAGES);
        ksm_freer_set_decay(freer, 0);
        while (ksm_freer_step(freer) == 0) {
            ;
        }
        g_assert(smaps_pages(memory, "Rss:") < PAGES / 2 + BATCHES);
        g_assert(count_pages(memory, 'y') == PAGES / 2);
        g_assert(count_pages(memory, 0) >= PAGES / 2 - BATCHES);
    }
    munmap(memory, LEN);
    ksm_freer_free(freer);
}

static void test_forget(void)
{
    KsmFreer *freer = ksm_freer_new(KSM_FREE_AUTO);
    char *memory = make_memory();

    g_assert(ksm_freer_release(freer, memory, LEN) == 0);
    ksm_freer_forget(freer, memory, LEN);
    g_assert(ksm_freer_step(freer) == -1);
    munmap(memory, LEN);
    ksm_freer_free(freer);
}

/* However often memory is released, it is remembered once. */
static void test_often(void)
{
    KsmFreer *freer = ksm_freer_new(KSM_FREE_LAZY);
    char *memory = make_memory();
    char *chunk = (char *)(((uintptr_t)memory / KSM_CHUNK_SIZE + 1) *
                           KSM_CHUNK_SIZE);
    void *addr;
    size_t len;

    freer_remember_all(freer);
    for (unsigned i = 0; i < 3; i++) {
        g_assert(ksm_freer_release(freer, chunk, 2 * KSM_PAGE_SIZE) == 0);
        g_assert(ksm_freer_release(freer, chunk - 2 * KSM_PAGE_SIZE,
                                   3 * KSM_PAGE_SIZE) == 0);
    }
    g_assert(freer_due(freer, &addr, &len) == KSM_FREER_STEP_NS);
    ksm_freer_set_decay(freer, 0);
    g_assert(freer_due(freer, &addr, &len) == 0);
    g_assert(addr == chunk && len == 2 * KSM_PAGE_SIZE);
    g_assert(freer_due(freer, &addr, &len) == 0);
    g_assert(addr == chunk - 2 * KSM_PAGE_SIZE && len == 2 * KSM_PAGE_SIZE);
    g_assert(freer_due(freer, &addr, &len) == -1);
    munmap(memory, LEN);
    ksm_freer_free(freer);
}

/* A page that another process maps too is dropped here, and only here. */
static void test_shared(void)
{
    KsmFreer *freer = ksm_freer_new(KSM_FREE_LAZY);
    char *memory = make_memory();

    pid_t child;

    child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    g_assert(child > 0);
    memory[KSM_PAGE_SIZE] = 'p';        /* the parent's own again */
    g_assert(ksm_freer_release(freer, memory, 2 * KSM_PAGE_SIZE) == 0);
    g_assert(memory[0] == 0);
    g_assert(memory[KSM_PAGE_SIZE] == 'p');
    kill(child, SIGKILL);
    munmap(memory, LEN);
    ksm_freer_free(freer);
}

static void test_error(void)
{
    KsmFreer *freer = ksm_freer_new(KSM_FREE_EAGER);
    char *memory = make_memory();

    munmap(memory, LEN);
    g_assert(ksm_freer_release(freer, memory, LEN) == -ENOMEM);
    ksm_freer_free(freer);
}

#define PSI(us) "some avg10=0.00 avg60=0.00 avg300=0.00 total=" us "\n" \
                "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
#define SECOND G_GINT64_CONSTANT(1000000000)

static void test_psi(FakeRoot *root, gconstpointer data)
{
    KsmPressure *pressure;

    fake_write(root, "proc/pressure/memory", PSI("1000"));
    pressure = ksm_pressure_new_at(root->dir);
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    fake_write(root, "proc/pressure/memory", PSI("11000"));  /* 1 % of 1 s */
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    fake_write(root, "proc/pressure/memory", PSI("51000"));  /* 4 % */
    g_assert(ksm_pressure_sign(pressure, SECOND));
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    ksm_pressure_free(pressure);
}

#define EVENTS(n) "low " n "\nhigh " n "\nmax " n "\noom " n "\n"

/* A limit is hit, of each group in turn. */
static void test_cgroups(FakeRoot *root, gconstpointer data)
{
    static const char *const v1[] = { "cg/memory/vm", "cg/memory" };
    static const char *const v2[] = { "cg/unified/slice/vm",
                                      "cg/unified/slice" };
    KsmPressure *pressure;

    fake_cgroups(root);
    for (unsigned i = 0; i < 2; i++) {
        fake_write_in(root, v1[i], "memory.failcnt", "7\n");
        fake_write_in(root, v2[i], "memory.events.local", EVENTS("3"));
        fake_write_in(root, v2[i], "memory.events", EVENTS("3"));
    }
    pressure = ksm_pressure_new_at(root->dir);
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    for (unsigned i = 0; i < 2; i++) {
        fake_write_in(root, v1[i], "memory.failcnt", "8\n");
        g_assert(ksm_pressure_sign(pressure, SECOND));
        g_assert(!ksm_pressure_sign(pressure, SECOND));
        fake_write_in(root, v2[i], "memory.events.local", EVENTS("4"));
        g_assert(ksm_pressure_sign(pressure, SECOND));
        g_assert(!ksm_pressure_sign(pressure, SECOND));
    }
    /* that of another group, below one of ours */
    fake_write_in(root, v2[1], "memory.events", EVENTS("9"));
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    ksm_pressure_free(pressure);
}

static uint64_t fake_now;

static uint64_t fake_now_ns(void)
{
    return fake_now;
}

/*
 * While memory is short what is released is dropped, and what was lazily free
 * before is due at once; afterwards all is as before.
 */
static void test_short(FakeRoot *root, gconstpointer data)
{
    char *memory = make_memory();
    KsmFreer *freer;
    KsmFreerStats stats;
    void *addr;
    size_t len;

    fake_write(root, "proc/pressure/memory", PSI("0"));
    prim.now_ns = fake_now_ns;
    fake_now = 100 * SECOND;
    freer = freer_new_at(KSM_FREE_AUTO, root->dir);
    freer_remember_all(freer);
    fake_now += SECOND;
    g_assert(ksm_freer_release(freer, memory, KSM_PAGE_SIZE) == 0);
    g_assert(freer_due(freer, &addr, &len) == KSM_FREER_STEP_NS);
    fake_write(root, "proc/pressure/memory", PSI("900000"));
    fake_now += SECOND;
    g_assert(ksm_freer_release(freer, memory + LEN - KSM_PAGE_SIZE,
                               KSM_PAGE_SIZE) == 0);
    g_assert(memory[LEN - KSM_PAGE_SIZE] == 0);
    g_assert(freer_due(freer, &addr, &len) == 0);
    g_assert(addr == memory);
    g_assert(freer_due(freer, &addr, &len) == -1);
    /* put back, it has to wait */
    freer_remember(freer, memory, KSM_PAGE_SIZE);
    fake_now += SECOND;
    g_assert(freer_due(freer, &addr, &len) == KSM_FREER_STEP_NS);
    fake_now += KSM_FREER_PRESSURE_NS;
    g_assert(freer_is_lazy(freer));
    ksm_freer_get_stats(freer, &stats);
    g_assert(stats.lazy == 1 && stats.eager == 1 && stats.released == 2);
    prim.now_ns = prim_real.now_ns;
    munmap(memory, LEN);
    ksm_freer_free(freer);
}

static void test_no_sources(FakeRoot *root, gconstpointer data)
{
    KsmPressure *pressure = ksm_pressure_new_at(root->dir);

    g_assert(!ksm_pressure_sign(pressure, SECOND));
    ksm_pressure_free(pressure);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/free/lazy", test_lazy);
    g_test_add_func("/free/eager", test_eager);
    g_test_add_func("/free/decay", test_decay);
    g_test_add_func("/free/forget", test_forget);
    g_test_add_func("/free/often", test_often);
    g_test_add_func("/free/shared", test_shared);
    g_test_add_func("/free/error", test_error);
    g_test_add("/pressure/psi", FakeRoot, NULL, fake_make, test_psi,
               fake_remove);
    g_test_add("/pressure/cgroups", FakeRoot, NULL, fake_make, test_cgroups,
               fake_remove);
    g_test_add("/free/short", FakeRoot, NULL, fake_make, test_short,
               fake_remove);
    g_test_add("/pressure/no-sources", FakeRoot, NULL, fake_make,
               test_no_sources, fake_remove);
    return g_test_run();
}
