# SPDX-License-Identifier: GPL-2.0-or-later
"""The benches, their harness, their registry and their plots."""
