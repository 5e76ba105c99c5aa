/*
 * pressure: is the host, or a memory cgroup of this process, short of memory?
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Every source is a file with counters that only grow; growth is a sign of
 * pressure.  Stall time is a share: a task waited for memory for more than
 * PSI_PERCENT of the time since the last look.  A limit that was hit is a sign
 * each time: reclaim is running in that cgroup now.
 */
#include "watch/pressure.h"

#include <string.h>

#include "watch/cgroup.h"
#include "base/prim.h"

#define PSI_PERCENT 2

typedef enum SourceKind {
    SOURCE_PSI,         /* "some ... total=US": stall time */
    SOURCE_EVENTS,      /* "max N": the limit was hit, cgroup v2 */
    SOURCE_FAILCNT,     /* N: the limit was hit, cgroup v1 */
} SourceKind;

typedef struct Source {
    SourceKind kind;
    char *path;
    uint64_t last;
} Source;

struct KsmPressure {
    GArray *sources;    /* of Source */
};

static bool parse_after(const char *text, const char *key, uint64_t *value)
{
    const char *at = strstr(text, key);

    if (!at) {
        return false;
    }
    *value = g_ascii_strtoull(at + strlen(key), NULL, 10);
    return true;
}

static bool source_read(Source *source, uint64_t *value)
{
    g_autofree char *text = prim_read_file(source->path, NULL);

    if (!text) {
        return false;
    }
    switch (source->kind) {
    case SOURCE_PSI:
        return parse_after(text, "total=", value);
    case SOURCE_EVENTS:
        return parse_after(text, "\nmax ", value);
    case SOURCE_FAILCNT:
        *value = g_ascii_strtoull(text, NULL, 10);
        return true;
    }
    return false;
}

/* Unless there is no such file. */
static void add_source(KsmPressure *pressure, SourceKind kind,
                       const char *dir, const char *name)
{
    Source source = { .kind = kind };

    source.path = g_build_filename(dir, name, NULL);
    if (source_read(&source, &source.last)) {
        g_array_append_val(pressure->sources, source);
    } else {
        g_free(source.path);
    }
}

static void source_clear(void *source)
{
    g_free(((Source *)source)->path);
}

/*
 * A group's own counters tell of its limit (memory.events has the groups below,
 * too: others' limits).  Those of the task's group tell how long a task waited,
 * whichever limit it was.
 */
KsmPressure *ksm_pressure_new_at(const char *root)
{
    KsmPressure *pressure = g_new0(KsmPressure, 1);
    g_auto(GStrv) v1 = cgroup_dirs(root, CGROUP_V1);
    g_auto(GStrv) v2 = cgroup_dirs(root, CGROUP_V2);
    g_autofree char *host = g_build_filename(root, "proc/pressure", NULL);

    pressure->sources = g_array_new(false, false, sizeof(Source));
    g_array_set_clear_func(pressure->sources, source_clear);
    add_source(pressure, SOURCE_PSI, host, "memory");
    if (*v2) {
        add_source(pressure, SOURCE_PSI, *v2, "memory.pressure");
    }
    for (char **dir = v2; *dir; dir++) {
        add_source(pressure, SOURCE_EVENTS, *dir, "memory.events.local");
    }
    for (char **dir = v1; *dir; dir++) {
        add_source(pressure, SOURCE_FAILCNT, *dir, "memory.failcnt");
    }
    return pressure;
}

void ksm_pressure_free(KsmPressure *pressure)
{
    g_array_free(pressure->sources, true);
    g_free(pressure);
}

bool ksm_pressure_sign(KsmPressure *pressure, int64_t elapsed_ns)
{
    uint64_t stalled_us = elapsed_ns / 1000 * PSI_PERCENT / 100;
    bool sign = false;

    for (unsigned i = 0; i < pressure->sources->len; i++) {
        Source *source = &g_array_index(pressure->sources, Source, i);
        uint64_t value, grown;

        if (!source_read(source, &value)) {
            continue;
        }
        grown = value - source->last;
        source->last = value;
        sign |= source->kind == SOURCE_PSI ? grown > stalled_us : grown > 0;
    }
    return sign;
}
