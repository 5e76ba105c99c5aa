/*
 * libksm: fault fuzz
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A seed chooses regions, a configuration, what an owner does with them, and
 * which system calls fail meanwhile: repeatedly, together, for ever
 * (fuzz-faults.c).  Whatever fails, for however long:
 *
 * - Every byte of memory is what was last written there.  Pages that were
 *   freed may be zeroes instead; a page that memory failure took reads as
 *   poison or as it was; where the owner mapped over registered memory, that
 *   page is his, and all others stay.
 * - What a forked child sees stays as it was.
 * - Every call of the interface returns without failures having to cease, but
 *   for four things it may wait for: a way home for staged pages (if both
 *   moving and copying fail for ever, or the page tables cannot be asked for
 *   ever), a mapping where the kernel tore one out and gives none, an empty
 *   staging area (if it cannot be registered anew for ever), and, for 10 s, a
 *   device that is busy for ever.
 * - Afterwards the lock is free, nothing is staged, signals are open, counters
 *   equal what they count, and only users map a slot of the pool.
 * - Once failures have ceased all that is equal merges, and all is given back.
 *
 * Each seed has a process of its own, for it may crash or hang.  Three seeds
 * of four run in one thread and on virtual time: the seed repeats the run, as
 * far as the kernel does.  Work done inside system calls plays other threads.
 * In the fourth writers race.
 *
 * test-fuzz [--seed N] [--seeds COUNT] [--seconds S] [--mode single|race]
 *           [--with FEATURE,...] [--without FEATURE,...] [--first] [-v]
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <linux/userfaultfd.h>

#include "base/prim.h"
#include "base/tsan.h"
#include "engine/state.h"
#include "fuzz-faults.h"
#include "stores.h"

#define PAGE ((size_t)KSM_PAGE_SIZE)
#define CHUNK ((size_t)KSM_CHUNK_SIZE)
#define MAX_AREAS 3
#define MAX_CHILDREN 2
#define N_WRITERS 2
#define N_NOTES 80
#define POISONS_MAX 3u      /* pages that fail in one call */
/* copies alone say so, a thousand times, between failures */
#define POISON_CALLS 40000u
/* a displaced page, too, is asked for again and again */
#define OVER_CALLS 200u
#define SILENT_S 30         /* then it hangs */

/* Linux 6.6 */
struct poison_arg {
    uint64_t start, len, mode;
    int64_t updated;
};
#define IOC_POISON          _IOWR(UFFDIO, 0x08, struct poison_arg)

/* pagemap: Documentation/admin-guide/mm/pagemap.rst */
#define PM_ENTRY_PRESENT    (1ull << 63)

/* What may be left out, to find the cause of a failure. */
typedef enum Feature {
    FEATURE_FAULTS, FEATURE_POISON, FEATURE_SLOT_POISON, FEATURE_OVER,
    FEATURE_FORK, FEATURE_FORK_STAGED, FEATURE_PEEK, FEATURE_WEAK_HASH,
    FEATURE_OTHERS, FEATURE_CYCLE, FEATURE_BUSY, FEATURE_LATE, FEATURE_MAX
} Feature;

static const char *const feature_names[FEATURE_MAX] = {
    "faults", "poison", "slot-poison", "over", "fork", "fork-staged", "peek",
    "weak-hash", "others", "cycle", "busy", "late",
};

/* How often a seed has it: one in so many; FAULTS apart. */
static const unsigned feature_one_in[FEATURE_MAX] = {
    1, 24, 24, 16, 4, 16, 8, 6, 2, 2, 2, 2,
};

typedef enum Op {
    OP_STEP, OP_WRITE, OP_FILL, OP_COPY, OP_DISCARD, OP_FREE, OP_UNMERGE,
    OP_CYCLE, OP_TUNE, OP_FLIP, OP_FORK, OP_REAP, OP_CHECK, OP_OVER, OP_SLOT,
    OP_FAULTS, OP_MAX
} Op;

static const char *const op_names[OP_MAX] = {
    "step", "write", "fill", "copy", "discard", "free", "unmerge", "cycle",
    "tune", "flip", "fork", "reap", "check", "over", "slot", "faults",
};

static const unsigned op_weights[OP_MAX] = {
    400, 150, 100, 60, 30, 40, 30, 12, 30, 30, 15, 10, 20, 10, 10, 25,
};

/* flags of a page: what is known of its content */
#define MAY_VANISH  1u      /* may be zeroes instead */
#define WILD        2u      /* the owner mapped something else there */
#define POISONED    4u      /* memory failure took it, perhaps */

typedef struct Area {
    char *map, *mem;
    size_t map_len, n;
    bool huge, log;
    char *shadow;
    uint8_t *flags;
    uint8_t *locks;         /* atomic: for races */
    unsigned long *dirty;   /* written pages; atomic */
    KsmRegion *region;
    const KsmRegionOps *ops;
} Area;

typedef struct Child {
    pid_t pid;
    int pipe;               /* closed: look at your memory, and end */
} Child;

/* From a seed's process to its watcher. */
typedef struct Report {
    uint64_t beats;         /* atomic */
    uint64_t n;             /* notes; atomic */
    char what[400];
    char note[N_NOTES][160];
    /* sums of all seeds */
    uint64_t ops[OP_MAX], calls, failed[CALL_MAX], merged, relieved;
    uint64_t poisoned, slots_poisoned, mapped_over, forks, forks_staged;
    uint64_t peeks, skipped;
} Report;

typedef struct Test {
    uint64_t seed;
    uint64_t random;        /* the main thread's */
    bool race, verbose;
    bool others;            /* are played from inside calls: no races */
    bool with[FEATURE_MAX];
    Area area[MAX_AREAS];
    unsigned n_areas;
    KsmConfig config;
    KsmEngine *e;
    Child child[MAX_CHILDREN];
    pthread_t forker;
    bool may_fork;          /* nothing but the engine goes on */
    bool forking;
    unsigned busy_one_in;   /* 0: never; atomic, as inhibited */
    const char *inhibited;
    int stop;               /* atomic */
    int pagemap;
    GArray *bad_slots;      /* slots of the pool that we cannot read */
    bool in_engine;         /* an interface call is on its way ... */
    bool mapped_over;       /* ... and the owner took memory away meanwhile */
    unsigned poisons;       /* ... and so many pages were poisoned */
    const char *hold, *hold_to; /* which is giving this up: nobody writes */
} Test;

static Test T;
static Report *report;
static uint8_t chosen[FEATURE_MAX];    /* 1: without, 2: with; else chance */
static __thread bool main_thread;

