/*
 * merge: carrying a plan out
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "merge/kin.h"
#include "merge/mapping.h"
#include "merge/merge.h"
#include "merge/parts.h"

typedef struct Span {
    Isolation iso;
    size_t page;            /* the first one, in the region */
    bool given[CHUNK_PAGES];        /* back before, and still zeroes */
    uint8_t act[CHUNK_PAGES];       /* planned; then done */
    uint32_t slot[CHUNK_PAGES];     /* COLLIDED: the new tag */
    KsmChore warm;
} Span;

static void span_start(Span *s, const KsmPlan *p, PlanSpan part)
{
    KsmRegion *r = p->region;
    const KsmChunk *c = &r->chunk[p->chunk];

    s->page = p->chunk * CHUNK_PAGES + part.first;
    s->iso = (Isolation) {
        .home = page_addr(r, s->page),
        .n = part.n,
        .huge = part.n == CHUNK_PAGES && (c->flags & CHUNK_HUGE),
        .tracked = r->tracking,
        .ops = r->ops,
        .opaque = r->opaque,
        .why = c->why_not,
    };
    for (unsigned i = 0; i < part.n; i++) {
        PageState state = page_state(r, s->page + i);

        s->given[i] = state == PAGE_GIVEN;
        s->iso.hole[i] = state == PAGE_GIVEN || state == PAGE_HOLE;
    }
    memcpy(s->act, p->act + part.first, part.n * sizeof(*s->act));
    memcpy(s->slot, p->slot + part.first, part.n * sizeof(*s->slot));
}

/* These pages are kept. */
static void refuse(Span *s, unsigned i, unsigned n, KsmReason why)
{
    s->iso.why = why;
    memset(s->act + i, ACT_KEEP, n);
}

/* Pages from @i on that fill neighbouring slots. */
static unsigned fill_run(const Span *s, unsigned i)
{
    unsigned n = 0;

    while (i + n < s->iso.n && s->act[i + n] == ACT_FILL &&
           s->slot[i + n] == s->slot[i] + n) {
        n++;
    }
    return n;
}

/* Before the span is isolated: no guest waits for the kernel to find memory. */
static void allocate_slots(KsmMerge *m, Span *s)
{
    KsmStore *st = m->content->store;
    unsigned n;

    for (unsigned i = 0; i < s->iso.n; i += MAX(n, 1)) {
        n = fill_run(s, i);
        if (n && store_allocate(st, s->slot[i], n) < 0) {
            refuse(s, i, n, KSM_REASON_NO_MEMORY);
        }
    }
}

static bool act_joined(const Span *s, unsigned i)
{
    return s->act[i] == ACT_MAP && s->act[i + 1] == ACT_MAP &&
           s->slot[i] + 1 == s->slot[i + 1];
}

/* Pages from @i on that map consecutive slots; 0: it maps none. */
static unsigned joined_run(const Span *s, unsigned i)
{
    unsigned n = s->act[i] == ACT_MAP;

    while (n && i + n < s->iso.n && act_joined(s, i + n - 1)) {
        n++;
    }
    return n;
}

/*
 * Before the span is isolated, too: what has not been read here the kernel first
 * has to map, or to read from swap.  Pages of slots that cannot be read are kept.
 */
static void slots_look(KsmMerge *m, Span *s)
{
    KsmStore *st = m->content->store;
    unsigned n;

    for (unsigned i = 0; i < s->iso.n; i += MAX(n, 1)) {
        n = joined_run(s, i);
        if (!n || store_readable(st, s->slot[i], n) == 0) {
            continue;
        }
        for (unsigned k = i; k < i + n; k++) {
            int ret = store_readable(st, s->slot[k], 1);

            if (ret == -EFAULT) {
                /* the kernel tells its users, when they touch it */
                content_withdraw_slot(m->content, s->slot[k]);
            }
            if (ret < 0) {
                refuse(s, k, 1, s->iso.why);
            }
        }
    }
}

static bool span_has_work(const Span *s)
{
    for (unsigned i = 0; i < s->iso.n; i++) {
        if (s->act[i] != ACT_KEEP) {
            return true;
        }
    }
    return false;
}

