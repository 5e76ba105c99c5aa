/*
 * libksm tests: merged memory becomes anonymous again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A device may come at any moment; it is asked about when its writes are
 * blocked, not before.  And nobody who wants the lock waits for it.
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/prim.h"
#include "fake-root.h"
#include "merge/kin.h"
#include "rooms.h"
#include "still.h"

#define PAGES   PAIR_PAGES
#define BROKEN  128u    /* pages of a chunk that are copied on write */

static struct {
    Rooms *f;
    Mem *m;
    KsmRegion *r;
    const char *inhibited;      /* from the next write-protection on */
    bool busy;                  /* ... and so is this */
    unsigned remaps, pauses;
    unsigned busy_pauses;       /* after so many pauses it is no longer busy */
    bool step;                  /* merging goes on in the pauses */
    void *copy;                 /* what was to be moved over merged memory */
    unsigned remaps_fail;       /* so many of them do */
    bool gap;                   /* ... when what was there is gone already */
    uint64_t turn;              /* of the lock, at the last remap */
    unsigned same_turn;         /* chunks done without giving it up between */
    pthread_t settler;
} h;

static bool lock_is_free(const Rooms *f)
{
    return f->lock.next == f->lock.serving;
}

static int h_protect(const UffdRange *range, bool on)
{
    int ret = prim_real.uffd_protect(range, on);

    if (on) {
        h.m->inhibited = h.inhibited;
        h.m->busy |= h.busy;
    }
    return ret;
}

static int h_remap(void *from, size_t len, void *to)
{
    h.remaps++;
    h.copy = from;
    h.same_turn += h.f->lock.next == h.turn;
    h.turn = h.f->lock.next;
    if (h.remaps_fail) {
        h.remaps_fail--;
        g_assert(!h.gap || munmap(to, len) == 0);
        return -ENOMEM;
    }
    return prim_real.remap(from, len, to);
}

/* Nobody sleeps with the lock: others can have it. */
static void h_pause(unsigned us)
{
    g_assert(lock_is_free(h.f));
    lock_take(&h.f->lock);
    lock_release(&h.f->lock);
    if (++h.pauses == h.busy_pauses) {
        h.m->busy = false;
    }
    for (unsigned i = 0; h.step && i < 30; i++) {
        uint64_t merged = h.r->count[PAGE_MERGED];

        rooms_pass(h.f);
        g_assert(h.r->count[PAGE_MERGED] <= merged);
    }
}

typedef Pair Scene;

/* Merged, then part of a rewritten with what other pages hold. */
static bool scene_start(Scene *s)
{
    if (!pair_open(s, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, &mem_ops, MEM_SMALL)) {
        return false;
    }
    if (s->f.uffd_wp < 0) {
        g_test_skip("no write-protection of shared memory by userfaultfd "
                    "(Linux 5.19): memory is not restored");
        pair_close(s);
        return false;
    }
    rooms_passes(&s->f, 4);
    g_assert(rooms_sharing(&s->f) >= PAGES - STILL_FEW);
    mem_fill_run(s->a, 100, BROKEN, 300, 1);
    memset(&h, 0, sizeof(h));
    h.f = &s->f;
    h.m = s->a;
    h.r = s->ra;
    prim.uffd_protect = h_protect;
    prim.remap = h_remap;
    prim.pause = h_pause;
    return true;
}

static void scene_end(Scene *s)
{
    still_calls();
    s->a->busy = s->b->busy = false;
    pair_close(s);
}

/*
 * A device comes just as scan is about to restore: copied pages stay where they
 * are, others need not; all do if it may pin for reading.
 */
