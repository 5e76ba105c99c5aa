# SPDX-License-Identifier: GPL-2.0-or-later
"""Do scripts/lib and libksm keep to their floors?  (scripts/check style)

A module may import its own floor and those below, and imports must not form a
circle.  Those inside functions or for type checkers count.

In libksm a room is what has one name: stage.h, stage.c and stage-back.c.  It may
include, and call, rooms of its own floor and of those below; no circle either.
So may its test: test-stage.c is on the floor of stage.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from host.exits import Failure
from host.paths import TOP

#: The lowest first; launch.py is above all.
FLOORS = ("host", "top", "guest", "bench", "tools")
C_FLOORS = ("base", "memory", "share", "watch", "merge", "engine")

#: Of libksm's tests: those of no one room, and what tests are made with.
TEST_FLOORS = {
    "fake-root": "base",
    "move": "base",
    "slow-file": "base",
    "slower": "base",
    "still": "base",
    "util": "base",
    "fake-store": "share",
    "peer": "share",
    "remote": "share",
    "rooms": "merge",
    "urgent": "merge",
    "budget": "engine",
    "left": "engine",
    "fault": "engine",
    "fuzz": "engine",
    "fuzz-faults": "engine",
    "helped": "engine",
    "host": "engine",
    "house": "engine",
    "twins": "engine",
    "prop": "engine",
    "prop-watch": "engine",
    "scatter": "merge",
    "stores": "engine",
    "support": "engine",
    "system": "engine",
    "turn": "engine",
}

#: A function's head: what others see of a source, what is inline in a header.
C_FUNCTION = r"(?:[A-Za-z_][\w ]*[ *\n]+)(\w+)\([^;{}]*\)\s*\{"
C_PUBLIC = re.compile(rf"^(?!static\b){C_FUNCTION}", re.M)
C_INLINE = re.compile(rf"^static inline {C_FUNCTION}", re.M)
C_COMMENT = re.compile(r"/\*.*?\*/", re.S)
C_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
C_INCLUDE = re.compile(r'#include "(?:(\w+)/)?([\w-]+)\.h"')

Arrows = dict[str, set[str]]


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[str]:
    """Every name that may be a module's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(root: Path) -> Arrows:
    """The modules below root that each of them imports."""
    paths = {module_name(root, path): path for path in root.glob("**/*.py")}
    return {
        name: {other for other in imported(ast.parse(path.read_text())) if other}
        & (paths.keys() - {name})
        for name, path in paths.items()
    }


def relative(root: Path) -> list[str]:
    return [
        f"{module_name(root, path)} imports relatively"
        for path in sorted(root.glob("**/*.py"))
        if any(name[:1] == "." for name in imported(ast.parse(path.read_text())))
    ]


def c_texts(root: Path) -> dict[str, dict[str, str]]:
    """Room -> suffix -> text, without comments."""
    rooms: dict[str, dict[str, str]] = {}
    for path in sorted(root.glob("*/*.[ch]")):
        room = f"{path.parent.name}.{path.stem.partition('-')[0]}"
        texts = rooms.setdefault(room, {".c": "", ".h": ""})
        texts[path.suffix] += C_COMMENT.sub(" ", path.read_text())
    return rooms


def c_home(rooms: dict[str, dict[str, str]]) -> dict[str, str]:
    """Function -> room."""
    return {
        name: room
        for room, texts in rooms.items()
        for name in C_PUBLIC.findall(texts[".c"]) + C_INLINE.findall(texts[".h"])
    }


def c_used(text: str, home: dict[str, str]) -> set[str]:
    """The rooms that a text includes or calls."""
    included = {
        f"{floor}.{stem.partition('-')[0]}"
        for floor, stem in C_INCLUDE.findall(text)
        if floor
    }
    # but members of a struct
    names = re.findall(r"(?<![.>\w])\w+", C_STRING.sub(" ", text))
    return included | {home[name] for name in names if name in home}


def c_arrows(root: Path) -> Arrows:
    """The rooms that each of them includes or calls."""
    rooms = c_texts(root)
    home = c_home(rooms)
    return {
        room: (c_used(texts[".c"] + texts[".h"], home) & rooms.keys()) - {room}
        for room, texts in rooms.items()
    }


def tests_room(name: str, rooms: Iterable[str]) -> str:
    """FLOOR.NAME of what a file of the tests is about; .NAME: nobody knows."""
    name = name.removeprefix("test-")
    at = {room.partition(".")[2]: room.partition(".")[0] for room in rooms}
    return f"{TEST_FLOORS.get(name) or at.get(name, '')}.{name}"


def tests_arrows(root: Path, tests: Path) -> Arrows:
    """What each file of the tests includes or calls, other such files too."""
    rooms = c_texts(root)
    home = c_home(rooms)
    graph: Arrows = {}
    for path in sorted(tests.glob("*.[ch]")):
        text = C_COMMENT.sub(" ", path.read_text())
        helpers = {stem for floor, stem in C_INCLUDE.findall(text) if not floor}
        found = graph.setdefault(tests_room(path.stem, rooms), set())
        found |= c_used(text, home) & rooms.keys()
        found |= {tests_room(stem, ()) for stem in helpers & TEST_FLOORS.keys()}
    return graph


def floor(module: str, floors: tuple[str, ...] = FLOORS) -> int:
    name = module.partition(".")[0]
    return floors.index(name) if name in floors else len(floors)


def upward(graph: Arrows, floors: tuple[str, ...] = FLOORS) -> list[str]:
    return [
        f"{name} imports {other}, which is above it"
        for name, others in sorted(graph.items())
        for other in sorted(others)
        if floor(other, floors) > floor(name, floors)
    ]


def circles(graph: Arrows) -> list[str]:
    """Each circle once, from where it was entered."""
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        if name in way:
            found.append(" -> ".join([*way[way.index(name) :], name]))
        elif name not in done:
            for other in sorted(graph[name]):
                visit(other, [*way, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return [f"a circle of imports: {circle}" for circle in found]


def wrongs(root: Path) -> list[str]:
    graph = arrows(root)
    return relative(root) + upward(graph) + circles(graph)


def c_wrongs(root: Path) -> list[str]:
    graph = c_arrows(root)
    unknown = [
        f"{room} is on no floor"
        for room in graph
        if floor(room, C_FLOORS) == len(C_FLOORS)
    ]
    return unknown + upward(graph, C_FLOORS) + circles(graph)


def tests_wrongs(root: Path, tests: Path) -> list[str]:
    graph = tests_arrows(root, tests)
    unknown = [f"test-{name[1:]} is of no room" for name in graph if name[0] == "."]
    known = {name: others for name, others in graph.items() if name[0] != "."}
    return unknown + [f"test of {each}" for each in upward(known, C_FLOORS)]


def main() -> int:
    argparse.ArgumentParser(prog="floors", description=__doc__).parse_args()
    libksm = TOP / "subprojects/libksm"
    found = (
        wrongs(TOP / "scripts/lib")
        + c_wrongs(libksm / "src")
        + tests_wrongs(libksm / "src", libksm / "tests")
    )
    if found:
        raise Failure("\n".join(found))
    return 0
