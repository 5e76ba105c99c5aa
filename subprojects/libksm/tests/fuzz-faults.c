/*
 * libksm: test-fuzz's failing kernel
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <glib.h>

#include "base/prim.h"
#include "fuzz-faults.h"
#include "libksm.h"

#define PAGE ((size_t)KSM_PAGE_SIZE)
#define N_RULES 4
#define N_CODES 6
#define BURSTS_MAX 50u
/*
 * Calls that fail, or that others wait for, without a return to the caller: far
 * more than the longest burst, and than the engine's 10,000 tries of what does
 * not fail for ever.
 */
#define STUCK_CALLS 60000u
#define STUCK_MOST  (5 * STUCK_CALLS)

typedef enum When {
    WHEN_OFF, WHEN_RARE, WHEN_OFTEN, WHEN_BURST, WHEN_EVER, WHEN_AFTER
} When;

static const char *const when_names[] = {
    "off", "rarely", "often", "in bursts", "for ever", "in bursts after",
};

typedef struct Rule {
    When when;
    uint32_t calls;         /* CALL_BIT */
    uint32_t trigger;       /* WHEN_AFTER: failures of these */
    bool critical_only;     /* only while writers may have to wait */
    unsigned one_in;        /* chance to begin */
    unsigned len;           /* of a burst */
    unsigned left;          /* of the one going on */
    unsigned bursts;        /* WHEN_AFTER: begun */
    int code;               /* errno for all of them, where it may be */
} Rule;

typedef struct CallInfo {
    const char *name;
    int codes[N_CODES];     /* what the kernel may return; the first always */
} CallInfo;

static const CallInfo infos[CALL_MAX] = {
    [CALL_MAP] = { "map", { ENOMEM, EAGAIN } },
    [CALL_UNMAP] = { "unmap", { ENOMEM } },
    [CALL_REMAP] = { "remap", { ENOMEM } },
    [CALL_ADVISE] = { "advise", { ENOMEM, EAGAIN, EINTR } },
    [CALL_POLICY_GET] = { "policy_get", { EFAULT, ENOMEM } },
    [CALL_POLICY_SET] = { "policy_set", { ENOMEM, EIO } },
    [CALL_PREFER_NODE] = { "prefer_node", { ENOMEM } },
    [CALL_MEMFD] = { "memfd", { ENOMEM, EMFILE, ENFILE } },
    [CALL_OPEN_READ] = { "open_read", { ENOMEM, EMFILE, ENFILE, EINTR } },
    [CALL_CLOSE] = { "close", { EINTR } },
    [CALL_TRUNCATE] = { "truncate", { ENOMEM, ENOSPC, EINTR, EFBIG } },
    [CALL_WRITE] = { "write", { ENOMEM, ENOSPC, EINTR, EIO } },
    [CALL_READ] = { "read", { ENOMEM, EINTR, EIO } },
    [CALL_READ_AT] = { "read_at", { ENOMEM, EINTR, EIO } },
    [CALL_PUNCH] = { "punch", { ENOMEM, EINTR, EPERM } },
    [CALL_ALLOCATE] = { "allocate", { ENOMEM, ENOSPC, EINTR } },
    [CALL_UFFD] = { "uffd", { ENOMEM, EMFILE, ENFILE, EPERM } },
    [CALL_UFFD_API] = { "uffd_api", { EINVAL, EPERM } },
    [CALL_REGISTER] = { "uffd_register", { ENOMEM, EINTR } },
    [CALL_UNREGISTER] = { "uffd_unregister", { ENOMEM, EINTR } },
    [CALL_WAKE] = { "uffd_wake", { EAGAIN } },
    [CALL_PROTECT] = { "uffd_protect", { ENOMEM, EAGAIN } },
    [CALL_MOVE_OUT] = { "uffd_move (out)", { ENOMEM, EAGAIN, EBUSY, EFAULT } },
    [CALL_MOVE_BACK] = { "uffd_move (back)",
                         { ENOMEM, EAGAIN, EBUSY, EFAULT } },
    [CALL_COPY] = { "uffd_copy", { ENOMEM, EAGAIN } },
    [CALL_PAGEMAP] = { "pagemap", { ENOMEM, EINTR } },
    [CALL_LENGTHEN] = { "lengthen", { ENOMEM, EAGAIN } },
    [CALL_SEAL] = { "seal_write", { EBUSY } },
    [CALL_POISON] = { "uffd_poison", { ENOMEM, EAGAIN, EINVAL } },
    [CALL_SCHED] = { "sched_set", { EPERM } },
    [CALL_SPLIT] = { "split", { ENOMEM } },
};

