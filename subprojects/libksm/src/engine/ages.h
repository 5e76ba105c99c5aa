/*
 * ages: smart scan
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A page that was hashed and matched nothing, and is written again, is passed
 * over for 1, 2, 4, then 8 passes (Linux 6.7, Documentation/admin-guide/mm/
 * ksm.rst).  The high 4 bits of its history count how often, the low 4 bits the
 * passes still to skip.
 */
#ifndef KSM_AGES_H
#define KSM_AGES_H

#include "memory/region.h"

/* Passes to skip after the n-th time without a match. */
static inline unsigned age_skip(unsigned age)
{
    static const uint8_t skip[] = { 0, 0, 1, 2, 4 };

    return age < G_N_ELEMENTS(skip) ? skip[age] : 8;
}

static inline void age_miss(KsmRegion *r, size_t page)
{
    unsigned age = MIN((r->history[page] >> 4) + 1, 15);

    r->history[page] = age << 4 | age_skip(age);
}

/* Is the page to be passed over this time?  Counts it. */
static inline bool age_passes(KsmRegion *r, size_t page)
{
    if (!(r->history[page] & 0x0f)) {
        return false;
    }
    r->history[page]--;
    return true;
}

#endif
