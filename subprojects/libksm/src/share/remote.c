/*
 * remote: a store that a group of processes shares
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/prim.h"
#include "share/member.h"
#include "share/remote.h"

#define LOOK_NS     UINT64_C(1000000000)
/*
 * How old figures of the group may be: the daemon goes over all holds.  Less
 * where what is held here has changed.
 */
#define GROUP_NS        UINT64_C(60000000000)
#define GROUP_SOON_NS   UINT64_C(10000000000)
#define GROUP_CHANGE    32u     /* one in so many slots, and so many more */
#define RIPEN_NS    UINT64_C(1000000000)

typedef struct Remote {
    KsmStore store;         /* first */
    KsmMember member;
} Remote;

static KsmMember *member(KsmStore *s)
{
    return &((Remote *)s)->member;
}

static void remote_free(KsmStore *s)
{
    member_free(member(s));
    g_free(s);
}

static uint64_t remote_seed(KsmStore *s)
{
    return member(s)->key;
}

/* Its slots are the daemon's; how much memory there is, is for its tables. */
static int remote_reserve(KsmStore *s, size_t pages)
{
    member(s)->pages = pages;
    return 0;
}

static bool remote_ask(KsmStore *s, const StoreAsk *asks, unsigned n)
{
    return member_ask(member(s), asks, n);
}

static unsigned remote_answers(KsmStore *s, StoreAnswer *answers, unsigned max)
{
    return member_answers(member(s), answers, max);
}

static unsigned remote_awaited(KsmStore *s)
{
    const KsmMember *m = member(s);

    return m->awaited + m->batch.n + m->wanted->len - m->wanted_at;
}

static bool remote_gone(KsmStore *s)
{
    const KsmMember *m = member(s);

    return m->state != MEMBER_UP || m->link.fd < 0;
}

static unsigned remote_losses(KsmStore *s)
{
    return member(s)->losses;
}

static KsmReason remote_why(KsmStore *s)
{
    return member(s)->why;
}

static OfferFate remote_offer(KsmStore *s, StoreOffer *o)
{
    return member_offer(member(s), o);
}

static OfferFate remote_repeat(KsmStore *s, StoreOffer *o)
{
    return member_repeat(member(s), o);
}

static uint32_t remote_repeated(KsmStore *s, uint32_t slot)
{
    KsmForeign *f = member_pool(member(s), &slot);
    const ForeignBlock *b = foreign_block(f, slot);

    return b ? f->base + b->first : SLOT_NONE;
}

static uint32_t remote_run(KsmStore *s, uint32_t slot, unsigned *n)
{
    KsmForeign *f = member_pool(member(s), &slot);
    ForeignBlock *b = foreign_block(f, slot);

    if (!b) {
        *n = 1;
        return foreign_full(f, slot) ? SLOT_NONE : f->base + slot;
    }
    if (*n > b->length) {
        member_grow(member(s), f, b);
    }
    slot = foreign_block_run(f, b, n);
    return slot == SLOT_NONE ? SLOT_NONE : f->base + slot;
}

static bool remote_full(KsmStore *s, uint32_t slot)
{
    KsmForeign *f = member_pool(member(s), &slot);

    return foreign_full(f, slot);
}

static void remote_hold(KsmStore *s, uint32_t slot)
{
    KsmForeign *f = member_pool(member(s), &slot);

    foreign_hold(f, slot);
}

static void remote_drop(KsmStore *s, uint32_t slot)
{
    KsmForeign *f = member_pool(member(s), &slot);

    foreign_drop(f, slot);
}

static void remote_settle(KsmStore *s, uint32_t slot)
{
    KsmForeign *f = member_pool(member(s), &slot);

    foreign_settle(f, slot);
}

static unsigned remote_users(KsmStore *s, uint32_t slot)
{
    KsmForeign *f = member_pool(member(s), &slot);

    return f->users[slot] & SLOT_USERS;
}

static uint32_t remote_tag(KsmStore *s, uint32_t slot)
{
    KsmForeign *f = member_pool(member(s), &slot);

    return f->tag[foreign_unit(f, slot)];
}

static const char *remote_page(KsmStore *s, uint32_t slot)
{
    KsmForeign *f = member_pool(member(s), &slot);

    return foreign_page(f, slot);
}

static int remote_map(KsmStore *s, uint32_t slot, off_t *offset)
{
    KsmForeign *f = member_pool(member(s), &slot);

    *offset = (off_t)slot * PAGE_BYTES;
    return f->fd;
}

static int remote_readable(KsmStore *s, uint32_t slot, unsigned n)
{
    KsmForeign *f = member_pool(member(s), &slot);

    return foreign_readable(f, slot, n);
}

