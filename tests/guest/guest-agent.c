/*
 * The program that runs inside the guests of the demo, benches and tests
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * It is the guest's init.  In the initramfs it loads the modules and mounts
 * the root file system; there it reads the files of the Debian userland, so
 * that the page cache is a real one, starts a few of its programs, fills
 * memory of its own, and from then on verifies both all the time: each file
 * against the checksum that was taken when the image was made, each page of
 * its own against what it wrote there.  Some of its pages it writes anew in
 * every round, so that merged memory is also written to.
 *
 * It reports on the second serial port, one JSON object per line, and takes
 * one command per line there:
 *
 *   alloc MIB [random|zero|pattern|alone]
 *                                     take memory, fill and keep it; alone: one
 *                                     page in four is the same in all guests
 *   free MIB                          give that much of it back
 *   drop                              drop the page cache
 *   read MIB                          read that much of the files again
 *   load PERCENT                      share of a CPU to verify with, 0: none
 *   verify                            verify everything once, at full speed
 *   direct MIB                        read that much past the page cache, by
 *                                     DMA into memory that may be merged
 *   disks MIB                         the same with whole disks: /dev/vdb has
 *                                     to read as /dev/vda does, and /dev/vdc
 *                                     as what is written there before
 *   io PERCENT                        do that all the time, in a process of
 *                                     its own, for that share of the time
 *   ping N                            nothing; the answer has the number
 *   nodes                             for each NUMA node an event "node": which
 *                                     blocks of memory and CPUs it has
 *   touch SECONDS                     write to its own pages at full speed,
 *                                     and report how long the writes took
 *   rewrite SECONDS                   verify its own pages and write others
 *                                     there, at full speed
 *   quit                              power off
 *
 * Each is answered by {"event": "done", "command": ...} or an "error" event.
 *
 * On the host `guest-agent --manifest DIR` prints the checksums.
 *
 * Leaves to others: the image (guest-image), starting guests and talking to
 * this (guest/qemu.py of scripts/lib).
 */

/* for O_DIRECT */
#define _GNU_SOURCE

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define WORDS (PAGE / sizeof(uint64_t))
#define MIB (1024 * 1024)
#define PAGES_PER_MIB (MIB / PAGE)

/* How much is verified before the port and the clock are looked at. */
#define CHUNK_PAGES 64
#define REPORT_MS 1000
/* One page in so many is written anew in each round. */
#define REWRITE_ONE_IN 64

typedef enum {
    KIND_RANDOM,
    KIND_ZERO,
    KIND_PATTERN,
    KIND_ALONE,
} Kind;

#define ALONE_EACH 4

typedef struct {
    char *path;
    uint64_t sum;
    uint64_t size;
} File;

/* One piece of memory, MIB large, taken by "alloc" or at the start. */
typedef struct {
    uint64_t *memory;
    Kind kind;
    /* random pages: how often each has been written, part of its content */
    uint32_t generation[PAGES_PER_MIB];
} Piece;

static struct {
    int port;
    uint64_t seed;
    unsigned load;

    File *files;
    size_t n_files;         /* in the page cache: the first n_files */
    size_t all_files;

    Piece **pieces;
    size_t n_pieces;

    /* where the verification stands: pieces, then files */
    size_t next_piece, next_page, next_file;
    char *buffer;

    pid_t worker;           /* see command_io() */

    uint64_t pages_verified, files_verified, rounds, errors, rewritten;
} g;

static uint64_t now_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * 1000ull + ts.tv_nsec / 1000000;
}

/* Four lanes of multiply-and-rotate: quick where a CPU is emulated, too. */
static uint64_t checksum(uint64_t sum, const void *data, size_t len)
{
    const uint64_t k = 0x9e3779b97f4a7c15ull;
    uint64_t lane[4] = { sum, sum ^ k, sum + k, ~sum };
    const unsigned char *p = data;

    for (; len >= 32; p += 32, len -= 32) {
        uint64_t w[4];

        memcpy(w, p, sizeof(w));
        for (int i = 0; i < 4; i++) {
            uint64_t x = (lane[i] ^ w[i]) * k;

            lane[i] = x << 31 | x >> 33;
        }
    }
    for (; len; p++, len--) {
        lane[0] = (lane[0] ^ *p) * k;
    }
    sum = (lane[0] * 3 + lane[1]) * k;
    return sum ^ (lane[2] * 5 + lane[3]);
}

