/*
 * libksm tests: which memory may be registered, and what is kept of it
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "memory/admit.h"
#include "memory/attr.h"
#include "util.h"

/*
 * Regions of made-up memory: /proc/self/smaps describes it, and all that is
 * done to it is noted.
 */
#define MADE ((char *)(CHUNK * 1000 + 100 * PAGE))
#define MADE_PAGES 1000u

static struct {
    GString *smaps;         /* NULL: it cannot be opened */
    size_t piece;           /* read at once */
    int read_ret;           /* when all is read */
    int files;
    int64_t bytes;          /* had for the region's own state */
    unsigned maps, fails;   /* this one fails, from 1 */
    int policy, policy_ret;
    char log[512];          /* what is done to the memory */
    unsigned map_fails;     /* so often */
    int hole;               /* what the kernel says then */
} made;

/* @first, @end: pages from the region's start. */
static void made_mapping(int first, int end, const char *perms_to_name,
                         const char *flags)
{
    g_string_append_printf(made.smaps, "%lx-%lx %s\nRss: 4 kB\n"
                           "VmFlags: %s%s\n",
                           (unsigned long)(MADE + first * (ssize_t)PAGE),
                           (unsigned long)(MADE + end * (ssize_t)PAGE),
                           perms_to_name, flags, " ");
}

static int made_open(const char *path)
{
    g_assert(!strcmp(path, "/proc/self/smaps"));
    made.files += made.smaps != NULL;
    return made.smaps ? 4711 : -EACCES;
}

static int made_close(int fd)
{
    g_assert(fd == 4711);
    made.files--;
    return 0;
}

static ssize_t made_read(int fd, void *buf, size_t len)
{
    size_t n = MIN(MIN(len, made.piece), made.smaps->len);

    memcpy(buf, made.smaps->str, n);
    g_string_erase(made.smaps, 0, n);
    return n ? n : made.read_ret;
}

static void made_note(const char *format, ...) G_GNUC_PRINTF(1, 2);

static void made_note(const char *format, ...)
{
    size_t len = strlen(made.log);
    va_list args;

    va_start(args, format);
    g_vsnprintf(made.log + len, sizeof(made.log) - len, format, args);
    va_end(args);
}

static bool is_made(const void *addr)
{
    return (char *)addr >= MADE && (char *)addr < MADE + MADE_PAGES * PAGE;
}

static void *made_map(void *addr, size_t len, int prot, int flags, int fd,
                      off_t offset)
{
    void *map = NULL;

    if (!is_made(addr)) {
        if (++made.maps != made.fails) {
            map = prim_real.map(addr, len, prot, flags, fd, offset);
            made.bytes += len;
        }
        return map;
    }
    g_assert(prot == (PROT_READ | PROT_WRITE));
    g_assert((flags & ~MAP_NORESERVE) ==
             (MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED));
    made_note(flags & MAP_NORESERVE ? "map-nr " : "map ");
    if (made.map_fails) {
        made.map_fails--;
        return NULL;
    }
    return addr;
}

static int made_unmap(void *addr, size_t len)
{
    g_assert(len % PAGE == 0);
    made.bytes -= len;
    return prim_real.unmap(addr, len);
}

static int made_advise(void *addr, size_t len, int advice)
{
    if (!is_made(addr)) {
        return prim_real.advise(addr, len, advice);
    }
    if (advice == MADV_NORMAL) {
        made_note("look ");
        return made.hole;
    }
    g_assert(addr == MADE + 7 * PAGE && len == 3 * PAGE);
    made_note("%s ", advice == MADV_DONTFORK ? "dc"
                     : advice == MADV_DONTDUMP ? "dd"
                     : advice == MADV_HUGEPAGE ? "hg"
                     : advice == MADV_NOHUGEPAGE ? "nh" : "?");
    return 0;
}

static int made_policy_get(void *addr, int *mode, unsigned long *mask,
                           size_t bits)
{
    g_assert(addr == MADE && bits == 1024);
    *mode = made.policy;
    mask[0] = 5;
    mask[15] = 6;
    return made.policy_ret;
}

static int made_policy_set(void *addr, size_t len, int mode,
                           const unsigned long *mask, size_t bits)
{
    g_assert(addr == MADE + 7 * PAGE && len == 3 * PAGE && bits == 1024);
    g_assert(mask[0] == 5 && mask[1] == 0 && mask[15] == 6);
    made_note("policy-%d ", mode);
    return 0;
}

static void made_pause(unsigned us)
{
    made_note("pause ");
}

