/*
 * One budget of mappings (vm.max_map_count) for merging and coroutines
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "ksm-vmas.h"

/* A stack and its guard page; a run and the cut-off part of its neighbour. */
#define VMAS_EACH 2

KsmVmas ksm_vmas_share(uint64_t max_map_count, unsigned wanted, uint64_t runs)
{
    uint64_t rest = max_map_count - MIN(max_map_count, KSM_VMAS_FIXED);
    uint64_t quarter = max_map_count / 4;
    uint64_t taken = MIN(rest, runs * VMAS_EACH);
    uint64_t stacks;
    KsmVmas vmas;

    /* devices want half of the requests they may have pooled */
    stacks = 2 * (uint64_t)wanted * VMAS_EACH;
    stacks = MAX(stacks, quarter - MIN(quarter, KSM_VMAS_FIXED));
    stacks = MIN(stacks, rest / 2);
    vmas.reserve = MIN(max_map_count, KSM_VMAS_FIXED + stacks);
    /* a device that was plugged in later finds runs there already */
    vmas.pool = MIN(UINT_MAX, MIN(stacks, rest - taken) / VMAS_EACH);
    return vmas;
}
