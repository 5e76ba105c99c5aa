/*
 * libksm tests: contents move to slots that follow each other
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What maps one slot and then another may have been written in between: so
 * somebody writes, a device comes, or a call fails, at each moment in which that
 * could lose something.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "rooms.h"
#include "share/store-local.h"
#include "still.h"

#define PAGES   PAIR_PAGES
#define AT      100u    /* pages of a that map scattered slots: so many ... */
#define PIECES  6u
#define LEN     8u      /* ... of that length */
#define ALL     (PIECES * LEN)

static struct {
    Mem *m;
    const char *inhibited;      /* from the next write-protection on */
    bool busy;                  /* ... and so is this */
    size_t late;                /* page that is written just before it; 0 */
    unsigned calls, fail_at;    /* that call fails; 0: none */
    unsigned protects;          /* times that somebody was held up */
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
    h.protects += on;
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

    return needed && call_fails() ? -ENOMEM
                                  : prim_real.advise(addr, len, advice);
}

static void *h_map(void *addr, size_t len, int prot, int flags, int fd,
                   off_t offset)
{
    if (fd >= 0 && call_fails()) {
        errno = ENOMEM;
        return NULL;
    }
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

static ssize_t h_write(int fd, const void *buf, size_t len, off_t offset)
{
    return call_fails() ? -ENOSPC : prim_real.write(fd, buf, len, offset);
}

static int h_allocate(int fd, off_t offset, off_t len)
{
    return call_fails() ? -ENOSPC : prim_real.allocate(fd, offset, len);
}

static void pause_not(unsigned us)
{
}

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
        pair_close(s);      /* a page was on its way: still.h */
    }
    s->f.costs = costs_guess;
    memset(&h, 0, sizeof(h));
    h.m = s->a;
    prim.uffd_protect = h_protect;
    prim.uffd_register = h_register;
    prim.advise = h_advise;
    prim.map = h_map;
    prim.write = h_write;
    prim.allocate = h_allocate;
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
    mem_check(s->b);
    mem_fill_run(s->a, 0, PAGES, 50000, 1);
    mem_fill_run(s->b, 0, PAGES, 60000, 1);
    pair_close(s);
}

static size_t follow_one(Scene *s, KsmRegion *r, bool may)
{
    size_t behind = 0;

    for (size_t page = 0, end; page < PAGES; ) {
        end = (page / CHUNK_PAGES + 1) * CHUNK_PAGES;
        page = gather_follow(&s->f.gather, r, page, end, may, &behind);
        g_assert(page <= end);
    }
    return behind;
}

static size_t follow(Scene *s, bool may)
{
    size_t behind = 0;

    behind += follow_one(s, s->ra, may);
    behind += follow_one(s, s->rb, may);
    return behind;
}

/* Both map scattered slots, and are old. */
static void scatter(Scene *s, unsigned gap)
{
    rooms_scatter(&s->f, s->ra, AT, PIECES, LEN, gap);
    g_assert(follow(s, true) == 0);
    g_assert(rooms_sharing(&s->f) == PAGES);
    g_assert(rooms_shared(&s->f) == PAGES);
    rooms_age(&s->f, s->ra);
    rooms_age(&s->f, s->rb);
}

static unsigned pieces_of(const KsmRegion *r, size_t page, unsigned n)
{
    unsigned pieces = 1;

    for (size_t i = page + 1; i < page + n; i++) {
        pieces += !region_joined(r, i);
    }
    return pieces;
}

/* Pages of the chunk that map other slots now. */
static unsigned gather_all(Scene *s, size_t chunk)
{
    size_t first = chunk * CHUNK_PAGES, end = first + CHUNK_PAGES;
    uint32_t slot[CHUNK_PAGES];
    unsigned moved = 0, tried;

    memcpy(slot, s->ra->tag + first, sizeof(slot));
    for (size_t page = first; page < end; ) {
        page = gather_next(&s->f.gather, s->ra, page, end, &tried);
        g_assert(page <= end);
    }
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        moved += slot[i] != s->ra->tag[first + i];
    }
    return moved;
}

static unsigned gather(Scene *s)
{
    return gather_all(s, 0);
}

