/*
 * Merging of guest RAM: what the object memory-backend-ksm and the monitor
 * need of hw/mem/ksm-*.c
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef HW_MEM_KSM_H
#define HW_MEM_KSM_H

#include "qapi/qapi-types-ksm.h"
#include "qapi/qapi-types-qom.h"

/* The RAM of one memory-backend-ksm. */
typedef struct KsmGuest KsmGuest;

typedef struct HostMemoryBackendKsm HostMemoryBackendKsm;

/* Properties that may change while the guest runs. */
typedef struct KsmGuestTuning {
    bool run;
    bool smart_scan;
    uint8_t max_cpu;            /* percent of one core */
    uint32_t target_scan_time;  /* seconds, 0: as fast as max_cpu allows */
} KsmGuestTuning;

/**
 * ksm_guest_check: can RAM be merged in this way at all?
 *
 * @backend: its properties; its memory is not there yet
 *
 * Return: true, or false with @errp set to what is missing and the remedy.
 */
bool ksm_guest_check(const HostMemoryBackendKsm *backend, Error **errp);

/**
 * ksm_guest_new: gives the memory of a backend to whoever merges it.
 *
 * Return: never NULL: what cannot be merged is shown by query-ksm-stats,
 * and the guest runs on.
 */
KsmGuest *ksm_guest_new(HostMemoryBackendKsm *backend);

/**
 * ksm_guest_free: the memory has been freed.
 */
void ksm_guest_free(KsmGuest *guest);

/**
 * ksm_guest_tune: the backend's tuning has changed.
 *
 * Return: true, or false with @errp set when the memory could not be
 * unmerged.
 */
bool ksm_guest_tune(KsmGuest *guest, Error **errp);

/**
 * ksm_guest_set_dump: core dumps are to have the memory, or not.  To be called
 * before that is changed for all of the memory.
 */
void ksm_guest_set_dump(KsmGuest *guest, bool dump);

/**
 * ksm_guest_unmerge: gives a range of the RAM memory of its own again, with
 * its content.  The backend's property "run" must be off.
 *
 * Return: true, or false with @errp set; then part of it may be unmerged.
 */
bool ksm_guest_unmerge(KsmGuest *guest, uint64_t offset, uint64_t size,
                       Error **errp);

/**
 * ksm_guest_refused: errno of the kernel's refusal to mark the memory as
 * mergeable, 0 if there was none.
 */
int ksm_guest_refused(const KsmGuest *guest);

#endif /* HW_MEM_KSM_H */
