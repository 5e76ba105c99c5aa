# SPDX-License-Identifier: GPL-2.0-or-later
"""Which guests are shown, and in which order."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from decimal import Decimal
from fnmatch import fnmatchcase

from host.exits import WrongUse
from top.model import Guest

Value = str | float | None

FIELDS: dict[str, Callable[[Guest], Value]] = {
    "name": lambda g: g.name,
    "pid": lambda g: g.pid,
    "state": lambda g: g.state,
    "scope": lambda g: g.scope,
    "group": lambda g: g.group.name if g.group else None,
    "reason": lambda g: g.reasons[0].kind if g.reasons else None,
    "size": lambda g: g.size,
    "resident": lambda g: g.resident,
    "saved": lambda g: g.saved.total,
    "saved-own": lambda g: g.saved.own,
    "saved-group": lambda g: g.saved.group,
    "saved-kernel": lambda g: g.saved.kernel,
    "cpu": lambda g: g.cost.cpu_seconds,
    "cpu-share": lambda g: g.cost.cpu_share,
    "metadata": lambda g: g.cost.metadata,
    "page-tables": lambda g: g.cost.page_tables,
    "profit": lambda g: g.profit,
    "stall": lambda g: g.stall.p99 if g.stall else None,
}
TEXTS = ("name", "state", "scope", "group", "reason")
UNITS = {
    "": Decimal(1),
    **{unit: Decimal(1 << (10 * n)) for n, unit in enumerate("kmgt", 1)},
    **{"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")},
    "%": Decimal("1e-2"),
}
TESTS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
Filter = Callable[[Guest], bool]


def number(text: str) -> float:
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([a-z%]*)", text.lower())
    if not match or match[2] not in UNITS:
        raise WrongUse(f"'{text}' is no number (as 100M, 0.5, 2ms)")
    # 100us is 0.0001, not a bit less
    return float(Decimal(match[1]) * UNITS[match[2]])


def parse_filter(text: str) -> Filter:
    """FIELD=VALUE and the like.  What is not known is not equal to anything."""
    match = re.fullmatch(r"([a-z-]+)\s*(!=|<=|>=|=|<|>)\s*(.*)", text)
    if not match or match[1] not in FIELDS:
        raise WrongUse(
            f"--filter '{text}' is not FIELD=VALUE (or != < <= > >=) with one of "
            f"the fields {', '.join(FIELDS)}"
        )
    field, test, wanted = FIELDS[match[1]], match[2], match[3]
    if match[1] in TEXTS:
        if test not in ("=", "!="):
            raise WrongUse(f"--filter '{text}': {match[1]} can be = or != only")
        same = test == "="
        return lambda guest: fnmatchcase(str(field(guest) or ""), wanted) == same
    value = number(wanted)

    def fits(guest: Guest) -> bool:
        found = field(guest)
        return test == "!=" if found is None else bool(TESTS[test](found, value))

    return fits


def name_filter(patterns: list[str]) -> Filter:
    return lambda guest: any(fnmatchcase(guest.name, each) for each in patterns)


def choose(
    guests: list[Guest], filters: list[Filter], sort: str, *, reverse: bool
) -> list[Guest]:
    """Texts from a to z, numbers from the largest; what is not known is last."""
    field = FIELDS[sort]
    shown = [guest for guest in guests if all(fits(guest) for fits in filters)]
    known = [guest for guest in shown if field(guest) is not None]
    # by name where the field is the same
    known.sort(key=lambda guest: guest.name)
    down = (sort not in TEXTS) != reverse
    known.sort(key=field, reverse=down)  # type: ignore[arg-type]
    return known + [guest for guest in shown if field(guest) is None]
