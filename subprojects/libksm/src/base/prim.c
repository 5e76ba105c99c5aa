/*
 * prim: every system call of the engine
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Thin: one function per call, errno kept, nothing retried (the caller knows
 * what a retry means).  Kernel interfaces newer than the distributions' headers
 * are declared here.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <glib.h>

#include "base/prim.h"

/* Linux 6.8 */
struct move_arg {
    uint64_t dst, src, len, mode;
    int64_t moved;
};
#define IOC_MOVE            _IOWR(UFFDIO, 0x05, struct move_arg)
#define MOVE_DONTWAKE       1u

/* Linux 6.6 */
struct poison_arg {
    uint64_t addr, len, mode;
    int64_t updated;
};
#define IOC_POISON          _IOWR(UFFDIO, 0x08, struct poison_arg)
#define POISON_DONTWAKE     1u

/* Linux 6.7 */
struct scan_arg {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t inverted, mask, anyof, ret;
};
#define IOC_SCAN            _IOWR('f', 16, struct scan_arg)
#define SCAN_WP_MATCHING    1u

/* Linux 6.1: /dev/userfaultfd */
#define IOC_USERFAULTFD_NEW _IO(0xAA, 0x00)

/* Linux 5.7 */
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

/* Linux 6.4 */
#ifndef PR_GET_MEMORY_MERGE
#define PR_GET_MEMORY_MERGE 68
#endif

#define MPOL_DEFAULT_MODE   0
#define MPOL_PREFERRED_MODE 1
#define MPOL_BY_ADDR        2u

static int result(long ret)
{
    return ret < 0 ? -errno : (int)ret;
}

static void *real_map(void *addr, size_t len, int prot, int flags, int fd,
                      off_t offset)
{
#ifdef KSM_TSAN
    /* ThreadSanitizer takes mmap() over a range for a write to it */
    void *p = flags & MAP_FIXED
              ? (void *)syscall(SYS_mmap, addr, len, prot, flags, fd, offset)
              : mmap(addr, len, prot, flags, fd, offset);
#else
    void *p = mmap(addr, len, prot, flags, fd, offset);
#endif

    return p == MAP_FAILED ? NULL : p;
}

static int real_unmap(void *addr, size_t len)
{
    return result(munmap(addr, len));
}

static int real_remap(void *from, size_t len, void *to)
{
    void *p = mremap(from, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, to);

    return p == MAP_FAILED ? -errno : 0;
}

static void *real_lengthen(void *from, size_t len, size_t want, void *at)
{
    void *p = mremap(from, len, want,
                     MREMAP_MAYMOVE | (at ? MREMAP_FIXED : 0), at);

    return p == MAP_FAILED ? NULL : p;
}

static void *real_split(void *from, size_t len)
{
    /* not mremap(): the C library may pass no address, and the kernel looks */
    long p = syscall(SYS_mremap, from, len, len,
                     MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);

    return p == -1 ? NULL : (void *)p;
}

static int real_advise(void *addr, size_t len, int advice)
{
    return result(madvise(addr, len, advice));
}

static int real_merge_any(void)
{
    return prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0) > 0;
}

static int real_policy_get(void *addr, int *mode, unsigned long *mask,
                           size_t bits)
{
    return result(syscall(SYS_get_mempolicy, mode, mask, bits, addr,
                          MPOL_BY_ADDR));
}

static int real_policy_set(void *addr, size_t len, int mode,
                           const unsigned long *mask, size_t bits)
{
    return result(syscall(SYS_mbind, addr, len, mode, mask, bits, 0));
}

static int real_prefer_node(int node)
{
    unsigned long mask[16] = { 0 };
    size_t bits = sizeof(mask) * 8;

    if (node < 0 || (size_t)node >= bits) {
        return result(syscall(SYS_set_mempolicy, MPOL_DEFAULT_MODE, NULL, 0));
    }
    mask[node / 64] |= 1ul << (node % 64);
    return result(syscall(SYS_set_mempolicy, MPOL_PREFERRED_MODE, mask, bits));
}

static int real_thread_policy_get(int *mode, unsigned long *mask, size_t bits)
{
    return result(syscall(SYS_get_mempolicy, mode, mask, bits, NULL, 0));
}

static int real_thread_policy_set(int mode, const unsigned long *mask,
                                  size_t bits)
{
    return result(syscall(SYS_set_mempolicy, mode, mask, bits));
}