/* The content of a random page, from its place and its generation. */
static uint64_t page_start(uint64_t seed, size_t piece, size_t page,
                           uint32_t generation)
{
    uint64_t x = seed * 0x9e3779b97f4a7c15ull;

    x ^= (uint64_t)piece << 40 ^ (uint64_t)page << 24 ^ generation;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x | 1;
}

static inline uint64_t next_word(uint64_t x)
{
    x ^= x << 13;
    x ^= x >> 7;
    return x ^ x << 17;
}

/* --- the port ---------------------------------------------------------- */

static void port_write(const char *line, size_t len)
{
    while (len) {
        ssize_t n = write(g.port, line, len);

        if (n < 0 && errno != EINTR && errno != EAGAIN) {
            return;
        }
        if (n > 0) {
            line += n;
            len -= n;
        }
    }
}

__attribute__((format(printf, 2, 3)))
static void report(const char *event, const char *format, ...)
{
    char line[1024];
    va_list ap;
    int n;

    n = snprintf(line, sizeof(line), "{\"event\": \"%s\"", event);
    if (format) {
        n += snprintf(line + n, sizeof(line) - n, ", ");
        va_start(ap, format);
        n += vsnprintf(line + n, sizeof(line) - n - 3, format, ap);
        va_end(ap);
        if (n > (int)sizeof(line) - 3) {
            n = sizeof(line) - 3;
        }
    }
    line[n++] = '}';
    line[n++] = '\n';
    port_write(line, n);
}

static void report_state(const char *event)
{
    struct sysinfo si;

    sysinfo(&si);
    report(event,
           "\"uptime_ms\": %llu, \"errors\": %llu, \"rounds\": %llu, "
           "\"pages_verified\": %llu, \"files_verified\": %llu, "
           "\"rewritten\": %llu, \"own_mib\": %zu, \"files\": %zu, "
           "\"free_mib\": %llu, \"cpus\": %d",
           (unsigned long long)now_ms(), (unsigned long long)g.errors,
           (unsigned long long)g.rounds,
           (unsigned long long)g.pages_verified,
           (unsigned long long)g.files_verified,
           (unsigned long long)g.rewritten, g.n_pieces, g.n_files,
           (unsigned long long)si.freeram * si.mem_unit / MIB, get_nprocs());
}

__attribute__((format(printf, 1, 2)))
static void wrong(const char *format, ...)
{
    char text[512];
    va_list ap;

    va_start(ap, format);
    vsnprintf(text, sizeof(text), format, ap);
    va_end(ap);
    g.errors++;
    report("error", "\"text\": \"%s\"", text);
}

