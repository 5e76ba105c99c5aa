# SPDX-License-Identifier: GPL-2.0-or-later
"""ksm-hostd, the driver of ksmd: its processes killed, stopped and doubled.

With knobs that are files, where nothing else of the machine is meant; with the
kernel's own, and guests, in test_scope_host.py.  What it decides, and the way
back of each knob: hostd/tests/test-drive.c.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from host.hostd import need_hostd
from host.poold import Poold

FOUND = {"run": 0, "sleep_millisecs": 200, "pages_to_scan": 100}
#: all is to be back within a second; the rest is the test's own
SOON = 1.0


class Host:
    """Knobs, a daemon of the host's group with one member, and drivers."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.root = directory / "root"
        self.run_dir = directory / "run"
        self.run_dir.mkdir()
        self.knobs = self.root / "sys/kernel/mm/ksm"
        self.knobs.mkdir(parents=True)
        for name, value in (FOUND | {"full_scans": 7, "pages_sharing": 0}).items():
            self.put(name, value)
        self.daemon = stack.enter_context(Poold("--size", "32M"))
        self._stack = stack
        self._member = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.callback(self._member.close)
        self._member.connect(str(self.daemon.socket))
        hello = struct.pack("<IIQQQQ64s", 0x504D534B, 1, 1, 0, 0, 65536, b"test")
        self._member.send(struct.pack("<IIQ", 1, 0, 0) + hello)
        welcome, *_ = socket.recv_fds(self._member, 4096, 2)
        assert struct.unpack_from("<II8xII", welcome)[::3] == (2, 0)
        assert struct.unpack_from("<Q", welcome, 24) == (1,)
        self._given = 0

    def put(self, name: str, value: int | str) -> None:
        (self.knobs / name).write_text(f"{value}\n")

    def get(self, name: str) -> int:
        # a driver that writes it truncates it first
        return int((self.knobs / name).read_text() or -1)

    def found(self) -> dict[str, int]:
        return {name: self.get(name) for name in FOUND}

    def leave(self, mib: int) -> None:
        """The member gives so much to ksmd."""
        self._given += 1
        self._member.send(struct.pack("<IIQQQQ", 16, 0, 0, mib << 20, self._given, 0))

    def options(self) -> list[str]:
        return [
            *("--root", str(self.root), "--run-dir", str(self.run_dir)),
            *("--socket", str(self.daemon.socket)),
        ]

    def driver(self, *prefix: str, group: int | None = None) -> subprocess.Popen[str]:
        """`prefix` is a command in front; `group`: of processes, 0 a new one."""
        process = subprocess.Popen(
            [*prefix, need_hostd(), *self.options()],
            stderr=subprocess.PIPE,
            text=True,
            process_group=group,
        )

        def end() -> None:
            for pid in [process.pid, *children(process.pid)]:
                os.kill(pid, signal.SIGKILL)
            process.wait()

        self._stack.callback(lambda: process.poll() is None and end())
        return process

    def listen(self, path: Path) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._stack.callback(listener.close)
        listener.bind(str(path))
        listener.setblocking(False)
        return listener

    def status(self) -> dict[str, object]:
        words = [
            str(need_hostd()),
            "--status",
            "--json",
            "--run-dir",
            str(self.run_dir),
        ]
        done = subprocess.run(words, capture_output=True, text=True)
        found: dict[str, object] = json.loads(done.stdout) if done.stdout else {}
        return found

    def runs(self) -> bool:
        return self.get("run") == 1


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()]


