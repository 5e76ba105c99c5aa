# SPDX-License-Identifier: GPL-2.0-or-later
"""The RAM of two QEMUs, page by page: is it the same?

After a migration, with the source stopped and the destination not yet
running, each difference is a loss.  Leaves to others: migrating (migrate.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from guest.qemu import Guest

PAGE = 4096


def dump(guest: Guest, path: Path) -> Path:
    """All RAM as the guest sees it; only stopped it is that of one moment."""
    guest.qmp(
        "pmemsave",
        val=guest.arch.ram_start,
        size=guest.spec.memory_mib << 20,
        filename=str(path),
    )
    return path


def differing(one: Path, other: Path) -> list[int]:
    """The numbers of the pages that are not the same in both."""
    a, b = (np.memmap(path, dtype=np.uint64, mode="r") for path in (one, other))
    if a.size != b.size:
        raise ValueError(f"{one} and {other} are not of the same size")
    words = PAGE // a.itemsize
    unequal = (a.reshape(-1, words) != b.reshape(-1, words)).any(axis=1)
    return [int(page) for page in np.flatnonzero(unequal)]


def describe(one: Path, other: Path, pages: list[int]) -> str:
    """Where they differ, in hexadecimal."""
    lines = [f"{len(pages)} pages differ:"]
    for page in pages[:8]:
        texts = []
        for path in (one, other):
            with path.open("rb") as file:
                file.seek(page * PAGE)
                texts.append(file.read(PAGE))
        at = next(i for i in range(PAGE) if texts[0][i] != texts[1][i])
        count = sum(a != b for a, b in zip(*texts, strict=True))
        words = " / ".join(text[at : at + 16].hex() for text in texts)
        lines.append(f"0x{page * PAGE + at:x}: {words}, {count} bytes of the page")
    return "\n".join(lines)


def compare(source: Guest, target: Guest, directory: Path) -> str:
    """How the RAM of two stopped guests differs; nothing if it does not."""
    for guest in (source, target):
        status = guest.qmp("query-status")
        assert not status["running"], f"{guest.spec.name} runs: {status}"
    paths = (directory / "source.ram", directory / "target.ram")
    try:
        dump(source, paths[0])
        dump(target, paths[1])
        pages = differing(*paths)
        return describe(*paths, pages) if pages else ""
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
