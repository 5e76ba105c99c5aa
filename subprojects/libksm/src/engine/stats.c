/*
 * stats: what was saved, what it cost, and why the rest was not
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Every populated page that is not merged, nor swapped out, has one reason.
 * Most follow from its state; a chunk holds those of its mergeable pages.
 */
#include "engine/state.h"

#define VMA_BYTES       780u    /* kernel memory of a run: two mappings */

static const struct {
    const char *name;
    const char *text;
} reasons[KSM_REASON_MAX] = {
    [KSM_REASON_RUN_OFF] = { "run-off", "merging is switched off" },
    [KSM_REASON_INHIBITED] = { "inhibited", "merging is inhibited" },
    [KSM_REASON_NOT_SCANNED] = { "not-scanned", "not looked at yet" },
    [KSM_REASON_VOLATILE] = { "volatile", "written too often" },
    [KSM_REASON_UNIQUE] = { "unique", "no other page is equal" },
    [KSM_REASON_NOT_WORTH] = { "not-worth",
        "equal, but merging would cost more than it saves" },
    [KSM_REASON_PINNED] = { "pinned", "a device has pinned the page" },
    [KSM_REASON_BUSY] = { "busy", "a device is writing to the page" },
    [KSM_REASON_VMA_LIMIT] = { "vma-limit",
        "the process has few mappings left (vm.max_map_count)" },
    [KSM_REASON_NO_MEMORY] = { "no-memory",
        "the kernel had no memory for merging" },
    [KSM_REASON_COW_BROKEN] = { "cow-broken", "written after the merge" },
    [KSM_REASON_FREED] = { "freed", "the owner freed it" },
    [KSM_REASON_NO_DAEMON] = { "no-daemon",
        "no daemon serves the group, or it may not be connected to "
        "(ksm-poold)" },
    [KSM_REASON_REFUSED_BY_DAEMON] = { "refused-by-daemon",
        "the group's daemon takes no more of this member" },
    [KSM_REASON_GROUP_FULL] = { "group-full", "the group's pool is full" },
};

const char *ksm_reason_name(KsmReason reason)
{
    return reason < KSM_REASON_MAX ? reasons[reason].name : "unknown";
}

const char *ksm_reason_text(KsmReason reason)
{
    return reason < KSM_REASON_MAX ? reasons[reason].text : "unknown";
}

static void region_reasons(const KsmRegion *r, KsmStats *s)
{
    const uint64_t *n = r->count;
    uint64_t *why = s->reasons;
    /* chunks are refused for what is left of their gain, which was nothing */
    uint64_t left = MIN(r->n_left, r->gain[0] + r->gain[KSM_REASON_NOT_WORTH]);

    why[KSM_REASON_NOT_SCANNED] += n[PAGE_NEW] - r->n_written;
    /* until a pass has looked, whatever is a hole may be populated */
    why[KSM_REASON_NOT_SCANNED] += r->seen ? 0 : n[PAGE_HOLE];
    why[KSM_REASON_VOLATILE] += r->n_written;
    why[KSM_REASON_UNIQUE] += n[PAGE_UNIQUE];
    why[KSM_REASON_PINNED] += n[PAGE_PINNED];
    why[KSM_REASON_BUSY] += n[PAGE_BUSY];
    why[KSM_REASON_COW_BROKEN] += n[PAGE_BROKEN];
    why[KSM_REASON_FREED] += n[PAGE_FREED];
    s->lazy_free += r->lazy * PAGE_BYTES;
    /* 0: nobody has asked yet whether it is worth it */
    why[KSM_REASON_NOT_WORTH] += r->gain[0];
    for (unsigned i = 1; i < KSM_REASON_MAX; i++) {
        why[i] += r->gain[i];
    }
    why[KSM_REASON_NOT_WORTH] -= left;
    why[KSM_REASON_VMA_LIMIT] += left;
}

static void region_sum(const KsmRegion *r, KsmStats *s)
{
    s->pages_total += r->len / PAGE_BYTES;
    s->pages_unshared += r->count[PAGE_UNIQUE];
    s->pages_volatile += r->n_written;
    s->zero_pages += r->count[PAGE_GIVEN];
    s->kernel_pages += r->count[PAGE_KERNEL];
    s->merged_runs += r->runs;
    s->metadata += r->meta_bytes;
    region_reasons(r, s);
    if (r->inhibited) {
        s->inhibited = r->inhibited;
    }
}

/* Without its daemon a group's member merges zeroes alone. */
static void group_gone(const KsmEngine *e, KsmStats *s)
{
    KsmReason why;

    if (!store_is_gone(e->content.store)) {
        /* chunks refused while it was gone have not been looked at since */
        s->reasons[KSM_REASON_NOT_SCANNED] += s->reasons[KSM_REASON_NO_DAEMON];
        s->reasons[KSM_REASON_NO_DAEMON] = 0;
        return;
    }
    why = store_why(e->content.store);
    s->reasons[why] += s->reasons[KSM_REASON_UNIQUE];
    s->reasons[KSM_REASON_UNIQUE] = 0;
    if (!s->inhibited) {
        s->inhibited = ksm_reason_text(why);
    }
}