static int real_memfd(const char *name)
{
    return result(memfd_create(name, MFD_CLOEXEC));
}

static int real_memfd_sealable(const char *name)
{
    return result(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
}

static int real_seal_write(int fd)
{
    return result(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE));
}

static int real_open_read(const char *path)
{
    return result(open(path, O_RDONLY | O_CLOEXEC));
}

static int real_close(int fd)
{
    return result(close(fd));
}

static int real_truncate(int fd, off_t size)
{
    return result(ftruncate(fd, size));
}

static ssize_t real_write(int fd, const void *buf, size_t len, off_t offset)
{
    ssize_t ret = pwrite(fd, buf, len, offset);

    return ret < 0 ? -errno : ret;
}

static ssize_t real_read(int fd, void *buf, size_t len)
{
    ssize_t ret = read(fd, buf, len);

    return ret < 0 ? -errno : ret;
}

static ssize_t real_read_at(int fd, void *buf, size_t len, off_t offset)
{
    ssize_t ret = pread(fd, buf, len, offset);

    return ret < 0 ? -errno : ret;
}

static int real_punch(int fd, off_t offset, off_t len)
{
    return result(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                            offset, len));
}

static int real_allocate(int fd, off_t offset, off_t len)
{
    return result(fallocate(fd, FALLOC_FL_KEEP_SIZE, offset, len));
}

static int real_connect(const char *path)
{
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    int fd, ret;

    if (strlen(path) >= sizeof(name.sun_path)) {
        return -ENAMETOOLONG;
    }
    strcpy(name.sun_path, path);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return -errno;
    }
    ret = result(connect(fd, (struct sockaddr *)&name, sizeof(name)));
    if (ret < 0) {
        close(fd);
        return ret;
    }
    return fd;
}

static int real_send(int fd, const void *message, size_t len)
{
    return result(send(fd, message, len, MSG_DONTWAIT | MSG_NOSIGNAL));
}

/* @fds: room for @n_fds; the others are closed. */
static void fds_take(struct msghdr *msg, int *fds, unsigned n_fds)
{
    unsigned got = 0;

    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

        for (size_t i = 0; c->cmsg_level == SOL_SOCKET &&
                           c->cmsg_type == SCM_RIGHTS && i < n; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(c) + i * sizeof(fd), sizeof(fd));
            if (got < n_fds) {
                fds[got++] = fd;
            } else {
                close(fd);
            }
        }
    }
}

static ssize_t real_receive(int fd, void *message, size_t len, int *fds,
                            unsigned n_fds)
{
    char control[CMSG_SPACE(8 * sizeof(int))];
    struct iovec iov = { message, len };
    struct msghdr msg = {
        .msg_iov = &iov,
        .msg_iovlen = 1,
        .msg_control = control,
        .msg_controllen = sizeof(control),
    };
    ssize_t n;

    for (unsigned i = 0; i < n_fds; i++) {
        fds[i] = -1;
    }
    n = recvmsg(fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0) {
        return -errno;
    }
    fds_take(&msg, fds, n_fds);
    return msg.msg_flags & MSG_TRUNC ? -EMSGSIZE : n;
}

static int real_uffd(void)
{
    int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    int dev;

    if (fd >= 0 || errno != EPERM) {
        return result(fd);
    }
    dev = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    if (dev < 0) {
        return -EPERM;
    }
    fd = ioctl(dev, IOC_USERFAULTFD_NEW, O_CLOEXEC | O_NONBLOCK);
    fd = result(fd);
    close(dev);
    return fd;
}

static int real_uffd_api(int fd, uint64_t features)
{
    struct uffdio_api api = { .api = UFFD_API, .features = features };

    return result(ioctl(fd, UFFDIO_API, &api));
}

static int real_uffd_register(const UffdRange *range, unsigned mode)
{
    struct uffdio_register reg = {
        .range = { (uintptr_t)range->addr, range->len },
        .mode = mode,
    };

    return result(ioctl(range->fd, UFFDIO_REGISTER, &reg));
}

static int real_uffd_unregister(const UffdRange *range)
{
    struct uffdio_range r = { (uintptr_t)range->addr, range->len };

    return result(ioctl(range->fd, UFFDIO_UNREGISTER, &r));
}

static int real_uffd_wake(const UffdRange *range)
{
    struct uffdio_range r = { (uintptr_t)range->addr, range->len };

    return result(ioctl(range->fd, UFFDIO_WAKE, &r));
}

