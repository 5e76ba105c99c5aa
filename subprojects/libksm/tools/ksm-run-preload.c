/*
 * ksm-run.so: gives a program's large anonymous memory to libksm
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Two kinds of memory become regions of one engine, which a thread of ours
 * steps: large blocks of malloc(), taken from the C library because it unmaps
 * and moves its own unseen; and private anonymous mappings the program makes by
 * mmap().
 *
 * The danger is memory that changes its place or kind behind the engine's
 * back.  So every call that unmaps, moves, protects or locks part of a region
 * goes through here: the region is taken from the engine (back to anonymous
 * memory), the call is done, and the rest is given back.  For MADV_DONTNEED and
 * MADV_FREE the engine has calls.
 *
 * After fork() the child has no engine: its memory stays as it is, shared
 * with the pool where it was merged.  Only discarding needs care there, or the
 * pool's contents would come back.
 *
 * Leaves to others: programs that make system calls themselves.
 */
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ksm-run-libc.h"
#include "libksm.h"

#define PAGE KSM_PAGE_SIZE
/* A block of malloc() starts this far into its mapping. */
#define HEADER 64
#define BLOCK_MAGIC UINT64_C(0x6b736d2d72756e21)

/* A region and its range, sorted by address. */
typedef struct Range {
    char *start;
    size_t len;
    KsmRegion *region;      /* NULL: only known (engine refused, or a child) */
} Range;

/* In the first bytes of a block's mapping. */
typedef struct Block {
    uint64_t magic;
    size_t len;             /* of the mapping */
} Block;

typedef struct Run {
    pthread_mutex_t lock;   /* all of this; taken before the engine's */
    KsmEngine *engine;
    bool failed;            /* there can be no engine */
    bool group;             /* what is merged must not be inherited */
    pid_t owner;            /* the process that has the engine */
    Range *ranges;
    size_t n, room;
    size_t min;             /* bytes a mapping must have */
    size_t peak;            /* pages saved at most */
    int stop;               /* atomic */
    int report;             /* atomic: SIGUSR1 came */
    pthread_t stepper;
} Run;

static Run R = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* Set while the engine or we ourselves call: such calls pass through. */
static __thread int inside __attribute__((tls_model("initial-exec")));

static void *sys_mmap(void *addr, size_t len, int prot, int flags, int fd,
                      off_t offset)
{
    return (void *)syscall(SYS_mmap, addr, len, prot, flags, fd, offset);
}

static size_t page_align(size_t len)
{
    return (len + PAGE - 1) & ~(size_t)(PAGE - 1);
}

static void say(const char *fmt, ...)
{
    char line[512];
    va_list ap;
    int len;

    va_start(ap, fmt);
    len = vsnprintf(line, sizeof(line), fmt, ap);
    va_end(ap);
    if (write(STDERR_FILENO, line, MIN(len, (int)sizeof(line) - 1)) < 0) {
        return;
    }
}

static void report(void)
{
    KsmGroupStats g;
    KsmStats s;
    uint64_t saved;

    ksm_engine_get_stats(R.engine, &s);
    saved = s.pages_sharing + s.zero_pages + s.group_saved;
    say("ksm-run: process %d: %" G_GUINT64_FORMAT " MiB in %zu mappings, "
        "saved %" G_GUINT64_FORMAT " MiB (at most %zu MiB), of that zero %"
        G_GUINT64_FORMAT " MiB; %" G_GUINT64_FORMAT " runs, profit %"
        G_GINT64_FORMAT " KiB, CPU %.3f s\n", getpid(), s.pages_total >> 8,
        R.n, saved >> 8, R.peak >> 8, s.zero_pages >> 8, s.merged_runs,
        s.profit / 1024, (s.scan_time + s.merge_time) / 1e9);
    for (int i = 0; i < KSM_REASON_MAX; i++) {
        if (s.reasons[i] >> 8) {
            say("ksm-run:   not merged: %" G_GUINT64_FORMAT " MiB: %s\n",
                s.reasons[i] >> 8, ksm_reason_text(i));
        }
    }
    if (s.state == KSM_STATE_INHIBITED && s.inhibited) {
        say("ksm-run:   nothing but zeroes is merged: %s\n", s.inhibited);
    }
    if (ksm_engine_get_group(R.engine, &g) && g.members) {
        say("ksm-run:   group: %" G_GUINT64_FORMAT " members, pool %"
            G_GUINT64_FORMAT " MiB, of that held %" G_GUINT64_FORMAT
            " MiB, own share %" G_GUINT64_FORMAT " MiB\n", g.members,
            g.pool_bytes >> 20, g.held >> 8, g.share >> 8);
    }
}

