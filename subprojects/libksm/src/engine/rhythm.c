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
 * 1 % of a core it is CHECK_PASSES of the shortest passes.
 */
#define LOOK_NS     UINT64_C(8000000000)
#define LOOKS_MAX   32u
/*
 * What is the same in two looks as far apart as this, or further, hardly tells
 * that it is quiet, where memory is written: they come in pairs.
 */
#define LOOKS_APART 8u

/*
 * What is left of a rest.  A power, and not a threshold: where passes that pay
 * nearly are followed by a long rest, more is written during it, and the next
 * one pays less: memory that is written all the time would stay so.  The
 * fourth: what earns a fifth of what it takes rests by 60 % less, and what
 * earns half by 94 %.
 */
static double rest_share(uint64_t spent, uint64_t gained)
{
    double lost = spent > gained ? (double)(spent - gained) / spent : 0;

    lost *= lost;
    return lost * lost;
}

/* What was before the last rest, or the last look, counts half. */
static void fade(uint64_t *spent, uint64_t *gained)
{
    *gained = MIN(*gained, *spent) / 2;
    *spent /= 2;
}

static void look_begin(KsmRhythm *m, uint64_t pass, uint64_t now)
{
    m->looks = CLAMP((now - m->checked) / LOOK_NS, 1, LOOKS_MAX);
    m->second = m->alone;
    m->alone = !m->second && m->looks >= LOOKS_APART;
    m->check_pass = pass;
    m->checked = now;
    m->all_looks += m->looks;
    m->soonest = m->looks + m->before[0] + m->before[1];
    m->before[1] = m->before[0];
    m->before[0] = m->looks;
    m->judged = 0;
    m->calm = false;
    if (!m->second) {
        m->check_cost = 0;
        fade(&m->check_spent, &m->check_gained);
    }
}

/*
 * A pair is instead of two.  Right after a look that found no merged page written
 * there is none to be found quiet either.
 */
static bool has_turn(const KsmRhythm *m, uint64_t pass)
{
    uint64_t apart = m->second ? CHECK_PASSES : m->calm ? 2 : 1;

    return pass % CHECK_PASSES == 0 && pass - m->check_pass >= apart;
}

void rhythm_begin(KsmRhythm *m, uint64_t pass, uint64_t now)
{
    uint64_t least = MAX(CALM_NS, m->alone ? 0 : m->check_rest);

    m->check = now - m->checked >= least || has_turn(m, pass);
    if (m->check) {
        look_begin(m, pass, now);
    }
}

/* What looks find quiet is merged at once, in the next pass, or @late. */
static void check_judge(KsmRhythm *m, uint64_t worth, bool late)
{
    if (m->judged < 2 + late) {
        m->check_gained += worth;
        m->check_rest = m->check_cost * REST_SHARE *
                        rest_share(m->check_spent, m->check_gained);
    }
}

void rhythm_gains(KsmRhythm *m, uint64_t worth)
{
    m->gained += worth / 2;     /* as what was spent before the rest */
    check_judge(m, worth, true);
}

uint64_t rhythm_end(KsmRhythm *m, const PassYield *yield)
{
    bool paid = yield->worth > yield->cost;
    double most = yield->hurry ? HURRY_SHARE : REST_SHARE;
    uint64_t rest;

    if (m->check) {
        m->check_cost += yield->cost;
        m->check_spent += yield->cost;
        m->calm = !yield->stirred;
        m->alone &= yield->stirred;
    }
    check_judge(m, yield->worth, yield->late);
    m->judged += m->judged < UINT_MAX;
    m->owed = paid ? 0 : m->owed + yield->cost - yield->hash;
    m->spent += yield->cost - yield->hash;
    m->gained += yield->worth;
    if (paid || yield->go_on) {
        return 0;
    }
    rest = m->owed * MIN(REST_SHARE * rest_share(m->spent, m->gained), most);
    m->owed = 0;
    fade(&m->spent, &m->gained);
    return CLAMP(rest, 1, REST_MAX_NS);
}
