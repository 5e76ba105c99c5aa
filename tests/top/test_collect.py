# SPDX-License-Identifier: GPL-2.0-or-later
"""Processes that look like QEMUs: found, asked, and never waited for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path

import pytest

from host.paths import TOP
from top import pool, procfs
from top.collect import Host, Sources, make_unique
from top.model import Guest, Snapshot

LIMIT = 2.0
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(NAME, HOW, WORD...): with the QMP socket tmp_path/NAME."""
    program = tmp_path / "qemu-system-x86_64"
    program.symlink_to(sys.executable)
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{here}:{TOP}/scripts/lib"}
    with ExitStack() as stack:

        def begin(
            name: str, how: str = "good", *words: str, path: str = ""
        ) -> subprocess.Popen[str]:
            listen = f"unix:{path or tmp_path / name},server=on,wait=off"
            if path == "-":
                listen = "none"
            process = stack.enter_context(
                subprocess.Popen(
                    [program, here / "fake_qemu.py", "-name", name, "-qmp", listen]
                    + [*words, how],
                    env=env,
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        yield begin


@pytest.fixture
def host() -> Host:
    return Host(Sources(limit=LIMIT))


def name() -> str:
    """Other guests of the machine are found, too."""
    return f"guest-{uuid.uuid4().hex[:8]}"


def look(host: Host) -> Snapshot:
    begin = time.monotonic()
    snapshot = host.look()
    assert time.monotonic() - begin < 2 * LIMIT + 1
    return snapshot


def find(host: Host, name: str) -> Guest:
    (found,) = [each for each in look(host).guests if each.name == name]
    return found


def test_found(start: Start, host: Host) -> None:
    one = name()
    process = start(one)
    guest = find(host, one)
    assert (guest.pid, guest.source, guest.state) == (process.pid, "qmp", "active")
    assert guest.saved.own == 2700 * 4096
    assert guest.cost.cpu_share is None
    # its time has not gone on since
    assert find(host, one).cost.cpu_share == 0


def test_plain(start: Start, host: Host) -> None:
    one = name()
    process = start(one, "plain")
    guest = find(host, one)
    assert guest.state == "plain" and guest.reasons == []
    statm = Path(f"/proc/{process.pid}/statm").read_text().split()
    assert guest.resident == pytest.approx(int(statm[1]) * 4096, rel=0.2)


def test_relative_path(start: Start, host: Host) -> None:
    """To its directory, which is not ours."""
    one = name()
    start(one, path="relative")
    assert find(host, one).state == "active"


def test_abstract_name(start: Start, host: Host) -> None:
    one = name()
    start(one, path=f"{one},abstract=on")
    assert find(host, one).state == "active"


def test_hangs(start: Start, host: Host) -> None:
    """The others are not kept waiting, and it is not asked twice at once."""
    slow, quick = name(), name()
    start(slow, "hang")
    start(quick)
    for _ in range(3):
        snapshot = look(host)
        states = {each.name: each.state for each in snapshot.guests}
        assert states[slow] == "silent" and states[quick] == "active"
    guest = find(host, slow)
    # what the kernel says of it
    assert guest.resident and guest.saved.own is None
    assert guest.reasons[0].text


def test_stopped(start: Start, host: Host) -> None:
    one = name()
    process = start(one)
    process.send_signal(signal.SIGSTOP)
    # also while the signal is on its way
    assert find(host, one).state == "stopped"
    begin = time.monotonic()
    assert find(host, one).state == "stopped"
    assert time.monotonic() - begin < LIMIT
    process.send_signal(signal.SIGCONT)
    assert find(host, one).state == "active"


def test_vanishes(start: Start, host: Host) -> None:
    one = name()
    process = start(one)
    assert find(host, one).state == "active"
    process.kill()
    process.wait()
    assert one not in [each.name for each in look(host).guests]


def test_vanishes_while_asked(start: Start, host: Host) -> None:
    one = name()
    process = start(one, "hang")
    subjects = host._subjects  # as if it ended after it was found

    def kill(*args: object) -> object:
        found = subjects(*args)  # type: ignore[arg-type]
        process.kill()
        process.wait()
        return found

    host._subjects = kill  # type: ignore[method-assign,assignment]
    assert find(host, one).state == "gone"


def test_taken(start: Start, host: Host, tmp_path: Path) -> None:
    """Somebody else has the monitor: seen without connecting."""
    one = name()
    start(one)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / one))
        assert client.recv(1 << 16)
        begin = time.monotonic()
        assert find(host, one).state == "busy"
        assert time.monotonic() - begin < LIMIT
    time.sleep(0.1)
    assert find(host, one).state == "active"


def forged(path: str) -> str:
    """A name that makes lines of its own of a table of sockets."""
    return f"\0{uuid.uuid4().hex[:4]}\nX: 1 0 0 0001 03 9 {path}\n1 2 3 zz 5 6 7 8"


@contextmanager
def listening(name: str) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
            with listener.accept()[0]:
                yield


def test_forged_name(start: Start, host: Host, tmp_path: Path) -> None:
    """Nobody can hide a guest by the name of a socket, nor end the program."""
    one = name()[-8:]  # a socket's name has 108 bytes, and pytest's path many
    start(one)
    with listening(forged(str(tmp_path / one))):
        assert find(host, one).state == "active"


def test_anothers_socket(start: Start, host: Host, tmp_path: Path) -> None:
    """A process may name a socket that is not its own."""
    one, liar = name(), name()
    start(one)
    start(liar, "none", "-qmp", f"unix:{tmp_path / one},server=on", path="-")
    states = {each.name: each.state for each in look(host).guests}
    assert (states[one], states[liar]) == ("active", "refused")


