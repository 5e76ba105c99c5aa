/*
 * libksm tests: a root directory with files of the kernel's, made up
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * For what a test cannot bring about on the machine it runs on: memory that
 * is short, limits of groups above.
 */
#ifndef KSM_TEST_FAKE_ROOT_H
#define KSM_TEST_FAKE_ROOT_H

#include <glib.h>

typedef struct FakeRoot {
    char *dir;
} FakeRoot;

/* A fixture's, for g_test_add(). */
void fake_make(FakeRoot *root, gconstpointer data);
void fake_remove(FakeRoot *root, gconstpointer data);

/* @name is a path below the root. */
void fake_write(FakeRoot *root, const char *name, const char *text);
void fake_write_in(FakeRoot *root, const char *dir, const char *name,
                   const char *text);

/*
 * A host with both hierarchies: v1's /box, mounted at cg/memory, has the
 * process in vm; v2, at cg/unified, in slice/vm.
 */
void fake_cgroups(FakeRoot *root);

#endif
