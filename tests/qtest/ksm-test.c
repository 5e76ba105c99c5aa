/*
 * Tests of memory-backend-ksm: its properties, its refusals, scope=host and
 * query-ksm-stats
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Nothing here starts ksmd or waits for it: tests/e2e merges real guests.
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qobject/qdict.h"
#include "qobject/qjson.h"
#include "qobject/qlist.h"
#include "qobject/qstring.h"
#include "qemu/cutils.h"
#include "ksm-helpers.h"
#include <linux/mman.h>
#include <sys/syscall.h>

/* No other mapping of QEMU has this size: it finds the VMA. */
#define SIZE (42 << 20)
#define RAM "-machine q35,memory-backend=ram0 -m 42M -nodefaults " \
            "-object memory-backend-ksm,id=ram0,size=42M"

typedef struct Refusal {
    const char *name;
    const char *args;
    const char *message;
} Refusal;

#define OBJECT "-object memory-backend-ksm,id=r,size=42M"

static const Refusal refusals[] = {
    { "share", OBJECT ",share=on", "property 'share' of" },
    { "merge", OBJECT ",merge=off", "property 'merge' of" },
    { "mem-merge", "-machine mem-merge=off " OBJECT,
      "Its default comes from -machine mem-merge" },
    { "prealloc", OBJECT ",prealloc=on", "property 'prealloc' of" },
    { "mem-prealloc", "-mem-prealloc " OBJECT, "without -mem-prealloc" },
    { "mem-lock", "-overcommit mem-lock=on " OBJECT,
      "locked memory is not merged" },
    { "mem-lock-on-fault", "-overcommit mem-lock=on-fault " OBJECT,
      "locked memory is not merged" },
    { "size-zero", "-object memory-backend-ksm,id=r,size=0",
      "doesn't take value '0'" },
    { "size-missing", "-object memory-backend-ksm,id=r",
      "Parameter 'size' is missing" },
    { "size-type", "-object memory-backend-ksm,id=r,size=many",
      "Parameter 'size' expects" },
    { "hugetlb", OBJECT ",hugetlb=on", "Invalid parameter 'hugetlb'" },
    { "mem-path", OBJECT ",mem-path=/dev/hugepages",
      "Invalid parameter 'mem-path'" },
    { "unknown", OBJECT ",colour=red", "Invalid parameter 'colour'" },
    { "duplicate-id", OBJECT " " OBJECT, "Duplicate ID 'r'" },
    { "scope-unknown", OBJECT ",scope=galaxy",
      "Parameter 'scope' does not accept value 'galaxy'" },
    { "group-missing", OBJECT ",scope=group",
      "scope=group needs the property 'group'" },
    { "group-empty", OBJECT ",scope=group,group=", "must not be empty" },
    { "group-alone", OBJECT ",group=a",
      "property 'group' needs scope=group, not scope=host" },
    { "group-path", OBJECT ",scope=group,group=../a",
      "property 'group' is a name of up to 64 letters" },
    { "group-hidden", OBJECT ",scope=group,group=.a",
      "property 'group' is a name of up to 64 letters" },
    { "group-socket-alone", OBJECT ",scope=vm,group-socket=/x",
      "property 'group-socket' needs scope=group, not scope=vm" },
    { "group-fd-alone", OBJECT ",scope=zero,group-fd=0",
      "property 'group-fd' needs scope=group, not scope=zero" },
    { "group-fd-none", OBJECT ",scope=group,group=a,group-fd=nobody",
      "nobody" },
    { "max-cpu-0", OBJECT ",max-cpu=0", "must be 1 to 100" },
    { "max-cpu-101", OBJECT ",max-cpu=101", "must be 1 to 100" },
    { "max-cpu-threads", OBJECT ",max-cpu=201,threads=2",
      "must be 1 to 200 (percent of one CPU, for each of its 'threads'), "
      "not 201" },
    { "max-cpu-70000", OBJECT ",max-cpu=70000", "expects uint16_t" },
    { "max-cpu-negative", OBJECT ",max-cpu=-1", "expects a uint64" },
    { "max-cpu-type", OBJECT ",max-cpu=all", "expects a uint64" },
    { "max-cpu", OBJECT ",max-cpu=5",
      "property 'max-cpu' is not available with scope=host" },
    { "threads-0", OBJECT ",threads=0", "must be 1 to 16, not 0" },
    { "threads-17", OBJECT ",threads=17", "must be 1 to 16, not 17" },
    { "threads-type", OBJECT ",threads=many", "expects a uint64" },
    { "threads", OBJECT ",threads=2",
      "property 'threads' is not available with scope=host" },
    { "scan-time-type", OBJECT ",target-scan-time=soon", "expects a uint64" },
    { "scan-time-large", OBJECT ",target-scan-time=4294967296",
      "expects uint32_t" },
    { "scan-time", OBJECT ",target-scan-time=20",
      "property 'target-scan-time' is not available with scope=host" },
    { "dirty-unknown", OBJECT ",dirty-tracking=guess",
      "does not accept value 'guess'" },
    { "dirty", OBJECT ",dirty-tracking=pagemap",
      "property 'dirty-tracking' is not available with scope=host" },
    { "free-unknown", OBJECT ",free-policy=never",
      "does not accept value 'never'" },
    { "smart-scan-type", OBJECT ",smart-scan=7", "expects 'on' or 'off'" },
    { "smart-scan", OBJECT ",smart-scan=off",
      "property 'smart-scan' is not available with scope=host" },
    { "nodes", OBJECT ",merge-across-nodes=on",
      "property 'merge-across-nodes' is not available with scope=host" },
    { "iothread", "-object iothread,id=io " OBJECT ",iothread=io",
      "property 'iothread' is not available with scope=host" },
    { "iothread-missing", OBJECT ",iothread=io", "'io' not found" },
    { "iothread-type", OBJECT ",iothread=pc", "not found" },
    { "run-type", OBJECT ",run=maybe", "expects 'on' or 'off'" },
    { "nvme-pmr", "-machine q35 " OBJECT
      " -device nvme,serial=1,pmrdev=r",
      "pmrdev cannot be a memory-backend-ksm" },
    { "machine-size",
      "-machine q35,memory-backend=r -m 64M " OBJECT,
      "does not match the size of the memory backend" },
};

