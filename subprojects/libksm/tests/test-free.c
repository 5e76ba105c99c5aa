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

#include "base/prim.h"
#include "watch/free.h"
#include "watch/pressure.h"
#include "fake-root.h"
#include "still.h"
#include "util.h"

#define PAGES 1024
/*
 * A CPU collects pages before it marks them as lazily free
 * (folio_mark_lazyfree): so many may not count yet.
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

/* A field of @memory's smaps entry, in pages. */
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
    /* each page is old or zero, and a write makes it stay */
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

/* Can huge pages be told from small ones (Linux 6.7)? */
static bool have_pagemap_scan(void)
{
    int fd = prim.open_read("/proc/self/pagemap");
    PmScan nothing = { .fd = fd };
    ssize_t n = prim.pagemap(&nothing);

    prim.close(fd);
    return n >= 0;
}

/* What stays free is given back, unless written in the meantime. */
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
        /* pages that were being moved are gone: those that are not written */
        g_assert(smaps_pages(memory, "Rss:") > PAGES / 2 + BATCHES);
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

/* Memory released many times is remembered once. */
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

/* A page that another process maps, too, is dropped only here. */
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

/* Each group hits its limit in turn. */
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
    /* a group below one of ours */
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
 * While memory is short released memory is dropped, and what was lazily free is
 * due at once; not afterwards.
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

/*
 * As EVENTS() and PSI() of all groups at once.  Each source alone is a sign,
 * once, whatever the others do.
 */
static void test_each(FakeRoot *root, gconstpointer data)
{
    static const struct {
        const char *name, *before, *after;
    } sources[] = {
        { "proc/pressure/memory", PSI("5"), PSI("20006") },
        { "cg/unified/slice/vm/memory.pressure", PSI("7"), PSI("20008") },
        { "cg/unified/slice/vm/memory.events.local", EVENTS("8"),
          EVENTS("9") },
        { "cg/unified/slice/memory.events.local", EVENTS("10"),
          EVENTS("11") },
        { "cg/memory/vm/memory.failcnt", "10\n", "11\n" },
        { "cg/memory/memory.failcnt", "99", "101" },
        /* not ours, or of no use */
        { "cg/unified/slice/memory.pressure", PSI("0"), PSI("900000") },
        { "cg/unified/memory.events.local", "low 0\n", "low 1\n" },
        { "proc/pressure/cpu", PSI("0"), PSI("900000") },
        { "cg/cpu/memory.failcnt", "1\n", "2\n" },
    };
    KsmPressure *pressure;

    fake_cgroups(root);
    for (unsigned i = 0; i < G_N_ELEMENTS(sources); i++) {
        fake_write(root, sources[i].name, sources[i].before);
    }
    pressure = ksm_pressure_new_at(root->dir);
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    for (unsigned i = 0; i < G_N_ELEMENTS(sources); i++) {
        fake_write(root, sources[i].name, sources[i].after);
        g_assert(ksm_pressure_sign(pressure, SECOND) == (i < 6));
        g_assert(!ksm_pressure_sign(pressure, SECOND));
        g_assert(!ksm_pressure_sign(pressure, 0));
    }
    ksm_pressure_free(pressure);
}

static void test_share(FakeRoot *root, gconstpointer data)
{
    KsmPressure *pressure;

    fake_write(root, "proc/pressure/memory", PSI("123456"));
    pressure = ksm_pressure_new_at(root->dir);
    /* 2 % of it, and a bit more */
    fake_write(root, "proc/pressure/memory", PSI("143456"));
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    fake_write(root, "proc/pressure/memory", PSI("163457"));
    g_assert(ksm_pressure_sign(pressure, SECOND));
    fake_write(root, "proc/pressure/memory", PSI("164457"));
    g_assert(!ksm_pressure_sign(pressure, SECOND / 20));
    fake_write(root, "proc/pressure/memory", PSI("165458"));
    g_assert(ksm_pressure_sign(pressure, SECOND / 20));
    ksm_pressure_free(pressure);
}

