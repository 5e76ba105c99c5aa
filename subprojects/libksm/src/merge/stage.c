/*
 * stage: taking pages out of a guest's reach
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * See stage.h.  Putting them back: stage-back.c.
 */
#include <errno.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "memory/attr.h"
#include "merge/stage.h"

static int stage_prepare(KsmStage *g, char *area)
{
    UffdRange range = { g->uffd, area, CHUNK_BYTES };

    prim.advise(area, CHUNK_BYTES, MADV_DONTFORK);
    prim.advise(area, CHUNK_BYTES, MADV_DONTDUMP);
    prim.advise(area, CHUNK_BYTES, area == g->huge ? MADV_HUGEPAGE
                                                   : MADV_NOHUGEPAGE);
    /*
     * UFFDIO_MOVE wants the target to be registered, no matter for what.  Not
     * for missing pages, if that can be had: a page that was freed lazily may
     * be reclaimed while it is staged, and reading it would wait for ever.
     */
    return prim.uffd_register(&range, g->wp_async ? UFFD_PROTECT
                                                  : UFFD_MISSING);
}

int stage_init(KsmStage *g)
{
    uintptr_t at;
    int ret;

    g->map_len = 4 * CHUNK_BYTES;
    g->map = anonymous_map(NULL, g->map_len, MAP_NORESERVE);
    if (!g->map) {
        return -ENOMEM;
    }
    at = ROUND_UP_TO((uintptr_t)g->map, CHUNK_BYTES);
    g->small = (char *)at;
    g->huge = (char *)at + CHUNK_BYTES;
    g->unreadable = g->map + g->map_len - PAGE_BYTES;
    if (!prim.map(g->unreadable, PAGE_BYTES, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
                  -1, 0)) {
        return -ENOMEM;
    }
    ret = stage_prepare(g, g->small);
    return ret < 0 ? ret : stage_prepare(g, g->huge);
}

void stage_close(KsmStage *g)
{
    if (g->map) {
        prim.unmap(g->map, g->map_len);
    }
}

/* Another area in the place of the one that @at is in. */
static bool area_renew(KsmStage *g, const char *at)
{
    char *area = at < g->huge ? g->small : g->huge;

    return anonymous_map(area, CHUNK_BYTES, MAP_FIXED | MAP_NORESERVE) &&
           stage_prepare(g, area) == 0;
}

/* Its page tables are in the way of moving a huge page: they go, too. */
static void area_empty_tables(KsmStage *g, char *at)
{
    /* once it was mapped anew it has to be prepared: nothing else will do */
    for (unsigned tries = 0; !area_renew(g, at); tries++) {
        if (tries > 8) {
            prim.pause(1000);
        }
    }
}

/*
 * Repeated until it works: a staged page that stayed would be in the way of the
 * next one.
 */
static void area_empty(KsmStage *g, char *at, size_t len)
{
    for (unsigned tries = 0; tries < 4; tries++) {
        if (prim.advise(at, len, MADV_DONTNEED) == 0) {
            return;
        }
    }
    area_empty_tables(g, at);
}

void stage_clean(KsmStage *g, const Isolation *s, bool staged)
{
    bool whole = staged && s->kinds_known && (g->staged[0] & PM_HUGE);

    if (s->huge && !whole && s->registered) {
        /* a move that failed may have left a page table, too */
        area_empty_tables(g, s->at);
    } else if (staged) {
        g->huge_split += s->huge;
        area_empty(g, s->at, s->n * PAGE_BYTES);
    }
}

static UffdRange span_range(const KsmStage *g, const Isolation *s)
{
    return (UffdRange) {
        .fd = g->uffd,
        .addr = page_addr(s->r, s->page),
        .len = s->n * PAGE_BYTES,
    };
}

/* Pages [at, at + n) of the span were not isolated. */
static void not_moved(Isolation *s, unsigned at, unsigned n, Fate fate)
{
    memset(s->fate + at, fate, n);
}

static Fate fate_refused(Isolation *s, int ret)
{
    if (ret == -ENOMEM) {
        chunk_set_reason(s->r, page_chunk(s->r, s->page),
                         KSM_REASON_NO_MEMORY);
    }
    return ret == -EBUSY || ret == -EAGAIN ? FATE_PINNED : FATE_STAY;
}

/* What is populated where the span belongs: it can only become less. */
static bool look_home(KsmStage *g, Isolation *s)
{
    s->home_known = kinds_look(g->kinds, page_addr(s->r, s->page), s->n,
                               g->home) == 0;
    return s->home_known;
}

static bool is_known_hole(const KsmStage *g, const Isolation *s, unsigned i)
{
    PageState state = page_state(s->r, s->page + i);

    if (s->home_known) {
        return !kind_is_populated(g->home[i]);
    }
    return state == PAGE_HOLE || state == PAGE_GIVEN;
}

/* Pages from @i on, up to @end, that are not known to be holes. */
static unsigned populated_run(const KsmStage *g, const Isolation *s,
                              unsigned i, unsigned end)
{
    unsigned n = 0;

    while (i + n < end && !is_known_hole(g, s, i + n)) {
        n++;
    }
    return n;
}

