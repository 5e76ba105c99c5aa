/*
 * sample: is what a loose chunk would save still what it was?
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/tsan.h"
#include "merge/sample.h"

#define SAMPLE          16u     /* pages */
#define CHANGED_SHARE   4u      /* part of them that may have changed */
#define PUT_OFF_MAX     6u      /* log2 of passes */
#define OLD_LOOKS       2u      /* after the first one some passes are enough */

bool sample_page(const KsmHasher *h, const KsmRegion *r, size_t page)
{
    const char *addr = page_addr(r, page);

    if (page_state(r, page) == PAGE_ZEROES) {
        return bytes_are_zero(addr, PAGE_BYTES);
    }
    return content_tag_fits(r, r->tag[page], hash_page(h, addr));
}

/* Pages that merging would save; returns how many. */
static unsigned gain_pages(const KsmRegion *r, size_t chunk, uint16_t *which)
{
    unsigned n = 0;

    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        if (state_gains(page_state(r, chunk * CHUNK_PAGES + i))) {
            which[n++] = i;
        }
    }
    return n;
}

/*
 * It can be read: nobody has given it back, or has it swapped out, and its
 * memory has not failed.
 */
static bool is_huge(const Sampler *s, const KsmRegion *r, size_t chunk)
{
    uint8_t kinds[CHUNK_PAGES];

    return kinds_ask(s->kinds, page_addr(r, chunk * CHUNK_PAGES), CHUNK_PAGES,
                     KINDS_FAST, kinds) == 0 &&
           (kinds[0] & (PM_HUGE | PM_PRESENT | PM_ZEROPFN)) ==
           (PM_HUGE | PM_PRESENT);
}

static bool page_is_still(const Sampler *s, KsmRegion *r, size_t page)
{
    if (sample_page(s->hasher, r, page)) {
        return true;
    }
    content_leave(s->content, r, page, PAGE_NEW);
    page_mark(r, page, true);
    page_chunk(r, page)->flags |= CHUNK_VISIT;
    page_chunk(r, page)->same = 0;
    return false;
}

/* Pages that changed are NEW. */
static bool most_are_still(const Sampler *s, KsmRegion *r, size_t chunk)
{
    uint16_t which[CHUNK_PAGES];
    unsigned n = gain_pages(r, chunk, which), some = MIN(n, SAMPLE);
    unsigned changed = 0;

    KSM_TSAN_IGNORE_BEGIN();    /* they may be written */
    for (unsigned i = 0; i < some; i++) {
        changed += !page_is_still(s, r, chunk * CHUNK_PAGES +
                                        which[i * n / some]);
    }
    KSM_TSAN_IGNORE_END();
    return changed <= some / CHANGED_SHARE;
}

/* It seemed to have so much to gain. */
static void put_off(KsmChunk *c, uint16_t gain)
{
    c->flags |= CHUNK_STIRRED;
    c->same = 0;
    c->tried = c->wait ? MAX(c->tried, gain) : gain;
    if (!c->wait) {
        c->backoff = MIN(c->backoff + 1, PUT_OFF_MAX);
        c->wait = 1u << c->backoff;
    }
    c->hot_wait = MIN(c->hot_wait, c->wait);
}

bool sample_chunk(const Sampler *s, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    uint16_t gain = c->gain;

    if (!(c->flags & CHUNK_LOOSE) || (c->flags & CHUNK_STILL)) {
        return true;
    }
    if (c->flags & CHUNK_STIRRED) {
        return false;
    }
    if (r->rests || region_inhibited(r) || !is_huge(s, r, chunk)) {
        c->flags |= CHUNK_VISIT | CHUNK_STIRRED;
        return false;
    }
    if (!most_are_still(s, r, chunk)) {
        put_off(c, gain);
        return false;
    }
    c->flags |= CHUNK_STILL;
    return true;
}

unsigned sample_run(const Sampler *s, KsmRegion *r, size_t page, unsigned n)
{
    KsmChunk *c = page_chunk(r, page);
    unsigned still = 0;

    if (!(c->flags & CHUNK_LOOSE) || c->hot < OLD_LOOKS ||
        !store_is_remote(s->content->store)) {
        return n;
    }
    if (!is_huge(s, r, page / CHUNK_PAGES)) {
        c->flags |= CHUNK_VISIT;        /* all of it is hashed again */
        return 0;
    }
    KSM_TSAN_IGNORE_BEGIN();    /* they may be written */
    while (still < n && page_is_still(s, r, page + still)) {
        still++;
    }
    KSM_TSAN_IGNORE_END();
    return still;
}
