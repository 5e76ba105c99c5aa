/*
 * libksm tests: what others do amid work on a chunk
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Where the engine asks whether a device is busy, which it does with the lock
 * held and pages staged, another thread is made to wait for that lock: it has
 * it the next time that the engine gives it up.
 */
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/prim.h"
#include "engine/state.h"
#include "house.h"

#define CHUNK_OF    (CHUNK / PAGE)
#define LAST        (CHUNK_OF / 16) /* pages at a chunk's end */

/* The other thread: what it does, and where the engine was. */
static struct {
    Pair p;
    void (*act)(void);
    bool early;             /* before the chunk is hashed, not when staged */
    bool second;            /* not in a region's first chunk */
    bool removing;          /* it removes the region */
    bool vain;              /* a device is at the first span */
    bool began;
    pthread_t thread;
    Mem *m;                 /* the chunk that is worked on */
    KsmRegion *r;
    size_t page;            /* its first one */
    unsigned first;         /* pages of its first span */
    unsigned isolated;      /* further ones, since */
    uint64_t scanned;       /* pages, when it had the lock */
    uint64_t isolations, runs;
    unsigned planned;       /* spans of the last plan */
    int child[2];
    pid_t pid;
} other;

static void *other_main(void *opaque)
{
    other.act();
    return NULL;
}

static void other_begin(Mem *m, size_t page)
{
    other.began = true;
    other.m = m;
    other.r = m == other.p.a ? other.p.ra : other.p.rb;
    other.page = page / CHUNK_OF * CHUNK_OF;
    other.first = other.p.e->plan.span[0].n;
    g_assert(pthread_create(&other.thread, NULL, other_main, NULL) == 0);
    util_awaited(&other.p.e->lock, 1);
}

static bool busy(void *opaque, void *addr, size_t len)
{
    Mem *m = opaque;
    size_t page = ((char *)addr - m->addr) / PAGE;

    if (other.act && !other.began && !other.early &&
        (page >= CHUNK_OF || !other.second)) {
        other_begin(m, page);
        return other.vain;
    } else if (other.began && !pthread_equal(pthread_self(), other.thread) &&
               m == other.m &&
               page / CHUNK_OF == other.page / CHUNK_OF) {
        other.isolated++;
    }
    return mem_ops.busy(opaque, addr, len);
}

/* The chunk that the pass visits now, and has not hashed: it will be ripe. */
static bool is_visited(const KsmScan *s)
{
    const KsmChunk *c = s->region && s->chunk ? &s->region->chunk[s->chunk - 1]
                                              : NULL;

    return s->pass > 1 && s->phase >= PHASE_GOOD && c &&
           (c->flags & CHUNK_VISIT) && c->visited_in == s->pass + 1;
}

static const char *inhibited(void *opaque)
{
    const char *why = mem_ops.inhibited(opaque);
    const KsmScan *s = &other.p.e->scan;

    if (other.act && other.early && !other.began && is_visited(s) &&
        s->region == other.p.rb) {
        other_begin(opaque, (s->chunk - 1) * CHUNK_OF);
    }
    return why;
}

/* As a plan ends that was cut short: who removes the region waits. */
static void restore_removed(const sigset_t *old)
{
    if (other.began && !pthread_equal(pthread_self(), other.thread)) {
        /* nothing finds it any more, and it is all there */
        g_assert(other.p.e->regions->len == 1);
        g_assert(other.r->chunk[other.page / CHUNK_OF].held == CHUNK_OF);
    }
    prim_real.signals_restore(old);
}

static KsmRegionOps ops;

/* Step by step, until the other thread was there, and has done it. */
static bool other_goes(void (*act)(void), bool early)
{
    KsmPrim was;

    ops = mem_ops;
    ops.busy = busy;
    ops.inhibited = inhibited;
    if (!pair_start(&other.p, KSM_SCOPE_VM, KSM_DIRTY_PAGEMAP, &ops,
                    MEM_SMALL)) {
        return false;
    }
    other.act = act;
    other.early = early;
    was = prim;
    prim.signals_restore = other.removing ? restore_removed
                                          : was.signals_restore;
    while (!other.began) {
        /* a chunk is to be several spans, however slow the machine */
        other.p.e->costs = costs_guess;
        g_assert(ksm_step(other.p.e, 1) >= 0);
    }
    g_assert(pthread_join(other.thread, NULL) == 0);
    prim = was;
    return true;
}

static bool turn_start(void (*act)(void), bool early)
{
    memset(&other, 0, sizeof(other));
    return other_goes(act, early);
}

