# SPDX-License-Identifier: GPL-2.0-or-later
"""A graft as a series of patches (scripts/graft --series DIR TREE).

A second table says how the graft is cut: each [[patch]] has a subject, a text, and
patterns that name files of ours and insertions ("FILE: WHY") of the first table.
Each of these belongs to one patch: one that none names is an error, and so is one
that two name.  A file comes as a whole.

A patch is the difference between two grafts of the pristine tree, with the parts
of all patches before it, and with its own.  The commits are made in a temporary
repository of the files concerned, by an author and at a date that the table has,
and without the user's configuration of git: the same input makes the same series.

Leaves to others: whether each patch builds (scripts/check series).
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tools.graft_table import (
    GraftError,
    Plan,
    Table,
    TableError,
    Version,
    check_keys,
    read_table,
)
from tools.graft_tree import Tree

Files = dict[str, bytes]


@dataclass
class Patch:
    """A part of the graft: patterns of its files and insertions."""

    subject: str
    text: str
    files: list[str] = field(default_factory=list)
    inserts: list[str] = field(default_factory=list)


class Series:
    """The second table: checked against the first when loaded."""

    KEYS = {
        "": {"author", "date", "prefix", "cover", "patch", "note"},
        "cover": {"subject", "text"},
        "patch": {"subject", "text", "files", "inserts"},
        "note": {"file", "text"},
    }

    def __init__(self, table: Table) -> None:
        self.path = table.series
        self.table = table
        data = read_table(self.path)
        self._check("", data, {"author", "date", "cover", "patch"})
        self._check("cover", data["cover"], {"subject", "text"})
        for entry in data["patch"]:
            self._check("patch", entry, {"subject", "text"})
        for entry in data.get("note", []):
            self._check("note", entry, {"file", "text"})
        author = re.fullmatch(r"(.+) <(.+)>", data["author"])
        if not author or not isinstance(data["date"], datetime):
            raise TableError(
                f"{self.path}: 'author' must be 'NAME <MAIL>', 'date' date and time"
            )
        self.author: str = data["author"]
        self.name, self.mail = author.groups()
        self.date = int(data["date"].timestamp())
        self.prefix: str = data.get("prefix", "PATCH")
        self.cover = Patch(**data["cover"])
        self.patches = [Patch(**entry) for entry in data["patch"]]
        self.notes: dict[str, str] = {
            entry["file"]: entry["text"] for entry in data.get("note", [])
        }
        everything = table.plan(None)
        problems: list[str] = []
        #: the number of the patch that each file, each insertion belongs to
        self.files = self._owners(
            everything.copies, [patch.files for patch in self.patches], problems
        )
        self.inserts = self._owners(
            {item.title: None for item in everything.insertions},
            [patch.inserts for patch in self.patches],
            problems,
        )
        if problems:
            raise TableError("\n".join(f"{self.path}: {x}" for x in problems))

    def _check(self, kind: str, entry: dict[str, Any], needed: set[str]) -> None:
        check_keys(self.path, self.KEYS[kind], kind, entry)
        for key in sorted(needed - set(entry)):
            name = f" of {entry['subject']!r}" if "subject" in entry else ""
            raise TableError(f"{self.path}: '{key}'{name} is missing")

    def _owners(
        self,
        names: Iterable[str],
        patterns: list[list[str]],
        problems: list[str],
    ) -> dict[str, int]:
        """Which patch each name belongs to; what is wrong goes to problems."""
        owners: dict[str, int] = {}
        for number, own in enumerate(patterns):
            subject = self.patches[number].subject
            for pattern in own:
                found = [name for name in names if fnmatchcase(name, pattern)]
                if not found:
                    problems.append(f"{subject!r}: nothing is named {pattern!r}")
                for name in found:
                    other = owners.setdefault(name, number)
                    if other != number:
                        problems.append(
                            f"{name!r} is in {self.patches[other].subject!r} "
                            f"and in {subject!r}"
                        )
        problems += [f"{name!r} is in no patch" for name in names if name not in owners]
        return owners

    def part(self, plan: Plan, numbers: range) -> Plan:
        """What of the plan belongs to these patches."""
        return Plan(
            {
                path: source
                for path, source in plan.copies.items()
                if self.files[path] in numbers
            },
            [item for item in plan.insertions if self.inserts[item.title] in numbers],
        )


class Repository:
    """A temporary git repository; nothing of the user's configuration counts."""

    def __init__(self, path: Path, series: Series) -> None:
        self.path = path
        self.date = series.date
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        self.env |= {
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_SYSTEM": "/dev/null",
            "GIT_AUTHOR_NAME": series.name,
            "GIT_AUTHOR_EMAIL": series.mail,
            "GIT_COMMITTER_NAME": series.name,
            "GIT_COMMITTER_EMAIL": series.mail,
            "LC_ALL": "C.UTF-8",
        }
        self.git("init", "-q", "-b", "series")

    def git(self, *args: str, text: str = "") -> str:
        date = f"{self.date} +0000"
        try:
            done = subprocess.run(
                ["git", *args],
                cwd=self.path,
                env={
                    **self.env,
                    "GIT_AUTHOR_DATE": date,
                    "GIT_COMMITTER_DATE": date,
                },
                input=text,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise GraftError(f"git: {error.strerror}") from None
        if done.returncode:
            raise GraftError(f"git {args[0]}: {done.stderr.strip()}")
        return done.stdout

    def commit(self, files: Files, message: str) -> None:
        """The files as they are now, a minute after the commit before."""
        for path, data in files.items():
            there = self.path / path
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(data)
        self.git("add", "-A", "-f")
        self.date += 60
        # as it is: it may have lines that begin with '#'
        self.git("commit", "-q", "--cleanup=verbatim", "-F", "-", text=message)


def grafted(tree_path: Path, plan: Plan) -> Files:
    """The files that the plan concerns, in a pristine tree grafted by it."""
    tree = Tree(tree_path)
    tree.undo()
    tree.apply(plan)
    files = {path: source.read_bytes() for path, source in plan.copies.items()}
    for item in plan.insertions:
        text = "\n".join(tree.text(item.path))
        files[item.path] = text.encode(errors="surrogateescape")
    return files


def pristine(tree_path: Path, plan: Plan) -> Files:
    """The files into which the plan inserts."""
    tree = Tree(tree_path)
    tree.undo()
    return {
        item.path: "\n".join(tree.text(item.path)).encode(errors="surrogateescape")
        for item in plan.insertions
    }


def message(patch: Patch, *trailers: str) -> str:
    return "\n\n".join([patch.subject, patch.text.strip("\n"), *trailers]) + "\n"


def commit_patches(
    series: Series, repository: Repository, tree_path: Path, plan: Plan
) -> int:
    """All patches that change something in this version; returns how many."""
    known = pristine(tree_path, plan)
    repository.commit(known, "pristine\n")
    count = 0
    for number, patch in enumerate(series.patches):
        own = series.part(plan, range(number, number + 1))
        if not own.copies and not own.insertions:
            continue
        files = grafted(tree_path, series.part(plan, range(number + 1)))
        if all(known.get(path) == data for path, data in files.items()):
            raise GraftError(
                f"{patch.subject!r} changes nothing in {tree_path}: is it grafted?"
            )
        known |= files
        signed = f"Signed-off-by: {series.author}"
        repository.commit(files, message(patch, signed))
        count += 1
    return count


def write(table: Table, tree_path: Path, version: Version, to: Path) -> int:
    """--series: the patches and the cover letter; returns how many patches."""
    series = Series(table)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise GraftError(f"{to} is there already, and not an empty directory")
    with tempfile.TemporaryDirectory(prefix="graft-") as path:
        repository = Repository(Path(path), series)
        plan = table.plan(version)
        count = commit_patches(series, repository, tree_path, plan)
        repository.git("config", "branch.series.description", message(series.cover))
        repository.git(
            *("format-patch", "-q", "--cover-letter", "--numbered", "--no-signature"),
            *("--cover-from-description=subject", "--full-index", "--no-renames"),
            f"--subject-prefix={series.prefix}",
            f"--output-directory={to.absolute()}",
            f"HEAD~{count}",
        )
    for name, text in series.notes.items():
        (to / name).write_text(text)
    return count
