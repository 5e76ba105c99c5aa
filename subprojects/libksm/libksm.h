/*
 * libksm: merging of equal memory inside one process
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The engine finds equal pages in the regions it is given and replaces them
 * by copy-on-write mappings of a pool, as the kernel's KSM does from outside,
 * but knowing what was written (the dirty source of a region) and in runs
 * rather than pages.  It has no thread of its own, unless it is told to have
 * some that help: ksm_step() does a bounded amount of work and says when to be
 * called next.
 *
 * Units: addresses and lengths in bytes, multiples of the page size; times
 * in ns; "pages" are base pages (4096 bytes).
 *
 * Threads: an engine has one lock.  ksm_step() must be called by one thread
 * at a time; every other function may be called by any thread at any time,
 * and waits at most until ksm_step() has hashed one chunk (2 MiB), has planned
 * one and merged as much of it as it takes out of the address space at once, or
 * has restored one run.
 * ksm_unmerge() and ksm_region_remove() give the lock up between chunks, and
 * while they wait for a device, so that others wait for a chunk at most.
 * The exception: with KSM_DIRTY_PAGEMAP a region whose merging begins, or was
 * inhibited and goes on, is registered as a whole.
 * Region ops are called with the lock held: they must not call back into the
 * engine, nor wait for a thread that does.
 *
 * Staged pages.  While a chunk is merged its pages are out of the address
 * space, for some 100 us; a thread that touches them waits in a page fault.
 * - Ops touch no memory of any region (not even by a system call), nor wait
 *   for a lock or a thread that may: that thread may be waiting for them.
 * - What the kernel cannot wait for fails: FUTEX_LOCK_PI, FUTEX_WAKE_OP and
 *   robust lists on such a page (EFAULT), reading it through /proc/self/mem,
 *   process_vm_readv() or ptrace().  Keep these out of regions.
 * - The thread in a function of the engine must not be cancelled
 *   (pthread_cancel()), nor leave it by longjmp().
 * - fork() waits until nothing is staged.  Raw clone() and _Fork() do not:
 *   their child finds holes where the pages were, and locks as they stood.
 *   Threads and vfork() are fine.
 * - A forked child that neither ends nor calls exec keeps alive what was
 *   merged then: unless it unmaps what it does not know, for so it is told.
 * - Signals are blocked in that thread, until the chunk is merged; and where it
 *   may have a realtime priority (CAP_SYS_NICE, or RLIMIT_RTPRIO without
 *   RLIMIT_RTTIME) it has the lowest meanwhile, so that nobody waits for
 *   others' turns.  Ops make no threads or processes then, which would inherit
 *   it, and do not spin.
 *
 * Who else holds the page?  See "busy" in KsmRegionOps: memory that something
 * writes past the page tables without pinning it (direct I/O on NFS, 9p,
 * ceph, FUSE) must not be given to an engine without that op.  Pinned pages
 * are left alone by merging: the kernel tells.  It does not tell of a page that
 * was merged, then copied on write, and then pinned (the mapping is one of a
 * file, and nothing that can be asked of such a page knows pins; moving
 * anonymous pages is what does).  So giving such memory back needs the op to
 * report pins too; without the op the engine does so only when it is told to,
 * by ksm_unmerge() and ksm_region_remove(), and nothing may be pinned then.
 *
 * Memory failures (machine checks).  A page that fails while it is staged is
 * poisoned where it belongs: whoever touches it gets a SIGBUS, never zeroes.
 * Where the kernel fails to poison it, it is mapped without access (SIGSEGV).
 * In either case ksm_discard() makes it plain memory again; ksm_unmerge() and
 * ksm_region_remove() leave it as it is.  Once removed, memory without access
 * has to be mapped anew by its owner, or ksm_region_add() refuses the region.
 * Pages of the pool that have failed are not read.  A guest's page that fails
 * just as the engine reads it raises SIGBUS in the engine's thread, as in any
 * other thread that reads it.
 */
