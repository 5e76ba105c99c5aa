/*
 * libksm tests: what the engine does to memory, case by case
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Each case fills memory, lets the engine make passes, and looks at the memory
 * from outside: its bytes, the page tables, the mappings, with every dirty
 * source.  Leaves to others: failing system calls (test-fault), races
 * (test-prop), the rest of the machine (test-system).
 */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/prim.h"
#include "engine/state.h"
#include "house.h"
#include "still.h"
#include "stores.h"

#define PAGES   (4 * 512u)
#define PASSES  12u
/*
 * A CPU marks pages as lazily free in batches (folio_mark_lazyfree): another
 * one may find so many of them still in use.
 */
#define BATCH   64u

typedef struct Fixture {
    KsmEngine *engine;      /* NULL: skipped */
    KsmRegion *region;
    Mem *mem;
} Fixture;

typedef struct Case {
    KsmScope scope;
    KsmDirtySource dirty;
    MemPages kind;
    void (*run)(Fixture *f);
} Case;

static void settle(Fixture *f)
{
    for (unsigned i = 0; i < PASSES; i++) {
        util_passes(f->engine, 1);
    }
}

static void run_duplicates(Fixture *f)
{
    KsmStats s;

    mem_fill_run(f->mem, 0, 512, 1000, 1);
    mem_fill_run(f->mem, 512, 512, 1000, 1);
    mem_fill_run(f->mem, 1024, 512, 1000, 1);
    settle(f);
    s = util_stats(f->engine);
    g_assert(s.pages_shared == 512);
    g_assert(s.pages_sharing == 1024);
    g_assert(mem_anonymous(f->mem, 0, 1536) == 0);
    mem_check(f->mem);
    /* a writer gets a page of its own, nobody else sees it */
    mem_write(f->mem, 3, 17, 'w');
    mem_check(f->mem);
    g_assert(mem_anonymous(f->mem, 0, 1536) == 1);
}

static uint64_t hash_colliding(const void *page, uint64_t seed)
{
    uint32_t low = hash_base(page, seed);

    return low | (uint64_t)(low ^ 0x12345678) << 32;
}

static void run_collisions(Fixture *f)
{
    static const char zeroes[PAGE];
    KsmStats s;

    f->engine->hasher.fn = hash_colliding;
    f->engine->hasher.zero = hash_colliding(zeroes, f->engine->hasher.seed);
    mem_fill_run(f->mem, 0, 512, 1000, 1);
    mem_fill_run(f->mem, 512, 512, 1000, 1);
    mem_fill_run(f->mem, 1024, 512, 1000, 1);
    for (unsigned i = 0; i < 10 * PASSES; i++) {
        util_passes(f->engine, 1);
        s = util_stats(f->engine);
        if (s.pages_sharing == 1024) {
            break;
        }
    }
    g_assert(s.pages_sharing == 1024);
    g_assert(s.verify_failed > 0);
    mem_check(f->mem);
    /* known by now: nobody compares the same pages for ever */
    settle(f);
    g_assert(util_stats(f->engine).verify_failed == s.verify_failed);
}

static void run_unique(Fixture *f)
{
    mem_fill_run(f->mem, 0, PAGES, 1, 1);
    settle(f);
    g_assert(util_stats(f->engine).merged == 0);
    g_assert(util_stats(f->engine).isolations == 0);
    g_assert(mem_mappings(f->mem) == 1);
    mem_check(f->mem);
}

static void run_zeroes(Fixture *f)
{
    KsmStats s;

    mem_fill_run(f->mem, 0, 512, 0, 0);
    mem_fill_run(f->mem, 512, 512, 1, 1);
    mem_fill_run(f->mem, 768, 128, 0, 0);
    settle(f);
    s = util_stats(f->engine);
    g_assert(s.zero_pages == 640);
    g_assert(mem_present(f->mem, 0, 512) == 0);
    g_assert(s.merged_runs == 0);
    mem_check(f->mem);
}

static void run_pattern(Fixture *f)
{
    KsmStats s;

    mem_fill_run(f->mem, 0, PAGES, 0xcc, 0);
    settle(f);
    s = util_stats(f->engine);
    /* a quarter of it is the pattern's own slots */
    g_assert(s.pages_sharing >= PAGES * 3 / 4);
    /* far fewer mappings than pages */
    g_assert(mem_mappings(f->mem) < PAGES / 8);
    mem_check(f->mem);
}

static void run_scope_zero(Fixture *f)
{
    mem_fill_run(f->mem, 0, 512, 7, 0);
    mem_fill_run(f->mem, 512, 512, 0, 0);
    settle(f);
    g_assert(util_stats(f->engine).zero_pages == 512);
    g_assert(util_stats(f->engine).pages_sharing == 0);
    g_assert(mem_anonymous(f->mem, 0, 512) == 512);
    mem_check(f->mem);
}

static void run_discard(Fixture *f)
{
    mem_fill_run(f->mem, 0, 512, 1000, 1);
    mem_fill_run(f->mem, 512, 512, 1000, 1);
    settle(f);
    g_assert(util_stats(f->engine).pages_sharing == 512);
    mem_write(f->mem, 20, 0, 'w');
    g_assert(ksm_discard(f->region, 10 * PAGE, 600 * PAGE) == 0);
    mem_gone(f->mem, 10, 600);
    mem_check(f->mem);
    /* it is anonymous now: the program's own discard works, too */
    mem_fill(f->mem, 15, 99);
    madvise(f->mem->addr + 10 * PAGE, 600 * PAGE, MADV_DONTNEED);
    mem_gone(f->mem, 10, 600);
    mem_check(f->mem);
    settle(f);
    mem_check(f->mem);
}

static void run_free_hint(Fixture *f)
{
    KsmStats before;

    mem_fill_run(f->mem, 0, 512, 1000, 1);
    mem_fill_run(f->mem, 512, 512, 1000, 1);
    mem_fill_run(f->mem, 1024, 256, 9000, 1);
    settle(f);
    /* merged memory and other */
    g_assert(ksm_free_hint(f->region, 0, 256 * PAGE) == 0);
    g_assert(ksm_free_hint(f->region, 1024 * PAGE, 256 * PAGE) == 0);
    for (unsigned i = 0; i < 1280; i = i == 255 ? 1024 : i + 1) {
        const char *page = f->mem->addr + i * PAGE;
        const char *old = f->mem->shadow + i * PAGE;

        g_assert(!memcmp(page, old, PAGE) ||
                 (page[0] == 0 && !memcmp(page, page + 1, PAGE - 1)));
    }
    /* taken again before any pass: noticed later */
    before = util_stats(f->engine);
    mem_fill_run(f->mem, 0, 256, 5000, 1);
    mem_fill_run(f->mem, 1024, 256, 9000, 1);
    mem_check(f->mem);
    settle(f);
    ksm_freer_set_decay(f->engine->freer, 0);
    settle(f);
    mem_check(f->mem);
    g_assert(util_stats(f->engine).free_hinted == 512);
    g_assert(util_stats(f->engine).pages_scanned >=
             before.pages_scanned + 512);
}

/*
 * Freed memory is not looked at until it is written; small pages not before
 * what stayed free was given back.
 */
static void run_freed_rests(Fixture *f)
{
    KsmStats before, after;

    mem_fill_run(f->mem, 0, PAGES, 1, 1);
    settle(f);
    if (f->region->dirty == KSM_DIRTY_PAGEMAP) {
        /* written earlier; a log would tell of it afterwards */
        mem_fill_run(f->mem, 0, PAGES, 1, 1);
    }
    g_assert(ksm_free_hint(f->region, 0, PAGES * PAGE) == 0);
    before = util_stats(f->engine);
    ksm_rescan(f->engine);
    settle(f);
    after = util_stats(f->engine);
    g_assert(after.pages_scanned == before.pages_scanned);
    g_assert(after.reasons[KSM_REASON_FREED] == PAGES);
    mem_fill_run(f->mem, 0, PAGES / 2, 1, 1);
    ksm_freer_set_decay(f->engine->freer, 0);
    settle(f);
    after = util_stats(f->engine);
    g_assert(after.pages_scanned >= before.pages_scanned + PAGES / 2);
    g_assert(after.pages_scanned <= before.pages_scanned + PAGES / 2 + BATCH);
    g_assert(after.reasons[KSM_REASON_FREED] >= PAGES / 2 - BATCH);
    mem_fill_run(f->mem, PAGES / 2, PAGES / 2, 1, 1);
    mem_check(f->mem);
}

static uint64_t idle_ns;

static uint64_t now_idle(void)
{
    return idle_ns;
}

/* An idle engine makes no pass, but still gives freed memory back. */
static void run_freed_idle(Fixture *f)
{
    KsmEngine *e = f->engine;
    uint64_t scans;
    int64_t wait;

    mem_fill_run(f->mem, 0, PAGES, 1, 1);
    settle(f);
    g_assert(e->scan.idle_ns > 0);
    /* a busy machine may take longer than the memory waits */
    idle_ns = prim.now_ns();
    prim.now_ns = now_idle;
    ksm_freer_set_decay(e->freer, 20000000);
    g_assert(ksm_free_hint(f->region, 0, PAGES * PAGE) == 0);
    e->scan.due = prim.now_ns() + UINT64_C(3600000000000);
    scans = util_stats(e).full_scans;
    wait = ksm_step(e, 0);
    g_assert(wait > 0 && wait <= 20000000);
    for (unsigned i = 0; i < 10000 && freer_wait(e->freer) >= 0; i++) {
        idle_ns += wait;
        wait = ksm_step(e, 0);
    }
    g_assert(freer_wait(e->freer) == -1);
    /* only the next pass is left to wait for */
    g_assert(ksm_step(e, 0) > INT64_C(3000000000000));
    g_assert(util_stats(e).full_scans == scans);
    prim.now_ns = prim_real.now_ns;
    mem_fill_run(f->mem, 0, PAGES, 1, 1);
}

static void run_unmerge(Fixture *f)
{
    mem_fill_run(f->mem, 0, 1024, 1000, 1);
    mem_fill_run(f->mem, 1024, 1024, 1000, 1);
    settle(f);
    g_assert(util_stats(f->engine).pages_sharing == 1024);
    mem_write(f->mem, 5, 5, 'w');
    ksm_engine_set_run(f->engine, false);
    g_assert(ksm_unmerge(f->region, 0, PAGES * PAGE) == 0);
    g_assert(util_stats(f->engine).pages_sharing == 0);
    g_assert(mem_anonymous(f->mem, 0, PAGES) == PAGES);
    mem_check(f->mem);
    /* and merges again */
    ksm_engine_set_run(f->engine, true);
    ksm_rescan(f->engine);
    settle(f);
    g_assert(util_stats(f->engine).pages_sharing >= 1000);
    mem_check(f->mem);
}

