/*
 * Benches: the RAM of a guest, from a file
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "image.h"

static size_t blocks_of(const BenchImage *image)
{
    return image->len / image->block;
}

void image_open(BenchImage *image, const char *path, unsigned block)
{
    off_t len;

    image->path = path;
    image->fd = open(path, O_RDONLY | O_CLOEXEC);
    len = image->fd < 0 ? -1 : lseek(image->fd, 0, SEEK_END);
    if (len <= 0) {
        bench_die("%s: %s", path, len ? strerror(errno) : "empty");
    }
    image->block = (size_t)block * KSM_PAGE_SIZE;
    image->len = len / image->block * image->block;
    image->order = g_new(uint32_t, blocks_of(image));
    for (size_t i = 0; i < blocks_of(image); i++) {
        image->order[i] = i;
    }
}

void image_shuffle(BenchImage *image, uint64_t seed)
{
    for (size_t i = blocks_of(image) - 1; i > 0; i--) {
        size_t k = bench_random(&seed) % (i + 1);
        uint32_t was = image->order[i];

        image->order[i] = image->order[k];
        image->order[k] = was;
    }
}

static void block_read(const BenchImage *image, size_t i, char *to)
{
    off_t at = (off_t)image->order[i] * image->block;
    size_t done = 0;

    while (done < image->block) {
        ssize_t got = pread(image->fd, to + done, image->block - done,
                            at + done);

        if (got <= 0) {
            bench_die("%s: %s", image->path,
                      got ? strerror(errno) : "ends early");
        }
        done += got;
    }
}

void image_load(BenchImage *image, BenchPages pages)
{
    image->mem = bench_map(image->len, pages);
    for (size_t i = 0; i < blocks_of(image); i++) {
        block_read(image, i, image->mem + i * image->block);
    }
}

void image_check(const BenchImage *image)
{
    g_autofree char *block = g_malloc(image->block);

    for (size_t i = 0; i < blocks_of(image); i++) {
        block_read(image, i, block);
        if (memcmp(block, image->mem + i * image->block, image->block)) {
            bench_die("%s: block %zu has changed", image->path, i);
        }
    }
}
