/*
 * query-ksm-stats: what merging saves, what it costs, why nothing is merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Puts together what ksm-kernel.c reads and what the backends know.  Leaves
 * to others: how it looks in the human monitor (ksm-hmp-cmds.c).
 */

#include "qemu/osdep.h"
#include "block/thread-pool.h"
#include "hw/mem/ksm-balloon.h"
#include "hw/mem/ksm-compat.h"
#include "hw/mem/ksm.h"
#include "ksm-guest.h"
#include "ksm-kernel.h"
#include "ksm-schema.h"
#include "ksm-stats.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-ksm.h"
#include "qapi/util.h"
#include "qemu/coroutine.h"
#include "qemu/main-loop.h"
#include "qom/object_interfaces.h"
#include "system/hostmem-ksm.h"

static void reason_add(MemoryKsmReasonList **list, MemoryKsmReasonKind kind,
                       const char *text, uint64_t pages)
{
    MemoryKsmReason *reason = g_new0(MemoryKsmReason, 1);

    reason->kind = kind;
    reason->text = g_strdup(text);
    reason->has_pages = pages != 0;
    reason->pages = pages;
    /* few of them: walking to the end is cheaper than carrying it about */
    while (*list) {
        list = &(*list)->next;
    }
    *list = g_new0(MemoryKsmReasonList, 1);
    (*list)->value = reason;
}

/* Copies a value that is known into an optional member of the schema. */
#define COPY_KNOWN(to, member, from)            \
    do {                                        \
        (to)->has_##member = (from).known;      \
        (to)->member = (from).value;            \
    } while (0)

/*
 * Why the kernel merges nothing on this host.  Returns false if ksmd runs,
 * as far as can be seen.
 */
static bool host_reasons(const KsmKernelHost *kernel,
                         MemoryKsmReasonList **list)
{
    if (!kernel->present) {
        reason_add(list, MEMORY_KSM_REASON_KIND_NO_KERNEL_SUPPORT,
                   "there is no " KSM_KERNEL_SYSFS ": the kernel has no KSM, "
                   "or /sys is not mounted", 0);
        return true;
    }
    if (!kernel->run.known) {
        reason_add(list, MEMORY_KSM_REASON_KIND_UNREADABLE,
                   KSM_KERNEL_SYSFS "/run cannot be read, so it is not known "
                   "whether ksmd runs", 0);
        return false;
    }
    if (kernel->run.value == 1) {
        if (kernel->pages_to_scan.known && !kernel->pages_to_scan.value) {
            reason_add(list, MEMORY_KSM_REASON_KIND_KSMD_STOPPED,
                       "ksmd runs, but is told to scan no pages; set "
                       KSM_KERNEL_SYSFS "/pages_to_scan", 0);
            return true;
        }
        return false;
    }
    reason_add(list, MEMORY_KSM_REASON_KIND_KSMD_STOPPED,
               kernel->run.value == 2 ?
               "ksmd has been stopped and everything unmerged ("
               KSM_KERNEL_SYSFS "/run is 2); start it with "
               "'echo 1 > " KSM_KERNEL_SYSFS "/run'" :
               "ksmd does not run; start it with "
               "'echo 1 > " KSM_KERNEL_SYSFS "/run'", 0);
    if (!kernel->may_start) {
        reason_add(list, MEMORY_KSM_REASON_KIND_NOT_PERMITTED,
                   "this process may not write " KSM_KERNEL_SYSFS "/run; the "
                   "host's administrator has to start ksmd", 0);
    }
    return true;
}

