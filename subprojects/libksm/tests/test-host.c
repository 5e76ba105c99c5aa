/*
 * libksm tests: hosts and memory that cannot be merged, attributes that the
 * owner changes, and what the calls of prim do on this host
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Other machines are played by what prim says of this one.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/prim.h"
#include "house.h"

static const char *machine;
static size_t page_size;

static const char *fake_machine(void)
{
    return machine;
}

static size_t fake_page_size(void)
{
    return page_size;
}

/* Neither a check nor an engine succeeds, and both say why. */
static void check_refused(const char *part)
{
    g_autoptr(GError) error = NULL;
    g_autoptr(GError) engine_error = NULL;
    KsmConfig config;

    ksm_config_init(&config);
    g_assert(!ksm_supported(&error));
    g_test_message("%s", error->message);
    g_assert(g_error_matches(error, KSM_ERROR, KSM_ERROR_UNSUPPORTED));
    g_assert(strstr(error->message, part));
    g_assert(!ksm_engine_new(&config, &engine_error));
    g_assert(g_str_equal(engine_error->message, error->message));
}

static void test_machine(void)
{
    bool supported;

    prim.machine = fake_machine;
    machine = "s390x";
    check_refused("storage keys");
    machine = "ppc64";
    check_refused("not been tested on ppc64");
    machine = "this architecture";
    check_refused("needs x86_64 or aarch64");
    prim.machine = prim_real.machine;
    supported = ksm_supported(NULL);
    machine = "aarch64";
    prim.machine = fake_machine;
    g_assert(ksm_supported(NULL) == supported);
    prim.machine = prim_real.machine;
}

/* A connection is the engine's, also where there can be none. */
static void check_fd_taken(KsmConfig *config, KsmError code)
{
    g_autoptr(GError) error = NULL;

    config->scope = KSM_SCOPE_GROUP;
    config->group_fd = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3);
    g_assert(config->group_fd >= 0);
    g_assert(!ksm_engine_new(config, &error));
    g_assert(g_error_matches(error, KSM_ERROR, code));
    g_assert(fcntl(config->group_fd, F_GETFD) < 0 && errno == EBADF);
}

static int no_uffd(void)
{
    return -EPERM;
}

static void test_group_fd(void)
{
    KsmConfig config;

    ksm_config_init(&config);
    config.group = "..";
    check_fd_taken(&config, KSM_ERROR_INVALID);
    config.group = "good";
    prim.uffd = no_uffd;
    check_fd_taken(&config, KSM_ERROR_PERMISSION);
    prim.uffd = prim_real.uffd;
    prim.machine = fake_machine;
    machine = "s390x";
    check_fd_taken(&config, KSM_ERROR_UNSUPPORTED);
    prim.machine = prim_real.machine;
}

static void test_page_size(void)
{
    prim.page_size = fake_page_size;
    page_size = 65536;
    check_refused("pages are of 65536 bytes");
    page_size = 16384;
    check_refused("pages of 4096 bytes");
    prim.page_size = prim_real.page_size;
}

/* /proc/self/smaps with one more flag set on the memory. */
static const char *extra_flag;

static int smaps_with_flag(const char *path)
{
    g_autofree char *text = NULL;
    g_auto(GStrv) parts = NULL;
    g_autofree char *with = NULL;
    g_autofree char *joined = NULL;
    int fd;

    if (!g_str_equal(path, "/proc/self/smaps")) {
        return prim_real.open_read(path);
    }
    g_assert(g_file_get_contents(path, &text, NULL, NULL));
    parts = g_strsplit(text, "VmFlags:", -1);
    with = g_strdup_printf("VmFlags: %s", extra_flag);
    joined = g_strjoinv(with, parts);
    fd = memfd_create("smaps", MFD_CLOEXEC);
    g_assert(write(fd, joined, strlen(joined)) == (ssize_t)strlen(joined));
    g_assert(lseek(fd, 0, SEEK_SET) == 0);
    return fd;
}

