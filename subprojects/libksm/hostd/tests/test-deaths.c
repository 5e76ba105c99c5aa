/*
 * hostd tests: either side dies at every message
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Two members and a daemon, each a process, the code of all three as it is;
 * time goes SPEED times as fast.  Members write to their memory, merge it, and
 * hold all of it against what they wrote.  One side is killed before it sends
 * its Nth message, or when it has received it, for every N (or every --step):
 * no chance is involved in where.  Then there is another in its place, all is
 * merged that can be, in the pool of the daemon that is there then; when all
 * members have left no slot is in use.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <glib.h>

#include "base/page.h"
#include "base/prim.h"
#include "libksm.h"
#include "serve.h"
#include "socket.h"
#include "sys.h"

#define SPEED       8u
#define MEMBERS     2u
#define SHARED      96u     /* pages that are the same in both */
#define CHURNED     16u     /* ... and are written */
#define PAGES       160u
#define CHURN_US    1500000 /* while messages are counted */
#define WAIT_US     30000000

typedef enum Victim { VICTIM_DAEMON, VICTIM_MEMBER, VICTIM_NONE } Victim;

/* What the processes see of each other. */
typedef struct Board {
    unsigned stop, settle;
    unsigned merged[MEMBERS];
    unsigned used, members;     /* of the daemon */
    unsigned messages;          /* of the victim */
} Board;

static Board *board;
static char *directory, *path;
static unsigned die_at;

static uint64_t fast_now(void)
{
    return prim_real.now_ns() * SPEED;
}

static void message(void)
{
    if (__atomic_fetch_add(&board->messages, 1, __ATOMIC_RELAXED) == die_at) {
        raise(SIGKILL);
    }
}

static int member_send(int fd, const void *data, size_t len)
{
    message();
    return prim_real.send(fd, data, len);
}

static ssize_t member_receive(int fd, void *data, size_t len, int *fds,
                              unsigned n_fds)
{
    ssize_t n = prim_real.receive(fd, data, len, fds, n_fds);

    if (n > 0) {
        message();
    }
    return n;
}

static ssize_t daemon_send(int fd, const struct msghdr *m)
{
    message();
    return sys_real.send(fd, m);
}

static ssize_t daemon_receive(int fd, struct msghdr *m)
{
    ssize_t n = sys_real.receive(fd, m);

    if (n > 0) {
        message();
    }
    return n;
}

/* --- the daemon --- */

static gboolean report(gpointer data)
{
    const Server *s = data;

    __atomic_store_n(&board->used, s->group.used, __ATOMIC_RELAXED);
    __atomic_store_n(&board->members, s->group.members, __ATOMIC_RELAXED);
    return G_SOURCE_CONTINUE;
}

static void G_GNUC_NORETURN daemon_main(bool dies)
{
    static Server s;
    GroupConfig config = { .slots = 8192, .max_holds = 64, .max_members = 16,
                           .share = 100, .root = "/" };
    g_autofree char *note = NULL;
    PoolFile file;

    g_assert(poolfile_make(&file, config.slots * PAGE_BYTES, &note) == 0);
    g_assert(sys.random(&config.key, sizeof(config.key)) == 0);
    if (dies) {
        sys.send = daemon_send;
        sys.receive = daemon_receive;
    }
    g_assert(server_init(&s, &config, &file, socket_listener(path)) == 0);
    g_timeout_add(5, report, &s);
    g_main_loop_run(g_main_loop_new(NULL, FALSE));
    _exit(0);
}

/* --- a member --- */

typedef struct Memory {
    char *addr, *shadow;
} Memory;

static void page_fill(Memory *m, unsigned page, uint64_t content)
{
    uint64_t *at = (uint64_t *)(m->shadow + page * PAGE_BYTES);

    for (unsigned i = 0; i < PAGE_BYTES / 8; i++) {
        at[i] = content * UINT64_C(0x9e3779b97f4a7c15) + i;
    }
    memcpy(m->addr + page * PAGE_BYTES, at, PAGE_BYTES);
}

static void memory_check(const Memory *m)
{
    for (unsigned i = 0; i < PAGES; i++) {
        if (memcmp(m->addr + i * PAGE_BYTES, m->shadow + i * PAGE_BYTES,
                   PAGE_BYTES)) {
            g_error("page %u is not what was written", i);
        }
    }
}

