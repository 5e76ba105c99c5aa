/*
 * ksm-poold: what each message means
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * From docs/interop/ksm-pool.rst alone; against the real daemon, one of its own
 * for each case.  Members that must be told apart are in processes of their
 * own.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "wire-member.h"

#define A_WHILE_MS 300      /* in which the daemon could do what it must not */

static void a_while(void)
{
    g_usleep(A_WHILE_MS * 1000);
}

static void no_message(Peer *p)
{
    g_assert(!peer_recv(p, A_WHILE_MS));
    g_assert(p->fd >= 0);
}

static bool is_same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static void test_welcome(void)
{
    Poold *d = poold_new(NULL), *other = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    Peer *c = peer_new(other, NULL);
    const WireWelcome *w = &a->welcome;
    struct stat pool_a, pool_b, pool_c, ring_a, ring_b;

    g_assert(w->version == 1);
    g_assert(w->resumed == 0);
    g_assert(w->features == 0);     /* none was asked for */
    g_assert(w->cookie[0] || w->cookie[1]);
    g_assert(w->slots - 1 < WIRE_SLOTS_MAX);
    g_assert(w->hold_users >= 1);
    g_assert(w->asks - 1 < WIRE_ASKS);
    g_assert(w->offers - 1 < WIRE_OFFERS);
    g_assert(w->ring_pages >= w->offers);
    g_assert(w->in_flight >= 1);

    /* the pool is one, a ring each one's own */
    g_assert(fstat(a->pool_fd, &pool_a) == 0);
    g_assert(fstat(b->pool_fd, &pool_b) == 0);
    g_assert(fstat(a->ring_fd, &ring_a) == 0);
    g_assert(fstat(b->ring_fd, &ring_b) == 0);
    g_assert(is_same_file(&pool_a, &pool_b));
    g_assert(!is_same_file(&ring_a, &ring_b));
    g_assert(ring_a.st_size == w->ring_pages * PAGE);
    g_assert(ftruncate(a->ring_fd, PAGE) == -1);
    g_assert(ftruncate(a->ring_fd, ring_a.st_size + PAGE) == -1);
    g_assert((fcntl(a->pool_fd, F_GETFL) & O_ACCMODE) == O_RDONLY);

    g_assert(w->generation == b->welcome.generation);
    g_assert(w->key == b->welcome.key);
    g_assert(w->cookie[0] != b->welcome.cookie[0] &&
             w->cookie[1] != b->welcome.cookie[1]);

    /* another group has nothing of it */
    g_assert(fstat(c->pool_fd, &pool_c) == 0);
    g_assert(!is_same_file(&pool_a, &pool_c));
    g_assert(w->key != c->welcome.key);
    g_assert(w->generation != c->welcome.generation);

    peer_free(a);
    peer_free(b);
    peer_free(c);
    poold_free(d);
    poold_free(other);
}

