/*
 * talk: each message of the protocol, checked and answered
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A packet lies in a buffer of the daemon, so it does not change while it is
 * read.  Its length is known to be right before a handler sees it.
 */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/page.h"
#include "base/prim.h"
#include "offer.h"
#include "state.h"
#include "talk.h"
#include "work.h"

#define IN_FLIGHT   4u
#define NODES       1024    /* and fewer, that a kernel has */
#define PROCESS_MIN 8u      /* members that a process may be */

static void bad(Client *c, const char *what)
{
    client_refuse(c, WIRE_REFUSED_PROTOCOL, "%s", what);
}

static void send_slots(Client *c, WireType type, uint64_t seq,
                       const uint32_t *slot, unsigned n)
{
    static union {
        WireHead head;
        uint32_t room[sizeof(WireHead) / 4 + WIRE_ASKS];
    } answer;

    answer.head = (WireHead) { .type = type, .count = n, .seq = seq };
    memcpy(answer.room + sizeof(WireHead) / 4, slot, n * sizeof(*slot));
    client_send_blocks(c);
    conn_send(c->conn, &answer, sizeof(WireHead) + n * sizeof(*slot));
}

static void send_welcome(Client *c, bool resumed, const WireHello *h)
{
    const Server *s = c->server;
    const Member *m = c->member;
    WireWelcome w = {
        .head = { .type = WIRE_WELCOME, .seq = h->head.seq },
        .version = WIRE_VERSION,
        .resumed = resumed,
        .features = h->features & (WIRE_FEATURE_TAIL | WIRE_FEATURE_ROOM),
        .cookie = { m->cookie[0], m->cookie[1] },
        .generation = s->generation,
        .key = s->group.config.key,
        .slots = s->group.config.slots,
        .hold_users = HOLD_USERS,
        .ring_pages = RING_PAGES,
        .asks = WIRE_ASKS,
        .offers = WIRE_OFFERS,
        .in_flight = IN_FLIGHT,
    };
    int fds[] = { s->file.map_fd, m->ring };

    conn_send_fds(c->conn, &w, sizeof(w), fds, G_N_ELEMENTS(fds));
}

/* The member with that cookie, if it is the process that now sends. */
static Member *member_find(Server *s, const WireHello *h, int pidfd)
{
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        Member *m = (Member *)s->group.member[i];

        if (m && m->exit_watch && (h->cookie[0] || h->cookie[1]) &&
            m->cookie[0] == h->cookie[0] && m->cookie[1] == h->cookie[1] &&
            process_is_same(m->pidfd, pidfd)) {
            return m;
        }
    }
    return NULL;
}

static void resume(Client *c, Member *m)
{
    if (m->conn) {
        client_close(conn_opaque(m->conn));
    }
    m->listed = g_new0(Holds, 1);
    m->heard = UINT64_MAX;
    if (holds_init(m->listed, c->server->group.config.slots) < 0) {
        g_clear_pointer(&m->listed, g_free);
        client_refuse(c, WIRE_REFUSED_LACK, "no memory to resume; try again");
        return;
    }
    c->member = m;
    m->conn = c->conn;
}

/* Of the process that sends. */
static unsigned members_of(const Server *s, int pidfd)
{
    uint32_t pid = process_number(pidfd);
    unsigned n = 0;

    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        const Member *m = (const Member *)s->group.member[i];

        n += m && m->exit_watch && m->pid == pid;
    }
    return n;
}

/* One of the process that sends, which is not connected and holds nothing. */
static Member *member_idle(const Server *s, int pidfd)
{
    uint32_t pid = process_number(pidfd);

    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        Member *m = (Member *)s->group.member[i];

        if (m && m->exit_watch && !m->conn && !m->listed &&
            !m->held.holds.held && m->pid == pid) {
            return m;
        }
    }
    return NULL;
}

/* Numbers are few: who leaves has one until it is forgotten. */
static bool all_forgotten(const Server *s)
{
    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        if (!asked_is_forgotten(&s->group.asked, i)) {
            return false;
        }
    }
    return s->leaving->len == 0;
}

/* False: no member of the process that sends can go now. */
static bool idle_leaves(Server *s, int pidfd)
{
    Member *idle = member_idle(s, pidfd);

    if (!idle || !all_forgotten(s)) {
        return false;
    }
    g_source_remove(idle->exit_watch);
    idle->exit_watch = 0;
    work_leave(s, idle);
    return true;
}

/*
 * A process can be several: an engine that was ended and made anew is another
 * member, while the first one's slots may still be mapped.  But none may be so
 * many that there is no room for others: then one goes that has nothing to come
 * back for, and the next when that is forgotten.  (A connection that was given
 * up before it was welcome leaves one, too.)
 */
