/*
 * libksm tests: how much is done, and how long is rested
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "base/prim.h"
#include "engine/pace.h"
#include "engine/promise.h"
#include "engine/rhythm.h"
#include "merge/cost.h"
#include "watch/dirty.h"

#define S   UINT64_C(1000000000)
#define MS  UINT64_C(1000000)

static uint64_t cpu;

static uint64_t fake_cpu(void)
{
    return cpu;
}

static void test_share(void)
{
    KsmBudget b = { 0 };

    cpu = 12345;
    budget_begin(&b, 0);
    g_assert(budget_used(&b) == 0);
    g_assert(b.limit > 0);
    cpu += 1000000;
    g_assert(budget_used(&b) == 1000000);
    /* worked 1 of 10, rests 9 of 10 */
    g_assert(budget_rest(&b, 10) == 9000000);
    g_assert(budget_rest(&b, 50) == 1000000);
    g_assert(budget_rest(&b, 100) == 0);
    g_assert(budget_rest(&b, 1) == 99000000);
}

/*
 * Helpers' CPU is used, too, and waited for: only as far as this thread has not
 * been at work for as long.  Also what they end between steps.
 */
static void test_helped(void)
{
    KsmCrew crew = { .cpu_ns = 7 * MS };
    KsmBudget b = { .crew = &crew, .helped = 7 * MS };

    budget_begin(&b, 0);
    cpu += MS;
    crew.cpu_ns += 3 * MS;
    g_assert(budget_used(&b) == 4 * MS);
    g_assert(budget_rest(&b, 10) == 39 * MS);
    for (unsigned percent = 100; percent <= 400; percent += 100) {
        b.helped = 7 * MS;
        g_assert(budget_rest(&b, percent) == 400 * MS / percent - MS);
    }
    b.helped = 7 * MS;
    g_assert(budget_rest(&b, 1600) == 0);
    crew.cpu_ns += 2 * MS;
    budget_begin(&b, 0);
    g_assert(budget_used(&b) == 2 * MS);
    g_assert(budget_rest(&b, 50) == 4 * MS);
    budget_begin(&b, 0);
    g_assert(budget_used(&b) == 0);
}

static void test_limit(void)
{
    KsmBudget b = { 0 };

    budget_begin(&b, 12345);
    g_assert(b.limit == 12345);
}

static void test_spread(void)
{
    const uint64_t s = 1000000000;

    /* half of it done after a tenth of the time: rest, but not for long */
    g_assert(budget_spread(10 * s, s, 50, 100) == s);
    g_assert(budget_spread(s, s / 10, 50, 100) == s * 4 / 10);
    /* behind, or no target, or nothing to do: no rest */
    g_assert(budget_spread(10 * s, 6 * s, 50, 100) == 0);
    g_assert(budget_spread(0, 0, 50, 100) == 0);
    g_assert(budget_spread(s, 2 * s, 0, 0) == 0);
    g_assert(budget_spread(s, s, 1, 1) == 0);
    /* there are no chunks: the pass takes as long, too */
    g_assert(budget_spread(s, s / 4, 0, 0) == s * 3 / 4);
}

/* A pass every @gap ns from @start on, @n of them: how many look. */
static unsigned checks(KsmRhythm *m, uint64_t start, uint64_t gap, unsigned n)
{
    unsigned found = 0;

    for (unsigned pass = 1; pass <= n; pass++) {
        PassYield yield = { .cost = MS };

        rhythm_begin(m, pass, start + pass * gap);
        found += m->check;
        rhythm_end(m, &yield);
    }
    return found;
}

/* Merged pages are looked at each CHECK_PASSES, or by the clock. */
static void test_rhythm_check(void)
{
    PassYield dear = { .cost = 14 * MS, .hash = 13 * MS, .stirred = true };
    KsmRhythm m = { .checked = 1000 * S };

    g_assert(checks(&m, 1000 * S, S, 40) == 40 / CHECK_PASSES);
    g_assert(m.looks == 1);
    /* each second one, 10 s apart */
    g_assert(checks(&m, 1040 * S, 5 * S, 40) == 20);
    g_assert(m.looks == 1);
    g_assert(checks(&m, 1240 * S, CALM_NS, 40) == 40);
    g_assert(m.looks == 1);
    g_assert(checks(&m, 1600 * S, 30 * S, 40) == 40);
    g_assert(m.looks == 3);
    /* one that took 14 ms is enough for 42 s, or for CHECK_PASSES */
    rhythm_begin(&m, 41, 2830 * S);
    rhythm_end(&m, &dear);
    rhythm_begin(&m, 42, 2830 * S + 42 * S - 1);
    g_assert(!m.check);
    rhythm_begin(&m, 43, 2830 * S + 42 * S);
    g_assert(m.check && m.looks == 5);
    rhythm_end(&m, &dear);
    rhythm_begin(&m, 44, 2830 * S + 43 * S);
    g_assert(m.check && m.looks == 1);
    /* nobody was there for a day */
    rhythm_begin(&m, 45, 100000 * S);
    g_assert(m.check && m.looks == 32);
}

