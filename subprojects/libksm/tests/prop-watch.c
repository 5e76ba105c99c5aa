/*
 * libksm: test-prop's watch over the engine's system calls
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/prim.h"
#include "base/tsan.h"
#include "prop-watch.h"

#define PAGE KSM_PAGE_SIZE
#define CHUNK KSM_CHUNK_SIZE
#define STAGE_PAGES (2 * CHUNK / PAGE)
#define MAX_ENGINES 4
#define MAX_ENTRIES 1024
#define N_CALLS (1u << 18)
#define PRINT_CALLS 400
#define LIE_ONE_IN 500

typedef struct Call {
    uint64_t ns;
    const char *name;
    uintptr_t at, len, other;   /* range; where to or from; or flags */
    long ret;
    unsigned cpu;
} Call;

/*
 * What one engine has staged, as it was when the move returned.  Nobody can
 * reach it: a page that changes was written through a translation that the move
 * should have made the processors forget.
 */
typedef struct Staged {
    char *stage, *copy;
    const char *home[STAGE_PAGES];  /* where the page came from */
    uint8_t here[STAGE_PAGES];      /* moved in, present, and not out yet */
} Staged;

static const char entry_name[] = "entry";

static WatchOwner owner;
static Staged staged[MAX_ENGINES];
static unsigned n_staged;
static __thread Staged *mine;   /* what this thread staged last */
static __thread const char *isolated;   /* what this thread isolates now */
/* whose writers this thread holds up, by their places in a chunk */
static __thread const char *blocked[CHUNK / PAGE];
static int blocking[MAX_ENGINES];       /* userfaultfds for that */
static int pagemap_fd;
static Call calls[N_CALLS];
static unsigned n_calls;        /* atomic, as those that follow */
static unsigned n_moves;
static uint64_t n_migrating;
static uint64_t n_uncounted, n_lies;

static long note(const char *name, uint64_t ns, const void *at, size_t len,
                 uintptr_t other, long ret)
{
    unsigned i = __atomic_fetch_add(&n_calls, 1, __ATOMIC_RELAXED) % N_CALLS;

    calls[i] = (Call) { ns, name, (uintptr_t)at, len, other, ret,
                        sched_getcpu() };
    return ret;
}

void watch_note(const char *name, uint64_t ns, const void *at, size_t len,
                uintptr_t other, long ret)
{
    note(name, ns, at, len, other, ret);
}

void watch_note_entries(const char *mem, size_t n)
{
    uint64_t entry[MAX_ENTRIES] = { 0 };
    uint64_t ns = prim_real.now_ns();

    n = MIN(n, MAX_ENTRIES);
    if (pread(pagemap_fd, entry, n * 8, (uintptr_t)mem / PAGE * 8) < 0) {
        return;
    }
    for (size_t i = 0; i < n; i++) {
        note(entry_name, ns, mem + i * PAGE, PAGE, entry[i], 0);
    }
}

/* What the kernel says of a pagemap entry's page frame. */
static const char *frame_flags(uint64_t entry)
{
    static char text[40];
    uint64_t flags, frame = entry & ((UINT64_C(1) << 55) - 1);
    int fd = open("/proc/kpageflags", O_RDONLY | O_CLOEXEC);

    text[0] = 0;
    if (fd >= 0 && entry >> 63 && frame &&
        pread(fd, &flags, 8, frame * 8) == 8) {
        g_snprintf(text, sizeof(text), ", flags %" PRIx64, flags);
    }
    if (fd >= 0) {
        close(fd);
    }
    return text;
}

static void print_calls(const char *mem)
{
    unsigned end = __atomic_load_n(&n_calls, __ATOMIC_RELAXED), shown = 0;
    unsigned i = end, first = end - MIN(end, N_CALLS - 64);

    printf("# now %" PRIu64 " ns; latest first:\n", prim_real.now_ns());
    while (i-- > first && shown < PRINT_CALLS) {
        Call *c = &calls[i % N_CALLS];

        if (c->at <= (uintptr_t)mem && (uintptr_t)mem < c->at + c->len) {
            printf("# %" PRIu64 " cpu %u %s %lx %lx %lx: %ld%s\n", c->ns,
                   c->cpu, c->name, c->at, c->len, c->other, c->ret,
                   c->name == entry_name ? frame_flags(c->other) : "");
            shown++;
        }
    }
}

