/*
 * libksm tests: a remote store, and its peer, in one process
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Does what a store of another process would, and the worst of it: answers come
 * late or not at all, offers are refused, content is copied before the page is
 * isolated (and may have changed), what is told may be wrong, and the peer may
 * go at any time.  Other members hold contents of their own.
 */
#ifndef KSM_FAKE_STORE_H
#define KSM_FAKE_STORE_H

#include "share/pool.h"
#include "share/store.h"

typedef struct FakeStoreHabits {
    uint32_t seed;
    unsigned late;          /* an answer comes after up to so many looks */
    /* percent */
    unsigned refuse;        /* offers that are refused, or asks put off */
    unsigned busy;          /* offers for which there is no room now */
    unsigned silent;        /* offers that come to nothing */
    unsigned want;          /* pages that another member has, too */
    unsigned left;          /* ... and that are left to the kernel */
    unsigned lie;           /* slots that hold something else */
    unsigned lose;          /* looks for answers after which the peer goes */
} FakeStoreHabits;

/* For stores made from now on: late and nothing worse, or all of it. */
extern FakeStoreHabits fake_habits;
extern const FakeStoreHabits fake_habits_bad;

/* As store_local_new(). */
KsmStore *fake_store_new(unsigned max_sharing, int *err);

FakeStoreHabits *fake_store_habits(KsmStore *s);

/* The peer goes, with all unanswered questions; and is back. */
void fake_store_lose(KsmStore *s);
void fake_store_return(KsmStore *s);
/* Another peer has come; slots below are of the one before. */
void fake_store_outdate(KsmStore *s, uint32_t below);
/* Nothing is late any more. */
void fake_store_hurry(KsmStore *s);

/* Another member has such a page; the hash is by the store's seed. */
uint32_t fake_store_share(KsmStore *s, const void *page, uint64_t hash);

/* ... and tells of it, with the tag it has here. */
void fake_store_news(KsmStore *s, uint32_t slot, uint32_t tag);

/* The last that was told. */
StoreRoom fake_store_room(KsmStore *s);

/* Pages that were asked about, and offered. */
uint64_t fake_store_asked(KsmStore *s);
uint64_t fake_store_offered(KsmStore *s);

/* Adds users that wait in answers: the i-th slot to the i-th element. */
void fake_store_users(KsmStore *s, uint32_t *users);

/* The pool behind a store of either kind. */
KsmPool *fake_store_pool(KsmStore *s);

#endif