static uint64_t rest_after(KsmRhythm *m, uint64_t cost, uint64_t worth)
{
    PassYield yield = { .cost = cost, .worth = worth };

    return rhythm_end(m, &yield);
}

/* The passes at @ns and just before that: is it only the second that looks? */
static bool checks_at(const KsmRhythm *m, uint64_t ns)
{
    KsmRhythm before = *m, now = *m;

    rhythm_begin(&before, 41, ns - 2 * MS);
    rhythm_begin(&now, 41, ns + MS);
    return !before.check && now.check;
}

/* ... and merged pages had been written when it looked. */
static void stirred_after(KsmRhythm *m, uint64_t cost, uint64_t worth)
{
    PassYield yield = { .cost = cost, .worth = worth, .stirred = true };

    rhythm_end(m, &yield);
}

/* Looks that may not come often come in pairs, which stand for two of them. */
static void test_rhythm_pairs(void)
{
    KsmRhythm m = { 0 };

    rhythm_begin(&m, 40, 1000 * S);
    g_assert(m.check && m.looks == 32);
    stirred_after(&m, 40 * MS, 0);
    /* not before it is a while, nor a third time, until both are paid for */
    rhythm_begin(&m, 41, 1001 * S);
    g_assert(!m.check);
    rest_after(&m, MS, 0);
    rhythm_begin(&m, 42, 1030 * S);
    g_assert(m.check && m.looks == 3);
    stirred_after(&m, 40 * MS, 0);
    rhythm_begin(&m, 43, 1060 * S);
    g_assert(!m.check);
    rest_after(&m, MS, 0);
    g_assert(checks_at(&m, 1270 * S));
    /* a minute apart, or less, is no pair */
    rhythm_begin(&m, 48, 1093 * S);
    g_assert(m.check && m.looks == 7);
    stirred_after(&m, 10 * MS, 0);
    g_assert(checks_at(&m, 1123 * S));
    /* what the first of a pair brings is no older than the second */
    m = (KsmRhythm) { 0 };
    rhythm_begin(&m, 40, 1000 * S);
    stirred_after(&m, 40 * MS, 20 * MS);
    rhythm_begin(&m, 41, 1030 * S);
    stirred_after(&m, 40 * MS, 20 * MS);
    g_assert(m.second && m.check_spent == 80 * MS && m.check_gained == 40 * MS);
    m.check_rest = m.check_spent = m.check_gained = 0;
    rhythm_begin(&m, 48, 1093 * S);
    g_assert(!m.second && !m.alone);
    /* however late the second one is, it is that */
    rhythm_begin(&m, 64, 2000 * S);
    stirred_after(&m, 10 * MS, 0);
    rhythm_begin(&m, 65, 2100 * S);
    g_assert(m.check && m.second && !m.alone);
    stirred_after(&m, 10 * MS, 0);
    g_assert(checks_at(&m, 2160 * S));
}

/* ... the second, and the turn that was next. */
static void test_rhythm_pair_turns(void)
{
    KsmRhythm m = { .checked = 1093 * S, .before = { 7, 3 } };

    /* the next one's turn would be a third look: not this time */
    rhythm_begin(&m, 53, 1157 * S);
    g_assert(m.check && m.alone && m.looks == 8);
    rhythm_begin(&m, 54, 1187 * S);
    g_assert(m.check && m.second && m.soonest == 7 + 8 + 3);
    m.check_rest = 10000 * S;
    rhythm_begin(&m, 56, 1217 * S);
    g_assert(!m.check);
    rhythm_begin(&m, 60, 1247 * S);
    g_assert(m.check && !m.second && m.soonest == 8 + 3 + 7);
    /* a second look in its turn has the next turn's, too */
    m = (KsmRhythm) { 0 };
    rhythm_begin(&m, 43, 1000 * S);
    rhythm_begin(&m, 44, 1001 * S);
    g_assert(m.check && m.second);
    m.check_rest = 10000 * S;
    rhythm_begin(&m, 48, 1002 * S);
    g_assert(m.check && !m.second);
}