static void test_refused(const void *opaque)
{
    const Refusal *refusal = opaque;
    g_autoptr(KsmRun) run = ksm_run(refusal->args, NULL);

    g_test_message("%s", run->err);
    g_assert_cmpint(run->status, ==, 1);
    g_assert_nonnull(strstr(run->err, refusal->message));
    g_assert_null(strstr(run->err, KSM_RUN_STARTED));
}

static void test_accepted(void)
{
    g_autoptr(KsmRun) run = ksm_run("-machine q35,memory-backend=r -m 42M "
                                    OBJECT ",scope=host,run=on,merge=on,"
                                    "free-policy=lazy", NULL);

    g_assert_nonnull(strstr(run->err, KSM_RUN_STARTED));
}

static void test_no_ksm(void)
{
    KsmDeny deny = { .advice = MADV_MERGEABLE, .err = EINVAL };
    g_autoptr(KsmRun) run = ksm_run(OBJECT, &deny);

    g_assert_cmpint(run->status, ==, 1);
    g_assert_nonnull(strstr(run->err, "this kernel cannot merge memory"));
    g_assert_nonnull(strstr(run->err, "CONFIG_KSM"));
}

/* Out of memory while marking: a warning, and the guest starts. */
static void test_mark_fails(void)
{
    KsmDeny deny = { .advice = MADV_MERGEABLE, .min_len = 1 << 20,
                     .err = ENOMEM };
    g_autoptr(KsmRun) run = ksm_run("-machine mem-merge=off "
                                    OBJECT ",merge=on", &deny);

    g_assert_nonnull(strstr(run->err, "of r will not be merged"));
    g_assert_nonnull(strstr(run->err, KSM_RUN_STARTED));
}