static void made_owner(void *opaque, void *addr, size_t len)
{
    g_assert(opaque == &made);
    g_assert(addr == MADE + 7 * PAGE && len == 3 * PAGE);
    made_note("owner ");
}

static void made_start(void)
{
    memset(&made, 0, sizeof(made));
    made.smaps = g_string_new(NULL);
    made.piece = SIZE_MAX;
    prim.open_read = made_open;
    prim.close = made_close;
    prim.read = made_read;
    prim.map = made_map;
    prim.unmap = made_unmap;
    prim.advise = made_advise;
    prim.policy_get = made_policy_get;
    prim.policy_set = made_policy_set;
    prim.pause = made_pause;
}

static void made_end(KsmRegion *r)
{
    if (r) {
        region_fini(r);
        g_free(r);
    }
    if (made.smaps) {
        g_string_free(made.smaps, true);
    }
    g_assert(made.files == 0 && made.bytes == 0);
    prim = prim_real;
}

/* Of @n pages; NULL if refused because of @why. */
static KsmRegion *made_region(size_t n, const char *why)
{
    static const KsmRegionOps ops = { .mapped = made_owner };
    KsmRegion *r = g_new0(KsmRegion, 1);
    const char *refused;

    region_init(r, MADE, n * PAGE, -1, &ops, &made);
    refused = admit(r);
    if (!refused && region_alloc(r) < 0) {
        refused = "no memory";
    }
    g_assert(!refused == !why);
    g_assert(!why || strstr(refused, why));
    if (!refused) {
        return r;
    }
    region_fini(r);
    g_free(r);
    return NULL;
}

#define ANON "rw-p 00000000 00:00 0 "
#define USUAL "rd wr mr mw me ac"

/* One mapping of the region, pages 0 to 15, and its neighbours. */
static void test_mapping(void)
{
    static const struct {
        const char *perms_to_name, *flags, *why;
    } cases[] = {
        { ANON, USUAL, NULL },
        { ANON, USUAL " sd dc dd hg nr", NULL },
        { ANON " [anon:ram]", USUAL, NULL },
        { "rw-p 00001000 00:00 0", USUAL, NULL },
        { "rw-s 00000000 00:01 9   /dev/zero (deleted)", USUAL, "is shared" },
        { "rw-s 00000000 00:00 0", USUAL, "is shared" },
        { "rw-p 00000000 08:01 77  /a/file", USUAL, "file-backed" },
        { "r--p 00000000 00:00 0", USUAL, "reading and writing" },
        { "rwxp 00000000 00:00 0", USUAL, "reading and writing" },
        { "---p 00000000 00:00 0", USUAL, "reading and writing" },
        { ANON " [heap]", USUAL, "heap or a stack" },
        { ANON " [stack]", USUAL, "heap or a stack" },
        { ANON " [stack:17]", USUAL, "heap or a stack" },
        { ANON " [vvar]", USUAL, "heap or a stack" },
        { ANON, USUAL " sh", "is shared" },
        { ANON, "ht " USUAL, "hugetlb" },
        { ANON, USUAL " lo sd", "locked" },
        { ANON, USUAL " io", "device" },
        { ANON, USUAL " pf", "device" },
        { ANON, USUAL " wf", "wiped" },
        { ANON, USUAL " um", "userfaultfd" },
        { ANON, USUAL " uw", "userfaultfd" },
        { ANON, USUAL " ui", "userfaultfd" },
    };

    for (unsigned i = 0; i < 2 * G_N_ELEMENTS(cases); i++) {
        unsigned k = i / 2;

        made_start();
        /* a byte at a time, or all at once */
        made.piece = i % 2 ? 1 : SIZE_MAX;
        made_mapping(-9, -8, "rw-s 00000000 00:01 9  /x", USUAL " sh");
        made_mapping(-8, 0, "r--s 00000000 00:01 9  /x", USUAL " lo");
        made_mapping(0, 16, cases[k].perms_to_name, cases[k].flags);
        made_mapping(16, 20, "r--s 00000000 00:01 9  /x", USUAL " lo");
        made_end(made_region(16, cases[k].why));
    }
}

