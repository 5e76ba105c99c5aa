/*
 * ksm-poold: a fuzzer of sequences, with a model of holds
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Members in many processes ask, offer and drop the same few contents, some of
 * them in blocks, without waiting for answers; connections are cut and resumed,
 * processes killed, at any point.  Half of the members are honest: the model
 * knows exactly what they hold, from what they have read and sent.  The others
 * send anything, most of it almost right; of them nothing is expected.
 *
 * - A slot that an honest member holds has the content for which it was named,
 *   in a mapping that stays for ever.
 * - An honest member is never refused, and every question is answered, in
 *   order.
 * - STATE tells an honest member as many slots as the model has.
 * - When all have gone nothing is used and nothing is held.
 *
 * All that while the daemon reloads now and then.
 *
 * One process plays all of them, for it lets others send HELLO only (see
 * wire-member.h); so a seed repeats what is sent, but not what the daemon makes
 * of it, whose schedule is its own.
 *
 * fuzz-poold [--seed N] [--seconds S] [--contents N] [--slots N] [--reload N]
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "wire-member.h"

#define N_ACTORS 12
#define N_HONEST 6
#define N_DOMAINS 2
#define N_REPEATED 3        /* the first contents; some come as blocks */
#define ASKS_MAX 64
#define OFFERS_MAX 32
#define FLIGHT_MAX 4
#define WATCH_EVERY 64      /* steps */

typedef enum Honesty { HONEST, HOSTILE } Honesty;

/* A question without an answer. */
typedef struct Question {
    uint64_t seq;
    WireType type;
    unsigned n;
    uint32_t first;         /* GROW; OFFER: page of the ring */
    uint64_t drops;         /* so many DROPs had been sent */
    uint16_t key[ASKS_MAX]; /* what was asked for or offered */
} Question;

typedef struct Actor {
    Honesty honesty;
    Proc *proc;
    Peer *peer;             /* NULL: not connected */
    WireWelcome welcome;    /* of the last connection */
    bool known;             /* it has a cookie */
    bool says_room;
    GHashTable *holds;      /* slot -> how many */
    GHashTable *told;       /* block -> length: nothing named it yet */
    uint64_t drops;         /* so many DROPs were sent */
    GQueue asked;           /* Question */
    unsigned ring_next;     /* part of the ring; FLIGHT_MAX of them */
} Actor;

typedef struct Fuzz {
    int contents;           /* few: they meet; but slots must go, too */
    int size;               /* of the pool; it becomes full now and then */
    int reload;             /* once in so many steps */
    GRand *rand;
    Poold *d;
    Actor actor[N_ACTORS];
    char *content;          /* its pages */
    GHashTable *key_of;     /* hash -> key */
    const char *map;        /* the pool, mapped for ever */
    uint32_t slots;
    uint16_t *block;        /* by first slot / 512: slots at least; 0: none */
    /* of each slot that an honest member holds */
    uint32_t *holders;
    uint16_t *slot_key;
    uint64_t key;
    uint64_t steps, messages, broken, kills, cuts, reloads;
    uint64_t full, watched, known, states, left;
} Fuzz;

static unsigned pick(Fuzz *f, unsigned n)
{
    return g_rand_int_range(f->rand, 0, n);
}

/* A key is a content and a domain. */
static const char *key_page(const Fuzz *f, unsigned key)
{
    return f->content + (key % f->contents) * PAGE;
}

static uint32_t key_domain(const Fuzz *f, unsigned key)
{
    return key / f->contents * 0x9e3779b1u;
}

static uint64_t key_hash(const Fuzz *f, unsigned key)
{
    Peer p = { .welcome.key = f->key };

    return peer_hash(&p, key_page(f, key), key_domain(f, key));
}

static unsigned some_key(Fuzz *f)
{
    return pick(f, f->contents) + pick(f, N_DOMAINS) * f->contents;
}

