/*
 * hostd tests: when ksmd is to run, how fast, what tells that, and the way back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The driver's parts without processes; those are in tests/e2e/test_hostd.py.
 */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <glib.h>
#include <glib/gstdio.h>

#include "base/prim.h"
#include "driver/drive.h"
#include "driver/knobs.h"
#include "driver/seen.h"
#include "fake-root.h"
#include "sys.h"

#define SECOND  UINT64_C(1000000000)
#define MIB     UINT64_C(1048576)

typedef struct Host {
    Drive drive;
    DriveSeen seen;
    Want want;
} Host;

static bool tick(Host *h, uint64_t ns)
{
    h->seen.now_ns += ns;
    h->want = drive_next(&h->drive, &h->seen);
    return h->want.run;
}

static void host_init(Host *h)
{
    memset(h, 0, sizeof(*h));
    drive_init(&h->drive, 20);
    h->seen.now_ns = SECOND;
    h->seen.scans = 100;
}

static void give(Host *h, uint64_t mib)
{
    h->seen.left += mib * MIB;
    h->seen.given++;
}

static void test_starts(void)
{
    Host h;

    host_init(&h);
    g_assert(!tick(&h, SECOND));
    h.seen.given++;             /* and it was taken away again */
    g_assert(!tick(&h, SECOND));
    give(&h, 4);
    g_assert(tick(&h, SECOND));
    g_assert(h.want.sleep_ms == 20 && h.want.pages == 500);
}

/* The scan under way, one of checksums, and two that bring nothing. */
static void test_stops(void)
{
    Host h;

    host_init(&h);
    give(&h, 4);
    for (unsigned i = 0; i < 4; i++) {
        g_assert(tick(&h, SECOND));
        h.seen.scans++;
    }
    g_assert(!tick(&h, SECOND));
    g_assert(!tick(&h, SECOND));
    give(&h, 2);
    g_assert(tick(&h, 4 * SECOND));
}

static void test_gains(void)
{
    Host h;

    host_init(&h);
    give(&h, 4);
    for (unsigned i = 0; i < 20; i++) {
        g_assert(tick(&h, SECOND));
        h.seen.scans += 2;
        h.seen.saved++;
    }
    g_assert(tick(&h, SECOND));
    h.seen.scans += 4;
    g_assert(!tick(&h, SECOND));
}

/* Of what was gained at once the checksums are not taken again. */
static void test_gains_once(void)
{
    Host h;

    host_init(&h);
    give(&h, 4);
    g_assert(tick(&h, SECOND));
    h.seen.scans += 2;
    h.seen.saved++;
    g_assert(tick(&h, SECOND));
    h.seen.scans += 2;
    g_assert(tick(&h, SECOND));
    h.seen.scans += 1;
    g_assert(!tick(&h, SECOND));
}

/* Merged, written and merged again: no gain. */
static void test_churn(void)
{
    Host h;
    unsigned s = 0;

    host_init(&h);
    h.seen.saved = 1000;
    give(&h, 4);
    while (tick(&h, SECOND)) {
        h.seen.saved = s % 2 ? 1100 : 900;
        h.seen.scans++;
        g_assert(++s < 8);
    }
    g_assert(!tick(&h, SECOND));
}

/* What comes while it runs is new, too: it has a run of its own, as long. */
static void test_more_comes(void)
{
    Host h;

    host_init(&h);
    give(&h, 4);
    g_assert(tick(&h, SECOND));
    h.seen.scans += 3;
    give(&h, 4);
    g_assert(tick(&h, SECOND));
    h.seen.scans += 1;
    g_assert(!tick(&h, SECOND));
    g_assert(tick(&h, 4 * SECOND));
    h.seen.scans += 3;
    g_assert(tick(&h, SECOND));
    h.seen.scans += 1;
    g_assert(!tick(&h, 4 * SECOND));
    g_assert(!tick(&h, 4 * SECOND));
}

/* A member that always has something new does not keep it running. */
static void test_always_new(void)
{
    Host h;
    unsigned runs = 0;

    host_init(&h);
    for (unsigned s = 0; s < 7200; s++) {
        give(&h, 0);
        h.seen.left = 4 * MIB;
        runs += tick(&h, SECOND);
        h.seen.scans++;
    }
    g_assert(runs > 7200 / 125 * 4);
    g_assert(runs < 7200 / 20);
}

static void test_nothing_left(void)
{
    Host h;

    host_init(&h);
    give(&h, 4);
    g_assert(tick(&h, SECOND));
    h.seen.left = 0;
    g_assert(!tick(&h, SECOND));
    g_assert(!tick(&h, 10000 * SECOND));
}

