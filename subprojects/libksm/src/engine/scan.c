/*
 * scan: what to look at, and in which order
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <sys/mman.h>

#include "base/prim.h"
#include "engine/broken.h"
#include "engine/classify.h"
#include "engine/discard.h"
#include "engine/loose.h"
#include "engine/renew.h"
#include "engine/ripen.h"
#include "engine/scan.h"
#include "engine/settle.h"
#include "engine/tail.h"
#include "engine/visit.h"
#include "merge/parts.h"

#define IDLE_MIN_NS     UINT64_C(100000000)
#define IDLE_SOON_NS    UINT64_C(1000000000)
#define IDLE_MAX_NS     UINT64_C(10000000000)
/* Shortest pass at 1 % of a core: what was quiet for a pass is quiet. */
#define PASS_MIN_NS     UINT64_C(2000000000)
/*
 * Where others are asked most of what they answer is merged when it comes, be a
 * pass under way or not: passes that look for more, hashing aside, take 5 % of a
 * core, or come each 10 s.
 */
#define PASS_SHARE      20u
/*
 * Passes before the engine may rest: the first one only begins to watch.  What
 * others are asked about saves something when they have answered: some more,
 * and not all at once.
 */
#define SETTLE_PASSES   2u
#define SETTLE_REMOTE   5u
#define SETTLE_NS       UINT64_C(200000000)     /* from one to the next */
#define SKIP_STEP       4096u   /* chunks passed over in one go */
#define RETRIES_MAX     16u     /* in a pass, of a plan that was refused */
#define BACKOFF_MAX     6u      /* log2 of passes */
#define BACKOFF_FORK    3u

static uint64_t pass_min_ns(const KsmEngine *e)
{
    uint64_t ns = PASS_MIN_NS / MIN(engine_max_cpu(e), 100);

    if (e->content.store->ripen_ns) {
        ns = MAX(ns, MIN(e->scan.took * PASS_SHARE, IDLE_MAX_NS));
    }
    return ns;
}

/* For KsmChunk.failed_in and visited_in; 0: in none. */
static uint8_t pass_mark(const KsmScan *s)
{
    return s->pass % UINT8_MAX + 1;
}

void scan_queue(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmScan *s = &e->scan;
    KsmChunk *c = &r->chunk[chunk];

    if ((c->flags & CHUNK_QUEUED) || r->leaving) {
        return;
    }
    /*
     * Where isolating fails two chunks would send each other for ever: each
     * finds that it could merge, and takes the other's place in the index.
     */
    if (c->failed_in == pass_mark(s) && c->wait) {
        return;
    }
    if (s->n_ripe == RIPE_MAX) {
        chunk_want(r, chunk);
        s->again = true;
        return;
    }
    chunk_know(r, chunk);
    c->flags |= CHUNK_QUEUED;
    s->ripe[s->n_ripe++] = page_id(r, chunk * CHUNK_PAGES);
}

void scan_wake(KsmEngine *e, KsmChunk *c)
{
    if (c->wait && c->failed_in != pass_mark(&e->scan)) {
        c->wait = 0;
        /* what was refused waits, too, and only a look finds it again */
        c->flags |= CHUNK_VISIT | CHUNK_WOKEN;
    }
}

void scan_forget(KsmEngine *e, KsmRegion *r)
{
    KsmScan *s = &e->scan;
    unsigned kept = 0;
    size_t page;

    for (unsigned i = 0; i < s->n_ripe; i++) {
        if (directory_page(&e->dir, s->ripe[i], &page) != r) {
            s->ripe[kept++] = s->ripe[i];
        }
    }
    s->n_ripe = kept;
    if (s->region == r) {
        s->region = NULL;
        s->phase = PHASE_START;
    }
}

void scan_kick(KsmEngine *e)
{
    e->scan.due = 0;
    e->scan.idle_ns = 0;
    e->scan.settle = store_is_remote(e->content.store) ? SETTLE_REMOTE
                                                       : SETTLE_PASSES;
}

