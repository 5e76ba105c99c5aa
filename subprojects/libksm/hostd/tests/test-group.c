/*
 * hostd tests: the group against a model, with random operations
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The model knows of each member what it holds, and of each slot that is held
 * what it must contain.  After each operation all slots that are held are
 * looked at, by the descriptor that members have: what is lost or changed is
 * seen at once.
 */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <glib.h>

#include "base/page.h"
#include "base/prim.h"
#include "offer.h"
#include "poolfile.h"
#include "sys.h"
#include "../../tests/fake-root.h"

#define MEMBERS     8u
#define CONTENTS    160u
#define SLOTS       8192u
#define RING        WIRE_OFFERS

typedef struct Asker {
    unsigned member;
    unsigned wanted;        /* second in which it was told so; 0: not */
} Asker;

typedef struct World {
    Group g;
    PoolFile file;
    int ring;
    GRand *rand;
    GroupMember member[MEMBERS];
    bool joined[MEMBERS];
    uint32_t held[MEMBERS][SLOTS];
    uint32_t content[SLOTS];        /* of a slot that is held, or a block's */
    unsigned length[SLOTS];         /* of a block, that was told; or 1 */
    /* what asked.c is to remember */
    Asker asker[CONTENTS][MEMBERS];
    unsigned askers[CONTENTS];
    uint64_t hash[CONTENTS];
    GArray *blocks;
    uint64_t news;
    int publisher;
} World;

static void page_make(char *page, uint32_t content)
{
    uint32_t *word = (uint32_t *)page;

    for (unsigned i = 0; i < PAGE_BYTES / 4; i++) {
        word[i] = content * 2654435761u + i;
    }
}

static unsigned number_of(const World *w, unsigned group_number)
{
    for (unsigned i = 0; i < MEMBERS; i++) {
        if (w->joined[i] && w->member[i].number == group_number) {
            return i;
        }
    }
    g_assert_not_reached();
}

static uint32_t content_of(const World *w, uint64_t hash)
{
    for (unsigned c = 0; c < CONTENTS; c++) {
        if (w->hash[c] == hash) {
            return c;
        }
    }
    g_assert_not_reached();
}

/* A member was told a slot, for that content. */
static void model_hold(World *w, unsigned m, uint32_t slot, uint32_t content)
{
    bool known = false;

    g_assert(slot < w->g.config.slots);
    g_assert(slot < SLOTS);
    for (unsigned i = 0; i < MEMBERS; i++) {
        known |= w->held[i][slot] > 0;
    }
    if (known) {
        g_assert(w->content[slot] == content);
    } else {
        w->length[slot] = 1;
    }
    w->content[slot] = content;
    w->held[m][slot]++;
}

static unsigned seconds = 1;

static uint64_t now_fake(void)
{
    return seconds * UINT64_C(1000000000);
}

/* What an ASK is to be answered, and that is remembered. */
static uint32_t model_ask(World *w, unsigned m, uint32_t content)
{
    Asker *a = w->asker[content], *mine = NULL;
    unsigned n = w->askers[content];
    bool coming = false;

    for (unsigned i = 0; i < n; i++) {
        if (a[i].wanted && (seconds / 4 - a[i].wanted / 4) % 30 >= 3) {
            a[i].wanted = 0;
        }
        if (a[i].member == m) {
            mine = &a[i];
        } else {
            coming |= a[i].wanted > 0;
        }
    }
    if (n > !!mine && !(mine && mine->wanted) && coming && !mine && n >= 6) {
        return WIRE_WANTED;
    }
    if (!mine) {
        mine = &a[w->askers[content]++];
        *mine = (Asker) { m, 0 };
    }
    if (n && w->askers[content] > 1 && (mine->wanted || !coming)) {
        mine->wanted = seconds;
        return WIRE_WANTED;
    }
    return WIRE_NONE;
}

static bool model_forget(World *w, unsigned m, uint32_t content)
{
    Asker *a = w->asker[content];
    unsigned kept = 0, n = w->askers[content];

    for (unsigned i = 0; i < n; i++) {
        if (a[i].member != m) {
            a[kept++] = a[i];
        }
    }
    w->askers[content] = kept;
    return kept < n;
}

/* ... and may be remembered, where slots may be full. */
static void model_note(World *w, unsigned m, uint32_t content)
{
    model_forget(w, m, content);
    w->asker[content][w->askers[content]++] = (Asker) { m, 0 };
}

static bool tell(void *opaque, unsigned number, uint64_t hash, uint32_t slot)
{
    World *w = opaque;
    unsigned m = number_of(w, number);
    uint32_t content = content_of(w, hash);

    g_assert(model_forget(w, m, content));
    g_assert(w->publisher != m);
    if (!group_hold(&w->g, &w->member[m], slot)) {
        return false;
    }
    model_hold(w, m, slot, content);
    w->news++;
    return true;
}

static void member_join(World *w, unsigned m)
{
    /* numbers are given again when what was asked is forgotten */
    while (group_step(&w->g)) {
        continue;
    }
    g_assert(group_join(&w->g, &w->member[m], 1000) == 0);
    w->joined[m] = true;
}

static void world_init(World *w, const GroupConfig *config, unsigned seed)
{
    g_autofree char *note = NULL;
    char page[PAGE_BYTES];

    memset(w, 0, sizeof(*w));
    w->rand = g_rand_new_with_seed(seed);
    w->blocks = g_array_new(FALSE, FALSE, sizeof(uint32_t));
    w->publisher = -1;
    g_assert(poolfile_make(&w->file, SLOTS * PAGE_BYTES, &note) == 0);
    g_assert(group_init(&w->g, config, w->file.fd, w->file.map_fd) == 0);
    w->g.tell = tell;
    w->g.opaque = w;
    w->ring = sys.memfd("ring", 0);
    g_assert(w->ring >= 0);
    g_assert(prim.truncate(w->ring, RING * PAGE_BYTES) == 0);
    for (unsigned c = 0; c < CONTENTS; c++) {
        page_make(page, c);
        w->hash[c] = hash_page(&w->g.hasher, page);
    }
    for (unsigned m = 0; m < MEMBERS; m++) {
        member_join(w, m);
    }
}