static void run_busy(Fixture *f)
{
    mem_fill_run(f->mem, 0, 512, 1000, 1);
    mem_fill_run(f->mem, 512, 512, 1000, 1);
    f->mem->busy = true;
    settle(f);
    g_assert(util_stats(f->engine).merged == 0);
    g_assert(util_stats(f->engine).busy > 0);
    g_assert(util_stats(f->engine).reasons[KSM_REASON_BUSY] > 0);
    mem_check(f->mem);
    f->mem->busy = false;
}

static void run_inhibited(Fixture *f)
{
    f->mem->inhibited = "a test says so";
    mem_fill_run(f->mem, 0, PAGES, 0xcc, 0);
    for (unsigned i = 0; i < 50; i++) {
        ksm_step(f->engine, 0);
    }
    g_assert(util_stats(f->engine).merged == 0);
    g_assert(util_stats(f->engine).state == KSM_STATE_INHIBITED);
    g_assert(!g_strcmp0(util_stats(f->engine).inhibited, "a test says so"));
    f->mem->inhibited = NULL;
    settle(f);
    g_assert(util_stats(f->engine).merged > 0);
    mem_check(f->mem);
}

static void run_off(Fixture *f)
{
    ksm_engine_set_run(f->engine, false);
    mem_fill_run(f->mem, 0, PAGES, 0xcc, 0);
    for (unsigned i = 0; i < 50; i++) {
        ksm_step(f->engine, 0);
    }
    g_assert(util_stats(f->engine).merged == 0);
    g_assert(util_stats(f->engine).state == KSM_STATE_OFF);
    mem_check(f->mem);
}

static void run_quiet(Fixture *f)
{
    KsmStats before, after;

    mem_fill_run(f->mem, 0, PAGES, 1, 1);
    settle(f);
    if (f->region->chunk[0].flags & CHUNK_LOOSE) {
        /* looked at three times more, then watched */
        util_passes(f->engine, 200);
        g_assert(!(f->region->chunk[0].flags & CHUNK_LOOSE));
        g_assert(util_stats(f->engine).pages_scanned == 4 * PAGES);
    }
    before = util_stats(f->engine);
    settle(f);
    after = util_stats(f->engine);
    g_assert(after.pages_scanned == before.pages_scanned);
    g_assert(after.full_scans > before.full_scans);
}

static void run_forget(Fixture *f)
{
    mem_fill_run(f->mem, 0, 512, 1000, 1);
    mem_fill_run(f->mem, 512, 512, 1000, 1);
    settle(f);
    g_assert(ksm_region_remove(f->region, KSM_REMOVE_FORGET) == 0);
    f->region = NULL;
    g_assert(util_stats(f->engine).pages_sharing == 0);
    g_assert(util_stats(f->engine).pages_total == 0);
}

static void set_up(gpointer fixture, gconstpointer data)
{
    const Case *c = data;
    Fixture *f = fixture;

    f->engine = util_engine(c->scope, c->dirty);
    if (!f->engine) {
        return;
    }
    f->mem = mem_new(PAGES, 0, c->kind);
    f->region = util_add(f->engine, f->mem,
                         c->dirty == KSM_DIRTY_LOG ? &mem_ops_log : &mem_ops);
}

static void run_case(gpointer fixture, gconstpointer data)
{
    const Case *c = data;
    Fixture *f = fixture;

    if (f->engine) {
        c->run(f);
    }
}

static void tear_down(gpointer fixture, gconstpointer data)
{
    Fixture *f = fixture;

    if (!f->engine) {
        return;
    }
    if (f->region) {
        util_remove(f->region);
        mem_check(f->mem);
    }
    ksm_engine_free(f->engine);
    mem_free(f->mem);
}

static void refuse(void *addr, size_t len, const char *word)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_AUTO);
    g_autoptr(GError) err = NULL;

    if (!e) {
        return;
    }
    g_assert(!ksm_region_add(e, addr, len, -1, NULL, NULL, &err));
    g_assert(err && err->domain == KSM_ERROR);
    g_test_message("%s", err->message);
    g_assert(strstr(err->message, word));
    ksm_engine_free(e);
}

static void test_refuses(void)
{
    char *shared = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char *heap = sbrk(2 * PAGE);
    char *locked = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    refuse(shared, CHUNK, "shared");
    refuse(locked + 1, PAGE, "multiple");
    /* a sanitizer makes mlock() do nothing */
    if (syscall(SYS_mlock, locked, 16 * PAGE) == 0) {
        refuse(locked, 16 * PAGE, "locked");
    }
    /* nothing is mapped that low unasked */
    refuse((char *)CHUNK, CHUNK, "mapped");
    heap = (char *)(((uintptr_t)heap + PAGE - 1) / PAGE * PAGE);
    /* the heap, or with a sanitizer whatever is there */
    refuse(heap, PAGE, "the memory is");
    munmap(shared, CHUNK);
    munmap(locked, 16 * PAGE);
}

static void test_overlap(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_AUTO);
    g_autoptr(GError) err = NULL;
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(1024, 0, MEM_SMALL);
    r = util_add(e, m, NULL);
    g_assert(!ksm_region_add(e, m->addr + 512 * PAGE, 512 * PAGE, -1, NULL,
                             NULL, &err));
    g_assert(err);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

static void test_names(void)
{
    for (unsigned i = 0; i < KSM_REASON_MAX; i++) {
        g_assert(*ksm_reason_name(i));
        g_assert(*ksm_reason_text(i));
    }
}

/*
 * Tried with each source (but checksum, where hashes are counted) and both
 * sizes of pages.
 */
static const struct {
    const char *name;
    KsmScope scope;
    bool counts_hashes;
    void (*run)(Fixture *f);
} kinds[] = {
    { "duplicates", KSM_SCOPE_VM, false, run_duplicates },
    { "collisions", KSM_SCOPE_VM, false, run_collisions },
    { "unique", KSM_SCOPE_VM, false, run_unique },
    { "zeroes", KSM_SCOPE_VM, false, run_zeroes },
    { "pattern", KSM_SCOPE_VM, false, run_pattern },
    { "scope-zero", KSM_SCOPE_ZERO, false, run_scope_zero },
    { "discard", KSM_SCOPE_VM, false, run_discard },
    { "free-hint", KSM_SCOPE_VM, false, run_free_hint },
    { "freed-rests", KSM_SCOPE_VM, true, run_freed_rests },
    { "freed-idle", KSM_SCOPE_VM, true, run_freed_idle },
    { "unmerge", KSM_SCOPE_VM, false, run_unmerge },
    { "busy", KSM_SCOPE_VM, false, run_busy },
    { "inhibited", KSM_SCOPE_VM, false, run_inhibited },
    { "off", KSM_SCOPE_VM, false, run_off },
    { "quiet", KSM_SCOPE_VM, true, run_quiet },
    { "forget", KSM_SCOPE_VM, false, run_forget },
};

static const struct {
    const char *name;
    KsmDirtySource dirty;
} sources[] = {
    { "pagemap", KSM_DIRTY_PAGEMAP },
    { "log", KSM_DIRTY_LOG },
    { "checksum", KSM_DIRTY_CHECKSUM },
};

/*
 * What /proc says of a page that is being moved: present and exclusive, though
 * a child has it too.
 */
static ssize_t read_looks_exclusive(int fd, void *buf, size_t len,
                                    off_t offset)
{
    ssize_t ret = prim_real.read_at(fd, buf, len, offset);

    if (len == sizeof(uint64_t)) {
        *(uint64_t *)buf |= UINT64_C(1) << 63 | UINT64_C(1) << 56;
    }
    return ret;
}

/* The child's memory is the shadow as it was at the fork. */
static pid_t fork_checker(Mem *m, const int go[2])
{
    pid_t pid;

    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        uint64_t word, i;
        ssize_t n;
        char c;

        close(go[1]);
        do {
            n = read(go[0], &c, 1);
        } while (n == 1);
        for (i = 0; i < 1024; i++) {
            memcpy(&word, m->addr + (i + 1) * PAGE - sizeof(word),
                   sizeof(word));
            if (word != 1000 + i % 512) {
                _exit(1);
            }
        }
        _exit(0);
    }
    g_assert(pid > 0);
    return pid;
}

/* A child's memory stays while the parent uses slots anew. */
static void test_fork(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    Mem *m = mem_new(PAGES, 0, MEM_SMALL);
    Fixture f = { .engine = e, .mem = m };
    int go[2], status;
    uint64_t leaked;
    pid_t pid;

    if (!e) {
        mem_free(m);
        return;
    }
    f.region = util_add(e, m, &mem_ops);
    mem_fill_run(m, 0, 512, 1000, 1);
    mem_fill_run(m, 512, 512, 1000, 1);
    settle(&f);
    g_assert(util_stats(e).pages_sharing == 512);
    g_assert(!pipe(go));
    pid = fork_checker(m, go);
    prim.read_at = read_looks_exclusive;
    for (unsigned i = 1; i < 4; i++) {
        mem_fill_run(m, 0, 512, 10000 * i, 1);
        mem_fill_run(m, 512, 512, 10000 * i, 1);
        settle(&f);
        ksm_rescan(e);
        settle(&f);
    }
    prim.read_at = prim_real.read_at;
    mem_check(m);
    leaked = engine_pool(e)->leaked;
    close(go[0]);
    close(go[1]);
    g_assert(waitpid(pid, &status, 0) == pid);
    g_assert(status == 0);
    g_assert(engine_pool(e)->keep_all || leaked >= 512);
    settle(&f);
    g_assert(engine_pool(e)->keep_all || engine_pool(e)->leaked == 0);
    util_remove(f.region);
    g_assert(engine_pool(e)->keep_all ||
             engine_pool(e)->vacant.n == engine_pool(e)->top);
    ksm_engine_free(e);
    mem_check(m);
    mem_free(m);
}

