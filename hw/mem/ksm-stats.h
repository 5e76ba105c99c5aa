/*
 * query-ksm-stats for C callers
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef HW_MEM_KSM_STATS_H
#define HW_MEM_KSM_STATS_H

#include "qapi/qapi-types-ksm.h"

/* In a coroutine or not; gives up the BQL.  The caller frees the answer. */
MemoryKsmStats *ksm_stats_query(void);

#endif
