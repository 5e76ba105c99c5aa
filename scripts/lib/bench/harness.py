# SPDX-License-Identifier: GPL-2.0-or-later
"""What every bench works with: sizes, workers, rights on the machine.

A bench is a function from a `Session` to its metrics.  C workers (tests/bench/),
one process per run, or guests measure; the session runs the workers and does
what they ask for: KSM's knobs, memory cgroups.  Leaves to others: the benches
(registry.py), showing results (tools/bench.py).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.progress import Progress

from host import ksmsys
from host.cgroup import Group
from host.exits import Failure, Lacking
from host.ksm_guard import guard
from host.paths import TOP
from host.hostd import Hostd
from host.poold import Poold

BUILD = TOP / "build" / "bench"

Metrics = dict[str, float]


class BenchError(Failure):
    """A bench could not be run; the text says why."""


class NoEngine(Lacking):
    """libksm refuses this machine."""


@dataclass
class Options:
    """What the user chose beside the benches; each is of one bench or two."""

    images: list[Path] = field(default_factory=list)
    #: density: MiB of the cgroup, and of a guest; None: what the bench chooses
    limit_mib: int | None = None
    memory_mib: int | None = None
    #: idle: another QEMU, measured at the same time
    against: Path | None = None


class Session:
    """What a bench works with: sizes, workers, the machine's knobs."""

    def __init__(self, quick: bool, options: Options, progress: Progress) -> None:
        self.quick = quick
        self.options = options
        self.images = options.images
        self.progress = progress
        self.task = progress.add_task("", total=None)
        self.notes: list[str] = []
        self.foreign_mib = 0
        self._knobs: ksmsys.KsmKnobs | None = None
        self._cgroup: Group | None = None
        self._poold: Poold | None = None
        self._hostd: Hostd | None = None
        self._ksmd = ksmsys.ksmd_pid()

    def say(self, text: str) -> None:
        self.progress.update(self.task, description=text)

    def note(self, text: str) -> None:
        head = text[:8]
        self.notes = [note for note in self.notes if note[:8] != head] + [text]

    @contextlib.contextmanager
    def ksmd(self, smart_scan: int = 1) -> Iterator[bool]:
        """ksmd at full speed, as in 2009, for the workers' "ksmd start"."""
        try:
            with guard(), ksmsys.KsmKnobs() as knobs:
                knobs.unmerge_all()
                knobs.set(pages_to_scan=99999, sleep_millisecs=0)
                for name, value in (
                    ("smart_scan", smart_scan),
                    ("use_zero_pages", 0),
                    ("advisor_mode", "none"),
                ):
                    if ksmsys.read(name) is not None:
                        knobs.set(**{name: value})
                self._wait_alone()
                self._knobs = knobs
                try:
                    yield True
                finally:
                    self._knobs = None
                    self._note_foreign()
                    knobs.unmerge_all()
        except ksmsys.KsmUnavailable as error:
            self.note(f"without ksmd's side: {error}")
            yield False

    def ksmd_start(self) -> None:
        assert self._knobs, "ksmd is started outside of Session.ksmd()"
        self._knobs.set(run=1)

    def _wait_alone(self) -> None:
        """ksmd scans every process that is willing: wait for those to end."""
        end = time.monotonic() + (0 if self.quick else 120)
        while (others := mergeable_processes()) and time.monotonic() < end:
            self.say(f"waiting for {len(others)} other mergeable processes to end")
            time.sleep(1)

    def _note_foreign(self) -> None:
        scanned = sum(mergeable_processes().values())
        if scanned >> 8:
            self.foreign_mib = max(self.foreign_mib, scanned >> 8)
            self.note(
                f"up to {self.foreign_mib} MiB of other processes were scanned by "
                "ksmd meanwhile: its figures are worse than they should be, except "
                "where they are per page scanned"
            )

    @contextlib.contextmanager
    def cgroup(self, limit: int) -> Iterator[Group]:
        self._cgroup = Group.make()
        try:
            if limit:
                self._cgroup.limit(limit)
            yield self._cgroup
        finally:
            self._cgroup.remove()
            if self._cgroup.path.exists():
                self.note(f"this cgroup could not be removed: {self._cgroup.path}")
            self._cgroup = None

    @contextlib.contextmanager
    def group(self) -> Iterator[Path]:
        """A group's daemon, for the workers' "daemon cpu"; its socket."""
        with Poold() as self._poold:
            try:
                yield self._poold.socket
            finally:
                self._poold = None

    @contextlib.contextmanager
    def driven(self) -> Iterator[Path]:
        """A host's group, and ksmd driven for what it leaves; its socket.

        ksmd may have all of a core: what it costs is compared, not how long
        it takes.
        """
        with guard(), ksmsys.KsmKnobs() as knobs:
            knobs.unmerge_all()
            for name, value in (("smart_scan", 0), ("advisor_mode", "none")):
                if ksmsys.read(name) is not None:
                    knobs.set(**{name: value})
            self._wait_alone()
            with Poold() as self._poold:
                with Hostd(self._poold.socket, "--max-cpu", "100") as self._hostd:
                    try:
                        yield self._poold.socket
                    finally:
                        self._poold = self._hostd = None
            knobs.unmerge_all()

    @contextlib.contextmanager
    def mappings(self, most: int) -> Iterator[None]:
        """A process may have so many (Debian has 65530)."""
        path = Path("/proc/sys/vm/max_map_count")
        found = path.read_text()
        if int(found) >= most:
            if int(found) > most:
                self.note(f"{int(found)} mappings to a process, not {most}")
            yield
            return
        path.write_text(str(most))
        try:
            yield
        finally:
            path.write_text(found)

    def worker(self, name: str, **args: object) -> Metrics:
        """Runs a worker; returns what it measured."""
        return self.worker_words(name, *(f"{k}={v}" for k, v in args.items()))

    def worker_words(self, name: str, *words: str) -> Metrics:
        command = [str(BUILD / "tests" / "bench" / f"bench-{name}"), *words]
        shown = " ".join([name, *words])
        self.say(shown)
        metrics: Metrics = {}
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            assert process.stdin and process.stdout
            try:
                for line in process.stdout:
                    verb, _, rest = line.strip().partition(" ")
                    if verb == "metric":
                        key, value = rest.split()
                        metrics[key] = float(value)
                    elif verb == "progress":
                        self.say(f"{shown}: {rest}")
                    elif verb == "ask":
                        reply = self._answer(rest, process.pid)
                        with contextlib.suppress(BrokenPipeError):
                            process.stdin.write(f"ok {reply}\n")
                            process.stdin.flush()
            except BaseException:
                process.kill()
                raise
            code = process.wait()
            errors.seek(0)
            if code:
                kind = NoEngine if code == Lacking.code else BenchError
                raise kind(f"{shown}: {errors.read().strip()} (exit {code})")
        return metrics

    def _answer(self, what: str, pid: int) -> int:
        """Does what a worker asks for; the number it gets back."""
        if what.startswith("ksmd"):
            assert self._knobs, "a worker uses ksmd outside of Session.ksmd()"
            if what == "ksmd start":
                cpu = ksmsys.ksmd_cpu_s(self._ksmd)
                self.ksmd_start()
                return int(cpu * 1e9)
            if what == "ksmd stop":
                self._knobs.set(run=0)
            return int(ksmsys.ksmd_cpu_s(self._ksmd) * 1e9)
        if what.startswith("driven"):
            assert self._poold and self._hostd, "a worker is not in Session.driven()"
            if what == "driven slots":
                return int(self._poold.status()["used"])
            seconds = self._poold.cpu_s() + self._hostd.cpu_s()
            return int((seconds + ksmsys.ksmd_cpu_s(self._ksmd)) * 1e9)
        if what.startswith("daemon"):
            assert self._poold, "a worker uses a daemon outside of Session.group()"
            if what == "daemon tables":
                return self._poold.memory_bytes()
            return int(self._poold.cpu_s() * 1e9)
        assert self._cgroup, "a worker uses a cgroup outside of Session.cgroup()"
        if what == "cgroup join":
            self._cgroup.join(pid)
        elif what == "cgroup reclaim":
            self._cgroup.reclaim(16 << 30)
        return 0


