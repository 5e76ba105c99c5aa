/*
 * Tests of the rooms `cgroup` and `memcg`, on files that are made up: few
 * machines have both versions, or let a test set limits above itself.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include <malloc.h>
#include <string.h>

#include "base/prim.h"
#include "watch/cgroup.h"
#include "watch/memcg.h"
#include "fake-root.h"
#include "util.h"

#define MIB(n) (UINT64_C(n) << 20)

static uint64_t fake_now;

static uint64_t fake_now_ns(void)
{
    return fake_now;
}

static void assert_dir(FakeRoot *root, const char *dir, const char *name)
{
    g_autofree char *path = g_build_filename(root->dir, name, NULL);

    g_assert(g_str_equal(dir, path));
}

static void test_dirs(FakeRoot *root, gconstpointer data)
{
    g_auto(GStrv) v1 = NULL, v2 = NULL;

    fake_cgroups(root);
    v1 = cgroup_dirs(root->dir, CGROUP_V1);
    g_assert(g_strv_length(v1) == 2);
    assert_dir(root, v1[0], "cg/memory/vm");
    assert_dir(root, v1[1], "cg/memory");
    v2 = cgroup_dirs(root->dir, CGROUP_V2);
    g_assert(g_strv_length(v2) == 3);
    assert_dir(root, v2[0], "cg/unified/slice/vm");
    assert_dir(root, v2[1], "cg/unified/slice");
    assert_dir(root, v2[2], "cg/unified");
}

/* The process is in the top group; no hierarchy of v1. */
static void test_top(FakeRoot *root, gconstpointer data)
{
    g_auto(GStrv) v1 = NULL, v2 = NULL;

    fake_write(root, "proc/self/mountinfo",
               "32 20 0:27 / /cg rw - cgroup2 none rw\n");
    fake_write(root, "proc/self/cgroup", "0::/\n");
    v1 = cgroup_dirs(root->dir, CGROUP_V1);
    g_assert(!*v1);
    v2 = cgroup_dirs(root->dir, CGROUP_V2);
    g_assert(g_strv_length(v2) == 1);
    assert_dir(root, v2[0], "cg");
}

/* Skips lines that are short, strange, or about something else. */
static void test_lines(FakeRoot *root, gconstpointer data)
{
    static const struct {
        const char *mount;
        const char *dir;        /* NULL: of no use */
    } lines[] = {
        { "32 20 0:27 / /one rw - cgroup2 none rw", "one" },
        { "32 20 0:27 / /one rw shared:1 master:2 - cgroup2 none rw", "one" },
        { "32 20 0:27 / /one - cgroup2 none rw", "one" },
        { "32 20 0:27 / - cgroup2 none rw", NULL },
        { "32 20 0:27 / /one rw - cgroup2 none", NULL },
        { "32 20 0:27 / /one rw - cgroup none rw,memory", NULL },
        { "32 20 0:27 / /one rw cgroup2 none rw", NULL },
        { " - cgroup2 none rw", NULL },
        { "32 20 0:27 / /one rw - ", NULL },
        { "", NULL },
        { "x", NULL },
    };

    fake_write(root, "proc/self/cgroup", "\nx\n1:cpu\n0::/\n");
    for (unsigned i = 0; i < G_N_ELEMENTS(lines); i++) {
        g_autofree char *text =
            g_strdup_printf("\n%s\n32 20 0:27 / /two rw - cgroup2 none rw\n",
                            lines[i].mount);
        g_auto(GStrv) dirs = NULL;

        fake_write(root, "proc/self/mountinfo", text);
        dirs = cgroup_dirs(root->dir, CGROUP_V2);
        g_assert(g_strv_length(dirs) == 1);
        assert_dir(root, dirs[0], lines[i].dir ? lines[i].dir : "two");
    }
}

/* Group names may have what separates fields elsewhere. */
static void test_names(FakeRoot *root, gconstpointer data)
{
    g_auto(GStrv) v1 = NULL, v2 = NULL;

    fake_cgroups(root);
    fake_write(root, "proc/self/cgroup",
               "5:cpu,memory:/box/a:b:c\n0::/slice/x:y\n");
    v1 = cgroup_dirs(root->dir, CGROUP_V1);
    g_assert(g_strv_length(v1) == 2);
    assert_dir(root, v1[0], "cg/memory/a:b:c");
    v2 = cgroup_dirs(root->dir, CGROUP_V2);
    g_assert(g_strv_length(v2) == 3);
    assert_dir(root, v2[0], "cg/unified/slice/x:y");
}

