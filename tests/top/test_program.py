# SPDX-License-Identifier: GPL-2.0-or-later
"""scripts/ksm-top itself, run by Debian's Python."""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import BACKEND, good, server, stats

from host.paths import TOP
from tools import ksm_top
from top.collect import Host, Sources

ANSWERS = {"query-name": {"name": "one"}, "query-ksm-stats": stats(BACKEND)}
PROGRAM = str(TOP / "scripts/ksm-top")
#: As when typed: nothing of the tests' environment.
ENV = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COLUMNS")}
ENV["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@pytest.fixture
def words(tmp_path: Path) -> Iterator[list[str]]:
    """One guest, and no other."""
    with server(tmp_path / "s", good(ANSWERS), clients=1000) as path:
        yield [PROGRAM, "--no-scan", "--qmp", path]


def run(words: list[str], *more: str, code: int = 0) -> str:
    done = subprocess.run(
        [*words, *more], env=ENV, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def test_plain_output(words: list[str]) -> None:
    """Once, and no line cut."""
    out = run(words)
    assert "\x1b" not in out and out.count("ksm-top") == 1
    assert "no more mappings" not in out and "is written too often" in out
    assert "one" in out and "381M" in out


def test_json(words: list[str]) -> None:
    found = json.loads(run(words, "--json"))
    (guest,) = found["guests"]
    assert guest["name"] == "one" and guest["state"] == "active"
    assert guest["saved"] == {
        "own": 2700 * 4096,
        "group": 1300 * 4096,
        "kernel": 0,
        "total": 4000 * 4096,
    }
    assert guest["stall"]["p99"] == pytest.approx(0.00087)
    assert found["total"]["profit"] == 4000 * 4096 - 2_410_000
    # a filter leaves the total of the host
    found = json.loads(run(words, "--json", "--filter", "profit<0"))
    assert found["guests"] == [] and found["total"]["guests"] == 1
    found = json.loads(run(words, "--json", "o*"))
    assert len(found["guests"]) == 1


def test_lines_of_json(words: list[str]) -> None:
    with subprocess.Popen(
        [*words, "--json", "--interval", "0.2"],
        env=ENV,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert json.loads(process.stdout.readline())["guests"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_metrics(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "qemu_ksm.prom"
    assert run(words, "--openmetrics", str(path)) == ""
    text = path.read_text()
    assert 'qemu_ksm_domain_cpu_seconds_total{domain="one"} 1.8' in text
    assert "# EOF" not in text and path.stat().st_mode & 0o777 == 0o644
    assert run(words, "--openmetrics", "-").endswith("\n# EOF\n")
    text = run(words, "--openmetrics", "/none/x.prom", code=1)
    assert "cannot write /none/x.prom" in text


def test_half_a_character(tmp_path: Path) -> None:
    """JSON can have it, a file cannot."""
    odd = BACKEND | {"scope": "\ud800", "reasons": []}
    answers = {"query-name": {"name": "a\udfffb"}, "query-ksm-stats": stats(odd)}
    with server(tmp_path / "s", good(answers), clients=9) as path:
        words = [PROGRAM, "--no-scan", "--qmp", path]
        path = str(tmp_path / "x.prom")
        run(words, "--openmetrics", path)
        assert 'qemu_ksm_domain_up{domain="a?b"} 1' in Path(path).read_text()
        assert 'scope="?"' in run(words, "--openmetrics", "-")


def test_notes_are_no_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the terminal, that is."""
    args = argparse.Namespace(openmetrics=str(tmp_path / "x.prom"), filter=[])
    args.names, args.sort, args.reverse = [], "saved", False
    host = Host(Sources(scan=False))
    snapshot = host.look()
    host.notes = ["cannot connect to \x1b[2J\nxen"]
    ksm_top.View(args, host).metrics(snapshot)
    assert capsys.readouterr().err == "ksm-top: cannot connect to ?[2J?xen\n"


def test_picture(words: list[str], tmp_path: Path) -> None:
    run(words, "--svg", str(tmp_path / "x.svg"))
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_live(words: list[str]) -> None:
    """On a terminal, until ^C; the terminal is put back."""
    main, other = pty.openpty()
    process = subprocess.Popen(
        [*words, "--interval", "0.3"],
        env={**ENV, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "20"},
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
    )
    os.close(other)
    seen, until = b"", time.monotonic() + 20
    interrupted = False
    while time.monotonic() < until:
        try:
            data = os.read(main, 1 << 16)
        except OSError:
            break
        seen += data
        if not interrupted and seen.count(b"ksm-top") >= 2:
            os.killpg(process.pid, signal.SIGINT)
            interrupted = True
    assert process.wait(10) == 0
    os.close(main)
    assert b"\x1b[?1049h" in seen and b"\x1b[?1049l" in seen
    assert b"381M" in seen


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--sort", "colour"), "--sort"),
        (("--filter", "colour=red"), "one of the fields name, pid"),
        (("--interval", "0"), "--interval"),
        (("--interval", "nan"), "--interval"),
        (("--limit", "-1"), "--limit"),
        (("--limit", "inf"), "--limit"),
        (("--once", "--interval", "1"), "--once"),
        (("--json", "--openmetrics", "-"), "not allowed with"),
    ],
)
def test_wrong_use(words: list[str], more: tuple[str, ...], text: str) -> None:
    assert text in run(words, *more, code=2)


def test_nothing_named() -> None:
    assert "--no-scan needs" in run([PROGRAM, "--no-scan"], code=2)


def test_full_disk(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*words, "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "ksm-top: cannot write: No space left on device\n"


def test_reader_ends(words: list[str]) -> None:
    """`| head`: no complaint."""
    line = " ".join(words) + " --json --interval 0.1 | head -n 1"
    done = subprocess.run(
        ["bash", "-c", line], env=ENV, capture_output=True, text=True, timeout=20
    )
    assert json.loads(done.stdout) and done.stderr == ""
