# SPDX-License-Identifier: GPL-2.0-or-later
"""The programs behind scripts/*; launch.py starts them."""
