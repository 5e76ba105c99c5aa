/*
 * status: ksm-poold --status, which asks a running daemon
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <glib.h>

#include "share/wire.h"
#include "socket.h"
#include "status.h"

#define WAIT_MS 5000
#define U64     "%" G_GUINT64_FORMAT

typedef struct Number {
    const char *name;       /* of JSON */
    const char *text;
    size_t at;              /* in WireState */
} Number;

#define NUMBER(field, text) { #field, text, offsetof(WireState, field) }

static const Number numbers[] = {
    NUMBER(generation, NULL),
    NUMBER(uptime, "seconds up"),
    NUMBER(slots, "slots at most"),
    NUMBER(used, "slots with content"),
    NUMBER(holds, "holds"),
    NUMBER(metadata, "bytes for tables"),
    NUMBER(asked, "hashes asked"),
    NUMBER(offered, "pages offered"),
    NUMBER(published, "... that became slots"),
    NUMBER(found, "... that the pool had"),
    NUMBER(refused_full, "... refused: the pool is full"),
    NUMBER(refused_share, "... refused: the member's share"),
    NUMBER(refused_memory, "... refused: no memory"),
    NUMBER(news, "news told"),
    NUMBER(news_lost, "news lost"),
    NUMBER(cpu_ns, "ns of CPU time"),
    { "left", "bytes left to the kernel's KSM",
      offsetof(WireState, left.bytes) },
    { "left_given", NULL, offsetof(WireState, left.given) },
    { "left_merged", "... pages that it has merged",
      offsetof(WireState, left.merged) },
};

static uint64_t number_of(const WireState *s, const Number *n)
{
    uint64_t value;

    memcpy(&value, (const char *)s + n->at, sizeof(value));
    return value;
}

static const WireState *state_of(const void *packet, size_t len)
{
    const WireState *s = packet;

    if (len < sizeof(*s) || s->head.type != WIRE_STATE ||
        s->head.count > 1024 ||
        len != sizeof(*s) + s->head.count * sizeof(WireMember)) {
        return NULL;
    }
    return s;
}

/* A name as its owner chose it: nothing in it rules a terminal. */
static char *printable(const char name[64])
{
    g_autofree char *text = g_strndup(name, 63);
    char *valid = g_utf8_make_valid(text, -1);

    /* among them those of two bytes, as U+009B, which begins what rules */
    for (char *c = valid; *c; c = g_utf8_next_char(c)) {
        if (g_unichar_iscntrl(g_utf8_get_char(c))) {
            memset(c, '?', g_utf8_next_char(c) - c);
        }
    }
    return valid;
}

static char *json_string(const char name[64])
{
    g_autofree char *text = printable(name);
    GString *out = g_string_new("\"");

    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\') {
            g_string_append_c(out, '\\');
        }
        g_string_append_c(out, *c);
    }
    g_string_append_c(out, '"');
    return g_string_free(out, FALSE);
}

char *status_json(const void *packet, size_t len)
{
    const WireState *s = state_of(packet, len);
    GString *out = g_string_new("{");

    if (!s) {
        g_string_free(out, TRUE);
        return NULL;
    }
    for (unsigned i = 0; i < G_N_ELEMENTS(numbers); i++) {
        g_string_append_printf(out, "\"%s\": " U64 ", ", numbers[i].name,
                               number_of(s, &numbers[i]));
    }
    g_string_append(out, "\"members\": [");
    for (unsigned i = 0; i < s->head.count; i++) {
        const WireMember *m = &s->member[i];
        g_autofree char *name = json_string(m->name);

        g_string_append_printf(out, "%s{\"name\": %s, \"pid\": %u, "
                               "\"connected\": %s, \"pages\": " U64 ", "
                               "\"holds\": " U64 ", \"held\": " U64 ", "
                               "\"share\": " U64 ", "
                               "\"published\": " U64 ", "
                               "\"left\": " U64 ", \"left_merged\": " U64 "}",
                               i ? ", " : "", name, m->pid,
                               m->connected ? "true" : "false", m->pages,
                               m->holds, m->held, m->share, m->published,
                               m->left.bytes, m->left.merged);
    }
    g_string_append(out, "]}\n");
    return g_string_free(out, FALSE);
}

char *status_text(const void *packet, size_t len)
{
    const WireState *s = state_of(packet, len);
    GString *out = g_string_new(NULL);

    if (!s) {
        g_string_free(out, TRUE);
        return NULL;
    }
    g_string_append_printf(out, "generation %016" G_GINT64_MODIFIER "x\n",
                           s->generation);
    for (unsigned i = 0; i < G_N_ELEMENTS(numbers); i++) {
        if (!numbers[i].text) {
            continue;
        }
        g_string_append_printf(out, "%14" G_GUINT64_FORMAT "  %s\n",
                               number_of(s, &numbers[i]), numbers[i].text);
    }
    g_string_append_printf(out, "%u members\n", s->members);
    if (s->head.count) {
        g_string_append(out, "     pid       pages   holds slots   "
                        "its share   published  name\n");
    }
    for (unsigned i = 0; i < s->head.count; i++) {
        const WireMember *m = &s->member[i];
        g_autofree char *name = printable(m->name);

        g_string_append_printf(
            out, "%8u %11" G_GUINT64_FORMAT " %13" G_GUINT64_FORMAT
            " %11" G_GUINT64_FORMAT " %11" G_GUINT64_FORMAT "  %s%s\n",
            m->pid, m->pages, m->held, m->share / 1000, m->published, name,
            m->connected ? "" : " (not connected)");
    }
    return g_string_free(out, FALSE);
}

static int failed(const Options *o, const char *what)
{
    fprintf(stderr, "ksm-poold: no status of %s: %s\n", o->socket, what);
    return EXIT_FAILURE;
}

/* The answer's length, or -errno. */
static ssize_t ask(int fd, void *packet, size_t room)
{
    WireHead question = { .type = WIRE_STATUS };
    struct pollfd wait = { .fd = fd, .events = POLLIN };
    ssize_t got;

    if (send(fd, &question, sizeof(question), MSG_NOSIGNAL) < 0) {
        return -errno;
    }
    if (poll(&wait, 1, WAIT_MS) == 0) {
        return -ETIMEDOUT;
    }
    got = recv(fd, packet, room, 0);
    return got < 0 ? -errno : got;
}

static int show(const Options *o, const void *packet, ssize_t len)
{
    const WireRefused *r = packet;
    g_autofree char *text = NULL;

    if (len < 0) {
        return failed(o, strerror(-len));
    }
    if (len == sizeof(*r) && r->head.type == WIRE_REFUSED) {
        g_autofree char *why = g_strndup(r->text, sizeof(r->text) - 1);

        return failed(o, why);
    }
    text = o->json ? status_json(packet, len) : status_text(packet, len);
    if (!text) {
        return failed(o, "what answers there is no ksm-poold");
    }
    fputs(text, stdout);
    return EXIT_SUCCESS;
}

int status_run(const Options *o)
{
    g_autofree void *packet = g_malloc(WIRE_MESSAGE_MAX);
    int fd = socket_connect(o->socket), ret;

    if (fd < 0) {
        return failed(o, fd == -ENOENT || fd == -ECONNREFUSED
                         ? "no daemon listens there" : strerror(-fd));
    }
    ret = show(o, packet, ask(fd, packet, WIRE_MESSAGE_MAX));
    close(fd);
    return ret;
}
