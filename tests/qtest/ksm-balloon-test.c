/*
 * Tests of memory-backend-ksm with a virtio-balloon device: memory that a
 * guest gives back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The test plays the guest, and also one that lies.  tests/e2e has a real
 * Linux that gives memory back.
 */

#include "qemu/osdep.h"
#include "qemu/bswap.h"
#include "qobject/qdict.h"
#include "ksm-helpers.h"
#include "libqos/libqos-pc.h"
#include "libqos/virtio-pci.h"
#include "standard-headers/linux/virtio_balloon.h"
#include "standard-headers/linux/virtio_ids.h"
#include <sys/syscall.h>

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif

#define MIB (1024 * 1024)
#define PAGE 4096
/* No other mapping of QEMU has this size: it finds the VMA. */
#define SIZE (42 * MIB)
/* What is filled, and given back of it. */
#define FILL_START (12 * MIB)
#define FILL_LEN (16 * MIB)
#define GIVE_START (16 * MIB)
#define GIVE_LEN (8 * MIB)
#define GIVE_PAGES (GIVE_LEN / PAGE)
#define PATTERN 0x5a
/* Read at a time: libqtest is slow with long lines. */
#define PIECE (64 * 1024)
/*
 * Each CPU of the host marks pages as lazily free in batches: as many on each
 * may not count yet.
 */
#define SLACK (MIB)
#define TIMEOUT_US (120 * G_USEC_PER_SEC)

/* Queues, as QEMU numbers them without free-page-hint. */
enum { INFLATE, DEFLATE, STATS, REPORT, N_QUEUES };

typedef struct Fake {
    QOSState *qs;
    QTestState *qts;
    QVirtioPCIDevice *dev;
    QVirtQueue *queue[N_QUEUES];
    uint64_t buffer;        /* guest address of a MiB for page numbers */
    size_t n_given;         /* pages given back so far */
} Fake;

/* A guest with memory and a balloon device, not used yet. */
static Fake *fake_boot(const char *backend)
{
    Fake *fake = g_new0(Fake, 1);

    fake->qs = qtest_pc_boot(
        "-machine pc,memory-backend=ram0 -m 42M -nodefaults "
        "-object %s,id=ram0,size=42M "
        "-device virtio-balloon-pci,id=balloon,addr=4,disable-legacy=on,"
        "free-page-reporting=on", backend);
    fake->qts = fake->qs->qts;
    return fake;
}

/* The driver starts, with these features if the device has them. */
static void fake_drive(Fake *fake, uint64_t features)
{
    QPCIAddress addr = { .devfn = QPCI_DEVFN(4, 0) };
    QVirtioDevice *vdev;

    fake->dev = virtio_pci_new(fake->qs->pcibus, &addr);
    g_assert_nonnull(fake->dev);
    vdev = &fake->dev->vdev;
    g_assert_cmpint(vdev->device_type, ==, VIRTIO_ID_BALLOON);
    qvirtio_pci_device_enable(fake->dev);
    qvirtio_start_device(vdev);
    features |= 1ull << VIRTIO_F_VERSION_1;
    qvirtio_set_features(vdev, qvirtio_get_features(vdev) & features);
    for (int i = 0; i < N_QUEUES; i++) {
        if (i != REPORT || (features & 1 << VIRTIO_BALLOON_F_REPORTING)) {
            fake->queue[i] = qvirtqueue_setup(vdev, &fake->qs->alloc, i);
        }
    }
    fake->buffer = guest_alloc(&fake->qs->alloc, MIB);
    g_assert_cmphex(fake->buffer + MIB, <=, FILL_START);
    qvirtio_set_driver_ok(vdev);
}

static Fake *fake_new(const char *backend)
{
    Fake *fake = fake_boot(backend);

    fake_drive(fake, 1 << VIRTIO_BALLOON_F_REPORTING);
    qtest_memset(fake->qts, FILL_START, PATTERN, FILL_LEN);
    return fake;
}

static void fake_free(Fake *fake)
{
    for (int i = 0; fake->dev && i < N_QUEUES; i++) {
        if (fake->queue[i]) {
            qvirtqueue_cleanup(fake->dev->vdev.bus, fake->queue[i],
                               &fake->qs->alloc);
        }
    }
    if (fake->dev) {
        qvirtio_pci_device_disable(fake->dev);
        g_free(fake->dev->pdev);
        g_free(fake->dev);
    }
    qtest_shutdown(fake->qs);
    g_free(fake);
}

