/*
 * libksm tests: what no member of a group has mappings for
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The peer says that others have a page, too, and that all leave it to the
 * kernel's KSM (room.h of the daemon): it is not offered, its chunk is given to
 * ksmd, and what the pool has is mapped all the same.
 */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/prim.h"
#include "engine/state.h"
#include "house.h"
#include "stores.h"

#define PAGES   1024u
#define PASSES  12u
#define SOME    64u

typedef struct Scene {
    KsmEngine *e;
    KsmStore *store;
    Mem *m;
    KsmRegion *r;
} Scene;

static bool scene_start(Scene *s, bool tail, KsmDirtySource dirty)
{
    KsmConfig config;

    ksm_config_init(&config);
    config.max_cpu = 100;
    config.dirty = dirty;
    config.tail = tail;
    fake_habits = (FakeStoreHabits) { .late = 3, .left = 100 };
    s->e = util_engine_of(&config);
    if (!s->e) {
        return false;
    }
    s->store = s->e->content.store;
    s->m = mem_new(PAGES, 0, MEM_SMALL);
    g_assert(madvise(s->m->addr, PAGES * PAGE, MADV_DONTFORK) == 0);
    s->r = util_add(s->e, s->m, &mem_ops);
    return true;
}

static void scene_end(Scene *s)
{
    region_check(s->r);
    util_end(s->e, s->r, s->m);
}

/* Contents of this process alone: ksmd may run, and such tests beside this. */
static uint32_t seed(void)
{
    return 1000000 + getpid() % 1000 * 100000;
}

static void share(Scene *s, unsigned page, unsigned n)
{
    for (unsigned i = page; i < page + n; i++) {
        const char *at = s->m->addr + i * PAGE;

        fake_store_share(s->store, at, hash_page(&s->e->hasher, at));
    }
}

static uint64_t left_bytes(const Scene *s)
{
    return util_stats(s->e).kernel_left;
}

/* Equal, not offered, and the kernel's; until it is written. */
static void left(KsmDirtySource dirty)
{
    KsmStats stats;
    Scene s;

    if (!scene_start(&s, true, dirty)) {
        return;
    }
    mem_fill_run(s.m, 0, SOME, seed(), 1);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_EQUAL] == SOME && s.r->n_left == SOME);
    g_assert(fake_store_asked(s.store) == SOME);
    util_passes(s.e, PASSES);
    /* it is asked about once, and the chunk is given to ksmd, if there is one */
    g_assert(fake_store_asked(s.store) == SOME);
    g_assert(fake_store_offered(s.store) == 0);
    g_assert(left_bytes(&s) == CHUNK || s.e->tail.refused);
    stats = util_stats(s.e);
    g_assert(stats.pages_sharing == 0);
    g_assert(s.r->n_left + stats.kernel_pages == SOME);
    g_assert(stats.reasons[KSM_REASON_VMA_LIMIT] + stats.kernel_pages == SOME ||
             s.r->chunk[0].why_not != KSM_REASON_NOT_WORTH);
    region_check(s.r);
    /* what is written is asked about again, and the pool may have it by then */
    fake_store_habits(s.store)->left = 0;
    mem_fill_run(s.m, 0, SOME, seed() + 5000, 1);
    share(&s, 0, SOME);
    util_passes(s.e, 2 * PASSES);
    g_assert(s.r->n_left == 0 && s.r->count[PAGE_MERGED] == SOME);
    scene_end(&s);
}

static void test_left(void)
{
    left(KSM_DIRTY_PAGEMAP);
}

static void test_left_checksum(void)
{
    left(KSM_DIRTY_CHECKSUM);
}

