/*
 * libksm tests: hosts and memory that cannot be merged, and attributes that
 * the owner changes
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Other machines are played by what prim says of this one.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "prim.h"
#include "util.h"

static const char *machine;
static size_t page_size;

static const char *fake_machine(void)
{
    return machine;
}

static size_t fake_page_size(void)
{
    return page_size;
}

/* Neither a check nor an engine goes through, and both say why. */
static void check_refused(const char *part)
{
    g_autoptr(GError) error = NULL;
    g_autoptr(GError) engine_error = NULL;
    KsmConfig config;

    ksm_config_init(&config);
    g_assert(!ksm_supported(&error));
    g_test_message("%s", error->message);
    g_assert(g_error_matches(error, KSM_ERROR, KSM_ERROR_UNSUPPORTED));
    g_assert(strstr(error->message, part));
    g_assert(!ksm_engine_new(&config, &engine_error));
    g_assert(g_str_equal(engine_error->message, error->message));
}

static void test_machine(void)
{
    bool supported;

    prim.machine = fake_machine;
    machine = "s390x";
    check_refused("storage keys");
    machine = "ppc64";
    check_refused("not been tested on ppc64");
    machine = "this architecture";
    check_refused("needs x86_64 or aarch64");
    prim.machine = prim_real.machine;
    supported = ksm_supported(NULL);
    machine = "aarch64";
    prim.machine = fake_machine;
    g_assert(ksm_supported(NULL) == supported);
    prim.machine = prim_real.machine;
}

static void test_page_size(void)
{
    prim.page_size = fake_page_size;
    page_size = 65536;
    check_refused("pages are of 65536 bytes");
    page_size = 16384;
    check_refused("pages of 4096 bytes");
    prim.page_size = prim_real.page_size;
}

/* /proc/self/smaps as it would be if the kernel set a flag of the memory. */
static const char *extra_flag;

static int smaps_with_flag(const char *path)
{
    g_autofree char *text = NULL;
    g_auto(GStrv) parts = NULL;
    g_autofree char *with = NULL;
    g_autofree char *joined = NULL;
    int fd;

    if (!g_str_equal(path, "/proc/self/smaps")) {
        return prim_real.open_read(path);
    }
    g_assert(g_file_get_contents(path, &text, NULL, NULL));
    parts = g_strsplit(text, "VmFlags:", -1);
    with = g_strdup_printf("VmFlags: %s", extra_flag);
    joined = g_strjoinv(with, parts);
    fd = memfd_create("smaps", MFD_CLOEXEC);
    g_assert(write(fd, joined, strlen(joined)) == (ssize_t)strlen(joined));
    g_assert(lseek(fd, 0, SEEK_SET) == 0);
    return fd;
}

/* Tags of memory (arm64) are no part of its bytes. */
static void test_tags(void)
{
    static const struct {
        const char *flag;
        const char *refused;    /* part of why, or NULL */
    } cases[] = {
        { "mt", "has tags" },
        { "me", NULL },
    };
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM);
    Mem *m;

    if (!e) {
        return;
    }
    m = mem_new(1024, 0, MEM_SMALL);
    for (unsigned i = 0; i < G_N_ELEMENTS(cases); i++) {
        g_autoptr(GError) error = NULL;
        KsmRegion *r;

        extra_flag = cases[i].flag;
        prim.open_read = smaps_with_flag;
        r = ksm_region_add(e, m->addr, m->pages * PAGE, -1, NULL, NULL,
                           &error);
        prim.open_read = prim_real.open_read;
        g_assert(!r == !!cases[i].refused);
        if (r) {
            util_remove(r);
        } else {
            g_assert(strstr(error->message, cases[i].refused));
        }
    }
    mem_free(m);
    ksm_engine_free(e);
}

/* Mappings of the region, and how many of them core dumps have not. */
static unsigned not_dumped(const Mem *m, unsigned *all)
{
    uintptr_t start = (uintptr_t)m->addr, end = start + m->pages * PAGE;
    FILE *f = fopen("/proc/self/smaps", "re");
    unsigned long from, to;
    unsigned flagged = 0;
    bool inside = false;
    char line[512];

    g_assert(f);
    *all = 0;
    while (fgets(line, sizeof(line), f)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) {
            inside = from < end && to > start;
        } else if (inside && g_str_has_prefix(line, "VmFlags:")) {
            (*all)++;
            flagged += strstr(line, " dd") != NULL;
        }
    }
    fclose(f);
    return flagged;
}

static bool owner_dumps;

static void owner_mapped(void *opaque, void *addr, size_t len)
{
    g_assert(madvise(addr, len, owner_dumps ? MADV_DODUMP
                                            : MADV_DONTDUMP) == 0);
}

/*
 * The owner has changed its mind on core dumps since it added the memory: it
 * has the last word on what is mapped anew, merged, discarded or unmerged.
 */
static void test_mapped(void)
{
    static const KsmRegionOps ops = { .mapped = owner_mapped };
    KsmEngine *e = util_engine(KSM_SCOPE_VM, KSM_DIRTY_CHECKSUM);
    KsmRegion *r;
    unsigned all;
    Mem *m;

    for (int dumps = 0; e && dumps < 2; dumps++) {
        m = mem_new(2048, 0, MEM_SMALL);
        mem_fill_run(m, 0, 1024, 1, 1);
        mem_fill_run(m, 1024, 1024, 1, 1);
        owner_dumps = !dumps;
        owner_mapped(NULL, m->addr, m->pages * PAGE);
        r = util_add(e, m, &ops);
        owner_dumps = dumps;
        owner_mapped(NULL, m->addr, m->pages * PAGE);
        util_passes(e, 6);
        g_assert(util_stats(e).pages_sharing >= 1000);
        g_assert(ksm_discard(r, 10 * PAGE, 20 * PAGE) == 0);
        mem_gone(m, 10, 20);
        g_assert(ksm_unmerge(r, 100 * PAGE, 300 * PAGE) == 0);
        g_assert(not_dumped(m, &all) == (dumps ? 0 : all));
        g_assert(all > 2);
        mem_check(m);
        util_remove(r);
        mem_free(m);
    }
    if (e) {
        ksm_engine_free(e);
    }
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/host/machine", test_machine);
    g_test_add_func("/host/page-size", test_page_size);
    g_test_add_func("/host/tags", test_tags);
    g_test_add_func("/host/mapped", test_mapped);
    return g_test_run();
}
