# SPDX-License-Identifier: GPL-2.0-or-later
"""All guests, pools and the kernel, at one moment, in bounded time."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from top import commandline, model, pool, procfs
from top.commandline import POOLS, CommandLine
from top.crew import Crew
from top.domains import Domain, Libvirt
from top.kernel import KernelReader
from top.model import Cost, Guest, Kernel, Pool, Snapshot
from top.procfs import Process, UnixSockets
from top.subject import Subject

#: For a thread that has its answer in time to hand it over.
SLACK = 0.3
#: States of guests that root may be able to ask.
NOT_REACHED = ("unseen", "refused")


@dataclass
class Sources:
    """Where guests are looked for."""

    #: QEMU's processes, and what they name
    scan: bool = True
    sockets: list[str] = field(default_factory=list)
    #: of libvirts; None: the default one.  Never without being told: libvirt
    #: marks a domain as tainted when somebody uses its monitor
    uris: list[str | None] = field(default_factory=list)
    pools: list[str] = field(default_factory=list)
    #: ask for what is in guests' memory, too
    sketch: bool = False
    #: seconds that a guest, or a daemon, has to answer
    limit: float = 2.0


class Host:
    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        #: what could not be asked at all, for people
        self.notes: list[str] = []
        self._crew = Crew()
        self._kernel = KernelReader()
        self._lines: dict[tuple[int, int], CommandLine] = {}
        self._libvirts = {uri: Libvirt(uri) for uri in sources.uris}
        self._silent: set[Hashable] = set()
        #: CPU time of each, when it was last seen
        self._cpu: dict[Hashable, tuple[float, float]] = {}

    # -- who is there --------------------------------------------------------

    def _know(self, processes: list[Process]) -> None:
        """Reads the command lines of those that are new."""
        jobs: dict[Hashable, Callable[[], list[str]]] = {
            (each.pid, each.started): partial(procfs.words, each.pid)
            for each in processes
            if (each.pid, each.started) not in self._lines
        }
        known = {(each.pid, each.started) for each in processes}
        self._lines = {k: v for k, v in self._lines.items() if k in known}
        for key, words in self._crew.run(jobs, self.sources.limit).items():
            # empty: it ended
            assert isinstance(key, tuple)
            if words:
                self._lines[key] = commandline.parse(words)

    def _domains(self) -> list[Domain]:
        jobs: dict[Hashable, Callable[[], list[Domain] | str]] = {
            ("libvirt", uri): each.domains for uri, each in self._libvirts.items()
        }
        found: list[Domain] = []
        answers = self._crew.run(jobs, self.sources.limit)
        for key in jobs:
            answer = answers.get(key, "libvirt did not answer in time")
            if isinstance(answer, str):
                self.notes.append(answer)
            else:
                found += answer
        return found

    def _by_process(self, process: Process, sockets: UnixSockets) -> Subject:
        line = self._lines.get((process.pid, process.started), CommandLine())
        # one that keeps us waiting may still have a connection that we gave up
        silent = (process.pid, process.started) in self._silent
        return Subject(process, line, used={} if silent else sockets.connected)

    def _subjects(
        self, processes: list[Process], sockets: UnixSockets
    ) -> list[Subject]:
        self._know(processes)
        subjects = [self._by_process(each, sockets) for each in processes]
        subjects = [each for each in subjects if not each.line.probe]
        by_uuid = {each.line.uuid: each for each in subjects if each.line.uuid}
        if not self.sources.scan:
            subjects = []
        for domain in self._domains():
            known = by_uuid.get(domain.uuid) or Subject(domain=domain)
            known.domain = domain
            if not any(known is each for each in subjects):
                subjects.append(known)
        return subjects + self._named(subjects)

    def _named(self, subjects: list[Subject]) -> list[Subject]:
        """Of sockets that we were told, and that are nobody's so far."""
        if not self.sources.sockets:
            return []
        known = {path for each in subjects for path in each.line.sockets}
        jobs: dict[Hashable, Callable[[], str]] = {
            ("real", path): partial(os.path.realpath, path)
            for path in {*known, *self.sources.sockets}
            if not path.startswith("\0")
        }
        found = self._crew.run(jobs, self.sources.limit)
        real = {found.get(("real", path), path) for path in known}
        return [
            Subject(socket=path)
            for path in self.sources.sockets
            if found.get(("real", path), path) not in real
        ]

    def _pools(self, daemons: list[int], sockets: UnixSockets) -> dict[str, bool]:
        """Paths, and whether a daemon is known to listen there.

        systemd starts a daemon for whoever connects to its socket: no reason
        to have one is to be looked at.
        """
        found = dict.fromkeys(self.sources.pools, True)
        if self.sources.scan:
            for pid in daemons:
                paths = procfs.held(pid, sockets.listening) or self._named_socket(pid)
                found |= dict.fromkeys(paths, True)
            rest = [str(path) for path in Path(POOLS).glob("*.sock")]
            rest += [path for line in self._lines.values() for path in line.pools]
            for path in rest:
                found.setdefault(path, False)
        return found

    def _named_socket(self, pid: int) -> list[str]:
        """Of a daemon whose descriptors we may not look at."""
        key = ("daemon", pid)
        words = self._crew.run({key: partial(procfs.words, pid)}, self.sources.limit)
        named = commandline.options(words.get(key, []))
        return [value for option, value in named if option == "socket"]

    # -- asking --------------------------------------------------------------

    def look(self) -> Snapshot:
        begin, now = time.monotonic(), time.time()
        self.notes = []
        limit = self.sources.limit
        kernel = self._kernel.read()
        self._share(("ksmd",), kernel, begin)
        processes, daemons = procfs.find()
        sockets = procfs.unix_sockets()
        subjects = self._subjects(processes, sockets)
        pools = self._pools(daemons, sockets)
        guest_jobs: dict[Hashable, Callable[[], tuple[Guest | Pool, float]]] = {
            each.key: partial(
                timed, partial(each.ask, kernel, limit, self.sources.sketch)
            )
            for each in subjects
        }
        pool_jobs: dict[Hashable, Callable[[], tuple[Guest | Pool, float]]] = {
            ("pool", path): partial(timed, partial(pool.ask, path, limit))
            for path, there in pools.items()
            if there
        }
        answers = self._crew.run(guest_jobs | pool_jobs, limit + SLACK)
        guests = [self._guest(each, answers.get(each.key)) for each in subjects]
        self._silent = {
            subject.key
            for subject, guest in zip(subjects, guests, strict=True)
            if guest.state == "silent"
        }
        if os.geteuid() and any(each.state in NOT_REACHED for each in guests):
            self.notes.append("guests of other users can be asked by root only")
        found = [
            self._pool(path, there, answers.get(("pool", path)))
            for path, there in pools.items()
        ]
        make_unique(guests)
        guests.sort(key=lambda guest: guest.name)
        found.sort(key=lambda each: each.socket)
        sums = model.total(guests, found, kernel)
        seconds = time.monotonic() - begin
        return Snapshot(now, seconds, guests, found, kernel, sums)

    def _guest(self, subject: Subject, answer: tuple[object, float] | None) -> Guest:
        if answer is None or not isinstance(answer[0], Guest):
            return subject.guest()
        guest = answer[0]
        if guest.state == "gone" and subject.process:
            # its socket is not there: it may run all the same
            if procfs.process(subject.process.pid):
                guest.unanswered("unseen", guest.reasons[0].text)
        self._share(subject.key, guest.cost, answer[1])
        return guest

    def _pool(
        self, path: str, there: bool, answer: tuple[object, float] | None
    ) -> Pool:
        if not there:
            return pool.gone(path, "no daemon runs")
        if answer is None or not isinstance(answer[0], Pool):
            return pool.gone(path, "it did not answer in time", "silent")
        self._share(("pool", path, answer[0].generation), answer[0], answer[1])
        return answer[0]

    def _share(self, key: Hashable, cost: Cost | Pool | Kernel, now: float) -> None:
        """What part of a core it used since it was last asked."""
        if cost.cpu_seconds is None:
            return
        before = self._cpu.get(key)
        self._cpu[key] = (now, cost.cpu_seconds)
        if before and now > before[0] and cost.cpu_seconds >= before[1]:
            cost.cpu_share = (cost.cpu_seconds - before[1]) / (now - before[0])


def timed(
    job: Callable[[], Guest | Pool],
) -> tuple[Guest | Pool, float]:
    answer = job()
    return answer, time.monotonic()


def make_unique(guests: list[Guest]) -> None:
    """Two guests may have the same name; series and rows must not."""
    count = Counter(guest.name for guest in guests)
    for number, guest in enumerate(guests):
        if count[guest.name] > 1:
            name = f"{guest.name}@{guest.pid or number}"
            while name in count:
                name += "'"
            guest.name = name
            count[name] = 1
