/*
 * query-ksm-stats: savings and cost of merging, and reasons against it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Joins the kernel's view (ksm-kernel.c) and QEMU's (ksm-guest.c,
 * ksm-balloon.c).  Leaves to others: the human monitor (ksm-hmp-cmds.c).
 */

#include "qemu/osdep.h"
#include "block/thread-pool.h"
#include "hw/mem/ksm-balloon.h"
#include "ksm-guest.h"
#include "ksm-kernel.h"
#include "ksm-schema.h"
#include "ksm-stats.h"
#include "qapi/error.h"
#include "qapi/qapi-commands-ksm.h"
#include "qapi/util.h"
#include "qemu/coroutine.h"
#include "qemu/main-loop.h"

static void reason_add(MemoryKsmReasonList **list, MemoryKsmReasonKind kind,
                       const char *text)
{
    ksm_schema_add_reason(list, kind, text, 0);
}

/* Copies a value that is known into an optional member of the schema. */
#define COPY_KNOWN(to, member, from)            \
    do {                                        \
        (to)->has_##member = (from).known;      \
        (to)->member = (from).value;            \
    } while (0)

/* The same for a count: the kernel has none below zero. */
#define COPY_COUNT(to, member, from)                                    \
    do {                                                                \
        (to)->has_##member = (from).known && (from).value >= 0;         \
        (to)->member = (to)->has_##member ? (from).value : 0;           \
    } while (0)

/* Why the kernel merges nothing on this host.  False if ksmd seems to run. */
static bool host_reasons(const KsmKernelHost *kernel,
                         MemoryKsmReasonList **list)
{
    if (!kernel->present) {
        reason_add(list, MEMORY_KSM_REASON_KIND_NO_KERNEL_SUPPORT,
                   "there is no " KSM_KERNEL_SYSFS ": the kernel has no KSM, "
                   "or /sys is not mounted");
        return true;
    }
    if (!kernel->run.known) {
        reason_add(list, MEMORY_KSM_REASON_KIND_UNREADABLE,
                   KSM_KERNEL_SYSFS "/run cannot be read, so it is not known "
                   "whether ksmd runs");
        return false;
    }
    if (kernel->run.value == 1) {
        if (kernel->pages_to_scan.known && !kernel->pages_to_scan.value) {
            reason_add(list, MEMORY_KSM_REASON_KIND_KSMD_STOPPED,
                       "ksmd runs, but is told to scan no pages; set "
                       KSM_KERNEL_SYSFS "/pages_to_scan");
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
               "'echo 1 > " KSM_KERNEL_SYSFS "/run'; better, start "
               "ksm-poold@host before the guest");
    if (!kernel->may_start) {
        reason_add(list, MEMORY_KSM_REASON_KIND_NOT_PERMITTED,
                   "this process may not write " KSM_KERNEL_SYSFS "/run; the "
                   "host's administrator has to start ksmd");
    }
    return true;
}

/* A count of the kernel's pages, and as bytes. */
#define COPY_COUNT_BYTES(to, member, bytes, from)                       \
    do {                                                                \
        COPY_COUNT(to, member, from);                                   \
        (to)->has_##bytes = (to)->has_##member;                         \
        (to)->bytes = (to)->member * qemu_real_host_page_size();        \
    } while (0)

/* False: not known. */
static bool ksmd_state(const KsmKernelValue *run, MemoryKsmKsmdState *state)
{
    static const MemoryKsmKsmdState states[] = {
        MEMORY_KSM_KSMD_STATE_STOPPED,
        MEMORY_KSM_KSMD_STATE_RUNNING,
        MEMORY_KSM_KSMD_STATE_UNMERGED,
    };

    if (!run->known || run->value < 0 || run->value >= ARRAY_SIZE(states)) {
        return false;
    }
    *state = states[run->value];
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
                   "ksmd has found nothing equal on this host yet");
    }
    host->has_ksmd = ksmd_state(&kernel->run, &host->ksmd);
    COPY_COUNT(host, run, kernel->run);
    COPY_COUNT(host, pages_to_scan, kernel->pages_to_scan);
    COPY_COUNT(host, sleep_millisecs, kernel->sleep_millisecs);
    COPY_COUNT_BYTES(host, pages_shared, shared_bytes, kernel->pages_shared);
    COPY_COUNT_BYTES(host, pages_sharing, saved_bytes, kernel->pages_sharing);
    COPY_COUNT_BYTES(host, pages_unshared, unshared_bytes,
                     kernel->pages_unshared);
    COPY_COUNT_BYTES(host, pages_volatile, volatile_bytes,
                     kernel->pages_volatile);
    COPY_COUNT(host, pages_skipped, kernel->pages_skipped);
    COPY_COUNT(host, pages_scanned, kernel->pages_scanned);
    COPY_COUNT(host, full_scans, kernel->full_scans);
    COPY_COUNT_BYTES(host, zero_pages, zero_bytes, kernel->zero_pages);
    COPY_KNOWN(host, profit, kernel->profit);
    COPY_COUNT_BYTES(host, lazy_reclaimed, lazy_reclaimed_bytes,
                     kernel->lazy_reclaimed);
    return host;
}

