# SPDX-License-Identifier: GPL-2.0-or-later
"""What /proc says of QEMU's processes and of the daemons of groups.

Nothing here waits for a lock of the process but `words` and `ksm`, which are
for a Crew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
QEMU = re.compile(r"qemu-system|qemu-kvm|kvm$")
POOLD = "ksm-poold"
#: of /proc/net/unix: a socket that listens; one that was accepted
LISTENS, CONNECTED = 0x10000, "03"
#: of a kernel that does not tell its profit
RMAP_ITEM = 64


@dataclass(frozen=True)
class Process:
    pid: int
    #: in ticks since boot: tells it from a later one with the same pid
    started: int
    #: R, S, D, T (stopped) ...
    state: str
    resident: int


@dataclass
class KsmStat:
    """/proc/PID/ksm_stat."""

    merged: int
    zero: int
    #: bytes ksmd needs for this process
    metadata: int | None


def process(pid: int) -> Process | None:
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    if words[0] in "XZ":
        return None
    pages = int(words[21])
    return Process(pid, int(words[19]), words[0], pages * os.sysconf("SC_PAGE_SIZE"))


def named(pid: int) -> Iterator[str]:
    """What the process is called: -name process=NAME changes the first."""
    try:
        yield (PROC / str(pid) / "comm").read_text(errors="replace").strip()
        yield Path(os.readlink(PROC / str(pid) / "exe")).name
    except OSError:
        pass  # it ended, or is another user's


def pids() -> list[int]:
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]


def find() -> tuple[list[Process], list[int]]:
    """All QEMUs, and the daemons of groups."""
    guests, daemons = [], []
    for pid in pids():
        for name in named(pid):
            if name == POOLD:
                daemons.append(pid)
                break
            if QEMU.match(name):
                found = process(pid)
                if found:
                    guests.append(found)
                break
    return guests, daemons


def words(pid: int) -> list[str]:
    """Its command line; the kernel threads have none."""
    try:
        data = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in data.split(b"\0")[:-1]]


def ksm(pid: int) -> KsmStat | None:
    """None: an old kernel, or not permitted."""
    try:
        text = (PROC / str(pid) / "ksm_stat").read_text()
    except OSError:
        return None
    found = dict(re.findall(r"^(\w+) (-?\d+)$", text, re.MULTILINE))
    if "ksm_merging_pages" not in found:
        return None
    merged = int(found["ksm_merging_pages"])
    zero = int(found.get("ksm_zero_pages", 0))
    items = found.get("ksm_rmap_items")
    return KsmStat(merged, zero, None if items is None else int(items) * RMAP_ITEM)


@dataclass
class UnixSockets:
    """/proc/net/unix."""

    #: inode -> path
    listening: dict[int, str]
    #: paths whose listener has accepted a connection that lives
    connected: set[str]


def unix_sockets() -> UnixSockets:
    found = UnixSockets({}, set())
    try:
        lines = (PROC / "net/unix").read_text(errors="replace").splitlines()[1:]
    except OSError:
        return found
    for line in lines:
        parts = line.split(maxsplit=7)
        if len(parts) < 8:
            continue
        # an abstract name is shown with @ in the place of the zero byte
        if int(parts[3], 16) & LISTENS:
            found.listening[int(parts[6])] = parts[7]
        elif parts[5] == CONNECTED:
            found.connected.add(parts[7])
    return found


def listens_at(pid: int, sockets: UnixSockets) -> list[str]:
    """The paths of its listening sockets, as far as we may look."""
    paths = []
    try:
        for link in (PROC / str(pid) / "fd").iterdir():
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            if match and int(match[1]) in sockets.listening:
                paths.append(sockets.listening[int(match[1])])
    except OSError:
        pass
    return paths


def reach(pid: int, path: str) -> str:
    """A path of that process's, as we can use it."""
    if path.startswith("\0"):
        return path
    if not path.startswith("/"):
        return f"{PROC}/{pid}/cwd/{path}"
    inside = f"{PROC}/{pid}/root{path}"
    try:
        if not os.path.samefile(path, inside):
            return inside
    except OSError:
        # one of them is not there, or not to be looked at
        return inside if os.path.exists(inside) else path
    return path
