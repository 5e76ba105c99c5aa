/*
 * pressure: is the host, or a memory cgroup of this process, short of memory?
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Reads kernel counters: stall time (PSI, Linux 4.20) of the host and of the
 * cgroup (v2), and how often the cgroup or one above it hit its limit ("max" in
 * memory.events.local of v2, memory.failcnt of v1).  Leaves to others: what to
 * do about it.
 */
#ifndef KSM_PRESSURE_H
#define KSM_PRESSURE_H

#include "libksm.h"

typedef struct KsmPressure KsmPressure;

/*
 * ksm_pressure_new_at: @root is not / in tests; missing sources are left out.
 */
KsmPressure *ksm_pressure_new_at(const char *root);
void ksm_pressure_free(KsmPressure *pressure);

/*
 * ksm_pressure_sign: did a counter move enough since the last call, @elapsed_ns
 * ago, to say that memory is short?
 */
bool ksm_pressure_sign(KsmPressure *pressure, int64_t elapsed_ns);

#endif
