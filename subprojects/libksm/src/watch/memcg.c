/*
 * memcg: room in the process's memory cgroups
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "watch/memcg.h"

#include <string.h>

#include "base/prim.h"

#define ASK_NS  UINT64_C(50000000)

typedef struct MemcgFiles {
    const char *limit, *usage;
    const char *cache;      /* of the group and all below, in memory.stat */
} MemcgFiles;

static const MemcgFiles files_of[] = {
    [CGROUP_V1] = { "memory.limit_in_bytes", "memory.usage_in_bytes",
                    "\ntotal_inactive_file " },
    [CGROUP_V2] = { "memory.max", "memory.current", "\ninactive_file " },
};

void memcg_init(KsmMemcg *g, const char *root)
{
    memset(g, 0, sizeof(*g));
    g->version = CGROUP_V1;
    g->dirs = cgroup_dirs(root, g->version);
    if (!*g->dirs) {
        g_strfreev(g->dirs);
        g->version = CGROUP_V2;
        g->dirs = cgroup_dirs(root, g->version);
    }
}

void memcg_free(KsmMemcg *g)
{
    g_strfreev(g->dirs);
}

static char *read_in(const char *dir, const char *name)
{
    g_autofree char *path = g_build_filename(dir, name, NULL);

    return prim_read_file(path, NULL);
}

/* The number after @key, or at the start; false: none ("max", no file). */
static bool number_in(const char *text, const char *key, uint64_t *value)
{
    const char *at = text && key ? strstr(text, key) : text;

    if (!at) {
        return false;
    }
    at += key ? strlen(key) : 0;
    *value = g_ascii_strtoull(at, NULL, 10);
    return g_ascii_isdigit(*at);
}

static bool dir_has_room(const char *dir, const MemcgFiles *files,
                         uint64_t room)
{
    g_autofree char *limit = read_in(dir, files->limit);
    g_autofree char *usage = NULL, *stat = NULL;
    uint64_t most, used, cache;

    if (!number_in(limit, NULL, &most)) {
        return true;
    }
    usage = read_in(dir, files->usage);
    if (!number_in(usage, NULL, &used) || used + room <= most) {
        return true;
    }
    /* dear to read (the kernel sums it up first): only when it matters */
    stat = read_in(dir, "memory.stat");
    if (number_in(stat, files->cache, &cache)) {
        used -= MIN(used, cache);
    }
    return used + room <= most;
}

bool memcg_has_room(const KsmMemcg *g, uint64_t bytes)
{
    for (char **dir = g->dirs; *dir; dir++) {
        if (!dir_has_room(*dir, &files_of[g->version],
                          MEMCG_ROOM_MIN + bytes)) {
            return false;
        }
    }
    return true;
}

bool memcg_is_short(KsmMemcg *g, uint64_t bytes)
{
    uint64_t now = prim.now_ns();

    if (g->asked && now - g->asked < ASK_NS) {
        return g->tight;
    }
    g->asked = now;
    g->tight = !memcg_has_room(g, bytes);
    return g->tight;
}

bool memcg_is_tight(KsmMemcg *g)
{
    return memcg_is_short(g, 0);
}
