/*
 * sample: is what a loose chunk would save still what it was?
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * What is known of a loose chunk (engine/loose.h) may be old.  Before it is
 * merged, or others with it, some of the pages in question are seen again: most
 * of them have to be what they were.  A guess, for what pays: whatever it says,
 * replacing compares all of them.
 */
#ifndef KSM_SAMPLE_H
#define KSM_SAMPLE_H

#include "base/hash.h"
#include "base/kinds.h"
#include "share/content.h"

typedef struct Sampler {
    KsmContent *content;
    const KsmHasher *hasher;
    KsmKinds *kinds;
} Sampler;

/* Does the page, which was hashed, hold what it did?  It may be written. */
bool sample_page(const KsmHasher *h, const KsmRegion *r, size_t page);

/*
 * May the chunk be merged in this pass?  Not loose: always.  One that was
 * hashed in this pass has to wait for the next.  One that has changed waits
 * some passes, and is hashed before it is tried again.  It may have less to
 * gain than before in any case.
 */
bool sample_chunk(const Sampler *s, KsmRegion *r, size_t chunk);

/*
 * Pages from @page on, of a chunk, that may be offered to a remote store: up to
 * @n.  Where they were hashed long ago, those that are what they were.
 */
unsigned sample_run(const Sampler *s, KsmRegion *r, size_t page, unsigned n);

#endif
