/*
 * cost: what merging costs here, and what it may cost
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Moving averages of CPU time, measured as the calls are made: with a second
 * busy thread each call waits for a TLB shootdown.  Refused plans are not
 * measured: they let the numbers decay towards the first guesses (costs_doubt),
 * so that no estimate made on a busy host lasts.
 */
#ifndef KSM_COST_H
#define KSM_COST_H

#include <stdint.h>

#define PAGE_WORTH_NS   UINT64_C(12000)     /* of CPU for a page; cold: more */
#define MAPPING_WORTH_NS UINT64_C(200000)   /* ... a mapping less; or quiet.h */
#define DROP_NS         UINT64_C(7500)      /* dropping a staged span */
#define BREAK_NS        UINT64_C(200000)    /* breaking a huge page */
#define PAGE_DONE_NS    UINT64_C(900)       /* comparing or copying a page */

/*
 * Pages: no span is cut shorter.  Fixed overhead inflates the cost per page of
 * spans shorter than two of these: they count if it is less than was thought.
 */
#define SPAN_MIN        32u

typedef struct KsmCosts {
    uint64_t isolate_ns;    /* a span; but for its pages, as back_ns */
    uint64_t move_ns;       /* a page moved out or back */
    uint64_t map_ns;        /* a run */
    uint64_t copy_ns;       /* a page put back by copying */
    uint64_t back_ns;       /* a stretch of pages moved back */
    uint64_t page_ns;       /* CPU per page while it is staged; 0: unknown */
    uint64_t restore_ns;    /* restoring a run, but for its pages */
    uint64_t rejoin_ns;     /* rejoining one, but for pages and mappings */
} KsmCosts;

/* CPU time that one span took. */
typedef struct KsmSpent {
    unsigned n;             /* pages */
    uint64_t stall_ns;      /* from registering to the wake, by the clock */
    uint64_t cpu_ns;        /* ... by CPU */
    uint64_t isolate_ns;    /* to register, move out and wake */
    uint64_t move_ns;       /* to move out; 0: not measured */
    uint64_t map_ns, copy_ns, back_ns;
    unsigned runs, copies;          /* copies: pages */
    unsigned backs, back_pages;     /* stretches moved back */
} KsmSpent;

/* Before anything was measured. */
extern const KsmCosts costs_guess;

void costs_init(KsmCosts *c);

/* A sample; one that was interrupted counts little. */
void cost_average(uint64_t *cost, uint64_t ns);

void costs_span(KsmCosts *c, const KsmSpent *s);

void costs_doubt(KsmCosts *c);
/* ... for what restoring or rejoining a run costs. */
void costs_doubt_restore(KsmCosts *c);

#endif