static KsmEngine *engine_new(void)
{
    g_autoptr(GError) error = NULL;
    KsmConfig config;
    KsmEngine *e;

    ksm_config_init(&config);
    config.scope = KSM_SCOPE_GROUP;
    config.group = "deaths";
    config.group_socket = path;
    config.max_cpu = 100;
    config.smart_scan = false;
    e = ksm_engine_new(&config, &error);
    if (!e) {
        g_error("%s", error->message);
    }
    return e;
}

/* A shared page is another one for a while. */
static void churn(Memory *m, unsigned number, unsigned turn)
{
    unsigned page = turn / 8 % CHURNED;

    page_fill(m, SHARED + turn % (PAGES - SHARED), turn << 8 | number);
    if (turn % 8 == 0) {
        page_fill(m, page, (uint64_t)turn << 8 | number | 128);
    } else if (turn % 8 == 4) {
        page_fill(m, page, page + 1);
    }
}

static void member_turn(KsmEngine *e, Memory *m, unsigned number)
{
    int64_t wait = ksm_step(e, 0);
    KsmStats stats;

    memory_check(m);
    ksm_engine_get_stats(e, &stats);
    __atomic_store_n(&board->merged[number],
                     stats.pages_sharing + stats.pages_shared,
                     __ATOMIC_RELAXED);
    g_usleep(wait < 0 ? 1000 : MIN(wait / 1000 / SPEED, 2000));
}

