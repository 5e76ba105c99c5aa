/*
 * socket: where members connect
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * One that systemd has made, or one of our own; in the place of one that a
 * dead daemon left, but not of one that is alive.
 */
#ifndef HOSTD_SOCKET_H
#define HOSTD_SOCKET_H

/* A descriptor, bound; negative: what failed was printed.  @path or NULL. */
int socket_listener(const char *path);
/* The predecessor made it. */
void socket_adopt(const char *path);
/* Removes the path, if it was made here and is still the same. */
void socket_remove(const char *path);
/*
 * To the daemon at @path, not blocking; or -errno.  EAGAIN: one hangs there, and
 * does not accept those that wait already.
 */
int socket_connect(const char *path);
/* Tells systemd, if it wants to know. */
void socket_notify(const char *text);

#endif