static void *step(void *opaque)
{
    inside = 1;
    while (!__atomic_load_n(&R.stop, __ATOMIC_ACQUIRE)) {
        int64_t wait = ksm_step(R.engine, 0);
        KsmStats s;

        ksm_engine_get_stats(R.engine, &s);
        R.peak = MAX(R.peak,
                     s.pages_sharing + s.zero_pages + s.group_saved);
        if (__atomic_exchange_n(&R.report, 0, __ATOMIC_ACQ_REL)) {
            report();
        }
        if (wait) {
            g_usleep(wait < 0 ? 100000 : CLAMP(wait / 1000, 1, 100000));
        }
    }
    return NULL;
}

static void on_signal(int number)
{
    __atomic_store_n(&R.report, 1, __ATOMIC_RELEASE);
}

/* NULL: locked, shared, not writable: the engine says no. */
static KsmRegion *region_new(char *start, size_t len)
{
    KsmRegion *region;

    if (R.group) {
        syscall(SYS_madvise, start, len, MADV_DONTFORK);
    }
    region = ksm_region_add(R.engine, start, len, -1, NULL, NULL, NULL);
    if (!region && R.group) {
        syscall(SYS_madvise, start, len, MADV_DOFORK);
    }
    return region;
}

static void region_end(Range *r, KsmRemove how)
{
    while (ksm_region_remove(r->region, how)) {
        /* out of memory to unmerge into: no other way to go on */
        g_usleep(10000);
    }
    r->region = NULL;
    if (R.group && how == KSM_REMOVE_UNMERGE) {
        syscall(SYS_madvise, r->start, r->len, MADV_DOFORK);
    }
}

/* In a group the child's memory must not map the pool: it is unmerged. */
static void before_fork(void)
{
    pthread_mutex_lock(&R.lock);
    /* the engine's own handlers map memory */
    inside++;
    for (size_t i = 0; R.group && R.owner == getpid() && i < R.n; i++) {
        /* after another fork the engine may not have taken it back */
        if (R.ranges[i].region) {
            region_end(&R.ranges[i], KSM_REMOVE_UNMERGE);
        }
    }
}

static void after_fork_child(void)
{
    inside--;
    pthread_mutex_unlock(&R.lock);
}

static void after_fork(void)
{
    for (size_t i = 0; R.group && R.owner == getpid() && i < R.n; i++) {
        R.ranges[i].region = region_new(R.ranges[i].start, R.ranges[i].len);
    }
    after_fork_child();
}

static uint64_t setting(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);

    return text ? g_ascii_strtoull(text, NULL, 10) : fallback;
}

/* Says what was saved, and stops: the program's memory stays as it is. */
static void __attribute__((destructor)) finish(void)
{
    if (R.engine && R.owner == getpid()) {
        __atomic_store_n(&R.stop, 1, __ATOMIC_RELEASE);
        pthread_join(R.stepper, NULL);
        inside++;
        report();
        /* other destructors may still free blocks of ours */
        inside--;
    }
}

