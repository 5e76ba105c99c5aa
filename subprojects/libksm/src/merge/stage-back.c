/*
 * stage: putting pages back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Page tables tell where a page is.  If they are silent, answers to calls for
 * this one page have to do.  (A failed call for several says nothing of any of
 * them: copies to several mappings end with ENOENT, and a move may have moved
 * more than it counts.)  Known of one page, after
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
 *    that nothing is staged: by the tables, or else by calls for this page
 *    alone, SURE times in a row.
 * 2. A page is copied only when it is known to be staged; or, the tables being
 *    silent, where reading the staging area cannot wait for us.  Then a page
 *    not staged is copied as zeroes, as the hole at home reads, and a page at
 *    home refuses the copy (a poison marker does not: so not where the page may
 *    never have been staged, but as the very last way).
 * 3. A page that a device may be writing to (busy) is moved, not copied,
 *    until the owner says that the device is done, asked for that page alone.
 *    A copy made before would lose what the device writes: so only when all
 *    patience is used up, for a guest that waits for ever has lost more.
 * 4. A page is given up as poisoned only when its memory cannot be read, nor
 *    moved.  Its home is poisoned too, or barred where that fails: a reader is
 *    told, and reads no zeroes.
 * 5. A page is given up as displaced only when its home is not what was
 *    registered: a copy tells that, and one from an address where nothing can
 *    be read does nothing else.  What the owner has put there stays.
 * 6. Giving up ends that page; the others are put back all the same.
 * 7. It is tried for ever only where the kernel has memory for no way at all
 *    (a move needs none).
 */
#include <errno.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "merge/stage.h"

#define SURE            16u     /* times that an answer must be the same */
#define UNREADABLE_SURE 1024u   /* ... where only a copy says so: 100 ms */
#define PATIENCE_US     10000000u   /* of an isolation, for devices */

typedef enum Where {
    WHERE_SETTLED,  /* something is at home, or nothing is staged */
    WHERE_STAGED,   /* and nothing is at home */
    WHERE_UNKNOWN,
} Where;

typedef enum BackTry {
    TRY_DONE,
    TRY_AGAIN,
    TRY_SETTLED,    /* the calls say so, the tables are silent */
    TRY_POISONED,
    TRY_UNREADABLE, /* only copying says so */
    TRY_DISPLACED,
} BackTry;

/* @at: bytes from the span's start to the page. */
static Where page_where(KsmStage *g, const Isolation *s, size_t at)
{
    uint8_t staged, home;

    if (kinds_look(g->kinds, s->staged + at, 1, &staged) < 0 ||
        kinds_look(g->kinds, s->home + at, 1, &home) < 0) {
        return WHERE_UNKNOWN;
    }
    return kind_is_populated(staged) && !kind_is_populated(home)
           ? WHERE_STAGED : WHERE_SETTLED;
}

static int page_copy(KsmStage *g, char *home, const char *from)
{
    size_t done = 0;

    return prim.uffd_copy(g->uffd, home, from, PAGE_BYTES, &done);
}

/* Is it safe to copy a page while the tables are silent?  Invariant 2. */
static bool may_copy_unseen(const KsmStage *g, const Isolation *s,
                            int refused, unsigned tries)
{
    return g->wp_async && (s->kinds_known || refused == -EBUSY ||
                           tries > UNREADABLE_SURE);
}

/* @refused: why it cannot be moved.  Invariants 2 and 3. */
static bool may_copy(const KsmStage *g, const Isolation *s, size_t at,
                     int refused)
{
    if (refused == -EFAULT) {
        return true;    /* there is no memory that a device could write to */
    }
    if (refused == -ENOENT && !g->wp_async) {
        return false;   /* who reads a hole in the staging area may wait */
    }
    return !s->busy || s->waited_us >= PATIENCE_US ||
           !s->ops->busy(s->opaque, s->home + at, PAGE_BYTES);
}

