# SPDX-License-Identifier: GPL-2.0-or-later
"""How many mappings a process of this host may have: vm.max_map_count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

LIMIT = Path("/proc/sys/vm/max_map_count")


def most() -> int:
    return int(LIMIT.read_text())


@contextlib.contextmanager
def limited(mappings: int) -> Iterator[None]:
    """So many for a while, for all of the machine.

    Who has more keeps them, and can make none.
    """
    found = most()
    LIMIT.write_text(str(mappings))
    try:
        yield
    finally:
        LIMIT.write_text(str(found))
