# SPDX-License-Identifier: GPL-2.0-or-later
"""Bench sketch: what ksm-top --similar estimates, beside a count of every page.

Guests of one group: two of Debian 12 and one of Debian 13.  When merging gains
nothing more all are stopped, their sketches are taken, and every page is read.
Leaves to others: the estimate (top/similar.py), reading pages (guest/content.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import combinations

from bench.harness import Metrics, Session
from guest import content, moment
from guest.content import PAGE, ZERO
from guest.qemu import Guest, GuestError, GuestSpec, guest_image, need_qemu, probe_scope
from host.poold import Poold
from top import similar
from top.model import Sketch

RELEASES = ("bookworm", "bookworm", "trixie")
#: pages that were written since, and are not in the sketch
FEW = 500
PER_MIB = 256


def unknown(guest: Guest) -> int:
    """Pages that the engine has not hashed as they are now."""
    return sum(
        int(each.get("bytes", 0)) // PAGE
        for each in guest.backend_stats()["reasons"]
        if each["kind"] in ("volatile", "not-scanned")
    )


def is_hashed(guest: Guest) -> bool:
    return unknown(guest) < FEW


def sketch_of(guest: Guest) -> Sketch:
    (one,) = guest.qmp("query-ksm-sketches")
    return similar.sketch_of(one)


def contents(guest: Guest) -> set[int]:
    """Which contents there are, merged or not, but for zeroes."""
    there = moment.pages(guest.pid, guest.ram()).there
    return set(content.read(guest.pid, guest.ram(), there).pages.values()) - {ZERO}


def sketch(session: Session) -> Metrics:
    """Two guests' common content: the sketches' estimate, and a count."""
    need_qemu()
    reason = probe_scope(guest_image(), "vm")
    if reason:
        session.note(f"scope=group cannot be had here: {reason.splitlines()[0]}")
        return {}
    memory = 256 if session.quick else 512
    out: Metrics = {}
    with ExitStack() as stack:
        daemon = stack.enter_context(Poold())
        guests = []
        for i, release in enumerate(RELEASES):
            spec = GuestSpec(
                name=f"guest{i + 1}",
                memory_mib=memory,
                properties={
                    "scope": "group",
                    "group": "sketch",
                    "group-socket": str(daemon.socket),
                },
                seed=i + 1,
                load=0,
            )
            guest = stack.enter_context(Guest(spec, guest_image(release)))
            guest.ram()
            guests.append(guest)
        for guest in guests:
            session.say(f"sketch: {guest.spec.name} boots")
            guest.wait_ready()
        for guest in guests:
            session.say(f"sketch: all of {guest.spec.name} is hashed")
            guest.wait_for("all is hashed", partial(is_hashed, guest), 300)
        for guest in guests:
            guest.qmp("stop")
        sketches = [sketch_of(guest) for guest in guests]
        moment.set_run(guests, False)
        session.say("sketch: every page is read")
        found = [contents(guest) for guest in guests]
        moment.set_run(guests, True)
        for guest in guests:
            guest.qmp("cont")
            if guest.verify():
                raise GuestError(f"a guest's data is damaged: {guest.failures[:3]}")
    for i, j in combinations(range(len(guests)), 2):
        both = len(found[i] & found[j])
        estimate = similar.common(sketches[i], sketches[j])
        name = f"{i + 1}_{j + 1}"
        out[f"contents_mib_{name}"] = len(found[i] | found[j]) / PER_MIB
        out[f"common_mib_{name}"] = both / PER_MIB
        out[f"estimate_mib_{name}"] = estimate / PER_MIB
        out[f"error_percent_{name}"] = 100 * (estimate / both - 1) if both else 0.0
    return out
