/*
 * huge: is shared memory made of huge pages?
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>
#include <string.h>

#include "base/huge.h"
#include "base/prim.h"

#define SYSFS   "/sys/kernel/mm/transparent_hugepage/"
#define KIB_MIN 8u          /* two pages */
#define KIB_MAX 2048u

static bool is_set(const char *text)
{
    return strstr(text, "[always]") || strstr(text, "[within_size]") ||
           strstr(text, "[force]");
}

/* "inherit": as all sizes, which was asked before. */
static bool size_is_huge(unsigned kib)
{
    g_autofree char *path = g_strdup_printf(SYSFS "hugepages-%ukB/"
                                            "shmem_enabled", kib);
    g_autofree char *text = prim_read_file(path, NULL);

    return text && is_set(text);
}

bool huge_shmem(HugeMount mount)
{
    g_autofree char *text = prim_read_file(SYSFS "shmem_enabled", NULL);

    /* that one is for all mounts */
    if (text && strstr(text, "[force]")) {
        return true;
    }
    if (mount == HUGE_NEVER) {
        return false;
    }
    if (text && is_set(text)) {
        return true;
    }
    for (unsigned kib = KIB_MIN; kib <= KIB_MAX; kib *= 2) {
        if (size_is_huge(kib)) {
            return true;
        }
    }
    return false;
}