/* Tags of memory (arm64) are no part of its bytes. */
static void test_tags(void)
{
    static const struct {
        const char *flag;
        const char *refused;    /* part of why, or NULL */
    } cases[] = {
        { "mt", "has tags" },
        { "me", NULL },
    };
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM);
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(1024, 0, MEM_SMALL);
    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        g_autoptr(GError) error = NULL;
        KsmRegion *r;

        extra_flag = cases[i].flag;
        prim.open_read = smaps_with_flag;
        r = ksm_region_add(e, m->addr, m->pages * PAGE, -1, NULL, NULL,
                           &error);
        prim.open_read = prim_real.open_read;
        g_assert(!r == !!cases[i].refused);
        if (r) {
            util_remove(r);
        } else {
            g_assert(strstr(error->message, cases[i].refused));
        }
    }
    mem_free(m);
    ksm_engine_free(e);
}

/* Mappings of the region, and those missing in core dumps. */
static unsigned not_dumped(const Mem *m, unsigned *all)
{
    uintptr_t start = (uintptr_t)m->addr, end = start + m->pages * PAGE;
    FILE *f = fopen("/proc/self/smaps", "re");
    unsigned long from, to;
    unsigned flagged = 0;
    bool inside = false;
    char line[512];

    g_assert(f);
    *all = 0;
    while (fgets(line, sizeof(line), f)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) {
            inside = from < end && to > start;
        } else if (inside && g_str_has_prefix(line, "VmFlags:")) {
            (*all)++;
            flagged += strstr(line, " dd") != NULL;
        }
    }
    fclose(f);
    return flagged;
}

static bool owner_dumps;

static void owner_mapped(void *opaque, void *addr, size_t len)
{
    g_assert(madvise(addr, len, owner_dumps ? MADV_DODUMP
                                            : MADV_DONTDUMP) == 0);
}

/*
 * The owner changed its mind on core dumps after adding the memory: that holds
 * for whatever is merged, discarded or unmerged.
 */
static void test_mapped(void)
{
    static const KsmRegionOps ops = { .mapped = owner_mapped };
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM);
    KsmRegion *r;
    unsigned all;
    Mem *m;

    for (int dumps = 0; e && dumps < 2; dumps++) {
        m = mem_new(2048, 0, MEM_SMALL);
        mem_fill_run(m, 0, 1024, 1, 1);
        mem_fill_run(m, 1024, 1024, 1, 1);
        owner_dumps = !dumps;
        owner_mapped(NULL, m->addr, m->pages * PAGE);
        r = util_add(e, m, &ops);
        owner_dumps = dumps;
        owner_mapped(NULL, m->addr, m->pages * PAGE);
        util_passes(e, 6);
        g_assert(util_stats(e).pages_sharing >= 1000);
        g_assert(ksm_discard(r, 10 * PAGE, 20 * PAGE) == 0);
        mem_gone(m, 10, 20);
        g_assert(ksm_unmerge(r, 100 * PAGE, 300 * PAGE) == 0);
        g_assert(not_dumped(m, &all) == (dumps ? 0 : all));
        g_assert(all > 2);
        mem_check(m);
        util_remove(r);
        mem_free(m);
    }
    if (e) {
        ksm_engine_free(e);
    }
}

/* --- system calls --- */

