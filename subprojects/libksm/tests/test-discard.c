/*
 * libksm tests: what the owner gives back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/prim.h"
#include "engine/discard.h"
#include "engine/state.h"
#include "house.h"
#include "still.h"
#include "stores.h"

static void test_discard(void)
{
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    g_assert(ksm_discard(p.ra, 100 * PAGE, 50 * PAGE) == 0);
    mem_gone(p.a, 100, 50);
    mem_check(p.a);
    /* from now on a discard gives the kernel's own zeroes */
    g_assert(madvise(p.a->addr + 100 * PAGE, 50 * PAGE, MADV_DONTNEED) == 0);
    mem_check(p.a);
    g_assert(ksm_discard(p.ra, 1, PAGE) == -EINVAL);
    g_assert(ksm_discard(p.ra, 1024 * PAGE, PAGE) == -EINVAL);
    g_assert(ksm_discard(p.ra, 0, 1025 * PAGE) == -EINVAL);
    pair_end(&p);
}

/* What was discarded, written, found quiet and written again is looked at. */
static void test_discard_tracked(void)
{
    KsmStats s;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    g_assert(p.ra->count[PAGE_MERGED] == PAIR_PAGES);
    /* all of a chunk: nothing else is isolated there, and so tracked anew */
    g_assert(ksm_discard(p.ra, 0, 512 * PAGE) == 0);
    mem_gone(p.a, 0, 512);
    mem_fill_run(p.a, 0, 512, 5000, 1);
    util_passes(p.e, 6);
    g_assert(p.ra->count[PAGE_UNIQUE] == 512);
    s = util_stats(p.e);
    util_passes(p.e, 4);
    g_assert(util_stats(p.e).pages_scanned == s.pages_scanned);
    mem_fill_run(p.a, 0, 512, 6000, 1);
    util_passes(p.e, 6);
    g_assert(util_stats(p.e).pages_scanned == s.pages_scanned + 512);
    pair_end(&p);
}

/* Pages that cost a fault when written. */
static size_t protected_pages(KsmEngine *e, const Mem *m, size_t n)
{
    PmRange found[64];
    PmScan scan = {
        .fd = e->kinds.pagemap,
        .start = (uintptr_t)m->addr,
        .end = (uintptr_t)m->addr + n * PAGE,
        .all = PM_PRESENT | PM_WRITTEN,
        .vec = found,
        .vec_len = G_N_ELEMENTS(found),
    };
    ssize_t got = prim.pagemap(&scan);

    for (ssize_t i = 0; i < got; i++) {
        n -= (found[i].end - found[i].start) / PAGE;
    }
    return n;
}

/*
 * A host without swap, where what is free long is given back, and memory is
 * never short: then it would be at once.
 */
static int open_calm(const char *path)
{
    return strstr(path, "pressure") || strstr(path, "memory.") ? -ENOENT
           : strcmp(path, "/proc/swaps") ? prim_real.open_read(path)
                                         : prim_real.memfd("swaps");
}

static KsmEngine *calm_engine(void)
{
    KsmEngine *e;

    prim.open_read = open_calm;
    e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    prim.open_read = prim_real.open_read;
    return e;
}

/* Two areas where memory is not short. */
static bool calm_pair(Pair *p, const KsmRegionOps *ops)
{
    bool started;

    prim.open_read = open_calm;
    started = pair_start(p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, ops, MEM_SMALL);
    prim.open_read = prim_real.open_read;
    return started;
}

