# SPDX-License-Identifier: GPL-2.0-or-later
"""A source tree that is grafted: its content, and the content it is to have.

All is computed before anything is written.  The tree has a record (RECORD) of
the graft, by which it is undone.  Files whose content stays the same keep their
times.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tools import graft_sites
from tools.graft_table import GraftError, Insertion, Lines, Plan, Table

RECORD = ".graft.json"


@dataclass
class Record:
    """What an earlier graft did to the tree."""

    copies: dict[str, str] = field(default_factory=dict)
    insertions: list[tuple[str, Lines]] = field(default_factory=list)
    #: lines that are there, and those that they stand for
    instead: list[tuple[str, Lines, Lines]] = field(default_factory=list)


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
    size = len(item.anchor)
    at = places[0] + (size if item.where == "after" else 0)
    text[at : at + (size if item.where == "instead" else 0)] = item.lines


def take_out(text: Lines, lines: Lines, anchor: Lines) -> None:
    """Undoes one insertion, if it is there; @anchor: what it stands instead of."""
    for at in find_block(text, lines)[:1]:
        text[at : at + len(lines)] = anchor


def replaced(item: Insertion) -> Lines:
    """The lines that it takes the place of."""
    return item.anchor if item.where == "instead" else []


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
                [(path, list(a), list(b)) for path, a, b in data.get("instead", [])],
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
                take_out(lines, item.lines, replaced(item))
            return "\n".join(lines)

        inserted: dict[str, list[Insertion]] = {}
        for item in plan.insertions:
            inserted.setdefault(item.path, []).append(item)
        return graft_sites.digest(self.path, table.watched, text)

    def undo(self) -> None:
        """Takes what the record names out of the texts."""
        undone = list(self.record.instead)
        undone += [(path, lines, []) for path, lines in self.record.insertions]
        for path, lines, anchor in undone:
            try:
                take_out(self.text(path), lines, anchor)
            except GraftError:
                continue

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
            [(i.path, i.lines) for i in plan.insertions if not replaced(i)],
            [(i.path, i.lines, i.anchor) for i in plan.insertions if replaced(i)],
        )
        # if we are killed in the middle, the record covers both
        self._save(
            Record(
                {**self.record.copies, **new.copies},
                self.record.insertions
                + [x for x in new.insertions if x not in self.record.insertions],
                self.record.instead
                + [x for x in new.instead if x not in self.record.instead],
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
        if new.copies or plan.insertions:
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
        data = {
            "copies": record.copies,
            "insertions": record.insertions,
            "instead": record.instead,
        }
        text = json.dumps(data, indent=1) + "\n"
        try:
            if self.record_path.read_text() == text:
                return
        except OSError:
            pass
        self.record_path.write_text(text)
