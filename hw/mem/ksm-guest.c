/*
 * Guest RAM for whoever merges it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * With scope=host that is the kernel: its ksmd merges what is marked
 * MADV_MERGEABLE.  Leaves to others: properties (backends/hostmem-ksm.c),
 * statistics (ksm-stats.c).
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qemu/error-report.h"
#include "qemu/madvise.h"
#include "hw/mem/ksm-compat.h"
#include "hw/mem/ksm.h"
#include "system/hostmem-ksm.h"

struct KsmGuest {
    HostMemoryBackendKsm *backend;
    void *host;         /* where its memory is */
    size_t size;
    int refused;        /* errno of the kernel's refusal to merge, or 0 */
};

/* Does this kernel know MADV_MERGEABLE? */
static bool host_check(Error **errp)
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
    err = qemu_madvise(page, size, QEMU_MADV_MERGEABLE) < 0 ? errno : 0;
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

bool ksm_guest_check(MemoryKsmScope scope, Error **errp)
{
    if (scope != MEMORY_KSM_SCOPE_HOST) {
        error_setg(errp, "scope=%s is not available in this build",
                   MemoryKsmScope_str(scope));
        return false;
    }
    return host_check(errp);
}

/*
 * Both advices are given explicitly: unless -machine mem-merge=off, QEMU has
 * marked the memory already.
 */
static int host_advise(KsmGuest *guest)
{
    bool run = guest->backend->tuning.run;

    if (qemu_madvise(guest->host, guest->size,
                     run ? QEMU_MADV_MERGEABLE : QEMU_MADV_UNMERGEABLE) < 0) {
        return errno;
    }
    return 0;
}

KsmGuest *ksm_guest_new(HostMemoryBackendKsm *backend)
{
    MemoryRegion *mr = host_memory_backend_get_memory(MEMORY_BACKEND(backend));
    KsmGuest *guest = g_new0(KsmGuest, 1);

    guest->backend = backend;
    guest->host = memory_region_get_ram_ptr(mr);
    guest->size = memory_region_size(mr);
    guest->refused = host_advise(guest);
    if (guest->refused) {
        warn_report("the memory of %s will not be merged: %s",
                    object_get_canonical_path_component(OBJECT(backend)),
                    strerror(guest->refused));
    }
    return guest;
}

void ksm_guest_free(KsmGuest *guest)
{
    /* freeing merged memory needs no unmerging, which would need memory */
    g_free(guest);
}

bool ksm_guest_tune(KsmGuest *guest, Error **errp)
{
    guest->refused = host_advise(guest);
    if (guest->refused) {
        error_setg_errno(errp, guest->refused, "the kernel could not %s the "
                         "memory",
                         guest->backend->tuning.run ? "merge" : "unmerge");
        return false;
    }
    return true;
}

int ksm_guest_refused(const KsmGuest *guest)
{
    return guest->refused;
}
