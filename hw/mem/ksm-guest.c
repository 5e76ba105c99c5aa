/*
 * The RAM of memory-backend-ksm objects, from creation to removal
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The kernel merges RAM with scope=host, unless a daemon serves the host's
 * group (ksm-host.h).  libksm merges the rest ("ours"), as a
 * region of an engine from the guest's first run until the RAM block goes.
 *
 * Locks: callers hold the BQL, except those of ksm_guest_discard(),
 * ksm_guest_dma_*() and ksm_guests_make_room(): KsmGuest.lock keeps the region
 * for them.  The engine calls the ops with its own lock held, so they take
 * neither.
 *
 * Leaves to others: properties (the caller), threads (ksm-runner.c),
 * inhibitors (ksm-inhibit.c, ksm-dma.c), statistics (ksm-stats.c).
 */

#include "qemu/osdep.h"
#include "hw/mem/ksm-compat.h"
#include "hw/mem/ksm-hooks.h"
#include "ksm-dma.h"
#include "ksm-guest.h"
#include "ksm-host.h"
#include "ksm-inhibit.h"
#include "ksm-log.h"
#include "ksm-runner.h"
#include "ksm-schema.h"
#include "migration/misc.h"
#include "qapi/error.h"
#include "qapi/qapi-events-ksm-common.h"
#include "qemu/atomic.h"
#include "qemu/cutils.h"
#include "qemu/error-report.h"
#include "qemu/lockable.h"
#include "qemu/madvise.h"
#include "qemu/main-loop.h"
#include "qemu/queue.h"
#include "qemu/rcu.h"
#include "qemu/timer.h"
#include "qemu/units.h"
#include "qom/object.h"
#include "system/runstate.h"
#include "trace.h"

#define TICK_MS 1000

/* Unmerged at a time: others wait some milliseconds for the lock of the RAM. */
#define PIECE ((size_t)4 * MiB)

struct KsmGuest {
    struct rcu_head rcu;
    KsmGuestConfig config;
    KsmGuestTuning tuning;
    Object *owner;              /* of the RAM, and of this: no reference */
    char *id;                   /* of the owner */
    RAMBlock *block;            /* NULL once it is gone */
    uint8_t *host;
    size_t size;
    int dump;                   /* changed to on (1), off (0), -1: never */
    int refused;
    char *not_ours;             /* why the kernel merges it, or NULL */
    QTAILQ_ENTRY(KsmGuest) next;

    bool ours;                  /* libksm merges it; does not change */
    QemuMutex lock;             /* protects region; keeps the block */
    bool held;                  /* see ksm_guests_make_room(); read by ops */
    size_t room;                /* bytes that has unmerged; > size: all */

    /* the rest: only ours */
    KsmRegion *region;          /* NULL while it is not given to the engine */
    KsmRunner *runner;          /* NULL if there can be no engine */
    KsmLog *log;                /* dirty-tracking=log, until the block goes */
    bool run;                   /* as tuning.run; read by ops */
    bool was_inhibited;         /* when last looked at */
    const char *cpus_inhibit;
    char *failure;              /* why there is no runner or region */
    MemoryKsmState told;        /* state of the last event */
    KsmDma *dma;
    QLIST_ENTRY(KsmGuest) next_ours;
};

/* All of them; those that libksm merges. */
static QTAILQ_HEAD(, KsmGuest) guests = QTAILQ_HEAD_INITIALIZER(guests);
static QLIST_HEAD(, KsmGuest) ours = QLIST_HEAD_INITIALIZER(ours);
static QEMUTimer *tick;
static bool ever_ran;
static bool room_made;          /* by the last ksm_guests_make_room() */

bool ksm_guest_is_ours(const KsmGuest *guest)
{
    return guest->ours;
}

static bool guest_has_group(const KsmGuest *guest)
{
    return guest->ours &&
           ksm_schema_scope(guest->config.scope) == KSM_SCOPE_GROUP;
}

static bool guest_wants_ksmd(const KsmGuest *guest)
{
    return !ksm_guest_is_ours(guest) && guest->tuning.run && !guest->held;
}

