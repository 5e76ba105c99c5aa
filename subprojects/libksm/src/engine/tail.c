/*
 * tail: what is left to the kernel's KSM
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "engine/tail.h"
#include "merge/parts.h"

#define LEFT_MIN        4u      /* equal pages that are worth its while */
#define MOSTLY_LEFT     4u      /* of what is equal one in so many is left */
#define FRESH_MAX       (CHUNK_PAGES / 16)  /* more were written: not quiet */
#define QUIET_PASSES    2u      /* before it is given */
#define LOUD_PASSES     4u      /* before it is taken away ... */
#define TICK_NS         UINT64_C(30000000000)
#define REST_TICKS      2u      /* log2: rests end at a multiple of 4 of them */
#define REST_DOUBLINGS  8u      /* ... or of 8, 16 ... 1024 */
#define HELD_TICKS      2u      /* before it is taken for being vain */
#define VAIN_SCANS      3u      /* begun: of them two were whole ... */
#define VAIN_PASSES     8u      /* ... and so many of ours */
#define HURRIED_MAX     32u     /* short rests more than long ones */
#define TRIED_MAX       32u     /* passes that what is tried holds it back */
#define LOOK_NS         UINT64_C(1000000000)
#define ROOM_NS         UINT64_C(50000000)
#define VMAS_SOME       1024u   /* left for others when we make mappings ... */
#define VMAS_SHARE      32u     /* ... or this part of all, if that is less */

#define KNOBS           "/sys/kernel/mm/ksm/"

/* A number of the kernel's; 0: none. */
static uint64_t knob(const char *path)
{
    g_autofree char *text = prim_read_file(path, NULL);

    return text ? g_ascii_strtoull(text, NULL, 10) : 0;
}

/* How far ksmd has come, and what its pages save. */
static void kernel_ask(KsmTail *t)
{
    uint64_t now = prim.now_ns(), shared, sharing;

    t->tick = now / TICK_NS;
    if (t->looked_ns && now - t->looked_ns < LOOK_NS) {
        return;
    }
    t->looked_ns = now;
    t->scans = knob(KNOBS "full_scans");
    shared = knob(KNOBS "pages_shared");
    sharing = knob(KNOBS "pages_sharing");
    t->saves = sharing ? (double)sharing / (shared + sharing) : 0;
}

static bool is_merged(uint64_t entry, uint8_t kind)
{
    return (kind & PM_PRESENT) && !(kind & (PM_ZEROPFN | PM_HUGE)) &&
           (entry >> ENTRY_PRESENT & 1) && !(entry >> ENTRY_FILE & 1) &&
           !(entry >> ENTRY_EXCLUSIVE & 1);
}

/* Pages of the chunk that the kernel has merged; 0: its page tables say so. */
static int chunk_read(KsmEngine *e, KsmRegion *r, size_t chunk, bool *merged)
{
    char *addr = page_addr(r, chunk * CHUNK_PAGES);
    uint64_t entry[CHUNK_PAGES];
    uint8_t kinds[CHUNK_PAGES];
    int ret = kinds_ask(&e->kinds, addr, CHUNK_PAGES, KINDS_FAST, kinds);

    ret = ret < 0 ? ret : kinds_read(&e->kinds, addr, CHUNK_PAGES, entry);
    for (unsigned i = 0; i < CHUNK_PAGES && ret == 0; i++) {
        merged[i] = is_merged(entry[i], kinds[i]) &&
                    page_state(r, chunk * CHUNK_PAGES + i) != PAGE_OUTSIDE;
    }
    return ret;
}

/* In doubt it has. */
static bool chunk_has_merged(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    bool merged[CHUNK_PAGES];

    return chunk_read(e, r, chunk, merged) < 0 ||
           memchr(merged, true, sizeof(merged));
}

/*
 * All of the chunk that is plain memory; 0 or -errno of the first refusal.  Not
 * of a gap: madvise() does the rest all the same, and then says ENOMEM.  Where
 * memory or mappings are wanting it says EAGAIN.
 */
static int chunk_advise(KsmRegion *r, size_t chunk, int advice)
{
    size_t page = MAX(chunk * CHUNK_PAGES, region_first(r));
    size_t end = MIN((chunk + 1) * CHUNK_PAGES, region_end(r));
    int ret = 0;

    while (page < end) {
        PageRun run = region_run(r, page, end);

        if (!run.mapped && !run.barred) {
            int err;

            do {
                err = prim.advise(run.addr, run.len, advice);
            } while (err == -EINTR);
            ret = ret < 0 || err == -ENOMEM ? ret : err;
        }
        page += run.n;
    }
    return ret;
}