def wait(what: Callable[[], bool], seconds: float = 10) -> float:
    """How long it took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < seconds, "it did not come"
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with ExitStack() as stack:
        yield Host(stack, tmp_path)


def hand_of(driver: subprocess.Popen[str]) -> int:
    (pid,) = children(driver.pid)
    return pid


def notified(host: Host) -> tuple[subprocess.Popen[str], Callable[[], list[str]]]:
    """A driver, and what it has told systemd."""
    path = host.run_dir.with_name("notify")
    listener = host.listen(path)
    driver = host.driver("env", f"NOTIFY_SOCKET={path}")

    def told() -> list[str]:
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(listener.recv(4096).decode())
        return found

    return driver, told


def end(driver: subprocess.Popen[str]) -> str:
    driver.terminate()
    _, said = driver.communicate(timeout=10)
    assert driver.returncode == 0, said
    return said


def test_runs_and_rests(host: Host) -> None:
    driver = host.driver()
    wait(lambda: host.status().get("state") == "rests")
    assert host.found() == FOUND
    host.leave(4)
    wait(host.runs)
    assert host.get("sleep_millisecs") == 20
    wait(lambda: host.status().get("state") == "runs")
    assert host.status()["left"] == 4 << 20
    # it gains, and goes on; then four scans bring nothing
    host.put("pages_sharing", 100)
    time.sleep(0.5)
    host.put("full_scans", 10)
    time.sleep(0.5)
    assert host.runs()
    host.put("full_scans", 11)
    wait(lambda: host.found() == FOUND)
    wait(lambda: host.status().get("state") == "rests")
    host.leave(2)
    wait(host.runs)
    said = end(driver)
    assert host.found() == FOUND
    assert "ended" in said
    assert host.status() == {}
    (lock,) = host.run_dir.iterdir()
    assert lock.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("who", ["driver", "hand", "both"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_dies(host: Host, who: str, how: signal.Signals) -> None:
    driver = host.driver()
    host.leave(4)
    wait(host.runs)
    hand = hand_of(driver)
    victims = {"driver": [driver.pid], "hand": [hand], "both": [hand, driver.pid]}
    for pid in victims[who]:
        os.kill(pid, how)
    if who == "both":
        # nobody is left; the next one puts them back, and goes on
        time.sleep(SOON)
        assert host.runs()
        if how == signal.SIGSTOP:
            for pid in victims[who]:
                os.kill(pid, signal.SIGKILL)
        driver.wait()
        host.leave(0)
        driver = host.driver()
    assert wait(lambda: host.found() == FOUND) < SOON
    if who == "hand":
        # another one takes its place
        wait(host.runs)
        assert hand_of(driver) != hand
    elif how == signal.SIGSTOP and who == "driver":
        time.sleep(0.5)
        assert host.found() == FOUND
        driver.send_signal(signal.SIGCONT)
        wait(host.runs)
    if driver.poll() is None:
        end(driver)
    assert host.found() == FOUND


@pytest.mark.parametrize("how", ["KILL", "STOP", "QUIT", "TSTP"])
def test_job(host: Host, how: str) -> None:
    """A shell's job is killed or stopped; and so by name, as far as that can be."""
    # whoever runs the tests in a shell's background ignores SIGQUIT
    driver = host.driver("env", "--default-signal", group=0)
    resource.prlimit(driver.pid, resource.RLIMIT_CORE, (0, 0))
    host.leave(4)
    wait(host.runs)
    number = signal.Signals[f"SIG{how}"]
    os.killpg(driver.pid, number)
    if how in ("QUIT", "TSTP"):
        for hand in children(driver.pid):
            os.kill(hand, number)
    assert wait(lambda: host.found() == FOUND) < SOON


def test_hand_is_reaped(host: Host) -> None:
    """Whoever began it ignores SIGCHLD: the hand's number stays its own."""
    driver = host.driver("env", "--ignore-signal=CHLD")
    host.leave(4)
    wait(host.runs)
    hand = hand_of(driver)
    os.kill(driver.pid, signal.SIGSTOP)
    os.kill(hand, signal.SIGKILL)
    time.sleep(0.2)
    state = Path(f"/proc/{hand}/stat")
    assert state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"
    os.kill(driver.pid, signal.SIGCONT)
    wait(lambda: children(driver.pid) not in ([], [hand]))
    end(driver)


