/*
 * A guest that counts on every page of its memory while it is merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A boot sector (ksm-payload.S) runs on each CPU and finds itself whether a
 * write was lost.  The test looks on until pages have been merged and written
 * again, with the engine at full speed, and then checks all memory itself.
 */

#include "qemu/osdep.h"
#include "qemu/bswap.h"
#include "qobject/qdict.h"
#include "ksm-helpers.h"
#include "ksm-payload.h"

#define PAGE 4096u
#define PATIENCE_S 240

/* Cycles of the pause after 64 pages: time for them to be merged. */
#define PAUSE 50000000

typedef struct Payload {
    const char *name;
    const char *accel;
    const char *args;
    unsigned cpus;
    const char *props;      /* of the backend */
    const char *rate_mode;  /* of calc-dirty-rate */
    bool limit;             /* there is a dirty limit */
} Payload;

#define LOG ",dirty-tracking=log"

static const Payload payloads[] = {
    { "tcg", "tcg", "-accel tcg,thread=multi -smp 4", 4, "" },
    { "kvm", "kvm", "-accel kvm -smp 2", 2, "" },
    { "tcg-threads", "tcg", "-accel tcg,thread=multi -smp 4", 4, ",threads=2" },
    { "kvm-threads", "kvm", "-accel kvm -smp 2", 2, ",threads=2" },
};

/* The same with QEMU's dirty log, and others that use it too. */
static const Payload logged[] = {
    { "tcg", "tcg", "-accel tcg,thread=multi -smp 4", 4, LOG, "dirty-bitmap" },
    { "kvm", "kvm", "-accel kvm -smp 2", 2, LOG, "dirty-bitmap" },
    { "kvm-ring", "kvm", "-accel kvm,dirty-ring-size=1024 -smp 2", 2, LOG,
      "dirty-ring", true },
};

/* The sector on a disk of its own. */
static char *disk_new(void)
{
    uint8_t sector[PAYLOAD_SECTOR] = { };
    char *path = NULL;
    int fd = g_file_open_tmp("ksm-payload-XXXXXX", &path, NULL);

    QEMU_BUILD_BUG_ON(sizeof(payload_code) > PAYLOAD_DELAY);
    memcpy(sector, payload_code, sizeof(payload_code));
    stl_le_p(sector + PAYLOAD_DELAY, PAUSE);
    sector[510] = 0x55;
    sector[511] = 0xaa;
    g_assert_cmpint(write(fd, sector, sizeof(sector)), ==, sizeof(sector));
    close(fd);
    return path;
}

/* One of eight contents; the counter is in the first four bytes. */
static void page_fill(uint8_t *page, unsigned number)
{
    memset(page, 'a' + number % 8, PAGE);
    stl_le_p(page, 0);
}

static void memory_fill(QTestState *qts, unsigned pages)
{
    uint8_t page[PAGE];

    for (unsigned i = 0; i < pages; i++) {
        page_fill(page, i);
        qtest_bufwrite(qts, PAYLOAD_BASE + i * PAGE, page, PAGE);
    }
}

static PayloadState state_get(QTestState *qts, unsigned cpu)
{
    PayloadState state;

    qtest_memread(qts, PAYLOAD_STATE + cpu * sizeof(state), &state,
                  sizeof(state));
    state.pass = le32_to_cpu(state.pass);
    state.pos = le32_to_cpu(state.pos);
    state.failed = le32_to_cpu(state.failed);
    g_test_message("cpu %u: pass %u, page %u", cpu, state.pass, state.pos);
    if (state.failed) {
        g_test_message("cpu %u: page 0x%x has %u in pass %u: a write was lost",
                       cpu, le32_to_cpu(state.offset),
                       le32_to_cpu(state.found), state.pass);
        g_assert_not_reached();
    }
    return state;
}

static int64_t stat_get(QTestState *qts, const char *name)
{
    QDict *stats = ksm_stats(qts);
    int64_t value = qdict_get_try_int(ksm_stats_backend(stats, "ram0"), name,
                                      0);

    qobject_unref(stats);
    return value;
}

/* Until the boot sector runs: firmware uses memory as it likes. */
static void wait_ready(QTestState *qts)
{
    for (int i = 0; i < PATIENCE_S * 20; i++) {
        if (qtest_readl(qts, PAYLOAD_READY) == 1) {
            return;
        }
        g_usleep(50 * 1000);
    }
    g_assert_not_reached();
}

/*
 * Until memory is merged that the CPUs leave alone: they wait for PAYLOAD_GO,
 * or are stopped.  While they count on an idle machine, they may write pages
 * too often.
 */
