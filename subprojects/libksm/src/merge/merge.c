/*
 * merge: carrying a plan out
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "base/tsan.h"
#include "memory/attr.h"
#include "merge/merge.h"

#define FAULT_AROUND    (16 * PAGE_BYTES)   /* the kernel's default */

/* The first page of the span in the plan. */
static unsigned span_at(const Isolation *s)
{
    return s->page % CHUNK_PAGES;
}

/* What isolation, or putting back, made of the pages. */
static void acts_follow(KsmMerge *m, const Isolation *s)
{
    KsmPlan *p = m->plan;

    for (unsigned i = 0; i < s->n; i++) {
        unsigned at = span_at(s) + i;

        switch ((Fate)s->fate[i]) {
        case FATE_STAGED:
            break;
        case FATE_BACK:
            if (p->act[at] != ACT_KEEP) {
                plan_drop(p, at, ACT_KEEP);
            }
            break;
        case FATE_STAY:
            plan_drop(p, at, ACT_STAY);
            break;
        case FATE_PINNED:
            plan_drop(p, at, ACT_PINNED);
            break;
        case FATE_HOLE:
            plan_drop(p, at, ACT_HOLE);
            break;
        }
    }
}

/* Maps the pool over a run.  False: the range is still as it was. */
static bool map_run(KsmMerge *m, Isolation *s, unsigned i, unsigned n)
{
    void *addr = page_addr(s->r, s->page + i);
    size_t len = n * PAGE_BYTES;
    off_t offset = (off_t)m->plan->slot[span_at(s) + i] * PAGE_BYTES;

    for (unsigned tries = 0; ; tries++) {
        if (prim.map(addr, len, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_FIXED | s->r->map_flags,
                     m->content->store->map_fd, offset)) {
            attr_give(s->r, addr, len, ATTR_SHARED);
            vmas_made(m->vmas, 2);
            return true;
        }
        if (!range_has_gap(addr, len)) {
            vmas_recount(m->vmas);
            return false;
        }
        prim.pause(tries > 8 ? 1000 : 0);
    }
}

static bool act_joined(const KsmPlan *p, unsigned i)
{
    return p->act[i] == ACT_MAP && p->act[i + 1] == ACT_MAP &&
           p->slot[i] + 1 == p->slot[i + 1];
}

/* Pages of the span from @i on that map consecutive slots. */
static unsigned joined_run(const KsmMerge *m, const Isolation *s, unsigned i)
{
    unsigned n = 1;

    while (i + n < s->n && act_joined(m->plan, span_at(s) + i + n - 1)) {
        n++;
    }
    return n;
}

/* These pages are kept, for what they needed cannot be had. */
static void refuse(KsmMerge *m, unsigned at, unsigned n, KsmReason why)
{
    KsmPlan *p = m->plan;

    chunk_set_reason(p->region, &p->region->chunk[p->chunk], why);
    for (unsigned i = at; i < at + n; i++) {
        plan_drop(p, i, ACT_KEEP);
    }
}

/* Maps all runs; those that fail are to be kept.  Returns their number. */
static unsigned map_runs(KsmMerge *m, Isolation *s)
{
    unsigned runs = 0, n;

    for (unsigned i = 0; i < s->n; i += n) {
        n = 1;
        if (m->plan->act[span_at(s) + i] != ACT_MAP) {
            continue;
        }
        n = joined_run(m, s, i);
        if (map_run(m, s, i, n)) {
            runs++;
        } else {
            refuse(m, span_at(s) + i, n, KSM_REASON_VMA_LIMIT);
        }
    }
    return runs;
}

/*
 * Is the pool's content under a hash what the hash says?  If not, it changed
 * between hashing and copying, or its memory has failed, and nobody shall look
 * for it there.  Who maps it keeps it; the kernel tells them when they touch
 * what has failed.
 */
static bool slot_is_sound(KsmMerge *m, KsmRegion *r, uint32_t slot)
{
    KsmStore *st = m->content->store;
    int ret = store_readable(st, slot, 1);
    uint64_t h = ret < 0 ? 0 : hash_page(m->hasher, store_page(st, slot));
    uint32_t tag = store_tag(st, slot), first;

    if (ret == 0 && (content_tag(r, h) == tag ||
                     content_tag_again(r, h) == tag)) {
        return true;
    }
    if (ret < 0 && ret != -EFAULT) {
        return false;   /* not known */
    }
    first = store_repeated(st, slot);
    content_withdraw(m->content, first == SLOT_NONE ? slot : first);
    return false;
}

