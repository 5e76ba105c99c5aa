# SPDX-License-Identifier: GPL-2.0-or-later
"""Grafts our files into a source tree of another project (scripts/graft).

A table (TOML) names the project, the versions it is for, the files of this
repository that are copied, and the insertions into the project's own files:
each an anchor (lines that are there) and the lines that go before or after
it.  So we keep nothing of the other project, and where it has changed a
missing anchor says so.

A table may also name identifiers to watch (graft_sites.py): where their uses are
not those that were looked at, --check fails, and a graft says so.

All is computed before anything is written.  The tree has a record (RECORD) of
the graft: a later one first undoes it, and --remove leaves the tree as it was.
Files whose content stays the same keep their times: a build system rebuilds
only what it must.

Leaves to others: what the lines mean (the table), fetching and building.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host.exits import Failure, WrongUse
from host.paths import TOP
from tools import graft_sites

DEFAULT_TABLE = TOP / "scripts" / "graft.toml"
RECORD = ".graft.json"

Lines = list[str]
Version = tuple[int, ...]


class GraftError(Failure):
    """The tree cannot be grafted; the text says why, one problem per line."""


class TableError(WrongUse):
    """The table itself is wrong; the text names table and entry."""


@dataclass
class Insertion:
    """Lines that go next to an anchor in one of the project's files."""

    path: str
    anchor: Lines
    after: bool
    lines: Lines
    within: str | None = None

    @property
    def name(self) -> str:
        return f"{self.path}: anchor {' / '.join(x.strip() for x in self.anchor)!r}"


@dataclass
class Plan:
    """What a table comes to for one version of the project."""

    copies: dict[str, Path] = field(default_factory=dict)
    insertions: list[Insertion] = field(default_factory=list)


@dataclass
class Record:
    """What an earlier graft did to the tree."""

    copies: dict[str, str] = field(default_factory=dict)
    insertions: list[tuple[str, Lines]] = field(default_factory=list)


