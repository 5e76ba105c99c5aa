/*
 * libksm tests: the member's side of a group's pool
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The daemon is played by the test: it answers late, cuts the connection at
 * every message, begins anew, and lies.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/page.h"
#include "base/prim.h"
#include "peer.h"
#include "share/foreign.h"
#include "share/ring.h"
#include "share/remote.h"

static char memory[WIRE_OFFERS * 4096] __attribute__((aligned(4096)));

static uint64_t now;

static uint64_t now_as_told(void)
{
    return now;
}

static unsigned fds_open(void)
{
    g_autoptr(GDir) dir = g_dir_open("/proc/self/fd", 0, NULL);
    unsigned n = 0;

    while (g_dir_read_name(dir)) {
        n++;
    }
    return n;
}

static unsigned answers(KsmStore *s, StoreAnswer *a, unsigned max)
{
    return s->ops->answers(s, a, max);
}

static void ask_one(KsmStore *s, uint64_t hash, uint32_t id, uint32_t tag)
{
    StoreAsk q = { hash, id, tag };

    g_assert(s->ops->ask(s, &q, 1));
}

/* The store is told slot @slot for a page of that tag; the answer's slot. */
static uint32_t told(Peer *p, KsmStore *s, uint32_t slot, uint32_t tag)
{
    StoreAnswer a;

    ask_one(s, tag, 5, tag);
    peer_expect(p, WIRE_ASK);
    peer_answer(p, &slot, 1);
    g_assert(answers(s, &a, 1) == 1);
    g_assert(a.what == ANSWER_SLOT && a.id == 5 && a.tag == tag);
    return a.slot;
}

static void expect_drop(Peer *p, KsmStore *s, uint32_t slot, uint32_t holds)
{
    const WirePairs *drop = (WirePairs *)&p->in;

    store_flush(s);
    g_assert(peer_expect(p, WIRE_DROP) ==
             sizeof(*drop) + drop->head.count * sizeof(WirePair));
    g_assert(drop->head.count == 1 && drop->pair[0].slot == slot &&
             drop->pair[0].holds == holds);
}

static OfferFate offer(KsmStore *s, uint32_t id, unsigned n, unsigned *took)
{
    uint32_t tag[WIRE_OFFERS];
    StoreOffer o = { .pages = memory, .tag = tag, .id = id, .n = n };
    OfferFate fate;

    for (unsigned i = 0; i < n; i++) {
        tag[i] = 1000 + id + i;
        memset(memory + i * PAGE_BYTES, id + i, PAGE_BYTES);
    }
    fate = store_offer(s, &o);
    *took = o.n;
    return fate;
}

static void run_ring(void)
{
    KsmRing r = { .pages = 100, .fd = -1 };
    unsigned used[3];

    g_assert(ring_room(&r) == 100);
    g_assert(ring_take(&r, 60, &used[0]) == 0 && used[0] == 60);
    g_assert(ring_room(&r) == 40 && ring_room_here(&r) == 40);
    g_assert(ring_take(&r, 10, &used[1]) == 60);
    ring_give(&r, used[0]);
    g_assert(ring_room(&r) == 60 && ring_room_here(&r) == 30);
    /* not in one piece behind the head: from the start */
    g_assert(ring_take(&r, 50, &used[2]) == 0 && used[2] == 80);
    g_assert(ring_room(&r) == 10);
    ring_give(&r, used[1]);
    g_assert(ring_room(&r) == 20);
    ring_give(&r, used[2]);
    g_assert(r.used == 0);
    /* up to the end, and on from the start, but not side by side */
    g_assert(ring_take(&r, 50, &used[0]) == 50);
    g_assert(ring_room(&r) == 50 && ring_room_here(&r) == 0);
}

static void run_hello(void)
{
    Peer *p = peer_new();
    RemoteConfig config = { .socket = "x", .fd = -1, .name = "me" };
    const WireHello *hello = (WireHello *)&p->in;
    KsmStore *s = remote_new(&config);
    uint64_t seed = s->ops->seed(s);
    StoreAnswer a;

    /* the daemon's tables are made for what it says */
    store_flush(s);
    g_assert(p->connects == 0);
    store_reserve(s, 77);
    store_flush(s);
    g_assert(peer_expect(p, WIRE_HELLO) == sizeof(*hello));
    g_assert(hello->magic == WIRE_MAGIC && hello->version == 1);
    g_assert(!hello->cookie[0] && !strcmp(hello->name, "me"));
    g_assert(hello->pages == 77);
    g_assert(store_is_gone(s) && store_why(s) == KSM_REASON_NO_DAEMON);
    g_assert(!s->ops->ask(s, &(StoreAsk) { 1, 2, 3 }, 1));
    peer_welcome(p, false);
    g_assert(answers(s, &a, 1) == 0);
    g_assert(!store_is_gone(s) && s->ops->losses(s) == 1);
    g_assert(s->ops->seed(s) == p->key && p->key != seed);
    store_free(s);
    peer_free(p);
}

static void run_answers(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    uint32_t slots[] = { WIRE_NONE, 77, WIRE_WANTED, 78 };
    const WireAsk *asked = (WireAsk *)&p->in;
    StoreAsk q[4];
    StoreAnswer a[4];

    for (unsigned i = 0; i < 4; i++) {
        q[i] = (StoreAsk) { 100 + i, 200 + i, 300 + i };
    }
    g_assert(s->ops->ask(s, q, 4) && s->ops->awaited(s) == 4);
    g_assert(peer_expect(p, WIRE_ASK) == sizeof(*asked) + 4 * 8);
    g_assert(asked->head.count == 4 && asked->hash[3] == 103);
    g_assert(answers(s, a, 4) == 0);
    peer_answer(p, slots, 4);
    /* one at a time; what is wanted comes when it can be offered */
    g_assert(answers(s, a, 1) == 1 && a[0].what == ANSWER_SLOT);
    g_assert(a[0].id == 201 && store_tag(s, a[0].slot) == 301);
    g_assert(store_users(s, a[0].slot) == 1);
    g_assert(answers(s, a + 1, 3) == 2);
    g_assert(a[2].what == ANSWER_WANTED && a[2].id == 202);
    g_assert(a[1].what == ANSWER_SLOT && a[1].id == 203);
    g_assert(a[1].slot == a[0].slot + 1 && s->ops->awaited(s) == 0);
    store_drop(s, a[0].slot);
    expect_drop(p, s, 77, 1);
    store_drop(s, a[1].slot);
    expect_drop(p, s, 78, 1);
    store_free(s);
    peer_free(p);
}

/* Holds are users by the group's measure, and go back together. */
static void run_holds(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    uint32_t slot = told(p, s, 9, 40);

    for (unsigned i = 1; i < PEER_HOLD_USERS; i++) {
        g_assert(!store_full(s, slot));
        store_hold(s, slot);
    }
    g_assert(store_full(s, slot));
    g_assert(told(p, s, 9, 40) == slot && !store_full(s, slot));
    for (unsigned i = 0; i < PEER_HOLD_USERS + 1; i++) {
        peer_expect_none(p);
        store_drop(s, slot);
        store_flush(s);
    }
    peer_expect(p, WIRE_DROP);
    g_assert(((WirePairs *)&p->in)->pair[0].holds == 2);
    /* told again: another count, and another tag; but not while it is held */
    g_assert(told(p, s, 9, 41) == slot && store_tag(s, slot) == 41);
    g_assert(told(p, s, 9, 42) == slot && store_tag(s, slot) == 41);
    store_drop(s, slot);
    s->ops->keep_all(s);
    store_drop(s, slot);
    store_flush(s);
    peer_expect_none(p);
    store_free(s);
    peer_free(p);
}

