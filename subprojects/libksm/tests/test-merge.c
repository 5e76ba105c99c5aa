/*
 * libksm tests: a plan carried out, and what is merged then
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "merge/mapping.h"
#include "rooms.h"
#include "still.h"
#include "share/pool.h"

static void test_merge(gconstpointer data)
{
    KsmDirtySource dirty = GPOINTER_TO_INT(data);
    const KsmRegionOps *ops = dirty == KSM_DIRTY_LOG ? &mem_ops_log : NULL;
    Pair p;

    if (!pair_open(&p, dirty, ROOMS_SHARING, ops, MEM_SMALL)) {
        return;
    }
    rooms_passes(&p.f, 4);
    g_assert(rooms_shared(&p.f) == 1024 && rooms_sharing(&p.f) == 1024);
    g_assert(p.f.merged == 2048);
    g_assert(p.ra->runs + p.rb->runs <= 4);
    g_assert(mem_anonymous(p.a, 0, 1024) == 0);
    g_assert(mem_present(p.a, 0, 1024) >= 1024 - STILL_FEW);
    g_assert(mem_present(p.b, 0, 1024) >= 1024 - STILL_FEW);
    for (size_t i = 0; i < 1024; i++) {
        g_assert(p.ra->tag[i] == p.rb->tag[i]);
        g_assert(rooms_users(&p.f, p.ra->tag[i]) == 2);
    }
    /* writes are noticed, and nothing else changes */
    for (unsigned i = 0; i < 100; i++) {
        mem_write(p.b, i * 3, i, 1);
    }
    mem_check(p.a);
    rooms_passes(&p.f, 6);
    g_assert(p.f.broken == 100);
    g_assert(rooms_sharing(&p.f) == 1024 - 100);
    pair_close(&p);
}

/* Pages written just before they are taken. */
static Mem *late;
static unsigned late_step;      /* each of them, or every so many */

static int late_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    Mem *m = late;

    if (m && (char *)from >= m->addr &&
        (char *)from < m->addr + m->pages * PAGE_BYTES) {
        size_t page = ((char *)from - m->addr) / PAGE_BYTES;

        late = NULL;
        for (size_t i = 0; i < len / PAGE_BYTES; i += late_step) {
            mem_write(m, page + i, i, 0x5a);
        }
    }
    return prim_real.uffd_move(fd, to, from, len, done);
}

/*
 * A hash decides nothing: pages changed since stay as they are, be they to map
 * a slot (@first: of the area copied last) or to fill it.
 */
static void verify_late(KsmDirtySource dirty, bool first, unsigned step)
{
    uint64_t failed;
    KsmRegion *rc;
    Mem *c;
    Pair p;

    if (!pair_open(&p, dirty, ROOMS_SHARING, NULL, MEM_SMALL)) {
        return;
    }
    for (unsigned i = 100; i < 200; i++) {
        mem_fill(p.b, i, 0);
    }
    late = first ? p.a : p.b;
    late_step = step;
    prim.uffd_move = late_move;
    rooms_passes(&p.f, 4);
    prim.uffd_move = prim_real.uffd_move;
    g_assert(!late);
    mem_check(p.a);
    mem_check(p.b);
    g_assert(p.f.merge.verify_failed > 0);
    rooms_passes(&p.f, 8);
    g_assert(rooms_sharing(&p.f) >= 1024 - 100 - 512 / step - 1);
    /* a slot with another content than its hash is not taken again */
    failed = p.f.merge.verify_failed;
    rooms_passes(&p.f, 8);
    g_assert(p.f.merge.verify_failed == failed);
    /* pages equal to those it was compared with still find them */
    c = mem_new(1024, 0, MEM_SMALL);
    mem_fill_run(c, 0, 1024, 1, 1);
    rc = rooms_add(&p.f, c, NULL);
    rooms_passes(&p.f, 8);
    g_assert(rc->count[PAGE_MERGED] >= 1024 - STILL_FEW);
    mem_check(c);
    rooms_remove(&p.f, rc);
    mem_free(c);
    pair_close(&p);
}

static void test_verify(gconstpointer data)
{
    for (unsigned step = 1; step <= 5; step += 4) {
        verify_late(GPOINTER_TO_INT(data), false, step);
        verify_late(GPOINTER_TO_INT(data), true, step);
    }
}

/* Somebody reads the staging areas, once in so many moves. */
static Rooms *read_from;
static unsigned read_moves, read_every;

static void read_stages(const char *stage)
{
    for (size_t i = 0; i < 2 * CHUNK_BYTES; i += PAGE_BYTES) {
        /* volatile: so that the kernel maps zeroes */
        (void)*(const volatile char *)(stage + i);
    }
}

static int read_and_move(int fd, void *to, void *from, size_t len,
                         size_t *done)
{
    bool now = read_moves < 40 && read_moves++ % read_every == 0;
    int ret;

    if (now) {
        read_stages(read_from->stage.small);
    }
    ret = prim_real.uffd_move(fd, to, from, len, done);
    if (now) {
        read_stages(read_from->stage.small);
    }
    return ret;
}

/*
 * A debugger, process_vm_readv() or mlockall() populates the staging areas:
 * those zeroes are nobody's memory.
 */
