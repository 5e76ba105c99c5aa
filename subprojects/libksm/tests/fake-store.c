/*
 * libksm tests: a remote store, and its peer, in one process
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <unistd.h>

#include "fake-store.h"
#include "share/store-local.h"

#define FAKE_SEED   UINT64_C(0x5eed)
#define IN_FLIGHT   20000u      /* questions that may wait for an answer */

FakeStoreHabits fake_habits = { .late = 3 };

const FakeStoreHabits fake_habits_bad = {
    .late = 8, .refuse = 10, .silent = 5, .want = 20, .left = 5, .lie = 2,
    .lose = 1,
};

typedef struct FakeAnswer {
    StoreAnswer a;
    uint64_t due;           /* look at which it comes */
} FakeAnswer;

typedef struct FakeStore {
    KsmStore store;         /* first */
    KsmPool pool;           /* the peer's */
    FakeStoreHabits habits;
    GHashTable *others;     /* hash -> slot + 1: what other members hold */
    GQueue *answers;        /* FakeAnswer, in the order of the questions */
    GQueue *lost;           /* those that will not come: yet to be dropped */
    GRand *rand;
    uint64_t looks, asked, offered;
    unsigned losses;
    StoreRoom room;
    uint32_t stale;         /* slots below are of a peer that is gone */
    bool gone;
} FakeStore;

static FakeStore *fake(KsmStore *s)
{
    return (FakeStore *)s;
}

static bool chance(FakeStore *f, unsigned percent)
{
    return percent && (unsigned)g_rand_int_range(f->rand, 0, 100) < percent;
}

static void answer_free(FakeStore *f, FakeAnswer *a)
{
    if (a->a.what == ANSWER_SLOT) {
        pool_user_drop(&f->pool, a->a.slot);
    }
    g_free(a);
}

FakeStoreHabits *fake_store_habits(KsmStore *s)
{
    return &fake(s)->habits;
}

void fake_store_lose(KsmStore *s)
{
    FakeStore *f = fake(s);
    FakeAnswer *a;

    f->gone = true;
    f->losses++;
    while ((a = g_queue_pop_head(f->answers))) {
        g_queue_push_tail(f->lost, a);
    }
}

void fake_store_return(KsmStore *s)
{
    fake(s)->gone = false;
}

void fake_store_outdate(KsmStore *s, uint32_t below)
{
    fake(s)->pool.keep_all = true;      /* none is of the other, too */
    fake(s)->stale = below;
}

void fake_store_hurry(KsmStore *s)
{
    for (GList *l = fake(s)->answers->head; l; l = l->next) {
        ((FakeAnswer *)l->data)->due = 0;
    }
}

static void fake_free(KsmStore *s)
{
    FakeStore *f = fake(s);

    g_queue_free_full(f->answers, g_free);
    g_queue_free_full(f->lost, g_free);
    g_hash_table_unref(f->others);
    g_rand_free(f->rand);
    pool_free(&f->pool);
    g_free(f);
}

static uint64_t fake_seed(KsmStore *s)
{
    return FAKE_SEED;
}

static int fake_reserve(KsmStore *s, size_t pages)
{
    /* room for vain offers, and for others' contents */
    return pool_reserve(&fake(s)->pool, 2 * pages);
}

/* When the answers to a message will come. */
static uint64_t some_time(FakeStore *f)
{
    return f->looks + g_rand_int_range(f->rand, 0, f->habits.late + 1);
}

static void answer(FakeStore *f, uint64_t due, StoreAnswer a)
{
    FakeAnswer *late = g_new(FakeAnswer, 1);

    *late = (FakeAnswer) { a, due };
    if (a.what == ANSWER_SLOT) {
        pool_user_add(&f->pool, a.slot);
    }
    g_queue_push_tail(f->answers, late);
}