static MemoryKsmHostStats *host_stats(const KsmKernelHost *kernel)
{
    MemoryKsmHostStats *host = g_new0(MemoryKsmHostStats, 1);
    bool stopped = host_reasons(kernel, &host->reasons);

    host->state = stopped ? MEMORY_KSM_STATE_INHIBITED
                          : MEMORY_KSM_STATE_ACTIVE;
    if (!stopped && kernel->pages_shared.known &&
        !kernel->pages_shared.value) {
        reason_add(&host->reasons, MEMORY_KSM_REASON_KIND_NOTHING_EQUAL,
                   "ksmd has found nothing equal on this host yet", 0);
    }
    COPY_KNOWN(host, run, kernel->run);
    COPY_KNOWN(host, pages_to_scan, kernel->pages_to_scan);
    COPY_KNOWN(host, sleep_millisecs, kernel->sleep_millisecs);
    COPY_KNOWN(host, pages_shared, kernel->pages_shared);
    COPY_KNOWN(host, pages_sharing, kernel->pages_sharing);
    COPY_KNOWN(host, pages_unshared, kernel->pages_unshared);
    COPY_KNOWN(host, pages_volatile, kernel->pages_volatile);
    COPY_KNOWN(host, pages_skipped, kernel->pages_skipped);
    COPY_KNOWN(host, pages_scanned, kernel->pages_scanned);
    COPY_KNOWN(host, full_scans, kernel->full_scans);
    COPY_KNOWN(host, zero_pages, kernel->zero_pages);
    COPY_KNOWN(host, profit, kernel->profit);
    COPY_KNOWN(host, lazy_reclaimed, kernel->lazy_reclaimed);
    return host;
}

static MemoryKsmProcessStats *process_stats(const KsmKernelProcess *kernel)
{
    MemoryKsmProcessStats *process = g_new0(MemoryKsmProcessStats, 1);

    COPY_KNOWN(process, rmap_items, kernel->rmap_items);
    COPY_KNOWN(process, pages_merged, kernel->merging_pages);
    COPY_KNOWN(process, zero_pages, kernel->zero_pages);
    COPY_KNOWN(process, profit, kernel->profit);
    return process;
}

/* Everything that is read once for all backends. */
typedef struct KsmStatsInput {
    KsmKernelHost host;
    KsmKernelProcess process;
    GPtrArray *backends;        /* of HostMemoryBackendKsm, with references */
    KsmKernelRange *ranges;     /* one for each of them */
} KsmStatsInput;

/*
 * The kernel walks all page tables and mappings for smaps: a few ms per GiB
 * and per thousand mappings.  So this is done without the BQL.
 */
static int input_read(void *opaque)
{
    KsmStatsInput *input = opaque;

    ksm_kernel_read_host(KSM_KERNEL_SYSFS, &input->host);
    ksm_kernel_read_vmstat(KSM_KERNEL_VMSTAT, &input->host);
    ksm_kernel_read_process(KSM_KERNEL_PROC, &input->process);
    if (input->backends->len) {
        ksm_kernel_read_ranges(KSM_KERNEL_PROC, input->ranges,
                               input->backends->len);
    }
    return 0;
}

static void input_read_unlocked(KsmStatsInput *input)
{
    if (qemu_in_coroutine()) {
        thread_pool_submit_co(input_read, input);
        return;
    }
    /* as a monitor command that waits for a vCPU (run_on_cpu) */
    bql_unlock();
    input_read(input);
    bql_lock();
}

/* State and reasons of a backend whose memory the kernel merges. */
static void kernel_backend_reasons(HostMemoryBackendKsm *ksm,
                                   const KsmStatsInput *input,
                                   const KsmKernelRange *range,
                                   MemoryKsmBackendStats *stats)
{
    int refused = ksm_guest_refused(ksm->guest);

    if (!ksm->tuning.run) {
        stats->state = MEMORY_KSM_STATE_OFF;
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_RUN_OFF,
                   "the property 'run' is off", 0);
        return;
    }
    stats->state = MEMORY_KSM_STATE_INHIBITED;
    if (refused || (range->known && !range->mergeable)) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_REFUSED,
                   refused ? strerror(refused)
                           : "the memory is not marked as mergeable", 0);
        return;
    }
    if (host_reasons(&input->host, &stats->reasons)) {
        return;
    }
    stats->state = MEMORY_KSM_STATE_ACTIVE;
    if (range->merged.known && range->merged.value) {
        return;
    }
    if (input->process.rmap_items.known && !input->process.rmap_items.value) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_NOT_SCANNED,
                   "ksmd has not looked at this process yet", 0);
    } else if (range->merged.known) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_NOTHING_EQUAL,
                   "ksmd has found nothing equal yet", 0);
    } else if (stats->reasons == NULL) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_UNREADABLE,
                   "the kernel does not say what is merged of this memory", 0);
    }
}

static void kernel_backend_stats(HostMemoryBackendKsm *ksm,
                                 const KsmStatsInput *input,
                                 const KsmKernelRange *range,
                                 MemoryKsmBackendStats *stats)
{
    stats->has_mergeable = range->known;
    stats->mergeable = range->mergeable;
    stats->has_pages_merged = range->merged.known;
    stats->pages_merged = range->merged.value / qemu_real_host_page_size();
    kernel_backend_reasons(ksm, input, range, stats);
}