/* Mappings that cover pages 0 to 15 must be alike. */
static void test_mappings(void)
{
    static const struct {
        int from[2], to[2];
        const char *flags[2], *why;
    } cases[] = {
        { { 0, 8 }, { 8, 16 }, { "", "" }, NULL },
        { { -3, 8 }, { 8, 20 }, { "", "" }, NULL },
        { { -3, 20 }, { 20, 30 }, { "", "sh" }, NULL },
        { { 0, 9 }, { 8, 16 }, { "", "" }, "not mapped" },
        { { 1, 8 }, { 8, 16 }, { "", "" }, "not mapped" },
        { { 0, 8 }, { 8, 15 }, { "", "" }, "not mapped" },
        { { -9, 16 }, { 0, 20 }, { "", "" }, "not mapped" },
        { { -9, -8 }, { -8, -7 }, { "", "" }, "not mapped" },
        { { 16, 20 }, { 20, 21 }, { "", "" }, "not mapped" },
        { { 0, 8 }, { 8, 16 }, { "", "lo" }, "locked" },
        { { 0, 8 }, { 8, 16 }, { "lo", "" }, "locked" },
        { { 0, 8 }, { 8, 16 }, { "dc", "" }, "differ" },
        { { 0, 8 }, { 8, 16 }, { "", "dc" }, "differ" },
        { { 0, 8 }, { 8, 16 }, { "", "dd" }, "differ" },
        { { 0, 8 }, { 8, 16 }, { "dd", "" }, "differ" },
        { { 0, 8 }, { 8, 16 }, { "dc dd", "dd dc hg" }, NULL },
        { { 0, 8 }, { 8, 16 }, { "nh", "" }, NULL },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        made_start();
        for (unsigned k = 0; k < 2; k++) {
            made_mapping(cases[i].from[k], cases[i].to[k], ANON,
                         cases[i].flags[k]);
        }
        made_end(made_region(16, cases[i].why));
    }
}

/* The file cannot be opened or read, or ends too early. */
static void test_smaps_fails(void)
{
    made_start();
    g_string_free(made.smaps, true);
    made.smaps = NULL;
    made_end(made_region(16, "cannot be read"));
    made_start();
    made.read_ret = -EIO;
    made_end(made_region(16, "cannot be read"));
    made_start();
    made_end(made_region(16, "not mapped"));
    made_start();
    made_mapping(0, 16, ANON, USUAL);
    made.read_ret = -EIO;
    made_end(made_region(16, "cannot be read"));
    /* it is not read beyond the region */
    made_start();
    made.piece = 1;
    made_mapping(0, 16, ANON, USUAL);
    made_mapping(16, 17, ANON, USUAL);
    g_string_append(made.smaps, "garbage");
    made.read_ret = -EIO;
    made_end(made_region(16, NULL));
}

/* What is mapped anew has the old attributes. */
static void test_attributes(void)
{
    static const struct {
        const char *flags, *behind;
        int policy, policy_ret;
        const char *own, *shared;
    } cases[] = {
        { USUAL, USUAL " nr hg", 0, 0, "map owner ", "owner " },
        { "nr " USUAL, USUAL, 0, 0, "map-nr owner ", "owner " },
        { "dc", "dc nh nr", 0, -ENOSYS, "map dc owner ", "dc owner " },
        { "hg dd nr", "dd", 3, -ENOSYS, "map-nr dd hg owner ",
          "dd owner " },
        { "nh dd dc", "hg dc dd", 1, 0, "map dc dd nh policy-1 owner ",
          "dc dd owner " },
        { USUAL, USUAL, 3, 0, "map policy-3 owner ", "owner " },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        KsmRegion *r;

        made_start();
        made.policy = cases[i].policy;
        made.policy_ret = cases[i].policy_ret;
        made_mapping(0, 16, ANON, cases[i].flags);
        /* only the first mapping's are asked for */
        made_mapping(16, 32, ANON, cases[i].behind);
        r = made_region(32, NULL);
        g_assert(attr_map_anonymous(r, page_addr(r, r->n_pages - 512 + 107),
                                    3 * PAGE) == 0);
        g_assert(!strcmp(made.log, cases[i].own));
        made.log[0] = 0;
        attr_give(r, MADE + 7 * PAGE, 3 * PAGE, ATTR_SHARED);
        g_assert(!strcmp(made.log, cases[i].shared));
        made_end(r);
    }
}

/* A failed mapping is repeated for as long as there is a hole. */
static void test_map_fails(void)
{
    static const struct {
        unsigned fails;
        int hole, ret;
        const char *log;
    } cases[] = {
        { 1, -ENOMEM, 0, "map map owner " },
        { 4, 0, 0, "map map map map map owner " },
        { 5, 0, -ENOMEM, "map map map map map look " },
        { 6, -EINVAL, -ENOMEM, "map map map map map look " },
        { 5, -ENOMEM, 0, "map map map map map look pause map owner " },
        { 7, -ENOMEM, 0, "map map map map map look pause map look pause "
                         "map look pause map owner " },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        KsmRegion *r;

        made_start();
        made_mapping(0, 16, ANON, USUAL);
        r = made_region(16, NULL);
        made.map_fails = cases[i].fails;
        made.hole = cases[i].hole;
        g_assert(attr_map_anonymous(r, page_addr(r, 107), 3 * PAGE) ==
                 cases[i].ret);
        g_assert(!strcmp(made.log, cases[i].log));
        made_end(r);
    }
}

