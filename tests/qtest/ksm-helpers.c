/*
 * Helpers of the tests of memory-backend-ksm
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "qobject/qdict.h"
#include "qobject/qlist.h"
#include "qobject/qjson.h"
#include "ksm-helpers.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

bool ksm_on_arm(void)
{
    return g_str_equal(qtest_get_arch(), "aarch64");
}

uint64_t ksm_ram_start(void)
{
    return ksm_on_arm() ? 1ull << 30 : 0;
}

void ksm_run_free(KsmRun *run)
{
    g_free(run->err);
    g_free(run);
}

#define LOAD(field) \
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))

/* Runs between fork and exec: only system calls. */
static void deny_madvise(gpointer opaque)
{
    const KsmDeny *deny = opaque;
    struct sock_filter code[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 5),
        LOAD(args[2]),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, deny->advice, 0, 3),
        LOAD(args[1]),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, deny->min_len, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | deny->err),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { ARRAY_SIZE(code), code };

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0) {
        _exit(99);
    }
}

KsmRun *ksm_run(const char *args, const KsmDeny *deny)
{
    g_autofree char *command =
        g_strdup_printf("%s -display none -nodefaults -accel qtest "
                        "%s -device no-such-device",
                        getenv("QTEST_QEMU_BINARY"), args);
    g_auto(GStrv) argv = g_strsplit(command, " ", -1);
    KsmRun *run = g_new0(KsmRun, 1);
    g_autoptr(GError) error = NULL;
    int status;

    g_spawn_sync(NULL, argv, NULL, G_SPAWN_SEARCH_PATH,
                 deny ? deny_madvise : NULL, (gpointer)deny, NULL, &run->err,
                 &status, &error);
    g_assert_no_error(error);
    run->status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return run;
}

char *ksm_fault_command(const KsmFault *fault)
{
    g_autofree char *self = g_file_read_link("/proc/self/exe", NULL);

    return g_strdup_printf("%s " KSM_FAULT_OPTION " %d %u %u %d %s", self,
                           fault->nr, fault->arg, fault->value, fault->err,
                           getenv("QTEST_QEMU_BINARY"));
}

int ksm_fault_exec(int argc, char **argv)
{
    unsigned nr, arg, value, err;
    /* a jump of 0 goes on, of 1 passes over the refusal */
    struct sock_filter code[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 3),
        LOAD(args[0]),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { ARRAY_SIZE(code), code };

    if (argc < 7 || sscanf(argv[2], "%u", &nr) != 1 ||
        sscanf(argv[3], "%u", &arg) != 1 ||
        sscanf(argv[4], "%u", &value) != 1 ||
        sscanf(argv[5], "%u", &err) != 1) {
        return 99;
    }
    code[1].k = nr;
    if (arg == KSM_FAULT_ANY) {
        code[3].jf = 0;
    } else {
        code[2].k = offsetof(struct seccomp_data, args[arg]);
    }
    code[3].k = value;
    code[4].k |= err;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0) {
        return 99;
    }
    execv(argv[6], argv + 6);
    return 99;
}

/*
 * qtest_init() with another command in the place of QEMU.  libqtest has
 * functions for that too, which other versions of QEMU call otherwise.
 */
static QTestState *init_command(const char *command, const char *args)
{
    g_autofree char *binary = g_strdup(getenv("QTEST_QEMU_BINARY"));
    QTestState *qts;

    g_setenv("QTEST_QEMU_BINARY", command, true);
    qts = qtest_init(args);
    g_setenv("QTEST_QEMU_BINARY", binary, true);
    return qts;
}

QTestState *ksm_init_fault(const KsmFault *fault, const char *args)
{
    g_autofree char *command = ksm_fault_command(fault);

    return init_command(command, args);
}

QTestState *ksm_init_sysfs(const char *dir, const char *args)
{
    g_autofree char *script = NULL;
    g_autofree char *command = NULL;
    QTestState *qts;
    int fd = g_file_open_tmp("ksm-test-XXXXXX", &script, NULL);
    FILE *file = fdopen(fd, "w");

    if (dir) {
        fprintf(file, "mount --bind '%s' /sys/kernel/mm/ksm\n", dir);
    } else {
        fprintf(file, "mount -t tmpfs none /sys/kernel/mm\n");
    }
    fprintf(file, "exec %s \"$@\"\n", getenv("QTEST_QEMU_BINARY"));
    fclose(file);
    command = g_strdup_printf("unshare -m sh -e %s", script);
    qts = init_command(command, args);
    unlink(script);
    return qts;
}

