/*
 * cut: which runs get mappings
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "merge/cut.h"

#define LEFT_MIN    64u     /* mappings for what cannot wait: discards */
#define RUN_TAKES   2u      /* mappings, at most */
#define KEPT_SHARE  32u     /* this part of all is kept ... */
#define ROOM_SHARE  8u      /* ... and this, for what guesses are wrong by */
#define KEPT_RUN    16u     /* ... for runs of so many pages and more */

void cut_pass(KsmCut *c)
{
    memset(c->refused, 0, sizeof(c->refused));
    c->refused_pages = 0;
    if (c->seen >= c->pages / 2) {
        c->n = c->pages = 0;
        c->needed /= 2;
        for (unsigned i = 1; i <= CHUNK_PAGES; i++) {
            c->runs[i] -= c->runs[i] / 2;
            c->n += c->runs[i];
            c->pages += (uint64_t)c->runs[i] * i;
        }
    }
    c->seen = 0;
}

void cut_see(KsmCut *c, unsigned pages, unsigned mappings)
{
    c->runs[pages]++;
    c->n++;
    c->pages += pages;
    c->needed += mappings;
    c->seen += pages;
}

void cut_decide(KsmCut *c, size_t left, size_t limit, uint64_t todo)
{
    double per_run, each, wanted = 0;

    c->shortest = CHUNK_PAGES + 1;
    c->part = 1;
    c->too = false;
    c->left = MAX(left - MIN(left, LEFT_MIN), RUN_TAKES);
    if (left < LEFT_MIN || !c->n) {
        return;
    }
    per_run = (double)MAX(c->needed, c->n) / c->n;
    /* what is to come has the lengths of what was seen */
    each = (double)(todo - MIN(todo, c->refused_pages)) / c->pages;
    for (unsigned i = CHUNK_PAGES; i > 0; i--) {
        double kept = i < KEPT_RUN ? limit / KEPT_SHARE : 0;
        double coming = c->runs[i] * each * per_run;
        double refused = c->refused[i] * per_run;

        if (wanted + coming + refused + kept > left) {
            c->shortest = i;
            c->part = MAX(left - wanted - kept, 0) / MAX(coming, 1);
            c->turn += MIN(c->part, 1);
            c->too = c->turn >= 1;
            c->turn -= c->too;
            return;
        }
        wanted += coming + refused;
    }
    c->shortest = 0;
}

size_t cut_room(size_t left, size_t limit)
{
    size_t kept = LEFT_MIN + limit / KEPT_SHARE + limit / ROOM_SHARE;

    return left - MIN(left, kept);
}

bool cut_takes(KsmCut *c, unsigned pages)
{
    bool takes = c->left >= RUN_TAKES &&
                 (pages > c->shortest || (pages == c->shortest && c->too));

    c->left -= takes ? RUN_TAKES : 0;
    if (!takes) {
        c->refused[pages]++;
        c->refused_pages += pages;
    }
    return takes;
}