static void turns_end(void)
{
    /* all that is left is merged, in its time */
    util_passes(other.p.e, 12);
    g_assert(util_stats(other.p.e).pages_sharing + LAST >= PAIR_PAGES);
    pair_end(&other.p);
}

static unsigned mapped(void)
{
    return other.r->chunk[other.page / CHUNK_OF].mapped;
}

static void act_look(void)
{
    KsmEngine *e = other.p.e;

    lock_take(&e->lock);
    /* that thread waits for its turn, whatever it is that keeps it */
    g_assert(e->turn.amid == other.r && e->lock.next - e->lock.serving == 2);
    other.scanned = e->total.pages_scanned;
    other.isolations = e->merge.isolations;
    other.planned = e->plan.n_spans;
    other.runs = other.r->runs;
    region_check(other.r);
    lock_release(&e->lock);
}

/* Nobody waits longer than for a span. */
static void test_span(void)
{
    if (!turn_start(act_look, false)) {
        return;
    }
    g_assert(other.isolations == 1 && other.runs == 1);
    g_assert(other.r->runs >= 1 && other.r->runs <= 1 + other.isolated);
    region_count_runs(other.r, other.page / CHUNK_OF);
    g_assert(other.r->runs == other.r->chunk[other.page / CHUNK_OF].runs);
    region_check(other.r);
    g_assert(other.isolated > 0 && mapped() == CHUNK_OF);
    turns_end();
}

/* Nor until what was hashed is merged. */
static void test_hashed(void)
{
    if (!turn_start(act_look, true)) {
        return;
    }
    g_assert(other.scanned == PAIR_PAGES + CHUNK_OF);
    g_assert(other.planned == 0 && mapped() == CHUNK_OF);
    turns_end();
}

static void discard(size_t page, size_t n)
{
    g_assert(ksm_discard(other.r, page * PAGE, n * PAGE) == 0);
    mem_gone(other.m, page, n);
}

static void act_discard(void)
{
    discard(other.page + CHUNK_OF - LAST, LAST);
}

/* What others discard of a chunk ends its plan; the rest is merged soon. */
static void test_discard(void)
{
    KsmChunk *c;

    if (!turn_start(act_discard, false)) {
        return;
    }
    c = &other.r->chunk[other.page / CHUNK_OF];
    g_assert(other.isolated == 0 && mapped() == other.first);
    g_assert(c->wait == 0 && (c->flags & CHUNK_QUEUED));
    mem_check(other.m);
    region_check(other.r);
    for (unsigned i = 0; i < 8 && mapped() == other.first; i++) {
        g_assert(ksm_step(other.p.e, 1) >= 0);
    }
    g_assert(mapped() == CHUNK_OF - LAST);
    turns_end();
}

/* One of which nothing was merged is tried in a later pass. */
static void test_vain(void)
{
    KsmChunk *c;

    memset(&other, 0, sizeof(other));
    other.vain = true;
    if (!other_goes(act_discard, false)) {
        return;
    }
    c = &other.r->chunk[other.page / CHUNK_OF];
    g_assert(other.isolated == 0 && mapped() == 0);
    g_assert(c->backoff == 1 && c->wait == 2 && !(c->flags & CHUNK_QUEUED));
    region_check(other.r);
    turns_end();
}

static void act_collided(void)
{
    KsmMerge *m = &other.p.e->merge;
    size_t page = other.page + CHUNK_OF - 2;

    /* as if those two had been in the first span, and collided */
    for (unsigned i = 0; i < 2; i++) {
        m->collided[m->n_collided++] = (MergeCollided) { page + i, 1234 + i };
    }
    discard(page + 1, 1);
}

/* What collided goes by another tag, if it is still there. */
static void test_collided(void)
{
    size_t page;

    if (!turn_start(act_collided, false)) {
        return;
    }
    page = other.page + CHUNK_OF - 2;
    g_assert(other.isolated == 0 && mapped() == other.first);
    g_assert(page_state(other.r, page) == PAGE_UNIQUE);
    g_assert(other.r->tag[page] == 1234);
    g_assert(page_state(other.r, page + 1) == PAGE_HOLE);
    region_check(other.r);
    turns_end();
}

static void act_done(void)
{
    discard(other.page, LAST);
}

/* So does what is discarded where it is merged already. */
static void test_done(void)
{
    if (!turn_start(act_done, false)) {
        return;
    }
    g_assert(other.isolated == 0 && mapped() == other.first - LAST);
    mem_check(other.m);
    region_check(other.r);
    turns_end();
}

static void act_before(void)
{
    discard(other.page - LAST, LAST);
}

static void act_behind(void)
{
    discard(other.page + CHUNK_OF, LAST);
}