def mergeable_processes() -> dict[int, int]:
    """Pages ksmd keeps track of, by process that may be merged; none of ours
    (a worker is one only between "ksmd start" and its end)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/ksm_stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            if "ksm_mergeable: yes" in text:
                number = text.split("ksm_rmap_items", 1)[1].split()[0]
                found[int(path.parent.name)] = int(number)
    return found


def medians(runs: list[Metrics]) -> Metrics:
    """The median of each metric over the runs that have it."""
    names = {name: None for run in runs for name in run}
    return {n: median(run[n] for run in runs if n in run) for n in names}


def divide(metrics: Metrics, name: str, a: float | None, b: float | None) -> None:
    """Adds a ratio, if both sides were measured."""
    if a is not None and b:
        metrics[name] = a / b


def build() -> None:
    """Builds libksm and the workers."""
    log = TOP / "build" / "bench.log"
    log.parent.mkdir(exist_ok=True)
    commands = [["ninja", "-C", str(BUILD)]]
    if not (BUILD / "build.ninja").exists():
        setup = ["meson", "setup", str(BUILD), str(TOP), "--buildtype=release"]
        commands.insert(0, setup)
    with log.open("w") as out:
        for command in commands:
            if subprocess.run(command, stdout=out, stderr=out).returncode:
                sys.stderr.write(log.read_text()[-4000:])
                raise BenchError(f"the build failed (whole log: {log})")
