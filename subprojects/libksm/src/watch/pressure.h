/*
 * pressure: is the host, or a memory cgroup of this process, short of memory?
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Reads the kernel's own counters: stall time (PSI, Linux 4.20) of the host
 * and of the cgroup (v2), and how often the cgroup or one above it hit its
 * limit ("max" in memory.events.local of v2, memory.failcnt of v1).  Leaves to
 * others: what to do about it.
 */
#ifndef KSM_PRESSURE_H
#define KSM_PRESSURE_H

#include "libksm.h"

typedef struct KsmPressure KsmPressure;

/*
 * ksm_pressure_new_at: the files of root directory @root, which is not / in
 * tests; sources that do not exist there are left out.
 */
KsmPressure *ksm_pressure_new_at(const char *root);
void ksm_pressure_free(KsmPressure *pressure);

/*
 * ksm_pressure_sign: has any counter moved enough since the last call to say
 * that memory is short?  @elapsed_ns is the time since then.
 */
bool ksm_pressure_sign(KsmPressure *pressure, int64_t elapsed_ns);

#endif /* KSM_PRESSURE_H */
