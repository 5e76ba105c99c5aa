/*
 * knobs: how the kernel's ksmd is set, and the way back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The danger: the knobs are the whole machine's, and a driver that dies leaves
 * them as it set them.  So what was found is kept in a record, together with
 * what is written, from before the first write: in memory that both processes
 * of the driver share, and in a file, where one can be, for the next driver of
 * this boot: while that cannot be written, no knob is.  A knob is put back only
 * if it still is what was written here: else it is somebody's who knows better.
 * If ksmd runs then, it does so for him: all stays as it is.
 *
 * Leaves to others: when, and how fast.
 */
#ifndef DRIVER_KNOBS_H
#define DRIVER_KNOBS_H

#include <stdbool.h>
#include <stdint.h>

/* In the order in which they are written to start ksmd. */
typedef enum Knob {
    KNOB_SLEEP,             /* ms between batches */
    KNOB_PAGES,             /* of a batch */
    KNOB_RUN,
    KNOBS,
} Knob;

typedef struct Knobs {
    uint64_t value[KNOBS];
} Knobs;

typedef struct Record {
    bool held;              /* the rest means something */
    int unsaved;            /* -errno: the file could not be written last */
    bool ends;              /* its restoring has begun, and may have failed */
    Knobs found;            /* before anything was written */
    Knobs was, set;         /* ours; a knob may be either, or found */
    char dir[256];          /* of the knobs */
    char file[256];         /* for the next driver; empty: there is none */
    char boot[40];          /* the kernel's id of it */
} Record;

/* The names of their files. */
extern const char *const knob_names[KNOBS];

/* 0 or -errno. */
int knobs_read(const char *dir, Knobs *k);
/* Does the kernel set them itself?  The name of its advisor; g_free() it. */
char *knobs_advisor(const char *dir);

/* @file may be NULL. */
void record_init(Record *r, const char *dir, const char *file);
/*
 * The record begins with what is found now.  0; -EBUSY: ksmd is not stopped, so
 * it is somebody else's; -EAGAIN: memory goes offline; or another -errno.
 */
int record_begin(Record *r);
/* Are the knobs what was written?  If not, *@which has changed. */
bool record_holds(const Record *r, Knob *which);
/* 0 or -errno; what was written before stays. */
int record_write(Record *r, const Knobs *k);
/*
 * Puts back what still is ours; the record, and its file, end.  0; or -errno:
 * they stay, for the next call.
 */
int record_restore(Record *r);
/*
 * One that a driver left who died in this boot is held then, if there is one.
 * 0; or -errno: that cannot be told now.
 */
int record_find(Record *r);

#endif