/* Slots that a hold on @slot keeps. */
static unsigned extent(const Fuzz *f, uint32_t slot)
{
    return slot % WIRE_BLOCK_MAX == 0 && f->block[slot / WIRE_BLOCK_MAX] ?
           f->block[slot / WIRE_BLOCK_MAX] : 1;
}

static void block_is(Fuzz *f, uint32_t slot, unsigned length)
{
    if (slot % WIRE_BLOCK_MAX == 0) {
        f->block[slot / WIRE_BLOCK_MAX] = length;
    }
}

static void check_slot(Fuzz *f, uint32_t slot)
{
    const char *want = key_page(f, f->slot_key[slot]);
    unsigned n = extent(f, slot);

    for (unsigned i = 0; i < n; i++) {
        if (memcmp(f->map + (slot + i) * PAGE, want, PAGE)) {
            g_error("slot %u+%u of %u is not content %u; step %" PRIu64, slot,
                    i, n, f->slot_key[slot], f->steps);
        }
    }
    f->watched += n;
}

static void watch(Fuzz *f)
{
    for (uint32_t slot = 0; slot < f->slots; slot++) {
        if (f->holders[slot]) {
            check_slot(f, slot);
        }
    }
}

/* Who does not hold a block is told its length before it is named. */
static void check_told(Fuzz *f, Actor *a, uint32_t slot)
{
    gpointer at = GUINT_TO_POINTER(slot);

    if (a->honesty == HONEST && f->holders[slot] && extent(f, slot) > 1 &&
        !g_hash_table_contains(a->holds, at) &&
        !g_hash_table_contains(a->told, at)) {
        g_error("slot %u is a block, but nobody said so; step %" PRIu64, slot,
                f->steps);
    }
}

/* A message named @slot to @a, for @key. */
static void hold(Fuzz *f, Actor *a, uint32_t slot, unsigned key)
{
    gpointer at = GUINT_TO_POINTER(slot);
    unsigned n = GPOINTER_TO_UINT(g_hash_table_lookup(a->holds, at));

    g_hash_table_insert(a->holds, at, GUINT_TO_POINTER(n + 1));
    if (a->honesty == HOSTILE) {
        return;
    }
    if (!f->holders[slot]) {
        f->slot_key[slot] = key;
        block_is(f, slot, 0);
    }
    if (f->slot_key[slot] != key) {
        g_error("slot %u, held for key %u, was named for key %u; step %"
                PRIu64, slot, f->slot_key[slot], key, f->steps);
    }
    f->holders[slot] += !n;
    /* another member may have been told of more since this was sent */
    n = GPOINTER_TO_UINT(g_hash_table_lookup(a->told, at));
    if (n) {
        block_is(f, slot, MAX(n, extent(f, slot)));
        g_hash_table_remove(a->told, at);
    }
    check_slot(f, slot);
}

static void unhold(Fuzz *f, Actor *a, uint32_t slot, unsigned holds)
{
    gpointer at = GUINT_TO_POINTER(slot);
    unsigned n = GPOINTER_TO_UINT(g_hash_table_lookup(a->holds, at));

    g_assert(holds <= n);
    if (holds < n) {
        g_hash_table_insert(a->holds, at, GUINT_TO_POINTER(n - holds));
        return;
    }
    g_hash_table_remove(a->holds, at);
    if (a->honesty == HONEST) {
        f->holders[slot]--;
    }
}

static void unhold_all(Fuzz *f, Actor *a)
{
    GList *slots = g_hash_table_get_keys(a->holds);

    for (GList *l = slots; l; l = l->next) {
        uint32_t slot = GPOINTER_TO_UINT(l->data);

        unhold(f, a, slot,
               GPOINTER_TO_UINT(g_hash_table_lookup(a->holds, l->data)));
    }
    g_list_free(slots);
}

static void questions_forget(Actor *a)
{
    g_queue_clear_full(&a->asked, g_free);
    g_hash_table_remove_all(a->told);
}

