/*
 * libksm tests: an engine whose thread is helped
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What helpers may not do: be in the kernel, with a lock that is needed, while
 * guests wait.  And what must not depend on them: all else.
 */
#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/prim.h"
#include "engine/state.h"
#include "house.h"
#include "share/store-local.h"

static pthread_t stepping;
/* In such a call now (atomic); calls, by helpers, and while guests wait. */
static int in_memory, in_file;
static unsigned emptied, allocated;     /* atomic: by helpers */
static unsigned waits;
static unsigned fails_half; /* atomic; all tries of a helper's half ... */
static bool renews;         /* after which it maps the area anew */
static bool begins;         /* no page of this isolation was moved so far */
static unsigned halves;     /* atomic; emptied by who waited for the other */
static const KsmEngine *watched;

static bool is_helper(void)
{
    return !pthread_equal(pthread_self(), stepping);
}

static bool is_staged(const void *p)
{
    const char *stage = watched->stage.small;

    return (const char *)p >= stage && (const char *)p < stage + 2 * CHUNK;
}

/* Guests wait from here on: nobody else may be where the engine will be. */
static void guests_wait(void)
{
    g_assert(!is_helper());
    g_assert(!__atomic_load_n(&in_memory, __ATOMIC_SEQ_CST));
    waits++;
}

static bool half_fails(void)
{
    unsigned left = __atomic_load_n(&fails_half, __ATOMIC_SEQ_CST);

    while (left && !__atomic_compare_exchange_n(&fails_half, &left, left - 1,
                                                false, __ATOMIC_SEQ_CST,
                                                __ATOMIC_SEQ_CST)) {
        continue;
    }
    return left;
}

static int w_advise(void *addr, size_t len, int advice)
{
    bool half;
    int ret;

    if (advice == MADV_COLD) {
        guests_wait();
    }
    half = advice == MADV_DONTNEED && len < watched->stage.emptying.len;
    if (!is_helper()) {
        if (half && is_staged(addr)) {
            __atomic_add_fetch(&halves, 1, __ATOMIC_SEQ_CST);
        }
        return prim_real.advise(addr, len, advice);
    }
    g_assert(is_staged(addr) && (advice == MADV_DONTNEED || renews));
    if (advice != MADV_DONTNEED) {
        return prim_real.advise(addr, len, advice);
    }
    __atomic_add_fetch(&in_memory, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&emptied, 1, __ATOMIC_SEQ_CST);
    g_usleep(3000);
    /* a while: nobody may wait for this one; of many one takes the other */
    for (unsigned i = 0; half && watched->crew.n == 1 && i < 100 &&
         !__atomic_load_n(&halves, __ATOMIC_SEQ_CST); i++) {
        g_usleep(10000);
    }
    if (half && half_fails()) {
        __atomic_sub_fetch(&in_memory, 1, __ATOMIC_SEQ_CST);
        return -ENOMEM;
    }
    ret = prim_real.advise(addr, len, advice);
    __atomic_sub_fetch(&in_memory, 1, __ATOMIC_SEQ_CST);
    return ret;
}

static int w_allocate(int fd, off_t offset, off_t len)
{
    int ret;

    if (!is_helper()) {
        return prim_real.allocate(fd, offset, len);
    }
    __atomic_add_fetch(&in_file, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&allocated, 1, __ATOMIC_SEQ_CST);
    g_usleep(3000);
    ret = prim_real.allocate(fd, offset, len);
    __atomic_sub_fetch(&in_file, 1, __ATOMIC_SEQ_CST);
    return ret;
}

static int w_register(const UffdRange *range, unsigned mode)
{
    if (!is_staged(range->addr) && (mode & UFFD_MISSING)) {
        guests_wait();
        begins = true;
    }
    if (range->fd == watched->uffd_wp) {
        /* writers are about to be held up */
        g_assert(!__atomic_load_n(&in_memory, __ATOMIC_SEQ_CST));
        g_assert(!__atomic_load_n(&in_file, __ATOMIC_SEQ_CST));
    }
    return prim_real.uffd_register(range, mode);
}

/* Nothing is in the way there, whoever was to see to that. */
static void is_empty(const char *at, size_t len)
{
    g_autofree uint64_t *entry = g_malloc(len / PAGE * sizeof(*entry));

    g_assert(kinds_read((KsmKinds *)&watched->kinds, at, len / PAGE,
                        entry) == 0);
    for (size_t i = 0; i < len / PAGE; i++) {
        g_assert(!(entry[i] >> 62));
    }
}

