/*
 * slot: the number of a shared page
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef KSM_SLOT_H
#define KSM_SLOT_H

#include <stdint.h>

#define SLOT_NONE   UINT32_MAX
#define SLOT_USERS  0x3fffu     /* that a slot can have, at most */

/*
 * Pages that have mapped a pattern, for each of its slots, before it grows: its
 * slots take one or two in so many of what it saves, and each doubling costs some
 * half as many mappings.  The first slots have so many users when it begins to
 * grow, and half as many more at each doubling: five are to be done, up to the
 * longest block, before they have all that they may have (256).
 */
#define PATTERN_USES    64u

#endif
