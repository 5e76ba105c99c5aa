/*
 * query-stats: the figures of query-ksm-stats for tools that know no other
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A result for each memory-backend-ksm, with its QOM path, of the target "vm".
 * A value of query-stats is an unsigned number without a text: profit, which
 * may be negative, states and reasons are left to query-ksm-stats.
 */

#include "qemu/osdep.h"
#include "ksm-guest.h"
#include "ksm-stats.h"
#include "qapi/util.h"
#include "qemu/module.h"
#include "system/stats.h"

typedef struct KsmFigure {
    const char *name;
    StatsType type;
    StatsUnit unit;         /* MAX: none */
    ssize_t known;          /* offset of a bool, or ALWAYS */
    size_t value;           /* offset of a uint64_t */
} KsmFigure;

#define ALWAYS -1
#define NONE STATS_UNIT__MAX

#define FIGURE(name, type, unit, of, known, value)                          \
    { name, STATS_TYPE_##type, unit, known,                                 \
      offsetof(of, value) +                                                 \
      type_check(uint64_t, typeof_field(of, value)) }

#define BACKEND(name, type, unit, member)                                   \
    FIGURE(name, type, unit, MemoryKsmBackendStats,                         \
           offsetof(MemoryKsmBackendStats, has_##member), member)

/* Those of query-stats and of its schema, in this order, as HMP wants it. */
static const KsmFigure backend_figures[] = {
    FIGURE("size", INSTANT, STATS_UNIT_BYTES, MemoryKsmBackendStats, ALWAYS,
           size),
    BACKEND("resident", INSTANT, STATS_UNIT_BYTES, resident),
    BACKEND("used", INSTANT, STATS_UNIT_BYTES, used),
    BACKEND("lazy-free", INSTANT, STATS_UNIT_BYTES, lazy_free),
    BACKEND("merged-bytes", INSTANT, STATS_UNIT_BYTES, merged_bytes),
    BACKEND("shared-bytes", INSTANT, STATS_UNIT_BYTES, shared_bytes),
    BACKEND("saved-bytes", INSTANT, STATS_UNIT_BYTES, saved_bytes),
    BACKEND("unshared-bytes", INSTANT, STATS_UNIT_BYTES, unshared_bytes),
    BACKEND("volatile-bytes", INSTANT, STATS_UNIT_BYTES, volatile_bytes),
    BACKEND("zero-bytes", INSTANT, STATS_UNIT_BYTES, zero_bytes),
    BACKEND("kernel-merged-bytes", INSTANT, STATS_UNIT_BYTES,
            kernel_merged_bytes),
    BACKEND("kernel-left", INSTANT, STATS_UNIT_BYTES, kernel_left),
    BACKEND("metadata", INSTANT, STATS_UNIT_BYTES, metadata),
    BACKEND("page-tables", INSTANT, STATS_UNIT_BYTES, page_tables),
    BACKEND("merged-runs", INSTANT, NONE, merged_runs),
    BACKEND("free-hinted-bytes", CUMULATIVE, STATS_UNIT_BYTES,
            free_hinted_bytes),
    BACKEND("free-eager-bytes", CUMULATIVE, STATS_UNIT_BYTES,
            free_eager_bytes),
    BACKEND("pages-scanned", CUMULATIVE, NONE, pages_scanned),
    BACKEND("pages-skipped", CUMULATIVE, NONE, pages_skipped),
    BACKEND("full-scans", CUMULATIVE, NONE, full_scans),
    BACKEND("verify-failed", CUMULATIVE, NONE, verify_failed),
    BACKEND("pinned", CUMULATIVE, NONE, pinned),
    BACKEND("busy", CUMULATIVE, NONE, busy),
    BACKEND("cow-broken", CUMULATIVE, NONE, cow_broken),
    BACKEND("huge-split", CUMULATIVE, NONE, huge_split),
    BACKEND("scan-time", CUMULATIVE, STATS_UNIT_SECONDS, scan_time),
    BACKEND("merge-time", CUMULATIVE, STATS_UNIT_SECONDS, merge_time),
    BACKEND("log-time", CUMULATIVE, STATS_UNIT_SECONDS, log_time),
};

#define STALL(name, type, unit, member)                                     \
    FIGURE(name, type, unit, MemoryKsmStall, ALWAYS, member)

static const KsmFigure stall_figures[] = {
    STALL("stall-count", CUMULATIVE, NONE, count),
    STALL("stall-p50", INSTANT, STATS_UNIT_SECONDS, p50),
    STALL("stall-p99", INSTANT, STATS_UNIT_SECONDS, p99),
    STALL("stall-max", PEAK, STATS_UNIT_SECONDS, max),
};

#define GROUP(name, unit, member)                                           \
    FIGURE(name, INSTANT, unit, MemoryKsmGroupStats,                        \
           offsetof(MemoryKsmGroupStats, has_##member), member)

static const KsmFigure group_figures[] = {
    GROUP("group-members", NONE, members),
    GROUP("group-pool-bytes", STATS_UNIT_BYTES, pool_bytes),
    GROUP("group-pool-limit", STATS_UNIT_BYTES, pool_limit),
    GROUP("group-held-bytes", STATS_UNIT_BYTES, held_bytes),
    GROUP("group-share-bytes", STATS_UNIT_BYTES, share_bytes),
    GROUP("group-saved-bytes", STATS_UNIT_BYTES, saved_bytes),
};

/* Appends those that are known, and asked for; returns the new end. */
static StatsList **values_add(StatsList **tail, const KsmFigure *figures,
                              size_t n, const void *from, strList *names)
{
    for (size_t i = 0; from && i < n; i++) {
        const KsmFigure *figure = &figures[i];
        bool known = figure->known == ALWAYS ||
                     *(const bool *)(from + figure->known);
        Stats *stats;

        if (!known || !apply_str_list_filter(figure->name, names)) {
            continue;
        }
        stats = g_new0(Stats, 1);
        stats->name = g_strdup(figure->name);
        stats->value = g_new0(StatsValue, 1);
        stats->value->type = QTYPE_QNUM;
        stats->value->u.scalar = *(const uint64_t *)(from + figure->value);
        QAPI_LIST_APPEND(tail, stats);
    }
    return tail;
}

static StatsList *backend_values(const MemoryKsmBackendStats *backend,
                                 strList *names)
{
    StatsList *list = NULL, **tail = &list;

    tail = values_add(tail, backend_figures, ARRAY_SIZE(backend_figures),
                      backend, names);
    tail = values_add(tail, stall_figures, ARRAY_SIZE(stall_figures),
                      backend->stall, names);
    values_add(tail, group_figures, ARRAY_SIZE(group_figures),
               backend->group, names);
    return list;
}

static bool have_guests(void)
{
    g_autoptr(GPtrArray) guests = ksm_guests_get();

    return guests->len > 0;
}

static void provider_stats(StatsResultList **result, StatsTarget target,
                           strList *names, strList *targets, Error **errp)
{
    g_autoptr(MemoryKsmStats) stats = NULL;

    /* who has none pays nothing */
    if (target != STATS_TARGET_VM || !have_guests()) {
        return;
    }
    stats = ksm_stats_query();
    for (MemoryKsmBackendStatsList *l = stats->backends; l; l = l->next) {
        /* users create it, and what they create is there */
        g_autofree char *path = g_strdup_printf("/objects/%s", l->value->id);
        StatsList *values = backend_values(l->value, names);

        if (values) {
            add_stats_entry(result, STATS_PROVIDER_KSM, path, values);
        }
    }
}

static StatsSchemaValueList **schema_add(StatsSchemaValueList **tail,
                                         const KsmFigure *figures, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        StatsSchemaValue *value = g_new0(StatsSchemaValue, 1);

        value->name = g_strdup(figures[i].name);
        value->type = figures[i].type;
        value->has_unit = figures[i].unit != NONE;
        value->unit = value->has_unit ? figures[i].unit : 0;
        if (figures[i].unit == STATS_UNIT_SECONDS) {
            value->has_base = true;
            value->base = 10;
            value->exponent = -9;
        }
        QAPI_LIST_APPEND(tail, value);
    }
    return tail;
}

static void provider_schema(StatsSchemaList **result, Error **errp)
{
    StatsSchemaValueList *list = NULL, **tail = &list;

    tail = schema_add(tail, backend_figures, ARRAY_SIZE(backend_figures));
    tail = schema_add(tail, stall_figures, ARRAY_SIZE(stall_figures));
    schema_add(tail, group_figures, ARRAY_SIZE(group_figures));
    add_stats_schema(result, STATS_PROVIDER_KSM, STATS_TARGET_VM, list);
}

static void provider_register(void)
{
    add_stats_callbacks(STATS_PROVIDER_KSM, provider_stats, provider_schema);
}

type_init(provider_register);
