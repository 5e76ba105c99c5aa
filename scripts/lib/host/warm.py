# SPDX-License-Identifier: GPL-2.0-or-later
"""Free memory that costs no more to take than memory should.

A machine that is a guest itself gets memory from its hypervisor when it uses it
first, and may give back what is free (free page reporting): a page then takes
several times as long to fill.  That is no part of what merging costs, and only
who makes a pool would pay it, ksmd would not.  So before CPU time is
measured, as much memory as will be wanted is used once, and freed but for a
page of each MiB: what is reported is whole blocks, of 2 MiB and more, and the
kernel takes pieces of blocks first.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = resource.getpagesize()
MIB = 1 << 20
#: left alone, however much is wanted
RESERVE = 512 * MIB


def available() -> int:
    """Bytes that could be had now; 0: not known."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


@contextmanager
def warm_memory(size: int) -> Iterator[None]:
    """Some `size` bytes of free memory are warm until the block ends."""
    size = min(size, available() - RESERVE) // MIB * MIB
    if size <= 0:
        yield
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        try:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages
        memory[::PAGE] = b"\1" * (size // PAGE)
        for start in range(0, size, MIB):
            memory.madvise(mmap.MADV_DONTNEED, start + PAGE, MIB - PAGE)
        yield
