/*
 * libksm tests: an engine over a remote store
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The store is a fake (fake-store.h): it answers late, refuses, lies, and loses
 * its peer.  Whatever it does, no byte of memory is another one.
 */
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "engine/follow.h"
#include "engine/ripen.h"
#include "engine/scan.h"
#include "engine/state.h"
#include "house.h"
#include "still.h"
#include "stores.h"
#include "twins.h"

#define PAGES   1024u
#define PASSES  12u

typedef struct Scene {
    KsmEngine *e;
    KsmStore *store;
    Mem *m;
    KsmRegion *r;
} Scene;

static bool scene_start(Scene *s, FakeStoreHabits habits)
{
    fake_habits = habits;
    s->e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP);
    if (!s->e) {
        return false;
    }
    s->store = s->e->content.store;
    s->m = mem_new(PAGES, 0, MEM_SMALL);
    s->r = util_add(s->e, s->m, &mem_ops);
    return true;
}

static void scene_end(Scene *s)
{
    util_end(s->e, s->r, s->m);
}

/* The other member holds what page @i of ours does. */
static uint32_t share(Scene *s, unsigned i)
{
    const char *page = s->m->addr + i * PAGE;

    return fake_store_share(s->store, page, hash_page(&s->e->hasher, page));
}

/* ... and what @n pages from @page on do; the last slot. */
static uint32_t share_run(Scene *s, unsigned page, unsigned n)
{
    uint32_t slot = SLOT_NONE;

    for (unsigned i = page; i < page + n; i++) {
        slot = share(s, i);
    }
    return slot;
}

/*
 * A slot that is known by one tag of its content is found by pages that go by
 * the other one, as they do where the first belongs to another content.
 */
static void test_other_tag(void)
{
    const FakeStoreHabits habits = { .late = 1000000 };
    uint32_t slot, first, second;
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 64, 1000, 1);
    slot = share_run(&s, 0, 64);
    while (fake_store_asked(s.store) < 64) {
        ksm_step(s.e, 1);
    }
    first = s.r->tag[63];
    for (unsigned i = 0; i < 64; i++) {
        uint64_t hash = hash_page(&s.e->hasher, page_addr(s.r, i));

        g_assert(page_state(s.r, i) == PAGE_UNIQUE);
        content_leave(&s.e->content, s.r, i, PAGE_NEW);
        s.r->tag[i] = content_tag_again(s.r, hash);
        s.r->chunk[0].flags |= CHUNK_VISIT;
    }
    while (fake_store_asked(s.store) < 128) {
        ksm_step(s.e, 1);
    }
    second = s.r->tag[63];
    g_assert(second != first);
    g_assert(index_lookup(&s.e->content.index, second) == page_id(s.r, 63));
    fake_store_hurry(s.store);
    util_passes(s.e, 2 * PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 64);
    g_assert(store_tag(s.store, slot) == first);
    /* nothing but slots stands there now */
    g_assert(s.e->content.index.count == 64);
    g_assert(pool_users(engine_pool(s.e), slot) == 2);
    scene_end(&s);
}

/* A page whose tags both belong to others is not asked about by them. */
static void test_taken(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    twins_make(s.e, s.r, s.m);
    mem_fill(s.m, 0, 0);
    mem_fill(s.m, 5, CONTENT_A);
    mem_fill(s.m, 6, CONTENT_Y);
    s.e->scan.crowd = 0;
    util_passes(s.e, PASSES);
    g_assert(fake_store_asked(s.store) == 2);
    mem_fill(s.m, 600, CONTENT_X);
    share(&s, 600);
    util_passes(s.e, PASSES);
    g_assert(page_state(s.r, 600) == PAGE_UNIQUE);
    g_assert(fake_store_asked(s.store) == 2);
    /* when one is free it is */
    mem_fill(s.m, 5, 77777);
    mem_fill(s.m, 600, 0);
    util_passes(s.e, PASSES);
    mem_fill_run(s.m, 640, 64, 5000, 1);
    mem_fill(s.m, 660, CONTENT_X);
    share_run(&s, 640, 64);
    util_passes(s.e, 2 * PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 64);
    scene_end(&s);
}

/* Others' content is found by asking, and mapped, though alone here. */
static void test_found(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    for (unsigned i = 0; i < 512; i++) {
        share(&s, i);
    }
    util_passes(s.e, PASSES);
    g_assert(fake_store_asked(s.store) == PAGES);
    g_assert(fake_store_offered(s.store) == 0);
    g_assert(s.r->count[PAGE_MERGED] == 512);
    g_assert(mem_anonymous(s.m, 0, 512) == 0);
    g_assert(s.r->count[PAGE_UNIQUE] == 512);
    g_assert(util_stats(s.e).verify_failed == 0);
    /* consecutive slots: one mapping */
    g_assert(s.r->runs == 1);
    /* only written pages are asked about again */
    mem_write(s.m, 700, 5, 77);
    util_passes(s.e, PASSES);
    g_assert(fake_store_asked(s.store) == PAGES + 1);
    scene_end(&s);
}

/* What others want is offered, copied, and mapped when the slot is told. */
static void test_wanted(void)
{
    const FakeStoreHabits habits = { .late = 5, .want = 100 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    util_passes(s.e, PASSES);
    g_assert(fake_store_offered(s.store) == PAGES);
    g_assert(s.r->count[PAGE_MERGED] == PAGES);
    g_assert(s.r->runs <= 2);
    g_assert(util_stats(s.e).pages_shared == PAGES);
    scene_end(&s);
}

/* Two answers name one slot: one user of it is enough, the other goes. */
static void test_twice(void)
{
    const FakeStoreHabits habits = { .late = 1000000 };
    uint32_t slot = SLOT_NONE;
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 64, 1000, 1);
    slot = share_run(&s, 0, 64);
    for (unsigned i = 0; i < 2; i++) {
        while (fake_store_asked(s.store) < 64 * (i + 1)) {
            ksm_step(s.e, 1);
        }
        /* the content is elsewhere now, and asked about again */
        mem_fill_run(s.m, 0, 64, 0, 0);
        mem_fill_run(s.m, 512, 64, 1000, 1);
    }
    fake_store_hurry(s.store);
    util_passes(s.e, 2 * PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 64);
    g_assert(pool_users(engine_pool(s.e), slot) == 2);
    scene_end(&s);
}

