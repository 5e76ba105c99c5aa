# SPDX-License-Identifier: GPL-2.0-or-later
"""What can be tried of the packages without building them: scripts that others run,
with other programs in the place of those that they call; lists that must agree.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from host.paths import TOP

DEBIAN = TOP / "debian"
WRAPPER = TOP / "scripts/qemu-ksm-emulator"


def run(*words: str | Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Finds programs in path only."""
    return subprocess.run(
        words,
        env={"PATH": str(path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_wrapper_runs_nothing_but_qemu(tmp_path: Path) -> None:
    """AppArmor lets libvirt's guests execute little else."""
    program(tmp_path / "real/qemu", 'printf "%s\\n" "$@"')
    wrapper = tmp_path / "qemu"
    wrapper.symlink_to(WRAPPER)
    empty = tmp_path / "empty"
    empty.mkdir()
    for _ in ("absent", "dangling"):
        done = run(wrapper, path=empty)
        assert done.returncode == 3
        assert f"{wrapper}.real is not there" in done.stderr
        assert done.stderr.count("\n") == 1
        (tmp_path / "qemu.real").unlink(missing_ok=True)
        (tmp_path / "qemu.real").symlink_to(tmp_path / "nowhere")
    (tmp_path / "qemu.real").unlink()
    (tmp_path / "qemu.real").symlink_to("real/qemu")
    ram = '{"qom-type":"memory-backend-ram","id":"ram0"}'
    done = run(wrapper, "-object", ram, "a b", path=empty)
    assert done.stdout.splitlines() == ["-object", ram.replace("-ram", "-ksm", 1), "a b"]
    assert not done.stderr
