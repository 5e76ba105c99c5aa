/*
 * store: content -> slot
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The idea: merged pages map slots, pages of a file.  Who keeps that file is
 * the store's business: store-local has it to itself; a remote one shares it
 * with other processes, and is served by one that alone can write.  Slots are
 * stable places: their numbers can be told to others.  Ids of pages, the
 * unstable ones, go out and come back as cookies and mean nothing there.
 *
 * The danger: what a store says may be late, wrong or a lie, and a slot that is
 * written anew while somebody maps it is silent loss.  Why it is safe:
 * 1. No answer is believed: a page is replaced only after it was isolated and
 *    compared with its slot, or copied to it then.
 * 2. Holding: a slot has users.  An answer that names a slot and a plan that
 *    takes one are users, as is every page that maps it; while there is one the
 *    slot is not written.
 * 3. Nothing is asked or offered while a guest waits.  What is called between
 *    isolation and wake (drop, readable, page, tag, map; fill, if offer() said
 *    OFFER_TAKEN) waits for nobody.
 * 4. An id in an answer is checked: its page may be another one by now.
 * 5. The tag of a slot does not change while it has users, for by its tag the
 *    index forgets it.
 *
 * Leaves to others: which page stands for a content (content.h), and what is
 * worth merging.
 */
#ifndef KSM_STORE_H
#define KSM_STORE_H

#include "base/crew.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "libksm.h"
#include "share/slot.h"

typedef struct KsmStore KsmStore;

/* A page, quiet and unlike all that is known here: who else has it? */
typedef struct StoreAsk {
    uint64_t hash;
    uint32_t id;            /* of the page */
    uint32_t tag;           /* its tag here */
} StoreAsk;

/* Consecutive pages whose content may become slots. */
typedef struct StoreOffer {
    const char *pages;      /* they may be written meanwhile */
    const uint32_t *tag;    /* of each: what its slot is found by here */
    uint32_t id;            /* of the first page */
    /* The store may set it lower, to one at least: it took no others. */
    unsigned n;
    /*
     * Slots that the pages just before and just after these map, or SLOT_NONE:
     * next to them a slot needs no mapping of its own.
     */
    uint32_t before, after;
    uint32_t slot;          /* OFFER_TAKEN: the first of @n */
} StoreOffer;

typedef enum OfferFate {
    OFFER_REFUSED,          /* no room now, or a page cannot be read */
    OFFER_BUSY,             /* no room before more answers have come */
    OFFER_FULL,             /* none for long; losses() tells when there is */
    /* There are slots, without users.  A store that is asked never says so. */
    OFFER_TAKEN,
    OFFER_LATER,            /* the pages were copied; answers will tell */
} OfferFate;

/* What became of a page that was asked about, or offered. */
typedef struct StoreAnswer {
    enum {
        ANSWER_NONE,        /* nobody else has it */
        ANSWER_REFUSED,     /* what was offered came to nothing */
        ANSWER_FULL,        /* ... as OFFER_FULL */
        ANSWER_WANTED,      /* somebody else has it: offer it */
        ANSWER_LEFT,        /* ... and has no mappings for it: leave it */
        ANSWER_SLOT,        /* there it is; the answer is a user of the slot */
    } what;
    uint32_t id, tag;       /* as in the question */
    uint32_t slot;
} StoreAnswer;

typedef enum StoreFork {
    FORK_BEFORE,            /* the child may map what has users now */
    FORK_PARENT,            /* after it */
    FORK_CHILD,             /* the child will not use the store */
} StoreFork;

/* What is left to the kernel's KSM: as WireLeft. */
typedef struct StoreTail {
    uint64_t bytes, given, merged;
} StoreTail;

#define STORE_NO_TAIL   UINT64_MAX      /* nothing is left to the kernel */

/* How much more can be mapped here. */
typedef struct StoreRoom {
    uint64_t mappings;      /* that may be made for it; or STORE_NO_TAIL */
    uint64_t waiting;       /* pages that are to be mapped, as far as is known */
} StoreRoom;

typedef struct StoreStats {
    uint64_t shared;        /* slots with users */
    uint64_t sharing;       /* users of all slots */
    uint64_t leaked;        /* slots without users not to be had (yet) */
    size_t bytes;           /* of memory, for the books */
    bool pending;           /* something is left to tidy() */
} StoreStats;

