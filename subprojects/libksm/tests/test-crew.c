/*
 * libksm tests: threads that help the one that steps
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A chore that holds its helper until it is let go (a gate) makes every order
 * of giving, taking back and waiting one that a test can ask for.
 */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <glib.h>

#include "base/crew.h"
#include "base/prim.h"
#include "base/urgent.h"

#define MANY    2000u

static int mark_next;   /* atomic */

/* What a chore does: tells who did it, and as the how manieth. */
typedef struct Mark {
    KsmChore chore;
    int times;              /* atomic */
    int when;
    pthread_t who;
} Mark;

static void mark_work(void *opaque)
{
    Mark *m = opaque;

    m->who = pthread_self();
    m->when = __atomic_add_fetch(&mark_next, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&m->times, 1, __ATOMIC_SEQ_CST);
}

static void mark_give(KsmCrew *c, Mark *m)
{
    *m = (Mark) { .chore = { .work = mark_work, .opaque = m } };
    crew_give(c, &m->chore);
}

static bool mark_is_mine(const Mark *m)
{
    return pthread_equal(m->who, pthread_self());
}

/* ... and one that does not end before it may. */
typedef struct Gate {
    KsmChore chore;
    int begun, open;        /* atomic */
} Gate;

static void gate_work(void *opaque)
{
    Gate *g = opaque;

    __atomic_store_n(&g->begun, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(&g->open, __ATOMIC_SEQ_CST)) {
        g_usleep(100);
    }
}

/* Returns when a helper is at it. */
static void gate_give(KsmCrew *c, Gate *g)
{
    *g = (Gate) { .chore = { .work = gate_work, .opaque = g } };
    crew_give(c, &g->chore);
    while (!__atomic_load_n(&g->begun, __ATOMIC_SEQ_CST)) {
        g_usleep(100);
    }
}

static void gate_open(Gate *g)
{
    __atomic_store_n(&g->open, 1, __ATOMIC_SEQ_CST);
}

/* Without helpers, or a crew, all is done where it is given. */
static void test_alone(void)
{
    KsmCrew none = { 0 }, *crews[] = { NULL, &none };

    for (unsigned i = 0; i < G_N_ELEMENTS(crews); i++) {
        KsmCrew *c = crews[i];
        KsmChore nothing = { 0 };
        Mark m;

        g_assert(!crew_helps(c));
        mark_give(c, &m);
        g_assert(m.times == 1 && mark_is_mine(&m) && !m.chore.cpu_ns);
        crew_wait(c, &m.chore);
        crew_wait(c, &nothing);
        crew_pause(c);
        mark_give(c, &m);
        crew_go_on(c);
        g_assert(m.times == 1 && crew_cpu_ns(c) == 0);
    }
    g_assert(crew_set(&none, 0) == 0);
    crew_end(&none);
}

/* Each is done once, whoever does it, and before crew_wait() returns. */
static void test_each(gconstpointer data)
{
    g_autofree Mark *m = g_new0(Mark, MANY);
    KsmCrew c = { 0 };
    KsmChore nothing = { 0 };

    g_assert(crew_set(&c, GPOINTER_TO_UINT(data)) == 0);
    g_assert(crew_helps(&c) && c.n == GPOINTER_TO_UINT(data));
    crew_wait(&c, &nothing);
    for (unsigned i = 0; i < MANY; i++) {
        mark_give(&c, &m[i]);
        if (i >= 7) {
            crew_wait(&c, &m[i - 7].chore);
            g_assert(m[i - 7].times == 1);
        }
    }
    for (unsigned i = 0; i < MANY; i++) {
        crew_wait(&c, &m[i].chore);
        g_assert(m[i].times == 1);
    }
    crew_end(&c);
    g_assert(!crew_helps(&c));
}

/*
 * While the only helper is held: a chore in the middle, or at the end, is taken
 * back by who waits for it, and the others are done in their order.
 */
