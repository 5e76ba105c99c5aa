/*
 * kinds: what the page tables say of each page
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>

#include <glib.h>

#include "base/kinds.h"

int kinds_open(KsmKinds *k)
{
    k->ranges = g_new0(PmRange, N_RANGES);
    k->pagemap = prim.open_read("/proc/self/pagemap");
    return MIN(k->pagemap, 0);
}

void kinds_close(KsmKinds *k)
{
    if (k->pagemap >= 0) {
        prim.close(k->pagemap);
    }
    g_free(k->ranges);
}

int kinds_ask(KsmKinds *k, const void *addr, unsigned n, unsigned tell,
              uint8_t *kinds)
{
    PmScan scan = {
        .fd = k->pagemap,
        .start = (uintptr_t)addr,
        .end = (uintptr_t)addr + n * PAGE_BYTES,
        .any = PM_PRESENT | PM_SWAPPED,
        .tell = tell,
        .vec = k->ranges,
        /* the kernel allocates as much */
        .vec_len = MIN(N_RANGES, n),
    };
    ssize_t got = prim.pagemap(&scan);

    if (got < 0) {
        return got;
    }
    if (scan.walk_end < scan.end) {
        return -EAGAIN;     /* what was not walked is not empty */
    }
    memset(kinds, 0, n);
    for (ssize_t i = 0; i < got; i++) {
        size_t from = (k->ranges[i].start - (uintptr_t)addr) / PAGE_BYTES;
        size_t to = (k->ranges[i].end - (uintptr_t)addr) / PAGE_BYTES;

        memset(kinds + from, k->ranges[i].kinds, to - from);
    }
    return 0;
}

int kinds_read(KsmKinds *k, const void *addr, unsigned n, uint64_t *entry)
{
    ssize_t len = n * sizeof(*entry);
    off_t at = (uintptr_t)addr / PAGE_BYTES * sizeof(*entry);
    ssize_t got = prim.read_at(k->pagemap, entry, len, at);

    return got == len ? 0 : got < 0 ? got : -EIO;
}

int kinds_look(KsmKinds *k, const void *addr, unsigned n, uint8_t *kinds)
{
    uint64_t entry[CHUNK_PAGES];
    int ret = kinds_ask(k, addr, n, KINDS_FAST, kinds);

    if (ret == 0 || kinds_read(k, addr, n, entry) < 0) {
        return ret;
    }
    for (unsigned i = 0; i < n; i++) {
        kinds[i] = (entry[i] >> ENTRY_PRESENT & 1 ? PM_PRESENT : 0) |
                   (entry[i] >> ENTRY_SWAPPED & 1 ? PM_SWAPPED : 0);
    }
    return 0;
}
