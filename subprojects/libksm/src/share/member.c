/*
 * member: what a member and the daemon say to each other
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <string.h>

#include "base/prim.h"
#include "share/member.h"

#define FULL_MIN_NS     UINT64_C(15000000000)   /* until offered again */
#define FULL_MAX_NS     UINT64_C(600000000000)
/* Refused again within so many waits: it is full still. */
#define FULL_AGAIN      8u
/* All is asked about again because news were lost: not more often. */
#define MISSED_NS       UINT64_C(30000000000)
#define ROOM_CHANGE     64u     /* one in so many, and so many more ... */
#define ROOM_NS         UINT64_C(60000000000)   /* ... or the daemon is new */
#define BLOCK_NEW       16u     /* slots of a new block */
#define GROW_SEQ        UINT64_MAX      /* other questions count from 0 */
/*
 * What a daemon may do to us.  One that is stopped, or hangs, is as good as
 * gone; one that runs us over gets no more of a step than so many messages
 * without an answer in them, and of memory no more than what is ours is worth.
 */
#define PATIENCE_NS     UINT64_C(30000000000)   /* for an answer */
#define STEADY_NS       UINT64_C(10000000000)   /* up so long: it works */
#define EMPTY_MAX       64u
#define SPARE_MAX       (1u << 20)      /* slots, beyond pages of memory */
#define IN_FLIGHT_MAX   64u
#define RING_MAX        16384u          /* pages */

typedef struct Question {
    uint64_t seq;
    WireType answer;
    bool repeat;            /* a REPEAT */
    unsigned n;
    unsigned used;          /* of the ring */
    uint32_t *id, *tag;
} Question;

static void question_free(void *q)
{
    g_free(((Question *)q)->id);
    g_free(q);
}

/* Nobody here uses the slot: its holds go back, unless all are kept. */
static bool slot_gone(void *opaque, KsmForeign *f, uint32_t slot,
                      unsigned holds)
{
    KsmMember *m = opaque;
    WirePair pair = { slot, holds };

    if (m->store->forget) {
        m->store->forget(m->store->opaque, f->base + slot);
    }
    if (m->keep_all) {
        return false;
    }
    if (f == m->now && (m->state == MEMBER_UP ||
                        (m->state == MEMBER_RESUMES && slot < m->held))) {
        g_array_append_val(m->drops, pair);
    }
    return true;
}

static const StoreRoom room_unsaid = { STORE_NO_TAIL, 0 };

void member_init(KsmMember *m, KsmStore *store, const char *name,
                 unsigned max_sharing)
{
    m->store = store;
    g_strlcpy(m->name, name, sizeof(m->name));
    m->max_sharing = MIN(max_sharing, SLOT_USERS);
    m->key = prim.random();
    m->why = KSM_REASON_NO_DAEMON;
    m->pools = g_ptr_array_new();
    m->questions = g_queue_new();
    m->ring.fd = -1;
    m->room = room_unsaid;
    m->wanted = g_array_new(FALSE, FALSE, sizeof(MemberWanted));
    m->drops = g_array_new(FALSE, FALSE, sizeof(WirePair));
    m->blocks = g_array_new(FALSE, FALSE, sizeof(uint32_t));
    m->in = g_malloc(WIRE_MESSAGE_MAX);
    m->out = g_malloc(sizeof(WireHead) + WIRE_ASKS * sizeof(uint64_t));
}

void member_free(KsmMember *m)
{
    link_free(&m->link);
    ring_close(&m->ring);
    for (guint i = 0; i < m->pools->len; i++) {
        foreign_free(g_ptr_array_index(m->pools, i));
    }
    g_ptr_array_unref(m->pools);
    g_queue_free_full(m->questions, question_free);
    g_array_unref(m->wanted);
    g_array_unref(m->drops);
    g_array_unref(m->blocks);
    g_free(m->in);
    g_free(m->out);
    g_free(m->group);
}

KsmForeign *member_pool(const KsmMember *m, uint32_t *slot)
{
    KsmForeign *f = m->now;

    for (guint i = 0; !f || *slot < f->base || *slot - f->base >= f->slots;
         i++) {
        g_assert(i < m->pools->len);
        f = g_ptr_array_index(m->pools, i);
    }
    *slot -= f->base;
    return f;
}

