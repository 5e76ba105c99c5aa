/*
 * Mappings of guest RAM that devices may write to, counted per chunk
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A device (or the kernel on its behalf) that was given an address may write
 * there without the page tables.  If the page is replaced meanwhile, the write
 * is lost.  So each thread counts its mappings; the engine asks after taking
 * pages out.
 */
#ifndef HW_MEM_KSM_DMA_H
#define HW_MEM_KSM_DMA_H

#include "qemu/typedefs.h"

typedef struct KsmDma KsmDma;

KsmDma *ksm_dma_new(const void *host, size_t size);
void ksm_dma_free(KsmDma *dma);

/* @length bytes at @addr are mapped to be written, or no longer. */
void ksm_dma_map(KsmDma *dma, const void *addr, size_t length);
void ksm_dma_unmap(KsmDma *dma, const void *addr, size_t length);

/*
 * May something write to the range past the page tables, or may a device have
 * it pinned?  Ask after the pages were taken out or write-protected: then
 * nobody new gets at them.
 */
bool ksm_dma_busy(const KsmDma *dma, const void *addr, size_t length);

#endif
