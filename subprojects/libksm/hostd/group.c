/*
 * group: the pool of a group, who holds what of it, who asked for what
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/page.h"
#include "base/prim.h"
#include "group.h"

#define INDEX_ROOM      16384u  /* entries, at first */
#define LEAVE_SLOTS     65536u  /* looked at in a step of leaving */
#define LEAVE_HOLDS     2048u   /* given back in it */
#define PREFETCH        16u     /* hashes ahead */
#define REST_NS         UINT64_C(1000000000)

static void *slots_array(size_t bytes, size_t *len)
{
    *len = ROUND_UP_TO(bytes, PAGE_BYTES);
    return prim.map(NULL, *len, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static uint32_t hash_of_slot(void *opaque, uint32_t slot)
{
    const Group *g = opaque;

    return g->pool.hash[slot];
}

/* Nobody holds the slot any more: it is about to be punched. */
static void slot_goes(void *opaque, uint32_t slot)
{
    Group *g = opaque;
    KsmPattern *t = pool_pattern(&g->pool, slot);
    uint16_t owner = g->owner[slot];

    index_remove(&g->index, g->pool.hash[slot], slot);
    g->used -= t ? t->filled : 1;
    if (owner != GROUP_NOBODY) {
        g->member[owner]->charged -= t ? WIRE_BLOCK_MAX : 1;
    }
}

static Room *room_of(void *opaque, unsigned member)
{
    const Group *g = opaque;

    return g->member[member] ? &g->member[member]->room : NULL;
}

int group_init(Group *g, const GroupConfig *config, int fd, int map_fd)
{
    int ret;

    memset(g, 0, sizeof(*g));
    g->config = *config;
    index_init(&g->index, hash_of_slot, g);
    memcg_init(&g->memcg, config->root);
    hasher_init(&g->hasher, config->key);
    ret = pool_init_over(&g->pool, config->max_holds, fd, map_fd);
    if (ret == 0) {
        ret = pool_reserve_slots(&g->pool, config->slots);
    }
    if (ret == 0) {
        ret = asked_init(&g->asked);
    }
    if (ret < 0) {
        return ret;
    }
    g->rooms.find = room_of;
    g->rooms.opaque = g;
    g->pool.goes = slot_goes;
    g->pool.opaque = g;
    g->config.slots = g->pool.capacity;
    g->upper = slots_array((size_t)g->config.slots * sizeof(*g->upper),
                           &g->upper_bytes);
    g->owner = slots_array((size_t)g->config.slots * sizeof(*g->owner),
                           &g->owner_bytes);
    g->copy = prim.map(NULL, GROUP_PIECE * PAGE_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    g->index_room = INDEX_ROOM;
    if (!g->upper || !g->owner || !g->copy) {
        return -ENOMEM;
    }
    return index_reserve(&g->index, g->index_room);
}

void group_free(Group *g)
{
    pool_free(&g->pool);
    index_free(&g->index);
    asked_free(&g->asked);
    rooms_free(&g->rooms);
    memcg_free(&g->memcg);
    if (g->upper) {
        prim.unmap(g->upper, g->upper_bytes);
    }
    if (g->owner) {
        prim.unmap(g->owner, g->owner_bytes);
    }
    if (g->copy) {
        prim.unmap(g->copy, GROUP_PIECE * PAGE_BYTES);
    }
}

/* Members ask about a content, not a page: twice the pool is enough. */
static uint64_t asked_size(const Group *g)
{
    uint64_t most = (uint64_t)2 * g->config.slots, sum = 0;

    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        if (g->member[i]) {
            sum = MIN(sum + MIN(g->member[i]->pages, most), most);
        }
    }
    return sum;
}

int group_rejoin(Group *g, GroupMember *m, unsigned number)
{
    if (number >= ASKED_MEMBERS || g->member[number]) {
        return -EPROTO;
    }
    memset(m, 0, sizeof(*m));
    if (holds_init(&m->holds, g->config.slots) < 0) {
        return -ENOMEM;
    }
    m->number = number;
    g->member[number] = m;
    g->members++;
    return 0;
}

int group_join(Group *g, GroupMember *m, uint64_t pages)
{
    unsigned number = 0;
    int ret;

    if (g->members >= MIN(g->config.max_members, ASKED_MEMBERS)) {
        return -ENOSPC;
    }
    while (number < ASKED_MEMBERS &&
           (g->member[number] || !asked_is_forgotten(&g->asked, number))) {
        number++;
    }
    if (number == ASKED_MEMBERS) {
        return -ENOSPC;
    }
    ret = group_rejoin(g, m, number);
    if (ret < 0) {
        return ret;
    }
    m->pages = pages;
    asked_limit(&g->asked, asked_size(g));
    return 0;
}

static void hold_take(Group *g, GroupMember *m, uint32_t slot, uint32_t n)
{
    holds_take(&m->holds, slot, n);
    g->changes++;
    for (uint32_t i = 0; i < n; i++) {
        pool_user_drop(&g->pool, slot);
    }
}

bool group_leave_step(Group *g, GroupMember *m)
{
    uint32_t end = MIN(m->released + LEAVE_SLOTS, g->pool.top);
    uint32_t slot = m->released;

    if (m->released == 0) {
        asked_leave(&g->asked, m->number);
        room_leave(&g->rooms, &m->room);
    }
    for (unsigned i = 0; i < LEAVE_HOLDS; i++) {
        slot = holds_next(&m->holds, slot, end);
        if (slot == end) {
            break;
        }
        hold_take(g, m, slot, holds_of(&m->holds, slot));
    }
    for (uint32_t s = m->released; s < slot; s++) {
        if (g->owner[s] == m->number) {
            g->owner[s] = GROUP_NOBODY;
        }
    }
    m->released = MAX(slot, 1);
    if (slot < g->pool.top) {
        return true;
    }
    g->member[m->number] = NULL;
    g->members--;
    holds_free(&m->holds);
    return false;
}

/* Only these 64 bits are meant, not their lower half. */
typedef struct Meant {
    const Group *g;
    uint32_t upper;
} Meant;

static bool is_meant(const void *opaque, uint32_t slot)
{
    const Meant *meant = opaque;

    return meant->g->upper[slot] == meant->upper;
}

static uint32_t lookup(const Group *g, uint64_t hash)
{
    Meant meant = { g, hash >> 32 };

    return index_find(&g->index, hash, is_meant, &meant);
}

/* Is that in the slot?  If memory has failed there: no. */
static bool slot_has(const Group *g, uint32_t slot, const char *page)
{
    return pool_readable(&g->pool, slot, 1) == 0 &&
           memcmp(pool_page(&g->pool, slot), page, PAGE_BYTES) == 0;
}

typedef struct Equal {
    Meant meant;
    const char *page;
} Equal;

static bool is_equal(const void *opaque, uint32_t slot)
{
    const Equal *equal = opaque;

    return is_meant(&equal->meant, slot) &&
           slot_has(equal->meant.g, slot, equal->page);
}

uint32_t group_find(const Group *g, uint64_t hash, const char *page, bool *is)
{
    Equal equal = { { g, hash >> 32 }, page };
    uint32_t slot = index_find(&g->index, hash, is_equal, &equal);

    *is = slot != PLACE_NONE;
    if (!*is) {
        slot = lookup(g, hash);
        if (slot != PLACE_NONE && pool_readable(&g->pool, slot, 1) == 0) {
            slot = PLACE_NONE;
        }
    }
    return slot;
}

bool group_hold(Group *g, GroupMember *m, uint32_t slot)
{
    /* nobody may have all holds of a slot, or others had to publish a copy */
    if (pool_full(&g->pool, slot) ||
        holds_of(&m->holds, slot) >= MAX(g->config.max_holds / 4, 1)) {
        return false;
    }
    pool_user_add(&g->pool, slot);
    holds_add(&m->holds, slot);
    g->changes++;
    return true;
}

bool group_hold_told(Group *g, GroupMember *m, uint32_t slot, GArray *blocks)
{
    bool news = holds_of(&m->holds, slot) == 0;

    if (!group_hold(g, m, slot)) {
        return false;
    }
    if (news && pool_pattern(&g->pool, slot)) {
        g_array_append_val(blocks, slot);
    }
    return true;
}

int group_room(Group *g, GroupMember *m, uint64_t mappings, uint64_t waiting)
{
    return room_tell(&g->rooms, &m->room, mappings, waiting, prim.now_ns());
}

void group_unheard(Group *g, GroupMember *m)
{
    room_leave(&g->rooms, &m->room);
}

/* Those that may map what a member asks about. */
typedef struct Mappers {
    uint16_t number[ASKED_SAME + 1];    /* it is the last one */
    unsigned others;
    bool here;              /* it has asked before */
} Mappers;

static void mappers_find(Group *g, const GroupMember *m, uint64_t hash,
                         Mappers *to)
{
    to->others = asked_others(&g->asked, hash, m->number, to->number,
                              &to->here);
    to->number[to->others] = m->number;
}

/*
 * Has half of them no room?  What few have none for saves more in the pool, also
 * where no ksmd is at work; and no single member is to keep all from sharing.
 * Only who has said how much hears of that.
 */
static bool is_left(Group *g, const GroupMember *m, const Mappers *mappers,
                    uint64_t now)
{
    unsigned used = 0;

    for (unsigned i = 0; m->room.told && i <= mappers->others; i++) {
        const Room *room = room_of(g, mappers->number[i]);

        used += room && room_is_used(room, now);
    }
    return mappers->others && 2 * used > mappers->others;
}

/* It is equal to something, and nobody is to offer it. */
static void leave(Group *g, const GroupMember *m, uint64_t hash,
                  const Mappers *mappers, uint64_t now)
{
    if (!asked_left(&g->asked, hash, m->number, now)) {
        return;
    }
    for (unsigned i = 0; i < mappers->others; i++) {
        const Room *room = room_of(g, mappers->number[i]);

        if (room && room->told && g->tell) {
            g->tell(g->opaque, mappers->number[i], hash, WIRE_LEFT);
        }
    }
}

/* Whoever asks second, and later; and the first one, with the second. */
static void mappers_charge(Group *g, const Mappers *mappers, uint64_t now)
{
    unsigned first = mappers->others == 1 ? 0 : mappers->others;

    for (unsigned i = first; i <= mappers->others && !mappers->here; i++) {
        Room *room = room_of(g, mappers->number[i]);

        if (room && mappers->others) {
            room_charge(room, now);
        }
    }
}

/* About what the pool has not, where members have said how much room there is. */
static uint32_t ask_with_room(Group *g, GroupMember *m, uint64_t hash,
                              uint64_t now)
{
    Mappers mappers;

    mappers_find(g, m, hash, &mappers);
    if (is_left(g, m, &mappers, now)) {
        leave(g, m, hash, &mappers, now);
        return WIRE_LEFT;
    }
    mappers_charge(g, &mappers, now);
    return asked_note(&g->asked, hash, m->number, now) ? WIRE_WANTED
                                                       : WIRE_NONE;
}

static uint32_t ask_one(Group *g, GroupMember *m, uint64_t hash,
                        uint64_t now, GArray *blocks)
{
    uint32_t slot = lookup(g, hash);

    if (slot == PLACE_NONE && g->rooms.told) {
        return ask_with_room(g, m, hash, now);
    }
    if (slot == PLACE_NONE) {
        return asked_note(&g->asked, hash, m->number, now) ? WIRE_WANTED
                                                           : WIRE_NONE;
    }
    if (!group_hold_told(g, m, slot, blocks)) {
        return WIRE_WANTED;     /* who offers it gets a copy in another slot */
    }
    room_charge(&m->room, now);
    return slot;
}

bool group_is_tight(Group *g)
{
    /* what the table of hashes has grown by is not free any more */
    return memcg_is_short(&g->memcg, asked_owed(&g->asked));
}

bool group_may_have(Group *g, size_t bytes)
{
    /* no look for nothing: it takes a dozen files, most of an idle member's ASK */
    return !bytes || (!group_is_tight(g) && memcg_has_room(&g->memcg, bytes));
}

/* One that does not grow forgets; one that grows by little is moved often. */
static AskedGrowth asked_may(Group *g, unsigned n)
{
    AskedGrowth may = ASKED_DOUBLE;

    while (!group_may_have(g, asked_growth(&g->asked, n, may))) {
        may--;
    }
    return may;
}

void group_ask(Group *g, GroupMember *m, const uint64_t *hash, unsigned n,
               uint32_t *slot, GArray *blocks)
{
    uint64_t now = prim.now_ns();

    g->active = now;
    rooms_note(&g->rooms, m->number, hash, n);
    asked_room(&g->asked, n, asked_may(g, n));
    for (unsigned i = 0; i < n + PREFETCH; i++) {
        if (i < n) {
            index_prefetch(&g->index, hash[i]);
            asked_prefetch(&g->asked, hash[i]);
        }
        if (i >= PREFETCH) {
            slot[i - PREFETCH] = ask_one(g, m, hash[i - PREFETCH], now, blocks);
        }
    }
    g->stats.asked += n;
}

unsigned group_length(Group *g, uint32_t slot)
{
    KsmPattern *t = pool_pattern(&g->pool, slot);

    return t ? t->filled : pool_users(&g->pool, slot) > 0;
}

int group_drop(Group *g, GroupMember *m, const WirePair *pair, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        if (pair[i].slot >= g->config.slots ||
            pair[i].holds > holds_of(&m->holds, pair[i].slot)) {
            return -EPROTO;
        }
        hold_take(g, m, pair[i].slot, pair[i].holds);
    }
    return 0;
}

void group_keep(Group *g, GroupMember *m, uint32_t slot, uint32_t keep)
{
    uint32_t had = holds_of(&m->holds, slot);

    if (had > keep) {
        hold_take(g, m, slot, had - keep);
    }
}

bool group_keep_step(Group *g, GroupMember *m, const Holds *keep,
                     uint32_t *from)
{
    uint32_t end = MIN(*from + LEAVE_SLOTS, g->pool.top);

    for (unsigned i = 0; i < LEAVE_HOLDS && *from < end; i++) {
        uint32_t slot = holds_next(&m->holds, *from, end);

        if (slot < end) {
            group_keep(g, m, slot, holds_of(keep, slot));
        }
        *from = MIN(slot + 1, end);
    }
    return *from < g->pool.top;
}

/* Have the members as many holds of each slot as it has users? */
int group_check(const Group *g, uint32_t top)
{
    g_autofree uint32_t *held = g_new0(uint32_t, top);
    int ret = 0;

    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        const Holds *h = g->member[i] ? &g->member[i]->holds : NULL;

        for (uint32_t s = h ? holds_next(h, 0, top) : top; s < top;
             s = holds_next(h, s + 1, top)) {
            held[s] += holds_of(h, s);
        }
    }
    for (uint32_t s = 0; s < top && ret == 0; s++) {
        ret = held[s] == pool_users(&g->pool, s) ? 0 : -EPROTO;
        if (g->owner[s] != GROUP_NOBODY && held[s] &&
            (g->owner[s] >= ASKED_MEMBERS || !g->member[g->owner[s]])) {
            ret = -EPROTO;
        }
    }
    return ret;
}

