/*
 * key: a group's key from a file
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <fcntl.h>

#include <glib.h>

#include "base/hash.h"
#include "base/page.h"
#include "base/prim.h"
#include "key.h"
#include "sys.h"

G_STATIC_ASSERT(KEY_MAX == PAGE_BYTES);

/* Bytes, of which there may be more than fit; -errno. */
static ssize_t read_all(int fd, char *to, size_t room)
{
    size_t len = 0;
    ssize_t n;

    do {
        n = prim.read(fd, to + len, room - len);
        len += MAX(n, 0);
    } while (n > 0 && len < room);
    return n < 0 ? n : (ssize_t)len;
}

int key_read(const char *path, uint64_t *key, bool *open)
{
    char text[KEY_MAX + 1] = "";
    struct stat st = { 0 };
    int fd = sys.open_at(AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    ssize_t n;

    if (fd < 0) {
        return fd;
    }
    n = sys.stat(fd, &st);
    n = n < 0 ? n : read_all(fd, text, sizeof(text));
    prim.close(fd);
    if (n < 0) {
        return n;
    }
    if (n < KEY_MIN || n > KEY_MAX) {
        return -ERANGE;
    }
    *open = st.st_mode & (S_IRGRP | S_IROTH);
    *key = hash_base(text, n);
    return 0;
}