/*
 * A block that is not held may become another one, a shorter one, unheard of:
 * what was told of it is good for the message that follows.
 */
static void blocks_forget(KsmMember *m)
{
    for (guint i = 0; i < m->blocks->len; i++) {
        foreign_untold_block(m->now, g_array_index(m->blocks, uint32_t, i));
    }
    g_array_set_size(m->blocks, 0);
}

/* All that was said and not answered is as if it had not been said. */
static void member_lost(KsmMember *m)
{
    m->losses += m->state == MEMBER_UP;
    m->state = MEMBER_DOWN;
    m->breaks = m->link.breaks;
    m->why = m->refused ? KSM_REASON_REFUSED_BY_DAEMON : KSM_REASON_NO_DAEMON;
    g_queue_clear_full(m->questions, question_free);
    m->awaited = 0;
    m->batch.n = 0;
    ring_close(&m->ring);
    g_array_set_size(m->wanted, 0);
    m->wanted_at = 0;
    g_array_set_size(m->drops, 0);
    blocks_forget(m);
    m->in_len = 0;
    m->full_until = m->no_block_until = 0;
    m->missed = false;
    m->group_asked = m->group_awaited = false;
    m->group_ns = 0;
    g_clear_pointer(&m->group, g_free);
}

/* The daemon said what cannot be. */
static void member_break(KsmMember *m)
{
    link_break(&m->link);
    if (m->breaks != m->link.breaks) {
        member_lost(m);
    }
}

static bool member_send(KsmMember *m, const void *message, size_t len)
{
    return link_send(&m->link, message, len);
}

static void greet(KsmMember *m)
{
    WireHello hello = {
        .head.type = WIRE_HELLO,
        .magic = WIRE_MAGIC,
        .version = WIRE_VERSION,
        .features = WIRE_FEATURE_TAIL | WIRE_FEATURE_ROOM,
        .cookie = { m->cookie[0], m->cookie[1] },
        .pages = m->pages,
    };

    memcpy(hello.name, m->name, sizeof(hello.name));
    if (member_send(m, &hello, sizeof(hello))) {
        m->state = MEMBER_GREETED;
        m->waits_ns = prim.now_ns();
    } else {
        link_break(&m->link);
    }
}

/* From now on it is there for us. */
static void member_up(KsmMember *m)
{
    m->state = MEMBER_UP;
    m->losses++;
    m->refused = false;
    m->why = KSM_REASON_NO_MEMORY;
    m->up_ns = prim.now_ns();
}

/* Slots that are held from @held on, as many as a message takes. */
static unsigned held_list(const KsmMember *m, WirePair *pair, uint32_t *end)
{
    const KsmForeign *f = m->now;
    uint32_t slot = m->held;
    unsigned n = 0;

    for (; slot < f->top && n < WIRE_PAIRS; slot++) {
        if (f->holds[slot]) {
            pair[n++] = (WirePair) { slot, f->holds[slot] };
        }
    }
    *end = slot;
    return n;
}

/* Messages that takes, one at least.  Until they are sent it gets no more. */
static unsigned held_messages(const KsmForeign *f)
{
    unsigned n = 0;

    for (uint32_t slot = 0; slot < f->top; slot++) {
        n += f->holds[slot] > 0;
    }
    return MAX((n + WIRE_PAIRS - 1) / WIRE_PAIRS, 1);
}

static void resume(KsmMember *m)
{
    WirePairs *held = (WirePairs *)m->out;

    while (m->state == MEMBER_RESUMES) {
        uint32_t end;
        unsigned n = held_list(m, held->pair, &end);

        held->head = (WireHead) {
            .type = WIRE_HELD,
            .count = n,
            .seq = m->held_left - 1,
        };
        if (!member_send(m, held, sizeof(*held) + n * sizeof(WirePair))) {
            return;
        }
        m->held = end;
        m->waits_ns = prim.now_ns();
        if (--m->held_left == 0) {
            member_up(m);
        }
    }
}