/* The store's own limit holds, too; and what cannot be counted goes back. */
static void run_counts(void)
{
    struct {
        WireHead head;
        WireFound found[WIRE_PAIRS];
    } news = { { WIRE_NEWS, WIRE_PAIRS, 0 }, { { 0 } } };
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    const WirePairs *drop = (WirePairs *)&p->in;
    StoreAnswer a[512];
    unsigned n = 0, got;
    uint32_t slot;

    for (unsigned i = 0; i < WIRE_PAIRS; i++) {
        news.found[i] = (WireFound) { 5, 60, 0 };
    }
    for (unsigned i = 0; i < 4; i++) {
        peer_send(p, &news, sizeof(news), NULL, 0);
        while ((got = answers(s, a, 512))) {
            n += got;
        }
    }
    slot = a[0].slot;
    g_assert(n == SLOT_USERS && store_users(s, slot) == SLOT_USERS);
    expect_drop(p, s, 60, 1);
    for (unsigned i = SLOT_USERS; i > 256; i--) {
        g_assert(store_full(s, slot));
        store_drop(s, slot);
    }
    g_assert(store_full(s, slot));
    store_drop(s, slot);
    g_assert(!store_full(s, slot));
    for (unsigned i = 255; i > 0; i--) {
        store_drop(s, slot);
    }
    store_flush(s);
    peer_expect(p, WIRE_DROP);
    g_assert(drop->pair[0].holds == SLOT_USERS);
    store_free(s);
    peer_free(p);
}

static void run_in_flight(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    StoreAsk q = { 1, 2, 3 };
    uint32_t none = WIRE_NONE;
    StoreAnswer a;

    for (unsigned i = 0; i < 4; i++) {
        g_assert(s->ops->ask(s, &q, 1));
    }
    g_assert(!s->ops->ask(s, &q, 1));
    peer_expect(p, WIRE_ASK);
    peer_answer(p, &none, 1);
    g_assert(answers(s, &a, 1) == 0);
    g_assert(s->ops->ask(s, &q, 1));
    store_free(s);
    peer_free(p);
}

/* Pages of an OFFER lie side by side, also where the ring ends. */
static void run_wrap(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    uint32_t slots[WIRE_OFFERS];
    StoreAnswer a[WIRE_OFFERS];
    const WireOffer *o = (WireOffer *)&p->in;
    unsigned took, blocks;
    struct stat st;
    char byte;

    for (unsigned i = 0; i < WIRE_OFFERS; i++) {
        slots[i] = i;
    }
    for (unsigned i = 0; i < 2; i++) {
        g_assert(offer(s, 0, 500, &took) == OFFER_LATER && took == 500);
        store_flush(s);
        peer_expect(p, WIRE_OFFER);
        peer_answer(p, slots, 500);
        g_assert(answers(s, a, WIRE_OFFERS) == 500);
    }
    g_assert(offer(s, 7, 20, &took) == OFFER_LATER && took == 20);
    g_assert(offer(s, 27, 20, &took) == OFFER_LATER && took == 4);
    g_assert(offer(s, 31, 20, &took) == OFFER_LATER && took == 20);
    peer_expect(p, WIRE_OFFER);
    g_assert(o->first == 1000 && o->head.count == 24);
    peer_answer(p, slots, 24);
    g_assert(answers(s, a, WIRE_OFFERS) == 24);
    store_flush(s);
    peer_expect(p, WIRE_OFFER);
    g_assert(o->first == 0 && o->head.count == 20);
    /* what was offered stays there until it is answered, and not for ever */
    for (unsigned i = 0; i < 9; i++) {
        s->ops->pass(s);
    }
    g_assert(pread(p->ring, &byte, 1, 19 * PAGE_BYTES) == 1 && byte == 50);
    g_assert(fstat(p->ring, &st) == 0);
    blocks = st.st_blocks;
    peer_answer(p, slots, 20);
    g_assert(answers(s, a, WIRE_OFFERS) == 20);
    for (unsigned i = 0; i < 9; i++) {
        s->ops->pass(s);
    }
    g_assert(fstat(p->ring, &st) == 0);
    g_assert(blocks && !st.st_blocks);
    store_free(s);
    peer_free(p);
}

static void run_offer(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    const WireOffer *o = (WireOffer *)&p->in;
    uint32_t slots[WIRE_OFFERS];
    StoreAnswer a[WIRE_OFFERS];
    unsigned took, n = 0;
    char byte;

    g_assert(offer(s, 50, 3, &took) == OFFER_LATER && took == 3);
    store_flush(s);
    g_assert(peer_expect(p, WIRE_OFFER) == sizeof(*o));
    g_assert(o->head.count == 3 && o->node == -1 && o->domain == 0);
    g_assert(pread(p->ring, &byte, 1, (o->first + 2) * PAGE_BYTES) == 1);
    g_assert(byte == 52);
    /* meanwhile others are collected, and sent together */
    g_assert(offer(s, 60, 2, &took) == OFFER_LATER);
    g_assert(offer(s, 70, 2, &took) == OFFER_LATER);
    store_flush(s);
    peer_expect_none(p);
    slots[0] = 500, slots[1] = 501, slots[2] = 20;
    o = NULL;
    peer_answer(p, slots, 3);
    g_assert(answers(s, a, 9) == 3 && a[2].id == 52 && a[2].tag == 1052);
    g_assert(store_tag(s, a[1].slot) == 1051);
    store_flush(s);
    peer_expect(p, WIRE_OFFER);
    g_assert(p->in.head.count == 4);
    slots[0] = slots[1] = slots[2] = slots[3] = 30;
    peer_answer(p, slots, 4);
    g_assert(answers(s, a, 9) == 4 && a[3].id == 71 &&
             store_users(s, a[3].slot) == 4);
    /* another node is another domain, and another message */
    s->node = 1;
    g_assert(offer(s, 1, 1, &took) == OFFER_LATER);
    s->node = 2;
    g_assert(offer(s, 2, 1, &took) == OFFER_LATER);
    peer_expect(p, WIRE_OFFER);
    g_assert(((WireOffer *)&p->in)->node == 1 &&
             ((WireOffer *)&p->in)->domain == 2 * UINT32_C(0x9e3779b1));
    store_free(s);
    peer_free(p);
    /* the ring has room for so many */
    p = peer_new();
    s = peer_store(p);
    while (offer(s, 0, WIRE_OFFERS, &took) == OFFER_LATER) {
        n += took;
    }
    g_assert(n == PEER_RING);
    g_assert(offer(s, 0, 1, &took) == OFFER_BUSY);
    for (unsigned i = 0; i < WIRE_OFFERS; i++) {
        slots[i] = i;
    }
    peer_expect(p, WIRE_OFFER);
    peer_answer(p, slots, p->in.head.count);
    g_assert(answers(s, a, WIRE_OFFERS) == WIRE_OFFERS);
    g_assert(offer(s, 0, 1, &took) == OFFER_LATER);
    store_free(s);
    peer_free(p);
}

static int send_not_now(int fd, const void *message, size_t len)
{
    return -EAGAIN;
}

/* What was offered stays in the ring, though a REPEAT could not be sent. */
static void run_repeat_later(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    uint32_t tag = 7;
    StoreOffer o = { .pages = memory, .tag = &tag, .id = 3, .n = 1 };
    unsigned took, n = 1;
    char byte;

    g_assert(offer(s, 1, 1, &took) == OFFER_LATER);
    store_flush(s);
    peer_expect(p, WIRE_OFFER);
    g_assert(((WireOffer *)&p->in)->first == 0);
    prim.send = send_not_now;
    g_assert(store_repeat(s, &o) == OFFER_BUSY);
    prim.send = prim_real.send;
    while (offer(s, 2, WIRE_OFFERS, &took) == OFFER_LATER) {
        n += took;
    }
    g_assert(n == PEER_RING);
    g_assert(pread(p->ring, &byte, 1, 0) == 1 && byte == 1);
    store_free(s);
    peer_free(p);
}