static void test_object_add(void)
{
    QTestState *qts = qtest_init("-machine none");
    QDict *error, *stats;
    KsmVma vma;

    error = qtest_qmp_assert_failure_ref(
        qts, "{'execute': 'object-add', 'arguments': {'qom-type': "
        "'memory-backend-ksm', 'id': 'r', 'size': %d, 'share': true}}", SIZE);
    g_assert_nonnull(strstr(qdict_get_str(error, "desc"), "'share'"));
    qobject_unref(error);
    for (int i = 0; i < 3; i++) {
        qtest_qmp_assert_success(
            qts, "{'execute': 'object-add', 'arguments': {'qom-type': "
            "'memory-backend-ksm', 'id': 'r', 'size': %d}}", SIZE);
        g_assert_true(ksm_vma_has(qts, SIZE, "mg"));
        stats = ksm_stats(qts);
        g_assert_nonnull(ksm_stats_backend(stats, "r"));
        qobject_unref(stats);
        qtest_qmp_assert_success(qts, "{'execute': 'object-del', "
                                 "'arguments': {'id': 'r'}}");
        stats = ksm_stats(qts);
        g_assert_null(ksm_stats_backend(stats, "r"));
        qobject_unref(stats);
        /* freed after an RCU grace period: no mergeable memory is left */
        while (ksm_vma_find(qts, SIZE, &vma)) {
            g_free(vma.flags);
            g_usleep(10000);
        }
    }
    qtest_quit(qts);
}

static void test_in_use(void)
{
    QTestState *qts = qtest_init(RAM);
    QDict *error = qtest_qmp_assert_failure_ref(
        qts, "{'execute': 'object-del', 'arguments': {'id': 'ram0'}}");

    g_assert_nonnull(strstr(qdict_get_str(error, "desc"), "in use"));
    qobject_unref(error);
    qtest_quit(qts);
}

static void set_fails(QTestState *qts, const char *property,
                      const char *json, const char *message)
{
    ksm_qom_set_fails(qts, "ram0", property, json, message);
}

static void test_qmp_bad_input(void)
{
    QTestState *qts = qtest_init(RAM);
    QDict *error;

    error = qtest_qmp_assert_failure_ref(
        qts, "{'execute': 'query-ksm-stats', 'arguments': {'all': true}}");
    g_assert_nonnull(strstr(qdict_get_str(error, "desc"), "'all'"));
    qobject_unref(error);
    set_fails(qts, "scope", "\"vm\"", "cannot change property 'scope'");
    set_fails(qts, "scope", "\"x\"", "does not accept value 'x'");
    set_fails(qts, "group", "\"x\"", "cannot change property 'group'");
    set_fails(qts, "dirty-tracking", "\"log\"", "cannot change property");
    set_fails(qts, "free-policy", "\"lazy\"", "cannot change property");
    set_fails(qts, "merge-across-nodes", "true", "cannot change property");
    set_fails(qts, "max-cpu", "0", "must be 1 to 100");
    set_fails(qts, "max-cpu", "20", "not available with scope=host");
    set_fails(qts, "target-scan-time", "20", "not available");
    set_fails(qts, "smart-scan", "false", "not available");
    set_fails(qts, "run", "1", "Invalid parameter type for 'run'");
    set_fails(qts, "size", "1", "cannot change property size");
    set_fails(qts, "share", "true", "cannot change property");
    set_fails(qts, "reserve", "false", "cannot change");
    set_fails(qts, "prealloc", "true", "would unmerge it");
    set_fails(qts, "policy", "\"bind\"", "'policy'");
    set_fails(qts, "host-nodes", "[0]", "'host-nodes'");
    qtest_quit(qts);
}

static void test_schema(void)
{
    QTestState *qts = qtest_init("-machine none");
    QDict *answer = qtest_qmp(qts, "{'execute': 'query-qmp-schema'}");
    g_autoptr(GString) json = qobject_to_json(QOBJECT(answer));

    g_assert_nonnull(strstr(json->str, "\"query-ksm-stats\""));
    g_assert_nonnull(strstr(json->str, "\"query-ksm-sketches\""));
    g_assert_nonnull(strstr(json->str, "\"memory-backend-ksm\""));
    qobject_unref(answer);
    qtest_quit(qts);
}

