/*
 * image: what a daemon leaves to its successor, as bytes in a memfd
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <string.h>

#include <glib.h>

#include "base/prim.h"
#include "image.h"
#include "sys.h"

#define MAGIC UINT64_C(0x31656d616d736b)

typedef struct Head {
    uint64_t magic;
    uint64_t version;
    uint64_t end;
    uint64_t sum;
} Head;

/* Finds mistakes; who could forge it has the descriptor anyway. */
static uint64_t sum_of(uint64_t sum, const void *data, size_t len)
{
    const char *at = data;

    for (; len; len -= MIN(len, 8), at += 8) {
        uint64_t word = 0;

        memcpy(&word, at, MIN(len, 8));
        sum = (sum ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        sum ^= sum >> 29;
    }
    return sum;
}

int image_begin(Image *im)
{
    *im = (Image) { .at = sizeof(Head) };
    im->fd = sys.memfd("ksm-poold-image", 0);
    return MIN(im->fd, 0);
}

static int write_all(int fd, const char *from, size_t len, off_t at)
{
    while (len) {
        ssize_t n = prim.write(fd, from, len, at);

        if (n == -EINTR) {
            continue;
        }
        if (n <= 0) {
            return n < 0 ? n : -ENOSPC;
        }
        from += n;
        len -= n;
        at += n;
    }
    return 0;
}

void image_put(Image *im, const void *from, size_t len)
{
    if (im->error == 0) {
        im->error = write_all(im->fd, from, len, im->at);
        im->at += len;
        im->sum = sum_of(im->sum, from, len);
    }
}

int image_finish(Image *im)
{
    Head head = { MAGIC, IMAGE_VERSION, im->at, im->sum };

    return im->error < 0 ? im->error
                         : write_all(im->fd, (char *)&head, sizeof(head), 0);
}

static int read_all(int fd, char *to, size_t len, off_t at)
{
    while (len) {
        ssize_t n = prim.read_at(fd, to, len, at);

        if (n == -EINTR) {
            continue;
        }
        if (n <= 0) {
            return n < 0 ? n : -EPROTO;
        }
        to += n;
        len -= n;
        at += n;
    }
    return 0;
}

int image_open(Image *im, int fd)
{
    Head head;
    int ret = read_all(fd, (char *)&head, sizeof(head), 0);

    *im = (Image) { .fd = fd, .at = sizeof(head) };
    if (ret == 0 && (head.magic != MAGIC || head.version != IMAGE_VERSION)) {
        ret = -EPROTO;
    }
    if (ret == 0) {
        im->end = head.end;
        im->want = head.sum;
    }
    return ret;
}

void image_get(Image *im, void *to, size_t len)
{
    if (im->error == 0 && len > im->end - im->at) {
        im->error = -EPROTO;
    }
    if (im->error == 0) {
        im->error = read_all(im->fd, to, len, im->at);
    }
    if (im->error < 0) {
        memset(to, 0, len);
        return;
    }
    im->at += len;
    im->sum = sum_of(im->sum, to, len);
}

int image_end(const Image *im)
{
    if (im->error < 0) {
        return im->error;
    }
    return im->at == im->end && im->sum == im->want ? 0 : -EPROTO;
}