/* What the kernel had merged is a page of its own again. */
static void chunk_returned(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    size_t page = chunk * CHUNK_PAGES;

    for (unsigned i = 0; i < CHUNK_PAGES && r->chunk[chunk].kernel; i++) {
        if (page_state(r, page + i) == PAGE_KERNEL) {
            content_leave(&e->content, r, page + i, PAGE_NEW);
            page_mark(r, page + i, r->dirty == KSM_DIRTY_CHECKSUM);
        }
    }
}

/* 0 or -ENOMEM.  A kernel without KSM, EINVAL, has merged nothing. */
static int chunk_take(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];

    if (chunk_advise(r, chunk, MADV_UNMERGEABLE) == -EAGAIN) {
        return -ENOMEM;
    }
    chunk_returned(e, r, chunk);
    c->flags &= ~CHUNK_TAIL;
    c->flags |= CHUNK_VISIT;
    c->tail_wait = e->tail.eager ? 1 : QUIET_PASSES;
    c->tail_until = e->tail.tick;
    e->tail.chunks--;
    return 0;
}

/*
 * What two guests share ksmd finds only while both have left it.  So all of the
 * host begin again at the same times: multiples of one clock's ticks, where longer
 * rests end shorter ones do, too.  @rounds: 1 is the next one.
 */
static uint32_t rest_end(const KsmEngine *e, unsigned doublings,
                         unsigned rounds)
{
    unsigned shift = REST_TICKS + doublings;

    return ((e->tail.tick >> shift) + rounds) << shift;
}

/* It was taken away: for being vain, or @loud; that is for a whole round. */
static void chunk_rests(KsmEngine *e, KsmChunk *c, bool loud)
{
    unsigned doublings = c->tail_tries;

    c->tail_tries = MIN(doublings + 1, REST_DOUBLINGS);
    c->tail_until = rest_end(e, doublings, loud ? 2 : 1);
}

/* ... or is held. */
static bool is_resting(const KsmEngine *e, const KsmChunk *c)
{
    return c->tail_until > e->tail.tick && !e->tail.eager;
}

/* What is written is another content: it need not rest for the old one. */
static void rest_cut(KsmEngine *e, KsmChunk *c)
{
    c->tail_until = MIN(c->tail_until, rest_end(e, 0, 2));
}

static void chunk_give(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    size_t left = vmas_left(&e->vmas);
    KsmChunk *c = &r->chunk[chunk];
    int ret;

    if (!left || left < MIN(VMAS_SOME, e->vmas.limit / VMAS_SHARE)) {
        return;
    }
    /* at worst its neighbours are not given */
    vmas_made(&e->vmas, 2);
    /* what is mapped anew from now on is given, too */
    c->flags |= CHUNK_TAIL;
    c->tail_wait = c->tail_vain = 0;
    c->tail_scan = e->tail.scans;
    /* others give theirs with their next pass */
    c->tail_until = e->tail.tick + HELD_TICKS;
    e->tail.chunks++;
    e->tail.given++;
    ret = chunk_advise(r, chunk, MADV_MERGEABLE);
    if (ret < 0) {
        e->tail.refused |= ret == -EINVAL;
        e->plan.tail = !e->tail.refused;
        vmas_recount(&e->vmas);
        if (chunk_take(e, r, chunk) == 0) {
            chunk_rests(e, c, false);
        }
    }
}

static bool is_quiet(const KsmChunk *c)
{
    return c->written + c->fresh <= FRESH_MAX;
}

/* Equal pages were found here, and merging them was refused, or too little. */
static bool is_left(const KsmEngine *e, const KsmRegion *r, const KsmChunk *c)
{
    unsigned least = c->flags & CHUNK_HUGE ? parts_gain(&e->plan, c)
                                           : LEFT_MIN;

    if (e->tail.eager) {
        return !(c->flags & CHUNK_HUGE);
    }
    if ((c->flags & CHUNK_LOOSE) && !c->same) {
        return false;       /* it may be hot: no log tells */
    }
    if (c->left >= least && is_quiet(c)) {
        return true;        /* others have left it, too */
    }
    return c->gain >= least && is_quiet(c) &&
           (c->why_not == KSM_REASON_NOT_WORTH ||
            c->why_not == KSM_REASON_VMA_LIMIT ||
            c->why_not == KSM_REASON_RUN_OFF);
}