static void test_help(void)
{
    g_autoptr(KsmRun) run = NULL;
    g_autofree char *out = NULL;
    g_autofree char *command =
        g_strdup_printf("%s -object memory-backend-ksm,help",
                        getenv("QTEST_QEMU_BINARY"));
    static const char *const names[] = {
        "scope", "group", "group-socket", "group-fd", "iothread", "threads",
        "max-cpu", "target-scan-time", "dirty-tracking", "smart-scan", "free-policy",
        "merge-across-nodes", "run", "policy", "prealloc",
    };

    g_assert_true(g_spawn_command_line_sync(command, &out, NULL, NULL, NULL));
    for (int i = 0; i < ARRAY_SIZE(names); i++) {
        /* "  scope=<MemoryKsmScope> - Who may share memory ..." */
        g_autofree char *pattern =
            g_strdup_printf("^  %s=<[^ ]+>+ +- \\w", names[i]);

        g_assert_true(g_regex_match_simple(pattern, out, G_REGEX_MULTILINE, 0));
    }
}

/* -machine mem-merge=off: only we can make the memory mergeable. */
static void test_mergeable(void)
{
    QTestState *qts = qtest_init("-machine q35,memory-backend=ram0,"
                                 "mem-merge=off -m 42M -nodefaults "
                                 "-object memory-backend-ksm,id=ram0,"
                                 "size=42M,merge=on");
    QDict *stats;

    g_assert_true(ksm_vma_has(qts, SIZE, "mg"));
    stats = ksm_stats(qts);
    g_assert_true(qdict_get_bool(ksm_stats_backend(stats, "ram0"),
                                 "mergeable"));
    qobject_unref(stats);
    qtest_quit(qts);
}

static void assert_run(QTestState *qts, bool run)
{
    QDict *stats = ksm_stats(qts);
    QDict *backend = ksm_stats_backend(stats, "ram0");
    bool off = g_str_equal(qdict_get_str(backend, "state"), "off");

    g_assert_true(ksm_vma_has(qts, SIZE, "mg") == run);
    g_assert_true(qdict_get_bool(backend, "mergeable") == run);
    g_assert_true(off == !run);
    g_assert_true((ksm_reason(backend, "run-off") != NULL) == !run);
    qobject_unref(stats);
}

static void test_run(void)
{
    QTestState *qts = qtest_init(RAM ",run=off");

    assert_run(qts, false);
    ksm_qom_set(qts, "ram0", "run", "true");
    assert_run(qts, true);
    ksm_qom_set(qts, "ram0", "run", "false");
    assert_run(qts, false);
    qtest_quit(qts);
}

/* The property of memory-backend-ram has no say in merging. */
static void test_merge(void)
{
    QTestState *qts = qtest_init(RAM);

    ksm_qom_set_fails(qts, "ram0", "merge", "false",
                      "cannot change property 'merge' of memory-backend-ksm: "
                      "use 'run'");
    ksm_qom_set(qts, "ram0", "merge", "true");
    assert_run(qts, true);
    ksm_qom_set(qts, "ram0", "run", "false");
    ksm_qom_set(qts, "ram0", "merge", "true");
    assert_run(qts, false);
    qtest_quit(qts);
}

static void test_unmarked(void)
{
    KsmFault fault = { .nr = SYS_madvise, .arg = 1, .value = SIZE,
                       .err = ENOMEM };
    QTestState *qts = ksm_init_fault(&fault, RAM);
    QDict *stats = ksm_stats(qts);

    g_assert_nonnull(ksm_reason(ksm_stats_backend(stats, "ram0"), "refused"));
    qobject_unref(stats);
    qtest_quit(qts);
}

static void test_attributes(void)
{
    QTestState *qts = qtest_init(RAM ",dump=off,reserve=off");

    g_assert_true(ksm_vma_has(qts, SIZE, "dd"));
    g_assert_true(ksm_vma_has(qts, SIZE, "nr"));
    ksm_qom_set(qts, "ram0", "dump", "true");
    g_assert_false(ksm_vma_has(qts, SIZE, "dd"));
    ksm_qom_set(qts, "ram0", "dump", "false");
    g_assert_true(ksm_vma_has(qts, SIZE, "dd"));
    qtest_quit(qts);
}

