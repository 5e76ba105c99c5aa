/*
 * free: memory whose content is no longer needed
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A queue, oldest first, remembers memory to be given back for good later, one
 * entry for each 2 MiB with something free in it: a guest that frees and takes
 * the same memory again and again costs one entry.  Its time is that of the
 * first release; later releases go with it, which costs little: it happens once
 * in the time of decay.
 */
#include "watch/free.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "watch/pressure.h"

/* How often the counters of memory pressure are read, at most. */
#define LOOK_NS (50 * G_GINT64_CONSTANT(1000000))
#define PAGEMAP_BATCH 512
/* pagemap: Documentation/admin-guide/mm/pagemap.rst */
#define PAGEMAP_EXCLUSIVE (1ull << 56)
#define PAGEMAP_SWAPPED (1ull << 62)
#define PAGEMAP_PRESENT (1ull << 63)

/* What was released lazily within one KSM_CHUNK_SIZE. */
typedef struct Range {
    uintptr_t start;
    uintptr_t end;
    int64_t freed_ns;
} Range;

struct KsmFreer {
    pthread_mutex_t lock;       /* ThreadSanitizer knows no GMutex */
    KsmFreePolicy policy;
    KsmPressure *pressure;
    int64_t looked_ns;          /* when pressure was last looked at */
    int64_t pressure_since_ns;  /* when it was first seen */
    int64_t pressure_until_ns;  /* signs of pressure count until then */
    int64_t decay_ns;           /* KSM_FREER_DECAY_NS but in tests */
    bool gives_back;            /* decays: policy auto, no swap */
    bool remembers;             /* ... or the owner wants to know */
    int pagemap;                /* /proc/self/pagemap, or -1 */
    GQueue ranges;              /* of Range, by freed_ns */
    GHashTable *links;          /* the same by number of the chunk */
    KsmFreerStats stats;
};

/* Until the end of the block. */
typedef pthread_mutex_t Held;

static Held *hold(KsmFreer *freer)
{
    pthread_mutex_lock(&freer->lock);
    return &freer->lock;
}

G_DEFINE_AUTOPTR_CLEANUP_FUNC(Held, pthread_mutex_unlock)

/* /proc/swaps has a heading and a line per swap area. */
static bool host_has_swap(void)
{
    g_autofree char *text = prim_read_file("/proc/swaps", NULL);
    const char *end = text ? strchr(text, '\n') : NULL;

    /* unknown: be careful */
    return !text || (end && end[1] != '\0');
}

KsmFreer *freer_new_at(KsmFreePolicy policy, const char *root)
{
    KsmFreer *freer = g_new0(KsmFreer, 1);

    pthread_mutex_init(&freer->lock, NULL);
    g_queue_init(&freer->ranges);
    freer->links = g_hash_table_new(NULL, NULL);
    freer->policy = policy;
    freer->decay_ns = KSM_FREER_DECAY_NS;
    freer->gives_back = policy == KSM_FREE_AUTO && !host_has_swap();
    freer->remembers = freer->gives_back;
    freer->pagemap = prim.open_read("/proc/self/pagemap");
    if (policy == KSM_FREE_AUTO) {
        freer->pressure = ksm_pressure_new_at(root);
        freer->looked_ns = (int64_t)prim.now_ns();
    }
    return freer;
}

KsmFreer *ksm_freer_new(KsmFreePolicy policy)
{
    return freer_new_at(policy, "/");
}

void ksm_freer_free(KsmFreer *freer)
{
    g_queue_clear_full(&freer->ranges, g_free);
    g_hash_table_unref(freer->links);
    if (freer->pressure) {
        ksm_pressure_free(freer->pressure);
    }
    if (freer->pagemap >= 0) {
        prim.close(freer->pagemap);
    }
    pthread_mutex_destroy(&freer->lock);
    g_free(freer);
}

void freer_remember_all(KsmFreer *freer)
{
    freer->remembers = true;
}

void ksm_freer_set_decay(KsmFreer *freer, int64_t decay_ns)
{
    g_autoptr(Held) held = hold(freer);

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
            if (now >= freer->pressure_until_ns) {
                freer->pressure_since_ns = now;
            }
            freer->pressure_until_ns = now + KSM_FREER_PRESSURE_NS;
        }
    }
    return now < freer->pressure_until_ns;
}

static bool is_lazy(KsmFreer *freer, int64_t now)
{
    return freer->policy == KSM_FREE_LAZY ||
           (freer->policy == KSM_FREE_AUTO && !under_pressure(freer, now));
}

bool freer_is_lazy(KsmFreer *freer)
{
    g_autoptr(Held) held = hold(freer);

    return is_lazy(freer, (int64_t)prim.now_ns());
}

static void remember(KsmFreer *freer, uintptr_t start, uintptr_t end,
                     int64_t now)
{
    for (uintptr_t stop; start < end; start = stop) {
        gpointer chunk = (gpointer)(start / KSM_CHUNK_SIZE);
        GList *link = g_hash_table_lookup(freer->links, chunk);
        Range *range;

        stop = MIN(end, (start / KSM_CHUNK_SIZE + 1) * KSM_CHUNK_SIZE);
        if (link) {
            range = link->data;
            range->start = MIN(range->start, start);
            range->end = MAX(range->end, stop);
            continue;
        }
        range = g_new(Range, 1);
        *range = (Range) { start, stop, now };
        g_queue_push_tail(&freer->ranges, range);
        g_hash_table_insert(freer->links, chunk, freer->ranges.tail);
    }
}

