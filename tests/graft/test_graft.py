# SPDX-License-Identifier: GPL-2.0-or-later
"""Tests of scripts/graft: small made-up trees and, at the end, QEMU's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
GRAFT = TOP / "scripts" / "graft"

TABLE = """
project = "Demo"
version = { file = "VERSION" }
versions = ">=10.0, <11"
prefix = "tests/graft"

[[copy]]
from = "test_*.py"
to = "ours/"

[[insert]]
file = "meson.build"
after = "  files('a.c')"
lines = "  files('ours.c')"

[[insert]]
file = "meson.build"
before = "  files('c.c')"
lines = \"\"\"
  # two lines
  files('ours2.c')
\"\"\"

[[insert]]
file = "schema"
within = "two {"
before = "}"
lines = "  ours"

[[insert]]
file = "list"
within = "two:"
instead = "  'a', 'b'"
lines = \"\"\"
  'a', 'b',
  'ours'
\"\"\"

[[insert]]
file = "schema"
before = "three"
lines = "new in 10.2"
versions = ">=10.2"
"""

FILES = {
    "VERSION": "10.0.13\n",
    "meson.build": "x\n  files('a.c')\n  files('b.c')\n  files('c.c')\n",
    "schema": "one {\n}\ntwo {\n}\nthree\n",
    "list": "one:\n  'a', 'b'\ntwo:\n  'a', 'b'\nthree:\n  'a', 'b'\n",
}


def graft(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(GRAFT), *map(str, args)], capture_output=True, text=True, check=False
    )


def snapshot(tree: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(tree)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(tree.rglob("*"))
        if path.is_file()
    }


def contents(tree: Path) -> dict[str, bytes]:
    return {name: data for name, (data, _) in snapshot(tree).items()}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name, text in FILES.items():
        (tree / name).write_text(text)
    return tree


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    return path


def test_grafts(tree: Path, table: Path) -> None:
    done = graft("--table", table, tree)
    assert done.returncode == 0, done.stderr
    # the copy itself went to ours/ + the path it has below the prefix
    assert (tree / "ours" / "test_graft.py").read_bytes() == Path(__file__).read_bytes()
    assert (tree / "meson.build").read_text() == (
        "x\n  files('a.c')\n  files('ours.c')\n  files('b.c')\n"
        "  # two lines\n  files('ours2.c')\n  files('c.c')\n"
    )
    assert (tree / "schema").read_text() == "one {\n}\ntwo {\n  ours\n}\nthree\n"
    assert (tree / "list").read_text() == FILES["list"].replace(
        "two:\n  'a', 'b'\n", "two:\n  'a', 'b',\n  'ours'\n"
    )


def test_twice_changes_nothing(tree: Path, table: Path) -> None:
    graft("--table", table, tree)
    before = snapshot(tree)
    assert graft("--table", table, tree).returncode == 0
    assert snapshot(tree) == before


def test_without_the_record_changes_nothing(tree: Path, table: Path) -> None:
    """A grafted tree that was put under version control has no record."""
    graft("--table", table, tree)
    before = contents(tree)
    (tree / ".graft.json").unlink()
    assert graft("--table", table, tree).returncode == 0
    assert contents(tree) == before


def test_remove_restores(tree: Path, table: Path) -> None:
    before = contents(tree)
    graft("--table", table, tree)
    assert graft("--table", table, "--remove", tree).returncode == 0
    assert contents(tree) == before


def test_newer_table_replaces_older(tree: Path, table: Path) -> None:
    graft("--table", table, tree)
    table.write_text(TABLE.replace("ours.c", "renamed.c"))
    assert graft("--table", table, tree).returncode == 0
    text = (tree / "meson.build").read_text()
    assert "renamed.c" in text and "'ours.c'" not in text


def test_dropped_copy_is_deleted(tree: Path, table: Path) -> None:
    graft("--table", table, tree)
    table.write_text(TABLE.replace('to = "ours/"', 'to = "new/"'))
    assert graft("--table", table, tree).returncode == 0
    assert not (tree / "ours").exists()
    assert (tree / "new" / "test_graft.py").exists()


def test_check(tree: Path, table: Path) -> None:
    before = snapshot(tree)
    done = graft("--table", table, "--check", tree)
    assert done.returncode == 0 and "not grafted; all anchors" in done.stdout
    assert snapshot(tree) == before
    graft("--table", table, tree)
    assert graft("--table", table, "--check", tree).stdout.endswith(": grafted\n")
    table.write_text(TABLE.replace("ours.c", "renamed.c"))
    assert "not up to date" in graft("--table", table, "--check", tree).stdout


@pytest.mark.parametrize("option", ["--check", None])
def test_missing_anchor(tree: Path, table: Path, option: str | None) -> None:
    (tree / "meson.build").write_text("x\n  files('b.c')\n")
    before = snapshot(tree)
    done = graft("--table", table, *([option] if option else []), tree)
    assert done.returncode == 1
    # file and anchor, of both that are missing
    assert "meson.build: anchor \"files('a.c')\" not found" in done.stderr
    assert "meson.build: anchor \"files('c.c')\" not found" in done.stderr
    assert snapshot(tree) == before


def test_same_lines_twice(tree: Path, table: Path) -> None:
    """Two insertions of the same lines are two, with a record and without."""
    table.write_text(
        TABLE + '[[insert]]\nfile = "schema"\nwithin = "one {"\n'
        'before = "}"\nlines = "  ours"\n'
    )
    expected = "one {\n  ours\n}\ntwo {\n  ours\n}\nthree\n"
    assert graft("--table", table, tree).returncode == 0
    assert (tree / "schema").read_text() == expected
    (tree / ".graft.json").unlink()
    assert graft("--table", table, tree).returncode == 0
    assert (tree / "schema").read_text() == expected
    assert graft("--table", table, "--remove", tree).returncode == 0
    assert (tree / "schema").read_text() == FILES["schema"]


def test_missing_file(tree: Path, table: Path) -> None:
    (tree / "schema").unlink()
    done = graft("--table", table, tree)
    assert done.returncode == 1 and "schema: No such file" in done.stderr


def test_ambiguous_anchor(tree: Path, table: Path) -> None:
    (tree / "meson.build").write_text(FILES["meson.build"] + "  files('a.c')\n")
    done = graft("--table", table, tree)
    assert done.returncode == 1 and "found 2 times" in done.stderr


def test_file_of_the_tree_is_not_overwritten(tree: Path, table: Path) -> None:
    (tree / "ours").mkdir()
    (tree / "ours" / "test_graft.py").write_text("theirs\n")
    before = snapshot(tree)
    done = graft("--table", table, tree)
    assert done.returncode == 1 and "its own file" in done.stderr
    assert snapshot(tree) == before


def test_entry_for_a_version(tree: Path, table: Path) -> None:
    (tree / "VERSION").write_text("10.2.2\n")
    assert graft("--table", table, tree).returncode == 0
    assert "new in 10.2\nthree" in (tree / "schema").read_text()


@pytest.mark.parametrize("version", ["7.2.22", "11.0.0", "9.2.4"])
def test_other_version_is_refused(tree: Path, table: Path, version: str) -> None:
    (tree / "VERSION").write_text(version + "\n")
    before = snapshot(tree)
    done = graft("--table", table, tree)
    assert done.returncode == 1
    assert f"is Demo {version}, but this graft is for Demo >=10.0" in done.stderr
    assert snapshot(tree) == before


def test_not_a_tree(tmp_path: Path, table: Path) -> None:
    done = graft("--table", table, tmp_path)
    assert done.returncode == 1 and "is not a Demo source tree" in done.stderr
    done = graft("--table", table, tmp_path / "none")
    assert done.returncode == 1 and "is not a directory" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("after =", "behind =", "unknown key 'behind'"),
        ('from = "test_*.py"', 'from = "none/*"', "no file matches"),
        ('project = "Demo"', "", "'project' is missing"),
        (">=10.0, <11", "ten", "not a range of versions"),
        ("version = {", "version = ", "table.toml"),
        ("[[copy]]", "[[watch]]\nwhy = ''\n[[copy]]", "[[watch]] without 'names'"),
    ],
)
def test_bad_table(tree: Path, table: Path, old: str, new: str, message: str) -> None:
    table.write_text(TABLE.replace(old, new, 1))
    done = graft("--table", table, tree)
    assert done.returncode == 2 and message in done.stderr


def test_killed_in_the_middle(tree: Path, table: Path) -> None:
    """A record of more than was done does no harm."""
    before = contents(tree)
    graft("--table", table, tree)
    record = (tree / ".graft.json").read_bytes()
    for name, text in FILES.items():
        (tree / name).write_text(text)
    (tree / "ours" / "test_graft.py").unlink()
    assert (tree / ".graft.json").read_bytes() == record
    assert graft("--table", table, tree).returncode == 0
    assert "ours.c" in (tree / "meson.build").read_text()
    assert graft("--table", table, "--remove", tree).returncode == 0
    assert contents(tree) == before


def test_damaged_record(tree: Path, table: Path) -> None:
    (tree / ".graft.json").write_text("{")
    done = graft("--table", table, tree)
    assert done.returncode == 1 and ".graft.json is damaged" in done.stderr


WATCH = """
[[watch]]
names = ["give_back", "PUNCH"]
"""

#: give_back() is used by two functions, a table and a macro, and nowhere else.
SITES = """
/* give_back() in a comment */
int give_back(int a);