static int w_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    guests_wait();
    if (is_staged(to) && begins) {
        is_empty(to, len);
        begins = false;
    }
    return prim_real.uffd_move(fd, to, from, len, done);
}

static int w_protect(const UffdRange *range, bool on)
{
    if (on) {
        guests_wait();
        g_assert(!__atomic_load_n(&in_file, __ATOMIC_SEQ_CST));
    }
    return prim_real.uffd_protect(range, on);
}

static ssize_t w_write(int fd, const void *buf, size_t len, off_t offset)
{
    g_assert(!is_helper());
    g_assert(!__atomic_load_n(&in_file, __ATOMIC_SEQ_CST));
    return prim_real.write(fd, buf, len, offset);
}

static void watch(const KsmEngine *e)
{
    watched = e;
    stepping = pthread_self();
    emptied = allocated = waits = halves = fails_half = 0;
    renews = false;
    prim.advise = w_advise;
    prim.allocate = w_allocate;
    prim.uffd_register = w_register;
    prim.uffd_move = w_move;
    prim.uffd_protect = w_protect;
    prim.write = w_write;
}

static void unwatch(void)
{
    prim.advise = prim_real.advise;
    prim.allocate = prim_real.allocate;
    prim.uffd_register = prim_real.uffd_register;
    prim.uffd_move = prim_real.uffd_move;
    prim.uffd_protect = prim_real.uffd_protect;
    prim.write = prim_real.write;
}

/* What cannot be emptied is mapped anew, beside the other half. */
static void test_half_fails(gconstpointer data)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops, MEM_SMALL)) {
        return;
    }
    ksm_engine_set_threads(p.e, GPOINTER_TO_UINT(data));
    watch(p.e);
    fails_half = 4;
    renews = true;
    util_passes(p.e, 6);
    util_helped(&p.e->crew);
    unwatch();
    g_assert(!fails_half && (halves || watched->crew.n > 1));
    g_assert(util_stats(p.e).pages_sharing > 900);
    pair_end(&p);
}

/* Merging, breaking huge pages, restoring: slow helpers are waited for. */
static void test_waits(gconstpointer data)
{
    unsigned before;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops,
                    GPOINTER_TO_INT(data))) {
        return;
    }
    /* of one chunk only a part is equal, a pattern is among it */
    mem_fill_run(p.b, 600, 300, 1 << 20, 1);
    mem_fill_run(p.b, 100, 80, 7, 0);
    ksm_engine_set_threads(p.e, 2);
    watch(p.e);
    util_passes(p.e, 6);
    util_helped(&p.e->crew);
    g_assert(util_stats(p.e).pages_sharing > 600);
    g_assert(emptied && allocated && waits);
    g_assert(halves || GPOINTER_TO_INT(data) != MEM_SMALL);
    before = waits;
    g_assert(ksm_unmerge(p.ra, 0, p.a->pages * PAGE) == 0);
    g_assert(p.e->uffd_wp < 0 || waits > before);
    util_passes(p.e, 2);
    util_helped(&p.e->crew);
    unwatch();
    /* nothing is had for what nobody merges */
    g_assert(ahead_bytes(&store_local_pool(p.e->content.store)->ahead) == 0);
    pair_end(&p);
}

/* Of test_warm(): pages mapped from the pool, and those told of so. */
static size_t laid, warmed;
static unsigned soon;

static void *w_map(void *addr, size_t len, int prot, int flags, int fd,
                   off_t offset)
{
    laid += fd == store_local_pool(watched->content.store)->map_fd
            ? len / PAGE : 0;
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

/* The one before is warm: nobody is at its page tables. */
static int w_move_warm(int fd, void *to, void *from, size_t len, size_t *done)
{
    g_assert(laid == warmed);
    return w_move(fd, to, from, len, done);
}

/* Others' page tables come after ours, whoever made those. */
static void all_there(void *opaque, void *addr, size_t len)
{
    const Mem *m = opaque;
    size_t n = len / PAGE;

    g_assert(!is_helper());
    /* of the last span: helpers are at what was staged already */
    soon += !watched->stage.emptying.due;
    /* but for what somebody else had locked just then */
    g_assert(mem_present(m, ((char *)addr - m->addr) / PAGE, n) >= n - n / 4);
    warmed += n;
}

/* What is merged is in the page tables when that is told, span for span. */
static void test_warm(void)
{
    const KsmRegionOps ops = { .prefault = all_there };
    Pair p;

    laid = warmed = soon = 0;
    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &ops, MEM_SMALL)) {
        return;
    }
    mem_fill_run(p.b, 600, 300, 1 << 20, 1);
    mem_fill_run(p.b, 100, 80, 7, 0);
    ksm_engine_set_threads(p.e, 2);
    watch(p.e);
    prim.map = w_map;
    prim.uffd_move = w_move_warm;
    util_passes(p.e, 6);
    util_helped(&p.e->crew);
    prim.map = prim_real.map;
    unwatch();
    g_assert(warmed > 1200 && warmed == laid && soon);
    g_assert(warmed == p.ra->count[PAGE_MERGED] + p.rb->count[PAGE_MERGED]);
    pair_end(&p);
}