static bool join(Client *c, const WireHello *h, Packet *p)
{
    Server *s = c->server;
    unsigned most = MAX(PROCESS_MIN, s->group.config.max_members / 8);
    int ret;

    if (members_of(s, p->pidfd) >= most && !idle_leaves(s, p->pidfd)) {
        client_refuse(c, WIRE_REFUSED_FULL, "the process is %u members, as "
                      "many as one may be", most);
        return false;
    }
    ret = member_begin(&c->member, &s->group, h, p->pidfd);
    if (ret == -ENOSPC) {
        client_refuse(c, WIRE_REFUSED_FULL, "the group has %u members, as "
                      "many as may be (--members)", s->group.members);
    } else if (ret < 0) {
        client_refuse(c, WIRE_REFUSED_LACK, "no ring for another member: %s",
                      strerror(-ret));
    }
    if (ret < 0) {
        return false;
    }
    p->pidfd = -1;
    c->member->conn = c->conn;
    work_watch(s, c->member);
    return true;
}

/* False: refused. */
static bool hello_check(Client *c, const WireHello *h, const Packet *p)
{
    if (h->magic != WIRE_MAGIC || h->head.count ||
        h->name[sizeof(h->name) - 1]) {
        bad(c, "HELLO: wrong magic, count or name");
    } else if (h->version != WIRE_VERSION) {
        client_refuse(c, WIRE_REFUSED_VERSION, "version %u is asked for; "
                      "there is %u", h->version, WIRE_VERSION);
    } else if (p->pidfd < 0 || p->uid == (uid_t)-1) {
        client_refuse(c, WIRE_REFUSED_LACK,
                      "the kernel did not say which process sends");
    } else if (!process_number(p->pidfd)) {
        client_refuse(c, WIRE_REFUSED_LACK, "the daemon does not see the "
                      "process: it is in another PID namespace, or gone");
    } else if (!poolfile_may_give(&c->server->file, p->uid)) {
        client_refuse(c, WIRE_REFUSED_RIGHT, "root, and the daemon's user, "
                      "could write this pool, for it is a memfd");
    } else {
        return true;
    }
    return false;
}

static void on_hello(Client *c, Packet *p)
{
    const WireHello *h = p->data;
    Member *old;

    if (!hello_check(c, h, p)) {
        return;
    }
    old = member_find(c->server, h, p->pidfd);
    if (old) {
        resume(c, old);
        if (!old->conn) {
            return;
        }
    } else if (!join(c, h, p)) {
        return;
    }
    conn_identify(conn_fd(c->conn), 0);
    send_welcome(c, old != NULL, h);
}

/*
 * A member that counts on a hold that it has not would map what is punched one
 * day.  So it hears of it now, and may still put its pages back.
 */
static bool held_is_good(const Client *c, const WirePair *pair)
{
    const Member *m = c->member;

    return pair->slot < c->server->group.config.slots &&
           pair->holds <= holds_of(&m->held.holds, pair->slot) -
                          holds_of(m->listed, pair->slot);
}

static void on_held(Client *c, const Packet *p)
{
    const WirePairs *h = p->data;
    Member *m = c->member;

    if (!m->listed) {
        bad(c, "HELD without resuming");
        return;
    }
    if (m->heard != UINT64_MAX && h->head.seq != m->heard - 1) {
        bad(c, "HELD: wrong number of those to follow");
        return;
    }
    for (unsigned i = 0; i < h->head.count; i++) {
        if (!held_is_good(c, &h->pair[i])) {
            bad(c, "HELD: more than was given");
            return;
        }
        holds_add_many(m->listed, h->pair[i].slot, h->pair[i].holds);
    }
    m->heard = h->head.seq;
    if (m->heard == 0) {
        client_reconcile(c->server, m);
    }
}

static void on_ask(Client *c, const Packet *p)
{
    static uint32_t slot[WIRE_ASKS];
    const WireAsk *a = p->data;
    Server *s = c->server;

    group_ask(&s->group, &c->member->held, a->hash, a->head.count, slot,
              s->blocks);
    send_slots(c, WIRE_ANSWER, a->head.seq, slot, a->head.count);
}

static Offer as_offer(const Client *c, const WireOffer *o)
{
    return (Offer) {
        .ring = c->member->ring,
        .first = o->first,
        .count = o->head.count,
        .domain = o->domain,
        .node = o->node,
    };
}

static bool is_good_offer(const WireOffer *o)
{
    return o->head.count >= 1 && o->head.count <= WIRE_OFFERS &&
           o->first < RING_PAGES && o->head.count <= RING_PAGES - o->first &&
           o->node >= -1 && o->node < NODES;
}

static void on_offer(Client *c, const Packet *p)
{
    const WireOffer *o = p->data;
    Server *s = c->server;
    Offer offer = as_offer(c, o);
    uint32_t slot[WIRE_OFFERS];

    if (!is_good_offer(o) || o->want) {
        bad(c, "OFFER: count, first page, node or zero");
        return;
    }
    offer_pages(&s->group, &c->member->held, &offer, slot, s->blocks);
    send_slots(c, WIRE_TAKEN, o->head.seq, slot, offer.count);
}

