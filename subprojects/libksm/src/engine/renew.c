/*
 * renew: what is alone is asked about again
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/prim.h"
#include "engine/renew.h"

/* A chunk in so long: 512 MiB in 17 minutes. */
#define RENEW_NS        UINT64_C(4000000000)
#define RENEW_MIN       5u      /* at once: between them passes are idle */
#define RENEW_MAX       64u

/*
 * Others may have room by now for what is left, unless ksmd has merged there, or
 * found nothing: what is asked about again looks written.
 */
static bool is_alone(const KsmRegion *r, size_t page)
{
    const KsmChunk *c = page_chunk(r, page);

    return page_state(r, page) == PAGE_UNIQUE ||
           (page_is_left(r, page) && !c->kernel && !c->tail_tries);
}

static void chunk_renew(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    size_t page = chunk * CHUNK_PAGES;

    for (unsigned i = 0; i < CHUNK_PAGES; i++, page++) {
        if (is_alone(r, page)) {
            content_leave(&e->content, r, page, PAGE_NEW);
            r->history[page] = 0;
            r->chunk[chunk].flags |= CHUNK_VISIT;
        }
    }
}

void renew_by_time(KsmEngine *e)
{
    uint64_t now = prim.now_ns();
    uint64_t n;

    if (!e->renewed_ns) {
        e->renewed_ns = now;
    }
    n = (now - e->renewed_ns) / RENEW_NS;
    if (n < RENEW_MIN) {
        return;
    }
    if (!store_is_gone(e->content.store)) {
        for (uint64_t i = 0; i < MIN(n, RENEW_MAX); i++) {
            KsmRegion *r;
            size_t chunk;

            if (!directory_next(&e->dir, &e->renewed)) {
                e->renewed = 0;
                break;
            }
            r = directory_chunk(&e->dir, e->renewed++, &chunk);
            if (!r->leaving && !r->rests) {
                chunk_renew(e, r, chunk);
            }
        }
    }
    e->renewed_ns = now;
}

void renew_pass(KsmEngine *e, KsmRegion *r, size_t chunk, size_t end)
{
    REGION_FOREACH_KNOWN(r, i, chunk, end) {
        if ((r->chunk[i].flags & CHUNK_UNOFFERED) &&
            !memcg_is_tight(&e->memcg)) {
            r->chunk[i].flags &= ~CHUNK_UNOFFERED;
            chunk_renew(e, r, i);
        }
    }
}
