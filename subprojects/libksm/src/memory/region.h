/*
 * region: registered memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A region is cut into chunks of 2 MiB at 2 MiB addresses (a huge page); the
 * first and the last may be partly outside.  Six bytes are kept per page:
 * a state, what the state is about (a hash or a slot of the pool), and the
 * history smart scan needs.  Everything that counts pages is changed in one
 * place, page_set(), so that the counters cannot drift from the states.
 *
 * Most of a big region may never be populated, so only what is costs memory and
 * time.  A chunk of which nothing is known is *bare*: a hole, as far as anybody
 * knows.  All that is kept of it is zeroes, which is how the kernel gives us
 * memory that nobody has written; so nothing is written when a region is added,
 * and nothing read when it is walked: 64 chunks are a group, which has a bit
 * for each that is not bare.  The dirty source asks the page tables about bare
 * chunks, many at a time.
 *
 * The danger: a page of a bare chunk is something else than a hole, and nobody
 * looks.  Why it is safe: page_set() makes its chunk *live* first, and a chunk
 * becomes bare again only if none of its pages is anything else.  What is
 * populated meanwhile is found as it was found the first time.
 */
#ifndef KSM_REGION_H
#define KSM_REGION_H

#include "base/page.h"
#include "libksm.h"

/*
 * What is known of a page.
 *
 *   HOLE --populated--> NEW --hashed--> UNIQUE <--equal--> EQUAL
 *                        |                                   |
 *                        +----hashed--> ZEROES             merged
 *                        |                 |                 v
 *                        |             given back          MERGED
 *                        |                 v                 |
 *                        |               GIVEN            written
 *                        |                                   v
 *                        +<-------------restored---------- BROKEN
 *
 * What was hashed and is written becomes NEW again; so does what was GIVEN or
 * FREED.  An isolation that is refused makes it PINNED or BUSY, until it is
 * tried again.  What is discarded, or found gone, is a HOLE; where merged pages
 * could not be discarded they are BROKEN.  SWAPPED pages come back as NEW.
 * BARRED ones stay until their owner discards them, or maps something there.
 * What is left to the kernel (engine/tail.h) is KERNEL while it has it merged.
 */
typedef enum PageState {
    PAGE_HOLE,          /* not populated; 0: memory never written says so */
    PAGE_NEW,           /* content not known */
    PAGE_UNIQUE,        /* hashed (tag); nothing equal known */
    PAGE_EQUAL,         /* hashed (tag); something equal was seen */
    PAGE_ZEROES,        /* hashed: zeroes, but still populated */
    PAGE_MERGED,        /* maps a slot of the pool (tag) */
    PAGE_BROKEN,        /* in a mapping of the pool, copied on write since */
    PAGE_GIVEN,         /* was zeroes, given back, not populated since */
    PAGE_FREED,         /* the owner does not need it until written */
    PAGE_SWAPPED,       /* swapped out, or poisoned: left alone */
    PAGE_BARRED,        /* its memory failed: mapped without access */
    PAGE_PINNED,        /* isolation was refused; tried again later */
    PAGE_BUSY,          /* the busy op said no; tried again later */
    PAGE_KERNEL,        /* the kernel's KSM has merged it: tail.h */
    PAGE_OUTSIDE,       /* of the region (first and last chunk) */
    PAGE_STATES
} PageState;

#define PAGE_STATE_MASK 0x0fu
#define PAGE_JOINED     0x10u   /* BROKEN, or behind one: see region_joined() */
#define PAGE_BLIND      0x20u   /* FREED: it may have been written since */
#define PAGE_AGAIN      0x20u   /* BROKEN: equal to something, or zeroes */
#define PAGE_LEFT       0x20u   /* EQUAL: left to the kernel, here and elsewhere */
#define PAGE_INDEXED    0x40u   /* stands in the index */
#define PAGE_WRITTEN    0x80u   /* written since dirty was asked before */

