/*
 * Tests of memory-backend-ksm with scopes zero and vm: memory that is merged
 * while QEMU discards, migrates, snapshots and writes it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * No guest runs: the test writes guest memory itself, so it knows its
 * content.  tests/e2e has real guests.  Nothing depends on how long merging
 * takes.
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qobject/qdict.h"
#include "qobject/qlist.h"
#include "qobject/qjson.h"
#include "ksm-helpers.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define MIB (1u << 20)
#define PAGE 4096u

/* Where the test keeps its data: clear of what firmware uses. */
#define ORIGINAL (ksm_ram_start() + 16 * MIB)
#define COPY (ksm_ram_start() + 32 * MIB)
#define AREA (4 * MIB)
#define AREA_PAGES (AREA / PAGE)

#define MACHINE(props) \
    "-machine pc,memory-backend=ram0 -m 64M -nodefaults " \
    "-object memory-backend-ksm,id=ram0,size=64M,max-cpu=100," props " "

static bool supported;

static bool skip(void)
{
    if (!supported) {
        g_test_skip("this kernel, or this user, cannot merge: see "
                    "ksm/merge/supported");
    }
    return !supported;
}

/* Page i of an area, unique in all of its bytes. */
static void page_fill(uint8_t *page, uint32_t seed)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15ull + 1;

    for (unsigned i = 0; i < PAGE; i += 8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        memcpy(page + i, &x, 8);
    }
}

static uint8_t *area_new(void)
{
    uint8_t *area = g_malloc(AREA);

    for (unsigned i = 0; i < AREA_PAGES; i++) {
        page_fill(area + i * PAGE, i);
    }
    return area;
}

static void area_write(QTestState *qts, uint64_t addr, const uint8_t *area)
{
    for (unsigned at = 0; at < AREA; at += 256 * 1024) {
        qtest_bufwrite(qts, addr + at, area + at, 256 * 1024);
    }
}

static void area_check(QTestState *qts, uint64_t addr, const uint8_t *area)
{
    g_autofree uint8_t *now = g_malloc(AREA);

    for (unsigned at = 0; at < AREA; at += 256 * 1024) {
        qtest_bufread(qts, addr + at, now + at, 256 * 1024);
    }
    for (unsigned i = 0; i < AREA_PAGES; i++) {
        if (memcmp(now + i * PAGE, area + i * PAGE, PAGE)) {
            g_test_message("page %u at 0x%" PRIx64 " is not what it was", i,
                           addr + i * PAGE);
            g_assert_not_reached();
        }
    }
}

static int64_t stat_get(QTestState *qts, const char *id, const char *name)
{
    QDict *stats = ksm_stats(qts);
    int64_t value = qdict_get_try_int(ksm_stats_backend(stats, id), name, -1);

    qobject_unref(stats);
    return value;
}

static bool has_reason(QTestState *qts, const char *id, const char *kind,
                       const char *text)
{
    QDict *stats = ksm_stats(qts);
    const char *reason = ksm_reason(ksm_stats_backend(stats, id), kind);
    bool has = reason && strstr(reason, text);

    qobject_unref(stats);
    return has;
}

/* A test that waits so long has failed. */
#define PATIENCE_S 120

static void wait_stat(QTestState *qts, const char *name, int64_t least)
{
    int64_t value = -1;

    for (int i = 0; i < PATIENCE_S * 20; i++) {
        value = stat_get(qts, "ram0", name);
        if (value >= least) {
            return;
        }
        g_usleep(50 * 1000);
    }
    g_test_message("%s stays at %" PRId64 ", not %" PRId64, name, value,
                   least);
    g_assert_not_reached();
}

static void wait_reason(QTestState *qts, const char *kind, const char *text)
{
    for (int i = 0; i < PATIENCE_S * 20; i++) {
        if (has_reason(qts, "ram0", kind, text)) {
            return;
        }
        g_usleep(50 * 1000);
    }
    g_test_message("no reason %s with the text '%s': %s", kind, text,
                   qtest_hmp(qts, "info ksm"));
    g_assert_not_reached();
}

/* Two copies of the area, merged but for some pages that may not pay. */
static uint8_t *merge_copies(QTestState *qts)
{
    uint8_t *area = area_new();

    area_write(qts, ORIGINAL, area);
    area_write(qts, COPY, area);
    wait_stat(qts, "pages-merged", AREA_PAGES * 2 * 9 / 10);
    return area;
}

static void check_copies(QTestState *qts, const uint8_t *area)
{
    area_check(qts, ORIGINAL, area);
    area_check(qts, COPY, area);
}

