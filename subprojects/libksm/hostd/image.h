/*
 * image: what a daemon leaves to its successor, as bytes in a memfd
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Written and read from beginning to end.  It has a version, a length and a
 * sum: nothing that was read may be acted on before image_end() says that all
 * of it is good.
 */
#ifndef HOSTD_IMAGE_H
#define HOSTD_IMAGE_H

#include <stddef.h>
#include <stdint.h>

/* Another one with each change of what is put: see ksm-poold.postinst. */
#define IMAGE_VERSION 6u

typedef struct Image {
    int fd;
    uint64_t at, end;
    uint64_t sum, want;     /* of what was written or read; of all */
    int error;              /* the first one; what follows does nothing */
} Image;

/* An empty one; image_finish() writes its head. 0 or -errno. */
int image_begin(Image *im);
void image_put(Image *im, const void *from, size_t len);
int image_finish(Image *im);

/* One that a predecessor wrote.  0, or -EPROTO: not one of ours. */
int image_open(Image *im, int fd);
/* As it was put, piece by piece.  Zeroes, if there was an error. */
void image_get(Image *im, void *to, size_t len);
/* Was it read to its end, without an error? */
int image_end(const Image *im);

#endif
