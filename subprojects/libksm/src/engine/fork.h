/*
 * fork: the engines of this process
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The danger: a child that is forked while pages are staged finds holes where
 * they were; one that maps the pool reads slots whose users nobody counts; one
 * that used the engine would work on the parent's memory, through the parent's
 * userfaultfd.  So fork() takes all engines' locks; pools keep what they have
 * (pool.h), unless every region is MADV_DONTFORK; and in the child engines are
 * dead.
 *
 * Here, too, is which memory any engine was given.
 */
#ifndef KSM_FORK_H
#define KSM_FORK_H

#include "engine/state.h"

void engines_add(KsmEngine *e);
void engines_drop(KsmEngine *e);

/*
 * One region is added at a time: two overlapping ones would miss each other.
 * Not while forking.  Taken before an engine's lock.
 */
void engines_adding(void);
void engines_added(void);

/* Was part of the range given to an engine already? */
bool engines_have(const char *addr, size_t len);
bool engine_has(const KsmEngine *e, const char *addr, size_t len);

#endif