static void open_port(void)
{
    struct termios t;

    /* arm64's; there ttyS1 may exist without a device */
    g.port = open("/dev/ttyAMA1", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (g.port < 0) {
        g.port = open("/dev/ttyS1", O_RDWR | O_NOCTTY | O_CLOEXEC);
    }
    if (g.port < 0) {
        g.port = open("/dev/console", O_RDWR | O_NOCTTY | O_CLOEXEC);
        return;
    }
    if (tcgetattr(g.port, &t) == 0) {
        cfmakeraw(&t);
        t.c_cflag |= CLOCAL;
        tcsetattr(g.port, TCSANOW, &t);
    }
}

/* --- memory of its own ------------------------------------------------- */

/* Alone: some are the same in every guest. */
static uint64_t piece_start(size_t piece, size_t page)
{
    const Piece *p = g.pieces[piece];
    bool same = p->kind == KIND_ALONE && page % ALONE_EACH == 0;

    return page_start(same ? 0 : g.seed, piece, page, p->generation[page]);
}

static void page_write(size_t piece, size_t page)
{
    Piece *p = g.pieces[piece];
    uint64_t *words = p->memory + page * WORDS;
    uint64_t x;

    switch (p->kind) {
    case KIND_ZERO:
        memset(words, 0, PAGE);
        break;
    case KIND_PATTERN:
        memset(words, 0xcc, PAGE);
        break;
    case KIND_RANDOM:
    case KIND_ALONE:
        p->generation[page]++;
        x = piece_start(piece, page);
        for (size_t i = 0; i < WORDS; i++) {
            words[i] = x;
            x = next_word(x);
        }
        break;
    }
}

static void page_verify(size_t piece, size_t page)
{
    Piece *p = g.pieces[piece];
    const uint64_t *words = p->memory + page * WORDS;
    uint64_t x = 0;

    if (p->kind == KIND_PATTERN) {
        x = 0xccccccccccccccccull;
    } else if (p->kind != KIND_ZERO) {
        x = piece_start(piece, page);
    }
    for (size_t i = 0; i < WORDS; i++) {
        if (words[i] != x) {
            wrong("page %zu of piece %zu, word %zu: 0x%llx, not 0x%llx",
                  page, piece, i, (unsigned long long)words[i],
                  (unsigned long long)x);
            page_write(piece, page);
            break;
        }
        if (p->kind == KIND_RANDOM || p->kind == KIND_ALONE) {
            x = next_word(x);
        }
    }
    g.pages_verified++;
}

/*
 * A piece and what is known of it go back to the kernel together: a heap that
 * stays behind would keep a page here and there, and the kernel reports free
 * pages to the host only in blocks of some MiB.
 */
#define PIECE_SIZE (MIB + PAGE)
_Static_assert(sizeof(Piece) <= PAGE, "a piece's own data fit a page");

static bool piece_add(Kind kind)
{
    Piece **pieces = realloc(g.pieces, (g.n_pieces + 1) * sizeof(*pieces));
    char *memory;
    Piece *p;

    if (!pieces) {
        return false;
    }
    g.pieces = pieces;
    memory = mmap(NULL, PIECE_SIZE, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return false;
    }
    p = (Piece *)(memory + MIB);
    p->kind = kind;
    p->memory = (uint64_t *)memory;
    g.pieces[g.n_pieces++] = p;
    for (size_t i = 0; i < PAGES_PER_MIB; i++) {
        page_write(g.n_pieces - 1, i);
    }
    return true;
}

static void piece_drop(void)
{
    munmap(g.pieces[--g.n_pieces]->memory, PIECE_SIZE);
}

/* --- files ------------------------------------------------------------- */

static bool file_sum(const char *path, int flags, char *buffer,
                     uint64_t *sum)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | flags);
    ssize_t n;

    *sum = 0;
    if (fd < 0) {
        return false;
    }
    while ((n = read(fd, buffer, MIB)) > 0) {
        *sum = checksum(*sum, buffer, n);
    }
    close(fd);
    return n == 0;
}

static void file_verify(File *f, int flags, char *buffer)
{
    uint64_t sum;

    if (!file_sum(f->path, flags, buffer, &sum)) {
        wrong("%s: cannot be read: %s", f->path, strerror(errno));
    } else if (sum != f->sum) {
        wrong("%s: checksum %llx, not %llx", f->path,
              (unsigned long long)sum, (unsigned long long)f->sum);
    }
    g.files_verified++;
    g.pages_verified += f->size / PAGE;
}

static bool manifest_read(const char *path)
{
    FILE *in = fopen(path, "re");
    char line[PAGE];

    if (!in) {
        return false;
    }
    while (fgets(line, sizeof(line), in)) {
        unsigned long long sum, size;
        int at;
        File *files;

        if (sscanf(line, "%llx %llu %n", &sum, &size, &at) < 2) {
            continue;
        }
        line[strcspn(line, "\n")] = 0;
        files = realloc(g.files, (g.all_files + 1) * sizeof(*files));
        if (!files) {
            break;
        }
        g.files = files;
        g.files[g.all_files++] = (File) {
            .path = strdup(line + at), .sum = sum, .size = size,
        };
    }
    fclose(in);
    return true;
}

/* Reads files, in the order of the manifest, until so much is cached. */
static unsigned files_read(unsigned mib)
{
    uint64_t bytes = 0;

    g.n_files = 0;
    while (g.n_files < g.all_files && bytes < (uint64_t)mib * MIB) {
        file_verify(&g.files[g.n_files], 0, g.buffer);
        bytes += g.files[g.n_files].size;
        g.n_files++;
    }
    return bytes / MIB;
}

/*
 * Reads past the page cache, into a buffer that moves: the device writes to
 * pages that were left alone long enough to have been merged.
 */
static void files_read_direct(unsigned mib)
{
    const unsigned places = 8;
    uint64_t bytes = 0;
    char *memory = mmap(NULL, places * MIB, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED) {
        wrong("direct: no memory");
        return;
    }
    memset(memory, 0xcc, places * MIB);
    for (unsigned i = 0; g.all_files && bytes < (uint64_t)mib * MIB; i++) {
        File *f = &g.files[i % g.all_files];

        file_verify(f, O_DIRECT, memory + i % places * MIB);
        bytes += f->size;
    }
    munmap(memory, places * MIB);
}