static void wait_merged(QTestState *qts)
{
    for (int i = 0; i < PATIENCE_S * 5; i++) {
        if (stat_get(qts, "pages-merged") > 0) {
            return;
        }
        g_usleep(200 * 1000);
    }
    g_error("nothing is merged: %s", qtest_hmp(qts, "info ksm"));
}

/* Until all CPUs are in pass @pass, and @broken merged pages were written. */
static void wait_passes(QTestState *qts, unsigned cpus, uint32_t pass,
                        int64_t broken)
{
    for (int i = 0; i < PATIENCE_S * 5; i++) {
        bool done = stat_get(qts, "cow-broken") >= broken;

        for (unsigned cpu = 0; cpu < cpus; cpu++) {
            done &= state_get(qts, cpu).pass >= pass;
        }
        if (done) {
            return;
        }
        g_usleep(200 * 1000);
    }
    g_test_message("merged %" PRId64 ", written since %" PRId64,
                   stat_get(qts, "pages-merged"), stat_get(qts, "cow-broken"));
    g_assert_not_reached();
}

/*
 * The guest is stopped: pages already done in a CPU's pass are one ahead.
 * Between counting and saying so it may be either.
 */
static void memory_check(QTestState *qts, unsigned cpu)
{
    PayloadState state = state_get(qts, cpu);
    g_autofree uint8_t *expected = g_malloc(PAGE);
    g_autofree uint8_t *page = g_malloc(PAGE);

    for (uint32_t pos = 0; pos < PAYLOAD_PAGES; pos++) {
        uint32_t number = (pos * 1619) % PAYLOAD_PAGES;
        uint64_t addr = PAYLOAD_BASE +
                        (uint64_t)(cpu * PAYLOAD_PAGES + number) * PAGE;
        uint32_t count;

        qtest_bufread(qts, addr, page, PAGE);
        count = ldl_le_p(page);
        if (pos == state.pos) {
            g_assert_true(count == state.pass || count == state.pass + 1);
        } else if (state.pos < PAYLOAD_PAGES) {
            g_assert_cmpuint(count, ==, state.pass + (pos < state.pos));
        } else {
            /* all done, the new pass not yet said: either */
            g_assert_true(count == state.pass || count == state.pass + 1);
        }
        page_fill(expected, cpu * PAYLOAD_PAGES + number);
        g_assert_cmpmem(page + 4, PAGE - 4, expected + 4, PAGE - 4);
    }
}

static QTestState *payload_init(const Payload *payload, const char *disk,
                                const char *args)
{
    return qtest_initf("%s -machine pc,memory-backend=ram0 -m 64M %s "
                       "-object memory-backend-ksm,id=ram0,size=64M,scope=vm,"
                       "max-cpu=100%s -nodefaults -drive file.driver=file,"
                       "file.filename=%s,file.locking=off,format=raw,if=ide",
                       payload->args, args, payload->props, disk);
}

/* The CPUs count, and memory they have not come to is merged. */
static QTestState *payload_start(const Payload *payload, const char *disk)
{
    QTestState *qts = payload_init(payload, disk, "-S");

    qtest_writel(qts, PAYLOAD_GO, 0);
    qtest_writel(qts, PAYLOAD_READY, 0);
    qtest_qmp_assert_success(qts, "{'execute': 'cont'}");
    wait_ready(qts);
    memory_fill(qts, payload->cpus * PAYLOAD_PAGES);
    wait_merged(qts);
    qtest_writel(qts, PAYLOAD_GO, 1);
    return qts;
}

static void payload_check(const Payload *payload, QTestState *qts)
{
    qtest_qmp_assert_success(qts, "{'execute': 'stop'}");
    for (unsigned cpu = 0; cpu < payload->cpus; cpu++) {
        memory_check(qts, cpu);
    }
}

static void test_payload(const void *opaque)
{
    const Payload *payload = opaque;
    g_autofree char *disk = disk_new();
    QTestState *qts = payload_start(payload, disk);

    wait_passes(qts, payload->cpus, 2, 1);
    payload_check(payload, qts);
    /* on it goes, partly merged while the CPUs stood still */
    wait_merged(qts);
    qtest_qmp_assert_success(qts, "{'execute': 'cont'}");
    wait_passes(qts, payload->cpus, 3, 1);
    payload_check(payload, qts);
    qtest_quit(qts);
    unlink(disk);
}