/* What isolation, or putting back, made of the pages. */
static void acts_follow(Span *s)
{
    static const uint8_t act[] = {
        [FATE_BACK] = ACT_KEEP,
        [FATE_STAY] = ACT_STAY,
        [FATE_PINNED] = ACT_PINNED,
        [FATE_HOLE] = ACT_HOLE,
        [FATE_POISONED] = ACT_POISONED,
        [FATE_BARRED] = ACT_BARRED,
        [FATE_DISPLACED] = ACT_DISPLACED,
    };

    for (unsigned i = 0; i < s->iso.n; i++) {
        if (s->iso.fate[i] != FATE_STAGED) {
            s->act[i] = act[s->iso.fate[i]];
        }
    }
}

static const char *page_staged(const Span *s, unsigned i)
{
    return s->iso.staged + i * PAGE_BYTES;
}

/* Is it what the slot is found for? */
static bool content_fits(const KsmMerge *m, const char *page, uint32_t slot)
{
    return content_tag_fits(m->plan->region, store_tag(m->content->store, slot),
                            hash_page(m->hasher, page));
}

/* The page cannot fill its slot: another that was to map it does, or none. */
static void fill_pass(KsmMerge *m, Span *s, unsigned i)
{
    uint32_t slot = s->slot[i];

    s->act[i] = ACT_CHANGED;
    for (unsigned k = i + 1; k < s->iso.n; k++) {
        if (s->act[k] == ACT_MAP && s->slot[k] == slot &&
            content_fits(m, page_staged(s, k), slot)) {
            s->act[k] = ACT_FILL;
            return;
        }
    }
    content_withdraw(m->content, slot, store_tag(m->content->store, slot));
}

/*
 * What was written since it was hashed fills no slot: by its tag others would
 * look for another content there, and who has its own would not find it.  Not
 * asked of what was hashed in this step: that is too rare to pay for a second
 * hash, also if others had the lock since, and whoever is compared with such a
 * slot ends it (content_doubt()).
 */
static void fill_check(KsmMerge *m, Span *s)
{
    for (unsigned i = 0; i < s->iso.n; i++) {
        if (s->act[i] != ACT_FILL || m->fresh[s->page % CHUNK_PAGES + i]) {
            continue;
        }
        if (i + 1 < s->iso.n && s->act[i + 1] == ACT_FILL) {
            page_prefetch(page_staged(s, i + 1));
        }
        if (!content_fits(m, page_staged(s, i), s->slot[i])) {
            fill_pass(m, s, i);
        }
    }
}

/* Copies staged pages to their slots: needs no comparison, see merge.h, 1. */
static void fill_slots(KsmMerge *m, Span *s)
{
    KsmStore *st = m->content->store;
    unsigned n;

    for (unsigned i = 0; i < s->iso.n; i += MAX(n, 1)) {
        n = fill_run(s, i);
        if (n && store_fill(st, s->slot[i], page_staged(s, i), n) < 0) {
            refuse(s, i, n, KSM_REASON_NO_MEMORY);
        }
    }
}

/* One that is not is asked about once in a plan, however many are to map it. */
static bool slot_is_sound(KsmMerge *m, uint32_t slot)
{
    if (slot == m->unsound) {
        return false;
    }
    if (content_doubt(m->content, m->hasher, m->plan->region, slot)) {
        return true;
    }
    m->unsound = slot;
    return false;
}

/* A staged page is not what its slot holds: did it change? */
static void page_differs(KsmMerge *m, Span *s, unsigned i)
{
    const KsmRegion *r = m->plan->region;
    bool sound = slot_is_sound(m, s->slot[i]);
    uint64_t hash = hash_page(m->hasher, page_staged(s, i));

    if (sound && content_tag_fits(r, r->tag[s->page + i], hash)) {
        s->act[i] = ACT_COLLIDED;
        s->slot[i] = content_tag_again(r, hash);
    } else {
        s->act[i] = ACT_CHANGED;
    }
}