/* --- whole disks ------------------------------------------------------- */

/*
 * What was read stays where it was read to, so that it is merged with the
 * page cache's copy of it; the next read is then a device's write to merged
 * memory.  It has to stay as it is meanwhile.
 */
#define ARENA_MIB 4

static struct {
    char *memory;
    char *other;            /* one MiB to compare with */
    uint64_t sum[ARENA_MIB];
    bool filled[ARENA_MIB];
    uint64_t random;
} arena;

static bool arena_make(void)
{
    char *memory;

    if (arena.memory) {
        return true;
    }
    memory = mmap(NULL, (ARENA_MIB + 1) * MIB, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return false;
    }
    arena.memory = memory;
    arena.other = memory + ARENA_MIB * MIB;
    arena.random = g.seed * 2 + 1;
    return true;
}

/* A disk opened for DMA; -1 if there is none. */
static int disk_open(const char *path, int flags, uint64_t *mibs)
{
    int fd = open(path, flags | O_DIRECT | O_CLOEXEC);
    off_t size = fd < 0 ? 0 : lseek(fd, 0, SEEK_END);

    if (fd >= 0 && size < MIB) {
        wrong("%s has %lld bytes", path, (long long)size);
        close(fd);
        return -1;
    }
    *mibs = size / MIB;
    return fd;
}

static bool disk_read(int fd, const char *path, char *to, off_t at)
{
    if (pread(fd, to, MIB, at) == MIB) {
        return true;
    }
    wrong("%s: read at %lld: %s", path, (long long)at, strerror(errno));
    return false;
}

/* One MiB of /dev/vdb, which has the content of /dev/vda. */
static void disk_compare(int a, int b, uint64_t mibs)
{
    unsigned place;
    char *to;
    off_t at;

    arena.random = next_word(arena.random);
    place = arena.random % ARENA_MIB;
    at = (off_t)((arena.random >> 8) % mibs) * MIB;
    to = arena.memory + place * MIB;
    if (arena.filled[place] &&
        checksum(0, to, MIB) != arena.sum[place]) {
        wrong("what was read from a disk has changed in memory");
    }
    arena.filled[place] = false;
    if (!disk_read(b, "/dev/vdb", to, at) ||
        !disk_read(a, "/dev/vda", arena.other, at)) {
        return;
    }
    for (unsigned i = 0; i < MIB; i += 512) {
        if (memcmp(to + i, arena.other + i, 512)) {
            wrong("/dev/vdb at %lld is not what /dev/vda has",
                  (long long)at + i);
            return;
        }
    }
    arena.sum[place] = checksum(0, to, MIB);
    arena.filled[place] = true;
}

/*
 * What a block of /dev/vdc holds depends on where it is and nothing else:
 * whatever state of the guest goes on, after a snapshot is loaded, finds what
 * it wrote.
 */
static void disk_rewrite(int fd, uint64_t mibs)
{
    uint64_t *words = (uint64_t *)arena.other;
    uint64_t mib, x;

    arena.random = next_word(arena.random);
    mib = (arena.random >> 8) % mibs;
    x = page_start(g.seed, 0xd15c, mib % 8, mib);
    for (size_t i = 0; i < MIB / sizeof(x); i++, x = next_word(x)) {
        words[i] = x;
    }
    if (pwrite(fd, words, MIB, mib * MIB) != MIB) {
        wrong("/dev/vdc: write: %s", strerror(errno));
        return;
    }
    memset(words, 0xcc, MIB);
    if (!disk_read(fd, "/dev/vdc", arena.other, mib * MIB)) {
        return;
    }
    x = page_start(g.seed, 0xd15c, mib % 8, mib);
    for (size_t i = 0; i < MIB / sizeof(x); i++, x = next_word(x)) {
        if (words[i] != x) {
            wrong("/dev/vdc: word %zu of MiB %llu: 0x%llx, not 0x%llx", i,
                  (unsigned long long)mib, (unsigned long long)words[i],
                  (unsigned long long)x);
            return;
        }
    }
}