/* Without files or memory each says what was wrong, and does nothing. */
static void test_prim_errors(void)
{
    char page[8] = "";
    size_t done = 99;
    UffdRange range = { .fd = -1, .addr = page, .len = PAGE };
    PmRange ranges[4];
    PmScan scan = {
        .fd = -1, .end = PAGE, .any = PM_PRESENT, .tell = PM_PRESENT,
        .vec = ranges, .vec_len = 4,
    };
    void *wrong = (void *)(uintptr_t)1;

    g_assert(prim.close(-1) == -EBADF);
    g_assert(prim.truncate(-1, PAGE) == -EBADF);
    g_assert(prim.write(-1, page, 8, 0) == -EBADF);
    g_assert(prim.read(-1, page, 8) == -EBADF);
    g_assert(prim.read_at(-1, page, 8, 0) == -EBADF);
    g_assert(prim.punch(-1, 0, PAGE) == -EBADF);
    g_assert(prim.allocate(-1, 0, PAGE) == -EBADF);
    g_assert(prim.seal_write(-1) == -EBADF);
    g_assert(prim.uffd_api(-1, 0) == -EBADF);
    g_assert(prim.uffd_register(&range, UFFD_PROTECT) == -EBADF);
    g_assert(prim.uffd_unregister(&range) == -EBADF);
    g_assert(prim.uffd_wake(&range) == -EBADF);
    g_assert(prim.uffd_protect(&range, true) == -EBADF);
    g_assert(prim.uffd_poison(-1, page, PAGE) == -EBADF);
    g_assert(prim.uffd_move(-1, page, page, PAGE, &done) == -EBADF);
    g_assert(done == 0);
    done = 99;
    g_assert(prim.uffd_copy(-1, page, page, PAGE, &done) == -EBADF);
    g_assert(done == 0);
    g_assert(prim.pagemap(&scan) == -EBADF);
    g_assert(prim.open_read("/nowhere/at/all") == -ENOENT);
    g_assert(!prim.map(NULL, PAGE, PROT_READ, MAP_PRIVATE, -1, 0));
    g_assert(errno == EBADF);
    g_assert(prim.unmap(wrong, PAGE) == -EINVAL);
    g_assert(prim.remap(wrong, PAGE, wrong) == -EINVAL);
    g_assert(!prim.lengthen(wrong, PAGE, 2 * PAGE, NULL));
    g_assert(!prim.split(wrong, PAGE));
    g_assert(prim.advise(wrong, PAGE, MADV_NORMAL) == -EINVAL);
}

