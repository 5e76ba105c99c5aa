# SPDX-License-Identifier: GPL-2.0-or-later
"""One guest that verifies its memory, and everything that can be done to it.

`Storm(seed, image, directory).run(seconds)`: what is done, to what, and beside
what else, is drawn from the seed, so that the same seed makes the same
sequence; each step draws from a generator of its own, so that a step that
turned out differently does not change those after it.  When things happen is
the machine's affair, and no seed replays that.

The guest moves: a migration, a file it was saved to or a background snapshot
becomes the guest, in a QEMU with another scope, another source of dirty
information, or plain memory.  Every step is logged with what came of it.
Leaves to others: what must never be seen (storm_watch.py), QEMU and the guest
(qemu_guest.py, guest-agent.c).
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

from memcg import Group
from qemu_guest import Guest, GuestSpec, adopt
from storm_watch import (
    Gone,
    Monitor,
    Refused,
    StormError,
    Watcher,
    guest_wrongs,
    qemu_wrongs,
    ram_flags,
    stacks,
)

MIB = 1 << 20
MEMORY_MIB = 384
DIMM_MIB = 128
SCRATCH_MIB = 48
#: What the guest holds at most in memory of its own, and what the balloon
#: leaves it at least: with its kernel, programs and files it must not run out.
OWN_MIB = 80
BALLOON_MIB = 304
#: How long the guest may take to answer; it may be in the middle of work.
GUEST_S = 120.0
MIGRATION_S = 120.0
OBJECT = "/objects/ram0"

#: Sources of dirty information, as dirty-tracking takes them.
SOURCES = ("pagemap", "log", "checksum", "auto")

#: What both ends of a migration say when it is cut in the middle: QEMU has a
#: message for each place where that can be noticed.
SAY_CUT = [
    r"qemu-system-x86_64: .*(migration|multifd|ram_save|ram_load|SaveStateEntry|"
    r"section|stream|[Cc]hannel|socket|Broken pipe|Connection reset)",
]
#: The one that was to receive never had the guest: its errors, not warnings,
#: are those of a stream that ends too soon, wherever that is.
SAY_HALF = [r"^qemu-system-x86_64: (?!warning: )"]


@dataclass
class Flavour:
    """What kind of QEMU the guest goes on in."""

    backend: str
    properties: dict[str, str] = field(default_factory=dict)
    #: the merging has an iothread of its own
    iothread: bool = False

    @property
    def ours(self) -> bool:
        return self.properties.get("scope") in ("zero", "vm")

    def __str__(self) -> str:
        words = [self.backend.removeprefix("memory-backend-")]
        words += [f"{k}={v}" for k, v in self.properties.items()]
        return " ".join(words)


def flavour(rng: Random, sources: tuple[str, ...]) -> Flavour:
    kind = rng.choices(("vm", "zero", "host", "ram"), (7, 2, 1, 1))[0]
    source = rng.choice(sources)
    tuning = {
        "dirty-tracking": source,
        "max-cpu": str(rng.choice((5, 50, 100, 100, 100))),
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
        self.group = Group.make()
        self.cpus = Random(f"{seed}/cpus").choice((1, 2))
        self._make_disks()
        self.log(f"storm: seed {seed}, {self.cpus} CPUs, sources {sources}")
        self.watcher = Watcher(self.log, seed)

    def log(self, text: str) -> None:
        now = time.time()
        stamp = (
            time.strftime("%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03}"
        )
        self._log.write(f"{stamp} {time.monotonic() - self._began:8.3f} {text}\n")

    # -- QEMUs ---------------------------------------------------------------

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
            extra += ["-object", self._dimm_object(kind)]
            extra += ["-device", "pc-dimm,id=dimm0,memdev=mem0"]
        return extra

    def _dimm_properties(self, kind: Flavour) -> dict[str, str]:
        """All such objects of a machine have the same of these."""
        same = ("scope", "dirty-tracking", "free-policy", "iothread")
        return {k: v for k, v in kind.properties.items() if k in same}

    def _dimm_object(self, kind: Flavour) -> str:
        words = [kind.backend, "id=mem0", f"size={DIMM_MIB}M"]
        words += [f"{k}={v}" for k, v in self._dimm_properties(kind).items()]
        return ",".join(words)

    def _start(self, rng: Random, kind: Flavour, incoming: bool) -> Vm:
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

    def _end(self, vm: Vm, rng: Random | None = None) -> None:
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
        self._judge(vm)
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
        """A command for the guest, whose end nobody waits for."""
        # what may be left of a line that was cut ends here
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
            self._judge(self.vm)
            if not guest.alive():
                break
        status = "QEMU has ended"
        if guest.alive():
            status = str(self.qmp("query-status"))
        raise StormError(
            f"the guest made no progress for {GUEST_S:.0f} s: {status}"
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

    def _judge(self, vm: Vm) -> None:
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
        wrongs += [f"console: {x}" for x in guest_wrongs(console)]
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
            self._judge(vm)
        if self.watcher.wrongs:
            raise StormError("; ".join(self.watcher.wrongs[:5]))
        self._check_flags()

    def _check_flags(self) -> None:
        """Scopes zero and vm are nobody else's; what is not dumped is not."""
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
        kind = flavour(rng, self.sources)
        while kind.properties.get("scope") != "vm":
            kind = flavour(rng, self.sources)
        self.vm = self._start(rng, kind, incoming=False)
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
            self._end(vm, Random(0))
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
        self._log.close()


