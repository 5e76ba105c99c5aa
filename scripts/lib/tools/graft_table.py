# SPDX-License-Identifier: GPL-2.0-or-later
"""The table of a graft: which files are copied, which lines go where.

A table (TOML) names the project, the versions it is for, the files of this
repository that are copied, and the insertions into the project's own files:
each an anchor (lines that are there) and the lines that go before or after it;
or, where the project has a list on one line, instead of it.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host.exits import Failure, WrongUse
from host.paths import TOP

#: Where lines may go, seen from their anchor.
PLACES = ("before", "after", "instead")

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
    #: "before", "after" or "instead"
    where: str
    lines: Lines
    within: str | None = None
    why: str = ""

    @property
    def title(self) -> str:
        """What other tables name it by."""
        return f"{self.path}: {self.why}"

    @property
    def name(self) -> str:
        return f"{self.path}: anchor {' / '.join(x.strip() for x in self.anchor)!r}"


@dataclass
class Plan:
    """What a table comes to for one version of the project."""

    copies: dict[str, Path] = field(default_factory=dict)
    insertions: list[Insertion] = field(default_factory=list)


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


def read_table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{path}: {error}") from None


def check_keys(path: Path, known: set[str], kind: str, entry: dict[str, Any]) -> None:
    unknown = set(entry) - known
    if unknown:
        raise TableError(
            f"{path}: unknown key {sorted(unknown)[0]!r} in [{kind or 'top'}]"
        )


class Table:
    """The table file: checked when loaded, turned into a Plan per version."""

    KEYS = {
        "": {
            *("project", "version", "versions", "prefix", "copy", "insert"),
            *("sites", "watch", "series"),
        },
        "version": {"file", "pattern"},
        "copy": {"from", "to", "versions", "why"},
        "watch": {"names", "why"},
        "insert": {"file", *PLACES, "within", "lines", "versions", "why"},
    }

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = read_table(path)
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
        #: how the graft is cut into patches
        self.series = path.parent / self.data.get("series", path.stem + "-series.toml")

    def _check_keys(self, kind: str, entry: dict[str, Any]) -> None:
        check_keys(self.path, self.KEYS[kind], kind, entry)

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

    def plan(self, version: Version | None) -> Plan:
        """For that version, or what there is for any."""

        def concerned(entry: dict[str, Any]) -> bool:
            return version is None or in_range(version, entry.get("versions", ">=0"))

        plan = Plan()
        for entry in filter(concerned, self.data.get("copy", [])):
            self._plan_copy(plan, entry)
        for entry in filter(concerned, self.data.get("insert", [])):
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
        where = [key for key in PLACES if key in entry]
        if len(where) != 1 or "lines" not in entry or "file" not in entry:
            raise TableError(
                f"{self.path}: an [[insert]] needs 'file', 'lines' and one of "
                f"'before', 'after', 'instead' (file {entry.get('file')!r})"
            )
        return Insertion(
            path=entry["file"],
            anchor=entry[where[0]].strip("\n").split("\n"),
            where=where[0],
            lines=entry["lines"].removesuffix("\n").split("\n"),
            within=entry.get("within"),
            why=entry.get("why", ""),
        )