static void fake_wait(Fake *fake, int queue, uint32_t head)
{
    QVirtQueue *vq = fake->queue[queue];

    qvirtqueue_kick(fake->qts, &fake->dev->vdev, vq, head);
    qvirtio_wait_used_elem(fake->qts, &fake->dev->vdev, vq, head, NULL,
                           TIMEOUT_US);
    vq->free_head = 0;
    vq->num_free = vq->size;
}

/* Puts @len bytes of page numbers into the inflate or deflate queue. */
static void fake_pfns(Fake *fake, int queue, const uint32_t *pfns, size_t len)
{
    g_assert_cmpuint(len, <=, MIB);
    qtest_memwrite(fake->qts, fake->buffer, pfns, len);
    fake_wait(fake, queue, qvirtqueue_add(fake->qts, fake->queue[queue],
                                          fake->buffer, len, false, false));
}

typedef struct Range {
    uint64_t addr;
    uint32_t len;
} Range;

static void fake_report(Fake *fake, const Range *ranges, unsigned n)
{
    uint32_t head = 0;

    for (unsigned i = 0; i < n; i++) {
        uint32_t id = qvirtqueue_add(fake->qts, fake->queue[REPORT],
                                     ranges[i].addr, ranges[i].len, true,
                                     i + 1 < n);

        head = i ? head : id;
    }
    fake_wait(fake, REPORT, head);
}

/* --- ways to give the same memory back --- */

typedef void Give(Fake *fake);

static void give_report(Fake *fake)
{
    Range ranges[GIVE_LEN / (2 * MIB)];

    for (unsigned i = 0; i < ARRAY_SIZE(ranges); i++) {
        ranges[i] = (Range) { GIVE_START + i * 2 * MIB, 2 * MIB };
    }
    fake_report(fake, ranges, ARRAY_SIZE(ranges));
    fake->n_given += GIVE_PAGES;
}

/* 256 pages at a time as Linux does; page_of() gives the order. */
static void give_pages(Fake *fake, uint32_t (*page_of)(uint32_t i))
{
    uint32_t pfns[256];

    for (uint32_t i = 0; i < GIVE_PAGES; i++) {
        pfns[i % 256] = cpu_to_le32(GIVE_START / PAGE + page_of(i));
        if (i % 256 == 255) {
            fake_pfns(fake, INFLATE, pfns, sizeof(pfns));
        }
    }
    fake->n_given += GIVE_PAGES;
}

static uint32_t page_upwards(uint32_t i)
{
    return i;
}

static uint32_t page_downwards(uint32_t i)
{
    return GIVE_PAGES - 1 - i;
}

static uint32_t page_scattered(uint32_t i)
{
    return i * 1237 % GIVE_PAGES;
}

static void give_inflate(Fake *fake)
{
    give_pages(fake, page_upwards);
}

static void give_inflate_down(Fake *fake)
{
    give_pages(fake, page_downwards);
}

static void give_inflate_scattered(Fake *fake)
{
    give_pages(fake, page_scattered);
}

/* --- what has become of it --- */

static KsmVma fake_vma(Fake *fake)
{
    KsmVma vma;

    g_assert_true(ksm_vma_find(fake->qts, SIZE, &vma));
    g_free(vma.flags);
    return vma;
}

static bool is_all(const uint8_t *page, uint8_t byte)
{
    return page[0] == byte && !memcmp(page, page + 1, PAGE - 1);
}

static bool page_is(Fake *fake, uint64_t addr, uint8_t byte)
{
    uint8_t page[PAGE];

    qtest_memread(fake->qts, addr, page, PAGE);
    return is_all(page, byte);
}

/* Each page is as it was or zero; returns how many are as they were. */
static size_t assert_old_or_zero(Fake *fake, uint64_t start, uint64_t len)
{
    g_autofree uint8_t *piece = g_malloc(PIECE);
    size_t old = 0;

    for (uint64_t at = 0; at < len; at += PAGE) {
        const uint8_t *page = piece + at % PIECE;
        bool is_old;

        if (at % PIECE == 0) {
            qtest_memread(fake->qts, start + at, piece, MIN(PIECE, len - at));
        }
        is_old = is_all(page, PATTERN);
        g_assert_true(is_old || is_all(page, 0));
        old += is_old;
    }
    return old;
}

static void assert_old(Fake *fake, uint64_t start, uint64_t len)
{
    g_assert_cmpuint(assert_old_or_zero(fake, start, len), ==, len / PAGE);
}