/* Compares staged pages with what they shall become; returns how many stand. */
static unsigned verify(KsmMerge *m, Span *s)
{
    KsmStore *st = m->content->store;
    unsigned good = 0;

    for (unsigned i = 0; i < s->iso.n; i++) {
        const char *page = page_staged(s, i);

        if (s->act[i] == ACT_FILL) {
            s->act[i] = ACT_MAP;
            good++;
        } else if (s->act[i] == ACT_ZERO) {
            bool zero = bytes_are_zero(page, PAGE_BYTES);

            s->act[i] = zero ? ACT_ZERO : ACT_CHANGED;
            good += zero;
        } else if (s->act[i] == ACT_MAP) {
            if (i + 1 < s->iso.n && act_joined(s, i)) {
                __builtin_prefetch(page + PAGE_BYTES);
                __builtin_prefetch(store_page(st, s->slot[i + 1]));
            }
            if (!memcmp(page, store_page(st, s->slot[i]), PAGE_BYTES)) {
                good++;
            } else {
                page_differs(m, s, i);
            }
        }
    }
    return good;
}

/* Maps the pool over a run.  False: the range is still as it was. */
static bool map_run(KsmMerge *m, const Span *s, unsigned i, unsigned n)
{
    return mapping_make(m->content->store, m->vmas, m->plan->region,
                        s->iso.home + i * PAGE_BYTES, s->slot[i], n);
}

/*
 * Of a page that will be mapped: it is staged, and its home is empty.  The next
 * one was moved by the same call, so both were in one mapping (kin.h).
 */
static void kin_look(KsmMerge *m, const Span *s)
{
    KsmRegion *r = m->plan->region;

    for (unsigned i = 0; i + 1 < s->iso.n && !s->iso.failed; i++) {
        if (s->act[i] == ACT_MAP && s->act[i + 1] == ACT_MAP) {
            if (kin_wanted(r, s->page + i) &&
                stage_is_home(m->stage, &s->iso, i)) {
                kin_take(r, s->page + i);
            }
            return;
        }
    }
}

/* Maps all runs; those that fail are kept. */
static void map_runs(KsmMerge *m, Span *s)
{
    unsigned runs = 0, n;

    isolation_lap(&s->iso);     /* what was compared is not a run's */
    for (unsigned i = 0; i < s->iso.n; i += MAX(n, 1)) {
        n = joined_run(s, i);
        if (n && map_run(m, s, i, n)) {
            runs++;
        } else if (n) {
            vmas_recount(m->vmas);
            refuse(s, i, n, KSM_REASON_VMA_LIMIT);
        }
    }
    s->iso.spent.map_ns = isolation_lap(&s->iso);
    s->iso.spent.runs = runs;
}

static bool act_goes_back(PlanAct act)
{
    return act == ACT_KEEP || act == ACT_CHANGED || act == ACT_COLLIDED;
}

static void refuse_all(Span *s, PlanAct act)
{
    for (unsigned i = 0; i < s->iso.n; i++) {
        if (s->act[i] == ACT_ZERO || s->act[i] == ACT_MAP ||
            s->act[i] == ACT_FILL) {
            s->act[i] = act;
        }
    }
}

static void put_back_rest(KsmMerge *m, Span *s)
{
    StageRun run[CHUNK_PAGES / 2];
    unsigned n_runs = 0, n;

    for (unsigned i = 0; i < s->iso.n; i += MAX(n, 1)) {
        n = 0;
        while (i + n < s->iso.n && act_goes_back(s->act[i + n])) {
            n++;
        }
        if (n) {
            run[n_runs++] = (StageRun) { i, n };
        }
    }
    stage_keep(m->stage, &s->iso, run, n_runs);
}

static bool has_zeroes(const Span *s)
{
    return memchr(s->act, ACT_ZERO, s->iso.n);
}

/* After isolation: replace, or undo. */
static void span_replace(KsmMerge *m, Span *s)
{
    bool good = false;

    if (s->iso.kinds_known && !s->iso.busy) {
        fill_check(m, s);
        fill_slots(m, s);
        good = verify(m, s);
        s->iso.gaps = has_zeroes(s);
    } else {
        refuse_all(s, s->iso.busy ? ACT_PINNED : ACT_KEEP);
    }
    if (good) {
        kin_look(m, s);
        map_runs(m, s);
        put_back_rest(m, s);
    } else {
        stage_put_back(m->stage, &s->iso, 0, s->iso.n);
        isolation_lap(&s->iso);
    }
}