static void drops_send(KsmMember *m)
{
    WirePairs *drop = (WirePairs *)m->out;

    while (m->drops->len) {
        unsigned n = MIN(m->drops->len, WIRE_PAIRS);
        unsigned rest = m->drops->len - n;

        drop->head = (WireHead) { .type = WIRE_DROP, .count = n };
        /* the last ones: those are taken off at no cost */
        memcpy(drop->pair, &g_array_index(m->drops, WirePair, rest),
               n * sizeof(WirePair));
        if (!member_send(m, drop, sizeof(*drop) + n * sizeof(WirePair))) {
            return;
        }
        g_array_set_size(m->drops, rest);
    }
}

static void ask(KsmMember *m, Question *q)
{
    if (g_queue_is_empty(m->questions)) {
        m->waits_ns = prim.now_ns();
    }
    q->seq = m->seq++;
    g_queue_push_tail(m->questions, q);
    m->awaited += q->n;
}

static Question *question_new(WireType answer, unsigned n)
{
    Question *q = g_new(Question, 1);

    *q = (Question) { .answer = answer, .n = n };
    q->id = g_new(uint32_t, 2 * n);
    q->tag = q->id + n;
    return q;
}

static bool has_turn(const KsmMember *m)
{
    return m->state == MEMBER_UP && m->questions->length < m->in_flight;
}

static uint32_t domain_of(int node)
{
    return (uint32_t)(node + 1) * UINT32_C(0x9e3779b1);
}

static bool offer_send(KsmMember *m, const MemberBatch *b, WireType type,
                       unsigned want)
{
    WireOffer offer = {
        .head = { type, b->n, m->seq },
        .first = b->first,
        .domain = domain_of(b->node),
        .node = b->node,
        .want = want,
    };
    Question *q;

    if (!has_turn(m) || !member_send(m, &offer, sizeof(offer))) {
        return false;
    }
    q = question_new(WIRE_TAKEN, b->n);
    memcpy(q->id, b->id, b->n * sizeof(*q->id));
    memcpy(q->tag, b->tag, b->n * sizeof(*q->tag));
    q->used = b->used;
    q->repeat = type == WIRE_REPEAT;
    ask(m, q);
    return true;
}

static bool batch_send(KsmMember *m)
{
    if (m->batch.n && !offer_send(m, &m->batch, WIRE_OFFER, 0)) {
        return false;
    }
    m->batch.n = 0;
    return true;
}

static void group_ask(KsmMember *m)
{
    WireHead status = { .type = WIRE_STATUS };

    if (m->group_asked && m->state == MEMBER_UP) {
        m->group_awaited = member_send(m, &status, sizeof(status));
        m->group_asked = !m->group_awaited;
    }
}

static void tail_send(KsmMember *m)
{
    WireTail tail = {
        .head = { .type = WIRE_TAIL },
        .left = { m->tail.bytes, m->tail.given, m->tail.merged },
    };

    if (m->tells_tail && memcmp(&m->tail, &m->tail_told, sizeof(m->tail)) &&
        member_send(m, &tail, sizeof(tail))) {
        m->tail_told = m->tail;
    }
}

/* Has it changed by so much that it is worth a message? */
static bool differs(uint64_t told, uint64_t now)
{
    uint64_t least = told / ROOM_CHANGE + ROOM_CHANGE;

    return MAX(told, now) - MIN(told, now) > least;
}

static void room_send(KsmMember *m)
{
    WireRoom room = {
        .head = { .type = WIRE_ROOM },
        .mappings = m->room.mappings,
        .waiting = m->room.waiting,
    };
    uint64_t now = prim.now_ns();
    bool old = m->room_told.mappings != STORE_NO_TAIL &&
               now - m->room_ns >= ROOM_NS;

    if (m->tells_room &&
        (old || differs(m->room_told.mappings, m->room.mappings) ||
         differs(m->room_told.waiting, m->room.waiting)) &&
        member_send(m, &room, sizeof(room))) {
        m->room_told = m->room;
        m->room_ns = now;
    }
}

