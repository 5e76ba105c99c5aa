/*
 * seen: what the driver of ksmd goes by
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <glib.h>

#include "base/prim.h"
#include "seen.h"
#include "share/wire.h"
#include "socket.h"

#define ANSWER_MS   100
#define SECOND_NS   UINT64_C(1000000000)
#define ASK_NS      SECOND_NS
#define PRESSED_NS  UINT64_C(10000000000)   /* short of memory: so long after */

/* A kernel thread of that name, by the file that has its times. */
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
            return g_build_filename(proc, pid, "stat", NULL);
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
    };
}

void seer_free(Seer *s)
{
    ksm_pressure_free(s->pressure);
    g_free(s->knobs);
    g_free(s->stat);
}

/* The first number of a file; false: there is none. */
static bool number(const char *path, uint64_t *n)
{
    g_autofree char *text = prim_read_file(path, NULL);

    if (text) {
        *n = g_ascii_strtoull(text, NULL, 10);
    }
    return text;
}

/* Fields 14 and 15, utime and stime; schedstat is all zeroes in some kernels. */
static uint64_t thread_ns(const char *path)
{
    g_autofree char *text = path ? prim_read_file(path, NULL) : NULL;
    const char *rest = text ? strrchr(text, ')') : NULL;
    unsigned long user, system;

    if (!rest || sscanf(rest, ")%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%*s%lu%lu", &user,
                        &system) != 2) {
        return 0;
    }
    return (user + system) * SECOND_NS / sysconf(_SC_CLK_TCK);
}

static bool counter(const Seer *s, const char *name, uint64_t *n)
{
    g_autofree char *path = g_build_filename(s->knobs, name, NULL);

    return number(path, n);
}

/*
 * What it said last stays: its members' memory is as it was.  A connection for
 * each question: what comes too late is not taken for the next answer, and no
 * hand inherits it.
 */
static void daemon_ask(Seer *s)
{
    WireHead status = { .type = WIRE_STATUS, .count = 1, .seq = 1 };
    struct pollfd wait = { .fd = socket_connect(s->socket), .events = POLLIN };
    WireState state;

    s->answers =
        wait.fd >= 0 &&
        send(wait.fd, &status, sizeof(status), MSG_NOSIGNAL) > 0 &&
        poll(&wait, 1, ANSWER_MS) > 0 &&
        recv(wait.fd, &state, sizeof(state), 0) == sizeof(state) &&
        state.head.type == WIRE_STATE;
    if (s->answers) {
        s->seen.left = state.left.bytes;
        s->seen.given = state.left.given;
    }
    if (wait.fd >= 0) {
        prim.close(wait.fd);
    }
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
    seen->cpu_ns = thread_ns(s->stat);
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
