/*
 * libksm: the engine: construction, stepping, and what its owner calls
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * All state is behind one lock.  ksm_step() holds it for a chunk at a time;
 * it is a ticket lock, so that others are not starved.  The lock is also
 * taken around fork(): a child made while pages are in the staging area
 * would find holes where they were.
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "dirty.h"
#include "engine.h"
#include "discard.h"
#include "prim.h"
#include "scan.h"

GQuark ksm_error_quark(void)
{
    return g_quark_from_static_string("ksm-error-quark");
}

/* Mappings the process has, where they cannot be counted. */
#define VMAS_USED_GUESS 1000u

/* Engines of this process, for fork() and against registering twice. */
static pthread_mutex_t engines_lock = PTHREAD_MUTEX_INITIALIZER;
/*
 * One region is added at a time: two that overlap would each find the other
 * missing.  Taken before engines_lock, and that before an engine's.
 */
static pthread_mutex_t adding_lock = PTHREAD_MUTEX_INITIALIZER;
static GPtrArray *engines;

void lock_take(KsmLock *l)
{
    uint64_t ticket;

    pthread_mutex_lock(&l->mutex);
    ticket = l->next++;
    while (l->serving != ticket) {
        pthread_cond_wait(&l->turn[ticket % LOCK_TURNS], &l->mutex);
    }
    pthread_mutex_unlock(&l->mutex);
}

void lock_release(KsmLock *l)
{
    pthread_mutex_lock(&l->mutex);
    l->serving++;
    pthread_cond_broadcast(&l->turn[l->serving % LOCK_TURNS]);
    pthread_mutex_unlock(&l->mutex);
}

static void lock_init(KsmLock *l)
{
    pthread_mutex_init(&l->mutex, NULL);
    for (unsigned i = 0; i < LOCK_TURNS; i++) {
        pthread_cond_init(&l->turn[i], NULL);
    }
}

static void lock_destroy(KsmLock *l)
{
    pthread_mutex_destroy(&l->mutex);
    for (unsigned i = 0; i < LOCK_TURNS; i++) {
        pthread_cond_destroy(&l->turn[i]);
    }
}

/* Are all regions kept out of children (MADV_DONTFORK)? */
static bool engine_stays_home(const KsmEngine *e)
{
    if (e->n_leaving) {
        return false;
    }
    for (guint i = 0; i < e->regions->len; i++) {
        const KsmRegion *r = g_ptr_array_index(e->regions, i);
        bool stays = false;

        for (unsigned k = 0; k < r->n_advice; k++) {
            stays |= r->advice[k] == MADV_DONTFORK;
        }
        if (!stays) {
            return false;
        }
    }
    return true;
}

static void fork_prepare(void)
{
    pthread_mutex_lock(&adding_lock);
    pthread_mutex_lock(&engines_lock);
    for (guint i = 0; engines && i < engines->len; i++) {
        KsmEngine *e = g_ptr_array_index(engines, i);

        lock_take(&e->lock);
        if (!e->dead && !engine_stays_home(e)) {
            pool_fork(&e->pool);
        }
    }
}

static void fork_done(void)
{
    for (guint i = 0; engines && i < engines->len; i++) {
        KsmEngine *e = g_ptr_array_index(engines, i);

        pool_forked(&e->pool);
        lock_release(&e->lock);
    }
    pthread_mutex_unlock(&engines_lock);
    pthread_mutex_unlock(&adding_lock);
}

/*
 * In the child the engines are dead: their userfaultfd is the parent's, and
 * what was done through it would be done to the parent's memory.
 */
static void fork_child(void)
{
    for (guint i = 0; engines && i < engines->len; i++) {
        KsmEngine *e = g_ptr_array_index(engines, i);

        /* whoever waited for the lock does not exist here */
        e->dead = true;
        pool_forked_child(&e->pool);
        lock_init(&e->lock);
        e->lock.next = e->lock.serving = 0;
    }
    pthread_mutex_unlock(&engines_lock);
    pthread_mutex_unlock(&adding_lock);
}