/* Six mappings become one, and so do those of who maps the same. */
static void test_run(void)
{
    size_t maps_a, maps_b;
    uint64_t runs;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    maps_a = mem_mappings(s.a);
    maps_b = mem_mappings(s.b);
    runs = s.ra->runs;
    g_assert(pieces_of(s.ra, AT, ALL) == PIECES);
    g_assert(gather(&s) == ALL);
    g_assert(pieces_of(s.ra, AT, ALL) == 1);
    g_assert(s.ra->runs == runs - (PIECES - 1));
    g_assert(mem_mappings(s.a) == maps_a - (PIECES - 1));
    /* until they follow there are two copies */
    g_assert(rooms_shared(&s.f) == PAGES + ALL);
    for (unsigned i = 0; i < ALL; i++) {
        uint32_t slot = s.ra->tag[AT + i];

        g_assert(rooms_users(&s.f, slot) == 1);
        g_assert(slot != s.rb->tag[AT + i]);
        g_assert(rooms_finds_slot(&s.f, store_tag(s.f.content.store, slot),
                                  slot));
    }
    g_assert(mem_mappings(s.b) == maps_b);
    g_assert(follow(&s, true) == 0);
    g_assert(mem_mappings(s.b) == maps_b - (PIECES - 1));
    g_assert(rooms_shared(&s.f) == PAGES && rooms_sharing(&s.f) == PAGES);
    g_assert(s.ra->tag[AT] == s.rb->tag[AT]);
    /* who has followed is as if merged now; and so is what was restored */
    g_assert(s.rb->history[AT] == 0 && s.rb->history[AT - 1] == GATHER_AGE);
    g_assert(rooms_unmerge(&s.f, s.rb, AT - 1, 1) == 0);
    g_assert(s.rb->history[AT - 1] == 0);
    rooms_passes(&s.f, 4);
    g_assert(s.ra->count[PAGE_MERGED] == PAGES);
    g_assert(mem_anonymous(s.a, 0, PAGES) == 0);
    mem_check(s.a);
    mem_check(s.b);
    /* there is nothing left to do */
    rooms_age(&s.f, s.ra);
    h.fail_at = 1;
    g_assert(gather(&s) == 0 && follow(&s, true) == 0 && h.calls == 0);
    h.fail_at = 0;
    /* a write is copied, as of any merged page */
    mem_write(s.a, AT + 1, 5, 5);
    mem_check(s.b);
    rooms_break(&s.f, s.ra, AT + 1);
    scene_end(&s);
}

/* Who waits does not wait for many mappings. */
static void test_runs(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    rooms_scatter(&s.f, s.ra, AT, 40, 2, 2);
    h.protects = 0;
    g_assert(follow_one(&s, s.rb, true) == 0);
    g_assert(h.protects == 3);
    g_assert(rooms_shared(&s.f) == PAGES);
    scene_end(&s);
}

/* What was merged lately is left alone, and so is what it maps. */
static void test_age(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    /* those two pieces are neither gathered, nor is what is behind them */
    s.ra->history[AT] = s.ra->history[AT + ALL - 1] = GATHER_AGE - 1;
    g_assert(gather(&s) == ALL - 2);
    g_assert(pieces_of(s.ra, AT, ALL) == 3);
    /* what has moved is as if it was merged now */
    g_assert(s.ra->history[AT + 1] == 0);
    gather_age(s.ra, 0);
    g_assert(s.ra->history[AT] == GATHER_AGE);
    g_assert(s.ra->history[AT + 1] == 1);
    /* two mappings less are not worth that many pages, nor are there more */
    g_assert(gather(&s) == 0);
    /* whatever it was merged for, it counts looks once it is written */
    mem_write(s.a, AT, 5, 5);
    rooms_break(&s.f, s.ra, AT);
    g_assert(s.ra->history[AT] == 0);
    scene_end(&s);
}

/* One stretch at once, and then the next. */
static void test_next(void)
{
    size_t page = AT;
    unsigned tried;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    rooms_scatter(&s.f, s.ra, AT + 200, PIECES, LEN, 2);
    rooms_age(&s.f, s.ra);
    page = gather_next(&s.f.gather, s.ra, page, 512, &tried);
    /* what is between is one piece, and a long one */
    g_assert(tried == ALL && page == AT + 200);
    g_assert(pieces_of(s.ra, AT, ALL) == 1);
    g_assert(pieces_of(s.ra, AT + 200, ALL) == PIECES);
    page = gather_next(&s.f.gather, s.ra, page, 512, &tried);
    g_assert(tried == ALL && pieces_of(s.ra, AT + 200, ALL) == 1);
    scene_end(&s);
}