static void test_supported(void)
{
    g_autoptr(KsmRun) run =
        ksm_run("-object memory-backend-ksm,id=r,size=64M,scope=vm", NULL);

    supported = strstr(run->err, KSM_RUN_STARTED) != NULL;
    if (!supported) {
        g_assert_nonnull(strstr(run->err, "scope=vm: "));
        g_test_skip(run->err);
    }
}

static void test_vm(void)
{
    g_autofree uint8_t *area = NULL;
    g_autofree uint8_t *changed = NULL;
    QTestState *qts;

    if (skip()) {
        return;
    }
    qts = qtest_init(MACHINE("scope=vm"));
    area = merge_copies(qts);
    check_copies(qts, area);

    /* writes to one copy are in that copy only */
    changed = g_memdup2(area, AREA);
    for (unsigned i = 0; i < AREA_PAGES; i += 3) {
        uint8_t byte = ~changed[i * PAGE + i];

        changed[i * PAGE + i] = byte;
        qtest_writeb(qts, COPY + i * PAGE + i, byte);
    }
    area_check(qts, ORIGINAL, area);
    area_check(qts, COPY, changed);

    /* merged again once it is as before */
    area_write(qts, COPY, area);
    wait_stat(qts, "pages-merged", AREA_PAGES * 2 * 9 / 10);
    check_copies(qts, area);
    qtest_quit(qts);
}

/* QEMU marks all RAM for the kernel's KSM, but not ours. */
static void test_not_for_ksmd(void)
{
    QTestState *qts;

    if (skip()) {
        return;
    }
    qts = qtest_init("-machine pc,memory-backend=ram0 -m 42M -nodefaults "
                     "-object memory-backend-ksm,id=ram0,size=42M,scope=vm,"
                     "run=off");
    g_assert_false(ksm_vma_has(qts, 42 * MIB, "mg"));
    qtest_quit(qts);
}

/* Nor may it be marked later, which would not end at the guest. */
static void test_merge_property(void)
{
    g_autofree uint8_t *area = NULL;
    QTestState *qts;
    KsmVmas vmas;

    if (skip()) {
        return;
    }
    qts = qtest_init(MACHINE("scope=vm"));
    area = merge_copies(qts);
    ksm_qom_set_fails(qts, "ram0", "merge", "false", "use 'run'");
    ksm_qom_set(qts, "ram0", "merge", "true");
    vmas = ksm_vmas_count(qts, ksm_host_address(qts, ksm_ram_start()),
                          64 * MIB, "mg");
    g_assert_cmpuint(vmas.all, >, 2);
    g_assert_cmpuint(vmas.flagged, ==, 0);
    check_copies(qts, area);
    qtest_quit(qts);
}

/*
 * Core dumps have all of the memory or none, whatever is merged afterwards.
 * @addr: of two areas not written yet.
 */
static void dump_change(QTestState *qts, bool dump, uint64_t addr)
{
    g_autofree uint8_t *area = area_new();
    int64_t merged = stat_get(qts, "ram0", "pages-merged");
    KsmVmas vmas;

    ksm_qom_set(qts, "ram0", "dump", dump ? "true" : "false");
    for (unsigned i = 0; i < AREA; i += PAGE) {
        area[i] ^= addr >> 20;
    }
    area_write(qts, addr, area);
    area_write(qts, addr + AREA, area);
    wait_stat(qts, "pages-merged", merged + AREA_PAGES * 2 * 9 / 10);
    ksm_qom_set(qts, "ram0", "run", "false");
    vmas = ksm_vmas_count(qts, ksm_host_address(qts, ksm_ram_start()),
                          64 * MIB, "dd");
    g_assert_cmpuint(vmas.flagged, ==, dump ? 0 : vmas.all);
    g_assert_cmpuint(vmas.all, >, 2);
    area_check(qts, addr, area);
    area_check(qts, addr + AREA, area);
    ksm_qom_set(qts, "ram0", "run", "true");
}

static void test_dump_property(const void *opaque)
{
    bool dump = !g_str_equal(opaque, "on");
    QTestState *qts;

    if (skip()) {
        return;
    }
    qts = qtest_initf(MACHINE("scope=vm,dump=%s"), (const char *)opaque);
    for (unsigned i = 0; i < 3; i++) {
        dump_change(qts, dump, ORIGINAL + 12 * i * MIB);
        dump = !dump;
    }
    qtest_quit(qts);
}