/* Reads on to the flags of the VMA whose head has just been read. */
static bool vma_read(FILE *smaps, size_t size, KsmVma *vma)
{
    g_autofree char *line = NULL;
    size_t capacity = 0, kib;
    bool found = false;

    while (getline(&line, &capacity, smaps) >= 0) {
        if (sscanf(line, "Size: %zu kB", &kib) == 1) {
            found = kib == size >> 10;
        } else if (found && sscanf(line, "Rss: %zu kB", &kib) == 1) {
            vma->resident = kib << 10;
        } else if (found && sscanf(line, "LazyFree: %zu kB", &kib) == 1) {
            vma->lazy_free = kib << 10;
        } else if (g_str_has_prefix(line, "VmFlags:")) {
            if (found) {
                g_strchomp(line);
                vma->flags = g_strconcat(line + strlen("VmFlags:"), " ", NULL);
            }
            return found;
        }
    }
    return false;
}

/* smaps is read in pieces, and what changes meanwhile may be passed over. */
#define SMAPS_TRIES 50

static bool vma_look(QTestState *qts, size_t size, KsmVma *vma)
{
    g_autofree char *path = g_strdup_printf("/proc/%d/smaps", qtest_pid(qts));
    g_autofree char *line = NULL;
    size_t capacity = 0;
    FILE *smaps = fopen(path, "re");
    bool found = false;

    g_assert_nonnull(smaps);
    while (!found && getline(&line, &capacity, smaps) >= 0) {
        *vma = (KsmVma) { };
        g_assert_cmpint(sscanf(line, "%" SCNxPTR "-", &vma->start), ==, 1);
        found = vma_read(smaps, size, vma);
    }
    fclose(smaps);
    return found;
}

bool ksm_vma_find(QTestState *qts, size_t size, KsmVma *vma)
{
    for (int i = 0; i < SMAPS_TRIES; i++) {
        if (vma_look(qts, size, vma)) {
            if (i) {
                g_test_message("found at look %d", i + 1);
            }
            return true;
        }
        g_usleep(20000);
    }
    return false;
}

bool ksm_vma_has(QTestState *qts, size_t size, const char *flag)
{
    g_autofree char *word = g_strdup_printf(" %s ", flag);
    KsmVma vma;
    bool has;

    g_assert_true(ksm_vma_find(qts, size, &vma));
    has = strstr(vma.flags, word) != NULL;
    g_free(vma.flags);
    return has;
}

uintptr_t ksm_host_address(QTestState *qts, uint64_t addr)
{
    g_autofree char *answer = qtest_hmp(qts, "gpa2hva 0x%" PRIx64, addr);
    const char *at = strstr(answer, " is 0x");
    uintptr_t host;

    g_assert_nonnull(at);
    g_assert_cmpint(sscanf(at, " is 0x%" SCNxPTR, &host), ==, 1);
    return host;
}

KsmVmas ksm_vmas_count(QTestState *qts, uintptr_t start, size_t size,
                       const char *flag)
{
    g_autofree char *path = g_strdup_printf("/proc/%d/smaps", qtest_pid(qts));
    g_autofree char *word = g_strdup_printf(" %s ", flag);
    g_autofree char *line = NULL;
    FILE *smaps = fopen(path, "re");
    KsmVmas vmas = { };
    size_t capacity = 0;
    uintptr_t from, to;
    bool inside = false;

    g_assert_nonnull(smaps);
    while (getline(&line, &capacity, smaps) >= 0) {
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2) {
            inside = from < start + size && to > start;
        } else if (inside && g_str_has_prefix(line, "VmFlags:")) {
            vmas.all++;
            vmas.flagged += strstr(line, word) != NULL;
        }
    }
    fclose(smaps);
    return vmas;
}