/* It is looked at in this pass, or later for more (parts.h): that may pay. */
static bool is_tried(const KsmEngine *e, const KsmRegion *r, const KsmChunk *c)
{
    uint16_t seen = r->dirty == KSM_DIRTY_LOG ? c->broken : c->mapped;
    /* without a source, or to look at merged or freed pages: visited anyway */
    bool anyway = r->dirty == KSM_DIRTY_CHECKSUM ||
                  (e->scan.rhythm.check && (seen || c->lazy));
    uint16_t soon = anyway ? 0 : CHUNK_VISIT;
    bool later = c->why_not == KSM_REASON_NOT_WORTH &&
                 (c->wait || (c->flags & CHUNK_VISIT)) &&
                 !(c->flags & CHUNK_HUGE) && c->late <= LATE_MIN;

    if (c->left >= LEFT_MIN && MOSTLY_LEFT * c->left >= c->gain &&
        !(c->flags & CHUNK_HUGE)) {
        /* whatever becomes of the rest: others leave theirs now */
        return !e->tail.eager && (c->flags & (CHUNK_QUEUED | CHUNK_PARKED));
    }
    return !e->tail.eager &&
           (later ||
            c->flags & (soon | CHUNK_QUEUED | CHUNK_PARKED | CHUNK_RIPENING));
}

static void left_pass(KsmEngine *e, KsmRegion *r, size_t chunk, bool may)
{
    KsmChunk *c = &r->chunk[chunk];
    bool tried = is_tried(e, r, c) && c->tail_vain < TRIED_MAX;

    if (c->tail_wait > (tried ? QUIET_PASSES : 0)) {
        c->tail_wait--;
    } else if (tried) {
        /* that may be for ever, and giving it does not end it */
        c->tail_vain++;
    } else {
        if (may) {
            chunk_give(e, r, chunk);
        }
        return;
    }
    e->tail.waiting += may && c->tail_wait <= QUIET_PASSES;
}

/* Once a pass; what was put back looks written for a pass, too. */
static bool is_loud(KsmChunk *c)
{
    c->tail_wait = c->kernel || is_quiet(c) ? 0 : c->tail_wait + 1;
    return c->tail_wait >= LOUD_PASSES;
}

/*
 * ksmd found nothing, as far as the books know.  Once a pass.  Not counted by
 * scans alone: where it has little to do it makes thousands.
 */
static bool is_vain(const KsmEngine *e, KsmChunk *c)
{
    uint8_t scans = e->tail.scans - c->tail_scan;

    if (c->kernel) {
        c->tail_scan = e->tail.scans;
        c->tail_vain = c->tail_tries = 0;
    }
    c->tail_vain = MIN(c->tail_vain + 1, VAIN_PASSES);
    return scans >= VAIN_SCANS && c->tail_vain == VAIN_PASSES &&
           !is_resting(e, c);
}

/* Of what was given, in each pass: it is taken if it costs ksmd for nothing. */
static void given_pass(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    bool vain = is_vain(e, c), loud = is_loud(c);

    /* it is another content by now */
    c->tail_tries = loud ? 0 : c->tail_tries;
    /* the books may be old: not each pass asks page tables */
    if ((vain || loud) && !chunk_has_merged(e, r, chunk) &&
        chunk_take(e, r, chunk) == 0) {
        chunk_rests(e, c, loud);
    }
}

/* What is equal there is not worth a mapping, and will not be. */
static bool is_unworthy(const KsmEngine *e, const KsmChunk *c)
{
    if ((c->flags & CHUNK_HUGE) &&
        c->gain - c->left < (int)parts_gain(&e->plan, c)) {
        return true;
    }
    return c->why_not == KSM_REASON_NOT_WORTH &&
           ((c->flags & CHUNK_HUGE) || c->late > LATE_MIN);
}