static void test_hint(void)
{
    Pair p;
    KsmStats s;

    if (!calm_pair(&p, NULL)) {
        return;
    }
    mem_fill_run(p.a, 0, 512, 90001, 1);
    util_passes(p.e, 4);
    mem_fill_run(p.a, 0, 512, 90001, 1);
    g_assert(ksm_free_hint(p.ra, 0, 512 * PAGE) == 0);
    s = util_stats(p.e);
    g_assert(s.free_hinted == 512);
    g_assert(s.reasons[KSM_REASON_FREED] == 512);
    util_passes(p.e, 5);
    /* freed pages are not hashed again before a write */
    g_assert(util_stats(p.e).pages_scanned <= s.pages_scanned + STILL_FEW);
    /* nor does noticing that cost the writer: small pages */
    g_assert(protected_pages(p.e, p.a, 512) <= STILL_FEW);
    mem_fill_run(p.a, 0, 100, 1, 1);
    util_passes(p.e, 6);
    g_assert(util_stats(p.e).pages_scanned <= s.pages_scanned + STILL_FEW);
    ksm_freer_set_decay(p.e->freer, 0);
    util_passes(p.e, 6);
    g_assert(util_stats(p.e).pages_scanned >= s.pages_scanned + 100);
    g_assert(util_stats(p.e).pages_sharing >= 512 + 100 - STILL_FEW);
    /* reading them would find the old content or zeroes */
    mem_fill_run(p.a, 100, 412, 0, 0);
    pair_end(&p);
}

/*
 * Where what vanishes from the staging area is waited for, by us, nothing is
 * freed lazily.
 */
static void test_hint_blocking(void)
{
    Pair p;

    if (!calm_pair(&p, NULL)) {
        return;
    }
    mem_fill_run(p.a, 0, 512, 90001, 1);
    p.e->dirty.wp_async = false;
    g_assert(ksm_free_hint(p.ra, 0, 512 * PAGE) == 0);
    g_assert(mem_present(p.a, 0, 512) == 0);
    mem_gone(p.a, 0, 512);
    pair_end(&p);
}

static const Mem *whole;        /* its memory cannot be mapped anew */
static unsigned whole_maps, whole_fills;
static int fill_ret;

static uint64_t stopped;

static uint64_t stopped_now_ns(void)
{
    return stopped;
}

static bool is_whole(const void *addr)
{
    return (const char *)addr >= whole->addr &&
           (const char *)addr < whole->addr + whole->pages * PAGE;
}

static void *whole_map(void *addr, size_t len, int prot, int flags, int fd,
                       off_t offset)
{
    if (is_whole(addr)) {
        whole_maps++;
        return NULL;
    }
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

static int whole_advise(void *addr, size_t len, int advice)
{
    if (advice == MADV_POPULATE_WRITE && is_whole(addr)) {
        whole_fills++;
        if (fill_ret < 0) {
            return fill_ret;
        }
    }
    return prim_real.advise(addr, len, advice);
}

/*
 * Merged memory that cannot be mapped anew, or shall not be since mappings run
 * out: zeroes are written.  Where that fails, too, all is as it was.
 */
static void test_discard_in_place(gconstpointer data)
{
    bool no_vmas = GPOINTER_TO_INT(data);
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    g_assert(util_stats(p.e).pages_sharing == 1024);
    whole = p.a;
    whole_maps = whole_fills = 0;
    prim.map = whole_map;
    prim.advise = whole_advise;
    if (no_vmas) {
        g_assert(vmas_free(&p.e->vmas) > 256);
        p.e->vmas.max = p.e->vmas.used + p.e->vmas.since + 256;
        g_assert(p.e->vmas.max >= 256);
        p.e->vmas.counted = stopped = prim_real.now_ns();
        prim.now_ns = stopped_now_ns;
    }
    fill_ret = -ENOMEM;
    g_assert(ksm_discard(p.ra, 10 * PAGE, 20 * PAGE) == -ENOMEM);
    mem_check(p.a);
    fill_ret = 0;
    g_assert(ksm_discard(p.ra, 10 * PAGE, 20 * PAGE) == 0);
    mem_gone(p.a, 10, 20);
    mem_check(p.a);
    mem_check(p.b);
    g_assert(whole_fills == 2 && !whole_maps == no_vmas);
    g_assert(p.ra->count[PAGE_BROKEN] == 20);
    g_assert(util_stats(p.e).pages_sharing == 1024 - 20);
    /* what is not merged needs neither */
    g_assert(ksm_unmerge(p.rb, 0, 1024 * PAGE) == 0);
    whole = p.b;
    whole_maps = whole_fills = 0;
    g_assert(ksm_discard(p.rb, 10 * PAGE, 20 * PAGE) == 0);
    g_assert(whole_fills == 0 && whole_maps == 0);
    g_assert(p.rb->count[PAGE_HOLE] == 20);
    g_assert(mem_present(p.b, 10, 20) == 0);
    mem_gone(p.b, 10, 20);
    mem_check(p.b);
    still_calls();
    pair_end(&p);
}

/*
 * A page is mapped without access: its memory failed while it was staged, and
 * poison could not be put at its home.
 */
static struct {
    const Mem *m;
    char *page;             /* NULL: not yet */
    unsigned mapped;        /* calls of the op for it */
} bar;

static bool in_bar(const void *addr)
{
    return (const char *)addr >= bar.m->addr &&
           (const char *)addr < bar.m->addr + bar.m->pages * PAGE;
}

static int bar_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    int ret = prim_real.uffd_move(fd, to, from, len, done);

    if (!bar.page && in_bar(from) && *done > 20 * PAGE) {
        char *staged = (char *)to + 10 * PAGE;

        bar.page = (char *)from + 10 * PAGE;
        /* as when memory fails: the entry is a marker */
        g_assert(madvise(staged, PAGE, MADV_DONTNEED) == 0);
        g_assert(prim_real.uffd_poison(fd, staged, PAGE) == 0);
    }
    return ret;
}

