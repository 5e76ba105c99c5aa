/*
 * Tests of memory-backend-ksm with scope=vm beside other users of guest RAM
 * in QEMU
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * More of that is in ksm-vm-test, ksm-merge-test and ksm-dma-test.
 */

#include "qemu/osdep.h"
#include "qemu/bswap.h"
#include "qobject/qdict.h"
#include "qobject/qlist.h"
#include "ksm-copies.h"
#include "standard-headers/linux/virtio_mem.h"
#include <sys/socket.h>
#include <sys/un.h>

#define TRY_US 50000
#define TRIES (WAIT_S * G_USEC_PER_SEC / TRY_US)

/* --- virtio-mem --- */

#define VMEM_ADDR (4096ull * MIB)
#define VMEM_BLOCK (2 * MIB)

static void vmem_request(Device *d, QTestState *qts, uint16_t type,
                         uint16_t blocks)
{
    struct virtio_mem_req request = {
        .type = cpu_to_le16(type),
        .u.plug.addr = cpu_to_le64(VMEM_ADDR),
        .u.plug.nb_blocks = cpu_to_le16(blocks),
    };
    struct virtio_mem_resp response = { };
    uint64_t addr = guest_alloc(&d->alloc, PAGE);
    uint32_t head;

    qtest_bufwrite(qts, addr, &request, sizeof(request));
    head = qvirtqueue_add(qts, d->queue, addr, sizeof(request), false, true);
    qvirtqueue_add(qts, d->queue, addr + PAGE / 2, sizeof(response), true,
                   false);
    qvirtqueue_kick(qts, d->dev, d->queue, head);
    device_wait(d, qts, head);
    qtest_bufread(qts, addr + PAGE / 2, &response, sizeof(response));
    g_assert_cmpint(le16_to_cpu(response.type), ==, VIRTIO_MEM_RESP_ACK);
}

/*
 * Merged memory is unplugged, does not stay merged, and is zeroes when plugged
 * in again.
 */
static void test_virtio_mem(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *other = random_copy(2);
    g_autofree uint8_t *zeroes = g_malloc0(COPY);
    QTestState *qts;
    Device d;

    if (!can_run()) {
        return;
    }
    qts = qtest_init("-machine pc,memory-backend=ram0 -m 64M,maxmem=8G "
                     "-nodefaults -object " BACKEND ",id=ram0,size=64M "
                     "-object " BACKEND ",id=mem1,size=64M,reserve=off "
                     "-device virtio-mem-pci,addr=4,memdev=mem1,"
                     "memaddr=0x100000000,block-size=2M,requested-size=16M");
    device_start(&d, qts);
    qtest_bufwrite(qts, FIRST, data, COPY);
    for (int i = 0; i < 4; i++) {
        vmem_request(&d, qts, VIRTIO_MEM_REQ_PLUG, COPY / VMEM_BLOCK);
        assert_memory(qts, VMEM_ADDR, zeroes, COPY);
        ksm_qom_set(qts, "mem1", "run", "false");
        qtest_bufwrite(qts, VMEM_ADDR, data, COPY);
        ksm_qom_set(qts, "mem1", "run", "true");
        if (i < 2) {
            stat_wait(qts, "mem1", "pages-merged", COPY / PAGE);
            assert_memory(qts, VMEM_ADDR, data, COPY);
        }
        /* else it is being merged, or not yet */
        vmem_request(&d, qts, VIRTIO_MEM_REQ_UNPLUG, COPY / VMEM_BLOCK);
        g_assert_cmpuint(stat_get(qts, "mem1", "pages-merged"), ==, 0);
        g_assert_cmpuint(stat_get(qts, "mem1", "merged-runs"), ==, 0);
        assert_memory(qts, FIRST, data, COPY);
    }
    /* all at once, and other content */
    vmem_request(&d, qts, VIRTIO_MEM_REQ_PLUG, COPY / VMEM_BLOCK);
    qtest_bufwrite(qts, VMEM_ADDR, other, COPY);
    qtest_bufwrite(qts, SECOND, other, COPY);
    stat_wait(qts, "mem1", "pages-merged", COPY / PAGE * 9 / 10);
    vmem_request(&d, qts, VIRTIO_MEM_REQ_UNPLUG_ALL, 0);
    g_assert_cmpuint(stat_get(qts, "mem1", "pages-merged"), ==, 0);
    passes_wait(qts, "ram0", 2);
    assert_memory(qts, FIRST, data, COPY);
    assert_memory(qts, SECOND, other, COPY);
    device_stop(&d);
    qtest_quit(qts);
}