static void test_stage_read(gconstpointer data)
{
    Pair p;

    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING,
                   NULL, GPOINTER_TO_INT(data))) {
        return;
    }
    if (!p.f.wp_async) {
        g_test_skip("the staging area is registered for missing pages: who "
                    "reads it waits (UFFD_FEATURE_WP_ASYNC is Linux 6.7)");
        pair_close(&p);
        return;
    }
    read_from = &p.f;
    for (read_every = 1; read_every < 4; read_every++) {
        read_moves = 0;
        prim.uffd_move = read_and_move;
        for (unsigned i = 0; i < 8; i++) {
            /* some to keep, some that are gone */
            mem_write(p.a, 100 + i, 7, 1);
            mem_fill(p.b, 700 + 2 * i, 0);
            rooms_discard(&p.f, p.rb, 300 + 2 * i, 1);
            mem_gone(p.b, 300 + 2 * i, 1);
            rooms_passes(&p.f, 2);
            mem_check(p.a);
            mem_check(p.b);
        }
        g_assert(read_moves);
        prim.uffd_move = prim_real.uffd_move;
        rooms_passes(&p.f, 12);
        mem_check(p.a);
        mem_check(p.b);
        g_assert(rooms_sharing(&p.f) > 900);
        g_assert(rooms_unmerge(&p.f, p.ra, 0, 1024) == 0);
        g_assert(rooms_unmerge(&p.f, p.rb, 0, 1024) == 0);
    }
    pair_close(&p);
}

#define PINNED 205

static Mem *pinned;
static unsigned pinned_met;

/* One page cannot be moved the first time. */
static int pinned_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    char *pin = pinned->addr + PINNED * PAGE_BYTES;
    int ret;

    if (pinned_met < 2 && pin >= (char *)from && pin < (char *)from + len) {
        pinned_met++;
        if (pin == from) {
            *done = 0;
            return -EBUSY;
        }
        ret = prim_real.uffd_move(fd, to, from, pin - (char *)from, done);
        return ret < 0 ? ret : -EBUSY;
    }
    return prim_real.uffd_move(fd, to, from, len, done);
}

/*
 * The same 100 pages three times in a chunk: those at 400 map slots that those
 * at 200 fill.  If one of these is pinned its slot stays empty, and the page
 * that was to map it is kept.
 */
static void test_pinned_fill(void)
{
    Rooms f;
    KsmRegion *r;
    Mem *m;

    if (!rooms_open(&f, KSM_DIRTY_PAGEMAP, ROOMS_SHARING)) {
        return;
    }
    m = pinned = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 512, 1000, 1);
    for (unsigned i = 0; i < 512; i += 200) {
        mem_fill_run(m, i, 100, 1, 1);
    }
    pinned_met = 0;
    prim.uffd_move = pinned_move;
    r = rooms_add(&f, m, NULL);
    for (unsigned i = 0; i < 8 && pinned_met < 2; i++) {
        rooms_passes(&f, 1);
    }
    g_assert(pinned_met == 2);
    mem_check(m);
    /* one page of a content stays, not the pinned one */
    g_assert(mem_anonymous(m, PINNED, 1) == 1);
    g_assert(mem_anonymous(m, 401 + PINNED - 200, 1) == 0);
    if (!rooms_remote(&f)) {
        /* a remote store filled its slots before */
        g_assert(mem_anonymous(m, 400 + PINNED - 200, 1) == 1);
        g_assert(f.merge.verify_failed == 1);
    }
    rooms_passes(&f, 12);
    prim.uffd_move = prim_real.uffd_move;
    mem_check(m);
    g_assert(rooms_sharing(&f) >= 2 * 99);
    rooms_check(&f, r);
    rooms_remove(&f, r);
    mem_check(m);
    rooms_close(&f);
    mem_free(m);
}

static void test_huge(void)
{
    Pair p;

    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, NULL, MEM_HUGE)) {
        return;
    }
    rooms_passes(&p.f, 4);
    g_assert(rooms_sharing(&p.f) == 1024);
    pair_close(&p);
}

static int advise_but_cold(void *addr, size_t len, int advice)
{
    return advice == MADV_COLD ? -EINVAL : prim_real.advise(addr, len, advice);
}

/* Is it still one huge page? */
static bool is_huge(Rooms *f, char *addr)
{
    uint8_t kinds[CHUNK_PAGES];

    return kinds_ask(&f->kinds, addr, CHUNK_PAGES, KINDS_FAST, kinds) == 0 &&
           (kinds[0] & PM_HUGE);
}

/*
 * A huge page of which nothing was merged is put back, and stays huge.  (A
 * write would split it: so it only goes by another's hash.)  The kernel does not
 * break it, so it is moved whole.
 */
static void test_huge_back(void)
{
    KsmRegion *r;
    bool huge;
    Mem *m;
    Pair p;

    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, NULL, MEM_SMALL)) {
        return;
    }
    rooms_passes(&p.f, 4);
    g_assert(rooms_sharing(&p.f) >= 1024 - STILL_FEW);
    m = mem_new(512, 0, MEM_HUGE);
    mem_fill_run(m, 0, 512, 10001, 1);
    r = rooms_add(&p.f, m, NULL);
    rooms_passes(&p.f, 4);
    g_assert(r->count[PAGE_UNIQUE] == 512);
    huge = r->chunk[0].flags & CHUNK_HUGE;
    for (unsigned i = 0; i < 200; i++) {
        const char *page = p.a->addr + i * PAGE_BYTES;

        rooms_mistake(&p.f, r, i, content_tag(r, hash_page(&p.f.hasher, page)));
    }
    prim.advise = advise_but_cold;
    rooms_passes(&p.f, 4);
    prim.advise = prim_real.advise;
    g_assert(p.f.merge.verify_failed == 200);
    g_assert(!huge || is_huge(&p.f, m->addr));
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        /* ... if it could be had at all */
        g_assert(!huge || !p.f.merge.kept[i]);
    }
    mem_check(m);
    rooms_remove(&p.f, r);
    mem_free(m);
    pair_close(&p);
}

