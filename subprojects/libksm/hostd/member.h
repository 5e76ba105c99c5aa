/*
 * member: a process that shares in a group
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * It is a process, not a connection: connections come and go, and what it
 * holds stays until the kernel says by a pidfd that it has exited.  Its holds
 * are in group.h; here are its process, its name, its cookie and its ring.
 */
#ifndef HOSTD_MEMBER_H
#define HOSTD_MEMBER_H

#include <glib.h>
#include <stdbool.h>
#include <stdint.h>

#include "conn.h"
#include "group.h"

#define RING_PAGES  1024u

typedef struct Member {
    GroupMember held;       /* first: the group gives back pointers to it */
    void *server;           /* for who watches its process */
    Conn *conn;             /* NULL: it has lost its connection */
    int pidfd;
    guint exit_watch;
    uint32_t pid;
    int ring;
    uint64_t cookie[2];
    char name[64];
    GArray *news;           /* WireFound, to be sent at the end of this turn */
    bool missed;            /* there was no room for others; it is to be told */
    Holds *listed;          /* while HELD is awaited: what it says it holds */
    uint64_t heard;         /* HELDs that are to come; 0: the rest goes ... */
    uint32_t reconciled;    /* ... of slots below it went */
    WireLeft left;          /* to the kernel, as it said last */
    GroupShare share;
    uint64_t share_at;      /* when that was counted ... */
    uint64_t share_of;      /* ... after so many changes of the group */
} Member;

/*
 * Takes @pidfd when it succeeds.  0, or -errno: of group_join(), or what the
 * ring needs.
 */
int member_begin(Member **m, Group *g, const WireHello *hello, int pidfd);
/* When the group has let it go. */
void member_end(Member *m);

/* Do both pidfds mean one process, which has not exited? */
bool process_is_same(int pidfd, int other);
/* Of a pidfd; 0: not to be told from here. */
uint32_t process_number(int pidfd);

#endif
