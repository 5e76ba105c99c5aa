/*
 * ripen: chunks whose merging waits for more answers
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/prim.h"
#include "engine/ripen.h"

#define MOMENT  10u     /* part of the time that it is in a pass */

typedef struct Ripening {
    uint64_t ns;            /* since when */
    uint32_t id;            /* of the chunk */
} Ripening;

void ripen_add(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    Ripening *new;

    if (c->flags & (CHUNK_RIPENING | CHUNK_QUEUED)) {
        return;
    }
    chunk_know(r, chunk);
    c->flags |= CHUNK_RIPENING;
    new = g_new(Ripening, 1);
    *new = (Ripening) { prim.now_ns(), chunk_id(r, chunk) };
    g_queue_push_tail(&e->ripening, new);
}

uint64_t ripen_wait(const KsmEngine *e)
{
    const Ripening *first = e->ripening.head ? e->ripening.head->data : NULL;
    uint64_t now = prim.now_ns(), due;

    if (!first) {
        return UINT64_MAX;
    }
    due = first->ns + e->content.store->ripen_ns /
                      (e->scan.phase == PHASE_START ? MOMENT : 1);
    return due > now ? due - now : 0;
}

bool ripen_take(KsmEngine *e, uint32_t *id)
{
    Ripening *first;

    if (ripen_wait(e)) {
        return false;
    }
    first = g_queue_pop_head(&e->ripening);
    *id = first->id;
    g_free(first);
    return true;
}

void ripen_free(KsmEngine *e)
{
    g_queue_clear_full(&e->ripening, g_free);
}