/* What was told of a region's memory: ranges in pages, "3-9 ". */
static struct {
    const Mem *m;
    bool away;              /* pages are */
    unsigned calls, moves;
    GString *text;
    bool owner[1024];       /* was told of the page */
    bool policy[1024];      /* it has the NUMA policy */
} told;

static void tell(const void *addr, size_t len)
{
    size_t page = ((const char *)addr - told.m->addr) / PAGE_BYTES;

    told.calls++;
    g_string_append_printf(told.text, "%zu-%zu ", page,
                           page + len / PAGE_BYTES);
}

static int advise_told(void *addr, size_t len, int advice)
{
    char *at = addr;

    if (advice == MADV_DONTFORK && at >= told.m->addr &&
        at < told.m->addr + told.m->pages * PAGE_BYTES) {
        /* nobody waits for this */
        g_assert(!told.away);
        tell(addr, len);
    }
    return prim_real.advise(addr, len, advice);
}

static void mapped_told(void *opaque, void *addr, size_t len)
{
    size_t page = ((char *)addr - told.m->addr) / PAGE_BYTES;

    g_assert(!told.away);
    told.calls++;
    memset(told.owner + page, true, len / PAGE_BYTES);
}

/* Who writes to the page next has a copy by that: it has it before. */
static int policy_told(void *addr, size_t len, int mode,
                       const unsigned long *mask, size_t bits)
{
    size_t page = ((char *)addr - told.m->addr) / PAGE_BYTES;

    g_assert(told.away && mode == 1);
    memset(told.policy + page, true, len / PAGE_BYTES);
    return 0;
}

static int move_told(int fd, void *to, void *from, size_t len, size_t *done)
{
    told.moves += !told.away;
    told.away = true;
    return prim_real.uffd_move(fd, to, from, len, done);
}

static int unregister_told(const UffdRange *range)
{
    told.away = false;
    return prim_real.uffd_unregister(range);
}

/* How much of it is kept from children, as /proc tells. */
static size_t home_bytes(const Mem *m)
{
    FILE *smaps = fopen("/proc/self/smaps", "r");
    g_autofree char *line = NULL;
    size_t len = 0, bytes = 0;
    uintptr_t from = 0, to = 0, a, b;

    while (getline(&line, &len, smaps) >= 0) {
        if (g_str_has_prefix(line, "VmFlags:")) {
            uintptr_t at = MAX(from, (uintptr_t)m->addr);
            uintptr_t end = MIN(to, (uintptr_t)m->addr +
                                m->pages * PAGE_BYTES);

            bytes += at < end && strstr(line, " dc") ? end - at : 0;
        } else if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR, &a, &b) == 2) {
            from = a;
            to = b;
        }
    }
    fclose(smaps);
    return bytes;
}

/* Is one page kept from children? */
static bool is_home(const char *page)
{
    Mem m = { .addr = (char *)page, .pages = 1 };

    return home_bytes(&m) == PAGE_BYTES;
}

/* The owner maps something else over a page that stays, amid those merged. */
static const Mem *over;

