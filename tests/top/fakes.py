# SPDX-License-Identifier: GPL-2.0-or-later
"""QMP servers that misbehave, and what a good one says."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GREETING = {"QMP": {"version": {}, "capabilities": ["oob"]}}

REASONS = [
    {"kind": "volatile", "text": "is written too often", "bytes": 10 * 4096},
    {"kind": "vma-limit", "text": "no more mappings", "bytes": 256 * 4096},
]

#: Of a guest with scope=group; every number is told from every other.
BACKEND = {
    "id": "ram0",
    "scope": "group",
    "state": "active",
    "reasons": REASONS,
    "size": 536870912,
    "resident": 400_000_000,
    "used": 399_000_000,
    "lazy-free": 1_000_000,
    "merged-bytes": 5000 * 4096,
    "shared-bytes": 3000 * 4096,
    "saved-bytes": 2000 * 4096,
    "zero-bytes": 700 * 4096,
    "metadata": 2_100_000,
    "page-tables": 310_000,
    # with a guess at what ksmd saves: not to be added to what it does save
    "profit": 20_000_000,
    "scan-time": 1_500_000_000,
    "merge-time": 250_000_000,
    "log-time": 50_000_000,
    "stall": {"count": 321, "p50": 40_000, "p99": 870_000, "max": 2_400_000},
    "group": {
        "name": "tenant",
        "connected": True,
        "generation": 7,
        "members": 2,
        "pool-bytes": 13_000_000,
        "pool-limit": 1 << 30,
        "held-bytes": 2900 * 4096,
        "share-bytes": 1600 * 4096,
        "saved-bytes": 1300 * 4096,
    },
}

#: What an older QEMU has instead, in pages.
OLDER = {
    "bytes": "pages",
    "merged-bytes": "pages-merged",
    "shared-bytes": "pages-shared",
    "saved-bytes": "pages-sharing",
    "zero-bytes": "zero-pages",
}


def older(answer: Any) -> Any:
    """The same from a QEMU that has sizes in pages only."""
    if isinstance(answer, list):
        return [older(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    names = dict(OLDER)
    if "held-bytes" in answer:
        names |= {f"{name}-bytes": name for name in ("held", "share", "saved")}
    return {
        names.get(name, name): value // 4096 if name in names else older(value)
        for name, value in answer.items()
    }


def stats(
    *backends: dict[str, Any], process: dict[str, int] | None = None
) -> dict[str, Any]:
    nothing = {"rmap-items": 0, "merged-bytes": 0, "zero-bytes": 0, "profit": 0}
    host = {"state": "inhibited", "reasons": []}
    return {
        "host": host,
        "process": nothing if process is None else process,
        "backends": list(backends),
    }


Serve = Callable[[socket.socket], None]


@contextmanager
def server(path: Path | str, serve: Serve, clients: int = 8) -> Iterator[str]:
    """Calls serve() for one client after the other, as QMP does."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)

    def run() -> None:
        for _ in range(clients):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    serve(connection)
                except OSError:
                    pass

    threading.Thread(target=run, daemon=True).start()
    try:
        yield str(path)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def good(answers: dict[str, Any], *, pretty: bool = False, pause: float = 0) -> Serve:
    """Answers what it knows; an event comes before each answer."""

    def serve(connection: socket.socket) -> None:
        def say(message: dict[str, Any]) -> None:
            text = json.dumps(message, indent=4 if pretty else None)
            data = text.encode() + b"\r\n"
            if not pause:
                connection.sendall(data)
                return
            # in pieces, none of them whole
            for at in range(0, len(data), 100):
                connection.sendall(data[at : at + 100])
                time.sleep(pause)

        say(GREETING)
        for line in connection.makefile():
            name = json.loads(line)["execute"]
            say({"event": "RTC_CHANGE", "data": {}, "timestamp": {"seconds": 1}})
            if name == "qmp_capabilities":
                say({"return": {}})
            elif name in answers:
                say({"return": answers[name]})
            else:
                error = {"class": "CommandNotFound", "desc": f"no {name}"}
                say({"error": error})

    return serve