/* Ids of removed regions are used again, wherever they are. */
static void test_ids(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_AUTO);
    Mem *m = e ? mem_new(24 * 512, 0, MEM_SMALL) : NULL;
    KsmRegion *r[8] = { NULL };
    g_autoptr(GError) err = NULL;

    if (!e) {
        return;
    }
    for (unsigned i = 0; i < 8; i++) {
        r[i] = ksm_region_add(e, m->addr + i * CHUNK, CHUNK, -1, &mem_ops, m,
                              NULL);
        g_assert(r[i]);
    }
    for (unsigned i = 0; i < 8; i += 2) {
        util_remove(r[i]);
    }
    r[0] = ksm_region_add(e, m->addr + 8 * CHUNK, 5 * CHUNK, -1, &mem_ops, m,
                          NULL);
    g_assert(r[0]);
    g_assert(e->dir.len == 8);
    region_check(r[0]);
    mem_fill_run(m, 8 * 512, 5 * 512, 1000, 1);
    mem_fill_run(m, 512, 512, 2000, 1);
    for (unsigned i = 0; i < PASSES; i++) {
        util_passes(e, 1);
    }
    g_assert(util_stats(e).pages_sharing == 512);
    region_check(r[0]);
    /* all ids can be had, and no more */
    e->dir.used += (1u << 16) - 5;
    g_assert(!ksm_region_add(e, m->addr + 16 * CHUNK, 2 * CHUNK, -1,
                             &mem_ops, m, &err));
    g_assert(g_error_matches(err, KSM_ERROR, KSM_ERROR_RESOURCES));
    g_test_message("%s", err->message);
    g_assert(e->dir.len == 8 && e->regions->len == 5);
    e->dir.used -= (1u << 16) - 5;
    r[2] = ksm_region_add(e, m->addr + 16 * CHUNK, 2 * CHUNK, -1, &mem_ops, m,
                          NULL);
    g_assert(r[2] && e->dir.len == 8 && e->dir.used == 6);
    util_remove(r[0]);
    util_remove(r[2]);
    for (unsigned i = 1; i < 8; i += 2) {
        util_remove(r[i]);
    }
    g_assert(e->dir.chunks == 0 && e->dir.used == 0);
    g_assert(e->content.index.count == 0);
    ksm_engine_free(e);
    mem_check(m);
    mem_free(m);
}

/* What the thread prefers: 8 is somebody's policy, 100 + n ours. */
static int thread_mode;
static unsigned allocated, allocated_wrong, policy_calls;

static int node_get(int *mode, unsigned long *mask, size_t bits)
{
    policy_calls++;
    *mode = thread_mode;
    mask[0] = 5;
    return 0;
}

static int node_set(int mode, const unsigned long *mask, size_t bits)
{
    if (++policy_calls % 3 == 0) {
        return -ENOMEM;
    }
    g_assert(mode == 8 && mask[0] == 5);
    thread_mode = mode;
    return 0;
}

static int node_prefer(int node)
{
    thread_mode = 100 + node;
    return 0;
}

static int node_allocate(int fd, off_t offset, off_t len)
{
    allocated++;
    allocated_wrong += thread_mode != 103;
    return allocated == 3 ? -ENOMEM : prim_real.allocate(fd, offset, len);
}

/* A node's memory has pool pages of that node; the thread's policy stays. */
static void node_of(int node)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_AUTO);
    Mem *m = e ? mem_new(PAGES, 0, MEM_SMALL) : NULL;
    KsmRegion *r;

    if (!e) {
        return;
    }
    thread_mode = 8;
    allocated = allocated_wrong = policy_calls = 0;
    prim.thread_policy_get = node_get;
    prim.thread_policy_set = node_set;
    prim.prefer_node = node_prefer;
    prim.allocate = node_allocate;
    prim.pause = prim_real.pause;
    r = ksm_region_add(e, m->addr, PAGES * PAGE, node, &mem_ops, m, NULL);
    g_assert(r);
    mem_fill_run(m, 0, 512, 1000, 1);
    mem_fill_run(m, 512, 512, 1000, 1);
    mem_fill_run(m, 1024, 512, 77, 0);
    for (unsigned i = 0; i < PASSES; i++) {
        util_passes(e, 1);
    }
    g_assert(util_stats(e).pages_sharing > 800);
    g_assert(thread_mode == 8);
    g_assert(allocated > 0);
    g_assert(node < 0 ? policy_calls == 0 : allocated_wrong == 0);
    still_calls();
    util_remove(r);
    ksm_engine_free(e);
    mem_check(m);
    mem_free(m);
}

static void test_node(void)
{
    node_of(3);
    node_of(-1);
}

/* Others have their turn while a big region is dropped. */
static void test_drop(void)
{
    enum { CHUNKS = 1024 };
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM);
    uint64_t turns;
    KsmRegion *r;
    char *mem;

    if (!e) {
        return;
    }
    mem = mmap(NULL, CHUNKS * CHUNK, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    g_assert(mem != MAP_FAILED);
    /* a page of each chunk, not two GiB */
    g_assert(madvise(mem, CHUNKS * CHUNK, MADV_NOHUGEPAGE) == 0);
    for (unsigned i = 0; i < CHUNKS; i++) {
        mem[i * CHUNK] = 1;
    }
    r = ksm_region_add(e, mem, CHUNKS * CHUNK, -1, NULL, NULL, NULL);
    g_assert(r);
    util_passes(e, 1);
    turns = e->lock.next;
    g_assert(ksm_region_remove(r, KSM_REMOVE_FORGET) == 0);
    g_assert(e->lock.next - turns >= CHUNKS / 8);
    g_assert(e->dir.chunks == 0 && e->dir.chunks * CHUNK_PAGES == 0);
    munmap(mem, CHUNKS * CHUNK);
    ksm_engine_free(e);
}

#define HUGE_LEN    (128 * GROUP_CHUNKS * CHUNK)       /* 16 GiB */
#define PART_PAGES  1000u

static KsmStats huge_stats(KsmEngine *e)
{
    util_passes(e, PASSES);
    return util_stats(e);
}

/* Unique pages, or zeroes, from @at on, in what is not in any Mem. */
static void part_fill(char *mem, size_t at, uint64_t first)
{
    for (size_t i = 0; i < PART_PAGES; i++) {
        memset(mem + at + i * PAGE, 0, PAGE);
        *(uint64_t *)(mem + at + i * PAGE) = first ? first + i : 0;
    }
}

static void part_check(const char *mem, size_t at, uint64_t first)
{
    for (size_t i = 0; i < PART_PAGES; i++) {
        g_assert(*(const uint64_t *)(mem + at + i * PAGE) == first + i);
    }
}

static unsigned huge_synced;

static bool huge_sync(void *opaque, size_t first, size_t n,
                      unsigned long *bitmap)
{
    huge_synced += n;
    return true;    /* nothing was written: not even what was */
}

static const size_t parts_at[] = {
    0, 77 * CHUNK + 5 * PAGE, HUGE_LEN / 2, HUGE_LEN - PART_PAGES * PAGE
};

typedef struct Sparse {
    KsmEngine *e;
    KsmRegion *r;
    char *mem;
    size_t meta;        /* before anything, then with two parts */
} Sparse;

