/*
 * libksm tests: slots of the pool, their users, patterns
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <glib.h>

#include "base/prim.h"
#include "memory/region.h"
#include "share/pool.h"
#include "util.h"

#define SHARING 4u

typedef struct Fixture {
    KsmPool pool;
    unsigned unindexed;     /* slots the index was told to drop */
    uint32_t last_hash, last_slot;
    char *page;
} Fixture;

static void count_unindex(void *opaque, uint32_t slot)
{
    Fixture *f = opaque;

    f->unindexed++;
    f->last_hash = f->pool.hash[slot];
    f->last_slot = slot;
}

static void set_up(Fixture *f, gconstpointer data)
{
    g_assert(pool_init(&f->pool, SHARING) == 0);
    g_assert(pool_reserve(&f->pool, 16 * CHUNK_PAGES) == 0);
    f->pool.goes = count_unindex;
    f->pool.opaque = f;
    f->page = g_malloc(PAGE_BYTES);
    memset(f->page, 'p', PAGE_BYTES);
}

static void tear_down(Fixture *f, gconstpointer data)
{
    pool_free(&f->pool);
    g_free(f->page);
}

static uint32_t take_one(Fixture *f, char content)
{
    unsigned n = 1;
    uint32_t slot = pool_take(&f->pool, &n);

    g_assert(slot != SLOT_NONE);
    g_assert(n == 1);
    memset(f->page, content, PAGE_BYTES);
    g_assert(pool_fill(&f->pool, slot, f->page, 1) == 0);
    return slot;
}

static size_t file_blocks(Fixture *f)
{
    struct stat st;

    g_assert(fstat(f->pool.fd, &st) == 0);
    return st.st_blocks * 512 / PAGE_BYTES;
}

/* A slot gives its memory back with its last user, and can be had again. */
static void test_users(Fixture *f, gconstpointer data)
{
    uint32_t slot = take_one(f, 'a');

    g_assert(pool_page(&f->pool, slot)[7] == 'a');
    pool_user_add(&f->pool, slot);
    pool_user_add(&f->pool, slot);
    g_assert(f->pool.shared == 1);
    g_assert(f->pool.sharing == 2);
    g_assert(file_blocks(f) == 1);
    pool_user_drop(&f->pool, slot);
    pool_flush(&f->pool);
    g_assert(pool_page(&f->pool, slot)[7] == 'a');
    f->pool.hash[slot] = 4711;
    pool_user_drop(&f->pool, slot);
    g_assert(f->unindexed == 1);
    g_assert(f->last_hash == 4711 && f->last_slot == slot);
    g_assert(f->pool.sharing == 0);
    g_assert(f->pool.shared == 0);
    pool_flush(&f->pool);
    if (!f->pool.keep_all) {
        g_assert(file_blocks(f) == 0);
        g_assert(take_one(f, 'b') == slot);
    }
}

static void test_full(Fixture *f, gconstpointer data)
{
    uint32_t slot = take_one(f, 'a');

    for (unsigned i = 0; i < SHARING; i++) {
        g_assert(!pool_full(&f->pool, slot));
        pool_user_add(&f->pool, slot);
    }
    g_assert(pool_full(&f->pool, slot));
    pool_user_drop(&f->pool, slot);
    g_assert(!pool_full(&f->pool, slot));
}

/* Regions map the pool through a descriptor that cannot write. */
static void test_read_only(Fixture *f, gconstpointer data)
{
    uint32_t slot = take_one(f, 'a');
    char *map;

    g_assert(mmap(NULL, PAGE_BYTES, PROT_WRITE, MAP_SHARED, f->pool.map_fd,
                  (off_t)slot * PAGE_BYTES) == MAP_FAILED);
    map = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE,
               f->pool.map_fd, (off_t)slot * PAGE_BYTES);
    g_assert(map != MAP_FAILED);
    map[0] = 'x';
    g_assert(pool_page(&f->pool, slot)[0] == 'a');
    munmap(map, PAGE_BYTES);
}

static void test_untake(Fixture *f, gconstpointer data)
{
    unsigned n = 10;
    uint32_t slot = pool_take(&f->pool, &n);

    g_assert(n == 10);
    pool_untake(&f->pool, slot, 10);
    pool_flush(&f->pool);
    if (!f->pool.keep_all) {
        g_assert(f->pool.vacant.n == 10);
    }
}

/* What a child may map is neither punched nor written anew. */
static void test_fork(Fixture *f, gconstpointer data)
{
    uint32_t slot = take_one(f, 'a');

    pool_user_add(&f->pool, slot);
    pool_fork(&f->pool);
    pool_user_drop(&f->pool, slot);
    pool_flush(&f->pool);
    g_assert(pool_page(&f->pool, slot)[0] == 'a');
    g_assert(f->pool.leaked == 1);
    g_assert(take_one(f, 'b') != slot);
    g_assert(pool_page(&f->pool, slot)[0] == 'a');
}

/* fork() as the engine does it, between the pool's calls. */
static pid_t pool_fork_child(Fixture *f)
{
    pid_t pid;

    pool_fork(&f->pool);
    pid = fork();
    if (pid == 0) {
        pool_forked_child(&f->pool);
    } else {
        pool_forked(&f->pool);
    }
    g_assert(pid >= 0);
    return pid;
}

static void release_all(Fixture *f)
{
    bool more;

    do {
        more = pool_release(&f->pool);
    } while (more);
}

static void wait_given_up(Fixture *f)
{
    for (int i = 0; f->pool.leaked && i < 60000; i++) {
        g_usleep(1000);
        pool_unkeep(&f->pool);
        release_all(f);
    }
    g_assert(f->pool.leaked == 0);
}

/* What the child does. */
typedef enum ChildKind {
    CHILD_PLAIN,
    CHILD_CLOSES,       /* all its files, but those to talk to us */
    CHILD_HAS_CHILD,    /* which outlives it */
    CHILD_EXECS,        /* is gone, as far as memory is concerned */
} ChildKind;

static void child_main(ChildKind kind, int go, int told, const char *seen)
{
    bool good;
    char c;

    if (kind == CHILD_CLOSES) {
        for (int fd = 3; fd < 1000; fd++) {
            if (fd != go && fd != told) {
                close(fd);
            }
        }
    }
    if (kind == CHILD_HAS_CHILD && fork()) {
        _exit(0);
    }
    if (kind == CHILD_EXECS) {
        dup2(go, 0);
        dup2(told, 1);
        execlp("cat", "cat", NULL);
        _exit(1);
    }
    do {
        good = read(go, &c, 1) == 1 && write(told, seen, 1) == 1;
    } while (good);
    _exit(0);
}

static char child_sees(int go, int told)
{
    char c = 'x';

    g_assert(write(go, &c, 1) == 1 && read(told, &c, 1) == 1);
    return c;
}

/*
 * What a child or its child may map is kept for as long as they live; a block
 * of a pattern too.
 */
static void children_of(Fixture *f, ChildKind kind)
{
    uint32_t slot = take_one(f, 'a'), other = take_one(f, 'b');
    KsmPattern *t = pool_pattern_new(&f->pool, f->page, 42);
    uint32_t first = t->first;
    const char *seen = mmap(NULL, PAGE_BYTES, PROT_READ, MAP_PRIVATE,
                            f->pool.map_fd, (off_t)slot * PAGE_BYTES);
    int go[2], told[2];
    pid_t child;

    g_assert(seen != MAP_FAILED);
    g_assert(pipe(go) == 0 && pipe(told) == 0);
    pool_user_add(&f->pool, slot);
    pool_user_add(&f->pool, other);
    pool_user_add(&f->pool, first);
    child = pool_fork_child(f);
    if (child == 0) {
        close(go[1]);
        close(told[0]);
        child_main(kind, go[0], told[1], seen);
    }
    close(go[0]);
    close(told[1]);
    if (kind == CHILD_HAS_CHILD) {
        g_assert(waitpid(child, NULL, 0) == child);
    }
    /* is there, and past exec */
    child_sees(go[1], told[0]);
    pool_user_drop(&f->pool, slot);
    pool_user_drop(&f->pool, first);
    g_assert(f->pool.leaked == 1 + CHUNK_PAGES);
    if (kind == CHILD_EXECS) {
        wait_given_up(f);
    }
    for (int i = 0; i < 100 && kind != CHILD_EXECS; i++) {
        pool_unkeep(&f->pool);
        release_all(f);
        g_assert(f->pool.leaked == 1 + CHUNK_PAGES);
        g_assert(take_one(f, 'z') != slot);
    }
    g_assert(child_sees(go[1], told[0]) ==
             (kind == CHILD_EXECS ? 'x' : 'a'));
    close(go[1]);
    close(told[0]);
    wait_given_up(f);
    if (kind != CHILD_HAS_CHILD) {
        g_assert(waitpid(child, NULL, 0) == child);
    }
    /* they can be had again; what is in use is as it was */
    f->pool.vacant.cursor = 0;
    g_assert(take_one(f, 'c') == slot);
    t = pool_pattern_new(&f->pool, f->page, 43);
    g_assert(t && t->first == first);
    g_assert(pool_page(&f->pool, other)[0] == 'b');
    munmap((void *)seen, PAGE_BYTES);
}

