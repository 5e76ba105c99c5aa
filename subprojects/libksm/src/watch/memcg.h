/*
 * memcg: room in the process's memory cgroups
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Merging copies pages to the pool before it frees the first one.  In a control
 * group that is nearly full the copies would get the program killed, so none
 * are made when there is little room.  Page cache counts as room, for the
 * kernel gives it up: a group that reads files is always full of it.
 */
#ifndef KSM_MEMCG_H
#define KSM_MEMCG_H

#include <stdbool.h>
#include <stdint.h>

#include <glib.h>

#include "watch/cgroup.h"

#define MEMCG_ROOM_MIN  (UINT64_C(8) << 20)

typedef struct KsmMemcg {
    GStrv dirs;             /* our group and those above it */
    CgroupVersion version;
    uint64_t asked;         /* ns; when it was last looked at */
    bool tight;
} KsmMemcg;

/* @root is not / in tests. */
void memcg_init(KsmMemcg *g, const char *root);
void memcg_free(KsmMemcg *g);

/*
 * Is there less room than MEMCG_ROOM_MIN in any of them?  Looks every 50 ms
 * at most.
 */
bool memcg_is_tight(KsmMemcg *g);
/* ... than that and @bytes, which were promised to somebody already? */
bool memcg_is_short(KsmMemcg *g, uint64_t bytes);
/* Is there so much more than that?  Looks now. */
bool memcg_has_room(const KsmMemcg *g, uint64_t bytes);

#endif