/* --- processes --- */
/* QEMU forks helper programs while pages are taken out. */
static void test_fork(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *other = random_copy(2);
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM);
    for (int i = 0; i < 40; i++) {
        QDict *answer;

        if (i % 10 == 0) {
            copies_put(qts, i % 20 ? other : data);
        }
        answer = qtest_qmp(qts, "{'execute': 'netdev_add', 'arguments': "
                           "{'type': 'bridge', 'id': 'n', "
                           "'helper': '/bin/false'}}");
        g_assert_nonnull(strstr(qdict_get_str(qdict_get_qdict(answer, "error"),
                                              "desc"), "helper"));
        qobject_unref(answer);
    }
    copies_assert(qts, other);
    copies_put(qts, data);
    copies_wait(qts);
    copies_assert(qts, data);
    qtest_quit(qts);
}

static void state_wait(QTestState *qts, char state)
{
    g_autofree char *path = g_strdup_printf("/proc/%d/stat", qtest_pid(qts));

    for (int i = 0; i < TRIES; i++) {
        g_autofree char *text = NULL;

        g_assert_true(g_file_get_contents(path, &text, NULL, NULL));
        /* "PID (NAME) STATE ..." */
        if (strrchr(text, ')')[2] == state) {
            return;
        }
        g_usleep(TRY_US);
    }
    g_assert_not_reached();
}

/* The process is stopped and goes on, wherever the engine was. */
static void test_sigstop(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *other = random_copy(2);
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM);
    for (int i = 0; i < 4; i++) {
        const uint8_t *now = i % 2 ? other : data;

        copies_put(qts, now);
        for (int k = 0; k < 10; k++) {
            engine_kick(qts, "ram0");
            kill(qtest_pid(qts), SIGSTOP);
            state_wait(qts, 'T');
            kill(qtest_pid(qts), SIGCONT);
        }
        copies_assert(qts, now);
    }
    copies_put(qts, data);
    copies_wait(qts);
    copies_assert(qts, data);
    qtest_quit(qts);
}

/* --- debugger --- */

static void gdb_send(int fd, const char *text)
{
    g_autofree char *packet = NULL;
    uint8_t sum = 0;

    for (const char *p = text; *p; p++) {
        sum += *p;
    }
    packet = g_strdup_printf("$%s#%02x", text, sum);
    g_assert_cmpint(send(fd, packet, strlen(packet), 0), ==, strlen(packet));
}

/* The content of the next packet, acknowledged. */
static char *gdb_receive(int fd)
{
    g_autoptr(GString) text = g_string_new(NULL);
    char c = 0;

    while (c != '$') {
        g_assert_cmpint(recv(fd, &c, 1, 0), ==, 1);
    }
    while (recv(fd, &c, 1, 0) == 1 && c != '#') {
        g_string_append_c(text, c);
    }
    g_assert_cmpint(c, ==, '#');
    /* two digits of a checksum */
    g_assert_cmpint(recv(fd, &c, 1, 0), ==, 1);
    g_assert_cmpint(recv(fd, &c, 1, 0), ==, 1);
    g_assert_cmpint(send(fd, "+", 1, 0), ==, 1);
    return g_string_free(g_steal_pointer(&text), FALSE);
}

static void gdb_ask(int fd, const char *question, const char *expected)
{
    g_autofree char *answer = NULL;

    gdb_send(fd, question);
    answer = gdb_receive(fd);
    g_assert_cmpstr(answer, ==, expected);
}

static int gdb_connect(const char *path)
{
    struct sockaddr_un addr = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    g_strlcpy(addr.sun_path, path, sizeof(addr.sun_path));
    g_assert_cmpint(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), ==,
                    0);
    return fd;
}