static void let_go(KsmFreer *freer, GList *link)
{
    Range *range = link->data;

    g_hash_table_remove(freer->links,
                        (gpointer)(range->start / KSM_CHUNK_SIZE));
    g_queue_delete_link(&freer->ranges, link);
    g_free(range);
}

/*
 * MADV_FREE passes over a page that is shared with a child, or that is being
 * moved, which looks swapped out.  Being lazy gains nothing there, so it is
 * dropped.
 */
static bool gains_nothing(uint64_t entry)
{
    return (entry & PAGEMAP_SWAPPED) ||
           ((entry & PAGEMAP_PRESENT) && !(entry & PAGEMAP_EXCLUSIVE));
}

/* One call per run of the same kind. */
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
            entries[i] = gains_nothing(entries[i]);
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

static int release_lazily(KsmFreer *freer, char *addr, size_t len,
                          int64_t now)
{
    int ret = free_lazily(freer, addr, len);

    if (ret == 0) {
        freer->stats.lazy += len / KSM_PAGE_SIZE;
        if (freer->remembers) {
            remember(freer, (uintptr_t)addr, (uintptr_t)addr + len, now);
        }
    }
    return ret;
}

int freer_release_lazily(KsmFreer *freer, void *addr, size_t len)
{
    g_autoptr(Held) held = hold(freer);

    return release_lazily(freer, addr, len, (int64_t)prim.now_ns());
}

int ksm_freer_release(KsmFreer *freer, void *addr, size_t len)
{
    g_autoptr(Held) held = hold(freer);
    int64_t now = (int64_t)prim.now_ns();
    int ret;

    if (is_lazy(freer, now)) {
        ret = release_lazily(freer, addr, len, now);
    } else {
        ret = prim.advise(addr, len, MADV_DONTNEED);
        freer->stats.eager += ret == 0 ? len / KSM_PAGE_SIZE : 0;
    }
    return ret;
}

void freer_remember(KsmFreer *freer, void *addr, size_t len)
{
    g_autoptr(Held) held = hold(freer);

    remember(freer, (uintptr_t)addr, (uintptr_t)addr + len,
             (int64_t)prim.now_ns());
}

void ksm_freer_forget(KsmFreer *freer, void *addr, size_t len)
{
    g_autoptr(Held) held = hold(freer);
    uintptr_t start = (uintptr_t)addr, end = start + len;
    GList *next;

    for (GList *link = freer->ranges.head; link; link = next) {
        Range *range = link->data;

        next = link->next;
        if (range->start < end && start < range->end) {
            /* what is forgotten is merely left to the kernel's reclaim */
            let_go(freer, link);
        }
    }
}

/* ns until the oldest range is due: 0, it is; -1, there is none. */
static int64_t oldest_wait(KsmFreer *freer)
{
    Range *range = g_queue_peek_head(&freer->ranges);
    int64_t now = (int64_t)prim.now_ns(), wait;

    if (!range) {
        return -1;
    }
    wait = range->freed_ns + freer->decay_ns - now;
    if (wait > 0 && !(under_pressure(freer, now) &&
                      range->freed_ns < freer->pressure_since_ns)) {
        return MIN(wait, KSM_FREER_STEP_NS);
    }
    return 0;
}

int64_t freer_wait(KsmFreer *freer)
{
    g_autoptr(Held) held = hold(freer);

    return oldest_wait(freer);
}

int64_t freer_due(KsmFreer *freer, void **addr, size_t *len)
{
    g_autoptr(Held) held = hold(freer);
    Range *range = g_queue_peek_head(&freer->ranges);
    int64_t wait = oldest_wait(freer);

    if (wait != 0) {
        return wait;
    }
    *addr = (void *)range->start;
    *len = range->end - range->start;
    let_go(freer, freer->ranges.head);
    return 0;
}

void freer_give_back(KsmFreer *freer, void *addr, size_t len)
{
    g_autoptr(Held) held = hold(freer);
    PmRange found[KSM_CHUNK_SIZE / KSM_PAGE_SIZE];
    PmScan scan = {
        .fd = freer->pagemap,
        .start = (uintptr_t)addr,
        .end = (uintptr_t)addr + len,
        .all = PM_PRESENT,
        .tell = PM_HUGE,
        .vec = found,
        .vec_len = G_N_ELEMENTS(found),
    };
    ssize_t n = freer->pagemap < 0 || !freer->gives_back ? 0
              : prim.pagemap(&scan);

    for (ssize_t i = 0; i < n; i++) {
        size_t size = found[i].end - found[i].start;

        if (!(found[i].kinds & PM_HUGE) &&
            prim.advise((void *)(uintptr_t)found[i].start, size,
                        MADV_PAGEOUT) == 0) {
            freer->stats.decayed += size / KSM_PAGE_SIZE;
        }
    }
}

int64_t ksm_freer_step(KsmFreer *freer)
{
    void *addr;
    size_t len;
    int64_t wait = freer_due(freer, &addr, &len);

    if (wait == 0) {
        freer_give_back(freer, addr, len);
    }
    return wait;
}

void ksm_freer_get_stats(KsmFreer *freer, KsmFreerStats *stats)
{
    g_autoptr(Held) held = hold(freer);

    *stats = freer->stats;
    stats->released = stats->lazy + stats->eager;
    stats->pressure = under_pressure(freer, (int64_t)prim.now_ns());
}