static int bar_poison(int fd, void *addr, size_t len)
{
    return in_bar(addr) ? -ENOMEM : prim_real.uffd_poison(fd, addr, len);
}

static void bar_mapped(void *opaque, void *addr, size_t len)
{
    bar.mapped += addr == bar.page && len == PAGE;
}

static const KsmRegionOps bar_ops = { .mapped = bar_mapped };

static bool is_readable(const char *page)
{
    int fd[2];
    bool readable;

    g_assert(pipe(fd) == 0);
    readable = write(fd[1], page, 1) == 1;
    g_assert(readable || errno == EFAULT);
    close(fd[0]);
    close(fd[1]);
    return readable;
}

static void bar_silent(const char *domain, GLogLevelFlags level,
                       const char *text, gpointer data)
{
    g_assert(strstr(text, "memory they were in failed"));
}

/* Returns the page in p->b that nobody has access to. */
static size_t bar_page(Pair *p)
{
    GLogLevelFlags fatal = g_log_set_always_fatal(G_LOG_FATAL_MASK);
    GLogFunc was = g_log_set_default_handler(bar_silent, NULL);
    size_t page;

    memset(&bar, 0, sizeof(bar));
    bar.m = p->b;
    prim.uffd_move = bar_move;
    prim.uffd_poison = bar_poison;
    util_passes(p->e, 6);
    still_calls();
    g_log_set_default_handler(was, NULL);
    g_log_set_always_fatal(fatal);
    g_assert(bar.page && util_stats(p->e).poisoned == 1);
    page = (bar.page - p->b->addr) / PAGE;
    g_assert(page_state(p->rb, page) == PAGE_BARRED);
    return page;
}

static void bar_stays(Pair *p, size_t page)
{
    g_assert(page_state(p->rb, page) == PAGE_BARRED);
    g_assert(!is_readable(bar.page));
    g_assert(bar.mapped == 0);
}

