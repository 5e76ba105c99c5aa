/*
 * libksm: the memfd of shared pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * See pool.h for the idea.  The danger here is a slot that is freed, and
 * written anew, while something still reads it: so users are counted page by
 * page, and only a page known to have its own copy stops counting.
 *
 * A forked child reads slots too, and its users are not counted.  Whether one
 * lives is told by a memfd, which is mapped shared and writable while the
 * process forks, and unmapped by the parent right after: it can be sealed
 * against writing as soon as nobody has it mapped so.  The mapping is part of
 * the child's address space, as the slots it maps are: both go when the child
 * ends or calls exec, and both are passed on to its own children, whatever
 * files they close.  (A child that unmaps everything it does not know is not
 * seen any more.)  The file is empty and the mapping cannot be read, so there
 * is no page to be swapped, moved or pinned.  Page tables are no answer:
 * while a shared page is moved, its mappings come back one by one, and the
 * first of them looks exclusive.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <glib.h>

#include "pool.h"
#include "prim.h"
#include "region.h"

#define FILE_STEP       8192u   /* slots: the file grows by 32 MiB */
#define PATTERN_PIECE   64u     /* pages of a pattern written at once */
#define SEARCH_WORDS    4096u   /* of the bitmap looked at for a free run */

static void *anonymous(size_t len)
{
    return prim.map(NULL, len, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

/*
 * Would the pool be made of huge pages?  A hole punched into one is zeroes
 * written in place, which whoever still refers to the page would see: then
 * nothing is given up at all.
 */
static bool shmem_is_huge(void)
{
    g_autofree char *text =
        prim_read_file("/sys/kernel/mm/transparent_hugepage/shmem_enabled",
                       NULL);

    return text && (strstr(text, "[always]") || strstr(text, "[force]") ||
                    strstr(text, "[within_size]"));
}

static const SlotList empty_list = { SLOT_NONE, SLOT_NONE };

int pool_init(KsmPool *p, unsigned max_sharing)
{
    char path[64];

    memset(p, 0, sizeof(*p));
    p->fd = p->map_fd = p->watch_fd = -1;
    p->kept_slots = p->kept_blocks = empty_list;
    p->gone_slots = p->gone_blocks = empty_list;
    p->max_sharing = MIN(max_sharing, SLOT_USERS);
    p->patterns = g_hash_table_new_full(NULL, NULL, NULL, g_free);
    p->blocks = g_array_new(FALSE, FALSE, sizeof(uint32_t));
    p->piece = anonymous(PATTERN_PIECE * PAGE_BYTES);
    if (!p->piece) {
        return -ENOMEM;
    }
    p->keep_all = shmem_is_huge();
    p->fd = prim.memfd("libksm-pool");
    if (p->fd < 0) {
        return p->fd;
    }
    g_snprintf(path, sizeof(path), "/proc/self/fd/%d", p->fd);
    p->map_fd = prim.open_read(path);
    return p->map_fd < 0 ? p->map_fd : 0;
}

static void arrays_free(KsmPool *p)
{
    if (p->view) {
        prim.unmap(p->view, p->capacity * PAGE_BYTES);
    }
    if (p->hash) {
        prim.unmap(p->hash, p->capacity * sizeof(*p->hash));
    }
    if (p->users) {
        prim.unmap(p->users, p->capacity * sizeof(*p->users));
    }
    if (p->taken) {
        prim.unmap(p->taken, p->capacity / 8);
    }
    if (p->kept) {
        prim.unmap(p->kept, p->capacity / 8);
    }
}

void pool_free(KsmPool *p)
{
    arrays_free(p);
    if (p->piece) {
        prim.unmap(p->piece, PATTERN_PIECE * PAGE_BYTES);
    }
    if (p->watch) {
        prim.unmap(p->watch, PAGE_BYTES);
    }
    if (p->watch_fd >= 0) {
        prim.close(p->watch_fd);
    }
    if (p->fd >= 0) {
        prim.close(p->fd);
    }
    if (p->map_fd >= 0) {
        prim.close(p->map_fd);
    }
    if (p->patterns) {
        g_hash_table_unref(p->patterns);
        g_array_unref(p->blocks);
    }
}

int pool_reserve(KsmPool *p, size_t pages)
{
    /*
     * content that is equal needs at most a slot per two pages; the rest is
     * for slots down to one user, and patterns
     */
    size_t capacity = ROUND_UP_TO(pages * 5 / 8 + 4 * CHUNK_PAGES, 4096);
    KsmPool new = *p;

    if (capacity <= p->capacity) {
        return 0;
    }
    new.capacity = capacity;
    new.view = prim.map(NULL, capacity * PAGE_BYTES, PROT_READ, MAP_SHARED,
                        p->map_fd, 0);
    new.hash = anonymous(capacity * sizeof(*new.hash));
    new.users = anonymous(capacity * sizeof(*new.users));
    new.taken = anonymous(capacity / 8);
    new.kept = p->kept ? anonymous(capacity / 8) : NULL;
    if (!new.view || !new.hash || !new.users || !new.taken ||
        !new.kept != !p->kept) {
        arrays_free(&new);
        return -ENOMEM;
    }
    prim.advise(new.view, capacity * PAGE_BYTES, MADV_DONTFORK);
    prim.advise(new.view, capacity * PAGE_BYTES, MADV_DONTDUMP);
    if (p->capacity) {
        memcpy(new.hash, p->hash, p->top * sizeof(*p->hash));
        memcpy(new.users, p->users, p->top * sizeof(*p->users));
        memcpy(new.taken, p->taken, p->capacity / 8);
        if (p->kept) {
            memcpy(new.kept, p->kept, p->capacity / 8);
        }
        arrays_free(p);
    }
    *p = new;
    return 0;
}

static bool slot_is_taken(const KsmPool *p, uint32_t slot)
{
    return p->taken[slot / 64] >> (slot % 64) & 1;
}

static void slots_mark(KsmPool *p, uint32_t slot, unsigned n, bool taken)
{
    for (uint32_t s = slot; s < slot + n; s++) {
        uint64_t bit = UINT64_C(1) << (s % 64);

        p->taken[s / 64] = taken ? p->taken[s / 64] | bit
                                 : p->taken[s / 64] & ~bit;
    }
}

/*
 * A run of free slots below top, of *@n if there is one near the cursor,
 * else the longest seen.
 */
static uint32_t free_run(KsmPool *p, unsigned *n)
{
    uint32_t best = SLOT_NONE, run = 0, left = SEARCH_WORDS * 64;
    unsigned best_n = 0;

    for (uint32_t s = p->cursor; left-- && p->n_free; s++) {
        if (s >= p->top) {
            s = 0;
            run = 0;
            left = MIN(left, p->top);
        }
        if (s % 64 == 0 && p->taken[s / 64] == UINT64_MAX) {
            s += 63;
            left -= MIN(left, 63);
            run = 0;
            continue;
        }
        run = slot_is_taken(p, s) ? 0 : run + 1;
        if (run > best_n) {
            best_n = run;
            best = s + 1 - run;
            if (best_n == *n) {
                break;
            }
        }
    }
    *n = best_n;
    if (best != SLOT_NONE) {
        p->cursor = best + best_n;
    }
    return best;
}

static int file_grow(KsmPool *p, size_t slots)
{
    size_t size = MIN(ROUND_UP_TO(slots, FILE_STEP), p->capacity);
    int ret;

    if (slots <= p->file_slots) {
        return 0;
    }
    /* past this limit the kernel would send a signal */
    size = MIN(size, prim.file_limit() / PAGE_BYTES);
    if (size < slots) {
        return -EFBIG;
    }
    ret = prim.truncate(p->fd, size * PAGE_BYTES);
    if (ret == 0) {
        p->file_slots = size;
    }
    return ret;
}

uint32_t pool_take(KsmPool *p, unsigned *n)
{
    unsigned want = *n, got = *n;
    uint32_t slot = SLOT_NONE;

    if (p->n_free >= want && want) {
        slot = free_run(p, &got);
    }
    if (slot == SLOT_NONE || (got < want && p->top + want <= p->capacity)) {
        got = MIN(want, p->capacity - p->top);
        if (!got || file_grow(p, p->top + got) < 0) {
            return SLOT_NONE;
        }
        slot = p->top;
        p->top += got;
    } else {
        p->n_free -= got;
    }
    slots_mark(p, slot, got, true);
    for (unsigned i = 0; i < got; i++) {
        p->users[slot + i] = 0;
    }
    *n = got;
    return slot;
}

static int slot_compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return x < y ? -1 : x > y;
}

/* Punches the holes.  A slot that was given up is not taken again before. */
void pool_flush(KsmPool *p)
{
    unsigned kept = 0;

    qsort(p->punch, p->n_punch, sizeof(p->punch[0]), slot_compare);
    for (unsigned i = 0, n; i < p->n_punch; i += n) {
        uint32_t slot = p->punch[i];

        n = 1;
        while (i + n < p->n_punch && p->punch[i + n] == slot + n) {
            n++;
        }
        if (prim.punch(p->fd, (off_t)slot * PAGE_BYTES,
                       (off_t)n * PAGE_BYTES) < 0) {
            /* memory stays in use; try again with the next ones */
            memmove(p->punch + kept, p->punch + i, n * sizeof(slot));
            kept += n;
            continue;
        }
        slots_mark(p, slot, n, false);
        p->n_free += n;
    }
    p->n_punch = kept;
}

/* A slot that is leaked has no hash: there is its link. */
static void list_push(KsmPool *p, SlotList *l, uint32_t slot)
{
    p->hash[slot] = l->first;
    l->first = slot;
    if (l->last == SLOT_NONE) {
        l->last = slot;
    }
}

static uint32_t list_pop(KsmPool *p, SlotList *l)
{
    uint32_t slot = l->first;

    if (slot == l->last) {
        *l = empty_list;
    } else {
        l->first = p->hash[slot];
    }
    return slot;
}

/* Moves all of @from to the front of @to. */
static void list_join(KsmPool *p, SlotList *to, SlotList *from)
{
    if (from->first == SLOT_NONE) {
        return;
    }
    p->hash[from->last] = to->first;
    if (to->last == SLOT_NONE) {
        to->last = from->last;
    }
    to->first = from->first;
    *from = empty_list;
}

static bool slot_is_kept(const KsmPool *p, uint32_t slot)
{
    return p->keep_all ||
           (p->kept && (p->kept[slot / 64] >> (slot % 64) & 1));
}

/* The child to come will have the watch mapped. */
static void watch_map(KsmPool *p)
{
    if (p->watch_fd < 0) {
        p->watch_fd = prim.memfd_sealable("libksm-children");
    }
    if (p->watch_fd >= 0 && !p->watch) {
        p->watch = prim.map(NULL, PAGE_BYTES, PROT_NONE, MAP_SHARED,
                            p->watch_fd, 0);
    }
    if (!p->watch) {
        p->forks_blind++;
    }
}

void pool_forked(KsmPool *p)
{
    /* if it fails, it is tried again before children are looked for */
    if (p->watch && prim.unmap(p->watch, PAGE_BYTES) == 0) {
        p->watch = NULL;
    }
}

void pool_forked_child(KsmPool *p)
{
    p->watch = NULL;    /* it stays mapped */
}

void pool_fork(KsmPool *p)
{
    pool_flush(p);
    if (!p->capacity || !p->top || p->keep_all) {
        return;
    }
    watch_map(p);
    if (!p->kept) {
        p->kept = anonymous(p->capacity / 8);
        p->keep_all = !p->kept;
    }
    for (size_t i = 0; p->kept && i < ROUND_UP_TO(p->top, 64) / 64; i++) {
        p->kept[i] |= p->taken[i];
    }
}

static void slot_give_up(KsmPool *p, uint32_t slot)
{
    if (slot_is_kept(p, slot)) {
        list_push(p, &p->kept_slots, slot);
        p->leaked++;
        return;
    }
    if (p->n_punch == G_N_ELEMENTS(p->punch)) {
        pool_flush(p);
    }
    if (p->n_punch == G_N_ELEMENTS(p->punch)) {
        /*
         * Cannot be punched now, and is not written over: something may
         * still refer to the page itself (a pipe, a packet on its way).
         */
        list_push(p, &p->gone_slots, slot);
        p->leaked++;
        return;
    }
    p->punch[p->n_punch++] = slot;
}

void pool_untake(KsmPool *p, uint32_t slot, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        g_assert(pool_users(p, slot + i) == 0);
        p->users[slot + i] = 0;
        slot_give_up(p, slot + i);
    }
}

