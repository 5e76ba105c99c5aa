/*
 * info ksm: query-ksm-stats for people
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "monitor/hmp.h"
#include "monitor/monitor.h"
#include "ksm-guest.h"
#include "qapi/qapi-visit-ksm.h"
#include "qemu/cutils.h"

/* Names are padded to one width, so that the values stand in a column. */
#define LABEL "  %-18s"

static void print_count(Monitor *mon, const char *label, bool has,
                        uint64_t count)
{
    if (has) {
        monitor_printf(mon, LABEL "%" PRIu64 "\n", label, count);
    }
}

static void print_size(Monitor *mon, const char *label, bool has,
                       int64_t bytes)
{
    g_autofree char *text = size_to_str(bytes < 0 ? -bytes : bytes);

    if (has) {
        monitor_printf(mon, LABEL "%s%s\n", label, bytes < 0 ? "-" : "", text);
    }
}

static void print_pages(Monitor *mon, const char *label, bool has,
                        uint64_t pages)
{
    g_autofree char *text = size_to_str(pages * qemu_real_host_page_size());

    if (has) {
        monitor_printf(mon, LABEL "%s (%" PRIu64 " pages)\n", label, text,
                       pages);
    }
}

static void print_time(Monitor *mon, const char *label, bool has, uint64_t ns)
{
    if (!has) {
        return;
    }
    if (ns < 1000 * 1000) {
        monitor_printf(mon, LABEL "%.1f us\n", label, ns / 1e3);
    } else if (ns < 1000 * 1000 * 1000) {
        monitor_printf(mon, LABEL "%.1f ms\n", label, ns / 1e6);
    } else {
        monitor_printf(mon, LABEL "%.2f s\n", label, ns / 1e9);
    }
}

static void print_state(Monitor *mon, MemoryKsmState state,
                        MemoryKsmReasonList *reasons)
{
    monitor_printf(mon, LABEL "%s\n", "state", MemoryKsmState_str(state));
    for (; reasons; reasons = reasons->next) {
        if (reasons->value->has_pages) {
            monitor_printf(mon, LABEL "%s (%" PRIu64 " pages)\n", "reason",
                           reasons->value->text, reasons->value->pages);
        } else {
            monitor_printf(mon, LABEL "%s\n", "reason", reasons->value->text);
        }
    }
}

static void print_host(Monitor *mon, MemoryKsmHostStats *host)
{
    monitor_printf(mon, "host (the kernel's KSM):\n");
    print_state(mon, host->state, host->reasons);
    print_pages(mon, "shared", host->has_pages_shared, host->pages_shared);
    print_pages(mon, "saved", host->has_pages_sharing, host->pages_sharing);
    print_pages(mon, "unshared", host->has_pages_unshared,
                host->pages_unshared);
    print_pages(mon, "volatile", host->has_pages_volatile,
                host->pages_volatile);
    print_pages(mon, "zero", host->has_zero_pages, host->zero_pages);
    print_size(mon, "profit", host->has_profit, host->profit);
    print_pages(mon, "lazily freed", host->has_lazy_reclaimed,
                host->lazy_reclaimed);
    print_count(mon, "full scans", host->has_full_scans, host->full_scans);
    print_count(mon, "pages scanned", host->has_pages_scanned,
                host->pages_scanned);
    print_count(mon, "pages skipped", host->has_pages_skipped,
                host->pages_skipped);
}

static void print_process(Monitor *mon, MemoryKsmProcessStats *process)
{
    if (!process->has_rmap_items) {
        return;
    }
    monitor_printf(mon, "this process (the kernel's KSM):\n");
    print_pages(mon, "merged", process->has_pages_merged,
                process->pages_merged);
    print_pages(mon, "zero", process->has_zero_pages, process->zero_pages);
    print_pages(mon, "tracked", process->has_rmap_items, process->rmap_items);
    print_size(mon, "profit", process->has_profit, process->profit);
}

static void print_engine(Monitor *mon, MemoryKsmBackendStats *b)
{
    print_pages(mon, "shared", b->has_pages_shared, b->pages_shared);
    print_pages(mon, "saved", b->has_pages_sharing, b->pages_sharing);
    print_pages(mon, "unshared", b->has_pages_unshared, b->pages_unshared);
    print_pages(mon, "volatile", b->has_pages_volatile, b->pages_volatile);
    print_pages(mon, "zero", b->has_zero_pages, b->zero_pages);
    print_count(mon, "full scans", b->has_full_scans, b->full_scans);
    print_count(mon, "pages scanned", b->has_pages_scanned, b->pages_scanned);
    print_count(mon, "pages skipped", b->has_pages_skipped, b->pages_skipped);
    print_count(mon, "merged runs", b->has_merged_runs, b->merged_runs);
    print_count(mon, "verify failed", b->has_verify_failed, b->verify_failed);
    print_count(mon, "pinned", b->has_pinned, b->pinned);
    print_count(mon, "busy", b->has_busy, b->busy);
    print_count(mon, "written since", b->has_cow_broken, b->cow_broken);
    print_count(mon, "huge pages split", b->has_huge_split, b->huge_split);
    print_size(mon, "metadata", b->has_metadata, b->metadata);
    print_size(mon, "page tables", b->has_page_tables, b->page_tables);
    print_size(mon, "profit", b->has_profit, b->profit);
    print_time(mon, "scan time", b->has_scan_time, b->scan_time);
    print_time(mon, "merge time", b->has_merge_time, b->merge_time);
    print_time(mon, "log time", b->has_log_time, b->log_time);
    if (b->stall) {
        print_count(mon, "stalls", true, b->stall->count);
        print_time(mon, "stall p50", true, b->stall->p50);
        print_time(mon, "stall p99", true, b->stall->p99);
        print_time(mon, "stall max", true, b->stall->max);
    }
}

static void print_backend(Monitor *mon, MemoryKsmBackendStats *b)
{
    monitor_printf(mon, "%s (scope=%s):\n", b->id,
                   MemoryKsmScope_str(b->scope));
    print_state(mon, b->state, b->reasons);
    print_size(mon, "size", true, b->size);
    print_size(mon, "resident", b->has_resident, b->resident);
    print_size(mon, "used", b->has_used, b->used);
    print_pages(mon, "merged", b->has_pages_merged, b->pages_merged);
    print_size(mon, "lazily free", b->has_lazy_free, b->lazy_free);
    print_pages(mon, "freed by guest", b->has_free_hinted, b->free_hinted);
    print_pages(mon, "freed at once", b->has_free_eager, b->free_eager);
    print_pages(mon, "freed after all", b->has_free_decayed, b->free_decayed);
    print_engine(mon, b);
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