static void test_two_scopes(void)
{
    QTestState *qts;
    QDict *stats;

    if (skip()) {
        return;
    }
    qts = qtest_init("-machine pc -m 64M -nodefaults "
                     "-object memory-backend-ksm,id=a,size=32M,scope=vm "
                     "-object memory-backend-ksm,id=b,size=32M,scope=host "
                     "-numa node,memdev=a -numa node,memdev=b");
    stats = ksm_stats(qts);
    g_assert_cmpstr(qdict_get_str(ksm_stats_backend(stats, "a"), "scope"), ==,
                    "vm");
    g_assert_cmpstr(qdict_get_str(ksm_stats_backend(stats, "b"), "scope"), ==,
                    "host");
    qobject_unref(stats);
    qtest_quit(qts);
}

/* Backends come and go while another one's engine works. */
static void test_object_del(void)
{
    g_autofree uint8_t *area = NULL;
    QTestState *qts;

    if (skip()) {
        return;
    }
    qts = qtest_init(MACHINE("scope=vm"));
    area = merge_copies(qts);
    for (int i = 0; i < 5; i++) {
        qtest_qmp_assert_success(
            qts, "{'execute': 'object-add', 'arguments': {'qom-type': "
            "'memory-backend-ksm', 'id': 'r', 'size': %d, 'scope': %s}}",
            8 * MIB, "vm");
        g_usleep(20 * 1000 * i);
        qtest_qmp_assert_success(qts, "{'execute': 'object-del', "
                                 "'arguments': {'id': 'r'}}");
    }
    check_copies(qts, area);
    qtest_quit(qts);
}

static void migrate(QTestState *qts, const char *uri)
{
    qtest_qmp_assert_success(qts, "{'execute': 'migrate', "
                             "'arguments': {'uri': %s}}", uri);
}

static void wait_migration(QTestState *qts, const char *state)
{
    for (int i = 0; i < PATIENCE_S * 20; i++) {
        QDict *info = qtest_qmp_assert_success_ref(
            qts, "{'execute': 'query-migrate'}");
        const char *status = qdict_get_try_str(info, "status");
        bool there = status && g_str_equal(status, state);

        g_assert_false(status && g_str_equal(status, "failed") && !there);
        qobject_unref(info);
        if (there) {
            return;
        }
        g_usleep(50 * 1000);
    }
    g_assert_not_reached();
}

static char *temp_file(void)
{
    char *path = NULL;
    int fd = g_file_open_tmp("ksm-merge-XXXXXX", &path, NULL);

    close(fd);
    return path;
}

/* Out while merged, into a QEMU with plain RAM. */
static void test_migrate(void)
{
    g_autofree uint8_t *area = NULL;
    g_autofree char *path = NULL;
    g_autofree char *uri = NULL;
    QTestState *from, *to;

    if (skip()) {
        return;
    }
    path = temp_file();
    uri = g_strdup_printf("file:%s", path);
    from = qtest_init(MACHINE("scope=vm"));
    area = merge_copies(from);
    migrate(from, uri);
    wait_migration(from, "completed");
    check_copies(from, area);
    qtest_quit(from);

    to = qtest_init("-machine pc,memory-backend=ram0 -m 64M -nodefaults "
                    "-object memory-backend-ram,id=ram0,size=64M "
                    "-incoming defer");
    qtest_qmp_assert_success(to, "{'execute': 'migrate-incoming', "
                             "'arguments': {'uri': %s}}", uri);
    wait_migration(to, "completed");
    check_copies(to, area);
    qtest_quit(to);
    unlink(path);
}

static void test_reset(void)
{
    g_autofree uint8_t *area = NULL;
    QTestState *qts;

    if (skip()) {
        return;
    }
    qts = qtest_init(MACHINE("scope=vm"));
    area = merge_copies(qts);
    qtest_system_reset(qts);
    check_copies(qts, area);
    qtest_qmp_assert_success(qts, "{'execute': 'stop'}");
    check_copies(qts, area);
    qtest_qmp_assert_success(qts, "{'execute': 'cont'}");
    wait_stat(qts, "pages-merged", AREA_PAGES * 2 * 9 / 10);
    qtest_quit(qts);
}

static void test_quit(void)
{
    g_autofree uint8_t *area = NULL;

    if (skip()) {
        return;
    }
    area = area_new();
    for (int i = 0; i < 4; i++) {
        QTestState *qts = qtest_init(MACHINE("scope=vm"));

        area_write(qts, ORIGINAL, area);
        area_write(qts, COPY, area);
        g_usleep(30 * 1000 * i);
        qtest_quit(qts);
    }
}

/*
 * An iothread is deleted while it merges: it stays until the last backend has
 * gone.
 */
