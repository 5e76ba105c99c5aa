/*
 * admit: which memory may be registered
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "base/prim.h"
#include "memory/admit.h"

#ifndef MADV_DONTFORK
#error "madvise() constants are missing: _GNU_SOURCE?"
#endif

/* Part of an entry of /proc/self/smaps. */
typedef struct Mapping {
    uintptr_t start, end;
    char perms[5];
    unsigned long inode;
    char name[128];
} Mapping;

static bool mapping_parse(const char *line, Mapping *m)
{
    unsigned long start, end, offset;
    char dev[16];
    int n;

    m->name[0] = 0;
    n = sscanf(line, "%lx-%lx %4s %lx %15s %lu %127[^\n]", &start, &end,
               m->perms, &offset, dev, &m->inode, m->name);
    m->start = start;
    m->end = end;
    return n >= 6;
}

static const char *mapping_refused(const Mapping *m)
{
    if (m->inode || m->perms[3] != 'p') {
        return m->perms[3] == 's' ? "the memory is shared"
                                  : "the memory is file-backed";
    }
    if (strncmp(m->perms, "rw-", 3)) {
        return "the memory is not mapped for reading and writing only";
    }
    if (g_str_has_prefix(m->name, "[heap") ||
        g_str_has_prefix(m->name, "[stack") ||
        g_str_has_prefix(m->name, "[v")) {
        return "the memory is the heap or a stack";
    }
    return NULL;
}

static const char *flag_refused(const char *flag)
{
    static const char *const no[][2] = {
        { "sh", "the memory is shared" },
        { "ht", "the memory is hugetlb" },
        { "lo", "the memory is locked" },
        { "io", "the memory is of a device" },
        { "pf", "the memory is of a device" },
        { "wf", "the memory is wiped on fork" },
        { "mt", "the memory has tags (MTE), which are not compared" },
        { "um", "the memory is watched by another userfaultfd" },
        { "uw", "the memory is watched by another userfaultfd" },
        { "ui", "the memory is watched by another userfaultfd" },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(no); i++) {
        if (!strcmp(flag, no[i][0])) {
            return no[i][1];
        }
    }
    return NULL;
}

static const struct {
    const char *flag;
    int advice;
} flags_kept[] = {
    { "dc", MADV_DONTFORK },
    { "dd", MADV_DONTDUMP },
    { "hg", MADV_HUGEPAGE },
    { "nh", MADV_NOHUGEPAGE },
};

/* Keeps the attributes of the first mapping; the others must have them. */
static const char *flags_keep(KsmRegion *r, const gchar *const *flags)
{
    for (unsigned i = 0; i < G_N_ELEMENTS(flags_kept); i++) {
        bool set = g_strv_contains(flags, flags_kept[i].flag), had = false;

        for (unsigned k = 0; k < r->n_advice; k++) {
            had |= r->advice[k] == flags_kept[i].advice;
        }
        if (!r->seen_flags && set) {
            r->advice[r->n_advice++] = flags_kept[i].advice;
        } else if (r->seen_flags && set != had && i < 2) {
            return "its parts differ in MADV_DONTFORK or MADV_DONTDUMP";
        }
    }
    r->mergeable |= g_strv_contains(flags, "mg");
    if (!r->seen_flags && g_strv_contains(flags, "nr")) {
        r->map_flags = MAP_NORESERVE;
    }
    r->seen_flags = true;
    return NULL;
}

static const char *flags_look(KsmRegion *r, const char *line)
{
    g_auto(GStrv) flags = g_strsplit(line + strlen("VmFlags: "), " ", -1);
    const char *why = NULL;

    for (unsigned i = 0; flags[i] && !why; i++) {
        why = flag_refused(flags[i]);
    }
    return why ? why : flags_keep(r, (const gchar *const *)flags);
}

typedef struct Walk {
    KsmRegion *r;
    uintptr_t at;       /* the range is looked at up to here */
    bool inside;        /* the mapping at hand is in it */
    bool past;          /* ... is behind it */
    const char *why;
} Walk;

static void walk_line(Walk *w, const char *line)
{
    uintptr_t end = (uintptr_t)w->r->addr + w->r->len;
    Mapping m;

    if (g_str_has_prefix(line, "VmFlags:")) {
        w->why = w->inside ? flags_look(w->r, line) : NULL;
    } else if (g_ascii_isxdigit(*line) && mapping_parse(line, &m)) {
        w->inside = m.start < end && m.end > w->at;
        w->past = m.start >= end || (w->inside && m.start > w->at);
        if (w->inside && !w->past) {
            w->why = mapping_refused(&m);
            w->at = m.end;
        }
    }
}

/*
 * Less than an entry is long.  Asked for more, the kernel makes the next entry,
 * too, for which it walks all page tables of that mapping; and does so again if
 * the entry had no room in the page that it fills.
 */
#define SMAPS_READ  512u

/* Reads no further than needed. */
const char *admit(KsmRegion *r)
{
    g_autoptr(GString) text = g_string_new(NULL);
    Walk w = { .r = r, .at = (uintptr_t)r->addr };
    int fd = prim.open_read("/proc/self/smaps");
    char buf[SMAPS_READ], *eol;
    ssize_t n = -1;

    while (fd >= 0 && !w.why && !w.past &&
           (n = prim.read(fd, buf, sizeof(buf))) > 0) {
        g_string_append_len(text, buf, n);
        while (!w.why && !w.past && (eol = strchr(text->str, '\n'))) {
            *eol = 0;
            walk_line(&w, text->str);
            g_string_erase(text, 0, eol + 1 - text->str);
        }
    }
    if (fd >= 0) {
        prim.close(fd);
    }
    if (n < 0) {
        return "/proc/self/smaps cannot be read";
    }
    if (!w.why && w.at < (uintptr_t)r->addr + r->len) {
        return "part of the memory is not mapped";
    }
    r->merge_any = prim.merge_any();
    if (!w.why && prim.policy_get(r->addr, &r->policy, r->policy_mask,
                                  sizeof(r->policy_mask) * 8) < 0) {
        r->policy = -1;
    }
    return w.why;
}
