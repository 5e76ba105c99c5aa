# SPDX-License-Identifier: GPL-2.0-or-later
"""What is equal in the memory of guests: every page read and counted.

The yardstick for merging: no engine can save more than this.  Reads a guest's
RAM through /proc/PID/mem, so it takes the rights of a debugger.  Leaves to
others: merging, and what is done with the figures (bench/guests.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

PAGE = 4096
CHUNK = 512  # pages: 2 MiB, a huge page, the engine's unit
#: a chunk with fewer pages to save than this is not held against an engine
WORTH = 64
_PRESENT_OR_SWAPPED = np.uint64(3 << 62)
ZERO = xxhash.xxh3_128_intdigest(bytes(PAGE))


def _content(memory: int, at: int, there: np.ndarray) -> bytes:
    """Of all pages, zeroes where one is not there: reading would map one."""
    if there.all():
        return os.pread(memory, there.size * PAGE, at)
    if not there.any():
        return b""
    data = bytearray(there.size * PAGE)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], there, [False]))))
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        piece = os.pread(memory, (last - first) * PAGE, at + first * PAGE)
        if len(piece) != (last - first) * PAGE:
            raise OSError(f"memory at {at + first * PAGE:#x} cannot be read")
        data[first * PAGE : last * PAGE] = piece
    return bytes(data)


def _pieces(
    pid: int, where: tuple[int, int], known: np.ndarray | None = None
) -> Iterator[tuple[int, bytes, np.ndarray]]:
    """(number of the first page, content, which pages there are) by 2 MiB.

    Which there are is looked up, or `known` by page.
    """
    start, size = where[0], where[1] - where[0]
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for offset in range(0, size, CHUNK * PAGE):
            length = min(CHUNK * PAGE, size - offset)
            first, number = offset // PAGE, length // PAGE
            if known is None:
                entries = os.pread(pagemap, number * 8, (start + offset) // PAGE * 8)
                flags = np.frombuffer(entries, dtype=np.uint64)
                there = (flags & _PRESENT_OR_SWAPPED) != 0
            else:
                there = known[first : first + number]
            yield first, _content(memory, start + offset, there), there
    finally:
        os.close(memory)
        os.close(pagemap)


@dataclass
class Content:
    """Hashes (128 bits) of a guest's resident pages, by page number."""

    pages: dict[int, int]
    patterns: set[int]

    def count(self) -> Counter[int]:
        return Counter(self.pages.values())


def read(pid: int, where: tuple[int, int], known: np.ndarray | None = None) -> Content:
    """Reads a guest that should be stopped meanwhile: what is resident, or the
    `known` pages."""
    content = Content({}, set())
    for first, data, there in _pieces(pid, where, known):
        if not data:
            continue
        view = memoryview(data)
        words = np.frombuffer(data, dtype=np.uint64).reshape(-1, PAGE // 8)
        same = (words == words[:, :1]).all(axis=1)
        for i in np.flatnonzero(there):
            digest = xxhash.xxh3_128_intdigest(view[i * PAGE : (i + 1) * PAGE])
            content.pages[first + int(i)] = digest
            if same[i] and digest != ZERO:
                content.patterns.add(digest)
    return content


def achievable(guests: list[Content], zero_is_free: bool = True) -> int:
    """Pages that can be saved when all guests share: one copy stays.

    Of zero pages none need stay; ksmd keeps one unless use_zero_pages is set,
    which makes no difference that could be seen.
    """
    total: Counter[int] = Counter()
    for guest in guests:
        total += guest.count()
    saved = sum(count - 1 for count in total.values())
    return saved + (1 if zero_is_free and total[ZERO] else 0)


def achievable_worth(guest: Content, scope: str = "vm") -> int:
    """As achievable() for one guest alone, counting only the pages that stand
    in chunks with WORTH or more pages to save."""
    count = guest.count()

    def saves(digest: int) -> bool:
        return digest == ZERO or (scope == "vm" and count[digest] > 1)

    chunks: Counter[int] = Counter()
    for page, digest in guest.pages.items():
        if saves(digest):
            chunks[page // CHUNK] += 1
    inside: Counter[int] = Counter()
    for page, digest in guest.pages.items():
        if saves(digest) and chunks[page // CHUNK] >= WORTH:
            inside[digest] += 1
    zeroes = inside.pop(ZERO, 0)
    return zeroes + sum(n - 1 for n in inside.values())


def save_image(pid: int, where: tuple[int, int], path: Path) -> None:
    """Writes RAM to a file, sparse where there is none."""
    with path.open("wb") as out:
        for first, data, there in _pieces(pid, where):
            if not data:
                continue
            for i in np.flatnonzero(there):
                page = data[i * PAGE : (i + 1) * PAGE]
                os.pwrite(out.fileno(), page, (first + int(i)) * PAGE)
        out.truncate(where[1] - where[0])
