/*
 * libksm tests: the rooms below the engine, built from their parts
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>

#include "base/prim.h"
#include "base/tsan.h"
#include "fake-store.h"
#include "memory/admit.h"
#include "memory/attr.h"
#include "merge/quiet.h"
#include "rooms.h"
#include "scatter.h"
#include "share/store-local.h"

static int uffd_open(uint64_t features)
{
    int fd = prim.uffd();
    int ret = fd < 0 ? fd : prim.uffd_api(fd, features);

    if (fd >= 0 && ret < 0) {
        prim.close(fd);
    }
    return ret < 0 ? ret : fd;
}

static bool uffds_open(Rooms *f)
{
    f->uffd = uffd_open(UFFD_MOVE | UFFD_WP | UFFD_WP_SHMEM | UFFD_WP_ASYNC);
    f->wp_async = f->uffd >= 0;
    if (f->uffd < 0) {
        f->uffd = uffd_open(UFFD_MOVE);
    }
    f->uffd_wp = f->uffd < 0 ? -1 : uffd_open(UFFD_WP | UFFD_WP_SHMEM);
    return f->uffd >= 0;
}

static uint64_t seed_fixed(void)
{
    return UINT64_C(0x6b736d);
}

/* The only place with a store. */
static void content_open(Rooms *f, unsigned max_sharing)
{
    int err = 0;
    KsmStore *store = g_getenv("KSM_TEST_STORE")
                      ? fake_store_new(max_sharing, &err)
                      : store_local_new(max_sharing, &err);

    g_assert(store);
    prim.random = seed_fixed;
    hasher_init(&f->hasher, store->ops->seed(store));
    content_init(&f->content, &f->dir, store);
    asks_init(&f->asks, store);
    if (f->uffd_wp < 0) {
        store_keep_all(store);
    }
}

static KsmPool *pool(const Rooms *f)
{
    return fake_store_pool(f->content.store);
}

static void connect_below(Rooms *f, KsmDirtySource dirty)
{
    f->dirty = (KsmDirty) {
        .uffd = f->uffd,
        .wp_async = f->wp_async,
        .source = dirty,
        .kinds = &f->kinds,
        .content = &f->content,
    };
    f->plan = (KsmPlan) {
        .content = &f->content,
        .asks = &f->asks,
        .hasher = &f->hasher,
        .regions = f->regions,
        .vmas = &f->vmas,
        .cut = &f->cut,
        .costs = &f->costs,
        .memcg = &f->memcg,
        .sampler = { &f->content, &f->hasher, &f->kinds },
        .split_min_pages = 64,
        .stall_limit_ns = 1000000,
    };
}

static void connect(Rooms *f)
{
    f->stage = (KsmStage) {
        .uffd = f->uffd,
        .wp_async = f->wp_async,
        .urgent = &f->urgent,
        .kinds = &f->kinds,
        .costs = &f->costs,
        .vmas = &f->vmas,
    };
    f->merge = (KsmMerge) {
        .plan = &f->plan,
        .stage = &f->stage,
        .turn = &f->turn,
        .content = &f->content,
        .hasher = &f->hasher,
        .dirty = &f->dirty,
        .vmas = &f->vmas,
        .costs = &f->costs,
    };
    f->restore = (KsmRestore) {
        .uffd = f->uffd,
        .uffd_wp = f->uffd_wp,
        .urgent = &f->urgent,
        .kinds = &f->kinds,
        .vmas = &f->vmas,
        .content = &f->content,
        .dirty = &f->dirty,
    };
    f->rejoin = (KsmRejoin) {
        .uffd_wp = f->uffd_wp,
        .urgent = &f->urgent,
        .content = &f->content,
        .hasher = &f->hasher,
        .vmas = &f->vmas,
        .cut = &f->cut,
        .costs = &f->costs,
    };
    f->gather = (KsmGather) {
        .rejoin = &f->rejoin,
        .hasher = &f->hasher,
        .kinds = &f->kinds,
        .max_sharing = f->gather.max_sharing,
    };
}

