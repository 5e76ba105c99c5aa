/*
 * sketch: what the memory has in it, in a few numbers
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The least of the hashes of a set are a fair sample of it, the same one
 * wherever it is taken (Broder, "On the resemblance and containment of
 * documents", 1997; bottom-k: Cohen and Kaplan, 2007): the share of those of
 * two sets together that are in both estimates the share of all.  Tags are
 * hashes, and are there anyway.
 */
#include <string.h>

#include "engine/state.h"
#include "merge/quiet.h"

/* Keeps the least of them, in order, each once. */
static void sketch_add(KsmSketch *s, uint32_t hash)
{
    unsigned lo = 0, hi = s->n;

    if (s->n == KSM_SKETCH_SIZE && hash >= s->least[s->n - 1]) {
        return;
    }
    while (lo < hi) {
        unsigned mid = (lo + hi) / 2;

        if (s->least[mid] < hash) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    if (lo < s->n && s->least[lo] == hash) {
        return;
    }
    s->n = MIN(s->n + 1, KSM_SKETCH_SIZE);
    memmove(s->least + lo + 1, s->least + lo,
            (s->n - lo - 1) * sizeof(s->least[0]));
    s->least[lo] = hash;
}

/* The hash of the page's content, if that is known, and no zeroes. */
static bool page_hash(KsmEngine *e, const KsmRegion *r, size_t page,
                      uint32_t *hash)
{
    uint32_t tag = r->tag[page];

    switch (page_state(r, page)) {
    case PAGE_UNIQUE:
    case PAGE_EQUAL:
        break;
    case PAGE_MERGED:
        tag = store_tag(e->content.store, tag);
        break;
    case PAGE_BROKEN:
        if (!quiet_looks(r, page) || tag == content_tag(r, e->hasher.zero)) {
            return false;
        }
        break;
    default:
        return false;
    }
    *hash = tag ^ r->salt;
    return true;
}

/* Of those that are equal, and no slot, one is: what stands in the index. */
static bool is_first(const KsmRegion *r, size_t page)
{
    switch (page_state(r, page)) {
    case PAGE_UNIQUE:
        return true;
    case PAGE_EQUAL:
        return r->state[page] & PAGE_INDEXED;
    case PAGE_BROKEN:
        return !(r->state[page] & PAGE_AGAIN);
    default:
        return false;
    }
}

static void chunk_sketch(KsmEngine *e, const KsmRegion *r, size_t chunk,
                         KsmSketch *s)
{
    size_t page = chunk * CHUNK_PAGES;
    uint32_t hash;

    for (unsigned i = 0; i < CHUNK_PAGES; i++, page++) {
        if (page_hash(e, r, page, &hash)) {
            s->pages++;
            s->contents += is_first(r, page);
            sketch_add(s, hash);
        }
    }
}

bool ksm_engine_get_sketch(KsmEngine *engine, KsmSketch *sketch)
{
    KsmEngine *e = engine;
    KsmGroupStats group;
    bool has;

    *sketch = (KsmSketch) { 0 };
    lock_take(&e->lock);
    has = store_group(e->content.store, &group) && group.generation;
    for (size_t i = 0; has && i < e->dir.len; i++) {
        const KsmDirEntry *d = &e->dir.entry[i];

        if (d->region && !d->region->leaving) {
            chunk_sketch(e, d->region, d->chunk, sketch);
        }
        lock_release(&e->lock);
        lock_take(&e->lock);
    }
    if (has) {
        sketch->key = e->hasher.zero;
        sketch->contents += store_stats(e->content.store).shared;
    }
    lock_release(&e->lock);
    return has;
}
