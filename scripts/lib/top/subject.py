# SPDX-License-Identifier: GPL-2.0-or-later
"""A guest that is to be asked, by one of the ways to ask it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from top import figures, procfs, qmp, similar
from top.commandline import CommandLine
from top.domains import Domain
from top.model import Guest, Kernel
from top.procfs import Process

#: Of one that libvirt made (it has an uuid), and of another.
LIBVIRTS = "libvirt has its QMP socket: try --libvirt"
GIVEN = "another program has its QMP socket"
#: What an answer that is not as it should be makes of figures.py.
ODD = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
    *(StopIteration, TypeError, ValueError),
)


@dataclass(eq=False)
class Subject:
    #: None: it is not known, or on another host
    process: Process | None = None
    line: CommandLine = field(default_factory=CommandLine)
    domain: Domain | None = None
    #: where to ask, if there is no process
    socket: str = ""
    #: names of all sockets with a client, by inode
    used: dict[int, str] = field(default_factory=dict)

    #: who it is, from one look to the next
    key: Hashable = None
    #: of query-ksm-sketches, as it was answered
    _sketches: Any = None

    def __post_init__(self) -> None:
        if self.process:
            self.key = self.process.pid, self.process.started
        elif self.domain:
            self.key = self.domain.uuid
        else:
            self.key = (self.socket,)

    def name(self) -> str:
        if self.domain:
            return self.domain.name
        if self.line.name:
            return self.line.name
        if self.process:
            return f"pid {self.process.pid}"
        return self.socket

    def guest(self) -> Guest:
        """As it is without an answer."""
        guest = Guest(self.name())
        if self.process:
            guest.pid = self.process.pid
            guest.resident = self.process.resident
        guest.unanswered("silent")
        return guest

    def _questions(self, guest: Guest, seconds: float, sketch: bool) -> Any:
        """query-ksm-stats, or None if QEMU does not have it."""
        more = ["query-ksm-sketches"] if sketch else []
        if self.process and self.process.state in "Tt":
            raise qmp.NoAnswer("stopped")
        if self.domain:
            guest.source = "libvirt"
            stats = self.domain.ask("query-ksm-stats")
            self._sketches = self.domain.ask(more[0]) if stats and more else None
            return stats
        path = self.socket or self._reach()
        guest.source = "qmp"
        commands = ["query-name", "query-ksm-stats", *more]
        (named, stats, *rest), pid = qmp.ask(path, commands, seconds, guest.pid)
        self._sketches = rest[0] if rest else None
        if self.process is None:
            self._found(guest, pid, named)
        return stats

    def _reach(self) -> str:
        """A socket of the process's that nobody uses."""
        pid, sockets = (self.process.pid if self.process else 0), self.line.sockets
        used = procfs.held(pid, self.used)
        free = [path for path in sockets if path not in used]
        if free:
            return procfs.reach(pid, free[0])
        if sockets:
            raise qmp.NoAnswer("busy", LIBVIRTS if self.line.uuid else "")
        text = LIBVIRTS if self.line.uuid else GIVEN
        raise qmp.NoAnswer("unseen", text if self.line.given else "")

    def _found(self, guest: Guest, pid: int, named: Any) -> None:
        """Of a socket that was named it is known only now whose it is."""
        if any(procfs.QEMU.match(name) for name in procfs.named(pid)):
            self.process = procfs.process(pid)
        if self.process:
            guest.pid, guest.resident = pid, self.process.resident
        if named and "name" in named:
            guest.name = str(named["name"])

    def _is_stopped(self) -> bool:
        now = procfs.process(self.process.pid) if self.process else None
        return now is not None and now.state in "Tt"

    def ask(self, kernel: Kernel, seconds: float, sketch: bool = False) -> Guest:
        guest = self.guest()
        stat = None
        try:
            stat = figures.fill(guest, self._questions(guest, seconds, sketch))
            if guest.answered:
                guest.reasons = [] if guest.state == "plain" else guest.reasons
        except qmp.NoAnswer as why:
            # it may have been stopped after we looked
            stopped = why.state == "silent" and self._is_stopped()
            guest.unanswered("stopped" if stopped else why.state, why.text)
        except ODD:
            # what was filled in may be wrong, too
            guest = self.guest()
            guest.unanswered("garbled")
        try:
            guest.sketch = similar.sketch_of(self._sketches[0])
        except ODD:
            pass  # it has none, or an odd one: its figures are none the worse
        if stat is None and guest.pid is not None:
            stat = procfs.ksm(guest.pid)
        figures.fill_kernel(guest, stat, kernel)
        return guest