static bool sparse_start(Sparse *s, KsmDirtySource dirty)
{
    static const KsmRegionOps log = { .dirty_sync = huge_sync };
    static const KsmRegionOps none = { NULL };

    s->e = util_engine(KSM_SCOPE_VM, dirty);
    if (!s->e) {
        return false;
    }
    s->mem = mmap(NULL, HUGE_LEN, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    g_assert(s->mem != MAP_FAILED);
    madvise(s->mem, HUGE_LEN, MADV_NOHUGEPAGE);
    part_fill(s->mem, parts_at[0], 1000);
    part_fill(s->mem, parts_at[1], 5000);
    s->meta = util_stats(s->e).metadata;
    s->r = ksm_region_add(s->e, s->mem, HUGE_LEN, -1,
                          dirty == KSM_DIRTY_LOG ? &log : &none, NULL, NULL);
    g_assert(s->r);
    return true;
}

/* What is kept follows what is populated, in the middle of nothing, too. */
static void sparse_grows(Sparse *s)
{
    KsmStats stats = util_stats(s->e);

    g_assert(stats.metadata - s->meta < 64 * 1024);
    g_assert(stats.reasons[KSM_REASON_NOT_SCANNED] == HUGE_LEN / PAGE);
    stats = huge_stats(s->e);
    g_assert(stats.pages_unshared == 2 * PART_PAGES);
    g_assert(stats.reasons[KSM_REASON_NOT_SCANNED] == 0);
    g_assert(stats.metadata - s->meta < 256 * 1024);
    s->meta = stats.metadata;
    part_fill(s->mem, parts_at[2], 1000);
    part_fill(s->mem, parts_at[3], 9000);
    stats = huge_stats(s->e);
    g_assert(stats.pages_unshared == 2 * PART_PAGES);
    g_assert(stats.pages_sharing == PART_PAGES);
    g_assert(stats.metadata > s->meta);
    region_check(s->r);
}

/* Nothing is kept of what is given back. */
static void sparse_shrinks(Sparse *s)
{
    for (unsigned i = 0; i < 2; i++) {
        /* the second time it is a hole */
        g_assert(ksm_discard(s->r, HUGE_LEN / 4, HUGE_LEN / 4 * 3) == 0);
        g_assert(*(uint64_t *)(s->mem + parts_at[2]) == 0);
        huge_stats(s->e);
    }
    part_check(s->mem, parts_at[0], 1000);
    part_check(s->mem, parts_at[1], 5000);
    g_assert(ksm_discard(s->r, 0, HUGE_LEN) == 0);
    g_assert(huge_stats(s->e).metadata <= s->meta);
    g_assert(region_held(s->r) == 0);
    g_assert(region_known(s->r, 0, s->r->n_chunks) == s->r->n_chunks);
}

/* A region of which little is populated. */
static void test_sparse(gconstpointer data)
{
    KsmDirtySource dirty = GPOINTER_TO_INT(data);
    Sparse s;

    if (g_getenv("KSM_TEST_SLOWER")) {
        g_test_skip("the emulated machine has too little memory");
        return;
    }
    if (!sparse_start(&s, dirty)) {
        return;
    }
    sparse_grows(&s);
    sparse_shrinks(&s);
    huge_synced = 0;
    util_passes(s.e, 1);
    g_assert(huge_synced == (dirty == KSM_DIRTY_LOG ? HUGE_LEN / PAGE : 0));
    part_fill(s.mem, parts_at[2], 7000);
    g_assert(huge_stats(s.e).pages_unshared == PART_PAGES);
    util_remove(s.r);
    part_check(s.mem, parts_at[2], 7000);
    munmap(s.mem, HUGE_LEN);
    ksm_engine_free(s.e);
}

static unsigned calls;
static size_t touched;

static int count_advise(void *addr, size_t len, int advice)
{
    calls++;
    touched += advice == MADV_POPULATE_WRITE ? len : 0;
    return prim_real.advise(addr, len, advice);
}

static ssize_t count_pagemap(PmScan *scan)
{
    calls++;
    return still_pagemap(scan);
}

static void *count_map(void *addr, size_t len, int prot, int flags, int fd,
                       off_t offset)
{
    calls++;
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

static int count_register(const UffdRange *range, unsigned mode)
{
    calls++;
    return prim_real.uffd_register(range, mode);
}

static int count_unregister(const UffdRange *range)
{
    calls++;
    return prim_real.uffd_unregister(range);
}

/* Calls to add, and to remove, that much; what an idle pass makes. */
static void count_calls(size_t len, unsigned n[3])
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_AUTO);
    uint64_t turns;
    KsmRegion *r;
    char *mem;

    if (!e) {
        return;
    }
    mem = mmap(NULL, len, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    g_assert(mem != MAP_FAILED);
    part_fill(mem, len / 2, 1000);
    prim.advise = count_advise;
    prim.pagemap = count_pagemap;
    prim.map = count_map;
    prim.uffd_register = count_register;
    prim.uffd_unregister = count_unregister;
    calls = touched = 0;
    r = ksm_region_add(e, mem, len, -1, NULL, NULL, NULL);
    g_assert(r && touched <= 64 * PAGE);
    n[0] = calls;
    util_passes(e, 20);
    calls = 0;
    turns = e->lock.next;
    util_passes(e, 1);
    n[1] = calls;
    g_assert(e->lock.next - turns < 1000);
    turns = e->lock.next;
    calls = 0;
    util_remove(r);
    n[2] = calls;
    g_assert(e->lock.next - turns < 100);
    still_calls();
    part_check(mem, len / 2, 1000);
    munmap(mem, len);
    ksm_engine_free(e);
}

/* However much of nothing is registered, hardly anything is done about it. */
static void test_calls(void)
{
    unsigned small[3] = { 0 }, big[3] = { 0 };

    count_calls(GROUP_CHUNKS * CHUNK, small);
    count_calls(HUGE_LEN, big);
    g_test_message("calls: %u %u %u, %u %u %u", small[0], small[1], small[2],
                   big[0], big[1], big[2]);
    for (unsigned i = 0; i < 3; i++) {
        g_assert(big[i] <= small[i] + 10);
    }
}

/* Memory that must be kept is bounded, and told. */
static void test_kept(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    Mem *m = mem_new(8192, 0, MEM_SMALL);
    Fixture f = { .engine = e, .mem = m };
    KsmStats s;

    if (!e) {
        mem_free(m);
        return;
    }
    f.region = util_add(e, m, &mem_ops);
    engine_pool(e)->keep_all = true;
    for (unsigned i = 0; i < 12; i++) {
        g_assert(ksm_unmerge(f.region, 0, 8192 * PAGE) == 0);
        mem_fill_run(m, 0, 4096, 1 + 10000 * i, 1);
        mem_fill_run(m, 4096, 4096, 1 + 10000 * i, 1);
        settle(&f);
    }
    s = util_stats(e);
    g_assert(engine_pool(e)->leaked > 0);
    g_assert(engine_pool(e)->top <= 64 * 512 + 2 * 8192);
    /* nor is there room for much more than that */
    g_assert(engine_pool(e)->capacity <=
             8192 + 2 * (64 * 512 + engine_pool(e)->leaked));
    g_assert(s.reasons[KSM_REASON_NO_MEMORY] > 0);
    g_assert(s.profit < 0);
    mem_check(m);
    util_remove(f.region);
    ksm_engine_free(e);
    mem_free(m);
}

static Mem *twice;
static GThread *other;
static KsmEngine *ksm_other;

static gpointer add_too(gpointer engine)
{
    return ksm_region_add(engine, twice->addr, twice->pages * PAGE, -1,
                          &mem_ops, twice, NULL);
}

static int other_adds(void *addr, int *mode, unsigned long *mask, size_t bits)
{
    KsmEngine *e = other ? NULL : util_engine(KSM_SCOPE_VM,
                                              KSM_DIRTY_CHECKSUM);

    if (e) {
        other = g_thread_new("other", add_too, e);
        g_usleep(50000);    /* done by then, or waiting for us */
        ksm_other = e;
    }
    return prim_real.policy_get(addr, mode, mask, bits);
}

static void test_twice(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM);
    KsmRegion *r;

    twice = mem_new(PAGES, 0, MEM_SMALL);
    if (!e) {
        mem_free(twice);
        return;
    }
    prim.policy_get = other_adds;
    r = add_too(e);
    prim.policy_get = prim_real.policy_get;
    g_assert(r);
    g_assert(other && !g_thread_join(other));
    util_remove(r);
    ksm_engine_free(e);
    ksm_engine_free(ksm_other);
    mem_free(twice);
}

/* --- forked children --- */

static pid_t child_idle(int go[2])
{
    pid_t pid;

    g_assert(!pipe(go));
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        char c;

        close(go[1]);
        while (read(go[0], &c, 1) > 0) {
            continue;
        }
        _exit(0);
    }
    g_assert(pid > 0);
    return pid;
}

static void child_end(pid_t pid, const int go[2])
{
    int status;

    close(go[0]);
    close(go[1]);
    g_assert(waitpid(pid, &status, 0) == pid);
    g_assert(status == 0);
}

/* Slots kept for a child when all that it may have was written. */
static uint64_t leaked_by_child(KsmEngine *e, Mem *m)
{
    static uint64_t unique;
    uint64_t leaked;
    int go[2];
    pid_t pid;

    mem_fill_run(m, 0, 512, 1, 1);
    mem_fill_run(m, 512, 512, 1, 1);
    util_passes(e, PASSES);
    g_assert(util_stats(e).pages_sharing == 512);
    pid = child_idle(go);
    mem_fill_run(m, 0, 1024, unique += 1024, 1);
    util_passes(e, PASSES);
    g_assert(util_stats(e).pages_sharing == 0);
    leaked = engine_pool(e)->leaked;
    child_end(pid, go);
    util_passes(e, 2);
    g_assert(engine_pool(e)->leaked == 0);
    return leaked;
}

static void stay_home(Mem *m)
{
    g_assert(madvise(m->addr, m->pages * PAGE, MADV_DONTFORK) == 0);
}

/*
 * Nothing is kept for a child that has none of the memory: all regions stay at
 * home, whatever their other attributes, and whatever was removed.
 */
static void test_fork_home(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    KsmRegion *r[4];
    Mem *m[4];

    if (!e || engine_pool(e)->keep_all) {
        g_clear_pointer(&e, ksm_engine_free);
        return;
    }
    for (unsigned i = 0; i < 4; i++) {
        m[i] = mem_new(1024, 0, MEM_SMALL);
    }
    stay_home(m[0]);
    stay_home(m[1]);
    g_assert(madvise(m[1]->addr, 1024 * PAGE, MADV_DONTDUMP) == 0);
    stay_home(m[2]);
    for (unsigned i = 0; i < 3; i++) {
        r[i] = util_add(e, m[i], &mem_ops);
    }
    g_assert(leaked_by_child(e, m[1]) == 0);
    util_remove(r[2]);
    g_assert(leaked_by_child(e, m[0]) == 0);
    r[3] = util_add(e, m[3], &mem_ops);
    g_assert(leaked_by_child(e, m[3]) >= 512);
    util_remove(r[3]);
    r[2] = util_add(e, m[2], &mem_ops);
    g_assert(leaked_by_child(e, m[2]) == 0);
    for (unsigned i = 0; i < 3; i++) {
        util_remove(r[i]);
    }
    ksm_engine_free(e);
    for (unsigned i = 0; i < 4; i++) {
        mem_check(m[i]);
        mem_free(m[i]);
    }
}

static gpointer remove_it(gpointer region)
{
    g_assert(ksm_region_remove(region, KSM_REMOVE_FORGET) == 0);
    return NULL;
}

static pid_t forked;

static gpointer fork_it(gpointer go)
{
    forked = child_idle(go);
    return NULL;
}

/* A region being removed counts as one that a child has. */
static void test_fork_leaving(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    GThread *remover, *forker;
    KsmRegion *r[2];
    Mem *m[2];
    int go[2];

    if (!e || engine_pool(e)->keep_all) {
        g_clear_pointer(&e, ksm_engine_free);
        return;
    }
    for (unsigned i = 0; i < 2; i++) {
        m[i] = mem_new(PAGES, 0, MEM_SMALL);
        if (i == 0) {
            stay_home(m[0]);
        }
        r[i] = util_add(e, m[i], &mem_ops);
    }
    mem_fill_run(m[1], 0, 1024, 1, 1);
    mem_fill_run(m[1], 1024, 1024, 1, 1);
    util_passes(e, PASSES);
    g_assert(util_stats(e).pages_sharing == 1024);
    /* the first chunk is dropped, then there is a child, then the others */
    lock_take(&e->lock);
    remover = g_thread_new("remover", remove_it, r[1]);
    util_awaited(&e->lock, 1);
    forker = g_thread_new("forker", fork_it, go);
    util_awaited(&e->lock, 2);
    lock_release(&e->lock);
    g_thread_join(remover);
    g_thread_join(forker);
    g_assert(e->regions->len == 1);
    g_assert(engine_pool(e)->leaked == 1024);
    child_end(forked, go);
    util_passes(e, 2);
    g_assert(engine_pool(e)->leaked == 0);
    util_remove(r[0]);
    ksm_engine_free(e);
    mem_free(m[0]);
    mem_free(m[1]);
}

