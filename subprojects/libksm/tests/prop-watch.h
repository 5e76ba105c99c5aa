/*
 * libksm: test-prop's watch over the engine's system calls
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Takes the place of the calls in prim that touch the owner's memory, makes
 * them, and
 *
 * - judges them: a page that was staged goes back to where it came from, or is
 *   replaced by a slot of the same content, or was zeroes; nothing else of the
 *   owner's memory is ever mapped over, moved over or dropped unless the owner
 *   gave it back.  What breaks that ends the test at once, long before anybody
 *   reads the page;
 * - has some moves report less than was moved, as Linux 6.18 does;
 * - notes the latest of them, to be printed when a page is lost all the same:
 *   then none of these calls lost it.
 *
 * It leaves what the memory should hold to test-prop, and does not look after
 * the pool: whether a slot that is given up is still mapped.
 */
#ifndef PROP_WATCH_H
#define PROP_WATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/state.h"

/* What the watch asks about addresses; from any thread. */
typedef struct WatchOwner {
    /* is the page one of the memory that must not be lost? */
    bool (*is_memory)(const void *page);
    /* may it be zeroes from now on? */
    bool (*may_vanish)(const void *page);
} WatchOwner;

/* Replaces the calls; to be called before any region is added. */
void watch_start(KsmEngine *const *engines, unsigned n,
                 const WatchOwner *owner);

/*
 * Notes something the test did at @ns to [@at, @at + @len); @name must stay.
 * @other and @ret are printed with it.
 */
void watch_note(const char *name, uint64_t ns, const void *at, size_t len,
                uintptr_t other, long ret);

/*
 * Notes what the kernel has mapped at @n pages that were just written:
 * nothing, if the write went through a translation that should be gone.
 */
void watch_note_entries(const char *mem, size_t n);

/*
 * Prints all that may tell why the page @mem does not hold what @content does:
 * what every processor sees, what is mapped, where else the content is staged,
 * and the latest calls that named the page.  Changes the thread's affinity.
 */
void watch_print(const char *mem, const char *content);

/* Prints how many pages were moved and not counted, at the end. */
void watch_report(void);

#endif