static unsigned until_run(Host *h)
{
    unsigned s = 0;

    while (!tick(h, SECOND)) {
        g_assert(++s < 100000);
    }
    h->seen.scans += 10;
    g_assert(!tick(h, SECOND));
    return s;
}

/* Vain, it is tried again, each time later; what is new sooner. */
static void test_retries(void)
{
    Host h;
    unsigned before, after;

    host_init(&h);
    give(&h, 4);
    until_run(&h);
    before = until_run(&h);
    g_assert(before >= 110 && before <= 130);
    after = until_run(&h);
    g_assert(after >= 2 * before - 10);
    for (unsigned i = 0; i < 10; i++) {
        after = until_run(&h);
    }
    g_assert(after <= 3600);
    give(&h, 1);
    g_assert(until_run(&h) <= 120);
    /* a gain ends that */
    g_assert(until_run(&h) > 3500);
    give(&h, 1);
    for (unsigned s = 0; !tick(&h, SECOND); s++) {
        g_assert(s <= 120);
    }
    h.seen.saved++;
    g_assert(tick(&h, SECOND));
    h.seen.scans += 10;
    g_assert(!tick(&h, SECOND));
    g_assert(until_run(&h) <= 130);
}

/* What is vain as a rule waits until nobody gives more, but not for ever. */
static void test_still(void)
{
    Host h;
    unsigned s;

    host_init(&h);
    give(&h, 4);
    for (unsigned i = 0; i < 8; i++) {
        until_run(&h);
    }
    for (s = 0; s < 200; s++) {
        g_assert(!tick(&h, SECOND));
    }
    give(&h, 4);
    for (s = 0; s < 20; s++) {
        g_assert(!tick(&h, SECOND));
    }
    give(&h, 4);
    for (s = 0; !tick(&h, SECOND); s++) {
        g_assert(s < 31);
    }
    g_assert(s >= 29);
    h.seen.scans += 10;
    g_assert(!tick(&h, SECOND));
    for (s = 0; s < 200; s++) {
        g_assert(!tick(&h, SECOND));
    }
    for (s = 0; !tick(&h, SECOND); s++) {
        g_assert(s < 61);
        give(&h, 1);
    }
    g_assert(s >= 59);
    /* it is not new any more */
    h.seen.scans += 10;
    g_assert(!tick(&h, SECOND));
    for (s = 0; s < 300; s++) {
        g_assert(!tick(&h, SECOND));
    }
}

/* Seconds of CPU in one second. */
static double ksmd_scans(Host *h, double us_each)
{
    double batch = h->want.pages * us_each / 1e6, cpu;

    /* whoever stops it waits for a batch: no longer than that */
    g_assert(batch < 0.1);
    cpu = batch / (batch + h->want.sleep_ms / 1e3);
    h->seen.cpu_ns += cpu * SECOND;
    return cpu;
}

/* A core's share, as pages cost: 2 us each, then 22. */
static void test_speed(void)
{
    Host h;
    double spent = 0;

    host_init(&h);
    give(&h, 4096);
    for (unsigned i = 0; i < 60; i++) {
        double cpu;

        g_assert(tick(&h, SECOND));
        cpu = ksmd_scans(&h, i < 30 ? 2 : 22);
        spent += i % 30 >= 20 ? cpu / 20 : 0;
    }
    g_assert(spent > 0.17 && spent < 0.23);
}

/* All of a core, or nearly, and batches are no longer for that. */
static void test_pressed(void)
{
    Host h;
    double cpu = 0;

    host_init(&h);
    give(&h, 4096);
    h.seen.pressed = true;
    for (unsigned i = 0; i < 60; i++) {
        g_assert(tick(&h, SECOND));
        cpu = ksmd_scans(&h, i < 30 ? 2 : 22);
        g_assert(i < 20 || cpu > 0.85);
    }
}

/* Nobody tells what it costs: no faster than at first. */
static void test_cost_unknown(void)
{
    Host h;

    host_init(&h);
    give(&h, 4096);
    for (unsigned i = 0; i < 60; i++) {
        h.seen.pressed = i >= 30;
        g_assert(tick(&h, SECOND));
        g_assert(h.want.pages == 500 && h.want.sleep_ms == 20);
    }
}