/* Calls that fail together. */
typedef struct Group {
    uint32_t calls;
    int code;               /* 0: each with one of its own */
} Group;

#define BITS_MOVE (CALL_BIT(CALL_MOVE_OUT) | CALL_BIT(CALL_MOVE_BACK))
#define BITS_UFFD (BITS_MOVE | CALL_BIT(CALL_COPY) | CALL_BIT(CALL_PROTECT) | \
                   CALL_BIT(CALL_REGISTER) | CALL_BIT(CALL_UNREGISTER))
#define BITS_FILE (CALL_BIT(CALL_TRUNCATE) | CALL_BIT(CALL_WRITE) | \
                   CALL_BIT(CALL_PUNCH) | CALL_BIT(CALL_ALLOCATE))
#define BITS_ASK (CALL_BIT(CALL_PAGEMAP) | CALL_BIT(CALL_READ_AT))
#define BITS_ALL ((1u << CALL_MAX) - 1)
/* The kernel cannot fail these again and again: no more than MORTAL_MAX. */
#define MORTAL_MAX 5000u
#define BITS_MORTAL (CALL_BIT(CALL_UNREGISTER) | CALL_BIT(CALL_WAKE))
#define BITS_ALLOC (BITS_UFFD | BITS_FILE | CALL_BIT(CALL_MAP) | \
                    CALL_BIT(CALL_REMAP) | CALL_BIT(CALL_ADVISE) | \
                    CALL_BIT(CALL_PAGEMAP) | CALL_BIT(CALL_OPEN_READ) | \
                    CALL_BIT(CALL_READ) | CALL_BIT(CALL_MEMFD) | \
                    CALL_BIT(CALL_SPLIT) | CALL_BIT(CALL_LENGTHEN))

static const Group groups[] = {
    { BITS_ALL, 0 },
    { BITS_ALLOC, ENOMEM },
    { BITS_UFFD, EAGAIN },
    { BITS_UFFD, EINTR },
    { BITS_MOVE, EBUSY },
    { BITS_MOVE, EAGAIN },
    { BITS_MOVE | CALL_BIT(CALL_COPY), 0 },
    { BITS_MOVE | CALL_BIT(CALL_PAGEMAP), 0 },
    { CALL_BIT(CALL_COPY) | CALL_BIT(CALL_PAGEMAP), 0 },
    { CALL_BIT(CALL_COPY) | CALL_BIT(CALL_MOVE_BACK), 0 },
    { BITS_FILE, ENOSPC },
    { BITS_FILE, EINTR },
    { BITS_ASK, 0 },
    { CALL_BIT(CALL_MAP) | CALL_BIT(CALL_REMAP) | CALL_BIT(CALL_ADVISE) |
      CALL_BIT(CALL_REGISTER) | CALL_BIT(CALL_UNREGISTER), ENOMEM },
    { CALL_BIT(CALL_MAP) | CALL_BIT(CALL_ADVISE), 0 },
    { CALL_BIT(CALL_REMAP) | CALL_BIT(CALL_PROTECT), 0 },
    { CALL_BIT(CALL_UNREGISTER) | CALL_BIT(CALL_WAKE), 0 },
};

