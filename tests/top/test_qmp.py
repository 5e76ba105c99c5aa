# SPDX-License-Identifier: GPL-2.0-or-later
"""A monitor that hangs, is slow, is taken, talks nonsense: never waited for."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from fakes import BACKEND, Serve, good, server, stats

from top import qmp

LIMIT = 0.4
ANSWERS = {"query-name": {"name": "one"}, "query-ksm-stats": stats(BACKEND)}


def ask(path: str, limit: float = LIMIT) -> list[object]:
    begin = time.monotonic()
    try:
        return qmp.ask(path, list(ANSWERS), limit)[0]
    finally:
        assert time.monotonic() - begin < limit + 0.3


def state(path: str) -> str:
    with pytest.raises(qmp.NoAnswer) as caught:
        ask(path)
    return caught.value.state


@pytest.mark.parametrize("pretty", [False, True], ids=["lines", "pretty"])
@pytest.mark.parametrize("pause", [0, 0.002], ids=["whole", "pieces"])
def test_good(tmp_path: Path, pretty: bool, pause: float) -> None:
    with server(tmp_path / "s", good(ANSWERS, pretty=pretty, pause=pause)) as path:
        assert ask(path, 5) == list(ANSWERS.values())


def test_who_listens(tmp_path: Path) -> None:
    with server(tmp_path / "s", good(ANSWERS)) as path:
        with qmp.Session(path, LIMIT) as session:
            assert session.pid == os.getpid()


def test_another_listens(tmp_path: Path) -> None:
    """Nothing is said to a socket that is not that process's."""
    heard = []
    with server(tmp_path / "s", lambda peer: heard.append(peer.recv(99))) as path:
        with pytest.raises(qmp.NoAnswer) as caught:
            qmp.ask(path, list(ANSWERS), LIMIT, pid=1)
        assert caught.value.state == "refused"
        time.sleep(0.1)
    assert heard == [b""]


def test_unknown_command(tmp_path: Path) -> None:
    """A plain QEMU."""
    with server(tmp_path / "s", good({"query-name": {}})) as path:
        assert ask(path) == [{}, None]


def test_the_connection_ends(tmp_path: Path) -> None:
    """The next client has its turn."""
    with server(tmp_path / "s", good(ANSWERS)) as path:
        for _ in range(3):
            assert ask(path) == list(ANSWERS.values())


def hang(connection: socket.socket) -> None:
    time.sleep(5)


def drip(connection: socket.socket) -> None:
    """Something always comes."""
    connection.sendall(b'{"QMP": "')
    while True:
        connection.sendall(b"x")
        time.sleep(0.01)


def greet_and_hang(connection: socket.socket) -> None:
    connection.sendall(b'{"QMP": {}}\r\n')
    time.sleep(5)


def events(connection: socket.socket) -> None:
    """Without end, and no answer."""
    connection.sendall(b'{"QMP": {}}\r\n')
    while True:
        connection.sendall(b'{"event": "X"}\r\n')
        time.sleep(0.001)


def flood(connection: socket.socket) -> None:
    connection.sendall(b'{"QMP": "')
    while True:
        connection.sendall(b"x" * 65536)


def say(data: bytes) -> Serve:
    def serve(connection: socket.socket) -> None:
        connection.sendall(data)
        connection.recv(1 << 16)

    return serve


@pytest.mark.parametrize(
    ("serve", "expected"),
    [
        (hang, "silent"),
        (drip, "silent"),
        (greet_and_hang, "silent"),
        (events, "silent"),
        (lambda connection: None, "gone"),
        (say(b'{"QMP": {'), "silent"),
        (lambda connection: connection.sendall(b'{"QMP": {'), "gone"),
        (say(b'{"QMP": {}}\r\n'), "gone"),
        (say(b"SSH-2.0-OpenSSH\r\n"), "garbled"),
        (say(b"\0\1\2\xff" * 100), "garbled"),
        (say(b"{nonsense}                    \r\n"), "garbled"),
        (say(b'{"hello": 1}\r\n'), "garbled"),
        (say(b"[1, 2]}\r\n"), "garbled"),
        (say(b'{"a":' * 100000 + b"}"), "garbled"),
    ],
)
def test_bad(tmp_path: Path, serve: Serve, expected: str) -> None:
    with server(tmp_path / "s", serve) as path:
        assert state(path) == expected


def test_flood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is kept than any answer has."""
    monkeypatch.setattr(qmp, "LONGEST", 1 << 20)
    with server(tmp_path / "s", flood) as path:
        assert state(path) in ("garbled", "silent")


def test_another_client(tmp_path: Path) -> None:
    """One is served, one waits for its turn, one finds the queue full."""
    with server(tmp_path / "s", good(ANSWERS)) as path:
        first = socket.socket(socket.AF_UNIX)
        first.connect(path)
        assert first.recv(1 << 16)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for each in waiting:
            each.setblocking(False)
        waiting[0].connect(path)
        assert state(path) == "silent"
        try:
            waiting[1].connect(path)
        except BlockingIOError:
            pass
        assert state(path) == "busy"
        for each in (first, *waiting):
            each.close()
        time.sleep(0.1)
        assert ask(path) == list(ANSWERS.values())


def test_nobody(tmp_path: Path) -> None:
    assert state(str(tmp_path / "none")) == "gone"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "dead"))
    dead.close()
    assert state(str(tmp_path / "dead")) == "gone"


def test_no_path_for_a_socket(tmp_path: Path) -> None:
    assert state(str(tmp_path / ("x" * 120))) == "refused"


def test_no_socket(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "file"):
        if path != tmp_path:
            path.write_text("{}\n")
        with pytest.raises(qmp.NoAnswer, match="is no socket") as caught:
            ask(str(path))
        assert caught.value.state == "refused"