/* A staged page is not what @slot holds: because it changed, or why? */
static PlanAct act_differs(KsmMerge *m, Isolation *s, unsigned i,
                           uint32_t slot)
{
    uint64_t h = hash_page(m->hasher, stage_page(s, i));

    if (!slot_is_sound(m, s->r, slot) ||
        content_tag(s->r, h) != s->r->tag[s->page + i]) {
        return ACT_CHANGED;
    }
    m->plan->slot[span_at(s) + i] = content_tag_again(s->r, h);
    return ACT_COLLIDED;
}

/* Pages of the span from @i on that fill neighbouring slots. */
static unsigned fill_run(const KsmMerge *m, const Isolation *s, unsigned i)
{
    const KsmPlan *p = m->plan;
    unsigned at = span_at(s) + i, n = 0;

    while (i + n < s->n && p->act[at + n] == ACT_FILL &&
           p->slot[at + n] == p->slot[at] + n) {
        n++;
    }
    return n;
}

/*
 * Allocates the slots that will be filled, before the span is isolated: no
 * guest waits for the kernel to find memory.
 */
static void allocate_slots(KsmMerge *m, Isolation *s)
{
    KsmStore *st = m->content->store;
    unsigned n;

    for (unsigned i = 0; i < s->n; i += MAX(n, 1)) {
        unsigned at = span_at(s) + i;

        n = fill_run(m, s, i);
        if (n && store_allocate(st, m->plan->slot[at], n) < 0) {
            refuse(m, at, n, KSM_REASON_NO_MEMORY);
        }
    }
}

/* Is there anything left to do? */
static bool span_has_work(const KsmMerge *m, const Isolation *s)
{
    for (unsigned i = 0; i < s->n; i++) {
        if (m->plan->act[span_at(s) + i] != ACT_KEEP) {
            return true;
        }
    }
    return false;
}

/*
 * Fills the slots that are to hold staged pages.  Nobody can write to a page
 * between this copy and its replacement: it needs no comparison.
 */
static void fill_slots(KsmMerge *m, Isolation *s)
{
    KsmStore *st = m->content->store;
    unsigned n;

    for (unsigned i = 0; i < s->n; i += MAX(n, 1)) {
        unsigned at = span_at(s) + i;

        n = fill_run(m, s, i);
        if (n && store_fill(st, m->plan->slot[at], stage_page(s, i),
                               n) < 0) {
            refuse(m, at, n, KSM_REASON_NO_MEMORY);
        }
    }
}

/* Pages from @i on that map consecutive slots, which can be read. */
static unsigned readable_run(KsmMerge *m, const Isolation *s, unsigned i)
{
    KsmStore *st = m->content->store;
    uint32_t slot = m->plan->slot[span_at(s) + i];
    unsigned n = joined_run(m, s, i);

    if (store_readable(st, slot, n) == 0) {
        return n;
    }
    return store_readable(st, slot, 1) == 0;
}

/*
 * Compares what was staged with what it shall become.  Returns the number of
 * pages that stand.
 */
static unsigned verify(KsmMerge *m, Isolation *s)
{
    KsmPlan *p = m->plan;
    unsigned good = 0, readable = 0;

    for (unsigned i = 0; i < s->n; i++, readable -= readable > 0) {
        unsigned at = span_at(s) + i;
        const char *page = stage_page(s, i);
        uint32_t slot = p->slot[at];
        PlanAct act;
        bool equal;

        if (p->act[at] == ACT_FILL) {
            p->act[at] = ACT_MAP;
            good++;
            continue;
        }
        if (p->act[at] != ACT_ZERO && p->act[at] != ACT_MAP) {
            continue;
        }
        if (p->act[at] == ACT_ZERO) {
            equal = bytes_are_zero(page, PAGE_BYTES);
        } else {
            readable = readable ? readable : readable_run(m, s, i);
            equal = readable &&
                    !memcmp(page, store_page(m->content->store, slot),
                            PAGE_BYTES);
        }
        if (equal) {
            good++;
            continue;
        }
        act = p->act[at] == ACT_MAP ? act_differs(m, s, i, slot) : ACT_CHANGED;
        if (p->act[at] == ACT_MAP) {
            store_drop(m->content->store, slot);
        }
        p->act[at] = act;
    }
    return good;
}