static FaultScene scene;
static pthread_mutex_t rules_lock = PTHREAD_MUTEX_INITIALIZER;
static Rule rules[N_RULES];
static bool on;                     /* atomic */
static bool virtual_time;
static bool company;                /* another thread runs */
static void *torn;                  /* the last hole that a call left */
static uint64_t chance;             /* state of random numbers; atomic */
static uint64_t clock_ns;           /* virtual: of CPU */
static uint64_t slept_ns;           /* ... and what it was not used for */
static __thread unsigned in_a_row;  /* such calls since faults_begin() */
static __thread unsigned stuck_at;  /* of them */
static __thread bool relieved;      /* no more failures until then */
static uint64_t n_calls;            /* atomic */
static uint64_t n_failed[CALL_MAX]; /* atomic */
/* signals are blocked; of the engine's thread */
static __thread bool critical;
static char *block_from, *block_to; /* where writers may wait, since then */

void (*faults_note)(const char *format, ...);

static uint64_t next_random(void)
{
    /* splitmix64 */
    uint64_t z = __atomic_add_fetch(&chance, UINT64_C(0x9e3779b97f4a7c15),
                                    __ATOMIC_RELAXED);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static size_t below(size_t n)
{
    return next_random() % n;
}

static bool one_in(size_t n)
{
    return below(n) == 0;
}

const char *faults_name(Call call)
{
    return infos[call].name;
}

bool faults_in_critical(void)
{
    return critical;
}

bool faults_may_block(const void *addr)
{
    return (char *)addr >= block_from && (char *)addr < block_to;
}

bool faults_are_on(void)
{
    return __atomic_load_n(&on, __ATOMIC_RELAXED);
}

void faults_on(bool yes)
{
    __atomic_store_n(&on, yes, __ATOMIC_RELAXED);
}

uint64_t faults_calls(void)
{
    return __atomic_load_n(&n_calls, __ATOMIC_RELAXED);
}

uint64_t faults_failed(Call call)
{
    return __atomic_load_n(&n_failed[call], __ATOMIC_RELAXED);
}

void faults_sleep(uint64_t ns)
{
    slept_ns += ns;
}

bool faults_for_ever(Call call)
{
    for (unsigned i = 0; i < N_RULES && faults_are_on(); i++) {
        if (rules[i].when == WHEN_EVER && (rules[i].calls & CALL_BIT(call)) &&
            !(CALL_BIT(call) & BITS_MORTAL)) {
            return true;
        }
    }
    return false;
}

static void rule_choose(Rule *r)
{
    static const unsigned lens[] = { 2, 3, 8, 40, 300, BURST_MAX };
    const Group *g = &groups[below(G_N_ELEMENTS(groups))];

    memset(r, 0, sizeof(*r));
    r->when = WHEN_RARE + below(WHEN_AFTER);
    r->calls = g->calls;
    r->code = g->code;
    if (one_in(3)) {
        /* one or two calls of any kind */
        r->calls = CALL_BIT(below(CALL_MAX)) | CALL_BIT(below(CALL_MAX));
        r->code = 0;
    }
    r->critical_only = one_in(3);
    r->one_in = r->when == WHEN_RARE ? 20 + below(300)
              : r->when == WHEN_OFTEN ? 2 + below(6) : 10 + below(200);
    r->len = lens[below(G_N_ELEMENTS(lens))];
    if (r->when == WHEN_EVER) {
        r->calls &= ~BITS_MORTAL;
        /* a signal is delivered, some time */
        r->code = r->code == EINTR ? 0 : r->code;
    }
    if (r->when == WHEN_AFTER) {
        r->trigger = groups[below(G_N_ELEMENTS(groups))].calls;
        r->len = lens[below(4)];
        r->one_in = 1 + below(4);
    }
}

void faults_choose(uint64_t *state)
{
    unsigned n;

    pthread_mutex_lock(&rules_lock);
    *state += UINT64_C(0x9e3779b97f4a7c15);
    __atomic_store_n(&chance, *state, __ATOMIC_RELAXED);
    n = 1 + below(N_RULES);
    memset(rules, 0, sizeof(rules));
    for (unsigned i = 0; i < n; i++) {
        rule_choose(&rules[i]);
    }
    pthread_mutex_unlock(&rules_lock);
    faults_on(true);
}

void faults_describe(void)
{
    for (unsigned i = 0; i < N_RULES; i++) {
        const Rule *r = &rules[i];
        g_autoptr(GString) text = g_string_new(NULL);

        if (r->when == WHEN_OFF) {
            continue;
        }
        for (Call c = 0; c < CALL_MAX && r->calls != BITS_ALL; c++) {
            if (r->calls & CALL_BIT(c)) {
                g_string_append_printf(text, "%s%s", text->len ? ", " : "",
                                       infos[c].name);
            }
        }
        faults_note("rule %u: %s %s%s, one in %u, %u long, %s; after 0x%x", i,
                    r->calls == BITS_ALL ? "all calls" : text->str,
                    when_names[r->when],
                    r->critical_only ? " while pages are staged" : "",
                    r->one_in, r->len,
                    r->code ? g_strerror(r->code) : "any error", r->trigger);
    }
}

void faults_begin(void)
{
    in_a_row = 0;
    stuck_at = STUCK_CALLS;
    relieved = false;
}

void faults_may_take(unsigned calls)
{
    /* bounded: its causes may go on as well */
    if (!relieved) {
        stuck_at = MIN(stuck_at + calls, STUCK_MOST);
    }
}

bool faults_end(void)
{
    return relieved;
}

/*
 * Two bursts of thousands at a time, each begun again while the other goes on,
 * leave no moment in which all is well: that would be for ever.
 */
static bool is_bursting(void)
{
    for (unsigned i = 0; i < N_RULES; i++) {
        if (rules[i].left) {
            return true;
        }
    }
    return false;
}

static bool rule_hits(Rule *r, Call call)
{
    if (r->when == WHEN_OFF || !(r->calls & CALL_BIT(call)) ||
        (r->critical_only && !critical)) {
        return false;
    }
    if (r->left) {
        r->left--;
        return true;
    }
    switch (r->when) {
    case WHEN_EVER:
        return true;
    case WHEN_AFTER:
        return false;
    case WHEN_BURST:
        if (!one_in(r->one_in) || is_bursting()) {
            return false;
        }
        r->left = below(r->len);
        return true;
    default:
        return one_in(r->one_in);
    }
}

/* A failed call may be the first of more. */
static void rules_triggered(Call call)
{
    for (unsigned i = 0; i < N_RULES; i++) {
        Rule *r = &rules[i];

        /* neither endlessly nor by its own failures */
        if (r->when == WHEN_AFTER && !r->left && r->bursts < BURSTS_MAX &&
            (r->trigger & ~r->calls & CALL_BIT(call)) && one_in(r->one_in)) {
            r->bursts++;
            r->left = 1 + below(r->len);
        }
    }
}

static int code_of(const Rule *r, Call call)
{
    const int *codes = infos[call].codes;
    unsigned n = 0;

    while (n < N_CODES && codes[n]) {
        if (codes[n] == r->code) {
            return r->code;
        }
        n++;
    }
    return codes[below(n)];
}

/* After far too many calls failures cease; if that is no help, it hangs. */
static void count_tries(Call call)
{
    if (++in_a_row == stuck_at) {
        faults_note("stuck in %s", infos[call].name);
        relieved = true;
    } else if (in_a_row > stuck_at + 20 * BURST_MAX) {
        scene.fail("the engine goes on for ever, though nothing fails");
    }
}

/* The errno that the rules have for a call; 0: none. */
static int rules_code(Call call)
{
    static unsigned failures[CALL_MAX];     /* in a row */
    int code = 0;

    pthread_mutex_lock(&rules_lock);
    for (unsigned i = 0; i < N_RULES && !code; i++) {
        if (rule_hits(&rules[i], call)) {
            code = code_of(&rules[i], call);
            rules_triggered(call);
        }
    }
    failures[call] = code ? failures[call] + 1 : 0;
    if ((CALL_BIT(call) & BITS_MORTAL) && failures[call] > MORTAL_MAX) {
        /* burst upon burst: the engine would give up, and its owner hang */
        failures[call] = 0;
        code = 0;
    }
    pthread_mutex_unlock(&rules_lock);
    return code;
}

/* The errno to fail with; 0: it succeeds. */
static int hit(Call call, void *at, void *from, size_t len)
{
    int code;

    __atomic_fetch_add(&n_calls, 1, __ATOMIC_RELAXED);
    scene.before(call, at, from, len);
    code = faults_are_on() && !relieved ? rules_code(call) : 0;
    if (code || critical) {
        count_tries(call);
    }
    if (code) {
        __atomic_fetch_add(&n_failed[call], 1, __ATOMIC_RELAXED);
        faults_note("%s(%p, %zu) fails: %d%s", infos[call].name, at,
                    len / PAGE, code, critical ? ", critical" : "");
    }
    return code;
}

/*
 * Leaves a hole where something was mapped; only while nobody else runs who
 * might see it, or map something there.
 */
static void tear(void *addr, size_t len)
{
    if (virtual_time && !company) {
        faults_note("... and unmapped");
        munmap(addr, len);
        torn = addr;
    }
}

bool faults_company_comes(void)
{
    company = !torn || madvise(torn, PAGE, MADV_NORMAL) == 0;
    return company;
}

void faults_company_goes(void)
{
    company = false;
}

static void *f_map(void *addr, size_t len, int prot, int flags, int fd,
                   off_t offset)
{
    int code = hit(CALL_MAP, addr, NULL, len);

    if (!code) {
        return prim_real.map(addr, len, prot, flags, fd, offset);
    }
    if ((flags & MAP_FIXED) && code == ENOMEM && one_in(4)) {
        tear(addr, len);
    }
    errno = code;
    return NULL;
}

static int f_unmap(void *addr, size_t len)
{
    int code = hit(CALL_UNMAP, addr, NULL, len);

    return code ? -code : prim_real.unmap(addr, len);
}

static int f_remap(void *from, size_t len, void *to)
{
    int code = hit(CALL_REMAP, to, from, len);

    if (!code) {
        return prim_real.remap(from, len, to);
    }
    if (one_in(4)) {
        tear(to, len);
    }
    return -code;
}

static void *f_lengthen(void *from, size_t len, size_t want, void *at)
{
    int code = hit(CALL_LENGTHEN, at, from, want);

    if (!code) {
        return prim_real.lengthen(from, len, want, at);
    }
    errno = code;
    return NULL;
}

static void *f_split(void *from, size_t len)
{
    int code = hit(CALL_SPLIT, from, NULL, len);

    if (!code) {
        return prim_real.split(from, len);
    }
    errno = code;
    return NULL;
}

static int f_advise(void *addr, size_t len, int advice)
{
    int code;

    if (advice == MADV_NORMAL) {
        /* fails only where nothing is mapped, as its callers rely on */
        count_tries(CALL_ADVISE);
        return prim_real.advise(addr, len, advice);
    }
    code = hit(CALL_ADVISE, addr, NULL, len);
    if (!code) {
        return prim_real.advise(addr, len, advice);
    }
    if (advice == MADV_POPULATE_WRITE && one_in(2)) {
        prim_real.advise(addr, len / PAGE / 2 * PAGE, advice);
    }
    return -code;
}

static int f_policy_get(void *addr, int *mode, unsigned long *mask,
                        size_t bits)
{
    int code = hit(CALL_POLICY_GET, addr, NULL, 0);

    return code ? -code : prim_real.policy_get(addr, mode, mask, bits);
}

static int f_policy_set(void *addr, size_t len, int mode,
                        const unsigned long *mask, size_t bits)
{
    int code = hit(CALL_POLICY_SET, addr, NULL, len);

    return code ? -code : prim_real.policy_set(addr, len, mode, mask, bits);
}

static int f_prefer_node(int node)
{
    int code = hit(CALL_PREFER_NODE, NULL, NULL, 0);

    return code ? -code : prim_real.prefer_node(node);
}

static int f_thread_policy_get(int *mode, unsigned long *mask, size_t bits)
{
    int code = hit(CALL_POLICY_GET, NULL, NULL, 0);

    return code ? -code : prim_real.thread_policy_get(mode, mask, bits);
}

static int f_thread_policy_set(int mode, const unsigned long *mask,
                               size_t bits)
{
    int code = hit(CALL_POLICY_SET, NULL, NULL, 0);

    return code ? -code : prim_real.thread_policy_set(mode, mask, bits);
}

static int f_memfd_sealable(const char *name)
{
    int code = hit(CALL_MEMFD, NULL, NULL, 0);

    return code ? -code : prim_real.memfd_sealable(name);
}

static int f_seal_write(int fd)
{
    int code = hit(CALL_SEAL, NULL, NULL, 0);

    return code ? -code : prim_real.seal_write(fd);
}

static int f_memfd(const char *name)
{
    int code = hit(CALL_MEMFD, NULL, NULL, 0);

    return code ? -code : prim_real.memfd(name);
}

static int f_open_read(const char *path)
{
    int code = hit(CALL_OPEN_READ, NULL, NULL, 0);

    return code ? -code : prim_real.open_read(path);
}

static int f_close(int fd)
{
    int code = hit(CALL_CLOSE, NULL, NULL, 0);

    /* the descriptor is gone all the same */
    return prim_real.close(fd) < 0 ? -EBADF : -code;
}

static int f_truncate(int fd, off_t size)
{
    int code = hit(CALL_TRUNCATE, NULL, NULL, size);

    return code ? -code : prim_real.truncate(fd, size);
}

static ssize_t f_write(int fd, const void *buf, size_t len, off_t offset)
{
    int code = hit(CALL_WRITE, NULL, (void *)buf, len);

    if (code && len > 1 && one_in(2)) {
        return prim_real.write(fd, buf, 1 + below(len - 1), offset);
    }
    return code ? -code : prim_real.write(fd, buf, len, offset);
}

static ssize_t f_read(int fd, void *buf, size_t len)
{
    int code = hit(CALL_READ, NULL, NULL, len);

    if (code && len > 1 && one_in(2)) {
        return prim_real.read(fd, buf, 1 + below(len - 1));
    }
    return code ? -code : prim_real.read(fd, buf, len);
}

static ssize_t f_read_at(int fd, void *buf, size_t len, off_t offset)
{
    int code = hit(CALL_READ_AT, NULL, NULL, len);

    if (code && len > 8 && one_in(2)) {
        return prim_real.read_at(fd, buf, below(len / 8) * 8, offset);
    }
    return code ? -code : prim_real.read_at(fd, buf, len, offset);
}

static int f_punch(int fd, off_t offset, off_t len)
{
    int code = hit(CALL_PUNCH, NULL, NULL, len);

    if (code && one_in(2)) {
        prim_real.punch(fd, offset, len / PAGE / 2 * PAGE);
    }
    return code ? -code : prim_real.punch(fd, offset, len);
}

static int f_allocate(int fd, off_t offset, off_t len)
{
    int code = hit(CALL_ALLOCATE, NULL, NULL, len);

    return code ? -code : prim_real.allocate(fd, offset, len);
}

static int f_uffd(void)
{
    int code = hit(CALL_UFFD, NULL, NULL, 0);

    return code ? -code : prim_real.uffd();
}

static int f_uffd_api(int fd, uint64_t features)
{
    int code = hit(CALL_UFFD_API, NULL, NULL, 0);

    return code ? -code : prim_real.uffd_api(fd, features);
}

/* Writers of the range may have to wait, until signals are restored. */
static void may_block(const UffdRange *range)
{
    char *from = range->addr;

    if (virtual_time && scene.is_memory(from)) {
        block_from = block_from ? MIN(block_from, from) : from;
        block_to = MAX(block_to, from + range->len);
    }
}

static UffdRange half_of(const UffdRange *range)
{
    UffdRange half = *range;

    half.len = range->len / PAGE / 2 * PAGE;
    return half;
}

static int f_uffd_register(const UffdRange *range, unsigned mode)
{
    int code = hit(CALL_REGISTER, range->addr, NULL, range->len);
    UffdRange half = half_of(range);

    if (mode & UFFD_MISSING) {
        may_block(range);
    }
    if (!code) {
        return prim_real.uffd_register(range, mode);
    }
    if (half.len && one_in(3)) {
        prim_real.uffd_register(&half, mode);
    }
    return -code;
}

static int f_uffd_unregister(const UffdRange *range)
{
    int code = hit(CALL_UNREGISTER, range->addr, NULL, range->len);
    UffdRange half = half_of(range);

    if (code && half.len && one_in(3)) {
        prim_real.uffd_unregister(&half);
    }
    return code ? -code : prim_real.uffd_unregister(range);
}

static int f_uffd_wake(const UffdRange *range)
{
    int code = hit(CALL_WAKE, range->addr, NULL, range->len);

    return code ? -code : prim_real.uffd_wake(range);
}

static int f_uffd_protect(const UffdRange *range, bool yes)
{
    int code = hit(CALL_PROTECT, range->addr, NULL, range->len);
    UffdRange half = half_of(range);

    if (yes) {
        may_block(range);
        if (scene.is_memory(range->addr) && !critical) {
            scene.fail("memory is protected with signals open");
        }
    }
    if (code && half.len && one_in(3)) {
        prim_real.uffd_protect(&half, yes);
    }
    return code ? -code : prim_real.uffd_protect(range, yes);
}

/* A move fails: nothing or part of it done, counted or not. */
static int fail_move(int code, int fd, void *to, void *from, size_t len,
                     size_t *done)
{
    size_t part = one_in(2) ? len : len / PAGE / 2 * PAGE, moved = 0;

    *done = 0;
    if (code == EFAULT || one_in(2)) {
        return -code;
    }
    if (part) {
        prim_real.uffd_move(fd, to, from, part, &moved);
    }
    switch (below(3)) {
    case 0:
        *done = moved;      /* counted */
        break;
    case 1:
        *done = moved / PAGE / 2 * PAGE;
        break;
    default:
        /* counts nothing, as Linux 6.18; perhaps found the target taken */
        code = moved && one_in(2) ? EEXIST : code;
        break;
    }
    faults_note("... having moved %zu, and counted %zu", moved / PAGE,
                *done / PAGE);
    return *done == len ? 0 : -code;
}

static int f_uffd_move(int fd, void *to, void *from, size_t len, size_t *done)
{
    Call call = scene.is_memory(from) ? CALL_MOVE_OUT : CALL_MOVE_BACK;
    int code = hit(call, to, from, len);

    if (!critical) {
        scene.fail("pages are moved with signals open");
    }
    return code ? fail_move(code, fd, to, from, len, done)
                : prim_real.uffd_move(fd, to, from, len, done);
}

static int f_uffd_copy(int fd, void *to, const void *from, size_t len,
                       size_t *done)
{
    int code = hit(CALL_COPY, to, (void *)from, len);
    size_t part = len / PAGE / 2 * PAGE;

    if (!code) {
        return prim_real.uffd_copy(fd, to, from, len, done);
    }
    *done = 0;
    if (part && one_in(2)) {
        prim_real.uffd_copy(fd, to, from, part, done);
        code = EAGAIN;
    }
    return -code;
}

static int f_uffd_poison(int fd, void *addr, size_t len)
{
    int code = hit(CALL_POISON, addr, NULL, len);

    return code ? -code : prim_real.uffd_poison(fd, addr, len);
}

static ssize_t f_pagemap(PmScan *scan)
{
    int code = hit(CALL_PAGEMAP, (void *)scan->start, NULL,
                   scan->end - scan->start);
    PmScan half = *scan;
    ssize_t ret;

    if (!code) {
        return prim_real.pagemap(scan);
    }
    if (one_in(2)) {
        return -code;
    }
    /* only part of it */
    half.end -= (scan->end - scan->start) / PAGE / 2 * PAGE;
    ret = prim_real.pagemap(&half);
    scan->walk_end = half.walk_end;
    return one_in(2) ? ret : -code;
}

/* A lower priority is refused to nobody. */
static int f_sched_set(int policy)
{
    bool higher = (policy & ~SCHED_RESET_ON_FORK) == SCHED_FIFO;
    int code = higher ? hit(CALL_SCHED, NULL, NULL, 0) : 0;

    return code ? -code : prim_real.sched_set(policy);
}

static void f_signals_block(sigset_t *old)
{
    if (critical) {
        scene.fail("signals are blocked twice");
    }
    critical = true;
    /* a step may do much, but each plan must end */
    in_a_row = relieved ? in_a_row : 0;
    prim_real.signals_block(old);
}

static void f_signals_restore(const sigset_t *old)
{
    critical = false;
    if (virtual_time) {
        block_from = block_to = NULL;
    }
    prim_real.signals_restore(old);
}

static size_t f_file_limit(void)
{
    return prim_real.file_limit();
}

/* Time passes, mostly little. */
static uint64_t f_cpu_ns(void)
{
    static const unsigned most[] = { 200, 2000, 20000 };
    unsigned i = below(64);

    clock_ns += 20 + below(most[i == 0 ? 2 : i < 8 ? 1 : 0]);
    return clock_ns;
}

static uint64_t f_now_ns(void)
{
    return f_cpu_ns() + slept_ns;
}

static uint64_t f_random(void)
{
    return next_random();
}

static void f_pause(unsigned us)
{
    if (virtual_time) {
        slept_ns += us * UINT64_C(1000);
    } else {
        /* tries are counted: that is enough */
        usleep(MIN(us, 20));
    }
}

static void install_memory(void)
{
    prim.map = f_map;
    prim.unmap = f_unmap;
    prim.remap = f_remap;
    prim.advise = f_advise;
    prim.policy_get = f_policy_get;
    prim.policy_set = f_policy_set;
    prim.prefer_node = f_prefer_node;
    prim.thread_policy_get = f_thread_policy_get;
    prim.thread_policy_set = f_thread_policy_set;
    prim.lengthen = f_lengthen;
    prim.split = f_split;
    prim.memfd_sealable = f_memfd_sealable;
    prim.seal_write = f_seal_write;
    prim.memfd = f_memfd;
    prim.open_read = f_open_read;
    prim.close = f_close;
    prim.truncate = f_truncate;
    prim.write = f_write;
    prim.read = f_read;
    prim.read_at = f_read_at;
    prim.punch = f_punch;
    prim.allocate = f_allocate;
}

void faults_install(uint64_t seed, const FaultScene *s, bool virtual)
{
    scene = *s;
    chance = seed;
    virtual_time = virtual;
    slept_ns = UINT64_C(1000000000000);
    install_memory();
    prim.uffd = f_uffd;
    prim.uffd_api = f_uffd_api;
    prim.uffd_register = f_uffd_register;
    prim.uffd_unregister = f_uffd_unregister;
    prim.uffd_wake = f_uffd_wake;
    prim.uffd_protect = f_uffd_protect;
    prim.uffd_move = f_uffd_move;
    prim.uffd_copy = f_uffd_copy;
    prim.uffd_poison = f_uffd_poison;
    prim.pagemap = f_pagemap;
    prim.sched_set = f_sched_set;
    prim.signals_block = f_signals_block;
    prim.signals_restore = f_signals_restore;
    prim.file_limit = f_file_limit;
    prim.random = f_random;
    prim.pause = f_pause;
    if (virtual) {
        prim.cpu_ns = f_cpu_ns;
        prim.now_ns = f_now_ns;
    }
}
