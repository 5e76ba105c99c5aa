/*
 * The iothread that steps libksm's engine
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The engine's lock is held during a step and a vCPU may be waiting for a page
 * that has been taken out, so a step never takes the BQL or waits for anything
 * else of QEMU's.
 */

#include "qemu/osdep.h"
#include "block/aio.h"
#include "qapi/error.h"
#include "qemu/coroutine.h"
#include "qemu/cutils.h"
#include "qemu/main-loop.h"
#include "qemu/timer.h"
#include "system/system.h"
#include "ksm-log.h"
#include "ksm-runner.h"
#include "ksm-vmas.h"
#include "trace.h"

struct KsmRunner {
    KsmRunnerKey key;
    KsmEngine *engine;
    AioContext *ctx;
    QEMUTimer timer;    /* runs in ctx */
    QEMUBH *sync;       /* runs in the main loop; NULL without a log */
    bool sync_due;      /* a pass has ended: no step before the log is asked */
    uint64_t passes;    /* full scans when last looked at */
    unsigned users;
    /* the connection that was taken over: its number may be another's soon */
    int group_fd;
    uint64_t group_inode;
    uint64_t vma_reserve;       /* that the engine was told of */
};

/* The one that new backends use; one that has been put may still be ending. */
static KsmRunner *current;

/* The thread of all runners without one of their own; never ends. */
static IOThread *internal_iothread;

/* In the main loop: asking QEMU's dirty log needs the BQL. */
static void runner_sync(void *opaque)
{
    KsmRunner *runner = opaque;

    if (!runner->users || !qatomic_read(&runner->sync_due)) {
        return;
    }
    if (!ksm_log_sync()) {
        qemu_bh_schedule(runner->sync);
        return;
    }
    qatomic_store_release(&runner->sync_due, false);
    timer_mod_ns(&runner->timer, qemu_clock_get_ns(QEMU_CLOCK_REALTIME));
}

/* Has the engine been through all memory since this was asked? */
static bool runner_pass_ended(KsmRunner *runner)
{
    KsmStats stats;

    ksm_engine_get_stats(runner->engine, &stats);
    if (stats.full_scans == runner->passes) {
        return false;
    }
    runner->passes = stats.full_scans;
    return true;
}

static void runner_step(void *opaque)
{
    KsmRunner *runner = opaque;
    int64_t wait;

    if (qatomic_load_acquire(&runner->sync_due)) {
        /* which sets the timer when it is done */
        qemu_bh_schedule(runner->sync);
        return;
    }
    wait = ksm_step(runner->engine, 0);
    if (runner->sync && runner_pass_ended(runner)) {
        qatomic_set(&runner->sync_due, true);
    }
    trace_ksm_step(runner, wait);
    if (wait >= 0) {
        timer_mod_ns(&runner->timer,
                     qemu_clock_get_ns(QEMU_CLOCK_REALTIME) + wait);
    }
}

/* 0: there is none. */
static uint64_t inode_of(int fd)
{
    struct stat st;

    return fd >= 0 && fstat(fd, &st) == 0 ? st.st_ino : 0;
}

static KsmRunner *runner_new(const KsmRunnerKey *key, int group_fd,
                             Error **errp)
{
    g_autoptr(GError) error = NULL;
    IOThread *iothread = key->iothread ?: internal_iothread;
    uint64_t inode = inode_of(group_fd);
    KsmConfig config;
    KsmRunner *runner;
    KsmEngine *engine;

    if (!iothread) {
        iothread = internal_iothread = iothread_create("ksm", errp);
        if (!iothread) {
            if (group_fd >= 0) {
                close(group_fd);
            }
            return NULL;
        }
    }
    ksm_config_init(&config);
    config.scope = key->scope;
    config.group = key->group;
    config.group_socket = key->group_socket;
    config.group_fd = group_fd;
    config.member = qemu_get_vm_name();
    config.dirty = key->dirty;
    config.free_policy = key->free_policy;
    config.tail = key->tail;
    engine = ksm_engine_new(&config, &error);
    if (!engine) {
        error_setg(errp, "%s", error->message);
        return NULL;
    }
    /* which memory to merge is for the op "inhibited" to say */
    ksm_engine_set_run(engine, true);
    runner = g_new0(KsmRunner, 1);
    runner->key = *key;
    runner->key.group = g_strdup(key->group);
    runner->key.group_socket = g_strdup(key->group_socket);
    runner->engine = engine;
    runner->group_fd = group_fd;
    runner->group_inode = inode;
    runner->ctx = iothread_get_aio_context(iothread);
    if (key->iothread) {
        object_ref(OBJECT(key->iothread));
    }
    if (key->dirty == KSM_DIRTY_LOG) {
        runner->sync = aio_bh_new(qemu_get_aio_context(), runner_sync, runner);
        runner->sync_due = true;
    }
    aio_timer_init(runner->ctx, &runner->timer, QEMU_CLOCK_REALTIME, SCALE_NS,
                   runner_step, runner);
    trace_ksm_runner_new(runner, key->scope);
    return runner;
}