#ifndef LIBKSM_H
#define LIBKSM_H

#include <glib.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

G_BEGIN_DECLS

#define KSM_PAGE_SIZE 4096u
#define KSM_CHUNK_SIZE (2u << 20)

typedef struct KsmEngine KsmEngine;
typedef struct KsmRegion KsmRegion;

#define KSM_ERROR ksm_error_quark()
GQuark ksm_error_quark(void);

typedef enum KsmError {
    KSM_ERROR_INVALID,      /* an argument is wrong; the text says which */
    KSM_ERROR_UNSUPPORTED,  /* the kernel lacks something; names it */
    KSM_ERROR_PERMISSION,   /* a right is missing; names it and the remedy */
    KSM_ERROR_RESOURCES,    /* out of memory, file descriptors or VMAs */
} KsmError;

typedef enum KsmScope {
    KSM_SCOPE_ZERO,         /* zero pages only, given back to the kernel */
    KSM_SCOPE_VM,           /* all equal pages of the engine's regions */
    KSM_SCOPE_GROUP,        /* ... and of other processes: KsmConfig.group */
} KsmScope;

typedef enum KsmDirtySource {
    KSM_DIRTY_AUTO,         /* log if there is the op, pagemap, checksum */
    KSM_DIRTY_LOG,          /* the region's dirty_sync op */
    KSM_DIRTY_PAGEMAP,      /* PAGEMAP_SCAN, async write-protect; Linux 6.7 */
    KSM_DIRTY_CHECKSUM,     /* hash and compare */
} KsmDirtySource;

typedef enum KsmFreePolicy {
    KSM_FREE_AUTO,          /* lazy; eager after a decay or under pressure */
    KSM_FREE_LAZY,          /* MADV_FREE */
    KSM_FREE_EAGER,         /* MADV_DONTNEED */
} KsmFreePolicy;

/* What the owner chooses.  ksm_config_init() sets the defaults given here. */
typedef struct KsmConfig {
    KsmScope scope;                 /* KSM_SCOPE_VM */
    KsmDirtySource dirty;           /* KSM_DIRTY_AUTO */
    KsmFreePolicy free_policy;      /* KSM_FREE_AUTO */
    bool smart_scan;                /* true: skip what never matched */
    unsigned max_cpu;               /* 10: percent of a core, 1 to 100 ... */
    unsigned threads;               /* ... times these: 1; KSM_THREADS_MAX */
    /* default 0, as fast as max_cpu allows; else seconds per pass */
    unsigned target_scan_s;
    /*
     * 64: pages a huge page must save before it is broken, 1 to 512; an eighth
     * of that where a later look found all of it as it was
     */
    unsigned split_min_pages;
    unsigned max_page_sharing;      /* 256: users of one pool page, >= 2 */
    /* 25: share of vm.max_map_count that is left to the program */
    unsigned vma_reserve_percent;
    size_t vma_reserve;             /* 0: see ksm_engine_set_vma_reserve() */
    /* 1 ms: aim for the longest isolation, of CPU */
    uint64_t stall_limit_ns;
    /*
     * KSM_SCOPE_GROUP: pages are shared with the other members of a group, in
     * a pool that a daemon has (docs/interop/ksm-pool.rst).  It is found at
     * @group_socket, a path, or by default at KSM_GROUP_DIR/@group.sock; or
     * @group_fd is a connection to it, if it is not -1: the engine's from then
     * on, and closed if there can be none.  Without a daemon nothing but zeroes
     * is merged until there is one.  Regions must be memory that children do
     * not inherit (MADV_DONTFORK).
     * The strings are copied.
     */
    const char *group;              /* NULL */
    const char *group_socket;       /* NULL */
    int group_fd;                   /* -1 */
    const char *member;             /* NULL: the program's; its name there */
    /*
     * false: pages that are equal, but stand in runs too short to be worth a
     * mapping, stay.  true: once quiet they are left to the kernel's KSM
     * (MADV_MERGEABLE for their chunk of 2 MiB), if somebody runs that.  For
     * regions that children do not inherit.
     */
    bool tail;
} KsmConfig;

