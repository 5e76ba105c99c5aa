/*
 * offer: what members offer, and what becomes of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>

#include "base/page.h"
#include "base/prim.h"
#include "offer.h"

/*
 * One in so many is kept free: else one in 200 finds no place while the index
 * grows, and who does not find it keeps a page of its own.
 */
#define INDEX_SPARE     8u
#define INDEX_FEED      128u    /* entries put in for a step of moving */
/*
 * Pages written before a look at the control group: they must fit into what
 * memcg_is_short() calls room.
 */
#define LOOK_PAGES      1024u
#define SAME_TRIES      8u      /* of those with one hash compared */

G_STATIC_ASSERT((LOOK_PAGES + MAX(GROUP_PIECE, WIRE_BLOCK_MAX)) * PAGE_BYTES <
                MEMCG_ROOM_MIN);

/* No more pages are to be written. */
static bool is_short(Group *g)
{
    if (g->unwatched >= LOOK_PAGES) {
        g->memcg.asked = 0;
        g->unwatched = 0;
    }
    return group_is_tight(g);
}

/* WIRE_*: why nothing may be written now. */
static uint32_t may_write(Group *g, const GroupMember *m, unsigned slots)
{
    if (is_short(g)) {
        return WIRE_NO_MEMORY;
    }
    return m->charged + slots > group_quota(g) ? WIRE_SHARE : WIRE_NONE;
}

static void count_refused(Group *g, uint32_t why, unsigned n)
{
    switch (why) {
    case WIRE_FULL:
        g->stats.refused_full += n;
        break;
    case WIRE_SHARE:
        g->stats.refused_share += n;
        break;
    default:
        g->stats.refused_memory += n;
        break;
    }
}

/*
 * Room in the index for one more.  While it grows by a quarter, at least five
 * times as many entries are moved as come in: it is done when a fifth is there.
 */
static void index_make_room(Group *g)
{
    size_t room = g->index_room + g->index_room / 4;

    if (++g->index_fed % INDEX_FEED) {
        return;
    }
    index_step(&g->index);
    if (g->index.count + g->index.count / INDEX_SPARE >= g->index_room &&
        group_may_have(g, index_table_bytes(room)) &&
        index_reserve(&g->index, room) == 0) {
        g->index_room = room;
    }
}

/*
 * A slot with content becomes known, and @m holds it; in the place of @old if
 * that is no PLACE_NONE.  @charge: of the member's share.
 */
static void publish(Group *g, GroupMember *m, uint32_t slot, uint64_t hash,
                    uint32_t old, unsigned charge)
{
    bool held;

    g->pool.hash[slot] = hash;
    g->upper[slot] = hash >> 32;
    g->owner[slot] = m->number;
    m->charged += charge;
    if (old == PLACE_NONE) {
        index_make_room(g);
        index_insert(&g->index, hash, slot);
    } else {
        index_replace(&g->index, hash, old, slot);
    }
    held = group_hold(g, m, slot);
    g_assert(held);
    g->stats.published++;
}

/* Whoever asked hears of it. */
static void tell(Group *g, GroupMember *m, uint64_t hash, uint32_t slot)
{
    uint32_t asker;

    while ((asker = asked_take(&g->asked, hash)) != ASKED_NOBODY) {
        if (asker == m->number || !g->tell) {
            continue;
        }
        if (g->tell(g->opaque, asker, hash, slot)) {
            g->stats.news++;
        } else {
            g->stats.news_lost++;
        }
    }
}

/* A piece of an offer, as copied and judged. */
typedef struct Judged {
    Group *g;
    GroupMember *m;
    GArray *blocks;
    uint32_t *slot;         /* of each page: the answer */
    uint64_t hash[GROUP_PIECE];
    uint32_t old[GROUP_PIECE];      /* full slot to be replaced */
    uint16_t fresh[GROUP_PIECE];    /* pages that need a slot */
    uint16_t same[GROUP_PIECE];     /* page before that is equal, or itself */
    unsigned n_fresh;
} Judged;

/* From the member's ring to our copy, and hashes of that. */
static int copy_pages(Judged *j, const Offer *o)
{
    Group *g = j->g;
    size_t len = o->count * PAGE_BYTES;
    ssize_t got;

    g_assert(o->count <= GROUP_PIECE);
    g->active = prim.now_ns();
    do {
        got = prim.read_at(o->ring, g->copy, len,
                           (off_t)o->first * PAGE_BYTES);
    } while (got == -EINTR);
    if (got != (ssize_t)len) {
        return got < 0 ? got : -EIO;
    }
    for (unsigned i = 0; i < o->count; i++) {
        j->hash[i] = hash_page(&g->hasher, g->copy + i * PAGE_BYTES) ^
                     o->domain;
        index_prefetch(&g->index, j->hash[i]);
    }
    return 0;
}

