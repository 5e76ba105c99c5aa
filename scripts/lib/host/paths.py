# SPDX-License-Identifier: GPL-2.0-or-later
"""Where this checkout is."""

from pathlib import Path

TOP = Path(__file__).resolve().parents[3]
