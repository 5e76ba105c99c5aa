/*
 * qemu_ksm.c: guest memory on QEMU's memory-backend-ksm
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include <config.h>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "qemu_ksm.h"
#include "qemu_domain.h"
#include "qemu_monitor.h"
#include "qemu_security.h"
#include "virerror.h"
#include "virfile.h"
#include "virlog.h"
#include "virstring.h"

#define VIR_FROM_THIS VIR_FROM_QEMU

VIR_LOG_INIT("qemu.qemu_ksm");

/* where QEMU itself looks for the daemon of a group */
#define QEMU_KSM_GROUP_SOCKET "/run/ksm-pool/%s.sock"

/* libvirt 11.2 made these functions return nothing */
#if LIBVIR_VERSION_NUMBER < 11002000
# define QEMU_KSM_ADD(call) ignore_value(call)
#else
# define QEMU_KSM_ADD(call) call
#endif


static int
qemuKsmRefuse(const char *what,
              const char *why)
{
    virReportError(VIR_ERR_CONFIG_UNSUPPORTED,
                   _("%s is not allowed with memory source 'ksm': %s"),
                   what, why);
    return -1;
}


static int
qemuKsmRefuseShared(const char *whose)
{
    return qemuKsmRefuse(whose, _("only private memory can be merged; "
                                  "remove access mode 'shared'"));
}


/* NULL: the domain is in no group */
static const char *
qemuKsmGroup(const virDomainDef *def)
{
    if (def->mem.source != VIR_DOMAIN_MEMORY_SOURCE_KSM ||
        !def->mem.ksm) {
        return NULL;
    }
    return def->mem.ksm->group;
}


/* NUMA cells and memory devices may have access modes of their own */
static int
qemuKsmValidateAccess(const virDomainDef *def)
{
    size_t i;

    if (def->mem.access == VIR_DOMAIN_MEMORY_ACCESS_SHARED) {
        return qemuKsmRefuseShared(_("shared memory"));
    }
    for (i = 0; i < virDomainNumaGetNodeCount(def->numa); i++) {
        if (virDomainNumaGetNodeMemoryAccessMode(def->numa, i) ==
            VIR_DOMAIN_MEMORY_ACCESS_SHARED) {
            return qemuKsmRefuseShared(_("a NUMA cell with shared memory"));
        }
    }
    for (i = 0; i < def->nmems; i++) {
        if (def->mems[i]->model != VIR_DOMAIN_MEMORY_MODEL_DIMM &&
            def->mems[i]->model != VIR_DOMAIN_MEMORY_MODEL_VIRTIO_MEM) {
            continue;
        }
        if (def->mems[i]->access == VIR_DOMAIN_MEMORY_ACCESS_SHARED) {
            return qemuKsmRefuseShared(_("a memory device with shared memory"));
        }
    }
    return 0;
}


int
qemuKsmValidateDomain(const virDomainDef *def,
                      virQEMUCaps *qemuCaps)
{
    if (def->mem.source != VIR_DOMAIN_MEMORY_SOURCE_KSM) {
        return 0;
    }
    if (!virQEMUCapsGet(qemuCaps, QEMU_CAPS_OBJECT_MEMORY_KSM)) {
        virReportError(VIR_ERR_CONFIG_UNSUPPORTED, "%s",
                       _("memory source 'ksm' needs a QEMU that has "
                         "memory-backend-ksm, which this one has not"));
        return -1;
    }
    if (qemuKsmGroup(def) &&
        !virQEMUCapsGet(qemuCaps, QEMU_CAPS_OBJECT_MEMORY_KSM_GROUP)) {
        virReportError(VIR_ERR_CONFIG_UNSUPPORTED, "%s",
                       _("scope='group' of memoryBacking/ksm needs a QEMU "
                         "whose memory-backend-ksm has 'group-fd', which "
                         "this one's has not; use another scope or a newer "
                         "QEMU"));
        return -1;
    }
    if (virDomainNumaGetNodeCount(def->numa) == 0 &&
        !virQEMUCapsGetMachineDefaultRAMid(qemuCaps, def->virtType,
                                           def->os.machine)) {
        /* the memory would silently be plain */
        virReportError(VIR_ERR_CONFIG_UNSUPPORTED,
                       _("memory source 'ksm' needs NUMA cells with machine "
                         "type '%s' of this QEMU, whose memory is not "
                         "an object otherwise"),
                       def->os.machine);
        return -1;
    }
    if (def->mem.nosharepages) {
        return qemuKsmRefuse("<nosharepages/>",
                             _("it asks for the opposite"));
    }
    if (def->mem.nhugepages > 0) {
        return qemuKsmRefuse("<hugepages/>",
                             _("pages of hugetlbfs cannot be merged; "
                               "transparent huge pages can"));
    }
    if (def->mem.locked) {
        return qemuKsmRefuse("<locked/>",
                             _("locked memory cannot be merged"));
    }
    if (def->mem.allocation == VIR_DOMAIN_MEMORY_ALLOCATION_IMMEDIATE) {
        return qemuKsmRefuse("<allocation mode='immediate'/>",
                             _("merging gives back what was allocated"));
    }
    return qemuKsmValidateAccess(def);
}


