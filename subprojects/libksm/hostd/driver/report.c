/*
 * report: what the driver of ksmd tells people
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <glib.h>

#include "base/prim.h"
#include "report.h"
#include "socket.h"

#define WRITE_NS    UINT64_C(5000000000)

static const char *const names[] = {
    [REPORT_WAITS] = "waits",
    [REPORT_RESTS] = "rests",
    [REPORT_RUNS] = "runs",
    [REPORT_PASSIVE] = "passive",
    [REPORT_ENDED] = "ended",
};

static const char *const texts[] = {
    [REPORT_WAITS] = "another ksm-hostd drives ksmd; waits for its end",
    [REPORT_RESTS] = "ksmd is stopped: there is nothing for it to do",
    [REPORT_RUNS] = "ksmd runs",
    [REPORT_PASSIVE] = "ksmd is left alone",
    [REPORT_ENDED] = "ended; ksmd is as it was found",
};

static void write_file(const Report *r, const Seer *s)
{
    g_autofree char *text = g_strdup_printf(
        "state %s\npid %d\nleft %" PRIu64 "\ngiven %" PRIu64 "\nsaved %" PRIu64
        "\nfull_scans %" PRIu64 "\nksmd_cpu_ns %" PRIu64 "\npressed %d\n"
        "daemon %d\nwhy %s\n", names[r->state], getpid(), s->seen.left,
        s->seen.given, s->seen.saved, s->seen.scans, s->seen.cpu_ns,
        s->seen.pressed, s->answers, r->why ? r->why : "");

    g_file_set_contents(r->file, text, -1, NULL);
}

void report(Report *r, ReportState state, const char *why, const Seer *s)
{
    bool news = !r->written_ns || state != r->state ||
                g_strcmp0(why, r->why) != 0;
    uint64_t now = prim.now_ns();

    if (news) {
        g_autofree char *status =
            g_strdup_printf("STATUS=%s%s%s", texts[state], why ? ": " : "",
                            why ? why : "");

        r->state = state;
        g_free(r->why);
        r->why = g_strdup(why);
        /* what comes and goes every few minutes is no news for a log */
        if (state != REPORT_RESTS && state != REPORT_RUNS) {
            fprintf(stderr, "ksm-hostd: %s\n", status + strlen("STATUS="));
        }
        socket_notify(status);
    }
    if (news || now - r->written_ns >= WRITE_NS) {
        r->written_ns = now;
        if (r->file) {
            write_file(r, s);
        }
    }
}

void report_free(Report *r)
{
    g_free(r->why);
    g_free(r->file);
}

static bool is_number(const char *value)
{
    return *value && strspn(value, "0123456789") == strlen(value);
}

static void show_line(const char *name, const char *value, bool json,
                      bool first)
{
    g_autofree char *escaped = g_strescape(value, NULL);

    if (!json) {
        printf("%-12s %s\n", name, value);
    } else if (is_number(value)) {
        printf("%s\"%s\": %s", first ? "" : ", ", name, value);
    } else {
        printf("%s\"%s\": \"%s\"", first ? "" : ", ", name, escaped);
    }
}

/* Has who wrote it died since? */
static bool is_dead(char **lines)
{
    for (char **line = lines; *line; line++) {
        if (g_str_has_prefix(*line, "pid ")) {
            g_autofree char *comm =
                g_strdup_printf("/proc/%s/comm", *line + 4);
            g_autofree char *name = prim_read_file(comm, NULL);

            return !name || strcmp(g_strchomp(name), "ksm-hostd") != 0;
        }
    }
    return true;
}

int report_show(const char *file, bool json)
{
    g_autofree char *text = prim_read_file(file, NULL);
    g_auto(GStrv) lines = g_strsplit(text ? g_strchomp(text) : "", "\n", 0);

    if (!text || is_dead(lines)) {
        fprintf(stderr, "ksm-hostd: none runs, or it can write no %s\n", file);
        return EXIT_FAILURE;
    }
    fputs(json ? "{" : "", stdout);
    for (char **line = lines; *line; line++) {
        char *value = strchr(*line, ' ');

        if (value) {
            *value++ = '\0';
            show_line(*line, value, json, line == lines);
        }
    }
    fputs(json ? "}\n" : "", stdout);
    return EXIT_SUCCESS;
}