static MemoryKsmProcessStats *process_stats(const KsmKernelProcess *kernel)
{
    MemoryKsmProcessStats *process = g_new0(MemoryKsmProcessStats, 1);

    COPY_COUNT(process, rmap_items, kernel->rmap_items);
    COPY_COUNT_BYTES(process, pages_merged, merged_bytes,
                     kernel->merging_pages);
    COPY_COUNT_BYTES(process, zero_pages, zero_bytes, kernel->zero_pages);
    COPY_KNOWN(process, profit, kernel->profit);
    return process;
}

/* Read once for all backends. */
typedef struct KsmStatsInput {
    KsmKernelHost host;
    KsmKernelProcess process;
    GPtrArray *guests;          /* of KsmGuest, with references */
    KsmKernelRange *ranges;     /* one for each of them */
} KsmStatsInput;

/*
 * Without the BQL: for smaps the kernel walks all page tables and mappings, a
 * few ms per GiB and per thousand mappings.
 */
static int input_read(void *opaque)
{
    KsmStatsInput *input = opaque;

    ksm_kernel_read_host(KSM_KERNEL_SYSFS, &input->host);
    ksm_kernel_read_vmstat(KSM_KERNEL_VMSTAT, &input->host);
    ksm_kernel_read_process(KSM_KERNEL_PROC, &input->process);
    if (input->guests->len) {
        ksm_kernel_read_ranges(KSM_KERNEL_PROC, input->ranges,
                               input->guests->len);
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

static void kernel_backend_reasons(const KsmGuestRam *ram,
                                   const KsmStatsInput *input,
                                   const KsmKernelRange *range,
                                   MemoryKsmBackendStats *stats)
{
    if (!ram->run) {
        stats->state = MEMORY_KSM_STATE_OFF;
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_RUN_OFF,
                   "the property 'run' is off");
        return;
    }
    if (ram->not_ours) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_NOT_PERMITTED,
                   ram->not_ours);
    }
    stats->state = MEMORY_KSM_STATE_INHIBITED;
    if (ram->refused || (range->known && !range->mergeable)) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_REFUSED,
                   ram->refused ? strerror(ram->refused)
                                : "the memory is not marked as mergeable");
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
                   "ksmd has not looked at this process yet");
    } else if (range->merged.known) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_NOTHING_EQUAL,
                   "ksmd has found nothing equal yet");
    } else if (input->host.run.known) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_UNREADABLE,
                   "the kernel does not say what is merged of this memory");
    }
}

static void kernel_backend_stats(const KsmGuestRam *ram,
                                 const KsmStatsInput *input,
                                 const KsmKernelRange *range,
                                 MemoryKsmBackendStats *stats)
{
    stats->has_mergeable = range->known;
    stats->mergeable = range->mergeable;
    stats->has_merged_bytes = range->merged.known;
    stats->merged_bytes = range->merged.value;
    stats->has_pages_merged = range->merged.known;
    stats->pages_merged = range->merged.value / qemu_real_host_page_size();
    kernel_backend_reasons(ram, input, range, stats);
}