bool rooms_open(Rooms *f, KsmDirtySource dirty, unsigned max_sharing)
{
    memset(f, 0, sizeof(*f));
    if (!uffds_open(f)) {
        g_test_skip("no userfaultfd with UFFDIO_MOVE (Linux 6.8)");
        return false;
    }
    if (dirty == KSM_DIRTY_PAGEMAP && !f->wp_async) {
        g_test_skip("UFFD_FEATURE_WP_ASYNC is Linux 6.7");
        prim.close(f->uffd);
        if (f->uffd_wp >= 0) {
            prim.close(f->uffd_wp);
        }
        return false;
    }
    /* gains must not depend on the machine or its load */
    prim.cpu_ns = util_cpu_by_call;
    lock_init(&f->lock);
    f->turn.lock = &f->lock;
    g_assert(kinds_open(&f->kinds) == 0);
    directory_init(&f->dir);
    f->regions = g_ptr_array_new();
    vmas_init(&f->vmas, 25, 0);
    costs_init(&f->costs);
    memcg_init(&f->memcg, "/");
    content_open(f, max_sharing);
    connect_below(f, dirty);
    f->gather.max_sharing = max_sharing;
    connect(f);
    dirty_init(&f->dirty);
    g_assert(stage_init(&f->stage) == 0);
    return true;
}

void rooms_close(Rooms *f)
{
    g_assert(f->n_regions == 0);
    g_assert(rooms_shared(f) == 0);
    /* an answer on its way is a user */
    g_assert(rooms_remote(f) || f->content.index.count == 0);
    stage_close(&f->stage);
    dirty_fini(&f->dirty);
    asks_free(&f->asks);
    content_free(&f->content);
    memcg_free(&f->memcg);
    vmas_close(&f->vmas);
    directory_free(&f->dir);
    g_ptr_array_free(f->regions, TRUE);
    kinds_close(&f->kinds);
    lock_destroy(&f->lock);
    prim.close(f->uffd);
    if (f->uffd_wp >= 0) {
        prim.close(f->uffd_wp);
    }
    prim.cpu_ns = prim_real.cpu_ns;
}

KsmRegion *rooms_add(Rooms *f, Mem *m, const KsmRegionOps *ops)
{
    KsmRegion *r = g_new0(KsmRegion, 1);

    region_init(r, m->addr, m->pages * PAGE, -1, ops, m);
    g_assert(!admit(r));
    g_assert(region_alloc(r) == 0);
    g_assert(dirty_choose(&f->dirty, r) == 0);
    g_assert(index_reserve(&f->content.index, directory_pages(&f->dir) +
                                              r->n_pages) == 0);
    g_assert(content_reserve_store(&f->content, directory_pages(&f->dir) +
                                                r->n_pages) == 0);
    g_assert(directory_enter(&f->dir, r) == 0);
    g_assert(f->n_regions < G_N_ELEMENTS(f->region));
    f->region[f->n_regions++] = r;
    g_ptr_array_add(f->regions, r);
    return r;
}

void rooms_forget(Rooms *f, KsmRegion *r)
{
    unsigned kept = 0;

    for (unsigned i = 0; i < f->n_regions; i++) {
        if (f->region[i] != r) {
            f->region[kept++] = f->region[i];
        }
    }
    g_assert(kept + 1 == f->n_regions);
    g_assert(g_ptr_array_remove(f->regions, r));
    f->n_regions = kept;
    r->leaving = true;
    for (size_t i = region_first(r); i < region_end(r); i++) {
        content_leave(&f->content, r, i, PAGE_HOLE);
    }
    directory_leave(&f->dir, r);
    store_flush(f->content.store);
    region_fini(r);
    g_free(r);
}

void rooms_remove(Rooms *f, KsmRegion *r)
{
    size_t page = region_first(r);

    g_assert(rooms_unmerge(f, r, region_first(r), r->len / PAGE) == 0);
    while (page < region_end(r)) {
        g_assert(dirty_pause(&f->dirty, r, &page) == 0);
    }
    rooms_forget(f, r);
}