int pool_allocate(KsmPool *p, uint32_t slot, unsigned n)
{
    return prim.allocate(p->fd, (off_t)slot * PAGE_BYTES,
                         (off_t)n * PAGE_BYTES);
}

int pool_fill(KsmPool *p, uint32_t slot, const void *pages, unsigned n)
{
    const char *from = pages;
    size_t done = 0, len = (size_t)n * PAGE_BYTES;

    while (done < len) {
        ssize_t ret = prim.write(p->fd, from + done, len - done,
                                 (off_t)slot * PAGE_BYTES + done);

        if (ret == -EINTR) {
            continue;
        }
        if (ret <= 0) {
            return ret < 0 ? ret : -ENOSPC;
        }
        done += ret;
    }
    return 0;
}

static KsmPattern *pattern_of(KsmPool *p, uint32_t slot)
{
    uint32_t first = slot / CHUNK_PAGES * CHUNK_PAGES;

    if (!p->last_pattern || p->last_pattern->first != first) {
        p->last_pattern = g_hash_table_lookup(p->patterns,
                                              GUINT_TO_POINTER(first));
    }
    return p->last_pattern;
}

KsmPattern *pool_pattern(KsmPool *p, uint32_t slot)
{
    if (!(p->users[slot] & SLOT_PATTERN)) {
        return NULL;
    }
    return pattern_of(p, slot);
}

