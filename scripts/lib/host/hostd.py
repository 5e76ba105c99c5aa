# SPDX-License-Identifier: GPL-2.0-or-later
"""A ksm-hostd of our own: who drives ksmd for what guests leave to it.

`with Hostd(daemon.socket) as hostd: ... hostd.status() ...`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from host.poold import need_program


def need_hostd() -> Path:
    """The program, built if need be."""
    return need_program("KSM_HOSTD", "hostd/driver/ksm-hostd")


class Hostd:
    """One driver, which ends with us, however we end, and leaves no file.

    Its hand sees to ksmd, and a janitor to its directory.
    """

    def __init__(self, socket: Path, *options: str) -> None:
        """`socket` is the daemon's of the host's group."""
        self._socket = socket
        self._options = options
        self._run_dir = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._janitor: subprocess.Popen[bytes] | None = None
        self._log = os.memfd_create("hostd-log")

    def __enter__(self) -> Hostd:
        self._run_dir = tempfile.mkdtemp(prefix="ksm-hostd-")
        ours, theirs = os.pipe()
        try:
            # waits until driver and hand have closed the other end: by ending
            self._janitor = subprocess.Popen(
                ["sh", "-c", 'cat && rm -rf -- "$0"', self._run_dir],
                stdin=ours,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", str(need_hostd())]
                + ["--socket", str(self._socket), "--run-dir", self._run_dir]
                + [*self._options],
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs],
            )
        finally:
            os.close(ours)
            os.close(theirs)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
            self._process = None
        if self._janitor is not None:
            self._janitor.wait()
            self._janitor = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def cpu_s(self) -> float:
        """Of both processes; 0 before it was started."""
        if self._process is None:
            return 0.0
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        pids = [self.pid, *(int(word) for word in children.split())]
        return sum(
            int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
            for pid in pids
        )

    def status(self) -> dict[str, Any]:
        """What --status says; empty while it does not run yet."""
        words = [str(need_hostd()), "--status", "--json"]
        words += ["--run-dir", self._run_dir]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        return found

    def said(self) -> str:
        return os.pread(self._log, 1 << 20, 0).decode(errors="replace")
