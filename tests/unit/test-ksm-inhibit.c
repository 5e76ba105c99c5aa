/*
 * Tests of hw/mem/ksm-inhibit.c and ksm-dma.c: conditions under which guest
 * RAM must not be merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Each test fakes the rest of QEMU and the kernel's version: few machines have
 * the devices and none has both kernels.  tests/qtest/ksm-*-test show that the
 * engine heeds the reasons.
 */

#include "qemu/osdep.h"
#include "hw/core/cpu.h"
#include "exec/cpu-common.h"
#include "hw/mem/ksm-compat.h"
#include "hw/mem/ksm-hooks.h"
#include "hw/qdev-core.h"
#include "libksm.h"
#include "migration/misc.h"
#include "qemu/module.h"
#include "qom/object.h"
#include "system/kvm.h"
#include "system/qtest.h"
#include "system/runstate.h"
#include "system/tcg.h"
#include <sys/utsname.h>
#include "../../hw/mem/ksm-dma.h"
#include "../../hw/mem/ksm-inhibit.h"
#include "../../hw/mem/ksm-log.h"

static struct {
    bool discards_disabled;
    bool incoming_postcopy;
    bool migrating;
    RunState state;
    const char *kernel;
    bool log_on;
} now;

bool kvm_allowed;
bool qtest_allowed;
bool tcg_allowed = true;
CPUTailQ cpus_queue = QTAILQ_HEAD_INITIALIZER(cpus_queue);

static Object *machine;

void ksm_log_switch(bool on)
{
    now.log_on = on;
}

Object *qdev_get_machine(void)
{
    return machine;
}

bool ram_block_discard_is_disabled(void)
{
    return now.discards_disabled;
}

bool migration_in_incoming_postcopy(void)
{
    return now.incoming_postcopy;
}

bool migration_is_running(void)
{
    return now.migrating;
}

bool runstate_check(RunState state)
{
    return now.state == state;
}

int uname(struct utsname *uts)
{
    if (!now.kernel) {
        errno = EFAULT;
        return -1;
    }
    g_strlcpy(uts->release, now.kernel, sizeof(uts->release));
    return 0;
}

static void nothing(void)
{
    memset(&now, 0, sizeof(now));
    now.state = RUN_STATE_RUNNING;
}

static void assert_inhibited(const char *part)
{
    const char *reason = ksm_inhibited();

    g_assert_nonnull(reason);
    g_assert_nonnull(strstr(reason, part));
    nothing();
}

static void test_reasons(void)
{
    nothing();
    now.discards_disabled = true;
    assert_inhibited("discarding RAM is disabled");
    now.incoming_postcopy = true;
    assert_inhibited("incoming migration");
    now.state = RUN_STATE_INMIGRATE;
    assert_inhibited("incoming migration");
    now.migrating = true;
    assert_inhibited("a migration or snapshot is running");
    now.state = RUN_STATE_SAVE_VM;
    assert_inhibited("saved or loaded");
    now.state = RUN_STATE_RESTORE_VM;
    assert_inhibited("saved or loaded");

    /* a guest that only stands still may be merged */
    now.state = RUN_STATE_PAUSED;
    g_assert_null(ksm_inhibited());
}

/* Two vhost-scsi devices. */
static void test_bypass(void)
{
    nothing();
    g_assert_false(ksm_bypassed());
    ksm_guests_bypass_begin();
    ksm_guests_bypass_begin();
    ksm_guests_bypass_end();
    g_assert_true(ksm_bypassed());
    assert_inhibited("vhost-scsi");
    ksm_guests_bypass_end();
    g_assert_false(ksm_bypassed());
    g_assert_null(ksm_inhibited());
}

