# SPDX-License-Identifier: GPL-2.0-or-later
"""Which guests would share how much memory, by their sketches.

A sketch has the least hashes of what a guest has in memory: a sample, the same
one in every guest (query-ksm-sketches).  Of two guests all hashes are known up to
where the first sample ends.  Those of them that are in both are to all that are
as that end is to 2^32.  What is read of another host is not trusted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from host.exits import Failure
from top.model import PAGE, Sketch, number
from top.qmp import clean

#: Hashes that a whole sketch has: with fewer it has all there are.
WHOLE = 1024
LARGEST = 1 << 32


@dataclass
class Known:
    """A guest, here or elsewhere."""

    name: str
    #: the file it is from; None: this host
    host: str | None
    sketch: Sketch


@dataclass
class Pair:
    """Two guests; bytes that one copy would do for."""

    one: str
    other: str
    one_host: str | None
    other_host: str | None
    shared: int
    #: of the smaller one's contents
    share: float


def common(one: Sketch, other: Sketch) -> float:
    """Contents that are in both: an estimate, exact where all are known."""
    mine, theirs = set(one.least), set(other.least)
    # beyond the last of a sample that is cut nothing is known of it
    ends = [each.least[-1] for each in (one, other) if len(each.least) >= WHOLE]
    end = min(ends, default=LARGEST)
    both = sum(each < end for each in mine & theirs)
    return both * LARGEST / end if end else 0.0


def pairs(guests: Iterable[Known]) -> tuple[list[Pair], int]:
    """Those who share most first; and how many cannot be compared."""
    found, strange = [], 0
    for one, other in combinations(guests, 2):
        if one.sketch.key != other.sketch.key:
            strange += 1
            continue
        smaller = min(one.sketch.contents, other.sketch.contents)
        count = min(common(one.sketch, other.sketch), smaller)
        found.append(
            Pair(
                one.name,
                other.name,
                one.host,
                other.host,
                int(count) * PAGE,
                count / smaller if smaller else 0.0,
            )
        )
    found.sort(key=lambda pair: -pair.shared)
    return found, strange


def sketch_of(given: Any) -> Sketch:
    """As query-ksm-sketches, or --json, has it.

    Raises KeyError, TypeError or ValueError where it is something else.
    """
    least = [number(each) for each in given["least"]]
    ordered = all(a < b for a, b in zip(least, least[1:], strict=False))
    if not ordered or len(least) > WHOLE or any(not 0 <= x < LARGEST for x in least):
        raise ValueError("a sketch has up to 1024 numbers of 32 bits, in order")
    key, pages, contents = (number(given[x]) for x in ("key", "pages", "contents"))
    found = Sketch(key, pages, contents, least)
    if not 0 <= found.contents <= found.pages < 1 << 48:
        raise ValueError("a sketch has no more contents than pages")
    return found


def of_file(path: str) -> Iterator[Known]:
    """What ksm-top --sketch --json wrote on another host."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        for guest in clean(json.loads(text))["guests"]:
            if guest["sketch"] is not None:
                yield Known(str(guest["name"]), path, sketch_of(guest["sketch"]))
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Failure(
            f"{path} is not what ksm-top --sketch --json writes: {error}"
        ) from None