static void *map_over(void *addr, size_t len, int prot, int flags, int fd,
                      off_t offset)
{
    const Mem *m = over;

    if (m && fd >= 0 && addr == m->addr + 512 * PAGE_BYTES) {
        over = NULL;
        g_assert(mmap(m->addr + 514 * PAGE_BYTES, PAGE_BYTES,
                      PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
                 MAP_FAILED);
    }
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

static void warning_seen(const char *domain, GLogLevelFlags level,
                         const char *message, gpointer data)
{
    g_assert(strstr(message, "their owner"));
    ++*(unsigned *)data;
}

/* That mapping is not ours to change. */
static void test_attributes_over(void)
{
    unsigned warnings = 0;
    GLogLevelFlags fatal;
    KsmRegion *r;
    GLogFunc was;
    Rooms f;
    Mem *m;

    if (!rooms_open(&f, KSM_DIRTY_PAGEMAP, ROOMS_SHARING)) {
        return;
    }
    fatal = g_log_set_always_fatal(G_LOG_LEVEL_ERROR | G_LOG_LEVEL_CRITICAL);
    was = g_log_set_default_handler(warning_seen, &warnings);
    m = mem_new(1024, 0, MEM_SMALL);
    g_assert(madvise(m->addr, m->pages * PAGE_BYTES, MADV_DONTFORK) == 0);
    mem_fill_run(m, 0, 1024, 1, 1);
    mem_fill_run(m, 512, 2, 100, 1);
    mem_fill_run(m, 516, 100, 200, 1);
    r = rooms_add(&f, m, NULL);
    over = m;
    prim.map = map_over;
    rooms_passes(&f, 6);
    prim.map = prim_real.map;
    g_log_set_default_handler(was, NULL);
    g_log_set_always_fatal(fatal);
    g_assert(warnings == 1);
    g_assert(!over && page_state(r, 512) == PAGE_MERGED &&
             page_state(r, 516) == PAGE_MERGED);
    g_assert(is_home(m->addr + 512 * PAGE_BYTES));
    g_assert(!is_home(m->addr + 514 * PAGE_BYTES));
    g_assert(is_home(m->addr + 516 * PAGE_BYTES));
    mem_gone(m, 514, 1);
    mem_check(m);
    rooms_remove(&f, r);
    rooms_close(&f);
    mem_free(m);
}

static void attributes(KsmRegion *r, const bool *mapped, const bool *kept,
                       const char *ranges)
{
    g_string_truncate(told.text, 0);
    mapping_attributes(r, told.m->addr, mapped, kept, 20);
    g_assert(!strcmp(told.text->str, ranges));
}

/* Unregistering waits for others, by the clock. */
static uint64_t others_ns;

static uint64_t now_others(void)
{
    return prim_real.now_ns() + others_ns;
}

static int unregister_others(const UffdRange *range)
{
    others_ns += UINT64_C(10000000000);
    return prim_real.uffd_unregister(range);
}

/* Who touches zeroes that were given back waits for that, others do not. */
static void test_wake_zeroes(void)
{
    for (unsigned zeroes = 0; zeroes < 2; zeroes++) {
        uint64_t longest;
        KsmRegion *r;
        Rooms f;
        Mem *m;

        if (!rooms_open(&f, KSM_DIRTY_PAGEMAP, ROOMS_SHARING)) {
            return;
        }
        m = mem_new(1024, 0, MEM_SMALL);
        mem_fill_run(m, 0, 512, zeroes ? 0 : 1, !zeroes);
        mem_fill_run(m, 512, 512, zeroes ? 0 : 1, !zeroes);
        r = rooms_add(&f, m, NULL);
        prim.now_ns = now_others;
        prim.uffd_unregister = unregister_others;
        rooms_passes(&f, 4);
        prim.uffd_unregister = prim_real.uffd_unregister;
        longest = f.merge.stalls.max;
        g_assert(f.merged > 400);
        g_assert((longest >= UINT64_C(10000000000)) == zeroes);
        prim.now_ns = prim_real.now_ns;
        mem_check(m);
        rooms_remove(&f, r);
        rooms_close(&f);
        mem_free(m);
    }
}

/* Each page merged is kept from children, by a call or two for all of them. */
static void test_attributes(void)
{
    static const KsmRegionOps ops = { .mapped = mapped_told };
    bool mapped[20] = { false }, kept[20];
    KsmRegion *r;
    Rooms f;
    Mem *m;

    if (!rooms_open(&f, KSM_DIRTY_PAGEMAP, ROOMS_SHARING)) {
        return;
    }
    m = mem_new(1024, 0, MEM_SMALL);
    g_assert(madvise(m->addr, m->pages * PAGE_BYTES, MADV_DONTFORK) == 0);
    mem_fill_run(m, 0, 1024, 1, 1);
    for (unsigned i = 0; i < 400; i += 4) {
        /* mappings of a page, and pages between that stay */
        mem_fill(m, 512 + i, i + 1);
        mem_fill(m, 513 + i, i + 3);
    }
    r = rooms_add(&f, m, &ops);
    told.m = m;
    told.text = g_string_new(NULL);
    told.calls = 0;
    prim.advise = advise_told;
    prim.uffd_move = move_told;
    prim.uffd_unregister = unregister_told;
    prim.policy_set = policy_told;
    r->policy = 1;
    rooms_passes(&f, 6);
    r->policy = -1;
    prim.policy_set = prim_real.policy_set;
    prim.uffd_move = prim_real.uffd_move;
    prim.uffd_unregister = prim_real.uffd_unregister;
    g_assert(rooms_sharing(&f) >= 200 - STILL_FEW);
    g_assert(r->runs >= 150);
    g_assert(told.moves && told.calls <= 2 * f.merge.isolations);
    for (unsigned i = 0; i < m->pages; i++) {
        g_assert(page_state(r, i) != PAGE_MERGED ||
                 (told.owner[i] && told.policy[i]));
    }
    g_assert(home_bytes(m) == m->pages * PAGE_BYTES);
    mem_check(m);
    mapped[3] = mapped[4] = mapped[5] = mapped[9] = mapped[19] = true;
    memset(kept, true, sizeof(kept));
    attributes(r, mapped, kept, "3-20 ");
    attributes(r, mapped, NULL, "3-6 9-10 19-20 ");
    kept[12] = false;
    attributes(r, mapped, kept, "3-10 19-20 ");
    kept[3] = kept[9] = kept[10] = kept[18] = false;
    attributes(r, mapped, kept, "3-10 19-20 ");
    kept[6] = false;
    attributes(r, mapped, kept, "3-6 9-10 19-20 ");
    /* ... or where the owner may have changed them */
    memset(kept, true, sizeof(kept));
    r->advice[r->n_advice++] = MADV_DONTDUMP;
    attributes(r, mapped, kept, "3-6 9-10 19-20 ");
    r->n_advice--;
    memset(mapped, false, sizeof(mapped));
    attributes(r, mapped, kept, "");
    prim.advise = prim_real.advise;
    g_string_free(told.text, true);
    rooms_remove(&f, r);
    rooms_close(&f);
    mem_free(m);
}

/* A huge page is not broken for less than split_min_pages. */
static void test_split_min(void)
{
    Rooms f;
    Mem *a, *b;
    KsmRegion *ra, *rb;

    if (!rooms_open(&f, KSM_DIRTY_PAGEMAP, ROOMS_SHARING)) {
        return;
    }
    a = mem_new(512, 0, MEM_HUGE);
    b = mem_new(512, 0, MEM_HUGE);
    mem_fill_run(a, 0, 512, 1, 1);
    mem_fill_run(b, 0, 512, 10001, 1);
    mem_fill_run(b, 0, 60, 1, 1);
    ra = rooms_add(&f, a, NULL);
    rb = rooms_add(&f, b, NULL);
    rooms_passes(&f, 8);
    g_assert(f.stage.huge_split == 0 && rooms_sharing(&f) == 0);
    g_assert(ra->count[PAGE_EQUAL] == 60 && rb->count[PAGE_EQUAL] == 60);
    mem_fill_run(b, 60, 60, 61, 1);
    rooms_passes(&f, 12);
    /* ... if huge pages could be had at all */
    g_assert(rooms_sharing(&f) == 120 || f.stage.huge_split == 0);
    mem_check(a);
    mem_check(b);
    rooms_remove(&f, ra);
    rooms_remove(&f, rb);
    rooms_close(&f);
    mem_free(a);
    mem_free(b);
}

static void test_pattern(void)
{
    Rooms f;
    KsmRegion *r;
    Mem *m;

    if (!rooms_open(&f, KSM_DIRTY_PAGEMAP, ROOMS_SHARING)) {
        return;
    }
    m = mem_new(8192, 0, MEM_SMALL);
    mem_fill_run(m, 0, 8192, 7, 0);
    r = rooms_add(&f, m, NULL);
    rooms_passes(&f, 6);
    g_assert(rooms_sharing(&f) + rooms_shared(&f) == 8192);
    g_assert(rooms_shared(&f) <= 2 * 8192 / PATTERN_USES);
    g_assert(r->runs <= 3 * PATTERN_USES);
    mem_check(m);
    rooms_remove(&f, r);
    rooms_close(&f);
    mem_free(m);
}

/* Discards pages just before they are taken. */
static Mem *emptied;
static unsigned n_emptied;

static int empty_and_move(int fd, void *to, void *from, size_t len,
                          size_t *done)
{
    Mem *m = emptied;
    size_t page = ((char *)from - m->addr) / PAGE_BYTES;

    for (size_t i = 0; (char *)from >= m->addr && page + i < m->pages &&
                       i < len / PAGE_BYTES; i += 8) {
        g_assert(madvise(m->addr + (page + i) * PAGE, PAGE,
                         MADV_DONTNEED) == 0);
        mem_gone(m, page + i, 1);
        n_emptied++;
    }
    return prim_real.uffd_move(fd, to, from, len, done);
}

/* Pages found to be holes become holes in the books, and stay so. */
static void test_hole(void)
{
    Pair p;

    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, NULL, MEM_SMALL)) {
        return;
    }
    emptied = p.a;
    n_emptied = 0;
    prim.uffd_move = empty_and_move;
    for (unsigned i = 0; i < 4 && !n_emptied; i++) {
        rooms_passes(&p.f, 1);
    }
    prim.uffd_move = prim_real.uffd_move;
    g_assert(n_emptied > 0);
    g_assert(p.ra->count[PAGE_HOLE] == n_emptied);
    g_assert(p.ra->count[PAGE_HOLE] + p.ra->count[PAGE_MERGED] == 1024);
    g_assert(mem_present(p.a, 0, 1024) == 1024 - n_emptied);
    rooms_passes(&p.f, 6);
    g_assert(p.ra->count[PAGE_HOLE] == n_emptied);
    pair_close(&p);
}