#define CHUNK_VISIT     0x01u   /* scan has something to do here */
#define CHUNK_CHECK     0x02u   /* look which merged pages were written */
#define CHUNK_ARMED     0x04u   /* populated: written-tracking is worth it */
#define CHUNK_QUEUED    0x08u   /* in the queue of ripe chunks */
#define CHUNK_HUGE      0x10u   /* a huge page when last seen */
#define CHUNK_SEEN      0x20u   /* scanned at least once */
#define CHUNK_BLIND     0x40u   /* there may be pages with PAGE_BLIND */
#define CHUNK_PARKED    0x80u   /* it will be called: asks.h */
#define CHUNK_RIPENING  0x100u  /* its merging waits: ripen.h */
#define CHUNK_TAIL      0x200u  /* left to the kernel's KSM: MADV_MERGEABLE */
#define CHUNK_LIVE      0x400u  /* what is kept of its pages has memory */
#define CHUNK_UNOFFERED 0x800u  /* others want some; there was no memory */
#define CHUNK_LOOSE     0x1000u /* a huge page that is not protected: loose.h */
#define CHUNK_STIRRED   0x2000u /* LOOSE: had changed, or new, in this pass */
#define CHUNK_STILL     0x4000u /* LOOSE: seen in this pass, as it was */
#define CHUNK_WOKEN     0x8000u /* its wait was ended before its time */

#define GROUP_CHUNKS    64u
#define GROUP_PAGES     (GROUP_CHUNKS * CHUNK_PAGES)

typedef struct KsmGroup {
    uint64_t known;     /* bit for each chunk that is not bare */
    uint64_t live;      /* ... that has CHUNK_LIVE */
    uint32_t id;        /* in the engine's directory */
} KsmGroup;

/* Bare: all zeroes. */
typedef struct KsmChunk {
    uint32_t tail_until;        /* tick (tail.c) until which it is not left to the
                                   kernel; or, if it is, not taken away */
    uint16_t held;      /* pages neither HOLE nor OUTSIDE */
    uint16_t fresh;     /* pages that are NEW */
    uint16_t written;   /* pages with PAGE_WRITTEN */
    uint16_t gain;      /* pages EQUAL or ZEROES: what merging may save */
    uint16_t mapped;    /* pages MERGED or BROKEN */
    uint16_t broken;    /* pages BROKEN */
    uint16_t given;     /* pages GIVEN */
    uint16_t again;     /* pages with PAGE_AGAIN */
    uint16_t kernel;    /* pages KERNEL */
    uint16_t left;      /* pages with PAGE_LEFT */
    uint16_t runs;      /* mappings of the pool in this chunk */
    uint16_t restored_at;       /* low bits of the number of looks by then */
    uint16_t soon;      /* merged pages written some looks after that, at most */
    uint16_t later;     /* ... and others */
    uint16_t lazy;      /* FREED and populated when seen: chunk_set_lazy() */
    uint16_t tried;     /* gain when merging was last refused */
    uint16_t flags;
    uint16_t tail_wait; /* passes until it may be left to the kernel */
    uint8_t why_not;    /* KsmReason of that refusal: chunk_set_reason() */
    uint8_t wait;       /* passes until it is tried again */
    uint8_t parked;     /* times in this pass that it was put off */
    uint8_t backoff;    /* log2 of that wait, grows with each refusal */
    uint8_t hot;        /* log2 of passes between looks for writes; LOOSE: 4 */
    uint8_t hot_wait;   /* of those still to go */
    uint8_t same;       /* huge: looks in a row that found all as it was */
    uint8_t late;       /* else: refusals in a row for what it costs */
    uint8_t away;       /* log2 of passes between looks for SWAPPED pages */
    uint8_t away_wait;  /* of those still to go; 0: none is SWAPPED */
    uint8_t visited_in; /* mark of a pass; 0: none */
    uint8_t failed_in;  /* in which merging was tried for nothing; 0: none */
    uint8_t yield;      /* 0 to 255: how much was merged here lately */
    uint8_t calm;       /* looks, see rhythm.h, since the last restoring */
    uint8_t restored;   /* log2 of the looks until more may be */
    uint8_t tail_scan;  /* low bits of the kernel's scans when it was */
    uint8_t tail_vain;  /* passes in which it merged nothing there; or,
                           before, that it was held back */
    uint8_t tail_tries; /* since that or writes: log2 of the next rest */
} KsmChunk;