static uint64_t next_random(uint64_t *state)
{
    /* splitmix64 */
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static size_t below(size_t n)
{
    return next_random(&T.random) % n;
}

static bool one_in(size_t n)
{
    return below(n) == 0;
}

static void count(uint64_t *counter, uint64_t n)
{
    __atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
}

G_GNUC_PRINTF(1, 2)
static void note(const char *format, ...)
{
    char text[sizeof(report->note[0])];
    uint64_t i;
    va_list args;

    count(&report->beats, 1);
    va_start(args, format);
    g_vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    KSM_TSAN_IGNORE_BEGIN();
    i = __atomic_load_n(&report->n, __ATOMIC_RELAXED);
    /* thousands of tries would leave room for nothing else */
    if (i < 2 || strcmp(text, report->note[(i - 1) % N_NOTES]) ||
        strcmp(text, report->note[(i - 2) % N_NOTES])) {
        i = __atomic_fetch_add(&report->n, 1, __ATOMIC_RELAXED);
        memcpy(report->note[i % N_NOTES], text, sizeof(text));
    }
    KSM_TSAN_IGNORE_END();
    if (T.verbose) {
        printf("# %s\n", text);
        fflush(stdout);
    }
}

G_GNUC_PRINTF(1, 2)
static void G_GNUC_NORETURN fail(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    g_vsnprintf(report->what, sizeof(report->what), format, args);
    va_end(args);
    note("failures are %s", faults_are_on() ? "on" : "off");
    faults_describe();
    _exit(1);
}

static void G_GNUC_NORETURN fail_text(const char *what)
{
    fail("%s", what);
}

/* ---- memory and what it must hold ---- */

static char *mem_of(const Area *a, size_t page)
{
    return a->mem + page * PAGE;
}

static char *shadow_of(const Area *a, size_t page)
{
    return a->shadow + page * PAGE;
}

static bool all_zero(const char *page)
{
    return !page[0] && !memcmp(page, page + 1, PAGE - 1);
}

static Area *area_at(const void *addr, size_t *page)
{
    for (unsigned i = 0; i < T.n_areas; i++) {
        Area *a = &T.area[i];

        if ((char *)addr >= a->mem && (char *)addr < a->mem + a->n * PAGE) {
            *page = ((char *)addr - a->mem) / PAGE;
            return a;
        }
    }
    return NULL;
}

static bool is_memory(const void *addr)
{
    size_t page;

    return area_at(addr, &page);
}

/* Reads a page; false: it is poisoned, or not there. */
static bool read_carefully(const char *page, char *to)
{
    struct iovec local = { to, PAGE }, remote = { (void *)page, PAGE };

    return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == PAGE;
}

static void G_GNUC_NORETURN differs(const Area *a, size_t page,
                                    const char *mem, const char *when)
{
    const char *shadow = shadow_of(a, page);
    char text[100] = "";
    size_t at = 0;

    while (at < PAGE - 1 && mem[at] == shadow[at]) {
        at++;
    }
    if (a->region) {
        size_t i = (mem_of(a, page) - a->region->base) / PAGE;

        g_snprintf(text, sizeof(text), ", state %d, flags 0x%x",
                   page_state(a->region, i), a->region->state[i]);
    }
    fail("%s: page %zu of area %d (%p) differs from offset %zu on: is %02x, "
         "should be %02x%s%s; flags %u%s", when, page, (int)(a - T.area),
         mem_of(a, page), at, (uint8_t)mem[at], (uint8_t)shadow[at],
         all_zero(mem) ? ", is all zero" : "",
         all_zero(shadow) ? ", should be all zero" : "", a->flags[page],
         text);
}

static void check_page(Area *a, size_t page, const char *when)
{
    const char *mem = mem_of(a, page);
    char copy[PAGE];

    if (a->flags[page] & WILD) {
        return;
    }
    if (a->flags[page] & POISONED) {
        if (!read_carefully(mem, copy)) {
            return;
        }
        mem = copy;
    }
    if (!memcmp(mem, shadow_of(a, page), PAGE)) {
        return;
    }
    if (!(a->flags[page] & MAY_VANISH) || !all_zero(mem)) {
        differs(a, page, mem, when);
    }
}

static void check_range(Area *a, size_t page, size_t n, const char *when)
{
    for (size_t i = page; i < page + n; i++) {
        check_page(a, i, when);
    }
}

static void check_memory(const char *when)
{
    for (unsigned i = 0; i < T.n_areas; i++) {
        check_range(&T.area[i], 0, T.area[i].n, when);
    }
}

static void lock_range(Area *a, size_t page, size_t n)
{
    for (size_t i = page; T.race && i < page + n; i++) {
        while (__atomic_exchange_n(&a->locks[i], 1, __ATOMIC_ACQUIRE)) {
            sched_yield();
        }
    }
}

static void unlock_range(Area *a, size_t page, size_t n)
{
    for (size_t i = page; T.race && i < page + n; i++) {
        __atomic_store_n(&a->locks[i], 0, __ATOMIC_RELEASE);
    }
}

static void lock_all(void)
{
    for (unsigned i = 0; i < T.n_areas; i++) {
        lock_range(&T.area[i], 0, T.area[i].n);
    }
}

static void unlock_all(void)
{
    for (unsigned i = 0; i < T.n_areas; i++) {
        unlock_range(&T.area[i], 0, T.area[i].n);
    }
}

static void mark_dirty(Area *a, size_t page)
{
    __atomic_fetch_or(&a->dirty[page / 64], 1ul << page % 64,
                      __ATOMIC_RELEASE);
}

/* ---- what writers do ---- */

static void write_byte(Area *a, size_t page, size_t at, uint8_t byte)
{
    char *mem = mem_of(a, page), *shadow = shadow_of(a, page);

    if (a->flags[page] & (WILD | POISONED)) {
        return;
    }
    if (!(a->flags[page] & MAY_VANISH)) {
        check_page(a, page, "before a write");
        mem[at] = byte;
        shadow[at] = byte;
        mark_dirty(a, page);
        return;
    }
    /* from this write on it is one or the other for good */
    __atomic_store_n(&mem[at], byte, __ATOMIC_SEQ_CST);
    shadow[at] = byte;
    mark_dirty(a, page);
    if (memcmp(mem, shadow, PAGE)) {
        memset(shadow, 0, PAGE);
        shadow[at] = byte;
    }
    a->flags[page] = 0;
    check_page(a, page, "after a write");
}

/* The whole page is the owner's again. */
static void write_page(Area *a, size_t page, const char *content)
{
    if (a->flags[page] & POISONED) {
        return;
    }
    memcpy(mem_of(a, page), content, PAGE);
    memcpy(shadow_of(a, page), content, PAGE);
    a->flags[page] = 0;
    mark_dirty(a, page);
}

/* Mostly contents that are elsewhere, too; @i counts along a run. */
static void make_content(uint64_t *state, char *page, unsigned kind, size_t i)
{
    uint64_t *word = (uint64_t *)page;

    memset(page, kind == 1 ? 0xcc : 0, PAGE);
    switch (kind) {
    case 0:
    case 1:
        break;
    case 2:
        word[0] = next_random(state);
        break;
    case 3:
        /* differs at the very end only */
        word[PAGE / 8 - 1] = 1 + next_random(state) % 3;
        break;
    case 4:
        page[next_random(state) % PAGE] = next_random(state) % 2;
        break;
    case 5:
        /* repeats every 16 pages */
        word[7] = 5000 + i % 16;
        break;
    default:
        word[PAGE / 8 - 1] = 1000 + i;
        break;
    }
}

static void fill_range(uint64_t *state, Area *a, size_t page, size_t n)
{
    unsigned kind = next_random(state) % 10;
    size_t first = next_random(state) % 4 ? next_random(state) % 300 : 0;
    char content[PAGE];

    lock_range(a, page, n);
    for (size_t i = 0; i < n; i++) {
        make_content(state, content, kind, first + i);
        write_page(a, page + i, content);
    }
    check_range(a, page, n, "after a fill");
    unlock_range(a, page, n);
}

static void choose_range(uint64_t *state, const Area *a, size_t *page,
                         size_t *n)
{
    size_t most = next_random(state) % 4 ? 30 : 600;

    *page = next_random(state) % a->n;
    *n = 1 + next_random(state) % most;
    *n = MIN(*n, a->n - *page);
}

static void write_some(uint64_t *state, Area *a)
{
    size_t page, n, step = 1 + next_random(state) % 7;

    choose_range(state, a, &page, &n);
    for (size_t i = 0; i < n; i += step) {
        lock_range(a, page + i, 1);
        write_byte(a, page + i, next_random(state) % PAGE,
                   next_random(state) % 4);
        unlock_range(a, page + i, 1);
    }
}

static void copy_some(uint64_t *state)
{
    Area *a = &T.area[next_random(state) % T.n_areas];
    Area *b = &T.area[next_random(state) % T.n_areas];
    size_t from, to, n;

    choose_range(state, a, &from, &n);
    n = MIN(n, b->n);
    to = next_random(state) % (b->n - n + 1);
    if (a == b && from < to + n && to < from + n) {
        return;
    }
    /* the lower one first: no deadlock */
    if (a < b || (a == b && from < to)) {
        lock_range(a, from, n);
        lock_range(b, to, n);
    } else {
        lock_range(b, to, n);
        lock_range(a, from, n);
    }
    for (size_t i = 0; i < n; i++) {
        if (!a->flags[from + i]) {
            check_page(a, from + i, "before a copy");
            write_page(b, to + i, mem_of(a, from + i));
        }
    }
    unlock_range(a, from, n);
    unlock_range(b, to, n);
}

/* ---- the owner's ops ---- */

static bool op_dirty_sync(void *opaque, size_t first, size_t n,
                          unsigned long *bitmap)
{
    Area *a = opaque;

    if (main_thread && one_in(30)) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        size_t page = first + i;
        unsigned long bit = 1ul << page % 64;

        if (__atomic_load_n(&a->dirty[page / 64], __ATOMIC_ACQUIRE) & bit) {
            __atomic_fetch_and(&a->dirty[page / 64], ~bit, __ATOMIC_ACQ_REL);
            bitmap[i / 64] |= 1ul << i % 64;
        }
    }
    return true;
}

