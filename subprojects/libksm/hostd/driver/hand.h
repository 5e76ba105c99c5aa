/*
 * hand: a process that alone writes the knobs of ksmd
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The driver thinks, its hand writes.  Each watches the other: the hand puts
 * the knobs back if it hears nothing for half a second, or the driver has died;
 * the driver kills a hand that does not answer, puts them back itself, and has
 * another one.  So whichever is killed or stopped, the knobs are back within a
 * second; and as one process writes at any time, none writes what the other has
 * just put back.
 */
#ifndef DRIVER_HAND_H
#define DRIVER_HAND_H

#include <sys/types.h>

#include "knobs.h"

typedef struct Want {
    bool run;               /* else the knobs are to be as they were found */
    uint64_t sleep_ms, pages;
} Want;

typedef enum HandSays {
    HAND_DONE,
    HAND_BUSY,              /* ksmd was running: it is somebody else's */
    HAND_CHANGED,           /* somebody has changed a knob */
    HAND_FAILED,            /* a knob cannot be written; it tries again */
} HandSays;

typedef struct HandAnswer {
    HandSays what;
    int error;              /* FAILED */
    Knob knob;              /* CHANGED */
} HandAnswer;

typedef struct Hand {
    Record *record;         /* shared by both processes */
    pid_t pid;              /* 0: there is none */
    int fd;                 /* to it */
} Hand;

/* What a driver left who died is put back.  0 or -errno; hand_end() then. */
int hand_begin(Hand *h, const char *dir, const char *file);
/* Puts all back.  -errno: that fails, for ten seconds now. */
int hand_end(Hand *h);

/*
 * At least each HAND_BEAT_MS while ksmd is to run.  -ETIMEDOUT: the hand did not
 * answer, another -errno: there can be none now.  The knobs are as they were, if
 * they could be put back, and the next call has another one.
 */
int hand_say(Hand *h, const Want *want, HandAnswer *answer);

#define HAND_BEAT_MS    200

#endif
