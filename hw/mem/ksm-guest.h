/*
 * Guest RAM for whoever merges it: what query-ksm-stats needs of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef HW_MEM_KSM_GUEST_H
#define HW_MEM_KSM_GUEST_H

#include "hw/mem/ksm.h"
#include "libksm.h"

/* What there is to say of RAM that libksm merges. */
typedef struct KsmGuestInfo {
    MemoryKsmState state;
    const char *inhibited;      /* why, if there is a text; else NULL */
    const char *failure;        /* why it was not given to libksm, or NULL */
    bool has_stats;             /* of this RAM and its engine, if it was */
    KsmStats region;
    KsmStats engine;
    bool has_log;
    uint64_t log_time;          /* ns of CPU that QEMU's dirty log took */
} KsmGuestInfo;

/* The RAM is merged by libksm: scopes zero and vm. */
bool ksm_guest_is_ours(const KsmGuest *guest);

void ksm_guest_info(KsmGuest *guest, KsmGuestInfo *info);

/*
 * Scopes zero and vm: the guest does not need the content of the range any
 * more.  0, or -errno: then it has to be discarded.
 */
int ksm_guest_hint(KsmGuest *guest, uint64_t start, size_t length);

/*
 * query-ksm-stats, in a coroutine or not.  The caller frees it.  The BQL is
 * not held all the time.
 */
MemoryKsmStats *ksm_stats_query(void);

/*
 * Marks the RAM for the kernel's KSM, or the contrary.  errno of the kernel's
 * refusal, or 0.
 */
int ksm_host_advise(void *host, size_t size, bool mergeable);

/* Does this kernel know MADV_MERGEABLE? */
bool ksm_host_check(Error **errp);

/* See ksm_guests_bypass_begin(). */
bool ksm_bypassed(void);

/* A device may have RAM pinned, or have been told where it is. */
bool ksm_pinned(void);

/* NULL, or why RAM must be left alone whoever it belongs to; static text. */
const char *ksm_inhibited(void);

/* NULL, or why RAM of this machine must be left alone; static text. */
const char *ksm_inhibited_by_cpus(void);

#endif /* HW_MEM_KSM_GUEST_H */