static uint64_t pagemap_entry(const char *page)
{
    uint64_t entry = 0;

    return pread(pagemap_fd, &entry, 8, (uintptr_t)page / PAGE * 8) == 8
           ? entry : 0;
}

/* Present, or being moved by the kernel: then it looks swapped out. */
static bool is_present(const char *page)
{
    uint64_t entry = pagemap_entry(page);

    if (!(entry >> 63) && (entry >> 62 & 1)) {
        __atomic_fetch_add(&n_migrating, 1, __ATOMIC_RELAXED);
    }
    return entry >> 62;
}

static bool all_zero(const char *page)
{
    return !page[0] && !memcmp(page, page + 1, PAGE - 1);
}

/* What is mapped there: tells a lost page from a lost slot. */
static void print_mapping(const char *mem)
{
    uint64_t entry = pagemap_entry(mem);
    unsigned long start, end;
    char line[256];
    FILE *f;

    printf("# %p: pagemap %016" PRIx64 "%s%s\n", mem, entry,
           entry >> 63 ? ", present" : "", entry >> 61 & 1 ? ", file" : "");
    f = fopen("/proc/self/maps", "r");
    while (f && fgets(line, sizeof(line), f)) {
        if (sscanf(line, "%lx-%lx", &start, &end) == 2 &&
            start <= (uintptr_t)mem && (uintptr_t)mem < end) {
            printf("# %s", line);
        }
    }
    if (f) {
        fclose(f);
    }
}

/* Do all processors see the same?  First the current one. */
static void print_views(const char *mem, const char *content)
{
    printf("# on processor %d\n", sched_getcpu());
    for (int cpu = 0; cpu < 64; cpu++) {
        cpu_set_t set;

        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        if (sched_setaffinity(0, sizeof(set), &set) == 0) {
            bool same = !memcmp(mem, content, PAGE), zero = all_zero(mem);

            printf("# processor %d sees %s\n", cpu,
                   same ? "what it should" : zero ? "zeroes" : "others");
        }
    }
}

static void print_staged(const char *content)
{
    for (unsigned i = 0; i < n_staged; i++) {
        for (size_t k = 0; k < STAGE_PAGES; k++) {
            const char *page = staged[i].stage + k * PAGE;

            if (is_present(page)) {
                printf("# staged by engine %u: %p of %p%s\n", i, page,
                       staged[i].home[k], memcmp(page, content, PAGE) ? ""
                       : ", with that content");
            }
        }
    }
}

void watch_print(const char *mem, const char *content)
{
    print_views(mem, content);
    print_mapping(mem);
    print_staged(content);
    print_calls(mem);
    fflush(stdout);
}

static void G_GNUC_NORETURN judge(const char *what, const char *page)
{
    printf("Bail out! %s: %p\n", what, page);
    print_mapping(page);
    print_calls(page);
    fflush(stdout);
    _exit(1);
}

static Staged *staged_at(const void *addr)
{
    for (unsigned i = 0; i < n_staged; i++) {
        char *stage = staged[i].stage;

        if ((char *)addr >= stage && (char *)addr < stage + 2 * CHUNK) {
            return &staged[i];
        }
    }
    return NULL;
}

static size_t staged_page(const Staged *s, const char *addr)
{
    return (addr - s->stage) / PAGE;
}

static void moved_in(Staged *s, const char *addr, const char *from,
                     size_t len)
{
    for (size_t i = 0; i < len; i += PAGE) {
        size_t page = staged_page(s, addr + i);

        s->home[page] = from + i;
        s->here[page] = is_present(addr + i);
        if (s->here[page]) {
            memcpy(s->copy + page * PAGE, addr + i, PAGE);
        }
    }
}

