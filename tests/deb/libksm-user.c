/*
 * A program that uses the packages libksm1 and libksm-dev
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <libksm.h>

#define PAGE    4096
#define PAGES   8192

int main(void)
{
    unsigned char *memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const KsmRegionOps ops = { 0 };
    KsmConfig config;
    KsmEngine *engine;
    KsmRegion *region;
    GError *error = NULL;
    KsmStats stats;

    if (memory == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    /* each page of the first half once more in the second */
    for (size_t i = 0; i < PAGES; i++) {
        size_t content = i % (PAGES / 2);

        memset(memory + i * PAGE, content, PAGE);
        memcpy(memory + i * PAGE, &content, sizeof(content));
    }
    ksm_config_init(&config);
    config.max_cpu = 100;
    engine = ksm_engine_new(&config, &error);
    region = engine ? ksm_region_add(engine, memory, PAGES * PAGE, -1, &ops,
                                     NULL, &error) : NULL;
    if (!region) {
        fprintf(stderr, "%s\n", error->message);
        return 3;
    }
    for (int i = 0; i < 1200; i++) {
        int64_t wait_ns = ksm_step(engine, 10000000);

        ksm_engine_get_stats(engine, &stats);
        if (stats.pages_sharing >= PAGES / 4 || wait_ns < 0) {
            break;
        }
        usleep(MIN(wait_ns / 1000, 50000));
    }
    printf("%llu pages are shared\n", (unsigned long long)stats.pages_sharing);
    if (ksm_region_remove(region, KSM_REMOVE_UNMERGE)) {
        puts("the region cannot be removed");
        return 1;
    }
    ksm_engine_free(engine);
    for (size_t i = 0; i < PAGES; i++) {
        size_t content = i % (PAGES / 2);

        if (memcmp(memory + i * PAGE, &content, sizeof(content))) {
            printf("page %zu has changed\n", i);
            return 1;
        }
    }
    return stats.pages_sharing >= PAGES / 4 ? 0 : 1;
}
