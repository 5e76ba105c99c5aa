/*
 * Reads as from a file system that takes plain references to pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Direct I/O on NFS, 9p and ceph looks up a buffer's pages when it begins,
 * takes references that are no pins, and writes to those pages when the server
 * has answered, even if the buffer is mapped anew by then.  Few machines have
 * such a file system; this stands for one, between QEMU and the C library:
 * vmsplice() takes the same references.  A program cannot write through them,
 * but it can look: as long as it sees the guest's writes, the guest would see
 * its writes.
 */

#include "qemu/osdep.h"
#include "ksm-plain-read.h"
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>

/* QEMU's pread() has this name in the C library. */
ssize_t plain_pread(int fd, void *buf, size_t len, off_t at) asm("pread64");

static PlainRead *shared(void)
{
    const char *path = getenv(PLAIN_READ_ENV);
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *p = MAP_FAILED;

    if (fd >= 0) {
        p = mmap(NULL, sizeof(PlainRead), PROT_READ | PROT_WRITE, MAP_SHARED,
                 fd, 0);
        close(fd);
    }
    if (p == MAP_FAILED) {
        abort();
    }
    return p;
}

static void hold(PlainRead *read_state, void *buf)
{
    struct iovec iov = { buf, PLAIN_READ_LEN };
    int fds[2];

    if (pipe2(fds, O_CLOEXEC) < 0 ||
        vmsplice(fds[1], &iov, 1, 0) != PLAIN_READ_LEN) {
        abort();
    }
    __atomic_store_n(&read_state->held, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&read_state->release, __ATOMIC_ACQUIRE)) {
        g_usleep(1000);
    }
    if (read(fds[0], read_state->seen, PLAIN_READ_LEN) != PLAIN_READ_LEN) {
        abort();
    }
    close(fds[0]);
    close(fds[1]);
}

ssize_t plain_pread(int fd, void *buf, size_t len, off_t at)
{
    if (at == PLAIN_READ_OFFSET && len == PLAIN_READ_LEN) {
        hold(shared(), buf);
    }
    return syscall(SYS_pread64, fd, buf, len, at);
}