static void on_repeat(Client *c, const Packet *p)
{
    const WireOffer *o = p->data;
    Server *s = c->server;
    Offer offer = as_offer(c, o);
    uint32_t slot;

    if (!is_good_offer(o) || o->head.count != 1 || o->want < 1 ||
        o->want > WIRE_BLOCK_MAX) {
        bad(c, "REPEAT: count, page, node or slots");
        return;
    }
    if (offer_block(&s->group, &c->member->held, &offer, o->want,
                    &slot) < 0) {
        slot = WIRE_NO_MEMORY;
    }
    if (slot < s->group.config.slots) {
        client_send_block(c, o->head.seq, slot);
    }
    send_slots(c, WIRE_TAKEN, o->head.seq, &slot, 1);
}

static void on_grow(Client *c, const Packet *p)
{
    const WireBlock *b = p->data;

    if (b->head.count || b->length < 1 || b->length > WIRE_BLOCK_MAX) {
        bad(c, "GROW: count or slots");
        return;
    }
    if (!offer_grow(&c->server->group, &c->member->held, b->first, b->length)) {
        bad(c, "GROW: not a block that is held");
        return;
    }
    client_send_block(c, b->head.seq, b->first);
}

static void on_drop(Client *c, const Packet *p)
{
    const WirePairs *d = p->data;

    if (group_drop(&c->server->group, &c->member->held, d->pair,
                   d->head.count) < 0) {
        bad(c, "DROP: more than is held");
    }
}

/* How often something was given is counted on when the member has gone. */
static void on_tail(Client *c, const Packet *p)
{
    const WireLeft *left = &((const WireTail *)p->data)->left;
    GroupStats *stats = &c->server->group.stats;
    Member *m = c->member;
    uint64_t given = MAX(left->given, m->left.given);

    /* sums of all members' words say nothing if one of them overflows */
    if (MAX(MAX(left->bytes, left->given), left->merged) > WIRE_LEFT_MAX) {
        bad(c, "TAIL: more than there can be");
        return;
    }
    /* however many have been members */
    stats->given += MIN(given - m->left.given, UINT64_MAX - stats->given);
    m->left = *left;
    m->left.given = given;
}

/* Without memory to heed it: as if it had said nothing. */
static void on_room(Client *c, const Packet *p)
{
    const WireRoom *room = p->data;

    group_room(&c->server->group, &c->member->held, room->mappings,
               room->waiting);
}

static void on_status(Client *c, const Packet *p)
{
    const WireHead *h = p->data;

    if (c->member) {
        state_send(c, h->seq, h->count);
    } else if (c->asks_status || p->uid == 0 || p->uid == geteuid()) {
        c->asks_status = true;
        state_send(c, h->seq, h->count);
    } else {
        client_refuse(c, WIRE_REFUSED_RIGHT, "only root and the daemon's user "
                      "may ask for all of it");
    }
}

/* Is the packet as long as its type and count say? */
static bool length_is_good(const Packet *p)
{
    const WireHead *h = p->data;

    if (p->len < sizeof(*h)) {
        return false;
    }
    switch (h->type) {
    case WIRE_HELLO:
        return p->len == sizeof(WireHello);
    case WIRE_HELD:
    case WIRE_DROP:
        return (h->count >= 1 || h->type == WIRE_HELD) &&
               h->count <= WIRE_PAIRS &&
               p->len == sizeof(*h) + h->count * sizeof(WirePair);
    case WIRE_ASK:
        return h->count >= 1 && h->count <= WIRE_ASKS &&
               p->len == sizeof(*h) + h->count * sizeof(uint64_t);
    case WIRE_OFFER:
    case WIRE_REPEAT:
        return p->len == sizeof(WireOffer);
    case WIRE_GROW:
        return p->len == sizeof(WireBlock);
    case WIRE_STATUS:
        return p->len == sizeof(*h) && h->count <= 1;
    case WIRE_TAIL:
        return p->len == sizeof(WireTail) && h->count == 0;
    case WIRE_ROOM:
        return p->len == sizeof(WireRoom) && h->count == 0;
    default:
        return false;
    }
}

static bool is_expected(const Client *c, uint32_t type)
{
    if (c->asks_status) {
        return type == WIRE_STATUS;
    }
    if (!c->member) {
        return type == WIRE_HELLO || type == WIRE_STATUS;
    }
    if (c->member->listed) {
        return type == WIRE_HELD;
    }
    return type != WIRE_HELLO;
}

void talk_packet(Client *c, Packet *p)
{
    const WireHead *h = p->data;

    if (!length_is_good(p)) {
        bad(c, "unknown type, or wrong length");
        return;
    }
    if (!is_expected(c, h->type)) {
        bad(c, "not that message now");
        return;
    }
    switch (h->type) {
    case WIRE_HELLO:
        on_hello(c, p);
        break;
    case WIRE_HELD:
        on_held(c, p);
        break;
    case WIRE_ASK:
        on_ask(c, p);
        break;
    case WIRE_OFFER:
        on_offer(c, p);
        break;
    case WIRE_REPEAT:
        on_repeat(c, p);
        break;
    case WIRE_GROW:
        on_grow(c, p);
        break;
    case WIRE_DROP:
        on_drop(c, p);
        break;
    case WIRE_STATUS:
        on_status(c, p);
        break;
    case WIRE_TAIL:
        on_tail(c, p);
        break;
    case WIRE_ROOM:
        on_room(c, p);
        break;
    }
}