/* What the plan has made possible elsewhere. */
static void partners_queue(KsmEngine *e)
{
    for (unsigned i = 0; i < e->plan.n_partners; i++) {
        size_t chunk;
        KsmRegion *r = directory_chunk(&e->dir, e->plan.partner[i], &chunk);

        scan_wake(e, &r->chunk[chunk]);
        scan_queue(e, r, chunk);
    }
}

static unsigned plan_merge(KsmEngine *e, KsmRegion *r)
{
    bool loose = r->chunk[e->plan.chunk].flags & CHUNK_LOOSE;
    unsigned merged = merge_plan(&e->merge);

    for (unsigned i = 0; i < e->merge.n_collided; i++) {
        MergeCollided c = e->merge.collided[i];

        /* others had the lock since */
        if (page_state(r, c.page) == PAGE_EQUAL) {
            classify_collided(e, r, c.page, c.tag);
        }
    }
    if (loose && (merged || e->merge.broke)) {
        loose_merged(e, r, e->plan.chunk);
    } else {
        settle_kept(e, r, e->plan.chunk);
    }
    e->total.merged += merged;
    r->merged += merged;
    return merged;
}

/*
 * What only estimates speak against is tried again, before the next pass: that
 * may be a long time, and where many guests merge at once estimates are high.
 * Each time they are doubted more.
 */
static void plan_again(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];

    if (e->content.store->ripen_ns && e->plan.doubtful &&
        c->parked < RETRIES_MAX) {
        c->parked++;
        scan_wake(e, c);
        ripen_again(e, r, chunk);
    }
}

/* The chunk may be merged in the next pass, which is not to rest for long then. */
static void next_soon(KsmEngine *e, const KsmChunk *c)
{
    KsmScan *s = &e->scan;
    uint64_t now = prim.now_ns();

    promise_waits(&s->promise, c->gain - c->left);
    if (s->phase == PHASE_START &&
        promise_make(&s->promise, e->total.merged)) {
        s->due = MIN(s->due, MAX(s->started + pass_min_ns(e),
                                 now + IDLE_MIN_NS));
    }
}

/*
 * What is refused until it is late (parts.h) does not wait for passes that may be
 * far apart: it is refused once more when more may have come, and merged after the
 * next pass, which asks what was written meanwhile.
 */
static void plan_later(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];

    if (!e->content.store->ripen_ns || c->wait != 1 || !c->late ||
        c->late > LATE_MIN || c->why_not != KSM_REASON_NOT_WORTH) {
        return;
    }
    if (c->late < LATE_MIN) {
        c->wait = 0;
        ripen_add(e, r, chunk);
    } else {
        next_soon(e, c);
    }
}

/* Of one that is ripe.  False: there is nothing to carry out. */
static bool chunk_plan(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    bool made;

    if (!loose_ready(e, r, chunk)) {
        /*
         * If it is put off it is not called again in this pass.  A huge page that
         * was first hashed in it is merged in the next one.  Not so with later
         * looks: what is hot has them for ever.
         */
        if (loose_is_new(c) && !c->wait && c->failed_in != pass_mark(&e->scan)) {
            next_soon(e, c);
        }
        c->failed_in = pass_mark(&e->scan);
        return false;
    }
    made = plan_make(&e->plan, r, chunk);
    partners_queue(e);
    if (!made) {
        plan_again(e, r, chunk);
        plan_later(e, r, chunk);
    }
    return made;
}

/* A child is gone sooner than a device's pin. */
static unsigned backoff_max(const KsmRegion *r)
{
    return r->count[PAGE_PINNED] && !region_stays_home(r) ? BACKOFF_FORK
                                                          : BACKOFF_MAX;
}

/*
 * What others are asked about is merged when they have answered, which may be
 * after the pass: if that pays for what the rest is for it ends soon.  What has
 * only moved to another pool saves nothing.
 */
static void rest_shorten(KsmEngine *e)
{
    KsmScan *s = &e->scan;
    uint64_t soon = MAX(s->started + pass_min_ns(e),
                        prim.now_ns() + IDLE_MIN_NS);
    uint64_t worth = (e->total.merged - s->merged) * PAGE_WORTH_NS;

    if (s->settle || e->follow.phase == FOLLOW_MERGE || s->due <= soon ||
        worth <= s->cost) {
        return;
    }
    s->due = soon;
    /* it has paid, and not for the next pass too */
    s->merged = e->total.merged;
    rhythm_gains(&s->rhythm, worth);
}

