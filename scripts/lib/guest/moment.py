# SPDX-License-Identifier: GPL-2.0-or-later
"""A group of guests at one moment: what is saved of what could be.

All guests are stopped; their pages are counted before anything is read, so
that counting changes nothing.  By page of a guest's RAM:

  given back   a zero page the engine returned to the host, as its statistics
               have it: could be saved, and is
  pooled       mapped from the group's pool, be it resident there or not
  own          resident and the guest's alone

Of the contents of pooled and own pages, over all guests and inside each, one
copy has to stay: all others could be saved, and so could every zero page that
is the guest's own.  What is not resident and was not given back counts for
nothing, nor does what is in swap, nor a page that was only read: the kernel's
page of zeroes.  What is saved: zero pages given back, and
pooled pages less all the pool's memory.

Leaves to others: reading pages (content.py), merging, the bench
(bench/exhaustive.py).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from guest import content
from guest.content import PAGE, ZERO
from guest.qemu import Guest
from guest.zeropfn import zero_pages
from host.poold import Poold

_PRESENT = np.uint64(1 << 63)
_FILE = np.uint64(1 << 61)
#: of pages that stand side by side; a mapping for fewer rarely pays
SHORT_RUN = 8


@dataclass
class Pages:
    """Which of a guest's pages there are."""

    pooled: np.ndarray
    own: np.ndarray

    @property
    def there(self) -> np.ndarray:
        return np.asarray(self.pooled | self.own)


def pages(pid: int, where: tuple[int, int]) -> Pages:
    """Looks at page tables and mappings; reads no page."""
    start, end = where
    number = (end - start) // PAGE
    file = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        entries = os.pread(file, number * 8, start // PAGE * 8)
        zero = zero_pages(file, where)
    finally:
        os.close(file)
    flags = np.frombuffer(entries, dtype=np.uint64)
    # written after it was merged, a page of a mapping of the pool is anonymous
    own = ((flags & _PRESENT) != 0) & ((flags & _FILE) == 0) & ~zero
    pool = np.zeros(number, dtype=bool)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if match and ("/memfd:" in line or "/ksm-pool" in line):
            first, last = (int(word, 16) for word in match.groups())
            if start <= first and last <= end:
                pool[(first - start) // PAGE : (last - start) // PAGE] = True
    return Pages(pool & ~own, own)


@dataclass
class Moment:
    """In pages of 4096 bytes."""

    given_back: int = 0
    pooled: int = 0
    own: int = 0
    #: memory of the pool, whoever maps it
    pool: int = 0
    #: what the statistics of all members add up to
    stats_saved: int = 0
    achievable: int = 0
    #: own pages that have an equal or are zero
    left: int = 0
    #: of which in runs of fewer than SHORT_RUN such pages
    left_short: int = 0
    #: pages that are not merged, by reason, as the statistics have it
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def saved(self) -> int:
        return self.given_back + self.pooled - self.pool

    @property
    def share(self) -> float:
        return self.saved / self.achievable if self.achievable else 1.0


def _short(left: np.ndarray) -> int:
    """Pages in runs of fewer than SHORT_RUN."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], left, [False]))))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths < SHORT_RUN].sum())


def _take_stats(moment: Moment, guest: Guest) -> None:
    stats = guest.backend_stats()
    zeroes = int(stats["zero-bytes"]) // PAGE
    moment.given_back += zeroes
    moment.stats_saved += zeroes + int(stats["saved-bytes"]) // PAGE
    moment.stats_saved += int(stats.get("group", {}).get("saved-bytes", 0)) // PAGE
    for reason in stats["reasons"]:
        moment.reasons[reason["kind"]] += int(reason.get("bytes", 0)) // PAGE


def look(guests: Sequence[Guest], poold: Poold) -> Moment:
    """Stops the guests, counts, and lets them run again.

    Their RAM must have been asked for (Guest.ram()) before merging began.
    Merging is off meanwhile: a page is not to be away while it is read.
    """
    for guest in guests:
        guest.qmp("stop")
    moment = Moment(pool=poold.pool_bytes() // PAGE)
    found = []
    for guest in guests:
        found.append(pages(guest.pid, guest.ram()))
        _take_stats(moment, guest)
    set_run(guests, False)
    contents = [
        content.read(guest.pid, guest.ram(), each.there)
        for guest, each in zip(guests, found, strict=True)
    ]
    set_run(guests, True)
    for guest in guests:
        guest.qmp("cont")
    _count(moment, found, contents)
    return moment


def set_run(guests: Sequence[Guest], run: bool) -> None:
    for guest in guests:
        guest.qmp("qom-set", path="/objects/ram0", property="run", value=run)


def _count(moment: Moment, found: list[Pages], contents: list[content.Content]) -> None:
    total: Counter[int] = Counter()
    for one in contents:
        total += one.count()
    zeroes = total.pop(ZERO, 0)
    moment.achievable = moment.given_back + zeroes
    moment.achievable += sum(count - 1 for count in total.values())
    for each, one in zip(found, contents, strict=True):
        moment.pooled += int(each.pooled.sum())
        moment.own += int(each.own.sum())
        left = np.zeros(each.own.size, dtype=bool)
        for page, digest in one.pages.items():
            left[page] = digest == ZERO or total[digest] > 1
        left &= each.own
        moment.left += int(left.sum())
        moment.left_short += _short(left)