static void test_ask(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    uint64_t hash[3] = { peer_hash_of(a, 1), peer_hash_of(a, 2),
                         peer_hash_of(a, 3) };
    uint32_t slot[4], offered;

    peer_ask(a, hash, 2, slot);
    g_assert(slot[0] == WIRE_NONE);
    g_assert(slot[1] == WIRE_NONE);
    /* it is the same member still */
    g_assert(peer_ask_one(a, hash[0]) == WIRE_NONE);

    offered = peer_offer_one(a, 3);
    g_assert(offered < a->welcome.slots);
    peer_ask(b, (uint64_t[]) { hash[2], hash[0], hash[2], hash[1] ^ 1 }, 4,
             slot);
    g_assert(slot[0] == offered);
    g_assert(slot[1] == WIRE_WANTED);
    g_assert(slot[2] == offered);
    g_assert(slot[3] == WIRE_NONE);

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

/* As many as WELCOME allows. */
static void test_ask_many(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    unsigned n = a->welcome.asks, known = 0;
    uint64_t *hash = g_new(uint64_t, n);
    uint32_t *slot = g_new(uint32_t, n), offered = peer_offer_one(a, 1);
    WireState *s;

    for (unsigned i = 0; i < n; i++) {
        hash[i] = (i + 1) * 0x9e3779b97f4a7c15ull;
    }
    hash[n - 1] = peer_hash_of(a, 1);
    peer_ask(a, hash, n, slot);
    g_assert(slot[n - 1] == offered);
    peer_ask(b, hash, n, slot);
    g_assert(slot[n - 1] == offered);
    for (unsigned i = 0; i < n - 1; i++) {
        known += slot[i] == WIRE_WANTED;
    }
    /* "as many as fit" */
    g_assert(known > n / 2);
    s = peer_state(b);
    g_assert(s->asked == 2 * n);
    g_free(s);

    g_free(hash);
    g_free(slot);
    peer_free(a);
    peer_free(b);
    poold_free(d);
}

static void test_offer(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    unsigned n = MIN(64, a->welcome.offers), last = a->welcome.ring_pages - n;
    uint32_t slot[64], again[64];
    WireState *s;

    for (unsigned i = 0; i < n; i++) {
        page_fill(peer_page(a, last + i), i);
        page_fill(peer_page(b, i), n - 1 - i);
    }
    peer_offer(a, last, n, 0, slot);
    for (unsigned i = 0; i < n; i++) {
        g_assert(slot[i] == slot[0] + i);
        g_assert(peer_slot_has(a, slot[i], i));
        g_assert(peer_slot_has(b, slot[i], i));
    }
    /* what is there already keeps its slot, whoever offers it */
    peer_offer(a, last, n, 0, again);
    g_assert(memcmp(slot, again, n * sizeof(*slot)) == 0);
    peer_offer(b, 0, n, 0, again);
    for (unsigned i = 0; i < n; i++) {
        g_assert(again[i] == slot[n - 1 - i]);
    }
    s = peer_state(a);
    g_assert(s->offered == 3 * n);
    g_assert(s->published == n);
    g_assert(s->found == 2 * n);
    g_assert(s->used == n);
    g_free(s);

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

/* Equal pages beside each other in one OFFER. */
static void test_offer_twins(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL);
    uint32_t slot[4];

    for (unsigned i = 0; i < 4; i++) {
        page_fill(peer_page(a, i), i % 2);
    }
    peer_offer(a, 0, 4, 0, slot);
    g_assert(slot[0] == slot[2]);
    g_assert(slot[1] == slot[3]);
    g_assert(slot[0] != slot[1]);
    /* two holds */
    peer_drop(a, slot[0], 1);
    peer_sync(a);
    a_while();
    g_assert(peer_slot_has(a, slot[0], 0));
    peer_drop(a, slot[0], 1);
    g_assert(peer_slot_punched(a, slot[0]));
    g_assert(peer_slot_has(a, slot[1], 1));

    peer_free(a);
    poold_free(d);
}

static void test_domain(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    uint32_t slot[2], domain = 0x9e3779b1;

    page_fill(peer_page(a, 0), 1);
    peer_offer(a, 0, 1, 0, &slot[0]);
    peer_offer(a, 0, 1, domain, &slot[1]);
    g_assert(slot[1] < a->welcome.slots);
    g_assert(slot[0] != slot[1]);
    g_assert(peer_slot_has(a, slot[1], 1));
    g_assert(peer_ask_one(b, peer_hash_of(b, 1)) == slot[0]);
    g_assert(peer_ask_one(b, peer_hash_of(b, 1) ^ domain) == slot[1]);

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

/* A node that is there, and one that a kernel could have, but hardly has. */
static void test_node(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL);
    int32_t nodes[] = { 0, 1023 };

    for (unsigned i = 0; i < G_N_ELEMENTS(nodes); i++) {
        WireOffer o = {
            .head = { .type = WIRE_OFFER, .count = 1, .seq = ++a->seq },
            .node = nodes[i],
        };
        WireSlots *t;

        page_fill(peer_page(a, 0), i);
        g_assert(peer_send(a, &o, sizeof(o)) == 0);
        t = (WireSlots *)peer_wait(a, WIRE_TAKEN, PATIENCE_MS);
        g_assert(t);
        g_assert(t->slot[0] < a->welcome.slots);
        g_assert(peer_slot_has(a, t->slot[0], i));
        g_free(t);
    }
    peer_free(a);
    poold_free(d);
}

static WireFound wait_news(Peer *p)
{
    WireNews *m = (WireNews *)peer_wait(p, WIRE_NEWS, PATIENCE_MS);
    WireFound found;

    g_assert(m);
    g_assert(m->head.count == 1);
    found = m->found[0];
    g_free(m);
    return found;
}

static void test_news(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    uint64_t hash = peer_hash_of(a, 1);
    uint32_t slot;
    WireFound found;
    WireState *s;

    g_assert(peer_ask_one(a, hash) == WIRE_NONE);
    g_assert(peer_ask_one(b, hash) == WIRE_WANTED);
    no_message(a);
    slot = peer_offer_one(b, 1);
    found = wait_news(a);
    g_assert(found.hash == hash);
    g_assert(found.slot == slot);
    no_message(b);
    s = peer_state(a);
    g_assert(s->news == 1);
    g_free(s);

    /* it is a hold */
    peer_drop(b, slot, 1);
    peer_sync(b);
    a_while();
    g_assert(peer_slot_has(a, slot, 1));
    peer_drop(a, slot, 1);
    g_assert(peer_slot_punched(a, slot));

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

/* Nobody is told of what he offers himself. */
static void test_news_own(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL);

    g_assert(peer_ask_one(a, peer_hash_of(a, 1)) == WIRE_NONE);
    g_assert(peer_offer_one(a, 1) < a->welcome.slots);
    no_message(a);
    peer_free(a);
    poold_free(d);
}

static void test_drop_last(void)
{
    Poold *d = poold_new(NULL);
    Proc *pa = proc_new(-1), *pb = proc_new(-1);
    Peer *a = peer_new(d, pa), *b = peer_new(d, pb), *watch;
    uint32_t slot = peer_offer_one(a, 1);

    g_assert(peer_ask_one(b, peer_hash_of(b, 1)) == slot);
    peer_drop(a, slot, 1);
    peer_sync(a);
    a_while();
    g_assert(peer_slot_has(b, slot, 1));
    /* the last one's process, while its connection stays */
    proc_kill(pb);
    g_assert(peer_slot_punched(b, slot));
    watch = peer_new(d, NULL);
    g_assert(peer_ask_one(watch, peer_hash_of(b, 1)) == WIRE_NONE);
    g_assert(poold_empties(d));

    peer_free(watch);
    peer_free(a);
    peer_free(b);
    proc_free(pa);
    proc_free(pb);
    poold_free(d);
}

static void test_close(void)
{
    Poold *d = poold_new(NULL);
    Proc *pa = proc_new(-1);
    Peer *a = peer_new(d, pa);
    uint32_t slot = peer_offer_one(a, 1);
    WireState *s;

    peer_close(a);
    a_while();
    g_assert(peer_slot_has(a, slot, 1));
    s = poold_state(d);
    g_assert(s->members == 1);
    g_assert(s->head.count == 1);
    g_assert(s->member[0].connected == 0);
    g_assert(s->member[0].pid == pa->pid);
    g_assert(s->holds == 1);
    g_free(s);
    proc_kill(pa);
    g_assert(peer_slot_punched(a, slot));
    s = poold_state(d);
    g_assert(s->members == 0);
    g_free(s);

    peer_free(a);
    proc_free(pa);
    poold_free(d);
}

static void test_counts(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    uint32_t slot = peer_offer_one(a, 1);

    g_assert(peer_ask_one(b, peer_hash_of(b, 1)) == slot);
    g_assert(peer_ask_one(b, peer_hash_of(b, 1)) == slot);
    peer_drop(a, slot, 1);
    peer_drop(b, slot, 1);
    peer_sync(a);
    peer_sync(b);
    a_while();
    g_assert(peer_slot_has(b, slot, 1));
    peer_drop(b, slot, 1);
    g_assert(peer_slot_punched(b, slot));
    /* one more than it held */
    peer_drop(b, slot, 1);
    peer_ends(b, WIRE_REFUSED_PROTOCOL);

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

static void test_resume(void)
{
    Poold *d = poold_new(NULL);
    Proc *pa = proc_new(-1);
    Peer *a = peer_new(d, pa), *b;
    uint32_t s1 = peer_offer_one(a, 1), s2 = peer_offer_one(a, 2), s3;
    WireOffer lost = {
        .head = { .type = WIRE_OFFER, .count = 1 }, .node = -1,
    };
    WireState *s;

    g_assert(peer_offer_one(a, 1) == s1);
    s3 = peer_offer_one(a, 3);
    peer_sync(a);
    /* a fourth, of which the member never hears */
    page_fill(peer_page(a, 0), 4);
    g_assert(peer_send(a, &lost, sizeof(lost)) == 0);
    peer_close(a);

    b = peer_resume(d, a);
    g_assert(b->welcome.cookie[0] == a->welcome.cookie[0]);
    g_assert(b->welcome.cookie[1] == a->welcome.cookie[1]);
    g_assert(b->welcome.generation == a->welcome.generation);
    g_assert(b->welcome.key == a->welcome.key);
    /* s1 was given twice; s3 is in the second message */
    peer_send_held(b, &(WirePair) { s1, 1 }, 1, 1);
    peer_send_held(b, &(WirePair) { s3, 1 }, 1, 0);
    g_assert(peer_slot_punched(b, s2));
    peer_sync(b);
    g_assert(peer_slot_has(b, s1, 1));
    g_assert(peer_slot_has(b, s3, 3));
    s = peer_state(b);
    g_assert(s->used == 2);
    g_assert(s->members == 1);
    g_assert(s->member[0].connected == 1);
    g_assert(s->member[0].holds == 2);
    g_free(s);
    peer_drop(b, s1, 1);
    g_assert(peer_slot_punched(b, s1));
    g_assert(peer_slot_has(b, s3, 3));
    peer_drop(b, s3, 1);
    g_assert(poold_empties(d));

    peer_free(a);
    peer_free(b);
    proc_free(pa);
    poold_free(d);
}

/* HELD is believed when it is complete, and not before. */
static void test_resume_cut(void)
{
    Poold *d = poold_new(NULL);
    Proc *pa = proc_new(-1);
    Peer *a = peer_new(d, pa), *b, *c, *e;
    uint32_t s1 = peer_offer_one(a, 1), s2 = peer_offer_one(a, 2);
    WirePair both[2] = { { s1, 1 }, { s2, 1 } };

    peer_close(a);
    b = peer_resume(d, a);
    peer_close(b);
    c = peer_resume(d, a);
    peer_send_held(c, both, 1, 1);
    peer_close(c);
    e = peer_resume(d, a);
    a_while();
    peer_send_held(e, both, 2, 0);
    peer_sync(e);
    a_while();
    g_assert(peer_slot_has(e, s1, 1));
    g_assert(peer_slot_has(e, s2, 2));
    peer_drop(e, s1, 1);
    peer_drop(e, s2, 1);
    g_assert(poold_empties(d));

    peer_free(a);
    peer_free(b);
    peer_free(c);
    peer_free(e);
    proc_free(pa);
    poold_free(d);
}

/* The old connection is still open. */
static void test_resume_over(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b;
    uint32_t slot = peer_offer_one(a, 1);

    b = peer_resume(d, a);
    peer_send_held(b, &(WirePair) { slot, 1 }, 1, 0);
    peer_sync(b);
    peer_ends(a, 0);
    g_assert(peer_slot_has(b, slot, 1));
    peer_drop(b, slot, 1);
    g_assert(poold_empties(d));

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

/* What is asked for comes while a member resumes: not between its HELDs. */
static void test_resume_news(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL), *c;
    uint32_t slot;
    WireHead *h;

    g_assert(peer_ask_one(a, peer_hash_of(a, 1)) == WIRE_NONE);
    peer_close(a);
    c = peer_resume(d, a);
    slot = peer_offer_one(b, 1);
    peer_send_held(c, NULL, 0, 0);
    peer_sync(c);
    h = peer_wait(c, WIRE_NEWS, A_WHILE_MS);
    peer_drop(b, slot, 1);
    if (h) {
        /* if it was told, it holds */
        a_while();
        g_assert(peer_slot_has(c, slot, 1));
        peer_drop(c, slot, 1);
    }
    g_assert(poold_empties(d));

    g_free(h);
    peer_free(a);
    peer_free(b);
    peer_free(c);
    poold_free(d);
}

static void test_resume_more(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b, *c, *e;
    uint32_t slot = peer_offer_one(a, 1);

    peer_close(a);
    b = peer_resume(d, a);
    peer_send_held(b, &(WirePair) { slot, 2 }, 1, 0);
    peer_ends(b, WIRE_REFUSED_PROTOCOL);
    c = peer_resume(d, a);
    peer_send_held(c, &(WirePair) { slot + 1, 1 }, 1, 0);
    peer_ends(c, WIRE_REFUSED_PROTOCOL);
    /* that took nothing away */
    a_while();
    g_assert(peer_slot_has(a, slot, 1));
    e = peer_resume(d, a);
    peer_send_held(e, &(WirePair) { slot, 1 }, 1, 0);
    peer_sync(e);

    peer_free(a);
    peer_free(b);
    peer_free(c);
    peer_free(e);
    poold_free(d);
}

static void test_cookie(void)
{
    Poold *d = poold_new(NULL);
    Proc *pa = proc_new(-1), *pb = proc_new(-1);
    Peer *a = peer_new(d, pa), *thief = peer_connect(d), *b = peer_connect(d);
    uint32_t slot = peer_offer_one(a, 1);

    thief->proc = pb;
    g_assert(peer_hello(thief, a->welcome.cookie));
    g_assert(thief->welcome.resumed == 0);
    g_assert(thief->welcome.cookie[0] != a->welcome.cookie[0]);
    peer_drop(thief, slot, 1);
    peer_ends(thief, WIRE_REFUSED_PROTOCOL);
    /* the member has not noticed */
    peer_sync(a);
    g_assert(peer_slot_has(a, slot, 1));

    /* nobody's: a new member, with another cookie */
    b->proc = pb;
    g_assert(peer_hello(b, (uint64_t[]) { a->welcome.cookie[0], 1 }));
    g_assert(b->welcome.resumed == 0);
    g_assert(b->welcome.cookie[1] != 1);
    g_assert(b->welcome.cookie[0] != a->welcome.cookie[0]);
    peer_sync(b);

    peer_free(a);
    peer_free(b);
    peer_free(thief);
    proc_free(pa);
    proc_free(pb);
    poold_free(d);
}

static void check_block(Peer *p, uint32_t first, unsigned n, uint64_t content)
{
    for (unsigned i = 0; i < n; i++) {
        g_assert(peer_slot_has(p, first + i, content));
    }
}

/* The BLOCK that must have come before an answer that named @first. */
static unsigned block_told(Peer *p, uint32_t first)
{
    WireBlock *b = g_queue_pop_head(&p->early);
    unsigned length;

    g_assert(b);
    g_assert(b->head.type == WIRE_BLOCK);
    g_assert(b->first == first);
    length = b->length;
    g_free(b);
    return length;
}

static void test_repeat(void)
{
    Poold *d = poold_new(NULL);
    Proc *pb = proc_new(-1);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, pb);
    unsigned length;
    uint32_t first = peer_repeat(a, 1, 64, &length);
    WireState *s;

    g_assert(first < a->welcome.slots);
    g_assert(length == 64);
    check_block(a, first, 64, 1);
    g_assert(peer_grow(a, first, 200) == 200);
    check_block(a, first, 200, 1);
    g_assert(peer_grow(a, first, 100) == 200);
    s = peer_state(a);
    g_assert(s->used == 200);
    g_free(s);

    /* whoever did not hold it learns how long it is; who did need not */
    g_assert(peer_ask_one(b, peer_hash_of(b, 1)) == first);
    g_assert(block_told(b, first) == 200);
    g_assert(peer_grow(b, first, 512) == 512);
    check_block(b, first, 512, 1);
    g_assert(peer_offer_one(b, 1) == first);

    peer_drop(a, first, 1);
    peer_sync(a);
    peer_drop(b, first, 1);
    peer_sync(b);
    a_while();
    check_block(b, first, 512, 1);
    peer_drop(b, first, 1);
    g_assert(poold_empties(d));
    for (unsigned i = 0; i < 512; i++) {
        g_assert(peer_slot_is_hole(a, first + i));
    }

    peer_free(a);
    peer_free(b);
    proc_free(pb);
    poold_free(d);
}

/* One slot is there; a block is wanted. */
static void test_repeat_known(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    unsigned length;
    uint32_t slot = peer_offer_one(a, 1);
    uint32_t first = peer_repeat(b, 1, 512, &length), again;

    g_assert(first < a->welcome.slots);
    g_assert(length == 512);
    check_block(b, first, 512, 1);
    g_assert(peer_slot_has(a, slot, 1));
    /* a second one of the same is a hold on the first, or another block */
    again = peer_repeat(a, 1, 16, &length);
    g_assert(again < a->welcome.slots);
    g_assert(length >= 1);
    check_block(a, again, length, 1);
    peer_drop(a, slot, 1);
    peer_drop(a, again, 1);
    peer_sync(a);
    a_while();
    check_block(b, first, 512, 1);
    peer_drop(b, first, 1);
    g_assert(poold_empties(d));

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

static void test_grow_not_held(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    unsigned length;
    uint32_t first = peer_repeat(a, 1, 8, &length);
    WireBlock m = { .head = { .type = WIRE_GROW }, .first = first,
                    .length = 512 };

    g_assert(peer_send(b, &m, sizeof(m)) == 0);
    peer_ends(b, WIRE_REFUSED_PROTOCOL);
    peer_sync(a);
    check_block(a, first, length, 1);
    g_assert(peer_slot_is_hole(a, first + length));

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

/* News of a block. */
static void test_repeat_news(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    uint64_t hash = peer_hash_of(a, 1);
    unsigned length;
    uint32_t first;
    WireFound found;

    g_assert(peer_ask_one(a, hash) == WIRE_NONE);
    first = peer_repeat(b, 1, 32, &length);
    found = wait_news(a);
    g_assert(found.slot == first);
    g_assert(block_told(a, first) == 32);
    peer_drop(b, first, 1);
    peer_sync(b);
    a_while();
    check_block(a, first, 32, 1);
    peer_drop(a, first, 1);
    g_assert(poold_empties(d));

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

static void test_full(void)
{
    const PooldConfig small = { .slots = 4096 };
    Poold *d = poold_new(&small);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    uint32_t *slots = g_new(uint32_t, 8192), slot;
    unsigned n = 0, length;
    WireState *s;

    while (n < 8192) {
        slot = peer_offer_one(n % 2 ? a : b, n);
        if (slot >= a->welcome.slots) {
            break;
        }
        slots[n++] = slot;
    }
    g_assert(slot == WIRE_FULL);
    g_assert(n >= 512);
    g_assert(n <= a->welcome.slots);
    for (unsigned i = 0; i < n; i++) {
        g_assert(peer_slot_has(a, slots[i], i));
    }
    /* what is there is found still */
    g_assert(peer_offer_one(a, 1) == slots[1]);
    g_assert(peer_repeat(a, n, 512, &length) == WIRE_FULL);
    s = peer_state(a);
    g_assert(s->refused_full >= 1);
    g_assert(s->used == n);
    g_free(s);
    /* room for one */
    peer_drop(b, slots[0], 1);
    g_assert(peer_slot_punched(b, slots[0]));
    slot = peer_offer_one(a, 10000);
    g_assert(slot < a->welcome.slots);
    g_assert(peer_slot_has(a, slot, 10000));

    g_free(slots);
    peer_free(a);
    peer_free(b);
    poold_free(d);
}

static void test_share(void)
{
    const PooldConfig config = { .slots = 4096, .share = 5 };
    Poold *d = poold_new(&config);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    uint32_t first = peer_offer_one(a, 0), slot = first;
    unsigned n = 1;
    WireState *s;

    while (slot < a->welcome.slots && n < 4096) {
        slot = peer_offer_one(a, n++);
    }
    g_assert(slot == WIRE_SHARE);
    /* nobody else feels that */
    g_assert(peer_offer_one(b, 10000) < b->welcome.slots);
    s = peer_state(a);
    g_assert(s->refused_share == 1);
    g_assert(s->member[0].published == n - 1);
    g_free(s);
    /* what the pool has costs nobody a share */
    g_assert(peer_offer_one(a, 10000) < a->welcome.slots);
    peer_drop(a, first, 1);
    g_assert(peer_slot_punched(a, first));
    g_assert(peer_offer_one(a, 20000) < a->welcome.slots);

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

static const WireMember *member_of(const WireState *s, pid_t pid)
{
    for (unsigned i = 0; i < s->head.count; i++) {
        if (s->member[i].pid == pid) {
            return &s->member[i];
        }
    }
    g_assert_not_reached();
}

static void test_status(void)
{
    Poold *d = poold_new(NULL);
    Proc *pa = proc_new(-1), *pb = proc_new(-1);
    Peer *a = peer_new(d, pa), *b = peer_new(d, pb);
    uint32_t slot = peer_offer_one(a, 1);
    WireState *s;

    peer_offer_one(a, 2);
    g_assert(peer_ask_one(b, peer_hash_of(b, 1)) == slot);
    s = peer_state(b);
    g_assert(s->head.count == 1);
    g_assert(s->members == 2);
    g_assert(s->member[0].pid == pb->pid);
    g_assert(s->generation == a->welcome.generation);
    g_assert(s->slots == a->welcome.slots);
    g_free(s);

    s = poold_state(d);
    g_assert(s->head.count == 2);
    g_assert(s->members == 2);
    g_assert(s->used == 2);
    g_assert(s->holds == 3);
    g_assert(s->published == 2);
    g_assert(s->asked == 1);
    g_assert(s->offered == 2);
    g_assert(s->uptime < 60);
    g_assert(strcmp(s->member[0].name, "test") == 0);
    g_assert(s->member[0].pages == 65536);
    g_assert(member_of(s, pa->pid)->holds == 2);
    g_assert(member_of(s, pa->pid)->share == 1500);
    g_assert(member_of(s, pa->pid)->published == 2);
    g_assert(member_of(s, pb->pid)->holds == 1);
    g_assert(member_of(s, pb->pid)->share == 500);
    g_assert(member_of(s, pb->pid)->published == 0);
    g_assert(member_of(s, pb->pid)->connected == 1);
    g_free(s);

    peer_free(a);
    peer_free(b);
    proc_free(pa);
    proc_free(pb);
    poold_free(d);
}

static void tail_send(Peer *p, uint64_t bytes, uint64_t given, uint64_t merged)
{
    WireTail tail = {
        .head = { .type = WIRE_TAIL },
        .left = { bytes, given, merged },
    };

    g_assert(peer_send(p, &tail, sizeof(tail)) == 0);
    peer_sync(p);
}

static WireState *state_brief(const Poold *d)
{
    WireHead status = { .type = WIRE_STATUS, .count = 1, .seq = 9 };
    Peer *p = peer_connect(d);
    WireState *s;

    g_assert(peer_send(p, &status, sizeof(status)) == 0);
    s = (WireState *)peer_wait(p, WIRE_STATE, PATIENCE_MS);
    g_assert(s && s->head.seq == 9);
    peer_free(p);
    return s;
}

/* A member has room for two pools at least: none is larger than 1 TiB. */
static void test_size(void)
{
    char *argv[] = { (char *)g_getenv("KSM_POOLD"), "--size", "2T", NULL };
    g_autofree char *said = NULL;
    int status;

    g_assert(g_spawn_sync(NULL, argv, NULL, G_SPAWN_DEFAULT, NULL, NULL, NULL,
                          &said, &status, NULL));
    g_assert(WIFEXITED(status) && WEXITSTATUS(status) == 2);
    g_assert(strstr(said, "1T"));
}

/* How much is left to the kernel: a sum, and of each. */
static void test_tail(void)
{
    Poold *d = poold_new(NULL);
    Proc *pa = proc_new(-1), *pb = proc_new(-1);
    Peer *a = peer_new(d, pa), *b = peer_new(d, pb);
    WireTail wrong = { .head = { .type = WIRE_TAIL } };
    WireState *s;

    tail_send(a, 4 << 20, 2, 7);
    tail_send(b, 2 << 20, 5, 0);
    tail_send(b, 0, 5, 1);
    s = state_brief(d);
    g_assert(s->head.count == 0 && s->members == 2);
    g_assert(s->left.bytes == 4 << 20);
    g_assert(s->left.given == 7);
    g_assert(s->left.merged == 8);
    g_free(s);
    /* what was given was given */
    tail_send(b, 0, 1, 1);
    tail_send(b, 0, 5, 1);
    s = state_brief(d);
    g_assert(s->left.given == 7);
    g_assert(s->left.merged == 8);
    g_free(s);
    s = poold_state(d);
    g_assert(member_of(s, pa->pid)->left.bytes == 4 << 20);
    g_assert(member_of(s, pa->pid)->left.given == 2);
    g_assert(member_of(s, pb->pid)->left.merged == 1);
    g_free(s);

    /* what has gone was given all the same */
    proc_kill(pa);
    for (unsigned i = 0; i < 200; i++) {
        s = state_brief(d);
        if (s->members == 1) {
            break;
        }
        g_free(s);
        g_usleep(20000);
    }
    g_assert(s->left.bytes == 0 && s->left.given == 7);
    g_free(s);
    wrong.left.bytes = WIRE_LEFT_MAX + 1;
    g_assert(peer_send(b, &wrong, sizeof(wrong)) == 0);
    peer_ends(b, WIRE_REFUSED_PROTOCOL);

    peer_free(a);
    peer_free(b);
    proc_free(pa);
    proc_free(pb);
    poold_free(d);
}

static void room_send(Peer *p, uint64_t mappings, uint64_t waiting)
{
    peer_room(p, mappings, waiting);
    peer_sync(p);
}

/* What one of two has no room for is left, and both hear of it. */
static void test_room(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    uint64_t hash = peer_hash_of(a, 1);
    WireFound found;
    uint32_t slot;

    room_send(a, 0, 0);
    room_send(b, UINT64_MAX, UINT64_MAX);
    room_send(b, 1000, 0);
    g_assert(peer_ask_one(a, hash) == WIRE_NONE);
    g_assert(peer_ask_one(b, hash) == WIRE_LEFT);
    found = wait_news(a);
    g_assert(found.hash == hash && found.slot == WIRE_LEFT);
    g_assert(peer_ask_one(b, hash) == WIRE_LEFT);
    g_assert(peer_ask_one(a, hash) == WIRE_LEFT);
    g_assert(!peer_wait(a, WIRE_NEWS, A_WHILE_MS));
    /* it holds nothing by that: both are as before */
    slot = peer_offer_one(b, 1);
    found = wait_news(a);
    g_assert(found.hash == hash && found.slot == slot);
    peer_drop(a, slot, 1);
    peer_drop(b, slot, 1);
    g_assert(poold_empties(d));
    room_send(a, 1000, 0);
    g_assert(peer_ask_one(a, hash) == WIRE_NONE);
    g_assert(peer_ask_one(b, hash) == WIRE_WANTED);

    peer_free(a);
    peer_free(b);
    poold_free(d);
}

/* Whoever asks for the group's state and is no member. */
static void test_status_other(void)
{
    WireHead status = { .type = WIRE_STATUS };
    WireHello hello;
    Poold *d = poold_new(NULL);
    Peer *a = peer_connect(d), *b = peer_connect(d);

    /* nothing else is said then */
    g_free(peer_state(a));
    peer_hello_fill(&hello);
    peer_send(a, &hello, sizeof(hello));
    peer_ends(a, 0);
    g_assert(a->pool_fd == -1);

    if (geteuid() == 0) {
        /* root connected, but it is not root who asks */
        Proc *nobody = proc_new(65534);

        g_assert(proc_send(nobody, b->fd, &status, sizeof(status)) == 0);
        peer_ends(b, WIRE_REFUSED_RIGHT);
        proc_free(nobody);
    }
    peer_free(a);
    peer_free(b);
    poold_free(d);
}

static void test_groups(void)
{
    Poold *d1 = poold_new(NULL), *d2 = poold_new(NULL);
    Peer *a = peer_new(d1, NULL), *b = peer_new(d2, NULL);
    Peer *a2 = peer_new(d1, NULL);
    uint64_t hash = peer_hash_of(a, 1);
    uint32_t slot;

    g_assert(hash != peer_hash_of(b, 1));
    g_assert(peer_ask_one(a, hash) == WIRE_NONE);
    /* asked or offered there: nobody knows it here */
    g_assert(peer_ask_one(b, hash) == WIRE_NONE);
    g_assert(peer_ask_one(b, peer_hash_of(b, 1)) == WIRE_NONE);
    slot = peer_offer_one(a, 1);
    g_assert(slot < a->welcome.slots);
    g_assert(peer_ask_one(b, hash) == WIRE_NONE);
    g_assert(peer_ask_one(b, peer_hash_of(b, 1)) == WIRE_NONE);
    no_message(b);
    g_assert(peer_ask_one(a2, hash) == slot);

    /* dropped there, it stays here */
    g_assert(peer_offer_one(b, 1) < b->welcome.slots);
    peer_drop(a, slot, 1);
    peer_drop(a2, slot, 1);
    g_assert(peer_slot_punched(a, slot));
    g_assert(peer_slot_has(b, peer_ask_one(b, peer_hash_of(b, 1)), 1));
    /* a cookie is nobody's elsewhere */
    peer_free(a);
    a = peer_connect(d2);
    g_assert(peer_hello(a, a2->welcome.cookie));
    g_assert(a->welcome.resumed == 0);

    peer_free(a);
    peer_free(a2);
    peer_free(b);
    poold_free(d1);
    poold_free(d2);
}

static void test_daemon_dies(void)
{
    Poold *d = poold_new(NULL);
    Proc *pa = proc_new(-1);
    Peer *a = peer_new(d, pa), *b;
    uint32_t slot[8], first;
    unsigned length;
    char *map, want[PAGE];

    for (unsigned i = 0; i < 8; i++) {
        page_fill(peer_page(a, i), i);
    }
    peer_offer(a, 0, 8, 0, slot);
    first = peer_repeat(a, 100, 16, &length);
    map = mmap(NULL, PAGE * a->welcome.slots, PROT_READ, MAP_PRIVATE,
               a->pool_fd, 0);
    g_assert(map != MAP_FAILED);
    poold_kill(d);
    peer_ends(a, 0);
    poold_start(d);

    b = peer_connect(d);
    b->proc = pa;
    g_assert(peer_hello(b, a->welcome.cookie));
    g_assert(b->welcome.resumed == 0);
    g_assert(b->welcome.generation != a->welcome.generation);
    g_assert(peer_ask_one(b, peer_hash_of(b, 1)) == WIRE_NONE);
    for (unsigned i = 0; i < 8; i++) {
        peer_offer_one(b, 1000 + i);
    }
    a_while();
    /* the old file is as it was, in the mapping and through the descriptor */
    for (unsigned i = 0; i < 8; i++) {
        page_fill(want, i);
        g_assert(memcmp(want, map + slot[i] * PAGE, PAGE) == 0);
        g_assert(peer_slot_has(a, slot[i], i));
    }
    check_block(a, first, 16, 100);
    munmap(map, PAGE * a->welcome.slots);

    peer_free(a);
    peer_free(b);
    proc_free(pa);
    poold_free(d);
}

/* It moves when a program is executed, if at all. */
static char *where_the_stack_is(pid_t pid)
{
    char *path = g_strdup_printf("/proc/%d/maps", pid), *text, *found;

    g_assert(g_file_get_contents(path, &text, NULL, NULL));
    found = strstr(text, "[stack]");
    g_assert(found);
    *found = 0;
    found = g_strdup(strrchr(text, '\n'));
    g_free(text);
    g_free(path);
    return found;
}

/* false: it did not execute itself; d->pid is 0 if it is dead */
static bool reload(Poold *d)
{
    char *before = where_the_stack_is(d->pid);
    bool done = false;
    int status;

    g_assert(kill(d->pid, SIGHUP) == 0);
    for (unsigned i = 0; i < 200 && !done; i++) {
        char *text = NULL, *path = g_strdup_printf("/proc/%d/maps", d->pid);

        g_usleep(10000);
        /* not while it executes */
        if (g_file_get_contents(path, &text, NULL, NULL) &&
            strstr(text, "[stack]")) {
            done = !strstr(text, before);
        }
        g_free(text);
        g_free(path);
    }
    g_free(before);
    if (waitpid(d->pid, &status, WNOHANG) == d->pid) {
        /* without a handler it dies of this signal, and of no other */
        g_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGHUP);
        d->pid = 0;
    }
    return done;
}

static void test_reload(void)
{
    Poold *d = poold_new(NULL);
    Proc *pa = proc_new(-1), *pb = proc_new(-1), *pc = proc_new(-1);
    Peer *a = peer_new(d, pa), *b = peer_new(d, pb), *c = peer_new(d, pc);
    Peer *e, *asker = peer_new(d, NULL);
    uint32_t s1 = peer_offer_one(a, 1), s2 = peer_offer_one(b, 2), s3, first;
    unsigned length;
    WireState *before, *after;

    g_assert(peer_ask_one(b, peer_hash_of(b, 1)) == s1);
    s3 = peer_offer_one(c, 3);
    first = peer_repeat(a, 4, 32, &length);
    g_assert(peer_ask_one(asker, peer_hash_of(a, 5)) == WIRE_NONE);
    /* this one has lost its connection meanwhile */
    peer_close(c);
    before = poold_state(d);
    if (!reload(d)) {
        g_test_skip("the daemon does not reload yet");
        goto out;
    }
    after = peer_state(a);
    g_assert(after->generation == before->generation);
    g_assert(after->used == before->used);
    g_assert(after->holds == before->holds);
    g_assert(after->members == before->members);
    g_assert(after->published >= before->published);
    g_free(after);
    g_assert(peer_slot_has(a, s1, 1));
    g_assert(peer_slot_has(b, s2, 2));
    g_assert(peer_slot_has(c, s3, 3));
    check_block(a, first, 32, 4);
    /* it knows its contents, writes to its rings, and the hash is the old */
    g_assert(peer_offer_one(b, 3) == s3);
    g_assert(peer_ask_one(a, peer_hash_of(a, 2)) == s2);
    g_assert(peer_grow(a, first, 40) == 40);
    check_block(a, first, 40, 4);
    /* who had lost its connection is known */
    e = peer_resume(d, c);
    g_assert(e->welcome.key == a->welcome.key);
    peer_send_held(e, &(WirePair) { s3, 1 }, 1, 0);
    peer_sync(e);
    /* holds as before: s1 by a and b, s2 by b and a, s3 by c and b */
    peer_drop(a, s1, 1);
    peer_sync(a);
    a_while();
    g_assert(peer_slot_has(b, s1, 1));
    peer_drop(b, s1, 1);
    g_assert(peer_slot_punched(a, s1));
    /* and deaths are seen */
    peer_drop(b, s2, 1);
    peer_sync(b);
    a_while();
    g_assert(peer_slot_has(a, s2, 2));
    proc_kill(pa);
    g_assert(peer_slot_punched(b, s2));
    g_assert(peer_slot_punched(b, first));
    proc_kill(pb);
    proc_kill(pc);
    g_assert(poold_empties(d));
    peer_free(e);
out:
    g_free(before);
    peer_free(a);
    peer_free(b);
    peer_free(c);
    peer_free(asker);
    proc_free(pa);
    proc_free(pb);
    proc_free(pc);
    poold_free(d);
}

/* Whoever does not listen while the daemon reloads hears all of it later. */
static void test_reload_unread(void)
{
    Poold *d = poold_new(NULL);
    Peer *a = peer_new(d, NULL), *b = peer_new(d, NULL);
    unsigned n = a->welcome.asks, asked = 0;
    size_t len = sizeof(WireAsk) + n * sizeof(uint64_t);
    WireAsk *m = g_malloc0(len);
    uint32_t slot = peer_offer_one(b, 1);

    m->hash[n - 1] = peer_hash_of(a, 1);
    fcntl(a->fd, F_SETFL, O_NONBLOCK);
    do {
        m->head = (WireHead) { WIRE_ASK, n, ++a->seq };
        asked++;
    } while (peer_send(a, m, len) == 0);
    asked--;
    peer_sync(b);
    g_assert(asked > 1);
    if (!reload(d)) {
        g_test_skip("the daemon does not reload yet");
        goto out;
    }
    for (unsigned i = 0; i < asked; i++) {
        WireSlots *answer = (WireSlots *)peer_wait(a, WIRE_ANSWER,
                                                   PATIENCE_MS);

        g_assert(answer);
        g_assert(answer->head.seq == a->seq - asked + i);
        g_assert(answer->slot[n - 1] == slot);
        g_free(answer);
    }
    /* and each was a hold */
    peer_drop(b, slot, 1);
    peer_drop(a, slot, asked - 1);
    peer_sync(a);
    peer_sync(b);
    a_while();
    g_assert(peer_slot_has(a, slot, 1));
    peer_drop(a, slot, 1);
    g_assert(peer_slot_punched(a, slot));
out:
    g_free(m);
    peer_free(a);
    peer_free(b);
    poold_free(d);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *path;
        void (*fn)(void);
    } tests[] = {
        { "/poold/welcome", test_welcome },
        { "/poold/ask", test_ask },
        { "/poold/ask-many", test_ask_many },
        { "/poold/offer", test_offer },
        { "/poold/offer-twins", test_offer_twins },
        { "/poold/domain", test_domain },
        { "/poold/node", test_node },
        { "/poold/news", test_news },
        { "/poold/news-own", test_news_own },
        { "/poold/drop-last", test_drop_last },
        { "/poold/close", test_close },
        { "/poold/counts", test_counts },
        { "/poold/resume", test_resume },
        { "/poold/resume-cut", test_resume_cut },
        { "/poold/resume-over", test_resume_over },
        { "/poold/resume-news", test_resume_news },
        { "/poold/resume-more", test_resume_more },
        { "/poold/cookie", test_cookie },
        { "/poold/repeat", test_repeat },
        { "/poold/repeat-known", test_repeat_known },
        { "/poold/repeat-news", test_repeat_news },
        { "/poold/grow-not-held", test_grow_not_held },
        { "/poold/full", test_full },
        { "/poold/share", test_share },
        { "/poold/status", test_status },
        { "/poold/size", test_size },
        { "/poold/tail", test_tail },
        { "/poold/room", test_room },
        { "/poold/status-other", test_status_other },
        { "/poold/groups", test_groups },
        { "/poold/daemon-dies", test_daemon_dies },
        { "/poold/reload", test_reload },
        { "/poold/reload-unread", test_reload_unread },
    };

    g_test_init(&argc, &argv, NULL);
    for (unsigned i = 0; i < G_N_ELEMENTS(tests); i++) {
        g_test_add_func(tests[i].path, tests[i].fn);
    }
    return g_test_run();
}
