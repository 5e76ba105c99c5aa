/*
 * state: what the daemon tells of a group
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <string.h>

#include "base/prim.h"
#include "state.h"

#define SECOND      UINT64_C(1000000000)
#define SHARES_NS   UINT64_C(5000000)   /* of counting them in one turn */

/* Counting it goes over all holds: once a second at most, if any changed. */
static void share_count(Server *s, Member *m)
{
    uint64_t now = prim.now_ns();

    if (!m->share_at || (now - m->share_at >= SECOND &&
                         m->share_of != s->group.changes)) {
        m->share = group_share(&s->group, &m->held);
        m->share_at = now;
        m->share_of = s->group.changes;
    }
}

/*
 * Of a large group for some members only; the others' turn comes with the next
 * question.
 */
static void shares_count(Server *s)
{
    uint64_t began = prim.now_ns();

    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        Member *m = (Member *)s->group.member[s->share_next];

        s->share_next = (s->share_next + 1) % ASKED_MEMBERS;
        if (m) {
            share_count(s, m);
            if (prim.now_ns() - began > SHARES_NS) {
                return;
            }
        }
    }
}

bool state_step(Server *s)
{
    while (s->uncounted) {
        Member *m = (Member *)s->group.member[--s->uncounted];

        if (m) {
            share_count(s, m);
            return true;
        }
    }
    return false;
}

static void member_describe(const Member *m, WireMember *to)
{
    memcpy(to->name, m->name, sizeof(to->name));
    to->pid = m->pid;
    to->connected = m->conn != NULL;
    to->pages = m->held.pages;
    to->holds = m->held.holds.held;
    to->held = m->share.held;
    to->share = m->share.share;
    to->published = m->held.charged;
    to->left = m->left;
}

static WireLeft left_sum(const Group *g)
{
    WireLeft sum = { .given = g->stats.given };

    for (unsigned i = 0; i < ASKED_MEMBERS; i++) {
        const Member *m = (const Member *)g->member[i];

        if (m) {
            sum.bytes += m->left.bytes;
            sum.merged += m->left.merged;
        }
    }
    return sum;
}

static void group_describe(const Server *s, WireState *to)
{
    const Group *g = &s->group;

    to->generation = s->generation;
    to->uptime = (prim.now_ns() - s->began) / SECOND;
    to->slots = g->config.slots;
    to->used = g->used;
    to->holds = g->pool.sharing;
    to->metadata = group_metadata(g);
    to->asked = g->stats.asked;
    to->offered = g->stats.offered;
    to->published = g->stats.published;
    to->found = g->stats.found;
    to->refused_full = g->stats.refused_full;
    to->refused_share = g->stats.refused_share;
    to->refused_memory = g->stats.refused_memory;
    to->news = g->stats.news;
    to->news_lost = g->stats.news_lost;
    to->cpu_ns = prim.cpu_ns();
    to->left = left_sum(g);
    to->members = g->members;
}

void state_send(Client *c, uint64_t seq, bool brief)
{
    Server *s = c->server;
    g_autofree WireState *state =
        g_malloc0(sizeof(*state) +
                  (c->member ? 1 : s->group.members) * sizeof(WireMember));
    unsigned n = 0;

    state->head.type = WIRE_STATE;
    state->head.seq = seq;
    group_describe(s, state);
    if (!brief && !c->member) {
        shares_count(s);
    }
    for (unsigned i = 0; i < ASKED_MEMBERS && !brief; i++) {
        Member *m = (Member *)s->group.member[i];

        if (m && (!c->member || c->member == m)) {
            if (c->member || !m->share_at) {
                share_count(s, m);      /* no figures are not told */
            }
            member_describe(m, &state->member[n++]);
        }
    }
    state->head.count = n;
    conn_send(c->conn, state, sizeof(*state) + n * sizeof(WireMember));
}
