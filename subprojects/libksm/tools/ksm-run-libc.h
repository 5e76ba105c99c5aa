/*
 * ksm-run: the C library's own malloc, under names that are not wrapped
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * glibc exports these without declaring them; dlsym() would not do, because it
 * allocates itself.
 */
#ifndef KSM_RUN_LIBC_H
#define KSM_RUN_LIBC_H

#include <stddef.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t size);
void __libc_free(void *p);

#endif