/* The connection has ended; why should be known. */
static void lost(Fuzz *f, Actor *a)
{
    if (a->honesty == HONEST && a->proc->pid) {
        g_error("an honest member was cut off at step %" PRIu64 ": %u %s",
                f->steps, a->peer->refused.code, a->peer->refused.text);
    }
    peer_free(a->peer);
    a->peer = NULL;
    questions_forget(a);
}

static Question *answered(Actor *a, const WireHead *h)
{
    Question *q = g_queue_pop_head(&a->asked);

    g_assert(q);
    g_assert(q->seq == h->seq);
    return q;
}

static void on_slots(Fuzz *f, Actor *a, const WireSlots *m)
{
    Question *q = answered(a, &m->head);
    bool repeat = q->type == WIRE_REPEAT;

    g_assert(m->head.type == (q->type == WIRE_ASK ? WIRE_ANSWER : WIRE_TAKEN));
    g_assert(m->head.count == q->n);
    for (unsigned i = 0; i < q->n; i++) {
        uint32_t slot = m->slot[i];

        if (slot >= f->slots) {
            f->full += slot == WIRE_FULL || slot == WIRE_SHARE;
            f->left += slot == WIRE_LEFT;
            continue;
        }
        if (a->drops == q->drops) {
            /* else the daemon may have thought that it held the block still */
            check_told(f, a, slot);
        }
        hold(f, a, slot, q->key[i]);
        if (repeat) {
            g_assert(slot % WIRE_BLOCK_MAX == 0);
            g_assert(f->block[slot / WIRE_BLOCK_MAX] != 0);
        }
        f->known++;
    }
    g_free(q);
}

static void on_news(Fuzz *f, Actor *a, const WireNews *m)
{
    for (unsigned i = 0; i < m->head.count; i++) {
        gpointer key = g_hash_table_lookup(f->key_of, &m->found[i].hash);

        g_assert(key);
        if (m->found[i].slot == WIRE_LEFT) {
            f->left++;
            continue;
        }
        hold(f, a, m->found[i].slot, GPOINTER_TO_UINT(key) - 1);
    }
}

static void on_block(Fuzz *f, Actor *a, const WireBlock *m)
{
    Question *q = g_queue_peek_head(&a->asked);
    gpointer at = GUINT_TO_POINTER(m->first);

    if (q && q->type == WIRE_GROW && q->seq == m->head.seq) {
        g_assert(q->first == m->first);
        g_free(answered(a, &m->head));
        /* it may have dropped the block since it asked */
        if (g_hash_table_contains(a->holds, at)) {
            block_is(f, m->first, MAX(m->length, extent(f, m->first)));
            check_slot(f, m->first);
        }
        return;
    }
    g_hash_table_insert(a->told, at, GUINT_TO_POINTER(m->length));
}

static void on_state(Fuzz *f, Actor *a, const WireState *m)
{
    Question *q = answered(a, &m->head);

    g_assert(m->head.count == 1);
    if (a->drops == q->drops) {
        g_assert(m->member[0].holds == g_hash_table_size(a->holds));
        f->states++;
    }
    g_free(q);
}

static void on_message(Fuzz *f, Actor *a, const WireHead *h)
{
    f->messages++;
    switch (h->type) {
    case WIRE_ANSWER:
    case WIRE_TAKEN:
        on_slots(f, a, (const WireSlots *)h);
        break;
    case WIRE_NEWS:
        on_news(f, a, (const WireNews *)h);
        break;
    case WIRE_BLOCK:
        on_block(f, a, (const WireBlock *)h);
        break;
    case WIRE_STATE:
        on_state(f, a, (const WireState *)h);
        break;
    case WIRE_REFUSED:
        break;
    default:
        g_assert_not_reached();
    }
}

