/*
 * foreign: a pool that another process writes
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>

#include "base/prim.h"
#include "share/foreign.h"
#include "share/wire.h"

#define SLOT_BLOCK  0x8000u     /* in users[]: part of a block */
#define SLOT_BYTES  (sizeof(uint32_t) + 2 * sizeof(uint16_t))

static unsigned users_of(const KsmForeign *f, uint32_t slot)
{
    return f->users[slot] & SLOT_USERS;
}

static bool foreign_map(KsmForeign *f)
{
    size_t len = f->slots * PAGE_BYTES;

    f->view = prim.map(NULL, len, PROT_READ, MAP_SHARED | MAP_NORESERVE, f->fd,
                       0);
    if (!f->view) {
        return false;
    }
    prim.advise(f->view, len, MADV_DONTFORK);
    prim.advise(f->view, len, MADV_DONTDUMP);
    f->tables = prim.map(NULL, f->slots * SLOT_BYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!f->tables) {
        return false;
    }
    f->tag = f->tables;
    f->users = (uint16_t *)(f->tag + f->slots);
    f->holds = f->users + f->slots;
    return true;
}

KsmForeign *foreign_new(int fd, uint64_t generation, uint32_t base,
                        uint32_t slots, int *err)
{
    KsmForeign *f = g_new(KsmForeign, 1);

    *f = (KsmForeign) {
        .generation = generation,
        .base = base,
        .slots = slots,
        .hold_users = 1,
        .max_users = SLOT_USERS,
        .fd = fd,
        .blocks = g_hash_table_new_full(NULL, NULL, NULL, g_free),
    };
    if (!foreign_map(f)) {
        *err = -errno;
        foreign_free(f);
        return NULL;
    }
    return f;
}

void foreign_close(KsmForeign *f)
{
    if (f->fd >= 0) {
        prim.close(f->fd);
        f->fd = -1;
    }
}

void foreign_free(KsmForeign *f)
{
    if (f->view) {
        prim.unmap(f->view, f->slots * PAGE_BYTES);
    }
    if (f->tables) {
        prim.unmap(f->tables, f->slots * SLOT_BYTES);
    }
    foreign_close(f);
    g_hash_table_unref(f->blocks);
    g_free(f);
}

ForeignBlock *foreign_block(const KsmForeign *f, uint32_t slot)
{
    uint32_t first = slot / WIRE_BLOCK_MAX * WIRE_BLOCK_MAX;

    return f->users[slot] & SLOT_BLOCK
           ? g_hash_table_lookup(f->blocks, GUINT_TO_POINTER(first)) : NULL;
}

static void user_add(KsmForeign *f, uint32_t slot)
{
    ForeignBlock *b = foreign_block(f, slot);

    if (b) {
        b->users++;
    }
    f->shared += !users_of(f, slot);
    f->users[slot]++;
    f->sharing++;
}

bool foreign_told(KsmForeign *f, uint32_t slot, uint32_t tag)
{
    if (f->holds[slot] == UINT16_MAX || users_of(f, slot) == SLOT_USERS) {
        return false;
    }
    if (!f->holds[slot]) {
        f->tag[slot] = tag;
    }
    f->holds[slot]++;
    f->top = MAX(f->top, slot + 1);
    user_add(f, slot);
    return true;
}

bool foreign_told_block(KsmForeign *f, uint32_t first, uint32_t length)
{
    ForeignBlock *b = g_hash_table_lookup(f->blocks, GUINT_TO_POINTER(first));

    if (first % WIRE_BLOCK_MAX || !length || length > WIRE_BLOCK_MAX ||
        first >= f->slots || length > f->slots - first ||
        (b && length < b->length)) {
        return false;
    }
    /* the first may have been told as a slot, while we gave the block back */
    for (uint32_t i = b ? b->length : 1; i < length; i++) {
        if (f->holds[first + i] || f->users[first + i]) {
            return false;
        }
    }
    if (!b) {
        b = g_new0(ForeignBlock, 1);
        b->first = first;
        b->users = users_of(f, first);
        g_hash_table_insert(f->blocks, GUINT_TO_POINTER(first), b);
    }
    for (; b->length < length; b->length++) {
        f->users[first + b->length] |= SLOT_BLOCK;
    }
    b->wanted = MAX(b->wanted, length);
    f->top = MAX(f->top, first + length);
    return true;
}

/* Forgets a block that nobody uses. */
static void block_forget(KsmForeign *f, ForeignBlock *b)
{
    for (uint32_t i = 0; i < b->length; i++) {
        f->users[b->first + i] = 0;
    }
    g_hash_table_remove(f->blocks, GUINT_TO_POINTER(b->first));
}

void foreign_untold_block(KsmForeign *f, uint32_t first)
{
    ForeignBlock *b = foreign_block(f, first);

    if (b && !f->holds[b->first]) {
        block_forget(f, b);
    }
}

bool foreign_full(const KsmForeign *f, uint32_t slot)
{
    uint64_t holds = f->holds[foreign_unit(f, slot)];

    return users_of(f, slot) >= MIN(holds * f->hold_users, f->max_users);
}

void foreign_hold(KsmForeign *f, uint32_t slot)
{
    g_assert(!foreign_full(f, slot));
    user_add(f, slot);
}

void foreign_settle(KsmForeign *f, uint32_t slot)
{
    ForeignBlock *b = foreign_block(f, slot);
    uint32_t unit = b ? b->first : slot;
    unsigned holds = f->holds[unit];

    if ((b ? b->users : users_of(f, slot)) || !holds) {
        return;
    }
    if (!f->gone(f->opaque, f, unit, holds)) {
        return;
    }
    f->holds[unit] = 0;
    if (b) {
        block_forget(f, b);
    }
}

void foreign_drop(KsmForeign *f, uint32_t slot)
{
    ForeignBlock *b = foreign_block(f, slot);

    g_assert(users_of(f, slot) > 0);
    f->users[slot]--;
    f->sharing--;
    f->shared -= !users_of(f, slot);
    if (b) {
        b->users--;
    }
    foreign_settle(f, slot);
}

uint32_t foreign_block_run(KsmForeign *f, ForeignBlock *b, unsigned *n)
{
    unsigned want = *n, from, k = 0;

    from = b->next + want > b->length ? 0 : b->next;
    for (unsigned i = 0; i < b->length; i++) {
        uint32_t at = (from + i) % b->length, slot = b->first + at;

        while (k < want && at + k < b->length &&
               !foreign_full(f, slot + k)) {
            k++;
        }
        if (k) {
            *n = k;
            b->next = at + k;
            b->asked += k;
            return slot;
        }
    }
    return SLOT_NONE;
}

int foreign_readable(const KsmForeign *f, uint32_t slot, unsigned n)
{
    int ret = prim.advise((void *)foreign_page(f, slot), n * PAGE_BYTES,
                          MADV_POPULATE_READ);

    return ret == -EHWPOISON || ret == -EINVAL ? -EFAULT : ret;
}

size_t foreign_bytes(const KsmForeign *f)
{
    return sizeof(*f) + f->top * SLOT_BYTES +
           g_hash_table_size(f->blocks) * sizeof(ForeignBlock);
}