static void disks_verify(unsigned mib)
{
    uint64_t mibs, mibs_b, scratch_mibs;
    int a = disk_open("/dev/vda", O_RDONLY, &mibs);
    int b = disk_open("/dev/vdb", O_RDONLY, &mibs_b);
    int scratch = disk_open("/dev/vdc", O_RDWR, &scratch_mibs);

    if (!arena_make()) {
        wrong("disks: no memory");
        mib = 0;
    }
    while (mib--) {
        if (a >= 0 && b >= 0) {
            disk_compare(a, b, mibs < mibs_b ? mibs : mibs_b);
        }
        if (scratch >= 0) {
            disk_rewrite(scratch, scratch_mibs);
        }
    }
    close(a);
    close(b);
    close(scratch);
}

static void worker_run(unsigned percent)
{
    while (true) {
        uint64_t before = now_ms(), busy;

        disks_verify(1);
        if (g.errors) {
            _exit(1);
        }
        busy = now_ms() - before;
        usleep(1000 * (1 + busy * (100 - percent) / percent));
    }
}

static void command_io(unsigned percent)
{
    if (g.worker > 0) {
        pid_t pid = g.worker;

        g.worker = 0;
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
    if (!percent) {
        return;
    }
    g.worker = fork();
    if (g.worker < 0) {
        wrong("io: %s", strerror(errno));
    } else if (g.worker == 0) {
        worker_run(percent > 100 ? 100 : percent);
    }
}

/* A program that memory was pulled from under ends by a signal. */
static void children_reap(void)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == g.worker) {
            g.worker = 0;
            wrong("the process of 'io' has ended: status 0x%x", status);
        } else if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL) {
            wrong("process %d was ended by signal %d", (int)pid,
                  WTERMSIG(status));
        }
    }
}

/* --- how long writes take ---------------------------------------------- */

/* Times are sorted into eighths of powers of two. */
static unsigned bucket_of(uint64_t ns)
{
    unsigned log;

    if (ns < 16) {
        return ns;
    }
    log = 63 - __builtin_clzll(ns);
    return (log - 2) * 8 + (ns >> (log - 3) & 7);
}

static uint64_t bucket_start(unsigned bucket)
{
    if (bucket < 16) {
        return bucket;
    }
    return (8ull + bucket % 8) << (bucket / 8 - 1);
}

static uint64_t percentile(const uint64_t *counts, uint64_t all, double share)
{
    uint64_t seen = 0;

    for (unsigned i = 0; i < 512; i++) {
        seen += counts[i];
        if (seen >= all * share) {
            return bucket_start(i);
        }
    }
    return 0;
}

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * 1000000000ull + ts.tv_nsec;
}

/* Writes what is there already: a write all the same, and verifiable. */
static void touch(unsigned seconds)
{
    static uint64_t counts[512];
    uint64_t start = now_ns(), end = start + seconds * 1000000000ull;
    uint64_t before = start, after = start, max = 0, pages = 0;

    memset(counts, 0, sizeof(counts));
    for (uint64_t x = 1; g.n_pieces && after < end; x = next_word(x)) {
        Piece *p = g.pieces[x % g.n_pieces];
        /* volatile: the write must happen, though it changes nothing */
        volatile uint64_t *word = p->memory +
                                  (x >> 32) % PAGES_PER_MIB * WORDS;

        before = now_ns();
        *word = *word;
        after = now_ns();
        counts[bucket_of(after - before)]++;
        max = after - before > max ? after - before : max;
        pages++;
    }
    report("touched", "\"pages\": %llu, \"ns\": %llu, \"p50_ns\": %llu, "
           "\"p99_ns\": %llu, \"p999_ns\": %llu, \"max_ns\": %llu",
           (unsigned long long)pages, (unsigned long long)(after - start),
           (unsigned long long)percentile(counts, pages, 0.5),
           (unsigned long long)percentile(counts, pages, 0.99),
           (unsigned long long)percentile(counts, pages, 0.999),
           (unsigned long long)max);
}

/* Every page that is lost, or comes back as it was before, is seen. */
static void rewrite(unsigned seconds)
{
    uint64_t end = now_ms() + seconds * 1000ull, last = now_ms();

    for (uint64_t x = page_start(g.seed, 0, 0, last); g.n_pieces;
         x = next_word(x)) {
        size_t piece = x % g.n_pieces, page = (x >> 32) % PAGES_PER_MIB;
        uint64_t now = now_ms();

        page_verify(piece, page);
        page_write(piece, page);
        g.rewritten++;
        if (now >= end) {
            break;
        }
        if (now - last > REPORT_MS) {
            report_state("state");
            last = now;
        }
    }
}

/* --- verification, all the time ---------------------------------------- */