/* A batch is no more than all that there is. */
static void test_short_list(void)
{
    Host h;

    host_init(&h);
    give(&h, 2);
    for (unsigned i = 0; i < 10; i++) {
        g_assert(tick(&h, SECOND));
        g_assert(h.want.pages <= 512);
    }
    h.seen.left = 8192;
    g_assert(tick(&h, SECOND));
    g_assert(h.want.pages == 64);
}

/* What ksmd costs; 0: it is not to be seen, as where proc hides it. */
static void test_cost_seen(FakeRoot *root, gconstpointer data)
{
    Seer s;

    fake_write(root, "sys/kernel/mm/ksm/full_scans", "7\n");
    fake_write(root, "sys/kernel/mm/ksm/pages_sharing", "30\n");
    seer_init(&s, root->dir, "/nonexistent");
    g_assert(seer_look(&s) == 0);
    g_assert(s.seen.scans == 7 && s.seen.saved == 30 && s.seen.cpu_ns == 0);
    seer_free(&s);
    fake_write(root, "proc/40/comm", "ksmd\n");
    fake_write(root, "proc/40/cmdline", "");
    fake_write(root, "proc/40/schedstat", "0 0 0\n");
    fake_write(root, "proc/40/stat", "40 (ksmd) S 2 0 0 0 -1 2129984 0 0 0 0 "
               "3 32 0 0 25 5 1 0 57 0 0 18446744073709551615\n");
    seer_init(&s, root->dir, "/nonexistent");
    g_assert(seer_look(&s) == 0);
    g_assert(s.seen.cpu_ns == SECOND * 35 / sysconf(_SC_CLK_TCK));
    seer_free(&s);
}

/* Knobs that are files. */
typedef struct Files {
    char *dir;
    Record record;
} Files;

static void knob_put(const Files *f, const char *name, const char *text)
{
    g_autofree char *path = g_build_filename(f->dir, name, NULL);

    g_assert(g_file_set_contents(path, text, -1, NULL));
}

static unsigned knob_get(const Files *f, Knob knob)
{
    Knobs k;

    g_assert(knobs_read(f->dir, &k) == 0);
    return k.value[knob];
}

static void files_init(Files *f)
{
    g_autofree char *record = NULL;

    f->dir = g_dir_make_tmp("ksm-drive-XXXXXX", NULL);
    g_assert(f->dir);
    knob_put(f, "run", "0\n");
    knob_put(f, "sleep_millisecs", "200\n");
    knob_put(f, "pages_to_scan", "100\n");
    record = g_build_filename(f->dir, "record", NULL);
    record_init(&f->record, f->dir, record);
}

static void files_free(Files *f)
{
    static const char *const all[] = {
        "run", "sleep_millisecs", "pages_to_scan", "advisor_mode", "record",
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(all); i++) {
        g_autofree char *path = g_build_filename(f->dir, all[i], NULL);

        g_unlink(path);
    }
    g_assert(g_rmdir(f->dir) == 0);
    g_free(f->dir);
}

/* Did a driver that died leave one? */
static bool is_found(Record *r)
{
    g_assert(record_find(r) == 0);
    return r->held;
}

static const Knobs fast = { { 20, 500, 1 } };
static const Knobs faster = { { 20, 1000, 1 } };

static void assert_found(const Files *f)
{
    g_assert(knob_get(f, KNOB_RUN) == 0);
    g_assert(knob_get(f, KNOB_SLEEP) == 200);
    g_assert(knob_get(f, KNOB_PAGES) == 100);
}

static void test_restore(void)
{
    Files f;
    Knob which;

    files_init(&f);
    g_assert(record_begin(&f.record) == 0);
    g_assert(record_write(&f.record, &fast) == 0);
    g_assert(knob_get(&f, KNOB_RUN) == 1 && knob_get(&f, KNOB_PAGES) == 500);
    g_assert(record_write(&f.record, &faster) == 0);
    g_assert(record_holds(&f.record, &which));
    g_assert(record_restore(&f.record) == 0);
    assert_found(&f);
    g_assert(!f.record.held && !is_found(&f.record));
    files_free(&f);
}

static bool no_read;

static int open_some(const char *path)
{
    return no_read ? -ENFILE : prim_real.open_read(path);
}

/* Whoever comes after a driver that died, at each write that it made. */
static int writes_left;

static int write_some(const char *path, const char *text)
{
    return writes_left-- > 0 ? sys_real.write_text(path, text) : -EIO;
}

