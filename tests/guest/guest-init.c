/*
 * The only program of a test guest: its init.
 *
 * It fills memory with content that every such guest has ("common"), and with
 * content that only this guest has ("private", by the word seed= of the
 * kernel's command line), and then compares both with what they should be,
 * again and again, telling the serial console.  What the host does with the
 * memory (merge, save, migrate) must never show here.  Leaves to others:
 * building the initramfs, reading the console (lv_guest.py).
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#define MIB (1024 * 1024)

/* xorshift64: cheap under TCG, and no two pages are equal */
static uint64_t next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static uint64_t *fill(size_t bytes, uint64_t seed)
{
    uint64_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED) {
        perror("GUEST-BAD mmap");
        return NULL;
    }
    for (size_t i = 0; i < bytes / sizeof(*memory); i++) {
        memory[i] = next(&seed);
    }
    return memory;
}

/* how many words are not what fill() wrote */
static size_t wrong(const uint64_t *memory, size_t bytes, uint64_t seed)
{
    size_t count = 0;

    for (size_t i = 0; i < bytes / sizeof(*memory); i++) {
        count += memory[i] != next(&seed);
    }
    return count;
}

static uint64_t parameter(const char *name, uint64_t preset)
{
    char line[4096] = " ";
    FILE *file = fopen("/proc/cmdline", "r");
    char *at;

    if (!file) {
        return preset;
    }
    if (!fgets(line + 1, sizeof(line) - 1, file)) {
        line[1] = 0;
    }
    fclose(file);
    at = strstr(line, name);
    return at ? (uint64_t)atoi(at + strlen(name)) : preset;
}

int main(void)
{
    size_t common_bytes, private_bytes;
    uint64_t *common, *private;
    uint64_t seed;

    mkdir("/proc", 0755);
    mount("proc", "/proc", "proc", 0, NULL);
    common_bytes = parameter(" common=", 32) * MIB;
    private_bytes = parameter(" private=", 4) * MIB;
    seed = parameter(" seed=", 1) * 0x9e3779b97f4a7c15ULL + 1;

    common = fill(common_bytes, 42);
    private = fill(private_bytes, seed);
    for (unsigned long turn = 1; common && private; turn++) {
        size_t bad = wrong(common, common_bytes, 42) +
                     wrong(private, private_bytes, seed);
        struct sysinfo info;

        sysinfo(&info);
        printf("GUEST-%s turn %lu memory %lu MiB wrong %zu\n",
               bad ? "BAD" : "OK", turn,
               (unsigned long)(info.totalram / MIB * info.mem_unit), bad);
        fflush(stdout);
        sleep(1);
    }
    for (;;) {
        pause();
    }
}