/* An equal page of this piece that needs a slot, too; @i: none. */
static unsigned same_before(const Judged *j, unsigned i)
{
    const char *copy = j->g->copy;
    unsigned tries = 0;

    for (unsigned k = 0; k < j->n_fresh && tries < SAME_TRIES; k++) {
        unsigned f = j->fresh[k];
        bool maybe = j->hash[f] == j->hash[i];

        tries += maybe;
        if (maybe && memcmp(copy + f * PAGE_BYTES, copy + i * PAGE_BYTES,
                            PAGE_BYTES) == 0) {
            return f;
        }
    }
    return i;
}

/* Answers what the pool has, and lists what it has not. */
static void judge(Judged *j, unsigned i)
{
    Group *g = j->g;
    const char *page = g->copy + i * PAGE_BYTES;
    bool is;
    uint32_t slot = group_find(g, j->hash[i], page, &is);

    j->same[i] = i;
    if (is && group_hold_told(g, j->m, slot, j->blocks)) {
        j->slot[i] = slot;
        g->stats.found++;
        return;
    }
    j->old[i] = slot;
    j->same[i] = same_before(j, i);
    if (j->same[i] == i) {
        j->fresh[j->n_fresh++] = i;
    }
}

/* Consecutive pages of the copy by one call.  How many were written. */
static unsigned slots_fill(Judged *j, uint32_t slot, const uint16_t *page,
                           unsigned n, int *ret)
{
    Group *g = j->g;
    unsigned done = 0;

    *ret = g->pool.node < 0 ? 0 : pool_allocate(&g->pool, slot, n);
    while (done < n && *ret == 0) {
        unsigned k = 1;

        while (done + k < n && page[done + k] == page[done] + k) {
            k++;
        }
        *ret = pool_fill(&g->pool, slot + done,
                         g->copy + page[done] * PAGE_BYTES, k);
        done += *ret == 0 ? k : 0;
    }
    g->unwatched += done;
    return done;
}

static uint32_t take_slots(Group *g, unsigned *n)
{
    unsigned want = *n;
    uint32_t slot = pool_take(&g->pool, n);

    if (slot == SLOT_NONE && g->pool.n_punch) {
        pool_flush(&g->pool);
        *n = want;
        slot = pool_take(&g->pool, n);
    }
    return slot;
}

/* A run of new slots for @n pages; how many got one, or WIRE_* in @why. */
static unsigned publish_run(Judged *j, const uint16_t *page, unsigned n,
                            uint32_t *why)
{
    Group *g = j->g;
    unsigned done, took = MIN(n, group_quota(g) - j->m->charged);
    uint32_t slot = take_slots(g, &took);
    int ret;

    if (slot == SLOT_NONE) {
        *why = WIRE_FULL;
        return 0;
    }
    done = slots_fill(j, slot, page, took, &ret);
    if (done < took) {
        *why = ret == -ENOSPC || ret == -EFBIG ? WIRE_FULL : WIRE_NO_MEMORY;
        pool_untake(&g->pool, slot + done, took - done);
    }
    g->used += done;
    for (unsigned i = 0; i < done; i++) {
        unsigned p = page[i];

        publish(g, j->m, slot + i, j->hash[p], j->old[p], 1);
        j->slot[p] = slot + i;
    }
    /* all have their hold: what is told now cannot go */
    for (unsigned i = 0; i < done; i++) {
        asked_prefetch(&g->asked, j->hash[page[i]]);
    }
    for (unsigned i = 0; i < done; i++) {
        tell(g, j->m, j->hash[page[i]], slot + i);
    }
    return done;
}

static void publish_fresh(Judged *j)
{
    unsigned done = 0;

    while (done < j->n_fresh) {
        uint32_t why = may_write(j->g, j->m, 1);

        if (why == WIRE_NONE) {
            done += publish_run(j, j->fresh + done, j->n_fresh - done, &why);
        }
        if (why != WIRE_NONE) {
            for (unsigned i = done; i < j->n_fresh; i++) {
                j->slot[j->fresh[i]] = why;
            }
            count_refused(j->g, why, j->n_fresh - done);
            return;
        }
    }
}

/* Another copy of page @i of @n, also for those after it that are equal. */
static void publish_again(Judged *j, unsigned i, unsigned n)
{
    uint32_t why = may_write(j->g, j->m, 1);
    unsigned first = j->same[i];
    uint16_t page = i;

    j->old[i] = j->slot[first];
    if (why != WIRE_NONE || !publish_run(j, &page, 1, &why)) {
        j->slot[i] = why;
        count_refused(j->g, why, 1);
        return;
    }
    for (unsigned k = i; k < n; k++) {
        j->same[k] = j->same[k] == first ? i : j->same[k];
    }
}