static int real_uffd_protect(const UffdRange *range, bool on)
{
    struct uffdio_writeprotect wp = {
        .range = { (uintptr_t)range->addr, range->len },
        .mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0,
    };

    return result(ioctl(range->fd, UFFDIO_WRITEPROTECT, &wp));
}

static int real_uffd_move(int fd, void *to, void *from, size_t len,
                          size_t *done)
{
    struct move_arg arg = {
        .dst = (uintptr_t)to,
        .src = (uintptr_t)from,
        .len = len,
        .mode = MOVE_DONTWAKE,
    };
    int ret = result(ioctl(fd, IOC_MOVE, &arg));

    *done = arg.moved > 0 ? arg.moved : 0;
    return ret;
}

static int real_uffd_copy(int fd, void *to, const void *from, size_t len,
                          size_t *done)
{
    struct uffdio_copy arg = {
        .dst = (uintptr_t)to,
        .src = (uintptr_t)from,
        .len = len,
        .mode = UFFDIO_COPY_MODE_DONTWAKE,
    };
    int ret = result(ioctl(fd, UFFDIO_COPY, &arg));

    *done = arg.copy > 0 ? arg.copy : 0;
    return ret;
}

static int real_uffd_poison(int fd, void *addr, size_t len)
{
    struct poison_arg arg = {
        .addr = (uintptr_t)addr,
        .len = len,
        .mode = POISON_DONTWAKE,
    };

    return result(ioctl(fd, IOC_POISON, &arg));
}

static ssize_t real_pagemap(PmScan *scan)
{
    struct scan_arg arg = {
        .size = sizeof(arg),
        .flags = scan->protect ? SCAN_WP_MATCHING : 0,
        .start = scan->start,
        .end = scan->end,
        .vec = (uintptr_t)scan->vec,
        .vec_len = scan->vec_len,
        .max_pages = scan->max_pages,
        .mask = scan->all,
        .anyof = scan->any,
        .ret = scan->tell,
    };
    ssize_t ret = ioctl(scan->fd, IOC_SCAN, &arg);

    if (ret < 0) {
        return -errno;
    }
    scan->walk_end = arg.walk_end;
    return ret;
}

static void real_signals_block(sigset_t *old)
{
    sigset_t all;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, old);
}

static void real_signals_restore(const sigset_t *old)
{
    pthread_sigmask(SIG_SETMASK, old, NULL);
}

/* By number: musl's functions fail, since they are of threads. */
static int real_sched_get(void)
{
    int policy = syscall(SYS_sched_getscheduler, 0);

    return policy < 0 ? -errno : policy;
}

static int real_sched_set(int policy)
{
    int class = policy & ~SCHED_RESET_ON_FORK;
    struct sched_param param = {
        .sched_priority = class == SCHED_FIFO || class == SCHED_RR,
    };

    return syscall(SYS_sched_setscheduler, 0, policy, &param) < 0 ? -errno : 0;
}

static int real_slack_get(void)
{
    int ns = prctl(PR_GET_TIMERSLACK);

    return ns < 0 ? -errno : ns;
}

static int real_slack_set(int ns)
{
    return prctl(PR_SET_TIMERSLACK, (unsigned long)ns) < 0 ? -errno : 0;
}

static int real_thread(pthread_t *thread, void *(*run)(void *), void *opaque)
{
    sigset_t others, old;
    int err;

    sigfillset(&others);
    sigdelset(&others, SIGSEGV);
    sigdelset(&others, SIGBUS);
    sigdelset(&others, SIGILL);
    sigdelset(&others, SIGFPE);
    pthread_sigmask(SIG_BLOCK, &others, &old);
    err = pthread_create(thread, NULL, run, opaque);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!err) {
        pthread_setname_np(*thread, "ksm-helper");
    }
    return -err;
}

static int real_thread_id(void)
{
    return syscall(SYS_gettid);
}

