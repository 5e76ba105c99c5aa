/*
 * query-ksm-sketches: what the guest's memory has in it, in a few numbers
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "block/thread-pool.h"
#include "ksm-guest.h"
#include "qapi/qapi-commands-ksm.h"

/* All guests of one QEMU have one engine, if they have any. */
static KsmEngine *guests_engine(GPtrArray *guests)
{
    KsmEngine *engine = NULL;

    for (unsigned i = 0; i < guests->len && !engine; i++) {
        engine = ksm_guest_engine(guests->pdata[i]);
    }
    return engine;
}

typedef struct KsmSketchInput {
    KsmEngine *engine;
    KsmSketch sketch;
    bool known;
} KsmSketchInput;

/* Without the BQL: it looks at every page's entry. */
static int input_read(void *opaque)
{
    KsmSketchInput *input = opaque;

    input->known = ksm_engine_get_sketch(input->engine, &input->sketch);
    return 0;
}

static MemoryKsmSketch *sketch_schema(const KsmSketch *from)
{
    MemoryKsmSketch *sketch = g_new0(MemoryKsmSketch, 1);
    uint32List **tail = &sketch->least;

    sketch->key = from->key;
    sketch->pages = from->pages;
    sketch->contents = from->contents;
    for (unsigned i = 0; i < from->n; i++) {
        QAPI_LIST_APPEND(tail, from->least[i]);
    }
    return sketch;
}

MemoryKsmSketchList *coroutine_fn qmp_query_ksm_sketches(Error **errp)
{
    /* references: the engine lives as long as they do */
    g_autoptr(GPtrArray) guests = ksm_guests_get();
    g_autofree KsmSketchInput *input = g_new0(KsmSketchInput, 1);
    MemoryKsmSketchList *list = NULL;

    input->engine = guests_engine(guests);
    if (input->engine) {
        thread_pool_submit_co(input_read, input);
    }
    if (input->known) {
        QAPI_LIST_PREPEND(list, sketch_schema(&input->sketch));
    }
    return list;
}