static void engines_add(KsmEngine *e)
{
    static bool watching;

    pthread_mutex_lock(&engines_lock);
    if (!engines) {
        engines = g_ptr_array_new();
    }
    if (!watching) {
        watching = true;
        pthread_atfork(fork_prepare, fork_done, fork_child);
    }
    g_ptr_array_add(engines, e);
    pthread_mutex_unlock(&engines_lock);
}

static void engines_drop(KsmEngine *e)
{
    pthread_mutex_lock(&engines_lock);
    if (engines) {
        g_ptr_array_remove(engines, e);
        if (engines->len == 0) {
            g_clear_pointer(&engines, g_ptr_array_unref);
        }
    }
    pthread_mutex_unlock(&engines_lock);
}

void ksm_config_init(KsmConfig *config)
{
    *config = (KsmConfig) {
        .scope = KSM_SCOPE_VM,
        .dirty = KSM_DIRTY_AUTO,
        .free_policy = KSM_FREE_AUTO,
        .smart_scan = true,
        .max_cpu = 10,
        .split_min_pages = 64,
        .max_page_sharing = 256,
        .vma_reserve_percent = 25,
        .stall_limit_ns = 1000000,
    };
}

/* Opens a userfaultfd with the features; -errno. */
static int uffd_open(uint64_t features)
{
    int fd = prim.uffd(), ret;

    if (fd < 0) {
        return fd;
    }
    ret = prim.uffd_api(fd, features);
    if (ret < 0) {
        prim.close(fd);
        return ret;
    }
    return fd;
}

static void uffd_error(int err, GError **error)
{
    if (err == -EPERM || err == -EACCES) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_PERMISSION,
                    "userfaultfd is not permitted: give the process access "
                    "to /dev/userfaultfd or CAP_SYS_PTRACE, or set the "
                    "sysctl vm.unprivileged_userfaultfd to 1");
    } else if (err == -EMFILE || err == -ENFILE || err == -ENOMEM) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "cannot open a userfaultfd: %s", g_strerror(-err));
    } else {
        g_set_error(error, KSM_ERROR, KSM_ERROR_UNSUPPORTED,
                    "the kernel lacks %s", err == -ENOSYS ? "userfaultfd"
                    : "UFFDIO_MOVE (Linux 6.8)");
    }
}

/*
 * What the engine compares of a page is its bytes, 4096 of them.  Where memory
 * has more to it (s390x: storage keys), pages that compare equal are not.
 */
static bool host_refused(GError **error)
{
    const char *machine = prim.machine();
    size_t size = prim.page_size();

    if (!strcmp(machine, "s390x")) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_UNSUPPORTED,
                    "merging is not for s390x: memory has storage keys there, "
                    "which would be lost");
        return true;
    }
    if (strcmp(machine, "x86_64") && strcmp(machine, "aarch64")) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_UNSUPPORTED,
                    "merging has not been tested on %s: it needs x86_64 or "
                    "aarch64", machine);
        return true;
    }
    if (size != PAGE_BYTES) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_UNSUPPORTED,
                    "the kernel's pages are of %zu bytes: merging needs a "
                    "kernel with pages of %zu bytes", size, PAGE_BYTES);
        return true;
    }
    return false;
}

bool ksm_supported(GError **error)
{
    int fd;

    if (host_refused(error)) {
        return false;
    }
    fd = uffd_open(UFFD_MOVE);

    if (fd < 0) {
        uffd_error(fd, error);
        return false;
    }
    prim.close(fd);
    return true;
}

static uint32_t place_hash(void *opaque, uint32_t place)
{
    KsmEngine *e = opaque;
    KsmRegion *r;
    size_t page;

    if (place & PLACE_SLOT) {
        return e->pool.hash[place & ~PLACE_SLOT];
    }
    r = engine_page(e, place, &page);
    return r->tag[page];
}

static void slot_unindex(void *opaque, uint32_t hash, uint32_t slot)
{
    KsmEngine *e = opaque;

    index_remove(&e->index, hash, slot | PLACE_SLOT);
    e->pool.users[slot] &= ~SLOT_INDEXED;
}