/* There is nothing to tell apart where nothing had been written. */
static void test_rhythm_calm(void)
{
    KsmRhythm m = { 0 };

    rhythm_begin(&m, 41, 1000 * S);
    g_assert(m.check && m.alone);
    rest_after(&m, 40 * MS, 0);
    rhythm_begin(&m, 42, 1030 * S);
    g_assert(!m.check);
    /* of a pass that does not look that tells nothing */
    m.alone = true;
    rest_after(&m, MS, 0);
    rhythm_begin(&m, 43, 1060 * S);
    g_assert(m.check && m.second);
    /* it was no pair: the next one has its turn, but not at once */
    m = (KsmRhythm) { 0 };
    rhythm_begin(&m, 43, 1000 * S);
    rest_after(&m, 40 * MS, 0);
    rhythm_begin(&m, 44, 1030 * S);
    g_assert(!m.check);
    rest_after(&m, MS, 0);
    m.check_pass = 42;
    rhythm_begin(&m, 44, 1030 * S);
    g_assert(m.check && !m.second);
    stirred_after(&m, 40 * MS, 0);
    m.check_pass = 47;
    rhythm_begin(&m, 48, 1031 * S);
    g_assert(m.check);
    /* nor is one that was not whole: it has found nothing out */
    m = (KsmRhythm) { .calm = true };
    rhythm_begin(&m, 51, 1000 * S);
    g_assert(m.check && m.alone);
    m.alone = false;
    rhythm_begin(&m, 52, 1001 * S);
    g_assert(m.check);
}

/* What looks find, and the next pass merges, has them come sooner. */
static void test_rhythm_pays(void)
{
    PassYield late = { .cost = 40 * MS, .worth = 10 * MS, .late = true };
    KsmRhythm m = { .checked = 1060 * S };

    rhythm_begin(&m, 41, 1090 * S);
    g_assert(m.check && !m.alone);
    rest_after(&m, 40 * MS, 0);
    g_assert(checks_at(&m, 1210 * S));
    /* half of what it took: a 16th of 120 s */
    rhythm_begin(&m, 42, 1092 * S);
    rest_after(&m, 5 * MS, 20 * MS);
    g_assert(m.check_rest == 7500 * MS);
    /* that is enough: what is merged later has nothing to do with it */
    rhythm_begin(&m, 43, 1093 * S);
    rest_after(&m, 5 * MS, 900 * MS);
    g_assert(m.check_rest == 7500 * MS);
    /* never sooner than this, but for CHECK_PASSES */
    g_assert(checks_at(&m, 1090 * S + CALM_NS + MS));
    /* at once, and in the next one; what was before is half of it */
    rhythm_begin(&m, 45, 1100 * S);
    g_assert(m.check);
    rest_after(&m, 40 * MS, 10 * MS);
    rhythm_begin(&m, 46, 1101 * S);
    rest_after(&m, MS, 10 * MS);
    g_assert(m.check_spent == 60 * MS && m.check_gained == 30 * MS);
    g_assert(m.check_rest == 7500 * MS);
    rhythm_begin(&m, 49, 1120 * S);
    rest_after(&m, 400 * MS, 201 * MS);
    rhythm_begin(&m, 50, 1121 * S);
    rest_after(&m, MS, 300 * MS);
    g_assert(m.check_rest == 0);
    /* gains that are more than was spent do not last */
    rhythm_begin(&m, 53, 1140 * S);
    rest_after(&m, 100 * MS, 0);
    g_assert(m.check_spent == 315 * MS && m.check_gained == 215 * MS);
    /* others are asked about it first: what the third pass has counts, too */
    m.check_spent = m.check_gained = 0;
    rhythm_begin(&m, 56, 1160 * S);
    rhythm_end(&m, &late);
    late.cost = 0;
    rhythm_begin(&m, 57, 1161 * S);
    rhythm_end(&m, &late);
    g_assert(!m.check && m.check_rest == 7500 * MS);
    rhythm_gains(&m, 1 * MS);
    late.worth = 2 * MS;
    rhythm_begin(&m, 58, 1162 * S);
    rhythm_end(&m, &late);
    g_assert(m.check_gained == 23 * MS && m.check_rest < 7500 * MS);
    rhythm_begin(&m, 59, 1163 * S);
    rhythm_end(&m, &late);
    rhythm_gains(&m, 1 * MS);
    g_assert(m.check_gained == 23 * MS);
}