/* Equal pages of one piece: the slot of the first, as long as it has holds. */
static void answer_same(Judged *j, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        uint32_t slot = j->slot[j->same[i]];

        if (j->same[i] == i) {
            continue;
        }
        if (slot >= j->g->config.slots) {
            j->slot[i] = slot;
            count_refused(j->g, slot, 1);
        } else if (group_hold(j->g, j->m, slot)) {
            j->slot[i] = slot;
            j->g->stats.found++;
        } else {
            publish_again(j, i, n);
        }
    }
}

static int offer_piece(Group *g, GroupMember *m, const Offer *o,
                       uint32_t *slot, GArray *blocks)
{
    Judged j;
    int ret;

    j.g = g;
    j.m = m;
    j.blocks = blocks;
    j.slot = slot;
    j.n_fresh = 0;
    ret = copy_pages(&j, o);
    if (ret < 0) {
        return ret;
    }
    g->pool.node = o->node;
    g->stats.offered += o->count;
    for (unsigned i = 0; i < o->count; i++) {
        judge(&j, i);
    }
    publish_fresh(&j);
    answer_same(&j, o->count);
    return 0;
}

void offer_pages(Group *g, GroupMember *m, const Offer *o, uint32_t *slot,
                 GArray *blocks)
{
    for (unsigned at = 0, n; at < o->count; at += n) {
        Offer piece = *o;

        n = piece.count = MIN(o->count - at, GROUP_PIECE);
        piece.first += at;
        if (offer_piece(g, m, &piece, slot + at, blocks) < 0) {
            for (unsigned i = at; i < at + n; i++) {
                slot[i] = WIRE_NO_MEMORY;
            }
        }
    }
}

/* A block with the page, or NULL and why not. */
static KsmPattern *block_new(Group *g, GroupMember *m, const char *page,
                             uint64_t hash, uint32_t *why)
{
    KsmPattern *t;

    *why = may_write(g, m, WIRE_BLOCK_MAX);
    if (*why != WIRE_NONE) {
        return NULL;
    }
    t = pool_pattern_new(&g->pool, page, hash);
    if (!t) {
        *why = errno == ENOSPC || errno == EFBIG ? WIRE_FULL : WIRE_NO_MEMORY;
        return NULL;
    }
    g->used += t->filled;
    g->unwatched += t->filled;
    return t;
}

static void block_grow(Group *g, KsmPattern *t, unsigned want)
{
    unsigned had = t->filled;

    if (!is_short(g)) {
        pool_pattern_grow(&g->pool, t, want);
    }
    g->used += t->filled - had;
    g->unwatched += t->filled - had;
    g->changes += t->filled != had;     /* shares are of slots */
}

/*
 * No member sees how often all of them map a block, and has it grow in time
 * (PATTERN_USES): but so often it was mapped when it is full.
 */
static unsigned replica_length(const Group *g, const KsmPattern *full)
{
    bool used = g->config.max_holds * HOLD_USERS >= PATTERN_USES;

    return used ? MIN(2 * full->filled, WIRE_BLOCK_MAX) : 0;
}

int offer_block(Group *g, GroupMember *m, const Offer *o, unsigned want,
                uint32_t *slot)
{
    Judged j = { .g = g };
    int ret = copy_pages(&j, o);
    uint32_t old;
    KsmPattern *t;
    bool is;

    if (ret < 0) {
        return ret;
    }
    g->pool.node = o->node;
    g->stats.offered++;
    old = group_find(g, j.hash[0], g->copy, &is);
    t = is ? pool_pattern(&g->pool, old) : NULL;
    if (t && group_hold(g, m, old)) {
        g->stats.found++;
        block_grow(g, t, want);
        *slot = old;
        return 0;
    }
    want = t ? MAX(want, replica_length(g, t)) : want;
    t = block_new(g, m, g->copy, j.hash[0], slot);
    if (!t) {
        count_refused(g, *slot, 1);
        return 0;
    }
    *slot = t->first;
    publish(g, m, t->first, j.hash[0], old, WIRE_BLOCK_MAX);
    block_grow(g, t, want);
    tell(g, m, j.hash[0], t->first);
    return 0;
}

unsigned offer_grow(Group *g, GroupMember *m, uint32_t first, unsigned want)
{
    KsmPattern *t;

    if (first >= g->pool.top || !holds_of(&m->holds, first)) {
        return 0;
    }
    t = pool_pattern(&g->pool, first);
    if (!t) {
        return 0;
    }
    g->pool.node = -1;      /* which one it was is not known any more */
    block_grow(g, t, want);
    return t->filled;
}