static bool op_busy(void *opaque, void *addr, size_t len)
{
    static uint64_t asked;
    unsigned most = __atomic_load_n(&T.busy_one_in, __ATOMIC_RELAXED);
    size_t page;

    if (area_at(addr, &page) != opaque ||
        area_at((char *)addr + len - 1, &page) != opaque) {
        fail("busy is asked about foreign memory");
    }
    return most && __atomic_add_fetch(&asked, 1, __ATOMIC_RELAXED) % most == 0;
}

static const char *op_inhibited(void *opaque)
{
    return __atomic_load_n(&T.inhibited, __ATOMIC_RELAXED);
}

static const KsmRegionOps ops_log = {
    .dirty_sync = op_dirty_sync,
    .busy = op_busy,
    .inhibited = op_inhibited,
};

static const KsmRegionOps ops_plain = {
    .busy = op_busy,
    .inhibited = op_inhibited,
};

/* ---- entering the engine ---- */

/* Might a call have ended only because failures ceased? */
static bool may_wait(void)
{
    /* a page cannot move, its memory or its home gone: a copy has to say so */
    bool stays = faults_for_ever(CALL_MOVE_BACK) || T.poisons || T.mapped_over;

    /* a device that is busy for ever is given 10 s */
    bool patient = faults_for_ever(CALL_MOVE_BACK) && T.busy_one_in;

    /* the fake's peer punches here, and tries 64 holes for each slot */
    bool peer = T.e && store_is_remote(T.e->content.store) &&
                faults_for_ever(CALL_PUNCH);

    return (stays && faults_for_ever(CALL_COPY)) || patient || peer ||
           faults_for_ever(CALL_PAGEMAP) || faults_for_ever(CALL_MAP) ||
           faults_for_ever(CALL_REMAP) || faults_for_ever(CALL_REGISTER);
}

static void engine_enter(void)
{
    count(&report->beats, 1);
    T.mapped_over = false;
    T.poisons = 0;
    faults_begin();
    T.in_engine = true;
}

static void engine_leave(const char *what)
{
    T.in_engine = false;
    if (faults_end()) {
        count(&report->relieved, 1);
        if (!may_wait()) {
            fail("%s returned only because failures ceased", what);
        }
    }
    if (faults_in_critical()) {
        fail("%s left signals blocked", what);
    }
    if (!T.race && T.e && T.e->lock.next != T.e->lock.serving) {
        fail("%s left the lock taken", what);
    }
}

static void entries_read(const void *addr, size_t n, uint64_t *entry)
{
    off_t at = (uintptr_t)addr / PAGE * sizeof(*entry);
    ssize_t len = n * sizeof(*entry);

    if (pread(T.pagemap, entry, len, at) != len) {
        fail("the test cannot read pagemap");
    }
}

/*
 * A page that stayed would block the next one; not so zeroes that somebody has
 * read there.
 */
static void check_staging(const char *when)
{
    char *stage[] = { T.e->stage.small, T.e->stage.huge };
    PmRange range[64];

    for (unsigned i = 0; i < G_N_ELEMENTS(stage); i++) {
        PmScan scan = {
            .fd = T.pagemap,
            .start = (uintptr_t)stage[i],
            .end = (uintptr_t)stage[i] + CHUNK,
            .any = PM_PRESENT | PM_SWAPPED,
            .tell = PM_ZEROPFN,
            .vec = range,
            .vec_len = G_N_ELEMENTS(range),
        };
        ssize_t n = prim_real.pagemap(&scan);

        for (ssize_t k = 0; k < n; k++) {
            if (!(range[k].kinds & PM_ZEROPFN)) {
                fail("%s: page %zu of the %s staging area is in use", when,
                     (size_t)(range[k].start - (uintptr_t)stage[i]) / PAGE,
                     i ? "huge" : "small");
            }
        }
    }
}

/* Compares the users of slots with pages that say they are, and answers. */
static void check_users(const char *when)
{
    KsmPool *p = engine_pool(T.e);
    g_autofree uint32_t *users = g_new0(uint32_t, p->top + 1);
    uint64_t shared = 0, sharing = 0;

    for (unsigned i = 0; i < T.n_areas; i++) {
        KsmRegion *r = T.area[i].region;

        for (size_t k = 0; r && k < r->n_pages; k++) {
            if (page_state(r, k) == PAGE_MERGED) {
                g_assert(r->tag[k] < p->top);
                users[r->tag[k]]++;
            }
        }
    }
    asks_users(&T.e->asks, users);
    fake_store_users(T.e->content.store, users);
    for (uint32_t s = 0; s < p->top; s++) {
        shared += users[s] > 0;
        sharing += users[s];
        if (users[s] != pool_users(p, s)) {
            fail("%s: slot %u has %u users, and says %u", when, s, users[s],
                 pool_users(p, s));
        }
    }
    if (shared != p->shared || sharing != p->sharing) {
        fail("%s: the pool's sums are wrong", when);
    }
}

/* Pages of a range that are in a file, save the huge zero page. */
static void check_mapped_range(const Area *a, const PmRange *range,
                               const char *when)
{
    const KsmRegion *r = a->region;

    if ((range->kinds & PM_ZEROPFN) || (T.e && engine_pool(T.e)->keep_all)) {
        return;
    }
    for (uintptr_t at = range->start; at < range->end; at += PAGE) {
        size_t page = (at - (uintptr_t)a->mem) / PAGE;
        int state = r ? (int)page_state(r, (at - (uintptr_t)r->base) / PAGE)
                      : -1;

        if (state != PAGE_MERGED && !(a->flags[page] & WILD)) {
            fail("%s: page %zu of area %d maps the pool in state %d", when,
                 page, (int)(a - T.area), state);
        }
    }
}

/* A page that maps the pool must be a user: its slot could be reused. */
static void check_mapped(const char *when)
{
    PmRange range[64];

    for (unsigned i = 0; i < T.n_areas; i++) {
        const Area *a = &T.area[i];
        PmScan scan = {
            .fd = T.pagemap,
            .start = (uintptr_t)a->mem,
            .end = (uintptr_t)mem_of(a, a->n),
            .all = PM_FILE | PM_PRESENT,
            .tell = PM_ZEROPFN,
            .vec = range,
            .vec_len = G_N_ELEMENTS(range),
        };
        ssize_t n = 1;

        while (scan.start < scan.end && n > 0) {
            n = prim_real.pagemap(&scan);
            for (ssize_t k = 0; k < n; k++) {
                check_mapped_range(a, &range[k], when);
            }
            scan.start = scan.walk_end;
        }
        if (n < 0) {
            fail("the test cannot scan pagemap");
        }
    }
}