/* A content is offered once, however many pages here hold it. */
static void test_once(void)
{
    const FakeStoreHabits habits = { .late = 20 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    for (unsigned i = 0; i < 4; i++) {
        mem_fill_run(s.m, i * 256, 256, 1000, 1);
    }
    util_passes(s.e, PASSES);
    g_assert(fake_store_offered(s.store) == 256);
    g_assert(s.r->count[PAGE_MERGED] == PAGES);
    g_assert(util_stats(s.e).pages_shared == 256);
    g_assert(util_stats(s.e).pages_sharing == PAGES - 256);
    scene_end(&s);
}

/* Copied pages are written before the answer comes. */
static void test_written(void)
{
    const FakeStoreHabits habits = { .late = 60 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1000, 1);
    mem_fill_run(s.m, 512, 512, 1000, 1);
    for (unsigned i = 0; i < 100000 && !fake_store_offered(s.store); i++) {
        ksm_step(s.e, 1);
    }
    g_assert(fake_store_offered(s.store) > 0 && s.r->count[PAGE_MERGED] == 0);
    for (unsigned i = 0; i < PAGES; i += 3) {
        mem_write(s.m, i, 8, 0x5a);
    }
    /* the answers come before anybody has seen the writes */
    fake_store_hurry(s.store);
    while (s.e->scan.phase != PHASE_START && !util_stats(s.e).verify_failed) {
        ksm_step(s.e, 1);
    }
    g_assert(util_stats(s.e).verify_failed > 0);
    mem_check(s.m);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] >= PAGES / 3);
    scene_end(&s);
}

/* A slot with another content is found by comparing, and not reused. */
static void test_lie(void)
{
    const FakeStoreHabits habits = { .late = 3, .lie = 50 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1000, 1);
    mem_fill_run(s.m, 512, 512, 1000, 1);
    util_passes(s.e, 4 * PASSES);
    mem_check(s.m);
    g_assert(util_stats(s.e).verify_failed > 0);
    g_assert(s.r->count[PAGE_MERGED] > PAGES / 4);
    scene_end(&s);
}

/* What is refused or comes to nothing is offered again. */
static void test_refused(void)
{
    const FakeStoreHabits habits = { .late = 3, .refuse = 50, .silent = 30 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1000, 1);
    mem_fill_run(s.m, 512, 512, 1000, 1);
    for (unsigned i = 0; i < 40 && s.r->count[PAGE_MERGED] < PAGES - 16;
         i++) {
        ksm_rescan(s.e);
        util_passes(s.e, PASSES);
    }
    /* a page alone among merged ones is not worth an isolation */
    g_assert(s.r->count[PAGE_MERGED] >= PAGES - 16);
    scene_end(&s);
}

/*
 * The peer goes with all questions and offers.  Merged memory stays, zeroes are
 * given back all the same, and offers are repeated when it is back.
 */
static void test_gone(void)
{
    const FakeStoreHabits habits = { .late = 1000000 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 256, 1000, 1);
    mem_fill_run(s.m, 256, 256, 1000, 1);
    for (unsigned i = 0; i < 100000 && !fake_store_offered(s.store); i++) {
        ksm_step(s.e, 1);
    }
    g_assert(fake_store_offered(s.store) == 256);
    fake_store_lose(s.store);
    mem_fill_run(s.m, 512, 256, 0, 0);
    mem_fill_run(s.m, 768, 256, 1000, 1);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 0);
    g_assert(s.r->count[PAGE_GIVEN] == 256);
    g_assert(util_stats(s.e).reasons[KSM_REASON_NO_MEMORY] > 0);
    g_assert(engine_pool(s.e)->sharing == 0);
    fake_store_habits(s.store)->late = 0;
    fake_store_return(s.store);
    ksm_rescan(s.e);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 768);
    fake_store_lose(s.store);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 768);
    scene_end(&s);
}

/* Questions to a peer that went are repeated when it is back. */
static void test_gone_asked(void)
{
    const FakeStoreHabits habits = { .late = 2 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    util_passes(s.e, PASSES);
    g_assert(fake_store_asked(s.store) == PAGES);
    /* too short for any question to fail */
    fake_store_lose(s.store);
    fake_store_return(s.store);
    for (unsigned i = 0; i < 512; i++) {
        share(&s, i);
    }
    util_passes(s.e, 4 * PASSES);
    g_assert(fake_store_asked(s.store) == 2 * PAGES);
    g_assert(s.r->count[PAGE_MERGED] == 512);
    scene_end(&s);
}

/* The same for an offer on its way. */
static void test_gone_offered(void)
{
    const FakeStoreHabits habits = { .late = 1000000 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1000, 1);
    mem_fill_run(s.m, 512, 512, 1000, 1);
    for (unsigned i = 0; i < 100000 && !fake_store_offered(s.store); i++) {
        ksm_step(s.e, 1);
    }
    fake_store_habits(s.store)->late = 0;
    fake_store_lose(s.store);
    fake_store_return(s.store);
    util_passes(s.e, 4 * PASSES);
    g_assert(s.r->count[PAGE_MERGED] == PAGES);
    g_assert(util_stats(s.e).pages_shared == 512);
    scene_end(&s);
}

/* What others want is offered in the end, though offers are refused. */
static void test_wanted_refused(void)
{
    const FakeStoreHabits habits = { .want = 100, .refuse = 60 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    for (unsigned i = 0; i < 20 && s.r->count[PAGE_MERGED] < PAGES; i++) {
        util_passes(s.e, PASSES);
    }
    g_assert(s.r->count[PAGE_MERGED] == PAGES);
    scene_end(&s);
}

/* What was wanted while merging was off is offered afterwards. */
static void test_wanted_off(void)
{
    const FakeStoreHabits habits = { .late = 0 };
    FakeStoreHabits *now;
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    now = fake_store_habits(s.store);
    /* there are books to be kept meanwhile */
    mem_fill_run(s.m, 0, 512, 1000, 1);
    for (unsigned i = 0; i < 512; i++) {
        share(&s, i);
    }
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 512);
    now->late = 1000000;
    now->want = 100;
    mem_fill_run(s.m, 512, 512, 3000, 1);
    for (unsigned i = 0; i < 100000 && fake_store_asked(s.store) < PAGES;
         i++) {
        ksm_step(s.e, 1);
    }
    g_assert(fake_store_asked(s.store) == PAGES);
    ksm_engine_set_run(s.e, false);
    while (!s.r->rests) {
        ksm_step(s.e, 1);
    }
    now->late = 0;
    fake_store_hurry(s.store);
    util_passes(s.e, PASSES);
    g_assert(fake_store_offered(s.store) == 0);
    ksm_engine_set_run(s.e, true);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == PAGES);
    scene_end(&s);
}

/* Vain offers do not keep found contents from being merged. */
static void test_in_vain(void)
{
    const FakeStoreHabits habits = { .silent = 100 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 256, 1000, 1);
    mem_fill_run(s.m, 256, 128, 2000, 1);
    mem_fill_run(s.m, 384, 128, 2000, 1);
    for (unsigned i = 0; i < 256; i++) {
        share(&s, i);
    }
    util_passes(s.e, PASSES);
    g_assert(fake_store_offered(s.store) >= 2 * 128);
    g_assert(s.r->count[PAGE_MERGED] == 256);
    scene_end(&s);
}