# --- the guest's own doing --------------------------------------------------


@action(6, beside=True)
def do_memory(storm: Storm, rng: Random) -> object:
    """Memory comes and goes."""
    mib = rng.randint(4, 32)
    kind = rng.choice(("random", "zero", "pattern"))
    if storm.own_mib + mib > OWN_MIB:
        storm.send(f"free {storm.own_mib - 16}")
        storm.own_mib = 16
    storm.send(f"alloc {mib} {kind}")
    storm.own_mib += mib
    return f"alloc {mib} {kind}"


@action(6, beside=True)
def do_guest(storm: Storm, rng: Random) -> object:
    """Something that takes the guest a while."""
    line = rng.choice(
        ("drop", "read 48", "read 24", "direct 8", "disks 8", "touch 1", "verify")
        + ("io 10", "io 60", "load 100", "load 30", "rewrite 1", "rewrite 2")
    )
    storm.send(line)
    return line


@action(4)
def do_settle(storm: Storm, rng: Random) -> object:
    return storm.settle()


@action(1)
def do_rest(storm: Storm, rng: Random) -> object:
    """Time to merge."""
    time.sleep(rng.uniform(1, 4))
    return storm.settle()


# --- the balloon, the host's memory -----------------------------------------


@action(4, beside=True)
def do_balloon(storm: Storm, rng: Random) -> object:
    mib = rng.choice((MEMORY_MIB, MEMORY_MIB, rng.randint(BALLOON_MIB, MEMORY_MIB)))
    storm.qmp("balloon", value=mib * MIB)
    return f"{mib} MiB"


@action(3)
def do_pressure(storm: Storm, rng: Random) -> object:
    """The host wants memory back: page cache, and what is lazily free."""
    if storm.group is None:
        return "no control group here"
    before = storm.group.usage()
    storm.group.reclaim(rng.choice((16, 64, 256)) * MIB)
    return f"{(before - storm.group.usage()) / MIB:.0f} MiB reclaimed"


# --- monitor commands -------------------------------------------------------

#: property: values it takes, values it refuses
TUNABLES: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    "run": ((True, False), (0, 1, "on", 1 << 40, None)),
    "max-cpu": (
        (1, 5, 10, 50, 100),
        (0, 101, 255, 256, 300, -1, "50", "many", 1 << 40, 1.5, True),
    ),
    "target-scan-time": (
        (0, 1, 5, 600, (1 << 32) - 1),
        (-1, "soon", 1 << 32, 1 << 40, 0.5, False),
    ),
    "smart-scan": ((True, False), (0, "off", -1, 1 << 40)),
}
#: cannot change any more once the guest has its memory
FIXED: dict[str, tuple[object, ...]] = {
    "scope": ("vm", "zero", "host", "group", "none", 1),
    "group": ("tenant", ""),
    "dirty-tracking": ("log", "pagemap", "checksum", "auto", "none"),
    "free-policy": ("lazy", "eager", "auto", 0),
    "merge-across-nodes": (True, False),
    "iothread": ("io0", "nobody", ""),
    "size": (1 << 20, 0, -1),
    "share": (True,),
    "reserve": (True, False),
    "no-such-property": (1,),
}