/* Each chunk's count of the pool's mappings is right. */
static void check_runs(KsmRegion *r, const char *when)
{
    for (size_t c = 0; c < r->n_chunks; c++) {
        unsigned runs = r->chunk[c].runs;

        region_count_runs(r, c);
        if (r->chunk[c].runs != runs) {
            fail("%s: chunk %zu has %u runs, and says %u", when, c,
                 r->chunk[c].runs, runs);
        }
    }
}

static void check_state(const char *when)
{
    if (!T.e || T.race) {
        return;
    }
    for (unsigned i = 0; i < T.n_areas; i++) {
        if (T.area[i].region) {
            region_check(T.area[i].region);
            check_runs(T.area[i].region, when);
        }
    }
    check_users(when);
    check_mapped(when);
    if (!faults_for_ever(CALL_ADVISE) && !faults_for_ever(CALL_MAP)) {
        check_staging(when);
    }
}

/* ---- what other threads might do, from inside a call ---- */

/* Memory failure takes a staged page that is about to go home. */
static void poison_staged(char *to, char *from, size_t len)
{
    size_t i = below(len / PAGE), page;
    Area *a = area_at(to + i * PAGE, &page);
    struct poison_arg arg = {
        .start = (uintptr_t)from + i * PAGE,
        .len = PAGE,
    };
    uint64_t entry;

    entries_read(from + i * PAGE, 1, &entry);
    if (!a || !(entry & PM_ENTRY_PRESENT)) {
        return;
    }
    madvise(from + i * PAGE, PAGE, MADV_DONTNEED);
    if (ioctl(T.e->uffd, IOC_POISON, &arg) < 0) {
        fail("the test cannot poison a page: %s", strerror(errno));
    }
    a->flags[page] |= POISONED;
    T.poisons++;
    faults_may_take(POISON_CALLS);
    count(&report->poisoned, 1);
    note("staged page %zu of area %d is poisoned", page, (int)(a - T.area));
}

static void over_map(char *at, size_t len)
{
    if (mmap(at, len, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
             0) == MAP_FAILED) {
        fail("the test cannot map");
    }
}

static void map_over(void)
{
    Area *a = &T.area[below(T.n_areas)];
    size_t page, n;

    choose_range(&T.random, a, &page, &n);
    n = MIN(n, 40);
    over_map(mem_of(a, page), n * PAGE);
    memset(a->flags + page, WILD, n);
    T.mapped_over = true;
    faults_may_take(n * OVER_CALLS);
    count(&report->mapped_over, 1);
    note("area %d: %zu pages from %zu on are mapped over", (int)(a - T.area),
         n, page);
}

static int check_child(const char *when)
{
    for (unsigned i = 0; i < T.n_areas; i++) {
        check_range(&T.area[i], 0, T.area[i].n, when);
    }
    return 0;
}

static void *fork_now(void *opaque)
{
    pid_t pid = fork();
    int status = 0;

    if (pid == 0) {
        _exit(check_child("in a child forked while pages are staged"));
    }
    if (pid > 0 && (waitpid(pid, &status, 0) != pid || status)) {
        _exit(1);
    }
    return NULL;
}

/* Another thread forks: must wait until no page is staged. */
static void fork_staged(void)
{
    if (!faults_company_comes()) {
        return;
    }
    T.forking = pthread_create(&T.forker, NULL, fork_now, NULL) == 0;
    count(&report->forks_staged, 1);
    note("another thread forks");
    usleep(500);
}

static void fork_join(void)
{
    if (T.forking) {
        pthread_join(T.forker, NULL);
        T.forking = false;
        faults_company_goes();
    }
}

/* Somebody reads the staging area, and zeroes appear there. */
static void peek(void)
{
    const char *stage = one_in(2) ? T.e->stage.small : T.e->stage.huge;
    char page[PAGE];

    /* with the staging area registered for missing pages we would wait */
    if (T.e->dirty.wp_async) {
        read_carefully(stage + below(CHUNK / PAGE) * PAGE, page);
        count(&report->peeks, 1);
    }
}

/* Writes once or more where no writer would have to wait. */
static void write_elsewhere(void)
{
    Area *a = &T.area[below(T.n_areas)];
    size_t page, n;

    choose_range(&T.random, a, &page, &n);
    for (size_t i = page; i < page + MIN(n, 8); i++) {
        const char *mem = mem_of(a, i);

        if (!faults_may_block(mem) && (mem < T.hold || mem >= T.hold_to)) {
            write_byte(a, i, below(PAGE), below(4));
        }
    }
}

static void before(Call call, char *at, char *from, size_t len)
{
    bool back = call == CALL_MOVE_BACK || call == CALL_COPY;

    count(&report->beats, 1);
    if (!main_thread || !T.others || !T.e) {
        return;
    }
    if (back && len && T.with[FEATURE_POISON] && T.poisons < POISONS_MAX &&
        one_in(8)) {
        poison_staged(at, from, len);
    }
    if (!T.in_engine || T.forking || !one_in(100)) {
        return;
    }
    if (T.with[FEATURE_OVER] && one_in(8)) {
        map_over();
    } else if (T.with[FEATURE_PEEK] && T.e->stage.huge && one_in(3)) {
        peek();
    } else if (T.may_fork && faults_in_critical() && one_in(3)) {
        fork_staged();
    } else if (T.with[FEATURE_OTHERS]) {
        write_elsewhere();
    }
}

/* ---- the engine and its regions ---- */

static void config_choose(void)
{
    static const unsigned sharing[] = { 2, 3, 16, 256, 16383 };
    static const unsigned split[] = { 1, 8, 64, 512 };
    static const unsigned reserve[] = { 0, 25, 25, 99 };
    static const uint64_t stall[] = { 1, 20000, 1000000, 100000000 };
    KsmConfig *c = &T.config;

    ksm_config_init(c);
    c->scope = one_in(6) ? KSM_SCOPE_ZERO : KSM_SCOPE_VM;
    c->dirty = below(4);
    c->free_policy = below(3);
    c->smart_scan = one_in(2);
    c->max_cpu = 1 + below(100);
    c->split_min_pages = split[below(4)];
    c->max_page_sharing = sharing[below(5)];
    c->vma_reserve_percent = reserve[below(4)];
    c->stall_limit_ns = stall[below(4)];
    note("scope %d, dirty %d, free %d, smart %d, split %u, sharing %u, "
         "reserve %u, stall %" PRIu64, c->scope, c->dirty, c->free_policy,
         c->smart_scan, c->split_min_pages, c->max_page_sharing,
         c->vma_reserve_percent, c->stall_limit_ns);
}

static uint64_t weak_hash(const void *page, uint64_t seed)
{
    const uint64_t *word = page;
    uint64_t h = seed;

    for (unsigned i = 0; i < PAGE / 8 - 1; i++) {
        h = (h ^ word[i]) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 29;
    }
    return h ^ (word[PAGE / 8 - 1] ? 0x1234567 : 0);
}

static void engine_make(void)
{
    static const char zeroes[PAGE];
    g_autoptr(GError) err = NULL;

    fake_habits = fake_habits_bad;
    fake_habits.seed = T.seed;
    while (!T.e) {
        engine_enter();
        T.e = stores_engine_new(&T.config, &err);
        engine_leave("ksm_engine_new");
        if (!T.e) {
            if (!err || !err->message[0]) {
                fail("ksm_engine_new fails without a reason");
            }
            if (!faults_are_on()) {
                fail("ksm_engine_new: %s", err->message);
            }
            g_clear_error(&err);
            faults_on(one_in(2));
        } else if (T.config.dirty == KSM_DIRTY_PAGEMAP &&
                   !T.e->dirty.wp_async) {
            /* a failure took from it what all regions will ask for */
            faults_on(false);
            ksm_engine_free(T.e);
            T.e = NULL;
        }
    }
    if (T.with[FEATURE_WEAK_HASH]) {
        T.e->hasher.fn = weak_hash;
        T.e->hasher.zero = weak_hash(zeroes, T.e->hasher.seed);
    }
}