struct KsmRegion {
    char *base;             /* address of page 0: a 2 MiB boundary */
    char *addr;             /* as given */
    size_t len;
    size_t n_chunks;
    size_t n_pages;         /* n_chunks * 512 */
    int node;
    uint32_t salt;          /* mixed into hashes: node */
    const KsmRegionOps *ops;
    void *opaque;
    KsmDirtySource dirty;
    bool leaving;           /* being removed: not to be merged any more */
    bool seen;              /* a whole pass has looked for what is populated */
    bool looked;            /* nothing was put off in this one, so far */
    bool tagged;            /* tags will be written: more than zeroes merge */
    bool tracking;          /* registered for async write-protect */
    bool registered;        /* ... or part of it is, which is of no use */
    size_t pause_at;        /* inhibited: the page from which on it is */
    const char *inhibited;  /* what the op said last */
    unsigned unmerging;     /* calls that unmerge it: nothing is merged */
    bool rests;             /* not to be merged in this pass */
    /* attributes to give to what is mapped anew */
    int map_flags;          /* MAP_NORESERVE, if the memory has it */
    bool seen_flags;        /* of the first mapping */
    bool mergeable;         /* for the kernel's KSM, by its owner's doing */
    bool merge_any;         /* what is mapped anew is so, too: attr.h */
    int advice[4];
    unsigned n_advice;
    int policy;             /* NUMA; -1: none */
    unsigned long policy_mask[16];
    char *kin;              /* a page split off the region, or NULL: kin.h ... */
    size_t kin_page;        /* ... and which page it was at */
    bool kin_new;           /* it was not used yet */
    bool kinless;           /* there is to be none: kin_allowed() */
    bool apart;             /* memory was restored without it */
    uint8_t kin_tries;      /* to split some off that failed, in a row */
    /* per page */
    uint32_t *tag;
    uint8_t *state;
    /*
     * high 4 bits: age, low: passes to skip; BROKEN: looks, see broken.c;
     * MERGED: gather.h
     */
    uint8_t *history;
    KsmGroup *group;
    KsmChunk *chunk;        /* behind the groups */
    size_t n_groups;
    size_t meta_bytes;      /* of all that, what has memory */
    uint64_t count[PAGE_STATES];
    uint64_t n_written;     /* pages NEW and PAGE_WRITTEN */
    uint64_t n_left;        /* pages with PAGE_LEFT */
    uint64_t gain[KSM_REASON_MAX];  /* of all chunks, by their reason */
    uint64_t lazy;          /* of all chunks */
    size_t forget_from;     /* chunks from there on: forget their ages */
    size_t ask_from;        /* ... ask about them again; n_chunks: none */
    uint64_t runs;
    /* counts since added; added to the engine's totals */
    uint64_t merged, cow_broken, free_hinted, pinned, busy, verify_failed;
};

/* Pages of one chunk that are alike in how they are mapped. */
typedef struct PageRun {
    size_t page, n;
    char *addr;             /* the same in bytes */
    size_t len;
    bool mapped;            /* all are in mappings of the pool */
    bool barred;            /* all are BARRED */
} PageRun;

static inline PageState page_state(const KsmRegion *r, size_t page)
{
    return r->state[page] & PAGE_STATE_MASK;
}

/* Hashed: its tag says what it holds, or held. */
static inline bool page_is_known(const KsmRegion *r, size_t page)
{
    PageState s = page_state(r, page);

    return s == PAGE_UNIQUE || s == PAGE_EQUAL || s == PAGE_ZEROES;
}

/* EQUAL, and left to the kernel. */
static inline bool page_is_left(const KsmRegion *r, size_t page)
{
    return page_state(r, page) == PAGE_EQUAL && (r->state[page] & PAGE_LEFT);
}

/* Would merging save it? */
static inline bool state_gains(PageState s)
{
    return s == PAGE_EQUAL || s == PAGE_ZEROES;
}

static inline char *page_addr(const KsmRegion *r, size_t page)
{
    return r->base + (page << PAGE_SHIFT);
}

static inline KsmChunk *page_chunk(const KsmRegion *r, size_t page)
{
    return &r->chunk[page / CHUNK_PAGES];
}

static inline uint32_t page_id(const KsmRegion *r, size_t page)
{
    return r->group[page / GROUP_PAGES].id * GROUP_PAGES + page % GROUP_PAGES;
}

static inline uint32_t chunk_id(const KsmRegion *r, size_t chunk)
{
    return r->group[chunk / GROUP_CHUNKS].id * GROUP_CHUNKS +
           chunk % GROUP_CHUNKS;
}

static inline bool chunk_is_bare(const KsmRegion *r, size_t chunk)
{
    return !(r->group[chunk / GROUP_CHUNKS].known >> (chunk % GROUP_CHUNKS) &
             1);
}

static inline bool chunk_is_live(const KsmRegion *r, size_t chunk)
{
    return r->chunk[chunk].flags & CHUNK_LIVE;
}

/* Is the page in a mapping of the pool? */
static inline bool page_is_mapped(const KsmRegion *r, size_t page)
{
    PageState s = page_state(r, page);

    return s == PAGE_MERGED || s == PAGE_BROKEN;
}

