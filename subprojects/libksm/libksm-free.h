/*
 * libksm, room free: memory whose content is no longer needed
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A guest that gives pages back (balloon, free page reporting) often takes
 * them again soon.  MADV_FREE (Linux 4.5) lets it: the pages stay until the
 * host wants them, and a page written in the meantime costs no fault, no
 * zeroing and no shootdown.  The price is that the resident size does not
 * fall, and that reclaim has more to do when memory is short, where freeing
 * at once is better (the author's own idea in the series of 2014; Go went
 * back to MADV_DONTNEED for the first reason, jemalloc decays).  So the policy
 * is: lazy first; at once while memory is short; and what has stayed free for
 * a while is given back for good.
 *
 * Why it is safe: between the release and the next write the memory reads as
 * what it held or as zeroes, page by page, which is what the giver promised
 * to bear; a write makes the page ordinary again, for every access that goes
 * through the page tables.
 *
 * Not for memory that the kernel's KSM may merge.  A page of its stable tree
 * that one page table maps is made lazily free like any other, clean, and is
 * merged with others all the same, which does not make it dirty: reclaim then
 * drops it from under them, of whichever process they are (seen on Linux
 * 6.18: madvise_free_pte_range(), replace_page(); docs/devel/ksm-balloon.rst).
 *
 * Usable without an engine.  Leaves to others: what of the range is merged
 * (it must be plain anonymous memory), and whether it may be discarded at all.
 */
#ifndef LIBKSM_FREE_H
#define LIBKSM_FREE_H

#include "libksm.h"

G_BEGIN_DECLS

typedef struct KsmFreer KsmFreer;

/* ksm_freer_new: never fails; what cannot be observed is not acted upon. */
KsmFreer *ksm_freer_new(KsmFreePolicy policy);
void ksm_freer_free(KsmFreer *freer);

/*
 * ksm_freer_release: gives @len bytes at @addr back by the policy.  0, or
 * -errno of madvise(2): then the content is unchanged, or zeroes.
 * Thread-safe.
 */
int ksm_freer_release(KsmFreer *freer, void *addr, size_t len);

/* ksm_freer_forget: the range is unmapped or used for something else. */
void ksm_freer_forget(KsmFreer *freer, void *addr, size_t len);

/*
 * ksm_freer_step: gives back for good what was released lazily long enough
 * ago, up to KSM_CHUNK_SIZE of it.  Returns the ns after which it wants to be
 * called again, -1 if there is nothing to wait for.  Thread-safe.
 */
int64_t ksm_freer_step(KsmFreer *freer);

/* ksm_freer_set_decay: another time than KSM_FREER_DECAY_NS, in ns. */
void ksm_freer_set_decay(KsmFreer *freer, int64_t decay_ns);

#define KSM_FREER_SECOND G_GINT64_CONSTANT(1000000000)
/* How long memory stays lazily free before it is given back for good. */
#define KSM_FREER_DECAY_NS (10 * KSM_FREER_SECOND)
/* How often to look at the pressure while something is lazily free. */
#define KSM_FREER_STEP_NS KSM_FREER_SECOND
/*
 * For how long a sign of pressure counts.  Long, because freeing lazily at the
 * limit of memory makes that limit be hit again, which is dear.
 */
#define KSM_FREER_PRESSURE_NS (10 * KSM_FREER_SECOND)

typedef struct KsmFreerStats {
    uint64_t released;      /* pages released, by either way */
    uint64_t lazy;          /* ... of them with MADV_FREE */
    uint64_t eager;         /* ... at once */
    uint64_t decayed;       /* pages given back for good later */
    bool pressure;          /* is the host short of memory now? */
} KsmFreerStats;

void ksm_freer_get_stats(KsmFreer *freer, KsmFreerStats *stats);

G_END_DECLS

#endif /* LIBKSM_FREE_H */
