# SPDX-License-Identifier: GPL-2.0-or-later
"""Puts KSM's knobs back when the program that changed them was killed.

`KsmKnobs` restores them however its `with` ends, and heals what a killed
holder left when the next one comes.  After a kill -9 nobody may come for
weeks, though, and ksmd would run on: so a small process of its own waits for
the end of its parent and heals at once.  Leaves to others: the knobs
(ksmsys.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from host import ksmsys
from host.paths import TOP


@contextmanager
def guard() -> Iterator[None]:
    """Enter it before KsmKnobs, so that it ends after it."""
    reader, writer = os.pipe()
    try:
        # a session of its own: neither Ctrl-C nor a killed process group
        # reaches it
        process = subprocess.Popen(
            [sys.executable, TOP / "scripts/lib/launch.py", "host.ksm_guard"],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(reader)
    try:
        yield
    finally:
        os.close(writer)
        process.wait()


def main() -> int:
    while os.read(0, 1):
        pass
    if ksmsys.SAVED.exists():
        try:
            # a holder of the lock has healed them when it took it
            with ksmsys.KsmKnobs(timeout=5):
                pass
        except (ksmsys.KsmUnavailable, OSError) as error:
            print(f"KSM's knobs could not be restored: {error}", file=sys.stderr)
    return 0