static unsigned hidden;

static int open_hidden(const char *path)
{
    if (hidden && g_str_has_suffix(path, "/memory.failcnt")) {
        return -EMFILE;
    }
    return prim_real.open_read(path);
}

/* An unreadable file says nothing, and is not forgotten. */
static void test_hidden(FakeRoot *root, gconstpointer data)
{
    KsmPressure *pressure;

    fake_cgroups(root);
    fake_write(root, "cg/memory/memory.failcnt", "5\n");
    fake_write(root, "cg/unified/slice/memory.events.local", EVENTS("3"));
    prim.open_read = open_hidden;
    hidden = 0;
    pressure = ksm_pressure_new_at(root->dir);
    hidden = 1;
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    fake_write(root, "cg/unified/slice/memory.events.local", "low 1\n");
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    hidden = 0;
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    hidden = 1;
    fake_write(root, "cg/memory/memory.failcnt", "6\n");
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    hidden = 0;
    g_assert(ksm_pressure_sign(pressure, SECOND));
    fake_write(root, "cg/unified/slice/memory.events.local", EVENTS("3"));
    g_assert(!ksm_pressure_sign(pressure, SECOND));
    prim.open_read = prim_real.open_read;
    ksm_pressure_free(pressure);
}

/* What the kernel is asked; memory that need not be there. */
typedef struct Advice {
    size_t page, n;
    int advice;
} Advice;

static struct {
    Advice made[32];
    unsigned n;
    unsigned fails;         /* this one, from 1; 0: none */
    unsigned reads;
    size_t read_len;        /* 0: all of it */
    bool no_pagemap;
    const char *swaps;      /* NULL: as it is */
    int files;
    PmScan scan;
    PmRange found[4];
    ssize_t n_found;
} seen;

#define FAKE ((char *)(KSM_CHUNK_SIZE * 100))

static int seen_advise(void *addr, size_t len, int advice)
{
    g_assert(seen.n < G_N_ELEMENTS(seen.made));
    seen.made[seen.n++] = (Advice) {
        ((char *)addr - FAKE) / KSM_PAGE_SIZE, len / KSM_PAGE_SIZE, advice
    };
    return seen.n == seen.fails ? -EAGAIN : 0;
}

#define ENTRY_PRESENT (1ull << 63)
#define ENTRY_SWAPPED (1ull << 62)
#define ENTRY_EXCLUSIVE (1ull << 56)

/* Others map pages 5 to 8 and 511 to 514, too; 20 is not there, 560 is away. */
static uint64_t seen_entry(size_t page)
{
    if ((page >= 5 && page <= 8) || (page >= 511 && page <= 514)) {
        return ENTRY_PRESENT | 42;
    }
    if (page == 560) {
        return ENTRY_SWAPPED;
    }
    return page == 20 ? 0 : ENTRY_PRESENT | ENTRY_EXCLUSIVE | 42;
}

static ssize_t seen_read_at(int fd, void *buf, size_t len, off_t offset)
{
    uint64_t *entries = buf;

    seen.reads++;
    for (size_t i = 0; i < len / 8; i++) {
        entries[i] = seen_entry(offset / 8 + i -
                                (uintptr_t)FAKE / KSM_PAGE_SIZE);
    }
    return seen.read_len ? seen.read_len : len;
}

static int seen_open(const char *path)
{
    int fd;

    if (!strcmp(path, "/proc/self/pagemap") && seen.no_pagemap) {
        return -EACCES;
    }
    if (!strcmp(path, "/proc/swaps") && seen.swaps) {
        if (!*seen.swaps) {
            return -ENOENT;
        }
        fd = prim_real.memfd("swaps");
        g_assert(write(fd, seen.swaps, strlen(seen.swaps)) > 0);
        g_assert(lseek(fd, 0, SEEK_SET) == 0);
    } else {
        fd = prim_real.open_read(path);
    }
    seen.files += fd >= 0;
    return fd;
}