static void test_back(void)
{
    KsmCrew c = { 0 };
    Mark m[5];
    Gate g;

    g_assert(crew_set(&c, 1) == 0);
    gate_give(&c, &g);
    for (unsigned i = 0; i < 4; i++) {
        mark_give(&c, &m[i]);
    }
    crew_wait(&c, &m[1].chore);
    crew_wait(&c, &m[3].chore);
    g_assert(m[1].times == 1 && mark_is_mine(&m[1]) && !m[1].chore.cpu_ns);
    g_assert(m[3].times == 1 && mark_is_mine(&m[3]));
    g_assert(!m[0].times && !m[2].times);
    /* behind the last that is left */
    mark_give(&c, &m[4]);
    gate_open(&g);
    crew_wait(&c, &g.chore);
    while (!__atomic_load_n(&m[4].times, __ATOMIC_SEQ_CST)) {
        g_usleep(100);
    }
    g_assert(m[0].when < m[2].when && m[2].when < m[4].when);
    for (unsigned i = 0; i < 5; i++) {
        g_assert(m[i].times == 1);
    }
    /* nothing is left of them: the next is done */
    mark_give(&c, &m[0]);
    while (!__atomic_load_n(&m[0].times, __ATOMIC_SEQ_CST)) {
        g_usleep(100);
    }
    crew_end(&c);
}

static void *gate_open_late(void *opaque)
{
    g_usleep(20000);
    mark_work(&((Mark **)opaque)[1][0]);
    gate_open(((void **)opaque)[0]);
    return NULL;
}

/*
 * Who waits, waits for what a helper has begun.  So does who has them pause: what
 * was given is begun later, or done by who waits for it.
 */
static void test_begun(gconstpointer data)
{
    bool pause = GPOINTER_TO_INT(data);
    KsmCrew c = { 0 };
    Mark late = { 0 }, given, other;
    Gate g;
    void *both[] = { &g, &late };
    pthread_t opener;

    g_assert(crew_set(&c, 1) == 0);
    gate_give(&c, &g);
    mark_give(&c, &given);
    g_assert(pthread_create(&opener, NULL, gate_open_late, both) == 0);
    if (pause) {
        crew_pause(&c);
        crew_pause(&c);
        mark_give(&c, &other);
        g_usleep(20000);
        g_assert(!given.times && !other.times);
        crew_wait(&c, &other.chore);
        g_assert(other.times == 1 && mark_is_mine(&other));
        crew_go_on(&c);
        while (!__atomic_load_n(&given.times, __ATOMIC_SEQ_CST)) {
            g_usleep(100);
        }
    } else {
        crew_wait(&c, &g.chore);
    }
    g_assert(__atomic_load_n(&late.times, __ATOMIC_SEQ_CST) == 1);
    g_assert(pthread_join(opener, NULL) == 0);
    crew_wait(&c, &given.chore);
    g_assert(given.times == 1);
    crew_end(&c);
}

/* What was given is done before the helpers end. */
static void test_end(void)
{
    KsmCrew c = { 0 };
    Mark m[3];

    for (unsigned round = 0; round < 50; round++) {
        g_assert(crew_set(&c, 1 + round % 3) == 0);
        for (unsigned i = 0; i < G_N_ELEMENTS(m); i++) {
            mark_give(&c, &m[i]);
        }
        if (round % 2) {
            crew_pause(&c);
        }
        crew_end(&c);
        for (unsigned i = 0; i < G_N_ELEMENTS(m); i++) {
            g_assert(m[i].times == 1);
            crew_wait(&c, &m[i].chore);
            g_assert(m[i].times == 1);
        }
    }
}

static uint64_t own_cpu;    /* atomic */

static uint64_t cpu_of_test(void)
{
    return __atomic_add_fetch(&own_cpu, 1000, __ATOMIC_SEQ_CST);
}

/* CPU is counted where a helper did it, and not where its giver did. */
static void test_cpu(void)
{
    KsmCrew c = { 0 };
    Mark m;
    Gate g;

    prim.cpu_ns = cpu_of_test;
    g_assert(crew_set(&c, 1) == 0);
    gate_give(&c, &g);
    mark_give(&c, &m);
    crew_wait(&c, &m.chore);
    g_assert(!m.chore.cpu_ns && crew_cpu_ns(&c) == 0);
    gate_open(&g);
    crew_wait(&c, &g.chore);
    g_assert(g.chore.cpu_ns == 1000 && crew_cpu_ns(&c) == 1000);
    gate_give(&c, &g);
    gate_open(&g);
    crew_wait(&c, &g.chore);
    g_assert(g.chore.cpu_ns == 1000 && crew_cpu_ns(&c) == 2000);
    crew_end(&c);
    /* ... ever: also of those that are gone */
    g_assert(crew_cpu_ns(&c) == 2000);
    g_assert(crew_set(&c, 2) == 0 && crew_cpu_ns(&c) == 2000);
    crew_end(&c);
    prim.cpu_ns = prim_real.cpu_ns;
}