/* Notes what the page tables say; true: hash it. */
static bool page_look(Rooms *f, KsmRegion *r, size_t page, uint8_t kind)
{
    bool there = (kind & PM_PRESENT) && !(kind & PM_ZEROPFN);
    bool asked = r->dirty != KSM_DIRTY_CHECKSUM;
    PageState s = page_state(r, page);

    if (s == PAGE_OUTSIDE || s == PAGE_BROKEN) {
        return false;
    }
    if (s == PAGE_MERGED) {
        if (kind_is_anonymous(kind)) {
            rooms_break(f, r, page);
            f->broken++;
        }
        return false;
    }
    if (!there && s == PAGE_BARRED) {
        return false;
    }
    if (!there) {
        if (s != PAGE_GIVEN || kind & PM_SWAPPED) {
            content_leave(&f->content, r, page,
                          kind & PM_SWAPPED ? PAGE_SWAPPED : PAGE_HOLE);
        }
        return false;
    }
    if (s == PAGE_HOLE || s == PAGE_GIVEN || s == PAGE_SWAPPED ||
        s == PAGE_BARRED) {
        content_leave(&f->content, r, page, PAGE_NEW);
        page_mark(r, page, asked);
    } else if (s == PAGE_PINNED || s == PAGE_BUSY) {
        bool written = r->state[page] & PAGE_WRITTEN;

        content_leave(&f->content, r, page, PAGE_NEW);
        page_mark(r, page, written);
    }
    return !asked || (page_state(r, page) == PAGE_NEW &&
                      !(r->state[page] & PAGE_WRITTEN));
}

/* The page, not in the books yet, has the tag. */
static void page_tag(Rooms *f, KsmRegion *r, size_t page, uint32_t tag)
{
    uint32_t place = index_lookup(&f->content.index, tag);

    r->tag[page] = tag;
    page_set(r, page, place == PLACE_NONE ? PAGE_UNIQUE : PAGE_EQUAL);
    if (place == PLACE_NONE) {
        content_enter(&f->content, r, page);
    } else {
        content_met(&f->content, place);
    }
}

static void page_hash(Rooms *f, KsmRegion *r, size_t page)
{
    uint64_t hash = hash_page(&f->hasher, page_addr(r, page));
    uint32_t again = content_tag_again(r, hash);
    uint32_t tag = r->tag[page] == again ? again : content_tag(r, hash);

    if (page_state(r, page) != PAGE_NEW && r->tag[page] == tag) {
        return;
    }
    if (store_is_remote(f->content.store) && !asks_have_room(&f->asks, 1)) {
        return;
    }
    if (hash == f->hasher.zero) {
        content_leave(&f->content, r, page, PAGE_ZEROES);
        r->tag[page] = tag;
    } else {
        content_leave(&f->content, r, page, PAGE_NEW);
        page_tag(f, r, page, tag);
        if (store_is_remote(f->content.store) &&
            page_state(r, page) == PAGE_UNIQUE) {
            asks_add(&f->asks, r, page, hash);
        }
    }
}

static void chunk_look(Rooms *f, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    size_t first = MAX(chunk * CHUNK_PAGES, region_first(r));
    size_t end = MIN((chunk + 1) * CHUNK_PAGES, region_end(r));
    uint8_t kinds[CHUNK_PAGES], all = 0;

    if (kinds_ask(&f->kinds, page_addr(r, first), end - first, KINDS_ALL,
                  kinds) < 0) {
        return;
    }
    for (size_t i = first; i < end; i++) {
        all |= kinds[i - first];
        if (page_look(f, r, i, kinds[i - first])) {
            page_hash(f, r, i);
        }
    }
    if (!all && chunk_is_bare(r, chunk)) {
        return;
    }
    chunk_know(r, chunk);
    c->flags &= ~CHUNK_HUGE;
    c->flags |= all & PM_HUGE ? CHUNK_HUGE : 0;
    if ((all & PM_PRESENT) && !(c->flags & CHUNK_ARMED)) {
        dirty_arm(&f->dirty, r, chunk);
    }
    if (c->flags & CHUNK_LOOSE) {
        /* who looks at what is not watched lives a floor above */
        dirty_fasten(&f->dirty, r, chunk);
    }
}