/* Opens what an engine needs; false with @error set. */
static bool engine_open(KsmEngine *e, GError **error)
{
    int ret;

    if (host_refused(error)) {
        return false;
    }
    e->uffd = uffd_open(UFFD_MOVE | UFFD_WP | UFFD_WP_SHMEM | UFFD_WP_ASYNC);
    e->wp_async = e->uffd >= 0;
    if (e->uffd < 0) {
        e->uffd = uffd_open(UFFD_MOVE);
    }
    if (e->uffd < 0) {
        uffd_error(e->uffd, error);
        return false;
    }
    e->uffd_wp = uffd_open(UFFD_WP | UFFD_WP_SHMEM);
    if (e->uffd_wp < 0 && e->uffd_wp != -EINVAL) {
        uffd_error(e->uffd_wp, error);
        return false;
    }
    e->pagemap = prim.open_read("/proc/self/pagemap");
    if (e->pagemap < 0) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "cannot open /proc/self/pagemap: %s",
                    g_strerror(-e->pagemap));
        return false;
    }
    e->maps = prim.open_read("/proc/self/maps");
    e->vmas.used = VMAS_USED_GUESS;
    ret = pool_init(&e->pool, e->cfg.max_page_sharing);
    if (ret < 0) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "cannot make the pool: %s", g_strerror(-ret));
        return false;
    }
    /*
     * Without blocking write-protection a mapping of the pool stays after
     * unmerging, and could show other content if slots were used again.
     */
    e->pool.keep_all |= e->uffd_wp < 0;
    ret = merge_init(e);
    if (ret < 0) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "cannot make the staging area: %s", g_strerror(-ret));
        return false;
    }
    return true;
}

static void config_clamp(KsmConfig *c)
{
    c->max_cpu = CLAMP(c->max_cpu, 1, 100);
    c->split_min_pages = CLAMP(c->split_min_pages, 1, CHUNK_PAGES);
    c->max_page_sharing = CLAMP(c->max_page_sharing, 2, SLOT_USERS);
    c->vma_reserve_percent = MIN(c->vma_reserve_percent, 99);
}

static void engine_close(KsmEngine *e)
{
    merge_free(e);
    pool_free(&e->pool);
    index_free(&e->index);
    if (e->uffd >= 0) {
        prim.close(e->uffd);
    }
    if (e->uffd_wp >= 0) {
        prim.close(e->uffd_wp);
    }
    if (e->maps >= 0) {
        prim.close(e->maps);
    }
    if (e->pagemap >= 0) {
        prim.close(e->pagemap);
    }
    ksm_freer_free(e->freer);
    memcg_free(&e->memcg);
    g_free(e->bitmap);
    g_free(e->ranges);
    g_free(e->dir);
    g_ptr_array_unref(e->regions);
    lock_destroy(&e->lock);
    g_free(e);
}

KsmEngine *ksm_engine_new(const KsmConfig *config, GError **error)
{
    static const char zeroes[PAGE_BYTES];
    KsmEngine *e = g_new0(KsmEngine, 1);

    e->cfg = *config;
    config_clamp(&e->cfg);
    e->run = true;
    e->uffd = e->uffd_wp = e->pagemap = e->maps = -1;
    e->pool.fd = e->pool.map_fd = e->pool.watch_fd = e->pool.pagemap = -1;
    lock_init(&e->lock);
    e->regions = g_ptr_array_new();
    e->dir_free = DIR_END;
    e->bitmap = g_malloc0(PIECE_PAGES / 8);
    e->ranges = g_new0(PmRange, N_RANGES);
    index_init(&e->index, place_hash, e);
    e->freer = ksm_freer_new(config->free_policy);
    freer_remember_all(e->freer);
    if (!engine_open(e, error)) {
        engine_close(e);
        return NULL;
    }
    memcg_init(&e->memcg, "/");
    e->pool.unindex = slot_unindex;
    e->pool.opaque = e;
    e->seed = prim.random();
    e->hash = hash_best();
    e->zero_hash = e->hash(zeroes, e->seed);
    engines_add(e);
    return e;
}