static size_t limit_none(void)
{
    return 0;
}

/*
 * A page that cannot be read (its memory has failed, say) is refused, and so
 * are all where files may not be written.  The ring is as it was.
 */
static void run_unreadable(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    uint32_t tag[3] = { 7, 8, 9 };
    StoreOffer o = { .pages = memory, .tag = tag, .id = 3, .n = 3 };
    StoreAnswer a[4];
    unsigned took;
    char byte;

    g_assert(offer(s, 1, 2, &took) == OFFER_LATER);
    g_assert(mprotect(memory + 2 * PAGE_BYTES, PAGE_BYTES, PROT_NONE) == 0);
    g_assert(store_offer(s, &o) == OFFER_REFUSED);
    o.pages += 2 * PAGE_BYTES;
    o.n = 1;
    g_assert(store_repeat(s, &o) == OFFER_REFUSED);
    g_assert(mprotect(memory, sizeof(memory), PROT_READ | PROT_WRITE) == 0);
    prim.file_limit = limit_none;
    g_assert(store_offer(s, &o) == OFFER_REFUSED);
    prim.file_limit = prim_real.file_limit;
    peer_expect(p, WIRE_OFFER);
    g_assert(p->in.head.count == 2);
    peer_expect_none(p);
    g_assert(offer(s, 50, 3, &took) == OFFER_LATER);
    peer_answer(p, (uint32_t[]) { 5, 6 }, 2);
    g_assert(answers(s, a, 4) == 2);
    store_flush(s);
    peer_expect(p, WIRE_OFFER);
    g_assert(((WireOffer *)&p->in)->first == 2 && p->in.head.count == 3);
    g_assert(pread(p->ring, &byte, 1, 4 * PAGE_BYTES) == 1 && byte == 52);
    store_free(s);
    peer_free(p);
}

/* What is refused is not offered again for a while, and then all is asked. */
static void run_full(void)
{
    static const struct {
        uint32_t code;
        KsmReason why;
    } codes[] = {
        { WIRE_FULL, KSM_REASON_GROUP_FULL },
        { WIRE_SHARE, KSM_REASON_REFUSED_BY_DAEMON },
        { WIRE_NO_MEMORY, KSM_REASON_NO_MEMORY },
    };

    prim.now_ns = now_as_told;
    for (unsigned i = 0; i < G_N_ELEMENTS(codes); i++) {
        Peer *p = peer_new();
        KsmStore *s = peer_store(p);
        unsigned losses = s->ops->losses(s), took;
        StoreAnswer a;

        g_assert(offer(s, 1, 1, &took) == OFFER_LATER);
        store_flush(s);
        peer_expect(p, WIRE_OFFER);
        peer_answer(p, &codes[i].code, 1);
        g_assert(answers(s, &a, 1) == 1 && a.what == ANSWER_FULL);
        g_assert(offer(s, 1, 1, &took) == OFFER_FULL);
        g_assert(store_why(s) == codes[i].why);
        g_assert(s->ops->losses(s) == losses);
        now += UINT64_C(15000000000);
        store_flush(s);
        g_assert(s->ops->losses(s) == losses + 1);
        g_assert(offer(s, 1, 1, &took) == OFFER_LATER);
        store_free(s);
        peer_free(p);
    }
    prim.now_ns = prim_real.now_ns;
}

/* Offers one page, which is answered with @slot. */
static void offer_one(Peer *p, KsmStore *s, uint32_t slot)
{
    unsigned took;
    StoreAnswer a;

    g_assert(offer(s, 1, 1, &took) == OFFER_LATER);
    store_flush(s);
    peer_expect(p, WIRE_OFFER);
    peer_answer(p, &slot, 1);
    g_assert(answers(s, &a, 1) == 1);
}

/*
 * Asking all anew is work: ever more seldom while the pool stays full, whatever
 * it is found to have already.
 */
