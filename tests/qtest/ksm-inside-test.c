/*
 * Tests of memory-backend-ksm that need code inside QEMU: a memory error, and
 * a look at the thread that reads the kernel's files
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/atomic.h"
#include "qobject/qdict.h"
#include "ksm-copies.h"
#include "ksm-inside.h"
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

/* A unique area, not merged. */
#define ALONE (ksm_ram_start() + 24 * MIB)

static KsmInside *inside_new(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    KsmInside *inside;

    g_assert_cmpint(ftruncate(fd, sizeof(*inside)), ==, 0);
    inside = mmap(NULL, sizeof(*inside), PROT_READ | PROT_WRITE, MAP_SHARED,
                  fd, 0);
    g_assert_true(inside != MAP_FAILED);
    close(fd);
    return inside;
}

/* Until LD_PRELOAD is unset. */
static void inside_load(void)
{
    g_autofree char *self = g_file_read_link("/proc/self/exe", NULL);
    g_autofree char *dir = g_path_get_dirname(self);
    g_autofree char *library = g_build_filename(dir, "libksm-inside.so", NULL);

    g_setenv("LD_PRELOAD", library, true);
}

static QTestState *inside_init(const char *path, const char *args)
{
    QTestState *qts;

    inside_load();
    g_setenv(KSM_INSIDE_ENV, path, true);
    qts = qtest_init(args);
    g_unsetenv("LD_PRELOAD");
    return qts;
}

/* QEMU is told of the error, and forgets it at a reset. */
static void memory_error(QTestState *qts, KsmInside *inside, uint64_t addr)
{
    g_autofree char *hmp = NULL;

    inside->error_at = ksm_host_address(qts, addr);
    hmp = qtest_hmp(qts, "info ksm");
    g_assert_cmpuint(inside->error_at, ==, 0);
    /* the main loop handles the signal before what follows it */
    for (int i = 0; i < 10; i++) {
        qtest_readb(qts, addr);
    }
}

static void assert_attributes(QTestState *qts, uintptr_t host)
{
    KsmVmas vmas = ksm_vmas_count(qts, host, 64 * MIB, "mg");

    g_assert_cmpuint(vmas.flagged, ==, 0);
    vmas = ksm_vmas_count(qts, host, 64 * MIB, "dd");
    g_assert_cmpuint(vmas.flagged, ==, vmas.all);
}

/*
 * A merged page, and one that is not, are given up after memory errors: they
 * are empty, as the engine knows, and not for the kernel's KSM.
 */
static void test_memory_error(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *alone = random_copy(2);
    g_autofree uint8_t *damaged = g_memdup2(data, COPY);
    g_autofree char *path = temporary();
    KsmInside *inside = inside_new(path);
    uintptr_t host;
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    if (!qtest_has_accel("kvm") || access("/dev/kvm", R_OK | W_OK) < 0) {
        g_test_skip("needs KVM: QEMU hears of memory errors from there");
        return;
    }
    qts = inside_init(path, "-accel kvm -no-shutdown " RAM ",dump=off");
    host = ksm_host_address(qts, ksm_ram_start());
    qtest_bufwrite(qts, ALONE, alone, COPY);
    copies_put(qts, data);
    ksm_qom_set(qts, "ram0", "run", "true");
    copies_wait(qts);
    memory_error(qts, inside, SECOND + 37 * PAGE);
    memory_error(qts, inside, ALONE + 5 * PAGE);
    qtest_qmp_assert_success(qts, "{'execute': 'system_reset'}");
    qtest_qmp_eventwait(qts, "RESET");
    memset(damaged + 37 * PAGE, 0, PAGE);
    memset(alone + 5 * PAGE, 0, PAGE);
    for (int i = 0; i < 2; i++) {
        assert_memory(qts, FIRST, data, COPY);
        assert_memory(qts, SECOND, damaged, COPY);
        assert_memory(qts, ALONE, alone, COPY);
        assert_attributes(qts, host);
        passes_wait(qts, "ram0", 2);
    }
    qtest_quit(qts);
    munmap(inside, sizeof(*inside));
    unlink(path);
}

/* Until somebody reads /proc/self/smaps, and goes no further. */
static void held_wait(KsmInside *inside)
{
    for (int i = 0; !qatomic_load_acquire(&inside->held); i++) {
        g_assert_cmpint(i, <, WAIT_S * 1000);
        g_usleep(1000);
    }
}

/*
 * QEMU goes on while query-ksm-stats reads /proc/self/smaps, however long that
 * takes: another thread reads it.  "info ksm" reads it in the main thread,
 * without the lock.
 */