/* What is in anonymous memory after all is tracked again. */
static void span_track(KsmMerge *m, Isolation *s)
{
    const uint8_t *act = m->plan->act + span_at(s);
    unsigned n;

    for (unsigned i = 0; i < s->n; i += n) {
        bool own = act[i] != ACT_MAP;

        n = 1;
        while (i + n < s->n && (act[i + n] != ACT_MAP) == own) {
            n++;
        }
        if (own) {
            dirty_track(m->dirty, s->r, s->page + i, n);
        }
    }
}

/*
 * Reads a run once, for its page tables: a fault maps what the pool has around
 * it (fault-around), at less than half the price of MADV_POPULATE_READ, which
 * looks up every page.  What is mapped are the aligned 16 pages that the fault
 * is in; but 16 pages from the first one on where the mapping begins there, so
 * that the second read comes 16 pages later, aligned or not.
 */
static void run_touch(const char *addr, size_t len)
{
    const char *end = addr + len, *at = addr;

    KSM_TSAN_IGNORE_BEGIN();
    while (at < end) {
        /* volatile: only that it is read matters */
        (void)*(const volatile char *)at;
        at = at == addr ? addr + FAULT_AROUND
           : (const char *)ROUND_UP_TO((uintptr_t)at + 1, FAULT_AROUND);
    }
    KSM_TSAN_IGNORE_END();
}

/* The page tables of what was mapped, for us and for whoever has others. */
static void span_prefault(KsmMerge *m, Isolation *s)
{
    const KsmRegionOps *ops = s->r->ops;
    unsigned n;

    for (unsigned i = 0; i < s->n; i += n) {
        void *addr = page_addr(s->r, s->page + i);

        n = 1;
        if (m->plan->act[span_at(s) + i] != ACT_MAP) {
            continue;
        }
        n = joined_run(m, s, i);
        run_touch(addr, n * PAGE_BYTES);
        if (ops && ops->prefault) {
            ops->prefault(s->r->opaque, addr, n * PAGE_BYTES);
        }
    }
}

static void verify_failed(KsmMerge *m, KsmRegion *r)
{
    m->verify_failed++;
    r->verify_failed++;
}

/* Books what became of the pages of a span. */
static unsigned span_account(KsmMerge *m, Isolation *s, PageState pinned)
{
    KsmContent *c = m->content;
    KsmRegion *r = s->r;
    unsigned merged = 0;

    for (unsigned i = 0; i < s->n; i++) {
        unsigned at = span_at(s) + i;
        size_t page = s->page + i;

        switch ((PlanAct)m->plan->act[at]) {
        case ACT_MAP:
            content_leave(c, r, page, PAGE_MERGED);
            r->tag[page] = m->plan->slot[at];
            merged++;
            break;
        case ACT_ZERO:
            content_leave(c, r, page, PAGE_GIVEN);
            merged++;
            break;
        case ACT_CHANGED:
            content_leave(c, r, page, PAGE_NEW);
            page_mark(r, page, true);
            verify_failed(m, r);
            break;
        case ACT_COLLIDED:
            m->collided[m->n_collided++] =
                (MergeCollided) { page, m->plan->slot[at] };
            verify_failed(m, r);
            break;
        case ACT_PINNED:
            content_leave(c, r, page, pinned);
            break;
        case ACT_HOLE:
            if (page_state(r, page) != PAGE_GIVEN) {
                content_leave(c, r, page, PAGE_HOLE);
            }
            break;
        default:
            break;
        }
        m->plan->act[at] = ACT_KEEP;
    }
    return merged;
}

/* The isolation is undone: every page back, no page lost. */
static void span_undo(KsmMerge *m, Isolation *s, PutBack how, PlanAct act)
{
    stage_put_back(m->stage, s, 0, s->n, how);
    acts_follow(m, s);
    for (unsigned at = span_at(s); at < span_at(s) + s->n; at++) {
        PlanAct was = m->plan->act[at];

        if (act_has_slot(was) || was == ACT_ZERO) {
            plan_drop(m->plan, at, act);
        }
    }
}

static bool act_goes_back(PlanAct act)
{
    return act == ACT_KEEP || act == ACT_CHANGED || act == ACT_COLLIDED;
}

static void put_back_rest(KsmMerge *m, Isolation *s)
{
    const uint8_t *act = m->plan->act + span_at(s);
    unsigned n;

    for (unsigned i = 0; i < s->n; i += MAX(n, 1)) {
        n = 0;
        while (i + n < s->n && act_goes_back(act[i + n])) {
            n++;
        }
        if (n) {
            stage_keep(m->stage, s, i, n);
        }
    }
    acts_follow(m, s);
}