/* Zeroes given back count as such whatever is merged around them. */
static void test_given_among(void)
{
    Pair p;

    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, NULL, MEM_SMALL)) {
        return;
    }
    for (unsigned i = 0; i < 1024; i += 8) {
        mem_fill_run(p.a, i, 4, 0, 0);
        mem_fill_run(p.a, i + 4, 4, 70000 + i, 1);
    }
    rooms_passes(&p.f, 6);
    g_assert(p.ra->count[PAGE_GIVEN] == 512);
    for (unsigned i = 0; i < 1024; i += 8) {
        mem_fill_run(p.a, i + 4, 4, 1 + i + 4, 1);
    }
    rooms_passes(&p.f, 8);
    g_assert(rooms_sharing(&p.f) == 512);
    g_assert(p.ra->count[PAGE_GIVEN] == 512);
    g_assert(mem_present(p.a, 0, 1024) == 512);
    pair_close(&p);
}

/*
 * Pages isolated among merged ones and put back are tracked as before: a write
 * to them is noticed.
 */
static void test_tracked(void)
{
    Pair p;

    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, NULL, MEM_SMALL)) {
        return;
    }
    for (unsigned i = 0; i < 1024; i += 16) {
        mem_fill_run(p.b, i + 12, 4, 50000 + i, 1);
    }
    for (unsigned i = 0; i < 18; i++) {
        if (i == 6) {
            g_assert(rooms_sharing(&p.f) == 1024 - 256);
            mem_fill_run(p.b, 0, 1024, 1, 1);
        }
        p.f.costs = costs_guess;
        rooms_passes(&p.f, 1);
    }
    g_assert(mem_anonymous(p.b, 0, 1024) < 1024);
    for (unsigned i = 0; i < 1024; i += 16) {
        g_assert(mem_anonymous(p.b, i + 12, 4) == 0);
    }
    pair_close(&p);
}

/*
 * A pattern is found though the index did not know its content when it was
 * made: the plan with the page in the index came to nothing.
 */
static void test_pattern_found(void)
{
    Rooms f;
    KsmRegion *r[2];
    Mem *m[2];

    if (!rooms_open(&f, KSM_DIRTY_PAGEMAP, ROOMS_SHARING)) {
        return;
    }
    for (unsigned i = 0; i < 2; i++) {
        m[i] = mem_new(512, 0, MEM_SMALL);
    }
    mem_fill_run(m[0], 0, 512, 7, 0);
    r[0] = rooms_add(&f, m[0], NULL);
    rooms_vma_reserve(&f, SIZE_MAX);
    rooms_passes(&f, 4);
    g_assert(r[0]->count[PAGE_EQUAL] == 512);
    /* a remote store is asked anew in each pass */
    g_assert(rooms_remote(&f) || !rooms_finds(&f, r[0]->tag[0]));
    rooms_vma_reserve(&f, 0);
    rooms_passes(&f, 12);
    g_assert(r[0]->count[PAGE_MERGED] == 512);
    /* one page at a time, each looked up */
    mem_fill_run(m[1], 0, 512, 1000, 1);
    for (unsigned i = 0; i < 512; i += 2) {
        mem_fill(m[1], i, 7);
    }
    r[1] = rooms_add(&f, m[1], NULL);
    rooms_passes(&f, 6);
    g_assert(r[1]->count[PAGE_MERGED] == 256);
    for (unsigned i = 0; i < 2; i++) {
        mem_check(m[i]);
        rooms_check(&f, r[i]);
        rooms_remove(&f, r[i]);
        mem_free(m[i]);
    }
    rooms_close(&f);
}

