# SPDX-License-Identifier: GPL-2.0-or-later
"""The kernel's KSM as seen from user space: /sys/kernel/mm/ksm and ksmd.

The knobs are the whole machine's.  `KsmKnobs` takes one lock for all programs
of this project, saves the knobs, and restores them however the program ends;
after a kill -9 the next holder of the lock restores them from a file.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType

from host.exits import Lacking

KSM = Path("/sys/kernel/mm/ksm")
LOCK = Path(os.environ.get("QEMU_KSM_LOCK", "/run/lock/qemu-ksm-knobs"))
SAVED = LOCK.with_name(LOCK.name + ".saved")

#: Knobs that programs of this project may change, in the order in which they
#: are restored: KSM's `run` last, because its others may not change while it is 1.
KNOBS = (
    "pages_to_scan",
    "sleep_millisecs",
    "smart_scan",
    "use_zero_pages",
    "advisor_mode",
    "run",
    "max_map_count",
)


class KsmUnavailable(Lacking):
    """KSM cannot be controlled here; the text says why and what to do."""


def _path(name: str) -> Path:
    """All are KSM's, but for the mappings that a process may have."""
    return Path("/proc/sys/vm") / name if name == "max_map_count" else KSM / name


def read(name: str) -> int | None:
    """A number of /sys/kernel/mm/ksm, None where it cannot be read."""
    try:
        return int(_path(name).read_text())
    except (OSError, ValueError):
        return None


def why_not_controllable() -> str | None:
    """Why this process may not start ksmd, or None if it may."""
    if not KSM.is_dir():
        return (
            "this kernel has no KSM (no /sys/kernel/mm/ksm); "
            "use a kernel with CONFIG_KSM=y"
        )
    if not os.access(KSM / "run", os.W_OK):
        return (
            "no permission to write /sys/kernel/mm/ksm/run, so ksmd cannot be "
            "started; run as root, or ask the host's administrator to run "
            "'echo 1 > /sys/kernel/mm/ksm/run'"
        )
    return None


def ksmd_pid() -> int | None:
    """The pid of the kernel thread ksmd."""
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text() == "ksmd\n":
                return int(comm.parent.name)
        except OSError:
            continue
    return None


def ksmd_cpu_s(pid: int | None = None) -> float:
    """CPU seconds ksmd has used since boot (0.0 where it is not visible)."""
    pid = pid if pid is not None else ksmd_pid()
    if pid is None:
        return 0.0
    try:  # nanoseconds, where the kernel has schedstat
        first = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
        return int(first) / 1e9
    except (OSError, ValueError, IndexError):
        pass
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_knob(name: str) -> str | None:
    try:
        text = _path(name).read_text().strip()
    except OSError:
        return None
    # "[none] scan-time": the brackets show the choice in force
    return text[text.index("[") + 1 : text.index("]")] if "[" in text else text


def _write_knob(name: str, value: str) -> None:
    _path(name).write_text(value + "\n")


class KsmKnobs:
    """`with KsmKnobs() as knobs: knobs.set(run=1, pages_to_scan=5000)`.

    Raises KsmUnavailable where the knobs cannot be written.  Waits for other
    programs of this project (up to `timeout` seconds).  SIGTERM and SIGHUP
    become SystemExit meanwhile, so that `with` restores.
    """

    def __init__(self, timeout: float = 900) -> None:
        self.timeout = timeout
        self._lock: int | None = None
        self._saved: dict[str, str] = {}
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> KsmKnobs:
        reason = why_not_controllable()
        if reason:
            raise KsmUnavailable(reason)
        self._take_lock()
        try:
            self._heal()
            for name in KNOBS:
                value = _read_knob(name)
                if value is not None:
                    self._saved[name] = value
            SAVED.write_text(json.dumps(self._saved))
            for number in (signal.SIGTERM, signal.SIGHUP):
                try:
                    self._handlers[number] = signal.signal(number, self._exit)
                except ValueError:  # not the main thread
                    pass
        except BaseException:
            self._drop_lock()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._restore(self._saved)
            SAVED.unlink(missing_ok=True)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._handlers.clear()
            self._drop_lock()

    def set(self, **knobs: int | str) -> None:
        """Sets knobs; KSM's own rules hold (EBUSY, EINVAL as OSError)."""
        for name, value in knobs.items():
            if name not in KNOBS:
                raise ValueError(f"{name} is not a knob this project changes")
            _write_knob(name, str(value))

    def unmerge_all(self) -> None:
        """Unmerges every page on the host and stops ksmd (`run` = 2, then 0)."""
        _write_knob("run", "2")
        _write_knob("run", "0")

    @staticmethod
    def _exit(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    @staticmethod
    def _restore(saved: dict[str, str]) -> None:
        for name in KNOBS:
            if name in saved and _read_knob(name) != saved[name]:
                try:
                    _write_knob(name, saved[name])
                except OSError as error:
                    print(f"cannot restore {_path(name)}: {error}", file=sys.stderr)

    def _heal(self) -> None:
        """Restores what a killed holder of the lock left behind."""
        try:
            saved = json.loads(SAVED.read_text())
        except (OSError, ValueError):
            return
        self._restore(saved)
        SAVED.unlink(missing_ok=True)

    def _take_lock(self) -> None:
        LOCK.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + self.timeout
        told = False
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._drop_lock()
                    raise KsmUnavailable(
                        f"another program of qemu-ksm has held KSM's knobs "
                        f"({LOCK}) for {self.timeout:.0f} s"
                    ) from None
                if not told:
                    print("waiting for KSM's knobs", file=sys.stderr)
                    told = True
                time.sleep(0.5)

    def _drop_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def main() -> int:
    """For scripts/demo."""
    print(why_not_controllable() or "")
    return 0
