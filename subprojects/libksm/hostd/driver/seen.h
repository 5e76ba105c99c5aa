/*
 * seen: what the driver of ksmd goes by
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Figures of the kernel, and of the daemon that has the host's group.
 */
#ifndef DRIVER_SEEN_H
#define DRIVER_SEEN_H

#include "drive.h"
#include "watch/pressure.h"

typedef struct Seer {
    char *knobs;            /* directory */
    char *stat;             /* of ksmd's thread, in proc; NULL: not found */
    KsmPressure *pressure;
    const char *socket;     /* of the daemon */
    uint64_t asked_ns;      /* when it was asked last */
    uint64_t looked_ns;     /* ... and the host's pressure */
    uint64_t pressed_ns;    /* when there was some */
    bool answers;           /* the daemon does */
    DriveSeen seen;
} Seer;

/* @root is not / in tests. */
void seer_init(Seer *s, const char *root, const char *socket);
void seer_free(Seer *s);
/* Waits for the daemon for 100 ms at most.  0, or -errno: there is no KSM. */
int seer_look(Seer *s);

#endif