/* Slots of a block are not given up one by one. */
static void block_mark(KsmPool *p, uint32_t first)
{
    for (uint32_t s = first; s < first + CHUNK_PAGES; s++) {
        p->users[s] = SLOT_PATTERN;
    }
}

/* False: not now. */
static bool punch_block(KsmPool *p, uint32_t first)
{
    if (prim.punch(p->fd, (off_t)first * PAGE_BYTES, CHUNK_BYTES) < 0) {
        return false;
    }
    block_mark(p, first);
    g_array_append_val(p->blocks, first);
    return true;
}

static void block_give_up(KsmPool *p, uint32_t first)
{
    bool kept = slot_is_kept(p, first);

    if (kept || !punch_block(p, first)) {
        list_push(p, kept ? &p->kept_blocks : &p->gone_blocks, first);
        p->leaked += CHUNK_PAGES;
    }
}

/*
 * Does a process that was forked from this one, or from one of those, still
 * have our memory?
 */
static bool children_live(KsmPool *p)
{
    pool_forked(p);
    if (p->watch || p->watch_fd < 0 || prim.seal_write(p->watch_fd) < 0) {
        return true;
    }
    prim.close(p->watch_fd);
    p->watch_fd = -1;
    return false;
}

void pool_unkeep(KsmPool *p)
{
    if (p->keep_all || p->forks_blind || !p->kept || children_live(p)) {
        return;
    }
    prim.unmap(p->kept, p->capacity / 8);
    p->kept = NULL;
    list_join(p, &p->gone_slots, &p->kept_slots);
    list_join(p, &p->gone_blocks, &p->kept_blocks);
}

