/*
 * hand: a process that alone writes the knobs of ksmd
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <glib.h>

#include "base/prim.h"
#include "hand.h"
#include "sys.h"

#define SILENCE_MS  500     /* then the other one is dead, or as good as */
#define RETRY_US    20000   /* after memory or descriptors were wanting ... */
#define RETRIES     500     /* ... and no hope any more */

static bool is_readable(int fd, int timeout_ms)
{
    struct pollfd p = { .fd = fd, .events = POLLIN };
    int ret;

    do {
        ret = poll(&p, 1, timeout_ms);
    } while (ret < 0 && errno == EINTR);
    return ret > 0;
}

static HandAnswer failed(int error)
{
    return (HandAnswer) { .what = HAND_FAILED, .error = error };
}

/* The last chance. */
static int restore_surely(Record *r)
{
    int ret = record_restore(r);

    for (unsigned i = 0; i < RETRIES && ret < 0; i++) {
        g_usleep(RETRY_US);
        ret = record_restore(r);
    }
    return ret;
}

static HandAnswer obey(Record *r, const Want *want)
{
    HandAnswer answer = { .what = HAND_DONE };
    Knobs set;
    int ret = 0;

    r->unsaved = 0;
    if (!want->run || r->ends) {
        ret = record_restore(r);
    }
    if (!want->run || ret < 0) {
        return ret < 0 ? failed(ret) : answer;
    }
    if (!r->held) {
        ret = record_begin(r);
    } else if (!record_holds(r, &answer.knob)) {
        record_restore(r);
        answer.what = HAND_CHANGED;
        return answer;
    }
    if (ret == -EBUSY) {
        answer.what = HAND_BUSY;
        return answer;
    }
    set.value[KNOB_RUN] = 1;
    set.value[KNOB_SLEEP] = want->sleep_ms;
    set.value[KNOB_PAGES] = want->pages;
    ret = ret < 0 ? ret : record_write(r, &set);
    if (ret < 0) {
        record_restore(r);
        return failed(ret);
    }
    return answer;
}

/*
 * Whoever stops the service, or the job of a shell, stops its driver: that says
 * what is to be done, or says nothing any more.
 */
static void leave_group(void)
{
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGQUIT, SIG_IGN);
    /* where no shell is SIGTSTP stops nobody */
    setsid();
}

static void G_GNUC_NORETURN hand_main(Record *r, int fd)
{
    Want want;

    leave_group();
    for (;;) {
        HandAnswer answer;

        if (!is_readable(fd, r->held ? SILENCE_MS : -1)) {
            record_restore(r);
            continue;
        }
        if (recv(fd, &want, sizeof(want), 0) != sizeof(want)) {
            restore_surely(r);
            _exit(0);
        }
        answer = obey(r, &want);
        /* if nobody is there to hear it, the next recv() tells */
        send(fd, &answer, sizeof(answer), MSG_NOSIGNAL);
    }
}

static int hand_fork(Hand *h)
{
    int pair[2], ret = sys.pair(pair);

    if (ret < 0) {
        return ret;
    }
    h->pid = sys.fork();
    if (h->pid == 0) {
        prim.close(pair[0]);
        hand_main(h->record, pair[1]);
    }
    prim.close(pair[1]);
    if (h->pid < 0) {
        ret = h->pid;
        h->pid = 0;
        prim.close(pair[0]);
        return ret;
    }
    h->fd = pair[0];
    return 0;
}

/* It writes no more: now the knobs can be put back from here. */
static void hand_cut(Hand *h)
{
    if (h->pid) {
        kill(h->pid, SIGKILL);
        sys.wait(h->pid);
        prim.close(h->fd);
        h->pid = 0;
    }
}

int hand_begin(Hand *h, const char *dir, const char *file)
{
    Record *r = prim.map(NULL, sizeof(*r), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int ret;

    *h = (Hand) { .record = r };
    if (!r) {
        return -errno;
    }
    record_init(r, dir, file);
    ret = record_find(r);
    if (ret < 0) {
        return ret;
    }
    record_restore(r);
    return hand_fork(h);
}

int hand_end(Hand *h)
{
    int ret = 0;

    if (h->record) {
        hand_cut(h);
        ret = restore_surely(h->record);
        prim.unmap(h->record, sizeof(*h->record));
        h->record = NULL;
    }
    return ret;
}

int hand_say(Hand *h, const Want *want, HandAnswer *answer)
{
    int ret = h->pid ? 0 : hand_fork(h);

    if (ret < 0) {
        /* what the one before could not put back */
        record_restore(h->record);
        return ret;
    }
    if (send(h->fd, want, sizeof(*want), MSG_NOSIGNAL) != sizeof(*want) ||
        !is_readable(h->fd, SILENCE_MS) ||
        recv(h->fd, answer, sizeof(*answer), 0) != sizeof(*answer)) {
        hand_cut(h);
        record_restore(h->record);
        return -ETIMEDOUT;
    }
    return 0;
}