/*
 * If every slot has all the users it may have, a plan makes one more replica;
 * the rest waits.
 */
static void test_pattern_full(void)
{
    Rooms f;
    const unsigned users = 2, each = users * PATTERN_START;
    KsmRegion *r;
    Mem *m;

    if (!rooms_open(&f, KSM_DIRTY_PAGEMAP, users)) {
        return;
    }
    m = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 512, 7, 0);
    r = rooms_add(&f, m, NULL);
    for (unsigned i = 0; i < 8 && !r->count[PAGE_MERGED]; i++) {
        rooms_passes(&f, 1);
    }
    if (!rooms_remote(&f)) {
        /* else there were plans until it had answered */
        g_assert(r->count[PAGE_MERGED] == 2 * each);
        g_assert(rooms_patterns(&f) == 2);
        g_assert(rooms_sharing(&f) == 2 * each - 2 * PATTERN_START);
    }
    rooms_passes(&f, 12);
    g_assert(r->count[PAGE_MERGED] >= 3 * each);
    mem_check(m);
    rooms_check(&f, r);
    rooms_remove(&f, r);
    rooms_close(&f);
    mem_free(m);
}

/*
 * Unmeasured costs are not zero; costs measured too high return to the
 * defaults.
 */
static void test_doubt(void)
{
    Rooms f;
    uint64_t *cost[4], first[4];

    if (!rooms_open(&f, KSM_DIRTY_PAGEMAP, ROOMS_SHARING)) {
        return;
    }
    cost[0] = &f.costs.isolate_ns;
    cost[1] = &f.costs.map_ns;
    cost[2] = &f.costs.copy_ns;
    cost[3] = &f.costs.back_ns;
    g_assert(f.costs.move_ns > 0);
    for (unsigned i = 0; i < G_N_ELEMENTS(cost); i++) {
        first[i] = *cost[i];
        g_assert(first[i] > 0);
        *cost[i] *= 1001;
    }
    costs_doubt(&f.costs);
    for (unsigned i = 0; i < G_N_ELEMENTS(cost); i++) {
        g_assert(*cost[i] < 950 * first[i] && *cost[i] > 900 * first[i]);
    }
    for (unsigned i = 0; i < 500; i++) {
        costs_doubt(&f.costs);
    }
    for (unsigned i = 0; i < G_N_ELEMENTS(cost); i++) {
        g_assert(*cost[i] == first[i]);
    }
    rooms_close(&f);
}

/* The busy op: all goes back, and is merged later. */
static void test_busy(void)
{
    Pair p;

    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING,
                   &mem_ops, MEM_SMALL)) {
        return;
    }
    p.a->busy = p.b->busy = true;
    for (unsigned i = 0; i < 8 && !p.f.merge.busy; i++) {
        rooms_pass(&p.f);
    }
    g_assert(p.f.merge.busy > 0);
    g_assert(p.ra->count[PAGE_BUSY] + p.rb->count[PAGE_BUSY] > 0);
    rooms_passes(&p.f, 6);
    g_assert(rooms_sharing(&p.f) == 0);
    mem_check(p.a);
    p.a->busy = p.b->busy = false;
    rooms_passes(&p.f, 8);
    g_assert(rooms_sharing(&p.f) == 1024);
    /* written pages under a busy device cannot be given back */
    mem_write(p.a, 3, 3, 3);
    p.a->busy = true;
    g_assert(rooms_unmerge(&p.f, p.ra, 0, 1024) == -EBUSY);
    mem_check(p.a);
    p.a->busy = false;
    pair_close(&p);
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

/* A page is written, as the engine finds it. */
static void write_found(Pair *p, size_t page)
{
    mem_write(p->a, page, 5, 0x77);
    p->ra->history[page] = 0x35;
    rooms_break(&p->f, p->ra, page);
    g_assert(p->ra->history[page] == 0);
}

/* Ends of mappings stay known whatever is written in them. */
static void test_joined(void)
{
    static const unsigned broken[] = { 100, 101, 300, 302, 301, 0, 511, 512 };
    KsmRegion *r;
    unsigned runs;
    Pair p;

    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, NULL, MEM_SMALL)) {
        return;
    }
    rooms_passes(&p.f, 4);
    r = p.ra;
    rooms_discard(&p.f, r, 200, 1);
    mem_gone(p.a, 200, 1);
    runs = runs_of(r);
    for (unsigned i = 0; i < G_N_ELEMENTS(broken); i++) {
        write_found(&p, broken[i]);
        g_assert(r->count[PAGE_BROKEN] == i + 1);
        g_assert(r->chunk[broken[i] / 512].broken > 0);
        region_count_runs(r, 0);
        region_count_runs(r, 1);
        g_assert(runs_of(r) == runs);
        rooms_check(&p.f, r);
    }
    /* on either side of a gap */
    for (unsigned page = 199; page <= 201; page += 2) {
        write_found(&p, page);
        region_count_runs(r, 0);
        g_assert(runs_of(r) == runs);
    }
    g_assert(!region_joined(r, 0) && !region_joined(r, 201));
    g_assert(region_joined(r, 199) && region_joined(r, 202));
    g_assert(region_joined(r, 300) && region_joined(r, 303));
    page_again(r, 301, true);
    page_again(r, 301, true);
    page_again(r, 302, true);
    page_again(r, 302, false);
    g_assert(r->chunk[0].again == 1);
    rooms_check(&p.f, r);
    r->history[301] = 0x35;
    rooms_discard(&p.f, r, 301, 1);
    mem_gone(p.a, 301, 1);
    g_assert(r->chunk[0].again == 0 && r->history[301] == 0);
    g_assert(runs_of(r) == runs + 1);
    g_assert(!region_joined(r, 301) && !region_joined(r, 302));
    g_assert(region_joined(r, 300));
    pair_close(&p);
}

