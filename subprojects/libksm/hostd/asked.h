/*
 * asked: hashes that members asked about and that the pool has not
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Who asks second learns that the content is wanted, and is to offer it; the
 * others are told when it is there: who asked first, and who asks while it is
 * on its way.  If it does not come (the page was written, its process ended)
 * the next who asks is to offer it.
 *
 * An entry is 8 bytes: 37 bits of the hash, two askers, and when the second
 * was told to offer the content, or that nobody is to; sixteen are a bucket,
 * of two cache lines, the newest first, and the oldest falls out.  A bucket
 * has its share of the range of hashes; there are 2^9 at least, so that its
 * number tells the upper bits that the entry does not have.  So 46 bits are
 * known, and who asks about another hash with the same 46 is told of a page in
 * vain.  The table grows and shrinks with what stands in it, without asking
 * anybody, and where it is: with more buckets each hash stands further up, so
 * those above move first.
 *
 * Moving, and forgetting a member that left, goes by pieces (asked_step()).
 * Until it is forgotten its number must not be given to another member.
 */
#ifndef HOSTD_ASKED_H
#define HOSTD_ASKED_H

#include <glib.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ASKED_MEMBERS   1024u   /* numbers are below */
#define ASKED_NOBODY    UINT32_MAX
#define ASKED_WAYS      16u
#define ASKED_SAME      6u      /* askers of one hash: there are others */

typedef struct AskedBucket {
    /* hash, folded << 27 | when << 22 | two askers + 1; 0: none */
    uint64_t entry[ASKED_WAYS];
} AskedBucket;

typedef struct Asked {
    AskedBucket *bucket;
    size_t n;               /* buckets */
    size_t was;             /* ... before, while their number changes; 0 */
    size_t moved;           /* of those, so many have become new ones */
    size_t most;            /* buckets: it grows no further */
    bool rests;             /* nothing was asked for a while */
    size_t count;           /* entries */
    uint64_t gone[ASKED_MEMBERS / 64];      /* left; not forgotten yet */
    uint64_t sweeping[ASKED_MEMBERS / 64];  /* those of the pass under way */
    size_t swept;           /* buckets of it; of none: no pass */
    bool sweeps;
} Asked;

/* 0 or -ENOMEM. */
int asked_init(Asked *a);
void asked_free(Asked *a);

/* It may grow until there is room for about @hashes. */
void asked_limit(Asked *a, uint64_t hashes);
/* How a table that is too small grows: what is said is the least. */
typedef enum AskedGrowth {
    ASKED_STAY,         /* it forgets */
    ASKED_FRUGAL,       /* by a quarter: an entry is moved four times */
    ASKED_DOUBLE,       /* an entry is moved once */
} AskedGrowth;

/* So many are about to be noted: bytes that the table would grow by. */
size_t asked_growth(const Asked *a, uint64_t hashes, AskedGrowth how);
/* ... and grows by. */
void asked_room(Asked *a, uint64_t hashes, AskedGrowth how);
/* Bytes it has grown by and will write, but has not yet. */
size_t asked_owed(const Asked *a);

/*
 * A member asks, at that time (ns; any clock that does not go back).  True: it
 * is to offer the content (also if it asks again, before it could).  False: it
 * is noted, to be told.
 */
bool asked_note(Asked *a, uint64_t hash, unsigned member, uint64_t now);
/* Others that have asked about it; @member has, too, if @here. */
unsigned asked_others(Asked *a, uint64_t hash, unsigned member,
                      uint16_t other[ASKED_SAME], bool *here);
/*
 * A member asks about what nobody is to offer.  True: the others do not know it
 * yet, or not since a member was told to offer it after all.
 */
bool asked_left(Asked *a, uint64_t hash, unsigned member, uint64_t now);
void asked_prefetch(const Asked *a, uint64_t hash);
/* One who asked and was noted; the entry goes.  ASKED_NOBODY: that was all. */
uint32_t asked_take(Asked *a, uint64_t hash);

void asked_leave(Asked *a, unsigned member);
/* May the number be given to a new member? */
bool asked_is_forgotten(const Asked *a, unsigned member);
/* Nothing was asked for a while: it may be made as small as can be. */
void asked_rest(Asked *a);
/* A piece of the work; false: there is none. */
bool asked_step(Asked *a);

/* Of @n buckets, to be filled with what another one has in them. */
int asked_resize(Asked *a, size_t n);
/* ... which was done. */
void asked_count(Asked *a);

size_t asked_bytes(const Asked *a);

#endif
