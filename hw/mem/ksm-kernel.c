/*
 * The kernel's files about KSM and memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/cutils.h"
#include "ksm-kernel.h"

typedef struct KsmKernelField {
    const char *name;
    size_t offset;
} KsmKernelField;

static void value_parse(KsmKernelValue *value, const char *text)
{
    int64_t number;
    const char *end;

    if (qemu_strtoi64(text, &end, 10, &number) == 0 &&
        (*end == '\0' || g_ascii_isspace(*end))) {
        value->known = true;
        value->value = number;
    }
}

void ksm_kernel_read_host(const char *sysfs, KsmKernelHost *host)
{
    static const KsmKernelField fields[] = {
        { "run", offsetof(KsmKernelHost, run) },
        { "pages_to_scan", offsetof(KsmKernelHost, pages_to_scan) },
        { "sleep_millisecs", offsetof(KsmKernelHost, sleep_millisecs) },
        { "pages_shared", offsetof(KsmKernelHost, pages_shared) },
        { "pages_sharing", offsetof(KsmKernelHost, pages_sharing) },
        { "pages_unshared", offsetof(KsmKernelHost, pages_unshared) },
        { "pages_volatile", offsetof(KsmKernelHost, pages_volatile) },
        { "pages_skipped", offsetof(KsmKernelHost, pages_skipped) },
        { "pages_scanned", offsetof(KsmKernelHost, pages_scanned) },
        { "full_scans", offsetof(KsmKernelHost, full_scans) },
        { "ksm_zero_pages", offsetof(KsmKernelHost, zero_pages) },
        { "general_profit", offsetof(KsmKernelHost, profit) },
    };
    g_autofree char *run = g_build_filename(sysfs, "run", NULL);

    *host = (KsmKernelHost) {
        .present = g_file_test(sysfs, G_FILE_TEST_IS_DIR),
        .may_start = access(run, W_OK) == 0,
    };
    for (int i = 0; i < ARRAY_SIZE(fields); i++) {
        g_autofree char *path = g_build_filename(sysfs, fields[i].name, NULL);
        g_autofree char *text = NULL;

        if (g_file_get_contents(path, &text, NULL, NULL)) {
            value_parse((void *)host + fields[i].offset, text);
        }
    }
}

void ksm_kernel_read_vmstat(const char *vmstat, KsmKernelHost *host)
{
    g_autofree char *text = NULL;
    const char *at;

    host->lazy_reclaimed = (KsmKernelValue) { };
    if (g_file_get_contents(vmstat, &text, NULL, NULL)) {
        at = strstr(text, "\npglazyfreed ");
        if (at) {
            value_parse(&host->lazy_reclaimed, at + strlen("\npglazyfreed "));
        }
    }
}

void ksm_kernel_read_process(const char *proc, KsmKernelProcess *process)
{
    static const KsmKernelField fields[] = {
        { "ksm_rmap_items", offsetof(KsmKernelProcess, rmap_items) },
        { "ksm_merging_pages", offsetof(KsmKernelProcess, merging_pages) },
        { "ksm_zero_pages", offsetof(KsmKernelProcess, zero_pages) },
        { "ksm_process_profit", offsetof(KsmKernelProcess, profit) },
    };
    g_autofree char *path = g_build_filename(proc, "ksm_stat", NULL);
    g_autofree char *text = NULL;
    g_auto(GStrv) lines = NULL;

    *process = (KsmKernelProcess) { };
    if (!g_file_get_contents(path, &text, NULL, NULL)) {
        return;
    }
    lines = g_strsplit(text, "\n", -1);
    for (char **line = lines; *line; line++) {
        for (int i = 0; i < ARRAY_SIZE(fields); i++) {
            const char *rest;

            /* "ksm_rmap_items 12" or "ksm_rmap_items: 12" */
            if (strstart(*line, fields[i].name, &rest) &&
                (*rest == ' ' || *rest == ':')) {
                rest += strspn(rest, ": ");
                value_parse((void *)process + fields[i].offset, rest);
            }
        }
    }
}

/* Adds one line of smaps about a mapping to the range around it. */
static void range_add_line(KsmKernelRange *range, const char *line)
{
    const char *rest, *end;
    int64_t kib;

    if (strstart(line, "VmFlags:", &rest)) {
        range->mergeable &= strstr(rest, " mg ") != NULL;
        return;
    }
    rest = strchr(line, ':');
    if (!rest || qemu_strtoi64(rest + 1, &end, 10, &kib) < 0 || kib < 0) {
        return;
    }
    if (strstart(line, "Rss:", NULL)) {
        range->resident += kib << 10;
    } else if (strstart(line, "KSM:", NULL)) {
        range->merged.known = true;
        range->merged.value += kib << 10;
    } else if (strstart(line, "LazyFree:", NULL)) {
        range->lazy_free += kib << 10;
    }
}

/*
 * A line of smaps that is the head of a mapping:
 * "55d7c8a2e000-55d7c8a30000 rw-p ...".  No other has a '-' there.
 */
static bool line_is_head(const char *line, unsigned long *start,
                         unsigned long *end)
{
    return sscanf(line, "%lx-%lx ", start, end) == 2;
}

/* The head of a mapping that begins behind @end? */
static bool line_is_past(const char *line, uintptr_t end)
{
    unsigned long from, to;

    return line_is_head(line, &from, &to) && from >= end;
}

/* The range that a mapping lies in, if the line is the head of one. */
static bool range_find(KsmKernelRange *ranges, unsigned n_ranges,
                       const char *line, KsmKernelRange **range)
{
    unsigned long start, end;

    if (!line_is_head(line, &start, &end)) {
        return false;
    }
    *range = NULL;
    for (unsigned i = 0; i < n_ranges; i++) {
        if (start >= ranges[i].start &&
            end <= ranges[i].start + ranges[i].size) {
            *range = &ranges[i];
            /* known once it is seen; a mapping that is not can take it back */
            if (!ranges[i].known) {
                ranges[i].known = ranges[i].mergeable = true;
            }
        }
    }
    return true;
}

void ksm_kernel_read_ranges(const char *proc, KsmKernelRange *ranges,
                            unsigned n_ranges)
{
    g_autofree char *path = g_build_filename(proc, "smaps", NULL);
    g_autofree char *line = NULL;
    KsmKernelRange *range = NULL;
    uintptr_t end = 0;
    size_t size = 0;
    FILE *file;

    for (unsigned i = 0; i < n_ranges; i++) {
        end = MAX(end, ranges[i].start + ranges[i].size);
        ranges[i] = (KsmKernelRange) {
            .start = ranges[i].start,
            .size = ranges[i].size,
        };
    }
    file = fopen(path, "re");
    if (!file) {
        return;
    }
    /* no further than needed: reading walks page tables */
    while (getline(&line, &size, file) >= 0 && !line_is_past(line, end)) {
        if (!range_find(ranges, n_ranges, line, &range) && range) {
            range_add_line(range, line);
        }
    }
    fclose(file);
    /*
     * Read in pieces: where a span was released between two of them, the
     * mapping around it is told again, from its start.
     */
    for (unsigned i = 0; i < n_ranges; i++) {
        KsmKernelRange *r = &ranges[i];

        r->resident = MIN(r->resident, r->size);
        r->merged.value = MIN(r->merged.value, (int64_t)r->size);
        r->lazy_free = MIN(r->lazy_free, r->resident);
    }
}
