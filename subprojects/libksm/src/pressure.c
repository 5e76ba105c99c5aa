/*
 * pressure: is the host, or this process's memory cgroup, short of memory?
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Every source is a file with counters that only grow; a sign of pressure is
 * that one of them grew.  Stall time is a share: a task that waited for
 * memory for more than PSI_PERCENT of the time since the last look.  A limit
 * that was hit is a sign each time: reclaim is running in this cgroup now.
 */
#include "pressure.h"

#include <string.h>

#include "prim.h"

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

#define MAX_SOURCES 4

struct KsmPressure {
    char *root;
    unsigned n_sources;
    Source sources[MAX_SOURCES];
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

static void add_source(KsmPressure *pressure, SourceKind kind,
                       const char *dir, const char *name)
{
    Source source = { .kind = kind };

    source.path = g_build_filename(pressure->root, dir, name, NULL);
    if (pressure->n_sources == MAX_SOURCES ||
        !source_read(&source, &source.last)) {
        g_free(source.path);
        return;
    }
    pressure->sources[pressure->n_sources++] = source;
}

static char **read_lines(KsmPressure *pressure, const char *name)
{
    g_autofree char *path = g_build_filename(pressure->root, name, NULL);
    g_autofree char *text = prim_read_file(path, NULL);

    return g_strsplit(text ? text : "", "\n", -1);
}

/*
 * Where the hierarchy with super block option @option ("memory"; NULL: v2)
 * is mounted, and which of its directories the mount shows at its top.
 * Fields of /proc/self/mountinfo: proc_pid_mountinfo(5).
 */
static bool find_mount(char **lines, const char *option, char **top,
                       char **shown)
{
    for (; *lines; lines++) {
        g_auto(GStrv) halves = g_strsplit(*lines, " - ", 2);
        g_auto(GStrv) left = NULL, right = NULL, options = NULL;

        if (!halves[0] || !halves[1]) {
            continue;
        }
        left = g_strsplit(halves[0], " ", 6);
        right = g_strsplit(halves[1], " ", 3);
        if (g_strv_length(left) < 5 || g_strv_length(right) < 3 ||
            strcmp(right[0], option ? "cgroup" : "cgroup2") != 0) {
            continue;
        }
        options = g_strsplit(right[2], ",", -1);
        if (option &&
            !g_strv_contains((const char *const *)options, option)) {
            continue;
        }
        *shown = g_strdup(left[3]);
        *top = g_strdup(left[4]);
        return true;
    }
    return false;
}

/* The directory of this process's cgroup, NULL if it cannot be found. */
static char *cgroup_dir(KsmPressure *pressure, const char *option)
{
    g_auto(GStrv) mount_lines = read_lines(pressure, "proc/self/mountinfo");
    g_auto(GStrv) group_lines = read_lines(pressure, "proc/self/cgroup");
    g_autofree char *top = NULL, *shown = NULL;

    if (!find_mount(mount_lines, option, &top, &shown)) {
        return NULL;
    }
    for (char **line = group_lines; *line; line++) {
        g_auto(GStrv) fields = g_strsplit(*line, ":", 3);
        g_auto(GStrv) controllers = NULL;
        const char *path;

        if (g_strv_length(fields) < 3) {
            continue;
        }
        controllers = g_strsplit(fields[1], ",", -1);
        if (option
            ? !g_strv_contains((const char *const *)controllers, option)
            : fields[1][0] != '\0') {
            continue;
        }
        path = fields[2];
        if (strcmp(shown, "/") != 0 && g_str_has_prefix(path, shown)) {
            path += strlen(shown);
        }
        return g_build_filename(top, path, NULL);
    }
    return NULL;
}

KsmPressure *ksm_pressure_new_at(const char *root)
{
    KsmPressure *pressure = g_new0(KsmPressure, 1);
    g_autofree char *v1 = NULL, *v2 = NULL;

    pressure->root = g_strdup(root);
    v1 = cgroup_dir(pressure, "memory");
    v2 = cgroup_dir(pressure, NULL);
    add_source(pressure, SOURCE_PSI, "proc/pressure", "memory");
    if (v2) {
        add_source(pressure, SOURCE_PSI, v2, "memory.pressure");
        add_source(pressure, SOURCE_EVENTS, v2, "memory.events");
    }
    if (v1) {
        add_source(pressure, SOURCE_FAILCNT, v1, "memory.failcnt");
    }
    return pressure;
}

void ksm_pressure_free(KsmPressure *pressure)
{
    for (unsigned i = 0; i < pressure->n_sources; i++) {
        g_free(pressure->sources[i].path);
    }
    g_free(pressure->root);
    g_free(pressure);
}

bool ksm_pressure_sign(KsmPressure *pressure, int64_t elapsed_ns)
{
    uint64_t stalled_us = elapsed_ns / 1000 * PSI_PERCENT / 100;
    bool sign = false;

    for (unsigned i = 0; i < pressure->n_sources; i++) {
        Source *source = &pressure->sources[i];
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