/* What of @halves of a mapping is left for a run, when pages are paid for. */
static void pays_for(Scene *s, int64_t halves)
{
    const uint64_t worth = halves * MAPPING_WORTH_NS / 2 - 2 * ALL * 3000;

    s->f.costs.map_ns = 1000;
    s->f.costs.rejoin_ns = worth - 1000 + 1;
    g_assert(gather(s) == 0);
    s->f.costs.rejoin_ns--;
    g_assert(gather(s) == ALL);
}

/* A mapping less is worth so much, and one that another user may have half. */
static void test_pays(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    pays_for(&s, (PIECES - 1) * 3);
    scene_end(&s);
}

/*
 * He may as well map slots that follow a piece, or go before it, in one mapping
 * with it, which is torn: so do all these, but for the last of all slots.
 */
static void test_torn(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 0);
    pays_for(&s, (PIECES - 1) * 3 - (2 * PIECES - 1));
    scene_end(&s);
}

/* Where it begins, or ends, in the middle of a mapping, that becomes two. */
static void test_edges(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    rooms_scatter(&s.f, s.ra, AT - LEN, PIECES, LEN + 2, 2);
    g_assert(follow(&s, true) == 0);
    rooms_age(&s.f, s.ra);
    /* younger ones: what is left are six pieces of eight, or ten */
    for (unsigned i = 0; i < 2; i++) {
        s.ra->history[AT - LEN + i] = 0;
        s.ra->history[AT - LEN + PIECES * (LEN + 2) - 1 - i] = 0;
    }
    s.f.costs.map_ns = 0;
    s.f.costs.rejoin_ns = ((PIECES - 1) * 3 - 4) * MAPPING_WORTH_NS / 2 -
                          2 * (PIECES * (LEN + 2) - 4) * 3000 + 1;
    g_assert(gather(&s) == 0);
    s.f.costs.rejoin_ns--;
    g_assert(gather(&s) == PIECES * (LEN + 2) - 4);
    scene_end(&s);
}

/* A long piece stays, and so does what is in two places of a stretch. */
static void test_long(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    rooms_scatter(&s.f, s.ra, AT, 4, 70, 2);
    rooms_age(&s.f, s.ra);
    s.f.costs.rejoin_ns = s.f.costs.map_ns = 0;
    g_assert(gather(&s) == 0);
    g_assert(pieces_of(s.ra, AT, 4 * 70) == 4);
    scene_end(&s);
}

/* A page in the middle that another one's slot is equal to: there it ends. */
static void test_twice(void)
{
    unsigned n;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    /* the last piece has the content of the first */
    n = (PIECES - 1) * LEN;
    mem_fill_run(s.a, AT + n, LEN, 1 + AT, 1);
    rooms_quiet(&s.f, s.ra, AT + n, LEN);
    g_assert(rooms_rejoin(&s.f, s.ra, AT + n, LEN) == LEN);
    rooms_age(&s.f, s.ra);
    g_assert(s.ra->tag[AT] == s.ra->tag[AT + n]);
    g_assert(gather(&s) == n);
    g_assert(s.ra->tag[AT] != s.ra->tag[AT + n]);
    g_assert(follow(&s, true) == 0);
    g_assert(s.ra->tag[AT] == s.ra->tag[AT + n]);
    scene_end(&s);
}

/* Written as late as can be: it alone stays, and is found where it was. */
static void test_written(void)
{
    uint32_t old, tag;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    old = s.ra->tag[AT + 11];
    tag = store_tag(s.f.content.store, old);
    h.late = AT + 11;
    g_assert(gather(&s) == ALL - 1);
    h.late = 0;
    g_assert(mem_anonymous(s.a, AT, ALL) == 1);
    g_assert(s.ra->tag[AT + 11] == old);
    g_assert(page_state(s.ra, AT + 11) == PAGE_MERGED);
    g_assert(rooms_finds_slot(&s.f, tag, old));
    mem_check(s.a);
    /* it is not blocked */
    mem_write(s.a, AT + 11, 78, 0x78);
    rooms_break(&s.f, s.ra, AT + 11);
    g_assert(follow(&s, true) == 0);
    g_assert(s.rb->tag[AT + 11] == old && s.rb->tag[AT] == s.ra->tag[AT]);
    /* who follows may be written as late */
    rooms_scatter(&s.f, s.rb, AT, 1, LEN, 0);
    h.late = AT + 3;
    g_assert(follow_one(&s, s.ra, true) == 1);
    h.late = 0;
    g_assert(mem_anonymous(s.a, AT, LEN) == 1);
    mem_check(s.a);
    rooms_break(&s.f, s.ra, AT + 3);
    scene_end(&s);
}