/* The same pages of the other region. */
static void act_beside(void)
{
    bool a = other.r == other.p.ra;

    g_assert(ksm_discard(a ? other.p.rb : other.p.ra, other.page * PAGE,
                         LAST * PAGE) == 0);
    mem_gone(a ? other.p.b : other.p.a, other.page, LAST);
}

/* What they do elsewhere does not. */
static void elsewhere(void (*act)(void))
{
    memset(&other, 0, sizeof(other));
    other.second = act == act_before;
    if (!other_goes(act, false)) {
        return;
    }
    g_assert(other.isolated > 0 && mapped() == CHUNK_OF);
    turns_end();
}

static void test_before(void)
{
    elsewhere(act_before);
}

static void test_behind(void)
{
    elsewhere(act_behind);
}

static void test_beside(void)
{
    elsewhere(act_beside);
}

static void act_free(void)
{
    size_t page = other.page + CHUNK_OF - 1;

    g_assert(ksm_free_hint(other.r, page * PAGE, PAGE) == 0);
}

/* Memory that was freed reads as it was, or as zeroes. */
static void test_free(void)
{
    size_t page;

    if (!turn_start(act_free, false)) {
        return;
    }
    page = other.page + CHUNK_OF - 1;
    g_assert(other.isolated == 0 && mapped() == other.first);
    /* at once, where memory is short */
    g_assert(page_state(other.r, page) == PAGE_FREED ||
             page_state(other.r, page) == PAGE_HOLE);
    mem_fill(other.m, page, 77777);     /* it may hold either */
    turns_end();
}

static void act_unmerge_some(void)
{
    g_assert(ksm_unmerge(other.r, (other.page + CHUNK_OF - LAST) * PAGE,
                         LAST * PAGE) == 0);
}

/* What is unmerged ends work on its chunk, which is merged later. */
static void test_unmerge_some(gconstpointer early)
{
    const KsmChunk *c;

    if (!turn_start(act_unmerge_some, early)) {
        return;
    }
    c = &other.r->chunk[other.page / CHUNK_OF];
    g_assert(other.isolated == 0 && mapped() == (early ? 0 : other.first));
    g_assert(!early || ((c->flags & CHUNK_VISIT) && other.p.e->scan.again));
    turns_end();
}

static void act_unmerge(void)
{
    g_assert(ksm_unmerge(other.r, 0, PAIR_PAGES * PAGE) == 0);
}

/* When that has returned nothing of before merges. */
static void test_unmerge(gconstpointer early)
{
    if (!turn_start(act_unmerge, early)) {
        return;
    }
    g_assert(other.isolated == 0 && other.r->count[PAGE_MERGED] == 0);
    g_assert(mem_anonymous(other.m, 0, PAIR_PAGES) == PAIR_PAGES);
    region_check(other.r);
    turns_end();
}

static void act_inhibit(void)
{
    KsmStats s;

    other.m->inhibited = "for the test";
    /* who has had the lock since relies on it */
    ksm_engine_get_stats(other.p.e, &s);
}

static void test_inhibited(gconstpointer early)
{
    if (!turn_start(act_inhibit, early)) {
        return;
    }
    g_assert(other.isolated == 0);
    g_assert(mapped() == (early ? 0 : other.first));
    /* nor is it touched */
    g_assert(early || mem_present(other.m, other.page, other.first) == 0);
    util_passes(other.p.e, 3);
    g_assert(other.isolated == 0);
    other.m->inhibited = NULL;
    turns_end();
}

static void act_stop(void)
{
    ksm_engine_set_run(other.p.e, false);
}

static void act_reserve(void)
{
    ksm_engine_set_vma_reserve(other.p.e, SIZE_MAX);
}

/* Whoever has ordered that nothing is merged any more finds it so. */
static void test_ordered(gconstpointer reserve)
{
    if (!turn_start(reserve ? act_reserve : act_stop, false)) {
        return;
    }
    g_assert(other.isolated == 0 && mapped() == other.first);
    ksm_engine_set_run(other.p.e, true);
    ksm_engine_set_vma_reserve(other.p.e, 0);
    ksm_rescan(other.p.e);
    turns_end();
}

static void act_remove(void)
{
    g_assert(ksm_region_remove(other.r, KSM_REMOVE_UNMERGE) == 0);
}

static void act_forget(void)
{
    g_assert(ksm_region_remove(other.r, KSM_REMOVE_FORGET) == 0);
}

