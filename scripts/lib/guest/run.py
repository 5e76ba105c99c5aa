# SPDX-License-Identifier: GPL-2.0-or-later
"""A group of real guests whose memory is merged, measured from outside.

One `Run` boots guests with nothing merging, takes their resident memory as
"before", starts merging, and takes samples until nothing more is gained; then
every guest verifies all it has.  Leaves to others: guests (qemu.py), the
kernel's knobs (host/ksmsys.py), presentation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from guest.qemu import Guest, GuestError, GuestSpec, anonymous_memory, pool_size
from host import ksmsys
from host.ksm_guard import guard
from host.hostd import Hostd
from host.poold import Poold
from host.warm import warm_memory

MIB = 1 << 20
#: "plain" is QEMU's own memory-backend-ram with the kernel's ksmd, "kernel"
#: is scope=host where no daemon serves the host's group, "host" where one does
SCOPES = ("plain", "kernel", "host", "zero", "vm", "group")
#: Who merges: the kernel's thread alone, or QEMU itself
BY_KERNEL = ("plain", "kernel")
#: ... in a pool that a daemon has
BY_DAEMON = ("host", "group")
#: ... and ksmd runs, for "host" as ksm-hostd has it
WITH_KSMD = ("plain", "kernel", "host")
#: ksmd's speed for the demo: some 100,000 pages a second.  Smart scan skips
#: pages that found no equal for a while; in the first minutes, the ones shown
#: here, ksmd saves less with it.
KSMD_FAST = {"pages_to_scan": 2000, "sleep_millisecs": 10, "smart_scan": 0}

#: A Ctrl-C came.  Once, under load, the exception it raises did not end the
#: program; where it was lost is not known, so the loop below looks here too.
interrupted = False


@dataclass
class GuestSample:
    """One guest at one time; bytes unless the name says otherwise."""

    name: str
    resident: int = 0
    #: pages that are merged with others
    shared: int = 0
    #: what the guest's RAM takes of the host, shared pages by their share
    footprint: int = 0
    #: how much less that is than before merging began.  Zero pages that the
    #: kernel's split of a huge page gives back count too: merging caused it
    saved: int = 0
    lazy_free: int = 0
    cpu_s: float = 0.0
    state: str = "booting"
    errors: int = 0
    verified: int = 0


@dataclass
class Sample:
    """All guests at one time after merging began."""

    seconds: float
    guests: list[GuestSample]
    #: CPU that merging has used since it began: ksmd's, or QEMU's engine
    merge_cpu_s: float
    full_scans: int

    @property
    def saved(self) -> int:
        return sum(guest.saved for guest in self.guests)

    @property
    def resident(self) -> int:
        return sum(guest.resident for guest in self.guests)


@dataclass
class RunResult:
    """What a run came to."""

    scope: str
    guests: int
    memory_mib: int
    accel: str = ""
    resident_mib: float = 0.0
    saved_mib: float = 0.0
    metadata_mib: float = 0.0
    data_intact: bool = False
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    boot_seconds: float = 0.0
    cpu_s: float = 0.0
    settled: bool = False
    samples: list[Sample] = field(default_factory=list)
    stall: dict[str, int] = field(default_factory=dict)
    #: RAM in huge pages, before and after
    huge_mib: tuple[int, int] = (0, 0)
    #: how long ksmd runs on after its last gain
    ksmd_stops_s: float | None = None

    @property
    def saved_percent(self) -> float:
        return 100 * self.saved_mib / self.resident_mib if self.resident_mib else 0.0

    def seconds_to(self, fraction: float, of_mib: float | None = None) -> float:
        """When that fraction of the saving was reached; nan if never."""
        goal = fraction * (self.saved_mib if of_mib is None else of_mib) * MIB
        for sample in self.samples:
            if sample.saved >= goal:
                return sample.seconds
        return float("nan")

    def cpu_to(self, fraction: float, of_mib: float | None = None) -> float:
        """The CPU it took to get there; nan if never."""
        goal = fraction * (self.saved_mib if of_mib is None else of_mib) * MIB
        for sample in self.samples:
            if sample.saved >= goal:
                return sample.merge_cpu_s
        return float("nan")


def backend_for(
    scope: str, max_cpu: int | None, socket: Path | None
) -> tuple[str, dict[str, str]]:
    """The backend's type and properties; nothing merges before start()."""
    if scope == "plain":
        return "memory-backend-ram", {"merge": "on"}
    properties = {"scope": "host" if scope == "kernel" else scope}
    if socket is not None:
        properties["group-socket"] = str(socket)
    if scope == "group":
        properties["group"] = "demo"
    if scope not in BY_KERNEL:
        properties["run"] = "off"
        if max_cpu is not None:
            properties["max-cpu"] = str(max_cpu)
    return "memory-backend-ksm", properties


