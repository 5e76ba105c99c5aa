/*
 * key: a group's key from a file
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The seed of a group's hash is chance, and nobody but its members knows it.
 * Where sketches of guests on several hosts are to be compared
 * (ksm_engine_get_sketch()) their daemons are given one.
 */
#ifndef HOSTD_KEY_H
#define HOSTD_KEY_H

#include <stdbool.h>
#include <stdint.h>

#define KEY_MIN     16u     /* bytes of a file */
#define KEY_MAX     4096u

/*
 * The key that is in the file: whatever it holds, all of it counts.  0 or
 * -errno; -ERANGE: it is too short, or too long.  *@open: others can read it.
 */
int key_read(const char *path, uint64_t *key, bool *open);

#endif
