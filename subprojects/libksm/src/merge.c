/*
 * libksm: carrying a plan out
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * See merge.h for the idea, and for what must not happen.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#include "dirty.h"
#include "engine.h"
#include "merge.h"
#include "prim.h"
#include "scan.h"
#include "tsan.h"

/* First guesses; with a second busy thread each call costs a shootdown. */
#define ISOLATE_NS      30000u
#define MAP_NS          4000u
#define COPY_NS         1000u
#define BACK_NS         15000u
#define MOVE_NS         100u
#define BUSY_TRIES      20u     /* ms to wait for a device */
#define VMAS_FEW        256u    /* left: mappings are not split any more */
#define SKIP_CHUNKS     4096u   /* without a mapping: passed over in one go */
#define MOVE_TRIES      8u      /* a page that is busy for a moment */
#define FAULT_AROUND    (16 * PAGE_BYTES)   /* the kernel's default */

/* One isolation in progress. */
typedef struct Isolation {
    KsmRegion *r;
    size_t page;        /* first page of the span, in the region */
    unsigned at;        /* ... and in the plan */
    unsigned n;
    char *stage;        /* where the first page of the span was moved */
    bool huge;          /* in the staging area for huge pages */
    bool failed;        /* a move has: ask where each page is */
    bool home_known;    /* what was populated then */
    bool kinds_known;   /* of the staged pages; if not, any may be staged */
    bool registered;
    unsigned waited_us; /* for pages that could not be put back */
} Isolation;