/*
 * What is on the lists was without users before any fork that came since, so
 * those children do not map it.
 */
bool pool_release(KsmPool *p)
{
    bool done = false;

    if (p->gone_blocks.first != SLOT_NONE) {
        uint32_t first = list_pop(p, &p->gone_blocks);

        done = punch_block(p, first);
        if (done) {
            p->leaked -= CHUNK_PAGES;
        } else {
            list_push(p, &p->gone_blocks, first);
        }
    }
    if (p->gone_slots.first != SLOT_NONE) {
        pool_flush(p);
        while (p->n_punch < G_N_ELEMENTS(p->punch) &&
               p->gone_slots.first != SLOT_NONE) {
            p->punch[p->n_punch++] = list_pop(p, &p->gone_slots);
            p->leaked--;
            done = true;
        }
        pool_flush(p);
    }
    return done && (p->gone_slots.first != SLOT_NONE ||
                    p->gone_blocks.first != SLOT_NONE);
}

static void pattern_settle(KsmPool *p, uint32_t slot)
{
    KsmPattern *t = pattern_of(p, slot);
    uint32_t first = t->first;

    if (t->users) {
        return;
    }
    if (p->users[first] & SLOT_INDEXED) {
        p->unindex(p->opaque, p->hash[first], first);
    }
    p->last_pattern = NULL;
    g_hash_table_remove(p->patterns, GUINT_TO_POINTER(first));
    block_give_up(p, first);
}

