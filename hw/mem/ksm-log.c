/*
 * QEMU's dirty log as a source of written pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Beside migration, dirty rate and dirty limit, merging is a user of the log
 * (GLOBAL_DIRTY_KSM) with its own bitmap (DIRTY_MEMORY_KSM): a write sets a bit
 * for each user, and each clears its own.  All share one step: the accelerator
 * has to notice the next write to the page again.  Asking for that too soon
 * would spoil the others' figures: while they use the log we only take the bits
 * that they have asked for.
 *
 * The log, a hint, sees writes of vCPUs, QEMU's devices and vhost, but not
 * those through a pointer (loadvm, an incoming migration).
 *
 * Asking needs the BQL, for which the merging thread must not wait: the bits
 * pass through a bitmap.  Parts of it without a bit are passed over when they
 * are taken, and a part has no memory while all of its bits are set, or none
 * ever was: of a terabyte that is mostly so.
 */

#include "qemu/osdep.h"
#include "hw/mem/ksm-compat.h"
#include "exec/ramlist.h"
#include "exec/target_page.h"
#include "ksm-log.h"
#include "libksm.h"
#include "qapi/error.h"
#include "qemu/atomic.h"
#include "qemu/bitmap.h"
#include "qemu/error-report.h"
#include "qemu/queue.h"
#include "qemu/timer.h"
#include "system/tcg.h"
#include "trace.h"

#if __has_include("system/physmem.h")
#include "system/physmem.h"
#else
/* before QEMU 10.2 */
#include "exec/cputlb.h"

static void physical_memory_dirty_bits_cleared(ram_addr_t start,
                                               ram_addr_t length)
{
    if (tcg_enabled()) {
        tlb_reset_dirty_range_all(start, length);
    }
}
#endif

/* A sync takes at most this much RAM with written pages. */
#define PIECE_WORDS (256 * 1024 * 1024ul / KSM_PAGE_SIZE / BITS_PER_LONG)
#define BLOCK_WORDS (DIRTY_MEMORY_BLOCK_SIZE / BITS_PER_LONG)
/* What the engine asks about at once: 128 MiB. */
#define PART_PAGES (128 * 1024 * 1024ul / KSM_PAGE_SIZE)
#define PART_WORDS (PART_PAGES / BITS_PER_LONG)

/* After a device has refused. */
#define AGAIN_MS 60000

typedef enum LogPart {
    PART_NONE,              /* no bit is set ... */
    PART_SOME,
    PART_ALL,               /* all count as set, though none of them is */
} LogPart;

struct KsmLog {
    RAMBlock *block;
    size_t words;           /* of its bitmap */
    size_t synced;          /* words that this sync is done with */
    bool unknown;           /* all count as written before this sync */
    unsigned long *written;
    uint8_t *part;          /* LogPart of each PART_WORDS of that */
    QLIST_ENTRY(KsmLog) next;
};

static QLIST_HEAD(, KsmLog) logs = QLIST_HEAD_INITIALIZER(logs);
static bool log_on;
static bool in_sync;
static uint64_t cpu_ns;     /* of the thread that syncs */

/*
 * A bit of QEMU's bitmap is a page of the target.  Those of arm64 are of 4096
 * bytes on machines for virtual guests, and of 1024 on others, where nobody
 * merges; the guest's own pages are not what counts.
 */
bool ksm_log_check(Error **errp)
{
    if (qemu_target_page_size() != KSM_PAGE_SIZE) {
        error_setg(errp, "dirty-tracking=log needs a machine whose target has "
                   "pages of %u bytes, not of %zu; use dirty-tracking=auto",
                   KSM_PAGE_SIZE, qemu_target_page_size());
        return false;
    }
    return true;
}

KsmLog *ksm_log_new(RAMBlock *block)
{
    KsmLog *log = g_new0(KsmLog, 1);
    size_t pages = block->used_length / KSM_PAGE_SIZE;

    log->block = block;
    log->words = BITS_TO_LONGS(pages);
    log->written = bitmap_new(pages);
    log->part = g_new0(uint8_t, DIV_ROUND_UP(log->words, PART_WORDS));
    log->unknown = true;
    QLIST_INSERT_HEAD(&logs, log, next);
    return log;
}

void ksm_log_free(KsmLog *log)
{
    QLIST_REMOVE(log, next);
    g_free(log->written);
    g_free(log->part);
    g_free(log);
}

void ksm_log_forget(void)
{
    KsmLog *log;

    QLIST_FOREACH(log, &logs, next) {
        log->unknown = true;
    }
}

void ksm_log_switch(bool on)
{
    static int64_t again_ms;
    int64_t now = qemu_clock_get_ms(QEMU_CLOCK_REALTIME);
    Error *err = NULL;

    if (on == log_on || (on && now < again_ms)) {
        return;
    }
    if (!on) {
        memory_global_dirty_log_stop(GLOBAL_DIRTY_KSM);
    } else if (!memory_global_dirty_log_start(GLOBAL_DIRTY_KSM, &err)) {
        /* a device refuses; others have begun, and ended again */
        again_ms = now + AGAIN_MS;
        warn_report_once("memory is not merged: %s", error_get_pretty(err));
        error_free(err);
        return;
    }
    ksm_log_forget();
    qatomic_set(&log_on, on);
    trace_ksm_log_switch(on, global_dirty_tracking);
}