/* What the peer says to a question. */
static StoreAnswer reply(FakeStore *f, const StoreAsk *q)
{
    StoreAnswer a = { ANSWER_NONE, q->id, q->tag, SLOT_NONE };
    uint32_t slot = GPOINTER_TO_UINT(g_hash_table_lookup(f->others, &q->hash));

    if (slot-- && !pool_full(&f->pool, slot)) {
        /* one tag tells of it: by that it is found there */
        f->pool.hash[slot] = f->pool.hash[slot] ? f->pool.hash[slot] : q->tag;
        a.what = ANSWER_SLOT;
        a.slot = slot;
    } else if (chance(f, f->habits.want)) {
        a.what = ANSWER_WANTED;
    } else if (chance(f, f->habits.left)) {
        a.what = ANSWER_LEFT;
    }
    return a;
}

static bool fake_ask(KsmStore *s, const StoreAsk *asks, unsigned n)
{
    FakeStore *f = fake(s);
    uint64_t due;

    g_assert(!f->gone);
    if (f->answers->length + n > IN_FLIGHT || chance(f, f->habits.refuse)) {
        return false;
    }
    due = some_time(f);
    for (unsigned i = 0; i < n; i++) {
        answer(f, due, reply(f, &asks[i]));
    }
    f->asked += n;
    return true;
}

static unsigned fake_answers(KsmStore *s, StoreAnswer *answers, unsigned max)
{
    FakeStore *f = fake(s);
    FakeAnswer *a;
    unsigned n = 0;

    f->looks++;
    if (chance(f, f->habits.lose)) {
        fake_store_lose(s);
    } else if (f->gone && f->habits.lose) {
        fake_store_return(s);
    }
    while (n < max && (a = g_queue_peek_head(f->answers)) &&
           a->due <= f->looks) {
        g_queue_pop_head(f->answers);
        answers[n++] = a->a;    /* its user is the engine's now */
        g_free(a);
    }
    return n;
}

static unsigned fake_awaited(KsmStore *s)
{
    return fake(s)->answers->length;
}

/* Copies pages to slots, perhaps fewer.  SLOT_NONE: there is no room. */
static uint32_t slots_fill(FakeStore *f, const void *pages, unsigned *n)
{
    uint32_t slot = pool_take(&f->pool, n);

    if (slot == SLOT_NONE) {
        return SLOT_NONE;
    }
    if (pool_allocate(&f->pool, slot, *n) < 0 ||
        pool_fill(&f->pool, slot, pages, *n) < 0) {
        pool_untake(&f->pool, slot, *n);
        return SLOT_NONE;
    }
    return slot;
}

static OfferFate fake_offer(KsmStore *s, StoreOffer *o)
{
    FakeStore *f = fake(s);
    uint32_t slot;
    uint64_t due;
    bool silent;

    if (f->gone || chance(f, f->habits.refuse)) {
        return OFFER_REFUSED;
    }
    if (chance(f, f->habits.busy)) {
        return OFFER_BUSY;
    }
    f->pool.node = s->node;
    slot = slots_fill(f, o->pages, &o->n);
    if (slot == SLOT_NONE) {
        return OFFER_REFUSED;
    }
    f->offered += o->n;
    due = some_time(f);
    silent = chance(f, f->habits.silent);
    for (unsigned i = 0; i < o->n; i++) {
        StoreAnswer a = { ANSWER_SLOT, o->id + i, o->tag[i], slot + i };

        if (chance(f, f->habits.lie)) {
            g_assert(pwrite(f->pool.fd, "a lie", 5,
                            (off_t)(slot + i) * PAGE_BYTES + 100) == 5);
        }
        f->pool.hash[slot + i] = o->tag[i];
        if (silent) {
            pool_untake(&f->pool, slot + i, 1);
            a = (StoreAnswer) { ANSWER_REFUSED, a.id, a.tag, SLOT_NONE };
        }
        answer(f, due, a);
    }
    return OFFER_LATER;
}

static OfferFate fake_repeat(KsmStore *s, StoreOffer *o)
{
    FakeStore *f = fake(s);
    KsmPattern *t;

    if (f->gone || chance(f, f->habits.refuse)) {
        return OFFER_REFUSED;
    }
    if (chance(f, f->habits.busy)) {
        return OFFER_BUSY;
    }
    f->pool.node = s->node;
    t = pool_pattern_new(&f->pool, o->pages, o->tag[0]);
    if (!t) {
        return OFFER_REFUSED;
    }
    f->offered++;
    answer(f, some_time(f),
           (StoreAnswer) { ANSWER_SLOT, o->id, o->tag[0], t->first });
    return OFFER_LATER;
}

