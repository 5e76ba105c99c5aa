/*
 * ksm-hostd: drives the kernel's ksmd, for what the host's guests leave to it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * One process for a host, and its hand (hand.h).  A second one waits for the
 * first one's end.  It steps back when somebody else sets ksmd's knobs: an
 * administrator, ksmtuned, the kernel's advisor.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <glib.h>

#include "base/prim.h"
#include "libksm.h"
#include "report.h"
#include "socket.h"
#include "sys.h"

#define WRONG_USAGE     2
#define REST_MS         3000    /* between looks while ksmd is stopped */
#define WAIT_MS         300     /* ... while another driver is there */

static const char usage[] =
    "usage: ksm-hostd [OPTION]...\n"
    "Drives the kernel's ksmd for what guests with scope=host leave to it.\n"
    "\n"
    "  --socket PATH      of the host's ksm-poold (default\n"
    "                     " KSM_GROUP_DIR "/host.sock)\n"
    "  --max-cpu PERCENT  of a core for ksmd (default 20); all of one while the\n"
    "                     host is short of memory\n"
    "  --run-dir DIR      for its files, the same for all of a host (default\n"
    "                     " KSM_GROUP_DIR ")\n"
    "  --status           tells what a running one does\n"
    "  --json             that as JSON\n"
    "  --root DIR         where proc and sys are; for tests\n"
    "  --help\n"
    "\n"
    "SIGTERM ends it, and ksmd is as it was before.  SIGHUP: it begins anew\n"
    "after it has stepped back.\n";

typedef struct Options {
    const char *socket, *run_dir, *root;
    unsigned max_cpu;
    bool status, json;
} Options;

typedef struct Driver {
    Options options;
    Seer seer;
    Drive drive;
    Hand hand;
    Report report;
    int lock, signals;
    char *passive;          /* why, until SIGHUP; NULL: it is not */
    char *trouble;          /* what went wrong last, and is tried again */
    bool ends;
} Driver;

enum { SOCKET, MAX_CPU, RUN_DIR, STATUS, JSON, ROOT, HELP };

static const struct option options[] = {
    { "socket", required_argument, NULL, SOCKET },
    { "max-cpu", required_argument, NULL, MAX_CPU },
    { "run-dir", required_argument, NULL, RUN_DIR },
    { "status", no_argument, NULL, STATUS },
    { "json", no_argument, NULL, JSON },
    { "root", required_argument, NULL, ROOT },
    { "help", no_argument, NULL, HELP },
    { NULL, 0, NULL, 0 },
};

static void G_GNUC_NORETURN wrong(const char *what, const char *want)
{
    fprintf(stderr, "ksm-hostd: %s: %s (--help)\n", what, want);
    exit(WRONG_USAGE);
}

static void take(Options *o, int option)
{
    guint64 n;

    switch (option) {
    case SOCKET:
        o->socket = optarg;
        break;
    case MAX_CPU:
        if (!g_ascii_string_to_unsigned(optarg, 10, 1, 100, &n, NULL)) {
            wrong("--max-cpu", "want a number from 1 to 100");
        }
        o->max_cpu = n;
        break;
    case RUN_DIR:
        o->run_dir = optarg;
        break;
    case STATUS:
        o->status = true;
        break;
    case JSON:
        o->json = true;
        break;
    case ROOT:
        o->root = optarg;
        break;
    case HELP:
        fputs(usage, stdout);
        exit(EXIT_SUCCESS);
    default:
        exit(WRONG_USAGE);
    }
}

static Options options_parse(int argc, char **argv)
{
    Options o = {
        .socket = KSM_GROUP_DIR "/host.sock",
        .run_dir = KSM_GROUP_DIR,
        .root = "/",
        .max_cpu = 20,
    };
    int option;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        take(&o, option);
    }
    if (optind < argc) {
        wrong(argv[optind], "there are none but options");
    }
    if (o.json && !o.status) {
        wrong("--json", "is for --status only");
    }
    return o;
}

static void step_back(Driver *d, char *why)
{
    g_free(d->passive);
    d->passive = why;
}

/* Waits so long, or for a signal. */
static void rest(Driver *d, int ms)
{
    struct pollfd wait = { .fd = d->signals, .events = POLLIN };
    struct signalfd_siginfo info;

    if (poll(&wait, 1, ms) <= 0 ||
        prim.read(d->signals, &info, sizeof(info)) != sizeof(info)) {
        return;
    }
    if (info.ssi_signo == SIGHUP) {
        step_back(d, NULL);
        drive_init(&d->drive, d->options.max_cpu);
    } else {
        d->ends = true;
    }
}

static int signals_open(void)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    return sys.signals(&set);
}

static char *run_file(const Options *o, const char *name)
{
    return g_build_filename(o->run_dir, name, NULL);
}

/*
 * Held by the driver or its hand, whichever lives, and by nobody when both are
 * dead.  On a file that nobody else may open: not on a knob, which all may read,
 * and so lock.  Where none can be made it does without.
 */
static void lock(Driver *d)
{
    g_autofree char *path = run_file(&d->options, "hostd.lock");

    g_mkdir_with_parents(d->options.run_dir, 0755);
    d->lock = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (d->lock < 0) {
        fprintf(stderr, "ksm-hostd: %s cannot be written: %s; so there is no "
                "--status, another ksm-hostd is not seen, and if both "
                "processes are killed at once ksmd stays as it is then\n",
                path, strerror(errno));
        return;
    }
    while (!d->ends && flock(d->lock, LOCK_EX | LOCK_NB) < 0) {
        report(&d->report, REPORT_WAITS, NULL, &d->seer);
        rest(d, WAIT_MS);
    }
}

