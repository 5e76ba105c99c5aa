# SPDX-License-Identifier: GPL-2.0-or-later
"""A ksm-poold of our own: the daemon of a group's pool, for as long as it takes.

`with Poold() as daemon: ... daemon.socket ...`.  KSM_POOLD names a program that
is built already; without it libksm is built here, in build/poold.
"""

from __future__ import annotations

import json
import os
import signal
import socket as sockets
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from host.exits import Failure, Lacking
from host.paths import TOP

BUILD = TOP / "build" / "poold"
LIBKSM = TOP / "subprojects" / "libksm"


class PooldError(Failure):
    """The daemon cannot be built, or does not run; the text says why."""


def need_program(variable: str, name: str) -> Path:
    """A program of the daemons', built if need be, or what the variable names."""
    given = os.environ.get(variable)
    if given:
        if not os.access(given, os.X_OK):
            raise Lacking(f"{variable}={given} is not a program")
        return Path(given)
    log = BUILD.with_suffix(".log")
    log.parent.mkdir(exist_ok=True)
    commands = [["ninja", "-C", str(BUILD), name]]
    if not (BUILD / "build.ninja").exists():
        commands.insert(
            0, ["meson", "setup", str(BUILD), str(LIBKSM), "--buildtype=release"]
        )
    with log.open("w") as out:
        for command in commands:
            if subprocess.run(command, stdout=out, stderr=out).returncode:
                sys.stderr.write(log.read_text()[-4000:])
                raise PooldError(f"{name} cannot be built (whole log: {log})")
    return BUILD / name


def need_poold() -> Path:
    """The program, built if need be."""
    return need_program("KSM_POOLD", "hostd/ksm-poold")


class Poold:
    """One daemon, which ends with us, however we end, and leaves no file."""

    def __init__(
        self,
        *options: str,
        socket: Path | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix` is a command in front of the daemon's."""
        self._program = need_poold()
        self._options = options
        self._prefix = prefix
        self._process: subprocess.Popen[bytes] | None = None
        name = f"ksm-{uuid.uuid4().hex[:8]}.sock"
        self.socket = socket or Path(tempfile.gettempdir()) / name
        self._log = os.memfd_create("poold-log")

    def __enter__(self) -> Poold:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when members can connect."""
        self._process = subprocess.Popen(
            # it takes its socket away when it is told to end
            [*self._prefix, "setpriv", "--pdeathsig", "TERM", "--", str(self._program)]
            + ["--socket", str(self.socket), *self._options],
            stdout=self._log,
            stderr=self._log,
        )
        until = time.monotonic() + 10
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > until:
                raise PooldError(f"ksm-poold did not start: {self.said().strip()}")
            time.sleep(0.01)

    def _listens(self) -> bool:
        # the file is there a moment before
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None
            self.socket.unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def status(self) -> dict[str, Any]:
        """What --status says of the running daemon."""
        words = [str(self._program), "--status", "--json"]
        words += ["--socket", str(self.socket)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise PooldError(f"no status of ksm-poold: {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def said(self) -> str:
        return os.pread(self._log, 1 << 20, 0).decode(errors="replace")

    def cpu_s(self) -> float:
        """All it has used."""
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    def pool_bytes(self) -> int:
        """Memory of the pool, used or not."""
        size = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                if "ksm-pool" in os.readlink(link):
                    size = max(size, link.stat().st_blocks * 512)
            except OSError:
                continue  # closed meanwhile
        return size

    def memory_bytes(self) -> int:
        """Anonymous memory: its tables."""
        for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
        return 0
