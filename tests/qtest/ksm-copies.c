/*
 * A guest whose memory holds two equal copies, played by a qtest
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qobject/qdict.h"
#include "ksm-copies.h"
#include "libqos/generic-pcihost.h"
#include "libqos/malloc-pc.h"
#include "libqos/pci-pc.h"
#include "standard-headers/linux/virtio_blk.h"
#include "standard-headers/linux/virtio_ring.h"

bool can_run(void)
{
    g_autoptr(KsmRun) run = ksm_run("-object " BACKEND ",id=r,size=4M", NULL);

    if (strstr(run->err, "cannot be used")) {
        g_test_skip(run->err);
        return false;
    }
    return true;
}

uint64_t stat_get(QTestState *qts, const char *id, const char *name)
{
    QDict *stats = ksm_stats(qts);
    uint64_t value = qdict_get_try_int(ksm_stats_backend(stats, id), name, 0);

    qobject_unref(stats);
    return value;
}

void engine_kick(QTestState *qts, const char *id)
{
    ksm_qom_set(qts, id, "max-cpu", "100");
}

static void stat_wait_kicking(QTestState *qts, const char *id,
                              const char *name, uint64_t least,
                              void (*kick)(QTestState *qts, const char *id))
{
    for (int i = 0; i < WAIT_S * 20; i++) {
        uint64_t value = stat_get(qts, id, name);

        /*
         * Pages that the kernel was moving when those around them were merged
         * stand alone, and are not worth it any more.
         */
        if (value >= least || (i > 20 * 20 && value >= least - least / 32)) {
            return;
        }
        if (kick && i % 10 == 9) {
            kick(qts, id);
        }
        g_usleep(50000);
    }
    g_test_message("%s", qtest_hmp(qts, "info ksm"));
    g_error("%s of %s does not reach %" PRIu64, name, id, least);
}

void stat_wait(QTestState *qts, const char *id, const char *name,
               uint64_t least)
{
    stat_wait_kicking(qts, id, name, least, engine_kick);
}

void stat_wait_alone(QTestState *qts, const char *id, const char *name,
                     uint64_t least)
{
    stat_wait_kicking(qts, id, name, least, NULL);
}

void passes_wait(QTestState *qts, const char *id, unsigned passes)
{
    for (; passes; passes--) {
        uint64_t before = stat_get(qts, id, "full-scans");

        /* the first may have been going on already */
        engine_kick(qts, id);
        stat_wait(qts, id, "full-scans", before + 2);
    }
}

bool state_is(QTestState *qts, const char *id, const char *state)
{
    QDict *stats = ksm_stats(qts);
    bool is = g_str_equal(qdict_get_str(ksm_stats_backend(stats, id),
                                        "state"), state);

    qobject_unref(stats);
    return is;
}

bool has_reason(QTestState *qts, const char *kind, const char *part)
{
    QDict *stats = ksm_stats(qts);
    const char *text = ksm_reason(ksm_stats_backend(stats, "ram0"), kind);
    bool has = text && strstr(text, part);

    qobject_unref(stats);
    return has;
}

void reason_wait(QTestState *qts, const char *kind, const char *part)
{
    for (int i = 0; i < WAIT_S * 20; i++) {
        if (has_reason(qts, kind, part)) {
            return;
        }
        g_usleep(50000);
    }
    g_test_message("%s", qtest_hmp(qts, "info ksm"));
    g_error("no reason of the kind %s has the text: %s", kind, part);
}

void inhibited_wait(QTestState *qts, const char *part)
{
    reason_wait(qts, "inhibited", part);
}

uint8_t *random_copy(uint32_t seed)
{
    g_autoptr(GRand) random = g_rand_new_with_seed(seed);
    uint32_t *data = g_new(uint32_t, COPY / sizeof(*data));

    for (size_t i = 0; i < COPY / sizeof(*data); i++) {
        data[i] = g_rand_int(random);
    }
    return (uint8_t *)data;
}

void assert_memory(QTestState *qts, uint64_t addr, const void *data,
                   size_t size)
{
    g_autofree uint8_t *now = g_malloc(size);

    qtest_bufread(qts, addr, now, size);
    for (size_t i = 0; i < size; i++) {
        if (now[i] != ((const uint8_t *)data)[i]) {
            g_error("0x%" PRIx64 ": 0x%x instead of 0x%x", addr + i, now[i],
                    ((const uint8_t *)data)[i]);
        }
    }
}

