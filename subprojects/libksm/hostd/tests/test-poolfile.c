/*
 * hostd tests: nobody but the daemon writes the pool
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Each way to write is tried through the descriptor that members have, as the
 * daemon's own user and, where we are root, as root and as another user.
 */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/mount.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <glib.h>

#include "base/page.h"
#include "base/prim.h"
#include "poolfile.h"
#include "sys.h"

#define BYTES   (UINT64_C(64) << 20)

typedef struct Way {
    const char *name;
    int (*try)(int fd, const char *path);   /* 0: it could be written */
} Way;

static int outcome(long ret)
{
    return ret < 0 ? -errno : 0;
}

static int try_write(int fd, const char *path)
{
    return outcome(pwrite(fd, "x", 1, 0));
}

static int try_truncate(int fd, const char *path)
{
    return outcome(ftruncate(fd, 0));
}

static int try_truncate_path(int fd, const char *path)
{
    return outcome(truncate(path, 0));
}

static int try_punch(int fd, const char *path)
{
    return outcome(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                             0, PAGE_BYTES));
}

static int try_map(int fd, const char *path)
{
    return mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
           == MAP_FAILED ? -errno : 0;
}

static int try_protect(int fd, const char *path)
{
    void *p = mmap(NULL, PAGE_BYTES, PROT_READ, MAP_SHARED, fd, 0);

    return outcome(mprotect(p, PAGE_BYTES, PROT_READ | PROT_WRITE));
}

static int try_remove(int fd, const char *path)
{
    void *p = mmap(NULL, PAGE_BYTES, PROT_READ, MAP_SHARED, fd, 0);

    return outcome(madvise(p, PAGE_BYTES, MADV_REMOVE));
}

static int try_reopen(int fd, const char *path)
{
    return outcome(open(path, O_RDWR));
}

static int try_reopen_trunc(int fd, const char *path)
{
    return outcome(open(path, O_RDONLY | O_TRUNC));
}

static int try_chmod(int fd, const char *path)
{
    return outcome(fchmod(fd, 0666));
}

static int try_setattr(int fd, const char *path)
{
    struct mount_attr attr = { .attr_clr = MOUNT_ATTR_RDONLY };

    return outcome(syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &attr,
                           sizeof(attr)));
}

static int try_remount(int fd, const char *path)
{
    return outcome(mount("", path, "", MS_REMOUNT | MS_BIND, 0));
}

static int try_clone(int fd, const char *path)
{
    struct mount_attr attr = { .attr_clr = MOUNT_ATTR_RDONLY };
    int tree = syscall(SYS_open_tree, fd, "", AT_EMPTY_PATH | OPEN_TREE_CLONE);

    if (tree < 0 || syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr,
                            sizeof(attr)) < 0) {
        return -errno;
    }
    return outcome(openat(tree, "", O_RDWR));
}

/* Punches through a private mapping, as pages of the file. */
static int try_remove_private(int fd, const char *path)
{
    void *p = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd,
                   0);

    return outcome(madvise(p, PAGE_BYTES, MADV_REMOVE));
}

static const Way ways[] = {
    { "write", try_write },
    { "truncate", try_truncate },
    { "truncate by path", try_truncate_path },
    { "punch", try_punch },
    { "map shared, writable", try_map },
    { "make a mapping writable", try_protect },
    { "remove by a mapping", try_remove },
    { "remove by a private mapping", try_remove_private },
    { "open anew", try_reopen },
    { "open anew and truncate", try_reopen_trunc },
    { "change the mode", try_chmod },
    { "make the mount writable", try_setattr },
    { "remount", try_remount },
    { "clone the mount", try_clone },
};