def test_same_path(start: Start, host: Host, tmp_path: Path) -> None:
    """Somebody has a client at a socket of that name, in another place."""
    one = name()
    start(one, path="relative")
    with chdir(tmp_path.parent):
        with listening("relative"):
            assert find(host, one).state == "active"
        Path("relative").unlink()


def test_file_system_hangs(
    start: Start, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are not kept waiting for a path that one of them names."""
    slow, quick = name(), name()
    process = start(slow)
    start(quick)
    reach = procfs.reach

    def hang(pid: int, path: str) -> str:
        if pid == process.pid:
            time.sleep(3 * LIMIT)
        return reach(pid, path)

    monkeypatch.setattr(procfs, "reach", hang)
    states = {each.name: each.state for each in look(host).guests}
    assert (states[slow], states[quick]) == ("silent", "active")


def test_named_twice(start: Start, tmp_path: Path) -> None:
    """By another path to the same socket: once."""
    one = name()
    start(one)
    (tmp_path / "link").symlink_to(tmp_path)
    path = str(tmp_path / "link" / one)
    assert find(Host(Sources(sockets=[path], limit=LIMIT)), one).state == "active"


def test_unique_names() -> None:
    """Also beside a guest that has the name of another with its pid."""
    guests = [Guest("a", 1), Guest("a", 2), Guest("a@1", 3), Guest("a@2'", 4)]
    make_unique(guests)
    assert len({guest.name for guest in guests}) == 4
    assert [guest.name for guest in guests[2:]] == ["a@1", "a@2'"]


def test_same_name(start: Start, host: Host, tmp_path: Path) -> None:
    one = name()
    pids = [start(one, path=str(tmp_path / letter)).pid for letter in "ab"]
    names = {each.name: each.pid for each in look(host).guests}
    for pid in pids:
        assert names[f"{one}@{pid}"] == pid
    assert one not in names


def test_nothing_to_reach(start: Start, host: Host) -> None:
    """A monitor that somebody opened for it: only the kernel tells of it."""
    one = name()
    chardev = ("-chardev", "socket,id=m,fd=5,server=on", "-mon", "m,mode=control")
    process = start(one, "none", *chardev, path="-")
    guest = find(host, one)
    assert (guest.state, guest.source, guest.pid) == ("unseen", "proc", process.pid)
    assert "another program" in guest.reasons[0].text
    assert guest.resident and guest.saved.kernel == 0


def test_note_for_ordinary_users(
    start: Start, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    chardev = ("-chardev", "socket,id=m,fd=5,server=on", "-mon", "m,mode=control")
    start(name(), "none", *chardev, path="-")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    look(host)
    assert not host.notes
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    look(host)
    assert "by root only" in host.notes[0]


def test_libvirts_own(start: Start, host: Host) -> None:
    """Not asked through libvirt unless we are told to."""
    one = name()
    chardev = ("-chardev", "socket,id=m,fd=5,server=on", "-mon", "m,mode=control")
    start(one, "none", "-uuid", str(uuid.uuid4()), *chardev, path="-")
    guest = find(host, one)
    assert guest.state == "unseen" and "--libvirt" in guest.reasons[0].text


def test_capability_probe(start: Start, host: Host) -> None:
    one = name()
    start(one, "good", "-machine", "none,accel=kvm")
    assert one not in [each.name for each in look(host).guests]


def test_only_what_is_named(start: Start, tmp_path: Path) -> None:
    one, other = name(), name()
    process = start(one)
    start(other)
    host = Host(Sources(scan=False, sockets=[str(tmp_path / one)], limit=LIMIT))
    (guest,) = look(host).guests
    assert (guest.pid, guest.state) == (process.pid, "active")
    host = Host(Sources(scan=False, sockets=[str(tmp_path / "none")], limit=LIMIT))
    (guest,) = look(host).guests
    assert guest.state == "gone"


def test_named_and_found(start: Start, tmp_path: Path) -> None:
    """Once."""
    one = name()
    start(one)
    host = Host(Sources(sockets=[str(tmp_path / one)], limit=LIMIT))
    assert find(host, one).state == "active"


def test_systemds_socket(start: Start, host: Host, tmp_path: Path) -> None:
    """No daemon is begun by looking: nobody connects to its socket."""
    one, path = name(), tmp_path / "tenant.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as systemd:
        systemd.bind(str(path))
        systemd.listen(1)
        systemd.settimeout(0.1)
        memory = f"memory-backend-ksm,id=r,group=tenant,group-socket={path}"
        start(one, "good", "-object", memory)
        snapshot = look(host)
        (found,) = [each for each in snapshot.pools if each.socket == str(path)]
        assert (found.group, found.state) == ("tenant", "gone")
        with pytest.raises(TimeoutError):
            systemd.accept()


def test_cpu_shares(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    """A daemon that used 0.3 s more has part of a core; one that began anew
    has none yet."""
    answers = iter([(7, 1.0), (7, 1.3), (8, 0.1)])

    def ask(path: str, seconds: float) -> pool.Pool:
        generation, used = next(answers)
        return pool.Pool("a", path, generation=generation, cpu_seconds=used)

    monkeypatch.setattr(pool, "ask", ask)
    host.sources.scan, host.sources.pools = False, ["/none/a.sock"]
    shares = []
    for _ in range(3):
        begin = time.monotonic()
        shares.append(look(host).pools[0].cpu_share)
        time.sleep(max(0, 0.5 - (time.monotonic() - begin)))
    assert shares[0] is None and shares[2] is None
    assert shares[1] == pytest.approx(0.6, rel=0.2)