/* What was put back is known to be where it was; somebody has not mapped over. */
static void span_attributes(const KsmMerge *m, Span *s)
{
    bool mapped[CHUNK_PAGES], kept[CHUNK_PAGES];
    uint64_t t = prim.cpu_ns();

    for (unsigned i = 0; i < s->iso.n; i++) {
        mapped[i] = s->act[i] == ACT_MAP;
        kept[i] = act_goes_back(s->act[i]) &&
                  (s->iso.fate[i] == FATE_STAGED || s->iso.fate[i] == FATE_BACK);
    }
    mapping_attributes(m->plan->region, s->iso.home, mapped, kept, s->iso.n);
    s->iso.spent.map_ns += prim.cpu_ns() - t;
}

static void runs_touch(void *opaque)
{
    const Span *s = opaque;
    unsigned n;

    for (unsigned i = 0; i < s->iso.n; i += MAX(n, 1)) {
        n = joined_run(s, i);
        if (n) {
            mapping_touch(s->iso.home + i * PAGE_BYTES, n * PAGE_BYTES);
        }
    }
}

/* Others' page tables of mapped runs, by the op. */
static void span_prefault(const Span *s)
{
    unsigned n;

    for (unsigned i = 0; i < s->iso.n; i += MAX(n, 1)) {
        n = joined_run(s, i);
        if (n) {
            mapping_prefault(s->iso.ops, s->iso.opaque,
                             s->iso.home + i * PAGE_BYTES, n * PAGE_BYTES);
        }
    }
}

static bool span_maps(const Span *s)
{
    return memchr(s->act, ACT_MAP, s->iso.n);
}

static void span_warm(Span *s)
{
    if (span_maps(s)) {
        runs_touch(s);
        span_prefault(s);
    }
}

/*
 * For ours a helper may see while the next span is prepared; not longer: while
 * that one is isolated nobody else is to be at these page tables.
 */
static void span_warm_begin(KsmMerge *m, Span *s)
{
    s->warm = (KsmChore) { .work = runs_touch, .opaque = s };
    if (span_maps(s)) {
        crew_give(m->stage->crew, &s->warm);
    }
}

static void span_warm_end(KsmMerge *m, Span *s)
{
    crew_wait(m->stage->crew, &s->warm);
    if (span_maps(s)) {
        span_prefault(s);
    }
}

static void span_track(KsmMerge *m, Span *s)
{
    unsigned n;

    for (unsigned i = 0; i < s->iso.n; i += n) {
        bool own = s->act[i] != ACT_MAP;

        n = 1;
        while (i + n < s->iso.n && (s->act[i + n] != ACT_MAP) == own) {
            n++;
        }
        if (own) {
            dirty_track(m->dirty, m->plan->region,
                        s->iso.home + i * PAGE_BYTES, n * PAGE_BYTES);
        }
    }
}

/* A huge page that goes back as it was is whole again. */
static bool span_is_whole(const Span *s)
{
    for (unsigned i = 0; i < s->iso.n; i++) {
        if (s->act[i] == ACT_MAP || s->act[i] == ACT_ZERO) {
            return false;
        }
    }
    return s->iso.huge;
}

/* A page's state from now on; PAGE_STATES: as it was. */
static PageState state_after(const Span *s, unsigned i)
{
    switch ((PlanAct)s->act[i]) {
    case ACT_MAP:
        return PAGE_MERGED;
    case ACT_ZERO:
        return PAGE_GIVEN;
    case ACT_CHANGED:
    case ACT_DISPLACED:
        return PAGE_NEW;
    case ACT_PINNED:
        return s->iso.busy ? PAGE_BUSY : PAGE_PINNED;
    case ACT_HOLE:
        return s->given[i] ? PAGE_STATES : PAGE_HOLE;
    case ACT_POISONED:
        return PAGE_SWAPPED;
    case ACT_BARRED:
        return PAGE_BARRED;
    default:
        return PAGE_STATES;
    }
}

