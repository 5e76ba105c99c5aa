/*
 * libksm tests: every system call fails once, at every position
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A scenario that goes through all of the engine is run again and again; in
 * run k the k-th system call fails, in each way it may.  No byte of memory may
 * differ, and at the end of the scenario the engine must still merge, and give
 * everything back.
 *
 * KSM_FAULT_STEP=n tries only every n-th position (sanitizers are slow),
 * KSM_FAULT_AT=n begins with the n-th.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "memory/region.h"
#include "house.h"
#include "still.h"
#include "stores.h"

static long calls;          /* counted in this run */
static unsigned reads;      /* of files, likewise */
static long fail_at;        /* which one fails */
static int fail_mode;       /* how; each call has at least mode 0 */
static int modes;           /* that the failing call has */
static const char *failed;  /* its name */
static unsigned scans_fail; /* so many scans fail besides */

static bool hit(const char *name, int n_modes)
{
    if (calls++ != fail_at) {
        return false;
    }
    failed = name;
    if (g_test_verbose()) {
        g_test_message("call %ld: %s, way %d", calls - 1, name, fail_mode);
    }
    modes = n_modes;
    return true;
}

static void *f_map(void *addr, size_t len, int prot, int flags, int fd,
                   off_t offset)
{
    if (hit("map", flags & MAP_FIXED ? 2 : 1)) {
        if (fail_mode == 1) {
            munmap(addr, len);      /* a hole */
        }
        errno = ENOMEM;
        return NULL;
    }
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

static int f_remap(void *from, size_t len, void *to)
{
    if (hit("remap", 2)) {
        if (fail_mode == 1) {
            munmap(to, len);
        }
        return -ENOMEM;
    }
    return prim_real.remap(from, len, to);
}

static void *f_lengthen(void *from, size_t len, size_t want, void *at)
{
    if (hit("lengthen", at ? 2 : 1)) {
        if (fail_mode == 1) {
            munmap(at, want);
        }
        return NULL;
    }
    return prim_real.lengthen(from, len, want, at);
}

static void *f_split(void *from, size_t len)
{
    return hit("split", 1) ? NULL : prim_real.split(from, len);
}

static int f_advise(void *addr, size_t len, int advice)
{
    return hit("advise", 1) ? -ENOMEM : prim_real.advise(addr, len, advice);
}

static int f_memfd(const char *name)
{
    return hit("memfd", 1) ? -EMFILE : prim_real.memfd(name);
}

static int f_open_read(const char *path)
{
    return hit("open_read", 1) ? -EMFILE : prim_real.open_read(path);
}

static int f_truncate(int fd, off_t size)
{
    return hit("truncate", 1) ? -ENOSPC : prim_real.truncate(fd, size);
}

static ssize_t f_write(int fd, const void *buf, size_t len, off_t offset)
{
    if (hit("write", 3)) {
        if (fail_mode == 1) {
            return -EINTR;
        }
        return fail_mode == 2 ? prim_real.write(fd, buf, len / 2, offset)
                              : -ENOMEM;
    }
    return prim_real.write(fd, buf, len, offset);
}

#define READS_ALL   24u     /* after so many one in ... */
#define READS_EACH  16u     /* ... is a position of its own */

/*
 * What stays mapped because unmapping fails makes /proc/self/smaps longer from
 * scene to scene, by more reads than there are scenes: not all can be tried.
 */
static ssize_t f_read(int fd, void *buf, size_t len)
{
    reads++;
    if (reads > READS_ALL && reads % READS_EACH) {
        return prim_real.read(fd, buf, len);
    }
    return hit("read", 1) ? -ENOMEM : prim_real.read(fd, buf, len);
}

static int f_allocate(int fd, off_t offset, off_t len)
{
    return hit("allocate", 1) ? -ENOMEM : prim_real.allocate(fd, offset, len);
}

static int f_punch(int fd, off_t offset, off_t len)
{
    return hit("punch", 1) ? -EINTR : prim_real.punch(fd, offset, len);
}

static int f_uffd(void)
{
    if (hit("uffd", 2)) {
        return fail_mode ? -EPERM : -EMFILE;
    }
    return prim_real.uffd();
}

static int f_uffd_api(int fd, uint64_t features)
{
    return hit("uffd_api", 1) ? -EINVAL : prim_real.uffd_api(fd, features);
}

static int f_uffd_register(const UffdRange *range, unsigned mode)
{
    return hit("uffd_register", 1) ? -ENOMEM
                                   : prim_real.uffd_register(range, mode);
}

static int f_uffd_unregister(const UffdRange *range)
{
    return hit("uffd_unregister", 1) ? -ENOMEM
                                     : prim_real.uffd_unregister(range);
}

static int f_uffd_wake(const UffdRange *range)
{
    return hit("uffd_wake", 1) ? -EAGAIN : prim_real.uffd_wake(range);
}

static int f_uffd_protect(const UffdRange *range, bool on)
{
    return hit("uffd_protect", 1) ? -EAGAIN
                                  : prim_real.uffd_protect(range, on);
}

static int f_uffd_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    static const int codes[] = { -EAGAIN, -EBUSY, -ENOMEM, -EAGAIN,
                                 -EEXIST, -EAGAIN, -ENOMEM,
                                 -EEXIST, -EEXIST };

    if (hit("uffd_move", G_N_ELEMENTS(codes))) {
        *done = 0;
        if (fail_mode == 3 && len > PAGE) {
            /* only part of it */
            prim_real.uffd_move(fd, to, from, len / PAGE / 2 * PAGE, done);
        } else if (fail_mode > 3) {
            /* moves all and counts none, as Linux 6.18, or part; or worse */
            prim_real.uffd_move(fd, to, from, len, done);
            *done = fail_mode == 5 ? MIN(*done, len / PAGE / 2 * PAGE) : 0;
        }
        /* then nothing can be asked for a while */
        scans_fail = fail_mode < 7 ? 0 : fail_mode == 7 ? 2 : 30;
        return codes[fail_mode];
    }
    return prim_real.uffd_move(fd, to, from, len, done);
}

