/*
 * The threads in which libksm's engines run
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * An engine is stepped by a timer in an iothread.  The engine's lock is held
 * during a step and a vCPU may be waiting for a page that has been taken out,
 * so a step never takes the BQL or waits for anything else of QEMU's.
 */

#include "qemu/osdep.h"
#include "block/aio.h"
#include "qapi/error.h"
#include "qemu/main-loop.h"
#include "qemu/timer.h"
#include "ksm-runner.h"
#include "system/hostmem-ksm.h"
#include "trace.h"

struct KsmRunner {
    KsmRunnerKey key;
    KsmEngine *engine;
    AioContext *ctx;
    QEMUTimer timer;    /* runs in ctx */
    unsigned users;
};

/* The one that new backends use; one that has been put may still be ending. */
static KsmRunner *current;

/* The thread of all runners without one of their own; never ends. */
static IOThread *internal_iothread;

static void runner_step(void *opaque)
{
    KsmRunner *runner = opaque;
    int64_t wait = ksm_step(runner->engine, 0);

    trace_ksm_step(runner, wait);
    if (wait >= 0) {
        timer_mod_ns(&runner->timer,
                     qemu_clock_get_ns(QEMU_CLOCK_REALTIME) + wait);
    }
}

static KsmRunner *runner_new(const KsmRunnerKey *key, Error **errp)
{
    g_autoptr(GError) error = NULL;
    IOThread *iothread = key->iothread ?: internal_iothread;
    KsmConfig config;
    KsmRunner *runner;
    KsmEngine *engine;

    if (!iothread) {
        iothread = internal_iothread = iothread_create("ksm", errp);
        if (!iothread) {
            return NULL;
        }
    }
    ksm_config_init(&config);
    config.scope = key->scope;
    config.dirty = key->dirty;
    config.free_policy = key->free_policy;
    engine = ksm_engine_new(&config, &error);
    if (!engine) {
        error_setg(errp, "%s", error->message);
        return NULL;
    }
    /* which memory to merge is for the op "inhibited" to say */
    ksm_engine_set_run(engine, true);
    runner = g_new0(KsmRunner, 1);
    runner->key = *key;
    runner->engine = engine;
    runner->ctx = iothread_get_aio_context(iothread);
    if (key->iothread) {
        object_ref(OBJECT(key->iothread));
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
        key->scope != other->scope ? "scope" :
        key->dirty != other->dirty ? "dirty-tracking" :
        key->free_policy != other->free_policy ? "free-policy" :
        key->iothread != other->iothread ? "iothread" : NULL;

    if (property) {
        error_setg(errp, "property '%s' must be the same for all objects "
                   TYPE_MEMORY_BACKEND_KSM " with scope=zero or scope=vm",
                   property);
        return false;
    }
    return true;
}

KsmRunner *ksm_runner_get(const KsmRunnerKey *key, Error **errp)
{
    if (!ksm_runner_check(key, errp)) {
        return NULL;
    }
    if (!current) {
        current = runner_new(key, errp);
    }
    if (current) {
        current->users++;
    }
    return current;
}

/* In the main thread: dropping an iothread may mean waiting for it to end. */
static void runner_unref_iothread(void *opaque)
{
    object_unref(OBJECT(opaque));
}

/* In the runner's own thread: no step is going on, and none will follow. */
static void runner_free(void *opaque)
{
    KsmRunner *runner = opaque;

    timer_del(&runner->timer);
    timer_deinit(&runner->timer);
    ksm_engine_free(runner->engine);
    if (runner->key.iothread) {
        aio_bh_schedule_oneshot(qemu_get_aio_context(), runner_unref_iothread,
                                runner->key.iothread);
    }
    g_free(runner);
}

void ksm_runner_put(KsmRunner *runner)
{
    assert(runner->users > 0);
    if (--runner->users == 0) {
        trace_ksm_runner_free(runner);
        current = NULL;
        aio_bh_schedule_oneshot(runner->ctx, runner_free, runner);
    }
}

KsmEngine *ksm_runner_engine(KsmRunner *runner)
{
    return runner->engine;
}

void ksm_runner_tune(KsmRunner *runner, const KsmGuestTuning *tuning)
{
    ksm_engine_set_max_cpu(runner->engine, tuning->max_cpu);
    ksm_engine_set_target_scan(runner->engine, tuning->target_scan_time);
    ksm_engine_set_smart_scan(runner->engine, tuning->smart_scan);
    ksm_runner_kick(runner);
}

void ksm_runner_kick(KsmRunner *runner)
{
    /* a pass begins at once, however long the engine meant to rest */
    ksm_engine_set_run(runner->engine, true);
    timer_mod_ns(&runner->timer, qemu_clock_get_ns(QEMU_CLOCK_REALTIME));
}
