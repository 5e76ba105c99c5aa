/*
 * scope=host: guest RAM for the host's group, or for the kernel's KSM
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Where a daemon serves the group of all guests of the host (ksm-poold@host),
 * libksm merges the RAM, and leaves to the kernel what stands alone.  Else all
 * of it is the kernel's.
 */
#ifndef HW_MEM_KSM_HOST_H
#define HW_MEM_KSM_HOST_H

/* The group's name. */
#define KSM_HOST_GROUP "host"
/* The daemon's socket, unless another one is asked for. */
#define KSM_HOST_SOCKET KSM_GROUP_DIR "/" KSM_HOST_GROUP ".sock"

/* Does a daemon serve it now, and lets us in?  0, or an errno. */
int ksm_host_connect(const char *path);

/* False with @errp set: this kernel has no KSM. */
bool ksm_host_check(Error **errp);

/* Marks RAM as mergeable, or unmerges it: 0, or the kernel's errno. */
int ksm_host_merge(void *host, size_t size);
int ksm_host_unmerge(void *host, size_t size);

#endif