/* libksm's reasons, each with the pages it holds for. */
static void engine_backend_reasons(const KsmGuestInfo *info,
                                   MemoryKsmBackendStats *stats)
{
    for (int i = 0; info->has_stats && i < KSM_REASON_MAX; i++) {
        uint64_t pages = info->region.reasons[i];

        /* already said for the whole backend, in more detail */
        if (!pages || (info->inhibited && (i == KSM_REASON_RUN_OFF ||
                                           i == KSM_REASON_INHIBITED))) {
            continue;
        }
        ksm_schema_add_reason(&stats->reasons, ksm_schema_reason(i),
                              ksm_reason_text(i), pages);
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

/* A count of libksm's pages, and as bytes. */
#define COPY_BYTES(to, from, member, bytes)                     \
    do {                                                        \
        COPY(to, from, member);                                 \
        (to)->has_##bytes = true;                               \
        (to)->bytes = (from)->member * KSM_PAGE_SIZE;           \
    } while (0)

/*
 * The engine's totals are divided among its backends: pages of the pool by use,
 * memory by size.
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
    stats->has_merged_bytes = stats->has_shared_bytes = true;
    stats->has_saved_bytes = true;
    stats->merged_bytes = stats->pages_merged * KSM_PAGE_SIZE;
    stats->shared_bytes = stats->pages_shared * KSM_PAGE_SIZE;
    stats->saved_bytes = stats->pages_sharing * KSM_PAGE_SIZE;
    stats->has_metadata = true;
    stats->metadata = (double)engine->metadata * region->pages_total /
                      engine->pages_total;
    stats->has_page_tables = true;
    stats->page_tables = region->page_tables;
    stats->has_profit = true;
    stats->profit = (int64_t)(stats->pages_sharing + region->zero_pages +
                              region->kernel_saved) *
                    KSM_PAGE_SIZE - stats->metadata - stats->page_tables;
    if (users) {
        stats->profit += (double)engine->group_saved * stats->pages_merged /
                         users * KSM_PAGE_SIZE;
    }
}

static MemoryKsmGroupStats *engine_group(const KsmGuestInfo *info,
                                         const char *name)
{
    MemoryKsmGroupStats *group = g_new0(MemoryKsmGroupStats, 1);
    const KsmGroupStats *told = &info->group;

    group->name = g_strdup(name);
    group->connected = told->connected;
    group->generation = told->generation;
    if (told->members) {
        group->has_members = group->has_held = group->has_share = true;
        group->has_pool_bytes = group->has_pool_limit = true;
        group->has_saved = true;
        group->has_held_bytes = group->has_share_bytes = true;
        group->has_saved_bytes = true;
        group->members = told->members;
        group->pool_bytes = told->pool_bytes;
        group->pool_limit = told->pool_limit;
        group->held = told->held;
        group->share = told->share;
        group->saved = told->held - MIN(told->share, told->held);
        group->held_bytes = group->held * KSM_PAGE_SIZE;
        group->share_bytes = group->share * KSM_PAGE_SIZE;
        group->saved_bytes = group->saved * KSM_PAGE_SIZE;
    }
    return group;
}

static void engine_backend_counts(const KsmGuestInfo *info,
                                  MemoryKsmBackendStats *stats)
{
    const KsmStats *region = &info->region;
    const KsmStats *engine = &info->engine;

    engine_backend_saved(info, stats);
    COPY_BYTES(stats, region, pages_unshared, unshared_bytes);
    COPY_BYTES(stats, region, pages_volatile, volatile_bytes);
    COPY_BYTES(stats, region, zero_pages, zero_bytes);
    COPY(stats, region, merged_runs);
    COPY_BYTES(stats, region, kernel_pages, kernel_merged_bytes);
    /* of the engine as a whole */
    COPY(stats, engine, kernel_left);
    COPY(stats, region, verify_failed);
    COPY(stats, region, pinned);
    COPY(stats, region, busy);
    COPY(stats, region, cow_broken);
    COPY_BYTES(stats, region, free_hinted, free_hinted_bytes);
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

static void engine_backend_stats(KsmGuest *guest, const KsmGuestRam *ram,
                                 MemoryKsmBackendStats *stats)
{
    KsmGuestInfo info;

    ksm_guest_info(guest, &info);
    stats->state = info.state;
    stats->reasons = ksm_guest_reasons(guest, &info);
    engine_backend_reasons(&info, stats);
    if (info.has_stats) {
        engine_backend_counts(&info, stats);
    }
    if (info.has_group) {
        stats->group = engine_group(&info, ram->group);
    }
}

static void freed_backend_stats(const KsmGuest *guest,
                                MemoryKsmBackendStats *stats)
{
    const char *inert = ksm_balloon_inert();
    uint64_t discarded;

    if (ksm_balloon_discarded(guest, &discarded)) {
        stats->has_free_hinted = stats->has_free_eager = true;
        stats->free_hinted = stats->free_eager = discarded;
        stats->has_free_hinted_bytes = stats->has_free_eager_bytes = true;
        stats->free_hinted_bytes = discarded * qemu_real_host_page_size();
        stats->free_eager_bytes = stats->free_hinted_bytes;
    }
    if (inert) {
        reason_add(&stats->reasons, MEMORY_KSM_REASON_KIND_BALLOON_INERT,
                   inert);
    }
}

static MemoryKsmBackendStats *backend_stats(KsmGuest *guest,
                                            const KsmStatsInput *input,
                                            const KsmKernelRange *range)
{
    MemoryKsmBackendStats *stats = g_new0(MemoryKsmBackendStats, 1);
    KsmGuestRam ram = ksm_guest_ram(guest);

    stats->id = g_strdup(ram.id);
    stats->scope = ram.scope;
    stats->size = ram.size;
    stats->has_resident = stats->has_used = stats->has_lazy_free = range->known;
    stats->resident = range->resident;
    stats->lazy_free = range->lazy_free;
    stats->used = range->resident - MIN(range->resident, range->lazy_free);
    if (ksm_guest_is_ours(guest)) {
        engine_backend_stats(guest, &ram, stats);
    } else {
        kernel_backend_stats(&ram, input, range, stats);
    }
    freed_backend_stats(guest, stats);
    return stats;
}

MemoryKsmStats *ksm_stats_query(void)
{
    g_autoptr(GPtrArray) guests = ksm_guests_get();
    g_autofree KsmKernelRange *ranges = g_new0(KsmKernelRange, guests->len);
    KsmStatsInput input = { .guests = guests, .ranges = ranges };
    MemoryKsmStats *stats = g_new0(MemoryKsmStats, 1);
    MemoryKsmBackendStatsList **tail = &stats->backends;

    for (unsigned i = 0; i < guests->len; i++) {
        KsmGuestRam ram = ksm_guest_ram(guests->pdata[i]);

        ranges[i].start = (uintptr_t)ram.host;
        ranges[i].size = ram.size;
    }
    input_read_unlocked(&input);
    stats->host = host_stats(&input.host);
    stats->process = process_stats(&input.process);
    for (unsigned i = 0; i < guests->len; i++) {
        /* it may have been deleted meanwhile */
        if (!ksm_guest_is_deleted(guests->pdata[i])) {
            QAPI_LIST_APPEND(tail, backend_stats(guests->pdata[i], &input,
                                                 &ranges[i]));
        }
    }
    return stats;
}

MemoryKsmStats *coroutine_fn qmp_query_ksm_stats(Error **errp)
{
    return ksm_stats_query();
}

MemoryKsmUnmerged *qmp_ksm_unmerge(const char *id, bool has_offset,
                                   uint64_t offset, bool has_size,
                                   uint64_t size, bool has_max_time,
                                   uint32_t max_time, Error **errp)
{
    KsmGuest *guest = ksm_guest_find(id);
    MemoryKsmUnmerged *unmerged;
    uint64_t done;
    size_t all;

    if (!guest) {
        error_setg(errp, "there is no memory-backend-ksm with the id '%s'",
                   id);
        return NULL;
    }
    all = ksm_guest_ram(guest).size;
    offset = has_offset ? offset : 0;
    if (!has_size) {
        size = all - MIN(offset, all);
    }
    if (!ksm_guest_unmerge(guest, offset, size, has_max_time ? max_time : -1,
                           &done, errp)) {
        return NULL;
    }
    unmerged = g_new0(MemoryKsmUnmerged, 1);
    unmerged->offset = offset + done;
    unmerged->complete = done == size;
    return unmerged;
}
