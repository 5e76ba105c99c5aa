/*
 * Guest RAM that the guest gives back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The engine, which knows merged pages, applies the property 'free-policy'.
 * RAM that the kernel's KSM merges is discarded: lazily freed, a page of its
 * stable tree can be lost to others (libksm-free.h).
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
 * Leaves to others: lazy or eager, and merged pages (ksm-guest.c, libksm), the
 * monitor (ksm-stats.c).
 */

#include "qemu/osdep.h"
#include "exec/cpu-common.h"
#include "hw/mem/ksm-compat.h"
#include "hw/mem/ksm-balloon.h"
#include "hw/qdev-core.h"
#include "hw/virtio/virtio-balloon.h"
#include "ksm-guest.h"
#include "migration/misc.h"
#include "qemu/queue.h"
#include "qom/object.h"
#include "trace.h"

struct KsmBalloon {
    KsmGuest *guest;
    QLIST_ENTRY(KsmBalloon) next;
    uint64_t discarded;         /* pages, of RAM that the kernel merges */
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
    if (ksm_guest_is_ours(balloon->guest)) {
        ret = ksm_guest_hint(balloon->guest, start, length);
    } else {
        ret = ram_block_discard_range(rb, start, length);
        balloon->discarded += ret ? 0 : length / qemu_real_host_page_size();
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

KsmBalloon *ksm_balloon_new(KsmGuest *guest)
{
    KsmBalloon *balloon = g_new0(KsmBalloon, 1);

    balloon->guest = guest;
    QLIST_INSERT_HEAD(&balloons, balloon, next);
    return balloon;
}

void ksm_balloon_free(KsmBalloon *balloon)
{
    QLIST_REMOVE(balloon, next);
    g_free(balloon);
}

bool ksm_balloon_discarded(const KsmGuest *guest, uint64_t *pages)
{
    KsmBalloon *balloon;

    QLIST_FOREACH(balloon, &balloons, next) {
        if (balloon->guest == guest && !ksm_guest_is_ours(guest)) {
            *pages = balloon->discarded;
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