#define KSM_THREADS_MAX 16
#define KSM_GROUP_DIR "/run/ksm-pool"

void ksm_config_init(KsmConfig *config);

/*
 * ksm_supported: whether this process can run an engine at all.  False and
 * an error that names what is missing (x86_64 or aarch64 with pages of 4096
 * bytes; UFFDIO_MOVE: Linux 6.8; userfaultfd: /dev/userfaultfd,
 * vm.unprivileged_userfaultfd or CAP_SYS_PTRACE).
 */
bool ksm_supported(GError **error);

/* Returns NULL with @error set; see ksm_supported().  Owned by the caller. */
KsmEngine *ksm_engine_new(const KsmConfig *config, GError **error);

/* All regions must have been removed (asserted). */
void ksm_engine_free(KsmEngine *engine);

/* Values that may change while the engine runs; out of range is clamped. */
void ksm_engine_set_run(KsmEngine *engine, bool run);
void ksm_engine_set_max_cpu(KsmEngine *engine, unsigned percent);
/*
 * More than one: threads that the one in ksm_step() starts help it to hash, to
 * find memory, and to give it back; what they use counts as the engine's CPU.
 * They have its priority and its CPUs, and wait for nothing but work.  Where
 * they cannot be started a warning says so, and it goes on alone.
 */
void ksm_engine_set_threads(KsmEngine *engine, unsigned threads);
void ksm_engine_set_target_scan(KsmEngine *engine, unsigned seconds);
void ksm_engine_set_smart_scan(KsmEngine *engine, bool on);

/*
 * Mappings (lines of /proc/self/maps) of vm.max_map_count that are left to
 * the program, above those it has: what it may come to need for its stacks,
 * files and libraries.  The engine stops merging where fewer would be left;
 * it counts mappings every 10 s, and more often while it makes many.  0: by
 * KsmConfig.vma_reserve_percent instead.  vm.max_map_count or more: nothing
 * is mapped, zeroes alone are given back.  What is merged already stays.
 */
void ksm_engine_set_vma_reserve(KsmEngine *engine, size_t mappings);

/*
 * What the owner of a region knows better than the engine.  Any op may be
 * NULL.  Called by the thread in ksm_step() unless said otherwise, the
 * engine's lock held; see "Staged pages" above for what they must not touch.
 */
