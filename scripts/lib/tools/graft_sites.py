# SPDX-License-Identifier: GPL-2.0-or-later
"""What a graft relies on in functions that it does not touch: who calls what.

Merging is safe while QEMU discards, maps for devices and pins RAM where we know
that it does.  A table's [[watch]] entries name the identifiers.  A *digest* of a
tree has, for each, the functions that use it ("FILE:FUNCTION", with a number if
more than once) and, where it is a function, a hash of its body.  Digests of the
versions that somebody has looked at are kept beside the table; in any other
version, whatever differs is named until somebody has looked there too.

Facts only: no text of the project is kept.  Comments, strings, the white space in
a body, declarations and what is not part of the program do not count.  Who calls
is known by QEMU's style: a function's head and braces stand in the first column.

Leaves to others: the table, and the texts without what was grafted (graft.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from host.exits import Failure

#: What uses each identifier, and how often.
Digest = dict[str, Counter[str]]

SUFFIXES = (".c", ".h", ".inc", ".m", ".rs")
#: Other programs, generated or not ours to watch: the kernel's own headers.
EXCLUDED = {
    "roms", "tests", "docs", "subprojects", "linux-user", "bsd-user", "contrib",
    "pc-bios", "qga", "storage-daemon", "tools", "scripts", "python", "debian",
    "linux-headers", "include/standard-headers",
}  # fmt: skip
#: A directory with such a file is one that somebody builds in.
BUILT = "build.ninja"

COMMENT_OR_STRING = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", re.S
)
HEAD = re.compile(r"[^={};]*?\b(\w+)\s*\(")
DEFINE = re.compile(r"\s*#\s*define\s+(\w+)")
INITIALIZED = re.compile(r"(\w+)\s*(?:\[[^]]*\])?\s*=\s*\{")
NOWHERE = "-"
BODY = " is "


def sources(tree: Path) -> Iterator[str]:
    """The source files of the program, as paths in the tree."""
    for where, folders, files in os.walk(tree):
        inside = os.path.relpath(where, tree)
        folders[:] = sorted(
            name
            for name in folders
            if os.path.normpath(f"{inside}/{name}") not in EXCLUDED
            and not name.startswith(".")
            and not os.path.exists(f"{where}/{name}/{BUILT}")
        )
        for name in sorted(files):
            if name.endswith(SUFFIXES):
                yield os.path.normpath(f"{inside}/{name}")


def having(tree: Path, names: list[str]) -> list[str]:
    """The source files with one of the names in them.

    With grep a digest takes 1.5 s, without it 10 s.  It sees what was grafted too,
    which takes no name away.
    """
    done = subprocess.run(
        ["xargs", "-0", "grep", "-lwFZ", *(f"-e{name}" for name in names), "--"],
        cwd=tree,
        input="\0".join([*sources(tree), "/dev/null"]),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
        # grep: 1 if there is nothing; xargs: 123
        check=False,
    )
    if done.returncode not in (0, 123):
        raise Failure(f"grep failed in {tree}")
    return done.stdout.split("\0")[:-1]


def without_comments(text: str) -> str:
    """The same lines, without comments and what is in strings."""

    def blank(match: re.Match[str]) -> str:
        return " " + "\n" * match[0].count("\n")

    return COMMENT_OR_STRING.sub(blank, text)


def functions(text: str) -> Iterator[tuple[str, bool, str]]:
    """Each line, with the function (macro, table) it is in; is that its head?"""
    name, inside, macro = NOWHERE, False, ""
    for line in text.split("\n"):
        head = False
        if macro or DEFINE.match(line):
            head = not macro
            where = macro = macro or DEFINE.findall(line)[0]
            macro = macro if line.endswith("\\") else ""
        elif not inside and (line[:1].isalpha() or line[:1] == "_"):
            match = HEAD.match(line) or INITIALIZED.search(line)
            where = name = match[1] if match else NOWHERE
            head = True
            inside = line.rstrip().endswith("{")
        else:
            inside = line[:1] == "{" or inside and line[:1] != "}"
            where = name if inside else NOWHERE
        yield where, head, line


def body_hash(lines: list[str]) -> str:
    text = " ".join(" ".join(lines).split())
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]


def digest(
    tree: Path, names: list[str], pristine: Callable[[str], str | None]
) -> Digest:
    """The digest of a tree; pristine gives a text that is not the file's, None
    for a file that is not the project's, or raises KeyError."""
    word = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
    found: Digest = {name: Counter() for name in names}
    for path in having(tree, names):
        try:
            text = pristine(path)
        except KeyError:
            text = (tree / path).read_text(errors="surrogateescape")
        if text is None:
            continue
        bodies: dict[str, list[str]] = {}
        for where, head, line in functions(without_comments(text)):
            for name in word.findall(line):
                # its own head, which may be a declaration, calls nothing
                if not (head and where == name):
                    found[name][f"{path}:{where}"] += 1
            if where in found and not head:
                bodies.setdefault(where, []).append(line)
        for name, body in bodies.items():
            found[name][f"{path}:{name}{BODY}{body_hash(body)}"] = 1
    return found


def differences(known: Digest, now: Digest) -> list[str]:
    """What is different, a line for each identifier and place."""
    lines = []
    for name in sorted({*known, *now}):
        before, after = (which.get(name, Counter()) for which in (known, now))
        both = with_body(before) & with_body(after)
        for place in sorted({*before, *after}):
            old, new = before[place], after[place]
            where = place.partition(BODY)[0]
            if old == new or (place != where and where in both and not new):
                continue
            if place != where and where in both:
                lines.append(f"{name}: * {where} (another body)")
            elif old and new:
                lines.append(f"{name}: * {place} ({old} times, now {new})")
            else:
                lines.append(f"{name}: {'-' if old else '+'} {place}")
    return lines


def with_body(places: Counter[str]) -> set[str]:
    """The functions, as FILE:NAME, whose bodies are there."""
    return {place.partition(BODY)[0] for place in places if BODY in place}


def load(path: Path) -> dict[str, Digest]:
    """The digests that were recorded, by version."""
    if not path.exists():
        return {}
    digests: dict[str, Digest] = {}
    try:
        for version, names in json.loads(path.read_text()).items():
            digests[version] = {}
            for name, places in names.items():
                counts = digests[version][name] = Counter()
                for place in places:
                    where, _, count = place.partition(" x")
                    counts[where] = int(count or 1)
    except (ValueError, AttributeError, TypeError) as error:
        raise Failure(f"{path} is damaged: {error}") from None
    return digests


def save(path: Path, digests: dict[str, Digest]) -> None:
    data = {
        version: {
            name: [
                where if count == 1 else f"{where} x{count}"
                for where, count in sorted(places.items())
            ]
            for name, places in sorted(digests[version].items())
        }
        for version in sorted(digests, key=order)
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def order(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def nearest(version: str, digests: dict[str, Digest]) -> str | None:
    """The recorded version to compare with: this one, or the last before it."""
    known = sorted(digests, key=order)
    before = [each for each in known if order(each) <= order(version)]
    if before:
        return before[-1]
    return known[0] if known else None
