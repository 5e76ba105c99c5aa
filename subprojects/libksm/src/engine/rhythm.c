/*
 * rhythm: how long to rest between passes, and what is looked at when
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "engine/rhythm.h"
#include "watch/dirty.h"

#define REST_SHARE  3000u
#define HURRY_SHARE 100u
#define REST_MAX_NS UINT64_C(30000000000)
/*
 * Looks as far apart as this count once, looks twice as far count twice.  With
 * a whole core it is CHECK_PASSES of the shortest passes.
 */
#define LOOK_NS     UINT64_C(8000000000)
#define LOOKS_MAX   32u

void rhythm_begin(KsmRhythm *m, uint64_t pass, uint64_t now, uint64_t since)
{
    m->check = pass % CHECK_PASSES == 0 ||
               (since >= CALM_NS && now - m->checked >= m->check_rest);
    if (m->check) {
        m->looks = CLAMP((now - m->checked) / LOOK_NS, 1, LOOKS_MAX);
        m->checked = now;
        m->all_looks += m->looks;
    }
}

/* What was found quiet is merged at once, or in the next pass. */
static void check_judge(KsmRhythm *m, const PassYield *yield)
{
    if (m->check) {
        m->check_cost = yield->cost;
        m->check_gain = 0;
        m->judged = 0;
    }
    if (m->judged < 2) {
        m->judged++;
        m->check_gain += yield->worth;
        m->check_rest = m->check_gain > m->check_cost ? 0
                        : m->check_cost * REST_SHARE *
                          ((m->check_cost + 1.0) /
                           (m->check_cost + m->check_gain + 1.0));
    }
}

uint64_t rhythm_end(KsmRhythm *m, const PassYield *yield)
{
    bool paid = yield->worth > yield->cost;
    unsigned share = yield->hurry ? HURRY_SHARE : REST_SHARE;
    uint64_t rest;

    check_judge(m, yield);
    m->owed = paid ? 0 : m->owed + yield->cost - yield->hash;
    m->spent += yield->cost;
    m->gained += yield->worth;
    if (paid || yield->go_on) {
        return 0;
    }
    rest = m->owed * share * ((m->spent + 1.0) /
                              (m->spent + m->gained + 1.0));
    m->owed = m->spent = m->gained = 0;
    return CLAMP(rest, 1, REST_MAX_NS);
}
