/*
 * libksm: registered memory
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * See region.h for the idea.  What may be registered is decided here, from
 * what /proc/self/smaps says: everything the engine does presumes private
 * anonymous memory that nobody else manages.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "engine.h"
#include "prim.h"

#ifndef MADV_DONTFORK
#error "madvise() constants are missing: _GNU_SOURCE?"
#endif

static bool state_gains(PageState s)
{
    return s == PAGE_EQUAL || s == PAGE_ZEROES;
}

static bool state_maps(PageState s)
{
    return s == PAGE_MERGED || s == PAGE_BROKEN;
}

void page_set(KsmRegion *r, size_t page, PageState state)
{
    KsmChunk *c = page_chunk(r, page);
    uint8_t old = r->state[page];
    PageState was = old & PAGE_STATE_MASK;
    int gain = state_gains(state) - state_gains(was);

    if (old & PAGE_WRITTEN) {
        c->written--;
        r->n_written -= was == PAGE_NEW;
    }
    if (was == PAGE_FREED && c->lazy) {
        chunk_set_lazy(r, c, c->lazy - 1);
    }
    r->count[was]--;
    r->count[state]++;
    c->fresh += (state == PAGE_NEW) - (was == PAGE_NEW);
    c->gain += gain;
    r->gain[c->why_not] += gain;
    c->mapped += state_maps(state) - state_maps(was);
    c->broken += (state == PAGE_BROKEN) - (was == PAGE_BROKEN);
    c->given += (state == PAGE_GIVEN) - (was == PAGE_GIVEN);
    c->again -= was == PAGE_BROKEN && (old & PAGE_AGAIN);
    r->state[page] = state;
    if (state_maps(was) && !state_maps(state) && page + 1 < r->n_pages) {
        r->state[page + 1] &= ~PAGE_JOINED;
    }
}

void chunk_set_reason(KsmRegion *r, KsmChunk *c, KsmReason reason)
{
    r->gain[c->why_not] -= c->gain;
    r->gain[reason] += c->gain;
    c->why_not = reason;
}

void chunk_set_lazy(KsmRegion *r, KsmChunk *c, unsigned lazy)
{
    r->lazy += lazy;
    r->lazy -= c->lazy;
    c->lazy = lazy;
}

void page_mark(KsmRegion *r, size_t page, bool written)
{
    uint8_t old = r->state[page];

    if (!!(old & PAGE_WRITTEN) == written) {
        return;
    }
    r->state[page] = old ^ PAGE_WRITTEN;
    page_chunk(r, page)->written += written ? 1 : -1;
    if ((old & PAGE_STATE_MASK) == PAGE_NEW) {
        r->n_written += written ? 1 : -1;
    }
}

void page_again(KsmRegion *r, size_t page, bool again)
{
    uint8_t old = r->state[page];

    if (!!(old & PAGE_AGAIN) != again) {
        r->state[page] = old ^ PAGE_AGAIN;
        page_chunk(r, page)->again += again ? 1 : -1;
    }
}

/*
 * Slots tell, as long as both pages have theirs; the one that loses its own
 * leaves a bit.
 */
bool region_joined(const KsmRegion *r, size_t page)
{
    if (page == 0 || !page_is_mapped(r, page) ||
        !page_is_mapped(r, page - 1)) {
        return false;
    }
    if (page_state(r, page) == PAGE_MERGED &&
        page_state(r, page - 1) == PAGE_MERGED) {
        return r->tag[page - 1] + 1 == r->tag[page];
    }
    return r->state[page] & PAGE_JOINED;
}

static void joined_set(KsmRegion *r, size_t page, bool joined)
{
    r->state[page] &= ~PAGE_JOINED;
    r->state[page] |= joined ? PAGE_JOINED : 0;
}

/* As page_set to BROKEN: where its mapping begins and ends is not lost. */
static void page_break(KsmRegion *r, size_t page)
{
    bool next = page + 1 < r->n_pages && page_is_mapped(r, page + 1);
    bool before = region_joined(r, page);
    bool behind = next && region_joined(r, page + 1);

    page_set(r, page, PAGE_BROKEN);
    r->history[page] = 0;
    joined_set(r, page, before);
    if (next) {
        joined_set(r, page + 1, behind);
    }
}

void region_leave(KsmRegion *r, size_t page, PageState state)
{
    KsmEngine *e = r->engine;

    if (r->state[page] & PAGE_INDEXED) {
        index_remove(&e->index, r->tag[page], page_id(r, page));
    }
    if (page_state(r, page) == PAGE_MERGED) {
        pool_user_drop(&e->pool, r->tag[page]);
    }
    if (page_state(r, page) == PAGE_BROKEN) {
        r->history[page] = 0;
    }
    if (state == PAGE_BROKEN) {
        page_break(r, page);
    } else {
        page_set(r, page, state);
    }
}