typedef struct KsmRegionOps {
    /*
     * Sets (never clears) a bit of @bitmap for each page of the @n_pages from
     * @first_page on that was written since the last call for it.  @bitmap
     * starts at @first_page.  False: unknown, all pages count as written.
     */
    bool (*dirty_sync)(void *opaque, size_t first_page, size_t n_pages,
                       unsigned long *bitmap);
    /*
     * May a device write to this range past the page tables, or has one been
     * told where this memory is?  True for as long as
     * - something may write to it by references that are no pins: from before
     *   it looks the pages up until it has written the last;
     * - pages of it may be pinned (VFIO, vDPA, registered buffers of io_uring,
     *   O_DIRECT), be it for reading only: from before the first is pinned
     *   until the last is released.  Merging need not know, but restoring.
     * Asked at the moment of replacement, never before: after isolation when
     * merging, after write-protection when restoring.  Who looks a page up for
     * writing after that runs into a fault and waits; so what is reported from
     * before its look-up on is never missed.  A pin for reading and for long
     * does not fault on write-protected memory, and would keep a page that is
     * replaced: see ksm_settle().  Where nothing is replaced by it the answer is
     * a hint: whether a huge page is broken, and what is known of it then.
     * True, when merging: the very same pages are put back; the op is asked
     * again, for one page, while such a page cannot be moved.  When restoring,
     * or merging again what was written: what was copied on write stays where
     * it is.  Memory that must stay for
     * long (a device is attached) is reported here: "inhibited" is about
     * merging, and does not keep ksm_unmerge() from giving memory back.
     * Called by the threads in ksm_step(), ksm_unmerge() and
     * ksm_region_remove().  NULL means the owner promises that nothing does.
     */
    bool (*busy)(void *opaque, void *addr, size_t len);
    /*
     * NULL where merging may go on; else a static text: why it may not.  Then
     * the engine does not merge, nor restore by itself.  Asked before each
     * chunk, each time that others may have had the lock amid work on one, and,
     * after write-protection, before each run is restored or merged again.
     */
    const char *(*inhibited)(void *opaque);
    /*
     * After a merge: map the range again for whoever uses it (the second
     * level page tables of a vCPU).  The engine has touched it already.
     */
    void (*prefault)(void *opaque, void *addr, size_t len);
    /*
     * The engine mapped the range anew, or parts of it, and gave it the attributes
     * (DONTFORK, DONTDUMP, NUMA policy) that the region had when it was added, as
     * far as /proc tells them: for the owner to apply what it has changed since.
     * Called by whichever thread is in the engine.
     */
    void (*mapped)(void *opaque, void *addr, size_t len);
} KsmRegionOps;

/*
 * ksm_region_add: gives private anonymous memory to the engine.
 * @addr and @len are multiples of the page size; it must stay mapped until
 * ksm_region_remove().  @ops is not copied.  Memory of different @node (NUMA)
 * is merged only with its own; -1: no matter.
 * NULL with @error set if the memory is shared, file-backed, hugetlb, locked,
 * not mapped, or given to an engine already.
 */
KsmRegion *ksm_region_add(KsmEngine *engine, void *addr, size_t len, int node,
                          const KsmRegionOps *ops, void *opaque,
                          GError **error);

typedef enum KsmRemove {
    KSM_REMOVE_UNMERGE,     /* back to anonymous memory with its content */
    /* it is about to be unmapped: what it reads as from now on may change */
    KSM_REMOVE_FORGET,
} KsmRemove;

/*
 * 0, or -errno: then the region stays, part of it unmerged, and the call can
 * be repeated.  -ENOMEM: out of memory; -EBUSY: the busy op says that a
 * device may hold pages that were copied on write: those stay in mappings of
 * the pool, with their content, and the others were given back.  It is tried
 * for some 20 ms.  No other call for the region may be under way when it is
 * removed.
 */
int ksm_region_remove(KsmRegion *region, KsmRemove how);

/*
 * ksm_step: does a bounded amount of work, at most about @max_ns of CPU
 * (0: what the budget gives), and ends no more than one pass.  Returns the ns
 * after which to call it again (0: at once), or -1 when nothing will happen until
 * something is called (no region; run off and nothing merged).  With run off,
 * and of regions whose inhibited op says so, merged pages that were written are
 * still found by reading page tables, and pool pages without users given back.
 */
int64_t ksm_step(KsmEngine *engine, uint64_t max_ns);

/*
 * ksm_discard: the range reads as zeroes afterwards and is plain anonymous
 * memory again.  For what madvise(MADV_DONTNEED) would be used for: on a
 * merged range that would bring back the pool's content.  0 or -errno.
 */
int ksm_discard(KsmRegion *region, size_t offset, size_t len);

/*
 * ksm_free_hint: the content of the range is no longer needed; until it is
 * written again it reads as the old content or as zeroes.  What is done about
 * it is KsmConfig.free_policy.  0 or -errno.
 */
int ksm_free_hint(KsmRegion *region, size_t offset, size_t len);

/*
 * ksm_unmerge: back to anonymous memory, content kept.  0 or -errno, as
 * ksm_region_remove().  Nothing of the region is merged until the call
 * returns; after that the range may be merged again, unless the inhibited op
 * or ksm_engine_set_run() says otherwise.  Of a region without a busy op, no
 * device may write to the range meanwhile, nor have pages of it pinned.
 */
