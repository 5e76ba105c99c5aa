/*
 * knobs: how the kernel's ksmd is set, and the way back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <glib.h>

#include "base/prim.h"
#include "knobs.h"
#include "sys.h"

const char *const knob_names[KNOBS] = {
    [KNOB_SLEEP] = "sleep_millisecs",
    [KNOB_PAGES] = "pages_to_scan",
    [KNOB_RUN] = "run",
};

/* The kernel's own, while memory of the host goes offline. */
#define RUN_OFFLINE     UINT64_C(4)
#define RUN_MERGES      1u          /* 0, 2: stopped, and unmerged */

static int knob_read(const char *dir, Knob knob, uint64_t *value)
{
    g_autofree char *path = g_build_filename(dir, knob_names[knob], NULL);
    g_autofree char *text = prim_read_file(path, NULL);

    if (!text) {
        return -errno;
    }
    *value = g_ascii_strtoull(text, NULL, 10);
    return 0;
}

static int knob_write(const char *dir, Knob knob, uint64_t value)
{
    g_autofree char *path = g_build_filename(dir, knob_names[knob], NULL);
    g_autofree char *text = g_strdup_printf("%" PRIu64 "\n", value);

    return sys.write_text(path, text);
}

int knobs_read(const char *dir, Knobs *k)
{
    int ret = 0;

    for (Knob i = 0; i < KNOBS && ret == 0; i++) {
        ret = knob_read(dir, i, &k->value[i]);
    }
    k->value[KNOB_RUN] &= ~RUN_OFFLINE;
    return ret;
}

/* "none [scan-time]": the one in brackets (Linux 6.8). */
char *knobs_advisor(const char *dir)
{
    g_autofree char *path = g_build_filename(dir, "advisor_mode", NULL);
    g_autofree char *text = prim_read_file(path, NULL);
    const char *begin = text ? strchr(text, '[') : NULL;
    const char *end = begin ? strchr(begin, ']') : NULL;

    if (!end || g_str_has_prefix(begin, "[none]")) {
        return NULL;
    }
    return g_strndup(begin + 1, end - begin - 1);
}

/*
 * For record_find(), before anything of it is written.  0 or -errno; who has no
 * file does without.
 */
static int record_save(Record *r)
{
    g_autofree char *text = NULL;

    if (!r->file[0]) {
        return 0;
    }
    text = g_strdup_printf(
        "%s\n%" PRIu64 " %" PRIu64 " %" PRIu64 "\n%" PRIu64 " %" PRIu64
        " %" PRIu64 "\n%" PRIu64 " %" PRIu64 " %" PRIu64 "\n", r->boot,
        r->found.value[0], r->found.value[1], r->found.value[2],
        r->was.value[0], r->was.value[1], r->was.value[2],
        r->set.value[0], r->set.value[1], r->set.value[2]);
    r->unsaved = sys.replace(r->file, text);
    return r->unsaved;
}

static void record_drop(Record *r)
{
    if (r->file[0]) {
        unlink(r->file);
    }
    r->held = false;
}

void record_init(Record *r, const char *dir, const char *file)
{
    g_autofree char *boot = prim_read_file("/proc/sys/kernel/random/boot_id",
                                           NULL);

    *r = (Record) { .held = false };
    g_strlcpy(r->dir, dir, sizeof(r->dir));
    g_strlcpy(r->file, file ? file : "", sizeof(r->file));
    g_strlcpy(r->boot, boot ? g_strchomp(boot) : "unknown", sizeof(r->boot));
}

int record_begin(Record *r)
{
    int ret = knobs_read(r->dir, &r->found);
    uint64_t run = 0;

    ret = ret < 0 ? ret : knob_read(r->dir, KNOB_RUN, &run);
    if (ret == 0 && (run & RUN_OFFLINE)) {
        ret = -EAGAIN;      /* whoever writes it waits until that is over */
    }
    if (ret < 0) {
        return ret;
    }
    if (r->found.value[KNOB_RUN]) {
        return -EBUSY;
    }
    r->was = r->set = r->found;
    r->held = true;
    r->ends = false;
    ret = record_save(r);
    if (ret < 0) {
        record_drop(r);     /* nothing was written */
    }
    return ret;
}

bool record_holds(const Record *r, Knob *which)
{
    Knobs now;

    if (knobs_read(r->dir, &now) < 0) {
        return true;        /* so nobody else can be told to have */
    }
    for (*which = 0; *which < KNOBS; (*which)++) {
        if (now.value[*which] != r->set.value[*which]) {
            return false;
        }
    }
    return true;
}

int record_write(Record *r, const Knobs *k)
{
    Knobs was = r->was, set = r->set;
    int ret;

    if (memcmp(k, &set, sizeof(*k)) == 0) {
        return 0;
    }
    r->was = set;
    r->set = *k;
    ret = record_save(r);
    if (ret < 0) {
        r->was = was;
        r->set = set;
        return ret;
    }
    for (Knob i = 0; i < KNOBS && ret == 0; i++) {
        if (r->set.value[i] != r->was.value[i]) {
            ret = knob_write(r->dir, i, r->set.value[i]);
        }
    }
    return ret;
}

/* Which knobs are what was found or written here; how many. */
static unsigned ours_find(const Record *r, const Knobs *now, bool *ours)
{
    g_autofree char *advisor = knobs_advisor(r->dir);
    unsigned n = 0;

    for (Knob i = 0; i < KNOBS; i++) {
        uint64_t value = now->value[i];

        /* the advisor sets it, and nobody else may */
        ours[i] = !(advisor && i == KNOB_PAGES) &&
                  (value == r->found.value[i] || value == r->was.value[i] ||
                   value == r->set.value[i]);
        n += ours[i];
    }
    return n;
}

/* ksmd stops first. */
int record_restore(Record *r)
{
    bool ours[KNOBS];
    Knobs now;
    int ret = r->held ? knobs_read(r->dir, &now) : 0;

    if (!r->held || ret < 0) {
        return ret;
    }
    r->ends = true;
    if (ours_find(r, &now, ours) == KNOBS ||
        now.value[KNOB_RUN] != RUN_MERGES) {
        for (Knob i = KNOBS; i-- > 0 && ret == 0; ) {
            if (ours[i] && now.value[i] != r->found.value[i]) {
                ret = knob_write(r->dir, i, r->found.value[i]);
            }
        }
    }
    if (ret == 0) {
        record_drop(r);
    }
    return ret;
}

int record_find(Record *r)
{
    g_autofree char *text = r->file[0] ? prim_read_file(r->file, NULL) : NULL;
    uint64_t *f = r->found.value, *w = r->was.value, *s = r->set.value;
    char boot[sizeof(r->boot)] = "";

    if (r->file[0] && !text && errno != ENOENT) {
        return -errno;
    }
    r->held = text && sscanf(text, "%39s %" SCNu64 " %" SCNu64 " %" SCNu64
                             " %" SCNu64 " %" SCNu64 " %" SCNu64
                             " %" SCNu64 " %" SCNu64 " %" SCNu64, boot,
                             &f[0], &f[1], &f[2], &w[0], &w[1], &w[2],
                             &s[0], &s[1], &s[2]) == 10 &&
              strcmp(boot, r->boot) == 0;
    if (!r->held) {
        record_drop(r);
    }
    return 0;
}
