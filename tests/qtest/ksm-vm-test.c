/*
 * Tests of memory-backend-ksm with scope=zero and scope=vm: guest RAM that
 * QEMU merges itself
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The test program is the guest (see ksm-copies.h).  Nothing here measures
 * time; the tests wait as long as it takes.
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qemu/bswap.h"
#include "qemu/timer.h"
#include "qobject/qdict.h"
#include "qobject/qjson.h"
#include "qobject/qlist.h"
#include "ksm-copies.h"
#include "standard-headers/linux/virtio_balloon.h"

#define RAM_LOG RAM ",dirty-tracking=log"

/* What only a group's members can say to each other. */
static void no_sketch(QTestState *qts)
{
    QDict *answer = qtest_qmp(qts, "{'execute': 'query-ksm-sketches'}");

    g_assert_true(qlist_empty(qdict_get_qlist(answer, "return")));
    qobject_unref(answer);
}

static void test_merge(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *other = random_copy(2);
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM);
    copies_put(qts, data);
    copies_wait(qts);
    g_assert_cmpuint(stat_get(qts, "ram0", "merged-bytes"), ==, 2 * COPY);
    g_assert_cmpuint(stat_get(qts, "ram0", "saved-bytes"), ==, COPY);
    g_assert_cmpuint(stat_get(qts, "ram0", "shared-bytes"), ==, COPY);
    g_assert_cmpuint(stat_get(qts, "ram0", "merged-runs"), >, 0);
    copies_assert(qts, data);
    no_sketch(qts);

    /* a write is in one copy only */
    for (unsigned page = 0; page < COPY / PAGE; page += 3) {
        qtest_bufwrite(qts, SECOND + page * PAGE + page, other, 1 + page % 9);
    }
    assert_memory(qts, FIRST, data, COPY);
    passes_wait(qts, "ram0", 3);
    assert_memory(qts, FIRST, data, COPY);
    for (unsigned page = 0; page < COPY / PAGE; page += 3) {
        memcpy(data + page * PAGE + page, other, 1 + page % 9);
    }
    assert_memory(qts, SECOND, data, COPY);
    g_assert_cmpuint(stat_get(qts, "ram0", "cow-broken"), >, 0);
    qtest_quit(qts);
}

static void test_zero(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *zeroes = g_malloc0(COPY);
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init("-machine pc,memory-backend=ram0 -m 64M -nodefaults "
                     "-object memory-backend-ksm,scope=zero,max-cpu=100,"
                     "id=ram0,size=64M");
    copies_put(qts, data);
    qtest_bufwrite(qts, SECOND + 16 * MIB, zeroes, COPY);
    stat_wait(qts, "ram0", "zero-bytes", COPY);
    passes_wait(qts, "ram0", 3);
    g_assert_cmpuint(stat_get(qts, "ram0", "pages-merged"), ==, 0);
    copies_assert(qts, data);
    assert_memory(qts, SECOND + 16 * MIB, zeroes, COPY);
    qtest_quit(qts);
}

/* In a thread of the user's, which goes with QEMU. */
static void test_iothread(void)
{
    g_autofree uint8_t *data = random_copy(1);
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init("-object iothread,id=io " RAM ",iothread=io");
    copies_put(qts, data);
    copies_wait(qts);
    copies_assert(qts, data);
    for (int i = 0; i < 3; i++) {
        qtest_qmp_assert_success(
            qts, "{'execute': 'object-add', 'arguments': {'qom-type': "
            "'memory-backend-ksm', 'id': 'mem1', 'scope': 'vm', "
            "'iothread': 'io', 'size': %d}}", MIB);
        qtest_qmp_assert_success(qts, "{'execute': 'object-del', "
                                 "'arguments': {'id': 'mem1'}}");
    }
    qtest_quit(qts);

    /* the last user of a thread, and then the thread */
    qts = qtest_init("-machine none");
    for (int i = 0; i < 3; i++) {
        qtest_qmp_assert_success(
            qts, "{'execute': 'object-add', 'arguments': "
            "{'qom-type': 'iothread', 'id': 'io'}}");
        qtest_qmp_assert_success(
            qts, "{'execute': 'object-add', 'arguments': {'qom-type': "
            "'memory-backend-ksm', 'id': 'mem1', 'scope': 'vm', "
            "'iothread': 'io', 'size': %d}}", MIB);
        qtest_qmp_assert_success(qts, "{'execute': 'object-del', "
                                 "'arguments': {'id': 'mem1'}}");
        qtest_qmp_assert_success(qts, "{'execute': 'object-del', "
                                 "'arguments': {'id': 'io'}}");
    }
    qtest_quit(qts);
}

static void test_pattern(void)
{
    g_autofree uint8_t *data = g_malloc(8 * MIB);
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM);
    memset(data, 0xcc, 8 * MIB);
    ksm_qom_set(qts, "ram0", "run", "false");
    qtest_memset(qts, FIRST, 0xcc, 8 * MIB);
    ksm_qom_set(qts, "ram0", "run", "true");
    stat_wait(qts, "ram0", "pages-merged", 8 * MIB / PAGE);
    assert_memory(qts, FIRST, data, 8 * MIB);
    qtest_quit(qts);
}