static int f_uffd_copy(int fd, void *to, const void *from, size_t len,
                       size_t *done)
{
    if (hit("uffd_copy", 2)) {
        *done = 0;
        if (fail_mode == 1 && len > PAGE) {
            prim_real.uffd_copy(fd, to, from, PAGE, done);
        }
        return -ENOMEM;
    }
    return prim_real.uffd_copy(fd, to, from, len, done);
}

static ssize_t f_pagemap(PmScan *scan)
{
    PmScan half = *scan;
    ssize_t ret;

    if (scans_fail) {
        scans_fail--;
        return -ENOMEM;
    }
    if (!hit("pagemap", 2)) {
        return still_pagemap(scan);
    }
    if (fail_mode == 0) {
        return -ENOMEM;
    }
    /* only part of it */
    half.end -= (scan->end - scan->start) / PAGE / 2 * PAGE;
    ret = still_pagemap(&half);
    scan->walk_end = half.walk_end;
    return ret;
}

static void f_pause(unsigned us)
{
}

static void faults_on(void)
{
    prim.map = f_map;
    prim.remap = f_remap;
    prim.lengthen = f_lengthen;
    prim.split = f_split;
    prim.advise = f_advise;
    prim.memfd = f_memfd;
    prim.open_read = f_open_read;
    prim.truncate = f_truncate;
    prim.write = f_write;
    prim.read = f_read;
    prim.punch = f_punch;
    prim.allocate = f_allocate;
    prim.uffd = f_uffd;
    prim.uffd_api = f_uffd_api;
    prim.uffd_register = f_uffd_register;
    prim.uffd_unregister = f_uffd_unregister;
    prim.uffd_wake = f_uffd_wake;
    prim.uffd_protect = f_uffd_protect;
    prim.uffd_move = f_uffd_move;
    prim.uffd_copy = f_uffd_copy;
    prim.pagemap = f_pagemap;
    prim.pause = f_pause;
}

#define A_PAGES 900u    /* small pages, from the middle of a chunk on */
#define B_PAGES 1024u   /* huge pages */

/* Reused by each run: making it takes long. */
static Mem *mem_a, *mem_b;

typedef struct Scene {
    Mem *a, *b;
    KsmEngine *e;
    KsmRegion *ra, *rb;
} Scene;

static void fill(Scene *s)
{
    mem_fill_run(s->a, 0, 300, 1000, 1);        /* equal to b's */
    mem_fill_run(s->a, 300, 100, 5000000, 1);   /* unique */
    mem_fill_run(s->a, 400, 150, 0, 0);         /* zeroes */
    mem_fill_run(s->a, 550, 200, 77, 0);        /* a pattern */
    mem_fill_run(s->a, 760, 60, 1100, 1);       /* 750 to 759: holes */
    mem_fill_run(s->a, 820, 80, 6000000, 1);
    mem_fill_run(s->b, 0, 500, 1000, 1);
    mem_fill_run(s->b, 500, 12, 7000000, 1);
    mem_fill_run(s->b, 512, 412, 0, 0);
    mem_fill_run(s->b, 924, 100, 77, 0);
}

static void both_check(Scene *s)
{
    mem_check(s->a);
    mem_check(s->b);
}

static KsmEngine *scene_engine(KsmDirtySource dirty)
{
    g_autoptr(GError) err = NULL;
    KsmConfig config;
    KsmEngine *e;

    ksm_config_init(&config);
    config.dirty = dirty;
    config.max_cpu = 100;
    e = stores_engine_new(&config, &err);
    g_assert(e || (err && err->message));
    return e;
}