static int
qemuKsmOpenGroup(const char *path)
{
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    VIR_AUTOCLOSE fd = -1;
    int ret;

    if (virStrcpyStatic(addr.sun_path, path) < 0) {
        errno = ENAMETOOLONG;
        return -1;
    }
    /* a daemon that does not accept must not stop the domain's start */
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 ||
        connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0) {
        return -1;
    }
    ret = fd;
    fd = -1;
    return ret;
}


int
qemuKsmPrepareHost(virDomainObj *vm)
{
    qemuDomainObjPrivate *priv = vm->privateData;
    const char *group = qemuKsmGroup(vm->def);
    g_autofree char *path = NULL;
    VIR_AUTOCLOSE fd = -1;
    int error;

    if (!group) {
        return 0;
    }
    path = g_strdup_printf(QEMU_KSM_GROUP_SOCKET, group);

    if (qemuSecuritySetSocketLabel(priv->driver->securityManager,
                                   vm->def) < 0) {
        return -1;
    }
    fd = qemuKsmOpenGroup(path);
    error = errno;
    if (qemuSecurityClearSocketLabel(priv->driver->securityManager,
                                     vm->def) < 0) {
        return -1;
    }

    g_clear_pointer(&priv->ksmGroup, qemuFDPassDirectFree);
    if (fd < 0) {
        VIR_WARN("domain '%s' starts without the daemon of its group '%s': "
                 "cannot connect to %s: %s; is ksm-poold@%s.socket started? "
                 "QEMU goes on trying, if it may",
                 vm->def->name, group, path, g_strerror(error), group);
        return 0;
    }
    priv->ksmGroup = qemuFDPassDirectNew("ksm-group", &fd);
    return 0;
}


void
qemuKsmPassGroup(virCommand *cmd,
                 qemuDomainObjPrivate *priv)
{
    qemuFDPassDirectTransferCommand(priv->ksmGroup, cmd);
}


int
qemuKsmBackendProps(virJSONValue **props,
                    qemuDomainObjPrivate *priv,
                    const virDomainDef *def,
                    const char *alias,
                    bool hugepages,
                    virDomainMemoryAccess access)
{
    const virDomainMemoryKsm *ksm = def->mem.ksm;
    const char *scope = NULL;
    const char *freePolicy = NULL;
    const char *dirtyTracking = NULL;
    g_autoptr(qemuFDPassDirect) group = NULL;

    /* what is plugged in later has not been through qemuKsmValidateDomain */
    if (hugepages) {
        g_autofree char *whose = g_strdup_printf(_("a page size of '%s'"),
                                                 NULLSTR(alias));

        return qemuKsmRefuse(whose, _("pages of hugetlbfs cannot be merged"));
    }
    if (access == VIR_DOMAIN_MEMORY_ACCESS_SHARED) {
        return qemuKsmRefuseShared(_("a memory device with shared memory"));
    }
    if (!ksm) {
        return 0;
    }

    if (ksm->scope) {
        scope = virDomainMemoryKsmScopeTypeToString(ksm->scope);
    }
    if (ksm->free_policy) {
        freePolicy = virDomainMemoryKsmFreePolicyTypeToString(ksm->free_policy);
    }
    if (ksm->dirty_tracking) {
        dirtyTracking =
            virDomainMemoryKsmDirtyTrackingTypeToString(ksm->dirty_tracking);
    }
    /* one connection for all objects: the first has it, the others share it */
    group = g_steal_pointer(&priv->ksmGroup);
    return virJSONValueObjectAdd(props,
                                 "S:scope", scope,
                                 "S:group", ksm->group,
                                 "S:group-fd", qemuFDPassDirectGetPath(group),
                                 "p:max-cpu", ksm->max_cpu,
                                 "p:threads", ksm->threads,
                                 "p:target-scan-time", ksm->target_scan_time,
                                 "S:free-policy", freePolicy,
                                 "S:dirty-tracking", dirtyTracking,
                                 NULL) < 0 ? -1 : 0;
}


static bool
qemuKsmSourceIsPlain(const virDomainDef *def)
{
    switch ((virDomainMemorySource)def->mem.source) {
    case VIR_DOMAIN_MEMORY_SOURCE_KSM:
        return true;
    case VIR_DOMAIN_MEMORY_SOURCE_NONE:
    case VIR_DOMAIN_MEMORY_SOURCE_ANONYMOUS:
        return def->mem.nhugepages == 0 &&
               def->mem.access != VIR_DOMAIN_MEMORY_ACCESS_SHARED;
    case VIR_DOMAIN_MEMORY_SOURCE_FILE:
    case VIR_DOMAIN_MEMORY_SOURCE_MEMFD:
    case VIR_DOMAIN_MEMORY_SOURCE_LAST:
        break;
    }
    return false;
}


