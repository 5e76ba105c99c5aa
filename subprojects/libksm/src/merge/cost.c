/*
 * cost: what merging costs here, and what it may cost
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "merge/cost.h"

static const KsmCosts guess = {
    .isolate_ns = 30000,
    .move_ns = 100,
    .map_ns = 4000,
    .copy_ns = 1000,
    .back_ns = 15000,
    .restore_ns = 30000,
};

void costs_init(KsmCosts *c)
{
    *c = guess;
}

void cost_average(uint64_t *cost, uint64_t ns)
{
    *cost = (*cost * 7 + MIN(ns, *cost * 3 + 1000)) / 8;
}

static void towards(uint64_t *cost, uint64_t to)
{
    *cost = (*cost * 15 + to) / 16;
}

void costs_doubt(KsmCosts *c)
{
    towards(&c->isolate_ns, guess.isolate_ns);
    towards(&c->map_ns, guess.map_ns);
    towards(&c->copy_ns, guess.copy_ns);
    towards(&c->back_ns, guess.back_ns);
}
