# SPDX-License-Identifier: GPL-2.0-or-later
"""What ksm-top knows of a host at one moment.

Bytes and seconds throughout; None: not known.  `ksm-top --json` prints these
classes, so the names of their fields are its interface.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

PAGE = 4096

#: A guest that answered: of its memory-backend-ksm; or it has none.
ANSWERED = ("active", "idle", "inhibited", "off", "plain")
#: One that did not, and why.
UNANSWERED = {
    "busy": "its QMP socket serves another client",
    "silent": "it did not answer in time",
    "stopped": "its process is stopped",
    "gone": "it ended",
    "refused": "its QMP socket may not be used",
    "garbled": "what answers does not speak QMP as it should",
    "unseen": "no QMP socket of it can be reached",
}


def number(given: Any) -> int:
    """One that another program gave, as a file or an answer has it."""
    if not isinstance(given, int) or abs(given) >= 1 << 64:
        raise ValueError(f"{given!r:.40} is no number of 64 bits")
    return given


def add(*values: float | None) -> float | None:
    """The sum of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def total_of(values: Iterable[int | None]) -> int:
    return sum(value for value in values if value is not None)


@dataclass
class Reason:
    kind: str
    text: str
    #: of memory it holds for
    bytes: int | None = None


@dataclass
class Saved:
    """By whom: the guest's own engine, its group, the kernel's ksmd."""

    own: int | None = None
    group: int | None = None
    kernel: int | None = None
    total: int | None = None

    def sum_up(self) -> None:
        value = add(self.own, self.group, self.kernel)
        self.total = None if value is None else int(value)


@dataclass
class Cost:
    #: CPU since the guest began, and what part of a core since last asked
    cpu_seconds: float | None = None
    cpu_share: float | None = None
    #: data of the engine, and of ksmd for this guest
    metadata: int | None = None
    page_tables: int | None = None


@dataclass
class Stall:
    """How long merging kept the guest waiting."""

    count: int
    p50: float
    p99: float
    max: float


@dataclass
class Group:
    """The guest's group, as its daemon told the guest."""

    name: str
    connected: bool
    members: int | None = None
    pool: int | None = None
    limit: int | None = None


@dataclass
class Sketch:
    """What is in a guest's memory, to compare it with another's: similar.py."""

    #: which hash it is; others cannot be compared
    key: int
    pages: int
    contents: int
    #: the least hashes, in order
    least: list[int]


@dataclass
class Guest:
    name: str
    pid: int | None = None
    #: who answered: qmp, libvirt; proc: only the kernel
    source: str = "proc"
    state: str = "unseen"
    #: why its memory is not merged, or why it did not answer
    reasons: list[Reason] = field(default_factory=list)
    scope: str | None = None
    group: Group | None = None
    size: int | None = None
    #: its RAM; of a plain QEMU, or one that did not answer, all of QEMU
    resident: int | None = None
    saved: Saved = field(default_factory=Saved)
    cost: Cost = field(default_factory=Cost)
    profit: int | None = None
    stall: Stall | None = None
    #: if it was asked for, and the guest has one
    sketch: Sketch | None = None

    @property
    def answered(self) -> bool:
        return self.state in ANSWERED

    def unanswered(self, state: str, text: str = "") -> None:
        self.state = state
        self.reasons = [Reason(state, text or UNANSWERED[state])]


@dataclass
class Member:
    """Of a pool."""

    name: str
    pid: int
    connected: bool
    held: int
    share: float
    published: int


@dataclass
class Pool:
    """A group's daemon, as it tells itself."""

    group: str
    socket: str
    #: up, gone, silent, refused, garbled
    state: str = "up"
    reason: str | None = None
    generation: int | None = None
    uptime: int | None = None
    used: int | None = None
    limit: int | None = None
    #: what members hold less what that takes
    saved: int | None = None
    metadata: int | None = None
    cpu_seconds: float | None = None
    cpu_share: float | None = None
    #: pages that were not taken, by reason
    refused: dict[str, int] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)


@dataclass
class Kernel:
    """The kernel's KSM: all programs of the host together."""

    running: bool | None = None
    shared: int | None = None
    #: also by zero pages
    saved: int | None = None
    zero: int | None = None
    profit: int | None = None
    pages_to_scan: int | None = None
    full_scans: int | None = None
    cpu_seconds: float | None = None
    cpu_share: float | None = None
    memory: int | None = None
    available: int | None = None


@dataclass
class Total:
    """Of all guests, and what serves them."""

    guests: int = 0
    answered: int = 0
    resident: int = 0
    saved: Saved = field(default_factory=Saved)
    cost: Cost = field(default_factory=Cost)
    profit: int = 0


@dataclass
class Snapshot:
    time: float
    #: how long it took to get
    seconds: float
    guests: list[Guest]
    pools: list[Pool]
    kernel: Kernel
    total: Total


def total(guests: list[Guest], pools: list[Pool], kernel: Kernel) -> Total:
    """The daemons' tables and ksmd's time are paid by nobody else.

    ksmd's is since boot, and also others': only what it takes now is added.
    """
    sums = Total(
        guests=len(guests),
        answered=sum(guest.answered for guest in guests),
        resident=total_of(guest.resident for guest in guests),
    )
    for name in ("own", "group", "kernel"):
        values = (getattr(guest.saved, name) for guest in guests)
        setattr(sums.saved, name, total_of(values))
    sums.saved.sum_up()
    tables = total_of(pool.metadata for pool in pools)
    sums.cost.metadata = tables + total_of(guest.cost.metadata for guest in guests)
    sums.cost.page_tables = total_of(guest.cost.page_tables for guest in guests)
    costs: list[Cost | Pool] = [*(guest.cost for guest in guests), *pools]
    sums.cost.cpu_seconds = add(*(each.cpu_seconds for each in costs))
    sums.cost.cpu_share = add(*(each.cpu_share for each in costs), kernel.cpu_share)
    sums.profit = total_of(guest.profit for guest in guests) - tables
    return sums