/* Devices that write to RAM which begins and ends within a chunk. */
static void test_dma(void)
{
    uint8_t *chunk = (uint8_t *)(5 * KSM_CHUNK_SIZE);   /* never touched */
    uint8_t *host = chunk + KSM_CHUNK_SIZE / 2;
    KsmDma *dma = ksm_dma_new(host, 3 * KSM_CHUNK_SIZE);
    uint8_t *second = chunk + KSM_CHUNK_SIZE;
    uint8_t *last = chunk + 3 * KSM_CHUNK_SIZE;

    nothing();
    g_assert_false(ksm_dma_busy(dma, host, 3 * KSM_CHUNK_SIZE));
    /* the last byte of the first chunk and the first of the second */
    ksm_dma_map(dma, second - 1, 2);
    g_assert_true(ksm_dma_busy(dma, host, KSM_PAGE_SIZE));
    g_assert_true(ksm_dma_busy(dma, second, KSM_PAGE_SIZE));
    g_assert_true(ksm_dma_busy(dma, host, 3 * KSM_CHUNK_SIZE));
    g_assert_false(ksm_dma_busy(dma, second + KSM_CHUNK_SIZE, KSM_PAGE_SIZE));
    g_assert_false(ksm_dma_busy(dma, last, KSM_PAGE_SIZE));
    /* a second device in one of them, and the first is done */
    ksm_dma_map(dma, second, KSM_PAGE_SIZE);
    ksm_dma_unmap(dma, second - 1, 2);
    g_assert_false(ksm_dma_busy(dma, host, KSM_PAGE_SIZE));
    g_assert_true(ksm_dma_busy(dma, second, KSM_PAGE_SIZE));
    ksm_dma_unmap(dma, second, KSM_PAGE_SIZE);
    g_assert_false(ksm_dma_busy(dma, host, 3 * KSM_CHUNK_SIZE));
    /* the very end; and nothing at all */
    ksm_dma_map(dma, host + 3 * KSM_CHUNK_SIZE - 1, 1);
    g_assert_true(ksm_dma_busy(dma, last, KSM_PAGE_SIZE));
    ksm_dma_unmap(dma, host + 3 * KSM_CHUNK_SIZE - 1, 1);
    ksm_dma_map(dma, host, 0);
    g_assert_false(ksm_dma_busy(dma, host, 3 * KSM_CHUNK_SIZE));
    /* more was unmapped than was mapped: left alone for good */
    ksm_dma_unmap(dma, last, KSM_PAGE_SIZE);
    g_assert_true(ksm_dma_busy(dma, last, KSM_PAGE_SIZE));
    ksm_dma_map(dma, last, KSM_PAGE_SIZE);
    g_assert_true(ksm_dma_busy(dma, last, KSM_PAGE_SIZE));
    ksm_dma_unmap(dma, last, KSM_PAGE_SIZE);
    g_assert_true(ksm_dma_busy(dma, last, KSM_PAGE_SIZE));
    ksm_dma_free(dma);
}

/* By lengths that the guest had a say in: nothing behind the counts changes. */
static void test_dma_beyond(void)
{
    uint8_t *host = (uint8_t *)KSM_CHUNK_SIZE;
    uint8_t *end = host + 2 * KSM_CHUNK_SIZE;
    size_t many = 64 * KSM_CHUNK_SIZE;
    KsmDma *dma = ksm_dma_new(host, 2 * KSM_CHUNK_SIZE);

    nothing();
    ksm_dma_map(dma, end - 1, 1);
    g_assert_true(ksm_dma_busy(dma, end - 1, 1));
    /* counts of so many chunks would be seen by asan, or by the heap */
    ksm_dma_unmap(dma, end - 1, many);
    g_assert_false(ksm_dma_busy(dma, host, 2 * KSM_CHUNK_SIZE));
    ksm_dma_map(dma, end - 1, many);
    g_assert_true(ksm_dma_busy(dma, end - 1, 1));
    g_assert_false(ksm_dma_busy(dma, host, 1));
    ksm_dma_unmap(dma, end - 1, 1);
    g_assert_false(ksm_dma_busy(dma, host, 2 * KSM_CHUNK_SIZE));
    ksm_dma_free(dma);
}

/*
 * A device with writes that QEMU does not see comes when the engine has asked
 * for inhibitors and taken pages out: nothing of it is merged.
 */
static void test_dma_bypass(void)
{
    uint8_t *host = (uint8_t *)KSM_CHUNK_SIZE;
    KsmDma *dma = ksm_dma_new(host, KSM_CHUNK_SIZE);

    nothing();
    g_assert_false(ksm_dma_busy(dma, host, KSM_PAGE_SIZE));
    ksm_guests_bypass_begin();
    g_assert_true(ksm_dma_busy(dma, host, KSM_PAGE_SIZE));
    ksm_guests_bypass_end();
    g_assert_false(ksm_dma_busy(dma, host, KSM_PAGE_SIZE));
    ksm_dma_free(dma);
}

/*
 * A device that may pin memory comes when the engine has asked for inhibitors,
 * and taken pages out or write-protected them: it asks again, and all of it
 * stays in place.
 */
static void test_dma_pinned(void)
{
    uint8_t *host = (uint8_t *)KSM_CHUNK_SIZE;
    KsmDma *dma = ksm_dma_new(host, KSM_CHUNK_SIZE);

    nothing();
    g_assert_false(ksm_pinned());
    g_assert_false(ksm_dma_busy(dma, host, KSM_PAGE_SIZE));
    /* vhost-vdpa, nvme, libblkio */
    now.discards_disabled = true;
    g_assert_true(ksm_pinned());
    g_assert_true(ksm_dma_busy(dma, host, KSM_PAGE_SIZE));
    nothing();
    /*
     * two VFIO containers, which let discards be (ccw, mdev); before the first
     * can hear of a dirty log it is off
     */
    now.log_on = true;
    ksm_guests_pin_begin();
    g_assert_false(now.log_on);
    ksm_guests_pin_begin();
    now.log_on = true;
    ksm_guests_discards_disabled();
    g_assert_false(now.log_on);
    ksm_guests_pin_end();
    g_assert_true(ksm_pinned());
    g_assert_true(ksm_dma_busy(dma, host, KSM_PAGE_SIZE));
    assert_inhibited("for a device (VFIO)");
    ksm_guests_pin_end();
    g_assert_false(ksm_pinned());
    g_assert_false(ksm_dma_busy(dma, host, KSM_PAGE_SIZE));
    g_assert_null(ksm_inhibited());
    ksm_dma_free(dma);
}

