/*
 * remote: a store that a group of processes shares
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The member's side of docs/interop/ksm-pool.rst.  The daemon is asked and
 * offered to in batches; what it says becomes answers, whenever it comes.
 *
 * The danger: daemon and member differ about which slots are held, and one is
 * punched that is mapped here.  Why it is safe:
 * 1. A slot has users only after the daemon has told it, and each telling is a
 *    hold there.  They go back together, counted, when no user is left; what is
 *    told while that message is on its way counts there from then on.
 * 2. When the connection broke, what was not received was not taken, and all
 *    that is held is listed to the daemon (HELD) before anything else is said.
 * 3. Without a connection nothing is given back: the daemon keeps it all until
 *    this process has exited.
 * 4. Children of this process are unknown there: memory that they inherit must
 *    not be merged (KsmStore.stay_home).
 *
 * Leaves to others: slots and users (foreign.h), the ring (ring.h), and the
 * connection (link.h).
 */
#ifndef KSM_REMOTE_H
#define KSM_REMOTE_H

#include "share/store.h"

typedef struct RemoteConfig {
    const char *socket;     /* path; NULL: there is only @fd */
    int fd;                 /* a connection; -1: none; the store's own */
    const char *name;       /* of this member, for people */
    unsigned max_sharing;   /* users of a slot, here */
} RemoteConfig;

/* Connects when memory is reserved, and somebody is there. */
KsmStore *remote_new(const RemoteConfig *config);

#endif
