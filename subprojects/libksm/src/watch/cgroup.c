/*
 * cgroup: where this process's memory control groups are
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Formats: proc_pid_mountinfo(5), cgroups(7).
 */
#include "watch/cgroup.h"

#include <string.h>

#include "base/prim.h"

static GStrv read_lines(const char *root, const char *name)
{
    g_autofree char *path = g_build_filename(root, name, NULL);
    g_autofree char *text = prim_read_file(path, NULL);

    return g_strsplit(text ? text : "", "\n", -1);
}

/* Is "memory" in a list with commas? */
static bool has_memory(const char *list)
{
    g_auto(GStrv) words = g_strsplit(list, ",", -1);

    return g_strv_contains((const char *const *)words, "memory");
}

/*
 * Where the hierarchy is mounted, and which of its directories the mount
 * shows at its top.
 */
static bool find_mount(char **lines, CgroupVersion version, char **top,
                       char **shown)
{
    for (; *lines; lines++) {
        g_auto(GStrv) halves = g_strsplit(*lines, " - ", 2);
        g_auto(GStrv) left = NULL, right = NULL;

        if (!halves[0] || !halves[1]) {
            continue;
        }
        left = g_strsplit(halves[0], " ", 6);
        right = g_strsplit(halves[1], " ", 3);
        if (g_strv_length(left) < 5 || g_strv_length(right) < 3 ||
            strcmp(right[0], version == CGROUP_V1 ? "cgroup" : "cgroup2")) {
            continue;
        }
        if (version == CGROUP_V1 && !has_memory(right[2])) {
            continue;
        }
        *shown = g_strdup(left[3]);
        *top = g_strdup(left[4]);
        return true;
    }
    return false;
}

/* The group's path in its hierarchy; NULL: in none. */
static char *find_group(char **lines, CgroupVersion version)
{
    for (; *lines; lines++) {
        g_auto(GStrv) fields = g_strsplit(*lines, ":", 3);

        if (g_strv_length(fields) == 3 &&
            (version == CGROUP_V1 ? has_memory(fields[1]) : !*fields[1])) {
            return g_strdup(fields[2]);
        }
    }
    return NULL;
}

GStrv cgroup_dirs(const char *root, CgroupVersion version)
{
    g_auto(GStrv) mounts = read_lines(root, "proc/self/mountinfo");
    g_auto(GStrv) groups = read_lines(root, "proc/self/cgroup");
    g_autofree char *top = NULL, *shown = NULL, *group = NULL;
    GPtrArray *dirs = g_ptr_array_new();

    group = find_group(groups, version);
    if (group && find_mount(mounts, version, &top, &shown)) {
        char *path = group;
        char *slash;

        if (strcmp(shown, "/") && g_str_has_prefix(path, shown)) {
            path += strlen(shown);
        }
        while ((slash = strrchr(path, '/')) && slash[1]) {
            g_ptr_array_add(dirs, g_build_filename(root, top, path, NULL));
            *slash = '\0';
        }
        g_ptr_array_add(dirs, g_build_filename(root, top, NULL));
    }
    g_ptr_array_add(dirs, NULL);
    return (GStrv)g_ptr_array_free(dirs, FALSE);
}
