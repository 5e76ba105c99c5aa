/*
 * Benches: the RAM of a guest, from a file
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Its blocks are in the file's order, or in a random one, as in a guest that has
 * aged: the runs that files left are gone.  All dies with a message.
 */
#ifndef BENCH_IMAGE_H
#define BENCH_IMAGE_H

#include "bench.h"

typedef struct BenchImage {
    const char *path;
    int fd;
    size_t len, block;      /* bytes */
    uint32_t *order;        /* of its blocks */
    char *mem;
} BenchImage;

/* @block: pages.  What is left behind the last whole one is not read. */
void image_open(BenchImage *image, const char *path, unsigned block);

/* @seed: not 0; another one is another order. */
void image_shuffle(BenchImage *image, uint64_t seed);

/* Into memory of its own. */
void image_load(BenchImage *image, BenchPages pages);

/* That memory is what it was. */
void image_check(const BenchImage *image);

#endif