static void area_add(Area *a)
{
    g_autoptr(GError) err = NULL;

    engine_enter();
    a->region = ksm_region_add(T.e, a->mem, a->n * PAGE, -1, a->ops, a, &err);
    engine_leave("ksm_region_add");
    if (!a->region && (!err || !err->message[0])) {
        fail("ksm_region_add fails without a reason");
    }
    if (!a->region && !faults_are_on() && !T.mapped_over) {
        fail("ksm_region_add: %s", err->message);
    }
    note("area %d: %s", (int)(a - T.area), a->region ? "added" : err->message);
}

static void result_check(int ret, const char *what)
{
    /*
     * Without failures only these are reasons: a busy device, the mappings it
     * takes to leave its pages out, or an owner who takes away what he asks
     * about.
     */
    bool may_be_short = T.config.vma_reserve_percent > 90;

    if (ret && !faults_are_on() && !T.mapped_over &&
        !(T.busy_one_in &&
          (ret == -EBUSY || (ret == -ENOMEM && may_be_short)))) {
        fail("%s: %s, though nothing fails", what, strerror(-ret));
    }
}

static int area_remove(Area *a, KsmRemove how)
{
    int ret;

    engine_enter();
    ret = ksm_region_remove(a->region, how);
    engine_leave("ksm_region_remove");
    result_check(ret, "ksm_region_remove");
    if (ret == 0) {
        a->region = NULL;
    }
    note("area %d: removal: %d", (int)(a - T.area), ret);
    return ret;
}

