/*
 * Guest RAM that the guest gives back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A KsmFreer without an engine applies the property 'free-policy' to RAM with
 * scope=host.  The engine, which knows merged pages, applies it to other RAM.
 *
 * Under these conditions virtio-balloon discards nothing, and nothing may be
 * freed lazily:
 *
 * - Discards are disabled (VFIO): the page that the device writes must stay the
 *   one the guest sees.  Pages freed lazily before get pinned with RAM, and the
 *   kernel does not take back pinned pages.
 * - Postcopy: a page taken back after it came would be asked for again, and
 *   never come.  Before it is complete, no guest in this process has freed
 *   anything.
 * - Background snapshot: write protection is lost with the page.
 * - Page poison other than 0: the guest wants its own pattern back.
 *
 * Free page hints (for migration) are no releases: these pages are not sent.
 *
 * Leaves to others: lazy or eager (libksm, room free), merged pages
 * (ksm-guest.c), the monitor (ksm-stats.c).
 */

#include "qemu/osdep.h"
#include "block/aio.h"
#include "block/thread-pool.h"
#include "exec/cpu-common.h"
#include "hw/mem/ksm-compat.h"
#include "hw/mem/ksm-balloon.h"
#include "hw/qdev-core.h"
#include "hw/virtio/virtio-balloon.h"
#include "ksm-guest.h"
#include "ksm-schema.h"
#include "libksm-free.h"
#include "migration/misc.h"
#include "qemu/atomic.h"
#include "qemu/queue.h"
#include "qemu/timer.h"
#include "qom/object.h"
#include "trace.h"

/* How often to see whether RAM may be discarded again. */
#define RETRY_NS (1000 * 1000 * 1000)
/* Steps of the freer in one go of a worker. */
#define STEPS 64

struct KsmBalloon {
    KsmGuest *guest;
    QLIST_ENTRY(KsmBalloon) next;
    KsmFreer *freer;            /* NULL: the engine decides (zero, vm) */
    /* the rest: only with a freer */
    QEMUTimer *timer;           /* for memory that has been free long enough */
    bool working;               /* a worker thread has the freer */
    bool gone;                  /* ... and is the last to use it */
    int64_t wait;               /* until its next step: ns, or -1 */
};

/* Pages next to each other that wait for ksm_balloon_flush(). */
static struct {
    RAMBlock *rb;               /* NULL: none */
    uint64_t start;
    size_t length;
} batch;

static QLIST_HEAD(, KsmBalloon) balloons = QLIST_HEAD_INITIALIZER(balloons);

/* NULL: not the RAM of a memory-backend-ksm. */
static KsmBalloon *balloon_of(const RAMBlock *rb)
{
    KsmBalloon *balloon;

    QLIST_FOREACH(balloon, &balloons, next) {
        if (ksm_guest_ram(balloon->guest).block == rb) {
            return balloon;
        }
    }
    return NULL;
}

/* As virtio-balloon has it: may RAM be discarded at present? */
static bool inhibited(void)
{
    return ram_block_discard_is_disabled() ||
           migration_in_incoming_postcopy() || migration_in_bg_snapshot();
}

static void balloon_delete(KsmBalloon *balloon)
{
    if (balloon->timer) {
        timer_free(balloon->timer);
    }
    if (balloon->freer) {
        ksm_freer_free(balloon->freer);
    }
    g_free(balloon);
}

static void decay_arm(KsmBalloon *balloon, int64_t wait)
{
    timer_mod(balloon->timer, qemu_clock_get_ns(QEMU_CLOCK_REALTIME) + wait);
}

/*
 * In a worker thread, without the BQL: the kernel is slow here.  The memory may
 * go meanwhile: the kernel drops only lazily free pages.
 */
static int decay_work(void *opaque)
{
    KsmBalloon *balloon = opaque;
    int64_t wait = 0;

    for (int i = 0; i < STEPS && wait == 0; i++) {
        wait = qatomic_read(&balloon->gone) ? -1
                                            : ksm_freer_step(balloon->freer);
    }
    balloon->wait = wait;
    return 0;
}

static void decay_worked(void *opaque, int ret)
{
    KsmBalloon *balloon = opaque;

    balloon->working = false;
    if (balloon->gone) {
        balloon_delete(balloon);
        return;
    }
    trace_ksm_balloon_decay(balloon, balloon->wait);
    if (balloon->wait >= 0) {
        decay_arm(balloon, balloon->wait);
    }
}

static void decay_timer(void *opaque)
{
    KsmBalloon *balloon = opaque;

    if (inhibited()) {
        decay_arm(balloon, RETRY_NS);
    } else if (!balloon->working) {
        balloon->working = true;
        thread_pool_submit_aio(decay_work, balloon, decay_worked, balloon);
    }
}

