/*
 * domain_memory_ksm.h: <memoryBacking><ksm/>, how guest memory is merged
 *
 * The tunables of <source type='ksm'/>: parsing, checking, formatting.
 * Whether the domain's other settings allow merging is for the driver to
 * say (qemu_ksm.c); what the tunables do is QEMU's business.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#pragma once

#include <libxml/xpath.h>

#include "internal.h"
#include "virbuffer.h"
#include "virconftypes.h"
#include "virenum.h"

/* Who may share memory with the domain. */
typedef enum {
    VIR_DOMAIN_MEMORY_KSM_SCOPE_DEFAULT = 0, /* QEMU's: host */
    VIR_DOMAIN_MEMORY_KSM_SCOPE_ZERO,   /* nobody, only zero pages go */
    VIR_DOMAIN_MEMORY_KSM_SCOPE_VM,     /* the guest with itself */
    VIR_DOMAIN_MEMORY_KSM_SCOPE_GROUP,  /* the guests of one group */
    VIR_DOMAIN_MEMORY_KSM_SCOPE_HOST,   /* all mergeable memory there is */

    VIR_DOMAIN_MEMORY_KSM_SCOPE_LAST
} virDomainMemoryKsmScope;

VIR_ENUM_DECL(virDomainMemoryKsmScope);

/* What happens to pages the guest says are free. */
typedef enum {
    VIR_DOMAIN_MEMORY_KSM_FREE_POLICY_DEFAULT = 0,
    VIR_DOMAIN_MEMORY_KSM_FREE_POLICY_AUTO,
    VIR_DOMAIN_MEMORY_KSM_FREE_POLICY_LAZY,
    VIR_DOMAIN_MEMORY_KSM_FREE_POLICY_EAGER,

    VIR_DOMAIN_MEMORY_KSM_FREE_POLICY_LAST
} virDomainMemoryKsmFreePolicy;

VIR_ENUM_DECL(virDomainMemoryKsmFreePolicy);

/* How QEMU learns what the guest has written. */
typedef enum {
    VIR_DOMAIN_MEMORY_KSM_DIRTY_TRACKING_DEFAULT = 0,
    VIR_DOMAIN_MEMORY_KSM_DIRTY_TRACKING_AUTO,
    VIR_DOMAIN_MEMORY_KSM_DIRTY_TRACKING_LOG,
    VIR_DOMAIN_MEMORY_KSM_DIRTY_TRACKING_PAGEMAP,
    VIR_DOMAIN_MEMORY_KSM_DIRTY_TRACKING_CHECKSUM,

    VIR_DOMAIN_MEMORY_KSM_DIRTY_TRACKING_LAST
} virDomainMemoryKsmDirtyTracking;

VIR_ENUM_DECL(virDomainMemoryKsmDirtyTracking);

#define VIR_DOMAIN_MEMORY_KSM_THREADS_MAX 16

typedef struct _virDomainMemoryKsm virDomainMemoryKsm;
struct _virDomainMemoryKsm {
    unsigned int scope;             /* virDomainMemoryKsmScope */
    char *group;                    /* with scope 'group' only */
    unsigned int max_cpu;           /* percent of a core; 0: default */
    unsigned int threads;           /* 0: default */
    unsigned int target_scan_time;  /* seconds; 0: default */
    unsigned int free_policy;       /* virDomainMemoryKsmFreePolicy */
    unsigned int dirty_tracking;    /* virDomainMemoryKsmDirtyTracking */
};

void virDomainMemoryKsmFree(virDomainMemoryKsm *ksm);

/* Sets @ksm to what <memoryBacking><ksm/> says, NULL where there is none. */
int virDomainMemoryKsmParseXML(xmlXPathContextPtr ctxt,
                               virDomainMemoryKsm **ksm);

void virDomainMemoryKsmFormat(virBuffer *buf,
                              const virDomainMemoryKsm *ksm);

/* Do the tunables go together, and with the domain's memory source? */
int virDomainMemoryKsmValidate(const virDomainDef *def);
