/*
 * The RAM of a memory-backend-ksm, for query-ksm-stats and the balloon
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef HW_MEM_KSM_GUEST_H
#define HW_MEM_KSM_GUEST_H

#include "hw/mem/ksm.h"
#include "libksm.h"
#include "qapi/qapi-types-ksm-common.h"

/* All guests, each with a reference.  The caller frees the array. */
GPtrArray *ksm_guests_get(void);

/* Only references keep it. */
bool ksm_guest_is_deleted(const KsmGuest *guest);

/* NULL: there is none with that id. */
KsmGuest *ksm_guest_find(const char *id);

/* Facts about any RAM. */
typedef struct KsmGuestRam {
    const char *id;             /* of the backend */
    MemoryKsmScope scope;
    const char *group;          /* its name, or NULL */
    RAMBlock *block;            /* NULL once it is gone */
    uint8_t *host;
    size_t size;
    bool run;                   /* the property */
    int refused;                /* scope=host: errno of the kernel's refusal */
    const char *not_ours;       /* ... why it is the kernel's, or NULL */
} KsmGuestRam;

KsmGuestRam ksm_guest_ram(const KsmGuest *guest);

/* Facts about RAM that libksm merges. */
typedef struct KsmGuestInfo {
    MemoryKsmState state;
    const char *inhibited;      /* why, or NULL */
    const char *failure;        /* why it was not given to libksm, or NULL */
    bool has_stats;             /* of this RAM and its engine, if it was */
    KsmStats region;
    KsmStats engine;
    bool has_group;
    KsmGroupStats group;
    const char *group_gone;     /* why nothing is shared with it, or NULL */
    KsmReason group_why;        /* the same for programs */
    bool has_log;
    uint64_t log_time;          /* ns of CPU that QEMU's dirty log took */
} KsmGuestInfo;

void ksm_guest_info(KsmGuest *guest, KsmGuestInfo *info);

/* Why none of it is merged; the caller frees the list.  NULL: it is merged. */
MemoryKsmReasonList *ksm_guest_reasons(const KsmGuest *guest,
                                       const KsmGuestInfo *info);

/* Who merges it, as long as there is a reference to it; NULL: the kernel. */
KsmEngine *ksm_guest_engine(const KsmGuest *guest);

/* See ksm_free_hint().  -errno: the range has to be discarded. */
int ksm_guest_hint(KsmGuest *guest, uint64_t start, size_t length);

#endif
