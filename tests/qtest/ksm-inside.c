/*
 * The part of a test inside QEMU
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Loaded into QEMU (LD_PRELOAD).  Only the kernel may send the signal of a
 * memory error to another process, and only here a test sees which thread reads
 * a file, and that others go on meanwhile.  It also plays a host with pages of
 * another size.
 */

#include "qemu/osdep.h"
#include "ksm-inside.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>

/* QEMU's fopen() has this name in the C library. */
FILE *inside_fopen(const char *path, const char *mode) asm("fopen64");
int inside_page_size(void) asm("getpagesize");

static KsmInside *inside;

/*
 * The kernel lets a thread send itself what only the kernel sends.  It tells
 * the thread that asked for it early (kill_proc() in mm/memory-failure.c),
 * QEMU's main thread.  Sent to the process it would go to a vCPU, as the main
 * thread blocks it; and a vCPU that has not handled one error dies of the next.
 */
static void error_report_now(uint64_t addr)
{
    siginfo_t info = {
        .si_signo = SIGBUS,
        .si_code = BUS_MCEERR_AO,
        .si_addr = (void *)(uintptr_t)addr,
        .si_addr_lsb = 12,
    };

    if (syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), SIGBUS,
                &info)) {
        abort();
    }
}

static void __attribute__((constructor)) inside_init(void)
{
    const char *path = getenv(KSM_INSIDE_ENV);
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;

    if (fd < 0) {
        return;
    }
    inside = mmap(NULL, sizeof(*inside), PROT_READ | PROT_WRITE, MAP_SHARED,
                  fd, 0);
    close(fd);
    if (inside == MAP_FAILED) {
        abort();
    }
}

static void smaps_opened(void)
{
    bool main_thread = syscall(SYS_gettid) == getpid();

    if (main_thread && inside->error_at) {
        error_report_now(inside->error_at);
        inside->error_at = 0;
    }
    __atomic_fetch_add(main_thread ? &inside->opened_by_main
                                   : &inside->opened_by_others, 1,
                       __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&inside->held, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&inside->hold, __ATOMIC_ACQUIRE)) {
        g_usleep(1000);
    }
    __atomic_fetch_sub(&inside->held, 1, __ATOMIC_SEQ_CST);
}

FILE *inside_fopen(const char *path, const char *mode)
{
    FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, "fopen64");

    if (inside && g_str_equal(path, "/proc/self/smaps")) {
        smaps_opened();
    }
    return real(path, mode);
}

int inside_page_size(void)
{
    const char *size = getenv(KSM_INSIDE_PAGE_ENV);

    return size ? atoi(size) : sysconf(_SC_PAGE_SIZE);
}