static void test_run_off(void)
{
    g_autofree uint8_t *data = random_copy(1);
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM ",run=off");
    copies_write(qts, data);
    g_assert_true(state_is(qts, "ram0", "off"));
    g_assert_true(has_reason(qts, "run-off", "'run' is off"));
    ksm_qom_set(qts, "ram0", "max-cpu", "100");
    ksm_qom_set(qts, "ram0", "target-scan-time", "0");
    ksm_qom_set(qts, "ram0", "smart-scan", "false");
    g_assert_cmpuint(stat_get(qts, "ram0", "pages-merged"), ==, 0);
    ksm_qom_set(qts, "ram0", "run", "true");
    copies_wait(qts);
    g_assert_false(state_is(qts, "ram0", "off"));

    /* merged memory stays merged until it is unmerged */
    ksm_qom_set(qts, "ram0", "run", "false");
    g_assert_true(state_is(qts, "ram0", "off"));
    g_assert_cmpuint(stat_get(qts, "ram0", "pages-merged"), ==,
                     2 * COPY / PAGE);
    copies_assert(qts, data);
    qtest_quit(qts);
}

static char *unmerge(QTestState *qts, const char *arguments)
{
    QDict *response = qtest_qmp(qts, "{'execute': 'ksm-unmerge', "
                                "'arguments': %p}",
                                qobject_from_json(arguments, &error_abort));
    QDict *error = qdict_get_qdict(response, "error");
    char *text = error ? g_strdup(qdict_get_str(error, "desc")) : NULL;

    qobject_unref(response);
    return text;
}

static void test_unmerge(void)
{
    static const char *const wrong[][2] = {
        { "{'id': 'nobody'}", "nobody" },
        { "{'id': 'ram0', 'offset': 1}", "multiples of 4096" },
        { "{'id': 'ram0', 'offset': 67108864, 'size': 4096}", "64 MiB" },
        { "{'id': 'ram0', 'offset': 4096, 'size': 67108864}", "64 MiB" },
    };
    g_autofree uint8_t *data = random_copy(1);
    g_autofree char *running = NULL;
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM);
    copies_put(qts, data);
    copies_wait(qts);
    running = unmerge(qts, "{'id': 'ram0'}");
    g_assert_nonnull(strstr(running, "'run'"));
    ksm_qom_set(qts, "ram0", "run", "false");
    for (int i = 0; i < ARRAY_SIZE(wrong); i++) {
        g_autofree char *text = unmerge(qts, wrong[i][0]);

        g_assert_nonnull(strstr(text, wrong[i][1]));
    }
    g_assert_null(unmerge(qts, "{'id': 'ram0', 'offset': 16777216, "
                          "'size': 2097152}"));
    g_assert_cmpuint(stat_get(qts, "ram0", "pages-merged"), ==,
                     (2 * COPY - 2 * MIB) / PAGE);
    g_assert_null(unmerge(qts, "{'id': 'ram0'}"));
    g_assert_cmpuint(stat_get(qts, "ram0", "pages-merged"), ==, 0);
    g_assert_cmpuint(stat_get(qts, "ram0", "merged-runs"), ==, 0);
    copies_assert(qts, data);
    ksm_qom_set(qts, "ram0", "run", "true");
    copies_wait(qts);
    copies_assert(qts, data);
    qtest_quit(qts);
}

/* One call with a limit; returns where the next one has to begin. */
static uint64_t unmerge_some(QTestState *qts, uint64_t offset, int max_time,
                             bool *complete)
{
    QDict *answer = qtest_qmp_assert_success_ref(
        qts, "{'execute': 'ksm-unmerge', 'arguments': {'id': 'ram0', "
        "'offset': %" PRIu64 ", 'max-time': %d}}", offset, max_time);
    uint64_t next = qdict_get_int(answer, "offset");

    *complete = qdict_get_bool(answer, "complete");
    qobject_unref(answer);
    return next;
}

/* The caller gets its turn after each piece, and all is unmerged in the end. */
static void test_unmerge_some(void)
{
    g_autofree uint8_t *data = random_copy(1);
    uint64_t offset = 0, next;
    bool complete = false;
    unsigned calls = 0;
    QTestState *qts;
    char *text;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM);
    copies_put(qts, data);
    copies_wait(qts);
    text = unmerge(qts, "{'id': 'ram0', 'max-time': 1000}");
    g_assert_nonnull(strstr(text, "'run'"));
    g_free(text);
    ksm_qom_set(qts, "ram0", "run", "false");
    text = unmerge(qts, "{'id': 'ram0', 'max-time': -1}");
    g_assert_nonnull(strstr(text, "max-time"));
    g_free(text);
    /* where pieces begin does not depend on where it began */
    next = unmerge_some(qts, 12 * MIB + PAGE, 0, &complete);
    g_assert_cmpuint(next, ==, 16 * MIB);
    g_assert_false(complete);
    g_assert_cmpuint(stat_get(qts, "ram0", "merged-bytes"), ==, 2 * COPY);
    while (!complete) {
        next = unmerge_some(qts, offset, 0, &complete);
        g_assert_cmpuint(next, ==, offset + 4 * MIB);
        g_assert_true(complete == (next == 64 * MIB));
        if (next == 20 * MIB) {
            g_assert_cmpuint(stat_get(qts, "ram0", "merged-bytes"), ==, COPY);
        }
        offset = next;
        calls++;
    }
    g_assert_cmpuint(calls, ==, 16);
    g_assert_cmpuint(stat_get(qts, "ram0", "merged-bytes"), ==, 0);
    copies_assert(qts, data);
    /* with time enough, at once */
    g_assert_cmpuint(unmerge_some(qts, 0, 1000 * 1000, &complete), ==,
                     64 * MIB);
    g_assert_true(complete);
    ksm_qom_set(qts, "ram0", "run", "true");
    copies_wait(qts);
    copies_assert(qts, data);
    qtest_quit(qts);
}

