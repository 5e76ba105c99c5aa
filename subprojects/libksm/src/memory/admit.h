/*
 * admit: which memory may be registered
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Everything that the engine does presumes private anonymous memory that
 * nobody else manages.  /proc/self/smaps says whether it is, and which
 * attributes it has; the region remembers those for attr.h.
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
