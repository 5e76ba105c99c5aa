/*
 * libksm tests: slots of the pool, their users, patterns
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <glib.h>

#include "pool.h"
#include "prim.h"
#include "region.h"

#define SHARING 4u

typedef struct Fixture {
    KsmPool pool;
    unsigned unindexed;     /* slots the index was told to drop */
    char *page;
} Fixture;

static void count_unindex(void *opaque, uint32_t hash, uint32_t slot)
{
    Fixture *f = opaque;

    f->pool.users[slot] &= ~SLOT_INDEXED;
    f->unindexed++;
}

static void set_up(Fixture *f, gconstpointer data)
{
    g_assert(pool_init(&f->pool, SHARING) == 0);
    g_assert(pool_reserve(&f->pool, 16 * CHUNK_PAGES) == 0);
    f->pool.unindex = count_unindex;
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

/* A slot whose last user goes gives its memory back, and can be had again. */
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
    f->pool.users[slot] |= SLOT_INDEXED;
    pool_user_drop(&f->pool, slot);
    g_assert(f->unindexed == 1);
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
        g_assert(f->pool.n_free == 10);
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

/* fork() as the engine does it: with the pool's calls around it. */
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

/* What is kept is given up within a minute. */
static void wait_given_up(Fixture *f)
{
    for (int i = 0; f->pool.leaked && i < 60000; i++) {
        g_usleep(1000);
        pool_unkeep(&f->pool);
        release_all(f);
    }
    g_assert(f->pool.leaked == 0);
}

/* What the child does that is to be seen, or not to matter. */
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

/* The child writes a byte of what it sees. */
static char child_sees(int go, int told)
{
    char c = 'x';

    g_assert(write(go, &c, 1) == 1 && read(told, &c, 1) == 1);
    return c;
}

/*
 * What a child may map is kept for as long as the child lives, and a child of
 * that child; a block of a pattern too.
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
    f->pool.cursor = 0;
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
    g_assert(f->pool.n_free == 3);
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

/* Where it cannot be told whether children live, they do. */
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

/* Uses of a pattern spread over its slots, and it grows with them. */
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
        /* never more than a quarter of the pages that map it, but the first */
        g_assert(t->filled <= MAX(PATTERN_START, uses / 2 + 8));
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

/* A slot that could not be punched is not handed out with its old content. */
static void test_punch_fails(Fixture *f, gconstpointer data)
{
    uint32_t slot = take_one(f, 'a');

    pool_user_add(&f->pool, slot);
    prim.punch = punch_fails;
    pool_user_drop(&f->pool, slot);
    pool_flush(&f->pool);
    g_assert(take_one(f, 'b') != slot);
    prim.punch = prim_real.punch;
    pool_flush(&f->pool);
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

/* The tables of free slots say what the bitmap says. */
static void check_free(const KsmPool *p)
{
    uint32_t n_words[FREE_CLASSES] = { 0 };
    uint32_t n_free = 0;

    for (size_t w = 0; w < p->capacity / 64; w++) {
        unsigned run = 0, longest = 0, class = 0;

        for (unsigned i = 0; i < 64; i++) {
            bool free = p->free[w] >> i & 1;

            g_assert(!free || w * 64 + i < p->top);
            run = free ? run + 1 : 0;
            longest = MAX(longest, run);
            n_free += free;
        }
        while (longest >> (class + 1)) {
            class++;
        }
        for (unsigned k = 0; k < FREE_CLASSES; k++) {
            bool has = p->lines[w / 64].has[k] >> (w % 64) & 1;

            g_assert(has == (longest && k == class));
            n_words[k] += has;
        }
    }
    g_assert(n_free == p->n_free);
    g_assert(!memcmp(n_words, p->n_words, sizeof(n_words)));
}

/* Whatever is taken and given up, nothing is had twice. */
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
            slot = pool_take(p, &n);
            for (unsigned i = 0; slot != SLOT_NONE && i < n; i++) {
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

/* All slots up to the top are in use, but those given. */
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
 * A long run that is free is taken before the file grows, also where it is
 * shorter than asked for; scraps are when it cannot grow.
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
    check_free(&f->pool);
}

/* Half the slots are free, each alone: asking for more does not take long. */
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

/* A bigger pool has the content of the smaller one. */
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
    ADD(write_fails);
    ADD(punch_fails);
    ADD(used_up);
    ADD(model);
    ADD(take_free);
    ADD(checkerboard);
    ADD(grow);
    ADD(grow_fails);
    return g_test_run();
}