/*
 * Moves the span out.  Pages that cannot be moved are marked FATE_STAY or
 * FATE_PINNED, which stage_take_stock() takes back if they were moved all the
 * same.  False: nothing can be staged.
 *
 * EINVAL: the range is in several mappings (parts were restored before); it
 * is moved in smaller pieces, that grow again.  EFAULT: a marker in the page
 * table.  EEXIST: moved, though not counted, or somebody read the staging area.
 * ENOENT: a hole.
 */
static bool isolate_move(KsmStage *g, Isolation *s)
{
    unsigned at = 0, tries = 0, piece = s->n;
    bool called = false;

    while (at < s->n) {
        unsigned n = populated_run(g, s, at, MIN(s->n, at + piece));
        size_t done = 0;
        int ret;

        if (!n) {
            at++;
            continue;
        }
        called = true;
        ret = prim.uffd_move(g->uffd, stage_page(s, at),
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
                look_home(g, s);
            }
            at++;
            tries = 0;
        } else if (s->huge && at == 0) {
            /* do not break a huge page around the one that is pinned */
            not_moved(s, 0, s->n, fate_refused(s, ret));
            break;
        } else if (ret == -EINVAL && n > 1) {
            piece = n / 2;
        } else if (ret == -EBUSY || ret == -EAGAIN || ret == -EFAULT ||
                   ret == -EINVAL) {
            not_moved(s, at++, 1, fate_refused(s, ret));
            tries = 0;
        } else {
            /* not about this page: do not try the others */
            not_moved(s, at, s->n - at, fate_refused(s, ret));
            break;
        }
    }
    return called;
}

/* -EINVAL: there is something that cannot have been registered. */
static int unregister(const UffdRange *range)
{
    unsigned tries = 0;
    int ret;

    /* even usleep(0) sleeps about 50 us, and threads wait */
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

void stage_release(KsmStage *g, Isolation *s)
{
    UffdRange range = span_range(g, s);

    if (s->registered) {
        range_release(&range);
    }
}

/*
 * How far a registration may have come that failed.  The kernel goes from
 * mapping to mapping, and splits the first and the last: where it could not,
 * nothing is registered from there on.  To unregister that part, which may be
 * tracked, would have it split again, and fail for ever.
 */
static size_t registered_part(const KsmStage *g, const UffdRange *range)
{
    char *from = range->addr, *to = from + range->len, *start, *end;

    if (vmas_at(g->vmas, from, &start, &end) && start < from) {
        return 0;
    }
    if (vmas_at(g->vmas, to - 1, &start, &end) && end > to) {
        return MAX(start, from) - from;
    }
    return range->len;
}

static void registration_undo(const KsmStage *g, Isolation *s)
{
    UffdRange range = span_range(g, s);

    if (prim.uffd_unregister(&range) < 0) {
        range.len = registered_part(g, &range);
    }
    if (range.len) {
        range_release(&range);
    }
    s->untracked = true;
}

bool stage_isolate(KsmStage *g, Isolation *s)
{
    UffdRange range = span_range(g, s);
    unsigned mode = UFFD_MISSING | (s->r->tracking ? UFFD_PROTECT : 0);
    int ret = prim.uffd_register(&range, mode);
    bool moved;
    uint64_t t;

    s->at = (s->huge ? g->huge : g->small) +
            s->page % CHUNK_PAGES * PAGE_BYTES;
    if (ret < 0) {
        chunk_set_reason(s->r, page_chunk(s->r, s->page),
                         ret == -ENOMEM ? KSM_REASON_VMA_LIMIT
                                        : KSM_REASON_NO_MEMORY);
        not_moved(s, 0, s->n, FATE_STAY);
        /* part of it may be registered all the same; never another's */
        if (ret != -EBUSY && ret != -EINVAL && ret != -EPERM) {
            registration_undo(g, s);
        }
        return false;
    }
    s->registered = true;
    t = prim.cpu_ns();
    moved = isolate_move(g, s);
    if (s->n >= 2 * SPAN_MIN) {
        cost_average(&g->costs->move_ns, (prim.cpu_ns() - t) / s->n);
    }
    if (!moved) {
        not_moved(s, 0, s->n, FATE_HOLE);
    }
    return moved;
}

/*
 * The page tables tell, whatever failed moves said: what is no longer at home.
 * A page that is at both places was never moved; somebody has read the staging
 * area (a debugger), and the kernel put zeroes there.
 */
bool stage_take_stock(KsmStage *g, Isolation *s)
{
    bool any = false;

    for (unsigned tries = 0; tries < 4 && !s->kinds_known; tries++) {
        s->kinds_known = (!s->failed || look_home(g, s)) &&
                         kinds_look(g->kinds, s->at, s->n, g->staged) == 0;
    }
    for (unsigned i = 0; i < s->n && s->kinds_known; i++) {
        bool left = s->fate[i] == FATE_STAY || s->fate[i] == FATE_PINNED;

        any |= kind_is_populated(g->staged[i]);
        if (!kind_is_populated(g->staged[i])) {
            s->fate[i] = left ? s->fate[i] : FATE_HOLE;
        } else if (s->failed && kind_is_populated(g->home[i])) {
            s->fate[i] = left ? s->fate[i] : FATE_STAY;
        } else if (left || !(g->staged[i] & PM_PRESENT)) {
            /* moved all the same; or swapped out, or poisoned */
            s->fate[i] = FATE_BACK;
        }
    }
    return any || !s->kinds_known;
}