void ksm_engine_free(KsmEngine *engine)
{
    if (engine->dead) {
        return;
    }
    g_assert(engine->regions->len == 0);
    engines_drop(engine);
    engine_close(engine);
}

void ksm_engine_set_run(KsmEngine *engine, bool run)
{
    lock_take(&engine->lock);
    engine->run = run;
    if (run) {
        scan_kick(engine);
    }
    lock_release(&engine->lock);
}

void ksm_engine_set_max_cpu(KsmEngine *engine, unsigned percent)
{
    lock_take(&engine->lock);
    engine->cfg.max_cpu = CLAMP(percent, 1, 100);
    lock_release(&engine->lock);
}

void ksm_engine_set_target_scan(KsmEngine *engine, unsigned seconds)
{
    lock_take(&engine->lock);
    engine->cfg.target_scan_s = seconds;
    lock_release(&engine->lock);
}

void ksm_engine_set_smart_scan(KsmEngine *engine, bool on)
{
    lock_take(&engine->lock);
    engine->cfg.smart_scan = on;
    lock_release(&engine->lock);
}

void ksm_engine_set_vma_reserve(KsmEngine *engine, size_t mappings)
{
    lock_take(&engine->lock);
    engine->cfg.vma_reserve = mappings;
    engine->vmas.counted = 0;   /* the limit goes with the count */
    lock_release(&engine->lock);
}

int engine_kinds(KsmEngine *e, const void *addr, unsigned n, unsigned tell,
                 uint8_t *kinds)
{
    PmScan scan = {
        .fd = e->pagemap,
        .start = (uintptr_t)addr,
        .end = (uintptr_t)addr + n * PAGE_BYTES,
        .any = PM_PRESENT | PM_SWAPPED,
        .tell = tell,
        .vec = e->ranges,
        /* the kernel allocates as much */
        .vec_len = MIN(N_RANGES, n),
    };
    ssize_t got = prim.pagemap(&scan);

    if (got < 0) {
        return got;
    }
    if (scan.walk_end < scan.end) {
        return -EAGAIN;     /* what was not walked is not empty */
    }
    memset(kinds, 0, n);
    for (ssize_t i = 0; i < got; i++) {
        size_t from = (e->ranges[i].start - (uintptr_t)addr) / PAGE_BYTES;
        size_t to = (e->ranges[i].end - (uintptr_t)addr) / PAGE_BYTES;

        memset(kinds + from, e->ranges[i].kinds, to - from);
    }
    return 0;
}

/* Slots kept for children make room in steps of this many. */
#define KEPT_STEP (64 * CHUNK_PAGES)

int engine_pool_room(KsmEngine *e, size_t pages)
{
    size_t kept = ROUND_UP_TO(e->pool.leaked * 8 / 5, KEPT_STEP);

    return pool_reserve(&e->pool, pages + kept);
}

void engine_stall(KsmEngine *e, uint64_t ns)
{
    unsigned bucket = 0;

    while (bucket < KSM_STALL_BUCKETS - 1 &&
           ns >= UINT64_C(1000) << bucket) {
        bucket++;
    }
    e->total.stall[bucket]++;
    e->total.stall_count++;
    e->total.stall_max = MAX(e->total.stall_max, ns);
}

/*
 * Ids for the region's chunks: those that are free, wherever they are, then
 * new ones.  0 or -errno, and nothing has changed.
 */
static int dir_enter(KsmEngine *e, KsmRegion *r)
{
    size_t used = e->dir_chunks + r->n_chunks;
    size_t at = e->dir_len;

    if (used > DIR_MAX) {
        return -EFBIG;
    }
    if (used > e->dir_len) {
        KsmDirEntry *dir = g_try_renew(KsmDirEntry, e->dir, used);

        if (!dir) {
            return -ENOMEM;
        }
        e->dir = dir;
        e->dir_len = used;
    }
    for (size_t i = 0; i < r->n_chunks; i++) {
        uint32_t id = e->dir_free != DIR_END ? e->dir_free : at++;

        if (id == e->dir_free) {
            e->dir_free = e->dir[id].chunk;
        }
        e->dir[id] = (KsmDirEntry) { r, i };
        r->chunk[i].id = id;
    }
    e->dir_chunks = used;
    return 0;
}