static void member_leave(World *w, unsigned m)
{
    unsigned steps = 0;

    while (group_leave_step(&w->g, &w->member[m])) {
        steps++;
    }
    g_assert(steps < 100);
    memset(w->held[m], 0, sizeof(w->held[m]));
    w->joined[m] = false;
    for (unsigned c = 0; c < CONTENTS; c++) {
        model_forget(w, m, c);
    }
}

static size_t file_pages(const World *w)
{
    struct stat st;

    g_assert(fstat(w->file.fd, &st) == 0);
    return st.st_blocks * 512 / PAGE_BYTES;
}

static void world_free(World *w)
{
    for (unsigned m = 0; m < MEMBERS; m++) {
        if (w->joined[m]) {
            member_leave(w, m);
        }
    }
    while (group_step(&w->g)) {
        continue;
    }
    /* nothing is held: nothing is left */
    g_assert(w->g.used == 0);
    g_assert(w->g.pool.sharing == 0);
    g_assert(w->g.index.count == 0);
    g_assert(w->g.members == 0);
    if (!w->g.pool.keep_all) {
        g_assert(file_pages(w) == 0);
    }
    prim.close(w->ring);
    group_free(&w->g);
    g_array_unref(w->blocks);
    g_rand_free(w->rand);
}

/* Blocks that the member hears of now. */
static void blocks_check(World *w)
{
    for (unsigned i = 0; i < w->blocks->len; i++) {
        uint32_t first = g_array_index(w->blocks, uint32_t, i);

        g_assert(first % WIRE_BLOCK_MAX == 0);
        w->length[first] = group_length(&w->g, first);
    }
    g_array_set_size(w->blocks, 0);
}

static void slot_check(World *w, uint32_t slot)
{
    char want[PAGE_BYTES], have[PAGE_BYTES];

    page_make(want, w->content[slot]);
    for (unsigned i = 0; i < w->length[slot]; i++) {
        g_assert(pread(w->file.map_fd, have, PAGE_BYTES,
                       (off_t)(slot + i) * PAGE_BYTES) == PAGE_BYTES);
        g_assert(memcmp(want, have, PAGE_BYTES) == 0);
    }
}

static void world_check(World *w)
{
    uint64_t holds = 0, used = 0, charged = 0, slots[MEMBERS] = { 0 };

    for (uint32_t s = 0; s < SLOTS; s++) {
        unsigned of_slot = 0;

        for (unsigned m = 0; m < MEMBERS; m++) {
            uint32_t n = w->held[m][s];

            if (w->joined[m]) {
                g_assert(holds_of(&w->member[m].holds, s) == n);
            }
            of_slot += n;
            slots[m] += n > 0;
        }
        holds += of_slot;
        g_assert(of_slot <= w->g.config.max_holds);
        if (of_slot) {
            slot_check(w, s);
            used += group_length(&w->g, s);
        }
    }
    g_assert(w->g.pool.sharing == holds);
    g_assert(w->g.used == used);
    for (unsigned m = 0; m < MEMBERS; m++) {
        if (w->joined[m]) {
            g_assert(w->member[m].holds.held == slots[m]);
            g_assert(w->member[m].charged <= group_quota(&w->g));
            charged += w->member[m].charged;
        }
    }
    g_assert(charged <= w->g.pool.top);
}

static bool in_pool(const World *w, uint32_t content)
{
    for (uint32_t s = 0; s < SLOTS; s++) {
        for (unsigned m = 0; m < MEMBERS; m++) {
            if (w->held[m][s] && w->content[s] == content) {
                return true;
            }
        }
    }
    return false;
}

/* Is all as it must be where no slot is ever full and no block is made? */
static void answer_check(World *w, unsigned m, uint32_t content, uint32_t slot)
{
    g_assert((slot < w->g.config.slots) == in_pool(w, content));
    if (slot < w->g.config.slots) {
        return;
    }
    g_assert(slot == model_ask(w, m, content));
}

static void do_ask(World *w, unsigned m, bool strict)
{
    uint32_t content[40], slot[40];
    uint64_t hash[40];
    unsigned n = g_rand_int_range(w->rand, 1, 40);

    seconds += g_rand_int_range(w->rand, 0, 4);
    for (unsigned i = 0; i < n; i++) {
        content[i] = g_rand_int_range(w->rand, 0, CONTENTS);
        hash[i] = w->hash[content[i]];
    }
    group_ask(&w->g, &w->member[m], hash, n, slot, w->blocks);
    for (unsigned i = 0; i < n; i++) {
        if (strict) {
            answer_check(w, m, content[i], slot[i]);
        }
        if (slot[i] < w->g.config.slots) {
            model_hold(w, m, slot[i], content[i]);
        } else if (!strict) {
            model_note(w, m, content[i]);
        }
    }
    blocks_check(w);
}

static Offer ring_fill(World *w, unsigned n, uint32_t *content)
{
    unsigned first = g_rand_int_range(w->rand, 0, RING - n + 1);
    bool run = g_rand_boolean(w->rand);
    char page[PAGE_BYTES];

    for (unsigned i = 0; i < n; i++) {
        content[i] = run && i ? (content[i - 1] + 1) % CONTENTS
                              : g_rand_int_range(w->rand, 0, CONTENTS);
        page_make(page, content[i]);
        g_assert(prim.write(w->ring, page, PAGE_BYTES,
                            (off_t)(first + i) * PAGE_BYTES) == PAGE_BYTES);
    }
    return (Offer) { .ring = w->ring, .first = first, .count = n,
                     .node = -1 };
}

