/*
 * Differences between QEMU versions
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#ifndef HW_MEM_KSM_COMPAT_H
#define HW_MEM_KSM_COMPAT_H

/* QEMU 10.1 moved these headers and made the data of class_init const. */
#ifndef CONFIG_LINUX
#error "memory-backend-ksm is for Linux only"
#elif __has_include("system/memory.h")
#include "system/memory.h"
#include "system/ramblock.h"
#define KSM_CLASS_DATA const void
#else
#include "exec/memory.h"
#include "exec/ramblock.h"
#define KSM_CLASS_DATA void
#endif

#endif
