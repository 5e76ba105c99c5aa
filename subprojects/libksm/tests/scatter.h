/*
 * libksm tests: merged pages that map scattered slots
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef KSM_TEST_SCATTER_H
#define KSM_TEST_SCATTER_H

#include "merge/rejoin.h"

/*
 * Merged pages map other slots with their content, by which it is found then:
 * @pieces of @len, the first of which has the last slots, with @gap slots free
 * before and behind each.  (For the local store.)
 */
void scatter_pages(KsmRejoin *j, KsmRegion *r, size_t page, unsigned pieces,
                   unsigned len, unsigned gap);

#endif
