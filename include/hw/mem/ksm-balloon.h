/*
 * Guest RAM that the guest gives back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * virtio-balloon asks here before it discards.  The property 'free-policy'
 * decides how RAM of a memory-backend-ksm is given back; other RAM is left to
 * the caller.  Callers hold the BQL.
 */
#ifndef HW_MEM_KSM_BALLOON_H
#define HW_MEM_KSM_BALLOON_H

#include "hw/mem/ksm.h"

/* One per memory-backend-ksm. */
typedef struct KsmBalloon KsmBalloon;

#ifdef CONFIG_LINUX

/**
 * ksm_balloon_give: gives a range of RAM back that the guest says is free.
 *
 * Its content is then the old one or zeroes, page by page, until it is
 * written.  The caller has made sure that RAM may be discarded now.
 *
 * Return: false if the caller is to discard it, as always.
 */
bool ksm_balloon_give(RAMBlock *rb, uint64_t start, size_t length);

/**
 * ksm_balloon_collect: as ksm_balloon_give(), but neighbouring ranges are given
 * back together, at the latest by ksm_balloon_flush().
 *
 * The guest must not be told in between that the device is done with them.
 */
bool ksm_balloon_collect(RAMBlock *rb, uint64_t start, size_t length);
void ksm_balloon_flush(void);

/**
 * ksm_balloon_new: for the RAM of @guest, which must be freed after it.
 */
KsmBalloon *ksm_balloon_new(KsmGuest *guest);
void ksm_balloon_free(KsmBalloon *balloon);

/**
 * ksm_balloon_discarded: pages of the guest's RAM that were discarded.
 *
 * Return: false if the engine knows what was given back.
 */
bool ksm_balloon_discarded(const KsmGuest *guest, uint64_t *pages);

/**
 * ksm_balloon_inert: why the guest gives nothing back, or nothing of that is
 * released.  NULL if that works; else static text.
 */
const char *ksm_balloon_inert(void);

#else

static inline bool ksm_balloon_give(RAMBlock *rb, uint64_t start,
                                    size_t length)
{
    return false;
}

static inline bool ksm_balloon_collect(RAMBlock *rb, uint64_t start,
                                       size_t length)
{
    return false;
}

static inline void ksm_balloon_flush(void)
{
}

#endif /* CONFIG_LINUX */

#endif