/* A run whose content has a slot still gets slots to map as a run. */
static void test_run_later(void)
{
    const FakeStoreHabits habits = { .late = 2 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 100, 1000, 1);
    mem_fill_run(s.m, 100, 100, 1000, 1);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 200);
    mem_fill_run(s.m, 512, 512, 1050, 0);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 712);
    g_assert(fake_store_offered(s.store) == 101);
    g_assert(mem_mappings(s.m) < 100);
    scene_end(&s);
}

/*
 * The region goes while answers are awaited, and another gets its ids: with the
 * same contents, others, or the same elsewhere.
 */
static void test_removed(void)
{
    const FakeStoreHabits habits = { .late = 3, .want = 100 };
    Mem *other;
    KsmRegion *r;
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    /* without a region the engine would not look for answers */
    other = mem_new(512, 0, MEM_SMALL);
    r = util_add(s.e, other, &mem_ops);
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    for (unsigned i = 0; i < 40; i++) {
        for (unsigned k = 0; k < 4 + i / 2; k++) {
            ksm_step(s.e, 1);
        }
        util_remove(s.r);
        for (unsigned k = 0; k < i % 3 * 4; k++) {
            ksm_step(s.e, 1);
        }
        mem_fill_run(s.m, 0, PAGES, 1000 + i % 4 / 2, 1);
        s.r = util_add(s.e, s.m, &mem_ops);
    }
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] > 0);
    mem_check(s.m);
    util_remove(r);
    mem_free(other);
    scene_end(&s);
}

/* Nothing is worth a mapping: slots are told but not mapped. */
static bool held_start(Scene *s)
{
    const FakeStoreHabits habits = { .want = 100 };

    if (!scene_start(s, habits)) {
        return false;
    }
    mem_fill_run(s->m, 0, 512, 1000, 1);
    ksm_engine_set_vma_reserve(s->e, SIZE_MAX);
    return true;
}

/* Steps until @n answers are users. */
static void held_wait(const Scene *s, unsigned n)
{
    for (unsigned i = 0; i < 100000 && asks_count(&s->e->asks).users < n;
         i++) {
        ksm_step(s->e, 1);
    }
    g_assert(asks_count(&s->e->asks).users >= n);
}

/* An answer is a user for some passes; then the slot is free. */
static void test_held(void)
{
    uint32_t place;
    Scene s;

    if (!held_start(&s)) {
        return;
    }
    for (unsigned i = 0; i < 100000 && !engine_pool(s.e)->sharing; i++) {
        ksm_step(s.e, 1);
    }
    g_assert(engine_pool(s.e)->sharing > 0);
    g_assert(util_stats(s.e).pages_shared == 0);
    g_assert(util_stats(s.e).pages_sharing == 0);
    util_passes(s.e, 2);
    g_assert(engine_pool(s.e)->sharing > 0);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 0);
    g_assert(engine_pool(s.e)->sharing == 0);
    place = index_lookup(&s.e->content.index, s.r->tag[3]);
    g_assert(place == PLACE_NONE || !(place & PLACE_SLOT));
    scene_end(&s);
}

/* What could not be merged for long is, when it can, though slots had gone. */
static void test_held_again(void)
{
    Scene s;

    if (!held_start(&s)) {
        return;
    }
    util_passes(s.e, 4 * PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 0);
    ksm_engine_set_vma_reserve(s.e, 0);
    util_passes(s.e, 128);
    g_assert(s.r->count[PAGE_MERGED] == 512);
    scene_end(&s);
}

/* Dropping many takes time: not that of passes, for which it is no reason. */
static void test_held_rest(gconstpointer data)
{
    uint64_t passes;
    Scene s;

    if (!held_start(&s)) {
        return;
    }
    held_wait(&s, 512);
    while (s.e->scan.phase != PHASE_START) {
        ksm_step(s.e, 1);
    }
    s.e->scan.pass += 1000;     /* they are old */
    passes = util_stats(s.e).full_scans;
    if (GPOINTER_TO_INT(data)) {
        /* what is left of them when a pass has ended is not another's */
        ksm_step(s.e, 1000000000);
        passes++;
    } else {
        /* they need none */
        s.e->scan.due = prim.now_ns() + UINT64_C(3600000000000);
        for (unsigned i = 0; i < 1000 && asks_count(&s.e->asks).users; i++) {
            ksm_step(s.e, 0);
        }
    }
    g_assert(asks_count(&s.e->asks).users == 0);
    g_assert(util_stats(s.e).full_scans == passes);
    scene_end(&s);
}

/* ... though merging is off. */
static void test_held_off(void)
{
    Scene s;

    if (!held_start(&s)) {
        return;
    }
    held_wait(&s, 1);
    ksm_engine_set_run(s.e, false);
    for (unsigned i = 0; ksm_step(s.e, 1000000000) >= 0; i++) {
        g_assert(i < 1000);
    }
    g_assert(asks_count(&s.e->asks).users == 0);
    g_assert(store_stats(s.store).sharing == 0);
    scene_end(&s);
}

/* A step at a time: no more than five. */
static void five_passes(KsmEngine *e)
{
    uint64_t until = util_stats(e).full_scans + 5;

    while (util_stats(e).full_scans < until) {
        ksm_step(e, 1);
    }
}

/* While the store takes no questions zeroes and local equals still merge. */
static void test_busy(void)
{
    const FakeStoreHabits habits = { .refuse = 100 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 0, 0);
    mem_fill_run(s.m, 512, 512, 1000, 1);
    /* there is room for one question */
    memset(s.e->asks.ask, 0xff, sizeof(*s.e->asks.ask) * ASKS_MAX);
    s.e->asks.n = ASKS_MAX - 1;
    five_passes(s.e);
    g_assert(s.r->count[PAGE_GIVEN] == 512);
    g_assert(s.r->count[PAGE_UNIQUE] == 1 && s.r->count[PAGE_NEW] == 511);
    g_assert(s.e->asks.n == ASKS_MAX);
    fake_store_habits(s.store)->refuse = 0;
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_UNIQUE] == 512);
    g_assert(fake_store_asked(s.store) == ASKS_MAX + 511);
    scene_end(&s);
}

/* As scene_start(), with huge pages; not added yet. */
static bool scene_huge(Scene *s, FakeStoreHabits habits)
{
    if (!scene_start(s, habits)) {
        return false;
    }
    util_remove(s->r);
    mem_free(s->m);
    s->m = mem_new(PAGES, 0, MEM_HUGE);
    return true;
}

