/*
 * stage: taking pages out of a guest's reach
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Putting them back: stage-back.c.
 */
#include <errno.h>
#include <inttypes.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "merge/stage.h"

#define EMPTYING_MIN    (64 * PAGE_BYTES)   /* not in pieces: 20 us */

static void *area_map(void *at, size_t len, int prot, int flags)
{
    return prim.map(at, len, prot,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

static int stage_prepare(KsmStage *g, char *area)
{
    UffdRange range = { g->uffd, area, CHUNK_BYTES };

    prim.advise(area, CHUNK_BYTES, MADV_DONTFORK);
    prim.advise(area, CHUNK_BYTES, MADV_DONTDUMP);
    if (prim.merge_any()) {
        /* what ksmd merges cannot be moved back */
        prim.advise(area, CHUNK_BYTES, MADV_UNMERGEABLE);
    }
    prim.advise(area, CHUNK_BYTES, area == g->huge ? MADV_HUGEPAGE
                                                   : MADV_NOHUGEPAGE);
    /*
     * UFFDIO_MOVE wants a registered target, no matter for what.  Missing pages
     * are the second choice: one that was freed lazily may be reclaimed while
     * it is staged, and reading it would wait for ever.
     */
    return prim.uffd_register(&range, g->wp_async ? UFFD_PROTECT
                                                  : UFFD_MISSING);
}

/* Until Linux 6.16 a page that is swapped in while it is moved may be lost. */
static bool kernel_loses_swap(void)
{
    return prim_kernel() < 6016;
}

int stage_init(KsmStage *g)
{
    uintptr_t at;
    int ret;

    g->swap_stays = kernel_loses_swap();
    g->map_len = 4 * CHUNK_BYTES;
    g->map = area_map(NULL, g->map_len, PROT_READ | PROT_WRITE, 0);
    if (!g->map) {
        return -ENOMEM;
    }
    at = ROUND_UP_TO((uintptr_t)g->map, CHUNK_BYTES);
    g->small = (char *)at;
    g->huge = (char *)at + CHUNK_BYTES;
    g->unreadable = g->map + g->map_len - PAGE_BYTES;
    if (!area_map(g->unreadable, PAGE_BYTES, PROT_NONE, MAP_FIXED)) {
        return -ENOMEM;
    }
    ret = stage_prepare(g, g->small);
    return ret < 0 ? ret : stage_prepare(g, g->huge);
}

/* Another area in the place of the one that @at is in. */
static bool area_renew(KsmStage *g, const char *at)
{
    char *area = at < g->huge ? g->small : g->huge;

    return area_map(area, CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_FIXED) &&
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

/* Until it works: a page that stayed would be in the next one's way. */
static void area_empty(void *opaque)
{
    const EmptyingPiece *p = opaque;
    KsmStage *g = p->stage;

    for (unsigned tries = 0; tries < 4 && !g->emptying.tables; tries++) {
        if (prim.advise(p->at, p->len, MADV_DONTNEED) == 0) {
            return;
        }
    }
    area_empty_tables(g, p->at);
}

/* What is staged may go, with what is to go already. */
static void span_goes(KsmStage *g, const Isolation *s)
{
    StageEmptying *m = &g->emptying;
    char *end = s->staged + s->n * PAGE_BYTES;
    /* a move that failed may have left a page table, too */
    bool tables = s->huge && !s->whole && s->registered;

    if (!s->any && !tables) {
        return;
    }
    /* stage_ready(): these are alone in their area */
    g_assert(!m->due || (!s->huge && !m->tables));
    g->huge_split += s->huge && !tables;
    m->len = m->due ? MAX(m->at + m->len, end) - MIN(m->at, s->staged)
                    : s->n * PAGE_BYTES;
    m->at = m->due ? MIN(m->at, s->staged) : s->staged;
    m->tables = tables;
    m->due = true;
}

static void emptying_give(KsmStage *g, char *at, size_t len)
{
    EmptyingPiece *p = &g->emptying.piece[g->emptying.n++];

    g_assert(g->emptying.n <= EMPTYING_PIECES);
    *p = (EmptyingPiece) {
        .chore = { .work = area_empty, .opaque = p },
        .stage = g,
        .at = at,
        .len = len,
    };
    crew_give(g->crew, &p->chore);
}

void stage_empty(KsmStage *g)
{
    StageEmptying *m = &g->emptying;
    size_t half = ROUND_UP_TO(m->len / 2, PAGE_BYTES);

    if (!m->due) {
        return;
    }
    m->due = false;
    /* a huge page goes as one */
    if (!crew_helps(g->crew) || m->len < EMPTYING_MIN || m->at >= g->huge) {
        emptying_give(g, m->at, m->len);
    } else {
        emptying_give(g, m->at, half);
        emptying_give(g, m->at + half, m->len - half);
    }
}

static void stage_emptied(KsmStage *g)
{
    StageEmptying *m = &g->emptying;

    stage_empty(g);
    /* what is given first is begun first */
    while (m->n) {
        crew_wait(g->crew, &m->piece[--m->n].chore);
    }
}

static void stage_ready(KsmStage *g, const Isolation *s)
{
    const StageEmptying *m = &g->emptying;
    const char *end = s->staged + s->n * PAGE_BYTES;

    /* what is to go from where else in the area can wait */
    if (!m->due || s->huge || m->tables ||
        (s->staged < m->at + m->len && m->at < end)) {
        stage_emptied(g);
    }
}

void stage_close(KsmStage *g)
{
    stage_emptied(g);
    if (g->map) {
        prim.unmap(g->map, g->map_len);
    }
}

static UffdRange span_range(const KsmStage *g, const Isolation *s)
{
    return (UffdRange) { g->uffd, s->home, s->n * PAGE_BYTES };
}

static void not_moved(Isolation *s, unsigned at, unsigned n, Fate fate)
{
    memset(s->fate + at, fate, n);
}

static Fate fate_refused(Isolation *s, int ret)
{
    if (ret == -ENOMEM) {
        s->why = KSM_REASON_NO_MEMORY;
    }
    return ret == -EBUSY || ret == -EAGAIN ? FATE_PINNED : FATE_STAY;
}

static bool look(KsmStage *g, const Isolation *s, const char *at,
                 uint8_t *kinds)
{
    return kinds_look(g->kinds, at, s->n, kinds) == 0;
}

/* What is populated where the span belongs: it can only become less. */
static bool look_home(KsmStage *g, Isolation *s)
{
    uint8_t kinds[CHUNK_PAGES];

    s->home_known = look(g, s, s->home, kinds);
    for (unsigned i = 0; i < s->n && s->home_known; i++) {
        s->hole[i] = !kind_is_populated(kinds[i]);
    }
    return s->home_known;
}

/* Pages from @i on, up to @end, that are not known to be holes, or to stay. */
static unsigned movable_run(const Isolation *s, unsigned i, unsigned end)
{
    unsigned n = 0;

    while (i + n < end && !s->hole[i + n] && s->fate[i + n] != FATE_STAY) {
        n++;
    }
    return n;
}

/*
 * Moves the span out.  Pages that cannot be moved become FATE_STAY or
 * FATE_PINNED; take_stock() corrects that if they were moved all the same.
 * False: nothing can be staged.
 *
 * EINVAL: several mappings (parts were restored before): moved in smaller
 * pieces, that grow again.  EFAULT: a marker in the page table.  EEXIST: moved,
 * though not counted, or somebody read the staging area.  ENOENT: a hole.
 */
static bool isolate_move(KsmStage *g, Isolation *s)
{
    unsigned at = 0, tries = 0, piece = s->n;
    bool called = false;

    while (at < s->n) {
        unsigned n = movable_run(s, at, MIN(s->n, at + piece));
        size_t done = 0;
        int ret;

        if (!n) {
            at++;
            continue;
        }
        called = true;
        ret = prim.uffd_move(g->uffd, s->staged + at * PAGE_BYTES,
                             s->home + at * PAGE_BYTES, n * PAGE_BYTES, &done);
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
        /* the pages are at home: who needs one can go on */
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
 * How far a failed registration may have come.  The kernel goes from mapping to
 * mapping, and splits the first and the last: where it could not, nothing is
 * registered from there on.  Unregistering that part, which may be tracked,
 * would split again, and fail for ever.
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
}

/* What was swapped out since the last look stays; all, if nobody can tell. */
static void leave_swapped(KsmStage *g, Isolation *s)
{
    uint8_t kinds[CHUNK_PAGES];

    if (!g->swap_stays) {
        return;
    }
    if (!look(g, s, s->home, kinds)) {
        not_moved(s, 0, s->n, FATE_STAY);
        return;
    }
    for (unsigned i = 0; i < s->n; i++) {
        if (kind_is_populated(kinds[i]) && !(kinds[i] & PM_PRESENT)) {
            s->fate[i] = FATE_STAY;
        }
    }
}

static bool span_register(KsmStage *g, Isolation *s)
{
    UffdRange range = span_range(g, s);
    unsigned mode = UFFD_MISSING | (s->tracked ? UFFD_PROTECT : 0);
    int ret = prim.uffd_register(&range, mode);

    s->registered = s->untracked = ret == 0;
    if (ret < 0) {
        s->why = ret == -ENOMEM ? KSM_REASON_VMA_LIMIT : KSM_REASON_NO_MEMORY;
        not_moved(s, 0, s->n, FATE_STAY);
        /* part of it may be registered all the same; never another's */
        if (ret != -EBUSY && ret != -EINVAL && ret != -EPERM) {
            registration_undo(g, s);
            s->untracked = true;
        }
    }
    return ret == 0;
}

uint64_t isolation_lap(Isolation *s)
{
    uint64_t was = s->cpu;

    s->cpu = prim.cpu_ns();
    return s->cpu - was;
}

static bool take_out(KsmStage *g, Isolation *s)
{
    bool moved;

    if (!span_register(g, s)) {
        return false;
    }
    /* while that waited for the lock of the address space, no page was away */
    s->began_ns = prim.now_ns();
    leave_swapped(g, s);
    s->spent.isolate_ns = isolation_lap(s);
    moved = isolate_move(g, s);
    s->spent.move_ns = isolation_lap(s);
    s->spent.isolate_ns += s->spent.move_ns;
    if (s->n < 2 * SPAN_MIN) {
        s->spent.move_ns = 0;
    }
    for (unsigned i = 0; i < s->n && !moved; i++) {
        s->fate[i] = s->fate[i] == FATE_STAY ? FATE_STAY : FATE_HOLE;
    }
    return moved;
}

/* Page tables tell what moved; a page at both places did not: stage.h, 3. */
static bool take_stock(KsmStage *g, Isolation *s)
{
    uint8_t kinds[CHUNK_PAGES];
    bool any = false;

    for (unsigned tries = 0; tries < 4 && !s->kinds_known; tries++) {
        s->kinds_known = (!s->failed || look_home(g, s)) &&
                         look(g, s, s->staged, kinds);
    }
    for (unsigned i = 0; i < s->n && s->kinds_known; i++) {
        bool left = s->fate[i] == FATE_STAY || s->fate[i] == FATE_PINNED;

        any |= kind_is_populated(kinds[i]);
        if (!kind_is_populated(kinds[i])) {
            s->fate[i] = left && !s->hole[i] ? s->fate[i] : FATE_HOLE;
        } else if (s->failed && !s->hole[i]) {
            s->fate[i] = left ? s->fate[i] : FATE_STAY;
        } else if (left || !(kinds[i] & PM_PRESENT)) {
            /* moved all the same; or swapped out, or poisoned */
            s->fate[i] = FATE_BACK;
        }
    }
    s->whole = s->kinds_known && (kinds[0] & PM_HUGE);
    return any || !s->kinds_known;
}

bool stage_isolate(KsmStage *g, Isolation *s)
{
    bool moved;

    s->staged = (s->huge ? g->huge : g->small) +
                (uintptr_t)s->home % CHUNK_BYTES;
    stage_ready(g, s);
    /* memory may be found for slots meanwhile, but not while any is filled */
    urgent_begin_beside(g->urgent);
    s->began_ns = prim.now_ns();
    s->began_cpu = s->cpu = prim.cpu_ns();
    moved = take_out(g, s);
    s->spent.n = s->n;
    s->any = moved && take_stock(g, s);
    if (moved && !s->any) {
        isolation_lap(s);   /* to look is not to isolate */
    }
    s->busy = s->any && s->ops && s->ops->busy &&
              s->ops->busy(s->opaque, s->home, s->n * PAGE_BYTES);
    return s->any;
}

static void lost_tell(KsmLost *lost, const char *text)
{
    if (lost->pages && !lost->told) {
        lost->told = true;
        g_warning("libksm: %" PRIu64 " page(s) at %p %s", lost->pages,
                  lost->addr, text);
    }
}

void stage_release(KsmStage *g, Isolation *s)
{
    UffdRange range = span_range(g, s);

    if (s->registered) {
        /* unregistering waits for the lock of the address space */
        prim.uffd_wake(&range);
        s->spent.stall_ns = prim.now_ns() - s->began_ns;
        range_release(&range);
    }
    if (!s->registered || s->gaps || memchr(s->fate, FATE_HOLE, s->n)) {
        /* who touched a hole has been waiting until now */
        s->spent.stall_ns = prim.now_ns() - s->began_ns;
    }
    s->spent.isolate_ns += isolation_lap(s);
    s->spent.cpu_ns = s->cpu - s->began_cpu;
    urgent_end(g->urgent);
    span_goes(g, s);
    if (!crew_helps(g->crew)) {
        stage_empty(g);
    }
    lost_tell(&g->poisoned, "were lost: the memory they were in failed "
              "while they were isolated; whoever needs them gets a signal");
    lost_tell(&g->displaced, "were dropped: their owner unmapped them, "
              "or mapped something else there, before ksm_region_remove()");
}