/*
 * A rest is 3000 times what the pass took, or what is left of it by gains: the
 * fourth power of what was lost.
 */
static void test_rhythm_rest(void)
{
    PassYield hashed = { .cost = 3 * MS, .hash = 2 * MS };
    PassYield goes_on = { .cost = 3 * MS, .hash = MS, .go_on = true };
    PassYield hurried = { .cost = MS, .hurry = true };
    KsmRhythm m = { 0 };

    g_assert(rest_after(&m, 0, 0) == 1);
    g_assert(rest_after(&m, MS, 0) == 3 * S);
    g_assert(rhythm_end(&m, &hashed) == 3 * S);
    g_assert(rest_after(&m, 40 * MS, 0) == 30 * S);
    /* a 30th of that, not of the most that it may be */
    g_assert(rhythm_end(&m, &hurried) == S / 10);
    hurried.cost = 40 * MS;
    g_assert(rhythm_end(&m, &hurried) == 4 * S);
    /* it was worth half of what it took: a 16th */
    m = (KsmRhythm) { 0 };
    g_assert(rest_after(&m, 4 * MS, 2 * MS) == 750 * MS);
    /* of this one, and half of the last; again */
    g_assert(m.spent == 2 * MS && m.gained == MS);
    g_assert(rest_after(&m, 2 * MS, 3 * MS) == 0);
    g_assert(m.spent == 4 * MS && m.gained == 4 * MS && !m.owed);
    g_assert(rest_after(&m, 4 * MS, 0) == 750 * MS);
    g_assert(rest_after(&m, 2 * MS, 2 * MS) / MS == 6000 / 81);
    /* what it was worth is what it took */
    m = (KsmRhythm) { 0 };
    g_assert(rest_after(&m, 2 * MS, 2 * MS) == 1);
    /* what is more than that does not last */
    g_assert(rest_after(&m, MS, 80 * MS) == 0);
    g_assert(rest_after(&m, MS, 0) == 1);
    g_assert(m.spent == m.gained && m.spent == 3 * MS / 2);
    g_assert(rest_after(&m, 3 * MS / 2, 0) == 4500 * MS / 16);
    /* no rest now is a longer one later, unless something comes of it */
    m = (KsmRhythm) { 0 };
    g_assert(rhythm_end(&m, &goes_on) == 0);
    g_assert(m.owed == 2 * MS && m.spent == 2 * MS);
    g_assert(rest_after(&m, MS, 0) == 9 * S);
    g_assert(rhythm_end(&m, &goes_on) == 0);
    g_assert(rest_after(&m, MS, MS + 1) == 0);
    g_assert(m.owed == 0);
    /* hashing is not what a gain is compared with, but for whether it paid */
    m = (KsmRhythm) { 0 };
    hashed.worth = MS / 2;
    g_assert(rhythm_end(&m, &hashed) == 3 * S / 16);
    /* a gain takes nothing off a short rest before that is the longer one */
    m = (KsmRhythm) { 0 };
    hurried.worth = 20 * MS;
    g_assert(rhythm_end(&m, &hurried) == 4 * S);
    m = (KsmRhythm) { 0 };
    hurried.worth = 30 * MS;
    g_assert(rhythm_end(&m, &hurried) == 40 * 3 * S / 256);
    /* what is merged during a rest counts for the next one */
    m = (KsmRhythm) { 0 };
    g_assert(rest_after(&m, 4 * MS, 0) == 12 * S);
    rhythm_gains(&m, 6 * MS);
    g_assert(rest_after(&m, 4 * MS, 0) == 750 * MS);
    /* what a gain takes off is taken off before the limit */
    m = (KsmRhythm) { 0 };
    g_assert(rest_after(&m, 320 * MS, 0) == 30 * S);
    m = (KsmRhythm) { 0 };
    g_assert(rest_after(&m, 80 * MS, 40 * MS) == 15 * S);
}