static void pages_account(KsmMerge *m, const Span *s, unsigned *count)
{
    KsmRegion *r = m->plan->region;

    for (unsigned i = 0; i < s->iso.n; i++) {
        PlanAct act = s->act[i];
        size_t page = s->page + i;
        PageState to = state_after(s, i);

        if (to != PAGE_STATES) {
            content_leave(m->content, r, page, to);
        }
        if (to == PAGE_NEW) {
            page_mark(r, page, true);
        }
        if (act == ACT_MAP) {
            g_assert(s->iso.any);
            r->tag[page] = s->slot[i];
            r->history[page] = 0;
        } else if (act == ACT_COLLIDED) {
            m->collided[m->n_collided++] =
                (MergeCollided) { page, s->slot[i] };
        }
        count[act]++;
    }
}

/*
 * Those put back as they were, which now look written.  Not beside a device:
 * what it writes past the page tables would not be told again.
 */
static void kept_note(KsmMerge *m, const Span *s)
{
    for (unsigned i = 0; i < s->iso.n; i++) {
        Fate fate = s->iso.fate[i];

        m->kept[s->page % CHUNK_PAGES + i] =
            (s->act[i] == ACT_KEEP || s->act[i] == ACT_COLLIDED) &&
            s->iso.any && !s->iso.busy && !span_is_whole(s) &&
            (fate == FATE_STAGED || fate == FATE_BACK);
    }
}

static unsigned span_account(KsmMerge *m, const Span *s)
{
    unsigned count[PLAN_ACTS] = { 0 }, failed, merged;
    KsmRegion *r = m->plan->region;
    KsmChunk *c = &r->chunk[m->plan->chunk];

    if (s->iso.spent.n) {
        kept_note(m, s);
    }
    pages_account(m, s, count);
    chunk_set_reason(r, c, s->iso.why);
    failed = count[ACT_CHANGED] + count[ACT_COLLIDED];
    m->verify_failed += failed;
    r->verify_failed += failed;
    if (s->iso.busy) {
        m->busy++;
        r->busy++;
    } else if (count[ACT_PINNED]) {
        m->pinned++;
        r->pinned++;
    }
    merged = count[ACT_MAP] + count[ACT_ZERO];
    if (merged) {
        c->flags &= ~CHUNK_HUGE;
    }
    return merged;
}

/* @before: the span before it, which is warm then; or NULL. */
static unsigned span_merge(KsmMerge *m, Span *s, Span *before)
{
    if (before) {
        span_warm_begin(m, before);
    }
    allocate_slots(m, s);
    slots_look(m, s);
    if (before) {
        span_warm_end(m, before);
    }
    if (span_has_work(s)) {
        bool moved = stage_isolate(m->stage, &s->iso);

        acts_follow(s);
        if (moved) {
            span_replace(m, s);
        }
        stage_release(m->stage, &s->iso);
        stalls_add(&m->stalls, s->iso.spent.stall_ns);
        m->isolations++;
        acts_follow(s);
        span_attributes(m, s);
        costs_span(m->costs, &s->iso.spent);
        if (s->iso.untracked) {
            span_track(m, s);
        }
    }
    plan_done(m->plan, s->page % CHUNK_PAGES, s->iso.n, s->act);
    return span_account(m, s);
}

/*
 * Since Linux 6.12 the kernel gives zeroes back itself when it breaks a huge
 * page (try_to_map_unused_to_zeropage()).  They are not moved: the zero page
 * costs a shootdown each time.  Returns how many.
 */
static unsigned zeroes_given(KsmMerge *m, const uint8_t *kinds)
{
    KsmPlan *p = m->plan;
    unsigned given = 0;

    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        if (p->act[i] == ACT_ZERO && (kinds[i] & PM_ZEROPFN)) {
            plan_drop(p, i, ACT_KEEP);
            content_leave(m->content, p->region, p->chunk * CHUNK_PAGES + i,
                          PAGE_GIVEN);
            given++;
        }
    }
    return given;
}

/*
 * Of a huge page that was not watched what is not moved is known all the same,
 * if it is found so from now on.  What cannot be read at once is not looked at.
 */