/* A bounded piece of work; returns true at the end of a round. */
static bool verify_some(void)
{
    for (int i = 0; i < CHUNK_PAGES && g.next_piece < g.n_pieces; i++) {
        page_verify(g.next_piece, g.next_page);
        if ((g.next_page + g.rounds) % REWRITE_ONE_IN == 0) {
            page_write(g.next_piece, g.next_page);
            g.rewritten++;
        }
        if (++g.next_page == PAGES_PER_MIB) {
            g.next_page = 0;
            g.next_piece++;
        }
    }
    if (g.next_piece < g.n_pieces) {
        return false;
    }
    if (g.next_file < g.n_files) {
        file_verify(&g.files[g.next_file++], 0, g.buffer);
        return false;
    }
    g.next_piece = g.next_page = g.next_file = 0;
    g.rounds++;
    return true;
}

static void verify_all(void)
{
    uint64_t last = now_ms();

    g.next_piece = g.next_page = g.next_file = 0;
    while (!verify_some()) {
        if (now_ms() - last > REPORT_MS) {
            report_state("state");
            last = now_ms();
        }
    }
}

static void command_alloc(const char *line)
{
    unsigned mib = 0;
    char kind[16] = "random";
    Kind k = KIND_RANDOM;

    if (sscanf(line, "%*s %u %15s", &mib, kind) < 1) {
        report("error", "\"text\": \"alloc: how much?\"");
        return;
    }
    if (!strcmp(kind, "zero")) {
        k = KIND_ZERO;
    } else if (!strcmp(kind, "pattern")) {
        k = KIND_PATTERN;
    } else if (!strcmp(kind, "alone")) {
        k = KIND_ALONE;
    }
    for (unsigned i = 0; i < mib; i++) {
        if (!piece_add(k)) {
            report("error", "\"text\": \"alloc: got only %u MiB\"", i);
            return;
        }
    }
}

static void write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);

    if (fd >= 0) {
        if (write(fd, text, strlen(text)) < 0) {
            wrong("%s: %s", path, strerror(errno));
        }
        close(fd);
    }
}

/* A file of sysfs without its newline; empty if there is none. */
static void sysfs_read(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, size - 1);

    text[n > 0 ? n : 0] = 0;
    text[strcspn(text, "\n")] = 0;
    if (fd >= 0) {
        close(fd);
    }
}

#define NODE_PATH "/sys/devices/system/node/node%u"

/* False if there is no such node. */
static bool node_report(unsigned node, unsigned long long block_bytes)
{
    char path[128], text[128], blocks[256] = "";
    unsigned long long kib = 0;
    size_t len = 0;

    snprintf(path, sizeof(path), NODE_PATH "/meminfo", node);
    sysfs_read(path, text, sizeof(text));
    if (sscanf(text, "Node %*u MemTotal: %llu", &kib) != 1) {
        return false;
    }
    for (unsigned i = 0; i < 1024 && len < sizeof(blocks) - 8; i++) {
        snprintf(path, sizeof(path), NODE_PATH "/memory%u", node, i);
        if (!access(path, F_OK)) {
            len += sprintf(blocks + len, "%s%u", len ? ", " : "", i);
        }
    }
    snprintf(path, sizeof(path), NODE_PATH "/cpulist", node);
    sysfs_read(path, text, sizeof(text));
    report("node", "\"node\": %u, \"cpus\": \"%s\", \"total_kib\": %llu, "
           "\"block_bytes\": %llu, \"blocks\": [%s], \"page_bytes\": %d",
           node, text, kib, block_bytes, blocks,
           (int)getauxval(AT_PAGESZ));
    return true;
}

static void nodes_report(void)
{
    unsigned long long block_bytes = 0;
    unsigned node = 0;
    char text[32];

    sysfs_read("/sys/devices/system/memory/block_size_bytes", text,
               sizeof(text));
    sscanf(text, "%llx", &block_bytes);
    while (node_report(node, block_bytes)) {
        node++;
    }
}

