/*
 * libksm tests: merged pages that were written map the pool again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What is replaced in place has no copy elsewhere: so somebody writes, a device
 * comes, or a call fails, at each moment in which that could lose something.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "merge/quiet.h"
#include "rooms.h"
#include "still.h"

#define PAGES   PAIR_PAGES
#define AT      100u    /* pages of a that are written ... */
#define RUN     8u      /* ... so many */
#define OTHER   300u    /* whose content they are given, or a new one */

static struct {
    Mem *m;
    const char *inhibited;      /* from the next write-protection on */
    bool busy;                  /* ... and so is this */
    size_t late;                /* page that is written just before it; 0 */
    unsigned maps_good;         /* so many mappings of the pool work ... */
    unsigned maps_fail;         /* ... and so many after them do not */
    bool gap;                   /* ... when what was there is gone already */
    unsigned calls, fail_at;    /* that call fails; 0: none */
} h;

typedef Pair Scene;

static bool call_fails(void)
{
    return h.fail_at && ++h.calls == h.fail_at;
}

static int h_protect(const UffdRange *range, bool on)
{
    if (on && call_fails()) {
        return -ENOMEM;
    }
    if (on && h.late) {
        mem_write(h.m, h.late, 77, 0x77);
    }
    if (on) {
        h.m->inhibited = h.inhibited;
        h.m->busy |= h.busy;
    }
    return prim_real.uffd_protect(range, on);
}

static int h_register(const UffdRange *range, unsigned mode)
{
    return call_fails() ? -ENOMEM : prim_real.uffd_register(range, mode);
}

static int h_advise(void *addr, size_t len, int advice)
{
    bool needed = advice == MADV_POPULATE_READ || advice == MADV_UNMERGEABLE;
    bool ours = (char *)addr >= h.m->addr &&
                (char *)addr < h.m->addr + PAGES * PAGE;

    return needed && ours && call_fails()
           ? -ENOMEM : prim_real.advise(addr, len, advice);
}

static void *h_map(void *addr, size_t len, int prot, int flags, int fd,
                   off_t offset)
{
    bool good = h.maps_good || !h.maps_fail;

    if (fd >= 0) {
        h.maps_fail -= !good;
        h.maps_good -= h.maps_good > 0;
    }
    if (fd >= 0 && (!good || call_fails())) {
        g_assert(!h.gap || munmap(addr, len) == 0);
        errno = ENOMEM;
        return NULL;
    }
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

static void pause_not(unsigned us)
{
}

/* Merged, all of it: a page that was on its way is not (still.h). */
static bool scene_start(Scene *s, unsigned max_sharing)
{
    unsigned tries = 0;

    for (;;) {
        g_assert(tries++ < 10);
        if (!pair_open(s, KSM_DIRTY_PAGEMAP, max_sharing, &mem_ops,
                       MEM_SMALL)) {
            return false;
        }
        if (s->f.uffd_wp < 0) {
            g_test_skip("no write-protection of shared memory by userfaultfd "
                        "(Linux 5.19): nothing is replaced in place");
            pair_close(s);
            return false;
        }
        rooms_passes(&s->f, 4);
        if (rooms_sharing(&s->f) == PAGES) {
            break;
        }
        pair_close(s);
    }
    s->f.costs = costs_guess;
    memset(&h, 0, sizeof(h));
    h.m = s->a;
    prim.uffd_protect = h_protect;
    prim.uffd_register = h_register;
    prim.advise = h_advise;
    prim.map = h_map;
    prim.pause = pause_not;
    return true;
}

/* Nobody waits for us any more: all can be written. */
static void scene_end(Scene *s)
{
    still_calls();
    s->a->busy = s->b->busy = false;
    rooms_check(&s->f, s->ra);
    mem_check(s->a);
    mem_fill_run(s->a, 0, PAGES, 50000, 1);
    pair_close(s);
}

static void write_equal(Scene *s)
{
    mem_fill_run(s->a, AT, RUN, 1 + OTHER, 1);
    rooms_quiet(&s->f, s->ra, AT, RUN);
    g_assert(rooms_sharing(&s->f) == PAGES - RUN);
}

static uint64_t runs_counted(KsmRegion *r)
{
    unsigned runs = 0;

    for (size_t i = 0; i < r->n_pages; i++) {
        runs += page_is_mapped(r, i) && !region_joined(r, i);
    }
    return runs;
}

static struct {
    size_t page, n;
} told;

static void mapped_told(void *opaque, void *addr, size_t len)
{
    told.page = ((char *)addr - h.m->addr) / PAGE;
    told.n = len / PAGE;
}

/* What the pool has is mapped; the page before and behind are not touched. */
static void test_equal(void)
{
    KsmRegionOps ops = mem_ops;
    uint64_t runs;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    write_equal(&s);
    runs = s.ra->runs;
    /* the page behind them is written, too, and stays */
    mem_fill(s.a, AT + RUN, 7777);
    rooms_break(&s.f, s.ra, AT + RUN);
    ops.mapped = mapped_told;
    s.ra->ops = &ops;
    told.n = 0;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN);
    s.ra->ops = &mem_ops;
    /* that is to be known of them as of any mapping that is made */
    g_assert(told.page == AT && told.n == RUN);
    g_assert(rooms_sharing(&s.f) == PAGES - 1);
    g_assert(mem_anonymous(s.a, AT - 1, RUN + 3) == 1);
    g_assert(s.ra->count[PAGE_BROKEN] == 1);
    /* three mappings were one */
    g_assert(s.ra->runs == runs + 2 && runs_counted(s.ra) == runs + 2);
    for (unsigned i = 0; i < RUN; i++) {
        g_assert(rooms_users(&s.f, s.ra->tag[AT + i]) == 3);
    }
    mem_check(s.a);
    /* a write is copied, as of any merged page */
    mem_write(s.a, AT + 1, 5, 5);
    mem_check(s.a);
    mem_check(s.b);
    rooms_break(&s.f, s.ra, AT + 1);
    scene_end(&s);
}

