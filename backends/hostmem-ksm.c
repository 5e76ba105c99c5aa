/*
 * QEMU host memory backend whose memory is merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The object memory-backend-ksm: its properties, and which of them go
 * together.  Leaves to others: merging (hw/mem/ksm-*.c, which do not know this
 * file).
 */

#include "qemu/osdep.h"
#include "hw/mem/ksm-balloon.h"
#include "hw/mem/ksm-compat.h"
#include "hw/mem/ksm.h"
#include "monitor/monitor.h"
#include "qapi/error.h"
#include "qapi/qapi-visit-qom.h"
#include "qapi/visitor.h"
#include "qemu/module.h"
#include "qemu/sockets.h"
#include "qom/object_interfaces.h"
#include "system/hostmem.h"
#include "system/system.h"

#define TYPE_MEMORY_BACKEND_KSM "memory-backend-ksm"
OBJECT_DECLARE_TYPE(HostMemoryBackendKsm, HostMemoryBackendKsmClass,
                    MEMORY_BACKEND_KSM)

struct HostMemoryBackendKsmClass {
    HostMemoryBackendClass parent_class;
    void (*parent_complete)(UserCreatable *uc, Error **errp);
};

struct HostMemoryBackendKsm {
    HostMemoryBackend parent;

    /* see MemoryBackendKsmProperties in qapi/qom.json */
    KsmGuestConfig config;
    KsmGuestTuning tuning;
    char *group, *group_socket, *group_fd;
    bool merge_across_nodes;
    /* the first property set that needs the merging iothread */
    const char *needs_engine;

    KsmGuest *guest;    /* NULL until the memory is there */
    KsmBalloon *balloon;        /* the same */
};

/* Refuses all that makes merging impossible while a user can still react. */
static bool ksm_backend_check_parent(HostMemoryBackend *backend, Error **errp)
{
    ERRP_GUARD();

    if (!backend->size) {
        error_setg(errp, "can't create backend with size 0");
        return false;
    }
    if (backend->share) {
        error_setg(errp, "property 'share' of " TYPE_MEMORY_BACKEND_KSM
                   " must be off: only private memory can be merged");
        error_append_hint(errp, "Where other processes need the memory, use "
                          "memory-backend-memfd.\n");
        return false;
    }
    if (!backend->merge) {
        error_setg(errp, "property 'merge' of " TYPE_MEMORY_BACKEND_KSM
                   " must be on");
        error_append_hint(errp, "Its default comes from -machine mem-merge. "
                          "For memory that is never merged, use "
                          "memory-backend-ram.\n");
        return false;
    }
    if (backend->prealloc) {
        error_setg(errp, "property 'prealloc' of " TYPE_MEMORY_BACKEND_KSM
                   " must be off: merging gives back to the host what was "
                   "allocated");
        error_append_hint(errp, "For memory that is allocated in advance and "
                          "stays so, use memory-backend-ram; without "
                          "-mem-prealloc.\n");
        return false;
    }
    if (backend->guest_memfd) {
        error_setg(errp, TYPE_MEMORY_BACKEND_KSM " cannot be used with "
                   "guest_memfd: the memory of a confidential guest cannot "
                   "be merged");
        error_append_hint(errp, "Use memory-backend-ram.\n");
        return false;
    }
    if (should_mlock(mlock_state)) {
        error_setg(errp, TYPE_MEMORY_BACKEND_KSM " cannot be used with "
                   "-overcommit mem-lock: locked memory is not merged");
        error_append_hint(errp, "Use -overcommit mem-lock=off, or "
                          "memory-backend-ram.\n");
        return false;
    }
    return true;
}

/* Its name is part of a path. */
static bool ksm_backend_group_is_valid(const char *name)
{
    for (const char *c = name; *c; c++) {
        if (!g_ascii_isalnum(*c) && !strchr("._-", *c)) {
            return false;
        }
    }
    return *name != '.' && strlen(name) <= 64;
}