static void check_staged(const char *addr, size_t len)
{
    Staged *s = staged_at(addr);

    for (size_t i = 0; s && i < len; i += PAGE) {
        size_t page = staged_page(s, addr + i);
        const char *copy = s->copy + page * PAGE;

        if (!s->here[page] || !memcmp(addr + i, copy, PAGE)) {
            continue;
        }
        /* freed lazily, it may have been reclaimed */
        if ((is_present(addr + i) && !all_zero(addr + i)) ||
            !owner.may_vanish(s->home[page])) {
            judge("a staged page was written", s->home[page]);
        }
    }
}

/* Pages leave the staging area for where they came from. */
static void moved_out(Staged *s, const char *addr, const char *to, size_t len)
{
    for (size_t i = 0; i < len; i += PAGE) {
        size_t page = staged_page(s, addr + i);

        if (s->home[page] != to + i) {
            judge("a staged page was put somewhere else", to + i);
        }
        s->here[page] = false;
    }
}

/* Drops what nobody needs from the staging area. */
static void check_dropped(const char *addr, size_t len)
{
    Staged *s = staged_at(addr);

    for (size_t i = 0; s && i < len; i += PAGE) {
        size_t page = staged_page(s, addr + i);

        if (s->here[page] && !all_zero(s->copy + page * PAGE) &&
            !owner.may_vanish(s->home[page])) {
            judge("a staged page was dropped", s->home[page]);
        }
        s->here[page] = false;
    }
}

/*
 * Where this thread has the page staged: at its place in a chunk, in either
 * staging area; STAGE_PAGES: nowhere.
 */
static size_t staged_of(const char *home)
{
    size_t page = (uintptr_t)home % CHUNK / PAGE;

    while (page < STAGE_PAGES &&
           (!mine || !mine->here[page] || mine->home[page] != home)) {
        page += CHUNK / PAGE;
    }
    return MIN(page, STAGE_PAGES);
}

static const char **blocked_at(const char *page)
{
    return &blocked[(uintptr_t)page % CHUNK / PAGE];
}

static bool is_blocking(int fd)
{
    for (unsigned i = 0; i < n_staged; i++) {
        if (blocking[i] == fd) {
            return true;
        }
    }
    return false;
}

/*
 * The pool is mapped over pages of the same content, that are staged, or that
 * nobody can write to.
 */
static void check_replaced(const char *addr, size_t len, int fd, off_t offset)
{
    char slot[PAGE];

    for (size_t i = 0; i < len; i += PAGE) {
        size_t page = staged_of(addr + i);
        const char *is = addr + i;

        if (page < STAGE_PAGES) {
            is = mine->copy + page * PAGE;
        } else if (*blocked_at(addr + i) != addr + i) {
            judge("mapped over a page that was not isolated", addr + i);
        }
        KSM_TSAN_IGNORE_BEGIN();    /* it was written, and will be */
        if (pread(fd, slot, PAGE, offset + i) != PAGE ||
            memcmp(slot, is, PAGE)) {
            judge("replaced by other content", addr + i);
        }
        KSM_TSAN_IGNORE_END();
    }
}

static void replaced(const char *addr, size_t len)
{
    for (size_t i = 0; i < len; i += PAGE) {
        size_t page = staged_of(addr + i);

        if (page < STAGE_PAGES) {
            mine->here[page] = false;
        }
        *blocked_at(addr + i) = NULL;
    }
}

static void check_discarded(const char *addr, size_t len, const char *what)
{
    for (size_t i = 0; i < len; i += PAGE) {
        if (owner.is_memory(addr + i) && !owner.may_vanish(addr + i)) {
            judge(what, addr + i);
        }
    }
}

static void *watch_map(void *addr, size_t len, int prot, int flags, int fd,
                       off_t offset)
{
    uint64_t ns = prim_real.now_ns();
    bool pool = fd >= 0 && owner.is_memory(addr);
    void *p;

    check_staged(addr, len);
    check_dropped(addr, len);
    if (pool) {
        check_replaced(addr, len, fd, offset);
    } else if (addr) {
        check_discarded(addr, len, "mapped over a page");
    }
    p = prim_real.map(addr, len, prot, flags, fd, offset);
    note(pool ? "map pool" : "map", ns, addr, len, offset, !p);
    if (pool && p) {
        replaced(addr, len);
    }
    return p;
}