/*
 * Of slots with one content the index has the one that is a block, or else has
 * room.
 */
static void slot_index(Group *g, uint32_t slot)
{
    uint64_t hash = (uint64_t)g->upper[slot] << 32 | g->pool.hash[slot];
    uint32_t old = lookup(g, hash);

    g->used += group_length(g, slot);
    if (old == PLACE_NONE) {
        index_insert(&g->index, hash, slot);
    } else if (!pool_pattern(&g->pool, old) &&
               (pool_full(&g->pool, old) || pool_pattern(&g->pool, slot))) {
        index_replace(&g->index, hash, old, slot);
    }
}

void group_adopt(Group *g, uint32_t top, size_t file_slots)
{
    pool_adopt(&g->pool, top, file_slots);
    asked_limit(&g->asked, asked_size(g));
    g->index_room = MAX(g->index_room, g->pool.shared);
    index_reserve(&g->index, g->index_room);
    for (uint32_t s = 0; s < top; s++) {
        if (pool_users(&g->pool, s)) {
            slot_index(g, s);
        }
    }
}

bool group_step(Group *g)
{
    bool more = index_step(&g->index) != INDEX_DONE;

    pool_flush(&g->pool);
    more |= pool_release(&g->pool);
    return asked_step(&g->asked) || more;
}

