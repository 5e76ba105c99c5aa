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


C_GOOD = {
    "base/prim.h": "int prim_call(int x);\n",
    "base/prim.c": '#include "base/prim.h"\n\nint prim_call(int x)\n{\n}\n',
    "merge/stage.h": '#include "base/prim.h"\nvoid stage_init(void);\n',
    "merge/stage-back.c": "void stage_init(void)\n{\n    prim_call(1);\n}\n",
    "engine/scan.h": "static inline int\nscan_due(void) { return 1; }\n",
}


def c_wrongs(root: Path, name: str = "base/x.c", text: str = "") -> list[str]:
    for file, content in (C_GOOD | {name: text}).items():
        path = root / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return floors.c_wrongs(root)


def test_c_down(tmp_path: Path) -> None:
    assert c_wrongs(tmp_path, "engine/x.c", "void f(void) { stage_init(); }") == []
    assert floors.c_arrows(tmp_path)["merge.stage"] == {"base.prim"}


@pytest.mark.parametrize(
    "text",
    [
        '#include "merge/stage.h"\n',
        "extern void stage_init(void);\nint f(void)\n{\n    stage_init();\n}\n",
        "int f(void)\n{\n    return scan_due();\n}\n",
        "void (*f)(void) = stage_init;\n",
    ],
)
def test_c_upward(tmp_path: Path, text: str) -> None:
    (found,) = c_wrongs(tmp_path, "base/x.c", text)
    assert found.startswith("base.x imports") and "above" in found


def test_c_comments_are_no_calls(tmp_path: Path) -> None:
    assert c_wrongs(tmp_path, "base/x.c", "/* see stage_init() */\n") == []


def test_c_circle(tmp_path: Path) -> None:
    (found,) = c_wrongs(
        tmp_path, "base/x.c", "int x_f(void)\n{\n    return prim_call(2);\n}\n"
    ) + c_wrongs(
        tmp_path, "base/prim.c", "int prim_call(int x)\n{\n    return x_f();\n}\n"
    )
    assert found == "a circle of imports: base.prim -> base.x -> base.prim"


def test_c_elsewhere(tmp_path: Path) -> None:
    assert c_wrongs(tmp_path, "cellar/x.c") == ["cellar.x is on no floor"]


def of_tests(root: Path, name: str, text: str) -> list[str]:
    src, tests = root / "src", root / "tests"
    src.mkdir()
    tests.mkdir()
    (tests / "rooms.h").write_text('#include "merge/stage.h"\n')
    (tests / name).write_text(text)
    assert c_wrongs(src) == []
    return floors.tests_wrongs(src, tests)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("test-stage.c", '#include "rooms.h"\nvoid f(void) { prim_call(1); }\n'),
        ("test-scan.c", "void f(void) { scan_due(); }\n"),
        ("test-fuzz.c", '#include "engine/scan.h"\n'),
        ("test-prim.c", "void f(void) { ops.scan_due = x->scan_due; }\n"),
        ("test-prim.c", "/* as scan_due() */\n"),
        ("slow-file.h", '#include "base/prim.h"\n'),
    ],
)
def test_tests_down(tmp_path: Path, name: str, text: str) -> None:
    assert of_tests(tmp_path, name, text) == []


@pytest.mark.parametrize(
    ("name", "text", "above"),
    [
        ("test-stage.c", '#include "engine/scan.h"\n', "engine.scan"),
        ("test-stage.c", "void f(void) { scan_due(); }\n", "engine.scan"),
        ("test-stage.c", '#include "house.h"\n', "engine.house"),
        ("test-prim.c", '#include "rooms.h"\n', "merge.rooms"),
        ("rooms.c", '#include "engine/scan.h"\n', "engine.scan"),
        ("util.h", '#include "merge/stage.h"\n', "merge.stage"),
    ],
)
def test_tests_upward(tmp_path: Path, name: str, text: str, above: str) -> None:
    (found,) = of_tests(tmp_path, name, text)
    assert found.startswith("test of ") and f"imports {above}, which" in found


def test_tests_of_nothing(tmp_path: Path) -> None:
    assert of_tests(tmp_path, "test-cellar.c", "") == ["test-cellar is of no room"]
