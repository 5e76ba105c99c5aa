/*
 * pool: the memfd of shared pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A forked child reads slots too, and its users are not counted.  A memfd tells
 * whether one lives: mapped shared and writable while the process forks, and
 * unmapped by the parent right after, it can be sealed against writing once
 * nobody has it mapped so.  Like the slots, that mapping is part of the child's
 * address space: both go when the child ends or calls exec, and pass on to its
 * own children, whatever files they close.  (A child that unmaps all it does
 * not know is not seen.)  Empty and unreadable, it has no page to be swapped,
 * moved or pinned.  Page tables are no answer: while a shared page is moved,
 * its mappings come back one by one, and the first of them looks exclusive.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/huge.h"
#include "base/prim.h"
#include "share/pool.h"

#define FILE_STEP       8192u   /* slots: the file grows by 32 MiB */
#define PATTERN_PIECE   64u     /* pages of a pattern written at once */
#define AROUND          16u     /* pages that a fault maps: the kernel's default */
#define AROUND_MIN      (2 * AROUND)    /* to look whether it did pays then */
#define HUGE_LOOK_NS    UINT64_C(100000000)
/* Page tables of so much can be moved at once. */
#define VIEW_ALIGN      ((size_t)1 << 30)

static void *anonymous(size_t len)
{
    return prim.map(NULL, len, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}


static const SlotList empty_list = { SLOT_NONE, SLOT_NONE };

void pool_closed(KsmPool *p)
{
    memset(p, 0, sizeof(*p));
    p->fd = p->map_fd = p->watch_fd = p->pagemap = p->node = -1;
}

/* All but the files. */
static int pool_prepare(KsmPool *p, unsigned max_sharing)
{
    pool_closed(p);
    p->kept_slots = p->kept_blocks = empty_list;
    p->gone_slots = p->gone_blocks = empty_list;
    p->max_sharing = MIN(max_sharing, SLOT_USERS);
    p->patterns = g_hash_table_new_full(NULL, NULL, NULL, g_free);
    p->blocks = g_array_new(FALSE, FALSE, sizeof(uint32_t));
    p->piece = anonymous(PATTERN_PIECE * PAGE_BYTES);
    if (!p->piece) {
        return -ENOMEM;
    }
    p->pagemap = prim.open_read("/proc/self/pagemap");
    return 0;
}

int pool_init_over(KsmPool *p, unsigned max_sharing, int fd, int map_fd)
{
    int ret = pool_prepare(p, max_sharing);

    p->fd = fd;
    p->map_fd = map_fd;
    return ret;
}

int pool_init(KsmPool *p, unsigned max_sharing)
{
    char path[64];
    int ret = pool_prepare(p, max_sharing);

    if (ret < 0) {
        return ret;
    }
    p->mount = HUGE_MEMFD;
    p->keep_all = huge_shmem(p->mount);
    p->fd = prim.memfd("libksm-pool");
    if (p->fd < 0) {
        return p->fd;
    }
    g_snprintf(path, sizeof(path), "/proc/self/fd/%d", p->fd);
    p->map_fd = prim.open_read(path);
    return p->map_fd < 0 ? p->map_fd : 0;
}

/* What grows with the capacity, and the bytes of it that @slots need. */
static void **pool_array(KsmPool *p, unsigned i, size_t slots, size_t *len)
{
    switch (i) {
    case 0:
        *len = slots * PAGE_BYTES;
        return (void **)&p->view;
    case 1:
        *len = slots * sizeof(*p->hash);
        return (void **)&p->hash;
    case 2:
        *len = slots * sizeof(*p->users);
        return (void **)&p->users;
    case 3:
        *len = slots / 8;
        return (void **)&p->vacant.free;
    default:
        *len = slots / VACANT_LINE * sizeof(*p->vacant.lines);
        return (void **)&p->vacant.lines;
    }
}

static void arrays_free(KsmPool *p)
{
    for (unsigned i = 0; i < G_N_ELEMENTS(p->mapped); i++) {
        size_t len;
        void **array = pool_array(p, i, 0, &len);

        if (*array) {
            prim.unmap(*array, p->mapped[i]);
            *array = NULL;
        }
    }
    if (p->kept) {
        prim.unmap(p->kept, p->kept_len);
        p->kept = NULL;
    }
}

void pool_free(KsmPool *p)
{
    pool_ahead_end(p);
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
    if (p->pagemap >= 0) {
        prim.close(p->pagemap);
    }
    if (p->patterns) {
        g_hash_table_unref(p->patterns);
        g_array_unref(p->blocks);
    }
}

/*
 * An address for the view where whole page tables can be moved to, with room
 * for @len bytes; something is mapped there.  NULL: there is none.
 */
static void *view_place(size_t len)
{
    size_t all = len + VIEW_ALIGN;
    char *room = prim.map(NULL, all, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *at;

    if (!room) {
        return NULL;
    }
    at = (char *)ROUND_UP_TO((uintptr_t)room, VIEW_ALIGN);
    if (at > room) {
        prim.unmap(room, at - room);
    }
    if (at + len < room + all) {
        prim.unmap(at + len, room + all - (at + len));
    }
    return at;
}

/* Another one in the place of the view, whose page tables are lost. */
static void *view_anew(KsmPool *p, size_t len)
{
    void *view = p->view ? prim.map(NULL, len, PROT_READ, MAP_SHARED,
                                    p->map_fd, 0) : NULL;

    if (view) {
        prim.unmap(p->view, p->mapped[0]);
    }
    return view;
}

/* The view, with its page tables if there was one: nothing is copied. */
static void *view_grow(KsmPool *p, size_t len)
{
    void *at = p->anywhere ? NULL : view_place(len), *view;

    if (p->view) {
        view = prim.lengthen(p->view, p->mapped[0], len, at);
    } else {
        view = prim.map(at, len, PROT_READ, MAP_SHARED | (at ? MAP_FIXED : 0),
                        p->map_fd, 0);
    }
    if (!view) {
        /*
         * What was at that address may be there or not, and by now something
         * else: it is left alone, and not made a second time.
         */
        p->anywhere |= at != NULL;
        view = view_anew(p, len);
    }
    if (!view) {
        return NULL;
    }
    prim.advise(view, len, MADV_DONTFORK);
    prim.advise(view, len, MADV_DONTDUMP);
    return view;
}

static void *array_grow(KsmPool *p, unsigned i, void *array, size_t len)
{
    if (i == 0) {
        return view_grow(p, len);
    }
    return array ? prim.lengthen(array, p->mapped[i], len, NULL)
                 : anonymous(len);
}

int pool_reserve(KsmPool *p, size_t pages)
{
    /*
     * equal content needs at most a slot per two pages; the rest is for slots
     * down to one user, and patterns
     */
    return pool_reserve_slots(p, pages * 5 / 8 + 4 * CHUNK_PAGES);
}

int pool_reserve_slots(KsmPool *p, size_t slots)
{
    size_t capacity = ROUND_UP_TO(slots, 4096);

    if (capacity <= p->capacity) {
        return 0;
    }
    for (unsigned i = 0; i < G_N_ELEMENTS(p->mapped); i++) {
        size_t len;
        void **array = pool_array(p, i, capacity, &len);

        len = ROUND_UP_TO(len, PAGE_BYTES);
        if (len > p->mapped[i]) {
            void *longer = array_grow(p, i, *array, len);

            if (!longer) {
                /* what is longer already does no harm */
                return -ENOMEM;
            }
            *array = longer;
            p->mapped[i] = len;
        }
    }
    p->capacity = capacity;
    return 0;
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

/* Slots that were never taken. */
static uint32_t top_take(KsmPool *p, unsigned *n)
{
    uint32_t slot = p->top;

    *n = MIN(*n, p->capacity - p->top);
    if (!*n || file_grow(p, p->top + *n) < 0) {
        return SLOT_NONE;
    }
    p->top += *n;
    return slot;
}

static uint32_t free_take(KsmPool *p, unsigned *n, unsigned least)
{
    uint32_t slot = vacant_find(&p->vacant, p->top, n, least);

    if (slot != SLOT_NONE) {
        vacant_take(&p->vacant, slot, *n);
    }
    return slot;
}

/* A block left by a pattern may have other content. */
static void block_open(KsmPool *p)
{
    uint32_t first = g_array_index(p->blocks, uint32_t, p->blocks->len - 1);

    g_array_set_size(p->blocks, p->blocks->len - 1);
    memset(p->users + first, 0, CHUNK_PAGES * sizeof(*p->users));
    vacant_add(&p->vacant, first, CHUNK_PAGES);
}

uint32_t pool_take(KsmPool *p, unsigned *n)
{
    unsigned want = *n;
    uint32_t slot;

    if (!want) {
        return SLOT_NONE;
    }
    slot = free_take(p, n, MIN(want, TAKE_WORTH));
    if (slot == SLOT_NONE) {
        slot = top_take(p, n);
    }
    if (slot == SLOT_NONE && p->blocks->len) {
        block_open(p);
        *n = want;
        slot = free_take(p, n, MIN(want, TAKE_WORTH));
    }
    for (unsigned least = TAKE_WORTH / 2; slot == SLOT_NONE && least;
         least /= 2) {
        *n = want;
        slot = free_take(p, n, least);
    }
    if (slot != SLOT_NONE) {
        memset(p->users + slot, 0, *n * sizeof(*p->users));
    }
    return slot;
}

/* The free slots from @slot on, up to @n. */
static uint32_t take_at(KsmPool *p, uint32_t slot, unsigned *n)
{
    if (slot == p->top) {
        slot = top_take(p, n);
    } else {
        *n = slot < p->top ? vacant_after(&p->vacant, p->top, slot, *n) : 0;
        vacant_take(&p->vacant, slot, *n);
    }
    if (slot != SLOT_NONE) {
        memset(p->users + slot, 0, *n * sizeof(*p->users));
    }
    return *n ? slot : SLOT_NONE;
}

uint32_t pool_take_near(KsmPool *p, uint32_t before, uint32_t after,
                        unsigned *n)
{
    unsigned got = *n;

    if (before != SLOT_NONE) {
        uint32_t slot = take_at(p, before + 1, &got);

        if (slot != SLOT_NONE) {
            *n = got;
            return slot;
        }
    }
    got = after != SLOT_NONE && after <= p->top
          ? vacant_before(&p->vacant, after, *n) : 0;
    if (got == *n) {
        return take_at(p, after - *n, n);
    }
    if (got) {
        unsigned first = *n - got;
        uint32_t slot;

        /* those are not for the first pages */
        vacant_take(&p->vacant, after - got, got);
        slot = pool_take(p, &first);
        vacant_add(&p->vacant, after - got, got);
        if (slot != SLOT_NONE) {
            *n = first;
            return slot;
        }
    }
    return pool_take(p, n);
}

static int slot_compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return x < y ? -1 : x > y;
}

/* A slot that is leaked has no hash: there is its link. */
static void list_append(KsmPool *p, SlotList *l, uint32_t slot)
{
    if (l->last == SLOT_NONE) {
        l->first = slot;
    } else {
        p->hash[l->last] = slot;
    }
    l->last = slot;
}

/*
 * Cannot be punched now, and is not written over: something may still refer to
 * the page itself (a pipe, a packet on its way).  pool_release() tries again,
 * the others first.
 */
static void slots_gone(KsmPool *p, uint32_t slot, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        list_append(p, &p->gone_slots, slot + i);
    }
    p->leaked += n;
}

/* Asked as long as the answer is no: who runs the host may say otherwise. */
static bool keeps_all(KsmPool *p)
{
    uint64_t now;

    if (!p->keep_all) {
        now = prim.now_ns();
        if (now - p->huge_ns >= HUGE_LOOK_NS) {
            p->huge_ns = now;
            p->keep_all = huge_shmem(p->mount);
        }
    }
    return p->keep_all;
}

static void list_push(KsmPool *p, SlotList *l, uint32_t slot)
{
    p->hash[slot] = l->first;
    l->first = slot;
    if (l->last == SLOT_NONE) {
        l->last = slot;
    }
}

static void slot_keep(KsmPool *p, uint32_t slot)
{
    list_push(p, &p->kept_slots, slot);
    p->leaked++;
}

/* 0 or -errno: perhaps later. */
static int slots_punch(KsmPool *p, uint32_t slot, unsigned n)
{
    ahead_forget(&p->ahead, slot, n);
    return prim.punch(p->fd, (off_t)slot * PAGE_BYTES, (off_t)n * PAGE_BYTES);
}

/* Punches the holes.  A slot that was given up is not taken again before. */
void pool_flush(KsmPool *p)
{
    if (p->n_punch && keeps_all(p)) {
        while (p->n_punch) {
            slot_keep(p, p->punch[--p->n_punch]);
        }
        return;
    }
    qsort(p->punch, p->n_punch, sizeof(p->punch[0]), slot_compare);
    for (unsigned i = 0, n; i < p->n_punch; i += n) {
        uint32_t slot = p->punch[i];

        n = 1;
        while (i + n < p->n_punch && p->punch[i + n] == slot + n) {
            n++;
        }
        if (slots_punch(p, slot, n) < 0) {
            slots_gone(p, slot, n);
        } else {
            vacant_add(&p->vacant, slot, n);
        }
    }
    p->n_punch = 0;
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

bool pool_gives_up(KsmPool *p)
{
    /* some may be held by a pipe for long */
    return !keeps_all(p) && !p->kept && p->leaked <= p->shared / 64;
}

static bool slot_is_kept(KsmPool *p, uint32_t slot)
{
    return keeps_all(p) || (p->kept && slot / 8 < p->kept_len &&
                           (p->kept[slot / 64] >> (slot % 64) & 1));
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

/* The bitmap of what is kept reaches as far as slots are taken. */
static bool kept_reach(KsmPool *p)
{
    size_t len = ROUND_UP_TO(p->capacity / 8, PAGE_BYTES);
    void *kept = p->kept;

    if (!kept || p->kept_len < len) {
        kept = kept ? prim.lengthen(kept, p->kept_len, len, NULL)
                    : anonymous(len);
        if (kept) {
            p->kept = kept;
            p->kept_len = len;
        }
    }
    return kept;
}

void pool_fork(KsmPool *p)
{
    pool_flush(p);
    if (!p->capacity || !p->top || p->keep_all) {
        return;
    }
    watch_map(p);
    if (!kept_reach(p)) {
        p->keep_all = true;
        return;
    }
    for (size_t i = 0; i < p->top / 64; i++) {
        p->kept[i] |= ~p->vacant.free[i];
    }
    if (p->top % 64) {
        p->kept[p->top / 64] |= ~p->vacant.free[p->top / 64] &
                                ((UINT64_C(1) << p->top % 64) - 1);
    }
}

static void slot_give_up(KsmPool *p, uint32_t slot)
{
    if (slot_is_kept(p, slot)) {
        slot_keep(p, slot);
        return;
    }
    if (p->n_punch == G_N_ELEMENTS(p->punch)) {
        pool_flush(p);
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

void pool_ahead(KsmPool *p)
{
    if (p->node < 0) {
        ahead_ask(&p->ahead, p->fd, p->top, p->file_slots);
    }
}

void pool_ahead_end(KsmPool *p)
{
    ahead_end(&p->ahead, p->fd, p->top);
}

/* The file has no NUMA policy: the thread's is used, then restored. */
static int allocate_there(KsmPool *p, uint32_t slot, unsigned n)
{
    unsigned long mask[16] = { 0 };
    const size_t bits = sizeof(mask) * 8;
    bool set = false;
    int mode = 0, ret;

    if (p->node >= 0 && prim.thread_policy_get(&mode, mask, bits) == 0) {
        set = prim.prefer_node(p->node) == 0;
    }
    ret = prim.allocate(p->fd, (off_t)slot * PAGE_BYTES,
                        (off_t)n * PAGE_BYTES);
    for (unsigned tries = 0;
         set && prim.thread_policy_set(mode, mask, bits) < 0 && tries < 100;
         tries++) {
        prim.pause(tries);
    }
    return ret;
}

int pool_allocate(KsmPool *p, uint32_t slot, unsigned n)
{
    unsigned had;

    if (p->node >= 0 && p->ahead.crew) {
        /* what was had ahead may be of another node */
        slots_punch(p, slot, n);
    }
    had = ahead_take(&p->ahead, slot, n);
    return had == n ? 0 : allocate_there(p, slot + had, n - had);
}

int pool_fill(KsmPool *p, uint32_t slot, const void *pages, unsigned n)
{
    const char *from = pages;
    size_t done = 0, len = (size_t)n * PAGE_BYTES;

    /* it may be less than it was: past it the kernel would send a signal */
    if ((size_t)slot * PAGE_BYTES + len > prim.file_limit()) {
        return -EFBIG;
    }
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
    if (slots_punch(p, first, CHUNK_PAGES) < 0) {
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

/* Does any descendant of this process still have our memory? */
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
    prim.unmap(p->kept, p->kept_len);
    p->kept = NULL;
    list_join(p, &p->gone_slots, &p->kept_slots);
    list_join(p, &p->gone_blocks, &p->kept_blocks);
}

/*
 * Slots on the lists had no users before any later fork: those children do not
 * map them.
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
        uint32_t was;

        pool_flush(p);
        was = p->vacant.n;
        while (p->n_punch < G_N_ELEMENTS(p->punch) &&
               p->gone_slots.first != SLOT_NONE) {
            p->punch[p->n_punch++] = list_pop(p, &p->gone_slots);
            p->leaked--;
        }
        pool_flush(p);
        done |= p->vacant.n > was;
    }
    return done && (p->gone_slots.first != SLOT_NONE ||
                    p->gone_blocks.first != SLOT_NONE);
}

static void slot_goes(KsmPool *p, uint32_t slot)
{
    if (p->goes) {
        p->goes(p->opaque, slot);
    }
}

static void pattern_settle(KsmPool *p, uint32_t slot)
{
    KsmPattern *t = pattern_of(p, slot);
    uint32_t first = t->first;

    if (t->users) {
        return;
    }
    slot_goes(p, first);
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
    slot_goes(p, slot);
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

    for (unsigned i = 0; t->filled + i < filled && i < piece; i++) {
        memcpy(buf + i * PAGE_BYTES, page, PAGE_BYTES);
    }
    while (t->filled < filled) {
        unsigned n = MIN(piece, filled - t->filled);
        int ret = 0;

        if (p->node >= 0) {
            /* on that node; writing would not ask for it */
            ret = pool_allocate(p, t->first + t->filled, n);
        }
        if (ret == 0) {
            ret = pool_fill(p, t->first + t->filled, buf, n);
        }

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
    if (first + CHUNK_PAGES <= p->capacity &&
        file_grow(p, first + CHUNK_PAGES) == 0) {
        /* what has memory is not among those that are free */
        pool_ahead_end(p);
        vacant_add(&p->vacant, p->top, first - p->top);
        p->top = first + CHUNK_PAGES;
    } else {
        pool_flush(p);
        first = vacant_block(&p->vacant, p->top);
        if (first == SLOT_NONE) {
            return SLOT_NONE;
        }
        vacant_take(&p->vacant, first, CHUNK_PAGES);
    }
    block_mark(p, first);
    return first;
}

/* Is all of it in our page tables?  Then the kernel knows of no failure. */
static bool is_mapped(const KsmPool *p, uint32_t slot, unsigned n)
{
    PmRange range;
    PmScan scan = {
        .fd = p->pagemap,
        .start = (uintptr_t)pool_page(p, slot),
        .end = (uintptr_t)pool_page(p, slot + n),
        .all = PM_PRESENT,
        .tell = PM_PRESENT,
        .vec = &range,
        .vec_len = 1,
    };

    return prim.pagemap(&scan) == 1 &&
           range.start == scan.start && range.end == scan.end;
}

/*
 * To look up each page costs more than to map it: a fault maps the aligned 16
 * pages around it, too (fault-around).  So one in 16 is asked for.  Were those
 * all?  Where the kernel maps less (fault_around_bytes) they come on top.
 */
static bool slots_map(const KsmPool *p, uint32_t slot, unsigned n)
{
    uintptr_t at = (uintptr_t)pool_page(p, slot), end = at + n * PAGE_BYTES;

    if (n < AROUND_MIN) {
        return false;
    }
    while (at < end) {
        if (prim.advise((void *)at, PAGE_BYTES, MADV_POPULATE_READ) < 0) {
            return false;
        }
        at = ROUND_UP_TO(at + 1, AROUND * PAGE_BYTES);
    }
    return is_mapped(p, slot, n);
}

int pool_readable(const KsmPool *p, uint32_t slot, unsigned n)
{
    int ret = 0;
    bool there = false;

    if (p->pagemap >= 0) {
        /* one not compared before has who filled it, and who is to map it */
        there = (pool_users(p, slot) > 2 && is_mapped(p, slot, n)) ||
                slots_map(p, slot, n);
    }
    if (!there) {
        ret = prim.advise((void *)pool_page(p, slot), n * PAGE_BYTES,
                          MADV_POPULATE_READ);
    }
    return ret == -EHWPOISON || ret == -EINVAL ? -EFAULT : ret;
}

KsmPattern *pool_pattern_new(KsmPool *p, const void *page, uint32_t hash)
{
    uint32_t slot = block_take(p);
    KsmPattern *t;
    int ret;

    if (slot == SLOT_NONE) {
        errno = ENOSPC;
        return NULL;
    }
    t = g_new0(KsmPattern, 1);
    t->first = slot;
    p->hash[slot] = hash;
    /* by the kernel, for it can fail: @page is the guest's, as it is now */
    ret = pool_fill(p, slot, page, 1);
    if (ret == 0) {
        ret = pattern_fill(p, t, pool_page(p, slot), PATTERN_START);
    }
    if (ret < 0) {
        block_give_up(p, slot);
        g_free(t);
        errno = -ret;
        return NULL;
    }
    g_hash_table_insert(p->patterns, GUINT_TO_POINTER(slot), t);
    p->last_pattern = NULL;
    return t;
}

int pool_pattern_grow(KsmPool *p, KsmPattern *t, unsigned want)
{
    int ret = 0;

    want = MIN(want, CHUNK_PAGES);
    if (t->filled < want) {
        ret = pool_readable(p, t->first, 1);
    }
    if (ret == 0) {
        ret = pattern_fill(p, t, pool_page(p, t->first), want);
    }
    return ret;
}

void pool_adopt_pattern(KsmPool *p, uint32_t first, uint32_t filled)
{
    KsmPattern *t = g_new0(KsmPattern, 1);

    t->first = first;
    t->filled = filled;
    for (unsigned i = 0; i < CHUNK_PAGES; i++) {
        t->users += pool_users(p, first + i);
    }
    g_hash_table_insert(p->patterns, GUINT_TO_POINTER(first), t);
}

/* Slots without users that follow each other; no blocks. */
static unsigned unused_run(const KsmPool *p, uint32_t slot)
{
    unsigned n = 0;

    while (slot + n < p->top && !p->users[slot + n]) {
        n++;
    }
    return n;
}

static void unused_adopt(KsmPool *p, uint32_t slot, unsigned n)
{
    if (!p->keep_all && slots_punch(p, slot, n) == 0) {
        vacant_add(&p->vacant, slot, n);
        return;
    }
    for (unsigned i = 0; i < n; i++) {
        list_push(p, p->keep_all ? &p->kept_slots : &p->gone_slots, slot + i);
    }
    p->leaked += n;
}

void pool_adopt(KsmPool *p, uint32_t top, size_t file_slots)
{
    unsigned n;

    p->top = top;
    p->file_slots = file_slots;
    for (uint32_t slot = 0; slot < top; slot += n) {
        n = 1;
        if (p->users[slot] == 0) {
            n = unused_run(p, slot);
            unused_adopt(p, slot, n);
        } else if (p->users[slot] & SLOT_PATTERN && slot % CHUNK_PAGES == 0 &&
                   !pattern_of(p, slot)) {
            n = CHUNK_PAGES;
            block_give_up(p, slot);
        } else if (pool_users(p, slot)) {
            p->shared++;
            p->sharing += pool_users(p, slot);
        }
    }
}

uint32_t pool_pattern_run(KsmPool *p, KsmPattern *t, unsigned *n)
{
    unsigned want = *n, k;

    while (t->filled < want && t->filled < CHUNK_PAGES &&
           t->asked >= MIN(PATTERN_USES, p->max_sharing) * t->filled) {
        if (pool_pattern_grow(p, t, 2 * t->filled) < 0) {
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
    /* beyond the top nothing was ever written to */
    return p->top * (sizeof(*p->hash) + sizeof(*p->users)) +
           p->top / 8 + p->top / 64 + ahead_bytes(&p->ahead) +
           (p->kept ? p->kept_len : 0);
}