/* Calls of a child to the engine of its parent. */
static void in_child(KsmEngine *e, KsmRegion *r, Mem *m)
{
    g_autoptr(GError) err = NULL;
    void *more = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    KsmStats stats;

    g_assert(ksm_step(e, 0) == -1);
    g_assert(ksm_step(e, 1000) == -1);
    g_assert(ksm_discard(r, 0, PAGE) == -EINVAL);
    g_assert(ksm_free_hint(r, 0, PAGE) == -EINVAL);
    g_assert(ksm_unmerge(r, 0, PAGE) == -EINVAL);
    g_assert(ksm_region_remove(r, KSM_REMOVE_UNMERGE) == -ENOTSUP);
    g_assert(!ksm_region_add(e, more, CHUNK, -1, NULL, NULL, &err));
    g_assert(g_error_matches(err, KSM_ERROR, KSM_ERROR_UNSUPPORTED));
    ksm_engine_get_stats(e, &stats);
    g_assert(stats.pages_total == PAGES);
    ksm_engine_free(e);
    mem_check(m);
    _exit(0);
}

static void test_fork_dead(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    Mem *m = mem_new(PAGES, 0, MEM_SMALL);
    KsmRegion *r;
    int status;
    pid_t pid;

    if (!e) {
        mem_free(m);
        return;
    }
    r = util_add(e, m, &mem_ops);
    mem_fill_run(m, 0, 1024, 1, 1);
    mem_fill_run(m, 1024, 1024, 1, 1);
    util_passes(e, PASSES);
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        in_child(e, r, m);
    }
    g_assert(pid > 0 && waitpid(pid, &status, 0) == pid);
    g_assert(status == 0);
    g_assert(ksm_step(e, 0) >= 0);
    g_assert(util_stats(e).pages_sharing >= 1024 - STILL_FEW);
    util_remove(r);
    mem_check(m);
    ksm_engine_free(e);
    mem_free(m);
}

/* --- statistics --- */

static KsmStats region_stats(KsmRegion *r)
{
    KsmStats s;

    ksm_region_get_stats(r, &s);
    return s;
}

/* What a region has is its own; the engine's is the sum of all. */
static void check_sum(KsmEngine *e, KsmRegion *a, KsmRegion *b)
{
    KsmStats s = util_stats(e), sa = region_stats(a), sb = region_stats(b);

    g_assert(s.pages_total == sa.pages_total + sb.pages_total);
    g_assert(s.pages_unshared == sa.pages_unshared + sb.pages_unshared);
    g_assert(s.pages_volatile == sa.pages_volatile + sb.pages_volatile);
    g_assert(s.zero_pages == sa.zero_pages + sb.zero_pages);
    g_assert(s.merged == sa.merged + sb.merged);
    g_assert(s.merged_runs == sa.merged_runs + sb.merged_runs);
    g_assert(s.page_tables == sa.page_tables + sb.page_tables);
    g_assert(s.cow_broken == sa.cow_broken + sb.cow_broken);
    g_assert(s.free_hinted == sa.free_hinted + sb.free_hinted);
    g_assert(s.pages_shared + s.pages_sharing ==
             sa.pages_sharing + sb.pages_sharing);
    g_assert(s.metadata > sa.metadata + sb.metadata);
    for (unsigned i = 0; i < KSM_REASON_MAX; i++) {
        g_assert(s.reasons[i] == sa.reasons[i] + sb.reasons[i]);
    }
    /* a mapping takes 500 bytes to 1 KiB of the kernel's memory */
    g_assert(s.page_tables >= 500 * s.merged_runs);
    g_assert(s.page_tables <= 1024 * s.merged_runs);
    g_assert(s.profit == (int64_t)((s.pages_sharing + s.zero_pages) * PAGE) -
                         (int64_t)s.metadata - (int64_t)s.page_tables);
    g_assert(sa.profit == (int64_t)((sa.pages_sharing + sa.zero_pages) * PAGE)
                          - (int64_t)sa.metadata - (int64_t)sa.page_tables);
}

static void test_stats(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_AUTO);
    Mem *a = mem_new(1024, 0, MEM_SMALL), *b = mem_new(1024, 0, MEM_SMALL);
    KsmRegion *ra, *rb;
    KsmStats s;

    if (!e) {
        mem_free(a);
        mem_free(b);
        return;
    }
    g_assert(util_stats(e).dirty == KSM_DIRTY_AUTO);
    g_assert(util_stats(e).state == KSM_STATE_IDLE);
    ra = util_add(e, a, &mem_ops_log);
    g_assert(util_stats(e).dirty == KSM_DIRTY_LOG);
    rb = util_add(e, b, &mem_ops);
    g_assert(util_stats(e).dirty == KSM_DIRTY_AUTO);
    g_assert(region_stats(ra).dirty == KSM_DIRTY_LOG);
    g_assert(region_stats(rb).dirty == rb->dirty);
    mem_fill_run(a, 0, 512, 1, 1);
    mem_fill_run(b, 0, 512, 1, 1);
    mem_fill_run(a, 512, 100, 0, 0);
    mem_fill_run(a, 612, 400, 5000, 1);
    util_passes(e, PASSES);
    check_sum(e, ra, rb);
    s = region_stats(ra);
    g_assert(s.pages_total == 1024 && s.pages_sharing == 512);
    g_assert(s.pages_unshared == 400 && s.zero_pages == 100);
    g_assert(s.reasons[KSM_REASON_UNIQUE] == 400);
    g_assert(s.merged == 612 && s.merged_runs >= 1);
    /* six bytes a page, and little else */
    g_assert(s.metadata >= 6 * 1024 && s.metadata <= 16 * 1024);
    mem_fill_run(a, 100, 10, 9000, 1);
    mem_fill_run(b, 200, 20, 9500, 1);
    g_assert(ksm_free_hint(rb, 500 * PAGE, 7 * PAGE) == 0);
    util_passes(e, PASSES);
    mem_fill_run(a, 700, 33, 7777, 1);
    util_passes(e, 1);
    check_sum(e, ra, rb);
    s = region_stats(ra);
    g_assert(s.cow_broken == 10 && s.free_hinted == 0);
    g_assert(s.pages_volatile == 33);
    g_assert(s.reasons[KSM_REASON_VOLATILE] == 33);
    g_assert(region_stats(rb).cow_broken >= 20);
    g_assert(region_stats(rb).free_hinted == 7);
    mem_fill_run(b, 500, 7, 1, 1);
    util_remove(ra);
    util_remove(rb);
    ksm_engine_free(e);
    mem_free(a);
    mem_free(b);
}