/* --- query-stats --- */

/* The value of that name in a list of "name" and something; or NULL. */
static QDict *named(QList *list, const char *name)
{
    const QListEntry *item;

    QLIST_FOREACH_ENTRY(list, item) {
        QDict *dict = qobject_to(QDict, qlist_entry_obj(item));

        if (g_str_equal(qdict_get_str(dict, "name"), name)) {
            return dict;
        }
    }
    return NULL;
}

/* The answer has one element; its "stats".  @answer is for the caller. */
static QList *query_stats(QTestState *qts, const char *command, QDict **answer)
{
    QDict *first;
    QList *list;

    *answer = qtest_qmp(qts, "%p", qobject_from_json(command, &error_abort));
    list = qdict_get_qlist(*answer, "return");
    g_assert_nonnull(list);
    g_assert_cmpuint(qlist_size(list), ==, 1);
    first = qobject_to(QDict, qlist_peek(list));
    g_assert_cmpstr(qdict_get_str(first, "provider"), ==, "ksm");
    return qdict_get_qlist(first, "stats");
}

#define QUERY_STATS "{'execute': 'query-stats', 'arguments': " \
                    "{'target': 'vm', 'providers': [{'provider': 'ksm'"

/* query-stats says what query-ksm-stats says, and has a schema of each. */
static void test_query_stats(void)
{
    static const char *const same[] = {
        "size", "resident", "used", "merged-bytes", "saved-bytes",
        "shared-bytes", "merged-runs", "metadata", "page-tables",
    };
    g_autofree uint8_t *data = random_copy(1);
    QDict *answer, *schemas, *stats, *backend, *figure;
    QList *values, *schema;
    const QListEntry *item;
    QTestState *qts;
    char *hmp;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM);
    copies_put(qts, data);
    copies_wait(qts);
    ksm_qom_set(qts, "ram0", "run", "false");
    stats = ksm_stats(qts);
    backend = ksm_stats_backend(stats, "ram0");
    schema = query_stats(qts, "{'execute': 'query-stats-schemas', "
                         "'arguments': {'provider': 'ksm'}}", &schemas);
    values = query_stats(qts, QUERY_STATS "}]}}", &answer);
    for (int i = 0; i < ARRAY_SIZE(same); i++) {
        figure = named(values, same[i]);
        g_assert_nonnull(figure);
        g_assert_cmpint(qdict_get_int(figure, "value"), ==,
                        qdict_get_int(backend, same[i]));
    }
    g_assert_cmpint(qdict_get_int(named(values, "stall-count"), "value"), ==,
                    qdict_get_int(qdict_get_qdict(backend, "stall"), "count"));
    g_assert_null(named(values, "group-members"));
    QLIST_FOREACH_ENTRY(values, item) {
        figure = qobject_to(QDict, qlist_entry_obj(item));
        g_assert_nonnull(named(schema, qdict_get_str(figure, "name")));
    }
    figure = named(schema, "scan-time");
    g_assert_cmpstr(qdict_get_str(figure, "type"), ==, "cumulative");
    g_assert_cmpstr(qdict_get_str(figure, "unit"), ==, "seconds");
    g_assert_cmpint(qdict_get_int(figure, "exponent"), ==, -9);
    qobject_unref(schemas);
    qobject_unref(answer);
    qobject_unref(stats);

    /* those asked for */
    values = query_stats(qts, QUERY_STATS ", 'names': ['size', 'colour']}]}}",
                         &answer);
    g_assert_cmpuint(qlist_size(values), ==, 1);
    g_assert_nonnull(named(values, "size"));
    qobject_unref(answer);

    hmp = qtest_hmp(qts, "info stats vm * ksm");
    g_assert_nonnull(strstr(hmp, "merged-bytes (instant, B): 8388608"));
    g_assert_nonnull(strstr(hmp, "stall-max (peak, ns): "));
    g_assert_null(strstr(hmp, "failed to find"));
    g_free(hmp);
    qtest_quit(qts);

    qts = qtest_init("-machine none");
    answer = qtest_qmp(qts, QUERY_STATS "}]}}");
    g_assert_true(qlist_empty(qdict_get_qlist(answer, "return")));
    qobject_unref(answer);
    qtest_quit(qts);
}

/* --- unplugging --- */

#define DIMM_ADDR (4096ull * MIB)

static void dimm_plug(QTestState *qts)
{
    qtest_qmp_assert_success(
        qts, "{'execute': 'object-add', 'arguments': {'qom-type': "
        "'memory-backend-ksm', 'id': 'mem1', 'scope': 'vm', "
        "'max-cpu': 100, 'size': %d}}", 16 * MIB);
    qtest_qmp_assert_success(
        qts, "{'execute': 'device_add', 'arguments': {'driver': 'pc-dimm', "
        "'id': 'dimm1', 'memdev': 'mem1', 'addr': %" PRIu64 "}}",
        (uint64_t)DIMM_ADDR);
}

/* Ejects it as the guest's ACPI code does. */
static void dimm_unplug(QTestState *qts)
{
    qtest_qmp_device_del_send(qts, "dimm1");
    qtest_outl(qts, 0xa00, 0);
    qtest_outb(qts, 0xa14, 8);
    qtest_qmp_eventwait(qts, "DEVICE_DELETED");
    qtest_qmp_assert_success(qts, "{'execute': 'object-del', "
                             "'arguments': {'id': 'mem1'}}");
}

