# SPDX-License-Identifier: GPL-2.0-or-later
"""scripts/demo: what it shows, and that it leaves nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from host import ksmsys
from host.paths import TOP

DEMO = TOP / "scripts/demo"
#: a demo that comes to merging quickly and then goes on
LONG = ("--guests=1", "--memory=192", "--seconds=600")


class Marked:
    """Finds the processes of one test by a variable in their environment."""

    def __init__(self, tmp_path: Path) -> None:
        self.mark = f"QEMU_KSM_TEST={uuid.uuid4()}"
        self.tmp = tmp_path / "tmp"
        self.tmp.mkdir()
        name, value = self.mark.split("=")
        self.env = {**os.environ, name: value, "TMPDIR": str(self.tmp)}

    def processes(self) -> list[str]:
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (directory / "environ").read_bytes():
                    found.append((directory / "comm").read_text().strip())
            except OSError:
                continue
        return found

    def assert_nothing_left(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert self.processes() == []
        assert list(self.tmp.iterdir()) == []
        assert not knobs_left_changed()


def knobs_left_changed() -> bool:
    """Whether a holder of the knobs has died without putting them back."""
    with ksmsys.LOCK.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # some other program's, and it lives
        return ksmsys.SAVED.exists()


@pytest.fixture
def marked(tmp_path: Path) -> Marked:
    return Marked(tmp_path)


def read_knobs() -> dict[str, int | None]:
    """The knobs while no program of this project holds them."""
    with ksmsys.KsmKnobs():
        return {name: ksmsys.read(name) for name in ksmsys.KNOBS}


@pytest.fixture
def may_merge(image: Path) -> None:
    reason = ksmsys.why_not_controllable()
    if reason:
        pytest.skip(reason)


@pytest.mark.timeout(900)
def test_three_guests_save_a_third_and_more(
    marked: Marked, tmp_path: Path, may_merge: None
) -> None:
    figures = tmp_path / "figures.json"
    before = read_knobs()
    done = subprocess.run(
        [DEMO, "--json", figures],
        env=marked.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    data = json.loads(figures.read_text())
    assert data["guests"] == 3
    assert data["data_intact"] is True
    assert data["resident_mib"] > 3 * 512 * 0.6
    assert data["saved_mib"] >= 0.35 * data["resident_mib"]
    assert data["cpu_s"] > 0
    assert data["ksmd_cpu_s"] == 0
    assert data["seconds"] > 0
    assert "data is intact" in done.stdout
    assert "3 of 3 guests are up" in done.stdout
    # plain lines, no control sequences, when nobody watches
    assert "\x1b" not in done.stdout
    assert (TOP / "build/demo/savings.png").stat().st_size > 1000
    marked.assert_nothing_left()
    assert read_knobs() == before


def start_until(marked: Marked, scope: str, text: str) -> subprocess.Popen[str]:
    """Starts a long demo and returns once it has printed the text."""
    process = subprocess.Popen(
        [DEMO, *LONG, "--scope", scope],
        env=marked.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return process
    process.wait()
    raise AssertionError(f"the demo ended ({process.returncode}):\n{seen}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scope", "number", "text"),
    [
        ("host", signal.SIGHUP, "guests are up"),
        ("group", signal.SIGTERM, "saved"),
        ("group", signal.SIGKILL, "guests are up"),
        ("host", signal.SIGKILL, "saved"),
    ],
    ids=["hup-boot", "term-merge", "kill-boot", "kill-merge"],
)
def test_killed_demo_leaves_nothing(
    marked: Marked, may_merge: None, scope: str, number: int, text: str
) -> None:
    before = read_knobs()
    process = start_until(marked, scope, text)
    try:
        assert "qemu-system-x86" in marked.processes()
        process.send_signal(number)
        code = process.wait(60)
        assert code == (-9 if number == signal.SIGKILL else 128 + number)
        marked.assert_nothing_left()
        assert read_knobs() == before
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


@pytest.mark.timeout(600)
def test_ctrl_c_on_a_terminal_leaves_nothing(marked: Marked, may_merge: None) -> None:
    before = read_knobs()
    env = {**marked.env, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    # no threads run here yet: pty.fork is what makes a controlling terminal
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.execvpe(str(DEMO), [str(DEMO), *LONG, "--scope=host"], env)
        finally:
            os._exit(127)
    seen = ""
    sent = False
    status = None
    deadline = time.monotonic() + 500
    try:
        while status is None and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                try:
                    seen += os.read(terminal, 65536).decode("utf-8", "replace")
                except OSError:
                    pass  # the other end is closed
            # the live table, once merging runs
            if not sent and re.search(r"after [1-9]\d* s", seen):
                os.write(terminal, b"\x03")
                sent = True
            done, code = os.waitpid(pid, os.WNOHANG)
            status = code if done else None
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)
    assert sent, seen[-2000:]
    assert "guest1" in seen and "\x1b[" in seen
    assert status is not None and os.waitstatus_to_exitcode(status) == 130, seen[-2000:]
    assert "Traceback" not in seen
    marked.assert_nothing_left()
    assert read_knobs() == before


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--guests", "0"],
        ["--guests", "many"],
        ["--guests"],
        ["--memory", "1"],
        ["--memory", "-5"],
        ["--seconds", "0"],
        ["--scope", "everybody"],
        ["--scope=all"],
        ["--json", "/nonexistent/directory/figures.json"],
        ["--json", "/proc"],
        ["--json", "/proc/figures.json"],
        ["--unknown"],
        ["argument"],
    ],
    ids=" ".join,
)
def test_wrong_options(marked: Marked, may_merge: None, arguments: list[str]) -> None:
    done = subprocess.run(
        [DEMO, *arguments],
        env=marked.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr and "Traceback" not in done.stderr
    marked.assert_nothing_left()


@pytest.mark.timeout(120)
def test_too_many_guests_are_refused(marked: Marked, may_merge: None) -> None:
    done = subprocess.run(
        [DEMO, "--guests=64", "--memory=65536"],
        env=marked.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert "MiB available" in done.stderr
    marked.assert_nothing_left()


@pytest.mark.timeout(120)
def test_no_right_to_start_ksmd(marked: Marked, root: None, tmp_path: Path) -> None:
    """As `nobody`, from a copy of the scripts that anyone may read."""
    copy = Path(f"/tmp/qemu-ksm-{uuid.uuid4()}")
    try:
        subprocess.run(["mkdir", "-m755", copy], check=True)
        subprocess.run(["cp", "-r", TOP / "scripts", copy], check=True)
        subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
            + [str(copy / "scripts/demo"), "--scope=host"],
            env={**marked.env, "HOME": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    finally:
        subprocess.run(["rm", "-rf", copy], check=True)
    assert done.returncode == 3, done.stderr
    assert "/sys/kernel/mm/ksm" in done.stderr
    assert "root" in done.stderr or "CONFIG_KSM" in done.stderr


@pytest.mark.timeout(120)
def test_knobs_that_cannot_be_written(marked: Marked, root: None) -> None:
    """Root in a container often finds /sys mounted read-only."""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c"]
        + ["mount -t tmpfs tmpfs /sys/kernel/mm/ksm && echo 0 >/sys/kernel/mm/ksm/run"]
        + ["sh"],
        capture_output=True,
    )
    if done.returncode:
        pytest.skip("cannot mount in a namespace of its own here")
    script = (
        "mount -t tmpfs tmpfs /sys/kernel/mm/ksm && echo 0 >/sys/kernel/mm/ksm/run && "
        'mount -o remount,ro /sys/kernel/mm/ksm && exec "$0" --scope=host'
    )
    done2 = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(DEMO)],
        env=marked.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done2.returncode == 3, done2.stderr
    assert "/sys/kernel/mm/ksm/run" in done2.stderr