static bool ksm_backend_check(HostMemoryBackendKsm *ksm, Error **errp)
{
    ERRP_GUARD();
    g_autofree char *why = NULL;
    const char *scope = MemoryKsmScope_str(ksm->config.scope);
    /* scope=host has a group, too, but its name is known */
    bool host = ksm->config.scope == MEMORY_KSM_SCOPE_HOST;
    const char *of_group = ksm->group ? "group" :
                           ksm->group_socket && !host ? "group-socket" :
                           ksm->group_fd ? "group-fd" : NULL;

    if (of_group && ksm->config.scope != MEMORY_KSM_SCOPE_GROUP) {
        error_setg(errp, "property '%s' needs scope=group, not scope=%s",
                   of_group, scope);
        return false;
    }
    if (!ksm->group && ksm->config.scope == MEMORY_KSM_SCOPE_GROUP) {
        error_setg(errp, "scope=group needs the property 'group', the name "
                   "of the group");
        return false;
    }
    if (ksm->group && !ksm_backend_group_is_valid(ksm->group)) {
        error_setg(errp, "property 'group' is a name of up to 64 letters, "
                   "digits, '.', '_' and '-', without '.' in front, not '%s'",
                   ksm->group);
        return false;
    }
    if (!ksm_guest_check(&ksm->config, errp)) {
        return false;
    }
    if (ksm->needs_engine && !ksm_guest_would_be_ours(&ksm->config, &why)) {
        error_setg(errp, "property '%s' is not available with scope=host "
                   "where the kernel merges", ksm->needs_engine);
        error_append_hint(errp, "It is tuned in /sys/kernel/mm/ksm; or let "
                          "QEMU merge: start ksm-poold@host.\n");
        if (why) {
            error_append_hint(errp, "%s.\n", why);
        }
        return false;
    }
    return true;
}

static bool ksm_backend_alloc(HostMemoryBackend *backend, Error **errp)
{
    g_autofree char *name = NULL;
    uint32_t ram_flags;

    name = host_memory_backend_get_name(backend);
    ram_flags = RAM_PRIVATE | (backend->reserve ? 0 : RAM_NORESERVE);
    return memory_region_init_ram_flags_nomigrate(&backend->mr,
                                                  OBJECT(backend), name,
                                                  backend->size, ram_flags,
                                                  errp);
}

/* Memory bound to host nodes is not merged with that of others. */
static int ksm_backend_node(const HostMemoryBackendKsm *ksm)
{
    const HostMemoryBackend *backend = &ksm->parent;

    if (ksm->merge_across_nodes ||
        backend->policy == HOST_MEM_POLICY_DEFAULT) {
        return -1;
    }
    return find_first_bit(backend->host_nodes, MAX_NODES);
}

/* -1 with @errp set. */
static int ksm_backend_take_fd(const char *name, Error **errp)
{
    int fd = monitor_fd_param(monitor_cur(), name, errp);

    if (fd < 0) {
        return -1;
    }
    if (!fd_is_socket(fd)) {
        error_setg(errp, "property 'group-fd' must be a connected socket, "
                   "which '%s' is not", name);
        if (!g_ascii_isdigit(name[0])) {
            close(fd);      /* the monitor has given it away */
        }
        return -1;
    }
    qemu_set_cloexec(fd);
    return fd;
}

static bool ksm_backend_check_max_cpu(const HostMemoryBackendKsm *ksm,
                                      unsigned value, Error **errp)
{
    unsigned threads = ksm->tuning.threads;

    if (value < 1 || value > 100 * threads) {
        error_setg(errp, "property 'max-cpu' must be 1 to %u (percent of one "
                   "CPU, for each of its 'threads'), not %u", 100 * threads,
                   value);
        return false;
    }
    return true;
}

