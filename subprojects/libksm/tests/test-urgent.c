/*
 * libksm tests: the priority of a thread for which others wait
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>

#include "base/urgent.h"
#include "rooms.h"
#include "still.h"

#define SLACK 1234

/* This thread, as far as the engine knows. */
static struct {
    int policy;             /* or -errno */
    int slack;
    size_t limit;
    int refuse, keep;       /* -errno of each raise, and of each way back */
    unsigned gets, sets;
    int uffd_wp;            /* where writers are blocked by it */
    unsigned moves, blocks, wakes;  /* calls for which others wait */
} h;

static int h_get(void)
{
    h.gets++;
    return h.policy;
}

/* As the kernel does: who returns has the default. */
static int h_set(int policy)
{
    bool up = (policy & ~SCHED_RESET_ON_FORK) == SCHED_FIFO;
    int ret = up ? h.refuse : h.keep;

    h.sets++;
    if (ret == 0) {
        h.policy = policy;
        h.slack = up ? 0 : 50000;
    }
    return ret;
}

static int h_slack_get(void)
{
    return h.slack;
}

static int h_slack_set(int ns)
{
    g_assert(ns > 0);       /* 0: the default */
    h.slack = ns;
    return 0;
}

static size_t h_limit(void)
{
    return h.limit;
}

static void thread_is(int policy)
{
    memset(&h, 0, sizeof(h));
    h.policy = policy;
    h.slack = SLACK;
    h.limit = SIZE_MAX;
    prim.sched_get = h_get;
    prim.sched_set = h_set;
    prim.slack_get = h_slack_get;
    prim.slack_set = h_slack_set;
    prim.realtime_limit = h_limit;
}

static void test_fair(void)
{
    static const int policies[] = { SCHED_OTHER, SCHED_BATCH, SCHED_IDLE };

    for (unsigned i = 0; i < 2 * G_N_ELEMENTS(policies); i++) {
        int flag = i % 2 ? SCHED_RESET_ON_FORK : 0;
        int policy = policies[i / 2] | flag;
        KsmUrgent u = { 0 };

        thread_is(policy);
        for (unsigned k = 1; k < 3; k++) {
            urgent_begin(&u);
            g_assert(h.policy == (SCHED_FIFO | flag));
            urgent_end(&u);
            g_assert(h.policy == policy && h.sets == 2 * k);
            g_assert(h.slack == SLACK);
        }
    }
    still_calls();
}

/* Whoever gave it another class knows why; or nobody can tell. */
static void test_other(void)
{
    static const int policies[] = {
        SCHED_FIFO, SCHED_RR, 6 /* deadline */, 7 /* a BPF program's */,
        SCHED_FIFO | SCHED_RESET_ON_FORK, -ENOSYS,
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(policies); i++) {
        KsmUrgent u = { 0 };

        thread_is(policies[i]);
        urgent_begin(&u);
        urgent_end(&u);
        g_assert(h.gets == 1 && h.sets == 0);
    }
    still_calls();
}

/* Somebody gives it another class meanwhile. */
static void test_changed(void)
{
    KsmUrgent u = { 0 };

    thread_is(SCHED_OTHER);
    urgent_begin(&u);
    h.policy = SCHED_RR;
    urgent_end(&u);
    g_assert(h.policy == SCHED_RR && h.sets == 1 && !u.raised);
    still_calls();
}

/* Where it is not permitted it is tried once; where it is limited, never. */
static void test_denied(void)
{
    for (unsigned limited = 0; limited < 2; limited++) {
        KsmUrgent u = { 0 };

        thread_is(SCHED_OTHER);
        h.limit = limited ? 200000 : SIZE_MAX;
        h.refuse = limited ? 0 : -EPERM;
        for (unsigned i = 0; i < 3; i++) {
            urgent_begin(&u);
            urgent_end(&u);
        }
        g_assert(h.gets == 1 && h.sets == !limited);
        g_assert(h.policy == SCHED_OTHER);
    }
    still_calls();
}

static void warning_seen(const gchar *domain, GLogLevelFlags level,
                         const gchar *message, gpointer opaque)
{
    unsigned *seen = opaque;

    *seen += level & G_LOG_LEVEL_WARNING &&
             strstr(message, "keeps a realtime priority");
}

/* It cannot be given up: said once, and never taken again. */
static void test_kept(void)
{
    KsmUrgent u = { 0 };
    GLogLevelFlags fatal;
    unsigned seen = 0;
    GLogFunc was;

    thread_is(SCHED_OTHER);
    h.keep = -EPERM;
    urgent_begin(&u);
    fatal = g_log_set_always_fatal(G_LOG_LEVEL_ERROR | G_LOG_LEVEL_CRITICAL);
    was = g_log_set_default_handler(warning_seen, &seen);
    urgent_end(&u);
    g_log_set_default_handler(was, NULL);
    g_log_set_always_fatal(fatal);
    g_assert(seen == 1);
    /* also when somebody has done it for us */
    h.policy = SCHED_OTHER;
    urgent_begin(&u);
    urgent_end(&u);
    g_assert(h.sets == 2);
    still_calls();
}

/* Nobody knows the slack: then nothing is set. */
static void test_slack(void)
{
    KsmUrgent u = { 0 };

    thread_is(SCHED_OTHER);
    h.slack = -EINVAL;
    urgent_begin(&u);
    urgent_end(&u);
    g_assert(h.policy == SCHED_OTHER && h.slack == 50000);
    still_calls();
}

