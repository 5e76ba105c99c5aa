/*
 * Mappings of guest RAM that devices may write to, counted per chunk
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "hw/mem/ksm-compat.h"
#include "ksm-dma.h"
#include "ksm-inhibit.h"
#include "libksm.h"
#include "qemu/atomic.h"

#define STUCK UINT32_MAX    /* what is mapped there is not known any more */

struct KsmDma {
    const uint8_t *host;
    const uint8_t *end;
    uint32_t mapped[];      /* mappings to write to, per chunk; or STUCK */
};

static size_t chunk_of(const KsmDma *dma, const uint8_t *addr)
{
    return (uintptr_t)addr / KSM_CHUNK_SIZE -
           (uintptr_t)dma->host / KSM_CHUNK_SIZE;
}

KsmDma *ksm_dma_new(const void *host, size_t size)
{
    size_t chunks = ((uintptr_t)host + size - 1) / KSM_CHUNK_SIZE -
                    (uintptr_t)host / KSM_CHUNK_SIZE + 1;
    KsmDma *dma = g_malloc0(sizeof(*dma) + chunks * sizeof(dma->mapped[0]));

    dma->host = host;
    dma->end = dma->host + size;
    return dma;
}

void ksm_dma_free(KsmDma *dma)
{
    g_free(dma);
}

static uint32_t count_after(uint32_t count, bool maps)
{
    if (count == STUCK) {
        return STUCK;
    }
    return maps ? count + 1 : count ? count - 1 : STUCK;
}

/*
 * The length is the caller's, who may have it from the guest anew: vhost unmaps
 * a used ring by the size that the queue has then.
 */
static void dma_count(KsmDma *dma, const uint8_t *addr, size_t length,
                      bool maps)
{
    length = MIN(length, dma->end - addr);
    if (!length) {
        return;
    }
    /*
     * Full barriers: ksm_dma_busy() looks at the count after the page was
     * taken out, the device takes the page after it is counted.  One of them
     * sees the other.
     */
    for (size_t i = chunk_of(dma, addr); i <= chunk_of(dma, addr + length - 1);
         i++) {
        uint32_t was, seen = qatomic_read(&dma->mapped[i]);

        do {
            was = seen;
            seen = qatomic_cmpxchg(&dma->mapped[i], was,
                                   count_after(was, maps));
        } while (seen != was);
    }
}

void ksm_dma_map(KsmDma *dma, const void *addr, size_t length)
{
    dma_count(dma, addr, length, true);
}

void ksm_dma_unmap(KsmDma *dma, const void *addr, size_t length)
{
    /*
     * Unmapping too little leaves a count behind, unmapping what was not
     * mapped makes it STUCK: in both cases the chunk is never merged.  A guest
     * that makes its vhost unmap more than that takes a count of its own.
     */
    dma_count(dma, addr, length, false);
}

bool ksm_dma_busy(const KsmDma *dma, const void *addr, size_t length)
{
    const uint8_t *last = (const uint8_t *)addr + length - 1;

    /* the page is out, or write-protected, before this: see dma_count() */
    smp_mb();
    if (ksm_bypassed() || ksm_pinned()) {
        return true;
    }
    for (size_t i = chunk_of(dma, addr); i <= chunk_of(dma, last); i++) {
        if (qatomic_read(&dma->mapped[i])) {
            return true;
        }
    }
    return false;
}
