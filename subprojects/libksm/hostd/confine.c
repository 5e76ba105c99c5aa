/*
 * confine: the daemon gives up what it needs no more
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <linux/capability.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <glib.h>

#include "confine.h"

#ifdef HAVE_SECCOMP
#include <seccomp.h>
#endif

static void complain(const char *what, int error)
{
    fprintf(stderr, "ksm-poold: %s: %s; goes on without that\n", what,
            strerror(error));
}

static void drop_capabilities(void)
{
    struct __user_cap_header_struct head = {
        .version = _LINUX_CAPABILITY_VERSION_3,
    };
    struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = { 0 };

    for (unsigned i = 0; prctl(PR_CAPBSET_READ, i, 0, 0, 0) >= 0; i++) {
        /* only who may change it has anything in it to be dropped */
        prctl(PR_CAPBSET_DROP, i, 0, 0, 0);
    }
    if (syscall(SYS_capset, &head, none) < 0) {
        complain("capabilities cannot be dropped", errno);
    }
}

#ifdef HAVE_SECCOMP
static const char *const allowed[] = {
    /* files and memory */
    "brk", "close", "dup", "fallocate", "fcntl", "fstat", "ftruncate",
    "getdents64", "ioctl", "lseek", "madvise", "memfd_create", "mmap",
    "mprotect", "mremap", "munmap", "newfstatat", "openat", "pread64",
    "pwrite64", "read", "readlink", "readlinkat", "stat", "statx", "lstat",
    "umask", "unlink", "unlinkat", "write", "writev", "get_mempolicy",
    "set_mempolicy",
    /* sockets, but for socket(); the event loop */
    "accept4", "bind", "connect", "eventfd2", "getsockopt", "listen", "poll",
    "ppoll", "recvmsg", "sendmsg", "sendto", "setsockopt", "shutdown", "signalfd4",
    /* time, signals, itself */
    "clock_gettime", "clock_nanosleep", "exit", "exit_group", "futex",
    "getegid", "geteuid", "getgid", "getpid", "getrandom", "gettid",
    "gettimeofday", "getuid", "nanosleep", "prctl", "restart_syscall",
    "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sched_yield", "tgkill",
    /* a successor's beginning */
    "access", "arch_prctl", "capset", "execve", "faccessat", "faccessat2",
    "getcwd", "prlimit64", "rseq", "sched_getaffinity", "seccomp",
    "set_robust_list", "set_tid_address", "sigaltstack", "sysinfo", "uname",
};

static int filter_fill(scmp_filter_ctx ctx)
{
    int ret = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(socket), 1,
                               SCMP_A0(SCMP_CMP_EQ, AF_UNIX));

    for (unsigned i = 0; i < G_N_ELEMENTS(allowed) && ret == 0; i++) {
        int call = seccomp_syscall_resolve_name(allowed[i]);

        /* not every architecture has each of them */
        if (call >= 0) {
            ret = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, call, 0);
        }
    }
    return ret;
}

static void filter_calls(void)
{
    scmp_filter_ctx ctx = seccomp_init(SCMP_ACT_ERRNO(EPERM));
    int ret = ctx ? filter_fill(ctx) : -ENOMEM;

    if (ret == 0) {
        ret = seccomp_load(ctx);
    }
    if (ret < 0) {
        complain("system calls cannot be filtered", -ret);
    }
    seccomp_release(ctx);
}
#else
static void filter_calls(void)
{
    complain("built without libseccomp: system calls are not filtered",
             ENOSYS);
}
#endif

void confine_hide(void)
{
    if (prctl(PR_SET_DUMPABLE, 0) < 0) {
        complain("memory cannot be hidden from the daemon's user", errno);
    }
}

void confine(Confine how)
{
    drop_capabilities();
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0) {
        complain("privileges may be gained again", errno);
        return;     /* then no filter may be loaded either */
    }
    if (how == CONFINE_FIRST) {
        filter_calls();
    }
}