/* A hostile one takes slots where it is given any, for it may drop them. */
static void on_message_hostile(Fuzz *f, Actor *a, const WireHead *h)
{
    const WireSlots *m = (const WireSlots *)h;
    const WireNews *news = (const WireNews *)h;

    for (unsigned i = 0; i < h->count; i++) {
        uint32_t slot = h->type == WIRE_NEWS ? news->found[i].slot :
                        h->type == WIRE_ANSWER || h->type == WIRE_TAKEN ?
                        m->slot[i] : WIRE_NONE;

        if (slot < f->slots) {
            hold(f, a, slot, 0);
        }
    }
}

/* Reads what has come, up to @max messages; waits for the first one. */
static bool hear(Fuzz *f, Actor *a, unsigned max, int timeout_ms)
{
    WireHead *h;
    unsigned n = 0;

    while (a->peer && n < max) {
        h = peer_recv(a->peer, timeout_ms);
        if (!h) {
            if (a->peer->fd < 0) {
                lost(f, a);
            }
            break;
        }
        if (a->honesty == HONEST) {
            on_message(f, a, h);
        } else {
            on_message_hostile(f, a, h);
        }
        g_free(h);
        n++;
        timeout_ms = 0;
    }
    return n > 0;
}

static void send_all(Fuzz *f, Actor *a, const void *msg, size_t len)
{
    int ret = peer_send(a->peer, msg, len);

    while (ret == -EAGAIN && a->honesty == HONEST) {
        /* it has been told so much that it is listened to no more */
        hear(f, a, 8, 10);
        ret = peer_send(a->peer, msg, len);
    }
    if (ret && a->honesty == HONEST) {
        g_error("an honest member could not speak: %s; step %" PRIu64,
                strerror(-ret), f->steps);
    }
}

static Question *question_new(Actor *a, WireType type, unsigned n)
{
    Question *q = g_new0(Question, 1);

    q->type = type;
    q->n = n;
    q->seq = ++a->peer->seq;
    q->drops = a->drops;
    if (a->honesty == HONEST) {
        g_queue_push_tail(&a->asked, q);
    }
    return q;
}

static void question_sent(Actor *a, Question *q)
{
    if (a->honesty == HOSTILE) {
        g_free(q);
    }
}

/* A message as it should be, in *len bytes; NULL: not now. */
static void *make_ask(Fuzz *f, Actor *a, size_t *len)
{
    unsigned n = 1 + pick(f, ASKS_MAX);
    Question *q = question_new(a, WIRE_ASK, n);
    WireAsk *m;

    *len = sizeof(*m) + n * sizeof(m->hash[0]);
    m = g_malloc0(*len);
    m->head = (WireHead) { WIRE_ASK, n, q->seq };
    for (unsigned i = 0; i < n; i++) {
        q->key[i] = some_key(f);
        m->hash[i] = key_hash(f, q->key[i]);
    }
    question_sent(a, q);
    return m;
}

static void *make_offer(Fuzz *f, Actor *a, size_t *len)
{
    bool repeat = pick(f, 6) == 0;
    unsigned n = repeat ? 1 : 1 + pick(f, OFFERS_MAX), domain = pick(f, 2);
    unsigned run = pick(f, 2), from = pick(f, f->contents);
    Question *q = question_new(a, repeat ? WIRE_REPEAT : WIRE_OFFER, n);
    WireOffer *m = g_new0(WireOffer, 1);

    a->ring_next = (a->ring_next + 1) % FLIGHT_MAX;
    q->first = a->ring_next * OFFERS_MAX;
    m->head = (WireHead) { q->type, n, q->seq };
    m->first = q->first;
    m->domain = key_domain(f, domain * f->contents);
    m->node = -1;
    m->want = repeat ? 1 + pick(f, 64) : 0;
    for (unsigned i = 0; i < n; i++) {
        unsigned c = repeat ? pick(f, N_REPEATED) :
                     run ? (from + i) % f->contents : pick(f, f->contents);

        q->key[i] = c + domain * f->contents;
        memcpy(peer_page(a->peer, m->first + i), key_page(f, c), PAGE);
    }
    question_sent(a, q);
    *len = sizeof(*m);
    return m;
}

