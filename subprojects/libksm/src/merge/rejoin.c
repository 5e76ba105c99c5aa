/*
 * rejoin: pages in mappings of the pool map it elsewhere
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <string.h>
#include <sys/mman.h>

#include "base/tsan.h"
#include "merge/block.h"
#include "merge/mapping.h"
#include "merge/quiet.h"
#include "merge/rejoin.h"

typedef struct Rejoining {
    KsmRegion *r;
    size_t page;
    unsigned n;
    uint32_t slot[CHUNK_PAGES];     /* a user of it is taken; or SLOT_NONE */
    bool fits[CHUNK_PAGES];         /* it is equal: then, it is mapped */
    bool differs[CHUNK_PAGES];      /* ... or is not: who has changed? */
} Rejoining;

static char *addr_of(const Rejoining *g, unsigned i)
{
    return page_addr(g->r, g->page + i);
}

/*
 * The slot that a page may map.  Not one of a pattern, which would have to be
 * asked for room; nor of a pool that everybody is to leave.
 */
static uint32_t slot_for(const KsmRejoin *j, const KsmRegion *r, size_t page)
{
    KsmStore *s = j->content->store;
    uint32_t place = index_lookup(&j->content->index, r->tag[page]);
    uint32_t slot = place & ~PLACE_SLOT;

    if (place == PLACE_NONE || !(place & PLACE_SLOT) || store_full(s, slot) ||
        store_repeated(s, slot) != SLOT_NONE || store_stale(s, slot)) {
        return SLOT_NONE;
    }
    return slot;
}

static void slots_drop(KsmRejoin *j, Rejoining *g)
{
    for (unsigned i = 0; i < g->n; i++) {
        if (g->slot[i] != SLOT_NONE && !g->fits[i]) {
            store_drop(j->content->store, g->slot[i]);
            g->slot[i] = SLOT_NONE;
        }
    }
}

/* Takes slots, from the first page that has one to the last. */
static void slots_take(KsmRejoin *j, Rejoining *g)
{
    unsigned n = 0;

    while (g->n && slot_for(j, g->r, g->page) == SLOT_NONE) {
        g->page++;
        g->n--;
    }
    for (unsigned i = 0; i < g->n; i++) {
        g->slot[i] = slot_for(j, g->r, g->page + i);
        if (g->slot[i] != SLOT_NONE) {
            /* now, for others may want the same one */
            store_hold(j->content->store, g->slot[i]);
            n = i + 1;
        }
    }
    g->n = n;
}

static bool is_joined(const Rejoining *g, unsigned i)
{
    return i + 1 < g->n && g->slot[i] != SLOT_NONE &&
           g->slot[i] + 1 == g->slot[i + 1];
}

/* Mappings that it takes, at most two of which are more than there were. */
static unsigned runs_of(const Rejoining *g)
{
    unsigned runs = 0;

    for (unsigned i = 0; i < g->n; i++) {
        runs += g->slot[i] != SLOT_NONE && (!i || !is_joined(g, i - 1));
    }
    return runs;
}

static bool has_mappings(const Rejoining *g, size_t left)
{
    return 2 * runs_of(g) + VMAS_FEW <= left;
}

static bool pays(const KsmRejoin *j, const Rejoining *g)
{
    const KsmCosts *c = j->costs;
    unsigned gain = 0;

    for (unsigned i = 0; i < g->n; i++) {
        gain += g->slot[i] != SLOT_NONE;
    }
    return gain && c->rejoin_ns + runs_of(g) * c->map_ns +
                   g->n * REJOIN_PAGE_NS <= gain * PAGE_WORTH_NS;
}

/* --- while the pages are blocked --- */

static bool may_be_replaced(const Rejoining *g)
{
    return !region_inhibited(g->r) &&
           !region_busy(g->r, addr_of(g, 0), g->n * PAGE_BYTES);
}

/* Reads it in, where it was swapped out; false: its memory has failed. */
static bool read_in(const Rejoining *g)
{
    return prim.advise(addr_of(g, 0), g->n * PAGE_BYTES,
                       MADV_POPULATE_READ) == 0;
}

/* Pages from @i on whose slots follow each other; or one without. */
static unsigned joined_run(const Rejoining *g, unsigned i)
{
    unsigned n = 1;

    while (i + n < g->n && is_joined(g, i + n - 1)) {
        n++;
    }
    return n;
}

/*
 * Those whose slots can be read: before anybody may have to wait.  One that
 * cannot is seldom.
 */
static void slots_look(const KsmRejoin *j, Rejoining *g)
{
    KsmStore *s = j->content->store;
    unsigned n;

    for (unsigned i = 0; i < g->n; i += n) {
        bool all;

        n = joined_run(g, i);
        all = g->slot[i] != SLOT_NONE && store_readable(s, g->slot[i], n) == 0;
        for (unsigned k = i; k < i + n; k++) {
            g->fits[k] = all || (g->slot[k] != SLOT_NONE && n > 1 &&
                                 store_readable(s, g->slot[k], 1) == 0);
        }
    }
}

static void verify(const KsmRejoin *j, Rejoining *g)
{
    KsmStore *s = j->content->store;

    KSM_TSAN_IGNORE_BEGIN();
    for (unsigned i = 0; i < g->n; i++) {
        g->differs[i] = g->fits[i] && memcmp(addr_of(g, i),
                                             store_page(s, g->slot[i]),
                                             PAGE_BYTES);
        g->fits[i] &= !g->differs[i];
    }
    KSM_TSAN_IGNORE_END();
}

