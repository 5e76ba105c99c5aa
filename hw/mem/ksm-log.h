/*
 * QEMU's dirty log as a source of written pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Callers hold the BQL, except those of ksm_log_take().
 */
#ifndef HW_MEM_KSM_LOG_H
#define HW_MEM_KSM_LOG_H

#include "exec/cpu-common.h"

/* The written pages of one RAM block. */
typedef struct KsmLog KsmLog;

/* False with @errp set if there can be no log of the pages libksm knows. */
bool ksm_log_check(Error **errp);

/* At first all pages count as written. */
KsmLog *ksm_log_new(RAMBlock *block);
void ksm_log_free(KsmLog *log);

/*
 * Switches logging on or off.  Writes are not seen while it is off: then all
 * pages count as written.
 */
void ksm_log_switch(bool on);

/* Something was written past the log: all pages count as written. */
void ksm_log_forget(void);

/*
 * Collects a piece of the written pages of all RAM blocks: all at once would
 * hold up the main loop.  False: there is more.
 */
bool ksm_log_sync(void);

/* CPU time of all syncs until now, in ns. */
uint64_t ksm_log_time(void);

/*
 * Adds a bit to @bitmap for each page written before the last sync and not
 * taken since.  False: not known, the log is off.  By any thread, but not
 * during ksm_log_sync().
 */
bool ksm_log_take(KsmLog *log, size_t first_page, size_t n_pages,
                  unsigned long *bitmap);

#endif
