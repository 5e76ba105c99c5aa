# SPDX-License-Identifier: GPL-2.0-or-later
"""Numbers for people, in six characters; - is not known."""

from __future__ import annotations

UNKNOWN = "-"


def size(count: float | None) -> str:
    if count is None:
        return UNKNOWN
    value, sign = abs(count), "-" if count < 0 else ""
    unit = "B"
    for larger in "KMGTP":
        if value < 1023.5:
            break
        value, unit = value / 1024, larger
    if value == 0:
        return "0"
    decimals = 1 if unit != "B" and value < 9.95 else 0
    return f"{sign}{value:.{decimals}f}{unit}"


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    for below, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value < below * 0.9995:
            return f"{value * factor:.3g}{unit}"
    return f"{value:.1f}s" if value < 99.95 else f"{value:.0f}s"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share * 100:.1f}"
