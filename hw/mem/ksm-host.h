/*
 * scope=host: guest RAM for the kernel's KSM
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef HW_MEM_KSM_HOST_H
#define HW_MEM_KSM_HOST_H

/* False with @errp set: this kernel has no KSM. */
bool ksm_host_check(Error **errp);

/* Marks RAM as mergeable, or unmerges it: 0, or the kernel's errno. */
int ksm_host_merge(void *host, size_t size);
int ksm_host_unmerge(void *host, size_t size);

#endif
