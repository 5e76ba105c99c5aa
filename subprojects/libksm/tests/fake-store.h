/*
 * libksm tests: a remote store, and its peer, in one process
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What a store served by another process would do, and the worst of it: answers
 * come late or not at all, offers are refused, content is copied before the
 * page is isolated (and may be another one by then), what is told may be wrong,
 * and the peer may go at any time.  Other members hold contents of their own.
 */
#ifndef KSM_FAKE_STORE_H
#define KSM_FAKE_STORE_H

#include "share/pool.h"
#include "share/store.h"

typedef struct FakeStoreHabits {
    unsigned late;          /* an answer comes after up to so many looks */
    /* percent */
    unsigned refuse;        /* offers that are refused, or asks put off */
    unsigned silent;        /* offers that come to nothing */
    unsigned want;          /* pages that another member has, too */
    unsigned lie;           /* slots that hold something else */
    unsigned lose;          /* looks for answers after which the peer goes */
} FakeStoreHabits;

/* For stores made from now on. */
extern FakeStoreHabits fake_habits;

/* As store_local_new(). */
KsmStore *fake_store_new(unsigned max_sharing, int *err);

/* The peer goes, with what it has not answered yet; and is there again. */
void fake_store_lose(KsmStore *s);
void fake_store_return(KsmStore *s);

/* Another member has a page of that content, by the hash of the store's seed. */
uint32_t fake_store_share(KsmStore *s, const void *page, uint64_t hash);

/* Pages that were asked about, and offered. */
uint64_t fake_store_asked(KsmStore *s);
uint64_t fake_store_offered(KsmStore *s);

/* The pool behind a store of either kind. */
KsmPool *fake_store_pool(KsmStore *s);

#endif
