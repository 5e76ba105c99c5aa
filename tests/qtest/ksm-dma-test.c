/*
 * Tests of memory-backend-ksm with scope=vm: devices write to guest RAM while
 * it is merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The guest reads from a disk whose answer takes as long as the test wants.
 * Meanwhile the engine merges at full speed, and would merge the buffer too,
 * which is part of a copy.
 *
 * Two things prevent that, and each has its tests: the kernel refuses to take
 * pinned pages out (reads of a real disk, in all ways QEMU has), and QEMU
 * counts DMA mappings, for where nothing is pinned.
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"
#include "qemu/bswap.h"
#include "ksm-copies.h"
#include "ksm-plain-read.h"
#include "slow-file.h"
#include "standard-headers/linux/virtio_blk.h"
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#define BUFFER (FIRST + MIB)
/* What a chunk of each copy may keep out of the merge. */
#define MERGED ((COPY - 2 * MIB) * 2 / PAGE)

static uint32_t read_begin(Device *d, QTestState *qts, uint64_t at,
                           uint32_t len)
{
    struct virtio_blk_outhdr header = {
        .type = cpu_to_le32(VIRTIO_BLK_T_IN),
        .sector = cpu_to_le64(at / 512),
    };
    uint64_t addr = guest_alloc(&d->alloc, PAGE);
    uint32_t head;

    qtest_bufwrite(qts, addr, &header, sizeof(header));
    head = qvirtqueue_add(qts, d->queue, addr, sizeof(header), false, true);
    qvirtqueue_add(qts, d->queue, BUFFER, len, true, true);
    qvirtqueue_add(qts, d->queue, addr + sizeof(header), 1, true, false);
    qvirtqueue_kick(qts, d->dev, d->queue, head);
    return head;
}

/* All that may be merged is, all else has been tried. */
static void merge_around(QTestState *qts)
{
    ksm_qom_set(qts, "ram0", "run", "true");
    stat_wait(qts, "ram0", "pages-merged", MERGED);
    passes_wait(qts, "ram0", 3);
    ksm_qom_set(qts, "ram0", "run", "false");
}

/* Nobody uses the buffer any more: it is merged. */
static void merge_rest(QTestState *qts, const uint8_t *data, uint32_t len)
{
    qtest_bufwrite(qts, BUFFER, data + MIB, len);
    ksm_qom_set(qts, "ram0", "run", "true");
    copies_wait(qts);
    copies_assert(qts, data);
}

/* --- plain references --- */

static PlainRead *plain_new(const char *path)
{
    PlainRead *plain;
    int fd = open(path, O_RDWR | O_CLOEXEC);

    g_assert_cmpint(ftruncate(fd, sizeof(*plain)), ==, 0);
    plain = mmap(NULL, sizeof(*plain), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                 0);
    g_assert_true(plain != MAP_FAILED);
    close(fd);
    return plain;
}

static QTestState *plain_init(const char *disk, const char *state)
{
    g_autofree char *self = g_file_read_link("/proc/self/exe", NULL);
    g_autofree char *dir = g_path_get_dirname(self);
    g_autofree char *library = g_build_filename(dir, "libksm-plain-read.so",
                                                NULL);
    QTestState *qts;

    g_assert_cmpint(truncate(disk, 2 * MIB), ==, 0);
    g_setenv("LD_PRELOAD", library, true);
    g_setenv(PLAIN_READ_ENV, state, true);
    qts = qtest_initf(RAM ",run=off -blockdev file,node-name=disk,filename=%s "
                      "-device virtio-blk-pci,addr=4,drive=disk", disk);
    g_unsetenv("LD_PRELOAD");
    return qts;
}

static void test_plain(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *expected = g_memdup2(data, COPY);
    g_autofree char *disk = temporary();
    g_autofree char *state = temporary();
    PlainRead *plain;
    QTestState *qts;
    uint32_t head;
    uint8_t mark;
    Device d;

    if (can_run()) {
        plain = plain_new(state);
        qts = plain_init(disk, state);
        device_start(&d, qts);
        copies_write(qts, data);
        head = read_begin(&d, qts, PLAIN_READ_OFFSET, PLAIN_READ_LEN);
        while (!qatomic_load_acquire(&plain->held)) {
            g_usleep(1000);
        }
        merge_around(qts);

        /* what the file system has is what the guest has */
        mark = ~data[MIB + 100];
        qtest_writeb(qts, BUFFER + 100, mark);
        qatomic_store_release(&plain->release, 1);
        device_wait(&d, qts, head);
        g_assert_cmphex(plain->seen[100], ==, mark);
        g_assert_cmpuint(stat_get(qts, "ram0", "busy"), >, 0);
        plain->seen[100] = data[MIB + 100];
        g_assert_cmpmem(plain->seen, PAGE, data + MIB, PAGE);

        assert_memory(qts, SECOND, data, COPY);
        memset(expected + MIB, 0, PAGE);
        assert_memory(qts, FIRST, expected, COPY);
        merge_rest(qts, data, PAGE);
        device_stop(&d);
        qtest_quit(qts);
        munmap(plain, sizeof(*plain));
    }
    unlink(disk);
    unlink(state);
}

