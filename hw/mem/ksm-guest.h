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

#endif /* HW_MEM_KSM_GUEST_H */
