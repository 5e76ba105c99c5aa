/*
 * libksm: test-prop's watch over the engine's system calls
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Takes the place of the calls in prim that touch the owner's memory, makes
 * them, and
 *
 * - judges them: a staged page goes back to where it came from, or is replaced
 *   by a slot of the same content, or was zeroes; one whose writers are held up
 *   is replaced by a slot of the same content; nothing else of the owner's
 *   memory is mapped over, moved over or dropped unless the owner gave it
 *   back.  A breach ends the test long before anybody reads the page;
 * - sees to it that nothing is said to a daemon, nor heard, while pages are
 *   isolated;
 * - has some moves report less than was moved, as Linux 6.18 does;
 * - notes the latest, to be printed when a page is lost all the same: then
 *   none of these calls lost it.
 *
 * test-prop knows what the memory should hold.  Nobody looks after the pool:
 * whether a slot that is given up is still mapped.
 */
#ifndef PROP_WATCH_H
#define PROP_WATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/state.h"

/* What the watch asks about addresses; from any thread. */
typedef struct WatchOwner {
    /* a page of memory that must not be lost? */
    bool (*is_memory)(const void *page);
    /* may it be zeroes from now on? */
    bool (*may_vanish)(const void *page);
} WatchOwner;

/* Replaces the calls; before any region is added. */
void watch_start(KsmEngine *const *engines, unsigned n,
                 const WatchOwner *owner);

/*
 * Notes what the test did at @ns to [@at, @at + @len); @name must stay, @other
 * and @ret are printed.
 */
void watch_note(const char *name, uint64_t ns, const void *at, size_t len,
                uintptr_t other, long ret);

/*
 * Notes what the kernel has mapped at @n pages just written: nothing, if the
 * write used a translation that should be gone.
 */
void watch_note_entries(const char *mem, size_t n);

/*
 * Prints all that may tell why the page @mem does not hold @content: what every
 * processor sees, what is mapped, where else it is staged, and the latest calls
 * that named the page.  Changes the thread's affinity.
 */
void watch_print(const char *mem, const char *content);

/* Prints how many pages were moved and not counted. */
void watch_report(void);

#endif