static unsigned ripe_merge(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    uint64_t cpu = prim.cpu_ns();
    unsigned merged = 0;

    if (chunk_plan(e, r, chunk)) {
        merged = plan_merge(e, r);
        if (merged && e->merge.cut_short) {
            /* another plan is for the rest */
            c->wait = 0;
            scan_queue(e, r, chunk);
        } else {
            c->backoff = merged ? 0 : MIN(c->backoff + 1, backoff_max(r));
            c->failed_in = merged ? c->failed_in : pass_mark(&e->scan);
            c->tried = c->gain;
            c->wait = 1u << c->backoff;
            c->late = 0;
            c->flags &= ~CHUNK_WOKEN;
        }
    }
    e->total.merge_time += prim.cpu_ns() - cpu;
    return merged;
}

/* Merges the chunk if that pays. */
static void chunk_merge(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    unsigned merged = 0;

    if (plan_ripe(&e->plan, r, chunk)) {
        merged = ripe_merge(e, r, chunk);
    }
    c->yield = (c->yield * 3u + merged * 255u / CHUNK_PAGES) / 4;
    if (merged && e->scan.phase == PHASE_START) {
        rest_shorten(e);
    }
}

/* Not for long: zeroes are not to be in the hands of a peer that hangs. */
static bool starved_lately(const KsmEngine *e)
{
    return e->scan.starved && prim.now_ns() - e->scan.starved <
                              e->content.store->ripen_ns;
}

/* The store takes no more questions: what is hashed now is hashed again. */
static bool is_starved(KsmEngine *e)
{
    KsmScan *s = &e->scan;

    if (!store_is_remote(e->content.store) ||
        asks_have_room(&e->asks, CHUNK_PAGES)) {
        s->starved = 0;
    } else if (!s->starved) {
        s->starved = prim.now_ns();
    }
    return starved_lately(e);
}

/* It was looked at just now. */
static void visited_merge(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmVisit *v = &e->scan.visit;

    if (store_is_remote(e->content.store)) {
        ripen_add(e, r, chunk);
    } else {
        visit_mark(v, e->merge.fresh, true);
        chunk_merge(e, r, chunk);
        visit_mark(v, e->merge.fresh, false);
    }
}

static void chunk_visit(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    KsmChunk *c = &r->chunk[chunk];
    KsmVisit *v = &e->scan.visit;
    bool restored = false, again;

    if (is_starved(e)) {
        e->scan.again = e->scan.skipped = true;
        r->looked = false;
        return;
    }
    if (!visit_chunk(e, v, r, chunk)) {
        return;
    }
    /* others have the lock, and may change the chunk */
    again = !turn_give(&e->turn, r, chunk) ||
            !broken_look(e, r, chunk, v->kinds, &restored);
    if (restored) {
        /* the next pass merges that, and whatever was refused here before */
        scan_wake(e, c);
    }
    if (again) {
        c->flags |= CHUNK_VISIT;
        e->scan.again = true;
    } else if (v->empty && !c->held) {
        chunk_forget(r, chunk);
    } else if (!restored) {
        visited_merge(e, r, chunk);
    }
}

/*
 * While the region rests: finds, in page tables, pages that save nothing any
 * more: merged ones that were written, and zeroes that were given back.
 */
static void chunk_account(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    uint64_t cpu = prim.cpu_ns(), broken = r->cow_broken;
    uint64_t swapped = r->count[PAGE_SWAPPED];
    size_t page = chunk * CHUNK_PAGES;
    KsmVisit *v = &e->scan.visit;

    tail_rest(e, r, chunk);
    if (visit_ask(e, v, r, chunk)) {
        tail_look(e, r, chunk);
        for (unsigned i = 0; i < CHUNK_PAGES; i++, page++) {
            PageState s = page_state(r, page);

            if (s == PAGE_MERGED || s == PAGE_GIVEN) {
                visit_page(e, r, page, v->kinds[i]);
            }
        }
    }
    if (r->count[PAGE_SWAPPED] != swapped) {
        r->chunk[chunk].flags |= CHUNK_VISIT;   /* after the rest */
    }
    /* more will be: look again soon */
    e->scan.again |= r->cow_broken > broken;
    e->total.scan_time += prim.cpu_ns() - cpu;
}

