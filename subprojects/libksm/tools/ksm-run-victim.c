/*
 * ksm-run-victim: a program that does to its memory what programs do
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Run under ksm-run by test-ksm-run: equal large blocks are allocated, freed,
 * moved, cut, protected, discarded and forked while being merged, and checked
 * after each.  Knows nothing of libksm.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1UL << 20)
#define PAGE 4096UL
#define LEN (8 * MIB)

static void fill(char *p, size_t len)
{
    for (size_t i = 0; i + 8 <= len; i += 8) {
        *(unsigned long *)(p + i) = 1 + i / 64;
    }
}

static void check(const char *p, size_t from, size_t to, const char *when)
{
    for (size_t i = from; i + 8 <= to; i += 8) {
        if (*(unsigned long *)(p + i) != 1 + i / 64) {
            printf("FAIL: %s: offset %zu has changed\n", when, i);
            exit(1);
        }
    }
}

static void check_zero(const char *p, size_t len, const char *when)
{
    for (size_t i = 0; i < len; i++) {
        if (p[i]) {
            printf("FAIL: %s: offset %zu is not zero\n", when, i);
            exit(1);
        }
    }
}

/* Merging is another thread's work: give it time. */
static void rest(void)
{
    usleep(400000);
}

static char *map(void)
{
    char *p = mmap(NULL, LEN, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    fill(p, LEN);
    return p;
}

static void use_mappings(void)
{
    char *a = map(), *b = map(), *c;

    rest();
    /* a hole in the middle, then something else in the hole */
    munmap(a + 2 * MIB, MIB);
    check(a, 0, 2 * MIB, "below a hole");
    check(a, 3 * MIB, LEN, "above a hole");
    c = mmap(a + 2 * MIB, MIB, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    check_zero(c, MIB, "new memory in a hole");
    fill(a, LEN);
    rest();
    /* moved and grown */
    b = mremap(b, LEN, 2 * LEN, MREMAP_MAYMOVE);
    check(b, 0, LEN, "after mremap");
    check_zero(b + LEN, LEN, "what mremap added");
    rest();
    if (mprotect(b + MIB, MIB, PROT_READ) ||
        mprotect(b + MIB, MIB, PROT_READ | PROT_WRITE)) {
        perror("mprotect");
        exit(1);
    }
    check(b, 0, LEN, "after mprotect");
    rest();
    madvise(a + MIB, 2 * MIB, MADV_DONTNEED);
    check_zero(a + MIB, 2 * MIB, "after MADV_DONTNEED");
    check(a, 3 * MIB, LEN, "beside MADV_DONTNEED");
    munmap(a, LEN);
    check(b, 0, LEN, "after munmap of the other");
    munmap(b, 2 * LEN);
}

/* Of half a page: no memory goes, though all that has its content is meant. */
static void use_refused(void)
{
    char *p[2] = { map(), map() };

    for (int i = 0; i < 2; i++) {
        memmove(p[i], p[i] + 24, LEN - 24);
    }
    rest();
    for (int i = 0; i < 2; i++) {
        if (munmap(p[i] - 1, LEN + PAGE) == 0) {
            printf("FAIL: munmap of half a page\n");
            exit(1);
        }
    }
    rest();
    for (int i = 0; i < 2; i++) {
        memmove(p[i] + 24, p[i], LEN - 24);
        check(p[i], 24, LEN, "after a munmap that was refused");
        munmap(p[i], LEN);
    }
}

static void use_malloc(void)
{
    char *p[8];

    for (int i = 0; i < 8; i++) {
        p[i] = i % 2 ? calloc(1, LEN) : malloc(LEN);
        fill(p[i], LEN);
    }
    rest();
    for (int i = 0; i < 8; i++) {
        check(p[i], 0, LEN, "malloc");
    }
    p[0] = realloc(p[0], 2 * LEN);
    check(p[0], 0, LEN, "realloc, larger");
    p[1] = realloc(p[1], LEN / 4);
    check(p[1], 0, LEN / 4, "realloc, smaller");
    p[2] = realloc(p[2], 100);
    check(p[2], 0, 100, "realloc, small");
    rest();
    for (int i = 0; i < 8; i++) {
        free(p[i]);
    }
}

static int child(char *a, char *b)
{
    for (int i = 0; i < 3; i++) {
        check(a, 0, LEN, "in a child");
        usleep(200000);
    }
    madvise(b, LEN, MADV_DONTNEED);
    check_zero(b, LEN, "MADV_DONTNEED in a child");
    fill(b, LEN);
    check(b, 0, LEN, "written in a child");
    free(malloc(LEN));
    return 0;
}

static void use_fork(void)
{
    char *a = malloc(LEN), *b = map();
    int status;
    pid_t pid;

    fill(a, LEN);
    rest();
    pid = fork();
    if (pid == 0) {
        _exit(child(a, b));
    }
    /* what the child maps must not change with us */
    memset(a, 0x55, LEN);
    rest();
    munmap(b, LEN);
    b = map();
    if (waitpid(pid, &status, 0) != pid || status) {
        printf("FAIL: the child ended with status 0x%x\n", status);
        exit(1);
    }
    free(a);
    munmap(b, LEN);
}

static void *use_all(void *opaque)
{
    use_mappings();
    use_malloc();
    return NULL;
}

int main(int argc, char **argv)
{
    char *keep[2] = { map(), malloc(LEN) };
    pthread_t thread;

    fill(keep[1], LEN);
    if (argc > 1 && !strcmp(argv[1], "exec")) {
        /* memory, an engine and its thread, and then all that goes away */
        rest();
        execl(argv[0], argv[0], "executed", NULL);
        return 1;
    }
    if (pthread_create(&thread, NULL, use_all, NULL)) {
        return 1;
    }
    use_all(NULL);
    pthread_join(thread, NULL);
    use_refused();
    use_fork();
    use_fork();
    /* two equal ones at the end, for the sum that is printed */
    fill(keep[0], LEN);
    memcpy(keep[1], keep[0] + 64, LEN - 64);
    rest();
    check(keep[0], 0, LEN, "at the end");
    printf("contents ok\n");
    return 0;
}
