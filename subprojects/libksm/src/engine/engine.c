/*
 * engine: construction, stepping, and what its owner calls
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Here the rooms are built and given what they need, and the lock is taken.
 */
#include <errno.h>
#include <string.h>

#include "base/prim.h"
#include "engine/alike.h"
#include "engine/answers.h"
#include "engine/compact.h"
#include "engine/discard.h"
#include "engine/engine.h"
#include "engine/follow.h"
#include "engine/fork.h"
#include "engine/ripen.h"
#include "engine/scan.h"
#include "engine/state.h"
#include "engine/tail.h"
#include "memory/admit.h"
#include "merge/kin.h"
#include "share/store-local.h"
#include "share/remote.h"

GQuark ksm_error_quark(void)
{
    return g_quark_from_static_string("ksm-error-quark");
}

void ksm_config_init(KsmConfig *config)
{
    *config = (KsmConfig) {
        .scope = KSM_SCOPE_VM,
        .dirty = KSM_DIRTY_AUTO,
        .free_policy = KSM_FREE_AUTO,
        .smart_scan = true,
        .max_cpu = 10,
        .threads = 1,
        .split_min_pages = 64,
        .max_page_sharing = 256,
        .vma_reserve_percent = 25,
        .stall_limit_ns = 1000000,
        .group_fd = -1,
    };
}

/* A userfaultfd with the features; -errno. */
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
 * The engine compares a page's 4096 bytes.  Where memory has more to it (s390x:
 * storage keys), pages that compare equal are not.
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

/* What the rooms need of each other and of the configuration. */
static void engine_connect(KsmEngine *e)
{
    e->urgent.crew = &e->crew;
    e->budget.crew = &e->crew;
    e->content.store->crew = &e->crew;
    e->dirty = (KsmDirty) {
        .uffd = e->uffd,
        .wp_async = e->dirty.wp_async,
        .source = e->cfg.dirty,
        .kinds = &e->kinds,
        .content = &e->content,
    };
    e->plan = (KsmPlan) {
        .content = &e->content,
        .asks = &e->asks,
        .hasher = &e->hasher,
        .regions = e->regions,
        .vmas = &e->vmas,
        .cut = &e->cut,
        .costs = &e->costs,
        .memcg = &e->memcg,
        .sampler = { &e->content, &e->hasher, &e->kinds },
        .split_min_pages = e->cfg.split_min_pages,
        .tail = e->cfg.tail,
        .stall_limit_ns = e->cfg.stall_limit_ns,
    };
    e->stage = (KsmStage) {
        .uffd = e->uffd,
        .wp_async = e->dirty.wp_async,
        .urgent = &e->urgent,
        .crew = &e->crew,
        .kinds = &e->kinds,
        .costs = &e->costs,
        .vmas = &e->vmas,
    };
    e->merge = (KsmMerge) {
        .plan = &e->plan,
        .stage = &e->stage,
        .turn = &e->turn,
        .content = &e->content,
        .hasher = &e->hasher,
        .dirty = &e->dirty,
        .vmas = &e->vmas,
        .costs = &e->costs,
    };
    e->restore = (KsmRestore) {
        .uffd = e->uffd,
        .uffd_wp = e->uffd_wp,
        .urgent = &e->urgent,
        .kinds = &e->kinds,
        .vmas = &e->vmas,
        .content = &e->content,
        .dirty = &e->dirty,
    };
    e->rejoin = (KsmRejoin) {
        .uffd_wp = e->uffd_wp,
        .urgent = &e->urgent,
        .content = &e->content,
        .hasher = &e->hasher,
        .vmas = &e->vmas,
        .cut = &e->cut,
        .costs = &e->costs,
    };
    compact_init(e);
    e->gather = (KsmGather) {
        .rejoin = &e->rejoin,
        .hasher = &e->hasher,
        .kinds = &e->kinds,
        .max_sharing = e->cfg.max_page_sharing,
    };
}

static bool resources_error(GError **error, int err, const char *what)
{
    g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES, "cannot %s: %s", what,
                g_strerror(-err));
    return false;
}

