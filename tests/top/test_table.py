# SPDX-License-Identifier: GPL-2.0-or-later
"""The view for people."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from test_metrics import snapshot

from top import table, units
from top.model import Snapshot


def drawn(found: Snapshot, width: int, height: int = 50, **how: bool) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, **how)  # type: ignore[arg-type]
    whole = not how.get("force_terminal", False)
    console.print(table.view(console, found, found.guests, ["a note"], whole=whole))
    return file.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return line.split()


def test_whole() -> None:
    lines = drawn(snapshot(), 1000)
    head = next(line for line in lines if line.startswith("guest"))
    row = next(line for line in lines if line.startswith("one"))
    for name, text in (
        ("resident", "381M"),
        ("saved", "16M"),
        ("itself", "11M"),
        ("in group", "5.1M"),
        ("data", "2.0M"),
        ("tables", "303K"),
        ("profit", "13M"),
        ("stall p99", "870us"),
    ):
        # figures end where their heads end
        end = head.index(name) + len(name)
        assert row[:end].split()[-1] == text, name
    assert "volatile (40K): is written too often" in row
    total = next(line for line in lines if line.startswith("all guests"))
    assert "2 of 3" in total and "763M" in total
    assert any(cells(line)[:3] == ["tenant", "up", "1"] for line in lines)
    assert any("no daemon runs" in line for line in lines)
    assert "ksmd: runs, 1.5s since boot, saved 4.0K, profit -640B" in "\n".join(lines)
    assert lines[-1].strip() == "a note"


@pytest.mark.parametrize("width", [60, 80, 100, 132, 200])
def test_narrow(width: int) -> None:
    """No line is wider than the terminal, and what matters most is there."""
    lines = drawn(snapshot(), width)
    assert max(len(line) for line in lines) <= width
    head = next(line for line in lines if line.startswith("guest"))
    for name in ("state", "resident", "saved", "profit"):
        assert name in head, head
    # not cut
    row = next(line for line in lines if line.startswith("one"))
    assert "381M" in row and "13M" in row


def test_low() -> None:
    """As many guests as there is room for."""
    found = snapshot()
    lines = drawn(found, 100, height=12, force_terminal=True)
    assert len(lines) <= 12
    assert any("more" in line for line in lines)


def test_control_characters() -> None:
    """A guest's name does not rule the terminal."""
    found = snapshot()
    found.guests[1].name = "\x1b[2J\x07[red]x"
    text = "\n".join(drawn(found, 200))
    assert "\x1b" not in text and "\x07" not in text
    assert "?[2J?[red]x" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (1023, "1023B"),
        (1024, "1.0K"),
        (-5 << 20, "-5.0M"),
        ((1 << 20) - 1, "1.0M"),
        (123 << 30, "123G"),
        (1 << 50, "1.0P"),
        (10.2 * 1024, "10K"),
    ],
)
def test_size(value: float | None, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (1.5e-7, "0.15us"),
        (0.00087, "870us"),
        (0.0009999, "1ms"),
        (0.0024, "2.4ms"),
        (1.8, "1.8s"),
        (1234.5, "1234s"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert units.seconds(value) == text