/* Equal to nothing but each other: that is restored. */
static void test_pages(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    mem_fill_run(s.a, AT, RUN, 7000, 1);
    mem_fill_run(s.a, 600, RUN, 7000, 1);
    rooms_quiet(&s.f, s.ra, AT, RUN);
    rooms_quiet(&s.f, s.ra, 600, RUN);
    h.fail_at = 1;
    g_assert(rooms_rejoin(&s.f, s.ra, 600, RUN) == 0);
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == 0);
    g_assert(h.calls == 0);
    /* nor are they asked about with those behind them that have slots */
    mem_fill_run(s.a, AT + 4, RUN - 4, 1 + OTHER, 1);
    rooms_quiet(&s.f, s.ra, AT, RUN);
    h.fail_at = 0;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN - 4);
    g_assert(mem_anonymous(s.a, AT, RUN) == 4);
    scene_end(&s);
}

/* A slot takes no more users than it may have, whatever a guest writes. */
static void test_full(void)
{
    const unsigned max = 7;
    unsigned merged;
    uint32_t slot;
    Scene s;

    if (!scene_start(&s, max)) {
        return;
    }
    for (unsigned i = 0; i < RUN; i++) {
        mem_fill(s.a, AT + i, 1 + OTHER);
    }
    slot = s.ra->tag[OTHER];
    s.f.costs.rejoin_ns = s.f.costs.map_ns = 0;
    rooms_quiet(&s.f, s.ra, AT, RUN);
    g_assert(rooms_users(&s.f, slot) == 2);
    merged = rooms_rejoin(&s.f, s.ra, AT, RUN);
    g_assert(merged > 0 && rooms_users(&s.f, slot) == 2 + merged);
    /* an answer may be a user as well */
    g_assert(merged == max - 2 - rooms_remote(&s.f));
    g_assert(mem_anonymous(s.a, AT, RUN) == RUN - merged);
    rooms_check(&s.f, s.ra);
    scene_end(&s);
}

/* Written since it was looked at, as late as can be: it alone stays. */
static void test_changed(void)
{
    uint32_t tag;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    write_equal(&s);
    tag = s.ra->tag[AT + 3];
    h.late = AT + 3;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN - 1);
    g_assert(mem_anonymous(s.a, AT, RUN) == 1);
    g_assert(page_state(s.ra, AT + 3) == PAGE_BROKEN);
    g_assert(s.ra->history[AT + 3] == 0);
    g_assert(rooms_finds(&s.f, tag));
    mem_check(s.a);
    /* what was not replaced is not blocked */
    mem_write(s.a, AT + 3, 78, 0x78);
    scene_end(&s);
}