/* What fails is not forgotten, neither here nor by whoever comes after. */
static void test_restore_fails(void)
{
    sys.write_text = write_some;
    prim.open_read = open_some;
    for (int n = -1; n < 3; n++) {
        Record next;
        Files f;

        files_init(&f);
        writes_left = 100;
        g_assert(record_begin(&f.record) == 0);
        g_assert(record_write(&f.record, &fast) == 0);
        no_read = n < 0;
        writes_left = n;
        g_assert(record_restore(&f.record) < 0);
        no_read = false;
        g_assert(f.record.held);
        record_init(&next, f.dir, f.record.file);
        no_read = true;
        g_assert(record_find(&next) == -ENFILE && !next.held);
        no_read = false;
        g_assert(is_found(&next));
        writes_left = 100;
        g_assert(record_restore(&f.record) == 0);
        assert_found(&f);
        g_assert(!f.record.held && !is_found(&next));
        files_free(&f);
    }
    sys.write_text = sys_real.write_text;
    prim.open_read = prim_real.open_read;
}

static void test_busy(void)
{
    Files f;

    files_init(&f);
    knob_put(&f, "run", "1\n");
    g_assert(record_begin(&f.record) == -EBUSY);
    record_restore(&f.record);
    g_assert(knob_get(&f, KNOB_RUN) == 1);
    knob_put(&f, "run", "2\n");
    g_assert(record_begin(&f.record) == -EBUSY);
    files_free(&f);
}

/* Who sets one while ksmd runs has it run, as it is; also after a death. */
static void test_changed(void)
{
    Files f;
    Knob which;

    files_init(&f);
    for (unsigned died = 0; died < 2; died++) {
        g_assert(record_begin(&f.record) == 0);
        g_assert(record_write(&f.record, &fast) == 0);
        knob_put(&f, "pages_to_scan", "4000\n");
        g_assert(!record_holds(&f.record, &which) && which == KNOB_PAGES);
        g_assert(!died || is_found(&f.record));
        g_assert(record_restore(&f.record) == 0 && !f.record.held);
        g_assert(knob_get(&f, KNOB_RUN) == 1);
        g_assert(knob_get(&f, KNOB_SLEEP) == 20);
        g_assert(knob_get(&f, KNOB_PAGES) == 4000);
        knob_put(&f, "run", "0\n");
        knob_put(&f, "pages_to_scan", "100\n");
    }
    files_free(&f);
}

/* Who stops it finds the rest as it was, but for what he has set. */
static void test_stopped(gconstpointer run)
{
    Files f;

    files_init(&f);
    g_assert(record_begin(&f.record) == 0);
    g_assert(record_write(&f.record, &fast) == 0);
    knob_put(&f, "pages_to_scan", "4000\n");
    knob_put(&f, "run", run);
    g_assert(record_restore(&f.record) == 0);
    g_assert(knob_get(&f, KNOB_RUN) == g_ascii_strtoull(run, NULL, 10));
    g_assert(knob_get(&f, KNOB_SLEEP) == 200);
    g_assert(knob_get(&f, KNOB_PAGES) == 4000);
    files_free(&f);
}

/* While memory of the host goes offline the kernel adds 4. */
static void test_offlining(void)
{
    Files f;
    Knob which;

    files_init(&f);
    knob_put(&f, "run", "4\n");
    g_assert(record_begin(&f.record) == -EAGAIN && !f.record.held);
    knob_put(&f, "run", "0\n");
    g_assert(record_begin(&f.record) == 0);
    g_assert(record_write(&f.record, &fast) == 0);
    knob_put(&f, "run", "5\n");
    g_assert(record_holds(&f.record, &which));
    g_assert(record_restore(&f.record) == 0);
    assert_found(&f);
    files_free(&f);
}

/* What the next driver could not be told of is not written. */
static void test_unsaved(void)
{
    Files f;
    char file[sizeof(f.record.file)];

    files_init(&f);
    g_strlcpy(file, f.record.file, sizeof(file));
    g_snprintf(f.record.file, sizeof(f.record.file), "%s/none/record", f.dir);
    g_assert(record_begin(&f.record) < 0);
    g_assert(f.record.unsaved && !f.record.held);
    assert_found(&f);
    g_strlcpy(f.record.file, file, sizeof(file));
    g_assert(record_begin(&f.record) == 0);
    g_assert(record_write(&f.record, &fast) == 0);
    g_snprintf(f.record.file, sizeof(f.record.file), "%s/none/record", f.dir);
    g_assert(record_write(&f.record, &faster) < 0);
    g_assert(f.record.unsaved && knob_get(&f, KNOB_PAGES) == 500);
    g_strlcpy(f.record.file, file, sizeof(file));
    g_assert(is_found(&f.record));
    g_assert(record_restore(&f.record) == 0);
    assert_found(&f);
    files_free(&f);
}