/* Nor are zeroes of a huge page kept back by others that cannot be asked. */
static void test_busy_huge(void)
{
    const FakeStoreHabits habits = { .refuse = 100 };
    Scene s;

    if (!scene_huge(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1000, 1);
    mem_fill_run(s.m, 256, 256, 0, 0);
    s.r = util_add(s.e, s.m, &mem_ops);
    memset(s.e->asks.ask, 0xff, sizeof(*s.e->asks.ask) * ASKS_MAX);
    s.e->asks.n = ASKS_MAX;
    five_passes(s.e);
    g_assert(s.r->count[PAGE_GIVEN] >= 256 - STILL_FEW);
    g_assert(s.r->count[PAGE_UNIQUE] == 0);
    fake_store_habits(s.store)->refuse = 0;
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_UNIQUE] >= 256 - STILL_FEW);
    scene_end(&s);
}

/*
 * What was equal to a page here, which has changed, is asked about: others may
 * hold it.
 */
static void test_equal_gone(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    Scene s;

    if (!scene_huge(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1000, 1);
    mem_fill_run(s.m, 512, 512, 1000, 1);
    s.r = util_add(s.e, s.m, &mem_ops);
    while (s.r->count[PAGE_UNIQUE] + s.r->count[PAGE_EQUAL] < PAGES) {
        ksm_step(s.e, 1);
    }
    g_assert(s.r->count[PAGE_MERGED] == 0);
    mem_fill_run(s.m, 0, 512, 9000, 1);
    for (unsigned i = 0; i < 512; i++) {
        share(&s, 512 + i);
    }
    util_passes(s.e, 3 * PASSES);
    g_assert(s.r->chunk[1].mapped >= 512 - STILL_FEW);
    g_assert(s.r->chunk[0].mapped == 0);
    scene_end(&s);
}

/*
 * What was hashed long ago is offered only up to what has changed since; and
 * not at all where it is no huge page any more.  Either is looked at again.
 */
static void test_offer_old(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    KsmChunk *c;
    Scene s;

    if (!scene_huge(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    s.r = util_add(s.e, s.m, &mem_ops);
    util_passes(s.e, 7);
    c = &s.r->chunk[0];
    if (!(c->flags & CHUNK_LOOSE)) {
        g_test_skip("huge pages cannot be had at present");
        scene_end(&s);
        return;
    }
    g_assert(c->hot == 2 && !(c->flags & CHUNK_VISIT));
    g_assert(sample_run(&s.e->plan.sampler, s.r, 3, 10) == 10);
    mem_fill(s.m, 5, 9000);
    g_assert(sample_run(&s.e->plan.sampler, s.r, 3, 10) == 2);
    g_assert(page_state(s.r, 5) == PAGE_NEW && (c->flags & CHUNK_VISIT));
    g_assert(madvise(s.m->addr, PAGE, MADV_COLD) == 0);
    c->flags &= ~CHUNK_VISIT;
    g_assert(sample_run(&s.e->plan.sampler, s.r, 6, 10) == 0);
    g_assert(c->flags & CHUNK_VISIT);
    util_passes(s.e, 4);
    g_assert(!(c->flags & CHUNK_LOOSE));
    g_assert(page_state(s.r, 5) == PAGE_UNIQUE);
    scene_end(&s);
}

/* A clock of its own: how long the test takes must not matter. */
static uint64_t clock_ahead, clock_read;

static uint64_t now_ahead(void)
{
    return UINT64_C(1000000000) + clock_ahead + 1000 * ++clock_read;
}

/* Steps until nothing is to be done for a while; no pass is due, or pays. */
static void steps_between(Scene *s)
{
    uint64_t passes = util_stats(s->e).full_scans;

    s->e->scan.cost = UINT64_MAX;
    s->e->scan.due = prim.now_ns() + UINT64_C(3600000000000);
    for (unsigned i = 0; i < 100; i++) {
        ksm_step(s->e, 0);
    }
    g_assert(util_stats(s->e).full_scans == passes);
}

/*
 * What others want is not hashed in each pass while memory is short, and asked
 * about again when it is not.
 */
static void test_tight(void)
{
    const FakeStoreHabits habits = { .want = 0 };
    Scene s;

    clock_ahead = 0;
    prim.now_ns = now_ahead;
    if (!scene_start(&s, habits)) {
        prim.now_ns = prim_real.now_ns;
        return;
    }
    /* nobody wants that of the second chunk */
    mem_fill(s.m, 512, 4711);
    util_passes(s.e, 2);
    fake_store_habits(s.store)->want = 100;
    mem_fill_run(s.m, 0, 512, 1000, 1);
    while (util_stats(s.e).full_scans < 40) {
        s.e->memcg.tight = true;
        s.e->memcg.asked = prim.now_ns();
        ksm_step(s.e, 1);
    }
    g_assert(fake_store_offered(s.store) == 0);
    g_assert(fake_store_asked(s.store) == 513);
    s.e->memcg.tight = false;
    util_passes(s.e, PASSES);
    /* those pages and no others */
    g_assert(fake_store_asked(s.store) == 513 + 512);
    g_assert(s.r->count[PAGE_MERGED] == 512);
    scene_end(&s);
    prim.now_ns = prim_real.now_ns;
}

/* A chunk whose pages another one has offered is merged after the answer. */
static void test_parked(void)
{
    const FakeStoreHabits habits = { .late = 60 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    for (unsigned i = 0; i < PAGES; i++) {
        mem_fill_run(s.m, i, 1, 1000, 1);
    }
    s.e->scan.settle = 0;
    while (!fake_store_offered(s.store)) {
        ksm_step(s.e, 1);
    }
    while (s.e->scan.phase != PHASE_START) {
        ksm_step(s.e, 1);
    }
    g_assert(s.r->count[PAGE_MERGED] == 0);
    steps_between(&s);
    g_assert(s.r->count[PAGE_MERGED] == PAGES);
    scene_end(&s);
}

/* Who waits for room is called when answers have come, or none are to come. */
static void test_calls(void)
{
    const FakeStoreHabits habits = { .late = 1000000 };
    StoreAnswer answer;
    uint32_t id;
    KsmAsks *a;
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    a = &s.e->asks;
    mem_fill_run(s.m, 0, 512, 1000, 1);
    while (!asks_awaited(a)) {
        ksm_step(s.e, 1);
    }
    asks_heard(a);      /* nobody waits: a chunk that comes later is not meant */
    for (unsigned i = 0; i < 8; i++) {
        asks_park_busy(a, i);
    }
    g_assert(!asks_call(a, &id));
    asks_heard(a);
    g_assert(asks_call(a, &id) && asks_call(a, &id) && id == 1);
    g_assert(!asks_call(a, &id));
    fake_store_hurry(s.store);
    while (s.store->ops->answers(s.store, &answer, 1)) {
        /* it is of no importance here */
    }
    g_assert(!asks_awaited(a));
    for (unsigned i = 2; i < 8; i++) {
        g_assert(asks_call(a, &id) && id == i);
    }
    g_assert(!asks_call(a, &id));
    scene_end(&s);
}

/*
 * Chunks for whose offers there is no room are called, all of them, but no more
 * at once than can be queued: what is not queued waits for a pass.
 */
static void test_no_room(void)
{
    const FakeStoreHabits habits = { .late = 1000000, .busy = 100 };
    const unsigned chunks = RIPE_MAX + 88;
    Mem *big = mem_new(chunks * 512, 0, MEM_SMALL);
    KsmRegion *r;
    Scene s;

    if (!scene_start(&s, habits)) {
        mem_free(big);
        return;
    }
    for (unsigned i = 0; i < chunks; i++) {
        mem_fill_run(big, i * 512, 32, 1000 + i * 32, 1);
        mem_fill_run(big, i * 512 + 32, 32, 1000 + i * 32, 1);
    }
    r = util_add(s.e, big, &mem_ops);
    while (s.e->asks.busy->length < chunks || s.e->scan.phase != PHASE_START) {
        ksm_step(s.e, 1);
    }
    g_assert(r->count[PAGE_MERGED] == 0);
    fake_store_habits(s.store)->busy = 0;
    fake_store_habits(s.store)->late = 0;
    fake_store_hurry(s.store);
    s.e->costs.isolate_ns = 1;
    do {
        steps_between(&s);
    } while (s.e->asks.busy->length || s.e->scan.n_ripe);
    g_assert(r->count[PAGE_MERGED] == 64 * chunks);
    region_check(r);
    util_remove(r);
    mem_check(big);
    mem_free(big);
    scene_end(&s);
}

/*
 * Each @each-th page of a chunk is known to be equal, a pass has ended, and
 * nothing merged.
 */
static bool ripening_start(Scene *s, unsigned each)
{
    const FakeStoreHabits habits = { .late = 5 };

    if (!scene_start(s, habits)) {
        return false;
    }
    s->store->ripen_ns = UINT64_C(1000000000);
    clock_ahead = 0;
    prim.now_ns = now_ahead;
    mem_fill_run(s->m, 0, 512, 1000, 1);
    for (unsigned i = 0; i < 512; i += each) {
        share(s, i);
    }
    while (s->r->count[PAGE_EQUAL] < 512 / each ||
           s->e->scan.phase != PHASE_START) {
        ksm_step(s->e, 1);
    }
    g_assert(util_stats(s->e).isolations == 0);
    return true;
}

/* So many pages are merged in the end. */
static void ripening_end(Scene *s, unsigned merged)
{
    g_assert(s->r->count[PAGE_MERGED] == merged);
    scene_end(s);
    prim.now_ns = prim_real.now_ns;
}

/* What is told piece by piece is isolated once. */
static void test_ripens(void)
{
    Scene s;

    if (!ripening_start(&s, 1)) {
        return;
    }
    /* it does not wait for a pass */
    s.e->scan.due = prim.now_ns() + UINT64_C(3600000000000);
    g_assert(ksm_step(s.e, 0) <= 200000000);
    g_assert(s.r->count[PAGE_MERGED] == 0);
    clock_ahead = 99000000;
    steps_between(&s);
    g_assert(s.r->count[PAGE_MERGED] == 0);
    clock_ahead = 200000000;
    steps_between(&s);
    g_assert(s.r->count[PAGE_MERGED] == 512);
    g_assert(util_stats(s.e).isolations <= 2);
    ripening_end(&s, 512);
}

/*
 * What is scattered waits until nothing more is told of it; and where something
 * is to come, five times as long.
 */
static void test_ripens_sparse(void)
{
    for (unsigned parked = 0; parked < 2; parked++) {
        uint16_t flag = parked ? CHUNK_PARKED : 0;
        Scene s;

        if (!ripening_start(&s, 4)) {
            return;
        }
        s.e->costs.isolate_ns = 1;
        s.r->chunk[0].flags |= flag;
        for (unsigned i = 1; i <= (parked ? 49 : 9); i++) {
            clock_ahead = i * UINT64_C(100000000);
            steps_between(&s);
            g_assert(s.r->count[PAGE_MERGED] == 0);
        }
        clock_ahead += 200000000;
        steps_between(&s);
        clock_ahead += 200000000;
        steps_between(&s);
        g_assert(s.r->count[PAGE_MERGED] == 128);
        g_assert(util_stats(s.e).isolations <= 2);
        s.r->chunk[0].flags &= ~flag;
        ripening_end(&s, 128);
    }
}

/* A tenth of a second later. */
static void ripening_step(Scene *s)
{
    clock_ahead += 100000000;
    s->e->costs.isolate_ns = UINT64_C(100000000);   /* it is never worth it */
    steps_between(s);
}

/*
 * What is refused for what it costs is refused once more as soon as more may have
 * been told of it, and not with passes; then the next one is to come soon.
 */
static void test_ripens_refused(void)
{
    KsmChunk *c;
    Scene s;

    if (!ripening_start(&s, 32)) {
        return;
    }
    c = &s.r->chunk[0];
    s.e->scan.due = prim.now_ns() + UINT64_C(3600000000000);
    while (!c->late) {
        ripening_step(&s);
    }
    g_assert(c->late == 1 && !c->wait && (c->flags & CHUNK_RIPENING));
    s.e->scan.promise.waits = 0;
    while (c->late == 1) {
        ripening_step(&s);
    }
    g_assert(c->late == 2 && c->wait && !(c->flags & CHUNK_RIPENING));
    g_assert(s.e->scan.promise.waits == 16);
    ripening_end(&s, 0);
}

/* The memory of what ripens is removed. */
static void test_ripens_removed(void)
{
    Scene s;
    Mem *other;
    KsmRegion *r;
    uint32_t id;

    if (!ripening_start(&s, 4)) {
        return;
    }
    id = chunk_id(s.r, 0);
    g_assert(!g_queue_is_empty(&s.e->ripening));
    util_remove(s.r);
    /* another takes its ids, and ripens when the first one's turn comes */
    other = mem_new(512, 0, MEM_SMALL);
    mem_fill_run(other, 0, 512, 1000, 1);
    r = util_add(s.e, other, &mem_ops);
    g_assert(chunk_id(r, 0) == id);
    while (!(r->chunk[0].flags & CHUNK_RIPENING) ||
           s.e->scan.phase != PHASE_START) {
        ksm_step(s.e, 1);
    }
    g_assert(s.e->ripening.length >= 2);
    clock_ahead += UINT64_C(10000000000);
    steps_between(&s);
    g_assert(g_queue_is_empty(&s.e->ripening));
    for (unsigned i = 0; i < PASSES; i++) {
        clock_ahead += UINT64_C(1000000000);
        util_passes(s.e, 1);
    }
    g_assert(r->count[PAGE_MERGED] == 128);
    mem_check(s.m);
    mem_check(other);
    region_check(r);
    util_remove(r);
    ksm_engine_free(s.e);
    mem_free(s.m);
    mem_free(other);
    prim.now_ns = prim_real.now_ns;
}

/* Chunks that wait are looked at together, five times a second at most. */
static void test_ripens_looks(void)
{
    uint64_t moment = 100000000, wait;
    Scene s;

    if (!ripening_start(&s, 4)) {
        return;
    }
    s.e->costs.isolate_ns = 1;
    s.e->scan.due = prim.now_ns() + UINT64_C(3600000000000);
    for (unsigned i = 0; i < 64; i++) {
        chunk_know(s.r, 1);
        s.r->chunk[1].flags &= ~CHUNK_RIPENING;
        ripen_add(s.e, s.r, 1);
        clock_ahead += 1000000;
    }
    clock_ahead += 2 * moment;
    steps_between(&s);
    wait = ripen_wait(s.e);
    g_assert(wait > moment - 1000000 && wait <= 2 * moment);
    /* all had their look, and the one that still waits has it at this time */
    g_assert((prim.now_ns() + wait) % moment < 1000000);
    g_assert(s.e->ripening.length == 1);
    ripening_end(&s, 0);
}

/* What was refused by estimates waits for no more answers. */
static void test_ripens_again(void)
{
    Scene s;

    if (!ripening_start(&s, 4)) {
        return;
    }
    s.e->costs.isolate_ns = 1;
    g_queue_clear_full(&s.e->ripening, g_free);
    s.r->chunk[0].flags &= ~CHUNK_RIPENING;
    ripen_again(s.e, s.r, 0);
    clock_ahead += 210000000;
    steps_between(&s);
    ripening_end(&s, 128);
}

/* ... and what ripens while merging is inhibited is not forgotten. */
static void test_ripens_inhibited(void)
{
    Scene s;

    if (!ripening_start(&s, 1)) {
        return;
    }
    /* for a moment, which no pass sees */
    s.m->inhibited = "a test says so";
    clock_ahead = UINT64_C(1000000000);
    steps_between(&s);
    g_assert(s.r->count[PAGE_MERGED] == 0);
    s.m->inhibited = NULL;
    scan_kick(s.e);
    for (unsigned i = 0; i < PASSES; i++) {
        clock_ahead += UINT64_C(1000000000);
        util_passes(s.e, 1);
    }
    ripening_end(&s, 512);
}

/* Estimates that are too high are doubted till they end, and no pass begins. */
static void test_doubted(void)
{
    Scene s;

    if (!ripening_start(&s, 1)) {
        return;
    }
    s.e->costs.isolate_ns = 10000000;
    steps_between(&s);
    g_assert(s.r->count[PAGE_MERGED] == 0);
    for (unsigned i = 0; i < 14; i++) {
        clock_ahead += 200000000;
        steps_between(&s);
    }
    ripening_end(&s, 512);
}

/* When merging is switched on, the first passes are not rested from. */
static void test_settles(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    util_passes(s.e, PASSES);
    g_assert(s.e->scan.idle_ns > 0);
    ksm_engine_set_run(s.e, false);
    ksm_engine_set_run(s.e, true);
    for (unsigned i = 0; i < 4; i++) {
        util_passes(s.e, 1);
        g_assert(s.e->scan.idle_ns == 0);
    }
    util_passes(s.e, 1);
    g_assert(s.e->scan.idle_ns > 0);
    scene_end(&s);
}

/* Passes that could not ask about all are not those to wait for answers. */
static void test_settles_starved(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    unsigned settle, n = 0;
    uint64_t pass;
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    s.store->ripen_ns = 1000000000;
    util_passes(s.e, PASSES);
    g_assert(s.e->scan.settle == 0);
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    memset(s.e->asks.ask, 0xff, sizeof(*s.e->asks.ask) * ASKS_MAX);
    s.e->asks.n = ASKS_MAX;
    fake_store_habits(s.store)->refuse = 100;
    ksm_engine_set_run(s.e, false);
    ksm_engine_set_run(s.e, true);
    for (unsigned i = 0; i < 50; i++) {
        settle = s.e->scan.settle;
        pass = s.e->scan.pass;
        while (s.e->scan.pass == pass || s.e->scan.phase != PHASE_START) {
            ksm_step(s.e, 1);
        }
        n += s.e->scan.skipped;
        g_assert(!s.e->scan.skipped || s.e->scan.settle == settle);
    }
    g_assert(n > 0);
    fake_store_habits(s.store)->refuse = 0;
    /* those that hashed in vain are: it is not to be done again and again */
    s.e->scan.settle = 3;
    pass = util_stats(s.e).full_scans;
    while (util_stats(s.e).full_scans == pass) {
        s.e->scan.skipped = s.e->scan.in_vain = true;
        ksm_step(s.e, 1);
    }
    g_assert(s.e->scan.settle == 2);
    scene_end(&s);
}

enum { REST_PAYS, REST_DEAR, REST_OWED, REST_SETTLES, REST_MOVES, RESTS };

static const char *const rest_name[RESTS] = {
    "pays", "dear", "owed", "settles", "moves",
};

/*
 * What is merged during a rest shortens it, if it pays for all that the rest is
 * for; not while passes wait for answers anyway, nor what only moves.
 */
static void test_shortens(gconstpointer data)
{
    const uint64_t far = UINT64_C(3600000000000);
    const FakeStoreHabits habits = { .want = 100, .late = 20 };
    int why = GPOINTER_TO_INT(data);
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    util_passes(s.e, PASSES);
    mem_fill_run(s.m, 0, 512, 1000, 1);
    while (!asks_awaited(&s.e->asks) || s.e->scan.phase != PHASE_START) {
        s.e->scan.rhythm.owed = why == REST_OWED ? far : 0;
        ksm_step(s.e, 1);
    }
    g_assert(s.r->count[PAGE_MERGED] == 0);
    if (why != REST_OWED) {
        s.e->scan.cost = why == REST_DEAR ? far : 0;
    }
    s.e->scan.settle = why == REST_SETTLES;
    s.e->follow.phase = why == REST_MOVES ? FOLLOW_MERGE : FOLLOW_NEXT;
    s.e->scan.due = prim.now_ns() + far;
    s.e->scan.rhythm.gained = s.e->scan.rhythm.check_gained = 0;
    s.e->scan.rhythm.judged = 1;
    for (unsigned i = 0; i < 10000 && !s.r->count[PAGE_MERGED]; i++) {
        ksm_step(s.e, 0);
    }
    s.e->follow.phase = FOLLOW_NEXT;
    g_assert(s.r->count[PAGE_MERGED] > 0);
    g_assert((s.e->scan.due < prim.now_ns() + far / 2) == (why == REST_PAYS));
    /* it is not the next pass's, too */
    g_assert((s.e->scan.merged == s.e->total.merged) == (why == REST_PAYS));
    g_assert((s.e->scan.rhythm.gained > 0) == (why == REST_PAYS));
    g_assert((s.e->scan.rhythm.check_gained > 0) == (why == REST_PAYS));
    scene_end(&s);
}

/*
 * What a look found quiet is merged in the pass after the next one where others
 * are asked first.
 */
static void test_late_gains(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    KsmRhythm *m;
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    m = &s.e->scan.rhythm;
    util_passes(s.e, PASSES);
    for (unsigned late = 0; late < 2; late++) {
        s.store->ripen_ns = late;
        do {
            m->checked = prim.now_ns();
            m->judged = 2;
            m->check_gained = 0;
            s.e->total.merged += 1000;
            util_passes(s.e, 1);
        } while (m->check);
        g_assert((m->check_gained > 0) == late && m->judged == 3);
    }
    scene_end(&s);
}

static uint64_t dear;   /* CPU takes so many times what it does */

/* By calls: a pass takes the same on any machine. */
static uint64_t cpu_dear(void)
{
    return util_cpu_by_call() * dear;
}

/* ns that one pass begins after the last one, at least; it pays. */
static uint64_t pass_apart(Scene *s, uint64_t times)
{
    dear = times;
    prim.cpu_ns = cpu_dear;
    s->e->total.merged += 1000000000;
    util_passes(s->e, 1);
    prim.cpu_ns = prim_real.cpu_ns;
    g_assert(s->e->scan.idle_ns == 0);
    return s->e->scan.due - s->e->scan.started;
}

/*
 * Passes where others are asked take a twentieth of the time; not those to wait
 * for answers.
 */
static void test_apart(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    const uint64_t most = UINT64_C(10000000000);
    uint64_t apart;
    KsmScan *scan;
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    scan = &s.e->scan;
    s.store->ripen_ns = 1;
    util_passes(s.e, PASSES);
    clock_ahead = 0;
    prim.now_ns = now_ahead;
    apart = pass_apart(&s, 1000);
    g_assert(scan->took > 2000000 && apart == MIN(scan->took * 20, most));
    g_assert(pass_apart(&s, 1000000) == most);
    scan->settle = 2;
    g_assert(pass_apart(&s, 1000000) < most);
    g_assert(scan->settle == 1 && !scan->took);
    scan->settle = 0;
    s.store->ripen_ns = 0;
    g_assert(pass_apart(&s, 1000000) < most);
    g_assert(scan->took * 20 > most);
    prim.now_ns = prim_real.now_ns;
    scene_end(&s);
}

/*
 * What the others had no time for is asked about in the next pass, and that does
 * not wait for a rest, though at the end they have time again.
 */
static void test_unasked(gconstpointer data)
{
    const FakeStoreHabits habits = { .late = 5 };
    const unsigned chunks = 3 * ASKS_MAX / CHUNK_PAGES;
    Mem *big = mem_new(chunks * CHUNK_PAGES, 0, MEM_SMALL);
    uint64_t pass;
    KsmRegion *r;
    Scene s;

    if (!scene_start(&s, habits)) {
        mem_free(big);
        return;
    }
    /* then chunks are passed over; else they are hashed in vain */
    s.store->ripen_ns = GPOINTER_TO_UINT(data);
    r = util_add(s.e, big, &mem_ops);
    util_passes(s.e, PASSES);
    g_assert(s.e->scan.idle_ns > 0);
    mem_fill_run(big, 0, chunks * CHUNK_PAGES, 1000, 1);
    fake_store_habits(s.store)->refuse = 100;
    while (!s.e->scan.starved || (!s.store->ripen_ns && !s.e->scan.in_vain)) {
        ksm_step(s.e, 1);
    }
    fake_store_habits(s.store)->refuse = 0;
    pass = s.e->scan.pass;
    while (s.e->scan.starved || s.e->scan.phase != PHASE_START) {
        ksm_step(s.e, 1);
    }
    g_assert(s.e->scan.pass == pass);
    g_assert(s.e->scan.skipped == (s.store->ripen_ns > 0));
    g_assert(r->count[PAGE_UNIQUE] < chunks * CHUNK_PAGES);
    /* who is that slow is not to be asked about all again and again */
    g_assert((s.e->scan.idle_ns == 0) == (s.store->ripen_ns > 0));
    util_passes(s.e, 1);
    g_assert(!s.e->scan.in_vain && !s.e->scan.skipped);
    g_assert(r->count[PAGE_UNIQUE] == chunks * CHUNK_PAGES);
    g_assert(fake_store_asked(s.store) == chunks * CHUNK_PAGES);
    util_remove(r);
    mem_check(big);
    mem_free(big);
    scene_end(&s);
}

/* Questions left over when a pass ends do not wait for the next one. */
static void test_unsent(void)
{
    const FakeStoreHabits habits = { .late = 5, .refuse = 100 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    /* util_passes() would wait until they are sent */
    while (s.e->asks.n < PAGES || s.e->scan.phase != PHASE_START) {
        ksm_step(s.e, 1);
    }
    g_assert(fake_store_asked(s.store) == 0);
    fake_store_habits(s.store)->refuse = 0;
    steps_between(&s);
    g_assert(s.e->asks.n == 0 && fake_store_asked(s.store) == PAGES);
    scene_end(&s);
}

/* News were lost: what is alone is asked about again, some time. */
static void test_renewed(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    clock_ahead = 0;
    prim.now_ns = now_ahead;
    mem_fill_run(s.m, 0, PAGES, 1000, 1);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_UNIQUE] == PAGES);
    g_assert(fake_store_asked(s.store) == PAGES);
    for (unsigned i = 0; i < PAGES; i++) {
        share(&s, i);
    }
    util_passes(s.e, PASSES);
    g_assert(fake_store_asked(s.store) == PAGES);
    clock_ahead = UINT64_C(15000000000);
    util_passes(s.e, PASSES);
    g_assert(fake_store_asked(s.store) == PAGES);
    clock_ahead = UINT64_C(21000000000);
    util_passes(s.e, PASSES);
    g_assert(fake_store_asked(s.store) == 2 * PAGES);
    g_assert(s.r->count[PAGE_MERGED] == PAGES);
    scene_end(&s);
    prim.now_ns = prim_real.now_ns;
}

/* Pages that map slots below @slot. */
static unsigned merged_below(const Scene *s, uint32_t slot)
{
    unsigned n = 0;

    for (unsigned i = 0; i < s->r->n_pages; i++) {
        n += page_state(s->r, i) == PAGE_MERGED && s->r->tag[i] < slot;
    }
    return n;
}

/*
 * The next daemon has the same key: by their hashes contents are found in both
 * pools.  A block leaves the old one though nobody maps its first slot.
 */
static void test_follow(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    uint32_t top, tag;
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    mem_fill_run(s.m, 0, 512, 1000, 0);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == 512);
    for (unsigned i = 0; i < 512; i++) {
        uint32_t slot = s.r->tag[i];

        if (page_state(s.r, i) == PAGE_MERGED &&
            store_repeated(s.store, slot) == slot) {
            mem_write(s.m, i, 8, 0x5a);
        }
    }
    util_passes(s.e, PASSES);
    top = engine_pool(s.e)->top;
    g_assert(merged_below(&s, top) > 256);
    tag = store_tag(s.store, 0);
    g_assert(index_lookup(&s.e->content.index, tag) == PLACE_SLOT);
    fake_store_outdate(s.store, top);
    while (s.e->follow.phase == FOLLOW_NEXT) {
        g_assert(follow_step(s.e));
    }
    g_assert(index_lookup(&s.e->content.index, tag) == PLACE_NONE);
    /* ... nor does an old slot that is found all the same keep it there */
    content_publish(&s.e->content, 0);
    util_passes(s.e, 2 * PASSES);
    g_assert(s.r->count[PAGE_MERGED] > 256);
    g_assert(merged_below(&s, top) == 0);
    scene_end(&s);
}

/* The lock is given up between chunks that have nothing to move. */
static void test_follow_steps(void)
{
    const FakeStoreHabits habits = { .late = 5 };
    const unsigned chunks = 64;
    unsigned steps = 0;
    uint32_t top;
    Scene s;

    if (!scene_start(&s, habits)) {
        return;
    }
    util_remove(s.r);
    mem_free(s.m);
    s.m = mem_new(chunks * CHUNK_PAGES, 0, MEM_SMALL);
    s.r = util_add(s.e, s.m, &mem_ops);
    mem_fill_run(s.m, (chunks - 1) * CHUNK_PAGES, CHUNK_PAGES, 1000, 0);
    util_passes(s.e, PASSES);
    top = engine_pool(s.e)->top;
    mem_fill_run(s.m, 0, (chunks - 1) * CHUNK_PAGES, 2000, 0);
    util_passes(s.e, PASSES);
    /* a page that was being moved then is alone now, and not worth it */
    for (unsigned i = 0; i < chunks; i++) {
        g_assert(s.r->chunk[i].mapped > CHUNK_PAGES / 2);
    }
    fake_store_outdate(s.store, top);
    while (s.e->follow.phase == FOLLOW_NEXT) {
        g_assert(follow_step(s.e));
        steps++;
    }
    g_assert(s.e->follow.id == chunks - 1);
    g_assert(steps == chunks / 8);
    scene_end(&s);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_setenv("KSM_TEST_STORE", "fake", TRUE);
    stores_choose();
    g_test_add_func("/answers/found", test_found);
    g_test_add_func("/answers/wanted/all", test_wanted);
    g_test_add_func("/answers/twice", test_twice);
    g_test_add_func("/answers/other-tag", test_other_tag);
    g_test_add_func("/answers/taken", test_taken);
    g_test_add_func("/answers/once", test_once);
    g_test_add_func("/answers/written", test_written);
    g_test_add_func("/answers/lie", test_lie);
    g_test_add_func("/answers/refused", test_refused);
    g_test_add_func("/answers/gone/merged", test_gone);
    g_test_add_func("/answers/gone/asked", test_gone_asked);
    g_test_add_func("/answers/gone/offered", test_gone_offered);
    g_test_add_func("/answers/wanted/refused", test_wanted_refused);
    g_test_add_func("/answers/wanted/off", test_wanted_off);
    g_test_add_func("/answers/in-vain", test_in_vain);
    g_test_add_func("/answers/run-later", test_run_later);
    g_test_add_func("/answers/removed", test_removed);
    g_test_add_func("/answers/held/on", test_held);
    g_test_add_func("/answers/held/again", test_held_again);
    g_test_add_data_func("/answers/held/rest", GINT_TO_POINTER(0),
                         test_held_rest);
    g_test_add_data_func("/answers/held/pass", GINT_TO_POINTER(1),
                         test_held_rest);
    g_test_add_func("/answers/held/off", test_held_off);
    g_test_add_func("/answers/busy/small", test_busy);
    g_test_add_func("/answers/busy/huge", test_busy_huge);
    g_test_add_func("/answers/equal-gone", test_equal_gone);
    g_test_add_func("/answers/offer-old", test_offer_old);
    g_test_add_func("/answers/parked", test_parked);
    g_test_add_func("/answers/ripens/once", test_ripens);
    g_test_add_func("/answers/ripens/sparse", test_ripens_sparse);
    g_test_add_func("/answers/ripens/refused", test_ripens_refused);
    g_test_add_func("/answers/ripens/removed", test_ripens_removed);
    g_test_add_func("/answers/ripens/looks", test_ripens_looks);
    g_test_add_func("/answers/ripens/again", test_ripens_again);
    g_test_add_func("/answers/ripens/inhibited", test_ripens_inhibited);
    g_test_add_func("/answers/tight", test_tight);
    g_test_add_func("/answers/calls", test_calls);
    g_test_add_func("/answers/no-room", test_no_room);
    g_test_add_func("/answers/doubted", test_doubted);
    g_test_add_func("/answers/settles", test_settles);
    g_test_add_func("/answers/settles/starved", test_settles_starved);
    for (int why = 0; why < RESTS; why++) {
        g_autofree char *path = g_strdup_printf("/answers/shortens/%s",
                                                rest_name[why]);

        g_test_add_data_func(path, GINT_TO_POINTER(why), test_shortens);
    }
    g_test_add_data_func("/answers/unasked/vain", GUINT_TO_POINTER(0),
                         test_unasked);
    g_test_add_data_func("/answers/unasked/skipped",
                         GUINT_TO_POINTER(1000000000), test_unasked);
    g_test_add_func("/answers/late-gains", test_late_gains);
    g_test_add_func("/answers/apart", test_apart);
    g_test_add_func("/answers/unsent", test_unsent);
    g_test_add_func("/answers/renewed", test_renewed);
    g_test_add_func("/answers/follow/block", test_follow);
    g_test_add_func("/answers/follow/steps", test_follow_steps);
    return g_test_run();
}