/* A pass of 1 ms ends, after which @waits pages wait for the next one. */
static bool promised(KsmPromise *p, uint64_t merged, unsigned waits)
{
    promise_begin(p);
    promise_waits(p, waits);
    promise_judge(p, merged, MS, 0, 0);
    return promise_make(p, merged);
}

/* What waits is to be worth more than a pass costs. */
static void test_promise_pays(void)
{
    unsigned pays = MS / PAGE_WORTH_NS + 1;
    KsmPromise p = { 0 };

    g_assert(!promised(&p, 0, 0));
    g_assert(!promised(&p, 0, pays - 1));
    g_assert(promised(&p, 0, pays));
    /* kept, so that the next one is as good */
    g_assert(promised(&p, pays / 4, pays));
    g_assert(!promised(&p, pays / 2, 0));
}

/* Each promise not kept makes the next one count a quarter; time heals. */
static void test_promise_vain(void)
{
    unsigned pays = MS / PAGE_WORTH_NS + 1;
    KsmPromise p = { 0 };

    g_assert(promised(&p, 0, pays));
    g_assert(!promised(&p, pays / 4 - 1, 4 * (pays - 1)));
    g_assert(promised(&p, 0, pays));
    g_assert(promised(&p, 0, 4 * pays));
    g_assert(promised(&p, 0, 16 * pays));
    g_assert(!promised(&p, 0, 16 * pays));
    g_assert(!promised(&p, 0, 15 * pays));
    g_assert(promised(&p, 0, 4 * pays));
    /* one that is kept is believed at once, whatever came before */
    g_assert(promised(&p, pays, pays));
    /* more of them than a number has bits are forgotten after eight passes */
    for (unsigned i = 0; i < 100; i++) {
        g_assert(promised(&p, pays, UINT_MAX));
    }
    for (unsigned i = 0; i < 8; i++) {
        g_assert(!promised(&p, pays, pays));
    }
    g_assert(promised(&p, pays, pays));
}

/* Where others have to answer first there is time for it, once it has asked. */
static void test_promise_later(void)
{
    unsigned pays = MS / PAGE_WORTH_NS + 1;
    KsmPromise p = { 0 };

    g_assert(promised(&p, 0, 4 * pays));
    promise_judge(&p, 0, MS, 5 * S, S);
    promise_judge(&p, 0, MS, 6 * S - 1, S);
    g_assert(p.vain == 0 && p.made == 4 * pays);
    /* what is promised meanwhile takes nothing from that, nor adds to it */
    promise_begin(&p);
    promise_waits(&p, pays);
    g_assert(promise_make(&p, pays - 1));
    g_assert(p.made == 4 * pays && p.began == 5 * S);
    promise_judge(&p, pays - 1, MS, 6 * S, S);
    g_assert(p.vain == 1 && p.made == 0);
    promise_waits(&p, 3 * pays);
    g_assert(promise_make(&p, 10));
    promise_judge(&p, 10 + pays, MS, 7 * S, S);
    g_assert(p.vain == 0 && p.made == 0);
    /* but not for passes without end */
    g_assert(promise_make(&p, 0));
    for (unsigned i = 1; i <= PROMISE_PASSES; i++) {
        promise_judge(&p, 0, MS, 8 * S, S);
        g_assert(p.vain == (i == PROMISE_PASSES));
    }
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    prim.cpu_ns = fake_cpu;
    g_test_add_func("/budget/share", test_share);
    g_test_add_func("/budget/helped", test_helped);
    g_test_add_func("/budget/limit", test_limit);
    g_test_add_func("/budget/spread", test_spread);
    g_test_add_func("/rhythm/check", test_rhythm_check);
    g_test_add_func("/rhythm/pairs", test_rhythm_pairs);
    g_test_add_func("/rhythm/pairs/turns", test_rhythm_pair_turns);
    g_test_add_func("/rhythm/pairs/calm", test_rhythm_calm);
    g_test_add_func("/rhythm/pays", test_rhythm_pays);
    g_test_add_func("/rhythm/rest", test_rhythm_rest);
    g_test_add_func("/promise/pays", test_promise_pays);
    g_test_add_func("/promise/vain", test_promise_vain);
    g_test_add_func("/promise/later", test_promise_later);
    return g_test_run();
}