/* The owner's calls: a failure is told, and the second try works. */
static void owner_calls(Scene *s)
{
    if (ksm_discard(s->ra, 20 * PAGE, 40 * PAGE) < 0) {
        g_assert(ksm_discard(s->ra, 20 * PAGE, 40 * PAGE) == 0);
    }
    mem_gone(s->a, 20, 40);
    if (ksm_discard(s->rb, 100 * PAGE, 40 * PAGE) < 0) {
        g_assert(ksm_discard(s->rb, 100 * PAGE, 40 * PAGE) == 0);
    }
    mem_gone(s->b, 100, 40);
    both_check(s);
    if (ksm_unmerge(s->rb, 200 * PAGE, 200 * PAGE) < 0) {
        g_assert(ksm_unmerge(s->rb, 200 * PAGE, 200 * PAGE) == 0);
    }
    both_check(s);
    /* the content is free: write it anew at once */
    ksm_free_hint(s->ra, 500 * PAGE, 100 * PAGE);
    mem_fill_run(s->a, 500, 100, 77, 0);
    both_check(s);
}

static void region_gone(KsmRegion *r)
{
    if (r && ksm_region_remove(r, KSM_REMOVE_UNMERGE) < 0) {
        g_assert(ksm_region_remove(r, KSM_REMOVE_UNMERGE) == 0);
    }
}

static void life(Scene *s)
{
    both_check(s);
    for (unsigned i = 0; i < 4; i++) {
        util_passes(s->e, 1);
        region_check(s->ra);
        region_check(s->rb);
    }
    both_check(s);
    for (unsigned i = 0; i < 300; i += 3) {
        mem_write(s->a, i, i, i);
        mem_write(s->b, i + 600, i, i);
    }
    util_passes(s->e, 5);
    both_check(s);
    owner_calls(s);
    ksm_rescan(s->e);
    util_passes(s->e, 9);
    both_check(s);
    region_check(s->ra);
    region_check(s->rb);
    if (g_test_verbose()) {
        util_print(s->e);
    }
    /* it works on: most of what is equal is merged */
    g_assert(util_stats(s->e).pages_sharing > 150);
    g_assert(util_stats(s->e).zero_pages > 150);
}

static void scene_run(KsmDirtySource dirty, const KsmRegionOps *ops)
{
    Scene s = { 0 };

    s.a = mem_a;
    s.b = mem_b;
    mem_reset(s.a);
    mem_reset(s.b);
    fill(&s);
    calls = reads = 0;
    scans_fail = 0;
    failed = NULL;
    s.e = scene_engine(dirty);
    if (s.e) {
        s.ra = ksm_region_add(s.e, s.a->addr, A_PAGES * PAGE, -1, ops, s.a,
                              NULL);
        s.rb = ksm_region_add(s.e, s.b->addr, B_PAGES * PAGE, -1, ops, s.b,
                              NULL);
        if (s.ra && s.rb) {
            life(&s);
        }
        both_check(&s);
        region_gone(s.ra);
        region_gone(s.rb);
        both_check(&s);
        g_assert(util_stats(s.e).pages_shared == 0);
        g_assert(mem_anonymous(s.a, 0, A_PAGES) > 0);
        ksm_engine_free(s.e);
    }
    both_check(&s);
}

static void fault_all(KsmDirtySource dirty, const KsmRegionOps *ops,
                      long every)
{
    const char *env = g_getenv("KSM_FAULT_STEP");
    long step = (env ? MAX(atol(env), 1) : 1) * every;
    long runs = 0;

    if (!ksm_supported(NULL)) {
        g_test_skip("the kernel lacks UFFDIO_MOVE or userfaultfd is denied");
        return;
    }
    mem_a = mem_new(A_PAGES, 200, MEM_SMALL);
    mem_b = mem_new(B_PAGES, 0, MEM_HUGE);
    faults_on();
    fail_at = -1;
    scene_run(dirty, ops);
    g_test_message("%ld calls without a failure", calls);
    env = g_getenv("KSM_FAULT_AT");
    for (fail_at = env ? atol(env) : 0; ; fail_at += step) {
        fail_mode = 0;
        do {
            modes = 0;
            scene_run(dirty, ops);
            runs++;
        } while (++fail_mode < modes);
        if (!failed) {
            break;
        }
    }
    g_test_message("%ld runs, last position %ld", runs, fail_at);
    still_calls();
    mem_free(mem_a);
    mem_free(mem_b);
}

static void test_pagemap(void)
{
    fault_all(KSM_DIRTY_PAGEMAP, NULL, 1);
}

static void test_log(void)
{
    /* much is the same as with pagemap */
    fault_all(KSM_DIRTY_LOG, &mem_ops_log, 4);
}

static void test_checksum(void)
{
    fault_all(KSM_DIRTY_CHECKSUM, &mem_ops, 4);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    stores_choose();
    g_test_add_func("/fault/pagemap", test_pagemap);
    g_test_add_func("/fault/log", test_log);
    g_test_add_func("/fault/checksum", test_checksum);
    return g_test_run();
}