static int seen_close(int fd)
{
    g_assert(fd >= 0);
    seen.files--;
    return prim_real.close(fd);
}

static ssize_t seen_pagemap(PmScan *scan)
{
    seen.scan = *scan;
    for (ssize_t i = 0; i < seen.n_found; i++) {
        scan->vec[i] = seen.found[i];
    }
    return seen.n_found;
}

#define NO_SWAP "Filename Type Size Used Priority\n"

static void seen_start(const char *swaps)
{
    memset(&seen, 0, sizeof(seen));
    seen.swaps = swaps;
    prim.advise = seen_advise;
    prim.read_at = seen_read_at;
    prim.open_read = seen_open;
    prim.close = seen_close;
    prim.pagemap = seen_pagemap;
    prim.now_ns = fake_now_ns;
    fake_now = 1000 * SECOND;
}

static void seen_end(KsmFreer *freer)
{
    ksm_freer_free(freer);
    g_assert(seen.files == 0);
    still_calls();
}

static void check_advice(unsigned i, size_t page, size_t n, int advice)
{
    g_assert(i < seen.n);
    g_assert(seen.made[i].page == page && seen.made[i].n == n);
    g_assert(seen.made[i].advice == advice);
}

static uint64_t lazy_pages(KsmFreer *freer)
{
    KsmFreerStats stats;

    ksm_freer_get_stats(freer, &stats);
    g_assert(stats.eager == 0 && stats.released == stats.lazy);
    return stats.lazy;
}

/* One call for similar pages; what others map, too, or is away, is dropped. */
static void test_calls(void)
{
    KsmFreer *freer;

    seen_start(NULL);
    freer = ksm_freer_new(KSM_FREE_LAZY);
    g_assert(ksm_freer_release(freer, FAKE, 600 * KSM_PAGE_SIZE) == 0);
    g_assert(seen.reads == 2 && seen.n == 8);
    check_advice(0, 0, 5, MADV_FREE);
    check_advice(1, 5, 4, MADV_DONTNEED);
    check_advice(2, 9, 502, MADV_FREE);
    check_advice(3, 511, 1, MADV_DONTNEED);
    check_advice(4, 512, 3, MADV_DONTNEED);
    check_advice(5, 515, 45, MADV_FREE);
    check_advice(6, 560, 1, MADV_DONTNEED);
    check_advice(7, 561, 39, MADV_FREE);
    g_assert(lazy_pages(freer) == 600);
    /* the second fails: no more are made, nothing is counted */
    freer_remember_all(freer);
    seen.n = 0;
    seen.fails = 2;
    g_assert(freer_release_lazily(freer, FAKE, 600 * KSM_PAGE_SIZE) ==
             -EAGAIN);
    g_assert(seen.n == 2 && lazy_pages(freer) == 600);
    g_assert(freer_wait(freer) == -1);
    /* the kernel does not tell: all counts as ours alone */
    seen.n = 0;
    seen.read_len = 8;
    g_assert(ksm_freer_release(freer, FAKE + 4 * KSM_PAGE_SIZE,
                               9 * KSM_PAGE_SIZE) == 0);
    g_assert(seen.n == 1 && lazy_pages(freer) == 609);
    check_advice(0, 4, 9, MADV_FREE);
    seen_end(freer);
}

static void test_no_pagemap(void)
{
    KsmFreer *freer;

    seen_start(NO_SWAP);
    seen.no_pagemap = true;
    freer = ksm_freer_new(KSM_FREE_LAZY);
    g_assert(ksm_freer_release(freer, FAKE, 9 * KSM_PAGE_SIZE) == 0);
    g_assert(seen.n == 1 && seen.reads == 0 && lazy_pages(freer) == 9);
    check_advice(0, 0, 9, MADV_FREE);
    seen.fails = 2;
    g_assert(ksm_freer_release(freer, FAKE, 9 * KSM_PAGE_SIZE) == -EAGAIN);
    g_assert(lazy_pages(freer) == 9);
    seen.n_found = 1;
    freer_give_back(freer, FAKE, KSM_CHUNK_SIZE);
    g_assert(seen.n == 2);
    seen_end(freer);
}

