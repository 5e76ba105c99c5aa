/*
 * report: what the driver of ksmd tells people
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A file of lines, "name value", that --status reads; a line for systemd when
 * the state becomes another, and on stderr if that is unusual.
 */
#ifndef DRIVER_REPORT_H
#define DRIVER_REPORT_H

#include <stdbool.h>

#include "seen.h"

typedef enum ReportState {
    REPORT_WAITS,           /* another driver has ksmd */
    REPORT_RESTS,           /* ksmd is stopped */
    REPORT_RUNS,
    REPORT_PASSIVE,
    REPORT_ENDED,
} ReportState;

typedef struct Report {
    char *file;             /* NULL: there can be none */
    ReportState state;
    char *why;              /* PASSIVE */
    uint64_t written_ns;
} Report;

/* @why or NULL. */
void report(Report *r, ReportState state, const char *why, const Seer *s);
void report_free(Report *r);

/* --status: an exit code. */
int report_show(const char *file, bool json);

#endif
