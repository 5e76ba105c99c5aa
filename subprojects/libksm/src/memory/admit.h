/*
 * admit: which memory may be registered
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The engine presumes private anonymous memory that nobody else manages.
 * /proc/self/smaps tells that, and the attributes, which the region remembers
 * for attr.h.
 */
#ifndef KSM_ADMIT_H
#define KSM_ADMIT_H

#include "memory/region.h"

/*
 * Why the region's range (addr, len) cannot be registered, a static text; or
 * NULL, and its attributes are known.
 */
const char *admit(KsmRegion *r);

#endif