class Run:
    """`with Run("host", 3, 512, image) as run: run.boot(); run.start(); ...`"""

    def __init__(
        self,
        scope: str,
        guests: int,
        memory_mib: int,
        image: Path,
        max_cpu: int | None = None,
        ksmd: dict[str, int] | None = None,
        load: int = 20,
        alone: bool = False,
    ) -> None:
        """`alone`: nothing else on the host is merged, nor was before."""
        self.scope = scope
        self.alone = alone
        self.ksmd = ksmd or KSMD_FAST
        self.result = RunResult(scope, guests, memory_mib)
        self.poold = Poold() if scope in BY_DAEMON else None
        self.hostd: Hostd | None = None
        if scope == "host" and self.poold is not None:
            speed = ["--max-cpu", str(max_cpu)] if max_cpu else []
            self.hostd = Hostd(self.poold.socket, *speed)
        backend, properties = backend_for(
            scope, max_cpu, self.poold.socket if self.poold is not None else None
        )
        self.guests = [
            Guest(
                GuestSpec(
                    name=f"guest{i + 1}",
                    memory_mib=memory_mib,
                    backend=backend,
                    properties=properties,
                    seed=i + 1,
                    load=load,
                ),
                image,
            )
            for i in range(guests)
        ]
        self._stack = ExitStack()
        self._knobs: ksmsys.KsmKnobs | None = None
        self._ksmd = ksmsys.ksmd_pid()
        self.began = 0.0
        self._before: dict[str, int] = {}
        self._anonymous: dict[str, int] = {}
        self._cpu_began = 0.0
        self._scans_began = 0

    def __enter__(self) -> Run:
        try:
            if self.scope in WITH_KSMD:
                reason = ksmsys.why_not_controllable()
                if reason:
                    raise ksmsys.KsmUnavailable(reason)
                self._stack.enter_context(guard())
                self._knobs = self._stack.enter_context(ksmsys.KsmKnobs())
                # so that "before" is before
                self._knobs.set(run=0)
                if self.alone:
                    self._knobs.unmerge_all()
            if self.poold is not None:
                self._stack.enter_context(self.poold)
            for guest in self.guests:
                self._stack.enter_context(guest)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    # -- steps ---------------------------------------------------------------

    def boot(
        self, show: Callable[[Sample], None] | None = None, timeout: float = 600
    ) -> None:
        """Waits until all guests are up and have filled their memory."""
        started = time.monotonic()
        while not all(guest.ready() for guest in self.guests):
            self._check_alive()
            if time.monotonic() - started > timeout:
                late = next(guest for guest in self.guests if not guest.ready())
                raise GuestError(
                    f"{late.spec.name} was not up after {timeout:.0f} s"
                    f"{late.last_words()}"
                )
            if show:
                show(self.sample())
            time.sleep(0.5)
        if show:
            show(self.sample())
        self.result.boot_seconds = time.monotonic() - started

    def start(self) -> None:
        """Takes "before" and starts merging."""
        resident = sum(guest.ram_usage().resident for guest in self.guests)
        # a pool is no larger
        self._stack.enter_context(warm_memory(resident))
        before = self.sample()
        self.result.resident_mib = before.resident / MIB
        self._before = {guest.name: guest.footprint for guest in before.guests}
        self._anonymous = {g.spec.name: anonymous_memory(g.pid) for g in self.guests}
        self._cpu_began = self._merge_cpu(self._stats())
        self._scans_began = self._full_scans(self._stats())
        self.began = time.monotonic()
        if self.hostd is not None:
            self._stack.enter_context(self.hostd)
        elif self._knobs is not None:
            for name, value in self.ksmd.items():
                # smart_scan came with Linux 6.7
                if ksmsys.read(name) is not None:
                    self._knobs.set(**{name: value})
            self._knobs.set(run=1)
        if self.scope not in BY_KERNEL:
            for guest in self.guests:
                guest.qmp("qom-set", path="/objects/ram0", property="run", value=True)

    def merge(
        self,
        seconds: float,
        show: Callable[[Sample], None] | None = None,
        interval: float = 1.0,
        settle_s: float = 10.0,
        glance: bool = False,
    ) -> None:
        """Samples until nothing more is gained, `seconds` at most.

        Where isolations are measured a glance has to do: they wait for smaps.
        """
        result = self.result
        look = self._glance if glance else self.sample
        while True:
            if interrupted:
                raise KeyboardInterrupt
            sample = look()
            result.samples.append(sample)
            if show:
                show(sample)
            if self._settled(settle_s):
                result.settled = True
                break
            if sample.seconds >= seconds:
                break
            time.sleep(min(interval, max(0.05, seconds - sample.seconds)))
        if glance:
            self._correct_glances()
        result.seconds = result.samples[-1].seconds

    def verify(self, show: Callable[[Sample], None] | None = None) -> None:
        """Every guest verifies all its data; then the final figures."""
        result = self.result
        for guest in self.guests:
            if guest.verify():
                result.errors += [
                    f"{guest.spec.name}: {text}" for text in guest.failures
                ] or [f"{guest.spec.name}: errors"]
        result.data_intact = not result.errors
        stats = self._stats()
        sample = self.sample(stats)
        result.samples.append(sample)
        if show:
            show(sample)
        result.saved_mib = sample.saved / MIB
        result.cpu_s = sample.merge_cpu_s
        result.metadata_mib = self._metadata(stats) / MIB
        result.stall = self._worst_stall(stats)

    # -- figures -------------------------------------------------------------

    def _check_alive(self) -> None:
        for guest in self.guests:
            if not guest.alive():
                raise GuestError(f"{guest.spec.name}: QEMU ended{guest.last_words(1)}")
            for event in guest.events:
                if event["event"] == "failed":
                    raise GuestError(f"{guest.spec.name}: {event.get('text')}")

    def _stats(self) -> list[dict[str, Any]]:
        if self.scope == "plain":
            return [{} for _ in self.guests]
        return [guest.ksm_stats() for guest in self.guests]

    def _engine_cpu(self, stats: dict[str, Any]) -> float:
        if not stats or self.scope in BY_KERNEL:
            return 0.0
        backend = stats["backends"][0]
        times = ("scan-time", "merge-time", "log-time")
        return sum(backend.get(name, 0) for name in times) / 1e9

    def _merge_cpu(self, stats: list[dict[str, Any]]) -> float:
        if self.scope in BY_KERNEL:
            return ksmsys.ksmd_cpu_s(self._ksmd)
        others = self.poold.cpu_s() if self.poold is not None else 0.0
        others += self.hostd.cpu_s() if self.hostd is not None else 0.0
        if self.scope in WITH_KSMD:
            others += ksmsys.ksmd_cpu_s(self._ksmd)
        return sum(self._engine_cpu(each) for each in stats) + others

    def _full_scans(self, stats: list[dict[str, Any]]) -> int:
        if self.scope in BY_KERNEL:
            return ksmsys.read("full_scans") or 0
        return min(int(each["backends"][0].get("full-scans", 0)) for each in stats)

    def _metadata(self, stats: list[dict[str, Any]]) -> int:
        if self.scope in BY_KERNEL:
            # 64 bytes for each page ksmd keeps track of
            return sum(g.memory().ksm_rmap_items for g in self.guests) * 64
        others = self.poold.memory_bytes() if self.poold is not None else 0
        if self.scope in WITH_KSMD:
            others += sum(g.memory().ksm_rmap_items for g in self.guests) * 64
        return others + sum(
            int(each["backends"][0].get("metadata", 0))
            + int(each["backends"][0].get("page-tables", 0))
            for each in stats
        )

    def _pool_share(self, guest: Guest) -> int:
        if self.poold is None:
            return pool_size(guest.pid)
        return self.poold.pool_bytes() // len(self.guests)

    def sample(self, stats: list[dict[str, Any]] | None = None) -> Sample:
        """Looks at every guest now."""
        self._check_alive()
        stats = stats or self._stats()
        guests = []
        for guest, each in zip(self.guests, stats, strict=True):
            memory = guest.memory()
            one = GuestSample(guest.spec.name)
            one.lazy_free = memory.lazy_free
            one.errors = len(guest.failures)
            one.verified = int(guest.state.get("pages_verified", 0))
            one.shared = memory.ksm_merged
            usage = guest.ram_usage()
            one.resident = usage.resident
            one.footprint = usage.resident - memory.shared_saving
            one.cpu_s = self._engine_cpu(each)
            one.state = "merging" if self.began else "up"
            if each:
                backend = each["backends"][0]
                one.state = backend["state"]
                if self.scope not in BY_KERNEL:
                    # a pool of the guest's own counts once, all guests' by parts
                    one.footprint += self._pool_share(guest) - usage.pooled
                    one.shared += usage.pooled // 4096
            if not guest.ready():
                one.state = "booting"
            elif not self.began:
                one.state = "up"
            if self._before:
                one.saved = self._before[one.name] - one.footprint
            guests.append(one)
        return self._sample_of(guests, stats)

    def _sample_of(
        self, guests: list[GuestSample], stats: list[dict[str, Any]]
    ) -> Sample:
        return Sample(
            seconds=time.monotonic() - self.began if self.began else 0.0,
            guests=guests,
            merge_cpu_s=self._merge_cpu(stats) - self._cpu_began,
            full_scans=self._full_scans(stats) - self._scans_began,
        )

    def _shared_memory(self) -> int:
        """Bytes that all guests' anonymous memory does not tell: pools, less ksmd's."""
        taken = 0
        if self.poold is not None:
            taken = self.poold.pool_bytes()
        elif self.scope not in BY_KERNEL:
            taken = sum(pool_size(guest.pid) for guest in self.guests)
        if self.scope in WITH_KSMD:
            taken -= (ksmsys.read("pages_sharing") or 0) * 4096
        return taken

    def _glance(self) -> Sample:
        """A sample by the kernel's counters.

        smaps walks page tables with the guest's mmap_lock held, some ms each
        time: an isolation beside it takes as much longer.  These count the
        process's own memory too, which is little.
        """
        self._check_alive()
        stats = self._stats()
        shared = self._shared_memory() // len(self.guests)
        guests = []
        for guest, each in zip(self.guests, stats, strict=True):
            name = guest.spec.name
            one = GuestSample(name, state="merging")
            gone = self._anonymous[name] - anonymous_memory(guest.pid)
            one.saved = gone - shared
            one.footprint = self._before[name] - one.saved
            one.resident = self._before[name]
            one.cpu_s = self._engine_cpu(each)
            guests.append(one)
        return self._sample_of(guests, stats)

    def _correct_glances(self) -> None:
        """By a look at the end: the engines' own memory is none of the guests'."""
        last = self.result.samples[-1]
        for exact, seen in zip(self.sample().guests, last.guests, strict=True):
            off = exact.saved - seen.saved
            for sample in self.result.samples:
                for one in sample.guests:
                    if one.name == exact.name:
                        one.saved += off
                        one.footprint -= off

    def _worst_stall(self, stats: list[dict[str, Any]]) -> dict[str, int]:
        """Isolations of the guest whose p99 is the longest; {}: nobody measures."""
        stalls = [
            dict(each["backends"][0].get("stall", {}))
            for each in stats
            if each and self.scope not in BY_KERNEL
        ]
        return max(stalls, key=lambda s: s.get("p99", 0), default={})

    def _settled(self, settle_s: float) -> bool:
        """Nothing gained for a while, and everything was looked at twice."""
        samples = self.result.samples
        last = samples[-1]
        if last.seconds < settle_s:
            return False
        if last.full_scans < 3:
            return False
        # an engine that has not begun has not settled
        if self.scope not in BY_KERNEL and last.saved <= 0 and last.seconds < 60:
            return False
        then = next(s for s in samples if s.seconds >= last.seconds - settle_s)
        gained = last.saved - then.saved
        return gained <= 0.005 * max(last.resident, 1)