/* In another group than the mount shows. */
static void test_elsewhere(FakeRoot *root, gconstpointer data)
{
    g_auto(GStrv) v1 = NULL;

    fake_cgroups(root);
    fake_write(root, "proc/self/cgroup", "3:memory:/other/vm\n");
    v1 = cgroup_dirs(root->dir, CGROUP_V1);
    g_assert(g_strv_length(v1) == 3);
    assert_dir(root, v1[0], "cg/memory/other/vm");
    assert_dir(root, v1[2], "cg/memory");
}

static void write_number(FakeRoot *root, const char *dir, const char *name,
                         const char *format, uint64_t n)
{
    g_autofree char *number = g_strdup_printf("%" G_GUINT64_FORMAT, n);
    g_auto(GStrv) parts = g_strsplit(format, "#", 2);
    g_autofree char *text = g_strjoinv(number, parts);

    fake_write_in(root, dir, name, text);
}

/* A group's files in either version, and how they are written. */
typedef struct Layout {
    const char *group, *above;
    const char *limit, *usage, *stat, *none;
} Layout;

static const Layout layouts[] = {
    { "cg/memory/vm", "cg/memory", "memory.limit_in_bytes",
      "memory.usage_in_bytes",
      "cache 1\ninactive_file 999999999\ntotal_inactive_file #\n",
      "9223372036854771712\n" },
    { "cg/unified/slice/vm", "cg/unified/slice", "memory.max",
      "memory.current", "anon 1\ninactive_file #\nactive_file 999999999\n",
      "max\n" },
};

static bool tight_now(KsmMemcg *g)
{
    fake_now += G_GUINT64_CONSTANT(1000000000);
    return memcg_is_tight(g);
}

static void test_tight(FakeRoot *root, gconstpointer data)
{
    const Layout *l = data;
    KsmMemcg g;

    fake_cgroups(root);
    if (l == &layouts[1]) {
        fake_write(root, "proc/self/mountinfo",
                   "32 20 0:27 / /cg/unified rw - cgroup2 none rw\n");
    }
    prim.now_ns = fake_now_ns;
    fake_now = 1000;
    fake_write_in(root, l->group, l->limit, l->none);
    fake_write_in(root, l->above, l->limit, l->none);
    write_number(root, l->group, l->usage, "#\n", MIB(100));
    write_number(root, l->above, l->usage, "#\n", MIB(300));
    /* whatever it held before */
    memset(&g, 0xff, sizeof(g));
    g.asked = fake_now;
    g.tight = true;
    memcg_init(&g, root->dir);
    g_assert(!memcg_is_tight(&g));
    g_assert(!tight_now(&g));
    write_number(root, l->group, l->limit, "#\n", MIB(200));
    g_assert(!tight_now(&g));

    /* ours; there need not be a memory.stat */
    write_number(root, l->group, l->limit, "#\n", MIB(107));
    g_assert(tight_now(&g));
    write_number(root, l->group, l->limit, "#\n", MIB(108));
    g_assert(!tight_now(&g));

    /* the one above */
    write_number(root, l->above, l->limit, "#\n", MIB(301));
    write_number(root, l->above, "memory.stat", l->stat, MIB(6));
    g_assert(tight_now(&g));
    write_number(root, l->above, "memory.stat", l->stat, MIB(7));
    g_assert(!tight_now(&g));

    /* looked at now and then */
    write_number(root, l->above, "memory.stat", l->stat, 0);
    fake_now += 50 * 1000 * 1000 - 1;
    g_assert(!memcg_is_tight(&g));
    fake_now += 1;
    g_assert(memcg_is_tight(&g));

    memcg_free(&g);
    prim.now_ns = prim_real.now_ns;
}

static unsigned stats_read;

static int open_count(const char *path)
{
    stats_read += g_str_has_suffix(path, "/memory.stat");
    return prim_real.open_read(path);
}