static void run_full_longer(void)
{
    const uint64_t second = UINT64_C(1000000000);
    Peer *p = peer_new();
    KsmStore *s;
    unsigned took;

    prim.now_ns = now_as_told;
    s = peer_store(p);
    for (unsigned wait = 15; wait <= 60; wait *= 2) {
        offer_one(p, s, 20);
        offer_one(p, s, WIRE_FULL);
        now += (wait - 1) * second;
        store_flush(s);
        g_assert(offer(s, 1, 1, &took) == OFFER_FULL);
        now += 2 * second;
        store_flush(s);
    }
    /* there was room for long */
    now += 3600 * second;
    offer_one(p, s, WIRE_FULL);
    now += 16 * second;
    store_flush(s);
    offer_one(p, s, 20);
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

/* A child's own files are not closed when it forks. */
static void run_fork(void)
{
    Peer *p = peer_new();
    unsigned open = fds_open();
    KsmStore *s = peer_store(p);
    int fd[4];

    store_fork(s, FORK_CHILD);
    peer_hang_up(p);
    g_assert(fds_open() == open);
    for (unsigned i = 0; i < 4; i++) {
        fd[i] = dup(p->pool);
    }
    store_fork(s, FORK_CHILD);
    g_assert(fds_open() == open + 4);
    store_free(s);
    for (unsigned i = 0; i < 4; i++) {
        g_assert(close(fd[i]) == 0);
    }
    peer_free(p);
}

static void run_news(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    uint64_t hash = UINT64_C(0x1234567890abcdef);
    StoreAnswer a;

    peer_news(p, hash, 12);
    g_assert(answers(s, &a, 1) == 1 && a.what == ANSWER_SLOT);
    g_assert(a.id == UINT32_MAX);
    g_assert(a.tag == (uint32_t)(hash ^ hash >> 32));
    g_assert(store_tag(s, a.slot) == a.tag);
    store_drop(s, a.slot);
    expect_drop(p, s, 12, 1);
    store_free(s);
    peer_free(p);
}

static void run_block(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    uint32_t tag = 7, first = 1024;
    StoreOffer o = { .pages = memory, .tag = &tag, .id = 3, .n = 1 };
    const WireBlock *grow = (WireBlock *)&p->in;
    uint32_t slot;
    StoreAnswer a;
    unsigned n = 100, all = 0;

    g_assert(store_repeat(s, &o) == OFFER_LATER);
    peer_expect(p, WIRE_REPEAT);
    peer_block(p, first, 16);
    peer_answer(p, &first, 1);
    g_assert(answers(s, &a, 1) == 1 && a.what == ANSWER_SLOT);
    g_assert(store_repeated(s, a.slot) == a.slot);
    g_assert(store_repeated(s, a.slot + 15) == a.slot);
    g_assert(store_repeated(s, a.slot + 16) == SLOT_NONE);
    g_assert(store_tag(s, a.slot + 15) == 7);
    /* one user is the answer's */
    while ((slot = store_run(s, a.slot, &n)) != SLOT_NONE) {
        for (unsigned i = 0; i < n; i++, all++) {
            store_hold(s, slot + i);
        }
        n = 100;
    }
    g_assert(all == 16 * PEER_HOLD_USERS - 1);
    /* it is asked for longer, once, when it has been used enough */
    for (; all < PATTERN_USES * 16; all++) {
        peer_expect_none(p);
        store_drop(s, a.slot + 15);
        n = 1;
        g_assert(store_run(s, a.slot, &n) == a.slot + 15);
        store_hold(s, a.slot + 15);
    }
    n = 100;
    g_assert(store_run(s, a.slot, &n) == SLOT_NONE);
    g_assert(store_run(s, a.slot, &n) == SLOT_NONE);
    g_assert(peer_expect(p, WIRE_GROW) == sizeof(*grow));
    g_assert(grow->first == first && grow->length == 32);
    peer_expect_none(p);
    peer_block(p, first, 32);
    g_assert(answers(s, &(StoreAnswer) { 0 }, 1) == 0);
    n = 100;
    slot = store_run(s, a.slot, &n);
    g_assert(slot == a.slot + 16 && n == 16);
    for (unsigned i = 0; i < 16; i++) {
        for (unsigned k = 0; k < PEER_HOLD_USERS - (i == 0); k++) {
            store_drop(s, a.slot + i);
        }
    }
    store_flush(s);
    peer_expect_none(p);
    store_drop(s, a.slot);
    expect_drop(p, s, first, 1);
    /* told while that was on its way: by itself, then as a block */
    g_assert(told(p, s, first, 8) == a.slot);
    peer_block(p, first, 32);
    g_assert(answers(s, &(StoreAnswer) { 0 }, 1) == 0 && !store_is_gone(s));
    g_assert(store_repeated(s, a.slot + 31) == a.slot);
    store_drop(s, a.slot);
    expect_drop(p, s, first, 1);
    /* a block that is not held is not given back */
    peer_block(p, first, 32);
    g_assert(answers(s, &(StoreAnswer) { 0 }, 1) == 0);
    store_settle(s, a.slot);
    store_flush(s);
    peer_expect_none(p);
    store_free(s);
    peer_free(p);
}

/* What is said of blocks, and cannot be. */
static void run_block_lies(void)
{
    for (unsigned i = 0; i < 3; i++) {
        Peer *p = peer_new();
        KsmStore *s = peer_store(p);
        uint32_t inside = 1025;
        StoreAnswer a;

        if (i == 2) {
            told(p, s, 1030, 1);
        } else {
            peer_block(p, 1024, 32);
            g_assert(answers(s, &a, 1) == 0 && !store_is_gone(s));
        }
        if (i == 0) {
            ask_one(s, 1, 1, 1);
            peer_expect(p, WIRE_ASK);
            peer_answer(p, &inside, 1);
        } else {
            peer_block(p, 1024, 16);
        }
        /* a slot inside a block is none by itself; blocks do not shrink */
        g_assert(answers(s, &a, 1) == 0);
        g_assert(store_is_gone(s));
        store_free(s);
        peer_free(p);
    }
}

/* However often somebody wants to know, the daemon is asked once. */
static void run_status(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    struct {
        WireState state;
        WireMember member;
    } state = { .state = { .head = { WIRE_STATE, 1, 0 }, .members = 3 } };
    KsmGroupStats g;

    for (unsigned i = 0; i < 3; i++) {
        g_assert(store_group(s, &g) && g.connected && g.members == 0);
        store_flush(s);
    }
    peer_expect(p, WIRE_STATUS);
    peer_expect_none(p);
    peer_send(p, &state, sizeof(state), NULL, 0);
    g_assert(answers(s, &(StoreAnswer) { 0 }, 1) == 0);
    g_assert(store_group(s, &g) && g.members == 3);
    store_flush(s);
    peer_expect_none(p);
    /* again when they are old, or much has changed here */
    prim.now_ns = now_as_told;
    now = prim_real.now_ns() + UINT64_C(11000000000);
    g_assert(store_group(s, &g));
    store_flush(s);
    peer_expect_none(p);
    for (unsigned i = 0; i < 40; i++) {
        told(p, s, i, i);
    }
    g_assert(store_group(s, &g));
    store_flush(s);
    peer_expect(p, WIRE_STATUS);
    peer_send(p, &state, sizeof(state), NULL, 0);
    g_assert(answers(s, &(StoreAnswer) { 0 }, 1) == 0);
    now += UINT64_C(61000000000);
    g_assert(store_group(s, &g));
    store_flush(s);
    peer_expect(p, WIRE_STATUS);
    peer_send(p, &state, sizeof(state), NULL, 0);
    g_assert(answers(s, &(StoreAnswer) { 0 }, 1) == 0);
    prim.now_ns = prim_real.now_ns;
    /* figures that cannot be */
    state.state.used = 1;
    peer_send(p, &state, sizeof(state), NULL, 0);
    g_assert(answers(s, &(StoreAnswer) { 0 }, 1) == 0 && store_is_gone(s));
    store_free(s);
    peer_free(p);
}

/* The store connects again. */
static void reconnect(Peer *p, KsmStore *s)
{
    unsigned connects = p->connects;
    StoreAnswer a;

    for (unsigned i = 0; p->connects == connects; i++) {
        g_assert(i < 100);
        now += UINT64_C(100000000);
        g_assert(answers(s, &a, 1) == 0);
        g_assert(store_is_gone(s));
    }
    peer_expect(p, WIRE_HELLO);
}

static void run_resume(void)
{
    Peer *p = peer_new();
    KsmStore *s;
    const WireHello *hello = (WireHello *)&p->in;
    const WirePairs *held = (WirePairs *)&p->in;
    unsigned losses, took;
    uint32_t kept, gone;
    StoreAnswer a;

    prim.now_ns = now_as_told;
    s = peer_store(p);
    told(p, s, 30, 1);
    kept = told(p, s, 30, 1);
    gone = told(p, s, 31, 2);
    told(p, s, 33, 3);
    /* cut with all under way: an answer not read, an offer, a drop */
    ask_one(s, 1, 1, 1);
    peer_expect(p, WIRE_ASK);
    g_assert(offer(s, 1, 1, &took) == OFFER_LATER);
    store_drop(s, gone);
    losses = s->ops->losses(s);
    peer_hang_up(p);
    reconnect(p, s);
    g_assert(hello->cookie[0] == p->cookie[0] &&
             hello->cookie[1] == p->cookie[1]);
    g_assert(s->ops->losses(s) == losses + 1 && s->ops->awaited(s) == 0);
    g_assert(store_users(s, kept) == 2);
    peer_welcome(p, true);
    g_assert(answers(s, &a, 1) == 0);
    g_assert(!s->ops->ask(s, &(StoreAsk) { 1, 1, 1 }, 1) ||
             !store_is_gone(s));
    store_flush(s);
    peer_expect(p, WIRE_HELD);
    g_assert(held->head.count == 2 && held->head.seq == 0);
    g_assert(held->pair[0].slot == 30 && held->pair[0].holds == 2);
    g_assert(held->pair[1].slot == 33 && held->pair[1].holds == 1);
    g_assert(!store_is_gone(s) && s->ops->losses(s) == losses + 2);
    told(p, s, 31, 2);
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

static unsigned sends;

static int send_some(int fd, const void *message, size_t len)
{
    return sends-- == 0 ? (sends = 0, -EAGAIN)
                        : prim_real.send(fd, message, len);
}

/* More than a message takes; some is given back between two of them. */
static void run_resume_long(void)
{
    const unsigned n = WIRE_PAIRS + 100;
    struct {
        WireHead head;
        WireFound found[WIRE_PAIRS];
    } news = { { WIRE_NEWS, 0, 0 }, { { 0 } } };
    Peer *p = peer_new();
    const WirePairs *pairs = (WirePairs *)&p->in;
    uint32_t base = 0;
    StoreAnswer a[64];
    KsmStore *s;

    prim.now_ns = now_as_told;
    s = peer_store(p);
    for (unsigned first = 0; first < n; first += news.head.count) {
        unsigned got;

        news.head.count = MIN(n - first, WIRE_PAIRS);
        for (unsigned i = 0; i < news.head.count; i++) {
            news.found[i] = (WireFound) { first + i, first + i, 0 };
        }
        peer_send(p, &news, sizeof(WireHead) +
                  news.head.count * sizeof(WireFound), NULL, 0);
        while ((got = answers(s, a, 64))) {
            base = a[0].tag == 0 ? a[0].slot : base;
        }
    }
    peer_hang_up(p);
    reconnect(p, s);
    sends = 1;
    prim.send = send_some;
    peer_welcome(p, true);
    g_assert(answers(s, a, 1) == 0);
    store_flush(s);
    g_assert(store_is_gone(s));
    peer_expect(p, WIRE_HELD);
    g_assert(pairs->head.count == WIRE_PAIRS && pairs->head.seq == 1);
    store_drop(s, base + 7);            /* was listed */
    store_drop(s, base + n - 1);        /* will not be */
    prim.send = prim_real.send;
    store_flush(s);
    peer_expect(p, WIRE_HELD);
    g_assert(pairs->head.count == 99 && pairs->head.seq == 0);
    g_assert(pairs->pair[0].slot == WIRE_PAIRS);
    g_assert(!store_is_gone(s));
    expect_drop(p, s, 7, 1);
    peer_expect_none(p);
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

/* What is held takes many messages; each tells how many follow. */
static void run_resume_many(void)
{
    Peer *p = peer_new();
    KsmStore *s;
    const WirePairs *held = (WirePairs *)&p->in;
    g_autofree StoreAsk *q = g_new0(StoreAsk, WIRE_ASKS);
    g_autofree StoreAnswer *a = g_new(StoreAnswer, WIRE_ASKS);
    g_autofree uint32_t *slot = g_new(uint32_t, WIRE_ASKS);
    unsigned most = PEER_SLOTS / WIRE_PAIRS;

    prim.now_ns = now_as_told;
    s = peer_store(p);
    for (unsigned i = 0; i < PEER_SLOTS; i += WIRE_ASKS) {
        for (unsigned k = 0; k < WIRE_ASKS; k++) {
            slot[k] = i + k;
        }
        g_assert(s->ops->ask(s, q, WIRE_ASKS));
        peer_expect(p, WIRE_ASK);
        peer_answer(p, slot, WIRE_ASKS);
        g_assert(answers(s, a, WIRE_ASKS) == WIRE_ASKS);
    }
    peer_hang_up(p);
    reconnect(p, s);
    peer_welcome(p, true);
    g_assert(answers(s, a, 1) == 0);
    /* fewer by now: as many messages all the same */
    store_drop(s, slot[0]);
    store_flush(s);
    for (unsigned i = 0; i < most; i++) {
        peer_expect(p, WIRE_HELD);
        g_assert(held->head.seq == most - 1 - i);
        g_assert(held->head.count == WIRE_PAIRS - (i == most - 1));
    }
    peer_expect_none(p);
    g_assert(!store_is_gone(s));
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

/* What was told to be wanted is no more. */
static void run_wanted_lost(void)
{
    Peer *p = peer_new();
    uint32_t slots[] = { 1, WIRE_WANTED };
    StoreAsk q[2] = { { 1, 1, 1 }, { 2, 2, 2 } };
    StoreAnswer a[2];
    KsmStore *s;

    prim.now_ns = now_as_told;
    s = peer_store(p);
    g_assert(s->ops->ask(s, q, 2));
    peer_expect(p, WIRE_ASK);
    peer_answer(p, slots, 2);
    g_assert(answers(s, a, 1) == 1 && a[0].what == ANSWER_SLOT);
    g_assert(answers(s, a, 0) == 0 && s->ops->awaited(s) == 1);
    peer_hang_up(p);
    reconnect(p, s);
    g_assert(s->ops->awaited(s) == 0);
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

static void block_told(Peer *p, KsmStore *s, uint32_t first, uint32_t length,
                       uint64_t seq)
{
    WireBlock block = { { WIRE_BLOCK, 0, seq }, first, length };

    peer_send(p, &block, sizeof(block), NULL, 0);
    g_assert(answers(s, &(StoreAnswer) { 0 }, 1) == 0 && !store_is_gone(s));
}

/*
 * A block that is told but not held may be another one when it is named: what
 * was told is not believed then.
 */
static void run_block_untold(void)
{
    Peer *p = peer_new();
    KsmStore *s;
    uint32_t first = 1024, slot;
    unsigned n;
    StoreAnswer a;

    prim.now_ns = now_as_told;
    s = peer_store(p);
    /* GROW is answered after the block was given back */
    block_told(p, s, first, 16, 0);
    slot = told(p, s, first, 7);
    for (unsigned i = 0; i <= PATTERN_USES; i++) {
        n = 100;
        store_run(s, slot, &n);
    }
    peer_expect(p, WIRE_GROW);
    store_drop(s, slot);
    store_flush(s);
    block_told(p, s, first, 32, p->in.head.seq);
    peer_expect(p, WIRE_DROP);
    g_assert(store_repeated(s, slot) == SLOT_NONE);
    block_told(p, s, first, 16, 0);
    told(p, s, first, 8);
    g_assert(store_repeated(s, slot + 15) == slot);
    g_assert(store_repeated(s, slot + 16) == SLOT_NONE);
    store_drop(s, slot);
    expect_drop(p, s, first, 1);
    /* the message after it names another one */
    block_told(p, s, first, 32, 0);
    told(p, s, 9, 3);
    g_assert(store_repeated(s, slot) == SLOT_NONE);
    /* ... or does not come */
    block_told(p, s, first, 32, 0);
    peer_hang_up(p);
    reconnect(p, s);
    peer_welcome(p, true);
    g_assert(answers(s, &a, 1) == 0);
    store_flush(s);
    peer_expect(p, WIRE_HELD);
    g_assert(store_repeated(s, slot) == SLOT_NONE);
    block_told(p, s, first, 16, 0);
    told(p, s, first, 9);
    g_assert(store_repeated(s, slot + 16) == SLOT_NONE);
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

static unsigned tries;

static int connect_in_vain(const char *path)
{
    tries++;
    return -ECONNREFUSED;
}

/* Nobody there: tried again, ever more seldom. */
static void run_alone(void)
{
    RemoteConfig config = { .socket = "x", .fd = -1, .name = "me" };
    StoreAnswer a;
    KsmStore *s;

    prim.now_ns = now_as_told;
    prim.connect = connect_in_vain;
    tries = 0;
    s = remote_new(&config);
    g_assert(store_reserve(s, 1) == 0);
    for (unsigned i = 0; i < 1000; i++) {
        now += UINT64_C(10000000);
        g_assert(answers(s, &a, 1) == 0 && store_is_gone(s));
    }
    g_assert(tries >= 5 && tries <= 9);
    for (unsigned i = 0; i < 600; i++) {
        now += UINT64_C(1000000000);
        g_assert(answers(s, &a, 1) == 0);
    }
    g_assert(tries >= 55 && tries <= 70);
    store_free(s);
    prim = prim_real;
}

static void run_generation(void)
{
    Peer *p = peer_new();
    unsigned fds = fds_open(), open;
    uint32_t old, new;
    off_t offset;
    KsmStore *s;
    StoreAnswer a;

    prim.now_ns = now_as_told;
    g_assert(pwrite(p->pool, "old", 3, 30 * PAGE_BYTES) == 3);
    s = peer_store(p);
    old = told(p, s, 30, 1);
    peer_anew(p);
    g_assert(pwrite(p->pool, "new", 3, 30 * PAGE_BYTES) == 3);
    reconnect(p, s);
    peer_welcome(p, false);
    g_assert(answers(s, &a, 1) == 0 && !store_is_gone(s));
    g_assert(s->ops->seed(s) == p->key);
    new = told(p, s, 30, 1);
    g_assert(new != old);
    g_assert(store_readable(s, old, 1) == 0 && store_readable(s, new, 1) == 0);
    g_assert(!memcmp(store_page(s, old), "old", 3));
    g_assert(!memcmp(store_page(s, new), "new", 3));
    g_assert(store_map(s, old, &offset) != store_map(s, new, &offset));
    g_assert(offset == 30 * PAGE_BYTES);
    s->ops->pass(s);
    g_assert(!memcmp(store_page(s, old), "old", 3));
    open = fds_open();
    /* the new daemon does not hear of what the old one gave */
    store_drop(s, old);
    store_flush(s);
    peer_expect_none(p);
    s->ops->pass(s);
    g_assert(fds_open() == open - 1);
    g_assert(store_stats(s).shared == 1);
    g_assert(!memcmp(store_page(s, new), "new", 3));
    store_free(s);
    peer_hang_up(p);
    g_assert(fds_open() == fds);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

/* The last slot of a pool and the first of the next are not one run. */
static void run_border(void)
{
    Peer *p = peer_new();
    uint32_t last, first;
    KsmStore *s;
    StoreAnswer a;

    prim.now_ns = now_as_told;
    s = peer_store(p);
    last = told(p, s, PEER_SLOTS - 1, 1);
    peer_anew(p);
    reconnect(p, s);
    peer_welcome(p, false);
    g_assert(answers(s, &a, 1) == 0 && !store_is_gone(s));
    first = told(p, s, 0, 2);
    g_assert(first != last + 1 && last != first + 1);
    store_drop(s, last);
    store_drop(s, first);
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

/* A daemon that has the same pool, but not our holds, is not talked to. */
static void run_forgotten(void)
{
    Peer *p = peer_new();
    KsmStore *s;
    StoreAnswer a;

    prim.now_ns = now_as_told;
    s = peer_store(p);
    told(p, s, 30, 1);
    peer_hang_up(p);
    reconnect(p, s);
    peer_welcome(p, false);
    g_assert(answers(s, &a, 1) == 0 && store_is_gone(s));
    g_assert(store_stats(s).sharing == 1);
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

/* What holds nothing is forgotten where a process is too many members. */
static void run_forgotten_empty(void)
{
    Peer *p = peer_new();
    uint32_t slot;
    KsmStore *s;
    StoreAnswer a;

    prim.now_ns = now_as_told;
    s = peer_store(p);
    slot = told(p, s, 30, 1);
    store_drop(s, slot);
    store_flush(s);
    peer_expect(p, WIRE_DROP);
    peer_hang_up(p);
    reconnect(p, s);
    peer_welcome(p, false);
    g_assert(answers(s, &a, 1) == 0 && !store_is_gone(s));
    told(p, s, 30, 1);
    g_assert(store_stats(s).sharing == 1);
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

typedef struct Lie {
    const char *name;
    size_t len;
    uint32_t words[12];
    unsigned fds;       /* sent with it */
} Lie;

/* After ASK of one page, whose seq is 0. */
static const Lie lies[] = {
    { "short", 8, { WIRE_ANSWER, 0 }, 0 },
    { "type", 16, { 99, 0, 0, 0 }, 0 },
    { "type-0", 16, { 0, 0, 0, 0 }, 0 },
    { "to-daemon", 24, { WIRE_DROP, 1, 0, 0, 1, 1 }, 0 },
    { "count", 24, { WIRE_ANSWER, 2, 0, 0, 1, 2 }, 0 },
    { "count-huge", 20, { WIRE_ANSWER, 0xffffffff, 0, 0, 1 }, 0 },
    { "length", 16, { WIRE_ANSWER, 1, 0, 0 }, 0 },
    { "seq", 20, { WIRE_ANSWER, 1, 5, 0, 1 }, 0 },
    { "taken", 20, { WIRE_TAKEN, 1, 0, 0, 1 }, 0 },
    { "slot", 20, { WIRE_ANSWER, 1, 0, 0, PEER_SLOTS }, 0 },
    { "slot-huge", 20, { WIRE_ANSWER, 1, 0, 0, 0xfffffff0 }, 0 },
    { "refusal", 20, { WIRE_ANSWER, 1, 0, 0, WIRE_FULL }, 0 },
    { "fds", 20, { WIRE_ANSWER, 1, 0, 0, 1 }, 1 },
    { "many-fds", 20, { WIRE_ANSWER, 1, 0, 0, 1 }, 8 },
    { "news-length", 16, { WIRE_NEWS, 1, 0, 0 }, 0 },
    { "news-count", 32, { WIRE_NEWS, 0x10000001, 0, 0, 1, 1, 1, 0 }, 0 },
    { "news-slot", 32, { WIRE_NEWS, 1, 0, 0, 1, 1, PEER_SLOTS, 0 }, 0 },
    { "block-first", 24, { WIRE_BLOCK, 0, 0, 0, 5, 16 }, 0 },
    { "block-none", 24, { WIRE_BLOCK, 0, 0, 0, 512, 0 }, 0 },
    { "block-long", 24, { WIRE_BLOCK, 0, 0, 0, 512, 513 }, 0 },
    { "block-out", 24, { WIRE_BLOCK, 0, 0, 0, PEER_SLOTS, 16 }, 0 },
    { "block-huge", 24, { WIRE_BLOCK, 0, 0, 0, 0xfffffe00, 512 }, 0 },
    { "state", 16, { WIRE_STATE, 1, 0, 0 }, 0 },
    { "welcome", 16, { WIRE_WELCOME, 0, 0, 0 }, 0 },
    { "refused", 16, { WIRE_REFUSED, 0, 0, 0 }, 0 },
    { "held", 24, { WIRE_HELD, 1, 0, 0, 1, 1 }, 0 },
};

/* The connection ends, nothing is told, and no descriptor stays. */
static void run_lie(const void *opaque)
{
    const Lie *lie = opaque;
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    int fds[8];
    unsigned open;
    StoreAnswer a[4];

    for (unsigned i = 0; i < 8; i++) {
        fds[i] = p->pool;
    }
    ask_one(s, 1, 1, 1);
    peer_expect(p, WIRE_ASK);
    open = fds_open();
    peer_send(p, lie->words, lie->len, fds, lie->fds);
    g_assert(answers(s, a, 4) == 0);
    g_assert(store_is_gone(s));
    g_assert(s->ops->awaited(s) == 0 && store_stats(s).sharing == 0);
    /* the connection and the ring */
    g_assert(fds_open() == open - 2);
    store_free(s);
    peer_free(p);
}

/* What is left to the kernel, of what is asked about, or was. */
static void run_left(void)
{
    Peer *p = peer_new();
    KsmStore *s = peer_store(p);
    uint32_t slots[] = { WIRE_LEFT, 3, WIRE_NONE };
    StoreAsk q[3] = { { 1, 2, 3 }, { 4, 5, 6 }, { 7, 8, 9 } };
    StoreAnswer a[4];

    g_assert(s->ops->ask(s, q, 3));
    peer_expect(p, WIRE_ASK);
    peer_answer(p, slots, 3);
    g_assert(answers(s, a, 4) == 2 && s->ops->awaited(s) == 0);
    g_assert(a[0].what == ANSWER_LEFT && a[0].id == 2 && a[0].tag == 3);
    g_assert(a[1].what == ANSWER_SLOT);
    peer_news(p, UINT64_C(0x100000007), WIRE_LEFT);
    g_assert(answers(s, a + 2, 2) == 1);
    g_assert(a[2].what == ANSWER_LEFT && a[2].tag == 6);
    g_assert(store_stats(s).sharing == 1 && !store_is_gone(s));
    store_drop(s, a[1].slot);
    /* but what was offered is not */
    g_assert(offer(s, 0, 1, &(unsigned) { 0 }) == OFFER_LATER);
    store_flush(s);
    expect_drop(p, s, 3, 1);
    peer_expect(p, WIRE_OFFER);
    peer_answer(p, slots, 1);
    g_assert(answers(s, a, 4) == 0 && store_is_gone(s));
    store_free(s);
    peer_free(p);
}

/* How much room there is: told when it has changed, if it is asked for. */
static void run_room(void)
{
    Peer *p = peer_new();
    const WireRoom *room = (WireRoom *)&p->in;
    StoreRoom has = { 0, 0 };
    StoreAnswer a;
    KsmStore *s;

    prim.now_ns = now_as_told;
    p->features = WIRE_FEATURE_ROOM;
    s = peer_store(p);
    store_flush(s);
    peer_expect_none(p);
    store_room(s, &has);
    store_flush(s);
    peer_expect(p, WIRE_ROOM);
    g_assert(room->mappings == 0 && room->waiting == 0);
    has.mappings = 1000;
    store_room(s, &has);
    store_flush(s);
    g_assert(peer_expect(p, WIRE_ROOM) == sizeof(*room));
    g_assert(room->mappings == 1000 && room->waiting == 0);
    has.mappings = 1050;
    store_room(s, &has);
    store_flush(s);
    peer_expect_none(p);
    has.waiting = 500;
    store_room(s, &has);
    store_flush(s);
    store_flush(s);
    peer_expect(p, WIRE_ROOM);
    g_assert(room->mappings == 1050 && room->waiting == 500);
    peer_expect_none(p);
    has.mappings = 0;
    store_room(s, &has);
    store_flush(s);
    peer_expect(p, WIRE_ROOM);
    g_assert(room->mappings == 0);
    /* another daemon was told nothing */
    has.mappings = 2000;
    store_room(s, &has);
    peer_anew(p);
    reconnect(p, s);
    peer_welcome(p, false);
    g_assert(answers(s, &a, 1) == 0);
    store_flush(s);
    peer_expect(p, WIRE_ROOM);
    g_assert(room->mappings == 2000);
    /* one that does not know it is not told */
    peer_anew(p);
    p->features = 0;
    reconnect(p, s);
    peer_welcome(p, false);
    g_assert(answers(s, &a, 1) == 0);
    has.mappings = 9000;
    store_room(s, &has);
    store_flush(s);
    peer_expect_none(p);
    store_free(s);
    peer_free(p);
    prim.now_ns = prim_real.now_ns;
}

/* Nothing is taken of a message that is sound but for its end. */
static void run_lie_late(void)
{
    static const struct {
        WireHead head;
        WireFound found[2];
    } news = { { WIRE_NEWS, 2, 0 }, { { 1, 1, 0 }, { 2, PEER_SLOTS, 0 } } };
    static const uint32_t bad[] = { PEER_SLOTS, WIRE_FULL, WIRE_NO_MEMORY };

    for (unsigned i = 0; i <= G_N_ELEMENTS(bad); i++) {
        Peer *p = peer_new();
        KsmStore *s = peer_store(p);
        StoreAsk q[2] = { { 1, 1, 1 }, { 2, 2, 2 } };
        StoreAnswer a[4];

        g_assert(s->ops->ask(s, q, 2));
        peer_expect(p, WIRE_ASK);
        if (i < G_N_ELEMENTS(bad)) {
            uint32_t slot[] = { 5, bad[i] };

            peer_answer(p, slot, 2);
        } else {
            peer_send(p, &news, sizeof(news), NULL, 0);
        }
        g_assert(answers(s, a, 4) == 0 && store_is_gone(s));
        g_assert(store_stats(s).sharing == 0);
        store_free(s);
        peer_free(p);
    }
}

/* WELCOMEs that cannot be. */
static void run_unwelcome(void)
{
    static const struct {
        size_t at;
        uint32_t is;
    } wrong[] = {
        { offsetof(WireWelcome, version), 2 },
        { offsetof(WireWelcome, resumed), 1 },
        { offsetof(WireWelcome, slots), 0 },
        { offsetof(WireWelcome, slots), WIRE_SLOTS_MAX + 1 },
        { offsetof(WireWelcome, hold_users), 0 },
        { offsetof(WireWelcome, ring_pages), 0 },
        { offsetof(WireWelcome, ring_pages), 0xffffffff },
        { offsetof(WireWelcome, asks), 0 },
        { offsetof(WireWelcome, offers), WIRE_OFFERS - 1 },
        { offsetof(WireWelcome, in_flight), 0 },
    };
    RemoteConfig config = { .socket = "x", .fd = -1, .name = "me" };

    for (unsigned i = 0; i < G_N_ELEMENTS(wrong) + 2; i++) {
        Peer *p = peer_new();
        unsigned open = fds_open();
        KsmStore *s = peer_member(&config);
        int fds[] = { p->pool_ro, p->ring };
        char bytes[sizeof(WireWelcome)];
        StoreAnswer a;
        ssize_t len;
        Peer copy = *p;
        int pair[2];

        peer_expect(p, WIRE_HELLO);
        /* one that would do, to be spoiled */
        g_assert(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
        copy.fd = pair[0];
        peer_welcome(&copy, false);
        len = recv(pair[1], bytes, sizeof(bytes), 0);
        g_assert(len == sizeof(bytes));
        close(pair[0]);
        close(pair[1]);
        if (i < G_N_ELEMENTS(wrong)) {
            memcpy(bytes + wrong[i].at, &wrong[i].is, sizeof(uint32_t));
        }
        peer_send(p, bytes, len, fds,
                  i < G_N_ELEMENTS(wrong) ? 2 : i - G_N_ELEMENTS(wrong));
        g_assert(answers(s, &a, 1) == 0 && store_is_gone(s));
        peer_hang_up(p);
        g_assert(fds_open() == open);
        store_free(s);
        peer_free(p);
    }
}

/* Whichever call fails, what is held stays known, and all goes on. */
static long calls, fail_at;

static bool fails(void)
{
    return calls++ == fail_at;
}

static int f_send(int fd, const void *message, size_t len)
{
    return fails() ? calls % 2 ? -EAGAIN : -EPIPE
                   : prim_real.send(fd, message, len);
}

static ssize_t f_receive(int fd, void *message, size_t len, int *fds,
                         unsigned n_fds)
{
    return fails() ? calls % 2 ? -EINTR : -ECONNRESET
                   : prim_real.receive(fd, message, len, fds, n_fds);
}

static void *f_map(void *addr, size_t len, int prot, int flags, int fd,
                   off_t offset)
{
    if (fails()) {
        errno = ENOMEM;
        return NULL;
    }
    return prim_real.map(addr, len, prot, flags, fd, offset);
}

static ssize_t f_write(int fd, const void *buf, size_t len, off_t offset)
{
    if (fails()) {
        return calls % 2 ? -EFAULT : prim_real.write(fd, buf, len / 2, offset);
    }
    return prim_real.write(fd, buf, len, offset);
}

/* The daemon does its part; true: there was something to do. */
static bool peer_serve(Peer *p, uint16_t *holds)
{
    const WirePairs *pairs = (WirePairs *)&p->in;
    uint32_t slots[WIRE_OFFERS];
    ssize_t n = p->fd < 0 ? 0 : recv(p->fd, &p->in, sizeof(p->in),
                                     MSG_DONTWAIT);
    struct pollfd end = { .fd = p->fd };

    /* who said it may have hung up since: there is nobody to be answered */
    if (n <= 0 || poll(&end, 1, 0)) {
        return false;
    }
    switch (p->in.head.type) {
    case WIRE_HELLO:
        peer_welcome(p, ((WireHello *)&p->in)->cookie[0]);
        break;
    case WIRE_HELD:
        memset(holds, 0, PEER_SLOTS * sizeof(*holds));
        for (unsigned i = 0; i < pairs->head.count; i++) {
            holds[pairs->pair[i].slot] = pairs->pair[i].holds;
        }
        break;
    case WIRE_ASK:
    case WIRE_OFFER:
        for (unsigned i = 0; i < p->in.head.count; i++) {
            slots[i] = 100 + i;
            holds[100 + i]++;
        }
        peer_answer(p, slots, p->in.head.count);
        break;
    case WIRE_DROP:
        for (unsigned i = 0; i < pairs->head.count; i++) {
            g_assert(holds[pairs->pair[i].slot] >= pairs->pair[i].holds);
            holds[pairs->pair[i].slot] -= pairs->pair[i].holds;
        }
        break;
    default:
        g_assert_not_reached();
    }
    return true;
}

static void peer_serve_all(Peer *p, uint16_t *holds)
{
    bool more = true;

    while (more) {
        more = peer_serve(p, holds);
    }
}

/*
 * Asks, offers and drops until all is said and done.  Afterwards the daemon
 * counts what the store has users of.
 */
static void converse(Peer *p, uint16_t *holds)
{
    RemoteConfig config = {
        .socket = "x", .fd = -1, .name = "me", .max_sharing = 256,
    };
    KsmStore *s = peer_member(&config);
    unsigned taken = 0, took;
    uint32_t slot[64];
    StoreAnswer a[8];

    for (unsigned i = 0; taken < 12; i++) {
        StoreAsk q[2] = { { 1, 1, 1 }, { 2, 2, 2 } };
        unsigned n;

        g_assert(i < 400);
        now += UINT64_C(50000000);
        peer_serve_all(p, holds);
        n = answers(s, a, 8);
        for (unsigned k = 0; k < n; k++) {
            g_assert(a[k].what == ANSWER_SLOT);
            slot[taken++] = a[k].slot;
            g_assert(taken < G_N_ELEMENTS(slot) - 8);
        }
        if (!s->ops->awaited(s) && !store_is_gone(s)) {
            if (i % 2) {
                s->ops->ask(s, q, 2);
            } else {
                offer(s, 7, 2, &took);
            }
        }
        if (i % 3 == 2 && taken > 3) {
            store_drop(s, slot[--taken]);
        }
    }
    fail_at = -1;
    for (unsigned i = 0; i < 200; i++) {
        now += UINT64_C(100000000);
        peer_serve_all(p, holds);
        for (unsigned k = answers(s, a, 8); k > 0; k--) {
            slot[taken++] = a[k - 1].slot;
        }
    }
    for (uint32_t i = 100; i < 102; i++) {
        uint32_t local = slot[0] - (slot[0] % PEER_SLOTS) + i;

        g_assert(!!holds[i] == !!store_users(s, local));
    }
    while (taken) {
        store_drop(s, slot[--taken]);
    }
    store_flush(s);
    peer_serve_all(p, holds);
    g_assert(!holds[100] && !holds[101]);
    store_free(s);
}

static void run_faults(void)
{
    uint16_t *holds = g_new(uint16_t, PEER_SLOTS);

    prim.now_ns = now_as_told;
    prim.send = f_send;
    prim.receive = f_receive;
    prim.map = f_map;
    prim.write = f_write;
    for (long at = 0; at < 60; at++) {
        Peer *p = peer_new();
        unsigned open = fds_open();

        memset(holds, 0, PEER_SLOTS * sizeof(*holds));
        calls = 0;
        fail_at = at;
        converse(p, holds);
        peer_hang_up(p);
        g_assert(fds_open() == open);
        peer_free(p);
    }
    prim = prim_real;
    g_free(holds);
}

/* A member that cannot use its welcome does not become another one. */
static void run_unready(void)
{
    for (long at = 0; at < 2; at++) {
        Peer *p = peer_new();
        RemoteConfig config = { .socket = "x", .fd = -1, .name = "me" };
        const WireHello *hello = (WireHello *)&p->in;
        KsmStore *s;
        StoreAnswer a;

        prim.now_ns = now_as_told;
        prim.map = f_map;
        s = peer_member(&config);
        peer_expect(p, WIRE_HELLO);
        peer_welcome(p, false);
        calls = 0;
        fail_at = at;
        g_assert(answers(s, &a, 1) == 0 && store_is_gone(s));
        reconnect(p, s);
        g_assert(hello->cookie[0] == p->cookie[0]);
        g_assert(hello->cookie[1] == p->cookie[1]);
        peer_welcome(p, true);
        g_assert(answers(s, &a, 1) == 0);
        store_flush(s);
        peer_expect(p, WIRE_HELD);
        g_assert(p->in.head.count == 0 && p->in.head.seq == 0);
        g_assert(!store_is_gone(s));
        told(p, s, 30, 1);
        store_free(s);
        peer_free(p);
        prim = prim_real;
    }
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/remote/ring", run_ring);
    g_test_add_func("/remote/hello", run_hello);
    g_test_add_func("/remote/answers", run_answers);
    g_test_add_func("/remote/holds", run_holds);
    g_test_add_func("/remote/counts", run_counts);
    g_test_add_func("/remote/in-flight", run_in_flight);
    g_test_add_func("/remote/wrap", run_wrap);
    g_test_add_func("/remote/block-lies", run_block_lies);
    g_test_add_func("/remote/resume-long", run_resume_long);
    g_test_add_func("/remote/wanted-lost", run_wanted_lost);
    g_test_add_func("/remote/alone", run_alone);
    g_test_add_func("/remote/offer", run_offer);
    g_test_add_func("/remote/repeat-later", run_repeat_later);
    g_test_add_func("/remote/unreadable", run_unreadable);
    g_test_add_func("/remote/full/why", run_full);
    g_test_add_func("/remote/full/longer", run_full_longer);
    g_test_add_func("/remote/fork", run_fork);
    g_test_add_func("/remote/news", run_news);
    g_test_add_func("/remote/block", run_block);
    g_test_add_func("/remote/status", run_status);
    g_test_add_func("/remote/block/untold", run_block_untold);
    g_test_add_func("/remote/resume", run_resume);
    g_test_add_func("/remote/resume/many", run_resume_many);
    g_test_add_func("/remote/generation", run_generation);
    g_test_add_func("/remote/generation/border", run_border);
    g_test_add_func("/remote/forgotten", run_forgotten);
    g_test_add_func("/remote/forgotten/empty", run_forgotten_empty);
    g_test_add_func("/remote/left", run_left);
    g_test_add_func("/remote/room", run_room);
    g_test_add_func("/remote/lie-late", run_lie_late);
    g_test_add_func("/remote/unwelcome", run_unwelcome);
    g_test_add_func("/remote/unready", run_unready);
    g_test_add_func("/remote/faults", run_faults);
    for (unsigned i = 0; i < G_N_ELEMENTS(lies); i++) {
        g_autofree char *name = g_strdup_printf("/remote/lie/%s",
                                                lies[i].name);

        g_test_add_data_func(name, &lies[i], run_lie);
    }
    return g_test_run();
}
