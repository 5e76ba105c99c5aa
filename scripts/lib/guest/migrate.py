# SPDX-License-Identifier: GPL-2.0-or-later
"""Every way in which a guest gets from one QEMU to another.

Each ends with the source stopped and the destination not yet running, so
that their RAM can be compared (ram.py).  The destination is started
with `-incoming defer` and `-S`.  With postcopy, too: a destination that is
not to run takes all the pages nevertheless, and none of them changes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from guest.qemu import Guest, GuestError, adopt

#: On any machine, a migration that takes longer has failed.
PATIENCE_S = 300.0


@dataclass
class Pace:
    """How fast RAM is sent (bytes a second), at first and to its end."""

    first: int = 64 << 20
    end: int = 1 << 30
    #: so slow that it is not over before it is cancelled
    slow: int = 16 << 20
    #: ms for which the guest may be stopped; as much as is sent at the end
    downtime: int = 50
    #: rounds over what was written meanwhile, before it is let go faster
    rounds: int = 2


def _capabilities(guests: tuple[Guest, ...], *names: str) -> None:
    """Turns these on, and off all others of an earlier migration."""
    for guest in guests:
        guest.qmp(
            "migrate-set-capabilities",
            capabilities=[
                {"capability": name, "state": name in names}
                for name in ("multifd", "postcopy-ram", "mapped-ram")
            ],
        )


def _pace(guest: Guest, bandwidth: int, downtime: int) -> None:
    guest.qmp(
        "migrate-set-parameters", max_bandwidth=bandwidth, downtime_limit=downtime
    )


def _status(guest: Guest) -> str:
    info = guest.qmp("query-migrate")
    status = str(info.get("status", ""))
    if status == "failed":
        raise GuestError(f"{guest.spec.name}: migration failed: {info}")
    return status


def _wait_status(guest: Guest, *wanted: str) -> None:
    guest.wait_for(
        f"migration that is {' or '.join(wanted)}",
        lambda: _status(guest) in wanted,
        PATIENCE_S,
        step=0.05,
    )


def _wait_rounds(guest: Guest, rounds: int) -> None:
    """Until RAM was gone through so often, or the migration is over."""

    def done() -> bool:
        info = guest.qmp("query-migrate")
        if info.get("status") not in ("setup", "active"):
            return True
        return int(info.get("ram", {}).get("dirty-sync-count", 0)) > rounds

    # a guest that writes little lets it end before; one that writes much may
    # keep it in its first round for ever
    with suppress(GuestError):
        guest.wait_for("rounds of a migration", done, 20, step=0.05)


def arrived(target: Guest) -> None:
    """Until all is there, in a guest that does not run yet."""
    _wait_status(target, "completed")
    target.wait_for(
        "guest that has arrived",
        lambda: target.qmp("query-status")["status"] != "inmigrate",
        PATIENCE_S,
        step=0.05,
    )
    assert not target.qmp("query-status")["running"]


def _over_socket(
    source: Guest, target: Guest, pace: Pace, postcopy: bool = False
) -> None:
    with tempfile.TemporaryDirectory(prefix="qemu-ksm-") as directory:
        uri = f"unix:{directory}/migration"
        target.qmp("migrate-incoming", uri=uri)
        _pace(source, pace.first, pace.downtime)
        source.qmp("migrate", uri=uri)
        _wait_rounds(source, pace.rounds)
        if postcopy and _status(source) == "active":
            source.qmp("migrate-start-postcopy")
        _pace(source, pace.end, 2000)
        _wait_status(source, "completed")
        arrived(target)


def precopy(source: Guest, target: Guest, pace: Pace) -> None:
    _capabilities((source, target))
    _over_socket(source, target, pace)


def multifd(source: Guest, target: Guest, pace: Pace) -> None:
    _capabilities((source, target), "multifd")
    _over_socket(source, target, pace)


def postcopy(source: Guest, target: Guest, pace: Pace) -> None:
    _capabilities((source, target), "postcopy-ram")
    _over_socket(source, target, pace, postcopy=True)


def mapped_ram(source: Guest, target: Guest, pace: Pace) -> None:
    """Into a file, in which each page has its place, and out of it."""
    _capabilities((source, target), "mapped-ram")
    with tempfile.TemporaryDirectory(prefix="qemu-ksm-") as directory:
        uri = f"file:{directory}/ram"
        _pace(source, pace.first, pace.downtime)
        source.qmp("migrate", uri=uri)
        _wait_rounds(source, pace.rounds)
        _pace(source, pace.end, 2000)
        _wait_status(source, "completed")
        target.qmp("migrate-incoming", uri=uri)
        arrived(target)


def _cancelled(source: Guest, pace: Pace, stop: bool = False) -> None:
    """Sends some of RAM to /dev/null, and cancels that."""
    _pace(source, pace.slow, 1)
    source.qmp("migrate", uri="exec:cat >/dev/null")
    _wait_rounds(source, 0)
    time.sleep(0.5)
    if stop:
        source.qmp("stop")
    source.qmp("migrate_cancel")
    _wait_status(source, "cancelled")


def again(source: Guest, target: Guest, pace: Pace) -> None:
    """Cancelled, with the guest running on, and begun anew at once."""
    _capabilities((source, target))
    _cancelled(source, pace)
    _over_socket(source, target, pace)


def again_stopped(source: Guest, target: Guest, pace: Pace) -> None:
    """Cancelled while the guest is stopped: the log goes on then.

    So it is on when the next migration begins, which runs when the guest does.
    """
    _capabilities((source, target))
    _cancelled(source, pace, stop=True)
    with tempfile.TemporaryDirectory(prefix="qemu-ksm-") as directory:
        uri = f"unix:{directory}/migration"
        target.qmp("migrate-incoming", uri=uri)
        source.qmp("migrate", uri=uri)
        _wait_status(source, "active")
        source.qmp("cont")
        _pace(source, pace.first, pace.downtime)
        _wait_rounds(source, pace.rounds)
        _pace(source, pace.end, 2000)
        _wait_status(source, "completed")
        arrived(target)


WAYS: dict[str, Callable[[Guest, Guest, Pace], None]] = {
    "precopy": precopy,
    "postcopy": postcopy,
    "multifd": multifd,
    "mapped-ram": mapped_ram,
    "again": again,
    "again-stopped": again_stopped,
}


def travel(source: Guest, target: Guest, way: str, pace: Pace | None = None) -> None:
    """Has the guest arrive in target, where it does not run yet."""
    WAYS[way](source, target, pace or Pace())
    adopt(source, target)