/* Queues one that is ripe now; false: none was to be looked at. */
static bool ripened(KsmEngine *e)
{
    KsmRegion *r;
    size_t chunk;

    if (!ripen_take(e, &r, &chunk)) {
        return false;
    }
    if (r) {
        scan_queue(e, r, chunk);
    }
    return true;
}

bool scan_ripe(KsmEngine *e)
{
    KsmScan *s = &e->scan;
    size_t page;
    KsmRegion *r;

    if (!s->n_ripe && !ripened(e)) {
        return false;
    }
    if (!s->n_ripe) {
        return true;
    }
    r = directory_page(&e->dir, s->ripe[--s->n_ripe], &page);
    r->chunk[page / CHUNK_PAGES].flags &= ~CHUNK_QUEUED;
    if (region_inhibited(r)) {
        r->chunk[page / CHUNK_PAGES].flags |= CHUNK_VISIT;
    } else {
        chunk_merge(e, r, page / CHUNK_PAGES);
    }
    if (!r->chunk[page / CHUNK_PAGES].held &&
        !chunk_is_bare(r, page / CHUNK_PAGES)) {
        /* it was not to be forgotten while it was queued */
        r->chunk[page / CHUNK_PAGES].flags |= CHUNK_VISIT;
    }
    return true;
}

/* The region after @r that this phase is about; NULL: none. */
static KsmRegion *region_next(KsmEngine *e, KsmRegion *r)
{
    guint i = 0;

    if (r) {
        g_ptr_array_find(e->regions, r, &i);
        i++;
    }
    for (; i < e->regions->len; i++) {
        KsmRegion *next = g_ptr_array_index(e->regions, i);

        if (!next->rests || e->scan.phase == PHASE_REST) {
            return next;
        }
    }
    return NULL;
}

/* Is the region to be merged in this pass? */
static void region_start(KsmEngine *e, KsmRegion *r)
{
    r->rests = region_inhibited(r) || !e->run;
    r->looked = !r->rests;
    r->pause_at = r->inhibited ? region_first(r) : region_end(r);
    if (!r->rests) {
        dirty_resume(&e->dirty, r);
    }
}

static void pass_start(KsmEngine *e)
{
    KsmScan *s = &e->scan;
    uint64_t now = prim.now_ns();

    s->pass++;
    dirty_pass(&e->dirty, now - s->started);
    rhythm_begin(&s->rhythm, s->pass, now);
    s->started = now;
    s->active = false;
    s->scan_time = e->total.scan_time;
    s->hash_time = 0;
    s->restored = s->stirred = false;
    promise_begin(&s->promise);
    s->again = s->skipped = s->in_vain = false;
    s->visited = 0;
    e->tail.waiting = 0;
    e->tail.unworthy = e->tail.unworthy_now;
    e->tail.unworthy_now = 0;
    cut_pass(&e->cut);
    for (guint i = 0; i < e->regions->len; i++) {
        region_start(e, g_ptr_array_index(e->regions, i));
    }
    s->phase = PHASE_SYNC;
    s->region = region_next(e, NULL);
    s->chunk = 0;
}