int ksm_unmerge(KsmRegion *region, size_t offset, size_t len);

/*
 * ksm_settle: waits until no engine of this process is putting other memory
 * under a region by what busy and inhibited said before.  For who is about to
 * pin memory for long (VFIO, vDPA): first the ops report it, then this is
 * called, then memory is pinned; and until the pins are gone inhibited says
 * so, and ksm_unmerge() is not called.  Pinning for reading waits for nobody:
 * a device that did so while its page is being replaced would go on reading
 * the page that was.  (For writing it would wait, or fail.)  A ksm_unmerge()
 * or ksm_region_remove() that is under way ends with -EBUSY.
 * Takes the locks of all engines, one after another: see "Threads" above.  Not
 * to be called by an op, nor with a lock that an op needs.
 */
void ksm_settle(void);

/* ksm_rescan: forget the ages; all pages are looked at again soon. */
void ksm_rescan(KsmEngine *engine);

typedef enum KsmState {
    KSM_STATE_OFF,          /* run is off */
    KSM_STATE_ACTIVE,       /* scanning or merging */
    KSM_STATE_IDLE,         /* nothing to gain at present */
    KSM_STATE_INHIBITED,    /* every region's inhibited op says so */
} KsmState;

/* Why memory is not merged.  Each has a count of pages in KsmStats. */
typedef enum KsmReason {
    KSM_REASON_RUN_OFF,         /* first: of chunks, "nobody has asked" */
    KSM_REASON_INHIBITED,
    KSM_REASON_NOT_SCANNED,     /* not looked at yet */
    KSM_REASON_VOLATILE,        /* written too often */
    KSM_REASON_UNIQUE,          /* nothing equal */
    KSM_REASON_NOT_WORTH,       /* equal, but would cost more than it saves */
    KSM_REASON_PINNED,          /* a device has pinned it */
    KSM_REASON_BUSY,            /* the busy op said so */
    KSM_REASON_VMA_LIMIT,
    KSM_REASON_NO_MEMORY,
    KSM_REASON_COW_BROKEN,      /* written after the merge */
    KSM_REASON_FREED,           /* the owner freed it */
    KSM_REASON_NO_DAEMON,       /* nobody serves the group */
    KSM_REASON_REFUSED_BY_DAEMON,
    KSM_REASON_GROUP_FULL,      /* the group's pool is */
    KSM_REASON_MAX
} KsmReason;

/* "vma-limit": the name of a reason; its sentence for a user. */
const char *ksm_reason_name(KsmReason reason);
const char *ksm_reason_text(KsmReason reason);

/*
 * Buckets of the stall histogram: bucket i counts isolations, and huge pages
 * broken for one, that took less than 1 us << i (the last: all longer ones).
 */
#define KSM_STALL_BUCKETS 24

