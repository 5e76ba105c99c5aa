/*
 * promise: a pass that is made without a rest, for what waits for it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "engine/promise.h"
#include "merge/cost.h"

#define VAIN_MAX    8u      /* by then a chunk counts as nothing */

void promise_waits(KsmPromise *p, unsigned pages)
{
    p->waits += pages;
}

bool promise_make(KsmPromise *p, uint64_t merged)
{
    if (p->waits * PAGE_WORTH_NS >> 2 * p->vain <= p->cost) {
        return false;
    }
    if (!p->made) {
        p->made = p->waits;
        p->merged = merged;
        p->passes = 0;
    }
    return true;
}

void promise_judge(KsmPromise *p, uint64_t merged, uint64_t cost, uint64_t now,
                   uint64_t ns)
{
    p->cost = cost;
    if (!p->made) {
        p->vain -= p->vain > 0;
    } else if (merged - p->merged >= p->made / 4) {
        p->vain = 0;
        p->made = 0;
    } else if (ns && !p->passes) {
        /* what it has asked about may be answered from now on */
        p->passes = 1;
        p->began = now;
    } else if (now - p->began >= ns || ++p->passes >= PROMISE_PASSES) {
        p->vain = MIN(p->vain + 1, VAIN_MAX);
        p->made = 0;
    }
}

void promise_begin(KsmPromise *p)
{
    p->waits = 0;
}