static void asked_forget(World *w, const uint32_t *content,
                         const uint32_t *slot, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        if (slot[i] < w->g.config.slots) {
            w->askers[content[i]] = 0;
        }
    }
}

static void do_offer(World *w, unsigned m, bool strict)
{
    uint32_t content[200], slot[200];
    unsigned most = g_rand_boolean(w->rand) ? 9 : G_N_ELEMENTS(slot);
    unsigned n = g_rand_int_range(w->rand, 1, most);
    Offer o = ring_fill(w, n, content);

    w->publisher = m;
    offer_pages(&w->g, &w->member[m], &o, slot, w->blocks);
    for (unsigned i = 0; i < n; i++) {
        if (slot[i] < w->g.config.slots) {
            model_hold(w, m, slot[i], content[i]);
        } else {
            g_assert(!strict);
            g_assert(slot[i] != WIRE_WANTED);
            g_assert(slot[i] != WIRE_NONE);
        }
    }
    asked_forget(w, content, slot, n);
    blocks_check(w);
}

static void do_repeat(World *w, unsigned m)
{
    uint32_t content, slot;
    unsigned want = g_rand_int_range(w->rand, 1, WIRE_BLOCK_MAX + 1);
    Offer o = ring_fill(w, 1, &content);

    w->publisher = m;
    g_assert(offer_block(&w->g, &w->member[m], &o, want, &slot) == 0);
    if (slot < w->g.config.slots) {
        model_hold(w, m, slot, content);
        w->length[slot] = group_length(&w->g, slot);
        g_assert(w->length[slot] >= want);
    }
    asked_forget(w, &content, &slot, 1);
}

/* A slot that @m holds; SLOTS: none. */
static uint32_t some_slot(World *w, unsigned m)
{
    uint32_t s = g_rand_int_range(w->rand, 0, SLOTS);

    for (unsigned i = 0; i < SLOTS; i++, s = (s + 1) % SLOTS) {
        if (w->held[m][s]) {
            return s;
        }
    }
    return SLOTS;
}

static void do_grow(World *w, unsigned m)
{
    unsigned want = g_rand_int_range(w->rand, 1, WIRE_BLOCK_MAX + 1), got;

    for (uint32_t s = 0; s < SLOTS; s++) {
        bool block = w->held[m][s] && pool_pattern(&w->g.pool, s);

        got = s % 64 && !block ? 0 : offer_grow(&w->g, &w->member[m], s, want);
        g_assert((got > 0) == block);
        if (got) {
            g_assert(got >= want);
            w->length[s] = got;
        }
    }
}

static void do_drop(World *w, unsigned m)
{
    WirePair pair[200];
    unsigned n = 0, want = g_rand_int_range(w->rand, 0, 200);

    while (n < want) {
        uint32_t s = some_slot(w, m);

        if (s == SLOTS) {
            break;
        }
        pair[n].slot = s;
        pair[n].holds = g_rand_int_range(w->rand, 1, w->held[m][s] + 1);
        w->held[m][s] -= pair[n++].holds;
    }
    g_assert(group_drop(&w->g, &w->member[m], pair, n) == 0);
}

/* More than is held: refused, and nothing goes. */
static void do_drop_wrong(World *w, unsigned m)
{
    uint32_t s = g_rand_int_range(w->rand, 0, SLOTS);
    WirePair over = { s, w->held[m][s] + 1 };
    WirePair beyond = { w->g.config.slots, 0 };

    g_assert(group_drop(&w->g, &w->member[m], &over, 1) == -EPROTO);
    g_assert(group_drop(&w->g, &w->member[m], &beyond, 1) == -EPROTO);
}

#define MANY    30720u

/*
 * All can be found while the index grows; but for the few whose lines of the
 * index were full.
 */
static void test_many(void)
{
    g_autofree Group *g = g_new(Group, 1);
    GroupConfig config = { .slots = 2 * MANY, .max_holds = 64,
                           .max_members = 2, .share = 100, .root = "/" };
    g_autofree char *note = NULL;
    g_autofree char *page = g_malloc(PAGE_BYTES);
    g_autofree uint64_t *hash = g_new(uint64_t, MANY);
    g_autofree uint32_t *slot = g_new(uint32_t, MANY);
    g_autofree uint32_t *found = g_new(uint32_t, MANY);
    g_autoptr(GArray) blocks = g_array_new(FALSE, FALSE, sizeof(uint32_t));
    Offer o = { .ring = sys.memfd("ring", 0), .node = -1,
                .count = WIRE_OFFERS };
    GroupMember a, b;
    PoolFile file;
    unsigned missed = 0;

    g_assert(poolfile_make(&file, 2 * MANY * PAGE_BYTES, &note) == 0);
    g_assert(group_init(g, &config, file.fd, file.map_fd) == 0);
    g_assert(group_join(g, &a, MANY) == 0);
    g_assert(group_join(g, &b, MANY) == 0);
    g_assert(prim.truncate(o.ring, WIRE_OFFERS * PAGE_BYTES) == 0);
    for (unsigned i = 0; i < MANY; i++) {
        page_make(page, i);
        hash[i] = hash_page(&g->hasher, page);
        g_assert(prim.write(o.ring, page, PAGE_BYTES,
                            i % WIRE_OFFERS * PAGE_BYTES) == PAGE_BYTES);
        if ((i + 1) % WIRE_OFFERS == 0) {
            offer_pages(g, &a, &o, slot + i + 1 - WIRE_OFFERS, blocks);
        }
    }
    group_ask(g, &b, hash, MANY, found, blocks);
    for (unsigned i = 0; i < MANY; i++) {
        g_assert(found[i] == slot[i] || found[i] == WIRE_NONE);
        missed += found[i] != slot[i];
    }
    g_test_message("missed %u", missed);
    g_assert(missed < MANY / 2000);
    while (group_leave_step(g, &a) || group_leave_step(g, &b)) {
        continue;
    }
    g_assert(g->used == 0);
    prim.close(o.ring);
    group_free(g);
}

