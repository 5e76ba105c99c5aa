# SPDX-License-Identifier: GPL-2.0-or-later
"""Bench density: how many Debian guests fit into a memory cgroup.

Plain QEMU, plain QEMU with ksmd at full speed, scope group with its daemon in
the same cgroup.  A guest fits if it boots, fills its memory and verifies it
while a 32nd of the cgroup's limit stays free all the time, guests before it
included.  The limit itself is never hit: a guest that comes too close is ended
and does not count.  So the last guest that fits was there before it was
merged, beside the others.

Leaves to others: guests (guest/qemu.py), cgroups and knobs (host/).
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.dirty import ENGINE, thread_cpu
from bench.harness import BenchError, Metrics, Session, divide
from guest.qemu import (
    FILES,
    Guest,
    GuestError,
    GuestSpec,
    accelerator,
    guest_image,
    need_qemu,
    probe_scope,
)
from host import ksmsys
from host.cgroup import Group
from host.exits import Lacking
from host.poold import Poold
from host.warm import available

MIB = 1 << 20
MODES = ("plain", "ksmd", "group")
#: of the limit, one part in so many stays free
RESERVE = 32
#: of QEMU beside the guest's RAM, a little more than it takes
QEMU_MIB = 100
#: KVM has no translated code; what TCG has of it is no part of the question
TCG = "tcg,tb-size=32"
LOOK_S = 0.02


class Filling:
    """A cgroup, and the guests in it that fit so far."""

    def __init__(
        self, session: Session, mode: str, image: Path, group: Group, sizes: Sizes
    ) -> None:
        self.session = session
        self.mode = mode
        self.image = image
        self.group = group
        self.sizes = sizes
        self.guests: list[Guest] = []
        self.poold: Poold | None = None
        self.peak = 0
        #: a guest that was alone with its attempt did not fit
        self.full = False
        self._alone = False
        self._number = 0

    # -- room ----------------------------------------------------------------

    def look(self) -> None:
        """Ends the youngest guest if there is too little room."""
        used = self.group.usage()
        hits = self.group.limit_hits()
        if hits or self.group.swapped():
            raise BenchError(
                f"density: {self.mode}: the cgroup of {self.sizes.limit >> 20} MiB hit "
                f"its limit {hits} times, {self.group.swapped()} bytes are in swap: "
                "memory grew faster than this program could end a guest; try again on "
                "a quieter machine or with a larger --limit"
            )
        if used <= self.sizes.budget:
            self.peak = max(self.peak, used)
            for guest in self.guests:
                if not guest.alive():
                    raise GuestError(
                        f"{guest.spec.name}: QEMU ended{guest.last_words(1)}"
                    )
            return
        if len(self.guests) < 2:
            raise BenchError(
                f"density: {self.mode}: one guest takes {used >> 20} of "
                f"{self.sizes.limit >> 20} MiB: choose a larger --limit"
            )
        self.full |= self._alone
        self.guests.pop().stop()
        # the daemon hears of it, and gives back what was that guest's
        until = time.monotonic() + 5
        while self.group.usage() > self.sizes.budget and time.monotonic() < until:
            time.sleep(LOOK_S)

    def say(self, text: str) -> None:
        self.session.say(
            f"density: {self.mode}, {len(self.guests)} guests, "
            f"{self.group.usage() >> 20} MiB: {text}"
        )

    # -- steps ---------------------------------------------------------------

    def spec(self) -> GuestSpec:
        self._number += 1
        backend, properties = "memory-backend-ram", {"merge": "off"}
        if self.mode == "ksmd":
            properties = {"merge": "on"}
        elif self.poold is not None:
            backend = "memory-backend-ksm"
            properties = {"scope": "group", "group": "density"}
            properties["group-socket"] = str(self.poold.socket)
        return GuestSpec(
            name=f"guest{self._number}",
            memory_mib=self.sizes.memory_mib,
            backend=backend,
            properties=properties,
            seed=self._number,
            # once up they rest: all of them verify in the end
            load=0,
            # else khugepaged copies their programs' memory for many minutes
            kernel="transparent_hugepage=never",
            accel=TCG if accelerator() == "tcg" else "",
            prefix=self.group.prefix(),
        )

    def room(self) -> int:
        """How many more guests fit unmerged."""
        room = (self.sizes.budget - self.group.usage()) // MIB
        return int(room // (self.sizes.memory_mib + QEMU_MIB))

    def add(self) -> None:
        """Boots as many as fit even unmerged, at least one."""
        count = max(1, self.room())
        self._alone = count == 1
        for _ in range(count):
            guest = Guest(self.spec(), self.image)
            guest.start()
            self.guests.append(guest)
        until = time.monotonic() + 600
        while not all(guest.ready() for guest in self.guests):
            self.look()
            self.say("booting")
            if time.monotonic() > until:
                raise GuestError(f"density: {self.mode}: a guest does not boot")
            time.sleep(LOOK_S)

    def passes(self) -> int:
        """How often all memory was looked at."""
        if self.mode == "ksmd":
            return ksmsys.read("full_scans") or 0
        return min(int(g.backend_stats()["full-scans"]) for g in self.guests)

    def settle(self) -> None:
        """Until there is room for more than one, or three passes have been made
        and nothing more is gained."""
        if self.mode == "plain":
            return
        began, passes = time.monotonic(), self.passes()
        still = self.sizes.memory_mib * MIB // 100
        seen: deque[tuple[float, int]] = deque()
        while time.monotonic() < began + 240:
            self.look()
            self.say("merging")
            if self.room() > 1 and not self.full:
                return
            now, used = time.monotonic(), self.group.usage()
            seen.append((now, used))
            while now - seen[0][0] > 8:
                seen.popleft()
            if (
                now - began > 10
                and seen[0][1] - used < still
                and self.passes() >= passes + 3
            ):
                return
            time.sleep(0.25)
        self.session.note(
            f"density: {self.mode}: with {len(self.guests)} guests merging had not "
            "ended after 240 s"
        )

    def verify(self) -> None:
        """All guests, two at a time, while the room is watched."""
        guests = list(self.guests)
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(guest.verify, 900) for guest in guests]
            try:
                while not all(job.done() for job in jobs):
                    self.look()
                    self.say(f"{sum(job.done() for job in jobs)} have verified")
                    time.sleep(LOOK_S)
            except BaseException:
                self.stop()
                raise
        for guest, job in zip(guests, jobs, strict=True):
            if guest in self.guests and job.result():
                raise GuestError(
                    f"density: {self.mode}: {guest.spec.name}: data is damaged: "
                    f"{guest.failures[:3]}"
                )

    def stop(self) -> None:
        while self.guests:
            self.guests.pop().stop()

    # -- figures -------------------------------------------------------------

    def cpu_s(self) -> float:
        """CPU of merging, of those that are there."""
        if self.mode == "ksmd":
            return ksmsys.ksmd_cpu_s()
        if self.poold is None:
            return 0.0
        ns = 0
        for guest in self.guests:
            ns += thread_cpu(guest.pid, ENGINE)
            ns += int(guest.backend_stats().get("log-time", 0))
        return ns / 1e9 + self.poold.cpu_s()

    def metrics(self, cpu_began: float) -> Metrics:
        used, count = self.group.usage(), len(self.guests)
        out = {
            "guests": float(count),
            "used_mib": used / MIB,
            "peak_mib": self.peak / MIB,
            "mib_per_guest": used / MIB / count,
        }
        if self.mode != "plain":
            out["cpu_s"] = self.cpu_s() - cpu_began
        if self.mode == "ksmd":
            # the kernel's thread allocates it, so the cgroup does not pay
            items = sum(guest.memory().ksm_rmap_items for guest in self.guests)
            out["uncharged_mib"] = items * 64 / MIB
        if self.poold is not None:
            out["pool_mib"] = self.poold.pool_bytes() / MIB
        return {f"{self.mode}_{name}": value for name, value in out.items()}


class Sizes:
    """In bytes unless the name says otherwise."""

    def __init__(self, session: Session) -> None:
        limit, memory = (1024, 256) if session.quick else (4096, 512)
        options = session.options
        self.limit = (options.limit_mib or limit) * MIB
        self.memory_mib = options.memory_mib or memory
        self.budget = self.limit - self.limit // RESERVE
        self.check()

    def check(self) -> None:
        there = available()
        if 0 < there < self.limit:
            raise Lacking(
                f"density: a cgroup of {self.limit >> 20} MiB needs as much memory, "
                f"and this machine has {there >> 20} MiB available; choose less with "
                "--limit"
            )


@contextmanager
def held(image: Path) -> Iterator[None]:
    """What QEMU reads stays in the page cache, mapped by us.

    Else the cgroup that reads a file first pays for it: one mode more than
    another, and any of them again when the kernel has dropped the pages.
    """
    with ExitStack() as stack:
        for path in [need_qemu(), *(image / name for name in FILES)]:
            with path.open("rb") as file:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                pages = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ)
            stack.enter_context(pages)
        yield


def fill(session: Session, mode: str, image: Path, sizes: Sizes) -> Metrics:
    """One mode: guests until no other fits."""
    with ExitStack() as stack:
        stack.enter_context(held(image))
        if mode == "ksmd" and not stack.enter_context(session.ksmd(0)):
            return {}
        group = stack.enter_context(session.cgroup(sizes.limit))
        group.forbid_swap()
        filling = Filling(session, mode, image, group, sizes)
        if mode == "group":
            poold = Poold(prefix=group.prefix())
            filling.poold = stack.enter_context(poold)
        stack.callback(filling.stop)
        cpu = filling.cpu_s()
        if mode == "ksmd":
            session.ksmd_start()
        began = time.monotonic()
        while not filling.full:
            filling.add()
            filling.settle()
        filling.verify()
        took = time.monotonic() - began
        return filling.metrics(cpu) | {f"{mode}_seconds": took}


def density(session: Session) -> Metrics:
    """Debian guests that fit into a cgroup: plain, with ksmd, in a group."""
    sizes = Sizes(session)
    need_qemu()
    image = guest_image()
    out: Metrics = {
        "limit_mib": sizes.limit / MIB,
        "reserve_mib": (sizes.limit - sizes.budget) / MIB,
        "guest_mib": float(sizes.memory_mib),
    }
    for mode in MODES:
        reason = probe_scope(image, "vm") if mode == "group" else None
        if reason:
            session.note(f"scope=group cannot be had here: {reason.splitlines()[0]}")
            continue
        out |= fill(session, mode, image, sizes)
    plain = out["plain_guests"]
    for mode in MODES[1:]:
        divide(out, f"{mode}_ratio", out.get(f"{mode}_guests"), plain)
    return out
