/*
 * QEMU's dirty log, for whoever merges guest RAM
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * All functions are called with the BQL held, but ksm_log_take().
 */
#ifndef HW_MEM_KSM_LOG_H
#define HW_MEM_KSM_LOG_H

#include "exec/cpu-common.h"

/* What was written to one RAM block. */
typedef struct KsmLog KsmLog;

/* False with @errp set if there can be no log of the pages libksm knows. */
bool ksm_log_check(Error **errp);

/* At first all pages count as written. */
KsmLog *ksm_log_new(RAMBlock *block);
void ksm_log_free(KsmLog *log);

/*
 * Begins or ends to log; nothing if that is so already.  What was written
 * while it was off is not known: then all pages count as written.
 */
void ksm_log_switch(bool on);

/* Something has been written that the log does not see: as at first. */
void ksm_log_forget(void);

/*
 * Gathers what was written to all RAM blocks, and begins anew.  A piece of
 * it, so that the main loop is not held up: false as long as there is more.
 */
bool ksm_log_sync(void);

/* CPU time that took until now, in ns. */
uint64_t ksm_log_time(void);

/*
 * Adds a bit to @bitmap for each page that was written before the last sync
 * and has not been taken since.  False: not known, the log is off.  By any
 * thread, but not during ksm_log_sync().
 */
bool ksm_log_take(KsmLog *log, size_t first_page, size_t n_pages,
                  unsigned long *bitmap);

#endif /* HW_MEM_KSM_LOG_H */
