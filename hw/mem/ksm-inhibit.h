/*
 * Conditions under which guest RAM must not be merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * By any thread, without the BQL.
 */
#ifndef HW_MEM_KSM_INHIBIT_H
#define HW_MEM_KSM_INHIBIT_H

/* See ksm_guests_bypass_begin(). */
bool ksm_bypassed(void);

/* A device may have RAM pinned, or have been told where it is. */
bool ksm_pinned(void);

/* NULL, or why all RAM must be left alone; static text. */
const char *ksm_inhibited(void);

/* The same for RAM of this machine. */
const char *ksm_inhibited_by_cpus(void);

#endif
