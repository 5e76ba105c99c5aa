# SPDX-License-Identifier: GPL-2.0-or-later
"""Tests of scripts/lib/tools/kernels.py: what guests may say, and how it counts."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import pytest

from guest import qemu
from tools import kernels


def known(*names: str) -> list[kernels.Test]:
    return [kernels.Test(name, ["unit"], [name], {}, 10, []) for name in names]


def counts(outcome: kernels.Outcome) -> tuple[int, int, int]:
    return outcome.passed, len(outcome.failed), len(outcome.skipped)


GOOD = """@linux 6.12.107+deb13-cloud-amd64
@begin pool
1..2
ok 1 /pool/one
ok 2 /pool/two # SKIP no swap
@end pool 0 1
@begin prop
# seed 1
@end prop 0 30
@done
"""


def test_counts_cases_and_programs_without_any() -> None:
    outcome = kernels.judge("Linux", GOOD, known("pool", "prop"))
    assert counts(outcome) == (2, 0, 1)
    assert "no swap" in outcome.skipped[0]


def test_lines_of_a_serial_port_end_in_two_characters() -> None:
    text = GOOD.replace("\n", "\r\n")
    assert counts(kernels.judge("Linux", text, known("pool"))) == (2, 0, 1)


def test_a_test_that_did_not_run_fails() -> None:
    outcome = kernels.judge("Linux", GOOD, known("pool", "prop", "fuzz"))
    assert outcome.failed == ["Linux: fuzz was not run"]


def test_a_guest_that_died_in_a_test_fails() -> None:
    text = GOOD.partition("ok 2")[0]
    outcome = kernels.judge("Linux", text, known("pool"))
    assert outcome.failed == ["Linux: pool did not end"]


@pytest.mark.parametrize("code", [1, 124, 134, 137, 139])
def test_a_program_that_died_fails(code: int) -> None:
    outcome = kernels.judge_test("pool", ["1..2", "ok 1 /pool/one"], code, False)
    assert outcome.failed == [f"pool (exit {code})"]


def test_an_assertion_is_named() -> None:
    what = "test-pool.c:7:test_one: assertion failed: (a / b == 2)"
    lines = ["1..2", "**", f"ERROR:../../tests/{what}", f"Bail out! ERROR:../{what}"]
    outcome = kernels.judge_test("pool", lines, 134, False)
    assert outcome.failed == [f"pool (exit 134: {what})"]


def test_fewer_cases_than_planned_fail() -> None:
    outcome = kernels.judge_test("pool", ["1..2", "ok 1 /pool/one"], 0, False)
    assert outcome.failed == ["pool (1 of 2 cases)"]


def test_a_failed_case_counts_once() -> None:
    lines = ["1..2", "ok 1 /pool/one", "not ok 2 /pool/two - assertion failed"]
    assert counts(kernels.judge_test("pool", lines, 1, False)) == (1, 1, 0)


def test_only_an_old_kernel_may_refuse() -> None:
    refusal = "1..0 # SKIP the kernel lacks UFFDIO_MOVE (Linux 6.8)"
    assert counts(kernels.judge_test("system", [refusal], 77, True)) == (1, 0, 0)
    assert counts(kernels.judge_test("system", [refusal], 77, False)) == (0, 0, 1)
    some = ["1..6", "ok 1 a small program runs", refusal]
    assert counts(kernels.judge_test("ksm-run", some, 77, True)) == (2, 0, 0)
    other = "1..0 # SKIP no memory cgroup can be made"
    assert counts(kernels.judge_test("system", [other], 77, True)) == (0, 0, 1)
    text = GOOD.replace("no swap", "the kernel lacks UFFDIO_MOVE")
    assert counts(kernels.judge("Linux", text, known("pool"))) == (2, 0, 1)
    text = text.replace("6.12.107", "6.1.176")
    assert counts(kernels.judge("Linux", text, known("pool"))) == (3, 0, 0)


@pytest.mark.parametrize(
    "line",
    [
        "[   12.1] WARNING: CPU: 1 PID: 77 at mm/page_alloc.c:4 free_pages+0x1/0x2",
        "[   12.1] BUG: Bad page state in process test-merge  pfn:12345",
        "[   12.1] BUG: Bad rss-counter state mm:000 type:MM_ANONPAGES val:1",
        "[   12.1] kernel BUG at mm/userfaultfd.c:1!",
        "[   12.1] INFO: task test-prop:12 blocked for more than 120 seconds.",
    ],
)
def test_what_the_kernel_complains_of(tmp_path: Path, line: str) -> None:
    console = tmp_path / "console.log"
    console.write_text(f"{line}\n[    2.1] {kernels.SEPARATOR}\nall is well\n")
    assert kernels.complaints(console) == []
    console.write_text(f"[    2.1] {kernels.SEPARATOR}\r\n{line}\r\nall is well\r\n")
    assert kernels.complaints(console) == [line]


def test_a_late_cpu_is_no_complaint(tmp_path: Path) -> None:
    console = tmp_path / "console.log"
    line = "watchdog: BUG: soft lockup - CPU#1 stuck for 23s! [test-prop:77]"
    console.write_text(f"{kernels.SEPARATOR}\n{line}\n")
    assert kernels.complaints(console) == []


def test_the_time_of_a_test_is_bounded() -> None:
    assert kernels.bounded(["prop", "--seconds", "60"], 20) == [
        *("prop", "--seconds", "20")
    ]
    assert kernels.bounded(["prop", "--seconds", "5"], 20)[2] == "5"


def test_the_archive_can_be_unpacked(tmp_path: Path) -> None:
    archive = kernels.Archive()
    archive.add("/deep/down/file", 0o100644, b"odd length")
    archive.add("/deep/down/file", 0o100644, b"not twice")
    archive.add("/other", 0o100755, b"")
    listing = subprocess.run(
        ["/usr/bin/python3", "-c", UNPACK],
        input=gzip.decompress(archive.finish()),
        capture_output=True,
        check=True,
    ).stdout.decode()
    assert listing.split() == [
        *("/deep", "40755", "0", "/deep/down", "40755", "0"),
        *("/deep/down/file", "100644", "10", "/other", "100755", "0"),
    ]


#: a reader of its own, after Documentation/driver-api/early-userspace
UNPACK = """
import sys
data, at = sys.stdin.buffer.read(), 0
while True:
    assert data[at:at + 6] == b'070701'
    field = [int(data[at + 6 + 8 * i:at + 14 + 8 * i], 16) for i in range(13)]
    name = data[at + 110:at + 110 + field[11] - 1].decode()
    assert data[at + 109 + field[11]] == 0
    at = (at + 110 + field[11] + 3) // 4 * 4
    if name == 'TRAILER!!!':
        break
    print('/' + name, '%o' % field[1], field[6])
    at = (at + field[6] + 3) // 4 * 4
"""


def test_a_kernel_that_does_not_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last words are shown, and that is a failure, in the real QEMU."""
    if not qemu.qemu_binary().exists():
        pytest.skip("build/qemu is not built")
    build = tmp_path / "build"
    build.mkdir()
    for name in ("vmlinuz", "busybox", "version"):
        (tmp_path / name).write_bytes(b"\xf4" * 4096)
    (tmp_path / "version").write_text("0.0-1")
    monkeypatch.setattr(kernels, "fetch_kernel", lambda release: tmp_path)
    monkeypatch.setattr(kernels, "LOGS", tmp_path)
    monkeypatch.setattr(kernels, "BOOT_SECONDS", 20)
    outcome = kernels.run_kernel("potato", build, [])
    assert len(outcome.failed) == 1 and "did not boot" in outcome.failed[0]
    assert "Linux 0.0-1 (potato)" in capsys.readouterr().out


def test_a_kernel_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fetch_kernel", lambda release: "no network")
    outcome = kernels.run_kernel("potato", Path("/"), [])
    assert outcome.skipped == ["Debian's potato: no network"]
    assert counts(outcome) == (0, 0, 1)