void region_count_runs(KsmRegion *r, size_t chunk)
{
    size_t first = chunk * CHUNK_PAGES;
    KsmChunk *c = &r->chunk[chunk];
    unsigned runs = 0;

    if (!c->mapped && !c->runs) {
        return;
    }
    for (size_t i = first; i < first + CHUNK_PAGES; i++) {
        runs += page_is_mapped(r, i) && !region_joined(r, i);
    }
    r->runs += runs - (uint64_t)c->runs;
    c->runs = runs;
}

void region_attributes(KsmRegion *r, void *addr, size_t len, AttrKind kind)
{
    for (unsigned i = 0; i < r->n_advice; i++) {
        bool huge = r->advice[i] == MADV_HUGEPAGE ||
                    r->advice[i] == MADV_NOHUGEPAGE;

        if (kind == ATTR_OWN || !huge) {
            prim.advise(addr, len, r->advice[i]);
        }
    }
    if (r->policy > 0) {
        prim.policy_set(addr, len, r->policy, r->policy_mask,
                        sizeof(r->policy_mask) * 8);
    }
    if (r->ops && r->ops->mapped) {
        r->ops->mapped(r->opaque, addr, len);
    }
}

int region_map_anonymous(KsmRegion *r, size_t page, size_t n)
{
    void *addr = page_addr(r, page);
    size_t len = n * PAGE_BYTES;

    for (unsigned tries = 0; ; tries++) {
        if (prim.map(addr, len, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | r->map_flags,
                     -1, 0)) {
            break;
        }
        /* a hole in the address space must not stay; ENOMEM: there is one */
        if (tries > 3 && prim.advise(addr, len, MADV_NORMAL) != -ENOMEM) {
            return -ENOMEM;
        }
        if (tries > 3) {
            prim.pause(1000);
        }
    }
    region_attributes(r, addr, len, ATTR_OWN);
    return 0;
}

bool region_busy(KsmRegion *r, void *addr, size_t len)
{
    const KsmRegionOps *ops = r->ops;

    return ops && ops->busy && ops->busy(r->opaque, addr, len);
}

const char *region_inhibited(KsmRegion *r)
{
    r->inhibited = r->unmerging ? "its memory is being unmerged"
                 : r->ops && r->ops->inhibited ? r->ops->inhibited(r->opaque)
                                               : NULL;
    return r->inhibited;
}

/* One entry of /proc/self/smaps, as far as we need it. */
typedef struct Mapping {
    uintptr_t start, end;
    char perms[5];
    unsigned long inode;
    char name[128];
} Mapping;

static bool mapping_parse(const char *line, Mapping *m)
{
    unsigned long start, end, offset;
    char dev[16];
    int n;

    m->name[0] = 0;
    n = sscanf(line, "%lx-%lx %4s %lx %15s %lu %127[^\n]", &start, &end,
               m->perms, &offset, dev, &m->inode, m->name);
    m->start = start;
    m->end = end;
    return n >= 6;
}

static const char *mapping_refused(const Mapping *m)
{
    if (m->inode || m->perms[3] != 'p') {
        return m->perms[3] == 's' ? "the memory is shared"
                                  : "the memory is file-backed";
    }
    if (strncmp(m->perms, "rw-", 3)) {
        return "the memory is not mapped for reading and writing only";
    }
    if (g_str_has_prefix(m->name, "[heap") ||
        g_str_has_prefix(m->name, "[stack") ||
        g_str_has_prefix(m->name, "[v")) {
        return "the memory is the heap or a stack";
    }
    return NULL;
}

static const char *flag_refused(const char *flag)
{
    static const char *const no[][2] = {
        { "sh", "the memory is shared" },
        { "ht", "the memory is hugetlb" },
        { "lo", "the memory is locked" },
        { "io", "the memory is of a device" },
        { "pf", "the memory is of a device" },
        { "wf", "the memory is wiped on fork" },
        { "mt", "the memory has tags (MTE), which are not compared" },
        { "um", "the memory is watched by another userfaultfd" },
        { "uw", "the memory is watched by another userfaultfd" },
        { "ui", "the memory is watched by another userfaultfd" },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(no); i++) {
        if (!strcmp(flag, no[i][0])) {
            return no[i][1];
        }
    }
    return NULL;
}