static void dir_leave(KsmEngine *e, KsmRegion *r)
{
    for (size_t i = r->n_chunks; i-- > 0;) {
        uint32_t id = r->chunk[i].id;

        e->dir[id] = (KsmDirEntry) { NULL, e->dir_free };
        e->dir_free = id;
    }
    e->dir_chunks -= r->n_chunks;
}

static bool overlaps(const KsmEngine *e, const char *addr, size_t len)
{
    for (guint i = 0; i < e->regions->len; i++) {
        const KsmRegion *r = g_ptr_array_index(e->regions, i);

        if (addr < r->addr + r->len && r->addr < addr + len) {
            return true;
        }
    }
    return false;
}

static void given_already(GError **error)
{
    g_set_error(error, KSM_ERROR, KSM_ERROR_INVALID,
                "the memory was given to an engine already");
}

static bool region_given_already(KsmEngine *e, const char *addr, size_t len)
{
    bool found = false;

    pthread_mutex_lock(&engines_lock);
    for (guint i = 0; i < engines->len && !found; i++) {
        KsmEngine *other = g_ptr_array_index(engines, i);

        lock_take(&other->lock);
        found = overlaps(other, addr, len);
        lock_release(&other->lock);
    }
    pthread_mutex_unlock(&engines_lock);
    return found;
}

/* False: the source of dirty pages does not work for the region. */
static bool region_source(KsmRegion *r, GError **error)
{
    int ret = dirty_init(r);

    if (ret < 0) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_UNSUPPORTED,
                    "the dirty source asked for does not work here: %s",
                    ret == -EINVAL ? "the region has no dirty_sync op"
                    : ret == -ENOTSUP ? "the kernel lacks PAGEMAP_SCAN with "
                      "asynchronous write-protection (Linux 6.7)"
                    : "the memory cannot be registered with userfaultfd");
    }
    return ret == 0;
}

/* With the lock held: nothing here takes longer the more is registered. */
static bool region_enter(KsmEngine *e, KsmRegion *r, GError **error)
{
    size_t pages = e->n_pages + r->n_pages;
    int ret = 0;

    if (overlaps(e, r->addr, r->len)) {
        given_already(error);
        return false;
    }
    if (!engine_zero_only(e)) {
        ret = index_reserve(&e->index, pages);
        ret = ret < 0 ? ret : engine_pool_room(e, pages);
    }
    ret = ret < 0 ? ret : dir_enter(e, r);
    if (ret == -EFBIG) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "cannot manage %zu more pages: an engine has room for "
                    "%zu, of which %zu are in use", r->n_pages,
                    DIR_MAX * CHUNK_PAGES, e->n_pages);
        return false;
    }
    if (ret < 0) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "no memory to manage %zu more pages: %s", r->n_pages,
                    g_strerror(-ret));
        return false;
    }
    e->n_pages = pages;
    g_ptr_array_add(e->regions, r);
    scan_kick(e);
    e->scan.settle = 2;
    return true;
}

/*
 * What takes long is done without the lock: reading the kernel's list of
 * mappings, and preparing what is kept of each page.
 */
/* The memory is nobody's so far, and nobody else adds any. */
static KsmRegion *region_add(KsmEngine *e, void *addr, size_t len, int node,
                             const KsmRegionOps *ops, void *opaque,
                             GError **error)
{
    KsmRegion *r = region_new(e, addr, len, node, ops, opaque, error);
    bool entered = false;

    if (!r) {
        return NULL;
    }
    if (region_source(r, error)) {
        lock_take(&e->lock);
        entered = region_enter(e, r, error);
        lock_release(&e->lock);
    }
    if (!entered) {
        /* what stays registered could never be added again */
        for (unsigned tries = 0; dirty_pause(r) < 0 && tries < 1000; tries++) {
            prim.pause(100);
        }
        region_free(r);
        return NULL;
    }
    return r;
}

