/*
 * QEMU host memory backend whose memory is merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef SYSTEM_HOSTMEM_KSM_H
#define SYSTEM_HOSTMEM_KSM_H

#include "hw/mem/ksm-balloon.h"
#include "hw/mem/ksm.h"
#include "qapi/qapi-types-qom.h"
#include "qom/object_interfaces.h"
#include "system/hostmem.h"
#include "system/iothread.h"

#define TYPE_MEMORY_BACKEND_KSM "memory-backend-ksm"
OBJECT_DECLARE_TYPE(HostMemoryBackendKsm, HostMemoryBackendKsmClass,
                    MEMORY_BACKEND_KSM)

struct HostMemoryBackendKsmClass {
    HostMemoryBackendClass parent_class;
    /* what the parent does once all properties are set */
    void (*parent_complete)(UserCreatable *uc, Error **errp);
};

struct HostMemoryBackendKsm {
    HostMemoryBackend parent;

    /* properties, see MemoryBackendKsmProperties in qapi/qom.json */
    MemoryKsmScope scope;
    char *group;
    IOThread *iothread;
    MemoryKsmDirtyTracking dirty_tracking;
    MemoryKsmFreePolicy free_policy;
    bool merge_across_nodes;
    KsmGuestTuning tuning;
    /* the first property that was set and needs the merging iothread */
    const char *needs_engine;

    KsmGuest *guest;    /* NULL until the memory is there */
    KsmBalloon *balloon;        /* the same */
};

#endif /* SYSTEM_HOSTMEM_KSM_H */
