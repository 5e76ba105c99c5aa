# SPDX-License-Identifier: GPL-2.0-or-later
"""Does scripts/lib keep to its floors?  (scripts/check style)

A module may import its own floor and those below, and no module may reach
itself through imports.  Imports inside functions or for type checkers count.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from host.exits import Failure
from host.paths import TOP

#: The lowest first; launch.py is above all.
FLOORS = ("host", "guest", "bench", "tools")

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
            # a relative import has no module that we would know
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(root: Path) -> Arrows:
    """Which modules each module imports, of those below root."""
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


def floor(module: str) -> int:
    name = module.partition(".")[0]
    return FLOORS.index(name) if name in FLOORS else len(FLOORS)


def upward(graph: Arrows) -> list[str]:
    return [
        f"{name} imports {other}, which is above it"
        for name, others in sorted(graph.items())
        for other in sorted(others)
        if floor(other) > floor(name)
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


def main() -> int:
    argparse.ArgumentParser(prog="floors", description=__doc__).parse_args()
    if found := wrongs(TOP / "scripts/lib"):
        raise Failure("\n".join(found))
    return 0