/* A device comes when its writes are blocked: nothing is replaced. */
static void test_device(gconstpointer data)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    h.busy = GPOINTER_TO_INT(data);
    h.inhibited = h.busy ? NULL : "a device";
    g_assert(gather(&s) == 0);
    g_assert(pieces_of(s.ra, AT, ALL) == PIECES);
    g_assert(rooms_shared(&s.f) == PAGES);
    /* what was tried is left alone for a while */
    g_assert(s.ra->history[AT] == 0);
    /* it is known to be there: nothing is copied for it */
    h.inhibited = s.a->inhibited = NULL;
    h.busy = false;
    s.a->busy = true;
    rooms_age(&s.f, s.ra);
    h.calls = 0;
    h.fail_at = 1000;
    g_assert(gather(&s) == 0 && h.calls == 0);
    h.fail_at = 0;
    s.a->busy = false;
    rooms_age(&s.f, s.ra);
    g_assert(gather(&s) == ALL && follow(&s, true) == 0);
    /* the same for who is to follow */
    rooms_scatter(&s.f, s.rb, AT, 1, LEN, 0);
    h.busy = GPOINTER_TO_INT(data);
    h.inhibited = h.busy ? NULL : "a device";
    g_assert(follow_one(&s, s.ra, true) == LEN);
    h.inhibited = NULL;
    h.busy = s.a->busy = false;
    s.a->inhibited = NULL;
    g_assert(rooms_shared(&s.f) == PAGES + LEN);
    g_assert(follow_one(&s, s.ra, true) == 0);
    g_assert(rooms_shared(&s.f) == PAGES);
    scene_end(&s);
}

/* Who may not follow is counted, and nothing happens. */
static void test_behind(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    g_assert(gather(&s) == ALL);
    g_assert(follow(&s, false) == ALL);
    /* nor does he gather what is found elsewhere */
    for (size_t page = 0; page < 512; ) {
        unsigned tried;

        page = gather_next(&s.f.gather, s.rb, page, 512, &tried);
        g_assert(tried == 0);
    }
    g_assert(rooms_shared(&s.f) == PAGES + ALL);
    g_assert(rooms_users(&s.f, s.ra->tag[AT]) == 1);
    g_assert(pieces_of(s.rb, AT, ALL) == PIECES);
    scene_end(&s);
}

/* Who uses either is three quarters of what one may have, at most. */
static void test_full(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    mem_fill_run(s.b, AT + LEN, LEN, 1 + AT, 1);
    mem_fill_run(s.b, AT + 2 * LEN, LEN, 1 + AT, 1);
    s.f.costs.rejoin_ns = s.f.costs.map_ns = 0;
    rooms_quiet(&s.f, s.rb, AT + LEN, 2 * LEN);
    g_assert(rooms_rejoin(&s.f, s.rb, AT + LEN, 2 * LEN) == 2 * LEN);
    g_assert(rooms_users(&s.f, s.ra->tag[AT]) == 4);
    rooms_scatter(&s.f, s.ra, AT, 1, LEN, 0);
    s.f.gather.max_sharing = 5;
    g_assert(follow(&s, true) == 0);
    g_assert(rooms_users(&s.f, s.ra->tag[AT]) == 4);
    rooms_scatter(&s.f, s.ra, AT, 1, LEN, 0);
    s.f.gather.max_sharing = 4;
    g_assert(follow(&s, true) == 0);
    g_assert(rooms_users(&s.f, s.ra->tag[AT]) == 1);
    g_assert(rooms_users(&s.f, s.rb->tag[AT]) == 3);
    scene_end(&s);
}

