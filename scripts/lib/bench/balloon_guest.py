# SPDX-License-Identifier: GPL-2.0-or-later
"""Bench balloon-guest: memory that a Linux guest frees and takes again.

The MADV_FREE table of 2014, asked of guests with free page reporting: how
long does taking the memory again last with each free-policy, without memory
pressure and after a control group reclaimed all lazily free memory?  The
guests take turns, so that a busy host is busy for all.  Leaves to others: the
same question for plain memory (tests/bench/balloon.c).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median

from bench.harness import Metrics, Session
from guest.qemu import Guest, GuestError, GuestSpec, guest_image, need_qemu
from host.cgroup import Group

MIB = 1 << 20
POLICIES = ("eager", "lazy", "auto")
DEVICE = ("-device", "virtio-balloon-pci,free-page-reporting=on")


def used(guest: Guest) -> int:
    return int(guest.backend_stats()["used"])


def free(guest: Guest, mib: int) -> float:
    """Frees memory; seconds until nine tenths of it count on the host."""
    before, start = used(guest), time.monotonic()
    guest.command(f"free {mib}")
    guest.wait_for(
        "freed memory", lambda: before - used(guest) >= 0.9 * mib * MIB, 120, 0.05
    )
    return time.monotonic() - start


def take(guest: Guest, mib: int) -> float:
    start = time.monotonic()
    guest.command(f"alloc {mib} random")
    return time.monotonic() - start


def reclaim(guest: Guest, group: Group, mib: int) -> float:
    """Has the kernel take back what is free; MiB that it got."""
    before = int(guest.backend_stats()["resident"])
    group.reclaim(mib * MIB)
    return (before - int(guest.backend_stats()["resident"])) / MIB


def balloon_guest(session: Session) -> Metrics:
    """Memory a guest frees and takes again, by free-policy."""
    need_qemu()
    image = guest_image()
    rounds, mib = (2, 200) if session.quick else (7, 300)
    seconds: dict[str, list[float]] = {p: [] for p in POLICIES}
    pressed: dict[str, list[float]] = {p: [] for p in POLICIES}
    freed: dict[str, list[float]] = {p: [] for p in POLICIES}
    reclaimed: dict[str, list[float]] = {p: [] for p in POLICIES}
    with ExitStack() as stack:
        guests: dict[str, tuple[Guest, Group | None]] = {}
        for policy in POLICIES:
            group = Group.make_or_none()
            if group:
                stack.callback(group.remove)
            spec = GuestSpec(
                name=policy,
                memory_mib=mib + 212,
                cache_mib=32,
                private_mib=8,
                load=0,
                properties={"scope": "vm", "free-policy": policy},
                extra=DEVICE,
                prefix=group.prefix() if group else (),
            )
            guest = stack.enter_context(Guest(spec, image))
            guest.wait_ready()
            guests[policy] = guest, group
        for guest, _ in guests.values():
            take(guest, mib)
        for i in range(rounds):
            for policy, (guest, group) in guests.items():
                session.say(f"balloon-guest: {policy}, {i + 1} of {rounds}")
                freed[policy].append(free(guest, mib))
                seconds[policy].append(take(guest, mib))
                if group:
                    free(guest, mib)
                    reclaimed[policy].append(reclaim(guest, group, mib))
                    pressed[policy].append(take(guest, mib))
        for guest, _ in guests.values():
            if guest.verify():
                raise GuestError(f"the guest's data is damaged: {guest.failures[:3]}")
    metrics = {}
    for policy in POLICIES:
        metrics[f"{policy}_take_s"] = median(seconds[policy])
        metrics[f"{policy}_freed_s"] = median(freed[policy])
        if pressed[policy]:
            metrics[f"{policy}_take_after_reclaim_s"] = median(pressed[policy])
            metrics[f"{policy}_reclaimed_mib"] = median(reclaimed[policy])
    for policy in ("lazy", "auto"):
        metrics[f"{policy}_ratio"] = (
            metrics["eager_take_s"] / metrics[f"{policy}_take_s"]
        )
    return metrics