def test_second_waits(host: Host) -> None:
    first = host.driver()
    host.leave(4)
    wait(host.runs)
    wait(lambda: host.status().get("state") == "runs")
    second, told = notified(host)
    time.sleep(0.5)
    assert len(children(second.pid)) == 0
    # systemd does not wait for it, and what the first one says is not lost
    assert "READY=1" in told()
    assert host.status()["pid"] == first.pid
    first.kill()
    assert wait(lambda: host.found() == FOUND) < SOON
    # the second takes over
    wait(host.runs)
    said = end(second)
    assert "another ksm-hostd" in said
    assert host.found() == FOUND


def test_anybody_reads(host: Host) -> None:
    """Who may read a knob may lock it: that keeps nobody from driving."""
    with (host.knobs / "run").open() as knob:
        fcntl.flock(knob, fcntl.LOCK_EX)
        driver = host.driver()
        host.leave(4)
        wait(host.runs)
        end(driver)


@pytest.mark.parametrize("knob", FOUND)
def test_steps_back(host: Host, knob: str) -> None:
    """While ksmd runs it is theirs, as it is; else what was found comes back."""
    driver = host.driver()
    host.leave(4)
    wait(host.runs)
    theirs = 0 if knob == "run" else 4321
    left = (FOUND if knob == "run" else host.found()) | {knob: theirs}
    host.put(knob, theirs)
    wait(lambda: host.status().get("state") == "passive")
    assert host.found() == left
    host.leave(8)
    time.sleep(1)
    assert host.found() == left
    assert knob in str(host.status()["why"])
    host.put("run", 0)
    driver.send_signal(signal.SIGHUP)
    host.leave(9)
    wait(host.runs)
    assert knob in end(driver)
    assert host.found() == left | {"run": 0}


@pytest.mark.parametrize("since", ["theirs", "rebooted"])
def test_record_of_another_time(host: Host, since: str) -> None:
    """What a dead driver wrote down does not stop an administrator's ksmd."""
    driver = host.driver()
    host.leave(4)
    wait(host.runs)
    for pid in [hand_of(driver), driver.pid]:
        os.kill(pid, signal.SIGKILL)
    driver.wait()
    record = host.run_dir / "hostd.knobs"
    assert record.exists()
    if since == "theirs":
        host.put("pages_to_scan", 5000)
    else:
        _, *rest = record.read_text().splitlines()
        record.write_text("\n".join(["00000000-another-boot", *rest, ""]))
    left = host.found()
    driver = host.driver()
    wait(lambda: host.status().get("state") == "passive")
    assert host.found() == left
    end(driver)
    assert host.found() == left
    assert not record.exists()


def test_already_runs(host: Host) -> None:
    host.put("run", 1)
    driver = host.driver()
    host.leave(4)
    wait(lambda: host.status().get("state") == "passive")
    assert host.found() == FOUND | {"run": 1}
    assert "already" in end(driver)
    assert host.found() == FOUND | {"run": 1}


def test_advisor(host: Host) -> None:
    driver = host.driver()
    host.leave(4)
    wait(host.runs)
    host.put("advisor_mode", "none [scan-time]")
    wait(lambda: host.status().get("state") == "passive")
    # it drives what runs now
    assert host.runs()
    assert "scan-time" in end(driver)
    assert host.runs()


def test_restores_at_last(host: Host) -> None:
    """What cannot be put back now is put back when it can."""
    driver = host.driver()
    host.leave(4)
    wait(host.runs)
    knob = host.knobs / "sleep_millisecs"
    aside = knob.rename(host.knobs / "aside")
    host.put("full_scans", 99)
    wait(lambda: host.status().get("state") == "passive")
    assert (host.run_dir / "hostd.knobs").exists()
    aside.rename(knob)
    wait(lambda: host.found() == FOUND)
    end(driver)