/* All pages are holes, except outside; without memory, none. */
static void test_state(void)
{
    unsigned maps = 1;

    for (unsigned fails = 0; fails <= maps; fails++) {
        KsmRegion *r;

        made_start();
        made.fails = fails;
        made_mapping(0, MADE_PAGES, ANON, USUAL);
        r = made_region(MADE_PAGES, fails ? "no memory" : NULL);
        if (r) {
            maps = made.maps;
            g_assert(maps == 4);
            g_assert(r->n_chunks == 3 && r->base == MADE - 100 * PAGE);
            g_assert(r->count[PAGE_HOLE] == MADE_PAGES);
            g_assert(r->count[PAGE_OUTSIDE] == 3 * 512 - MADE_PAGES);
            g_assert(page_state(r, 99) == PAGE_OUTSIDE);
            g_assert(page_state(r, 100) == PAGE_HOLE);
            g_assert(page_state(r, 1099) == PAGE_HOLE);
            g_assert(page_state(r, 1100) == PAGE_OUTSIDE);
            g_assert(r->n_written == 0 && region_held(r) == 0);
            g_assert(!r->chunk[0].held && !r->chunk[2].held);
            g_assert(!chunk_is_bare(r, 0) && chunk_is_bare(r, 1));
            /* tags, states and history of pages; what chunks have */
            g_assert(made.bytes == 5 * 4096);
            g_assert(r->meta_bytes > 0 && r->meta_bytes <= made.bytes);
        }
        made_end(r);
    }
}

/* Bytes of the range that have memory. */
static size_t resident(const void *addr, size_t len)
{
    size_t pages = (len + PAGE - 1) / PAGE, n = 0;
    g_autofree unsigned char *vec = g_malloc(pages);

    g_assert(mincore((void *)addr, len, vec) == 0);
    for (size_t i = 0; i < pages; i++) {
        n += vec[i] & 1;
    }
    return n * PAGE;
}

/* ... of what is kept of the region's pages. */
static size_t pages_resident(const KsmRegion *r)
{
    return resident(r->tag, r->n_pages * sizeof(*r->tag)) +
           resident(r->state, r->n_pages) + resident(r->history, r->n_pages);
}

static size_t chunks_resident(const KsmRegion *r)
{
    return resident(r->group, r->n_groups * sizeof(*r->group) +
                              r->n_chunks * sizeof(*r->chunk));
}

#define HUGE_CHUNKS (GROUP_CHUNKS * 1024u)      /* 128 GiB */

/* Of nothing that is there, whole chunks. */
static KsmRegion *huge_region(void)
{
    KsmRegion *r = g_new0(KsmRegion, 1);

    region_init(r, (char *)(CHUNK * 4096), HUGE_CHUNKS * CHUNK, -1, NULL, NULL);
    r->tagged = true;
    g_assert(region_alloc(r) == 0);
    return r;
}

/* Memory is had for chunks of which something is known, and given back. */
static void test_bare(void)
{
    /* the same page of memory as another one's, or none that anybody has */
    static const size_t chunks[] = { 3, 4, 63, 64, 5000, HUGE_CHUNKS - 1 };
    KsmRegion *r = huge_region();
    size_t none = r->meta_bytes;

    g_assert(none < 64 * 1024);
    g_assert(pages_resident(r) == 0 && chunks_resident(r) == 0);
    g_assert(region_known(r, 0, r->n_chunks) == r->n_chunks);
    page_set(r, 1000 * CHUNK_PAGES, PAGE_HOLE);
    g_assert(pages_resident(r) == 0 && chunks_resident(r) <= 8 * PAGE);
    for (unsigned i = 0; i < G_N_ELEMENTS(chunks); i++) {
        page_set(r, chunks[i] * CHUNK_PAGES + i, PAGE_NEW);
        page_mark(r, chunks[i] * CHUNK_PAGES + i, true);
        g_assert(region_known(r, i ? chunks[i - 1] + 1 : 0, r->n_chunks) ==
                 chunks[i]);
    }
    /* states and history: 3 and 4 share a page; tags: none do */
    g_assert(pages_resident(r) == (5 + 5 + 6) * PAGE);
    g_assert(r->meta_bytes - none >= pages_resident(r));
    g_assert(r->meta_bytes - none <= pages_resident(r) + chunks_resident(r));
    g_assert(region_held(r) == G_N_ELEMENTS(chunks));
    r->tag[4 * CHUNK_PAGES] = r->history[4 * CHUNK_PAGES] = 7;
    chunk_forget(r, 4);
    g_assert(!chunk_is_bare(r, 4) && r->tag[4 * CHUNK_PAGES] == 7);
    for (unsigned i = 0; i < G_N_ELEMENTS(chunks); i++) {
        size_t page = chunks[i] * CHUNK_PAGES + i;

        page_set(r, page, PAGE_HOLE);
        r->chunk[chunks[i]].flags |= i % 2 ? CHUNK_ARMED | CHUNK_SEEN : 0;
        chunk_forget(r, chunks[i]);
        g_assert(chunk_is_bare(r, chunks[i]));
        page_set(r, page, PAGE_HOLE);
    }
    g_assert(pages_resident(r) == 0 && r->meta_bytes == none);
    g_assert(region_known(r, 0, r->n_chunks) == r->n_chunks);
    g_assert(region_held(r) == 0 && r->n_written == 0);
    region_fini(r);
    g_free(r);
}