/* What a member does not list goes back, in pieces, and all of it. */
static void test_keep_far(void)
{
    enum { FAR = 3 * 65536, TAKE = 512 };
    g_autofree Group *g = g_new(Group, 1);
    GroupConfig config = { .slots = FAR, .max_holds = 64, .max_members = 2,
                           .share = 100, .root = "/" };
    g_autofree char *note = NULL;
    uint32_t from = 0;
    PoolFile file;
    GroupMember m;
    Holds keep;

    g_assert(poolfile_make(&file, (uint64_t)FAR * PAGE_BYTES, &note) == 0);
    g_assert(group_init(g, &config, file.fd, file.map_fd) == 0);
    g_assert(group_join(g, &m, FAR) == 0);
    g_assert(holds_init(&keep, FAR) == 0);
    for (uint32_t slot = 0; slot < FAR; slot += TAKE) {
        unsigned n = TAKE;

        g_assert(pool_take(&g->pool, &n) == slot && n == TAKE);
    }
    /* where pieces begin and end */
    g_assert(group_hold(g, &m, 10));
    g_assert(group_hold(g, &m, 65536));
    g_assert(group_hold(g, &m, 131071));
    g_assert(group_hold(g, &m, 131072));
    g_assert(group_hold(g, &m, FAR - 1));
    holds_add(&keep, 131071);
    while (group_keep_step(g, &m, &keep, &from)) {
        continue;
    }
    g_assert(m.holds.held == 1 && holds_of(&m.holds, 131071) == 1);
    while (group_leave_step(g, &m)) {
        continue;
    }
    holds_free(&keep);
    group_free(g);
}

typedef struct Run {
    GroupConfig config;
    bool strict;            /* no slot is ever full, no block is made */
    unsigned steps;
} Run;

static void test_random(gconstpointer data)
{
    const Run *run = data;
    g_autofree World *w = g_new(World, 1);

    world_init(w, &run->config, 1);
    for (unsigned i = 0; i < run->steps; i++) {
        unsigned what = g_rand_int_range(w->rand, 0, 100);
        unsigned m = g_rand_int_range(w->rand, 0, MEMBERS);

        if (what < 30) {
            do_ask(w, m, run->strict);
        } else if (what < 50) {
            do_offer(w, m, run->strict);
        } else if (what < 60 && !run->strict) {
            do_repeat(w, m);
        } else if (what < 64) {
            do_grow(w, m);
        } else if (what < 90) {
            do_drop(w, m);
        } else if (what < 94) {
            do_drop_wrong(w, m);
        } else if (what < 96) {
            member_leave(w, m);
            member_join(w, m);
        } else {
            group_step(&w->g);
        }
        world_check(w);
    }
    g_assert(w->g.stats.news == w->news);
    g_assert(w->news > 0);
    g_assert(w->g.stats.found > 0);
    world_free(w);
}

static GroupConfig plain(void)
{
    return (GroupConfig) { .slots = SLOTS, .max_holds = 64, .max_members = 8,
                           .share = 100, .key = 42, .root = "/" };
}

static void offer_some(World *w, unsigned m, uint32_t content, unsigned n,
                       uint32_t *slot)
{
    char page[PAGE_BYTES];
    Offer o = { .ring = w->ring, .count = n, .node = -1 };

    for (unsigned i = 0; i < n; i++) {
        page_make(page, content + i);
        g_assert(prim.write(w->ring, page, PAGE_BYTES,
                            (off_t)i * PAGE_BYTES) == PAGE_BYTES);
    }
    w->publisher = m;
    offer_pages(&w->g, &w->member[m], &o, slot, w->blocks);
}

/* Consecutive pages get consecutive slots; those that are there do not. */
static void test_runs(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t first[100], second[100];

    world_init(w, &config, 1);
    offer_some(w, 0, 0, 100, first);
    for (unsigned i = 1; i < 100; i++) {
        g_assert(first[i] == first[0] + i);
    }
    offer_some(w, 1, 50, 100, second);
    for (unsigned i = 0; i < 50; i++) {
        g_assert(second[i] == first[50 + i]);
    }
    for (unsigned i = 51; i < 100; i++) {
        g_assert(second[i] == second[50] + i - 50);
    }
    g_assert(w->g.used == 150);
    g_assert(w->g.stats.published == 150);
    g_assert(w->g.stats.found == 50);
    world_free(w);
}

/* One domain's page is not another's. */
static void test_domains(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t slot[3];
    uint64_t hash;
    char page[PAGE_BYTES];
    Offer o = { .count = 1, .node = -1, .domain = 0x9e3779b1 };

    world_init(w, &config, 1);
    o.ring = w->ring;
    offer_some(w, 0, 7, 1, &slot[0]);
    offer_pages(&w->g, &w->member[1], &o, &slot[1], w->blocks);
    g_assert(slot[1] != slot[0]);
    page_make(page, 7);
    hash = hash_page(&w->g.hasher, page) ^ 0x9e3779b1;
    group_ask(&w->g, &w->member[2], &hash, 1, &slot[2], w->blocks);
    g_assert(slot[2] == slot[1]);
    world_free(w);
}

/* More holds than a slot may have: another slot with the content. */
static void test_replica(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t a, b, c, full;

    config.max_holds = 2;
    world_init(w, &config, 1);
    offer_some(w, 0, 7, 1, &a);
    offer_some(w, 1, 7, 1, &b);
    g_assert(a == b);
    group_ask(&w->g, &w->member[2], &w->hash[7], 1, &full, w->blocks);
    g_assert(full == WIRE_WANTED);
    offer_some(w, 2, 7, 1, &b);
    g_assert(a != b);
    group_ask(&w->g, &w->member[3], &w->hash[7], 1, &c, w->blocks);
    g_assert(b == c);
    world_free(w);
}