static void ksm_backend_complete(UserCreatable *uc, Error **errp)
{
    ERRP_GUARD();
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(uc);
    HostMemoryBackend *backend = MEMORY_BACKEND(uc);

    ksm->config.group = ksm->group;
    ksm->config.group_socket = ksm->group_socket;
    if (!ksm_backend_check_max_cpu(ksm, ksm->tuning.max_cpu, errp) ||
        !ksm_backend_check_parent(backend, errp) ||
        !ksm_backend_check(ksm, errp)) {
        return;
    }
    /* ksm_guest_new() marks the memory itself, and sees if that fails */
    backend->merge = false;
    MEMORY_BACKEND_KSM_GET_CLASS(uc)->parent_complete(uc, errp);
    backend->merge = true;
    if (!*errp && ksm->group_fd) {
        ksm->config.group_fd = ksm_backend_take_fd(ksm->group_fd, errp);
    }
    if (!*errp) {
        ksm->config.node = ksm_backend_node(ksm);
        ksm->config.dump = backend->dump;
        ksm->guest = ksm_guest_new(host_memory_backend_get_memory(backend),
                                   &ksm->config, &ksm->tuning);
        ksm->balloon = ksm_balloon_new(ksm->guest);
    }
}

/* Properties that are fixed once the memory is there. */
static bool ksm_backend_may_set(HostMemoryBackendKsm *ksm, const char *name,
                                Error **errp)
{
    if (host_memory_backend_mr_inited(MEMORY_BACKEND(ksm))) {
        error_setg(errp, "cannot change property '%s' of "
                   TYPE_MEMORY_BACKEND_KSM, name);
        return false;
    }
    return true;
}

/*
 * Properties of the parent that would change memory, or its attributes, behind
 * the back of merging.
 */
static bool ksm_backend_may_change(HostMemoryBackend *backend,
                                   const char *property, int64_t value,
                                   Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(backend);

    if (g_str_equal(property, "dump")) {
        if (ksm->guest && value != backend->dump) {
            ksm_guest_set_dump(ksm->guest, value);
        }
        return true;
    }
    if (g_str_equal(property, "merge")) {
        if (value != backend->merge) {
            error_setg(errp, "cannot change property 'merge' of "
                       TYPE_MEMORY_BACKEND_KSM ": use 'run' to stop merging");
        }
        return value == backend->merge;
    }
    if (g_str_equal(property, "prealloc")) {
        if (value != backend->prealloc) {
            error_setg(errp, "cannot change property 'prealloc' of "
                       TYPE_MEMORY_BACKEND_KSM ": allocating all of the "
                       "memory would unmerge it");
        }
        return value == backend->prealloc;
    }
    /* policy, host-nodes: the parent would change only the values */
    error_setg(errp, "cannot change property '%s' of "
               TYPE_MEMORY_BACKEND_KSM, property);
    return false;
}

/* Properties of the merging iothread: see ksm_backend_check(). */
static bool ksm_backend_set_needs_engine(HostMemoryBackendKsm *ksm,
                                         const char *name, Error **errp)
{
    if (!ksm->guest) {
        ksm->needs_engine = ksm->needs_engine ?: name;
        return true;
    }
    if (!ksm_guest_is_ours(ksm->guest)) {
        error_setg(errp, "property '%s' is not available with scope=host "
                   "where the kernel merges", name);
        return false;
    }
    return true;
}

static void ksm_backend_tuned(HostMemoryBackendKsm *ksm, Error **errp)
{
    if (ksm->guest) {
        ksm_guest_tune(ksm->guest, &ksm->tuning, errp);
    }
}

static int ksm_backend_get_scope(Object *obj, Error **errp)
{
    return MEMORY_BACKEND_KSM(obj)->config.scope;
}

static void ksm_backend_set_scope(Object *obj, int value, Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    if (ksm_backend_may_set(ksm, "scope", errp)) {
        ksm->config.scope = value;
    }
}

static char *ksm_backend_get_group(Object *obj, Error **errp)
{
    return g_strdup(MEMORY_BACKEND_KSM(obj)->group);
}

