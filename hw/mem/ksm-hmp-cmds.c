/*
 * info ksm: query-ksm-stats for people
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "monitor/hmp.h"
#include "monitor/monitor.h"
#include "ksm-stats.h"
#include "qapi/qapi-visit-ksm.h"
#include "qemu/cutils.h"

/* Names padded to one width: the values stand in a column. */
#define LABEL "  %-18s"

static void print_count(Monitor *mon, const char *label, uint64_t count)
{
    monitor_printf(mon, LABEL "%" PRIu64 "\n", label, count);
}

static void print_size(Monitor *mon, const char *label, int64_t bytes)
{
    g_autofree char *text = size_to_str(bytes < 0 ? -bytes : bytes);

    monitor_printf(mon, LABEL "%s%s\n", label, bytes < 0 ? "-" : "", text);
}

static void print_pages(Monitor *mon, const char *label, uint64_t bytes)
{
    g_autofree char *text = size_to_str(bytes);

    monitor_printf(mon, LABEL "%s (%" PRIu64 " pages)\n", label, text,
                   bytes / qemu_real_host_page_size());
}

static void print_time(Monitor *mon, const char *label, uint64_t ns)
{
    if (ns < 1000 * 1000) {
        monitor_printf(mon, LABEL "%.1f us\n", label, ns / 1e3);
    } else if (ns < 1000 * 1000 * 1000) {
        monitor_printf(mon, LABEL "%.1f ms\n", label, ns / 1e6);
    } else {
        monitor_printf(mon, LABEL "%.2f s\n", label, ns / 1e9);
    }
}

#define PRINT(how, mon, label, from, member)                \
    do {                                                    \
        if ((from)->has_##member) {                         \
            print_##how(mon, label, (from)->member);        \
        }                                                   \
    } while (0)

static void print_state(Monitor *mon, MemoryKsmState state,
                        MemoryKsmReasonList *reasons)
{
    monitor_printf(mon, LABEL "%s\n", "state", MemoryKsmState_str(state));
    for (; reasons; reasons = reasons->next) {
        if (reasons->value->has_bytes) {
            monitor_printf(mon, LABEL "%s (%" PRIu64 " pages)\n", "reason",
                           reasons->value->text,
                           reasons->value->bytes / qemu_real_host_page_size());
        } else {
            monitor_printf(mon, LABEL "%s\n", "reason", reasons->value->text);
        }
    }
}

static void print_host(Monitor *mon, MemoryKsmHostStats *host)
{
    monitor_printf(mon, "host (the kernel's KSM):\n");
    print_state(mon, host->state, host->reasons);
    PRINT(pages, mon, "shared", host, shared_bytes);
    PRINT(pages, mon, "saved", host, saved_bytes);
    PRINT(pages, mon, "unshared", host, unshared_bytes);
    PRINT(pages, mon, "volatile", host, volatile_bytes);
    PRINT(pages, mon, "zero", host, zero_bytes);
    PRINT(size, mon, "profit", host, profit);
    PRINT(pages, mon, "lazily freed", host, lazy_reclaimed_bytes);
    PRINT(count, mon, "full scans", host, full_scans);
    PRINT(count, mon, "pages scanned", host, pages_scanned);
    PRINT(count, mon, "pages skipped", host, pages_skipped);
}

static void print_process(Monitor *mon, MemoryKsmProcessStats *process)
{
    if (!process->has_rmap_items) {
        return;
    }
    monitor_printf(mon, "this process (the kernel's KSM):\n");
    PRINT(pages, mon, "merged", process, merged_bytes);
    PRINT(pages, mon, "zero", process, zero_bytes);
    print_pages(mon, "tracked",
                process->rmap_items * qemu_real_host_page_size());
    PRINT(size, mon, "profit", process, profit);
}

static void print_engine(Monitor *mon, MemoryKsmBackendStats *b)
{
    PRINT(pages, mon, "shared", b, shared_bytes);
    PRINT(pages, mon, "saved", b, saved_bytes);
    PRINT(pages, mon, "unshared", b, unshared_bytes);
    PRINT(pages, mon, "volatile", b, volatile_bytes);
    PRINT(pages, mon, "zero", b, zero_bytes);
    PRINT(pages, mon, "merged by ksmd", b, kernel_merged_bytes);
    PRINT(size, mon, "given to ksmd", b, kernel_left);
    PRINT(count, mon, "full scans", b, full_scans);
    PRINT(count, mon, "pages scanned", b, pages_scanned);
    PRINT(count, mon, "pages skipped", b, pages_skipped);
    PRINT(count, mon, "merged runs", b, merged_runs);
    PRINT(count, mon, "verify failed", b, verify_failed);
    PRINT(count, mon, "pinned", b, pinned);
    PRINT(count, mon, "busy", b, busy);
    PRINT(count, mon, "written since", b, cow_broken);
    PRINT(count, mon, "huge pages split", b, huge_split);
    PRINT(size, mon, "metadata", b, metadata);
    PRINT(size, mon, "page tables", b, page_tables);
    PRINT(size, mon, "profit", b, profit);
    PRINT(time, mon, "scan time", b, scan_time);
    PRINT(time, mon, "merge time", b, merge_time);
    PRINT(time, mon, "log time", b, log_time);
    if (b->stall) {
        print_count(mon, "stalls", b->stall->count);
        print_time(mon, "stall p50", b->stall->p50);
        print_time(mon, "stall p99", b->stall->p99);
        print_time(mon, "stall max", b->stall->max);
    }
}

static void print_group(Monitor *mon, MemoryKsmGroupStats *group)
{
    monitor_printf(mon, LABEL "%s%s\n", "group", group->name,
                   group->connected ? "" : " (no daemon)");
    PRINT(count, mon, "group members", group, members);
    PRINT(size, mon, "group's pool", group, pool_bytes);
    PRINT(size, mon, "group's limit", group, pool_limit);
    PRINT(pages, mon, "pool pages used", group, held_bytes);
    PRINT(pages, mon, "saved with others", group, saved_bytes);
}

static void print_backend(Monitor *mon, MemoryKsmBackendStats *b)
{
    monitor_printf(mon, "%s (scope=%s):\n", b->id,
                   MemoryKsmScope_str(b->scope));
    print_state(mon, b->state, b->reasons);
    print_size(mon, "size", b->size);
    PRINT(size, mon, "resident", b, resident);
    PRINT(size, mon, "used", b, used);
    PRINT(pages, mon, "merged", b, merged_bytes);
    PRINT(size, mon, "lazily free", b, lazy_free);
    PRINT(pages, mon, "freed by guest", b, free_hinted_bytes);
    PRINT(pages, mon, "freed at once", b, free_eager_bytes);
    print_engine(mon, b);
    if (b->group) {
        print_group(mon, b->group);
    }
}

void hmp_info_ksm(Monitor *mon, const QDict *qdict)
{
    MemoryKsmStats *stats = ksm_stats_query();

    if (!stats->backends) {
        monitor_printf(mon, "no memory-backend-ksm\n");
    }
    for (MemoryKsmBackendStatsList *l = stats->backends; l; l = l->next) {
        print_backend(mon, l->value);
    }
    print_process(mon, stats->process);
    print_host(mon, stats->host);
    qapi_free_MemoryKsmStats(stats);
}