static void assert_rest_untouched(Fake *fake)
{
    assert_old(fake, FILL_START, GIVE_START - FILL_START);
    assert_old(fake, GIVE_START + GIVE_LEN,
               FILL_START + FILL_LEN - GIVE_START - GIVE_LEN);
}

static uint64_t fake_stat(Fake *fake, const char *name)
{
    QDict *stats = ksm_stats(fake->qts);
    uint64_t value = qdict_get_try_int(ksm_stats_backend(stats, "ram0"), name,
                                       0);

    qobject_unref(stats);
    return value;
}

/* The kernel takes back the range's lazily free memory, and only that. */
static bool host_takes(Fake *fake, uint64_t addr, size_t len)
{
#ifdef SYS_process_madvise
    KsmVma vma = fake_vma(fake);
    struct iovec iov = { (void *)(vma.start + addr), len };
    int fd = syscall(SYS_pidfd_open, qtest_pid(fake->qts), 0);
    ssize_t done = fd < 0 ? -1 : syscall(SYS_process_madvise, fd, &iov, 1,
                                         MADV_PAGEOUT, 0);

    if (fd >= 0) {
        close(fd);
    }
    return done == len;
#else
    return false;
#endif
}

typedef struct Case {
    const char *name;
    const char *backend;
    Give *give;
} Case;

#define KSM "memory-backend-ksm"
#define VM KSM ",scope=vm,run=off"
#define ZERO KSM ",scope=zero,run=off"

static void test_eager(const void *opaque)
{
    const Case *c = opaque;
    Fake *fake = fake_new(c->backend);
    size_t before = fake_vma(fake).resident;

    g_assert_cmpuint(before, >=, FILL_LEN);
    c->give(fake);
    g_assert_cmpuint(fake_vma(fake).resident + GIVE_LEN, <=, before);
    g_assert_cmpuint(fake_vma(fake).lazy_free, ==, 0);
    g_assert_cmpuint(assert_old_or_zero(fake, GIVE_START, GIVE_LEN), ==, 0);
    assert_rest_untouched(fake);
    if (strstr(c->backend, KSM)) {
        g_assert_cmpuint(fake_stat(fake, "free-hinted"), ==, GIVE_PAGES);
    }
    /* an engine does not tell */
    if (strstr(c->backend, KSM) && !strstr(c->backend, "scope=")) {
        g_assert_cmpuint(fake_stat(fake, "free-eager"), ==, GIVE_PAGES);
    }
    fake_free(fake);
}

/* Written pages stay, the others go, once the host wants them. */
static void assert_written_stay(Fake *fake)
{
    const uint64_t step = GIVE_LEN / 8;

    for (int i = 0; i < 8; i++) {
        qtest_memset(fake->qts, GIVE_START + i * step, 'w', PAGE);
    }
    if (!host_takes(fake, GIVE_START, GIVE_LEN)) {
        g_test_message("this host lacks process_madvise(MADV_PAGEOUT)");
    }
    for (int i = 0; i < 8; i++) {
        g_assert_true(page_is(fake, GIVE_START + i * step, 'w'));
        qtest_memset(fake->qts, GIVE_START + i * step, PATTERN, PAGE);
    }
    assert_old_or_zero(fake, GIVE_START, GIVE_LEN);
    assert_rest_untouched(fake);
}

static void test_lazy(const void *opaque)
{
    const Case *c = opaque;
    Fake *fake = fake_new(c->backend);
    KsmVma before = fake_vma(fake), vma;

    g_assert_cmpuint(before.lazy_free, ==, 0);
    c->give(fake);
    vma = fake_vma(fake);
    /* the host may be short of memory, and take it */
    g_assert_cmpuint(before.resident - vma.resident + vma.lazy_free + SLACK,
                     >=, GIVE_LEN);
    g_assert_cmpuint(vma.lazy_free, <=, GIVE_LEN);
    g_assert_cmpuint(fake_stat(fake, "free-hinted"), ==, GIVE_PAGES);
    g_assert_cmpuint(fake_stat(fake, "used") + GIVE_LEN, <=,
                     before.resident + SLACK);
    assert_old_or_zero(fake, GIVE_START, GIVE_LEN);
    assert_written_stay(fake);
    fake_free(fake);
}