static void ksm_backend_set_group(Object *obj, const char *value,
                                  Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    if (!ksm_backend_may_set(ksm, "group", errp)) {
        return;
    }
    if (!*value) {
        error_setg(errp, "property 'group' must not be empty");
        return;
    }
    g_free(ksm->group);
    ksm->group = g_strdup(value);
}

static char *ksm_backend_get_group_socket(Object *obj, Error **errp)
{
    return g_strdup(MEMORY_BACKEND_KSM(obj)->group_socket);
}

static void ksm_backend_set_group_socket(Object *obj, const char *value,
                                         Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    if (ksm_backend_may_set(ksm, "group-socket", errp)) {
        g_free(ksm->group_socket);
        ksm->group_socket = g_strdup(value);
    }
}

static char *ksm_backend_get_group_fd(Object *obj, Error **errp)
{
    return g_strdup(MEMORY_BACKEND_KSM(obj)->group_fd);
}

static void ksm_backend_set_group_fd(Object *obj, const char *value,
                                     Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    if (ksm_backend_may_set(ksm, "group-fd", errp)) {
        g_free(ksm->group_fd);
        ksm->group_fd = g_strdup(value);
    }
}

static void ksm_backend_check_iothread(const Object *obj, const char *name,
                                       Object *val, Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    if (ksm_backend_may_set(ksm, name, errp)) {
        ksm_backend_set_needs_engine(ksm, "iothread", errp);
    }
}

static int ksm_backend_get_dirty_tracking(Object *obj, Error **errp)
{
    return MEMORY_BACKEND_KSM(obj)->config.dirty_tracking;
}

static void ksm_backend_set_dirty_tracking(Object *obj, int value,
                                           Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    if (ksm_backend_may_set(ksm, "dirty-tracking", errp) &&
        ksm_backend_set_needs_engine(ksm, "dirty-tracking", errp)) {
        ksm->config.dirty_tracking = value;
    }
}

static int ksm_backend_get_free_policy(Object *obj, Error **errp)
{
    return MEMORY_BACKEND_KSM(obj)->config.free_policy;
}

static void ksm_backend_set_free_policy(Object *obj, int value, Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    if (ksm_backend_may_set(ksm, "free-policy", errp)) {
        ksm->config.free_policy = value;
    }
}

static bool ksm_backend_get_merge_across_nodes(Object *obj, Error **errp)
{
    return MEMORY_BACKEND_KSM(obj)->merge_across_nodes;
}

static void ksm_backend_set_merge_across_nodes(Object *obj, bool value,
                                               Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    if (ksm_backend_may_set(ksm, "merge-across-nodes", errp) &&
        ksm_backend_set_needs_engine(ksm, "merge-across-nodes", errp)) {
        ksm->merge_across_nodes = value;
    }
}

static bool ksm_backend_get_smart_scan(Object *obj, Error **errp)
{
    return MEMORY_BACKEND_KSM(obj)->tuning.smart_scan;
}

static void ksm_backend_set_smart_scan(Object *obj, bool value, Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    if (ksm_backend_set_needs_engine(ksm, "smart-scan", errp)) {
        ksm->tuning.smart_scan = value;
        ksm_backend_tuned(ksm, errp);
    }
}

static bool ksm_backend_get_run(Object *obj, Error **errp)
{
    return MEMORY_BACKEND_KSM(obj)->tuning.run;
}

static void ksm_backend_set_run(Object *obj, bool value, Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    ksm->tuning.run = value;
    ksm_backend_tuned(ksm, errp);
}

static void ksm_backend_get_max_cpu(Object *obj, Visitor *v, const char *name,
                                    void *opaque, Error **errp)
{
    visit_type_uint16(v, name, &MEMORY_BACKEND_KSM(obj)->tuning.max_cpu, errp);
}