static uint32_t some_hold(Fuzz *f, Actor *a)
{
    GHashTableIter iter;
    gpointer slot = GUINT_TO_POINTER(pick(f, f->slots)), holds;
    unsigned n = g_hash_table_size(a->holds);

    g_hash_table_iter_init(&iter, a->holds);
    for (n = n ? 1 + pick(f, n) : 0; n; n--) {
        g_hash_table_iter_next(&iter, &slot, &holds);
    }
    return GPOINTER_TO_UINT(slot);
}

static void *make_drop(Fuzz *f, Actor *a, size_t *len)
{
    /* now and then all: then what nobody else has is punched, and reused */
    bool all = pick(f, 8) == 0;
    unsigned n = all ? WIRE_PAIRS : 1 + pick(f, 32);
    WirePairs *m = g_malloc0(sizeof(*m) + n * sizeof(m->pair[0]));
    unsigned k = 0;

    while (k < n && g_hash_table_size(a->holds)) {
        uint32_t slot = some_hold(f, a);
        unsigned has = GPOINTER_TO_UINT(
            g_hash_table_lookup(a->holds, GUINT_TO_POINTER(slot)));

        m->pair[k].slot = slot;
        m->pair[k].holds = all ? has : 1 + pick(f, has);
        unhold(f, a, slot, m->pair[k++].holds);
    }
    if (!k) {
        g_free(m);
        return NULL;
    }
    a->drops++;
    m->head = (WireHead) { WIRE_DROP, k, 0 };
    *len = sizeof(*m) + k * sizeof(m->pair[0]);
    return m;
}

static void *make_grow(Fuzz *f, Actor *a, size_t *len)
{
    uint32_t slot = some_hold(f, a);
    WireBlock *m;
    Question *q;

    if (!g_hash_table_contains(a->holds, GUINT_TO_POINTER(slot)) ||
        slot % WIRE_BLOCK_MAX || !f->block[slot / WIRE_BLOCK_MAX]) {
        return NULL;
    }
    q = question_new(a, WIRE_GROW, 0);
    q->first = slot;
    m = g_new0(WireBlock, 1);
    m->head = (WireHead) { WIRE_GROW, 0, q->seq };
    m->first = slot;
    m->length = 1 + pick(f, 200);
    question_sent(a, q);
    *len = sizeof(*m);
    return m;
}

static void *make_status(Fuzz *f, Actor *a, size_t *len)
{
    Question *q = question_new(a, WIRE_STATUS, 0);
    WireHead *m = g_new0(WireHead, 1);

    *m = (WireHead) { WIRE_STATUS, 0, q->seq };
    question_sent(a, q);
    *len = sizeof(*m);
    return m;
}

/* From now on it may be told to leave something; also by another daemon. */
static void *make_room(Fuzz *f, Actor *a, size_t *len)
{
    WireRoom *m = g_new0(WireRoom, 1);

    m->head = (WireHead) { WIRE_ROOM, 0, 0 };
    m->mappings = pick(f, 2) ? pick(f, 1000) : UINT64_MAX;
    m->waiting = pick(f, 1000);
    a->says_room = a->peer->says_room = true;
    *len = sizeof(*m);
    return m;
}

static void *make_message(Fuzz *f, Actor *a, size_t *len)
{
    switch (pick(f, 17)) {
    case 0 ... 4:
        return make_ask(f, a, len);
    case 5 ... 9:
        return make_offer(f, a, len);
    case 10 ... 13:
        return make_drop(f, a, len);
    case 14:
        return make_grow(f, a, len);
    case 15:
        return make_room(f, a, len);
    default:
        return make_status(f, a, len);
    }
}