/* Who removes the region waits until nobody works on it. */
static void removed(void (*act)(void), bool early)
{
    KsmRegion *rest;
    Mem *m;

    memset(&other, 0, sizeof(other));
    other.removing = act == act_forget;
    if (!other_goes(act, early)) {
        return;
    }
    rest = other.r == other.p.ra ? other.p.rb : other.p.ra;
    m = other.r == other.p.ra ? other.p.b : other.p.a;
    g_assert(other.isolated == 0);
    g_assert(other.p.e->regions->len == 1);
    if (act == act_remove) {
        g_assert(mem_anonymous(other.m, 0, PAIR_PAGES) == PAIR_PAGES);
        mem_check(other.m);
    }
    util_passes(other.p.e, 4);
    mem_check(m);
    region_check(rest);
    util_remove(rest);
    g_assert(util_stats(other.p.e).pages_shared == 0);
    ksm_engine_free(other.p.e);
    mem_check(m);
    mem_free(other.p.a);
    mem_free(other.p.b);
}

static void test_remove(gconstpointer early)
{
    removed(act_remove, early);
}

static void test_forget(gconstpointer early)
{
    removed(act_forget, early);
}

/* One that is amid work on a region, and who removes it, with the lock. */
static struct {
    KsmLock lock;
    KsmTurn turn;
    KsmRegion region;
    int began;              /* atomic */
    bool left;
} amid;

static void *amid_main(void *opaque)
{
    lock_take(&amid.lock);
    g_atomic_int_set(&amid.began, 1);
    util_awaited(&amid.lock, 1);
    g_assert(!turn_give(&amid.turn, &amid.region, 0));
    amid.left = true;
    lock_release(&amid.lock);
    return NULL;
}

static void test_wait(void)
{
    pthread_t thread;

    lock_init(&amid.lock);
    amid.turn.lock = &amid.lock;
    g_assert(pthread_create(&thread, NULL, amid_main, NULL) == 0);
    while (!g_atomic_int_get(&amid.began)) {
        g_usleep(100);
    }
    lock_take(&amid.lock);
    g_assert(amid.turn.amid == &amid.region && !amid.left);
    amid.region.leaving = true;
    turn_wait(&amid.turn, &amid.region);
    g_assert(!amid.turn.amid && amid.left);
    lock_release(&amid.lock);
    g_assert(pthread_join(thread, NULL) == 0);
    lock_destroy(&amid.lock);
}

static void act_fork(void)
{
    char c;

    g_assert(!pipe(other.child));
    other.pid = fork();
    if (other.pid == 0) {
        close(other.child[1]);
        g_assert(read(other.child[0], &c, 1) == 0);
        _exit(mem_differs(other.p.a) || mem_differs(other.p.b));
    }
    g_assert(other.pid > 0);
}

/* A child has what was there, whatever is merged and written later. */
static void test_fork(void)
{
    int status;

    if (!turn_start(act_fork, false)) {
        return;
    }
    util_passes(other.p.e, 4);
    for (size_t i = 0; i < PAIR_PAGES; i++) {
        other.p.a->addr[i * PAGE]++;
    }
    util_passes(other.p.e, 8);
    close(other.child[0]);
    close(other.child[1]);
    g_assert(waitpid(other.pid, &status, 0) == other.pid && status == 0);
    for (size_t i = 0; i < PAIR_PAGES; i++) {
        other.p.a->addr[i * PAGE]--;
    }
    mem_check(other.p.a);
    pair_end(&other.p);
}

static void add(const char *name, void (*test)(gconstpointer early))
{
    g_autofree char *late = g_strdup_printf("/turn/%s/staged", name);
    g_autofree char *early = g_strdup_printf("/turn/%s/hashed", name);

    g_test_add_data_func(late, GINT_TO_POINTER(false), test);
    g_test_add_data_func(early, GINT_TO_POINTER(true), test);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/turn/span", test_span);
    g_test_add_func("/turn/hashed", test_hashed);
    g_test_add_func("/turn/discard", test_discard);
    g_test_add_func("/turn/done", test_done);
    g_test_add_func("/turn/elsewhere/before", test_before);
    g_test_add_func("/turn/elsewhere/behind", test_behind);
    g_test_add_func("/turn/elsewhere/beside", test_beside);
    g_test_add_func("/turn/vain", test_vain);
    g_test_add_func("/turn/collided", test_collided);
    g_test_add_func("/turn/free", test_free);
    add("unmerge/some", test_unmerge_some);
    add("unmerge", test_unmerge);
    add("inhibited", test_inhibited);
    add("remove", test_remove);
    add("forget", test_forget);
    g_test_add_data_func("/turn/stop", GINT_TO_POINTER(false), test_ordered);
    g_test_add_data_func("/turn/reserve", GINT_TO_POINTER(true), test_ordered);
    g_test_add_func("/turn/wait", test_wait);
    g_test_add_func("/turn/fork", test_fork);
    return g_test_run();
}
