/*
 * free: memory whose content is no longer needed
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What is released lazily is remembered in a queue, oldest first, bounded:
 * when it is full the oldest is forgotten, that is, left to the kernel's
 * reclaim.  A remembered range may have been written again in the meantime,
 * so giving it back for good must leave such pages alone: MADV_PAGEOUT does,
 * it drops lazily freed pages that are still clean and would swap out the
 * others.  Hence it is used only where there is no swap, and not on huge
 * pages, which it would split if they are in use again.
 */
#include "libksm-free.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "prim.h"
#include "pressure.h"

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21     /* Linux 5.4 */
#endif

/* How often the counters of memory pressure are read, at most. */
#define LOOK_NS (50 * G_GINT64_CONSTANT(1000000))
#define MAX_RANGES 4096
/* How much is given back in one step: the lock is held meanwhile. */
#define GIVE_BACK ((size_t)16 << 20)
#define PAGEMAP_BATCH 512
/* pagemap: Documentation/admin-guide/mm/pagemap.rst */
#define PAGEMAP_EXCLUSIVE (1ull << 56)
#define PAGEMAP_PRESENT (1ull << 63)

typedef struct Range {
    char *addr;
    size_t len;
    int64_t freed_ns;
} Range;

struct KsmFreer {
    GMutex lock;
    KsmFreePolicy policy;
    KsmPressure *pressure;
    int64_t looked_ns;          /* when pressure was last looked at */
    int64_t pressure_until_ns;  /* signs of pressure count until then */
    int64_t decay_ns;           /* KSM_FREER_DECAY_NS but in tests */
    bool has_swap;
    int pagemap;                /* /proc/self/pagemap, or -1 */
    GQueue ranges;              /* of Range, by freed_ns */
    KsmFreerStats stats;
};

/* /proc/swaps has a heading and a line per swap area. */
static bool host_has_swap(void)
{
    g_autofree char *text = prim_read_file("/proc/swaps", NULL);
    const char *end = text ? strchr(text, '\n') : NULL;

    /* unknown: be careful */
    return !text || (end && end[1] != '\0');
}

KsmFreer *ksm_freer_new(KsmFreePolicy policy)
{
    KsmFreer *freer = g_new0(KsmFreer, 1);

    g_mutex_init(&freer->lock);
    g_queue_init(&freer->ranges);
    freer->policy = policy;
    freer->decay_ns = KSM_FREER_DECAY_NS;
    freer->has_swap = host_has_swap();
    freer->pagemap = prim.open_read("/proc/self/pagemap");
    if (policy == KSM_FREE_AUTO) {
        freer->pressure = ksm_pressure_new();
        freer->looked_ns = (int64_t)prim.now_ns();
    }
    return freer;
}

void ksm_freer_free(KsmFreer *freer)
{
    g_queue_clear_full(&freer->ranges, g_free);
    if (freer->pressure) {
        ksm_pressure_free(freer->pressure);
    }
    if (freer->pagemap >= 0) {
        prim.close(freer->pagemap);
    }
    g_mutex_clear(&freer->lock);
    g_free(freer);
}

void ksm_freer_set_decay(KsmFreer *freer, int64_t decay_ns)
{
    g_autoptr(GMutexLocker) locker = g_mutex_locker_new(&freer->lock);

    freer->decay_ns = decay_ns;
}

static bool under_pressure(KsmFreer *freer, int64_t now)
{
    int64_t elapsed = now - freer->looked_ns;

    if (!freer->pressure) {
        return false;
    }
    if (elapsed >= LOOK_NS) {
        freer->looked_ns = now;
        if (ksm_pressure_sign(freer->pressure, elapsed)) {
            freer->pressure_until_ns = now + KSM_FREER_PRESSURE_NS;
        }
    }
    return now < freer->pressure_until_ns;
}

static void remember(KsmFreer *freer, char *addr, size_t len, int64_t now)
{
    Range *last = g_queue_peek_tail(&freer->ranges);

    /* the balloon gives page after page, upwards or downwards */
    if (last && now - last->freed_ns < G_GINT64_CONSTANT(1000000000)) {
        if (addr == last->addr + last->len) {
            last->len += len;
            return;
        }
        if (addr + len == last->addr) {
            last->addr = addr;
            last->len += len;
            return;
        }
    }
    if (freer->ranges.length == MAX_RANGES) {
        g_free(g_queue_pop_head(&freer->ranges));
    }
    last = g_new(Range, 1);
    *last = (Range) { addr, len, now };
    g_queue_push_tail(&freer->ranges, last);
}

/*
 * The kernel passes over a page that others map too (merged by KSM, shared
 * with a child): MADV_FREE leaves it merged.  Such a page gains nothing from
 * being lazy, so it is dropped.  One call per run of the same kind.
 */
