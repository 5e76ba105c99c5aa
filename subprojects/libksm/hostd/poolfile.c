/*
 * poolfile: the file of a group's pool, that only the daemon can write
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Mounting takes CAP_SYS_ADMIN.  Who has it not makes the mount in a user
 * namespace; that is done by a child, which sends the descriptors: in such a
 * namespace the daemon could not tell its peers' users apart.
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/huge.h"
#include "base/page.h"
#include "base/prim.h"
#include "poolfile.h"

/* As it stands in /proc/PID/maps. */
#define POOL_NAME "ksm-pool"
#include "sys.h"

static void close_fd(int *fd)
{
    if (*fd >= 0) {
        prim.close(*fd);
        *fd = -1;
    }
}

static int tmpfs_configure(int fs, uint64_t bytes)
{
    g_autofree char *size = g_strdup_printf("%" G_GUINT64_FORMAT, bytes);
    int ret = sys.fs_set(fs, "huge", "never");

    /* a kernel without huge pages in tmpfs does not know of them */
    if (ret < 0 && ret != -EINVAL) {
        return ret;
    }
    ret = sys.fs_set(fs, "size", size);
    if (ret == 0) {
        ret = sys.fs_set(fs, "mode", "0700");
    }
    return ret == 0 ? sys.fs_create(fs) : ret;
}

/* Both descriptors, by a mount for writing and one for reading. */
static int tmpfs_open(PoolFile *f, int mount)
{
    int ro = sys.tree_clone(mount), ret = ro < 0 ? ro : 0;

    if (ret == 0) {
        ret = sys.tree_readonly(ro);
    }
    if (ret == 0) {
        f->fd = sys.open_at(mount, POOL_NAME, O_RDWR | O_CREAT | O_EXCL, 0400);
        ret = MIN(f->fd, 0);
    }
    if (ret == 0) {
        f->map_fd = sys.open_at(ro, POOL_NAME, O_RDONLY, 0);
        ret = MIN(f->map_fd, 0);
    }
    close_fd(&ro);
    return ret;
}

static int tmpfs_make(PoolFile *f, uint64_t bytes)
{
    int fs = sys.fs_open("tmpfs"), mount = -1, ret = MIN(fs, 0);

    if (ret == 0) {
        ret = tmpfs_configure(fs, bytes);
    }
    if (ret == 0) {
        mount = sys.fs_mount(fs);
        ret = MIN(mount, 0);
    }
    if (ret == 0) {
        ret = tmpfs_open(f, mount);
    }
    close_fd(&mount);
    close_fd(&fs);
    if (ret < 0) {
        close_fd(&f->fd);
        close_fd(&f->map_fd);
    }
    return ret;
}

/* We, as ourselves, with all rights over mounts that are ours alone. */
static int namespace_enter(void)
{
    g_autofree char *uids = g_strdup_printf("%u %u 1", geteuid(), geteuid());
    g_autofree char *gids = g_strdup_printf("%u %u 1", getegid(), getegid());
    int ret = sys.unshare(CLONE_NEWUSER | CLONE_NEWNS);

    if (ret == 0) {
        /* it gained capabilities: its own /proc files are root's else */
        ret = sys.dumpable(1);
    }
    if (ret == 0) {
        ret = sys.write_text("/proc/self/setgroups", "deny");
    }
    if (ret == 0) {
        ret = sys.write_text("/proc/self/uid_map", uids);
    }
    return ret == 0 ? sys.write_text("/proc/self/gid_map", gids) : ret;
}

typedef union FdsControl {
    struct cmsghdr head;
    char bytes[CMSG_SPACE(2 * sizeof(int))];
} FdsControl;