/* What is known of an empty chunk, or is to be done there, is kept. */
static void test_kept(void)
{
    static const uint16_t flags[] = {
        CHUNK_VISIT, CHUNK_QUEUED, CHUNK_PARKED, CHUNK_RIPENING, CHUNK_TAIL,
        CHUNK_BLIND, CHUNK_CHECK,
    };
    KsmRegion *r;

    made_start();
    made_mapping(0, MADE_PAGES, ANON, USUAL);
    r = made_region(MADE_PAGES, NULL);
    for (unsigned i = 0; i < G_N_ELEMENTS(flags); i++) {
        chunk_know(r, 1);
        r->chunk[1].flags = flags[i];
        chunk_forget(r, 1);
        g_assert(!chunk_is_bare(r, 1) && r->chunk[1].flags == flags[i]);
        r->chunk[1].flags = 0;
    }
    chunk_want(r, 1);
    g_assert(r->chunk[1].flags == CHUNK_VISIT && !chunk_is_live(r, 1));
    /* what only tells of pages that were there is not */
    r->chunk[1].flags = CHUNK_ARMED | CHUNK_SEEN | CHUNK_HUGE | CHUNK_WOKEN;
    r->chunk[1].hot = r->chunk[1].backoff = r->chunk[1].late = 3;
    chunk_forget(r, 1);
    g_assert(chunk_is_bare(r, 1) && !r->chunk[1].flags && !r->chunk[1].hot);
    /* the others have pages that are outside */
    chunk_forget(r, 0);
    chunk_forget(r, 2);
    g_assert(chunk_is_live(r, 0) && chunk_is_live(r, 2));
    g_assert(page_state(r, 0) == PAGE_OUTSIDE);
    page_set(r, 600, PAGE_UNIQUE);
    region_check(r);
    page_set(r, 600, PAGE_HOLE);
    g_assert(chunk_is_live(r, 1));
    region_check(r);
    made_end(r);
}

static void made_and_refused(void *opaque)
{
    made_start();
    made_mapping(0, 16, ANON, USUAL);
    made_end(made_region(16, NULL));
    made_start();
    made_mapping(0, 16, ANON, "lo");
    made_end(made_region(16, "locked"));
}

/* No refused or former region is left on the heap. */
static void test_leaks(void)
{
    g_assert(!util_leaks(made_and_refused, NULL, 100));
}

static void test_check(void)
{
    if (g_test_subprocess()) {
        KsmRegion r = { 0 };

        region_init(&r, MADE, MADE_PAGES * PAGE, -1, NULL, NULL);
        if (region_alloc(&r) < 0) {
            exit(0);
        }
        region_check(&r);
        r.lazy++;
        region_check(&r);
        return;
    }
    g_test_trap_subprocess(NULL, 0, 0);
    g_test_trap_assert_failed();
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/region/mapping", test_mapping);
    g_test_add_func("/region/mappings", test_mappings);
    g_test_add_func("/region/smaps-fails", test_smaps_fails);
    g_test_add_func("/region/attributes", test_attributes);
    g_test_add_func("/region/map-fails", test_map_fails);
    g_test_add_func("/region/state", test_state);
    g_test_add_func("/region/bare", test_bare);
    g_test_add_func("/region/kept", test_kept);
    g_test_add_func("/region/leaks", test_leaks);
    g_test_add_func("/region/check", test_check);
    return g_test_run();
}