/* How long to be idle after a pass; 0: it was worth its while. */
static uint64_t pass_rest(KsmEngine *e)
{
    KsmScan *s = &e->scan;
    PassYield yield = {
        .cost = e->total.scan_time - s->scan_time,
        .hash = s->hash_time,
        .worth = (e->total.merged - s->merged) * PAGE_WORTH_NS,
        .go_on = s->restored,
        .late = e->content.store->ripen_ns > 0,
        .stirred = s->stirred,
    };
    uint64_t idle = MIN(MAX(s->idle_ns * 2, IDLE_MIN_NS),
                        s->active || s->again ? IDLE_SOON_NS : IDLE_MAX_NS);
    uint64_t now = prim.now_ns(), rest;

    s->cost = s->rhythm.owed + yield.cost;
    s->took = 0;
    promise_judge(&s->promise, e->total.merged, yield.cost - yield.hash, now,
                  e->content.store->ripen_ns);
    yield.go_on |= promise_make(&s->promise, e->total.merged);
    if (s->settle || (s->skipped && !s->in_vain) || starved_lately(e)) {
        return 0;       /* nor is it owed */
    }
    s->took = yield.cost - yield.hash;
    yield.hurry = tail_waits(e);
    rest = rhythm_end(&s->rhythm, &yield);
    if (!rest) {
        return 0;
    }
    tail_rests(e, yield.hurry);
    /* the kernel is to have it soon: it is quiet for so long by then */
    return MAX(yield.hurry ? MIN(idle, IDLE_SOON_NS) : idle, rest);
}

/*
 * Room in the index for all that is populated: while it is empty that costs
 * nothing, and later it is moved.
 */
static void index_make_room(KsmEngine *e)
{
    size_t held = 0;

    for (guint i = 0; i < e->regions->len; i++) {
        held += region_expected(g_ptr_array_index(e->regions, i));
    }
    if (!engine_zero_only(e)) {
        index_fit(&e->content.index, held);
    }
}

/* What was populated is known now. */
static void regions_seen(KsmEngine *e)
{
    for (guint i = 0; i < e->regions->len; i++) {
        KsmRegion *r = g_ptr_array_index(e->regions, i);

        r->seen |= r->looked;
    }
    index_make_room(e);
}

static void pass_end(KsmEngine *e)
{
    KsmScan *s = &e->scan;

    e->total.full_scans++;
    regions_seen(e);
    s->phase = PHASE_START;
    /* a pass that could not ask about all is not one of those to wait for */
    s->settle -= s->settle && (!s->skipped || s->in_vain);
    asks_send(&e->asks);
    s->again |= asks_awaited(&e->asks);
    s->idle_ns = pass_rest(e);
    /* what is merged from now on, also between passes, is for the next one */
    s->merged = e->total.merged;
    s->due = MAX(s->started + pass_min_ns(e),
                 prim.now_ns() + s->idle_ns);
    if (s->settle && store_is_remote(e->content.store) && !starved_lately(e)) {
        s->due = MAX(s->due, s->started + SETTLE_NS);
    }
    tail_tell(e);
    store_pass(e->content.store);
    if (store_stats(e->content.store).leaked) {
        /* if it fails, less is merged */
        content_reserve_store(&e->content, directory_pages(&e->dir));
    }
}

/* Once a pass for each chunk of a piece. */
static void waits_count(KsmEngine *e, size_t chunk, size_t end)
{
    const KsmScan *s = &e->scan;
    KsmRegion *r = s->region;

    REGION_FOREACH_KNOWN(r, i, chunk, end) {
        KsmChunk *c = &r->chunk[i];

        c->parked = 0;
        if (c->failed_in != pass_mark(s)) {
            c->failed_in = 0;   /* marks come again */
        }
        if (c->wait && --c->wait == 0) {
            c->flags |= CHUNK_VISIT;
        }
        if (c->away_wait && --c->away_wait == 0) {
            c->flags |= CHUNK_VISIT;
        }
        loose_pass(e, r, i);
    }
}

static void step_sync(KsmEngine *e)
{
    KsmScan *s = &e->scan;
    uint64_t cpu = prim.cpu_ns();
    size_t end = dirty_sync(&e->dirty, s->region, s->chunk, s->rhythm.check);

    s->again |= e->dirty.again;
    e->dirty.again = false;
    waits_count(e, s->chunk, end);
    renew_pass(e, s->region, s->chunk, end);
    tail_pass(e, s->region, s->chunk, end);
    cpu = prim.cpu_ns() - cpu;
    dirty_took(&e->dirty, end - s->chunk, cpu);
    s->chunk = end;
    e->total.scan_time += cpu;
}

static bool chunk_in_phase(const KsmChunk *c, ScanPhase phase)
{
    bool good = c->yield > 0 || !(c->flags & CHUNK_SEEN);

    return (c->flags & CHUNK_VISIT) && (phase == PHASE_REST || good);
}

