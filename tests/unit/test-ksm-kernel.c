/*
 * Tests of hw/mem/ksm-kernel.c on made-up files
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include <sys/mman.h>
#include "../../hw/mem/ksm-kernel.h"

static char *dir_new(void)
{
    return g_dir_make_tmp("ksm-kernel-XXXXXX", NULL);
}

static void file_write(const char *dir, const char *name, const char *text)
{
    g_autofree char *path = g_build_filename(dir, name, NULL);

    g_assert_true(g_file_set_contents(path, text, -1, NULL));
}

static void dir_free(char *path)
{
    g_autoptr(GDir) dir = g_dir_open(path, 0, NULL);
    const char *name;

    while ((name = g_dir_read_name(dir))) {
        g_autofree char *file = g_build_filename(path, name, NULL);

        unlink(file);
    }
    rmdir(path);
    g_free(path);
}

static void assert_value(KsmKernelValue value, int64_t expected)
{
    g_assert_true(value.known);
    g_assert_cmpint(value.value, ==, expected);
}

static void test_host(void)
{
    char *dir = dir_new();
    KsmKernelHost host;

    file_write(dir, "run", "1\n");
    file_write(dir, "pages_shared", "18446744073709551615\n");
    file_write(dir, "pages_sharing", "");
    file_write(dir, "full_scans", "-\n");
    file_write(dir, "pages_scanned", "12x\n");
    file_write(dir, "pages_skipped", "12");
    file_write(dir, "general_profit", "-9223372036854775808\n");
    ksm_kernel_read_host(dir, &host);
    g_assert_true(host.present);
    g_assert_true(host.may_start);
    assert_value(host.run, 1);
    assert_value(host.pages_skipped, 12);
    assert_value(host.profit, INT64_MIN);
    /* too large, empty, no number, a number and more, not there */
    g_assert_false(host.pages_shared.known);
    g_assert_false(host.pages_sharing.known);
    g_assert_false(host.full_scans.known);
    g_assert_false(host.pages_scanned.known);
    g_assert_false(host.pages_volatile.known);
    dir_free(dir);

    ksm_kernel_read_host("/nowhere", &host);
    g_assert_false(host.present);
    g_assert_false(host.may_start);
    g_assert_false(host.run.known);
}

static void test_process(void)
{
    char *dir = dir_new();
    KsmKernelProcess process;

    file_write(dir, "ksm_stat",
               "ksm_rmap_items 7\nksm_zero_pages: 8\nksm_merging_pages 9\n"
               "ksm_process_profit -10\nksm_merge_any: no\n"
               "ksm_rmap_items_of_another 99\n");
    ksm_kernel_read_process(dir, &process);
    assert_value(process.rmap_items, 7);
    assert_value(process.zero_pages, 8);
    assert_value(process.merging_pages, 9);
    assert_value(process.profit, -10);

    file_write(dir, "ksm_stat", "ksm_rmap_items");
    ksm_kernel_read_process(dir, &process);
    g_assert_false(process.rmap_items.known);
    dir_free(dir);
    ksm_kernel_read_process("/nowhere", &process);
    g_assert_false(process.profit.known);
}

/* the kernel ends these lines with a space */
#define EOL " " "\n"

static const char smaps[] =
    "1000-3000 rw-p 00000000 00:00 0" EOL
    "Rss:                   8 kB\n"
    "KSM:                   4 kB\n"
    "LazyFree:              4 kB\n"
    "VmFlags: rd wr mr mg" EOL
    "3000-4000 rw-p 00000000 00:00 0 [anon: a-b c:d]\n"
    "Rss:                   4 kB\n"
    "KSM:                   4 kB\n"
    "LazyFree:              0 kB\n"
    "VmFlags: rd wr mr mg" EOL
    "4000-5000 rw-p 00000000 00:00 0" EOL
    "Rss:                1000 kB\n"
    "VmFlags: rd wr mr" EOL
    "7f0000000000-7f0000002000 rw-p 00000000 00:00 0" EOL
    "Rss:                   1 kB\n"
    "VmFlags: rd wr mr mgx" EOL
    "garbage\nRss: x kB\n:" EOL;

static void test_ranges(void)
{
    char *dir = dir_new();
    KsmKernelRange ranges[] = {
        { .start = 0x1000, .size = 0x3000 },    /* two VMAs */
        { .start = 0x4000, .size = 0x1000 },    /* not mergeable */
        { .start = 0x7f0000000000, .size = 0x2000 },    /* no KSM: line */
        { .start = 0x9000, .size = 0x1000 },    /* not there */
        { .start = 0x2000, .size = 0x1000 },    /* inside a VMA */
    };

    file_write(dir, "smaps", smaps);
    ksm_kernel_read_ranges(dir, ranges, ARRAY_SIZE(ranges));
    g_assert_true(ranges[0].known && ranges[0].mergeable);
    g_assert_cmpuint(ranges[0].resident, ==, 12 << 10);
    g_assert_cmpuint(ranges[0].lazy_free, ==, 4 << 10);
    assert_value(ranges[0].merged, 8 << 10);
    g_assert_true(ranges[1].known && !ranges[1].mergeable);
    /* told twice: no more than there can be */
    g_assert_cmpuint(ranges[1].resident, ==, 4 << 10);
    g_assert_true(ranges[2].known && !ranges[2].mergeable);
    g_assert_false(ranges[2].merged.known);
    g_assert_false(ranges[3].known);
    g_assert_false(ranges[4].known);
    dir_free(dir);

    ksm_kernel_read_ranges("/nowhere", ranges, ARRAY_SIZE(ranges));
    g_assert_false(ranges[0].known);
}

/* One part mergeable, one not: the whole is not. */
static void test_partly_mergeable(void)
{
    char *dir = dir_new();
    KsmKernelRange range = { .start = 0x3000, .size = 0x2000 };

    file_write(dir, "smaps", smaps);
    ksm_kernel_read_ranges(dir, &range, 1);
    g_assert_true(range.known);
    g_assert_false(range.mergeable);
    dir_free(dir);
}

/* This process's own files. */
static void test_real(void)
{
    size_t size = 3 << 20;
    KsmKernelRange range = { .size = size };
    char *memory = mmap(NULL, size + 8192, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    g_assert_true(memory != MAP_FAILED);
    /* PROT_NONE on both sides, so that it is a mapping of its own */
    memory += 4096;
    g_assert_cmpint(mprotect(memory, size, PROT_READ | PROT_WRITE), ==, 0);
    range.start = (uintptr_t)memory;
    memset(memory, 1, size / 2);
    ksm_kernel_read_ranges(KSM_KERNEL_PROC, &range, 1);
    g_assert_true(range.known);
    g_assert_false(range.mergeable);
    g_assert_cmpuint(range.resident, >=, size / 2);
    if (madvise(memory, size, MADV_MERGEABLE) == 0) {
        ksm_kernel_read_ranges(KSM_KERNEL_PROC, &range, 1);
        g_assert_true(range.mergeable);
    }
    munmap(memory - 4096, size + 8192);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/ksm-kernel/host", test_host);
    g_test_add_func("/ksm-kernel/process", test_process);
    g_test_add_func("/ksm-kernel/ranges", test_ranges);
    g_test_add_func("/ksm-kernel/partly-mergeable", test_partly_mergeable);
    g_test_add_func("/ksm-kernel/real", test_real);
    return g_test_run();
}
