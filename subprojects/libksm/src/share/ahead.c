/*
 * ahead: memory for slots, before anybody asks for it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "base/page.h"
#include "base/prim.h"
#include "share/ahead.h"

#define FRESH_NS    UINT64_C(100000000)

static void piece_work(void *opaque)
{
    AheadPiece *piece = opaque;

    piece->ret = prim.allocate(piece->fd, (off_t)piece->slot * PAGE_BYTES,
                               (off_t)piece->n * PAGE_BYTES);
}

static void piece_give(KsmAhead *a, int fd, uint32_t slot, unsigned n)
{
    AheadPiece *piece = &a->piece[a->n_pieces++];

    *piece = (AheadPiece) {
        .chore = { .work = piece_work, .opaque = piece },
        .fd = fd,
        .slot = slot,
        .n = n,
    };
    crew_give(a->crew, &piece->chore);
}

/* Then no helper is at it. */
static void ahead_wait(KsmAhead *a)
{
    for (unsigned i = 0; i < a->n_pieces; i++) {
        crew_wait(a->crew, &a->piece[i].chore);
        a->refused |= a->piece[i].ret < 0;
    }
    a->n_pieces = 0;
}

unsigned ahead_take(KsmAhead *a, uint32_t slot, unsigned n)
{
    ahead_wait(a);
    if (slot < a->from || slot >= a->to) {
        return 0;
    }
    n = MIN(n, a->to - slot);
    a->from = slot + n;
    return a->refused || prim.now_ns() - a->asked_ns >= FRESH_NS ? 0 : n;
}

void ahead_forget(KsmAhead *a, uint32_t slot, unsigned n)
{
    ahead_wait(a);
    if (slot < a->to && slot + n > a->from) {
        a->from = MAX(a->from, MIN(slot + n, a->to));
    }
}

void ahead_ask(KsmAhead *a, int fd, uint32_t top, uint32_t end)
{
    unsigned want = MIN(MIN(top - a->top, AHEAD_MAX), end - top);

    a->top = top;
    if (!crew_helps(a->crew) || want < AHEAD_PIECE || a->refused) {
        return;
    }
    ahead_wait(a);
    a->asked_ns = prim.now_ns();
    a->from = top;
    a->to = MAX(a->to, top + want);
    /* what is there already costs next to nothing */
    for (unsigned i = 0; i < want; i += AHEAD_PIECE) {
        piece_give(a, fd, top + i, MIN(want - i, AHEAD_PIECE));
    }
}

size_t ahead_bytes(const KsmAhead *a)
{
    return (a->to - a->from) * PAGE_BYTES;
}

void ahead_end(KsmAhead *a, int fd, uint32_t top)
{
    ahead_wait(a);
    a->refused = false;
    if (MAX(a->from, top) < a->to) {
        uint32_t from = MAX(a->from, top);

        /* what the kernel does not take is for the next slots */
        if (prim.punch(fd, (off_t)from * PAGE_BYTES,
                       (off_t)(a->to - from) * PAGE_BYTES) < 0) {
            a->from = from;
            return;
        }
    }
    a->from = a->to = 0;
}
