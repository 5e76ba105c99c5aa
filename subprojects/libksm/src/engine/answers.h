/*
 * answers: what a remote store has to say
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * An answer names a page as it was when the store was asked.  If it still is,
 * then it is equal to a slot, and its chunk is planned like that of a partner;
 * or somebody else has the same, and it is offered.
 *
 * The danger: an answer is late, and its page another one by now.  Why it is
 * safe: the id is looked up, and the page's tag compared; a wrong answer costs
 * an isolation, for merging compares the bytes.
 */
#ifndef KSM_ANSWERS_H
#define KSM_ANSWERS_H

#include "engine/state.h"

/* Takes what has come, up to a batch.  True: there may be more. */
bool answers_take(KsmEngine *e);

#endif