/* The kernel gets what was asked for. */
static void test_prim_files(void)
{
    int fd = prim.memfd("test"), sealable = prim.memfd_sealable("test");
    char text[16] = "";
    struct stat st;
    char *mapped;

    g_assert(fd >= 0 && sealable >= 0);
    g_assert(fcntl(fd, F_GETFD) == FD_CLOEXEC);
    g_assert(fcntl(sealable, F_GETFD) == FD_CLOEXEC);
    g_assert(prim.truncate(fd, 8 * PAGE) == 0);
    g_assert(fstat(fd, &st) == 0 && st.st_size == (off_t)(8 * PAGE));
    g_assert(st.st_blocks == 0);
    g_assert(prim.allocate(fd, 0, 16 * PAGE) == 0);
    g_assert(fstat(fd, &st) == 0 && st.st_size == (off_t)(8 * PAGE));
    g_assert(st.st_blocks == (blkcnt_t)(16 * PAGE / 512));
    g_assert(prim.write(fd, "hello", 5, PAGE) == 5);
    g_assert(prim.read_at(fd, text, 4, PAGE + 1) == 4);
    g_assert(g_str_equal(text, "ello"));
    g_assert(lseek(fd, PAGE, SEEK_SET) == (off_t)PAGE);
    g_assert(prim.read(fd, text, 2) == 2 && text[0] == 'h');
    g_assert(prim.punch(fd, PAGE, PAGE) == 0);
    g_assert(fstat(fd, &st) == 0 && st.st_size == (off_t)(8 * PAGE));
    g_assert(st.st_blocks == (blkcnt_t)(15 * PAGE / 512));
    g_assert(prim.read_at(fd, text, 4, PAGE) == 4 && text[0] == 0);
    /* one can be sealed, unless mapped, the other cannot */
    g_assert(prim.seal_write(fd) == -EPERM);
    mapped = prim.map(NULL, PAGE, PROT_NONE, MAP_SHARED, sealable, 0);
    g_assert(mapped && prim.seal_write(sealable) == -EBUSY);
    g_assert(prim.unmap(mapped, PAGE) == 0);
    g_assert(prim.seal_write(sealable) == 0);
    g_assert(prim.write(sealable, "x", 1, 0) == -EPERM);
    g_assert(prim.close(fd) == 0 && fcntl(fd, F_GETFD) < 0);
    g_assert(prim.close(sealable) == 0);
    fd = prim.open_read("/proc/self/maps");
    g_assert(fcntl(fd, F_GETFD) == FD_CLOEXEC);
    g_assert((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY);
    g_assert(prim.close(fd) == 0);
}

static void test_prim_memory(void)
{
    char *a = prim.map(NULL, 4 * PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *b = prim.map(NULL, 4 * PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    g_assert(a && b);
    a[PAGE] = 'a';
    b[0] = 'b';
    g_assert(prim.remap(a, 2 * PAGE, b) == 0);
    g_assert(b[PAGE] == 'a' && b[0] == 0);
    /* its old place is empty */
    g_assert(prim.advise(a, 2 * PAGE, MADV_NORMAL) == -ENOMEM);
    g_assert(prim.advise(a + 2 * PAGE, 2 * PAGE, MADV_DONTNEED) == 0);
    g_assert(prim.lengthen(b, 2 * PAGE, 4 * PAGE, a) == a);
    g_assert(a[PAGE] == 'a' && a[3 * PAGE] == 0);
    b = prim.split(a, 2 * PAGE);
    g_assert(b && b[PAGE] == 'a' && a[PAGE] == 0);
    b[PAGE] = 'b';
    g_assert(prim.unmap(b, 2 * PAGE) == 0);
    a[PAGE] = 'a';
    b = prim.lengthen(a, 4 * PAGE, 64 * PAGE, NULL);
    g_assert(b && b[PAGE] == 'a' && b[63 * PAGE] == 0);
    g_assert(prim.unmap(b, 64 * PAGE) == 0);
    g_assert(prim.advise(b, 64 * PAGE, MADV_NORMAL) == -ENOMEM);
}

static void test_prim_node(void)
{
    unsigned long mask[16] = { 0 }, before[16] = { 0 };
    int mode, was;
    int ret = prim.thread_policy_get(&was, before, 1024);

    if (ret == -ENOSYS || ret == -EPERM) {
        g_test_skip("a kernel without NUMA, or not permitted");
        return;
    }
    g_assert(ret == 0);
    g_assert(prim.prefer_node(0) == 0);
    g_assert(prim.thread_policy_get(&mode, mask, 1024) == 0);
    g_assert(mode == 1 && mask[0] == 1);
    /* a missing node is refused, and no node is the default */
    g_assert(prim.prefer_node(1000) == -EINVAL);
    g_assert(prim.thread_policy_get(&mode, mask, 1024) == 0);
    g_assert(mode == 1 && mask[0] == 1);
    for (int node = -1; node <= 1024; node += 1025) {
        g_assert(prim.prefer_node(0) == 0);
        g_assert(prim.prefer_node(node) == 0);
        g_assert(prim.thread_policy_get(&mode, mask, 1024) == 0);
        g_assert(mode == 0);
    }
    mask[0] = 1;
    g_assert(prim.thread_policy_set(1, mask, 1024) == 0);
    g_assert(prim.thread_policy_get(&mode, mask, 1024) == 0);
    g_assert(mode == 1);
    g_assert(prim.thread_policy_set(was, was ? before : NULL,
                                    was ? 1024 : 0) == 0);
}

/* Memory of a range comes from node 0 alone. */
static void test_prim_policy(void)
{
    unsigned long mask[16] = { 1 }, got[16] = { 0 };
    size_t len = 2 * PAGE;
    char *a = prim.map(NULL, 2 * len, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int mode = -1, ret;

    g_assert(a);
    ret = prim.policy_set(a, len, 2, mask, 1024);
    if (ret == -ENOSYS || ret == -EPERM) {
        g_test_skip("a kernel without NUMA, or not permitted");
        prim.unmap(a, 2 * len);
        return;
    }
    g_assert(ret == 0);
    g_assert(prim.policy_get(a, &mode, got, 1024) == 0);
    g_assert(mode == 2 && got[0] == 1);
    g_assert(prim.policy_get(a + len, &mode, got, 1024) == 0);
    g_assert(mode == 0);
    g_assert(prim.policy_set(a, len, 0, NULL, 0) == 0);
    g_assert(prim.policy_get(a, &mode, got, 1024) == 0 && mode == 0);
    g_assert(prim.unmap(a, 2 * len) == 0);
}

/* Nothing is no error, whatever failed before. */
static void test_prim_nothing(void)
{
    char *a = prim.map(NULL, PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int fd = prim.memfd("test"), pagemap = prim.open_read("/proc/self/pagemap");
    PmRange ranges[4];
    PmScan scan = {
        .fd = pagemap, .start = (uintptr_t)a, .end = (uintptr_t)a + PAGE,
        .any = PM_PRESENT, .tell = PM_PRESENT, .vec = ranges, .vec_len = 4,
    };
    char c = 'c';

    g_assert(a && fd >= 0 && pagemap >= 0);
    errno = EIO;
    g_assert(prim.write(fd, &c, 0, 0) == 0);
    g_assert(prim.read(fd, &c, 1) == 0);
    g_assert(prim.read_at(fd, &c, 1, 0) == 0);
    /* PAGEMAP_SCAN came with Linux 6.7 */
    if (prim.pagemap(&scan) != -ENOTTY) {
        errno = EIO;
        g_assert(prim.pagemap(&scan) == 0 && scan.walk_end == scan.end);
        *a = 1;
        scan.walk_end = 0;
        g_assert(prim.pagemap(&scan) == 1 && scan.walk_end == scan.end);
        g_assert(ranges[0].start == scan.start && ranges[0].end == scan.end);
        g_assert(ranges[0].kinds == PM_PRESENT);
    }
    g_assert(prim.unmap(a, PAGE) == 0);
    g_assert(prim.close(fd) == 0 && prim.close(pagemap) == 0);
}

static uint64_t clock_of(clockid_t id)
{
    struct timespec ts;

    g_assert(clock_gettime(id, &ts) == 0);
    return ts.tv_sec * UINT64_C(1000000000) + ts.tv_nsec;
}

static void test_prim_this(void)
{
    uint64_t before = clock_of(CLOCK_MONOTONIC), now = prim.now_ns();
    uint64_t cpu_before, cpu;
    struct rlimit limit, less;
    sigset_t old, seen;

    g_assert(now >= before && now <= clock_of(CLOCK_MONOTONIC));
    cpu_before = clock_of(CLOCK_THREAD_CPUTIME_ID);
    cpu = prim_real.cpu_ns();
    g_assert(cpu >= cpu_before);
    g_assert(cpu <= clock_of(CLOCK_THREAD_CPUTIME_ID));
    g_assert(prim_real.random() != prim_real.random());
    now = prim.now_ns();
    prim_real.pause(3000);
    g_assert(prim.now_ns() - now >= 3000000);
    g_assert(prim.page_size() == getauxval(AT_PAGESZ));
    /* the limit of files, or none */
    g_assert(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    less = limit;
    less.rlim_cur = MIN(limit.rlim_max, 1u << 30);
    g_assert(setrlimit(RLIMIT_FSIZE, &less) == 0);
    g_assert(prim.file_limit() == less.rlim_cur);
    g_assert(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    g_assert(prim.file_limit() == (limit.rlim_cur == RLIM_INFINITY
                                   ? SIZE_MAX : limit.rlim_cur));
    /* of memory, whichever is less */
    g_assert(getrlimit(RLIMIT_DATA, &limit) == 0);
    less = limit;
    less.rlim_cur = MIN(limit.rlim_max, UINT64_C(1) << 40);
    g_assert(setrlimit(RLIMIT_DATA, &less) == 0);
    g_assert(prim.memory_limit() <= less.rlim_cur);
    g_assert(setrlimit(RLIMIT_DATA, &limit) == 0);
    g_assert(prim_kernel() >= 3000);
    prim.signals_block(&old);
    g_assert(pthread_sigmask(SIG_SETMASK, NULL, &seen) == 0);
    g_assert(sigismember(&seen, SIGUSR1) && sigismember(&seen, SIGTERM));
    prim.signals_restore(&old);
    g_assert(pthread_sigmask(SIG_SETMASK, NULL, &seen) == 0);
    g_assert(sigismember(&seen, SIGUSR1) == sigismember(&old, SIGUSR1));
    g_assert(!sigismember(&seen, SIGTERM));
}

/* The third read of a file fails. */
static unsigned reads, closed;

static ssize_t read_fails(int fd, void *buf, size_t len)
{
    return ++reads == 3 ? -EIO : prim_real.read(fd, buf, len);
}

static int close_counts(int fd)
{
    closed++;
    return prim_real.close(fd);
}

/* A file of more than a page is read whole, or not at all. */
static void test_prim_read_file(void)
{
    g_autofree char *text = g_strnfill(20000, 'x');
    g_autofree char *path = NULL;
    g_autofree char *got = NULL;
    size_t len = 0;
    int fd = g_file_open_tmp("ksm-XXXXXX", &path, NULL);

    g_assert(fd >= 0 && write(fd, text, 20000) == 20000);
    close(fd);
    prim.close = close_counts;
    got = prim_read_file(path, &len);
    g_assert(got && len == 20000 && g_str_equal(got, text) && closed == 1);
    g_free(g_steal_pointer(&got));
    got = prim_read_file(path, NULL);
    g_assert(got && g_str_equal(got, text));
    prim.read = read_fails;
    len = 7;
    g_assert(!prim_read_file(path, &len) && errno == EIO);
    g_assert(len == 7 && closed == 3);
    prim = prim_real;
    unlink(path);
    g_assert(!prim_read_file(path, NULL) && errno == ENOENT);
}

/* --- userfaultfd --- */

/* *@inherited: those that an executed program would have. */
static unsigned fds_open(unsigned *inherited)
{
    unsigned n = 0;

    *inherited = 0;
    for (int fd = 0; fd < 1024; fd++) {
        int flags = fcntl(fd, F_GETFD);

        n += flags >= 0;
        *inherited += flags >= 0 && !(flags & FD_CLOEXEC);
    }
    return n;
}

/* A kernel that refuses some calls; 0: that one works. */
typedef struct Refuses {
    const char *name;
    int uffd, open, ioctl;      /* errno: the call, /dev/userfaultfd, its */
    KsmError code;
    const char *text;           /* NULL: it works all the same */
} Refuses;

#define IOC_UFFD_NEW 0xaa00u

/* For this process, for good; nor has the kernel any randomness. */
static bool refuse_calls(const Refuses *c)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, c->uffd ? SECCOMP_RET_ERRNO | c->uffd
                                          : SECCOMP_RET_ALLOW),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, c->open ? SECCOMP_RET_ERRNO | c->open
                                          : SECCOMP_RET_ALLOW),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getrandom, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                 offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, IOC_UFFD_NEW, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, c->ioctl ? SECCOMP_RET_ERRNO | c->ioctl
                                           : SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog prog = { G_N_ELEMENTS(code), code };

    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) == 0;
}

static void in_refusing(const Refuses *c)
{
    g_autoptr(GError) error = NULL;
    uint64_t any = 0, all = UINT64_MAX;
    unsigned before, after, inherited;
    int fd;

    /* the first file gets this number */
    close(STDIN_FILENO);
    before = fds_open(&inherited);
    if (!refuse_calls(c)) {
        _exit(77);
    }
    for (unsigned i = 0; i < 64; i++) {
        any |= prim_real.random();
        all &= prim_real.random();
    }
    g_assert(any == UINT64_MAX && all == 0);
    errno = EPERM;      /* of another call */
    fd = prim.uffd();
    if (c->text) {
        g_assert(fd < 0 && !ksm_supported(&error));
        g_assert(g_error_matches(error, KSM_ERROR, c->code));
        g_assert(strstr(error->message, c->text));
    } else {
        g_assert(fd >= 0 && ksm_supported(NULL));
        g_assert(fcntl(fd, F_GETFD) == FD_CLOEXEC);
        g_assert(fcntl(fd, F_GETFL) & O_NONBLOCK);
        close(fd);
    }
    after = fds_open(&inherited);
    g_assert(after == before);
    _exit(0);
}

/* Missing userfaultfd is explained right, and nothing stays open. */
static void test_uffd(gconstpointer data)
{
    const Refuses *c = data;
    int status;
    pid_t pid;

    if (access("/dev/userfaultfd", R_OK | W_OK) < 0 ||
        !ksm_supported(NULL)) {
        g_test_skip("not permitted here");
        return;
    }
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
        in_refusing(c);
    }
    g_assert(pid > 0 && waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
        g_test_skip("a kernel without seccomp filters");
        return;
    }
    g_assert(status == 0);
}

static const Refuses refuses[] = {
    { .name = "none" },
    { .name = "call", .uffd = EPERM },
    { .name = "device", .uffd = EPERM, .open = EACCES,
      .code = KSM_ERROR_PERMISSION, .text = "/dev/userfaultfd" },
    { .name = "ioctl", .uffd = EPERM, .ioctl = EMFILE,
      .code = KSM_ERROR_RESOURCES, .text = "cannot open a userfaultfd" },
    { .name = "files", .uffd = ENFILE,
      .code = KSM_ERROR_RESOURCES, .text = "cannot open a userfaultfd" },
    { .name = "memory", .uffd = ENOMEM,
      .code = KSM_ERROR_RESOURCES, .text = "cannot open a userfaultfd" },
    { .name = "kernel", .uffd = ENOSYS,
      .code = KSM_ERROR_UNSUPPORTED, .text = "the kernel lacks userfaultfd" },
};

/* An executed program gets no files of an engine. */
static void test_cloexec(void)
{
    unsigned before, during, inherited, more;
    KsmEngine *e;

    before = fds_open(&inherited);
    e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_AUTO);
    if (!e) {
        return;
    }
    during = fds_open(&more);
    g_assert(during > before && more == inherited);
    ksm_engine_free(e);
    g_assert(fds_open(&more) == before);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/host/machine", test_machine);
    g_test_add_func("/host/group-fd", test_group_fd);
    g_test_add_func("/host/page-size", test_page_size);
    g_test_add_func("/host/tags", test_tags);
    g_test_add_func("/host/mapped", test_mapped);
    g_test_add_func("/host/prim/errors", test_prim_errors);
    g_test_add_func("/host/prim/files", test_prim_files);
    g_test_add_func("/host/prim/memory", test_prim_memory);
    g_test_add_func("/host/prim/node", test_prim_node);
    g_test_add_func("/host/prim/policy", test_prim_policy);
    g_test_add_func("/host/prim/nothing", test_prim_nothing);
    g_test_add_func("/host/prim/this", test_prim_this);
    g_test_add_func("/host/prim/read-file", test_prim_read_file);
    for (unsigned i = 0; i < G_N_ELEMENTS(refuses); i++) {
        g_autofree char *path = g_strconcat("/host/uffd/", refuses[i].name,
                                            NULL);

        g_test_add_data_func(path, &refuses[i], test_uffd);
    }
    g_test_add_func("/host/cloexec", test_cloexec);
    return g_test_run();
}