/* A device comes when its writes are blocked: nothing is replaced. */
static void test_device(gconstpointer data)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    write_equal(&s);
    h.busy = GPOINTER_TO_INT(data);
    h.inhibited = h.busy ? NULL : "a device";
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == 0);
    g_assert(mem_anonymous(s.a, AT, RUN) == RUN);
    g_assert(s.ra->count[PAGE_BROKEN] == RUN);
    /* it is known to be there: nobody is held up */
    h.fail_at = 1;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == 0);
    g_assert(h.calls == 0);
    h.fail_at = 0;
    mem_fill_run(s.a, AT, RUN, 1 + OTHER, 1);
    h.busy = s.a->busy = false;
    h.inhibited = s.a->inhibited = NULL;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN);
    scene_end(&s);
}

/* The kernel has no mapping: all is as it was. */
static void test_map_fails(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    write_equal(&s);
    h.maps_fail = 1;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == 0);
    g_assert(s.ra->count[PAGE_BROKEN] == RUN);
    g_assert(rooms_sharing(&s.f) == PAGES - RUN);
    rooms_check(&s.f, s.ra);
    mem_check(s.a);
    /* the second of three */
    mem_fill_run(s.a, AT, RUN, 1 + OTHER, 1);
    mem_fill_run(s.a, AT + 2, 4, 1 + 700, 1);
    rooms_quiet(&s.f, s.ra, AT, RUN);
    h.maps_good = h.maps_fail = 1;
    s.f.costs.rejoin_ns = 0;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN - 4);
    g_assert(mem_anonymous(s.a, AT + 2, 4) == 4);
    g_assert(s.ra->count[PAGE_BROKEN] == 4);
    g_assert(runs_counted(s.ra) == s.ra->runs);
    scene_end(&s);
}

/* ... and has dropped what was there: it is mapped until that stands. */
static void test_map_gap(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    write_equal(&s);
    h.maps_fail = 20;
    h.gap = true;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN);
    g_assert(h.maps_fail == 0);
    mem_check(s.a);
    scene_end(&s);
}

/* Each call fails once. */
static void test_calls_fail(void)
{
    unsigned merged = 0;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    for (h.fail_at = 1; ; h.fail_at++) {
        mem_fill_run(s.a, AT, RUN, 1 + OTHER, 1);
        rooms_quiet(&s.f, s.ra, AT, RUN);
        h.calls = 0;
        merged = rooms_rejoin(&s.f, s.ra, AT, RUN);
        mem_check(s.a);
        rooms_check(&s.f, s.ra);
        g_assert(rooms_sharing(&s.f) == PAGES - RUN + merged);
        if (h.calls < h.fail_at) {
            break;
        }
        g_assert(merged == 0);
    }
    g_assert(h.fail_at > 4 && merged == RUN);
    scene_end(&s);
}

/* As when its memory fails: it is not read, and SIGBUS is what it gives. */
static void test_failed(void)
{
    UffdRange range;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    write_equal(&s);
    range = (UffdRange) { s.f.uffd_wp, s.a->addr + (AT + 3) * PAGE, PAGE };
    g_assert(prim_real.uffd_register(&range, UFFD_PROTECT) == 0);
    g_assert(madvise(range.addr, PAGE, MADV_DONTNEED) == 0);
    g_assert(prim_real.uffd_poison(range.fd, range.addr, PAGE) == 0);
    g_assert(prim_real.uffd_unregister(&range) == 0);
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == 0);
    g_assert(s.ra->count[PAGE_BROKEN] == RUN);
    rooms_discard(&s.f, s.ra, AT + 3, 1);
    mem_gone(s.a, AT + 3, 1);
    scene_end(&s);
}

/* It cannot be read, nor has been. */
static void slot_fail(char *slot)
{
    g_assert(mprotect(slot, PAGE, PROT_NONE) == 0);
    g_assert(madvise(slot, PAGE, MADV_DONTNEED) == 0);
}