/* What many have stays where it is, and so do they. */
static void test_many(void)
{
    uint32_t slot;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    slot = s.ra->tag[AT + 11];
    s.f.costs.rejoin_ns = s.f.costs.map_ns = 0;
    for (unsigned i = 0; i < 15; i++) {
        mem_fill(s.b, 600 + 2 * i, 1 + AT + 11);
        rooms_quiet(&s.f, s.rb, 600 + 2 * i, 1);
        g_assert(rooms_rejoin(&s.f, s.rb, 600 + 2 * i, 1) == 1);
    }
    g_assert(rooms_users(&s.f, slot) == 17);
    g_assert(gather(&s) >= ALL - 12);
    g_assert(s.ra->tag[AT + 11] == slot);
    g_assert(pieces_of(s.ra, AT + 12, ALL - 12) == 1);
    /* sixteen follow, where seventeen did not */
    mem_fill(s.b, 700, 1 + AT + 11);
    rooms_quiet(&s.f, s.rb, 700, 1);
    g_assert(rooms_rejoin(&s.f, s.rb, 700, 1) == 1);
    rooms_scatter(&s.f, s.ra, AT + 11, 1, 1, 0);
    g_assert(follow(&s, true) == 0);
    g_assert(rooms_users(&s.f, slot) == 17);
    mem_write(s.b, 700, 5, 5);
    rooms_break(&s.f, s.rb, 700);
    g_assert(follow(&s, true) == 0);
    g_assert(rooms_users(&s.f, s.ra->tag[AT + 11]) == 17);
    scene_end(&s);
}

/* A tag is no content: slots that only have that in common stay what they are. */
static void test_mistaken(void)
{
    KsmStore *st;
    uint32_t slot, tag;
    StoreOffer o = { .tag = &tag, .n = 1, .before = SLOT_NONE,
                     .after = SLOT_NONE };
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    st = s.f.content.store;
    slot = s.ra->tag[AT];
    tag = store_tag(st, slot);
    g_assert(store_offer(st, &o) == OFFER_TAKEN);
    g_assert(store_fill(st, o.slot, s.a->shadow + (AT + 1) * PAGE, 1) == 0);
    store_hold(st, o.slot);
    content_publish(&s.f.content, o.slot);
    g_assert(follow(&s, true) == 0);
    g_assert(s.ra->tag[AT] == slot && s.rb->tag[AT] == slot);
    /* nor do they when it is too late to ask */
    store_hold(st, o.slot);
    g_assert(rejoin_slots(&s.f.rejoin, s.ra, AT, 1, &o.slot,
                          SIZE_MAX) == 0);
    g_assert(rooms_users(&s.f, o.slot) == 1);
    g_assert(s.ra->tag[AT] == slot);
    store_drop(st, o.slot);
    scene_end(&s);
}

/* What a pattern has is one mapping, and is asked for otherwise. */
static void test_pattern(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    for (unsigned i = 0; i < 128; i++) {
        mem_fill(s.a, 512 + i, 4711);
    }
    rooms_unmerge(&s.f, s.ra, 512, 128);
    rooms_passes(&s.f, 4);
    rooms_age(&s.f, s.ra);
    g_assert(rooms_patterns(&s.f) > 0);
    s.f.costs.rejoin_ns = s.f.costs.map_ns = 0;
    g_assert(gather_all(&s, 1) == 0);
    g_assert(follow(&s, true) == 0);
    scene_end(&s);
}

/* Each call fails once: all is as it was, or as it is to be. */
static void test_calls_fail(void)
{
    unsigned gathered = 0;
    const KsmPool *pool;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    for (h.fail_at = 1; ; h.fail_at++) {
        unsigned fail_at = h.fail_at;
        size_t moved;

        h.fail_at = 0;
        scatter(&s, 2);
        h.fail_at = fail_at;
        h.calls = 0;
        s.f.costs = costs_guess;
        moved = gather(&s);
        follow(&s, true);
        mem_check(s.a);
        mem_check(s.b);
        rooms_check(&s.f, s.ra);
        rooms_check(&s.f, s.rb);
        g_assert(s.ra->count[PAGE_MERGED] == PAGES);
        /* some may have gone, and not all that should have followed */
        gathered += moved == ALL;
        if (h.calls < fail_at) {
            break;
        }
        h.fail_at = 0;
        g_assert(follow(&s, true) == 0);
        g_assert(rooms_shared(&s.f) == PAGES);
        h.fail_at = fail_at;
    }
    g_assert(h.fail_at > 10 && gathered > 1);
    h.fail_at = 0;
    store_flush(s.f.content.store);
    /* no slot is lost */
    pool = store_local_pool(s.f.content.store);
    g_assert(pool->top - pool->vacant.n == pool->shared);
    scene_end(&s);
}