/* Pages from @i on that will be in one mapping, or stay. */
static unsigned run_of(const Rejoining *g, unsigned i)
{
    unsigned n = 1;

    while (i + n < g->n && g->fits[i + n] == g->fits[i] &&
           (!g->fits[i] || is_joined(g, i + n - 1))) {
        n++;
    }
    return n;
}

/* Maps what fits, and lifts the block of the rest.  How many mappings. */
static unsigned map_runs(KsmRejoin *j, Rejoining *g, const Block *b)
{
    unsigned runs = 0, n;

    for (unsigned i = 0; i < g->n; i += n) {
        n = run_of(g, i);
        if (g->fits[i] && mapping_make(j->content->store, j->vmas, g->r,
                                       addr_of(g, i), g->slot[i], n)) {
            runs++;
            continue;
        }
        if (g->fits[i]) {
            vmas_recount(j->vmas);
            memset(g->fits + i, false, n);
        }
        block_lift(b, addr_of(g, i), n * PAGE_BYTES);
    }
    return runs;
}

/* The number of mappings made. */
static unsigned replace(KsmRejoin *j, Rejoining *g)
{
    size_t len = g->n * PAGE_BYTES;
    unsigned runs = 0;
    Block b;

    slots_look(j, g);
    if (block_begin(&b, j->urgent, j->uffd_wp, addr_of(g, 0), len) < 0) {
        memset(g->fits, false, sizeof(g->fits));
        return 0;
    }
    if (may_be_replaced(g) && read_in(g)) {
        verify(j, g);
        runs = map_runs(j, g, &b);
    } else {
        memset(g->fits, false, sizeof(g->fits));
        block_lift(&b, addr_of(g, 0), len);
    }
    block_end(&b);
    if (runs) {
        mapping_attributes(g->r, addr_of(g, 0), g->fits, NULL, g->n);
    }
    return runs;
}

/* --- afterwards --- */

/*
 * What was copied on write and stays has to be quiet for some looks again.
 * Returns what does not stay.
 */
static unsigned account(KsmRejoin *j, Rejoining *g)
{
    size_t chunk = g->page / CHUNK_PAGES;
    unsigned merged = 0;

    for (unsigned i = 0; i < g->n; i++) {
        size_t page = g->page + i;

        if (g->fits[i]) {
            content_leave(j->content, g->r, page, PAGE_MERGED);
            g->r->tag[page] = g->slot[i];
            merged++;
        } else if (g->slot[i] != SLOT_NONE &&
                   page_state(g->r, page) == PAGE_BROKEN) {
            if (g->differs[i]) {
                /* else it might be taken for equal again and again */
                content_doubt(j->content, j->hasher, g->r, g->slot[i]);
            }
            content_leave(j->content, g->r, page, PAGE_BROKEN);
        }
    }
    slots_drop(j, g);
    region_count_runs(g->r, chunk);
    if (chunk + 1 < g->r->n_chunks) {
        region_count_runs(g->r, chunk + 1);
    }
    return merged;
}

static void warm(const Rejoining *g)
{
    unsigned n;

    for (unsigned i = 0; i < g->n; i += n) {
        n = run_of(g, i);
        if (g->fits[i]) {
            mapping_warm(g->r->ops, g->r->opaque, addr_of(g, i),
                         n * PAGE_BYTES);
        }
    }
}

/* Asked again while somebody may wait, and then it is in memory. */
static bool is_ready(const Rejoining *g)
{
    return may_be_replaced(g) && read_in(g);
}

/* Their number, and of *@runs; slots are dropped that are not mapped then. */
static unsigned carry_out(KsmRejoin *j, Rejoining *g, unsigned *runs)
{
    unsigned merged;

    *runs = replace(j, g);
    merged = account(j, g);
    warm(g);
    return merged;
}

unsigned rejoin_pages(KsmRejoin *j, KsmRegion *r, size_t page, unsigned n,
                      bool *tried)
{
    Rejoining g = { .r = r, .page = page, .n = n };
    KsmCosts *c = j->costs;
    unsigned runs, merged;
    uint64_t t;

    if (j->cut->shortest) {
        return 0;
    }
    slots_take(j, &g);
    if (!pays(j, &g) || !has_mappings(&g, vmas_left(j->vmas)) ||
        !is_ready(&g)) {
        slots_drop(j, &g);
        return 0;
    }
    *tried = true;
    t = prim.cpu_ns();
    merged = carry_out(j, &g, &runs);
    t = prim.cpu_ns() - t;
    cost_average(&c->rejoin_ns,
                 t - MIN(t, runs * c->map_ns + g.n * REJOIN_PAGE_NS));
    return merged;
}

unsigned rejoin_slots(KsmRejoin *j, KsmRegion *r, size_t page, unsigned n,
                      const uint32_t *slot, size_t left)
{
    Rejoining g = { .r = r, .page = page, .n = n };
    unsigned runs;

    memcpy(g.slot, slot, n * sizeof(*slot));
    if (!has_mappings(&g, left) || !is_ready(&g)) {
        slots_drop(j, &g);
        return 0;
    }
    return carry_out(j, &g, &runs);
}