static void test_policy(void)
{
    g_autofree char *path = NULL;
    g_autofree char *maps = NULL;
    g_autofree char *pattern = NULL;
    QTestState *qts;
    KsmVma vma;

    if (!g_file_test("/sys/devices/system/node/node0", G_FILE_TEST_IS_DIR)) {
        g_test_skip("this kernel has no NUMA");
        return;
    }
    qts = qtest_init(RAM ",policy=bind,host-nodes=0");
    g_assert_true(ksm_vma_find(qts, SIZE, &vma));
    g_free(vma.flags);
    path = g_strdup_printf("/proc/%d/numa_maps", qtest_pid(qts));
    g_assert_true(g_file_get_contents(path, &maps, NULL, NULL));
    pattern = g_strdup_printf("^%" PRIxPTR " bind:0\\b", vma.start);
    g_assert_true(g_regex_match_simple(pattern, maps, G_REGEX_MULTILINE, 0));
    qtest_quit(qts);
}

/* A directory that stands for /sys/kernel/mm/ksm; each file its own value. */
static const char *const knobs[] = {
    "run", "pages_to_scan", "sleep_millisecs", "pages_shared",
    "pages_sharing", "pages_unshared", "pages_volatile", "pages_skipped",
    "pages_scanned", "full_scans", "ksm_zero_pages", "general_profit",
};

static void knob_write(const char *dir, const char *name, const char *value)
{
    g_autofree char *path = g_build_filename(dir, name, NULL);

    g_assert_true(g_file_set_contents(path, value, -1, NULL));
}

static char *sysfs_new(void)
{
    char *dir = g_dir_make_tmp("ksm-test-XXXXXX", NULL);

    for (int i = 0; i < ARRAY_SIZE(knobs); i++) {
        g_autofree char *value = g_strdup_printf("%d\n", 100 + i);

        knob_write(dir, knobs[i], value);
    }
    knob_write(dir, "run", "1\n");
    knob_write(dir, "general_profit", "-4096\n");
    return dir;
}

static void sysfs_free(char *dir)
{
    for (int i = 0; i < ARRAY_SIZE(knobs); i++) {
        g_autofree char *path = g_build_filename(dir, knobs[i], NULL);

        unlink(path);
    }
    rmdir(dir);
    g_free(dir);
}

static bool skip_unless_root(void)
{
    if (geteuid() != 0) {
        g_test_skip("needs root, to put a directory over /sys/kernel/mm/ksm");
        return true;
    }
    return false;
}

/* Each value of the kernel's arrives in the member of its name. */
static void test_host_values(void)
{
    static const char *const members[] = {
        "run", "pages-to-scan", "sleep-millisecs", "pages-shared",
        "pages-sharing", "pages-unshared", "pages-volatile", "pages-skipped",
        "pages-scanned", "full-scans", "zero-pages", "profit",
    };
    char *dir;
    QTestState *qts;
    QDict *stats, *host;

    if (skip_unless_root()) {
        return;
    }
    dir = sysfs_new();
    qts = ksm_init_sysfs(dir, RAM);
    stats = ksm_stats(qts);
    host = ksm_stats_host(stats);
    g_assert_cmpint(qdict_get_int(host, "run"), ==, 1);
    for (int i = 1; i < ARRAY_SIZE(members) - 1; i++) {
        g_assert_cmpint(qdict_get_int(host, members[i]), ==, 100 + i);
    }
    g_assert_cmpint(qdict_get_int(host, "profit"), ==, -4096);
    g_assert_cmpstr(qdict_get_str(host, "state"), ==, "active");
    g_assert_true(qlist_empty(qdict_get_qlist(host, "reasons")));
    qobject_unref(stats);

    /* counts have no sign */
    knob_write(dir, "full_scans", "9223372036854775807\n");
    knob_write(dir, "pages_volatile", "-1\n");
    stats = ksm_stats(qts);
    host = ksm_stats_host(stats);
    g_assert_cmpint(qdict_get_int(host, "full-scans"), ==, INT64_MAX);
    g_assert_false(qdict_haskey(host, "pages-volatile"));
    qobject_unref(stats);
    qtest_quit(qts);
    sysfs_free(dir);
}