static bool engine_open(KsmEngine *e, GError **error)
{
    int ret;

    if (host_refused(error)) {
        return false;
    }
    e->uffd = uffd_open(UFFD_MOVE | UFFD_WP | UFFD_WP_SHMEM | UFFD_WP_ASYNC);
    e->dirty.wp_async = e->uffd >= 0;
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
    ret = kinds_open(&e->kinds);
    if (ret < 0) {
        return resources_error(error, ret, "open /proc/self/pagemap");
    }
    vmas_init(&e->vmas, e->cfg.vma_reserve_percent, e->cfg.vma_reserve);
    /*
     * Without blocking write-protection a mapping of the pool stays after
     * unmerging, and could show other content if slots were reused.
     */
    if (e->uffd_wp < 0) {
        store_keep_all(e->content.store);
    }
    engine_connect(e);
    dirty_init(&e->dirty);
    ret = stage_init(&e->stage);
    if (ret < 0) {
        return resources_error(error, ret, "make the staging area");
    }
    return true;
}

static void config_clamp(KsmConfig *c)
{
    G_STATIC_ASSERT(KSM_THREADS_MAX == CREW_MAX + 1);

    c->threads = CLAMP(c->threads, 1, KSM_THREADS_MAX);
    c->max_cpu = CLAMP(c->max_cpu, 1, 100 * KSM_THREADS_MAX);
    c->split_min_pages = CLAMP(c->split_min_pages, 1, CHUNK_PAGES);
    c->max_page_sharing = CLAMP(c->max_page_sharing, 2, SLOT_USERS);
    c->vma_reserve_percent = MIN(c->vma_reserve_percent, 99);
}

static void fd_close(int fd)
{
    if (fd >= 0) {
        prim.close(fd);
    }
}

static void engine_close(KsmEngine *e)
{
    crew_end(&e->crew);
    stage_close(&e->stage);
    asks_free(&e->asks);
    ripen_free(e);
    content_free(&e->content);
    fd_close(e->uffd);
    fd_close(e->uffd_wp);
    vmas_close(&e->vmas);
    kinds_close(&e->kinds);
    ksm_freer_free(e->freer);
    memcg_free(&e->memcg);
    dirty_fini(&e->dirty);
    directory_free(&e->dir);
    g_ptr_array_unref(e->regions);
    lock_destroy(&e->lock);
    g_free(e);
}

/* Nothing is open: engine_close() may be called. */
static KsmEngine *engine_alloc(const KsmConfig *config)
{
    KsmEngine *e = g_new0(KsmEngine, 1);

    e->cfg = *config;
    /* those are the caller's */
    e->cfg.group = e->cfg.group_socket = e->cfg.member = NULL;
    config_clamp(&e->cfg);
    e->run = true;
    e->uffd = e->uffd_wp = e->kinds.pagemap = e->vmas.maps = -1;
    lock_init(&e->lock);
    e->turn.lock = &e->lock;
    e->regions = g_ptr_array_new();
    directory_init(&e->dir);
    costs_init(&e->costs);
    e->scan.crowd = ALIKE_CROWD;
    e->freer = ksm_freer_new(config->free_policy);
    freer_remember_all(e->freer);
    return e;
}

KsmEngine *engine_new_over(const KsmConfig *config, KsmStore *store,
                           GError **error)
{
    KsmEngine *e = engine_alloc(config);

    content_init(&e->content, &e->dir, store);
    asks_init(&e->asks, store);
    if (!engine_open(e, error)) {
        engine_close(e);
        return NULL;
    }
    memcg_init(&e->memcg, "/");
    hasher_init(&e->hasher, store->ops->seed(store));
    engines_add(e);
    return e;
}

/* Its name is part of a path. */
static bool group_is_valid(const char *name)
{
    return *name && *name != '.' && strlen(name) <= 64 &&
           strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                  "0123456789._-") == strlen(name);
}