static void rest_note(KsmMerge *m, const uint8_t *kinds)
{
    KsmRegion *r = m->plan->region;
    size_t chunk = m->plan->chunk;

    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        m->kept[i] = (r->chunk[chunk].flags & CHUNK_LOOSE) &&
                     (kinds[i] & (PM_PRESENT | PM_ZEROPFN)) == PM_PRESENT;
    }
}

/*
 * Who touches the huge page meanwhile waits: migration entries stand for its
 * pages.  Returns ns.
 */
static uint64_t huge_break(KsmMerge *m, char *at)
{
    uint64_t t;

    urgent_begin(m->stage->urgent);
    t = prim.now_ns();
    prim.advise(at, PAGE_BYTES, MADV_COLD);
    t = prim.now_ns() - t;
    /* whose turn it was meanwhile comes now, and nobody waits for us */
    urgent_end(m->stage->urgent);
    return t;
}

static void rest_drop(KsmPlan *p)
{
    p->n_spans = 0;
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        plan_drop(p, i, ACT_KEEP);
    }
}

/* It cannot be broken: it is moved whole, if that pays. */
static void break_refused(KsmPlan *p)
{
    parts_whole(p);
    if (!parts_pay(p, p->costs)) {
        costs_doubt(p->costs);
        rest_drop(p);
    }
}

/*
 * A huge page of which parts are to be moved is broken before the first of them
 * is isolated: MADV_COLD for a part of it does that.  Not if it is busy, pinned
 * or locked, or nobody can tell: then it is moved whole, or not at all.  Returns
 * how many pages that has saved.
 */
static unsigned chunk_break(KsmMerge *m)
{
    KsmPlan *p = m->plan;
    KsmRegion *r = p->region;
    size_t page = p->chunk * CHUNK_PAGES;
    uint8_t kinds[CHUNK_PAGES];
    uint64_t ns;

    if (region_busy(r, page_addr(r, page), CHUNK_BYTES)) {
        break_refused(p);
        return 0;
    }
    ns = huge_break(m, page_addr(r, page + p->span[0].first));
    if (kinds_ask(m->stage->kinds, page_addr(r, page), CHUNK_PAGES, KINDS_FAST,
                  kinds) < 0 || (kinds[0] & PM_HUGE)) {
        break_refused(p);
        return 0;
    }
    m->broke = true;
    stalls_add(&m->stalls, ns);
    m->stage->huge_split++;
    r->chunk[p->chunk].flags &= ~CHUNK_HUGE;
    rest_note(m, kinds);
    return zeroes_given(m, kinds);
}

/* Others see how things stand, too. */
static void runs_count(const KsmPlan *p)
{
    region_count_runs(p->region, p->chunk);
    if (p->chunk + 1 < p->region->n_chunks) {
        region_count_runs(p->region, p->chunk + 1);
    }
}

/* Others have the lock.  False: the rest of the plan is dropped, by their doing. */
static bool goes_on(KsmMerge *m)
{
    KsmPlan *p = m->plan;

    m->cut_short = !turn_give(m->turn, p->region, p->chunk);
    if (m->cut_short) {
        rest_drop(p);
    }
    return !m->cut_short;
}

unsigned merge_plan(KsmMerge *m)
{
    KsmPlan *p = m->plan;
    unsigned merged = 0;
    sigset_t old;
    Span span[2], *s = &span[0], *before = NULL;

    m->n_collided = 0;
    m->unsound = SLOT_NONE;
    m->broke = m->cut_short = false;
    memset(m->kept, 0, sizeof(m->kept));
    if (p->breaks) {
        merged = chunk_break(m);
    }
    prim.signals_block(&old);
    for (unsigned i = 0; i < p->n_spans && (!i || goes_on(m)); i++) {
        span_start(s, p, p->span[i]);
        merged += span_merge(m, s, before);
        runs_count(p);
        before = s;
        s = &span[(i + 1) % 2];
    }
    /* the next chunk waits for that: first of all, and not behind page tables */
    stage_empty(m->stage);
    if (before && !m->cut_short) {
        span_warm(before);
    }
    prim.signals_restore(&old);
    store_ahead(m->content->store);
    return merged;
}
