/*
 * member: a process that shares in a group
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/page.h"
#include "base/prim.h"
#include "member.h"
#include "sys.h"

/*
 * What a member offers lies here.  The daemon does not map it, it reads: a
 * hole is read as zeroes then, and failed memory as an error, not a signal.
 */
static int ring_new(void)
{
    int fd = sys.memfd("ksm-ring", MFD_ALLOW_SEALING), ret;

    if (fd < 0) {
        return fd;
    }
    ret = prim.truncate(fd, RING_PAGES * PAGE_BYTES);
    if (ret == 0) {
        ret = sys.seal(fd, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    }
    if (ret < 0) {
        prim.close(fd);
        return ret;
    }
    return fd;
}

static int member_prepare(Member *m)
{
    int ret;

    do {
        ret = sys.random(m->cookie, sizeof(m->cookie));
    } while (ret == 0 && !m->cookie[0] && !m->cookie[1]);
    if (ret < 0) {
        return ret;
    }
    m->ring = ring_new();
    return MIN(m->ring, 0);
}

int member_begin(Member **member, Group *g, const WireHello *hello, int pidfd)
{
    Member *m = g_new0(Member, 1);
    int ret;

    m->pidfd = m->ring = -1;
    ret = member_prepare(m);
    if (ret == 0) {
        ret = group_join(g, &m->held, hello->pages);
    }
    if (ret < 0) {
        member_end(m);
        return ret;
    }
    memcpy(m->name, hello->name, sizeof(m->name));
    m->pidfd = pidfd;
    m->pid = process_number(pidfd);
    m->news = g_array_new(FALSE, FALSE, sizeof(WireFound));
    *member = m;
    return 0;
}

void member_end(Member *m)
{
    if (m->exit_watch) {
        g_source_remove(m->exit_watch);
    }
    if (m->pidfd >= 0) {
        prim.close(m->pidfd);
    }
    if (m->ring >= 0) {
        prim.close(m->ring);
    }
    if (m->news) {
        g_array_unref(m->news);
    }
    if (m->listed) {
        holds_free(m->listed);
        g_free(m->listed);
    }
    g_free(m);
}

uint32_t process_number(int pidfd)
{
    g_autofree char *path = g_strdup_printf("/proc/self/fdinfo/%d", pidfd);
    g_autofree char *text = prim_read_file(path, NULL);
    const char *at = text ? strstr(text, "\nPid:") : NULL;
    gint64 pid = at ? g_ascii_strtoll(at + strlen("\nPid:"), NULL, 10) : 0;

    return MAX(pid, 0);     /* -1: exited; 0: not in our namespace */
}

bool process_is_same(int pidfd, int other)
{
    uint32_t pid = process_number(pidfd);

    return pid && pid == process_number(other);
}