static void area_map(Area *a)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *p = mmap(a->map, a->map_len, PROT_READ | PROT_WRITE,
                   flags | (a->map ? MAP_FIXED : 0), -1, 0);

    if (p == MAP_FAILED) {
        fail("the test cannot map");
    }
    a->map = p;
    madvise(p, a->map_len, a->huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

static void area_make(Area *a)
{
    static const size_t pages[] = { 77, 300, 512, 900, 1024, 1024 };
    static const size_t skips[] = { 0, 5, 200, 511 };
    size_t skip;

    a->n = pages[below(G_N_ELEMENTS(pages))];
    a->huge = a->n == 1024 && one_in(2);
    skip = a->huge ? 0 : skips[below(G_N_ELEMENTS(skips))];
    a->map_len = (a->n + skip) * PAGE + CHUNK;
    area_map(a);
    a->mem = (char *)(((uintptr_t)a->map + CHUNK - 1) / CHUNK * CHUNK) +
             skip * PAGE;
    /* private: a forked child keeps what it was */
    a->shadow = mmap(NULL, a->n * PAGE, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (a->shadow == MAP_FAILED) {
        fail("the test cannot map");
    }
    a->flags = g_malloc0(a->n);
    a->locks = g_malloc0(a->n);
    a->dirty = g_new0(unsigned long, a->n / 64 + 1);
    a->log = T.config.dirty == KSM_DIRTY_LOG ||
             (T.config.dirty == KSM_DIRTY_AUTO && one_in(2));
    a->ops = a->log ? &ops_log : &ops_plain;
    if (!a->log && one_in(4)) {
        a->ops = NULL;
    }
}

static void areas_make(void)
{
    T.n_areas = 1 + below(MAX_AREAS);
    for (unsigned i = 0; i < T.n_areas; i++) {
        area_make(&T.area[i]);
        for (unsigned k = below(12); k; k--) {
            size_t page, n;

            choose_range(&T.random, &T.area[i], &page, &n);
            fill_range(&T.random, &T.area[i], page, n);
        }
    }
}

/* ---- operations ---- */

static void do_step(void)
{
    static const uint64_t most[] = { 0, 1, 100000, 10000000, 1000000000 };

    for (unsigned n = 1 + below(6); n; n--) {
        int64_t wait;

        T.may_fork = T.with[FEATURE_FORK_STAGED] && !T.race;
        engine_enter();
        wait = ksm_step(T.e, most[below(G_N_ELEMENTS(most))]);
        T.may_fork = false;
        fork_join();
        engine_leave("ksm_step");
        if (wait > 0 && one_in(2)) {
            faults_sleep(wait);
        }
    }
}

static void do_range(Op op)
{
    Area *a = &T.area[below(T.n_areas)];
    size_t page, n;
    int ret;

    choose_range(&T.random, a, &page, &n);
    if (!a->region) {
        return;
    }
    lock_range(a, page, n);
    for (size_t i = page; i < page + n && op != OP_UNMERGE; i++) {
        a->flags[i] |= MAY_VANISH;
    }
    T.hold = op == OP_UNMERGE ? NULL : mem_of(a, page);
    T.hold_to = op == OP_UNMERGE ? NULL : mem_of(a, page + n);
    engine_enter();
    ret = op == OP_DISCARD ? ksm_discard(a->region, page * PAGE, n * PAGE)
        : op == OP_FREE ? ksm_free_hint(a->region, page * PAGE, n * PAGE)
        : ksm_unmerge(a->region, page * PAGE, n * PAGE);
    engine_leave(op_names[op]);
    T.hold = T.hold_to = NULL;
    note("area %d: %s %zu from %zu on: %d", (int)(a - T.area), op_names[op],
         n, page, ret);
    result_check(ret, op_names[op]);
    for (size_t i = page; i < page + n && op == OP_DISCARD && !ret; i++) {
        memset(shadow_of(a, i), 0, PAGE);
        a->flags[i] &= WILD;
    }
    check_range(a, page, n, op_names[op]);
    unlock_range(a, page, n);
}

/* To what nobody has access once the region is gone only its owner can see. */
static void map_barred(Area *a)
{
    char copy[PAGE];
    uint64_t entry;

    for (size_t i = 0; i < a->n; i++) {
        entries_read(mem_of(a, i), 1, &entry);
        if ((a->flags[i] & POISONED) && !(entry >> 62) &&
            !read_carefully(mem_of(a, i), copy)) {
            over_map(mem_of(a, i), PAGE);
            memset(shadow_of(a, i), 0, PAGE);
            a->flags[i] = 0;
        }
    }
}

/* Takes a region away, and gives it back later, perhaps all anew. */
static void do_cycle(void)
{
    Area *a = &T.area[below(T.n_areas)];
    /* what cannot be write-protected stays in the file: no way back */
    bool forget = one_in(3) || T.e->uffd_wp < 0;

    if (!T.with[FEATURE_CYCLE] || !a->region) {
        if (!a->region) {
            area_add(a);
        }
        return;
    }
    lock_range(a, 0, a->n);
    T.hold = forget ? a->mem : NULL;
    T.hold_to = forget ? mem_of(a, a->n) : NULL;
    if (area_remove(a, forget ? KSM_REMOVE_FORGET : KSM_REMOVE_UNMERGE) == 0 &&
        forget) {
        area_map(a);
        memset(a->shadow, 0, a->n * PAGE);
        memset(a->flags, 0, a->n);
    }
    T.hold = T.hold_to = NULL;
    check_range(a, 0, a->n, "after a removal");
    if (!a->region) {
        map_barred(a);
    }
    unlock_range(a, 0, a->n);
    if (!a->region && one_in(2)) {
        area_add(a);
    }
}

static void do_tune(void)
{
    switch (below(6)) {
    case 0:
        ksm_engine_set_run(T.e, !one_in(3));
        break;
    case 1:
        ksm_engine_set_max_cpu(T.e, below(200));
        break;
    case 2:
        ksm_engine_set_target_scan(T.e, below(3) * below(1000));
        break;
    case 3:
        ksm_engine_set_smart_scan(T.e, one_in(2));
        break;
    case 4:
        ksm_freer_set_decay(T.e->freer, below(3) * 100000000);
        break;
    default:
        ksm_rescan(T.e);
        break;
    }
}

static void do_flip(void)
{
    static const unsigned busy[] = { 0, 0, 1, 2, 16 };

    if (T.with[FEATURE_BUSY]) {
        __atomic_store_n(&T.busy_one_in, busy[below(G_N_ELEMENTS(busy))],
                         __ATOMIC_RELAXED);
        __atomic_store_n(&T.inhibited, one_in(3) ? "the test" : NULL,
                         __ATOMIC_RELAXED);
    }
}

static void do_fork(void)
{
    Child *c = T.child;
    int ends[2], dummy;

    while (c < T.child + MAX_CHILDREN && c->pid) {
        c++;
    }
    if (!T.with[FEATURE_FORK] || c == T.child + MAX_CHILDREN ||
        pipe2(ends, O_CLOEXEC) < 0) {
        return;
    }
    lock_all();
    engine_enter();
    c->pid = fork();
    if (c->pid == 0) {
        close(ends[1]);
        for (unsigned i = 0; i < MAX_CHILDREN; i++) {
            if (T.child[i].pid) {
                close(T.child[i].pipe);
            }
        }
        check_child("in a child");
        while (read(ends[0], &dummy, 1) < 0 && errno == EINTR) {
            continue;
        }
        _exit(check_child("in a child, later"));
    }
    engine_leave("fork");
    unlock_all();
    close(ends[0]);
    c->pipe = ends[1];
    c->pid = MAX(c->pid, 0);
    if (!c->pid) {
        close(c->pipe);
    }
    count(&report->forks, 1);
    note("child %d", c->pid);
}

static void do_reap(void)
{
    for (unsigned i = 0; i < MAX_CHILDREN; i++) {
        Child *c = &T.child[i];
        int status;

        if (!c->pid) {
            continue;
        }
        close(c->pipe);
        if (waitpid(c->pid, &status, 0) != c->pid || status) {
            /* a child of this process has said what is wrong */
            _exit(1);
        }
        c->pid = 0;
        note("child %u has ended", i);
    }
}

/* The pool's view has the page at @slot again. */
static void slot_heal(uint32_t slot)
{
    KsmPool *p = engine_pool(T.e);

    if (mmap(p->view + slot * PAGE, PAGE, PROT_READ, MAP_SHARED | MAP_FIXED,
             p->map_fd, slot * PAGE) == MAP_FAILED) {
        fail("the test cannot map");
    }
}

/*
 * The engine, but nobody else, can no longer read a slot, as if memory failure
 * had taken it.  Replaces a page of the view, for the view is read-only and
 * cannot be registered.
 */
static void do_slot(void)
{
    KsmPool *p = engine_pool(T.e);
    struct uffdio_api api = { .api = UFFD_API };
    struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MISSING };
    struct poison_arg arg = { .len = PAGE };
    uint32_t slot;
    int fd;

    if (T.race || !T.with[FEATURE_SLOT_POISON] || !p->top) {
        return;
    }
    slot = below(p->top);
    arg.start = (uintptr_t)pool_page(p, slot);
    reg.range.start = arg.start;
    reg.range.len = PAGE;
    fd = prim_real.uffd();
    if (mmap((void *)(uintptr_t)arg.start, PAGE, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
        fail("the test cannot map");
    }
    if (fd >= 0 && ioctl(fd, UFFDIO_API, &api) == 0 &&
        ioctl(fd, UFFDIO_REGISTER, &reg) == 0 &&
        ioctl(fd, IOC_POISON, &arg) == 0) {
        g_array_append_val(T.bad_slots, slot);
        count(&report->slots_poisoned, 1);
        note("slot %u is poisoned", slot);
    } else {
        slot_heal(slot);
    }
    close(fd);
}

static void do_faults(void)
{
    if (!T.with[FEATURE_FAULTS]) {
        return;
    }
    if (faults_are_on() && one_in(3)) {
        faults_on(false);
    } else {
        faults_choose(&T.random);
        faults_describe();
    }
    note("faults: %s", faults_are_on() ? "on" : "off");
}

static void do_check(void)
{
    lock_all();
    check_memory("at times");
    unlock_all();
}

static void do_op(Op op)
{
    Area *a = &T.area[below(T.n_areas)];
    size_t page, n;

    switch (op) {
    case OP_STEP:
        do_step();
        break;
    case OP_WRITE:
        write_some(&T.random, a);
        break;
    case OP_FILL:
        choose_range(&T.random, a, &page, &n);
        fill_range(&T.random, a, page, n);
        break;
    case OP_COPY:
        copy_some(&T.random);
        break;
    case OP_DISCARD:
    case OP_FREE:
    case OP_UNMERGE:
        do_range(op);
        break;
    case OP_CYCLE:
        do_cycle();
        break;
    case OP_TUNE:
        engine_enter();
        do_tune();
        engine_leave("tuning");
        break;
    case OP_FLIP:
        do_flip();
        break;
    case OP_FORK:
        do_fork();
        break;
    case OP_REAP:
        do_reap();
        break;
    case OP_OVER:
        if (T.with[FEATURE_OVER] && !T.race) {
            map_over();
        }
        break;
    case OP_SLOT:
        do_slot();
        break;
    case OP_FAULTS:
        do_faults();
        break;
    default:
        do_check();
        break;
    }
}

static Op choose_op(void)
{
    unsigned sum = 0, choice;
    Op op = 0;

    for (int i = 0; i < OP_MAX; i++) {
        sum += op_weights[i];
    }
    choice = below(sum);
    while (choice >= op_weights[op]) {
        choice -= op_weights[op++];
    }
    return op;
}

/* ---- the end: failures cease, and all is well again ---- */

static void heal_slots(void)
{
    for (guint i = 0; i < T.bad_slots->len; i++) {
        slot_heal(g_array_index(T.bad_slots, uint32_t, i));
    }
}

/* What memory failure took is replaced, what was mapped over is written. */
static void heal_pages(Area *a)
{
    char content[PAGE];

    for (size_t i = 0; i < a->n; i++) {
        if (a->flags[i] & POISONED) {
            engine_enter();
            result_check(ksm_discard(a->region, i * PAGE, PAGE), "healing");
            engine_leave("ksm_discard");
            memset(shadow_of(a, i), 0, PAGE);
            a->flags[i] = 0;
        } else if (a->flags[i] & WILD) {
            make_content(&T.random, content, 2, i);
            write_page(a, i, content);
        }
    }
}

static void heal(void)
{
    faults_on(false);
    do_reap();
    T.with[FEATURE_OVER] = T.with[FEATURE_POISON] = false;
    T.with[FEATURE_OTHERS] = false;
    T.busy_one_in = 0;
    T.inhibited = NULL;
    heal_slots();
    stores_heal(T.e);
    ksm_engine_set_run(T.e, true);
    ksm_engine_set_target_scan(T.e, 0);
    /* freed pages that are used again are noticed at once */
    ksm_freer_set_decay(T.e->freer, 0);
    check_memory("when failures have ceased");
    for (unsigned i = 0; i < T.n_areas; i++) {
        if (!T.area[i].region) {
            area_add(&T.area[i]);
        }
        heal_pages(&T.area[i]);
    }
    check_memory("healed");
}

/* Did failures have it merged in pieces, too dear to fill between? */
static bool in_pieces(const KsmRegion *r)
{
    for (size_t c = 0; c < r->n_chunks; c++) {
        if (r->chunk[c].mapped && r->chunk[c].mapped < 2 * r->chunk[c].runs &&
            r->chunk[c].why_not == KSM_REASON_NOT_WORTH) {
            return true;
        }
    }
    return false;
}

/*
 * Merged pages; on real time, where a busy machine may make merging too dear,
 * those found equal.
 */
static uint64_t merged_now(void)
{
    KsmRegion *r = T.area[0].region;
    KsmStats s;

    ksm_engine_get_stats(T.e, &s);
    return s.pages_sharing + s.zero_pages +
           (!T.others || in_pieces(r) ? r->count[PAGE_EQUAL] : 0);
}

static void note_reasons(void)
{
    KsmStats s;

    ksm_engine_get_stats(T.e, &s);
    for (unsigned i = 0; i < KSM_REASON_MAX; i++) {
        if (s.reasons[i]) {
            note("%s: %" PRIu64, ksm_reason_name(i), s.reasons[i]);
        }
    }
    note("index: %zu entries in %zu lines; pool: %u of %zu slots; merging is "
         "refused for %s", (size_t)T.e->content.index.count,
         T.e->content.index.now.n_lines,
         engine_pool(T.e)->top, engine_pool(T.e)->capacity,
         ksm_reason_name(T.area[0].region->chunk[0].why_not));
    for (unsigned i = 0; i < T.n_areas; i++) {
        KsmRegion *r = T.area[i].region;

        note("area %u: %zu pages%s, dirty %d, %stracking", i, T.area[i].n,
             T.area[i].huge ? ", huge" : "", r->dirty,
             r->tracking ? "" : "not ");
        for (unsigned k = 0; k < PAGE_STATES; k++) {
            if (r->count[k]) {
                note("  in state %u: %" PRIu64, k, r->count[k]);
            }
        }
    }
}

/* While calls fail it may have something to do all the time. */
#define STEP_NS 100000000

/*
 * Isolating costs nothing: of pages that were seen at different times some may
 * be merged first, and the others, each alone between them, be refused for what
 * that takes on this machine.  They would stay, and rightly so.
 */
static void recover_step(unsigned n)
{
    while (n--) {
        T.e->costs = (KsmCosts) { 0 };
        engine_enter();
        faults_sleep(MAX(ksm_step(T.e, STEP_NS), 0));
        engine_leave("ksm_step");
    }
}

/* Makes the first area's halves equal: that must be found, and merged. */
static void recover(void)
{
    Area *a = &T.area[0];
    bool zero = T.config.scope == KSM_SCOPE_ZERO;
    uint64_t want = a->n / 4;
    char content[PAGE];

    /* merged pages written since stay in mappings of the pool */
    engine_enter();
    result_check(ksm_unmerge(a->region, 0, a->n * PAGE), "ksm_unmerge");
    engine_leave("ksm_unmerge");
    for (size_t i = 0; i < a->n; i++) {
        memset(content, 0, PAGE);
        content[100] = zero ? 0 : 1 + i % (a->n / 2) / 128;
        content[101] = zero ? 0 : 1 + i % (a->n / 2) % 128;
        write_page(a, i, content);
    }
    if (T.e->uffd_wp < 0 || T.config.max_page_sharing < 16 ||
        T.config.vma_reserve_percent > 90 ||
        (a->huge && T.config.split_min_pages >
         (T.with[FEATURE_WEAK_HASH] ? 1 : CHUNK / PAGE / 2))) {
        /*
         * No more can be merged than there is room for.  An engine made with
         * failures may lack what restoring takes; each replica of a pattern
         * sets 512 slots aside, however few may share one; of one mapping in a
         * hundred the other areas may have taken all.  Two equal huge pages
         * save one of them: half each, if either has half of the pages seen
         * first.  A weak hash splits pages that are not equal.
         */
        count(&report->skipped, 1);
        return;
    }
    /* what goes wrong now must be looked at again, unasked */
    if (T.with[FEATURE_FAULTS] && T.with[FEATURE_LATE]) {
        faults_choose(&T.random);
        faults_describe();
        recover_step(8);
        faults_on(false);
    }
    for (unsigned tries = 0; tries < 400; tries++) {
        recover_step(1);
        if (merged_now() >= want) {
            count(&report->merged, merged_now());
            return;
        }
    }
    note_reasons();
    fail("after the failures only %" PRIu64 " pages are merged, not %" PRIu64,
         merged_now(), want);
}

static unsigned open_files(void)
{
    unsigned n = 0;

    for (int fd = 0; fd < 1024; fd++) {
        n += fcntl(fd, F_GETFD) >= 0;
    }
    return n;
}

static void finish(unsigned files)
{
    KsmStats s;

    check_state("merged again");
    check_memory("merged again");
    for (unsigned i = 0; i < T.n_areas; i++) {
        area_remove(&T.area[i], KSM_REMOVE_UNMERGE);
    }
    check_state("at the end");
    check_memory("at the end");
    ksm_engine_get_stats(T.e, &s);
    if (s.pages_shared || s.pages_sharing) {
        fail("slots are in use without regions");
    }
    engine_enter();
    ksm_engine_free(T.e);
    T.e = NULL;
    engine_leave("ksm_engine_free");
    check_memory("without the engine");
    check_mapped("without the engine");
    if (open_files() != files) {
        fail("%u files were open, and %u are", files, open_files());
    }
}

/* ---- seeds ---- */

static void *writer(void *opaque)
{
    uint64_t state = T.seed * 1000 + (uintptr_t)opaque;

    while (!__atomic_load_n(&T.stop, __ATOMIC_RELAXED)) {
        Area *a = &T.area[next_random(&state) % T.n_areas];
        size_t page, n;

        switch (next_random(&state) % 4) {
        case 0:
            choose_range(&state, a, &page, &n);
            fill_range(&state, a, page, n);
            break;
        case 1:
            copy_some(&state);
            break;
        default:
            write_some(&state, a);
            break;
        }
        count(&report->beats, 1);
        if (next_random(&state) % 8 == 0) {
            usleep(next_random(&state) % 2000);
        }
    }
    return NULL;
}

static void *stepper(void *opaque)
{
    uint64_t state = T.seed * 1000 + 999;

    while (!__atomic_load_n(&T.stop, __ATOMIC_RELAXED)) {
        faults_begin();
        ksm_step(T.e, next_random(&state) % 20000000);
        if (faults_end()) {
            count(&report->relieved, 1);
        }
        count(&report->beats, 1);
        if (next_random(&state) % 4 == 0) {
            usleep(next_random(&state) % 500);
        }
    }
    return NULL;
}

static void scene_single(void)
{
    for (unsigned n = 20 + below(80); n; n--) {
        Op op = choose_op();

        count(&report->ops[op], 1);
        note("%s", op_names[op]);
        do_op(op);
        if (op != OP_WRITE && op != OP_FILL && op != OP_COPY && one_in(3)) {
            check_state(op_names[op]);
        }
    }
}

static void scene_race(void)
{
    pthread_t thread[N_WRITERS + 1];

    for (uintptr_t i = 0; i < N_WRITERS; i++) {
        g_assert(!pthread_create(&thread[i], NULL, writer, (void *)i));
    }
    g_assert(!pthread_create(&thread[N_WRITERS], NULL, stepper, NULL));
    for (unsigned n = 10 + below(30); n; n--) {
        Op op = choose_op();

        if (op == OP_STEP) {
            usleep(below(3000));
            continue;
        }
        count(&report->ops[op], 1);
        note("%s", op_names[op]);
        do_op(op);
    }
    __atomic_store_n(&T.stop, 1, __ATOMIC_RELAXED);
    /* threads that wait for a page get it once failures cease */
    faults_on(false);
    for (unsigned i = 0; i < N_WRITERS + 1; i++) {
        pthread_join(thread[i], NULL);
    }
    T.race = false;
}

static const FaultScene fault_scene = {
    .is_memory = is_memory,
    .before = before,
    .fail = fail_text,
};

/* The engine rightly warns of lost pages, and often. */
static void log_note(const char *domain, GLogLevelFlags level,
                     const char *text, void *opaque)
{
    note("%s", text);
    if (level & (G_LOG_LEVEL_ERROR | G_LOG_LEVEL_CRITICAL)) {
        fail("%s", text);
    }
}

static void seed_run(uint64_t seed)
{
    unsigned files;

    g_log_set_default_handler(log_note, NULL);

    main_thread = true;
    T.others = !T.race;
    T.seed = seed;
    T.random = seed * UINT64_C(0x2545f4914f6cdd1d);
    for (unsigned i = 0; i < FEATURE_MAX; i++) {
        bool with = one_in(feature_one_in[i]);

        T.with[i] = chosen[i] == 2 || (with && !chosen[i]);
    }
    T.pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    T.bad_slots = g_array_new(FALSE, FALSE, sizeof(uint32_t));
    faults_note = note;
    faults_install(seed, &fault_scene, !T.race);
    files = open_files();
    config_choose();
    areas_make();
    if (one_in(3)) {
        do_faults();
    }
    engine_make();
    for (unsigned i = 0; i < T.n_areas; i++) {
        area_add(&T.area[i]);
    }
    if (T.race) {
        scene_race();
    } else {
        scene_single();
    }
    heal();
    recover();
    finish(files);
    count(&report->calls, faults_calls());
    for (unsigned i = 0; i < CALL_MAX; i++) {
        count(&report->failed[i], faults_failed(i));
    }
}

/* ---- the process that watches ---- */

typedef struct Options {
    uint64_t seed;
    uint64_t seeds;
    double seconds;
    int race;               /* -1: as the seed says */
    bool first;             /* end at the first failure */
} Options;

static void print_notes(void)
{
    uint64_t from = report->n > N_NOTES ? report->n - N_NOTES : 0;

    for (uint64_t i = from; i < report->n; i++) {
        printf("#   %s\n", report->note[i % N_NOTES]);
    }
}

static void print_threads(pid_t pid)
{
    g_autofree char *path = g_strdup_printf("/proc/%d/task", pid);
    g_autoptr(GDir) dir = g_dir_open(path, 0, NULL);
    const char *name;

    while (dir && (name = g_dir_read_name(dir))) {
        g_autofree char *file = g_build_filename(path, name, "wchan", NULL);
        g_autofree char *text = NULL;

        if (g_file_get_contents(file, &text, NULL, NULL)) {
            printf("#   thread %s is in %s\n", name, text);
        }
    }
}

/* Waits for the child; false: it hangs, and was ended. */
static bool child_wait(pid_t pid, int *status)
{
    const struct timespec second = { 1, 0 };
    uint64_t beats = 0;
    unsigned silent = 0;
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    while (waitpid(pid, status, WNOHANG) == 0) {
        uint64_t now = __atomic_load_n(&report->beats, __ATOMIC_RELAXED);

        if (sigtimedwait(&set, NULL, &second) >= 0) {
            continue;
        }
        silent = now == beats ? silent + 1 : 0;
        beats = now;
        if (silent == SILENT_S) {
            print_threads(pid);
            kill(pid, SIGKILL);
            waitpid(pid, status, 0);
            return false;
        }
    }
    return true;
}

static bool seed_watch(uint64_t seed, const Options *o)
{
    bool race = o->race < 0 ? seed % 4 == 3 : o->race;
    int status = 0;
    bool ended;
    pid_t pid;

    report->n = 0;
    report->what[0] = 0;
    fflush(stdout);
    pid = fork();
    g_assert(pid >= 0);
    if (pid == 0) {
        T.race = race;
        seed_run(seed);
        fflush(stdout);
        _exit(0);
    }
    ended = child_wait(pid, &status);
    if (ended && status == 0) {
        return true;
    }
    printf("# seed %" PRIu64 " (%s): %s", seed, race ? "race" : "single",
           !ended ? "hangs" : report->what[0] ? report->what : "");
    if (ended && !report->what[0]) {
        printf(WIFSIGNALED(status) ? "signal %d" : "exit %d",
               WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    }
    printf("\n");
    if (!T.verbose) {
        print_notes();
    }
    return false;
}

static void print_sums(void)
{
    printf("# %" PRIu64 " calls; failed:", report->calls);
    for (unsigned i = 0; i < CALL_MAX; i++) {
        printf(" %s %" PRIu64, faults_name(i), report->failed[i]);
    }
    printf("\n#");
    for (unsigned i = 0; i < OP_MAX; i++) {
        printf(" %" PRIu64 " %s,", report->ops[i], op_names[i]);
    }
    printf(" %" PRIu64 " forks, %" PRIu64 " while staged, %" PRIu64
           " poisoned, %" PRIu64 " slots poisoned, %" PRIu64 " mapped over, %"
           PRIu64 " peeks\n# %" PRIu64 " pages merged after failures; %" PRIu64
           " calls had to wait for failures to cease, %" PRIu64
           " seeds were not to merge again\n", report->forks,
           report->forks_staged, report->poisoned, report->slots_poisoned,
           report->mapped_over, report->peeks, report->merged,
           report->relieved, report->skipped);
}

static void usage(void)
{
    fprintf(stderr,
            "usage: test-fuzz [--seed N] [--seeds COUNT] [--seconds S] "
            "[--mode single|race]\n                 "
            "[--with FEATURE,...] [--without FEATURE,...] [--first] [-v]\n"
            "features:");
    for (unsigned i = 0; i < FEATURE_MAX; i++) {
        fprintf(stderr, " %s", feature_names[i]);
    }
    fprintf(stderr, "\n");
    exit(2);
}

static void parse_features(const char *list, uint8_t set)
{
    g_auto(GStrv) names = g_strsplit(list, ",", -1);

    for (unsigned i = 0; names[i]; i++) {
        unsigned f = 0;

        while (f < FEATURE_MAX && strcmp(names[i], feature_names[f])) {
            f++;
        }
        if (f == FEATURE_MAX) {
            usage();
        }
        chosen[f] = set;
    }
}

static void parse(int argc, char **argv, Options *o)
{
    *o = (Options) { g_get_real_time() % 1000000000, UINT64_MAX, 30, -1, 0 };
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;

        if (!strcmp(arg, "-v")) {
            T.verbose = true;
            continue;
        } else if (!strcmp(arg, "--first")) {
            o->first = true;
            continue;
        } else if (!value) {
            usage();
        } else if (!strcmp(arg, "--seed")) {
            o->seed = g_ascii_strtoull(value, NULL, 0);
            o->seeds = o->seeds == UINT64_MAX ? 1 : o->seeds;
        } else if (!strcmp(arg, "--seeds")) {
            o->seeds = g_ascii_strtoull(value, NULL, 0);
            o->seconds = 1e9;
        } else if (!strcmp(arg, "--seconds")) {
            o->seconds = atof(value);
            o->seeds = UINT64_MAX;
        } else if (!strcmp(arg, "--mode") &&
                   (!strcmp(value, "single") || !strcmp(value, "race"))) {
            o->race = !strcmp(value, "race");
        } else if (!strcmp(arg, "--without")) {
            parse_features(value, 1);
        } else if (!strcmp(arg, "--with")) {
            parse_features(value, 2);
        } else {
            usage();
        }
        i++;
    }
}

int main(int argc, char **argv)
{
    g_autoptr(GError) err = NULL;
    uint64_t ran = 0, bad = 0;
    sigset_t set;
    int64_t end;
    Options o;

    parse(argc, argv, &o);
    if (!ksm_supported(&err)) {
        printf("1..0 # SKIP %s\n", err->message);
        return 77;
    }
    report = mmap(NULL, sizeof(*report), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    g_assert(report != MAP_FAILED);
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    printf("TAP version 13\n1..1\n# seeds from %" PRIu64 " on\n", o.seed);
    end = g_get_monotonic_time() + o.seconds * 1e6;
    while (ran < o.seeds && g_get_monotonic_time() < end) {
        bad += !seed_watch(o.seed + ran, &o);
        ran++;
        if (bad && (o.first || bad == 50)) {
            break;
        }
    }
    print_sums();
    printf("%s 1 %" PRIu64 " seeds, %" PRIu64 " failed\n",
           bad ? "not ok" : "ok", ran, bad);
    return bad ? 1 : 0;
}