/* Numbers that someone may have compared wrongly. */
static uint32_t odd_number(Fuzz *f)
{
    static const uint32_t odd[] = {
        0, 1, 2, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 8193,
        16383, 16384, 16385, 1u << 29, 1u << 30,
        INT32_MAX, 1u << 31, UINT32_MAX - 4, UINT32_MAX - 1, UINT32_MAX,
    };

    return pick(f, 3) ? odd[pick(f, G_N_ELEMENTS(odd))] :
           g_rand_int(f->rand);
}

static void *spoil(Fuzz *f, void *msg, size_t *len)
{
    WireHead *h;
    size_t n;

    switch (pick(f, 8)) {
    case 0:
        *len = pick(f, *len + 1);
        return msg;
    case 1:
        n = *len + 1 + pick(f, 4096);
        msg = g_realloc(msg, n);
        memset((char *)msg + *len, pick(f, 256), n - *len);
        *len = n;
        return msg;
    case 2:
        h = msg;
        h->type = pick(f, 2) ? pick(f, 18) : odd_number(f);
        return msg;
    case 3:
        h = msg;
        h->count = odd_number(f);
        return msg;
    case 4:
        for (size_t i = 0; i < *len; i++) {
            ((uint8_t *)msg)[i] = g_rand_int(f->rand);
        }
        return msg;
    default:
        for (unsigned i = 1 + pick(f, 3); i; i--) {
            ((uint32_t *)msg)[pick(f, *len / 4)] = odd_number(f);
        }
        return msg;
    }
}

static void say(Fuzz *f, Actor *a)
{
    size_t len;
    void *msg;

    if (g_queue_get_length(&a->asked) >= FLIGHT_MAX) {
        return;
    }
    msg = make_message(f, a, &len);
    if (!msg) {
        return;
    }
    if (a->honesty == HOSTILE && pick(f, 8) == 0) {
        f->broken++;
        msg = spoil(f, msg, &len);
    }
    if (a->honesty == HOSTILE && pick(f, 64) == 0) {
        int ret = peer_send_fds(a->peer, msg, len, 2, 1 + pick(f, 250));

        g_assert(ret != -EINVAL);
    } else {
        send_all(f, a, msg, len);
    }
    g_free(msg);
}

/* As the model has it, in several messages now and then. */
static void send_held(Fuzz *f, Actor *a)
{
    unsigned n = g_hash_table_size(a->holds), k = 0, cut;
    WirePair *pair = g_new(WirePair, n + 1);
    GHashTableIter iter;
    gpointer slot, holds;

    g_hash_table_iter_init(&iter, a->holds);
    while (g_hash_table_iter_next(&iter, &slot, &holds)) {
        pair[k].slot = GPOINTER_TO_UINT(slot);
        pair[k++].holds = GPOINTER_TO_UINT(holds);
    }
    cut = pick(f, n + 1);
    if (cut < n) {
        peer_send_held(a->peer, pair, cut, 1);
        if (pick(f, 10) == 0) {
            g_free(pair);
            peer_free(a->peer);
            a->peer = NULL;
            return;
        }
    }
    peer_send_held(a->peer, pair + cut % MAX(n, 1), n - cut % MAX(n, 1), 0);
    g_free(pair);
}

static void arrive(Fuzz *f, Actor *a)
{
    Peer *p = peer_connect(f->d);
    const uint64_t *cookie = a->known ? a->welcome.cookie : NULL;

    if (a->honesty == HOSTILE && pick(f, 3) == 0) {
        /* somebody else's, or none */
        cookie = f->actor[pick(f, N_ACTORS)].welcome.cookie;
    }
    if (!a->proc->pid) {
        proc_free(a->proc);
        a->proc = proc_new(-1);
    }
    p->proc = a->proc;
    p->says_room = a->honesty == HOSTILE || a->says_room;
    if (!peer_hello(p, cookie)) {
        g_assert(a->honesty == HOSTILE);
        peer_free(p);
        return;
    }
    fcntl(p->fd, F_SETFL, O_NONBLOCK);
    g_assert(p->welcome.key == f->key);
    a->peer = p;
    a->welcome = p->welcome;
    if (a->honesty == HOSTILE) {
        if (p->welcome.resumed && pick(f, 2)) {
            peer_send_held(p, NULL, 0, pick(f, 3));
            unhold_all(f, a);
        }
    } else {
        g_assert(p->welcome.resumed == a->known);
        if (a->known) {
            send_held(f, a);
        }
    }
    a->known = true;
}

