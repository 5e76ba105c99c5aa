/*
 * drive: when ksmd is to run, and how fast
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <glib.h>

#include "base/page.h"
#include "drive.h"

#define SLEEP_MS    UINT64_C(20)    /* between batches: the kernel's default */
#define PAGES_MIN   UINT64_C(64)
#define PAGES_MAX   (UINT64_C(1) << 16)     /* in one such time */
/*
 * Whoever stops ksmd waits for the end of a batch: a tenth of a second for pages
 * that cost most, 186 MB/s (docs/devel/ksm-bench.rst).
 */
#define BATCH_MAX   UINT64_C(4096)
#define PAGES_FIRST UINT64_C(500)   /* some ms of CPU, with cold caches */
#define SPEED_NS    UINT64_C(1000000000)    /* it is looked at so often */
/*
 * Scans that are begun before it is vain: the one under way when something
 * came does not count; of what is new, the first one only takes checksums.
 */
#define VAIN_SCANS  3u
#define NEW_SCANS   4u
#define RETRY_MIN_NS    UINT64_C(120000000000)
#define RETRY_MAX_NS    UINT64_C(3600000000000)
#define NEW_SOONER  30u     /* ... something new is tried: 4 s to 2 min */
/*
 * ... when nothing has come for at most so long, or something has for twice that:
 * members pass each half a minute at least, and keep what they gave given for as
 * long (HELD_TICKS of engine/tail.c).
 */
#define STILL_MAX_NS    UINT64_C(30000000000)

void drive_init(Drive *d, unsigned share)
{
    *d = (Drive) { .share = share, .pages = PAGES_FIRST };
}

static void begin(Drive *d, const DriveSeen *seen)
{
    d->runs = true;
    d->given = seen->given;
    d->first_ns = 0;
    d->until = seen->scans + NEW_SCANS;
    d->saved = seen->saved;
    d->cpu_ns = seen->cpu_ns;
    d->at_ns = seen->now_ns;
}

static void stop(Drive *d, const DriveSeen *seen)
{
    d->runs = false;
    d->wait_ns = CLAMP(2 * d->wait_ns, RETRY_MIN_NS, RETRY_MAX_NS);
    d->retry_ns = seen->now_ns + d->wait_ns;
    d->new_ns = seen->now_ns + d->wait_ns / NEW_SOONER;
}

/*
 * Something was gained: it goes on.  Not what was lost and is merged again: that
 * is written all the time.  Nor for what came meanwhile, unless that is a gain:
 * it gets a run of its own, and who gives and takes for ever none without end.
 */
static void look(Drive *d, const DriveSeen *seen)
{
    if (seen->saved > d->saved) {
        d->saved = seen->saved;
        d->until = MAX(d->until, seen->scans + VAIN_SCANS);
        d->wait_ns = 0;
    }
}

/*
 * Pages of a batch by what the last ones cost.  No more than a whole scan in a
 * batch: ksmd would go round and round, without a rest.
 */
static void set_speed(Drive *d, const DriveSeen *seen)
{
    uint64_t ns = seen->now_ns - d->at_ns, cpu = seen->cpu_ns - d->cpu_ns;
    unsigned share = seen->pressed ? 100 : d->share;
    uint64_t most = CLAMP(seen->left / PAGE_BYTES, PAGES_MIN, PAGES_MAX);

    if (ns >= SPEED_NS && seen->cpu_ns) {
        double much = cpu ? (double)ns * share / 100 / cpu : 2;

        /* step by step: a page costs what is in it */
        d->pages *= CLAMP(much, 0.5, 2);
        d->cpu_ns = seen->cpu_ns;
        d->at_ns = seen->now_ns;
    }
    d->pages = CLAMP(d->pages, PAGES_MIN, most);
}

/* Is there something new, and all of it? */
static bool is_new(Drive *d, const DriveSeen *seen)
{
    uint64_t now = seen->now_ns, still;

    if (seen->given != d->told) {
        d->told = seen->given;
        d->told_ns = now;
        d->first_ns = d->first_ns ? d->first_ns : now;
    }
    /* none after what was not vain, nor after the first time */
    still = d->wait_ns - MIN(d->wait_ns, RETRY_MIN_NS);
    still = MIN(still / NEW_SOONER, STILL_MAX_NS);
    return seen->given != d->given && now >= d->new_ns &&
           (now - d->told_ns >= still || now - d->first_ns >= 2 * still);
}

Want drive_next(Drive *d, const DriveSeen *seen)
{
    bool again = d->retry_ns && seen->now_ns >= d->retry_ns;
    bool new = is_new(d, seen);
    uint64_t batches;

    if (!d->runs && seen->left && (new || again)) {
        begin(d, seen);
    }
    if (!d->runs) {
        return (Want) { .run = false };
    }
    look(d, seen);
    if (!seen->left || seen->scans >= d->until) {
        stop(d, seen);
        return (Want) { .run = false };
    }
    set_speed(d, seen);
    batches = (d->pages + BATCH_MAX - 1) / BATCH_MAX;
    return (Want) { .run = true, .sleep_ms = SLEEP_MS / batches,
                    .pages = d->pages / batches };
}
