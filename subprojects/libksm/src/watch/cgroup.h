/*
 * cgroup: where this process's memory control groups are
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A limit may stand above: libvirt puts <hard_limit> on a machine's scope, and
 * QEMU into a group below it.  Leaves to others: what is read there.
 */
#ifndef KSM_CGROUP_H
#define KSM_CGROUP_H

#include <glib.h>
#include <stdbool.h>

typedef enum CgroupVersion {
    CGROUP_V1,          /* the hierarchy of the memory controller */
    CGROUP_V2,
} CgroupVersion;

/*
 * cgroup_dirs: the directories of this process's group and of those above it,
 * the nearest first, as far as the mount shows them; none if the hierarchy is
 * not mounted.  @root is not / in tests; the result's paths are below it.
 */
GStrv cgroup_dirs(const char *root, CgroupVersion version);

#endif
