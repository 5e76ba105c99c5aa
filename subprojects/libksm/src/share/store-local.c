/*
 * store-local: a store of this process alone
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/prim.h"
#include "share/store-local.h"

typedef struct StoreLocal {
    KsmStore store;         /* first */
    KsmPool pool;
} StoreLocal;

KsmPool *store_local_pool(KsmStore *s)
{
    return &((StoreLocal *)s)->pool;
}

static void local_free(KsmStore *s)
{
    pool_free(store_local_pool(s));
    g_free(s);
}

static uint64_t local_seed(KsmStore *s)
{
    return prim.random();
}

static int local_reserve(KsmStore *s, size_t pages)
{
    return pool_reserve(store_local_pool(s), pages);
}

static OfferFate local_offer(KsmStore *s, StoreOffer *o)
{
    KsmPool *p = store_local_pool(s);

    o->slot = pool_take_near(p, o->before, o->after, &o->n);
    if (o->slot == SLOT_NONE) {
        return OFFER_REFUSED;
    }
    memcpy(p->hash + o->slot, o->tag, o->n * sizeof(*o->tag));
    return OFFER_TAKEN;
}

static int local_allocate(KsmStore *s, uint32_t slot, unsigned n)
{
    store_local_pool(s)->node = s->node;
    return pool_allocate(store_local_pool(s), slot, n);
}

static int local_fill(KsmStore *s, uint32_t slot, const void *pages, unsigned n)
{
    return pool_fill(store_local_pool(s), slot, pages, n);
}

static OfferFate local_repeat(KsmStore *s, StoreOffer *o)
{
    KsmPattern *t;

    store_local_pool(s)->node = s->node;
    t = pool_pattern_new(store_local_pool(s), o->pages, o->tag[0]);
    if (!t) {
        return OFFER_REFUSED;
    }
    o->slot = t->first;
    return OFFER_TAKEN;
}

static uint32_t local_repeated(KsmStore *s, uint32_t slot)
{
    KsmPattern *t = pool_pattern(store_local_pool(s), slot);

    return t ? t->first : SLOT_NONE;
}

static uint32_t local_run(KsmStore *s, uint32_t slot, unsigned *n)
{
    KsmPool *p = store_local_pool(s);
    KsmPattern *t = pool_pattern(p, slot);

    if (t) {
        p->node = s->node;
        return pool_pattern_run(p, t, n);
    }
    *n = 1;
    return pool_full(p, slot) ? SLOT_NONE : slot;
}

static bool local_full(KsmStore *s, uint32_t slot)
{
    return pool_full(store_local_pool(s), slot);
}

static void local_hold(KsmStore *s, uint32_t slot)
{
    pool_user_add(store_local_pool(s), slot);
}

static void local_drop(KsmStore *s, uint32_t slot)
{
    pool_user_drop(store_local_pool(s), slot);
}

static void local_settle(KsmStore *s, uint32_t slot)
{
    pool_settle(store_local_pool(s), slot);
}

static unsigned local_users(KsmStore *s, uint32_t slot)
{
    KsmPool *p = store_local_pool(s);

    return slot < p->top ? pool_users(p, slot) : 0;
}

static uint32_t local_tag(KsmStore *s, uint32_t slot)
{
    return store_local_pool(s)->hash[slot];
}

static const char *local_page(KsmStore *s, uint32_t slot)
{
    return pool_page(store_local_pool(s), slot);
}

static int local_map(KsmStore *s, uint32_t slot, off_t *offset)
{
    *offset = (off_t)slot * PAGE_BYTES;
    return store_local_pool(s)->map_fd;
}

static int local_readable(KsmStore *s, uint32_t slot, unsigned n)
{
    return pool_readable(store_local_pool(s), slot, n);
}

static void local_fork(KsmStore *s, StoreFork when)
{
    KsmPool *p = store_local_pool(s);

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

static void local_keep_all(KsmStore *s)
{
    store_local_pool(s)->keep_all = true;
}

static bool local_gives_up(KsmStore *s)
{
    return pool_gives_up(store_local_pool(s));
}

static void local_flush(KsmStore *s)
{
    pool_ahead_end(store_local_pool(s));
    pool_flush(store_local_pool(s));
}

static void local_pass(KsmStore *s)
{
    pool_ahead_end(store_local_pool(s));
    pool_flush(store_local_pool(s));
    pool_unkeep(store_local_pool(s));
}

static void local_ahead(KsmStore *s)
{
    KsmPool *p = store_local_pool(s);

    p->node = s->node;
    p->ahead.crew = s->crew;
    pool_ahead(p);
}

static bool local_tidy(KsmStore *s)
{
    return pool_release(store_local_pool(s));
}

static StoreStats local_stats(KsmStore *s)
{
    const KsmPool *p = store_local_pool(s);

    return (StoreStats) {
        .shared = p->shared,
        .sharing = p->sharing,
        .leaked = p->leaked,
        .bytes = pool_bytes(p),
        .pending = p->n_punch || (p->leaked && !p->keep_all),
    };
}

static void slot_goes(void *opaque, uint32_t slot)
{
    KsmStore *s = opaque;

    s->forget(s->opaque, slot);
}

static const KsmStoreOps local_ops = {
    .free = local_free,
    .seed = local_seed,
    .reserve = local_reserve,
    .offer = local_offer,
    .allocate = local_allocate,
    .fill = local_fill,
    .repeat = local_repeat,
    .repeated = local_repeated,
    .run = local_run,
    .full = local_full,
    .hold = local_hold,
    .drop = local_drop,
    .settle = local_settle,
    .users = local_users,
    .tag = local_tag,
    .page = local_page,
    .map = local_map,
    .readable = local_readable,
    .fork = local_fork,
    .keep_all = local_keep_all,
    .gives_up = local_gives_up,
    .flush = local_flush,
    .ahead = local_ahead,
    .pass = local_pass,
    .tidy = local_tidy,
    .stats = local_stats,
};

KsmStore *store_local_new(unsigned max_sharing, int *err)
{
    StoreLocal *l = g_new0(StoreLocal, 1);

    *err = pool_init(&l->pool, max_sharing);
    if (*err < 0) {
        local_free(&l->store);
        return NULL;
    }
    l->pool.goes = slot_goes;
    l->pool.opaque = l;
    l->store = (KsmStore) {
        .ops = &local_ops,
        .node = -1,
    };
    return &l->store;
}
