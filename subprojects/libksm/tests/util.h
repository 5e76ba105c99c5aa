/*
 * libksm tests: memory with a shadow copy
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef KSM_TEST_UTIL_H
#define KSM_TEST_UTIL_H

#include "base/crew.h"
#include "base/lock.h"
#include "libksm.h"

#define PAGE    ((size_t)KSM_PAGE_SIZE)
#define CHUNK   ((size_t)KSM_CHUNK_SIZE)

typedef enum MemPages { MEM_SMALL, MEM_HUGE } MemPages;

/* Memory of the test and what it must hold. */
typedef struct Mem {
    char *map;          /* what was mapped */
    size_t map_len;
    char *addr;         /* the region: @pages from here */
    size_t pages;
    MemPages kind;
    char *shadow;
    unsigned long *log; /* written pages: for a dirty_sync op */
    bool busy;          /* what the busy op says */
    const char *inhibited;
} Mem;

/* @skip: pages between a 2 MiB boundary and the region's start. */
Mem *mem_new(size_t pages, size_t skip, MemPages kind);
void mem_free(Mem *m);
/* As new: not populated, zeroes. */
void mem_reset(Mem *m);

/* All of them write the shadow and the log, too. */
void mem_fill(Mem *m, size_t page, uint64_t content);   /* 0: zeroes */
void mem_fill_run(Mem *m, size_t page, size_t n, uint64_t first,
                  uint64_t step);
void mem_write(Mem *m, size_t page, size_t offset, uint8_t byte);
/* The range was discarded: the shadow is zeroes. */
void mem_gone(Mem *m, size_t page, size_t n);

/* Number of pages that differ from the shadow. */
size_t mem_differs(const Mem *m);
#define mem_check(m) g_assert(mem_differs(m) == 0)

/* Populated pages of the range, and those in anonymous memory. */
size_t mem_present(const Mem *m, size_t page, size_t n);
size_t mem_anonymous(const Mem *m, size_t page, size_t n);
/* Mappings of the process that touch the region. */
size_t mem_mappings(const Mem *m);

/* Ops on a Mem as opaque: all of them, or without busy. */
extern const KsmRegionOps mem_ops;
extern const KsmRegionOps mem_ops_log;

/* Mappings the kernel allows a process, and this one's. */
size_t util_mappings_allowed(void);
size_t util_mappings(void);
/*
 * Does each of @rounds rounds leave 16 bytes or more on the heap, by the C
 * library's count?  (Sanitizers look for leaks themselves.)  Tried five times:
 * allocations made once may fall into one of them, a leak into all.
 */
bool util_leaks(void (*round)(void *opaque), void *opaque, unsigned rounds);
/* Returns when so many others wait for the lock, which this thread has. */
void util_awaited(KsmLock *l, unsigned n);
/* Returns when helpers have done all that was given. */
void util_helped(KsmCrew *c);
/*
 * For prim.cpu_ns, time by the call: measured gains must not depend on a busy
 * machine or a sanitizer.
 */
uint64_t util_cpu_by_call(void);

#endif
