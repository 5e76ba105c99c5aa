/*
 * vmas: how many mappings the process may still make
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Each merged run costs mappings (VMAs), of which the kernel lets a process
 * have vm.max_map_count.  A share of them is left to the program.  Counting
 * reads /proc/self/maps, so it is done seldom; in between, what the engine has
 * made is added up.
 */
#ifndef KSM_VMAS_H
#define KSM_VMAS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct KsmVmas {
    int maps;               /* /proc/self/maps, kept open; -errno */
    unsigned percent;       /* of max: left to the program ... */
    size_t reserve;         /* ... if this is 0; else so many are */
    size_t max;             /* mappings the kernel lets the process have */
    size_t limit;           /* ... and that it may come to have by us */
    size_t used;            /* it had when they were counted */
    size_t since;           /* made by us since then, at most */
    uint64_t counted;       /* ns; 0: never, or not any more */
} KsmVmas;

void vmas_init(KsmVmas *v, unsigned percent, size_t reserve);
void vmas_close(KsmVmas *v);

/* Mappings that may still be made. */
size_t vmas_left(KsmVmas *v);
/* ... by anybody, whatever is to be left to the program. */
size_t vmas_free(KsmVmas *v);

/*
 * The mapping that @addr is in; false: that cannot be had.  Allocates nothing,
 * for that may need a mapping.
 */
bool vmas_at(const KsmVmas *v, const void *addr, char **start, char **end);

/* @n were made, at most. */
void vmas_made(KsmVmas *v, size_t n);

/* Look again how many there are: the kernel refused one, or limits changed. */
static inline void vmas_recount(KsmVmas *v)
{
    v->counted = 0;
}

#endif
