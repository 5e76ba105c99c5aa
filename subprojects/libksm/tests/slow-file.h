/*
 * libksm tests: a file that is read as slowly as a test wants
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * One file on a FUSE file system of our own, for direct I/O: the kernel holds
 * the buffer's pages and waits for their content.  Served by a child: a
 * process that waits for itself could not even be killed.
 */
#ifndef SLOW_FILE_H
#define SLOW_FILE_H

#include <stddef.h>
#include <sys/types.h>

/* All of the file's content. */
#define SLOW_FILE_BYTE 0x99

typedef struct SlowFileState SlowFileState;

typedef struct SlowFile {
    int file;               /* opened for reading, O_DIRECT */
    pid_t server;
    SlowFileState *state;   /* shared with the server */
} SlowFile;

/*
 * NULL, or static text why there is none.  Reads are answered at once until
 * slow_file_hold().  The mount is hidden: others open /proc/PID/fd/N.
 */
const char *slow_file_open(SlowFile *f, size_t size);
void slow_file_close(SlowFile *f);

/* From now on reads wait; until one does; they are all answered. */
void slow_file_hold(SlowFile *f);
void slow_file_wait(SlowFile *f);
void slow_file_release(SlowFile *f);

#endif