static KsmStore *remote_store_new(const KsmConfig *config, GError **error)
{
    g_autofree char *path = NULL;
    RemoteConfig remote = {
        .socket = config->group_socket,
        .fd = config->group_fd,
        .name = config->member ? config->member : g_get_prgname(),
        .max_sharing = config->max_page_sharing,
    };

    if (config->group && !group_is_valid(config->group)) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_INVALID,
                    "'%s' is not the name of a group: letters, digits, '.', "
                    "'_' and '-', 64 at most, and no '.' in front",
                    config->group);
        fd_close(config->group_fd);
        return NULL;
    }
    if (!remote.socket && config->group) {
        path = g_strdup_printf("%s/%s.sock", KSM_GROUP_DIR, config->group);
        remote.socket = path;
    }
    if (!remote.socket && remote.fd < 0) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_INVALID,
                    "which group? Its name, its socket or a connection to it "
                    "is missing");
        return NULL;
    }
    remote.name = remote.name ? remote.name : "";
    return remote_new(&remote);
}

static KsmStore *store_new(const KsmConfig *config, GError **error)
{
    KsmStore *store;
    int ret = 0;

    if (config->scope == KSM_SCOPE_GROUP) {
        return remote_store_new(config, error);
    }
    store = store_local_new(config->max_page_sharing, &ret);
    if (!store) {
        resources_error(error, ret, "make the pool");
    }
    return store;
}

KsmEngine *ksm_engine_new(const KsmConfig *config, GError **error)
{
    KsmConfig cfg = *config;
    KsmStore *store;

    if (host_refused(error)) {
        if (config->scope == KSM_SCOPE_GROUP) {
            fd_close(config->group_fd);
        }
        return NULL;
    }
    config_clamp(&cfg);
    store = store_new(&cfg, error);
    return store ? engine_new_over(config, store, error) : NULL;
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
    if (!run) {
        turn_end(&engine->turn);
    }
    scan_kick(engine);
    lock_release(&engine->lock);
}

void ksm_engine_set_max_cpu(KsmEngine *engine, unsigned percent)
{
    lock_take(&engine->lock);
    engine->cfg.max_cpu = percent;
    config_clamp(&engine->cfg);
    lock_release(&engine->lock);
}

void ksm_engine_set_threads(KsmEngine *engine, unsigned threads)
{
    lock_take(&engine->lock);
    engine->cfg.threads = threads;
    config_clamp(&engine->cfg);
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
    engine->vmas.reserve = mappings;
    vmas_recount(&engine->vmas);    /* the limit goes with the count */
    turn_end(&engine->turn);
    lock_release(&engine->lock);
}

static void given_already(GError **error)
{
    g_set_error(error, KSM_ERROR, KSM_ERROR_INVALID,
                "the memory was given to an engine already");
}

/* False: the dirty source does not work for the region. */
static bool region_source(KsmEngine *e, KsmRegion *r, GError **error)
{
    int ret = dirty_choose(&e->dirty, r);

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

/* With the lock held: takes no longer when more is registered. */
static bool region_enter(KsmEngine *e, KsmRegion *r, GError **error)
{
    size_t used = directory_pages(&e->dir), pages = used + r->n_pages;
    int ret = 0;

    if (engine_has(e, r->addr, r->len)) {
        given_already(error);
        return false;
    }
    if (!engine_zero_only(e)) {
        ret = content_reserve_store(&e->content, pages);
    }
    ret = ret < 0 ? ret : directory_enter(&e->dir, r);
    if (ret == -EFBIG) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "cannot manage %zu more pages: an engine has room for "
                    "%zu, of which %zu are in use", r->n_pages,
                    DIR_MAX * GROUP_PAGES, used);
        return false;
    }
    if (ret < 0) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "no memory to manage %zu more pages: %s", r->n_pages,
                    g_strerror(-ret));
        return false;
    }
    g_ptr_array_add(e->regions, r);
    scan_kick(e);
    return true;
}

static void region_free(KsmRegion *r)
{
    region_fini(r);
    g_free(r);
}