/* SIZE_MAX: none. */
static size_t limit_of(int resource)
{
    struct rlimit limit;

    if (getrlimit(resource, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY) {
        return SIZE_MAX;
    }
    return limit.rlim_cur;
}

static size_t real_file_limit(void)
{
    return limit_of(RLIMIT_FSIZE);
}

static size_t real_realtime_limit(void)
{
    return limit_of(RLIMIT_RTTIME);
}

static size_t real_memory_limit(void)
{
    return MIN(limit_of(RLIMIT_AS), limit_of(RLIMIT_DATA));
}

static size_t real_page_size(void)
{
    return getauxval(AT_PAGESZ);
}

/* What this was compiled for: a kernel may say the wider one of two. */
static const char *real_machine(void)
{
#if defined(__x86_64__) && defined(__LP64__)
    return "x86_64";
#elif defined(__aarch64__)
    return "aarch64";
#elif defined(__s390x__)
    return "s390x";
#elif defined(__powerpc64__)
    return "ppc64";
#elif defined(__riscv)
    return "riscv";
#elif defined(__loongarch__)
    return "loongarch";
#else
    return "this architecture";
#endif
}

static uint64_t read_clock(clockid_t id)
{
    struct timespec ts;

    clock_gettime(id, &ts);
    return ts.tv_sec * UINT64_C(1000000000) + ts.tv_nsec;
}

static uint64_t real_cpu_ns(void)
{
    return read_clock(CLOCK_THREAD_CPUTIME_ID);
}

static uint64_t real_now_ns(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

static uint64_t real_random(void)
{
    uint64_t value;

    if (getrandom(&value, sizeof(value), GRND_NONBLOCK) != sizeof(value)) {
        value = ((uint64_t)g_random_int() << 32) | g_random_int();
    }
    return value;
}

static void real_pause(unsigned us)
{
    g_usleep(us);
}

#define REAL_CALLS { \
    .map = real_map, \
    .unmap = real_unmap, \
    .remap = real_remap, \
    .lengthen = real_lengthen, \
    .split = real_split, \
    .advise = real_advise, \
    .merge_any = real_merge_any, \
    .policy_get = real_policy_get, \
    .policy_set = real_policy_set, \
    .prefer_node = real_prefer_node, \
    .thread_policy_get = real_thread_policy_get, \
    .thread_policy_set = real_thread_policy_set, \
    .memfd = real_memfd, \
    .memfd_sealable = real_memfd_sealable, \
    .seal_write = real_seal_write, \
    .open_read = real_open_read, \
    .close = real_close, \
    .truncate = real_truncate, \
    .write = real_write, \
    .read = real_read, \
    .read_at = real_read_at, \
    .punch = real_punch, \
    .allocate = real_allocate, \
    .connect = real_connect, \
    .send = real_send, \
    .receive = real_receive, \
    .uffd = real_uffd, \
    .uffd_api = real_uffd_api, \
    .uffd_register = real_uffd_register, \
    .uffd_unregister = real_uffd_unregister, \
    .uffd_wake = real_uffd_wake, \
    .uffd_protect = real_uffd_protect, \
    .uffd_move = real_uffd_move, \
    .uffd_copy = real_uffd_copy, \
    .uffd_poison = real_uffd_poison, \
    .pagemap = real_pagemap, \
    .signals_block = real_signals_block, \
    .signals_restore = real_signals_restore, \
    .sched_get = real_sched_get, \
    .sched_set = real_sched_set, \
    .slack_get = real_slack_get, \
    .slack_set = real_slack_set, \
    .thread_id = real_thread_id, \
    .thread = real_thread, \
    .file_limit = real_file_limit, \
    .realtime_limit = real_realtime_limit, \
    .memory_limit = real_memory_limit, \
    .page_size = real_page_size, \
    .machine = real_machine, \
    .cpu_ns = real_cpu_ns, \
    .now_ns = real_now_ns, \
    .random = real_random, \
    .pause = real_pause, \
}

const KsmPrim prim_real = REAL_CALLS;
KsmPrim prim = REAL_CALLS;

unsigned prim_kernel(void)
{
    g_autofree char *text = prim_read_file("/proc/sys/kernel/osrelease", NULL);
    unsigned major, minor;

    return text && sscanf(text, "%u.%u", &major, &minor) == 2
           ? major * 1000 + minor : 0;
}

char *prim_read_file(const char *path, size_t *len)
{
    g_autoptr(GString) text = g_string_new(NULL);
    char buf[4096];
    int fd = prim.open_read(path);
    ssize_t n;

    if (fd < 0) {
        errno = -fd;
        return NULL;
    }
    while ((n = prim.read(fd, buf, sizeof(buf))) > 0) {
        g_string_append_len(text, buf, n);
    }
    prim.close(fd);
    if (n < 0) {
        errno = -n;
        return NULL;
    }
    if (len) {
        *len = text->len;
    }
    return g_string_free(g_steal_pointer(&text), FALSE);
}
