/*
 * vmas: how many mappings the process may still make
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Each merged run costs mappings (VMAs); a process may have vm.max_map_count.
 * The program is left a share.  Counting reads /proc/self/maps, so it is done
 * seldom; in between, those the engine made are added.
 */
#ifndef KSM_VMAS_H
#define KSM_VMAS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VMAS_FEW    256u    /* left: mappings are not split any more */

typedef struct KsmVmas {
    int maps;               /* /proc/self/maps, kept open; -errno */
    unsigned percent;       /* of max: left to the program ... */
    size_t reserve;         /* ... if this is 0; else so many are */
    size_t max;             /* mappings the kernel lets the process have */
    size_t limit;           /* ... and that it may come to have by us */
    size_t used;            /* it had when they were counted */
    size_t since;           /* made by us since then, at most */
    uint64_t counted;       /* ns; 0: never, or not any more */
    uint64_t took;          /* ... of CPU, to count them */
} KsmVmas;

void vmas_init(KsmVmas *v, unsigned percent, size_t reserve);
void vmas_close(KsmVmas *v);

/* Mappings that may still be made. */
size_t vmas_left(KsmVmas *v);
/* ... as far as the last count told, which may be old. */
size_t vmas_known(KsmVmas *v);
/* ... by anybody, whatever is to be left to the program. */
size_t vmas_free(KsmVmas *v);

/*
 * The mapping that @addr is in; false: not known.  Allocates nothing, which may
 * need a mapping.
 */
bool vmas_at(const KsmVmas *v, const void *addr, char **start, char **end);

/* @n were made, at most. */
void vmas_made(KsmVmas *v, size_t n);

/* Counts anew: the kernel refused one, or limits changed. */
void vmas_recount(KsmVmas *v);

#endif
