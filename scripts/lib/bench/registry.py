# SPDX-License-Identifier: GPL-2.0-or-later
"""Every bench by its name, in the order in which they are run.

No bench imports this.
"""

from __future__ import annotations

from collections.abc import Callable

from bench import (
    ask,
    balloon_guest,
    density,
    dirty,
    exhaustive,
    guests,
    idle,
    sketch,
    volatile,
    workers,
)
from bench.harness import Metrics, Session

BENCHES: dict[str, Callable[[Session], Metrics]] = {
    "ksmpages": workers.ksmpages,
    "rescan": workers.rescan,
    "smart-scan": workers.smart_scan,
    "fork": workers.fork,
    "stall": workers.stall,
    "unit": workers.unit,
    "images": workers.images,
    "shuffle": workers.shuffle,
    "balloon": workers.balloon,
    "group": workers.group,
    "scale": workers.scale,
    "churn": workers.churn,
    "threads": workers.threads,
    "ask": ask.ask,
    "guests": guests.guests,
    "guest-stall": guests.guest_stall,
    "exhaustive": exhaustive.exhaustive,
    "density": density.density,
    "sketch": sketch.sketch,
    "volatile": volatile.volatile,
    "balloon-guest": balloon_guest.balloon_guest,
    "dirty": dirty.dirty,
    "idle": idle.idle,
}

#: Hours: only when named.
LONG = {"churn"}