static void start_stepper(void)
{
    sigset_t all, old;

    sigfillset(&all);
    /* the program's signals are for its own threads */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    if (pthread_create(&R.stepper, NULL, step, NULL)) {
        R.failed = true;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/*
 * Makes the engine when the first large memory comes: most programs of a
 * shell script never have any.  With the lock held.
 */
static bool have_engine(void)
{
    g_autoptr(GError) error = NULL;
    const char *scope = getenv("KSM_RUN_SCOPE");
    const char *group = getenv("KSM_RUN_GROUP");
    struct sigaction action = { .sa_handler = on_signal,
                                .sa_flags = SA_RESTART };
    struct sigaction old;
    KsmConfig config;

    if (R.engine || R.failed) {
        return R.engine && R.owner == getpid();
    }
    ksm_config_init(&config);
    config.scope = scope && !strcmp(scope, "zero") ? KSM_SCOPE_ZERO
                                                   : KSM_SCOPE_VM;
    if (group) {
        config.scope = KSM_SCOPE_GROUP;
        config.group = strchr(group, '/') ? NULL : group;
        config.group_socket = strchr(group, '/') ? group : NULL;
        config.member = program_invocation_short_name;
        R.group = true;
    }
    config.max_cpu = setting("KSM_RUN_MAX_CPU", 10);
    R.engine = ksm_engine_new(&config, &error);
    if (!R.engine) {
        say("ksm-run: nothing will be merged: %s\n", error->message);
        R.failed = true;
        return false;
    }
    R.owner = getpid();
    /* after the engine's own handlers: the lock order is ours, then its */
    pthread_atfork(before_fork, after_fork, after_fork_child);
    if (!sigaction(SIGUSR1, NULL, &old) && old.sa_handler == SIG_DFL) {
        sigaction(SIGUSR1, &action, NULL);
    }
    start_stepper();
    return !R.failed;
}

/* The first range that ends after @addr. */
static size_t range_find(const char *addr)
{
    size_t low = 0, high = R.n;

    while (low < high) {
        size_t mid = (low + high) / 2;

        if (R.ranges[mid].start + R.ranges[mid].len <= addr) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low;
}

static bool overlaps(const void *addr, size_t len)
{
    size_t i = range_find(addr);

    return i < R.n && R.ranges[i].start < (const char *)addr + len;
}

static bool in_child(void)
{
    return R.engine && R.owner != getpid();
}

static void range_add(char *start, size_t len)
{
    Range range = { start, len, NULL };
    size_t i = range_find(start);

    /* a child only remembers what may map the pool */
    if (!in_child()) {
        if (len < R.min || !have_engine()) {
            return;
        }
        range.region = region_new(start, len);
        if (!range.region) {
            return;
        }
    }
    if (R.n == R.room) {
        R.room = MAX(64, 2 * R.room);
        R.ranges = g_renew(Range, R.ranges, R.room);
    }
    memmove(&R.ranges[i + 1], &R.ranges[i], (R.n - i) * sizeof(Range));
    R.ranges[i] = range;
    R.n++;
}

static void range_remove(size_t i, KsmRemove how)
{
    if (R.ranges[i].region && !in_child()) {
        region_end(&R.ranges[i], how);
    }
    R.n--;
    memmove(&R.ranges[i], &R.ranges[i + 1], (R.n - i) * sizeof(Range));
}

/* What is left of ranges around one that was taken out. */
typedef struct Rest {
    char *start[2];
    size_t len[2];
} Rest;

/* Takes all ranges that touch [@addr, @addr + @len) from the engine. */
static Rest take_out(char *addr, size_t len, KsmRemove how)
{
    Rest rest = { { NULL }, { 0 } };
    size_t i;

    while (i = range_find(addr), i < R.n && R.ranges[i].start < addr + len) {
        Range r = R.ranges[i];
        bool whole = r.start >= addr && r.start + r.len <= addr + len;

        range_remove(i, whole ? how : KSM_REMOVE_UNMERGE);
        if (r.start < addr) {
            rest.start[0] = r.start;
            rest.len[0] = addr - r.start;
        }
        if (r.start + r.len > addr + len) {
            rest.start[1] = addr + len;
            rest.len[1] = r.start + r.len - (addr + len);
        }
    }
    return rest;
}

static void give_back(const Rest *rest)
{
    for (int i = 0; i < 2; i++) {
        if (rest->len[i]) {
            range_add(rest->start[i], rest->len[i]);
        }
    }
}

static void enter(void)
{
    pthread_mutex_lock(&R.lock);
    inside++;
    if (!R.min) {
        R.min = MAX(setting("KSM_RUN_MIN_KIB", 1024) << 10, 16 * PAGE);
    }
}

static void leave(void)
{
    int error = errno;

    inside--;
    pthread_mutex_unlock(&R.lock);
    errno = error;
}

static bool candidate(size_t len, int prot, int flags)
{
    return (flags & (MAP_PRIVATE | MAP_ANONYMOUS)) ==
           (MAP_PRIVATE | MAP_ANONYMOUS) &&
           !(flags & (MAP_GROWSDOWN | MAP_HUGETLB | MAP_STACK | MAP_LOCKED)) &&
           prot == (PROT_READ | PROT_WRITE) && len >= R.min;
}

void *mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset)
{
    Rest rest = { { NULL }, { 0 } };
    void *p;

    if (inside) {
        return sys_mmap(addr, len, prot, flags, fd, offset);
    }
    enter();
    if (flags & MAP_FIXED) {
        /* not forgotten: the call may fail, and all stays */
        rest = take_out(addr, page_align(len), KSM_REMOVE_UNMERGE);
    }
    p = sys_mmap(addr, len, prot, flags, fd, offset);
    if (p != MAP_FAILED && candidate(len, prot, flags) && !in_child()) {
        range_add(p, page_align(len));
    }
    give_back(&rest);
    leave();
    return p;
}

void *mmap64(void *addr, size_t len, int prot, int flags, int fd,
             off64_t offset)
{
    return mmap(addr, len, prot, flags, fd, offset);
}

int munmap(void *addr, size_t len)
{
    Rest rest;
    int result;

    /* what the kernel refuses is not forgotten: it stays mapped */
    if (inside || (uintptr_t)addr % PAGE || !len) {
        return syscall(SYS_munmap, addr, len);
    }
    enter();
    rest = take_out(addr, page_align(len), KSM_REMOVE_FORGET);
    result = syscall(SYS_munmap, addr, len);
    give_back(&rest);
    leave();
    return result;
}

/*
 * Merged memory may be several mappings, which mremap() does not move as one
 * (EFAULT): a copy, where the caller can live with a new address.
 */
static void *move_by_copy(void *old, size_t old_len, size_t len, int flags,
                          void *to)
{
    void *p;

    if (!(flags & MREMAP_MAYMOVE)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    p = sys_mmap(to, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS |
                 (to ? MAP_FIXED : 0), -1, 0);
    if (p != MAP_FAILED) {
        memcpy(p, old, MIN(old_len, len));
        syscall(SYS_munmap, old, old_len);
    }
    return p;
}

void *mremap(void *old, size_t old_len, size_t len, int flags, ...)
{
    bool ours;
    Rest rest, target = { { NULL }, { 0 } };
    void *to = NULL, *p;
    va_list ap;

    if (flags & MREMAP_FIXED) {
        va_start(ap, flags);
        to = va_arg(ap, void *);
        va_end(ap);
    }
    if (inside) {
        return (void *)syscall(SYS_mremap, old, old_len, len, flags, to);
    }
    enter();
    ours = overlaps(old, old_len);
    rest = take_out(old, page_align(MAX(old_len, 1)), KSM_REMOVE_UNMERGE);
    if (to) {
        target = take_out(to, page_align(len), KSM_REMOVE_UNMERGE);
    }
    p = (void *)syscall(SYS_mremap, old, old_len, len, flags, to);
    if (p == MAP_FAILED && errno == EFAULT && ours &&
        !(flags & ~(MREMAP_MAYMOVE | MREMAP_FIXED))) {
        p = move_by_copy(old, page_align(old_len), page_align(len), flags, to);
    }
    if (ours) {
        range_add(p == MAP_FAILED ? old : p,
                  page_align(p == MAP_FAILED ? old_len : len));
    }
    give_back(&rest);
    give_back(&target);
    leave();
    return p;
}

/* Calls after which a range may not be what the engine took it for. */
static int change(long number, void *addr, size_t len, long argument)
{
    Rest rest;
    int result;

    if (inside) {
        return syscall(number, addr, len, argument);
    }
    enter();
    if (in_child() || !overlaps(addr, len)) {
        leave();
        return syscall(number, addr, len, argument);
    }
    rest = take_out(addr, page_align(len), KSM_REMOVE_UNMERGE);
    result = syscall(number, addr, len, argument);
    /* refused by the engine if it is no longer for merging */
    range_add(addr, page_align(len));
    give_back(&rest);
    leave();
    return result;
}

int mprotect(void *addr, size_t len, int prot)
{
    return change(SYS_mprotect, addr, len, prot);
}

int mlock(const void *addr, size_t len)
{
    return change(SYS_mlock, (void *)addr, len, 0);
}

int mlock2(const void *addr, size_t len, unsigned int flags)
{
    return change(SYS_mlock2, (void *)addr, len, flags);
}

int mlockall(int flags)
{
    enter();
    /* for good: what comes later is locked as well, or may be */
    take_out(NULL, SIZE_MAX & ~(size_t)(PAGE - 1), KSM_REMOVE_UNMERGE);
    R.min = SIZE_MAX / 2;
    leave();
    return syscall(SYS_mlockall, flags);
}

/* MADV_DONTNEED and MADV_FREE: piece by piece, ours and others'. */
static int discard(char *addr, size_t len, int advice)
{
    char *end = addr + len;

    while (addr < end) {
        size_t i = range_find(addr);
        char *start = i < R.n ? MIN(R.ranges[i].start, end) : end;
        int result = 0;

        if (addr < start) {
            result = syscall(SYS_madvise, addr, start - addr, advice);
            addr = start;
        } else {
            Range *r = &R.ranges[i];
            size_t piece = MIN(end, r->start + r->len) - addr;

            if (in_child()) {
                /* a child */
                result = sys_mmap(addr, piece, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                                  0) == MAP_FAILED ? -1 : 0;
            } else if (!r->region) {
                /* after a fork the engine did not take it back */
                result = syscall(SYS_madvise, addr, piece, advice);
            } else {
                result = advice == MADV_FREE
                    ? ksm_free_hint(r->region, addr - r->start, piece)
                    : ksm_discard(r->region, addr - r->start, piece);
                errno = result ? -result : errno;
            }
            addr += piece;
        }
        if (result) {
            return -1;
        }
    }
    return 0;
}

int madvise(void *addr, size_t len, int advice)
{
    int result;

    if (inside || (uintptr_t)addr % PAGE) {
        return syscall(SYS_madvise, addr, len, advice);
    }
    if (advice != MADV_DONTNEED && advice != MADV_FREE) {
        /* attributes: taken over when the region is added again */
        return advice == MADV_WILLNEED || advice == MADV_RANDOM ||
               advice == MADV_NORMAL || advice == MADV_SEQUENTIAL
            ? syscall(SYS_madvise, addr, len, advice)
            : change(SYS_madvise, addr, len, advice);
    }
    enter();
    result = discard(addr, page_align(len), advice);
    leave();
    return result;
}

/* A block of malloc() that is ours; NULL: the C library's. */
static Block *block_of(void *p)
{
    Block *b;
    size_t i;

    /* nearly all others fail here */
    if (!p || (uintptr_t)p % PAGE != HEADER) {
        return NULL;
    }
    b = (Block *)((char *)p - HEADER);
    enter();
    i = range_find((char *)b);
    if (i == R.n || R.ranges[i].start != (char *)b ||
        b->magic != (BLOCK_MAGIC ^ (uintptr_t)b)) {
        b = NULL;
    }
    leave();
    return b;
}

/* Zeroed, or NULL: let the C library do it. */
static void *block_new(size_t size)
{
    size_t len = page_align(size + HEADER);
    Block *b = NULL;

    if (inside || size > SIZE_MAX / 2) {
        return NULL;
    }
    enter();
    if (len >= R.min && have_engine()) {
        size_t before = R.n;

        b = sys_mmap(NULL, len, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (b == MAP_FAILED) {
            b = NULL;
        } else {
            b->magic = BLOCK_MAGIC ^ (uintptr_t)b;
            b->len = len;
            range_add((char *)b, len);
            if (R.n == before) {
                /* free() would not find it */
                syscall(SYS_munmap, b, len);
                b = NULL;
            }
        }
    }
    leave();
    return b ? (char *)b + HEADER : NULL;
}

void *malloc(size_t size)
{
    void *p = size >= 16 * PAGE ? block_new(size) : NULL;

    return p ? p : __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    size_t all;
    void *p = NULL;

    if (!__builtin_mul_overflow(n, size, &all) && all >= 16 * PAGE) {
        p = block_new(all);
    }
    return p ? p : __libc_calloc(n, size);
}

void free(void *p)
{
    Block *b = inside ? NULL : block_of(p);
    int error = errno;

    if (b) {
        munmap(b, b->len);
        errno = error;
    } else {
        __libc_free(p);
    }
}

size_t malloc_usable_size(void *p)
{
    static size_t (*next)(void *p);
    Block *b = inside ? NULL : block_of(p);

    if (b) {
        return b->len - HEADER;
    }
    if (!next) {
        next = (size_t (*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
    }
    return next(p);
}

void *realloc(void *p, size_t size)
{
    Block *b = inside ? NULL : block_of(p);
    size_t old;
    void *to;

    if (!b) {
        /* one that grows large stays where it is until it is ours anew */
        return p ? __libc_realloc(p, size) : malloc(size);
    }
    old = b->len - HEADER;
    if (size && size <= old && size >= old / 2) {
        return p;
    }
    if (!size) {
        free(p);
        return NULL;
    }
    to = malloc(size);
    if (to) {
        memcpy(to, p, MIN(size, old));
        free(p);
    }
    return to;
}

void *reallocarray(void *p, size_t n, size_t size)
{
    size_t all;

    if (__builtin_mul_overflow(n, size, &all)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(p, all);
}