/* All are set, but for those that only some stores have: asking, filling. */
typedef struct KsmStoreOps {
    void (*free)(KsmStore *s);
    /* The seed of the hash by which contents are asked for. */
    uint64_t (*seed)(KsmStore *s);
    /* Room for what @pages of guest memory can need. 0 or -errno. */
    int (*reserve)(KsmStore *s, size_t pages);

    /*
     * Asking; all of it NULL in a store that holds nothing but what was
     * published here.  False: not now.
     */
    bool (*ask)(KsmStore *s, const StoreAsk *asks, unsigned n);
    /* What has come since, up to @max; returns their number. */
    unsigned (*answers)(KsmStore *s, StoreAnswer *answers, unsigned max);
    /* Questions, and offers, that will be answered. */
    unsigned (*awaited)(KsmStore *s);
    /* Is the peer gone?  What is held stays. */
    bool (*gone)(KsmStore *s);
    /*
     * How often it went, with all that it had not answered, or it became worth
     * while to ask again.  The seed may be another one then.
     */
    unsigned (*losses)(KsmStore *s);
    /* Why offers are refused. */
    KsmReason (*why)(KsmStore *s);

    /* OFFER_TAKEN: the slots are to be filled, or settled. */
    OfferFate (*offer)(KsmStore *s, StoreOffer *o);
    /*
     * Memory for slots, before isolation, and their content, after it; NULL
     * where offer() never says OFFER_TAKEN.
     */
    int (*allocate)(KsmStore *s, uint32_t slot, unsigned n);
    int (*fill)(KsmStore *s, uint32_t slot, const void *pages, unsigned n);

    /*
     * As offer() for one page, whose content is to be had in consecutive slots.
     * It is copied now, and OFFER_TAKEN tells the first one.  A user of one of
     * them is as good as a user of each: all stay, or none.
     */
    OfferFate (*repeat)(KsmStore *s, StoreOffer *o);
    /* The first one, if @slot is one of those; or SLOT_NONE. */
    uint32_t (*repeated)(KsmStore *s, uint32_t slot);
    /*
     * Up to *@n consecutive slots with the content of @slot, and with room for
     * a user each; SLOT_NONE: none has room.
     */
    uint32_t (*run)(KsmStore *s, uint32_t slot, unsigned *n);

    /* Has it all the users it may have? */
    bool (*full)(KsmStore *s, uint32_t slot);
    void (*hold)(KsmStore *s, uint32_t slot);       /* a user more */
    void (*drop)(KsmStore *s, uint32_t slot);
    /* It goes if it has no users. */
    void (*settle)(KsmStore *s, uint32_t slot);
    unsigned (*users)(KsmStore *s, uint32_t slot);  /* any; none: 0 */
    uint32_t (*tag)(KsmStore *s, uint32_t slot);

    /* Its content, to be read where readable() says 0. */
    const char *(*page)(KsmStore *s, uint32_t slot);
    /*
     * The file to map, and where in it; consecutive slots that one plan joins
     * follow each other there.  Read-only.
     */
    int (*map)(KsmStore *s, uint32_t slot, off_t *offset);
    /*
     * May the slots be read?  0, -EFAULT if memory of theirs has failed,
     * another -errno if they cannot be read just now.  Who reads failed memory
     * gets a SIGBUS, and with signals blocked that is the end of the process;
     * what fails between this and the reading is not helped.
     */
    int (*readable)(KsmStore *s, uint32_t slot, unsigned n);

    void (*fork)(KsmStore *s, StoreFork when);
    /*
     * Is the slot of a peer that is gone for good, while another is there?
     * SLOT_NONE: are there any?  NULL where there is one peer at most.
     */
    bool (*stale)(KsmStore *s, uint32_t slot);

    /* From now on no slot is given up. */
    void (*keep_all)(KsmStore *s);
    /*
     * Is what nobody uses given up, so that contents may move from slot to slot?
     * NULL: never, others use them too.
     */
    bool (*gives_up)(KsmStore *s);
    /* What was put off is done now; once a pass, and before it is quiet. */
    void (*flush)(KsmStore *s);
    /* Helpers may find memory for the next slots; NULL where others do. */
    void (*ahead)(KsmStore *s);
    /* Look what may go by now: once a pass.  tidy() then does a piece of it. */
    void (*pass)(KsmStore *s);
    bool (*tidy)(KsmStore *s);      /* false: no more to do now */
    StoreStats (*stats)(KsmStore *s);
    /* What is left to the kernel is told; NULL where nobody wants to know. */
    void (*tail)(KsmStore *s, const StoreTail *tail);
    /* How much room there is, where what there is none for can be left. */
    void (*room)(KsmStore *s, const StoreRoom *room);
    /* NULL where there is no group. */
    bool (*group)(KsmStore *s, KsmGroupStats *stats);
} KsmStoreOps;