/* Many idle members are never silent: what they ask is little, though. */
bool group_rest(Group *g)
{
    if (g->stats.asked - g->asked_before <= WIRE_ASKS + g->asked.count / 4) {
        asked_rest(&g->asked);
    }
    g->asked_before = g->stats.asked;
    if (g->active && prim.now_ns() - g->active >= REST_NS) {
        prim.advise(g->copy, GROUP_PIECE * PAGE_BYTES, MADV_DONTNEED);
        g->active = 0;
    }
    return g->active;
}

GroupShare group_share(Group *g, const GroupMember *m)
{
    GroupShare sum = { 0 };
    uint32_t top = g->pool.top;

    for (uint32_t s = holds_next(&m->holds, 0, top); s < top;
         s = holds_next(&m->holds, s + 1, top)) {
        const KsmPattern *t = pool_pattern(&g->pool, s);
        uint64_t slots = t ? t->filled : 1, holds = holds_of(&m->holds, s);

        sum.held += slots;
        sum.share += 1000 * holds * slots / pool_users(&g->pool, s);
    }
    return sum;
}

uint64_t group_metadata(const Group *g)
{
    uint64_t bytes = pool_bytes(&g->pool) + index_bytes(&g->index) +
                     asked_bytes(&g->asked) + rooms_bytes(&g->rooms);

    bytes += (uint64_t)g->pool.top * (sizeof(*g->upper) + sizeof(*g->owner));
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        if (g->member[i]) {
            bytes += holds_bytes(&g->member[i]->holds, g->pool.top);
        }
    }
    return bytes;
}

uint64_t group_quota(const Group *g)
{
    return (uint64_t)g->config.slots * g->config.share / 100;
}
