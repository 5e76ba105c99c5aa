# SPDX-License-Identifier: GPL-2.0-or-later
"""What /proc says of QEMU's processes and of the daemons of groups.

Nothing here waits for a lock of the process, or for a file system, but `words`,
`ksm` and `reach`, which are for a Crew.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
QEMU = re.compile(r"qemu-system|qemu-kvm|kvm$")
POOLD = "ksm-poold"
#: of sock_diag: messages, and states of a socket
SOCK_DIAG, BY_FAMILY, SHOW_NAME, NAME = 4, 20, 1, 0
CONNECTED, LISTENS = 1, 10
HEAD, ASKED = struct.Struct("=IHHII"), struct.Struct("=BBHIIIII")
TOLD, ATTRIBUTE = struct.Struct("=2xBxI8x"), struct.Struct("=HH")
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
    """Names by inode; the first byte of an abstract one is zero."""

    listening: dict[int, str]
    #: a listener's, of connections that it has accepted
    connected: dict[int, str]


def unix_sockets() -> UnixSockets:
    """By sock_diag(7).  In /proc/net/unix a name stands as it is, with its line
    ends: a socket's name can be the line of another one."""
    found = UnixSockets({}, {})
    states = 1 << LISTENS | 1 << CONNECTED
    wanted = ASKED.pack(socket.AF_UNIX, 0, 0, states, 0, SHOW_NAME, 0, 0)
    # 0x301: a request, for all there are
    head = HEAD.pack(HEAD.size + len(wanted), BY_FAMILY, 0x301, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
            kernel.send(head + wanted)
            while _take(kernel.recv(1 << 16), found):
                pass
    except OSError:
        pass  # not in this kernel
    return found


def _take(data: bytes, found: UnixSockets) -> bool:
    """A packet of its answer; false: there is no more."""
    at = 0
    while at < len(data):
        length, kind, *_ = HEAD.unpack_from(data, at)
        if kind != BY_FAMILY:
            return False
        state, inode = TOLD.unpack_from(data, at + HEAD.size)
        begin = at + HEAD.size + TOLD.size
        size, attribute = ATTRIBUTE.unpack_from(data, begin)
        # the name is first, if it has one
        if attribute == NAME:
            name = data[begin + ATTRIBUTE.size : begin + size].rstrip(b"\0")
            names = found.listening if state == LISTENS else found.connected
            names[inode] = name.decode(errors="replace")
        at += (length + 3) & ~3
    return True


def held(pid: int, names: dict[int, str]) -> list[str]:
    """Which of these sockets the process has, as far as we may look."""
    paths = []
    try:
        for link in (PROC / str(pid) / "fd").iterdir():
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            if match and int(match[1]) in names:
                paths.append(names[int(match[1])])
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