bool ksm_guest_is_deleted(const KsmGuest *guest)
{
    return !guest->owner->parent;
}

static void guest_unref(void *opaque)
{
    KsmGuest *guest = opaque;

    object_unref(guest->owner);
}

GPtrArray *ksm_guests_get(void)
{
    GPtrArray *all = g_ptr_array_new_with_free_func(guest_unref);
    KsmGuest *guest;

    QTAILQ_FOREACH(guest, &guests, next) {
        if (!ksm_guest_is_deleted(guest)) {
            object_ref(guest->owner);
            g_ptr_array_add(all, guest);
        }
    }
    return all;
}

KsmGuest *ksm_guest_find(const char *id)
{
    KsmGuest *guest;

    QTAILQ_FOREACH(guest, &guests, next) {
        if (!ksm_guest_is_deleted(guest) && g_str_equal(guest->id, id)) {
            return guest;
        }
    }
    return NULL;
}

KsmGuestRam ksm_guest_ram(const KsmGuest *guest)
{
    return (KsmGuestRam) {
        .id = guest->id,
        .scope = guest->config.scope,
        .group = guest->config.scope == MEMORY_KSM_SCOPE_HOST
                 ? KSM_HOST_GROUP : guest->config.group,
        .block = guest->block,
        .host = guest->host,
        .size = guest->size,
        .run = guest->tuning.run,
        .refused = guest->refused,
        .not_ours = guest->not_ours,
    };
}

static KsmRunnerKey runner_key(const KsmGuestConfig *config)
{
    bool host = config->scope == MEMORY_KSM_SCOPE_HOST;

    return (KsmRunnerKey) {
        .scope = ksm_schema_scope(config->scope),
        .group = host ? KSM_HOST_GROUP : config->group,
        .tail = host,
        .group_socket = config->group_socket,
        .dirty = ksm_schema_dirty(config->dirty_tracking),
        .free_policy = ksm_schema_free_policy(config->free_policy),
        .iothread = config->iothread,
    };
}

static bool engine_check(const KsmGuestConfig *config, Error **errp)
{
    KsmRunnerKey key = runner_key(config);
    const char *scope = MemoryKsmScope_str(config->scope);
    g_autoptr(GError) error = NULL;

    if (qemu_real_host_page_size() != KSM_PAGE_SIZE) {
        error_setg(errp, "scope=%s needs a host with pages of %u bytes",
                   scope, KSM_PAGE_SIZE);
        return false;
    }
    if (!ksm_supported(&error)) {
        error_setg(errp, "scope=%s cannot be used: %s", scope,
                   error->message);
        return false;
    }
    if (key.dirty == KSM_DIRTY_LOG && !ksm_log_check(errp)) {
        return false;
    }
    return ksm_runner_check(&key, errp);
}

/* Whatever keeps an engine away, the kernel can do it. */
bool ksm_guest_would_be_ours(const KsmGuestConfig *config, char **why)
{
    const char *socket = config->group_socket ?: KSM_HOST_SOCKET;
    g_autofree char *reason = NULL;
    Error *error = NULL;
    bool ours = true;

    if (config->scope == MEMORY_KSM_SCOPE_HOST) {
        int err = ksm_host_connect(socket);

        ours = err == 0 && engine_check(config, &error);
        if (err == EACCES || err == EPERM) {
            reason = g_strdup_printf("QEMU may not connect to %s (%s), so the "
                                     "kernel merges; if ksm-poold@host serves "
                                     "it, let QEMU's user be of the socket's "
                                     "group, and start the guest anew",
                                     socket, strerror(err));
        } else if (error) {
            reason = g_strdup_printf("ksm-poold@host is there, but the kernel "
                                     "merges: %s", error_get_pretty(error));
            error_free(error);
        }
    }
    if (why) {
        *why = g_steal_pointer(&reason);
    }
    return ours;
}