static void G_GNUC_NORETURN child_make(int to, uint64_t bytes)
{
    PoolFile f = { .fd = -1, .map_fd = -1 };
    int ret = namespace_enter();
    struct iovec iov = { &ret, sizeof(ret) };
    FdsControl control;
    struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };

    if (ret == 0) {
        ret = tmpfs_make(&f, bytes);
    }
    if (ret == 0) {
        int fds[2] = { f.fd, f.map_fd };

        m.msg_control = control.bytes;
        m.msg_controllen = sizeof(control.bytes);
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(sizeof(fds));
        memcpy(CMSG_DATA(&control.head), fds, sizeof(fds));
    }
    sys.send(to, &m);
    _exit(0);
}

static int child_fetch(PoolFile *f, int from)
{
    int ret = -EIO, fds[2];
    struct iovec iov = { &ret, sizeof(ret) };
    FdsControl control;
    struct msghdr m = {
        .msg_iov = &iov,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof(control.bytes),
    };
    struct cmsghdr *c;
    ssize_t got = sys.receive(from, &m);

    if (got != sizeof(ret)) {
        return got < 0 ? got : -EIO;
    }
    c = CMSG_FIRSTHDR(&m);
    if (ret == 0 && c && c->cmsg_type == SCM_RIGHTS &&
        c->cmsg_len == CMSG_LEN(sizeof(fds))) {
        memcpy(fds, CMSG_DATA(c), sizeof(fds));
        f->fd = fds[0];
        f->map_fd = fds[1];
        return 0;
    }
    return ret < 0 ? ret : -EIO;
}

static int tmpfs_make_by_child(PoolFile *f, uint64_t bytes)
{
    int pair[2], ret = sys.pair(pair);
    pid_t child;

    if (ret < 0) {
        return ret;
    }
    child = sys.fork();
    if (child == 0) {
        child_make(pair[1], bytes);
    }
    ret = child;
    if (child > 0) {
        /* the child has ended: receiving does not wait */
        while (sys.wait(child) == -EINTR) {
            continue;
        }
        ret = child_fetch(f, pair[0]);
    }
    prim.close(pair[0]);
    prim.close(pair[1]);
    return ret;
}

static int memfd_make(PoolFile *f)
{
    char path[64];
    int ret;

    f->kind = POOLFILE_MEMFD;
    f->fd = sys.memfd(POOL_NAME, MFD_ALLOW_SEALING);
    if (f->fd < 0) {
        return f->fd;
    }
    ret = sys.chmod(f->fd, 0600);
    if (ret == 0) {
        ret = sys.seal(f->fd, F_SEAL_SHRINK | F_SEAL_SEAL);
    }
    if (ret == 0) {
        g_snprintf(path, sizeof(path), "/proc/self/fd/%d", f->fd);
        f->map_fd = prim.open_read(path);
        ret = MIN(f->map_fd, 0);
    }
    if (ret < 0) {
        close_fd(&f->fd);
    }
    return ret;
}

int poolfile_make(PoolFile *f, uint64_t bytes, char **note)
{
    int tmpfs, ret;

    *f = (PoolFile) { .kind = POOLFILE_TMPFS, .fd = -1, .map_fd = -1 };
    *note = NULL;
    tmpfs = tmpfs_make(f, bytes);
    if (tmpfs == -EPERM || tmpfs == -EACCES) {
        tmpfs = tmpfs_make_by_child(f, bytes);
    }
    ret = tmpfs;
    if (ret < 0) {
        ret = memfd_make(f);
        *note = g_strdup_printf(
            "no tmpfs can be mounted for the pool (%s)%s",
            strerror(-tmpfs), ret < 0 ? ", nor a memfd be made" :
            ": it is a memfd, and members that are root or of this user are "
            "refused; allow user namespaces, or give CAP_SYS_ADMIN at start");
    }
    f->keeps_all = huge_shmem(poolfile_mount(f));
    return ret;
}

HugeMount poolfile_mount(const PoolFile *f)
{
    return f->kind == POOLFILE_MEMFD ? HUGE_MEMFD : HUGE_NEVER;
}

bool poolfile_may_give(const PoolFile *f, uid_t uid)
{
    return f->kind == POOLFILE_TMPFS || (uid != 0 && uid != geteuid());
}