/* Why nothing is merged at all has a name of its own. */
static void test_stats_state(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    Mem *m = mem_new(1024, 0, MEM_SMALL);
    KsmRegion *r;
    KsmStats s;

    if (!e) {
        mem_free(m);
        return;
    }
    r = util_add(e, m, &mem_ops);
    mem_fill_run(m, 0, 1024, 1, 1);
    util_passes(e, PASSES);
    s = util_stats(e);
    g_assert(s.state == KSM_STATE_IDLE && region_stats(r).state == s.state);
    mem_fill_run(m, 0, 300, 5000, 1);
    util_passes(e, 1);
    s = util_stats(e);
    g_assert(s.reasons[KSM_REASON_VOLATILE] == 300);
    g_assert(s.reasons[KSM_REASON_INHIBITED] == 0);
    m->inhibited = "a test says so";
    util_passes(e, 1);
    for (unsigned i = 0; i < 2; i++) {
        s = i ? region_stats(r) : util_stats(e);
        g_assert(s.state == KSM_STATE_INHIBITED);
        g_assert(!g_strcmp0(s.inhibited, "a test says so"));
        g_assert(s.reasons[KSM_REASON_INHIBITED] == 300);
        g_assert(s.reasons[KSM_REASON_VOLATILE] == 0);
        g_assert(s.reasons[KSM_REASON_NOT_SCANNED] == 0);
        g_assert(s.reasons[KSM_REASON_UNIQUE] == 724);
    }
    m->inhibited = NULL;
    util_passes(e, 1);
    s = util_stats(e);
    g_assert(s.state != KSM_STATE_INHIBITED && !s.inhibited);
    g_assert(s.reasons[KSM_REASON_INHIBITED] == 0);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

/* What was not looked at before it was switched off never will be. */
static void test_stats_off(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    Mem *m = mem_new(1024, 0, MEM_SMALL);
    uint64_t left = 0;
    KsmRegion *r;
    KsmStats s;

    if (!e) {
        mem_free(m);
        return;
    }
    r = util_add(e, m, &mem_ops);
    mem_fill_run(m, 0, 1024, 1, 1);
    for (unsigned i = 0; !left; i++) {
        g_assert(i < 1000 && ksm_step(e, 1) >= 0);
        left = util_stats(e).reasons[KSM_REASON_NOT_SCANNED];
    }
    g_assert(util_stats(e).reasons[KSM_REASON_RUN_OFF] == 0);
    ksm_engine_set_run(e, false);
    for (unsigned i = 0; i < 2; i++) {
        s = i ? region_stats(r) : util_stats(e);
        g_assert(s.state == KSM_STATE_OFF);
        g_assert(s.reasons[KSM_REASON_RUN_OFF] == left);
        g_assert(s.reasons[KSM_REASON_NOT_SCANNED] == 0);
    }
    ksm_engine_set_run(e, true);
    util_passes(e, PASSES);
    s = util_stats(e);
    g_assert(s.reasons[KSM_REASON_RUN_OFF] == 0 && s.pages_unshared == 1024);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

static void test_stats_stall(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM);
    KsmStats s;

    if (!e) {
        return;
    }
    s = util_stats(e);
    g_assert(s.stall_count == 0 && s.stall_p50 == 0 && s.stall_max == 0);
    stalls_add(&e->merge.stalls, 999);
    s = util_stats(e);
    g_assert(s.stall[0] == 1 && s.stall_count == 1);
    g_assert(s.stall_p50 == 999 && s.stall_p99 == 999 && s.stall_max == 999);
    for (unsigned i = 0; i < 98; i++) {
        stalls_add(&e->merge.stalls, i % 2 ? 1000 : 1999);
    }
    stalls_add(&e->merge.stalls, UINT64_C(1000000000));
    s = util_stats(e);
    g_assert(s.stall[0] == 1 && s.stall[1] == 98 && s.stall[20] == 1);
    g_assert(s.stall_count == 100 && s.stall_max == UINT64_C(1000000000));
    /* to the quarter of a bucket */
    g_assert(s.stall_p50 == 1250 && s.stall_p99 == 2000);
    stalls_add(&e->merge.stalls, 3000);
    s = util_stats(e);
    g_assert(s.stall[2] == 1 && s.stall_p50 == 2000 && s.stall_p99 == 3500);
    for (unsigned i = 0; i < 200; i++) {
        stalls_add(&e->merge.stalls, UINT64_C(900000000));
    }
    s = util_stats(e);
    g_assert(s.stall_p50 == UINT64_C(917504000));
    g_assert(s.stall_max == UINT64_C(1000000000));
    stalls_add(&e->merge.stalls, UINT64_MAX);
    s = util_stats(e);
    g_assert(s.stall[KSM_STALL_BUCKETS - 1] == 1);
    g_assert(s.stall_max == UINT64_MAX);
    ksm_engine_free(e);
}

/* A value out of range becomes the nearest valid one. */
static void test_config(void)
{
    KsmConfig config;
    KsmEngine *e;

    if (!ksm_supported(NULL)) {
        g_test_skip("no engine here");
        return;
    }
    ksm_config_init(&config);
    g_assert(config.max_cpu == 10 && config.split_min_pages == 64);
    g_assert(config.threads == 1);
    g_assert(config.max_page_sharing == 256 && config.smart_scan);
    g_assert(config.vma_reserve_percent == 25 && !config.vma_reserve);
    g_assert(config.stall_limit_ns == 1000000 && !config.target_scan_s);
    config.max_cpu = config.split_min_pages = config.max_page_sharing = 0;
    e = stores_engine_new(&config, NULL);
    g_assert(e->cfg.max_cpu == 1 && e->plan.split_min_pages == 1);
    g_assert(e->cfg.max_page_sharing == 2);
    ksm_engine_set_max_cpu(e, 1000);
    g_assert(e->cfg.max_cpu == 1000 && engine_max_cpu(e) == 100);
    ksm_engine_set_threads(e, 3);
    g_assert(engine_max_cpu(e) == 300);
    ksm_engine_set_threads(e, 0);
    g_assert(e->cfg.threads == 1 && engine_max_cpu(e) == 100);
    ksm_engine_set_max_cpu(e, 37);
    g_assert(e->cfg.max_cpu == 37);
    ksm_engine_set_max_cpu(e, 0);
    g_assert(e->cfg.max_cpu == 1);
    ksm_engine_free(e);
    config.max_cpu = config.split_min_pages = UINT_MAX;
    config.max_page_sharing = config.vma_reserve_percent = UINT_MAX;
    config.threads = UINT_MAX;
    e = stores_engine_new(&config, NULL);
    g_assert(e->cfg.threads == KSM_THREADS_MAX);
    g_assert(engine_max_cpu(e) == 100 * KSM_THREADS_MAX);
    g_assert(e->plan.split_min_pages == 512);
    g_assert(e->cfg.max_page_sharing > 256);
    g_assert(e->vmas.percent == 99);
    ksm_engine_free(e);
}

/* --- more than is asked about at once --- */

#define BIG_CHUNKS  66u
#define BIG_PAGES   (BIG_CHUNKS * 512)
static unsigned big_asked[BIG_PAGES / 64];

/* In words of a bitmap, where the region begins at one. */
static bool big_sync(void *opaque, size_t first, size_t n,
                     unsigned long *bitmap)
{
    g_assert(first + n <= BIG_PAGES);
    for (size_t i = first; i < first + n; i++) {
        big_asked[i / 64]++;
    }
    return mem_ops_log.dirty_sync(opaque, first, n, bitmap);
}

/* Writes are found anywhere, and asked about once a pass. */
static void test_big(gconstpointer data)
{
    KsmDirtySource dirty = GPOINTER_TO_INT(data);
    KsmRegionOps ops = dirty == KSM_DIRTY_LOG ? mem_ops_log : mem_ops;
    KsmEngine *e = util_engine(KSM_SCOPE_VM, dirty);
    /* first and last, and around the end of the first piece */
    static const size_t at[] = { 0, 63 * 512 + 380, 64 * 512 - 100,
                                 65 * 512 + 50, BIG_PAGES - 16 };
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(BIG_PAGES, 100, MEM_SMALL);
    if (ops.dirty_sync) {
        ops.dirty_sync = big_sync;
    }
    r = util_add(e, m, &ops);
    util_passes(e, 3);
    for (unsigned i = 0; i < G_N_ELEMENTS(at); i++) {
        mem_fill_run(m, at[i], 16, 1, 1);
    }
    util_passes(e, 6);
    g_assert(util_stats(e).pages_sharing == 16 * (G_N_ELEMENTS(at) - 1));
    for (unsigned i = 0; i < G_N_ELEMENTS(at); i++) {
        mem_fill_run(m, at[i] + (i == 4 ? -40 : 100), 16, 700, 1);
    }
    util_passes(e, 6);
    g_assert(util_stats(e).pages_sharing == 32 * (G_N_ELEMENTS(at) - 1));
    memset(big_asked, 0, sizeof(big_asked));
    util_passes(e, 1);
    for (unsigned i = 0; i < G_N_ELEMENTS(big_asked); i++) {
        g_assert(big_asked[i] == (dirty == KSM_DIRTY_LOG ? 64 : 0));
    }
    for (unsigned i = 0; i < G_N_ELEMENTS(at); i++) {
        size_t from = at[i] * PAGE;

        g_assert(!memcmp(m->addr + from, m->shadow + from, 16 * PAGE));
    }
    region_check(r);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

static void add_case(unsigned i, unsigned k, MemPages pages)
{
    g_autofree char *path =
        g_strdup_printf("/engine/%s/%s/%s", kinds[i].name, sources[k].name,
                        pages == MEM_HUGE ? "huge" : "small");
    static Case cases[G_N_ELEMENTS(kinds) * G_N_ELEMENTS(sources) * 2];
    static unsigned n_cases;
    Case *c = &cases[n_cases++];

    *c = (Case) { kinds[i].scope, sources[k].dirty, pages, kinds[i].run };
    g_test_add_vtable(path, sizeof(Fixture), c,
                      set_up, run_case, tear_down);
}

/* Of two regions one may not be merged: it says so, and why. */
static void test_stats_inhibited(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM);
    Mem *a, *b;
    KsmRegion *ra, *rb;
    KsmStats s;

    if (!e) {
        return;
    }
    a = mem_new(CHUNK_PAGES, 0, MEM_SMALL);
    b = mem_new(CHUNK_PAGES, 0, MEM_SMALL);
    mem_fill_run(a, 0, CHUNK_PAGES, 1, 1);
    mem_fill_run(b, 0, CHUNK_PAGES, 1, 1);
    ra = util_add(e, a, &mem_ops);
    rb = util_add(e, b, &mem_ops);
    a->inhibited = "a device";
    util_passes(e, 4);
    ksm_region_get_stats(ra, &s);
    g_assert(s.state == KSM_STATE_INHIBITED);
    g_assert(!g_strcmp0(s.inhibited, "a device"));
    g_assert(s.reasons[KSM_REASON_NOT_SCANNED] == 0);
    g_assert(s.reasons[KSM_REASON_VOLATILE] == 0);
    ksm_region_get_stats(rb, &s);
    g_assert(s.state != KSM_STATE_INHIBITED && !s.inhibited);
    g_assert(s.reasons[KSM_REASON_INHIBITED] == 0);
    a->inhibited = NULL;
    util_remove(ra);
    util_remove(rb);
    ksm_engine_free(e);
    mem_free(a);
    mem_free(b);
}

/* --- two areas --- */

static void test_merge(gconstpointer data)
{
    KsmDirtySource dirty = GPOINTER_TO_INT(data);
    const KsmRegionOps *ops = dirty == KSM_DIRTY_LOG ? &mem_ops_log : NULL;
    Pair p;
    KsmStats s;

    if (!pair_start(&p, KSM_SCOPE_VM, dirty, ops, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    s = util_stats(p.e);
    g_assert(s.dirty == dirty);
    g_assert(s.pages_shared >= 1024 - STILL_FEW);
    g_assert(s.pages_sharing >= 1024 - STILL_FEW);
    g_assert(s.merged >= 2048 - 2 * STILL_FEW);
    g_assert(s.merged_runs <= 4 + 2 * STILL_FEW);
    g_assert(mem_anonymous(p.a, 0, 1024) <= STILL_FEW);
    g_assert(mem_present(p.a, 0, 1024) >= 1024 - STILL_FEW);
    g_assert(mem_present(p.b, 0, 1024) >= 1024 - STILL_FEW);
    g_assert(s.profit > 1000 * 4096 - (int64_t)s.metadata - 65536);
    /* writes are noticed, and nothing else changes */
    for (unsigned i = 0; i < 100; i++) {
        mem_write(p.b, i * 3, i, 1);
    }
    mem_check(p.a);
    util_passes(p.e, 6);
    s = util_stats(p.e);
    g_assert(s.cow_broken == 100);
    g_assert(s.pages_sharing == 1024 - 100);
    pair_end(&p);
}

static void test_inhibited(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops,
                    MEM_SMALL)) {
        return;
    }
    p.a->inhibited = p.b->inhibited = "for the test";
    util_passes(p.e, 4);
    g_assert(util_stats(p.e).state == KSM_STATE_INHIBITED);
    g_assert(!strcmp(util_stats(p.e).inhibited, "for the test"));
    g_assert(util_stats(p.e).merged == 0);
    p.a->inhibited = p.b->inhibited = NULL;
    util_passes(p.e, 6);
    g_assert(util_stats(p.e).pages_sharing == 1024);
    ksm_engine_set_run(p.e, false);
    /* merged memory is still looked after */
    g_assert(ksm_step(p.e, 0) > 0);
    g_assert(util_stats(p.e).state == KSM_STATE_OFF);
    g_assert(ksm_unmerge(p.ra, 0, 1024 * PAGE) == 0);
    g_assert(ksm_unmerge(p.rb, 0, 1024 * PAGE) == 0);
    /* a remote store's answers are users of slots for some passes */
    for (unsigned i = 0; ksm_step(p.e, 1000000000) >= 0; i++) {
        g_assert(i < 1000 && store_is_remote(p.e->content.store));
    }
    ksm_engine_set_run(p.e, true);
    pair_end(&p);
}

/* Who is about to pin memory waits for what the engine has begun. */
static struct {
    KsmLock *lock;          /* the engine's */
    pthread_t thread;
    bool started;
    int passed;
} settling;

static void *settle_thread(void *opaque)
{
    ksm_settle();
    g_atomic_int_set(&settling.passed, 1);
    return NULL;
}

/* In the middle of it; until the thread waits for the lock that we have. */
static void settle_try(void)
{
    if (settling.started) {
        return;
    }
    settling.started = true;
    g_assert(pthread_create(&settling.thread, NULL, settle_thread, NULL) == 0);
    util_awaited(settling.lock, 1);
    g_assert(!g_atomic_int_get(&settling.passed));
}

static int settle_remap(void *from, size_t len, void *to)
{
    settle_try();
    return prim_real.remap(from, len, to);
}

static int settle_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    settle_try();
    return prim_real.uffd_move(fd, to, from, len, done);
}

