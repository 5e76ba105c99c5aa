/*
 * Reads as from a file system that takes plain references to pages
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * ksm-plain-read.c is loaded into QEMU (LD_PRELOAD) by ksm-dma-test, which
 * shares this with it: a file that the environment names.
 */
#ifndef TESTS_QTEST_KSM_PLAIN_READ_H
#define TESTS_QTEST_KSM_PLAIN_READ_H

#include <stdint.h>

#define PLAIN_READ_ENV "KSM_PLAIN_READ"

/* A read of this length at this offset is one; all others are as always. */
#define PLAIN_READ_OFFSET 1048576
#define PLAIN_READ_LEN 4096

typedef struct PlainRead {
    uint32_t held;      /* atomic: the page is referred to */
    uint32_t release;   /* atomic: set by the test, the read may end */
    uint8_t seen[PLAIN_READ_LEN];   /* what is in that very page then */
} PlainRead;

#endif /* TESTS_QTEST_KSM_PLAIN_READ_H */
