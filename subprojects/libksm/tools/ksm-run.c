/*
 * ksm-run: runs a program with its large anonymous memory merged
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Sets the environment for ksm-run.so (ksm-run-preload.c), which does the work,
 * and becomes the program.
 */
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: ksm-run [OPTION]... COMMAND [ARGUMENT]...\n"
    "Runs COMMAND; equal pages of its large allocations are merged.\n"
    "\n"
    "  --scope zero|vm   zero pages only, or all equal pages (default)\n"
    "  --group NAME      equal pages of the group's processes are shared, by\n"
    "                    the daemon ksm-poold; or a socket's path, with a '/'\n"
    "  --max-cpu N       percent of a core for that (default 10)\n"
    "  --min-size N      KiB an allocation must have (default 1024)\n"
    "  --help\n"
    "\n"
    "What was saved is printed at the end and upon SIGUSR1, on standard\n"
    "error.  Covered is what goes through malloc, calloc, realloc and the\n"
    "mmap family of the C library; not covered are static programs, direct\n"
    "system calls and memory that is locked or was mapped without\n"
    "PROT_WRITE at first.  Programs that do direct I/O on\n"
    "NFS, 9p or ceph into such memory must not be run this way.\n";

/* The preload library: where it was built, or where it is installed. */
static int find_preload(char *path)
{
    static const char *const places[] = {
        "ksm-run.so", "../lib/libksm/ksm-run.so",
        "../lib/x86_64-linux-gnu/libksm/ksm-run.so",
        "../lib64/libksm/ksm-run.so",
    };
    char self[PATH_MAX];
    ssize_t len = readlink("/proc/self/exe", self, sizeof(self) - 1);
    char *slash;

    if (len < 0) {
        return -1;
    }
    self[len] = '\0';
    slash = strrchr(self, '/');
    *slash = '\0';
    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++) {
        if (snprintf(path, PATH_MAX, "%s/%s", self, places[i]) < PATH_MAX &&
            !access(path, R_OK)) {
            return 0;
        }
    }
    return -1;
}

static void preload(void)
{
    const char *others = getenv("LD_PRELOAD");
    char path[PATH_MAX], *all;

    if (find_preload(path)) {
        fprintf(stderr, "ksm-run: ksm-run.so is not beside this program\n");
        exit(1);
    }
    if (asprintf(&all, "%s%s%s", path, others ? ":" : "",
                 others ? others : "") < 0 || setenv("LD_PRELOAD", all, 1)) {
        perror("ksm-run");
        exit(1);
    }
    free(all);
}

static int number(const char *text)
{
    int n, used = 0;

    return sscanf(text, "%9d%n", &n, &used) == 1 && !text[used] ? n : -1;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        { "scope", required_argument, NULL, 's' },
        { "group", required_argument, NULL, 'g' },
        { "max-cpu", required_argument, NULL, 'c' },
        { "min-size", required_argument, NULL, 'm' },
        { "help", no_argument, NULL, 'h' },
        { },
    };
    int c;

    while ((c = getopt_long(argc, argv, "+h", options, NULL)) != -1) {
        if (c == 's' && (!strcmp(optarg, "zero") || !strcmp(optarg, "vm"))) {
            setenv("KSM_RUN_SCOPE", optarg, 1);
            unsetenv("KSM_RUN_GROUP");
        } else if (c == 'g' && *optarg) {
            setenv("KSM_RUN_SCOPE", "group", 1);
            setenv("KSM_RUN_GROUP", optarg, 1);
        } else if (c == 'c' && number(optarg) >= 1 && number(optarg) <= 100) {
            setenv("KSM_RUN_MAX_CPU", optarg, 1);
        } else if (c == 'm' && number(optarg) >= 1) {
            setenv("KSM_RUN_MIN_KIB", optarg, 1);
        } else if (c == 'h') {
            fputs(usage, stdout);
            return 0;
        } else {
            if (c != '?') {
                fprintf(stderr, "ksm-run: '%s' is not a value for this "
                        "option\n", optarg);
            }
            fputs("try 'ksm-run --help'\n", stderr);
            return 2;
        }
    }
    if (optind >= argc) {
        fputs(usage, stderr);
        return 2;
    }
    preload();
    execvp(argv[optind], argv + optind);
    fprintf(stderr, "ksm-run: %s: %s\n", argv[optind], strerror(errno));
    return errno == ENOENT ? 127 : 126;
}