/* A block that all holds there may be are of is followed by a longer one. */
static void test_replica_longer(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();

    for (unsigned i = 0; i < 2; i++) {
        Offer o = { .count = 1, .node = -1 };
        uint32_t slot, was = SLOT_NONE;
        unsigned last = 0, length;
        char page[PAGE_BYTES];

        /* users enough to have grown, or not */
        config.max_holds = PATTERN_USES / HOLD_USERS - i;
        world_init(w, &config, 1);
        o.ring = w->ring;
        page_make(page, 7);
        g_assert(prim.write(w->ring, page, PAGE_BYTES, 0) == PAGE_BYTES);
        for (unsigned k = 0, blocks = 0; blocks < 7; k++) {
            g_assert(offer_block(&w->g, &w->member[k % MEMBERS], &o, 16,
                                 &slot) == 0);
            if (slot == was) {
                continue;
            }
            g_assert(slot < SLOTS);
            length = group_length(&w->g, slot);
            g_assert(length == (blocks && i == 0 ? MIN(2 * last, 512) : 16));
            last = length;
            was = slot;
            blocks++;
        }
        world_free(w);
    }
}

/* Who asks again and again has not all holds of a slot in the end. */
static void test_greedy(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t slot, again[64];
    uint64_t hash[64];

    world_init(w, &config, 1);
    offer_some(w, 0, 7, 1, &slot);
    for (unsigned i = 0; i < 64; i++) {
        hash[i] = w->hash[7];
    }
    group_ask(&w->g, &w->member[1], hash, 64, again, w->blocks);
    for (unsigned i = 0; i < 64; i++) {
        g_assert(again[i] == (i < 16 ? slot : WIRE_WANTED));
    }
    group_ask(&w->g, &w->member[2], hash, 1, again, w->blocks);
    g_assert(again[0] == slot);
    world_free(w);
}

static void test_quotas(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    g_autofree uint32_t *slot = g_new(uint32_t, 512);
    GroupMember many[8];

    config.share = 1;       /* 81 slots */
    world_init(w, &config, 1);
    offer_some(w, 0, 0, 80, slot);
    offer_some(w, 0, 80, 5, slot);
    g_assert(slot[0] < SLOTS);
    for (unsigned i = 1; i < 5; i++) {
        g_assert(slot[i] == WIRE_SHARE);
    }
    g_assert(w->g.stats.refused_share == 4);
    /* what is there already is not published, and has no share */
    offer_some(w, 1, 0, 81, slot);
    g_assert(slot[80] < SLOTS);
    g_assert(w->member[1].charged == 0);
    for (unsigned i = MEMBERS; i < 8; i++) {
        g_assert(group_join(&w->g, &many[i], 1) == 0);
    }
    g_assert(group_join(&w->g, &many[0], 1) == -ENOSPC);
    for (unsigned i = MEMBERS; i < 8; i++) {
        g_assert(!group_leave_step(&w->g, &many[i]));
    }
    world_free(w);
}

/* The pool is full: what is there is answered, what is not is refused. */
static void test_full(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t slot[512], again[512];

    config.slots = 4096;
    world_init(w, &config, 1);
    for (unsigned i = 0; i < 8; i++) {
        offer_some(w, 0, 1000 + i * 512, 512, slot);
        g_assert(slot[511] < 4096);
    }
    offer_some(w, 1, 1000 + 4000, 200, slot);
    for (unsigned i = 0; i < 200; i++) {
        g_assert((slot[i] < 4096) == (i < 96));
        g_assert(i < 96 || slot[i] == WIRE_FULL);
    }
    g_assert(w->g.stats.refused_full == 104);
    /* one slot goes: it can be had again at once */
    group_keep(&w->g, &w->member[0], 17, 0);
    offer_some(w, 1, 9000, 2, again);
    g_assert(again[0] == 17);
    g_assert(again[1] == WIRE_FULL);
    world_free(w);
}

/*
 * A pool that was full of single slots, and then of blocks, has room for the
 * other when those have gone.
 */
static void test_refill(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t slot[512];
    Offer o = { .count = 1, .node = -1 };

    config.slots = 4096;
    world_init(w, &config, 1);
    o.ring = w->ring;
    for (unsigned round = 0; round < 2; round++) {
        for (unsigned i = 0; i < 8; i++) {
            offer_some(w, 0, 1000 + i * 512, 512, slot);
            g_assert(slot[511] < 4096);
        }
        g_assert(offer_block(&w->g, &w->member[0], &o, 16, slot) == 0);
        g_assert(slot[0] == WIRE_SHARE);
        g_assert(offer_block(&w->g, &w->member[1], &o, 16, slot) == 0);
        g_assert(slot[0] == WIRE_FULL);
        member_leave(w, 0);
        member_join(w, 0);
        for (unsigned i = 0; i < 8; i++) {
            offer_some(w, 1, 1000 + i, 1, slot);
            group_keep(&w->g, &w->member[1], slot[0], 0);
            g_assert(offer_block(&w->g, &w->member[0], &o, 16, slot) == 0);
            g_assert(slot[0] < 4096 && slot[0] % WIRE_BLOCK_MAX == 0);
        }
        member_leave(w, 0);
        member_join(w, 0);
    }
    world_free(w);
}

/* The table of what was asked shrinks, though nothing was ever offered. */
static void test_rest(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t slot;

    world_init(w, &config, 1);
    group_ask(&w->g, &w->member[0], &w->hash[7], 1, &slot, w->blocks);
    w->g.stats.asked += WIRE_ASKS;
    g_assert(group_rest(&w->g) && !w->g.asked.rests);
    /* where it is never silent, too, once it is asked little */
    group_ask(&w->g, &w->member[0], &w->hash[8], 1, &slot, w->blocks);
    g_assert(group_rest(&w->g) && w->g.asked.rests);
    seconds += 2;
    g_assert(!group_rest(&w->g));
    world_free(w);
}