static uint32_t fake_repeated(KsmStore *s, uint32_t slot)
{
    KsmPattern *t = pool_pattern(&fake(s)->pool, slot);

    return t ? t->first : SLOT_NONE;
}

/* A real one's peer would have told beforehand. */
static uint32_t fake_run(KsmStore *s, uint32_t slot, unsigned *n)
{
    KsmPool *p = &fake(s)->pool;
    KsmPattern *t = pool_pattern(p, slot);

    if (t) {
        return pool_pattern_run(p, t, n);
    }
    *n = 1;
    return pool_full(p, slot) ? SLOT_NONE : slot;
}

static bool fake_full(KsmStore *s, uint32_t slot)
{
    return pool_full(&fake(s)->pool, slot);
}

static void fake_hold(KsmStore *s, uint32_t slot)
{
    pool_user_add(&fake(s)->pool, slot);
}

static void fake_drop(KsmStore *s, uint32_t slot)
{
    pool_user_drop(&fake(s)->pool, slot);
}

static void fake_settle(KsmStore *s, uint32_t slot)
{
    pool_settle(&fake(s)->pool, slot);
}

static unsigned fake_users(KsmStore *s, uint32_t slot)
{
    return pool_users(&fake(s)->pool, slot);
}

static uint32_t fake_tag(KsmStore *s, uint32_t slot)
{
    return fake(s)->pool.hash[slot];
}

static const char *fake_page(KsmStore *s, uint32_t slot)
{
    return pool_page(&fake(s)->pool, slot);
}

static int fake_map(KsmStore *s, uint32_t slot, off_t *offset)
{
    *offset = (off_t)slot * PAGE_BYTES;
    return fake(s)->pool.map_fd;
}

static int fake_readable(KsmStore *s, uint32_t slot, unsigned n)
{
    return pool_readable(&fake(s)->pool, slot, n);
}

static void fake_fork(KsmStore *s, StoreFork when)
{
    KsmPool *p = &fake(s)->pool;

    switch (when) {
    case FORK_BEFORE:
        pool_fork(p);
        break;
    case FORK_PARENT:
        pool_forked(p);
        break;
    case FORK_CHILD:
        pool_forked_child(p);
        break;
    }
}

static void fake_keep_all(KsmStore *s)
{
    fake(s)->pool.keep_all = true;
}

static void fake_flush(KsmStore *s)
{
    pool_flush(&fake(s)->pool);
}

static void fake_pass(KsmStore *s)
{
    pool_flush(&fake(s)->pool);
    pool_unkeep(&fake(s)->pool);
}

static bool fake_tidy(KsmStore *s)
{
    FakeStore *f = fake(s);

    /* a few at a time, for each may try to punch */
    for (unsigned i = 0; i < 16 && f->lost->length; i++) {
        answer_free(f, g_queue_pop_head(f->lost));
    }
    return pool_release(&f->pool) || f->lost->length;
}

/* What waits in answers is the peer's, and so others'. */
static StoreStats fake_stats(KsmStore *s)
{
    FakeStore *f = fake(s);
    StoreStats stats = {
        .shared = f->pool.shared,
        .sharing = f->pool.sharing,
        .leaked = f->pool.leaked,
        .bytes = pool_bytes(&f->pool),
        .pending = f->pool.n_punch || (f->pool.leaked && !f->pool.keep_all),
    };

    for (unsigned i = 0; i < 2; i++) {
        GQueue *q = i ? f->lost : f->answers;

        for (GList *l = q->head; l; l = l->next) {
            const FakeAnswer *a = l->data;

            if (a->a.what == ANSWER_SLOT) {
                stats.sharing--;
                stats.shared -= pool_users(&f->pool, a->a.slot) == 1;
            }
        }
    }
    stats.sharing -= g_hash_table_size(f->others);
    stats.shared -= g_hash_table_size(f->others);
    return stats;
}