def test_record_cannot_be_written(host: Host) -> None:
    """What the next driver would not know of is not begun; later it is."""
    driver = host.driver()
    wait(lambda: host.status().get("state") == "rests")
    (host.run_dir / "hostd.knobs").mkdir()
    host.leave(4)
    wait(lambda: host.status().get("state") == "passive")
    assert "hostd.knobs" in str(host.status()["why"])
    assert host.found() == FOUND
    (host.run_dir / "hostd.knobs").rmdir()
    wait(host.runs)
    wait(lambda: host.status().get("state") == "runs")
    end(driver)
    assert host.found() == FOUND


def test_new_run_directory(host: Host) -> None:
    host.run_dir.rmdir()
    driver = host.driver()
    wait(lambda: host.status().get("state") == "rests")
    end(driver)


def test_no_run_directory(host: Host) -> None:
    host.run_dir.rmdir()
    host.run_dir.write_text("")
    driver = host.driver()
    host.leave(4)
    wait(host.runs)
    driver.kill()
    assert wait(lambda: host.found() == FOUND) < SOON
    _, said = driver.communicate(timeout=10)
    assert "cannot be written" in said


def test_daemon_comes_and_goes(host: Host) -> None:
    driver = host.driver()
    host.leave(4)
    wait(host.runs)
    os.kill(host.daemon.pid, signal.SIGSTOP)
    time.sleep(2)
    # it goes by what it heard last
    assert host.runs()
    os.kill(host.daemon.pid, signal.SIGCONT)
    host.leave(0)
    wait(lambda: host.found() == FOUND)
    host.daemon.stop()
    time.sleep(1)
    end(driver)


def test_daemon_hangs(host: Host) -> None:
    """And has no room for another connection: no reason to hang, too."""
    driver = host.driver()
    host.leave(4)
    wait(host.runs)
    hand = hand_of(driver)
    with ExitStack() as waiting:
        waiting.callback(os.kill, host.daemon.pid, signal.SIGCONT)
        os.kill(host.daemon.pid, signal.SIGSTOP)
        full = False
        while not full:
            one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            waiting.enter_context(one).setblocking(False)
            full = one.connect_ex(str(host.daemon.socket)) == errno.EAGAIN
        time.sleep(2)
        assert host.runs() and hand_of(driver) == hand
        end(driver)


def test_hand_inherits_nothing(host: Host) -> None:
    """No connection to the daemon, which would outlive the driver's."""
    driver = host.driver()
    host.leave(4)
    wait(host.runs)
    hand = hand_of(driver)
    os.kill(hand, signal.SIGKILL)
    wait(lambda: children(driver.pid) not in ([], [hand]))
    files = Path(f"/proc/{hand_of(driver)}/fd")

    def sockets() -> int:
        found = 0
        for file in files.iterdir():
            # it reads and writes knobs meanwhile
            with suppress(FileNotFoundError):
                found += os.readlink(file).startswith("socket:")
        return found

    wait(lambda: sockets() == 1)
    end(driver)


def test_no_right(root: None) -> None:
    """Passive, and it says what an administrator can do."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        directory.chmod(0o755)
        host = Host(stack, directory)
        nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        words = [*nobody, str(need_hostd()), *host.options()]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as driver:
            host.leave(4)
            time.sleep(1)
            assert driver.poll() is None
            said = end(driver)
        assert host.found() == FOUND
    assert "systemctl start ksm-hostd" in said


def test_wrong_options() -> None:
    for words in (["--max-cpu", "0"], ["--json"], ["what"], ["--nothing"]):
        done = subprocess.run([need_hostd(), *words], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr


def test_no_ksm(tmp_path: Path) -> None:
    words = [str(need_hostd()), "--root", str(tmp_path), "--run-dir", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    assert done.returncode == 1
    assert "no KSM" in done.stderr