static void test_smaps(void)
{
    g_autofree char *path = temporary();
    KsmInside *inside = inside_new(path);
    QTestState *qts;
    QDict *stats;
    char *hmp;

    if (!can_run()) {
        return;
    }
    qts = inside_init(path, RAM);
    qatomic_store_release(&inside->hold, 1);
    qtest_qmp_send(qts, "{'execute': 'query-ksm-stats'}");
    held_wait(inside);
    g_assert_cmpuint(qatomic_read(&inside->opened_by_main), ==, 0);
    /* needs the main loop and the lock */
    qtest_writeb(qts, FIRST, 7);
    g_assert_cmpint(qtest_readb(qts, FIRST), ==, 7);
    g_assert_cmpuint(qatomic_read(&inside->held), ==, 1);
    qatomic_store_release(&inside->hold, 0);
    stats = qtest_qmp_receive(qts);
    g_assert_true(qdict_haskey(stats, "return"));
    g_assert_true(qdict_haskey(ksm_stats_backend(
        qdict_get_qdict(stats, "return"), "ram0"), "resident"));
    qobject_unref(stats);
    g_assert_cmpuint(inside->opened_by_others, ==, 1);
    hmp = qtest_hmp(qts, "info ksm");
    g_assert_nonnull(strstr(hmp, "resident"));
    g_free(hmp);
    qtest_quit(qts);
    munmap(inside, sizeof(*inside));
    unlink(path);
}

/* Types a command into the human monitor at that socket. */
static void monitor_type(const char *socket_path, const char *command)
{
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    g_autoptr(GString) seen = g_string_new(NULL);
    const char *prompt;
    char byte;

    g_strlcpy(addr.sun_path, socket_path, sizeof(addr.sun_path));
    g_assert_cmpint(connect(fd, (void *)&addr, sizeof(addr)), ==, 0);
    g_assert_cmpint(write(fd, command, strlen(command)), ==, strlen(command));
    /* the first prompt is before the command, the second after it */
    do {
        g_assert_cmpint(read(fd, &byte, 1), ==, 1);
        g_string_append_c(seen, byte);
        prompt = strstr(seen->str, "(qemu) ");
    } while (!prompt || !strstr(prompt + 1, "\n(qemu) "));
    close(fd);
}

static void test_smaps_deleted(void)
{
    g_autofree char *path = temporary();
    g_autofree char *monitor = g_strconcat(path, ".monitor", NULL);
    g_autofree char *args = g_strdup_printf(
        RAM " -object " BACKEND ",id=r,size=8M -chardev socket,id=hmp,"
        "server=on,wait=off,path=%s -mon chardev=hmp,mode=readline", monitor);
    KsmInside *inside = inside_new(path);
    QTestState *qts;
    QDict *answer, *stats;

    if (!can_run()) {
        return;
    }
    qts = inside_init(path, args);
    qatomic_store_release(&inside->hold, 1);
    qtest_qmp_send(qts, "{'execute': 'query-ksm-stats'}");
    held_wait(inside);
    monitor_type(monitor, "object_del r\n");
    qatomic_store_release(&inside->hold, 0);
    answer = qtest_qmp_receive(qts);
    stats = qdict_get_qdict(answer, "return");
    g_assert_nonnull(ksm_stats_backend(stats, "ram0"));
    g_assert_null(ksm_stats_backend(stats, "r"));
    qobject_unref(answer);
    qtest_quit(qts);
    munmap(inside, sizeof(*inside));
    unlink(path);
    unlink(monitor);
}

static KsmRun *run_on_pages(const char *bytes, const char *args)
{
    KsmRun *run;

    inside_load();
    g_setenv(KSM_INSIDE_PAGE_ENV, bytes, true);
    run = ksm_run(args, NULL);
    g_unsetenv(KSM_INSIDE_PAGE_ENV);
    g_unsetenv("LD_PRELOAD");
    g_test_message("%s", run->err);
    return run;
}

/* Hosts that we do not have: what QEMU merges itself is refused. */
static void test_host_pages(const void *opaque)
{
    static const char *const scopes[] = {
        "scope=zero", "scope=vm", "scope=group,group=g",
    };
    const char *bytes = opaque;

    for (int i = 0; i < ARRAY_SIZE(scopes); i++) {
        g_autofree char *args = g_strdup_printf(
            "-object memory-backend-ksm,id=r,size=42M,%s", scopes[i]);
        g_autoptr(KsmRun) run = run_on_pages(bytes, args);

        g_assert_cmpint(run->status, ==, 1);
        g_assert_nonnull(strstr(run->err,
                                "needs a host with pages of 4096 bytes"));
    }
    /* left to the kernel */
    if (access("/sys/kernel/mm/ksm/run", F_OK) == 0) {
        g_autoptr(KsmRun) run = run_on_pages(
            bytes, "-object memory-backend-ksm,id=r,size=42M,scope=host");

        g_assert_nonnull(strstr(run->err, KSM_RUN_STARTED));
    }
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    qtest_add_func("ksm/inside/memory-error", test_memory_error);
    qtest_add_func("ksm/inside/smaps", test_smaps);
    qtest_add_func("ksm/inside/smaps-deleted", test_smaps_deleted);
    qtest_add_data_func("ksm/inside/host-pages/16k", "16384", test_host_pages);
    qtest_add_data_func("ksm/inside/host-pages/64k", "65536", test_host_pages);
    return g_test_run();
}