struct KsmStore {
    const KsmStoreOps *ops;
    int node;               /* where slots get memory now; -1: anywhere */
    KsmCrew *crew;          /* who helps the thread that calls; or NULL */
    bool stay_home;         /* children must not inherit what maps its slots */
    uint64_t look_ns;       /* answers may come unasked: so often; 0: none */
    uint64_t ripen_ns;      /* how long to wait for more answers; 0: not */
    /* told when a slot goes: nobody may find it any more */
    void (*forget)(void *opaque, uint32_t slot);
    void *opaque;
};

static inline void store_free(KsmStore *s)
{
    if (s) {
        s->ops->free(s);
    }
}

/* Does it know more than what was published here? */
static inline bool store_is_remote(const KsmStore *s)
{
    return s->ops->ask;
}

static inline bool store_is_gone(KsmStore *s)
{
    return s->ops->gone && s->ops->gone(s);
}

/* False: it is in no group. */
static inline bool store_group(KsmStore *s, KsmGroupStats *stats)
{
    return s->ops->group && s->ops->group(s, stats);
}

static inline KsmReason store_why(KsmStore *s)
{
    return s->ops->why ? s->ops->why(s) : KSM_REASON_NO_MEMORY;
}

static inline int store_reserve(KsmStore *s, size_t pages)
{
    return s->ops->reserve(s, pages);
}

static inline OfferFate store_offer(KsmStore *s, StoreOffer *o)
{
    return s->ops->offer(s, o);
}

static inline int store_allocate(KsmStore *s, uint32_t slot, unsigned n)
{
    return s->ops->allocate(s, slot, n);
}

static inline int store_fill(KsmStore *s, uint32_t slot, const void *pages,
                             unsigned n)
{
    return s->ops->fill(s, slot, pages, n);
}

static inline OfferFate store_repeat(KsmStore *s, StoreOffer *o)
{
    return s->ops->repeat(s, o);
}

static inline uint32_t store_repeated(KsmStore *s, uint32_t slot)
{
    return s->ops->repeated(s, slot);
}

static inline uint32_t store_run(KsmStore *s, uint32_t slot, unsigned *n)
{
    return s->ops->run(s, slot, n);
}

static inline bool store_full(KsmStore *s, uint32_t slot)
{
    return s->ops->full(s, slot);
}

static inline void store_hold(KsmStore *s, uint32_t slot)
{
    s->ops->hold(s, slot);
}

static inline void store_drop(KsmStore *s, uint32_t slot)
{
    s->ops->drop(s, slot);
}

static inline void store_settle(KsmStore *s, uint32_t slot)
{
    s->ops->settle(s, slot);
}

static inline unsigned store_users(KsmStore *s, uint32_t slot)
{
    return s->ops->users(s, slot);
}

static inline uint32_t store_tag(KsmStore *s, uint32_t slot)
{
    return s->ops->tag(s, slot);
}

static inline const char *store_page(KsmStore *s, uint32_t slot)
{
    return s->ops->page(s, slot);
}

static inline int store_map(KsmStore *s, uint32_t slot, off_t *offset)
{
    return s->ops->map(s, slot, offset);
}

static inline int store_readable(KsmStore *s, uint32_t slot, unsigned n)
{
    return s->ops->readable(s, slot, n);
}

static inline void store_fork(KsmStore *s, StoreFork when)
{
    s->ops->fork(s, when);
}

static inline bool store_stale(KsmStore *s, uint32_t slot)
{
    return s->ops->stale && s->ops->stale(s, slot);
}

static inline void store_keep_all(KsmStore *s)
{
    s->ops->keep_all(s);
}

static inline bool store_gives_up(KsmStore *s)
{
    return s->ops->gives_up && s->ops->gives_up(s);
}

static inline void store_flush(KsmStore *s)
{
    s->ops->flush(s);
}

static inline void store_pass(KsmStore *s)
{
    s->ops->pass(s);
}

static inline void store_ahead(KsmStore *s)
{
    if (s->ops->ahead) {
        s->ops->ahead(s);
    }
}

static inline void store_tail(KsmStore *s, const StoreTail *tail)
{
    if (s->ops->tail) {
        s->ops->tail(s, tail);
    }
}

static inline void store_room(KsmStore *s, const StoreRoom *room)
{
    if (s->ops->room) {
        s->ops->room(s, room);
    }
}

static inline bool store_tidy(KsmStore *s)
{
    return s->ops->tidy(s);
}

static inline StoreStats store_stats(KsmStore *s)
{
    return s->ops->stats(s);
}

#endif