static void test_dimm(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *other = random_copy(2);
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init("-machine pc,memory-backend=ram0 "
                     "-m 64M,slots=2,maxmem=8G -nodefaults "
                     "-object " BACKEND ",id=ram0,size=64M");
    qtest_bufwrite(qts, FIRST, data, COPY);
    for (int i = 0; i < 3; i++) {
        dimm_plug(qts);
        ksm_qom_set(qts, "mem1", "run", "false");
        qtest_bufwrite(qts, DIMM_ADDR, data, COPY);
        ksm_qom_set(qts, "mem1", "run", "true");
        stat_wait(qts, "mem1", "pages-merged", COPY / PAGE);
        stat_wait(qts, "ram0", "pages-merged", COPY / PAGE);
        assert_memory(qts, DIMM_ADDR, data, COPY);
        /* also unplugged in the middle of being merged */
        if (i == 2) {
            qtest_bufwrite(qts, DIMM_ADDR + COPY, other, COPY);
            qtest_bufwrite(qts, SECOND, other, COPY);
        }
        dimm_unplug(qts);
        assert_memory(qts, FIRST, data, COPY);
    }
    assert_memory(qts, SECOND, other, COPY);
    qtest_quit(qts);
}

/* --- devices --- */

/* The balloon's memory is zeroes when it comes back, in any state. */
static void test_discard(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *zeroes = g_malloc0(COPY);
    uint32_t pfns[256], head;
    QTestState *qts;
    Device d;
    uint64_t addr;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM ",free-policy=eager "
                     "-device virtio-balloon-pci,addr=4");
    copies_put(qts, data);
    copies_wait(qts);
    device_start(&d, qts);
    addr = guest_alloc(&d.alloc, sizeof(pfns));
    g_assert_true(addr + sizeof(pfns) < FIRST || addr > SECOND + COPY);
    for (int i = 0; i < ARRAY_SIZE(pfns); i++) {
        /* merged pages, and written ones between */
        pfns[i] = cpu_to_le32(SECOND / PAGE + 2 * i);
        if (i % 5 == 0) {
            qtest_writeb(qts, SECOND + 2 * i * PAGE, 1);
        }
    }
    qtest_bufwrite(qts, addr, pfns, sizeof(pfns));
    head = qvirtqueue_add(qts, d.queue, addr, sizeof(pfns), false, false);
    qvirtqueue_kick(qts, d.dev, d.queue, head);
    device_wait(&d, qts, head);
    for (int i = 0; i < ARRAY_SIZE(pfns); i++) {
        memset(data + 2 * i * PAGE, 0, PAGE);
    }
    assert_memory(qts, SECOND, data, COPY);
    passes_wait(qts, "ram0", 3);
    assert_memory(qts, SECOND, data, COPY);
    device_stop(&d);
    qtest_quit(qts);
}

/* --- migration and snapshots --- */

static void test_migrate(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree char *path = temporary();
    g_autofree char *uri = g_strdup_printf("file:%s", path);
    g_autofree char *refused = NULL;
    QTestState *from, *to;

    if (!can_run()) {
        return;
    }
    from = qtest_init(RAM);
    copies_put(from, data);
    copies_wait(from);
    qtest_qmp_assert_success(from, "{'execute': 'migrate-set-parameters', "
                             "'arguments': {'max-bandwidth': 65536}}");
    qtest_qmp_assert_success(from, "{'execute': 'migrate', 'arguments': "
                             "{'uri': %s}}", uri);
    inhibited_wait(from, "migration");
    g_assert_true(state_is(from, "ram0", "inhibited"));
    copies_assert(from, data);
    /* RDMA registers memory and tells nobody: it has to stay what it is */
    ksm_qom_set(from, "ram0", "run", "false");
    refused = unmerge(from, "{'id': 'ram0'}");
    g_assert_nonnull(refused);
    g_assert_nonnull(strstr(refused, "migration"));
    g_assert_cmpuint(stat_get(from, "ram0", "merged-bytes"), ==, 2 * COPY);
    qtest_qmp_assert_success(from, "{'execute': 'migrate-set-parameters', "
                             "'arguments': {'max-bandwidth': 1000000000}}");
    migrate_wait(from, "completed");
    copies_assert(from, data);
    g_assert_null(unmerge(from, "{'id': 'ram0'}"));
    g_assert_cmpuint(stat_get(from, "ram0", "merged-bytes"), ==, 0);
    copies_assert(from, data);

    to = qtest_initf(RAM " -incoming defer");
    g_assert_true(has_reason(to, "inhibited", "incoming migration"));
    qtest_qmp_assert_success(to, "{'execute': 'migrate-incoming', "
                             "'arguments': {'uri': %s}}", uri);
    qtest_qmp_eventwait(to, "RESUME");
    copies_assert(to, data);
    copies_wait(to);
    copies_assert(to, data);
    qtest_quit(to);
    qtest_quit(from);
    unlink(path);
}

/* Ends by itself; then merging goes on. */
static void test_migrate_cancel(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree char *path = temporary();
    g_autofree char *uri = g_strdup_printf("file:%s", path);
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM);
    /* enough unique content to keep the migration going */
    for (int i = 0; i < 5; i++) {
        g_autofree uint8_t *other = random_copy(10 + i);

        qtest_bufwrite(qts, FIRST + i * 2 * COPY, other, COPY);
    }
    qtest_qmp_assert_success(qts, "{'execute': 'migrate-set-parameters', "
                             "'arguments': {'max-bandwidth': 4096}}");
    qtest_qmp_assert_success(qts, "{'execute': 'migrate', 'arguments': "
                             "{'uri': %s}}", uri);
    inhibited_wait(qts, "migration");
    copies_put(qts, data);
    qtest_qmp_assert_success(qts, "{'execute': 'migrate_cancel'}");
    migrate_wait(qts, "cancelled");
    copies_wait(qts);
    copies_assert(qts, data);
    qtest_quit(qts);
    unlink(path);
}