KsmRegion *ksm_region_add(KsmEngine *engine, void *addr, size_t len, int node,
                          const KsmRegionOps *ops, void *opaque,
                          GError **error)
{
    KsmRegion *r = NULL;

    /* does not change but in a forked child, where there is one thread */
    if (engine->dead) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_UNSUPPORTED,
                    "an engine does not work in a forked child");
        return NULL;
    }
    if (!len || ((uintptr_t)addr | len) % PAGE_BYTES) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_INVALID,
                    "address and length must be multiples of %zu", PAGE_BYTES);
        return NULL;
    }
    pthread_mutex_lock(&adding_lock);
    if (region_given_already(engine, addr, len)) {
        given_already(error);
    } else {
        r = region_add(engine, addr, len, node, ops, opaque, error);
    }
    pthread_mutex_unlock(&adding_lock);
    return r;
}

/*
 * Called and left with the lock held, but others have it in between: nobody
 * knows the region any more, but for what stands in the index, which may name
 * its pages until they are dropped.
 */
static void region_drop(KsmEngine *e, KsmRegion *r)
{
    r->leaving = true;
    e->n_leaving++;
    g_ptr_array_remove(e->regions, r);
    scan_forget(e, r);
    for (size_t i = 0; i < r->n_pages; i++) {
        if (page_state(r, i) != PAGE_OUTSIDE) {
            region_leave(r, i, PAGE_HOLE);
        }
        if (i % CHUNK_PAGES == CHUNK_PAGES - 1) {
            lock_release(&e->lock);
            lock_take(&e->lock);
        }
    }
    dir_leave(e, r);
    ksm_freer_forget(e->freer, r->addr, r->len);
    e->n_pages -= r->n_pages;
    e->n_leaving--;
    pool_flush(&e->pool);
}

int ksm_region_remove(KsmRegion *region, KsmRemove how)
{
    KsmEngine *e = region->engine;
    int ret = e->dead ? -ENOTSUP : 0;

    lock_take(&e->lock);
    if (ret == 0 && how == KSM_REMOVE_UNMERGE) {
        ret = merge_unmerge(e, region, 0, region->n_pages);
        ret = ret < 0 ? ret : dirty_pause(region);
    }
    if (ret == 0) {
        region_drop(e, region);
    }
    lock_release(&e->lock);
    if (ret == 0) {
        region_free(region);
    }
    return ret;
}

/* When to be called again, after a step that did what it could. */
static int64_t step_pause(KsmEngine *e, bool more)
{
    uint64_t now = prim.now_ns();
    uint64_t rest = budget_rest(&e->budget, e->cfg.max_cpu);
    uint64_t spread = 0;

    if (!more) {
        uint64_t wait = e->scan.due > now ? e->scan.due - now : 0;
        int64_t settle = e->run ? freer_wait(e->freer) : -1;

        spread = budget_spread(e->cfg.target_scan_s * UINT64_C(1000000000),
                               now - e->scan.started, 1, 1);
        wait = MAX(wait, spread);
        return MAX(rest, settle < 0 ? wait : MIN(wait, (uint64_t)settle));
    }
    if (e->cfg.target_scan_s) {
        spread = budget_spread(e->cfg.target_scan_s * UINT64_C(1000000000),
                               now - e->scan.started, e->scan.visited,
                               e->n_pages / CHUNK_PAGES);
    }
    return MAX(rest, spread);
}

#define FORGET_CHUNKS   1024u

/* Forgets ages, as ksm_rescan() wants it; false: there is no more to do. */
static bool ages_forget(KsmEngine *e)
{
    for (guint i = 0; e->forget && i < e->regions->len; i++) {
        KsmRegion *r = g_ptr_array_index(e->regions, i);

        for (unsigned n = 0; n < FORGET_CHUNKS && r->forget_left; n++) {
            KsmChunk *c = &r->chunk[--r->forget_left];

            memset(r->history + r->forget_left * CHUNK_PAGES, 0, CHUNK_PAGES);
            c->flags |= CHUNK_VISIT | CHUNK_CHECK;
            c->wait = c->backoff = c->hot = c->hot_wait = 0;
            c->tried = 0;
        }
        if (r->forget_left) {
            return true;
        }
    }
    e->forget = false;
    return false;
}

