/*
 * work: what can wait, and members whose process has exited
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib-unix.h>

#include "client.h"
#include "state.h"
#include "work.h"

#define REST_MS 2000    /* memory that was needed lately stays */

static gboolean work_step(gpointer data)
{
    Server *s = data;
    bool more = false;

    for (unsigned i = s->leaving->len; i-- > 0; ) {
        Member *m = s->leaving->pdata[i];

        more = true;
        if (!group_leave_step(&s->group, &m->held)) {
            g_ptr_array_remove_index_fast(s->leaving, i);
            member_end(m);
        }
    }
    more |= client_reconcile_step(s) | group_step(&s->group) | state_step(s);
    if (!more) {
        s->work = 0;
    }
    return more;
}

void work_begin(Server *s)
{
    if (!s->work) {
        /* as important as packets: one piece for each round of those */
        s->work = g_idle_add_full(G_PRIORITY_DEFAULT, work_step, s, NULL);
    }
}

void work_leave(Server *s, Member *m)
{
    if (m->conn) {
        client_close(conn_opaque(m->conn));
    }
    g_ptr_array_add(s->leaving, m);
    work_begin(s);
}

static gboolean member_exited(gint fd, GIOCondition what, gpointer data)
{
    Member *m = data;

    m->exit_watch = 0;
    work_leave(m->server, m);
    return G_SOURCE_REMOVE;
}

void work_watch(Server *s, Member *m)
{
    m->server = s;
    m->exit_watch = g_unix_fd_add(m->pidfd, G_IO_IN, member_exited, m);
}

static gboolean rest_step(gpointer data)
{
    Server *s = data;
    bool more = group_rest(&s->group);

    s->rest = more ? s->rest : 0;
    work_begin(s);
    return more;
}

void work_rest(Server *s)
{
    if (s->group.active && !s->rest) {
        s->rest = g_timeout_add(REST_MS, rest_step, s);
    }
}
