/*
 * Helpers of the tests of memory-backend-ksm
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef TESTS_QTEST_KSM_HELPERS_H
#define TESTS_QTEST_KSM_HELPERS_H

#include "libqtest.h"

/*
 * True if the guest is an arm64 one.  Then tests/qtest/on-virt-system-aarch64
 * stands in for QEMU: it has -machine virt where a test says pc or q35.
 */
bool ksm_on_arm(void);

/* Where the guest's RAM begins. */
uint64_t ksm_ram_start(void);

typedef struct KsmRun {
    int status;         /* exit code, -1: by a signal */
    char *err;          /* what it wrote to stderr */
} KsmRun;

void ksm_run_free(KsmRun *run);
G_DEFINE_AUTOPTR_CLEANUP_FUNC(KsmRun, ksm_run_free)

/* A rule of a system call filter: madvise(_, len >= min_len, advice). */
typedef struct KsmDeny {
    int advice;
    uint32_t min_len;
    int err;
} KsmDeny;

/*
 * Runs QEMU with @args (split at spaces), and then a device that does not
 * exist: QEMU always exits, and says KSM_RUN_STARTED if it accepted all of
 * @args.  @deny: what the kernel refuses, or NULL.
 */
KsmRun *ksm_run(const char *args, const KsmDeny *deny);
#define KSM_RUN_STARTED "'no-such-device' is not a valid device model name"

/*
 * Starts QEMU under qtest in a mount namespace where @dir is
 * /sys/kernel/mm/ksm (NULL: there is none).  Needs root.
 */
QTestState *ksm_init_sysfs(const char *dir, const char *args);

/* A system call that the kernel refuses to QEMU. */
typedef struct KsmFault {
    int nr;
    unsigned arg;       /* when this argument ... */
#define KSM_FAULT_ANY 6u
    uint32_t value;     /* ... has this value; ANY: always */
    int err;
} KsmFault;

#define KSM_FAULT_OPTION "--fault"

/*
 * The command that runs QEMU with that fault: this test program with
 * KSM_FAULT_OPTION, whose main() must call ksm_fault_exec().
 */
char *ksm_fault_command(const KsmFault *fault);
int ksm_fault_exec(int argc, char **argv);
QTestState *ksm_init_fault(const KsmFault *fault, const char *args);

/* A VMA of the process, found by its size. */
typedef struct KsmVma {
    uintptr_t start;
    size_t resident;
    size_t lazy_free;
    char *flags;        /* " rd wr mr mg " */
} KsmVma;

bool ksm_vma_find(QTestState *qts, size_t size, KsmVma *vma);
bool ksm_vma_has(QTestState *qts, size_t size, const char *flag);

/* Where the guest's physical address is in QEMU. */
uintptr_t ksm_host_address(QTestState *qts, uint64_t addr);

/* VMAs in a range, and those of them with the flag. */
typedef struct KsmVmas {
    unsigned all;
    unsigned flagged;
} KsmVmas;

KsmVmas ksm_vmas_count(QTestState *qts, uintptr_t start, size_t size,
                       const char *flag);

/*
 * The answer to query-ksm-stats, the caller unrefs it; parts of it.  Names that
 * are deprecated must say what those say that replace them.
 */
QDict *ksm_stats(QTestState *qts);
QDict *ksm_stats_host(QDict *stats);
QDict *ksm_stats_backend(QDict *stats, const char *id);

/* The text of a reason of that kind in a "reasons" of @entry, or NULL. */
const char *ksm_reason(QDict *entry, const char *kind);

void ksm_qom_set(QTestState *qts, const char *id, const char *property,
                 const char *json);

/* The same, which must fail, with an error that has @message in it. */
void ksm_qom_set_fails(QTestState *qts, const char *id, const char *property,
                       const char *json, const char *message);

#endif /* TESTS_QTEST_KSM_HELPERS_H */