static void ksm_backend_set_max_cpu(Object *obj, Visitor *v, const char *name,
                                    void *opaque, Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);
    uint16_t value;

    /* before, 'threads' may be to come: ksm_backend_complete() */
    if (!visit_type_uint16(v, name, &value, errp) ||
        (ksm->guest && !ksm_backend_check_max_cpu(ksm, value, errp))) {
        return;
    }
    if (ksm_backend_set_needs_engine(ksm, "max-cpu", errp)) {
        ksm->tuning.max_cpu = value;
        ksm_backend_tuned(ksm, errp);
    }
}

static void ksm_backend_get_threads(Object *obj, Visitor *v, const char *name,
                                    void *opaque, Error **errp)
{
    visit_type_uint8(v, name, &MEMORY_BACKEND_KSM(obj)->tuning.threads, errp);
}

static void ksm_backend_set_threads(Object *obj, Visitor *v, const char *name,
                                    void *opaque, Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);
    uint8_t value;

    if (!visit_type_uint8(v, name, &value, errp)) {
        return;
    }
    if (value < 1 || value > KSM_GUEST_THREADS) {
        error_setg(errp, "property 'threads' must be 1 to %u, not %u",
                   KSM_GUEST_THREADS, value);
        return;
    }
    if (ksm_backend_may_set(ksm, name, errp) &&
        ksm_backend_set_needs_engine(ksm, "threads", errp)) {
        ksm->tuning.threads = value;
    }
}

static void ksm_backend_get_scan_time(Object *obj, Visitor *v,
                                      const char *name, void *opaque,
                                      Error **errp)
{
    visit_type_uint32(v, name,
                      &MEMORY_BACKEND_KSM(obj)->tuning.target_scan_time, errp);
}

static void ksm_backend_set_scan_time(Object *obj, Visitor *v,
                                      const char *name, void *opaque,
                                      Error **errp)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);
    uint32_t value;

    if (!visit_type_uint32(v, name, &value, errp)) {
        return;
    }
    if (ksm_backend_set_needs_engine(ksm, "target-scan-time", errp)) {
        ksm->tuning.target_scan_time = value;
        ksm_backend_tuned(ksm, errp);
    }
}

static void ksm_backend_init(Object *obj)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    ksm->config.scope = MEMORY_KSM_SCOPE_HOST;
    ksm->config.group_fd = -1;
    ksm->tuning = (KsmGuestTuning) {
        .run = true,
        .smart_scan = true,
        .threads = 1,
        .max_cpu = 10,
    };
}

static void ksm_backend_finalize(Object *obj)
{
    HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(obj);

    g_clear_pointer(&ksm->balloon, ksm_balloon_free);
    g_clear_pointer(&ksm->guest, ksm_guest_free);
    g_free(ksm->group);
    g_free(ksm->group_socket);
    g_free(ksm->group_fd);
}

static void ksm_backend_add_policy(ObjectClass *oc)
{
    object_class_property_add_enum(oc, "scope", "MemoryKsmScope",
                                   &MemoryKsmScope_lookup,
                                   ksm_backend_get_scope,
                                   ksm_backend_set_scope);
    object_class_property_set_description(oc, "scope",
        "Who may share memory with it: zero, vm, group, host (default: host)");
    object_class_property_add_str(oc, "group", ksm_backend_get_group,
                                  ksm_backend_set_group);
    object_class_property_set_description(oc, "group",
        "Name of the group, for scope=group");
    object_class_property_add_str(oc, "group-socket",
                                  ksm_backend_get_group_socket,
                                  ksm_backend_set_group_socket);
    object_class_property_set_description(oc, "group-socket",
        "Path of the group's socket (default: /run/ksm-pool/GROUP.sock)");
    object_class_property_add_str(oc, "group-fd", ksm_backend_get_group_fd,
                                  ksm_backend_set_group_fd);
    object_class_property_set_description(oc, "group-fd",
        "A connection to the group's daemon: a descriptor, or its name");
    object_class_property_add_bool(oc, "merge-across-nodes",
                                   ksm_backend_get_merge_across_nodes,
                                   ksm_backend_set_merge_across_nodes);
    object_class_property_set_description(oc, "merge-across-nodes",
        "Also merge with memory of other host NUMA nodes (default: off)");
    object_class_property_add_enum(oc, "dirty-tracking",
                                   "MemoryKsmDirtyTracking",
                                   &MemoryKsmDirtyTracking_lookup,
                                   ksm_backend_get_dirty_tracking,
                                   ksm_backend_set_dirty_tracking);
    object_class_property_set_description(oc, "dirty-tracking",
        "How written pages are found: auto, log, pagemap, checksum "
        "(default: auto)");
    object_class_property_add_enum(oc, "free-policy", "MemoryKsmFreePolicy",
                                   &MemoryKsmFreePolicy_lookup,
                                   ksm_backend_get_free_policy,
                                   ksm_backend_set_free_policy);
    object_class_property_set_description(oc, "free-policy",
        "What is done with pages the guest freed: auto, lazy, eager "
        "(default: auto)");
}

