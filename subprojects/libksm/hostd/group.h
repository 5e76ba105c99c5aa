/*
 * group: the pool of a group, who holds what of it, who asked for what
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What the daemon does, without sockets and processes.  A member is a number
 * with holds.  Users of a slot (pool.h) are the holds that members have of it;
 * of a block, those of its first slot.
 *
 * The danger: a slot that some member maps is punched, and reads as zeroes.
 * Why it is safe:
 * 1. A member is told a slot only in the step that takes a hold of it.
 * 2. Holds go only by group_drop(), for what this member has, and by
 *    group_leave_step(), when its process has exited.
 * 3. A slot's content is written before it is told to anybody, and judged by a
 *    copy that no member can write (offer.h).
 *
 * A hash alone decides nothing but what a member is told to look at.
 */
#ifndef HOSTD_GROUP_H
#define HOSTD_GROUP_H

#include <glib.h>
#include <stdbool.h>
#include <stdint.h>

#include "asked.h"
#include "base/hash.h"
#include "holds.h"
#include "room.h"
#include "share/index.h"
#include "share/pool.h"
#include "share/wire.h"
#include "watch/memcg.h"

#define GROUP_NOBODY    UINT16_MAX
/* Pages that a member may map to a slot, for each hold. */
#define HOLD_USERS      16u
/* Pages of an offer that are read, judged and written at once, in the cache. */
#define GROUP_PIECE     64u

typedef struct GroupMember {
    Holds holds;
    uint16_t number;
    uint64_t pages;         /* that may be merged, it says */
    uint64_t charged;       /* slots it published; a block is 512 */
    uint32_t released;      /* while it leaves: how far that is */
    Room room;
} GroupMember;

typedef struct GroupStats {
    uint64_t asked, offered, published, found;
    uint64_t refused_full, refused_share, refused_memory;
    uint64_t news, news_lost;
    uint64_t given;         /* parts that were left to the kernel's KSM */
} GroupStats;

typedef struct GroupConfig {
    uint32_t slots;         /* limit */
    uint32_t max_holds;     /* of a slot */
    unsigned max_members;
    unsigned share;         /* percent of the slots, for a member */
    uint64_t key;
    const char *root;       /* for control groups; not / in tests */
} GroupConfig;

/*
 * A slot for a member that has asked about its hash; or WIRE_LEFT: others have
 * it, too, and no member is to offer it.
 */
typedef bool (*GroupTell)(void *opaque, unsigned member, uint64_t hash,
                          uint32_t slot);

typedef struct Group {
    GroupConfig config;
    KsmPool pool;
    KsmIndex index;
    size_t index_room;      /* entries it is made for */
    unsigned index_fed;     /* entries put in */
    KsmHasher hasher;
    uint32_t *upper;        /* per slot: half of the hash; pool.hash: half */
    uint16_t *owner;        /* per slot: who published it */
    size_t upper_bytes, owner_bytes;
    Asked asked;
    Rooms rooms;
    KsmMemcg memcg;
    unsigned unwatched;     /* pages written since that was looked at */
    char *copy;             /* a piece of what is offered */
    uint64_t active;        /* ns; it was asked, or offered; 0: it rests */
    uint64_t asked_before;  /* Stats.asked, when it was last to rest */
    GroupMember *member[ASKED_MEMBERS];
    unsigned members;
    uint64_t used;          /* slots with content */
    uint64_t changes;       /* of holds */
    GroupStats stats;
    GroupTell tell;         /* NEWS; or NULL */
    void *opaque;
} Group;

/*
 * Takes both descriptors, even if it fails: pool_init_over().  0 or -errno;
 * group_free() in any case.
 */
int group_init(Group *g, const GroupConfig *config, int fd, int map_fd);
void group_free(Group *g);

/* -ENOSPC: there are as many as may be; -ENOMEM. */
int group_join(Group *g, GroupMember *m, uint64_t pages);
/*
 * Its process is gone: gives back a piece of what it held.  False: that was
 * all, it is no member any more.
 */
bool group_leave_step(Group *g, GroupMember *m);

/*
 * Slots or WIRE_*, each slot with a hold.  @blocks gets the first slots of
 * those that are blocks and that @m did not hold before.
 */
void group_ask(Group *g, GroupMember *m, const uint64_t *hash, unsigned n,
               uint32_t *slot, GArray *blocks);

/*
 * The member may make so many mappings, and has so many pages yet to map.  0 or
 * -ENOMEM: that is not heeded.
 */
int group_room(Group *g, GroupMember *m, uint64_t mappings, uint64_t waiting);
/* It has lost its connection: until it is back it has said nothing. */
void group_unheard(Group *g, GroupMember *m);

/* Slots that have content there: 1, or a block's; 0: it is nobody's. */
unsigned group_length(Group *g, uint32_t slot);

/* -EPROTO: more than @m holds; those before are dropped. */
int group_drop(Group *g, GroupMember *m, const WirePair *pair, unsigned n);
/* Drops what @m holds of @slot beyond @keep. */
void group_keep(Group *g, GroupMember *m, uint32_t slot, uint32_t keep);
/*
 * ... and of all slots, a piece at a time from *@from on: what it did not list
 * was given in answers that it never got.  False: that was all.
 */
bool group_keep_step(Group *g, GroupMember *m, const Holds *keep,
                     uint32_t *from);
/* Another hold of a slot that has content; false: it, or @m, has too many. */
bool group_hold(Group *g, GroupMember *m, uint32_t slot);
/* ... and the member is to hear of it in an answer; @blocks: group_ask(). */
bool group_hold_told(Group *g, GroupMember *m, uint32_t slot, GArray *blocks);

/*
 * The slot with that content (*@is), or the one whose place the content's next
 * slot takes.  Other content with that hash keeps its place: whoever knows the
 * key can make some.  But where memory has failed it is found no more.
 */
uint32_t group_find(const Group *g, uint64_t hash, const char *page, bool *is);

/* Is the memory that the daemon may use all but used up? */
bool group_is_tight(Group *g);
/* May a table take so much more?  No daemon is to be killed for it. */
bool group_may_have(Group *g, size_t bytes);

/*
 * Goes on where another process left (reload.h).  Members
 * rejoin and have their holds, the pool has hash[], users[] and patterns;
 * group_check() compares that, and only then group_adopt() may act: it punches
 * what nobody holds.
 */
int group_rejoin(Group *g, GroupMember *m, unsigned number);
int group_check(const Group *g, uint32_t top);
void group_adopt(Group *g, uint32_t top, size_t file_slots);

/* A piece of work that can wait; false: there is none. */
bool group_step(Group *g);
/* What is not needed now may take no memory; false: it does not. */
bool group_rest(Group *g);

typedef struct GroupShare {
    uint64_t held;      /* slots, each once: all of a block's */
    uint64_t share;     /* 1/1000 of those, by the part of their holds it has */
} GroupShare;

/* What of the pool is for @m.  Goes over all that it holds. */
GroupShare group_share(Group *g, const GroupMember *m);
uint64_t group_metadata(const Group *g);
/* Slots that a member may have published. */
uint64_t group_quota(const Group *g);

#endif