/* The kernel's advisor refuses that its knob is written. */
static void test_advised(void)
{
    Files f;

    files_init(&f);
    g_assert(record_begin(&f.record) == 0);
    g_assert(record_write(&f.record, &fast) == 0);
    knob_put(&f, "advisor_mode", "none [scan-time]\n");
    knob_put(&f, "run", "0\n");
    g_assert(record_restore(&f.record) == 0);
    g_assert(knob_get(&f, KNOB_SLEEP) == 200);
    g_assert(knob_get(&f, KNOB_PAGES) == 500);
    files_free(&f);
}

/* After a reboot ksmd is as somebody has set it since. */
static void test_rebooted(void)
{
    Files f;

    files_init(&f);
    g_assert(record_begin(&f.record) == 0);
    g_assert(record_write(&f.record, &fast) == 0);
    g_strlcpy(f.record.boot, "another", sizeof(f.record.boot));
    g_assert(!is_found(&f.record));
    g_assert(record_restore(&f.record) == 0);
    g_assert(knob_get(&f, KNOB_RUN) == 1);
    g_assert(!g_file_test(f.record.file, G_FILE_TEST_EXISTS));
    files_free(&f);
}

static void test_died(void)
{
    sys.write_text = write_some;
    for (int n = 0; n <= 4; n++) {
        Record next = { .held = false };
        Files f;

        files_init(&f);
        g_assert(record_begin(&f.record) == 0);
        writes_left = n;
        /* the last ones fail: it is as if it died before them */
        record_write(&f.record, &fast);
        record_write(&f.record, &faster);
        writes_left = 100;
        next = f.record;
        next.held = false;
        memset(&next.found, 0, sizeof(next.found));
        g_assert(is_found(&next));
        record_restore(&next);
        assert_found(&f);
        files_free(&f);
    }
    sys.write_text = sys_real.write_text;
}

static void test_garbled(void)
{
    Files f;

    files_init(&f);
    g_assert(g_file_set_contents(f.record.file, "1 2 3\n4", -1, NULL));
    g_assert(!is_found(&f.record));
    record_restore(&f.record);
    assert_found(&f);
    files_free(&f);
}

static void test_advisor(void)
{
    g_autofree char *advisor = NULL;
    Files f;

    files_init(&f);
    g_assert(!knobs_advisor(f.dir));
    knob_put(&f, "advisor_mode", "[none] scan-time\n");
    g_assert(!knobs_advisor(f.dir));
    knob_put(&f, "advisor_mode", "none [scan-time]\n");
    advisor = knobs_advisor(f.dir);
    g_assert(strcmp(advisor, "scan-time") == 0);
    files_free(&f);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/drive/starts", test_starts);
    g_test_add_func("/drive/stops", test_stops);
    g_test_add_func("/drive/gains", test_gains);
    g_test_add_func("/drive/gains-once", test_gains_once);
    g_test_add_func("/drive/churn", test_churn);
    g_test_add_func("/drive/more-comes", test_more_comes);
    g_test_add_func("/drive/always-new", test_always_new);
    g_test_add_func("/drive/nothing-left", test_nothing_left);
    g_test_add_func("/drive/retries", test_retries);
    g_test_add_func("/drive/still", test_still);
    g_test_add_func("/drive/speed", test_speed);
    g_test_add_func("/drive/pressed", test_pressed);
    g_test_add_func("/drive/cost-unknown", test_cost_unknown);
    g_test_add_func("/drive/short-list", test_short_list);
    g_test_add("/drive/cost-seen", FakeRoot, NULL, fake_make, test_cost_seen,
               fake_remove);
    g_test_add_func("/knobs/restore", test_restore);
    g_test_add_func("/knobs/restore-fails", test_restore_fails);
    g_test_add_func("/knobs/busy", test_busy);
    g_test_add_func("/knobs/changed", test_changed);
    g_test_add_data_func("/knobs/stopped", "0\n", test_stopped);
    g_test_add_data_func("/knobs/stopped/unmerged", "2\n", test_stopped);
    g_test_add_func("/knobs/offlining", test_offlining);
    g_test_add_func("/knobs/unsaved", test_unsaved);
    g_test_add_func("/knobs/advised", test_advised);
    g_test_add_func("/knobs/rebooted", test_rebooted);
    g_test_add_func("/knobs/died", test_died);
    g_test_add_func("/knobs/garbled", test_garbled);
    g_test_add_func("/knobs/advisor", test_advisor);
    return g_test_run();
}
