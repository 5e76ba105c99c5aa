/*
 * Merging of guest RAM: the calls in QEMU's memory core
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * For RAM that libksm does not merge they cost a test of a pointer.
 */
#ifndef HW_MEM_KSM_HOOKS_H
#define HW_MEM_KSM_HOOKS_H

#include "qemu/typedefs.h"

typedef struct KsmGuest KsmGuest;

#ifdef CONFIG_LINUX

/**
 * ksm_guest_discard: discards a range of RAM, as ram_block_discard_range().
 *
 * MADV_DONTNEED on a merged range would bring back its content rather than
 * zeroes.
 *
 * Return: true with @ret set; false: nothing is merged, go on as always.
 */
bool ksm_guest_discard(KsmGuest *guest, uint64_t start, size_t length,
                       int *ret);

/**
 * ksm_guest_dma_map, ksm_guest_dma_unmap: a device is given the address of
 * RAM to write to, and is done with it.
 */
void ksm_guest_dma_map(KsmGuest *guest, uint64_t start, uint64_t length);
void ksm_guest_dma_unmap(KsmGuest *guest, uint64_t start, uint64_t length);

/**
 * ksm_guest_makes_room: does ksm_guests_make_room() give up this RAM?
 */
bool ksm_guest_makes_room(KsmGuest *guest);

/**
 * ksm_guests_make_room: gives up all merged RAM because someone else needs
 * userfaultfd on it (background snapshot).
 *
 * What the kernel's KSM merges, too: it takes write-protection away from the
 * pages that it merges, and what the guest writes there afterwards would be in
 * the snapshot.
 *
 * Called without the BQL, by the thread of a migration that has begun: merging
 * resumes by itself when that ends.  Takes a minute for 100 GiB; others wait
 * for small parts only.
 */
void ksm_guests_make_room(void);

/**
 * ksm_guests_made_room: was that possible?  If not, who asked for it must not
 * rely on write-protection.
 */
bool ksm_guests_made_room(void);

/**
 * ksm_guests_bypass_begin, ksm_guests_bypass_end: something outside QEMU may
 * write to any RAM past the page tables, without pinning and without
 * address_space_map(): RAM must not be merged meanwhile.
 */
void ksm_guests_bypass_begin(void);
void ksm_guests_bypass_end(void);

/**
 * ksm_guests_pin_begin, ksm_guests_pin_end: a device may pin any RAM from now
 * on, or be told where it is.  Called before the first time, and after it has
 * let go of all of it.  The first waits as ksm_guests_settle() does, and is
 * called with the BQL.
 */
void ksm_guests_pin_begin(void);
void ksm_guests_pin_end(void);

/**
 * ksm_guests_settle: who calls it is about to pin RAM, and merging is inhibited.
 * Waits until nothing is being put under RAM that was begun before: a pin for
 * reading would not wait for it.
 */
void ksm_guests_settle(void);

/**
 * ksm_guests_discards_disabled: the same for who just disabled discarding RAM,
 * with the BQL.  Nor is the dirty log on for merging then: what is set up next
 * (vhost-vdpa) would have to log, too, and perhaps cannot.
 */
void ksm_guests_discards_disabled(void);

/**
 * ksm_ram_remapped: a range of RAM was discarded after a memory error, and
 * may have been mapped anew.
 *
 * QEMU would mark it for the kernel's KSM (-machine mem-merge) and for core
 * dumps (-machine dump-guest-core).
 *
 * Return: true if it is of a memory-backend-ksm, and is as that wants it.
 */
bool ksm_ram_remapped(RAMBlock *block, uint64_t start, uint64_t length);

#else

static inline bool ksm_guest_discard(KsmGuest *guest, uint64_t start,
                                     size_t length, int *ret)
{
    return false;
}

static inline void ksm_guest_dma_map(KsmGuest *guest, uint64_t start,
                                     uint64_t length)
{
}

static inline void ksm_guest_dma_unmap(KsmGuest *guest, uint64_t start,
                                       uint64_t length)
{
}

static inline void ksm_guests_bypass_begin(void)
{
}

static inline void ksm_guests_bypass_end(void)
{
}

static inline void ksm_guests_pin_begin(void)
{
}

static inline void ksm_guests_pin_end(void)
{
}

static inline void ksm_guests_settle(void)
{
}

static inline void ksm_guests_discards_disabled(void)
{
}

static inline bool ksm_ram_remapped(RAMBlock *block, uint64_t start,
                                    uint64_t length)
{
    return false;
}

#endif /* CONFIG_LINUX */

#endif