/* ... or a slot's: the page stays as it is. */
static void test_slot_failed(void)
{
    char *slot;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    write_equal(&s);
    slot = rooms_slot(&s.f, s.ra->tag[OTHER + 3]);
    slot_fail(slot);
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN - 1);
    g_assert(page_state(s.ra, AT + 3) == PAGE_BROKEN);
    g_assert(mprotect(slot, PAGE, PROT_READ) == 0);
    scene_end(&s);
}

/* Filled by a page that was written since it was hashed. */
static void slot_wrong(Scene *s, size_t page)
{
    rooms_slot_write(&s->f, s->ra->tag[page], "wrong");
    memcpy(s->a->shadow + page * PAGE, "wrong", 5);
    memcpy(s->b->shadow + page * PAGE, "wrong", 5);
}

/* A slot that is not what its hash says is not tried again, or by others. */
static void test_slot_wrong(void)
{
    uint32_t slot, tag;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    write_equal(&s);
    slot = s.ra->tag[OTHER + 3];
    tag = s.ra->tag[AT + 3];
    g_assert(rooms_finds_slot(&s.f, tag, slot));
    slot_wrong(&s, OTHER + 3);
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN - 1);
    g_assert(page_state(s.ra, AT + 3) == PAGE_BROKEN);
    g_assert(!rooms_finds_slot(&s.f, tag, slot));
    g_assert(rooms_users(&s.f, slot) == 2);
    scene_end(&s);
}

/* A saved page is worth so much, a run costs so much, and each mapping. */
static void test_pays(void)
{
    const uint64_t worth = RUN * (PAGE_WORTH_NS - REJOIN_PAGE_NS);
    KsmCosts *c;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    c = &s.f.costs;
    write_equal(&s);
    c->map_ns = 5000;
    c->rejoin_ns = worth - 5000 + 1;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == 0);
    c->rejoin_ns--;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN);
    /* two mappings */
    mem_fill_run(s.a, AT, RUN / 2, 1 + OTHER, 1);
    mem_fill_run(s.a, AT + RUN / 2, RUN / 2, 1 + 700, 1);
    rooms_quiet(&s.f, s.ra, AT, RUN);
    c->map_ns = 5000;
    c->rejoin_ns = worth - 10000 + 1;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == 0);
    c->rejoin_ns--;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN);
    scene_end(&s);
}

static unsigned rejoins(Scene *s, size_t page, size_t end)
{
    return quiet_rejoins(&s->f.costs, s->ra, page, end,
                         content_tag(s->ra, s->f.hasher.zero));
}

/* What is known before anything is asked: one mapping, if there are slots. */
static void test_quiet(void)
{
    KsmCosts *c;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    c = &s.f.costs;
    write_equal(&s);
    c->map_ns = 5000;
    c->rejoin_ns = RUN * (PAGE_WORTH_NS - REJOIN_PAGE_NS) - 5000;
    c->restore_ns = 1000000;
    g_assert(rejoins(&s, AT, 512) == RUN);
    g_assert(rejoins(&s, AT + 1, 512) == 0);
    g_assert(rejoins(&s, AT, AT + RUN - 1) == 0);
    g_assert(rejoins(&s, AT - 1, 512) == 0);
    for (unsigned i = 0; i < RUN; i++) {
        g_assert(quiet_pays(c, s.ra, AT + i, 0));
    }
    c->rejoin_ns++;
    g_assert(rejoins(&s, AT, 512) == 0);
    g_assert(!quiet_pays(c, s.ra, AT + 1, 0));
    c->rejoin_ns = 0;
    /* not quiet for long enough; zeroes, which are given back */
    s.ra->history[AT + 5] = 1 << 4;
    g_assert(rejoins(&s, AT, 512) == 5);
    mem_fill_run(s.a, AT + 3, 2, 0, 0);
    rooms_quiet(&s.f, s.ra, AT + 3, 2);
    page_again(s.ra, AT + 3, true);
    g_assert(rejoins(&s, AT, 512) == 3);
    g_assert(rejoins(&s, AT + 3, 512) == 0);
    /* what is before the zeroes says nothing of what is behind */
    s.ra->history[AT + 5] = QUIET_LOOKS << 4;
    s.ra->history[AT + 2] = 1 << 4;
    g_assert(quiet_pays(c, s.ra, AT + 6,
                        content_tag(s.ra, s.f.hasher.zero)));
    scene_end(&s);
}

