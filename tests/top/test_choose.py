# SPDX-License-Identifier: GPL-2.0-or-later
"""Sorting and filtering."""

from __future__ import annotations

import pytest

from host.exits import WrongUse
from top import choose
from top.model import Guest, Stall


def guest(name: str, profit: int | None, p99: float | None = None) -> Guest:
    stall = None if p99 is None else Stall(1, p99, p99, p99)
    return Guest(name, state="active", profit=profit, stall=stall)


GUESTS = [
    guest("web1", 200 << 20),
    guest("web2", -5, 0.004),
    guest("db", None, 0.0001),
    guest("web3", 200 << 20),
]


def names(*filters: str, sort: str = "name", reverse: bool = False) -> str:
    parsed = [choose.parse_filter(each) for each in filters]
    found = choose.choose(GUESTS, parsed, sort, reverse=reverse)
    return " ".join(each.name for each in found)


def test_order() -> None:
    assert names() == "db web1 web2 web3"
    assert names(reverse=True) == "web3 web2 web1 db"
    # the largest first, equal ones by name, what is not known last
    assert names(sort="profit") == "web1 web3 web2 db"
    assert names(sort="profit", reverse=True) == "web2 web1 web3 db"
    assert names(sort="stall") == "web2 db web1 web3"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("profit<0", "web2"),
        ("profit >= 200M", "web1 web3"),
        ("profit!=-5", "db web1 web3"),
        ("stall>1ms", "web2"),
        ("stall<=100us", "db"),
        ("name=web*", "web1 web2 web3"),
        ("name!=web*", "db"),
        ("state=inhibited", ""),
        ("scope=", "db web1 web2 web3"),
    ],
)
def test_filter(text: str, expected: str) -> None:
    assert names(text) == expected


def test_several() -> None:
    assert names("profit<0", "stall<1ms") == ""
    assert names("profit<0", "stall>1ms") == "web2"


def test_names() -> None:
    fits = choose.name_filter(["db", "*3"])
    assert [each.name for each in GUESTS if fits(each)] == ["db", "web3"]


@pytest.mark.parametrize(
    "text", ["profit", "colour=red", "profit<much", "name<web1", "profit=3X", ""]
)
def test_wrong(text: str) -> None:
    with pytest.raises(WrongUse):
        choose.parse_filter(text)


def test_every_field() -> None:
    """Of a guest of which nothing is known, too."""
    for field in choose.FIELDS:
        assert len(choose.choose([Guest("a"), *GUESTS], [], field, reverse=False)) == 5