/* Not known to the engine yet. */
static KsmRegion *region_make(KsmEngine *e, void *addr, size_t len, int node,
                              const KsmRegionOps *ops, void *opaque,
                              GError **error)
{
    EngineRegion *er = g_new0(EngineRegion, 1);
    KsmRegion *r = &er->region;
    const char *why;

    er->engine = e;
    region_init(r, addr, len, node, ops, opaque);
    r->tagged = !engine_zero_only(e);
    r->kinless = !kin_allowed();
    why = admit(r);
    if (why) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_INVALID,
                    "%p, %zu bytes, cannot be merged: %s", addr, len, why);
    } else if (e->content.store->stay_home && !region_stays_home(r)) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_INVALID,
                    "memory that is inherited by children cannot be shared "
                    "with a group: give it MADV_DONTFORK");
    } else if (region_alloc(r) < 0) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "no memory for the state of %zu pages", r->n_pages);
    } else {
        return r;
    }
    region_free(r);
    return NULL;
}

/*
 * The memory is nobody's so far, and nobody else adds any.  The slow parts run
 * without the lock: reading the kernel's list of mappings, and preparing the
 * data per page.
 */
static KsmRegion *region_add(KsmEngine *e, void *addr, size_t len, int node,
                             const KsmRegionOps *ops, void *opaque,
                             GError **error)
{
    KsmRegion *r = region_make(e, addr, len, node, ops, opaque, error);
    bool entered = false;

    if (!r) {
        return NULL;
    }
    if (region_source(e, r, error)) {
        lock_take(&e->lock);
        entered = region_enter(e, r, error);
        lock_release(&e->lock);
    }
    if (!entered) {
        /* what stays registered could never be added again */
        size_t page = region_first(r);

        for (unsigned tries = 0; page < region_end(r) && tries < 1000;) {
            if (dirty_pause(&e->dirty, r, &page) < 0) {
                prim.pause(100);
                tries++;
            }
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
    engines_adding();
    if (engines_have(addr, len)) {
        given_already(error);
    } else {
        r = region_add(engine, addr, len, node, ops, opaque, error);
    }
    engines_added();
    return r;
}

static void chunk_drop(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    size_t page = chunk * CHUNK_PAGES;

    for (unsigned i = 0; i < CHUNK_PAGES && r->chunk[chunk].held; i++, page++) {
        if (page_state(r, page) != PAGE_OUTSIDE) {
            content_leave(&e->content, r, page, PAGE_HOLE);
        }
    }
}

/*
 * Called and left with the lock held, but others have it in between: only the
 * index may still name the region's pages, until they are dropped.
 */
static void region_drop(KsmEngine *e, KsmRegion *r)
{
    r->leaving = true;
    e->n_leaving++;
    g_ptr_array_remove(e->regions, r);
    scan_forget(e, r);
    tail_forget(e, r);
    tail_tell(e);
    /* when nothing finds it any more, be it to register it anew */
    turn_wait(&e->turn, r);
    REGION_FOREACH_KNOWN(r, c, 0, r->n_chunks) {
        chunk_drop(e, r, c);
        lock_pass(&e->lock);
    }
    directory_leave(&e->dir, r);
    ksm_freer_forget(e->freer, r->addr, r->len);
    e->n_leaving--;
    store_flush(e->content.store);
}

/* Others may have the lock between the pieces. */
static int tracking_end(KsmEngine *e, KsmRegion *r)
{
    size_t page = region_first(r);
    int ret = 0;

    /* nor is it registered anew */
    r->unmerging++;
    while (ret == 0 && page < region_end(r)) {
        ret = dirty_pause(&e->dirty, r, &page);
        lock_pass(&e->lock);
    }
    r->unmerging--;
    return ret;
}

int ksm_region_remove(KsmRegion *region, KsmRemove how)
{
    KsmEngine *e = region_engine(region);
    int ret = e->dead ? -ENOTSUP : 0;

    lock_take(&e->lock);
    turn_note(&e->turn, region, 0, region->n_pages);
    if (ret == 0 && how == KSM_REMOVE_UNMERGE) {
        ret = restore_unmerge(&e->restore, &e->lock, region, 0,
                              region->n_pages);
        ret = ret < 0 ? ret : tail_unmerge(e, region, 0, region->n_pages);
        ret = ret < 0 ? ret : tracking_end(e, region);
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

/* When to be called again after a step. */
#define ANSWER_NS   UINT64_C(10000000)      /* between looks for answers */

static int64_t step_pause(KsmEngine *e, bool more)
{
    uint64_t now = prim.now_ns();
    uint64_t rest = budget_rest(&e->budget, engine_max_cpu(e));
    uint64_t spread = 0, look = e->content.store->look_ns;

    if (!more) {
        uint64_t wait = e->scan.due > now ? e->scan.due - now : 0;
        int64_t settle = e->run ? freer_wait(e->freer) : -1;

        spread = budget_spread(e->cfg.target_scan_s * UINT64_C(1000000000),
                               now - e->scan.started, 1, 1);
        wait = MAX(wait, spread);
        wait = asks_awaited(&e->asks) ? MIN(wait, ANSWER_NS) : wait;
        wait = look ? MIN(wait, look) : wait;
        wait = e->run ? MIN(wait, ripen_wait(e)) : wait;
        return MAX(rest, settle < 0 ? wait : MIN(wait, (uint64_t)settle));
    }
    if (e->cfg.target_scan_s) {
        spread = budget_spread(e->cfg.target_scan_s * UINT64_C(1000000000),
                               now - e->scan.started, e->scan.visited,
                               e->dir.chunks);
    }
    return MAX(rest, spread);
}

#define FORGET_CHUNKS   1024u

/* Forgets ages for ksm_rescan(); false: there is no more to do. */
static bool ages_forget(KsmEngine *e)
{
    for (guint i = 0; e->forget && i < e->regions->len; i++) {
        KsmRegion *r = g_ptr_array_index(e->regions, i);

        for (unsigned n = 0;
             n < FORGET_CHUNKS && r->forget_from < r->n_chunks; n++) {
            size_t chunk = region_known(r, r->forget_from, r->n_chunks);
            KsmChunk *c = &r->chunk[chunk];

            r->forget_from = MIN(chunk + 1, r->n_chunks);
            if (chunk == r->n_chunks) {
                break;
            }
            if (c->flags & CHUNK_LIVE) {
                memset(r->history + chunk * CHUNK_PAGES, 0, CHUNK_PAGES);
            }
            c->flags |= CHUNK_VISIT | CHUNK_CHECK;
            c->wait = c->backoff = c->hot = c->hot_wait = 0;
            c->tried = 0;
        }
        if (r->forget_from < r->n_chunks) {
            return true;
        }
    }
    e->forget = false;
    return false;
}

static void index_keep_room(KsmEngine *e)
{
    if (!engine_zero_only(e)) {
        index_room(&e->content.index);
    }
}

/*
 * A piece of work that was put off as too long.  True: there is more.
 * *@crowded: pages that are found now would not be remembered.
 */
static bool engine_upkeep(KsmEngine *e, bool *crowded)
{
    IndexWork work = index_step(&e->content.index);
    bool more = store_tidy(e->content.store);

    index_keep_room(e);
    more |= answers_take(e) | asks_drop(&e->asks, e->scan.pass);
    more |= follow_step(e) | compact_step(e);
    *crowded = work == INDEX_CROWDED || ages_forget(e);
    return more || *crowded || work != INDEX_DONE;
}

static bool engine_has_work(const KsmEngine *e)
{
    return !e->dead && e->regions->len && (e->run || scan_has_books(e));
}

/* A step of the pass, or between passes of what does not wait for the next. */
static bool work_step(KsmEngine *e, bool *between)
{
    bool crowded, more = engine_upkeep(e, &crowded);

    if (*between) {
        return more | (e->run && (discard_settle(e) || scan_ripe(e)));
    }
    if (!crowded) {
        /* the next pass has its time, whatever there is left to do till then */
        *between = !scan_step(e);
        more |= !*between;
    }
    return more;
}

/*
 * By the thread that steps, so that helpers have its priority and CPUs.  Where
 * they are refused it goes on alone.
 */
static void helpers_set(KsmEngine *e)
{
    int ret = crew_set(&e->crew, e->cfg.threads - 1);

    if (ret < 0) {
        g_warning("libksm: cannot start %u threads to help with merging: %s; "
                  "it is done by one", e->cfg.threads - 1, g_strerror(-ret));
        e->cfg.threads = 1;
    }
}

int64_t ksm_step(KsmEngine *engine, uint64_t max_ns)
{
    KsmEngine *e = engine;
    bool more = true, between;
    int64_t pause;

    lock_take(&e->lock);
    if (engine_has_work(e)) {
        helpers_set(e);
    }
    budget_begin(&e->budget, max_ns);
    between = !max_ns && e->scan.phase == PHASE_START &&
              prim.now_ns() < e->scan.due;
    while (more && engine_has_work(e)) {
        more = work_step(e, &between);
        if (budget_used(&e->budget) >= e->budget.limit) {
            break;
        }
        lock_pass(&e->lock);
    }
    /* what is left when the time is used up is for the next step */
    pause = engine_has_work(e) ? step_pause(e, more) : -1;
    lock_release(&e->lock);
    return pause;
}

#define DISCARD_PAGES   (16 * CHUNK_PAGES)  /* at once: a millisecond or two */

/* Called and left with the lock held; others have it in between. */
static int discard_pieces(KsmEngine *e, KsmRegion *r, size_t page, size_t n,
                          DiscardKind kind)
{
    size_t end = page + n, next;
    int ret = 0;

    for (; page < end && ret == 0; page = next) {
        next = MIN((page / DISCARD_PAGES + 1) * DISCARD_PAGES, end);
        turn_note(&e->turn, r, page, next - page);
        ret = discard_range(e, r, page, next - page, kind);
        if (next < end) {
            lock_pass(&e->lock);
        }
    }
    return ret;
}

int ksm_discard(KsmRegion *region, size_t offset, size_t len)
{
    KsmEngine *e = region_engine(region);
    size_t page, n;
    int ret = -EINVAL;

    lock_take(&e->lock);
    if (!e->dead && region_pages(region, offset, len, &page, &n)) {
        ret = discard_pieces(e, region, page, n, DISCARD_ZEROES);
    }
    lock_release(&e->lock);
    return ret;
}

int ksm_free_hint(KsmRegion *region, size_t offset, size_t len)
{
    KsmEngine *e = region_engine(region);
    size_t page, n;
    int ret = -EINVAL;

    lock_take(&e->lock);
    if (!e->dead && region_pages(region, offset, len, &page, &n)) {
        ret = discard_pieces(e, region, page, n, DISCARD_HINT);
    }
    lock_release(&e->lock);
    return ret;
}

/*
 * -EBUSY, a page that a device writes to, is no harm to who wants to know of
 * all writes; what else failed is, and must not hide behind it.
 */
static int worse(int ret, int other)
{
    return ret == 0 || (ret == -EBUSY && other < 0) ? other : ret;
}

int ksm_unmerge(KsmRegion *region, size_t offset, size_t len)
{
    KsmEngine *e = region_engine(region);
    size_t page, n;
    int ret = -EINVAL;

    lock_take(&e->lock);
    if (!e->dead && region_pages(region, offset, len, &page, &n)) {
        turn_note(&e->turn, region, page, n);
        /* whatever has to stay, the rest is wanted all the same */
        ret = restore_unmerge(&e->restore, &e->lock, region, page, n);
        ret = worse(ret, tail_unmerge(e, region, page, n));
        if (len == region->len) {
            ret = worse(ret, tracking_end(e, region));
        }
        store_flush(e->content.store);
    }
    lock_release(&e->lock);
    return ret;
}

void ksm_rescan(KsmEngine *engine)
{
    lock_take(&engine->lock);
    for (guint i = 0; i < engine->regions->len; i++) {
        KsmRegion *r = g_ptr_array_index(engine->regions, i);

        r->forget_from = 0;
    }
    vmas_recount(&engine->vmas);
    engine->forget = true;
    scan_kick(engine);
    lock_release(&engine->lock);
}
