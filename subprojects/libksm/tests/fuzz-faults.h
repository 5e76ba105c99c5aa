/*
 * libksm: test-fuzz's failing kernel
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Takes the place of prim and lets calls fail by rules that a seed chooses:
 * which calls, how often (now and then, in bursts, for ever, after another
 * one has failed, only while pages are staged), with which of the kernel's
 * errors, and how much of the work is done all the same.  Single-threaded, it
 * has clocks of its own, so that a seed repeats the run, not only the choices.
 *
 * It never lies: that a target is taken (EEXIST), a source empty (ENOENT), a
 * range in several mappings (EINVAL), nothing mapped (ENOMEM of MADV_NORMAL).
 * Unregistering and waking do not fail for ever, for the kernel has no way to;
 * the longest burst is BURST_MAX.
 */
#ifndef FUZZ_FAULTS_H
#define FUZZ_FAULTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum Call {
    CALL_MAP, CALL_UNMAP, CALL_REMAP, CALL_ADVISE, CALL_POLICY_GET,
    CALL_POLICY_SET, CALL_PREFER_NODE, CALL_MEMFD, CALL_OPEN_READ, CALL_CLOSE,
    CALL_TRUNCATE, CALL_WRITE, CALL_READ, CALL_READ_AT, CALL_PUNCH,
    CALL_ALLOCATE, CALL_UFFD, CALL_UFFD_API, CALL_REGISTER, CALL_UNREGISTER,
    CALL_WAKE, CALL_PROTECT, CALL_MOVE_OUT, CALL_MOVE_BACK, CALL_COPY,
    CALL_PAGEMAP, CALL_LENGTHEN, CALL_SEAL, CALL_POISON, CALL_SCHED,
    CALL_SPLIT, CALL_MAX
} Call;

#define CALL_BIT(call) (1u << (call))
#define BURST_MAX 2000u     /* failures in a row */

typedef struct FaultScene {
    /* is the address in the memory that the engine was given? */
    bool (*is_memory)(const void *addr);
    /*
     * Before each call but those of clocks, to play other threads; @at, @len:
     * its range, or NULL.
     */
    void (*before)(Call call, char *at, char *from, size_t len);
    /* something is wrong; does not return */
    void (*fail)(const char *what) __attribute__((noreturn));
} FaultScene;

/* A note for whoever looks for a cause; the scene keeps it. */
extern void (*faults_note)(const char *format, ...)
    __attribute__((format(printf, 1, 2)));

/* Replaces prim.  @virtual_time: the clocks are ours, and nothing sleeps. */
void faults_install(uint64_t seed, const FaultScene *scene,
                    bool virtual_time);
/* Rules anew, of this state's making; and they hold. */
void faults_choose(uint64_t *state);
void faults_on(bool on);
bool faults_are_on(void);
void faults_describe(void);

/*
 * At the start of each interface call, which must come to an end.
 * faults_end(): true if it did only because the failures ceased.
 */
void faults_begin(void);

/* That end may be so many calls further on. */
void faults_may_take(unsigned calls);

/*
 * Another thread starts, or has ended.  False: not now, for its stack might be
 * where the engine is about to map what a call has torn out.
 */
bool faults_company_comes(void);
void faults_company_goes(void);
bool faults_end(void);

/* Does @call fail for ever? */
bool faults_for_ever(Call call);

/* Between the engine's signals_block() and signals_restore(). */
bool faults_in_critical(void);
/* May writers of the address have to wait just now? */
bool faults_may_block(const void *addr);
void faults_sleep(uint64_t ns);
/* Calls made, and made to fail. */
uint64_t faults_calls(void);
uint64_t faults_failed(Call call);
const char *faults_name(Call call);

#endif