/* The kernel first sums the statistics up: they are read when needed. */
static void test_dear(FakeRoot *root, gconstpointer data)
{
    const Layout *l = data;
    KsmMemcg g;

    fake_write(root, "proc/self/mountinfo",
               l == layouts ? "31 20 0:26 /box /cg/memory rw - cgroup none "
                              "rw,memory\n"
                            : "32 20 0:27 / /cg/unified rw - cgroup2 none "
                              "rw\n");
    fake_write(root, "proc/self/cgroup", "3:memory:/box/vm\n0::/slice/vm\n");
    write_number(root, l->group, "memory.stat", l->stat, MIB(50));
    write_number(root, l->group, l->limit, "#\n", MIB(108));
    prim.now_ns = fake_now_ns;
    prim.open_read = open_count;
    stats_read = 0;
    memcg_init(&g, root->dir);
    /* the usage is not known */
    g_assert(!tight_now(&g) && stats_read == 0);
    write_number(root, l->group, l->usage, "#\n", MIB(100));
    g_assert(!tight_now(&g) && stats_read == 0);
    write_number(root, l->group, l->usage, "#\n", MIB(100) + 1);
    g_assert(!tight_now(&g) && stats_read == 1);
    /* more cache than usage, which is of another time */
    write_number(root, l->group, "memory.stat", l->stat, MIB(500));
    g_assert(!tight_now(&g) && stats_read == 2);
    write_number(root, l->group, l->limit, "#\n", MIB(7));
    g_assert(tight_now(&g) && stats_read == 3);
    memcg_free(&g);
    prim = prim_real;
}

typedef struct Hierarchy {
    const char *root;
    CgroupVersion version;
} Hierarchy;

static void init_and_free(void *opaque)
{
    const Hierarchy *h = opaque;
    KsmMemcg g;

    memcg_init(&g, h->root);
    g_assert(g.version == h->version);
    memcg_free(&g);
}

/* Nothing stays, with any of the hierarchies. */
static void test_leaks(FakeRoot *root, gconstpointer data)
{
    Hierarchy v1 = { root->dir, CGROUP_V1 }, v2 = { root->dir, CGROUP_V2 };

    fake_cgroups(root);
    g_assert(!util_leaks(init_and_free, &v1, 200));
    fake_write(root, "proc/self/cgroup", "0::/slice/vm\n");
    g_assert(!util_leaks(init_and_free, &v2, 200));
}

static void test_none(FakeRoot *root, gconstpointer data)
{
    KsmMemcg g;

    memcg_init(&g, root->dir);
    g_assert(!memcg_is_tight(&g));
    memcg_free(&g);
}

int main(int argc, char **argv)
{
#ifdef M_PERTURB
    /* memory nobody wrote is not zero by chance */
    mallopt(M_PERTURB, 0x5a);
#endif
    g_test_init(&argc, &argv, NULL);
    g_test_add("/cgroup/dirs", FakeRoot, NULL, fake_make, test_dirs,
               fake_remove);
    g_test_add("/cgroup/top", FakeRoot, NULL, fake_make, test_top,
               fake_remove);
    g_test_add("/cgroup/lines", FakeRoot, NULL, fake_make, test_lines,
               fake_remove);
    g_test_add("/cgroup/names", FakeRoot, NULL, fake_make, test_names,
               fake_remove);
    g_test_add("/cgroup/elsewhere", FakeRoot, NULL, fake_make, test_elsewhere,
               fake_remove);
    g_test_add("/memcg/dear/v1", FakeRoot, &layouts[0], fake_make, test_dear,
               fake_remove);
    g_test_add("/memcg/dear/v2", FakeRoot, &layouts[1], fake_make, test_dear,
               fake_remove);
    g_test_add("/memcg/tight/v1", FakeRoot, &layouts[0], fake_make, test_tight,
               fake_remove);
    g_test_add("/memcg/tight/v2", FakeRoot, &layouts[1], fake_make, test_tight,
               fake_remove);
    g_test_add("/memcg/leaks", FakeRoot, NULL, fake_make, test_leaks,
               fake_remove);
    g_test_add("/memcg/none", FakeRoot, NULL, fake_make, test_none,
               fake_remove);
    return g_test_run();
}
