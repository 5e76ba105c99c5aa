/*
 * libksm tests: memory with a shadow copy
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <fcntl.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "still.h"
#include "util.h"

Mem *mem_new(size_t pages, size_t skip, MemPages kind)
{
    Mem *m = g_new0(Mem, 1);
    uintptr_t at;

    m->pages = pages;
    m->kind = kind;
    m->map_len = (pages + skip) * PAGE + 2 * CHUNK;
    m->map = mmap(NULL, m->map_len, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    g_assert(m->map != MAP_FAILED);
    at = ((uintptr_t)m->map + CHUNK - 1) / CHUNK * CHUNK;
    m->addr = (char *)at + skip * PAGE;
    madvise(m->map, m->map_len,
            kind == MEM_HUGE ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    /* shared: never taken for memory to merge */
    m->shadow = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    g_assert(m->shadow != MAP_FAILED);
    m->log = g_new0(unsigned long, pages / 64 + 1);
    if (prim.pagemap == prim_real.pagemap) {
        prim.pagemap = still_pagemap;
    }
    return m;
}

void mem_free(Mem *m)
{
    munmap(m->map, m->map_len);
    munmap(m->shadow, m->pages * PAGE);
    g_free(m->log);
    g_free(m);
}

void mem_reset(Mem *m)
{
    size_t len = m->pages * PAGE;

    /* not MADV_DONTNEED: page tables must be new, too */
    g_assert(mmap(m->addr, len, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
                  -1, 0) == m->addr);
    madvise(m->addr, len, m->kind == MEM_HUGE ? MADV_HUGEPAGE
                                              : MADV_NOHUGEPAGE);
    memset(m->shadow, 0, len);
    memset(m->log, 0xff, (m->pages / 64 + 1) * sizeof(*m->log));
    m->busy = false;
    m->inhibited = NULL;
}

static void log_page(Mem *m, size_t page)
{
    m->log[page / 64] |= 1ul << (page % 64);
}

void mem_fill(Mem *m, size_t page, uint64_t content)
{
    char *to = m->shadow + page * PAGE;

    memset(to, 0, PAGE);
    memcpy(to + PAGE - sizeof(content), &content, sizeof(content));
    memcpy(m->addr + page * PAGE, to, PAGE);
    log_page(m, page);
}

void mem_fill_run(Mem *m, size_t page, size_t n, uint64_t first,
                  uint64_t step)
{
    for (size_t i = 0; i < n; i++) {
        mem_fill(m, page + i, first + i * step);
    }
}

void mem_write(Mem *m, size_t page, size_t offset, uint8_t byte)
{
    m->shadow[page * PAGE + offset] = byte;
    m->addr[page * PAGE + offset] = byte;
    log_page(m, page);
}

void mem_gone(Mem *m, size_t page, size_t n)
{
    memset(m->shadow + page * PAGE, 0, n * PAGE);
    for (size_t i = page; i < page + n; i++) {
        log_page(m, i);
    }
}

size_t mem_differs(const Mem *m)
{
    size_t bad = 0;

    for (size_t i = 0; i < m->pages; i++) {
        bad += memcmp(m->addr + i * PAGE, m->shadow + i * PAGE, PAGE) != 0;
    }
    return bad;
}

#define PM_ENTRY_PRESENT    (1ull << 63)
#define PM_ENTRY_FILE       (1ull << 61)
#define MIGRATION_TRIES     1000u

static size_t pagemap_count(const Mem *m, size_t page, size_t n,
                            uint64_t mask, uint64_t want)
{
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    size_t count = 0;

    g_assert(fd >= 0);
    for (size_t i = page; i < page + n; i++) {
        uint64_t entry;
        off_t at = (uintptr_t)(m->addr + i * PAGE) / PAGE * sizeof(entry);

        for (unsigned tries = 0; tries < MIGRATION_TRIES; tries++) {
            g_assert(pread(fd, &entry, sizeof(entry), at) == sizeof(entry));
            if (!still_not(entry)) {
                break;
            }
            g_usleep(1000);
        }
        count += (entry & mask) == want;
    }
    close(fd);
    return count;
}