void copies_write(QTestState *qts, const uint8_t *data)
{
    qtest_bufwrite(qts, FIRST, data, COPY);
    qtest_bufwrite(qts, SECOND, data, COPY);
}

void copies_put(QTestState *qts, const uint8_t *data)
{
    ksm_qom_set(qts, "ram0", "run", "false");
    copies_write(qts, data);
    ksm_qom_set(qts, "ram0", "run", "true");
}

void copies_assert(QTestState *qts, const uint8_t *data)
{
    assert_memory(qts, FIRST, data, COPY);
    assert_memory(qts, SECOND, data, COPY);
}

void copies_wait(QTestState *qts)
{
    stat_wait(qts, "ram0", "pages-merged", 2 * COPY / PAGE);
}

char *temporary(void)
{
    char *path = NULL;
    int fd = g_file_open_tmp("ksm-test-XXXXXX", &path, NULL);

    g_assert_cmpint(fd, >=, 0);
    close(fd);
    return path;
}

void migrate_wait(QTestState *qts, const char *status)
{
    for (int i = 0; i < WAIT_S * 20; i++) {
        QDict *info = qtest_qmp_assert_success_ref(
            qts, "{'execute': 'query-migrate'}");
        const char *now = qdict_get_try_str(info, "status");
        bool done = now && g_str_equal(now, status);

        g_assert_true(done || !now || strcmp(now, "failed"));
        qobject_unref(info);
        if (done) {
            return;
        }
        g_usleep(50000);
    }
    g_test_message("%s", qtest_hmp(qts, "info migrate"));
    g_error("migration does not get to %s", status);
}

static void bus_start(Device *d, QTestState *qts)
{
    if (ksm_on_arm()) {
        QGenericPCIBus *generic = g_new0(QGenericPCIBus, 1);
        uint64_t start = ksm_ram_start();

        /* the device tree is in the first MiB */
        alloc_init(&d->alloc, ALLOC_NO_FLAGS, start + 2 * MIB,
                   start + 64 * MIB, PAGE);
        qpci_init_generic(generic, qts, &d->alloc, false);
        d->bus = &generic->bus;
    } else {
        pc_alloc_init(&d->alloc, qts, ALLOC_NO_FLAGS);
        d->bus = qpci_new_pc(qts, NULL);
    }
}

static void bus_stop(Device *d)
{
    if (ksm_on_arm()) {
        g_free(container_of(d->bus, QGenericPCIBus, bus));
    } else {
        qpci_free_pc(d->bus);
    }
    alloc_destroy(&d->alloc);
}

void device_start(Device *d, QTestState *qts)
{
    QPCIAddress addr = { .devfn = QPCI_DEVFN(4, 0) };
    uint64_t features;

    bus_start(d, qts);
    d->pci = virtio_pci_new(d->bus, &addr);
    g_assert_nonnull(d->pci);
    d->dev = &d->pci->vdev;
    qvirtio_pci_device_enable(d->pci);
    qvirtio_start_device(d->dev);
    features = qvirtio_get_features(d->dev);
    features &= ~(QVIRTIO_F_BAD_FEATURE | (1ull << VIRTIO_RING_F_EVENT_IDX) |
                  (1ull << VIRTIO_RING_F_INDIRECT_DESC) |
                  (1ull << VIRTIO_BLK_F_SCSI));
    qvirtio_set_features(d->dev, features);
    d->queue = qvirtqueue_setup(d->dev, &d->alloc, 0);
    qvirtio_set_driver_ok(d->dev);
}

void device_stop(Device *d)
{
    qvirtqueue_cleanup(d->dev->bus, d->queue, &d->alloc);
    qvirtio_pci_device_disable(d->pci);
    qos_object_destroy(&d->pci->obj);
    bus_stop(d);
}

void device_wait(Device *d, QTestState *qts, uint32_t head)
{
    qvirtio_wait_used_elem(qts, d->dev, d->queue, head, NULL,
                           WAIT_S * 1000000);
}
