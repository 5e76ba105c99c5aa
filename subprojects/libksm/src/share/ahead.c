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

static void ahead_work(void *opaque)
{
    KsmAhead *a = opaque;

    a->ret = prim.allocate(a->fd, (off_t)a->from * PAGE_BYTES,
                           (off_t)(a->to - a->from) * PAGE_BYTES);
}

/* Then no helper is at it. */
static void ahead_wait(KsmAhead *a)
{
    crew_wait(a->crew, &a->chore);
    a->chore = (KsmChore) { 0 };
    if (a->ret < 0) {
        a->from = a->to = 0;
        a->ret = 0;
    }
}

unsigned ahead_take(KsmAhead *a, uint32_t slot, unsigned n)
{
    ahead_wait(a);
    if (slot < a->from || slot >= a->to) {
        return 0;
    }
    n = MIN(n, a->to - slot);
    a->from = slot + n;
    return prim.now_ns() - a->asked_ns < FRESH_NS ? n : 0;
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
    if (!crew_helps(a->crew) || want < AHEAD_MIN) {
        return;
    }
    ahead_wait(a);
    a->fd = fd;
    a->asked_ns = prim.now_ns();
    /* what is there already costs next to nothing */
    a->from = top;
    a->to = MAX(a->to, top + want);
    a->chore = (KsmChore) { .work = ahead_work, .opaque = a };
    crew_give(a->crew, &a->chore);
}

size_t ahead_bytes(const KsmAhead *a)
{
    return (a->to - a->from) * PAGE_BYTES;
}

void ahead_end(KsmAhead *a, uint32_t top)
{
    ahead_wait(a);
    if (MAX(a->from, top) < a->to) {
        uint32_t from = MAX(a->from, top);

        /* what the kernel does not take is for the next slots */
        if (prim.punch(a->fd, (off_t)from * PAGE_BYTES,
                       (off_t)(a->to - from) * PAGE_BYTES) < 0) {
            a->from = from;
            return;
        }
    }
    a->from = a->to = 0;
}