size_t mem_present(const Mem *m, size_t page, size_t n)
{
    return pagemap_count(m, page, n, PM_ENTRY_PRESENT, PM_ENTRY_PRESENT);
}

size_t mem_anonymous(const Mem *m, size_t page, size_t n)
{
    return pagemap_count(m, page, n, PM_ENTRY_PRESENT | PM_ENTRY_FILE,
                         PM_ENTRY_PRESENT);
}

size_t mem_mappings(const Mem *m)
{
    g_autofree char *text = NULL;
    uintptr_t from = (uintptr_t)m->addr, to = from + m->pages * PAGE;
    size_t count = 0;

    g_assert(g_file_get_contents("/proc/self/maps", &text, NULL, NULL));
    for (char *line = text; line && *line; ) {
        unsigned long start, end;

        if (sscanf(line, "%lx-%lx", &start, &end) == 2) {
            count += start < to && end > from;
        }
        line = strchr(line, '\n');
        line = line ? line + 1 : NULL;
    }
    return count;
}

static bool op_dirty_sync(void *opaque, size_t first, size_t n,
                          unsigned long *bitmap)
{
    Mem *m = opaque;

    for (size_t i = 0; i < n; i++) {
        size_t page = first + i;
        unsigned long bit = 1ul << (page % 64);

        if (m->log[page / 64] & bit) {
            m->log[page / 64] &= ~bit;
            bitmap[i / 64] |= 1ul << (i % 64);
        }
    }
    return true;
}

static bool op_busy(void *opaque, void *addr, size_t len)
{
    Mem *m = opaque;

    g_assert((char *)addr >= m->addr);
    g_assert((char *)addr + len <= m->addr + m->pages * PAGE);
    return m->busy;
}

static const char *op_inhibited(void *opaque)
{
    return ((Mem *)opaque)->inhibited;
}

const KsmRegionOps mem_ops = {
    .busy = op_busy,
    .inhibited = op_inhibited,
};

const KsmRegionOps mem_ops_log = {
    .dirty_sync = op_dirty_sync,
    .busy = op_busy,
    .inhibited = op_inhibited,
};

uint64_t util_cpu_by_call(void)
{
    static uint64_t ns;     /* helpers ask, too */

    return __atomic_add_fetch(&ns, 10000, __ATOMIC_RELAXED);
}

size_t util_mappings_allowed(void)
{
    g_autofree char *text = NULL;

    g_assert(g_file_get_contents("/proc/sys/vm/max_map_count", &text, NULL,
                                 NULL));
    return g_ascii_strtoull(text, NULL, 10);
}

size_t util_mappings(void)
{
    g_autofree char *text = NULL;
    size_t lines = 0;

    g_assert(g_file_get_contents("/proc/self/maps", &text, NULL, NULL));
    for (const char *c = text; *c; c++) {
        lines += *c == '\n';
    }
    return lines;
}

static size_t heap_used(void)
{
#ifdef M_PERTURB       /* glibc */
    return mallinfo2().uordblks;
#else
    return 0;
#endif
}

bool util_leaks(void (*round)(void *opaque), void *opaque, unsigned rounds)
{
    for (unsigned tries = 0; tries < 5; tries++) {
        size_t before = heap_used();

        for (unsigned i = 0; i < rounds; i++) {
            round(opaque);
        }
        if (heap_used() < before + rounds * 16) {
            return false;
        }
    }
    return true;
}

void util_awaited(KsmLock *l, unsigned n)
{
    bool waiting = false;

    while (!waiting) {
        pthread_mutex_lock(&l->mutex);
        waiting = l->next - l->serving == 1 + n;
        pthread_mutex_unlock(&l->mutex);
        g_usleep(100);      /* on one CPU, we may have the higher priority */
    }
}

void util_helped(KsmCrew *c)
{
    if (!c->n) {
        return;
    }
    pthread_mutex_lock(&c->mutex);
    while (c->first || c->busy) {
        pthread_cond_wait(&c->done, &c->mutex);
    }
    pthread_mutex_unlock(&c->mutex);
}
