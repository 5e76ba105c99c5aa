/*
 * cost: what merging costs here, and what it may cost
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "merge/cost.h"

const KsmCosts costs_guess = {
    .isolate_ns = 30000,
    .move_ns = 100,
    .map_ns = 4000,
    .copy_ns = 1000,
    .back_ns = 15000,
    .restore_ns = 30000,
    .rejoin_ns = 20000,
};

void costs_init(KsmCosts *c)
{
    *c = costs_guess;
}

void cost_average(uint64_t *cost, uint64_t ns)
{
    *cost = (*cost * 7 + MIN(ns, *cost * 3 + 1000)) / 8;
}

/*
 * A page adds CPU time to the stall; preemption does not depend on the number
 * of staged pages.
 */
void costs_span(KsmCosts *c, const KsmSpent *s)
{
    uint64_t moved;

    if (s->move_ns) {
        cost_average(&c->move_ns, s->move_ns / s->n);
    }
    if (s->runs) {
        cost_average(&c->map_ns, s->map_ns / s->runs);
    }
    if (s->copies) {
        cost_average(&c->copy_ns, s->copy_ns / s->copies);
    }
    if (s->backs) {
        moved = s->back_pages * c->move_ns;
        cost_average(&c->back_ns,
                     (s->back_ns - MIN(s->back_ns, moved)) / s->backs);
    }
    moved = s->n * c->move_ns;
    cost_average(&c->isolate_ns, s->isolate_ns - MIN(s->isolate_ns, moved));
    if (s->n >= 2 * SPAN_MIN || s->cpu_ns / s->n < c->page_ns) {
        cost_average(&c->page_ns, s->cpu_ns / s->n);
    }
}

static void towards(uint64_t *cost, uint64_t to)
{
    *cost = (*cost * 15 + to) / 16;
}

void costs_doubt_restore(KsmCosts *c)
{
    towards(&c->restore_ns, costs_guess.restore_ns);
    towards(&c->rejoin_ns, costs_guess.rejoin_ns);
    towards(&c->isolate_ns, costs_guess.isolate_ns);
    towards(&c->map_ns, costs_guess.map_ns);
}

void costs_doubt(KsmCosts *c)
{
    towards(&c->isolate_ns, costs_guess.isolate_ns);
    towards(&c->map_ns, costs_guess.map_ns);
    towards(&c->copy_ns, costs_guess.copy_ns);
    towards(&c->back_ns, costs_guess.back_ns);
}
