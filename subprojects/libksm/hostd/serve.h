/*
 * serve: the daemon, from its socket on
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Sets the daemon up, accepts connections, takes all down.  Leaves to others: what
 * packets say (talk.h), what is told to whom (client.h), what can wait (work.h).
 */
#ifndef HOSTD_SERVE_H
#define HOSTD_SERVE_H

#include <glib.h>
#include <stdbool.h>
#include <stdint.h>

#include "conn.h"
#include "group.h"
#include "member.h"
#include "poolfile.h"

typedef struct Server {
    Group group;
    PoolFile file;
    uint64_t generation;
    uint64_t began;         /* ns */
    int listener;
    guint listen_watch;     /* or a timer, while descriptors are short */
    bool warned;            /* of that */
    guint work;             /* what can wait, in pieces */
    guint rest;             /* a timer, until the group rests */
    GPtrArray *clients;     /* of Client: connections */
    uint64_t clients_ever;
    GPtrArray *leaving;     /* Members whose process has exited */
    GPtrArray *to_tell;     /* Members with news */
    GPtrArray *reconciling; /* Members that have listed what they hold */
    unsigned share_next;    /* member whose share is to be counted next */
    unsigned uncounted;     /* after a reload: below, none was counted yet */
    GArray *blocks;         /* first slots, to be told before an answer */
} Server;

/*
 * Takes the listener and, even if it fails, the file's descriptors.  0 or
 * -errno; server_free() in any case.
 */
int server_init(Server *s, const GroupConfig *config, const PoolFile *file,
                int listener);
/* All but its descriptors are as nothing yet: reload.c fills it in. */
int server_prepare(Server *s, const GroupConfig *config, const PoolFile *file,
                   int listener);
/* A connection, accepted now or before a reload. */
struct Client *server_connect(Server *s, int fd);
/* From now on it serves. */
void server_start(Server *s);
void server_free(Server *s);

#endif