/* "ksmd" in query-ksm-stats of a host whose "run" has that value. */
static void assert_ksmd(QTestState *qts, const char *dir, const char *run,
                        const char *ksmd)
{
    QDict *stats;

    knob_write(dir, "run", run);
    stats = ksm_stats(qts);
    g_assert_cmpstr(qdict_get_try_str(ksm_stats_host(stats), "ksmd"), ==,
                    ksmd);
    qobject_unref(stats);
}

static void test_ksmd(void)
{
    char *dir;
    QTestState *qts;

    if (skip_unless_root()) {
        return;
    }
    dir = sysfs_new();
    qts = ksm_init_sysfs(dir, RAM);
    assert_ksmd(qts, dir, "0\n", "stopped");
    assert_ksmd(qts, dir, "1\n", "running");
    assert_ksmd(qts, dir, "2\n", "unmerged");
    /* of a kernel to come */
    assert_ksmd(qts, dir, "3\n", NULL);
    assert_ksmd(qts, dir, "-1\n", NULL);
    assert_ksmd(qts, dir, "yes\n", NULL);
    qtest_quit(qts);
    sysfs_free(dir);
}

/* Who does not want deprecated members has those that replace them. */
static void test_deprecated(void)
{
    char *dir;
    QTestState *qts;
    QDict *stats, *host;

    if (skip_unless_root()) {
        return;
    }
    dir = sysfs_new();
    qts = ksm_init_sysfs(dir, RAM " -compat deprecated-output=hide");
    stats = ksm_stats(qts);
    host = ksm_stats_host(stats);
    g_assert_cmpstr(qdict_get_str(host, "ksmd"), ==, "running");
    g_assert_false(qdict_haskey(host, "run"));
    g_assert_true(qdict_haskey(host, "saved-bytes"));
    g_assert_false(qdict_haskey(host, "pages-sharing"));
    qobject_unref(stats);
    qtest_quit(qts);
    sysfs_free(dir);
}

/* Checks the state of host and ram0, and a reason both have. */
static void assert_inhibited(QTestState *qts, const char *kind,
                             const char *text)
{
    QDict *stats = ksm_stats(qts);
    QDict *entries[] = {
        ksm_stats_host(stats), ksm_stats_backend(stats, "ram0"),
    };

    for (int i = 0; i < ARRAY_SIZE(entries); i++) {
        const char *reason = ksm_reason(entries[i], kind);

        g_assert_cmpstr(qdict_get_str(entries[i], "state"), ==, "inhibited");
        g_assert_nonnull(reason);
        g_assert_nonnull(strstr(reason, text));
    }
    qobject_unref(stats);
}

static void test_host_states(void)
{
    g_autofree char *run = NULL;
    char *dir;
    QTestState *qts;
    QDict *stats, *backend;

    if (skip_unless_root()) {
        return;
    }
    dir = sysfs_new();
    run = g_build_filename(dir, "run", NULL);
    qts = ksm_init_sysfs(dir, RAM);

    knob_write(dir, "run", "0\n");
    assert_inhibited(qts, "ksmd-stopped", "ksmd does not run");
    knob_write(dir, "run", "2\n");
    assert_inhibited(qts, "ksmd-stopped", "everything unmerged");
    knob_write(dir, "run", "1\n");
    knob_write(dir, "pages_to_scan", "0\n");
    assert_inhibited(qts, "ksmd-stopped", "scan no pages");
    knob_write(dir, "pages_to_scan", "100\n");

    /* nothing of ram0 is resident, so nothing can be merged */
    knob_write(dir, "pages_shared", "0\n");
    stats = ksm_stats(qts);
    backend = ksm_stats_backend(stats, "ram0");
    g_assert_cmpstr(qdict_get_str(backend, "state"), ==, "active");
    g_assert_true(ksm_reason(backend, "not-scanned") ||
                  ksm_reason(backend, "nothing-equal"));
    g_assert_nonnull(ksm_reason(ksm_stats_host(stats), "nothing-equal"));
    qobject_unref(stats);

    /* a garbled file, then none: not known is not an error */
    knob_write(dir, "run", "yes\n");
    stats = ksm_stats(qts);
    g_assert_nonnull(ksm_reason(ksm_stats_host(stats), "unreadable"));
    qobject_unref(stats);
    unlink(run);
    stats = ksm_stats(qts);
    g_assert_nonnull(ksm_reason(ksm_stats_host(stats), "unreadable"));
    g_assert_false(qdict_haskey(ksm_stats_host(stats), "run"));
    qobject_unref(stats);
    qtest_quit(qts);
    sysfs_free(dir);
}