bool
qemuKsmSourcesMigratable(const virDomainDef *src,
                         const virDomainDef *dst)
{
    return (src->mem.source == VIR_DOMAIN_MEMORY_SOURCE_KSM ||
            dst->mem.source == VIR_DOMAIN_MEMORY_SOURCE_KSM) &&
           qemuKsmSourceIsPlain(src) && qemuKsmSourceIsPlain(dst);
}


/*
 * Members of query-ksm-stats's backends that are counts.  They are added up
 * over a domain's backends, but for those of the engine, which has all of
 * them: the same for each.
 */
static const struct {
    const char *name;
    bool engine;
} qemuKsmCounts[] = {
    { "size", false },
    { "resident", false },
    { "merged-bytes", false },
    { "shared-bytes", false },
    { "saved-bytes", false },
    { "unshared-bytes", false },
    { "volatile-bytes", false },
    { "zero-bytes", false },
    { "free-hinted-bytes", false },
    /* deprecated: the same in pages */
    { "pages-merged", false },
    { "pages-shared", false },
    { "pages-sharing", false },
    { "pages-unshared", false },
    { "pages-volatile", false },
    { "zero-pages", false },
    { "free-hinted", false },
    /* the rest */
    { "pages-skipped", true },
    { "pages-scanned", true },
    { "merged-runs", false },
    { "verify-failed", false },
    { "pinned", false },
    { "busy", false },
    { "cow-broken", false },
    { "lazy-free", false },
    { "huge-split", true },
    { "metadata", false },
    { "page-tables", false },
    { "scan-time", true },
    { "merge-time", true },
    { "log-time", true },
};


/* domstats' names have no hyphens */
static char *
qemuKsmStatName(const char *prefix,
                const char *member)
{
    g_autofree char *name = g_strdup_printf("%s.%s", prefix, member);

    return g_strdelimit(g_steal_pointer(&name), "-", '_');
}


static void
qemuKsmAddString(virTypedParamList *params,
                 const char *prefix,
                 const char *member,
                 const char *value)
{
    g_autofree char *name = qemuKsmStatName(prefix, member);

    if (value) {
        QEMU_KSM_ADD(virTypedParamListAddString(params, value, "%s", name));
    }
}


static void
qemuKsmAddReasons(virTypedParamList *params,
                  const char *prefix,
                  virJSONValue *backend)
{
    virJSONValue *reasons = virJSONValueObjectGetArray(backend, "reasons");
    g_auto(virBuffer) buf = VIR_BUFFER_INITIALIZER;
    g_autofree char *text = NULL;
    size_t i;

    for (i = 0; reasons && i < virJSONValueArraySize(reasons); i++) {
        virJSONValue *reason = virJSONValueArrayGet(reasons, i);
        const char *kind = virJSONValueObjectGetString(reason, "kind");

        if (kind) {
            virBufferAsprintf(&buf, "%s,", kind);
        }
    }
    virBufferTrim(&buf, ",");
    text = virBufferContentAndReset(&buf);
    qemuKsmAddString(params, prefix, "reasons", text);
}


static void
qemuKsmAddBackend(virTypedParamList *params,
                  size_t i,
                  virJSONValue *backend)
{
    static const char *const texts[] = { "id", "scope", "state" };
    g_autofree char *prefix = g_strdup_printf("memory.ksm.backend.%zu", i);
    unsigned long long count;
    long long profit;
    size_t j;

    for (j = 0; j < G_N_ELEMENTS(texts); j++) {
        qemuKsmAddString(params, prefix, texts[j],
                         virJSONValueObjectGetString(backend, texts[j]));
    }
    qemuKsmAddReasons(params, prefix, backend);
    for (j = 0; j < G_N_ELEMENTS(qemuKsmCounts); j++) {
        const char *member = qemuKsmCounts[j].name;
        g_autofree char *name = qemuKsmStatName(prefix, member);

        if (virJSONValueObjectGetNumberUlong(backend, member, &count) == 0) {
            QEMU_KSM_ADD(virTypedParamListAddULLong(params, count,
                                                    "%s", name));
        }
    }
    if (virJSONValueObjectGetNumberLong(backend, "profit", &profit) == 0) {
        QEMU_KSM_ADD(virTypedParamListAddLLong(params, profit,
                                               "%s.profit", prefix));
    }
}