typedef struct KsmStats {
    KsmState state;
    const char *inhibited;      /* why, for KSM_STATE_INHIBITED; static */
    KsmDirtySource dirty;       /* the source in use; AUTO if mixed */
    /* pages, now */
    uint64_t pages_total;
    uint64_t pages_shared;      /* pool pages that have users */
    uint64_t pages_sharing;     /* further users of those: what is saved */
    uint64_t pages_unshared;    /* unique, candidates */
    uint64_t pages_volatile;    /* changed too often to be looked at */
    uint64_t zero_pages;        /* given back to the kernel, still zero */
    /* of pages_shared: what other members of the group pay for */
    uint64_t group_saved;
    /* KsmConfig.tail: those the kernel has merged, as seen ... */
    uint64_t kernel_pages;
    uint64_t kernel_saved;      /* ... what that saves, by its mean */
    uint64_t kernel_left;       /* bytes that it may look at */
    uint64_t reasons[KSM_REASON_MAX];   /* pages not merged, by reason */
    uint64_t merged_runs;       /* mappings of the pool: VMAs */
    uint64_t lazy_free;         /* bytes MADV_FREEd and still resident */
    /* counts since the engine was made */
    uint64_t pages_scanned;     /* hashed */
    uint64_t pages_skipped;     /* by smart scan */
    uint64_t full_scans;
    uint64_t merged;            /* pages replaced */
    uint64_t verify_failed;     /* pages that had changed after all */
    uint64_t pinned;            /* isolations refused with EBUSY */
    uint64_t busy;              /* ... undone because of the busy op */
    uint64_t cow_broken;        /* merged pages written since */
    uint64_t free_hinted;       /* pages */
    uint64_t huge_split;        /* huge pages broken up to merge */
    /* pages found to be lost, for their memory had failed; of the engine */
    uint64_t poisoned;
    uint64_t isolations;
    uint64_t scan_time;         /* ns of CPU */
    uint64_t merge_time;        /* ns of CPU */
    /* bytes, now */
    uint64_t metadata;          /* the engine's own memory */
    uint64_t page_tables;       /* estimate: VMAs and tables for merging */
    int64_t profit;             /* saved less all of the above */
    /* stall: isolation to wake, or breaking a huge page, ns; to a quarter */
    uint64_t stall_count, stall_p50, stall_p99, stall_max;
    uint64_t stall[KSM_STALL_BUCKETS];
} KsmStats;

/* Of a group, as its daemon told some time ago. */
typedef struct KsmGroupStats {
    bool connected;
    KsmReason why;          /* ... not */
    uint64_t generation;    /* of the pool */
    uint64_t members;
    uint64_t pool_bytes;    /* that all slots use */
    uint64_t pool_limit;    /* bytes */
    /* pages; zero before the daemon has told */
    uint64_t held;          /* slots that this member maps */
    uint64_t share;         /* ... each by the number of members that hold it */
} KsmGroupStats;

/*
 * False: the engine is in no group.  What it says is up to a step and a minute
 * old (ten seconds, where much has changed here); a call then asks for newer
 * figures, for the next one.
 */
bool ksm_engine_get_group(KsmEngine *engine, KsmGroupStats *stats);

/*
 * What is in the memory of an engine, for comparing it with that of others: of
 * two sketches with the same key the hashes are looked at up to where the first
 * whole one ends.  Those that are in both are to all contents that are as that
 * end is to 2^32, but for chance.  Zeroes are left out, and so are pages not
 * looked at yet, and those that the kernel has merged.
 *
 * Members of one group have one key; where the daemon is given one, those of
 * different hosts do (ksm-poold --key).  Who has a sketch and the key can tell
 * of some contents, one in so many as it has hashes, whether they are there.
 */
#define KSM_SKETCH_SIZE 1024

typedef struct KsmSketch {
    uint64_t key;           /* which hash it was: of its seed, by SHA-256 */
    uint64_t pages;         /* whose content is known */
    uint64_t contents;      /* different ones: within 3 % as a rule */
    unsigned n;             /* hashes */
    uint32_t least[KSM_SKETCH_SIZE];    /* in order */
} KsmSketch;

/*
 * False: the engine is in no group, or was not connected to it yet.  Looks at
 * what is known of each page: some ms for a GiB, a chunk at a time.  After the
 * daemon has begun anew with another key it counts too little for a while.
 */
bool ksm_engine_get_sketch(KsmEngine *engine, KsmSketch *sketch);

/*
 * Cheap: counters, no walk.  May wait as said above.  While a chunk is merged,
 * what is to be mapped there counts as sharing.
 */
void ksm_engine_get_stats(KsmEngine *engine, KsmStats *stats);
void ksm_region_get_stats(KsmRegion *region, KsmStats *stats);

G_END_DECLS

#endif /* LIBKSM_H */