static const struct {
    const char *flag;
    int advice;
} flags_kept[] = {
    { "dc", MADV_DONTFORK },
    { "dd", MADV_DONTDUMP },
    { "hg", MADV_HUGEPAGE },
    { "nh", MADV_NOHUGEPAGE },
};

/* Keeps the attributes of the first mapping; the others must have them. */
static const char *flags_keep(KsmRegion *r, const gchar *const *flags)
{
    for (unsigned i = 0; i < G_N_ELEMENTS(flags_kept); i++) {
        bool set = g_strv_contains(flags, flags_kept[i].flag), had = false;

        for (unsigned k = 0; k < r->n_advice; k++) {
            had |= r->advice[k] == flags_kept[i].advice;
        }
        if (!r->seen_flags && set) {
            r->advice[r->n_advice++] = flags_kept[i].advice;
        } else if (r->seen_flags && set != had && i < 2) {
            return "its parts differ in MADV_DONTFORK or MADV_DONTDUMP";
        }
    }
    if (!r->seen_flags && g_strv_contains(flags, "nr")) {
        r->map_flags = MAP_NORESERVE;
    }
    r->seen_flags = true;
    return NULL;
}

static const char *flags_look(KsmRegion *r, const char *line)
{
    g_auto(GStrv) flags = g_strsplit(line + strlen("VmFlags: "), " ", -1);
    const char *why = NULL;

    for (unsigned i = 0; flags[i] && !why; i++) {
        why = flag_refused(flags[i]);
    }
    return why ? why : flags_keep(r, (const gchar *const *)flags);
}

/* How far a walk of /proc/self/smaps has come. */
typedef struct Walk {
    KsmRegion *r;
    uintptr_t at;       /* the range is looked at up to here */
    bool inside;        /* the mapping at hand is in it */
    bool past;          /* ... is behind it */
    const char *why;
} Walk;

static void walk_line(Walk *w, const char *line)
{
    uintptr_t end = (uintptr_t)w->r->addr + w->r->len;
    Mapping m;

    if (g_str_has_prefix(line, "VmFlags:")) {
        w->why = w->inside ? flags_look(w->r, line) : NULL;
    } else if (g_ascii_isxdigit(*line) && mapping_parse(line, &m)) {
        w->inside = m.start < end && m.end > w->at;
        w->past = m.start >= end || (w->inside && m.start > w->at);
        if (w->inside && !w->past) {
            w->why = mapping_refused(&m);
            w->at = m.end;
        }
    }
}

/*
 * Why the range cannot be registered, or NULL.  The file is read no further
 * than needed: the kernel walks the page tables of all that is read.
 */
static const char *region_refused(KsmRegion *r)
{
    g_autoptr(GString) text = g_string_new(NULL);
    Walk w = { .r = r, .at = (uintptr_t)r->addr };
    int fd = prim.open_read("/proc/self/smaps");
    char buf[4096], *eol;
    ssize_t n = -1;

    while (fd >= 0 && !w.why && !w.past &&
           (n = prim.read(fd, buf, sizeof(buf))) > 0) {
        g_string_append_len(text, buf, n);
        while (!w.why && !w.past && (eol = strchr(text->str, '\n'))) {
            *eol = 0;
            walk_line(&w, text->str);
            g_string_erase(text, 0, eol + 1 - text->str);
        }
    }
    if (fd >= 0) {
        prim.close(fd);
    }
    if (n < 0) {
        return "/proc/self/smaps cannot be read";
    }
    return w.why ? w.why : w.at < (uintptr_t)r->addr + r->len
                 ? "part of the memory is not mapped" : NULL;
}

