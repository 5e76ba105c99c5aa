# SPDX-License-Identifier: GPL-2.0-or-later
"""Tests of scripts/graft --series, with small made-up trees.

scripts/check series has QEMU's own, and builds after each patch.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tools.graft_series import Series
from tools.graft_table import Table

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
why = "a file of ours"
file = "build"
after = "a"
lines = "ours"

[[insert]]
why = "another"
file = "build"
after = "a"
lines = "ours, too"

[[insert]]
why = "a hook"
file = "core/main"
before = "end"
lines = "# call ours"

[[insert]]
why = "moved"
file = "core/new"
before = "end"
lines = "# call ours"
versions = ">=10.2"
"""

SERIES = """
author = "A Name <name@example.org>"
date = 2026-01-02T03:04:05Z
prefix = "RFC PATCH"

[cover]
subject = "ours: all of it"
text = \"\"\"
Why this is wanted.
\"\"\"

[[patch]]
subject = "core: call ours"
text = \"\"\"
It has to be called.

# this line is not a comment
\"\"\"
inserts = ["core/main: *"]

[[patch]]
subject = "core: the new way"
text = "In 10.2."
inserts = ["core/new: *"]

[[patch]]
subject = "ours: one test"
text = "The first."
files = ["ours/test_graft.py"]
inserts = ["build: another"]

[[patch]]
subject = "ours: the others"
text = "What remains."
files = ["ours/test_s*"]
inserts = ["build: a file of ours"]

[[note]]
file = "note.txt"
text = \"\"\"
Not our error.
\"\"\"
"""

FILES = {"VERSION": "10.0.13\n", "build": "a\nb\n", "core/main": "begin\nend\n"}