/* --- QEMU's dirty log --- */

/* Writes to merged memory are seen, again and again. */
static void test_log(void)
{
    g_autofree uint8_t *data = random_copy(1);
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM_LOG);
    for (int i = 0; i < 3; i++) {
        uint64_t broken = stat_get(qts, "ram0", "cow-broken");

        copies_put(qts, data);
        copies_wait(qts);
        copies_assert(qts, data);
        qtest_writel(qts, FIRST, i);
        stat_wait(qts, "ram0", "cow-broken", broken + 1);
        g_assert_cmpuint(qtest_readl(qts, FIRST), ==, i);
        g_assert_cmpuint(qtest_readl(qts, SECOND), ==, ldl_le_p(data));
    }
    qtest_quit(qts);
}

/* All RAM of one is all RAM of the other; neither runs. */
static void assert_same_memory(QTestState *one, QTestState *other)
{
    g_autofree uint8_t *data = g_malloc(MIB);
    uint64_t start = ksm_ram_start();

    for (uint64_t at = 0; at < 64 * MIB; at += MIB) {
        qtest_bufread(one, start + at, data, MIB);
        assert_memory(other, start + at, data, MIB);
    }
}

/*
 * What is written while a migration runs gets to the other side, whatever the
 * engine clears of the log, and merging goes on where it ended.  With TCG, too,
 * where firmware has run and a vCPU is there; tests/e2e/test_migration.py has
 * vCPUs that write all the time.  Nobody reads what is sent before the last
 * write: at any bandwidth, however low, the migration could be over first on a
 * busy machine.
 */
static void test_log_migrate(const void *accel)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *other = random_copy(2);
    g_autofree char *path = temporary();
    g_autofree char *go = g_strdup_printf("%s.go", path);
    g_autofree char *out = g_strdup_printf(
        "exec:until test -e %s; do sleep 0.1; done; exec cat >%s", go, path);
    g_autofree char *in = g_strdup_printf("file:%s", path);
    QTestState *from, *to;

    if (!can_run()) {
        return;
    }
    from = qtest_initf("-accel %s " RAM_LOG, (const char *)accel);
    copies_put(from, data);
    copies_wait(from);
    qtest_qmp_assert_success(from, "{'execute': 'migrate', 'arguments': "
                             "{'uri': %s}}", out);
    migrate_wait(from, "active");
    for (int i = 0; i < 3; i++) {
        copies_write(from, i < 2 ? data : other);
        passes_wait(from, "ram0", 2);
    }
    migrate_wait(from, "active");
    g_assert_true(g_file_set_contents(go, "", 0, NULL));
    migrate_wait(from, "completed");
    copies_assert(from, other);

    to = qtest_initf("-accel %s " RAM_LOG " -S -incoming defer",
                     (const char *)accel);
    qtest_qmp_assert_success(to, "{'execute': 'migrate-incoming', "
                             "'arguments': {'uri': %s}}", in);
    migrate_wait(to, "completed");
    assert_same_memory(from, to);
    qtest_qmp_assert_success(to, "{'execute': 'cont'}");
    copies_assert(to, other);
    copies_wait(to);
    copies_assert(to, other);
    qtest_quit(to);
    /* the source goes on merging if told to */
    qtest_qmp_assert_success(from, "{'execute': 'cont'}");
    copies_put(from, data);
    copies_wait(from);
    copies_assert(from, data);
    qtest_quit(from);
    unlink(path);
    unlink(go);
}

/* Other users of the log come and go, and merging goes on. */
static void test_log_dirty_rate(const void *opaque)
{
    const char *mode = opaque;
    g_autofree uint8_t *data = random_copy(1);
    bool done = false;
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM_LOG);
    qtest_qmp_assert_success(qts, "{'execute': 'calc-dirty-rate', "
                             "'arguments': {'calc-time': 1, 'mode': %s}}",
                             mode);
    copies_put(qts, data);
    copies_wait(qts);
    for (int i = 0; i < WAIT_S * 20 && !done; i++) {
        QDict *info = qtest_qmp_assert_success_ref(
            qts, "{'execute': 'query-dirty-rate'}");

        done = g_str_equal(qdict_get_str(info, "status"), "measured");
        qobject_unref(info);
        g_usleep(50000);
    }
    g_assert_true(done);
    copies_assert(qts, data);
    copies_put(qts, data);
    copies_wait(qts);
    qtest_quit(qts);
}

static void capability_set(QTestState *qts, const char *name, bool on)
{
    qtest_qmp_assert_success(
        qts, "{'execute': 'migrate-set-capabilities', 'arguments': "
        "{'capabilities': [{'capability': %s, 'state': %i}]}}", name, on);
}

/*
 * A background snapshot needs userfaultfd for itself: memory is unmerged when
 * it begins, not when somebody asks whether there can be one.
 */
