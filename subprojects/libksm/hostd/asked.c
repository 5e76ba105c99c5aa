/*
 * asked: hashes that members asked about and that the pool has not
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "asked.h"
#include "base/page.h"
#include "base/prim.h"

#define BUCKETS_MIN 512u    /* 64 KiB; (EXACT_BITS + 32) more bits of a hash */
#define BUCKETS_MAX UINT64_C(0x80000000)
#define SHRINK_MIN  4096u   /* not what a message or two make it grow to */
#define REST_SPARE  2560u   /* hashes: what an idle member asks about at once */
#define HASH_AT     27u     /* in an entry: */
#define EXACT_AT    41u     /* ... the upper part of it: bits 32 to 54 */
#define EXACT_BITS  23u
/*
 * Of sixteen, on average, before it grows: one in a thousand falls out.  Who
 * fell out hears nothing, and what two have is not merged for minutes.
 */
#define FILLED_MAX  7u
#define WANTED_AT   22u
#define WANTED_ENDS 30u     /* marks are counted from 1 to this */
#define LEFT_MARK   31u     /* nobody is to offer it, and all know */
#define MARK_MASK   31u
#define WANTED_UNIT_NS  UINT64_C(4000000000)
#define WANTED_UNITS    3u  /* so long it is thought to be on its way */
#define MEMBER_BITS 11u
#define MEMBER_ENDS ((1u << MEMBER_BITS) - 1)
/* Buckets moved or swept in a step: below a millisecond. */
#define STEP        2048u
#define LINE        64u     /* of the cache */

G_STATIC_ASSERT(sizeof(AskedBucket) == 2 * LINE);

static size_t table_bytes(size_t n)
{
    return ROUND_UP_TO(n * sizeof(AskedBucket), PAGE_BYTES);
}