/* It never reads as zeroes before its owner discards it, but does then. */
static void test_discard_barred(gconstpointer data)
{
    DiscardKind kind = GPOINTER_TO_UINT(data);
    int (*give)(KsmRegion *, size_t, size_t) =
        kind == DISCARD_HINT ? ksm_free_hint : ksm_discard;
    uint64_t scanned;
    size_t page;
    Pair p;

    if (!calm_pair(&p, &bar_ops)) {
        return;
    }
    page = bar_page(&p);
    util_passes(p.e, 6);
    bar_stays(&p, page);
    g_assert(ksm_unmerge(p.rb, page * PAGE, PAGE) == 0);
    bar_stays(&p, page);
    whole = p.b;
    prim.map = whole_map;
    g_assert(give(p.rb, page * PAGE, PAGE) == -ENOMEM);
    prim.map = prim_real.map;
    bar_stays(&p, page);
    page_chunk(p.rb, page)->flags &= ~CHUNK_VISIT;
    g_assert(give(p.rb, page * PAGE, PAGE) == 0);
    g_assert(page_state(p.rb, page) == PAGE_HOLE);
    g_assert(page_chunk(p.rb, page)->flags & CHUNK_VISIT);
    mem_gone(p.b, page, 1);
    mem_check(p.b);
    /* it has the region's attributes, and writes to it are seen */
    g_assert(bar.mapped == 1);
    for (unsigned i = 0; i < 3; i++) {
        mem_fill_run(p.b, page, 1, 4711 + i, 1);
        scanned = util_stats(p.e).pages_scanned;
        util_passes(p.e, 6);
        g_assert(page_state(p.rb, page) == PAGE_UNIQUE);
        g_assert(util_stats(p.e).pages_scanned > scanned);
    }
    pair_end(&p);
}

/* It is not even tried to move it. */
static int move_apart(int fd, void *to, void *from, size_t len, size_t *done)
{
    g_assert((char *)from + len <= bar.page ||
             bar.page + PAGE <= (char *)from);
    return prim_real.uffd_move(fd, to, from, len, done);
}

/* While others around it are merged, and discarded with it. */
static void test_barred_among(void)
{
    size_t page;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &bar_ops,
                    MEM_SMALL)) {
        return;
    }
    page = bar_page(&p);
    g_assert(ksm_discard(p.rb, (page - 8) * PAGE, 8 * PAGE) == 0);
    g_assert(ksm_discard(p.rb, (page + 1) * PAGE, 200 * PAGE) == 0);
    mem_fill_run(p.b, page - 8, 8, page - 7, 1);
    mem_fill_run(p.b, page + 1, 200, page + 2, 1);
    prim.uffd_move = move_apart;
    util_passes(p.e, 8);
    prim.uffd_move = prim_real.uffd_move;
    g_assert(page_state(p.rb, page - 1) == PAGE_MERGED);
    g_assert(page_state(p.rb, page + 1) == PAGE_MERGED);
    bar_stays(&p, page);
    g_assert(ksm_unmerge(p.rb, (page - 5) * PAGE, 10 * PAGE) == 0);
    g_assert(ksm_discard(p.rb, (page - 5) * PAGE, 10 * PAGE) == 0);
    mem_gone(p.b, page - 5, 10);
    mem_check(p.b);
    pair_end(&p);
}

/* Its owner has mapped something there, and writes: that is seen. */
static void test_barred_over(gconstpointer data)
{
    KsmDirtySource dirty = GPOINTER_TO_UINT(data);
    size_t page;
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, dirty,
                    dirty == KSM_DIRTY_LOG ? &mem_ops_log : NULL, MEM_SMALL)) {
        return;
    }
    page = bar_page(&p);
    g_assert(mmap(bar.page, PAGE, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
             bar.page);
    mem_fill_run(p.b, page, 1, 4711, 1);
    util_passes(p.e, 6);
    g_assert(page_state(p.rb, page) != PAGE_BARRED);
    pair_end(&p);
}

/* Mappings of the pool in a region; its books must agree. */
static unsigned runs_of(const KsmRegion *r)
{
    unsigned runs = 0;

    for (size_t i = 0; i < r->n_pages; i++) {
        runs += page_is_mapped(r, i) && !region_joined(r, i);
    }
    g_assert(r->runs == runs);
    return runs;
}