static bool feature_get(Object *cpu, Error **errp)
{
    return true;
}

static const TypeInfo machine_type = {
    .name = "ksm-test-machine",
    .parent = TYPE_OBJECT,
    .instance_size = sizeof(Object),
};

static const TypeInfo cpu_type = {
    .name = "ksm-test-cpu",
    .parent = TYPE_OBJECT,
    .instance_size = sizeof(CPUState),
};

static void test_nested(void)
{
    static const struct {
        bool kvm;
        const char *feature;
        const char *kernel;
        bool inhibited;
    } cases[] = {
        { true, "vmx", "6.12.48-cloud", true },
        { true, "svm", "6.12.48-cloud", true },
        { true, "vmx", "5.15.0", true },
        { true, "vmx", "6.13.0-rc1", false },
        { true, "svm", "7.0", false },
        { true, "vmx", "what", true },
        { true, "vmx", NULL, true },
        { true, "hypervisor", "6.12.48", false },
        { true, NULL, "6.12.48", false },
        { false, "vmx", "6.12.48", false },
    };

    machine = object_new("ksm-test-machine");
    g_assert_null(ksm_inhibited_by_cpus());
    for (int i = 0; i < ARRAY_SIZE(cases); i++) {
        Object *cpu = object_new("ksm-test-cpu");

        nothing();
        kvm_allowed = cases[i].kvm;
        now.kernel = cases[i].kernel;
        if (cases[i].feature) {
            object_property_add_bool(cpu, cases[i].feature, feature_get, NULL);
        }
        QTAILQ_INSERT_TAIL_RCU(&cpus_queue, (CPUState *)cpu, node);
        g_assert_cmpint(ksm_inhibited_by_cpus() != NULL, ==,
                        cases[i].inhibited);
        QTAILQ_REMOVE_RCU(&cpus_queue, (CPUState *)cpu, node);
        object_unref(cpu);
    }
    object_unref(machine);
    machine = NULL;
}

/* An accelerator that nobody has looked at. */
static void test_accelerators(void)
{
    bool *allowed[] = { &tcg_allowed, &kvm_allowed, &qtest_allowed };

    nothing();
    machine = object_new("ksm-test-machine");
    tcg_allowed = kvm_allowed = qtest_allowed = false;
    g_assert_nonnull(strstr(ksm_inhibited_by_cpus(), "-accel"));
    for (int i = 0; i < ARRAY_SIZE(allowed); i++) {
        *allowed[i] = true;
        g_assert_null(ksm_inhibited_by_cpus());
        *allowed[i] = false;
    }
    tcg_allowed = true;
    object_unref(machine);
    machine = NULL;
}

/* Only KVM sees the memory with the guest's tags. */
static void test_tags(void)
{
    static const struct {
        bool kvm;
        const char *property;
        bool inhibited;
    } cases[] = {
        { true, "mte", true },
        { true, "secure", false },
        { true, NULL, false },
        { false, "mte", false },
    };

    for (int i = 0; i < ARRAY_SIZE(cases); i++) {
        const char *reason;

        nothing();
        machine = object_new("ksm-test-machine");
        kvm_allowed = cases[i].kvm;
        if (cases[i].property) {
            object_property_add_bool(machine, cases[i].property, feature_get,
                                     NULL);
        }
        reason = ksm_inhibited_by_cpus();
        g_assert_cmpint(reason != NULL, ==, cases[i].inhibited);
        g_assert_true(!reason || strstr(reason, "mte=off"));
        object_unref(machine);
        machine = NULL;
    }
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    module_call_init(MODULE_INIT_QOM);
    type_register_static(&cpu_type);
    type_register_static(&machine_type);
    g_test_add_func("/ksm-inhibit/reasons", test_reasons);
    g_test_add_func("/ksm-inhibit/bypass", test_bypass);
    g_test_add_func("/ksm-inhibit/dma", test_dma);
    g_test_add_func("/ksm-inhibit/dma/beyond", test_dma_beyond);
    g_test_add_func("/ksm-inhibit/dma-bypass", test_dma_bypass);
    g_test_add_func("/ksm-inhibit/dma-pinned", test_dma_pinned);
    g_test_add_func("/ksm-inhibit/nested", test_nested);
    g_test_add_func("/ksm-inhibit/accelerators", test_accelerators);
    g_test_add_func("/ksm-inhibit/tags", test_tags);
    return g_test_run();
}