static void test_iothread(void)
{
    QTestState *qts;

    if (skip()) {
        return;
    }
    qts = qtest_init("-machine none -object iothread,id=io0");
    for (int i = 0; i < 3; i++) {
        qtest_qmp_assert_success(
            qts, "{'execute': 'object-add', 'arguments': {'qom-type': "
            "'memory-backend-ksm', 'id': 'r', 'size': %d, 'scope': 'vm', "
            "'iothread': 'io0'}}", 8 * MIB);
        if (i == 2) {
            qtest_qmp_assert_success(qts, "{'execute': 'object-del', "
                                     "'arguments': {'id': 'io0'}}");
        }
        g_usleep(20 * 1000 * i);
        qtest_qmp_assert_success(qts, "{'execute': 'object-del', "
                                 "'arguments': {'id': 'r'}}");
    }
    qtest_quit(qts);
}

static void test_dump(void)
{
    g_autofree uint8_t *area = NULL;
    g_autofree char *path = NULL;
    g_autofree char *dump = NULL;
    g_autofree char *protocol = NULL;
    QTestState *qts;
    size_t size;

    if (skip()) {
        return;
    }
    path = temp_file();
    protocol = g_strdup_printf("file:%s", path);
    qts = qtest_init(MACHINE("scope=vm"));
    area = merge_copies(qts);
    qtest_qmp_assert_success(
        qts, "{'execute': 'dump-guest-memory', 'arguments': "
        "{'paging': false, 'protocol': %s, 'begin': %" PRIu64 ", "
        "'length': %d}}", protocol, COPY, AREA);
    check_copies(qts, area);
    qtest_quit(qts);
    g_assert_true(g_file_get_contents(path, &dump, &size, NULL));
    g_assert_nonnull(memmem(dump, size, area, AREA));
    unlink(path);
}

/* What the kernel refuses, and the message. */
typedef struct Fault {
    const char *name;
    KsmFault call;
    const char *kind;       /* of a reason; NULL: none for this */
    const char *text;       /* part of its text */
} Fault;

/* Before the guest runs: there is no object, and a reason. */
static const Fault faults_at_start[] = {
    { "denied", { SYS_ioctl, 1, (uint32_t)UFFDIO_API, EPERM },
      NULL, "userfaultfd is not permitted" },
    { "old-kernel", { SYS_ioctl, 1, (uint32_t)UFFDIO_API, EINVAL },
      NULL, "UFFDIO_MOVE (Linux 6.8)" },
    { "no-userfaultfd", { SYS_userfaultfd, KSM_FAULT_ANY, 0, ENOSYS },
      NULL, "lacks userfaultfd" },
    { "files", { SYS_userfaultfd, KSM_FAULT_ANY, 0, EMFILE },
      NULL, "Too many open files" },
};

/* The guest runs, and nothing of it is merged. */
static const Fault faults_running[] = {
    { "move", { SYS_ioctl, 1, (uint32_t)UFFDIO_MOVE, EINVAL }, NULL, NULL },
    { "move-nomem", { SYS_ioctl, 1, (uint32_t)UFFDIO_MOVE, ENOMEM },
      "no-memory", "no memory for merging" },
    { "pinned", { SYS_ioctl, 1, (uint32_t)UFFDIO_MOVE, EBUSY },
      "pinned", "pinned" },
    { "mappings", { SYS_mmap, 3, MAP_PRIVATE | MAP_FIXED, ENOMEM },
      "vma-limit", "vm.max_map_count" },
    { "pool-files", { SYS_memfd_create, KSM_FAULT_ANY, 0, EMFILE },
      "refused", "Too many open files" },
    { "pool-full", { SYS_pwrite64, KSM_FAULT_ANY, 0, ENOSPC },
      "no-memory", "no memory for merging" },
    { "register", { SYS_ioctl, 1, (uint32_t)UFFDIO_REGISTER, ENOMEM },
      "refused", "staging area" },
};

/*
 * The kernel refuses something while the guest runs: it runs on, its memory
 * stays, nothing is merged, and the reasons say why.
 */
static void test_fault_running(const void *opaque)
{
    const Fault *fault = opaque;
    g_autofree uint8_t *area = NULL;
    QTestState *qts;
    int64_t scans;

    if (skip()) {
        return;
    }
    qts = ksm_init_fault(&fault->call, MACHINE("scope=vm"));
    area = area_new();
    area_write(qts, ORIGINAL, area);
    area_write(qts, COPY, area);
    scans = stat_get(qts, "ram0", "full-scans");
    if (scans >= 0) {
        wait_stat(qts, "full-scans", scans + 2);
    }
    if (fault->kind) {
        wait_reason(qts, fault->kind, fault->text);
    }
    g_assert_cmpint(stat_get(qts, "ram0", "pages-merged"), <=, 0);
    check_copies(qts, area);
    area[5 * PAGE] ^= 1;
    qtest_writeb(qts, COPY + 5 * PAGE, area[5 * PAGE]);
    area_check(qts, COPY, area);
    qtest_quit(qts);
}

