# SPDX-License-Identifier: GPL-2.0-or-later
"""Prometheus' programs, which no machine must have installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from host.exits import Lacking
from host.paths import TOP


@pytest.fixture(scope="session")
def debian_program() -> Callable[[str, str], str]:
    """debian_program(PACKAGE, PROGRAM): its path, unpacked if need be.

    Of Debian 12: it runs on Debian 13, too.
    """

    def find(package: str, name: str) -> str:
        installed = shutil.which(name)
        if installed:
            return installed
        done = subprocess.run(
            [
                "bash",
                "-c",
                f". scripts/lib/common.sh; fetch_unpacked {package} bookworm",
            ],
            cwd=TOP,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode == Lacking.code:
            pytest.skip(f"no {name}: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        return str(Path(done.stdout.strip()) / "usr/bin" / name)

    return find