static unsigned threads_left;

static int thread_some(pthread_t *thread, void *(*run)(void *), void *opaque)
{
    return threads_left-- ? prim_real.thread(thread, run, opaque) : -EAGAIN;
}

/* All of them, or none; more or fewer later. */
static void test_set(void)
{
    KsmCrew c = { 0 };
    Mark m;

    prim.thread = thread_some;
    for (unsigned n = 0; n < 3; n++) {
        threads_left = n;
        g_assert(crew_set(&c, 3) == -EAGAIN);
        g_assert(!crew_helps(&c));
        mark_give(&c, &m);
        g_assert(m.times == 1 && mark_is_mine(&m));
    }
    prim.thread = prim_real.thread;
    for (unsigned n = 0; n <= CREW_MAX; n += 5) {
        pthread_t first = c.thread[0];

        g_assert(crew_set(&c, n) == 0 && c.n == n);
        first = c.thread[0];
        g_assert(crew_set(&c, n) == 0);
        g_assert(!n || pthread_equal(first, c.thread[0]));
        mark_give(&c, &m);
        crew_wait(&c, &m.chore);
        g_assert(m.times == 1);
    }
    g_assert(crew_set(&c, 0) == 0 && !crew_helps(&c));
}

static void mask_work(void *opaque)
{
    g_assert(pthread_sigmask(SIG_SETMASK, NULL, opaque) == 0);
}

/* A handler of the program's runs in no helper, but for what that does. */
static void test_signals(void)
{
    sigset_t mask;
    KsmChore chore = { .work = mask_work, .opaque = &mask };
    KsmCrew c = { 0 };
    char name[16];

    sigemptyset(&mask);
    g_assert(crew_set(&c, 1) == 0);
    g_assert(pthread_getname_np(c.thread[0], name, sizeof(name)) == 0);
    g_assert(!strcmp(name, "ksm-helper"));
    crew_give(&c, &chore);
    crew_end(&c);
    g_assert(sigismember(&mask, SIGUSR1) && sigismember(&mask, SIGTERM));
    g_assert(!sigismember(&mask, SIGSEGV) && !sigismember(&mask, SIGBUS));
    g_assert(pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0);
    g_assert(!sigismember(&mask, SIGUSR1));
}

/* In a child all is done where it is given, whatever helpers were at. */
static void test_fork(void)
{
    KsmCrew c = { 0 };
    Mark m;
    Gate g;
    pid_t child;
    int status;

    g_assert(crew_set(&c, 1) == 0);
    gate_give(&c, &g);
    mark_give(&c, &m);
    child = fork();
    if (child == 0) {
        crew_forked(&c);
        crew_wait(&c, &g.chore);
        mark_give(&c, &m);
        crew_pause(&c);
        crew_end(&c);
        _exit(m.times == 1 && mark_is_mine(&m) ? 0 : 1);
    }
    g_assert(child > 0 && waitpid(child, &status, 0) == child);
    g_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    gate_open(&g);
    crew_wait(&c, &m.chore);
    g_assert(m.times == 1);
    crew_end(&c);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/crew/alone", test_alone);
    g_test_add_data_func("/crew/each/1", GUINT_TO_POINTER(1), test_each);
    g_test_add_data_func("/crew/each/3", GUINT_TO_POINTER(3), test_each);
    g_test_add_func("/crew/back", test_back);
    g_test_add_data_func("/crew/begun/wait", GINT_TO_POINTER(false),
                         test_begun);
    g_test_add_data_func("/crew/begun/pause", GINT_TO_POINTER(true),
                         test_begun);
    g_test_add_func("/crew/end", test_end);
    g_test_add_func("/crew/cpu", test_cpu);
    g_test_add_func("/crew/set", test_set);
    g_test_add_func("/crew/signals", test_signals);
    g_test_add_func("/crew/fork", test_fork);
    return g_test_run();
}