void member_run(KsmMember *m)
{
    if (m->breaks != m->link.breaks) {
        member_lost(m);
    }
    /* HELLO says how much memory there is: not before there is some */
    if (m->state == MEMBER_DOWN && m->pages &&
        (link_make(&m->link) || m->link.fd >= 0)) {
        greet(m);
    } else if (m->link.absent) {
        m->why = KSM_REASON_NO_DAEMON;
    }
    resume(m);
    if (m->state != MEMBER_UP) {
        return;
    }
    if (prim.now_ns() - m->up_ns >= STEADY_NS) {
        link_works(&m->link);
    }
    drops_send(m);
    group_ask(m);
    tail_send(m);
    room_send(m);
    if (m->missed && (!m->missed_ns ||
                      prim.now_ns() - m->missed_ns >= MISSED_NS)) {
        m->missed = false;
        m->missed_ns = prim.now_ns();
        m->losses++;
    }
    if (m->full_until && prim.now_ns() >= m->full_until) {
        m->full_until = 0;
        m->full_ended = prim.now_ns();
        m->losses++;
    }
    /* while offers are under way more are collected */
    if (!m->ring.used || m->ring.used == m->batch.used) {
        batch_send(m);
    }
}

bool member_ask(KsmMember *m, const StoreAsk *asks, unsigned n)
{
    WireAsk *message = (WireAsk *)m->out;
    Question *q;

    g_assert(n <= WIRE_ASKS);
    if (!has_turn(m)) {
        return false;
    }
    message->head = (WireHead) { WIRE_ASK, n, m->seq };
    for (unsigned i = 0; i < n; i++) {
        message->hash[i] = asks[i].hash;
    }
    if (!member_send(m, message, sizeof(*message) + n * sizeof(uint64_t))) {
        return false;
    }
    q = question_new(WIRE_ANSWER, n);
    for (unsigned i = 0; i < n; i++) {
        q->id[i] = asks[i].id;
        q->tag[i] = asks[i].tag;
    }
    ask(m, q);
    return true;
}

static bool is_full(const KsmMember *m)
{
    return m->state != MEMBER_UP || m->full_until;
}

OfferFate member_offer(KsmMember *m, StoreOffer *o)
{
    MemberBatch *b = &m->batch;
    unsigned room, used, first;

    if (is_full(m)) {
        return OFFER_FULL;
    }
    if (b->n && (b->node != m->store->node || b->n == WIRE_OFFERS ||
                 !ring_room_here(&m->ring)) && !batch_send(m)) {
        return OFFER_BUSY;
    }
    room = b->n ? ring_room_here(&m->ring) : ring_room(&m->ring);
    room = MIN(room, WIRE_OFFERS - b->n);
    if (!room) {
        return OFFER_BUSY;
    }
    o->n = MIN(o->n, room);
    if (!ring_put(&m->ring, o->pages, o->n, &first, &used)) {
        return OFFER_REFUSED;
    }
    if (!b->n) {
        b->first = first;
        b->used = 0;
        b->node = m->store->node;
    }
    for (unsigned i = 0; i < o->n; i++) {
        b->id[b->n + i] = o->id + i;
        b->tag[b->n + i] = o->tag[i];
    }
    b->n += o->n;
    b->used += used;
    return OFFER_LATER;
}

OfferFate member_repeat(KsmMember *m, StoreOffer *o)
{
    MemberBatch b = { .n = 1, .node = m->store->node };
    KsmRing was;

    if (is_full(m) || prim.now_ns() < m->no_block_until) {
        return OFFER_FULL;
    }
    /* pages of the ring are given back in order: the batch goes first */
    if (!batch_send(m) || !has_turn(m) || !ring_room(&m->ring)) {
        return OFFER_BUSY;
    }
    was = m->ring;
    if (!ring_put(&m->ring, o->pages, 1, &b.first, &b.used)) {
        return OFFER_REFUSED;
    }
    b.id[0] = o->id;
    b.tag[0] = o->tag[0];
    if (!offer_send(m, &b, WIRE_REPEAT, BLOCK_NEW)) {
        /* given back, it would be the oldest ones that go */
        m->ring = was;
        return OFFER_BUSY;
    }
    return OFFER_LATER;
}