int give_back(int a)
{
    return a; // give_back
}

static inline int
uses(struct a *a,
     int b)
{
    int c = give_back(b);

    return c + give_back(PUNCH) + not_give_back("give_back()");
}

static const struct ops ops = {
    .give = give_back,
};

#define WRAP(a) \\
    give_back(a)

void same_line(void) {
    give_back(1);
}
"""


@pytest.fixture
def watched(tree: Path, table: Path) -> Path:
    """The tree with a file of uses, recorded."""
    table.write_text(TABLE + WATCH)
    (tree / "hw").mkdir()
    (tree / "hw" / "a.c").write_text(SITES)
    assert graft("--table", table, "--record", tree).returncode == 0
    return tree


def test_sites(watched: Path, table: Path) -> None:
    recorded = json.loads((table.parent / "table-sites.json").read_text())
    uses = recorded["10.0.13"]
    assert uses["PUNCH"] == ["hw/a.c:uses"]
    body = uses["give_back"].pop(1)
    assert re.fullmatch("hw/a.c:give_back is [0-9a-f]{12}", body)
    assert uses["give_back"] == [
        "hw/a.c:WRAP",
        "hw/a.c:ops",
        "hw/a.c:same_line",
        "hw/a.c:uses x2",
    ]
    assert graft("--table", table, "--check", watched).returncode == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "void same_line(void) {\n",
            "void added(void)\n{\n    give_back(2);\n}\nvoid same_line(void) {\n",
            "give_back: + hw/a.c:added",
        ),
        ("give_back(1)", "give()", "give_back: - hw/a.c:same_line"),
        ("give_back(PUNCH)", "PUNCH", "hw/a.c:uses (2 times, now 1)"),
        ("return a;", "return -a;", "give_back: * hw/a.c:give_back (another body)"),
        ("int c = ", "int c = PUNCH + ", "PUNCH: * hw/a.c:uses (1 times, now 2)"),
    ],
)
def test_site_that_differs(
    watched: Path, table: Path, old: str, new: str, message: str
) -> None:
    (watched / "hw" / "a.c").write_text(SITES.replace(old, new))
    done = graft("--table", table, "--check", watched)
    assert done.returncode == 1 and message in done.stderr
    assert "Demo 10.0.13" in done.stderr
    # who builds is warned, once more for a tree that is grafted
    for _ in range(2):
        done = graft("--table", table, watched)
        assert done.returncode == 0 and message in done.stderr
    assert graft("--table", table, "--check", watched).returncode == 1
    graft("--table", table, "--record", watched)
    assert graft("--table", table, "--check", watched).returncode == 0


def test_sites_of_another_file(watched: Path, table: Path) -> None:
    folder = watched / "new" / "device"
    folder.mkdir(parents=True)
    (folder / "b.h").write_text("static int f(void)\n{\n    give_back(0);\n}\n")
    done = graft("--table", table, "--check", watched)
    assert done.returncode == 1 and "give_back: + new/device/b.h:f\n" in done.stderr
    # what somebody has built there is not the tree's
    (folder / "build.ninja").touch()
    assert graft("--table", table, "--check", watched).returncode == 0


def test_sites_do_not_see_what_does_not_count(watched: Path, table: Path) -> None:
    text = SITES.replace("    return a; //", "\treturn   a;/* give_back(1)\n*/ //")
    (watched / "hw" / "a.c").write_text(text + "\n/* give_back() */\n")
    (watched / "tests").mkdir()
    (watched / "tests" / "a.c").write_text(SITES)
    assert graft("--table", table, "--check", watched).returncode == 0


def test_sites_without_the_graft(watched: Path, table: Path, tmp_path: Path) -> None:
    """Our files and lines do not count, in a grafted tree either."""
    lines = "int f(void)\\n{\\n    give_back(9);\\n}"
    table.write_text(
        TABLE.replace("*.py", "*").replace("tests/graft", str(tmp_path / "ours"))
        + WATCH
        + f'[[insert]]\nfile = "hw/a.c"\nbefore = "static inline int"\nlines = "{lines}"\n'
    )
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "test_ours.c").write_text(SITES)
    for _ in range(2):
        done = graft("--table", table, watched)
        assert done.returncode == 0 and not done.stderr
    assert "give_back(9)" in (watched / "hw" / "a.c").read_text()
    assert (watched / "ours" / "test_ours.c").exists()
    assert graft("--table", table, "--check", watched).returncode == 0
    before = (table.parent / "table-sites.json").read_text()
    graft("--table", table, "--record", watched)
    assert (table.parent / "table-sites.json").read_text() == before


def test_sites_of_another_version(watched: Path, table: Path) -> None:
    """Compared with the last version before it that was looked at."""
    (watched / "VERSION").write_text("10.0.14\n")
    assert graft("--table", table, "--check", watched).returncode == 0
    (watched / "hw" / "a.c").write_text(SITES.replace("give_back(1)", "give()"))
    (watched / "VERSION").write_text("10.2.2\n")
    assert graft("--table", table, "--record", watched).returncode == 0
    (watched / "VERSION").write_text("10.0.14\n")
    done = graft("--table", table, "--check", watched)
    assert done.returncode == 1 and "Demo 10.0.14" in done.stderr
    assert "differ from 10.0.13" in done.stderr
    (watched / "VERSION").write_text("10.0.1\n")
    assert "from 10.0.13" in graft("--table", table, "--check", watched).stderr
    (watched / "VERSION").write_text("10.9.0\n")
    assert graft("--table", table, "--check", watched).returncode == 0


def test_sites_that_nobody_has_looked_at(watched: Path, table: Path) -> None:
    (table.parent / "table-sites.json").unlink()
    done = graft("--table", table, "--check", watched)
    assert done.returncode == 1 and "give_back: + hw/a.c:uses" in done.stderr
    (table.parent / "table-sites.json").write_text("[1]")
    done = graft("--table", table, "--check", watched)
    assert done.returncode == 1 and "table-sites.json is damaged" in done.stderr


def test_usage() -> None:
    assert graft().returncode == 2
    assert graft("--check", "--remove", "x").returncode == 2
    assert graft("--help").returncode == 0


def run_shell(command: str) -> subprocess.CompletedProcess[str]:
    """A command with scripts/lib/common.sh's functions."""
    return subprocess.run(
        ["bash", "-c", f"set -eu; . scripts/lib/common.sh; {command}"],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=False,
    )


