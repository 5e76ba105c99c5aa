/*
 * libksm: room in the process's memory cgroup
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * See memcg.h.  Only the group the process is in is looked at, not those
 * above it.
 */
#include <string.h>

#include <glib.h>

#include "memcg.h"
#include "prim.h"

#define ASK_NS  UINT64_C(50000000)

/* The path after @key in a line of /proc/self/cgroup; NULL: no such line. */
static char *group_path(const char *text, const char *key)
{
    const char *at = text ? strstr(text, key) : NULL;

    if (!at) {
        return NULL;
    }
    at += strlen(key);
    return g_strndup(at, strcspn(at, "\n"));
}

static void group_files(KsmMemcg *g, const char *dir, const char *limit,
                        const char *usage)
{
    g->limit = g_build_filename(dir, limit, NULL);
    g->usage = g_build_filename(dir, usage, NULL);
}

void memcg_init(KsmMemcg *g)
{
    g_autofree char *text = prim_read_file("/proc/self/cgroup", NULL);
    g_autofree char *v1 = group_path(text, ":memory:");
    g_autofree char *v2 = group_path(text, "0::");
    g_autofree char *dir = NULL;

    memset(g, 0, sizeof(*g));
    if (v1) {
        dir = g_build_filename("/sys/fs/cgroup/memory", v1, NULL);
        group_files(g, dir, "memory.limit_in_bytes", "memory.usage_in_bytes");
    } else if (v2) {
        dir = g_build_filename("/sys/fs/cgroup", v2, NULL);
        group_files(g, dir, "memory.max", "memory.current");
    }
}

void memcg_free(KsmMemcg *g)
{
    g_free(g->limit);
    g_free(g->usage);
}

bool memcg_is_tight(KsmMemcg *g)
{
    uint64_t now = prim.now_ns();
    g_autofree char *limit = NULL, *usage = NULL;

    if (!g->limit || (g->asked && now - g->asked < ASK_NS)) {
        return g->tight;
    }
    g->asked = now;
    limit = prim_read_file(g->limit, NULL);
    usage = limit ? prim_read_file(g->usage, NULL) : NULL;
    g->tight = false;
    if (usage && g_ascii_isdigit(*limit)) {
        uint64_t most = g_ascii_strtoull(limit, NULL, 10);
        uint64_t used = g_ascii_strtoull(usage, NULL, 10);

        g->tight = most < used + MEMCG_ROOM_MIN;
    }
    return g->tight;
}