static int watch_unmap(void *addr, size_t len)
{
    check_discarded(addr, len, "unmapped");
    return prim_real.unmap(addr, len);
}

/* Writers to the target wait: both are the same. */
static int watch_remap(void *from, size_t len, void *to)
{
    uint64_t ns = prim_real.now_ns();

    KSM_TSAN_IGNORE_BEGIN();
    for (size_t i = 0; i < len; i += PAGE) {
        if (memcmp((char *)from + i, (char *)to + i, PAGE)) {
            judge("restored with other content", (char *)to + i);
        }
    }
    KSM_TSAN_IGNORE_END();
    return note("remap", ns, to, len, (uintptr_t)from,
                prim_real.remap(from, len, to));
}

/* Nobody's page goes with it: its content is staged. */
static void *watch_split(void *from, size_t len)
{
    uint64_t ns = prim_real.now_ns(), entry;
    void *p = prim_real.split(from, len);
    off_t at = (uintptr_t)p / PAGE * sizeof(entry);

    note("split", ns, from, len, (uintptr_t)p, !p);
    if (p && (pread(pagemap_fd, &entry, sizeof(entry), at) != sizeof(entry) ||
              entry >> 62)) {
        judge("a page was split off with its content", from);
    }
    return p;
}

static int watch_advise(void *addr, size_t len, int advice)
{
    uint64_t ns = prim_real.now_ns();

    if (advice == MADV_DONTNEED) {
        check_staged(addr, len);
        check_dropped(addr, len);
    }
    if (advice == MADV_DONTNEED || advice == MADV_FREE) {
        check_discarded(addr, len, "dropped");
    }
    return note("advise", ns, addr, len, advice,
                prim_real.advise(addr, len, advice));
}

static int watch_register(const UffdRange *range, unsigned mode)
{
    uint64_t ns = prim_real.now_ns();
    long ret = note("register", ns, range->addr, range->len, mode,
                    prim_real.uffd_register(range, mode));

    if (ret == 0 && mode & UFFD_MISSING && owner.is_memory(range->addr)) {
        isolated = range->addr;
    }
    return ret;
}

static int watch_unregister(const UffdRange *range)
{
    uint64_t ns = prim_real.now_ns();

    isolated = NULL;
    return note("unregister", ns, range->addr, range->len, 0,
                prim_real.uffd_unregister(range));
}

/* Whoever waits for an isolated page does not wait for another process. */
static void check_talk(void)
{
    if (isolated) {
        judge("the daemon is spoken to while pages are isolated", isolated);
    }
}

static int watch_connect(const char *path)
{
    check_talk();
    return prim_real.connect(path);
}

static int watch_send(int fd, const void *message, size_t len)
{
    check_talk();
    return prim_real.send(fd, message, len);
}

static ssize_t watch_receive(int fd, void *message, size_t len, int *fds,
                             unsigned n_fds)
{
    check_talk();
    return prim_real.receive(fd, message, len, fds, n_fds);
}

static int watch_protect(const UffdRange *range, bool on)
{
    uint64_t ns = prim_real.now_ns();
    char *addr = range->addr;
    long ret;

    if (!on && is_blocking(range->fd)) {
        for (size_t i = 0; i < range->len; i += PAGE) {
            *blocked_at(addr + i) = NULL;
        }
    }
    ret = note("protect", ns, addr, range->len, on,
               prim_real.uffd_protect(range, on));
    if (on && ret == 0 && is_blocking(range->fd)) {
        isolated = addr;
        for (size_t i = 0; i < range->len; i += PAGE) {
            *blocked_at(addr + i) = addr + i;
        }
    }
    return ret;
}

static int watch_wake(const UffdRange *range)
{
    if (is_blocking(range->fd)) {
        isolated = NULL;
        memset(blocked, 0, sizeof(blocked));
    }
    return prim_real.uffd_wake(range);
}

/*
 * Moved but not counted (merge.h): a page that came, or went home, all the
 * same.
 */