static void G_GNUC_NORETURN member_main(unsigned number, bool dies)
{
    size_t len = PAGES * PAGE_BYTES;
    g_autoptr(GError) error = NULL;
    KsmRegion *region;
    KsmEngine *e;
    Memory m;

    prim.now_ns = fast_now;
    if (dies) {
        prim.send = member_send;
        prim.receive = member_receive;
    }
    m.shadow = g_malloc(len);
    m.addr = mmap(NULL, len, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    g_assert(m.addr != MAP_FAILED);
    g_assert(madvise(m.addr, len, MADV_DONTFORK) == 0);
    g_assert(madvise(m.addr, len, MADV_NOHUGEPAGE) == 0);
    for (unsigned i = 0; i < PAGES; i++) {
        page_fill(&m, i, i < SHARED ? i + 1 : (i << 8 | number));
    }
    e = engine_new();
    region = ksm_region_add(e, m.addr, len, -1, NULL, NULL, &error);
    if (!region) {
        g_error("%s", error->message);
    }
    /* in the end all is as it was at first */
    for (unsigned turn = 0; turn % 8 ||
         !__atomic_load_n(&board->settle, __ATOMIC_RELAXED); turn++) {
        churn(&m, number, turn);
        member_turn(e, &m, number);
    }
    while (!__atomic_load_n(&board->stop, __ATOMIC_RELAXED)) {
        member_turn(e, &m, number);
    }
    g_assert(ksm_region_remove(region, KSM_REMOVE_UNMERGE) == 0);
    memory_check(&m);
    ksm_engine_free(e);
    _exit(0);
}

/* --- the test --- */

static pid_t start(Victim what, unsigned number, bool dies)
{
    pid_t pid;

    fflush(stdout);
    pid = fork();
    g_assert(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (what == VICTIM_DAEMON) {
            daemon_main(dies);
        }
        member_main(number, dies);
    }
    return pid;
}

static pid_t daemon_start(bool dies)
{
    pid_t pid = start(VICTIM_DAEMON, 0, dies);

    for (unsigned i = 0; i < 1000 && access(path, F_OK); i++) {
        g_usleep(1000);
    }
    return pid;
}

/*
 * But for those that stand alone (an isolation for one page does not pay), and
 * those that were written after they were merged: nobody tells of devices that
 * may be busy, so they stay.
 */
static bool is_merged(void)
{
    bool all = true;

    for (unsigned i = 0; i < MEMBERS; i++) {
        all &= __atomic_load_n(&board->merged[i], __ATOMIC_RELAXED) >=
               SHARED - SHARED / 4;
    }
    return all;
}

static bool is_empty(void)
{
    return !__atomic_load_n(&board->used, __ATOMIC_RELAXED) &&
           !__atomic_load_n(&board->members, __ATOMIC_RELAXED);
}

static void wait_until(bool (*is)(void), const char *what)
{
    gint64 end = g_get_monotonic_time() + WAIT_US;

    while (!is()) {
        if (g_get_monotonic_time() > end) {
            g_error("not %s: %u and %u of %u pages are merged, %u slots are "
                    "used, by %u members; killed at message %u", what,
                    board->merged[0], board->merged[1], SHARED, board->used,
                    board->members, die_at);
        }
        g_usleep(2000);
    }
}

/* Has it died, by its own hand? */
static bool has_died(pid_t pid)
{
    gint64 end = g_get_monotonic_time() + CHURN_US;
    int status = 0;

    while (g_get_monotonic_time() < end) {
        if (waitpid(pid, &status, WNOHANG) == pid) {
            g_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
            return true;
        }
        g_usleep(1000);
    }
    return false;
}

static void ends_well(pid_t pid)
{
    int status;

    g_assert(waitpid(pid, &status, 0) == pid && status == 0);
}

/* Is it, and in the pool of the daemon that is there now? */
static bool has_moved(void)
{
    return is_merged() && __atomic_load_n(&board->used, __ATOMIC_RELAXED) >=
                          SHARED - SHARED / 4;
}

/* False: there are fewer messages than that. */
static bool run_once(Victim victim, unsigned at)
{
    pid_t daemon, member[MEMBERS];
    bool died;

    memset(board, 0, sizeof(*board));
    die_at = at;
    daemon = daemon_start(victim == VICTIM_DAEMON);
    for (unsigned i = 0; i < MEMBERS; i++) {
        member[i] = start(VICTIM_MEMBER, i, victim == VICTIM_MEMBER && i == 0);
    }
    died = has_died(victim == VICTIM_DAEMON ? daemon : member[0]);
    if (died && victim == VICTIM_DAEMON) {
        board->used = 0;
        daemon = daemon_start(false);
    } else if (died) {
        board->merged[0] = 0;
        member[0] = start(VICTIM_MEMBER, 0, false);
    } else {
        die_at = UINT_MAX;
        __atomic_store_n(&board->messages, 0, __ATOMIC_RELAXED);
        kill(victim == VICTIM_DAEMON ? daemon : member[0], SIGKILL);
    }
    if (died) {
        __atomic_store_n(&board->settle, 1, __ATOMIC_RELAXED);
        wait_until(victim == VICTIM_DAEMON ? has_moved : is_merged, "merged");
        __atomic_store_n(&board->stop, 1, __ATOMIC_RELAXED);
        for (unsigned i = 0; i < MEMBERS; i++) {
            ends_well(member[i]);
        }
        wait_until(is_empty, "empty");
    }
    for (unsigned i = 0; i < MEMBERS; i++) {
        kill(member[i], SIGKILL);
        waitpid(member[i], NULL, 0);
    }
    kill(daemon, SIGKILL);
    waitpid(daemon, NULL, 0);
    unlink(path);
    return died;
}

static unsigned step = 1;

static void test_victim(gconstpointer data)
{
    Victim victim = GPOINTER_TO_UINT(data);
    const char *only = g_getenv("KSM_DEATH_AT");
    unsigned at = 0, runs = 0;

    if (only) {
        run_once(victim, atoi(only));
        return;
    }
    while (run_once(victim, at)) {
        at += step;
        runs++;
    }
    g_test_message("killed at %u of %u messages", runs, at);
    g_assert(runs >= 12 / step);
}

int main(int argc, char **argv)
{
    g_autoptr(GError) error = NULL;
    int ret;

    g_test_init(&argc, &argv, NULL);
    if (!ksm_supported(&error)) {
        printf("1..0 # SKIP %s\n", error->message);
        return 77;
    }
    if (g_getenv("KSM_DEATH_STEP")) {
        step = MAX(1, atoi(g_getenv("KSM_DEATH_STEP")));
    }
    board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    g_assert(board != MAP_FAILED);
    directory = g_dir_make_tmp("ksm-deaths-XXXXXX", NULL);
    g_assert(directory);
    path = g_build_filename(directory, "socket", NULL);
    g_test_add_data_func("/deaths/daemon", GUINT_TO_POINTER(VICTIM_DAEMON),
                         test_victim);
    g_test_add_data_func("/deaths/member", GUINT_TO_POINTER(VICTIM_MEMBER),
                         test_victim);
    ret = g_test_run();
    rmdir(directory);
    return ret;
}
