/*
 * Merging of guest RAM, for the object memory-backend-ksm
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Each file of hw/mem/ksm-*.c uses only those below it:
 *
 *   backends/hostmem-ksm.c, hmp-cmds
 *   stats
 *   balloon
 *   guest
 *   runner, dma
 *   log, vmas, inhibit, host, kernel, schema
 */
#ifndef HW_MEM_KSM_H
#define HW_MEM_KSM_H

#include "qapi/qapi-types-qom.h"
#include "system/iothread.h"

/* The RAM of one memory-backend-ksm. */
typedef struct KsmGuest KsmGuest;

/* Fixed properties of the RAM. */
typedef struct KsmGuestConfig {
    MemoryKsmScope scope;
    /* scope=group: see KsmConfig; the descriptor is the guest's */
    const char *group, *group_socket;
    int group_fd;
    MemoryKsmDirtyTracking dirty_tracking;
    MemoryKsmFreePolicy free_policy;
    IOThread *iothread;         /* NULL: the internal one */
    int node;                   /* merge with RAM of the same only; -1: any */
    bool dump;                  /* core dumps have it, at first */
} KsmGuestConfig;

#define KSM_GUEST_THREADS 16        /* at most */

/* Properties of the engine; all but @threads may change while it runs. */
typedef struct KsmGuestTuning {
    bool run;
    bool smart_scan;
    uint8_t threads;            /* of the engine; the first is the iothread */
    uint16_t max_cpu;           /* percent of one core */
    uint32_t target_scan_time;  /* seconds, 0: as fast as max_cpu allows */
} KsmGuestTuning;

/**
 * ksm_guest_check: can RAM be merged in this way at all?
 *
 * Return: true, or false with @errp set to what is missing and the remedy.
 */
bool ksm_guest_check(const KsmGuestConfig *config, Error **errp);

/**
 * ksm_guest_would_be_ours: would libksm merge the RAM, and not the kernel
 * alone?  With scope=host, that is up to a daemon (ksm-poold@host), and may be
 * otherwise the next time.
 *
 * @why: if not NULL, set to what keeps QEMU from it though a daemon is there,
 *       or to NULL; g_free() it
 */
bool ksm_guest_would_be_ours(const KsmGuestConfig *config, char **why);

/**
 * ksm_guest_new: begins to merge RAM.
 *
 * @mr: RAM, whose owner has an id and calls ksm_guest_free() when finalized
 *
 * Return: never NULL: query-ksm-stats tells why RAM is not merged.
 */
KsmGuest *ksm_guest_new(MemoryRegion *mr, const KsmGuestConfig *config,
                        const KsmGuestTuning *tuning);

/**
 * ksm_guest_is_ours: does libksm merge the RAM?  See ksm_guest_would_be_ours().
 */
bool ksm_guest_is_ours(const KsmGuest *guest);

/**
 * ksm_guest_free: the memory has been freed.
 */
void ksm_guest_free(KsmGuest *guest);

/**
 * ksm_guest_tune: the tuning has changed.
 *
 * Return: true, or false with @errp set: it could not be unmerged.
 */
bool ksm_guest_tune(KsmGuest *guest, const KsmGuestTuning *tuning,
                    Error **errp);

/**
 * ksm_guest_set_dump: to be called before the caller marks all of the memory
 * for core dumps, or the contrary.
 */
void ksm_guest_set_dump(KsmGuest *guest, bool dump);

/**
 * ksm_guest_unmerge: gives a range of the RAM memory of its own again, with
 * its content.  Its property "run" must be off.
 * @max_ms: no other piece of some MiB is begun after that; -1: no limit
 * @done: is set to how much of the range has been unmerged
 *
 * Return: true, or false with @errp set; then part of it may be unmerged.
 */
bool ksm_guest_unmerge(KsmGuest *guest, uint64_t offset, uint64_t size,
                       int64_t max_ms, uint64_t *done, Error **errp);

#endif