/* A debugger's write to merged memory is in one copy, not in both. */
static void test_gdb(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *changed = g_memdup2(data, COPY);
    g_autofree char *path = temporary();
    QTestState *qts;
    int fd;

    if (!can_run() || !qtest_has_accel("tcg")) {
        unlink(path);
        return;
    }
    unlink(path);
    /* firmware runs and finds nothing to boot from */
    qts = qtest_initf("-accel tcg " RAM " -chardev socket,id=gdb,path=%s,"
                      "server=on,wait=off -gdb chardev:gdb", path);
    copies_put(qts, data);
    copies_wait(qts);
    fd = gdb_connect(path);
    gdb_ask(fd, "Qqemu.PhyMemMode:1", "OK");
    for (unsigned at = 100; at < COPY; at += 7 * PAGE) {
        g_autofree char *read = g_strdup_printf("m%" PRIx64 ",1",
                                                FIRST + at);
        g_autofree char *write = g_strdup_printf("M%" PRIx64 ",1:%02x",
                                                 SECOND + at,
                                                 (uint8_t)~data[at]);
        g_autofree char *old = g_strdup_printf("%02x", data[at]);

        gdb_ask(fd, write, "OK");
        gdb_ask(fd, read, old);
        changed[at] = ~data[at];
    }
    assert_memory(qts, FIRST, data, COPY);
    assert_memory(qts, SECOND, changed, COPY);
    gdb_ask(fd, "D", "OK");
    close(fd);
    passes_wait(qts, "ram0", 3);
    assert_memory(qts, FIRST, data, COPY);
    assert_memory(qts, SECOND, changed, COPY);
    qtest_quit(qts);
    unlink(path);
}

/* --- migration --- */

static void capability_set(QTestState *qts, const char *name)
{
    qtest_qmp_assert_success(
        qts, "{'execute': 'migrate-set-capabilities', 'arguments': "
        "{'capabilities': [{'capability': %s, 'state': true}]}}", name);
}

/*
 * Pages at their places in the file, by several threads, past the page cache if
 * possible.
 */
static void mapped_ram_set(QTestState *qts, const char *path)
{
    int fd = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);

    capability_set(qts, "mapped-ram");
    capability_set(qts, "multifd");
    qtest_qmp_assert_success(qts, "{'execute': 'migrate-set-parameters', "
                             "'arguments': {'direct-io': %i}}", fd >= 0);
    close(fd);
}

static void migrate_out(QTestState *qts, const char *uri)
{
    qtest_qmp_assert_success(qts, "{'execute': 'migrate', 'arguments': "
                             "{'uri': %s}}", uri);
    migrate_wait(qts, "completed");
}

static void migrate_in(QTestState *qts, const char *uri)
{
    qtest_qmp_assert_success(qts, "{'execute': 'migrate-incoming', "
                             "'arguments': {'uri': %s}}", uri);
    qtest_qmp_eventwait(qts, "RESUME");
}

/*
 * Merged memory goes to plain RAM as mapped-ram, and through a pipe to memory
 * that merges again, unasked.
 */
static void test_there_and_back(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree char *path = temporary();
    g_autofree char *file = g_strdup_printf("file:%s", path);
    g_autofree char *out = g_strdup_printf("exec:cat >%s", path);
    g_autofree char *in = g_strdup_printf("exec:cat %s", path);
    QTestState *from, *plain, *to;

    if (!can_run()) {
        unlink(path);
        return;
    }
    from = qtest_init(RAM);
    copies_put(from, data);
    copies_wait(from);
    mapped_ram_set(from, path);
    migrate_out(from, file);
    copies_assert(from, data);
    qtest_quit(from);

    plain = qtest_init("-machine pc,memory-backend=ram0 -m 64M -nodefaults "
                       "-object memory-backend-ram,id=ram0,size=64M "
                       "-incoming defer");
    mapped_ram_set(plain, path);
    migrate_in(plain, file);
    copies_assert(plain, data);
    qtest_qmp_assert_success(
        plain, "{'execute': 'migrate-set-capabilities', 'arguments': "
        "{'capabilities': [{'capability': 'mapped-ram', 'state': false}, "
        "{'capability': 'multifd', 'state': false}]}}");
    migrate_out(plain, out);
    qtest_quit(plain);

    to = qtest_init(RAM " -incoming defer");
    migrate_in(to, in);
    stat_wait_alone(to, "ram0", "pages-merged", 2 * COPY / PAGE);
    copies_assert(to, data);
    qtest_quit(to);
    unlink(path);
}