static int release_freer(KsmBalloon *balloon, void *host, size_t length)
{
    int ret = ksm_freer_release(balloon->freer, host, length);

    /* the first look tells when something is due; after that it goes on */
    if (!ret && !balloon->working && !timer_pending(balloon->timer)) {
        decay_arm(balloon, KSM_FREER_STEP_NS);
    }
    return ret;
}

bool ksm_balloon_give(RAMBlock *rb, uint64_t start, size_t length)
{
    KsmBalloon *balloon = balloon_of(rb);
    int ret;

    if (!balloon ||
        !QEMU_IS_ALIGNED(start | length, qemu_ram_pagesize(rb)) ||
        start + length < start ||
        start + length > qemu_ram_get_used_length(rb)) {
        return false;
    }
    if (balloon->freer) {
        ret = release_freer(balloon,
                            (uint8_t *)qemu_ram_get_host_addr(rb) + start,
                            length);
    } else {
        ret = ksm_guest_hint(balloon->guest, start, length);
    }
    trace_ksm_balloon_give(qemu_ram_get_idstr(rb), start, length, ret);
    return ret == 0;
}

void ksm_balloon_flush(void)
{
    if (batch.rb && !ksm_balloon_give(batch.rb, batch.start, batch.length)) {
        /* errors were reported; for a balloon they are not fatal */
        ram_block_discard_range(batch.rb, batch.start, batch.length);
    }
    batch.rb = NULL;
}

bool ksm_balloon_collect(RAMBlock *rb, uint64_t start, size_t length)
{
    if (batch.rb == rb && start == batch.start + batch.length) {
        batch.length += length;
        return true;
    }
    /* Linux gives them upwards or downwards */
    if (batch.rb == rb && start + length == batch.start) {
        batch.start = start;
        batch.length += length;
        return true;
    }
    ksm_balloon_flush();
    if (!balloon_of(rb)) {
        return false;
    }
    batch.rb = rb;
    batch.start = start;
    batch.length = length;
    return true;
}

KsmBalloon *ksm_balloon_new(KsmGuest *guest, MemoryKsmFreePolicy policy)
{
    KsmBalloon *balloon = g_new0(KsmBalloon, 1);

    balloon->guest = guest;
    if (!ksm_guest_is_ours(guest)) {
        balloon->freer = ksm_freer_new(ksm_schema_free_policy(policy));
        balloon->timer = timer_new_ns(QEMU_CLOCK_REALTIME, decay_timer,
                                      balloon);
    }
    QLIST_INSERT_HEAD(&balloons, balloon, next);
    return balloon;
}

void ksm_balloon_free(KsmBalloon *balloon)
{
    QLIST_REMOVE(balloon, next);
    qatomic_set(&balloon->gone, true);
    if (balloon->working) {
        timer_del(balloon->timer);
        return;
    }
    balloon_delete(balloon);
}

bool ksm_balloon_get_stats(const KsmGuest *guest, KsmBalloonStats *stats)
{
    KsmBalloon *balloon;
    KsmFreerStats freed;

    QLIST_FOREACH(balloon, &balloons, next) {
        if (balloon->guest == guest && balloon->freer) {
            ksm_freer_get_stats(balloon->freer, &freed);
            *stats = (KsmBalloonStats) {
                .hinted = freed.released,
                .eager = freed.eager,
                .decayed = freed.decayed,
            };
            return true;
        }
    }
    return false;
}

const char *ksm_balloon_inert(void)
{
    Object *obj = object_resolve_path_type("", TYPE_VIRTIO_BALLOON, NULL);
    VirtIODevice *vdev;

    if (!obj || !DEVICE(obj)->realized) {
        return "the guest cannot give memory back: there is no virtio-balloon "
               "device; use -device virtio-balloon-pci,free-page-reporting=on";
    }
    vdev = VIRTIO_DEVICE(obj);
    if (!(vdev->status & VIRTIO_CONFIG_S_DRIVER_OK)) {
        return "the guest gives no memory back: it does not use its "
               "virtio-balloon device";
    }
    if (ram_block_discard_is_disabled()) {
        return "memory that the guest gives back is not released: RAM must "
               "stay where it is for a device (VFIO)";
    }
    if (inhibited()) {
        return "memory that the guest gives back is not released: a postcopy "
               "migration or a background snapshot is not complete";
    }
    if (VIRTIO_BALLOON(obj)->actual) {
        return NULL;
    }
    if (!virtio_has_feature(VIRTIO_BALLOON(obj)->host_features,
                            VIRTIO_BALLOON_F_REPORTING)) {
        return "the guest gives no memory back: its balloon is empty, and "
               "free-page-reporting of the virtio-balloon device is off";
    }
    if (!virtio_vdev_has_feature(vdev, VIRTIO_BALLOON_F_REPORTING)) {
        return "the guest gives no memory back: its balloon is empty, and its "
               "driver does not report free pages";
    }
    if (VIRTIO_BALLOON(obj)->poison_val) {
        return "memory that the guest gives back is not released: the guest "
               "poisons free pages, and wants to find the poison again";
    }
    return NULL;
}