/*
 * After isolation: verify and replace, or undo.  The state of what was not
 * merged because it is pinned, or because the busy op said no.
 */
static PageState span_replace(KsmMerge *m, Isolation *s)
{
    unsigned runs;
    uint64_t t;

    if (region_busy(s->r, page_addr(s->r, s->page), s->n * PAGE_BYTES)) {
        m->busy++;
        s->r->busy++;
        span_undo(m, s, BACK_SAME, ACT_PINNED);
        return PAGE_BUSY;
    }
    if (s->kinds_known) {
        fill_slots(m, s);
    }
    if (!s->kinds_known || !verify(m, s)) {
        span_undo(m, s, BACK_ANY, ACT_KEEP);
        return PAGE_PINNED;
    }
    t = prim.cpu_ns();
    runs = map_runs(m, s);
    if (runs) {
        cost_average(&m->costs->map_ns, (prim.cpu_ns() - t) / runs);
    }
    put_back_rest(m, s);
    return PAGE_PINNED;
}

/*
 * What a page adds to the stall.  Of CPU, not of the clock: for how long we
 * are preempted does not depend on how many pages are staged.
 */
static void page_cost(KsmMerge *m, unsigned n, uint64_t cpu_ns)
{
    if (n >= 2 * SPAN_MIN) {
        cost_average(&m->costs->page_ns, cpu_ns / n);
    }
}

/* Isolates, replaces and releases; true if anything was staged. */
static bool span_carry_out(KsmMerge *m, Isolation *s, PageState *pinned)
{
    uint64_t start = prim.now_ns(), begin = prim.cpu_ns(), cpu, fixed;
    bool moved = stage_isolate(m->stage, s);

    fixed = prim.cpu_ns() - begin;
    moved = moved && stage_take_stock(m->stage, s);
    acts_follow(m, s);
    if (moved) {
        *pinned = span_replace(m, s);
    }
    cpu = prim.cpu_ns();
    stage_release(m->stage, s);
    fixed += prim.cpu_ns() - cpu;
    cost_average(&m->costs->isolate_ns,
                 fixed - MIN(fixed, s->n * m->costs->move_ns));
    page_cost(m, s->n, prim.cpu_ns() - begin);
    stalls_add(&m->stalls, prim.now_ns() - start);
    m->isolations++;
    return moved;
}

static void pinned_count(KsmMerge *m, Isolation *s)
{
    for (unsigned i = 0; i < s->n; i++) {
        if (m->plan->act[span_at(s) + i] == ACT_PINNED) {
            m->pinned++;
            s->r->pinned++;
            break;
        }
    }
}

static unsigned span_merge(KsmMerge *m, Isolation *s)
{
    PageState pinned = PAGE_PINNED;
    unsigned merged;
    bool moved;

    allocate_slots(m, s);
    if (!span_has_work(m, s)) {
        return 0;
    }
    moved = span_carry_out(m, s, &pinned);
    if (s->registered || s->untracked) {
        span_track(m, s);
    }
    stage_clean(m->stage, s, moved);
    if (moved) {
        span_prefault(m, s);
    }
    stage_tell(m->stage);
    if (pinned == PAGE_PINNED) {
        pinned_count(m, s);
    }
    merged = span_account(m, s, pinned);
    if (merged) {
        page_chunk(s->r, s->page)->flags &= ~CHUNK_HUGE;
    }
    return merged;
}

unsigned merge_plan(KsmMerge *m)
{
    KsmPlan *p = m->plan;
    KsmRegion *r = p->region;
    KsmChunk *c = &r->chunk[p->chunk];
    bool huge = (c->flags & CHUNK_HUGE) && p->n_spans == 1 &&
                p->span[0].n == CHUNK_PAGES;
    unsigned merged = 0;
    sigset_t old;

    m->n_collided = 0;
    prim.signals_block(&old);
    for (unsigned i = 0; i < p->n_spans; i++) {
        Isolation s = {
            .r = r,
            .page = p->chunk * CHUNK_PAGES + p->span[i].first,
            .n = p->span[i].n,
            .huge = huge,
        };

        merged += span_merge(m, &s);
    }
    prim.signals_restore(&old);
    region_count_runs(r, p->chunk);
    if (p->chunk + 1 < r->n_chunks) {
        region_count_runs(r, p->chunk + 1);
    }
    return merged;
}
