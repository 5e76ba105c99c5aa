/*
 * options: the command line of ksm-poold
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef HOSTD_OPTIONS_H
#define HOSTD_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct Options {
    const char *socket;     /* NULL: given by systemd */
    const char *key;        /* NULL: by chance; a file */
    uint64_t size;          /* bytes of the pool */
    unsigned members;
    unsigned share;         /* percent */
    unsigned max_sharing;   /* pages that may map one of the pool */
    bool status;            /* ask a daemon, be none */
    bool json;
} Options;

/* Ends the program on --help and --image-version (0) and on wrong usage (2). */
void options_parse(Options *o, int argc, char **argv);

#endif