#: refused by QEMU's own code, in words of its own
BASE = ("share", "reserve", "iothread")


def must_be_refused(storm: Storm, name: str, value: object) -> str:
    try:
        storm.set(name, value)
    except Refused as refused:
        if name not in str(refused) and name not in BASE:
            raise StormError(
                f"qom-set {name} {value!r}: the error does not name the property: "
                f"{refused}"
            ) from refused
        return f"{name}={value!r}: {refused}"
    raise StormError(f"qom-set {name} {value!r} was not refused")


@action(6, beside=True)
def do_tune(storm: Storm, rng: Random) -> object:
    """Tunables; those of the engine are refused where there is none."""
    vm = storm.vm
    name = rng.choice(list(TUNABLES))
    value = rng.choice(TUNABLES[name][0])
    if vm.flavour.backend == "memory-backend-ram":
        return "nothing to tune"
    if not vm.flavour.ours and name != "run":
        return must_be_refused(storm, name, value)
    storm.set(name, value)
    if name == "run":
        vm.run = bool(value)
    got = storm.qmp("qom-get", path=OBJECT, property=name)
    if got != value:
        raise StormError(f"qom-set {name} {value!r}, but qom-get has {got!r}")
    return f"{name}={value!r}"


@action(3, beside=True)
def do_absurd(storm: Storm, rng: Random) -> object:
    """Values that nobody can want, and what cannot change any more."""
    name = rng.choice(list(TUNABLES) + list(FIXED))
    values = TUNABLES[name][1] if name in TUNABLES else FIXED[name]
    value = rng.choice(values)
    if storm.vm.flavour.backend == "memory-backend-ram":
        return "not on plain memory"
    return must_be_refused(storm, name, value)


@action(2)
def do_attributes(storm: Storm, rng: Random) -> object:
    """Attributes of all memory backends, back and forth."""
    name = rng.choice(("merge", "dump"))
    values = rng.choice(((False, True), (False,), (True,)))
    results = []
    for value in values:
        try:
            storm.set(name, value)
            results.append(f"{name}={value}")
            if name == "dump":
                storm.vm.dump = value
        except Refused as refused:
            results.append(f"{name}={value} refused: {refused}")
            if name not in str(refused):
                raise StormError(f"{name}: the error does not name it") from refused
    return ", ".join(results)


@action(4, beside=True)
def do_unmerge(storm: Storm, rng: Random) -> object:
    """A piece of memory gets its own pages back."""
    vm = storm.vm
    if not vm.flavour.ours:
        return "not with this scope"
    size = MEMORY_MIB * MIB
    offset = rng.randrange(size) & -4096
    length = min(rng.choice((4096, 64 * 4096, 2 * MIB, 64 * MIB)), size - offset)
    kind = rng.choice(("good", "good", "good", "all", "odd", "beyond", "running"))
    was = vm.run
    storm.set("run", kind == "running")
    try:
        if kind == "all":
            storm.qmp("ksm-unmerge", id="ram0")
        elif kind == "odd":
            storm.qmp("ksm-unmerge", id="ram0", offset=offset + 1, size=4096)
        elif kind == "beyond":
            storm.qmp("ksm-unmerge", id="ram0", offset=offset, size=size)
        else:
            storm.qmp("ksm-unmerge", id="ram0", offset=offset, size=length)
    except Refused as refused:
        if kind in ("good", "all"):
            raise StormError(f"ksm-unmerge {offset} {length}: {refused}") from refused
        return f"{kind}: {refused}"
    finally:
        storm.set("run", was)
    if kind in ("odd", "running") or (kind == "beyond" and offset):
        raise StormError(f"ksm-unmerge {kind} {offset} was not refused")
    return f"{kind} {offset} {length}"


@action(4)
def do_stop_cont(storm: Storm, rng: Random) -> object:
    times = rng.choice((1, 1, 5, 20))
    for _ in range(times):
        storm.qmp("stop")
        time.sleep(rng.choice((0, 0.01, 0.05)))
        storm.qmp("cont")
    storm.settle()
    return f"{times} times"


