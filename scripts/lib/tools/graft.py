# SPDX-License-Identifier: GPL-2.0-or-later
"""Grafts our files into a source tree of another project (scripts/graft).

The table (graft_table.py) names files of this repository that are copied, and
lines to insert into the project's own files.  So we keep nothing of the other
project, and where it has changed a missing anchor says so.

A table may also name identifiers to watch (graft_sites.py): where their uses are
not those that were looked at, --check fails, and a graft says so.

The tree (graft_tree.py) has a record of the graft: a later one first undoes it,
and --remove leaves the tree as it was.

Leaves to others: what the lines mean (the table), fetching and building.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from host.paths import TOP
from tools import graft_series, graft_sites
from tools.graft_table import GraftError, Plan, Table, parse_version
from tools.graft_tree import Tree

DEFAULT_TABLE = TOP / "scripts" / "graft.toml"


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


def run(table_path: Path, tree_path: Path, mode: str, to: Path | None) -> int:
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
    if to:
        count = graft_series.write(table, tree_path, parse_version(version), to)
        print(f"{to}: {count} patches for {table.project} {version}")
        return 0
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
    group.add_argument(
        "--series",
        type=Path,
        metavar="DIR",
        help="change nothing; write to DIR what the graft would do, as a series of "
        "patches: git am --empty=drop DIR/*.patch",
    )
    parser.add_argument("tree", type=Path, metavar="TREE", help="the source tree")
    args = parser.parse_args()
    mode = next((x for x in ("check", "remove", "record") if vars(args)[x]), "graft")
    try:
        return run(args.table, args.tree, mode, args.series)
    except OSError as error:
        raise GraftError(str(error)) from error
