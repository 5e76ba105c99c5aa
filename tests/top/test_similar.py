# SPDX-License-Identifier: GPL-2.0-or-later
"""Sketches: what two guests have in common."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from fakes import BACKEND, good, server, stats
from test_program import PROGRAM, run

from host.exits import Failure
from top import similar
from top.model import PAGE, Sketch
from top.similar import LARGEST, WHOLE, Known


def sketch(contents: set[int], key: int = 7) -> Sketch:
    """As src/engine/sketch.c has it."""
    least = sorted(contents)[:WHOLE]
    count = len(least)
    if count == WHOLE:
        count = min((WHOLE - 1) * LARGEST // least[-1], len(contents))
    return Sketch(key, len(contents), count, least)


def test_exact_where_all_is_known() -> None:
    one, other = set(range(0, 600, 2)), set(range(0, 600, 3))
    assert similar.common(sketch(one), sketch(other)) == pytest.approx(100)
    assert similar.common(sketch(one), sketch(one)) == pytest.approx(300)
    assert similar.common(sketch(one), sketch(set())) == 0
    assert similar.common(sketch(set()), sketch(set())) == 0
    assert similar.common(sketch({1, 3}), sketch({2, 4})) == 0


@pytest.mark.parametrize("both", [0, 3_000, 30_000, 58_000])
def test_estimate(both: int) -> None:
    """Of many tries the mean is right, and each is as near as chance has it."""
    chance = random.Random(both)
    errors = []
    for _ in range(20):
        hashes = chance.sample(range(1 << 32), 120_000 - both)
        one, other = set(hashes[:60_000]), set(hashes[60_000 - both :])
        errors.append(similar.common(sketch(one), sketch(other)) - both)
    # of those of a sketch so many are in both
    sigma = (both * 60_000 / WHOLE) ** 0.5
    assert abs(sum(errors) / 20) <= 4 * sigma / 20**0.5
    assert max(map(abs, errors)) <= 4 * sigma


def test_one_small_one_large() -> None:
    """All of the small one is known, and a sample of the large one."""
    chance = random.Random(1)
    large = set(chance.sample(range(1 << 32), 100_000))
    small = set(sorted(large)[:: 100_000 // 500][:500])
    found, strange = similar.pairs(
        [Known("small", None, sketch(small)), Known("large", "h", sketch(large))]
    )
    assert strange == 0
    # never more than the smaller one has
    assert 0 < found[0].shared <= 500 * PAGE and found[0].share <= 1


def test_order_and_keys() -> None:
    guests = [
        Known("a", None, sketch({1, 2, 3})),
        Known("b", None, sketch({2, 3, 4})),
        Known("c", "there", sketch({1, 2, 3, 9})),
        Known("d", None, sketch({1, 2, 3}, key=8)),
    ]
    found, strange = similar.pairs(guests)
    assert [(p.one, p.other, p.shared) for p in found] == [
        ("a", "c", 3 * PAGE),
        ("a", "b", 2 * PAGE),
        ("b", "c", 2 * PAGE),
    ]
    assert found[0].other_host == "there" and found[0].share == 1
    assert strange == 3


GIVEN = {"key": 2**64 - 1, "pages": 20, "contents": 12, "least": [0, 5, 2**32 - 1]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"least": [5, 5]},
        {"least": [5, 4]},
        {"least": [-1, 4]},
        {"least": [4, 2**32]},
        {"least": list(range(WHOLE + 1))},
        {"least": None},
        {"least": ["x"]},
        {"contents": 21},
        {"contents": -1},
        {"key": None},
        {"key": float("inf")},
        {"least": [0.5]},
        {"pages": 1 << 60},
    ],
    ids=str,
)
def test_not_a_sketch(wrong: dict[str, Any], tmp_path: Path) -> None:
    assert similar.sketch_of(GIVEN).contents == 12
    with pytest.raises((ValueError, TypeError, KeyError)):
        similar.sketch_of(GIVEN | wrong)
    path = tmp_path / "there.json"
    path.write_text(json.dumps({"guests": [{"name": "x", "sketch": GIVEN | wrong}]}))
    with pytest.raises(Failure, match="there.json"):
        list(similar.of_file(str(path)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"guests": 3}', "\x00", "[" * 9999])
def test_not_a_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "there.json"
    path.write_text(text)
    with pytest.raises(Failure, match="there.json"):
        list(similar.of_file(str(path)))
    with pytest.raises(Failure, match="cannot read"):
        list(similar.of_file(str(tmp_path)))


def answers(name: str, least: list[int]) -> dict[str, Any]:
    return {
        "query-name": {"name": name},
        "query-ksm-stats": stats(BACKEND),
        "query-ksm-sketches": [
            {"key": 7, "pages": 100, "contents": len(least), "least": least}
        ],
    }


def test_program(tmp_path: Path) -> None:
    with (
        server(tmp_path / "a", good(answers("one", [1, 2, 3])), clients=9) as a,
        server(tmp_path / "b", good(answers("two", [2, 3, 4])), clients=9) as b,
    ):
        words = [PROGRAM, "--no-scan", "--qmp", a, "--qmp", b]
        out = run(words, "--similar")
        assert "one" in out and "two" in out and "8.0K" in out and "66.7 %" in out
        there = tmp_path / "there.json"
        there.write_text(run(words, "--sketch", "--json"))
        found = json.loads(run(words, "--similar", "--json", "--with", str(there)))
        assert len(found["pairs"]) == 6 and found["strange"] == 0
        assert found["pairs"][0] == {
            "one": "one",
            "other": "one",
            "one_host": None,
            "other_host": str(there),
            "shared": 3 * PAGE,
            "share": 1.0,
        }
        # not asked for, not asked
        plain = json.loads(run(words, "--json"))
        assert [guest["sketch"] for guest in plain["guests"]] == [None, None]
        run(words, "--with", str(there), code=2)
        run(words, "--sketch", code=2)
        run(words, "--similar", "--interval", "1", code=2)


def test_guests_without(tmp_path: Path) -> None:
    """A QEMU that does not know the command, or has nothing to say."""
    old = {"query-name": {"name": "old"}, "query-ksm-stats": stats(BACKEND)}
    with server(tmp_path / "a", good(old), clients=9) as a:
        words = [PROGRAM, "--no-scan", "--qmp", a]
        (guest,) = json.loads(run(words, "--sketch", "--json"))["guests"]
        assert guest["state"] == "active" and guest["sketch"] is None
        assert "no two guests" in run(words, "--similar")
    none = old | {"query-ksm-sketches": []}
    with server(tmp_path / "b", good(none), clients=9) as b:
        words = [PROGRAM, "--no-scan", "--qmp", b, "--sketch", "--json"]
        assert json.loads(run(words))["guests"][0]["sketch"] is None
    odd = old | {"query-ksm-sketches": [{"key": "?"}]}
    with server(tmp_path / "c", good(odd), clients=9) as c:
        words = [PROGRAM, "--no-scan", "--qmp", c, "--sketch", "--json"]
        (guest,) = json.loads(run(words))["guests"]
        # its figures are none the worse
        assert guest["state"] == "active" and guest["saved"]["own"]
        assert guest["sketch"] is None