def parse_version(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def in_range(version: Version, spec: str) -> bool:
    """Is the version in a range such as ">=10.0, <11"?"""
    for term in spec.split(","):
        match = re.fullmatch(r"\s*(>=|<=|>|<|==)\s*([\d.]+)\s*", term)
        if not match:
            raise TableError(f"'{spec}' is not a range of versions")
        bound = parse_version(match[2])
        # compare at the bound's precision: 10.0.3 is "==10.0"
        have = version[: len(bound)] + (0,) * (len(bound) - len(version))
        order = (have > bound) - (have < bound)
        if match[1] in (">=", "<"):
            order = (version > bound) - (version < bound)
        allowed = {">=": (0, 1), ">": (1,), "<=": (-1, 0), "<": (-1,), "==": (0,)}
        if order not in allowed[match[1]]:
            return False
    return True


class Table:
    """The table file: checked when loaded, turned into a Plan per version."""

    KEYS = {
        "": {
            *("project", "version", "versions", "prefix", "copy", "insert"),
            *("sites", "watch"),
        },
        "version": {"file", "pattern"},
        "copy": {"from", "to", "versions", "why"},
        "watch": {"names", "why"},
        "insert": {"file", "before", "after", "within", "lines", "versions", "why"},
    }

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.data: dict[str, Any] = tomllib.loads(path.read_text())
        except OSError as error:
            raise TableError(f"cannot read {path}: {error.strerror}") from None
        except tomllib.TOMLDecodeError as error:
            raise TableError(f"{path}: {error}") from None
        self._check_keys("", self.data)
        for key in ("project", "version", "versions"):
            if key not in self.data:
                raise TableError(f"{path}: '{key}' is missing")
        self._check_keys("version", self.data["version"])
        for kind in ("copy", "insert", "watch"):
            for entry in self.data.get(kind, []):
                self._check_keys(kind, entry)
                if kind == "watch" and not entry.get("names"):
                    raise TableError(f"{path}: a [[watch]] without 'names'")
        self.project: str = self.data["project"]
        #: where the copied files stand in this repository
        self.root = (TOP / self.data.get("prefix", ".")).resolve()
        #: identifiers to watch, and where the digests of their uses are
        self.watched = [
            name for entry in self.data.get("watch", []) for name in entry["names"]
        ]
        self.sites = path.parent / self.data.get("sites", path.stem + "-sites.json")

    def _check_keys(self, kind: str, entry: dict[str, Any]) -> None:
        unknown = set(entry) - self.KEYS[kind]
        if unknown:
            raise TableError(
                f"{self.path}: unknown key {sorted(unknown)[0]!r} in [{kind or 'top'}]"
            )

    def tree_version(self, tree: Path) -> str:
        """The version of the project's tree; GraftError if it is none."""
        spec = self.data["version"]
        try:
            text = (tree / spec["file"]).read_text(errors="replace")
        except OSError:
            raise GraftError(
                f"{tree} is not a {self.project} source tree: no {spec['file']}"
            ) from None
        match = re.search(spec.get("pattern", r"^(\d[\d.]*)"), text, re.MULTILINE)
        if not match:
            raise GraftError(
                f"{tree} is not a {self.project} source tree: "
                f"no version in {spec['file']}"
            )
        if not in_range(parse_version(match[1]), self.data["versions"]):
            raise GraftError(
                f"{tree} is {self.project} {match[1]}, but this graft is for "
                f"{self.project} {self.data['versions']}"
            )
        return match[1]

    def plan(self, version: Version) -> Plan:
        plan = Plan()
        for entry in self.data.get("copy", []):
            if in_range(version, entry.get("versions", ">=0")):
                self._plan_copy(plan, entry)
        for entry in self.data.get("insert", []):
            if in_range(version, entry.get("versions", ">=0")):
                plan.insertions.append(self._insertion(entry))
        return plan

    def _plan_copy(self, plan: Plan, entry: dict[str, Any]) -> None:
        source, found = entry["from"], False
        for path in sorted(self.root.glob(source)):
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            for file in files:
                inside = file.relative_to(self.root)
                if not file.is_file() or any(
                    part.startswith(".") or part == "__pycache__"
                    for part in inside.parts
                ):
                    continue
                found = True
                plan.copies[entry.get("to", "") + str(inside)] = file
        if not found:
            raise TableError(f"{self.path}: no file matches {source!r}")

    def _insertion(self, entry: dict[str, Any]) -> Insertion:
        where = [key for key in ("before", "after") if key in entry]
        if len(where) != 1 or "lines" not in entry or "file" not in entry:
            raise TableError(
                f"{self.path}: an [[insert]] needs 'file', 'lines' and one of "
                f"'before' and 'after' (file {entry.get('file')!r})"
            )
        return Insertion(
            path=entry["file"],
            anchor=entry[where[0]].strip("\n").split("\n"),
            after=where[0] == "after",
            lines=entry["lines"].removesuffix("\n").split("\n"),
            within=entry.get("within"),
        )


def find_block(text: Lines, block: Lines, start: int = 0) -> list[int]:
    """Where the lines of block stand in text, one after the other."""
    size = len(block)
    return [
        i for i in range(start, len(text) - size + 1) if text[i : i + size] == block
    ]


def insert(text: Lines, item: Insertion, same_before: int) -> None:
    """Puts one insertion into text unless it is there; GraftError if it cannot.

    The table has the same lines for this file same_before times earlier.
    """
    if len(find_block(text, item.lines)) > same_before:
        return
    start = 0
    if item.within is not None:
        places = find_block(text, [item.within])
        if not places:
            raise GraftError(f"{item.path}: anchor not found: {item.within!r}")
        start = places[0]
    places = find_block(text, item.anchor, start)
    if not places:
        raise GraftError(f"{item.name} not found")
    if len(places) > 1 and item.within is None:
        raise GraftError(f"{item.name} found {len(places)} times")
    at = places[0] + (len(item.anchor) if item.after else 0)
    text[at:at] = item.lines


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Tree:
    """A source tree: its content, and the content it is to have."""

    def __init__(self, path: Path, record: str = RECORD) -> None:
        self.path = path
        self.record_path = path / record
        self.record = self._load()
        self.texts: dict[str, Lines] = {}
        self.problems: list[str] = []

    def _load(self) -> Record:
        try:
            data = json.loads(self.record_path.read_text())
            return Record(
                dict(data["copies"]),
                [(path, list(lines)) for path, lines in data["insertions"]],
            )
        except FileNotFoundError:
            return Record()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GraftError(f"{self.record_path} is damaged: {error}") from None

    def text(self, path: str) -> Lines:
        if path not in self.texts:
            try:
                data = (self.path / path).read_text(errors="surrogateescape")
            except OSError as error:
                raise GraftError(f"{path}: {error.strerror}") from None
            self.texts[path] = data.split("\n")
        return self.texts[path]

    def digest(self, table: Table, plan: Plan) -> graft_sites.Digest:
        """Who uses what the table watches, in the project's own files.

        After undo(), before apply().
        """

        def text(path: str) -> str | None:
            if path in self.record.copies or path in plan.copies:
                return None
            if self.record.insertions or path not in inserted:
                return "\n".join(self.texts[path])
            # without a record it may be grafted all the same
            lines = list(self.text(path))
            for item in inserted[path]:
                for at in find_block(lines, item.lines)[:1]:
                    del lines[at : at + len(item.lines)]
            return "\n".join(lines)

        inserted: dict[str, list[Insertion]] = {}
        for item in plan.insertions:
            inserted.setdefault(item.path, []).append(item)
        return graft_sites.digest(self.path, table.watched, text)

    def undo(self) -> None:
        """Takes what the record names out of the texts."""
        for path, lines in self.record.insertions:
            try:
                text = self.text(path)
            except GraftError:
                continue
            places = find_block(text, lines)
            if places:
                del text[places[0] : places[0] + len(lines)]

    def apply(self, plan: Plan) -> None:
        """Puts the plan's insertions into the texts, checks its copies."""
        seen: Counter[tuple[str, ...]] = Counter()
        for item in plan.insertions:
            key = (item.path, *item.lines)
            try:
                insert(self.text(item.path), item, seen[key])
                seen[key] += 1
            except GraftError as error:
                self.problems.append(str(error))
        for path, source in plan.copies.items():
            there = self.path / path
            if path in self.record.copies or not there.exists():
                continue
            if not there.is_file() or there.read_bytes() != source.read_bytes():
                self.problems.append(f"{path}: the tree has its own file of that name")
        if self.problems:
            raise GraftError("\n".join(self.problems))

    def changed(self) -> list[str]:
        """The project's files whose text is not what is on disk."""
        result = []
        for path, text in self.texts.items():
            data = (self.path / path).read_text(errors="surrogateescape")
            if data != "\n".join(text):
                result.append(path)
        return result

    def write(self, plan: Plan) -> int:
        """Carries out the plan; returns how many files changed."""
        copies = {path: src.read_bytes() for path, src in plan.copies.items()}
        new = Record(
            {path: digest(data) for path, data in copies.items()},
            [(item.path, item.lines) for item in plan.insertions],
        )
        # if we are killed in the middle, the record covers both
        self._save(
            Record(
                {**self.record.copies, **new.copies},
                self.record.insertions
                + [x for x in new.insertions if x not in self.record.insertions],
            )
        )
        count = 0
        for path in self.changed():
            data = "\n".join(self.texts[path]).encode(errors="surrogateescape")
            self._replace(path, data)
            count += 1
        for path, data in copies.items():
            there = self.path / path
            if not there.is_file() or there.read_bytes() != data:
                self._replace(path, data)
                count += 1
        for path in set(self.record.copies) - set(copies):
            count += self._drop(path)
        if new.copies or new.insertions:
            self._save(new)
        else:
            self.record_path.unlink(missing_ok=True)
        return count

    def _replace(self, path: str, data: bytes) -> None:
        there = self.path / path
        there.parent.mkdir(parents=True, exist_ok=True)
        new = there.with_name(f".{there.name}.graft")
        new.write_bytes(data)
        if there.exists():
            os.chmod(new, there.stat().st_mode & 0o777)
        os.replace(new, there)

    def _drop(self, path: str) -> int:
        there = self.path / path
        if not there.is_file():
            return 0
        there.unlink()
        for parent in there.parents:
            if parent == self.path or any(parent.iterdir()):
                break
            parent.rmdir()
        return 1

    def _save(self, record: Record) -> None:
        data = {"copies": record.copies, "insertions": record.insertions}
        text = json.dumps(data, indent=1) + "\n"
        try:
            if self.record_path.read_text() == text:
                return
        except OSError:
            pass
        self.record_path.write_text(text)


def unknown_sites(tree: Tree, table: Table, plan: Plan, version: str) -> str:
    """What is not as it was when somebody looked, or nothing.  After undo()."""
    if not table.watched:
        return ""
    digests = graft_sites.load(table.sites)
    known = graft_sites.nearest(version, digests)
    now = tree.digest(table, plan)
    lines = graft_sites.differences(digests[known] if known else {}, now)
    if not lines:
        return ""
    return "\n".join(
        [
            f"{table.project} {version}: uses of what merging relies on differ from "
            f"{known or 'none'}, the version that was looked at:",
            *(f"  {line}" for line in lines),
            "look at each; then 'graft --record TREE' keeps them",
        ]
    )


def record_sites(tree: Tree, table: Table, plan: Plan, version: str) -> int:
    """--record: the uses in this tree have been looked at."""
    tree.undo()
    digests = graft_sites.load(table.sites)
    digests[version] = tree.digest(table, plan)
    graft_sites.save(table.sites, digests)
    print(f"{table.sites}: has the uses in {table.project} {version}")
    return 0


def check(tree: Tree, plan: Plan) -> None:
    """--check: prints what the tree is; GraftError if it cannot be grafted."""
    grafted = bool(tree.record.copies or tree.record.insertions)
    tree.apply(plan)
    stale = tree.changed() + [
        path
        for path, source in plan.copies.items()
        if not (tree.path / path).is_file()
        or (tree.path / path).read_bytes() != source.read_bytes()
    ]
    stale += sorted(set(tree.record.copies) - set(plan.copies))
    if not stale:
        print(f"{tree.path}: grafted")
    elif grafted:
        print(f"{tree.path}: grafted, but not up to date: {', '.join(stale)}")
    else:
        print(f"{tree.path}: not grafted; all anchors are there")


def run(table_path: Path, tree_path: Path, mode: str) -> int:
    table = Table(table_path)
    if not tree_path.is_dir():
        raise GraftError(f"{tree_path} is not a directory")
    tree = Tree(tree_path)
    if mode == "remove":
        tree.undo()
        count = tree.write(Plan())
        print(f"{tree_path}: graft removed ({count} files changed)")
        return 0
    version = table.tree_version(tree_path)
    plan = table.plan(parse_version(version))
    if mode == "record":
        return record_sites(tree, table, plan, version)
    tree.undo()
    unknown = unknown_sites(tree, table, plan, version)
    if mode == "check":
        check(tree, plan)
        if unknown:
            raise GraftError(unknown)
        return 0
    tree.apply(plan)
    if unknown:
        print(f"graft: warning: {unknown}", file=sys.stderr)
    count = tree.write(plan)
    if count:
        print(f"{tree_path}: grafted ({count} files changed)")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="graft",
        description="Copies our files into a source tree and makes the "
        "insertions into its own files that a table lists.",
        epilog="Grafting twice changes nothing; a newer graft replaces an older one.",
    )
    parser.add_argument(
        "--table",
        type=Path,
        default=DEFAULT_TABLE,
        metavar="FILE",
        help="the table (default: scripts/graft.toml, for QEMU)",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--check",
        action="store_true",
        help="change nothing; say whether the tree is grafted, or could be",
    )
    group.add_argument(
        "--remove", action="store_true", help="undo what a graft did to the tree"
    )
    group.add_argument(
        "--record",
        action="store_true",
        help="keep the uses of what the table watches: somebody has looked at them",
    )
    parser.add_argument("tree", type=Path, metavar="TREE", help="the source tree")
    args = parser.parse_args()
    mode = next((x for x in ("check", "remove", "record") if vars(args)[x]), "graft")
    try:
        return run(args.table, args.tree, mode)
    except OSError as error:
        raise GraftError(str(error)) from error