static void test_no_sysfs(void)
{
    QTestState *qts;

    if (skip_unless_root()) {
        return;
    }
    qts = ksm_init_sysfs(NULL, RAM);
    assert_inhibited(qts, "no-kernel-support", "no /sys/kernel/mm/ksm");
    qtest_quit(qts);
}

/* query-ksm-stats says what the kernel says of the process. */
static void test_process(void)
{
    static const struct { const char *file, *member; } names[] = {
        { "ksm_rmap_items", "rmap-items" },
        { "ksm_zero_pages", "zero-pages" },
        { "ksm_merging_pages", "pages-merged" },
        { "ksm_process_profit", "profit" },
    };
    QTestState *qts = qtest_init(RAM);
    g_autofree char *path = g_strdup_printf("/proc/%d/ksm_stat",
                                            qtest_pid(qts));
    g_autofree char *text = NULL;
    QDict *stats, *process;

    if (!g_file_get_contents(path, &text, NULL, NULL)) {
        g_test_skip("this kernel has no /proc/PID/ksm_stat");
        qtest_quit(qts);
        return;
    }
    stats = ksm_stats(qts);
    process = qdict_get_qdict(stats, "process");
    for (int i = 0; i < ARRAY_SIZE(names); i++) {
        g_assert_true((strstr(text, names[i].file) != NULL) ==
                      qdict_haskey(process, names[i].member));
    }
    qobject_unref(stats);
    qtest_quit(qts);
}

/* QEMU that gave up root may not write ksmd's knobs, and says so. */
static void test_user(void)
{
    QTestState *qts;
    QDict *stats, *backend;
    char *dir;

    if (skip_unless_root()) {
        return;
    }
    dir = sysfs_new();
    chmod(dir, 0755);
    knob_write(dir, "run", "0\n");
    qts = ksm_init_sysfs(dir, RAM " -run-with user=nobody");
    stats = ksm_stats(qts);
    backend = ksm_stats_backend(stats, "ram0");
    g_assert_nonnull(ksm_reason(backend, "ksmd-stopped"));
    g_assert_nonnull(ksm_reason(backend, "not-permitted"));
    g_assert_true(qdict_get_bool(backend, "mergeable"));
    qobject_unref(stats);
    qtest_quit(qts);
    sysfs_free(dir);
}

/* Runs with @args and asks for everything there is. */
static void assert_works(const char *args)
{
    QTestState *qts = qtest_initf(RAM " %s", args);
    QDict *stats = ksm_stats(qts);
    char *hmp;

    g_assert_nonnull(ksm_stats_backend(stats, "ram0"));
    qobject_unref(stats);
    hmp = qtest_hmp(qts, "info ksm");
    g_assert_nonnull(strstr(hmp, "ram0 (scope=host):"));
    g_free(hmp);
    qtest_quit(qts);
}

static void test_sandbox(void)
{
    assert_works("-sandbox on,obsolete=deny,elevateprivileges=deny,"
                 "spawn=deny,resourcecontrol=deny");
}

static void test_accel(const void *accel)
{
    g_autofree char *args = g_strdup_printf("-accel %s", (char *)accel);

    assert_works(args);
}