/* Lazy where the host has memory; its own shortages are not ours. */
static void test_auto(const void *opaque)
{
    const Case *c = opaque;
    Fake *fake = fake_new(c->backend);
    KsmVma before = fake_vma(fake), vma;

    c->give(fake);
    vma = fake_vma(fake);
    g_assert_cmpuint(before.resident - vma.resident + vma.lazy_free + SLACK,
                     >=, GIVE_LEN);
    g_assert_cmpuint(fake_stat(fake, "free-hinted"), ==, GIVE_PAGES);
    assert_old_or_zero(fake, GIVE_START, GIVE_LEN);
    assert_written_stay(fake);
    fake_free(fake);
}

static void test_deflate(const void *opaque)
{
    const Case *c = opaque;
    Fake *fake = fake_new(c->backend);
    uint32_t pfns[256];

    for (int round = 0; round < 3; round++) {
        c->give(fake);
        for (int i = 0; i < 256; i++) {
            pfns[i] = cpu_to_le32(GIVE_START / PAGE + i);
        }
        fake_pfns(fake, DEFLATE, pfns, sizeof(pfns));
        qtest_memset(fake->qts, GIVE_START, 'd', MIB);
        host_takes(fake, GIVE_START, GIVE_LEN);
        for (int i = 0; i < 256; i++) {
            g_assert_true(page_is(fake, GIVE_START + i * PAGE, 'd'));
        }
        qtest_memset(fake->qts, GIVE_START, PATTERN, GIVE_LEN);
    }
    assert_rest_untouched(fake);
    fake_free(fake);
}

/* --- guests that lie --- */

/* Alive, and all that it did not give back is as it was. */
static void assert_sane(Fake *fake)
{
    qtest_qmp_assert_success(fake->qts, "{'execute': 'query-status'}");
    assert_rest_untouched(fake);
    assert_old_or_zero(fake, GIVE_START, GIVE_LEN);
}

static void test_bad_pfns(const void *opaque)
{
    static const uint32_t bad[] = {
        0xa0, 0xb8, 0xc0, 0xf0, 0xff,           /* VGA, ROM, BIOS */
        SIZE / PAGE, SIZE / PAGE + 1,           /* just behind RAM */
        0xfec00, 0xfed00, 0xfee00, 0xfffff,     /* devices, BIOS */
        0x100000, 0x7fffffff, 0x80000000, 0xffffffff,
    };
    const Case *c = opaque;
    Fake *fake = fake_new(c->backend);
    uint32_t pfns[ARRAY_SIZE(bad) + 1];

    for (int i = 0; i < ARRAY_SIZE(bad); i++) {
        pfns[i] = cpu_to_le32(bad[i]);
    }
    /* the good one at the end is still given back */
    pfns[ARRAY_SIZE(bad)] = cpu_to_le32(GIVE_START / PAGE);
    for (int queue = INFLATE; queue <= DEFLATE; queue++) {
        fake_pfns(fake, queue, pfns, sizeof(pfns));
        fake_pfns(fake, queue, bad, sizeof(bad));
        /* pieces of a number */
        fake_pfns(fake, queue, pfns, sizeof(pfns) - 3);
        fake_pfns(fake, queue, pfns, 3);
    }
    assert_sane(fake);
    g_assert_cmpuint(fake_stat(fake, "free-hinted"), >=, 1);
    fake_free(fake);
}

/* The same page again and again, and pages across the end of RAM. */
static void test_repeated_pfns(const void *opaque)
{
    const Case *c = opaque;
    Fake *fake = fake_new(c->backend);
    const size_t n = MIB / sizeof(uint32_t);
    g_autofree uint32_t *pfns = g_new(uint32_t, n);

    for (size_t i = 0; i < n; i++) {
        pfns[i] = cpu_to_le32(GIVE_START / PAGE + (i & 1) * (i % GIVE_PAGES));
    }
    fake_pfns(fake, INFLATE, pfns, MIB);
    for (size_t i = 0; i < n; i++) {
        pfns[i] = cpu_to_le32(SIZE / PAGE - 16 + i);
    }
    fake_pfns(fake, INFLATE, pfns, MIB);
    assert_sane(fake);
    fake_free(fake);
}

