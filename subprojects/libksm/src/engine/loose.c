/*
 * loose: huge pages, which are not watched
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "engine/loose.h"
#include "engine/settle.h"
#include "merge/sample.h"

#define LOOKS_MAX   3u      /* log4 of the passes between looks */
#define SAME_ENOUGH 3u      /* looks: then it is protected */

static bool is_loose(const KsmRegion *r, size_t chunk)
{
    return r->chunk[chunk].flags & CHUNK_LOOSE;
}

void loose_pass(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];

    if (!is_loose(r, chunk)) {
        return;
    }
    c->flags &= ~(CHUNK_STIRRED | CHUNK_STILL);
    if (c->hot_wait && --c->hot_wait == 0) {
        c->flags |= CHUNK_VISIT;
    }
    if (plan_ripe(&e->plan, r, chunk)) {
        c->flags |= CHUNK_VISIT;
    }
}

bool loose_begin(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];

    if (!is_loose(r, chunk)) {
        return false;
    }
    if (c->written) {
        c->same = 0;    /* NEW since it was seen, be it by the sample */
    }
    if (c->hot_wait) {
        return false;
    }
    if (c->same + 1 >= SAME_ENOUGH && r->tracking) {
        /* now, so that nothing is written unseen after it was hashed */
        dirty_fasten(&e->dirty, r, chunk);
    }
    return true;
}

bool loose_is_new(const KsmChunk *c)
{
    return (c->flags & CHUNK_LOOSE) && c->hot <= 1;
}

bool loose_goes_on(const KsmChunk *c)
{
    return (c->flags & CHUNK_LOOSE) && c->hot == LOOKS_MAX;
}

bool loose_changed(const KsmEngine *e, const KsmRegion *r, size_t page,
                   uint64_t hash64)
{
    bool zeroes = page_state(r, page) == PAGE_ZEROES;

    if (!page_is_known(r, page)) {
        return false;
    }
    if (zeroes || engine_zero_only(e)) {
        return zeroes != (hash64 == e->hasher.zero);
    }
    return !content_tag_fits(r, r->tag[page], hash64);
}

void loose_hashed(KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];

    if (is_loose(r, chunk)) {
        c->flags &= ~CHUNK_STILL;
        c->flags |= CHUNK_STIRRED;
    }
}

void loose_end(KsmEngine *e, KsmRegion *r, size_t chunk, unsigned changed)
{
    KsmChunk *c = &r->chunk[chunk];
    bool still = c->hot && !changed && !(c->flags & CHUNK_STIRRED);
    unsigned wait;

    if (!is_loose(r, chunk)) {
        if (changed) {
            dirty_loosen(&e->dirty, r, chunk);
            c->hot = LOOKS_MAX;
        } else {
            c->same = SAME_ENOUGH;
        }
        return;
    }
    /* where nothing but zeroes is known it may be hot, and look the same */
    c->same = still && !engine_zero_only(e) ? MIN(c->same + 1, SAME_ENOUGH)
                                            : 0;
    c->flags &= ~(CHUNK_STIRRED | CHUNK_STILL);
    c->flags |= still ? CHUNK_STILL : CHUNK_STIRRED;
    c->hot = MIN(c->hot + 1, LOOKS_MAX);
    wait = 1u << 2 * c->hot;
    /* not all of them in the same pass */
    c->hot_wait = wait + chunk % wait;
}

bool loose_ready(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    if (!sample_chunk(&e->plan.sampler, r, chunk)) {
        e->scan.again = true;
        return false;
    }
    /* what the sample found changed is no gain */
    return plan_ripe(&e->plan, r, chunk);
}

/* What is known, and was not seen since it is protected, is not. */
static void forget_rest(KsmEngine *e, KsmRegion *r, size_t chunk,
                        const bool *seen)
{
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        size_t page = chunk * CHUNK_PAGES + i;

        if (page_is_known(r, page) && !(seen && seen[i])) {
            content_leave(&e->content, r, page, PAGE_NEW);
            page_mark(r, page, true);
        }
    }
}

void loose_split(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    dirty_fasten(&e->dirty, r, chunk);
    forget_rest(e, r, chunk, NULL);
}

void loose_merged(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    bool busy;

    dirty_fasten(&e->dirty, r, chunk);
    /* what a device writes from now on no log tells */
    busy = region_busy(r, page_addr(r, chunk * CHUNK_PAGES), CHUNK_BYTES);
    if (!busy) {
        settle_kept(e, r, chunk);
    }
    forget_rest(e, r, chunk, busy ? NULL : e->merge.kept);
}