static void settle_end(void)
{
    g_assert(settling.started);
    g_assert(pthread_join(settling.thread, NULL) == 0);
    g_assert(settling.passed);
    still_calls();
    memset(&settling, 0, sizeof(settling));
    ksm_settle();
}

static void test_settle(void)
{
    Pair p;

    ksm_settle();
    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    settling.lock = &p.e->lock;
    prim.uffd_move = settle_move;
    util_passes(p.e, 4);
    settle_end();
    g_assert(util_stats(p.e).pages_sharing == 1024);
    settling.lock = &p.e->lock;
    prim.remap = settle_remap;
    g_assert(ksm_unmerge(p.ra, 0, 1024 * PAGE) == -EBUSY);
    settle_end();
    g_assert(util_stats(p.e).pages_sharing > 0);
    g_assert(ksm_unmerge(p.ra, 0, 1024 * PAGE) == 0);
    g_assert(mem_anonymous(p.a, 0, 1024) == 1024);
    pair_end(&p);
}

static void test_unmerge(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    mem_write(p.a, 17, 3, 9);
    g_assert(ksm_unmerge(p.ra, 0, 1024 * PAGE) == 0);
    g_assert(mem_anonymous(p.a, 0, 1024) == 1024);
    mem_check(p.a);
    g_assert(util_stats(p.e).pages_sharing == 0);
    /* and it merges again */
    util_passes(p.e, 8);
    g_assert(util_stats(p.e).pages_sharing >= 1022);
    pair_end(&p);
}

static void refuse_by(KsmEngine *e, void *addr, size_t len, const char *why)
{
    g_autoptr(GError) err = NULL;

    g_assert(!ksm_region_add(e, addr, len, -1, NULL, NULL, &err));
    g_assert(g_error_matches(err, KSM_ERROR, KSM_ERROR_INVALID));
    g_assert(strstr(err->message, why));
}

