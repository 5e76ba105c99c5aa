/*
 * link: the connection to a group's daemon
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <glib.h>

#include "base/prim.h"
#include "share/link.h"

#define WAIT_MIN_NS     UINT64_C(100000000)
#define WAIT_MAX_NS     UINT64_C(10000000000)

void link_init(KsmLink *l, int fd, const char *path)
{
    *l = (KsmLink) {
        .path = g_strdup(path),
        .fd = -1,
        .wait_ns = WAIT_MIN_NS,
    };
    if (fd >= 0) {
        l->fd = fd;
    }
}

void link_free(KsmLink *l)
{
    if (l->fd >= 0) {
        prim.close(l->fd);
        l->fd = -1;
    }
    g_clear_pointer(&l->path, g_free);
}

bool link_make(KsmLink *l)
{
    uint64_t now;

    if (l->fd >= 0 || !l->path) {
        return false;
    }
    now = prim.now_ns();
    if (now < l->retry_ns) {
        return false;
    }
    l->retry_ns = now + l->wait_ns;
    l->wait_ns = MIN(2 * l->wait_ns, WAIT_MAX_NS);
    l->fd = prim.connect(l->path);
    l->absent = l->fd < 0;
    if (l->absent) {
        l->fd = -1;
        return false;
    }
    return true;
}

void link_works(KsmLink *l)
{
    l->wait_ns = WAIT_MIN_NS;
}

void link_break(KsmLink *l)
{
    if (l->fd >= 0) {
        prim.close(l->fd);
        l->fd = -1;
        l->breaks++;
        l->retry_ns = prim.now_ns() + l->wait_ns;
    }
}

bool link_send(KsmLink *l, const void *message, size_t len)
{
    int ret = l->fd < 0 ? -EAGAIN : prim.send(l->fd, message, len);

    if (ret < 0 && ret != -EAGAIN && ret != -EINTR && ret != -ENOBUFS &&
        ret != -ENOMEM) {
        link_break(l);
    }
    return ret >= 0;
}

size_t link_receive(KsmLink *l, void *message, size_t len, int fds[2])
{
    ssize_t ret = l->fd < 0 ? -EAGAIN
                            : prim.receive(l->fd, message, len, fds, 2);

    if (ret > 0) {
        return ret;
    }
    if (ret != -EAGAIN && ret != -EINTR) {
        link_break(l);
    }
    return 0;
}