void pool_settle(KsmPool *p, uint32_t slot)
{
    if (pool_users(p, slot)) {
        return;
    }
    if (p->users[slot] & SLOT_PATTERN) {
        pattern_settle(p, slot);
        return;
    }
    if (p->users[slot] & SLOT_INDEXED) {
        p->unindex(p->opaque, p->hash[slot], slot);
    }
    pool_untake(p, slot, 1);
}

void pool_user_add(KsmPool *p, uint32_t slot)
{
    g_assert(!pool_full(p, slot));
    if (pool_users(p, slot) == 0) {
        p->shared++;
    }
    if (p->users[slot] & SLOT_PATTERN) {
        pattern_of(p, slot)->users++;
    }
    p->users[slot]++;
    p->sharing++;
}

void pool_user_drop(KsmPool *p, uint32_t slot)
{
    g_assert(pool_users(p, slot) > 0);
    p->users[slot]--;
    p->sharing--;
    if (p->users[slot] & SLOT_PATTERN) {
        pattern_of(p, slot)->users--;
    }
    if (pool_users(p, slot) == 0) {
        p->shared--;
        pool_settle(p, slot);
    }
}

/* Writes the pattern's slots up to @filled. */
static int pattern_fill(KsmPool *p, KsmPattern *t, const void *page,
                        unsigned filled)
{
    const unsigned piece = PATTERN_PIECE;
    char *buf = p->piece;

    for (unsigned i = 0; i < MIN(piece, filled - t->filled); i++) {
        memcpy(buf + i * PAGE_BYTES, page, PAGE_BYTES);
    }
    while (t->filled < filled) {
        unsigned n = MIN(piece, filled - t->filled);
        int ret = pool_fill(p, t->first + t->filled, buf, n);

        if (ret < 0) {
            return ret;
        }
        for (unsigned i = 0; i < n; i++) {
            p->hash[t->first + t->filled + i] = p->hash[t->first];
        }
        t->filled += n;
    }
    return 0;
}

/* 512 slots that begin at a multiple of 512; SLOT_NONE. */
static uint32_t block_take(KsmPool *p)
{
    uint32_t first = ROUND_UP_TO(p->top, CHUNK_PAGES);

    if (p->blocks->len) {
        first = g_array_index(p->blocks, uint32_t, p->blocks->len - 1);
        g_array_set_size(p->blocks, p->blocks->len - 1);
        return first;
    }
    if (first + CHUNK_PAGES > p->capacity ||
        file_grow(p, first + CHUNK_PAGES) < 0) {
        return SLOT_NONE;
    }
    p->n_free += first - p->top;
    p->top = first + CHUNK_PAGES;
    slots_mark(p, first, CHUNK_PAGES, true);
    block_mark(p, first);
    return first;
}

KsmPattern *pool_pattern_new(KsmPool *p, const void *page, uint32_t hash)
{
    uint32_t slot = block_take(p);
    KsmPattern *t;

    if (slot == SLOT_NONE) {
        return NULL;
    }
    t = g_new0(KsmPattern, 1);
    t->first = slot;
    p->hash[slot] = hash;
    if (pattern_fill(p, t, page, PATTERN_START) < 0) {
        block_give_up(p, slot);
        g_free(t);
        return NULL;
    }
    g_hash_table_insert(p->patterns, GUINT_TO_POINTER(slot), t);
    p->last_pattern = NULL;
    return t;
}

uint32_t pool_pattern_run(KsmPool *p, KsmPattern *t, unsigned *n)
{
    unsigned want = *n, k;

    while (t->filled < want && t->filled < CHUNK_PAGES &&
           t->asked >= 4 * t->filled) {
        if (pattern_fill(p, t, pool_page(p, t->first),
                         MIN(2 * t->filled, CHUNK_PAGES)) < 0) {
            break;
        }
    }
    if (t->next + want > t->filled) {
        t->next = 0;
    }
    for (unsigned tries = 0; tries < 2; tries++) {
        k = 0;
        while (k < want && t->next + k < t->filled &&
               !pool_full(p, t->first + t->next + k)) {
            k++;
        }
        if (k) {
            uint32_t slot = t->first + t->next;

            *n = k;
            t->next += k;
            t->asked += k;
            return slot;
        }
        t->next = 0;
    }
    return SLOT_NONE;
}

size_t pool_bytes(const KsmPool *p)
{
    return p->top * (sizeof(*p->hash) + sizeof(*p->users)) +
           p->capacity / 8;
}