/* Merges the chunk, however often it was tried for nothing. */
static unsigned chunk_merge(Rooms *f, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    unsigned merged;
    bool made;

    c->flags &= ~CHUNK_QUEUED;
    c->wait = 0;
    if (region_inhibited(r) || !plan_ripe(&f->plan, r, chunk)) {
        return 0;
    }
    made = plan_make(&f->plan, r, chunk);
    for (unsigned i = 0; i < f->plan.n_partners; i++) {
        size_t other;
        KsmRegion *o = directory_chunk(&f->dir, f->plan.partner[i], &other);

        o->chunk[other].flags |= CHUNK_QUEUED;
    }
    if (!made) {
        return 0;
    }
    lock_take(&f->lock);
    merged = merge_plan(&f->merge);
    lock_release(&f->lock);
    for (unsigned i = 0; i < f->merge.n_collided; i++) {
        MergeCollided *col = &f->merge.collided[i];

        content_leave(&f->content, r, col->page, PAGE_NEW);
        page_tag(f, r, col->page, col->tag);
    }
    f->merged += merged;
    return merged;
}

/* The page with that id has an equal, if it still has that tag. */
static void page_equal(Rooms *f, uint32_t id, uint32_t tag)
{
    size_t page;
    KsmRegion *r = directory_page(&f->dir, id, &page);

    if (r && r->tag[page] == tag) {
        content_met(&f->content, id);
        page_chunk(r, page)->flags |= CHUNK_QUEUED;
    }
}

static void slot_found(Rooms *f, const StoreAnswer *a)
{
    uint32_t place = index_lookup(&f->content.index, a->tag);
    unsigned one = 1;

    asks_hold(&f->asks, a->slot, f->passes, prim.now_ns());
    asks_answered(&f->asks, a->tag);
    if (place == PLACE_NONE || !(place & PLACE_SLOT) ||
        store_run(f->content.store, place & ~PLACE_SLOT, &one) == SLOT_NONE) {
        uint32_t met = content_publish(&f->content, a->slot);

        if (met != PLACE_NONE) {
            page_equal(f, met, a->tag);
        }
    }
    page_equal(f, a->id, a->tag);
}

/* Takes a remote store's answers; true: more will come. */
static bool take_answers(Rooms *f)
{
    KsmStore *s = f->content.store;
    StoreAnswer a[64];
    unsigned n;

    if (!store_is_remote(s)) {
        return false;
    }
    asks_send(&f->asks);
    do {
        n = s->ops->answers(s, a, G_N_ELEMENTS(a));
        for (unsigned i = 0; i < n; i++) {
            /* nobody else could want a page */
            g_assert(a[i].what != ANSWER_WANTED);
            if (a[i].what == ANSWER_SLOT) {
                slot_found(f, &a[i]);
            } else if (a[i].what == ANSWER_REFUSED) {
                asks_answered(&f->asks, a[i].tag);
            }
        }
    } while (n == G_N_ELEMENTS(a));
    return f->asks.n || s->ops->awaited(s);
}

static void region_sync(Rooms *f, KsmRegion *r)
{
    if (!region_inhibited(r)) {
        dirty_resume(&f->dirty, r);
    }
    for (size_t i = 0; i < r->n_chunks;) {
        i = dirty_sync(&f->dirty, r, i, f->passes % CHECK_PASSES == 0);
    }
}

unsigned rooms_pass(Rooms *f)
{
    unsigned merged = 0;

    f->passes++;
    while (index_step(&f->content.index) != INDEX_DONE) {
        /* until it is as large as it has to be */
    }
    for (unsigned i = 0; i < f->n_regions; i++) {
        KsmRegion *r = f->region[i];

        region_sync(f, r);
        for (size_t c = 0; c < r->n_chunks; c++) {
            chunk_look(f, r, c);
            merged += chunk_merge(f, r, c);
        }
    }
    take_answers(f);
    /* what holds the other copies */
    for (unsigned i = 0; i < f->n_regions; i++) {
        KsmRegion *r = f->region[i];

        for (size_t c = 0; c < r->n_chunks; c++) {
            if (r->chunk[c].flags & CHUNK_QUEUED) {
                merged += chunk_merge(f, r, c);
            }
        }
    }
    asks_drop(&f->asks, f->passes);
    store_pass(f->content.store);
    while (store_tidy(f->content.store)) {
        /* a piece at a time */
    }
    return merged;
}

void rooms_passes(Rooms *f, unsigned n)
{
    for (unsigned left = n; left; left--) {
        rooms_pass(f);
        if (take_answers(f)) {
            /* pages put back meanwhile look written for a while */
            left = MAX(left, 5);
        }
    }
}