static void test_bad_reports(const void *opaque)
{
    static const Range bad[] = {
        { GIVE_START + 1, PAGE },               /* unaligned */
        { GIVE_START, PAGE - 1 },
        { GIVE_START + 2048, 2048 },
        { GIVE_START, 1 },
        { SIZE, PAGE },                         /* not there */
        { SIZE - PAGE, 0x10000000 },            /* over the end */
        { 0xa0000, 0x20000 },                   /* VGA */
        { 0xf0000, 0x10000 },                   /* BIOS */
        { 0xfee00000, PAGE },                   /* APIC */
        { 0xffffffff000, PAGE },
        { 0xfffffffffffff000, PAGE },           /* wraps */
    };
    const Case *c = opaque;
    /* a device that finds nonsense in its queue stops: a new one each time */
    for (int i = 0; i < ARRAY_SIZE(bad); i++) {
        Fake *fake = fake_new(c->backend);
        Range ranges[] = { bad[i], { GIVE_START, 2 * MIB } };
        QVirtQueue *vq = fake->queue[REPORT];
        uint32_t head = qvirtqueue_add(fake->qts, vq, ranges[0].addr,
                                       ranges[0].len, true, true);

        qvirtqueue_add(fake->qts, vq, ranges[1].addr, ranges[1].len, true,
                       false);
        qvirtqueue_kick(fake->qts, &fake->dev->vdev, vq, head);
        qtest_clock_step(fake->qts, 1000000);
        assert_sane(fake);
        fake_free(fake);
    }
}

/* Overlapping ranges, all of RAM at once, and the queue's own memory. */
static void test_overlapping_reports(const void *opaque)
{
    const Case *c = opaque;
    Fake *fake = fake_new(c->backend);
    Range ranges[16];

    for (int i = 0; i < ARRAY_SIZE(ranges); i++) {
        ranges[i] = (Range) { GIVE_START + i / 4 * MIB, 4 * MIB };
    }
    for (int round = 0; round < 20; round++) {
        fake_report(fake, ranges, ARRAY_SIZE(ranges));
    }
    assert_sane(fake);
    ranges[0] = (Range) { MIB, SIZE - MIB };
    qvirtqueue_kick(fake->qts, &fake->dev->vdev, fake->queue[REPORT],
                    qvirtqueue_add(fake->qts, fake->queue[REPORT],
                                   ranges[0].addr, ranges[0].len, true,
                                   false));
    qtest_qmp_assert_success(fake->qts, "{'execute': 'query-status'}");
    assert_old_or_zero(fake, FILL_START, FILL_LEN);
    fake_free(fake);
}

/* --- QEMU's own conditions --- */

static void assert_inert(Fake *fake, const char *text)
{
    QDict *stats = ksm_stats(fake->qts);
    const char *reason = ksm_reason(ksm_stats_backend(stats, "ram0"),
                                    "balloon-inert");

    if (text) {
        g_assert_nonnull(reason);
        g_test_message("%s", reason);
        g_assert_nonnull(strstr(reason, text));
    } else {
        g_assert_null(reason);
    }
    qobject_unref(stats);
}

static void assert_nothing_released(Fake *fake)
{
    size_t before = fake_vma(fake).resident;

    give_report(fake);
    g_assert_cmpuint(fake_vma(fake).resident, >=, before);
    g_assert_cmpuint(fake_vma(fake).lazy_free, ==, 0);
    assert_old(fake, GIVE_START, GIVE_LEN);
}

static void test_inert(void)
{
    Fake *fake = fake_boot(KSM);
    QTestState *qts;
    char *hmp;

    assert_inert(fake, "does not use");
    fake_drive(fake, 0);
    assert_inert(fake, "does not report");
    hmp = qtest_hmp(fake->qts, "info ksm");
    g_assert_nonnull(strstr(hmp, "does not report"));
    g_free(hmp);
    fake_free(fake);

    fake = fake_new(KSM);
    assert_inert(fake, NULL);
    qtest_qmp_assert_success(fake->qts, "{'execute': 'device_del', "
                             "'arguments': {'id': 'balloon'}}");
    fake_free(fake);

    qts = qtest_init("-machine pc,memory-backend=ram0 -m 42M -nodefaults "
                     "-object memory-backend-ksm,id=ram0,size=42M");
    hmp = qtest_hmp(qts, "info ksm");
    g_assert_nonnull(strstr(hmp, "no virtio-balloon device"));
    g_free(hmp);
    qtest_quit(qts);
}

static void test_poison(void)
{
    Fake *fake = fake_boot(KSM ",free-policy=lazy");

    fake_drive(fake, 1 << VIRTIO_BALLOON_F_REPORTING |
                     1 << VIRTIO_BALLOON_F_PAGE_POISON);
    qtest_memset(fake->qts, FILL_START, PATTERN, FILL_LEN);
    qpci_io_writel(fake->dev->pdev, fake->dev->bar,
                   fake->dev->device_cfg_offset +
                   offsetof(struct virtio_balloon_config, poison_val),
                   0xaaaaaaaa);
    assert_inert(fake, "poison");
    assert_nothing_released(fake);
    fake_free(fake);
}