bool ksm_guest_check(const KsmGuestConfig *config, Error **errp)
{
    switch (config->scope) {
    case MEMORY_KSM_SCOPE_HOST:
        return ksm_guest_would_be_ours(config, NULL) || ksm_host_check(errp);
    case MEMORY_KSM_SCOPE_ZERO:
    case MEMORY_KSM_SCOPE_VM:
    case MEMORY_KSM_SCOPE_GROUP:
        return engine_check(config, errp);
    case MEMORY_KSM_SCOPE__MAX:
        break;
    }
    g_assert_not_reached();
}

void ksm_guest_dma_map(KsmGuest *guest, uint64_t start, uint64_t length)
{
    if (guest->dma) {
        ksm_dma_map(guest->dma, guest->host + start, length);
    }
}

void ksm_guest_dma_unmap(KsmGuest *guest, uint64_t start, uint64_t length)
{
    if (guest->dma) {
        ksm_dma_unmap(guest->dma, guest->host + start, length);
    }
}

/* --- ops, called in ksm_step() --- */

static bool ops_busy(void *opaque, void *addr, size_t len)
{
    KsmGuest *guest = opaque;
    bool busy = ksm_dma_busy(guest->dma, addr, len);

    if (busy) {
        trace_ksm_busy(guest, addr, len);
    }
    return busy;
}

static const char *ops_inhibited(void *opaque)
{
    KsmGuest *guest = opaque;

    if (!qatomic_read(&guest->run)) {
        return "the property 'run' is off";
    }
    if (qatomic_read(&guest->held)) {
        return "a background snapshot needs the memory for itself";
    }
    return guest->cpus_inhibit ?: ksm_inhibited();
}

static bool ops_dirty_sync(void *opaque, size_t first_page, size_t n_pages,
                           unsigned long *bitmap)
{
    KsmGuest *guest = opaque;

    return ksm_log_take(guest->log, first_page, n_pages, bitmap);
}

/*
 * "dump" may have changed since the engine looked.  If it changes now, either
 * this reads the new value, or the change covers this mapping (see
 * ksm_guest_set_dump()).
 */
static void ops_mapped(void *opaque, void *addr, size_t len)
{
    KsmGuest *guest = opaque;
    int applied = -1, wanted;

    /* the range is mapped before "dump" is read */
    smp_mb();
    while ((wanted = qatomic_read(&guest->dump)) != applied) {
        qemu_madvise(addr, len, wanted ? QEMU_MADV_DODUMP
                                       : QEMU_MADV_DONTDUMP);
        applied = wanted;
        /* and marked before it is read again */
        smp_mb();
    }
}

static const KsmRegionOps guest_ops = {
    .busy = ops_busy,
    .inhibited = ops_inhibited,
    .mapped = ops_mapped,
};

static const KsmRegionOps guest_ops_log = {
    .dirty_sync = ops_dirty_sync,
    .busy = ops_busy,
    .inhibited = ops_inhibited,
    .mapped = ops_mapped,
};

/* --- giving RAM to the engine and taking it back --- */

static void guest_attach(KsmGuest *guest)
{
    g_autoptr(GError) error = NULL;

    guest->cpus_inhibit = ksm_inhibited_by_cpus();
    /* devices are there by now, and nothing is merged before */
    ksm_runner_share_vmas(guest->runner);
    if (guest_has_group(guest)) {
        /* as for all RAM, but under qtest */
        qemu_madvise(guest->host, guest->size, QEMU_MADV_DONTFORK);
    }
    WITH_QEMU_LOCK_GUARD(&guest->lock) {
        guest->region = ksm_region_add(ksm_runner_engine(guest->runner),
                                       guest->host, guest->size,
                                       guest->config.node,
                                       guest->log ? &guest_ops_log
                                                  : &guest_ops,
                                       guest, &error);
    }
    trace_ksm_attach(guest->id, guest->host, guest->size,
                     error ? error->message : "");
    if (guest->region) {
        g_clear_pointer(&guest->failure, g_free);
        ksm_runner_kick(guest->runner);
    } else if (!guest->failure) {
        /* warn once: guests_tick() tries again */
        guest->failure = g_strdup(error->message);
        warn_report("the memory of %s is not merged: %s", guest->id,
                    error->message);
    }
}