void member_grow(KsmMember *m, KsmForeign *f, ForeignBlock *b)
{
    WireBlock grow = {
        .head = { WIRE_GROW, 0, GROW_SEQ },
        .first = b->first,
        .length = MIN(2 * b->length, WIRE_BLOCK_MAX),
    };

    if (f == m->now && m->state == MEMBER_UP && !m->full_until &&
        b->wanted == b->length && b->length < WIRE_BLOCK_MAX &&
        b->asked >= MIN(PATTERN_USES, f->max_users) * b->length &&
        f->holds[b->first] &&
        member_send(m, &grow, sizeof(grow))) {
        b->wanted = grow.length;
    }
}

/*
 * A range of local numbers for that many slots; FOREIGN_SLOTS: none.  No two
 * ranges touch: consecutive numbers are mapped as one run, of one file.
 */
static uint32_t base_find(const KsmMember *m, uint32_t slots)
{
    uint32_t base = 0;

    for (guint i = 0; i < m->pools->len; i++) {
        const KsmForeign *f = g_ptr_array_index(m->pools, i);

        if (base <= f->base + f->slots && f->base <= base + slots) {
            base = f->base + f->slots + 1;
            i = -1;         /* from the start */
        }
        if (base > FOREIGN_SLOTS - 1 - slots) {
            return FOREIGN_SLOTS;
        }
    }
    return base;
}

/* Takes the descriptor. */
static bool pool_begin(KsmMember *m, const WireWelcome *w, int fd)
{
    uint32_t base = base_find(m, w->slots);
    KsmForeign *f = NULL;
    int err;

    if (base == FOREIGN_SLOTS) {
        prim.close(fd);
        return false;
    }
    f = foreign_new(fd, w->generation, base, w->slots, &err);
    if (!f) {
        return false;
    }
    f->gone = slot_gone;
    f->opaque = m;
    g_ptr_array_add(m->pools, f);
    m->now = f;
    return true;
}

static bool has_pool(const KsmMember *m, const WireWelcome *w)
{
    return m->now && m->now->generation == w->generation;
}

/* Nothing here counts on the daemon. */
static bool holds_nothing(const KsmForeign *f)
{
    for (uint32_t slot = 0; slot < f->top; slot++) {
        if (f->holds[slot]) {
            return false;
        }
    }
    return true;
}

static bool welcome_is_sound(const KsmMember *m, const WireWelcome *w,
                             size_t len)
{
    bool known = (m->cookie[0] || m->cookie[1]) &&
                 m->generation == w->generation;

    return len == sizeof(*w) && m->state == MEMBER_GREETED &&
           w->version == WIRE_VERSION && w->slots &&
           w->slots <= WIRE_SLOTS_MAX && w->hold_users && w->ring_pages &&
           w->ring_pages <= 1 << 20 && w->asks >= WIRE_ASKS &&
           w->offers >= WIRE_OFFERS && w->in_flight &&
           /* a daemon that forgot us could punch what is mapped here */
           (w->resumed ? known
                       : !has_pool(m, w) || holds_nothing(m->now)) &&
           (!has_pool(m, w) || m->now->slots == w->slots);
}

/* False: the descriptors are taken all the same. */
static bool welcomed(KsmMember *m, const WireWelcome *w, size_t len,
                     int fds[2])
{
    int pool = fds[0], ring = fds[1];
    bool sound = welcome_is_sound(m, w, len);

    fds[0] = fds[1] = -1;
    if (sound) {
        /* whatever fails now: or each try would be one more member there */
        memcpy(m->cookie, w->cookie, sizeof(m->cookie));
        m->generation = w->generation;
    }
    if (!sound || pool < 0 || ring < 0) {
        if (pool >= 0) {
            prim.close(pool);
        }
        if (ring >= 0) {
            prim.close(ring);
        }
        return false;
    }
    m->ring = (KsmRing) { .fd = ring, .pages = MIN(w->ring_pages, RING_MAX) };
    if (has_pool(m, w)) {
        prim.close(pool);
    } else if (!pool_begin(m, w, pool)) {
        return false;
    }
    m->now->hold_users = w->hold_users;
    m->now->max_users = m->max_sharing;
    m->key = w->key;
    m->in_flight = MIN(w->in_flight, IN_FLIGHT_MAX);
    m->tells_tail = w->features & WIRE_FEATURE_TAIL;
    m->tail_told = (StoreTail) { 0 };
    m->tells_room = w->features & WIRE_FEATURE_ROOM;
    m->room_told = room_unsaid;
    m->held = 0;
    if (w->resumed) {
        m->held_left = held_messages(m->now);
        m->state = MEMBER_RESUMES;
    } else {
        member_up(m);
    }
    return true;
}