/* The process's control group has so much room. */
static void root_room(FakeRoot *root, uint64_t bytes)
{
    g_autofree char *used = g_strdup_printf("%" G_GUINT64_FORMAT "\n",
                                            (UINT64_C(1) << 30) - bytes);

    fake_write(root, "proc/self/mountinfo",
               "32 20 0:27 / /cg rw - cgroup2 none rw\n");
    fake_write(root, "proc/self/cgroup", "0::/\n");
    fake_write(root, "cg/memory.max", "1073741824\n");
    fake_write(root, "cg/memory.current", used);
}

/* Tables do not grow by more than there is room for. */
static void test_no_room(FakeRoot *root, gconstpointer data)
{
    enum { ASKS = 120000, SLOTS_MANY = 1 << 20 };
    g_autofree Group *g = g_new(Group, 1);
    GroupConfig config = { .slots = SLOTS_MANY, .max_holds = 64,
                           .max_members = 2, .share = 100,
                           .root = root->dir };
    g_autofree char *note = NULL;
    g_autofree char *page = g_malloc(PAGE_BYTES);
    g_autofree uint64_t *hash = g_new(uint64_t, ASKS);
    g_autofree uint32_t *slot = g_new(uint32_t, ASKS);
    g_autoptr(GArray) blocks = g_array_new(FALSE, FALSE, sizeof(uint32_t));
    Offer o = { .ring = sys.memfd("ring", 0), .node = -1,
                .count = WIRE_OFFERS };
    Offer one = { .ring = o.ring, .node = -1, .count = 1 };
    unsigned content = 0;
    GroupMember m;
    PoolFile file;
    size_t was, more;

    root_room(root, MEMCG_ROOM_MIN + (1 << 20));
    g_assert(poolfile_make(&file, SLOTS_MANY * PAGE_BYTES, &note) == 0);
    g_assert(group_init(g, &config, file.fd, file.map_fd) == 0);
    g_assert(group_join(g, &m, SLOTS_MANY) == 0);
    for (unsigned i = 0; i < ASKS; i++) {
        hash[i] = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    }
    page_make(page, content++);
    g_assert(prim.write(o.ring, page, PAGE_BYTES, 0) == PAGE_BYTES);
    was = asked_bytes(&g->asked);
    group_ask(g, &m, hash, ASKS, slot, blocks);
    g_assert(asked_bytes(&g->asked) == was);
    root_room(root, MEMCG_ROOM_MIN + (4 << 20));
    group_ask(g, &m, hash, ASKS, slot, blocks);
    g_assert(asked_bytes(&g->asked) > was + (1 << 20));
    while (group_step(g)) {
        continue;
    }
    /* there is no room for twice as much, but for a quarter more */
    was = asked_bytes(&g->asked);
    root_room(root, MEMCG_ROOM_MIN + was / 2);
    g->memcg.asked = 0;
    more = g->asked.n * 7 - g->asked.count + 1;
    g_assert(more < g->asked.n / 2);
    for (unsigned i = 0; i < more; i++) {
        hash[i] = ~hash[i];
    }
    group_ask(g, &m, hash, more, slot, blocks);
    g_assert(asked_bytes(&g->asked) > was + was / 5);
    g_assert(asked_bytes(&g->asked) < was + was / 3);
    /* what it has grown by is not for others, though it was not written yet */
    g_assert(asked_owed(&g->asked) > was / 8);
    root_room(root, MEMCG_ROOM_MIN + was / 9);
    g->memcg.asked = 0;
    offer_pages(g, &m, &one, slot, blocks);
    g_assert(slot[0] == WIRE_NO_MEMORY);
    while (group_step(g)) {
        continue;
    }
    g->memcg.asked = 0;
    offer_pages(g, &m, &one, slot, blocks);
    g_assert(slot[0] < SLOTS_MANY);

    was = g->index_room;
    for (unsigned i = 0; i < 80; i++) {
        root_room(root, MEMCG_ROOM_MIN + (i < 40 ? 1 << 16 : 4 << 20));
        for (unsigned k = 0; k < WIRE_OFFERS; k++) {
            page_make(page, content++);
            g_assert(prim.write(o.ring, page, PAGE_BYTES,
                                k * PAGE_BYTES) == PAGE_BYTES);
        }
        offer_pages(g, &m, &o, slot, blocks);
        g_assert(slot[0] < SLOTS_MANY);
        g_assert(i >= 40 || g->index_room == was);
    }
    g_assert(g->index_room > 2 * was);
    while (group_leave_step(g, &m)) {
        continue;
    }
    prim.close(o.ring);
    group_free(g);
}

static ssize_t fail_at;

static ssize_t failing_write(int fd, const void *buf, size_t len, off_t offset)
{
    if (fail_at-- == 0) {
        return -ENOMEM;
    }
    return prim_real.write(fd, buf, len, offset);
}

static ssize_t failing_read(int fd, void *buf, size_t len, off_t offset)
{
    return -EIO;
}

static int failing_punch(int fd, off_t offset, off_t len)
{
    return -EINTR;
}