static int free_lazily(KsmFreer *freer, char *addr, size_t len)
{
    uint64_t entries[PAGEMAP_BATCH];
    int ret = 0;

    if (freer->pagemap < 0) {
        return prim.advise(addr, len, MADV_FREE);
    }
    while (len && ret == 0) {
        size_t n = MIN(len / KSM_PAGE_SIZE, PAGEMAP_BATCH);
        ssize_t got = prim.read_at(freer->pagemap, entries, n * 8,
                                 (uintptr_t)addr / KSM_PAGE_SIZE * 8);
        size_t start = 0;

        if (got != (ssize_t)(n * 8)) {
            return prim.advise(addr, len, MADV_FREE);
        }
        for (size_t i = 0; i < n; i++) {
            entries[i] = (entries[i] & PAGEMAP_PRESENT) &&
                         !(entries[i] & PAGEMAP_EXCLUSIVE);
        }
        for (size_t i = 1; i <= n && ret == 0; i++) {
            if (i == n || entries[i] != entries[start]) {
                ret = prim.advise(addr + start * KSM_PAGE_SIZE,
                                   (i - start) * KSM_PAGE_SIZE,
                                   entries[start] ? MADV_DONTNEED : MADV_FREE);
                start = i;
            }
        }
        addr += n * KSM_PAGE_SIZE;
        len -= n * KSM_PAGE_SIZE;
    }
    return ret;
}

int ksm_freer_release(KsmFreer *freer, void *addr, size_t len)
{
    g_autoptr(GMutexLocker) locker = g_mutex_locker_new(&freer->lock);
    int64_t now = (int64_t)prim.now_ns();
    bool lazy = freer->policy == KSM_FREE_LAZY ||
                (freer->policy == KSM_FREE_AUTO && !under_pressure(freer, now));
    int ret = lazy ? free_lazily(freer, addr, len)
                   : prim.advise(addr, len, MADV_DONTNEED);

    if (ret < 0) {
        return ret;
    }
    freer->stats.released += len / KSM_PAGE_SIZE;
    if (lazy) {
        freer->stats.lazy += len / KSM_PAGE_SIZE;
        if (freer->policy == KSM_FREE_AUTO && !freer->has_swap) {
            remember(freer, addr, len, now);
        }
    } else {
        freer->stats.eager += len / KSM_PAGE_SIZE;
    }
    return 0;
}

void ksm_freer_forget(KsmFreer *freer, void *addr, size_t len)
{
    g_autoptr(GMutexLocker) locker = g_mutex_locker_new(&freer->lock);
    char *start = addr, *end = start + len;
    GList *next;

    for (GList *link = freer->ranges.head; link; link = next) {
        Range *range = link->data;

        next = link->next;
        if (range->addr < end && start < range->addr + range->len) {
            /* what is forgotten is merely left to the kernel's reclaim */
            g_queue_delete_link(&freer->ranges, link);
            g_free(range);
        }
    }
}

/*
 * Gives the small pages of the beginning of a range back, at most GIVE_BACK
 * bytes of it, and tells how many pages those were.
 */
static size_t give_back(KsmFreer *freer, Range *range)
{
    PmRange found[64];
    PmScan scan = {
        .fd = freer->pagemap,
        .start = (uintptr_t)range->addr,
        .end = (uintptr_t)range->addr + MIN(range->len, GIVE_BACK),
        .all = PM_PRESENT,
        .tell = PM_HUGE,
        .vec = found,
        .vec_len = G_N_ELEMENTS(found),
    };
    ssize_t n = freer->pagemap < 0 ? -EBADF : prim.pagemap(&scan);
    size_t pages = 0;

    for (ssize_t i = 0; i < n; i++) {
        size_t len = found[i].end - found[i].start;

        if (!(found[i].kinds & PM_HUGE) &&
            prim.advise((void *)(uintptr_t)found[i].start, len,
                        MADV_PAGEOUT) == 0) {
            pages += len / KSM_PAGE_SIZE;
        }
    }
    if (n < 0 || scan.walk_end <= scan.start) {
        scan.walk_end = (uintptr_t)range->addr + range->len;
    }
    range->len -= scan.walk_end - (uintptr_t)range->addr;
    range->addr = (char *)scan.walk_end;
    return pages;
}

int64_t ksm_freer_step(KsmFreer *freer)
{
    g_autoptr(GMutexLocker) locker = g_mutex_locker_new(&freer->lock);
    Range *range = g_queue_peek_head(&freer->ranges);
    int64_t due;

    if (!range) {
        return -1;
    }
    due = range->freed_ns + freer->decay_ns - (int64_t)prim.now_ns();
    if (due > 0) {
        return due;
    }
    freer->stats.decayed += give_back(freer, range);
    if (range->len == 0) {
        g_free(g_queue_pop_head(&freer->ranges));
    }
    return 0;
}

void ksm_freer_get_stats(KsmFreer *freer, KsmFreerStats *stats)
{
    g_autoptr(GMutexLocker) locker = g_mutex_locker_new(&freer->lock);

    *stats = freer->stats;
    stats->pressure = under_pressure(freer, (int64_t)prim.now_ns());
}