/* Discarded pages are mappings no more. */
static void test_discard_runs(void)
{
    static const unsigned ranges[][2] = {
        { 10, 30 }, { 500, 512 }, { 600, 601 }, { 400, 520 }, { 512, 1024 },
        { 0, 1024 },
    };
    Pair p;

    if (!pair_start(&p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, NULL, MEM_SMALL)) {
        return;
    }
    util_passes(p.e, 4);
    g_assert(runs_of(p.ra) + runs_of(p.rb) == util_stats(p.e).merged_runs);
    for (unsigned i = 0; i < G_N_ELEMENTS(ranges); i++) {
        unsigned first = ranges[i][0], n = ranges[i][1] - first;

        /* one is amid a mapping, whatever it was before */
        p.ra->chunk[0].flags = p.ra->chunk[1].flags = CHUNK_LIVE;
        g_assert(ksm_discard(p.ra, first * PAGE, n * PAGE) == 0);
        mem_gone(p.a, first, n);
        g_assert(i == 5 || runs_of(p.ra) >= 1 + (i < 4));
        /* somebody looks at what comes */
        for (unsigned k = 0; k < 2; k++) {
            g_assert(!(p.ra->chunk[k].flags & CHUNK_VISIT) ==
                     !(first < (k + 1) * 512 && first + n > k * 512));
        }
    }
    g_assert(runs_of(p.ra) == 0 && p.ra->count[PAGE_HOLE] == 1024);
    mem_check(p.a);
    g_assert(runs_of(p.rb) == util_stats(p.e).merged_runs);
    pair_end(&p);
}

static char paged_out[512];

static int note_pageout(void *addr, size_t len, int advice)
{
    if (advice == MADV_PAGEOUT) {
        size_t page = ((char *)addr - whole->addr) / PAGE;

        g_assert(page + len / PAGE <= sizeof(paged_out));
        memset(paged_out + page, 1, len / PAGE);
    }
    return prim_real.advise(addr, len, advice);
}

/*
 * Of a chunk that is mostly freed only freed pages go; the others stay known.
 */
static void test_settle(void)
{
    KsmEngine *e = calm_engine();
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 512, 1, 1);
    r = util_add(e, m, &mem_ops);
    util_passes(e, 4);
    g_assert(ksm_free_hint(r, 100 * PAGE, 10 * PAGE) == 0);
    g_assert(ksm_free_hint(r, 120 * PAGE, 1 * PAGE) == 0);
    g_assert(ksm_free_hint(r, 130 * PAGE, 2 * PAGE) == 0);
    /* the owner has it again */
    mem_fill_run(m, 100, 3, 7000, 1);
    g_assert(page_state(r, 115) == PAGE_UNIQUE);
    r->history[115] = 0x35;
    whole = m;
    memset(paged_out, 0, sizeof(paged_out));
    prim.advise = note_pageout;
    ksm_freer_set_decay(e->freer, 0);
    /* not while the region is inhibited; not forgotten either */
    m->inhibited = "for the test";
    g_assert(!discard_settle(e));
    g_assert(freer_wait(e->freer) == 0 && r->chunk[0].flags & CHUNK_BLIND);
    /* nor does a step go on for it, for ever */
    ksm_step(e, 1000000000);
    m->inhibited = NULL;
    g_assert(discard_settle(e) && !discard_settle(e));
    prim.advise = prim_real.advise;
    for (unsigned i = 0; i < 512; i++) {
        bool freed = (i >= 100 && i < 110) || i == 120 ||
                     (i >= 130 && i < 132);

        g_assert(freed || !paged_out[i]);
        g_assert(freed || page_state(r, i) == PAGE_UNIQUE);
        g_assert(!freed || !(r->state[i] & PAGE_BLIND));
    }
    g_assert(paged_out[101] && paged_out[120] && paged_out[131]);
    /* it is there: so it was written */
    for (unsigned i = 100; i < 103; i++) {
        g_assert(page_state(r, i) == PAGE_NEW && r->state[i] & PAGE_WRITTEN);
    }
    g_assert(r->history[115] == 0x35);
    g_assert(!(r->chunk[0].flags & CHUNK_BLIND));
    g_assert(r->chunk[0].flags & CHUNK_VISIT);
    /* reading the others would find the old content or zeroes */
    mem_fill_run(m, 103, 7, 1, 0);
    mem_fill_run(m, 120, 1, 1, 0);
    mem_fill_run(m, 130, 2, 1, 0);
    region_check(r);
    mem_check(m);
    util_remove(r);
    ksm_engine_free(e);
    mem_free(m);
}

