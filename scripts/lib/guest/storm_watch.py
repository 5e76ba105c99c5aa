# SPDX-License-Identifier: GPL-2.0-or-later
"""What must hold for a QEMU and its guest all through a storm.

A monitor whose every answer has a time limit, impossible figures of
query-ksm-stats, forbidden lines of QEMU and of the guest's kernel, and flags
that all of a guest's memory must have.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

#: A command that takes longer hangs.  Some of them write out all RAM, and the
#: machine may be busy with other things; the longest are in the log.
ANSWER_S = 60.0
#: One that takes longer is worth a line in the log.
SLOW_S = 1.5


class StormError(RuntimeError):
    """Something happened that must not happen."""


class Refused(Exception):
    """QEMU's answer was an error; the text is its description."""


class Gone(Exception):
    """QEMU has closed the line."""


class Monitor:
    """A QMP connection of its own, for one thread."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_S)
        self._socket.connect(str(path))
        self._input = b""
        #: the slowest answer to each command, in seconds
        self.slowest: dict[str, float] = {}
        self._take(time.monotonic() + ANSWER_S)
        self.execute("qmp_capabilities")

    def close(self) -> None:
        self._socket.close()

    def _take(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._input:
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError as error:
                raise Gone(str(error)) from error
            if not data:
                raise Gone("end of file")
            self._input += data
        line, _, self._input = self._input.partition(b"\n")
        return dict(json.loads(line))

    def execute(self, command: str, **arguments: Any) -> Any:
        """The answer; '_' in names becomes '-'.  A 'QMP hangs' StormError if
        there is none."""
        arguments = {k.replace("_", "-"): v for k, v in arguments.items()}
        start = time.monotonic()
        try:
            text = json.dumps({"execute": command, "arguments": arguments})
            self._socket.sendall(text.encode() + b"\n")
            while True:
                answer = self._take(start + ANSWER_S)
                if "return" in answer or "error" in answer:
                    break
        except TimeoutError:
            raise StormError(
                f"{command} was not answered within {ANSWER_S:.0f} s"
            ) from None
        except OSError as error:
            raise Gone(str(error)) from error
        took = time.monotonic() - start
        self.slowest[command] = max(took, self.slowest.get(command, 0.0))
        if "error" in answer:
            raise Refused(answer["error"]["desc"])
        return answer["return"]


# --- figures ---------------------------------------------------------------

#: These only grow while a QEMU runs.
GROWING = ("pages-scanned", "full-scans", "scan-time", "merge-time", "log-time")
#: A count above is a negative one.
ABSURD = 1 << 62


def _numbers(value: Any, path: str = "") -> list[tuple[str, int]]:
    if isinstance(value, dict):
        return [pair for k, v in value.items() for pair in _numbers(v, f"{path}/{k}")]
    if isinstance(value, list):
        return [
            pair for i, v in enumerate(value) for pair in _numbers(v, f"{path}/{i}")
        ]
    if isinstance(value, int) and not isinstance(value, bool):
        return [(path, value)]
    return []


def _backend_wrongs(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    pages = now["size"] // 4096
    wrongs = []

    def must(what: str, holds: bool) -> None:
        if not holds:
            wrongs.append(f"{now['id']}: not {what}")

    size = now["size"]
    must(f"merged-runs <= {pages} pages", now.get("merged-runs", 0) <= pages)
    for name in ("merged", "shared", "saved", "unshared", "volatile", "zero"):
        must(f"{name}-bytes <= size", now.get(f"{name}-bytes", 0) <= size)
    taken = now.get("saved-bytes", 0) + now.get("zero-bytes", 0)
    must("saved-bytes + zero-bytes <= size", taken <= size)
    if "shared-bytes" in now:
        parts = now["shared-bytes"] + now["saved-bytes"]
        must("shared + saved == merged", parts == now["merged-bytes"])
    if "resident" in now:
        must("resident <= size", now["resident"] <= now["size"])
        must("used <= resident", now["used"] <= now["resident"])
        must("lazy-free <= resident", now["lazy-free"] <= now["resident"])
    must("profit <= size", now.get("profit", 0) <= now["size"])
    stall = now.get("stall")
    if stall and stall["count"]:
        # the percentiles are starts of buckets an eighth wide
        must("stall: p50 <= p99 <= max", stall["p50"] <= stall["p99"])
        must("stall: p99 <= max", stall["p99"] <= stall["max"] * 9 // 8 + 16)
    for reason in now["reasons"]:
        must(f"reason {reason['kind']} <= size", reason.get("bytes", 0) <= size)
        must(f"reason {reason['kind']} has a text", bool(reason["text"]))
    kinds = {reason["kind"] for reason in now["reasons"]}
    if now["state"] in ("inhibited", "off"):
        must(f"state {now['state']} explained", bool(kinds - {"balloon-inert"}))
    for name in GROWING:
        if name in now and name in before:
            must(f"{name} growing", now[name] >= before[name])
    return wrongs


def stats_wrongs(now: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    """What cannot be in an answer of query-ksm-stats, given the one before."""
    wrongs = [
        f"{path} is {value}"
        for path, value in _numbers(now)
        if value >= ABSURD or (value < 0 and not path.endswith("/profit"))
    ]
    known = {each["id"]: each for each in (before or {}).get("backends", [])}
    for each in now["backends"]:
        wrongs += _backend_wrongs(each, known.get(each["id"], {}))
    return wrongs


# --- words -----------------------------------------------------------------

#: A guest's kernel says so when its memory or a device is damaged.
#: "Call Trace" alone is not such a word: one that cannot empty a memory module
#: prints that, too.
GUEST_BAD = re.compile(
    r"Kernel panic|Oops|BUG:|WARNING: CPU|general protection|"
    r"Bad page|bad pte|segfault|unable to handle|soft lockup|hung_task|"
    r"blocked for more than|I/O error|EXT4-fs error|stack-protector|"
    r"Out of memory|invalid opcode|corrupt"
)

#: What QEMU may say, at any time, and why that is no fault.
QEMU_MAY_SAY: dict[str, str] = {
    r"host doesn't support requested feature": "TCG has not all CPU features",
}


def qemu_wrongs(lines: list[str], expected: list[str]) -> list[str]:
    """Lines of stderr without a known reason."""
    allowed = [re.compile(text) for text in (*QEMU_MAY_SAY, *expected)]
    return [
        line
        for line in lines
        if line and not any(each.search(line) for each in allowed)
    ]


#: What a guest may say that has no memory left to manage a module with.
GUEST_SHORT = re.compile(r"WARNING: CPU.* add_pages\+")


def guest_wrongs(lines: list[str], before: list[str]) -> list[str]:
    """@before: all that the guest has said, these lines among them."""
    short = any("vmemmap alloc failure" in line for line in before)
    return [
        line
        for line in lines
        if GUEST_BAD.search(line) and not (short and GUEST_SHORT.search(line))
    ]


# --- mappings --------------------------------------------------------------


def ram_flags(pid: int, where: tuple[int, int]) -> list[set[str]]:
    """VmFlags of each mapping of the guest's RAM."""
    found = []
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            inside = where[0] <= int(match[1], 16) < where[1]
        elif inside and line.startswith("VmFlags:"):
            found.append(set(line.split()[1:]))
    return found