/* Gives back small present pages, where the kernel can be asked. */
static void test_give_back(FakeRoot *root, gconstpointer data)
{
    const uint64_t at = (uintptr_t)FAKE;
    KsmFreerStats stats;
    KsmFreer *freer;

    seen_start(NO_SWAP);
    freer = freer_new_at(KSM_FREE_AUTO, root->dir);
    g_assert(ksm_freer_release(freer, FAKE + 2 * KSM_PAGE_SIZE,
                               90 * KSM_PAGE_SIZE) == 0);
    seen.n = 0;
    seen.found[0] = (PmRange) { at + 0x3000, at + 0x5000, 0 };
    seen.found[1] = (PmRange) { at + 0x8000, at + 0x9000, PM_HUGE };
    seen.found[2] = (PmRange) { at + 0x9000, at + 0xc000, 0 };
    seen.found[3] = (PmRange) { at + 0x10000, at + 0x14000, 0 };
    seen.n_found = 4;
    seen.fails = 2;
    g_assert(ksm_freer_step(freer) == KSM_FREER_STEP_NS && seen.n == 0);
    fake_now += KSM_FREER_DECAY_NS - 7;
    g_assert(ksm_freer_step(freer) == 7 && seen.n == 0);
    fake_now += 7;
    g_assert(ksm_freer_step(freer) == 0);
    g_assert(seen.scan.start == at + 2 * KSM_PAGE_SIZE);
    g_assert(seen.scan.end == at + 92 * KSM_PAGE_SIZE);
    g_assert(seen.scan.all == PM_PRESENT && seen.scan.tell == PM_HUGE);
    g_assert(seen.scan.vec_len == 512 && !seen.scan.protect);
    g_assert(seen.n == 3);
    check_advice(0, 3, 2, MADV_PAGEOUT);
    check_advice(1, 9, 3, MADV_PAGEOUT);
    check_advice(2, 16, 4, MADV_PAGEOUT);
    ksm_freer_get_stats(freer, &stats);
    g_assert(stats.decayed == 6 && stats.lazy == 90);
    g_assert(ksm_freer_step(freer) == -1);
    seen.n_found = -ENOTTY;
    freer_give_back(freer, FAKE, KSM_CHUNK_SIZE);
    g_assert(seen.n == 3);
    seen_end(freer);
}

/* With swap, or if that is unknown, it would be swapped out. */
static void test_swap(FakeRoot *root, gconstpointer data)
{
    static const struct {
        const char *swaps;
        KsmFreePolicy policy;
        bool gives_back;
    } hosts[] = {
        { NO_SWAP, KSM_FREE_AUTO, true },
        { "\n", KSM_FREE_AUTO, true },
        { "Filename", KSM_FREE_AUTO, true },
        { NO_SWAP "/dev/sda2 partition 1 0 -2\n", KSM_FREE_AUTO, false },
        { "", KSM_FREE_AUTO, false },
        { NO_SWAP, KSM_FREE_LAZY, false },
        { NO_SWAP, KSM_FREE_EAGER, false },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(hosts); i++) {
        KsmFreer *freer;

        seen_start(hosts[i].swaps);
        freer = freer_new_at(hosts[i].policy, root->dir);
        g_assert(freer_release_lazily(freer, FAKE, KSM_PAGE_SIZE) == 0);
        g_assert(freer_wait(freer) == (hosts[i].gives_back ? KSM_FREER_STEP_NS
                                                           : -1));
        seen.n = 0;
        seen.n_found = 1;
        seen.found[0].end = KSM_PAGE_SIZE;
        freer_give_back(freer, FAKE, KSM_CHUNK_SIZE);
        g_assert(seen.n == hosts[i].gives_back);
        g_assert(freer_is_lazy(freer) == (hosts[i].policy != KSM_FREE_EAGER));
        seen_end(freer);
    }
}