static void *meta_map(KsmRegion *r, size_t len)
{
    len = ROUND_UP_TO(len, PAGE_BYTES);
    r->meta_bytes += len;
    return prim.map(NULL, len, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void meta_unmap(void *p, size_t len)
{
    if (p) {
        prim.unmap(p, ROUND_UP_TO(len, PAGE_BYTES));
    }
}

static int region_meta(KsmRegion *r)
{
    size_t first = (r->addr - r->base) / PAGE_BYTES;
    size_t last = first + r->len / PAGE_BYTES;

    r->tag = meta_map(r, r->n_pages * sizeof(*r->tag));
    r->state = meta_map(r, r->n_pages);
    r->history = meta_map(r, r->n_pages);
    r->chunk = meta_map(r, r->n_chunks * sizeof(*r->chunk));
    if (!r->tag || !r->state || !r->history || !r->chunk) {
        return -ENOMEM;
    }
    /* read before it is written, each page of it would cost two faults */
    prim.advise(r->state, ROUND_UP_TO(r->n_pages, PAGE_BYTES),
                MADV_POPULATE_WRITE);
    r->count[PAGE_NEW] = r->n_pages;
    for (size_t i = 0; i < r->n_chunks; i++) {
        r->chunk[i].fresh = CHUNK_PAGES;
        r->chunk[i].flags = CHUNK_VISIT;
    }
    for (size_t i = 0; i < r->n_pages; i++) {
        if (i < first || i >= last) {
            page_set(r, i, PAGE_OUTSIDE);
        } else {
            page_mark(r, i, true);
        }
    }
    return 0;
}

KsmRegion *region_new(KsmEngine *e, void *addr, size_t len, int node,
                      const KsmRegionOps *ops, void *opaque, GError **error)
{
    KsmRegion *r = g_new0(KsmRegion, 1);
    uintptr_t base = (uintptr_t)addr / CHUNK_BYTES * CHUNK_BYTES;
    uintptr_t end = ROUND_UP_TO((uintptr_t)addr + len, CHUNK_BYTES);
    const char *why;

    r->engine = e;
    r->addr = addr;
    r->len = len;
    r->base = (char *)base;
    r->n_chunks = (end - base) / CHUNK_BYTES;
    r->n_pages = r->n_chunks * CHUNK_PAGES;
    r->node = node;
    r->salt = (uint32_t)(node + 1) * UINT32_C(0x9e3779b1);
    r->ops = ops;
    r->opaque = opaque;
    r->policy = -1;
    why = region_refused(r);
    if (why) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_INVALID,
                    "%p, %zu bytes, cannot be merged: %s", addr, len, why);
        region_free(r);
        return NULL;
    }
    if (prim.policy_get(addr, &r->policy, r->policy_mask,
                        sizeof(r->policy_mask) * 8) < 0) {
        r->policy = -1;
    }
    if (region_meta(r) < 0) {
        g_set_error(error, KSM_ERROR, KSM_ERROR_RESOURCES,
                    "no memory for the state of %zu pages", r->n_pages);
        region_free(r);
        return NULL;
    }
    return r;
}

void region_free(KsmRegion *r)
{
    meta_unmap(r->tag, r->n_pages * sizeof(*r->tag));
    meta_unmap(r->state, r->n_pages);
    meta_unmap(r->history, r->n_pages);
    meta_unmap(r->chunk, r->n_chunks * sizeof(*r->chunk));
    g_free(r);
}

void region_check(KsmRegion *r)
{
    uint64_t count[PAGE_STATES] = { 0 };
    uint64_t sum[KSM_REASON_MAX] = { 0 };
    uint64_t written = 0, lazy = 0;

    for (size_t i = 0; i < r->n_chunks; i++) {
        unsigned fresh = 0, marked = 0, gain = 0, mapped = 0, broken = 0;
        unsigned given = 0, again = 0;

        for (size_t p = i * CHUNK_PAGES; p < (i + 1) * CHUNK_PAGES; p++) {
            PageState s = page_state(r, p);

            count[s]++;
            fresh += s == PAGE_NEW;
            gain += state_gains(s);
            mapped += state_maps(s);
            broken += s == PAGE_BROKEN;
            given += s == PAGE_GIVEN;
            again += s == PAGE_BROKEN && (r->state[p] & PAGE_AGAIN);
            g_assert(page_is_mapped(r, p) || !(r->state[p] & PAGE_JOINED));
            marked += !!(r->state[p] & PAGE_WRITTEN);
            written += s == PAGE_NEW && (r->state[p] & PAGE_WRITTEN);
            g_assert(s != PAGE_MERGED ||
                     pool_users(&r->engine->pool, r->tag[p]) > 0);
        }
        sum[r->chunk[i].why_not] += gain;
        lazy += r->chunk[i].lazy;
        g_assert(r->engine->dir[r->chunk[i].id].region == r);
        g_assert(r->engine->dir[r->chunk[i].id].chunk == i);
        g_assert(r->chunk[i].fresh == fresh);
        g_assert(r->chunk[i].written == marked);
        g_assert(r->chunk[i].gain == gain);
        g_assert(r->chunk[i].mapped == mapped);
        g_assert(r->chunk[i].broken == broken);
        g_assert(r->chunk[i].given == given);
        g_assert(r->chunk[i].again == again);
    }
    for (unsigned s = 0; s < PAGE_STATES; s++) {
        g_assert(r->count[s] == count[s]);
    }
    g_assert(r->n_written == written);
    g_assert(r->lazy == lazy);
    g_assert(!memcmp(r->gain, sum, sizeof(sum)));
}
