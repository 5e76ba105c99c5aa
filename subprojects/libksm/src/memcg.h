/*
 * libksm: room in the process's memory cgroup
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Merging copies pages to the pool before it frees the first one.  In a
 * control group that is nearly full the copies would get the program killed,
 * so none are made when there is little room.
 */
#ifndef KSM_MEMCG_H
#define KSM_MEMCG_H

#include <stdbool.h>
#include <stdint.h>

#define MEMCG_ROOM_MIN  (UINT64_C(8) << 20)

typedef struct KsmMemcg {
    char *limit;            /* files of our group; NULL: no limit known */
    char *usage;
    uint64_t asked;         /* ns; when it was last looked at */
    bool tight;
} KsmMemcg;

void memcg_init(KsmMemcg *g);
void memcg_free(KsmMemcg *g);

/* Is there less room than MEMCG_ROOM_MIN?  Looks every 50 ms at most. */
bool memcg_is_tight(KsmMemcg *g);

#endif