static void *stage_map(void *addr, size_t len, int flags)
{
    return prim.map(addr, len, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

static int stage_prepare(KsmEngine *e, char *stage)
{
    UffdRange range = { e->uffd, stage, CHUNK_BYTES };

    prim.advise(stage, CHUNK_BYTES, MADV_DONTFORK);
    prim.advise(stage, CHUNK_BYTES, MADV_DONTDUMP);
    prim.advise(stage, CHUNK_BYTES, stage == e->merge.huge
                ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    /*
     * UFFDIO_MOVE wants the target to be registered, no matter for what.  Not
     * for missing pages, if that can be had: a page that was freed lazily may
     * be reclaimed while it is staged, and reading it would wait for ever.
     */
    return prim.uffd_register(&range, e->wp_async ? UFFD_PROTECT
                                                  : UFFD_MISSING);
}

int merge_init(KsmEngine *e)
{
    KsmMerge *m = &e->merge;
    uintptr_t at;
    int ret;

    m->map_len = 4 * CHUNK_BYTES;
    m->map = stage_map(NULL, m->map_len, MAP_NORESERVE);
    if (!m->map) {
        return -ENOMEM;
    }
    at = ROUND_UP_TO((uintptr_t)m->map, CHUNK_BYTES);
    m->small = (char *)at;
    m->huge = (char *)at + CHUNK_BYTES;
    m->unreadable = m->map + m->map_len - PAGE_BYTES;
    if (!prim.map(m->unreadable, PAGE_BYTES, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
                  -1, 0)) {
        return -ENOMEM;
    }
    ret = stage_prepare(e, m->small);
    ret = ret < 0 ? ret : stage_prepare(e, m->huge);
    /* first guesses, replaced by what is measured */
    m->isolate_ns = ISOLATE_NS;
    m->map_ns = MAP_NS;
    m->copy_ns = COPY_NS;
    m->back_ns = BACK_NS;
    m->move_ns = MOVE_NS;
    return ret;
}

static void towards(uint64_t *cost, uint64_t guess)
{
    *cost = (*cost * 15 + guess) / 16;
}

void merge_doubt_costs(KsmEngine *e)
{
    towards(&e->merge.isolate_ns, ISOLATE_NS);
    towards(&e->merge.map_ns, MAP_NS);
    towards(&e->merge.copy_ns, COPY_NS);
    towards(&e->merge.back_ns, BACK_NS);
}

void merge_free(KsmEngine *e)
{
    if (e->merge.map) {
        prim.unmap(e->merge.map, e->merge.map_len);
    }
}

/*
 * Empties a staging area; page tables go too where they are in the way of
 * moving a huge page.  Repeated until it works: a staged page that stayed
 * would be in the way of the next one.
 */
static void stage_drop(KsmEngine *e, char *stage, size_t len, bool tables)
{
    char *whole = stage < e->merge.huge ? e->merge.small : e->merge.huge;
    bool anew = tables;

    for (unsigned tries = 0; ; tries++) {
        if (!anew && prim.advise(stage, len, MADV_DONTNEED) == 0) {
            return;
        }
        /* once it was mapped anew it has to be prepared: nothing else will do */
        anew |= tries > 2;
        if (anew &&
            stage_map(whole, CHUNK_BYTES, MAP_FIXED | MAP_NORESERVE) &&
            stage_prepare(e, whole) == 0) {
            return;
        }
        if (tries > 8) {
            prim.pause(1000);
        }
    }
}

static UffdRange span_range(KsmEngine *e, const Isolation *s)
{
    return (UffdRange) {
        .fd = e->uffd,
        .addr = page_addr(s->r, s->page),
        .len = s->n * PAGE_BYTES,
    };
}

/* Pages [at, at + n) of the span were not isolated. */
static void not_moved(KsmEngine *e, Isolation *s, unsigned at, unsigned n,
                      PlanAct act)
{
    for (unsigned i = at; i < at + n; i++) {
        run_drop(e, s->at + i);
        e->plan.act[s->at + i] = act;
    }
}

static PlanAct act_refused(Isolation *s, int ret)
{
    if (ret == -ENOMEM) {
        chunk_set_reason(s->r, page_chunk(s->r, s->page),
                         KSM_REASON_NO_MEMORY);
    }
    return ret == -EBUSY || ret == -EAGAIN ? ACT_PINNED : ACT_STAY;
}

static bool is_populated(uint8_t kind)
{
    return kind & (PM_PRESENT | PM_SWAPPED);
}

/* As engine_kinds(), KINDS_FAST; if that fails, populated or not. */
static int look_kinds(KsmEngine *e, const char *addr, unsigned n,
                      uint8_t *kinds)
{
    uint64_t entry[CHUNK_PAGES];
    ssize_t len = n * sizeof(entry[0]);
    int ret = engine_kinds(e, addr, n, KINDS_FAST, kinds);

    if (ret == 0) {
        return 0;
    }
    if (prim.read_at(e->pagemap, entry, len, (uintptr_t)addr / PAGE_BYTES *
                     sizeof(entry[0])) != len) {
        return ret;
    }
    for (unsigned i = 0; i < n; i++) {
        kinds[i] = (entry[i] >> 63 ? PM_PRESENT : 0) |
                   (entry[i] >> 62 & 1 ? PM_SWAPPED : 0);
    }
    return 0;
}

/* What is populated where the span belongs: it can only become less. */
static bool look_home(KsmEngine *e, Isolation *s)
{
    s->home_known = look_kinds(e, page_addr(s->r, s->page), s->n,
                               e->merge.home) == 0;
    return s->home_known;
}

static bool is_known_hole(KsmEngine *e, const Isolation *s, unsigned i)
{
    PageState state = page_state(s->r, s->page + i);

    if (s->home_known) {
        return !is_populated(e->merge.home[i]);
    }
    return e->plan.act[s->at + i] == ACT_KEEP &&
           (state == PAGE_HOLE || state == PAGE_GIVEN);
}

/* Pages from @i on, up to @end, that are not known to be holes. */
static unsigned populated_run(KsmEngine *e, const Isolation *s, unsigned i,
                              unsigned end)
{
    unsigned n = 0;

    while (i + n < end && !is_known_hole(e, s, i + n)) {
        n++;
    }
    return n;
}

/*
 * Moves the span out.  Pages that cannot be moved are marked ACT_STAY or
 * ACT_PINNED, which take_stock() takes back if they were moved all the same.
 * False: nothing can be staged.
 *
 * EINVAL: the range is in several mappings (parts were restored before); it
 * is moved in smaller pieces, that grow again.  EFAULT: a marker in the page
 * table.  EEXIST: moved, though not counted, or somebody read the staging area.
 * ENOENT: a hole.
 */
static bool isolate_move(KsmEngine *e, Isolation *s)
{
    unsigned at = 0, tries = 0, piece = s->n;
    bool called = false;

    while (at < s->n) {
        unsigned n = populated_run(e, s, at, MIN(s->n, at + piece));
        size_t done = 0;
        int ret;

        if (!n) {
            at++;
            continue;
        }
        called = true;
        ret = prim.uffd_move(e->uffd, s->stage + at * PAGE_BYTES,
                             page_addr(s->r, s->page + at), n * PAGE_BYTES,
                             &done);
        at += done / PAGE_BYTES;
        s->failed |= ret < 0;
        if (ret == 0 || done) {
            tries = 0;
            piece = ret == 0 ? MIN(2 * piece, s->n) : piece;
        } else if (ret == -EAGAIN && ++tries < MOVE_TRIES) {
            continue;
        } else if (ret == -EEXIST || ret == -ENOENT) {
            if (ret == -ENOENT && !s->home_known) {
                look_home(e, s);
            }
            at++;
            tries = 0;
        } else if (s->huge && at == 0) {
            /* do not break a huge page around the one that is pinned */
            not_moved(e, s, 0, s->n, act_refused(s, ret));
            break;
        } else if (ret == -EINVAL && n > 1) {
            piece = n / 2;
        } else if (ret == -EBUSY || ret == -EAGAIN || ret == -EFAULT ||
                   ret == -EINVAL) {
            not_moved(e, s, at++, 1, act_refused(s, ret));
            tries = 0;
        } else {
            /* not about this page: do not try the others */
            not_moved(e, s, at, s->n - at, act_refused(s, ret));
            break;
        }
    }
    return called;
}

/* Is there no mapping at part of the range? */
static bool range_has_gap(void *addr, size_t len)
{
    return prim.advise(addr, len, MADV_NORMAL) == -ENOMEM;
}

/* Pages to be put back from @i on, up to @end. */
static unsigned staged_run(KsmEngine *e, const Isolation *s, unsigned i,
                           unsigned end)
{
    const uint8_t *act = e->plan.act + s->at;
    unsigned n = 0;

    if (!s->kinds_known) {
        return end - i;
    }
    while (i + n < end && act[i + n] != ACT_STAY &&
           act[i + n] != ACT_PINNED && act[i + n] != ACT_HOLE) {
        n++;
    }
    return n;
}

/*
 * Moving costs a shootdown, copying a page for each page.  What was staged as
 * a huge page would have to be split to be moved in part.
 */
static bool is_moved_back(const KsmEngine *e, const Isolation *s, unsigned n)
{
    return !s->huge && n * e->merge.copy_ns > e->merge.back_ns;
}

/*
 * Putting back.
 *
 * Where a page is, the page tables tell.  If they cannot be asked, what calls
 * for this one page answer has to do.  (A call for several that fails says
 * nothing of any of them: copies to several mappings end with ENOENT, and a
 * move may have moved more than it counts.)  Known of one page, after
 *
 *           moving it back                   copying it back
 *   0       it is at home                    it is at home
 *   EEXIST  something is at home             something is at home
 *   ENOENT  nothing is staged, or home is    home is not mapped, or not
 *           not mapped                       registered: it is the owner's
 *   EFAULT  staged; but the memory failed    staged memory cannot be read
 *   EBUSY   staged; shared or pinned         -
 *   EINVAL  home is another sort of mapping  -
 *   others  nothing                          nothing
 *
 * 1. A page is passed over only when it is known that something is at home, or
 *    that nothing is staged: by the tables, or else by what calls for this page
 *    alone say SURE times in a row.
 * 2. A page is copied only when it is known to be staged; or, the tables being
 *    silent, where reading the staging area cannot wait for us.  Then what is
 *    not staged is copied as zeroes, which is what the hole at home reads as,
 *    and what is at home refuses the copy (all but a poison marker: so not
 *    where the page may never have been staged, but as the very last way).
 * 3. A page that a device may be writing to (BACK_SAME) is moved, not copied,
 *    until the owner says that the device is done, asked for that page alone.
 *    A copy made before would lose what the device writes: so only when all
 *    patience is used up, for a guest that waits for ever has lost more.
 * 4. A page is given up as poisoned only when its memory cannot be read, nor
 *    moved.  Its home is poisoned too: whoever needs it is told, none reads
 *    zeroes.
 * 5. A page is given up as displaced only when its home is not what was
 *    registered: a copy tells that, and one from an address where nothing can
 *    be read does nothing else.  What the owner has put there stays.
 * 6. What is given up ends that page; the others are put back all the same.
 * 7. Only where the kernel has memory for no way at all (a move needs none) is
 *    it tried for ever.
 */
#define SURE            16u     /* times that an answer must be the same */
#define UNREADABLE_SURE 1024u   /* ... where only a copy says so: 100 ms */
#define PATIENCE_US     10000000u   /* of an isolation, for devices */

typedef enum PutBack {
    BACK_ANY,       /* by moving or copying */
    BACK_SAME,      /* the very pages: a device may be writing to them */
} PutBack;

typedef enum Where {
    WHERE_SETTLED,  /* something is at home, or nothing is staged */
    WHERE_STAGED,   /* and nothing is at home */
    WHERE_UNKNOWN,
} Where;

/* What a try to put back one page has told. */
typedef enum BackTry {
    TRY_DONE,
    TRY_AGAIN,
    TRY_SETTLED,    /* the calls say so, the tables are silent */
    TRY_POISONED,
    TRY_UNREADABLE, /* only copying says so */
    TRY_DISPLACED,
} BackTry;

static Where page_where(KsmEngine *e, const Isolation *s, unsigned i)
{
    uint8_t stage, home;

    if (look_kinds(e, s->stage + i * PAGE_BYTES, 1, &stage) < 0 ||
        look_kinds(e, page_addr(s->r, s->page + i), 1, &home) < 0) {
        return WHERE_UNKNOWN;
    }
    return is_populated(stage) && !is_populated(home) ? WHERE_STAGED
                                                      : WHERE_SETTLED;
}

/*
 * Is it safe to copy a page of which the tables say nothing?  Not where it may
 * never have been staged, for a copy replaces a poison marker at home.
 */
static bool may_copy_unseen(KsmEngine *e, const Isolation *s, int refused,
                            unsigned tries)
{
    return e->wp_async && (s->kinds_known || refused == -EBUSY ||
                           tries > UNREADABLE_SURE);
}

/* @refused: why it cannot be moved.  Invariants 2 and 3. */
static bool may_copy(KsmEngine *e, const Isolation *s, unsigned i,
                     PutBack how, int refused)
{
    if (refused == -EFAULT) {
        return true;    /* there is no memory that a device could write to */
    }
    if (refused == -ENOENT && !e->wp_async) {
        return false;   /* who reads a hole in the staging area may wait */
    }
    return how == BACK_ANY || s->waited_us >= PATIENCE_US ||
           !region_busy(s->r, page_addr(s->r, s->page + i), PAGE_BYTES);
}

static BackTry back_copy(KsmEngine *e, const Isolation *s, unsigned i,
                         Where where, int refused)
{
    size_t done = 0;
    int ret = prim.uffd_copy(e->uffd, page_addr(s->r, s->page + i),
                             s->stage + i * PAGE_BYTES, PAGE_BYTES, &done);

    if (ret == 0) {
        return TRY_DONE;
    }
    if (ret == -ENOENT) {
        return TRY_DISPLACED;
    }
    if (ret == -EFAULT && refused == -EFAULT) {
        return TRY_POISONED;
    }
    if (ret == -EFAULT && where == WHERE_STAGED) {
        return TRY_UNREADABLE;
    }
    return ret == -EEXIST && where == WHERE_UNKNOWN ? TRY_SETTLED : TRY_AGAIN;
}

/* Is the page's home no longer what was registered?  Invariant 5. */
static bool is_displaced(KsmEngine *e, const Isolation *s, unsigned i)
{
    size_t done = 0;

    return prim.uffd_copy(e->uffd, page_addr(s->r, s->page + i),
                          e->merge.unreadable, PAGE_BYTES, &done) == -ENOENT;
}

static BackTry back_try(KsmEngine *e, const Isolation *s, unsigned i,
                        PutBack how, unsigned tries)
{
    Where where = page_where(e, s, i);
    size_t done = 0;
    int ret;

    if (where == WHERE_SETTLED) {
        return TRY_DONE;
    }
    ret = prim.uffd_move(e->uffd, page_addr(s->r, s->page + i),
                         s->stage + i * PAGE_BYTES, PAGE_BYTES, &done);
    if (ret == 0) {
        return TRY_DONE;
    }
    if (where == WHERE_UNKNOWN && (ret == -EEXIST || ret == -ENOENT)) {
        return TRY_SETTLED;
    }
    if ((ret == -EINVAL || ret == -ENOENT) && is_displaced(e, s, i)) {
        return TRY_DISPLACED;
    }
    if (tries < MOVE_TRIES && (ret == -EAGAIN || how == BACK_SAME)) {
        return TRY_AGAIN;
    }
    if ((where == WHERE_UNKNOWN && ret != -EFAULT &&
         !may_copy_unseen(e, s, ret, tries)) ||
        !may_copy(e, s, i, how, ret)) {
        return TRY_AGAIN;
    }
    return back_copy(e, s, i, where, ret);
}

/* The guest is told, by a signal, when it needs this page.  Invariant 4. */
static void poison_home(KsmEngine *e, const Isolation *s, unsigned i)
{
    void *home = page_addr(s->r, s->page + i);

    for (unsigned tries = 0; ; tries++) {
        int ret = prim.uffd_poison(e->uffd, home, PAGE_BYTES);

        if (ret == 0 || ret == -EEXIST || ret == -ENOENT) {
            return;
        }
        /* or so: whoever reads it is told as well */
        if (tries > 3 && prim.map(home, PAGE_BYTES, PROT_NONE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED |
                                  MAP_NORESERVE, -1, 0)) {
            return;
        }
        prim.pause(tries > 8 ? 1000 : 0);
    }
}

/* It is told later, when nobody waits. */
static void page_lost(KsmEngine *e, Isolation *s, unsigned i, BackTry why)
{
    bool displaced = why == TRY_DISPLACED;
    size_t page = s->page + i;
    KsmLost *lost = displaced ? &e->merge.displaced : &e->merge.poisoned;

    if (!displaced) {
        poison_home(e, s, i);
        e->total.poisoned++;
    }
    lost->addr = lost->pages++ ? lost->addr : page_addr(s->r, page);
    not_moved(e, s, i, 1, ACT_STAY);
    region_leave(s->r, page, displaced ? PAGE_NEW : PAGE_SWAPPED);
    page_mark(s->r, page, displaced);
}

static void lost_tell(KsmLost *lost, const char *what)
{
    if (lost->pages && !lost->told) {
        lost->told = true;
        g_warning("libksm: %" PRIu64 " page(s) at %p %s", lost->pages,
                  lost->addr, what);
    }
}

/* Both say that the page's memory failed, one of them more surely. */
static bool is_lost(BackTry told)
{
    return told == TRY_POISONED || told == TRY_UNREADABLE;
}

/* Comes back when page @i is at home, or given up; see above. */
static void put_back_one(KsmEngine *e, Isolation *s, unsigned i, PutBack how)
{
    BackTry last = TRY_AGAIN;
    unsigned sure = 0;      /* of @last, in UNREADABLE_SURE */

    for (unsigned tries = 0; ; tries++) {
        BackTry told = back_try(e, s, i, how, tries);

        if (told == TRY_DONE) {
            return;
        }
        if (told != TRY_AGAIN) {
            sure = told == last || (is_lost(told) && is_lost(last)) ? sure : 0;
            sure += told == TRY_UNREADABLE ? 1 : UNREADABLE_SURE / SURE;
            last = told;
        }
        if (sure >= UNREADABLE_SURE) {
            if (told != TRY_SETTLED) {
                page_lost(e, s, i, told);
            }
            return;
        }
        if (tries > 2 * SURE) {
            prim.pause(100);
            s->waited_us += 100;
        }
    }
}

/*
 * Puts staged pages [i, i + n) of the span back, except holes and pages that
 * were not moved.  Comes back when it is done.
 */
static void put_back(KsmEngine *e, Isolation *s, unsigned i, unsigned n,
                     PutBack how)
{
    bool move = !s->kinds_known || n == CHUNK_PAGES || how == BACK_SAME ||
                is_moved_back(e, s, n);
    unsigned end = i + n, tries = 0, piece = n;

    while (i < end) {
        char *to = page_addr(s->r, s->page + i);
        char *from = s->stage + i * PAGE_BYTES;
        unsigned k = staged_run(e, s, i, MIN(end, i + piece));
        size_t done = 0;
        int ret;

        if (!k) {
            i++;
            continue;
        }
        ret = move ? prim.uffd_move(e->uffd, to, from, k * PAGE_BYTES, &done)
                   : prim.uffd_copy(e->uffd, to, from, k * PAGE_BYTES, &done);
        i += done / PAGE_BYTES;
        if (ret == 0 || done) {
            tries = 0;
            piece = ret == 0 ? MIN(2 * piece, n) : piece;
        } else if (ret == -EAGAIN && ++tries < MOVE_TRIES) {
            continue;
        } else if (k > 1) {
            piece = k / 2;
        } else {
            put_back_one(e, s, i++, how);
            tries = 0;
        }
    }
}

/* Maps the pool over a run.  False: the range is still as it was. */
static bool map_run(KsmEngine *e, Isolation *s, unsigned i, unsigned n)
{
    void *addr = page_addr(s->r, s->page + i);
    size_t len = n * PAGE_BYTES;
    off_t offset = (off_t)e->plan.slot[s->at + i] * PAGE_BYTES;

    for (unsigned tries = 0; ; tries++) {
        if (prim.map(addr, len, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_FIXED | s->r->map_flags,
                     e->pool.map_fd, offset)) {
            region_attributes(s->r, addr, len, ATTR_SHARED);
            e->vmas.since += 2;
            return true;
        }
        if (!range_has_gap(addr, len)) {
            run_vmas_full(e);
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

/* Maps all runs; those that fail are to be kept.  Returns their number. */
static unsigned map_runs(KsmEngine *e, Isolation *s)
{
    KsmPlan *p = &e->plan;
    unsigned runs = 0, n;

    for (unsigned i = 0; i < s->n; i += n) {
        n = 1;
        if (p->act[s->at + i] != ACT_MAP) {
            continue;
        }
        while (i + n < s->n && act_joined(p, s->at + i + n - 1)) {
            n++;
        }
        if (map_run(e, s, i, n)) {
            runs++;
            continue;
        }
        chunk_set_reason(p->region, &p->region->chunk[p->chunk],
                         KSM_REASON_VMA_LIMIT);
        for (unsigned k = i; k < i + n; k++) {
            run_drop(e, s->at + k);
            p->act[s->at + k] = ACT_KEEP;
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
static bool slot_is_sound(KsmEngine *e, KsmRegion *r, uint32_t slot)
{
    int ret = pool_readable(&e->pool, slot, 1);
    uint64_t h = ret < 0 ? 0 : e->hash(pool_page(&e->pool, slot), e->seed);

    if (ret == 0 && (scan_fold(r, h) == e->pool.hash[slot] ||
                     scan_fold_again(r, h) == e->pool.hash[slot])) {
        return true;
    }
    if (ret < 0 && ret != -EFAULT) {
        return false;   /* not known */
    }
    /* a pattern is found by its first slot */
    if (pool_pattern(&e->pool, slot)) {
        slot = pool_pattern(&e->pool, slot)->first;
    }
    if (e->pool.users[slot] & SLOT_INDEXED) {
        index_remove(&e->index, e->pool.hash[slot], slot | PLACE_SLOT);
        e->pool.users[slot] &= ~SLOT_INDEXED;
    }
    return false;
}

/* A staged page is not what @slot holds: because it changed, or why? */
static PlanAct act_differs(KsmEngine *e, Isolation *s, unsigned i,
                           uint32_t slot)
{
    uint64_t h = e->hash(s->stage + i * PAGE_BYTES, e->seed);
    uint32_t tag = s->r->tag[s->page + i];

    if (!slot_is_sound(e, s->r, slot) || scan_fold(s->r, h) != tag) {
        return ACT_CHANGED;
    }
    e->plan.slot[s->at + i] = scan_fold_again(s->r, h);
    return ACT_COLLIDED;
}

static bool page_is_zero(const char *page)
{
    return page[0] == 0 && !memcmp(page, page + 1, PAGE_BYTES - 1);
}

/*
 * What is staged?  The page tables tell, whatever failed moves said: what is
 * no longer at home.  A page that is at both places was never moved; somebody
 * has read the staging area (a debugger), and the kernel put zeroes there.
 * Nothing may read a hole where it should be staged, and it is not put back.
 * False: the staging area is empty.
 */
static bool take_stock(KsmEngine *e, Isolation *s)
{
    KsmPlan *p = &e->plan;
    bool any = false;

    for (unsigned tries = 0; tries < 4 && !s->kinds_known; tries++) {
        s->kinds_known = (!s->failed || look_home(e, s)) &&
                         look_kinds(e, s->stage, s->n, e->merge.kinds) == 0;
    }
    for (unsigned i = 0; i < s->n && s->kinds_known; i++) {
        uint8_t *act = &p->act[s->at + i];
        bool left = *act == ACT_STAY || *act == ACT_PINNED;

        any |= is_populated(e->merge.kinds[i]);
        if (!is_populated(e->merge.kinds[i])) {
            if (!left) {
                run_drop(e, s->at + i);
                *act = ACT_HOLE;
            }
        } else if (s->failed && is_populated(e->merge.home[i])) {
            if (!left) {
                run_drop(e, s->at + i);
                *act = ACT_STAY;
            }
        } else if (left) {
            *act = ACT_KEEP;
        } else if (!(e->merge.kinds[i] & PM_PRESENT) && *act != ACT_KEEP) {
            /* swapped out, or poisoned: it is not read */
            run_drop(e, s->at + i);
            *act = ACT_KEEP;
        }
    }
    return any || !s->kinds_known;
}

/* Pages of the span from @i on that fill neighbouring slots. */
static unsigned fill_run(const KsmEngine *e, const Isolation *s, unsigned i)
{
    const KsmPlan *p = &e->plan;
    unsigned at = s->at + i, n = 0;

    while (i + n < s->n && p->act[at + n] == ACT_FILL &&
           p->slot[at + n] == p->slot[at] + n) {
        n++;
    }
    return n;
}

/* There is no memory for the slots that these pages were to fill. */
static void fill_refused(KsmEngine *e, Isolation *s, unsigned i, unsigned n)
{
    KsmPlan *p = &e->plan;

    chunk_set_reason(p->region, &p->region->chunk[p->chunk],
                     KSM_REASON_NO_MEMORY);
    for (unsigned at = s->at + i; at < s->at + i + n; at++) {
        run_drop(e, at);
        p->act[at] = ACT_KEEP;
    }
}

/*
 * Allocates the slots that will be filled, before the span is isolated: no
 * guest waits for the kernel to find memory.
 */
static void allocate_slots(KsmEngine *e, Isolation *s)
{
    unsigned n;

    for (unsigned i = 0; i < s->n; i += MAX(n, 1)) {
        n = fill_run(e, s, i);
        if (n && pool_allocate(&e->pool, e->plan.slot[s->at + i], n) < 0) {
            fill_refused(e, s, i, n);
        }
    }
}

/* Is there anything left to do? */
static bool span_has_work(KsmEngine *e, const Isolation *s)
{
    for (unsigned i = s->at; i < s->at + s->n; i++) {
        if (e->plan.act[i] != ACT_KEEP) {
            return true;
        }
    }
    return false;
}

/*
 * Fills the slots that are to hold staged pages.  What is copied here is what
 * will be replaced, for nobody can write it: it needs no comparison.
 */
static void fill_slots(KsmEngine *e, Isolation *s)
{
    unsigned n;

    for (unsigned i = 0; i < s->n; i += MAX(n, 1)) {
        n = fill_run(e, s, i);
        if (n && pool_fill(&e->pool, e->plan.slot[s->at + i],
                           s->stage + i * PAGE_BYTES, n) < 0) {
            fill_refused(e, s, i, n);
        }
    }
}

/* Pages from @i on that map consecutive slots, which can be read. */
static unsigned readable_run(KsmEngine *e, const Isolation *s, unsigned i)
{
    uint32_t slot = e->plan.slot[s->at + i];
    unsigned n = 1;

    while (i + n < s->n && act_joined(&e->plan, s->at + i + n - 1)) {
        n++;
    }
    if (pool_readable(&e->pool, slot, n) == 0) {
        return n;
    }
    return pool_readable(&e->pool, slot, 1) == 0;
}

/*
 * Compares what was staged with what it shall become.  Returns the number of
 * pages that stand.
 */
static unsigned verify(KsmEngine *e, Isolation *s)
{
    KsmPlan *p = &e->plan;
    unsigned good = 0, readable = 0;

    for (unsigned i = 0; i < s->n; i++, readable -= readable > 0) {
        unsigned at = s->at + i;
        const char *page = s->stage + i * PAGE_BYTES;
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
            equal = page_is_zero(page);
        } else {
            readable = readable ? readable : readable_run(e, s, i);
            equal = readable && !memcmp(page, pool_page(&e->pool, slot),
                                        PAGE_BYTES);
        }
        if (equal) {
            good++;
            continue;
        }
        act = p->act[at] == ACT_MAP ? act_differs(e, s, i, slot) : ACT_CHANGED;
        if (p->act[at] == ACT_MAP) {
            pool_user_drop(&e->pool, slot);
        }
        p->act[at] = act;
    }
    return good;
}

/* -EINVAL: there is something that cannot have been registered. */
static int unregister(const UffdRange *range)
{
    unsigned tries = 0;
    int ret;

    /* a pause of nothing would last 50 us, for whoever waits too */
    while ((ret = prim.uffd_unregister(range)) < 0 && ret != -EINVAL &&
           ++tries < 10000) {
        /* the pages are where they belong: who needs one can go on */
        prim.uffd_wake(range);
        prim.pause(tries > 8 ? 1000 : 0);
    }
    return ret;
}

/* Nothing of the range waits for us any more. */
static void range_release(const UffdRange *range)
{
    unsigned tries = 0;

    if (unregister(range) == -EINVAL) {
        /* the owner has mapped something else over part of it */
        for (size_t at = 0; at < range->len; at += PAGE_BYTES) {
            UffdRange page = { range->fd, (char *)range->addr + at,
                               PAGE_BYTES };

            unregister(&page);
        }
    }
    while (prim.uffd_wake(range) < 0 && ++tries < 10000) {
        prim.pause(tries > 8 ? 1000 : 0);
    }
}

/*
 * How far a registration may have come that failed.  The kernel goes from
 * mapping to mapping, and splits the first and the last: where it could not,
 * nothing is registered from there on.  To unregister that part, which may be
 * tracked, would have it split again, and fail for ever.
 */
static size_t registered_part(KsmEngine *e, const UffdRange *range)
{
    char *from = range->addr, *to = from + range->len, *start, *end;

    if (run_vma_at(e, from, &start, &end) && start < from) {
        return 0;
    }
    if (run_vma_at(e, to - 1, &start, &end) && end > to) {
        return MAX(start, from) - from;
    }
    return range->len;
}

static void registration_undo(KsmEngine *e, const Isolation *s)
{
    UffdRange range = span_range(e, s);

    if (prim.uffd_unregister(&range) < 0) {
        range.len = registered_part(e, &range);
    }
    if (range.len) {
        range_release(&range);
    }
    dirty_track(s->r, s->page, s->n);
}

/* Is a page of the span in anonymous memory after all? */
static bool act_is_own(PlanAct act)
{
    return act != ACT_MAP;
}

static void span_track(KsmEngine *e, Isolation *s)
{
    const uint8_t *act = e->plan.act + s->at;
    unsigned n;

    for (unsigned i = 0; i < s->n; i += n) {
        bool own = act_is_own(act[i]);

        n = 1;
        while (i + n < s->n && act_is_own(act[i + n]) == own) {
            n++;
        }
        if (own) {
            dirty_track(s->r, s->page + i, n);
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
static void span_prefault(KsmEngine *e, Isolation *s)
{
    const uint8_t *act = e->plan.act + s->at;
    const KsmRegionOps *ops = s->r->ops;
    unsigned n;

    for (unsigned i = 0; i < s->n; i += n) {
        void *addr = page_addr(s->r, s->page + i);

        n = 1;
        if (act[i] != ACT_MAP) {
            continue;
        }
        while (i + n < s->n && act_joined(&e->plan, s->at + i + n - 1)) {
            n++;
        }
        run_touch(addr, n * PAGE_BYTES);
        if (ops && ops->prefault) {
            ops->prefault(s->r->opaque, addr, n * PAGE_BYTES);
        }
    }
}

/* Books what became of the pages of a span. */
static unsigned span_account(KsmEngine *e, Isolation *s, bool busy)
{
    KsmPlan *p = &e->plan;
    KsmRegion *r = s->r;
    unsigned merged = 0;

    for (unsigned i = 0; i < s->n; i++) {
        size_t page = s->page + i;
        PlanAct act = p->act[s->at + i];

        switch (act) {
        case ACT_MAP:
            region_leave(r, page, PAGE_MERGED);
            r->tag[page] = p->slot[s->at + i];
            merged++;
            break;
        case ACT_ZERO:
            region_leave(r, page, PAGE_GIVEN);
            merged++;
            break;
        case ACT_CHANGED:
            region_leave(r, page, PAGE_NEW);
            page_mark(r, page, true);
            e->total.verify_failed++;
            r->verify_failed++;
            break;
        case ACT_COLLIDED:
            scan_collided(e, r, page, p->slot[s->at + i]);
            e->total.verify_failed++;
            r->verify_failed++;
            break;
        case ACT_PINNED:
            region_leave(r, page, busy ? PAGE_BUSY : PAGE_PINNED);
            break;
        case ACT_HOLE:
            if (page_state(r, page) != PAGE_GIVEN) {
                region_leave(r, page, PAGE_HOLE);
            }
            break;
        default:
            break;
        }
        p->act[s->at + i] = ACT_KEEP;
    }
    return merged;
}

/* Moving average of a cost; one that was interrupted counts little. */
static void average(uint64_t *to, uint64_t ns)
{
    *to = (*to * 7 + MIN(ns, *to * 3 + 1000)) / 8;
}

/* The isolation is undone: every page back, no page lost. */
static void span_undo(KsmEngine *e, Isolation *s, PlanAct act)
{
    KsmPlan *p = &e->plan;

    put_back(e, s, 0, s->n, act == ACT_PINNED ? BACK_SAME : BACK_ANY);
    for (unsigned i = 0; i < s->n; i++) {
        PlanAct was = p->act[s->at + i];

        if (act_has_slot(was) || was == ACT_ZERO) {
            run_drop(e, s->at + i);
            p->act[s->at + i] = act;
        }
    }
}

static bool act_goes_back(PlanAct act)
{
    return act == ACT_KEEP || act == ACT_CHANGED || act == ACT_COLLIDED;
}

/* One stretch of pages to keep; what that costs is measured. */
static void put_back_some(KsmEngine *e, Isolation *s, unsigned i, unsigned n)
{
    KsmMerge *m = &e->merge;
    bool move = is_moved_back(e, s, n);
    uint64_t t = prim.cpu_ns();

    put_back(e, s, i, n, BACK_ANY);
    t = prim.cpu_ns() - t;
    if (move) {
        average(&m->back_ns, t - MIN(t, n * m->move_ns));
    } else {
        average(&m->copy_ns, t / n);
    }
}

static void put_back_rest(KsmEngine *e, Isolation *s)
{
    const uint8_t *act = e->plan.act + s->at;
    unsigned n;

    for (unsigned i = 0; i < s->n; i += n) {
        n = 0;
        while (i + n < s->n && act_goes_back(act[i + n])) {
            n++;
        }
        if (n) {
            put_back_some(e, s, i, n);
        }
        n = MAX(n, 1);
    }
}

/* After isolation: verify and replace, or undo.  True: the busy op said no. */
static bool span_replace(KsmEngine *e, Isolation *s)
{
    unsigned runs;
    uint64_t t;

    if (region_busy(s->r, page_addr(s->r, s->page), s->n * PAGE_BYTES)) {
        e->total.busy++;
        s->r->busy++;
        span_undo(e, s, ACT_PINNED);
        return true;
    }
    if (s->kinds_known) {
        fill_slots(e, s);
    }
    if (!s->kinds_known || !verify(e, s)) {
        span_undo(e, s, ACT_KEEP);
        return false;
    }
    t = prim.cpu_ns();
    runs = map_runs(e, s);
    if (runs) {
        average(&e->merge.map_ns, (prim.cpu_ns() - t) / runs);
    }
    put_back_rest(e, s);
    return false;
}

/* Registers and moves; false: nothing is staged, all is as before. */
static bool span_isolate(KsmEngine *e, Isolation *s)
{
    UffdRange range = span_range(e, s);
    unsigned mode = UFFD_MISSING | (s->r->tracking ? UFFD_PROTECT : 0);
    int ret = prim.uffd_register(&range, mode);
    bool moved;
    uint64_t t;

    if (ret < 0) {
        chunk_set_reason(s->r, page_chunk(s->r, s->page),
                         ret == -ENOMEM ? KSM_REASON_VMA_LIMIT
                                        : KSM_REASON_NO_MEMORY);
        not_moved(e, s, 0, s->n, ACT_STAY);
        /* part of it may be registered all the same; never another's */
        if (ret != -EBUSY && ret != -EINVAL && ret != -EPERM) {
            registration_undo(e, s);
        }
        return false;
    }
    s->registered = true;
    t = prim.cpu_ns();
    moved = isolate_move(e, s);
    if (s->n >= 2 * SPAN_MIN) {
        average(&e->merge.move_ns, (prim.cpu_ns() - t) / s->n);
    }
    return moved;
}

/*
 * What a page adds to the stall.  Of CPU, not of the clock: for how long we
 * are preempted does not depend on how many pages are staged.  Short spans
 * say little, and what is fixed in their cost would make them shorter still.
 */
static void page_cost(KsmEngine *e, unsigned n, uint64_t cpu_ns)
{
    if (n >= 2 * SPAN_MIN) {
        average(&e->merge.page_ns, cpu_ns / n);
    }
}

/* Isolates, replaces and releases; true if anything was staged. */
static bool span_carry_out(KsmEngine *e, Isolation *s, bool *busy)
{
    uint64_t start = prim.now_ns(), begin = prim.cpu_ns(), cpu, fixed;
    bool moved = span_isolate(e, s);

    fixed = prim.cpu_ns() - begin;
    moved = moved && take_stock(e, s);
    if (moved) {
        *busy = span_replace(e, s);
    }
    cpu = prim.cpu_ns();
    if (s->registered) {
        UffdRange range = span_range(e, s);

        range_release(&range);
    }
    fixed += prim.cpu_ns() - cpu;
    average(&e->merge.isolate_ns,
            fixed - MIN(fixed, s->n * e->merge.move_ns));
    page_cost(e, s->n, prim.cpu_ns() - begin);
    engine_stall(e, prim.now_ns() - start);
    e->total.isolations++;
    return moved;
}

static unsigned span_merge(KsmEngine *e, Isolation *s)
{
    KsmChunk *c = &s->r->chunk[s->page / CHUNK_PAGES];
    bool busy = false, moved;
    unsigned merged;

    allocate_slots(e, s);
    if (!span_has_work(e, s)) {
        return 0;
    }
    moved = span_carry_out(e, s, &busy);
    if (s->registered) {
        span_track(e, s);
    }
    if (moved || (s->huge && s->registered)) {
        /* a move that failed may have left a page table, too */
        bool whole = moved && s->kinds_known && (e->merge.kinds[0] & PM_HUGE);

        e->total.huge_split += s->huge && whole;
        stage_drop(e, s->stage, s->n * PAGE_BYTES, s->huge && !whole);
    }
    if (moved) {
        span_prefault(e, s);
    }
    lost_tell(&e->merge.poisoned, "were lost: the memory they were in failed "
              "while they were isolated; whoever needs them gets a SIGBUS");
    lost_tell(&e->merge.displaced, "were dropped: their owner unmapped them, "
              "or mapped something else there, before ksm_region_remove()");
    for (unsigned i = 0; i < s->n; i++) {
        if (!busy && e->plan.act[s->at + i] == ACT_PINNED) {
            e->total.pinned++;
            s->r->pinned++;
            break;
        }
    }
    merged = span_account(e, s, busy);
    if (merged) {
        c->flags &= ~CHUNK_HUGE;
    }
    return merged;
}

unsigned merge_plan(KsmEngine *e)
{
    KsmPlan *p = &e->plan;
    KsmRegion *r = p->region;
    KsmChunk *c = &r->chunk[p->chunk];
    bool huge = (c->flags & CHUNK_HUGE) && p->n_spans == 1 &&
                p->span[0].n == CHUNK_PAGES;
    unsigned merged = 0;
    sigset_t old;

    prim.signals_block(&old);
    for (unsigned i = 0; i < p->n_spans; i++) {
        PlanSpan *span = &p->span[i];
        Isolation s = {
            .r = r,
            .page = p->chunk * CHUNK_PAGES + span->first,
            .at = span->first,
            .n = span->n,
            .huge = huge,
        };

        s.stage = (huge ? e->merge.huge : e->merge.small) +
                  span->first * PAGE_BYTES;
        merged += span_merge(e, &s);
    }
    prim.signals_restore(&old);
    region_count_runs(r, p->chunk);
    if (p->chunk + 1 < r->n_chunks) {
        region_count_runs(r, p->chunk + 1);
    }
    return merged;
}

/* Every page of the range gets its own copy where it is. */
static int copy_in_place(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    int ret = prim.advise(page_addr(r, page), n * PAGE_BYTES,
                          MADV_POPULATE_WRITE);

    if (ret < 0) {
        return ret == -EFAULT || ret == -EHWPOISON ? ret : -ENOMEM;
    }
    for (size_t i = page; i < page + n; i++) {
        uint32_t slot = r->tag[i];

        if (page_state(r, i) == PAGE_MERGED) {
            region_leave(r, i, PAGE_BROKEN);
            r->tag[i] = slot;
        }
    }
    return 0;
}

/* One page; where it cannot be read, the copy is poisoned like it. */
static int copy_careful_page(KsmEngine *e, char *to, const char *from)
{
    size_t done = 0;
    int ret = -EAGAIN;

    for (unsigned tries = 0; tries < SURE && ret < 0; tries++) {
        ret = prim.uffd_copy(e->uffd, to, from, PAGE_BYTES, &done);
    }
    if (ret != -EFAULT) {
        return ret;
    }
    e->total.poisoned++;
    return prim.uffd_poison(e->uffd, to, PAGE_BYTES);
}

/*
 * Where memory has failed: reading it here would raise SIGBUS; the kernel's
 * copy is told of it by an error.
 */
static int copy_careful(KsmEngine *e, char *copy, const char *from, size_t len)
{
    UffdRange range = { e->uffd, copy, len };
    int ret = prim.uffd_register(&range, UFFD_MISSING);

    for (size_t i = 0; i < len && ret == 0; i += PAGE_BYTES) {
        ret = copy_careful_page(e, copy + i, from + i);
    }
    return ret < 0 ? ret : prim.uffd_unregister(&range);
}

static int copy_plainly(char *copy, const char *from, size_t len)
{
    int ret = prim.advise(copy, len, MADV_POPULATE_WRITE);

    if (ret == 0) {
        KSM_TSAN_IGNORE_BEGIN();
        memcpy(copy, from, len);
        KSM_TSAN_IGNORE_END();
    }
    return ret;
}

/* A private copy of a range whose writers are blocked; *@zero: of zeroes. */
static void *copy_aside(KsmEngine *e, KsmRegion *r, size_t page, size_t len,
                        bool *zero)
{
    char *copy = stage_map(NULL, len, 0), *from = page_addr(r, page);
    bool readable;
    int ret;

    if (!copy) {
        return NULL;
    }
    if (r->policy > 0) {
        /* the memory is to be where the owner wants it; a hint */
        prim.policy_set(copy, len, r->policy, r->policy_mask,
                        sizeof(r->policy_mask) * 8);
    }
    readable = prim.advise(from, len, MADV_POPULATE_READ) == 0;
    ret = readable ? copy_plainly(copy, from, len)
                   : copy_careful(e, copy, from, len);
    if (ret < 0) {
        prim.unmap(copy, len);
        return NULL;
    }
    /* what was copied carefully may not be readable either */
    *zero = readable && copy[0] == 0 && !memcmp(copy, copy + 1, len - 1);
    return copy;
}

/* Moves the copy over the range, whose writers are blocked. */
static int copy_over(void *copy, void *addr, size_t len)
{
    for (unsigned tries = 0; ; tries++) {
        int ret = prim.remap(copy, len, addr);

        if (ret == 0) {
            return 0;
        }
        if (tries > 3 && !range_has_gap(addr, len)) {
            prim.unmap(copy, len);
            return ret;
        }
        prim.pause(tries > 8 ? 1000 : 0);
    }
}

/* Writers of the range may go on. */
static void unblock(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    UffdRange range = { e->uffd_wp, page_addr(r, page), n * PAGE_BYTES };
    unsigned tries = 0;

    while (prim.uffd_protect(&range, false) < 0 && ++tries < 1000) {
        prim.pause(100);
    }
    tries = 0;
    while (prim.uffd_unregister(&range) < 0 && ++tries < 1000) {
        prim.pause(100);
    }
}

/*
 * A mapping that was never populated, nor is part of one that was: between
 * two others while it is made.
 */
static void *map_apart(size_t len, int flags)
{
    char *room = prim.map(NULL, len + 2 * PAGE_BYTES, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *apart = room ? room + PAGE_BYTES : NULL;

    if (!room) {
        return NULL;
    }
    if (!stage_map(apart, len, MAP_FIXED | flags)) {
        prim.unmap(room, len + 2 * PAGE_BYTES);
        return NULL;
    }
    prim.unmap(room, PAGE_BYTES);
    prim.unmap(apart + len, PAGE_BYTES);
    return apart;
}

/*
 * Zeroes need no memory.  A mapping that was never populated becomes part of
 * the one next to it when it is moved there; one that was cannot.
 */
static void *zeroes_aside(const KsmRegion *r, void *copy, size_t len)
{
    prim.unmap(copy, len);
    return map_apart(len, r->map_flags);
}

/* A range whose writers are blocked: back to anonymous memory. */
static int replace_blocked(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    size_t len = n * PAGE_BYTES;
    UffdRange range = { e->uffd_wp, page_addr(r, page), len };
    bool zero = false;
    void *copy = copy_aside(e, r, page, len, &zero);
    int ret;

    copy = zero ? zeroes_aside(r, copy, len) : copy;
    ret = copy ? copy_over(copy, page_addr(r, page), len) : -ENOMEM;
    if (ret < 0) {
        unblock(e, r, page, n);
        return ret;
    }
    /* nobody waits for the books; who is not woken now is by restore_run() */
    prim.uffd_wake(&range);
    for (size_t i = page; i < page + n; i++) {
        region_leave(r, i, zero ? PAGE_GIVEN : PAGE_NEW);
        page_mark(r, i, !zero);
    }
    region_attributes(r, page_addr(r, page), len, ATTR_OWN);
    dirty_track(r, page, n);
    return 0;
}

static bool kind_is_copied(uint8_t kind)
{
    return (kind & (PM_PRESENT | PM_SWAPPED)) && !(kind & PM_FILE);
}

/*
 * While a device may be writing: a page that was copied on write may be what
 * it writes to, and stays.  One that was not cannot be: the device would have
 * had it copied, and from now on it waits for us as any writer does.  Each
 * such part becomes a mapping of its own, so @mappings, what is left of them,
 * is what ends it.
 */
static int replace_clean(KsmEngine *e, KsmRegion *r, size_t page, size_t n,
                         size_t mappings)
{
    int ret = 0, failed = 0;
    unsigned k;

    if (engine_kinds(e, page_addr(r, page), n, KINDS_ALL,
                     e->merge.kinds) < 0) {
        unblock(e, r, page, n);
        return -EBUSY;
    }
    for (unsigned i = 0; i < n; i += k) {
        bool copied = kind_is_copied(e->merge.kinds[i]);

        k = 1;
        while (i + k < n && kind_is_copied(e->merge.kinds[i + k]) == copied) {
            k++;
        }
        if (copied) {
            unblock(e, r, page + i, k);
            ret = -EBUSY;
        } else if (mappings < VMAS_FEW) {
            unblock(e, r, page + i, k);
            failed = -ENOMEM;
        } else {
            int err = replace_blocked(e, r, page + i, k);

            failed = err < 0 ? err : failed;
            mappings -= 2;
            e->vmas.since += 2;
        }
    }
    return failed < 0 ? failed : ret;
}

typedef enum RestoreFor {
    FOR_OWNER,      /* who asks for it, perhaps while merging is inhibited */
    FOR_SCAN,       /* only where merging may go on */
} RestoreFor;

/*
 * May a device hold pages of a range that is write-protected?  Asked now, for
 * an answer from before is none.  Who wants to write to a page, or to pin it
 * for writing, after it was protected waits for us; who did before is what the
 * op has to report, see libksm.h.
 */
static bool restore_is_busy(KsmRegion *r, const UffdRange *range,
                            RestoreFor whom)
{
    return region_busy(r, range->addr, range->len) ||
           (whom == FOR_SCAN && region_inhibited(r));
}

/* A run that maps the pool, within a chunk. */
static int restore_run(KsmEngine *e, KsmRegion *r, size_t page, size_t n,
                       RestoreFor whom)
{
    UffdRange range = { e->uffd_wp, page_addr(r, page), n * PAGE_BYTES };
    /* counted now, while nobody waits */
    size_t mappings = run_vmas_left(e);
    sigset_t old;
    int ret;

    if (whom == FOR_SCAN && mappings < VMAS_FEW) {
        return -ENOMEM;
    }
    if (e->uffd_wp < 0) {
        /* the content gets its own copy; the mapping stays */
        return copy_in_place(e, r, page, n);
    }
    ret = prim.uffd_register(&range, UFFD_PROTECT);
    if (ret < 0) {
        return ret;
    }
    prim.signals_block(&old);
    ret = prim.uffd_protect(&range, true);
    if (ret < 0) {
        unblock(e, r, page, n);
    } else if (restore_is_busy(r, &range, whom)) {
        ret = replace_clean(e, r, page, n, mappings);
    } else {
        ret = replace_blocked(e, r, page, n);
    }
    for (unsigned i = 0; prim.uffd_wake(&range) < 0 && i < 1000; i++) {
        prim.pause(100);
    }
    prim.signals_restore(&old);
    return ret;
}

static int restore_once(KsmEngine *e, KsmRegion *r, size_t page, size_t n,
                        RestoreFor whom)
{
    size_t end = page + n, k;
    int ret = 0, busy = 0;

    for (size_t i = page; i < end && ret == 0; i += k) {
        size_t stop = MIN(end, (i / CHUNK_PAGES + 1) * CHUNK_PAGES);
        bool mapped = page_is_mapped(r, i);

        k = 1;
        while (i + k < stop && page_is_mapped(r, i + k) == mapped) {
            k++;
        }
        if (mapped) {
            ret = restore_run(e, r, i, k, whom);
            busy = ret == -EBUSY ? ret : busy;
            ret = ret == -EBUSY ? 0 : ret;
            region_count_runs(r, i / CHUNK_PAGES);
            r->chunk[i / CHUNK_PAGES].flags |= CHUNK_VISIT;
        }
    }
    if (end < r->n_pages) {
        region_count_runs(r, end / CHUNK_PAGES);
    }
    return ret < 0 ? ret : busy;
}

int merge_restore(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    return restore_once(e, r, page, n, FOR_SCAN);
}

/* Passes over chunks that map nothing, not too many.  The next page to do. */
static size_t skip_unmapped(const KsmRegion *r, size_t page)
{
    size_t chunk = page / CHUNK_PAGES;
    size_t last = MIN(chunk + SKIP_CHUNKS, r->n_chunks);

    while (chunk < last && !r->chunk[chunk].mapped) {
        chunk++;
    }
    return MAX(page, chunk * CHUNK_PAGES);
}

/* One try, chunk by chunk; in between others may have the lock. */
static int unmerge_once(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    size_t end = page + n, stop;
    int ret = 0, busy = 0;

    for (size_t i = page; i < end && ret == 0; i = stop) {
        i = MIN(skip_unmapped(r, i), end);
        stop = MIN((i / CHUNK_PAGES + 1) * CHUNK_PAGES, end);
        if (i < end && r->chunk[i / CHUNK_PAGES].mapped) {
            ret = restore_once(e, r, i, stop - i, FOR_OWNER);
        } else {
            stop = i;   /* there was much to pass over */
        }
        busy = ret == -EBUSY ? ret : busy;
        ret = ret == -EBUSY ? 0 : ret;
        if (stop < end) {
            lock_release(&e->lock);
            lock_take(&e->lock);
        }
    }
    return ret < 0 ? ret : busy;
}

int merge_unmerge(KsmEngine *e, KsmRegion *r, size_t page, size_t n)
{
    int ret;

    r->unmerging++;
    ret = unmerge_once(e, r, page, n);
    /* what a device does to a page mostly takes little time */
    for (unsigned tries = 0; ret == -EBUSY && tries < BUSY_TRIES; tries++) {
        lock_release(&e->lock);
        prim.pause(1000);
        lock_take(&e->lock);
        ret = unmerge_once(e, r, page, n);
    }
    r->unmerging--;
    return ret;
}
