/*
 * sys: system calls of the daemon that the engine has no need of
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <glib.h>

#include "sys.h"

static int result(long ret)
{
    return ret < 0 ? -errno : (int)ret;
}

static int real_fs_open(const char *type)
{
    return result(syscall(SYS_fsopen, type, FSOPEN_CLOEXEC));
}

static int real_fs_set(int fs, const char *key, const char *value)
{
    return result(syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, value,
                          0));
}

static int real_fs_create(int fs)
{
    return result(syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL,
                          0));
}

static int real_fs_mount(int fs)
{
    return result(syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC,
                          MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV |
                          MOUNT_ATTR_NOEXEC));
}

static int real_tree_clone(int mount)
{
    return result(syscall(SYS_open_tree, mount, "",
                          AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC));
}

static int real_tree_readonly(int mount)
{
    struct mount_attr attr = {
        .attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV |
                    MOUNT_ATTR_NOEXEC,
    };

    return result(syscall(SYS_mount_setattr, mount, "", AT_EMPTY_PATH, &attr,
                          sizeof(attr)));
}

static int real_unshare(int flags)
{
    return result(unshare(flags));
}

static int real_dumpable(int on)
{
    return result(prctl(PR_SET_DUMPABLE, on));
}

static int real_open_at(int dir, const char *name, int flags, mode_t mode)
{
    return result(openat(dir, name, flags | O_CLOEXEC, mode));
}

static int real_write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    ssize_t ret;
    int error;

    if (fd < 0) {
        return -errno;
    }
    ret = write(fd, text, strlen(text));
    error = ret < 0 ? -errno : 0;
    close(fd);
    return error;
}

static int real_replace(const char *path, const char *text)
{
    g_autoptr(GError) error = NULL;

    if (g_file_set_contents(path, text, -1, &error)) {
        return 0;
    }
    return g_error_matches(error, G_FILE_ERROR, G_FILE_ERROR_NOSPC) ? -ENOSPC
                                                                    : -EIO;
}

static int real_memfd(const char *name, unsigned flags)
{
    return result(memfd_create(name, flags | MFD_CLOEXEC));
}

static int real_chmod(int fd, mode_t mode)
{
    return result(fchmod(fd, mode));
}

static int real_seal(int fd, int seals)
{
    return result(fcntl(fd, F_ADD_SEALS, seals));
}

static int real_stat(int fd, struct stat *st)
{
    return result(fstat(fd, st));
}

static pid_t real_fork(void)
{
    return result(fork());
}

static int real_wait(pid_t child)
{
    return result(waitpid(child, NULL, 0));
}

static int real_execute(const char *path, char **argv)
{
    return result(execv(path, argv));
}

static int real_inherit(int fd, int on)
{
    return result(fcntl(fd, F_SETFD, on ? 0 : FD_CLOEXEC));
}

static int real_program(char *path, size_t room)
{
    return result(readlink("/proc/self/exe", path, room));
}

static int real_pair(int pair[2])
{
    return result(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
}

static int real_listen(int fd, int backlog)
{
    return result(listen(fd, backlog));
}

static int real_accept(int fd)
{
    return result(accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

static ssize_t real_receive(int fd, struct msghdr *m)
{
    ssize_t ret = recvmsg(fd, m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    return ret < 0 ? -errno : ret;
}

static ssize_t real_send(int fd, const struct msghdr *m)
{
    ssize_t ret = sendmsg(fd, m, MSG_DONTWAIT | MSG_NOSIGNAL);

    return ret < 0 ? -errno : ret;
}

static int real_shutdown(int fd)
{
    return shutdown(fd, SHUT_RDWR) < 0 ? -errno : 0;
}

static int real_socket_option(int fd, int option, int value)
{
    return result(setsockopt(fd, SOL_SOCKET, option, &value, sizeof(value)));
}

static int real_signals(const sigset_t *set)
{
    sigprocmask(SIG_BLOCK, set, NULL);
    return result(signalfd(-1, set, SFD_CLOEXEC | SFD_NONBLOCK));
}

static int real_random(void *to, size_t len)
{
    /* up to 256 bytes it is never interrupted */
    return getrandom(to, len, 0) == (ssize_t)len ? 0 : -EIO;
}

#define REAL_CALLS { \
    .fs_open = real_fs_open, \
    .fs_set = real_fs_set, \
    .fs_create = real_fs_create, \
    .fs_mount = real_fs_mount, \
    .tree_clone = real_tree_clone, \
    .tree_readonly = real_tree_readonly, \
    .unshare = real_unshare, \
    .dumpable = real_dumpable, \
    .open_at = real_open_at, \
    .write_text = real_write_text, \
    .replace = real_replace, \
    .memfd = real_memfd, \
    .chmod = real_chmod, \
    .seal = real_seal, \
    .stat = real_stat, \
    .fork = real_fork, \
    .wait = real_wait, \
    .execute = real_execute, \
    .inherit = real_inherit, \
    .program = real_program, \
    .pair = real_pair, \
    .listen = real_listen, \
    .accept = real_accept, \
    .receive = real_receive, \
    .send = real_send, \
    .shutdown = real_shutdown, \
    .socket_option = real_socket_option, \
    .signals = real_signals, \
    .random = real_random, \
}

const HostSys sys_real = REAL_CALLS;
HostSys sys = REAL_CALLS;