static void words_take(KsmLog *log, size_t word, unsigned long bits)
{
    uint8_t *part = &log->part[word / PART_WORDS];

    if (*part != PART_ALL) {
        *part = PART_SOME;
        log->written[word] |= bits;
    }
}

/* All pages count as written. */
static void log_fill(KsmLog *log)
{
    for (size_t from = 0; from < log->words; from += PART_WORDS) {
        size_t n = MIN(PART_WORDS, log->words - from);

        if (log->part[from / PART_WORDS] == PART_SOME) {
            bitmap_fill(log->written + from, n * BITS_PER_LONG);
        } else {
            log->part[from / PART_WORDS] = PART_ALL;
        }
    }
}

/* Words of the block's bitmap; true if any bit was set. */
static bool log_take_words(KsmLog *log, size_t from, size_t to)
{
    /* RAM blocks begin at a word of the bitmap */
    size_t at = log->block->offset / KSM_PAGE_SIZE / BITS_PER_LONG + from;
    DirtyMemoryBlocks *all;
    bool any = false;

    RCU_READ_LOCK_GUARD();
    all = qatomic_rcu_read(&ram_list.dirty_memory[DIRTY_MEMORY_KSM]);
    for (; from < to; from++, at++) {
        unsigned long *word = &all->blocks[at / BLOCK_WORDS][at % BLOCK_WORDS];

        if (qatomic_read(word)) {
            words_take(log, from, qatomic_xchg(word, 0));
            any = true;
        }
    }
    return any;
}

static bool others_use_log(void)
{
    return global_dirty_tracking & ~GLOBAL_DIRTY_KSM;
}

/* From now on writes to a range that was taken are noticed again. */
static void log_arm(KsmLog *log, size_t from, size_t to)
{
    uint64_t start = (uint64_t)from * BITS_PER_LONG * KSM_PAGE_SIZE;
    uint64_t end = (uint64_t)to * BITS_PER_LONG * KSM_PAGE_SIZE;
    uint64_t length = MIN(end, log->block->used_length) - start;

    physical_memory_dirty_bits_cleared(log->block->offset + start, length);
    if (!others_use_log()) {
        memory_region_clear_dirty_bitmap(log->block->mr, start, length);
    }
    trace_ksm_log_sync(log->block->idstr, start, length);
}

static bool log_sync(void)
{
    KsmLog *log;

    if (!in_sync) {
        QLIST_FOREACH(log, &logs, next) {
            log->synced = 0;
        }
        if (log_on && !others_use_log()) {
            memory_global_dirty_log_sync(false);
        }
        in_sync = true;
    }
    QLIST_FOREACH(log, &logs, next) {
        while (log->synced < log->words) {
            size_t from = log->synced;

            log->synced = MIN(from + PIECE_WORDS, log->words);
            if (log_take_words(log, from, log->synced)) {
                log_arm(log, from, log->synced);
                return false;
            }
        }
        if (log->unknown) {
            log->unknown = false;
            log_fill(log);
        }
    }
    in_sync = false;
    return true;
}

static uint64_t thread_cpu_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return ts.tv_sec * NANOSECONDS_PER_SECOND + ts.tv_nsec;
}

bool ksm_log_sync(void)
{
    uint64_t start = thread_cpu_ns();
    bool done = log_sync();

    cpu_ns += thread_cpu_ns() - start;
    return done;
}

uint64_t ksm_log_time(void)
{
    return cpu_ns;
}

/* The pages from @page on, up to @end, from bit @i of @bitmap on. */
static void bits_take(KsmLog *log, size_t page, size_t end,
                      unsigned long *bitmap, size_t i)
{
    while (page < end) {
        size_t n = 1;

        if (!log->written[BIT_WORD(page)]) {
            n = BITS_PER_LONG - page % BITS_PER_LONG;
        } else if (test_and_clear_bit(page, log->written)) {
            set_bit(i, bitmap);
        }
        page += n;
        i += n;
    }
}

/* The same, of one part. */
static void part_take(KsmLog *log, size_t page, size_t end,
                      unsigned long *bitmap, size_t i)
{
    uint8_t *part = &log->part[page / PART_PAGES];
    size_t from = page / PART_PAGES * PART_WORDS;
    size_t n = MIN(PART_WORDS, log->words - from);
    bool whole = page % PART_PAGES == 0 &&
                 DIV_ROUND_UP(end, BITS_PER_LONG) == from + n;

    if (*part == PART_ALL && whole) {
        bitmap_set(bitmap, i, end - page);
    } else if (*part == PART_ALL) {
        bitmap_fill(log->written + from, n * BITS_PER_LONG);
        *part = PART_SOME;
    }
    if (*part == PART_SOME) {
        bits_take(log, page, end, bitmap, i);
    }
    if (whole) {
        *part = PART_NONE;
    }
}

bool ksm_log_take(KsmLog *log, size_t first_page, size_t n_pages,
                  unsigned long *bitmap)
{
    size_t end = first_page + n_pages, next;

    if (!qatomic_read(&log_on)) {
        return false;
    }
    for (size_t page = first_page; page < end; page = next) {
        next = MIN(ROUND_UP(page + 1, PART_PAGES), end);
        if (log->part[page / PART_PAGES] != PART_NONE) {
            part_take(log, page, next, bitmap, page - first_page);
        }
    }
    return true;
}
