# SPDX-License-Identifier: GPL-2.0-or-later
"""Nobody waits for a job that hangs."""

from __future__ import annotations

import threading
import time

import pytest

from top.crew import Crew


def test_one_hangs() -> None:
    crew, end, begun = Crew(), threading.Event(), []

    def hang() -> str:
        begun.append(1)
        end.wait(10)
        return "late"

    jobs = {"a": lambda: "done", "b": hang, "c": lambda: "too"}
    begin = time.monotonic()
    assert crew.run(jobs, 0.2) == {"a": "done", "c": "too"}
    # not begun again while it hangs, and what it says late is nobody's
    assert crew.run(jobs, 0.2) == {"a": "done", "c": "too"}
    assert time.monotonic() - begin < 1 and len(begun) == 1
    end.set()
    time.sleep(0.1)
    assert crew.run(jobs, 1) == {"a": "done", "b": "late", "c": "too"}
    assert len(begun) == 2


def test_many() -> None:
    """Beside each other, not one after the other."""
    begin = time.monotonic()
    jobs = {n: lambda n=n: time.sleep(0.1) or n for n in range(200)}
    assert Crew().run(jobs, 5) == {n: n for n in range(200)}
    assert time.monotonic() - begin < 3


def test_an_error_is_the_callers() -> None:
    def fail() -> None:
        raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        Crew().run({1: fail}, 1)