static void cut(Fuzz *f, Actor *a)
{
    peer_free(a->peer);
    a->peer = NULL;
    questions_forget(a);
    f->cuts++;
}

/* Sometimes what it was told last stays in the socket, unread. */
static void die(Fuzz *f, Actor *a)
{
    unhold_all(f, a);
    proc_kill(a->proc);
    if (a->peer && pick(f, 2)) {
        cut(f, a);
    }
    a->known = false;
    f->kills++;
}

/* The dead say nothing; their sockets may. */
static void act(Fuzz *f)
{
    Actor *a = &f->actor[pick(f, N_ACTORS)];
    unsigned what = pick(f, 1000);

    if (pick(f, f->reload) == 0) {
        g_assert(kill(f->d->pid, SIGHUP) == 0);
        f->reloads++;
    }
    if (!a->proc->pid && a->peer) {
        cut(f, a);
    } else if (!a->peer) {
        arrive(f, a);
    } else if (what < 3) {
        die(f, a);
    } else if (what < 10) {
        cut(f, a);
    } else if (what < 400) {
        hear(f, a, 1 + pick(f, 8), 0);
    } else {
        say(f, a);
    }
}

/* What is asked is answered, if one waits. */
static void drain(Fuzz *f)
{
    for (unsigned i = 0; i < N_HONEST; i++) {
        Actor *a = &f->actor[i];

        while (a->peer && a->proc->pid && !g_queue_is_empty(&a->asked)) {
            if (!hear(f, a, 1, PATIENCE_MS)) {
                g_error("no answer within %u ms; step %" PRIu64, PATIENCE_MS,
                        f->steps);
            }
        }
    }
}

static void begin(Fuzz *f, uint32_t seed)
{
    const PooldConfig config = { .slots = f->size, .members = 1000 };
    Peer *p;

    f->rand = g_rand_new_with_seed(seed);
    f->d = poold_new(&config);
    p = peer_new(f->d, NULL);
    f->key = p->welcome.key;
    f->slots = p->welcome.slots;
    f->map = mmap(NULL, f->slots * PAGE, PROT_READ, MAP_PRIVATE, p->pool_fd,
                  0);
    g_assert(f->map != MAP_FAILED);
    g_assert(p->welcome.ring_pages >= OFFERS_MAX * FLIGHT_MAX);
    peer_free(p);
    f->block = g_new0(uint16_t, f->slots / WIRE_BLOCK_MAX + 1);
    f->holders = g_new0(uint32_t, f->slots);
    f->slot_key = g_new0(uint16_t, f->slots);
    f->content = g_malloc(f->contents * PAGE);
    f->key_of = g_hash_table_new_full(g_int64_hash, g_int64_equal, g_free,
                                      NULL);
    for (unsigned i = 0; i < f->contents; i++) {
        page_fill(f->content + i * PAGE, i);
    }
    for (unsigned i = 0; i < f->contents * N_DOMAINS; i++) {
        uint64_t hash = key_hash(f, i);

        g_hash_table_insert(f->key_of, g_memdup2(&hash, sizeof(hash)),
                            GUINT_TO_POINTER(i + 1));
    }
    for (unsigned i = 0; i < N_ACTORS; i++) {
        f->actor[i].honesty = i < N_HONEST ? HONEST : HOSTILE;
        f->actor[i].proc = proc_new(-1);
        f->actor[i].holds = g_hash_table_new(NULL, NULL);
        f->actor[i].told = g_hash_table_new(NULL, NULL);
        g_queue_init(&f->actor[i].asked);
    }
}