/* --- QEMU's dirty log --- */
/* Until the command's answer has that status. */
static void status_wait(QTestState *qts, const char *command,
                        const char *status)
{
    for (int i = 0; i < PATIENCE_S * 20; i++) {
        QDict *info = qtest_qmp_assert_success_ref(qts, "{'execute': %s}",
                                                   command);
        const char *now = qdict_get_try_str(info, "status");
        bool done = now && g_str_equal(now, status);

        g_assert_true(!now || strcmp(now, "failed"));
        qobject_unref(info);
        if (done) {
            return;
        }
        g_usleep(50 * 1000);
    }
    g_error("%s never says %s", command, status);
}

static QTestState *payload_migrate(const Payload *payload, QTestState *from,
                                   const char *disk)
{
    QTestState *to = payload_init(payload, disk, "-incoming defer");
    g_autofree char *dir = g_dir_make_tmp("ksm-payload-XXXXXX", NULL);
    g_autofree char *path = g_strdup_printf("%s/socket", dir);
    g_autofree char *uri = g_strdup_printf("unix:%s", path);

    qtest_qmp_assert_success(to, "{'execute': 'migrate-incoming', "
                             "'arguments': {'uri': %s}}", uri);
    qtest_qmp_assert_success(from, "{'execute': 'migrate-set-parameters', "
                             "'arguments': {'max-bandwidth': 1000000000, "
                             "'downtime-limit': 2000}}");
    qtest_qmp_assert_success(from, "{'execute': 'migrate', 'arguments': "
                             "{'uri': %s}}", uri);
    status_wait(from, "query-migrate", "completed");
    qtest_qmp_eventwait(to, "RESUME");
    unlink(path);
    rmdir(dir);
    return to;
}

/*
 * Writes to merged pages are noticed; other users of the log, above all a
 * migration, and we lose nothing to each other.
 */
static void test_log(const void *opaque)
{
    const Payload *payload = opaque;
    g_autofree char *disk = NULL;
    QTestState *to, *from;

    if (payload->limit && !access("/sys/module/kvm_pvm", F_OK)) {
        g_test_skip("the dirty ring of this KVM (PVM) does not work: whoever "
                    "logs, a vCPU gets KVM_EXIT_DIRTY_RING_FULL for ever");
        return;
    }
    disk = disk_new();
    from = payload_start(payload, disk);
    wait_passes(from, payload->cpus, 1, 1);
    qtest_qmp_assert_success(from, "{'execute': 'calc-dirty-rate', "
                             "'arguments': {'calc-time': 1, 'mode': %s}}",
                             payload->rate_mode);
    status_wait(from, "query-dirty-rate", "measured");
    if (payload->limit) {
        qtest_qmp_assert_success(from, "{'execute': 'set-vcpu-dirty-limit', "
                                 "'arguments': {'dirty-rate': 1000}}");
        wait_passes(from, payload->cpus, 2, 1);
        qtest_qmp_assert_success(from,
                                 "{'execute': 'cancel-vcpu-dirty-limit'}");
    }
    to = payload_migrate(payload, from, disk);
    qtest_quit(from);
    wait_passes(to, payload->cpus, 4, 0);
    payload_check(payload, to);
    qtest_quit(to);
    unlink(disk);
}

/* Does KVM run a guest here at all? Some hosts have a /dev/kvm that cannot. */
static bool kvm_works(void)
{
    g_autoptr(KsmRun) run = ksm_run("-accel kvm -machine pc", NULL);

    return strstr(run->err, KSM_RUN_STARTED) != NULL;
}

static void test_none(void)
{
    g_test_skip("scope=vm cannot be used here; ksm-merge-test says why");
}

static void add(const Payload *payload, const char *group,
                void (*test)(const void *), bool kvm)
{
    g_autofree char *path = g_strdup_printf("%s/%s", group, payload->name);

    if (g_str_equal(payload->accel, "kvm") ? kvm : qtest_has_accel("tcg")) {
        qtest_add_data_func(path, payload, test);
    }
}

int main(int argc, char **argv)
{
    g_autoptr(KsmRun) run = NULL;
    bool kvm;

    g_test_init(&argc, &argv, NULL);
    run = ksm_run("-object memory-backend-ksm,id=r,size=64M,scope=vm", NULL);
    if (!strstr(run->err, KSM_RUN_STARTED)) {
        qtest_add_func("ksm/payload/none", test_none);
        return g_test_run();
    }
    kvm = qtest_has_accel("kvm") && kvm_works();
    for (int i = 0; i < ARRAY_SIZE(payloads); i++) {
        add(&payloads[i], "ksm/payload", test_payload, kvm);
    }
    for (int i = 0; i < ARRAY_SIZE(logged); i++) {
        add(&logged[i], "ksm/payload/log", test_log, kvm);
    }
    return g_test_run();
}