/*
 * A background snapshot takes some seconds.  What the driver writes waits until
 * the snapshot has it.
 */
static void test_snapshot(void)
{
    Fake *fake = fake_new(KSM ",free-policy=lazy");
    QDict *answer;

    qtest_qmp_assert_success(
        fake->qts, "{'execute': 'migrate-set-parameters', 'arguments': "
        "{'max-bandwidth': 2097152}}");
    answer = qtest_qmp(
        fake->qts, "{'execute': 'migrate-set-capabilities', 'arguments': "
        "{'capabilities': [{'capability': 'background-snapshot', "
        "'state': true}]}}");
    if (qdict_haskey(answer, "error")) {
        g_test_skip("this host has no background snapshots");
    } else {
        qtest_qmp_assert_success(
            fake->qts, "{'execute': 'migrate', 'arguments': "
            "{'uri': 'exec:cat >/dev/null'}}");
        assert_inert(fake, "snapshot");
        assert_nothing_released(fake);
        qtest_qmp_assert_success(fake->qts, "{'execute': 'migrate_cancel'}");
    }
    qobject_unref(answer);
    fake_free(fake);
}

static void add_cases(const char *path, const char *backend, int n_ways,
                      void (*test)(const void *))
{
    static const struct { const char *name; Give *give; } ways[] = {
        { "inflate", give_inflate },
        { "report", give_report },
        { "inflate-down", give_inflate_down },
        { "inflate-scattered", give_inflate_scattered },
    };

    for (int i = 0; i < n_ways; i++) {
        g_autofree char *full = g_strdup_printf("ksm-balloon/%s/%s", path,
                                                ways[i].name);
        Case *c = g_new(Case, 1);

        *c = (Case) { path, backend, ways[i].give };
        qtest_add_data_func_full(full, c, test, g_free);
    }
}

static void add_lies(const char *name, const char *backend)
{
    static const struct { const char *name; GTestDataFunc test; } lies[] = {
        { "pfns", test_bad_pfns },
        { "repeated-pfns", test_repeated_pfns },
        { "reports", test_bad_reports },
        { "overlapping-reports", test_overlapping_reports },
    };

    for (int i = 0; i < ARRAY_SIZE(lies); i++) {
        g_autofree char *full = g_strdup_printf("ksm-balloon/lies/%s/%s",
                                                name, lies[i].name);
        Case *c = g_new(Case, 1);

        *c = (Case) { name, backend, NULL };
        qtest_add_data_func_full(full, c, lies[i].test, g_free);
    }
}

static bool vm_works(void)
{
    g_autoptr(KsmRun) run = ksm_run("-object " KSM ",id=r,size=2M,scope=vm",
                                    NULL);

    return strstr(run->err, KSM_RUN_STARTED);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    add_cases("ram", "memory-backend-ram", 2, test_eager);
    /* what the kernel merges is never released lazily */
    add_cases("host", KSM ",free-policy=lazy", 4, test_eager);
    add_cases("host/auto", KSM, 2, test_eager);
    add_cases("deflate", KSM, 1, test_deflate);
    add_lies("host", KSM);
    if (vm_works()) {
        /* while what is given back is being merged: the pattern is */
        add_lies("vm", KSM ",scope=vm,max-cpu=100,free-policy=lazy");
        add_lies("zero", KSM ",scope=zero,max-cpu=100");
        /* nothing merged: free memory can be told from it */
        add_cases("vm/eager", VM ",free-policy=eager", 4, test_eager);
        add_cases("vm/lazy", VM ",free-policy=lazy", 4, test_lazy);
        add_cases("vm/auto", VM, 2, test_auto);
        add_cases("vm/deflate", VM ",free-policy=lazy", 1, test_deflate);
        add_cases("zero/eager", ZERO ",free-policy=eager", 2, test_eager);
        add_cases("zero/lazy", ZERO ",free-policy=lazy", 2, test_lazy);
    }
    qtest_add_func("ksm-balloon/inert", test_inert);
    qtest_add_func("ksm-balloon/poison", test_poison);
    qtest_add_func("ksm-balloon/snapshot", test_snapshot);
    return g_test_run();
}
