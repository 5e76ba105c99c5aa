/*
 * Tests of what hw/mem/ksm-kernel.c makes of the kernel's files
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "../../hw/mem/ksm-kernel.h"

int main(int argc, char **argv)
{
    g_test_init(&argc, &argv, NULL);
    return g_test_run();
}
