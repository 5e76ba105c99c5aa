/*
 * What merging relies on of UFFDIO_MOVE, on the real kernel (see merge.h)
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A page that is first written just as it is moved: Linux 6.18 may move it, and
 * others with it, and say that it did not.  Merging asks the page tables
 * whenever a move has failed.  Here: a page is always in one of the two places;
 * what is counted was moved; and who goes on where a move stopped is told of a
 * page that was moved all the same.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/prim.h"
#include "util.h"

#define PAGES 16
#define LEN (PAGES * PAGE)
#define SECONDS 2

static struct {
    int uffd, pagemap;
    char *home, *stage;
    /* rounds: the mover's, and the last the writer has written in; atomic */
    unsigned round, written;
    bool stop;
} g;

/* Present, swapped out or in migration. */
static bool is_populated(const char *page)
{
    uint64_t entry;

    g_assert(pread(g.pagemap, &entry, 8, (uintptr_t)page / PAGE * 8) == 8);
    return entry >> 62;
}

static void *write_first_page(void *arg)
{
    unsigned seen = 0;

    while (!__atomic_load_n(&g.stop, __ATOMIC_ACQUIRE)) {
        unsigned round = __atomic_load_n(&g.round, __ATOMIC_ACQUIRE);

        if (round != seen) {
            /* volatile: it is the write that matters */
            *(volatile unsigned *)g.home = seen = round;
            __atomic_store_n(&g.written, round, __ATOMIC_RELEASE);
        } else {
            sched_yield();
        }
    }
    return NULL;
}

static int move(char *to, char *from, unsigned at, unsigned *done)
{
    size_t bytes = 0;
    int ret = prim.uffd_move(g.uffd, to + at * PAGE, from + at * PAGE,
                             LEN - at * PAGE, &bytes);

    *done = bytes / PAGE;
    return ret;
}

/* Returns how many were moved and not counted. */
static unsigned move_all(char *to, char *from)
{
    unsigned at = 0, done, uncounted = 0, tries = 0;

    while (at < PAGES) {
        int ret = move(to, from, at, &done);

        for (unsigned i = at; i < PAGES; i++) {
            bool moved = is_populated(to + i * PAGE);

            g_assert(moved == !is_populated(from + i * PAGE));
            g_assert(moved || (ret && i >= at + done));
        }
        at += done;
        if (ret == -EEXIST && !done) {
            g_assert(is_populated(to + at * PAGE));
            uncounted++;
            at++;
            tries = 0;
        } else if (ret && !done) {
            g_assert(ret == -EAGAIN && ++tries < 10000);
            g_assert(!is_populated(to + at * PAGE));
        }
    }
    return uncounted;
}

static bool start(void)
{
    UffdRange range;

    g.uffd = prim.uffd();
    if (g.uffd < 0 ||
        prim.uffd_api(g.uffd, UFFD_MOVE | UFFD_WP | UFFD_WP_SHMEM |
                              UFFD_WP_ASYNC) < 0) {
        g_test_skip("no userfaultfd with UFFDIO_MOVE and UFFD_FEATURE_WP_ASYNC "
                    "(Linux 6.8; root, or vm.unprivileged_userfaultfd=1)");
        return false;
    }
    g.pagemap = prim.open_read("/proc/self/pagemap");
    g_assert(g.pagemap >= 0);
    g.home = prim.map(NULL, LEN, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    g.stage = prim.map(NULL, LEN, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    g_assert(g.home && g.stage);
    for (unsigned i = 0; i < PAGES; i++) {
        g.home[i * PAGE] = 1;
    }
    range = (UffdRange) { g.uffd, g.home, LEN };
    g_assert(prim.uffd_register(&range, UFFD_MISSING | UFFD_PROTECT) == 0);
    range.addr = g.stage;
    g_assert(prim.uffd_register(&range, UFFD_PROTECT) == 0);
    return true;
}

static void test_count(void)
{
    UffdRange range = { 0 };
    gint64 end = g_get_monotonic_time() + SECONDS * G_USEC_PER_SEC;
    uint64_t uncounted = 0;
    pthread_t writer;
    PmRange found[PAGES];

    if (!start()) {
        return;
    }
    range = (UffdRange) { g.uffd, g.home, LEN };
    g_assert(pthread_create(&writer, NULL, write_first_page, NULL) == 0);
    while (g_get_monotonic_time() < end) {
        /* so that the next write is a first one */
        PmScan scan = {
            .fd = g.pagemap,
            .start = (uintptr_t)g.home,
            .end = (uintptr_t)g.home + LEN,
            .any = PM_PRESENT,
            .tell = PM_PRESENT,
            .protect = true,
            .vec = found,
            .vec_len = PAGES,
        };

        g_assert(prim.pagemap(&scan) >= 0);
        __atomic_add_fetch(&g.round, 1, __ATOMIC_RELEASE);
        /* before or after the write; volatile: or it takes no time */
        for (volatile unsigned i = g.round % 64; i > 0; i--) {
            continue;
        }
        uncounted += move_all(g.stage, g.home);
        uncounted += move_all(g.home, g.stage);
        while (__atomic_load_n(&g.written, __ATOMIC_ACQUIRE) != g.round) {
            g_assert(prim.uffd_wake(&range) == 0);
            sched_yield();
        }
        g_assert(*(unsigned *)g.home == g.round);
    }
    __atomic_store_n(&g.stop, true, __ATOMIC_RELEASE);
    pthread_join(writer, NULL);
    g_test_message("%u rounds, %" PRIu64 " pages moved and not counted",
                   g.round, uncounted);
    for (unsigned i = 1; i < PAGES; i++) {
        g_assert(g.home[i * PAGE] == 1);
    }
    prim.unmap(g.home, LEN);
    prim.unmap(g.stage, LEN);
    prim.close(g.pagemap);
    prim.close(g.uffd);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/move/count", test_count);
    return g_test_run();
}