static void test_scan(gconstpointer data)
{
    unsigned clean;
    size_t since;
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    h.busy = GPOINTER_TO_INT(data);
    h.inhibited = h.busy ? NULL : "a device";
    clean = h.busy ? 2 : 0;
    g_assert(rooms_restore(&s.f, s.ra, 100, BROKEN) == -EBUSY);
    g_assert(s.a->busy == h.busy && s.a->inhibited == h.inhibited);
    g_assert(h.remaps == 0);
    g_assert(mem_anonymous(s.a, 100, BROKEN) == BROKEN);
    g_assert(rooms_restore(&s.f, s.ra, 0, 512) == -EBUSY);
    g_assert(h.remaps == clean);
    g_assert(s.ra->count[PAGE_NEW] == (clean ? 512 - BROKEN : 0));
    mem_check(s.a);
    h.busy = s.a->busy = false;
    h.inhibited = s.a->inhibited = NULL;
    since = s.f.vmas.since;
    g_assert(rooms_restore(&s.f, s.ra, 0, 512) == 0);
    g_assert(h.remaps == clean + 1);
    /* what is around it may be mappings of their own now */
    g_assert(s.f.vmas.since == since + 2);
    g_assert(s.ra->count[PAGE_NEW] == 512);
    mem_check(s.a);
    scene_end(&s);
}

/* A device stays busy: the owner is told, and nobody else waits. */
static void test_unmerge_busy(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    s.a->busy = true;
    g_assert(rooms_unmerge(&s.f, s.ra, 0, PAGES) == -EBUSY);
    g_assert(h.pauses > 0 && h.pauses < 100);
    /* nothing a device may write was replaced, all the rest was */
    g_assert(s.ra->count[PAGE_MERGED] + s.ra->count[PAGE_BROKEN] == BROKEN);
    mem_check(s.a);
    scene_end(&s);
}

/* What is unmerged stays so, though merging goes on. */
static void test_unmerge_step(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    s.a->busy = true;
    h.busy_pauses = 5;
    h.step = true;
    g_assert(rooms_unmerge(&s.f, s.ra, 0, PAGES) == 0);
    g_assert(h.pauses == 5);
    g_assert(s.ra->count[PAGE_MERGED] + s.ra->count[PAGE_BROKEN] == 0);
    mem_check(s.a);
    prim.pause = prim_real.pause;
    for (unsigned i = 0; i < 20 && !s.ra->count[PAGE_MERGED]; i++) {
        rooms_passes(&s.f, 1);
    }
    g_assert(s.ra->count[PAGE_MERGED]);
    scene_end(&s);
}

/* Somebody is about to pin: what is not unmerged yet stays. */
static void h_pause_settles(unsigned us)
{
    h.f->restore.settles++;
    h.pauses++;
}

static void *h_settle(void *opaque)
{
    lock_take(&h.f->lock);
    h.f->restore.settles++;
    lock_release(&h.f->lock);
    return NULL;
}

/* Comes while the first chunk is replaced, and has the lock after it. */
static int h_remap_settles(void *from, size_t len, void *to)
{
    if (!h.remaps++) {
        g_assert(pthread_create(&h.settler, NULL, h_settle, NULL) == 0);
        util_awaited(&h.f->lock, 1);
    }
    return prim_real.remap(from, len, to);
}

static void test_unmerge_settles(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    /* while it waits for a device */
    s.a->busy = true;
    prim.pause = h_pause_settles;
    g_assert(rooms_unmerge(&s.f, s.ra, 0, PAGES) == -EBUSY);
    g_assert(h.pauses == 1);
    s.a->busy = false;
    /* between chunks */
    h.remaps = 0;
    prim.remap = h_remap_settles;
    g_assert(rooms_unmerge(&s.f, s.rb, 0, PAGES) == -EBUSY);
    g_assert(h.remaps == 1);
    g_assert(pthread_join(h.settler, NULL) == 0);
    scene_end(&s);
}

/* Owners unmerge under inhibition: that must not stop it. */
static void test_unmerge_inhibited(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    s.a->inhibited = h.inhibited = "run is off";
    g_assert(rooms_unmerge(&s.f, s.ra, 0, PAGES) == 0);
    g_assert(s.ra->count[PAGE_MERGED] + s.ra->count[PAGE_BROKEN] == 0);
    g_assert(mem_anonymous(s.a, 0, PAGES) == PAGES);
    scene_end(&s);
}