static void find_uncounted(Staged *in, Staged *out, const char *to,
                           const char *from, size_t len, size_t done)
{
    for (size_t i = done; i < len; i += PAGE) {
        if (is_present(to + i) && is_present(from + i)) {
            judge("in two places", in ? from + i : to + i);
        }
        if (in && !in->here[staged_page(in, to + i)] && is_present(to + i)) {
            moved_in(in, to + i, from + i, PAGE);
        } else if (out && out->here[staged_page(out, from + i)] &&
                   !is_present(from + i) && is_present(to + i)) {
            moved_out(out, from + i, to + i, PAGE);
        } else {
            continue;
        }
        __atomic_fetch_add(&n_uncounted, 1, __ATOMIC_RELAXED);
    }
}

/* As Linux 6.18 at times: moves all, counts none or half. */
static int lie(size_t len, size_t *done)
{
    unsigned n = __atomic_fetch_add(&n_moves, 1, __ATOMIC_RELAXED);

    if (n % LIE_ONE_IN) {
        return 0;
    }
    __atomic_fetch_add(&n_lies, len / PAGE, __ATOMIC_RELAXED);
    *done = n / LIE_ONE_IN % 2 ? len / PAGE / 2 * PAGE : 0;
    return *done ? -EAGAIN : -EEXIST;
}

static int watch_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    uint64_t ns = prim_real.now_ns();
    Staged *in = staged_at(to), *out = staged_at(from);
    int ret;

    check_staged(from, len);
    ret = prim_real.uffd_move(fd, to, from, len, done);
    note("move to", ns, to, len, *done, ret);
    note("move from", ns, from, len, *done, ret);
    if (in) {
        mine = in;
        moved_in(in, to, from, *done);
    } else if (out) {
        moved_out(out, from, to, *done);
    }
    if (ret < 0) {
        find_uncounted(in, out, to, from, len, *done);
    }
    return ret < 0 ? ret : lie(len, done);
}

void watch_report(void)
{
    printf("# moved, not counted: %" PRIu64 " pages by the kernel, %" PRIu64
           " by this test\n", n_uncounted, n_lies);
    printf("# met while the kernel moved them elsewhere: %" PRIu64 " pages\n",
           n_migrating);
}

static int watch_copy(int fd, void *to, const void *from, size_t len,
                      size_t *done)
{
    uint64_t ns = prim_real.now_ns();
    Staged *out = staged_at(from);
    int ret;

    check_staged(from, len);
    ret = prim_real.uffd_copy(fd, to, from, len, done);
    note("copy to", ns, to, len, *done, ret);
    if (out) {
        moved_out(out, from, to, *done);
    }
    return ret;
}

static ssize_t watch_pagemap(PmScan *scan)
{
    uint64_t ns = prim_real.now_ns();
    ssize_t ret = prim_real.pagemap(scan);

    note(scan->protect ? "scan, protect" : "scan", ns, (void *)scan->start,
         scan->end - scan->start, scan->walk_end, ret);
    return ret;
}

void watch_start(KsmEngine *const *engines, unsigned n,
                 const WatchOwner *asked)
{
    g_assert(n <= MAX_ENGINES);
    owner = *asked;
    n_staged = n;
    pagemap_fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    g_assert(pagemap_fd >= 0);
    for (unsigned i = 0; i < n; i++) {
        staged[i].stage = engines[i]->stage.small;
        g_assert(engines[i]->stage.huge == staged[i].stage + CHUNK);
        staged[i].copy = g_malloc(2 * CHUNK);
        blocking[i] = engines[i]->uffd_wp;
    }
    prim.map = watch_map;
    prim.unmap = watch_unmap;
    prim.remap = watch_remap;
    prim.split = watch_split;
    prim.advise = watch_advise;
    prim.uffd_register = watch_register;
    prim.uffd_unregister = watch_unregister;
    prim.uffd_protect = watch_protect;
    prim.uffd_wake = watch_wake;
    prim.uffd_move = watch_move;
    prim.uffd_copy = watch_copy;
    prim.pagemap = watch_pagemap;
    prim.connect = watch_connect;
    prim.send = watch_send;
    prim.receive = watch_receive;
}
