/*
 * One budget of mappings (vm.max_map_count) for merging and coroutines
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A process may have 65530 mappings by default.  A merged run takes two, and so
 * does a coroutine's stack.  QEMU ends when it cannot have a stack; its pool of
 * coroutines reckons with all but KSM_VMAS_FIXED for stacks.
 */
#ifndef HW_MEM_KSM_VMAS_H
#define HW_MEM_KSM_VMAS_H

/* For all else, as util/qemu-coroutine.c has it: libraries, vhost-user ... */
#define KSM_VMAS_FIXED 5000

typedef struct KsmVmas {
    uint64_t reserve;       /* mappings that merging leaves to the others */
    unsigned pool;          /* coroutines that may be pooled */
} KsmVmas;

/*
 * @max_map_count: the host's limit
 * @wanted: coroutines that devices want to be pooled
 * @runs: runs that are merged now; these are not given back
 */
KsmVmas ksm_vmas_share(uint64_t max_map_count, unsigned wanted,
                       uint64_t runs);

#endif
