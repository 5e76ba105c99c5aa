/*
 * The kernel's files about KSM and memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Reads /sys/kernel/mm/ksm, /proc/self/ksm_stat, /proc/self/smaps and
 * /proc/vmstat.  Values of a missing or unreadable file are not known, which is
 * no error.  Tests bring their own paths.  Leaves to others: the meaning of the
 * values (ksm-stats.c).
 */
#ifndef HW_MEM_KSM_KERNEL_H
#define HW_MEM_KSM_KERNEL_H

#define KSM_KERNEL_SYSFS "/sys/kernel/mm/ksm"
#define KSM_KERNEL_PROC "/proc/self"
#define KSM_KERNEL_VMSTAT "/proc/vmstat"

typedef struct KsmKernelValue {
    bool known;
    int64_t value;
} KsmKernelValue;

/* /sys/kernel/mm/ksm: the whole host. */
typedef struct KsmKernelHost {
    bool present;               /* the directory is there */
    bool may_start;             /* this process may write "run" */
    KsmKernelValue run;         /* 0 stopped, 1 running, 2 unmerged */
    KsmKernelValue pages_to_scan;
    KsmKernelValue sleep_millisecs;
    KsmKernelValue pages_shared;
    KsmKernelValue pages_sharing;
    KsmKernelValue pages_unshared;
    KsmKernelValue pages_volatile;
    KsmKernelValue pages_skipped;
    KsmKernelValue pages_scanned;
    KsmKernelValue full_scans;
    KsmKernelValue zero_pages;
    KsmKernelValue profit;      /* bytes, signed */
    KsmKernelValue lazy_reclaimed;  /* pages, since boot; not from sysfs */
} KsmKernelHost;

/* /proc/self/ksm_stat: this process. */
typedef struct KsmKernelProcess {
    KsmKernelValue rmap_items;
    KsmKernelValue merging_pages;
    KsmKernelValue zero_pages;
    KsmKernelValue profit;      /* bytes, signed */
} KsmKernelProcess;

/* A range of addresses of this process, in /proc/self/smaps. */
typedef struct KsmKernelRange {
    uintptr_t start;            /* in */
    size_t size;                /* in */
    bool known;                 /* smaps could be read */
    bool mergeable;             /* all of it is marked mergeable */
    KsmKernelValue merged;      /* bytes; Linux 6.7 */
    uint64_t resident;          /* bytes */
    uint64_t lazy_free;         /* bytes */
} KsmKernelRange;

void ksm_kernel_read_host(const char *sysfs, KsmKernelHost *host);
void ksm_kernel_read_vmstat(const char *vmstat, KsmKernelHost *host);
void ksm_kernel_read_process(const char *proc, KsmKernelProcess *process);
void ksm_kernel_read_ranges(const char *proc, KsmKernelRange *ranges,
                            unsigned n_ranges);

#endif