static bool remote_stale(KsmStore *s, uint32_t slot)
{
    KsmMember *m = member(s);

    if (remote_gone(s)) {
        return false;
    }
    if (slot != SLOT_NONE) {
        return member_pool(m, &slot) != m->now;
    }
    for (guint i = 0; i < m->pools->len; i++) {
        const KsmForeign *f = g_ptr_array_index(m->pools, i);

        if (f != m->now && f->sharing) {
            return true;
        }
    }
    return false;
}

/*
 * Regions are not inherited; the child says nothing, and keeps no pool whose
 * daemon has gone.  What it opens next may have the same numbers: they are
 * forgotten, for its own children.
 */
static void remote_fork(KsmStore *s, StoreFork when)
{
    KsmMember *m = member(s);

    if (when != FORK_CHILD) {
        return;
    }
    link_free(&m->link);
    ring_close(&m->ring);
    for (guint i = 0; i < m->pools->len; i++) {
        foreign_close(g_ptr_array_index(m->pools, i));
    }
}

static void remote_keep_all(KsmStore *s)
{
    member(s)->keep_all = true;
}

static void remote_flush(KsmStore *s)
{
    member_run(member(s));
}

static void remote_pass(KsmStore *s)
{
    member_run(member(s));
    member_rest(member(s));
}

/* All there is to do is done in passing. */
static bool remote_tidy(KsmStore *s)
{
    return false;
}

static void remote_tail(KsmStore *s, const StoreTail *tail)
{
    member_tail(member(s), tail);
}

static void remote_room(KsmStore *s, const StoreRoom *room)
{
    member_room(member(s), room);
}

static StoreStats remote_stats(KsmStore *s)
{
    const KsmMember *m = member(s);
    StoreStats stats = {
        .bytes = member_bytes(m),
        .pending = m->state == MEMBER_UP && m->drops->len,
    };

    for (guint i = 0; i < m->pools->len; i++) {
        const KsmForeign *f = g_ptr_array_index(m->pools, i);

        stats.shared += f->shared;
        stats.sharing += f->sharing;
    }
    return stats;
}

static bool group_is_old(const KsmMember *m)
{
    uint64_t age = prim.now_ns() - m->group_ns;
    uint64_t then = m->group_shared, now = m->now ? m->now->shared : 0;

    if (!m->group_ns || age > GROUP_NS) {
        return true;
    }
    return age > GROUP_SOON_NS &&
           MAX(then, now) - MIN(then, now) > then / GROUP_CHANGE + GROUP_CHANGE;
}

static bool remote_group(KsmStore *s, KsmGroupStats *g)
{
    KsmMember *m = member(s);

    *g = (KsmGroupStats) {
        .connected = !remote_gone(s),
        .why = m->why,
        .generation = m->now ? m->now->generation : 0,
    };
    if (m->group) {
        g->members = m->group->members;
        g->pool_bytes = m->group->used * PAGE_BYTES;
        g->pool_limit = m->group->slots * PAGE_BYTES;
        g->held = m->group->member[0].held;
        g->share = m->group->member[0].share / 1000;
    }
    if (group_is_old(m)) {
        member_ask_group(m);
    }
    return true;
}

static const KsmStoreOps remote_ops = {
    .free = remote_free,
    .seed = remote_seed,
    .reserve = remote_reserve,
    .ask = remote_ask,
    .answers = remote_answers,
    .awaited = remote_awaited,
    .gone = remote_gone,
    .losses = remote_losses,
    .why = remote_why,
    .offer = remote_offer,
    .repeat = remote_repeat,
    .repeated = remote_repeated,
    .run = remote_run,
    .full = remote_full,
    .hold = remote_hold,
    .drop = remote_drop,
    .settle = remote_settle,
    .users = remote_users,
    .tag = remote_tag,
    .page = remote_page,
    .map = remote_map,
    .readable = remote_readable,
    .stale = remote_stale,
    .fork = remote_fork,
    .keep_all = remote_keep_all,
    .flush = remote_flush,
    .pass = remote_pass,
    .tidy = remote_tidy,
    .tail = remote_tail,
    .room = remote_room,
    .stats = remote_stats,
    .group = remote_group,
};

KsmStore *remote_new(const RemoteConfig *config)
{
    Remote *r = g_new0(Remote, 1);

    r->store = (KsmStore) {
        .ops = &remote_ops,
        .node = -1,
        .stay_home = true,
        .look_ns = LOOK_NS,
        .ripen_ns = RIPEN_NS,
    };
    link_init(&r->member.link, config->fd, config->socket);
    member_init(&r->member, &r->store, config->name, config->max_sharing);
    return &r->store;
}