/* Pages of which the kernel has to note the next write. */
static int wp_scan(int pagemap, char *addr, size_t len, bool protect,
                   PmRange *found, size_t n)
{
    PmScan scan = {
        .fd = pagemap,
        .start = (uintptr_t)addr,
        .end = (uintptr_t)addr + len,
        .all = protect ? 0 : PM_WRITTEN | PM_PRESENT,
        .any = PM_PRESENT,
        .tell = PM_PRESENT,
        .protect = protect,
        .vec = found,
        .vec_len = n,
    };

    return still_pagemap(&scan);
}

static Rooms *wp_rooms;
static unsigned wp_kept;

/* As future kernels may move: write-protection stays. */
static int wp_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    size_t n = len / PAGE_BYTES;
    g_autofree PmRange *found = g_new0(PmRange, n);
    g_autofree bool *written = g_new0(bool, n);
    int got = wp_scan(wp_rooms->kinds.pagemap, from, len, false, found, n);
    int ret;

    for (int i = 0; i < got; i++) {
        for (uint64_t at = found[i].start; at < found[i].end; at += PAGE) {
            written[(at - (uintptr_t)from) / PAGE] = true;
        }
    }
    ret = prim_real.uffd_move(fd, to, from, len, done);
    for (size_t i = 0; got >= 0 && i < *done / PAGE; i++) {
        /* the kernel protects nothing unasked */
        wp_kept += !written[i] &&
                   wp_scan(wp_rooms->kinds.pagemap, (char *)to + i * PAGE,
                           PAGE, true, found, 1) >= 0;
    }
    return ret;
}

/*
 * A page that was moved is no longer write-protected, and thus counts as
 * written; later kernels may keep the protection.  Either way no write is
 * missed: the last one is what is merged.
 */
static void test_wp_kept(void)
{
    Pair p;

    if (!pair_open(&p, KSM_DIRTY_AUTO, ROOMS_SHARING,
                   &mem_ops, MEM_SMALL)) {
        return;
    }
    wp_rooms = &p.f;
    wp_kept = 0;
    if (!p.f.wp_async) {
        g_test_skip("UFFD_FEATURE_WP_ASYNC is Linux 6.7");
        pair_close(&p);
        return;
    }
    prim.uffd_move = wp_move;
    p.a->busy = p.b->busy = true;
    rooms_passes(&p.f, 6);
    g_assert(wp_kept > 0);
    mem_check(p.a);
    mem_check(p.b);
    mem_fill_run(p.b, 300, 100, 90000, 1);
    p.a->busy = p.b->busy = false;
    rooms_passes(&p.f, 10);
    g_assert(rooms_sharing(&p.f) == 1024 - 100);
    mem_check(p.b);
    mem_fill_run(p.b, 300, 100, 301, 1);
    for (unsigned i = 0; i < 40; i++) {
        rooms_passes(&p.f, 1);
    }
    mem_check(p.b);
    g_assert(rooms_sharing(&p.f) == 1024);
    prim.uffd_move = prim_real.uffd_move;
    pair_close(&p);
}

/* Slots whose memory fails. */
static uint32_t bad_slot[64];
static unsigned n_bad;

/* As with failed memory, reading the page in the view gives a signal. */
static void slot_fails(Rooms *f, uint32_t slot)
{
    char *page = rooms_slot(f, slot);

    g_assert(mprotect(page, PAGE, PROT_NONE) == 0);
    g_assert(madvise(page, PAGE, MADV_DONTNEED) == 0);
    bad_slot[n_bad++] = slot;
}

#define BAD_AT  10u
#define BAD_N   5u
#define SAME_AT 600u    /* pages with one content, from there on */
#define SAME_N  (1024 - SAME_AT)

/* Nobody reads it, nobody more maps it; all the rest goes on. */
static void test_slot_fails(void)
{
    KsmRegion *r;
    Pair p;
    Mem *m;

    n_bad = 0;
    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING,
                   &mem_ops, MEM_SMALL)) {
        return;
    }
    mem_fill_run(p.b, SAME_AT, SAME_N, 77777, 0);
    rooms_passes(&p.f, 4);
    g_assert(rooms_sharing(&p.f) > SAME_AT);
    for (unsigned i = 0; i < BAD_N; i++) {
        slot_fails(&p.f, p.rb->tag[BAD_AT + i]);
    }
    slot_fails(&p.f, rooms_pattern(&p.f, p.rb->tag[SAME_AT + 1]));
    m = mem_new(1024, 0, MEM_SMALL);
    mem_fill_run(m, 0, SAME_AT, 1, 1);
    mem_fill_run(m, SAME_AT, SAME_N, 77777, 0);
    r = rooms_add(&p.f, m, NULL);
    rooms_passes(&p.f, 12);
    mem_check(m);
    g_assert(mem_anonymous(m, 0, SAME_AT) == BAD_N);
    for (unsigned i = 0; i < BAD_N; i++) {
        /* nobody finds it any more */
        g_assert(!rooms_finds_slot(&p.f, r->tag[BAD_AT + i], bad_slot[i]));
    }
    for (unsigned i = 0; i < 1024; i++) {
        for (unsigned k = 0; k < n_bad; k++) {
            g_assert(page_state(r, i) != PAGE_MERGED ||
                     r->tag[i] != bad_slot[k]);
        }
    }
    /* merging goes on: that content has another copy */
    g_assert(mem_anonymous(m, SAME_AT, SAME_N) < SAME_N / 2);
    rooms_remove(&p.f, r);
    mem_check(m);
    mem_free(m);
    pair_close(&p);
}