/* Passed over by turns: no pass looks at all of them. */
static bool chunk_has_books(const KsmScan *s, const KsmChunk *c)
{
    if ((c->flags & CHUNK_TAIL) && !c->kernel) {
        return true;
    }
    return (c->mapped > c->broken || c->given || c->kernel) &&
           (s->chunk + s->pass) % CHECK_PASSES == 0;
}

/* The next chunk of which something is known, where the cursor is then. */
static size_t chunk_next(KsmScan *s)
{
    s->chunk = region_known(s->region, s->chunk, s->region->n_chunks);
    return s->chunk;
}

/* A piece of it; what fails is tried again in the next pass. */
static void region_pause(KsmEngine *e, KsmRegion *r)
{
    uint64_t cpu = prim.cpu_ns();

    if (dirty_pause(&e->dirty, r, &r->pause_at) < 0) {
        r->pause_at = region_end(r);
    }
    e->total.scan_time += prim.cpu_ns() - cpu;
}

/* A region that rests. */
static void step_account(KsmEngine *e)
{
    KsmScan *s = &e->scan;
    KsmRegion *r = s->region;
    size_t from = s->chunk;

    r->looked = false;
    if (r->pause_at < region_end(r)) {
        region_pause(e, r);
        return;
    }
    for (unsigned i = 0; i < SKIP_STEP; i++) {
        size_t chunk = chunk_next(s);

        if (chunk == r->n_chunks) {
            break;
        }
        s->chunk = chunk + 1;
        if (chunk_has_books(s, &r->chunk[chunk])) {
            chunk_account(e, r, chunk);
            break;
        }
    }
    s->visited += s->chunk - from;
}

static void step_visit(KsmEngine *e)
{
    KsmScan *s = &e->scan;
    KsmRegion *r = s->region;
    size_t from = s->chunk;

    for (unsigned i = 0; i < SKIP_STEP; i++) {
        size_t chunk = chunk_next(s);

        if (chunk == r->n_chunks) {
            break;
        }
        s->chunk = chunk + 1;
        if (chunk_in_phase(&r->chunk[chunk], s->phase) &&
            r->chunk[chunk].visited_in != pass_mark(s)) {
            r->chunk[chunk].visited_in = pass_mark(s);
            if (region_inhibited(r)) {
                r->looked = false;
            } else {
                chunk_visit(e, r, chunk);
            }
            break;
        }
    }
    s->visited += s->phase == PHASE_REST ? s->chunk - from : 0;
}

/* At the end of a region: go on to the next, or phase. */
static bool cursor_advance(KsmEngine *e)
{
    KsmScan *s = &e->scan;

    s->region = s->region ? region_next(e, s->region) : NULL;
    s->chunk = 0;
    if (s->region) {
        return true;
    }
    if (s->phase == PHASE_REST) {
        pass_end(e);
        return false;
    }
    if (s->phase == PHASE_SYNC) {
        /* huge pages, and with a log all, are hashed when they are found */
        index_make_room(e);
    }
    s->phase++;
    s->region = region_next(e, NULL);
    return true;
}

bool scan_has_books(const KsmEngine *e)
{
    for (guint i = 0; i < e->regions->len; i++) {
        const KsmRegion *r = g_ptr_array_index(e->regions, i);

        if (r->count[PAGE_MERGED]) {
            return true;
        }
    }
    return asks_hold_any(&e->asks) || store_stats(e->content.store).pending ||
           e->tail.chunks;
}

bool scan_step(KsmEngine *e)
{
    KsmScan *s = &e->scan;

    if (e->run && discard_settle(e)) {
        return true;
    }
    if (e->run && scan_ripe(e)) {
        return true;
    }
    if (s->phase == PHASE_START) {
        pass_start(e);
        return true;
    }
    if (!s->region || s->chunk >= s->region->n_chunks) {
        return cursor_advance(e);
    }
    if (s->region->rests || !e->run) {
        step_account(e);
    } else if (s->phase == PHASE_SYNC) {
        step_sync(e);
    } else {
        step_visit(e);
    }
    return true;
}
