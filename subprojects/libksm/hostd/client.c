/*
 * client: a connection to the daemon, and who is at its other end
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <stdarg.h>
#include <string.h>

#include "client.h"

static void listed_forget(Server *s, Member *m)
{
    holds_free(m->listed);
    g_clear_pointer(&m->listed, g_free);
    g_ptr_array_remove_fast(s->reconciling, m);
}

void client_reconcile(Server *s, Member *m)
{
    m->reconciled = 0;
    conn_pause(m->conn);
    g_ptr_array_add(s->reconciling, m);
}

bool client_reconcile_step(Server *s)
{
    for (unsigned i = s->reconciling->len; i-- > 0; ) {
        Member *m = s->reconciling->pdata[i];

        if (!group_keep_step(&s->group, &m->held, m->listed,
                             &m->reconciled)) {
            listed_forget(s, m);
            conn_go_on(m->conn);
        }
    }
    return s->reconciling->len;
}

void client_close(Client *c)
{
    Server *s = c->server;

    if (c->member) {
        Member *m = c->member;

        m->conn = NULL;
        m->missed = false;      /* it asks about all again */
        group_unheard(&s->group, &m->held);
        if (m->listed) {
            /* what it holds is as it is now, until it resumes again */
            listed_forget(s, m);
        }
    }
    g_ptr_array_remove_fast(s->clients, c);
    conn_close(c->conn);
    g_free(c);
}

void client_refuse(Client *c, WireRefusal code, const char *format, ...)
{
    WireRefused r = { .head = { .type = WIRE_REFUSED }, .code = code };
    va_list args;

    va_start(args, format);
    g_vsnprintf(r.text, sizeof(r.text), format, args);
    va_end(args);
    conn_send(c->conn, &r, sizeof(r));
    client_close(c);
}

void client_send_block(Client *c, uint64_t seq, uint32_t first)
{
    WireBlock b = {
        .head = { .type = WIRE_BLOCK, .seq = seq },
        .first = first,
        .length = group_length(&c->server->group, first),
    };

    conn_send(c->conn, &b, sizeof(b));
}

void client_send_blocks(Client *c)
{
    GArray *blocks = c->server->blocks;

    for (unsigned i = 0; i < blocks->len; i++) {
        client_send_block(c, 0, g_array_index(blocks, uint32_t, i));
    }
    g_array_set_size(blocks, 0);
}

void client_tell_missed(Member *m)
{
    WireHead none = { .type = WIRE_NEWS };

    if (m->missed && !conn_queued(m->conn)) {
        m->missed = false;
        conn_send(m->conn, &none, sizeof(none));
    }
}

static void send_news(Server *s, Member *m)
{
    struct {
        WireHead head;
        WireFound found[WIRE_PAIRS];
    } *news = g_malloc(sizeof(*news));
    unsigned n = m->news->len;

    if (m->conn && n) {
        Client *c = conn_opaque(m->conn);

        news->head = (WireHead) { .type = WIRE_NEWS, .count = n };
        memcpy(news->found, m->news->data, n * sizeof(WireFound));
        for (unsigned i = 0; i < n; i++) {
            uint32_t slot = news->found[i].slot;

            if (slot != WIRE_LEFT && pool_pattern(&s->group.pool, slot) &&
                holds_of(&m->held.holds, slot) == 1) {
                client_send_block(c, 0, slot);
            }
        }
        conn_send(m->conn, news, sizeof(WireHead) + n * sizeof(WireFound));
        client_tell_missed(m);
    }
    /* else its holds are dropped when it resumes, or exits */
    g_free(news);
    g_array_set_size(m->news, 0);
}

bool client_tell(void *opaque, unsigned number, uint64_t hash,
                 uint32_t slot)
{
    Server *s = opaque;
    Member *m = (Member *)s->group.member[number];
    WireFound found = { .hash = hash, .slot = slot };

    if (!m || !m->conn || m->listed) {
        return false;
    }
    if (m->news->len == WIRE_PAIRS) {
        send_news(s, m);        /* an ASK can leave more than a message takes */
    }
    if (conn_queued(m->conn) >= CONN_QUEUE_MAX) {
        m->missed |= slot != WIRE_LEFT;     /* it need not ask for that */
        return false;
    }
    if (slot != WIRE_LEFT && !group_hold(&s->group, &m->held, slot)) {
        return false;
    }
    if (!m->news->len) {
        g_ptr_array_add(s->to_tell, m);
    }
    g_array_append_val(m->news, found);
    return true;
}

void client_send_news(Server *s)
{
    while (s->to_tell->len) {
        send_news(s, g_ptr_array_steal_index_fast(s->to_tell, 0));
    }
}
