# SPDX-License-Identifier: GPL-2.0-or-later
"""One guest that verifies its memory, and everything that can be done to it.

`Storm(seed, image, directory).run(seconds)`: the seed draws what is done, to
what, and beside what else.  Each step has a generator of its own, so that its
course does not change the steps after it.  No seed replays the timing.

The guest moves: a migration, a file it was saved to or a background snapshot
becomes the guest, in a QEMU with another scope, another source of dirty
information, or plain memory.  Every step and its result are logged.  Leaves to
others: the actions (storm_actions.py), what must never be seen
(storm_watch.py), QEMU (qemu.py).
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from guest.qemu import Guest, GuestSpec
from guest.storm_watch import (
    Gone,
    Monitor,
    StormError,
    Watcher,
    guest_wrongs,
    qemu_wrongs,
    ram_flags,
    stacks,
)
from host.cgroup import Group
from host.poold import Poold

MIB = 1 << 20
MEMORY_MIB = 384
DIMM_MIB = 128
SCRATCH_MIB = 48
#: The agent's own memory at most, and the guest's after ballooning at least:
#: beside its kernel, programs and files the guest must not run out of memory.
OWN_MIB = 80
BALLOON_MIB = 304
#: How long the guest may take to answer; it may be in the middle of work.
GUEST_S = 120.0
OBJECT = "/objects/ram0"

#: Sources of dirty information, as dirty-tracking takes them.
SOURCES = ("pagemap", "log", "checksum", "auto")


@dataclass
class Flavour:
    """What kind of QEMU the guest goes on in."""

    backend: str
    properties: dict[str, str] = field(default_factory=dict)
    #: the merging has an iothread of its own
    iothread: bool = False

    @property
    def ours(self) -> bool:
        return self.properties.get("scope") in ("zero", "vm", "group")

    def __str__(self) -> str:
        words = [self.backend.removeprefix("memory-backend-")]
        words += [f"{k}={v}" for k, v in self.properties.items()]
        return " ".join(words)


def flavour(rng: Random, sources: tuple[str, ...], socket: Path) -> Flavour:
    kinds = ("vm", "group", "zero", "host", "ram")
    kind = rng.choices(kinds, (4, 4, 2, 1, 1))[0]
    source = rng.choice(sources)
    tuning = {
        "dirty-tracking": source,
        "max-cpu": str(rng.choice((5, 50, 100, 100, 100))),
        "threads": str(rng.choice((1, 1, 2, 3))),
        "target-scan-time": str(rng.choice((0, 0, 0, 2))),
        "smart-scan": rng.choice(("on", "off")),
        "run": rng.choice(("on", "on", "on", "on", "off")),
    }
    policy = rng.choice(("auto", "lazy", "eager"))
    iothread = rng.random() < 0.3
    if kind == "ram":
        return Flavour("memory-backend-ram")
    if kind == "host":
        return Flavour("memory-backend-ksm", {"scope": "host", "free-policy": policy})
    if iothread:
        tuning["iothread"] = "ksm0"
    properties = {"scope": kind, "free-policy": policy, **tuning}
    if kind == "group":
        properties |= {"group": "storm", "group-socket": str(socket)}
    return Flavour("memory-backend-ksm", properties, iothread)


@dataclass
class Vm:
    """A QEMU, and what has been done to it so far."""

    guest: Guest
    flavour: Flavour
    monitor: Monitor
    expected: list[str] = field(default_factory=list)
    #: what has been read of its lines
    stderr_seen: int = 0
    console_seen: int = 0
    failures_seen: int = 0
    #: its qcow2 image for snapshots is there; the tags, with the DIMM's state
    state: bool = False
    tags: dict[str, bool] = field(default_factory=dict)
    run: bool = True
    dump: bool = True
    #: it may end by itself
    ending: bool = False

    @property
    def name(self) -> str:
        return self.guest.spec.name


Action = Callable[["Storm", Random], object]
#: name: (weight, what it does)
ACTIONS: dict[str, tuple[int, Action]] = {}
#: What may be done while the guest is being migrated.
BESIDE: dict[str, Action] = {}


def action(weight: int, beside: bool = False) -> Callable[[Action], Action]:
    """Makes a function an action that is chosen weight times as often."""

    def register(function: Action) -> Action:
        name = function.__name__.removeprefix("do_")
        ACTIONS[name] = (weight, function)
        if beside:
            BESIDE[name] = function
        return function

    return register


class Storm:
    """The guest, where it is now, and the log of what was done to it."""

    def __init__(
        self,
        seed: int,
        image: Path,
        directory: Path,
        log: Path,
        sources: tuple[str, ...] = SOURCES,
        without: tuple[str, ...] = (),
    ) -> None:
        self.seed = seed
        self.image = image
        self.directory = directory
        self.sources = sources
        self.actions = {k: v for k, v in ACTIONS.items() if k not in without}
        self.beside = {k: v for k, v in BESIDE.items() if k not in without}
        self.done: Counter[str] = Counter()
        self._log = log.open("w", buffering=1)
        self._began = time.monotonic()
        self._number = 0
        self._ping = 0
        self.vm: Vm
        self._all: list[Vm] = []
        self.stopped = False
        self.dimm = False
        self.own_mib = 0
        self.group = Group.make_or_none()
        self.cpus = Random(f"{seed}/cpus").choice((1, 2))
        self._make_disks()
        self.poold = Poold()
        self.log(f"storm: seed {seed}, {self.cpus} CPUs, sources {sources}")
        self.watcher = Watcher(self.log, seed)

    def log(self, text: str) -> None:
        now = time.time()
        stamp = (
            time.strftime("%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03}"
        )
        self._log.write(f"{stamp} {time.monotonic() - self._began:8.3f} {text}\n")

    # -- QEMUs ---------------------------------------------------------------

    def flavour(self, rng: Random) -> Flavour:
        return flavour(rng, self.sources, self.poold.socket)

    def _make_disks(self) -> None:
        self.scratch = self.directory / "scratch.img"
        with self.scratch.open("wb") as file:
            file.truncate(SCRATCH_MIB * MIB)

    def _extra(self, name: str, rng: Random, kind: Flavour) -> list[str]:
        """QEMU's further arguments; the devices are always the same."""
        aio = [rng.choice(("io_uring", "native", "threads")) for _ in range(2)]
        path = self.directory / name
        # For the balloon alone.  While the guest is stopped in the middle of
        # free page hints, its iothread waits, and a disk of the same iothread
        # would wait for that with the BQL held.  Disks have none at all: under
        # TCG a stop and cont can lose the interrupt of a disk with an
        # iothread, with plain memory too.
        extra = ["-m", "slots=2,maxmem=1G", "-object", "iothread,id=io0"]
        for monitor in ("a", "b"):
            extra += [
                *("-chardev", f"socket,id=m{monitor},path={path}.{monitor},"),
                *("-mon", f"chardev=m{monitor},mode=control"),
            ]
            extra[-3] += "server=on,wait=off"
        for node, file, read_only, way in (
            ("again", f"{self.image}/root.img", "on", aio[0]),
            ("scratch", str(self.scratch), "off", aio[1]),
        ):
            extra += [
                "-blockdev",
                f"driver=file,node-name={node},read-only={read_only},locking=off,"
                f"cache.direct=on,aio={way},filename={file}",
                *("-device", f"virtio-blk-pci,drive={node}"),
            ]
        extra += [
            "-device",
            "virtio-balloon-pci,id=balloon,free-page-reporting=on,"
            "free-page-hint=on,deflate-on-oom=on,iothread=io0",
        ]
        if self.dimm:
            extra += ["-object", self.dimm_object(kind)]
            extra += ["-device", "pc-dimm,id=dimm0,memdev=mem0"]
        return extra

    def dimm_properties(self, kind: Flavour) -> dict[str, str]:
        """All such objects of a machine have the same of these."""
        same = (
            *("scope", "dirty-tracking", "free-policy", "iothread"),
            *("group", "group-socket"),
        )
        return {k: v for k, v in kind.properties.items() if k in same}

    def dimm_object(self, kind: Flavour) -> str:
        words = [kind.backend, "id=mem0", f"size={DIMM_MIB}M"]
        words += [f"{k}={v}" for k, v in self.dimm_properties(kind).items()]
        return ",".join(words)

    def start_qemu(self, rng: Random, kind: Flavour, incoming: bool) -> Vm:
        self._number += 1
        name = f"vm{self._number}"
        extra = self._extra(name, rng, kind)
        prefix = self.group.prefix() if self.group else []
        spec = GuestSpec(
            name=name,
            memory_mib=MEMORY_MIB,
            backend=kind.backend,
            properties=kind.properties,
            cpus=self.cpus,
            cache_mib=64,
            private_mib=32,
            seed=self.seed % 1000 + 1,
            load=60,
            kernel="loglevel=5 memhp_default_state=online_movable",
            extra=extra,
            prefix=prefix,
            reboot=True,
            incoming=incoming,
        )
        if kind.iothread:
            spec.extra = ["-object", "iothread,id=ksm0", *extra]
        guest = Guest(spec, self.image)
        guest.start()
        vm = Vm(guest, kind, Monitor(self.directory / f"{name}.a"))
        vm.run = kind.properties.get("run") != "off"
        self._all.append(vm)
        guest.ram()
        self.watcher.add(name, self.directory / f"{name}.b")
        self.log(f"  {name}: pid {guest.pid}, {kind}")
        return vm

    def end_qemu(self, vm: Vm, rng: Random | None = None) -> None:
        """Ends a QEMU that is of no use any more, by its own way or hard."""
        self.watcher.drop(vm.name)
        politely = rng is not None and rng.random() < 0.7
        if politely:
            code = vm.guest.quit(60)
            if code:
                raise StormError(f"{vm.name}: quit ended with {code}")
        else:
            vm.guest.stop()
        vm.monitor.close()
        self.judge(vm)
        self._all.remove(vm)

    # -- talking -------------------------------------------------------------

    def qmp(self, command: str, vm: Vm | None = None, **arguments: Any) -> Any:
        vm = vm or self.vm
        try:
            return vm.monitor.execute(command, **arguments)
        except Gone as gone:
            raise StormError(
                f"{vm.name}: QEMU died during {command}: {gone}{vm.guest.last_words(3)}"
            ) from gone

    def set(self, name: str, value: object, vm: Vm | None = None) -> None:
        self.qmp("qom-set", vm, path=OBJECT, property=name, value=value)

    def send(self, line: str) -> None:
        """Gives the guest a command and does not wait for its end."""
        # the newline ends a line that may have been cut
        self.vm.guest.send("\n" + line)

    def settle(self) -> dict[str, Any]:
        """The guest has done all it was told; its answer."""
        guest = self.vm.guest
        self._ping += 1
        ping = self._ping
        deadline = time.monotonic() + GUEST_S
        while time.monotonic() < deadline:
            since = len(guest.events)
            self.send(f"ping {ping}")
            answer = guest.wait_event(
                lambda event: (
                    event["event"] == "done"
                    and event.get("command") == "ping"
                    and event.get("number") == ping
                ),
                since,
                20,
            )
            if answer:
                self.own_mib = int(guest.state.get("own_mib", self.own_mib))
                if answer["errors"]:
                    raise StormError(f"the guest has errors: {guest.failures}")
                return answer
            # it may have said why it does not answer
            self.judge(self.vm)
            if not guest.alive():
                break
        status = "QEMU has ended"
        if guest.alive():
            status = str(self.qmp("query-status"))
        raise StormError(
            f"the guest made no progress for {GUEST_S:.0f} s: {status}, "
            f"last heard of: {guest.state}, {guest.events[-3:]}"
            f"{guest.last_words(1)}"
        )

    def wait(self, what: str, test: Callable[[], Any], timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while not (value := test()):
            if time.monotonic() > deadline:
                raise StormError(f"no {what} within {timeout:.0f} s")
            time.sleep(0.05)
        return value

    # -- judging -------------------------------------------------------------

    def judge(self, vm: Vm) -> None:
        guest = vm.guest
        stderr = guest.stderr_lines[vm.stderr_seen :]
        console = guest.console_lines[vm.console_seen :]
        failures = guest.failures[vm.failures_seen :]
        vm.stderr_seen += len(stderr)
        vm.console_seen += len(console)
        vm.failures_seen += len(failures)
        for line in stderr:
            self.log(f"  {vm.name} stderr: {line}")
        for line in console:
            self.log(f"  {vm.name} console: {line}")
        wrongs = [f"stderr: {x}" for x in qemu_wrongs(stderr, vm.expected)]
        wrongs += [f"console: {x}" for x in guest_wrongs(console, guest.console_lines)]
        # a line that was cut by a migration, or memory the guest has not got
        harmless = re.compile(r"^(unknown command|alloc: (got only|how much))")
        wrongs += [f"guest: {x}" for x in failures if not harmless.match(x)]
        if wrongs:
            raise StormError(f"{vm.name}: {'; '.join(wrongs[:8])}")

    def check(self) -> None:
        """After each step: nothing that must not be has been seen."""
        for vm in list(self._all):
            if not vm.guest.alive() and not vm.ending:
                raise StormError(f"{vm.name}: QEMU ended{vm.guest.last_words(1)}")
            self.judge(vm)
        if self.watcher.wrongs:
            raise StormError("; ".join(self.watcher.wrongs[:5]))
        self._check_flags()

    def _check_flags(self) -> None:
        """ksmd may not merge what QEMU merges; dump=off holds."""
        vm = self.vm
        if not vm.flavour.ours:
            return
        flags = ram_flags(vm.guest.pid, vm.guest.ram())
        mergeable = sum("mg" in each for each in flags)
        if mergeable:
            raise StormError(
                f"{vm.name}: scope {vm.flavour.properties['scope']}, but ksmd may "
                f"merge {mergeable} of {len(flags)} mappings"
            )
        dumped = sum("dd" not in each for each in flags)
        if not vm.dump and dumped:
            raise StormError(
                f"{vm.name}: dump=off, but {dumped} of {len(flags)} mappings are dumped"
            )

    # -- the course of it ----------------------------------------------------

    def boot(self) -> None:
        rng = Random(f"{self.seed}/boot")
        # something that merges, so that short storms see it, too
        kind = self.flavour(rng)
        while kind.properties.get("scope") not in ("vm", "group"):
            kind = self.flavour(rng)
        self.vm = self.start_qemu(rng, kind, incoming=False)
        self.vm.guest.wait_ready()
        self.send("io 30")
        self.settle()
        self.log("booted")

    def step(self, number: int) -> None:
        rng = Random(f"{self.seed}/{number}")
        names = list(self.actions)
        weights = [self.actions[name][0] for name in names]
        name = rng.choices(names, weights)[0]
        self.perform(number, name, rng)

    def perform(self, number: int, name: str, rng: Random) -> None:
        self.log(f"{number} {name} on {self.vm.name}")
        start = time.monotonic()
        result = self.actions[name][1](self, rng)
        self.done[name] += 1
        took = time.monotonic() - start
        self.log(f"{number} {name}: {result or 'done'} ({took:.3f} s)")
        self.log(f"  {self.vm.name}: {self.watcher.last(self.vm.name)}")
        self.check()
        if self.stopped:
            self.qmp("cont")
            self.stopped = False
        time.sleep(rng.choice((0, 0, 0.1, 0.5, 1)))

    def run(self, seconds: float, steps: int | None = None) -> None:
        """Boots, does things for so long, and has the guest verify all."""
        try:
            self.poold.start()
            self.boot()
            number = 0
            while time.monotonic() - self._began < seconds and number != steps:
                self.step(number)
                number += 1
            self.settle()
            self.send("verify")
            self.settle()
            self.check()
            self.log(f"done: {dict(self.done)}, {self.watcher.polls} polls")
            vm = self.vm
            self.end_qemu(vm, Random(0))
            self.log(f"slowest answers to the watcher: {self.watcher.slowest}")
        except BaseException as error:
            self.log(f"FAILED {error!r}")
            for vm in self._all:
                self.log(f"  {vm.name} ({vm.flavour}):{vm.guest.last_words()}")
                for line in vm.guest.console_lines[vm.console_seen :]:
                    self.log(f"  {vm.name} console: {line}")
                if vm.guest.alive():
                    self.log(f"  {vm.name} is at:{stacks(vm.guest.pid)}")
            raise
        finally:
            self.close()

    def close(self) -> None:
        self.watcher.stop()
        for vm in list(self._all):
            vm.guest.stop()
        self._all.clear()
        if self.group:
            self.group.remove()
        self.poold.stop()
        self._log.close()


def default_seed() -> int:
    return int.from_bytes(os.urandom(3), "big")