# --- where it hangs --------------------------------------------------------


def stacks(pid: int) -> str:
    """What every thread of a QEMU is at, for the log."""
    text = ""
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            name = (task / "comm").read_text().strip()
            text += f"\n  {task.name} {name}: {(task / 'wchan').read_text()}"
            kernel = (task / "stack").read_text().split("\n")[:6]
            text += "".join(f"\n      {line}" for line in kernel if line)
        except OSError:
            continue  # it has ended, or we may not look
    if shutil.which("gdb"):
        command = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 16"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=90, check=False
            )
            lines = [x for x in done.stdout.splitlines() if re.match(r"(#|Thread)", x)]
            text += "\n" + "\n".join(lines)
        except subprocess.TimeoutExpired:
            text += "\n  gdb took too long"
    return text


# --- the second monitor ----------------------------------------------------


class Watcher:
    """Asks every QEMU there is for its figures, all the time."""

    def __init__(self, log: Callable[[str], None], seed: int) -> None:
        self._log = log
        self._random = Random(f"{seed}/watch")
        self._lock = threading.Lock()
        self._watched: dict[str, tuple[Monitor, dict[str, Any] | None]] = {}
        self._stop = threading.Event()
        self.wrongs: list[str] = []
        self.polls = 0
        self.slowest: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, name: str, path: Path) -> None:
        monitor = Monitor(path)
        with self._lock:
            self._watched[name] = (monitor, None)

    def drop(self, name: str) -> None:
        """To be called before that QEMU ends."""
        with self._lock:
            monitor, _ = self._watched.pop(name, (None, None))
            if monitor is not None:
                self._remember(monitor)
                monitor.close()

    def last(self, name: str) -> str:
        """The last figures in a few words, for the log."""
        _, stats = self._watched.get(name, (None, None))
        if not stats or not stats["backends"]:
            return "no backend"
        each = stats["backends"][0]
        names = ("merged-bytes", "zero-bytes", "merged-runs", "cow-broken")
        words = [f"{name} {each[name]}" for name in names if name in each]
        return " ".join([each["state"], *words])

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(ANSWER_S + 10)
        for name in list(self._watched):
            self.drop(name)

    def _remember(self, monitor: Monitor) -> None:
        for command, took in monitor.slowest.items():
            self.slowest[command] = max(took, self.slowest.get(command, 0.0))

    def _look(self, name: str) -> None:
        monitor, before = self._watched[name]
        start = time.monotonic()
        stats = monitor.execute("query-ksm-stats")
        if time.monotonic() - start > SLOW_S:
            self._log(f"watch: {name}: answered in {time.monotonic() - start:.1f} s")
        wrongs = stats_wrongs(stats, before)
        self._watched[name] = (monitor, stats)
        text = monitor.execute("human-monitor-command", command_line="info ksm")
        if stats["backends"] and stats["backends"][0]["id"] not in text:
            wrongs.append(f"info ksm does not name the backend: {text!r}")
        if re.search(r"\b1844674407\d{10}\b", text):
            wrongs.append(f"info ksm has a negative count: {text!r}")
        if wrongs:
            self._log(f"watch: {name}: {wrongs}: {json.dumps(stats)}")
            self.wrongs += [f"{name}: {each}" for each in wrongs]
        self.polls += 1

    def _run(self) -> None:
        while not self._stop.wait(self._random.choice((0.01, 0.1, 0.3, 0.7))):
            for name in list(self._watched):
                # the lock keeps the line open until it has been answered
                with self._lock:
                    if name not in self._watched:
                        continue
                    try:
                        self._look(name)
                    except (StormError, Gone, Refused, KeyError) as error:
                        self._log(f"watch: {name}: {error!r}")
                        self.wrongs.append(f"{name}: second monitor: {error!r}")
                        self._watched.pop(name)[0].close()