void fake_store_news(KsmStore *s, uint32_t slot, uint32_t tag)
{
    FakeStore *f = fake(s);

    f->pool.hash[slot] = tag;
    answer(f, f->looks, (StoreAnswer) { ANSWER_SLOT, UINT32_MAX, tag, slot });
}

static void fake_room(KsmStore *s, const StoreRoom *room)
{
    fake(s)->room = *room;
}

StoreRoom fake_store_room(KsmStore *s)
{
    return fake(s)->room;
}

static bool fake_gone(KsmStore *s)
{
    return fake(s)->gone;
}

static bool fake_stale(KsmStore *s, uint32_t slot)
{
    FakeStore *f = fake(s);

    if (slot != SLOT_NONE) {
        return slot < f->stale;
    }
    for (slot = 0; slot < f->stale && !pool_users(&f->pool, slot); slot++) {
        continue;
    }
    return slot < f->stale;
}

static unsigned fake_losses(KsmStore *s)
{
    return fake(s)->losses;
}

static const KsmStoreOps fake_ops = {
    .free = fake_free,
    .seed = fake_seed,
    .reserve = fake_reserve,
    .ask = fake_ask,
    .answers = fake_answers,
    .awaited = fake_awaited,
    .offer = fake_offer,
    .repeat = fake_repeat,
    .repeated = fake_repeated,
    .run = fake_run,
    .full = fake_full,
    .hold = fake_hold,
    .drop = fake_drop,
    .settle = fake_settle,
    .users = fake_users,
    .tag = fake_tag,
    .page = fake_page,
    .map = fake_map,
    .readable = fake_readable,
    .fork = fake_fork,
    .keep_all = fake_keep_all,
    .flush = fake_flush,
    .pass = fake_pass,
    .tidy = fake_tidy,
    .room = fake_room,
    .stats = fake_stats,
    .gone = fake_gone,
    .losses = fake_losses,
    .stale = fake_stale,
};

static void slot_goes(void *opaque, uint32_t slot)
{
    KsmStore *s = opaque;

    if (s->forget) {
        s->forget(s->opaque, slot);
    }
}

KsmStore *fake_store_new(unsigned max_sharing, int *err)
{
    FakeStore *f = g_new0(FakeStore, 1);

    *err = pool_init(&f->pool, max_sharing);
    if (*err < 0) {
        pool_free(&f->pool);
        g_free(f);
        return NULL;
    }
    f->pool.goes = slot_goes;
    f->pool.opaque = f;
    f->habits = fake_habits;
    f->others = g_hash_table_new_full(g_int64_hash, g_int64_equal, g_free,
                                      NULL);
    f->answers = g_queue_new();
    f->lost = g_queue_new();
    f->rand = g_rand_new_with_seed(f->habits.seed);
    f->store = (KsmStore) {
        .ops = &fake_ops,
        .node = -1,
    };
    return &f->store;
}

uint32_t fake_store_share(KsmStore *s, const void *page, uint64_t hash)
{
    FakeStore *f = fake(s);
    unsigned one = 1;
    uint32_t slot = slots_fill(f, page, &one);

    g_assert(slot != SLOT_NONE);
    f->pool.hash[slot] = 0;
    pool_user_add(&f->pool, slot);
    g_hash_table_insert(f->others, g_memdup2(&hash, sizeof(hash)),
                        GUINT_TO_POINTER(slot + 1));
    return slot;
}

void fake_store_users(KsmStore *s, uint32_t *users)
{
    if (s->ops != &fake_ops) {
        return;
    }
    for (unsigned i = 0; i < 2; i++) {
        GQueue *q = i ? fake(s)->lost : fake(s)->answers;

        for (GList *l = q->head; l; l = l->next) {
            const FakeAnswer *a = l->data;

            if (a->a.what == ANSWER_SLOT) {
                users[a->a.slot]++;
            }
        }
    }
}

uint64_t fake_store_asked(KsmStore *s)
{
    return fake(s)->asked;
}

uint64_t fake_store_offered(KsmStore *s)
{
    return fake(s)->offered;
}

KsmPool *fake_store_pool(KsmStore *s)
{
    return s->ops == &fake_ops ? &fake(s)->pool : store_local_pool(s);
}