/* In a child: the number of the way that worked, from 1. */
static int attack(const PoolFile *f, uid_t uid)
{
    pid_t child = fork();
    int status;

    if (child == 0) {
        char path[64];

        prim.close(f->fd);      /* a member has none */
        if (uid && (setgroups(0, NULL) < 0 || setresgid(uid, uid, uid) < 0 ||
                    setresuid(uid, uid, uid) < 0)) {
            _exit(100);
        }
        g_snprintf(path, sizeof(path), "/proc/self/fd/%d", f->map_fd);
        for (unsigned i = 0; i < G_N_ELEMENTS(ways); i++) {
            if (ways[i].try(f->map_fd, path) == 0) {
                _exit(i + 1);
            }
        }
        _exit(0);
    }
    g_assert(child > 0 && waitpid(child, &status, 0) == child);
    g_assert(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void attacks(const PoolFile *f, uid_t uid)
{
    int way = attack(f, uid);

    if (way) {
        g_test_message("uid %u: %s", uid, ways[way - 1].name);
    }
    g_assert(way == 0);
}

static void daemon_writes(const PoolFile *f, uint64_t bytes)
{
    char page[PAGE_BYTES];
    char *p;

    g_assert(prim.truncate(f->fd, bytes) == 0);
    g_assert(prim.write(f->fd, "hello", 5, 0) == 5);
    g_assert(prim.allocate(f->fd, 8 * PAGE_BYTES, PAGE_BYTES) == 0);
    g_assert(prim.punch(f->fd, 8 * PAGE_BYTES, PAGE_BYTES) == 0);
    g_assert(pread(f->map_fd, page, PAGE_BYTES, 0) == PAGE_BYTES);
    g_assert(strcmp(page, "hello") == 0);
    p = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, f->map_fd,
             0);
    g_assert(p != MAP_FAILED);
    p[0] = 'j';
    g_assert(pread(f->map_fd, page, 1, 0) == 1 && page[0] == 'h');
    munmap(p, PAGE_BYTES);
}

static void finish(PoolFile *f)
{
    prim.close(f->fd);
    prim.close(f->map_fd);
}

static bool is_tmpfs(const PoolFile *f, const char *note)
{
    if (f->kind != POOLFILE_TMPFS) {
        g_test_skip(note);
        return false;
    }
    return true;
}

static void tmpfs_holds(PoolFile *f)
{
    daemon_writes(f, BYTES);
    attacks(f, 0);
    if (geteuid() == 0) {
        attacks(f, 1003);
    }
    g_assert(poolfile_may_give(f, 0));
    /* no more than it was made for */
    g_assert(prim.truncate(f->fd, 2 * BYTES) == 0);
    g_assert(prim.allocate(f->fd, 0, 2 * BYTES) == -ENOSPC);
}

static void test_tmpfs(void)
{
    g_autofree char *note = NULL;
    PoolFile f;

    g_assert(poolfile_make(&f, BYTES, &note) == 0);
    if (is_tmpfs(&f, note)) {
        g_assert(!note);
        tmpfs_holds(&f);
    }
    finish(&f);
}

static unsigned opened;

static int no_fs_open(const char *type)
{
    return opened++ ? sys_real.fs_open(type) : -EPERM;
}

/* In a user namespace, by a child. */
static void test_namespace(void)
{
    g_autofree char *note = NULL;
    PoolFile f;

    opened = 0;
    sys.fs_open = no_fs_open;
    g_assert(poolfile_make(&f, BYTES, &note) == 0);
    sys = sys_real;
    if (is_tmpfs(&f, note)) {
        tmpfs_holds(&f);
    }
    finish(&f);
}

/* The same, by a user who is nothing else. */
static void test_nobody(void)
{
    pid_t child;
    int status;

    if (geteuid() != 0) {
        g_test_skip("test_tmpfs has done it: this is not root");
        return;
    }
    child = fork();
    if (child == 0) {
        char *note = NULL;
        PoolFile f;

        if (setgroups(0, NULL) < 0 || setresgid(1003, 1003, 1003) < 0 ||
            setresuid(1003, 1003, 1003) < 0) {
            _exit(100);
        }
        g_assert(poolfile_make(&f, BYTES, &note) == 0);
        if (f.kind != POOLFILE_TMPFS) {
            _exit(99);
        }
        daemon_writes(&f, BYTES);
        attacks(&f, 0);
        _exit(0);
    }
    g_assert(child > 0 && waitpid(child, &status, 0) == child);
    g_assert(WIFEXITED(status));
    if (WEXITSTATUS(status) == 99) {
        g_test_skip("users may not make namespaces here");
        return;
    }
    g_assert(WEXITSTATUS(status) == 0);
}

static int never_fs_open(const char *type)
{
    return -ENOSYS;
}

/* A memfd: others cannot write it; root and its user are not given it. */
static void test_memfd(void)
{
    g_autofree char *note = NULL;
    PoolFile f;

    sys.fs_open = never_fs_open;
    g_assert(poolfile_make(&f, BYTES, &note) == 0);
    sys = sys_real;
    g_assert(f.kind == POOLFILE_MEMFD);
    g_assert(strstr(note, "root or of this user are refused"));
    daemon_writes(&f, BYTES);
    g_assert(!poolfile_may_give(&f, 0));
    g_assert(!poolfile_may_give(&f, geteuid()));
    g_assert(poolfile_may_give(&f, 1003));
    if (geteuid() == 0) {
        attacks(&f, 1003);
    } else {
        g_test_skip("not root: cannot be another user");
    }
    finish(&f);
}

static unsigned calls, failing;

static bool fails(void)
{
    return ++calls == failing;
}

static int bad_fs_open(const char *t)
{
    return fails() ? -ENOSYS : sys_real.fs_open(t);
}

static int bad_fs_set(int fs, const char *key, const char *value)
{
    return fails() ? -ENOMEM : sys_real.fs_set(fs, key, value);
}

static int bad_fs_create(int fs)
{
    return fails() ? -ENOMEM : sys_real.fs_create(fs);
}

static int bad_fs_mount(int fs)
{
    return fails() ? -ENOMEM : sys_real.fs_mount(fs);
}

static int bad_tree_clone(int mount)
{
    return fails() ? -EINVAL : sys_real.tree_clone(mount);
}

static int bad_tree_readonly(int mount)
{
    return fails() ? -ENOSYS : sys_real.tree_readonly(mount);
}

static int bad_open_at(int dir, const char *name, int flags, mode_t mode)
{
    return fails() ? -ENFILE : sys_real.open_at(dir, name, flags, mode);
}

static unsigned open_descriptors(void)
{
    g_autoptr(GDir) dir = g_dir_open("/proc/self/fd", 0, NULL);
    unsigned n = 0;

    while (g_dir_read_name(dir)) {
        n++;
    }
    return n;
}

/* Each call fails once: there is a memfd, and no descriptor is left. */
static void test_failures(void)
{
    unsigned before = open_descriptors(), n = 0;
    PoolFileKind kind;

    do {
        g_autofree char *note = NULL;
        PoolFile f;

        sys.fs_open = bad_fs_open;
        sys.fs_set = bad_fs_set;
        sys.fs_create = bad_fs_create;
        sys.fs_mount = bad_fs_mount;
        sys.tree_clone = bad_tree_clone;
        sys.tree_readonly = bad_tree_readonly;
        sys.open_at = bad_open_at;
        calls = 0;
        failing = ++n;
        g_assert(poolfile_make(&f, BYTES, &note) == 0);
        sys = sys_real;
        kind = f.kind;
        g_assert((kind == POOLFILE_MEMFD) == (note != NULL));
        finish(&f);
        g_assert(open_descriptors() == before);
    } while (kind == POOLFILE_MEMFD && n < 20);
    if (n == 20) {
        g_test_skip("no tmpfs can be mounted here");
        return;
    }
    g_assert(n >= 10);    /* that many calls it takes */
}

static int bad_pair(int pair[2])
{
    return -EMFILE;
}

static pid_t bad_fork(void)
{
    return -EAGAIN;
}

static int bad_unshare(int flags)
{
    return -EUSERS;
}

static int bad_write_text(const char *path, const char *text)
{
    return -EACCES;
}

static ssize_t bad_receive(int fd, struct msghdr *m)
{
    return -ENOMEM;
}

static void no_child_with(unsigned before, const char *why)
{
    g_autofree char *note = NULL;
    PoolFile f;

    opened = 0;
    sys.fs_open = no_fs_open;
    g_assert(poolfile_make(&f, BYTES, &note) == 0);
    sys = sys_real;
    g_assert(f.kind == POOLFILE_MEMFD);
    g_assert(strstr(note, why));
    finish(&f);
    g_assert(open_descriptors() == before);
}

/* No namespace to mount in, for all the reasons that there may be. */
static void test_no_child(void)
{
    unsigned before = open_descriptors();

    sys.pair = bad_pair;
    no_child_with(before, strerror(EMFILE));
    sys.fork = bad_fork;
    no_child_with(before, strerror(EAGAIN));
    sys.unshare = bad_unshare;
    no_child_with(before, strerror(EUSERS));
    sys.write_text = bad_write_text;
    no_child_with(before, strerror(EACCES));
    sys.receive = bad_receive;
    no_child_with(before, strerror(ENOMEM));
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/poolfile/tmpfs", test_tmpfs);
    g_test_add_func("/poolfile/namespace", test_namespace);
    g_test_add_func("/poolfile/nobody", test_nobody);
    g_test_add_func("/poolfile/memfd", test_memfd);
    g_test_add_func("/poolfile/failures", test_failures);
    g_test_add_func("/poolfile/no-child", test_no_child);
    return g_test_run();
}