static int fails;

static int no_block(const UffdRange *range, unsigned mode)
{
    return range->fd == watched->uffd_wp && fails-- > 0
           ? -ENOMEM : w_register(range, mode);
}

/*
 * Who unmerges while a helper empties what was merged last waits for it before
 * writers are held up; and if they cannot be, helpers go on all the same.
 */
static void test_unmerge(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops,
                    MEM_SMALL)) {
        return;
    }
    ksm_engine_set_threads(p.e, 2);
    watch(p.e);
    while (!util_stats(p.e).merged) {
        ksm_step(p.e, 1);
    }
    g_usleep(1000);
    g_assert(ksm_unmerge(p.ra, 0, p.a->pages * PAGE) == 0);
    g_assert(ksm_unmerge(p.rb, 0, p.b->pages * PAGE) == 0);
    util_passes(p.e, 4);
    fails = 1;
    prim.uffd_register = no_block;
    g_assert(p.e->uffd_wp < 0 ||
             ksm_unmerge(p.ra, 0, p.a->pages * PAGE) == -ENOMEM);
    g_assert(!p.e->crew.pauses);
    util_helped(&p.e->crew);
    unwatch();
    pair_end(&p);
}

/* Pages, some of them holes, and what each goes by.  Has anybody helped? */
static bool tags_of(unsigned threads, uint32_t *tag, KsmStats *stats)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    Mem *m = mem_new(2048, 0, MEM_SMALL);
    KsmRegion *r;
    bool helped;

    for (unsigned i = 0; i < 2048; i++) {
        if (i % 7 && i % 512 >= i / 512 * 100) {
            mem_fill(m, i, i % 97 ? 1000 + i : 0);
        }
    }
    r = util_add(e, m, &mem_ops);
    ksm_engine_set_threads(e, threads);
    util_passes(e, 3);
    memcpy(tag, r->tag, 2048 * sizeof(*tag));
    *stats = util_stats(e);
    g_assert(e->crew.n == threads - 1);
    helped = crew_cpu_ns(&e->crew);
    util_end(e, r, m);
    return helped;
}

/* Each page is hashed once, whoever does it, and found by its own hash. */
static void test_hash(void)
{
    g_autofree uint32_t *alone = g_new0(uint32_t, 2048);
    g_autofree uint32_t *helped = g_new0(uint32_t, 2048);
    KsmStats a, h;

    if (!ksm_supported(NULL)) {
        g_test_skip("no engine here");
        return;
    }
    g_assert(!tags_of(1, alone, &a));
    /* on a busy host a helper may come too late, each time */
    for (unsigned i = 0, threads = 2; threads <= 5 && i < 40; i++) {
        threads += tags_of(threads, helped, &h) ? 3 : 0;
        g_assert(!memcmp(alone, helped, 2048 * sizeof(*alone)));
        g_assert(a.pages_scanned == h.pages_scanned);
        g_assert(a.pages_unshared == h.pages_unshared);
        g_assert(a.zero_pages == h.zero_pages);
    }
}

static unsigned refusals, warnings;

static void warning_seen(const char *domain, GLogLevelFlags level,
                         const char *text, void *opaque)
{
    g_assert(strstr(text, "cannot start 2 threads to help with merging: "));
    g_assert(g_str_has_suffix(text, "; it is done by one"));
    warnings++;
}

static int thread_refused(pthread_t *thread, void *(*run)(void *),
                          void *opaque)
{
    refusals++;
    return -EAGAIN;
}

