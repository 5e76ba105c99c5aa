/*
 * ksm-poold: the daemon that has the pool of a group
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * One process for each group.  This is its command line, its socket and its
 * way to an end; the rest begins in serve.h.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>

#include <glib-unix.h>

#include "base/page.h"
#include "base/prim.h"
#include "confine.h"
#include "key.h"
#include "options.h"
#include "reload.h"
#include "serve.h"
#include "socket.h"
#include "status.h"
#include "sys.h"

/* Each member has a connection, a pidfd and a ring. */
static void allow_descriptors(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

typedef struct Signals {
    Server *server;
    GMainLoop *loop;
    int fd;
} Signals;

/* Between two packets: everything is at rest. */
static void reload(Server *s)
{
    g_autofree char *text =
        g_strdup_printf("RELOADING=1\nMONOTONIC_USEC=%" G_GINT64_FORMAT,
                        g_get_monotonic_time());
    int ret;

    socket_notify(text);
    ret = reload_exec(s);
    fprintf(stderr, "ksm-poold: cannot be replaced by its successor: %s; goes "
            "on as it is\n", strerror(-ret));
    socket_notify("READY=1\nSTATUS=the reload failed");
}

static gboolean signal_read(gint fd, GIOCondition what, gpointer data)
{
    Signals *s = data;
    struct signalfd_siginfo info;

    if (prim.read(fd, &info, sizeof(info)) != sizeof(info)) {
        return G_SOURCE_CONTINUE;
    }
    if (info.ssi_signo == SIGHUP) {
        reload(s->server);
    } else {
        g_main_loop_quit(s->loop);
    }
    return G_SOURCE_CONTINUE;
}

/* By the event loop: GLib's own way takes a thread. */
static int signals_open(void)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    return sys.signals(&set);
}

/* An exit code. */
static int run(Server *s, Confine how)
{
    Signals signals = {
        .server = s,
        .loop = g_main_loop_new(NULL, FALSE),
        .fd = signals_open(),
    };

    if (signals.fd < 0) {
        fprintf(stderr, "ksm-poold: signals cannot be read: %s\n",
                strerror(-signals.fd));
        g_main_loop_unref(signals.loop);
        return EXIT_FAILURE;
    }
    g_unix_fd_add(signals.fd, G_IO_IN, signal_read, &signals);
    confine(how);
    socket_notify(how == CONFINE_AGAIN ? "READY=1\nSTATUS=reloaded"
                                       : "READY=1");
    g_main_loop_run(signals.loop);
    socket_notify("STOPPING=1");
    g_main_loop_unref(signals.loop);
    prim.close(signals.fd);
    return EXIT_SUCCESS;
}

static int pool_failed(int error, uint64_t bytes, const char *note)
{
    fprintf(stderr, "ksm-poold: cannot make a pool of %" G_GUINT64_FORMAT
            " bytes: %s%s%s\n", bytes, strerror(-error), note ? "; " : "",
            note ? note : "");
    return EXIT_FAILURE;
}

/* False: it cannot be had, which has been said. */
static bool choose_key(const char *file, uint64_t *key)
{
    bool open = false;
    int ret = file ? key_read(file, key, &open)
                   : sys.random(key, sizeof(*key));

    if (ret < 0) {
        fprintf(stderr, "ksm-poold: no key%s%s: %s\n", file ? " in " : "",
                file ? file : " for the group's hash",
                ret == -ERANGE ? "want 16 to 4096 bytes, as of "
                "'head -c 32 /dev/urandom'" : strerror(-ret));
        return false;
    }
    if (open) {
        fprintf(stderr, "ksm-poold: %s can be read by others: who knows the "
                "key can tell more of what guests have in memory\n", file);
    }
    return true;
}

static int serve_new(Server *s, const Options *o, GroupConfig *config,
                     int listener)
{
    g_autofree char *note = NULL;
    PoolFile file;
    int ret;

    if (!choose_key(o->key, &config->key)) {
        return EXIT_FAILURE;
    }
    ret = poolfile_make(&file, o->size, &note);
    if (ret < 0) {
        return pool_failed(ret, o->size, note);
    }
    if (note) {
        fprintf(stderr, "ksm-poold: %s\n", note);
    }
    ret = server_init(s, config, &file, listener);
    ret = ret < 0 ? pool_failed(ret, o->size, NULL) : run(s, CONFINE_FIRST);
    server_free(s);
    return ret;
}

static int serve_on(Server *s, const GroupConfig *config)
{
    int ret = reload_resume(s, config);

    if (ret < 0) {
        fprintf(stderr, "ksm-poold: cannot go on with what its predecessor "
                "left: %s; start it anew\n", strerror(-ret));
        return EXIT_FAILURE;
    }
    ret = run(s, CONFINE_AGAIN);
    server_free(s);
    return ret;
}

int main(int argc, char **argv)
{
    static Server server;
    Options o;
    GroupConfig config;
    int listener, ret;

    options_parse(&o, argc, argv);
    if (o.status) {
        return status_run(&o);
    }
    config = (GroupConfig) {
        .slots = o.size / PAGE_BYTES,
        .max_holds = o.max_sharing / HOLD_USERS,
        .max_members = o.members,
        .share = o.share,
        .root = "/",
    };
    confine_hide();
    signal(SIGPIPE, SIG_IGN);
    allow_descriptors();
    reload_prepare(argv);
    if (reload_is()) {
        socket_adopt(o.socket);
        ret = serve_on(&server, &config);
    } else {
        listener = socket_listener(o.socket);
        if (listener < 0) {
            return EXIT_FAILURE;
        }
        ret = serve_new(&server, &o, &config, listener);
    }
    socket_remove(o.socket);
    return ret;
}