/* Is all of the chunk in the region, so that it may be a huge page of it? */
static inline bool chunk_is_whole(const KsmRegion *r, size_t chunk)
{
    const char *from = r->base + chunk * CHUNK_BYTES;

    return from >= r->addr && from + CHUNK_BYTES <= r->addr + r->len;
}

/* Pages of the region: from the first to the one behind the last. */
static inline size_t region_first(const KsmRegion *r)
{
    return (r->addr - r->base) / PAGE_BYTES;
}

static inline size_t region_end(const KsmRegion *r)
{
    return region_first(r) + r->len / PAGE_BYTES;
}

/*
 * Changes the state; clears PAGE_BLIND, PAGE_INDEXED and PAGE_WRITTEN.
 * Leaving MERGED or the index properly is up to content_leave().
 */
void page_set(KsmRegion *r, size_t page, PageState state);

/* As page_set() to BROKEN: where its mapping begins and ends is not lost. */
void page_break(KsmRegion *r, size_t page);

/* Marks a page as written, or not, since the last look. */
void page_mark(KsmRegion *r, size_t page, bool written);

/* From now on the chunk is not bare, though all of its pages may be holes. */
void chunk_know(KsmRegion *r, size_t chunk);

/* Scan has something to do there. */
void chunk_want(KsmRegion *r, size_t chunk);

/*
 * The chunk, of which nothing is populated, is bare again if nothing else is
 * known of it; what was kept of it goes back to the kernel.
 */
void chunk_forget(KsmRegion *r, size_t chunk);

/* The first chunk from @chunk on that is not bare, or @end. */
size_t region_known(const KsmRegion *r, size_t chunk, size_t end);

#define REGION_FOREACH_KNOWN(r, c, from, end)                   \
    for (size_t c = region_known(r, from, end); c < (end);      \
         c = region_known(r, c + 1, end))

/* Pages that are neither holes nor outside. */
static inline size_t region_held(const KsmRegion *r)
{
    return r->n_pages - r->count[PAGE_HOLE] - r->count[PAGE_OUTSIDE];
}

/* ... and those that may be: of chunks that were found and not looked at. */
size_t region_expected(const KsmRegion *r);

/* Why the chunk's gain is not merged: KsmReason. */
void chunk_set_reason(KsmRegion *r, KsmChunk *c, KsmReason reason);

/* How many of its pages are FREED and populated. */
void chunk_set_lazy(KsmRegion *r, KsmChunk *c, unsigned lazy);

/* An EQUAL page is not to be merged by us, or is after all. */
void page_leave(KsmRegion *r, size_t page, bool leave);

/* Marks a BROKEN page as one that would be merged, were it restored. */
void page_again(KsmRegion *r, size_t page, bool again);

/*
 * As page_set(), or page_break(); @to may have PAGE_BLIND.  GIVEN pages do not
 * become FREED.
 */
void region_set_run(KsmRegion *r, const PageRun *run, uint8_t to);

/* The run from @page on, not beyond @end. */
PageRun region_run(const KsmRegion *r, size_t page, size_t end);

/* A byte range of @addr as pages; false: not inside, or not aligned. */
bool region_pages(const KsmRegion *r, size_t offset, size_t len, size_t *page,
                  size_t *n);

/* Is the page in a mapping of the pool with the one before it? */
bool region_joined(const KsmRegion *r, size_t page);

/* Counts the chunk's mappings of the pool anew. */
void region_count_runs(KsmRegion *r, size_t chunk);

/* @r is zeroes. */
void region_init(KsmRegion *r, void *addr, size_t len, int node,
                 const KsmRegionOps *ops, void *opaque);
/* What is kept of each page: 0 or -ENOMEM; region_fini() in any case. */
int region_alloc(KsmRegion *r);
void region_fini(KsmRegion *r);

/* Gives up KsmRegion.kin. */
void kin_drop(KsmRegion *r);

/* Is its memory kept out of children (MADV_DONTFORK), as far as /proc told? */
bool region_stays_home(const KsmRegion *r);

/* Why not to merge there now; asks the region's op. */
const char *region_inhibited(KsmRegion *r);

/* Is a device at the range, or may it be?  Asks the region's op. */
bool region_busy(KsmRegion *r, void *addr, size_t len);

/* Tests: counters equal what a walk counts. */
void region_check(KsmRegion *r);

#endif