/* The daemon has told us a slot. */
static void told(KsmMember *m, uint32_t slot, StoreAnswer *a)
{
    WirePair back = { slot, 1 };

    if (!foreign_told(m->now, slot, a->tag)) {
        g_array_append_val(m->drops, back);
        a->what = ANSWER_NONE;
        return;
    }
    a->what = ANSWER_SLOT;
    a->slot = m->now->base + slot;
}

/*
 * What a page was refused for.  Where there is no block there may be slots; and
 * chunks that lack a block are planned again without being asked about.
 */
static void refused(KsmMember *m, const Question *q, uint32_t code)
{
    uint64_t now = prim.now_ns();

    m->why = code == WIRE_FULL ? KSM_REASON_GROUP_FULL
           : code == WIRE_SHARE ? KSM_REASON_REFUSED_BY_DAEMON
           : KSM_REASON_NO_MEMORY;
    if (q->repeat) {
        m->no_block_until = now + FULL_MIN_NS;
    } else if (!m->full_until) {
        bool again = m->full_wait &&
                     now - m->full_ended <= FULL_AGAIN * m->full_wait;

        m->full_wait = again ? MIN(2 * m->full_wait, FULL_MAX_NS)
                             : FULL_MIN_NS;
        m->full_until = now + m->full_wait;
    }
}

/* One element of ANSWER or TAKEN. */
static void answer_one(KsmMember *m, const Question *q, unsigned i,
                       uint32_t slot, StoreAnswer *a)
{
    MemberWanted wanted = { q->id[i], q->tag[i] };

    *a = (StoreAnswer) { ANSWER_NONE, wanted.id, wanted.tag, SLOT_NONE };
    if (slot < m->now->slots) {
        told(m, slot, a);
    } else if (slot == WIRE_WANTED) {
        g_array_append_val(m->wanted, wanted);
    } else if (slot == WIRE_LEFT) {
        a->what = ANSWER_LEFT;
    } else if (slot != WIRE_NONE) {
        refused(m, q, slot);
        a->what = ANSWER_FULL;
    }
    if (q->answer == WIRE_TAKEN && a->what == ANSWER_NONE) {
        a->what = ANSWER_REFUSED;
    }
}

/* Is it a slot, and no other than the first of a block? */
static bool is_slot(const KsmMember *m, uint32_t slot)
{
    return slot < m->now->slots && foreign_unit(m->now, slot) == slot;
}

/* Can that be said of a page? */
static bool slot_can_be(const KsmMember *m, WireType answer, uint32_t slot)
{
    return is_slot(m, slot) ||
           (answer == WIRE_ANSWER
            ? slot >= WIRE_WANTED || slot == WIRE_LEFT
            : slot <= WIRE_FULL && slot >= WIRE_NO_MEMORY);
}

/* All of it: else who gets the first answers would not get the others. */
static bool slots_can_be(const KsmMember *m, const WireSlots *slots)
{
    for (unsigned i = 0; i < slots->head.count; i++) {
        if (!slot_can_be(m, slots->head.type, slots->slot[i])) {
            return false;
        }
    }
    return true;
}

/* Reads on in an ANSWER or TAKEN.  Returns answers; -1: that cannot be. */
static int slots_read(KsmMember *m, StoreAnswer *answers, unsigned max)
{
    const WireSlots *slots = (const WireSlots *)m->in;
    const Question *q = g_queue_peek_head(m->questions);
    unsigned n = 0;

    if (!q || q->answer != slots->head.type || q->seq != slots->head.seq ||
        q->n != slots->head.count ||
        m->in_len != sizeof(*slots) + q->n * sizeof(uint32_t) ||
        (!m->in_at && !slots_can_be(m, slots))) {
        return -1;
    }
    for (; m->in_at < q->n && n < max; m->in_at++, m->awaited--) {
        answer_one(m, q, m->in_at, slots->slot[m->in_at], &answers[n]);
        n += answers[n].what != ANSWER_NONE;
    }
    if (m->in_at == q->n) {
        if (q->used) {
            ring_give(&m->ring, q->used);
        }
        question_free(g_queue_pop_head(m->questions));
        m->in_len = 0;
        link_works(&m->link);
    }
    return n;
}