/* The RAM is about to be unmapped. */
static void guest_detach(KsmGuest *guest)
{
    QEMU_LOCK_GUARD(&guest->lock);

    if (guest->region) {
        trace_ksm_detach(guest->id);
        ksm_region_remove(guest->region, KSM_REMOVE_FORGET);
        guest->region = NULL;
    }
    g_clear_pointer(&guest->log, ksm_log_free);
}

/*
 * Not before the guest first runs: until then firmware and the incoming stream
 * fill RAM, and postcopy may need userfaultfd on it.
 */
static void guest_try_attach(KsmGuest *guest)
{
    if (guest->runner && guest->block && !guest->region && ever_ran &&
        !ksm_inhibited()) {
        guest_attach(guest);
    }
}

static MemoryKsmState guest_state(const KsmGuest *guest,
                                  const KsmGuestInfo *info)
{
    if (!guest->run) {
        return MEMORY_KSM_STATE_OFF;
    }
    if (info->inhibited || !info->has_stats || info->group_gone) {
        return MEMORY_KSM_STATE_INHIBITED;
    }
    /* the engine may not have noticed yet that it may go on */
    return info->region.state == KSM_STATE_INHIBITED ?
           MEMORY_KSM_STATE_ACTIVE : ksm_schema_state(info->region.state);
}

void ksm_guest_info(KsmGuest *guest, KsmGuestInfo *info)
{
    *info = (KsmGuestInfo) {
        .failure = guest->failure,
        .has_stats = guest->region != NULL,
        .inhibited = ops_inhibited(guest),
        .has_log = guest->log != NULL,
        .log_time = ksm_log_time(),
    };
    if (guest->region) {
        ksm_region_get_stats(guest->region, &info->region);
        ksm_engine_get_stats(ksm_runner_engine(guest->runner), &info->engine);
        info->has_group = ksm_engine_get_group(
            ksm_runner_engine(guest->runner), &info->group);
        info->group_gone = info->has_group && !info->group.connected ?
                           ksm_reason_text(info->group.why) : NULL;
        info->group_why = info->group.why;
    } else if (!info->failure && !info->inhibited) {
        info->inhibited = "the guest has not run yet";
    }
    info->state = guest_state(guest, info);
}

KsmEngine *ksm_guest_engine(const KsmGuest *guest)
{
    return guest->runner ? ksm_runner_engine(guest->runner) : NULL;
}

MemoryKsmReasonList *ksm_guest_reasons(const KsmGuest *guest,
                                       const KsmGuestInfo *info)
{
    MemoryKsmReasonList *list = NULL;

    if (info->inhibited) {
        ksm_schema_add_reason(&list,
                              guest->run ? MEMORY_KSM_REASON_KIND_INHIBITED
                                         : MEMORY_KSM_REASON_KIND_RUN_OFF,
                              info->inhibited, 0);
    }
    if (info->failure) {
        ksm_schema_add_reason(&list, MEMORY_KSM_REASON_KIND_REFUSED,
                              info->failure, 0);
    }
    if (info->group_gone) {
        ksm_schema_add_reason(&list, ksm_schema_reason(info->group_why),
                              info->group_gone, 0);
    }
    return list;
}

/* The monitor limits how often. */
static void guest_tell(KsmGuest *guest)
{
    KsmGuestInfo info;
    MemoryKsmReasonList *reasons;

    ksm_guest_info(guest, &info);
    if (info.state == guest->told) {
        return;
    }
    guest->told = info.state;
    trace_ksm_state(guest->id, MemoryKsmState_str(info.state),
                    info.inhibited ?: "");
    reasons = ksm_guest_reasons(guest, &info);
    qapi_event_send_memory_ksm_state_change(guest->id, info.state, reasons,
                                            info.failure ?:
                                            info.inhibited ?:
                                            info.group_gone);
    qapi_free_MemoryKsmReasonList(reasons);
}

static void guest_resume(KsmGuest *guest)
{
    bool inhibited;

    if (guest->held && !ksm_inhibited()) {
        qatomic_set(&guest->held, false);
    }
    inhibited = ops_inhibited(guest);
    if (guest->was_inhibited && !inhibited && guest->region) {
        ksm_runner_kick(guest->runner);
    }
    guest->was_inhibited = inhibited;
}