/* --- when it is over --- */

/* The engine's last wait: since when, and for how long. */
typedef struct Rest {
    unsigned count;     /* lines read so far */
    double at;          /* s */
    double wait;
} Rest;

/* When a line was written: "THREAD@SECONDS:" or, since QEMU 10.2, a date. */
static double log_time(const char *line)
{
    g_autofree char *date = g_strndup(line, strcspn(line, " "));
    g_autoptr(GDateTime) time = g_date_time_new_from_iso8601(date, NULL);
    double at = 0;

    if (time) {
        return g_date_time_to_unix(time) + g_date_time_get_seconds(time) -
               g_date_time_get_second(time);
    }
    g_assert_cmpint(sscanf(line, "%*d@%lf:", &at), ==, 1);
    return at;
}

static Rest rest_read(const char *log)
{
    FILE *f = fopen(log, "re");
    g_autofree char *line = NULL;
    size_t capacity = 0;
    Rest rest = { };
    int64_t wait;

    g_assert_nonnull(f);
    while (getline(&line, &capacity, f) >= 0) {
        const char *step = strstr(line, "ksm_step runner");

        /* the last line may be half written */
        if (step && sscanf(step, "ksm_step runner %*s wait %" SCNd64 " ns",
                           &wait) == 1 && strchr(step, '\n')) {
            rest = (Rest) { rest.count + 1, log_time(line), wait / 1e9 };
        }
    }
    fclose(f);
    return rest;
}

/*
 * An inhibited engine looks less and less often whether it still is.  It is
 * told when that ends, and rests no longer.
 */
static void test_resume(void)
{
    g_autofree char *log = temporary();
    Rest meant = { }, then = { };
    QTestState *qts;

    if (!can_run()) {
        unlink(log);
        return;
    }
    qts = qtest_initf(RAM " -msg timestamp=on -trace ksm_step -D %s", log);
    /* enough unique content to keep the migration going */
    for (int i = 0; i < 5; i++) {
        g_autofree uint8_t *other = random_copy(10 + i);

        qtest_bufwrite(qts, FIRST + i * 2 * COPY, other, COPY);
    }
    qtest_qmp_assert_success(qts, "{'execute': 'migrate-set-parameters', "
                             "'arguments': {'max-bandwidth': 4096}}");
    qtest_qmp_assert_success(qts, "{'execute': 'migrate', 'arguments': "
                             "{'uri': 'exec:cat >/dev/null'}}");
    inhibited_wait(qts, "migration");
    for (int i = 0; i < TRIES && meant.wait < 6; i++) {
        g_usleep(TRY_US);
        meant = rest_read(log);
    }
    g_assert_cmpfloat(meant.wait, >=, 6);
    qtest_qmp_assert_success(qts, "{'execute': 'migrate_cancel'}");
    for (int i = 0; i < TRIES && then.count <= meant.count; i++) {
        g_usleep(TRY_US);
        then = rest_read(log);
    }
    g_assert_cmpuint(then.count, >, meant.count);
    g_test_message("after %.1f s, not %.1f s", then.at - meant.at, meant.wait);
    g_assert_cmpfloat(then.at, <, meant.at + meant.wait);
    qtest_quit(qts);
    unlink(log);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    qtest_add_func("ksm-coexist/virtio-mem", test_virtio_mem);
    qtest_add_func("ksm-coexist/fork", test_fork);
    qtest_add_func("ksm-coexist/sigstop", test_sigstop);
    qtest_add_func("ksm-coexist/gdb", test_gdb);
    qtest_add_func("ksm-coexist/there-and-back", test_there_and_back);
    qtest_add_func("ksm-coexist/resume", test_resume);
    return g_test_run();
}