static void test_background_snapshot(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree char *path = temporary();
    g_autofree char *uri = g_strdup_printf("file:%s", path);
    QTestState *from, *to;

    if (!can_run()) {
        return;
    }
    from = qtest_init(RAM);
    copies_put(from, data);
    copies_wait(from);
    for (int i = 0; i < 3; i++) {
        capability_set(from, "background-snapshot", true);
        capability_set(from, "events", i % 2);
        g_assert_cmpuint(stat_get(from, "ram0", "pages-merged"), ==,
                         2 * COPY / PAGE);
        g_assert_false(state_is(from, "ram0", "inhibited"));
    }
    for (int i = 0; i < 2; i++) {
        qtest_qmp_assert_success(from, "{'execute': 'migrate', 'arguments': "
                                 "{'uri': %s}}", uri);
        migrate_wait(from, "completed");
        copies_assert(from, data);
        copies_wait(from);
        copies_assert(from, data);
    }
    qtest_quit(from);

    /* deferred: QMP would miss an event before its setup */
    to = qtest_initf(RAM " -incoming defer");
    qtest_qmp_assert_success(to, "{'execute': 'migrate-incoming', "
                             "'arguments': {'uri': %s}}", uri);
    qtest_qmp_eventwait(to, "RESUME");
    copies_assert(to, data);
    qtest_quit(to);
    unlink(path);
}

/*
 * scope=host without a daemon: ksmd would take away the write-protection of
 * what it merges, so it must not have the memory meanwhile.
 */
static void test_background_snapshot_host(void)
{
    const size_t size = 42 << 20;   /* as no other mapping */
    gint64 end;
    QTestState *qts;

    if (access("/sys/kernel/mm/ksm/run", F_OK) < 0) {
        g_test_skip("needs a kernel with KSM");
        return;
    }
    qts = qtest_init("-machine q35,memory-backend=ram0 -m 42M -nodefaults "
                     "-object memory-backend-ksm,id=ram0,size=42M,"
                     "group-socket=/nobody/is/there");
    g_assert_true(ksm_vma_has(qts, size, "mg"));
    /* more than a pipe holds */
    qtest_memset(qts, ksm_ram_start() + MIB, 0x55, 8 * MIB);
    capability_set(qts, "background-snapshot", true);
    for (int i = 0; i < 3; i++) {
        qtest_qmp_assert_success(qts, "{'execute': 'migrate', 'arguments': "
                                 "{'uri': 'exec:sleep 2; cat >/dev/null'}}");
        migrate_wait(qts, "active");
        g_assert_false(ksm_vma_has(qts, size, "mg"));
        migrate_wait(qts, "completed");
        if (i == 1) {
            continue;       /* the next one begins before ksmd has it again */
        }
        end = g_get_monotonic_time() + 20 * G_USEC_PER_SEC;
        while (!ksm_vma_has(qts, size, "mg")) {
            g_assert_cmpint(g_get_monotonic_time(), <, end);
            g_usleep(100000);
        }
    }
    qtest_quit(qts);
}

static void job_run(QTestState *qts, const char *command)
{
    QDict *arguments = qdict_new();

    qdict_put_str(arguments, "job-id", "job");
    qdict_put_str(arguments, "tag", "one");
    qdict_put_str(arguments, "vmstate", "disk");
    qdict_put(arguments, "devices", qlist_new());
    qlist_append_str(qdict_get_qlist(arguments, "devices"), "disk");
    qtest_qmp_assert_success(qts, "{'execute': %s, 'arguments': %p}", command,
                             QOBJECT(arguments));
    for (bool done = false; !done;) {
        QDict *event = qtest_qmp_eventwait_ref(qts, "JOB_STATUS_CHANGE");
        QDict *info = qdict_get_qdict(event, "data");

        g_assert_cmpstr(qdict_get_str(info, "status"), !=, "aborting");
        done = g_str_equal(qdict_get_str(info, "status"), "concluded");
        qobject_unref(event);
    }
    qtest_qmp_assert_success(qts, "{'execute': 'job-dismiss', "
                             "'arguments': {'id': 'job'}}");
}

static void qcow2_create(QTestState *qts)
{
    qtest_qmp_assert_success(
        qts, "{'execute': 'blockdev-create', 'arguments': {'job-id': 'new', "
        "'options': {'driver': 'qcow2', 'file': 'file', 'size': 1048576}}}");
    for (bool done = false; !done;) {
        QDict *event = qtest_qmp_eventwait_ref(qts, "JOB_STATUS_CHANGE");

        done = g_str_equal(qdict_get_str(qdict_get_qdict(event, "data"),
                                         "status"), "concluded");
        qobject_unref(event);
    }
    qtest_qmp_assert_success(qts, "{'execute': 'job-dismiss', "
                             "'arguments': {'id': 'new'}}");
    qtest_qmp_assert_success(
        qts, "{'execute': 'blockdev-add', 'arguments': {'driver': 'qcow2', "
        "'node-name': 'disk', 'file': 'file'}}");
}

static void test_snapshot(void)
{
    g_autofree uint8_t *data = random_copy(1);
    g_autofree uint8_t *other = random_copy(2);
    g_autofree char *path = temporary();
    QTestState *qts;

    if (!can_run()) {
        return;
    }
    qts = qtest_initf(RAM " -blockdev file,node-name=file,filename=%s", path);
    qcow2_create(qts);
    copies_put(qts, data);
    copies_wait(qts);
    job_run(qts, "snapshot-save");
    copies_assert(qts, data);
    copies_put(qts, other);
    passes_wait(qts, "ram0", 2);
    copies_assert(qts, other);
    job_run(qts, "snapshot-load");
    copies_assert(qts, data);
    copies_wait(qts);
    copies_assert(qts, data);
    qtest_quit(qts);
    unlink(path);
}

/* --- what is refused --- */

