/*
 * free: memory whose content is no longer needed, as the engine sees it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The policy and its reasons stand in libksm-free.h.  A range that was released
 * lazily may be written again unnoticed, and giving it back for good must leave
 * such pages alone: MADV_PAGEOUT drops lazily freed pages that are still clean
 * and would swap out the others.  Hence it is used only where there is no swap,
 * and not on huge pages, which it would split if they are in use again.
 *
 * A small page that is still there afterwards is in use, which the page tables
 * do not tell: the engine relies on it (discard.c).
 */
#ifndef KSM_FREE_H
#define KSM_FREE_H

#include "libksm-free.h"

/* As ksm_freer_new(), with signs of pressure from another root, for tests. */
KsmFreer *freer_new_at(KsmFreePolicy policy, const char *root);

/* Is memory released lazily now? */
bool freer_is_lazy(KsmFreer *freer);

/* ksm_freer_release(), but lazily in any case. */
int freer_release_lazily(KsmFreer *freer, void *addr, size_t len);

/* From now on freer_due() tells of all that was released lazily. */
void freer_remember_all(KsmFreer *freer);

/* ns after which freer_due() is to be asked again; 0: now; -1: not at all. */
int64_t freer_wait(KsmFreer *freer);

/*
 * 0: the range, of one chunk, was released lazily long enough ago, or memory
 * is short; it is forgotten.  Else as ksm_freer_step().
 */
int64_t freer_due(KsmFreer *freer, void **addr, size_t *len);

/* To be told of a range again, as if it was released now. */
void freer_remember(KsmFreer *freer, void *addr, size_t len);

/* Gives a range of one chunk back for good, where the policy says so. */
void freer_give_back(KsmFreer *freer, void *addr, size_t len);

#endif