static int news_read(KsmMember *m, StoreAnswer *answers, unsigned max)
{
    const WireNews *news = (const WireNews *)m->in;
    unsigned n = 0;

    if (news->head.count > WIRE_PAIRS ||
        m->in_len != sizeof(*news) + news->head.count * sizeof(WireFound)) {
        return -1;
    }
    for (unsigned i = 0; !m->in_at && i < news->head.count; i++) {
        if (!is_slot(m, news->found[i].slot) &&
            news->found[i].slot != WIRE_LEFT) {
            return -1;
        }
    }
    for (; m->in_at < news->head.count && n < max; m->in_at++) {
        const WireFound *f = &news->found[m->in_at];

        answers[n] = (StoreAnswer) {
            .what = ANSWER_LEFT,
            .id = UINT32_MAX,
            /* as content_tag(): the domain is in it already */
            .tag = (uint32_t)(f->hash ^ (f->hash >> 32)),
        };
        if (f->slot != WIRE_LEFT) {
            told(m, f->slot, &answers[n]);
        }
        n += answers[n].what != ANSWER_NONE;
    }
    m->missed |= !news->head.count;
    m->in_len = m->in_at == news->head.count ? 0 : m->in_len;
    return n;
}

static bool block_read(KsmMember *m)
{
    const WireBlock *block = (const WireBlock *)m->in;
    KsmForeign *f = m->now;
    bool held, known;

    if (m->in_len != sizeof(*block) || block->first >= f->slots) {
        return false;
    }
    held = f->holds[block->first];
    known = foreign_block(f, block->first);
    if (block->head.seq == GROW_SEQ && !held) {
        return true;        /* it was given back meanwhile */
    }
    if (!foreign_told_block(f, block->first, block->length)) {
        return false;
    }
    if (!held && !known) {
        g_array_append_val(m->blocks, block->first);
    }
    return true;
}

/* Figures of another length are those of another daemon: we do without. */
static bool group_read(KsmMember *m)
{
    const WireState *state = (const WireState *)m->in;

    if (m->in_len < sizeof(*state) || state->head.count != 1 ||
        state->slots > WIRE_SLOTS_MAX || state->used > state->slots) {
        return false;
    }
    g_clear_pointer(&m->group, g_free);
    if (m->in_len == sizeof(*state) + sizeof(WireMember)) {
        m->group = g_memdup2(state, m->in_len);
    }
    m->group_ns = prim.now_ns();
    m->group_shared = m->now->shared;
    m->group_awaited = false;
    return true;
}

/* Reads on in the message; answers that came of it, or -1: it cannot be. */
static int message_read(KsmMember *m, StoreAnswer *answers, unsigned max)
{
    const WireHead *head = (const WireHead *)m->in;
    int n;

    m->refused = m->in_len >= sizeof(*head) && head->type == WIRE_REFUSED;
    if (m->refused || m->in_len < sizeof(*head) || m->state != MEMBER_UP) {
        return -1;
    }
    switch (head->type) {
    case WIRE_ANSWER:
    case WIRE_TAKEN:
        n = slots_read(m, answers, max);
        break;
    case WIRE_NEWS:
        n = news_read(m, answers, max);
        break;
    case WIRE_BLOCK:
        n = block_read(m) ? 0 : -1;
        m->in_len = 0;
        return n;
    case WIRE_STATE:
        n = group_read(m) ? 0 : -1;
        m->in_len = 0;
        break;
    default:
        return -1;
    }
    if (!m->in_len) {
        blocks_forget(m);
    }
    return n;
}