static KsmState engine_state(const KsmEngine *e)
{
    bool all = e->regions->len > 0;

    if (!e->run) {
        return KSM_STATE_OFF;
    }
    for (guint i = 0; i < e->regions->len; i++) {
        all &= !!((KsmRegion *)g_ptr_array_index(e->regions, i))->inhibited;
    }
    if (all || store_is_gone(e->content.store)) {
        return KSM_STATE_INHIBITED;
    }
    return e->regions->len == 0 || e->scan.idle_ns ? KSM_STATE_IDLE
                                                   : KSM_STATE_ACTIVE;
}

static void stats_finish(KsmStats *s, KsmState state)
{
    uint64_t saved = s->pages_sharing + s->zero_pages + s->group_saved +
                     s->kernel_saved;

    s->state = state;
    if (s->state != KSM_STATE_INHIBITED) {
        s->inhibited = NULL;
    } else {
        s->reasons[KSM_REASON_INHIBITED] =
            s->reasons[KSM_REASON_NOT_SCANNED] +
            s->reasons[KSM_REASON_VOLATILE];
        s->reasons[KSM_REASON_NOT_SCANNED] = 0;
        s->reasons[KSM_REASON_VOLATILE] = 0;
    }
    if (s->state == KSM_STATE_OFF) {
        s->reasons[KSM_REASON_RUN_OFF] = s->reasons[KSM_REASON_NOT_SCANNED];
        s->reasons[KSM_REASON_NOT_SCANNED] = 0;
    }
    s->page_tables = s->merged_runs * VMA_BYTES;
    s->profit = (int64_t)(saved * PAGE_BYTES) - s->metadata - s->page_tables;
}

static void merge_sum(const KsmEngine *e, KsmStats *s)
{
    const KsmMerge *m = &e->merge;

    s->verify_failed = m->verify_failed;
    s->pinned = m->pinned;
    s->busy = m->busy;
    s->isolations = m->isolations;
    s->huge_split = e->stage.huge_split;
    s->poisoned = e->stage.poisoned.pages + e->restore.poisoned;
    s->stall_count = m->stalls.count;
    s->stall_max = m->stalls.max;
    s->stall_p50 = stalls_percentile(&m->stalls, 50);
    s->stall_p99 = stalls_percentile(&m->stalls, 99);
    for (unsigned i = 0; i < KSM_STALL_BUCKETS; i++) {
        s->stall[i] = stalls_bucket(&m->stalls, i);
    }
}

/* Slots that others hold, too, are paid for by all of them. */
static uint64_t group_saved(const KsmEngine *e, uint64_t shared)
{
    KsmGroupStats g;

    if (!store_group(e->content.store, &g) || !g.held) {
        return 0;
    }
    /* as far as the daemon knew then, whatever it says */
    return shared - (uint64_t)((double)shared * MIN(g.share, g.held) / g.held);
}

bool ksm_engine_get_group(KsmEngine *engine, KsmGroupStats *stats)
{
    bool has;

    lock_take(&engine->lock);
    has = store_group(engine->content.store, stats);
    lock_release(&engine->lock);
    return has;
}

void ksm_engine_get_stats(KsmEngine *engine, KsmStats *stats)
{
    KsmEngine *e = engine;
    StoreStats store;
    AskCount asks;

    lock_take(&e->lock);
    *stats = e->total;
    stats->dirty = e->cfg.dirty;
    for (guint i = 0; i < e->regions->len; i++) {
        KsmRegion *r = g_ptr_array_index(e->regions, i);

        region_sum(r, stats);
        stats->dirty = i == 0 || stats->dirty == r->dirty ? r->dirty
                                                          : KSM_DIRTY_AUTO;
    }
    store = store_stats(e->content.store);
    asks = asks_count(&e->asks);
    store.shared -= asks.slots;
    store.sharing -= asks.users;
    stats->pages_shared = store.shared;
    stats->pages_sharing = store.sharing - store.shared;
    stats->merge_time += crew_cpu_ns(&e->crew) - e->helped_ns;
    stats->metadata += content_bytes(&e->content) + asks.bytes +
                       sizeof(*e) + PIECE_PAGES / 8 +
                       N_RANGES * sizeof(PmRange) +
                       e->dir.len * sizeof(*e->dir.entry);
    merge_sum(e, stats);
    group_gone(e, stats);
    stats->group_saved = group_saved(e, store.shared);
    stats->kernel_saved = stats->kernel_pages * e->tail.saves;
    stats->kernel_left = e->tail.chunks * CHUNK_BYTES;
    stats_finish(stats, engine_state(e));
    /* unused slots that are kept cost memory, too */
    stats->profit -= (int64_t)(store.leaked * PAGE_BYTES);
    lock_release(&e->lock);
}

/*
 * A region's share of the pool: its own users.  Without pages_shared: slots
 * that others use too would count twice.
 */
void ksm_region_get_stats(KsmRegion *region, KsmStats *stats)
{
    KsmEngine *e = region_engine(region);

    lock_take(&e->lock);
    *stats = (KsmStats) {
        .dirty = region->dirty,
        .pages_sharing = region->count[PAGE_MERGED],
        .merged = region->merged,
        .verify_failed = region->verify_failed,
        .pinned = region->pinned,
        .busy = region->busy,
        .cow_broken = region->cow_broken,
        .free_hinted = region->free_hinted,
    };
    region_sum(region, stats);
    stats->kernel_saved = stats->kernel_pages * e->tail.saves;
    group_gone(e, stats);
    stats_finish(stats, region->inhibited ? KSM_STATE_INHIBITED
                                          : engine_state(e));
    lock_release(&e->lock);
}
