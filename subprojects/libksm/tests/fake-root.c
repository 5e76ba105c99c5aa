/*
 * libksm tests: a root directory with files of the kernel's, made up
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "fake-root.h"

void fake_make(FakeRoot *root, gconstpointer data)
{
    root->dir = g_dir_make_tmp("ksm-root-XXXXXX", NULL);
    g_assert(root->dir);
}

void fake_remove(FakeRoot *root, gconstpointer data)
{
    g_autofree char *quoted = g_shell_quote(root->dir);
    g_autofree char *command = g_strdup_printf("rm -rf %s", quoted);

    g_assert(g_spawn_command_line_sync(command, NULL, NULL, NULL, NULL));
    g_free(root->dir);
}

void fake_write(FakeRoot *root, const char *name, const char *text)
{
    g_autofree char *path = g_build_filename(root->dir, name, NULL);
    g_autofree char *parent = g_path_get_dirname(path);

    g_assert(g_mkdir_with_parents(parent, 0700) == 0);
    g_assert(g_file_set_contents(path, text, -1, NULL));
}

void fake_write_in(FakeRoot *root, const char *dir, const char *name,
                   const char *text)
{
    g_autofree char *path = g_build_filename(dir, name, NULL);

    fake_write(root, path, text);
}

void fake_cgroups(FakeRoot *root)
{
    fake_write(root, "proc/self/mountinfo",
               "30 20 0:25 / /cg/cpu rw - cgroup cgroup rw,cpu\n"
               "31 20 0:26 /box /cg/memory rw shared:9 - cgroup none "
               "rw,memory\n"
               "32 20 0:27 / /cg/unified rw - cgroup2 none rw,nsdelegate\n");
    fake_write(root, "proc/self/cgroup",
               "4:cpu:/other\n3:memory:/box/vm\n0::/slice/vm\n");
}
