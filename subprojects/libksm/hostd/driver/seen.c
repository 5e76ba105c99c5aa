/*
 * seen: what the driver of ksmd goes by
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <glib.h>

#include "base/prim.h"
#include "seen.h"
#include "share/wire.h"
#include "socket.h"

#define ANSWER_MS   100
#define ASK_NS      UINT64_C(1000000000)
#define PRESSED_NS  UINT64_C(10000000000)   /* short of memory: so long after */

/* A kernel thread of that name, by the first figure of its schedstat: ns. */
static char *thread_find(const char *root, const char *name)
{
    g_autofree char *proc = g_build_filename(root, "proc", NULL);
    g_autoptr(GDir) dir = g_dir_open(proc, 0, NULL);
    const char *pid;

    while (dir && (pid = g_dir_read_name(dir))) {
        g_autofree char *comm = NULL, *path = NULL, *exe = NULL;
        g_autofree char *line = NULL;

        if (!g_ascii_isdigit(*pid)) {
            continue;
        }
        path = g_build_filename(proc, pid, "comm", NULL);
        comm = prim_read_file(path, NULL);
        exe = g_build_filename(proc, pid, "cmdline", NULL);
        line = prim_read_file(exe, NULL);
        /* a process can have any name; a kernel thread has no command line */
        if (comm && strcmp(g_strchomp(comm), name) == 0 && line && !*line) {
            return g_build_filename(proc, pid, "schedstat", NULL);
        }
    }
    return NULL;
}

void seer_init(Seer *s, const char *root, const char *socket)
{
    *s = (Seer) {
        .knobs = g_build_filename(root, "sys/kernel/mm/ksm", NULL),
        .stat = thread_find(root, "ksmd"),
        .pressure = ksm_pressure_new_at(root),
        .socket = socket,
        .fd = -1,
    };
}

void seer_free(Seer *s)
{
    if (s->fd >= 0) {
        prim.close(s->fd);
    }
    ksm_pressure_free(s->pressure);
    g_free(s->knobs);
    g_free(s->stat);
}

/* The first number of a file; false: there is none. */
static bool number(const char *path, uint64_t *n)
{
    g_autofree char *text = path ? prim_read_file(path, NULL) : NULL;

    if (text) {
        *n = g_ascii_strtoull(text, NULL, 10);
    }
    return text;
}

static bool counter(const Seer *s, const char *name, uint64_t *n)
{
    g_autofree char *path = g_build_filename(s->knobs, name, NULL);

    return number(path, n);
}

static void daemon_lost(Seer *s)
{
    if (s->fd >= 0) {
        prim.close(s->fd);
    }
    s->fd = -1;
    s->answers = false;
}

/* What it said last stays: its members' memory is as it was. */
static void daemon_ask(Seer *s)
{
    WireHead status = { .type = WIRE_STATUS, .count = 1, .seq = 1 };
    struct pollfd wait = { .events = POLLIN };
    WireState state;

    if (s->fd < 0) {
        s->fd = socket_connect(s->socket);
    }
    wait.fd = s->fd;
    if (s->fd < 0 ||
        send(s->fd, &status, sizeof(status), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ||
        poll(&wait, 1, ANSWER_MS) <= 0 ||
        recv(s->fd, &state, sizeof(state), MSG_DONTWAIT) != sizeof(state) ||
        state.head.type != WIRE_STATE) {
        /* what comes too late must not be taken for the next answer */
        daemon_lost(s);
        return;
    }
    s->answers = true;
    s->seen.left = state.left.bytes;
    s->seen.given = state.left.given;
}

int seer_look(Seer *s)
{
    DriveSeen *seen = &s->seen;
    uint64_t sharing, zero = 0;

    seen->now_ns = prim.now_ns();
    if (!counter(s, "full_scans", &seen->scans) ||
        !counter(s, "pages_sharing", &sharing)) {
        return -errno;
    }
    counter(s, "ksm_zero_pages", &zero);
    seen->saved = sharing + zero;
    number(s->stat, &seen->cpu_ns);
    if (!s->asked_ns || seen->now_ns - s->asked_ns >= ASK_NS) {
        s->asked_ns = seen->now_ns;
        daemon_ask(s);
    }
    if (ksm_pressure_sign(s->pressure, seen->now_ns - s->looked_ns)) {
        s->pressed_ns = seen->now_ns;
    }
    s->looked_ns = seen->now_ns;
    seen->pressed = s->pressed_ns && seen->now_ns - s->pressed_ns < PRESSED_NS;
    return 0;
}