static void check_due(KsmFreer *freer, size_t page, size_t n)
{
    void *addr;
    size_t len;

    g_assert(freer_due(freer, &addr, &len) == 0);
    g_assert(addr == FAKE + page * KSM_PAGE_SIZE && len == n * KSM_PAGE_SIZE);
}

static void remember(KsmFreer *freer, size_t page, size_t n)
{
    freer_remember(freer, FAKE + page * KSM_PAGE_SIZE, n * KSM_PAGE_SIZE);
}

/* One entry a chunk, as of the first release; oldest first. */
static void test_remember(void)
{
    KsmFreer *freer;

    seen_start(NULL);
    freer = ksm_freer_new(KSM_FREE_LAZY);
    ksm_freer_set_decay(freer, SECOND);
    remember(freer, 100, 5);
    fake_now += 10;
    remember(freer, 1000, 100);     /* two chunks */
    fake_now += 10;
    remember(freer, 102, 1);        /* has it already */
    remember(freer, 98, 3);
    remember(freer, 200, 2);
    remember(freer, 1026, 200);
    g_assert(freer_wait(freer) == MIN(KSM_FREER_STEP_NS, SECOND - 20));
    fake_now += SECOND - 20;
    check_due(freer, 98, 202 - 98);
    g_assert(freer_wait(freer) == 10);
    /* forgotten, and now new */
    remember(freer, 50, 1);
    fake_now += 10;
    check_due(freer, 1000, 24);
    check_due(freer, 1024, 202);
    fake_now += SECOND - 10;
    check_due(freer, 50, 1);
    g_assert(freer_wait(freer) == -1);
    seen_end(freer);
}

/* All entries that touch the range, and no other. */
static void test_forget_some(void)
{
    KsmFreer *freer;

    seen_start(NULL);
    freer = ksm_freer_new(KSM_FREE_LAZY);
    ksm_freer_set_decay(freer, 0);
    for (unsigned i = 0; i < 5; i++) {
        remember(freer, i * 512 + 10, 10);
    }
    /* from the end of the second to the start of the fourth */
    ksm_freer_forget(freer, FAKE + (512 + 20) * KSM_PAGE_SIZE,
                     (3 * 512 + 10 - 512 - 20) * KSM_PAGE_SIZE);
    remember(freer, 1024 + 30, 1);
    check_due(freer, 10, 10);
    check_due(freer, 512 + 10, 10);
    check_due(freer, 3 * 512 + 10, 10);
    ksm_freer_forget(freer, FAKE + (4 * 512 + 19) * KSM_PAGE_SIZE,
                     KSM_PAGE_SIZE);
    check_due(freer, 1024 + 30, 1);
    g_assert(freer_wait(freer) == -1);
    remember(freer, 1, 1);
    seen_end(freer);
}

