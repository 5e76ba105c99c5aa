# SPDX-License-Identifier: GPL-2.0-or-later
"""Pages that are mapped to the kernel's page of zeroes: they take no memory.

A page that was only read is such a one, be it never written or given back.
/proc/PID/pagemap tells them from others only to those who may see frame
numbers; the ioctl PAGEMAP_SCAN (Linux 6.7) tells everybody.
"""

from __future__ import annotations

import ctypes
import fcntl

import numpy as np

PAGE = 4096
_PFNZERO = 1 << 5
_REGIONS = 1024


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("start", "end", "categories")]


class _Scan(ctypes.Structure):
    """struct pm_scan_arg of linux/fs.h."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len"),
            *("max_pages", "category_inverted", "category_mask"),
            *("category_anyof_mask", "return_mask"),
        )
    ]


_PAGEMAP_SCAN = 3 << 30 | ctypes.sizeof(_Scan) << 16 | ord("f") << 8 | 16


def zero_pages(pagemap: int, where: tuple[int, int]) -> np.ndarray:
    """Which pages of the range are; `pagemap` is an open file of a process."""
    start, end = where
    found = np.zeros((end - start) // PAGE, dtype=bool)
    regions = (_Region * _REGIONS)()
    at = start
    while at < end:
        scan = _Scan(
            size=ctypes.sizeof(_Scan),
            start=at,
            end=end,
            vec=ctypes.addressof(regions),
            vec_len=_REGIONS,
            category_mask=_PFNZERO,
            return_mask=_PFNZERO,
        )
        number = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, scan)
        for region in regions[:number]:
            first, last = region.start - start, region.end - start
            found[first // PAGE : last // PAGE] = True
        at = scan.walk_end
    return found