void tail_pass(KsmEngine *e, KsmRegion *r, size_t chunk, size_t end)
{
    bool may;

    if (!e->cfg.tail || !region_stays_home(r)) {
        return;
    }
    kernel_ask(&e->tail);
    may = !e->tail.refused && !region_inhibited(r);
    REGION_FOREACH_KNOWN(r, i, chunk, end) {
        KsmChunk *c = &r->chunk[i];

        e->tail.unworthy_now += is_unworthy(e, c) ? c->gain - c->left : 0;
        if (c->flags & CHUNK_TAIL) {
            given_pass(e, r, i);
            continue;
        }
        if (!is_quiet(c)) {
            c->tail_tries = 0;
            rest_cut(e, c);
        }
        if (!is_left(e, r, c)) {
            c->tail_wait = MAX(c->tail_wait, QUIET_PASSES);
            c->tail_vain = 0;
        } else if (!is_resting(e, c)) {
            left_pass(e, r, i, may);
        } else {
            /* it is given with the first pass after that */
            c->tail_wait -= c->tail_wait > 0;
        }
    }
}

bool tail_waits(const KsmEngine *e)
{
    return e->tail.waiting && e->tail.hurried < HURRIED_MAX;
}

void tail_rests(KsmEngine *e, bool hurry)
{
    e->tail.hurried += hurry ? 1 : -(e->tail.hurried > 0);
}

void tail_rest(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    if ((r->chunk[chunk].flags & CHUNK_TAIL) && !r->chunk[chunk].kernel &&
        !chunk_has_merged(e, r, chunk)) {
        chunk_take(e, r, chunk);
    }
}

static void page_look(KsmEngine *e, KsmRegion *r, size_t page, bool merged)
{
    switch (page_state(r, page)) {
    case PAGE_NEW:
    case PAGE_UNIQUE:
    case PAGE_EQUAL:
    case PAGE_ZEROES:
    case PAGE_PINNED:
        if (merged) {
            content_leave(&e->content, r, page, PAGE_KERNEL);
        }
        break;
    case PAGE_KERNEL:
        if (!merged) {
            content_leave(&e->content, r, page, PAGE_NEW);
            page_mark(r, page, r->dirty == KSM_DIRTY_CHECKSUM);
        }
        break;
    default:
        break;
    }
}

void tail_look(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    bool merged[CHUNK_PAGES];

    if (!(c->flags & CHUNK_TAIL) && !c->kernel) {
        return;
    }
    if (chunk_read(e, r, chunk, merged) < 0) {
        return;
    }
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        page_look(e, r, chunk * CHUNK_PAGES + i, merged[i]);
    }
}

void tail_room(KsmEngine *e)
{
    StoreRoom room = { .mappings = STORE_NO_TAIL };
    uint64_t now = prim.now_ns();

    if (!e->cfg.tail || (e->tail.room_ns && now - e->tail.room_ns < ROOM_NS)) {
        return;
    }
    e->tail.room_ns = now;
    if (!e->tail.refused) {
        room.mappings = plan_room(&e->plan);
        for (guint i = 0; i < e->regions->len; i++) {
            const KsmRegion *r = g_ptr_array_index(e->regions, i);

            room.waiting += r->count[PAGE_EQUAL] - r->n_left;
        }
        room.waiting -= MIN(room.waiting, e->tail.unworthy);
    }
    store_room(e->content.store, &room);
}

void tail_tell(KsmEngine *e)
{
    StoreTail tail = {
        .bytes = e->tail.chunks * CHUNK_BYTES,
        .given = e->tail.given,
    };

    if (!e->cfg.tail) {
        return;
    }
    for (guint i = 0; i < e->regions->len; i++) {
        const KsmRegion *r = g_ptr_array_index(e->regions, i);

        tail.merged += r->count[PAGE_KERNEL];
    }
    store_tail(e->content.store, &tail);
}

int tail_unmerge(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    size_t chunk = page / CHUNK_PAGES;
    size_t end = (page + n + CHUNK_PAGES - 1) / CHUNK_PAGES;
    int ret = 0;

    r->unmerging++;
    REGION_FOREACH_KNOWN(r, i, chunk, end) {
        if (r->chunk[i].flags & CHUNK_TAIL) {
            int err = chunk_take(e, r, i);

            ret = ret < 0 ? ret : err;
            lock_pass(&e->lock);
        }
    }
    r->unmerging--;
    return ret;
}

void tail_forget(KsmEngine *e, KsmRegion *r)
{
    REGION_FOREACH_KNOWN(r, i, 0, r->n_chunks) {
        if (!e->tail.chunks) {
            break;
        }
        e->tail.chunks -= !!(r->chunk[i].flags & CHUNK_TAIL);
    }
}