/* one for all of the process: the first backend's is everybody's */
static void
qemuKsmAddGroup(virTypedParamList *params,
                virJSONValue *backend)
{
    static const char *const counts[] = {
        "generation", "members", "pool-bytes", "pool-limit", "held-bytes",
        "share-bytes", "saved-bytes", "held", "share", "saved",
    };
    const char *prefix = "memory.ksm.group";
    virJSONValue *group = virJSONValueObjectGetObject(backend, "group");
    unsigned long long count;
    bool connected;
    size_t i;

    if (!group) {
        return;
    }
    qemuKsmAddString(params, prefix, "name",
                     virJSONValueObjectGetString(group, "name"));
    if (virJSONValueObjectGetBoolean(group, "connected", &connected) == 0) {
        QEMU_KSM_ADD(virTypedParamListAddBoolean(params, connected,
                                                 "%s.connected", prefix));
    }
    for (i = 0; i < G_N_ELEMENTS(counts); i++) {
        g_autofree char *name = qemuKsmStatName(prefix, counts[i]);

        if (virJSONValueObjectGetNumberUlong(group, counts[i], &count) == 0) {
            QEMU_KSM_ADD(virTypedParamListAddULLong(params, count,
                                                    "%s", name));
        }
    }
}


static void
qemuKsmAddTotals(virTypedParamList *params,
                 virJSONValue *backends)
{
    size_t n = virJSONValueArraySize(backends);
    size_t i;
    size_t j;

    for (j = 0; j < G_N_ELEMENTS(qemuKsmCounts); j++) {
        const char *member = qemuKsmCounts[j].name;
        g_autofree char *name = qemuKsmStatName("memory.ksm", member);
        unsigned long long total = 0;
        bool known = false;

        for (i = 0; i < n; i++) {
            virJSONValue *backend = virJSONValueArrayGet(backends, i);
            unsigned long long count;

            if (virJSONValueObjectGetNumberUlong(backend, member,
                                                 &count) == 0) {
                total = qemuKsmCounts[j].engine ? MAX(total, count)
                                                : total + count;
                known = true;
            }
        }
        if (known) {
            QEMU_KSM_ADD(virTypedParamListAddULLong(params, total,
                                                    "%s", name));
        }
    }
}


/*
 * What the kernel's KSM says of the whole process: the figure there is with
 * scope 'host', where no backend has a profit of its own.
 */
static void
qemuKsmAddProcess(virTypedParamList *params,
                  virJSONValue *process)
{
    long long value;

    if (process &&
        virJSONValueObjectGetNumberLong(process, "profit", &value) == 0) {
        QEMU_KSM_ADD(virTypedParamListAddLLong(params, value,
                                               "memory.ksm.process_profit"));
    }
    if (process &&
        virJSONValueObjectGetNumberLong(process, "rmap-items", &value) == 0) {
        QEMU_KSM_ADD(virTypedParamListAddLLong(params, value,
                                               "memory.ksm.rmap_items"));
    }
}


static virJSONValue *
qemuKsmQueryStats(virDomainObj *vm)
{
    qemuDomainObjPrivate *priv = vm->privateData;
    g_autofree char *text = NULL;
    g_autoptr(virJSONValue) reply = NULL;
    virJSONValue *stats = NULL;
    int rc;

    qemuDomainObjEnterMonitor(vm);
    rc = qemuMonitorArbitraryCommand(priv->mon,
                                     "{\"execute\":\"query-ksm-stats\"}",
                                     -1, &text, false);
    qemuDomainObjExitMonitor(vm);

    if (rc == 0 && text) {
        reply = virJSONValueFromString(text);
    }
    if (reply) {
        stats = virJSONValueObjectStealObject(reply, "return");
    }
    if (!stats) {
        /* statistics are a courtesy: domstats has the others to show */
        VIR_DEBUG("no query-ksm-stats of '%s'", vm->def->name);
        virResetLastError();
        return NULL;
    }
    return stats;
}


void
qemuKsmGetStats(virDomainObj *vm,
                virTypedParamList *params)
{
    g_autoptr(virJSONValue) stats = qemuKsmQueryStats(vm);
    virJSONValue *backends = NULL;
    size_t n = 0;
    size_t i;

    if (stats) {
        backends = virJSONValueObjectGetArray(stats, "backends");
    }
    if (backends) {
        n = virJSONValueArraySize(backends);
    }
    if (n == 0) {
        return;
    }

    qemuKsmAddTotals(params, backends);
    qemuKsmAddGroup(params, virJSONValueArrayGet(backends, 0));
    qemuKsmAddProcess(params, virJSONValueObjectGetObject(stats, "process"));
    QEMU_KSM_ADD(virTypedParamListAddUInt(params, n,
                                          "memory.ksm.backend.count"));
    for (i = 0; i < n; i++) {
        qemuKsmAddBackend(params, i, virJSONValueArrayGet(backends, i));
    }
}
