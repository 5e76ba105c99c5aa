/*
 * scope=host: guest RAM for the host's group, or for the kernel's KSM
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <sys/un.h>
#include "qapi/error.h"
#include "qemu/madvise.h"
#include "ksm-host.h"
#include "libksm.h"

/* A file alone says nothing: a daemon that was killed leaves its socket. */
int ksm_host_connect(const char *path)
{
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    /* a daemon that is too busy to accept is one, too */
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int err;

    if (fd < 0) {
        return errno;
    }
    /* too long: nobody listens there */
    g_strlcpy(addr.sun_path, path, sizeof(addr.sun_path));
    err = connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0 ||
          errno == EAGAIN ? 0 : errno;
    close(fd);
    return err;
}

int ksm_host_merge(void *host, size_t size)
{
    return qemu_madvise(host, size, QEMU_MADV_MERGEABLE) < 0 ? errno : 0;
}

int ksm_host_unmerge(void *host, size_t size)
{
    return RETRY_ON_EINTR(qemu_madvise(host, size, QEMU_MADV_UNMERGEABLE)) < 0
           ? errno : 0;
}

bool ksm_host_check(Error **errp)
{
    ERRP_GUARD();
    size_t size = qemu_real_host_page_size();
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int err;

    if (page == MAP_FAILED) {
        error_setg_errno(errp, errno, "cannot map a page");
        return false;
    }
    err = ksm_host_merge(page, size);
    munmap(page, size);
    if (err) {
        error_setg_errno(errp, err, "this kernel cannot merge memory, which "
                         "scope=host needs");
        error_append_hint(errp, "Use a kernel with CONFIG_KSM=y, or "
                          "memory-backend-ram.\n");
        return false;
    }
    return true;
}
