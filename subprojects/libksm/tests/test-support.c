/*
 * libksm tests: what is said of a kernel that is too old
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * A kernel's release and its answers to the engine must agree on what it can
 * do, and an engine that cannot be had must say what is missing and since when
 * Linux has it.  scripts/check kernels runs this on kernels of both kinds.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>

#include "base/prim.h"
#include "util.h"

/* UFFDIO_MOVE came with Linux 6.8. */
static bool kernel_is_new_enough(void)
{
    struct utsname name;
    unsigned major, minor;

    g_assert(uname(&name) == 0);
    g_assert(sscanf(name.release, "%u.%u", &major, &minor) == 2);
    g_test_message("Linux %s", name.release);
    return major > 6 || (major == 6 && minor >= 8);
}

static void check_refusal(const GError *error)
{
    g_assert(g_error_matches(error, KSM_ERROR, KSM_ERROR_UNSUPPORTED));
    g_assert(strstr(error->message, "UFFDIO_MOVE"));
    g_assert(strstr(error->message, "Linux 6.8"));
}

/* Asked alone, and by making an engine. */
static void test_release(void)
{
    g_autoptr(GError) asked = NULL;
    g_autoptr(GError) made = NULL;
    bool supported = ksm_supported(&asked);
    KsmConfig config;
    KsmEngine *e;

    if (g_error_matches(asked, KSM_ERROR, KSM_ERROR_PERMISSION)) {
        g_test_skip(asked->message);
        return;
    }
    ksm_config_init(&config);
    e = ksm_engine_new(&config, &made);
    if (kernel_is_new_enough()) {
        g_assert(supported && !asked);
        g_assert(e && !made);
        ksm_engine_free(e);
    } else {
        g_assert(!supported && !e);
        check_refusal(asked);
        check_refusal(made);
        g_test_message("refused: %s", made->message);
    }
}

/* As older kernels answer: the text names what is missing. */
static int api_einval(int fd, uint64_t features)
{
    return -EINVAL;
}

static void test_text(void)
{
    g_autoptr(GError) error = NULL;

    prim.uffd_api = api_einval;
    g_assert(!ksm_supported(&error));
    prim = prim_real;
    if (g_error_matches(error, KSM_ERROR, KSM_ERROR_PERMISSION)) {
        g_test_skip(error->message);
        return;
    }
    check_refusal(error);
}

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    g_test_add_func("/support/release", test_release);
    g_test_add_func("/support/text", test_text);
    return g_test_run();
}