def graft(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(GRAFT), *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


def git(where: Path, *args: str | Path) -> str:
    who = ("-c", "user.name=U", "-c", "user.email=u@example.org")
    return subprocess.run(
        ["git", *who, *map(str, args)],
        cwd=where,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def contents(tree: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in sorted(tree.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(tree).parts
    }


def patches(series: Path) -> list[Path]:
    return sorted(series.glob("[0-9]*.patch"))[1:]


def new_tree(path: Path) -> Path:
    for name, text in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return new_tree(tmp_path / "tree")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    (tmp_path / "table-series.toml").write_text(SERIES)
    return path


def write(table: Path, tree: Path, **env: str) -> Path:
    to = table.parent / f"series{len(list(table.parent.glob('series*')))}"
    done = graft("--table", table, "--series", to, tree, **env)
    assert done.returncode == 0, done.stderr
    return to


def test_comes_to_the_same_as_the_graft(
    tree: Path, table: Path, tmp_path: Path
) -> None:
    before = contents(tree)
    series = write(table, tree)
    assert contents(tree) == before
    repository = new_tree(tmp_path / "repository")
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "pristine")
    git(repository, "am", *patches(series))
    assert graft("--table", table, tree).returncode == 0
    (tree / ".graft.json").unlink()
    assert contents(repository) == contents(tree)


def test_each_patch_has_its_parts(tree: Path, table: Path) -> None:
    first, second, third = patches(write(table, tree))
    text = first.read_text()
    assert "From: A Name <name@example.org>" in text
    assert "Date: Fri, 2 Jan 2026 03:06:05 +0000" in text
    assert "Subject: [RFC PATCH 1/3] core: call ours" in text
    assert "\nIt has to be called.\n\n# this line is not a comment\n\n" in text
    assert "\nSigned-off-by: A Name <name@example.org>\n---\n core/main | 1 +\n" in text
    assert "\n+# call ours\n" in text and "build" not in text
    text = second.read_text()
    assert "\n+++ b/ours/test_graft.py\n" in text
    assert "\n+++ b/ours/test_series.py\n" not in text
    # others come before it, although the table has it first
    assert "\n a\n+ours, too\n b\n" in text
    text = third.read_text()
    assert "\n+++ b/ours/test_graft.py\n" not in text
    assert "\n+++ b/ours/test_series.py\n" in text
    assert "\n a\n ours, too\n+ours\n b\n" in text


def test_cover_letter_and_notes(tree: Path, table: Path) -> None:
    series = write(table, tree)
    cover = (series / "0000-cover-letter.patch").read_text()
    assert "Subject: [RFC PATCH 0/3] ours: all of it\n" in cover
    assert "\nWhy this is wanted.\n\nA Name (3):\n  core: call ours\n" in cover
    assert (series / "note.txt").read_text() == "Not our error.\n"


def test_other_version(tree: Path, table: Path) -> None:
    (tree / "VERSION").write_text("10.2.2\n")
    (tree / "core" / "new").write_text("begin\nend\n")
    names = [path.name for path in patches(write(table, tree))]
    assert len(names) == 4 and names[1] == "0002-core-the-new-way.patch"


def test_is_always_the_same(tree: Path, table: Path, tmp_path: Path) -> None:
    """Whoever makes it, of a grafted tree, too."""
    series = contents(write(table, tree))
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        "[user]\nname=Other\nemail=o@example.org\n[format]\nsignature=x\n"
        "[diff]\nnoprefix=true\n[core]\nautocrlf=true\n"
    )
    env = {"HOME": str(home), "GIT_AUTHOR_NAME": "Other", "TZ": "Asia/Tokyo"}
    assert contents(write(table, tree, **env)) == series
    graft("--table", table, tree)
    assert contents(write(table, tree)) == series


def test_grafted_without_a_record(tree: Path, table: Path, tmp_path: Path) -> None:
    graft("--table", table, tree)
    (tree / ".graft.json").unlink()
    done = graft("--table", table, "--series", tmp_path / "series", tree)
    assert done.returncode == 1 and "changes nothing" in done.stderr


def test_nothing_is_overwritten(tree: Path, table: Path, tmp_path: Path) -> None:
    done = graft("--table", table, "--series", tree, tree)
    assert done.returncode == 1 and "not an empty directory" in done.stderr
    (tmp_path / "empty").mkdir()
    done = graft("--table", table, "--series", tmp_path / "empty", tree)
    assert done.returncode == 0, done.stderr


def test_missing_anchor(tree: Path, table: Path, tmp_path: Path) -> None:
    (tree / "core" / "main").write_text("begin\n")
    done = graft("--table", table, "--series", tmp_path / "series", tree)
    assert done.returncode == 1 and "core/main: anchor 'end' not found" in done.stderr
    assert not (tmp_path / "series").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('["ours/test_s*"]', "[]", "'ours/test_series.py' is in no patch"),
        ('["build: another"]', "[]", "'build: another' is in no patch"),
        (
            '["ours/test_s*"]',
            '["ours/*"]',
            "'ours/test_graft.py' is in 'ours: one test' and in 'ours: the others'",
        ),
        (
            '["build: a file of ours"]',
            '["build: *"]',
            "'build: another' is in 'ours: one test' and in 'ours: the others'",
        ),
        (
            '["core/main: *"]',
            '["core/main: *", "core/old: *"]',
            "'core: call ours': nothing is named 'core/old: *'",
        ),
        ('text = "In 10.2."', "", "'text' of 'core: the new way' is missing"),
        ('text = "The first."', 'txt = "x"', "unknown key 'txt' in [patch]"),
        ("A Name <name@example.org>", "A Name", "'author' must be"),
        ("2026-01-02T03:04:05Z", '"today"', "'date' date and time"),
        ("[cover]", "[cover", "table-series.toml"),
        ('file = "note.txt"', "", "'file' is missing"),
    ],
)
def test_bad_table(tree: Path, table: Path, old: str, new: str, message: str) -> None:
    path = table.parent / "table-series.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = graft("--table", table, "--series", table.parent / "series", tree)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (table.parent / "series").exists()


def test_no_second_table(tree: Path, table: Path) -> None:
    (table.parent / "table-series.toml").unlink()
    done = graft("--table", table, "--series", table.parent / "series", tree)
    assert done.returncode == 2 and "cannot read" in done.stderr


def test_qemus_has_all() -> None:
    """Whoever adds a file or an insertion says which patch it belongs to."""
    series = Series(Table(TOP / "scripts" / "graft.toml"))
    for patch in [series.cover, *series.patches]:
        text = f"{patch.subject}\n{patch.text}"
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 75, patch.subject
        assert not patch.subject.endswith(".")