static void command_run(const char *line)
{
    char name[16] = "";
    unsigned mib = 0;

    sscanf(line, "%15s %u", name, &mib);
    if (!strcmp(name, "alloc")) {
        command_alloc(line);
    } else if (!strcmp(name, "free")) {
        while (mib-- && g.n_pieces) {
            piece_drop();
        }
        g.next_piece = g.next_page = 0;
    } else if (!strcmp(name, "drop")) {
        g.n_files = 0;
        write_file("/proc/sys/vm/drop_caches", "3");
    } else if (!strcmp(name, "read")) {
        files_read(mib);
    } else if (!strcmp(name, "direct")) {
        files_read_direct(mib);
    } else if (!strcmp(name, "disks")) {
        disks_verify(mib);
    } else if (!strcmp(name, "io")) {
        command_io(mib);
    } else if (!strcmp(name, "rewrite")) {
        rewrite(mib);
    } else if (!strcmp(name, "touch")) {
        touch(mib);
    } else if (!strcmp(name, "load")) {
        g.load = mib > 100 ? 100 : mib;
    } else if (!strcmp(name, "verify")) {
        verify_all();
    } else if (!strcmp(name, "nodes")) {
        nodes_report();
    } else if (!strcmp(name, "quit")) {
        report("quit", NULL);
        tcdrain(g.port);
        sync();
        reboot(RB_POWER_OFF);
    } else if (strcmp(name, "ping")) {
        report("error", "\"text\": \"unknown command\"");
        return;
    }
    report_state("state");
    report("done", "\"command\": \"%s\", \"number\": %u, \"errors\": %llu",
           name, mib, (unsigned long long)g.errors);
}

/* Waits up to ms for a line on the port, and carries it out. */
static void port_poll(int ms)
{
    static char line[256];
    static size_t len;
    struct pollfd fd = { .fd = g.port, .events = POLLIN };
    char c;

    while (poll(&fd, 1, ms) > 0 && (fd.revents & POLLIN)) {
        if (read(g.port, &c, 1) != 1) {
            usleep(100000);     /* nobody at the other end */
            return;
        }
        if (c != '\n') {
            if (len < sizeof(line) - 1) {
                line[len++] = c;
            }
            continue;
        }
        line[len] = 0;
        len = 0;
        if (line[0]) {
            command_run(line);
        }
        ms = 0;
    }
}

static void serve(void)
{
    uint64_t last = 0;

    while (true) {
        uint64_t before = now_ms(), busy;

        if (g.load) {
            verify_some();
        }
        busy = now_ms() - before;
        /* as much rest as the share of the CPU asks for */
        if (!g.load) {
            port_poll(200);
        } else if (g.load < 100) {
            port_poll(1 + busy * (100 - g.load) / g.load);
        } else {
            port_poll(0);
        }
        if (now_ms() - last >= REPORT_MS) {
            report_state("state");
            last = now_ms();
        }
        children_reap();
    }
}

/* --- init -------------------------------------------------------------- */

static void give_up(const char *what)
{
    report("failed", "\"text\": \"%s: %s\"", what, strerror(errno));
    tcdrain(g.port);
    reboot(RB_POWER_OFF);
    _exit(1);
}

static void load_modules(void)
{
    FILE *order = fopen("/modules/order", "re");
    char name[128], path[160];

    while (order && fscanf(order, "%127s", name) == 1) {
        int fd;

        snprintf(path, sizeof(path), "/modules/%s.ko", name);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) &&
                       errno != EEXIST)) {
            report("note", "\"text\": \"module %s: %s\"", name,
                   strerror(errno));
        }
        close(fd);
        unlink(path);
    }
    if (order) {
        fclose(order);
    }
}

/* From the initramfs to the Debian root file system. */
static void change_root(void)
{
    int tries = 0;

    while (access("/dev/vda", F_OK)) {
        if (tries++ == 600) {
            give_up("no disk /dev/vda");
        }
        usleep(100000);
    }
    if (mount("/dev/vda", "/newroot", "ext4", MS_RDONLY, "")) {
        give_up("mount of /dev/vda");
    }
    mount("/dev", "/newroot/dev", NULL, MS_MOVE, NULL);
    mount("/proc", "/newroot/proc", NULL, MS_MOVE, NULL);
    mount("/sys", "/newroot/sys", NULL, MS_MOVE, NULL);
    unlink("/init");
    if (chdir("/newroot") || mount(".", "/", NULL, MS_MOVE, NULL) ||
        chroot(".") || chdir("/")) {
        give_up("change of the root");
    }
    mount("tmpfs", "/tmp", "tmpfs", 0, "size=16m");
    mount("tmpfs", "/run", "tmpfs", 0, "size=16m");
}

/*
 * The CPUs that the kernel left alone (maxcpus=1): not before the devices
 * have their drivers, see qemu.py.
 */
static void start_cpus(void)
{
    char path[64];

    for (int i = 1; ; i++) {
        snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/online", i);
        if (access(path, F_OK)) {
            return;
        }
        write_file(path, "1");
    }
}