/* All leave, and nothing stays.  (This process was a member in begin().) */
static void end(Fuzz *f)
{
    WireState *s;

    drain(f);
    watch(f);
    for (unsigned i = 0; i < N_ACTORS; i++) {
        Actor *a = &f->actor[i];

        unhold_all(f, a);
        if (a->peer) {
            peer_free(a->peer);
        }
        questions_forget(a);
        proc_free(a->proc);
        g_hash_table_destroy(a->holds);
        g_hash_table_destroy(a->told);
    }
    if (!poold_empties(f->d)) {
        g_error("slots are left when all have gone");
    }
    s = poold_state(f->d);
    printf("# published %" PRIu64 ", found %" PRIu64 ", news %" PRIu64
           ", lost %" PRIu64 ", refused: full %" PRIu64 ", share %" PRIu64
           "\n", s->published, s->found, s->news, s->news_lost,
           s->refused_full, s->refused_share);
    g_assert(s->members <= 1);
    g_free(s);
    poold_free(f->d);
    munmap((void *)f->map, f->slots * PAGE);
    g_free(f->block);
    g_free(f->holders);
    g_free(f->slot_key);
    g_free(f->content);
    g_hash_table_destroy(f->key_of);
    g_rand_free(f->rand);
}

int main(int argc, char **argv)
{
    int seed = g_random_int(), seconds = 20;
    Fuzz f = { .contents = 600, .size = 4096, .reload = 10000 };
    const GOptionEntry options[] = {
        { "seed", 0, 0, G_OPTION_ARG_INT, &seed, "of the sequence", "N" },
        { "seconds", 0, 0, G_OPTION_ARG_INT, &seconds, "so long", "S" },
        { "contents", 0, 0, G_OPTION_ARG_INT, &f.contents, "of pages", "N" },
        { "slots", 0, 0, G_OPTION_ARG_INT, &f.size, "of the pool", "N" },
        { "reload", 0, 0, G_OPTION_ARG_INT, &f.reload,
          "once in so many steps", "N" },
        { }
    };
    GOptionContext *context = g_option_context_new(NULL);
    int64_t until;

    g_option_context_add_main_entries(context, options, NULL);
    if (!g_option_context_parse(context, &argc, &argv, NULL)) {
        return 2;
    }
    if (f.contents < N_REPEATED || f.contents > 30000 || f.size < 4096 ||
        f.reload < 1) {
        fputs("fuzz-poold: 3 to 30000 contents, 4096 slots or more\n", stderr);
        return 2;
    }
    g_option_context_free(context);
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("# seed %d\n", seed);
    until = g_get_monotonic_time() + seconds * G_USEC_PER_SEC;
    begin(&f, seed);
    for (; g_get_monotonic_time() < until; f.steps++) {
        act(&f);
        if (f.steps % WATCH_EVERY == 0) {
            watch(&f);
        }
        if (f.steps % 5000 == 0) {
            drain(&f);
        }
    }
    end(&f);
    printf("# %" PRIu64 " steps, %" PRIu64 " answers, %" PRIu64
           " slots named, %" PRIu64 " left, %" PRIu64 " refused, %" PRIu64
           " broken, %" PRIu64
           " kills, %" PRIu64 " cuts, %" PRIu64 " reloads, %" PRIu64
           " pages and %" PRIu64 " states compared\n", f.steps, f.messages,
           f.known, f.left, f.full, f.broken, f.kills, f.cuts, f.reloads, f.watched,
           f.states);
    /* or it tested nothing */
    g_assert(f.known > 0);
    printf("ok 1 fuzz-poold\n1..1\n");
    return 0;
}