static int guest_advise(const KsmGuest *guest);

/* The kernel may have it again. */
static void guest_resume_kernel(KsmGuest *guest)
{
    if (guest->held && !migration_is_running()) {
        guest->held = false;
        guest->refused = guest->block ? guest_advise(guest) : 0;
    }
}

/* False: nobody needs another look. */
static bool guests_look(void)
{
    bool again = false;
    KsmGuest *guest;

    QTAILQ_FOREACH(guest, &guests, next) {
        if (ksm_guest_is_ours(guest)) {
            guest_try_attach(guest);
            guest_resume(guest);
            guest_tell(guest);
        } else {
            guest_resume_kernel(guest);
        }
        again |= ksm_guest_is_ours(guest) || guest->held;
    }
    return again;
}

static void guests_look_after(int ms)
{
    timer_mod(tick, qemu_clock_get_ms(QEMU_CLOCK_REALTIME) + ms);
}

/* The log costs the guest time: it is off while nobody merges. */
static void guests_switch_log(void)
{
    bool on = false;
    KsmGuest *guest;

    QLIST_FOREACH(guest, &ours, next_ours) {
        on |= guest->log && guest->region && !ops_inhibited(guest);
    }
    ksm_log_switch(on);
}

/* Devices come and go. */
static void guests_share_vmas(void)
{
    KsmGuest *guest;

    QLIST_FOREACH(guest, &ours, next_ours) {
        if (guest->region) {
            /* all have the same runner */
            ksm_runner_share_vmas(guest->runner);
            return;
        }
    }
}

/* Once a second: soon enough to resume. */
static void guests_tick(void *opaque)
{
    bool again = guests_look();

    guests_switch_log();
    guests_share_vmas();
    if (again) {
        guests_look_after(TICK_MS);
    }
}

static void guests_vm_state(void *opaque, bool running, RunState state)
{
    if (running) {
        ever_ran = true;
        /* RAM may have been loaded meanwhile (loadvm) */
        ksm_log_forget();
        guests_look();
        /* not here: the log has a handler like this one, and may drop it */
        guests_look_after(0);
    }
}

bool ksm_guest_makes_room(KsmGuest *guest)
{
    /* a device would keep the pages that were: see guest_may_unmerge() */
    return !ksm_pinned();
}

/* From now on nothing is merged, but for what ksmd still has. */
static void guests_hold(void)
{
    BQL_LOCK_GUARD();
    KsmGuest *guest;

    room_made = true;
    QTAILQ_FOREACH(guest, &guests, next) {
        /* whatever it is held for already: the snapshot before this one */
        bool hold = ksm_guest_is_ours(guest)
                    ? guest->region && ksm_guest_makes_room(guest)
                    : guest->tuning.run;

        guest->room = 0;
        qatomic_set(&guest->held, hold);
        if (hold) {
            guests_look_after(TICK_MS);
        }
    }
}

/*
 * The next with merged memory left, its lock held: that keeps the region while
 * the main loop and the vCPUs have the BQL.
 */
static KsmGuest *guests_next_in_the_way(void)
{
    BQL_LOCK_GUARD();
    KsmGuest *guest;

    QTAILQ_FOREACH(guest, &guests, next) {
        qemu_mutex_lock(&guest->lock);
        if ((guest->region || (!guest->ours && guest->block)) &&
            guest->held && guest->room <= guest->size) {
            return guest;
        }
        qemu_mutex_unlock(&guest->lock);
    }
    return NULL;
}

static void guest_made_room(KsmGuest *guest, int ret)
{
    if (ret < 0 && room_made) {
        warn_report("the memory of %s cannot be unmerged: %s", guest->id,
                    strerror(-ret));
        room_made = false;
    }
}

/*
 * The region stays with the engine: pages that a device is writing stay in
 * mappings of the pool, and only the engine can discard them.
 */