/* Missing from the start: refused, with what to do about it. */
static void test_fault_start(const void *opaque)
{
    const Fault *fault = opaque;
    g_autofree char *prefix = ksm_fault_command(&fault->call);
    g_autofree char *binary = g_strdup(getenv("QTEST_QEMU_BINARY"));
    g_autoptr(KsmRun) run = NULL;

    if (skip()) {
        return;
    }
    g_setenv("QTEST_QEMU_BINARY", prefix, true);
    run = ksm_run("-object memory-backend-ksm,id=r,size=64M,scope=vm", NULL);
    g_setenv("QTEST_QEMU_BINARY", binary, true);
    g_test_message("%s", run->err);
    g_assert_cmpint(run->status, ==, 1);
    g_assert_nonnull(strstr(run->err, "scope=vm cannot be used"));
    g_assert_nonnull(strstr(run->err, fault->text));
}

static bool has_file(QTestState *qts, int fd)
{
    g_autofree char *path = g_strdup_printf("/proc/%d/fd/%d", qtest_pid(qts),
                                            fd);

    return g_file_test(path, G_FILE_TEST_IS_SYMLINK);
}

/*
 * QEMU has its limit of files open when the guest begins to run, but not later.
 */
static void test_fault_files(void)
{
    g_autofree uint8_t *area = NULL;
    struct rlimit old, full = { };
    QTestState *qts;

    if (skip()) {
        return;
    }
    qts = qtest_init(MACHINE("scope=vm") "-S");
    g_assert_cmpint(prlimit(qtest_pid(qts), RLIMIT_NOFILE, NULL, &old), ==, 0);
    full.rlim_max = old.rlim_max;
    while (has_file(qts, full.rlim_cur)) {
        full.rlim_cur++;
    }
    g_assert_cmpint(prlimit(qtest_pid(qts), RLIMIT_NOFILE, &full, NULL), ==,
                    0);
    qtest_qmp_assert_success(qts, "{'execute': 'cont'}");
    wait_reason(qts, "refused", "/proc/self/smaps cannot be read");
    g_assert_cmpint(prlimit(qtest_pid(qts), RLIMIT_NOFILE, &old, NULL), ==, 0);
    area = merge_copies(qts);
    check_copies(qts, area);
    g_assert_false(has_reason(qts, "ram0", "refused", ""));
    qtest_quit(qts);
}

static void add_faults(const char *when, const Fault *faults, int n,
                       GTestDataFunc test)
{
    for (int i = 0; i < n; i++) {
        g_autofree char *path = g_strdup_printf("ksm/fault/%s/%s", when,
                                                faults[i].name);

        qtest_add_data_func(path, &faults[i], test);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && g_str_equal(argv[1], KSM_FAULT_OPTION)) {
        return ksm_fault_exec(argc, argv);
    }
    g_test_init(&argc, &argv, NULL);
    test_supported();
    qtest_add_func("ksm/merge/supported", test_supported);
    qtest_add_func("ksm/merge/vm", test_vm);
    qtest_add_func("ksm/merge/not-for-ksmd", test_not_for_ksmd);
    qtest_add_func("ksm/merge/merge-property", test_merge_property);
    qtest_add_data_func("ksm/merge/dump-property-on", "on",
                        test_dump_property);
    qtest_add_data_func("ksm/merge/dump-property-off", "off",
                        test_dump_property);
    qtest_add_func("ksm/merge/two-scopes", test_two_scopes);
    qtest_add_func("ksm/merge/object-del", test_object_del);
    qtest_add_func("ksm/merge/migrate-to-plain", test_migrate);
    qtest_add_func("ksm/merge/iothread", test_iothread);
    qtest_add_func("ksm/merge/dump", test_dump);
    qtest_add_func("ksm/merge/reset", test_reset);
    add_faults("start", faults_at_start, ARRAY_SIZE(faults_at_start),
               test_fault_start);
    add_faults("running", faults_running, ARRAY_SIZE(faults_running),
               test_fault_running);
    qtest_add_func("ksm/fault/open-files", test_fault_files);
    qtest_add_func("ksm/merge/quit", test_quit);
    return g_test_run();
}