/* Looks for signs now and then; they count for a while. */
static void test_pressure_time(FakeRoot *root, gconstpointer data)
{
    const int64_t ms = SECOND / 1000;
    KsmFreerStats stats;
    KsmFreer *freer;

    fake_cgroups(root);
    fake_write(root, "cg/memory/memory.failcnt", "5\n");
    seen_start(NO_SWAP);
    freer = freer_new_at(KSM_FREE_AUTO, root->dir);
    fake_now += SECOND;
    g_assert(freer_is_lazy(freer));
    fake_write(root, "cg/memory/memory.failcnt", "6\n");
    fake_now += 50 * ms - 1;
    g_assert(freer_is_lazy(freer));
    remember(freer, 0, 1);
    fake_now += 1;
    g_assert(!freer_is_lazy(freer));
    g_assert(freer_wait(freer) == 0);
    check_due(freer, 0, 1);
    /* memory released since is not due, even with new signs */
    remember(freer, 0, 1);
    fake_write(root, "cg/memory/memory.failcnt", "7\n");
    fake_now += KSM_FREER_PRESSURE_NS - 1;
    g_assert(!freer_is_lazy(freer) && freer_wait(freer) > 0);
    fake_now += KSM_FREER_PRESSURE_NS - 1;
    g_assert(!freer_is_lazy(freer));
    ksm_freer_get_stats(freer, &stats);
    g_assert(stats.pressure);
    fake_now += 1;
    g_assert(freer_is_lazy(freer));
    ksm_freer_get_stats(freer, &stats);
    g_assert(!stats.pressure);
    if (freer_wait(freer) > 0) {
        fake_write(root, "cg/memory/memory.failcnt", "8\n");
        fake_now += 50 * ms;
        g_assert(freer_wait(freer) == 0);
    }
    seen_end(freer);
}

static void test_eager_fails(void)
{
    KsmFreerStats stats;
    KsmFreer *freer;

    seen_start(NULL);
    freer = ksm_freer_new(KSM_FREE_EAGER);
    seen.fails = 2;
    g_assert(ksm_freer_release(freer, FAKE, 3 * KSM_PAGE_SIZE) == 0);
    g_assert(ksm_freer_release(freer, FAKE, 4 * KSM_PAGE_SIZE) == -EAGAIN);
    check_advice(0, 0, 3, MADV_DONTNEED);
    ksm_freer_get_stats(freer, &stats);
    g_assert(stats.eager == 3 && stats.released == 3 && stats.lazy == 0);
    g_assert(!stats.pressure && stats.decayed == 0);
    seen_end(freer);
}

static void live_and_die(void *opaque)
{
    const FakeRoot *root = opaque;
    KsmFreer *freer = freer_new_at(KSM_FREE_AUTO, root->dir);

    /* due, forgotten, and left ones */
    remember(freer, 0, 5000);
    ksm_freer_forget(freer, FAKE, 512 * 4 * KSM_PAGE_SIZE);
    ksm_freer_set_decay(freer, 0);
    check_due(freer, 512 * 4, 512);
    seen.n = 0;
    g_assert(ksm_freer_release(freer, FAKE, 600 * KSM_PAGE_SIZE) == 0);
    ksm_freer_free(freer);
}

static void test_leaks(FakeRoot *root, gconstpointer data)
{
    fake_cgroups(root);
    fake_write(root, "proc/pressure/memory", PSI("5"));
    fake_write(root, "cg/memory/memory.failcnt", "5\n");
    seen_start(NO_SWAP);
    g_assert(!util_leaks(live_and_die, root, 200));
    still_calls();
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
    g_test_add("/pressure/each", FakeRoot, NULL, fake_make, test_each,
               fake_remove);
    g_test_add("/pressure/share", FakeRoot, NULL, fake_make, test_share,
               fake_remove);
    g_test_add("/pressure/hidden", FakeRoot, NULL, fake_make, test_hidden,
               fake_remove);
    g_test_add_func("/free/calls", test_calls);
    g_test_add_func("/free/no-pagemap", test_no_pagemap);
    g_test_add("/free/give-back", FakeRoot, NULL, fake_make, test_give_back,
               fake_remove);
    g_test_add("/free/swap", FakeRoot, NULL, fake_make, test_swap,
               fake_remove);
    g_test_add_func("/free/remember", test_remember);
    g_test_add_func("/free/forget-some", test_forget_some);
    g_test_add("/free/pressure-time", FakeRoot, NULL, fake_make,
               test_pressure_time, fake_remove);
    g_test_add_func("/free/eager-fails", test_eager_fails);
    g_test_add("/free/leaks", FakeRoot, NULL, fake_make, test_leaks,
               fake_remove);
    return g_test_run();
}