@action(1)
def do_stopped(storm: Storm, rng: Random) -> object:
    """A stopped guest's memory stays what it is, while it is merged."""
    storm.qmp("stop")
    files = [storm.directory / f"memory{i}" for i in range(2)]
    try:
        for file in files:
            storm.qmp("pmemsave", val=0, size=MEMORY_MIB * MIB, filename=str(file))
            if file is files[0]:
                time.sleep(rng.uniform(0.5, 3))
                do_tune(storm, rng)
        compare_files(files[0], files[1])
    finally:
        for file in files:
            file.unlink(missing_ok=True)
    storm.qmp("cont")
    storm.settle()
    return "equal"


def compare_files(first: Path, second: Path) -> None:
    with first.open("rb") as a, second.open("rb") as b:
        differ = []
        for page in range(first.stat().st_size // MIB):
            x, y = a.read(MIB), b.read(MIB)
            if x != y:
                differ += [
                    page * 256 + i
                    for i in range(256)
                    if x[i * 4096 : i * 4096 + 4096] != y[i * 4096 : i * 4096 + 4096]
                ]
    if differ:
        raise StormError(
            f"memory of a stopped guest changed: {len(differ)} pages: {differ[:20]}"
        )


@action(1)
def do_dump(storm: Storm, rng: Random) -> object:
    file = storm.directory / "dump"
    detach = rng.random() < 0.5
    try:
        storm.qmp(
            "dump-guest-memory", paging=False, protocol=f"file:{file}", detach=detach
        )
        storm.wait(
            "end of the dump",
            lambda: storm.qmp("query-dump")["status"] in ("completed", "failed"),
            GUEST_S,
        )
        status = storm.qmp("query-dump")["status"]
        size = file.stat().st_size
        if status != "completed" or size < MEMORY_MIB * MIB:
            raise StormError(f"dump: {status}, {size} bytes")
    finally:
        file.unlink(missing_ok=True)
    storm.settle()
    return f"{size / MIB:.0f} MiB, detach={detach}"


@action(1)
def do_reset(storm: Storm, rng: Random) -> object:
    """The guest boots again, on memory that is merged from before."""
    guest = storm.vm.guest
    for delay in rng.choice(((), (), (0.5,), (2,))):
        storm.qmp("system_reset")
        time.sleep(delay)
    guest.events.clear()
    storm.qmp("system_reset")
    guest.wait_ready()
    storm.send("io 30")
    return storm.settle()


@action(2)
def do_dirty_rate(storm: Storm, rng: Random) -> object:
    """Another user of the dirty log comes and goes."""
    mode = rng.choice(("page-sampling", "dirty-bitmap"))
    storm.qmp("calc-dirty-rate", calc_time=1, mode=mode)
    storm.wait(
        "measured dirty rate",
        lambda: storm.qmp("query-dirty-rate")["status"] == "measured",
        60,
    )
    return f"{mode}: {storm.qmp('query-dirty-rate').get('dirty-rate')} MiB/s"


# --- memory modules ---------------------------------------------------------


def dimm_plugged(storm: Storm) -> bool:
    names = [each["name"] for each in storm.qmp("qom-list", path="/machine/peripheral")]
    return "dimm0" in names


@action(2)
def do_dimm(storm: Storm, rng: Random) -> object:
    """Memory is plugged, or the guest is asked to give it back."""
    if not storm.dimm:
        kind = storm.vm.flavour
        storm.qmp(
            "object-add",
            storm.vm,
            qom_type=kind.backend,
            id="mem0",
            size=DIMM_MIB * MIB,
            **storm._dimm_properties(kind),
        )
        storm.dimm = True
        storm.qmp("device_add", driver="pc-dimm", id="dimm0", memdev="mem0")
        storm.settle()
        return "plugged"
    # it needs room for what is there
    storm.qmp("balloon", value=MEMORY_MIB * MIB)
    storm.settle()
    try:
        storm.qmp("device_del", id="dimm0")
    except Refused as refused:
        return f"not now: {refused}"
    deadline = time.monotonic() + 10
    while dimm_plugged(storm):
        if time.monotonic() > deadline:
            return "the guest keeps it"
        time.sleep(0.1)
    # RCU may hold on to it for a moment
    for attempt in range(100):
        try:
            storm.qmp("object-del", id="mem0")
            break
        except Refused:
            if attempt == 99:
                raise
            time.sleep(0.1)
    storm.dimm = False
    return "unplugged"


# --- snapshots in an image --------------------------------------------------


def job(storm: Storm, command: str, **arguments: Any) -> None:
    storm.qmp(command, job_id="job", **arguments)

    def over() -> bool:
        jobs = [each for each in storm.qmp("query-jobs") if each["id"] == "job"]
        return bool(jobs and jobs[0]["status"] == "concluded")

    storm.wait(f"end of {command}", over, MIGRATION_S)
    info = next(each for each in storm.qmp("query-jobs") if each["id"] == "job")
    storm.qmp("job-dismiss", id="job")
    if "error" in info:
        raise Refused(f"{command}: {info['error']}")


def need_state(storm: Storm) -> None:
    vm = storm.vm
    if vm.state:
        return
    file = storm.directory / f"{vm.name}.qcow2"
    file.write_bytes(b"")
    storm.qmp(
        "blockdev-add",
        driver="file",
        node_name="file0",
        filename=str(file),
        locking="off",
    )
    job(
        storm,
        "blockdev-create",
        options={"driver": "qcow2", "file": "file0", "size": MIB},
    )
    storm.qmp("blockdev-add", driver="qcow2", node_name="state", file="file0")
    vm.state = True


@action(2)
def do_savevm(storm: Storm, rng: Random) -> object:
    need_state(storm)
    tag = rng.choice("ab")
    vm = storm.vm
    if tag in vm.tags:
        job(storm, "snapshot-delete", tag=tag, devices=["state"])
        del vm.tags[tag]
    job(storm, "snapshot-save", tag=tag, vmstate="state", devices=["state"])
    vm.tags[tag] = storm.dimm
    storm.settle()
    return tag


@action(3)
def do_loadvm(storm: Storm, rng: Random) -> object:
    """What was saved before goes on."""
    tags = [tag for tag, dimm in storm.vm.tags.items() if dimm == storm.dimm]
    if not tags:
        return do_savevm(storm, rng)
    tag = rng.choice(tags)
    job(storm, "snapshot-load", tag=tag, vmstate="state", devices=["state"])
    if storm.qmp("query-status")["status"] != "running":
        storm.qmp("cont")
    storm.settle()
    return tag


# --- migration --------------------------------------------------------------

#: The capabilities of a kind of migration, on both sides.
KINDS: dict[str, tuple[str, ...]] = {
    "precopy": (),
    "xbzrle": ("xbzrle",),
    "auto-converge": ("auto-converge",),
    "multifd": ("multifd",),
    "postcopy": ("postcopy-ram",),
    "preempt": ("postcopy-ram", "postcopy-preempt"),
    "file": (),
    "mapped-ram": ("mapped-ram",),
    "mapped-ram-multifd": ("mapped-ram", "multifd"),
    "background": ("background-snapshot",),
}


def capabilities(storm: Storm, vm: Vm, names: tuple[str, ...], on: bool) -> None:
    states = [{"capability": name, "state": on} for name in sorted(names)]
    storm.qmp("migrate-set-capabilities", vm, capabilities=states)


def migration_status(storm: Storm, vm: Vm) -> str:
    return str(storm.qmp("query-migrate", vm).get("status", "none"))


def beside(storm: Storm, rng: Random) -> list[str]:
    """Some things that happen while the guest is on its way."""
    results = []
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        time.sleep(rng.choice((0, 0.05, 0.3)))
        name = rng.choice(list(storm.beside))
        try:
            result = storm.beside[name](storm, rng)
        except Refused as refused:
            # a command that comes in the wrong moment of a migration
            result = f"refused: {refused}"
        storm.log(f"  beside: {name}: {result}")
        results.append(name)
    return results


def wait_status(storm: Storm, vm: Vm, *wanted: str) -> str:
    """Waits for the end of a migration; it must be one of the wanted."""
    start = time.monotonic()
    eased = False

    def over() -> bool:
        nonlocal eased
        if not eased and time.monotonic() - start > 15:
            # a machine too busy for it to end by itself
            eased = True
            storm.qmp("migrate-set-parameters", vm, downtime_limit=20000)
        return migration_status(storm, vm) in ("completed", "failed", "cancelled")

    try:
        storm.wait("end of the migration", over, MIGRATION_S)
    except StormError as error:
        info = storm.qmp("query-migrate", vm)
        raise StormError(f"{error}: {info}, {storm.qmp('query-status', vm)}") from None
    status = migration_status(storm, vm)
    if status not in wanted:
        raise StormError(
            f"migration {status}: {storm.qmp('query-migrate', vm)}"
            f"{vm.guest.last_words()}"
        )
    return status


def parameters(storm: Storm, rng: Random, bandwidth: int, *vms: Vm) -> None:
    """The same for both sides: with other numbers of channels they hang."""
    values = {
        "max-bandwidth": bandwidth,
        "downtime-limit": rng.choice((50, 300, 300, 2000)),
        "multifd-channels": rng.choice((1, 2, 4)),
    }
    for vm in vms:
        storm.qmp("migrate-set-parameters", vm, **values)


def arrived(storm: Storm, source: Vm, target: Vm, rng: Random) -> None:
    """The guest is in the other QEMU now, and the old one ends."""
    storm.wait(
        "guest in its new QEMU",
        lambda: storm.qmp("query-status", target)["status"] in ("running", "paused"),
        MIGRATION_S,
    )
    adopt(source.guest, target.guest)
    target.failures_seen = len(target.guest.failures)
    storm.vm = target
    if storm.qmp("query-status")["status"] == "paused":
        storm.qmp("cont")
    storm.stopped = False
    if rng.random() < 0.8:
        storm.settle()
    storm._judge(source)
    storm._end(source, rng)
    (storm.directory / f"{source.name}.qcow2").unlink(missing_ok=True)
    capabilities(storm, target, tuple({c for k in KINDS.values() for c in k}), False)


def before_it_goes(storm: Storm, rng: Random) -> None:
    """Most guests write while they are sent, some stand still, or come to."""
    if rng.random() < 0.7:
        line = rng.choice(("rewrite 1", "rewrite 2", "rewrite 4", "load 100"))
        storm.log(f"  {line}")
        storm.send(line)
    if rng.random() < 0.15:
        storm.log("  stopped")
        storm.qmp("stop")
        storm.stopped = True


@action(6)
def do_migrate(storm: Storm, rng: Random) -> object:
    """To a QEMU of any kind, in any way that needs no file."""
    names = ("precopy", "xbzrle", "auto-converge", "multifd", "postcopy", "preempt")
    name = rng.choice(names)
    source = storm.vm
    target = storm._start(rng, flavour(rng, storm.sources), incoming=True)
    uri = f"unix:{storm.directory}/{target.name}.migrate"
    for vm in (source, target):
        capabilities(storm, vm, KINDS[name], True)
    parameters(storm, rng, rng.choice((100, 400, 4000)) * MIB, source, target)
    storm.qmp("migrate-incoming", target, uri=uri)
    before_it_goes(storm, rng)
    storm.qmp("migrate", source, uri=uri)
    if name in ("postcopy", "preempt"):
        storm.wait(
            "active migration",
            lambda: migration_status(storm, source) not in ("none", "setup"),
            GUEST_S,
        )
        time.sleep(rng.choice((0, 0.1, 0.5, 1.5)))
        try:
            storm.qmp("migrate-start-postcopy", source)
        except Refused as refused:
            storm.log(f"  postcopy: {refused}")
    others = beside(storm, rng)
    wait_status(storm, source, "completed")
    arrived(storm, source, target, rng)
    return f"{name}, beside: {others}, now {target.flavour}"


@action(4)
def do_broken_migration(storm: Storm, rng: Random) -> object:
    """Cancelled, or the other end is killed, in the middle."""
    how = rng.choice(("cancel", "cancel", "kill"))
    name = rng.choice(("precopy", "multifd", "xbzrle"))
    source = storm.vm
    target = storm._start(rng, flavour(rng, storm.sources), incoming=True)
    uri = f"unix:{storm.directory}/{target.name}.migrate"
    for vm in (source, target):
        capabilities(storm, vm, KINDS[name], True)
    parameters(storm, rng, rng.choice((4, 16, 64)) * MIB, source, target)
    storm.qmp("migrate-incoming", target, uri=uri)
    source.expected += SAY_CUT
    target.expected += SAY_HALF
    target.ending = True
    before_it_goes(storm, rng)
    storm.qmp("migrate", source, uri=uri)
    others = beside(storm, rng)
    time.sleep(rng.choice((0, 0.2, 1, 2)))
    storm.watcher.drop(target.name)
    if how == "kill":
        storm._end(target)
    else:
        storm.qmp("migrate_cancel", source)
    status = wait_status(storm, source, "cancelled", "failed", "completed")
    if status == "completed":
        if how == "kill":
            raise StormError("a killed destination, and the migration completed")
        target.ending = False
        target.expected.clear()
        arrived(storm, source, target, rng)
        return f"{name}: {how} came too late"
    if how != "kill":
        storm._end(target)
    capabilities(storm, source, KINDS[name], False)
    if storm.stopped or storm.qmp("query-status")["status"] != "running":
        storm.qmp("cont")
        storm.stopped = False
    storm.settle()
    storm._judge(source)
    source.expected.clear()
    return f"{name}: {how}: {status}, beside: {others}"


@action(3)
def do_saved(storm: Storm, rng: Random) -> object:
    """The guest is saved to a file and goes on from that."""
    name = rng.choice(("file", "mapped-ram", "mapped-ram-multifd"))
    source = storm.vm
    file = storm.directory / "saved"
    uri = f"file:{file}"
    try:
        capabilities(storm, source, KINDS[name], True)
        parameters(storm, rng, 4000 * MIB, source)
        before_it_goes(storm, rng)
        storm.qmp("migrate", source, uri=uri)
        others = beside(storm, rng)
        wait_status(storm, source, "completed")
        target = restore(storm, rng, uri, name)
        arrived(storm, source, target, rng)
    finally:
        file.unlink(missing_ok=True)
    return f"{name}, beside: {others}, now {target.flavour}"


def restore(storm: Storm, rng: Random, uri: str, name: str) -> Vm:
    target = storm._start(rng, flavour(rng, storm.sources), incoming=True)
    capabilities(storm, target, KINDS[name], True)
    parameters(storm, rng, 4000 * MIB, target)
    storm.qmp("migrate-incoming", target, uri=uri)
    storm.wait(
        "end of loading",
        lambda: migration_status(storm, target) in ("completed", "failed"),
        MIGRATION_S,
    )
    return target


def begin_tracking(storm: Storm, source: Vm) -> None:
    """Everything is unmerged for that, but where a device is writing."""
    source.expected += [r"cannot be unmerged: Device or resource busy"]
    for attempt in range(30):
        try:
            capabilities(storm, source, ("background-snapshot",), True)
            return
        except Refused as refused:
            # a page that a device is writing to stays merged until it is done
            storm.log(f"  background-snapshot: {refused}")
            if attempt == 29:
                raise
            time.sleep(0.1)


@action(3)
def do_background_snapshot(storm: Storm, rng: Random) -> object:
    """A snapshot of the running guest; it goes on, or the snapshot does."""
    source = storm.vm
    file = storm.directory / "saved"
    uri = f"file:{file}"
    follow = rng.random() < 0.6
    try:
        begin_tracking(storm, source)
        before_it_goes(storm, rng)
        parameters(storm, rng, rng.choice((100, 4000)) * MIB, source)
        storm.qmp("migrate", source, uri=uri)
        others = beside(storm, rng)
        wait_status(storm, source, "completed")
        capabilities(storm, source, ("background-snapshot",), False)
        if storm.stopped:
            storm.qmp("cont")
            storm.stopped = False
        storm.settle()
        if not follow:
            return f"taken, beside: {others}"
        storm.qmp("stop")
        target = restore(storm, rng, uri, "file")
        arrived(storm, source, target, rng)
    finally:
        file.unlink(missing_ok=True)
    return f"taken and followed, beside: {others}, now {target.flavour}"


def default_seed() -> int:
    return int.from_bytes(os.urandom(3), "big")