/* libksm's reasons, each with the pages it holds for. */
static void engine_backend_reasons(const KsmGuestInfo *info,
                                   MemoryKsmBackendStats *stats)
{
    for (int i = 0; info->has_stats && i < KSM_REASON_MAX; i++) {
        uint64_t pages = info->region.reasons[i];

        /* said for the whole backend already, with more of a text */
        if (!pages || (info->inhibited && (i == KSM_REASON_RUN_OFF ||
                                           i == KSM_REASON_INHIBITED))) {
            continue;
        }
        reason_add(&stats->reasons, ksm_schema_reason(i), ksm_reason_text(i),
                   pages);
    }
}

static MemoryKsmStall *engine_stall(const KsmStats *engine)
{
    MemoryKsmStall *stall = g_new0(MemoryKsmStall, 1);

    stall->count = engine->stall_count;
    stall->p50 = engine->stall_p50;
    stall->p99 = engine->stall_p99;
    stall->max = engine->stall_max;
    return stall;
}

/* Copies a count of libksm's into an optional member of the same name. */
#define COPY(to, from, member)                  \
    do {                                        \
        (to)->has_##member = true;              \
        (to)->member = (from)->member;          \
    } while (0)

/*
 * All backends share one engine.  What only the engine as a whole knows is
 * divided among them: the pages of the pool by who uses how many, memory by
 * size.
 */
static void engine_backend_saved(const KsmGuestInfo *info,
                                 MemoryKsmBackendStats *stats)
{
    const KsmStats *region = &info->region;
    const KsmStats *engine = &info->engine;
    uint64_t users = engine->pages_shared + engine->pages_sharing;

    stats->has_pages_merged = true;
    stats->pages_merged = region->pages_sharing;
    stats->has_pages_shared = true;
    stats->pages_shared = users ? (double)engine->pages_shared *
                                  stats->pages_merged / users + 0.5 : 0;
    stats->has_pages_sharing = true;
    stats->pages_sharing = stats->pages_merged - stats->pages_shared;
    stats->has_metadata = true;
    stats->metadata = (double)engine->metadata * region->pages_total /
                      engine->pages_total;
    stats->has_page_tables = true;
    stats->page_tables = region->page_tables;
    stats->has_profit = true;
    stats->profit = (int64_t)(stats->pages_sharing + region->zero_pages) *
                    KSM_PAGE_SIZE - stats->metadata - stats->page_tables;
}

static void engine_backend_counts(const KsmGuestInfo *info,
                                  MemoryKsmBackendStats *stats)
{
    const KsmStats *region = &info->region;
    const KsmStats *engine = &info->engine;

    engine_backend_saved(info, stats);
    COPY(stats, region, pages_unshared);
    COPY(stats, region, pages_volatile);
    COPY(stats, region, zero_pages);
    COPY(stats, region, merged_runs);
    COPY(stats, region, verify_failed);
    COPY(stats, region, pinned);
    COPY(stats, region, busy);
    COPY(stats, region, cow_broken);
    COPY(stats, region, free_hinted);
    /* of the engine as a whole */
    COPY(stats, engine, pages_scanned);
    COPY(stats, engine, pages_skipped);
    COPY(stats, engine, full_scans);
    COPY(stats, engine, huge_split);
    COPY(stats, engine, scan_time);
    COPY(stats, engine, merge_time);
    stats->has_log_time = info->has_log;
    stats->log_time = info->log_time;
    stats->stall = engine_stall(engine);
}

static void engine_backend_stats(HostMemoryBackendKsm *ksm,
                                 MemoryKsmBackendStats *stats)
{
    KsmGuestInfo info;

    ksm_guest_info(ksm->guest, &info);
    stats->state = info.state;
    if (!ksm->tuning.run) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_RUN_OFF,
                   info.inhibited, 0);
    } else if (info.inhibited) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_INHIBITED,
                   info.inhibited, 0);
    }
    if (info.failure) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_REFUSED,
                   info.failure, 0);
    }
    engine_backend_reasons(&info, stats);
    if (info.has_stats) {
        engine_backend_counts(&info, stats);
    }
}