int rooms_unmerge(Rooms *f, KsmRegion *r, size_t page, size_t n)
{
    int ret;

    lock_take(&f->lock);
    ret = restore_unmerge(&f->restore, &f->lock, r, page, n);
    store_flush(f->content.store);
    lock_release(&f->lock);
    return ret;
}

int rooms_restore(Rooms *f, KsmRegion *r, size_t page, size_t n)
{
    return restore_pages(&f->restore, r, page, n);
}

void rooms_vma_reserve(Rooms *f, size_t mappings)
{
    f->vmas.reserve = mappings;
    vmas_recount(&f->vmas);
}

void rooms_discard(Rooms *f, KsmRegion *r, size_t page, size_t n)
{
    size_t end = page + n;

    g_assert(attr_map_anonymous(r, page_addr(r, page), n * PAGE) == 0);
    for (size_t i = page; i < end; i++) {
        content_leave(&f->content, r, i, PAGE_HOLE);
    }
    dirty_track(&f->dirty, r, page_addr(r, page), n * PAGE);
    for (size_t c = page / CHUNK_PAGES;
         c <= end / CHUNK_PAGES && c < r->n_chunks; c++) {
        region_count_runs(r, c);
    }
}

/* Is it one huge page? */
static bool is_huge(Rooms *f, const KsmRegion *r, size_t page, unsigned n)
{
    uint8_t kind;

    return n == CHUNK_PAGES &&
           kinds_ask(&f->kinds, page_addr(r, page), 1, PM_HUGE, &kind) == 0 &&
           (kind & PM_HUGE);
}

bool rooms_isolate(Rooms *f, RoomsSpan *span, KsmRegion *r, size_t page,
                   unsigned n)
{
    *span = (RoomsSpan) {
        .s = {
            .home = page_addr(r, page),
            .n = n,
            .huge = is_huge(f, r, page, n),
            .tracked = r->tracking,
            .ops = r->ops,
            .opaque = r->opaque,
        },
        .region = r,
    };
    prim.signals_block(&span->signals);
    return stage_isolate(&f->stage, &span->s);
}

void rooms_put_back(Rooms *f, RoomsSpan *span)
{
    stage_put_back(&f->stage, &span->s, 0, span->s.n);
}

void rooms_let_go(Rooms *f, RoomsSpan *span)
{
    Isolation *s = &span->s;

    stage_release(&f->stage, s);
    if (s->registered || s->untracked) {
        dirty_track(&f->dirty, span->region, s->home, s->n * PAGE);
    }
    prim.signals_restore(&span->signals);
}

void rooms_release(Rooms *f, RoomsSpan *span)
{
    rooms_let_go(f, span);
    stage_empty(&f->stage);
}

bool rooms_remote(const Rooms *f)
{
    return store_is_remote(f->content.store);
}

uint64_t rooms_shared(const Rooms *f)
{
    /* but for what only answers use */
    return store_stats(f->content.store).shared - asks_count(&f->asks).slots;
}

uint64_t rooms_sharing(const Rooms *f)
{
    return store_stats(f->content.store).sharing -
           asks_count(&f->asks).users - rooms_shared(f);
}

unsigned rooms_users(const Rooms *f, uint32_t slot)
{
    /* but for an answer */
    return store_users(f->content.store, slot) -
           (rooms_remote(f) && g_hash_table_contains(f->asks.held_slots,
                                                     GUINT_TO_POINTER(slot)));
}

unsigned rooms_patterns(const Rooms *f)
{
    return g_hash_table_size(pool(f)->patterns);
}

uint32_t rooms_pattern(Rooms *f, uint32_t slot)
{
    return store_repeated(f->content.store, slot);
}

char *rooms_slot(Rooms *f, uint32_t slot)
{
    return pool(f)->view + slot * PAGE;
}

void rooms_slot_write(Rooms *f, uint32_t slot, const char *text)
{
    ssize_t len = strlen(text);

    g_assert(pwrite(pool(f)->fd, text, len, (off_t)slot * PAGE) == len);
}