/* Sizes, and their deprecated names, in pages. */
static const char *const in_bytes[][2] = {
    { "bytes", "pages" },
    { "merged-bytes", "pages-merged" },
    { "shared-bytes", "pages-shared" },
    { "saved-bytes", "pages-sharing" },
    { "unshared-bytes", "pages-unshared" },
    { "volatile-bytes", "pages-volatile" },
    { "zero-bytes", "zero-pages" },
    { "kernel-merged-bytes", "kernel-pages" },
    { "free-hinted-bytes", "free-hinted" },
    { "free-eager-bytes", "free-eager" },
    { "lazy-reclaimed-bytes", "lazy-reclaimed" },
    { "held-bytes", "held" },
    { "share-bytes", "share" },
};

static void bytes_check(QDict *entry)
{
    for (int i = 0; i < ARRAY_SIZE(in_bytes); i++) {
        const char *bytes = in_bytes[i][0], *pages = in_bytes[i][1];

        if (qdict_haskey(entry, bytes) && qdict_haskey(entry, pages)) {
            g_assert_cmpint(qdict_get_int(entry, bytes), ==,
                            qdict_get_int(entry, pages) *
                            qemu_real_host_page_size());
        } else {
            g_assert_false(qdict_haskey(entry, pages));
        }
    }
}

static void entry_check(QDict *entry)
{
    const QListEntry *item;

    bytes_check(entry);
    QLIST_FOREACH_ENTRY(qdict_get_qlist(entry, "reasons"), item) {
        bytes_check(qobject_to(QDict, qlist_entry_obj(item)));
    }
    if (qdict_haskey(entry, "group")) {
        bytes_check(qdict_get_qdict(entry, "group"));
    }
}

QDict *ksm_stats(QTestState *qts)
{
    QDict *stats = qtest_qmp_assert_success_ref(
        qts, "{'execute': 'query-ksm-stats'}");
    const QListEntry *item;

    entry_check(qdict_get_qdict(stats, "host"));
    bytes_check(qdict_get_qdict(stats, "process"));
    QLIST_FOREACH_ENTRY(qdict_get_qlist(stats, "backends"), item) {
        entry_check(qobject_to(QDict, qlist_entry_obj(item)));
    }
    return stats;
}

QDict *ksm_stats_host(QDict *stats)
{
    return qdict_get_qdict(stats, "host");
}

QDict *ksm_stats_backend(QDict *stats, const char *id)
{
    const QListEntry *entry;

    QLIST_FOREACH_ENTRY(qdict_get_qlist(stats, "backends"), entry) {
        QDict *backend = qobject_to(QDict, qlist_entry_obj(entry));

        if (g_str_equal(qdict_get_str(backend, "id"), id)) {
            return backend;
        }
    }
    return NULL;
}

const char *ksm_reason(QDict *entry, const char *kind)
{
    const QListEntry *item;

    QLIST_FOREACH_ENTRY(qdict_get_qlist(entry, "reasons"), item) {
        QDict *reason = qobject_to(QDict, qlist_entry_obj(item));

        if (g_str_equal(qdict_get_str(reason, "kind"), kind)) {
            return qdict_get_str(reason, "text");
        }
    }
    return NULL;
}

void ksm_qom_set(QTestState *qts, const char *id, const char *property,
                 const char *json)
{
    g_autofree char *path = g_strdup_printf("/objects/%s", id);

    qtest_qmp_assert_success(qts, "{'execute': 'qom-set', 'arguments': "
                             "{'path': %s, 'property': %s, 'value': %p}}",
                             path, property,
                             qobject_from_json(json, &error_abort));
}

void ksm_qom_set_fails(QTestState *qts, const char *id, const char *property,
                       const char *json, const char *message)
{
    g_autofree char *path = g_strdup_printf("/objects/%s", id);
    QDict *error = qtest_qmp_assert_failure_ref(
        qts, "{'execute': 'qom-set', 'arguments': {'path': %s, "
        "'property': %s, 'value': %p}}", path, property,
        qobject_from_json(json, &error_abort));

    g_test_message("%s", qdict_get_str(error, "desc"));
    g_assert_nonnull(strstr(qdict_get_str(error, "desc"), message));
    qobject_unref(error);
}