static void ksm_backend_add_tuning(ObjectClass *oc)
{
    object_class_property_add_link(oc, "iothread", TYPE_IOTHREAD,
                                   offsetof(HostMemoryBackendKsm,
                                            config.iothread),
                                   ksm_backend_check_iothread,
                                   OBJ_PROP_LINK_STRONG);
    object_class_property_set_description(oc, "iothread",
        "The iothread that does the merging (default: one for all)");
    object_class_property_add(oc, "threads", "uint8", ksm_backend_get_threads,
                              ksm_backend_set_threads, NULL, NULL);
    object_class_property_set_description(oc, "threads",
        "Threads that merge: the iothread, and helpers of it (default: 1)");
    object_class_property_add(oc, "max-cpu", "uint16",
                              ksm_backend_get_max_cpu,
                              ksm_backend_set_max_cpu, NULL, NULL);
    object_class_property_set_description(oc, "max-cpu",
        "Percent of one CPU that merging may take, 1 to 100 for each of its "
        "threads (default: 10)");
    object_class_property_add(oc, "target-scan-time", "uint32",
                              ksm_backend_get_scan_time,
                              ksm_backend_set_scan_time, NULL, NULL);
    object_class_property_set_description(oc, "target-scan-time",
        "Seconds in which all memory is looked at once; 0: as fast as "
        "max-cpu allows (default: 0)");
    object_class_property_add_bool(oc, "smart-scan",
                                   ksm_backend_get_smart_scan,
                                   ksm_backend_set_smart_scan);
    object_class_property_set_description(oc, "smart-scan",
        "Pass over pages that never had an equal (default: on)");
    object_class_property_add_bool(oc, "run", ksm_backend_get_run,
                                   ksm_backend_set_run);
    object_class_property_set_description(oc, "run",
        "Merge (default: on)");
}

static void ksm_backend_class_init(ObjectClass *oc, KSM_CLASS_DATA *data)
{
    HostMemoryBackendKsmClass *kc = MEMORY_BACKEND_KSM_CLASS(oc);
    HostMemoryBackendClass *bc = MEMORY_BACKEND_CLASS(oc);
    UserCreatableClass *ucc = USER_CREATABLE_CLASS(oc);

    kc->parent_complete = ucc->complete;
    ucc->complete = ksm_backend_complete;
    bc->alloc = ksm_backend_alloc;
    bc->may_change = ksm_backend_may_change;
    ksm_backend_add_policy(oc);
    ksm_backend_add_tuning(oc);
}

static const TypeInfo ksm_backend_info = {
    .name = TYPE_MEMORY_BACKEND_KSM,
    .parent = TYPE_MEMORY_BACKEND,
    .class_init = ksm_backend_class_init,
    .class_size = sizeof(HostMemoryBackendKsmClass),
    .instance_init = ksm_backend_init,
    .instance_finalize = ksm_backend_finalize,
    .instance_size = sizeof(HostMemoryBackendKsm),
};

static void register_types(void)
{
    type_register_static(&ksm_backend_info);
}

type_init(register_types);
