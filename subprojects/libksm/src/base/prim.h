/*
 * prim: every system call of the engine
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * One table of functions: tests make any call fail, at any position, in any way
 * a kernel may (nothing done, part done).  It decides nothing; no other room
 * makes system calls.  Functions return 0 or a count, or -errno, except where
 * said otherwise.
 */
#ifndef KSM_PRIM_H
#define KSM_PRIM_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/types.h>

/* madvise(); not in every distribution's headers */
#ifndef MADV_COLD
#define MADV_COLD           20
#endif
#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT        21
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* PAGEMAP_SCAN: kinds of pages */
#define PM_WRITTEN  (1u << 1)
#define PM_FILE     (1u << 2)
#define PM_PRESENT  (1u << 3)
#define PM_SWAPPED  (1u << 4)
#define PM_ZEROPFN  (1u << 5)
#define PM_HUGE     (1u << 6)

typedef struct PmRange {
    uint64_t start;
    uint64_t end;
    uint64_t kinds;
} PmRange;

typedef struct PmScan {
    int fd;                 /* /proc/self/pagemap */
    uintptr_t start;
    uintptr_t end;
    uint64_t all;           /* kinds a page must all be ... */
    uint64_t any;           /* ... and at least one of these, if not 0 */
    uint64_t tell;          /* kinds to report */
    bool protect;           /* write-protect what matched (async) */
    PmRange *vec;
    size_t vec_len;
    size_t max_pages;       /* it stops after so many; 0: never */
    uintptr_t walk_end;     /* out: how far the walk came */
} PmScan;

typedef struct UffdRange {
    int fd;
    void *addr;
    size_t len;
} UffdRange;

#define UFFD_WP         (1u << 0)       /* features */
#define UFFD_WP_SHMEM   (1u << 12)
#define UFFD_WP_ASYNC   (1u << 15)
#define UFFD_MOVE       (1u << 16)

#define UFFD_MISSING    1u              /* modes of registration */
#define UFFD_PROTECT    2u

typedef struct KsmPrim {
    /* memory; MAP_FAILED becomes NULL with errno set */
    void *(*map)(void *addr, size_t len, int prot, int flags, int fd,
                 off_t offset);
    int (*unmap)(void *addr, size_t len);
    /* moves a mapping over another one */
    int (*remap)(void *from, size_t len, void *to);
    /*
     * makes a mapping @want bytes long, @at an address where something else
     * is mapped, or anywhere (NULL); as map
     */
    void *(*lengthen)(void *from, size_t len, size_t want, void *at);
    /*
     * Moves what is mapped elsewhere, with its pages, and leaves a mapping of
     * the same kind without any (MREMAP_DONTUNMAP, Linux 5.7); as map.
     */
    void *(*split)(void *from, size_t len);
    int (*advise)(void *addr, size_t len, int advice);
    /*
     * 1: what the process maps is for the kernel's KSM, if nobody says
     * otherwise (PR_SET_MEMORY_MERGE, which is inherited; Linux 6.4); else 0
     */
    int (*merge_any)(void);
    int (*policy_get)(void *addr, int *mode, unsigned long *mask, size_t bits);
    int (*policy_set)(void *addr, size_t len, int mode,
                      const unsigned long *mask, size_t bits);
    /* of this thread; prefer_node: -1: default */
    int (*prefer_node)(int node);
    int (*thread_policy_get)(int *mode, unsigned long *mask, size_t bits);
    int (*thread_policy_set)(int mode, const unsigned long *mask, size_t bits);
    /* files */
    int (*memfd)(const char *name);
    int (*memfd_sealable)(const char *name);
    /* F_SEAL_WRITE: -EBUSY while anything has it mapped writable, shared */
    int (*seal_write)(int fd);
    int (*open_read)(const char *path);
    int (*close)(int fd);
    int (*truncate)(int fd, off_t size);
    ssize_t (*write)(int fd, const void *buf, size_t len, off_t offset);
    ssize_t (*read)(int fd, void *buf, size_t len);
    ssize_t (*read_at)(int fd, void *buf, size_t len, off_t offset);
    int (*punch)(int fd, off_t offset, off_t len);
    int (*allocate)(int fd, off_t offset, off_t len);
    /* sockets of whole messages; none of these waits */
    int (*connect)(const char *path);
    int (*send)(int fd, const void *message, size_t len);
    /*
     * Bytes of the next message, 0 at the end; -EMSGSIZE if it is longer than
     * @len.  Of the descriptors with it @n_fds are kept, the others closed;
     * those that are missing are -1.
     */
    ssize_t (*receive)(int fd, void *message, size_t len, int *fds,
                       unsigned n_fds);
    /* userfaultfd */
    int (*uffd)(void);
    int (*uffd_api)(int fd, uint64_t features);
    int (*uffd_register)(const UffdRange *range, unsigned mode);
    int (*uffd_unregister)(const UffdRange *range);
    int (*uffd_wake)(const UffdRange *range);
    int (*uffd_protect)(const UffdRange *range, bool on);
    /*
     * *done: bytes moved or copied, also when it failed.  A move that failed
     * may have moved more than that (stage.h).  Never with
     * UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES: Linux 6.18 loops for ever on a page
     * that has just become a hole.
     */
    int (*uffd_move)(int fd, void *to, void *from, size_t len, size_t *done);
    int (*uffd_copy)(int fd, void *to, const void *from, size_t len,
                     size_t *done);
    int (*uffd_poison)(int fd, void *addr, size_t len);     /* Linux 6.6 */
    ssize_t (*pagemap)(PmScan *scan);   /* number of ranges */
    /* of this thread: its policy (SCHED_*), with the lowest priority it has */
    int (*sched_get)(void);
    int (*sched_set)(int policy);
    int (*slack_get)(void);             /* of its timers, ns */
    int (*slack_set)(int ns);
    int (*thread_id)(void);
    /* another one, that gets no signals but what it causes */
    int (*thread)(pthread_t *thread, void *(*run)(void *), void *opaque);
    /* signals of this thread; from here on no call fails */
    void (*signals_block)(sigset_t *old);
    void (*signals_restore)(const sigset_t *old);
    size_t (*file_limit)(void);         /* RLIMIT_FSIZE */
    size_t (*realtime_limit)(void);     /* RLIMIT_RTTIME */
    size_t (*memory_limit)(void);       /* the lesser of RLIMIT_AS and _DATA */
    /* the host */
    size_t (*page_size)(void);
    const char *(*machine)(void);       /* as "uname -m" */
    /* clocks and chance */
    uint64_t (*cpu_ns)(void);           /* of this thread */
    uint64_t (*now_ns)(void);
    uint64_t (*random)(void);
    void (*pause)(unsigned us);
} KsmPrim;

/* What the engine calls.  Written by tests only, before an engine exists. */
extern KsmPrim prim;

/* The real calls, for tests to fall back to. */
extern const KsmPrim prim_real;

/* The kernel: 6018 for Linux 6.18; 0: not known. */
unsigned prim_kernel(void);

/* A small text file, whole; NULL and errno.  g_free() it. */
char *prim_read_file(const char *path, size_t *len);

#endif