def shell(command: str) -> str:
    """Its output."""
    done = run_shell(command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def unpack_qemu(fetch: str, to: Path) -> Path:
    package = shell(fetch)
    tarball = next(
        path for path in Path(package).iterdir() if ".orig.tar." in path.name
    )
    to.mkdir()
    # what tests and anchors need; firmware and guests' code are most of it
    subprocess.run(
        ["tar", "-C", to, "--strip-components=1", "--exclude=*/roms", "-xf", tarball],
        check=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    return to


VERSIONS = shell('echo "${QEMU_VERSIONS[*]}"').split()


@pytest.mark.parametrize("version", VERSIONS)
def test_qemu(tmp_path: Path, version: str) -> None:
    """The sources that are built: all anchors, and back again."""
    if version != VERSIONS[0] and run_shell(f"fetch_qemu {version}").returncode:
        pytest.skip(f"QEMU {version} is in no release, and not to be had any more")
    tree = unpack_qemu(f"fetch_qemu {version}", tmp_path / "qemu")
    done = graft("--check", tree)
    assert "not grafted; all anchors" in done.stdout
    # somebody has looked at the uses in this very version
    assert done.returncode == 0, done.stderr
    known = json.loads((TOP / "scripts" / "graft-sites.json").read_text())
    assert (tree / "VERSION").read_text().strip() in known
    before = contents(tree)
    done = graft(tree)
    assert done.returncode == 0 and not done.stderr, done.stderr
    after = snapshot(tree)
    assert set(contents(tree)) > set(before)
    assert graft(tree).returncode == 0
    assert snapshot(tree) == after
    assert graft("--check", tree).stdout.endswith(": grafted\n")
    # under version control there is no record
    record = (tree / ".graft.json").read_bytes()
    (tree / ".graft.json").unlink()
    assert graft("--check", tree).returncode == 0
    (tree / ".graft.json").write_bytes(record)
    # a device of the next version
    device = tree / "hw" / "mem" / "memory-device.c"
    text = device.read_text()
    device.write_text(
        text + "static void gone(RAMBlock *rb)\n{\n"
        "    ram_block_discard_range(rb, 0, 4096);\n}\n"
    )
    done = graft("--check", tree)
    assert done.returncode == 1
    assert "ram_block_discard_range: + hw/mem/memory-device.c:gone" in done.stderr
    assert len(done.stderr.splitlines()) == 3, done.stderr
    device.write_text(text)
    assert graft("--remove", tree).returncode == 0
    assert contents(tree) == before


def test_old_qemu_is_refused(tmp_path: Path) -> None:
    tree = unpack_qemu("fetch_source qemu bookworm", tmp_path / "qemu")
    done = graft(tree)
    assert done.returncode == 1
    assert "is QEMU 7.2" in done.stderr and "this graft is for QEMU" in done.stderr
