/*
 * poolfile: the file of a group's pool, that only the daemon can write
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A tmpfs of our own, mounted nowhere.  The descriptor for members is opened
 * through a read-only clone of that mount: whoever has it, root and our own
 * user included, gets EROFS for each way to write, and for opening it anew.
 * The daemon writes, grows and punches through another one.
 *
 * Where no tmpfs can be mounted it is a memfd, which those who are its owner
 * or root can open anew for writing: they are refused then.
 */
#ifndef HOSTD_POOLFILE_H
#define HOSTD_POOLFILE_H

#include <glib.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/huge.h"

typedef enum PoolFileKind {
    POOLFILE_TMPFS,
    POOLFILE_MEMFD,
} PoolFileKind;

typedef struct PoolFile {
    PoolFileKind kind;
    int fd;                 /* for writing */
    int map_fd;             /* for members; read-only */
    bool keeps_all;         /* huge pages: nothing can be punched */
} PoolFile;

/*
 * A file that can have @bytes.  0 or -errno; @note then says what failed, or
 * why it is a memfd; else it is NULL.  g_free() it.
 */
int poolfile_make(PoolFile *f, uint64_t bytes, char **note);
/* What decides whether it is of huge pages. */
HugeMount poolfile_mount(const PoolFile *f);
/* May a process of that user have the descriptor? */
bool poolfile_may_give(const PoolFile *f, uid_t uid);

#endif
