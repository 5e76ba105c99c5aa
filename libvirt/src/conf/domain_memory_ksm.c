/*
 * domain_memory_ksm.c: <memoryBacking><ksm/>, how guest memory is merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include <config.h>

#include "domain_conf.h"
#include "domain_memory_ksm.h"
#include "virerror.h"
#include "virxml.h"

#define VIR_FROM_THIS VIR_FROM_DOMAIN

VIR_ENUM_IMPL(virDomainMemoryKsmScope,
              VIR_DOMAIN_MEMORY_KSM_SCOPE_LAST,
              "default",
              "zero",
              "vm",
              "group",
              "host",
);

VIR_ENUM_IMPL(virDomainMemoryKsmFreePolicy,
              VIR_DOMAIN_MEMORY_KSM_FREE_POLICY_LAST,
              "default",
              "auto",
              "lazy",
              "eager",
);

VIR_ENUM_IMPL(virDomainMemoryKsmDirtyTracking,
              VIR_DOMAIN_MEMORY_KSM_DIRTY_TRACKING_LAST,
              "default",
              "auto",
              "log",
              "pagemap",
              "checksum",
);


void
virDomainMemoryKsmFree(virDomainMemoryKsm *ksm)
{
    if (!ksm) {
        return;
    }
    g_free(ksm->group);
    g_free(ksm);
}


static int
virDomainMemoryKsmParseAttributes(xmlNodePtr node,
                                  virDomainMemoryKsm *ksm)
{
    /* "default" is how an attribute that is absent is kept, not a value */
    virXMLPropFlags flags = VIR_XML_PROP_NONZERO;

    ksm->group = virXMLPropString(node, "group");

    if (virXMLPropEnum(node, "scope", virDomainMemoryKsmScopeTypeFromString,
                       flags, &ksm->scope) < 0 ||
        virXMLPropEnum(node, "free-policy",
                       virDomainMemoryKsmFreePolicyTypeFromString,
                       flags, &ksm->free_policy) < 0 ||
        virXMLPropEnum(node, "dirty-tracking",
                       virDomainMemoryKsmDirtyTrackingTypeFromString,
                       flags, &ksm->dirty_tracking) < 0 ||
        virXMLPropUInt(node, "max-cpu", 10, flags, &ksm->max_cpu) < 0 ||
        virXMLPropUInt(node, "threads", 10, flags, &ksm->threads) < 0 ||
        virXMLPropUInt(node, "target-scan-time", 10, VIR_XML_PROP_NONE,
                       &ksm->target_scan_time) < 0) {
        return -1;
    }
    return 0;
}


int
virDomainMemoryKsmParseXML(xmlXPathContextPtr ctxt,
                           virDomainMemoryKsm **ksm)
{
    xmlNodePtr node = virXPathNode("./memoryBacking/ksm[1]", ctxt);
    virDomainMemoryKsm *parsed;

    *ksm = NULL;
    if (!node) {
        return 0;
    }

    parsed = g_new0(virDomainMemoryKsm, 1);
    if (virDomainMemoryKsmParseAttributes(node, parsed) < 0) {
        virDomainMemoryKsmFree(parsed);
        return -1;
    }
    *ksm = parsed;
    return 0;
}


void
virDomainMemoryKsmFormat(virBuffer *buf,
                         const virDomainMemoryKsm *ksm)
{
    g_auto(virBuffer) attrs = VIR_BUFFER_INITIALIZER;

    if (!ksm) {
        return;
    }
    if (ksm->scope) {
        virBufferAsprintf(&attrs, " scope='%s'",
                          virDomainMemoryKsmScopeTypeToString(ksm->scope));
    }
    virBufferEscapeString(&attrs, " group='%s'", ksm->group);
    if (ksm->max_cpu) {
        virBufferAsprintf(&attrs, " max-cpu='%u'", ksm->max_cpu);
    }
    if (ksm->threads) {
        virBufferAsprintf(&attrs, " threads='%u'", ksm->threads);
    }
    if (ksm->target_scan_time) {
        virBufferAsprintf(&attrs, " target-scan-time='%u'",
                          ksm->target_scan_time);
    }
    if (ksm->free_policy) {
        virBufferAsprintf(&attrs, " free-policy='%s'",
                virDomainMemoryKsmFreePolicyTypeToString(ksm->free_policy));
    }
    if (ksm->dirty_tracking) {
        virBufferAsprintf(&attrs, " dirty-tracking='%s'",
                virDomainMemoryKsmDirtyTrackingTypeToString(
                    ksm->dirty_tracking));
    }
    /* writes nothing when there is no attribute */
    virXMLFormatElement(buf, "ksm", &attrs, NULL);
}


/* As QEMU has it: the name is part of a path. */
static bool
virDomainMemoryKsmGroupIsValid(const char *name)
{
    return *name && *name != '.' && strlen(name) <= 64 &&
           strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                        "0123456789._-") == strlen(name);
}


int
virDomainMemoryKsmValidate(const virDomainDef *def)
{
    const virDomainMemoryKsm *ksm = def->mem.ksm;

    if (!ksm) {
        return 0;
    }
    if (def->mem.source != VIR_DOMAIN_MEMORY_SOURCE_KSM) {
        virReportError(VIR_ERR_CONFIG_UNSUPPORTED, "%s",
                       _("memoryBacking/ksm needs <source type='ksm'/> "
                         "beside it"));
        return -1;
    }
    if (ksm->scope == VIR_DOMAIN_MEMORY_KSM_SCOPE_GROUP &&
        (!ksm->group || !*ksm->group)) {
        virReportError(VIR_ERR_CONFIG_UNSUPPORTED, "%s",
                       _("memoryBacking/ksm with scope='group' needs the "
                         "attribute 'group', the name of the group"));
        return -1;
    }
    if (ksm->group && ksm->scope != VIR_DOMAIN_MEMORY_KSM_SCOPE_GROUP) {
        virReportError(VIR_ERR_CONFIG_UNSUPPORTED, "%s",
                       _("the attribute 'group' of memoryBacking/ksm needs "
                         "scope='group'"));
        return -1;
    }
    if (ksm->group && !virDomainMemoryKsmGroupIsValid(ksm->group)) {
        virReportError(VIR_ERR_CONFIG_UNSUPPORTED,
                       _("the attribute 'group' of memoryBacking/ksm is '%s', "
                         "but must be a name of up to 64 letters, digits, "
                         "'.', '_' and '-', without '.' in front"),
                       ksm->group);
        return -1;
    }
    if (ksm->threads > VIR_DOMAIN_MEMORY_KSM_THREADS_MAX) {
        virReportError(VIR_ERR_CONFIG_UNSUPPORTED,
                       _("threads of memoryBacking/ksm is '%u', but must be "
                         "between 1 and %d"),
                       ksm->threads, VIR_DOMAIN_MEMORY_KSM_THREADS_MAX);
        return -1;
    }
    if (ksm->max_cpu > 100 * MAX(ksm->threads, 1)) {
        virReportError(VIR_ERR_CONFIG_UNSUPPORTED,
                       _("max-cpu of memoryBacking/ksm is '%u', but must be "
                         "between 1 and 100 (percent of one core) for each of "
                         "its 'threads'"),
                       ksm->max_cpu);
        return -1;
    }
    return 0;
}