/* No memory: refused, nothing is left half done; a punch that fails leaks. */
static void test_failures(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t slot[100];
    Offer o = { .count = 1, .node = -1 };
    WirePair all[100];

    world_init(w, &config, 1);
    prim.write = failing_write;
    fail_at = 1000;         /* offer_some() writes the ring by it */
    offer_some(w, 0, 0, 50, slot);
    fail_at = 50;
    offer_some(w, 0, 50, 50, slot);
    for (unsigned i = 0; i < 50; i++) {
        g_assert(slot[i] == WIRE_NO_MEMORY);
    }
    g_assert(w->g.stats.refused_memory == 50);
    fail_at = 1;
    o.ring = w->ring;
    g_assert(offer_block(&w->g, &w->member[0], &o, 100, slot) == 0);
    g_assert(slot[0] == WIRE_NO_MEMORY);
    g_assert(w->g.used == 50);
    prim.write = prim_real.write;
    prim.read_at = failing_read;
    slot[0] = 0;
    offer_pages(&w->g, &w->member[0], &o, slot, w->blocks);
    g_assert(slot[0] == WIRE_NO_MEMORY);
    g_assert(offer_block(&w->g, &w->member[0], &o, 1, slot) == -EIO);
    prim.read_at = prim_real.read_at;
    prim.punch = failing_punch;
    for (unsigned i = 0; i < 50; i++) {
        all[i] = (WirePair) { i, 1 };
    }
    g_assert(group_drop(&w->g, &w->member[0], all, 50) == 0);
    group_step(&w->g);
    offer_some(w, 0, 100, 50, slot);
    for (unsigned i = 0; i < 50; i++) {
        g_assert(slot[i] >= 50);  /* not punched: not used again */
    }
    prim.punch = prim_real.punch;
    world_free(w);
}

typedef struct Left {
    unsigned n;
    unsigned member;
    uint64_t hash;
} Left;

static bool tell_left(void *opaque, unsigned number, uint64_t hash,
                      uint32_t slot)
{
    Left *left = opaque;

    g_assert(slot == WIRE_LEFT);
    left->n++;
    left->member = number;
    left->hash = hash;
    return true;
}

static uint32_t ask_about(World *w, unsigned m, uint32_t content)
{
    uint32_t slot;

    group_ask(&w->g, &w->member[m], &w->hash[content], 1, &slot, w->blocks);
    return slot;
}

/*
 * What half of those that want it have no room for is left by all: who asked
 * before hears of it, once.  Not by who has not said that it leaves anything.
 */
static void test_room(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t slot;
    Left left = { 0 };

    world_init(w, &config, 1);
    w->g.tell = tell_left;
    w->g.opaque = &left;
    g_assert(group_room(&w->g, &w->member[0], 0, 0) == 0);
    g_assert(group_room(&w->g, &w->member[1], 1000, 0) == 0);
    g_assert(group_room(&w->g, &w->member[2], 1000, 0) == 0);
    g_assert(w->g.rooms.told == 3);
    /* whoever asks second */
    g_assert(ask_about(w, 0, 1) == WIRE_NONE);
    g_assert(ask_about(w, 1, 1) == WIRE_LEFT);
    g_assert(left.n == 1 && left.member == w->member[0].number);
    g_assert(left.hash == w->hash[1]);
    g_assert(ask_about(w, 1, 1) == WIRE_LEFT);
    g_assert(ask_about(w, 0, 1) == WIRE_LEFT);
    g_assert(left.n == 1);
    g_assert(ask_about(w, 1, 2) == WIRE_NONE);
    g_assert(ask_about(w, 0, 2) == WIRE_LEFT);
    g_assert(left.n == 2 && left.member == w->member[1].number);
    /* one of three does not keep the others from it */
    g_assert(ask_about(w, 2, 2) == WIRE_WANTED);
    /* those that have room, and who knows nothing of it */
    g_assert(ask_about(w, 1, 3) == WIRE_NONE);
    g_assert(ask_about(w, 2, 3) == WIRE_WANTED);
    g_assert(ask_about(w, 3, 1) == WIRE_WANTED);
    g_assert(ask_about(w, 3, 4) == WIRE_NONE);
    g_assert(ask_about(w, 0, 4) == WIRE_LEFT && left.n == 2);
    /* what the pool has is told all the same */
    w->g.tell = NULL;
    offer_some(w, 2, 3, 1, &slot);
    g_assert(slot < SLOTS && ask_about(w, 0, 3) == slot);
    w->g.tell = tell_left;
    /* and when there is room again */
    g_assert(ask_about(w, 1, 5) == WIRE_NONE);
    g_assert(ask_about(w, 0, 5) == WIRE_LEFT);
    g_assert(group_room(&w->g, &w->member[0], 1000, 0) == 0);
    g_assert(ask_about(w, 0, 5) == WIRE_WANTED);
    /* who has lost its connection, or leaves nothing any more, is not heard */
    g_assert(group_room(&w->g, &w->member[0], 0, 0) == 0);
    g_assert(ask_about(w, 0, 6) == WIRE_NONE);
    group_unheard(&w->g, &w->member[0]);
    group_unheard(&w->g, &w->member[0]);
    g_assert(w->g.rooms.told == 2);
    g_assert(ask_about(w, 1, 6) == WIRE_WANTED);
    g_assert(group_room(&w->g, &w->member[0], 0, 0) == 0);
    g_assert(group_room(&w->g, &w->member[0], UINT64_MAX, 0) == 0);
    g_assert(w->g.rooms.told == 2);
    g_assert(ask_about(w, 0, 7) == WIRE_NONE);
    g_assert(ask_about(w, 1, 7) == WIRE_WANTED);
    /* nor who has gone */
    g_assert(group_room(&w->g, &w->member[0], 0, 0) == 0);
    member_leave(w, 0);
    g_assert(w->g.rooms.told == 2);
    g_assert(ask_about(w, 1, 8) == WIRE_NONE);
    g_assert(ask_about(w, 2, 8) == WIRE_WANTED);
    w->g.tell = NULL;
    g_assert(group_drop(&w->g, &w->member[2],
                        &(WirePair) { slot, 1 }, 1) == 0);
    world_free(w);
}