static void test_disagree(const void *opaque)
{
    const char *const *properties = opaque;
    g_autofree char *args = g_strdup_printf(
        "-object iothread,id=io -object " BACKEND ",id=a,size=4M "
        "-object memory-backend-ksm,id=b,size=4M,%s", properties[0]);
    g_autoptr(KsmRun) run = NULL;

    if (!can_run()) {
        return;
    }
    run = ksm_run(args, NULL);
    g_test_message("%s", run->err);
    g_assert_nonnull(strstr(run->err, properties[1]));
}

/*
 * arm64: QEMU's pages are of 1024 bytes without a machine that asks for more.
 * Its log is refused there; auto does without.
 */
static void test_target_pages(void)
{
    static const struct {
        const char *machine, *tracking, *message;
    } cases[] = {
        { "none", "log", "pages of 4096 bytes, not of 1024" },
        { "none", "auto", KSM_RUN_STARTED },
        { "none", "pagemap", KSM_RUN_STARTED },
        { "virt", "log", KSM_RUN_STARTED },
    };

    if (!can_run()) {
        return;
    }
    for (int i = 0; i < ARRAY_SIZE(cases); i++) {
        g_autofree char *args = g_strdup_printf(
            "-machine %s -object " BACKEND ",id=r,size=4M,dirty-tracking=%s",
            cases[i].machine, cases[i].tracking);
        g_autoptr(KsmRun) run = ksm_run(args, NULL);

        g_test_message("%s", run->err);
        g_assert_nonnull(strstr(run->err, cases[i].message));
    }
}

/* Nobody serves the group: the guest runs, and says why nothing is merged. */
static void test_group(const void *opaque)
{
    const char *const *properties = opaque;
    g_autofree char *args = g_strdup_printf(
        "-object memory-backend-ksm,id=a,size=4M,scope=group,group=g,"
        "group-socket=/no/where "
        "-object memory-backend-ksm,id=b,size=4M,scope=group,%s",
        properties[0]);
    g_autoptr(KsmRun) run = NULL;

    if (!can_run()) {
        return;
    }
    run = ksm_run(args, NULL);
    g_test_message("%s", run->err);
    g_assert_nonnull(strstr(run->err, properties[1]));
}

/* Two objects are given one connection: it is taken over once, and kept. */
static void test_group_fd(void)
{
    QTestState *qts;
    char hello[4096];
    int pair[2];

    if (!can_run()) {
        return;
    }
    g_assert_cmpint(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), ==, 0);
    qemu_set_cloexec(pair[0]);
    qts = qtest_initf("-object memory-backend-ksm,id=a,size=4M,scope=group,"
                      "group=g,group-fd=%d "
                      "-object memory-backend-ksm,id=b,size=4M,scope=group,"
                      "group=g,group-fd=%d", pair[1], pair[1]);
    close(pair[1]);
    g_assert_cmpint(recv(pair[0], hello, sizeof(hello), 0), >, 0);
    g_assert_cmpint(recv(pair[0], hello, sizeof(hello), MSG_DONTWAIT), ==, -1);
    g_assert_cmpint(errno, ==, EAGAIN);
    qtest_quit(qts);
    close(pair[0]);
}

/*
 * Events are limited by the virtual clock, which stands still under qtest: what
 * is held back comes with this.
 */
static void events_release(QTestState *qts)
{
    qtest_clock_step(qts, NANOSECONDS_PER_SECOND);
    /* what was sent before the answer is queued now */
    qtest_qmp_assert_success(qts, "{'execute': 'query-status'}");
}

/* The next of those that have come, for the caller to unref; or NULL. */
static QDict *event_next(QTestState *qts)
{
    return qtest_qmp_event_ref(qts, "MEMORY_KSM_STATE_CHANGE");
}

static void events_drop(QTestState *qts)
{
    QDict *event;

    /* one that is held back, and the end of the second after it */
    for (int i = 0; i < 3; i++) {
        events_release(qts);
    }
    while ((event = event_next(qts))) {
        qobject_unref(event);
    }
}

static void test_event(void)
{
    QTestState *qts;
    QDict *event, *info, *reason, *stats;
    QList *reasons;

    if (!can_run()) {
        return;
    }
    qts = qtest_init(RAM);
    ksm_qom_set(qts, "ram0", "run", "false");
    events_release(qts);
    for (bool off = false; !off;) {
        event = qtest_qmp_eventwait_ref(qts, "MEMORY_KSM_STATE_CHANGE");
        info = qdict_get_qdict(event, "data");
        g_assert_cmpstr(qdict_get_str(info, "id"), ==, "ram0");
        off = g_str_equal(qdict_get_str(info, "state"), "off");
        reasons = qdict_get_qlist(info, "reasons");
        g_assert_nonnull(reasons);
        if (off) {
            g_assert_cmpuint(qlist_size(reasons), ==, 1);
            reason = qobject_to(QDict, qlist_peek(reasons));
            g_assert_cmpstr(qdict_get_str(reason, "kind"), ==, "run-off");
            /* deprecated */
            g_assert_cmpstr(qdict_get_str(info, "reason"), ==,
                            qdict_get_str(reason, "text"));
        }
        qobject_unref(event);
    }
    qtest_quit(qts);

    qts = qtest_init(RAM " -compat deprecated-output=hide");
    ksm_qom_set(qts, "ram0", "run", "false");
    events_release(qts);
    event = qtest_qmp_eventwait_ref(qts, "MEMORY_KSM_STATE_CHANGE");
    g_assert_false(qdict_haskey(qdict_get_qdict(event, "data"), "reason"));
    qobject_unref(event);
    stats = ksm_stats(qts);
    info = ksm_stats_backend(stats, "ram0");
    g_assert_true(qdict_haskey(info, "size"));
    g_assert_false(qdict_haskey(info, "pages-merged"));
    qobject_unref(stats);
    qtest_quit(qts);
}