/* Where mappings are short none is split. */
static void test_mappings(void)
{
    g_autofree char *text = NULL;
    size_t max;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    write_equal(&s);
    g_assert(g_file_get_contents("/proc/sys/vm/max_map_count", &text, NULL,
                                 NULL));
    max = g_ascii_strtoull(text, NULL, 10);
    rooms_vma_reserve(&s.f, max - util_mappings() - 200);
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == 0);
    rooms_vma_reserve(&s.f, 0);
    /* nor where the longest runs are to have them */
    s.f.cut.shortest = 1;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == 0);
    s.f.cut.shortest = 0;
    g_assert(rooms_rejoin(&s.f, s.ra, AT, RUN) == RUN);
    scene_end(&s);
}

/*
 * A thread writes a word of a page, sees that it is there, and writes back what
 * makes the page equal to its slot.
 */
typedef struct Writer {
    atomic_bool ends;
    volatile uint64_t *word;    /* volatile: memory, each time */
    uint64_t equal;         /* ... the word in the slot */
    uint64_t writes;
} Writer;

static void *writer_main(void *opaque)
{
    Writer *w = opaque;

    while (!atomic_load(&w->ends)) {
        uint64_t odd = w->equal + 1 + w->writes++ % 1000;

        *w->word = odd;
        for (unsigned i = 0; i < 20; i++) {
            g_assert(*w->word == odd);
        }
        *w->word = w->equal;
        for (unsigned i = 0; i < 200; i++) {
            g_assert(*w->word == w->equal);
        }
    }
    return NULL;
}

static void test_race(void)
{
    unsigned merged = 0, stayed = 0;
    Writer w = { false };
    pthread_t thread;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    still_calls();
    w.word = (uint64_t *)(s.a->addr + (AT + 3) * PAGE) + 9;
    mem_fill_run(s.a, AT, RUN, 1 + OTHER, 1);
    w.equal = *w.word;
    g_assert(pthread_create(&thread, NULL, writer_main, &w) == 0);
    /* on a busy machine the writer may not run for long, with the word odd */
    for (unsigned i = 0; i < 3000 || (!merged && i < 3000000); i++) {
        unsigned n;

        for (unsigned k = 0; k < RUN; k++) {
            if (k != 3) {
                mem_fill(s.a, AT + k, 1 + OTHER + k);
            }
        }
        rooms_quiet(&s.f, s.ra, AT, RUN);
        /* the other content is what it is found by now and then */
        if (s.ra->state[AT + 3] & PAGE_AGAIN) {
            s.f.costs = costs_guess;
            n = rooms_rejoin(&s.f, s.ra, AT, RUN);
            g_assert(n == RUN || n == RUN - 1);
            merged += n == RUN;
            stayed += n == RUN - 1;
        } else {
            g_thread_yield();
        }
    }
    atomic_store(&w.ends, true);
    pthread_join(thread, NULL);
    g_test_message("the written page was merged %u times, and not %u times, "
                   "in %" PRIu64 " writes", merged, stayed, w.writes);
    g_assert(merged > 0 && w.writes > 0);
    scene_end(&s);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/rejoin/equal", test_equal);
    g_test_add_func("/rejoin/pages", test_pages);
    g_test_add_func("/rejoin/full", test_full);
    g_test_add_func("/rejoin/changed", test_changed);
    g_test_add_data_func("/rejoin/device/pins", GINT_TO_POINTER(0),
                         test_device);
    g_test_add_data_func("/rejoin/device/writes", GINT_TO_POINTER(1),
                         test_device);
    g_test_add_func("/rejoin/map/fails", test_map_fails);
    g_test_add_func("/rejoin/map/gap", test_map_gap);
    g_test_add_func("/rejoin/calls", test_calls_fail);
    g_test_add_func("/rejoin/failed", test_failed);
    g_test_add_func("/rejoin/slot", test_slot_failed);
    g_test_add_func("/rejoin/slot/wrong", test_slot_wrong);
    g_test_add_func("/rejoin/pays", test_pays);
    g_test_add_func("/rejoin/quiet", test_quiet);
    g_test_add_func("/rejoin/mappings", test_mappings);
    g_test_add_func("/rejoin/race", test_race);
    return g_test_run();
}
