/*
 * index: content -> place
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * One table for both kinds of places.  Stable: a slot of the pool, whose
 * content never changes.  Unstable: a page of a region, a candidate; it is
 * taken out when its page is written; if that was missed, comparing finds out.
 * Entries are 5 bytes: a place and 8 bits of the hash; twelve fill a cache
 * line, and a hash may stand in two lines.  So every operation touches two
 * lines, whatever pages a guest writes; when both are full the page is not
 * indexed, which only costs a chance to merge.
 *
 * While it grows there are two tables: a new one, where entries are put, and
 * the old one, whose lines are moved over in order, a few at a time, and given
 * back to the kernel.  An operation then touches up to four lines.
 *
 * The table knows the 32-bit hash of an entry only by asking the owner of the
 * place (IndexHash): pages and slots keep it anyway.
 */
#ifndef KSM_INDEX_H
#define KSM_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PLACE_NONE  UINT32_MAX
#define PLACE_SLOT  (UINT32_C(1) << 31)     /* else the id of a page */

typedef uint32_t (*IndexHash)(void *opaque, uint32_t place);

#define LINE_ENTRIES 12

typedef struct IndexLine {
    uint8_t print[LINE_ENTRIES];    /* 8 bits of the hash */
    uint8_t used;                   /* entries in use, for choosing */
    uint8_t pad[3];
    uint32_t entry[LINE_ENTRIES];   /* ~place, so that 0 is free */
} IndexLine;

/*
 * Memory that was never written is not read: the kernel would map zeroes, and
 * take them away from all processors on a write (COW).
 */
typedef struct IndexTable {
    IndexLine *line;
    size_t n_lines;
    uint64_t *touched;  /* bitmap: pages of lines that were ever written */
} IndexTable;

typedef struct KsmIndex {
    IndexTable now;
    IndexTable old;     /* while growing: its lines from @moved on count */
    size_t moved;
    size_t populated;   /* lines of now that have memory, when it grows */
    size_t released;    /* lines of old that were given back to the kernel */
    size_t wanted;      /* lines to grow to once that is done */
    size_t count;
    IndexHash hash_of;
    void *opaque;
} KsmIndex;

/* Without any room, to begin with. */
void index_init(KsmIndex *x, IndexHash hash_of, void *opaque);
void index_free(KsmIndex *x);

/*
 * Makes room for @n entries; 0 or -ENOMEM (then it stays as it was).  Takes no
 * longer for a big index: index_step() moves the entries.  If it is growing
 * already, it grows again when that is done.
 */
int index_reserve(KsmIndex *x, size_t n);
/* What a table for @n entries takes; the one before stays until it is done. */
size_t index_table_bytes(size_t n);

/* To be called often: room for some more than there are, unless it grows. */
void index_room(KsmIndex *x);
/*
 * As big as for @n entries, or for those there are; smaller if it is much too
 * big.
 */
void index_fit(KsmIndex *x, size_t n);

typedef enum IndexWork {
    INDEX_DONE,         /* nothing to move */
    INDEX_GROWS,        /* there is more to move */
    INDEX_CROWDED,      /* ... and until then pages may find no place */
} IndexWork;

/* Moves a bounded number of entries, if it is growing. */
IndexWork index_step(KsmIndex *x);

uint32_t index_lookup(const KsmIndex *x, uint32_t hash);
/* Of the places with that hash, the first that @is says is meant. */
typedef bool (*IndexIs)(const void *meant, uint32_t place);
uint32_t index_find(const KsmIndex *x, uint32_t hash, IndexIs is,
                    const void *meant);
void index_prefetch(const KsmIndex *x, uint32_t hash);
/* False: no room. */
bool index_insert(KsmIndex *x, uint32_t hash, uint32_t place);
void index_remove(KsmIndex *x, uint32_t hash, uint32_t place);
void index_replace(KsmIndex *x, uint32_t hash, uint32_t from, uint32_t to);
size_t index_bytes(const KsmIndex *x);

#endif