static void guest_make_some_room(KsmGuest *guest)
{
    size_t size = MIN(PIECE, guest->size - guest->room);
    int ret;

    if (!ksm_guest_is_ours(guest)) {
        ret = ksm_host_unmerge(guest->host + guest->room, size);
        guest_made_room(guest, -ret);
        guest->room += size ?: 1;
        return;
    }
    if (size) {
        /* the call at the end tells of leftovers */
        ksm_unmerge(guest->region, guest->room, size);
        guest->room += size;
        return;
    }
    /* little is left to do, but only this ends the tracking of writes */
    ret = ksm_unmerge(guest->region, 0, guest->size);
    trace_ksm_make_room(guest->id, ret);
    /* pages a device writes to stay in a mapping of the pool: no harm */
    guest_made_room(guest, ret == -EBUSY ? 0 : ret);
    guest->room = SIZE_MAX;
}

void ksm_guests_make_room(void)
{
    KsmGuest *guest;

    guests_hold();
    do {
        RCU_READ_LOCK_GUARD();

        guest = guests_next_in_the_way();
        if (guest) {
            guest_make_some_room(guest);
            qemu_mutex_unlock(&guest->lock);
        }
    } while (guest);
}

bool ksm_guests_made_room(void)
{
    return room_made;
}

/* The RAM block is about to go: its users have stopped. */
static void guests_block_removed(RAMBlockNotifier *n, void *host, size_t size,
                                 size_t max_size)
{
    KsmGuest *guest;

    QTAILQ_FOREACH(guest, &guests, next) {
        if (guest->block && guest->host == host) {
            guest_detach(guest);
            guest->block->ksm = NULL;
            guest->block = NULL;
            return;
        }
    }
}

static void guests_init(void)
{
    static RAMBlockNotifier notifier;

    if (!notifier.ram_block_removed) {
        notifier.ram_block_removed = guests_block_removed;
        ram_block_notifier_add(&notifier);
        tick = timer_new_ms(QEMU_CLOCK_REALTIME, guests_tick, NULL);
    }
}

static void ours_init(void)
{
    static bool done;

    if (!done) {
        done = true;
        qemu_add_vm_change_state_handler(guests_vm_state, NULL);
        ever_ran = runstate_is_running();
    }
}

static bool guest_may_unmerge(const KsmGuest *guest, uint64_t offset,
                              uint64_t size, Error **errp)
{
    if ((offset | size) % KSM_PAGE_SIZE) {
        error_setg(errp, "offset and size must be multiples of %u",
                   KSM_PAGE_SIZE);
        return false;
    }
    if (offset > guest->size || size > guest->size - offset) {
        g_autofree char *all = size_to_str(guest->size);

        error_setg(errp, "the memory of %s ends at %s", guest->id, all);
        return false;
    }
    if (guest->tuning.run) {
        error_setg(errp, "the property 'run' of %s must be off, or its memory "
                   "would be merged again", guest->id);
        return false;
    }
    /*
     * Migration by RDMA registers RAM as it goes, mostly for reading, and says
     * so to nobody: it would go on sending the pages that were.
     */
    if (migration_is_running()) {
        error_setg(errp, "cannot unmerge while a migration or snapshot is "
                   "running");
        return false;
    }
    /*
     * VFIO knows where RAM is: pages its device writes to have memory of their
     * own already, and must not move.  For devices that come meanwhile the op
     * "busy" is asked, page by page.
     */
    if (ksm_pinned() || ksm_bypassed()) {
        error_setg(errp, "cannot unmerge while a device has the memory "
                   "mapped");
        return false;
    }
    return true;
}

/* Piece by piece, until the time is over. */
static bool guest_unmerge_some(KsmGuest *guest, uint64_t offset, uint64_t size,
                               int64_t max_ms, uint64_t *done, Error **errp)
{
    int64_t end = get_clock() + max_ms * SCALE_MS;

    while (*done < size) {
        uint64_t at = offset + *done;
        uint64_t piece = MIN(PIECE - at % PIECE, size - *done);
        int ret = ksm_unmerge(guest->region, at, piece);

        trace_ksm_unmerge(guest->id, at, piece, ret);
        if (ret < 0) {
            error_setg_errno(errp, -ret, "not all of the %" PRIu64 " bytes at "
                             "offset %" PRIu64 " could be unmerged", piece, at);
            return false;
        }
        *done += piece;
        if (get_clock() >= end) {
            break;
        }
    }
    return true;
}