static void test_unmerge_turns(void)
{
    uint64_t turns;
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    turns = s.f.lock.next;
    g_assert(rooms_unmerge(&s.f, s.ra, 0, PAGES) == 0);
    g_assert(s.f.lock.next - turns >= PAGES * PAGE / CHUNK);
    g_assert(h.remaps == PAGES * PAGE / CHUNK && h.same_turn == 0);
    turns = s.f.lock.next;
    g_assert(rooms_unmerge(&s.f, s.rb, 0, PAGES) == 0);
    g_assert(s.f.lock.next - turns >= PAGES * PAGE / CHUNK);
    g_assert(h.remaps == 2 * PAGES * PAGE / CHUNK && h.same_turn == 0);
    scene_end(&s);
}

/* As when a page of the pool fails: mapped, and SIGBUS is what it gives. */
static void page_fails(Scene *s, size_t page)
{
    UffdRange range = { s->f.uffd_wp, s->a->addr + page * PAGE, PAGE };

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
static void test_unmerge_failed(gconstpointer data)
{
    const size_t bad = GPOINTER_TO_UINT(data);
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    page_fails(&s, bad);
    g_assert(!is_readable(s.a->addr + bad * PAGE));
    g_assert(rooms_unmerge(&s.f, s.ra, 0, PAGES) == 0);
    g_assert(s.ra->count[PAGE_MERGED] + s.ra->count[PAGE_BROKEN] == 0);
    g_assert(!is_readable(s.a->addr + bad * PAGE));
    g_assert(rooms_poisoned(&s.f) == 1);
    rooms_passes(&s.f, 6);
    g_assert(!is_readable(s.a->addr + bad * PAGE));
    rooms_discard(&s.f, s.ra, bad, 1);
    mem_gone(s.a, bad, 1);
    scene_end(&s);
}

/* Unmerging around a device's pages must not take all mappings. */
static void test_mappings(void)
{
    const size_t room = 300;
    size_t before, max;
    g_autofree char *text = NULL;
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    for (unsigned i = 0; i < PAGES; i += 2) {
        mem_write(s.a, i, 7, 7);
    }
    s.a->busy = true;
    g_assert(g_file_get_contents("/proc/sys/vm/max_map_count", &text, NULL,
                                 NULL));
    max = g_ascii_strtoull(text, NULL, 10);
    before = util_mappings();
    rooms_vma_reserve(&s.f, max - before - room);
    g_assert(rooms_unmerge(&s.f, s.ra, 0, PAGES) < 0);
    g_assert(util_mappings() <= before + room);
    mem_check(s.a);
    rooms_vma_reserve(&s.f, 0);
    scene_end(&s);
}

static bool is_mapped(void *page)
{
    unsigned char resident;

    return mincore(page, PAGE, &resident) == 0;
}

static void pause_not(unsigned us)
{
}

/*
 * The kernel does not move the copy home: all is as it was, writers go on, and
 * the copy is gone.
 */
static void test_remap_fails(gconstpointer data)
{
    const bool zeroes = GPOINTER_TO_INT(data);
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    if (zeroes) {
        mem_fill_run(s.a, 0, 512, 0, 0);
    }
    prim.pause = pause_not;
    h.remaps_fail = G_MAXUINT;
    g_assert(rooms_unmerge(&s.f, s.ra, 0, 512) == -ENOMEM);
    g_assert(h.remaps > 1 && !is_mapped(h.copy));
    g_assert(s.ra->count[PAGE_MERGED] + s.ra->count[PAGE_BROKEN] == PAGES);
    mem_check(s.a);
    mem_fill_run(s.a, 0, 512, 4000, 1);
    h.remaps_fail = 0;
    g_assert(rooms_unmerge(&s.f, s.ra, 0, 512) == 0);
    g_assert(s.ra->count[PAGE_MERGED] + s.ra->count[PAGE_BROKEN] == 512);
    scene_end(&s);
}

/* A remap fails halfway: the copy is all there is. */
static void test_remap_gap(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    prim.pause = pause_not;
    h.gap = true;
    h.remaps_fail = 20;
    g_assert(rooms_unmerge(&s.f, s.ra, 0, 512) == 0);
    g_assert(h.remaps == 21);
    g_assert(mem_anonymous(s.a, 0, 512) == 512);
    h.gap = false;
    scene_end(&s);
}

static uint64_t clock_stands(void)
{
    return UINT64_C(1000000000000);
}

#define ROOM_LEFT   256u    /* mappings that restoring around a device spares */

/*
 * Each page restored between two that stay takes two mappings: no more are
 * restored than there are mappings for.
 */
static void test_mappings_few(void)
{
    static const struct {
        size_t left, restored;
    } cases[] = {
        { ROOM_LEFT - 1, 0 }, { ROOM_LEFT, 1 }, { ROOM_LEFT + 1, 1 },
        { ROOM_LEFT + 2, 2 }, { ROOM_LEFT + 60, 31 },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        Scene s;

        if (!scene_start(&s)) {
            return;
        }
        for (unsigned k = 0; k < 512; k += 2) {
            mem_write(s.a, k, 7, 7);
        }
        s.a->busy = true;
        prim.now_ns = clock_stands;
        /* as if just counted */
        s.f.vmas = (KsmVmas) {
            .maps = s.f.vmas.maps, .percent = s.f.vmas.percent,
            .max = 10000, .limit = 10000, .used = 10000 - cases[i].left,
            .counted = clock_stands(),
        };
        g_assert(rooms_unmerge(&s.f, s.ra, 0, 512) == -ENOMEM);
        g_assert(s.ra->count[PAGE_MERGED] + s.ra->count[PAGE_BROKEN] ==
                 PAGES - cases[i].restored);
        g_assert(s.f.vmas.since == 2 * cases[i].restored);
        mem_check(s.a);
        scene_end(&s);
    }
}

static void *split_fails(void *from, size_t len)
{
    return NULL;
}

static void *lengthen_fails(void *from, size_t len, size_t want, void *at)
{
    return NULL;
}

static unsigned lengthened_at;  /* calls that said where to */

/* The last chunk of it is where a huge page may be. */
static void *lengthen_note(void *from, size_t len, size_t want, void *at)
{
    lengthened_at += !!at;
    g_assert(((uintptr_t)at + want) % CHUNK == 0);
    return prim_real.lengthen(from, len, want, at);
}

/* A mapping can be moved, but not cut: there are too many. */
static int unmap_fails(void *addr, size_t len)
{
    return addr == h.r->kin + PAGE ? -ENOMEM : prim_real.unmap(addr, len);
}

static int pageout_fails(void *addr, size_t len, int advice)
{
    return advice == MADV_PAGEOUT ? -EINVAL : prim_real.advise(addr, len, advice);
}

static bool is_populated(const char *page)
{
    uint8_t kind;

    g_assert(kinds_ask(&h.f->kinds, page, 1, KINDS_FAST, &kind) == 0);
    return kind_is_populated(kind);
}

#define PIECES  8u      /* that are restored, one after the other ... */
#define PIECE   40u     /* ... of so many pages */

/* Restored in pieces.  Returns how many mappings it is in then. */
static size_t pieces_restore(Scene *s)
{
    size_t before = mem_mappings(s->a);

    for (unsigned i = 0; i < PIECES; i++) {
        size_t at = 64 + i * PIECE;

        /* what is copied on write goes with it */
        mem_write(s->a, at + i, 7, 7);
        g_assert(rooms_restore(&s->f, s->ra, at, PIECE) == 0);
    }
    g_assert(mem_anonymous(s->a, 64, PIECES * PIECE) == PIECES * PIECE);
    mem_check(s->a);
    /* the mapping of the pool was cut in two */
    return mem_mappings(s->a) - before - 1;
}

/* What is restored becomes part of what was restored beside it. */
static void test_kin(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    g_assert(s.ra->kin && s.ra->kin_page < 64);
    g_assert(!is_populated(s.ra->kin));
    g_assert(pieces_restore(&s) == 1);
    g_assert(!is_populated(s.ra->kin));
    /* of zeroes, too */
    mem_fill_run(s.a, 64 + PIECES * PIECE, PIECE, 0, 0);
    g_assert(rooms_restore(&s.f, s.ra, 64 + PIECES * PIECE, PIECE) == 0);
    g_assert(rooms_restore(&s.f, s.ra, 64 + (PIECES + 1) * PIECE, PIECE) == 0);
    g_assert(mem_mappings(s.a) - s.ra->runs == 1);
    mem_check(s.a);
    scene_end(&s);
}

/* ... also where it is counted, as QEMU's is. */
static void test_kin_counted(void)
{
    const size_t pages = 1536;
    Rooms f;
    KsmRegion *r;
    Mem *m;

    if (!rooms_open(&f, KSM_DIRTY_PAGEMAP, ROOMS_SHARING)) {
        return;
    }
    m = mem_new(pages, 0, MEM_SMALL);
    if (f.uffd_wp < 0 ||
        mmap(m->addr, pages * PAGE, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
        g_test_skip("no write-protection of shared memory by userfaultfd "
                    "(Linux 5.19), or not so much memory to be had");
        rooms_close(&f);
        mem_free(m);
        return;
    }
    g_assert(madvise(m->addr, pages * PAGE, MADV_NOHUGEPAGE) == 0);
    mem_fill_run(m, 0, pages, 1, 1);
    mem_fill_run(m, 800, 200, 100, 1);
    r = rooms_add(&f, m, &mem_ops);
    rooms_passes(&f, 6);
    g_assert(r->kin && mem_mappings(m) == 1 + 2 * r->runs);
    for (size_t i = 800; i < 1000; i += PIECE) {
        g_assert(rooms_restore(&f, r, i, PIECE) == 0);
    }
    /* all, but the others of the two hundred */
    g_assert(mem_mappings(m) == 1 + 2 * r->runs);
    mem_check(m);
    rooms_remove(&f, r);
    rooms_close(&f);
    mem_free(m);
}

/* A whole chunk may become a huge page again. */
static void test_kin_huge(void)
{
    uint8_t kinds[512];
    Scene s;

    if (!pair_open(&s, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, &mem_ops, MEM_HUGE)) {
        return;
    }
    if (s.f.uffd_wp < 0 ||
        kinds_ask(&s.f.kinds, s.a->addr, 512, KINDS_FAST, kinds) < 0 ||
        !(kinds[0] & PM_HUGE)) {
        g_test_skip("no write-protection of shared memory by userfaultfd "
                    "(Linux 5.19), or no huge pages");
        pair_close(&s);
        return;
    }
    rooms_passes(&s.f, 4);
    g_assert(s.ra->kin && s.ra->kin_page < 512);
    lengthened_at = 0;
    prim.lengthen = lengthen_note;
    g_assert(rooms_restore(&s.f, s.ra, 512, 512) == 0);
    g_assert(kinds_ask(&s.f.kinds, s.a->addr + 512 * PAGE, 512, KINDS_FAST,
                       kinds) == 0);
    if (lengthened_at != 1 || !(kinds[0] & PM_HUGE)) {
        g_test_skip("the kernel was moving pages, or had no huge page left");
    }
    scene_end(&s);
}

/* Before kin's own page it is a mapping of its own, and so is that. */
static void test_kin_before(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    s.ra->kin_page = 512 + 64;
    g_assert(kin_wanted(s.ra, 0));
    s.ra->kin_page = 64 + 4 * PIECE;
    g_assert(pieces_restore(&s) == 6);
    /* what was restored without it may be taken for the region */
    s.ra->kin_page = 512 + 64;
    g_assert(!kin_wanted(s.ra, 0));
    scene_end(&s);
}

static int move_by_pages(int fd, void *to, void *from, size_t len,
                         size_t *done)
{
    *done = 0;
    return len > PAGE ? -EINVAL : prim_real.uffd_move(fd, to, from, len, done);
}

static int copy_finds_none(int fd, void *to, const void *from, size_t len,
                           size_t *done)
{
    *done = 0;
    return from == h.f->stage.unreadable
           ? -ENOENT : prim_real.uffd_copy(fd, to, from, len, done);
}

/* Nor is it taken of what may be all of a mapping, or not be the region's. */
static void test_kin_doubt(gconstpointer data)
{
    const bool pages = GPOINTER_TO_INT(data);
    Scene s;

    if (!pair_open(&s, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, &mem_ops,
                   MEM_SMALL)) {
        return;
    }
    h.f = &s.f;
    if (pages) {
        prim.uffd_move = move_by_pages;
    } else {
        prim.uffd_copy = copy_finds_none;
    }
    rooms_passes(&s.f, 4);
    g_assert(rooms_sharing(&s.f) >= PAGES - STILL_FEW);
    g_assert(!s.ra->kin && !s.rb->kin);
    scene_end(&s);
}

/* It is not tried for ever. */
static void test_kin_tries(void)
{
    Scene s;

    if (!pair_open(&s, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, &mem_ops,
                   MEM_SMALL)) {
        return;
    }
    prim.split = split_fails;
    for (unsigned i = 0; i < 8; i++) {
        g_assert(kin_wanted(s.ra, 0));
        kin_take(s.ra, 0);
    }
    g_assert(!kin_wanted(s.ra, 0));
    scene_end(&s);
}

static char *room_last;     /* page of what was grown */

static void *lengthen_room(void *from, size_t len, size_t want, void *at)
{
    char *p = prim_real.lengthen(from, len, want, at);

    room_last = p + want - PAGE;
    return p;
}

/* What was grown, and is not needed as a device is at it, goes. */
static void test_kin_busy(void)
{
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    mem_fill_run(s.a, 700, 20, 300, 1);
    s.a->busy = true;
    prim.lengthen = lengthen_room;
    g_assert(rooms_restore(&s.f, s.ra, 512, 512) == -EBUSY);
    g_assert(h.remaps == 2 && room_last && !is_mapped(room_last));
    scene_end(&s);
}

typedef enum KinFault {
    KIN_SPLIT, KIN_PAGEOUT, KIN_KERNEL, KIN_STRICT,    /* there is none */
    KIN_LENGTHEN, KIN_UNMAP, KIN_LOCKED,            /* it cannot be used */
} KinFault;

/* Without it memory is restored as well, each piece a mapping. */
static void test_kin_fails(gconstpointer data)
{
    KinFault fault = GPOINTER_TO_INT(data);
    Scene s;

    if (!pair_open(&s, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, &mem_ops,
                   MEM_SMALL)) {
        return;
    }
    if (s.f.uffd_wp < 0) {
        g_test_skip("no write-protection of shared memory by userfaultfd "
                    "(Linux 5.19): memory is not restored");
        pair_close(&s);
        return;
    }
    memset(&h, 0, sizeof(h));
    h.f = &s.f;
    h.r = s.ra;
    prim.split = fault == KIN_SPLIT ? split_fails : prim_real.split;
    prim.advise = fault == KIN_PAGEOUT ? pageout_fails : prim_real.advise;
    s.ra->mergeable = fault == KIN_KERNEL;
    s.ra->kinless = fault == KIN_STRICT;
    rooms_passes(&s.f, 4);
    g_assert(rooms_sharing(&s.f) >= PAGES - STILL_FEW);
    g_assert(!s.ra->kin == (fault < KIN_LENGTHEN));
    prim.lengthen = fault == KIN_LENGTHEN ? lengthen_fails
                                          : prim_real.lengthen;
    prim.unmap = fault == KIN_UNMAP ? unmap_fails : prim_real.unmap;
    /* sanitizers make mlock() do nothing */
    g_assert(fault != KIN_LOCKED || syscall(SYS_mlock, s.ra->kin, PAGE) == 0);
    g_assert(pieces_restore(&s) == PIECES);
    g_assert(!s.ra->kin == (fault != KIN_LENGTHEN));
    scene_end(&s);
}

static unsigned dressed;     /* kin: its attributes set, by what they are */

static int dress_advise(void *addr, size_t len, int advice)
{
    if (addr == h.r->kin && advice != MADV_PAGEOUT) {
        g_assert(advice == MADV_DOFORK || advice == MADV_DODUMP);
        dressed += advice == MADV_DOFORK ? 1 : 10;
    }
    return prim_real.advise(addr, len, advice);
}

static int dress_policy(void *addr, size_t len, int mode,
                        const unsigned long *mask, size_t bits)
{
    if (addr == h.r->kin) {
        g_assert(mode == 0);
        dressed += 100;
        return prim_real.policy_set(addr, len, mode, mask, bits);
    }
    return 0;
}

/* Its owner had chosen a node when kin was split off. */
static int dress_policy_get(void *addr, int *mode, unsigned long *mask,
                            size_t bits)
{
    *mode = 1;
    return 0;
}

/* It has the attributes that the region had when it was added, no others. */
static void test_kin_attributes(gconstpointer data)
{
    const bool own = GPOINTER_TO_INT(data);
    KsmRegion *r;
    Scene s;

    if (!scene_start(&s)) {
        return;
    }
    r = s.ra;
    dressed = 0;
    prim.advise = dress_advise;
    prim.policy_get = dress_policy_get;
    prim.policy_set = dress_policy;
    r->policy = own ? 1 : -1;
    if (own) {
        r->advice[r->n_advice++] = MADV_DONTFORK;
        r->advice[r->n_advice++] = MADV_DONTDUMP;
    }
    g_assert(rooms_restore(&s.f, r, 64, PIECE) == 0);
    g_assert(dressed == (own ? 0 : 111));
    g_assert(rooms_restore(&s.f, r, 64 + PIECE, PIECE) == 0);
    g_assert(dressed == (own ? 0 : 111));
    r->policy = -1;
    r->n_advice -= own ? 2 : 0;
    scene_end(&s);
}

static FakeRoot *root;
static size_t limit;

static int root_open(const char *path)
{
    g_autofree char *name = g_build_filename(root->dir, path, NULL);

    return prim_real.open_read(name);
}

static size_t limit_is(void)
{
    return limit;
}

/* NULL: there is no such file. */
static bool allowed(const char *overcommit, const char *kernel, size_t most)
{
    fake_remove(root, NULL);
    fake_make(root, NULL);
    if (overcommit) {
        fake_write(root, "proc/sys/vm/overcommit_memory", overcommit);
    }
    if (kernel) {
        fake_write(root, "proc/sys/kernel/osrelease", kernel);
    }
    limit = most;
    return kin_allowed();
}

/* None where a moment's use of address space may do harm. */
static void test_kin_allowed(FakeRoot *fake, gconstpointer data)
{
    const char *good = "6.18.5+deb14-amd64\n";

    root = fake;
    prim.open_read = root_open;
    prim.memory_limit = limit_is;
    g_assert(allowed("0\n", good, SIZE_MAX));
    g_assert(allowed("1\n", "6.12.41\n", SIZE_MAX));
    g_assert(allowed("0\n", "6.14.0\n", SIZE_MAX));
    g_assert(allowed("0\n", "7.0-rc1\n", SIZE_MAX));
    g_assert(!allowed("2\n", good, SIZE_MAX));
    g_assert(!allowed("0\n", good, SIZE_MAX - 1));
    g_assert(!allowed("0\n", "6.15.1\n", SIZE_MAX));
    g_assert(!allowed("0\n", "6.17.5\n", SIZE_MAX));
    g_assert(!allowed(NULL, good, SIZE_MAX));
    g_assert(!allowed("0\n", NULL, SIZE_MAX));
    g_assert(!allowed("0\n", "none\n", SIZE_MAX));
    prim.open_read = prim_real.open_read;
    prim.memory_limit = prim_real.memory_limit;
}

/* Kin of a lower page serves more. */
static void test_kin_lower(void)
{
    Scene s;

    if (!pair_open(&s, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, &mem_ops,
                   MEM_SMALL)) {
        return;
    }
    mem_fill_run(s.a, 0, 512, 5000, 1);
    rooms_passes(&s.f, 4);
    g_assert(s.ra->kin && s.ra->kin_page >= 512);
    g_assert(s.rb->kin && s.rb->kin_page >= 512);
    mem_fill_run(s.b, 0, 512, 5000, 1);
    rooms_passes(&s.f, 4);
    g_assert(s.ra->kin && s.ra->kin_page < 512);
    g_assert(s.rb->kin && s.rb->kin_page < 512);
    scene_end(&s);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_data_func("/restore/scan/inhibited", GINT_TO_POINTER(false),
                         test_scan);
    g_test_add_data_func("/restore/scan/busy", GINT_TO_POINTER(true),
                         test_scan);
    g_test_add_func("/restore/unmerge/busy", test_unmerge_busy);
    g_test_add_func("/restore/unmerge/step", test_unmerge_step);
    g_test_add_func("/restore/unmerge/settles", test_unmerge_settles);
    g_test_add_func("/restore/unmerge/inhibited", test_unmerge_inhibited);
    g_test_add_func("/restore/unmerge/turns", test_unmerge_turns);
    g_test_add_data_func("/restore/unmerge/failed", GUINT_TO_POINTER(700),
                         test_unmerge_failed);
    /* nothing before it in its run tells it from zeroes */
    g_test_add_data_func("/restore/unmerge/failed-first",
                         GUINT_TO_POINTER(512), test_unmerge_failed);
    g_test_add_func("/restore/mappings", test_mappings);
    g_test_add_func("/restore/mappings-few", test_mappings_few);
    g_test_add_data_func("/restore/remap-fails/data", GINT_TO_POINTER(false),
                         test_remap_fails);
    g_test_add_data_func("/restore/remap-fails/zeroes", GINT_TO_POINTER(true),
                         test_remap_fails);
    g_test_add_func("/restore/remap-gap", test_remap_gap);
    g_test_add_func("/restore/kin/joins", test_kin);
    g_test_add_func("/restore/kin/counted", test_kin_counted);
    g_test_add_func("/restore/kin/huge", test_kin_huge);
    g_test_add_func("/restore/kin/before", test_kin_before);
    g_test_add_func("/restore/kin/lower", test_kin_lower);
    g_test_add_data_func("/restore/kin/doubt/mapping", GINT_TO_POINTER(true),
                         test_kin_doubt);
    g_test_add_data_func("/restore/kin/doubt/home", GINT_TO_POINTER(false),
                         test_kin_doubt);
    g_test_add_func("/restore/kin/tries", test_kin_tries);
    g_test_add_func("/restore/kin/busy", test_kin_busy);
    g_test_add("/restore/kin/allowed", FakeRoot, NULL, fake_make,
               test_kin_allowed, fake_remove);
    g_test_add_data_func("/restore/kin/attributes/changed",
                         GINT_TO_POINTER(false), test_kin_attributes);
    g_test_add_data_func("/restore/kin/attributes/own",
                         GINT_TO_POINTER(true), test_kin_attributes);
    g_test_add_data_func("/restore/kin/split-fails",
                         GINT_TO_POINTER(KIN_SPLIT), test_kin_fails);
    g_test_add_data_func("/restore/kin/pageout-fails",
                         GINT_TO_POINTER(KIN_PAGEOUT), test_kin_fails);
    g_test_add_data_func("/restore/kin/kernel",
                         GINT_TO_POINTER(KIN_KERNEL), test_kin_fails);
    g_test_add_data_func("/restore/kin/strict",
                         GINT_TO_POINTER(KIN_STRICT), test_kin_fails);
    g_test_add_data_func("/restore/kin/lengthen-fails",
                         GINT_TO_POINTER(KIN_LENGTHEN), test_kin_fails);
    g_test_add_data_func("/restore/kin/unmap-fails",
                         GINT_TO_POINTER(KIN_UNMAP), test_kin_fails);
    g_test_add_data_func("/restore/kin/locked",
                         GINT_TO_POINTER(KIN_LOCKED), test_kin_fails);
    return g_test_run();
}