static void test_numa(void)
{
    QTestState *qts = qtest_init(
        "-machine q35 -m 64M -nodefaults "
        "-object memory-backend-ksm,id=a,size=42M "
        "-object memory-backend-ksm,id=b,size=22M,run=off "
        "-numa node,memdev=a -numa node,memdev=b");
    QDict *stats = ksm_stats(qts);
    QDict *a = ksm_stats_backend(stats, "a");
    QDict *b = ksm_stats_backend(stats, "b");

    g_assert_cmpint(qdict_get_int(a, "size"), ==, 42 << 20);
    g_assert_cmpint(qdict_get_int(b, "size"), ==, 22 << 20);
    g_assert_true(qdict_get_bool(a, "mergeable"));
    g_assert_false(qdict_get_bool(b, "mergeable"));
    qobject_unref(stats);
    qtest_quit(qts);
}

/* Heads end with ':'; all values stand in one column. */
static void test_hmp(void)
{
    QTestState *qts = qtest_init(RAM);
    g_autofree char *text = qtest_hmp(qts, "info ksm");
    g_auto(GStrv) lines = g_strsplit(text, "\r\n", -1);
    unsigned heads = 0;

    for (char **line = lines; *line && **line; line++) {
        if (g_str_has_suffix(*line, ":")) {
            heads++;
            continue;
        }
        g_assert_true(g_regex_match_simple("^  [a-z][a-z0-9 ]{16} [^ ]", *line,
                                           0, 0));
    }
    g_assert_cmpuint(heads, >=, 2);
    g_assert_nonnull(strstr(text, "  size              42 MiB"));
    qtest_quit(qts);

    qts = qtest_init("-machine none");
    g_free(text);
    text = qtest_hmp(qts, "info ksm");
    g_assert_true(g_str_has_prefix(text, "no memory-backend-ksm"));
    qtest_quit(qts);
}

int main(int argc, char **argv)
{
    if (argc > 1 && g_str_equal(argv[1], KSM_FAULT_OPTION)) {
        return ksm_fault_exec(argc, argv);
    }
    g_test_init(&argc, &argv, NULL);
    for (int i = 0; i < ARRAY_SIZE(refusals); i++) {
        g_autofree char *path = g_strdup_printf("ksm/refused/%s",
                                                refusals[i].name);

        qtest_add_data_func(path, &refusals[i], test_refused);
    }
    qtest_add_func("ksm/accepted", test_accepted);
    qtest_add_func("ksm/no-ksm", test_no_ksm);
    qtest_add_func("ksm/mark-fails", test_mark_fails);
    qtest_add_func("ksm/object-add", test_object_add);
    qtest_add_func("ksm/in-use", test_in_use);
    qtest_add_func("ksm/qmp-bad-input", test_qmp_bad_input);
    qtest_add_func("ksm/schema", test_schema);
    qtest_add_func("ksm/help", test_help);
    qtest_add_func("ksm/host/mergeable", test_mergeable);
    qtest_add_func("ksm/host/run", test_run);
    qtest_add_func("ksm/host/merge", test_merge);
    qtest_add_func("ksm/host/unmarked", test_unmarked);
    qtest_add_func("ksm/host/attributes", test_attributes);
    qtest_add_func("ksm/host/policy", test_policy);
    qtest_add_func("ksm/host/values", test_host_values);
    qtest_add_func("ksm/host/ksmd", test_ksmd);
    qtest_add_func("ksm/host/deprecated", test_deprecated);
    qtest_add_func("ksm/host/states", test_host_states);
    qtest_add_func("ksm/host/no-sysfs", test_no_sysfs);
    qtest_add_func("ksm/host/process", test_process);
    qtest_add_func("ksm/host/user", test_user);
    qtest_add_func("ksm/host/numa", test_numa);
    qtest_add_func("ksm/hmp", test_hmp);
    qtest_add_func("ksm/sandbox", test_sandbox);
    if (qtest_has_accel("tcg")) {
        qtest_add_data_func("ksm/accel/tcg", "tcg", test_accel);
    }
    if (qtest_has_accel("kvm")) {
        qtest_add_data_func("ksm/accel/kvm", "kvm", test_accel);
    }
    return g_test_run();
}