bool ksm_guest_unmerge(KsmGuest *guest, uint64_t offset, uint64_t size,
                       int64_t max_ms, uint64_t *done, Error **errp)
{
    int ret;

    *done = 0;
    if (!guest_may_unmerge(guest, offset, size, errp)) {
        return false;
    }
    if (guest->region && max_ms >= 0) {
        return guest_unmerge_some(guest, offset, size, max_ms, done, errp);
    }
    if (guest->region) {
        ret = ksm_unmerge(guest->region, offset, size);
        trace_ksm_unmerge(guest->id, offset, size, ret);
        if (ret < 0) {
            error_setg_errno(errp, -ret, "not all could be unmerged");
            return false;
        }
    }
    *done = size;
    return true;
}

bool ksm_guest_discard(KsmGuest *guest, uint64_t start, size_t length,
                       int *ret)
{
    QEMU_LOCK_GUARD(&guest->lock);

    if (!guest->region) {
        return false;
    }
    *ret = ksm_discard(guest->region, start, length);
    trace_ksm_discard(guest->id, start, length, *ret);
    return true;
}

/* NULL: RAM of something else. */
static KsmGuest *guest_of(const RAMBlock *block)
{
    KsmGuest *guest;

    QTAILQ_FOREACH(guest, &guests, next) {
        if (guest->block == block) {
            return guest;
        }
    }
    return NULL;
}

bool ksm_ram_remapped(RAMBlock *block, uint64_t start, uint64_t length)
{
    KsmGuest *guest = guest_of(block);
    bool dump, merge;

    if (!guest) {
        return false;
    }
    dump = guest->dump < 0 ? guest->config.dump : guest->dump;
    merge = guest_wants_ksmd(guest);
    trace_ksm_remapped(block->idstr, start, length, dump, merge);
    /* mapped anew, it is dumped and not mergeable */
    if (!dump) {
        qemu_madvise(block->host + start, length, QEMU_MADV_DONTDUMP);
    }
    if (merge) {
        ksm_host_merge(block->host + start, length);
    }
    return true;
}

/* One engine for all: the least restrictive tuning. */
static void guests_tune(KsmRunner *runner)
{
    KsmEngine *engine = ksm_runner_engine(runner);
    KsmGuestTuning all = { .smart_scan = true };
    KsmGuest *guest;

    QEMU_BUILD_BUG_ON(KSM_GUEST_THREADS != KSM_THREADS_MAX);
    QLIST_FOREACH(guest, &ours, next_ours) {
        const KsmGuestTuning *one = &guest->tuning;

        all.threads = MAX(all.threads, one->threads);
        all.max_cpu = MAX(all.max_cpu, one->max_cpu);
        all.smart_scan &= one->smart_scan;
        /* 0 is as fast as max-cpu allows; here none so far */
        all.target_scan_time =
            QLIST_FIRST(&ours) == guest ? one->target_scan_time :
            MIN(all.target_scan_time, one->target_scan_time);
    }
    ksm_engine_set_threads(engine, all.threads);
    ksm_engine_set_max_cpu(engine, all.max_cpu);
    ksm_engine_set_target_scan(engine, all.target_scan_time);
    ksm_engine_set_smart_scan(engine, all.smart_scan);
    ksm_runner_kick(runner);
}

/* Some are gone: the engine need not do what was for them alone. */
static void guests_tune_left(void)
{
    KsmGuest *guest;

    QLIST_FOREACH(guest, &ours, next_ours) {
        if (guest->runner) {
            guests_tune(guest->runner);
            return;
        }
    }
}

int ksm_guest_hint(KsmGuest *guest, uint64_t start, size_t length)
{
    QEMU_LOCK_GUARD(&guest->lock);

    return guest->region ? ksm_free_hint(guest->region, start, length)
                         : -ENOENT;
}

