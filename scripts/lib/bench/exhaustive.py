# SPDX-License-Identifier: GPL-2.0-or-later
"""Bench exhaustive: what a group of running guests saves of what it could.

Debian guests that verify their memory meanwhile, merged until nothing more is
gained; then all are stopped and every page is read.  Leaves to others: the
count, and what it counts (guest/moment.py).
"""

from __future__ import annotations

from bench.harness import Metrics, Session
from guest import moment
from guest.moment import Moment
from guest.qemu import GuestError, guest_image, need_qemu, probe_scope
from guest.run import Run, Sample

PER_MIB = 256


def metrics_of(name: str, found: Moment) -> Metrics:
    out = {
        "achievable_mib": found.achievable / PER_MIB,
        "saved_mib": found.saved / PER_MIB,
        "stats_saved_mib": found.stats_saved / PER_MIB,
        "given_back_mib": found.given_back / PER_MIB,
        "pooled_mib": found.pooled / PER_MIB,
        "pool_mib": found.pool / PER_MIB,
        "own_mib": found.own / PER_MIB,
        "left_mib": found.left / PER_MIB,
        "left_short_mib": found.left_short / PER_MIB,
        "saved_percent": 100 * found.share,
    }
    out |= {f"reason_{k}_mib": n / PER_MIB for k, n in found.reasons.items() if n}
    return {f"{key}_{name}": value for key, value in out.items()}


def exhaustive(session: Session) -> Metrics:
    """A group's running guests: what is saved of what could be."""
    need_qemu()
    image = guest_image()
    reason = probe_scope(image, "vm")
    if reason:
        session.note(f"scope=group cannot be had here: {reason.splitlines()[0]}")
        return {}
    memory = 256 if session.quick else 512
    out: Metrics = {"guest_mib": float(memory)}
    for number in (2,) if session.quick else (2, 3, 4):

        def show(sample: Sample, number: int = number) -> None:
            session.say(
                f"exhaustive: {number} x {memory} MiB, {sample.seconds:.0f} s of merging"
            )

        with Run("group", number, memory, image) as run:
            run.boot(show)
            run.start()
            run.merge(300, show)
            assert run.poold is not None
            session.say(f"exhaustive: {number} x {memory} MiB, every page is read")
            found = moment.look(run.guests, run.poold)
            run.verify(show)
        if not run.result.data_intact:
            raise GuestError(f"a guest's data is damaged: {run.result.errors[:3]}")
        if not run.result.settled:
            session.note(f"exhaustive: {number} guests were still gaining after 300 s")
        out |= metrics_of(str(number), found)
    return out
