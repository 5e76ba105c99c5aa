# SPDX-License-Identifier: GPL-2.0-or-later
"""From query-ksm-stats, and what the kernel says, to a guest's figures.

Raises KeyError, TypeError, ValueError or AttributeError where an answer is not
as qapi/ksm.json has it.
"""

from __future__ import annotations

from typing import Any

from top.model import PAGE, Group, Guest, Kernel, Reason, Stall, add, number, total_of
from top.procfs import KsmStat

#: What is to be seen first, of a guest with several objects.
STATES = ("inhibited", "active", "idle", "off")


def bytes_of(given: dict[str, Any], name: str, pages: str) -> int | None:
    """The member @name, or what an older QEMU has instead: so many pages."""
    if name in given:
        return number(given[name])
    return number(given[pages]) * PAGE if pages in given else None


def all_bytes(backends: list[dict[str, Any]], name: str, pages: str) -> int | None:
    """Of them all; None if none has it."""
    found = [bytes_of(each, name, pages) for each in backends]
    known = [value for value in found if value is not None]
    return sum(known) if known else None


def plain_bytes(backends: list[dict[str, Any]], name: str) -> int | None:
    found = [number(each[name]) for each in backends if name in each]
    return sum(found) if found else None


def if_given(given: dict[str, Any], name: str) -> int | None:
    return number(given[name]) if name in given else None


def reason(given: dict[str, Any]) -> Reason:
    size = bytes_of(given, "bytes", "pages")
    return Reason(str(given["kind"]), str(given["text"]), size)


def fill_state(guest: Guest, backends: list[dict[str, Any]]) -> None:
    """The first state of STATES that one is in, with the reasons of those that
    are in it first."""
    states = [str(each["state"]) for each in backends]
    guest.state = next(state for state in STATES if state in states)
    ordered = sorted(backends, key=lambda each: bool(each["state"] != guest.state))
    merged: dict[str, Reason] = {}
    for each in ordered:
        for given in map(reason, each["reasons"]):
            known = merged.setdefault(given.kind, given)
            if known is not given and given.bytes is not None:
                known.bytes = (known.bytes or 0) + given.bytes
    guest.reasons = list(merged.values())
    guest.scope = str(backends[0]["scope"])


def fill_engine(guest: Guest, backends: list[dict[str, Any]]) -> None:
    """One engine merges all objects of a guest: what is the engine's is taken
    once, from the first that has it."""
    engine = next((each for each in backends if "scan-time" in each), None)
    if engine is None:
        return
    guest.saved.own = add_bytes(
        all_bytes(backends, "saved-bytes", "pages-sharing"),
        all_bytes(backends, "zero-bytes", "zero-pages"),
    )
    names = ("scan-time", "merge-time", "log-time")
    guest.cost.cpu_seconds = sum(number(engine.get(name, 0)) for name in names) / 1e9
    guest.cost.metadata = plain_bytes(backends, "metadata")
    guest.cost.page_tables = plain_bytes(backends, "page-tables")
    if "stall" in engine:
        stall = engine["stall"]
        times = (number(stall[name]) / 1e9 for name in ("p50", "p99", "max"))
        guest.stall = Stall(number(stall["count"]), *times)


def fill_group(guest: Guest, backends: list[dict[str, Any]]) -> None:
    group = next((each["group"] for each in backends if "group" in each), None)
    if group is None:
        return
    guest.group = Group(
        name=str(group["name"]),
        connected=bool(group["connected"]),
        members=if_given(group, "members"),
        pool=if_given(group, "pool-bytes"),
        limit=if_given(group, "pool-limit"),
    )
    guest.saved.group = bytes_of(group, "saved-bytes", "saved") or 0


def fill_kernel(guest: Guest, stat: KsmStat | None, kernel: Kernel) -> None:
    """The last to be filled in.

    Merged pages of a process are those kept and those saved: of all such pages
    of the host it is known how many are which.
    """
    if stat is not None:
        add_kernel(guest, stat, kernel)
    guest.saved.sum_up()
    # not QEMU's: that has a guess at what ksmd saves, and not what it costs
    if guest.saved.total is not None:
        costs = total_of([guest.cost.metadata, guest.cost.page_tables])
        guest.profit = guest.saved.total - costs


def add_kernel(guest: Guest, stat: KsmStat, kernel: Kernel) -> None:
    part = 1.0
    if kernel.saved is not None and kernel.shared:
        merged = kernel.saved - (kernel.zero or 0)
        part = merged / (merged + kernel.shared)
    guest.saved.kernel = int(stat.merged * part + 0.5) * PAGE + stat.zero * PAGE
    guest.cost.metadata = add_bytes(guest.cost.metadata, stat.metadata)


def add_bytes(*values: int | None) -> int | None:
    found = add(*values)
    return None if found is None else int(found)


def process_stat(given: dict[str, Any]) -> KsmStat | None:
    """The member 'process', for who may not read /proc/PID/ksm_stat."""
    merged = bytes_of(given, "merged-bytes", "pages-merged")
    zero = bytes_of(given, "zero-bytes", "zero-pages") or 0
    if merged is None:
        return None
    metadata = None
    if "profit" in given:
        metadata = merged + zero - number(given["profit"])
    return KsmStat(merged // PAGE, zero // PAGE, metadata)


def fill(guest: Guest, stats: dict[str, Any] | None) -> KsmStat | None:
    """All that QEMU knows; returns what it knows of the kernel's part."""
    backends = stats["backends"] if stats else []
    if not stats or not backends:
        guest.state = "plain"
        return process_stat(stats["process"]) if stats else None
    fill_state(guest, backends)
    guest.size = plain_bytes(backends, "size")
    resident = plain_bytes(backends, "resident")
    guest.resident = guest.resident if resident is None else resident
    fill_engine(guest, backends)
    fill_group(guest, backends)
    return process_stat(stats["process"])