/*
 * A piece of what was put off because it would take long.  True: there is
 * more.  *@crowded: pages that are found now would not be remembered.
 */
static bool engine_upkeep(KsmEngine *e, bool *crowded)
{
    IndexWork work = index_step(&e->index);
    bool more = pool_release(&e->pool);

    *crowded = work == INDEX_CROWDED || ages_forget(e);
    return more || *crowded || work != INDEX_DONE;
}

static bool engine_has_work(const KsmEngine *e)
{
    return !e->dead && e->regions->len && (e->run || scan_has_books(e));
}

int64_t ksm_step(KsmEngine *engine, uint64_t max_ns)
{
    KsmEngine *e = engine;
    int64_t pause = -1;
    bool more = true, crowded;

    lock_take(&e->lock);
    budget_begin(&e->budget, e->cfg.max_cpu, max_ns);
    if (!max_ns && engine_has_work(e) && e->scan.phase == PHASE_START &&
        prim.now_ns() < e->scan.due) {
        /* between passes only what was freed is looked after */
        do {
            more = e->run && discard_settle(e);
        } while (more && budget_used(&e->budget) < e->budget.limit);
        pause = step_pause(e, false);
        more = false;
    }
    while (more && engine_has_work(e)) {
        more = engine_upkeep(e, &crowded);
        more |= !crowded && scan_step(e);
        pause = step_pause(e, more);
        if (budget_used(&e->budget) >= e->budget.limit) {
            break;
        }
        lock_release(&e->lock);
        lock_take(&e->lock);
    }
    if (!engine_has_work(e)) {
        pause = -1;
    }
    lock_release(&e->lock);
    return pause;
}

/* A byte range of a region as pages; false: not inside, not aligned, dead. */
static bool range_pages(const KsmRegion *r, size_t offset, size_t len,
                        size_t *page, size_t *n)
{
    if (r->engine->dead || (offset | len) % PAGE_BYTES || offset > r->len ||
        len > r->len - offset) {
        return false;
    }
    *page = (r->addr - r->base + offset) / PAGE_BYTES;
    *n = len / PAGE_BYTES;
    return true;
}

int ksm_discard(KsmRegion *region, size_t offset, size_t len)
{
    size_t page, n;
    int ret = -EINVAL;

    lock_take(&region->engine->lock);
    if (range_pages(region, offset, len, &page, &n)) {
        ret = discard_range(region, page, n);
    }
    lock_release(&region->engine->lock);
    return ret;
}

int ksm_free_hint(KsmRegion *region, size_t offset, size_t len)
{
    size_t page, n;
    int ret = -EINVAL;

    lock_take(&region->engine->lock);
    if (range_pages(region, offset, len, &page, &n)) {
        ret = discard_hint(region, page, n);
    }
    lock_release(&region->engine->lock);
    return ret;
}

int ksm_unmerge(KsmRegion *region, size_t offset, size_t len)
{
    KsmEngine *e = region->engine;
    size_t page, n;
    int ret = -EINVAL;

    lock_take(&e->lock);
    if (range_pages(region, offset, len, &page, &n)) {
        ret = merge_unmerge(e, region, page, n);
        /* whatever has to stay, the rest is wanted all the same */
        if (len == region->len) {
            int paused = dirty_pause(region);

            ret = paused < 0 ? paused : ret;
        }
        pool_flush(&e->pool);
    }
    lock_release(&e->lock);
    return ret;
}

void ksm_rescan(KsmEngine *engine)
{
    lock_take(&engine->lock);
    for (guint i = 0; i < engine->regions->len; i++) {
        KsmRegion *r = g_ptr_array_index(engine->regions, i);

        r->forget_left = r->n_chunks;
    }
    engine->vmas.counted = 0;
    engine->forget = true;
    scan_kick(engine);
    lock_release(&engine->lock);
}