/* What of a hinted range is still there, and what is not. */
static void test_hint_counts(void)
{
    KsmEngine *e = calm_engine();
    KsmRegion *r;
    KsmStats s;
    Mem *m;

    if (!e) {
        return;
    }
    /* zeroes, nothing, something */
    m = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 100, 0, 0);
    mem_fill_run(m, 200, 312, 1, 1);
    r = util_add(e, m, NULL);
    util_passes(e, 4);
    g_assert(util_stats(e).zero_pages == 100);
    g_assert(ksm_free_hint(r, 0, 512 * PAGE) == 0);
    s = util_stats(e);
    g_assert(s.free_hinted == 512 && r->free_hinted == 512);
    g_assert(s.zero_pages == 100);
    g_assert(s.reasons[KSM_REASON_FREED] == 412);
    g_assert(s.lazy_free == 312 * PAGE);
    region_check(r);
    g_assert(ksm_free_hint(r, 0, 513 * PAGE) == -EINVAL);
    g_assert(util_stats(e).free_hinted == 512);
    mem_fill_run(m, 200, 312, 1, 1);
    util_remove(r);
    mem_check(m);
    ksm_engine_free(e);
    mem_free(m);
}

/* A freed huge page costs one fault: its next write is noticed. */
static void test_hint_huge(void)
{
    KsmEngine *e = calm_engine();
    KsmRegion *r;
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(1024, 0, MEM_HUGE);
    mem_fill_run(m, 0, 1024, 1, 1);
    r = util_add(e, m, NULL);
    util_passes(e, 4);
    if (!(r->chunk[0].flags & r->chunk[1].flags & CHUNK_HUGE)) {
        g_test_skip("huge pages cannot be had at present");
    } else {
        g_assert(ksm_free_hint(r, 0, 512 * PAGE) == 0);
        g_assert(!(r->chunk[0].flags & CHUNK_BLIND));
        g_assert(!(r->state[5] & PAGE_BLIND));
        g_assert(ksm_free_hint(r, 512 * PAGE, 511 * PAGE) == 0);
        g_assert(r->chunk[1].flags & CHUNK_BLIND);
        g_assert(r->state[517] & PAGE_BLIND);
        g_assert(r->count[PAGE_FREED] == 1023);
    }
    mem_fill_run(m, 0, 1024, 1, 1);
    util_remove(r);
    mem_check(m);
    ksm_engine_free(e);
    mem_free(m);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    stores_choose();
    g_test_add_func("/discard/range", test_discard);
    g_test_add_func("/discard/tracked", test_discard_tracked);
    g_test_add_func("/discard/hint", test_hint);
    g_test_add_func("/discard/hint/blocking", test_hint_blocking);
    g_test_add_data_func("/discard/in-place/no-map", GINT_TO_POINTER(false),
                         test_discard_in_place);
    g_test_add_data_func("/discard/in-place/no-vmas", GINT_TO_POINTER(true),
                         test_discard_in_place);
    g_test_add_func("/discard/runs", test_discard_runs);
    g_test_add_data_func("/discard/barred/discard",
                         GUINT_TO_POINTER(DISCARD_ZEROES), test_discard_barred);
    g_test_add_data_func("/discard/barred/hint",
                         GUINT_TO_POINTER(DISCARD_HINT), test_discard_barred);
    g_test_add_func("/discard/barred/among", test_barred_among);
    g_test_add_data_func("/discard/barred/over/pagemap",
                         GUINT_TO_POINTER(KSM_DIRTY_PAGEMAP),
                         test_barred_over);
    g_test_add_data_func("/discard/barred/over/log",
                         GUINT_TO_POINTER(KSM_DIRTY_LOG), test_barred_over);
    g_test_add_func("/discard/settle", test_settle);
    g_test_add_func("/discard/hint-counts", test_hint_counts);
    g_test_add_func("/discard/hint-huge", test_hint_huge);
    return g_test_run();
}
