/*
 * The QAPI schema's values and their names in libksm
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Switches without a default: the compiler warns of a forgotten value.
 */
#ifndef HW_MEM_KSM_SCHEMA_H
#define HW_MEM_KSM_SCHEMA_H

#include "libksm.h"
#include "qapi/qapi-types-ksm-common.h"
#include "qapi/qapi-types-qom.h"

/* Of RAM that libksm merges: scope=host has a group, too. */
KsmScope ksm_schema_scope(MemoryKsmScope scope);

KsmDirtySource ksm_schema_dirty(MemoryKsmDirtyTracking tracking);
KsmFreePolicy ksm_schema_free_policy(MemoryKsmFreePolicy policy);

MemoryKsmState ksm_schema_state(KsmState state);
MemoryKsmReasonKind ksm_schema_reason(KsmReason reason);

/* Appends one.  @pages: how many it holds for; 0: that is not said. */
void ksm_schema_add_reason(MemoryKsmReasonList **list,
                           MemoryKsmReasonKind kind, const char *text,
                           uint64_t pages);

#endif
