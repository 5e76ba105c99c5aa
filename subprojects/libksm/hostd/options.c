/*
 * options: the command line of ksm-poold
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include <glib.h>

#include "asked.h"
#include "base/page.h"
#include "group.h"
#include "image.h"
#include "options.h"

#define WRONG_USAGE 2
#define SIZE_MIN    (UINT64_C(16) << 20)     /* and a multiple of it */
/* Members have room for this pool and some before it: member.c, base_find(). */
#define SIZE_MAX_   (UINT64_C(1) << 40)

static const char usage[] =
    "usage: ksm-poold [OPTION]...\n"
    "Has the pool of memory that the guests of one group share.\n"
    "\n"
    "  --socket PATH      where members connect; without it systemd must have\n"
    "                     given a socket\n"
    "  --size BYTES       of the pool; suffixes K M G T (default: half of the\n"
    "                     host's memory)\n"
    "  --members N        at most (default 256)\n"
    "  --share PERCENT    of the pool that one member may publish (default\n"
    "                     100)\n"
    "  --max-sharing N    pages that may map one page of the pool (default\n"
    "                     1024)\n"
    "  --key FILE         16 to 4096 bytes that decide how the group hashes, the\n"
    "                     same on all hosts whose guests are to be compared by\n"
    "                     ksm-top --similar (default: by chance)\n"
    "  --status           tells how the group of a running daemon is (with\n"
    "                     --socket)\n"
    "  --json             that as JSON\n"
    "  --image-version    tells the version of what a daemon leaves to its\n"
    "                     successor: a reload is between equal ones\n"
    "  --help\n"
    "\n"
    "SIGTERM ends it: members run on with what they map, and connect to the\n"
    "next one.\n";

static void G_GNUC_NORETURN wrong(const char *option, const char *value,
                                  const char *want)
{
    fprintf(stderr, "ksm-poold: %s%s%s: %s\n", option, *value ? " " : "", value,
            want);
    exit(WRONG_USAGE);
}

static unsigned number(const char *option, const char *value, unsigned min,
                       unsigned max)
{
    g_autofree char *want = g_strdup_printf("want a number from %u to %u",
                                            min, max);
    guint64 n;

    if (!g_ascii_string_to_unsigned(value, 10, min, max, &n, NULL)) {
        wrong(option, value, want);
    }
    return n;
}

static uint64_t bytes(const char *option, const char *value)
{
    static const char suffixes[] = "KMGT";
    char *end;
    uint64_t n = g_ascii_strtoull(value, &end, 10);
    const char *suffix = *end ? strchr(suffixes, g_ascii_toupper(*end)) : NULL;
    unsigned shift = suffix ? 10 * (suffix - suffixes + 1) : 0;

    if (!g_ascii_isdigit(*value) || (*end && (!suffix || end[1])) ||
        n > SIZE_MAX_ >> shift || n << shift < SIZE_MIN) {
        wrong(option, value, "want bytes, 16M to 1T, as 8G");
    }
    return ROUND_UP_TO(n << shift, SIZE_MIN);
}

static uint64_t half_of_memory(void)
{
    uint64_t half = (uint64_t)sysconf(_SC_PHYS_PAGES) / 2 * PAGE_BYTES;

    return MIN(ROUND_UP_TO(half, SIZE_MIN), SIZE_MAX_);
}

enum { SOCKET, SIZE, MEMBERS, SHARE, MAX_SHARING, KEY, STATUS, JSON,
       IMAGE, HELP };

static const struct option options[] = {
    { "socket", required_argument, NULL, SOCKET },
    { "size", required_argument, NULL, SIZE },
    { "members", required_argument, NULL, MEMBERS },
    { "share", required_argument, NULL, SHARE },
    { "max-sharing", required_argument, NULL, MAX_SHARING },
    { "key", required_argument, NULL, KEY },
    { "status", no_argument, NULL, STATUS },
    { "json", no_argument, NULL, JSON },
    { "image-version", no_argument, NULL, IMAGE },
    { "help", no_argument, NULL, HELP },
    { NULL, 0, NULL, 0 },
};

static void take(Options *o, int option)
{
    switch (option) {
    case SOCKET:
        if (strlen(optarg) >= sizeof(((struct sockaddr_un *)0)->sun_path)) {
            wrong("--socket", optarg, "the path is too long for a socket");
        }
        o->socket = optarg;
        break;
    case SIZE:
        o->size = bytes("--size", optarg);
        break;
    case MEMBERS:
        o->members = number("--members", optarg, 1, ASKED_MEMBERS);
        break;
    case SHARE:
        o->share = number("--share", optarg, 1, 100);
        break;
    case MAX_SHARING:
        o->max_sharing = number("--max-sharing", optarg, HOLD_USERS,
                                SLOT_USERS);
        break;
    case KEY:
        o->key = optarg;
        break;
    case STATUS:
        o->status = true;
        break;
    case JSON:
        o->json = true;
        break;
    case IMAGE:
        printf("%u\n", IMAGE_VERSION);
        exit(EXIT_SUCCESS);
    case HELP:
        fputs(usage, stdout);
        exit(EXIT_SUCCESS);
    default:
        fputs("ksm-poold: --help tells how it is used\n", stderr);
        exit(WRONG_USAGE);
    }
}

void options_parse(Options *o, int argc, char **argv)
{
    int option;

    *o = (Options) {
        .size = half_of_memory(),
        .members = 256,
        .share = 100,
        .max_sharing = 1024,
    };
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        take(o, option);
    }
    if (optind < argc) {
        wrong("argument", argv[optind], "there are none but options (--help)");
    }
    if (o->json && !o->status) {
        wrong("--json", "", "is for --status only");
    }
    if (o->status && !o->socket) {
        wrong("--status", "", "wants --socket PATH, of the daemon to ask");
    }
}