/* However often somebody switches merging on and off. */
static void test_event_limit(void)
{
    static const char *const ids[] = { "ram0", "other" };
    QTestState *qts;
    QDict *event;

    if (!can_run()) {
        return;
    }
    /* its state does not change by itself */
    qts = qtest_init(RAM " -object memory-backend-ksm,id=other,size=4M,"
                     "scope=vm,run=off");
    events_drop(qts);
    for (int i = 0; i < 20; i++) {
        ksm_qom_set(qts, "ram0", "run", i % 2 ? "false" : "true");
    }
    event = event_next(qts);
    qobject_unref(event);
    g_assert_null(event_next(qts));
    /* then the last of them */
    events_release(qts);
    event = event_next(qts);
    g_assert_nonnull(event);
    g_assert_cmpstr(qdict_get_str(qdict_get_qdict(event, "data"), "state"), ==,
                    "off");
    qobject_unref(event);
    g_assert_null(event_next(qts));

    /* one does not keep another's back */
    events_drop(qts);
    for (int i = 0; i < ARRAY_SIZE(ids); i++) {
        ksm_qom_set(qts, ids[i], "run", "true");
    }
    for (int i = 0; i < ARRAY_SIZE(ids); i++) {
        event = event_next(qts);
        g_assert_nonnull(event);
        g_assert_cmpstr(qdict_get_str(qdict_get_qdict(event, "data"), "id"),
                        ==, ids[i]);
        qobject_unref(event);
    }
    qtest_quit(qts);
}

static const char *const disagree[][2] = {
    { "scope=zero", "property 'scope' must be the same" },
    { "scope=vm,dirty-tracking=checksum",
      "property 'dirty-tracking' must be the same" },
    { "scope=vm,free-policy=eager",
      "property 'free-policy' must be the same" },
    { "scope=vm,iothread=io", "property 'iothread' must be the same" },
    { "scope=host", KSM_RUN_STARTED },
    { "scope=vm,max-cpu=1,smart-scan=off,run=off", KSM_RUN_STARTED },
};

static const char *const groups[][2] = {
    { "group=g,group-socket=/no/where", KSM_RUN_STARTED },
    { "group=h,group-socket=/no/where",
      "property 'group' must be the same" },
    { "group=g", "property 'group-socket' must be the same" },
    { "group=g,group-socket=/no/where,group-fd=9999",
      "property 'group-fd' must be a connected socket" },
    { "group=g,group-socket=/no/where,group-fd=0",
      "property 'group-fd' must be a connected socket" },
};

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    qtest_add_func("ksm-vm/merge", test_merge);
    qtest_add_func("ksm-vm/zero", test_zero);
    qtest_add_func("ksm-vm/pattern", test_pattern);
    qtest_add_func("ksm-vm/iothread", test_iothread);
    qtest_add_func("ksm-vm/run-off", test_run_off);
    qtest_add_func("ksm-vm/unmerge", test_unmerge);
    qtest_add_func("ksm-vm/unmerge-some", test_unmerge_some);
    qtest_add_func("ksm-vm/query-stats", test_query_stats);
    /* arm64 needs UEFI for that */
    if (!ksm_on_arm()) {
        qtest_add_func("ksm-vm/dimm", test_dimm);
    }
    qtest_add_func("ksm-vm/discard", test_discard);
    qtest_add_func("ksm-vm/migrate", test_migrate);
    qtest_add_func("ksm-vm/migrate-cancel", test_migrate_cancel);
    qtest_add_func("ksm-vm/log", test_log);
    qtest_add_data_func("ksm-vm/log-migrate/qtest", "qtest", test_log_migrate);
    if (qtest_has_accel("tcg")) {
        qtest_add_data_func("ksm-vm/log-migrate/tcg", "tcg", test_log_migrate);
    }
    qtest_add_data_func("ksm-vm/log-rate/page-sampling", "page-sampling",
                        test_log_dirty_rate);
    qtest_add_data_func("ksm-vm/log-rate/dirty-bitmap", "dirty-bitmap",
                        test_log_dirty_rate);
    qtest_add_func("ksm-vm/background-snapshot", test_background_snapshot);
    qtest_add_func("ksm-vm/background-snapshot/host",
                   test_background_snapshot_host);
    qtest_add_func("ksm-vm/snapshot", test_snapshot);
    qtest_add_func("ksm-vm/event", test_event);
    qtest_add_func("ksm-vm/event-limit", test_event_limit);
    if (ksm_on_arm()) {
        qtest_add_func("ksm-vm/target-pages", test_target_pages);
    }
    qtest_add_func("ksm-vm/group/fd", test_group_fd);
    for (int i = 0; i < ARRAY_SIZE(disagree); i++) {
        g_autofree char *path = g_strdup_printf("ksm-vm/agree/%s",
                                                disagree[i][0]);

        qtest_add_data_func(path, disagree[i], test_disagree);
    }
    for (int i = 0; i < ARRAY_SIZE(groups); i++) {
        g_autofree char *path = g_strdup_printf("ksm-vm/group/%d", i);

        qtest_add_data_func(path, groups[i], test_group);
    }
    return g_test_run();
}
