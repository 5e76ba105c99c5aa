# SPDX-License-Identifier: GPL-2.0-or-later
"""A snapshot as metrics for Prometheus, in either of its two text forms.

OpenMetrics 1.0, and the older text format 0.0.4, the only one that
node_exporter's textfile collector reads: there a counter's family has the name
of its samples, units are not stated, and nothing marks the end.  No sample has
a time: the collector refuses such files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from top.model import ANSWERED, UNANSWERED, Guest, Kernel, Pool, Snapshot

PREFIX = "qemu_ksm_"
Labels = dict[str, str]


@dataclass
class Family:
    #: without prefix, and without _total
    name: str
    help: str
    counter: bool = False
    samples: list[tuple[Labels, float]] = field(default_factory=list)

    @property
    def unit(self) -> str:
        return next((u for u in ("bytes", "seconds") if self.name.endswith(u)), "")


#: All there are; a family without samples is not written.
FAMILIES = {
    "domain_up": "Whether the guest answered.",
    "domain_info": "What the guest is.",
    "domain_state": "1 for the state that the guest is in.",
    "domain_size_bytes": "Guest memory.",
    "domain_resident_bytes": "Guest memory that is in memory now; of a guest "
    "without memory-backend-ksm all of its process.",
    "domain_saved_bytes": "Memory saved, by the guest's own engine, by its group, "
    "by the kernel's ksmd.",
    "domain_metadata_bytes": "Data that merging needs for the guest.",
    "domain_page_tables_bytes": "Kernel memory that merging takes for the guest.",
    "domain_profit_bytes": "Memory saved less memory it costs.",
    "domain_cpu_seconds": "CPU time of the guest's own engine.",
    "domain_stalls": "How often merging kept the guest waiting.",
    "domain_stall_p50_seconds": "Half of the stalls took less, since it began.",
    "domain_stall_p99_seconds": "99 of 100 stalls took less, since it began.",
    "domain_stall_max_seconds": "The longest stall since it began.",
    "domain_reason": "1 for each reason why memory of the guest is not merged.",
    "domain_reason_bytes": "Memory that a reason holds for, where it is known.",
    "domain_group_connected": "Whether the guest has the daemon of its group.",
    "pool_up": "Whether the daemon of a group answered.",
    "pool_members": "Processes that share the pool.",
    "pool_used_bytes": "Memory of the pool.",
    "pool_limit_bytes": "Memory that the pool may have.",
    "pool_saved_bytes": "What members hold of the pool less what it takes.",
    "pool_metadata_bytes": "The daemon's tables.",
    "pool_cpu_seconds": "CPU time of the daemon.",
    "pool_refused_pages": "Pages that the daemon did not take, by what was short.",
    "ksmd_running": "Whether the kernel's ksmd runs.",
    "ksmd_cpu_seconds": "CPU time of ksmd since boot.",
    "ksmd_saved_bytes": "Memory that ksmd saves, zero pages too, of all programs of "
    "the host.",
    "ksmd_profit_bytes": "That, less the memory ksmd needs.",
    "collect_duration_seconds": "How long it took to ask everybody.",
    "collect_timestamp_seconds": "When everybody was asked.",
}
COUNTERS = (
    *("domain_cpu_seconds", "domain_stalls"),
    *("pool_cpu_seconds", "pool_refused_pages", "ksmd_cpu_seconds"),
)


class Metrics:
    def __init__(self) -> None:
        self._families = {
            name: Family(name, text, name in COUNTERS)
            for name, text in FAMILIES.items()
        }

    def add(self, name: str, value: float | None, **labels: str) -> None:
        """What is not known has no sample."""
        if value is not None:
            self._families[name].samples.append((labels, value))

    def families(self) -> list[Family]:
        return [family for family in self._families.values() if family.samples]


def add_guest(metrics: Metrics, guest: Guest) -> None:
    name = guest.name

    def add(what: str, value: float | None, **labels: str) -> None:
        metrics.add(f"domain_{what}", value, domain=name, **labels)

    add("up", guest.answered)
    group = guest.group.name if guest.group else ""
    pid = "" if guest.pid is None else str(guest.pid)
    add("info", 1, pid=pid, source=guest.source, scope=guest.scope or "", group=group)
    for state in (*ANSWERED, *UNANSWERED):
        add("state", guest.state == state, state=state)
    add("size_bytes", guest.size)
    add("resident_bytes", guest.resident)
    for by in ("own", "group", "kernel"):
        add("saved_bytes", getattr(guest.saved, by), by=by)
    add("metadata_bytes", guest.cost.metadata)
    add("page_tables_bytes", guest.cost.page_tables)
    add("profit_bytes", guest.profit)
    add("cpu_seconds", guest.cost.cpu_seconds)
    if guest.stall:
        add("stalls", guest.stall.count)
        for which in ("p50", "p99", "max"):
            add(f"stall_{which}_seconds", getattr(guest.stall, which))
    if guest.answered:
        for reason in guest.reasons:
            add("reason", 1, reason=reason.kind)
            add("reason_bytes", reason.bytes, reason=reason.kind)
    if guest.group:
        add("group_connected", guest.group.connected, group=guest.group.name)


def add_pool(metrics: Metrics, pool: Pool) -> None:
    labels = {"group": pool.group, "socket": pool.socket}
    up = pool.state == "up"
    metrics.add("pool_up", up, **labels)
    if not up:
        return
    metrics.add("pool_members", len(pool.members), **labels)
    metrics.add("pool_used_bytes", pool.used, **labels)
    metrics.add("pool_limit_bytes", pool.limit, **labels)
    metrics.add("pool_saved_bytes", pool.saved, **labels)
    metrics.add("pool_metadata_bytes", pool.metadata, **labels)
    metrics.add("pool_cpu_seconds", pool.cpu_seconds, **labels)
    for short, pages in pool.refused.items():
        metrics.add("pool_refused_pages", pages, **labels, short=short)


def add_kernel(metrics: Metrics, kernel: Kernel) -> None:
    metrics.add("ksmd_running", kernel.running)
    metrics.add("ksmd_cpu_seconds", kernel.cpu_seconds)
    metrics.add("ksmd_saved_bytes", kernel.saved)
    metrics.add("ksmd_profit_bytes", kernel.profit)


def collect(snapshot: Snapshot) -> list[Family]:
    metrics = Metrics()
    for guest in snapshot.guests:
        add_guest(metrics, guest)
    for pool in snapshot.pools:
        add_pool(metrics, pool)
    add_kernel(metrics, snapshot.kernel)
    metrics.add("collect_duration_seconds", round(snapshot.seconds, 6))
    metrics.add("collect_timestamp_seconds", round(snapshot.time, 3))
    return metrics.families()


def escape(value: str) -> str:
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        value = value.replace(character, escaped)
    return value


def sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{escape(each)}"' for key, each in labels.items())
    number = int(value) if isinstance(value, bool) else value
    return f"{name}{{{inside}}} {number}" if inside else f"{name} {number}"


def lines(family: Family, *, openmetrics: bool) -> Iterator[str]:
    name = PREFIX + family.name
    counted = f"{name}_total" if family.counter else name
    head = name if openmetrics else counted
    yield f"# HELP {head} {family.help}"
    yield f"# TYPE {head} {'counter' if family.counter else 'gauge'}"
    if openmetrics and family.unit:
        yield f"# UNIT {head} {family.unit}"
    for labels, value in family.samples:
        yield sample(counted, labels, value)


def text(snapshot: Snapshot, *, openmetrics: bool) -> str:
    found = [
        line
        for family in collect(snapshot)
        for line in lines(family, openmetrics=openmetrics)
    ]
    return "\n".join(found + ["# EOF"] * openmetrics) + "\n"