/* Is there a message to be read on?  Takes the next one, if there is none. */
static bool message_next(KsmMember *m)
{
    const WireHead *head = (const WireHead *)m->in;
    int fds[2] = { -1, -1 };
    bool sound = true;

    if (m->in_len) {
        return true;
    }
    m->in_len = link_receive(&m->link, m->in, WIRE_MESSAGE_MAX, fds);
    m->in_at = 0;
    if (m->in_len) {
        m->waits_ns = prim.now_ns();
    }
    if (m->in_len >= sizeof(*head) && head->type == WIRE_WELCOME) {
        sound = welcomed(m, (WireWelcome *)m->in, m->in_len, fds);
        m->in_len = 0;
    }
    for (unsigned i = 0; i < 2; i++) {
        if (fds[i] >= 0) {
            prim.close(fds[i]);
            sound = false;
        }
    }
    if (!sound || m->link.fd < 0) {
        member_break(m);
    }
    return m->in_len;
}

/* No more than can be offered. */
static unsigned wanted_out(KsmMember *m, StoreAnswer *answers, unsigned max)
{
    unsigned n = 0, room;

    if (m->wanted_at == m->wanted->len) {
        return 0;
    }
    /* what is collected has to go first */
    if (m->batch.n && (m->batch.n == WIRE_OFFERS ||
                       !ring_room_here(&m->ring)) && !batch_send(m)) {
        return 0;
    }
    room = MIN(ring_room(&m->ring), max);
    for (; n < room && m->wanted_at < m->wanted->len; m->wanted_at++) {
        const MemberWanted *w = &g_array_index(m->wanted, MemberWanted,
                                               m->wanted_at);

        answers[n++] = (StoreAnswer) {
            ANSWER_WANTED, w->id, w->tag, SLOT_NONE
        };
    }
    if (m->wanted_at == m->wanted->len) {
        g_array_set_size(m->wanted, 0);
        m->wanted_at = 0;
    }
    return n;
}

/* Has it had time enough?  Asked when all that it said was read. */
static bool patience_ends(const KsmMember *m)
{
    bool waits = m->state == MEMBER_UP ? !g_queue_is_empty(m->questions)
                                       : m->state != MEMBER_DOWN;

    return waits && prim.now_ns() - m->waits_ns > PATIENCE_NS;
}

/* Has it told us of more than can be of use, or does not take it back? */
static bool is_swamped(const KsmMember *m)
{
    uint64_t most = m->pages + SPARE_MAX;

    return m->drops->len > most || (m->now && m->now->shared > most);
}

unsigned member_answers(KsmMember *m, StoreAnswer *answers, unsigned max)
{
    unsigned n, wanted, empty = 0;

    member_run(m);
    n = wanted = wanted_out(m, answers, max);
    while (n < max && empty < EMPTY_MAX && message_next(m)) {
        int got = message_read(m, answers + n, max - n);

        if (got < 0) {
            member_break(m);
            break;
        }
        n += got;
        empty += !got;
    }
    if (is_swamped(m) || (!n && !empty && patience_ends(m))) {
        member_break(m);
    }
    return wanted ? n : n + wanted_out(m, answers + n, max - n);
}

void member_tail(KsmMember *m, const StoreTail *tail)
{
    m->tail = *tail;
}

void member_room(KsmMember *m, const StoreRoom *room)
{
    m->room = *room;
}

void member_ask_group(KsmMember *m)
{
    m->group_asked = !m->group_awaited;
}

void member_rest(KsmMember *m)
{
    for (guint i = 0; i < m->pools->len; i++) {
        KsmForeign *f = g_ptr_array_index(m->pools, i);

        if (f != m->now && !f->sharing && !m->keep_all) {
            g_ptr_array_remove_index_fast(m->pools, i);
            foreign_free(f);
            break;
        }
    }
    ring_rest(&m->ring);
}

size_t member_bytes(const KsmMember *m)
{
    size_t bytes = sizeof(*m) + WIRE_MESSAGE_MAX +
                   WIRE_ASKS * sizeof(uint64_t) +
                   m->awaited * 2 * sizeof(uint32_t) +
                   m->drops->len * sizeof(WirePair) +
                   m->wanted->len * sizeof(MemberWanted);

    for (guint i = 0; i < m->pools->len; i++) {
        bytes += foreign_bytes(g_ptr_array_index(m->pools, i));
    }
    return bytes;
}
