/*
 * Conditions under which guest RAM must not be merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Each reason stands next to the corruption (or failure) it prevents.  The
 * merging thread asks before each chunk.
 */

#include "qemu/osdep.h"
#include "hw/core/cpu.h"
#include "hw/mem/ksm-compat.h"
#include "hw/mem/ksm-hooks.h"
#include "hw/qdev-core.h"
#include "ksm-inhibit.h"
#include "ksm-log.h"
#include "libksm.h"
#include "migration/misc.h"
#include "qapi/error.h"
#include "qemu/atomic.h"
#include "qemu/cutils.h"
#include "system/kvm.h"
#include "system/qtest.h"
#include "system/runstate.h"
#include "system/tcg.h"
#include <sys/utsname.h>

/* Writers to RAM that QEMU does not see. */
static unsigned bypass;

void ksm_guests_bypass_begin(void)
{
    qatomic_inc(&bypass);
}

void ksm_guests_bypass_end(void)
{
    qatomic_dec(&bypass);
}

bool ksm_bypassed(void)
{
    return qatomic_read(&bypass) > 0;
}

/* Those that may pin RAM, or know where it is, unseen by QEMU. */
static unsigned pins;

void ksm_guests_pin_begin(void)
{
    /* full barriers: see ksm_dma_busy() */
    qatomic_inc(&pins);
    ksm_guests_discards_disabled();
}

void ksm_guests_pin_end(void)
{
    qatomic_dec(&pins);
}

void ksm_guests_settle(void)
{
    ksm_settle();
}

void ksm_guests_discards_disabled(void)
{
    ksm_settle();
    /*
     * VFIO: a container that comes while the log is on is told to track writes
     * when it has no devices yet, and not again when a migration joins: its
     * pages would be missing there.  vhost-vdpa: a device that comes then, and
     * whose driver begins at once, has to log, and fails if it cannot.  So it
     * is off now, not at the next tick; while the guest is stopped QEMU puts
     * that off until then.
     */
    ksm_log_switch(false);
}

bool ksm_pinned(void)
{
    /*
     * VFIO counts itself, since it disables discards late (a device that joins
     * a container pins first), or not at all (ccw, ap, mdev with
     * x-balloon-allowed).  The others disable discards before they pin:
     * vhost-vdpa, nvme, libblkio.
     */
    return qatomic_read(&pins) > 0 || ram_block_discard_is_disabled();
}

const char *ksm_inhibited(void)
{
    /*
     * vhost-scsi: the kernel's target takes plain references to the pages of
     * a request.  A page that is replaced meanwhile loses the data read.
     */
    if (ksm_bypassed()) {
        return "vhost-scsi writes to memory in a way that QEMU does not see";
    }
    /*
     * A VFIO device has, or had, addresses of RAM, and would not know of a page
     * replaced afterwards.
     */
    if (ram_block_discard_is_disabled()) {
        return "RAM must stay where it is for a device (VFIO): discarding RAM "
               "is disabled";
    }
    /*
     * The same where a device pins page by page (ccw, ap, mdev): pinned pages
     * are not merged, but nobody could tell when a merged page copied on write
     * and then pinned may be replaced.
     */
    if (ksm_pinned()) {
        return "RAM must stay where it is for a device (VFIO)";
    }
    /*
     * RAM is about to be written from the stream, and postcopy needs
     * userfaultfd on it.
     */
    if (runstate_check(RUN_STATE_INMIGRATE) ||
        migration_in_incoming_postcopy()) {
        return "an incoming migration is not complete";
    }
    /*
     * A background snapshot needs userfaultfd on RAM for itself.  Others read
     * all RAM once: merging would compete for the guest's time.
     */
    if (migration_is_running()) {
        return "a migration or snapshot is running";
    }
    if (runstate_check(RUN_STATE_SAVE_VM) ||
        runstate_check(RUN_STATE_RESTORE_VM)) {
        return "a snapshot is being saved or loaded";
    }
    return NULL;
}

/*
 * Until Linux 6.13 KVM keeps references to pages of nested guests' state that
 * are neither in page tables nor pins: its writes there would be lost.
 */
static bool kernel_hides_nested_state(void)
{
    struct utsname uts;
    unsigned major, minor;

    if (uname(&uts) < 0 ||
        sscanf(uts.release, "%u.%u", &major, &minor) != 2) {
        return true;
    }
    return major < 6 || (major == 6 && minor < 13);
}

/* A feature that many CPUs and machines do not know. */
static bool has_feature(Object *obj, const char *feature)
{
    return object_property_find(obj, feature) &&
           object_property_get_bool(obj, feature, NULL);
}

const char *ksm_inhibited_by_cpus(void)
{
    /*
     * TCG uses the page tables and KVM follows them.  Others (MSHV) may pin RAM
     * as a device does, and would keep a page that is replaced.
     */
    if (!tcg_enabled() && !kvm_enabled() && !qtest_enabled()) {
        return "only -accel kvm and tcg are known to follow replaced pages";
    }
    if (kvm_enabled() && first_cpu && kernel_hides_nested_state() &&
        (has_feature(OBJECT(first_cpu), "vmx") ||
         has_feature(OBJECT(first_cpu), "svm"))) {
        return "the guest can run guests (vmx, svm), which needs Linux 6.13 "
               "or newer here; use -cpu ...,-vmx,-svm";
    }
    /*
     * Memory tags (arm64 MTE) are not compared: pages with different tags would
     * become one.  TCG has them in memory of their own.
     */
    if (kvm_enabled() && has_feature(qdev_get_machine(), "mte")) {
        return "the guest's memory has tags, which are not compared; use "
               "-machine mte=off";
    }
    return NULL;
}
