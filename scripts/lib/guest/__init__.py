# SPDX-License-Identifier: GPL-2.0-or-later
"""Guests in QEMU: started, driven, moved, looked into."""
