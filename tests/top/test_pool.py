# SPDX-License-Identifier: GPL-2.0-or-later
"""What a daemon answers to STATUS (docs/interop/ksm-pool.rst).

A real one is asked in tests/e2e/test_top.py.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from top import pool


def state(*members: bytes, count: int | None = None) -> bytes:
    number = len(members) if count is None else count
    numbers = [7, 60, 4096, 1000, 9999, 5_000, 20, 21, 22, 23, 3, 2, 1, 30, 31]
    numbers += [2_500_000_000, 4 << 20, 3, 40]
    head = struct.pack("<IIQ", 15, number, 0)
    return head + struct.pack("<19QII", *numbers, number, 0) + b"".join(members)


def member(name: bytes, pid: int, held: int) -> bytes:
    head = struct.pack("<64sIIQQQQQ", name, pid, 1, 131072, 9, held, 500_500, 600)
    return head + struct.pack("<QQQ", 2 << 20, 1, 20)


@contextmanager
def daemon(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[str]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(1)

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            serve(connection)

    threading.Thread(target=run, daemon=True).start()
    yield str(path)
    listener.close()


def answer(packet: bytes) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        assert connection.recv(100) == struct.pack("<IIQ", 14, 0, 0)
        connection.send(packet)

    return serve


def test_state(tmp_path: Path) -> None:
    packet = state(member(b"one", 11, 800), member("zwei\n".encode(), 22, 700))
    with daemon(tmp_path / "tenant.sock", answer(packet)) as path:
        found = pool.ask(path, 2)
    assert (found.group, found.state, found.generation) == ("tenant", "up", 7)
    assert (found.used, found.limit) == (1000 * 4096, 4096 * 4096)
    # what two have less what it takes
    assert found.saved == 500 * 4096
    assert (found.metadata, found.cpu_seconds) == (5000, 2.5)
    assert found.refused == {"full": 3, "share": 2, "memory": 1}
    one = found.members[0]
    assert (one.name, one.pid, one.held) == ("one", 11, 800 * 4096)
    assert one.share == pytest.approx(500.5 * 4096)
    assert one.published == 600 * 4096


REFUSED = struct.pack("<IIQI124s", 3, 0, 0, 4, b"this user may not ask")


@pytest.mark.parametrize(
    ("packet", "expected", "reason"),
    [
        (REFUSED, "refused", "this user may not ask"),
        (b"hello", "gone", ""),
        (b"x" * 200, "garbled", ""),
        (state(member(b"a", 1, 1), count=2), "garbled", ""),
        (state(count=1 << 30), "garbled", ""),
    ],
)
def test_bad(tmp_path: Path, packet: bytes, expected: str, reason: str) -> None:
    with daemon(tmp_path / "s", answer(packet)) as path:
        found = pool.ask(path, 2)
    assert found.state == expected
    assert reason in (found.reason or "") and found.used is None


def test_hangs(tmp_path: Path) -> None:
    with daemon(tmp_path / "s", lambda connection: time.sleep(5)) as path:
        begin = time.monotonic()
        assert pool.ask(path, 0.3).state == "silent"
        assert time.monotonic() - begin < 1


def test_nobody(tmp_path: Path) -> None:
    found = pool.ask(str(tmp_path / "tenant.sock"), 1)
    assert (found.group, found.state) == ("tenant", "gone")