/* What an administrator can do. */
static char *failure(const Driver *d, int error)
{
    return g_strdup_printf("%s cannot be written: %s; as root: "
                           "systemctl start ksm-hostd, or: "
                           "echo 1 > /sys/kernel/mm/ksm/run", d->seer.knobs,
                           strerror(-error));
}

/* Does waiting not help? */
static bool is_for_good(int error)
{
    return error == -EACCES || error == -EPERM || error == -EROFS ||
           error == -ENOENT;
}

static void have_trouble(Driver *d, char *what)
{
    g_free(d->trouble);
    d->trouble = what;
}

static void heard(Driver *d, const HandAnswer *answer)
{
    const Record *r = d->hand.record;

    have_trouble(d, NULL);
    switch (answer->what) {
    case HAND_DONE:
        break;
    case HAND_BUSY:
        step_back(d, g_strdup("somebody else runs it already (SIGHUP: look "
                              "again)"));
        break;
    case HAND_CHANGED:
        step_back(d, g_strdup_printf("somebody else has set %s (SIGHUP: begin "
                                     "anew)", knob_names[answer->knob]));
        break;
    case HAND_FAILED:
        if (r->unsaved) {
            have_trouble(d, g_strdup_printf("%s cannot be written: %s; until "
                                            "it can, ksmd is not started",
                                            r->file, strerror(-r->unsaved)));
        } else if (is_for_good(answer->error)) {
            step_back(d, failure(d, answer->error));
        } else {
            have_trouble(d, failure(d, answer->error));
        }
        break;
    }
}

/* False: ksmd is stopped. */
static bool do_it(Driver *d, Want want)
{
    HandAnswer answer = { .what = HAND_DONE };
    int ret;

    if (!want.run && !d->hand.record->held) {
        have_trouble(d, NULL);
        return false;
    }
    ret = hand_say(&d->hand, &want, &answer);
    if (ret == -ETIMEDOUT) {
        fprintf(stderr, "ksm-hostd: the process that sets ksmd was killed, or "
                "hangs; another one takes its place\n");
        return want.run;
    }
    if (ret < 0) {
        have_trouble(d, g_strdup_printf("no second process: %s",
                                        strerror(-ret)));
        return false;
    }
    heard(d, &answer);
    return want.run && answer.what == HAND_DONE;
}

static void drive(Driver *d)
{
    while (!d->ends) {
        int ret = seer_look(&d->seer);
        Want want = { .run = false };
        g_autofree char *advisor = knobs_advisor(d->seer.knobs);
        const char *why;
        bool runs;

        if (ret == 0 && !d->passive && advisor) {
            step_back(d, g_strdup_printf("the kernel's advisor %s sets it "
                                         "(SIGHUP: look again)", advisor));
        }
        if (ret == 0 && !d->passive) {
            want = drive_next(&d->drive, &d->seer.seen);
        }
        runs = do_it(d, want);
        why = d->passive ? d->passive : d->trouble;
        report(&d->report, why ? REPORT_PASSIVE
                           : runs ? REPORT_RUNS : REPORT_RESTS,
               why, &d->seer);
        rest(d, runs ? HAND_BEAT_MS : REST_MS);
    }
}

static int run(Driver *d)
{
    g_autofree char *knob = g_build_filename(d->seer.knobs, "run", NULL);
    g_autofree char *record = NULL;
    int ret;

    if (access(knob, R_OK) < 0) {
        fprintf(stderr, "ksm-hostd: no KSM in this kernel: %s: %s\n", knob,
                strerror(errno));
        return EXIT_FAILURE;
    }
    /* one that waits is ready, too: its time to start is limited */
    socket_notify("READY=1");
    lock(d);
    if (d->ends) {
        return EXIT_SUCCESS;
    }
    if (d->lock >= 0) {
        d->report.file = run_file(&d->options, "hostd.status");
        record = run_file(&d->options, "hostd.knobs");
    }
    ret = hand_begin(&d->hand, d->seer.knobs, record);
    if (ret < 0) {
        fprintf(stderr, "ksm-hostd: no second process, or its files in %s "
                "cannot be read: %s\n", d->options.run_dir, strerror(-ret));
        hand_end(&d->hand);
        return EXIT_FAILURE;
    }
    if (access(d->hand.record->dir, W_OK) < 0) {
        step_back(d, failure(d, -errno));
    }
    drive(d);
    ret = hand_end(&d->hand);
    if (ret < 0) {
        fprintf(stderr, "ksm-hostd: ksmd could not be set back: %s; the next "
                "ksm-hostd tries again\n", strerror(-ret));
    } else {
        report(&d->report, REPORT_ENDED, NULL, &d->seer);
    }
    if (d->report.file) {
        unlink(d->report.file);
    }
    return ret < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    Driver d = { .options = options_parse(argc, argv), .lock = -1 };
    int ret;

    if (d.options.status) {
        g_autofree char *file = run_file(&d.options, "hostd.status");

        return report_show(file, d.options.json);
    }
    /* else a hand that dies is nobody's, and its number another process's */
    signal(SIGCHLD, SIG_DFL);
    d.signals = signals_open();
    if (d.signals < 0) {
        fprintf(stderr, "ksm-hostd: signals cannot be read: %s\n",
                strerror(-d.signals));
        return EXIT_FAILURE;
    }
    seer_init(&d.seer, d.options.root, d.options.socket);
    drive_init(&d.drive, d.options.max_cpu);
    ret = run(&d);
    seer_free(&d.seer);
    report_free(&d.report);
    g_free(d.passive);
    g_free(d.trouble);
    return ret;
}
