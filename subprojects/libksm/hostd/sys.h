/*
 * sys: system calls of the daemon that the engine has no need of
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * As base/prim.h: one table of functions, so that tests can make each of them
 * fail.  0 or a count or a descriptor, or -errno.
 */
#ifndef HOSTD_SYS_H
#define HOSTD_SYS_H

#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>

typedef struct HostSys {
    /* a file system of its own */
    int (*fs_open)(const char *type);
    int (*fs_set)(int fs, const char *key, const char *value);
    int (*fs_create)(int fs);
    int (*fs_mount)(int fs);
    int (*tree_clone)(int mount);
    int (*tree_readonly)(int mount);
    int (*unshare)(int flags);
    int (*dumpable)(int on);
    /* files */
    int (*open_at)(int dir, const char *name, int flags, mode_t mode);
    int (*write_text)(const char *path, const char *text);
    int (*replace)(const char *path, const char *text);     /* as a whole */
    int (*memfd)(const char *name, unsigned flags);
    int (*chmod)(int fd, mode_t mode);
    int (*seal)(int fd, int seals);
    int (*stat)(int fd, struct stat *st);
    /* processes */
    pid_t (*fork)(void);
    int (*wait)(pid_t child);
    int (*execute)(const char *path, char **argv);
    int (*inherit)(int fd, int on);     /* does it outlive execute()? */
    int (*program)(char *path, size_t room);    /* what runs; its length */
    /* sockets; all of them do not wait and close on exec */
    int (*pair)(int pair[2]);           /* this one waits */
    int (*listen)(int fd, int backlog);
    int (*accept)(int fd);
    ssize_t (*receive)(int fd, struct msghdr *m);
    ssize_t (*send)(int fd, const struct msghdr *m);
    int (*shutdown)(int fd);            /* in both directions */
    int (*socket_option)(int fd, int option, int value);
    int (*signals)(const sigset_t *set);        /* a descriptor of them */
    /* chance, that is never weak */
    int (*random)(void *to, size_t len);
} HostSys;

extern HostSys sys;
extern const HostSys sys_real;

#endif