static void test_children(Fixture *f, gconstpointer data)
{
    if (f->pool.keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    children_of(f, GPOINTER_TO_UINT(data));
}

/* Children of several forks: the last of them counts. */
static void test_children_many(Fixture *f, gconstpointer data)
{
    uint32_t slot[3];
    pid_t child[3];
    int go[2];
    char c;

    if (f->pool.keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    g_assert(pipe(go) == 0);
    for (int i = 0; i < 3; i++) {
        slot[i] = take_one(f, 'a' + i);
        pool_user_add(&f->pool, slot[i]);
        child[i] = pool_fork_child(f);
        if (child[i] == 0) {
            close(go[1]);
            _exit(read(go[0], &c, 1));
        }
        pool_user_drop(&f->pool, slot[i]);
        pool_unkeep(&f->pool);
        g_assert(f->pool.leaked == i + 1);
    }
    kill(child[0], SIGKILL);
    kill(child[2], SIGKILL);
    g_assert(waitpid(child[0], NULL, 0) == child[0]);
    g_assert(waitpid(child[2], NULL, 0) == child[2]);
    pool_unkeep(&f->pool);
    g_assert(f->pool.leaked == 3);
    kill(child[1], SIGKILL);
    g_assert(waitpid(child[1], NULL, 0) == child[1]);
    wait_given_up(f);
    g_assert(f->pool.vacant.n == 3);
    /* and from the beginning */
    slot[0] = take_one(f, 'a');
    pool_user_add(&f->pool, slot[0]);
    child[0] = pool_fork_child(f);
    if (child[0] == 0) {
        _exit(0);
    }
    g_assert(waitpid(child[0], NULL, 0) == child[0]);
    pool_user_drop(&f->pool, slot[0]);
    g_assert(f->pool.leaked == 1);
    wait_given_up(f);
    close(go[0]);
    close(go[1]);
}

static void *watch_map_fails(void *addr, size_t len, int prot, int flags,
                             int fd, off_t offset)
{
    return prot == PROT_NONE ? NULL
                             : prim_real.map(addr, len, prot, flags, fd,
                                             offset);
}

static int unmap_fails(void *addr, size_t len)
{
    return len == PAGE_BYTES ? -ENOMEM : prim_real.unmap(addr, len);
}

static int seal_fails(int fd)
{
    return -EBUSY;
}

static int memfd_fails(const char *name)
{
    return -EMFILE;
}

typedef enum WatchFault {
    FAULT_MEMFD, FAULT_MAP, FAULT_UNMAP, FAULT_SEAL
} WatchFault;

/* Children whose lives cannot be told are alive. */
static void test_children_faults(Fixture *f, gconstpointer data)
{
    WatchFault fault = GPOINTER_TO_UINT(data);
    uint32_t slot = take_one(f, 'a');

    if (f->pool.keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    pool_user_add(&f->pool, slot);
    prim.memfd_sealable = fault == FAULT_MEMFD ? memfd_fails
                                               : prim.memfd_sealable;
    prim.map = fault == FAULT_MAP ? watch_map_fails : prim.map;
    prim.unmap = fault == FAULT_UNMAP ? unmap_fails : prim.unmap;
    prim.seal_write = fault == FAULT_SEAL ? seal_fails : prim.seal_write;
    pool_fork(&f->pool);
    pool_forked(&f->pool);
    pool_user_drop(&f->pool, slot);
    pool_unkeep(&f->pool);
    release_all(f);
    g_assert(f->pool.leaked == 1);
    g_assert(pool_page(&f->pool, slot)[0] == 'a');
    prim = prim_real;
    if (fault == FAULT_MEMFD || fault == FAULT_MAP) {
        g_assert(f->pool.forks_blind == 1);
        pool_unkeep(&f->pool);
        release_all(f);
        g_assert(f->pool.leaked == 1);
    } else {
        wait_given_up(f);
    }
}

/* A failed page of the guest makes no pattern, and no signal. */
static void test_pattern_failed(Fixture *f, gconstpointer data)
{
    char *page = mmap(NULL, PAGE_BYTES, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    KsmPattern *t;

    g_assert(page != MAP_FAILED);
    g_assert(!pool_pattern_new(&f->pool, page, 1));
    g_assert(mprotect(page, PAGE_BYTES, PROT_READ | PROT_WRITE) == 0);
    page[7] = 7;
    t = pool_pattern_new(&f->pool, page, 1);
    g_assert(t);
    for (uint32_t i = 0; i < t->filled; i++) {
        g_assert(!memcmp(pool_page(&f->pool, t->first + i), page, PAGE_BYTES));
    }
    pool_settle(&f->pool, t->first);
    munmap(page, PAGE_BYTES);
}

/* Uses of a pattern spread over its slots; it grows with them. */
static void test_pattern(Fixture *f, gconstpointer data)
{
    KsmPattern *t = pool_pattern_new(&f->pool, f->page, 42);
    unsigned uses = 0, n;
    uint32_t slot;

    g_assert(t);
    g_assert(t->filled == PATTERN_START);
    g_assert(pool_pattern(&f->pool, t->first + 1) == t);
    while (n = 8, (slot = pool_pattern_run(&f->pool, t, &n)) != SLOT_NONE) {
        g_assert(n <= 8);
        for (unsigned i = 0; i < n; i++) {
            g_assert(!memcmp(pool_page(&f->pool, slot + i), f->page,
                             PAGE_BYTES));
            pool_user_add(&f->pool, slot + i);
        }
        uses += n;
        /* it need not be longer */
        g_assert(t->filled == PATTERN_START);
    }
    g_assert(uses == t->filled * SHARING);
    for (uint32_t s = t->first; uses; s++) {
        while (uses && pool_users(&f->pool, s)) {
            uses--;
            pool_user_drop(&f->pool, s);
        }
    }
    g_assert(g_hash_table_size(f->pool.patterns) == 0);
    if (!f->pool.keep_all) {
        g_assert(file_blocks(f) == 0);
    }
}

static ssize_t write_fails(int fd, const void *buf, size_t len, off_t offset)
{
    return -ENOSPC;
}

static void test_write_fails(Fixture *f, gconstpointer data)
{
    unsigned n = 1;
    uint32_t slot = pool_take(&f->pool, &n);

    prim.write = write_fails;
    g_assert(pool_fill(&f->pool, slot, f->page, 1) == -ENOSPC);
    g_assert(!pool_pattern_new(&f->pool, f->page, 1));
    prim.write = prim_real.write;
    pool_untake(&f->pool, slot, 1);
    g_assert(pool_pattern_new(&f->pool, f->page, 1));
}

static int punch_fails(int fd, off_t offset, off_t len)
{
    return -ENOMEM;
}

/* A slot that was not punched is not had with its old content. */
static void test_punch_fails(Fixture *f, gconstpointer data)
{
    uint32_t slot = take_one(f, 'a');

    pool_user_add(&f->pool, slot);
    prim.punch = punch_fails;
    pool_user_drop(&f->pool, slot);
    pool_flush(&f->pool);
    g_assert(take_one(f, 'b') != slot);
    prim.punch = prim_real.punch;
    release_all(f);
    if (!f->pool.keep_all) {
        g_assert(take_one(f, 'c') == slot);
    }
}

static void test_used_up(Fixture *f, gconstpointer data)
{
    unsigned n, all = 0;
    uint32_t slot;

    while (n = 64, (slot = pool_take(&f->pool, &n)) != SLOT_NONE) {
        all += n;
        g_assert(all <= f->pool.capacity);
    }
    g_assert(all == f->pool.capacity);
}

static void check_free(const KsmPool *p)
{
    uint32_t n_words[VACANT_CLASSES] = { 0 };
    uint32_t n_free = 0;

    for (size_t w = 0; w < p->capacity / 64; w++) {
        unsigned run = 0, longest = 0, class = 0;

        for (unsigned i = 0; i < 64; i++) {
            bool free = p->vacant.free[w] >> i & 1;

            g_assert(!free || w * 64 + i < p->top);
            run = free ? run + 1 : 0;
            longest = MAX(longest, run);
            n_free += free;
        }
        while (longest >> (class + 1)) {
            class++;
        }
        for (unsigned k = 0; k < VACANT_CLASSES; k++) {
            bool has = p->vacant.lines[w / 64].has[k] >> (w % 64) & 1;

            g_assert(has == (longest && k == class));
            n_words[k] += has;
        }
    }
    g_assert(n_free == p->vacant.n);
    g_assert(!memcmp(n_words, p->vacant.n_words, sizeof(n_words)));
}

static bool is_free(const uint64_t *free, uint32_t slot)
{
    return free[slot / 64] >> (slot % 64) & 1;
}

/* log2 of the longest free run in 64 aligned slots. */
static int longest_class(const uint64_t *free, size_t words)
{
    unsigned longest = 0;

    for (size_t w = 0; w < words; w++) {
        unsigned run = 0;

        for (unsigned i = 0; i < 64; i++) {
            run = is_free(free, w * 64 + i) ? run + 1 : 0;
            longest = MAX(longest, run);
        }
    }
    return (int)g_bit_storage(longest) - (longest ? 1 : 2);
}

/*
 * As pool.h says: long free runs, then slots never taken, then the rest; and no
 * shorter than need be.  @free and @top are from before.
 */
static unsigned check_take(KsmPool *p, const uint64_t *free, uint32_t top,
                           unsigned want, uint32_t *slot)
{
    int class = longest_class(free, p->capacity / 64);
    unsigned n = want;

    *slot = pool_take(p, &n);
    if (*slot == SLOT_NONE) {
        g_assert(class < 0 && top == p->capacity);
        return 0;
    }
    g_assert(n > 0 && n <= want);
    if (*slot >= top) {
        g_assert(*slot == top && n == MIN(want, p->capacity - top));
        g_assert(class < 0 || 1u << class < MIN(want, TAKE_WORTH));
        g_assert(p->top == top + n);
        return n;
    }
    for (unsigned i = 0; i < n; i++) {
        g_assert(is_free(free, *slot + i));
        g_assert(p->users[*slot + i] == 0);
    }
    g_assert(p->top == top && class >= 0);
    g_assert(n >= MIN(want, TAKE_WORTH) || top == p->capacity);
    g_assert(n >= MIN(want, 1u << MIN(class, 5)));
    if (n < want) {
        g_assert(*slot == 0 || !is_free(free, *slot - 1));
        g_assert(*slot + n == top || !is_free(free, *slot + n));
    }
    return n;
}

static void test_model(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    bool *taken = g_new0(bool, p->capacity);

    if (p->keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        g_free(taken);
        return;
    }
    for (unsigned round = 0; round < 20000; round++) {
        unsigned n = 1u << g_test_rand_int_range(0, 10);
        uint32_t slot = g_test_rand_int_range(0, p->capacity);

        n = g_test_rand_int_range(1, n + 1);
        if (round / 1000 % 2) {
            for (; n && slot < p->capacity; n--, slot++) {
                if (taken[slot]) {
                    taken[slot] = false;
                    pool_untake(p, slot, 1);
                }
            }
            pool_flush(p);
        } else {
            g_autofree uint64_t *free = g_malloc(p->capacity / 8);

            memcpy(free, p->vacant.free, p->capacity / 8);
            n = check_take(p, free, p->top, n, &slot);
            for (unsigned i = 0; i < n; i++) {
                g_assert(!taken[slot + i]);
                taken[slot + i] = true;
            }
        }
        if (round % 100 == 0) {
            check_free(p);
        }
        if (round == 10000) {
            g_assert(pool_reserve(p, 64 * CHUNK_PAGES) == 0);
            taken = g_renew(bool, taken, p->capacity);
            memset(taken + p->top, 0, p->capacity - p->top);
        }
    }
    g_free(taken);
}

/* All slots up to the top are in use but those given. */
static void take_all_but(Fixture *f, uint32_t top, uint32_t first,
                         uint32_t n, uint32_t step, unsigned run)
{
    unsigned got;

    while (f->pool.top < top) {
        got = MIN(512, top - f->pool.top);
        g_assert(pool_take(&f->pool, &got) != SLOT_NONE);
    }
    for (uint32_t s = first; s < first + n; s += step) {
        pool_untake(&f->pool, s, run);
    }
    pool_flush(&f->pool);
}

/*
 * A long free run is taken before the file grows, even if shorter than asked
 * for; scraps only if it cannot grow.
 */
static void test_take_free(Fixture *f, gconstpointer data)
{
    unsigned n = 200;

    if (f->pool.keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    take_all_but(f, f->pool.capacity - 20, 1000, 90, 90, 90);
    g_assert(pool_take(&f->pool, &n) == 1000 && n == 90);
    take_all_but(f, f->pool.capacity - 20, 2000, 100, 10, 5);
    n = 8;
    g_assert(pool_take(&f->pool, &n) == f->pool.capacity - 20 && n == 8);
    n = 1;
    g_assert(pool_take(&f->pool, &n) == 2000);
    n = 20;
    g_assert(pool_take(&f->pool, &n) == f->pool.capacity - 12 && n == 12);
    n = 20;
    g_assert(pool_take(&f->pool, &n) != SLOT_NONE && n >= 4);
    /* of more than is asked for, the first ones */
    pool_untake(&f->pool, 40 * 64 + 5, 40);
    pool_flush(&f->pool);
    n = 8;
    g_assert(pool_take(&f->pool, &n) == 40 * 64 + 5 && n == 8);
    check_free(&f->pool);
}

/* Next to what is mapped, as far as slots are free there. */
static void test_take_near(Fixture *f, gconstpointer data)
{
    unsigned n = 8;

    if (f->pool.keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    take_all_but(f, 4096, 1000, 10, 10, 10);
    g_assert(pool_take_near(&f->pool, 999, 1010, &n) == 1000 && n == 8);
    /* fewer than are asked for; and nothing in front of a slot is below it */
    n = 8;
    g_assert(pool_take_near(&f->pool, 1007, SLOT_NONE, &n) == 1008 && n == 2);
    n = 8;
    g_assert(pool_take_near(&f->pool, SLOT_NONE, 3, &n) == 4096 && n == 8);
    /* the last of them in front of one: then the first are elsewhere */
    pool_untake(&f->pool, 1000, 10);
    pool_flush(&f->pool);
    n = 4;
    g_assert(pool_take_near(&f->pool, 500, 1010, &n) == 1006 && n == 4);
    n = 9;
    g_assert(pool_take_near(&f->pool, SLOT_NONE, 1006, &n) != SLOT_NONE);
    g_assert(n == 3);
    n = 6;
    g_assert(pool_take_near(&f->pool, SLOT_NONE, 1006, &n) == 1000 && n == 6);
    /* where nothing is free, as pool_take(); and at the end of the file */
    n = 2;
    g_assert(pool_take_near(&f->pool, 500, 1000, &n) != SLOT_NONE && n == 2);
    n = 5;
    g_assert(pool_take_near(&f->pool, f->pool.top - 1, SLOT_NONE, &n) ==
             f->pool.top - 5);
    g_assert(n == 5);
    check_free(&f->pool);
}

/* Half the slots are free, each alone: taking many does not take long. */
static void test_checkerboard(Fixture *f, gconstpointer data)
{
    enum { TOP = 262144, TRIES = 2000 };
    uint64_t cpu;

    g_assert(pool_reserve(&f->pool, 2 * TOP) == 0);
    take_all_but(f, TOP, 0, TOP, 2, 1);
    cpu = prim.cpu_ns();
    for (unsigned i = 0; i < TRIES; i++) {
        unsigned n = 2 + i % 7;

        g_assert(pool_take(&f->pool, &n) != SLOT_NONE && n == 2 + i % 7);
    }
    cpu = (prim.cpu_ns() - cpu) / TRIES;
    g_test_message("%u ns each", (unsigned)cpu);
    /* it was 320 us */
    g_assert(cpu < 50000);
}

static void test_grow(Fixture *f, gconstpointer data)
{
    uint32_t slot = take_one(f, 'g');
    const char *view = f->pool.view;
    size_t was = f->pool.capacity;

    pool_user_add(&f->pool, slot);
    pool_fork(&f->pool);
    pool_forked(&f->pool);
    f->pool.hash[slot] = 4711;
    g_assert(pool_reserve(&f->pool, 4096 * CHUNK_PAGES) == 0);
    g_assert(f->pool.capacity > 100 * was);
    g_assert(pool_page(&f->pool, slot)[9] == 'g');
    g_assert(pool_users(&f->pool, slot) == 1);
    g_assert(f->pool.hash[slot] == 4711);
    take_all_but(f, was + 5000, 0, 0, 1, 1);
    pool_user_add(&f->pool, was + 4000);
    pool_user_drop(&f->pool, was + 4000);
    g_assert(f->pool.keep_all || f->pool.n_punch == 1);
    /* it is kept for the child, the other one is not */
    pool_user_drop(&f->pool, slot);
    g_assert(f->pool.leaked >= 1);
    pool_fork(&f->pool);
    pool_forked(&f->pool);
    pool_user_add(&f->pool, was + 4001);
    pool_user_drop(&f->pool, was + 4001);
    g_assert(f->pool.leaked >= 2);
    g_test_message("%p to %p", view, f->pool.view);
    check_free(&f->pool);
}

static void *lengthen_fails(void *from, size_t len, size_t want, void *at)
{
    return NULL;
}

static void test_grow_fails(Fixture *f, gconstpointer data)
{
    uint32_t slot = take_one(f, 'g');
    size_t was = f->pool.capacity;

    prim.lengthen = lengthen_fails;
    g_assert(pool_reserve(&f->pool, 4096 * CHUNK_PAGES) == -ENOMEM);
    prim = prim_real;
    g_assert(f->pool.capacity == was);
    g_assert(pool_page(&f->pool, slot)[9] == 'g');
    g_assert(pool_reserve(&f->pool, 4096 * CHUNK_PAGES) == 0);
    g_assert(pool_page(&f->pool, slot)[9] == 'g');
}

/* Had from the kernel and not given back yet. */
static struct {
    int64_t bytes;          /* of address space */
    int files;
    unsigned calls;         /* so far */
    unsigned fails;         /* this one does, from 1; 0: none */
} held;

static bool held_fails(void)
{
    return ++held.calls == held.fails;
}

static void *held_map(void *addr, size_t len, int prot, int flags, int fd,
                      off_t offset)
{
    bool fails = held_fails();
    void *map = fails ? NULL
                      : prim_real.map(addr, len, prot, flags, fd, offset);

    if (fails && (flags & MAP_FIXED)) {
        munmap(addr, len);
        held.bytes -= ROUND_UP_TO(len, PAGE_BYTES);
    } else if (map && !(flags & MAP_FIXED)) {
        held.bytes += ROUND_UP_TO(len, PAGE_BYTES);
    }
    return map;
}

static int held_unmap(void *addr, size_t len)
{
    int ret = prim_real.unmap(addr, len);

    g_assert(ret == 0);
    held.bytes -= ROUND_UP_TO(len, PAGE_BYTES);
    return ret;
}

static void *held_lengthen(void *from, size_t len, size_t want, void *at)
{
    bool fails = held_fails();
    void *map = fails ? NULL : prim_real.lengthen(from, len, want, at);

    if (fails && at) {
        munmap(at, want);
        held.bytes -= ROUND_UP_TO(want, PAGE_BYTES);
    } else if (map) {
        held.bytes -= ROUND_UP_TO(len, PAGE_BYTES);
        held.bytes += at ? 0 : ROUND_UP_TO(want, PAGE_BYTES);
    }
    return map;
}

static int held_memfd(const char *name)
{
    int fd = held_fails() ? -EMFILE : prim_real.memfd(name);

    held.files += fd >= 0;
    return fd;
}

static int held_memfd_sealable(const char *name)
{
    int fd = held_fails() ? -EMFILE : prim_real.memfd_sealable(name);

    held.files += fd >= 0;
    return fd;
}

static int held_open_read(const char *path)
{
    int fd = held_fails() ? -EACCES : prim_real.open_read(path);

    held.files += fd >= 0;
    return fd;
}

static int held_close(int fd)
{
    g_assert(fd >= 0);
    held.files--;
    return prim_real.close(fd);
}

/*
 * A pool's whole life.  A call that fails changes nothing, and it has no less
 * memory than it says.
 */
static void live_and_die(void *opaque)
{
    char page[PAGE_BYTES] = "kept";
    unsigned n = 1;
    uint32_t slot;
    KsmPool p;
    int ret = pool_init(&p, SHARING);

    g_assert(ret == 0 || ret == -ENOMEM || ret == -EMFILE || ret == -EACCES);
    g_assert(ret == 0 || held.fails);
    if (ret == 0 && pool_reserve(&p, 8 * CHUNK_PAGES) == 0) {
        slot = pool_take(&p, &n);
        g_assert(pool_fill(&p, slot, page, 1) == 0);
        pool_user_add(&p, slot);
        g_assert(pool_pattern_new(&p, page, 1));
        pool_fork(&p);
        pool_forked(&p);
        pool_unkeep(&p);
        pool_fork(&p);
        pool_forked(&p);
        ret = pool_reserve(&p, 2048 * CHUNK_PAGES);
        g_assert(ret == 0 || (ret == -ENOMEM && held.fails));
        g_assert((p.capacity > 2048 * CHUNK_PAGES / 2) == (ret == 0));
        /* read-only and complete: reading takes the last of it, too */
        g_assert(!strcmp(pool_page(&p, slot), "kept"));
        g_assert(p.users[p.capacity - 1] == 0 && p.hash[p.capacity - 1] == 0);
        pool_fork(&p);
        /* the watch is mapped at the end */
    }
    pool_free(&p);
}

static void test_given_back(Fixture *f, gconstpointer data)
{
    unsigned calls;

    prim.map = held_map;
    prim.unmap = held_unmap;
    prim.lengthen = held_lengthen;
    prim.memfd = held_memfd;
    prim.memfd_sealable = held_memfd_sealable;
    prim.open_read = held_open_read;
    prim.close = held_close;
    memset(&held, 0, sizeof(held));
    live_and_die(NULL);
    g_assert(held.bytes == 0 && held.files == 0);
    calls = held.calls;
    g_assert(calls > 15);
    for (unsigned k = 1; k <= calls; k++) {
        memset(&held, 0, sizeof(held));
        held.fails = k;
        live_and_die(NULL);
        g_assert(held.bytes == 0 && held.files == 0);
    }
    prim = prim_real;
    /* and on the heap */
    memset(&held, 0, sizeof(held));
    g_assert(!util_leaks(live_and_die, NULL, 50));
}

static int at_0(int fd)
{
    g_assert(fd >= 0);
    if (fd) {
        g_assert(dup2(fd, 0) == 0);
        close(fd);
    }
    return 0;
}

static int memfd_at_0(const char *name)
{
    return at_0(prim_real.memfd(name));
}

static int memfd_sealable_at_0(const char *name)
{
    return at_0(prim_real.memfd_sealable(name));
}

static int open_at_0(const char *path)
{
    int fd = prim_real.open_read(path);

    return g_str_has_prefix(path, "/proc/self/fd/") ? at_0(fd) : fd;
}

/* One file is descriptor 0: the first, for writing, or for children. */
static void live_with_0(unsigned which)
{
    char page[PAGE_BYTES] = "zero";
    unsigned n = 1;
    uint32_t slot;
    KsmPool p;

    prim.memfd = which == 0 ? memfd_at_0 : prim_real.memfd;
    prim.open_read = which == 1 ? open_at_0 : prim_real.open_read;
    g_assert(pool_init(&p, SHARING) == 0);
    g_assert(pool_reserve(&p, CHUNK_PAGES) == 0);
    slot = pool_take(&p, &n);
    g_assert(pool_fill(&p, slot, page, 1) == 0);
    g_assert(!strcmp(pool_page(&p, slot), "zero"));
    prim = prim_real;
    prim.memfd_sealable = which == 2 ? memfd_sealable_at_0
                                     : prim_real.memfd_sealable;
    for (unsigned i = 0; i < 2 && !p.keep_all; i++) {
        pool_fork(&p);
        g_assert(p.watch && p.forks_blind == 0);
        pool_forked(&p);
        /* one file serves all forks */
        prim.memfd_sealable = memfd_fails;
    }
    if (which == 2) {
        pool_unkeep(&p);
        g_assert(!p.kept);
    }
    prim = prim_real;
    pool_free(&p);
    g_assert(fcntl(0, F_GETFD) < 0 || (which == 2 && p.keep_all));
}

/* With standard input closed, 0 is a descriptor, too. */
static void test_fd_0(Fixture *f, gconstpointer data)
{
    int was = fcntl(0, F_DUPFD_CLOEXEC, 3);

    live_with_0(GPOINTER_TO_UINT(data));
    if (was >= 0) {
        g_assert(dup2(was, 0) == 0);
        close(was);
    }
}

static char *vm_flags(const void *addr)
{
    g_autofree char *head = g_strdup_printf("%lx-", (unsigned long)addr);
    g_autofree char *text = prim_read_file("/proc/self/smaps", NULL);
    const char *at, *end;

    g_assert(text);
    at = g_str_has_prefix(text, head) ? text : strstr(text, head);
    g_assert(at);
    at = strstr(at, "VmFlags:");
    end = at ? strchr(at, '\n') : NULL;
    g_assert(end);
    /* spaces around each of them */
    return g_strdup_printf("%.*s ", (int)(end - at), at);
}

static void check_view(Fixture *f)
{
    g_autofree char *flags = vm_flags(f->pool.view);

    /* neither a child nor a core needs the view */
    g_assert(strstr(flags, " dc ") && strstr(flags, " dd "));
    g_assert(!strstr(flags, " wr "));
}

static const void *lost_view;

static void *view_stays(void *from, size_t len, size_t want, void *at)
{
    if (at || from == lost_view) {
        if (at) {
            munmap(at, want);
        }
        return NULL;
    }
    return prim_real.lengthen(from, len, want, at);
}

static unsigned places;

static void *no_place(void *addr, size_t len, int prot, int flags, int fd,
                      off_t offset)
{
    places += prot == PROT_NONE;
    return prot == PROT_NONE ? NULL
                             : prim_real.map(addr, len, prot, flags, fd,
                                             offset);
}

/* Where the view is, how it is mapped, and how it is lost. */
static void test_view(Fixture *f, gconstpointer data)
{
    uint32_t slot = take_one(f, 'v');
    const char *view = f->pool.view;

    check_view(f);
    g_assert((uintptr_t)view % (1 << 30) == 0);
    g_assert(pool_reserve(&f->pool, 2048 * CHUNK_PAGES) == 0);
    check_view(f);
    g_assert((uintptr_t)f->pool.view % (1 << 30) == 0);
    g_assert(pool_page(&f->pool, slot)[1] == 'v');
    /* another one takes its place, and no more is asked of addresses */
    lost_view = f->pool.view;
    prim.lengthen = view_stays;
    g_assert(pool_reserve(&f->pool, 3000 * CHUNK_PAGES) == 0);
    prim.lengthen = prim_real.lengthen;
    g_assert(f->pool.view != lost_view);
    check_view(f);
    g_assert(pool_page(&f->pool, slot)[1] == 'v');
    g_assert(msync((void *)lost_view, PAGE_BYTES, MS_ASYNC) < 0);
    places = 0;
    prim.map = no_place;
    g_assert(pool_reserve(&f->pool, 4000 * CHUNK_PAGES) == 0);
    g_assert(places == 0);
    g_assert(pool_page(&f->pool, slot)[1] == 'v');
    /* where there is none, any will do, and it is asked for again */
    f->pool.anywhere = false;
    g_assert(pool_reserve(&f->pool, 5000 * CHUNK_PAGES) == 0);
    g_assert(places == 1 && !f->pool.anywhere);
    prim.map = prim_real.map;
    check_view(f);
    g_assert(pool_page(&f->pool, slot)[1] == 'v');
}

static size_t page_up(size_t bytes)
{
    return ROUND_UP_TO(bytes, PAGE_BYTES);
}

/* Slots for half of the pages and an eighth more. */
static void test_capacity(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    size_t pages = 4000 * CHUNK_PAGES, least, was;

    g_assert(pool_reserve(p, pages) == 0);
    least = pages / 2 + pages / 8 + 4 * CHUNK_PAGES;
    g_assert(p->capacity >= least && p->capacity < least + 4096);
    g_assert(p->mapped[0] == p->capacity * PAGE_BYTES);
    g_assert(p->mapped[1] == page_up(p->capacity * sizeof(*p->hash)));
    g_assert(p->mapped[2] == page_up(p->capacity * sizeof(*p->users)));
    g_assert(p->mapped[3] == page_up(p->capacity / 8));
    g_assert(p->mapped[4] ==
             page_up(p->capacity / 4096 * sizeof(*p->vacant.lines)));
    /* memory that is there is not asked for again */
    was = p->capacity;
    prim.map = no_place;
    prim.lengthen = view_stays;
    places = 0;
    lost_view = p->view;
    g_assert(pool_reserve(p, pages) == 0);
    g_assert(pool_reserve(p, pages - 1000) == 0);
    g_assert(p->capacity == was && p->view == lost_view && places == 0);
    prim = prim_real;
}

/* Metadata: of slots in use. */
static void test_bytes(Fixture *f, gconstpointer data)
{
    size_t none = pool_bytes(&f->pool), some;
    unsigned n = 500;

    g_assert(none == 0);
    g_assert(pool_take(&f->pool, &n) != SLOT_NONE && n == 500);
    some = pool_bytes(&f->pool);
    g_assert(some == 500 * (4 + 2) + 500 / 8 + 500 / 64);
    pool_fork(&f->pool);
    pool_forked(&f->pool);
    if (!f->pool.keep_all) {
        g_assert(pool_bytes(&f->pool) ==
                 some + page_up(f->pool.capacity / 8));
    }
}

static const char *shmem_text, *shmem_64k;
static int shmem_fd;

static int open_shmem(const char *path)
{
    const char *text = strstr(path, "hugepages-64kB/") ? shmem_64k
                     : strstr(path, "hugepages-") ? NULL : shmem_text;
    int fd;

    if (!strstr(path, "shmem_enabled")) {
        return prim_real.open_read(path);
    }
    if (!text) {
        return -ENOENT;
    }
    fd = prim_real.memfd("shmem_enabled");
    g_assert(write(fd, text, strlen(text)) > 0);
    g_assert(lseek(fd, 0, SEEK_SET) == 0);
    shmem_fd = fd;
    return fd;
}

static int punch_never(int fd, off_t offset, off_t len)
{
    g_assert_not_reached();
}

/*
 * Files of huge pages give nothing up: punching would change what others may
 * still see.
 */
static void test_huge_shmem(Fixture *f, gconstpointer data)
{
    static const struct {
        const char *text;
        bool huge;
        const char *size;
    } texts[] = {
        { "always within_size advise [never] deny force\n", false, NULL },
        { "always within_size [advise] never deny force\n", false, NULL },
        { "always within_size advise never [deny] force\n", false, NULL },
        { "[always] within_size advise never deny force\n", true, NULL },
        { "always [within_size] advise never deny force\n", true, NULL },
        { "always within_size advise never deny [force]\n", true, NULL },
        { NULL, false, NULL },
        { "always within_size advise [never] deny force\n", true,
          "[always] inherit within_size advise never\n" },
        { "always within_size advise [never] deny force\n", true,
          "always inherit [within_size] advise never\n" },
        { "always within_size advise [never] deny force\n", false,
          "always [inherit] within_size advise never\n" },
        { "always within_size advise [never] deny force\n", false,
          "always inherit within_size [advise] never\n" },
    };

    for (unsigned i = 0; i < G_N_ELEMENTS(texts); i++) {
        uint32_t slot;
        unsigned n = 1;
        KsmPool p;

        shmem_text = texts[i].text;
        shmem_64k = texts[i].size;
        prim.open_read = open_shmem;
        g_assert(pool_init(&p, SHARING) == 0);
        prim.open_read = prim_real.open_read;
        g_assert(p.keep_all == texts[i].huge);
        g_assert(pool_reserve(&p, CHUNK_PAGES) == 0);
        slot = pool_take(&p, &n);
        pool_user_add(&p, slot);
        prim.punch = texts[i].huge ? punch_never : prim_real.punch;
        pool_user_drop(&p, slot);
        pool_flush(&p);
        pool_unkeep(&p);
        g_assert(!pool_release(&p));
        g_assert(p.leaked == texts[i].huge && p.vacant.n == !texts[i].huge);
        prim.punch = prim_real.punch;
        pool_free(&p);
    }
}

static uint64_t clock_ns;

static uint64_t clock_is(void)
{
    return clock_ns;
}

/* Who runs the host may switch to huge pages at any time, and does so here. */
static void test_huge_later(Fixture *f, gconstpointer data)
{
    uint32_t a = take_one(f, 'a'), b = take_one(f, 'b'), c = take_one(f, 'c');

    if (f->pool.keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    pool_user_add(&f->pool, a);
    pool_user_add(&f->pool, b);
    pool_user_add(&f->pool, c);
    clock_ns = prim_real.now_ns();
    prim.now_ns = clock_is;
    pool_user_drop(&f->pool, a);
    pool_flush(&f->pool);
    g_assert(f->pool.vacant.n == 1);
    pool_user_drop(&f->pool, b);
    shmem_text = "[always] within_size advise never deny force\n";
    prim.open_read = open_shmem;
    prim.punch = punch_never;
    clock_ns += 200000000;
    pool_flush(&f->pool);
    pool_user_drop(&f->pool, c);
    pool_flush(&f->pool);
    pool_unkeep(&f->pool);
    g_assert(!pool_release(&f->pool));
    g_assert(f->pool.keep_all && f->pool.leaked == 2);
    prim.open_read = prim_real.open_read;
    prim.punch = prim_real.punch;
    prim.now_ns = prim_real.now_ns;
}

static size_t limit;

static size_t file_limit_is(void)
{
    return limit;
}

static int truncate_fails(int fd, off_t size)
{
    return -ENOSPC;
}

static size_t file_size(Fixture *f)
{
    struct stat st;

    g_assert(fstat(f->pool.fd, &st) == 0);
    return st.st_size / PAGE_BYTES;
}

static bool can_take(Fixture *f, unsigned n)
{
    uint32_t top = f->pool.top;
    unsigned got = n;

    return pool_take(&f->pool, &got) == top && got == n;
}

/* The file grows in steps as far as it may; else no slot is had. */
static void test_file(Fixture *f, gconstpointer data)
{
    const unsigned step = 8192;

    g_assert(pool_reserve(&f->pool, 100 * CHUNK_PAGES) == 0);
    g_assert(file_size(f) == 0);
    prim.truncate = truncate_fails;
    g_assert(!can_take(f, 1) && f->pool.top == 0);
    prim.truncate = prim_real.truncate;
    g_assert(can_take(f, 512) && file_size(f) == step);
    /* all of that can be had at once */
    prim.truncate = truncate_fails;
    g_assert(can_take(f, step - 512));
    g_assert(!can_take(f, 1));
    prim.truncate = prim_real.truncate;
    /* a process at its limit of file length gets a signal */
    prim.file_limit = file_limit_is;
    limit = (step + 99) * PAGE_BYTES + 5;
    /* which may become less when the file is that long */
    g_assert(pool_fill(&f->pool, 0, f->page, 1) == 0);
    limit = PAGE_BYTES;
    g_assert(pool_fill(&f->pool, 0, f->page, 1) == 0);
    g_assert(pool_fill(&f->pool, 1, f->page, 1) == -EFBIG);
    limit = (step + 99) * PAGE_BYTES + 5;
    g_assert(!can_take(f, 100) && file_size(f) == step);
    g_assert(can_take(f, 99) && file_size(f) == step + 99);
    g_assert(!can_take(f, 1) && f->pool.top == step + 99);
    prim.file_limit = prim_real.file_limit;
    while (f->pool.top < f->pool.capacity) {
        g_assert(can_take(f, MIN(512, f->pool.capacity - f->pool.top)));
    }
    /* no longer than there can be slots */
    g_assert(file_size(f) == f->pool.capacity);
    check_free(&f->pool);
}

static struct {
    unsigned calls;
    off_t offset[100], len[100];
} punches;

static int punch_note(int fd, off_t offset, off_t len)
{
    g_assert(punches.calls < 100);
    punches.offset[punches.calls] = offset / PAGE_BYTES;
    punches.len[punches.calls++] = len / PAGE_BYTES;
    return prim_real.punch(fd, offset, len);
}

/* One punch for neighbouring slots, in whatever order. */
static void test_punch_once(Fixture *f, gconstpointer data)
{
    static const uint8_t order[] = { 7, 3, 5, 2, 6, 12, 11, 30 };
    unsigned n = 64;

    if (f->pool.keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    g_assert(pool_take(&f->pool, &n) == 0 && n == 64);
    for (unsigned i = 0; i < G_N_ELEMENTS(order); i++) {
        pool_untake(&f->pool, order[i], 1);
    }
    memset(&punches, 0, sizeof(punches));
    prim.punch = punch_note;
    pool_flush(&f->pool);
    pool_flush(&f->pool);
    g_assert(punches.calls == 4);
    g_assert(punches.offset[0] == 2 && punches.len[0] == 2);
    g_assert(punches.offset[1] == 5 && punches.len[1] == 3);
    g_assert(punches.offset[2] == 11 && punches.len[2] == 2);
    g_assert(punches.offset[3] == 30 && punches.len[3] == 1);
    g_assert(f->pool.vacant.n == G_N_ELEMENTS(order));
    check_free(&f->pool);
    /* they are punched 64 at a time */
    n = 64;
    g_assert(pool_take(&f->pool, &n) == 64);
    pool_untake(&f->pool, 64, 64);
    g_assert(punches.calls == 4);
    pool_untake(&f->pool, 0, 1);
    g_assert(punches.calls == 5 && punches.offset[4] == 64 &&
             punches.len[4] == 64);
    prim.punch = prim_real.punch;
}

static int punch_fails_even(int fd, off_t offset, off_t len)
{
    return offset / PAGE_BYTES % 4 ? prim_real.punch(fd, offset, len)
                                   : -ENOMEM;
}

/* What cannot be punched counts as leaked, and is tried again. */
static void test_punch_fails_many(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    KsmPattern *t = pool_pattern_new(p, f->page, 1);
    unsigned n = 300;
    uint32_t slot = pool_take(p, &n), first = t->first;

    if (p->keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    g_assert(n == 300);
    prim.punch = punch_fails;
    pool_user_add(p, first);
    pool_user_drop(p, first);
    g_assert(p->leaked == CHUNK_PAGES);
    g_assert(!pool_release(p));
    g_assert(p->leaked == CHUNK_PAGES);
    pool_untake(p, slot, 300);
    g_assert(p->leaked + p->n_punch == CHUNK_PAGES + 300);
    g_assert(!pool_release(p));
    g_assert(p->leaked == CHUNK_PAGES + 300);
    /* some can: no piece is lost, or had before its time */
    prim.punch = punch_fails_even;
    release_all(f);
    check_free(p);
    g_assert(p->vacant.n < 300);
    prim.punch = prim_real.punch;
    release_all(f);
    pool_flush(p);
    g_assert(p->leaked == 0 && p->vacant.n == 300);
    check_free(p);
    g_assert(pool_pattern_new(p, f->page, 1)->first == first);
}

static unsigned punch_calls;
static off_t punch_bad;         /* below it punching fails */

static int punch_fails_below(int fd, off_t offset, off_t len)
{
    punch_calls++;
    return offset < punch_bad ? -ENOMEM : prim_real.punch(fd, offset, len);
}

/*
 * Each is tried once when it is given up, and keeps no other from being tried.
 */
static void test_punch_fails_some(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    unsigned n = 256;
    uint32_t first[2];

    if (p->keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    g_assert(pool_take(p, &n) == 0 && n == 256);
    prim.punch = punch_fails_below;
    punch_bad = 256 * PAGE_BYTES;
    punch_calls = 0;
    for (unsigned i = 0; i < 256; i += 2) {
        pool_untake(p, i, 1);
    }
    pool_flush(p);
    g_assert(punch_calls == 128);
    g_assert(p->leaked == 128 && p->n_punch == 0);
    pool_flush(p);
    g_assert(punch_calls == 128);
    punch_bad = 128 * PAGE_BYTES;
    for (unsigned i = 0; i < 4; i++) {
        /* the lower half, then the other one */
        g_assert(pool_release(p) == (i == 1));
        g_assert(p->leaked == (i == 0 ? 128 : 64));
        g_assert(p->vacant.n == (i == 0 ? 0 : 64) && p->n_punch == 0);
    }
    /* a block can, and another one is left */
    for (unsigned i = 0; i < 2; i++) {
        first[i] = pool_pattern_new(p, f->page, 1)->first;
    }
    punch_bad = p->top * PAGE_BYTES;
    for (unsigned i = 0; i < 2; i++) {
        pool_user_add(p, first[i]);
        pool_user_drop(p, first[i]);
    }
    punch_bad = 128 * PAGE_BYTES;
    g_assert(pool_release(p));
    g_assert(p->leaked == CHUNK_PAGES + 64);
    g_assert(pool_release(p));
    g_assert(p->leaked == 64 && !pool_release(p));
    punch_bad = 0;
    g_assert(!pool_release(p));
    g_assert(p->leaked == 0 && p->blocks->len == 2);
    prim.punch = prim_real.punch;
    check_free(p);
}

/* It goes a piece at a time, and says whether there is more. */
static void test_release_pieces(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    unsigned n = 300;
    uint32_t slot = pool_take(p, &n);
    KsmPattern *t[2];

    if (p->keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    g_assert(!pool_release(p));
    for (unsigned i = 0; i < 2; i++) {
        t[i] = pool_pattern_new(p, f->page, 1);
        g_assert(t[i]);
    }
    prim.punch = punch_fails;
    for (unsigned i = 0; i < 2; i++) {
        uint32_t first = t[i]->first;

        pool_user_add(p, first);
        pool_user_drop(p, first);
    }
    pool_untake(p, slot, 300);
    prim.punch = prim_real.punch;
    g_assert(p->leaked == 2 * CHUNK_PAGES + 256);
    g_assert(pool_release(p));
    g_assert(p->leaked == CHUNK_PAGES + 256 - 64);
    g_assert(pool_release(p));
    g_assert(p->leaked == 256 - 2 * 64 && p->blocks->len == 2);
    g_assert(pool_release(p));
    g_assert(p->leaked == 256 - 3 * 64);
    g_assert(!pool_release(p));
    g_assert(p->leaked == 0 && p->n_punch == 0);
    g_assert(!pool_release(p));
    check_free(p);
}

/* Which slots were in use when the process forked. */
static void test_kept(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    unsigned n = 200;

    if (p->keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    g_assert(pool_take(p, &n) == 0 && n == 200);
    pool_untake(p, 5, 1);
    pool_untake(p, 195, 2);
    /* given up but not punched yet: as if it was */
    pool_fork(p);
    pool_forked(p);
    g_assert(p->vacant.n == 3);
    n = 100;
    g_assert(pool_take(p, &n) == 200 && n == 100);
    p->vacant.cursor = 0;
    n = 2;
    g_assert(pool_take(p, &n) == 195 && n == 2);
    n = 1;
    g_assert(pool_take(p, &n) != SLOT_NONE);
    /* no child maps what was free then or came later */
    pool_untake(p, 5, 1);
    pool_untake(p, 195, 2);
    pool_untake(p, 200, 100);
    pool_flush(p);
    g_assert(p->leaked == 0 && p->vacant.n == 103);
    pool_untake(p, 0, 5);
    pool_untake(p, 6, 189);
    pool_untake(p, 197, 3);
    pool_flush(p);
    g_assert(p->leaked == 197 && p->vacant.n == 103);
    wait_given_up(f);
    g_assert(p->vacant.n == 300);
    check_free(p);
}

/* Without memory to note it nothing is given up any more. */
static void test_kept_fails(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    uint32_t slot = take_one(f, 'a'), other = take_one(f, 'b');
    bool grown = GPOINTER_TO_UINT(data);

    pool_user_add(p, slot);
    pool_user_add(p, other);
    if (grown) {
        pool_fork(p);
        pool_forked(p);
        g_assert(pool_reserve(p, 4096 * CHUNK_PAGES) == 0);
        lost_view = p->kept;
    }
    memset(&held, 0, sizeof(held));
    held.fails = 2;
    prim.map = grown ? prim_real.map : held_map;
    prim.lengthen = view_stays;
    pool_fork(p);
    pool_forked(p);
    prim = prim_real;
    g_assert(p->keep_all);
    pool_user_drop(p, slot);
    pool_unkeep(p);
    release_all(f);
    g_assert(p->leaked == 1);
    g_assert(pool_page(p, slot)[0] == 'a');
    pool_fork(p);
    pool_forked(p);
    pool_user_drop(p, other);
    pool_unkeep(p);
    release_all(f);
    g_assert(p->leaked == 2);
}

/* Drops slots, kept for a child that is gone at once. */
static void keep(Fixture *f, uint32_t slot, unsigned n)
{
    pool_fork(&f->pool);
    pool_forked(&f->pool);
    pool_untake(&f->pool, slot, n);
}

/* What is kept joins what could not be punched; each goes once. */
static void test_kept_again(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    unsigned n = 400;
    uint32_t first[2];

    if (p->keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    g_assert(pool_take(p, &n) == 0 && n == 400);
    for (unsigned i = 0; i < 2; i++) {
        first[i] = pool_pattern_new(p, f->page, 1)->first;
        pool_user_add(p, first[i]);
    }
    prim.punch = punch_fails;
    pool_untake(p, 0, 100);
    pool_user_drop(p, first[0]);
    keep(f, 100, 50);
    pool_user_drop(p, first[1]);
    g_assert(p->leaked == 2 * CHUNK_PAGES + 150);
    pool_unkeep(p);
    keep(f, 150, 30);
    pool_unkeep(p);
    pool_unkeep(p);
    prim.punch = prim_real.punch;
    release_all(f);
    pool_flush(p);
    g_assert(p->leaked == 0);
    g_assert(p->vacant.n == 180 + (CHUNK_PAGES - 400) && p->blocks->len == 2);
    /* no more of them: the others are in use */
    keep(f, 200, 1);
    wait_given_up(f);
    keep(f, 300, 1);
    wait_given_up(f);
    g_assert(p->vacant.n == 182 + (CHUNK_PAGES - 400));
    check_free(p);
    g_assert(p->blocks->len == 2);
}

/* In the child, what tells of it stays mapped. */
static void test_forked_child(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    unsigned n = 65;
    void *watch;

    if (p->keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    g_assert(pool_take(p, &n) == 0 && n == 65);
    pool_fork(p);
    watch = p->watch;
    pool_forked_child(p);
    g_assert(watch && !p->watch);
    /* the last one, too */
    pool_untake(p, 64, 1);
    pool_unkeep(p);
    release_all(f);
    g_assert(p->leaked == 1);
    g_assert(prim.unmap(watch, PAGE_BYTES) == 0);
    wait_given_up(f);
    g_assert(p->vacant.n == 1);
}

/* What could not be punched joins what a child had; nothing is lost. */
static void test_gone(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    KsmPattern *t = pool_pattern_new(p, f->page, 1);
    uint32_t first = t->first;
    unsigned n = 200;

    if (p->keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    g_assert(pool_take(p, &n) == first + CHUNK_PAGES && n == 200);
    keep(f, first + CHUNK_PAGES + 1, 3);
    pool_unkeep(p);
    prim.punch = punch_fails;
    pool_untake(p, first + CHUNK_PAGES + 10, 70);
    g_assert(p->leaked == 3 + 64 && p->n_punch == 6);
    /* not now: who asks is not to ask again at once */
    g_assert(!pool_release(p));
    prim.punch = prim_real.punch;
    release_all(f);
    g_assert(p->leaked == 0 && p->vacant.n == 73);
    /* a released block ends where the next slot begins */
    pool_user_add(p, first);
    pool_user_add(p, first + CHUNK_PAGES);
    pool_user_drop(p, first);
    g_assert(p->blocks->len == 1 && p->vacant.n == 73);
    g_assert(p->users[first + CHUNK_PAGES] == 1);
    check_free(p);
}

/* Calls about memory policies and memory of the file. */
static struct {
    unsigned get, prefer, set, allocate, pauses;
    int get_ret, prefer_ret, allocate_ret;
    unsigned set_fails;     /* so often */
    int node, mode;
    bool ordered;           /* the node is asked for, memory, back */
    off_t offset, len;
} numa;

static int numa_get(int *mode, unsigned long *mask, size_t bits)
{
    g_assert(bits >= 1024);
    numa.get++;
    *mode = 4711;
    mask[0] = 42;
    mask[bits / 64 - 1] = 43;
    return numa.get_ret;
}

static int numa_prefer(int node)
{
    numa.prefer++;
    numa.node = node;
    return numa.prefer_ret;
}

static int numa_set(int mode, const unsigned long *mask, size_t bits)
{
    numa.ordered &= numa.allocate == 1;
    g_assert(mode == 4711 && mask[0] == 42 && mask[1] == 0 &&
             mask[bits / 64 - 1] == 43);
    return numa.set++ < numa.set_fails ? -ENOMEM : 0;
}

static int numa_allocate(int fd, off_t offset, off_t len)
{
    numa.ordered = numa.prefer == 1;
    numa.allocate++;
    numa.offset = offset / PAGE_BYTES;
    numa.len = len / PAGE_BYTES;
    return numa.allocate_ret;
}

static void numa_pause(unsigned us)
{
    numa.pauses++;
}

static void numa_fake(void)
{
    memset(&numa, 0, sizeof(numa));
    prim.thread_policy_get = numa_get;
    prim.thread_policy_set = numa_set;
    prim.prefer_node = numa_prefer;
    prim.allocate = numa_allocate;
    prim.pause = numa_pause;
}

/* Memory is of that node, and the thread's policy stays. */
static void test_allocate(Fixture *f, gconstpointer data)
{
    numa_fake();
    g_assert(pool_allocate(&f->pool, 3, 7) == 0);
    g_assert(numa.allocate == 1 && numa.offset == 3 && numa.len == 7);
    g_assert(!numa.get && !numa.prefer && !numa.set);
    numa_fake();
    numa.allocate_ret = -ENOSPC;
    numa.set_fails = 3;
    for (f->pool.node = 0; f->pool.node < 3; f->pool.node += 2) {
        g_assert(pool_allocate(&f->pool, 5, 2) == -ENOSPC);
        g_assert(numa.ordered && numa.node == f->pool.node);
        g_assert(numa.set == 4 && numa.pauses == 3 && numa.get == 1);
        g_assert(numa.offset == 5 && numa.len == 2);
        numa_fake();
        numa.allocate_ret = -ENOSPC;
        numa.set_fails = 3;
    }
    /* an unknown old policy, or no such node: memory as it comes */
    numa_fake();
    numa.get_ret = -ENOSYS;
    g_assert(pool_allocate(&f->pool, 0, 1) == 0);
    g_assert(numa.allocate == 1 && !numa.prefer && !numa.set);
    numa_fake();
    numa.prefer_ret = -EINVAL;
    g_assert(pool_allocate(&f->pool, 0, 1) == 0);
    g_assert(numa.allocate == 1 && !numa.set && !numa.pauses);
    /* not for ever */
    numa_fake();
    numa.set_fails = 1000000;
    g_assert(pool_allocate(&f->pool, 0, 1) == 0);
    g_assert(numa.set > 50 && numa.set < 1000);
    prim = prim_real;
}

static unsigned writes;
static ssize_t write_ret;

/* Is interrupted, and writes little at a time. */
static ssize_t write_little(int fd, const void *buf, size_t len, off_t offset)
{
    if (writes++ % 2 == 0) {
        return -EINTR;
    }
    if (writes > 6 && write_ret <= 0) {
        return write_ret;
    }
    return prim_real.write(fd, buf, MIN(len, 1500), offset);
}

static void test_fill(Fixture *f, gconstpointer data)
{
    char content[3 * PAGE_BYTES];
    unsigned n = 4;
    uint32_t slot = pool_take(&f->pool, &n);

    for (unsigned i = 0; i < sizeof(content); i++) {
        content[i] = i / 7;
    }
    prim.write = write_little;
    writes = 0;
    write_ret = 1;
    g_assert(pool_fill(&f->pool, slot + 1, content, 3) == 0);
    g_assert(writes == 2 * ((sizeof(content) + 1499) / 1500));
    g_assert(!memcmp(pool_page(&f->pool, slot + 1), content,
                     sizeof(content)));
    g_assert(file_blocks(f) == 3);
    writes = 0;
    write_ret = -EIO;
    g_assert(pool_fill(&f->pool, slot, content, 1) == 0);
    writes = 0;
    g_assert(pool_fill(&f->pool, slot, content, 3) == -EIO);
    writes = 0;
    write_ret = 0;
    g_assert(pool_fill(&f->pool, slot, content, 3) == -ENOSPC);
    prim.write = prim_real.write;
}

static int advise_ret;

static int advise_note(void *addr, size_t len, int advice)
{
    g_assert(advice == MADV_POPULATE_READ);
    punches.offset[0] = (uintptr_t)addr;
    punches.len[0] = len;
    return advise_ret;
}

static void test_readable(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    uint32_t slot = take_one(f, 'r');
    g_autofree char *flags = NULL;

    g_assert(pool_readable(p, slot, 1) == 0);
    prim.advise = advise_note;
    advise_ret = 0;
    g_assert(pool_readable(p, slot + 3, 5) == 0);
    g_assert((char *)punches.offset[0] == pool_page(p, slot + 3));
    g_assert(punches.len[0] == 5 * PAGE_BYTES);
    /* memory has failed, as different kernels say it */
    advise_ret = -EHWPOISON;
    g_assert(pool_readable(p, slot, 1) == -EFAULT);
    advise_ret = -EINVAL;
    g_assert(pool_readable(p, slot, 1) == -EFAULT);
    advise_ret = -ENOMEM;
    g_assert(pool_readable(p, slot, 1) == -ENOMEM);
    prim.advise = prim_real.advise;
}

static ssize_t scan_fails(PmScan *scan)
{
    return -ENOMEM;
}

/* PAGEMAP_SCAN for kernels without: the first present pages in a row. */
static ssize_t scan_present(PmScan *scan)
{
    PmRange *found = &scan->vec[0];

    *found = (PmRange) { .kinds = PM_PRESENT };
    for (uintptr_t at = scan->start; at < scan->end; at += PAGE_BYTES) {
        uint64_t entry;

        g_assert(prim_real.read_at(scan->fd, &entry, sizeof(entry),
                                   at / PAGE_BYTES * sizeof(entry)) ==
                 sizeof(entry));
        if (entry >> 63) {
            found->start = found->start ? found->start : at;
            found->end = at + PAGE_BYTES;
        } else if (found->start) {
            break;
        }
    }
    return found->start != 0;
}

/* What was compared before is mapped already. */
static void test_readable_mapped(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    uint32_t slot = take_one(f, 'r');

    g_assert(take_one(f, 's') == slot + 1);
    prim.pagemap = scan_present;
    pool_user_add(p, slot);
    pool_user_add(p, slot);
    g_assert(pool_readable(p, slot, 1) == 0);
    prim.advise = advise_note;
    advise_ret = -ENOMEM;
    g_assert(pool_readable(p, slot, 1) == -ENOMEM);     /* new: not asked */
    pool_user_add(p, slot);
    g_assert(pool_readable(p, slot, 1) == 0);
    /* one of them is not mapped */
    for (unsigned k = 0; k < 2; k++) {
        g_assert(*pool_page(p, slot) == 'r');
        g_assert(*pool_page(p, slot + 1) == 's');
        g_assert(pool_readable(p, slot, 2) == 0);
        g_assert(madvise(p->view + (slot + k) * PAGE_BYTES, PAGE_BYTES,
                         MADV_DONTNEED) == 0);
        g_assert(pool_readable(p, slot, 2) == -ENOMEM);
    }
    g_assert(*pool_page(p, slot) == 'r');
    prim.pagemap = scan_fails;
    g_assert(pool_readable(p, slot, 1) == -ENOMEM);
    prim.pagemap = scan_present;
    g_assert(madvise(p->view, p->capacity * PAGE_BYTES, MADV_DONTNEED) == 0);
    advise_ret = -EHWPOISON;
    g_assert(pool_readable(p, slot, 1) == -EFAULT);
    prim.advise = prim_real.advise;
    prim.pagemap = prim_real.pagemap;
    for (unsigned i = 0; i < 3; i++) {
        pool_user_drop(p, slot);
    }
}

/* How often pages were asked for, and how many of them; that one fails. */
static unsigned calls, asked;
static const char *failed;

static int advise_count(void *addr, size_t len, int advice)
{
    char *at = addr;

    g_assert(advice == MADV_POPULATE_READ);
    calls++;
    asked += len / PAGE_BYTES;
    if (failed >= at && failed < at + len) {
        return -EHWPOISON;
    }
    return prim_real.advise(addr, len, advice);
}

static bool present(const KsmPool *p, uint32_t slot, unsigned n)
{
    PmRange range;
    PmScan scan = {
        .fd = p->pagemap,
        .start = (uintptr_t)pool_page(p, slot),
        .end = (uintptr_t)pool_page(p, slot + n),
        .vec = &range,
    };

    return scan_present(&scan) && range.start == scan.start &&
           range.end == scan.end;
}

static ssize_t scan_less(PmScan *scan)
{
    ssize_t n = scan_present(scan);

    scan->vec[0].end -= PAGE_BYTES;
    return n;
}

/* Of a long run a page in 16 is asked for, and all if those were not enough. */
static void test_readable_long(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    uint32_t slot = take_one(f, '0');
    bool around;

    for (unsigned i = 1; i < 256; i++) {
        g_assert(take_one(f, '0' + i % 64) == slot + i);
    }
    prim.advise = advise_count;
    prim.pagemap = scan_present;
    /* does this kernel map as many around a fault? */
    g_assert(madvise(p->view, p->capacity * PAGE_BYTES, MADV_DONTNEED) == 0);
    g_assert(*pool_page(p, slot + 65) == '1');
    around = present(p, slot + 64, 16) && !present(p, slot + 80, 1);
    calls = asked = 0;
    g_assert(pool_readable(p, slot + 3, 250) == 0);
    g_assert(calls == (around ? 16 : 17));
    g_assert(asked == (around ? 16 : 16 + 250));
    calls = 0;
    g_assert(pool_readable(p, slot + 3, 31) == 0 && calls == 1);
    g_assert(pool_readable(p, slot + 3, 32) == 0 && calls == 1 + 3);
    /* one that the first faults do not see */
    failed = pool_page(p, slot + 103);
    prim.pagemap = scan_less;
    asked = 0;
    g_assert(pool_readable(p, slot + 3, 250) == -EFAULT);
    g_assert(asked == 16 + 250);
    failed = NULL;
    prim.pagemap = scan_fails;
    g_assert(pool_readable(p, slot + 3, 100) == 0);
    /* one that they ask for */
    prim.pagemap = scan_present;
    failed = pool_page(p, slot + 128);
    g_assert(pool_readable(p, slot + 3, 250) == -EFAULT);
    failed = NULL;
    prim.advise = prim_real.advise;
    prim.pagemap = prim_real.pagemap;
}

/* Blocks begin at multiples of 512, and are had again. */
static void test_blocks(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    uint32_t first[64], n_blocks = p->capacity / CHUNK_PAGES;
    uint32_t slot = take_one(f, 'p');
    KsmPattern *t;

    g_assert(slot == 0 && n_blocks == 16);
    for (unsigned i = 1; i < n_blocks; i++) {
        t = pool_pattern_new(p, f->page, i);
        g_assert(t && t->first == i * CHUNK_PAGES && t->filled == 16);
        g_assert(p->top == (i + 1) * CHUNK_PAGES);
        g_assert(pool_pattern(p, t->first) == t);
        g_assert(pool_pattern(p, t->first + 511) == t);
        g_assert(!pool_pattern(p, t->first - (i == 1)) || i > 1);
        first[i] = t->first;
        /* each has users of its own */
        pool_user_add(p, first[i]);
        pool_user_add(p, first[i]);
        pool_user_add(p, first[1] + 1);
        pool_user_drop(p, first[1] + 1);
        g_assert(t->users == 2);
    }
    check_free(p);
    g_assert(p->vacant.n == CHUNK_PAGES - 1);
    g_assert(!pool_pattern(p, 0) && !pool_pattern(p, 511));
    g_assert(!pool_pattern_new(p, f->page, 1));
    /* only the one no longer used can be had */
    pool_user_drop(p, first[5]);
    g_assert(f->unindexed == 0);
    pool_user_drop(p, first[5]);
    g_assert(f->unindexed == 1 && f->last_slot == first[5]);
    g_assert(f->last_hash == 5);
    g_assert(p->shared == n_blocks - 2 && p->sharing == 2 * (n_blocks - 2));
    if (!p->keep_all) {
        g_assert(file_blocks(f) == 1 + 16 * (n_blocks - 2));
        t = pool_pattern_new(p, f->page, 77);
        g_assert(t && t->first == first[5] && t->users == 0);
        g_assert(!pool_pattern_new(p, f->page, 1));
    }
    g_assert(pool_page(p, first[4])[3] == 'p');
    g_assert(pool_pattern(p, first[4])->users == 2);
}

/* A pattern is of the node asked for; without memory there, no more. */
static void test_pattern_node(Fixture *f, gconstpointer data)
{
    KsmPattern *t;

    f->pool.node = 0;
    numa_fake();
    t = pool_pattern_new(&f->pool, f->page, 1);
    g_assert(t && numa.allocate == 1 && numa.prefer == 1 && numa.node == 0);
    g_assert(numa.offset == t->first && numa.len == PATTERN_START);
    numa_fake();
    numa.allocate_ret = -ENOSPC;
    g_assert(!pool_pattern_new(&f->pool, f->page, 1));
    prim = prim_real;
    f->pool.node = -1;
    if (!f->pool.keep_all) {
        g_assert(f->pool.blocks->len == 1);
        g_assert(file_blocks(f) == PATTERN_START);
    }
}

static unsigned run_of(Fixture *f, KsmPattern *t, unsigned want)
{
    g_assert(pool_pattern_run(&f->pool, t, &want) != SLOT_NONE);
    return want;
}

/* It doubles when so many pages map it, if need be. */
static void test_pattern_grows(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    KsmPattern *t = pool_pattern_new(p, f->page, 99);

    p->max_sharing = PATTERN_USES;
    g_assert(run_of(f, t, 512) == 16 && t->asked == 16);
    for (unsigned asked = 32; asked <= PATTERN_USES * 16; asked += 16) {
        g_assert(run_of(f, t, 512) == 16 && t->asked == asked);
    }
    /* it is long enough */
    g_assert(run_of(f, t, 16) == 16 && t->filled == 16);
    prim.advise = advise_note;
    advise_ret = -EHWPOISON;
    g_assert(run_of(f, t, 17) == 16 && t->filled == 16);
    prim.advise = prim_real.advise;
    prim.write = write_fails;
    g_assert(run_of(f, t, 17) == 16 && t->filled == 16);
    prim.write = prim_real.write;
    g_assert(t->asked == PATTERN_USES * 16 + 48);
    t->asked = PATTERN_USES * 16 - 1;
    g_assert(run_of(f, t, 17) == 16 && t->filled == 16);
    t->asked = PATTERN_USES * 16;
    g_assert(run_of(f, t, 17) == 17 && t->filled == 32);
    g_assert(t->asked == PATTERN_USES * 16 + 17);
    g_assert(run_of(f, t, 512) == 32);
    t->asked = PATTERN_USES * 32;
    g_assert(run_of(f, t, 512) == 64 && t->filled == 64);
    t->asked = PATTERN_USES * 512;
    g_assert(run_of(f, t, 512) == 512 && t->filled == 512);
    g_assert(run_of(f, t, 512) == 512 && t->filled == 512);
    for (unsigned i = 0; i < 512; i++) {
        g_assert(!memcmp(pool_page(p, t->first + i), f->page, PAGE_BYTES));
        g_assert(p->hash[t->first + i] == 99);
    }
    g_assert(file_blocks(f) == 512);
}

/*
 * Where whole chunks are of it, it is as long as a block before the first of its
 * slots have all users that they may have by default.
 */
static void test_pattern_longest(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    KsmPattern *t = pool_pattern_new(p, f->page, 99);

    p->max_sharing = 256;
    while (t->filled < CHUNK_PAGES) {
        unsigned n = CHUNK_PAGES;
        uint32_t slot = pool_pattern_run(p, t, &n);

        g_assert(slot != SLOT_NONE);
        for (unsigned i = 0; i < n; i++) {
            pool_user_add(p, slot + i);
        }
    }
    g_assert(!pool_full(p, t->first));
}

/* One run after the other, skipping full slots. */
static void test_pattern_spread(Fixture *f, gconstpointer data)
{
    KsmPool *p = &f->pool;
    KsmPattern *t = pool_pattern_new(p, f->page, 99);
    unsigned n = 6;

    g_assert(pool_pattern_run(p, t, &n) == t->first && n == 6);
    g_assert(pool_pattern_run(p, t, &n) == t->first + 6 && n == 6);
    /* four are left, which is less */
    g_assert(pool_pattern_run(p, t, &n) == t->first && n == 6);
    n = 10;
    g_assert(pool_pattern_run(p, t, &n) == t->first + 6 && n == 10);
    for (unsigned i = 0; i < SHARING; i++) {
        pool_user_add(p, t->first + 4);
        pool_user_add(p, t->first + 8);
    }
    n = 6;
    g_assert(pool_pattern_run(p, t, &n) == t->first && n == 4);
    n = 3;
    g_assert(pool_pattern_run(p, t, &n) == t->first && n == 3);
    n = 3;
    g_assert(pool_pattern_run(p, t, &n) == t->first + 3 && n == 1);
}

/*
 * Free runs of that length are few and far away: the search goes on where it
 * ended, and the file grows meanwhile.
 */
static void test_search(Fixture *f, gconstpointer data)
{
    enum { LINES = 300, LINE = 4096 };
    KsmPool *p = &f->pool;
    unsigned n = 64;
    uint32_t far = 290 * LINE, near = 3 * LINE;

    if (p->keep_all) {
        g_test_skip("shared memory is made of huge pages here");
        return;
    }
    g_assert(pool_reserve(p, 2 * LINES * LINE) == 0);
    take_all_but(f, LINES * LINE, 0, 0, 1, 1);
    pool_untake(p, far, 64);
    pool_flush(p);
    p->vacant.cursor = 0;
    g_assert(pool_take(p, &n) == LINES * LINE && n == 64);
    g_assert(pool_take(p, &n) == far && n == 64);
    /* behind the last one is the first */
    pool_untake(p, near, 64);
    pool_flush(p);
    g_assert(pool_take(p, &n) == near && n == 64);
    check_free(p);
}

#define ADD(name) g_test_add("/pool/" #name, Fixture, NULL, set_up, \
                             test_##name, tear_down)

#define ADD_WITH(name, with, value) \
    g_test_add("/pool/" #name "/" #with, Fixture, \
               GUINT_TO_POINTER(value), set_up, test_##name, tear_down)

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    ADD(users);
    ADD(full);
    ADD(read_only);
    ADD(untake);
    ADD(fork);
    ADD_WITH(children, plain, CHILD_PLAIN);
    ADD_WITH(children, closes, CHILD_CLOSES);
    ADD_WITH(children, has_child, CHILD_HAS_CHILD);
    ADD_WITH(children, execs, CHILD_EXECS);
    ADD_WITH(children_faults, memfd, FAULT_MEMFD);
    ADD_WITH(children_faults, map, FAULT_MAP);
    ADD_WITH(children_faults, unmap, FAULT_UNMAP);
    ADD_WITH(children_faults, seal, FAULT_SEAL);
    ADD(children_many);
    ADD(pattern);
    ADD(pattern_failed);
    ADD(write_fails);
    ADD(punch_fails);
    ADD(used_up);
    ADD(model);
    ADD(take_free);
    ADD(take_near);
    ADD(checkerboard);
    ADD(grow);
    ADD(grow_fails);
    ADD(given_back);
    ADD_WITH(fd_0, pool, 0);
    ADD_WITH(fd_0, map, 1);
    ADD_WITH(fd_0, watch, 2);
    ADD(view);
    ADD(capacity);
    ADD(bytes);
    ADD(huge_shmem);
    ADD(huge_later);
    ADD(file);
    ADD(punch_once);
    ADD(punch_fails_many);
    ADD(punch_fails_some);
    ADD(release_pieces);
    ADD(kept);
    ADD_WITH(kept_fails, first, false);
    ADD_WITH(kept_fails, grown, true);
    ADD(kept_again);
    ADD(forked_child);
    ADD(gone);
    ADD(allocate);
    ADD(fill);
    ADD(readable);
    ADD(readable_mapped);
    ADD(readable_long);
    ADD(blocks);
    ADD(pattern_node);
    ADD(pattern_grows);
    ADD(pattern_longest);
    ADD(pattern_spread);
    ADD(search);
    return g_test_run();
}
