# SPDX-License-Identifier: GPL-2.0-or-later
"""Many questions at once, none of which may keep the others waiting.

A file of /proc can block for as long as the process holds a lock, a call of
libvirt for half a minute: so each question has a thread.  One that is late is
left alone, and not asked again before it has come back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

T = TypeVar("T")


class Crew:
    def __init__(self) -> None:
        self._late: dict[Hashable, threading.Thread] = {}

    def run(
        self, jobs: Mapping[Hashable, Callable[[], T]], seconds: float
    ) -> dict[Hashable, T]:
        """The results of those that were done in time."""
        results: dict[Hashable, T] = {}
        failures: list[BaseException] = []

        def work(key: Hashable, job: Callable[[], T]) -> None:
            try:
                results[key] = job()
            except BaseException as error:  # raised below, in the caller
                failures.append(error)

        started = {}
        for key, job in jobs.items():
            late = self._late.pop(key, None)
            if late is not None and late.is_alive():
                self._late[key] = late
                continue
            # nobody waits for it at the end of the program
            thread = threading.Thread(target=work, args=(key, job), daemon=True)
            thread.start()
            started[key] = thread
        until = time.monotonic() + seconds
        for key, thread in started.items():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                self._late[key] = thread
        if failures:
            raise failures[0]
        # one that is late may still write
        return {key: results[key] for key in started if key in results}