static void test_refuse(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_AUTO);
    size_t len = 16 * PAGE;
    void *shared, *locked;
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(64, 0, MEM_SMALL);
    shared = mmap(NULL, len, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    locked = mmap(NULL, len, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    refuse_by(e, shared, len, "shared");
    /* a sanitizer makes mlock() do nothing */
    if (syscall(SYS_mlock, locked, len) == 0) {
        refuse_by(e, locked, len, "locked");
    }
    refuse_by(e, (char *)shared + 1, len, "multiples");
    munmap(shared, len);
    /* where nothing was before: a sanitizer may use freed addresses */
    refuse_by(e, (void *)(uintptr_t)0x10000000, len, "not mapped");
    r = util_add(e, m, NULL);
    refuse_by(e, m->addr + 32 * PAGE, PAGE, "already");
    g_assert(ksm_region_remove(r, KSM_REMOVE_FORGET) == 0);
    munmap(locked, len);
    ksm_engine_free(e);
    mem_free(m);
}

/* Forgotten memory is gone, and not touched. */
static void test_forget(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    munmap(p.a->addr, 1024 * PAGE);
    g_assert(ksm_region_remove(p.ra, KSM_REMOVE_FORGET) == 0);
    util_passes(p.e, 2);
    mem_check(p.b);
    util_remove(p.rb);
    g_assert(util_stats(p.e).pages_shared == 0);
    ksm_engine_free(p.e);
    mem_free(p.b);
    mem_free(p.a);
}

static void test_reasons(void)
{
    for (unsigned i = 0; i < KSM_REASON_MAX; i++) {
        g_assert(ksm_reason_name(i)[0] && ksm_reason_text(i)[0]);
    }
    g_assert(!strcmp(ksm_reason_name(KSM_REASON_VMA_LIMIT), "vma-limit"));
}

/* --- merged memory goes --- */

#define COPIED  128u    /* pages of a chunk that are copied on write */

static struct {
    Pair *p;
    unsigned pauses;
    unsigned busy_pauses;       /* after so many it is no longer busy */
    bool step;                  /* merging goes on in them */
} un;

static void un_pause(unsigned us)
{
    KsmRegion *r = un.p->ra;
    KsmStats s;

    g_assert(un.p->e->lock.next == un.p->e->lock.serving);
    ksm_region_get_stats(r, &s);
    if (++un.pauses == un.busy_pauses) {
        un.p->a->busy = false;
    }
    for (unsigned i = 0; un.step && i < 30; i++) {
        uint64_t merged = r->count[PAGE_MERGED];

        ksm_rescan(un.p->e);
        ksm_step(un.p->e, 1000000000);
        g_assert(r->count[PAGE_MERGED] <= merged);
    }
}

/* Merged, then part of a rewritten with what other pages hold. */
static bool un_start(Pair *p)
{
    if (!pair_start(p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops,
                    MEM_SMALL)) {
        return false;
    }
    if (p->e->uffd_wp < 0) {
        g_test_skip("no write-protection of shared memory by userfaultfd "
                    "(Linux 5.19): memory is not restored");
        pair_end(p);
        return false;
    }
    util_passes(p->e, 4);
    g_assert(util_stats(p->e).pages_sharing == PAIR_PAGES);
    mem_fill_run(p->a, 100, COPIED, 300, 1);
    memset(&un, 0, sizeof(un));
    un.p = p;
    prim.pause = un_pause;
    return true;
}

static void un_end(Pair *p)
{
    still_calls();
    p->a->busy = p->b->busy = false;
    pair_end(p);
}

#define LONG_CHUNKS 80u

static struct {
    size_t longest, total;  /* bytes of a call; of all */
    size_t fails_below;     /* shorter ones fail */
    KsmEngine *e;
    GThread *other;         /* waits for the lock since the first call */
    int asks, had_it;
} ended;

static gpointer want_lock(gpointer data)
{
    g_atomic_int_set(&ended.asks, true);
    util_stats(ended.e);
    g_atomic_int_set(&ended.had_it, true);
    return NULL;
}

static int measure_unregister(const UffdRange *range)
{
    if (range->len < ended.fails_below) {
        return -ENOMEM;
    }
    if (!ended.other) {
        ended.other = g_thread_new("other", want_lock, NULL);
        while (!g_atomic_int_get(&ended.asks)) {
            g_usleep(1000);
        }
        g_usleep(100000);   /* it waits by now */
    } else if (ended.total + range->len == LONG_CHUNKS * CHUNK) {
        /* the last piece: it was the first to wait */
        for (unsigned ms = 0; ms < 5000 && !g_atomic_int_get(&ended.had_it);
             ms++) {
            g_usleep(1000);
        }
        g_assert(g_atomic_int_get(&ended.had_it));
    }
    ended.longest = MAX(ended.longest, range->len);
    ended.total += range->len;
    return prim_real.uffd_unregister(range);
}

/* Tracking ends in pieces, whoever wants it: others have the lock between. */
static void test_tracking_ends(gconstpointer by_owner)
{
    KsmConfig config;
    KsmEngine *e;
    KsmRegion *r;
    Mem *m;

    ksm_config_init(&config);
    config.max_cpu = 100;
    config.dirty = KSM_DIRTY_PAGEMAP;
    e = util_engine_of(&config);
    if (!e) {
        return;
    }
    m = mem_new(LONG_CHUNKS * CHUNK_PAGES, 3, MEM_SMALL);
    for (size_t i = 0; i < m->pages; i++) {
        mem_fill(m, i, 1 + i);
    }
    r = util_add(e, m, &mem_ops);
    /* it may be added in mid-pass */
    g_assert(r->pause_at == region_end(r));
    for (unsigned tight = 0; tight < 2; tight++) {
        m->inhibited = NULL;
        util_passes(e, 3);
        g_assert(r->tracking);
        memset(&ended, 0, sizeof(ended));
        ended.fails_below = tight ? 40 * CHUNK : 0;
        ended.e = e;
        prim.uffd_unregister = measure_unregister;
        if (by_owner) {
            g_assert(ksm_unmerge(r, 0, m->pages * PAGE) == 0);
        } else {
            m->inhibited = "test";
            util_passes(e, 1);
        }
        prim.uffd_unregister = prim_real.uffd_unregister;
        g_thread_join(ended.other);
        g_assert(!r->tracking && !r->registered);
        g_assert(ended.total == m->pages * PAGE);
        /* a piece that would need a mapping too many goes with all the rest */
        g_assert(tight ? ended.longest == ended.total
                       : ended.longest < ended.total / 2);
    }
    m->inhibited = NULL;
    mem_check(m);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

/* A device stays busy: the owner is told, and nobody else waits. */
static void test_unmerge_busy(void)
{
    Pair p;

    if (!un_start(&p)) {
        return;
    }
    p.a->busy = true;
    g_assert(ksm_unmerge(p.ra, 0, PAIR_PAGES * PAGE) == -EBUSY);
    g_assert(un.pauses > 0 && un.pauses < 100);
    /* nothing a device may write was replaced, all the rest was */
    g_assert(p.ra->count[PAGE_MERGED] + p.ra->count[PAGE_BROKEN] == COPIED);
    /* others can have userfaultfd */
    g_assert(!p.ra->tracking && !p.ra->registered);
    mem_check(p.a);
    g_assert(ksm_region_remove(p.ra, KSM_REMOVE_UNMERGE) == -EBUSY);
    mem_check(p.a);
    un_end(&p);
}

/* What is unmerged stays so, though merging goes on. */
static void test_unmerge_step(void)
{
    Pair p;

    if (!un_start(&p)) {
        return;
    }
    p.a->busy = true;
    un.busy_pauses = 5;
    un.step = true;
    g_assert(ksm_unmerge(p.ra, 0, PAIR_PAGES * PAGE) == 0);
    g_assert(un.pauses == 5);
    g_assert(p.ra->count[PAGE_MERGED] + p.ra->count[PAGE_BROKEN] == 0);
    mem_check(p.a);
    prim.pause = prim_real.pause;
    for (unsigned i = 0; i < 20 && !p.ra->count[PAGE_MERGED]; i++) {
        util_passes(p.e, 1);
    }
    g_assert(p.ra->count[PAGE_MERGED]);
    un_end(&p);
}

/* Owners unmerge under inhibition: that must not stop it. */
static void test_unmerge_inhibited(void)
{
    Pair p;

    if (!un_start(&p)) {
        return;
    }
    p.a->inhibited = "run is off";
    g_assert(ksm_unmerge(p.ra, 0, PAIR_PAGES * PAGE) == 0);
    g_assert(p.ra->count[PAGE_MERGED] + p.ra->count[PAGE_BROKEN] == 0);
    g_assert(mem_anonymous(p.a, 0, PAIR_PAGES) == PAIR_PAGES);
    un_end(&p);
}

static void test_unmerge_turns(void)
{
    uint64_t turns;
    Pair p;

    if (!un_start(&p)) {
        return;
    }
    turns = p.e->lock.next;
    g_assert(ksm_unmerge(p.ra, 0, PAIR_PAGES * PAGE) == 0);
    g_assert(p.e->lock.next - turns >= PAIR_PAGES * PAGE / CHUNK);
    turns = p.e->lock.next;
    g_assert(ksm_region_remove(p.rb, KSM_REMOVE_UNMERGE) == 0);
    g_assert(p.e->lock.next - turns >= PAIR_PAGES * PAGE / CHUNK);
    p.rb = util_add(p.e, p.b, &mem_ops);
    un_end(&p);
}

/* As when a page of the pool fails: mapped, and SIGBUS is what it gives. */
static void page_fails(Pair *s, size_t page)
{
    UffdRange range = { s->e->uffd_wp, s->a->addr + page * PAGE, PAGE };

    g_assert(prim_real.uffd_register(&range, UFFD_PROTECT) == 0);
    g_assert(madvise(range.addr, PAGE, MADV_DONTNEED) == 0);
    g_assert(prim_real.uffd_poison(range.fd, range.addr, PAGE) == 0);
    g_assert(prim_real.uffd_unregister(&range) == 0);
}

static bool is_readable(const char *page)
{
    int fd[2];
    bool readable;

    g_assert(pipe(fd) == 0);
    readable = write(fd[1], page, 1) == 1;
    close(fd[0]);
    close(fd[1]);
    return readable;
}

/* Unmerging does not read failed pages or make them zeroes. */
static void test_unmerge_failed(void)
{
    const size_t bad = 700;
    Pair p;

    if (!un_start(&p)) {
        return;
    }
    page_fails(&p, bad);
    g_assert(!is_readable(p.a->addr + bad * PAGE));
    g_assert(ksm_unmerge(p.ra, 0, PAIR_PAGES * PAGE) == 0);
    g_assert(p.ra->count[PAGE_MERGED] + p.ra->count[PAGE_BROKEN] == 0);
    g_assert(!is_readable(p.a->addr + bad * PAGE));
    g_assert(util_stats(p.e).poisoned == 1);
    p.e->stage.poisoned.pages = 2;
    g_assert(util_stats(p.e).poisoned == 3);
    p.e->stage.poisoned.pages = 0;
    util_passes(p.e, 6);
    g_assert(!is_readable(p.a->addr + bad * PAGE));
    g_assert(ksm_discard(p.ra, bad * PAGE, PAGE) == 0);
    mem_gone(p.a, bad, 1);
    un_end(&p);
}

static int unregister_fails(const UffdRange *range)
{
    return -ENOMEM;
}

/* Memory still registered is not handed back as if it were not. */
static void test_registered(void)
{
    Pair p;

    if (!un_start(&p)) {
        return;
    }
    g_assert(ksm_unmerge(p.ra, 0, PAIR_PAGES * PAGE) == 0);
    util_passes(p.e, 1);
    g_assert(p.ra->tracking);
    prim.uffd_unregister = unregister_fails;
    g_assert(ksm_unmerge(p.ra, 0, PAIR_PAGES * PAGE) == -ENOMEM);
    g_assert(ksm_region_remove(p.ra, KSM_REMOVE_UNMERGE) == -ENOMEM);
    prim.uffd_unregister = prim_real.uffd_unregister;
    util_remove(p.ra);
    p.ra = util_add(p.e, p.a, &mem_ops);
    un_end(&p);
}

static unsigned unregister_left;

static int unregister_late(const UffdRange *range)
{
    if (unregister_left) {
        unregister_left--;
        return -EINTR;
    }
    return prim_real.uffd_unregister(range);
}

static KsmEngine *crowded;

static int register_then_no_room(const UffdRange *range, unsigned mode)
{
    crowded->dir.used += DIR_MAX;
    return prim_real.uffd_register(range, mode);
}

/* Memory that was refused is not kept registered: it may be added later. */
static void test_registered_refused(void)
{
    g_autoptr(GError) err = NULL;
    KsmRegion *more;
    Mem *c;
    Pair p;

    if (!un_start(&p)) {
        return;
    }
    c = mem_new(PAIR_PAGES, 0, MEM_SMALL);
    unregister_left = 20;
    crowded = p.e;
    prim.uffd_register = register_then_no_room;
    prim.uffd_unregister = unregister_late;
    prim.pause = prim_real.pause;
    more = ksm_region_add(p.e, c->addr, c->pages * PAGE, -1, &mem_ops, c, &err);
    g_assert(!more && err && !unregister_left);
    p.e->dir.used -= DIR_MAX;
    still_calls();
    more = util_add(p.e, c, &mem_ops);
    util_remove(more);
    mem_free(c);
    un_end(&p);
}

/* Memory that its owner watches is left alone. */
static void test_foreign(void)
{
    UffdRange range;
    Pair p;

    if (!un_start(&p)) {
        return;
    }
    g_assert(ksm_unmerge(p.ra, 0, PAIR_PAGES * PAGE) == 0);
    range = (UffdRange) { prim_real.uffd(), p.a->addr + 10 * PAGE, PAGE };
    g_assert(prim_real.uffd_api(range.fd, UFFD_WP) == 0);
    g_assert(prim_real.uffd_register(&range, UFFD_PROTECT) == 0);
    util_passes(p.e, 2);
    g_assert(!p.ra->tracking);
    g_assert(ksm_unmerge(p.ra, 0, PAIR_PAGES * PAGE) == 0);
    g_assert(prim_real.uffd_protect(&range, true) == 0);
    g_assert(prim_real.uffd_protect(&range, false) == 0);
    close(range.fd);
    un_end(&p);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    stores_choose();
    g_test_add_func("/engine/refuses", test_refuses);
    g_test_add_func("/engine/overlap", test_overlap);
    g_test_add_func("/engine/names", test_names);
    g_test_add_func("/engine/fork", test_fork);
    g_test_add_func("/engine/kept", test_kept);
    g_test_add_func("/engine/twice", test_twice);
    g_test_add_func("/engine/ids", test_ids);
    g_test_add_func("/engine/node", test_node);
    g_test_add_func("/engine/calls", test_calls);
    g_test_add_data_func("/engine/sparse/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_sparse);
    g_test_add_data_func("/engine/sparse/log", GINT_TO_POINTER(KSM_DIRTY_LOG),
                         test_sparse);
    g_test_add_data_func("/engine/sparse/checksum",
                         GINT_TO_POINTER(KSM_DIRTY_CHECKSUM), test_sparse);
    g_test_add_func("/engine/drop", test_drop);
    g_test_add_func("/engine/child/home", test_fork_home);
    g_test_add_func("/engine/child/leaving", test_fork_leaving);
    g_test_add_func("/engine/child/dead", test_fork_dead);
    g_test_add_func("/engine/stats/sum", test_stats);
    g_test_add_func("/engine/stats/state", test_stats_state);
    g_test_add_func("/engine/stats/off", test_stats_off);
    g_test_add_func("/engine/stats/stall", test_stats_stall);
    g_test_add_func("/engine/config", test_config);
    for (unsigned k = 0; k < G_N_ELEMENTS(sources); k++) {
        g_autofree char *path = g_strconcat("/engine/big/", sources[k].name,
                                            NULL);

        g_test_add_data_func(path, GINT_TO_POINTER(sources[k].dirty),
                             test_big);
    }
    for (unsigned i = 0; i < G_N_ELEMENTS(kinds); i++) {
        for (unsigned k = 0; k < G_N_ELEMENTS(sources); k++) {
            if (kinds[i].counts_hashes &&
                sources[k].dirty == KSM_DIRTY_CHECKSUM) {
                continue;
            }
            add_case(i, k, MEM_SMALL);
            add_case(i, k, MEM_HUGE);
        }
    }
    g_test_add_func("/engine/stats/inhibited", test_stats_inhibited);
    g_test_add_data_func("/engine/merge/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_merge);
    g_test_add_data_func("/engine/merge/log",
                         GINT_TO_POINTER(KSM_DIRTY_LOG), test_merge);
    g_test_add_data_func("/engine/merge/checksum",
                         GINT_TO_POINTER(KSM_DIRTY_CHECKSUM), test_merge);
    g_test_add_func("/engine/inhibited", test_inhibited);
    g_test_add_func("/engine/refuse", test_refuse);
    g_test_add_func("/engine/forget", test_forget);
    g_test_add_func("/engine/stats/reasons", test_reasons);
    g_test_add_func("/engine/unmerge/again", test_unmerge);
    g_test_add_func("/engine/settle", test_settle);
    g_test_add_data_func("/engine/tracking/inhibited", NULL,
                         test_tracking_ends);
    g_test_add_data_func("/engine/tracking/unmerged", "",
                         test_tracking_ends);
    g_test_add_func("/engine/unmerge/busy", test_unmerge_busy);
    g_test_add_func("/engine/unmerge/step", test_unmerge_step);
    g_test_add_func("/engine/unmerge/inhibited", test_unmerge_inhibited);
    g_test_add_func("/engine/unmerge/turns", test_unmerge_turns);
    g_test_add_func("/engine/unmerge/failed", test_unmerge_failed);
    g_test_add_func("/engine/registered", test_registered);
    g_test_add_func("/engine/registered/refused", test_registered_refused);
    g_test_add_func("/engine/foreign", test_foreign);
    return g_test_run();
}
