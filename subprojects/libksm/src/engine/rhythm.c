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
/*
 * What is the same in two looks as far apart as this, or further, hardly tells
 * that it is quiet, where memory is written: they come in pairs.
 */
#define PAIR_NS     UINT64_C(64000000000)

void rhythm_begin(KsmRhythm *m, uint64_t pass, uint64_t now)
{
    m->check = pass % CHECK_PASSES == 0 ||
               (now - m->checked >= CALM_NS &&
                (m->alone || now - m->checked >= m->check_rest));
    if (m->check) {
        m->second = m->alone;
        m->alone = !m->second && now - m->checked >= PAIR_NS;
        m->looks = CLAMP((now - m->checked) / LOOK_NS, 1, LOOKS_MAX);
        m->checked = now;
        m->all_looks += m->looks;
    }
}

/*
 * What is left of a rest.  A power, and not a threshold: where passes that pay
 * nearly are followed by a long rest, more is written during it, and the next
 * one pays less: memory that is written all the time would stay so.  The
 * fourth: what merges a page for 60 us of scanning, as ksmd does, rests by 60 %
 * less, and what does for twice its worth 94 %.
 */
static double rest_share(uint64_t spent, uint64_t gained)
{
    double lost = spent > gained ? (double)(spent - gained) / spent : 0;

    lost *= lost;
    return lost * lost;
}

/* A pass counts for twice as much as the one before the rest, or the look. */
static void fade(uint64_t *spent, uint64_t *gained)
{
    *gained = MIN(*gained, *spent) / 2;
    *spent /= 2;
}

/* What was found quiet is merged at once, or in the next pass. */
static void check_judge(KsmRhythm *m, const PassYield *yield)
{
    if (m->check) {
        if (!m->second) {
            m->check_cost = 0;
            fade(&m->check_spent, &m->check_gained);
        }
        m->check_cost += yield->cost;
        m->check_spent += yield->cost;
        m->judged = 0;
    }
    if (m->judged < 2) {
        m->judged++;
        m->check_gained += yield->worth;
        m->check_rest = m->check_cost * REST_SHARE *
                        rest_share(m->check_spent, m->check_gained);
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
    rest = m->owed * share * rest_share(m->spent, m->gained);
    m->owed = 0;
    fade(&m->spent, &m->gained);
    return CLAMP(rest, 1, REST_MAX_NS);
}