bool rooms_finds_slot(const Rooms *f, uint32_t tag, uint32_t slot)
{
    return index_lookup(&f->content.index, tag) == (slot | PLACE_SLOT);
}

bool rooms_finds(const Rooms *f, uint32_t tag)
{
    return index_lookup(&f->content.index, tag) != PLACE_NONE;
}

void rooms_mistake(Rooms *f, KsmRegion *r, size_t page, uint32_t tag)
{
    content_leave(&f->content, r, page, PAGE_EQUAL);
    r->tag[page] = tag;
    page_chunk(r, page)->flags |= CHUNK_VISIT;
}

void rooms_break(Rooms *f, KsmRegion *r, size_t page)
{
    content_leave(&f->content, r, page, PAGE_BROKEN);
}

static void quiet_one(Rooms *f, KsmRegion *r, size_t page)
{
    uint32_t place;

    rooms_break(f, r, page);
    KSM_TSAN_IGNORE_BEGIN();    /* it may be written */
    r->tag[page] = content_tag(r, hash_page(&f->hasher, page_addr(r, page)));
    KSM_TSAN_IGNORE_END();
    r->history[page] = QUIET_LOOKS << 4;
    place = index_lookup(&f->content.index, r->tag[page]);
    if (place == PLACE_NONE) {
        g_assert(content_enter(&f->content, r, page));
    } else {
        content_met(&f->content, place);
        page_again(r, page, true);
    }
}

void rooms_quiet(Rooms *f, KsmRegion *r, size_t page, size_t n)
{
    for (size_t i = page; i < page + n; i++) {
        quiet_one(f, r, i);
    }
}

unsigned rooms_rejoin(Rooms *f, KsmRegion *r, size_t page, unsigned n)
{
    bool tried = false;
    unsigned merged = rejoin_pages(&f->rejoin, r, page, n, &tried);

    g_assert(tried || !merged);
    return merged;
}

void rooms_scatter(Rooms *f, KsmRegion *r, size_t page, unsigned pieces,
                   unsigned len, unsigned gap)
{
    scatter_pages(&f->rejoin, r, page, pieces, len, gap);
}

void rooms_age(Rooms *f, KsmRegion *r)
{
    for (size_t c = 0; c < r->n_chunks; c++) {
        for (unsigned i = 0; i < GATHER_AGE; i++) {
            gather_age(r, c);
        }
    }
}

uint64_t rooms_poisoned(const Rooms *f)
{
    return f->stage.poisoned.pages + f->restore.poisoned;
}

unsigned rooms_staged(const Rooms *f)
{
    unsigned staged = 0;

    for (unsigned i = 0; i < 2 * CHUNK_PAGES; i++) {
        uint64_t entry;
        off_t at = ((uintptr_t)f->stage.small / PAGE + i) * sizeof(entry);

        g_assert(prim_real.read_at(f->kinds.pagemap, &entry, sizeof(entry),
                                   at) == sizeof(entry));
        staged += entry >> ENTRY_SWAPPED != 0;
    }
    return staged;
}

void rooms_check(const Rooms *f, KsmRegion *r)
{
    region_check(r);
    directory_check(&f->dir, r);
    content_check(&f->content, r);
}

bool pair_open(Pair *p, KsmDirtySource dirty, unsigned max_sharing,
               const KsmRegionOps *ops, MemPages kind)
{
    if (!rooms_open(&p->f, dirty, max_sharing)) {
        return false;
    }
    p->a = mem_new(PAIR_PAGES, 0, kind);
    p->b = mem_new(PAIR_PAGES, 0, kind);
    mem_fill_run(p->a, 0, PAIR_PAGES, 1, 1);
    mem_fill_run(p->b, 0, PAIR_PAGES, 1, 1);
    p->ra = rooms_add(&p->f, p->a, ops);
    p->rb = rooms_add(&p->f, p->b, ops);
    return true;
}

void pair_close(Pair *p)
{
    rooms_check(&p->f, p->ra);
    rooms_check(&p->f, p->rb);
    mem_check(p->a);
    mem_check(p->b);
    rooms_remove(&p->f, p->ra);
    rooms_remove(&p->f, p->rb);
    mem_check(p->a);
    mem_check(p->b);
    rooms_close(&p->f);
    mem_free(p->a);
    mem_free(p->b);
}
