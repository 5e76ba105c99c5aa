/*
 * A guest whose memory holds two equal copies, played by a qtest
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The test program is the guest: it writes RAM, waits until that is merged,
 * and reads it back after some other event.  It waits far longer than anything
 * takes, and then fails.
 */
#ifndef TESTS_QTEST_KSM_COPIES_H
#define TESTS_QTEST_KSM_COPIES_H

#include "ksm-helpers.h"
#include "libqos/virtio.h"
#include "libqos/virtio-pci.h"

#define MIB (1u << 20)
#define PAGE 4096u
#define BACKEND "memory-backend-ksm,scope=vm,max-cpu=100"
#define RAM "-machine pc,memory-backend=ram0 -m 64M -nodefaults " \
            "-object " BACKEND ",id=ram0,size=64M"

/* Where the two copies are, in RAM as above; of this size. */
#define FIRST (ksm_ram_start() + 16 * MIB)
#define SECOND (ksm_ram_start() + 32 * MIB)
#define COPY (4 * MIB)

/* A test that waits so long has failed. */
#define WAIT_S 120

/* False where scope=vm cannot be used: the test is skipped. */
bool can_run(void);

uint64_t stat_get(QTestState *qts, const char *id, const char *name);
void stat_wait(QTestState *qts, const char *id, const char *name,
               uint64_t least);

/* The same, without a kick to the engine. */
void stat_wait_alone(QTestState *qts, const char *id, const char *name,
                     uint64_t least);

/*
 * Starts a pass: an idle engine rests for up to ten seconds, too long at times.
 */
void engine_kick(QTestState *qts, const char *id);

void passes_wait(QTestState *qts, const char *id, unsigned passes);

bool state_is(QTestState *qts, const char *id, const char *state);

/* ram0 has a reason of that kind with that in its text. */
bool has_reason(QTestState *qts, const char *kind, const char *part);
void reason_wait(QTestState *qts, const char *kind, const char *part);
void inhibited_wait(QTestState *qts, const char *part);

/* Content of a copy, no page like another; g_free() it. */
uint8_t *random_copy(uint32_t seed);

void assert_memory(QTestState *qts, uint64_t addr, const void *data,
                   size_t size);

void copies_write(QTestState *qts, const uint8_t *data);

/*
 * Nothing is merged before all is written: a chunk's last few pages would not
 * be worth merging by themselves.
 */
void copies_put(QTestState *qts, const uint8_t *data);
void copies_assert(QTestState *qts, const uint8_t *data);

/* All of both copies is merged; what is saved is one of them. */
void copies_wait(QTestState *qts);

/* A new empty file; unlink() and g_free() it. */
char *temporary(void);

void migrate_wait(QTestState *qts, const char *status);

typedef struct Device {
    QPCIBus *bus;
    QGuestAllocator alloc;
    QVirtioPCIDevice *pci;
    QVirtioDevice *dev;
    QVirtQueue *queue;
} Device;

/* The virtio device in slot 4, and its first queue. */
void device_start(Device *d, QTestState *qts);
void device_stop(Device *d);

/* Until the device is done with the request. */
void device_wait(Device *d, QTestState *qts, uint32_t head);

#endif /* TESTS_QTEST_KSM_COPIES_H */
