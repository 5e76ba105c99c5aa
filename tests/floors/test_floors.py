# SPDX-License-Identifier: GPL-2.0-or-later
"""Tests of scripts/lib/tools/floors.py: which imports it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import floors

GOOD = {
    "host/ksm.py": "import os\n",
    "guest/__init__.py": "",
    "guest/qemu.py": "from host import ksm\nfrom host.ksm import read\n",
    "bench/run.py": "import guest.qemu\n",
    "launch.py": "import bench.run\n",
}


def wrongs(root: Path, **changes: str) -> list[str]:
    """Of the good ones with FLOOR_MODULE=TEXT."""
    texts = GOOD | {k.replace("_", "/") + ".py": v for k, v in changes.items()}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return floors.wrongs(root)


def test_down_and_along(tmp_path: Path) -> None:
    assert wrongs(tmp_path, guest_ram="from guest import qemu\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "import guest.qemu\n",
        "from guest import qemu\n",
        "from guest.qemu import Guest\n",
        "def late():\n    from guest import qemu\n",
        "if TYPE_CHECKING:\n    from guest.qemu import Guest\n",
    ],
)
def test_upward(tmp_path: Path, text: str) -> None:
    found = wrongs(tmp_path, host_cgroup=text)
    assert found and all("host.cgroup imports guest" in each for each in found)


def test_nobody_imports_the_top(tmp_path: Path) -> None:
    assert "tools.check imports launch" in wrongs(
        tmp_path, tools_check="import launch\n"
    ).pop(0)


def test_circle_of_three(tmp_path: Path) -> None:
    assert wrongs(
        tmp_path,
        host_a="from host import b\n",
        host_b="from host.c import x\n",
        host_c="def f():\n    import host.a\n",
    ) == ["a circle of imports: host.a -> host.b -> host.c -> host.a"]


def test_relative(tmp_path: Path) -> None:
    assert wrongs(tmp_path, guest_ram="from . import qemu\n") == [
        "guest.ram imports relatively"
    ]
