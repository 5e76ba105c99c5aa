/*
 * ripen: chunks whose merging waits for more answers
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/prim.h"
#include "engine/ripen.h"

#define MOMENT          10u     /* part of the time that it is in a pass */
#define SPARSE_RUN      8u      /* pages: runs are shorter on average */
#define SPARSE_TIMES    5u      /* of the time, at most */
#define LOOKS_MAX       64u     /* in one go: microseconds */

typedef struct Ripening {
    uint64_t ns;            /* when it was last looked at, about */
    uint64_t first;         /* ... with what was before */
    uint64_t grown;         /* when its gain was last seen to grow ... */
    uint32_t id;            /* of the chunk */
    uint16_t gain;          /* ... to that */
} Ripening;

/*
 * The end of the moment it is: all looks are at such times, so that an idle
 * guest wakes up for them five times a second, however many chunks wait.
 */
static uint64_t look_time(const KsmEngine *e)
{
    uint64_t moment = MAX(e->content.store->ripen_ns / MOMENT, 1);

    return ROUND_UP_TO(prim.now_ns(), moment);
}

/* Its gain was last seen to grow @ago ns ago. */
static void add(KsmEngine *e, KsmRegion *r, size_t chunk, uint64_t ago)
{
    KsmChunk *c = &r->chunk[chunk];
    uint64_t now;
    Ripening *new;

    if (c->flags & (CHUNK_RIPENING | CHUNK_QUEUED)) {
        return;
    }
    chunk_know(r, chunk);
    c->flags |= CHUNK_RIPENING;
    now = prim.now_ns();
    new = g_new(Ripening, 1);
    *new = (Ripening) {
        look_time(e), now, now - ago, chunk_id(r, chunk), c->gain
    };
    g_queue_push_tail(&e->ripening, new);
}

void ripen_add(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    add(e, r, chunk, 0);
}

void ripen_again(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    add(e, r, chunk, e->content.store->ripen_ns);
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

bool ripen_is_sparse(const KsmRegion *r, size_t chunk)
{
    size_t page = chunk * CHUNK_PAGES;
    unsigned runs = 0;
    bool was = false;

    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        bool is = state_gains(page_state(r, page + i));

        runs += is && !was;
        was = is;
    }
    return r->chunk[chunk].gain < runs * SPARSE_RUN;
}

/* More of it may be equal in a moment, and all of it be merged at once. */
static bool waits_on(const KsmEngine *e, const KsmRegion *r, size_t chunk,
                     Ripening *w)
{
    const KsmChunk *c = &r->chunk[chunk];
    uint64_t now = prim.now_ns(), ns = e->content.store->ripen_ns;

    if (c->gain > w->gain) {
        w->grown = now;
    }
    w->gain = c->gain;
    return now - w->first < SPARSE_TIMES * ns &&
           (now - w->grown < ns || (c->flags & CHUNK_PARKED)) &&
           ripen_is_sparse(r, chunk);
}

/* Looks at the one that has waited longest; NULL: it is gone, or waits on. */
static KsmRegion *look(KsmEngine *e, size_t *chunk)
{
    Ripening *w = g_queue_pop_head(&e->ripening);
    KsmRegion *r = directory_chunk(&e->dir, w->id, chunk);

    /* the id may be of another region by now */
    if (r && (r->chunk[*chunk].flags & CHUNK_RIPENING)) {
        if (waits_on(e, r, *chunk, w)) {
            w->ns = look_time(e);
            g_queue_push_tail(&e->ripening, w);
            return NULL;
        }
        r->chunk[*chunk].flags &= ~CHUNK_RIPENING;
    } else {
        r = NULL;
    }
    g_free(w);
    return r;
}

bool ripen_take(KsmEngine *e, KsmRegion **r, size_t *chunk)
{
    *r = NULL;
    for (unsigned n = 0; !*r && n < LOOKS_MAX && ripen_wait(e) == 0; n++) {
        *r = look(e, chunk);
    }
    return *r || ripen_wait(e) == 0;
}

void ripen_free(KsmEngine *e)
{
    g_queue_clear_full(&e->ripening, g_free);
}
