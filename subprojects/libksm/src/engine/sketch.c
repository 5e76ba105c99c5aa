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
        if (store_stale(e->content.store, tag)) {
            return false;       /* its tag is of another seed */
        }
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

static void chunk_sketch(KsmEngine *e, const KsmRegion *r, size_t chunk,
                         KsmSketch *s)
{
    size_t page = chunk * CHUNK_PAGES;
    uint32_t hash;

    for (unsigned i = 0; i < CHUNK_PAGES; i++, page++) {
        if (page_hash(e, r, page, &hash)) {
            s->pages++;
            sketch_add(s, hash);
        }
    }
}

/*
 * How many hashes there are, by how near together the least of them are.  (No
 * state tells which page is the first with its content, once merging it was not
 * worth it.)
 */
static uint64_t sketch_contents(const KsmSketch *s)
{
    if (s->n < KSM_SKETCH_SIZE) {
        return s->n;
    }
    return MIN(((s->n - 1ULL) << 32) / s->least[s->n - 1], s->pages);
}

/* Nobody learns the seed from it. */
static uint64_t sketch_key(uint64_t seed)
{
    g_autoptr(GChecksum) sum = g_checksum_new(G_CHECKSUM_SHA256);
    uint64_t digest[4];
    gsize len = sizeof(digest);

    seed = GUINT64_TO_LE(seed);
    g_checksum_update(sum, (const guchar *)&seed, sizeof(seed));
    g_checksum_get_digest(sum, (guint8 *)digest, &len);
    return GUINT64_FROM_LE(digest[0]);
}

bool ksm_engine_get_sketch(KsmEngine *engine, KsmSketch *sketch)
{
    KsmEngine *e = engine;
    KsmGroupStats group;
    bool has;

    *sketch = (KsmSketch) { 0 };
    lock_take(&e->lock);
    has = store_group(e->content.store, &group) && group.generation;
    for (uint32_t id = 0; has && directory_next(&e->dir, &id); id++) {
        size_t chunk;
        const KsmRegion *r = directory_chunk(&e->dir, id, &chunk);

        if (!r->leaving) {
            chunk_sketch(e, r, chunk, sketch);
        }
        lock_pass(&e->lock);
    }
    if (has) {
        sketch->key = sketch_key(e->hasher.seed);
        sketch->contents = sketch_contents(sketch);
    }
    lock_release(&e->lock);
    return has;
}