/* A clock by which nothing is dear but to look what was moved. */
static uint64_t paid_ns;

static uint64_t cpu_paid(void)
{
    return paid_ns;
}

static ssize_t pagemap_paid(PmScan *scan)
{
    paid_ns += 50000000;
    return prim_real.pagemap(scan);
}

/* What a run costs is not what comparing, and all before, did. */
static void test_map_cost(void)
{
    Pair p;

    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, NULL, MEM_SMALL)) {
        return;
    }
    prim.cpu_ns = cpu_paid;
    prim.pagemap = pagemap_paid;
    rooms_passes(&p.f, 4);
    prim.cpu_ns = prim_real.cpu_ns;
    prim.pagemap = prim_real.pagemap;
    g_assert(p.f.merge.isolations > 0);
    g_assert(p.f.costs.map_ns < costs_guess.map_ns);
    pair_close(&p);
}

/* The pool's pages cannot be read, so often. */
static struct {
    unsigned fails, moves;
} looked;

static int advise_looked(void *addr, size_t len, int advice)
{
    if (advice == MADV_POPULATE_READ && looked.fails) {
        looked.fails--;
        return -ENOMEM;
    }
    return prim_real.advise(addr, len, advice);
}

static int move_looked(int fd, void *to, void *from, size_t len, size_t *done)
{
    looked.moves++;
    g_assert(!looked.fails);
    return prim_real.uffd_move(fd, to, from, len, done);
}

/* Nobody waits for that: nothing is isolated, or thought unequal. */
static void test_slot_looks(void)
{
    KsmRegion *r;
    Pair p;
    Mem *m;

    if (!pair_open(&p, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, NULL, MEM_SMALL)) {
        return;
    }
    rooms_passes(&p.f, 4);
    g_assert(rooms_sharing(&p.f) == 1024);
    for (unsigned i = 0; i < 512; i++) {
        g_assert(madvise(rooms_slot(&p.f, p.ra->tag[i]), PAGE,
                         MADV_DONTNEED) == 0);
    }
    m = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(m, 0, 512, 1, 1);
    looked.fails = 600;     /* the run, and each page of it; and some more */
    looked.moves = 0;
    prim.advise = advise_looked;
    prim.uffd_move = move_looked;
    r = rooms_add(&p.f, m, NULL);
    rooms_passes(&p.f, 20);
    prim.uffd_move = prim_real.uffd_move;
    prim.advise = prim_real.advise;
    g_assert(looked.moves > 0);
    g_assert(p.f.merge.verify_failed == 0);
    g_assert(r->count[PAGE_MERGED] == 512);
    rooms_remove(&p.f, r);
    mem_free(m);
    pair_close(&p);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_data_func("/merge/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_merge);
    g_test_add_data_func("/merge/log", GINT_TO_POINTER(KSM_DIRTY_LOG),
                         test_merge);
    g_test_add_data_func("/merge/checksum",
                         GINT_TO_POINTER(KSM_DIRTY_CHECKSUM), test_merge);
    g_test_add_data_func("/merge/verify/pagemap",
                         GINT_TO_POINTER(KSM_DIRTY_PAGEMAP), test_verify);
    g_test_add_data_func("/merge/verify/checksum",
                         GINT_TO_POINTER(KSM_DIRTY_CHECKSUM), test_verify);
    g_test_add_data_func("/merge/stage-read/small",
                         GINT_TO_POINTER(MEM_SMALL), test_stage_read);
    g_test_add_data_func("/merge/stage-read/huge",
                         GINT_TO_POINTER(MEM_HUGE), test_stage_read);
    g_test_add_func("/merge/pinned-fill", test_pinned_fill);
    g_test_add_func("/merge/map-cost", test_map_cost);
    g_test_add_func("/merge/slot-fails", test_slot_fails);
    g_test_add_func("/merge/slot-looks", test_slot_looks);
    g_test_add_func("/merge/huge", test_huge);
    g_test_add_func("/merge/huge/back", test_huge_back);
    g_test_add_func("/merge/tracked", test_tracked);
    g_test_add_func("/merge/hole", test_hole);
    g_test_add_func("/merge/given-among", test_given_among);
    g_test_add_func("/merge/wake-zeroes", test_wake_zeroes);
    g_test_add_func("/merge/attributes", test_attributes);
    g_test_add_func("/merge/attributes/over", test_attributes_over);
    g_test_add_func("/merge/doubt", test_doubt);
    g_test_add_func("/merge/busy", test_busy);
    g_test_add_func("/merge/wp-kept", test_wp_kept);
    g_test_add_func("/run/pattern", test_pattern);
    g_test_add_func("/run/pattern-found", test_pattern_found);
    g_test_add_func("/run/pattern-full", test_pattern_full);
    g_test_add_func("/run/split-min", test_split_min);
    g_test_add_func("/region/joined", test_joined);
    return g_test_run();
}
