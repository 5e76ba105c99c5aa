/*
 * tsan: reading memory that others write
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * The engine reads guest memory while the guest writes it, on purpose: a guess,
 * verified later.  ThreadSanitizer is told so.
 */
#ifndef KSM_TSAN_H
#define KSM_TSAN_H

#ifdef KSM_TSAN
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
#define KSM_TSAN_IGNORE_BEGIN() AnnotateIgnoreReadsBegin(__FILE__, __LINE__)
#define KSM_TSAN_IGNORE_END() AnnotateIgnoreReadsEnd(__FILE__, __LINE__)
#else
#define KSM_TSAN_IGNORE_BEGIN() do { } while (0)
#define KSM_TSAN_IGNORE_END() do { } while (0)
#endif

#endif