/* What the guest has given back, and why it does not. */
static void freed_backend_stats(HostMemoryBackendKsm *ksm,
                                MemoryKsmBackendStats *stats)
{
    const char *inert = ksm_balloon_inert();
    KsmBalloonStats freed;

    if (ksm_balloon_get_stats(ksm, &freed)) {
        stats->has_free_hinted = true;
        stats->free_hinted = freed.hinted;
        stats->has_free_eager = true;
        stats->free_eager = freed.eager;
        stats->has_free_decayed = true;
        stats->free_decayed = freed.decayed;
    }
    if (inert) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_BALLOON_INERT,
                   inert, 0);
    }
}

static MemoryKsmBackendStats *backend_stats(HostMemoryBackendKsm *ksm,
                                            const KsmStatsInput *input,
                                            const KsmKernelRange *range)
{
    MemoryKsmBackendStats *stats = g_new0(MemoryKsmBackendStats, 1);

    stats->id = g_strdup(object_get_canonical_path_component(OBJECT(ksm)));
    stats->scope = ksm->scope;
    stats->size = MEMORY_BACKEND(ksm)->size;
    stats->has_resident = stats->has_used = stats->has_lazy_free = range->known;
    stats->resident = range->resident;
    stats->lazy_free = range->lazy_free;
    stats->used = range->resident - MIN(range->resident, range->lazy_free);
    if (ksm_guest_is_ours(ksm->guest)) {
        engine_backend_stats(ksm, stats);
    } else {
        kernel_backend_stats(ksm, input, range, stats);
    }
    freed_backend_stats(ksm, stats);
    return stats;
}

static int backend_collect(Object *obj, void *opaque)
{
    if (object_dynamic_cast(obj, TYPE_MEMORY_BACKEND_KSM) &&
        MEMORY_BACKEND_KSM(obj)->guest) {
        g_ptr_array_add(opaque, object_ref(obj));
    }
    return 0;
}

MemoryKsmStats *ksm_stats_query(void)
{
    g_autoptr(GPtrArray) backends = g_ptr_array_new_full(4, object_unref);
    g_autofree KsmKernelRange *ranges = NULL;
    MemoryKsmStats *stats = g_new0(MemoryKsmStats, 1);
    KsmStatsInput input = { .backends = backends };
    MemoryKsmBackendStatsList **tail = &stats->backends;

    object_child_foreach(object_get_objects_root(), backend_collect, backends);
    input.ranges = ranges = g_new0(KsmKernelRange, backends->len);
    for (unsigned i = 0; i < backends->len; i++) {
        HostMemoryBackend *backend = MEMORY_BACKEND(backends->pdata[i]);

        ranges[i].start = (uintptr_t)memory_region_get_ram_ptr(&backend->mr);
        ranges[i].size = memory_region_size(&backend->mr);
    }
    input_read_unlocked(&input);
    stats->host = host_stats(&input.host);
    stats->process = process_stats(&input.process);
    for (unsigned i = 0; i < backends->len; i++) {
        HostMemoryBackendKsm *ksm = MEMORY_BACKEND_KSM(backends->pdata[i]);

        /* it may have been deleted meanwhile */
        if (OBJECT(ksm)->parent) {
            QAPI_LIST_APPEND(tail, backend_stats(ksm, &input, &ranges[i]));
        }
    }
    return stats;
}

MemoryKsmStats *coroutine_fn qmp_query_ksm_stats(Error **errp)
{
    return ksm_stats_query();
}

void qmp_ksm_unmerge(const char *id, bool has_offset, uint64_t offset,
                     bool has_size, uint64_t size, Error **errp)
{
    Object *obj = object_resolve_path_component(object_get_objects_root(), id);
    HostMemoryBackendKsm *ksm;

    if (!obj || !object_dynamic_cast(obj, TYPE_MEMORY_BACKEND_KSM) ||
        !MEMORY_BACKEND_KSM(obj)->guest) {
        error_setg(errp, "there is no " TYPE_MEMORY_BACKEND_KSM
                   " with the id '%s'", id);
        return;
    }
    ksm = MEMORY_BACKEND_KSM(obj);
    offset = has_offset ? offset : 0;
    if (!has_size) {
        size = MEMORY_BACKEND(ksm)->size - MIN(offset,
                                               MEMORY_BACKEND(ksm)->size);
    }
    ksm_guest_unmerge(ksm->guest, offset, size, errp);
}