/* It says so, once, and goes on alone; until it is told again. */
static void test_refused(void)
{
    GLogLevelFlags fatal;
    GLogFunc was;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops,
                    MEM_SMALL)) {
        return;
    }
    ksm_engine_set_threads(p.e, 3);
    fatal = g_log_set_always_fatal(G_LOG_LEVEL_ERROR | G_LOG_LEVEL_CRITICAL);
    was = g_log_set_default_handler(warning_seen, NULL);
    prim.thread = thread_refused;
    util_passes(p.e, 4);
    g_log_set_default_handler(was, NULL);
    g_log_set_always_fatal(fatal);
    g_assert(refusals == 1 && warnings == 1 && p.e->crew.n == 0);
    g_assert(engine_max_cpu(p.e) == 100);
    g_assert(util_stats(p.e).pages_sharing == PAIR_PAGES);
    prim.thread = prim_real.thread;
    ksm_engine_set_threads(p.e, 3);
    util_passes(p.e, 1);
    g_assert(p.e->crew.n == 2);
    ksm_engine_set_threads(p.e, 2);
    util_passes(p.e, 1);
    g_assert(p.e->crew.n == 1);
    ksm_engine_set_threads(p.e, 1);
    util_passes(p.e, 1);
    g_assert(p.e->crew.n == 0);
    pair_end(&p);
}

/* Nobody is started before there is something to merge. */
static void test_begins(void)
{
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);

    if (!e) {
        return;
    }
    ksm_engine_set_threads(e, 4);
    g_assert(ksm_step(e, 0) == -1);
    g_assert(e->crew.n == 0);
    ksm_engine_free(e);
}

#define HELPED_NS   UINT64_C(500000000)     /* for each chore */

static uint64_t cpu_of_helper;

static uint64_t fake_cpu(void)
{
    /* more than all that the test itself may take */
    return is_helper() ? __atomic_add_fetch(&cpu_of_helper, HELPED_NS,
                                            __ATOMIC_SEQ_CST)
                       : prim_real.cpu_ns();
}

/* What helpers use is the engine's: in its times, and against max_cpu. */
static void test_cpu(void)
{
    uint64_t cpu = prim_real.cpu_ns(), helped, step;
    KsmStats s;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops,
                    MEM_SMALL)) {
        return;
    }
    stepping = pthread_self();
    prim.cpu_ns = fake_cpu;
    ksm_engine_set_threads(p.e, 2);
    ksm_engine_set_max_cpu(p.e, 1);
    step = ksm_step(p.e, 1);
    for (unsigned i = 0; i < 1000 && !crew_cpu_ns(&p.e->crew); i++) {
        step = ksm_step(p.e, 1);
    }
    helped = crew_cpu_ns(&p.e->crew);
    g_assert(helped >= HELPED_NS);
    /* one percent: 100 times as long as that took, at least */
    g_assert(step >= 99 * HELPED_NS);
    ksm_engine_set_max_cpu(p.e, 200);
    util_passes(p.e, 4);
    util_helped(&p.e->crew);
    util_passes(p.e, 1);
    s = util_stats(p.e);
    helped = crew_cpu_ns(&p.e->crew);
    cpu = prim_real.cpu_ns() - cpu;
    g_assert(s.scan_time + s.merge_time >= helped);
    g_assert(s.scan_time + s.merge_time < helped + cpu);
    prim.cpu_ns = prim_real.cpu_ns;
    pair_end(&p);
}

/* A child has no helpers, and needs none to end. */
static void test_child(void)
{
    pid_t child;
    int status;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &mem_ops,
                    MEM_SMALL)) {
        return;
    }
    ksm_engine_set_threads(p.e, 3);
    util_passes(p.e, 2);
    child = fork();
    if (child == 0) {
        ksm_engine_set_threads(p.e, 2);
        _exit(ksm_step(p.e, 0) == -1 && p.e->crew.n == 0 ? 0 : 1);
    }
    g_assert(child > 0 && waitpid(child, &status, 0) == child);
    g_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    util_passes(p.e, 2);
    pair_end(&p);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_data_func("/helped/waits/small", GINT_TO_POINTER(MEM_SMALL),
                         test_waits);
    g_test_add_data_func("/helped/waits/huge", GINT_TO_POINTER(MEM_HUGE),
                         test_waits);
    g_test_add_data_func("/helped/half/fails/2", GUINT_TO_POINTER(2),
                         test_half_fails);
    g_test_add_data_func("/helped/half/fails/4", GUINT_TO_POINTER(4),
                         test_half_fails);
    g_test_add_func("/helped/warm", test_warm);
    g_test_add_func("/helped/unmerge", test_unmerge);
    g_test_add_func("/helped/hash", test_hash);
    g_test_add_func("/helped/refused", test_refused);
    g_test_add_func("/helped/begins", test_begins);
    g_test_add_func("/helped/cpu", test_cpu);
    g_test_add_func("/helped/child", test_child);
    return g_test_run();
}
