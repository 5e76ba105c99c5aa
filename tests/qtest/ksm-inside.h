/*
 * The part of a test inside QEMU
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef TESTS_QTEST_KSM_INSIDE_H
#define TESTS_QTEST_KSM_INSIDE_H

/* Names the file that both sides map. */
#define KSM_INSIDE_ENV "KSM_INSIDE"

/* The size of the host's pages, as far as QEMU asks for it. */
#define KSM_INSIDE_PAGE_ENV "KSM_INSIDE_PAGE_SIZE"

typedef struct KsmInside {
    /*
     * When the main thread next reads statistics ("info ksm"), QEMU is told of
     * a memory error at this address, as by the kernel; then this is 0 again.
     */
    uint64_t error_at;
    /* while this is set, openers of /proc/self/smaps for statistics wait */
    uint32_t hold;
    uint32_t held;          /* so many wait */
    /* so often it was opened, by the main thread and by others */
    uint32_t opened_by_main;
    uint32_t opened_by_others;
} KsmInside;

#endif /* TESTS_QTEST_KSM_INSIDE_H */