static int table_map(Asked *a, size_t n)
{
    a->n = n;
    a->bucket = prim.map(NULL, table_bytes(n), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return a->bucket ? 0 : -ENOMEM;
}

int asked_init(Asked *a)
{
    memset(a, 0, sizeof(*a));
    a->most = BUCKETS_MIN;
    return table_map(a, BUCKETS_MIN);
}

void asked_free(Asked *a)
{
    if (a->bucket) {
        prim.unmap(a->bucket, table_bytes(MAX(a->n, a->was)));
        a->bucket = NULL;
    }
}

/* Buckets that are not filled too much by so many. */
static size_t buckets_for(uint64_t hashes)
{
    return MIN(hashes / FILLED_MAX + 1, BUCKETS_MAX);
}

void asked_limit(Asked *a, uint64_t hashes)
{
    a->most = MAX(a->most, buckets_for(hashes));
}

/* Of @n buckets, the one that has the hash. */
static size_t bucket_number(size_t n, uint64_t hash)
{
    return (hash >> 32) * n >> 32;
}

/* The least upper 32 bits of a hash that a bucket of @n has. */
static uint64_t bucket_first(size_t n, size_t number)
{
    return (((uint64_t)number << 32) + n - 1) / n;
}

/*
 * The upper 32 bits of a hash, by that and the lower ones of them: a bucket has
 * fewer than 2^EXACT_BITS + 1 in a row.
 */
static uint64_t upper_of(uint64_t first, uint64_t exact)
{
    return first + ((exact - first) & ((1u << EXACT_BITS) - 1));
}

/* Of those before, is it one that has not moved?  Up, the last moves first. */
static bool is_old(const Asked *a, size_t number)
{
    return a->n > a->was ? number < a->was - a->moved : number >= a->moved;
}

/* Where @hash stands, or is to stand now. */
static AskedBucket *bucket_of(const Asked *a, uint64_t hash)
{
    if (a->was && is_old(a, bucket_number(a->was, hash))) {
        return &a->bucket[bucket_number(a->was, hash)];
    }
    return &a->bucket[bucket_number(a->n, hash)];
}

/* The lower 32 bits are folded to 14, so that all of them count. */
static uint64_t entry_hash(uint64_t hash)
{
    uint64_t exact = hash >> 32 & ((1u << EXACT_BITS) - 1);
    uint32_t folded = (uint32_t)hash * UINT32_C(0x9e3779b1);

    return exact << EXACT_AT |
           (uint64_t)(folded >> (32 - (EXACT_AT - HASH_AT))) << HASH_AT;
}

/* @which: 0, or 1 for the one that may be marked. */
static unsigned entry_member(uint64_t entry, unsigned which)
{
    return (entry >> which * MEMBER_BITS & MEMBER_ENDS) - 1;
}

static bool entry_has(uint64_t entry, unsigned which)
{
    return entry >> which * MEMBER_BITS & MEMBER_ENDS;
}

static uint64_t entry_of(unsigned member, unsigned which)
{
    return (uint64_t)(member + 1) << which * MEMBER_BITS;
}

static void entry_set(uint64_t *entry, unsigned which, unsigned member)
{
    *entry |= entry_of(member, which);
}

/* The mark goes with its member. */
static void entry_clear(uint64_t *entry, unsigned which)
{
    uint64_t bits = MEMBER_ENDS;

    if (which) {
        bits |= (uint64_t)MARK_MASK << (WANTED_AT - MEMBER_BITS);
    }
    *entry &= ~(bits << which * MEMBER_BITS);
}

static bool entry_is_empty(uint64_t entry)
{
    return !entry_has(entry, 0) && !entry_has(entry, 1);
}

static bool in_set(const uint64_t *set, unsigned member)
{
    return set[member / 64] >> (member % 64) & 1;
}

/* Those of the set leave the entry. */
static void entry_drop(uint64_t *entry, const uint64_t *set)
{
    for (unsigned i = 0; i < 2; i++) {
        if (entry_has(*entry, i) && in_set(set, entry_member(*entry, i))) {
            entry_clear(entry, i);
        }
    }
}

static void bucket_push(Asked *a, AskedBucket *b, uint64_t entry)
{
    a->count += !b->entry[ASKED_WAYS - 1];
    memmove(b->entry + 1, b->entry, sizeof(b->entry) - sizeof(b->entry[0]));
    b->entry[0] = entry;
}

static void bucket_remove(Asked *a, AskedBucket *b, unsigned k)
{
    a->count--;
    memmove(b->entry + k, b->entry + k + 1,
            (ASKED_WAYS - 1 - k) * sizeof(b->entry[0]));
    b->entry[ASKED_WAYS - 1] = 0;
}

/*
 * Which entries have the hash, a bit each.  All are compared: where a loop that
 * stops would end cannot be foretold, and costs more.
 */
static unsigned bucket_match(const AskedBucket *b, uint64_t hash)
{
    uint64_t wanted = entry_hash(hash) >> HASH_AT;
    unsigned bits = 0;

    for (unsigned k = 0; k < ASKED_WAYS; k++) {
        bits |= (unsigned)(b->entry[k] >> HASH_AT == wanted) << k;
    }
    return bits;
}

/*
 * The first of *@bits, which are bucket_match()'s, and not any more;
 * ASKED_WAYS: there is none.  Members that are gone have left it.
 */
static unsigned bucket_next(Asked *a, AskedBucket *b, uint64_t hash,
                            unsigned *bits)
{
    while (*bits) {
        unsigned k = __builtin_ctz(*bits);

        if (!b->entry[k]) {
            break;      /* that is a hash, too; those behind it are free */
        }
        entry_drop(&b->entry[k], a->gone);
        if (!entry_is_empty(b->entry[k])) {
            *bits &= *bits - 1;
            return k;
        }
        bucket_remove(a, b, k);
        *bits = bucket_match(b, hash) >> k << k;
    }
    return ASKED_WAYS;
}

/* When something was said to be wanted, as an entry has it; never 0. */
static uint64_t mark_of(uint64_t ns)
{
    return ns / WANTED_UNIT_NS % WANTED_ENDS + 1;
}

/* Was its second member to offer the content a moment ago?  Old marks go. */
static bool is_coming(uint64_t *entry, uint64_t now)
{
    unsigned mark = *entry >> WANTED_AT & MARK_MASK;

    if (mark == LEFT_MARK) {
        return false;
    }
    if (mark && (mark_of(now) + WANTED_ENDS - mark) % WANTED_ENDS >=
                WANTED_UNITS) {
        *entry &= ~((uint64_t)MARK_MASK << WANTED_AT);
        mark = 0;
    }
    return mark;
}

/* What a bucket says of one hash. */
typedef struct Askers {
    unsigned others;        /* without the one that asks now */
    uint64_t *here;         /* where that one stands, or NULL: ... */
    unsigned which;
    uint64_t *room;         /* ... where it can */
    uint64_t *marked;       /* an entry with a mark, or that can have one */
    bool told, coming;      /* it is to offer the content; another one is */
    bool left;              /* nobody is */
} Askers;

static Askers askers_of(Asked *a, AskedBucket *b, uint64_t hash,
                        unsigned bits, unsigned member, uint64_t now)
{
    Askers found = { 0 };
    unsigned k;

    while ((k = bucket_next(a, b, hash, &bits)) < ASKED_WAYS) {
        uint64_t *entry = &b->entry[k];
        bool marked = is_coming(entry, now), mine = false;

        for (unsigned i = 0; i < 2; i++) {
            if (!entry_has(*entry, i)) {
                found.room = entry;
            } else if (entry_member(*entry, i) == member) {
                found.here = entry;
                found.which = i;
                mine |= i;
            } else {
                found.others++;
            }
        }
        found.marked = entry_has(*entry, 1) ? entry : found.marked;
        found.left |= (*entry >> WANTED_AT & MARK_MASK) == LEFT_MARK;
        found.told |= marked && mine;
        found.coming |= marked && !mine;
    }
    return found;
}

/* Notes the member; with the mark, if it is to have one.  True: it has. */
static bool note(Asked *a, AskedBucket *b, const Askers *found, uint64_t hash,
                 unsigned member, uint64_t mark)
{
    uint64_t *entry = found->here ? found->here : found->room;
    bool told = mark;
    unsigned other;

    if (!entry) {
        bucket_push(a, b, entry_hash(hash));
        entry = &b->entry[0];
    }
    if (found->here) {
        entry_clear(entry, found->which);
    }
    if (entry_has(*entry, told)) {
        /* it takes the other place; an old mark is nobody's */
        other = entry_member(*entry, told);
        entry_clear(entry, told);
        entry_set(entry, !told, other);
    }
    entry_set(entry, told, member);
    *entry |= mark << WANTED_AT;
    return told;
}

/* Most of what is asked again: the member is the only one, and is here. */
static bool is_alone(const AskedBucket *b, unsigned bits, unsigned member)
{
    uint64_t rest = (UINT64_C(1) << HASH_AT) - 1;

    return bits && !(bits & (bits - 1)) &&
           (b->entry[__builtin_ctz(bits)] & rest) == entry_of(member, 0);
}

/* Somebody is told otherwise: who is to leave it hears of that anew. */
static void left_clear(AskedBucket *b, unsigned bits)
{
    for (; bits; bits &= bits - 1) {
        uint64_t *entry = &b->entry[__builtin_ctz(bits)];

        if ((*entry >> WANTED_AT & MARK_MASK) == LEFT_MARK) {
            *entry &= ~((uint64_t)MARK_MASK << WANTED_AT);
        }
    }
}

bool asked_note(Asked *a, uint64_t hash, unsigned member, uint64_t now)
{
    AskedBucket *b = bucket_of(a, hash);
    unsigned bits = bucket_match(b, hash);
    Askers found;

    g_assert(member < ASKED_MEMBERS);
    if (is_alone(b, bits, member)) {
        return false;
    }
    if (!bits) {
        bucket_push(a, b, entry_hash(hash) | entry_of(member, 0));
        return false;
    }
    found = askers_of(a, b, hash, bits, member, now);
    if (found.left) {
        left_clear(b, bucket_match(b, hash));
    }
    if (found.others && (found.told || !found.coming)) {
        return note(a, b, &found, hash, member, mark_of(now));
    }
    if (found.here) {
        return false;
    }
    if (found.others >= ASKED_SAME) {
        return true;        /* and it hears from nobody */
    }
    return note(a, b, &found, hash, member, 0);
}

unsigned asked_others(Asked *a, uint64_t hash, unsigned member,
                      uint16_t other[ASKED_SAME], bool *here)
{
    AskedBucket *b = bucket_of(a, hash);
    unsigned bits = bucket_match(b, hash), n = 0, k;

    *here = false;
    while ((k = bucket_next(a, b, hash, &bits)) < ASKED_WAYS) {
        for (unsigned i = 0; i < 2; i++) {
            uint64_t entry = b->entry[k];

            if (entry_has(entry, i) && entry_member(entry, i) == member) {
                *here = true;
            } else if (entry_has(entry, i) && n < ASKED_SAME) {
                other[n++] = entry_member(entry, i);
            }
        }
    }
    return n;
}

bool asked_left(Asked *a, uint64_t hash, unsigned member, uint64_t now)
{
    AskedBucket *b = bucket_of(a, hash);
    Askers found = askers_of(a, b, hash, bucket_match(b, hash), member, now);
    bool room = found.here || found.others < ASKED_SAME;

    if (found.left) {
        if (!found.here && room) {
            note(a, b, &found, hash, member, 0);
        }
        return false;
    }
    if (room) {
        return note(a, b, &found, hash, member, LEFT_MARK);
    }
    if (found.marked) {
        *found.marked |= (uint64_t)LEFT_MARK << WANTED_AT;
    }
    return found.marked;
}

void asked_prefetch(const Asked *a, uint64_t hash)
{
    const char *b = (const char *)bucket_of(a, hash);

    __builtin_prefetch(b);
    __builtin_prefetch(b + LINE);
}

uint32_t asked_take(Asked *a, uint64_t hash)
{
    AskedBucket *b = bucket_of(a, hash);
    unsigned bits = bucket_match(b, hash), which;
    unsigned k = bucket_next(a, b, hash, &bits);
    uint32_t member;

    if (k == ASKED_WAYS) {
        return ASKED_NOBODY;
    }
    which = entry_has(b->entry[k], 1);
    member = entry_member(b->entry[k], which);
    entry_clear(&b->entry[k], which);
    if (entry_is_empty(b->entry[k])) {
        bucket_remove(a, b, k);
    }
    return member;
}

void asked_leave(Asked *a, unsigned member)
{
    a->gone[member / 64] |= UINT64_C(1) << (member % 64);
}

bool asked_is_forgotten(const Asked *a, unsigned member)
{
    return !(a->gone[member / 64] >> (member % 64) & 1);
}

/*
 * Its place may be new for what it has, or others have: it is emptied before.
 * The oldest entry first, so that the newest is in front.
 */
static void bucket_move(Asked *a, size_t number)
{
    uint64_t first = bucket_first(a->was, number);
    AskedBucket b = a->bucket[number];

    memset(&a->bucket[number], 0, sizeof(b));
    for (unsigned k = ASKED_WAYS; k-- > 0; ) {
        uint64_t entry = b.entry[k];

        if (entry) {
            uint64_t hash = upper_of(first, entry >> EXACT_AT) << 32;

            a->count--;
            bucket_push(a, &a->bucket[bucket_number(a->n, hash)], entry);
        }
    }
}

static void move(Asked *a, uint64_t buckets)
{
    bool up = a->n > a->was;

    for (uint64_t i = 0; i < buckets && a->moved < a->was; i++) {
        a->moved++;
        bucket_move(a, up ? a->was - a->moved : a->moved - 1);
    }
    if (a->moved < a->was) {
        return;
    }
    if (table_bytes(a->n) < table_bytes(a->was)) {
        prim.unmap((char *)a->bucket + table_bytes(a->n),
                   table_bytes(a->was) - table_bytes(a->n));
    }
    a->was = a->moved = 0;
}

/* A table that is swept is not changed meanwhile. */
static bool may_resize(const Asked *a)
{
    return !a->was && !a->sweeps;
}

static bool resize(Asked *a, size_t n)
{
    if (table_bytes(n) > table_bytes(a->n)) {
        AskedBucket *longer = prim.lengthen(a->bucket, table_bytes(a->n),
                                            table_bytes(n), NULL);

        if (!longer) {
            return false;
        }
        a->bucket = longer;
        /* all of it will be written, here and there: a hint */
        prim.advise(longer, table_bytes(n), MADV_HUGEPAGE);
    }
    a->was = a->n;
    a->n = n;
    a->moved = 0;
    return true;
}

static size_t grown(const Asked *a, uint64_t hashes, AskedGrowth how)
{
    size_t need = MIN(buckets_for(a->count + hashes), a->most);
    size_t least = how == ASKED_DOUBLE ? 2 * a->n : a->n + a->n / 4;

    if (how == ASKED_STAY || need <= a->n || !may_resize(a)) {
        return a->n;
    }
    return MIN(MAX(need, least), a->most);
}

size_t asked_growth(const Asked *a, uint64_t hashes, AskedGrowth how)
{
    return table_bytes(grown(a, hashes, how)) - table_bytes(a->n);
}

size_t asked_owed(const Asked *a)
{
    if (a->n <= a->was || !a->was) {
        return 0;
    }
    return (table_bytes(a->n) - table_bytes(a->was)) *
           ((double)(a->was - a->moved) / a->was);
}

void asked_room(Asked *a, uint64_t hashes, AskedGrowth how)
{
    size_t n = grown(a, hashes, how);

    a->rests = false;
    if (n > a->n) {
        resize(a, n);
    }
    /* what comes now would fill buckets that are still to be moved */
    if (a->was) {
        move(a, hashes);
    }
}

/*
 * What was asked has come, or its members have gone.  A table in use keeps room
 * for what comes next.  One at rest shrinks in one go, and keeps a fifth: idle
 * members ask, too, and it is not to grow for each.
 */
static bool shrink(Asked *a)
{
    size_t n = a->n / 2;
    bool pays = n >= SHRINK_MIN / 2 &&
                a->count < (uint64_t)FILLED_MAX * (n / 2);

    if (a->rests) {
        n = MAX(buckets_for(a->count + MAX(a->count / 5, REST_SPARE)),
                BUCKETS_MIN);
        pays = n < a->n - a->n / 16;
    }
    return pays && may_resize(a) && resize(a, n);
}

void asked_rest(Asked *a)
{
    a->rests = true;
}

static bool sweep_begin(Asked *a)
{
    memcpy(a->sweeping, a->gone, sizeof(a->gone));
    a->swept = 0;
    a->sweeps = false;
    for (unsigned i = 0; i < G_N_ELEMENTS(a->gone); i++) {
        a->sweeps |= a->gone[i] != 0;
    }
    return a->sweeps;
}

/* What is left of an entry that nobody asks for may be 0, as what ends them. */
static void bucket_sweep(Asked *a, AskedBucket *b)
{
    unsigned kept = 0, n = 0;

    for (; n < ASKED_WAYS && b->entry[n]; n++) {
        entry_drop(&b->entry[n], a->sweeping);
        if (!entry_is_empty(b->entry[n])) {
            b->entry[kept++] = b->entry[n];
        }
    }
    memset(b->entry + kept, 0, (n - kept) * sizeof(b->entry[0]));
    a->count -= n - kept;
}

static void sweep_step(Asked *a)
{
    for (unsigned i = 0; i < STEP && a->swept < a->n; i++) {
        bucket_sweep(a, &a->bucket[a->swept++]);
    }
    if (a->swept == a->n) {
        for (unsigned i = 0; i < G_N_ELEMENTS(a->gone); i++) {
            a->gone[i] &= ~a->sweeping[i];
        }
        a->sweeps = false;
    }
}

bool asked_step(Asked *a)
{
    if (a->was) {
        move(a, STEP);
        return true;
    }
    if (a->sweeps) {
        sweep_step(a);      /* a table that is not replaced */
        return true;
    }
    return shrink(a) || sweep_begin(a);
}

int asked_resize(Asked *a, size_t n)
{
    if (n < BUCKETS_MIN || n > BUCKETS_MAX) {
        return -EPROTO;
    }
    asked_free(a);
    a->was = a->moved = 0;
    a->most = MAX(a->most, n);
    return table_map(a, n);
}

void asked_count(Asked *a)
{
    size_t all = a->n * ASKED_WAYS;

    a->count = 0;
    for (size_t i = 0; i < all; i++) {
        a->count += a->bucket[i / ASKED_WAYS].entry[i % ASKED_WAYS] != 0;
    }
}

size_t asked_bytes(const Asked *a)
{
    return table_bytes(MAX(a->n, a->was));
}