/* --- pins --- */

typedef struct Way {
    const char *name;
    const char *driver;     /* of QEMU: "file" or "host_device" */
    const char *aio;
} Way;

static const Way ways[] = {
    { "file/threads", "file", "threads" },
    { "file/native", "file", "native" },
    { "file/io_uring", "file", "io_uring" },
    { "block-device/threads", "host_device", "threads" },
    { "block-device/native", "host_device", "native" },
    { "block-device/io_uring", "host_device", "io_uring" },
};

#define LEN (16 * PAGE)

/* A block device that is the file; -1: none can be had.  Gone when closed. */
static int loop_open(int file, char **path)
{
    struct loop_config config = {
        .fd = file,
        .info.lo_flags = LO_FLAGS_READ_ONLY | LO_FLAGS_AUTOCLEAR,
    };
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    int fd = -1;

    /* someone else may be as fast */
    for (int tries = 0; control >= 0 && fd < 0 && tries < 10; tries++) {
        int number = ioctl(control, LOOP_CTL_GET_FREE);

        g_free(*path);
        *path = g_strdup_printf("/dev/loop%d", number);
        fd = open(*path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0 && ioctl(fd, LOOP_CONFIGURE, &config) < 0) {
            close(fd);
            fd = -1;
        }
    }
    if (control >= 0) {
        close(control);
    }
    return fd;
}

static bool qemu_can(const char *blockdev)
{
    g_autofree char *args = g_strdup_printf("-machine pc %s", blockdev);
    g_autoptr(KsmRun) run = ksm_run(args, NULL);

    if (!strstr(run->err, KSM_RUN_STARTED)) {
        g_test_skip(run->err);
        return false;
    }
    return true;
}

static void slow_read(SlowFile *slow, const char *blockdev)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *expected = g_memdup2(data, COPY);
    QTestState *qts;
    uint32_t head;
    Device d;

    qts = qtest_initf(RAM ",run=off %s "
                      "-device virtio-blk-pci,addr=4,drive=slow", blockdev);
    device_start(&d, qts);
    copies_write(qts, data);
    slow_file_hold(slow);
    head = read_begin(&d, qts, 0, LEN);
    slow_file_wait(slow);
    merge_around(qts);
    g_assert_cmpuint(stat_get(qts, "ram0", "busy") +
                     stat_get(qts, "ram0", "pinned"), >, 0);
    slow_file_release(slow);
    device_wait(&d, qts, head);
    assert_memory(qts, SECOND, data, COPY);
    memset(expected + MIB, SLOW_FILE_BYTE, LEN);
    assert_memory(qts, FIRST, expected, COPY);
    merge_rest(qts, data, LEN);
    device_stop(&d);
    qtest_quit(qts);
}

static void test_slow(const void *opaque)
{
    const Way *way = opaque;
    g_autofree char *path = NULL;
    g_autofree char *blockdev = NULL;
    SlowFile slow = { };
    const char *why;
    int loop = -1;

    if (!can_run()) {
        return;
    }
    why = slow_file_open(&slow, MIB);
    if (why) {
        g_test_skip(why);
        return;
    }
    if (g_str_equal(way->driver, "host_device")) {
        loop = loop_open(slow.file, &path);
    } else {
        path = g_strdup_printf("/proc/%d/fd/%d", getpid(), slow.file);
    }
    blockdev = g_strdup_printf("-blockdev %s,node-name=slow,filename=%s,"
                               "aio=%s,cache.direct=on,read-only=on",
                               way->driver, path, way->aio);
    if (g_str_equal(way->driver, "host_device") && loop < 0) {
        g_test_skip("there is no loop device");
    } else if (qemu_can(blockdev)) {
        slow_read(&slow, blockdev);
    }
    if (loop >= 0) {
        close(loop);
    }
    slow_file_close(&slow);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    qtest_add_func("ksm-dma/plain-reference", test_plain);
    for (int i = 0; i < ARRAY_SIZE(ways); i++) {
        g_autofree char *path = g_strdup_printf("ksm-dma/%s", ways[i].name);

        qtest_add_data_func(path, &ways[i], test_slow);
    }
    return g_test_run();
}