static void guest_init_ours(KsmGuest *guest)
{
    KsmRunnerKey key = runner_key(&guest->config);
    Error *err = NULL;

    ours_init();
    guest->dma = ksm_dma_new(guest->host, guest->size);
    guest->run = guest->tuning.run;
    guest->told = MEMORY_KSM_STATE__MAX;
    if (key.dirty == KSM_DIRTY_LOG) {
        guest->log = ksm_log_new(guest->block);
    }
    guest->runner = ksm_runner_get(&key, guest->config.group_fd, &err);
    guest->config.group_fd = -1;
    if (!guest->runner) {
        guest->failure = g_strdup(error_get_pretty(err));
        warn_reportf_err(err, "the memory of %s will not be merged: ",
                         guest->id);
    }
    QLIST_INSERT_HEAD(&ours, guest, next_ours);
    if (guest->runner) {
        guests_tune(guest->runner);
    }
    guest->block->ksm = guest;
    timer_mod(tick, qemu_clock_get_ms(QEMU_CLOCK_REALTIME));
}

/* In both cases: QEMU has marked it already, unless -machine mem-merge=off. */
static int guest_advise(const KsmGuest *guest)
{
    return guest_wants_ksmd(guest) ? ksm_host_merge(guest->host, guest->size)
                                   : ksm_host_unmerge(guest->host, guest->size);
}

KsmGuest *ksm_guest_new(MemoryRegion *mr, const KsmGuestConfig *config,
                        const KsmGuestTuning *tuning)
{
    KsmGuest *guest = g_new0(KsmGuest, 1);

    guests_init();
    guest->config = *config;
    guest->ours = ksm_guest_would_be_ours(config, &guest->not_ours);
    guest->tuning = *tuning;
    guest->owner = memory_region_owner(mr);
    guest->id = g_strdup(object_get_canonical_path_component(guest->owner));
    guest->block = mr->ram_block;
    guest->host = memory_region_get_ram_ptr(mr);
    guest->size = memory_region_size(mr);
    guest->dump = -1;
    qemu_mutex_init(&guest->lock);
    QTAILQ_INSERT_TAIL(&guests, guest, next);
    guest->refused = guest_advise(guest);
    if (ksm_guest_is_ours(guest)) {
        guest_init_ours(guest);
    } else if (guest->refused) {
        warn_report("the memory of %s will not be merged: %s",
                    guest->id, strerror(guest->refused));
    } else if (guest->not_ours) {
        warn_report("the memory of %s: %s", guest->id, guest->not_ours);
    }
    return guest;
}

static void guest_reclaim(KsmGuest *guest)
{
    qemu_mutex_destroy(&guest->lock);
    g_free(guest->id);
    g_free(guest->failure);
    g_free(guest->not_ours);
    ksm_dma_free(guest->dma);
    g_free(guest);
}

void ksm_guest_free(KsmGuest *guest)
{
    QTAILQ_REMOVE(&guests, guest, next);
    /* scope=host: freeing merged memory needs no unmerging */
    if (ksm_guest_is_ours(guest)) {
        assert(!guest->region);
        QLIST_REMOVE(guest, next_ours);
        if (guest->runner) {
            ksm_runner_put(guest->runner);
            guests_tune_left();
        }
    }
    call_rcu(guest, guest_reclaim, rcu);
}

bool ksm_guest_tune(KsmGuest *guest, const KsmGuestTuning *tuning,
                    Error **errp)
{
    guest->tuning = *tuning;
    if (ksm_guest_is_ours(guest)) {
        qatomic_set(&guest->run, tuning->run);
        if (guest->runner) {
            guests_tune(guest->runner);
        }
        guest_resume(guest);
        guest_tell(guest);
        guests_look_after(0);
        return true;
    }
    guest->refused = guest_advise(guest);
    if (guest->refused) {
        error_setg_errno(errp, guest->refused, "the kernel could not %s the "
                         "memory", tuning->run ? "merge" : "unmerge");
        return false;
    }
    return true;
}

void ksm_guest_set_dump(KsmGuest *guest, bool dump)
{
    qatomic_set(&guest->dump, dump);
    /* then the caller marks all, new mappings of the engine included */
    smp_mb();
}
