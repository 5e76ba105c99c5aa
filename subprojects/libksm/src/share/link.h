/*
 * link: the connection to a group's daemon
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Made when it can be, made again, ever more seldom, when it broke.  Nothing
 * waits: what cannot be sent now is sent later, by whoever wanted to.
 */
#ifndef KSM_LINK_H
#define KSM_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct KsmLink {
    char *path;             /* NULL: it cannot be made again */
    int fd;                 /* -1: there is none */
    bool absent;            /* nobody was there, the last time */
    uint64_t retry_ns;      /* when to try next */
    uint64_t wait_ns;       /* how long to wait after that */
    unsigned breaks;        /* how often it broke */
} KsmLink;

/* @fd: made by somebody else, or -1; it is the link's.  @path: copied. */
void link_init(KsmLink *l, int fd, const char *path);
void link_free(KsmLink *l);

/* True: there is one that was not there before.  Tries when it is time. */
bool link_make(KsmLink *l);
/* It works as it should: when it breaks, it is made again soon. */
void link_works(KsmLink *l);
void link_break(KsmLink *l);

/* False: not now, or it broke. */
bool link_send(KsmLink *l, const void *message, size_t len);
/* The next message's length, up to @len; 0: none, or it broke. */
size_t link_receive(KsmLink *l, void *message, size_t len, int fds[2]);

#endif