static unsigned option(const char *name, unsigned otherwise)
{
    static char line[PAGE];
    unsigned value;
    char *at;
    int fd;

    if (!line[0]) {
        fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
        if (fd < 0 || read(fd, line, sizeof(line) - 1) < 0) {
            return otherwise;
        }
        close(fd);
    }
    at = strstr(line, name);
    if (at && sscanf(at + strlen(name), "%u", &value) == 1) {
        return value;
    }
    return otherwise;
}

static void start_program(const char *const *argv, int out)
{
    if (fork() == 0) {
        char *const env[] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
                              "HOME=/tmp", NULL };
        int null = open("/dev/null", O_RDWR);

        dup2(null, 0);
        dup2(out, 1);
        dup2(null, 2);
        setsid();
        execve(argv[0], (char *const *)argv, env);
        _exit(127);
    }
}

/*
 * Some of the userland at work, with libraries mapped and heaps of its own.
 * Each program writes a byte when it is up, so that "ready" means that.
 */
static void start_userland(void)
{
    static const char *const python[] = {
        "/usr/bin/python3", "-c",
        "import json, ssl, http.server, sqlite3, decimal, time\n"
        "x = [str(i) for i in range(50000)]\n"
        "print(end='.', flush=True)\n"
        "while True: time.sleep(3600)", NULL
    };
    static const char *const perl[] = {
        "/usr/bin/perl", "-e",
        "my %h = map { $_ => \"x$_\" } 1..20000; syswrite(STDOUT, '.');"
        "sleep 3600 while 1;", NULL
    };
    static const char *const shell[] = {
        "/bin/bash", "-c", "printf .; while :; do sleep 3600; done", NULL
    };
    int pipes[2], up = 0;
    char c;

    if (pipe2(pipes, O_CLOEXEC)) {
        give_up("pipe");
    }
    start_program(python, pipes[1]);
    start_program(perl, pipes[1]);
    start_program(shell, pipes[1]);
    close(pipes[1]);
    while (up < 3 && read(pipes[0], &c, 1) == 1) {
        up++;
    }
    /* the end of the pipe before that: one of them has failed */
    if (up < 3) {
        give_up("the userland's programs");
    }
}

static int run_guest(void)
{
    mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    open_port();
    report_state("booted");
    g.seed = option("guest.seed=", 1);
    g.load = option("guest.load=", 20);
    g.buffer = malloc(MIB);
    load_modules();
    change_root();
    start_cpus();
    if (!manifest_read("/etc/guest-manifest")) {
        give_up("/etc/guest-manifest");
    }
    if (option("guest.userland=", 1)) {
        start_userland();
    }
    files_read(option("guest.cache=", 128));
    for (unsigned i = option("guest.private=", 32); i; i--) {
        if (!piece_add(KIND_RANDOM)) {
            give_up("memory");
        }
    }
    report_state("ready");
    serve();
    return 0;
}

/* --- on the host ------------------------------------------------------- */

static char *buffer;

static int manifest_write(const char *root, const char *dir)
{
    char path[PAGE];
    struct dirent **entries;
    int n, ret = 0;

    snprintf(path, sizeof(path), "%s%s", root, dir);
    n = scandir(path, &entries, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        char sub[PAGE - 256];
        struct stat st;
        uint64_t sum;

        if (!strcmp(name, ".") || !strcmp(name, "..")) {
            continue;
        }
        snprintf(sub, sizeof(sub), "%s/%s", dir, name);
        snprintf(path, sizeof(path), "%s%s", root, sub);
        if (lstat(path, &st)) {
            ret = 1;
        } else if (S_ISDIR(st.st_mode)) {
            ret |= manifest_write(root, sub);
        } else if (S_ISREG(st.st_mode) && st.st_size) {
            if (file_sum(path, 0, buffer, &sum)) {
                printf("%llx %llu %s\n", (unsigned long long)sum,
                       (unsigned long long)st.st_size, sub);
            } else {
                ret = 1;
            }
        }
    }
    return ret;
}

int main(int argc, char **argv)
{
    if (getpid() == 1) {
        return run_guest();
    }
    if (argc == 3 && !strcmp(argv[1], "--manifest")) {
        buffer = malloc(MIB);
        return manifest_write(argv[2], "");
    }
    fprintf(stderr, "usage: guest-agent --manifest DIR (or as init)\n");
    return 2;
}
