# SPDX-License-Identifier: GPL-2.0-or-later
"""The machine: the kernel's KSM, control groups, how programs end."""
