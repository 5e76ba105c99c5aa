/*
 * The QAPI schema's values and their names in libksm
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "ksm-schema.h"

KsmScope ksm_schema_scope(MemoryKsmScope scope)
{
    switch (scope) {
    case MEMORY_KSM_SCOPE_ZERO:
        return KSM_SCOPE_ZERO;
    case MEMORY_KSM_SCOPE_VM:
        return KSM_SCOPE_VM;
    case MEMORY_KSM_SCOPE_HOST:
    case MEMORY_KSM_SCOPE_GROUP:
        return KSM_SCOPE_GROUP;
    case MEMORY_KSM_SCOPE__MAX:
        break;
    }
    g_assert_not_reached();
}

KsmDirtySource ksm_schema_dirty(MemoryKsmDirtyTracking tracking)
{
    switch (tracking) {
    case MEMORY_KSM_DIRTY_TRACKING_AUTO:
        return KSM_DIRTY_AUTO;
    case MEMORY_KSM_DIRTY_TRACKING_LOG:
        return KSM_DIRTY_LOG;
    case MEMORY_KSM_DIRTY_TRACKING_PAGEMAP:
        return KSM_DIRTY_PAGEMAP;
    case MEMORY_KSM_DIRTY_TRACKING_CHECKSUM:
        return KSM_DIRTY_CHECKSUM;
    case MEMORY_KSM_DIRTY_TRACKING__MAX:
        break;
    }
    g_assert_not_reached();
}

KsmFreePolicy ksm_schema_free_policy(MemoryKsmFreePolicy policy)
{
    switch (policy) {
    case MEMORY_KSM_FREE_POLICY_AUTO:
        return KSM_FREE_AUTO;
    case MEMORY_KSM_FREE_POLICY_LAZY:
        return KSM_FREE_LAZY;
    case MEMORY_KSM_FREE_POLICY_EAGER:
        return KSM_FREE_EAGER;
    case MEMORY_KSM_FREE_POLICY__MAX:
        break;
    }
    g_assert_not_reached();
}

MemoryKsmState ksm_schema_state(KsmState state)
{
    switch (state) {
    case KSM_STATE_OFF:
        return MEMORY_KSM_STATE_OFF;
    case KSM_STATE_ACTIVE:
        return MEMORY_KSM_STATE_ACTIVE;
    case KSM_STATE_IDLE:
        return MEMORY_KSM_STATE_IDLE;
    case KSM_STATE_INHIBITED:
        return MEMORY_KSM_STATE_INHIBITED;
    }
    g_assert_not_reached();
}

MemoryKsmReasonKind ksm_schema_reason(KsmReason reason)
{
    switch (reason) {
    case KSM_REASON_RUN_OFF:
        return MEMORY_KSM_REASON_KIND_RUN_OFF;
    case KSM_REASON_INHIBITED:
        return MEMORY_KSM_REASON_KIND_INHIBITED;
    case KSM_REASON_NOT_SCANNED:
        return MEMORY_KSM_REASON_KIND_NOT_SCANNED;
    case KSM_REASON_VOLATILE:
        return MEMORY_KSM_REASON_KIND_VOLATILE;
    case KSM_REASON_UNIQUE:
        return MEMORY_KSM_REASON_KIND_NOTHING_EQUAL;
    case KSM_REASON_NOT_WORTH:
        return MEMORY_KSM_REASON_KIND_NOT_WORTH;
    case KSM_REASON_PINNED:
        return MEMORY_KSM_REASON_KIND_PINNED;
    case KSM_REASON_BUSY:
        return MEMORY_KSM_REASON_KIND_BUSY;
    case KSM_REASON_VMA_LIMIT:
        return MEMORY_KSM_REASON_KIND_VMA_LIMIT;
    case KSM_REASON_NO_MEMORY:
        return MEMORY_KSM_REASON_KIND_NO_MEMORY;
    case KSM_REASON_COW_BROKEN:
        return MEMORY_KSM_REASON_KIND_COW_BROKEN;
    case KSM_REASON_FREED:
        return MEMORY_KSM_REASON_KIND_FREED;
    case KSM_REASON_NO_DAEMON:
        return MEMORY_KSM_REASON_KIND_NO_DAEMON;
    case KSM_REASON_REFUSED_BY_DAEMON:
        return MEMORY_KSM_REASON_KIND_REFUSED_BY_DAEMON;
    case KSM_REASON_GROUP_FULL:
        return MEMORY_KSM_REASON_KIND_GROUP_FULL;
    case KSM_REASON_MAX:
        break;
    }
    g_assert_not_reached();
}

void ksm_schema_add_reason(MemoryKsmReasonList **list,
                           MemoryKsmReasonKind kind, const char *text,
                           uint64_t pages)
{
    MemoryKsmReason *reason = g_new0(MemoryKsmReason, 1);

    reason->kind = kind;
    reason->text = g_strdup(text);
    reason->has_bytes = reason->has_pages = pages != 0;
    reason->bytes = pages * KSM_PAGE_SIZE;
    reason->pages = pages;
    /* few of them: walking is cheap */
    while (*list) {
        list = &(*list)->next;
    }
    *list = g_new0(MemoryKsmReasonList, 1);
    (*list)->value = reason;
}
