/*
 * settle: pages that merging put back
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "base/tsan.h"
#include "engine/settle.h"
#include "merge/sample.h"

/* Is what it holds known? */
static bool is_known(const KsmEngine *e, const KsmRegion *r, size_t page)
{
    return e->merge.kept[page % CHUNK_PAGES] &&
           !(r->state[page] & PAGE_WRITTEN) && page_is_known(r, page);
}

static bool is_still(const KsmEngine *e, const KsmRegion *r, size_t page)
{
    if (engine_zero_only(e)) {
        return bytes_are_zero(page_addr(r, page), PAGE_BYTES) ==
               (page_state(r, page) == PAGE_ZEROES);
    }
    return sample_page(&e->hasher, r, page);
}

/* Known pages from @page on, up to @end; the kernel skips the pool between. */
static size_t known_run(const KsmEngine *e, const KsmRegion *r, size_t page,
                        size_t end)
{
    size_t n = 0;

    while (page + n < end &&
           (is_known(e, r, page + n) || (n && page_is_mapped(r, page + n)))) {
        n++;
    }
    return n;
}

void settle_kept(KsmEngine *e, KsmRegion *r, size_t chunk)
{
    size_t end = (chunk + 1) * CHUNK_PAGES, n;

    for (size_t i = chunk * CHUNK_PAGES; i < end; i += MAX(n, 1)) {
        n = known_run(e, r, i, end);
        if (!n || !dirty_settle(&e->dirty, r, i, n)) {
            continue;
        }
        KSM_TSAN_IGNORE_BEGIN();    /* it may be written */
        for (size_t page = i; page < i + n; page++) {
            if (is_known(e, r, page) && !is_still(e, r, page)) {
                content_leave(&e->content, r, page, PAGE_NEW);
                page_mark(r, page, true);
            }
        }
        KSM_TSAN_IGNORE_END();
    }
}