bool ksm_runner_check(const KsmRunnerKey *key, Error **errp)
{
    const KsmRunnerKey *other = current ? &current->key : key;
    const char *property =
        key->scope != other->scope || key->tail != other->tail ? "scope" :
        g_strcmp0(key->group, other->group) ? "group" :
        g_strcmp0(key->group_socket, other->group_socket) ? "group-socket" :
        key->dirty != other->dirty ? "dirty-tracking" :
        key->free_policy != other->free_policy ? "free-policy" :
        key->iothread != other->iothread ? "iothread" : NULL;

    if (property) {
        error_setg(errp, "property '%s' must be the same for all objects "
                   "memory-backend-ksm that QEMU merges itself",
                   property);
        return false;
    }
    return true;
}

KsmRunner *ksm_runner_get(const KsmRunnerKey *key, int group_fd,
                          Error **errp)
{
    bool fits = ksm_runner_check(key, errp);

    if (fits && !current) {
        current = runner_new(key, group_fd, errp);
    } else if (group_fd >= 0 &&
               !(current && current->group_fd == group_fd &&
                 current->group_inode == inode_of(group_fd))) {
        close(group_fd);
    }
    if (!fits) {
        return NULL;
    }
    if (current) {
        current->users++;
    }
    return current;
}

/* In the main thread: its BH is here, and an iothread may have to be ended. */
static void runner_reclaim(void *opaque)
{
    KsmRunner *runner = opaque;

    if (runner->sync) {
        qemu_bh_delete(runner->sync);
    }
    if (runner->key.iothread) {
        object_unref(OBJECT(runner->key.iothread));
    }
    g_free((char *)runner->key.group);
    g_free((char *)runner->key.group_socket);
    g_free(runner);
}

/* In the runner's own thread: no step is going on, and none will follow. */
static void runner_free(void *opaque)
{
    KsmRunner *runner = opaque;

    timer_del(&runner->timer);
    timer_deinit(&runner->timer);
    ksm_engine_free(runner->engine);
    aio_bh_schedule_oneshot(qemu_get_aio_context(), runner_reclaim, runner);
}

void ksm_runner_put(KsmRunner *runner)
{
    assert(runner->users > 0);
    if (--runner->users == 0) {
        trace_ksm_runner_free(runner);
        current = NULL;
        qemu_coroutine_limit_pool(UINT_MAX);
        aio_bh_schedule_oneshot(runner->ctx, runner_free, runner);
    }
}

KsmEngine *ksm_runner_engine(KsmRunner *runner)
{
    return runner->engine;
}

/* 0: not known. */
static uint64_t max_map_count(void)
{
    g_autofree char *text = NULL;
    const char *end;    /* a newline follows */
    uint64_t count;

    return g_file_get_contents("/proc/sys/vm/max_map_count", &text, NULL,
                               NULL) &&
           qemu_strtou64(text, &end, 10, &count) == 0 ? count : 0;
}

void ksm_runner_share_vmas(KsmRunner *runner)
{
    uint64_t max = max_map_count();
    KsmStats stats;
    KsmVmas vmas;

    if (!max) {
        /* nobody knows: libksm goes by its default, the pool has no limit */
        return;
    }
    ksm_engine_get_stats(runner->engine, &stats);
    vmas = ksm_vmas_share(max, qemu_coroutine_pool_wanted(),
                          stats.merged_runs);
    qemu_coroutine_limit_pool(vmas.pool);
    /* setting it makes the engine count its mappings */
    if (vmas.reserve != runner->vma_reserve) {
        runner->vma_reserve = vmas.reserve;
        ksm_engine_set_vma_reserve(runner->engine, vmas.reserve);
    }
    trace_ksm_share_vmas(runner, vmas.reserve, vmas.pool);
}

void ksm_runner_kick(KsmRunner *runner)
{
    /* a pass begins at once, however long the engine meant to rest */
    ksm_engine_set_run(runner->engine, true);
    timer_mod_ns(&runner->timer, qemu_clock_get_ns(QEMU_CLOCK_REALTIME));
}