static void real_check(int policy, int nice, int slack)
{
    struct sched_param param;

    g_assert(prim_real.sched_get() == policy);
    g_assert(policy == SCHED_FIFO || prim_real.slack_get() == slack);
    g_assert(sched_getparam(0, &param) == 0);
    g_assert(param.sched_priority == (policy == SCHED_FIFO));
    g_assert(getpriority(PRIO_PROCESS, 0) == nice);
}

/* As root, mostly. */
static bool may_be_realtime(void)
{
    struct sched_param param = { .sched_priority = 1 };
    bool may = sched_setscheduler(0, SCHED_FIFO, &param) == 0;
    struct rlimit limit;

    param.sched_priority = 0;
    g_assert(!may || sched_setscheduler(0, SCHED_OTHER, &param) == 0);
    g_assert(getrlimit(RLIMIT_RTTIME, &limit) == 0);
    return may && limit.rlim_cur == RLIM_INFINITY;
}

/* What the kernel does, and that it forgets nothing: in a thread to spoil. */
static void *real_main(void *opaque)
{
    static const int policies[] = { SCHED_OTHER, SCHED_BATCH, SCHED_IDLE };
    bool *denied = opaque;
    int nice = getpriority(PRIO_PROCESS, 0) + 1;

    if (setpriority(PRIO_PROCESS, 0, nice) < 0) {
        nice--;
    }
    *denied = !may_be_realtime();
    for (unsigned i = 0; i < G_N_ELEMENTS(policies); i++) {
        KsmUrgent u = { 0 };

        if (*denied && prim_real.sched_set(policies[i]) < 0) {
            break;
        }
        g_assert(prim_real.sched_set(policies[i]) == 0);
        g_assert(prim_real.slack_set(77) == 0);
        urgent_begin(&u);
        g_assert(u.denied == *denied);
        real_check(u.denied ? policies[i] : SCHED_FIFO, nice, 77);
        urgent_end(&u);
        real_check(policies[i], nice, 77);
    }
    return NULL;
}

static void test_real(void)
{
    bool denied = false;
    pthread_t thread;

    g_assert(pthread_create(&thread, NULL, real_main, &denied) == 0);
    pthread_join(thread, NULL);
    if (denied) {
        g_test_skip("no realtime priority for this user (CAP_SYS_NICE or "
                    "RLIMIT_RTPRIO; no RLIMIT_RTTIME)");
    }
}

/* --- whoever waits waits for an urgent thread --- */

static int h_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    g_assert(h.policy == SCHED_FIFO);
    h.moves++;
    return prim_real.uffd_move(fd, to, from, len, done);
}

static int h_protect(const UffdRange *range, bool on)
{
    if (range->fd == h.uffd_wp) {
        g_assert(h.policy == SCHED_FIFO);
        h.blocks++;
    }
    return prim_real.uffd_protect(range, on);
}

/* The last thing that who waits waits for. */
static int h_wake(const UffdRange *range)
{
    g_assert(h.policy == SCHED_FIFO);
    h.wakes++;
    return prim_real.uffd_wake(range);
}

static bool never_busy(void *opaque, void *addr, size_t len)
{
    return false;
}

static void test_isolated(void)
{
    static const KsmRegionOps ops = { .busy = never_busy };
    Pair s;

    if (!pair_open(&s, KSM_DIRTY_PAGEMAP, ROOMS_SHARING, &ops, MEM_SMALL)) {
        return;
    }
    thread_is(SCHED_OTHER);
    h.uffd_wp = s.f.uffd_wp;
    prim.uffd_move = h_move;
    prim.uffd_protect = h_protect;
    prim.uffd_wake = h_wake;
    rooms_passes(&s.f, 4);
    g_assert(h.moves > 0 && h.wakes > 0 && h.policy == SCHED_OTHER);
    g_assert(rooms_sharing(&s.f) > 0);
    if (s.f.uffd_wp < 0) {
        g_test_skip("no write-protection of shared memory by userfaultfd "
                    "(Linux 5.19): nobody is blocked");
    } else {
        h.blocks = 0;
        mem_fill_run(s.a, 50, 10, 1 + 500, 1);
        rooms_quiet(&s.f, s.ra, 50, 10);
        s.f.costs = costs_guess;
        g_assert(rooms_rejoin(&s.f, s.ra, 50, 10) == 10);
        g_assert(h.blocks > 0 && h.policy == SCHED_OTHER);
        h.blocks = 0;
        g_assert(rooms_restore(&s.f, s.ra, 0, PAIR_PAGES) == 0);
        g_assert(h.blocks > 0 && h.policy == SCHED_OTHER);
    }
    still_calls();
    pair_close(&s);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/urgent/fair", test_fair);
    g_test_add_func("/urgent/other", test_other);
    g_test_add_func("/urgent/changed", test_changed);
    g_test_add_func("/urgent/denied", test_denied);
    g_test_add_func("/urgent/kept", test_kept);
    g_test_add_func("/urgent/slack", test_slack);
    g_test_add_func("/urgent/real", test_real);
    g_test_add_func("/urgent/isolated", test_isolated);
    return g_test_run();
}
