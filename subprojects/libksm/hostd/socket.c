/*
 * socket: where members connect
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <stdbool.h>
#include <glib.h>

#include "socket.h"

#define GIVEN_FD    3       /* the first that systemd gives */

static struct stat made;    /* the path, as we made it */

/* Length of the address. */
static socklen_t address(struct sockaddr_un *a, const char *path)
{
    size_t len = strlen(path);

    memset(a, 0, sizeof(*a));
    a->sun_family = AF_UNIX;
    memcpy(a->sun_path, path, MIN(len, sizeof(a->sun_path) - 1));
    if (path[0] == '@') {
        a->sun_path[0] = '\0';
    }
    return offsetof(struct sockaddr_un, sun_path) + len + (path[0] != '@');
}

int socket_connect(const char *path)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_un a;
    socklen_t len = address(&a, path);
    int error;

    if (fd < 0) {
        return -errno;
    }
    if (connect(fd, (struct sockaddr *)&a, len) < 0) {
        error = errno;
        close(fd);
        return -error;
    }
    return fd;
}

static int complain(const char *path, const char *what)
{
    fprintf(stderr, "ksm-poold: socket %s: %s\n", path, what);
    return -1;
}

/* What is at the path goes, if it is a socket that nobody listens to. */
static int clear_path(const char *path)
{
    struct stat st;
    int fd;

    if (lstat(path, &st) < 0) {
        return errno == ENOENT ? 0 : complain(path, strerror(errno));
    }
    if (!S_ISSOCK(st.st_mode)) {
        return complain(path, "something else is there; remove it, or give "
                        "another --socket");
    }
    fd = socket_connect(path);
    if (fd != -ECONNREFUSED) {
        if (fd >= 0) {
            close(fd);
        }
        return complain(path, "a daemon listens there; end it, or give "
                        "another --socket");
    }
    return unlink(path) < 0 ? complain(path, strerror(errno)) : 0;
}

void socket_adopt(const char *path)
{
    if (!path || lstat(path, &made) < 0) {
        made.st_ino = 0;
    }
}

static int make(const char *path)
{
    struct sockaddr_un a;
    socklen_t len = address(&a, path);
    int fd;

    if (clear_path(path) < 0) {
        return -1;
    }
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return complain(path, strerror(errno));
    }
    /* for us and our group, not for what is connected meanwhile */
    umask(0117);
    if (bind(fd, (struct sockaddr *)&a, len) < 0) {
        complain(path, strerror(errno));
        close(fd);
        return -1;
    }
    socket_adopt(path);
    return fd;
}

static bool is_seqpacket(int fd)
{
    int type = 0;
    socklen_t len = sizeof(type);

    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) == 0 &&
           type == SOCK_SEQPACKET;
}

/* The one of systemd; -1: it gave none. */
static int given(void)
{
    const char *pid = g_getenv("LISTEN_PID"), *n = g_getenv("LISTEN_FDS");
    bool ours = pid && n && g_ascii_strtoll(pid, NULL, 10) == getpid();
    gint64 count = ours ? g_ascii_strtoll(n, NULL, 10) : 0;

    g_unsetenv("LISTEN_PID");
    g_unsetenv("LISTEN_FDS");
    g_unsetenv("LISTEN_FDNAMES");
    if (count < 1) {
        fputs("ksm-poold: no socket: give --socket PATH, or start it by its "
              "systemd socket\n", stderr);
        return -1;
    }
    if (count > 1 || !is_seqpacket(GIVEN_FD)) {
        fputs("ksm-poold: systemd gave something else than one socket with "
              "ListenSequentialPacket=: mend its unit\n", stderr);
        return -1;
    }
    fcntl(GIVEN_FD, F_SETFD, FD_CLOEXEC);
    fcntl(GIVEN_FD, F_SETFL, O_NONBLOCK | fcntl(GIVEN_FD, F_GETFL));
    return GIVEN_FD;
}

int socket_listener(const char *path)
{
    return path ? make(path) : given();
}

void socket_remove(const char *path)
{
    struct stat st;

    if (path && made.st_ino && lstat(path, &st) == 0 &&
        st.st_ino == made.st_ino && st.st_dev == made.st_dev) {
        unlink(path);
    }
}

void socket_notify(const char *text)
{
    const char *path = g_getenv("NOTIFY_SOCKET");
    struct sockaddr_un a;
    int fd;

    if (!path) {
        return;
    }
    fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        sendto(fd, text, strlen(text), MSG_NOSIGNAL, (struct sockaddr *)&a,
               address(&a, path));
        close(fd);
    }
}