static BackTry back_copy(KsmStage *g, const Isolation *s, size_t at,
                         Where where, int refused)
{
    int ret = page_copy(g, s->home + at, s->staged + at);

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
static bool is_displaced(KsmStage *g, char *home)
{
    return page_copy(g, home, g->unreadable) == -ENOENT;
}

bool stage_is_home(KsmStage *g, const Isolation *s, unsigned i)
{
    return !is_displaced(g, s->home + i * PAGE_BYTES);
}

static BackTry back_try(KsmStage *g, const Isolation *s, size_t at,
                        unsigned tries)
{
    Where where = page_where(g, s, at);
    size_t done = 0;
    int ret;

    if (where == WHERE_SETTLED) {
        return TRY_DONE;
    }
    ret = prim.uffd_move(g->uffd, s->home + at, s->staged + at, PAGE_BYTES,
                         &done);
    if (ret == 0) {
        return TRY_DONE;
    }
    if (where == WHERE_UNKNOWN && (ret == -EEXIST || ret == -ENOENT)) {
        return TRY_SETTLED;
    }
    if ((ret == -EINVAL || ret == -ENOENT) && is_displaced(g, s->home + at)) {
        return TRY_DISPLACED;
    }
    if (tries < MOVE_TRIES && (ret == -EAGAIN || s->busy)) {
        return TRY_AGAIN;
    }
    if ((where == WHERE_UNKNOWN && ret != -EFAULT &&
         !may_copy_unseen(g, s, ret, tries)) ||
        !may_copy(g, s, at, ret)) {
        return TRY_AGAIN;
    }
    return back_copy(g, s, at, where, ret);
}

/*
 * The guest is told, by a signal, when it needs this page.  Invariant 4.
 * Returns the page's fate.
 */
static Fate poison_home(KsmStage *g, char *home)
{
    for (unsigned tries = 0; ; tries++) {
        int ret = prim.uffd_poison(g->uffd, home, PAGE_BYTES);

        if (ret == 0 || ret == -EEXIST || ret == -ENOENT) {
            return FATE_POISONED;
        }
        /* or so: whoever reads it is told as well */
        if (tries > 3 && prim.map(home, PAGE_BYTES, PROT_NONE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED |
                                  MAP_NORESERVE, -1, 0)) {
            return FATE_BARRED;
        }
        prim.pause(tries > 8 ? 1000 : 0);
    }
}

/* The user is told later, when nobody waits. */
static void page_lost(KsmStage *g, Isolation *s, unsigned i, BackTry why)
{
    bool displaced = why == TRY_DISPLACED;
    char *home = s->home + i * PAGE_BYTES;
    KsmLost *lost = displaced ? &g->displaced : &g->poisoned;

    lost->addr = lost->pages++ ? lost->addr : home;
    s->fate[i] = displaced ? FATE_DISPLACED : poison_home(g, home);
}

/* Both say that the page's memory failed, one of them more surely. */
static bool is_lost(BackTry told)
{
    return told == TRY_POISONED || told == TRY_UNREADABLE;
}

/* Returns when page @i is at home, or given up. */
static void put_back_one(KsmStage *g, Isolation *s, unsigned i)
{
    BackTry last = TRY_AGAIN;
    unsigned sure = 0;      /* of @last, in UNREADABLE_SURE */

    for (unsigned tries = 0; ; tries++) {
        BackTry told = back_try(g, s, i * PAGE_BYTES, tries);

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
                page_lost(g, s, i, told);
            }
            return;
        }
        if (tries > 2 * SURE) {
            prim.pause(100);
            s->waited_us += 100;
        }
    }
}

/* Pages to be put back from @i on, up to @end. */
static unsigned staged_run(const Isolation *s, unsigned i, unsigned end)
{
    unsigned n = 0;

    if (!s->kinds_known) {
        return end - i;
    }
    while (i + n < end && (s->fate[i + n] == FATE_STAGED ||
                           s->fate[i + n] == FATE_BACK)) {
        n++;
    }
    return n;
}

/*
 * Moving costs a shootdown, copying a page for each page.  A staged huge page
 * would have to be split to be moved in part.
 */
static bool is_moved_back(const KsmStage *g, const Isolation *s, unsigned n)
{
    return !s->huge && n * g->costs->copy_ns > g->costs->back_ns;
}

void stage_put_back(KsmStage *g, Isolation *s, unsigned i, unsigned n)
{
    bool move = !s->kinds_known || n == CHUNK_PAGES || s->busy ||
                is_moved_back(g, s, n);
    unsigned end = i + n, tries = 0, piece = n;

    while (i < end) {
        unsigned k = staged_run(s, i, MIN(end, i + piece));
        char *to = s->home + i * PAGE_BYTES;
        char *from = s->staged + i * PAGE_BYTES;
        size_t done = 0;
        int ret;

        if (!k) {
            i++;
            continue;
        }
        ret = move ? prim.uffd_move(g->uffd, to, from, k * PAGE_BYTES, &done)
                   : prim.uffd_copy(g->uffd, to, from, k * PAGE_BYTES, &done);
        i += done / PAGE_BYTES;
        if (ret == 0 || done) {
            tries = 0;
            piece = ret == 0 ? MIN(2 * piece, n) : piece;
        } else if (ret == -EAGAIN && ++tries < MOVE_TRIES) {
            continue;
        } else if (k > 1) {
            piece = k / 2;
        } else {
            put_back_one(g, s, i++);
            tries = 0;
        }
    }
}

/* Those of one kind, so that the clock is not asked for each of them. */
static void runs_keep(KsmStage *g, Isolation *s, const StageRun *run,
                      unsigned n, bool move)
{
    unsigned runs = 0, pages = 0;
    uint64_t t;

    for (unsigned i = 0; i < n; i++) {
        if (is_moved_back(g, s, run[i].n) != move) {
            continue;
        }
        stage_put_back(g, s, run[i].first, run[i].n);
        pages += run[i].n;
        runs++;
    }
    if (!runs) {
        return;
    }
    t = isolation_lap(s);
    if (move) {
        s->spent.back_ns += t;
        s->spent.back_pages += pages;
        s->spent.backs += runs;
    } else {
        s->spent.copy_ns += t;
        s->spent.copies += pages;
    }
}

void stage_keep(KsmStage *g, Isolation *s, const StageRun *run, unsigned n)
{
    runs_keep(g, s, run, n, false);
    runs_keep(g, s, run, n, true);
}