/* A slot that comes later is mapped: its content is not the kernel's to find. */
static void test_slot(void)
{
    uint32_t slot[SOME];
    Scene s;

    if (!scene_start(&s, true, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    mem_fill_run(s.m, 0, SOME, seed(), 1);
    util_passes(s.e, PASSES);
    g_assert(s.r->n_left == SOME);
    for (unsigned i = 0; i < SOME; i++) {
        const char *at = s.m->addr + i * PAGE;

        slot[i] = fake_store_share(s.store, at,
                                   hash_page(&s.e->hasher, at));
    }
    for (unsigned i = 0; i < SOME / 2; i++) {
        fake_store_news(s.store, slot[i], s.r->tag[i]);
    }
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == SOME / 2);
    g_assert(s.r->n_left == SOME / 2);
    region_check(s.r);
    scene_end(&s);
}

/* What is left is asked about again, some time: there may be room by then. */
static void test_renewed(void)
{
    Scene s;

    if (!scene_start(&s, false, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    mem_fill_run(s.m, 0, SOME, seed(), 1);
    util_passes(s.e, PASSES);
    g_assert(s.r->n_left == SOME);
    fake_store_habits(s.store)->left = 0;
    share(&s, 0, SOME);
    s.e->renewed_ns -= UINT64_C(1000000000000);
    util_passes(s.e, PASSES);
    g_assert(s.r->count[PAGE_MERGED] == SOME && s.r->n_left == 0);
    scene_end(&s);
}

/* Writes to it are seen where memory was freed beside it. */
static void test_beside_freed(void)
{
    Scene s;

    if (!scene_start(&s, false, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    mem_fill_run(s.m, 0, SOME, seed(), 1);
    mem_fill_run(s.m, 100, SOME, seed() + SOME, 1);
    util_passes(s.e, PASSES);
    g_assert(s.r->n_left == 2 * SOME);
    g_assert(ksm_free_hint(s.r, 100 * PAGE, SOME * PAGE) == 0);
    for (unsigned i = 100; i < 100 + SOME; i++) {
        mem_fill(s.m, i, 0);
    }
    g_assert(s.r->chunk[0].flags & CHUNK_BLIND);
    mem_fill_run(s.m, 0, SOME, seed() + 5000, 1);
    util_passes(s.e, 1);
    for (unsigned i = 0; i < SOME; i++) {
        g_assert(page_state(s.r, i) != PAGE_EQUAL);
    }
    util_passes(s.e, PASSES);
    scene_end(&s);
}

/* Pages equal to one that is left are merged with it here. */
static void test_twins(void)
{
    Scene s;

    if (!scene_start(&s, false, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    mem_fill_run(s.m, 0, SOME, seed(), 1);
    util_passes(s.e, PASSES);
    mem_fill_run(s.m, CHUNK_PAGES, SOME, seed(), 1);
    util_passes(s.e, 2 * PASSES);
    g_assert(fake_store_offered(s.store) == SOME);
    g_assert(s.r->count[PAGE_MERGED] == 2 * SOME && s.r->n_left == 0);
    scene_end(&s);
}

/* What is said of a page that is not there any more, or was never asked about. */
static void test_gone(void)
{
    Scene s;

    if (!scene_start(&s, true, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    fake_store_habits(s.store)->late = 100000;
    mem_fill_run(s.m, 0, SOME, seed(), 1);
    while (fake_store_asked(s.store) < SOME) {
        ksm_step(s.e, 1);
    }
    mem_fill_run(s.m, 0, SOME / 2, seed() + 9000, 1);
    g_assert(ksm_discard(s.r, SOME / 2 * PAGE, SOME / 4 * PAGE) == 0);
    for (unsigned i = SOME / 2; i < SOME * 3 / 4; i++) {
        mem_fill(s.m, i, 0);
    }
    fake_store_habits(s.store)->left = 0;
    fake_store_hurry(s.store);
    fake_store_habits(s.store)->late = 3;
    util_passes(s.e, PASSES);
    g_assert(s.r->n_left == SOME / 4);
    scene_end(&s);
}

/* As it is told now: it is once a second. */
static StoreRoom room_of(Scene *s)
{
    s->e->tail.room_ns = 0;
    util_passes(s->e, 1);
    return fake_store_room(s->store);
}

/* How many mappings there are, and what waits for them. */
static void test_room(void)
{
    StoreRoom room;
    Scene s;

    if (!scene_start(&s, true, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    /* as many on any machine */
    prim.close(s.e->vmas.maps);
    s.e->vmas.maps = -ENOENT;
    vmas_recount(&s.e->vmas);
    vmas_left(&s.e->vmas);
    util_passes(s.e, 1);
    room = room_of(&s);
    g_assert(room.waiting == 0 && room.mappings > s.e->vmas.limit / 2);
    g_assert(room.mappings < s.e->vmas.limit - s.e->vmas.limit / 16);
    mem_fill_run(s.m, 0, SOME, seed(), 1);
    util_passes(s.e, PASSES);
    /* what is left does not wait for any */
    g_assert(s.r->n_left == SOME);
    g_assert(room_of(&s).waiting == 0);
    s.e->vmas.used = s.e->vmas.limit - s.e->vmas.limit / 16;
    util_passes(s.e, 1);
    g_assert(room_of(&s).mappings == 0);
    /* without mappings for them, equal pages wait */
    fake_store_habits(s.store)->left = 0;
    for (unsigned i = 0; i < SOME; i++) {
        mem_fill(s.m, CHUNK_PAGES + 4 * i, seed() + 7000 + i);
        share(&s, CHUNK_PAGES + 4 * i, 1);
    }
    util_passes(s.e, PASSES);
    g_assert(room_of(&s).waiting == SOME);
    /* a kernel without KSM is left nothing */
    s.e->tail.refused = true;
    util_passes(s.e, 1);
    g_assert(room_of(&s).mappings == STORE_NO_TAIL);
    scene_end(&s);
}

/* Who leaves nothing to the kernel says nothing. */
static void test_room_untold(void)
{
    Scene s;

    if (!scene_start(&s, false, KSM_DIRTY_PAGEMAP)) {
        return;
    }
    util_passes(s.e, PASSES);
    g_assert(room_of(&s).mappings == 0);
    scene_end(&s);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_setenv("KSM_TEST_STORE", "fake", TRUE);
    stores_choose();
    g_test_add_func("/left/pagemap", test_left);
    g_test_add_func("/left/checksum", test_left_checksum);
    g_test_add_func("/left/slot", test_slot);
    g_test_add_func("/left/renewed", test_renewed);
    g_test_add_func("/left/beside-freed", test_beside_freed);
    g_test_add_func("/left/twins", test_twins);
    g_test_add_func("/left/gone", test_gone);
    g_test_add_func("/left/room", test_room);
    g_test_add_func("/left/room/untold", test_room_untold);
    return g_test_run();
}