/* It cannot be read, nor has been. */
static void slot_fail(char *slot)
{
    g_assert(mprotect(slot, PAGE, PROT_NONE) == 0);
    g_assert(madvise(slot, PAGE, MADV_DONTNEED) == 0);
}

/* As when a slot's memory fails: its content is not copied, nor read. */
static void test_failed(void)
{
    char *slot;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    slot = rooms_slot(&s.f, s.ra->tag[AT + 20]);
    slot_fail(slot);
    g_assert(gather(&s) == 0);
    g_assert(rooms_shared(&s.f) == PAGES);
    g_assert(mprotect(slot, PAGE, PROT_READ) == 0);
    /* others follow without it, whether it is the old one or the new one */
    rooms_scatter(&s.f, s.rb, AT, 4, LEN, 2);
    for (unsigned i = 0; i < 2; i++) {
        KsmRegion *r = i ? s.rb : s.ra;
        size_t page = AT + 9 + i * 10;

        slot = rooms_slot(&s.f, r->tag[page]);
        slot_fail(slot);
        follow_one(&s, s.ra, true);
        g_assert(s.ra->tag[page] != s.rb->tag[page]);
        g_assert(s.ra->tag[page - 1] == s.rb->tag[page - 1]);
        g_assert(s.ra->tag[page + 1] == s.rb->tag[page + 1]);
        g_assert(mprotect(slot, PAGE, PROT_READ) == 0);
        rooms_scatter(&s.f, s.rb, AT, 4, LEN, 2);
    }
    g_assert(follow(&s, true) == 0);
    g_assert(rooms_shared(&s.f) == PAGES);
    scene_end(&s);
}

/* A slot that is given up leaves none that is found in its stead. */
static void test_goes(void)
{
    uint32_t tag;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    tag = store_tag(s.f.content.store, s.ra->tag[AT]);
    g_assert(gather(&s) == ALL);
    rooms_discard(&s.f, s.rb, AT, ALL);
    mem_gone(s.b, AT, ALL);
    g_assert(rooms_finds_slot(&s.f, tag, s.ra->tag[AT]));
    g_assert(rooms_shared(&s.f) == PAGES);
    rooms_discard(&s.f, s.ra, AT, ALL);
    mem_gone(s.a, AT, ALL);
    g_assert(!rooms_finds(&s.f, tag));
    scene_end(&s);
}

/*
 * What others have left, and then given up where they went, is found again where
 * it still is; but not if its memory fails, or its tag is not of its content.
 */
static void test_found(void)
{
    uint32_t tag;
    char *slot;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    tag = store_tag(s.f.content.store, s.rb->tag[AT]);
    g_assert(gather(&s) == ALL);
    rooms_discard(&s.f, s.ra, AT, ALL);
    mem_gone(s.a, AT, ALL);
    g_assert(!rooms_finds(&s.f, tag));
    slot = rooms_slot(&s.f, s.rb->tag[AT]);
    slot_fail(slot);
    g_assert(follow(&s, true) == 0);
    g_assert(!rooms_finds(&s.f, tag));
    g_assert(rooms_finds(&s.f, store_tag(s.f.content.store,
                                         s.rb->tag[AT + 1])));
    g_assert(mprotect(slot, PAGE, PROT_READ) == 0);
    g_assert(follow(&s, true) == 0);
    g_assert(rooms_finds_slot(&s.f, tag, s.rb->tag[AT]));
    content_withdraw(&s.f.content, s.rb->tag[AT], tag);
    store_local_pool(s.f.content.store)->hash[s.rb->tag[AT]] = tag + 1;
    g_assert(follow(&s, true) == 0);
    g_assert(!rooms_finds(&s.f, tag + 1));
    store_local_pool(s.f.content.store)->hash[s.rb->tag[AT]] = tag;
    scene_end(&s);
}