/* What comes to be wanted takes room of both, of each once. */
static void test_room_charged(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();

    prim.now_ns = now_fake;
    world_init(w, &config, 1);
    for (unsigned m = 0; m < 4; m++) {
        g_assert(group_room(&w->g, &w->member[m], 1000, 0) == 0);
    }
    g_assert(ask_about(w, 0, 1) == WIRE_NONE);
    g_assert(ask_about(w, 0, 1) == WIRE_NONE);
    g_assert(w->member[0].room.charged[0] == 0);
    for (unsigned i = 0; i < 3; i++) {
        g_assert(ask_about(w, 1, 1) == WIRE_WANTED);
    }
    g_assert(w->member[0].room.charged[0] == 1);
    g_assert(w->member[1].room.charged[0] == 1);
    /* one more who waits for it */
    g_assert(ask_about(w, 2, 1) == WIRE_NONE);
    g_assert(w->member[2].room.charged[0] == 1);
    g_assert(w->member[0].room.charged[0] == 1);
    g_assert(w->member[3].room.charged[0] == 0);
    world_free(w);
    prim.now_ns = prim_real.now_ns;
}

/* A process in a control group that is nearly full writes nothing. */
static void test_tight(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t slot;
    Offer o = { .count = 1, .node = -1 };

    world_init(w, &config, 1);
    offer_some(w, 0, 1, 1, &slot);
    w->g.memcg.tight = true;
    w->g.memcg.asked = prim.now_ns();
    offer_some(w, 0, 3, 1, &slot);
    g_assert(slot == WIRE_NO_MEMORY);
    offer_some(w, 1, 1, 1, &slot);      /* what is there needs none */
    g_assert(slot < SLOTS);
    w->g.memcg.tight = true;
    w->g.memcg.asked = prim.now_ns();
    o.ring = w->ring;
    offer_some(w, 1, 5, 1, &slot);
    g_assert(offer_block(&w->g, &w->member[0], &o, 16, &slot) == 0);
    g_assert(slot == WIRE_NO_MEMORY);
    /* a question for which no table grows does not look at control groups */
    w->g.memcg.asked = 0;
    group_ask(&w->g, &w->member[0], &w->hash[9], 1, &slot, w->blocks);
    g_assert(slot == WIRE_NONE && w->g.memcg.asked == 0);
    world_free(w);
}

static unsigned reads;

static ssize_t second_read_fails(int fd, void *buf, size_t len, off_t offset)
{
    return reads++ == 1 ? -EIO : prim_real.read_at(fd, buf, len, offset);
}

/* A part of an offer cannot be read: that is refused, the others are taken. */
static void test_part_fails(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t slot[200];
    unsigned refused = 0;

    world_init(w, &config, 1);
    reads = 0;
    prim.read_at = second_read_fails;
    offer_some(w, 0, 0, 200, slot);
    prim.read_at = prim_real.read_at;
    for (unsigned i = 0; i < 200; i++) {
        refused += slot[i] == WIRE_NO_MEMORY;
        g_assert(slot[i] == WIRE_NO_MEMORY || slot[i] < SLOTS);
    }
    g_assert(slot[0] < SLOTS && slot[199] < SLOTS);
    g_assert(refused > 0 && w->g.used == 200 - refused);
    world_free(w);
}

/*
 * Content with another's hash, which whoever knows the key can make (played
 * here by writing to the slot): it does not take its place, and finds itself.
 */
static void test_same_hash(void)
{
    g_autofree World *w = g_new(World, 1);
    GroupConfig config = plain();
    uint32_t first, other, again, asked;
    char page[PAGE_BYTES];

    world_init(w, &config, 1);
    offer_some(w, 0, 7, 1, &first);
    page_make(page, 8);
    g_assert(prim.write(w->g.pool.fd, page, PAGE_BYTES,
                        (off_t)first * PAGE_BYTES) == PAGE_BYTES);
    offer_some(w, 1, 7, 1, &other);
    g_assert(other != first && other < SLOTS);
    offer_some(w, 2, 7, 1, &again);
    g_assert(again == other);
    group_ask(&w->g, &w->member[3], &w->hash[7], 1, &asked, w->blocks);
    g_assert(asked == first);
    world_free(w);
}

int main(int argc, char **argv)
{
    static Run strict, loose, scarce;

    g_test_init(&argc, &argv, NULL);
    prim.now_ns = now_fake;
    strict = (Run) { .config = plain(), .strict = true, .steps = 1500 };
    strict.config.max_holds = SLOT_USERS;
    loose = (Run) { .config = plain(), .steps = 1500 };
    loose.config.max_holds = 3;
    scarce = (Run) { .config = plain(), .steps = 1500 };
    scarce.config.slots = 4096;
    scarce.config.share = 30;
    g_test_add_data_func("/group/random", &strict, test_random);
    g_test_add_data_func("/group/random/few-holds", &loose, test_random);
    g_test_add_data_func("/group/random/few-slots", &scarce, test_random);
    g_test_add_func("/group/runs", test_runs);
    g_test_add_func("/group/domains", test_domains);
    g_test_add_func("/group/replica", test_replica);
    g_test_add_func("/group/replica/longer", test_replica_longer);
    g_test_add_func("/group/greedy", test_greedy);
    g_test_add_func("/group/part-fails", test_part_fails);
    g_test_add_func("/group/same-hash", test_same_hash);
    g_test_add_func("/group/quotas", test_quotas);
    g_test_add_func("/group/full", test_full);
    g_test_add_func("/group/refill", test_refill);
    g_test_add_func("/group/rest", test_rest);
    g_test_add_func("/group/room", test_room);
    g_test_add_func("/group/room/charged", test_room_charged);
    g_test_add_func("/group/many", test_many);
    g_test_add_func("/group/keep-far", test_keep_far);
    g_test_add("/group/no-room", FakeRoot, NULL, fake_make, test_no_room,
               fake_remove);
    g_test_add_func("/group/failures", test_failures);
    g_test_add_func("/group/tight", test_tight);
    return g_test_run();
}