/* What is not in memory is not brought there for it. */
static void test_away(void)
{
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    scatter(&s, 2);
    g_assert(madvise(s.a->addr + (AT + 9) * PAGE, PAGE, MADV_DONTNEED) == 0);
    g_assert(gather(&s) == 0);
    rooms_scatter(&s.f, s.rb, AT, 2, LEN, 2);
    /* that one alone */
    g_assert(follow_one(&s, s.ra, true) == 1);
    mem_check(s.a);
    g_assert(follow_one(&s, s.ra, true) == 0);
    scene_end(&s);
}

/*
 * A thread writes to a page that maps one slot and another by turns, and sees
 * what it has written, for as long as nobody else is to write there.
 */
typedef struct Writer {
    atomic_bool ends;
    atomic_uint turn;           /* odd: the writer's */
    volatile uint64_t *word;    /* volatile: memory, each time */
    uint64_t writes;
} Writer;

static void *writer_main(void *opaque)
{
    Writer *w = opaque;
    uint64_t value = 1;

    while (!atomic_load(&w->ends)) {
        for (unsigned i = 0; i < 100; i++) {
            for (unsigned k = 0; k < ALL; k += 5) {
                w->word[k * PAGE / sizeof(uint64_t)] = value + k;
            }
            for (unsigned k = 0; k < ALL; k += 5) {
                g_assert(w->word[k * PAGE / sizeof(uint64_t)] == value + k);
            }
            w->writes++;
            value++;
        }
    }
    return NULL;
}

static void test_race(void)
{
    size_t moved = 0, kept = 0;
    Writer w = { false };
    pthread_t thread;
    Scene s;

    if (!scene_start(&s, ROOMS_SHARING)) {
        return;
    }
    still_calls();
    w.word = (uint64_t *)(s.a->addr + AT * PAGE) + 9;
    for (unsigned i = 0; i < 200; i++) {
        /* merged anew, and scattered, while nobody writes */
        mem_fill_run(s.a, AT, ALL, 1 + AT, 1);
        rooms_quiet(&s.f, s.ra, AT, ALL);
        s.f.costs = costs_guess;
        g_assert(rooms_rejoin(&s.f, s.ra, AT, ALL) == ALL);
        scatter(&s, 2);
        atomic_store(&w.ends, false);
        g_assert(pthread_create(&thread, NULL, writer_main, &w) == 0);
        if (i % 2) {
            g_thread_yield();
        }
        moved += gather(&s);
        rooms_scatter(&s.f, s.rb, AT, 1, ALL, 0);
        kept += follow_one(&s, s.ra, true);
        atomic_store(&w.ends, true);
        pthread_join(thread, NULL);
        for (unsigned k = 0; k < ALL; k++) {
            memcpy(s.a->shadow + (AT + k) * PAGE, s.a->addr + (AT + k) * PAGE,
                   PAGE);
        }
        follow(&s, true);
    }
    g_test_message("%zu pages moved while some were written, %zu stayed, in "
                   "%" PRIu64 " writes", moved, kept, w.writes);
    g_assert(moved > 0 && w.writes > 0);
    scene_end(&s);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/gather/run", test_run);
    g_test_add_func("/gather/runs", test_runs);
    g_test_add_func("/gather/age", test_age);
    g_test_add_func("/gather/next", test_next);
    g_test_add_func("/gather/pays", test_pays);
    g_test_add_func("/gather/torn", test_torn);
    g_test_add_func("/gather/edges", test_edges);
    g_test_add_func("/gather/long", test_long);
    g_test_add_func("/gather/twice", test_twice);
    g_test_add_func("/gather/written", test_written);
    g_test_add_data_func("/gather/device/pins", GINT_TO_POINTER(0),
                         test_device);
    g_test_add_data_func("/gather/device/writes", GINT_TO_POINTER(1),
                         test_device);
    g_test_add_func("/gather/behind", test_behind);
    g_test_add_func("/gather/full", test_full);
    g_test_add_func("/gather/many", test_many);
    g_test_add_func("/gather/mistaken", test_mistaken);
    g_test_add_func("/gather/pattern", test_pattern);
    g_test_add_func("/gather/calls", test_calls_fail);
    g_test_add_func("/gather/failed", test_failed);
    g_test_add_func("/gather/goes", test_goes);
    g_test_add_func("/gather/found", test_found);
    g_test_add_func("/gather/away", test_away);
    g_test_add_func("/gather/race", test_race);
    return g_test_run();
}
